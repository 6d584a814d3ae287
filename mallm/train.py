"""The one place where everything meets: play, credit, route, pack, learn, load, log, evaluate, save."""

import contextlib
import dataclasses
import time
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import jax

from mallm import hosts, rng
from mallm.envs.base import HELD_OUT, REPORTED, STRICT
from mallm.evaluate import Evaluation, examined, mean, played, replay_of, summarise
from mallm.experiment import Experiment
from mallm.folder import commit, folder_and_step
from mallm.guard import guarded
from mallm.io.base import fingerprint, save_base
from mallm.io.files import COSTS
from mallm.io.report import write_report
from mallm.learn.accumulate import Lesson
from mallm.learn.pack import pack, rows_of
from mallm.learn.route import answer_metrics, dead_shares, route
from mallm.learn.update import Knobs, importance
from mallm.pipeline import AsTheyEnd, InTurn, Rollout, Rollouts, overlapped, refuse_stale, staleness
from mallm.rollout import tree
from mallm.rollout.workers import Seeded, WorkersLostError
from mallm.run import Run, build, load, restore, save
from mallm.serving import engines
from mallm.types import Credited, Trajectory
from mallm.warm import warm_start


class TooManyFaultsError(RuntimeError):
    """More episodes of a step or of an evaluation failed than `sampling.max_fault_share` allows."""


def train(experiment: Experiment, resume: str | None = None, limits: hosts.Hosts = hosts.ALONE) -> Mapping[str, Any]:
    """Runs an experiment from its warm start (or its newest checkpoint) to its summary, which it returns.

    Where it has several processes, all of them call this, and `limits` says when they give each other up.
    """
    experiment.overlap.check_processes(jax.process_count())
    code = commit()  # before anything can change on disk
    with (
        folder_and_step(experiment, resume) as (folder, at),
        guarded(folder, limits) as guard,
        engines(experiment) as make_engine,
        contextlib.closing(build(experiment, folder, at, guard, make_engine)) as run,
        run.sink,
    ):
        for line in experiment.task.about():
            run.sink.note(line)
        saved, progress = begin(run, code) if at is None else restore(run, at)
        if 'before' not in progress:
            progress |= {'before': first_report(run, progress)}
        step = saved
        with overlapped(run, play) as rollouts:
            while step < experiment.steps and (done := share_done(experiment, step, progress)) < 1:
                started = time.process_time()
                with saved_where_play_fails(run, step, progress):
                    if experiment.overlap.early:
                        tokens = early_step(run, step, done)
                    else:
                        tokens = train_step(run, step, done, rollouts)
                progress['training_cpu_minutes'] += hosts.agreed((time.process_time() - started) / 60)
                if 'training_tokens' in progress:  # a run that goes on from an older checkpoint does not know
                    progress['training_tokens'] += tokens
                step += 1
                if experiment.evaluation.every and step % experiment.evaluation.every == 0:
                    with saved_where_play_fails(run, step, progress):
                        watch(run, step, progress)
                if step % experiment.save_every == 0:
                    save(run, step, progress)
                    saved = step
        if saved != step:  # what is reported is what is kept, whichever budget ended the run
            save(run, step, progress)
        after = report(run, 'after', step)
        summary = summarise(experiment, progress, after, name=folder.name, minutes=run.sink.minutes())
        run.sink.summary(summary)
    if jax.process_index() == 0:
        write_report(folder)
    return summary


@contextlib.contextmanager
def saved_where_play_fails(run: Run, step: int, progress: Mapping[str, Any]) -> Iterator[None]:
    """What was learned until play failed, as when all servers or workers are dead, is saved before the run ends."""
    try:
        yield
    except (TooManyFaultsError, WorkersLostError):
        if run.checkpoints.latest() != step:
            save(run, step, progress)
        raise


def begin(run: Run, code: str) -> tuple[int, dict[str, Any]]:
    """The warm start, saved as step 0: what comes after it may fail. Returns that and what goes into checkpoints."""
    warm_start(run)
    if run.experiment.clones_base:
        save_base(run.folder, run.frozen)
    progress: dict[str, Any] = {'commit': code, 'training_cpu_minutes': 0.0, 'training_tokens': 0}
    progress |= {'base': fingerprint(run.frozen)} if run.base else {}
    save(run, 0, progress)
    return 0, progress


def first_report(run: Run, progress: Mapping[str, Any]) -> dict[str, Any]:
    """What the team can do before any training step."""
    if run.experiment.evaluation.every:
        watch(run, 0, progress)
    return report(run, 'before', 0)


