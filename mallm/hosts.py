"""Several JAX processes, one run: who does what share, what all agree on, and an end in bounded time.

Every process runs the same program and enters the same collectives. A collective has no time limit of its own: a
process that is dead, stopped or merely stuck would keep the others waiting for ever. `Guard` ends such a run. With one
process nothing here does anything.
"""

import contextlib
import dataclasses
import json
import logging
import os
import pathlib
import pickle
import socket
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, TypeVar

import jax
import numpy as np
from jax.experimental import multihost_utils

Item = TypeVar('Item')
GIVEN_UP = 75
"""Exit status of a process that ended because the run cannot go on (EX_TEMPFAIL: start it again with --resume)."""
FOLDER = 'hosts'
JAX_GIVES_UP_S = 1 << 20


@dataclasses.dataclass(frozen=True)
class Hosts:
    """How the processes of a run find each other.

    Attributes:
      coordinator: 'address:port' of process 0; empty for a run of one process, 'auto' where JAX finds out by itself
        (TPU pods, Slurm, Open MPI).
      count: number of processes.
      index: which of them this is, from 0.
      stall_s: the run ends when a process stays longer than this at one stage of a step; compiling counts.
      silence_s: it ends when a process has given no sign of life for this long.
    """

    coordinator: str = ''
    count: int = 1
    index: int = 0
    stall_s: float = 1800.0
    silence_s: float = 60.0

    def __post_init__(self) -> None:
        if self.count < 1 or not 0 <= self.index < self.count:
            raise ValueError(f'index={self.index}, count={self.count}: processes are numbered 0 to count - 1')
        if self.count > 1 and not self.coordinator:
            raise ValueError(f"count={self.count}: several processes need the coordinator's 'address:port'")
        if min(self.stall_s, self.silence_s) <= 0:
            raise ValueError(f'stall_s={self.stall_s}, silence_s={self.silence_s}: limits in seconds are positive')


ALONE = Hosts()


def join(hosts: Hosts) -> None:
    """Connects this process to the others, before anything touches a device.

    JAX's own heartbeat, which ends a process without saying where it was, is set so high that `Guard` speaks first.
    """
    if not hosts.coordinator:
        return
    jax.config.update('jax_enable_preemption_service', False)  # it would catch SIGTERM and go on
    found: dict[str, Any] = {}
    if hosts.coordinator != 'auto':
        found = {
            'coordinator_address': hosts.coordinator,
            'num_processes': hosts.count,
            'process_id': hosts.index,
        }
    jax.distributed.initialize(**found, heartbeat_timeout_seconds=JAX_GIVES_UP_S)


def share(count: int) -> range:
    """Which of `count` pieces of work this process does: as equal shares as can be, in order."""
    index, processes = jax.process_index(), jax.process_count()
    return range(count * index // processes, count * (index + 1) // processes)


def gathered(mine: Sequence[Item]) -> list[Item]:
    """The items of all processes, in their order, on every process. Items are plain host values."""
    if jax.process_count() == 1:
        return list(mine)
    packed = np.frombuffer(pickle.dumps(list(mine)), np.uint8)
    sizes = multihost_utils.process_allgather(np.int32(packed.size))
    padded = np.zeros(sizes.max(), np.uint8)
    padded[: packed.size] = packed
    rows = multihost_utils.process_allgather(padded)
    return [item for row, size in zip(rows, sizes, strict=True) for item in pickle.loads(row[:size].tobytes())]


def agreed(value: Item) -> Item:
    """Process 0's value, on every process."""
    return gathered([value])[0]


def totals(counts: Mapping[str, float]) -> dict[str, float]:
    """Sums over the processes. Seconds add up as well: they are process seconds."""
    every = gathered([dict(counts)])
    return {name: sum(one[name] for one in every) for name in every[0]}


def spread(tree: Any, shardings: Any) -> Any:
    """Host arrays that every process holds alike, as global arrays; each process keeps its own part.

    With one process the tree is returned as it is: `jax.jit` then places it by itself.
    """
    if jax.process_count() == 1:
        return tree

    def place(leaf: Any, sharding: jax.sharding.Sharding) -> jax.Array:
        if isinstance(leaf, jax.Array) and not leaf.is_fully_addressable:
            return leaf
        host = np.asarray(leaf)
        return jax.make_array_from_callback(host.shape, sharding, lambda index: host[index])

    return jax.tree.map(place, tree, shardings)


def local(tree: Any) -> Any:
    """Global arrays as whole arrays on this process's first device; with one process the tree as it is."""
    if jax.process_count() == 1:
        return tree
    leaves, form = jax.tree.flatten(tree)
    mesh = leaves[0].sharding.mesh
    whole = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec())
    copied = jax.jit(lambda leaves: leaves, out_shardings=whole)(leaves)
    return jax.tree.unflatten(form, [leaf.addressable_data(0) for leaf in copied])


@dataclasses.dataclass(frozen=True)
class Sign:
    """A sign of life, as a process leaves it in the run folder.

    Attributes:
      attempt: which start of the run it belongs to.
      host: index of the process, and `name` of its machine.
      beat: grows with every sign.
      step, stage: where it is; `place` grows when that changes.
      fault: why it gives up, or empty.
    """

    attempt: int
    host: int
    name: str
    beat: int = 0
    place: int = 0
    step: int = 0
    stage: str = 'start'
    fault: str = ''

    def __str__(self) -> str:
        return f'host {self.host} ({self.name}), step {self.step}, stage {self.stage!r}'


