"""Plan-Path: walk from a start to a goal on a map with random walls. Its rules, exact distances, generator, routes.

A layout is a map's walls and goal up to rotation and reflection. A stable hash puts each into one of 8 folds; fold 0 is
held out and fold 1 final, so that no such map is a training map turned round, nor one with its start elsewhere.
"""

import dataclasses
import functools
import hashlib
import random
import re

from mallm.config import require
from mallm.envs.games import POOLS, GenerationError, keeps, play_until_solved
from mallm.envs.sokoban_board import MOVES, cells_of, neighbours, steps, symmetries

FOLDS = 8
"""Layouts fall into this many folds; fold 0 is held out, fold 1 is final."""

LEG_CAP = 16
"""A route has at most this many legs; the rest is dropped and `truncated` says so."""

_WORDS = {'UP': 'U', 'DOWN': 'D', 'LEFT': 'L', 'RIGHT': 'R'}
_LEG = re.compile(r'(?P<silent>[\s,;]+)|(?P<word>[A-Za-z]+)[ ]?(?P<steps>[0-9]*)|.', re.DOTALL)


@dataclasses.dataclass(frozen=True, slots=True)
class Maze:
    """One position. Cells are numbered row * size + column; nothing lies outside the map.

    Attributes:
      size: cells a side.
      walls: set of cells, as bits.
      goal: where to go.
      at: where the walker is.
    """

    size: int
    walls: int
    goal: int
    at: int

    @property
    def solved(self) -> bool:
        return self.at == self.goal

    def move(self, letter: str) -> 'Maze | None':
        """The position after one move, one of MOVES; None when a wall or the map's edge is in the way."""
        to = steps(self.size, self.size)[letter][self.at]
        return None if to < 0 or self.walls >> to & 1 else dataclasses.replace(self, at=to)

    def render(self) -> str:
        """Rows of `#` wall, space, `.` goal, `@` walker, `+` walker on the goal."""
        letters = [' #'[self.walls >> cell & 1] for cell in range(self.size**2)]
        letters[self.goal] = '.'
        letters[self.at] = '+' if self.solved else '@'
        return '\n'.join(''.join(letters[row * self.size :][: self.size]) for row in range(self.size))

    def layout_key(self) -> tuple[int, int, int]:
        """(size, walls, goal bit) of one of the 8 rotations and reflections: the same for all eight."""
        walls = tuple(cells_of(self.walls))
        return min(
            (self.size, sum([bits[cell] for cell in walls]), bits[self.goal])
            for _, _, bits in symmetries(self.size, self.size)
        )


def play(maze: Maze, letters: str) -> tuple[Maze, int]:
    """The position after the moves, and how many of them were not possible; nothing is moved once it is solved."""
    return play_until_solved(maze, letters, Maze.move)


# Distances.


@functools.lru_cache(maxsize=8192)
def _field(size: int, walls: int, goal: int) -> tuple[int, ...]:
    """Fewest moves from each cell to the goal; -1 where there is no way."""
    near, found = neighbours(size, size), [-1] * size**2
    found[goal], queue = 0, [goal]
    for cell in queue:
        for _, to in near[cell]:
            if found[to] < 0 and not walls >> to & 1:
                found[to] = found[cell] + 1
                queue.append(to)
    return tuple(found)


def distance(maze: Maze) -> int | None:
    """The fewest moves to the goal, None when there is no way."""
    moves = _field(maze.size, maze.walls, maze.goal)[maze.at]
    return None if moves < 0 else moves


def city_block(maze: Maze) -> int:
    """Rows and columns between walker and goal."""
    (row, column), (to_row, to_column) = divmod(maze.at, maze.size), divmod(maze.goal, maze.size)
    return abs(row - to_row) + abs(column - to_column)


# Routes: the tool's language.


@dataclasses.dataclass(frozen=True)
class Route:
    """A parsed route: (letter, steps) a leg, steps None for as far as it goes; `garbage` counts what was not read."""

    legs: tuple[tuple[str, int | None], ...]
    garbage: int
    truncated: bool

    @property
    def text(self) -> str:
        return ''.join(letter + ('' if count is None else str(count)) for letter, count in self.legs)


@dataclasses.dataclass(frozen=True)
class Trial:
    """What a route did on a copy of the map.

    Attributes:
      moves: the moves made, as letters of MOVES.
      end: the position after them.
      stuck: whether a wall or the edge stopped a leg; nothing after it was tried.
    """

    moves: str
    end: Maze
    stuck: bool


