"""Where a step of workload S goes: prefill, decode at several batch sizes, update, each beside this machine's matmul.

Command:  python -m benchmarks.phases                (--help shows every setting)

The model has SmolLM2-135M's shape with random weights and a LoRA adapter of rank 16 on every projection. FLOPs as in
`benchmarks.throughput`, but gradients of frozen weights are none: learning = 2 * forward (backward once) plus three
times the adapters' own products. One token decoded is the difference between answers of `tokens` and of 1 token,
divided. `busy` is wall time; `spent` is processor time of all threads, which other work on the machine hardly moves,
and against it the peak is that of one core.
"""

import dataclasses
import time
from collections.abc import Callable
from typing import Any

import jax
import numpy as np
import tyro

from benchmarks.measure import Spread, facts, matmul_peak, show, usable_cores, use_cores, write
from benchmarks.peer_mallm import Worker
from benchmarks.throughput import forward_flops
from benchmarks.workloads import SMOLLM2, Workload
from mallm import cli
from mallm.io.log import peak_rss_mib
from mallm.learn.pack import Packing, Row, pack
from mallm.learn.update import Knobs
from mallm.models import lora
from mallm.rollout.jax_engine import generate, unrolls


@dataclasses.dataclass(frozen=True)
class Settings:
    """Settings of the phases benchmark.

    Attributes:
      repeats: timed calls of each, after one that compiles.
      batches: (prompts, answers to each) of the decoded batches.
      tokens: answer length from which one decoded token is measured.
      cores: keeps the process to this many cores (Linux); 0 leaves it all.
      layers: makes the model that shallow, to try the benchmark; such results are not stored.
      seed: of weights, prompts and draws.
    """

    repeats: int = 3
    batches: tuple[tuple[int, int], ...] = ((1, 1), (1, 8), (4, 8), (8, 8))
    tokens: int = 16
    cores: int = 0
    layers: int = 0
    seed: int = 0


@dataclasses.dataclass(frozen=True)
class Phase:
    """Seconds of one thing: wall and processor time of each call."""

    name: str
    tokens: int
    flops: float
    busy: Spread
    spent: Spread

    def line(self, peak: float, of_core: float) -> list[str]:
        """Columns of the table; `peak` is all cores' matmul FLOP/s, `of_core` that of one."""
        return [
            self.name, f'{self.tokens:,}', self.busy.show(3), self.spent.show(3),
            f'{self.tokens / self.busy.median:,.0f}', f'{self.flops / self.busy.median / peak:.0%}',
            f'{self.flops / self.spent.median / of_core:.0%}',
        ]  # fmt: skip


def clocked(call: Callable[[], Any], repeats: int) -> tuple[Spread, Spread]:
    """Wall and processor seconds of calls that wait for their result, after one that compiles."""
    call()
    taken = []
    for _ in range(repeats):
        wall, spent = time.perf_counter(), time.process_time()
        call()
        taken.append((time.perf_counter() - wall, time.process_time() - spent))
    busy, spent_s = zip(*taken, strict=True)
    return Spread.of(list(busy)), Spread.of(list(spent_s))


def core_peak(n: int = 1024, repeats: int = 7) -> float:
    """FLOP/s of a square float32 product for each second of processor time."""
    multiply, a = jax.jit(jax.numpy.matmul), jax.numpy.ones((n, n))
    _, spent = clocked(lambda: jax.block_until_ready(multiply(a, a)), repeats)
    return 2.0 * n**3 / spent.low


