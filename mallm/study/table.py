"""Fills a table of experiments by seeds, cell by cell, and stores it."""

import dataclasses
import glob
import multiprocessing
import os
import pathlib
import signal
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from mallm.cli import keep_memory
from mallm.experiment import Experiment
from mallm.io import files
from mallm.stored import is_of
from mallm.study.comparison import Cells
from mallm.train import train


def fill(
    methods: Mapping[str, Experiment],
    *,
    seeds: Iterable[int],
    only: Sequence[str],
    runs: str,
    out: str,
    tell: Callable[[Cells], str],
) -> Cells:
    """Runs the cells that have no stored summary yet, seed by seed, and writes `out`.json and `out`.md after each.

    A cell is stored when a run folder of its name holds a summary beside the very settings it would run with now. What
    is written holds the stored cells of all methods, so that several calls may fill one table.
    """
    unknown = set(only) - set(methods)
    if unknown:
        raise ValueError(f'methods {sorted(unknown)}: not in this table; there are {sorted(methods)}')
    seeds = tuple(seeds)
    cell = lambda name, seed: dataclasses.replace(methods[name], name=name, seed=seed, runs=runs)  # noqa: E731
    wanted = [cell(name, seed) for seed in seeds for name in only or tuple(methods)]

    def between() -> None:
        cells = gather(methods, seeds, cell)
        store(cells, tell(cells), pathlib.Path(out))

    run_missing(wanted, between=between)
    return gather(methods, seeds, cell)


def gather(
    methods: Iterable[str], seeds: Sequence[int], cell: Callable[[str, int], Experiment]
) -> dict[str, dict[str, Any]]:
    """{method: {seed: summary}} of the cells that are stored."""
    found = {name: {str(seed): stored(cell(name, seed)) for seed in seeds} for name in methods}
    kept = {name: {seed: summary for seed, summary in cells.items() if summary} for name, cells in found.items()}
    return {name: cells for name, cells in kept.items() if cells}


def stored(experiment: Experiment) -> dict[str, Any] | None:
    """The summary of a run that was made with these very settings, or None."""
    folder = stored_folder(experiment)
    return None if folder is None else files.read_json(folder / files.SUMMARY)


def stored_folder(experiment: Experiment) -> pathlib.Path | None:
    """Where a finished run of these very settings is, or None."""
    name, runs = experiment.folder_name, pathlib.Path(experiment.runs)
    for folder in sorted([runs / name, *runs.glob(f'{glob.escape(name)}.*')]):
        if (folder / files.SUMMARY).exists() and is_of(files.read_json(folder / files.CONFIG), experiment):
            return folder
    return None


def run_apart(experiment: Experiment) -> None:
    """Trains in a process of its own, so that every cell pays for its own compiling and has a memory peak of its own.

    It ends with us, however we end.

    Raises:
      RuntimeError: the run did not reach its end.
    """
    child = multiprocessing.get_context('spawn').Process(target=_run, args=(experiment,))
    child.start()
    child.join()
    if child.exitcode:
        raise RuntimeError(
            f'{experiment.folder_name} ended with exit code {child.exitcode}; its error is above, and what it wrote is '
            f'in {experiment.runs}'
        )


def _run(experiment: Experiment) -> None:
    threading.Thread(target=_end_with_parent, daemon=True).start()
    keep_memory()
    train(experiment)


def _end_with_parent() -> None:
    parent = multiprocessing.parent_process()
    if parent is not None:
        parent.join()
        os.kill(os.getpid(), signal.SIGTERM)


def run_missing(
    cells: Iterable[Experiment], *, start: Callable[[Experiment], Any] = run_apart, between: Callable[[], Any]
) -> None:
    """Runs the cells that have no stored summary yet, one after another; `between` is called after each cell."""
    for cell in cells:
        if stored(cell) is None:
            start(cell)
        between()


def store(cells: Mapping[str, Any], told: str, out: pathlib.Path) -> None:
    """Writes `out`.json, the summaries of all cells, and `out`.md, what they tell."""
    out.parent.mkdir(parents=True, exist_ok=True)
    files.write_json(out.with_suffix('.json'), cells)
    out.with_suffix('.md').write_text(told)
