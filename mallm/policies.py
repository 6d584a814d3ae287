"""What plays the roles of a run: a tokenizer, a module, and the pools that hold its parameters, new or pretrained."""

import dataclasses
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax.sharding import Mesh

from mallm import rng
from mallm.config import require
from mallm.experiment import Experiment
from mallm.io import hf
from mallm.learn.pack import round_up
from mallm.learn.pool import Pool
from mallm.learn.state import LearnerState, make_state, optimiser
from mallm.models.config import Architecture
from mallm.models.sharding import make_mesh
from mallm.models.transformer import Transformer
from mallm.rollout.chat import HuggingFaceTokenizer, TinyTokenizer, Tokenizer


@dataclasses.dataclass(frozen=True)
class Policies:
    """Attributes:
    tokenizer: between text and ids.
    module: what samples and learns, with LoRA where pools are adapters.
    whole: the same without LoRA, which is what a warm start from demonstrations trains.
    transform: the optimiser, without its learning rate.
    pools: by name, each with its own parameters or adapter.
    base: what the adapters adapt, or None.
    shardings, whole_shardings: of the pools' states, and of their base, or of the pools again.
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
    adapts = model.lora.rank > 0
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
            donates=module is whole and adapts,
        )
        return Pool(name, state), shardings

    pools = {}
    for name in sorted(set(experiment.pools.values())):
        pools[name], shardings = make(name, module, transform, experiment.algorithm.kl, None if adapts else pretrained)
    if not adapts:
        return Policies(tokenizer, module, whole, transform, mesh, pools, None, shardings, shardings)
    of_base = transform if experiment.clones_base else optax.identity()
    base, base_shardings = make('base', whole, of_base, 0.0, pretrained)
    return Policies(tokenizer, module, whole, transform, mesh, pools, base, shardings, base_shardings)


def foundation(experiment: Experiment, mesh: Mesh) -> tuple[Tokenizer, Transformer, Any]:
    """Tokenizer, module and pretrained parameters (None: new ones are made) that `model.source` stands for."""
    model, dtype = experiment.model, jnp.dtype(experiment.model.dtype)
    if not model.source:
        tiny = TinyTokenizer(experiment.task.signs)
        return tiny, Transformer(model.architecture(len(tiny)), dtype), None
    stays_frozen = model.lora.rank > 0 and not experiment.clones_base
    arch, params = hf.load(model.source, mesh, dtype if stays_frozen else jnp.float32)
    found = hf.find(model.source)
    if found.is_dir():  # with what its generation_config.json says of end tokens
        tokenizer = HuggingFaceTokenizer.open(str(found), thinking=model.thinking)
    else:
        tokenizer = HuggingFaceTokenizer(hf.load_tokenizer(found), thinking=model.thinking)
    return tokenizer, Transformer(dataclasses.replace(arch, remat=model.remat), dtype), params


def within_context(experiment: Experiment, arch: Architecture) -> Experiment:
    """The experiment with prompts limited to what the model's context holds beside an answer, padding counted.

    Raises:
      ValueError: the longest answer alone does not fit.
    """
    if arch.context is None:
        return experiment
    (prompt_multiple, answer_multiple), sampling = experiment.packing().multiple, experiment.sampling
    answer = round_up(max(params.max_tokens for params in experiment.sampler().roles.values()), answer_multiple)
    room = (arch.context - answer) // prompt_multiple * prompt_multiple
    require(room > 0, 'sampling.max_tokens', answer, f'leaves no room for a prompt in a context of {arch.context}')
    limit = min(room, sampling.max_prompt or room)
    return dataclasses.replace(experiment, sampling=dataclasses.replace(sampling, max_prompt=limit))
