"""One update on every mesh, in pieces and recomputed: the same loss and gradient; and what bfloat16 may change."""

import asyncio
import dataclasses
import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from mallm.algo import losses
from mallm.learn.pack import Packing, Row, pack
from mallm.learn.state import make_state, optimiser
from mallm.learn.update import Knobs, Updater, token_arrays
from mallm.models.config import Architecture
from mallm.models.sharding import make_mesh
from mallm.models.transformer import Transformer
from mallm.rollout.chat import TinyTokenizer
from mallm.rollout.engine import SamplingParams
from mallm.rollout.jax_engine import JaxEngine
from mallm.types import Prompt

ARCH = Architecture(vocab=16, width=16, layers=2, heads=4, kv_heads=2, head_dim=8, ffn=32, tied=False)
SURROGATE = functools.partial(losses.clipped_surrogate, low=0.2, high=0.28, cap=2.0)


def rows() -> list[Row]:
    draw = np.random.default_rng(1)
    ids = lambda n: tuple(draw.integers(0, 16, n).tolist())  # noqa: E731
    return [
        Row(ids(4), (ids(3), ids(5)), ((-2.0,) * 3, (-2.5,) * 5), tuple(draw.normal(size=2).tolist()), (0.9,))
        for _ in range(16)
    ]


def learner(shape, transform, arch=ARCH, dtype=jnp.float32):
    mesh = make_mesh(*shape)
    module = Transformer(arch, dtype)
    state, shardings = make_state(
        jax.random.key(0), module=module, transform=transform, mesh=mesh, entropy_coefficient=0.05,
        keeps_reference=False,
    )  # fmt: skip
    return state, Updater(module=module, objective=SURROGATE, transform=transform, mesh=mesh, shardings=shardings)


def step(shape, *, micro=16, arch=ARCH, dtype=jnp.float32) -> tuple[list[np.ndarray], dict[str, float]]:
    """The gradient, as what plain descent at rate 1 takes away, and the metrics."""
    state, updater = learner(shape, optax.identity(), arch, dtype)
    before = [np.array(leaf) for leaf in jax.tree.leaves(state.params)]
    (micros,) = pack(rows(), Packing(0, micro), 0)
    after, metrics = updater(state, micros, Knobs(1.0))
    moved = [b - np.array(a) for b, a in zip(before, jax.tree.leaves(after.params), strict=True)]
    return moved, {name: float(value) for name, value in metrics.items()}


@pytest.fixture(scope='module')
def alone():
    return step((1, 1, 1))


@pytest.mark.parametrize(
    'shape, micro, remat',
    [
        ((8, 1, 1), 16, False), ((1, 8, 1), 8, True), ((1, 1, 2), 4, False), ((4, 1, 2), 8, True),
        ((2, 2, 2), 16, True), ((4, 2, 1), 8, False), ((2, 4, 1), 16, False), ((1, 4, 2), 8, False),
        ((2, 2, 1), 16, False),
    ],
)  # fmt: skip
def test_loss_and_gradient_are_those_of_one_device_whatever_the_mesh_the_cut_and_remat(shape, micro, remat, alone):
    moved, metrics = step(shape, micro=micro, arch=dataclasses.replace(ARCH, remat=remat))
    assert max(np.abs(m).max() for m in alone[0]) > 1e-3
    for found, wanted in zip(moved, alone[0], strict=True):
        np.testing.assert_allclose(found, wanted, atol=1e-5)
    assert metrics == pytest.approx(alone[1], rel=1e-4)


def test_parameters_after_two_steps_of_adamw_are_those_of_one_device():
    """Adam divides by the size of the gradient, so a parameter that any device counted twice, or missed, shows whole.
    Where the gradient is rounding alone, so is the direction of its step: those few are left to the test above."""
    adam = optimiser(clip=1.0, b1=0.9, b2=0.98, weight_decay=0.1)

    def after(shape):
        state, updater = learner(shape, adam)
        born = [np.array(leaf) for leaf in jax.tree.leaves(state.params)]
        (micros,) = pack(rows(), Packing(0, 16), 0)
        for _ in range(2):
            state, _ = updater(state, micros, Knobs(1e-2))
        return born, [np.array(leaf) for leaf in jax.tree.leaves(state.params)]

    (born, one), (born_spread, spread) = after((1, 1, 1)), after((2, 2, 2))
    clear = 0
    for first, also, a, b, gradient in zip(born, born_spread, one, spread, step((1, 1, 1))[0], strict=True):
        np.testing.assert_array_equal(first, also)
        sure = abs(gradient) > 1e-5
        clear += sure.sum()
        np.testing.assert_allclose(b[sure], a[sure], atol=2e-4)
        assert abs(a - first).max() > 5e-3
    assert clear > 0.9 * sum(leaf.size for leaf in born)


