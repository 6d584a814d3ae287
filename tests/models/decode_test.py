"""Decoding with unrolled blocks says what `Transformer.extend` says, whatever the blocks are made of."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen as nn

from mallm.models import cache, decode, lora
from mallm.models.config import Architecture
from mallm.models.lora import Lora
from mallm.models.transformer import JOINED, Transformer

QWEN3 = Architecture(23, width=16, layers=2, heads=4, kv_heads=2, head_dim=4, ffn=24)
QWEN2 = Architecture(23, width=16, layers=2, heads=2, kv_heads=1, head_dim=8, ffn=24, qk_norm=False, qkv_bias=True)
KIND = Lora(2, 3.0)
SOME = Lora(2, 3.0, rs=True, targets=('q', 'up', 'down'))
G, K, P, S = 3, 2, 5, 2


def noisy(tree: Any, seed: int) -> Any:
    """Leaves as they are born, moved at random: zeros (biases, b of adapters) would prove nothing."""
    draw = np.random.default_rng(seed)
    return jax.tree.map(lambda leaf: leaf + jnp.asarray(draw.normal(size=leaf.shape) * 0.3, leaf.dtype), tree)


def both_ways(module: Transformer, variables: Any, picked_GR: Any) -> tuple[np.ndarray, np.ndarray]:
    """Hidden states [S, G, K, D] of the same answers, token by token, from `extend` and from unrolled blocks."""
    draw = np.random.default_rng(1)
    prompts, lengths = draw.integers(0, 23, (G, P)).astype(np.int32), np.array([5, 2, 3], np.int32)
    answers = draw.integers(0, 23, (S, G, K)).astype(np.int32)

    @jax.jit
    def run(variables: Any) -> tuple[jax.Array, jax.Array]:
        _, prefix = module.apply(variables, prompts, lengths, picked_GR, method=Transformer.encode)
        stacked = cache.empty(module.arch, G, K, S, module.dtype)
        unrolled, pasts = decode.unroll(module, variables, prefix), decode.apart(module, stacked)
        plain, quick = [], []
        for at in range(S):
            hidden, stacked = module.apply(
                variables, answers[at][:, :, None], prefix, stacked, jnp.int32(at), method=Transformer.extend
            )
            plain.append(hidden[:, :, 0])
            hidden, pasts = decode.extend(module, variables, unrolled, answers[at], prefix, pasts, jnp.int32(at))
            quick.append(hidden[:, :, 0])
        return jnp.stack(plain), jnp.stack(quick)

    plain, quick = run(variables)
    return np.asarray(plain, np.float32), np.asarray(quick, np.float32)


@pytest.mark.parametrize(
    ('arch', 'kind', 'stacked'),
    [(QWEN2, None, 0), (QWEN3, KIND, 0), (QWEN2, SOME, 3)],
)
def test_unrolled_blocks_give_the_same_states_without_with_and_with_several_adapters(arch, kind, stacked):
    module = Transformer(arch, lora=kind)
    variables = noisy(nn.unbox(module.init(jax.random.key(0), jnp.zeros((1, 2), jnp.int32))), 0)
    picked_GR = None
    if stacked:
        adapters = lora.stack([noisy(variables['lora'], 10 + i) for i in range(stacked)])
        variables = variables | {'lora': adapters}
        picked_GR = lora.picks(np.arange(G) % stacked, stacked, kind)
    plain, quick = both_ways(module, variables, picked_GR)
    assert np.abs(plain).mean() > 0.1
    np.testing.assert_allclose(quick, plain, atol=2e-5)


def test_in_bfloat16_an_adapter_that_is_less_than_a_weights_last_bit_still_counts():
    """Weights are 256, of which bfloat16 has no fraction; the product of the adapter is 0.5 everywhere."""
    module = Transformer(QWEN3, jnp.bfloat16, lora=KIND)
    born = nn.unbox(module.init(jax.random.key(0), jnp.zeros((1, 2), jnp.int32)))
    blocks = born['params']['blocks']
    flat = {name: jnp.full_like(blocks[name], 256) for name in KIND.targets}
    params = jax.tree.map(lambda leaf: leaf.astype(jnp.bfloat16), born['params'] | {'blocks': blocks | flat})
    pair = jax.tree.map(lambda leaf: jnp.full_like(leaf, (0.5 / (KIND.scale * KIND.rank)) ** 0.5), born['lora'])
    prefix = cache.Prefix(cache.KeyValues(*(jnp.zeros((2, G, 2, P, 4)),) * 2), jnp.ones(G, jnp.int32))
    for block in decode.unroll(module, {'params': params, 'lora': pair}, prefix).blocks:
        assert {float(weight) for weight in block['params']['o'].ravel()} == {256.0}
        added = KIND.scale * block['lora']['o']['a'] @ block['lora']['o']['b']
        np.testing.assert_allclose(added, 0.5, rtol=1e-2)
    plain, quick = both_ways(module, noisy({'params': params, 'lora': pair}, 0), None)
    np.testing.assert_allclose(quick, plain, atol=0.1)


def test_in_bfloat16_unrolled_blocks_stay_within_its_rounding_and_hold_weights_in_it():
    module = Transformer(QWEN3, jnp.bfloat16)
    variables = noisy(nn.unbox(module.init(jax.random.key(0), jnp.zeros((1, 2), jnp.int32))), 0)
    plain, quick = both_ways(module, variables, None)
    np.testing.assert_allclose(quick, plain, atol=0.1)
    prefix = cache.Prefix(cache.KeyValues(*(jnp.zeros((2, G, 2, P, 4)),) * 2), jnp.ones(G, jnp.int32))
    blocks = decode.unroll(module, variables, prefix).blocks
    assert len(blocks) == 2
    for block in blocks:
        assert {leaf.dtype for leaf in jax.tree.leaves(block)} == {jnp.dtype(jnp.bfloat16)}
        assert JOINED.keys() <= block['params'].keys()
