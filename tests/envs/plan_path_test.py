"""Plan-Path: exact ways, maps one can walk, a route language without surprises, and roles that need each other."""

import dataclasses
import random
import re

import pytest

from mallm.envs import plan_path
from mallm.envs.base import FINAL_STRICT, HELD_OUT, STRICT
from mallm.envs.games import keeps
from mallm.envs.plan_path import GenerationError, Maze, MazeSpec, distance, follow, generate, parse_route
from mallm.envs.plan_path_prose import speech
from mallm.envs.plan_path_task import PlanPathTask, beginner, said
from mallm.envs.plan_path_team import NEARNESS, ORACLE, PlanPathTeam, Rules
from mallm.envs.shaping import OUTCOME
from tests.envs.scripted import Printed

HALL = '@  \n## \n.  '
"""Right, right, down, down, left, left."""


def maze(text: str) -> Maze:
    rows = text.split('\n')
    cells = ''.join(rows)
    return Maze(len(rows), sum(1 << i for i, c in enumerate(cells) if c == '#'), cells.index('.'), cells.index('@'))


def team(text: str = HALL, *, order=('tool', 'plan'), **rules) -> PlanPathTeam:
    return PlanPathTeam(maze(text), Rules(**rules), order)


# --- maps


def test_distances_are_those_of_a_search_that_knows_no_tables():
    for seed in range(30):
        at = generate(seed, MazeSpec())
        reached, moves = {at.at}, 0
        while at.goal not in reached:
            reached |= {
                after.at for cell in reached for x in 'UDLR' if (after := dataclasses.replace(at, at=cell).move(x))
            }
            moves += 1
        assert distance(at) == moves >= plan_path.city_block(at) >= 1
    assert distance(maze('@#\n#.')) is None and distance(maze(HALL)) == 6


def test_maps_have_the_papers_density_and_a_way_from_start_to_another_cell():
    made = [generate(seed, MazeSpec(layouts='train')) for seed in range(150)]
    assert all(m.at != m.goal and not m.walls >> m.at & 1 and not m.walls >> m.goal & 1 for m in made)
    density = sum(m.walls.bit_count() for m in made) / 15_000
    assert 0.19 < density < 0.24 and 6.5 < sum(map(distance, made)) / 150 < 9
    assert made == [generate(seed, MazeSpec(layouts='train')) for seed in range(150)]


def test_a_turned_or_mirrored_map_has_the_same_fold_and_another_start_too():
    at = generate(5, MazeSpec())
    rows = [at.render().split('\n')[i].replace('@', ' ') for i in range(10)]
    turned = [''.join(row[::-1][i] for row in rows) for i in range(10)]
    for other in (turned, rows[::-1], [row[::-1] for row in rows], [''.join(r) for r in zip(*rows, strict=True)]):
        text = '\n'.join(other)
        same = maze(text.replace(' ', '@', 1))
        assert same.layout_key() == at.layout_key() and plan_path.layout_fold(same) == plan_path.layout_fold(at)
    assert dataclasses.replace(at, goal=at.at, at=at.goal).layout_key() != at.layout_key()


@pytest.mark.parametrize('spec', [MazeSpec(size=2, optimal=(9, 9)), MazeSpec(size=2, walls=0.99), MazeSpec(detour=99)])
def test_a_map_that_cannot_be_is_refused_within_its_tries(spec):
    with pytest.raises(GenerationError, match='200 tries'):
        generate(0, dataclasses.replace(spec, tries=200))
    with pytest.raises(ValueError, match=r'walls=1\.5'):
        MazeSpec(walls=1.5)


def test_strict_maps_force_a_way_round():
    task = PlanPathTask()
    for split in (STRICT, FINAL_STRICT):
        for i in range(8):
            at = task.test(split, i).maze
            assert distance(at) >= plan_path.city_block(at) + 2 and plan_path.layout_fold(at) == int(
                split == FINAL_STRICT
            )
    straight = [task.test(HELD_OUT, i).maze for i in range(30)]
    assert any(distance(at) == plan_path.city_block(at) for at in straight)


# --- routes


