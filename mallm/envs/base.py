"""What a task has to offer: worlds, which are frozen values, and seeds from which they are made.

Acting on a world returns the next one. Branching K ways is then free and safe: nothing has to be copied, reset or
undone.
"""

import abc
import dataclasses
from typing import Any, ClassVar, Protocol, Self, runtime_checkable

from mallm.types import Message, Reward


@runtime_checkable
class World(Protocol):
    """One state of one task instance, as the team sees it.

    A world must be immutable and hashable. `observe` and `act` are pure: same arguments, same result. They must not
    raise on any text a model can write; text they cannot use is a defined outcome (a penalty, feedback to show next).
    """

    @property
    def order(self) -> tuple[str, ...]:
        """The roles that may act in this turn, in acting order. Who is known to stay silent is left out."""
        ...

    @property
    def solved(self) -> bool:
        """The task itself is solved."""
        ...

    @property
    def over(self) -> bool:
        """Nothing more can be done: solved, or beyond repair."""
        ...

    def observe(self, role: str) -> tuple[Message, ...]:
        """What `role` is shown now, including what earlier roles of this turn wrote.

        An empty tuple: the role stays silent this turn. It is not asked, and no group is made.
        """
        ...

    def act(self, role: str, text: str) -> tuple[Self, Reward]:
        """The world after `role` wrote `text`, and what that text earned."""
        ...

    def render(self) -> str:
        """A few lines of text for replays."""
        ...


@runtime_checkable
class Waits(Protocol):
    """A world that says whether its `act` waits for other processes. Where it does, candidates, and episodes, are acted
    out beside each other, in threads."""

    waits: bool


@runtime_checkable
class Bounded(Protocol):
    """A world that says between what the team's and a role's own part of a reward lie. One outside is a fault of the
    world: a grader that was talked into 1.5 is not learned from."""

    earns: tuple[float, float]


HELD_OUT, STRICT, FINAL, FINAL_STRICT = (i << 40 for i in range(1, 5))
"""Where the seeds of the splits begin; training seeds lie below. The final ranges are used by no tuning, and the strict
splits are harder than the held-out ones in a way that the task says, or it says that it has nothing harder."""
REPORTED = {'final': (FINAL, FINAL_STRICT), 'held_out': (HELD_OUT, STRICT)}
"""The splits that a report plays, the strict one second, by the name that settings have for them."""


def pool(split: int) -> str:
    """'held_out' for the splits that are watched in training, 'final' for those that no tuning sees."""
    return 'final' if split in REPORTED['final'] else 'held_out'


@dataclasses.dataclass(frozen=True)
class Demonstration:
    """What a role could have written to what it saw."""

    role: str
    messages: tuple[Message, ...]
    text: str


@dataclasses.dataclass(frozen=True)
class Task(abc.ABC):
    """A distribution of worlds for a team, as frozen settings; what an experiment trains on and is judged by.

    Worlds are `Any` here because a task makes and judges its own kind only.

    Attributes:
      team: the roles in acting order.
      instance_name: what one world is called in reports (a board, a story).
      difficulty_name: what `difficulty` counts.
      floor_name: what plays for `floor`.
    """

    instance_name: ClassVar[str] = 'instance'
    difficulty_name: ClassVar[str] = 'difficulty'
    floor_name: ClassVar[str] = 'chance'

    team: tuple[str, ...]

    def words(self) -> dict[str, str]:
        """What reports call things."""
        return {'instance': self.instance_name, 'difficulty': self.difficulty_name, 'floor': self.floor_name}

    @property
    def signs(self) -> str:
        """Characters that are shown or written beside those of the tiny policy's tokenizer."""
        return ''

    @abc.abstractmethod
    def train(self, seed: int) -> World:
        """A fresh training instance: never one of a held-out split."""

    def train_at(self, position: int, *, run: int, seed: int) -> World:
        """The training instance at a position of a run, counted from its first one.

        `seed` belongs to that position, `run` is the seed of the whole run. A task that makes its instances needs the
        former only; one that has a finite number of them goes through all in the order that `run` gives.
        """
        return self.train(seed)

    def instances(self, split: int) -> int | None:
        """How many different instances a held-out split has; None where they are made, as many as are wanted."""
        return None

    @abc.abstractmethod
    def test(self, split: int, index: int) -> World:
        """Instance `index` of a held-out split, which is one of HELD_OUT, STRICT, FINAL, FINAL_STRICT."""

    @abc.abstractmethod
    def difficulty(self, world: Any) -> int:
        """A whole number by which successes are sorted, e.g. the moves of a shortest solution."""

    @abc.abstractmethod
    def floor(self, world: Any, turns: int, seed: int) -> bool:
        """Whether chance alone solves the instance in as many turns: the floor under every result."""

    @abc.abstractmethod
    def demonstrations(self, seed: int) -> list[Demonstration]:
        """What the roles could write to one training instance, for the warm start; may be empty."""

    @property
    def rewarded(self) -> str:
        """What shapes the reward beside the outcome, if anything does; results are labelled with it."""
        return str(vars(self).get('reward', 'outcome'))

    def about(self) -> tuple[str, ...]:
        """Lines that a run says when it starts; a task that cannot be played here raises."""
        return ()
