"""The SGLang client against real servers (CPU, see launch/cpu), alone and behind a proxy that breaks what they say."""

import asyncio
import contextlib
import dataclasses
import functools
import itertools
import json
import math
import os
import pathlib
import signal
import time
import urllib.request
from collections.abc import Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import ray
from flax import linen as nn

from launch.sglang import install
from mallm import rng, servers
from mallm.envs.sokoban_task import SokobanTask
from mallm.errors import EngineError
from mallm.experiment import (
    EvaluationSettings,
    Experiment,
    LearningSettings,
    ModelSettings,
    SamplingSettings,
    WarmStartSettings,
)
from mallm.io.checkpoint import Checkpoints
from mallm.models import lora
from mallm.models.config import Architecture
from mallm.models.lora import Lora
from mallm.models.transformer import Transformer
from mallm.rollout import replies, sglang, tree, workers
from mallm.rollout.chat import TinyTokenizer
from mallm.rollout.engine import SamplingParams
from mallm.rollout.fleet import Fleet, Limits
from mallm.rollout.sglang import SGLangEngine
from mallm.rollout.workers import Crew, Seeded, Workers, WorkerSettings
from mallm.serving import Publisher, follower, seen_by, shape_of, weights_folder
from mallm.train import TooManyFaultsError, train
from mallm.types import Answer, Prompt
from tests.rollout.broken_proxy import Proxy

TOKENIZER = TinyTokenizer()
ARCH = Architecture(len(TOKENIZER), width=32, layers=2, heads=2, kv_heads=1, head_dim=16, ffn=64)
WHOLE = Transformer(ARCH)
KIND = Lora(4, 8.0, rs=True)
MODULE = WHOLE.clone(lora=KIND)
QUICK = Limits(request_s=60.0, connect_s=30.0, tries=4, backoff_s=0.05, patience_s=2.0)
PROMPT = Prompt('plan', (), TOKENIZER.encode('#. @ $/  #>'))
GREEDY = SamplingParams(8, 0.0)
START_S = 600.0


@jax.jit
def born(key: jax.Array) -> Any:
    return nn.unbox(MODULE.init(key, jnp.zeros((1, 2), jnp.int32)))


def weights(seed: int) -> Any:
    params = born(jax.random.key(seed))['params']
    return params | {'embedding': params['embedding'] * 3}  # farther from uniform than at birth


def adapter(seed: int) -> Any:
    draw = np.random.default_rng(seed)
    return jax.tree.map(lambda leaf: np.float32(draw.normal(size=leaf.shape) * 0.3), born(jax.random.key(0))['lora'])


@jax.jit
def forward(variables: Any, row_1T: jax.Array) -> jax.Array:
    module = MODULE if 'lora' in variables else WHOLE
    return module.apply(variables, row_1T)[0]


def logps(variables: Any, prompt: Prompt, ids: Sequence[int], temperature: float = 1.0) -> np.ndarray:
    """The learner's own log-probability of each id of an answer, [S]."""
    row = np.zeros((1, 48), np.int32)
    row[0, : len(prompt.ids) + len(ids)] = [*prompt.ids, *ids]
    start = len(prompt.ids) - 1
    logits_SV = np.asarray(forward(variables, row))[start : start + len(ids)].astype(np.float64) / temperature
    logits_SV -= logits_SV.max(-1, keepdims=True)
    logp_SV = logits_SV - np.log(np.exp(logits_SV).sum(-1, keepdims=True))
    return logp_SV[np.arange(len(ids)), list(ids)]


def greedy(variables: Any, prompt: Prompt, limit: int = GREEDY.max_tokens) -> tuple[int, ...]:
    """The learner's own most likely answer."""
    ids: list[int] = []
    row = np.zeros((1, 48), np.int32)
    while len(ids) < limit and TOKENIZER.end not in ids:
        row[0, : len(prompt.ids) + len(ids)] = [*prompt.ids, *ids]
        ids.append(int(np.asarray(forward(variables, row))[len(prompt.ids) + len(ids) - 1].argmax()))
    return tuple(ids)


@dataclasses.dataclass(frozen=True)
class Bench:
    """A place for weights, and the first model, which servers are started with."""

    publish: Publisher
    model: str
    logs: pathlib.Path

    def start(self, name: str, port: int = 0) -> servers.Started:
        spec = servers.Spec(self.model, adapters=4, rank=KIND.rank, port=port, tokens=16384)
        one, process = servers.start(spec, self.logs / f'{name}.log', tethered=True)
        self.kept.append((one, process))
        return one

    kept: list = dataclasses.field(default_factory=list)


