"""Scripts and manifests: they parse, our command lines take what they run, and nothing a user writes runs by itself."""

import importlib
import json
import pathlib
import re
import shlex
import subprocess

import pytest
import yaml

from experiments.sokoban_at_grpo import CONFIG
from launch import job, sglang
from mallm import cli, serving

LORA = ['--model.lora.rank', '8', '--model.dtype', 'bfloat16']
ROLES = ['--pools.tool', 'a', '--pools.plan', 'b']
SCRIPTS = {
    'local, processors': (['local'], [], ['--steps', '3']),
    'local, four GPUs': (['local', '--gpus', '4', '--servers', '2', '--model', 'M'], LORA, []),
    'local, a server for each role': (['local', '--servers', '2', '--model', 'M'], ROLES, []),
    'slurm, one learner': (['slurm', '--partition', 'gpu'], [], []),
    'slurm, servers': (
        ['slurm', '--learners', '2', '--servers', '2', '--gpus', '8', '--server-gpus', '8', '--model', 'M',
         '--key-file', 'my key'], [*LORA, *ROLES], ['--resume', 'it-seed0'],
    ),
    'slurm, rollout workers': (
        ['slurm', '--learners', '2', '--players', '2'], ['--rollout-workers', '4'], [],
    ),
    'tpu': (['tpu', '--pod', 'p', '--zone', 'z'], ['--model.mesh', '1', '4', '2'], ['--seed', '5']),
}  # fmt: skip


def rendered(words: list[str], settings: list[str], tmp_path: pathlib.Path) -> pathlib.Path:
    out = tmp_path / 'job'
    assert job.main([*words, '--out', str(out), '--', *settings]) == 0
    return out


def dry(script: pathlib.Path, *words: str) -> list[list[str]]:
    """The commands that a script would run."""
    folder = script.parent / 'empty'
    folder.mkdir()
    subprocess.run(['bash', '-n', script], check=True)
    done = subprocess.run(
        ['bash', script, *words], cwd=folder, capture_output=True, text=True, timeout=60, check=True,
        env={'PATH': '/usr/bin:/bin', 'DRY_RUN': '1', 'MALLM_SGLANG_KEY': 'geheim'},
    )  # fmt: skip
    assert done.stderr == '' and list(folder.iterdir()) == []
    return [shlex.split(line) for line in done.stdout.splitlines()]


def experiment_of(command: list[str]) -> tuple[cli.Arguments, list[str]]:
    """What an experiment's own command line makes of a command, but for its words about servers, which come second."""
    at = command.index('-m')
    words, config = command[at + 2 :], importlib.import_module(command[at + 1]).CONFIG
    given, start = cli.arguments(config, None, words), words.index('--engine') if '--engine' in words else len(words)
    assert (given.experiment.engine == 'sglang') == ('--engine' in words)
    served, rest = words[start : start + 4], words[:start] + words[start + 4 :]
    return (cli.arguments(config, None, rest) if served else given), served


def of_module(commands: list[list[str]], module: str) -> list[list[str]]:
    return [command for command in commands if any(word.startswith(module) for word in command)]


@pytest.mark.parametrize('name', SCRIPTS)
def test_a_script_runs_what_the_experiment_takes_with_all_that_was_set(name, tmp_path):
    words, settings, later = SCRIPTS[name]
    commands = dry(rendered(words, settings, tmp_path), *later)
    if words[0] == 'tpu':  # one command for every host, inside another
        [command] = commands
        assert command[:6] == ['gcloud', 'compute', 'tpus', 'tpu-vm', 'ssh', 'p'] and '--worker=all' in command
        commands = [shlex.split(command[-1].removeprefix('--command=').partition('exec ')[2])]
    [learner] = of_module(commands, 'experiments.')
    given, served = experiment_of(learner)
    beside = ['--worker.resource', 'player'] if '--players' in words else []
    wanted = cli.arguments(CONFIG, None, [*settings, *beside, *later])
    assert (given.experiment, given.resume) == (wanted.experiment, wanted.resume)
    assert bool(served) == ('--servers' in words)
    if served:
        [joined] = of_module(commands, 'launch.job')
        given_out = job.arguments(joined[joined.index('-m') + 2 :])
        assert served == ['--engine', 'sglang', '--endpoints', given_out.out] and len(given_out.files) == 2
        servers = of_module(commands, 'launch.sglang')
        parsed = [sglang.arguments(command[command.index('launch.sglang') + 1 :]) for command in servers]
        assert {one.verb for one in parsed} == {'install', 'start'}
        starts = [command for command in servers if 'start' in command]
        outs = [command[command.index('--out') + 1] for command in starts]  # they start in the background, in any order
        assert sorted(outs) == sorted(given_out.files)
        assert all(command[command.index('--model') + 1] == 'M' for command in starts)
        assert sum('install' in command for command in commands) == 1


