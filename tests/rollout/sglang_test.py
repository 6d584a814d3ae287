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
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import ray

import launch.sglang
from mallm import keeper, rng, servers
from mallm.envs.sokoban_task import SokobanTask
from mallm.errors import EngineError
from mallm.experiment import (
    AlgorithmSettings,
    EvaluationSettings,
    Experiment,
    LearningSettings,
    ModelSettings,
    SamplingSettings,
    WarmStartSettings,
)
from mallm.io.checkpoint import Checkpoints
from mallm.models import lora
from mallm.overlap import OverlapSettings
from mallm.rollout import replies, sglang, tree, workers
from mallm.rollout.engine import SamplingParams
from mallm.rollout.fleet import Fleet, Limits
from mallm.rollout.sglang import SGLangEngine
from mallm.rollout.workers import Crew, Seeded, WorkerSettings
from mallm.serving import Publisher, follower, seen_by, shape_of, weights_folder
from mallm.train import TooManyFaultsError, train
from mallm.types import Answer
from tests.rollout.broken_proxy import Proxy
from tests.rollout.served import (
    ARCH,
    GREEDY,
    KIND,
    PROMPT,
    QUICK,
    START_S,
    TOKENIZER,
    WHOLE,
    Bench,
    adapter,
    ask,
    boards,
    client,
    greedy,
    logps,
    one,
    weights,
)
from tests.rollout.workers_test import Watched

KEY = 'only-who-knows-this-is-answered'


@pytest.fixture(scope='module')
def bench(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Bench]:
    """Servers with a key. Installs SGLang where it is missing; where that fails, `launch.sglang install` says why."""
    launch.sglang.install('cpu')
    with weights_folder(seen_by([], tmp_path_factory.getbasetemp())) as folder, pytest.MonkeyPatch.context() as patch:
        patch.setenv(keeper.KEY, KEY)
        first = Publisher(folder / 'first', WHOLE)('shared', weights(0), 0).folder
        made = Bench(first, tmp_path_factory.mktemp('servers'))
        yield made
        for one, _ in made.kept:
            servers.stop(one.pid)


@pytest.fixture(scope='module')
def both(bench: Bench) -> tuple[servers.Started, servers.Started]:
    """Two servers that start at the same time."""
    pair = bench.start('first'), bench.start('second')
    for started, process in bench.kept:
        servers.wait(started, process, START_S)
    return pair


@pytest.fixture(scope='module')
def url(both) -> str:
    return both[0].url


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
    with client(bench, url, limits=dataclasses.replace(QUICK, patience_s=60.0)) as engine:  # all are asked at once
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
    headers = {'Content-Type': 'application/json', 'Authorization': f'Bearer {KEY}'}
    asked = urllib.request.Request(f'{url}/generate', json.dumps(body).encode(), headers)
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
        loaded = json.loads(sglang.ask(url, '/v1/models', key=KEY, seconds=10))['data']
        assert sorted(of for of in (model['id'] for model in loaded) if engine._run in of) == sorted(
            engine._wanted[policy].name for policy in ('plan', 'tool')
        )
        (drawn,) = one(engine, 'plan', params=SamplingParams(8, 1.3))
        mine = logps(lora.variables(held['plan'], base), PROMPT, drawn.ids, 1.3)
        assert np.exp(mine - drawn.logps) == pytest.approx(np.ones(len(mine)), abs=0.01)


def test_a_ray_worker_plays_greedy_trees_as_this_process_does_with_the_weights_of_the_moment(
    bench, url, monkeypatch, request
):
    """Full weights and adapters, new ones in between: same prompts, ids and versions; metrics are those of both. At
    last the worker is killed in mid step, and another plays all of it again."""
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
            crowd = Watched(engine, 1, Crew(TOKENIZER, make), WorkerSettings())
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
                killed: list[int] = []

                def kill_first(streams, done, killed=killed) -> None:
                    [pid] = {stream.pid for stream in streams.values()} or {0}
                    if pid and not killed:
                        os.kill(pid, signal.SIGKILL)
                        killed.append(pid)

                crowd.after = kill_first
                there = workers.play(tree.play_tree, worlds, place, tree.Stage(sampler, crowd, TOKENIZER, cast))
                assert there == rounds[1] and crowd.metrics()['workers/deaths'] == len(killed) == 1


# --- servers that die


def kill(server: servers.Started) -> None:
    """kill -9 of the server's whole group; its keeper ends by itself."""
    children = pathlib.Path(f'/proc/{server.pid}/task/{server.pid}/children').read_text().split()
    os.killpg(int(children[0]), signal.SIGKILL)


