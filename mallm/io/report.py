"""The report of a run: curves.png and one self-contained report.html, made of what the run folder holds.

Known keys of summary.json: success_before, success_after, the same with strict for success and with _t1 at the end,
random_mover (what chance reaches, whatever plays it), seed, commit, minutes, cpu_minutes, {difficulty: success} in
by_difficulty_before, strict_by_difficulty_after and the like, and what all that is called in `words`. Whatever else is
there is listed. Files that are missing become a remark, never an error.
"""

import dataclasses
import functools
import json
import pathlib
import re
from collections.abc import Mapping, Sequence
from typing import Any

from mallm.io import curves, files, gallery, page
from mallm.io.display import EARLY_STEPS, early_warnings

OPTIMAL = '/optimal_'
WORDS = {'floor': 'chance', 'difficulty': 'difficulty'}
"""What is said where the task has not said its own."""
MISSING = {
    files.SUMMARY: 'the run has not ended, or it was stopped; the numbers are the first and last it measured',
    files.METRICS: 'nothing was measured',
    files.REPLAYS: 'no games were recorded',
    files.CONFIG: 'what was run is not known',
}
FACTS = (('seed', 'seed'), ('commit', 'commit'), ('minutes', 'minutes'), ('cpu_minutes', 'CPU minutes'))
RANDOM = ('random_mover', 'random_mover/success')
_LENGTH = re.compile(r'(?P<kind>\w*?)(?P<name>by_(optimal|difficulty))_(before|after)/(?P<length>.+)')


@dataclasses.dataclass(frozen=True)
class Run:
    """What a run folder holds; the names of what it lacks are in `missing`."""

    name: str
    config: Mapping[str, Any]
    rows: Sequence[Mapping[str, Any]]
    replays: Mapping[str, Sequence[Mapping[str, Any]]]
    summary: Mapping[str, Any]
    missing: tuple[str, ...]

    def word(self, name: str) -> str:
        """The task's own word for a thing, see `mallm.envs.base.Task.words`."""
        return str(self.summary.get(f'words/{name}', WORDS[name]))


def load(folder: pathlib.Path) -> Run:
    """Reads a run folder.

    Raises:
      FileNotFoundError: there is no such folder.
    """
    if not folder.is_dir():
        raise FileNotFoundError(f'{folder} is not a run folder: no such directory')
    return Run(
        name=folder.resolve().name,
        config=files.read_json(folder / files.CONFIG) or {},
        rows=files.read_rows(folder / files.METRICS),
        replays=files.read_json(folder / files.REPLAYS) or {},
        summary=files.flatten(files.read_json(folder / files.SUMMARY) or {}),
        missing=tuple(name for name in MISSING if not (folder / name).exists()),
    )


def write_report(folder: pathlib.Path, *, x: str = 'cpu_minutes') -> pathlib.Path:
    """Writes curves.png and report.html into the run folder; `x` is 'cpu_minutes', 'minutes' or 'step'."""
    folder = pathlib.Path(folder)
    run = load(folder)
    chance = _known(run.summary, *RANDOM)
    plots = curves.panels(run.rows, x=x, level=None if chance is None else (run.word('floor'), chance))
    overview = curves.figure(plots, curves.LIGHT, x=x, columns=3, title=run.name)
    (folder / files.CURVES).write_bytes(overview)
    pictures = _curves(plots, x) + _gallery(folder)
    parts = (_headline(run), _remarks(run), pictures, _by_length(run), _replays(run), _details(run))
    out = folder / files.REPORT
    out.write_text(page.document(run.name, '\n'.join(filter(None, parts)), run.replays), encoding='utf-8')
    return out


def before_and_after(run: Run, metric: str, suffix: str = '') -> tuple[float | None, float | None]:
    """A held-out metric before and after training: from the summary, else the first and last that were measured."""
    first, last = (
        _known(run.summary, f'{metric}_{when}{suffix}', f'{when}/{metric}{suffix}') for when in ('before', 'after')
    )
    metric += suffix
    measured = [row[metric] for row in run.rows if row['axis'] == 'eval' and row.get(metric) is not None]
    if not measured:
        return first, last
    return measured[0] if first is None else first, measured[-1] if last is None else last