@pytest.mark.parametrize(
    ('text', 'moves', 'stuck', 'clean'),
    [
        ('R', 'RR', False, True), ('R2D2L2', 'RRDDLL', False, True), ('RDL', 'RRDDLL', False, True),
        ('R1', 'R', False, True), ('R3', 'RR', True, True), ('D', '', True, True), ('RDLUUU', 'RRDDLL', False, True),
        ('right 1', 'R', False, True), ('r1, R1;D', 'RRDD', False, True), ('R0', '', False, True),
        ('R!', 'RR', False, False), ('', '', False, False), ('go R', 'RR', False, False), ('3', '', False, False),
        ('R99999999999', 'RR', True, True),
    ],
)  # fmt: skip
def test_a_route_walks_its_legs_until_a_wall_or_the_goal(text, moves, stuck, clean):
    route = parse_route(text)
    trial = follow(maze(HALL), route.legs)
    assert (trial.moves, trial.stuck) == (moves, stuck)
    assert (bool(route.legs) and not route.garbage) == clean
    assert trial.end == plan_path.play(maze(HALL), moves)[0]


def test_ten_thousand_legs_are_cut():
    route = parse_route('R' * 10_000)
    assert len(route.legs) == plan_path.LEG_CAP and route.truncated
    assert team().act('tool', 'RDL' * 5000)[1].local < 0


# --- the team


def test_what_the_roles_are_shown_by_hand():
    told = team().observe('tool')[0].content
    assert told == 'T0@  1## 2.  @00U0D0L0R2.D2R0'
    shown, _ = team().act('tool', 'R2')
    assert shown.observe('plan')[0].content == 'P0@  1## 2.  @00U0D0L0R2.D2R0=R2;@02:RR,,,,,,'
    stuck, _ = team().act('tool', 'R3')
    assert '=R3!@02:RR,' in stuck.observe('plan')[0].content
    long, _ = team(moves=3).act('tool', 'RDL')
    assert '=RDL~@20:RRD' in long.observe('plan')[0].content


def test_the_prompt_shows_where_the_walker_is_now_and_where_turns_began():
    at = team().act('tool', 'R1')[0].act('plan', 'R')[0]
    assert at.observe('tool')[0].content == 'T0 @ 1## 2.  ?00@01U0D0L1R1.D2L1'
    assert at.draft is None and at.maze.at == 1


def test_the_tool_learns_which_routes_failed_here_until_somebody_moves():
    at = team().act('tool', 'D')[0].act('plan', '')[0]
    at = at.act('tool', 'R1U')[0].act('plan', '')[0]
    assert at.observe('tool')[0].content.endswith('.D2R0!D!R1U')
    assert '!' not in at.act('plan', 'R')[0].observe('tool')[0].content


def test_rewards_by_hand():
    one = 1 / 16  # the oracle's pay for one move nearer, of 6
    after, reward = team().act('tool', 'R2')
    assert (reward.team, reward.local) == (pytest.approx(2 * one), 0) and after.maze == maze(HALL)
    after, reward = team().act('plan', 'RRDDLL')
    assert (reward.team, reward.local) == (pytest.approx(1 + 6 * one), 0) and after.solved
    after, reward = team().act('plan', 'RLRLU')  # circles and a bump
    assert reward.team == 0 and reward.local == pytest.approx(-0.05)
    pays = [team(shaping=shaping).act('plan', 'RR')[1].team for shaping in (ORACLE, NEARNESS, OUTCOME)]
    assert pays == [pytest.approx(2 * one), pytest.approx(-2 * one), 0]


def test_refusing_a_stuck_route_is_free_and_nothing_else_is():
    for route, words, local in [('D', '', 0.0), ('D', ' \n', 0.0), ('R', '', -0.1), ('D', 'x', -0.1)]:
        after, reward = team().act('tool', route)[0].act('plan', words)
        assert (reward.team, reward.local) == (0, pytest.approx(local)) and after.maze == maze(HALL)
    assert team(order=('plan',)).act('plan', '')[1].local == pytest.approx(-0.1)


def test_running_out_of_moves_is_not_success_and_the_cap_holds():
    after, reward = team(moves=5).act('plan', 'RRDDLL')
    assert not after.solved and not after.over and dict(reward.terms)['format'] == -0.1
    assert after.act('plan', 'L')[0].solved


def test_one_agent_that_holds_the_tool_walks_at_once():
    after, reward = team(order=('solo',)).act('solo', 'RDL')
    assert after.solved and reward.team > 1
    after, _ = team(order=('solo',), moves=2).act('solo', 'RDL')
    assert after.maze.at == 2


