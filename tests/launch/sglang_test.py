"""Servers as processes, without SGLang in them: what keeps them, ends them, and what is written down about them."""

import importlib
import json
import os
import pathlib
import signal
import stat
import subprocess
import sys
import time

import pytest

from launch import sglang
from mallm import keeper, servers
from mallm.rollout.chat import TinyTokenizer
from mallm.servers import ServerError, Spec, Started

SLEEPS = [sys.executable, '-c', 'import subprocess, sys; print("up", flush=True); '
          'subprocess.run([sys.executable, "-c", "import time; time.sleep(600)"])']  # fmt: skip


def kept(log: pathlib.Path, command: list[str], *, tethered: bool, key: str = '') -> subprocess.Popen:
    """What `servers.start` does, with another program in the server's place."""
    words = [sys.executable, '-I', '-S', keeper.__file__, 'keep', str(log), 'yes' if tethered else 'no', *command]
    stdin = subprocess.PIPE if tethered else subprocess.DEVNULL
    return subprocess.Popen(
        words, stdin=stdin, start_new_session=True, env=os.environ | ({keeper.KEY: key} if key else {})
    )


def until(holds, seconds: float = 60.0) -> None:
    end = time.monotonic() + seconds
    while not holds():
        assert time.monotonic() < end, 'it did not come about'
        time.sleep(0.05)


def group(process: subprocess.Popen) -> int:
    """The process group of what a keeper keeps."""
    children = pathlib.Path(f'/proc/{process.pid}/task/{process.pid}/children')
    until(lambda: children.read_text().split())
    return int(children.read_text().split()[0])


def is_gone(group: int) -> bool:
    try:
        os.killpg(group, 0)
    except ProcessLookupError:
        return True
    return False


def test_a_key_is_in_the_servers_hands_and_in_no_log_or_command_line(tmp_path, monkeypatch):
    log = tmp_path / 'log'
    says = [sys.executable, '-c', f'import os; print("api_key=" + os.environ["{keeper.KEY}"], flush=True)']
    assert kept(log, says, tethered=False, key='s3cret').wait(60) == 0
    assert log.read_text() == 'api_key=***\n'
    monkeypatch.setenv(keeper.KEY, 's3cret')
    spec = Spec('model')
    assert 's3cret' not in ' '.join(spec.arguments())
    assert servers.environment(spec)[keeper.KEY] == 's3cret'
    file = tmp_path / 'key'
    file.write_text('other\n')
    monkeypatch.setenv(servers.KEY_FILE, str(file))
    assert servers.api_key() == 'other' and servers.KEY_FILE not in servers.environment(spec)


def test_a_server_hears_this_machine_only_unless_told_otherwise():
    words = Spec('model').arguments()
    assert words[words.index('--host') + 1] == '127.0.0.1'
    assert sglang.arguments(['start', '--model', 'm']).host == '127.0.0.1'


@pytest.mark.parametrize('way', ['closes its end', 'is killed'])
def test_a_tethered_server_ends_with_all_its_children_when_the_run(tmp_path, way):
    if way == 'closes its end':
        process = kept(tmp_path / 'log', SLEEPS, tethered=True)
        its = group(process)
        process.stdin.close()
        process.wait(60)
    else:
        run = f'import sys, time; sys.path.insert(0, {str(pathlib.Path(__file__).parents[2])!r}); '
        run += 'from tests.launch.sglang_test import *; '
        run += f'p = kept(pathlib.Path({str(tmp_path / "log")!r}), SLEEPS, tethered=True); '
        run += 'print(group(p), flush=True); time.sleep(600)'
        parent = subprocess.Popen([sys.executable, '-c', run], stdout=subprocess.PIPE, text=True)
        its = int(parent.stdout.readline())
        parent.kill()
        parent.communicate()
    until(lambda: is_gone(its))


def test_servers_are_listed_and_stopped_by_the_file_that_names_them(tmp_path, capsys):
    file = tmp_path / 'servers.json'
    process = kept(tmp_path / 'log', SLEEPS, tethered=False)
    its = group(process)
    servers.write_endpoints(file, {'plan': [Started('http://127.0.0.1:9', process.pid, 'log')]})
    assert sglang.main(['list', '--out', str(file)]) == 0
    assert capsys.readouterr().out.split('\t')[:4] == ['plan', 'http://127.0.0.1:9', f'process {process.pid}', 'runs']
    assert sglang.main(['health', '--out', str(file)]) == 1
    assert sglang.main(['start', '--model', 'm', '--out', str(file)]) == 1
    assert 'stop them first' in capsys.readouterr().err
    assert sglang.main(['stop', '--out', str(file)]) == 0
    process.wait(60)
    until(lambda: is_gone(its))
    assert not file.exists()


