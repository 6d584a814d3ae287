"""The client inside a worker, and the learner's that it follows, on servers that are played by a table."""

import asyncio
import contextlib
import dataclasses
import pickle
import time
from collections.abc import Callable
from typing import Any

import pytest

from mallm.errors import EngineError
from mallm.rollout import replies
from mallm.rollout.chat import TinyTokenizer
from mallm.rollout.engine import SamplingParams
from mallm.rollout.fleet import Limits
from mallm.rollout.follower import Follower, nothing
from mallm.rollout.sglang import BASE, Loaded, Published, SGLangEngine
from mallm.types import Answer, Prompt

TOKENIZER = TinyTokenizer()
URLS = ('http://x', 'http://y')
QUICK = Limits(connect_s=0.1, tries=4, backoff_s=0.01, patience_s=2.0)
NOWHERE = Published('/nowhere', 8)
PROMPTS = [Prompt('plan', (), (2, 3 + i)) for i in range(8)]


@dataclasses.dataclass
class Held:
    """What a server holds, and what it was asked for."""

    version: str = 'default'
    adapters: tuple[str, ...] = ()
    alive: bool = True
    model: str = 'qwen3'
    asked: list[str] = dataclasses.field(default_factory=list)


class Table:
    """In place of HTTP: what each server says."""

    def __init__(self, *args: Any, table: dict[str, Held], **settings: Any) -> None:
        self.table = table
        super().__init__(TOKENIZER, len(TOKENIZER), *args, shape={'model_type': 'qwen3'}, limits=QUICK, **settings)

    async def _call(self, server: Any, method: str, path: str, seconds: float, body: Any = None) -> Any:
        held = self.table[server.url]
        held.asked.append(path)
        if not held.alive:
            raise replies.UnreachableError(f'{server.url} is dead')
        if path == '/update_weights_from_disk':
            held.version = body['weight_version']
        if path == '/v1/models':
            return {'data': [{'id': name} for name in ('model', *held.adapters)]}
        if path != '/generate':
            return {'model_type': held.model, 'model_path': '/nowhere', 'weight_version': held.version}
        if body.get('lora_path', held.version) not in (held.version, *held.adapters):
            raise replies.RefusedError(f'400 unknown adapter {body["lora_path"]}')
        said = {'weight_version': held.version, 'completion_tokens': 1, 'finish_reason': {'type': 'length'}}
        return {'output_ids': [5], 'meta_info': {**said, 'output_token_logprobs': [[-0.5, 5, None]]}}


class TableFollower(Table, Follower):
    pass


class TableEngine(Table, SGLangEngine):
    pass


def follower(table: dict[str, Held], adapters: bool = False) -> Any:
    endpoints = dict.fromkeys(('plan', 'tool') if adapters else ('plan',), URLS)
    return contextlib.closing(TableFollower(endpoints, nothing, table=table, adapters=adapters))


def ask(engine: SGLangEngine) -> list[Answer]:
    async def every() -> list[tuple[Answer, ...]]:
        params = SamplingParams(1)
        return await asyncio.gather(*(engine.sample('plan', prompt, (0,), 1, params) for prompt in PROMPTS))

    return [answer for answers in asyncio.run(every()) for answer in answers]


def until(holds: Callable[[], bool]) -> None:
    end = time.monotonic() + 30
    while not holds():
        assert time.monotonic() < end
        time.sleep(0.01)


@pytest.mark.parametrize('adapters', [False, True])
def test_only_servers_that_hold_what_was_told_are_asked_and_none_is_ever_changed(adapters):
    one, other = Held('base-1', ('plan-7',)) if adapters else Held('plan-7'), Held('base-1' if adapters else 'plan-6')
    told = {'plan': Loaded('plan-7', 7, NOWHERE)} | ({BASE: Loaded('base-1', 0, NOWHERE)} if adapters else {})
    with follower(dict(zip(URLS, (one, other), strict=True)), adapters) as engine:
        asyncio.run(engine.follow(told))
        assert {answer.version for answer in ask(engine)} == {7}
        assert one.asked.count('/generate') == 8 and '/generate' not in other.asked
        other.version, other.adapters = one.version, one.adapters  # the learner has seen to it
        until(lambda: all(server.up for server in engine._fleet.servers))
        assert {answer.version for answer in ask(engine)} == {7} and other.asked.count('/generate') > 0
        one.version, one.adapters = 'default', ()  # started anew
        assert {answer.version for answer in ask(engine)} == {7}
        counts = engine.metrics()
    assert counts['requests/engine_stale'] > 0 and counts['prompts'] == 24 and 'servers/up' not in counts
    assert {*one.asked, *other.asked} <= {'/model_info', '/server_info', '/v1/models', '/generate'}


def test_newer_weights_are_told_and_older_ones_no_longer_taken():
    table = {url: Held('plan-7') for url in URLS}
    with follower(table) as engine:
        asyncio.run(engine.follow({'plan': Loaded('plan-7', 7, NOWHERE)}))
        asyncio.run(engine.follow({'plan': Loaded('plan-8', 8, NOWHERE)}))
        with pytest.raises(replies.UnreachableError, match='not yet'):
            ask(engine)
        for held in table.values():
            held.version = 'plan-8'
        until(lambda: all(server.up for server in engine._fleet.servers))
        assert {answer.version for answer in ask(engine)} == {8}


def test_a_server_that_is_dead_or_runs_another_model_is_left_for_later():
    table = {URLS[0]: Held('plan-7'), URLS[1]: Held(alive=False)}
    with follower(table) as engine:
        asyncio.run(engine.follow({'plan': Loaded('plan-7', 7, NOWHERE)}))
        assert len(ask(engine)) == 8
        table[URLS[0]].model = 'llama'
        asyncio.run(engine.follow({'plan': Loaded('plan-8', 8, NOWHERE)}))
        with pytest.raises(replies.UnreachableError, match='runs another model'):
            ask(engine)
        table[URLS[0]].model, table[URLS[0]].version = 'qwen3', 'plan-8'
        until(lambda: any(server.up for server in engine._fleet.servers))
        assert {answer.version for answer in ask(engine)} == {8}


def test_a_follower_takes_no_weights():
    with follower({url: Held() for url in URLS}) as engine, pytest.raises(EngineError, match="the learner's engine"):
        engine.load('plan', None, 0)


def test_the_learners_client_tells_names_and_looks_after_servers_that_only_others_ask():
    table = {url: Held() for url in URLS}
    engine = TableEngine({'plan': URLS}, lambda *_: NOWHERE, table=table, adapters=False)
    with contextlib.closing(engine):
        engine.load('plan', None, 3)
        told = pickle.loads(pickle.dumps(engine.told()))
        assert told['plan'][1:] == (3, NOWHERE) and {held.version for held in table.values()} == {told['plan'].name}
        table[URLS[1]].alive = False
        table[URLS[0]].version = 'default'  # started anew, while that one is dead
        until(lambda: table[URLS[0]].version == told['plan'].name)
        table[URLS[1]].version, table[URLS[1]].alive = 'default', True
        until(lambda: table[URLS[1]].version == told['plan'].name)
        until(lambda: all(server.up for server in engine._fleet.servers))
        assert engine.metrics()['servers/revived'] == 2
