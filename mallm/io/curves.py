"""The curves of a run, and of several runs over each other. matplotlib by its objects, no global state.

A panel says what to draw; `draw` is the only function that knows how.
"""

import dataclasses
import functools
import io
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.layout_engine import ConstrainedLayoutEngine
from matplotlib.ticker import EngFormatter, MaxNLocator, PercentFormatter

from mallm.io.display import by_part

Row = Mapping[str, Any]
X_LABELS = {
    'cpu_minutes': 'CPU minutes of the whole run',
    'minutes': 'minutes',
    'step': 'training steps',
    'training_cpu_minutes': 'CPU minutes of reinforcement',
    'training_tokens': 'tokens sampled for training',
    'agents': 'number of agents',
}
SMOOTH_FROM = 60
"""Noisy per-step curves with more points than this get a moving mean over a fifteenth of the run."""


@dataclasses.dataclass(frozen=True)
class Line:
    """One curve. `spread` is a half-width around ys (standard error), () for none; `faint` stays in the background."""

    label: str
    xs: tuple[float, ...]
    ys: tuple[float, ...]
    spread: tuple[float, ...] = ()
    dashed: bool = False
    faint: bool = False
    color: int | None = None


@dataclasses.dataclass(frozen=True)
class Panel:
    """One plot. `share` says that y is a share of 1, shown in percent; `level` is a horizontal line to compare with."""

    title: str
    y_label: str
    lines: tuple[Line, ...]
    share: bool = False
    level: tuple[str, float] | None = None


@dataclasses.dataclass(frozen=True)
class Theme:
    paper: str
    ink: str
    grid: str
    colors: tuple[str, ...]


LIGHT = Theme('#ffffff', '#1d2430', '#dfe3ea', ('#0072b2', '#d55e00', '#009e73', '#cc79a7', '#e69f00', '#5f6b7a'))
DARK = Theme('#171b22', '#dce1e8', '#333a45', ('#56b4e9', '#e69f00', '#3fc8a4', '#e39cc5', '#f0e442', '#9aa5b4'))
"""Colours that are told apart whatever kind of colour blindness one has (after Okabe and Ito), light and dark."""
MARKERS = ('o', 's', '^', 'D', 'v', 'P', 'X')
"""So that lines are told apart without any colour."""
Draw = Callable[[Axes, Theme], None]


def series(rows: Sequence[Row], axis: str, metric: str, x: str) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """(xs, ys) of a metric on one axis; null becomes NaN, a gap in the curve."""
    found = [(row[x], row[metric]) for row in rows if row['axis'] == axis and metric in row]
    return tuple(float(at) for at, _ in found), tuple(math.nan if value is None else float(value) for _, value in found)


def panels(rows: Sequence[Row], *, x: str, level: tuple[str, float] | None = None) -> tuple[Panel, ...]:
    """The six plots of a run; one without lines says so itself. `level` is what chance reaches, and its name."""
    return (
        Panel(
            'Held-out success',
            'solved',
            _some(
                _line(rows, 'eval', 'success', x, 'greedy', color=0),
                _line(rows, 'eval', 'strict', x, 'greedy, strict', dashed=True, color=0),
                _line(rows, 'eval', 'success_t1', x, 'T = 1', color=1),
                _line(rows, 'eval', 'strict_t1', x, 'T = 1, strict', dashed=True, color=1),
            ),
            share=True,
            level=level,
        ),
        Panel('Reward while training, by role', 'mean reward', _parts(rows, 'reward', x)),
        Panel('Entropy', 'nats a token', _parts(rows, 'entropy', x) or _pools(rows, 'entropy', x)),
        Panel('Dead groups', 'groups whose rewards are all equal', _parts(rows, 'dead_groups', x), share=True),
        Panel(
            'Turns to solve, held out',
            'turns',
            _some(
                _line(rows, 'eval', 'turns_to_solve', x, 'greedy', color=0),
                _line(rows, 'eval', 'turns_to_solve_t1', x, 'T = 1', color=1),
            ),
        ),
        Panel('Sampling speed', 'tokens a second', _parts(rows, 'tokens_per_s', x)),
    )


