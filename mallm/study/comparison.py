"""Tables that compare methods: ours as mean ± standard error over seeds, what it cost, and what others reported.

A method is judged against one reference row. All methods have the same seeds, so the difference is taken seed by seed
and its error is that of these differences; rows with fewer than two seeds in common are compared as independent samples
(root of the sum of the squared errors, degrees of freedom of the smaller one). Where the reference is not clearly
better, by Student's t test, two-sided at 5 %, the table says so: 3 pairs need 4.3 standard errors, 5 pairs 2.8.
"""

import dataclasses
import math
import statistics
from collections.abc import Mapping, Sequence
from typing import Any

Cells = Mapping[str, Mapping[str, Mapping[str, Any]]]
"""{method: {seed: summary}}."""
QUANTILES = (math.inf, 12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228)
"""97.5 % quantile of Student's t by degrees of freedom; that of 10 is used for more, which is a little too strict."""
HOW = """Differences are means over the seeds that both rows have, seed by seed, ± their standard error. One is clear if
Student's t test of these pairs says so, two-sided at 5 %: 3 seeds need 4.3 standard errors, 5 seeds 2.8.
"""


@dataclasses.dataclass(frozen=True)
class Row:
    """One line of a table.

    Attributes:
      label: what is shown.
      method: whose summaries.
      metric: which share of 1 in a summary: 'success_after', 'success_before', 'swapped_after', 'random_mover', …
      paper: the name of the row with which the paper's numbers are looked up; '' where it has none.
      control: whether the reference is to beat it.
    """

    label: str
    method: str
    metric: str = 'success_after'
    paper: str = ''
    control: bool = True

    @property
    def strict(self) -> str | None:
        """The same share on the strict split, where there is one."""
        return self.metric.replace('success', 'strict') if 'success' in self.metric else None

    @property
    def trained(self) -> bool:
        return self.metric.endswith('_after')


@dataclasses.dataclass(frozen=True)
class Mean:
    """Mean and standard error of some values; the error of a single one is not known (NaN)."""

    mean: float
    error: float
    n: int

    @classmethod
    def of(cls, values: Sequence[float]) -> 'Mean':
        n = len(values)
        return cls(statistics.fmean(values), statistics.stdev(values) / math.sqrt(n) if n > 1 else math.nan, n)

    def percent(self, sign: str = '') -> str:
        error = '' if math.isnan(self.error) else f' ± {100 * self.error:.1f}'
        return f'{100 * self.mean:{sign}.1f}{error} %'

    def minus(self, other: 'Mean') -> 'Mean':
        """The difference of independent samples."""
        return Mean(self.mean - other.mean, math.hypot(self.error, other.error), min(self.n, other.n))

    @property
    def negative(self) -> 'Mean':
        return dataclasses.replace(self, mean=-self.mean)

    @property
    def is_clear(self) -> bool:
        """Above 0 by more than chance explains; one seed is never enough to say so."""
        return self.mean > QUANTILES[min(self.n, len(QUANTILES)) - 1] * self.error


def table(
    rows: Sequence[Row],
    cells: Cells,
    *,
    reference: Row,
    paper: Mapping[str, Mapping[str, float | None]] | None = None,
    sampled: bool = False,
) -> str:
    """The rows that have a stored cell, as a Markdown table.

    Cost is that of reinforcement: warm starts, cloning and evaluation are beside it.

    Args:
      paper: a column of percents by row name for each title.
      sampled: the shares at temperature 1 stand beside the greedy ones.
    """
    paper = paper or {}
    splits = [(title, suffix) for title in ('held-out', 'strict') for suffix in ('', '_t1')[: 1 + sampled]]
    shares = [title + suffix.replace('_t1', ', T=1') for title, suffix in splits]
    titles = ('method', 'n', *shares, 'RL CPU min', 'RL tokens', f'{reference.label} minus this', *paper)
    lines = [line(titles), '|---' * len(titles) + '|']
    for row in rows:
        share = found(cells, row, row.metric)
        if share is None and not (row.paper and any(column.get(row.paper) is not None for column in paper.values())):
            continue
        cost = costs(cells, row) if share else ('', '')
        against = verdict(row, difference(cells, reference, row)) if row != reference else 'reference'
        reported = ['' if (value := column.get(row.paper)) is None else f'{value:g} %' for column in paper.values()]
        metrics = [row.strict if title == 'strict' else row.metric for title, _ in splits]
        ours = [text(found(cells, row, m and m + suffix)) for m, (_, suffix) in zip(metrics, splits, strict=True)]
        ours += [*cost, against]
        lines.append(line([row.label, str(share.n) if share else '0', *ours, *reported]))
    return '\n'.join(lines)


def remarks(rows: Sequence[Row], cells: Cells, *, reference: Row) -> list[str]:
    """One sentence for each control that the reference is not clearly better than."""
    said = []
    for row in rows:
        ahead = difference(cells, reference, row)
        if row == reference or not row.control or ahead is None or ahead.is_clear:
            continue
        how = 'one seed says nothing' if ahead.n < 2 else f'{ahead.percent("+")} difference'
        worse = 'is worse than' if ahead.negative.is_clear else 'does not clearly beat'
        said.append(f'{reference.label} {worse} {row.label} ({how}).')
    return said


def verdict(row: Row, ahead: Mean | None) -> str:
    """The reference minus a row; marked where the row is a control and not clearly beaten."""
    if ahead is None:
        return ''
    return ahead.percent('+') + ('' if ahead.is_clear or not row.control else ' **not beaten**')


def difference(cells: Cells, one: Row, other: Row) -> Mean | None:
    """One row minus another, over the seeds of both; None where one of them has no value."""
    first, second = by_seed(cells, one, one.metric), by_seed(cells, other, other.metric)
    if not first or not second:
        return None
    pairs = [first[seed] - second[seed] for seed in first if seed in second]
    if len(pairs) < 2:
        return Mean.of(list(first.values())).minus(Mean.of(list(second.values())))
    return Mean.of(pairs)


def found(cells: Cells, row: Row, metric: str | None) -> Mean | None:
    """Over the seeds whose summary has the metric; None where none has."""
    if metric is None:
        return None
    values = list(by_seed(cells, row, metric).values())
    return Mean.of(values) if values else None


def by_seed(cells: Cells, row: Row, metric: str) -> dict[str, float]:
    """The metric of each seed whose summary has it."""
    summaries = cells.get(row.method, {})
    return {seed: summary[metric] for seed, summary in summaries.items() if summary.get(metric) is not None}


def costs(cells: Cells, row: Row) -> tuple[str, str]:
    """CPU minutes and tokens of reinforcement, on average; a row before training cost none."""
    if not row.trained:
        return '0', '0'
    minutes, tokens = (found(cells, row, name) for name in ('training_cpu_minutes', 'training_tokens'))
    return f'{minutes.mean:.1f}' if minutes else '?', counted(tokens.mean) if tokens else '?'


def counted(tokens: float) -> str:
    for size, letter in ((1e9, 'G'), (1e6, 'M'), (1e3, 'k')):
        if tokens >= size:
            return f'{tokens / size:.3g} {letter}'
    return f'{tokens:.0f}'


def text(value: Mean | None) -> str:
    return value.percent() if value else ''


def line(parts: Sequence[str]) -> str:
    return f'| {" | ".join(part.replace("|", "/") for part in parts)} |'