class Guard:
    """Ends this process, with a message that names step and host, when any process of the run can't go on.

    Each process writes a sign of life about once a second and reads those of the others. The run ends when one of
    them is silent, or stays too long at one stage, or has failed. Because no process waits for another in here, all
    of them end, each within the limit and some seconds. (A process that was stopped ends when it is continued.)

    The signs are files in `folder`, which all processes must see, as they must see the checkpoints.
    """

    def __init__(
        self,
        folder: pathlib.Path,
        attempt: int,
        *,
        host: int,
        count: int,
        stall_s: float,
        silence_s: float,
        end: Callable[[int], Any] = os._exit,
    ) -> None:
        self._folder, self._count, self._stall_s, self._silence_s, self._end = folder, count, stall_s, silence_s, end
        self._folder.mkdir(parents=True, exist_ok=True)
        self._mine = Sign(attempt, host, socket.gethostname())
        self._heard = {i: Sign(attempt, i, 'not heard of yet') for i in range(count)}
        self._beat_at = dict.fromkeys(range(count), time.monotonic())
        self._place_at = dict(self._beat_at)
        self._done = threading.Event()
        self._lock = threading.Lock()
        self._thread = threading.Thread(target=self._run, name='guard', daemon=True)

    def at(self, step: int, stage: str) -> None:
        """Says that this process now begins a stage of a step."""
        with self._lock:
            self._mine = dataclasses.replace(self._mine, step=step, stage=stage, place=self._mine.place + 1)

    def __enter__(self) -> 'Guard':
        self._thread.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, *_: object) -> None:
        self._done.set()
        self._thread.join()
        if error is not None:  # the others wait for this process, and its own exit would wait for them
            told = ''.join(traceback.format_exception(error))
            self._give_up(f'{self._mine}: {kind.__name__ if kind else ""}: {error}', told)
        else:
            self._write('finished')

    def _run(self) -> None:
        while not self._done.wait(min(1.0, self._silence_s / 5)):
            self._write('')
            self._read()
            fault = self._fault()
            if fault and not self._done.is_set():
                self._give_up(fault, '')

    def _write(self, fault: str) -> None:
        with self._lock:
            self._mine = dataclasses.replace(self._mine, beat=self._mine.beat + 1, fault=fault)
            sign = self._mine
        path = self._folder / f'{sign.host}.json'
        draft = path.with_suffix('.draft')
        draft.write_text(json.dumps(dataclasses.asdict(sign)))
        draft.replace(path)

    def _read(self) -> None:
        for host in range(self._count):
            with contextlib.suppress(FileNotFoundError):
                sign = Sign(**json.loads((self._folder / f'{host}.json').read_text()))
                before = self._heard[host]
                if sign.attempt != before.attempt or sign.beat == before.beat:
                    continue
                self._heard[host], self._beat_at[host] = sign, time.monotonic()
                if sign.place != before.place or before.beat == 0:
                    self._place_at[host] = time.monotonic()

    def _fault(self) -> str:
        """Why the run can't go on, or nothing."""
        now = time.monotonic()
        for host, sign in self._heard.items():
            if sign.fault == 'finished':
                continue
            if sign.fault and host != self._mine.host:
                return f'{sign} gave up: {sign.fault}'
            if (silent := now - self._beat_at[host]) > self._silence_s:
                return f'{sign}: no sign of life for {silent:.0f} s (limit {self._silence_s:g} s)'
        slowest = min(self._heard, key=lambda host: (self._place_at[host], host))
        stalled = now - self._place_at[slowest]
        if stalled > self._stall_s and self._heard[slowest].fault != 'finished':
            return f'{self._heard[slowest]}: still there after {stalled:.0f} s (limit {self._stall_s:g} s)'
        return ''

    def _give_up(self, fault: str, told: str) -> None:
        self._write(fault)
        others = '; '.join(
            f'{sign}, heard {time.monotonic() - self._beat_at[host]:.0f} s ago'
            for host, sign in self._heard.items()
            if host != self._mine.host
        )
        logging.getLogger(__name__).critical(
            '%sThe run ends: %s\nThis is %s. Others: %s. Start all of them again with --resume.',
            told,
            fault,
            self._mine,
            others,
        )
        logging.shutdown()
        self._end(GIVEN_UP)


class NoGuard:
    """The same verbs, for a run of one process."""

    def at(self, step: int, stage: str) -> None:
        pass


NO_GUARD = NoGuard()


@contextlib.contextmanager
def guard(folder: pathlib.Path, hosts: Hosts) -> Iterator[Guard | NoGuard]:
    """Watches over the processes of a run while it goes on."""
    if jax.process_count() == 1:
        yield NoGuard()
        return
    attempt = agreed(time.time_ns())
    with Guard(
        folder / FOLDER,
        attempt,
        host=jax.process_index(),
        count=jax.process_count(),
        stall_s=hosts.stall_s,
        silence_s=hosts.silence_s,
    ) as guarding:
        yield guarding
