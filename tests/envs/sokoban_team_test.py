"""The Sokoban team: rewards that cannot be farmed, roles with something to learn, and texts of any kind (A29)."""

import dataclasses
import functools
import math
import random

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mallm.envs import sokoban
from mallm.envs.base import FINAL, FINAL_STRICT, HELD_OUT, STRICT, World
from mallm.envs.shaping import OUTCOME
from mallm.envs.sokoban import Board, BoardSpec, load_levels
from mallm.envs.sokoban_task import SokobanTask
from mallm.envs.sokoban_team import NEARNESS, ORACLE, Rules, SokobanTeam

SHAPINGS = {'oracle': ORACLE, 'nearness': NEARNESS, 'outcome': OUTCOME}
S1 = '######\n#@ $.#\n######\n'
ROOM = '######\n##. @#\n# $ ##\n#    #\n#  ###\n######\n'
DEAD = '#####\n#$ @#\n# . #\n#####\n'
ROLES = ('tool', 'plan', 'solo')


def level(text: str) -> Board:
    (board,) = load_levels(text, 'case')
    return board


def world(text: str = S1, *, shaping=ORACLE, order=('tool', 'plan'), **rules) -> SokobanTeam:
    return SokobanTeam(level(text), Rules(shaping=shaping, **rules), order)


@functools.cache
def board_of(seed: int) -> Board:
    return sokoban.generate(seed, BoardSpec())


every_shaping = pytest.mark.parametrize('shaping', SHAPINGS.values(), ids=SHAPINGS)
every_role = pytest.mark.parametrize('role', ROLES)


# --- what is shown


def test_what_the_roles_are_shown_by_hand():
    start, board = world(ROOM), '#. @/ $ #/    /  ##'
    told = {role: start.observe(role)[0].content for role in ROLES}
    # player in row 0, column 3; box in row 1, column 1; goal in row 0, column 1; a plan without a tool sees the same
    assert told == {role: mark + board + '@03$11.01' for role, mark in zip(ROLES, 'TPS', strict=True)}
    report = start.act('tool', 'U')[0].observe('plan')[0].content.removeprefix('P' + board)
    # the program, the walk round the box and its push, done, and where player and box would be
    assert report.startswith('=U') and all(part in report for part in ('LDDLU', ';', '@11$01'))


def test_a_report_says_how_a_program_ended():
    stuck = world().act('tool', 'U')[0].observe('plan')[0].content  # nobody can stand below the box of a corridor
    assert '!' in stuck and ';' not in stuck and '@00$02' in stuck
    long = world(ROOM, moves=2).act('tool', 'U')[0].observe('plan')[0].content  # five moves, two fit in a turn
    assert '~' in long and 'LD' in long and 'LDD' not in long


def test_the_plan_sees_the_program_that_was_chosen_and_the_next_turn_does_not():
    shown, _ = world(ROOM).act('tool', 'L')
    assert '=L' in shown.observe('plan')[0].content
    moved, _ = shown.act('plan', 'L')
    assert moved.program == '' and moved.execution is None and '=' not in moved.observe('plan')[0].content
    assert moved.observe('tool') != world(ROOM).observe('tool')


def test_the_tool_sees_which_programs_failed_on_this_board_until_a_box_moves():
    at, seen = world(ROOM), []
    base = at.observe('tool')[0].content
    for text in ('RRD', 'D'):  # the first stops at its second push, the second works; both are refused
        at, _ = at.act('tool', text)[0].act('plan', '')
        seen.append(at.observe('tool')[0].content.removeprefix(base))
    assert seen == ['!RR', '!RR!D']
    walked, _ = at.act('tool', 'R')[0].act('plan', 'L')  # a step without a push changes nothing about the box
    assert walked.failed == '!RR!D!R'
    followed = lambda text: at.act('tool', text)[0].act('plan', at.act('tool', text)[0].execution.moves)[0]  # noqa: E731
    assert followed('R').board.boxes != at.board.boxes and followed('R').failed == ''
    assert followed('RR').failed == '!R'  # followed to the push that fails: that much is known of the new board
    assert world().act('plan', '')[0].failed == ''  # without a tool nothing was tried


def test_refusing_is_free_where_the_program_got_stuck_and_never_pays():
    for program, words, local in [('RR', '', 0.0), ('RR', ' \n', 0.0), ('R', '', -0.1), ('RR', 'x', -0.1)]:
        after, reward = world(ROOM).act('tool', program)[0].act('plan', words)
        assert (reward.team, reward.local) == (0, pytest.approx(local)) and after.board == world(ROOM).board
    assert world(ROOM).act('plan', '')[1].local == pytest.approx(-0.1)