def train_step(run: Run, step: int, done: float, rollouts: Rollouts | None = None) -> int:
    """One training step: the loop of the whole project. Returns how many tokens were sampled for it."""
    experiment, rollouts = run.experiment, rollouts or InTurn(run, play)
    run.guard.at(step, 'play')
    rollout = rollouts.take(step)
    sound = sound_of(run, step, rollout)
    taken_at = time.perf_counter()
    run.guard.at(step, 'learn')
    credited = run.algorithm.credit(sound)
    learning_roles = run.algorithm.schedule(step, experiment.learners)
    temperatures = experiment.temperatures()
    for pool, live in sorted(route(credited, learning_roles).items()):
        seed = rng.seed_for(experiment.seed, rng.SHUFFLE, step, rng.number_of(pool))
        steps = pack(rows_of(live, temperatures, experiment.keep()), experiment.packing(), seed)
        if experiment.algorithm.old_policy == 'learner':
            state = run.pools[pool].state
            steps = [[run.updater.rescored(state, batch, run.frozen) for batch in micros] for micros in steps]
        weights = importance(steps, experiment.algorithm.truncate) if experiment.overlap.staleness else {}
        learned = run.pools[pool].learn(run.updater, steps, knobs(experiment, step, done, pool), run.frozen)
        run.sink.write(f'update/{pool}', step, learned | weights)
    paused = rollouts.load(step + 1)
    rollout = dataclasses.replace(rollout, waited=rollout.waited + paused)
    seconds = time.perf_counter() - taken_at - paused
    run.sink.write('rollout', step, rollout_metrics(run, step, rollout, credited, seconds))
    return sampled_tokens(rollout.trajectories)


def early_step(run: Run, step: int, done: float) -> int:
    """The same with one optimiser step, whose gradients are added up as episodes end, while others still play."""
    experiment, started = run.experiment, time.perf_counter()
    learning_roles = run.algorithm.schedule(step, experiment.learners)
    rescores = experiment.algorithm.old_policy == 'learner'
    lessons: dict[str, Lesson] = {}
    run.guard.at(step, 'play')
    with AsTheyEnd(run, play, step) as episodes:
        for siblings in episodes:
            credited = run.algorithm.credit([trajectory for trajectory in siblings if trajectory.fault is None])
            for pool, live in sorted(route(credited, learning_roles).items()):
                if pool not in lessons:
                    knob = knobs(experiment, step, done, pool)
                    packing, learner = experiment.packing(), run.pools[pool]
                    lessons[pool] = Lesson(learner, run.updater, packing, knob, run.frozen, rescores=rescores)
                lessons[pool].add(rows_of(live, experiment.temperatures(), experiment.keep()))
        rollout = episodes.whole()
    sound = sound_of(run, step, rollout)
    run.guard.at(step, 'learn')
    for pool, lesson in sorted(lessons.items()):
        run.sink.write(f'update/{pool}', step, lesson.finish())
    load(run, step + 1)
    seconds = time.perf_counter() - started - rollout.waited
    run.sink.write('rollout', step, rollout_metrics(run, step, rollout, run.algorithm.credit(sound), seconds))
    return sampled_tokens(rollout.trajectories)


def sampled_tokens(trajectories: Sequence[Trajectory]) -> int:
    """Tokens of all candidates, those of failed episodes and of dead groups too: what was paid for."""
    groups = (group for trajectory in trajectories for turn in trajectory.turns for group in turn.groups)
    return sum(len(candidate.answer.ids) for group in groups for candidate in group.candidates)


def play(run: Run, step: int, cast: Mapping[str, str], witness: tree.Witness = tree.NOBODY) -> list[Trajectory]:
    """Plays the step's environments, all at once; every process plays its share and gets them all."""
    experiment, envs = run.experiment, run.experiment.sampling.envs
    seeds = [rng.seed_for(experiment.seed, rng.TRAIN, step, env) % (1 << 40) for env in range(envs)]
    worlds = [Seeded(experiment.task, seed, step * envs + env, experiment.seed) for env, seed in enumerate(seeds)]
    sample = {'tree': tree.play_tree, 'parallel': tree.play_parallel}[experiment.sampling.mode]
    place = tree.Place(experiment.seed, rng.TRAIN, step, env=0)
    return played(sample, worlds, place, dataclasses.replace(run.stage(cast), witness=witness))


def sound_of(run: Run, step: int, rollout: Rollout) -> list[Trajectory]:
    """The episodes that can be learned from; too many faults, or answers of too old weights, end the run."""
    sound = [trajectory for trajectory in rollout.trajectories if trajectory.fault is None]
    refuse_too_many_faults(run.experiment, rollout.trajectories, sound)
    refuse_stale(run, step, sound)
    return sound


def refuse_too_many_faults(experiment: Experiment, played: Sequence[Trajectory], sound: Sequence[Trajectory]) -> None:
    faults = [trajectory.fault for trajectory in played if trajectory.fault is not None]
    if len(faults) > experiment.sampling.max_fault_share * len(played) or not sound:
        raise TooManyFaultsError(
            f'{len(faults)} of {len(played)} episodes failed (limit {experiment.sampling.max_fault_share:.0%}); the '
            f'first: {faults[0]}'
        )


