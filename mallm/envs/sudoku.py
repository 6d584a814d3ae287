"""Sudoku of any box shape: rules, an exact solver, a generator of puzzles with one solution, forced values.

A puzzle is its givens up to a renaming of the digits and the rotations and reflections that keep the box shape (all 8
where boxes are square, else 4). A stable hash puts each into one of 8 folds; fold 0 is held out and fold 1 final.
"""

import dataclasses
import functools
import hashlib
import random
from collections.abc import Iterator

from mallm.config import require
from mallm.envs.games import POOLS, GenerationError, keeps
from mallm.envs.sokoban_board import symmetries

FOLDS = 8
"""Puzzles fall into this many folds; fold 0 is held out, fold 1 is final."""

_SHUFFLES = 40  # a puzzle of the wrong fold is shuffled so often before another one is made

SHAPES = {4: (2, 2), 6: (2, 3), 8: (2, 4), 9: (3, 3)}
"""Rows and columns of a box, by cells a side."""


@dataclasses.dataclass(frozen=True, slots=True)
class Sudoku:
    """One position. Cells are numbered row * size + column, 0 is empty. No two cells of a unit ever hold one value.

    Attributes:
      size: cells a side; values are 1 to size.
      givens: the puzzle; what it gives is never changed.
      cells: the grid as it is now.
    """

    size: int
    givens: tuple[int, ...]
    cells: tuple[int, ...]

    @property
    def solved(self) -> bool:
        return 0 not in self.cells

    @property
    def free(self) -> tuple[int, ...]:
        """Cells that the puzzle leaves empty, in reading order."""
        return tuple(cell for cell, given in enumerate(self.givens) if not given)

    @property
    def blanks(self) -> int:
        """How many those are."""
        return len(self.free)

    def fill(self, cell: int, value: int) -> 'Sudoku | None':
        """The grid with a value in a cell, or the cell emptied (value 0).

        None when the cell is given, holds that already, or the value stands in its row, column or box, or does not
        exist.
        """
        inside = 0 <= cell < len(self.cells) and 0 <= value <= self.size
        if not inside or self.givens[cell] or self.cells[cell] == value:
            return None
        if value and any(self.cells[peer] == value for peer in peers(self.size)[cell]):
            return None
        return dataclasses.replace(self, cells=(*self.cells[:cell], value, *self.cells[cell + 1 :]))

    def render(self) -> str:
        """Rows of digits, `.` where empty."""
        return '\n'.join(
            ''.join(str(value) if value else '.' for value in self.cells[row * self.size :][: self.size])
            for row in range(self.size)
        )

    def puzzle_key(self) -> tuple[int, ...]:
        """The givens of one of all equal puzzles, digits renamed in reading order: the same for all of them."""
        rows, columns = SHAPES[self.size]
        known = [cell for cell in range(self.size**2) if self.givens[cell]]
        found = []
        for turn, (_, _, bits) in enumerate(symmetries(self.size, self.size)):
            if rows != columns and turn >= 4:  # the last four turn boxes on their side
                break
            moved = [0] * self.size**2
            for cell in known:
                moved[bits[cell].bit_length() - 1] = self.givens[cell]
            names: dict[int, int] = {0: 0}
            found.append(tuple(names.setdefault(value, len(names)) for value in moved))
        return min(found)


# Rules.


@functools.cache
def units(size: int) -> tuple[tuple[int, ...], ...]:
    """The cells of every row, column and box."""
    high, wide = SHAPES[size]
    rows = [tuple(row * size + column for column in range(size)) for row in range(size)]
    boxes = [
        tuple((top + i) * size + left + j for i in range(high) for j in range(wide))
        for top in range(0, size, high)
        for left in range(0, size, wide)
    ]
    return (*rows, *zip(*rows, strict=True), *boxes)


@functools.cache
def peers(size: int) -> tuple[tuple[int, ...], ...]:
    """For each cell, the other cells of its row, column and box."""
    return tuple(
        tuple(sorted({other for unit in units(size) if cell in unit for other in unit} - {cell}))
        for cell in range(size**2)
    )


@functools.cache
def _units_of(size: int) -> tuple[tuple[tuple[int, ...], ...], ...]:
    return tuple(tuple(unit for unit in units(size) if cell in unit) for cell in range(size**2))


def candidates(size: int, cells: tuple[int, ...] | list[int], cell: int) -> int:
    """The values that may stand in a cell, as bits 1 to size, whatever it holds now."""
    seen = 0
    for peer in peers(size)[cell]:
        seen |= 1 << cells[peer]
    return ((2 << size) - 2) & ~seen


def values_of(mask: int) -> Iterator[int]:
    return (value for value in range(1, mask.bit_length()) if mask >> value & 1)


def naked(size: int, cells: tuple[int, ...] | list[int], cell: int) -> int:
    """The value of an empty cell that no other value fits; 0 when several or none do."""
    mask = candidates(size, cells, cell)
    return mask.bit_length() - 1 if mask and not mask & (mask - 1) else 0


