"""How playing and learning share the time: in turn, the next steps' rollouts ahead, or trees learned from as they end.

Where they overlap, rollouts have a thread of their own, with its own event loop, and the learner keeps the main thread.
The engine is used by one of them at a time: the sampler's thread while a rollout is under way, the main thread else.
"""

import asyncio
import contextlib
import dataclasses
import queue
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent import futures
from typing import Any, Protocol, Self

import jax
import jax.numpy as jnp

from mallm.rollout import tree
from mallm.run import Run, load
from mallm.types import Trajectory

Play = Callable[[Run, int, Mapping[str, str], tree.Witness], list[Trajectory]]


class StaleAnswersError(RuntimeError):
    """Answers were sampled from older weights than `overlap.staleness` allows."""


@dataclasses.dataclass(frozen=True)
class Rollout:
    """The episodes of one step.

    Attributes:
      trajectories: all of them, faulty ones too.
      seconds: how long they were played.
      waited: how long the learner had nothing to do but wait.
      counts: what the engine counted, where another rollout has begun since; else it still has to be asked.
    """

    trajectories: Sequence[Trajectory]
    seconds: float
    waited: float
    counts: Mapping[str, float] | None = None


class Rollouts(Protocol):
    """Where a training step has its episodes from."""

    def take(self, step: int) -> Rollout:
        """The episodes of a step."""
        ...

    def load(self, version: int) -> float:
        """Tells that the learner has done `version` steps: whatever is played from now on is to use what it learned.

        Returns the seconds that the learner had to wait for it.
        """
        ...


class InTurn:
    """Plays when it is asked to, with the learner's present weights (synchronous)."""

    def __init__(self, run: Run, play: Play) -> None:
        self._run, self._play = run, play

    def take(self, step: int) -> Rollout:
        self._run.engine.metrics()  # what evaluations counted
        return rollout(self._run, self._play, step, tree.NOBODY)

    def load(self, version: int) -> float:
        load(self._run, version)
        return 0.0


