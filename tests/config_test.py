"""Settings: overrides that are checked, grids with labels, JSON, and experiments that refuse contradictions."""

import dataclasses
import json

import pytest

from mallm.config import describe, grid, override
from mallm.envs.sokoban_task import SokobanTask
from mallm.experiment import (
    AlgorithmSettings,
    Experiment,
    LearningSettings,
    LoraSettings,
    ModelSettings,
    SamplingSettings,
)
from mallm.train import knobs


def test_a_leaf_is_replaced_by_its_dotted_name_and_the_rest_stays():
    before = Experiment()
    after = override(before, {'sampling.k': 4, 'seed': 3, 'task.reward': 'outcome'})
    assert (after.sampling.k, after.seed, after.task.reward) == (4, 3, 'outcome')
    assert dataclasses.replace(after, sampling=before.sampling, seed=0, task=before.task) == before
    assert (before.sampling.k, before.seed) == (Experiment().sampling.k, 0)


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
