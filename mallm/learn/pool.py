"""A pool: one policy's learner state and how it is updated. Roles that name the same pool share its parameters."""

import time
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import numpy as np

from mallm.learn.pack import Batch
from mallm.learn.state import LearnerState
from mallm.learn.update import Accumulated, Knobs, Updater


class NonFiniteUpdateError(FloatingPointError):
    """The loss or the gradient of an update is not a number. Updates may not fail: the run stops here."""


class Pool:
    """The stateful object of the learner: `state` is replaced by every update."""

    def __init__(self, name: str, state: LearnerState) -> None:
        self.name = name
        self.state = state

    def learn(
        self, updater: Updater, steps: Sequence[Sequence[Batch]], knobs: Knobs, base: Any = None
    ) -> dict[str, float]:
        """Takes one optimiser step for each element of `steps`; returns metrics averaged over them.

        A pool whose state is an adapter is given the `base` that it shares with others.

        Raises:
          NonFiniteUpdateError: a loss or gradient norm is inf or NaN.
        """
        started = time.perf_counter()
        collected = []
        for micros in steps:
            self.state, metrics = updater(self.state, micros, knobs, base)
            collected.append(metrics)
        return self._told(collected, updater, knobs, started)

    def finish(
        self, updater: Updater, accumulated: Accumulated, divisor: float, knobs: Knobs, started: float
    ) -> dict[str, float]:
        """Takes the one optimiser step whose micro-batches were added up since `started`; returns its metrics.

        Raises:
          NonFiniteUpdateError: as `learn`.
        """
        self.state, metrics = updater.finish(self.state, accumulated, divisor, knobs)
        return self._told([metrics], updater, knobs, started)

    def _told(
        self, collected: Sequence[Mapping[str, jax.Array]], updater: Updater, knobs: Knobs, started: float
    ) -> dict[str, float]:
        """What some optimiser steps say, on the host."""
        if not collected:
            return {'optimiser_steps': 0.0}
        rows = jax.device_get(collected)
        means = {name: float(np.mean([row[name] for row in rows])) for name in rows[0]}
        bad = [name for name in ('loss', 'grad_norm') if not np.isfinite(means[name])]
        if bad:
            raise NonFiniteUpdateError(
                f'pool {self.name!r}, after {int(self.state.updates)} updates: {bad} not finite ({means}); lower the '
                'learning rate or look at the last batch'
            )
        return means | {
            'tokens': float(sum(row['tokens'] for row in rows)),
            'optimiser_steps': float(len(rows)),
            'learning_rate': knobs.learning_rate,
            'seconds': time.perf_counter() - started,
            'compiles': float(updater.compiles),
        }
