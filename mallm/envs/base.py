"""The World protocol: a world is a frozen value, and acting on it returns the next one.

Branching K ways is then free and safe: nothing has to be copied, reset or undone.
"""

from typing import Protocol, Self, runtime_checkable

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
