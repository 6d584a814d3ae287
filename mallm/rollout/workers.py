"""Tree samplers as Ray actors, for where playing the worlds outgrows the learner's own process.

Each learner process has workers of its own. A worker gets the tokenizer and the way to its engine once, and then plays
its share of the environments of each call. Its engine follows the learner's: an embedded one takes weights out of Ray's
store, a client of SGLang servers is told what they hold. A worker sends every episode back as soon as that ends. Worlds
are values and random keys are addressed, so it says nothing to a result who plays what: a worker that dies or stalls is
replaced, and only the environments that it had not sent back are played again, with the same prompts and seeds.

Actors, their placement, their death and what travels between machines are Ray's; nothing here opens a socket.
"""

import asyncio
import dataclasses
import logging
import math
import os
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable, Coroutine, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from mallm.envs.base import Task, World
from mallm.models.transformer import Transformer
from mallm.rollout import tree
from mallm.rollout.chat import Tokenizer
from mallm.rollout.engine import Follows, Leads, SamplingParams
from mallm.rollout.jax_engine import JaxEngine
from mallm.types import Answer, Prompt, Trajectory

Sample = Callable[[Sequence[World], tree.Place, tree.Stage], Coroutine[Any, Any, list[Trajectory]]]


class WorkersLostError(RuntimeError):
    """More workers died in one call than may, or none could be started."""


@dataclasses.dataclass(frozen=True)
class WorkerSettings:
    """What rollout workers may take, and when they are given up.

    Attributes:
      address: of a running Ray cluster, 'auto' for the one this machine is part of; empty takes RAY_ADDRESS where that
        is set, and else starts Ray here, for this run alone and on the loopback device.
      cpus: that Ray reserves for each worker.
      resource: a custom Ray resource of which each worker takes one, e.g. one that only the machines beside the
        sampling servers have (`ray start --resources '{"sampler": 8}'`); empty for none.
      start_s: a worker that has not begun to play after so long finds no room; the run ends.
      stall_s: a worker that finishes no episode for so long is killed and counts as dead; compiling counts.
      deaths: workers that may die in one call; with one more the run ends.
    """

    address: str = ''
    cpus: float = 1.0
    resource: str = ''
    start_s: float = 300.0
    stall_s: float = 900.0
    deaths: int = 8

    def __post_init__(self) -> None:
        if self.cpus < 0 or self.deaths < 0:
            raise ValueError(f'cpus={self.cpus}, deaths={self.deaths}: must be 0 or positive')
        if min(self.start_s, self.stall_s) <= 0:
            raise ValueError(f'start_s={self.start_s}, stall_s={self.stall_s}: limits in seconds are positive')


@dataclasses.dataclass(frozen=True)
class Seeded:
    """A training world that is not made yet, see `Task.train_at`; making it is part of playing it, wherever that is."""

    task: Task
    seed: int
    position: int = 0
    run: int = 0


def made(world: World | Seeded) -> World:
    return world.task.train_at(world.position, run=world.run, seed=world.seed) if isinstance(world, Seeded) else world


@dataclasses.dataclass(frozen=True)
class Crew:
    """What every worker is given once."""

    tokenizer: Tokenizer
    make_engine: Callable[[], Follows]


@dataclasses.dataclass(frozen=True)
class Lent:
    """Weights in Ray's store.

    Attributes:
      weights: for each policy the object and the version it is.
      base: the object of the parameters under every adapter, or None.
    """

    weights: Mapping[str, tuple[Any, int]]
    base: Any


class Lender(JaxEngine):
    """The embedded engine of the learner: it puts its weights into Ray's store, once for all workers."""

    def __init__(self, module: Transformer, tokenizer: Tokenizer, root: jax.Array) -> None:
        super().__init__(module, tokenizer, root)
        self._lent = Lent({}, None)

    def load_base(self, base: Any) -> None:
        import ray

        super().load_base(base)
        self._lent = dataclasses.replace(self._lent, base=None if base is None else ray.put(jax.device_get(base)))

    def load(self, policy: str, weights: Any, version: int) -> None:
        import ray

        super().load(policy, weights, version)
        stored = ray.put(jax.device_get(weights)), version
        self._lent = dataclasses.replace(self._lent, weights={**self._lent.weights, policy: stored})

    def told(self) -> Lent:
        return self._lent


