"""Rollouts ahead of the learner, and learning from episodes as they end: who waits for whom, and with which weights.

Order is shown by events that one side waits for and the other gives: where nothing overlapped, the wait would fail.
"""

import asyncio
import dataclasses
import functools
import threading
from collections.abc import Mapping
from types import SimpleNamespace
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

from mallm.errors import EngineError
from mallm.experiment import AlgorithmSettings, EvaluationSettings, Experiment, LearningSettings, SamplingSettings
from mallm.overlap import OverlapSettings
from mallm.pipeline import AsTheyEnd, StaleAnswersError, overlapped, refuse_stale, staleness
from mallm.run import Run, build, restore, save
from mallm.train import TooManyFaultsError, early_step, play, train_step
from mallm.types import Answer, Candidate, Group, GroupKey, Prompt, Reward, Trajectory, Turn
from tests.golden_step_test import EXPERIMENT, leaves

PATIENCE_S = 120.0
EMPTY = Trajectory(0, 0, (), False, 0.0, ())


class Weights:
    """An engine that only knows what it was given."""

    def __init__(self) -> None:
        self.given: tuple[Any, int] = (jnp.float32(0), 0)

    def load_base(self, base: Any) -> None:
        pass

    def load(self, policy: str, weights: Any, version: int) -> None:
        self.given = (weights, version)

    def metrics(self) -> Mapping[str, float]:
        return {}

    @property
    def holds(self) -> tuple[float, int]:
        return float(self.given[0]), self.given[1]


def bare_run(ahead: int, steps: int = 10, save_every: int = 4, every: int = 0) -> Any:
    """A run without a model, whose only parameter is the number of updates that made it."""
    experiment = Experiment(
        steps=steps,
        save_every=save_every,
        overlap=OverlapSettings(staleness=ahead),
        algorithm=AlgorithmSettings(old_policy='learner'),
        evaluation=EvaluationSettings(every=every),
        sampling=SamplingSettings(envs=2, k=2),
    )
    pool = SimpleNamespace(state=SimpleNamespace(params=jnp.float32(0)))
    return SimpleNamespace(
        experiment=experiment, engine=Weights(), pools={'shared': pool}, algorithm=experiment.algorithm.build()
    )


def update(run: Any) -> None:
    """One more update, which takes the buffer of the parameter that it is given, as a donating one does."""
    before = run.pools['shared'].state.params
    run.pools['shared'].state.params = before + 1
    before.block_until_ready()
    before.delete()


@pytest.mark.parametrize(
    'ahead, played_with',
    [
        (0, [0, 1, 2, 3, 4, 5, 6, 7, 8, 9]),
        (1, [0, 0, 1, 2, 4, 4, 5, 6, 8, 8]),  # a checkpoint every 4 steps, and nothing is played across one
        (2, [0, 0, 0, 1, 4, 4, 4, 5, 8, 8]),
    ],
)
def test_every_rollout_has_the_weights_that_its_step_says_and_keeps_them_through_updates(ahead, played_with):
    run, seen = bare_run(ahead), []

    def play(run, step, cast, witness):
        seen.append((step, *run.engine.holds))
        return [EMPTY]

    with overlapped(run, play) as rollouts:
        for step in range(10):
            rollouts.take(step)
            update(run)
            rollouts.load(step + 1)
    assert seen == [(step, float(version), version) for step, version in enumerate(played_with)]
    assert run.engine.holds == (10.0, 10)


def test_a_run_that_ends_before_its_last_step_leaves_the_engine_what_was_learned():
    """As a budget of processor time does: the rollout under way is dropped, and the report is of the newest weights."""
    run, ended = bare_run(1, save_every=100), threading.Event()

    def play(run, step, cast, witness):
        assert step < 3 or ended.wait(PATIENCE_S)
        return [EMPTY]

    with overlapped(run, play) as rollouts:
        for step in range(3):
            rollouts.take(step)
            update(run)
            rollouts.load(step + 1)
        ended.set()
    assert run.engine.holds == (3.0, 3)