def test_a_step_finishes_on_the_other_server_and_a_restarted_one_gets_the_present_weights(
    bench, both, tmp_path, request
):
    """A20: kill -9 of one of two in the middle of a rollout; `launch.sglang` starts it anew, and stops it."""
    mine = {'params': weights(2)}
    with client(bench, *(server.url for server in both)) as engine:
        engine.load('shared', weights(2), 5)
        long = SamplingParams(24, 1.5)

        async def rollout() -> list[Any]:
            asked = [asyncio.ensure_future(engine.sample('shared', p, (), 4, long)) for p in boards(200)]
            await asyncio.wait(asked, return_when=asyncio.FIRST_COMPLETED)
            kill(both[1])
            return list(await asyncio.gather(*asked, return_exceptions=True))

        outcomes = asyncio.run(rollout())
        assert [o for o in outcomes if isinstance(o, BaseException)] == []
        assert all(len(answer.ids) > 0 for answers in outcomes for answer in answers)
        assert engine.metrics()['servers/up'] == 1
        file = str(tmp_path / 'servers.json')
        words = ['--adapters', '4', '--rank', str(KIND.rank), '--tokens', '16384', '--logs', str(tmp_path)]
        words += ['--model', bench.model, '--port', both[1].url.rpartition(':')[2], '--out', file]
        assert launch.sglang.main(['start', *words]) == 0
        request.addfinalizer(lambda: pathlib.Path(file).exists() and launch.sglang.main(['stop', '--out', file]))
        assert launch.sglang.main(['health', '--out', file]) == 0
        until = time.monotonic() + 60
        while not engine._counts['revived'] and time.monotonic() < until:
            time.sleep(0.2)
        told = engine.metrics()
        assert told['servers/up'] == 2 and told['servers/revived'] == 1
        engine._fleet.down(engine._fleet.servers[0], 'so that the restarted one answers')
        (answer,) = one(engine)
        assert answer.ids == greedy(mine, PROMPT) != greedy({'params': weights(0)}, PROMPT) and answer.version == 5
    [started] = launch.sglang.known(pathlib.Path(file))
    assert started.url == both[1].url and KEY not in pathlib.Path(started.log).read_text()
    assert launch.sglang.main(['stop', '--out', file]) == 0
    assert not servers.healthy(started.url) and not pathlib.Path(file).exists()


def small(folder: pathlib.Path, **changes: Any) -> Experiment:
    """A run of two steps on the servers that `folder` names."""
    return dataclasses.replace(
        Experiment(
            steps=2, runs=str(folder / 'runs'), wandb='disabled', save_every=100, engine='sglang',
            endpoints=str(folder / 'servers.json'), serving=QUICK,
            model=ModelSettings(width=32, layers=2, heads=2, kv_heads=1, head_dim=16, ffn=64),
            sampling=SamplingSettings(envs=4, k=4, turns=1), warm_start=WarmStartSettings(steps=0),
            learning=LearningSettings(step_groups=0, micro_groups=8),
            evaluation=EvaluationSettings(every=0, report_boards=2, replays=1),
        ),
        **changes,
    )  # fmt: skip


@pytest.mark.parametrize('updates, saved', [(0, 0), (1, 1)])
def test_with_all_servers_dead_the_run_saves_what_was_learned_and_ends_and_later_goes_on(url, tmp_path, updates, saved):
    """A20: they die in the first report, or after the first step's weights; the run ends within its patience, not with
    status 0, and can be resumed."""
    experiment = small(tmp_path, warm_start=WarmStartSettings(steps=1, rows=8))
    folder = tmp_path / 'runs' / experiment.folder_name
    with Proxy(url) as between:
        (tmp_path / 'servers.json').write_text(json.dumps({'*': [between.url]}))
        between.dies_after('/update_weights_from_disk', 2 + updates)  # at birth and after the warm start
        begun = time.monotonic()
        with pytest.raises(TooManyFaultsError, match='engine unreachable'):
            train(experiment)
        assert time.monotonic() - begun < 120 and Checkpoints(folder).latest() == saved
    with Proxy(url) as between:
        (tmp_path / 'servers.json').write_text(json.dumps({'*': [between.url]}))
        told = train(experiment, resume=folder.name)
    assert told['faults'] == 0 and Checkpoints(folder).latest() == 2
    assert not [path for path in folder.rglob('*') if path.is_file() and KEY.encode() in path.read_bytes()]
    rows = [json.loads(line) for line in (folder / 'metrics.jsonl').read_text().splitlines()]
    assert [row['step'] for row in rows if row['axis'] == 'rollout'] == [0, 1]
    assert len([row for row in rows if row['axis'] == 'warm_start']) == 1


OVERLAPS = {'in turn': (OverlapSettings(), [0, 0, 0]), 'ahead': (OverlapSettings(staleness=1), [0, 1, 1]),
            'early': (OverlapSettings(early=True), [0, 0, 0])}  # fmt: skip