class Borrower(JaxEngine):
    """The embedded engine of a worker."""

    def __init__(self, module: Transformer, tokenizer: Tokenizer, root: jax.Array) -> None:
        super().__init__(module, tokenizer, root)
        self._borrowed: dict[str, str] = {}

    async def follow(self, told: Lent) -> None:
        """Fetches and loads the weights that it does not hold yet."""
        if told.base is not None and self._borrowed.get('') != told.base.hex():
            self.load_base(copied(await told.base))
            self._borrowed = {'': told.base.hex()}
        for policy, (weights, version) in told.weights.items():
            if self._borrowed.get(policy) != weights.hex():
                self.load(policy, copied(await weights), version)
                self._borrowed[policy] = weights.hex()


def embedded(module: Transformer, tokenizer: Tokenizer, seed: int) -> Borrower:
    """The embedded engine inside a worker: on the CPU, so that no two workers fight for one accelerator."""
    jax.config.update('jax_platforms', 'cpu')
    return Borrower(module, tokenizer, jax.random.key(seed))


@dataclasses.dataclass(frozen=True)
class Order:
    """What a worker is asked to play: worlds by their number in the call, at their places.

    Attributes:
      told: what the worker's engine has to follow.
    """

    sample: Sample
    sampler: tree.Sampler
    cast: Mapping[str, str]
    worlds: Mapping[int, World | Seeded]
    place: tree.Place
    told: Any

    def without(self, done: Mapping[int, Any]) -> 'Order':
        """What is left to play."""
        return dataclasses.replace(self, worlds={i: world for i, world in self.worlds.items() if i not in done})


@dataclasses.dataclass(frozen=True)
class Played:
    """All episodes of one world, and the pid that played them; number -1 says that the worker has begun."""

    number: int
    trajectories: tuple[Trajectory, ...]
    pid: int


class Worker:
    """The actor. Its event loop plays all worlds of an order at once."""

    def __init__(self, crew: Crew) -> None:
        self._crew = crew
        self._engine = crew.make_engine()

    async def play(self, order: Order) -> AsyncIterator[Played]:
        """Every world's episodes as soon as they end."""
        yield Played(-1, (), os.getpid())
        await self._engine.follow(order.told)
        stage = tree.Stage(order.sampler, self._engine, self._crew.tokenizer, order.cast)

        async def play_one(number: int, world: World | Seeded) -> Played:
            place = dataclasses.replace(order.place, env=order.place.env + number)
            return Played(number, tuple(await order.sample([made(world)], place, stage)), os.getpid())

        for played in asyncio.as_completed([play_one(number, world) for number, world in order.worlds.items()]):
            yield await played

    def metrics(self) -> Mapping[str, float]:
        return self._engine.metrics()


async def tell(witness: tree.Witness, trajectories: Sequence[Trajectory]) -> None:
    """Says that episodes have ended, in an event loop that is cancelled where the witness wants to end the rollout."""
    for trajectory in trajectories:
        witness.began()
        witness.ended(trajectory)


def copied(tree: Any) -> Any:
    """Arrays of this process's own, so that the shared memory they came in can be freed."""
    return jax.tree.map(jnp.array, tree)


@dataclasses.dataclass(frozen=True)
class Stream:
    """What one worker is playing: its order, since when nothing has come of it, and its pid once it has begun."""

    number: int
    order: Order
    heard: float
    pid: int = 0


