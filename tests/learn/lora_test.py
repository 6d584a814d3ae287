"""Learning adapters: the gradient is the chain rule's, the base is never touched, and roles do not touch each other."""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import linen as nn

from mallm.algo import losses
from mallm.learn.pack import Batch, Packing, Row, pack
from mallm.learn.pool import Pool
from mallm.learn.state import LearnerState, make_state, optimiser, with_reference
from mallm.learn.update import Knobs, Updater, token_arrays
from mallm.models import lora, sharding
from mallm.models.config import Architecture
from mallm.models.lora import Lora
from mallm.models.transformer import Transformer

KIND = Lora(4, 6.0)
WHOLE = Transformer(Architecture(vocab=16, width=16, layers=2, heads=2, kv_heads=2, head_dim=8, ffn=32))
MODULE = WHOLE.clone(lora=KIND)
LOGP = jax.jit(lambda params, batch: token_arrays(WHOLE, params, None, batch).logp)
SURROGATE = functools.partial(losses.clipped_surrogate, low=0.2, high=0.28, cap=2.0)


class Learner(NamedTuple):
    state: LearnerState
    updater: Updater

    def copy(self) -> LearnerState:
        """On the host, because an update takes the buffers of the state it is given."""
        return jax.tree.map(np.array, self.state)


def learner(module: Transformer, mesh=(1, 1, 1), transform=None) -> Learner:
    """By default plain gradient descent: parameters before minus after, at rate 1, are the gradient."""
    transform, mesh = transform or optax.identity(), sharding.make_mesh(*mesh)
    state, shardings = make_state(
        jax.random.key(0), module=module, transform=transform, mesh=mesh, entropy_coefficient=0.05,
        keeps_reference=True,
    )  # fmt: skip
    return Learner(
        state, Updater(module=module, objective=SURROGATE, transform=transform, mesh=mesh, shardings=shardings)
    )


def base_on(mesh=(1, 1, 1)) -> Any:
    init = lambda key: WHOLE.init(key, jnp.zeros((1, 2), jnp.int32))['params']  # noqa: E731
    placed = sharding.shardings_of(jax.eval_shape(init, jax.random.key(5)), sharding.make_mesh(*mesh))
    return jax.jit(lambda key: nn.unbox(init(key)), out_shardings=placed)(jax.random.key(5))


def moved(adapter: Any) -> Any:
    """The adapter (on the host) with every number away from 0, so that a and b both have a gradient."""
    wave = lambda p: 0.3 * np.cos(np.arange(p.size, dtype=np.float32)).reshape(p.shape)  # noqa: E731
    return jax.tree.map(lambda p: np.asarray(p) + wave(p), adapter)


def micros() -> list[Batch]:
    draw = np.random.default_rng(0)
    rows = [
        Row(
            tuple(draw.integers(0, 16, draw.integers(2, 9)).tolist()),
            tuple(tuple(draw.integers(0, 16, n).tolist()) for n in (3, 5)),
            tuple(tuple(draw.uniform(-4, -2, n).tolist()) for n in (3, 5)),
            tuple(draw.normal(size=2).tolist()),
        )
        for _ in range(4)
    ]
    (one_step,) = pack(rows, Packing(0, 4), 0)
    return one_step


def stamps(tree: Any) -> list[tuple[int, bytes]]:
    """Where each leaf lies, and its bytes."""
    return [(leaf.unsafe_buffer_pointer(), np.asarray(leaf).tobytes()) for leaf in jax.tree.leaves(tree)]


def contents(tree: Any) -> list[bytes]:
    return [np.array(leaf).tobytes() for leaf in jax.tree.leaves(tree)]


@pytest.fixture(scope='module')
def base() -> Any:
    return base_on()


@pytest.fixture(scope='module')
def plain() -> Learner:
    return learner(MODULE)


@pytest.fixture(scope='module')
def adam() -> Learner:
    return learner(MODULE, transform=optimiser(clip=1.0, b1=0.9, b2=0.98, weight_decay=0.01))


def gradient(one: Learner, params: Any, base: Any) -> tuple[Any, dict[str, float]]:
    """The gradient at `params`, by one step of gradient descent with a KL term to half of them."""
    state = one.copy().replace(params=params, reference=half(params))
    after, metrics = one.updater(state, micros(), Knobs(1.0, kl=0.1), base)
    slopes = jax.tree.map(lambda before, now: before - np.asarray(now), params, after.params)
    return slopes, {name: float(value) for name, value in metrics.items()}


def half(params: Any) -> Any:
    return jax.tree.map(lambda p: p * np.float32(0.5), params)


