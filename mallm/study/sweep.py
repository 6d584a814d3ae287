"""Sweeps: one question, several settings of one experiment, several seeds; run cell by cell, here or by agents."""

import dataclasses
import json
import pathlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from mallm.experiment import Experiment
from mallm.folder import new_folder
from mallm.io import files
from mallm.io.files import COSTS
from mallm.stored import settings_of
from mallm.study.comparison import HOW, Cells, Row, remarks, table
from mallm.study.judge import Part, judge
from mallm.study.table import gather, run_apart, store, stored_folder


@dataclasses.dataclass(frozen=True)
class Casting:
    """A team that is put together from what cells have learned, and judged without more training.

    Attributes:
      host: label of the cell whose task and settings are played.
      parts: by role, label of the cell that plays it and its role there.
    """

    host: str
    parts: Mapping[str, tuple[str, str]]


@dataclasses.dataclass(frozen=True)
class Sweep:
    """Attributes:
    question: what is asked, in one sentence.
    cells: an experiment for each label.
    reference: the label that all others are compared with.
    castings: cells that train nothing, by label; they need the cells they name.
    reported: percents that the paper reports, by label, under a title that says for which model.
    note: what must be known to read the table, printed under it.
    """

    question: str
    cells: Mapping[str, Experiment]
    reference: str
    castings: Mapping[str, Casting] = dataclasses.field(default_factory=dict)
    reported: Mapping[str, Mapping[str, float | None]] = dataclasses.field(default_factory=dict)
    note: str = ''

    def __post_init__(self) -> None:
        named = {label for casting in self.castings.values() for label, _ in casting.parts.values()}
        named |= {casting.host for casting in self.castings.values()} | {self.reference}
        if lost := sorted(named - self.cells.keys()):
            raise ValueError(f'{lost}: no such cell, there are {sorted(self.cells)}')

    @property
    def labels(self) -> tuple[str, ...]:
        """Of all cells, those that train first."""
        return (*self.cells, *self.castings)

    def cell(self, label: str, seed: int, runs: str) -> Experiment:
        """The experiment of a cell, or of a casting's host under the casting's name."""
        host = self.castings[label].host if label in self.castings else label
        if host not in self.cells:
            raise ValueError(f'cell {label!r}: not in this sweep; there are {list(self.labels)}')
        return dataclasses.replace(self.cells[host], name=label, seed=seed, runs=runs)


def run_cell(sweep: Sweep, label: str, seed: int, *, runs: str, start: Callable[[Experiment], Any] = run_apart) -> None:
    """Runs one cell if it is not stored yet, and before a casting the cells it needs."""
    experiment = sweep.cell(label, seed, runs)
    if stored_folder(experiment) is not None:
        return
    if label not in sweep.castings:
        start(experiment)
        return
    casting = sweep.castings[label]
    needed = dict.fromkeys([casting.host, *(of for of, _ in casting.parts.values())])
    folders = {}
    for other in needed:
        run_cell(sweep, other, seed, runs=runs, start=start)
        folders[other] = _finished(sweep.cell(other, seed, runs))
    parts = {role: Part(folders[other], plays) for role, (other, plays) in casting.parts.items()}
    told = judge(folders[casting.host], parts)
    spent = [files.read_json(folder / files.SUMMARY) or {} for folder in folders.values()]
    cost = {name: sum(one[name] for one in spent) for name in COSTS if all(name in one for one in spent)}
    folder = new_folder(experiment)
    files.write_json(folder / files.CONFIG, settings_of(experiment))
    shares = {'success_after': told['success'], 'strict_after': told['strict']}
    files.write_json(folder / files.SUMMARY, {**told, 'run': folder.name, **shares, **cost})


def _finished(experiment: Experiment) -> pathlib.Path:
    folder = stored_folder(experiment)
    if folder is None:
        raise FileNotFoundError(f'{experiment.folder_name} in {experiment.runs} was run and has no summary')
    return folder


def run_all(
    sweep: Sweep,
    *,
    seeds: Sequence[int],
    only: Sequence[str],
    runs: str,
    out: pathlib.Path,
    start: Callable[[Experiment], Any] = run_apart,
) -> str:
    """Runs what is missing, seed by seed, and writes `out`.json and `out`.md after each cell; returns the table."""
    for label in only:
        sweep.cell(label, 0, runs)  # refuses an unknown one before anything runs
    for seed in seeds:
        for label in only or sweep.labels:
            run_cell(sweep, label, seed, runs=runs, start=start)
            write(sweep, seeds, runs, out)
    return write(sweep, seeds, runs, out)


def write(sweep: Sweep, seeds: Sequence[int], runs: str, out: pathlib.Path) -> str:
    cells = gather(sweep.labels, seeds, lambda label, seed: sweep.cell(label, seed, runs))
    told = markdown(sweep, cells)
    store(cells, told, out)
    return told


def markdown(sweep: Sweep, cells: Cells) -> str:
    rows = [Row(label, label, paper=label) for label in sweep.labels]
    reference = next(row for row in rows if row.label == sweep.reference)
    shown = table(rows, cells, reference=reference, paper=sweep.reported)
    said = ''.join(f'- {remark}\n' for remark in remarks(rows, cells, reference=reference))
    return '\n\n'.join(filter(None, (sweep.question, shown, sweep.note, HOW.strip(), said.strip()))) + '\n'


def wandb_yaml(sweep: Sweep, *, name: str, command: Sequence[str], seeds: Sequence[int]) -> str:
    """What `wandb sweep` takes: a grid over cells and seeds. `command` runs one, given `--cell` and `--seed`."""
    lines = {
        'name': name,
        'description': sweep.question,
        'method': 'grid',
        'metric': {'name': 'success_after', 'goal': 'maximize'},
        'parameters': {'seed': {'values': list(seeds)}, 'cell': {'values': list(sweep.labels)}},
        'command': [*command, '${args}'],
    }
    return ''.join(f'{key}: {json.dumps(value)}\n' for key, value in lines.items())