class Ahead:
    """Plays the next steps while the learner computes (pipelined).

    The rollout of step s samples from the weights after step s - staleness, or from those of the newest checkpoint
    where they are newer: a rollout is never under way across a checkpoint. So what a step learns from follows from its
    number alone, however long anything took, and a run that goes on from a checkpoint needs nothing but it to repeat
    what an uninterrupted one did. A checkpoint costs one rollout that overlaps with nothing.

    Each rollout has a copy of its weights, because the update donates the learner's own.
    """

    def __init__(self, run: Run, play: Play) -> None:
        self._run, self._play = run, play
        self._thread = futures.ThreadPoolExecutor(1, 'sampler')
        self._brake = Brake()
        self._queued: dict[int, futures.Future[Rollout]] = {}
        self._version: int | None = None

    def take(self, step: int) -> Rollout:
        """The episodes of a step, waited for; those of the next ones are begun."""
        started = time.perf_counter()
        weights = self._start(range(step, step + 1), step)
        taken = self._queued.pop(step).result()
        waited = time.perf_counter() - started
        self._start(range(step + 1, self._until(step)), step, weights)
        return dataclasses.replace(taken, waited=waited)

    def load(self, version: int) -> float:
        """Where the run pauses, to evaluate, say, the rollouts under way end and the engine gets the newest weights."""
        self._version, started = version, time.perf_counter()
        if not pauses(self._run, version):
            return 0.0
        futures.wait(self._queued.values())
        waited = time.perf_counter() - started
        load(self._run, version)
        return waited

    def close(self) -> None:
        """Ends what is still under way; nobody will need it."""
        self._thread.shutdown(wait=False, cancel_futures=True)
        self._brake.pull()
        self._thread.shutdown()

    def reload(self) -> None:
        """Gives the engine the newest weights after `close`."""
        if self._version is not None:
            load(self._run, self._version)

    def _until(self, step: int) -> int:
        """The first step that can't be played yet while `step` is learned from."""
        experiment = self._run.experiment
        checkpoint = (step // experiment.save_every + 1) * experiment.save_every
        return min(step + experiment.overlap.staleness + 1, checkpoint, experiment.steps)

    def _start(self, steps: Sequence[int], version: int, weights: Any = None) -> Any:
        """Begins rollouts that have not begun yet, with a copy of the present weights, which is returned."""
        for step in steps:
            if step not in self._queued:
                weights = weights or copied(self._run)
                self._queued[step] = self._thread.submit(self._rollout, step, version, weights)
        return weights

    def _rollout(self, step: int, version: int, weights: Mapping[str, Any]) -> Rollout:
        """One rollout, in the sampler's thread. What evaluations counted before it is not its own."""
        self._run.engine.metrics()
        for name, params in weights.items():
            self._run.engine.load(name, params, version)
        played = rollout(self._run, self._play, step, self._brake)
        return dataclasses.replace(played, counts=self._run.engine.metrics())


@contextlib.contextmanager
def overlapped(run: Run, play: Play) -> Iterator[Rollouts]:
    """Where the training steps of a run have their episodes from; afterwards the engine has the newest weights."""
    if not run.experiment.overlap.staleness:
        yield InTurn(run, play)
        return
    ahead = Ahead(run, play)
    try:
        yield ahead
    finally:
        ahead.close()
    ahead.reload()


class AsTheyEnd:
    """One step's episodes, each environment's as soon as the last of its siblings has ended (early backward).

    Use it in a `with`, and iterate over it. What was played without telling the witness comes at the end.

    An environment is the least that can be credited: a fault later in an episode spoils what was played before, and
    siblings without a tree are compared with each other.
    """

    def __init__(self, run: Run, play: Play, step: int) -> None:
        self._ended: queue.SimpleQueue[Trajectory | None] = queue.SimpleQueue()
        self._brake = Brake(self._ended.put)
        self._siblings = run.experiment.sampling.k if run.experiment.sampling.mode == 'parallel' else 1
        self._waited = 0.0
        self._thread = futures.ThreadPoolExecutor(1, 'sampler')
        run.engine.metrics()  # what evaluations counted
        self._rollout = self._thread.submit(rollout, run, play, step, self._brake)
        self._rollout.add_done_callback(lambda _: self._ended.put(None))

    def __iter__(self) -> Iterator[list[Trajectory]]:
        together: dict[int, list[Trajectory]] = defaultdict(list)
        while (trajectory := self._next()) is not None:
            siblings = together[trajectory.env]
            siblings.append(trajectory)
            if len(siblings) == self._siblings:
                yield sorted(siblings, key=lambda sibling: sibling.sibling)
        unheard: dict[int, list[Trajectory]] = defaultdict(list)
        for trajectory in self._rollout.result().trajectories:  # raises what broke in there
            if trajectory.env not in together:
                unheard[trajectory.env].append(trajectory)
        yield from unheard.values()

    def whole(self) -> Rollout:
        """The step's episodes in their usual order."""
        return dataclasses.replace(self._rollout.result(), waited=self._waited)

    def _next(self) -> Trajectory | None:
        started = time.perf_counter()
        trajectory = self._ended.get()
        self._waited += time.perf_counter() - started
        return trajectory

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._brake.pull()
        self._thread.shutdown()


class Brake:
    """A witness that can end the rollout that it watches, from another thread; `told` hears of every ended episode."""

    def __init__(self, told: Callable[[Trajectory], None] = tree.NOBODY.ended) -> None:
        self._told = told
        self._lock = threading.Lock()
        self._pulled = False
        self._playing: set[asyncio.Task[Any]] = set()

    def began(self) -> None:
        task = asyncio.current_task()
        assert task is not None
        task.add_done_callback(self._forget)
        with self._lock:
            self._playing.add(task)
            if self._pulled:
                task.cancel()

    def _forget(self, task: asyncio.Task[Any]) -> None:
        with self._lock:
            self._playing.discard(task)

    def ended(self, trajectory: Trajectory) -> None:
        self._told(trajectory)

    def pull(self) -> None:
        """Cancels every episode under way, and each that begins later."""
        with self._lock:
            self._pulled = True
            for task in self._playing:
                with contextlib.suppress(RuntimeError):  # its loop has ended by itself
                    task.get_loop().call_soon_threadsafe(task.cancel)


def rollout(run: Run, play: Play, step: int, witness: tree.Witness) -> Rollout:
    """Plays one step. Who waits for it has nothing else to do."""
    started = time.perf_counter()
    trajectories = play(run, step, run.algorithm.cast(step, run.experiment.pools), witness)
    seconds = time.perf_counter() - started
    return Rollout(trajectories, seconds, waited=seconds)


def copied(run: Run) -> dict[str, Any]:
    """Each pool's parameters in buffers of their own, which no update donates."""
    return {name: jax.tree.map(jnp.copy, pool.state.params) for name, pool in run.pools.items()}


def pauses(run: Run, step: int) -> bool:
    """Whether something else than the next training step follows when `step` of them are done."""
    experiment, every = run.experiment, run.experiment.evaluation.every
    return step == experiment.steps or step % experiment.save_every == 0 or (every > 0 and step % every == 0)


def staleness(step: int, trajectories: Sequence[Trajectory]) -> list[int]:
    """How many updates behind the learner each answer's weights were.

    An answer's version is the number of training steps that its weights had seen.
    """
    groups = [group for t in trajectories for turn in t.turns for group in turn.groups]
    return [step - candidate.answer.version for group in groups for candidate in group.candidates]


def refuse_stale(run: Run, step: int, trajectories: Sequence[Trajectory]) -> None:
    oldest, allowed = max(staleness(step, trajectories), default=0), run.experiment.overlap.staleness
    if oldest > allowed:
        raise StaleAnswersError(
            f'step {step}: an answer is of weights {oldest} updates old, and overlap.staleness={allowed}; the engine '
            'did not take the weights it was given last'
        )