def test_the_next_rollout_runs_while_the_learner_computes():
    """Learning step n waits until the rollout of n + 1 has begun, and that waits until step n is being learned."""
    run = bare_run(1)
    began, learning = ([threading.Event() for _ in range(10)] for _ in range(2))

    def play(run, step, cast, witness):
        began[step].set()
        assert step % 4 == 0 or learning[step - 1].wait(PATIENCE_S)
        return [EMPTY]

    with overlapped(run, play) as rollouts:
        for step in range(10):
            rollouts.take(step)
            learning[step].set()
            assert step + 1 in (4, 8, 10) or began[step + 1].wait(PATIENCE_S)
            update(run)
            rollouts.load(step + 1)


def test_where_the_run_evaluates_rollouts_have_ended_and_the_engine_has_what_was_learned():
    run, ended = bare_run(1, save_every=10, every=2), set()

    def play(run, step, cast, witness):
        ended.add(step)
        return [EMPTY]

    with overlapped(run, play) as rollouts:
        for step in range(4):
            rollouts.take(step)
            update(run)
            rollouts.load(step + 1)
            if (step + 1) % 2 == 0:
                assert run.engine.holds == (step + 1, step + 1) and step + 1 in ended


def test_what_breaks_in_the_samplers_thread_is_raised_in_the_main_one_with_its_cause():
    run = bare_run(1)

    def play(run, step, cast, witness):
        if step == 1:
            try:
                raise OSError('the server hung up')
            except OSError as cause:
                raise RuntimeError('step 1 can not be played') from cause
        return [EMPTY]

    def two_steps() -> None:
        with overlapped(run, play) as rollouts:
            rollouts.take(0)
            rollouts.load(1)
            rollouts.take(1)

    with pytest.raises(RuntimeError, match='step 1 can not be played') as caught:
        two_steps()
    assert isinstance(caught.value.__cause__, OSError)


async def episode(env: int, witness: Any, until: Any) -> Trajectory:
    """An episode that lasts until `until`."""
    witness.began()
    await until
    trajectory = dataclasses.replace(EMPTY, env=env)
    witness.ended(trajectory)
    return trajectory


def test_an_interrupted_run_ends_the_rollout_under_way_and_begins_no_other():
    """Ctrl-C in the main thread, while step 1 waits for a server that never answers."""
    run, under_way, begun = bare_run(2), threading.Event(), []

    def play(run, step, cast, witness):
        begun.append(step)
        if step == 0:
            return [EMPTY]

        async def for_ever() -> list[Trajectory]:
            tasks = [asyncio.create_task(episode(env, witness, asyncio.Event().wait())) for env in range(3)]
            await asyncio.sleep(0)
            under_way.set()
            return list(await asyncio.gather(*tasks))

        return asyncio.run(for_ever())

    def interrupted() -> None:
        with overlapped(run, play) as rollouts:
            rollouts.take(0)
            assert under_way.wait(PATIENCE_S)
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        interrupted()  # it returns only when the thread has ended
    assert begun == [0, 1]


