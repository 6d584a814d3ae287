"""Plan-Path for a team: `tool` writes a route that is walked on a copy, `plan` decides what is walked.

Roles that exist:
  tool  sees the map; writes a route such as `R3U`. Nobody moves.
  plan  sees the map, the route and where it led; its list of moves is executed.
  solo  sees the map; writes a route that is walked at once (one agent that holds the tool).
A team is an order of roles: ('tool', 'plan') is the paper's pair, ('plan',) has no tool, ('solo',) is one agent with
it.

How the roles are spoken to is a `Speech`. COMPACT is one token a cell for the tiny tokenizer: a mark for the role,
the rows, each after its number, the cells where earlier turns began, the walker's (row, column), how far it can go each
way, how far off the goal is, for `tool` the routes that failed here, and for `plan` what the tool did in this turn:
  T0# . 1    2 ##@3    ?20@23U2D1L0R0.U2L1!L   P0# . 1    2 ##@3    ?20@23U2D1L0R0.U2L1=U1L2;@11:ULL,,,,,
that is the route, `;` for done, `!` for stuck or `~` for more moves than fit in a turn, where it led, and its moves,
filled up to a turn's length. `plan` refuses a route by writing nothing: free where the route got stuck.
`mallm.envs.plan_path_prose` has the speech for real language models.
"""

import dataclasses
import functools
from collections.abc import Callable, Mapping

from mallm.envs import plan_path
from mallm.envs.games import MARKS
from mallm.envs.plan_path import Maze, Trial
from mallm.envs.shaping import Shaping, gain, never, penalties, reward
from mallm.envs.sokoban_board import MOVES
from mallm.envs.sokoban_program import ParsedMoves, parse_moves
from mallm.types import Message, Reward


def oracle_potential(maze: Maze) -> float:
    """- (moves of a shortest path, at most 32) / 16, and -2 where there is none."""
    moves = plan_path.distance(maze)
    return -2.0 if moves is None else -min(moves, 32) / 16


def nearness(maze: Maze) -> float:
    """- (city-block distance) / 16: no search, and blind to walls."""
    return -plan_path.city_block(maze) / 16


ORACLE = Shaping(oracle_potential, never)
NEARNESS = Shaping(nearness, never)


@dataclasses.dataclass(frozen=True)
class Draft:
    """What a tool's text came to on a copy of the map.

    Attributes:
      program: the text as understood, to be shown.
      trial: where it led.
      clean: whether all of the text was understood and some of it said something.
      told: what else `plan` is told, e.g. what a program printed.
    """

    program: str
    trial: Trial
    clean: bool
    told: str = ''


@dataclasses.dataclass(frozen=True)
class Rules:
    """What a turn may do and what it pays.

    Attributes:
      moves: most moves executed in one turn.
      legs: most legs of a route that are walked.
      shaping: potential added to the outcome (1 for solving).
      illegal: penalty for each move that cannot be done.
      useless: penalty for text that says nothing or is not understood, and for a route that gets stuck.
    """

    moves: int = 8
    legs: int = 4
    shaping: Shaping = ORACLE
    illegal: float = 0.05
    useless: float = 0.1


@dataclasses.dataclass(frozen=True)
class Speech:
    """How the roles are spoken to and understood.

    Attributes:
      show: (world, role) -> what the role is shown.
      draft: (world, text) -> what the tool's text comes to on a copy.
      moves: (text, most) -> the moves that a plan lists.
      waits: whether a draft waits for a program to run.
    """

    show: 'Callable[[PlanPathTeam, str], tuple[Message, ...]]'
    draft: 'Callable[[PlanPathTeam, str], Draft]'
    moves: Callable[[str, int], ParsedMoves]
    waits: bool = False


def show_compact(world: 'PlanPathTeam', role: str) -> tuple[Message, ...]:
    trail = ''.join(f'?{place(cell, world.maze.size)}' for cell in world.trail)
    told = f'{MARKS[role]}{cells_text(world.maze)}{trail}{where_text(world.maze)}'
    if role == 'plan' and world.draft is not None:
        told += f'={world.draft.program}{trial_text(world.draft.trial, world.rules.moves)}'
    return (Message('user', told + world.failed * (role != 'plan')),)


@functools.lru_cache(maxsize=200_000)
def walk_route(maze: Maze, text: str, most: int) -> Draft:
    route = plan_path.parse_route(text)
    legs = route.legs[:most]
    clean = bool(legs) and not route.garbage and len(legs) == len(route.legs)
    program = dataclasses.replace(route, legs=legs).text
    return Draft(program, plan_path.follow(maze, legs), clean)


def draft_compact(world: 'PlanPathTeam', text: str) -> Draft:
    return walk_route(world.maze, text, world.rules.legs)


COMPACT = Speech(show_compact, draft_compact, parse_moves)


def cells_text(maze: Maze) -> str:
    """The rows, each after the last digit of its number: where walker and goal stand is said apart."""
    rows = maze.render().split('\n')
    return ''.join(f'{i % 10}{row}' for i, row in enumerate(rows))


