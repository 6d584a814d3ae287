"""Sokoban in words, for real language models: the tool writes Python that is run, the plan answers with a list.

The prompts show the board as it is now; the program gets it on standard input.
"""

import dataclasses

from mallm.envs import sokoban
from mallm.envs.prose import PROGRAM_RULES, THINK, PythonTool, actions_list, final_answer
from mallm.envs.sokoban import Board, Execution
from mallm.envs.sokoban_team import Draft, SokobanTeam, Speech
from mallm.types import Message

RULES = (
    'Sokoban: you walk one cell a move: U is up, D down, L left, R right. Walking into a box pushes it one cell on, if '
    'a free cell is behind it; boxes cannot be pulled, and only one is pushed at a time. The board is solved when '
    'every box stands on a goal. Rows are counted from the top and columns from the left, from 0. # is a wall, a '
    'space is free, @ is you, $ a box, . a goal, * a box on a goal, + you on a goal.'
)
PROGRAM = f'You write a program that finds a solution. {PROGRAM_RULES} Example: **Actions List**: ["R", "R", "U"]'
ANSWER = f'You decide which moves are made. {THINK} Example: #### ["R", "R", "U"]'
FORM = {'tool': PROGRAM, 'plan': ANSWER, 'solo': PROGRAM}


def spots(board: Board, cells: int) -> str:
    found = [divmod(cell, board.width) for cell in sokoban.cells_of(cells)]
    return ', '.join(f'(row {row}, column {column})' for row, column in found)


def show(world: SokobanTeam, role: str) -> tuple[Message, ...]:
    board, execution = world.board, world.execution
    told = [
        f'The board now:\n{board.render()}',
        f'You: {spots(board, 1 << board.player)}. Boxes: {spots(board, board.boxes)}.',
        f'Goals: {spots(board, board.goals)}.',
        f'At most {world.rules.moves} moves are made in a turn.',
    ]
    if world.failed:
        told.append(f'Lists whose last move cannot be done from here: {world.failed[1:].replace("!", ", ")}')
    if role == 'plan' and execution is not None:
        ended = f'then {execution.stuck} cannot be done' if execution.stuck else 'all of them can be done'
        told.append(
            f'Your colleague wrote a program. {world.told}\nIts moves: {world.program or "none"}; {ended}. They would '
            f'lead to:\n{execution.board.render()}'
        )
    return (Message('system', f'{RULES}\n{FORM[role]}'), Message('user', '\n'.join(told)))


def walked(board: Board, letters: str) -> Execution:
    """Single moves on a copy, up to the first that cannot be done."""
    for done, letter in enumerate(letters):
        after = board.move(letter)
        if board.solved or after is None:
            return Execution(letters[:done], board, '' if board.solved else letter, done)
        board = after
    return Execution(letters, board, '', len(letters))


@dataclasses.dataclass(frozen=True)
class Programmer:
    """Runs the program, and does what it listed on a copy."""

    python: PythonTool

    def __call__(self, world: SokobanTeam, text: str) -> Draft:
        ran = self.python(text, world.board.render() + '\n')
        listed = actions_list(ran.stdout) if ran.ok else None
        said = sokoban.parse_moves(listed or '', world.rules.moves)
        clean = bool(said.letters) and not said.garbage
        return Draft(said.letters, walked(world.board, said.letters), clean, f'It reported:\n{ran.shown()}')


def moves(text: str) -> str:
    """The answer line; a sign that is no move stands for an answer without one."""
    answer = final_answer(text)
    return ('?' if text.strip() else '') if answer is None else answer


def failures(world: SokobanTeam, program: str, execution: Execution | None, board: Board) -> str:
    """Lists that cannot be done on `board`, each up to the move in the way. One step makes other lists possible."""
    stuck = '' if execution is None else execution.stuck
    if execution is not None and stuck and board == world.board:
        return f'{world.failed}!{program[: execution.pushes + 1]}'
    if board == world.board:
        return world.failed
    return f'!{stuck}' if stuck and execution is not None and board == execution.board else ''


def speech(python: PythonTool) -> Speech:
    """How to speak to real language models whose programs `python` runs."""
    return Speech(show, Programmer(python), moves, failures, waits=True)
