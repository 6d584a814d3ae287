"""What overlapping rollouts and learning saves when one role or one world is slow, and who is idle how long.

Command:  python -m benchmarks.overlap            (some minutes on 2 cores; --help shows every setting)

Slowness is made: some answers come `delay_s` seconds late, in which the sampler only waits, as for a far or busy
server. The sampler itself is the embedded engine, or with `--engine sglang` a server started here; either shares this
machine's cores with the learner, so what is saved is waiting, and whatever would have left a core idle. All modes take
one optimiser step a training step and recompute log-probabilities ('ahead' needs that), and all begin with the same
parameters and boards.

  in turn   plays, then learns
  ahead     overlap.staleness=1: plays step n + 1 while step n is learned from (no checkpoint within the timed steps;
            in a run one rollout of `save_every` overlaps with nothing)
  early     overlap.early: learns from environments that have ended while others of the same step still play

The learner is idle while it waits for episodes; the sampler is idle while no rollout is under way (one under way
includes the made delays); the engine, embedded or a server, is idle while nobody waits for its answers.
"""

import asyncio
import dataclasses
import pathlib
import tempfile
import time
from collections.abc import Callable, Mapping
from typing import Any, Literal

import jax
import jax.numpy as jnp
import tyro

from benchmarks.measure import Spread, facts, show, use_cores, write
from mallm import cli, rng
from mallm.experiment import (
    AlgorithmSettings,
    Experiment,
    LearningSettings,
    ModelSettings,
    SamplingSettings,
)
from mallm.overlap import OverlapSettings
from mallm.pipeline import overlapped
from mallm.rollout.engine import Engine, SamplingParams
from mallm.run import Run, build, load
from mallm.serving import engines
from mallm.train import early_step, play, train_step
from mallm.types import Answer, Prompt

WHO = 'learner', 'sampler', 'engine'
MODES = {'in turn': OverlapSettings(), 'ahead': OverlapSettings(staleness=1), 'early': OverlapSettings(early=True)}


@dataclasses.dataclass(frozen=True)
class Settings:
    """Settings of the overlap benchmark.

    Attributes:
      steps: timed training steps of each mode, after one that is not.
      delay_s: seconds that a slow answer comes late.
      envs, k, turns: of a step's rollout.
      width, layers: of the policy.
      micro_groups: groups in a micro-batch.
      engine: 'jax' or 'sglang'.
      seed: of parameters, boards and draws.
      cores: keeps the process to this many cores (Linux); 0 leaves it all.
    """

    steps: int = 5
    delay_s: float = 0.5
    envs: int = 16
    k: int = 8
    turns: int = 3
    width: int = 64
    layers: int = 2
    micro_groups: int = 8
    engine: Literal['jax', 'sglang'] = 'jax'
    seed: int = 0
    cores: int = 0


@dataclasses.dataclass(frozen=True)
class Slow:
    """An engine some of whose answers come late.

    Attributes:
      engine: the sampler.
      late: whether the answers of a role in an environment do.
      delay_s: by how many seconds.
    """

    engine: Engine
    late: Callable[[str, int], bool]
    delay_s: float

    async def sample(
        self, policy: str, prompt: Prompt, path: tuple[int, ...], k: int, params: SamplingParams
    ) -> tuple[Answer, ...]:
        answers = await self.engine.sample(policy, prompt, path, k, params)
        if path[0] == rng.TRAIN and self.late(prompt.role, path[2]):
            await asyncio.sleep(self.delay_s)
        return answers

    def load(self, policy: str, weights: Any, version: int) -> None:
        self.engine.load(policy, weights, version)

    def metrics(self) -> Mapping[str, float]:
        return self.engine.metrics()


SCENARIOS: dict[str, Callable[[str, int], bool]] = {
    'nothing slow': lambda role, env: False,
    'one role slow': lambda role, env: role == 'tool',
    'one world slow': lambda role, env: env == 0,
}


class Kept:
    """A sink that keeps the rows of the rollouts."""

    def __init__(self) -> None:
        self.rows: dict[int, Mapping[str, float]] = {}

    def write(self, axis: str, step: int, metrics: Mapping[str, float]) -> None:
        if axis == 'rollout':
            self.rows[step] = metrics


def experiment_of(settings: Settings) -> Experiment:
    return Experiment(
        seed=settings.seed,
        engine=settings.engine,
        steps=1_000_000,
        save_every=1_000_000,
        model=ModelSettings(width=settings.width, layers=settings.layers, ffn=2 * settings.width),
        sampling=SamplingSettings(envs=settings.envs, k=settings.k, turns=settings.turns),
        algorithm=AlgorithmSettings(old_policy='learner', divisor='tokens'),
        learning=LearningSettings(step_groups=0, micro_groups=settings.micro_groups),
        wandb='disabled',
    )


def measured(run: Run, mode: OverlapSettings, steps: int) -> dict[str, Any]:
    """Some training steps of one mode: seconds of each, and the idle shares of learner and sampler in all of them."""
    run = dataclasses.replace(run, experiment=dataclasses.replace(run.experiment, overlap=mode), sink=Kept())
    load(run, 0)
    run.engine.metrics()
    wall = []
    with overlapped(run, play) as rollouts:
        for step in range(steps + 1):
            started = time.perf_counter()
            if mode.early:
                early_step(run, step, 0.0)
            else:
                train_step(run, step, 0.0, rollouts)
            wall.append(time.perf_counter() - started)
    rows = [run.sink.rows[step] for step in range(1, steps + 1)]
    total = sum(wall[1:])
    return {
        'seconds': Spread.of(wall[1:]),
        'learner_idle': sum(row['seconds/wait'] for row in rows) / total,
        'sampler_idle': max(0.0, 1 - sum(row['seconds/play'] for row in rows) / total),
        'engine_idle': max(0.0, 1 - sum(row['seconds/sample'] for row in rows) / total),
        'staleness': max(row['staleness_max'] for row in rows),
        'compiled_meanwhile': rows[-1]['compiles'] - run.sink.rows[0]['compiles'],
    }


def main(settings: Settings) -> None:
    use_cores(settings.cores)
    cli.keep_memory()
    about = facts(settings.seed, ['jax', 'jaxlib', 'numpy'])
    experiment = experiment_of(settings)
    with tempfile.TemporaryDirectory() as folder, engines(experiment) as make_engine:
        run = build(experiment, pathlib.Path(folder) / 'run', None, make_engine=make_engine)
        run.sink.close()
        engine, born = run.engine, {name: pool.state for name, pool in run.pools.items()}

        def one(late: Callable[[str, int], bool], mode: OverlapSettings) -> dict[str, Any]:
            for pool, state in born.items():
                run.pools[pool].state = jax.tree.map(jnp.copy, state)
            return measured(dataclasses.replace(run, engine=Slow(engine, late, settings.delay_s)), mode, settings.steps)

        one(SCENARIOS['nothing slow'], MODES['in turn'])  # compiles
        results = {
            scenario: {name: one(late, mode) for name, mode in MODES.items()} for scenario, late in SCENARIOS.items()
        }
    rows = [
        [f'{scenario}: {mode}', got['seconds'].show(2), *(f'{got[f"{who}_idle"]:.0%}' for who in WHO)]
        for scenario, modes in results.items()
        for mode, got in modes.items()
    ]
    show('Playing and learning', ['', 'seconds a step', *(f'{who} idle' for who in WHO)], rows)
    write(
        'overlap' if settings.engine == 'jax' else 'overlap_sglang', {**about, 'settings': settings, 'results': results}
    )


if __name__ == '__main__':
    main(tyro.cli(Settings, description=__doc__))
