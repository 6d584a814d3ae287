"""Before any reinforcement: supervised training, on the task's demonstrations or on a user's own transcripts.

A run does it by the settings `warm_start`. In a program, with a run that `run.build` made:

    rows = [row_of(run, Demonstration('tool', (Message('user', 'What is 3 times 4?'),), '3 * 4')), ...]
    for step in range(50):
        told = clone(run, 'left', rows, 1e-3, seed=step)  # the pool that plays `tool`
    settle(run)
"""

import dataclasses
import functools
import itertools
import pathlib
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence

import jax
import jinja2

from mallm import hosts, rng
from mallm.config import require
from mallm.envs import transcripts
from mallm.envs.base import Demonstration
from mallm.envs.data import DataError, Order
from mallm.learn.pack import Row, demonstration, pack
from mallm.learn.state import LearnerState, with_reference
from mallm.learn.update import Knobs
from mallm.rollout.chat import prompt_for
from mallm.run import Run, load


def warm_start(run: Run) -> None:
    """Supervised training, as the settings say, of each pool, or of the base that they adapt, frozen from then on.

    From demonstrations that need no solver a role becomes a weak beginner, not an expert; from transcripts it becomes
    what these show, and with LoRA its adapter does, over the base as it came.
    """
    settings = run.experiment.warm_start
    lessons = from_transcripts(run) if settings.transcripts else from_demonstrations(run)
    started = time.process_time()
    for step in itertools.count():
        run.guard.at(step, 'warm start')
        spent = hosts.agreed((time.process_time() - started) / 60)
        done = spent / settings.cpu_minutes if settings.cpu_minutes else step / max(1, settings.steps)
        if done >= 1 or not settings.steps:
            break
        for pool, rows_at in sorted(lessons.items()):
            learned = clone(run, pool, rows_at(step), settings.rate * (1 - done), seed=step)
            run.sink.write('warm_start', step, {f'loss/{pool}': learned['loss'], f'entropy/{pool}': learned['entropy']})
    settle(run)


def clone(run: Run, pool: str, rows: Sequence[Row], rate: float, seed: int) -> dict[str, float]:
    """One supervised step of a pool on the rows that it is given (see `row_of`); returns metrics, the 'loss' in nats.

    It trains all parameters of the pool, or with LoRA its adapter alone: other pools and the base stay bit for bit as
    they are. By the name of the base it trains that, where the run's warm start is to. `seed` shuffles the rows. The
    engine samples from what was learned after `settle`.

    Raises:
      ValueError: there is no such pool, or the base is frozen.
    """
    steps = pack(rows, dataclasses.replace(run.experiment.packing(), step_groups=0), seed)
    knobs = Knobs(rate, exploration=0.0)
    if run.base and run.base_cloner and pool == run.base.name:
        return run.base.learn(run.base_cloner, steps, knobs)
    require(pool in run.pools, 'pool', pool, f'this run trains {sorted(run.pools)}')
    return run.pools[pool].learn(run.cloner, steps, knobs, run.frozen)


def settle(run: Run) -> None:
    """Ends supervised training: fresh optimisers, what was learned is the KL term's reference and is sampled from."""
    for learner in run.pools.values():
        state = restarted(learner.state)
        learner.state = with_reference(state) if run.experiment.algorithm.kl > 0 else state
    if run.base:
        run.base.state = dataclasses.replace(run.base.state, moments=None)
    load(run, 0, base=True)


