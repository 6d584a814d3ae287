"""Before any reinforcement: every role is trained on demonstrations until it is a weak beginner."""

import dataclasses
import itertools
import time
from collections.abc import Iterator, Mapping, Sequence

import jax

from mallm import hosts, rng
from mallm.learn.pack import Row, demonstration, pack
from mallm.learn.pool import Pool
from mallm.learn.state import LearnerState, with_reference
from mallm.learn.update import Knobs
from mallm.rollout.chat import prompt_for
from mallm.run import Run, load


def warm_start(run: Run) -> None:
    """Supervised training of every role from demonstrations that need no solver: a weak beginner, not an expert.

    It trains each pool, or in their place the one base that they adapt, which is frozen from then on.
    """
    settings = run.experiment.warm_start
    seeds = itertools.count()
    started = time.process_time()
    for step in itertools.count():
        run.guard.at(step, 'warm start')
        spent = hosts.agreed((time.process_time() - started) / 60)
        done = spent / settings.cpu_minutes if settings.cpu_minutes else step / max(1, settings.steps)
        if done >= 1 or not settings.steps:
            break
        for pool in sorted(beginners(run)):
            rows = demonstrations(run, pool, seeds)
            learned = clone(run, pool, rows, settings.rate * (1 - done), seed=step)
            run.sink.write('warm_start', step, {f'loss/{pool}': learned['loss'], f'entropy/{pool}': learned['entropy']})
    for learner in run.pools.values():
        state = restarted(learner.state)
        learner.state = with_reference(state) if run.experiment.algorithm.kl > 0 else state
    if run.base:
        run.base.state = dataclasses.replace(run.base.state, moments=None)
    load(run, 0, base=True)


def beginners(run: Run) -> Mapping[str, Pool]:
    """What the warm start trains."""
    return {run.base.name: run.base} if run.base else run.pools


def demonstrations(run: Run, pool: str, seeds: Iterator[int]) -> list[Row]:
    """One supervised step's rows for the roles that a pool plays."""
    experiment = run.experiment
    wanted, rows, limits = experiment.warm_start.rows, [], experiment.sampler().roles
    for _ in range(1000 * wanted):
        seed = rng.seed_for(experiment.seed, rng.WARM_START, next(seeds)) % (1 << 40)
        rows += [
            demonstration(
                prompt_for(d.role, d.messages, run.tokenizer),
                (*run.tokenizer.encode(d.text), run.tokenizer.end)[: limits[d.role].max_tokens],
            )
            for d in experiment.task.demonstrations(seed)
            if run.base or experiment.pools[d.role] == pool
        ]
        if len(rows) >= wanted:
            return rows
    raise ValueError(
        f'{1000 * wanted} seeds gave {len(rows)} of {wanted} demonstrations for pool {pool!r}: widen the task, or skip '
        'the warm start with warm_start.steps=0'
    )


def clone(run: Run, pool: str, rows: Sequence[Row], rate: float, seed: int) -> dict[str, float]:
    """One supervised step on given rows; with `learn.pack.demonstration` it takes a user's own transcripts."""
    packing = dataclasses.replace(run.experiment.packing(), step_groups=0)
    return beginners(run)[pool].learn(run.cloner, pack(rows, packing, seed), Knobs(rate, exploration=0.0))


def restarted(state: LearnerState) -> LearnerState:
    """The same parameters with a fresh optimiser: what the warm start learned is kept, how it learned is not."""
    return dataclasses.replace(
        state, updates=state.updates * 0, moments=jax.tree.map(lambda moment: moment * 0, state.moments)
    )
