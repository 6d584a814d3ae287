"""Figure 6a: mean reward of each role's answers while training, mean ± standard error over seeds."""

from collections.abc import Mapping

from mallm.io.curves import Panel
from mallm.io.display import by_part
from mallm.io.gallery import Family, Figure, mean_line, of_panels

NAME = 'reward_by_role'


def figure(families: Mapping[str, Family], x: str) -> Figure:
    panels = []
    for name, family in families.items():
        for group, runs in family.items():
            keys = dict.fromkeys((key for run in runs for row in run.rows for key in row), 0.0)
            lines = [
                line
                for color, role in enumerate(filter(None, by_part(keys, 'reward')))
                for line in mean_line(role, runs, f'reward/{role}', x=x, color=color, axis='rollout')
            ]
            panels.append(Panel(f'{name}: {group}', 'reward of a candidate', tuple(lines)))
    return of_panels(NAME, __doc__, panels, x=x)