@pytest.fixture(scope='module')
def bench(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Bench]:
    """Installs SGLang where it is missing. If that fails: `python -m launch.sglang install` says why."""
    install('cpu')
    with weights_folder(seen_by([], tmp_path_factory.getbasetemp())) as folder:
        first = Publisher(folder / 'first', WHOLE)('shared', weights(0), 0).folder
        made = Bench(Publisher(folder / 'later', MODULE), first, tmp_path_factory.mktemp('servers'))
        yield made
        for one, _ in made.kept:
            servers.stop(one.pid)


@pytest.fixture(scope='module')
def both(bench: Bench) -> tuple[servers.Started, servers.Started]:
    """Two servers that start at the same time."""
    pair = bench.start('first'), bench.start('second')
    for one, process in bench.kept:
        servers.wait(one, process, START_S)
    return pair


@pytest.fixture(scope='module')
def url(both) -> str:
    return both[0].url


@contextlib.contextmanager
def client(bench: Bench, *urls: str, policies: Sequence[str] = (), limits: Limits = QUICK) -> Iterator[SGLangEngine]:
    """A client of one policy 'shared' with full weights, or of adapters over a base by the names given."""
    root = pathlib.Path(bench.model).parents[1]
    publish = Publisher(root / f'{time.monotonic_ns():x}', MODULE if policies else WHOLE)
    endpoints = {policy: list(urls) for policy in policies or ('shared',)}
    engine = SGLangEngine(
        TOKENIZER, ARCH.vocab, endpoints, publish, adapters=bool(policies), shape=shape_of(ARCH), limits=limits
    )
    with contextlib.closing(engine):
        yield engine


def ask(engine: SGLangEngine, policy: str, *prompts: Prompt, k: int = 1, params: SamplingParams = GREEDY) -> list[Any]:
    """For each of the prompts, all asked at once, its answers, or the error that came in their place."""

    async def every() -> list[Any]:
        asked = [engine.sample(policy, prompt, (0, i), k, params) for i, prompt in enumerate(prompts)]
        return list(await asyncio.gather(*asked, return_exceptions=True))

    return asyncio.run(every())


def one(engine: SGLangEngine, policy: str = 'shared', prompt: Prompt = PROMPT, **how: Any) -> tuple[Answer, ...]:
    (answers,) = ask(engine, policy, prompt, **how)
    if isinstance(answers, BaseException):
        raise answers
    return answers


def boards(count: int) -> list[Prompt]:
    draw = np.random.default_rng(5)
    return [Prompt('plan', (), tuple(int(i) for i in draw.integers(2, ARCH.vocab, 12))) for _ in range(count)]


# --- a sound server


def test_ids_and_log_probs_are_the_learners_at_every_temperature(bench, url):
    """Ratios learner / server are 1 within 0.01; greedy tokens are the same, with log-prob 0 as in every engine."""
    with client(bench, url) as engine:
        engine.load('shared', weights(1), 3)
        (best,) = one(engine)
        assert best.ids == greedy({'params': weights(1)}, PROMPT) and set(best.logps) == {0.0} and best.version == 3
        for temperature in (0.6, 1.0, 1.3):
            params = SamplingParams(8, temperature)
            for prompt, answers in zip(boards(4), ask(engine, 'shared', *boards(4), k=4, params=params), strict=True):
                for answer in answers:
                    mine = logps({'params': weights(1)}, prompt, answer.ids, temperature)
                    assert np.exp(mine - answer.logps) == pytest.approx(np.ones(len(mine)), abs=0.01)
                    assert answer.text == TOKENIZER.decode(answer.ids) and answer.version == 3
                    assert (answer.finish == 'stop') == (answer.ids[-1] == TOKENIZER.end)
                    assert answer.finish == 'stop' or len(answer.ids) == 8


