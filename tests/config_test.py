"""Settings: overrides that are checked, grids with labels, JSON, and experiments that refuse contradictions."""

import dataclasses
import json
import math

import pytest

from mallm import cli
from mallm.cli import smoke
from mallm.config import describe, grid, override, same
from mallm.envs.sokoban_task import SokobanTask
from mallm.experiment import (
    AlgorithmSettings,
    EvaluationSettings,
    Experiment,
    LearningSettings,
    LoraSettings,
    ModelSettings,
    SamplingSettings,
)
from mallm.learn.pack import Row, every_answer, finished_answers
from mallm.rollout.engine import RoleSampling, SamplingParams, stop_strings
from mallm.train import knobs


def test_a_leaf_is_replaced_by_its_dotted_name_and_the_rest_stays():
    before = Experiment()
    after = override(before, {'sampling.k': 4, 'seed': 3, 'task.reward': 'outcome'})
    assert (after.sampling.k, after.seed, after.task.reward) == (4, 3, 'outcome')
    assert dataclasses.replace(after, sampling=before.sampling, seed=0, task=before.task) == before
    assert (before.sampling.k, before.seed) == (Experiment().sampling.k, 0)


def test_an_axis_of_a_grid_may_change_several_settings_together_under_a_name_of_its_own():
    parallel = {'sampling.mode': 'parallel', 'algorithm.credit': 'team'}
    cells = dict(grid(Experiment(), sampler={'tree': {}, 'parallel': parallel}, seed=[0, 1]))
    assert list(cells) == ['tree,seed=0', 'tree,seed=1', 'parallel,seed=0', 'parallel,seed=1']
    assert cells['tree,seed=0'] == Experiment() and cells['parallel,seed=1'].algorithm.credit == 'team'


def test_stored_settings_are_the_same_where_what_they_lack_is_at_its_default():
    stored = json.loads(json.dumps(describe(Experiment(seed=3))))
    assert same(stored, Experiment(seed=3)) and not same(stored, Experiment(seed=4))
    del stored['sampling']['stop'], stored['pools']
    assert same(stored, Experiment(seed=3))
    assert not same(stored, override(Experiment(seed=3), {'sampling.stop': ('!',)}))
    assert not same(stored | {'colour': 'red'}, Experiment(seed=3)) and not same([], Experiment())


def test_a_role_samples_as_all_do_but_for_what_is_set_for_it_and_evaluation_inherits_no_exploration():
    learner = AlgorithmSettings(old_policy='learner')
    own = RoleSampling(temperature=0.7, top_p=0.9, top_k=20, max_tokens=30, stop=('END',))
    sampling = SamplingSettings(max_tokens=9, stop=('!',), spread=2.0, max_prompt=512, roles={'tool': own})
    evaluation = EvaluationSettings(roles={'plan': RoleSampling(temperature=0.6, top_p=0.95, max_tokens=5)})
    experiment = Experiment(sampling=sampling, algorithm=learner, evaluation=evaluation)
    trained, greedy = experiment.sampler(), experiment.sampler(0.0)
    assert trained.roles['tool'] == SamplingParams(30, 0.7, 2.0, 0.9, 20, ('END',))
    assert trained.roles['plan'] == SamplingParams(9, 1.0, 2.0, stop=('!',))
    assert greedy.roles['tool'] == SamplingParams(30, 0.0, stop=('END',))
    assert greedy.roles['plan'] == SamplingParams(5, 0.6, top_p=0.95, stop=('!',))
    assert trained.max_prompt == greedy.max_prompt == 512
    # what the learner is told of: 0.7 to twice that, over 8 candidates
    assert experiment.temperatures()['tool'] == pytest.approx([0.7 * 2 ** (j / 7) for j in range(8)])
    # the constant divisor takes the longest answer of any role: 3 rows of 2 answers of 30 tokens
    assert experiment.packing().divisor([Row((1,), ((2,), (3,)), ((-1.0,),) * 2, (1.0, -1.0))] * 3) == 3 * 2 * 30


WRITTEN = '</code>, </search>'


