"""What overlap goes together with, and what it refuses at birth with value, rule and remedy."""

import dataclasses

import pytest

from mallm.cli import smoke
from mallm.experiment import AlgorithmSettings, Experiment, LearningSettings, ModelSettings
from mallm.overlap import OverlapSettings

AHEAD, EARLY = OverlapSettings(staleness=1), OverlapSettings(early=True)
CORRECTED = AlgorithmSettings(old_policy='learner')
ONE_STEP = LearningSettings(step_groups=0)


def test_by_default_playing_and_learning_take_turns():
    assert Experiment().overlap == OverlapSettings(0, False) and not Experiment().overlap.on


def test_what_goes_together_is_taken():
    assert Experiment(overlap=AHEAD, algorithm=CORRECTED).overlap.on
    assert Experiment(overlap=EARLY, learning=ONE_STEP).overlap.on
    assert Experiment(overlap=AHEAD, algorithm=CORRECTED, learning=ONE_STEP).overlap.on


def test_the_smallest_form_of_an_experiment_overlaps_as_the_experiment_does():
    assert smoke(Experiment(overlap=EARLY, learning=ONE_STEP)).overlap == EARLY
    assert smoke(Experiment(overlap=AHEAD, algorithm=CORRECTED)).learning.step_groups == 8


@pytest.mark.parametrize(
    'settings, said',
    [
        ({'overlap': AHEAD}, r"algorithm.old_policy='sampler': .*set it to 'learner'"),
        ({'overlap': AHEAD, 'algorithm': CORRECTED, 'save_every': 1}, 'save_every=1: nothing is played ahead .* use 2'),
        ({'overlap': EARLY}, 'learning.step_groups=64: .* with overlap.early use 0'),
        (
            {'overlap': EARLY, 'learning': ONE_STEP, 'model': ModelSettings(mesh=(2, 1, 1))},
            r'model.mesh=\(2, 1, 1\): .* use \(1, 1, 1\)',
        ),
        (
            {'overlap': AHEAD, 'algorithm': CORRECTED, 'model': ModelSettings(mesh=(1, 2, 1))},
            r'model.mesh=\(1, 2, 1\): .* use \(1, 1, 1\)',
        ),
    ],
)
def test_an_experiment_refuses_an_overlap_that_would_be_unsound_or_do_nothing(settings, said):
    with pytest.raises(ValueError, match=said):
        Experiment(**settings)


def test_settings_refuse_contradictions():
    with pytest.raises(ValueError, match=r'overlap.staleness=-1: must be 0 .in turn. or a number of updates'):
        OverlapSettings(staleness=-1)
    with pytest.raises(ValueError, match=r'overlap.early=True: .* set it to False, or overlap.staleness to 0'):
        OverlapSettings(staleness=1, early=True)


@pytest.mark.parametrize('settings, name', [(AHEAD, 'overlap.staleness=1'), (EARLY, 'overlap.early=True')])
def test_several_processes_are_refused_before_anything_is_built(settings, name):
    with pytest.raises(ValueError, match=f'{name}: goes with one process, and this run has 2: start one'):
        settings.check_processes(2)
    settings.check_processes(1)
    dataclasses.replace(settings, staleness=0, early=False).check_processes(2)
