"""Plays a stored game in the terminal: the board, what each role wrote, what it earned, step by step."""

import pathlib
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from rich.text import Text

from mallm.io import files, log
from mallm.io.display import printable

RUNS = pathlib.Path('runs')
OLD_WORDS = {'instance': 'board', 'difficulty': 'shortest solution'}
"""What replays speak of that were stored before a task had words of its own."""


class NothingToShow(LookupError):
    """The run, its replays or the instance asked for do not exist; the message names those that do."""


def play(run: str, *, board: int | None = None, when: str = 'after', speed: float = 1.0) -> None:
    """Plays one game; waits between turns only where a person looks on (a terminal).

    Args:
      run: a run folder, or the name of one in runs/.
      board: the instance (`env` of the replay); None takes the first one stored.
      when: 'before' or 'after' training.
      speed: turns a second.

    Raises:
      NothingToShow: no such run, moment or board.
      ValueError: the speed is not positive.
    """
    if speed <= 0:
        raise ValueError(f'speed={speed}: turns a second must be positive')
    folder = find_run(run)
    replay = find_replay(folder, board=board, when=when)
    console = log.stdout_console()
    for number, part in enumerate(scenes(folder.name, replay, when)):
        if number and console.is_terminal:
            time.sleep(1 / speed)
        console.print(part)


def find_run(run: str) -> pathlib.Path:
    for folder in (pathlib.Path(run), RUNS / run):
        if folder.is_dir():
            return folder
    there = sorted(folder.name for folder in RUNS.iterdir() if folder.is_dir()) if RUNS.is_dir() else []
    raise NothingToShow(f'no run {run!r}; {RUNS}/ holds {", ".join(there) or "no runs"}')


def find_replay(folder: pathlib.Path, *, board: int | None, when: str) -> Mapping[str, Any]:
    stored: Mapping[str, Sequence[Mapping[str, Any]]] = files.read_json(folder / files.REPLAYS) or {}
    kept = {moment: [replay['env'] for replay in replays] for moment, replays in stored.items() if replays}
    listed = '; '.join(f'{moment}: boards {", ".join(map(str, boards))}' for moment, boards in kept.items())
    if when not in kept:
        raise NothingToShow(f'{folder.name} has no replay {when!r}; it holds {listed or "no replays at all"}')
    if board is None:
        return stored[when][0]
    if board not in kept[when]:
        raise NothingToShow(f'{folder.name} has no board {board} {when!r}; it holds {listed}')
    return stored[when][kept[when].index(board)]


def scenes(name: str, replay: Mapping[str, Any], when: str) -> Iterator[Text]:
    """One text for the start and one for each turn. What a model wrote can neither style nor steer the terminal."""
    turns, frames = replay['turns'], replay['frames']
    words = replay.get('words', OLD_WORDS)
    hard = replay.get('difficulty', replay.get('optimal'))
    difficulty = '' if hard is None else f', {words["difficulty"]} {hard}'
    head = f'{name}: {words["instance"]} {replay["env"]} {when} training{difficulty}'
    yield Text.assemble((printable(head), 'bold'), '\n', _frame(frames, 0))
    for number, turn in enumerate(turns, 1):
        title = f'--- turn {number} of {len(turns)} ---\n'
        yield Text.assemble((title, 'bold blue'), *map(_written, turn['groups']), _frame(frames, number))
    ending = ('solved', 'bold green') if replay['solved'] else ('not solved', 'bold red')
    yield Text.assemble(ending, f' after {len(turns)} turn{"s" if len(turns) != 1 else ""}')


def _written(group: Mapping[str, Any]) -> Text:
    terms = ''.join(f', {name} {_number(value)}' for name, value in group.get('terms', {}).items())
    head = f'{group["role"]} (reward {_number(group["reward"])}{terms}):\n'
    lines = ''.join(f'  {line}\n' for line in printable(group['answer']).split('\n'))
    return Text.assemble((printable(head), 'cyan'), lines)


def _frame(frames: Sequence[str], number: int) -> str:
    return f'\n{printable(frames[number])}\n' if number < len(frames) else ''


def _number(value: float | None) -> str:
    return 'none' if value is None else f'{value:+.2f}'