def test_fsdp_gathers_weights_and_never_activations():
    """On (1, 8, 1) nothing that is gathered is larger than the largest weight (two layers of it are 2 x 16 x 32), while
    the activations of 16 groups x 2 answers x 7 tokens x 16 would be 3584 numbers; and none is sent across."""
    state, updater = learner((1, 8, 1), optax.identity())
    (batch,) = pack(rows(), Packing(0, 16), 0)[0]
    zeros = updater._zeros(state.params)
    lowered = updater._gradients.lower(zeros, state, batch, jax.tree.map(np.float32, Knobs(1.0)), None)
    text = lowered.compile().as_text()
    gathered = [
        np.prod([*map(int, dims.split(','))]) for dims in re.findall(r'= \w+\[([\d,]+)\]\S* all-gather\(', text)
    ]
    assert gathered and max(gathered) <= 2 * 16 * 32
    assert 'all-to-all' not in text


@pytest.mark.parametrize('shape', [(1, 1, 4), (1, 1, 8)])
def test_a_mesh_that_would_cut_through_a_head_is_refused(shape):
    with pytest.raises(ValueError, match=rf'tensor={shape[2]}: 4 query heads and 2 key heads .* divides both'):
        learner(shape, optax.identity())


# --- bfloat16


def test_computing_in_bfloat16_stays_close_and_leaves_parameters_and_moments_in_float32(alone):
    """Bfloat16 keeps 8 bits: about 1 % of a log-probability near -3, and a gradient of nearly the same direction."""
    moved, metrics = step((1, 1, 1), dtype=jnp.bfloat16)
    one, other = (np.concatenate([m.ravel() for m in each]) for each in (moved, alone[0]))
    assert one @ other / np.linalg.norm(one) / np.linalg.norm(other) > 0.999
    assert not np.array_equal(one, other)
    assert metrics['entropy'] == pytest.approx(alone[1]['entropy'], rel=0.01)
    adam = optimiser(clip=1.0, b1=0.9, b2=0.98, weight_decay=0.0)
    state, updater = learner((1, 2, 1), adam, dtype=jnp.bfloat16)
    (micros,) = pack(rows(), Packing(0, 8), 0)
    told = jax.eval_shape(lambda p: token_arrays(Transformer(ARCH, jnp.bfloat16), p, None, micros[0]), state.params)
    assert told.logp.dtype == told.entropy.dtype == jnp.float32
    after, _ = updater(state, micros, Knobs(1e-3))
    kinds = {leaf.dtype for leaf in jax.tree.leaves((after.params, after.moments)) if leaf.ndim}
    assert kinds == {jnp.dtype('float32')}


# --- the sampler on sharded parameters


def test_the_embedded_engine_draws_the_same_answers_from_parameters_that_are_spread_over_a_mesh():
    tokenizer = TinyTokenizer()
    arch = dataclasses.replace(ARCH, vocab=len(tokenizer) + len(tokenizer) % 2)
    prompt = Prompt('plan', (), tokenizer.encode('#. @ $/  #>'))

    def drawn(shape):
        state, _ = learner(shape, optax.identity(), arch)
        engine = JaxEngine(Transformer(arch), tokenizer, jax.random.key(3))
        engine.load('a', state.params, 0)
        return asyncio.run(engine.sample('a', prompt, (1, 2), 4, SamplingParams(6)))

    one, spread = drawn((1, 1, 1)), drawn((2, 2, 2))
    assert [answer.ids for answer in one] == [answer.ids for answer in spread]
    for a, b in zip(one, spread, strict=True):
        np.testing.assert_allclose(a.logps, b.logps, atol=1e-4)
