"""How a run gets at its servers: whose they are, where weights are put for them, and what is left behind."""

import contextlib
import dataclasses
import json
import os
import pathlib
import pickle
import socket
import subprocess
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen as nn

from mallm import keeper, servers, serving
from mallm.experiment import Experiment
from mallm.models.config import Architecture
from mallm.models.transformer import Transformer
from mallm.rollout.chat import TinyTokenizer
from mallm.rollout.fleet import Limits
from mallm.rollout.replies import UnreachableError
from mallm.run import build
from tests.launch.sglang_test import until

TOKENIZER = TinyTokenizer()
MODULE = Transformer(Architecture(40, width=16, layers=1, heads=2, kv_heads=1, head_dim=8, ffn=32))


def params(seed: int) -> dict:
    return nn.unbox(MODULE.init(jax.random.key(seed), jnp.zeros((1, 2), jnp.int32)))['params']


def test_the_newest_weights_are_kept_with_the_log_probs_that_a_server_must_show(tmp_path):
    publish = serving.Publisher(tmp_path / 'w', MODULE)
    first, second = publish('plan', params(0), 0), publish('plan', params(1), 1)
    assert [path.name for path in (tmp_path / 'w').iterdir()] == [pathlib.Path(second.folder).name]
    assert second.bytes >= 4 * sum(leaf.size for leaf in jax.tree.leaves(params(1)))
    logits = np.asarray(MODULE.apply({'params': params(1)}, np.array([second.ids])))[0]
    expected = np.asarray(jax.nn.log_softmax(logits))[np.arange(len(second.logps)), list(second.ids[1:])]
    assert second.logps == pytest.approx(expected, abs=1e-5)
    assert first.ids == second.ids and first.logps != second.logps


def test_each_process_has_servers_of_its_own(monkeypatch):
    monkeypatch.setattr(jax, 'process_count', lambda: 2)
    shares = []
    for index in range(2):
        monkeypatch.setattr(jax, 'process_index', lambda index=index: index)
        shares.append(serving.share({'plan': ['a', 'b', 'c'], 'tool': ['a', 'b', 'c']}))
    assert shares == [{'plan': ['a', 'c'], 'tool': ['a', 'c']}, {'plan': ['b'], 'tool': ['b']}]
    with pytest.raises(servers.ServerError, match='each process needs its own'):
        serving.share({'plan': ['a']})


def test_weights_go_through_memory_only_to_servers_of_this_machine():
    assert serving.is_here('http://127.0.0.1:1') and serving.is_here('http://localhost:1')
    assert not serving.is_here('http://node7:30000') and not serving.is_here('http://10.0.0.1:1')


def test_a_run_without_its_servers_ends_at_once_and_leaves_no_folder_of_weights(tmp_path):
    file = tmp_path / 'servers.json'
    file.write_text(json.dumps({'*': ['http://127.0.0.1:9']}))
    experiment = Experiment(engine='sglang', endpoints=str(file), serving=Limits(connect_s=2.0), wandb='disabled')
    places = []
    with serving.engines(experiment) as make:

        def making(*given):
            engine = make(*given)
            places.append(engine._publish._root)
            return engine

        with pytest.raises(UnreachableError, match='Cannot connect'):
            build(experiment, tmp_path / 'run', None, make_engine=making)
    until(lambda: not places[0].exists())


def test_clients_in_workers_share_the_requests_and_read_the_api_key_where_they_are(tmp_path, monkeypatch):
    """What is sent to a worker has no key in it."""
    monkeypatch.setenv(keeper.KEY, 'a-secret')
    monkeypatch.setattr(serving, 'Workers', lambda engine, count, crew, settings: crew)
    file = tmp_path / 'servers.json'
    file.write_text(json.dumps({'*': ['http://127.0.0.1:9']}))
    experiment = Experiment(engine='sglang', endpoints=str(file), rollout_workers=3, serving=Limits(in_flight=64))
    module = MODULE.clone(arch=dataclasses.replace(MODULE.arch, vocab=len(TOKENIZER)))
    policies = SimpleNamespace(module=module, tokenizer=TOKENIZER, pools={'shared': None})
    with serving.engines(experiment) as make:
        sent = pickle.dumps(make(experiment, policies, tmp_path))
    assert b'a-secret' not in sent
    with contextlib.closing(pickle.loads(sent).make_engine()) as client:
        assert client._headers == {'Authorization': 'Bearer a-secret'}
        assert client._limits.in_flight == 22


def test_settings_that_contradict_each_other_are_refused():
    with pytest.raises(ValueError, match="set engine='sglang'"):
        Experiment(endpoints='servers.json')
    with pytest.raises(ValueError, match='must be positive'):
        Limits(tries=0)
    with contextlib.ExitStack() as stack:
        assert stack.enter_context(serving.engines(Experiment())) is serving.embedded


def test_weights_of_processes_that_were_killed_are_removed_and_those_of_living_ones_stay(tmp_path):
    with serving.weights_folder(tmp_path) as mine:
        killed = mine.with_name(mine.name.replace(f'-{os.getpid()}-', f'-{ended_pid()}-'))
        earlier = mine.with_name(mine.name.replace(serving.TOKEN, '0ther'))  # of this number, in another life of a pod
        elsewhere = tmp_path / f'mallm-another-host-{ended_pid()}-x'
        longer = tmp_path / f'mallm-{socket.gethostname()}-{ended_pid()}-{os.getpid()}-x'  # a host whose name goes on
        for folder in (killed, earlier, elsewhere, longer):
            folder.mkdir()
        with serving.weights_folder(tmp_path) as other:
            assert sorted(tmp_path.iterdir()) == sorted([mine, other, elsewhere, longer])
    assert sorted(tmp_path.iterdir()) == sorted([elsewhere, longer])


def ended_pid() -> int:
    with subprocess.Popen(['true']) as process:
        pass
    return process.pid