def test_the_gradient_of_an_adapter_is_the_chain_rule_applied_to_that_of_the_merged_weights(base, plain):
    """W' = W + s a b, so dL/da = s dL/dW' b^T and dL/db = s a^T dL/dW'; the learner without adapters gives dL/dW'."""
    adapter = moved(plain.state.params)
    merged, reference = (jax.tree.map(np.array, lora.merge(base, some, KIND)) for some in (adapter, half(adapter)))
    whole = learner(WHOLE)
    state = whole.copy().replace(params=merged, reference=reference)
    after, _ = whole.updater(state, micros(), Knobs(1.0, kl=0.1))
    slopes, _ = gradient(plain, adapter, base)
    for name, slope in slopes['blocks'].items():
        of_whole = merged['blocks'][name] - np.asarray(after.params['blocks'][name])
        a, b = (adapter['blocks'][name][part] for part in 'ab')
        assert np.abs(slope['a']).max() > 1e-3 and np.abs(slope['b']).max() > 1e-3
        np.testing.assert_allclose(slope['a'], KIND.scale * of_whole @ b.swapaxes(1, 2), atol=2e-5)
        np.testing.assert_allclose(slope['b'], KIND.scale * a.swapaxes(1, 2) @ of_whole, atol=2e-5)


def test_two_roles_learn_over_one_base_that_stays_byte_for_byte_where_it_was(base, adam):
    pools = {name: Pool(name, adam.copy()) for name in ('tool', 'plan')}
    before, untouched = stamps(base), contents(pools['plan'].state)
    pools['tool'].learn(adam.updater, [micros()] * 2, Knobs(1e-2, kl=0.1), base)
    assert contents(pools['plan'].state) == untouched, 'the other role, its moments and reference too'
    first = contents(pools['tool'].state)
    pools['plan'].learn(adam.updater, [micros()], Knobs(1e-2, kl=0.1), base)
    assert contents(pools['tool'].state) == first
    assert contents(pools['plan'].state.params) != contents(adam.state.params)
    assert stamps(base) == before, 'same buffers, same bytes'


def test_optimiser_state_is_that_of_the_adapter_alone(adam):
    """Parameters, two moments and the reference, each r (in + out) L numbers of 4 bytes; three scalars beside them."""
    a = WHOLE.arch
    heads, sizes = a.heads * a.head_dim, {'D': a.width, 'F': a.ffn}
    ends = 4 * (sizes['D'] + heads) + 3 * (sizes['D'] + sizes['F'])  # q, k, v, o; gate, up, down
    adapter = 4 * a.layers * KIND.rank * ends
    assert sum(leaf.nbytes for leaf in jax.tree.leaves(adam.state)) == 4 * adapter + 3 * 4


def test_the_reference_of_a_fresh_adapter_is_the_base_and_stays_it_while_the_adapter_learns(base, adam):
    state = with_reference(adam.copy())
    (batch,) = micros()
    of_base = LOGP(base, batch)
    told = []
    for _ in range(2):
        state, metrics = adam.updater(state, [batch], Knobs(1e-2, kl=0.1), base)
        told.append(float(metrics['kl']))
    assert told[0] == 0 < told[1]
    score = jax.jit(lambda state, base: token_arrays(MODULE, state.params, state.reference, batch, base))
    np.testing.assert_array_equal(score(state, base).reference_logp, of_base)


def test_a_batch_is_rescored_by_base_and_adapter_together(base, plain):
    (batch,) = micros()
    adapter = moved(plain.state.params)
    again = plain.updater.rescored(plain.copy().replace(params=adapter), batch, base)
    wanted = LOGP(lora.merge(base, adapter, KIND), batch)
    real = np.asarray(batch.mask_GKS) > 0
    np.testing.assert_allclose(np.asarray(again.old_logps_GKS)[real], np.asarray(wanted)[real], atol=1e-4)


def test_loss_and_gradient_over_eight_devices_are_those_of_one(base, plain):
    spread = learner(MODULE, (2, 2, 2))
    leaf = spread.state.params['blocks']['q']['b']
    assert len(leaf.sharding.device_set) == 8 and leaf.addressable_shards[0].data.size * 2 == leaf.size
    wanted, said = gradient(plain, moved(plain.state.params), base)
    slopes, metrics = gradient(spread, moved(spread.state.params), base_on((2, 2, 2)))
    assert metrics == pytest.approx(said, rel=1e-4)
    for this, that in zip(jax.tree.leaves(slopes), jax.tree.leaves(wanted), strict=True):
        np.testing.assert_allclose(this, that, atol=1e-5)
