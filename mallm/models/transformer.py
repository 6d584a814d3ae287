"""The policy: a decoder-only Flax (linen) transformer, used functionally: `module.apply({'params': p}, ...)`.

Two entry points share every weight and every line of a block:

  * `encode` reads the prompts once and keeps their keys and values;
  * `extend` continues each prompt K ways. The K answers attend to [their shared prompt | their own past].

The learner scores whole answers with one `extend`; the embedded engine calls it token by token with a cache. So the
sampler and the loss run the same forward pass, and a prompt costs the same whether it has one answer or sixty-four.

Tokens are flattened to [N, D] before each projection, and attention keeps the layout [G, heads, K, ...] throughout.
"""

from collections.abc import Mapping
from typing import NamedTuple

import jax
import jax.numpy as jnp
from flax import linen as nn

from mallm.models import cache as kv
from mallm.models import sharding
from mallm.models.config import Architecture
from mallm.models.lora import Lora


class Attended(NamedTuple):
    """What the tokens of a block attend to beside themselves; its fields have a leading L axis outside the layer scan.

    Attributes:
      prefix: keys and values of the prompts, or None while the prompts themselves are read.
      past: cache of the answers' earlier tokens, or None when whole answers are given at once.
    """

    prefix: kv.KeyValues | None = None
    past: kv.KeyValues | None = None


class Where(NamedTuple):
    """Where the tokens are; the same for every layer.

    Attributes:
      positions_GKS: position of each token in its sequence.
      prefix_mask_GP: which prompt positions are real, or None while the prompts themselves are read.
      at: index of the current token in the cache, where there is one.
      picked_GR: which ranks of stacked adapters each prompt uses (`lora.picks`), or None where there is one adapter.
    """

    positions_GKS: jax.Array
    prefix_mask_GP: jax.Array | None = None
    at: jax.Array | int = 0
    picked_GR: jax.Array | None = None


def rms_norm(x: jax.Array, scale: jax.Array, eps: float) -> jax.Array:
    """x / rms(x) * scale over the last axis, in float32. Source: Zhang and Sennrich 2019, arXiv:1910.07467."""
    x32 = x.astype(jnp.float32)
    inverse = jax.lax.rsqrt(jnp.mean(jnp.square(x32), axis=-1, keepdims=True) + eps)
    shape = (1,) * (x.ndim - 1) + scale.shape
    return (x32 * inverse).astype(x.dtype) * scale.reshape(shape)


def frequencies(
    half: int, theta: float, factor: float = 1.0, band: tuple[float, float, int] | None = None
) -> jax.Array:
    """Radians per token [half] by which rotary pairs turn; `factor` and `band` as rope_* in `Architecture` say.

    Source: Su et al. 2021, arXiv:2104.09864; the band: Llama 3.1, Grattafiori et al. 2024, arXiv:2407.21783.
    """
    plain = theta ** (-jnp.arange(half, dtype=jnp.float32) / half)
    if band is None:
        return plain / factor
    low, high, tokens = band
    waves_in_tokens = tokens / (2 * jnp.pi / plain)
    kept = jnp.clip((waves_in_tokens - low) / (high - low), 0.0, 1.0)
    return kept * plain + (1 - kept) * plain / factor


def rotate(x_NHd: jax.Array, positions_N: jax.Array, frequencies_d: jax.Array) -> jax.Array:
    """Rotary position embedding, half-split as in Llama. Source: Su et al. 2021, arXiv:2104.09864."""
    half = x_NHd.shape[-1] // 2
    angles = positions_N.astype(jnp.float32)[:, None, None] * frequencies_d[None, None, :]
    cos, sin = jnp.cos(angles).astype(x_NHd.dtype), jnp.sin(angles).astype(x_NHd.dtype)
    first, second = x_NHd[..., :half], x_NHd[..., half:]
    return jnp.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1)


