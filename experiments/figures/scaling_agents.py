"""Scaling study: held-out success after training by the number of agents, mean ± standard error over seeds.

A point is the best group of a folder with so many roles and one way of credit; a folder needs two sizes of team.
"""

import collections
from collections.abc import Mapping, Sequence

import numpy as np

from mallm.io.curves import Line, Panel, mean_and_error
from mallm.io.gallery import Family, Figure, StoredRun, of_panels

NAME = 'scaling_agents'


def figure(families: Mapping[str, Family], x: str) -> Figure:
    panels = [Panel(name, 'solved', lines(family), share=True) for name, family in families.items()]
    return of_panels(NAME, (__doc__ or '').split('\n')[0], panels, x='agents')


def lines(family: Family) -> tuple[Line, ...]:
    """A line for each way of credit, from the best group of each size."""
    found: dict[str, dict[int, list[Sequence[StoredRun]]]] = collections.defaultdict(
        lambda: collections.defaultdict(list)
    )
    for runs in family.values():
        ended = [run for run in runs if run.config and run.summary.get('success_after') is not None]
        if ended:
            config = ended[0].config
            found[config['algorithm']['credit']][len(config['task']['team'])].append(ended)
    drawn = []
    for credit, sizes in found.items():
        if len(sizes) < 2:
            continue
        best = {size: max(map(shares, groups), key=np.mean) for size, groups in sorted(sizes.items())}
        points = [mean_and_error(values[:, None]) for values in best.values()]
        label = f'{credit} (n = {min(map(len, best.values()))})'
        ys, errors = (tuple(float(part[0]) for part in parts) for parts in zip(*points, strict=True))
        drawn.append(Line(label, tuple(map(float, best)), ys, errors))
    return tuple(drawn)


def shares(runs: Sequence[StoredRun]) -> np.ndarray:
    return np.array([run.summary['success_after'] for run in runs], float)
