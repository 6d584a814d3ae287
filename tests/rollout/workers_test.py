"""Rollout workers on a real Ray of two nodes: who plays changes nothing, and what dies is played again by its key."""

import asyncio
import dataclasses
import functools
import json
import os
import pathlib
import random
import signal
import sys
import time
from types import SimpleNamespace

os.environ['RAY_USAGE_STATS_ENABLED'] = '0'
os.environ['RAY_AUTH_MODE'] = 'disabled'
os.environ['RAY_worker_niceness'] = '0'  # noqa: SIM112 (as Ray spells it)

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import ray
from ray.cluster_utils import Cluster

from mallm import rng
from mallm.envs.sokoban_task import SokobanTask
from mallm.experiment import Experiment, LearningSettings, LoraSettings, ModelSettings, SamplingSettings
from mallm.pipeline import Brake
from mallm.rollout import tree, workers
from mallm.rollout.chat import TinyTokenizer
from mallm.rollout.engine import SamplingParams
from mallm.rollout.jax_engine import JaxEngine
from mallm.rollout.workers import Crew, Lender, Seeded, Workers, WorkerSettings, WorkersLostError
from mallm.run import build
from mallm.serving import embedded
from mallm.train import train_step
from mallm.types import Answer, Trajectory

TASK = SokobanTask()
TOKENIZER = TinyTokenizer()
PLACE = tree.Place(7, rng.TRAIN, 3, env=40)
ROLES = ('tool', 'plan')
CAST = {'tool': 'left', 'plan': 'right'}
NODE = {'num_cpus': 1, 'object_store_memory': 80 << 20, 'include_log_monitor': False}


@pytest.fixture(scope='module')
def cluster():
    """Two nodes of one processor. Ray gives its own parts 15 s to start, which a busy machine may need twice."""
    for left in (2, 1, 0):
        try:
            started = Cluster(
                initialize_head=True, head_node_args={**NODE, 'include_dashboard': False, 'no_monitor': True}
            )
            started.add_node(**NODE)
            break
        except Exception:
            if not left:
                raise
    ray.init(address=started.address, log_to_driver=False)
    yield started
    ray.shutdown()
    started.shutdown()


def seeded(count: int) -> list[Seeded]:
    return [Seeded(TASK, 100 + i) for i in range(count)]


def stage(engine, witness: tree.Witness = tree.NOBODY) -> tree.Stage:
    sampler = tree.Sampler(3, 2, 1.0, tree.greedy, dict.fromkeys(ROLES, SamplingParams(4)))
    return tree.Stage(sampler, engine, TOKENIZER, CAST, witness)


def versions(trajectories: list[Trajectory]) -> set[tuple[str, int]]:
    groups = [group for t in trajectories for turn in t.turns for group in turn.groups]
    return {(group.policy, candidate.answer.version) for group in groups for candidate in group.candidates}


# --- who plays changes nothing


@pytest.fixture(scope='module')
def tiny() -> tuple:
    """A module, and parameters of two policies."""
    module = ModelSettings(width=16, layers=1, heads=2, kv_heads=1, head_dim=8, ffn=32).architecture(len(TOKENIZER))
    module = workers.Transformer(module)
    init = jax.jit(lambda key: nn.unbox(module.init(key, jnp.zeros((1, 2), jnp.int32)))['params'])
    return module, [init(jax.random.key(i)) for i in range(3)]


def test_one_worker_and_two_play_byte_for_byte_what_this_process_plays(cluster, tiny):
    module, (left, right, later) = tiny
    crew = Crew(TOKENIZER, functools.partial(workers.embedded, module, TOKENIZER, 7))
    here = JaxEngine(module, TOKENIZER, jax.random.key(7))
    here.load('left', left, 0)
    here.load('right', right, 5)
    wanted = [workers.play(mode, seeded(5), PLACE, stage(here)) for mode in (tree.play_tree, tree.play_parallel)]
    assert [t.env for t in wanted[0]] == [40, 41, 42, 43, 44] and [t.env for t in wanted[1]][:4] == [40, 40, 40, 41]
    here.load('left', later, 6)
    wanted.append(workers.play(tree.play_tree, seeded(5), PLACE, stage(here)))
    counted = here.metrics()
    for count in (1, 2):
        crowd = Workers(Lender(module, TOKENIZER, jax.random.key(7)), count, crew, WorkerSettings())
        crowd.load('left', left, 0)
        crowd.load('right', right, 5)
        found = [workers.play(mode, seeded(5), PLACE, stage(crowd)) for mode in (tree.play_tree, tree.play_parallel)]
        assert versions(found[0]) == {('left', 0), ('right', 5)}
        crowd.load('left', later, 6)
        found.append(workers.play(tree.play_tree, seeded(5), PLACE, stage(crowd)))
        assert versions(found[2]) == {('left', 6), ('right', 5)}
        assert repr(found) == repr(wanted) and found == wanted
        told = crowd.metrics()
        crowd.close()
        assert (told['tokens_sampled'], told['prompts']) == (counted['tokens_sampled'], counted['prompts'])
        assert (told['workers/deaths'], told['workers/worlds_replayed']) == (0, 0)
    assert found[0] != found[2]  # other weights play otherwise


