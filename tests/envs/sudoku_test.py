"""Sudoku: one solution, givens that stay, boxes of the right shape, and a tool that must be told where to look."""

import dataclasses
import itertools
import random

import pytest

from mallm.envs import sudoku
from mallm.envs.base import FINAL_STRICT, HELD_OUT, STRICT
from mallm.envs.shaping import OUTCOME
from mallm.envs.sudoku import GenerationError, Sudoku, SudokuSpec, generate, solution, solutions
from mallm.envs.sudoku_prose import speech
from mallm.envs.sudoku_task import SudokuTask, fitting, random_cells, random_fills, said
from mallm.envs.sudoku_team import CONSISTENCY, Rules, SudokuTeam, parse_cells, parse_fills
from tests.envs.scripted import Printed

FOUR = '1.3.\n.4.2\n2.4.\n.3.1'
SOLVED = '1234\n3412\n2143\n4321'


def grid(text: str) -> Sudoku:
    cells = tuple(int(v) if v != '.' else 0 for v in text.replace('\n', ''))
    return Sudoku(len(text.split('\n')), cells, cells)


def team(text: str = FOUR, *, order=('tool', 'plan'), **rules) -> SudokuTeam:
    return SudokuTeam(grid(text), Rules(**rules), order)


# --- puzzles and rules


@pytest.mark.parametrize(('size', 'blanks'), [(4, (6, 11)), (6, (14, 20)), (9, (30, 40))])
def test_every_puzzle_has_exactly_one_solution_by_a_search_that_shares_no_code(size, blanks):
    spec = SudokuSpec(size, blanks)
    for seed in range(4 if size == 9 else 12):
        made = generate(seed, spec)
        assert made == generate(seed, spec) and blanks[0] <= made.blanks <= blanks[1]
        assert brute(size, list(made.givens)) == 1


def brute(size: int, cells: list[int]) -> int:
    """How many solutions there are, counted up to 2, by trying every value in the most crowded empty cell."""
    high, wide = {4: (2, 2), 6: (2, 3), 9: (3, 3)}[size]

    def fits(cell: int) -> list[int]:
        row, column = divmod(cell, size)
        seen = {cells[row * size + i] for i in range(size)} | {cells[i * size + column] for i in range(size)}
        top, left = row - row % high, column - column % wide
        seen |= {cells[(top + i) * size + left + j] for i in range(high) for j in range(wide)}
        return [value for value in range(1, size + 1) if value not in seen]

    empty = [cell for cell, value in enumerate(cells) if not value]
    if not empty:
        return 1
    cell = min(empty, key=lambda one: len(fits(one)))
    count = 0
    for value in fits(cell):
        cells[cell] = value
        count += brute(size, cells)
        cells[cell] = 0
        if count > 1:
            break
    return count


def test_there_are_288_grids_of_four_and_the_solver_finds_each_once():
    found = list(solutions(4, [0] * 16))
    assert len(found) == len(set(found)) == 288
    assert solution(4, (0,) * 16) is None  # more than one
    assert solution(4, grid(FOUR).givens) == grid(SOLVED).cells
    assert solution(4, grid('12..\n34..\n..2.\n...2').givens) is None  # none


def test_boxes_of_six_are_two_high_and_three_wide():
    boxes = sudoku.units(6)[12:]
    assert boxes[0] == (0, 1, 2, 6, 7, 8) and boxes[1] == (3, 4, 5, 9, 10, 11) and boxes[2][0] == 12
    for size in sudoku.SHAPES:
        assert len(sudoku.units(size)) == 3 * size
        assert all(sum(cell in unit for unit in sudoku.units(size)) == 3 for cell in range(size**2))


def test_givens_stay_and_no_unit_ever_holds_a_value_twice():
    at = grid(FOUR)
    for cell, value in itertools.product(range(-1, 17), range(-1, 6)):
        after = at.fill(cell, value)
        if after is not None:
            assert not at.givens[cell] and 1 <= value <= 4 and after.givens == at.givens
            assert all(after.cells[peer] != value for peer in sudoku.peers(4)[cell])
    filled = at.fill(1, 2)
    assert filled.fill(1, 0) == at and filled.fill(1, 2) is None and at.fill(0, 0) is None
    overwritten = at.fill(3, 4)
    assert overwritten is not None and overwritten.cells[3] == 4


def test_a_full_grid_that_ignores_the_givens_solves_nothing():
    """The example of a valid grid, whatever the puzzle is: what the paper's own checker accepts."""
    other = '4321\n2143\n3412\n1234'
    at = dataclasses.replace(team(fills=16), speech=speech(lambda answer, stdin: None))
    rows = [[int(v) for v in row] for row in other.split('\n')]
    after, reward = at.act('plan', f'#### {rows}')
    assert not after.solved and reward.team <= 0 and reward.local < 0 and after.grid.givens == at.grid.givens
    right = [[int(v) for v in row] for row in SOLVED.split('\n')]
    assert at.act('plan', f'#### {right}')[0].solved