@pytest.mark.parametrize('mode, siblings', [('tree', 1), ('parallel', 2)])
def test_an_environment_is_learned_from_as_soon_as_its_last_sibling_ends_and_before_the_slowest_one(mode, siblings):
    """Environment 1 ends only when environment 0 has been handed over."""
    run, handed_over = bare_run(0), threading.Event()
    credit = {'tree': 'agent_turn', 'parallel': 'team'}[mode]
    run.experiment = dataclasses.replace(
        run.experiment,
        sampling=dataclasses.replace(run.experiment.sampling, mode=mode),
        algorithm=AlgorithmSettings(credit=credit),
    )

    def play(run, step, cast, witness):
        async def all_of_them() -> list[Trajectory]:
            slow = functools.partial(asyncio.to_thread, handed_over.wait, PATIENCE_S)
            untils = [asyncio.sleep(0) if i < siblings else slow() for i in range(2 * siblings)]
            return list(await asyncio.gather(*(episode(i // siblings, witness, u) for i, u in enumerate(untils))))

        return asyncio.run(all_of_them())

    order = []
    with AsTheyEnd(run, play, 0) as episodes:
        for ended in episodes:
            assert len(ended) == siblings and len({trajectory.env for trajectory in ended}) == 1
            order.append(ended[0].env)
            handed_over.set()
        assert [t.env for t in episodes.whole().trajectories] == [i // siblings for i in range(2 * siblings)]
    assert order == [0, 1]


def test_episodes_that_nobody_told_of_are_handed_over_at_the_end():
    """As a way to play that knows no witness would have it: nothing is lost, and nothing is earlier either."""

    def play(run, step, cast, witness):
        return [dataclasses.replace(EMPTY, env=env) for env in range(3)]

    with AsTheyEnd(bare_run(0), play, 0) as episodes:
        assert [[trajectory.env for trajectory in ended] for ended in episodes] == [[0], [1], [2]]


def test_what_breaks_while_episodes_are_handed_over_is_raised_too():
    def play(run, step, cast, witness):
        raise OSError('no server')

    with pytest.raises(OSError, match='no server'), AsTheyEnd(bare_run(0), play, 0) as episodes:
        list(episodes)


def answered(*versions: int) -> Trajectory:
    candidates = tuple(Candidate(Answer((1,), (-1.0,), 'a', 'stop', v), Reward(0, 0)) for v in versions)
    group = Group(GroupKey(5, 0, 0, 0, 'plan'), 'shared', Prompt('plan', (), (1,)), candidates, 0)
    return dataclasses.replace(EMPTY, turns=(Turn((group,)),))


def test_answers_older_than_allowed_end_the_run():
    run = bare_run(1)
    assert staleness(5, [answered(4, 5), answered(4)]) == [1, 0, 1]
    refuse_stale(run, 5, [answered(4, 5)])
    refuse_stale(run, 5, [])
    with pytest.raises(
        StaleAnswersError, match=r'step 5: an answer is of weights 2 updates old, and overlap.staleness=1'
    ):
        refuse_stale(run, 5, [answered(5, 3)])


# --- with a model


class Kept:
    """A sink that keeps every row."""

    def __init__(self) -> None:
        self.rows: dict[tuple[str, int], dict[str, float]] = {}

    def write(self, axis: str, step: int, metrics: Mapping[str, float]) -> None:
        self.rows[axis, step] = dict(metrics)

    def mark(self, step: int) -> None:
        pass


@pytest.fixture(scope='module')
def living(tmp_path_factory) -> Run:
    """A tiny team, its checkpoint of the beginning, and steps of one optimiser step each."""
    experiment = dataclasses.replace(
        EXPERIMENT,
        steps=6,
        save_every=3,
        evaluation=EvaluationSettings(every=0),
        sampling=dataclasses.replace(EXPERIMENT.sampling, envs=6, k=4),
        algorithm=dataclasses.replace(EXPERIMENT.algorithm, old_policy='learner', divisor='tokens'),
        learning=LearningSettings(step_groups=0, micro_groups=2, rate=(1e-2, 1e-2), warmup=0),
    )
    run = build(experiment, tmp_path_factory.mktemp('pipeline') / 'run', None)
    run.sink.close()
    run = dataclasses.replace(run, sink=Kept())
    save(run, 0, {})
    return run


def afresh(run: Run, at: int = 0, **overlap: Any) -> Run:
    """The run back at a checkpoint, with another way to overlap, and an empty sink."""
    experiment = dataclasses.replace(run.experiment, overlap=OverlapSettings(**overlap))
    run = dataclasses.replace(run, experiment=experiment, sink=Kept())
    restore(run, at)
    run.engine.metrics()  # what it counted before
    return run


def trained(run: Run) -> list[np.ndarray]:
    return [leaf for name in sorted(run.pools) for leaf in leaves(run.pools[name].state)]


def advance(run: Run, first: int, last: int, *, cut_after: int | None = None, saves: bool = False) -> None:
    """Training steps, as `train` takes them; cut after one, with the next rollout under way."""
    with overlapped(run, play) as rollouts:
        for step in range(first, last):
            train_step(run, step, step / 6, rollouts)
            if step == cut_after:
                raise InterruptedError
            if saves and (step + 1) % 3 == 0:
                save(run, step + 1, {})


def lasting(row: Mapping[str, float]) -> dict[str, float]:
    """What does not depend on the time that anything took, nor on what was played and compiled before."""
    passing = ('tokens_per_s', 'batches', 'compiles', 'compiles/sample')
    return {name: value for name, value in row.items() if 'seconds' not in name and name not in passing}


def test_a_pipelined_run_is_stale_by_one_at_most_and_ends_bit_for_bit_the_same_when_it_was_cut(living):
    run = afresh(living, staleness=1)
    advance(run, 0, 6, saves=True)
    straight, told = trained(run), run.sink.rows
    ages = [told['rollout', step]['staleness_max'] for step in range(6)]
    assert ages == [0, 1, 1, 0, 1, 1] and [told['rollout', step]['staleness'] for step in range(6)] == ages
    weights = {step: row['importance'] for (axis, step), row in told.items() if axis.startswith('update')}
    assert weights[0] == pytest.approx(1, abs=1e-3) and weights[3] == pytest.approx(1, abs=1e-3)
    assert all(0.5 < weights[step] < 2 and abs(weights[step] - 1) > 1e-4 for step in weights.keys() - {0, 3})

    cut = afresh(living, at=3, staleness=1)
    with pytest.raises(InterruptedError):
        advance(cut, 3, 6, cut_after=4)
    resumed = afresh(living, at=3, staleness=1)
    advance(resumed, 3, 6)
    assert [leaf.tobytes() for leaf in trained(resumed)] == [leaf.tobytes() for leaf in straight]
    for step in (3, 4, 5):
        assert lasting(resumed.sink.rows['rollout', step]) == lasting(told['rollout', step])


def test_faults_of_a_rollout_ahead_stop_the_run_at_the_step_that_would_learn_from_it(living, monkeypatch):
    run, sample = afresh(living, staleness=1), living.engine.sample

    async def broken(policy, prompt, path, k, params):
        if path[1] == 1:
            raise EngineError('the server hung up')
        return await sample(policy, prompt, path, k, params)

    monkeypatch.setattr(run.engine, 'sample', broken)
    with pytest.raises(TooManyFaultsError, match=r'6 of 6 episodes failed .*the server hung up'):
        advance(run, 0, 3)
    assert ('rollout', 0) in run.sink.rows and ('rollout', 1) not in run.sink.rows


def test_a_step_learned_while_its_last_tree_still_plays_is_the_synchronous_step(living, monkeypatch):
    """The last environment's first answer waits until a micro-batch of the others has been backpropagated."""
    run = afresh(living)
    train_step(run, 0, 0.0)
    wanted, said = trained(run), run.sink.rows

    run = afresh(living, early=True)
    learned, sample, add = threading.Event(), run.engine.sample, run.updater.add

    async def sampled(policy, prompt, path, k, params):
        if path[2] == 5:
            assert await asyncio.to_thread(learned.wait, PATIENCE_S)
        return await sample(policy, prompt, path, k, params)

    def added(*arguments: Any) -> Any:
        accumulated = add(*arguments)
        learned.set()
        return accumulated

    monkeypatch.setattr(run.engine, 'sample', sampled)
    monkeypatch.setattr(run.updater, 'add', added)
    early_step(run, 0, 0.0)
    assert learned.is_set()
    told = run.sink.rows
    assert told.keys() == said.keys()
    for axis, row in told.items():
        assert lasting(row) == pytest.approx(lasting(said[axis]), rel=1e-3, abs=1e-5), axis
        assert row['compiles'] == said[axis]['compiles'], 'no shape that the synchronous step has not'
    assert told['rollout', 0]['staleness_max'] == 0
    for this, that in zip(trained(run), wanted, strict=True):
        np.testing.assert_allclose(this, that, atol=2e-5)
