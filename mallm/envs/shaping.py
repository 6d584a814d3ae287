"""Rewards that cannot be farmed: 1 for solving, and the difference of a potential, so that circles pay nothing."""

import dataclasses
from collections.abc import Callable
from typing import Any

from mallm.types import Reward


@dataclasses.dataclass(frozen=True)
class Shaping:
    """What a position is worth beside being solved. Positions have `solved`; each game has a kind of its own.

    Attributes:
      potential: position -> value; 0 for every solved position.
      hopeless: position -> the episode may end here, unsolved.
    """

    potential: Callable[[Any], float]
    hopeless: Callable[[Any], bool]


def nothing(position: Any) -> float:
    return 0.0


def never(position: Any) -> bool:
    return False


OUTCOME = Shaping(nothing, never)


def gain(before: Any, after: Any, shaping: Shaping) -> tuple[tuple[str, float], ...]:
    """The team's reward for a change of position: 1 for solving it, and the difference of potential."""
    solving = float(after.solved and not before.solved)
    return (('solved', solving), ('shaping', shaping.potential(after) - shaping.potential(before)))


def reward(team: tuple[tuple[str, float], ...], local: tuple[tuple[str, float], ...]) -> Reward:
    return Reward(sum(value for _, value in team), sum(value for _, value in local), team + local)


def penalties(useless: float, *, clean: bool, stuck: bool) -> tuple[tuple[str, float], ...]:
    """A tool's own: for text that is not, or not all, understood, and for a program that gets stuck."""
    return (('format', -useless * (not clean)), ('stuck', -useless * stuck))
