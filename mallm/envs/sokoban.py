"""The game of Sokoban: one import for its rules, solver, text forms and loader, and here the generator.

A layout is a board's walls and goals up to rotation and reflection. A stable hash puts each into one of 8 folds; fold
0 is held out, so that a held-out board is not a training board turned round, nor one with its box elsewhere.
"""

import dataclasses
import functools
import hashlib
import random

from mallm.config import require
from mallm.envs.games import POOLS, GenerationError
from mallm.envs.sokoban_board import MOVES, Board, cells_of, inner_cells, reachable, walk
from mallm.envs.sokoban_program import (
    PUSH_CAP,
    Execution,
    ParsedMoves,
    Program,
    Push,
    execute,
    parse_moves,
    parse_program,
)
from mallm.envs.sokoban_solver import SolverLimit, distance, solve
from mallm.envs.xsb import LevelError, load_levels

__all__ = [
    'FOLDS',
    'MOVES',
    'PUSH_CAP',
    'Board',
    'BoardSpec',
    'Execution',
    'GenerationError',
    'LevelError',
    'ParsedMoves',
    'Program',
    'Push',
    'SolverLimit',
    'cells_of',
    'distance',
    'execute',
    'generate',
    'layout_fold',
    'load_levels',
    'parse_moves',
    'parse_program',
    'reachable',
    'solve',
    'walk',
]

FOLDS = 8
"""Layouts fall into this many folds; fold 0 is held out."""

_SALT = b'39232'
"""Chosen among 60 000 because few layouts have few walls. For 6x6 boards with one box it holds out one of the 3 layouts
without inner walls (goal in the middle: 14% of such boards as generated) and 5 of 33, 29 of 219 and 121 of 929 layouts
with 1, 2 and 3 (12.1%, 12.9% and 12.4% of boards, of mean optimal length within 0.06 of all such boards'). Changing it
changes what is held out: results from before and after cannot be compared.
"""

_SEARCH_LIMIT = 20_000  # expanded states; a board with many boxes that needs more is drawn again
_TRIES_A_COUNT = 300  # 6x6 boards need 24 on average, so that giving up on a count that has some is rare


@dataclasses.dataclass(frozen=True)
class BoardSpec:
    """Which boards to generate. Raises ValueError with value, rule and remedy.

    Attributes:
      size: cells a side, the border of walls included.
      boxes: boxes, and goals.
      wall_density: probability of a wall, independently for each inner cell.
      optimal: smallest and largest number of moves of a shortest solution.
      min_inner_walls: fewest walls inside the border.
      layouts: 'any', 'train' (never a held-out layout) or 'held_out' (only those, with the wall counts of 'any').
      tries: boards drawn before giving up.
    """

    size: int = 6
    boxes: int = 1
    wall_density: float = 0.2
    optimal: tuple[int, int] = (2, 11)
    min_inner_walls: int = 0
    layouts: str = 'any'
    tries: int = 2000

    def __post_init__(self) -> None:
        span = self.optimal
        rules = (
            ('size', 3 <= self.size <= 64, 'between 3 and 64 with the border: use 6 for a 4x4 interior'),
            ('boxes', self.boxes >= 1, 'at least 1: use 1'),
            ('wall_density', 0 <= self.wall_density < 1, 'a probability below 1: use 0.2'),
            (
                'optimal',
                len(span) == 2 and 1 <= span[0] <= span[1],
                'two numbers of moves, fewest and most: use (2, 11)',
            ),
            ('min_inner_walls', self.min_inner_walls >= 0, 'at least 0: use 0'),
            ('layouts', self.layouts in POOLS[:3], "'any', 'train' or 'held_out': use 'any'"),
            ('tries', self.tries >= 1, 'at least 1: use 2000'),
        )
        for name, holds, rule in rules:
            require(holds, f'BoardSpec.{name}', vars(self)[name], f'must be {rule}')


def layout_fold(board: Board) -> int:
    """The fold of the board's layout, 0 to FOLDS - 1; fold 0 is held out."""
    text = ','.join(map(str, board.layout_key())).encode()
    return hashlib.blake2b(text, digest_size=8, salt=_SALT).digest()[0] % FOLDS


def generate(seed: int, spec: BoardSpec) -> Board:
    """A solvable board that fits the spec; the same one for the same seed and spec.

    Raises GenerationError when no board fits within `spec.tries` draws, at once when none can.
    """
    room = (spec.size - 2) ** 2
    if room < spec.boxes + 1 + spec.min_inner_walls:
        raise GenerationError(
            f'{spec}: {room} inner cells cannot hold {spec.boxes} boxes, a player and {spec.min_inner_walls} walls: '
            'raise size, or lower boxes or min_inner_walls'
        )
    draws = random.Random(int(seed))
    if spec.layouts == 'held_out':
        return _held_out(draws, spec)
    for _ in range(spec.tries):
        board = _natural(draws, spec)
        if board is not None and (spec.layouts == 'any' or layout_fold(board)):
            return board
    raise _exhausted(spec)


def _held_out(draws: random.Random, spec: BoardSpec) -> Board:
    """A held-out board whose number of inner walls is drawn as it falls among all boards.

    A plain filter would not do: only 3 layouts of 6x6 have no inner wall and 33 have one, so a hash gives them a share
    of the held-out boards far from the natural one. A wall count with no held-out layout is drawn again.
    """
    tries = 0
    while tries < spec.tries:
        tries += 1
        board = _natural(draws, spec)
        if board is None:
            continue
        count = board.inner_walls()
        for _ in range(min(_TRIES_A_COUNT, spec.tries)):
            tries += 1
            board = _place(draws, spec, draws.sample(_inner(spec.size), count))
            if board is not None and not layout_fold(board):
                return board
    raise _exhausted(spec)


def _exhausted(spec: BoardSpec) -> GenerationError:
    return GenerationError(
        f'{spec}: no such board in {spec.tries} tries: widen optimal, lower wall_density or '
        'boxes, or raise size or tries'
    )


def _natural(draws: random.Random, spec: BoardSpec) -> Board | None:
    """One draw: independent walls, everything else on free cells; None when the board does not fit the spec."""
    density = spec.wall_density
    return _place(draws, spec, [cell for cell in _inner(spec.size) if draws.random() < density])


def _place(draws: random.Random, spec: BoardSpec, inner_walls: list[int]) -> Board | None:
    size = spec.size
    if len(inner_walls) < spec.min_inner_walls:
        return None
    free = sorted(set(_inner(spec.size)).difference(inner_walls))
    if len(free) <= spec.boxes:
        return None
    player, *boxes = draws.sample(free, spec.boxes + 1)
    goals = draws.sample(free, spec.boxes)
    walls = (1 << size * size) - 1
    for cell in free:
        walls ^= 1 << cell
    goal_set = sum(1 << cell for cell in goals)
    box_set = sum(1 << cell for cell in boxes)
    if any(_cornered(cell, size, walls) for cell in boxes if not goal_set >> cell & 1):
        return None
    board = Board(size, size, walls, goal_set, box_set, player)
    try:
        moves = distance(board, _SEARCH_LIMIT)
    except SolverLimit:
        return None
    fewest, most = spec.optimal
    return board if moves is not None and fewest <= moves <= most else None


def _cornered(cell: int, size: int, walls: int) -> bool:
    """A box here can never move: a wall in both directions."""
    return bool((walls >> cell - 1 | walls >> cell + 1) & (walls >> cell - size | walls >> cell + size) & 1)


@functools.lru_cache(maxsize=64)
def _inner(size: int) -> tuple[int, ...]:
    return tuple(cells_of(inner_cells(size, size)))