@pytest.mark.parametrize(
    'given', [WRITTEN, (WRITTEN,), ('</code>', '</search>'), ['</code>', ' </search>'], '</code>,</search>']
)
def test_two_stop_strings_are_two_however_they_are_written(given):
    """A16: in a config file; the space after the comma belongs to neither. A newline may be a stop string."""
    experiment = override(Experiment(), {'sampling.stop': given, 'sampling.roles': {'tool': RoleSampling(stop=given)}})
    for params in [*experiment.sampler().roles.values(), *experiment.sampler(0.0).roles.values()]:
        assert params.stop == ('</code>', '</search>')
    assert stop_strings('\n, \t;') == ('\n', ';')


def test_the_command_line_sets_stop_strings_and_what_is_one_roles_own(monkeypatch):
    """A16 on the command line, in one argument and in two."""
    arguments = ['--sampling.stop', WRITTEN, '--sampling.roles.plan.stop', '</a>', '</b>, </c>']
    arguments += ['--sampling.roles.tool.max-tokens', '40', '--evaluation.roles.plan.temperature', '0.5']
    monkeypatch.setattr('sys.argv', ['experiment', *arguments])
    asked = []
    monkeypatch.setattr(cli, 'train', lambda experiment, *more: asked.append(experiment))
    monkeypatch.setattr(cli, 'keep_memory', lambda: None)
    cli.main(Experiment(), None)
    (experiment,) = asked
    roles = experiment.sampler().roles
    assert (roles['tool'].stop, roles['plan'].stop) == (('</code>', '</search>'), ('</a>', '</b>', '</c>'))
    assert (roles['tool'].max_tokens, roles['plan'].max_tokens) == (40, Experiment().sampling.max_tokens)
    assert {r: p.temperature for r, p in experiment.sampler(0.0).roles.items()} == {'tool': 0.0, 'plan': 0.5}


def test_the_roles_a_command_line_offers_do_not_stand_in_the_way_of_another_team():
    override(cli.with_roles(Experiment()), {'task.team': ('solo',), 'pools': {'solo': 'a'}})


@pytest.mark.parametrize(
    'name, suggestion',
    [
        ('sampling.tern', "'turns'"),
        ('samplig.k', "'sampling'"),
        ('learning.micro_group', "'micro_groups'"),
        ('stepps', "'steps'"),
    ],
)
def test_an_unknown_name_is_refused_and_the_nearest_one_suggested(name, suggestion):
    """A41."""
    with pytest.raises(ValueError, match=f'{name}: no setting .* did you mean {suggestion}'):
        override(Experiment(), {name: 1})


def test_a_name_like_no_other_is_refused_with_all_that_there_are():
    with pytest.raises(ValueError, match=r"no setting 'zzz' in SamplingSettings; there are .*'temperature'"):
        override(Experiment(), {'sampling.zzz': 1})


@pytest.mark.parametrize('name', ['seed.x', 'pools.tool', 'task.reward.kind'])
def test_a_name_below_a_leaf_is_refused(name):
    with pytest.raises(ValueError, match=f'{name}: .* has no settings of its own'):
        override(Experiment(), {name: 1})


def test_an_override_is_validated_like_a_birth_at_every_level():
    with pytest.raises(ValueError, match='k=1: a group needs at least 2'):
        override(Experiment(), {'sampling.k': 1})
    with pytest.raises(ValueError, match=r"pools=.*must name a pool for each role of the team \('solo',\)"):
        override(Experiment(), {'task.team': ('solo',)})


def test_settings_that_are_valid_only_together_can_be_changed_together():
    changes = {'sampling.mode': 'parallel', 'algorithm.credit': 'team', 'task.team': ('solo',), 'pools': {'solo': 'a'}}
    for some in (changes, dict(reversed(changes.items()))):
        after = override(Experiment(), some)
        assert (after.sampling.mode, after.algorithm.credit, after.pools) == ('parallel', 'team', {'solo': 'a'})


def test_a_grid_is_every_combination_with_a_label_that_says_what_changed():
    laid = dict(grid(Experiment(), sampling__k=[4, 8], seed=[0, 1, 2]))
    assert list(laid) == [f'sampling.k={k},seed={seed}' for k in (4, 8) for seed in (0, 1, 2)]
    assert all(laid[f'sampling.k={k},seed={s}'].sampling.k == k for k in (4, 8) for s in (0, 1, 2))
    assert [one.seed for one in laid.values()] == [0, 1, 2, 0, 1, 2]


