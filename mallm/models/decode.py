"""One token at a time through every block, with each block's weights laid out for it once and for all.

`Transformer.extend` scans over stacked layers. That is right for whole answers and for small models, but at every
token it copies a layer's weights out of the stack, puts projections of the same input side by side, casts, and runs
adapters beside their base. `unroll` does all of that once a call, which saves it at every token. It costs a second copy
of the blocks while a batch is sampled. `benchmarks.phases` measures a token.

Log-probabilities agree with those of `extend` to rounding, not bit for bit.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from mallm.models import cache as kv
from mallm.models.lora import Lora
from mallm.models.transformer import JOINED, Attended, Block, Transformer, Where, rms_norm


class Unrolled(NamedTuple):
    """Variables of each block, and each block's keys and values of the prompts."""

    blocks: tuple[Any, ...]
    prefix: tuple[kv.KeyValues, ...]


def unroll(module: Transformer, variables: Any, prefix: kv.Prefix) -> Unrolled:
    """Each layer in arrays of its own, with its adapter merged into them or, see `beside`, beside them."""
    adapters, kept = variables.get('lora'), beside(module, variables, prefix)

    def block(i: int) -> Any:
        weights = {name: stacked[i] for name, stacked in variables['params']['blocks'].items()}
        if adapters is None or module.lora is None:
            return {'params': side_by_side(weights, module.dtype)}
        pairs = {name: {part: of[i] for part, of in pair.items()} for name, pair in adapters['blocks'].items()}
        if kept is None:
            return {'params': side_by_side(merged(weights, pairs, module.lora), module.dtype)}
        return {'params': side_by_side(weights, module.dtype), 'lora': pairs}

    return Unrolled(tuple(map(block, range(module.arch.layers))), apart(module, prefix.layers))


def beside(module: Transformer, variables: Any, prefix: kv.Prefix) -> Lora | None:
    """The adapters that blocks keep apart from their weights, if any: several that are stacked, and all in bfloat16,
    where what one has learned so far can be less than a weight's last bit."""
    merges = prefix.picked_GR is None and module.dtype == jnp.float32
    return None if merges or variables.get('lora') is None else module.lora


def merged(weights: dict[str, jax.Array], pairs: Any, lora: Lora) -> dict[str, jax.Array]:
    """One layer's weights with its adapter added, all in float32."""
    return weights | {name: weights[name] + lora.scale * (pair['a'] @ pair['b']) for name, pair in pairs.items()}


def side_by_side(weights: dict[str, jax.Array], dtype: jnp.dtype) -> dict[str, jax.Array]:
    """One layer's weights as a joined `Block` names them, in the type it computes in."""
    taken = {name for names in JOINED.values() for name in names}
    joined = {whole: jnp.concatenate([weights[name] for name in names], axis=1) for whole, names in JOINED.items()}
    kept = {name: weight for name, weight in weights.items() if name not in taken}
    return jax.tree.map(lambda weight: weight.astype(dtype), joined | kept)


def apart(module: Transformer, layers: kv.KeyValues) -> tuple[kv.KeyValues, ...]:
    """Keys and values stacked over layers, as one pair a layer."""
    return tuple(kv.KeyValues(layers.keys[i], layers.values[i]) for i in range(module.arch.layers))


def extend(
    module: Transformer,
    variables: Any,
    unrolled: Unrolled,
    tokens_GK: jax.Array,
    prefix: kv.Prefix,
    past: tuple[kv.KeyValues, ...],
    at: jax.Array,
) -> tuple[jax.Array, tuple[kv.KeyValues, ...]]:
    """`Transformer.extend` by one token an answer: hidden_GKSD with S = 1, and the caches of all layers."""
    (G, K), P = tokens_GK.shape, unrolled.prefix[0].keys.shape[2]
    module.arch.refuse_beyond_context(P + past[0].keys.shape[3])
    positions = jnp.broadcast_to(prefix.lengths_G[:, None, None] + at, (G, K, 1))
    where = Where(positions, jnp.arange(P)[None] < prefix.lengths_G[:, None], at, prefix.picked_GR)
    block = Block(module.arch, module.dtype, beside(module, variables, prefix), joined=True)
    x, grown = variables['params']['embedding'][tokens_GK][:, :, None].astype(module.dtype), []
    for weights, prompts, answers in zip(unrolled.blocks, unrolled.prefix, past, strict=True):
        x, own = block.apply(weights, x, Attended(prompts, answers), where)
        grown.append(own)
    scale = variables['params']['final_norm'].astype(module.dtype)
    return rms_norm(x, scale, module.arch.norm_eps), tuple(grown)
