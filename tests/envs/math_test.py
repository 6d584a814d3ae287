"""The mathematics team: hand-written answers solve it, rewards are the paper's, agreement is no success."""

import dataclasses

import pytest

from experiments import code_at_grpo, math_at_grpo
from mallm.cli import smoke
from mallm.envs import grading
from mallm.envs.base import FINAL, FINAL_STRICT, HELD_OUT, STRICT, World
from mallm.envs.math import MathTask, MathTeam
from mallm.envs.problems import MathProblem
from mallm.envs.sandbox import Limits, Sandbox, SandboxError
from tests.envs.scripted import HOSTILE, play

QUICK = Limits(cpu_s=1)
WORLD = MathTeam(MathProblem('p', 'What is one half plus one third?', r'\frac{5}{6}'), limits=QUICK)
RIGHT = 'Exact:\n```python\nfrom fractions import Fraction as F\nprint(F(1, 2) + F(1, 3))\n```'
WRONG = '```python\nprint(1)\n```'
BOX, WRONG_BOX = r'It is \boxed{\frac{5}{6}}.', r'\boxed{1}'


def test_a_world_is_a_hashable_value_and_acting_leaves_it_alone():
    before = dataclasses.astuple(WORLD)
    WORLD.act('tool', RIGHT)
    assert isinstance(WORLD, World) and hash(WORLD) and dataclasses.astuple(WORLD) == before


@pytest.mark.parametrize(
    'role, text, team, local',
    [
        ('tool', RIGHT, 1.0, 1.0),
        ('tool', WRONG, 0.0, 0.2),
        ('tool', '```python\n1/0\n```', 0.0, 0.1),
        ('tool', '```python\nprint(\n```', 0.0, 0.0),
        ('tool', 'I do not know', 0.0, 0.0),
        ('reason', BOX, 1.0, 1.0),
        ('reason', WRONG_BOX, 0.0, 0.2),
        ('reason', '5/6', 0.0, 0.0),
        ('solo', RIGHT, 1.0, 1.0),
    ],
)
def test_a_role_earns_what_the_paper_says(role, text, team, local):
    _, reward = dataclasses.replace(WORLD, order=('solo',) if role == 'solo' else WORLD.order).act(role, text)
    assert (reward.team, reward.local) == pytest.approx((team, local))
    shares = {name: value for name, value in reward.terms if name not in ('solved', 'ungraded')}
    assert sum(shares.values()) == pytest.approx(local)


def test_the_reasoner_sees_the_output_of_this_turn_and_the_tool_the_history_of_both():
    after, _ = WORLD.act('tool', RIGHT)
    assert '5/6' in after.observe('reason')[1].content and '5/6' not in after.observe('tool')[1].content
    later, _ = after.act('reason', WRONG_BOX)
    assert all(said in later.observe('tool')[1].content for said in ('5/6', 'Answer: 1', 'Turn 1'))
    assert r'\frac{5}{6}' not in later.observe('tool')[1].content


def test_agreement_ends_the_episode_and_is_no_success():
    agreed, _ = WORLD.act('tool', WRONG)[0].act('reason', WRONG_BOX)
    assert agreed.over and not agreed.solved
    disagreed, _ = WORLD.act('tool', WRONG)[0].act('reason', BOX)
    assert not disagreed.over and disagreed.solved
    spoiled, _ = disagreed.act('tool', WRONG)[0].act('reason', WRONG_BOX)
    assert spoiled.over and not spoiled.solved


def test_one_agent_alone_is_done_when_it_repeats_itself():
    for team, text in ((('reason',), BOX), (('solo',), RIGHT)):
        once, _ = dataclasses.replace(WORLD, order=team).act(team[0], text)
        twice, _ = once.act(team[0], text)
        assert (once.over, twice.over, twice.solved) == (False, True, True)


def test_a_tree_picks_the_right_answers_and_is_solved_in_one_turn():
    texts = {'tool': (WRONG, RIGHT), 'reason': (WRONG_BOX, BOX)}
    trajectory = play(WORLD, lambda role, shown, i: texts[role][i])
    assert trajectory.fault is None and trajectory.solved and len(trajectory.turns) == 1
    assert [group.chosen for group in trajectory.turns[0].groups] == [1, 1]


@pytest.mark.parametrize('role', ['tool', 'reason', 'solo'])
def test_no_text_raises_or_is_paid(role):
    world = dataclasses.replace(WORLD, order=('solo',) if role == 'solo' else WORLD.order)
    for text in HOSTILE:
        after, reward = world.act(role, text)
        assert reward.is_finite() and reward.team == 0.0 and reward.local <= 0.2 + 1e-9
        assert all(message.content for message in after.observe(role)) and after.render()


def test_made_problems_have_the_answers_they_say_and_no_two_splits_share_one():
    task = MathTask()
    made = {
        split: {task.test(split, i).problem for i in range(40)} for split in (HELD_OUT, STRICT, FINAL, FINAL_STRICT)
    }
    made['train'] = {task.train(i).problem for i in range(200)}
    texts = [problem.question for split in made.values() for problem in split]
    assert len(texts) == len(set(texts)) and task.train(7) == task.train(7)
    for problem in made['train']:
        if problem.question.startswith('Solve'):
            a, b, c = (int(part) for part in problem.question.replace('x', '').split() if part.rstrip('.').isdigit())
            top, _, bottom = problem.answer.removeprefix(r'\frac{').rstrip('}').partition('}{')
            assert a * int(top) == (c - b) * int(bottom or 1)


def test_the_grader_needs_the_walls_that_the_task_requires(monkeypatch):
    weak = Sandbox(workers=1, strong=False)
    monkeypatch.setattr(grading, 'verifiers', lambda pid: weak)
    asked = MathTask(require_isolation=True).world(MathProblem('p', 'How long?', r'\sqrt{2}'), training=True)
    with pytest.raises(SandboxError, match='isolation was asked for'):
        asked.act('reason', r'\boxed{\sqrt{3}+1}')
    with pytest.raises(SandboxError, match='isolation was asked for'):
        MathTask(require_isolation=True).about()
    weak.close()


def test_a_team_that_does_not_exist_is_refused():
    with pytest.raises(ValueError, match="team=\\('tool',\\)"):
        MathTask(team=('tool',))


def test_the_experiments_are_valid_settings_for_their_teams_and_stay_so_when_made_small():
    for config in (math_at_grpo.CONFIG, code_at_grpo.CONFIG):
        small = smoke(config)
        assert small.task == config.task and set(small.pools) == set(small.task.team)
        assert not small.warm_start.steps and config.model.lora.rank
