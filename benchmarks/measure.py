"""What every benchmark shares: repeated timings, the machine's facts, a table, one JSON file of results."""

import dataclasses
import importlib.metadata
import json
import os
import pathlib
import platform
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from rich.console import Console
from rich.table import Table

from mallm.folder import commit

ROOT = pathlib.Path(__file__).parents[1]


@dataclasses.dataclass(frozen=True)
class Spread:
    """Repeated measurements of one thing."""

    median: float
    low: float
    high: float
    n: int

    @classmethod
    def of(cls, values: Sequence[float]) -> 'Spread':
        return cls(statistics.median(values), min(values), max(values), len(values))

    def rate(self, amount: float) -> 'Spread':
        """`amount` in a second, where these are the seconds it took."""
        return Spread(amount / self.median, amount / self.high, amount / self.low, self.n)

    def show(self, digits: int = 0) -> str:
        return f'{self.median:,.{digits}f} ({self.low:,.{digits}f} to {self.high:,.{digits}f})'


@dataclasses.dataclass(frozen=True)
class Timing:
    """Wall seconds of repeated calls, and what the first one took longer (tracing and compiling)."""

    seconds: Spread
    compile_s: float


def timed(call: Callable[[], Any], repeats: int) -> Timing:
    """Times `call`, which must wait for its result, after a first call that compiles."""
    return timed_in_turn([call], repeats)[0]


def timed_in_turn(calls: Sequence[Callable[[], Any]], repeats: int) -> list[Timing]:
    """Times several calls alternately, so that what else the machine does meanwhile hits all of them."""
    first = [seconds(call) for call in calls]
    taken = [[seconds(call) for call in calls] for _ in range(repeats)]
    spreads = [Spread.of(times) for times in zip(*taken, strict=True)]
    return [Timing(spread, max(0.0, f - spread.median)) for f, spread in zip(first, spreads, strict=True)]


def matmul_peak(repeats: int) -> dict[str, Spread]:
    """FLOP/s of square float32 products on the same devices; the largest median is what results call the peak."""
    multiply = jax.jit(jnp.matmul)

    def rate(n: int) -> Spread:
        a = jnp.ones((n, n), jnp.float32)
        return timed(lambda: multiply(a, a).block_until_ready(), repeats).seconds.rate(2.0 * n**3)

    return {str(n): rate(n) for n in (512, 1024, 2048)}


def seconds(call: Callable[[], Any]) -> float:
    started = time.perf_counter()
    call()
    return time.perf_counter() - started


def facts(seed: int, packages: Sequence[str]) -> dict[str, Any]:
    """Hardware, load, commit, versions, seed and command: what a number means nothing without."""
    given = ['PATH' if pathlib.Path(argument).is_absolute() else argument for argument in sys.argv[1:]]
    return {
        'command': ' '.join(['python -m', f'benchmarks.{pathlib.Path(sys.argv[0]).stem}', *given]),
        'seed': seed,
        'commit': commit(whole=True),
        'hardware': {'cpu': cpu_name(), 'cores': usable_cores(), 'system': platform.platform()},
        'load_average_at_start': os.getloadavg(),
        'versions': {'python': platform.python_version()} | {p: importlib.metadata.version(p) for p in packages},
    }


def use_cores(count: int) -> None:
    """Keeps this process, and the ones it starts, to that many cores (Linux); 0 leaves them all.

    On a machine that does other work, one core is the fair choice: threads that wait for each other at barriers, as
    OpenMP's do, lose many times what one thread loses.
    """
    if count:
        os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[-count:])


def usable_cores() -> int:
    return len(os.sched_getaffinity(0)) if sys.platform == 'linux' else os.cpu_count() or 1


def cpu_name() -> str:
    info = pathlib.Path('/proc/cpuinfo')
    lines = info.read_text().splitlines() if info.exists() else []
    return next((line.partition(':')[2].strip() for line in lines if line.startswith('model name')), platform.machine())


def show(title: str, columns: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    """Prints a table; the first column is left, numbers are right."""
    table = Table(title=title, title_justify='left')
    for i, column in enumerate(columns):
        table.add_column(column, justify='left' if i == 0 else 'right')
    for row in rows:
        table.add_row(*row)
    Console(width=120).print(table)


def write(name: str, results: dict[str, Any]) -> pathlib.Path:
    """Writes `benchmarks/results/NAME.json`."""
    path = ROOT / 'benchmarks' / 'results' / f'{name}.json'
    path.parent.mkdir(exist_ok=True)
    plain = lambda value: dataclasses.asdict(value)  # noqa: E731
    path.write_text(json.dumps(results, indent=1, default=plain) + '\n')
    print(f'written: {path.relative_to(ROOT)}')
    return path