def draw(panel: Panel, axes: Axes, theme: Theme, *, x: str) -> None:
    dress(axes, theme, title=panel.title, x_label=X_LABELS[x], y_label=panel.y_label)
    if not panel.lines:
        axes.text(0.5, 0.5, 'not recorded', transform=axes.transAxes, ha='center', color=theme.ink, alpha=0.6)
    for number, line in enumerate(panel.lines):
        index = number if line.color is None else line.color
        _draw_line(line, axes, theme.colors[index % len(theme.colors)], MARKERS[index % len(MARKERS)])
    if panel.level is not None:
        axes.axhline(panel.level[1], color=theme.ink, linewidth=1, linestyle=':', label=panel.level[0])
    if panel.share:
        axes.set_ylim(-0.03, 1.03)
        axes.yaxis.set_major_formatter(PercentFormatter(1.0))
    axes.xaxis.set_major_locator(MaxNLocator(5, integer=x in ('step', 'agents')))
    if x == 'training_tokens':
        axes.xaxis.set_major_formatter(EngFormatter(sep=''))
    if axes.get_legend_handles_labels()[1]:
        axes.legend(fontsize=8, frameon=False, handlelength=2.8, labelcolor=theme.ink)


def dress(axes: Axes, theme: Theme, *, title: str, x_label: str, y_label: str) -> None:
    """What every plot looks like."""
    axes.set_facecolor(theme.paper)
    axes.set_title(title, loc='left', color=theme.ink, fontsize=10.5, fontweight='bold')
    axes.set_xlabel(x_label, color=theme.ink, fontsize=9)
    axes.set_ylabel(y_label, color=theme.ink, fontsize=9)
    axes.tick_params(colors=theme.ink, labelsize=8, length=0)
    axes.grid(color=theme.grid, linewidth=0.8)
    axes.set_axisbelow(True)
    for side in axes.spines.values():
        side.set_visible(False)


def figure(
    shown: Sequence[Panel],
    theme: Theme,
    *,
    x: str,
    columns: int,
    title: str = '',
    size: tuple[float, float] = (4.6, 3.1),
) -> bytes:
    """PNG bytes of the panels in a grid; `size` is that of one panel in inches."""
    draws = [functools.partial(draw, panel, x=x) for panel in shown]
    return picture(draws, theme, columns=columns, title=title, size=size)


def picture(
    draws: Sequence[Draw],
    theme: Theme,
    *,
    columns: int,
    title: str = '',
    size: tuple[float, float] = (4.6, 3.1),
    form: str = 'png',
) -> bytes:
    """A grid of plots as PNG or PDF, the same bytes for the same plots."""
    rows = math.ceil(len(draws) / columns)
    layout = ConstrainedLayoutEngine(w_pad=0.1, h_pad=0.1)
    drawing = Figure(figsize=(size[0] * columns, size[1] * rows), dpi=140, layout=layout, facecolor=theme.paper)
    FigureCanvasAgg(drawing)
    if title:
        drawing.suptitle(title, color=theme.ink, fontsize=13, fontweight='bold', x=0.01, ha='left')
    places = list(drawing.subplots(rows, columns, squeeze=False).flat)
    for axes, one in zip(places, draws, strict=False):
        one(axes, theme)
    for axes in places[len(draws) :]:
        axes.set_axis_off()
    buffer = io.BytesIO()
    unsaid = {'png': {'Software': None}, 'pdf': {'CreationDate': None, 'Producer': None, 'Creator': None}}
    drawing.savefig(buffer, format=form, metadata=unsaid[form])
    return buffer.getvalue()


