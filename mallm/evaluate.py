"""Held-out evaluation: one path, no tree, success means solved."""

import asyncio
import dataclasses
import math
from collections import defaultdict
from collections.abc import Callable, Coroutine, Mapping, Sequence
from typing import Any

from mallm import hosts, rng
from mallm.envs.base import World
from mallm.rollout import tree
from mallm.types import Trajectory

Sample = Callable[[Sequence[World], tree.Place, tree.Stage], Coroutine[Any, Any, list[Trajectory]]]


@dataclasses.dataclass(frozen=True)
class Evaluation:
    """Outcome of one evaluation.

    Attributes:
      trajectories: one episode a board.
      difficulty: moves of a shortest solution of each board.
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
    def turns_to_solve(self) -> float:
        solved = [len(t.turns) for t in self.trajectories if t.solved]
        return mean(solved) if solved else math.nan

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


def played(sample: Sample, worlds: Sequence[World], place: tree.Place, stage: tree.Stage) -> list[Trajectory]:
    """Episodes of all worlds, each process playing its share of them and all of them getting every trajectory."""
    mine = hosts.share(len(worlds))
    there = dataclasses.replace(place, env=place.env + mine.start)
    return hosts.gathered(asyncio.run(sample(worlds[mine.start : mine.stop], there, stage)))


def replay_of(trajectory: Trajectory, difficulty: int) -> Mapping[str, Any]:
    """One episode as plain values: what each role was shown and wrote, what it earned, and the boards."""
    return {
        'env': trajectory.env,
        'solved': trajectory.solved,
        'optimal': difficulty,
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
