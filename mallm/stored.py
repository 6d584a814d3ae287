"""What a run folder tells: the experiment that made it, whether it is a given one, and the parameters it ended with.

Nothing here writes: a finished run can be asked while others train.
"""

import dataclasses
import pathlib
import typing
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
from flax import linen as nn
from jax.sharding import Mesh

from mallm.config import describe, override, rebuilt, same
from mallm.envs.arithmetic import ArithmeticTask
from mallm.envs.base import Task
from mallm.envs.code import CodeTask
from mallm.envs.crew import CrewTask
from mallm.envs.math import MathTask
from mallm.envs.plan_path_task import PlanPathTask
from mallm.envs.sokoban_task import SokobanTask
from mallm.envs.sudoku_task import SudokuTask
from mallm.experiment import Experiment
from mallm.folder import newest
from mallm.io import files
from mallm.io.base import require_same_base, restore_base
from mallm.io.checkpoint import Checkpoints
from mallm.models import lora, sharding
from mallm.models.transformer import Transformer
from mallm.policies import foundation, make_policies, within_context
from mallm.rollout.chat import Tokenizer

TASKS: Mapping[str, type[Task]] = {
    task.__name__: task
    for task in (SokobanTask, PlanPathTask, SudokuTask, CrewTask, ArithmeticTask, MathTask, CodeTask)
}
"""The tasks that come with mallm, by the name that config.json has for them."""
TASK_TYPE = 'task_type'


def settings_of(experiment: Experiment) -> dict[str, Any]:
    """What config.json holds: all settings, and the name of the task's type."""
    return {**describe(experiment), TASK_TYPE: type(experiment.task).__name__}


def is_of(settings: Mapping[str, Any] | None, experiment: Experiment) -> bool:
    """Whether a config.json holds the very settings of an experiment, from the first step on.

    Younger settings count as their defaults. Where the runs lie, where servers are named and whether wandb looked on
    changes no result and is not compared.
    """
    if settings is None:
        return False
    before = [until['config'] for until in settings.get(files.EARLIER, ())]
    if not all(is_of(config, experiment) for config in before):
        return False
    plain = {name: value for name, value in settings.items() if name not in (TASK_TYPE, files.EARLIER)}
    plain |= {'runs': experiment.runs, 'wandb': experiment.wandb, 'endpoints': experiment.endpoints}
    kind = type(experiment.task).__name__
    return settings.get(TASK_TYPE, kind) == kind and same(plain, experiment)


def read_experiment(folder: pathlib.Path, tasks: Mapping[str, type[Task]] = TASKS) -> Experiment:
    """The experiment that a run folder was made with.

    Args:
      folder: of the run.
      tasks: the types of task there are, by name; a task of your own is read with `tasks={'MyTask': MyTask}`.

    Raises:
      FileNotFoundError: there is no such run.
      ValueError: it is of a task that is not among `tasks`, or has settings that this version does not know.
    """
    settings = files.read_json(folder / files.CONFIG)
    if settings is None:
        raise FileNotFoundError(f'{folder} has no {files.CONFIG}: give the folder of a run')
    plain = {name: value for name, value in settings.items() if name not in (TASK_TYPE, 'task', files.EARLIER)}
    try:
        task = read_task(settings['task'], tasks, settings.get(TASK_TYPE))
        return dataclasses.replace(rebuilt(Experiment, plain | {'task': task}), wandb='disabled')
    except (ValueError, TypeError) as cause:
        raise ValueError(f'{folder / files.CONFIG}: {cause}') from cause


