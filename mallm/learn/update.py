"""The sharded update: gradients of micro-batches are added up, then one optimiser step is taken.

Both halves are `jax.jit`s with explicit shardings over the (data, fsdp, tensor) mesh and donated buffers. Because the
loss is a sum divided by one number that is known beforehand, the result does not depend on how a step is cut into
micro-batches or over how many devices it is spread.
"""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import Mesh

from mallm import hosts
from mallm.algo import losses
from mallm.learn.pack import Batch
from mallm.learn.state import LearnerState
from mallm.models import lora, sharding
from mallm.models.transformer import Transformer


class Knobs(NamedTuple):
    """What may change from step to step without compiling again.

    Attributes:
      learning_rate: step size.
      kl: weight of the KL term to the reference.
      exploration: multiplies the state's entropy coefficient: 1 in reinforcement, 0 when cloning.
      entropy_target: nats that the controller steers to; a negative target leaves the coefficient as it is.
    """

    learning_rate: float
    kl: float = 0.0
    exploration: float = 1.0
    entropy_target: float = -1.0


class Accumulated(NamedTuple):
    """Running sums over the micro-batches of one optimiser step."""

    gradients: Any
    sums: dict[str, jax.Array]


LOGITS_ROOM = 64 << 20
"""Bytes of float32 logits that the loss may hold on one device; more than that is computed in chunks."""


def token_arrays(
    module: Transformer, params: Any, reference: Any, batch: Batch, base: Any = None, room: int = LOGITS_ROOM
) -> losses.Tokens:
    """Scores a micro-batch under the policy (and the reference, if there is one), with `room` bytes for logits.

    Where there is a frozen `base`, `params` and `reference` are adapters over it.
    """
    shape_GKS = batch.answers_GKS.shape
    temperature_GKS = jnp.broadcast_to(batch.temperatures_GK[:, :, None], shape_GKS)
    chunk = chunk_of(shape_GKS, module.arch.vocab, room)

    def score(params: Any) -> tuple[jax.Array, jax.Array]:
        variables, asked = lora.variables(params, base), (batch.prompts_GP, batch.lengths_G, batch.answers_GKS)
        if chunk is None:
            logits = module.apply(variables, *asked, method=Transformer.score)
            return losses.token_statistics(logits, batch.answers_GKS, temperature_GKS)
        hidden = module.apply(variables, *asked, method=Transformer.answer_states)
        flat = lambda values: values.reshape(shape_GKS[0], -1, *values.shape[3:])  # noqa: E731
        logp_GN, entropy_GN = losses.chunked_token_statistics(
            lambda hidden: module.apply(variables, hidden, method=Transformer.logits),
            *map(flat, (hidden, batch.answers_GKS, temperature_GKS, batch.mask_GKS)),
            chunk=chunk,
        )
        return logp_GN.reshape(shape_GKS), entropy_GN.reshape(shape_GKS)

    logp, entropy = score(params)
    reference_logp = jax.lax.stop_gradient(logp) if reference is None else jax.lax.stop_gradient(score(reference)[0])
    advantage = jnp.broadcast_to(batch.advantages_GK[:, :, None], shape_GKS)
    return losses.Tokens(
        logp, batch.old_logps_GKS, batch.sampler_logps_GKS, reference_logp, entropy, advantage, batch.mask_GKS
    )


