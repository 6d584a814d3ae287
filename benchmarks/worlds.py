"""What a fresh training instance of each game costs, with the warm start's demonstrations of it.

Command:  python -m benchmarks.worlds
Cost:     under a minute.
Result:   benchmarks/results/worlds.json. Each episode plays a fresh instance: a step of the main job
          makes 128.

Milliseconds of processor time each, on one thread; every batch has other seeds, so that no cache can answer.
"""

import dataclasses
import itertools
import time
from collections.abc import Callable, Iterator
from typing import Any

import tyro

from benchmarks.measure import Spread, facts, show, write
from mallm.envs.base import Task
from mallm.envs.plan_path_task import PlanPathTask
from mallm.envs.sokoban_task import SokobanTask
from mallm.envs.sudoku_task import SudokuTask

TASKS: dict[str, Task] = {
    'Sokoban 6x6': SokobanTask(),
    'Sokoban 7x7, two boxes': SokobanTask(size=7, boxes=2, optimal=(2, 25), hard=(5, 25)),
    'Plan-Path 10x10': PlanPathTask(),
    'Sudoku 4x4': SudokuTask(),
    'Sudoku 9x9, 36 empty cells': SudokuTask(size=9, blanks=(36, 36)),
}


@dataclasses.dataclass(frozen=True)
class Settings:
    """Settings of the benchmark.

    Attributes:
      repeats: timed batches of each game.
      batch: instances in a batch.
    """

    repeats: int = 5
    batch: int = 64


def main(settings: Settings) -> None:
    about, measured = facts(0, ()), {}
    for name, task in TASKS.items():
        seeds = itertools.count()
        costs = {'instance': task.train, 'demonstrations': task.demonstrations}
        measured[name] = {
            what: Spread.of([cpu_ms(make, seeds, settings.batch) for _ in range(settings.repeats)])
            for what, make in costs.items()
        }
    show(
        'Processor milliseconds each, median (range)',
        ['game', 'instance', 'demonstrations of one'],
        [[name, *(spread.show(2) for spread in costs.values())] for name, costs in measured.items()],
    )
    write('worlds', about | {'settings': dataclasses.asdict(settings), 'cpu_ms': measured})


def cpu_ms(make: Callable[[int], Any], seeds: Iterator[int], count: int) -> float:
    started = time.process_time()
    for seed in itertools.islice(seeds, count):
        make(seed)
    return (time.process_time() - started) / count * 1e3


if __name__ == '__main__':
    main(tyro.cli(Settings, description=__doc__))
