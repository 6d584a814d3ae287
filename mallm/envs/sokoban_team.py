"""Sokoban for a team: `tool` writes a push program that an interpreter runs on a copy, `plan` decides what is moved.

Roles that exist:
  tool  sees the board; writes a push program such as `RRU`. The board does not change.
  plan  sees the board, the program and what the interpreter made of it; its list of moves is executed.
  solo  sees the board; writes a push program whose moves are executed at once (one agent that holds the tool).
A team is an order of roles: ('tool', 'plan') is the paper's pair, ('plan',) has no tool, ('solo',) is one agent with
it.

How the roles are spoken to is a `Speech`; `mallm.envs.sokoban_prose` has the one for real language models. COMPACT is
one token a cell for the tiny tokenizer: a mark for the role, the rows without the outer ring, and
for `tool` where player, boxes and goals are (row and column) and which programs have failed on this board, for `plan`
what the tool did in this turn:
  T#. @/ $ #/    /  ##@03$11.01!UR   P#. @/ $ #/    /  ##=U;@11$01:LDDLU,,,
that is the program, `;` for done, `!` for stuck or `~` for more moves than fit in a turn, where player and boxes would
be, and the interpreter's moves, filled up to a turn's length. `plan` refuses a program by writing nothing: free where
the program got stuck, and the tool then knows one more that fails.
"""

import dataclasses
import functools
from collections.abc import Callable, Mapping

from mallm.envs import sokoban
from mallm.envs.games import MARKS, play_until_solved
from mallm.envs.shaping import Shaping, gain, never, penalties, reward
from mallm.envs.sokoban import Board, Execution
from mallm.types import Message, Reward


@dataclasses.dataclass(frozen=True)
class OraclePotential:
    """- (moves of a shortest solution, at most `reach`) / 16, and -reach / 16 where there is none: no board is worth
    spoiling. Boards that need more moves than `reach` are all alike, so it has to exceed what is played."""

    reach: int = 16

    def __call__(self, board: Board) -> float:
        try:
            moves = sokoban.distance(board)
        except sokoban.SolverLimit:
            moves = None
        return -(self.reach if moves is None else min(moves, self.reach)) / 16


def nearness(board: Board) -> float:
    """- (sum over boxes of the city-block distance to the nearest goal) / 8: no solver, and blind to walls."""
    goals = [divmod(cell, board.width) for cell in sokoban.cells_of(board.goals)]
    boxes = [divmod(cell, board.width) for cell in sokoban.cells_of(board.boxes)]
    return -sum(min(abs(r - x) + abs(c - y) for x, y in goals) for r, c in boxes) / 8


def unsolvable(board: Board) -> bool:
    try:
        return sokoban.distance(board) is None
    except sokoban.SolverLimit:
        return False


ORACLE = Shaping(OraclePotential(), unsolvable)
NEARNESS = Shaping(nearness, never)


@dataclasses.dataclass(frozen=True)
class Rules:
    """What a turn may do and what it pays.

    Attributes:
      moves: most moves executed in one turn.
      pushes: most pushes of a program that are run.
      shaping: potential added to the outcome (1 for solving).
      illegal: penalty for each move that cannot be done.
      useless: penalty for text that says nothing, is not understood, or a program that gets stuck.
    """

    moves: int = 8
    pushes: int = 8
    shaping: Shaping = ORACLE
    illegal: float = 0.05
    useless: float = 0.1


@dataclasses.dataclass(frozen=True)
class Draft:
    """What a tool's text came to on a copy of the board.

    Attributes:
      program: the text as understood, to be shown.
      execution: what it did.
      clean: whether all of the text was understood and some of it said something.
      told: what else `plan` is told, e.g. what a program printed.
    """

    program: str
    execution: Execution
    clean: bool
    told: str = ''


@dataclasses.dataclass(frozen=True)
class Speech:
    """How the roles are spoken to and understood.

    Attributes:
      show: (world, role) -> what the role is shown.
      draft: (world, text) -> what the tool's text comes to on a copy.
      moves: the part of a plan's text that lists its moves.
      failures: (world, program, execution, board after the turn) -> what is known to fail on that board.
      waits: whether a draft waits for a program to run.
    """

    show: 'Callable[[SokobanTeam, str], tuple[Message, ...]]'
    draft: 'Callable[[SokobanTeam, str], Draft]'
    moves: Callable[[str], str]
    failures: 'Callable[[SokobanTeam, str, Execution | None, Board], str]'
    waits: bool = False


def show_compact(world: 'SokobanTeam', role: str) -> tuple[Message, ...]:
    if role == 'plan' and world.execution is not None:
        told = f'={world.program}{execution_text(world.execution, world.rules.moves)}'
    else:
        goals = ''.join(f'.{place(cell, world.board)}' for cell in sokoban.cells_of(world.board.goals))
        told = places_text(world.board) + goals + world.failed
    return (Message('user', MARKS[role] + cells_text(world.board) + told),)


def draft_compact(world: 'SokobanTeam', text: str) -> Draft:
    return Draft(*run_program(world.board, text, world.rules.pushes))


def failures(world: 'SokobanTeam', program: str, execution: Execution | None, board: Board) -> str:
    """Push programs known to fail on `board`, the board after the turn in which `program` was run on a copy; those that
    the plan did not follow are among them. A walk leaves them as they are: programs find their own ways."""
    if execution is None:
        return ''
    tried = program[: execution.pushes + 1]
    if board.boxes == world.board.boxes:
        return f'{world.failed}!{tried}' if tried else world.failed
    return f'!{execution.stuck}' if execution.stuck and board == execution.board else ''