def read_task(settings: Mapping[str, Any], tasks: Mapping[str, type[Task]], name: str | None) -> Task:
    """A task from its settings, and the task inside it where it is made of one.

    Its type has a name; an older config.json, and a task inside another, has none, and is known by what it sets.
    """
    if name is None:
        fields = {known: {field.name for field in dataclasses.fields(task)} for known, task in tasks.items()}
        found = [known for known in tasks if settings.keys() <= fields[known]]
        if len(found) != 1:
            raise ValueError(f'settings {sorted(settings)} are those of {found or "no task"} among {sorted(tasks)}')
        name = found[0]
    if name not in tasks:
        raise ValueError(
            f'the run is of the task {name}, which is not among {sorted(tasks)}; call read_experiment with '
            'tasks={...} that has it'
        )
    inside = {part for part, kind in typing.get_type_hints(tasks[name]).items() if kind is Task}
    told = {part: read_task(value, tasks, None) if part in inside else value for part, value in settings.items()}
    return rebuilt(tasks[name], told)


@dataclasses.dataclass(frozen=True)
class Learned:
    """What a run has learned so far.

    Attributes:
      experiment: that made it.
      name: of the run's folder.
      step: of the checkpoint, its newest sound one.
      tokenizer: between text and ids.
      module: what its parameters, or its adapters over `base`, belong to.
      pools: trained parameters of each pool: all of them, or its adapter.
      base: what the adapters adapt, or None.
    """

    experiment: Experiment
    name: str
    step: int
    tokenizer: Tokenizer
    module: Transformer
    pools: Mapping[str, Any]
    base: Any

    @property
    def owns_base(self) -> bool:
        """Whether the base under its adapters is the run's own, and not a pretrained model as it came."""
        experiment = self.experiment
        return self.base is not None and (experiment.clones_base or not experiment.model.source)

    @property
    def whole(self) -> Transformer:
        """The module without adapters."""
        return self.module.clone(lora=None)

    def merged(self, pool: str) -> Any:
        """A pool's parameters, all of them, its adapter merged into its base."""
        kind = self.module.lora
        return self.pools[pool] if kind is None else lora.merge(self.base, self.pools[pool], kind)


def read_learned(folder: pathlib.Path, tasks: Mapping[str, type[Task]] = TASKS) -> Learned:
    """The newest parameters of a run, on one device; neither its optimiser's moments nor anything else is read.

    Raises:
      FileNotFoundError: there is no such run, or no whole checkpoint in it.
      ValueError, CheckpointError: see `read_experiment` and `Checkpoints.restore_part`.
    """
    experiment = override(read_experiment(folder, tasks), {'model.mesh': (1, 1, 1)})
    step, mesh = newest(folder), sharding.make_mesh()
    tokenizer, whole, pretrained = foundation(experiment, mesh)
    experiment = within_context(experiment, whole.arch)
    kind = experiment.model.lora.build()
    module = whole.clone(lora=kind)
    like = {'params': shapes_of(module, 'params' if kind is None else 'lora', mesh)}
    checkpoints = Checkpoints(folder)
    arrays, progress = checkpoints.restore_part(step, dict.fromkeys(sorted(set(experiment.pools.values())), like))
    checkpoints.close()
    base = pretrained if kind is not None else None
    if experiment.clones_base:
        base = restore_base(folder, shapes_of(whole, 'params', mesh))
    elif kind is not None and pretrained is None:  # nothing has trained it: it is what it was born as
        born = make_policies(experiment).base
        base = born.state.params if born else None
    if base is not None and not experiment.clones_base and 'base' in progress:
        require_same_base(base, progress['base'])
    pools = {pool: parts['params'] for pool, parts in arrays.items()}
    return Learned(experiment, folder.resolve().name, step, tokenizer, module, pools, base)


def shapes_of(module: Transformer, collection: str, mesh: Mesh) -> Any:
    """Shape, dtype and sharding of every leaf of one of a module's collections."""
    born = jax.eval_shape(module.init, jax.random.key(0), jax.ShapeDtypeStruct((1, 2), jnp.int32))[collection]
    shardings = sharding.shardings_of(born, mesh)
    return jax.tree.map(
        lambda leaf, place: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=place), nn.unbox(born), shardings
    )