def test_candidates_are_drawn_from_the_learners_distribution_and_independently_of_each_other(bench, url):
    """Equal log-probs do not show that: they are of whatever was drawn. Counts within 5 standard deviations."""
    asked, params = 150, SamplingParams(1, 1.5, spread=2.0)
    with client(bench, url) as engine:
        engine.load('shared', weights(1), 1)
        groups = ask(engine, 'shared', *[PROMPT] * asked, k=8, params=params)
    drawn = np.array([[answer.ids[0] for answer in answers] for answers in groups])
    chance = np.array([
        np.exp([logps({'params': weights(1)}, PROMPT, (token,), temperature)[0] for token in range(ARCH.vocab)])
        for temperature in params.temperatures(8)
    ])  # fmt: skip
    assert 0.2 < chance.max(1).mean() < 0.8  # neither flat nor decided
    counts, expected = np.bincount(drawn.ravel(), minlength=ARCH.vocab), asked * chance.sum(0)
    assert (abs(counts - expected) < 5 * np.sqrt(expected) + 5).all()
    for i, j in itertools.combinations(range(8), 2):
        agree, wanted = np.mean(drawn[:, i] == drawn[:, j]), chance[i] @ chance[j]
        assert agree == pytest.approx(wanted, abs=5 * math.sqrt(wanted * (1 - wanted) / asked)), (i, j)


def generated(url: str, body: dict[str, Any]) -> list[dict[str, Any]]:
    """What a server itself replies to a request."""
    asked = urllib.request.Request(f'{url}/generate', json.dumps(body).encode(), {'Content-Type': 'application/json'})
    with urllib.request.urlopen(asked, timeout=60) as reply:
        return json.load(reply)


def test_k_candidates_of_one_prompt_differ_and_share_its_place_in_the_cache(bench, url):
    """A17, and a spread of temperatures: candidate j's log-probs are those at its own temperature."""
    with client(bench, url) as engine:
        engine.load('shared', weights(1), 0)
        alike = one(engine, k=8, params=SamplingParams(8, 1.0))
        again = one(engine, k=8, params=SamplingParams(8, 1.0))
        assert len({answer.ids for answer in alike}) >= 6
        for body in (SamplingParams(2, 1.0), SamplingParams(2, 0.7, spread=3.0)):  # once with n = K, once as a batch
            rows = generated(url, replies.request(PROMPT, 8, body, ends=TOKENIZER.ends, adapter=None, stops=False))
            assert [row['meta_info']['cached_tokens'] for row in rows] == [len(PROMPT.ids) - 1] * 8
        assert {answer.ids for answer in alike} != {answer.ids for answer in again}
        wide = SamplingParams(8, 0.7, spread=3.0)
        for answer, temperature in zip(one(engine, k=4, params=wide), wide.temperatures(4), strict=True):
            mine = logps({'params': weights(1)}, PROMPT, answer.ids, temperature)
            assert np.exp(mine - answer.logps) == pytest.approx(np.ones(len(mine)), abs=0.01)
        assert engine.metrics()['prompts'] == 3


def test_the_token_that_completes_a_stop_string_is_trained_on_and_the_text_ends_before_it(bench, url):
    """The server has no tokenizer, so it goes on; what came after the string is not part of the answer."""
    stop = ('U', '.', '7', '$')
    with client(bench, url) as engine:
        engine.load('shared', weights(1), 0)
        params = SamplingParams(8, 3.0, stop=stop)
        drawn = [answer for answers in ask(engine, 'shared', *boards(4), k=8, params=params) for answer in answers]
    stopped = [answer for answer in drawn if TOKENIZER.decode(answer.ids[-1:]) in stop]
    assert len(stopped) >= 4
    for answer in drawn:
        text = TOKENIZER.decode(answer.ids)
        assert not any(string in text[:-1] for string in stop)
        assert answer.text == (text[:-1] if answer in stopped else text)
        assert len(answer.logps) == len(answer.ids) and (answer.finish == 'stop' or len(answer.ids) == 8)


def test_new_weights_are_what_is_sampled_at_once_even_where_the_prompt_was_cached(bench, url):
    """A18: the same prompt before and after; tied heads come along, since the embedding is what changes most."""
    with client(bench, url) as engine:
        answers = []
        for version, seed in enumerate((1, 2, 1)):
            engine.load('shared', weights(seed), version)
            (answer,) = one(engine)
            assert answer.ids == greedy({'params': weights(seed)}, PROMPT) and answer.version == version
            answers.append(answer.ids)
        told = engine.metrics()
    assert answers[0] != answers[1] and answers[0] == answers[2]
    assert told['sync/bytes'] > 3 * 4 * 10_000 and told['seconds/sync'] > 0


