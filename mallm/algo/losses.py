"""Policy-gradient objectives on arrays. Sums over tokens, never means: the caller divides by the global token count.

Every array is [..., S] over answer tokens unless its name says otherwise. Masked positions may hold anything, inf and
NaN included; they never touch the value or the gradient, because ratios are formed from masked differences.
"""

from collections.abc import Callable
from typing import NamedTuple

import chex
import jax
import jax.numpy as jnp


class Tokens(NamedTuple):
    """What an objective sees of a batch.

    Attributes:
      logp: log-probabilities (nats) of the sampled tokens under the policy being trained.
      old_logp: the same under the policy the ratio is taken against.
      sampler_logp: the same as the sampler itself reported them.
      reference_logp: the same under the reference policy (equal to logp where there is none).
      entropy: entropy (nats) of the distribution each token was drawn from.
      advantage: one number a token, constant over an answer.
      mask: 1 where a token is trained on, else 0.
    """

    logp: jax.Array
    old_logp: jax.Array
    sampler_logp: jax.Array
    reference_logp: jax.Array
    entropy: jax.Array
    advantage: jax.Array
    mask: jax.Array


Objective = Callable[[Tokens], tuple[jax.Array, dict[str, jax.Array]]]


def masked(values: jax.Array, mask: jax.Array) -> jax.Array:
    """values where mask is set, else 0; safe for gradients because the dropped branch is a constant."""
    return jnp.where(mask > 0, values, 0.0)


def log_ratio(new_logp: jax.Array, old_logp: jax.Array, mask: jax.Array) -> jax.Array:
    """log(new / old) at trained tokens, exactly 0 elsewhere."""
    return masked(new_logp, mask) - masked(old_logp, mask)


def clipped_surrogate(tokens: Tokens, *, low: float, high: float, cap: float) -> tuple[jax.Array, dict[str, jax.Array]]:
    """PPO's clipped objective, negated and summed over the trained tokens.

      L = - sum_t w_t min(rho_t A_t, clip(rho_t, 1 - low, 1 + high) A_t),   rho_t = pi(a_t) / pi_old(a_t),
      w_t = min(pi_old(a_t) / pi_sampler(a_t), cap)                          (truncated importance sampling).

    With the sampler's own log-probabilities as pi_old, w is 1. Sources: Schulman et al. 2017, arXiv:1707.06347 eq. 7;
    asymmetric clip: DAPO, arXiv:2503.14476; truncation: IMPACT, arXiv:1912.00167.
    """
    chex.assert_equal_shape(tokens)
    difference = log_ratio(tokens.logp, tokens.old_logp, tokens.mask)
    ratio = jnp.exp(difference)
    gain = ratio * tokens.advantage
    clipped = jnp.clip(ratio, 1 - low, 1 + high) * tokens.advantage
    weight = jnp.minimum(jnp.exp(log_ratio(tokens.old_logp, tokens.sampler_logp, tokens.mask)), cap)
    loss = -masked(jax.lax.stop_gradient(weight) * jnp.minimum(gain, clipped), tokens.mask).sum()
    return loss, {
        'ratio': masked(ratio, tokens.mask).sum(),
        'clip_share': masked((clipped < gain).astype(jnp.float32), tokens.mask).sum(),
        'ppo_kl': masked(-difference, tokens.mask).sum(),
    }


def reinforce(tokens: Tokens) -> tuple[jax.Array, dict[str, jax.Array]]:
    """- sum_t A_t log pi(a_t): the plain policy gradient, and with A = 1 the cross-entropy of supervised training."""
    chex.assert_equal_shape(tokens)
    return -(masked(tokens.logp, tokens.mask) * masked(tokens.advantage, tokens.mask)).sum(), {}


def kl_k3(tokens: Tokens) -> jax.Array:
    """Sum over tokens of the unbiased, non-negative estimate of KL(pi || reference): q - 1 - log q, q = ref / pi.

    Source: Schulman 2020, "Approximating KL divergence".
    """
    difference = log_ratio(tokens.reference_logp, tokens.logp, tokens.mask)
    return (jnp.exp(difference) - 1 - difference).sum()