def joint_attention(
    queries: jax.Array,
    own: kv.KeyValues,
    own_mask_ST: jax.Array,
    prefix: kv.KeyValues | None,
    mask_GP: jax.Array | None,
) -> jax.Array:
    """Softmax attention over [prefix | own] without ever copying the prefix K times.

    Args:
      queries: [G, kv_heads, K, R, S, d] with R query heads for each key head.
      own: keys and values [G, kv_heads, K, T, d].
      own_mask_ST: True where query s may see own token t.
      prefix: keys and values [G, kv_heads, P, d], or None.
      mask_GP: True at real prefix positions.

    Returns:
      [G, kv_heads, K, R, S, d].
    """
    G, M, K, R, S, d = queries.shape
    T = own.keys.shape[3]
    scaled = queries * jnp.asarray(d**-0.5, queries.dtype)
    low = jnp.finfo(jnp.float32).min
    rows = scaled.reshape(G, M, K, R * S, d)
    own_scores = jnp.matmul(rows, own.keys.swapaxes(-1, -2)).astype(jnp.float32).reshape(G, M, K, R, S, T)
    own_scores = jnp.where(own_mask_ST[None, None, None, None], own_scores, low)
    peak = own_scores.max(-1, keepdims=True)
    if prefix is not None and mask_GP is not None:
        P = prefix.keys.shape[2]
        flat = scaled.reshape(G, M, K * R * S, d)
        pre_scores = jnp.matmul(flat, prefix.keys.swapaxes(-1, -2)).astype(jnp.float32)
        pre_scores = jnp.where(mask_GP[:, None, None, :], pre_scores, low).reshape(G, M, K, R, S, P)
        peak = jnp.maximum(peak, pre_scores.max(-1, keepdims=True))
    peak = jax.lax.stop_gradient(peak)
    own_weights = jnp.exp(own_scores - peak)
    total = own_weights.sum(-1, keepdims=True)
    mixed = jnp.matmul(own_weights.reshape(G, M, K, R * S, T).astype(own.values.dtype), own.values)
    mixed = mixed.reshape(G, M, K, R, S, d)
    if prefix is not None:
        pre_weights = jnp.exp(pre_scores - peak)
        total = total + pre_weights.sum(-1, keepdims=True)
        shared = jnp.matmul(pre_weights.reshape(G, M, K * R * S, P).astype(prefix.values.dtype), prefix.values)
        mixed = mixed + shared.reshape(G, M, K, R, S, d)
    return mixed / total.astype(mixed.dtype)


JOINED = {'qkv': ('q', 'k', 'v'), 'gate_up': ('gate', 'up')}
"""Projections of the same input, which multiply with it side by side, and what they are called as one array."""