# --- rewards by hand


MOVE = -ORACLE.potential(level(S1).play('R')[0])  # what the oracle pays for coming one move nearer
CELL = -NEARNESS.potential(level(S1))  # what nearness pays for a box coming one cell nearer


def test_potentials_grow_with_the_moves_or_cells_that_are_missing():
    assert 0 < MOVE < 1 and 0 < CELL < 1
    assert ORACLE.potential(level(S1)) == pytest.approx(-2 * MOVE)  # RR
    assert ORACLE.potential(level(ROOM)) == pytest.approx(-5 * MOVE)  # LDDLU
    assert NEARNESS.potential(level('#######\n#@$  .#\n#######')) == pytest.approx(-3 * CELL)
    assert OUTCOME.potential(level(S1)) == OUTCOME.potential(level(DEAD)) == 0


def test_solving_pays_one_and_the_way_to_it_its_potential():
    after, reward = world().act('plan', 'R')
    assert (reward.team, reward.local) == (pytest.approx(MOVE), 0) and not after.solved
    after, reward = after.act('plan', 'R')
    assert (reward.team, reward.local) == (pytest.approx(1 + MOVE), 0) and after.solved
    assert dict(reward.terms) == {'solved': 1, 'shaping': pytest.approx(MOVE), 'format': 0, 'illegal': 0}


def test_without_an_oracle_only_distance_or_the_outcome_pays():
    # the box of S1 is one cell from its goal until the second move pushes it
    pays = {name: [world(shaping=s).act('plan', text)[1].team for text in ('R', 'RR')] for name, s in SHAPINGS.items()}
    assert pays['oracle'] == pytest.approx([MOVE, 1 + 2 * MOVE])
    assert pays['nearness'] == pytest.approx([0, 1 + CELL])
    assert pays['outcome'] == [0, 1]


def test_the_tool_is_paid_for_the_board_its_program_would_lead_to_and_moves_nothing():
    start = world(ROOM)
    for text in ('U', 'L', 'D', 'gibberish', ''):
        after, reward = start.act('tool', text)
        executed = sokoban.execute(start.board, sokoban.parse_program(text).pushes).board
        assert after.board == start.board
        wanted = ORACLE.potential(executed) - ORACLE.potential(start.board) + executed.solved
        assert reward.team == pytest.approx(wanted)
    assert start.act('tool', 'U')[1].team == pytest.approx(1 + 5 * MOVE)  # LDDLU solves it


def test_each_part_of_a_reward_is_named_and_alpha_weighs_the_team_part():
    _, reward = world(ROOM).act('plan', 'LxD')
    terms = dict(reward.terms)
    assert reward.team == terms['solved'] + terms['shaping'] and reward.local == terms['format'] + terms['illegal']
    assert reward.total(1.0) == reward.team + reward.local
    assert reward.total(0.0) == reward.local == pytest.approx(-0.1)
    assert reward.total(2.0) == pytest.approx(2 * reward.team - 0.1)


# --- shaping cannot be farmed


texts = st.one_of(
    st.text(alphabet='UDLR', min_size=0, max_size=6),
    st.sampled_from(['UD', 'LR', 'RL', 'DU', 'UDUD', 'UUUUUUUU', '', '[]', 'push up', 'R\U0001f600', '9', 'R2 U1']),
)


@settings(max_examples=150, deadline=None)
@given(
    st.integers(0, 60), st.sampled_from(['plan', 'solo']), st.sampled_from(list(SHAPINGS)), st.lists(texts, max_size=12)
)
def test_any_play_that_returns_to_a_board_earned_nothing_on_the_way(seed, role, shaping, written):
    at = SokobanTeam(board_of(seed), Rules(shaping=SHAPINGS[shaping]), (role,))
    boards, earned, team = [at.board], [0.0], 0.0
    for text in written:
        at, reward = at.act(role, text)
        boards.append(at.board)
        earned.append(earned[-1] + reward.total(1.0))
        team += reward.team
        assert reward.local <= 0
    for i, before in enumerate(boards):
        for j in range(i + 1, len(boards)):
            if boards[j] == before:
                assert earned[j] - earned[i] <= 1e-9
    # the team's rewards telescope: together they are the difference of potential, and 1 for a solution
    rise = SHAPINGS[shaping].potential(boards[-1]) - SHAPINGS[shaping].potential(boards[0])
    assert team == pytest.approx(rise + boards[-1].solved)


