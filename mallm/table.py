"""Fills a table of experiments by seeds, cell by cell, and writes it: mean ± standard error, baselines included."""

import dataclasses
import json
import math
import pathlib
import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from mallm.config import describe
from mallm.experiment import Experiment
from mallm.io import files
from mallm.train import train

COLUMNS = ('success', 'success_t1', 'strict', 'strict_t1')


def fill(
    methods: Mapping[str, Experiment], *, seeds: Iterable[int], only: Sequence[str], runs: str, out: str
) -> dict[str, Any]:
    """Runs the cells that have no stored summary yet, and writes `out`.json and `out`.md after each.

    A cell is stored when a run folder of its name holds a summary beside the very settings it would run with now. What
    is written holds the stored cells of all methods, so that several calls may fill one table.
    """
    unknown = set(only) - set(methods)
    if unknown:
        raise ValueError(f'methods {sorted(unknown)}: not in this table; there are {sorted(methods)}')
    seeds = tuple(seeds)
    cell = lambda name, seed: dataclasses.replace(methods[name], name=name, seed=seed, runs=runs)  # noqa: E731
    for seed in seeds:
        for name in only or tuple(methods):
            if stored(cell(name, seed)) is None:
                train(cell(name, seed))
            write(gather(methods, seeds, cell), pathlib.Path(out))
    return gather(methods, seeds, cell)


def gather(
    methods: Iterable[str], seeds: Sequence[int], cell: Callable[[str, int], Experiment]
) -> dict[str, dict[str, Any]]:
    """{method: {seed: summary}} of the cells that are stored."""
    found = {name: {str(seed): stored(cell(name, seed)) for seed in seeds} for name in methods}
    kept = {name: {seed: summary for seed, summary in cells.items() if summary} for name, cells in found.items()}
    return {name: cells for name, cells in kept.items() if cells}


def stored(experiment: Experiment) -> dict[str, Any] | None:
    """The summary of a run that was made with these very settings, or None.

    A setting that did not exist yet when a run was made counts as set to what is its default now.
    """
    plain = lambda settings: json.loads(json.dumps(describe(settings)))  # noqa: E731
    settings, default = plain(experiment), plain(Experiment())
    for folder in sorted(pathlib.Path(experiment.runs).glob(f'{experiment.folder_name}*')):
        summary, used = files.read_json(folder / 'summary.json'), files.read_json(folder / 'config.json')
        if summary and used and filled(used, default) == settings:
            return summary
    return None


def filled(settings: Mapping[str, Any], default: Mapping[str, Any]) -> dict[str, Any]:
    """`settings` with the missing ones of its groups taken from `default`; a group that `default` lacks is kept."""
    inner = {
        name: filled(value, default[name])
        for name, value in settings.items()
        if isinstance(value, Mapping) and isinstance(default.get(name), Mapping)
    }
    closed = {name for name in ('pools', 'roles', 'pool_rates') if name in settings}  # named by the user, not fields
    return {**default, **settings, **{name: value for name, value in inner.items() if name not in closed}}


def write(table: Mapping[str, Any], out: pathlib.Path) -> None:
    out.parent.mkdir(parents=True, exist_ok=True)
    out.with_suffix('.json').write_text(json.dumps(table, indent=1, sort_keys=True) + '\n')
    out.with_suffix('.md').write_text(markdown(table))


def markdown(table: Mapping[str, Any]) -> str:
    """Rows are methods; the two floors come from the same boards as everything else."""
    head = '| method | seeds | held-out | held-out, T=1 | strict | strict, T=1 | CPU min of reinforcement |'
    lines = [head, '|---|---|---|---|---|---|---|']
    summaries = [summary for cells in table.values() for summary in cells.values()]
    lines.append(f'| random mover | - | {spread([s["random_mover"] for s in summaries])} | - | - | - | 0 |')
    teams = [s for name in ('at_grpo', 'at_grpo_per_role') for s in table.get(name, {}).values()]
    if teams:
        lines.append(row('warm start alone (team)', teams, 'before', [0.0]))
    for name, cells in table.items():
        rows = list(cells.values())
        lines.append(row(name, rows, 'after', [s['training_cpu_minutes'] for s in rows]))
        if all('swapped_after' in s for s in rows):
            lines.append(
                f'| {name}, roles swapped | {len(rows)} | {spread([s["swapped_after"] for s in rows])} | | | | |'
            )
    return '\n'.join(lines) + '\n'


def row(name: str, summaries: Sequence[Mapping[str, Any]], when: str, minutes: Sequence[float]) -> str:
    cells = [spread([s[key_of(column, when)] for s in summaries]) for column in COLUMNS]
    return f'| {name} | {len(summaries)} | {" | ".join(cells)} | {statistics.fmean(minutes):.1f} |'


def key_of(column: str, when: str) -> str:
    base, _, suffix = column.partition('_')
    return f'{base}_{when}' + (f'_{suffix}' if suffix else '')


def spread(shares: Sequence[float]) -> str:
    """Mean ± standard error over seeds, in percent."""
    mean = statistics.fmean(shares)
    if len(shares) < 2:
        return f'{mean:.1%}'
    return f'{100 * mean:.1f} ± {100 * statistics.stdev(shares) / math.sqrt(len(shares)):.1f} %'
