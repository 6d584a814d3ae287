"""Plan-Path in words, for real language models: the tool writes Python that is run, the plan answers with a list.

The prompts show the position as it is now; the program gets the map on standard input.
"""

import dataclasses

from mallm.envs import plan_path
from mallm.envs.plan_path import Maze
from mallm.envs.plan_path_team import Draft, PlanPathTeam, Speech
from mallm.envs.prose import PROGRAM_RULES, THINK, PythonTool, actions_list, final_answer
from mallm.envs.sokoban_program import ParsedMoves, parse_moves
from mallm.types import Message

RULES = (
    'On a map you walk from @ to the goal, one cell a move: U is up, D down, L left, R right. # is a wall, and nobody '
    'leaves the map. Rows are counted from the top and columns from the left, from 0. In maps, `.` is the goal and a '
    'space is free.'
)
PROGRAM = f'You write a program that finds the way. {PROGRAM_RULES} Example: **Actions List**: ["R", "R", "U"]'
ANSWER = f'You decide which moves are made. {THINK} Example: #### ["R", "R", "U"]'
FORM = {'tool': PROGRAM, 'plan': ANSWER, 'solo': PROGRAM}


def spot(maze: Maze, cell: int) -> str:
    row, column = divmod(cell, maze.size)
    return f'row {row}, column {column}'


def show(world: PlanPathTeam, role: str) -> tuple[Message, ...]:
    maze, draft = world.maze, world.draft
    told = [
        f'Map, {maze.size} rows:\n{maze.render()}',
        f'You are at {spot(maze, maze.at)}. The goal is at {spot(maze, maze.goal)}.',
        f'At most {world.rules.moves} moves are made in a turn.',
    ]
    if world.failed:
        told.append(f'Lists that ran into a wall from here: {world.failed[1:].replace("!", ", ")}')
    if role == 'plan' and draft is not None:
        ended = 'then a wall stops them' if draft.trial.stuck else 'all of them can be made'
        told.append(
            f'Your colleague wrote a program. {draft.told}\nIts moves: {draft.program or "none"}; {ended}, at '
            f'{spot(maze, draft.trial.end.at)}.'
        )
    return (Message('system', f'{RULES}\n{FORM[role]}'), Message('user', '\n'.join(told)))


@dataclasses.dataclass(frozen=True)
class Programmer:
    """Runs the program, and walks what it listed on a copy."""

    python: PythonTool

    def __call__(self, world: PlanPathTeam, text: str) -> Draft:
        ran = self.python(text, world.maze.render() + '\n')
        listed = actions_list(ran.stdout) if ran.ok else None
        said = parse_moves(listed or '', world.rules.moves)
        clean = bool(said.letters) and not said.garbage
        return Draft(said.letters, plan_path.walked(world.maze, said.letters), clean, f'It reported:\n{ran.shown()}')


def moves(text: str, most: int) -> ParsedMoves:
    answer = final_answer(text)
    return ParsedMoves('', len(text.strip()), False) if answer is None else parse_moves(answer, most)


def speech(python: PythonTool) -> Speech:
    """How to speak to real language models whose programs `python` runs."""
    return Speech(show, Programmer(python), moves, waits=True)
