"""Several real processes: they train what one trains, and when one falls out the others end and say where (A37)."""

import functools
import json
import pathlib
import re
import shlex
import signal
import socket
import subprocess
import sys
import time

import jax
import numpy as np
import pytest

from experiments.sokoban_at_grpo import CONFIG
from mallm import cli, hosts, run, train
from mallm.experiment import Experiment
from mallm.guard import FOLDER, GIVEN_UP, Guard
from mallm.hosts import Hosts
from mallm.io import wandb_run
from mallm.stored import read_learned
from tests.hosts_program import trained
from tests.run_folders import measured

ROOT = pathlib.Path(__file__).parents[1]


def start(folder: pathlib.Path, what: str) -> list[subprocess.Popen]:
    """Two processes of one device each."""
    with socket.socket() as free:
        free.bind(('127.0.0.1', 0))
        port = str(free.getsockname()[1])
    processes = []
    for index in range(2):
        command = [sys.executable, '-m', 'tests.hosts_program', str(folder), what, port, '2', str(index)]
        with (folder / f'{index}.err').open('w') as errors:
            processes.append(subprocess.Popen(command, cwd=ROOT, stderr=errors))
    return processes


def step_of(folder: pathlib.Path, host: int) -> int:
    try:
        return json.loads((folder / FOLDER / f'{host}.json').read_text())['step']
    except FileNotFoundError:
        return -1


def await_text(path: pathlib.Path, pattern: str, seconds: float = 60) -> None:
    deadline = time.monotonic() + seconds
    while not re.search(pattern, path.read_text()):
        assert time.monotonic() < deadline, path.read_text()
        time.sleep(0.2)


def end(processes: list[subprocess.Popen]) -> None:
    for process in processes:
        process.kill()
        process.wait()


def test_two_processes_train_the_same_parameters_as_one(tmp_path):
    """Groups split over the processes, then heads and vocabulary; the whole batch reaches both."""
    processes = start(tmp_path, 'learn')
    wanted = trained((1, 1, 1))
    try:
        codes = [process.wait(timeout=600) for process in processes]
    finally:
        end(processes)
    assert codes == [0, 0], (tmp_path / '0.err').read_text()[-2000:]
    for shape in ((2, 1, 1), (1, 1, 2)):
        found = np.load(tmp_path / f'{shape}.npz')
        assert set(found) == set(wanted)
        for name, value in wanted.items():
            np.testing.assert_allclose(found[name], value, atol=2e-5, rtol=1e-4, err_msg=f'{shape} {name}')


@pytest.mark.parametrize(
    'what, host, sent, said',
    [
        ('kill', 1, signal.SIGKILL, r"host 1 \(.+\), step \d+, stage '\w+': no sign of life"),
        ('kill the coordinator', 0, signal.SIGKILL, r"host 0 \(.+\), step \d+, stage '\w+': no sign of life"),
        ('stop', 1, signal.SIGSTOP, r"host 1 \(.+\), step \d+, stage '\w+': no sign of life"),
        ('stall', 1, None, r"host 1 \(.+\), step 3, stage 'play': still there after"),
        ('raise', 1, None, r"host 1 \(.+\), step 3, stage 'play': ArithmeticError: the reward of env 5 broke"),
    ],
)
def test_a_run_ends_soon_and_names_host_and_step_when_one_process_has_to(what, host, sent, said, tmp_path):
    processes = start(tmp_path, what)
    try:
        deadline = time.monotonic() + 240
        while step_of(tmp_path, host) < 3 and time.monotonic() < deadline:
            time.sleep(0.05)
        at = step_of(tmp_path, host)
        assert at >= 3, (tmp_path / '0.err').read_text()[-2000:]
        if sent is not None:
            processes[host].send_signal(sent)
        survivor = processes[1 - host]
        ended = survivor.wait(timeout=60)
        assert ended in ((GIVEN_UP, -signal.SIGABRT) if host == 0 else (GIVEN_UP,))  # JAX itself aborts without host 0
        await_text(tmp_path / f'{1 - host}.err', f'The run ends: .*{said}')
        if sent == signal.SIGKILL:  # its own last words
            await_text(tmp_path / f'{host}.err', f'The run ends: host {host} .* died without a word')
        if sent == signal.SIGSTOP:
            processes[host].send_signal(signal.SIGCONT)
        if sent != signal.SIGKILL:
            assert processes[host].wait(timeout=60) == GIVEN_UP
    finally:
        end(processes)


# --- a whole run

WORDS = shlex.split(
    '--model.width 16 --model.layers 1 --model.heads 2 --model.kv-heads 2 --model.head-dim 8 --model.ffn 32 '
    '--model.no-remat --sampling.envs 4 --sampling.k 4 --sampling.turns 2 --sampling.max-tokens 4 '
    '--learning.step-groups 8 --learning.micro-groups 8 --warm-start.steps 2 --warm-start.rows 8 '
    '--evaluation.every 1 --evaluation.boards 4 --evaluation.report-boards 4 --evaluation.replays 1 '
    '--steps 2 --save-every 1 --wandb disabled --model.mesh 2 1 1'
)


def told_by(folder: pathlib.Path) -> dict[tuple[str, int], dict[str, float]]:
    """The numbers in the rows of the metrics; each process samples batches of its own."""
    rows = {(row['axis'], row['step']): row for row in measured(folder, 'batches')}
    return {place: {name: n for name, n in row.items() if isinstance(n, int | float)} for place, row in rows.items()}


