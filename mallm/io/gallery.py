"""Figures over many stored runs: found on disk, grouped over seeds, drawn as mean ± standard error, laid out on a page.

Runs in one folder are a family and are compared with each other; those whose names differ by a seed only are one group.
Nothing is computed again: only metrics.jsonl (or the eval.jsonl that is kept of it), summary.json and config.json are
read. Runs from before a column was recorded are left out of the figures that need it.
"""

import dataclasses
import functools
import pathlib
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.ticker import PercentFormatter

from mallm.io import curves, files, page
from mallm.io.curves import Line, Panel, Theme
from mallm.io.files import COSTS

EVAL = 'eval.jsonl'
"""The evaluation rows of a run, which is what is kept of metrics.jsonl beside stored results."""
NO_SETTING = ('name', 'seed', 'runs', 'wandb')
"""What in a config.json changes no result but by chance."""


@dataclasses.dataclass(frozen=True)
class StoredRun:
    """Attributes:
    family: the folder that the run lies in, from the one that was searched.
    group: the run's name without its seed.
    seed: of the run, as its files or its name say.
    rows: what it measured; every one has `COSTS` where the run's evaluations have them.
    """

    family: str
    group: str
    seed: str
    rows: Sequence[Mapping[str, Any]]
    summary: Mapping[str, Any]
    config: Mapping[str, Any]


Family = Mapping[str, Sequence[StoredRun]]
"""The runs of one folder, by group."""


def read_run(folder: pathlib.Path, family: str = '') -> StoredRun:
    rows = files.read_rows(folder / files.METRICS) or files.read_rows(folder / EVAL)
    summary, config = (files.read_json(folder / name) or {} for name in (files.SUMMARY, files.CONFIG))
    name = folder.resolve().name
    group = files.without_seed(name)
    seed = str(summary.get('seed', config.get('seed', name.removeprefix(group))))
    return StoredRun(family, group, seed, with_costs(rows), summary, config)