def test_no_process_but_a_keeper_is_ever_stopped(tmp_path):
    other = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(600)'])
    try:
        assert not servers.stop(other.pid) and other.poll() is None
    finally:
        other.kill()
        other.wait()


def test_an_endpoints_file_is_private_and_gives_each_policy_its_servers(tmp_path):
    file = tmp_path / 'servers.json'
    servers.write_endpoints(file, {'plan': [Started('http://a', 1, '')], '*': [Started('http://b', 2, '')]})
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    assert servers.urls(file, ['plan', 'tool']) == {'plan': ['http://a'], 'tool': ['http://b']}
    file.write_text(json.dumps({'plan': ['http://a', 'http://c']}))
    assert servers.urls(file, ['plan']) == {'plan': ['http://a', 'http://c']}
    with pytest.raises(ServerError, match='no server for'):
        servers.urls(file, ['tool'])
    for wrong in ('[]', '{"plan": []}', 'no json'):
        file.write_text(wrong)
        with pytest.raises(ServerError):
            servers.urls(file, ['plan'])


def test_without_sglang_the_error_says_what_to_run(tmp_path, monkeypatch):
    monkeypatch.setenv(servers.HOME, str(tmp_path / 'none'))
    with pytest.raises(ServerError, match=r'python -m launch\.sglang install'):
        servers.start(Spec('m'), tmp_path / 'log', tethered=True)


def test_a_model_that_is_not_there_is_refused_before_anything_starts(tmp_path, capsys, monkeypatch):
    (tmp_path / 'runs').mkdir()
    monkeypatch.chdir(tmp_path)
    for model in (str(tmp_path / 'no_model'), 'runs/no_model', 'no_model'):
        assert sglang.main(['start', '--model', model, '--out', 'servers.json']) == 1
        assert 'no such folder' in capsys.readouterr().err and not (tmp_path / 'servers.json').exists()


def test_an_experiment_that_is_not_there_is_refused_with_those_that_are(tmp_path, capsys):
    assert sglang.main(['start', '--model', 'tiny', '--experiment', 'suite', '--out', str(tmp_path / 'out')]) == 1
    said = capsys.readouterr().err
    assert "experiment='suite'" in said and 'sokoban_at_grpo' in said and 'own_task' in said


def test_a_tiny_server_has_the_vocabulary_of_the_experiment_that_it_is_for(tmp_path):
    for name in ('sokoban_at_grpo', 'sudoku_at_grpo'):
        signs = importlib.import_module(f'experiments.{name}').CONFIG.task.signs
        config = json.loads((pathlib.Path(sglang.tiny(tmp_path / name, name)) / 'config.json').read_text())
        assert config['vocab_size'] == len(TinyTokenizer(signs))


def test_a_server_that_does_not_start_is_an_error_with_its_last_words(tmp_path):
    process = kept(tmp_path / 'log', [sys.executable, '-c', 'raise SystemExit("no such model")'], tethered=True)
    with pytest.raises(ServerError, match='no such model'):
        servers.wait(Started('http://127.0.0.1:9', process.pid, str(tmp_path / 'log')), process, 60.0)


def test_ctrl_c_at_the_terminal_does_not_reach_a_kept_server_but_sigterm_to_its_keeper_ends_it(tmp_path):
    process = kept(tmp_path / 'log', SLEEPS, tethered=False)
    its = group(process)
    assert os.getpgid(process.pid) != os.getpgid(0) and its != os.getpgid(0)
    process.send_signal(signal.SIGTERM)
    process.wait(60)
    until(lambda: is_gone(its))


def test_half_an_environment_is_no_environment_and_is_made_anew(tmp_path, monkeypatch):
    monkeypatch.setenv(servers.HOME, str(tmp_path / 'venv'))
    half = tmp_path / 'venv' / 'bin'
    half.mkdir(parents=True)
    (half / 'python').touch()
    (tmp_path / 'venv' / servers.HALF).touch()
    with pytest.raises(servers.ServerError, match='not there, or not whole'):
        servers.interpreter('cpu')

    def killed(home: pathlib.Path, with_pip: bool) -> None:
        assert not (home / 'bin').exists() and servers.is_half(home)
        raise KeyboardInterrupt

    monkeypatch.setattr(sglang.venv, 'create', killed)
    with pytest.raises(KeyboardInterrupt):
        sglang.install('cpu')
    assert servers.is_half(tmp_path / 'venv')