def place(cell: int, size: int) -> str:
    """Row and column from 0; in maps of more than 10 a side they are set apart."""
    row, column = divmod(cell, size)
    return f'{row}{column}' if size <= 10 else f'{row},{column}'


def where_text(maze: Maze) -> str:
    """Where the walker is, how far it can go each way, and how far the goal is off."""
    blind = dataclasses.replace(maze, goal=-1)
    ways = ''.join(f'{letter}{len(plan_path.follow(blind, ((letter, None),)).moves)}' for letter in MOVES)
    (row, column), (to_row, to_column) = divmod(maze.at, maze.size), divmod(maze.goal, maze.size)
    down, right = to_row - row, to_column - column
    offset = f'{"DU"[down < 0]}{abs(down)}{"RL"[right < 0]}{abs(right)}'
    return f'@{place(maze.at, maze.size)}{ways}.{offset}'


def trial_text(trial: Trial, moves: int) -> str:
    """How a route ended, where it led, and its moves that fit in a turn."""
    ended = '!' if trial.stuck else '~' if len(trial.moves) > moves else ';'
    return f'{ended}@{place(trial.end.at, trial.end.size)}:{trial.moves[:moves].ljust(moves, ",")}'


TRAIL = 3
"""So many cells where earlier turns began are kept."""


@dataclasses.dataclass(frozen=True)
class PlanPathTeam:
    """One position in the hands of a team. Immutable; see `mallm.envs.base.World`.

    Attributes:
      maze: map and walker as they are now.
      rules: what a turn may do and pays.
      order: the roles of the team, in acting order.
      speech: how the roles are spoken to.
      draft: what the tool's text of this turn came to, or None before it has written.
      failed: routes known to get stuck from here, each after a `!`.
      trail: the cells where the last turns began that went somewhere, newest last.
    """

    maze: Maze
    rules: Rules
    order: tuple[str, ...] = ('tool', 'plan')
    speech: Speech = COMPACT
    draft: Draft | None = None
    failed: str = ''
    trail: tuple[int, ...] = ()

    @property
    def solved(self) -> bool:
        return self.maze.solved

    @property
    def over(self) -> bool:
        return self.maze.solved or self.rules.shaping.hopeless(self.maze)

    @property
    def waits(self) -> bool:
        return self.speech.waits

    def observe(self, role: str) -> tuple[Message, ...]:
        return self.speech.show(self, role)

    def act(self, role: str, text: str) -> 'tuple[PlanPathTeam, Reward]':
        return ACTS[role](self, text)

    def render(self) -> str:
        return self.maze.render()


def act_tool(world: PlanPathTeam, text: str) -> tuple[PlanPathTeam, Reward]:
    """The route is judged by where it leads; the walker stays where it is."""
    draft = world.speech.draft(world, text)
    local = penalties(world.rules.useless, clean=draft.clean, stuck=draft.trial.stuck)
    team = gain(world.maze, draft.trial.end, world.rules.shaping)
    return dataclasses.replace(world, draft=draft), reward(team, local)


def act_plan(world: PlanPathTeam, text: str) -> tuple[PlanPathTeam, Reward]:
    """The moves are executed; the route of this turn is used up. Writing nothing refuses it."""
    rules, draft = world.rules, world.draft
    said = world.speech.moves(text, rules.moves)
    maze, blocked = plan_path.play(world.maze, said.letters)
    refused = draft is not None and draft.trial.stuck and not text.strip()
    clean = bool(said.letters) and not said.garbage and not said.truncated
    local = (
        ('format', -rules.useless * (not clean and not refused)),
        ('illegal', -rules.illegal * blocked),
    )
    return moved(world, maze, draft), reward(gain(world.maze, maze, rules.shaping), local)


def act_solo(world: PlanPathTeam, text: str) -> tuple[PlanPathTeam, Reward]:
    """The route is walked, as many moves as fit in a turn."""
    draft = world.speech.draft(world, text)
    maze, _ = plan_path.play(world.maze, draft.trial.moves[: world.rules.moves])
    local = penalties(world.rules.useless, clean=draft.clean, stuck=draft.trial.stuck)
    return moved(world, maze, draft), reward(gain(world.maze, maze, world.rules.shaping), local)


def moved(world: PlanPathTeam, maze: Maze, draft: Draft | None) -> PlanPathTeam:
    """The world after a turn that led to `maze`."""
    if maze.at != world.maze.at:
        trail = (*world.trail, world.maze.at)[-TRAIL:]
        return dataclasses.replace(world, maze=maze, draft=None, failed='', trail=trail)
    fails = draft is not None and draft.trial.stuck and draft.program
    failed = f'{world.failed}!{draft.program}' if draft is not None and fails else world.failed
    return dataclasses.replace(world, draft=None, failed=failed)


ACTS: Mapping[str, Callable[[PlanPathTeam, str], tuple[PlanPathTeam, Reward]]] = {
    'tool': act_tool,
    'plan': act_plan,
    'solo': act_solo,
}
