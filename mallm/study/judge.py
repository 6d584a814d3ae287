"""Judges stored runs: held-out success of a team whose roles may be played by what different runs have learned."""

import dataclasses
import pathlib
from collections.abc import Mapping
from typing import Any

import jax

from mallm.envs.base import REPORTED, Task
from mallm.evaluate import examined
from mallm.rollout import tree
from mallm.rollout.jax_engine import JaxEngine
from mallm.stored import TASKS, Learned, read_learned
from mallm.train import refuse_too_many_faults


@dataclasses.dataclass(frozen=True)
class Part:
    """Who plays a role: the policy that plays `role` in the run `folder`."""

    folder: pathlib.Path
    role: str


def judge(
    folder: pathlib.Path,
    parts: Mapping[str, Part],
    *,
    boards: int = 0,
    split: str = '',
    temperature: float = 0.0,
    tasks: Mapping[str, type[Task]] = TASKS,
) -> dict[str, Any]:
    """Success of a run's team on its own task, as its summary has it, with some roles played by other policies.

    Args:
      folder: the run whose task, seed, turns and sampling are used; it plays every role that `parts` does not name.
      parts: by role; each may be another role of the same run.
      boards: of each split, or all that it has; 0 for as many as the run reported on.
      split: 'final' or 'held_out'; '' for the one that the run reported on.
      temperature: 0 is greedy.

    Raises:
      ValueError: a role that the team or the other run does not have, or a policy of another model.
    """
    host = read_learned(folder, tasks)
    experiment, step = host.experiment, host.step
    others = {path: read_learned(path, tasks) for path in dict.fromkeys(part.folder for part in parts.values())}
    refuse_unknown(parts, host, others)
    guests = {role: (others[part.folder], part.role) for role, part in parts.items()}
    for role, (guest, _) in guests.items():
        refuse_other_model(role, guest, host)
    engine, cast = company(host, guests)
    stage = tree.Stage(experiment.sampler(temperature), engine, host.tokenizer, cast)
    boards, split = boards or experiment.evaluation.report_boards, split or experiment.evaluation.split
    if split not in REPORTED:
        raise ValueError(f'split={split!r}: must be one of {sorted(REPORTED)}')
    told: dict[str, Any] = {'run': host.name, 'seed': experiment.seed, 'step': step}
    told |= {'cast': {role: f'{guest.name}@{of}' for role, (guest, of) in guests.items()}}
    for name, begin in zip(('success', 'strict'), REPORTED[split], strict=True):
        outcome = examined(experiment, stage, split=begin, step=step, boards=boards)
        sound = [trajectory for trajectory in outcome.trajectories if trajectory.fault is None]
        refuse_too_many_faults(experiment, outcome.trajectories, sound)
        told |= {
            name: round(outcome.success, 4),
            f'{name}_by_difficulty': {str(k): round(v, 4) for k, v in outcome.by_difficulty().items()},
            f'{name}_faults': round(outcome.faults, 4),
            f'{name}_turns_to_solve': outcome.turns_to_solve,
            {'success': 'boards', 'strict': 'boards_strict'}[name]: len(outcome.trajectories),
        }
    return told | {'temperature': temperature, 'split': split, 'words': experiment.task.words()}


def company(host: Learned, guests: Mapping[str, tuple[Learned, str]]) -> tuple[JaxEngine, dict[str, str]]:
    """An engine with the policies of all roles, and who plays whom.

    A team without guests plays as it was trained. With guests every policy is given whole, for adapters of different
    runs need not have the same base.
    """
    root = jax.random.key(host.experiment.seed)
    if not guests:
        engine = JaxEngine(host.module, host.tokenizer, root)
        engine.load_base(host.base)
        for pool, params in host.pools.items():
            engine.load(pool, params, host.step)
        return engine, dict(host.experiment.pools)
    engine, cast = JaxEngine(host.whole, host.tokenizer, root), {}
    loaded: set[str] = set()
    for role in host.experiment.task.team:
        learned, plays = guests.get(role, (host, role))
        pool = learned.experiment.pools[plays]
        cast[role] = f'{learned.name}/{pool}'
        if cast[role] not in loaded:
            engine.load(cast[role], learned.merged(pool), learned.step)
            loaded.add(cast[role])
    return engine, cast


def refuse_unknown(parts: Mapping[str, Part], host: Learned, others: Mapping[pathlib.Path, Learned]) -> None:
    for role, part in parts.items():
        if role not in host.experiment.task.team:
            raise ValueError(f'cast {role}: the team of {host.name} is {host.experiment.task.team}')
        pools = others[part.folder].experiment.pools
        if part.role not in pools:
            raise ValueError(
                f'cast {role}: the run {part.folder.name} has no role {part.role!r}, it has {sorted(pools)}'
            )


def refuse_other_model(role: str, guest: Learned, host: Learned) -> None:
    """Policies of one engine have one architecture and one tokenizer."""
    mine, other = host.experiment.model, guest.experiment.model
    if guest.whole.arch != host.whole.arch or mine.source != other.source:
        raise ValueError(
            f'cast {role}: {guest.name} is another model ({guest.whole.arch}, source {other.source!r}) than that of '
            f'{host.name} ({host.whole.arch}, source {mine.source!r}); cast from runs of the same model'
        )