def mean_and_error(values_RS: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Mean over runs [R, steps] and its standard error (0 for a single run)."""
    runs = len(values_RS)
    error = values_RS.std(axis=0, ddof=1) / math.sqrt(runs) if runs > 1 else np.zeros(values_RS.shape[1])
    return values_RS.mean(axis=0), error


def group(name: str, runs: Sequence[Sequence[Row]], metric: str, x: str, color: int, axis: str = 'eval') -> list[Line]:
    """A faint line for each run (rows of one axis that have x and the metric), and their mean ± standard error."""
    tables = [{row['step']: row for row in rows if row[metric] is not None} for rows in runs]
    shared = sorted(set.intersection(*(set(table) for table in tables)))
    singles = [Line('', *series(rows, axis, metric, x), faint=True, color=color) for rows in runs]
    values = np.array([[table[step][metric] for step in shared] for table in tables], float)
    places = np.array([[table[step][x] for step in shared] for table in tables], float)
    mean, error = mean_and_error(values)
    label = name if len(runs) == 1 else f'{name} (mean ± s.e. of {len(runs)} seeds)'
    line = Line(
        label, tuple(places.mean(axis=0)), tuple(mean), spread=tuple(error) if len(runs) > 1 else (), color=color
    )
    return [*(singles if len(runs) > 1 else []), line]


def _draw_line(line: Line, axes: Axes, color: str, mark: str) -> None:
    xs, ys = np.array(line.xs), np.array(line.ys)
    style = '--' if line.dashed else '-'
    if line.faint:
        axes.plot(xs, ys, color=color, linewidth=0.8, alpha=0.35)
        return
    if len(xs) > SMOOTH_FROM:
        axes.plot(xs, ys, color=color, linewidth=0.6, alpha=0.25)
        ys = _moving_mean(ys, max(2, len(ys) // 15))
    marker = mark if len(xs) <= 30 else ''
    axes.plot(xs, ys, style, color=color, linewidth=1.8, marker=marker, markersize=4, label=line.label)
    if line.spread and len(xs) == 1:
        axes.errorbar(xs, ys, yerr=line.spread, color=color, capsize=3, linewidth=1.2)
    elif line.spread:
        spread = np.array(line.spread)
        axes.fill_between(xs, ys - spread, ys + spread, color=color, alpha=0.18, linewidth=0)


def _moving_mean(ys: np.ndarray, window: int) -> np.ndarray:
    """Mean of the last `window` values up to each point, gaps left out; NaN where there is nothing."""
    known = np.isfinite(ys)
    total = np.cumsum(np.where(known, ys, 0.0))
    count = np.cumsum(known)
    total[window:] -= total[:-window].copy()
    count[window:] -= count[:-window].copy()
    return np.where(count > 0, total / np.maximum(count, 1), np.nan)


def _line(
    rows: Sequence[Row], axis: str, metric: str, x: str, label: str, *, dashed: bool = False, color: int | None = None
) -> Line:
    return Line(label, *series(rows, axis, metric, x), dashed=dashed, color=color)


def _some(*lines: Line) -> tuple[Line, ...]:
    """The lines that have a finite point."""
    return tuple(line for line in lines if any(map(math.isfinite, line.ys)))


def _parts(rows: Sequence[Row], metric: str, x: str) -> tuple[Line, ...]:
    """One line for each part of a rollout metric: 'reward/planner' is labelled 'planner'."""
    parts = by_part(dict.fromkeys((key for row in rows if row['axis'] == 'rollout' for key in row), 0.0), metric)
    return _some(*(_line(rows, 'rollout', f'{metric}/{part}' if part else metric, x, part or 'all') for part in parts))


def _pools(rows: Sequence[Row], metric: str, x: str) -> tuple[Line, ...]:
    axes = dict.fromkeys(row['axis'] for row in rows if row['axis'].startswith('update/'))
    return _some(*(_line(rows, axis, metric, x, axis.removeprefix('update/')) for axis in axes))
