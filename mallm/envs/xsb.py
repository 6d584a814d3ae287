"""Loads Sokoban levels from text: XSB with ragged rows, run lengths and titles, and Boxoban files.

Policies where the formats leave a choice:
  * Without a `|` in it a line is never decoded as run lengths, so that the title `12#` stays a title.
  * A line of floors only (`- - -`) directly between two board rows is an empty row of that board when the two parts
    have at most one player between them, otherwise a title.
  * A line that touches a board row, starts or ends with a wall and holds two walls and more board characters than
    strangers is meant as a row: its stranger is an error. Set text apart by a blank line or a leading `;`.
  * Boxes and goals outside the player's area are loaded as decoration if each such box stands on a goal.
"""

import dataclasses
import re
from collections.abc import Iterator

from mallm.envs.sokoban_board import Board, flood

MAX_SIDE = 128
"""Levels with more columns or rows are refused."""

_FLOORS = ' -_'
_CELLS = frozenset('#@+$*. -_')
_PACKED = re.compile(r'(?:(?:[1-9][0-9]*)?[#@+$*. \-_]|\|)*')
_RUN = re.compile(r'([1-9][0-9]*)?([^0-9])')


class LevelError(ValueError):
    """A level that is refused; the message gives name, line and column (from 1) and the reason.

    In run lengths the column is that of the row's start plus the decoded cells before the culprit.
    """

    def __init__(self, name: str, line: int, column: int, reason: str) -> None:
        super().__init__(f'{name}, line {line}, column {column}: {reason}')
        self.name, self.line, self.column, self.reason = name, line, column, reason

    def __reduce__(self) -> tuple[type, tuple[str, int, int, str]]:
        return LevelError, (self.name, self.line, self.column, self.reason)  # so that it can cross processes


@dataclasses.dataclass(frozen=True)
class _Row:
    """One row of a board and where it was written; `column` is that of its first character, from 1."""

    cells: str
    line: int
    column: int


@dataclasses.dataclass(frozen=True)
class _Line:
    """One line of the file: a 'board' line with its rows, a 'floor' line (may be a row), 'text' or 'blank'."""

    kind: str
    text: str
    number: int
    rows: tuple[_Row, ...]


def load_levels(text: str, name: str = '<text>') -> tuple[Board, ...]:
    """All levels of a file's text, in order. `name` appears in errors.

    Raises LevelError on a text without a level, and on the first level with an unknown character, a tab, a number of
    players other than one, as many boxes as goals or none, a gap in its walls, or loose things out of reach. A level
    that cannot be solved is loaded.
    """
    lines = [_read(line, number, name) for number, line in enumerate(_split(text), start=1)]
    _refuse_strangers(lines, name)
    levels = tuple(_board(rows, name) for rows in _blocks(lines))
    if not levels:
        raise LevelError(name, 1, 1, 'no level: a board row has a wall and only the characters #@+$*. -_')
    return levels


def _split(text: str) -> list[str]:
    """Lines by LF, CRLF or CR; str.splitlines would also split on characters that may stand in a title."""
    return re.split(r'\r\n|\n|\r', text.removeprefix('\ufeff'))


def _read(text: str, number: int, name: str) -> _Line:
    if not text.strip():
        return _Line('blank', text, number, ())
    if '#' in text and '|' in text and _PACKED.fullmatch(text):
        return _Line('board', text, number, tuple(_unpack(text, number, name)))
    if set(text) <= _CELLS:
        rows = (_Row(text.rstrip(_FLOORS), number, 1),)
        if '#' in text:
            return _Line('board', text, number, rows)
        if not rows[0].cells:
            return _Line('floor', text, number, rows)
    return _Line('text', text, number, ())


def _unpack(text: str, number: int, name: str) -> Iterator[_Row]:
    """The rows of a line of run lengths; '6#|#@-$.#|' is two rows."""
    column = 1
    for packed in text.rstrip().removesuffix('|').split('|'):
        cells = ''
        for count, cell in _RUN.findall(packed):
            if len(count) > 3 or len(cells) + int(count or 1) > MAX_SIDE:
                raise LevelError(name, number, column, f'a row of more than {MAX_SIDE} cells')
            cells += cell * int(count or 1)
        yield _Row(cells.rstrip(_FLOORS), number, column)
        column += len(packed) + 1