def test_training_steps_of_adapters_on_workers_end_in_the_bits_of_those_without_them(cluster, tmp_path):
    base = Experiment(
        pools=CAST,
        model=ModelSettings(width=16, layers=1, heads=2, kv_heads=1, head_dim=8, ffn=32, lora=LoraSettings(rank=2)),
        sampling=SamplingSettings(envs=4, k=4, turns=2, max_tokens=4),
        learning=LearningSettings(step_groups=0, micro_groups=4, warmup=0),
        wandb='disabled',
    )
    learned = []
    for count in (0, 2):
        run = build(dataclasses.replace(base, rollout_workers=count), tmp_path / str(count), None)
        with run.sink:
            train_step(run, 0, 0.0)
            train_step(run, 1, 0.0)
        run.close()
        learned.append(jax.tree.map(np.asarray, {name: pool.state.params for name, pool in run.pools.items()}))
    rows = [
        [json.loads(line) for line in (tmp_path / str(count) / 'metrics.jsonl').read_text().splitlines()]
        for count in (0, 2)
    ]
    jax.tree.map(np.testing.assert_array_equal, *learned)
    said = [[row for row in some if row['axis'] == 'rollout'] for some in rows]
    assert [row['workers/deaths'] for row in said[1]] == [0, 0]
    for plain, other in zip(*said, strict=True):
        same = ('tokens_sampled', 'groups', 'turns', 'solved_tree', 'faults')
        assert [plain[name] for name in same] == [other[name] for name in same]


# --- what dies is played again


class Scripted:
    """An engine without a model that draws by the place alone, and obeys the files that a test puts into a folder."""

    def __init__(self, folder: pathlib.Path) -> None:
        self._folder = folder

    async def sample(self, policy, prompt, path, k, params) -> tuple[Answer, ...]:
        env = path[2] - PLACE.env
        with (self._folder / 'asked').open('a') as asked:
            where = ray.get_runtime_context().get_node_id() if ray.is_initialized() else ''
            asked.write(json.dumps([env, os.getpid(), where, path, prompt.ids]) + '\n')
        while env >= 2 and (self._folder / 'gate').exists():
            await asyncio.sleep(0.02)
        if env == 1 and (self._folder / 'exit').exists():
            os._exit(1)
        if env == 1 and (self._folder / 'hang').exists():
            (self._folder / 'hang').unlink()
            time.sleep(1000)
        draws = [random.Random(rng.seed_for(0, *path, j)) for j in range(k)]
        texts = [''.join(draw.choices('UDLR', k=3)) for draw in draws]
        return tuple(Answer(TOKENIZER.encode(text), (-1.0,) * 3, text, 'length', 0) for text in texts)

    def load(self, policy, weights, version) -> None:
        raise AssertionError('these weights are nowhere')

    def told(self) -> str:
        return 'nothing to follow'

    async def follow(self, told: str) -> None:
        assert told == 'nothing to follow'

    def metrics(self) -> dict[str, float]:
        return {'requests': 1.0}


class Watched(Workers):
    """Tells a test what has come so far."""

    after = staticmethod(lambda streams, done: None)

    def _advance(self, streams, done):
        broken = super()._advance(streams, done)
        self.after(streams, done)
        return broken


@pytest.fixture
def crowd(cluster, tmp_path):
    ray.cloudpickle.register_pickle_by_value(sys.modules[__name__])
    settings = WorkerSettings(stall_s=20.0, deaths=1)
    crowd = Watched(Scripted(tmp_path), 2, Crew(TOKENIZER, functools.partial(Scripted, tmp_path)), settings)
    yield crowd
    crowd.close()
    ray.cloudpickle.unregister_pickle_by_value(sys.modules[__name__])


def alone(folder: pathlib.Path) -> list[Trajectory]:
    """What this process plays."""
    folder.mkdir()
    return workers.play(tree.play_tree, seeded(6), PLACE, stage(Scripted(folder)))