class Block(nn.Module):
    """One pre-norm transformer block: attention, then a SwiGLU feed-forward layer.

    A `joined` one is given the projections of JOINED as one array each, and not apart as they are kept and trained.
    """

    arch: Architecture
    dtype: jnp.dtype
    lora: Lora | None = None
    joined: bool = False

    def weight(self, name: str, shape: tuple[int, ...], axes: tuple[str | None, ...]) -> jax.Array:
        init = nn.initializers.normal(stddev=shape[0] ** -0.5)
        matrix = self.param(name, nn.with_logical_partitioning(init, axes), shape, jnp.float32).astype(self.dtype)
        return sharding.gathered(matrix, axes)

    def beside(self, whole: str, sizes: tuple[int, ...], axes: tuple[str, ...]) -> jax.Array:
        """Weights [D, sum of sizes] of projections of the residual stream that stand side by side."""
        D = self.arch.width
        if self.joined:
            return self.weight(whole, (D, sum(sizes)), ('embed', None))
        parts = zip(JOINED[whole], sizes, axes, strict=True)
        return jnp.concatenate([self.weight(name, (D, size), ('embed', axis)) for name, size, axis in parts], axis=1)

    def scale(self, name: str, size: int) -> jax.Array:
        init = nn.with_logical_partitioning(nn.initializers.ones, (None,))
        return self.param(name, init, (size,), jnp.float32).astype(self.dtype)

    def bias(self, name: str, size: int, axis: str) -> jax.Array:
        init = nn.with_logical_partitioning(nn.initializers.zeros, (axis,))
        return self.param(name, init, (size,), jnp.float32).astype(self.dtype)

    def factors(self, name: str, sizes: tuple[int, int, int], axes: tuple[str, str]) -> tuple[jax.Array, jax.Array]:
        """a [in, r] and b [r, out] of one projection; b is born 0, so that a fresh adapter changes nothing."""
        inner, rank, outer = sizes
        start_a = nn.with_logical_partitioning(nn.initializers.normal(stddev=inner**-0.5), (axes[0], None))
        start_b = nn.with_logical_partitioning(nn.initializers.zeros, (None, axes[1]))

        def init() -> dict[str, jax.Array]:
            key = self.make_rng('params')
            return {'a': start_a(key, (inner, rank), jnp.float32), 'b': start_b(key, (rank, outer), jnp.float32)}

        pair = self.variable('lora', name, init).value
        return pair['a'].astype(self.dtype), pair['b'].astype(self.dtype)

    def adapt(
        self, x_NI: jax.Array, y_NO: jax.Array, axis: str, outs: Mapping[str, tuple[int, str]], where: Where
    ) -> jax.Array:
        """y plus the low-rank terms of the projections that stand side by side in it; y as it is without adapters.

        Args:
          x_NI: what the projections were given; `axis` is the logical name of I.
          y_NO: what they gave.
          outs: width and logical axis of each, in their order in y.
          where: says which adapter each prompt uses, where several are stacked.
        """
        lora = self.lora
        names = [] if lora is None else [name for name in outs if name in lora.targets]
        if lora is None or not names:
            return y_NO
        N, inner = x_NI.shape
        pairs = {name: self.factors(name, (inner, lora.rank, outs[name][0]), (axis, outs[name][1])) for name in names}
        low = (x_NI @ jnp.concatenate([a for a, _ in pairs.values()], axis=1)) * lora.scale
        if where.picked_GR is not None:
            G, R = where.picked_GR.shape
            picked = where.picked_GR.astype(self.dtype)[:, None, None, :]
            low = (low.reshape(G, N // G, len(names), R) * picked).reshape(N, len(names) * R)
        parts = dict(zip(names, jnp.split(low, len(names), axis=1), strict=True))
        terms = [
            parts[name] @ pairs[name][1] if name in parts else jnp.zeros((N, size), self.dtype)
            for name, (size, _) in outs.items()
        ]
        return y_NO + jnp.concatenate(terms, axis=1)

    @nn.compact
    def __call__(self, x_GKSD: jax.Array, attended: Attended, where: Where) -> tuple[jax.Array, kv.KeyValues]:
        """Returns the next residual stream and this block's keys and values [G, kv_heads, K, T, d]."""
        G, K, S, D = x_GKSD.shape
        x_ND = x_GKSD.reshape(G * K * S, D)
        mixed_ND, own = self.attention(x_ND, attended, where)
        x_ND = x_ND + mixed_ND
        x_ND = x_ND + self.feed_forward(x_ND, where)
        return sharding.by_groups(x_ND.reshape(G, K, S, D)), own

    def attention(self, x_ND: jax.Array, attended: Attended, where: Where) -> tuple[jax.Array, kv.KeyValues]:
        a = self.arch
        D, H, M, d = a.width, a.heads, a.kv_heads, a.head_dim
        G, K, S = where.positions_GKS.shape
        N = G * K * S
        normed = rms_norm(x_ND, self.scale('attention_norm', D), a.norm_eps)
        qkv = normed @ self.beside('qkv', (H * d, M * d, M * d), ('heads', 'kv_heads', 'kv_heads'))
        heads, kv_heads = (H * d, 'heads'), (M * d, 'kv_heads')
        qkv = self.adapt(normed, qkv, 'embed', {'q': heads, 'k': kv_heads, 'v': kv_heads}, where)
        if a.qkv_bias:
            biases = [self.bias('q_bias', H * d, 'heads'), self.bias('k_bias', M * d, 'kv_heads')]
            qkv = qkv + jnp.concatenate([*biases, self.bias('v_bias', M * d, 'kv_heads')])[None]
        q, k, v = jnp.split(qkv.reshape(N, H + 2 * M, d), [H, H + M], axis=1)
        if a.qk_norm:
            q = rms_norm(q, self.scale('q_norm', d), a.norm_eps)
            k = rms_norm(k, self.scale('k_norm', d), a.norm_eps)
        turns = frequencies(d // 2, a.rope_theta, a.rope_factor, a.rope_band)
        q, k = jnp.split(rotate(jnp.concatenate([q, k], 1), where.positions_GKS.reshape(N), turns), [H], axis=1)
        queries = q.reshape(G, K, S, M, H // M, d).transpose(0, 3, 1, 4, 2, 5)
        own = kv.KeyValues(
            k.reshape(G, K, S, M, d).transpose(0, 3, 1, 2, 4), v.reshape(G, K, S, M, d).transpose(0, 3, 1, 2, 4)
        )
        if attended.past is None:
            mask_ST = jnp.tril(jnp.ones((S, S), bool))
        else:
            own = kv.write(attended.past, own, where.at)
            mask_ST = (jnp.arange(own.keys.shape[3]) <= where.at)[None]
        mixed = joint_attention(queries, own, mask_ST, attended.prefix, where.prefix_mask_GP)
        mixed_ND = mixed.transpose(0, 2, 4, 1, 3, 5).reshape(N, H * d)
        out_ND = mixed_ND @ self.weight('o', (H * d, D), ('heads', 'embed'))
        return self.adapt(mixed_ND, out_ND, 'heads', {'o': (D, 'embed')}, where), own

    def feed_forward(self, x_ND: jax.Array, where: Where) -> jax.Array:
        D, F = self.arch.width, self.arch.ffn
        normed = rms_norm(x_ND, self.scale('ffn_norm', D), self.arch.norm_eps)
        both = normed @ self.beside('gate_up', (F, F), ('ffn', 'ffn'))
        both = self.adapt(normed, both, 'embed', {'gate': (F, 'ffn'), 'up': (F, 'ffn')}, where)
        gate_NF, up_NF = jnp.split(both, 2, axis=1)
        mixed_NF = nn.silu(gate_NF) * up_NF
        down_ND = mixed_NF @ self.weight('down', (F, D), ('ffn', 'embed'))
        return self.adapt(mixed_NF, down_ND, 'ffn', {'down': (D, 'embed')}, where)


class Transformer(nn.Module):
    """Embedding, blocks, final norm and head. `dtype` is the compute type; parameters are float32.

    With `lora` there is a second collection, 'lora', of adapters over the projections in 'params'.
    """

    arch: Architecture
    dtype: jnp.dtype = jnp.dtype('float32')
    lora: Lora | None = None

    def setup(self) -> None:
        a = self.arch
        table = nn.with_logical_partitioning(nn.initializers.normal(stddev=a.width**-0.5), ('vocab', 'embed'))
        self.embedding = self.param('embedding', table, (a.vocab, a.width), jnp.float32)
        block = nn.remat(Block, prevent_cse=False) if a.remat else Block
        self.blocks = nn.scan(
            block,
            variable_axes={'params': 0, 'lora': 0},
            split_rngs={'params': True},
            in_axes=(0, nn.broadcast),
            length=a.layers,
            metadata_params={nn.PARTITION_NAME: 'layers'},
        )(a, self.dtype, self.lora)
        ones = nn.with_logical_partitioning(nn.initializers.ones, (None,))
        self.final_norm = self.param('final_norm', ones, (a.width,), jnp.float32)
        if not a.tied:
            head = nn.with_logical_partitioning(nn.initializers.normal(stddev=a.width**-0.5), ('embed', 'vocab'))
            self.head = self.param('head', head, (a.width, a.vocab), jnp.float32)

    def run(self, tokens_GKS: jax.Array, attended: Attended, where: Where) -> tuple[jax.Array, kv.KeyValues]:
        """Final hidden states [G, K, S, D], and keys and values [L, G, kv_heads, K, T, d]."""
        own = tokens_GKS.shape[2] if attended.past is None else attended.past.keys.shape[4]
        self.arch.refuse_beyond_context(own + (0 if attended.prefix is None else attended.prefix.keys.shape[3]))
        embedded = sharding.gathered(self.embedding.astype(self.dtype), ('vocab', 'embed'))[tokens_GKS]
        x, layers = self.blocks(sharding.by_groups(embedded), attended, where)
        return rms_norm(x, self.final_norm.astype(self.dtype), self.arch.norm_eps), layers

    def encode(
        self, tokens_GP: jax.Array, lengths_G: jax.Array, picked_GR: jax.Array | None = None
    ) -> tuple[jax.Array, kv.Prefix]:
        """Reads right-padded prompts, each with its own one of the stacked adapters where `picked_GR` says so.

        Returns:
          hidden_GD at each prompt's last real token (it predicts the first answer token), and the prefix.
        """
        G, P = tokens_GP.shape
        positions = jnp.broadcast_to(jnp.arange(P)[None, None], (G, 1, P))
        x, layers = self.run(tokens_GP[:, None], Attended(), Where(positions, picked_GR=picked_GR))
        last = jnp.take_along_axis(x[:, 0], (lengths_G - 1)[:, None, None], axis=1)[:, 0]
        layers = kv.KeyValues(layers.keys[:, :, :, 0], layers.values[:, :, :, 0])
        return last, kv.Prefix(layers, lengths_G, picked_GR)

    def extend(
        self, tokens_GKS: jax.Array, prefix: kv.Prefix, past: kv.KeyValues | None = None, at: jax.Array | int = 0
    ) -> tuple[jax.Array, kv.KeyValues]:
        """Continues each prompt K ways.

        Args:
          tokens_GKS: answer tokens; with a cache S is 1.
          prefix: encoded prompts.
          past: None for whole answers (causal), else the answers' cache, of which `at` tokens are filled.
          at: index of the first given token in its answer.

        Returns:
          hidden_GKSD, where position s predicts answer token `at + s + 1`, and the keys and values.
        """
        G, K, S = tokens_GKS.shape
        P = prefix.layers.keys.shape[3]
        positions = prefix.lengths_G[:, None, None] + at + jnp.arange(S)[None, None]
        mask_GP = jnp.arange(P)[None] < prefix.lengths_G[:, None]
        where = Where(jnp.broadcast_to(positions, (G, K, S)), mask_GP, at, prefix.picked_GR)
        return self.run(tokens_GKS, Attended(prefix.layers, past), where)

    def logits(self, hidden: jax.Array) -> jax.Array:
        """Float32 logits [..., V] of hidden states [..., D], from float32 weights: rounding them moves log-probs."""
        matrix = self.embedding.T if self.arch.tied else self.head
        matrix = sharding.gathered(matrix.astype(jnp.float32), ('embed', 'vocab'))
        flat = hidden.reshape(-1, self.arch.width).astype(jnp.float32) @ matrix
        return flat.reshape(*hidden.shape[:-1], self.arch.vocab)

    def answer_states(self, prompts_GP: jax.Array, lengths_G: jax.Array, answers_GKS: jax.Array) -> jax.Array:
        """Hidden_GKSD: position s holds the state from which answer token s was to be drawn."""
        last_GD, prefix = self.encode(prompts_GP, lengths_G)
        hidden, _ = self.extend(answers_GKS[:, :, :-1], prefix)
        first = jnp.broadcast_to(last_GD[:, None, None], (*answers_GKS.shape[:2], 1, self.arch.width))
        return jnp.concatenate([first, hidden], axis=2)

    def score(self, prompts_GP: jax.Array, lengths_G: jax.Array, answers_GKS: jax.Array) -> jax.Array:
        """Logits_GKSV: position s holds the distribution from which answer token s was to be drawn."""
        return self.logits(self.answer_states(prompts_GP, lengths_G, answers_GKS))

    def __call__(self, tokens_BT: jax.Array) -> jax.Array:
        """Logits_BTV of plain rows; used to initialise parameters and to compare with other implementations."""
        B, T = tokens_BT.shape
        positions = jnp.broadcast_to(jnp.arange(T)[None, None], (B, 1, T))
        x, _ = self.run(tokens_BT[:, None], Attended(), Where(positions))
        return self.logits(x[:, 0])
