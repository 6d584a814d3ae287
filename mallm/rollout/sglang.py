"""The client of SGLang servers: ids in, ids out, over HTTP, with every reply checked. The one file that knows HTTP.

All of it runs on an event loop in a thread of its own, so that connections outlive the loops that episodes are played
on, and weights can be loaded from anywhere. Faults are typed and counted; those that may pass are tried again, at
another server where there is one. A server that can't be reached is left alone and asked again and again in the
background; it gets the present weights before it answers anything.

Log-probabilities: SGLang reports those of the tempered distribution, as mallm wants them, but before top-p and top-k
(an experiment that sets those in training must have the learner compute them, which it refuses to do without). Tests
hold this against the learner. The server's own seeds are not ours: sampled answers differ from run to run.
"""

import asyncio
import json
import random
import secrets
import threading
import time
from collections import Counter
from collections.abc import Callable, Coroutine, Mapping, Sequence
from types import MappingProxyType
from typing import Any, NamedTuple, TypeVar

import aiohttp

from mallm.errors import EngineError
from mallm.rollout import replies
from mallm.rollout.chat import Tokenizer, require_vocabulary
from mallm.rollout.engine import SamplingParams
from mallm.rollout.fleet import Fleet, Limits, Server
from mallm.types import Answer, Prompt

Result = TypeVar('Result')
BASE = ''
"""The name, among the weights that a server holds, of what all adapters adapt."""


class Published(NamedTuple):
    """Weights where servers can read them, and how to tell that a server computes with them what the learner does.

    `logps[i]` is the learner's log-probability of `ids[i + 1]` after `ids[: i + 1]`; a server's may differ by
    `tolerance` on average. (SGLang takes some weights of another shape without a word.) No ids, no such check.
    """

    folder: str
    bytes: int
    ids: tuple[int, ...] = ()
    logps: tuple[float, ...] = ()
    tolerance: float = 0.05


Publish = Callable[[str, Any, int], Published]
"""(policy, weights, version) -> folder. The one before of the same policy may be gone afterwards."""


class Loaded(NamedTuple):
    """What every server of a policy should hold."""

    name: str
    version: int
    published: Published