def chunk_of(shape_GKS: Sequence[int], vocab: int, room: int) -> int | None:
    """Answer positions of each group whose logits fit into `room` bytes, cut evenly; None when all of them fit."""
    G, K, S = shape_GKS
    largest = max(1, room // (4 * G * vocab))
    return None if largest >= K * S else -(-K * S // -(-K * S // largest))


def make_gradients(
    module: Transformer, objective: losses.Objective, room: int = LOGITS_ROOM
) -> Callable[..., Accumulated]:
    """gradients(accumulated, state, batch, knobs, base) -> accumulated, plus this micro-batch's gradient and sums.

    The gradient is that of `state.params` alone: a frozen `base` has none.
    """

    def loss(params: Any, state: LearnerState, batch: Batch, knobs: Knobs, base: Any) -> tuple[jax.Array, dict]:
        tokens = token_arrays(module, params, state.reference, batch, base, room)
        policy, sums = objective(tokens)
        divergence = losses.kl_k3(tokens)
        entropy = losses.masked(tokens.entropy, tokens.mask).sum()
        bonus = knobs.exploration * state.entropy_coefficient * entropy
        total = (policy - bonus + knobs.kl * divergence) / batch.divisor
        return total, sums | {'entropy': entropy, 'kl': divergence, 'tokens': tokens.mask.sum(), 'loss': total}

    def gradients(accumulated: Accumulated, state: LearnerState, batch: Batch, knobs: Knobs, base: Any) -> Accumulated:
        grads, sums = jax.grad(loss, has_aux=True)(state.params, state, batch, knobs, base)
        grads = jax.tree.map(jnp.add, accumulated.gradients, grads)
        return Accumulated(grads, {name: accumulated.sums[name] + value for name, value in sums.items()})

    return gradients


def divided(accumulated: Accumulated, divisor: jax.Array) -> Accumulated:
    """Sums whose micro-batches had the divisor 1 as they would have been with this one."""
    gradients = jax.tree.map(lambda gradient: gradient / divisor, accumulated.gradients)
    return Accumulated(gradients, accumulated.sums | {'loss': accumulated.sums['loss'] / divisor})


def importance(steps: Sequence[Sequence[Batch]], cap: float) -> dict[str, float]:
    """How far the learner's policy is from the sampler's, on the trained tokens of rescored optimiser steps.

    Returns:
      'importance', the mean of the weights before they are cut (1 in expectation), and 'importance_cut', the share of
      tokens whose weight the cap cuts; nothing where no token is trained on.
    """
    batches = [batch for micros in steps for batch in micros]
    trained = [np.asarray(batch.mask_GKS) > 0 for batch in batches]
    new, old = (
        np.concatenate([np.zeros(0), *(np.asarray(logp)[mask] for logp, mask in zip(logps, trained, strict=True))])
        for logps in ([b.old_logps_GKS for b in batches], [b.sampler_logps_GKS for b in batches])
    )
    weights_N = np.exp(new - old)
    if not weights_N.size:
        return {}
    return {'importance': float(weights_N.mean()), 'importance_cut': float((weights_N > cap).mean())}


def make_apply(
    transform: optax.GradientTransformation, entropy_range: tuple[float, float], entropy_rate: float
) -> Callable[..., tuple[LearnerState, dict]]:
    """apply(state, accumulated, knobs) -> (state, metrics): one optimiser step, and one of the entropy controller."""

    def controlled(coefficient: jax.Array, entropy: jax.Array, target: jax.Array) -> jax.Array:
        moved = coefficient * jnp.where(entropy < target, entropy_rate, 1 / entropy_rate)
        return jnp.where(target < 0, coefficient, jnp.clip(moved, *entropy_range))

    def apply(state: LearnerState, accumulated: Accumulated, knobs: Knobs) -> tuple[LearnerState, dict]:
        with jax.numpy_dtype_promotion('standard'):  # optax's Adam raises a float to an int32 power
            steps, moments = transform.update(accumulated.gradients, state.moments, state.params)
        params = jax.tree.map(lambda p, s: p - knobs.learning_rate * s, state.params, steps)
        sums = dict(accumulated.sums)
        tokens, total = jnp.maximum(sums.pop('tokens'), 1.0), sums.pop('loss')
        means = {name: value / tokens for name, value in sums.items()}
        coefficient = controlled(state.entropy_coefficient, means['entropy'], knobs.entropy_target)
        metrics = means | {
            'loss': total,
            'tokens': tokens,
            'grad_norm': optax.tree.norm(accumulated.gradients),
            'entropy_coefficient': coefficient,
        }
        return LearnerState(state.updates + 1, params, moments, coefficient, state.reference), metrics

    return apply


class Updater:
    """Both halves of one kind of training, jitted with shardings and compiled once for each batch shape."""

    def __init__(
        self,
        *,
        module: Transformer,
        objective: losses.Objective,
        transform: optax.GradientTransformation,
        mesh: Mesh,
        shardings: LearnerState,
        entropy_range: tuple[float, float] = (0.0, 1.0),
        entropy_rate: float = 1.08,
        logits_room: int = LOGITS_ROOM,
    ) -> None:
        room = logits_room * mesh.size  # groups are split over (data, fsdp) and the vocabulary over tensor
        whole, split = sharding.replicated(mesh), sharding.group_sharding(mesh)
        batch_shardings = Batch(*(split,) * 8, divisor=whole)
        self._place = lambda batch: hosts.spread(batch, batch_shardings)
        sums_shape = Accumulated(shardings.params, whole)
        one = jax.ShapeDtypeStruct((1, 1, 1), jnp.float32)
        names = (*jax.eval_shape(objective, losses.Tokens(*(one,) * 7))[1], 'entropy', 'kl', 'tokens', 'loss')
        self._zeros = jax.jit(
            lambda params: Accumulated(jax.tree.map(jnp.zeros_like, params), dict.fromkeys(names, jnp.float32(0))),
            out_shardings=sums_shape,
        )
        self._gradients = jax.jit(
            sharding.over(mesh, make_gradients(module, objective, room)),
            in_shardings=(sums_shape, shardings, batch_shardings, None, None),
            out_shardings=sums_shape,
            donate_argnums=0,
        )
        self._score = jax.jit(
            sharding.over(
                mesh, lambda state, batch, base: token_arrays(module, state.params, None, batch, base, room).logp
            ),
            in_shardings=(shardings, batch_shardings, None),
            out_shardings=split,
        )
        self._divided = jax.jit(divided, in_shardings=(sums_shape, None), out_shardings=sums_shape, donate_argnums=0)
        self._apply = jax.jit(
            make_apply(transform, entropy_range, entropy_rate),
            in_shardings=(shardings, sums_shape, None),
            out_shardings=(shardings, whole),
            donate_argnums=0,
        )

    def __call__(
        self, state: LearnerState, micros: Sequence[Batch], knobs: Knobs, base: Any = None
    ) -> tuple[LearnerState, dict[str, jax.Array]]:
        """One optimiser step over the sum of `micros`. `state` is donated: it must not be used again.

        `base` is the frozen tree that `state.params` adapts, where the module has LoRA: read, never donated or copied.
        """
        accumulated = self._zeros(state.params)
        knobs = jax.tree.map(np.float32, knobs)
        for batch in micros:
            accumulated = self._gradients(accumulated, state, self._place(batch), knobs, base)
        return self._apply(state, accumulated, knobs)

    def begin(self, state: LearnerState) -> Accumulated:
        """The empty sum of an optimiser step whose micro-batches come one by one; see `learn.accumulate`."""
        return self._zeros(state.params)

    def add(
        self, accumulated: Accumulated, state: LearnerState, batch: Batch, knobs: Knobs, base: Any = None
    ) -> Accumulated:
        """The sum with one more micro-batch. `accumulated` is donated, `state` is only read."""
        return self._gradients(accumulated, state, self._place(batch), jax.tree.map(np.float32, knobs), base)

    def finish(
        self, state: LearnerState, accumulated: Accumulated, divisor: float, knobs: Knobs
    ) -> tuple[LearnerState, dict[str, jax.Array]]:
        """The optimiser step over a sum of micro-batches that had the divisor 1. `state` is donated."""
        accumulated = self._divided(accumulated, np.float32(divisor))
        return self._apply(state, accumulated, jax.tree.map(np.float32, knobs))

    def rescored(self, state: LearnerState, batch: Batch, base: Any = None) -> Batch:
        """The batch with ratios taken against the learner's own log-probabilities, as they are before the update.

        What the sampler computed differently is then corrected by truncated importance weights.
        """
        return dataclasses.replace(batch, old_logps_GKS=self._score(state, self._place(batch), base))

    @property
    def compiles(self) -> int:
        """How many batch shapes have been compiled so far."""
        return self._gradients._cache_size()
