"""How many model-written programs a second the sandbox runs, each in an interpreter of its own behind all walls.

Command:  python -m benchmarks.sandbox
Cost:     about a minute.
Result:   benchmarks/results/sandbox.json; the aim is 50 trivial programs a second on two cores, and whether the best
          number of helpers reaches it is printed and stored.

`at once` is the number of helpers. `CPU ms` is the processor time of one program, with that of this process, of the
helpers and of their start: what is left to say where other work fills the machine. Seconds are on the clock, around a
whole batch; programs of a batch differ, so that no cache can answer. The last line compares with starting an
interpreter by exec for each program, in place of the warm fork.
"""

import dataclasses
import os
import subprocess
import sys
import time
from collections.abc import Callable

import tyro

from benchmarks.measure import Timing, facts, show, timed, use_cores, write
from mallm.envs.sandbox import Limits, Sandbox

AIM = 50.0
"""Trivial programs a second, with as many helpers as is best."""
PROGRAMS = {
    'trivial': 'print(int(input()) + {i})',
    'imports': 'import collections, heapq, re, itertools, math\nprint(int(input()) + {i})',
    'raises': 'x = {i}\nprint(int(input()) + x)\nraise ValueError(x)',
    'sorts 100 000': 'import random\nprint(sorted(random.random() for _ in range(100_000))[{i}])',
    'forks and leaves': 'import os, time\nif os.fork() == 0:\n    time.sleep(99)\nprint({i})',
}


@dataclasses.dataclass(frozen=True)
class Settings:
    """Settings of the sandbox benchmark.

    Attributes:
      repeats: timed batches of each kind, after one that warms up.
      programs: in a batch.
      cores: keeps the process to this many cores (Linux); 0 leaves it all.
      at_once: numbers of helpers to compare; 0 is one for each core.
    """

    repeats: int = 5
    programs: int = 100
    cores: int = 2
    at_once: tuple[int, ...] = (1, 0)


def batch(sandbox: Sandbox, program: str, count: int, status: set[str]) -> Callable[[], None]:
    """A call that runs so many programs and checks how they ended."""

    def call() -> None:
        verdicts = sandbox.run_all([(program.format(i=i), '4\n') for i in range(count)], Limits())
        assert {verdict.status for verdict in verdicts} == status, verdicts[0]

    return call


def by_exec(count: int) -> None:
    python = os.path.realpath(sys.executable)
    for _ in range(count):
        subprocess.run([python, '-S', '-E', '-c', 'print(1)'], capture_output=True, check=True)


def cpu_s() -> float:
    """Processor seconds of this process and of those that it has started and that have ended."""
    used = os.times()
    return used.user + used.system + used.children_user + used.children_system


def main(settings: Settings) -> None:
    use_cores(settings.cores)
    about = facts(0, ())
    started = time.perf_counter()
    first = Sandbox(1)
    walls = first.walls
    starts_s = time.perf_counter() - started
    first.close()
    rows: list[tuple[str, int, Timing, float]] = []
    for at_once in settings.at_once:
        for name, program in PROGRAMS.items():
            sandbox, before = Sandbox(at_once or None), cpu_s()
            call = batch(sandbox, program, settings.programs, {'error' if name == 'raises' else 'ok'})
            timing = timed(call, settings.repeats)
            sandbox.close()
            each = (cpu_s() - before) / (settings.programs * (settings.repeats + 1))
            rows.append((name, sandbox.workers, timing, each))
    exec_s = timed(lambda: by_exec(10), settings.repeats).seconds
    show(
        f'Programs a second, median (range). {walls}',
        ['program', 'at once', 'a second', 'ms each', 'CPU ms'],
        [
            [name, str(workers), t.seconds.rate(settings.programs).show(),
             f'{t.seconds.median / settings.programs * 1e3:.1f}', f'{each * 1e3:.1f}']
            for name, workers, t, each in rows
        ],
    )  # fmt: skip
    best = max(t.seconds.rate(settings.programs).median for name, _, t, _ in rows if name == 'trivial')
    print(
        f'{best:.0f} trivial programs a second; the aim of {AIM:.0f} is {"reached" if best >= AIM else "not reached"}'
    )
    print(f'a helper starts in {starts_s:.2f} s; a bare interpreter by exec takes {exec_s.median * 100:.0f} ms')
    write(
        'sandbox',
        about
        | {
            'settings': dataclasses.asdict(settings),
            'walls': sorted(walls.standing),
            'missing': list(walls.missing),
            'aim': {'trivial_programs_per_s': AIM, 'best_median': best, 'reached': best >= AIM},
            'helper_starts_s': starts_s,
            'bare_interpreter_by_exec_s': exec_s.median / 10,
            'measured': [
                {'program': name, 'at_once': workers, 'seconds': t.seconds,
                 'programs_per_s': t.seconds.rate(settings.programs), 'cpu_ms_each': each * 1e3}
                for name, workers, t, each in rows
            ],
        },
    )  # fmt: skip


if __name__ == '__main__':
    main(tyro.cli(Settings, description=__doc__))