def token_statistics(logits: jax.Array, ids: jax.Array, temperature: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Log-probability of each id and entropy of its distribution, both in nats, float32, at `temperature`.

    Args:
      logits: [..., V].
      ids: [...].
      temperature: broadcasts against ids; the temperature the ids were sampled at.
    """
    logp_V = jax.nn.log_softmax(logits.astype(jnp.float32) / temperature[..., None], axis=-1)
    logp = jnp.take_along_axis(logp_V, ids[..., None], axis=-1)[..., 0]
    return logp, -(jnp.exp(logp_V) * logp_V).sum(-1)


def chunked_token_statistics(
    head: Callable[[jax.Array], jax.Array],
    hidden_GND: jax.Array,
    ids_GN: jax.Array,
    temperature_GN: jax.Array,
    mask_GN: jax.Array,
    *,
    chunk: int,
) -> tuple[jax.Array, jax.Array]:
    """`token_statistics` of `head(hidden)` at trained tokens, 0 elsewhere, without holding the logits of all tokens.

    The head runs on `chunk` tokens of each group at a time, and again in the backward pass, so that no more than
    G * chunk * V logits are alive. The trained tokens of a group go first, and a chunk in which no group has one is
    left out. Groups stay whole, so that nothing moves between devices that hold different groups; all reductions over
    V are plain sums, so that it may be split too.

    Args:
      head: [G, chunk, D] -> logits [G, chunk, V].
      hidden_GND: final hidden states of the N answer positions of each group.
      ids_GN, temperature_GN, mask_GN: token ids, what they were sampled at, and 1 where they are trained on.
      chunk: positions of a group that are scored at once.

    Returns:
      logp_GN and entropy_GN, float32.
    """
    G, N = ids_GN.shape
    count = -(-N // chunk)
    trained_GN = jnp.pad(mask_GN > 0, ((0, 0), (0, count * chunk - N)))
    order_GN = jnp.argsort(~trained_GN, axis=1)

    def cut(values_GN: jax.Array) -> jax.Array:
        """[G, N, ...] -> [count, G, chunk, ...], trained tokens first."""
        padded = jnp.pad(values_GN, ((0, 0), (0, count * chunk - N)) + ((0, 0),) * (values_GN.ndim - 2))
        sorted_GN = jnp.take_along_axis(padded, order_GN.reshape(*order_GN.shape, *(1,) * (values_GN.ndim - 2)), axis=1)
        return sorted_GN.reshape(G, count, chunk, *values_GN.shape[2:]).swapaxes(0, 1)

    def score(hidden: jax.Array, ids: jax.Array, temperature: jax.Array) -> tuple[jax.Array, jax.Array]:
        logits = head(hidden).astype(jnp.float32) / temperature[..., None]
        peak = jax.lax.stop_gradient(logits.max(-1, keepdims=True))
        weights = jnp.exp(logits - peak)
        total = weights.sum(-1)
        normaliser = jnp.log(total) + peak[..., 0]
        is_id = jnp.arange(logits.shape[-1], dtype=ids.dtype)[None, None] == ids[..., None]
        logp = jnp.where(is_id, logits, 0.0).sum(-1) - normaliser
        return logp, normaliser - (weights * logits).sum(-1) / total

    def nothing(hidden: jax.Array, ids: jax.Array, temperature: jax.Array) -> tuple[jax.Array, jax.Array]:
        return jnp.zeros(ids.shape, jnp.float32), jnp.zeros(ids.shape, jnp.float32)

    @jax.checkpoint
    def step(_: None, part: tuple[jax.Array, ...]) -> tuple[None, tuple[jax.Array, jax.Array]]:
        wanted, *tokens = part
        return None, jax.lax.cond(wanted, score, nothing, *tokens)

    wanted_C = cut(trained_GN[:, :N]).any((1, 2))
    _, scored_CGn = jax.lax.scan(step, None, (wanted_C, cut(hidden_GND), cut(ids_GN), cut(temperature_GN)))
    back_GN = jnp.argsort(order_GN, axis=1)[:, :N]

    def joined(values_CGn: jax.Array) -> jax.Array:
        whole_GN = values_CGn.swapaxes(0, 1).reshape(G, count * chunk)
        return masked(jnp.take_along_axis(whole_GN, back_GN, axis=1), mask_GN)

    return joined(scored_CGn[0]), joined(scored_CGn[1])