def test_a_grid_with_a_wrong_axis_or_value_is_refused():
    with pytest.raises(ValueError, match="did you mean 'sampling'"):
        list(grid(Experiment(), sampler__k=[4]))
    with pytest.raises(ValueError, match='k=0'):
        list(grid(Experiment(), sampling__k=[4, 0]))


def test_a_described_experiment_is_json_and_says_every_leaf():
    told = describe(Experiment())
    assert json.loads(json.dumps(told)) == told
    assert told['sampling']['k'] == Experiment().sampling.k
    assert told['task']['team'] == ['tool', 'plan']
    assert told['pools'] == {'tool': 'shared', 'plan': 'shared'}
    assert set(told) == {field.name for field in dataclasses.fields(Experiment)}


CONTRADICTIONS = [
    (lambda: Experiment(pools={'tool': 'a'}), r"pools=.*must name a pool for each role of the team \('tool', 'plan'\)"),
    (lambda: Experiment(pools={'tool': 'a', 'plan': 'a', 'solo': 'b'}), 'and for no other'),
    (lambda: Experiment(task=SokobanTask(team=('solo',))), r"each role of the team \('solo',\)"),
    (lambda: Experiment(sampling=SamplingSettings(mode='parallel')), "'agent_turn' goes with sampling.mode='tree'"),
    (lambda: Experiment(algorithm=AlgorithmSettings(credit='team')), "the others with 'parallel'"),
    (lambda: Experiment(algorithm=AlgorithmSettings(credit='parallel_agent_turn')), "the others with 'parallel'"),
    (
        lambda: Experiment(
            model=ModelSettings(mesh=(2, 2, 1)), learning=LearningSettings(step_groups=6, micro_groups=6)
        ),
        r'micro_groups=6: must be a multiple of data \* fsdp = 4',
    ),
    (lambda: LearningSettings(step_groups=10, micro_groups=4), 'make step_groups a multiple'),
    (lambda: LearningSettings(rate=(1e-3, -1e-3)), 'learning rates are 0 or positive'),
    (lambda: LearningSettings(pool_rates={'a': (1e-3, -1.0)}), 'a=.*: learning rates are 0 or positive'),
    (lambda: Experiment(learning=LearningSettings(pool_rates={'tool': (0, 0)})), r"may name the pools \['shared'\]"),
    (lambda: Experiment(learning=LearningSettings(pool_rates={'shared': (0, 0)})), 'freezes every pool; leave one'),
    (lambda: LoraSettings(rank=-1), 'lora.rank=-1: must be 0 .all parameters are trained. or positive'),
    (lambda: LoraSettings(rank=4, targets=('qkv',)), r"unknown: \['qkv'\]"),
    (lambda: SamplingSettings(temperature=0.0), 'training explores'),
    (lambda: SamplingSettings(turns=0), 'at least one turn'),
    (lambda: AlgorithmSettings(clip_low=1.0), 'between 0 and 1'),
    (lambda: AlgorithmSettings(truncate=0.5), 'use 2'),
    (lambda: AlgorithmSettings(kl=-0.1), '0 .off. or positive'),
    (lambda: SamplingSettings(max_prompt=-1), '0 .no limit. or a number of tokens'),
    (lambda: SamplingSettings(stop=('a', '')), 'an empty stop string'),
    (lambda: SamplingSettings(roles={'plan': RoleSampling(temperature=0.0)}), r'roles.plan.temperature.*explores'),
    (lambda: RoleSampling(top_p=1.5), r'top_p=1.5: must be in \(0, 1\]'),
    (lambda: RoleSampling(stop=('a,,b',)), 'an empty stop string'),
    (
        lambda: Experiment(sampling=SamplingSettings(roles={'coder': RoleSampling(top_k=1)})),
        r"sampling.roles=\['coder'\]: names roles that are not of the team",
    ),
    (
        lambda: Experiment(evaluation=EvaluationSettings(roles={'coder': RoleSampling(top_k=1)})),
        r"evaluation.roles=\['coder'\]",
    ),
    (
        lambda: Experiment(sampling=SamplingSettings(roles={'plan': RoleSampling(top_p=0.9)})),
        "old_policy='sampler': with top_p or top_k in training .* set it to 'learner'",
    ),
    (lambda: SokobanTask(team=('tool',)), 'a tool needs a plan to act'),
    (lambda: SokobanTask(team=('coder',)), "roles are 'tool', 'plan' and 'solo'"),
    (lambda: SokobanTask(team=()), 'roles are'),
]


