"""Keys and values that later tokens attend to: plain pytrees, all layers stacked on the first axis."""

from typing import NamedTuple

import jax
import jax.numpy as jnp

from mallm.models.config import Architecture


class KeyValues(NamedTuple):
    """Keys and values, of one layer or (with a leading L axis) of all.

    For prompts: [G, kv_heads, P, head_dim]. For the K answers of each prompt: [G, kv_heads, K, S, head_dim].
    """

    keys: jax.Array
    values: jax.Array


class Prefix(NamedTuple):
    """Encoded prompts, shared by the K answers of each.

    Attributes:
      layers: keys and values [L, G, kv_heads, P, head_dim].
      lengths_G: true prompt lengths; positions beyond are padding and never attended to.
      picked_GR: which of the stacked adapters read each prompt, and will write its answers; None where there is one.
    """

    layers: KeyValues
    lengths_G: jax.Array
    picked_GR: jax.Array | None = None


def empty(arch: Architecture, groups: int, k: int, tokens: int, dtype: jnp.dtype) -> KeyValues:
    """An empty answer cache of all layers, with room for `tokens` tokens in each of `groups` x `k` answers."""
    shape = (arch.layers, groups, arch.kv_heads, k, tokens, arch.head_dim)
    return KeyValues(jnp.zeros(shape, dtype), jnp.zeros(shape, dtype))


def write(cache: KeyValues, new: KeyValues, at: jax.Array | int) -> KeyValues:
    """One layer's cache with `new` (one token an answer) stored at token index `at`."""
    start = (0, 0, 0, at, 0)
    return KeyValues(
        jax.lax.dynamic_update_slice(cache.keys, new.keys, start),
        jax.lax.dynamic_update_slice(cache.values, new.values, start),
    )