@every_shaping
def test_standing_still_bumping_and_nonsense_never_pay(shaping):
    for seed in range(20):
        start = SokobanTeam(board_of(seed), Rules(shaping=shaping))
        for text in ('', '[]', 'gibberish', '3', '\U0001f600', '!', 'x' * 50):
            for role in ROLES:
                after, reward = start.act(role, text)
                assert after.board == start.board and reward.team == 0 and reward.local < 0, (role, text)
        blocked = [letter for letter in sokoban.MOVES if start.board.move(letter) is None]
        for letter in blocked:
            after, reward = start.act('plan', letter * 3)
            assert after.board == start.board
            assert (reward.team, reward.local) == (0, pytest.approx(-3 * 0.05))


def test_every_solved_board_is_worth_nothing_more():
    solved = level(S1).play('RR')[0]
    assert [shaping.potential(solved) for shaping in SHAPINGS.values()] == [0, 0, 0]


def test_no_move_that_spoils_a_board_ever_pays():
    """From every position that can be reached on 40 boards, those far from any solution among them."""
    spoiled = 0
    for seed in range(40):
        seen, stack = {board_of(seed)}, [board_of(seed)]
        while stack:
            board = stack.pop()
            for after in filter(None, map(board.move, sokoban.MOVES)):
                if sokoban.distance(board) is not None and sokoban.distance(after) is None:
                    spoiled += 1
                    assert ORACLE.potential(after) <= ORACLE.potential(board)
                if after not in seen and not after.solved:
                    seen.add(after)
                    stack.append(after)
    assert spoiled > 100


# --- both roles have something to learn


def random_text(draw: random.Random, role: str) -> str:
    longest = 3 if role == 'tool' else 6
    return ''.join(draw.choice(sokoban.MOVES) for _ in range(draw.randint(1, longest)))


@pytest.mark.parametrize('shaping', ['oracle', 'nearness', 'outcome'])
def test_random_answers_of_either_role_earn_different_rewards_on_real_boards(shaping):
    """A tree with K = 8 and a group dead for nearly every board would teach one role nothing."""
    task, draw = SokobanTask(reward=shaping), random.Random(0)
    live = dict.fromkeys(task.team, 0)
    for seed in range(30):
        at = task.train(seed)
        for role in task.team:
            branches = [at.act(role, random_text(draw, role)) for _ in range(8)]
            totals = [reward.total(1.0) for _, reward in branches]
            live[role] += np.ptp(totals) > 1e-9
            at = branches[int(np.argmax(totals))][0]
    assert all(count >= 27 for count in live.values()), live


def test_the_tools_answer_changes_what_the_plan_is_asked():
    prompts = {world(ROOM).act('tool', text)[0].observe('plan') for text in ('U', 'L', 'R', 'D', 'LU')}
    assert len(prompts) == 5


# --- ends


def test_nothing_is_moved_once_the_board_is_solved():
    after, reward = world().act('plan', 'RRLLLLUU')
    assert after.board == level(S1).play('RR')[0] and after.solved
    assert dict(reward.terms)['illegal'] == 0  # the UU after it would have been
    for role in ('plan', 'solo'):
        again, reward = after.act(role, 'L')
        assert again.board == after.board and reward.team == 0
    assert after.act('tool', 'L')[1].team == 0


def test_only_the_oracle_gives_up_a_board_that_cannot_be_solved():
    """S9-like: the box is in a corner. Without an oracle the episode runs on; it is solved for nobody."""
    ends = {name: world(DEAD, shaping=shaping).over for name, shaping in SHAPINGS.items()}
    assert ends == {'oracle': True, 'nearness': False, 'outcome': False}
    assert not any(world(DEAD, shaping=shaping).solved for shaping in SHAPINGS.values())
    for shaping in SHAPINGS.values():
        assert not world(shaping=shaping).over and world().act('plan', 'RR')[0].over


def test_spoiling_a_board_costs_and_ends_with_an_oracle_and_neither_without_one():
    # R pushes the box to the right wall, off the goal's column for ever; URD would have solved it
    text = '#####\n#   #\n#@$ #\n# . #\n#####\n'
    spoilt, reward = world(text).act('plan', 'R')
    assert reward.team == pytest.approx(ORACLE.potential(spoilt.board) + 3 * MOVE) and reward.team < -MOVE
    assert spoilt.over and not spoilt.solved
    spoilt, reward = world(text, shaping=OUTCOME).act('plan', 'R')
    assert reward.team == 0 and not spoilt.over


