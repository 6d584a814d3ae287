"""What a run folder tells again: its experiment, whether it is a given one, and its parameters to the last bit."""

import dataclasses
import json
import pathlib

import jax
import numpy as np
import pytest

from experiments.math_at_grpo import CONFIG as MATH
from experiments.sokoban_at_grpo import CONFIG
from experiments.sudoku_at_grpo import CONFIG as SUDOKU
from mallm.config import describe, override
from mallm.envs.arithmetic import ArithmeticTask
from mallm.envs.crew import CrewTask, crew
from mallm.envs.plan_path_task import PlanPathTask
from mallm.envs.sokoban_task import SokobanTask
from mallm.experiment import Experiment, LearningSettings, ModelSettings, SamplingSettings
from mallm.rollout.engine import RoleSampling
from mallm.stored import Learned, is_of, read_experiment, read_learned, settings_of
from tests.run_folders import TINY, saved, with_adapters

RESULTS = pathlib.Path(__file__).parents[1] / 'experiments' / 'results'
VARIED = Experiment(
    pools={'tool': 'a', 'plan': 'b'},
    model=ModelSettings(mesh=(2, 1, 1)),
    sampling=SamplingSettings(stop=('!', '?'), roles={'tool': RoleSampling(temperature=0.7, stop=('END',))}),
    learning=LearningSettings(pool_rates={'b': (0.0, 0.0)}),
)


def written(folder: pathlib.Path, settings: object) -> pathlib.Path:
    folder.mkdir(exist_ok=True)
    (folder / 'config.json').write_text(json.dumps(settings))
    return folder


CREW = override(
    Experiment(), {'task': CrewTask(crew(3), PlanPathTask(size=8)), 'pools': dict.fromkeys(crew(3), 'shared')}
)


@pytest.mark.parametrize(
    'experiment', [Experiment(), VARIED, CREW, override(Experiment(), {'task': ArithmeticTask()}), SUDOKU, MATH]
)
def test_an_experiment_comes_back_from_its_config_file_as_it_was(experiment, tmp_path):
    read = read_experiment(written(tmp_path, settings_of(experiment)))
    assert read == dataclasses.replace(experiment, wandb='disabled') and type(read.task) is type(experiment.task)
    resumed = settings_of(experiment) | {'earlier': [{'step': 1, 'config': settings_of(MATH), 'summary': None}]}
    assert read_experiment(written(tmp_path, resumed)) == read


@pytest.mark.parametrize('seed', [0, 1, 2])
def test_the_stored_runs_of_the_main_job_are_read_although_they_are_older_than_some_settings(seed):
    read = read_experiment(RESULTS / f'sokoban_at_grpo-seed{seed}')
    assert isinstance(read.task, SokobanTask) and read.seed == seed
    assert read.sampling.k == CONFIG.sampling.k and read.learning == CONFIG.learning


@pytest.mark.parametrize('seed', [1, 2])
def test_a_stored_run_is_still_that_of_its_settings_where_younger_ones_are_at_their_defaults(seed):
    settings = json.loads((RESULTS / f'sokoban_at_grpo-seed{seed}' / 'config.json').read_text())
    assert 'stop' not in settings['sampling'], 'it is older than some settings'
    now = dataclasses.replace(CONFIG, seed=seed)
    assert is_of(settings, now) and is_of(settings, dataclasses.replace(now, runs='elsewhere', wandb='offline'))
    for change in ({'sampling.stop': ('!',)}, {'sampling.k': 4}, {'task.reward': 'outcome'}, {'seed': 7}):
        assert not is_of(settings, override(now, change)), change
    assert not is_of(settings | {'gone': 1}, now) and not is_of(settings | {'task_type': 'Other'}, now)
    assert is_of(settings | {'earlier': [{'config': settings | {'runs': 'elsewhere'}}]}, now)
    assert not is_of(settings | {'earlier': [{'config': settings | {'steps': 7}}]}, now), 'its first steps were others'
    assert not is_of(None, now)


def test_a_config_that_cannot_be_read_is_refused_with_its_reason(tmp_path):
    plain = json.loads(json.dumps(describe(CONFIG)))
    with pytest.raises(FileNotFoundError, match=r'has no config\.json: give the folder of a run'):
        read_experiment(tmp_path)
    with pytest.raises(ValueError, match=r'Experiment has no setting \[.colour.\]: it was written by another version'):
        read_experiment(written(tmp_path, plain | {'colour': 1}))
    with pytest.raises(ValueError, match=r'task Chess, which is not among .*tasks=\{\.\.\.\}'):
        read_experiment(written(tmp_path, plain | {'task_type': 'Chess'}))
    with pytest.raises(ValueError, match='are those of no task'):
        read_experiment(written(tmp_path, plain | {'task': {'pieces': 32}}))
    with pytest.raises(ValueError, match='steps=-1'):
        read_experiment(written(tmp_path, plain | {'steps': -1}))


def same(this: object, that: object) -> None:
    for one, other in zip(jax.tree.leaves(this), jax.tree.leaves(that), strict=True):
        np.testing.assert_array_equal(np.asarray(one), np.asarray(other), strict=True)


@pytest.mark.parametrize('adapts', [False, True], ids=['whole', 'adapters'])
def test_the_parameters_of_every_pool_are_those_that_were_saved_and_the_folder_is_left_alone(adapts, tmp_path):
    folder, run = saved(with_adapters(TINY) if adapts else TINY, tmp_path)
    before = {path: path.stat().st_mtime_ns for path in folder.rglob('*')}
    learned = read_learned(folder)
    assert isinstance(learned, Learned) and (learned.step, learned.name) == (1, 'apart-seed0')
    assert set(learned.pools) == {'left', 'right'} and learned.owns_base == adapts
    for name, pool in run.pools.items():
        same(learned.pools[name], pool.state.params)
    same(learned.base, run.frozen)
    whole = jax.tree.structure(learned.base if adapts else learned.pools['left'])
    assert jax.tree.structure(learned.merged('left')) == whole
    assert {path: path.stat().st_mtime_ns for path in folder.rglob('*')} == before
