"""Held-out evaluation: one path, no tree, success means solved."""

import dataclasses
import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import Any

from mallm import hosts, rng
from mallm.envs.base import REPORTED, Task, World
from mallm.experiment import Experiment
from mallm.io.log import peak_rss_mib
from mallm.rollout import tree, workers
from mallm.rollout.workers import Sample, Seeded
from mallm.types import Trajectory


@dataclasses.dataclass(frozen=True)
class Evaluation:
    """Outcome of one evaluation.

    Attributes:
      trajectories: one episode a board.
      difficulty: of each board, as its task counts it.
    """

    trajectories: tuple[Trajectory, ...]
    difficulty: tuple[int, ...]

    @property
    def success(self) -> float:
        return mean([t.solved for t in self.trajectories])

    @property
    def faults(self) -> float:
        return mean([t.fault is not None for t in self.trajectories])

    @property
    def truncated(self) -> float:
        """Share of episodes that a too long prompt ended."""
        return mean([t.truncated for t in self.trajectories])

    @property
    def turns_to_solve(self) -> float:
        solved = [len(t.turns) for t in self.trajectories if t.solved]
        return mean(solved) if solved else math.nan

    @property
    def clean(self) -> dict[str, float]:
        """By role, the share of answers that cost no penalty for their form (their `format` term is 0)."""
        forms: dict[str, list[bool]] = defaultdict(list)
        for trajectory in self.trajectories:
            for group in (group for turn in trajectory.turns for group in turn.groups):
                terms = dict(group.candidates[group.chosen].reward.terms)
                forms[group.key.role].append(not terms.get('format', 0.0))
        return {role: mean(values) for role, values in sorted(forms.items())}

    def by_difficulty(self) -> dict[int, float]:
        solved: dict[int, list[bool]] = defaultdict(list)
        for trajectory, moves in zip(self.trajectories, self.difficulty, strict=True):
            solved[moves].append(trajectory.solved)
        return {moves: mean(values) for moves, values in sorted(solved.items())}


def mean(values: Sequence[float]) -> float:
    return sum(values) / len(values) if values else 0.0


def evaluate(
    worlds: Sequence[World], difficulty: Sequence[int], stage: tree.Stage, *, seed: int, step: int, split: int
) -> Evaluation:
    """Plays every world once. The same (seed, step, split) plays the same episodes."""
    place = tree.Place(seed, rng.EVALUATE, step, env=split << 20)  # no two splits share the place of a board
    return Evaluation(tuple(played(tree.play_single, worlds, place, stage)), tuple(difficulty))


def available(task: Task, split: int, boards: int) -> int:
    """So many of the wanted instances of a split are played: each once, where it has fewer."""
    return min(boards, task.instances(split) or boards)


def examined(experiment: Experiment, stage: tree.Stage, *, split: int, step: int, boards: int) -> Evaluation:
    """Plays the first `boards` instances of a split, in the one order that all evaluations have."""
    task = experiment.task
    worlds = [task.test(split, i) for i in range(available(task, split, boards))]
    difficulty = [task.difficulty(world) for world in worlds]
    return evaluate(worlds, difficulty, stage, seed=experiment.seed, step=step, split=split >> 40)


def played(sample: Sample, worlds: Sequence[World | Seeded], place: tree.Place, stage: tree.Stage) -> list[Trajectory]:
    """Episodes of all worlds, each process playing its share of them and all of them getting every trajectory."""
    mine = hosts.share(len(worlds))
    there = dataclasses.replace(place, env=place.env + mine.start)
    return hosts.gathered(workers.play(sample, worlds[mine.start : mine.stop], there, stage))


def replay_of(trajectory: Trajectory, difficulty: int, words: Mapping[str, str]) -> Mapping[str, Any]:
    """One episode as plain values: what each role was shown and wrote, what it earned, and the boards.

    `words` are the task's, see `Task.words`.
    """
    return {
        'env': trajectory.env,
        'solved': trajectory.solved,
        'difficulty': difficulty,
        'words': dict(words),
        'frames': list(trajectory.frames),
        'turns': [
            {
                'groups': [
                    {
                        'role': group.key.role,
                        'prompt': '\n'.join(message.content for message in group.prompt.messages),
                        'answer': (best := group.candidates[group.chosen]).answer.text,
                        'reward': best.reward.total(1.0),
                        'terms': dict(best.reward.terms),
                        'chosen': True,
                    }
                    for group in turn.groups
                ]
            }
            for turn in trajectory.turns
        ],
    }


def summarise(
    experiment: Experiment,
    progress: Mapping[str, Any],
    after: Mapping[str, Any],
    *,
    name: str,
    minutes: tuple[float, float],
) -> dict[str, Any]:
    """The one JSON line that every experiment ends with. Shares are of 1, greedy unless marked `_t1`.

    `name` is that of the run's folder, `minutes` what it took: wall and processor time.
    """
    before, settings = progress['before'], experiment.evaluation
    if 'success_by_optimal' in before:  # what a checkpoint says that is older than `Task.words`
        before = before | {'success_by_difficulty': before['success_by_optimal']}
    split, strict = REPORTED[settings.split]
    task, wanted = experiment.task, settings.report_boards
    worlds = [task.test(split, i) for i in range(available(task, split, wanted))]
    floor = [task.floor(world, experiment.sampling.turns, i) for i, world in enumerate(worlds)]
    measured = {
        f'{kind}_{when}{suffix}': round(values[kind + suffix], 4)
        for suffix in ('', '_t1')
        for kind in ('success', 'strict')
        for when, values in (('before', before), ('after', after))
    }
    return {
        'run': name,
        'seed': experiment.seed,
        'commit': progress['commit'],
        'minutes': round(minutes[0], 2),
        'cpu_minutes': round(minutes[1], 2),
        'training_cpu_minutes': round(progress['training_cpu_minutes'], 2),
        **({'training_tokens': progress['training_tokens']} if 'training_tokens' in progress else {}),
        'peak_rss_mib': round(peak_rss_mib(), 1),
        **measured,
        **({'swapped_after': round(after['swapped'], 4)} if 'swapped' in after else {}),
        'random_mover': round(mean(floor), 4),
        'faults': round(max(before.get('faults', 0.0), after['faults']), 4),
        'format_before': before.get('format', {}),
        'format_after': after['format'],
        'by_difficulty_before': before['success_by_difficulty'],
        'by_difficulty_after': after['success_by_difficulty'],
        'strict_by_difficulty_after': after['strict_by_difficulty'],
        'words': experiment.task.words(),
        'split': settings.split,
        'boards': len(worlds),
        'boards_distinct': len({world.render() for world in worlds}),
        'boards_strict': available(task, strict, wanted),
        'reward': experiment.task.rewarded,
    }
