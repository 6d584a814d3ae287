"""How fast one process samples and learns with the main experiment's model, beside what this machine's matmul reaches.

Command:  python -m benchmarks.throughput            (about 5 minutes on 2 cores; --help shows every setting)

FLOPs counted (a multiply-add is 2; padding there is none; recomputation is NOT counted):
  forward = 2 * block_weights * tokens_through_blocks + 2 * width * vocab * scored_positions
            + 4 * layers * heads * head_dim * sum over tokens of the keys they attend to
  sampling = forward of the prompts once and of all answers but their last token; learning = 3 * forward (backward 2).
"""

import asyncio
import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np
import tyro
from flax import linen as nn

from benchmarks.measure import (
    Spread,
    Timing,
    facts,
    matmul_peak,
    show,
    timed,
    timed_in_turn,
    use_cores,
    write,
)
from mallm import cli
from mallm.experiment import Experiment, ModelSettings
from mallm.io.log import peak_rss_mib
from mallm.learn.pack import Packing, Row, pack
from mallm.learn.state import make_state, optimiser
from mallm.learn.update import Knobs, Updater
from mallm.models.config import Architecture
from mallm.models.sharding import make_mesh
from mallm.models.transformer import Transformer
from mallm.rollout.chat import TinyTokenizer
from mallm.rollout.engine import SamplingParams
from mallm.rollout.jax_engine import JaxEngine, generate
from mallm.types import Prompt


@dataclasses.dataclass(frozen=True)
class Settings:
    """Settings of the throughput benchmark.

    Attributes:
      repeats: timed calls of each shape, after one that compiles.
      seed: of weights, prompts and draws.
      rows: prompts in a sampling batch.
      ks: answers to each prompt.
      prompt_tokens: prompt lengths of the learner; sampling uses the longest.
      answer_tokens: tokens of every answer.
      groups: groups in the learner's batch.
      cores: keeps the process to this many cores (Linux); 0 leaves it all.
      wide: width of the larger model (its ffn is twice that, heads are of 64); 0 leaves it out.
    """

    repeats: int = 7
    seed: int = 0
    rows: tuple[int, ...] = (32, 128)
    ks: tuple[int, ...] = (1, 4, 8, 16)
    prompt_tokens: tuple[int, ...] = (32, 48)
    answer_tokens: int = 8
    groups: int = 32
    cores: int = 0
    wide: int = 512


class Endless(TinyTokenizer):
    """A tokenizer whose end token cannot be drawn, so that every answer has its full length."""

    END = -1


def forward_flops(arch: Architecture, groups: int, k: int, prompt: int, answer: int) -> float:
    """FLOPs of one pass over `groups` prompts and their K answers; see the head of this file."""
    d_qkv = (arch.heads + 2 * arch.kv_heads) * arch.head_dim
    block = arch.width * (d_qkv + arch.heads * arch.head_dim) + 3 * arch.width * arch.ffn
    tokens = prompt + k * (answer - 1)
    keys = prompt * (prompt + 1) / 2 + k * sum(prompt + s + 1 for s in range(answer - 1))
    return groups * (
        2 * arch.layers * block * tokens
        + 2 * arch.width * arch.vocab * k * answer
        + 4 * arch.layers * arch.heads * arch.head_dim * keys
    )


@dataclasses.dataclass(frozen=True)
class Measured:
    """One shape of one phase: sampling (tokens = sampled), prefill (prompt tokens) or learning (prompt and answers)."""

    model: str
    phase: str
    rows: int
    k: int
    prompt: int
    tokens: int
    flops: float
    timing: Timing

    @property
    def rate(self) -> Spread:
        return self.timing.seconds.rate(self.tokens)

    def share(self, peak: float) -> float:
        return self.flops / self.timing.seconds.median / peak

    def record(self, peak: float) -> dict[str, Any]:
        return dataclasses.asdict(self) | {'tokens_per_s': self.rate, 'share_of_matmul_peak': self.share(peak)}

    def line(self, peak: float) -> list[str]:
        seconds, rate = self.timing.seconds, self.rate
        return [
            f'{self.model} {self.phase}', str(self.rows), str(self.k), str(self.prompt),
            Spread(seconds.median * 1e3, seconds.low * 1e3, seconds.high * 1e3, seconds.n).show(1), rate.show(),
            f'{self.share(peak):.0%}', f'{self.timing.compile_s:.1f}',
        ]  # fmt: skip