COMPACT = Speech(show_compact, draft_compact, str, failures)


@dataclasses.dataclass(frozen=True)
class SokobanTeam:
    """One state of one board in the hands of a team. Immutable; see `mallm.envs.base.World`.

    Attributes:
      board: the board as it is now.
      rules: what a turn may do and pays.
      order: the roles of the team, in acting order.
      program: what the tool wrote in this turn, as understood.
      execution: what the interpreter made of it, or None before the tool has written.
      failed: programs known to fail on this board, each up to the push that could not be done and after a `!`; without
        them a tool that fails would see the same board and write the same program again.
      speech: how the roles are spoken to.
      told: what else the tool's text of this turn came to.
    """

    board: Board
    rules: Rules
    order: tuple[str, ...] = ('tool', 'plan')
    program: str = ''
    execution: Execution | None = None
    failed: str = ''
    speech: Speech = COMPACT
    told: str = ''

    @property
    def solved(self) -> bool:
        return self.board.solved

    @property
    def over(self) -> bool:
        return self.board.solved or self.rules.shaping.hopeless(self.board)

    @property
    def waits(self) -> bool:
        return self.speech.waits

    def observe(self, role: str) -> tuple[Message, ...]:
        return self.speech.show(self, role)

    def act(self, role: str, text: str) -> 'tuple[SokobanTeam, Reward]':
        return ACTS[role](self, text)

    def render(self) -> str:
        return self.board.render()


def cells_text(board: Board) -> str:
    """The board without its outer ring, which holds no floor; rows end with `/`."""
    rows = board.render().split('\n')[1:-1]
    return '/'.join(row.ljust(board.width)[1:-1] for row in rows)


def place(cell: int, board: Board) -> str:
    """Row and column, both from 0 inside the outer ring, of boards up to 12 x 12; larger numbers are set apart."""
    row, column = divmod(cell, board.width)
    return f'{row - 1}{column - 1}' if max(board.width, board.height) <= 12 else f'{row - 1},{column - 1}'


def places_text(board: Board) -> str:
    return f'@{place(board.player, board)}' + ''.join(f'${place(c, board)}' for c in sokoban.cells_of(board.boxes))


def execution_text(execution: Execution, moves: int) -> str:
    """The interpreter's report: how it ended, where player and boxes came to be, and the moves that fit in a turn."""
    ended = '!' if execution.stuck else '~' if len(execution.moves) > moves else ';'
    return f'{ended}{places_text(execution.board)}:{execution.moves[:moves].ljust(moves, ",")}'


@functools.lru_cache(maxsize=200_000)
def run_program(board: Board, text: str, pushes: int) -> tuple[str, Execution, bool]:
    """The program as understood (letters), what it did, and whether the text was a clean, non-empty program."""
    parsed = sokoban.parse_program(text)
    kept = parsed.pushes[:pushes]
    clean = bool(kept) and not parsed.garbage and len(kept) == len(parsed.pushes)
    return ''.join(push.letter for push in kept), sokoban.execute(board, kept), clean


def act_tool(world: SokobanTeam, text: str) -> tuple[SokobanTeam, Reward]:
    """The program is judged by the board it would lead to; the real board stays as it is."""
    rules = world.rules
    draft = world.speech.draft(world, text)
    execution = draft.execution
    local = penalties(rules.useless, clean=draft.clean, stuck=bool(execution.stuck))
    after = dataclasses.replace(world, program=draft.program, execution=execution, told=draft.told)
    return after, reward(gain(world.board, execution.board, rules.shaping), local)


@functools.lru_cache(maxsize=200_000)
def run_moves(board: Board, text: str, moves: int) -> tuple[Board, int, bool]:
    """The board after the moves, how many were illegal, and whether the text was a clean, non-empty list."""
    parsed = sokoban.parse_moves(text, moves)
    after, illegal = play_until_solved(board, parsed.letters, Board.move)
    return after, illegal, bool(parsed.letters) and not parsed.garbage and not parsed.truncated


def act_plan(world: SokobanTeam, text: str) -> tuple[SokobanTeam, Reward]:
    """The moves are executed; the program of this turn is used up. Writing nothing refuses it."""
    rules = world.rules
    board, illegal, clean = run_moves(world.board, world.speech.moves(text), rules.moves)
    free = world.execution is not None and bool(world.execution.stuck) and not text.strip()
    local = (('format', -rules.useless * (not clean and not free)), ('illegal', -rules.illegal * illegal))
    failed = world.speech.failures(world, world.program, world.execution, board)
    after = dataclasses.replace(world, board=board, program='', execution=None, failed=failed, told='')
    return after, reward(gain(world.board, board, rules.shaping), local)


def act_solo(world: SokobanTeam, text: str) -> tuple[SokobanTeam, Reward]:
    """The program's moves are executed, as many as fit in a turn."""
    rules = world.rules
    draft = world.speech.draft(world, text)
    execution = draft.execution
    board, _ = world.board.play(execution.moves[: rules.moves])
    local = penalties(rules.useless, clean=draft.clean, stuck=bool(execution.stuck))
    failed = world.speech.failures(world, draft.program, execution, board)
    after = dataclasses.replace(world, board=board, failed=failed)
    return after, reward(gain(world.board, board, rules.shaping), local)


ACTS: Mapping[str, Callable[[SokobanTeam, str], tuple[SokobanTeam, Reward]]] = {
    'tool': act_tool,
    'plan': act_plan,
    'solo': act_solo,
}
