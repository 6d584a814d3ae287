"""Transcripts that a user has, as demonstrations: a JSONL file, each line what one role was shown and what it wrote.

  {"role": "tool", "messages": [{"author": "user", "content": "What is 3 times 4?"}], "text": "3 * 4"}

`messages` is all that the role was shown, its own earlier answers among them, up to where `text` begins; an author is
'system', 'user' or 'assistant'. Other fields are left unread.
"""

import pathlib
from collections.abc import Sequence

from mallm.config import require
from mallm.envs.base import Demonstration
from mallm.envs.data import DataError, Row, field, inside, json_of, typed
from mallm.types import Message

AUTHORS = ('system', 'user', 'assistant')


def read(place: str, team: Sequence[str]) -> tuple[Demonstration, ...]:
    """The transcripts of a file in its order: line n is element n - 1.

    Raises:
      DataError: there is no such file, or a line is not a transcript of the team; with file, line and field.
    """
    path, found = pathlib.Path(place).expanduser(), []
    if not path.is_file():
        raise DataError(f'{place}: there is no such file of transcripts; give one with a JSON object on each line')
    for number, line in enumerate(path.read_bytes().splitlines(), 1):
        try:
            found.append(transcript(typed(json_of(line.decode()), dict), team))
        except (LookupError, TypeError, ValueError) as error:
            raise DataError(f'{path.name}, line {number}: {error}; correct or remove that line') from error
    if not found:
        raise DataError(f'{path.name}: is empty; give a file with a JSON object on each line')
    return tuple(found)


def transcript(row: Row, team: Sequence[str]) -> Demonstration:
    """What one line says. Raises LookupError, TypeError or ValueError."""
    role = field(row, 'role', str)
    require(role in team, 'role', role, f'is not of the team {tuple(team)}')
    messages = field(row, 'messages', list)
    with inside('messages'):
        told = tuple(Message(field(typed(m, dict), 'author', str), field(m, 'content', str)) for m in messages)
    require(bool(told), 'messages', messages, 'a role is shown at least one message')
    strange = sorted({message.author for message in told} - set(AUTHORS))
    require(not strange, 'author', strange, f'must be one of {AUTHORS}')
    return Demonstration(role, told, field(row, 'text', str))
