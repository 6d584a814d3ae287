"""Crews: the game is the same, later tools see what stands and may replace it, and letting it stand pays its worth."""

import dataclasses

import pytest

from mallm.envs import sandbox
from mallm.envs.base import FINAL, Waits, World
from mallm.envs.crew import CrewTask, CrewWorld, crew
from mallm.envs.plan_path_task import PlanPathTask
from mallm.envs.sokoban_task import SokobanTask
from mallm.envs.sudoku_task import SudokuTask

TASK = CrewTask(crew(4))


def test_a_crew_of_n_agents_is_n_minus_one_tools_and_a_plan():
    assert crew(2) == ('tool', 'plan') and crew(4) == ('tool', 'tool2', 'tool3', 'plan')
    world = TASK.train(3)
    assert isinstance(world, World) and world.order == crew(4) and hash(world) == hash(TASK.train(3))


def test_a_crew_of_two_plays_the_game_itself():
    game, two = SokobanTask().test(FINAL, 1), CrewTask(crew(2)).test(FINAL, 1)
    for role, text in (('tool', 'UR'), ('plan', 'LLU'), ('tool', 'x'), ('plan', '')):
        assert two.observe(role) == game.observe(role) and two.render() == game.render()
        (game, own), (two, crews) = game.act(role, text), two.act(role, text)
        assert own == crews and two.game == game and (two.solved, two.over) == (game.solved, game.over)


def test_a_later_tool_sees_what_the_plan_would_see_behind_its_number_and_its_program_takes_the_others_place():
    world, _ = TASK.test(FINAL, 2).act('tool', 'U')
    (shown,), (plan,) = world.observe('tool3'), world.observe('plan')
    assert shown.content == '3' + plan.content
    after, reward = world.act('tool2', 'D')
    fresh, alone = TASK.test(FINAL, 2).act('tool', 'D')
    assert after == fresh and reward == alone and after.observe('plan') != world.observe('plan')
    assert world.act('tool2', 'D') == (after, reward), 'acting leaves the world it acted on alone'


def test_writing_nothing_lets_the_program_stand_for_what_it_earned_and_the_first_tool_cannot():
    world, earned = TASK.test(FINAL, 2).act('tool', 'U')
    assert world.act('tool2', ' \n') == (world, earned)
    played, _ = world.act('plan', 'U')
    assert played.earned.total(1.0) == 0 and TASK.test(FINAL, 2).act('tool', '')[1].local < 0


@pytest.mark.parametrize('text', ['', 'U\uff0cL', '\U0001f600', 'U' * 10_000])
def test_no_text_that_a_model_can_write_raises(text):
    world = TASK.test(FINAL, 0)
    for role in crew(4):
        world, reward = world.act(role, text)
        assert isinstance(world, CrewWorld) and reward.is_finite()


def test_demonstrations_are_those_of_the_game_with_later_tools_that_let_the_program_stand_or_write_it_again():
    texts, roles = set(), set()
    for seed in range(40):
        told = TASK.demonstrations(seed)
        assert [d for d in told if d.role in ('tool', 'plan')] == SokobanTask().demonstrations(seed)
        first = next((d.text for d in told if d.role == 'tool'), None)
        later = [d for d in told if d.role in ('tool2', 'tool3')]
        assert not later or (first is not None and {d.text for d in later} <= {'', first})
        texts |= {d.text == '' for d in later}
        roles |= {d.role for d in later}
    assert texts == {True, False} and roles == {'tool2', 'tool3'}


def test_a_team_in_another_order_or_a_game_without_a_tool_is_refused():
    with pytest.raises(ValueError, match=r"team=\('plan', 'tool'\): a crew is"):
        CrewTask(('plan', 'tool'))
    with pytest.raises(ValueError, match=r"game\.team=\('solo',\): a crew plays"):
        CrewTask(game=SokobanTask(team=('solo',)))
    with pytest.raises(ValueError, match='agents=1'):
        crew(1)
    assert dataclasses.replace(TASK, team=crew(7)).train(1).order == crew(7)


def test_results_of_a_crew_are_labelled_with_the_reward_of_its_game():
    kinds = ('oracle', 'nearness', 'outcome')
    assert tuple(CrewTask(game=SokobanTask(reward=kind)).rewarded for kind in kinds) == kinds
    assert SokobanTask().rewarded == 'oracle'


def test_a_game_whose_tool_writes_programs_says_at_the_start_which_walls_stand():
    assert SokobanTask().about() == CrewTask().about() == ()
    assert SokobanTask(style='text').about() == (str(sandbox.shared().walls),)


@pytest.mark.parametrize('task', [SokobanTask, PlanPathTask, SudokuTask])
def test_candidates_are_acted_out_beside_each_other_where_the_tool_writes_programs_and_nowhere_else(task):
    for style, waits in (('compact', False), ('text', True)):
        world = task(style=style).train(0)
        assert isinstance(world, Waits) and world.waits is waits
