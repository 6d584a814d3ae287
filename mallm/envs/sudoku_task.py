"""The Sudoku task as an experiment sees it: puzzles by split and seed, teams by name, a beginner to imitate."""

import dataclasses
import random
from typing import ClassVar, Literal

from mallm.config import require
from mallm.envs import sudoku, sudoku_prose
from mallm.envs.base import FINAL_STRICT, STRICT, Demonstration, pool
from mallm.envs.game_task import GameTask
from mallm.envs.shaping import OUTCOME
from mallm.envs.sudoku import Sudoku, SudokuSpec
from mallm.envs.sudoku_team import (
    COMPACT,
    CONSISTENCY,
    LETTERS,
    ORACLE,
    Fill,
    Rules,
    Speech,
    SudokuTeam,
    cell_name,
    fills_named,
    look,
    parse_cells,
    write,
)

SHAPINGS = {'oracle': ORACLE, 'consistency': CONSISTENCY, 'outcome': OUTCOME}


@dataclasses.dataclass(frozen=True)
class SudokuTask(GameTask):
    """Which puzzles are solved, by which team, for which reward; see `GameTask`.

    Attributes:
      size: cells a side: 4, 6 (boxes of 2 x 3), 8 (2 x 4) or 9.
      blanks: fewest and most empty cells of a puzzle.
      reward: 'oracle' asks a solver which fills are right; 'consistency' and 'outcome' do not.
      fills: most cells named or filled in one turn.
    """

    instance_name: ClassVar[str] = 'puzzle'
    difficulty_name: ClassVar[str] = 'empty cells'
    floor_name: ClassVar[str] = 'random fills'

    size: int = 4
    blanks: tuple[int, int] = (8, 11)
    reward: Literal['oracle', 'consistency', 'outcome'] = 'oracle'
    fills: int = 4

    def __post_init__(self) -> None:
        super().__post_init__()
        self.spec('any')
        require(
            self.style != 'compact' or self.blanks[1] <= len(LETTERS), 'blanks', self.blanks,
            f"at most {len(LETTERS)} empty cells have letters; use fewer, or style='text'",
        )  # fmt: skip

    @property
    def signs(self) -> str:
        return LETTERS[: self.blanks[1]] if self.style == 'compact' else ''

    @property
    def rules(self) -> Rules:
        fills = self.fills if self.style == 'compact' else self.size**2
        return Rules(fills=fills, shaping=SHAPINGS[self.reward])

    @property
    def speech(self) -> Speech:
        return COMPACT if self.style == 'compact' else sudoku_prose.speech(self.python)

    def spec(self, puzzles: str, *, strict: bool = False) -> SudokuSpec:
        return SudokuSpec(self.size, (self.blanks[1],) * 2 if strict else self.blanks, puzzles)

    def world(self, grid: Sudoku) -> SudokuTeam:
        return SudokuTeam(grid, self.rules, self.team, self.speech)

    def train(self, seed: int) -> SudokuTeam:
        """A fresh training puzzle: never a held-out one."""
        return self.world(sudoku.generate(seed, self.spec('train')))

    def test(self, split: int, index: int) -> SudokuTeam:
        """Puzzle `index` of a held-out split. The strict splits have as many empty cells as there are at most."""
        strict = split in (STRICT, FINAL_STRICT)
        return self.world(sudoku.generate(split + index, self.spec(pool(split), strict=strict)))

    def difficulty(self, world: SudokuTeam) -> int:
        """Empty cells of the puzzle."""
        return world.grid.blanks

    def floor(self, world: SudokuTeam, turns: int, seed: int) -> bool:
        """Whether as many fills as a team may make, each of a random value in a random empty cell, solve the puzzle."""
        draw, grid = random.Random(seed), world.grid
        for _ in range(turns * self.rules.fills):
            if not grid.solved:
                grid, _ = write(grid, ((draw.choice(empty_cells(grid)), draw.randint(1, self.size)),))
        return grid.solved

    def demonstrations(self, seed: int) -> list[Demonstration]:
        return beginner(seed, self) if self.style == 'compact' else []


def empty_cells(grid: Sudoku) -> list[int]:
    return [cell for cell, value in enumerate(grid.cells) if not value]


def fitting(grid: Sudoku) -> list[Fill]:
    """Every fill that can be made."""
    open_cells = [(cell, sudoku.candidates(grid.size, grid.cells, cell)) for cell in empty_cells(grid)]
    return [(cell, value) for cell, mask in open_cells for value in sudoku.values_of(mask)]


def beginner(seed: int, task: SudokuTask) -> list[Demonstration]:
    """What a beginner writes who knows which cells are empty, and not where something follows.

    `tool` and `solo` name empty cells that have not failed yet, from a random one on; `plan` writes what was filled in
    before the interpreter stopped, and refuses when that is nothing. Without a tool, `plan` writes random values that
    fit. No solver is asked. Up to three such turns go before, so that later grids and failures are known.
    """
    draw, world = random.Random(seed), task.train(seed)
    for _ in range(draw.choice((0, 0, 1, 2, 3))):
        for role, text in said(world, task, draw).items():
            world, _ = world.act(role, text)
    demonstrations = []
    for role, text in ({} if world.solved else said(world, task, draw)).items():
        demonstrations.append(Demonstration(role, world.observe(role), text))
        world, _ = world.act(role, text)
    return demonstrations


def said(world: SudokuTeam, task: SudokuTask, draw: random.Random) -> dict[str, str]:
    """What each role of a beginners' team writes in one turn."""
    named = random_cells(world, task, draw)
    if 'tool' in task.team:
        plan = fills_named(look(world.grid, named, task.fills).fills, world.grid)
    else:
        plan = random_fills(world.grid, task, draw)
    texts = {'tool': named, 'solo': named, 'plan': plan}
    return {role: texts[role] for role in task.team}


def random_cells(world: SudokuTeam, task: SudokuTask, draw: random.Random) -> str:
    """As many empty cells as fit in a turn, in reading order from a random one on; in one turn of four all by place."""
    grid = world.grid
    tried = [parse_cells(text, grid, len(text)) for text in world.failed.split('!')]
    failed = {cell for one in tried if not one.garbage for cell, _ in one.cells[-1:]}
    cells = [cell for cell in empty_cells(grid) if cell not in failed]
    start, by_place = draw.randrange(max(1, len(cells))), draw.random() < 0.25
    return ''.join('*' * by_place + cell_name(cell, grid) for cell in (cells[start:] + cells[:start])[: task.fills])


def random_fills(grid: Sudoku, task: SudokuTask, draw: random.Random) -> str:
    """As many fills as fit in a turn, of random values that fit random cells."""
    fills: list[Fill] = []
    while len(fills) < task.fills:
        if not (fits := fitting(grid)):
            break
        fills.append(draw.choice(fits))
        grid, _ = write(grid, (fills[-1],))
    return fills_named(tuple(fills), grid)
