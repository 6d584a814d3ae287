"""Scaling study: held-out success after training by the number of agents, mean ± standard error over seeds.

A point is one named group of runs; all are shown and none is chosen. A panel has one folder, one game and one budget.
"""

import json
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from mallm.io.curves import Line, Panel, mean_and_error
from mallm.io.gallery import Family, Figure, StoredRun, of_panels

NAME = 'scaling_agents'


def figure(families: Mapping[str, Family], x: str) -> Figure:
    shown = [panel for name, family in families.items() for panel in panels(name, family)]
    return of_panels(NAME, ' '.join((__doc__ or '').split()), shown, x='agents')


def panels(name: str, family: Family) -> list[Panel]:
    """One for each game and budget of a folder that has two sizes of team."""
    found: dict[str, dict[str, list[StoredRun]]] = {}
    for group, runs in family.items():
        ended = [run for run in runs if run.config and run.summary.get('success_after') is not None]
        if ended:
            found.setdefault(question(ended[0].config), {})[group] = ended
    compared = [groups for groups in found.values() if len({agents(runs) for runs in groups.values()}) > 1]
    drawn = []
    for number, groups in enumerate(compared, 1):
        title = f'{name} ({number} of {len(compared)})' if len(compared) > 1 else name
        budget = budget_of(next(iter(groups.values()))[0].config)
        drawn.append(Panel(f'{title}{budget and f", {budget}"}', 'solved', points(groups), share=True))
    return drawn


def question(config: Mapping[str, Any]) -> str:
    """What groups of one panel have in common: the game, whatever the team, and the budget."""
    task = config['task'].get('game', config['task'])  # a crew's game is inside
    game = {setting: value for setting, value in task.items() if setting != 'team'}
    return json.dumps([game, config.get('cpu_minutes'), config.get('steps')], sort_keys=True)


def budget_of(config: Mapping[str, Any]) -> str:
    if config.get('cpu_minutes'):
        return f'{config["cpu_minutes"]:g} CPU minutes'
    return f'{config["steps"]} steps' if 'steps' in config else ''


def agents(runs: Sequence[StoredRun]) -> int:
    return len(runs[0].config['task']['team'])


def points(groups: Mapping[str, Sequence[StoredRun]]) -> tuple[Line, ...]:
    """A line of one point for each group, the smallest team first."""
    drawn = []
    for name, runs in sorted(groups.items(), key=lambda item: agents(item[1])):
        mean, error = mean_and_error(np.array([[run.summary['success_after']] for run in runs], float))
        spread = (float(error[0]),) if len(runs) > 1 else ()
        drawn.append(Line(f'{name} (n = {len(runs)})', (float(agents(runs)),), (float(mean[0]),), spread))
    return tuple(drawn)
