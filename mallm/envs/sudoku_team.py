"""Sudoku for a team: `tool` says where to look, an interpreter looks, `plan` decides what is written.

Roles that exist:
  tool  sees the grid; names cells: the interpreter fills in, on a copy, the one value that fits there, and for `*` and
        a cell the one that fits nowhere else in its row, column or box. It stops at a cell where there is no such
        value. So the tool has to see where something follows, and never what.
  plan  sees the grid, the named cells and what was filled in; its list of fills, each a cell and a value, is executed.
        Value 0 empties a cell.
  solo  sees the grid; names cells, which are filled in at once (one agent that holds the tool).
A team is an order of roles: ('tool', 'plan') is the paper's pair, ('plan',) has no tool, ('solo',) is one agent with
it.

A cell's name is its row and column, from 0, as in `12`; those that the puzzle leaves empty also have letters, from `a`
on. Givens are never changed, and a fill against a row, column or box is not made, so that a full grid is a solved one.

How the roles are spoken to is a `Speech`. COMPACT is one token a cell for the tiny tokenizer: a mark for the role, the
rows, with its letter in each empty cell, the cells that the team has filled in, for `tool` the lists of cells that
failed on this grid at their last, and for `plan` what the tool did in this turn:
  T/1a3b/c412/2f4g/h3i1+de!*b   P/1a3b/c412/2f4g/h3i1+de=a*c;a2c3,,,,
that is the named cells, `;` for done or `!` for stuck with the values that fit there and `:`, and the fills, filled up
to a turn's length. `plan` refuses by writing nothing: free where the interpreter got stuck.
`mallm.envs.sudoku_prose` has the speech for real language models.
"""

import dataclasses
import functools
import re
import string
from collections.abc import Callable, Mapping

from mallm.envs import sudoku
from mallm.envs.games import MARKS, play_until_solved
from mallm.envs.shaping import Shaping, gain, never, penalties, reward
from mallm.envs.sudoku import Sudoku
from mallm.types import Message, Reward

_SILENT = r'(?P<silent>[\s,;:()\[\]]+)'
LETTERS = string.ascii_lowercase + 'ABCEFGHIJKMNOVWXYZ'
"""Names of the cells that a puzzle leaves empty, in reading order: all letters that mean nothing else in a prompt."""
_NAME = rf'(?:(?P<letter>[{LETTERS}])|(?P<row>[0-9])[\s,]*(?P<column>[0-9]))'
_LETTER = re.compile(f'[{LETTERS}]')
_CELL = re.compile(_SILENT + rf'|(?P<how>\*?)(?P<cell>{_NAME})|.', re.DOTALL)
_FILL = re.compile(_SILENT + rf'|(?P<cell>{_NAME})[\s,]*(?P<value>[0-9])|.', re.DOTALL)


def oracle_potential(grid: Sudoku) -> float:
    """- (empty cells + 2 * cells that differ from the solution) / 8."""
    right = sudoku.solution(grid.size, grid.givens) or grid.givens
    wrong = sum(value not in (0, wanted) for value, wanted in zip(grid.cells, right, strict=True))
    return -(grid.cells.count(0) + 2 * wrong) / 8


def consistency(grid: Sudoku) -> float:
    """- (empty cells + 2 * empty cells that no value fits) / 8: no solver."""
    empty = [cell for cell, value in enumerate(grid.cells) if not value]
    dead = sum(not sudoku.candidates(grid.size, grid.cells, cell) for cell in empty)
    return -(len(empty) + 2 * dead) / 8


ORACLE = Shaping(oracle_potential, never)
CONSISTENCY = Shaping(consistency, never)

Fill = tuple[int, int]
"""(cell, value)."""


@dataclasses.dataclass(frozen=True)
class Named:
    """Parsed cells: (cell, whether `*`); -1 for one outside the grid. `garbage` counts what was not understood."""

    cells: tuple[tuple[int, bool], ...]
    garbage: int
    truncated: bool


@dataclasses.dataclass(frozen=True)
class Fills:
    """Parsed fills; a cell is -1 when outside the grid. `garbage` counts what was not understood."""

    fills: tuple[Fill, ...]
    garbage: int
    truncated: bool

    @property
    def clean(self) -> bool:
        return bool(self.fills) and not self.garbage and not self.truncated


@dataclasses.dataclass(frozen=True)
class Draft:
    """What a tool's text came to on a copy of the grid.

    Attributes:
      program: the text as understood, to be shown.
      fills: what was filled in.
      end: the grid after that.
      stuck: None, or the values (as bits) that fit the cell at which nothing followed.
      clean: whether all of the text was understood and some of it said something.
      told: what else `plan` is told, e.g. what a program printed.
      failing: '' or what it got stuck at.
    """

    program: str
    fills: tuple[Fill, ...]
    end: Sudoku
    stuck: int | None
    clean: bool
    told: str = ''
    failing: str = ''