def test_a_run_of_two_processes_learns_and_tells_what_the_same_run_in_one_does(tmp_path, monkeypatch):
    """From the warm start over trees, checkpoints and evaluations to the summary, each playing half of the episodes."""
    monkeypatch.setattr(train, 'write_report', lambda folder: None)  # its pictures are tested elsewhere
    with socket.socket() as free:
        free.bind(('127.0.0.1', 0))
        place = f'127.0.0.1:{free.getsockname()[1]}'
    command = [sys.executable, '-m', 'experiments.sokoban_at_grpo', *WORDS, '--runs', str(tmp_path / 'two')]
    command += ['--hosts.coordinator', place, '--hosts.count', '2', '--hosts.index']
    processes = []
    for index in range(2):
        with (tmp_path / f'{index}.err').open('w') as errors:
            processes.append(
                subprocess.Popen([*command, str(index)], cwd=ROOT, stdout=subprocess.DEVNULL, stderr=errors)
            )
    try:
        alone = cli.arguments(CONFIG, None, [*WORDS, '--runs', str(tmp_path / 'one')]).experiment
        summary = train.train(alone)
        codes = [process.wait(timeout=300) for process in processes]
    finally:
        end(processes)
    assert codes == [0, 0], (tmp_path / '0.err').read_text()[-2000:]
    one, two = (tmp_path / name / alone.folder_name for name in ('one', 'two'))
    assert sorted(path.name for path in (two / 'checkpoints').iterdir()) == ['00000000', '00000001', '00000002']
    found, wanted = (read_learned(folder).pools['shared'] for folder in (two, one))
    jax.tree.map(functools.partial(np.testing.assert_allclose, atol=1e-5, rtol=0), found, wanted)
    assert told_by(two).keys() == told_by(one).keys() > {('warm_start', 1), ('rollout', 1), ('eval', 2)}
    for place_of_row, row in told_by(one).items():
        assert told_by(two)[place_of_row] == pytest.approx(row, rel=1e-3, abs=1e-5), place_of_row
    told = json.loads((two / 'summary.json').read_text())
    for name in ('success_before', 'success_after', 'strict_after_t1', 'training_tokens', 'format_after'):
        assert told[name] == summary[name], name


# --- the guard alone


def guards(folder: pathlib.Path, ended: list[int], **limits: float) -> list[Guard]:
    return [Guard(folder, 7, host=i, count=2, end=ended.append, **limits) for i in range(2)]


def test_a_run_that_goes_on_is_left_in_peace_and_one_that_finishes_too(tmp_path):
    ended: list[int] = []
    one, other = guards(tmp_path, ended, stall_s=30.0, silence_s=4.0)
    with one:
        with other:
            for step in range(3):
                one.at(step, 'learn')
                other.at(step, 'learn')
                time.sleep(0.2)
        time.sleep(6)  # the other has finished long ago
    assert ended == [] and step_of(tmp_path.parent, 0) == -1
    assert json.loads((tmp_path / '1.json').read_text())['fault'] == 'finished'


def test_signs_of_an_earlier_start_of_the_run_are_not_believed(tmp_path, caplog):
    ended: list[int] = []
    with Guard(tmp_path, 6, host=1, count=2, stall_s=9.0, silence_s=9.0):
        pass
    with Guard(tmp_path, 7, host=0, count=2, stall_s=9.0, silence_s=0.5, end=ended.append):
        time.sleep(1.5)
    assert ended[0] == GIVEN_UP and 'host 1 (not heard of yet), step 0' in caplog.text


# --- with one process


def test_one_process_shares_with_nobody():
    assert hosts.share(5) == range(5)
    assert hosts.gathered([1, 'a']) == [1, 'a'] and hosts.agreed(3) == 3 and hosts.totals({'a': 2.0}) == {'a': 2.0}
    tree = {'a': np.ones(3)}
    assert hosts.spread(tree, None) is tree and hosts.local(tree) is tree


@pytest.mark.parametrize('count, index', [(3, 0), (3, 1), (3, 2)])
def test_shares_are_even_and_in_order(count, index, monkeypatch):
    monkeypatch.setattr(hosts.jax, 'process_count', lambda: count)
    monkeypatch.setattr(hosts.jax, 'process_index', lambda: index)
    assert hosts.share(8) == [range(2), range(2, 5), range(5, 8)][index]


@pytest.mark.parametrize(
    'change, said',
    [
        ({'count': 2}, "need the coordinator's 'address:port'"),
        ({'count': 2, 'coordinator': 'a:1', 'index': 2}, 'numbered 0 to count - 1'),
        ({'silence_s': 0.0}, 'limits in seconds are positive'),
    ],
)
def test_hosts_that_cannot_meet_are_refused(change, said):
    with pytest.raises(ValueError, match=said):
        Hosts(**change)


def test_a_save_that_only_one_process_enters_ends_both_soon_and_says_where(tmp_path):
    """A38: the save guarded wrongly, by `if index == 0`."""
    processes = start(tmp_path, 'save alone')
    try:
        codes = [process.wait(timeout=180) for process in processes]
        assert all(codes), codes
        for host in range(2):
            await_text(tmp_path / f'{host}.err', r"The run ends: .*host \d \(.+\), step 3, stage '\w+'")
    finally:
        end(processes)


@pytest.mark.parametrize('index', [0, 1])
def test_process_0_alone_writes_metrics_and_starts_wandb(index, monkeypatch, tmp_path):
    """A38."""
    started = []
    monkeypatch.setattr(wandb_run, 'start_wandb', lambda folder, **how: started.append(folder))
    monkeypatch.setattr(run.jax, 'process_index', lambda: index)
    with run.sink_of(Experiment(wandb='offline'), tmp_path / 'run', None) as sink:
        sink.write('rollout', 0, {'solved': 0.5})
        sink.summary({})
    written = sorted(path.name for path in tmp_path.rglob('*.json*'))
    assert (written, len(started)) == ((['config.json', 'metrics.jsonl', 'summary.json'], 1), ([], 0))[index]
