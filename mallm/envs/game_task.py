"""What the tasks of games have in common: teams, the style in which they are spoken to, and who runs programs."""

import dataclasses
from typing import Literal

from mallm.envs import sandbox
from mallm.envs.base import Task
from mallm.envs.games import MARKS
from mallm.envs.prose import PythonTool
from mallm.envs.python_tool import ISOLATED, run_isolated, run_python_tool


@dataclasses.dataclass(frozen=True)
class GameTask(Task):
    """A game for a tool and a plan.

    Attributes:
      team: the roles in acting order: ('tool', 'plan'), ('plan',) or ('solo',).
      style: 'compact' for the tiny policy; 'text' for real language models: words, and a tool that writes Python. That
        has no demonstrations, and a whole solution fits in a turn.
      require_isolation: with 'text', refuse to run programs where a wall of the sandbox is missing.
    """

    team: tuple[str, ...] = ('tool', 'plan')
    style: Literal['compact', 'text'] = 'compact'
    require_isolation: bool = False

    def __post_init__(self) -> None:
        unknown = [role for role in self.team if role not in MARKS]
        if unknown or not self.team or ('tool' in self.team and 'plan' not in self.team):
            raise ValueError(
                f"team={self.team}: roles are 'tool', 'plan' and 'solo', and a tool needs a plan to act; use "
                "('tool', 'plan'), ('plan',) or ('solo',)"
            )

    @property
    def python(self) -> PythonTool:
        """What runs the programs of a tool that writes any."""
        return run_isolated if self.require_isolation else run_python_tool

    def about(self) -> tuple[str, ...]:
        """The walls around programs, where any are run. Refuses to go on without walls that are required."""
        if self.style == 'compact':
            return ()
        sandbox.run('', limits=ISOLATED if self.require_isolation else sandbox.DEFAULT)
        return (str(sandbox.shared().walls),)
