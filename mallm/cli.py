"""The command line of every experiment: `--help`, dotted overrides, `--smoke`, `--resume RUN`."""

import ctypes
import dataclasses
import math
from collections.abc import Sequence
from typing import Annotated

import tyro

from mallm.experiment import Experiment
from mallm.hosts import ALONE, Hosts, join
from mallm.rollout.engine import RoleSampling
from mallm.train import train


@dataclasses.dataclass(frozen=True)
class Arguments:
    """What the command line adds to an experiment.

    Attributes:
      experiment: the experiment's own settings.
      smoke: a few tiny steps of everything, to see that it works here.
      resume: name of a run folder to go on with, from its newest whole checkpoint.
      hosts: for a run of several processes, one on each host: start the same command on all, with another index.
    """

    experiment: Annotated[Experiment, tyro.conf.arg(name='')]
    smoke: bool = False
    resume: str = ''
    hosts: Hosts = ALONE


def smoke(experiment: Experiment) -> Experiment:
    """The same experiment, very small."""
    micro_groups = max(8, math.prod(experiment.model.mesh[:2]))  # at least one for each device
    step_groups = micro_groups if experiment.learning.step_groups else 0
    return dataclasses.replace(
        experiment,
        name=f'{experiment.name}_smoke',
        steps=2,
        sampling=dataclasses.replace(experiment.sampling, envs=8, k=4, turns=2),
        learning=dataclasses.replace(experiment.learning, step_groups=step_groups, micro_groups=micro_groups),
        model=dataclasses.replace(experiment.model, width=32, layers=1, heads=2, kv_heads=1, head_dim=16, ffn=64),
        warm_start=dataclasses.replace(experiment.warm_start, steps=min(2, experiment.warm_start.steps), rows=16),
        evaluation=dataclasses.replace(experiment.evaluation, every=1, boards=8, report_boards=16, replays=2),
    )


def with_roles(experiment: Experiment) -> Experiment:
    """The same experiment with every role of its team named, so that each has flags of its own."""
    named = {role: RoleSampling() for role in experiment.task.team}
    sampling, evaluation = experiment.sampling, experiment.evaluation
    return dataclasses.replace(
        experiment,
        sampling=dataclasses.replace(sampling, roles=named | sampling.roles),
        evaluation=dataclasses.replace(evaluation, roles=named | evaluation.roles),
    )


def keep_memory() -> None:
    """Tells glibc to keep freed memory: XLA frees and takes large buffers at every call, and mapping them anew each
    time slows a training step on a CPU. Where there is no glibc, nothing happens."""
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (AttributeError, OSError, TypeError):  # another C library, or Windows
        return
    trim_threshold, top_pad, mmap_max = -1, -2, -4
    for option, value in ((trim_threshold, 1 << 30), (top_pad, 64 << 20), (mmap_max, 0)):
        mallopt(option, value)


def arguments(config: Experiment, description: str | None, words: Sequence[str] | None = None) -> Arguments:
    """What a command line (this process's own, unless given) makes of `config`."""
    return tyro.cli(Arguments, args=words, default=Arguments(with_roles(config)), description=description)


def main(config: Experiment, description: str | None) -> None:
    """Parses the command line over `config` and trains."""
    given = arguments(config, description)
    experiment = smoke(given.experiment) if given.smoke else given.experiment
    keep_memory()
    join(given.hosts)
    train(experiment, given.resume or None, given.hosts)
