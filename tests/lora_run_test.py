"""The main job with an adapter for each role: its base is cloned, frozen, saved once; a cut run ends like a whole."""

import dataclasses
import json
import pathlib
from typing import Any

import jax
import numpy as np
import pytest

from mallm import run as parts
from mallm import train
from mallm.experiment import (
    AlgorithmSettings,
    EvaluationSettings,
    Experiment,
    LearningSettings,
    LoraSettings,
    ModelSettings,
    SamplingSettings,
    WarmStartSettings,
)
from mallm.io.checkpoint import Checkpoints
from mallm.pipeline import Rollouts

EXPERIMENT = Experiment(
    name='adapters',
    steps=3,
    pools={'tool': 'left', 'plan': 'right'},
    model=ModelSettings(
        width=16, layers=1, heads=2, kv_heads=1, head_dim=8, ffn=32, remat=False, lora=LoraSettings(rank=4, rs=True)
    ),
    sampling=SamplingSettings(envs=4, k=4, turns=1, max_tokens=4),
    algorithm=AlgorithmSettings(kl=0.01, old_policy='learner'),
    learning=LearningSettings(step_groups=0, micro_groups=8, rate=(1e-2, 1e-3), pool_rates={'right': (0.0, 0.0)}),
    warm_start=WarmStartSettings(steps=1, rows=8),
    evaluation=EvaluationSettings(every=0, report_boards=2, replays=1),
    save_every=1,
    wandb='disabled',
)


class CutError(Exception):
    """The run is over in the middle of a step."""


@pytest.fixture(scope='module')
def runs(tmp_path_factory: pytest.TempPathFactory) -> tuple[dict[str, Any], dict[str, Any], pathlib.Path, pathlib.Path]:
    """Summary and folder of a whole run, and of one that is cut in step 2 and resumed."""
    whole, cut = (dataclasses.replace(EXPERIMENT, runs=str(tmp_path_factory.mktemp(name))) for name in ('whole', 'cut'))
    step = train.train_step

    def until_2(run: parts.Run, at: int, done: float, rollouts: Rollouts) -> int:
        if at == 2:
            raise CutError
        return step(run, at, done, rollouts)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(train, 'write_report', lambda folder: None)  # its pictures cost seconds and are tested elsewhere
        summary = train.train(whole)
        patch.setattr(train, 'train_step', until_2)
        with pytest.raises(CutError):
            train.train(cut)
        patch.setattr(train, 'train_step', step)
        resumed = train.train(cut, cut.folder_name)
    return summary, resumed, *(pathlib.Path(one.runs) / one.folder_name for one in (whole, cut))


@pytest.fixture(scope='module')
def read(runs, tmp_path_factory) -> list[parts.Run]:
    """A run that was just born, and both runs as read back from their folders."""
    *_, whole, cut = runs
    built = parts.build(EXPERIMENT, tmp_path_factory.mktemp('read') / 'run', None)
    built.sink.close()
    read = [built]
    for folder in (whole, cut):
        pools = {name: type(pool)(name, pool.state) for name, pool in built.pools.items()}
        base = type(built.base)('base', built.base.state)
        run = dataclasses.replace(built, pools=pools, base=base, checkpoints=Checkpoints(folder), folder=folder)
        assert parts.restore(run, 3)[0] == 3
        read.append(run)
    return read


def test_a_run_that_was_cut_and_resumed_ends_bit_for_bit_like_a_whole_one(runs, read):
    summary, resumed, *_ = runs
    volatile = {'minutes', 'cpu_minutes', 'training_cpu_minutes', 'peak_rss_mib'}
    assert {k: v for k, v in resumed.items() if k not in volatile} == {
        k: v for k, v in summary.items() if k not in volatile
    }
    trees = [(run.frozen, {name: pool.state for name, pool in run.pools.items()}) for run in read[1:]]
    leaves = [jax.tree.leaves(tree) for tree in trees]
    assert len(leaves[0]) > 60
    for one, other in zip(*leaves, strict=True):
        np.testing.assert_array_equal(one, other)


def test_a_frozen_pool_plays_and_stays_as_it_was_born_while_the_other_learns(runs, read):
    learned, frozen = (read[1].pools[name].state for name in ('left', 'right'))
    steps = [json.loads(line) for line in (runs[2] / 'metrics.jsonl').read_text().splitlines()]
    assert 'reward/plan' in next(row for row in steps if row['axis'] == 'rollout')
    assert {row['axis'] for row in steps if row['axis'].startswith('update')} == {'update/left'}
    assert int(frozen.updates) == 0 < int(learned.updates)
    for state, moved in ((learned, True), (frozen, False)):
        assert all(bool(np.any(pair['b'])) == moved for pair in state.params['blocks'].values())
        assert not any(np.any(pair['b']) for pair in state.reference['blocks'].values()), 'KL is to the bare base'
    assert not any(np.any(leaf) for leaf in jax.tree.leaves(frozen.moments))


def test_the_base_learned_from_both_roles_and_is_saved_once_beside_checkpoints_that_hold_adapters_alone(runs, read):
    folder = runs[2]
    seals = sorted((folder / 'checkpoints').glob('*/seal.json'))
    assert len(seals) == 3
    arrays = json.loads(seals[-1].read_text())['arrays']
    assert not any('embedding' in name for name in arrays)
    assert arrays['left/params/blocks/q/a'] == 'float32[1, 16, 4]'
    assert [path.parent.name for path in (folder / 'base').rglob('seal.json')] == ['00000000']
    born, ended, _ = read
    blocks = (run.frozen['blocks'].values() for run in (born, ended))
    assert not any(np.array_equal(before, after) for before, after in zip(*blocks, strict=True))


def test_no_step_is_missed_or_done_twice_and_each_has_the_learning_rate_of_the_whole_run(runs, read):
    """A23. Rates rise over 4 steps and fall from 1e-2 to 1e-3: 1/4 of 0.010, 2/4 of 0.007, 3/4 of 0.004."""
    told = []
    for folder, run in zip(runs[2:], read[1:], strict=True):
        rows = [json.loads(line) for line in (folder / 'metrics.jsonl').read_text().splitlines()]
        assert [row['step'] for row in rows if row['axis'] == 'rollout'] == [0, 1, 2]
        updates = [row for row in rows if row['axis'] == 'update/left']
        told.append([(row['step'], row['optimiser_steps'], row['learning_rate']) for row in updates])
        state = run.pools['left'].state
        assert int(state.moments[1].count) == int(state.updates) == sum(steps for _, steps, _ in told[-1])
    assert told[0] == told[1]
    assert [rate for *_, rate in told[0]] == pytest.approx([[0.0025, 0.0035, 0.003][step] for step, *_ in told[0]])