def row_of(run: Run, transcript: Demonstration) -> Row:
    """A supervised example: what a role was shown, in its chat template, and what it wrote, with the end token.

    Raises:
      ValueError: a role, prompt or text that the run could not have: unknown, too long, or with an end token in it.
    """
    sampler, tokenizer, role = run.experiment.sampler(), run.tokenizer, transcript.role
    require(role in sampler.roles, 'role', role, f'is not of the team {tuple(sampler.roles)}')
    try:
        prompt, answer = prompt_for(role, transcript.messages, tokenizer), tokenizer.encode(transcript.text)
    except jinja2.TemplateError as error:
        raise ValueError(f'messages: the chat template refuses them ({error})') from error
    require(
        not set(answer) & set(tokenizer.ends), 'text', transcript.text, 'holds an end token; leave it out: it is added'
    )
    longest, shown = sampler.roles[role].max_tokens, len(prompt.ids)
    require(
        len(answer) < longest, 'text', transcript.text[:80],
        f'is {len(answer) + 1} tokens with its end, more than sampling.max_tokens={longest} of {role!r}: raise that',
    )  # fmt: skip
    require(
        not sampler.max_prompt or shown <= sampler.max_prompt, 'messages', f'{shown} tokens',
        f'are a longer prompt than sampling.max_prompt or the context of the model allows ({sampler.max_prompt})',
    )  # fmt: skip
    return demonstration(prompt, (*answer, tokenizer.end))


Lessons = Mapping[str, Callable[[int], list[Row]]]
"""For each pool that the warm start trains, the rows of each step."""


def from_transcripts(run: Run) -> Lessons:
    """Each pool goes through the transcripts of its roles in a seeded order; a pool that has none stays as it is.

    Raises:
      DataError: the file cannot be read, or a line does not fit the team or the run; with file and line.
    """
    experiment, settings = run.experiment, run.experiment.warm_start
    rows: dict[str, list[Row]] = defaultdict(list)
    for number, transcript in enumerate(transcripts.read(settings.transcripts, experiment.task.team), 1):
        try:
            rows[experiment.pools[transcript.role]].append(row_of(run, transcript))
        except ValueError as error:
            raise DataError(f'{pathlib.Path(settings.transcripts).name}, line {number}: {error}') from error
    run.sink.note(f'transcripts: {", ".join(f"{len(mine)} for pool {pool}" for pool, mine in sorted(rows.items()))}')

    def rows_at(pool: str, step: int) -> list[Row]:
        order = Order(len(rows[pool]), experiment.seed)
        return [rows[pool][order.at(place)] for place in range(step * settings.rows, (step + 1) * settings.rows)]

    return {pool: functools.partial(rows_at, pool) for pool in rows}


def from_demonstrations(run: Run) -> Lessons:
    """What the task itself shows: to each pool what its roles do, to a base of adapters all."""
    seeds = itertools.count()

    def rows_at(pool: str, step: int) -> list[Row]:
        return demonstrations(run, pool, seeds)

    return {pool: functools.partial(rows_at, pool) for pool in ([run.base.name] if run.base else run.pools)}


def demonstrations(run: Run, pool: str, seeds: Iterator[int]) -> list[Row]:
    """One supervised step's rows for the roles that a pool plays; what is too long for an answer is left out.

    Raises:
      ValueError: what the task shows cannot be a prompt of the run, or there is too little of it.
    """
    experiment = run.experiment
    wanted, rows, roles = experiment.warm_start.rows, [], experiment.sampler().roles
    for _ in range(1000 * wanted):
        seed = rng.seed_for(experiment.seed, rng.WARM_START, next(seeds)) % (1 << 40)
        rows += [
            row_of(run, shown)
            for shown in experiment.task.demonstrations(seed)
            if (run.base or experiment.pools[shown.role] == pool)
            and len(run.tokenizer.encode(shown.text)) < roles[shown.role].max_tokens
        ]
        if len(rows) >= wanted:
            return rows
    raise ValueError(
        f'{1000 * wanted} seeds gave {len(rows)} of {wanted} demonstrations for pool {pool!r}: widen the task, raise '
        'sampling.max_tokens, or skip the warm start with warm_start.steps=0'
    )


def restarted(state: LearnerState) -> LearnerState:
    """The same parameters with a fresh optimiser: what the warm start learned is kept, how it learned is not."""
    return dataclasses.replace(
        state, updates=state.updates * 0, moments=jax.tree.map(lambda moment: moment * 0, state.moments)
    )