def share_done(experiment: Experiment, step: int, progress: Mapping[str, Any]) -> float:
    """How far the run is, 0 to 1: by steps, or by the training steps' processor time where that is the budget."""
    if experiment.cpu_minutes:
        return progress['training_cpu_minutes'] / experiment.cpu_minutes
    return step / max(1, experiment.steps)


def knobs(experiment: Experiment, step: int, done: float, pool: str) -> Knobs:
    """A pool's learning rate and entropy target, linear in the share of the run that is done."""
    learning, (first, last) = experiment.learning, experiment.algorithm.entropy_target
    high, low = learning.pool_rates.get(pool, learning.rate)
    rise = min(1.0, (step + 1) / (learning.warmup + 1))
    rate, target = rise * (high + (low - high) * done), first + (last - first) * done
    return Knobs(rate, experiment.algorithm.kl, entropy_target=target)


def rollout_metrics(
    run: Run, step: int, rollout: Rollout, credited: Sequence[Credited], seconds: float
) -> dict[str, float]:
    """What a step's episodes say, by role where that makes sense; `seconds` is how long the learner was busy."""
    faults: dict[str, int] = defaultdict(int)
    for trajectory in rollout.trajectories:
        if trajectory.fault is not None:
            faults[trajectory.fault.split(':')[0]] += 1
    sound = [trajectory for trajectory in rollout.trajectories if trajectory.fault is None]
    engine = hosts.totals(run.engine.metrics() if rollout.counts is None else rollout.counts)
    ages = staleness(step, sound)
    return {
        **answer_metrics(credited, alpha=run.experiment.algorithm.alpha),
        **{f'dead_groups/{role}': share for role, share in dead_shares(credited).items()},
        **{f'faults/{kind}': float(count) for kind, count in faults.items()},
        **engine,
        'faults': 1 - len(sound) / len(rollout.trajectories),
        'episodes_truncated': mean([trajectory.truncated for trajectory in sound]),
        'groups': float(len(credited)),
        'solved_tree': mean([trajectory.solved for trajectory in sound]),
        'turns': mean([len(trajectory.turns) for trajectory in sound]),
        'step_tokens': sampled_tokens(rollout.trajectories),
        'tokens_per_s': engine['tokens_sampled'] / max(1e-9, engine['seconds/sample']),
        'compiles': engine['compiles/sample'] + run.updater.compiles,
        'staleness': mean(ages),
        'staleness_max': float(max(ages, default=0)),
        'seconds/play': rollout.seconds,
        'seconds/wait': rollout.waited,
        'seconds/learn': seconds,
    }


def watch(run: Run, step: int, progress: Mapping[str, Any]) -> None:
    """Greedy success on the held-out and strict splits that may be looked at while training, and its cost so far."""
    boards = run.experiment.evaluation.boards
    easy = examine(run, HELD_OUT, step, boards, 0.0)
    strict = examine(run, STRICT, step, boards, 0.0)
    shares = {'success': easy.success, 'strict': strict.success, 'truncated': easy.truncated, 'faults': easy.faults}
    cost = {name: progress[name] for name in COSTS if name in progress}
    run.sink.write('eval', step, shares | {'turns_to_solve': easy.turns_to_solve} | cost)


def examine(
    run: Run, split: int, step: int, boards: int, temperature: float, cast: Mapping[str, str] | None = None
) -> Evaluation:
    """One evaluation of the present policies on the first `boards` boards of a split."""
    run.guard.at(step, 'evaluate')
    stage = run.stage(cast or run.experiment.pools, temperature)
    outcome = examined(run.experiment, stage, split=split, step=step, boards=boards)
    sound = [trajectory for trajectory in outcome.trajectories if trajectory.fault is None]
    refuse_too_many_faults(run.experiment, outcome.trajectories, sound)
    return outcome


def report(run: Run, when: str, step: int) -> dict[str, Any]:
    """Success on the reported splits, greedy and at temperature 1, and replays of the first boards."""
    settings, words = run.experiment.evaluation, run.experiment.task.words()
    splits = REPORTED[settings.split]
    result: dict[str, Any] = {}
    for name, split in zip(('success', 'strict'), splits, strict=True):
        for suffix, temperature in (('', 0.0), ('_t1', 1.0)):
            outcome = examine(run, split, step, settings.report_boards, temperature)
            result[name + suffix] = outcome.success
            result['faults'] = max(outcome.faults, result.get('faults', 0.0))
            if not suffix:
                result[f'{name}_by_difficulty'] = {str(k): v for k, v in outcome.by_difficulty().items()}
                if name == 'success':
                    result['format'] = outcome.clean
                    pairs = zip(outcome.trajectories, outcome.difficulty, strict=True)
                    run.sink.replays(when, [replay_of(t, d, words) for t, d in list(pairs)[: settings.replays]])
    if len(set(run.experiment.pools.values())) > 1:
        swapped = dict(zip(run.experiment.pools, reversed(run.experiment.pools.values()), strict=True))
        result['swapped'] = examine(run, splits[0], step, settings.report_boards, 0.0, swapped).success
    return result
