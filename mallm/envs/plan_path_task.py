"""The Plan-Path task as an experiment sees it: maps by split and seed, teams by name, a beginner to imitate."""

import dataclasses
import random
from typing import ClassVar, Literal

from mallm.config import require
from mallm.envs import plan_path, plan_path_prose
from mallm.envs.base import FINAL_STRICT, STRICT, Demonstration, pool
from mallm.envs.game_task import GameTask
from mallm.envs.plan_path import Maze, MazeSpec
from mallm.envs.plan_path_team import COMPACT, NEARNESS, ORACLE, PlanPathTeam, Rules, Speech
from mallm.envs.shaping import OUTCOME
from mallm.envs.sokoban_board import MOVES

SHAPINGS = {'oracle': ORACLE, 'nearness': NEARNESS, 'outcome': OUTCOME}


@dataclasses.dataclass(frozen=True)
class PlanPathTask(GameTask):
    """Which maps are walked, by which team, for which reward; see `GameTask`.

    Attributes:
      size: cells a side.
      walls: probability of a wall, independently for each cell.
      optimal: fewest and most moves of a shortest path.
      reward: 'oracle' asks a search how much nearer the goal came; 'nearness' and 'outcome' do not.
      moves: most moves executed in one turn.
      legs: most legs of a route that are walked.
      hindsight: share of the beginner's demonstrations whose goal is moved to where the route led.
    """

    instance_name: ClassVar[str] = 'map'
    difficulty_name: ClassVar[str] = 'shortest path'
    floor_name: ClassVar[str] = 'random mover'

    size: int = 10
    walls: float = 0.22
    optimal: tuple[int, int] = (1, 40)
    reward: Literal['oracle', 'nearness', 'outcome'] = 'oracle'
    moves: int = 8
    legs: int = 4
    hindsight: float = 1.0

    def __post_init__(self) -> None:
        super().__post_init__()
        require(0 <= self.hindsight <= 1, 'task.hindsight', self.hindsight, 'must be a share from 0 to 1')
        self.spec('any')

    @property
    def rules(self) -> Rules:
        moves = self.moves if self.style == 'compact' else self.size**2
        return Rules(moves=moves, legs=self.legs, shaping=SHAPINGS[self.reward])

    @property
    def speech(self) -> Speech:
        return COMPACT if self.style == 'compact' else plan_path_prose.speech(self.python)

    def spec(self, layouts: str, *, detour: int = 0) -> MazeSpec:
        return MazeSpec(self.size, self.walls, self.optimal, detour, layouts)

    def world(self, maze: Maze) -> PlanPathTeam:
        return PlanPathTeam(maze, self.rules, self.team, self.speech)

    def train(self, seed: int) -> PlanPathTeam:
        """A fresh training map: never a held-out layout."""
        return self.world(plan_path.generate(seed, self.spec('train')))

    def test(self, split: int, index: int) -> PlanPathTeam:
        """Map `index` of a held-out split. In the strict splits walls force a way round: at least 2 moves longer."""
        detour = 2 if split in (STRICT, FINAL_STRICT) else 0
        return self.world(plan_path.generate(split + index, self.spec(pool(split), detour=detour)))

    def difficulty(self, world: PlanPathTeam) -> int:
        """Moves of a shortest path."""
        return plan_path.distance(world.maze) or 0

    def floor(self, world: PlanPathTeam, turns: int, seed: int) -> bool:
        """Whether as many random moves as a team may make reach the goal."""
        return plan_path.random_walk(world.maze, turns * self.rules.moves, seed)

    def demonstrations(self, seed: int) -> list[Demonstration]:
        return beginner(seed, self) if self.style == 'compact' else []


def beginner(seed: int, task: PlanPathTask) -> list[Demonstration]:
    """What a beginner who knows the rules but not the way writes: random routes, wherever the goal is.

    `tool` and `solo` write routes that can be walked, `plan` follows the interpreter, or without one writes the moves
    of such a route. One route in four gets a last leg that cannot be walked: nobody imitates it, and `plan` refuses
    it. No search is asked and no goal is looked at. Up to two such turns go before, so that trails are known.
    In hindsight a route was right for where it led (Andrychowicz et al. 2017): the map is shown with its goal there,
    and left out where that makes a layout that is held out, or where the route came by there before its end.
    """
    draw, world = random.Random(seed), task.train(seed)
    for _ in range(draw.choice((0, 0, 1, 2))):
        for role, text in said(world, task, draw).items():
            world, _ = world.act(role, text)
    texts = {} if world.solved else said(world, task, draw)
    refused = 'tool' in texts and not texts['plan']
    if texts and not refused and draw.random() < task.hindsight:
        moves = texts.get('plan') or walk(world, texts['solo']).moves
        world = in_hindsight(world, moves)
        early = plan_path.play(world.maze, moves[:-1])[0].solved
        texts = {} if early or not plan_path.fits(world.maze, task.spec('train')) else texts
    demonstrations = []
    for role, text in texts.items():
        demonstrations += [] if refused and role == 'tool' else [Demonstration(role, world.observe(role), text)]
        world, _ = world.act(role, text)
    return demonstrations


def said(world: PlanPathTeam, task: PlanPathTask, draw: random.Random) -> dict[str, str]:
    """What each role of a beginners' team writes in one turn; nothing where it is walled in."""
    route = random_route(world.maze, task, draw)
    plan = walk(world, route).moves
    jams = [letter for letter in MOVES if walk(world, route + letter).stuck]
    if 'tool' in task.team and jams and draw.random() < 0.25:
        route, plan = route + draw.choice(jams), ''
    texts = {'tool': route, 'solo': route, 'plan': plan}
    return {role: texts[role] for role in task.team} if route else {}


def in_hindsight(world: PlanPathTeam, moves: str) -> PlanPathTeam:
    """The world with its goal where the moves lead."""
    end, _ = plan_path.play(dataclasses.replace(world.maze, goal=-1), moves)
    return dataclasses.replace(world, maze=dataclasses.replace(world.maze, goal=end.at))


def walk(world: PlanPathTeam, text: str) -> plan_path.Trial:
    return plan_path.follow(world.maze, plan_path.parse_route(text).legs)


def random_route(maze: Maze, task: PlanPathTask, draw: random.Random) -> str:
    """Three random legs that can be walked, as far as they fit in a turn, blind to the goal; '' when walled in."""
    blind, wanted, legs = dataclasses.replace(maze, goal=-1), 3, ''
    for _ in range(4 * wanted):
        leg = draw.choice(MOVES) + draw.choice(('', '', '1', '2', '3'))
        trial = plan_path.follow(blind, plan_path.parse_route(legs + leg).legs)
        if not trial.stuck and len(trial.moves) <= task.moves:
            legs, wanted = legs + leg, wanted - 1
        if not wanted:
            break
    return legs