def test_of_a_worker_killed_in_mid_step_only_the_unfinished_worlds_are_played_again_by_their_keys(crowd, tmp_path):
    (tmp_path / 'gate').touch()
    killed: list[int] = []

    def kill(streams, done) -> None:
        [pid] = {stream.pid for stream in streams.values() if stream.number == 0} or {0}
        if set(done) == {0, 1} and not killed and pid:
            os.kill(pid, signal.SIGKILL)
            killed.append(pid)
            (tmp_path / 'gate').unlink()

    crowd.after = kill
    early: list[int] = []
    heard: list[Trajectory] = []
    brake = Brake(lambda trajectory: (heard.append(trajectory), early.append(trajectory.env) if not killed else None))
    found = workers.play(tree.play_tree, seeded(6), PLACE, stage(crowd, brake))
    assert len(early) == 1 and sorted(heard, key=lambda trajectory: trajectory.env) == found  # as they end, and once
    assert found == alone(tmp_path / 'alone')  # complete, in order, and nothing double
    told = crowd.metrics()
    assert (told['workers/deaths'], told['workers/worlds_replayed'], told['requests']) == (1, 2, 3)
    asked = [json.loads(line) for line in (tmp_path / 'asked').read_text().splitlines()]
    assert len({node for _, _, node, *_ in asked}) == 2
    for env in range(6):
        pids = list(dict.fromkeys(pid for number, pid, *_ in asked if number == env))
        first = [what for number, pid, _, *what in asked if (number, pid) == (env, pids[0])]
        again = [what for number, pid, _, *what in asked if (number, pid) == (env, pids[-1])]
        assert (len(pids), pids[0] == killed[0]) == ((2, True) if env in (2, 4) else (1, env == 0)), env
        assert first == again[: len(first)]  # the same prompts, the same places of the same seeds


def test_a_rollout_that_its_witness_ends_goes_on_no_longer_than_to_the_next_episode(crowd, tmp_path):
    (tmp_path / 'gate').touch()
    brake = Brake(lambda trajectory: brake.pull())
    with pytest.raises(asyncio.CancelledError):
        workers.play(tree.play_tree, seeded(6), PLACE, stage(crowd, brake))


def test_a_worker_that_stalls_is_replaced_like_a_dead_one(crowd, tmp_path):
    (tmp_path / 'hang').touch()
    found = workers.play(tree.play_tree, seeded(6), PLACE, stage(crowd))
    assert found == alone(tmp_path / 'alone')
    told = crowd.metrics()
    assert told['workers/deaths'] == 1 and 1 <= told['workers/worlds_replayed'] <= 3


def test_the_run_ends_with_a_clear_error_when_more_workers_die_than_may(crowd, tmp_path):
    (tmp_path / 'exit').touch()
    with pytest.raises(WorkersLostError, match=r'2 workers died in step 3 \(limit 1, worker.deaths\): worker 1 \(pid'):
        workers.play(tree.play_tree, seeded(2), PLACE, stage(crowd))


def test_a_fault_of_the_task_is_no_death_of_a_worker(crowd):
    with pytest.raises(AttributeError, match='train'):
        workers.play(tree.play_tree, [Seeded('no task', 0)], PLACE, stage(crowd))
    assert crowd.metrics()['workers/deaths'] == 0


def test_workers_that_find_no_room_end_the_run_and_say_what_there_is(cluster):
    settings = WorkerSettings(cpus=100, start_s=1.0)
    crowd = Workers(Scripted(pathlib.Path()), 1, Crew(TOKENIZER, functools.partial(Scripted, pathlib.Path())), settings)
    with pytest.raises(WorkersLostError, match=r"has not begun after 1 s: 1 workers need 100 CPUs.*'CPU': 2.0"):
        workers.play(tree.play_tree, seeded(1), PLACE, stage(crowd))
    crowd.close()


def test_without_ray_workers_are_refused_with_the_remedy_and_play_here_goes_on(monkeypatch, tmp_path, tiny):
    monkeypatch.setitem(sys.modules, 'ray', None)
    with pytest.raises(ModuleNotFoundError, match=r"pip install -e '\.\[ray\]'"):
        workers.connect('', 2.0)
    module, _ = tiny
    engine = embedded(Experiment(rollout_workers=0), SimpleNamespace(module=module, tokenizer=TOKENIZER), tmp_path)
    assert type(engine) is JaxEngine


@pytest.mark.parametrize('change', [{'cpus': -1.0}, {'deaths': -1}, {'start_s': 0.0}, {'stall_s': 0.0}])
def test_settings_that_no_worker_could_keep_are_refused(change):
    with pytest.raises(ValueError, match=next(iter(change))):
        WorkerSettings(**change)
