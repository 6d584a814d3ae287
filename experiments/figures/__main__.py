"""Draws every figure that stored runs have data for, as PNG and PDF, and a page that shows them all.

    python -m experiments.figures [FOLDER ...] [--x training_cpu_minutes] [--only NAME ...] [--out OUT]

FOLDERs hold run folders, at any depth, and tables; experiments/results and runs/ if none is given. Cost: seconds.
Expected: the paths of what was written. Nothing is trained or judged; what runs have stored is read.
"""

import pathlib
import sys
from typing import Annotated, Literal

import tyro

from experiments.figures import ablation_bars, learning_curves, reward_by_role, scaling_agents, turns_to_solve
from mallm.io import gallery

FIGURES = {
    module.NAME: module.figure
    for module in (learning_curves, reward_by_role, turns_to_solve, ablation_bars, scaling_agents)
}


def main(
    folders: Annotated[tuple[pathlib.Path, ...], tyro.conf.Positional] = (),
    x: Literal['step', 'cpu_minutes', 'training_cpu_minutes', 'training_tokens'] = 'step',
    only: tuple[str, ...] = (),
    out: pathlib.Path = pathlib.Path('runs/figures'),
) -> None:
    """Draws figures.

    Args:
      folders: where run folders are.
      x: what curves are drawn over; older runs did not record the two of training.
      only: names of figures.
      out: where files are written.
    """
    if unknown := set(only) - FIGURES.keys():
        sys.exit(f'--only {sorted(unknown)}: there are {sorted(FIGURES)}')
    roots = folders or tuple(filter(pathlib.Path.is_dir, map(pathlib.Path, ('experiments/results', 'runs'))))
    if lost := [str(root) for root in roots if not root.is_dir()]:
        sys.exit(f'{", ".join(lost)}: no such folder')
    families = gallery.find_runs(roots) | gallery.find_tables(roots)
    if not families:
        sys.exit(f'no run folder in {", ".join(map(str, roots))}: train something first, or give other folders')
    for path in gallery.write((FIGURES[name](families, x) for name in only or FIGURES), out):
        print(path)


if __name__ == '__main__':
    tyro.cli(main, description=__doc__)