def hidden(size: int, cells: tuple[int, ...] | list[int], cell: int) -> int:
    """The value of an empty cell that fits nowhere else in the cell's row, column or box; 0 when there is none."""
    mask = candidates(size, cells, cell)
    for unit in _units_of(size)[cell]:
        left = mask
        for other in unit:
            if other != cell and not cells[other]:
                left &= ~candidates(size, cells, other)
        if left and not left & (left - 1):
            return left.bit_length() - 1
    return 0


# The solver.


def solutions(size: int, cells: list[int], draw: random.Random | None = None) -> Iterator[tuple[int, ...]]:
    """All ways to fill the grid, each once; in a random order when `draw` is given. Leaves `cells` as it was."""
    best, options = -1, 0
    for cell, value in enumerate(cells):
        if value:
            continue
        mask = candidates(size, cells, cell)
        if best < 0 or mask.bit_count() < options.bit_count():
            best, options = cell, mask
            if options.bit_count() < 2:
                break
    if best < 0:
        yield tuple(cells)
        return
    order = list(values_of(options))
    if draw:
        draw.shuffle(order)
    for value in order:
        cells[best] = value
        yield from solutions(size, cells, draw)
    cells[best] = 0


@functools.lru_cache(maxsize=50_000)
def solution(size: int, givens: tuple[int, ...]) -> tuple[int, ...] | None:
    """The one solution of a puzzle; None when there is none or more than one."""
    found = solutions(size, list(givens))
    first = next(found, None)
    return first if next(found, None) is None else None


# The generator.


@dataclasses.dataclass(frozen=True)
class SudokuSpec:
    """Which puzzles to generate. Raises ValueError with value, rule and remedy.

    Attributes:
      size: cells a side, one of SHAPES.
      blanks: fewest and most empty cells.
      puzzles: 'any', 'train' (never a held-out or final puzzle), 'held_out' or 'final' (only those).
      tries: puzzles made before giving up.
    """

    size: int = 4
    blanks: tuple[int, int] = (6, 10)
    puzzles: str = 'any'
    tries: int = 2000

    def __post_init__(self) -> None:
        most = self.size**2 - 1
        few, many = self.blanks
        require(self.size in SHAPES, 'SudokuSpec.size', self.size, f'must be one of {sorted(SHAPES)}: use 4')
        require(
            1 <= few <= many <= most, 'SudokuSpec.blanks', self.blanks, f'must be two from 1 to {most}: use (6, 10)'
        )
        require(self.puzzles in POOLS, 'SudokuSpec.puzzles', self.puzzles, f"must be one of {POOLS}: use 'any'")
        require(self.tries >= 1, 'SudokuSpec.tries', self.tries, 'must be at least 1: use 2000')


def puzzle_fold(grid: Sudoku) -> int:
    """The fold of the puzzle, 0 to FOLDS - 1."""
    return hashlib.blake2b(bytes(grid.puzzle_key()), digest_size=8).digest()[0] % FOLDS


def generate(seed: int, spec: SudokuSpec) -> Sudoku:
    """A puzzle with exactly one solution that fits the spec; the same one for the same seed and spec.

    Raises GenerationError when none fits within `spec.tries`.
    """
    draw = random.Random(int(seed))
    for _ in range(spec.tries):
        givens = _draw(draw, spec)
        for _ in range(_SHUFFLES):
            if givens is None:
                break
            grid = Sudoku(spec.size, givens, givens)
            if spec.puzzles == 'any' or keeps(spec.puzzles, puzzle_fold(grid)):
                return grid
            givens = _shuffled(draw, spec.size, givens)
    raise GenerationError(f'{spec}: no such puzzle in {spec.tries} tries: lower blanks, or raise tries')


def _shuffled(draw: random.Random, size: int, givens: tuple[int, ...]) -> tuple[int, ...]:
    """Another puzzle with one solution, far cheaper than a new one: rows and columns change places within a box."""
    high, wide = SHAPES[size]
    rows = [top + i for top in range(0, size, high) for i in draw.sample(range(high), high)]
    columns = [left + j for left in range(0, size, wide) for j in draw.sample(range(wide), wide)]
    return tuple(givens[row * size + column] for row in rows for column in columns)


def _draw(draw: random.Random, spec: SudokuSpec) -> tuple[int, ...] | None:
    """A random full grid from which cells are taken in random order, each only if one solution is left."""
    size, wanted = spec.size, draw.randint(*spec.blanks)
    cells = list(next(solutions(size, [0] * size**2, draw)))
    order = list(range(size**2))
    draw.shuffle(order)
    for cell in order:
        if not wanted:
            break
        value, cells[cell] = cells[cell], 0
        if hidden(size, cells, cell) == value or not _other_solution(size, cells, cell, value):
            wanted -= 1
        else:
            cells[cell] = value
    return None if wanted else tuple(cells)


def _other_solution(size: int, cells: list[int], cell: int, value: int) -> bool:
    """Whether the grid can be filled with another value in that cell."""
    for other in values_of(candidates(size, cells, cell) & ~(1 << value)):
        cells[cell] = other
        found = next(solutions(size, list(cells)), None)
        cells[cell] = 0
        if found:
            return True
    return False
