"""The main job as a user runs it: from the command line, killed, resumed, and on its own data."""

import contextlib
import json
import pathlib
import shlex
import signal
import subprocess
import sys
import time
import types

import numpy as np
import pytest

from mallm import train
from mallm.envs import base
from mallm.envs.sokoban_task import SokobanTask
from mallm.experiment import EvaluationSettings, Experiment
from mallm.io.checkpoint import Checkpoints
from mallm.io.log import Silent
from mallm.rollout.workers import WorkersLostError
from tests.run_folders import measured

ROOT = pathlib.Path(__file__).parents[1]
TINY = shlex.split(
    '--model.width 32 --model.layers 1 --model.heads 2 --model.kv-heads 1 --model.head-dim 16 --model.ffn 32 '
    '--sampling.envs 4 --sampling.k 4 --sampling.turns 2 --learning.step-groups 8 --learning.micro-groups 8 '
    '--warm-start.steps 2 --warm-start.rows 8 --evaluation.every 0 --evaluation.report-boards 4 '
    '--evaluation.replays 1 --save-every 1 --wandb disabled --steps 10'
)


def command(runs: pathlib.Path, *extra: str) -> list[str]:
    return [sys.executable, '-m', 'experiments.sokoban_at_grpo', *TINY, '--runs', str(runs), *extra]


def run(runs: pathlib.Path, *extra: str) -> dict:
    """Runs the main job to its end; returns the JSON line that it prints last."""
    done = subprocess.run(command(runs, *extra), cwd=ROOT, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-2000:]
    return json.loads(done.stdout.strip().splitlines()[-1])


def saved_arrays(folder: pathlib.Path) -> dict[str, np.ndarray]:
    """Every array of the newest checkpoint, by its place in the file tree of a fresh restore."""
    from mallm.experiment import Experiment, ModelSettings
    from mallm.run import build, restore

    settings = ModelSettings(width=32, layers=1, heads=2, kv_heads=1, head_dim=16, ffn=32)
    built = build(Experiment(model=settings, wandb='disabled'), folder.with_name(folder.name + '-read'), None)
    at = Checkpoints(folder).latest()
    assert at is not None
    import dataclasses

    state, _ = restore(dataclasses.replace(built, checkpoints=Checkpoints(folder)), at)
    import jax

    leaves = jax.tree_util.tree_leaves_with_path(built.pools['shared'].state)
    assert state == at
    return {jax.tree_util.keystr(path): np.asarray(leaf) for path, leaf in leaves}


@pytest.fixture(scope='module')
def straight(tmp_path_factory: pytest.TempPathFactory) -> tuple[pathlib.Path, dict]:
    runs = tmp_path_factory.mktemp('straight')
    return runs / 'sokoban_at_grpo-seed0', run(runs)


def test_the_last_line_on_stdout_is_the_summary_that_is_also_stored(straight):
    folder, summary = straight
    assert summary == json.loads((folder / 'summary.json').read_text())
    wanted = {'run', 'seed', 'commit', 'minutes', 'cpu_minutes', 'success_before', 'success_after', 'strict_before',
              'strict_after', 'random_mover', 'success_before_t1', 'strict_after_t1', 'words'}  # fmt: skip
    assert wanted | {'strict_before_t1', 'success_after_t1'} <= summary.keys() and summary['reward'] == 'oracle'
    rows = [json.loads(line) for line in (folder / 'metrics.jsonl').read_text().splitlines()]
    steps = [row['step_tokens'] for row in rows if row['axis'] == 'rollout']
    assert summary['training_tokens'] == sum(steps) > 0, 'and evaluation is not counted'
    assert 50 < summary['peak_rss_mib'] < 100_000
    assert (folder / 'report.html').stat().st_size > 10_000
    assert (folder / 'curves.png').stat().st_size > 1_000