ROWS = [[1, 2, 3, 4], [3, 4, 1, 2], [2, 1, 4, 3], [4, 3, 2, 1]]
NO_GRIDS = {
    'a 5': [[1, 5, 3, 4], *ROWS[1:]],
    'floats': [[1.0, 2.0, 3.0, 4.0], *ROWS[1:]],
    'strings': [['1', '2', '3', '4'], *ROWS[1:]],
    'truths': [[True, 2, 3, 4], *ROWS[1:]],
    'three rows': ROWS[:3],
    'three rows that could be read as fills': [[0, 1, 2, 4], [3, 0, 4, 1], [2, 1, 1, 3]],
    'five rows': [*ROWS, ROWS[0]],
}


def in_words(at: Sudoku) -> SudokuTeam:
    return SudokuTeam(at, Rules(fills=at.size**2), ('tool', 'plan'), speech(lambda answer, stdin: None))


@pytest.mark.parametrize('said', NO_GRIDS.values(), ids=NO_GRIDS)
def test_what_is_no_grid_of_whole_numbers_changes_nothing_and_costs_a_penalty(said):
    """A28: all of these are near the solution, which itself solves."""
    at = in_words(grid(FOUR))
    assert at.act('plan', f'#### {ROWS}')[0].solved
    after, reward = at.act('plan', f'#### {said}')
    assert after.grid == at.grid and not after.solved
    assert (reward.team, reward.local) == (0, pytest.approx(-0.1))