@dataclasses.dataclass(frozen=True)
class Rules:
    """What a turn may do and what it pays.

    Attributes:
      fills: most cells named or filled in one turn.
      shaping: potential added to the outcome (1 for solving).
      illegal: penalty for each fill that cannot be made.
      useless: penalty for text that says nothing or is not understood, and for naming a cell where nothing follows.
    """

    fills: int = 4
    shaping: Shaping = ORACLE
    illegal: float = 0.05
    useless: float = 0.1


@dataclasses.dataclass(frozen=True)
class Speech:
    """How the roles are spoken to and understood.

    Attributes:
      show: (world, role) -> what the role is shown.
      draft: (world, text) -> what the tool's text comes to on a copy.
      fills: (world, text) -> the fills that a plan lists.
      waits: whether a draft waits for a program to run.
    """

    show: 'Callable[[SudokuTeam, str], tuple[Message, ...]]'
    draft: 'Callable[[SudokuTeam, str], Draft]'
    fills: 'Callable[[SudokuTeam, str], Fills]'
    waits: bool = False


# What is written.


def cell_of(token: re.Match[str], grid: Sudoku) -> int:
    """The cell that a token names, or -1 when there is none."""
    if token['letter']:
        number = LETTERS.index(token['letter'])
        return grid.free[number] if number < grid.blanks else -1
    row, column = int(token['row']), int(token['column'])
    return row * grid.size + column if max(row, column) < grid.size else -1


def parse_cells(text: str, grid: Sudoku, most: int) -> Named:
    """Reads cells such as `a*c` or `12 *30`; keeps the first `most`. No text raises."""
    cells: list[tuple[int, bool]] = []
    garbage = 0
    for token in _CELL.finditer(text):
        if token['cell']:
            cells.append((cell_of(token, grid), bool(token['how'])))
            if len(cells) > most:
                return Named(tuple(cells[:most]), garbage, True)
        elif not token['silent']:
            garbage += 1
    return Named(tuple(cells), garbage, False)


def parse_fills(text: str, grid: Sudoku, most: int, *, letters: bool = True) -> Fills:
    """Reads fills such as `a3c4`, `123 304` or `[[1, 2, 3], [3, 0, 4]]`; keeps the first `most`. No text raises.

    Without `letters` these name no cell, and are not understood.
    """
    fills: list[Fill] = []
    garbage = 0
    for token in _FILL.finditer(text if letters else _LETTER.sub('?', text)):
        if token['cell']:
            fills.append((cell_of(token, grid), int(token['value'])))
            if len(fills) > most:
                return Fills(tuple(fills[:most]), garbage, True)
        elif not token['silent']:
            garbage += 1
    return Fills(tuple(fills), garbage, False)


@functools.lru_cache(maxsize=200_000)
def look(grid: Sudoku, text: str, most: int) -> Draft:
    """Fills in the named cells in order, on a copy, up to the first where nothing follows."""
    named = parse_cells(text, grid, most)
    clean = bool(named.cells) and not named.garbage and not named.truncated
    fills: list[Fill] = []
    program, end = '', grid
    for cell, by_place in named.cells:
        one = '*' * by_place + cell_name(cell, grid)
        program += one
        open_cell = cell >= 0 and not end.cells[cell]
        rule = sudoku.hidden if by_place else sudoku.naked
        value = rule(end.size, end.cells, cell) if open_cell else 0
        after = end.fill(cell, value) if value else None
        if after is None:
            fits = sudoku.candidates(end.size, end.cells, cell) if open_cell else 0
            return Draft(program, tuple(fills), end, fits, clean, failing=one)
        fills.append((cell, value))
        end = after
    return Draft(program, tuple(fills), end, None, clean)


def write(grid: Sudoku, fills: tuple[Fill, ...]) -> tuple[Sudoku, int]:
    """The grid after the fills, and how many of them could not be made; nothing is changed once it is solved."""
    return play_until_solved(grid, fills, lambda at, one: at.fill(*one))


# What is shown.


def place(cell: int, size: int) -> str:
    return f'{cell // size}{cell % size}' if cell >= 0 else '??'


@functools.lru_cache(maxsize=10_000)
def letters_of(givens: tuple[int, ...]) -> Mapping[int, str]:
    """The letters of the cells that a puzzle leaves empty, as far as there are letters."""
    return dict(zip((cell for cell, given in enumerate(givens) if not given), LETTERS, strict=False))


def cell_name(cell: int, grid: Sudoku) -> str:
    """The letter of a cell, or its place where it has none."""
    return letters_of(grid.givens).get(cell) or place(cell, grid.size)


def fills_named(fills: tuple[Fill, ...], grid: Sudoku) -> str:
    return ''.join(f'{cell_name(cell, grid)}{value}' for cell, value in fills)


def fills_text(fills: tuple[Fill, ...], size: int) -> str:
    return ''.join(f'{place(cell, size)}{value}' for cell, value in fills)


