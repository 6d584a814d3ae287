"""What the games have in common when they speak to real language models: answer lines, action lists, Python tools.

No text is evaluated. What a tool's program prints is text of a model's like any other. Nothing here raises on any text.
"""

import ast
import re
from collections.abc import Callable
from typing import Any, Protocol

from mallm.envs.python_tool import after_thoughts

LONGEST = 20_000
"""Characters at the end of an answer or an output that are looked at."""

ANSWER = re.compile(r'^[^\S\n]*####(?!#)[^\S\n]*(\S.*)$', re.MULTILINE)
"""What follows a `####` that starts a line and has something after it."""
_ACTIONS = re.compile(r'^[^\S\n]*\**[^\S\n]*Actions?(?:[^\S\n]+List)?[^\S\n]*\**[^\S\n]*:[^\S\n]*\**(.*)$', re.M | re.I)
_LIST = re.compile(r'^[^\S\n]*(\[.*\])[^\S\n]*$', re.MULTILINE)


class Ran(Protocol):
    """What became of a tool's program."""

    @property
    def ok(self) -> bool:
        """It ran to its end without a failure."""
        ...

    @property
    def stdout(self) -> str:
        """What it printed."""
        ...

    def shown(self, longest: int = 1000) -> str:
        """The report for the next role."""
        ...


PythonTool = Callable[[str, str], Ran]
"""(answer that holds a program, stdin) -> what became of it. `mallm.envs.python_tool.run_python_tool` is one."""


def final_answer(text: str) -> str | None:
    """What follows the last `####` that starts a line, else the last line that is a list, else None.

    Thoughts are no answer, nor are those that were cut off.
    """
    tail = after_thoughts(text)[-LONGEST:]
    found = ANSWER.findall(tail) or _LIST.findall(tail)
    return found[-1] if found else None


def actions_list(output: str) -> str | None:
    """What follows the last `**Actions List**:` of a program's output, else its last line that is a list, else None."""
    tail = output[-LONGEST:]
    found = _ACTIONS.findall(tail) or _LIST.findall(tail)
    return found[-1].strip() if found else None


def literal(text: str, longest: int = 2000) -> Any:
    """The Python literal that a text is, None where it is none or too long."""
    try:
        return ast.literal_eval(text.strip()) if len(text) <= longest else None
    except (ValueError, SyntaxError, TypeError, MemoryError, RecursionError):
        return None


PROGRAM_RULES = (
    'Write one ```python block. The program is run once, without a network; the state of the game is on its standard '
    'input, in the form in which you see it. Its last printed line must be `**Actions List**: ` and the list.'
)
THINK = 'Think step by step and briefly. End with one line: `#### ` and the list, and nothing after it.'