def test_a_valid_grid_that_overwrites_a_given_wins_nothing_whatever_the_size():
    """A28: the puzzle has 3 in its corner, the memorised grid 1; and a 9 x 9 whose solution has its digits moved on."""
    for at in (grid('3...\n.1.3\n.3.1\n1...'), grid('3.1.\n....\n....\n.1.3')):
        after, reward = in_words(at).act('plan', f'#### {ROWS}')
        assert not after.solved and after.grid.givens == at.givens and after.grid.cells[0] == 3
        assert reward.team <= 0 and reward.local <= -0.05
    nine = generate(1, SudokuSpec(9, (30, 34)))
    right = solution(9, nine.givens)
    moved = [[right[9 * row + column] % 9 + 1 for column in range(9)] for row in range(9)]
    after, reward = in_words(nine).act('plan', f'#### {moved}')
    assert not after.solved and after.grid.givens == nine.givens
    assert all(now == given for now, given in zip(after.grid.cells, nine.givens, strict=True) if given)
    assert reward.team <= 0 and reward.local <= -0.05 * (81 - nine.blanks), 'each given was written to'
    cell = next(cell for cell, given in enumerate(nine.givens) if given)
    shown = [list(nine.givens[9 * row :][:9]) for row in range(9)]
    shown[cell // 9][cell % 9] = nine.givens[cell] % 9 + 1
    after, reward = in_words(nine).act('plan', f'#### {shown}')
    assert after.grid == nine and (reward.team, reward.local) == (0, pytest.approx(-0.05))


def test_renamed_turned_and_mirrored_puzzles_are_one_and_a_turn_that_breaks_boxes_is_not():
    for size, blanks in ((4, (6, 8)), (6, (14, 16)), (9, (30, 34))):
        at = generate(3, SudokuSpec(size, blanks))
        rows = [list(at.givens[row * size :][:size]) for row in range(size)]
        names = [0, *random.Random(1).sample(range(1, size + 1), size)]
        renamed = [[names[value] for value in row] for row in rows]
        equal = [renamed, rows[::-1], [row[::-1] for row in rows], [row[::-1] for row in renamed[::-1]]]
        turned = [list(row) for row in zip(*rows, strict=True)]
        equal += [turned] if size != 6 else []
        for other in equal:
            cells = tuple(value for row in other for value in row)
            assert Sudoku(size, cells, cells).puzzle_key() == at.puzzle_key()
        if size == 6:
            cells = tuple(value for row in turned for value in row)
            assert Sudoku(size, cells, cells).puzzle_key() != at.puzzle_key()


def test_what_cannot_be_generated_is_refused():
    with pytest.raises(GenerationError, match='3 tries'):
        generate(0, SudokuSpec(4, (14, 15), tries=3))  # four cells at least are given
    with pytest.raises(ValueError, match='size=5'):
        SudokuSpec(5)
    with pytest.raises(ValueError, match='blanks'):
        SudokuTask(blanks=(0, 16))


def test_strict_puzzles_have_as_many_empty_cells_as_there_are_at_most():
    task = SudokuTask()
    for split in (STRICT, FINAL_STRICT):
        assert {task.difficulty(task.test(split, i)) for i in range(5)} == {11}
    assert len({task.difficulty(task.test(HELD_OUT, i)) for i in range(20)}) > 2


# --- the tool


def test_naked_and_hidden_values_by_hand():
    cells = grid(FOUR).cells
    assert sudoku.naked(4, cells, 1) == 2  # row 0 has 1 and 3, column 1 has 4
    one = grid('....\n..1.\n.1..\n....').cells
    assert sudoku.naked(4, one, 0) == 0 and sudoku.hidden(4, one, 0) == 1  # rows 1 and 2, column 1 and box have a 1
    assert sudoku.hidden(4, grid('....\n....\n....\n....').cells, 0) == 0


def test_the_interpreter_fills_in_what_follows_and_stops_where_nothing_does():
    at = team()
    after, reward = at.act('tool', '01 10')
    assert after.grid == at.grid and after.draft.fills == ((1, 2), (4, 3)) and after.draft.stuck is None
    assert (reward.team, reward.local) == (pytest.approx(2 / 8), 0)
    given, reward = at.act('tool', '0100')  # the second cell is given
    assert given.draft.fills == ((1, 2),) and given.draft.stuck == 0
    assert (reward.team, reward.local) == (pytest.approx(1 / 8), pytest.approx(-0.1))
    open_grid = team('....\n..1.\n.1..\n....')
    assert open_grid.act('tool', '00')[0].draft.stuck == 0b11110  # any of four fits
    assert open_grid.act('tool', '*00')[0].draft.fills == ((0, 1),)


def test_what_the_roles_are_shown_by_hand():
    at = team()
    assert at.observe('tool')[0].content == 'T/1a3b/c4d2/2e4f/g3h1+'
    told = at.act('tool', '01*10')[0].observe('plan')[0].content
    assert told == 'P/1a3b/c4d2/2e4f/g3h1+=a*c;a2c3,,,,'
    filled = at.act('plan', '012')[0]
    assert filled.observe('tool')[0].content == 'T/123b/c4d2/2e4f/g3h1+a'
    failed = at.act('tool', '00')[0].act('plan', '')[0]
    assert failed.observe('tool')[0].content.endswith('+!00')
    assert '!' not in failed.act('plan', '012')[0].observe('tool')[0].content
    followed = at.act('tool', '01*00')[0].act('plan', '012')[0]  # so much is known of the new grid
    assert followed.observe('tool')[0].content.endswith('+a!*00')


def test_texts_are_read_in_every_way_of_writing():
    at = grid(FOUR)
    assert parse_cells('12*30', at, 4).cells == parse_cells('d*g', at, 4).cells == ((6, False), (12, True))
    assert parse_cells('(1, 2), (3, 0)', at, 4).cells == ((6, False), (12, False))
    assert parse_cells('19i', at, 4).cells == ((-1, False),) * 2 and parse_cells('12' * 9, at, 4).truncated
    for text in ('[[0, 1, 2], [1, 0, 3]]', '012 103', 'a2c3', 'a 2, c 3'):
        assert parse_fills(text, at, 4).fills == ((1, 2), (4, 3))
    assert parse_fills('012x', at, 4).garbage == 1 and not parse_fills('', at, 4).clean


# --- rewards


def test_rewards_by_hand():
    at = team()
    assert at.act('plan', '012')[1].team == pytest.approx(1 / 8)
    wrong = at.act('plan', '034')
    assert wrong[0].grid.cells[3] == 4 and wrong[1].team == pytest.approx(1 / 8)  # 4 is right there
    open_grid = SudokuTask(team=('plan',), blanks=(11, 11)).train(1)
    right = solution(4, open_grid.grid.givens)
    cell, value = next((c, v) for c, v in fitting(open_grid.grid) if v != right[c])  # fits by the rules and is wrong
    spoilt, reward = open_grid.act('plan', f'{cell // 4}{cell % 4}{value}')
    assert reward.team == pytest.approx(-1 / 8)
    assert spoilt.act('plan', f'{cell // 4}{cell % 4}0')[1].team == pytest.approx(1 / 8)
    assert at.act('plan', '000')[1].local == pytest.approx(-0.05)  # a given cell
    assert at.act('plan', '011')[1] == at.act('plan', '013')[1]  # against the row


def test_writing_and_erasing_pays_nothing_in_any_mode():
    for seed in range(10):
        for reward in ('oracle', 'consistency', 'outcome'):
            at = start = SudokuTask(reward=reward, team=('plan',)).train(seed)
            draw, team_reward = random.Random(seed), 0.0
            for _ in range(6):
                empty = [cell for cell, value in enumerate(at.grid.cells) if not value]
                cell = draw.choice(empty)
                values = list(sudoku.values_of(sudoku.candidates(4, at.grid.cells, cell)))
                if not values or len(empty) == 1:
                    break
                at, earned = at.act('plan', f'{cell // 4}{cell % 4}{draw.choice(values)}')
                team_reward += earned.team
            for cell, value in enumerate(at.grid.cells):
                if value and not at.grid.givens[cell]:
                    at, earned = at.act('plan', f'{cell // 4}{cell % 4}0')
                    team_reward += earned.team
            assert at.grid == start.grid and team_reward == pytest.approx(0)


def test_without_a_solver_a_cell_that_nothing_fits_is_seen_and_a_wrong_one_is_not():
    at = team('12..\n....\n....\n..4.', shaping=CONSISTENCY)
    spoilt, reward = at.act('plan', '134')  # now nothing fits in row 0, column 3, which needs 3 or 4
    dead = sum(not sudoku.candidates(4, spoilt.grid.cells, c) for c, v in enumerate(spoilt.grid.cells) if not v)
    assert reward.team == pytest.approx((1 - 2 * dead) / 8)
    assert team(shaping=OUTCOME).act('plan', '012')[1].team == 0


def test_random_answers_of_either_role_earn_different_rewards():
    task, draw = SudokuTask(), random.Random(0)
    live = dict.fromkeys(task.team, 0)
    for seed in range(30):
        at = task.train(seed)
        for role in task.team:
            write = random_cells if role == 'tool' else lambda at, task, draw: random_fills(at.grid, task, draw)
            branches = [at.act(role, write(at, task, draw)) for _ in range(8)]
            totals = [earned.total(1.0) for _, earned in branches]
            live[role] += max(totals) - min(totals) > 1e-9
            at = branches[totals.index(max(totals))][0]
    assert min(live.values()) >= 27, live


def test_a_beginner_is_weak_and_follows_the_rules():
    task = SudokuTask()
    solved = 0
    for index in range(60):
        at = task.test(HELD_OUT, index)
        for turn in range(4):
            for role, text in said(at, task, random.Random(4 * index + turn)).items():
                at, reward = at.act(role, text)
                assert dict(reward.terms).get('illegal', 0) == 0
            if at.over:
                break
        solved += at.solved
    assert 0.2 < solved / 60 < 0.9


def test_in_words_the_tools_program_may_solve_the_whole_grid():
    task = SudokuTask(style='text')
    at = task.train(3)
    program = (
        'import sys\ng=[[0 if c == "." else int(c) for c in r] for r in sys.stdin.read().split()]\n'
        'def ok(r,c,v):\n'
        '    box=[g[r//2*2+i][c//2*2+j] for i in (0,1) for j in (0,1)]\n'
        '    return v not in g[r] and v not in [x[c] for x in g] and v not in box\n'
        'e=[(r,c) for r in range(4) for c in range(4) if not g[r][c]]\n'
        'def go(k):\n'
        '    if k == len(e): return True\n'
        '    r,c=e[k]\n'
        '    for v in (1,2,3,4):\n'
        '        if ok(r,c,v):\n'
        '            g[r][c]=v\n'
        '            if go(k+1): return True\n'
        '            g[r][c]=0\n'
        'go(0)\nprint("**Actions List**:", [[r,c,g[r][c]] for r,c in e])\n'
    )
    after, reward = at.act('tool', f'```python\n{program}```')
    assert reward.team > 1 and after.draft.end.solved and not after.solved
    listed = after.observe('plan')[1].content.split('**Actions List**:')[1].split('\n')[0]
    done, reward = after.act('plan', f'I follow it.\n#### {listed}')
    assert done.solved and reward.local == 0


def test_in_words_a_refused_fill_is_told_apart_from_those_that_led_to_it():
    """012 can be made; 103 after it too; 001 cannot, for that cell is given."""
    at = dataclasses.replace(
        team(fills=16), speech=speech(lambda answer, stdin: Printed(f'**Actions List**: {answer}'))
    )
    stuck = at.act('tool', '[[0, 1, 2], [0, 0, 1]]')[0]
    told = stuck.act('plan', '')[0].observe('tool')[1].content
    assert 'Lists (row, column, value) whose last fill is refused on this grid: 012001' in told
    followed = stuck.act('plan', '#### [[0, 1, 2]]')[0].observe('tool')[1].content
    assert 'whose last fill is refused on this grid: 001' in followed
    other = stuck.act('plan', '#### [[1, 0, 3]]')[0].observe('tool')[1].content
    assert 'refused on' not in other


def test_a_beginner_leaves_out_the_cell_that_failed_and_no_other():
    at = dataclasses.replace(team(), failed='!a*00!f')
    named = {sign for seed in range(60) for sign in random_cells(at, SudokuTask(), random.Random(seed))}
    assert named == set('*abcdegh')
