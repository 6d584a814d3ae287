"""Runs an ablation of experiments/ablations.py, here cell by cell or by wandb agents.

    python -m experiments.sweep --list                         (names, cells, cost)
    python -m experiments.sweep NAME --run                     (what is missing, one cell after another, offline)
    python -m experiments.sweep NAME                           (writes the sweep file, and says how agents are started)
    python -m experiments.sweep NAME --cell LABEL --seed 0     (one cell: what a wandb agent runs)

Cost: cells * seeds * (CPU minutes + warm start and reports, an estimated 3). Writes runs/ablations/TASK/NAME/, and the
table as experiments/results/ablations/TASK_NAME.md and .json. Add --smoke to see that it works here.
"""

import dataclasses
import pathlib
from typing import Annotated

import tyro

from experiments.ablations import ABLATIONS
from experiments.suite import OVERHEAD_MINUTES, budgeted, tiny
from mallm.config import override
from mallm.study.sweep import Sweep, run_all, run_cell, wandb_yaml
from mallm.study.table import run_apart
from mallm.train import train


def make(name: str, task: str, cpu_minutes: float, *, smoke: bool, wandb: str) -> Sweep:
    """The sweep of a name; wandb never decides which cells are stored."""
    if name not in ABLATIONS:
        raise SystemExit(f'{name!r} is no ablation; there are {", ".join(ABLATIONS)} (--list says more)')
    try:
        sweep = ABLATIONS[name](task, override(budgeted(task, cpu_minutes), {'wandb': wandb}))
    except ValueError as refusal:
        raise SystemExit(str(refusal)) from refusal
    return dataclasses.replace(sweep, cells={k: tiny(e) for k, e in sweep.cells.items()}) if smoke else sweep


def catalogue(task: str, cpu_minutes: float, seeds: int) -> str:
    """All names with their cells and cost."""
    lines = []
    for name in ABLATIONS:
        sweep = make(name, task, cpu_minutes, smoke=False, wandb='disabled')
        hours = len(sweep.cells) * seeds * (cpu_minutes + OVERHEAD_MINUTES) / 60
        lines += [f'{name}: {sweep.question}', f'    {", ".join(sweep.labels)}']
        cost = f'{len(sweep.cells)} cells * {seeds} seeds * {cpu_minutes:g} CPU minutes'
        lines.append(f'    {cost}: about {hours:.1f} CPU hours')
    return '\n'.join(lines)


def main(
    name: Annotated[str, tyro.conf.Positional, tyro.conf.arg(metavar='NAME')] = '',
    list: bool = False,
    run: bool = False,
    cell: str = '',
    seed: int = 0,
    seeds: tuple[int, ...] = (0, 1, 2),
    only: tuple[str, ...] = (),
    task: str = 'sokoban',
    cpu_minutes: float = 10.0,
    runs: str = '',
    out: str = '',
    smoke: bool = False,
) -> None:
    """Lists, writes or runs a sweep.

    Args:
      name: of an ablation.
      list: names with their cells and cost.
      run: run here what is missing, and write the table.
      cell: run this one only, if it is missing.
      seed: of that cell.
      seeds: of the sweep.
      only: labels of the cells to run.
      task: the game.
      cpu_minutes: of reinforcement for each cell.
      runs: where run folders are kept; runs/ablations/TASK/NAME if not given.
      out: the table, without its ending; experiments/results/ablations/TASK_NAME if not given.
      smoke: tiny cells, one seed, beside the real ones.
    """
    if list or not name:
        print(catalogue(task, cpu_minutes, len(seeds)))
        return
    root = 'runs/ablations_smoke' if smoke else 'runs/ablations'
    runs = runs or f'{root}/{task}/{name}'
    start = train if smoke else run_apart
    if cell:
        sweep = make(name, task, cpu_minutes, smoke=smoke, wandb='auto')
        run_cell(sweep, cell, seed, runs=runs, start=train)
        return
    sweep = make(name, task, cpu_minutes, smoke=smoke, wandb='offline')
    if run:
        results = root if smoke else 'experiments/results/ablations'
        table = pathlib.Path(out or f'{results}/{task}_{name}')
        print(run_all(sweep, seeds=seeds[:1] if smoke else seeds, only=only, runs=runs, out=table, start=start))
        return
    options = ['--task', task, '--cpu-minutes', f'{cpu_minutes:g}', '--runs', runs, *(['--smoke'] if smoke else [])]
    command = ['${env}', 'python', '-m', 'experiments.sweep', name, *options]
    path = pathlib.Path(out or f'{runs}/sweep.yaml')
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(wandb_yaml(sweep, name=f'{task}_{name}', command=command, seeds=seeds))
    print(f'{path}\nwandb sweep {path}    then, on each machine: wandb agent ENTITY/PROJECT/ID')


if __name__ == '__main__':
    tyro.cli(main, description=__doc__)