def test_each_role_is_answered_by_its_own_adapter_at_the_learners_scale(bench, url):
    """A19: rank 4, alpha 8, rsLoRA: scale 4, though SGLang knows no rsLoRA. Mixed in one batch, then one is renewed,
    then the server is thought dead for a moment, and still has what it had, and only that."""
    with client(bench, url, policies=('plan', 'tool')) as engine:
        base = weights(3)
        engine.load_base(base)
        held = {'plan': adapter(1), 'tool': adapter(2)}
        for policy, its in held.items():
            engine.load(policy, its, 0)

        def learners(policy: str) -> tuple[int, ...]:
            return greedy(lora.variables(held[policy], base), PROMPT)

        async def mixed() -> list[tuple[Answer, ...]]:
            return await asyncio.gather(*(engine.sample(p, PROMPT, (0,), 1, GREEDY) for p in ('plan', 'tool') * 3))

        assert [answer.ids for (answer,) in asyncio.run(mixed())] == [learners('plan'), learners('tool')] * 3
        assert len({learners('plan'), learners('tool'), greedy({'params': base}, PROMPT)}) == 3
        held['tool'] = adapter(7)
        engine.load('tool', held['tool'], 1)
        assert [(a.ids, a.version) for (a,) in asyncio.run(mixed())[:2]] == [
            (learners('plan'), 0),
            (learners('tool'), 1),
        ]
        engine._loop.call_soon_threadsafe(engine._lost, engine._fleet.servers[0], ConnectionError('for a moment'))
        assert [answer.ids for (answer,) in asyncio.run(mixed())[:2]] == [learners('plan'), learners('tool')]
        loaded = json.loads(sglang.ask(url, '/v1/models', seconds=10))['data']
        assert sorted(of for of in (model['id'] for model in loaded) if engine._run in of) == sorted(
            engine._wanted[policy].name for policy in ('plan', 'tool')
        )
        (drawn,) = one(engine, 'plan', params=SamplingParams(8, 1.3))
        mine = logps(lora.variables(held['plan'], base), PROMPT, drawn.ids, 1.3)
        assert np.exp(mine - drawn.logps) == pytest.approx(np.ones(len(mine)), abs=0.01)


def test_a_ray_worker_plays_greedy_trees_as_this_process_does_with_the_weights_of_the_moment(
    bench, url, monkeypatch, request
):
    """Full weights and adapters, new ones in between: same prompts, ids and versions; metrics are those of both."""
    for name, value in {'USAGE_STATS_ENABLED': '0', 'AUTH_MODE': 'disabled', 'worker_niceness': '0'}.items():
        monkeypatch.setenv(f'RAY_{name}', value)
    worlds, place = [Seeded(SokobanTask(), 100 + i) for i in range(3)], tree.Place(7, rng.TRAIN, 3, env=40)
    if workers.connect('', 1.0):
        request.addfinalizer(ray.shutdown)
    for names in ((), ('plan', 'tool')):
        cast = {role: role if names else 'shared' for role in ('tool', 'plan')}
        sampler = tree.Sampler(2, 2, 1.0, tree.greedy, dict.fromkeys(cast, GREEDY))
        make = functools.partial(
            follower, TOKENIZER, ARCH.vocab, {policy: [url] for policy in names or ('shared',)},
            adapters=bool(names), shape=shape_of(ARCH), limits=QUICK,
        )  # fmt: skip
        with client(bench, url, policies=names) as engine:
            crowd = Workers(engine, 1, Crew(TOKENIZER, make), WorkerSettings())
            with contextlib.closing(crowd):
                crowd.load_base(weights(3) if names else None)
                rounds = []
                for version in (4, 5):
                    for i, policy in enumerate(names or ('shared',)):
                        crowd.load(policy, (adapter if names else weights)(10 * i + version), version)
                    here, there = (
                        workers.play(tree.play_tree, worlds, place, tree.Stage(sampler, which, TOKENIZER, cast))
                        for which in (engine, crowd)
                    )
                    assert here == there and [trajectory.fault for trajectory in there] == [None] * 3
                    groups = [group for t in there for turn in t.turns for group in turn.groups]
                    assert {c.answer.version for group in groups for c in group.candidates} == {version}
                    told = crowd.metrics()
                    assert (told['prompts'], told['servers/up'], told['requests/retried']) == (2 * len(groups), 1, 0)
                    rounds.append(there)
                assert rounds[0] != rounds[1]


# --- servers that die


def kill(server: servers.Started) -> None:
    """kill -9 of the server's whole group; its keeper ends by itself."""
    children = pathlib.Path(f'/proc/{server.pid}/task/{server.pid}/children').read_text().split()
    os.killpg(int(children[0]), signal.SIGKILL)