class Workers:
    """An engine that plays as well: on Ray actors, each with an engine of its own.

    Single answers (`sample`) are drawn by the engine of this process. It takes the weights, and each order tells the
    others what to follow. What all have counted is added up. Results come in the order of the worlds, whoever
    played them.
    """

    def __init__(self, local: Leads, count: int, crew: Crew, settings: WorkerSettings) -> None:
        self._local, self._count, self._crew, self._settings = local, count, crew, settings
        self._ends_ray = connect(settings.address, count * settings.cpus)
        self._actors: dict[int, Any] = {}
        self._counts: Counter[str] = Counter()

    async def sample(
        self, policy: str, prompt: Prompt, path: tuple[int, ...], k: int, params: SamplingParams
    ) -> tuple[Answer, ...]:
        return await self._local.sample(policy, prompt, path, k, params)

    def _actor(self) -> Any:
        """A fresh worker. Ray would restart one by itself, but could not give the stream of episodes back its place."""
        import ray

        settings = self._settings
        options = {'num_cpus': settings.cpus, 'max_restarts': 0, 'scheduling_strategy': 'SPREAD'}
        if settings.resource:
            options['resources'] = {settings.resource: 1}
        return ray.remote(Worker).options(**options).remote(self._crew)

    def load_base(self, base: Any) -> None:
        """The frozen parameters under every adapter."""
        self._local.load_base(base)

    def load(self, policy: str, weights: Any, version: int) -> None:
        self._local.load(policy, weights, version)

    def play(
        self, sample: Sample, worlds: Sequence[World | Seeded], place: tree.Place, stage: tree.Stage
    ) -> list[Trajectory]:
        """Episodes of all worlds, in their order.

        Raises:
          WorkersLostError: too many workers died, or one found no room.
        """
        order = Order(sample, stage.sampler, stage.cast, {}, place, self._local.told())
        shares = [{i: worlds[i] for i in range(first, len(worlds), self._count)} for first in range(self._count)]
        streams: dict[Any, Stream] = {}
        for number, share in enumerate(shares):
            if share:
                self._begin(streams, number, dataclasses.replace(order, worlds=share))
        done: dict[int, tuple[Trajectory, ...]] = {}
        deaths: list[str] = []
        while streams:
            known = len(done)
            broken = self._advance(streams, done)
            for number in list(done)[known:]:
                asyncio.run(tell(stage.witness, done[number]))
            for stream, why in broken:
                deaths.append(why)
                left = stream.order.without(done)
                logging.getLogger(__name__).warning('%s; %d worlds are played again', why, len(left.worlds))
                self._counts.update({'workers/deaths': 1, 'workers/worlds_replayed': len(left.worlds)})
                if len(deaths) > self._settings.deaths:
                    raise WorkersLostError(
                        f'{len(deaths)} workers died in step {place.step} (limit {self._settings.deaths}, '
                        f'worker.deaths): {"; ".join(deaths)}'
                    )
                if left.worlds:
                    self._begin(streams, stream.number, left)
        return [trajectory for number in range(len(worlds)) for trajectory in done[number]]

    def _begin(self, streams: dict[Any, Stream], number: int, order: Order) -> None:
        if number not in self._actors:
            self._actors[number] = self._actor()
        stream = self._actors[number].play.options(num_returns='streaming').remote(order)
        streams[stream] = Stream(number, order, time.monotonic())

    def _advance(self, streams: dict[Any, Stream], done: dict[int, tuple[Trajectory, ...]]) -> list[tuple[Stream, str]]:
        """Waits for the next episode and takes it; returns the streams that broke off, and why."""
        import ray

        first = min(self._patience(stream) for stream in streams.values())
        ready, _ = ray.wait(list(streams), timeout=max(0.0, first - time.monotonic()))
        for key in ready:
            stream = streams.pop(key)
            try:
                played = ray.get(next(key), timeout=self._settings.stall_s)
            except StopIteration:
                continue
            except ray.exceptions.RayTaskError:
                raise  # the task's own fault: it would fail anywhere
            except ray.exceptions.RayError as error:
                return [(stream, self._lost(stream, error))]
            if played.number >= 0:
                done[played.number] = played.trajectories
            streams[key] = dataclasses.replace(stream, heard=time.monotonic(), pid=played.pid)
        silent = [key for key, stream in streams.items() if self._patience(stream) <= time.monotonic()]
        if silent:  # unless it was this process that slept
            _, silent = ray.wait(silent, num_returns=len(silent), timeout=0)
        return [(stream, self._stalled(stream)) for stream in map(streams.pop, silent)]

    def _patience(self, stream: Stream) -> float:
        """When a stream will have been silent for too long."""
        return stream.heard + (self._settings.stall_s if stream.pid else self._settings.start_s)

    def _lost(self, stream: Stream, error: Exception) -> str:
        """Why a worker is gone; ends it where Ray can't tell.

        Raises:
          WorkersLostError: it never came to be, and would not at a second try either.
        """
        import ray

        if isinstance(error, ray.exceptions.RayActorError) and error.actor_init_failed:
            raise WorkersLostError(f'worker {stream.number} could not be made: {error}') from error
        ray.kill(self._actors.pop(stream.number))
        return f'worker {stream.number} (pid {stream.pid}) died ({type(error).__name__})'

    def _stalled(self, stream: Stream) -> str:
        """Ends a silent worker.

        Raises:
          WorkersLostError: it has not even begun.
        """
        import ray

        settings = self._settings
        if not stream.pid:
            raise WorkersLostError(
                f'worker {stream.number} has not begun after {settings.start_s:g} s: {self._count} workers need '
                f'{self._count * settings.cpus:g} CPUs {settings.resource}, Ray has {ray.cluster_resources()}, free '
                f'are {ray.available_resources()}; take fewer workers, or smaller ones with worker.cpus'
            )
        ray.kill(self._actors.pop(stream.number))
        return (
            f'worker {stream.number} (pid {stream.pid}) finished no episode in {settings.stall_s:g} s (worker.stall_s)'
        )

    def metrics(self) -> Mapping[str, float]:
        """What all engines counted since the last call, summed, and deaths and replays. The dead tell nothing."""
        import ray

        counts, self._counts = self._counts, Counter()
        told: Counter[str] = Counter({'workers/deaths': 0, 'workers/worlds_replayed': 0, **self._local.metrics()})
        told.update(counts)
        for reply in [actor.metrics.remote() for actor in self._actors.values()]:
            try:
                told.update(ray.get(reply, timeout=self._settings.stall_s))
            except ray.exceptions.RayTaskError:
                raise
            except ray.exceptions.RayError:  # it died after its work was done; the next call replaces it
                continue
        return dict(told)

    def close(self) -> None:
        import ray

        for actor in self._actors.values():
            ray.kill(actor)
        self._actors.clear()
        if self._ends_ray:
            ray.shutdown()