def _refuse_strangers(lines: list[_Line], name: str) -> None:
    for index, line in enumerate(lines):
        if line.kind != 'text':
            continue
        packed = '|' in line.text
        touches = any(near.kind == 'board' for near in lines[max(index - 1, 0) : index + 2])
        known = _CELLS | frozenset('|0123456789') if packed else _CELLS
        strangers = [column for column, cell in enumerate(line.text) if cell not in known]
        ends = line.text.strip(_FLOORS + '\t|')
        comment = line.text.lstrip().startswith((';', '::'))
        walled = ends.startswith('#') or ends.endswith('#') or (packed and '#' in ends)
        solid = sum(cell in known and not cell.isspace() for cell in line.text)
        if '\t' in line.text and '#' in line.text and set(line.text) <= _CELLS | {'\t'}:
            column = line.text.index('\t')
            raise LevelError(name, line.number, column + 1, 'a tab: write floor as spaces, - or _')
        if (touches or packed) and not comment and walled and line.text.count('#') > 1 and solid > len(strangers):
            column = strangers[0] if strangers else len(line.text) - 1
            reason = f'unknown character {line.text[column]!r}: a row is made of #@+$*. -_ (text goes after a ;)'
            raise LevelError(name, line.number, column + 1, reason)


def _blocks(lines: list[_Line]) -> Iterator[list[_Row]]:
    """The rows of one board after the other."""
    block: list[_Row] = []
    pending: list[_Row] = []
    for index, line in enumerate(lines):
        if line.kind == 'board':
            block += [*pending, *line.rows]
            pending = []
        elif line.kind == 'floor' and block and _is_empty_row(block, lines[index + 1 :]):
            pending += line.rows
        elif block:
            yield block
            block, pending = [], []
    if block:
        yield block


def _is_empty_row(above: list[_Row], following: list[_Line]) -> bool:
    """Whether a line of floors joins the rows above it to those below: they share one player."""
    below: list[_Row] = []
    for line in following:
        if line.kind == 'board':
            below += line.rows
        elif line.kind != 'floor' or below:
            break
    return bool(below) and _players(above) + _players(below) <= 1


def _players(rows: list[_Row]) -> int:
    return sum(cell in '@+' for row in rows for cell in row.cells)


def _board(rows: list[_Row], name: str) -> Board:
    width, height = max(len(row.cells) for row in rows), len(rows)
    if max(width, height) > MAX_SIDE:
        raise LevelError(name, rows[0].line, 1, f'{width}x{height} cells: at most {MAX_SIDE} each way')
    sets = dict.fromkeys('#.$@', 0)
    for cell, letter in enumerate(''.join(row.cells.ljust(width) for row in rows)):
        for kind in {'*': '$.', '+': '@.'}.get(letter, letter):
            if kind in sets:
                sets[kind] |= 1 << cell
    board = Board(width, height, sets['#'], sets['.'], sets['$'], sets['@'].bit_length() - 1)
    players = sets['@'].bit_count()
    if players != 1:
        raise _refusal(rows, name, board, board.player if players else 0, f'{players} players: a level has one')
    _check(board, rows, name)
    return board


def _check(board: Board, rows: list[_Row], name: str) -> None:
    boxes, goals = board.boxes.bit_count(), board.goals.bit_count()
    if boxes != goals or not boxes:
        raise _refusal(rows, name, board, 0, f'{boxes} boxes and {goals} goals: equally many, at least one, are needed')
    area = flood(board.width, board.height, board.walls, board.player)
    for cell in range(board.width * board.height):
        row, column = divmod(cell, board.width)
        edge = row in (0, board.height - 1) or column in (0, board.width - 1)
        if edge and area >> cell & 1:
            raise _refusal(rows, name, board, cell, 'the walls have a gap: the player could walk off the board here')
    loose = (board.boxes ^ board.goals) & ~area
    if loose:
        cell = (loose & -loose).bit_length() - 1
        kind = 'box without a goal' if board.boxes >> cell & 1 else 'goal without a box'
        raise _refusal(rows, name, board, cell, f'a {kind} where the player can never come')


def _refusal(rows: list[_Row], name: str, board: Board, cell: int, reason: str) -> LevelError:
    row, column = divmod(cell, board.width)
    return LevelError(name, rows[row].line, rows[row].column + column, reason)