def with_costs(rows: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """Rollout rows with the costs that the evaluations before and after them say, linearly between the two."""
    known = {
        cost: [(row['step'], row[cost]) for row in rows if row['axis'] == 'eval' and row.get(cost) is not None]
        for cost in COSTS
    }
    if not any(known.values()):
        return list(rows)
    told = {cost: np.array(pairs, float).T for cost, pairs in known.items() if pairs}

    def filled(row: Mapping[str, Any]) -> Mapping[str, Any]:
        if row['axis'] != 'rollout':
            return row
        done = row['step'] + 1
        found = {cost: float(np.interp(done, at, spent)) for cost, (at, spent) in told.items() if done <= at[-1]}
        return {**row, **found}

    return [filled(row) for row in rows]


def find_runs(roots: Iterable[pathlib.Path]) -> dict[str, dict[str, list[StoredRun]]]:
    """{family: {group: runs}} of every run folder below the roots; of one seed the newest finished run counts.

    Runs of one name that were made with different settings are different groups, numbered.
    """
    families: dict[str, dict[str, dict[str, StoredRun]]] = {}
    for root in roots:
        places = {path.parent for name in (files.METRICS, EVAL, files.SUMMARY) for path in root.rglob(name)}
        for place in sorted(places - {root}):
            family = '/'.join((root.resolve().name, *place.relative_to(root).parts[:-1]))
            add(read_run(place, family), families.setdefault(family, {}))
    return {
        family: {name: list(seeds.values()) for name, seeds in groups.items()} for family, groups in families.items()
    }


def find_tables(roots: Iterable[pathlib.Path]) -> dict[str, dict[str, list[StoredRun]]]:
    """{family: {group: runs}} of stored tables, which hold summaries alone: JSON of {method: {seed: summary}}, or such
    a table for each of several tasks."""
    families: dict[str, dict[str, list[StoredRun]]] = {}
    for path in (path for root in roots for path in sorted([*root.glob('*.json'), *root.glob('ablations/*.json')])):
        told = files.read_json(path)
        several = told if isinstance(told, Mapping) and not is_table(told) else {}
        tables = {f'{path.stem}/{task}': cells for task, cells in several.items()} or {path.stem: told}
        for family, cells in tables.items():
            if is_table(cells):
                families[family] = {
                    name: [StoredRun(family, name, seed, [], summary, {}) for seed, summary in seeds.items()]
                    for name, seeds in cells.items()
                }
    return families


def is_table(told: Any) -> bool:
    return (
        isinstance(told, Mapping)
        and bool(told)
        and all(isinstance(seeds, Mapping) and seeds for seeds in told.values())
        and all(isinstance(s, Mapping) and 'success_after' in s for seeds in told.values() for s in seeds.values())
    )


def add(run: StoredRun, groups: dict[str, dict[str, StoredRun]]) -> None:
    """Puts a run beside those of its name and settings."""
    for number in range(1, 1000):
        name = run.group if number == 1 else f'{run.group} ({number})'
        seeds = groups.setdefault(name, {})
        if not seeds or agree(run.config, next(iter(seeds.values())).config):
            if run.seed not in seeds or run.summary or not seeds[run.seed].summary:
                seeds[run.seed] = run
            return


def agree(one: Mapping[str, Any], other: Mapping[str, Any]) -> bool:
    """Whether two configs say the same wherever both say something, seeds and places apart."""
    first, second = (files.flatten({k: v for k, v in c.items() if k not in NO_SETTING}) for c in (one, other))
    return all(first[name] == second[name] for name in first.keys() & second.keys())


def beside(folder: pathlib.Path) -> list[StoredRun]:
    """A run and those beside it that differ from it by their seed only."""
    group = files.without_seed(folder.resolve().name)
    groups: dict[str, dict[str, StoredRun]] = {}
    own = read_run(folder)
    groups[group] = {own.seed: own}
    for place in sorted(folder.resolve().parent.iterdir()):
        if place.is_dir() and place != folder.resolve() and files.without_seed(place.name) == group:
            run = read_run(place)
            if run.seed != own.seed and run.rows:
                add(run, groups)
    return list(groups[group].values())


def curve(
    family: Family, metric: str, *, x: str, title: str, y_label: str, axis: str = 'eval', share: bool = False
) -> Panel:
    """One line a group: mean ± standard error over its seeds, their number in the label."""
    lines: list[Line] = []
    for color, (name, runs) in enumerate(family.items()):
        lines += mean_line(name, runs, metric, x=x, color=color, axis=axis)
    return Panel(title, y_label, tuple(lines), share=share)


def mean_line(
    name: str, runs: Sequence[StoredRun], metric: str, *, x: str, color: int, axis: str = 'eval'
) -> list[Line]:
    """The mean of the runs that have the metric and x, or nothing."""
    kept = [[row for row in run.rows if row['axis'] == axis and metric in row and x in row] for run in runs]
    kept = [rows for rows in kept if any(row[metric] is not None for row in rows)]
    if not kept:
        return []
    line = curves.group(name, kept, metric, x, color, axis)[-1]
    return [dataclasses.replace(line, label=f'{name} (n = {len(kept)})')] if line.xs else []


@dataclasses.dataclass(frozen=True)
class Bars:
    """Shares of 1 as bars: label, mean, standard error (0 where it is not known)."""

    title: str
    x_label: str
    bars: tuple[tuple[str, float, float], ...]
    level: tuple[str, float] | None = None


def bars(family: Family, metric: str, *, title: str, x_label: str) -> Bars:
    """One bar a group that has the metric in its summaries."""
    found = []
    for name, runs in family.items():
        values = [[run.summary[metric]] for run in runs if run.summary.get(metric) is not None]
        if values:
            mean, error = curves.mean_and_error(np.array(values, float))
            found.append((f'{name} (n = {len(values)})', float(mean[0]), float(error[0])))
    chance = [run.summary for runs in family.values() for run in runs if 'random_mover' in run.summary]
    level = None
    if found and chance:
        level = (chance[0].get('words', {}).get('floor', 'chance'), float(np.mean([s['random_mover'] for s in chance])))
    return Bars(title, x_label, tuple(found), level)


def draw_bars(shown: Bars, axes: Axes, theme: Theme) -> None:
    below = '' if shown.level is None else f' (dotted: {shown.level[0]}, {shown.level[1]:.0%})'
    curves.dress(axes, theme, title=shown.title, x_label=shown.x_label + below, y_label='')
    places = np.arange(len(shown.bars))[::-1]
    for number, (place, (_, mean, error)) in enumerate(zip(places, shown.bars, strict=True)):
        color = theme.colors[number % len(theme.colors)]
        axes.barh(place, mean, height=0.62, color=color)
        if error:
            axes.errorbar(mean, place, xerr=error, color=theme.ink, capsize=3, linewidth=1.2)
        axes.text(mean + error, place, f'  {mean:.1%}', va='center', color=theme.ink, fontsize=8)
    axes.set_yticks(places, [name for name, *_ in shown.bars])
    axes.grid(axis='y', visible=False)
    axes.set_xlim(0, 1.12)
    axes.xaxis.set_major_formatter(PercentFormatter(1.0))
    if shown.level is not None:
        axes.axvline(shown.level[1], color=theme.ink, linewidth=1, linestyle=':')


@dataclasses.dataclass(frozen=True)
class Figure:
    """One figure: its file's name, what it shows in a sentence, and its plots."""

    name: str
    caption: str
    plots: tuple[curves.Draw, ...]
    size: tuple[float, float] = (5.6, 3.6)

    def picture(self, theme: Theme, form: str = 'png') -> bytes:
        columns = min(2, len(self.plots))
        return curves.picture(self.plots, theme, columns=columns, size=self.size, form=form)


def of_panels(name: str, caption: str, panels: Iterable[Panel], *, x: str) -> Figure:
    """A figure of the panels that have a line."""
    plots = tuple(functools.partial(curves.draw, panel, x=x) for panel in panels if panel.lines)
    return Figure(name, caption, plots)


def write(figures: Iterable[Figure], out: pathlib.Path) -> list[pathlib.Path]:
    """NAME.png and NAME.pdf of each figure that has data, and index.html, which shows them all."""
    out.mkdir(parents=True, exist_ok=True)
    shown, written, without = [], [], []
    for figure in figures:
        if not figure.plots:
            without.append(figure.name)
            continue
        light = figure.picture(curves.LIGHT)
        for form, content in (('png', light), ('pdf', figure.picture(curves.LIGHT, 'pdf'))):
            written.append(out / f'{figure.name}.{form}')
            written[-1].write_bytes(content)
        drawn = page.image(light, figure.picture(curves.DARK), figure.caption)
        link = f'<a href="{page.text(figure.name)}.pdf">PDF</a>'
        shown.append(f'<h2>{page.text(figure.name)}</h2><p class="dim">{page.text(figure.caption)} {link}</p>{drawn}')
    if without:
        shown.append(f'<p class="dim">No stored run has the data of: {page.text(", ".join(without))}.</p>')
    body = '<h1>Figures</h1><div class="gallery">' + ''.join(f'<div class="card">{part}</div>' for part in shown)
    written.append(out / 'index.html')
    written[-1].write_text(page.document('Figures', f'{body}</div>', {}), encoding='utf-8')
    return written
