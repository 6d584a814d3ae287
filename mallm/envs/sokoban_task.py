"""The Sokoban task as an experiment sees it: boards by split and seed, teams by name, a beginner to imitate."""

import dataclasses
import random
from typing import ClassVar, Literal

from mallm.envs import sokoban, sokoban_prose
from mallm.envs.base import FINAL_STRICT, STRICT, Demonstration
from mallm.envs.game_task import GameTask
from mallm.envs.games import play_until_solved
from mallm.envs.shaping import OUTCOME, Shaping
from mallm.envs.sokoban import Board, BoardSpec, Execution
from mallm.envs.sokoban_team import COMPACT, NEARNESS, ORACLE, OraclePotential, Rules, SokobanTeam, Speech


@dataclasses.dataclass(frozen=True)
class SokobanTask(GameTask):
    """Which boards are played, by which team, for which reward; see `GameTask`.

    Attributes:
      size: cells a side, border included.
      boxes: boxes on a board.
      walls: density of inner walls.
      optimal: fewest and most moves of a shortest solution on held-out boards.
      hard: the same for three of four training boards; the fourth is drawn like a held-out board.
      reward: 'oracle' asks a solver how much nearer a solution the board came; 'nearness' and 'outcome' do not.
      moves: most moves executed in one turn.
      pushes: most pushes of a program that are run.
    """

    instance_name: ClassVar[str] = 'board'
    difficulty_name: ClassVar[str] = 'shortest solution'
    floor_name: ClassVar[str] = 'random mover'

    size: int = 6
    boxes: int = 1
    walls: float = 0.2
    optimal: tuple[int, int] = (2, 11)
    hard: tuple[int, int] = (5, 11)
    reward: Literal['oracle', 'nearness', 'outcome'] = 'oracle'
    moves: int = 8
    pushes: int = 8

    def __post_init__(self) -> None:
        super().__post_init__()
        self.spec('any')

    @property
    def shaping(self) -> Shaping:
        reach = max(16, self.optimal[1] + 5, self.hard[1] + 5)
        oracle = dataclasses.replace(ORACLE, potential=OraclePotential(reach))
        return {'oracle': oracle, 'nearness': NEARNESS, 'outcome': OUTCOME}[self.reward]

    @property
    def rules(self) -> Rules:
        moves = self.moves if self.style == 'compact' else 4 * self.size**2
        return Rules(moves=moves, pushes=self.pushes, shaping=self.shaping)

    @property
    def speech(self) -> Speech:
        return COMPACT if self.style == 'compact' else sokoban_prose.speech(self.python)

    def spec(self, layouts: str, *, hard: bool = False, min_inner_walls: int = 0) -> BoardSpec:
        optimal = self.hard if hard else self.optimal
        return BoardSpec(self.size, self.boxes, self.walls, optimal, min_inner_walls, layouts)

    def world(self, board: Board) -> SokobanTeam:
        return SokobanTeam(board, self.rules, self.team, speech=self.speech)

    def train(self, seed: int) -> SokobanTeam:
        """A fresh training board: never a held-out layout."""
        board = sokoban.generate(seed, self.spec('train', hard=bool(seed % 4)))
        return self.world(board)

    def test(self, split: int, index: int) -> SokobanTeam:
        """Board `index` of a held-out split. The strict splits hold boards with at least two inner walls.

        The final splits share their layouts with the watched ones, of which there are few, not their draws: by default
        716 of 1024 final boards (strict: 648) have a layout that one of 256 watched boards has, and 15 (7) are one of
        these boards. No training layout is among them.
        """
        walls = 2 if split in (STRICT, FINAL_STRICT) else 0
        board = sokoban.generate(split + index, self.spec('held_out', min_inner_walls=walls))
        return self.world(board)

    def difficulty(self, world: SokobanTeam) -> int:
        """Moves of a shortest solution, for the success-by-difficulty table."""
        return sokoban.distance(world.board) or 0

    def floor(self, world: SokobanTeam, turns: int, seed: int) -> bool:
        """Whether as many random moves as a team may make solve the board."""
        draw = random.Random(seed)
        letters = (draw.choice(sokoban.MOVES) for _ in range(turns * self.rules.moves))
        return play_until_solved(world.board, letters, Board.move)[0].solved

    def demonstrations(self, seed: int) -> list[Demonstration]:
        return beginner(seed, self.spec('train'), self.rules, self.team) if self.style == 'compact' else []


def beginner(seed: int, spec: BoardSpec, rules: Rules, order: tuple[str, ...]) -> list[Demonstration]:
    """What a beginner who knows the rules but not the aim writes: a few random pushes, wherever the goal is.

    `tool` and `solo` write pushes that can be done, `plan` follows the interpreter, or without one writes the moves of
    such random pushes. One program in four gets a last push that cannot be done: nobody imitates it, and `plan` refuses
    it. No solver is asked and no goal is looked at, so nothing here shows how to solve a board. Empty when the random
    play stood still or did not fit in a turn.
    """
    draw = random.Random(seed)
    board = sokoban.generate(seed, spec)
    goalless = dataclasses.replace(board, goals=0)
    wanted = draw.choice((1, 1, 2, 3))
    pushes: list[str] = []
    for _ in range(4 * wanted):
        pushes.append(draw.choice(sokoban.MOVES))
        if dry_run(goalless, ''.join(pushes)).stuck:
            pushes.pop()
        if len(pushes) == wanted:
            break
    text = ''.join(pushes)
    moves = dry_run(goalless, text).moves
    if not pushes or len(moves) > rules.moves:
        return []
    world = SokobanTeam(board, rules, order)
    jams = [letter for letter in sokoban.MOVES if dry_run(board, text + letter).stuck]
    if 'tool' in order and jams and draw.random() < 0.25:
        world, _ = world.act('tool', text + draw.choice(jams))
        return [Demonstration('plan', world.observe('plan'), '')]
    shown = {'tool': text, 'solo': text, 'plan': moves}
    demonstrations = []
    for role in order:
        demonstrations.append(Demonstration(role, world.observe(role), shown[role]))
        world, _ = world.act(role, shown[role])
    return demonstrations


def dry_run(board: Board, program: str) -> Execution:
    return sokoban.execute(board, sokoban.parse_program(program).pushes)
