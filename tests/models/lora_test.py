"""Adapters: what they add is W + scale a b, whether merged, alone or stacked; fresh ones add nothing at all."""

import functools
import re
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen as nn

from mallm.models import lora, sharding
from mallm.models.config import Architecture
from mallm.models.lora import Lora
from mallm.models.transformer import Transformer

ARCH = Architecture(11, width=16, layers=2, heads=4, kv_heads=2, head_dim=8, ffn=24, qkv_bias=True)
PLAIN = Transformer(ARCH)
KINDS = {
    'r is not alpha': Lora(4, 12.0),
    'rsLoRA': Lora(4, 3.0, rs=True),
    'some of the projections': Lora(3, 9.0, targets=('v', 'q', 'down')),
}
PROMPTS_GP = np.int32(np.random.default_rng(0).integers(0, 11, (3, 5)))
LENGTHS_G = np.int32([5, 2, 3])
ANSWERS_GKS = np.int32(np.random.default_rng(1).integers(0, 11, (3, 2, 4)))


@functools.cache
def base() -> Any:
    params = jax.jit(PLAIN.init)(jax.random.key(0), jnp.zeros((1, 2), jnp.int32))['params']
    return nn.unbox(params)


@functools.cache
def fresh(kind: Lora) -> Any:
    made = jax.jit(PLAIN.clone(lora=kind).init)(jax.random.key(1), jnp.zeros((1, 2), jnp.int32))
    return nn.unbox(made['lora'])


def trained(kind: Lora, seed: int) -> Any:
    """An adapter whose every number is away from 0."""
    draw = np.random.default_rng(seed)
    return jax.tree.map(lambda leaf: jnp.float32(draw.normal(size=leaf.shape) * 0.2), fresh(kind))


@functools.partial(jax.jit, static_argnums=0)
def score(module: Transformer, variables: Any, picked_GR: Any = None) -> jax.Array:
    """Logits of the answers' tokens 1 to 3, by `encode` and `extend`."""
    _, prefix = module.apply(variables, PROMPTS_GP, LENGTHS_G, picked_GR, method=Transformer.encode)
    hidden, _ = module.apply(variables, ANSWERS_GKS, prefix, method=Transformer.extend)
    return module.apply(variables, hidden, method=Transformer.logits)


@pytest.mark.parametrize('kind', KINDS.values(), ids=KINDS)
def test_merged_weights_compute_what_base_and_adapter_compute_together(kind):
    adapter = trained(kind, 2)
    merged = score(PLAIN, {'params': lora.merge(base(), adapter, kind)})
    together = score(PLAIN.clone(lora=kind), lora.variables(adapter, base()))
    np.testing.assert_allclose(together, merged, atol=1e-4)
    assert np.abs(together - score(PLAIN, {'params': base()})).max() > 0.1


def test_the_scale_is_alpha_over_r_or_over_its_root_and_is_what_a_merge_adds():
    """r = 4: 12 / 4 = 3, 3 / sqrt(4) = 1.5; A19's r = 8: 16 / 8 = 2, 16 / 2.8284 = 5.657; one entry of W by hand."""
    assert (Lora(8, 16.0).scale, Lora(8, 16.0, rs=True).scale) == (2.0, pytest.approx(5.657, abs=5e-4))
    assert (KINDS['r is not alpha'].scale, KINDS['rsLoRA'].scale) == (3.0, 1.5)
    kind = KINDS['some of the projections']
    adapter = trained(kind, 3)
    merged = lora.merge(base(), adapter, kind)
    a_Lir, b_Lro = (np.asarray(adapter['blocks']['down'][part]) for part in 'ab')
    by_hand = 3.0 * sum(float(a_Lir[1, 5, r]) * float(b_Lro[1, r, 7]) for r in range(3))
    assert merged['blocks']['down'][1, 5, 7] - base()['blocks']['down'][1, 5, 7] == pytest.approx(by_hand, abs=1e-6)
    for name in ('k', 'o', 'gate', 'up', 'q_bias', 'attention_norm'):
        assert merged['blocks'][name] is base()['blocks'][name], 'what is not a target is not even copied'