def draft_text(draft: Draft, most: int) -> str:
    fits = '' if draft.stuck is None else ''.join(map(str, sudoku.values_of(draft.stuck))) + ':'
    ended = ';' if draft.stuck is None else '!'
    return f'={draft.program}{ended}{fits}{fills_named(draft.fills, draft.end).ljust(2 * most, ",")}'


def show_compact(world: 'SudokuTeam', role: str) -> tuple[Message, ...]:
    grid = world.grid
    letters = letters_of(grid.givens)
    signs = [str(value) if value else letters.get(cell, '.') for cell, value in enumerate(grid.cells)]
    rows = ''.join('/' + ''.join(signs[start : start + grid.size]) for start in range(0, len(signs), grid.size))
    own = ''.join(cell_name(cell, grid) for cell in grid.free if grid.cells[cell])
    told = f'{MARKS[role]}{rows}+{own}'
    if role == 'plan' and world.draft is not None:
        told += draft_text(world.draft, world.rules.fills)
    return (Message('user', told + world.failed * (role != 'plan')),)


def draft_compact(world: 'SudokuTeam', text: str) -> Draft:
    return look(world.grid, text, world.rules.fills)


def fills_compact(world: 'SudokuTeam', text: str) -> Fills:
    return parse_fills(text, world.grid, world.rules.fills)


COMPACT = Speech(show_compact, draft_compact, fills_compact)


@dataclasses.dataclass(frozen=True)
class SudokuTeam:
    """One grid in the hands of a team. Immutable; see `mallm.envs.base.World`.

    Attributes:
      grid: the puzzle and its cells as they are now.
      rules: what a turn may do and pays.
      order: the roles of the team, in acting order.
      speech: how the roles are spoken to.
      draft: what the tool's text of this turn came to, or None before it has written.
      failed: lists at whose last cell nothing followed on this grid (of fills, the last was refused), each after a `!`.
    """

    grid: Sudoku
    rules: Rules
    order: tuple[str, ...] = ('tool', 'plan')
    speech: Speech = COMPACT
    draft: Draft | None = None
    failed: str = ''

    @property
    def solved(self) -> bool:
        return self.grid.solved

    @property
    def over(self) -> bool:
        return self.grid.solved or self.rules.shaping.hopeless(self.grid)

    @property
    def waits(self) -> bool:
        return self.speech.waits

    def observe(self, role: str) -> tuple[Message, ...]:
        return self.speech.show(self, role)

    def act(self, role: str, text: str) -> 'tuple[SudokuTeam, Reward]':
        return ACTS[role](self, text)

    def render(self) -> str:
        return self.grid.render()


def act_tool(world: SudokuTeam, text: str) -> tuple[SudokuTeam, Reward]:
    """The named cells are judged by the grid they would lead to; the real one stays as it is."""
    draft = world.speech.draft(world, text)
    local = penalties(world.rules.useless, clean=draft.clean, stuck=draft.stuck is not None)
    return dataclasses.replace(world, draft=draft), reward(gain(world.grid, draft.end, world.rules.shaping), local)


def act_plan(world: SudokuTeam, text: str) -> tuple[SudokuTeam, Reward]:
    """The fills are made; what the tool named is used up. Writing nothing refuses it."""
    rules, draft = world.rules, world.draft
    said = world.speech.fills(world, text)
    grid, illegal = write(world.grid, said.fills)
    refused = draft is not None and draft.stuck is not None and not text.strip()
    local = (('format', -rules.useless * (not said.clean and not refused)), ('illegal', -rules.illegal * illegal))
    return moved(world, grid, draft), reward(gain(world.grid, grid, rules.shaping), local)


def act_solo(world: SudokuTeam, text: str) -> tuple[SudokuTeam, Reward]:
    """The named cells are filled in at once."""
    draft = world.speech.draft(world, text)
    local = penalties(world.rules.useless, clean=draft.clean, stuck=draft.stuck is not None)
    return moved(world, draft.end, draft), reward(gain(world.grid, draft.end, world.rules.shaping), local)


def moved(world: SudokuTeam, grid: Sudoku, draft: Draft | None) -> SudokuTeam:
    """The world after a turn that led to `grid`. Followed to where it got stuck, that much is known of the new grid."""
    if grid != world.grid:
        failing = draft.failing if draft is not None and grid == draft.end else ''
        return dataclasses.replace(world, grid=grid, draft=None, failed=f'!{failing}' if failing else '')
    fails = f'!{draft.program}' if draft is not None and draft.stuck is not None and draft.program else ''
    return dataclasses.replace(world, draft=None, failed=world.failed + fails)


ACTS: Mapping[str, Callable[[SudokuTeam, str], tuple[SudokuTeam, Reward]]] = {
    'tool': act_tool,
    'plan': act_plan,
    'solo': act_solo,
}
