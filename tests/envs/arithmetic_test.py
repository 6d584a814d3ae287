"""Word problems: the calculator takes any text, splits stay apart, and each role is paid for being right alone."""

import fractions
import re

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mallm.envs.arithmetic import NAMES, THINGS, ArithmeticTask, ArithmeticTeam, calculate, number_in
from mallm.envs.base import FINAL, FINAL_STRICT, HELD_OUT, STRICT, World
from mallm.experiment import Experiment


@pytest.mark.parametrize(
    ('text', 'value'),
    [
        ('12 + 3 * 24', 84), ('(2+3)*4', 20), ('7 - 2 - 1', 4), ('8 / 4 / 2', 1), ('3 × 4', 12), ('6 x 7', 42),
        ('9 ÷ 2', fractions.Fraction(9, 2)), (' 5 ', 5), ('2 + 2 = 5', 4), ('((3))', 3),
        ('', None), ('=', None), ('2 +', None), ('(2 + 3', None), ('2 3', None), ('1 / 0', None), ('2 ** 3', None),
        ('-3', None), ('__import__("os")', None), ('٣ + 1', None), ('9' * 10, None), ('(' * 64, None),
        ('1+' * 40, None),
    ],
)  # fmt: skip
def test_the_calculator_knows_precedence_brackets_and_what_is_no_calculation(text, value):
    assert calculate(text) == value


@settings(max_examples=300, deadline=None)
@given(st.text(alphabet='0123456789+-*/()=x .', max_size=80) | st.text(max_size=80))
def test_no_text_breaks_the_calculator_or_a_role(text):
    assert calculate(text) is None or isinstance(calculate(text), fractions.Fraction)
    world = ArithmeticTask().train(1)
    after, reward = world.act('tool', text)
    assert reward.is_finite() and not after.over
    done, reward = after.act('plan', text)
    assert reward.is_finite() and done.over and isinstance(done.render(), str)
    assert all(isinstance(message.content, str) for message in after.observe('plan'))


@settings(max_examples=100, deadline=None)
@given(st.integers(0, 99), st.integers(0, 99), st.integers(1, 99), st.sampled_from('+-*/'), st.sampled_from('+-*/'))
def test_the_calculator_agrees_with_exact_arithmetic(a, b, c, first, second):
    text = f'{a} {first} ({b} {second} {c})'
    try:
        wanted = eval(f'F({a}) {first} (F({b}) {second} F({c}))', {'F': fractions.Fraction})
    except ZeroDivisionError:
        wanted = None
    assert calculate(text) == wanted


def test_an_answer_is_its_last_number_and_clean_when_that_is_all():
    assert number_in('84') == number_in(' 84.\n') == (84, True)
    assert number_in('The answer is 1,084.') == (1084, False)
    assert number_in('12 + 3 = 15') == (15, False) and number_in('none') == (None, False)


def test_the_last_number_of_a_long_answer_counts_and_one_that_is_cut_through_does_not():
    assert number_in('7 ' * 500 + 'and so it is 84') == (84, False)
    assert number_in('1234' + ' ' * 254) == (None, False)  # the last 256 characters begin with 34
    assert number_in('9' * 10_000)[0] is None


def test_each_role_is_paid_for_being_right_itself():
    world = ArithmeticTask().train(3)
    target = world.target
    wrote, reward = world.act('tool', world.calculation)
    assert (reward.team, reward.local) == (1, 0)
    assert f'{world.calculation} = {target}' in wrote.observe('plan')[-1].content
    assert wrote.act('plan', str(target))[1].total(1) == 1 and wrote.act('plan', str(target))[0].solved
    assert world.act('tool', f'{world.calculation} = 0')[1].local < 0  # right, with words that nobody asked for
    lost, reward = wrote.act('plan', str(target + 1))
    assert reward.team == 0 and lost.over and not lost.solved
    blind, _ = world.act('tool', 'I cannot')
    assert 'error' in blind.observe('plan')[-1].content
    assert blind.act('plan', str(target))[0].solved  # a wrong tool does not stop a plan that knows better
    assert world.act('plan', '')[1].total(1) < 0


def test_what_is_asked_is_never_shown():
    for seed in range(50):
        world = ArithmeticTask().train(seed)
        said = ' '.join(message.content for role in world.order for message in world.observe(role))
        assert world.calculation not in said and isinstance(world, World) and hash(world) == hash(world)


def test_held_out_stories_are_never_trained_on_and_strict_wordings_are_new():
    task = ArithmeticTask()
    trained = {task.train(seed).calculation + task.train(seed).story.split()[2] for seed in range(3000)}
    story = lambda world: world.calculation + world.story.split()[2]  # noqa: E731
    for split in (HELD_OUT, FINAL):
        assert not trained & {story(task.test(split, i)) for i in range(300)}
    free = re.compile('|'.join([r'\d+', *NAMES, *THINGS]))
    wording = lambda world: free.sub('_', world.story)  # noqa: E731
    known = {wording(task.train(seed)) for seed in range(500)}
    for split in (STRICT, FINAL_STRICT):
        assert not known & {wording(task.test(split, i)) for i in range(50)}
    assert known >= {wording(task.test(HELD_OUT, i)) for i in range(50)}
    assert task.test(FINAL, 5) == task.test(FINAL, 5) != task.test(HELD_OUT, 5)
    assert {task.difficulty(task.test(HELD_OUT, i)) for i in range(60)} == {1, 2}


def test_every_story_has_one_whole_answer_that_is_not_negative():
    for seed in range(500):
        for story in (ArithmeticTask().train(seed), ArithmeticTask().test(STRICT, seed)):
            target = story.target
            assert target is not None and target.denominator == 1 and target >= 0


def test_demonstrations_are_right_and_cost_nothing():
    for team in (('tool', 'plan'), ('plan',)):
        task = ArithmeticTask(team=team)
        world = task.train(9)
        for shown in task.demonstrations(9):
            assert shown.messages == world.observe(shown.role)
            world, reward = world.act(shown.role, shown.text)
            assert reward.total(1) == 1
        assert world.solved


def test_bad_settings_are_refused():
    with pytest.raises(ValueError, match='solo'):
        ArithmeticTask(team=('solo',))
    with pytest.raises(ValueError, match='largest=3'):
        ArithmeticTask(largest=3)
    assert Experiment(task=ArithmeticTask()).task.team == ('tool', 'plan')


def test_a_plan_that_does_not_know_is_not_paid_for_what_the_calculator_said():
    r"""A08: gold 12. What the plan was shown holds the answer; only what it wrote itself is judged."""
    wrote, _ = ArithmeticTeam('Ann buys 3 boxes with 4 eggs in each. How many?', '3 * 4').act('tool', '3 * 4')
    assert wrote.observe('plan')[-1].content.endswith('3 * 4 = 12')
    after, reward = wrote.act('plan', 'I do not know')
    assert reward.team == 0 and reward.total(1) <= 0 and not after.solved
    assert wrote.act('plan', r'\boxed{12}')[1].team == 1
