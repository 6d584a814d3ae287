"""Several JAX processes, one run: who does what share, what all agree on, and an end in bounded time.

Every process runs the same program and enters the same collectives. A collective has no time limit of its own: a
process that is dead, stopped or merely stuck would keep the others waiting for ever; `mallm.guard` ends such a run.
With one process nothing here does anything.
"""

import dataclasses
import functools
import pickle
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

import jax
import numpy as np
from jax.experimental import multihost_utils

Item = TypeVar('Item')
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

    JAX's own heartbeat, which ends a process without saying where it was, is set so high that `mallm.guard` is first.
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
    multihost_utils.sync_global_devices('joined')  # gloo connects at the first collective, and waits only 30 s for it


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


@functools.cache
def gatherer(mesh: jax.sharding.Mesh) -> Callable[[Any], Any]:
    """Puts whole copies of arrays on every device of a mesh; one for each mesh, so that it is compiled once."""
    return jax.jit(lambda leaves: leaves, out_shardings=jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec()))


def local(tree: Any) -> Any:
    """Global arrays as whole arrays on this process's first device; with one process the tree as it is."""
    leaves, form = jax.tree.flatten(tree)
    if jax.process_count() == 1 or not leaves:
        return tree
    copied = gatherer(leaves[0].sharding.mesh)(leaves)
    return jax.tree.unflatten(form, [leaf.addressable_data(0) for leaf in copied])
