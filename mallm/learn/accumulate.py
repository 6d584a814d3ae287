"""Early backward, late step: gradients are added up as groups come in, and one optimiser step is taken at the end.

Source: the micro-batch pipeline of FlexMARL, arXiv 2602.09578.
"""

import time
from collections import defaultdict
from collections.abc import Sequence
from typing import Any

import jax

from mallm.learn.pack import Packing, Row, Shape, batch_of, joined, shape_of
from mallm.learn.pool import Pool
from mallm.learn.update import Knobs, Updater


class Lesson:
    """One optimiser step of one pool. Its rows come one by one, and each full micro-batch is learned from at once.

    The parameters stay as they are until `finish`, so nothing is stale. The divisor may be a count of tokens that is
    known only then; until then sums are not divided. Micro-batches have the shapes that `pack` would give the same
    rows, and there are as many of them; only which rows share one, and the order of the sums, follow the order in
    which the rows came.
    """

    def __init__(
        self, pool: Pool, updater: Updater, packing: Packing, knobs: Knobs, base: Any = None, *, rescores: bool = False
    ) -> None:
        if packing.step_groups:
            raise ValueError(f'step_groups={packing.step_groups}: a lesson is one optimiser step; use 0')
        self._pool, self._updater, self._packing, self._knobs, self._base = pool, updater, packing, knobs, base
        self._rescores = rescores
        self._rows: list[Row] = []
        self._waiting: dict[Shape, list[Row]] = defaultdict(list)
        self._accumulated = updater.begin(pool.state)
        self._started, self._idle = time.perf_counter(), 0.0
        self._left = self._started

    @property
    def waiting(self) -> int:
        """Rows that no full micro-batch has taken yet."""
        return sum(map(len, self._waiting.values()))

    def add(self, rows: Sequence[Row]) -> None:
        """Takes rows in, and learns from every micro-batch that they fill."""
        self._idle += time.perf_counter() - self._left
        for row in rows:
            self._rows.append(row)
            shape = shape_of(row, self._packing)
            self._waiting[shape].append(row)
            if len(self._waiting[shape]) == self._packing.micro_groups:
                self._learn(shape, self._waiting.pop(shape))
        self._left = time.perf_counter()

    def finish(self) -> dict[str, float]:
        """Learns from what still waits and takes the optimiser step; returns its metrics. Without rows there is none.

        Raises:
          NonFiniteUpdateError: a loss or gradient norm is inf or NaN.
        """
        if not self._rows:
            return self._pool.learn(self._updater, [], self._knobs)
        self._idle += time.perf_counter() - self._left
        for shape, rows in joined(self._waiting, self._packing.micro_groups).items():
            self._learn(shape, rows)
        self._waiting.clear()
        divisor = self._packing.divisor(self._rows)
        started = self._started + self._idle
        return self._pool.finish(self._updater, self._accumulated, divisor, self._knobs, started)

    def _learn(self, shape: Shape, rows: Sequence[Row]) -> None:
        """Adds one micro-batch, and waits for it: whoever asks for the next rows then has nothing else to do."""
        state, base = self._pool.state, self._base
        batch = batch_of(rows, shape, self._packing.micro_groups, divisor=1.0)
        if self._rescores:
            batch = self._updater.rescored(state, batch, base)
        self._accumulated = self._updater.add(self._accumulated, state, batch, self._knobs, base)
        jax.block_until_ready(self._accumulated.sums)
