"""What plays the roles of a run: a tokenizer, a module, and the pools that hold its parameters, new or pretrained."""

import dataclasses
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax.sharding import Mesh

from mallm import rng
from mallm.experiment import Experiment
from mallm.io import hf
from mallm.learn.pool import Pool
from mallm.learn.state import LearnerState, make_state, optimiser
from mallm.models.sharding import make_mesh
from mallm.models.transformer import Transformer
from mallm.rollout.chat import HuggingFaceTokenizer, TinyTokenizer, Tokenizer


@dataclasses.dataclass(frozen=True)
class Policies:
    """Attributes:
    tokenizer: between text and ids.
    module: what samples and learns, with LoRA where pools are adapters.
    whole: the same without LoRA, which is what a warm start trains.
    transform: the optimiser, without its learning rate.
    pools: by name, each with its own parameters or adapter.
    base: what the adapters adapt, or None.
    shardings, whole_shardings: of the pools' states, and of what a warm start trains.
    """

    tokenizer: Tokenizer
    module: Transformer
    whole: Transformer
    transform: optax.GradientTransformation
    mesh: Mesh
    pools: Mapping[str, Pool]
    base: Pool | None
    shardings: LearnerState
    whole_shardings: LearnerState


def make_policies(experiment: Experiment) -> Policies:
    """Parameters of each pool are born sharded, from a key of their own, or are copies of the pretrained ones."""
    model, learning = experiment.model, experiment.learning
    mesh = make_mesh(*model.mesh)
    tokenizer, whole, pretrained = foundation(experiment, mesh)
    module = whole.clone(lora=model.lora.build())
    transform = optimiser(clip=learning.clip, b1=learning.b1, b2=learning.b2, weight_decay=learning.weight_decay)

    def make(name: str, module: Transformer, transform: Any, kl: float, given: Any) -> tuple[Pool, LearnerState]:
        key = rng.key_for(jax.random.key(experiment.seed), rng.INIT, rng.number_of(name))
        state, shardings = make_state(
            key,
            module=module,
            transform=transform,
            mesh=mesh,
            entropy_coefficient=experiment.algorithm.entropy,
            keeps_reference=kl > 0,
            given=given,
            donates=name == 'base',
        )
        return Pool(name, state), shardings

    adapts = module.lora is not None
    pools = {}
    for name in sorted(set(experiment.pools.values())):
        pools[name], shardings = make(name, module, transform, experiment.algorithm.kl, None if adapts else pretrained)
    if not adapts:
        return Policies(tokenizer, module, whole, transform, mesh, pools, None, shardings, shardings)
    of_base = transform if experiment.warm_start.steps else optax.identity()
    base, base_shardings = make('base', whole, of_base, 0.0, pretrained)
    return Policies(tokenizer, module, whole, transform, mesh, pools, base, shardings, base_shardings)


def foundation(experiment: Experiment, mesh: Mesh) -> tuple[Tokenizer, Transformer, Any]:
    """Tokenizer, module and pretrained parameters (None: new ones are made) that `model.source` stands for."""
    model, dtype = experiment.model, jnp.dtype(experiment.model.dtype)
    if not model.source:
        tiny = TinyTokenizer()
        return tiny, Transformer(model.architecture(len(tiny)), dtype), None
    arch, params = hf.load(model.source, mesh)
    tokenizer = HuggingFaceTokenizer(hf.load_tokenizer(model.source, arch), thinking=model.thinking)
    return tokenizer, Transformer(dataclasses.replace(arch, remat=model.remat), dtype), params
