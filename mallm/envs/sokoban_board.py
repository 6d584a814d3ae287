"""The rules of Sokoban. A `Board` is a frozen value; a set of cells is an int with bit `row * width + column` set."""

import dataclasses
import functools
from collections.abc import Iterator

MOVES = 'UDLR'
"""Up, down, left, right: the only legal move letters."""

_OFFSETS = {'U': (-1, 0), 'D': (1, 0), 'L': (0, -1), 'R': (0, 1)}
BACK = {'U': 'D', 'D': 'U', 'L': 'R', 'R': 'L'}
"""The opposite of each move letter."""


def cells_of(mask: int) -> Iterator[int]:
    """The cells of a set, in reading order."""
    while mask:
        low = mask & -mask
        yield low.bit_length() - 1
        mask ^= low


@functools.lru_cache(maxsize=256)
def steps(width: int, height: int) -> dict[str, tuple[int, ...]]:
    """For each move letter, the neighbour of every cell that way; -1 is off the map, so nothing wraps. Read only."""

    def neighbour(cell: int, rows: int, columns: int) -> int:
        row, column = cell // width + rows, cell % width + columns
        return row * width + column if 0 <= row < height and 0 <= column < width else -1

    return {
        letter: tuple(neighbour(cell, *offset) for cell in range(width * height)) for letter, offset in _OFFSETS.items()
    }


@functools.lru_cache(maxsize=256)
def neighbours(width: int, height: int) -> tuple[tuple[tuple[str, int], ...], ...]:
    """For each cell, its (letter, neighbour) pairs on the map, in the order of MOVES."""
    table = steps(width, height)
    return tuple(
        tuple((letter, table[letter][cell]) for letter in MOVES if table[letter][cell] >= 0)
        for cell in range(width * height)
    )


@functools.lru_cache(maxsize=256)
def symmetries(width: int, height: int) -> tuple[tuple[int, int, tuple[int, ...]], ...]:
    """The 8 rotations and reflections: (new width, new height, new bit of each cell)."""
    result = []
    for turned in (False, True):
        wide, high = (height, width) if turned else (width, height)
        for flip_rows in (False, True):
            for flip_columns in (False, True):
                bits = []
                for cell in range(width * height):
                    row, column = divmod(cell, width)
                    row = height - 1 - row if flip_rows else row
                    column = width - 1 - column if flip_columns else column
                    bits.append(1 << (column * wide + row if turned else row * wide + column))
                result.append((wide, high, tuple(bits)))
    return tuple(result)


@dataclasses.dataclass(frozen=True, slots=True)
class Board:
    """One position. The loader and the generator make only closed boards; the rules are safe on any board.

    Attributes:
      width, height: cells, the border included.
      walls, goals, boxes: sets of cells.
      player: the player's cell.
    """

    width: int
    height: int
    walls: int
    goals: int
    boxes: int
    player: int

    @property
    def solved(self) -> bool:
        """Every box is on a goal."""
        return not self.boxes & ~self.goals

    def move(self, letter: str) -> 'Board | None':
        """The board after one move, or None when a wall, a box behind a box or the map's edge blocks it.

        Raises ValueError on anything but one of 'U', 'D', 'L', 'R'.
        """
        step = steps(self.width, self.height).get(letter)
        if step is None:
            raise ValueError(f'move {letter!r} is not one of {", ".join(MOVES)}: pass text through parse_moves first')
        to = step[self.player]
        if to < 0 or self.walls >> to & 1:
            return None
        boxes = self.boxes
        if boxes >> to & 1:
            beyond = step[to]
            if beyond < 0 or (self.walls | boxes) >> beyond & 1:
                return None
            boxes ^= 1 << to | 1 << beyond
        return Board(self.width, self.height, self.walls, self.goals, boxes, to)

    def play(self, letters: str) -> tuple['Board', int]:
        """The board after all letters, and how many were blocked and skipped. It does not stop at a solved board."""
        board, blocked = self, 0
        for letter in letters:
            after = board.move(letter)
            if after is None:
                blocked += 1
            else:
                board = after
        return board, blocked

    def render(self) -> str:
        """XSB rows, each `width` characters, joined by line feeds."""
        return '\n'.join(
            ''.join(self._letter(row * self.width + column) for column in range(self.width))
            for row in range(self.height)
        )

    def _letter(self, cell: int) -> str:
        if self.walls >> cell & 1:
            return '#'
        goal = self.goals >> cell & 1
        if cell == self.player:
            return '+' if goal else '@'
        if self.boxes >> cell & 1:
            return '*' if goal else '$'
        return '.' if goal else ' '

    def inner_walls(self) -> int:
        """How many walls stand inside the outer ring of cells."""
        return (self.walls & inner_cells(self.width, self.height)).bit_count()

    def layout_key(self) -> tuple[int, int, int, int]:
        """(width, height, walls, goals) of one of the 8 rotations and reflections: the same for all eight."""
        walls, goals = tuple(cells_of(self.walls)), tuple(cells_of(self.goals))
        return min(
            (wide, high, sum([bits[cell] for cell in walls]), sum([bits[cell] for cell in goals]))
            for wide, high, bits in symmetries(self.width, self.height)
        )


@functools.lru_cache(maxsize=256)
def inner_cells(width: int, height: int) -> int:
    """The set of cells that are not in the outer ring."""
    return sum(1 << (row * width + column) for row in range(1, height - 1) for column in range(1, width - 1))


def flood(width: int, height: int, blocked: int, start: int) -> int:
    """The set of cells that a walk from `start` can reach without entering `blocked`; `start` is among them."""
    near = neighbours(width, height)
    seen, stack = blocked | 1 << start, [start]
    found = 1 << start
    while stack:
        for _, to in near[stack.pop()]:
            if not seen >> to & 1:
                seen |= 1 << to
                found |= 1 << to
                stack.append(to)
    return found


def reachable(board: Board) -> int:
    """The set of cells the player can walk to without pushing, its own included."""
    return flood(board.width, board.height, board.walls | board.boxes, board.player)


def walk(board: Board, target: int) -> str | None:
    """A shortest walk to the cell `target` without pushing, '' when the player is there, None when there is none."""
    if target == board.player:
        return ''
    seen = board.walls | board.boxes
    if target < 0 or target >= board.width * board.height or seen >> target & 1:
        return None
    near = neighbours(board.width, board.height)
    seen |= 1 << board.player
    paths = [(board.player, '')]
    for cell, path in paths:
        for letter, to in near[cell]:
            if not seen >> to & 1:
                if to == target:
                    return path + letter
                seen |= 1 << to
                paths.append((to, path + letter))
    return None


def push_stand(board: Board, box: int, letter: str) -> int | None:
    """The cell the player must stand on to push the box in cell `box` that way; None when nothing lets it move."""
    table = steps(board.width, board.height)
    stand, beyond = table[BACK[letter]][box], table[letter][box]
    if stand < 0 or beyond < 0 or (board.walls | board.boxes) >> beyond & 1:
        return None
    return stand