@pytest.mark.parametrize('make, reason', CONTRADICTIONS)
def test_settings_that_contradict_each_other_or_the_method_are_refused_at_birth(make, reason):
    with pytest.raises(ValueError, match=reason):
        make()


def test_the_same_settings_are_accepted_once_they_agree():
    Experiment(sampling=SamplingSettings(mode='parallel'), algorithm=AlgorithmSettings(credit='team'))
    Experiment(task=SokobanTask(team=('solo',)), pools={'solo': 'a'})
    made = Experiment(
        model=ModelSettings(mesh=(2, 2, 1)), learning=LearningSettings(step_groups=8, micro_groups=4)
    ).packing()
    assert (made.step_groups, made.micro_groups) == (8, 4)


def test_the_longest_answer_has_room_for_a_whole_turn_of_the_shipped_task():
    """A40: the default length fits the task; an answer is at most one token a move."""
    experiment = Experiment()
    assert experiment.sampling.max_tokens >= max(experiment.task.moves, experiment.task.pushes)
    assert experiment.sampler().roles['plan'].max_tokens == experiment.sampling.max_tokens


def test_names_in_the_settings_become_the_functions_they_stand_for():
    sampler = Experiment(sampling=SamplingSettings(choose='first', temperature=0.9)).sampler()
    assert (sampler.choose.__name__, sampler.roles['tool'].temperature) == ('first', 0.9)
    assert not sampler.roles['plan'].truncates
    assert Experiment().sampler(temperature=0.0).roles['plan'].temperature == 0.0
    assert Experiment(algorithm=AlgorithmSettings(truncated='mask')).keep() is finished_answers
    assert Experiment().keep() is every_answer
    algorithm = AlgorithmSettings(schedule_period=2).build()
    assert [algorithm.schedule(step, ('a', 'b')) for step in range(5)] == [('a',), ('a',), ('b',), ('b',), ('a',)]
    assert AlgorithmSettings().build().schedule(3, ('a', 'b')) == ('a', 'b')


def test_each_pool_may_have_a_learning_rate_of_its_own_and_a_frozen_one_has_no_learners():
    pools = {'tool': 'a', 'plan': 'b'}
    half = Experiment(pools=pools, learning=LearningSettings(rate=(4.0, 2.0), warmup=0, pool_rates={'b': (1.0, 0.0)}))
    told = [(knobs(half, 0, done, pool).learning_rate) for pool in 'ab' for done in (0.0, 0.5)]
    assert told == [4.0, 3.0, 1.0, 0.5]
    assert half.learners == ('tool', 'plan')
    frozen = dataclasses.replace(half, learning=LearningSettings(pool_rates={'a': (0.0, 0.0)}))
    assert frozen.learners == ('plan',)


@pytest.mark.parametrize(
    'changes, said',
    [
        ({'algorithm.clip_high': math.inf, 'sampling.temperature': math.inf}, 'sampling.temperature, algorithm.clip'),
        ({'learning.rate': (math.inf, 1e-3)}, r'learning.rate.0=inf'),
        ({'cpu_minutes': -1.0}, 'cpu_minutes=-1.0'),
        ({'warm_start.cpu_minutes': -1.0}, 'warm_start.cpu_minutes=-1.0'),
    ],
)
def test_budgets_are_not_negative_and_numbers_are_finite_or_config_json_could_not_hold_them(changes, said):
    with pytest.raises(ValueError, match=said):
        override(Experiment(), changes)


def test_a_smoke_run_fits_the_mesh_it_is_given():
    experiment = override(Experiment(), {'model.mesh': (1, 16, 1), 'learning.micro_groups': 32})
    tiny = smoke(experiment)
    assert tiny.model.mesh == (1, 16, 1) and tiny.learning.micro_groups == 16 == tiny.learning.step_groups