def _known(summary: Mapping[str, Any], *keys: str) -> Any | None:
    """The first of these keys that has a value."""
    return next((summary[key] for key in keys if summary.get(key) is not None), None)


def _headline(run: Run) -> str:
    before, after = before_and_after(run, 'success')
    lead = 'No held-out success was measured.'
    if before is not None and after is not None:
        then, first = ('so far', 'at first') if files.SUMMARY in run.missing else ('after training', 'before')
        lead = f'Solves <b>{after:.0%}</b> of the held-out instances {then}, {before:.0%} {first}.'
    shares = (
        (('success',), 'Held-out success, greedy'),
        (('strict',), 'Strict, greedy'),
        (('success', '_t1'), 'Held-out success, T = 1'),
        (('strict', '_t1'), 'Strict, T = 1'),
    )
    cards = [_share_card(label, *before_and_after(run, *metric)) for metric, label in shares]
    if (chance := _known(run.summary, *RANDOM)) is not None:
        cards.append(_card(run.word('floor').capitalize(), f'{chance:.1%}', _bar(('was', chance))))
    facts = [_fact(label, run.summary[key]) for key, label in FACTS if run.summary.get(key) is not None]
    return (
        f'<h1>{page.text(run.name)}</h1><p class="lead">{lead}</p><p class="dim">{" &middot; ".join(facts)}</p>'
        f'<div class="cards">{"".join(cards)}</div>'
    )


def _fact(label: str, value: Any) -> str:
    shown = f'{value:.1f}' if isinstance(value, float) else str(value)[:12]
    return f'{page.text(label)} {page.text(shown)}'


def _share_card(label: str, before: float | None, after: float | None) -> str:
    if before is None and after is None:
        return ''
    shown = ' &rarr; '.join('?' if value is None else f'{value:.1%}' for value in (before, after))
    return (
        f'<div class="card"><span class="dim">{page.text(label)}</span><b>{shown}</b>'
        f'{_bar(("", after or 0.0), ("was", before or 0.0))}</div>'
    )


def _card(label: str, value: str, more: str = '') -> str:
    return f'<div class="card"><span class="dim">{page.text(label)}</span><b>{page.text(value)}</b>{more}</div>'


def _bar(*parts: tuple[str, float]) -> str:
    """Shares of 1 as coloured lengths over each other, the shortest on top."""
    longest_first = sorted(parts, key=lambda part: -part[1])
    return f'<div class="bar">{"".join(_length(name, share) for name, share in longest_first)}</div>'


def _length(name: str, share: float) -> str:
    return f'<i class="{name}" style="width:{100 * min(max(share, 0.0), 1.0):.1f}%"></i>'


def _remarks(run: Run) -> str:
    """What is missing, and the warnings of the first rollouts."""
    first = [row for row in run.rows if row['axis'] == 'rollout'][:EARLY_STEPS]
    measured = [{key: row[key] for key in row if key not in files.ROW_KEYS} for row in first]
    warnings = dict(reversed([warning for row in measured for warning in early_warnings(row)]))
    notes = [f'{name} is missing: {MISSING[name]}.' for name in run.missing]
    notes += [f'In the first rollouts: {text}' for text in warnings.values()]
    return ''.join(f'<p class="card warn">{page.text(note)}</p>' for note in notes)


def _curves(plots: Sequence[curves.Panel], x: str) -> str:
    drawn = (
        page.image(_alone(plot, curves.LIGHT, x), _alone(plot, curves.DARK, x), plot.title)
        for plot in plots
        if plot.lines
    )
    shown = ''.join(f'<div class="card">{picture}</div>' for picture in drawn)
    if not shown:
        return '<h2>Curves</h2><p>No curve was recorded.</p>'
    how = '<p class="dim">Faint: every step. Strong: the moving mean over a fifteenth of the run.</p>'
    many = any(len(line.xs) > curves.SMOOTH_FROM for plot in plots for line in plot.lines)
    return f'<h2>Curves</h2>{how if many else ""}<div class="curves">{shown}</div>'


