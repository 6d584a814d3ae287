"""Sokoban of other sizes and box counts, and in words: the same task, made, shown and paid as the small one is."""

import dataclasses
import random
import time

import pytest

from mallm.envs import sokoban
from mallm.envs.base import HELD_OUT
from mallm.envs.sokoban_prose import speech
from mallm.envs.sokoban_task import SokobanTask
from mallm.envs.sokoban_team import ORACLE, SokobanTeam
from mallm.rollout.chat import TinyTokenizer
from tests.envs.scripted import Printed

SIZES = {
    '7x7 with 2 boxes': SokobanTask(size=7, boxes=2, optimal=(2, 25), hard=(5, 25)),
    '8x8 with 2 boxes': SokobanTask(size=8, boxes=2, optimal=(4, 30), hard=(8, 30)),
    '8x8 with 1 box': SokobanTask(size=8, optimal=(2, 25), hard=(5, 25)),
    '10x10 with 1 box': SokobanTask(size=10, optimal=(2, 30), hard=(5, 30)),
}
every_size = pytest.mark.parametrize('task', SIZES.values(), ids=SIZES)


@every_size
def test_other_boards_are_solvable_within_their_spec_and_can_be_shown_and_demonstrated(task):
    tokenizer, shown = TinyTokenizer(), []
    for at in [task.train(seed) for seed in range(3)] + [task.test(HELD_OUT, 0)]:
        assert at.board.boxes.bit_count() == at.board.goals.bit_count() == task.boxes
        assert task.optimal[0] <= task.difficulty(at) <= task.optimal[1]
        assert at.board.play(sokoban.solve(at.board))[0].solved
        for role in at.order:
            assert len(tokenizer.chat(at.observe(role))) < 130
            at, _ = at.act(role, 'UDL')
    for seed in range(6):
        shown += task.demonstrations(seed)
    assert shown and all(tokenizer.chat(one.messages) and len(one.text) <= 8 for one in shown)


def test_training_boards_are_made_many_a_second():
    start = time.process_time()
    for seed in range(20):
        SIZES['7x7 with 2 boxes'].train(seed)
    assert time.process_time() - start < 20  # about half a second on an idle core


@every_size
def test_the_oracle_sees_beyond_sixteen_moves_where_boards_are_larger(task):
    """A board of 20 moves is worth less than one of 19, or there would be nothing to learn from on it."""
    far = next(at for at in map(task.train, range(200)) if task.difficulty(at) > 14)
    moves = sokoban.solve(far.board)
    worth = [far.rules.shaping.potential(far.board.play(moves[:done])[0]) for done in range(len(moves) + 1)]
    assert worth == sorted(set(worth)) and worth[-1] == 0
    assert worth[1] - worth[0] == pytest.approx(1 / 16)


def test_the_small_task_pays_as_it_always_did():
    assert SokobanTask().rules.shaping == ORACLE and ORACLE.potential.reach == 16
    assert SokobanTask() == SokobanTask(style='compact')


# --- words


def in_words(printed: str, seed: int = 1) -> SokobanTeam:
    at = SokobanTask(style='text').train(seed)
    return dataclasses.replace(at, speech=speech(lambda answer, stdin: Printed(printed.replace('{board}', stdin))))


def test_in_words_a_program_that_solves_the_board_is_paid_and_shown_and_moves_nothing():
    moves = sokoban.solve(in_words('').board)
    at = in_words(f'**Actions List**: {list(moves)}')
    after, reward = at.act('tool', 'x')
    assert after.board == at.board and reward.team > 1 and reward.local == 0
    told = after.observe('plan')[1].content
    assert at.board.render() in told and f'Its moves: {moves}' in told
    done, reward = after.act('plan', f'I follow the program.\n#### {list(moves)}')
    assert done.solved and reward.team > 1 and reward.local == 0 and done.told == ''
    solo = dataclasses.replace(at, order=('solo',)).act('solo', 'x')[0]
    assert solo.solved


def test_in_words_the_program_reads_the_board_and_a_list_that_fails_is_remembered():
    at = in_words('{board}**Actions List**: ["U", "U", "U", "U", "U", "U"]')
    after, reward = at.act('tool', 'x')
    assert at.board.render() in after.told and after.execution.stuck == 'U' and reward.local == pytest.approx(-0.1)
    refused, reward = after.act('plan', '')
    assert reward.local == 0 and 'last move cannot be done from here: ' in refused.observe('tool')[1].content


def test_in_words_a_list_is_only_said_to_fail_where_its_last_move_really_cannot_be_done():
    """Random answers beside random programs: the plan walks off, follows, or does something else."""
    draw, told = random.Random(5), 0
    for seed in range(40):
        at = in_words(f'**Actions List**: {draw.choices(sokoban.MOVES, k=3)}', seed)
        for _ in range(4):
            if at.over:
                break
            at = at.act('tool', 'x')[0].act('plan', f'#### {draw.choices(sokoban.MOVES, k=draw.randint(1, 2))}')[0]
            for listed in filter(None, at.failed.split('!')):
                before, blocked = at.board.play(listed[:-1])
                assert not blocked and before.move(listed[-1]) is None
                told += 1
    assert told > 10


def test_in_words_an_answer_without_a_list_is_no_move():
    at = in_words('')
    for text in ('Up, then left, and so on', 'I cannot', '####'):
        after, reward = at.act('plan', text)
        assert after.board == at.board and reward.local < 0