def test_a_fresh_adapter_changes_no_bit_of_what_the_base_computes():
    kind = KINDS['r is not alpha']
    assert all(not pair['b'].any() and pair['a'].all() for pair in fresh(kind)['blocks'].values())
    alone = score(PLAIN, {'params': base()})
    np.testing.assert_array_equal(score(PLAIN.clone(lora=kind), lora.variables(fresh(kind), base())), alone)


@pytest.mark.parametrize('kind', [KINDS['r is not alpha'], KINDS['some of the projections']], ids=['all', 'some'])
def test_each_row_of_a_batch_computes_with_its_own_one_of_the_stacked_adapters(kind):
    adapters, which = [trained(kind, seed) for seed in (4, 5, 6)], np.int32([0, 2, 1])
    stacked = lora.stack(adapters)
    module = PLAIN.clone(lora=kind)
    together = score(module, lora.variables(stacked, base()), lora.picks(which, 3, kind))
    alone = [score(module, lora.variables(adapter, base())) for adapter in adapters]
    for row, adapter in enumerate(which):
        np.testing.assert_allclose(together[row], alone[adapter][row], atol=1e-5)
        assert np.abs(together[row] - alone[adapter - 1][row]).max() > 0.1, 'another adapter says something else'


def test_an_adapter_is_split_over_the_mesh_along_the_axes_of_the_projection_it_adapts():
    init = PLAIN.clone(lora=KINDS['r is not alpha']).init
    abstract = jax.eval_shape(init, jax.random.key(0), jnp.zeros((1, 2), jnp.int32))['lora']
    placed = sharding.shardings_of(abstract, sharding.make_mesh(2, 2, 2))['blocks']
    specs = {name: tuple(tuple(pair[part].spec)[1:] for part in 'ab') for name, pair in placed.items()}
    for name in ('q', 'k', 'v', 'gate', 'up'):
        assert specs[name] == (('fsdp', None), (None, 'tensor')), name
    for name in ('o', 'down'):
        assert specs[name] == (('tensor', None), (None, 'fsdp')), name


@pytest.mark.parametrize(
    'wrong, reason',
    [
        ({'rank': 0}, 'rank=0: an adapter has rank 1 or more'),
        ({'rank': -2}, 'rank=-2: .* train full parameters'),
        ({'alpha': 0.0}, 'alpha=0.0: must be positive'),
        ({'alpha': float('nan')}, 'alpha=nan: must be positive'),
        ({'targets': ('q', 'wq')}, r"name one or more of \('q', .*unknown: \['wq'\]"),
        ({'targets': ('q', 'q')}, 'each once'),
        ({'targets': ()}, 'name one or more'),
    ],
)
def test_an_adapter_that_cannot_be_is_refused_at_birth(wrong, reason):
    with pytest.raises(ValueError, match=reason):
        Lora(**{'rank': 4, 'alpha': 8.0} | wrong)


def test_an_adapter_of_another_base_or_kind_is_refused_by_the_names_and_shapes_of_its_leaves():
    kind = KINDS['some of the projections']
    adapter = trained(kind, 2)
    narrow = {'blocks': {name: leaf[:, :, :8] for name, leaf in base()['blocks'].items() if leaf.ndim == 3}}
    with pytest.raises(ValueError, match=re.escape('q/b is (2, 3, 32), the base needs (2, 3, 8)')):
        lora.merge(narrow, adapter, kind)
    with pytest.raises(ValueError, match=re.escape('q/a is (2, 16, 3), the base needs (2, 16, 5)')):
        lora.merge(base(), adapter, Lora(5, 9.0, targets=kind.targets))
    with pytest.raises(ValueError, match='down/a is surplus; down/b is surplus; o/a is missing; o/b is missing'):
        lora.merge(base(), adapter, Lora(3, 9.0, targets=('q', 'v', 'o')))