@pytest.mark.parametrize('reward', ['oracle', 'nearness'])
def test_random_answers_of_either_role_earn_different_rewards(reward):
    task, draw = PlanPathTask(reward=reward), random.Random(0)
    live = dict.fromkeys(task.team, 0)
    for seed in range(30):
        at = task.train(seed)
        for role in task.team:
            branches = [at.act(role, ''.join(draw.choices('UDLR', k=3))) for _ in range(8)]
            totals = [earned.total(1.0) for _, earned in branches]
            live[role] += max(totals) - min(totals) > 1e-9
            at = branches[totals.index(max(totals))][0]
    assert min(live.values()) >= 27, live


# --- the beginner


def test_a_beginner_is_weak_and_follows_the_rules():
    task = PlanPathTask()
    solved = 0
    for index in range(60):
        at = task.test(HELD_OUT, index)
        for turn in range(4):
            for role, text in said(at, task, random.Random(4 * index + turn)).items():
                at, reward = at.act(role, text)
                assert dict(reward.terms).get('format', 0) == 0 and dict(reward.terms).get('illegal', 0) == 0
            if at.over:
                break
        solved += at.solved
    assert 0.05 < solved / 60 < 0.5


@pytest.mark.parametrize('team', [('tool', 'plan'), ('plan',), ('solo',)])
def test_in_hindsight_what_a_beginner_wrote_leads_to_the_goal_of_a_training_map(team):
    blind, right = (PlanPathTask(team=team, hindsight=share) for share in (0.0, 1.0))
    reached = []
    for seed in range(200):
        before, after = beginner(seed, blind), beginner(seed, right)
        if not after or not after[-1].text:
            continue
        assert [(d.role, d.text) for d in before] == [(d.role, d.text) for d in after], 'only the map is another'
        shown = maze('\n'.join(re.findall(r'\d([ #.@]{10})', after[-1].messages[0].content)[:10]))
        assert keeps('train', plan_path.layout_fold(shown))
        legs = parse_route(after[-1].text).legs
        moves = follow(shown, legs).moves if team == ('solo',) else after[-1].text
        reached.append(plan_path.play(shown, moves)[0].solved and not plan_path.play(shown, moves[:-1])[0].solved)
    assert all(reached) and len(reached) > 60


# --- words


def test_in_words_the_tools_program_gets_the_map_and_its_list_is_tried_on_a_copy():
    seen = []

    def python(answer: str, stdin: str) -> Printed:
        seen.append((answer, stdin))
        return Printed('searching\n**Actions List**: ["R", "R", "D"]')

    at = dataclasses.replace(team(), speech=speech(python))
    after, reward = at.act('tool', 'any program')
    assert seen == [('any program', HALL + '\n')] and after.maze == at.maze
    assert reward.team == pytest.approx(3 / 16) and reward.local == 0
    told = after.observe('plan')[1].content
    assert HALL in told and 'row 0, column 0' in told and 'Its moves: RRD' in told and 'row 1, column 2' in told
    done, reward = after.act('plan', 'We walk U first? No.\n#### ["R", "R", "D", "D", "L", "L"]')
    assert done.solved and reward.local == 0
    assert dict(after.act('plan', 'Up, up and away')[1].terms)['format'] < 0  # no answer line, no moves
    assert after.act('plan', 'Up, up and away')[0].maze == at.maze


@pytest.mark.parametrize('printed', ['', 'error', '**Actions List**: nothing', '**Actions List**: __import__("os")'])
def test_a_program_that_lists_nothing_costs_and_moves_nobody(printed):
    at = dataclasses.replace(team(), speech=speech(lambda answer, stdin: Printed(printed)))
    after, reward = at.act('tool', 'x')
    assert reward.team == 0 and reward.local < 0 and after.draft.trial.moves == ''
    failing = dataclasses.replace(team(), speech=speech(lambda answer, stdin: Printed('["R"]', ok=False)))
    assert failing.act('tool', 'x')[0].draft.trial.moves == ''


def test_the_tool_of_the_task_runs_python_in_the_sandbox():
    task = PlanPathTask(style='text', size=4)
    at = task.train(2)
    program = 'import sys\nrows = sys.stdin.read().split("\\n")\nprint("**Actions List**:", ["U"] * len(rows[0]))'
    after, _ = at.act('tool', f'Here it is.\n```python\n{program}\n```')
    assert after.draft.program == 'UUUU' and "['U', 'U', 'U', 'U']" in after.observe('plan')[1].content
    assert after == at.act('tool', f'Here it is.\n```python\n{program}\n```')[0]
