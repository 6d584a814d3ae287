"""What a run shows while it is running: a few fields, made into one plain line or a live panel, and early warnings.

Nothing here prints. Names that are not known are simply not shown; they are all in metrics.jsonl.
"""

import math
import re
from collections.abc import Mapping

from rich.panel import Panel
from rich.table import Table
from rich.text import Text

EARLY_STEPS = 5
TRUNCATED_LIMIT, DEAD_LIMIT = 0.5, 0.95

Latest = Mapping[str, tuple[int, Mapping[str, float]]]
"""The newest step and metrics of every axis."""

_CONTROL = re.compile(r'[\x00-\x08\x0b-\x1f\x7f-\x9f\u200e\u200f\u202a-\u202e\u2066-\u2069\ud800-\udfff]')


def printable(text: str) -> str:
    """`text` without what would steer a terminal: control, direction and half characters become visible escapes."""
    return _CONTROL.sub(lambda found: found.group().encode('unicode_escape', 'surrogatepass').decode(), text)


def fields(latest: Latest, minutes: float, cpu_minutes: float) -> list[tuple[str, str]]:
    """(label, value) pairs of what is known so far, most important first."""
    step, play = latest.get('rollout', (None, {}))
    updates = {axis.removeprefix('update/'): row for axis, (_, row) in latest.items() if axis.startswith('update/')}
    entropy = by_part(play, 'entropy') or {pool: row['entropy'] for pool, row in updates.items() if 'entropy' in row}
    seconds = {phase: value for phase, value in by_part(play, 'seconds').items() if phase}
    found = [
        ('step', _steps(latest) if step is None else f'{step}'),
        ('minutes', f'{minutes:.1f}'),
        ('CPU minutes', f'{cpu_minutes:.1f}'),
        ('success', _success(latest)),
        ('reward', _join(by_part(play, 'reward'), '{:+.2f}')),
        ('solved', _join(by_part(play, 'solved') or by_part(play, 'solved_tree'), '{:.0%}')),
        ('entropy', _join(entropy, '{:.2f}')),
        ('dead groups', _join(by_part(play, 'dead_groups'), '{:.0%}')),
        ('cut answers', _join(by_part(play, 'truncated'), '{:.0%}')),
        ('faults', _join(by_part(play, 'faults'), '{:.3g}')),
        ('loss', _join({pool: row['loss'] for pool, row in updates.items() if 'loss' in row}, '{:.3g}')),
        ('warm start', _join(by_part(latest['warm_start'][1], 'loss'), '{:.3g}') if _only_warm(latest) else ''),
        ('tokens/s', _join(by_part(play, 'tokens_per_s'), '{:.0f}')),
        ('compiles', _join(by_part(play, 'compiles'), '{:g}')),
        ('seconds', _join(seconds, '{:.1f}')),
    ]
    return [(label, value) for label, value in found if value]


def line(name: str, shown: list[tuple[str, str]]) -> str:
    """The fields as one plain line."""
    return f'{name} | ' + ' | '.join(f'{label} {value}' for label, value in shown)


def panel(name: str, shown: list[tuple[str, str]]) -> Panel:
    """The fields as a table in a frame."""
    table = Table.grid(padding=(0, 2))
    table.add_column(justify='right', style='dim', no_wrap=True)
    table.add_column()
    for label, value in shown:
        table.add_row(label, Text(value, style='bold' if label in ('step', 'success') else ''))
    return Panel(table, title=Text(name), title_align='left', border_style='blue', expand=False)


def early_warnings(metrics: Mapping[str, float | None]) -> list[tuple[str, str]]:
    """(metric, warning) for what in a first rollout says that nothing will be learned, and what to change."""
    found = []
    for role, share in by_part(metrics, 'truncated').items():
        if share > TRUNCATED_LIMIT:
            text = (
                f'{share:.0%} of {_whose(role)} answers are cut off at max_tokens: a cut answer can hardly be right, '
                'so nothing will be learned from it. Raise max_tokens, or ask for shorter answers in the prompt.'
            )
            found.append((f'truncated/{role}', text))
    for role, share in by_part(metrics, 'dead_groups').items():
        if share > DEAD_LIMIT:
            text = (
                f'{share:.0%} of {_whose(role)} groups are dead (all candidates earn the same, so every advantage is '
                '0): more exploration is needed. Raise the temperature or the candidates a group, warm start longer, '
                'or check that the reward can tell answers apart.'
            )
            found.append((f'dead_groups/{role}', text))
    return found


def _whose(role: str) -> str:
    return f"{role}'s" if role else 'all'


def by_part(metrics: Mapping[str, float | None], name: str) -> dict[str, float]:
    """The finite parts of a metric: {'planner': …} of 'reward/planner'; the metric itself has the part ''."""
    found = {
        '' if key == name else key.removeprefix(f'{name}/'): value
        for key, value in metrics.items()
        if key == name or key.startswith(f'{name}/')
    }
    return {part: value for part, value in found.items() if value is not None and math.isfinite(value)}


def _join(parts: Mapping[str, float], form: str) -> str:
    return '  '.join(f'{part} {form.format(value)}'.strip() for part, value in parts.items())


def _only_warm(latest: Latest) -> bool:
    return 'warm_start' in latest and 'rollout' not in latest


def _steps(latest: Latest) -> str:
    """Before the first rollout: the steps of whatever there is."""
    return '  '.join(f'{axis} {step}' for axis, (step, _) in latest.items())


def _success(latest: Latest) -> str:
    """Held-out success of greedy play, the strict count beside it, and when it was measured."""
    step, row = latest.get('eval', (None, {}))
    greedy, severe = row.get('success'), row.get('strict')
    if greedy is None:
        return ''
    return f'{greedy:.0%}' + ('' if severe is None else f' (strict {severe:.0%})') + f' at step {step}'