@pytest.mark.parametrize('mode', OVERLAPS)
def test_a_run_overlaps_as_it_is_told_to_on_servers_too(url, tmp_path, mode):
    overlap, stale = OVERLAPS[mode]
    (tmp_path / 'servers.json').write_text(json.dumps({'*': [url]}))
    old_policy = 'learner' if mode == 'ahead' else 'sampler'
    train(small(tmp_path, steps=3, overlap=overlap, algorithm=AlgorithmSettings(old_policy=old_policy)))
    [file] = tmp_path.glob('runs/*/metrics.jsonl')
    rows = [row for row in map(json.loads, file.read_text().splitlines()) if row['axis'] == 'rollout']
    assert [row['staleness_max'] for row in rows] == stale
    assert all(row['faults'] == 0 and row['requests/retried'] == 0 and row['sync/bytes'] > 0 for row in rows)


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


@pytest.mark.parametrize('how', ['503', 'closed', 'truncated', 'hangs'])
def test_a_server_that_fails_while_it_takes_weights_answers_nothing_until_it_has_them(bench, proxy, how):
    limits = dataclasses.replace(QUICK, sync_s=3.0, patience_s=20.0)
    with client(bench, proxy.url, limits=limits) as engine:
        engine.load('shared', weights(1), 0)
        proxy.breaks(how, times=2, path='/update_weights_from_disk')
        engine.load('shared', weights(2), 1)
        assert engine.metrics()['servers/up'] == 0
        (answer,) = one(engine)
        assert engine.metrics()['servers/revived'] == 1
    assert answer.ids == greedy({'params': weights(2)}, PROMPT) and answer.version == 1


def test_weights_that_come_while_answers_are_drawn_change_none_of_them(bench, url):
    """SGLang takes them when the requests under way have ended: every row is of one version, by its log-probs too."""
    held = [{'params': weights(seed)} for seed in (1, 2)]
    params = SamplingParams(24, 1.0)
    with client(bench, url) as engine:
        engine.load('shared', weights(1), 0)

        async def rollout() -> list[tuple[Answer, ...]]:
            asked = [
                asyncio.ensure_future(engine.sample('shared', p, (i,), 4, params)) for i, p in enumerate(boards(24))
            ]
            await asyncio.wait(asked, return_when=asyncio.FIRST_COMPLETED)
            await asyncio.to_thread(engine.load, 'shared', weights(2), 1)
            later = [engine.sample('shared', p, (), 4, params) for p in boards(4)]
            return [*await asyncio.gather(*asked), *await asyncio.gather(*later)]

        drawn = asyncio.run(rollout())
    assert {answer.version for answers in drawn[-4:] for answer in answers} == {1}
    for prompt, answers in zip(boards(24) + boards(4), drawn, strict=True):
        for answer in answers:
            mine = logps(held[answer.version], prompt, answer.ids)
            assert answer.spans == () and np.exp(mine - answer.logps) == pytest.approx(np.ones(len(mine)), abs=0.01)


def test_no_more_requests_are_under_way_than_may_be(bench, proxy):
    with client(bench, proxy.url, limits=dataclasses.replace(QUICK, in_flight=3)) as engine:
        engine.load('shared', weights(1), 0)
        assert len(ask(engine, 'shared', *boards(20), params=SamplingParams(8, 1.0))) == 20
    assert 2 <= proxy.most <= 3


def test_a_reply_that_cannot_be_right_is_told_with_the_version_of_its_server(bench, proxy):
    """A21."""
    with client(bench, proxy.url) as engine:
        engine.load('shared', weights(1), 0)
        proxy.breaks('one log-prob missing', times=1000)
        with pytest.raises(replies.MalformedError, match=rf'SGLang {servers.VERSION}.*one is owed for each id'):
            one(engine)


def test_who_has_not_the_key_is_refused_at_once(bench, url):
    with client(bench, url, key='another') as engine, pytest.raises(replies.RefusedError, match='another API key'):
        engine.load('shared', weights(1), 0)
    assert KEY not in (bench.logs / 'first.log').read_text()


def test_a_server_with_another_model_is_refused_when_weights_are_loaded(bench, proxy):
    proxy.breaks('other model', times=1000, path='/model_info')
    with client(bench, proxy.url) as engine, pytest.raises(replies.MisfitError, match='runs another model'):
        engine.load('shared', weights(1), 0)


def test_a_server_that_turns_wrong_in_mid_run_is_left_alone_until_it_is_right_again(bench, proxy):
    with client(bench, proxy.url) as engine:
        engine.load('shared', weights(1), 0)
        proxy.breaks('other model', times=1000, path='/model_info')
        engine.load('shared', weights(2), 1)
        assert engine.metrics()['servers/up'] == 0
        proxy.breaks('', times=0)
        ends = time.monotonic() + 30
        while (told := engine.metrics())['servers/up'] != 1 and time.monotonic() < ends:
            time.sleep(0.1)
        assert told['servers/up'] == 1
        drawn = [answer for answers in ask(engine, 'shared', *boards(8)) for answer in answers]
        assert {answer.version for answer in drawn} == {1}
        assert one(engine)[0].ids == greedy({'params': weights(2)}, PROMPT)


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