class Bench:
    """The worker of `benchmarks.peers` and calls of its parts."""

    def __init__(self, work: Workload, settings: Settings) -> None:
        self.work, self.settings = work, settings
        self.worker = Worker(work, settings.seed, split=False)
        self.arch = self.worker.module.arch
        self.draw = np.random.default_rng(settings.seed)

    def sample(self, rows: int, k: int, tokens: int) -> tuple[Spread, Spread]:
        """The engine's compiled part alone, with as many prompts as are asked for and no padding to larger batches."""
        longest = self.work.prompt[1]
        prompts = self.draw.integers(2, self.work.vocab, (rows, longest)).astype(np.int32)
        paths = np.stack([np.zeros(rows), np.arange(rows)], axis=1).astype(np.int32)
        filters = np.tile(np.array([1, 0], np.float32), (rows, 1))
        variables = lora.variables(self.worker.pool.state.params, self.worker.base)

        def call() -> None:
            jax.block_until_ready(
                generate(
                    variables, prompts, np.full(rows, longest, np.int32), paths, jax.random.key(0),
                    np.ones((rows, k), np.float32), filters, None, module=self.worker.module, k=k, limit=tokens,
                    ends=(-1,), filtered=False, unrolled=unrolls(self.worker.module),
                )
            )  # fmt: skip

        return clocked(call, self.settings.repeats)

    def phases_of_sampling(self, rows: int, k: int) -> list[Phase]:
        prompt, tokens = self.work.prompt[1], self.settings.tokens
        first, whole = self.sample(rows, k, 1), self.sample(rows, k, tokens)
        flops_first = forward_flops(self.arch, rows, k, prompt, 1)
        flops = (forward_flops(self.arch, rows, k, prompt, tokens) - flops_first) / (tokens - 1)
        busy, spent = (
            Spread(*((b - a.median) / (tokens - 1) for b in (c.median, c.low, c.high)), c.n)
            for a, c in zip(first, whole, strict=True)
        )
        return [
            Phase(f'prefill of {rows} prompts, K = {k}', rows * prompt, flops_first, *first),
            Phase(f'one token of B = {rows * k}', rows * k, flops, busy, spent),
        ]

    def update(self) -> Phase:
        """A whole optimiser step as `peers` takes it, with AdamW; a prompt counts once for each answer, as there."""
        work, worker = self.work, self.worker
        ids = self.draw.integers(2, work.vocab, (work.groups, work.prompt[1] + work.k * work.new)).tolist()
        logps = ((-float(np.log(work.vocab)),) * work.new,) * work.k
        rows = [
            Row(
                tuple(row[: work.prompt[1]]),
                tuple(tuple(row[work.prompt[1] + j * work.new :][: work.new]) for j in range(work.k)),
                logps, tuple(self.draw.normal(size=work.k).tolist()),
            )
            for row in ids
        ]  # fmt: skip
        steps = pack(rows, Packing(0, work.micro), self.settings.seed)

        def call() -> None:
            worker.pool.learn(worker.updater, steps, Knobs(1e-4), worker.base)

        busy, spent = clocked(call, self.settings.repeats)
        adapters = worker.parameters['trained'] * 2 * (work.groups * (work.prompt[1] + work.k * (work.new - 1)))
        flops = 2 * forward_flops(self.arch, work.groups, work.k, work.prompt[1], work.new) + 3 * adapters
        tokens = work.groups * work.k * (work.prompt[1] + work.new)
        return Phase(f'update, {work.groups} prompts, K = {work.k}', tokens, flops, busy, spent)


def main(settings: Settings) -> None:
    cli.keep_memory()
    use_cores(settings.cores)
    about = facts(settings.seed, ('jax', 'jaxlib', 'flax', 'optax', 'numpy'))
    peaks, cores = matmul_peak(5), core_peak()
    work = dataclasses.replace(SMOLLM2, layers=settings.layers or SMOLLM2.layers)
    bench = Bench(work, settings)
    phases = [phase for rows, k in settings.batches for phase in bench.phases_of_sampling(rows, k)]
    phases.append(bench.update())
    peaks_after, of_core = matmul_peak(5), max(cores, core_peak())
    peak = max(rate.median for rate in (*peaks.values(), *peaks_after.values()))
    columns = ['', 'tokens', 'busy s', 'spent s', 'tokens/s', 'of peak', "of a core's"]
    show(f'{usable_cores()} cores; {work.title}', columns, [phase.line(peak, of_core) for phase in phases])
    print(f'matmul {peak / 1e9:.0f} GFLOP/s, {of_core / 1e9:.0f} for each core; peak RSS {peak_rss_mib():,.0f} MiB')
    if settings.layers:
        return
    found = {
        'settings': dataclasses.asdict(settings),
        'workload': dataclasses.asdict(work),
        'matmul_flops_per_s': {'before': peaks, 'after': peaks_after, 'of_a_core': of_core},
        'phases': [
            dataclasses.asdict(phase)
            | {'share_of_peak': phase.flops / phase.busy.median / peak}
            | {'share_of_core_peak': phase.flops / phase.spent.median / of_core}
            for phase in phases
        ],
        'peak_rss_mib': peak_rss_mib(),
    }
    write('phases', about | found)


if __name__ == '__main__':
    main(tyro.cli(Settings, description=__doc__))