class Bench:
    """One model with its learner and its engine."""

    def __init__(self, name: str, model: ModelSettings, settings: Settings) -> None:
        experiment, self.name, self.settings = Experiment(), name, settings
        tokenizer = Endless()
        self.arch = model.architecture(len(tokenizer))
        self.module = Transformer(self.arch)
        learning, algorithm = experiment.learning, experiment.algorithm
        transform = optimiser(clip=learning.clip, b1=learning.b1, b2=learning.b2, weight_decay=learning.weight_decay)
        mesh, root = make_mesh(), jax.random.key(settings.seed)
        self.state, shardings = make_state(
            root, module=self.module, transform=transform, mesh=mesh, entropy_coefficient=0.0, keeps_reference=False
        )
        self.updater = Updater(
            module=self.module, objective=algorithm.build().objective, transform=transform, mesh=mesh,
            shardings=shardings,
        )  # fmt: skip
        self.engine = JaxEngine(self.module, tokenizer, root)
        self.ids = np.random.default_rng(settings.seed)

    @property
    def parameters(self) -> int:
        return sum(leaf.size for leaf in jax.tree.leaves(nn.unbox(self.state.params)))

    def sample(self, shapes: Sequence[tuple[int, int]], answer: int) -> list[Measured]:
        """Whole engine calls of (rows, K), requests in and answers out, timed in turn.

        One token an answer is the prefill alone, and one draw.
        """
        prompt = max(self.settings.prompt_tokens)
        self.engine.load('policy', self.state.params, 0)
        phase = 'prefill' if answer == 1 else 'sample'
        timings = timed_in_turn([self.call(*shape, prompt, answer) for shape in shapes], self.settings.repeats)
        return [
            Measured(
                self.name, phase, rows, k, prompt, rows * (prompt if answer == 1 else k * answer),
                forward_flops(self.arch, rows, k, prompt, answer), timing,
            )
            for (rows, k), timing in zip(shapes, timings, strict=True)
        ]  # fmt: skip

    def call(self, rows: int, k: int, prompt: int, answer: int) -> Callable[[], Any]:
        ids = self.ids.integers(2, self.arch.vocab, (rows, prompt)).tolist()
        prompts = [Prompt('plan', (), tuple(row)) for row in ids]
        params = SamplingParams(answer)

        async def ask() -> list[Any]:
            return await asyncio.gather(
                *[self.engine.sample('policy', p, (0, i), k, params) for i, p in enumerate(prompts)]
            )

        return lambda: asyncio.run(ask())

    def learn(self, groups: int, k: int, prompt: int, answer: int) -> Measured:
        """A whole optimiser step of one micro-batch: loss, gradient, clipping, AdamW."""
        ids = self.ids.integers(2, self.arch.vocab, (groups, prompt + k * answer)).tolist()
        logps = ((-float(np.log(self.arch.vocab)),) * answer,) * k
        rows = [
            Row(
                tuple(row[:prompt]),
                tuple(tuple(row[prompt + j * answer :][:answer]) for j in range(k)),
                logps,
                tuple(self.ids.normal(size=k).tolist()),
            )
            for row in ids
        ]
        ((batch,),) = pack(rows, Packing(0, groups), self.settings.seed)

        def step() -> None:
            self.state, metrics = self.updater(self.state, [batch], Knobs(1e-4))
            jax.block_until_ready((self.state, metrics))

        timing = timed(step, self.settings.repeats)
        flops = 3 * forward_flops(self.arch, groups, k, prompt, answer)
        return Measured(self.name, 'learn', groups, k, prompt, groups * (prompt + k * answer), flops, timing)


def measure_main(bench: Bench) -> list[Measured]:
    s = bench.settings
    shapes = [(rows, k) for rows in s.rows for k in s.ks]
    return [
        *bench.sample(shapes, 1),
        *bench.sample(shapes, s.answer_tokens),
        *[bench.learn(s.groups, 8, prompt, s.answer_tokens) for prompt in s.prompt_tokens],
    ]


def measure_wide(bench: Bench) -> list[Measured]:
    s = bench.settings
    return [
        *bench.sample([(s.rows[0], 8)], s.answer_tokens),
        bench.learn(s.groups, 8, max(s.prompt_tokens), s.answer_tokens),
    ]


def main(settings: Settings) -> None:
    cli.keep_memory()
    use_cores(settings.cores)
    about = facts(settings.seed, ('jax', 'jaxlib', 'flax', 'optax', 'numpy'))
    peaks = matmul_peak(settings.repeats)
    benches = [Bench('main', ModelSettings(), settings)]
    measured = measure_main(benches[0])
    if settings.wide:
        w = settings.wide
        wide = ModelSettings(width=w, heads=w // 64, kv_heads=max(1, w // 128), head_dim=64, ffn=2 * w)
        benches.append(Bench(f'width {w}', wide, settings))
        measured += measure_wide(benches[1])
    peaks_after = matmul_peak(settings.repeats)
    peak = max(rate.median for rate in (*peaks.values(), *peaks_after.values()))
    prefill = {(m.rows, m.k): m.timing.seconds.median for m in measured if m.phase == 'prefill'}
    shared = {rows: prefill[rows, 8] / prefill[rows, 1] for rows in settings.rows if {1, 8} <= set(settings.ks)}
    columns = ['model, phase', 'rows', 'K', 'prompt', 'ms', 'tokens/s', 'of peak', 'compile s']
    show(
        'Median (range). Tokens: sample = sampled, prefill = prompt, learn = both',
        columns,
        [m.line(peak) for m in measured],
    )
    shapes = {bench.name: bench.updater.compiles for bench in benches}
    compiles = {'generate': generate._cache_size(), 'update': shapes}
    print(f'matmul peak {peak / 1e9:.0f} GFLOP/s; peak RSS {peak_rss_mib():.0f} MiB; compiled shapes {compiles}')
    print('prefill at K = 8 over K = 1: ' + ', '.join(f'{rows} rows {ratio:.2f}' for rows, ratio in shared.items()))
    write(
        'throughput',
        about
        | {
            'settings': dataclasses.asdict(settings),
            'parameters': {bench.name: bench.parameters for bench in benches},
            'flops': __doc__,
            'matmul_flops_per_s': {'before': peaks, 'after': peaks_after},
            'measured': [m.record(peak) for m in measured],
            'prefill_k8_over_k1': shared,
            'compiles': compiles,
            'compile_s': sum(m.timing.compile_s for m in measured),
            'peak_rss_mib': peak_rss_mib(),
        },
    )


if __name__ == '__main__':
    main(tyro.cli(Settings, description=__doc__))
