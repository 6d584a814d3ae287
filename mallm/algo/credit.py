"""From rewards to advantages: one number for each candidate. Host maths in float64; no jax.

A credit rule is a function from the trajectories of a step to `Credited` groups. Whatever a rule compares with what,
it returns one advantage a candidate, and zero wherever there was nothing to compare. An answer is worth its own reward
or, in `team`, the sum of its trajectory's rewards: nothing is discounted, and nothing starts anew at the world's text.
"""

from collections import defaultdict
from collections.abc import Callable, Hashable, Sequence

import numpy as np

from mallm.types import Credited, Group, Trajectory

Normaliser = Callable[[np.ndarray], np.ndarray]
Credit = Callable[[Sequence[Trajectory]], list[Credited]]

SAME = 1e-9
"""Rewards closer than this are one reward: such a group is dead, it says nothing about which answer is better."""


def standardised(rewards_K: np.ndarray, floor: float = 1e-6) -> np.ndarray:
    """(r - mean) / (std + floor) with the sample standard deviation. Source: arXiv 2510.11062 eq. 1."""
    return centred(rewards_K) / (rewards_K.std(ddof=1) + floor)


def centred(rewards_K: np.ndarray) -> np.ndarray:
    """r - mean. Source: Dr. GRPO, arXiv 2503.20783."""
    return rewards_K - rewards_K.mean()


def leave_one_out(rewards_K: np.ndarray) -> np.ndarray:
    """r minus the mean of the others. Source: RLOO, arXiv 2402.14740."""
    return centred(rewards_K) * (len(rewards_K) / (len(rewards_K) - 1))


def compare(rewards_K: Sequence[float], normalise: Normaliser) -> np.ndarray:
    """Advantages of values that answer one question; all zero when there is nothing to tell them apart."""
    values_K = np.asarray(rewards_K, np.float64)
    if len(values_K) < 2 or np.ptp(values_K) <= SAME:
        return np.zeros_like(values_K)
    return normalise(values_K)


def is_dead(credited: Credited) -> bool:
    """Whether no candidate of the group is better or worse than another."""
    return not any(credited.advantages)


def agent_turn(normalise: Normaliser, *, alpha: float) -> Credit:
    """AT-GRPO: each group is compared within itself, for its own agent and turn."""

    def credit(trajectories: Sequence[Trajectory]) -> list[Credited]:
        return [
            Credited(group, tuple(compare([c.reward.total(alpha) for c in group.candidates], normalise).tolist()))
            for group in groups_of(trajectories)
        ]

    return credit


def earned(trajectory: Trajectory) -> float:
    """The return of what moved the world, penalties and shaping included."""
    return trajectory.value


def outcome(trajectory: Trajectory) -> float:
    """1 for a trajectory that solved its task, whatever else it earned."""
    return float(trajectory.solved)


def team(normalise: Normaliser, value: Callable[[Trajectory], float] = earned) -> Credit:
    """Trajectory-level GRPO on the team: siblings of one environment are compared by what the whole of each is worth.

    Every answer of a trajectory gets the trajectory's advantage, whichever role wrote it. Nothing is discounted: no
    turn, and no text of the world between two of them, stands between a reward and the tokens before it.
    """

    def credit(trajectories: Sequence[Trajectory]) -> list[Credited]:
        values: dict[int, list[tuple[int, float]]] = defaultdict(list)
        for trajectory in trajectories:
            values[trajectory.env].append((trajectory.sibling, value(trajectory)))
        advantage: dict[tuple[int, int], float] = {}
        for env, siblings in values.items():
            compared = compare([value for _, value in siblings], normalise)
            advantage |= {(env, sibling): float(a) for (sibling, _), a in zip(siblings, compared, strict=True)}
        return [
            Credited(group, (advantage[group.key.env, group.key.sibling],) * len(group.candidates))
            for group in groups_of(trajectories)
        ]

    return credit


def parallel_agent_turn(normalise: Normaliser, *, alpha: float) -> Credit:
    """Agent- and turn-wise grouping without a tree: siblings' answers at the same (agent, turn) are compared.

    From the second turn on the prompts of a group differ, which is exactly what tree sampling mends.
    """

    def credit(trajectories: Sequence[Trajectory]) -> list[Credited]:
        places: dict[Hashable, list[Group]] = defaultdict(list)
        for group in groups_of(trajectories):
            places[group.key.env, group.key.turn, group.key.role].append(group)
        credited = []
        for groups in places.values():
            advantages = compare([g.candidates[0].reward.total(alpha) for g in groups], normalise)
            credited += [Credited(g, (float(a),)) for g, a in zip(groups, advantages, strict=True)]
        return credited

    return credit


def groups_of(trajectories: Sequence[Trajectory]) -> list[Group]:
    """Every group of every turn. Faulty trajectories must have been removed: they are counted, not trained on."""
    for trajectory in trajectories:
        if trajectory.fault is not None:
            raise ValueError(
                f'env {trajectory.env} failed ({trajectory.fault}): leave faulty trajectories out of credit'
            )
    return [group for trajectory in trajectories for turn in trajectory.turns for group in turn.groups]
