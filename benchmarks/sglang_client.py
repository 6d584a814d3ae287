"""What the SGLang client costs beside a bare HTTP load of the same requests, and what keeping servers fresh costs.

Command:  python -m benchmarks.sglang_client            (starts servers on this machine; --help shows every setting)

Sokoban trees are played through the client, which is the real thing, worlds included. Then their requests are sent
again, each tree's one after the other and all trees at once as before, by the client without worlds, and bare: the
bodies ready-made, each to the server that the client would choose, the replies read and not looked into. Sampled
answers differ in length from time to time, so what is compared is requests a second, over alternating repeats, and the
processor time that this process spends on a request, which what else the machine does hardly moves. `overhead` is wall
time; `own work` is the client's processor time beyond the bare load's, as a share of the bare load's wall time: what
it would add if nothing ran beside it. On a CPU the servers are a test bench, see launch/cpu.
"""

import asyncio
import contextlib
import dataclasses
import pathlib
import time
from collections.abc import Awaitable, Callable, Sequence
from typing import Any, NamedTuple

import aiohttp
import jax
import jax.numpy as jnp
import tyro
from flax import linen as nn

from benchmarks.measure import Spread, facts, show, use_cores, write
from mallm import rng, servers
from mallm.envs.sokoban_task import SokobanTask
from mallm.experiment import ModelSettings
from mallm.models.transformer import Transformer
from mallm.rollout import replies, tree
from mallm.rollout.chat import TinyTokenizer
from mallm.rollout.engine import SamplingParams
from mallm.rollout.fleet import Fleet, Limits
from mallm.rollout.sglang import SGLangEngine
from mallm.serving import START_S, Publisher, seen_by, weights_folder
from mallm.types import Prompt

TOKENIZER = TinyTokenizer()


@dataclasses.dataclass(frozen=True)
class Settings:
    """Settings of the benchmark.

    Attributes:
      ks: candidates of a group.
      servers: how many servers answer.
      envs: trees played at once.
      repeats: timed rounds of each, after one that warms up.
      widths: of the models whose weights are synced (layers and ffn as in the main experiment); the first one samples.
      seed: of weights and worlds.
      cores: keeps everything to this many cores (Linux); 0 leaves it all.
    """

    ks: tuple[int, ...] = (1, 4, 8, 16)
    servers: tuple[int, ...] = (1, 2)
    envs: int = 32
    repeats: int = 5
    widths: tuple[int, ...] = (128, 256, 512)
    seed: int = 0
    cores: int = 0


@dataclasses.dataclass(frozen=True)
class Bench:
    """One model, the folder its weights are put in, and its servers."""

    publish: Publisher
    params: Any
    module: Transformer
    urls: tuple[str, ...]


@contextlib.contextmanager
def serving(width: int, count: int, seed: int):
    """A model of that width on `count` servers."""
    module = Transformer(ModelSettings(width=width, ffn=2 * width).architecture(len(TOKENIZER)))
    params = nn.unbox(module.init(jax.random.key(seed), jnp.zeros((1, 2), jnp.int32)))['params']
    with weights_folder(seen_by([], pathlib.Path())) as folder, contextlib.ExitStack() as stack:
        first = Publisher(folder / 'first', module)('p', params, 0).folder
        running = []
        for i in range(count):
            spec = servers.Spec(first, tokens=1 << 17)
            running.append(servers.start(spec, folder / f'{i}.log', tethered=True))
            stack.callback(servers.stop, running[-1][0].pid)
        for one, process in running:
            servers.wait(one, process, START_S)
        publish = Publisher(folder / 'later', module)
        yield Bench(publish, params, module, tuple(one.url for one, _ in running))


def client(bench: Bench, count: int) -> SGLangEngine:
    engine = SGLangEngine(
        TOKENIZER, len(TOKENIZER), {'p': bench.urls[:count]}, bench.publish, adapters=False
    )  # fmt: skip
    engine.load('p', bench.params, 0)
    return engine


def chains(trajectories: Sequence[Any]) -> list[list[Prompt]]:
    """The prompts that each tree asked about, in order."""
    return [[group.prompt for turn in one.turns for group in turn.groups] for one in trajectories]


class Taken(NamedTuple):
    """Wall seconds, processor seconds of this process, and tokens that came."""

    wall: float
    cpu: float
    tokens: int


def timed(work: Callable[[], Awaitable[int]]) -> Taken:
    started, cpu = time.perf_counter(), time.process_time()
    tokens = asyncio.run(work())  # type: ignore[arg-type]
    return Taken(time.perf_counter() - started, time.process_time() - cpu, tokens)


