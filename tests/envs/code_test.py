"""The programming team: golden programs solve it, the tester is paid for tests that tell right from wrong."""

import dataclasses
import itertools
import random
import time

import pytest

from mallm.envs.base import FINAL, FINAL_STRICT, HELD_OUT, STRICT, Bounded, World
from mallm.envs.code import CodeTask, CodeTeam, read_tests
from mallm.envs.problems import KINDS, CodeProblem, made_code
from mallm.envs.python_tool import extract_code
from mallm.envs.sandbox import Limits
from tests.envs.scripted import HOSTILE, play

GOLDEN = 'a, b = map(int, input().split())\nprint(a + b)'
TIMES = 'a, b = map(int, input().split())\nprint(a * b)'
PROBLEM = CodeProblem('sum', 'Print the sum of two numbers.', (('2 2\n', '4\n'), ('1 2\n', '3\n')), GOLDEN, (TIMES,))
WORLD = CodeTeam(PROBLEM, limits=Limits(cpu_s=1))


def program(text: str) -> str:
    return f'So:\n```python\n{text}\n```'


def written(*tests: tuple[str, str]) -> str:
    return '\n\n'.join(f'**Test Input:**\n```\n{a}\n```\n**Test Output:**\n```\n{b}\n```' for a, b in tests)


def test_a_world_is_a_hashable_value_and_acting_leaves_it_alone():
    before = dataclasses.astuple(WORLD)
    WORLD.act('coder', program(GOLDEN))[0].act('tester', written(('1 2', '3')))
    assert isinstance(WORLD, World) and hash(WORLD) and dataclasses.astuple(WORLD) == before


@pytest.mark.parametrize(
    'text, team, local',
    [
        (program(GOLDEN), 1.0, 1.0),
        (program(TIMES), 0.5, 0.6),
        (program('print(4)\n1/0'), 0.0, 0.1),
        (program('print('), 0.0, 0.0),
        ('no program', 0.0, 0.0),
        (program("print('all tests passed')\nopen('reward.txt', 'w').write('1')"), 0.0, 0.2),
    ],
)
def test_the_coder_earns_what_the_golden_tests_say(text, team, local):
    after, reward = WORLD.act('coder', text)
    assert (reward.team, reward.local) == pytest.approx((team, local))
    assert after.solved == (team == 1.0)


FORGER = """
import builtins, io, os, sys
for name in ('reward.txt', 'result.json', 'stdout'):
    with open(name, 'w') as file:
        file.write('4\\n')
builtins.open = builtins.print = lambda *given, **more: 4
sys.stdout.write('reward: 1.0\\n4 tests passed\\n')
sys.stdout = io.StringIO('4\\n')
os._exit(0)
"""


def test_a36_a_program_that_forges_results_and_patches_the_interpreter_has_only_what_it_printed():
    after, reward = WORLD.act('coder', program(FORGER))
    assert reward.team == 0.0 and not after.solved
    assert WORLD.act('coder', program(GOLDEN))[1].team == 1.0, 'and the next program is judged as ever'


def test_a_world_says_what_can_be_earned_and_nothing_earns_more():
    assert (WORLD.earns, isinstance(WORLD, Bounded)) == ((0.0, 1.0), True)


def test_how_outputs_are_compared_is_a_setting_of_the_task():
    loose, strict = CodeTask(tolerance=1e-2, tokens=True).train(0), CodeTask().train(0)
    problem = CodeProblem('half', 'Print a third, twice.', (('\n', '0.3333\n0.3333\n'),), None)
    text = program("print('0.33', '0.33')")
    for world, passes in ((loose, 1.0), (strict, 0.0)):
        assert dataclasses.replace(world, problem=problem).act('coder', text)[1].team == passes


@pytest.mark.parametrize(
    'text, local',
    [
        (written(('1 2', '3')), 1.0),
        (written(('2 2', '4')), 0.2),  # true, and every wrong program passes it too
        (written(('1 2', '4')), 0.2),  # false
        (written(('1 2', '3'), ('1 2', '4')), 0.6),
        (written(('1 2', '3'), ('1 2', '3')), 1.0),  # the same one twice counts once
        ('Test: 1 2 gives 3', 0.0),
    ],
)
def test_the_tester_earns_the_share_of_its_tests_that_tell_right_from_wrong(text, local):
    coded, _ = WORLD.act('coder', program(TIMES))
    _, reward = coded.act('tester', text)
    assert (reward.team, reward.local) == pytest.approx((0.5, local))


def test_without_wrong_programs_a_test_that_the_golden_one_passes_is_good():
    world = dataclasses.replace(WORLD, problem=dataclasses.replace(PROBLEM, wrong=()))
    assert world.act('tester', written(('2 2', '4')))[1].local == pytest.approx(1.0)