# --- texts (A29)


HOSTILE = [
    'push up', 'Up', ' u ', 'UP, LEFT', '["R", 3]', '[]', '', 'R' * 10_000, 'R\uff0cL', '\U0001f600', '#9:R',
    'R9999999', '#### R', '\x00', '\n' * 100, '=U:;@11$01', 'T@$', '(' * 5000,
]  # fmt: skip


@every_role
@pytest.mark.parametrize('text', HOSTILE, ids=range(len(HOSTILE)))
def test_every_text_has_a_defined_result_for_every_role(role, text):
    for start in (world(ROOM), world(), world(DEAD, shaping=OUTCOME), world().act('plan', 'RR')[0]):
        after, reward = start.act(role, text)
        assert isinstance(after, SokobanTeam) and reward.is_finite() and reward.local <= 0
        assert after == start.act(role, text)[0] and hash(after) == hash(start.act(role, text)[0])
        assert all(after.observe(one) for one in ROLES)


@pytest.mark.parametrize(
    'text, moves, penalty',
    [
        ('Up', 'U', 0), (' u ', 'U', 0), ('L, DOWN', 'LD', 0), ('L\uff0cD', 'LD', 0),
        ('push up', 'U', 0.1), ('["L", 3]', 'L', 0.1), ('L\U0001f600', 'L', 0.1), ('[]', '', 0.1), ('', '', 0.1),
    ],
)  # fmt: skip
def test_a_plan_is_read_in_every_way_of_writing_and_penalised_for_what_is_not_understood(text, moves, penalty):
    board, illegal = level(ROOM).play(moves)
    after, reward = world(ROOM).act('plan', text)
    assert after.board == board
    assert dict(reward.terms)['format'] == -penalty
    assert dict(reward.terms)['illegal'] == pytest.approx(-0.05 * illegal)


def test_the_caps_on_moves_and_pushes_hold_for_ten_thousand_of_them():
    corridor = '#' * 30 + '\n#@$' + ' ' * 25 + '.#\n' + '#' * 30
    for role in ('plan', 'solo'):
        after, reward = world(corridor, shaping=NEARNESS).act(role, 'R' * 10_000)
        assert after.board == level(corridor).play('R' * 8)[0]
        assert dict(reward.terms)['format'] == -0.1
    shown, reward = world(corridor, shaping=NEARNESS).act('tool', 'R' * 10_000)
    assert shown.program == 'R' * 8 and dict(reward.terms)['format'] == -0.1
    exact = world(corridor, shaping=NEARNESS).act('plan', 'R' * 8)[1]
    assert exact.local == 0


@settings(max_examples=100, deadline=None)
@given(
    st.sampled_from(ROLES),
    st.one_of(
        st.text(max_size=40),
        st.builds(lambda text, times: (text * times)[:10_000], st.text(min_size=1, max_size=8), st.integers(1, 10_000)),
        st.text(alphabet='UDLRudlr0123456789#: ,[]"', max_size=60),
    ),
    st.sampled_from(list(SHAPINGS)),
)
def test_no_text_of_up_to_ten_thousand_characters_raises(role, text, shaping):
    start = world(ROOM, shaping=SHAPINGS[shaping])
    after, reward = start.act(role, text)
    assert reward.is_finite() and reward.local <= 0
    assert start == world(ROOM, shaping=SHAPINGS[shaping])
    assert max(len(after.observe(one)[0].content) for one in ROLES) < 100


def test_a_team_is_a_world():
    assert isinstance(world(), World)
    with pytest.raises(dataclasses.FrozenInstanceError):
        world().board = level(ROOM)


# --- the task: splits and difficulty


def test_training_and_held_out_layouts_never_meet():
    task = SokobanTask()
    trained = {task.train(seed).board.layout_key() for seed in range(150)}
    tested = {
        split: [task.test(split, i).board for i in range(30)] for split in (HELD_OUT, STRICT, FINAL, FINAL_STRICT)
    }
    for split, some in tested.items():
        assert not trained & {board.layout_key() for board in some}
        assert not any(sokoban.layout_fold(board) for board in some)
        assert split not in (STRICT, FINAL_STRICT) or min(board.inner_walls() for board in some) >= 2
    assert len({tuple(some) for some in tested.values()}) == 4


