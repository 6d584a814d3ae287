"""What the games of a tool and a plan have in common: marks, how moves are made, which folds of instances are kept."""

from collections.abc import Callable, Iterable
from typing import Protocol, TypeVar

MARKS = {'tool': 'T', 'plan': 'P', 'solo': 'S'}
"""The first sign of a prompt to the tiny policy."""

POOLS = ('any', 'train', 'held_out', 'final')
"""What a spec may ask for: fold 0 of all instances is held out and fold 1 is final; the others train."""


class GenerationError(RuntimeError):
    """No instance fits the spec within its tries."""


def keeps(pool: str, fold: int) -> bool:
    """Whether instances of a fold belong to a pool, one of POOLS."""
    return pool == 'any' or pool == {0: 'held_out', 1: 'final'}.get(fold, 'train')


class Solvable(Protocol):
    @property
    def solved(self) -> bool: ...


Position = TypeVar('Position', bound=Solvable)
Action = TypeVar('Action')


def play_until_solved(
    position: Position, actions: Iterable[Action], act: Callable[[Position, Action], Position | None]
) -> tuple[Position, int]:
    """The position after the actions, and how many of them could not be done; nothing is done once it is solved."""
    refused = 0
    for action in actions:
        if position.solved:
            break
        after = act(position, action)
        refused += after is None
        position = position if after is None else after
    return position, refused
