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