def measure(bench: Bench, count: int, k: int, settings: Settings) -> dict[str, Any]:
    """Rates of trees through the client, of the client alone, and of the bare load."""
    params = SamplingParams(8)
    sampler = tree.Sampler(k, 2, 1.0, tree.greedy, dict.fromkeys(SokobanTask().team, params))
    task = SokobanTask()
    worlds = [task.train(rng.seed_for(settings.seed, rng.TRAIN, 0, env) % (1 << 40)) for env in range(settings.envs)]
    place = tree.Place(settings.seed, rng.TRAIN, 0, env=0)
    with contextlib.closing(client(bench, count)) as engine:
        stage = tree.Stage(sampler, engine, TOKENIZER, dict.fromkeys(task.team, 'p'))
        asked = chains(asyncio.run(tree.play_tree(worlds, place, stage)))
        bodies = [
            [replies.request(p, k, params, ends=TOKENIZER.ends, adapter=None, stops=False) for p in prompts]
            for prompts in asked
        ]

        async def trees() -> int:
            played = await tree.play_tree(worlds, place, stage)
            groups = [group for one in played for turn in one.turns for group in turn.groups]
            return sum(len(candidate.answer.ids) for group in groups for candidate in group.candidates)

        async def through() -> int:
            async def chain(prompts: Sequence[Prompt]) -> int:
                answers = [await engine.sample('p', prompt, (0,), k, params) for prompt in prompts]
                return sum(len(answer.ids) for drawn in answers for answer in drawn)

            return sum(await asyncio.gather(*map(chain, asked)))

        fleet = Fleet({'p': bench.urls[:count]}, Limits())
        for server in fleet.servers:
            server.up = True

        async def bare() -> int:
            async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as http:

                async def chain(prompts: Sequence[Prompt], sent: Sequence[Any]) -> None:
                    for prompt, body in zip(prompts, sent, strict=True):
                        server = fleet.pick('p', prompt.ids[:64])
                        assert server is not None
                        server.in_flight += 1
                        async with http.post(f'{server.url}/generate', json=body) as response:
                            await response.read()
                        server.in_flight -= 1

                await asyncio.gather(*map(chain, asked, bodies))
            return 0

        rounds = [[timed(way) for way in (trees, through, bare)] for _ in range(settings.repeats + 1)][1:]
    groups = sum(map(len, asked))
    spread = [Spread.of([one[i].wall for one in rounds]) for i in range(3)]
    return {
        'servers': count,
        'k': k,
        'trees': settings.envs,
        'requests': groups,
        'trees_per_s': spread[0].rate(settings.envs),
        'tokens_per_s': Spread.of([one.tokens / one.wall for one, _, _ in rounds]),
        'client_requests_per_s': spread[1].rate(groups),
        'client_tokens_per_s': Spread.of([one.tokens / one.wall for _, one, _ in rounds]),
        'bare_requests_per_s': spread[2].rate(groups),
        'client_overhead': Spread.of([client.wall / load.wall - 1 for _, client, load in rounds]),
        'client_cpu_ms': Spread.of([client.cpu / groups * 1e3 for _, client, _ in rounds]),
        'bare_cpu_ms': Spread.of([load.cpu / groups * 1e3 for _, _, load in rounds]),
        'own_work': Spread.of([(client.cpu - load.cpu) / load.wall for _, client, load in rounds]),
    }


def sync(bench: Bench, count: int, repeats: int) -> dict[str, Any]:
    """Seconds from arrays to servers that are known to hold them."""
    with contextlib.closing(client(bench, count)) as engine:
        engine.metrics()
        taken, size = [], 0.0
        for version in range(1, repeats + 2):
            engine.load('p', bench.params, version)
            told = engine.metrics()
            taken.append(told['seconds/sync'])
            size = told['sync/bytes']
    return {'width': bench.module.arch.width, 'servers': count, 'bytes': size, 'seconds': Spread.of(taken[1:])}


def main() -> None:
    settings = tyro.cli(Settings, description=__doc__)
    use_cores(settings.cores)
    said = facts(settings.seed, ['jax', 'aiohttp']) | {'sglang': f'{servers.VERSION}, CPU test bench (launch/cpu)'}
    rates, syncs = [], []
    for width in settings.widths:
        with serving(width, max(settings.servers), settings.seed) as bench:
            if width == settings.widths[0]:
                rates = [measure(bench, count, k, settings) for count in settings.servers for k in settings.ks]
            syncs += [sync(bench, count, settings.repeats) for count in settings.servers]
    show(
        'Trees and tokens a second, median (low to high)',
        ['servers, K', 'trees/s', 'tokens/s', 'requests/s: client', 'bare', 'overhead', 'CPU ms', 'bare', 'own work'],
        [
            [f'{r["servers"]}, {r["k"]}', r['trees_per_s'].show(1), r['tokens_per_s'].show(),
             r['client_requests_per_s'].show(), r['bare_requests_per_s'].show(),
             f'{r["client_overhead"].median:+.1%}', f'{r["client_cpu_ms"].median:.2f}',
             f'{r["bare_cpu_ms"].median:.2f}', f'{r["own_work"].median:+.1%}']
            for r in rates
        ],
    )  # fmt: skip
    show(
        'Sync', ['width, servers', 'bytes', 'seconds'],
        [[f'{s["width"]}, {s["servers"]}', f'{s["bytes"]:,.0f}', s['seconds'].show(3)] for s in syncs],
    )  # fmt: skip
    write(pathlib.Path(__file__).stem, said | {'settings': settings, 'rates': rates, 'sync': syncs})


if __name__ == '__main__':
    main()