def test_a_killed_and_resumed_run_ends_bit_for_bit_like_a_straight_one(straight, tmp_path):
    """A22, A23: weights, moments, counts, and every row of the metrics: rates, rewards and losses step by step."""
    folder, summary = straight
    child = subprocess.Popen(command(tmp_path), cwd=ROOT, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    cut = tmp_path / folder.name
    fifth = cut / 'checkpoints' / '00000005'
    deadline = time.monotonic() + 240
    while not (fifth / 'seal.json').exists() and child.poll() is None and time.monotonic() < deadline:
        time.sleep(0.01)
    child.send_signal(signal.SIGKILL)
    child.wait()
    stopped_at = Checkpoints(cut).latest()
    assert stopped_at is not None and 5 <= stopped_at < 10, 'the run was not cut in its middle'

    resumed = run(tmp_path, '--resume', folder.name)

    volatile = {'minutes', 'cpu_minutes', 'training_cpu_minutes', 'peak_rss_mib'}
    assert {k: v for k, v in resumed.items() if k not in volatile} == {
        k: v for k, v in summary.items() if k not in volatile
    }
    one, other = saved_arrays(folder), saved_arrays(cut)
    assert one.keys() == other.keys()
    for name in one:
        np.testing.assert_array_equal(one[name], other[name], err_msg=name)
    steps = [row['step'] for row in measured(cut) if row['axis'] == 'rollout']
    assert steps == list(range(10)), 'no step twice, none missed'
    assert measured(cut) == measured(folder)
    updates = [row for row in measured(cut) if row['axis'] == 'update/shared']
    assert len(updates) == 10 and {'loss', 'learning_rate'} <= updates[0].keys()


@pytest.mark.parametrize('ends_at, saves', [(7, [5, 7]), (10, [5, 10]), (0, [])])
def test_whichever_budget_ends_a_run_what_is_reported_is_what_is_kept(ends_at, saves, monkeypatch, tmp_path):
    """The processor time is used up after `ends_at` steps; every fifth is saved in any case, step 0 by `begin`."""
    seen = []
    stub = types.SimpleNamespace(sink=Silent(), close=lambda: None)
    monkeypatch.setattr(train, 'build', lambda *given: stub)
    monkeypatch.setattr(train, 'begin', lambda run, code: (0, {'training_cpu_minutes': 0.0, 'training_tokens': 0}))
    monkeypatch.setattr(train, 'first_report', lambda run, progress: {})
    monkeypatch.setattr(train, 'overlapped', lambda run, play: contextlib.nullcontext())
    monkeypatch.setattr(train, 'train_step', lambda run, step, done, rollouts: 3)
    monkeypatch.setattr(train, 'share_done', lambda experiment, step, progress: float(step >= ends_at))
    monkeypatch.setattr(train, 'save', lambda run, step, progress: seen.append((step, progress['training_tokens'])))
    monkeypatch.setattr(train, 'report', lambda run, when, step: {'step': step})
    monkeypatch.setattr(train, 'summarise', lambda experiment, progress, after, **_: after)
    monkeypatch.setattr(train, 'write_report', lambda folder: None)
    evaluation = EvaluationSettings(every=0)
    told = train.train(Experiment(runs=str(tmp_path), save_every=5, cpu_minutes=1.0, evaluation=evaluation))
    assert seen == [(step, 3 * step) for step in saves] and told == {'step': ends_at}


@pytest.mark.parametrize('fault', [train.TooManyFaultsError, WorkersLostError])
def test_what_was_learned_before_play_failed_is_saved_once(fault, monkeypatch):
    saves = []
    checkpoints = types.SimpleNamespace(latest=lambda: max(saves, default=None))
    monkeypatch.setattr(train, 'save', lambda run, step, progress: saves.append(step))
    for _ in range(2):
        with pytest.raises(fault), train.saved_where_play_fails(types.SimpleNamespace(checkpoints=checkpoints), 3, {}):
            raise fault
    assert saves == [3]


def test_resuming_what_is_not_there_says_what_is(tmp_path):
    (tmp_path / 'another-seed1').mkdir()
    done = subprocess.run(
        command(tmp_path, '--resume', 'no-such-run'), cwd=ROOT, capture_output=True, text=True, timeout=120
    )
    assert done.returncode != 0
    assert 'no-such-run' in done.stderr and 'another-seed1' in done.stderr


def test_a_run_is_not_resumed_with_another_seed_and_keeps_its_files(straight):
    folder, _ = straight
    before = {name: (folder / name).read_bytes() for name in ('config.json', 'summary.json')}
    told = subprocess.run(
        command(folder.parent, '--resume', folder.name, '--seed', '1'), cwd=ROOT, capture_output=True, text=True,
        timeout=120,
    )  # fmt: skip
    assert told.returncode != 0 and 'was begun with seed 0; resume it with --seed 0' in told.stderr
    assert before == {name: (folder / name).read_bytes() for name in before}


def test_a_setting_that_does_not_exist_is_refused_with_the_nearest_one(tmp_path):
    done = subprocess.run(
        command(tmp_path, '--sampling.tempperature', '2'), cwd=ROOT, capture_output=True, text=True, timeout=120
    )
    assert done.returncode != 0
    assert 'temperature' in done.stdout + done.stderr


def test_training_and_held_out_boards_never_share_a_layout_and_strict_boards_have_walls():
    task = SokobanTask()
    trained = {task.train(seed).board.layout_key() for seed in range(400)}
    splits = (base.HELD_OUT, base.STRICT, base.FINAL, base.FINAL_STRICT)
    tested = {split: [task.test(split, i).board for i in range(60)] for split in splits}
    for boards in tested.values():
        assert not trained & {board.layout_key() for board in boards}
    for split in (base.STRICT, base.FINAL_STRICT):
        assert min(board.inner_walls() for board in tested[split]) >= 2
    assert tested[base.HELD_OUT] != tested[base.FINAL]