def test_each_of_several_learners_gets_the_coordinator_and_its_own_index(tmp_path):
    words, settings, _ = SCRIPTS['slurm, servers']
    commands = dry(rendered(words, settings, tmp_path))
    [learner] = of_module(commands, 'experiments.')
    given, _ = experiment_of([*learner, '--hosts.index', '1'])
    assert (given.hosts.coordinator, given.hosts.count, given.hosts.index) == ('node1:29400', 2, 1)
    assert '--nodelist=node1,node2' in learner and 'exec "$@" --hosts.index "$SLURM_PROCID"' in learner
    starts = [command for command in commands if 'start' in command and 'launch.sglang' in command]
    assert sorted(command[command.index('--host') + 1] for command in starts) == ['node3', 'node4']
    assert all(shlex.join(command).endswith('--extra --tp-size 8 --dp-size 1') for command in starts)
    assert all('--adapters 4 --rank 8' in shlex.join(command) for command in starts)


def test_ray_spans_learners_and_the_nodes_where_workers_play(tmp_path):
    words, settings, _ = SCRIPTS['slurm, rollout workers']
    commands = dry(rendered(words, settings, tmp_path))
    rays = [command for command in commands if command[5].endswith('/ray')]
    assert sorted(command[4] for command in rays) == [f'--nodelist=node{i}' for i in range(1, 5)]
    beside = {command[4] for command in rays if '--resources={"player": 1024}' in command}
    assert beside == {'--nodelist=node3', '--nodelist=node4'}
    [learner] = of_module(commands, 'experiments.')
    assert experiment_of(learner)[0].experiment.worker.resource == 'player'


def test_learner_and_servers_of_one_machine_share_no_gpu(tmp_path):
    words, settings, _ = SCRIPTS['local, four GPUs']
    text = rendered(words, settings, tmp_path).read_text()
    assert [line.split()[0] for line in text.splitlines() if ' start ' in line] == [
        'CUDA_VISIBLE_DEVICES=2', 'CUDA_VISIBLE_DEVICES=3'
    ]  # fmt: skip
    assert 'export CUDA_VISIBLE_DEVICES=0,1\n' in text and '--host' not in text


def test_full_weights_of_each_pool_have_a_server_of_their_own(tmp_path):
    words, settings, _ = SCRIPTS['local, a server for each role']
    commands = dry(rendered(words, settings, tmp_path))
    starts = [command for command in commands if 'start' in command]
    assert [command[command.index('--policies') + 1] for command in starts] == ['a', 'b']


@pytest.mark.parametrize(
    'kind', [['local'], ['slurm', '--learners', '2'], ['tpu', '--zone', 'z', '--pod', 'p; touch x']]
)
def test_what_a_user_writes_stays_one_word_and_is_never_run(kind, tmp_path):
    hostile = "a b\"; $(touch x) `touch x` '{{ 7 }}' $HOME"
    [command] = [words for words in dry(rendered(kind, ['--runs', hostile], tmp_path)) if words]
    if kind[0] == 'tpu':
        assert command[5] == 'p; touch x'
        command = shlex.split(command[-1].removeprefix('--command='))
    assert experiment_of(command)[0].experiment.runs == hostile if kind[0] != 'tpu' else hostile in command


def test_a_manifest_holds_what_pods_need_to_find_each_other_and_the_key_by_reference(tmp_path, monkeypatch):
    monkeypatch.setenv('MALLM_SGLANG_KEY', 'geheim')
    words = ['k8s', '--image', 'registry/mallm:1', '--learners', '2', '--servers', '2', '--model', 'M', '--gpus', '8',
             '--server-gpus', '8', '--secret', 'sglang', '--name', 'team']  # fmt: skip
    settings = [*LORA, *ROLES, '--runs', '/runs/a: "$(HOME)"']
    text = rendered(words, settings, tmp_path).read_text()
    assert 'geheim' not in text
    parts = {(part['kind'], part['metadata']['name']): part for part in yaml.safe_load_all(text)}
    assert set(parts) == {('Service', 'team'), ('Job', 'team'), ('ConfigMap', 'team-endpoints'),
                          ('Service', 'team-servers'), ('StatefulSet', 'team-servers')}  # fmt: skip
    pod = parts['Job', 'team']['spec']['template']['spec']
    [learner] = pod['containers']
    assert pod['subdomain'] == 'team' and parts['Job', 'team']['spec']['completions'] == 2
    command = [word.replace('$$(', '$(').replace('$(JOB_COMPLETION_INDEX)', '1') for word in learner['command']]
    given, served = experiment_of(command)
    assert given.experiment == cli.arguments(CONFIG, None, settings).experiment
    assert (given.hosts.coordinator, given.hosts.count, given.hosts.index) == ('team-0.team:29400', 2, 1)
    mounted = {mount['mountPath'] for mount in learner['volumeMounts']}
    assert str(pathlib.PurePath(served[-1]).parent) in mounted and learner['resources']['limits'] == {
        'nvidia.com/gpu': 8
    }
    told = json.loads(parts['ConfigMap', 'team-endpoints']['data'][pathlib.PurePath(served[-1]).name])
    servers = parts['StatefulSet', 'team-servers']['spec']
    assert told == {'*': [f'http://team-servers-{i}.team-servers:29400' for i in range(servers['replicas'])]}
    [server] = servers['template']['spec']['containers']
    start = server['command']
    assert start[5:8] == ['-m', 'launch.sglang', 'start'] and start[-5:] == [
        '--extra',
        '--tp-size',
        '8',
        '--dp-size',
        '1',
    ]
    assert start[start.index('--port') + 1] == '29400' and server['startupProbe']['httpGet']['port'] == 29400
    for container in (learner, server):
        reference = {'secretKeyRef': {'name': 'sglang', 'key': 'key'}}
        folder, key = container['env']
        assert folder == {'name': serving.WEIGHTS_FOLDER, 'value': '/runs'} and '/runs' in mounted
        assert key == {'name': 'MALLM_SGLANG_KEY', 'valueFrom': reference}