def test_a_step_finishes_on_the_other_server_and_a_restarted_one_gets_the_present_weights(bench, both):
    """A20: kill -9 of one of two in the middle of a rollout."""
    mine = {'params': weights(2)}
    with client(bench, *(server.url for server in both)) as engine:
        engine.load('shared', weights(2), 5)
        long = SamplingParams(24, 1.5)

        async def rollout() -> list[Any]:
            asked = [asyncio.ensure_future(engine.sample('shared', p, (i,), 4, long)) for i, p in enumerate(boards(24))]
            await asyncio.wait(asked, return_when=asyncio.FIRST_COMPLETED)
            kill(both[1])
            return list(await asyncio.gather(*asked, return_exceptions=True))

        outcomes = asyncio.run(rollout())
        assert [o for o in outcomes if isinstance(o, BaseException)] == []
        assert all(len(answer.ids) > 0 for answers in outcomes for answer in answers)
        assert engine.metrics()['servers/up'] == 1
        again = bench.start('second again', port=int(both[1].url.rpartition(':')[2]))
        servers.wait(again, bench.kept[-1][1], START_S)
        until = time.monotonic() + 60
        while engine._fleet.servers[1].fault and time.monotonic() < until:
            time.sleep(0.2)
        told = engine.metrics()
        assert told['servers/up'] == 2 and told['servers/revived'] == 1
        engine._fleet.down(engine._fleet.servers[0], 'so that the restarted one answers')
        (answer,) = one(engine)
        assert answer.ids == greedy(mine, PROMPT) != greedy({'params': weights(0)}, PROMPT) and answer.version == 5


def test_with_all_servers_dead_the_run_saves_what_was_learned_and_ends_and_later_goes_on(bench, url, tmp_path):
    """A20: they die after the first step's weights; the run ends within its patience, and can be resumed."""
    endpoints = tmp_path / 'servers.json'
    experiment = Experiment(
        steps=2, runs=str(tmp_path / 'runs'), wandb='disabled', save_every=100, engine='sglang',
        endpoints=str(endpoints), serving=QUICK,
        model=ModelSettings(width=32, layers=2, heads=2, kv_heads=1, head_dim=16, ffn=64),
        sampling=SamplingSettings(envs=4, k=4, turns=1), warm_start=WarmStartSettings(steps=0),
        learning=LearningSettings(step_groups=8, micro_groups=8),
        evaluation=EvaluationSettings(every=0, report_boards=2, replays=1),
    )  # fmt: skip
    with Proxy(url) as between:
        endpoints.write_text(json.dumps({'*': [between.url]}))
        between.dies_after('/update_weights_from_disk', 3)
        with pytest.raises(TooManyFaultsError, match='engine unreachable'):
            train(experiment)
        folder = tmp_path / 'runs' / experiment.folder_name
        assert Checkpoints(folder).latest() == 1
    with Proxy(url) as between:
        endpoints.write_text(json.dumps({'*': [between.url]}))
        told = train(experiment, resume=folder.name)
    assert told['faults'] == 0 and Checkpoints(folder).latest() == 2


# --- replies that are wrong


@pytest.fixture
def proxy(url) -> Iterator[Proxy]:
    with Proxy(url) as between:
        yield between


PASSING = {
    '503': 'engine busy',
    'truncated': 'engine malformed',
    'closed': 'engine unreachable',
    'one log-prob missing': 'engine malformed',
    'log-prob above 0': 'engine malformed',
    'log-prob NaN': 'engine malformed',
    'id beyond the vocabulary': 'engine malformed',
    'no answer': 'engine malformed',
    'other weights': 'engine stale',
    'aborted': 'engine busy',
    'hangs': 'engine overdue',
}


@pytest.mark.parametrize('how', PASSING)
def test_a_passing_fault_is_counted_tried_again_and_never_seen_in_an_answer(bench, proxy, how):
    with client(bench, proxy.url, limits=dataclasses.replace(QUICK, request_s=3.0, patience_s=20.0)) as engine:
        engine.load('shared', weights(1), 0)
        proxy.breaks(how, times=2)
        (answer,) = one(engine)
        told = engine.metrics()
    assert answer.ids == greedy({'params': weights(1)}, PROMPT)
    kind = PASSING[how].replace(' ', '_')
    assert told[f'requests/{kind}'] >= 1 and told['requests/retried'] >= 1