def test_three_of_four_training_boards_are_hard_and_all_are_within_their_spec():
    task = SokobanTask()
    moves = [task.difficulty(task.train(seed)) for seed in range(80)]
    assert all(5 <= m <= 11 for seed, m in enumerate(moves) if seed % 4) and all(2 <= m <= 11 for m in moves)
    assert min(moves[::4]) < 5
    held_out = [task.difficulty(task.test(HELD_OUT, i)) for i in range(40)]
    assert min(held_out) < 5 and all(2 <= m <= 11 for m in held_out)


def test_the_same_place_gives_the_same_board_and_the_random_floor_is_reproducible():
    task = SokobanTask()
    assert [task.train(seed) for seed in range(5)] == [task.train(seed) for seed in range(5)]
    floor = [task.floor(task.test(HELD_OUT, i), 4, i) for i in range(40)]
    assert floor == [task.floor(task.test(HELD_OUT, i), 4, i) for i in range(40)]
    assert 0 < sum(floor) < 40
    near = SokobanTeam(level(S1), task.rules)
    assert not task.floor(near, 0, 1) and task.floor(near, 100, 1)


# --- demonstrations


def demonstrated(task: SokobanTask, seeds: range):
    """(world, demonstrations) of each seed that gives some."""
    for seed in seeds:
        shown = task.demonstrations(seed)
        if shown:
            board = sokoban.generate(seed, task.spec('train'))
            yield SokobanTeam(board, task.rules, task.team), shown


@pytest.mark.parametrize('team', [('tool', 'plan'), ('plan',), ('solo',)])
def test_demonstrations_are_what_a_role_can_be_shown_and_write_without_a_penalty(team):
    task = SokobanTask(team=team)
    found = 0
    for at, shown in demonstrated(task, range(60)):
        if team == ('tool', 'plan') and len(shown) == 1:  # a program that gets stuck: shown to `plan`, which refuses
            continue
        found += 1
        assert [one.role for one in shown] == list(team)
        for one in shown:
            assert one.messages == at.observe(one.role)
            at, reward = at.act(one.role, one.text)
            assert reward.local == 0 and len(one.text) <= task.moves
    assert found > 30


def test_one_program_in_four_gets_stuck_and_is_refused_but_never_imitated():
    shown = [shown for _, shown in demonstrated(SokobanTask(), range(400))]
    refused = [one for one in shown if len(one) == 1]
    assert 0.15 < len(refused) / len(shown) < 0.35
    for (one,) in refused:
        assert (one.role, one.text) == ('plan', '') and '!' in one.messages[0].content
    assert all(
        len(one) == 1 for at in (('plan',), ('solo',)) for _, one in demonstrated(SokobanTask(team=at), range(99))
    )


def test_demonstrations_never_come_from_a_held_out_layout():
    for at, _ in demonstrated(SokobanTask(), range(300)):
        assert sokoban.layout_fold(at.board) != 0


def test_demonstrations_ask_no_solver_and_are_the_same_for_every_reward(monkeypatch):
    wanted = {seed: SokobanTask(reward='oracle').demonstrations(seed) for seed in range(40)}
    boards = {seed: sokoban.generate(seed, SokobanTask().spec('train')) for seed in range(40)}

    def refuse(*_):
        raise AssertionError('a solver was asked')

    monkeypatch.setattr(sokoban, 'generate', lambda seed, spec: boards[seed])
    for name in ('distance', 'solve'):
        monkeypatch.setattr(sokoban, name, refuse)
    assert {seed: SokobanTask(reward='outcome').demonstrations(seed) for seed in range(40)} == wanted
    assert {seed: SokobanTask(reward='nearness').demonstrations(seed) for seed in range(40)} == wanted


def test_demonstrations_are_those_of_a_beginner_who_seldom_solves():
    outcomes = [at.board.play(shown[-1].text)[0].solved for at, shown in demonstrated(SokobanTask(), range(300))]
    assert len(outcomes) > 150 and 0.05 < sum(outcomes) / len(outcomes) < 0.4


def test_potentials_are_finite_on_boards_with_several_boxes():
    task = SokobanTask(size=6, boxes=2, optimal=(2, 20), hard=(2, 20))
    for seed in range(10):
        at = task.train(seed)
        for role in task.team:
            at, reward = at.act(role, 'RULD')
            assert math.isfinite(reward.team)
        assert at.observe('tool')[0].content.count('$') >= 2
