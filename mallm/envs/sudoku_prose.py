"""Sudoku in words, for real language models: the tool writes Python that is run, the plan answers with a list.

The prompts show the grid as it is now; the program gets it on standard input.
"""

import dataclasses

from mallm.envs import sudoku
from mallm.envs.prose import PROGRAM_RULES, THINK, PythonTool, actions_list, final_answer, literal
from mallm.envs.sudoku_team import Draft, Fill, Fills, Speech, SudokuTeam, fills_text, parse_fills, place, write
from mallm.types import Message

PROGRAM = f'You write a program that finds values. {PROGRAM_RULES} Example: **Actions List**: [[0, 2, 1], [3, 1, 4]]'
ANSWER = f'You decide what is filled in. {THINK} Example: #### [[0, 2, 1], [3, 1, 4]]'
FORM = {'tool': PROGRAM, 'plan': ANSWER, 'solo': PROGRAM}


def rules(size: int) -> str:
    rows, columns = sudoku.SHAPES[size]
    return (
        f'A Sudoku of {size} rows and {size} columns. Every row, every column and every box of {rows} rows and '
        f'{columns} columns holds each of 1 to {size} once. `.` is an empty cell. A fill is [row, column, value], with '
        'rows and columns counted from 0; value 0 empties a cell again. Given cells cannot be changed, and a fill is '
        'refused when its row, column or box has the value already.'
    )


def show(world: SudokuTeam, role: str) -> tuple[Message, ...]:
    grid, draft = world.grid, world.draft
    own = [place(cell, grid.size) for cell, value in enumerate(grid.cells) if value and not grid.givens[cell]]
    told = [f'The grid now:\n{grid.render()}', f'At most {world.rules.fills} fills are made in a turn.']
    told += [f'Filled in by you so far (row, column): {", ".join(own)}'] if own else []
    if world.failed:
        lists = world.failed[1:].replace('!', ', ')
        told.append(f'Lists (row, column, value) whose last fill is refused on this grid: {lists}')
    if role == 'plan' and draft is not None:
        ended = 'all of them can be made' if draft.stuck is None else 'some of them cannot be made'
        told.append(
            f'Your colleague wrote a program. {draft.told}\nIts fills (row, column, value): {draft.program or "none"}; '
            f'{ended}. They would lead to:\n{draft.end.render()}'
        )
    return (Message('system', f'{rules(grid.size)}\n{FORM[role]}'), Message('user', '\n'.join(told)))


def fills_in(answer: str, world: SudokuTeam) -> Fills:
    """The fills of a list, or those that a whole grid says: for each cell that it would change, givens too.

    Rows of the grid's width that are too few or too many are no grid, and no fills either.
    """
    size, grid = world.grid.size, literal(answer)
    rows = grid if isinstance(grid, list) else []
    if not rows or not all(isinstance(row, list) and len(row) == size for row in rows):
        return parse_fills(answer, world.grid, world.rules.fills, letters=False)
    values = [value for row in rows for value in row]
    known = len(rows) == size and all(type(value) is int and 0 <= value <= size for value in values)
    fills: list[Fill] = [
        (cell, value) for cell, value in enumerate(values) if known and value and value != world.grid.cells[cell]
    ]
    return Fills(tuple(fills[: world.rules.fills]), int(not known), len(fills) > world.rules.fills)


@dataclasses.dataclass(frozen=True)
class Programmer:
    """Runs the program, and makes what it listed on a copy, up to the first fill that is refused."""

    python: PythonTool

    def __call__(self, world: SudokuTeam, text: str) -> Draft:
        ran = self.python(text, world.grid.render() + '\n')
        listed = actions_list(ran.stdout) if ran.ok else None
        said = fills_in(listed or '', world)
        end, made = world.grid, 0
        for fill in said.fills:
            after, illegal = write(end, (fill,))
            if illegal:
                break
            end, made = after, made + 1
        stuck = 0 if made < len(said.fills) else None
        program, failing = (
            fills_text(some, world.grid.size) for some in (said.fills[: made + 1], said.fills[made:][:1])
        )
        return Draft(program, said.fills[:made], end, stuck, said.clean, f'It reported:\n{ran.shown()}', failing)


def fills(world: SudokuTeam, text: str) -> Fills:
    answer = final_answer(text)
    return Fills((), len(text.strip()), False) if answer is None else fills_in(answer, world)


def speech(python: PythonTool) -> Speech:
    """How to speak to real language models whose programs `python` runs."""
    return Speech(show, Programmer(python), fills, waits=True)