def _gallery(folder: pathlib.Path) -> str:
    """The run with the other seeds beside it, as the figures of a paper would show them, over all that it cost."""
    runs = gallery.beside(folder)
    group, n = {runs[0].group: runs}, len(runs)
    over = [
        (x, gallery.curve(group, 'success', x=x, title='Held-out success', y_label='solved', share=True))
        for x in ('step', *files.COSTS)
    ]
    turns = gallery.curve(group, 'turns_to_solve', x='step', title='Turns to solve', y_label='turns')
    shown = [(x, panel) for x, panel in [*over, ('step', turns)] if panel.lines]
    if not shown:
        return ''
    draws = [functools.partial(curves.draw, panel, x=x) for x, panel in shown]
    light, dark = (curves.picture(draws, theme, columns=2) for theme in (curves.LIGHT, curves.DARK))
    how = (
        f'mean ± standard error over {n} seeds found beside this run' if n > 1 else 'one seed; no other lies beside it'
    )
    head = f'<h2>Gallery</h2><p class="dim">Greedy, one path, against what it cost: {how}.</p>'
    return f'{head}<div class="card gallery">{page.image(light, dark, "Gallery")}</div>'


def _alone(plot: curves.Panel, theme: curves.Theme, x: str) -> bytes:
    """One plot, with letters large enough for a phone."""
    return curves.figure([plot], theme, x=x, columns=1, size=(3.9, 2.75))


def by_length(run: Run) -> dict[str, dict[str, tuple[float | None, float | None]]]:
    """{kind of success: {difficulty: (before, after)}} of the summary, else of the evaluations."""
    table: dict[str, dict[str, tuple[float | None, float | None]]] = {}
    for found in filter(None, map(_LENGTH.match, run.summary)):
        name = f'{found["kind"]}{found["name"]}'
        pair = before_and_after(run, name, f'/{found["length"]}')
        table.setdefault(found['kind'].removesuffix('_') or 'success', {})[found['length']] = pair
    if table:
        return table
    for name in dict.fromkeys(key for row in run.rows if row['axis'] == 'eval' for key in row if OPTIMAL in key):
        kind, length = name.split(OPTIMAL)
        table.setdefault(kind, {})[length] = before_and_after(run, name)
    return table


def _by_length(run: Run) -> str:
    table = by_length(run)
    if not table:
        return ''
    lengths = sorted({length for pairs in table.values() for length in pairs}, key=lambda text: (len(text), text))
    head = ''.join(f'<th>{page.text(kind)} before</th><th>after</th>' for kind in table)
    lines = []
    for length in lengths:
        cells = ''.join(
            f'<td>{_share(value)}</td>' for pairs in table.values() for value in pairs.get(length, (None, None))
        )
        lines.append(f'<tr><td>{page.text(length)}</td>{cells}</tr>')
    word = page.text(run.word('difficulty'))
    shown = f'<table><tr><th>{word}</th>{head}</tr>{"".join(lines)}</table>'
    return f'<h2>Success by {word}</h2><div class="card scroll">{shown}</div>'


def _share(value: float | None) -> str:
    if value is None:
        return '&ndash;'
    return f'{value:.0%}' if 0 <= value <= 1 else f'{value:g}'


def _replays(run: Run) -> str:
    if not any(run.replays.values()):
        return '<h2>Replays</h2><p>No replay was recorded.</p>'
    how = '<p class="dim">The same instance before and after, step by step: buttons, or the arrow keys.</p>'
    return f'<h2>Replays</h2>{how}{page.PLAYER}'


def _details(run: Run) -> str:
    facts = ''.join(
        f'<tr><td>{page.text(key)}</td><td>{page.text(json.dumps(value))}</td></tr>'
        for key, value in run.summary.items()
    )
    table = f'<div class="scroll"><table>{facts}</table></div>' if facts else '<p>none</p>'
    config = page.text(json.dumps(run.config, indent=2)) if run.config else 'none'
    return (
        f'<h2>All of it</h2><details class="card"><summary>Everything in the summary</summary>{table}</details><br>'
        f'<details class="card"><summary>Configuration</summary><pre>{config}</pre></details>'
    )
