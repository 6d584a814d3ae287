"""What a pool learns with: parameters, optimiser state and the entropy controller, sharded as the module says."""

import dataclasses
from typing import Any

import flax.struct
import jax
import jax.numpy as jnp
import optax
from flax import linen as nn
from jax.sharding import Mesh

from mallm.models import sharding
from mallm.models.transformer import Transformer


@flax.struct.dataclass
class LearnerState:
    """Attributes:
    updates: number of optimiser steps taken.
    params: the policy's trained parameters (float32): all of them, or its adapter over a base that is kept elsewhere.
    moments: optimiser state, sharded like the parameters.
    entropy_coefficient: weight of the entropy bonus, moved by the controller when there is an entropy target.
    reference: what `params` was for the reference policy of the KL term, or None when there is no KL term. With
      adapters it is a copy of the adapter as training began: fresh from birth that is exactly the base, and after a
      warm start of the adapter it is what the warm start made.
    """

    updates: jax.Array
    params: Any
    moments: optax.OptState
    entropy_coefficient: jax.Array
    reference: Any


def optimiser(*, clip: float, b1: float, b2: float, weight_decay: float) -> optax.GradientTransformation:
    """AdamW after clipping by global norm, without its learning rate: the update scales by that itself."""
    return optax.chain(
        optax.clip_by_global_norm(clip), optax.scale_by_adam(b1=b1, b2=b2), optax.add_decayed_weights(weight_decay)
    )


def make_state(
    key: jax.Array,
    *,
    module: Transformer,
    transform: optax.GradientTransformation,
    mesh: Mesh,
    entropy_coefficient: float,
    keeps_reference: bool,
    given: Any = None,
    donates: bool = False,
) -> tuple[LearnerState, LearnerState]:
    """A fresh state, born sharded on `mesh`, and its shardings (a LearnerState of NamedShardings).

    For a module with LoRA `params` is a fresh adapter alone; the base is made, or read, on its own. `given` parameters
    are copied into the state instead of new ones, or moved into it where the caller `donates` them.
    """
    trained = 'params' if module.lora is None else 'lora'

    sharding.check_heads(module.arch.heads, module.arch.kv_heads, mesh)

    def init(key: jax.Array) -> LearnerState:
        return around(module.init(key, jnp.zeros((1, 2), jnp.int32))[trained])

    def around(params: Any) -> LearnerState:
        reference = jax.tree.map(jnp.copy, params) if keeps_reference else None
        return LearnerState(jnp.int32(0), params, transform.init(params), jnp.float32(entropy_coefficient), reference)

    shardings = sharding.shardings_of(jax.eval_shape(init, key), mesh)
    if given is not None:
        wrap = jax.jit(around, out_shardings=shardings, donate_argnums=0 if donates else ())
        return wrap(given), shardings
    return jax.jit(lambda key: nn.unbox(init(key)), out_shardings=shardings)(key), shardings


def with_reference(state: LearnerState) -> LearnerState:
    """The state with its present parameters copied into the reference; no buffer is shared (they are donated)."""
    return dataclasses.replace(state, reference=jax.tree.map(jnp.copy, state.params))