def parse_route(text: str) -> Route:
    """Reads a route such as `R3 U` or `right 3, up`: three cells right, then up as far as it goes.

    Space, commas and semicolons are silent. No text raises; what is not understood is garbage and skipped.
    """
    legs: list[tuple[str, int | None]] = []
    garbage = 0
    for token in _LEG.finditer(text):
        word = (token['word'] or '').upper()
        said = _WORDS.get(word, word if not word.strip(MOVES) else '')
        for letter in said:
            legs.append((letter, None))
        if said and token['steps']:
            legs[-1] = (said[-1], int(token['steps'][:3]))
        if len(legs) > LEG_CAP:
            return Route(tuple(legs[:LEG_CAP]), garbage, True)
        garbage += len(token[0]) if not said and not token['silent'] else 0
    return Route(tuple(legs), garbage, False)


def follow(maze: Maze, legs: tuple[tuple[str, int | None], ...]) -> Trial:
    """Walks the legs in order until one gets stuck or the goal is reached.

    A leg without a number goes on to the last free cell, and is stuck where it cannot make one step.
    """
    moves: list[str] = []
    for letter, count in legs:
        done = 0
        while not maze.solved and (count is None or done < count):
            after = maze.move(letter)
            if after is None:
                break
            maze, done = after, done + 1
            moves.append(letter)
        if maze.solved:
            return Trial(''.join(moves), maze, False)
        if done < (1 if count is None else count):
            return Trial(''.join(moves), maze, True)
    return Trial(''.join(moves), maze, False)


def walked(maze: Maze, letters: str) -> Trial:
    """Single moves on a copy, as a program's list of actions, up to the first that cannot be done."""
    return follow(maze, tuple((letter, 1) for letter in letters))


# The generator.


@dataclasses.dataclass(frozen=True)
class MazeSpec:
    """Which maps to generate. Raises ValueError with value, rule and remedy.

    Attributes:
      size: cells a side.
      walls: probability of a wall, independently for each cell.
      optimal: fewest and most moves of a shortest path.
      detour: fewest moves by which a shortest path exceeds the city-block distance.
      layouts: 'any', 'train' (never a held-out or final layout), 'held_out' or 'final' (only those).
      tries: maps drawn before giving up.
    """

    size: int = 10
    walls: float = 0.22
    optimal: tuple[int, int] = (1, 40)
    detour: int = 0
    layouts: str = 'any'
    tries: int = 4000

    def __post_init__(self) -> None:
        fewest, most = self.optimal
        require(2 <= self.size <= 32, 'MazeSpec.size', self.size, 'must be between 2 and 32: use 10')
        require(0 <= self.walls < 1, 'MazeSpec.walls', self.walls, 'must be a probability below 1: use 0.22')
        require(1 <= fewest <= most, 'MazeSpec.optimal', self.optimal, 'must be (fewest, most) moves: use (1, 40)')
        require(self.detour >= 0, 'MazeSpec.detour', self.detour, 'must be at least 0: use 0')
        require(self.layouts in POOLS, 'MazeSpec.layouts', self.layouts, f"must be one of {POOLS}: use 'any'")
        require(self.tries >= 1, 'MazeSpec.tries', self.tries, 'must be at least 1: use 4000')


def layout_fold(maze: Maze) -> int:
    """The fold of the map's layout, 0 to FOLDS - 1."""
    text = ','.join(map(str, maze.layout_key())).encode()
    return hashlib.blake2b(text, digest_size=8).digest()[0] % FOLDS


def generate(seed: int, spec: MazeSpec) -> Maze:
    """A map with a way from the walker to the goal that fits the spec; the same one for the same seed and spec.

    Raises GenerationError when none fits within `spec.tries` draws.
    """
    draw = random.Random(int(seed))
    for _ in range(spec.tries):
        maze = _draw(draw, spec)
        if maze is not None and fits(maze, spec):
            return maze
    raise GenerationError(
        f'{spec}: no such map in {spec.tries} tries: widen optimal, lower walls or detour, or raise size or tries'
    )


def fits(maze: Maze, spec: MazeSpec) -> bool:
    """Whether there is a way of the wanted length, and the layout is of the wanted folds."""
    moves = distance(maze)
    if moves is None or not spec.optimal[0] <= moves <= spec.optimal[1] or moves - city_block(maze) < spec.detour:
        return False
    return spec.layouts == 'any' or keeps(spec.layouts, layout_fold(maze))


def _draw(draw: random.Random, spec: MazeSpec) -> Maze | None:
    """Independent walls, then walker and goal on two free cells; None when there are no two."""
    walls = sum([1 << cell for cell in range(spec.size**2) if draw.random() < spec.walls])
    free = [cell for cell in range(spec.size**2) if not walls >> cell & 1]
    if len(free) < 2:
        return None
    at, goal = draw.sample(free, 2)
    return Maze(spec.size, walls, goal, at)


def random_walk(maze: Maze, moves: int, seed: int) -> bool:
    """Whether as many random moves reach the goal."""
    draw = random.Random(seed)
    return play(maze, ''.join(draw.choice(MOVES) for _ in range(moves)))[0].solved