class SGLangEngine:
    """Samples policies on SGLang servers; see `mallm.rollout.engine.Engine`.

    Without adapters each policy has servers of its own, which get its full weights. With adapters a policy is an
    adapter by name, and its servers may be those of other policies too.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        vocab: int,
        endpoints: Mapping[str, Sequence[str]],
        publish: Publish,
        *,
        adapters: bool,
        shape: Mapping[str, Any] = MappingProxyType({}),
        limits: Limits = Limits(),  # noqa: B008
        key: str = '',
    ) -> None:
        """`shape` is what the servers' config.json must say of their model, where it can be seen; `key` is their API
        key, or empty."""
        require_vocabulary(tokenizer, vocab)
        self._fleet = Fleet(endpoints, limits)
        shared = [server for server in self._fleet.servers if len(server.policies) > 1]
        if shared and not adapters:
            raise ValueError(
                f'{shared[0].url} is to serve {shared[0].policies}: full weights of one policy at a time fit in a '
                'server; give each its own, or use LoRA (model.lora.rank)'
            )
        self._tokenizer, self._vocab, self._publish = tokenizer, vocab, publish
        self._adapters, self._shape, self._limits = adapters, shape, limits
        self._thinks = tokenizer.thinking
        self._headers = {'Authorization': f'Bearer {key}'} if key else {}
        self._run = secrets.token_hex(4)
        self._wanted: dict[str, Loaded] = {}
        self._versions: dict[str, tuple[str, int]] = {}
        self._counts: Counter[str] = Counter()
        self._busy_since, self._in_flight = 0.0, 0
        self._tasks: dict[str, asyncio.Task[None]] = {}
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name='sglang client', daemon=True)
        self._thread.start()
        self._http, self._slots, self._locks = self._wait(self._open())

    async def _open(self) -> tuple[aiohttp.ClientSession, asyncio.Semaphore, dict[str, asyncio.Lock]]:
        http = aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0), headers=self._headers)
        locks = {server.url: asyncio.Lock() for server in self._fleet.servers}
        return http, asyncio.Semaphore(self._limits.in_flight), locks

    def _wait(self, work: Coroutine[Any, Any, Result]) -> Result:
        return asyncio.run_coroutine_threadsafe(work, self._loop).result()

    def close(self) -> None:
        """Ends the thread and its connections. The servers stay as they are."""
        if self._loop.is_closed():
            return
        self._wait(self._shut())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    async def _shut(self) -> None:
        for task in self._tasks.values():
            task.cancel()
        await asyncio.gather(*self._tasks.values(), return_exceptions=True)
        await self._http.close()

    def load_base(self, base: Any) -> None:
        """The frozen parameters under every adapter; without adapters there are none."""
        if self._adapters:
            self._load(BASE, base, 0)

    def load(self, policy: str, weights: Any, version: int) -> None:
        """Replaces one policy's weights, or its adapter, on all its servers, and checks that they have them.

        A server that is not there is left for later. None at all is no error either, except at first: the next
        step's requests wait for one within their patience, and fail then, when what was learned can be saved.

        Raises:
          RefusedError, MisfitError: a server cannot hold such weights.
          PASSING faults: at the policy's first load no server took them.
        """
        if policy not in self._fleet.policies:
            raise EngineError(f'policy {policy!r} has no server; there are some for {sorted(self._fleet.policies)}')
        self._load(policy, weights, version)

    def told(self) -> Mapping[str, Loaded]:
        """What servers should hold, for clients elsewhere that follow this one, which looks after them from now on."""
        self._wait(self._looked_after())
        return dict(self._wanted)

    async def _looked_after(self) -> None:
        if '' not in self._tasks:
            self._tasks[''] = self._loop.create_task(self._look_after())

    async def _look_after(self) -> None:
        """Gives the present weights to a server that was started anew, though nobody here has asked it anything."""
        while True:
            await asyncio.sleep(self._limits.connect_s)
            for server in self._fleet.servers:
                try:
                    async with self._locks[server.url]:
                        said = await self._call(server, 'GET', '/model_info', self._limits.connect_s)
                except EngineError:  # dead, or only busy; once it answers it says what it holds
                    continue
                if server.up and said.get('weight_version') not in server.holds.values():
                    self._lost(server, replies.StaleError(f'{server.url} has {said.get("weight_version")!r}'))

    def _load(self, policy: str, weights: Any, version: int) -> None:
        started = time.perf_counter_ns()
        count = len(self._versions)  # a warm start, or a pause, has other weights under the same number
        name = f'{policy or "base"}-{self._run}-{version}-{count}'
        published = self._publish(policy, weights, version)
        first = policy not in self._wanted
        self._versions[name] = (policy, version)
        self._wanted[policy] = Loaded(name, version, published)
        servers = [server for server in self._fleet.servers if policy in (*server.policies, BASE)]
        lost = self._wait(self._bring_all(servers))
        wrong = [fault for fault in lost if not isinstance(fault, replies.PASSING)]
        if first and lost and (wrong or not any(server.up for server in servers)):
            raise (wrong or lost)[0]
        self._counts['sync bytes'] += published.bytes * sum(server.up for server in servers)
        self._counts['sync nanoseconds'] += time.perf_counter_ns() - started

    async def _bring_all(self, servers: Sequence[Server]) -> list[EngineError]:
        """Brings servers up to date, all at once; returns why some could not be, which are then left alone."""
        lost: list[EngineError] = []
        outcomes = await asyncio.gather(*(self._connect(server) for server in servers), return_exceptions=True)
        for server, outcome in zip(servers, outcomes, strict=True):
            if isinstance(outcome, EngineError):
                self._lost(server, outcome)
                lost.append(outcome)
            elif isinstance(outcome, BaseException):
                raise outcome
        return lost

    async def _connect(self, server: Server) -> None:
        """Makes sure of a server: it is there, runs the right model, and holds what is wanted of it now."""
        async with self._locks[server.url]:
            told = await self._call(server, 'GET', '/model_info', self._limits.connect_s)
            if other := replies.misfits(told, self._shape):
                ours = {name: self._shape[name] for name in other}
                raise replies.MisfitError(
                    f'{server.url} runs another model: {other}, where the learner has {ours}; start it with the model '
                    'that is trained'
                )
            if not server.up or told.get('weight_version') not in server.holds.values():
                said = await self._call(server, 'GET', '/server_info', self._limits.connect_s)
                server.reads_text = not said.get('skip_tokenizer_init', False)
                server.version = str(said.get('version', 'of no known version'))
                server.holds.clear()  # it was started anew, or may have been
            for policy in (BASE, *server.policies):
                wanted = self._wanted.get(policy)
                if wanted is not None and server.holds.get(policy) != wanted.name:
                    await self._bring(server, policy, wanted)
            server.up, server.fault = True, ''

    async def _bring(self, server: Server, policy: str, wanted: Loaded) -> None:
        """Makes a server hold what is wanted of one policy."""
        if policy == BASE or not self._adapters:
            body = {'model_path': wanted.published.folder, 'weight_version': wanted.name, 'flush_cache': True}
            await self._call(server, 'POST', '/update_weights_from_disk', self._limits.sync_s, body)
            told = await self._call(server, 'GET', '/model_info', self._limits.connect_s)
            if told.get('weight_version') != wanted.name:
                raise replies.StaleError(f'{server.url} still has {told.get("weight_version")!r}, not {wanted.name!r}')
            await self._prove(server, wanted, is_adapter=False)
            server.holds[policy] = wanted.name
        else:
            await self._bring_adapter(server, policy, wanted)

    async def _bring_adapter(self, server: Server, policy: str, wanted: Loaded) -> None:
        """The server is asked what it has: a reply that got lost says nothing, and a name can be loaded only once."""
        present = replies.names(await self._call(server, 'GET', '/v1/models', self._limits.connect_s))
        if wanted.name not in present:
            body = {'lora_name': wanted.name, 'lora_path': wanted.published.folder}
            told = await self._call(server, 'POST', '/load_lora_adapter', self._limits.sync_s, body)
            if wanted.name not in (told.get('loaded_adapters') or {}):
                raise replies.StaleError(f'{server.url} has not loaded {wanted.name!r}: {told.get("error_message")}')
        await self._prove(server, wanted, is_adapter=True)
        server.holds[policy] = wanted.name
        for old in present:  # from here on no request names it; the server waits for those that did
            if old.startswith(f'{policy}-{self._run}-') and old != wanted.name:
                await self._call(server, 'POST', '/unload_lora_adapter', self._limits.sync_s, {'lora_name': old})

    async def _prove(self, server: Server, wanted: Loaded, *, is_adapter: bool) -> None:
        """Raises MisfitError where a server's log-probabilities are not the learner's."""
        ids, logps = wanted.published.ids, wanted.published.logps
        if not ids:
            return
        body = {
            'input_ids': list(ids), 'sampling_params': {'max_new_tokens': 1, 'temperature': 1.0},
            'return_logprob': True, 'logprob_start_len': 0, **({'lora_path': wanted.name} if is_adapter else {}),
        }  # fmt: skip
        reply = await self._call(server, 'POST', '/generate', self._limits.request_s, body)
        away = replies.distance(reply, logps)
        if not away <= wanted.published.tolerance:
            raise replies.MisfitError(
                f"{server.url} holds {wanted.name!r}, yet its log-probs are {away:.3f} nats from the learner's on "
                f'average (at most {wanted.published.tolerance} may be rounding): it runs a model of another shape, '
                'vocabulary or kind; start it with the model that is trained'
            )

    def _lost(self, server: Server, fault: BaseException) -> None:
        """Leaves a server alone until it is found alive and up to date."""
        self._fleet.down(server, str(fault))
        running = self._tasks.get(server.url)
        if running is None or running.done():
            self._tasks[server.url] = self._loop.create_task(self._revive(server))

    async def _revive(self, server: Server) -> None:
        pause = self._limits.backoff_s
        while not server.up:
            await asyncio.sleep(pause)
            pause = min(2 * pause, 10.0)
            try:
                await self._connect(server)
            except EngineError as fault:
                server.fault = str(fault)
            else:
                self._counts['revived'] += 1

    async def _call(self, server: Server, method: str, path: str, seconds: float, body: Any = None) -> Any:
        """One HTTP exchange; every way in which it can fail is a fault of its own kind."""
        timeout = aiohttp.ClientTimeout(total=seconds, connect=self._limits.connect_s)
        try:
            async with self._http.request(method, server.url + path, json=body, timeout=timeout) as response:
                raw, status = await response.read(), response.status
        except TimeoutError as cause:
            raise replies.OverdueError(f'{server.url}{path}: no whole reply within {seconds:g} s') from cause
        except (aiohttp.ClientError, OSError) as cause:
            raise replies.UnreachableError(f'{server.url}{path}: {type(cause).__name__}: {cause}') from cause
        if status in (401, 403):
            raise replies.RefusedError(f'{server.url}{path}: {status}, it wants another API key; see launch.sglang')
        if status in (408, 429) or status >= 500:
            raise replies.BusyError(f'{server.url}{path}: {status} {raw[:200]!r}')
        if status >= 400:
            raise replies.RefusedError(f'{server.url}{path}: {status} {raw[:300]!r}')
        try:
            return json.loads(raw)
        except ValueError as cause:
            raise replies.MalformedError(f'{server.url}{path}: no JSON: {raw[:80]!r}...') from cause

    async def sample(
        self, policy: str, prompt: Prompt, path: tuple[int, ...], k: int, params: SamplingParams
    ) -> tuple[Answer, ...]:
        if policy not in self._wanted:
            raise EngineError(f'policy {policy!r} has no weights here; loaded: {sorted(set(self._wanted) - {BASE})}')
        if not prompt.ids:
            raise EngineError(f'the prompt of role {prompt.role!r} is empty: it needs at least one token')
        work = self._answer(policy, prompt, k, params)
        return await asyncio.wrap_future(asyncio.run_coroutine_threadsafe(work, self._loop))

    async def _answer(self, policy: str, prompt: Prompt, k: int, params: SamplingParams) -> tuple[Answer, ...]:
        """Tries until a reply is sound, the tries are used up, or no server is left within the patience."""
        failed: Server | None = None
        async with self._slots:
            for attempt in range(1, self._limits.tries + 1):
                server = await self._server(policy, prompt, failed)
                try:
                    return await self._ask(server, policy, prompt, k, params)
                except replies.FAULTS as fault:
                    self._counts[fault.kind] += 1
                    if isinstance(fault, replies.UnreachableError | replies.OverdueError | replies.StaleError):
                        self._lost(server, fault)
                    if attempt == self._limits.tries or not isinstance(fault, replies.PASSING):
                        raise
                failed = server
                self._counts['retries'] += 1
                await asyncio.sleep(self._limits.backoff_s * 2 ** (attempt - 1) * random.uniform(0.5, 1.0))
        raise AssertionError('the last try returns or raises')

    async def _server(self, policy: str, prompt: Prompt, failed: Server | None) -> Server:
        while (server := self._fleet.pick(policy, prompt.ids[:64], failed)) is None:
            if not self._fleet.waits(policy):
                self._counts[replies.UnreachableError.kind] += 1
                raise replies.UnreachableError(
                    f'no server of policy {policy!r} for {self._limits.patience_s:g} s: {self._fleet.told(policy)}'
                )
            await asyncio.sleep(min(0.05, self._limits.backoff_s))
        return server

    async def _ask(
        self, server: Server, policy: str, prompt: Prompt, k: int, params: SamplingParams
    ) -> tuple[Answer, ...]:
        held = server.holds[policy]
        oldest, adapter = self._versions[held][1], held if self._adapters else None
        body = replies.request(
            prompt, k, params, ends=self._tokenizer.ends, adapter=adapter, stops=server.reads_text and not self._thinks
        )
        self._begin(server)
        try:
            reply = await self._call(server, 'POST', '/generate', self._limits.request_s, body)
        except replies.RefusedError as refused:
            if adapter is not None and adapter in str(refused):  # it was started anew, without our adapters
                raise replies.StaleError(str(refused)) from refused
            raise
        finally:
            self._end(server)

        def version_of(name: str) -> int | None:
            """The number of weights that this server held when it was asked, or was given since."""
            if self._adapters:
                return oldest if BASE not in self._wanted or name == self._wanted[BASE].name else None
            owner, version = self._versions.get(name, (BASE, -1))
            return version if owner == policy and version >= oldest else None

        try:
            drawn = replies.answers(reply, k, params, self._tokenizer, self._vocab, version_of)
        except replies.MalformedError as wrong:
            raise replies.MalformedError(f'{server.url} (SGLang {server.version}): {wrong}') from wrong
        self._counts['tokens'] += sum(len(answer.ids) for answer in drawn)
        self._counts['prompts'] += 1
        return drawn

    def _begin(self, server: Server) -> None:
        if not self._in_flight:
            self._busy_since = time.perf_counter()
        self._in_flight += 1
        server.in_flight += 1

    def _end(self, server: Server) -> None:
        server.in_flight -= 1
        self._in_flight -= 1
        if not self._in_flight:
            self._counts['busy nanoseconds'] += int(1e9 * (time.perf_counter() - self._busy_since))

    def metrics(self) -> Mapping[str, float]:
        """Counters since the last call. `seconds/sample` is the time with at least one request under way."""
        counts, self._counts = self._counts, Counter()
        return {
            'tokens_sampled': counts['tokens'],
            'prompts': counts['prompts'],
            'batches': counts['prompts'],
            'seconds/sample': counts['busy nanoseconds'] / 1e9,
            'compiles/sample': 0,
            'seconds/sync': counts['sync nanoseconds'] / 1e9,
            'sync/bytes': counts['sync bytes'],
            'servers/up': sum(server.up for server in self._fleet.servers),
            'servers/revived': counts['revived'],
            'requests/retried': counts['retries'],
            **{f'requests/{kind.kind.replace(" ", "_")}': counts[kind.kind] for kind in replies.FAULTS},
        }


def ask(url: str, path: str, *, key: str = '', seconds: float) -> str | None:
    """The text of one GET, or None where there is no sound reply: for waiting until a server is healthy."""

    async def get() -> str | None:
        headers = {'Authorization': f'Bearer {key}'} if key else {}
        timeout = aiohttp.ClientTimeout(total=seconds)
        try:
            async with aiohttp.ClientSession(timeout=timeout, headers=headers) as http, http.get(url + path) as reply:
                return await reply.text() if reply.status == 200 else None
        except (aiohttp.ClientError, OSError):
            return None

    return asyncio.run(get())