def play(sample: Sample, worlds: Sequence[World | Seeded], place: tree.Place, stage: tree.Stage) -> list[Trajectory]:
    """Episodes of all worlds, in their order: on workers where the stage's engine has some, else in this process."""
    if isinstance(stage.engine, Workers):
        return stage.engine.play(sample, worlds, place, stage)
    return asyncio.run(sample([made(world) for world in worlds], place, stage))


def connect(address: str, cpus: float) -> bool:
    """Joins a Ray cluster, or starts one on this machine; True if that one is to be ended with the run.

    Raises:
      ModuleNotFoundError: Ray is not installed.
    """
    try:
        import ray
    except ModuleNotFoundError as missing:
        raise ModuleNotFoundError(
            "rollout workers need Ray: pip install -e '.[ray]', or set rollout_workers=0"
        ) from missing
    os.environ.setdefault('RAY_USAGE_STATS_ENABLED', '0')
    if ray.is_initialized():
        return False
    quiet: dict[str, Any] = {'log_to_driver': False, 'logging_level': logging.WARNING}
    if address or os.environ.get('RAY_ADDRESS'):
        ray.init(address=address or None, **quiet)
        return True
    room = max(1, math.ceil(cpus), os.cpu_count() or 1)
    os.environ.setdefault('RAY_worker_niceness', '0')  # 15 otherwise, which any other work would starve
    ray.init(address='local', num_cpus=room, include_dashboard=False, _node_ip_address='127.0.0.1', **quiet)
    return True