def test_the_coder_is_shown_what_failed_and_agreement_ends_the_episode_without_being_success():
    coded, _ = WORLD.act('coder', program(TIMES))
    failed, _ = coded.act('tester', written(('1 2', '3')))
    assert not failed.over
    shown = failed.observe('coder')[1].content
    assert all(part in shown for part in ('a * b', '1 2', 'Expected:\n```\n3', 'Printed:\n```\n2'))
    agreed, _ = coded.act('tester', written(('2 2', '4')))
    assert agreed.over and not agreed.solved
    assert not coded.act('tester', 'nothing')[0].over


def test_a_tree_goes_on_until_the_tests_pass_and_is_solved():
    def write(role: str, shown: str, i: int) -> str:
        if role == 'tester':
            return written(('1 2', '3')) if i else written(('1 2', '5'))
        return program(GOLDEN if 'It failed these tests' in shown else TIMES)

    trajectory = play(WORLD, write)
    assert trajectory.fault is None and trajectory.solved and len(trajectory.turns) == 2
    assert [group.chosen for turn in trajectory.turns for group in turn.groups if group.key.role == 'tester'] == [1, 1]


@pytest.mark.parametrize('role', ['coder', 'tester'])
def test_no_text_raises_or_is_paid(role):
    for text in HOSTILE:
        after, reward = WORLD.act(role, text)
        assert reward.is_finite() and reward.team == 0.0 and reward.local <= 0.2 + 1e-9
        assert all(message.content for message in after.observe(role)) and after.render()


def test_a_program_that_never_ends_is_not_run_on_every_test():
    many = dataclasses.replace(PROBLEM, tests=PROBLEM.tests * 50)
    world = dataclasses.replace(WORLD, problem=many, limits=Limits(cpu_s=5, wall_s=0.2))
    started = time.monotonic()
    assert world.act('coder', program('import time\ntime.sleep(99)'))[1].team == 0.0
    assert time.monotonic() - started < 60


def test_every_kind_of_made_task_is_passed_by_its_golden_program_and_failed_by_its_wrong_ones():
    task, seen = CodeTask(), {}
    for seed in range(60):
        world = task.train(seed)
        seen.setdefault(world.problem.name.split('-')[1], world)
    assert len(seen) == len(KINDS)
    for world in seen.values():
        assert world.act('coder', program(world.problem.golden))[1].team == 1.0
        assert all(world.act('coder', program(wrong))[1].team < 1.0 for wrong in world.problem.wrong)


def test_no_two_splits_share_a_task_and_those_held_out_have_all_their_tests():
    task = CodeTask(train_tests=3)
    splits = [{task.test(s, i).problem.question for i in range(50)} for s in (HELD_OUT, STRICT, FINAL, FINAL_STRICT)]
    trained = [task.train(i).problem for i in range(200)]
    splits.append({problem.question for problem in trained})
    assert all(not one & other for one, other in itertools.combinations(splits, 2))
    assert {len(problem.tests) for problem in trained} == {3} and len(task.test(HELD_OUT, 0).problem.tests) == 8


def test_the_last_complete_block_after_the_thoughts_is_the_program():
    draft = '<think>\n```python\nprint(1)\n```\n</think>\n'
    for fence in ('```python', '```py', '```Python3', '```', '~~~', '~~~python'):
        assert extract_code(f'{draft}First\n```python\nprint(0)\n```\n{fence}\nprint(2)\n{fence[:3]}\nDone') in (
            ('print(2)', 'print(0)') if fence in ('```', '~~~') else ('print(2)',)
        )
        assert extract_code(f'{draft}{fence}\nprint(2)\n{fence[:3]}') == 'print(2)'
        assert extract_code(f'{draft}{fence}\nprint(2)') == 'print(2)'
    assert extract_code(draft) is None and extract_code('<think>\n```python\nprint(1)\n```') is None
    assert extract_code('```json\n{}\n```') is None


def test_tests_are_read_in_order_without_repeats_and_not_endlessly():
    assert read_tests(written(('1', '2'), ('1', '2'), ('3', '4'))) == (('1\n', '2\n'), ('3\n', '4\n'))
    assert len(read_tests(written(*[(str(i), '0') for i in range(100)]))) == 4
    assert read_tests(written(('x' * 10000, '1'))) == ()


def test_the_same_draw_makes_the_same_task_and_other_draws_mostly_others():
    assert made_code(random.Random(3)) == made_code(random.Random(3))
    assert len({made_code(random.Random(i)).question for i in range(1000)}) > 900