@pytest.mark.parametrize('how', ['503', 'truncated', 'log-prob above 0', 'other weights', 'closed'])
def test_a_fault_that_stays_fails_the_episode_with_its_kind_in_bounded_time(bench, proxy, how):
    with client(bench, proxy.url) as engine:
        engine.load('shared', weights(1), 0)
        proxy.breaks(how, times=1000)
        begun = time.monotonic()
        (error,) = ask(engine, 'shared', PROMPT)
        assert isinstance(error, EngineError) and error.kind.startswith('engine ')
        assert time.monotonic() - begun < 60


def test_a_server_with_another_model_is_refused_when_weights_are_loaded(bench, proxy):
    proxy.breaks('other model', times=1000)
    with client(bench, proxy.url) as engine, pytest.raises(replies.MisfitError, match='runs another model'):
        engine.load('shared', weights(1), 0)


def test_a_server_with_another_vocabulary_is_refused_before_weights_would_end_it(bench, url):
    """SGLang 0.5.23 ends when it is given an embedding of another size."""
    with client(bench, url) as engine:
        engine.load('shared', weights(1), 0)
        with client(bench, url) as other:
            other._shape = shape_of(dataclasses.replace(ARCH, vocab=ARCH.vocab + 64))
            with pytest.raises(replies.MisfitError, match='vocab_size'):
                other.load('shared', weights(1), 0)
        assert one(engine)[0].ids == greedy({'params': weights(1)}, PROMPT)


def test_a_server_that_computes_something_else_with_our_weights_is_refused(bench, proxy):
    proxy.breaks('other log-probs of the prompt', times=1000)
    with client(bench, proxy.url) as engine, pytest.raises(replies.MisfitError, match="from the learner's"):
        engine.load('shared', weights(1), 0)


def test_without_a_server_at_the_first_load_the_run_ends_at_once(bench):
    with client(bench, 'http://127.0.0.1:9') as engine, pytest.raises(replies.UnreachableError, match='Cannot connect'):
        engine.load('shared', weights(1), 0)


# --- without a server


def test_full_weights_of_two_policies_do_not_share_a_server():
    with pytest.raises(ValueError, match='give each its own'):
        SGLangEngine(
            TOKENIZER, ARCH.vocab, {'a': ['http://x'], 'b': ['http://x']}, lambda *_: None, adapters=False
        )  # fmt: skip


def test_prompts_that_begin_alike_meet_at_one_server_unless_it_is_much_busier():
    fleet = Fleet({'a': ['http://x', 'http://y']}, Limits(slack=2))
    for server in fleet.servers:
        server.up = True
    usual = fleet.pick('a', (1, 2, 3))
    assert usual is not None and fleet.pick('a', (1, 2, 3)) is usual
    usual.in_flight = 3
    assert fleet.pick('a', (1, 2, 3)) is not usual
    assert fleet.pick('a', (1, 2, 3), avoid=usual) is not usual
    fleet.down(next(server for server in fleet.servers if server is not usual), 'gone')
    assert fleet.pick('a', (1, 2, 3), avoid=usual) is usual


def test_a_row_that_spans_versions_carries_the_spans():
    meta = {
        'weight_version': 'b',
        'weight_versions': [{'version': 'a', 'start': 0, 'end': 3}, {'version': 'b', 'start': 3, 'end': 5}],
    }
    number = {'a': 6, 'b': 7}.get
    assert replies.versions(meta, 5, number) == (6, ((6, 3), (7, 2)))
    assert replies.shortened(((6, 3), (7, 2)), 4) == ((6, 3), (7, 1))
    assert replies.shortened(((6, 3), (7, 2)), 3) == ()
    with pytest.raises(replies.StaleError):
        replies.versions(meta, 5, {'b': 7}.get)


def test_log_probs_that_cannot_be_right_are_refused():
    sound = [[-0.5, 3, None], [-0.1, 1, None]]
    assert replies.checked([3, 1], sound, 2, 2, 5) == [-0.5, -0.1]
    for ids, pairs, count in [
        ([3, 1], sound[:1], 2), ([3, 1], [[-0.5, 3], [0.2, 1]], 2), ([3, 1], [[-0.5, 3], [math.nan, 1]], 2),
        ([3, 1], [[-0.5, 3], [-0.1, 2]], 2), ([3, 9], [[-0.5, 3], [-0.1, 9]], 2), ([], [], 0), ([3, 1], sound, 3),
        ([3, 1], [[None, 3], [-0.1, 1]], 2), ([3, 1, 1], [*sound, [-1.0, 1]], 3),
    ]:  # fmt: skip
        with pytest.raises(replies.MalformedError):
            replies.checked(ids, pairs, count, 2, 5)