def test_a_manifest_without_servers_is_a_job_and_its_service(tmp_path):
    text = rendered(['k8s', '--image', 'i'], ['--runs', '/runs'], tmp_path).read_text()
    assert [part['kind'] for part in yaml.safe_load_all(text)] == ['Service', 'Job']
    assert '--hosts' not in text and 'sglang' not in text


@pytest.mark.parametrize(
    'words, said',
    [
        (['local', '--servers', '1'], '--model'),
        (['local', '--servers', '1', '--model', 'M', '--', *ROLES], r"pools \['a', 'b'\]"),
        (['local', '--servers', '2', '--gpus', '2', '--model', 'M'], 'leave none for the learner'),
        (['slurm', '--servers', '1', '--gpus', '8', '--server-gpus', '3', '--model', 'M'], 'must divide'),
        (['slurm', '--servers', '1', '--gpus', '8', '--model', 'M', '--', *LORA], 'is one copy'),
        (['slurm', '--servers', '1', '--learners', '2', '--model', 'M', '--', *LORA], 'each of 2 learners needs 1'),
        (['slurm', '--servers', '3', '--learners', '2', '--model', 'M', '--', *ROLES], 'each of 2 learners needs 2'),
        (['k8s', '--image', 'i'], 'give --runs /runs'),
        (['join', 'no such file', '--out', 'x'], 'is no endpoints file'),
        (['slurm', '--learners', '0'], 'must be positive'),
        (['slurm', '--time', '1 day'], 'is one word'),
        (['slurm', '--players', '1'], 'with --rollout-workers'),
        (['local', '--servers', '1', '--model', 'M', '--', '--rollout-workers', '1'], 'sample by themselves'),
        (['k8s', '--image', 'i', '--name', 'Team'], 'as Kubernetes wants it'),
        (['k8s', '--image', 'i', '--servers', '2', '--model', 'M', '--', *ROLES], 'are all alike'),
        (['local', '--experiment', 'no_such_one'], 'no_such_one'),
    ],
)
def test_what_cannot_work_is_refused_before_a_script_is_written(words, said, capsys):
    assert job.main(words) == 2
    told = capsys.readouterr()
    assert told.out == '' and re.search(said, told.err), told.err


@pytest.mark.parametrize('name, value, said', [('tempperature', '2', 'temperature'), ('k', '1', 'at least 2')])
def test_a_setting_that_the_experiment_would_refuse_is_refused_by_its_own_command_line(name, value, said, capsys):
    with pytest.raises(SystemExit):
        job.main(['slurm', '--', f'--sampling.{name}', value])
    told = capsys.readouterr()
    assert said in told.out + told.err and '#SBATCH' not in told.out


def test_weights_pass_through_the_folder_that_a_script_names_for_servers_elsewhere(tmp_path, monkeypatch):
    assert f'export {serving.WEIGHTS_FOLDER}="$PWD"' in rendered(*SCRIPTS['slurm, servers'][:2], tmp_path).read_text()
    monkeypatch.setenv(serving.WEIGHTS_FOLDER, str(tmp_path))
    assert serving.seen_by(['http://127.0.0.1:1', 'http://node3:1'], tmp_path / 'run') == tmp_path
    assert serving.seen_by(['http://127.0.0.1:1', 'http://localhost:1'], tmp_path / 'run') != tmp_path
    monkeypatch.delenv(serving.WEIGHTS_FOLDER)
    assert serving.seen_by(['http://node3:1'], tmp_path / 'run') == tmp_path / 'run'


def test_endpoints_files_are_joined_policy_by_policy(tmp_path):
    for i, said in enumerate(({'a': ['u'], 'b': [{'url': 'v'}]}, {'a': ['w']})):
        (tmp_path / str(i)).write_text(json.dumps(said))
    job.main(['join', str(tmp_path / '0'), str(tmp_path / '1'), '--out', str(tmp_path / 'all')])
    assert json.loads((tmp_path / 'all').read_text()) == {'a': ['u', 'w'], 'b': [{'url': 'v'}]}
