"""The table of controls: every method beside its floors, mean and standard error over seeds, whoever wins."""

import dataclasses
import os
import pathlib
import re
import signal
import subprocess
import sys
import time

import pytest

from experiments.sokoban_table import WARM_START_MINUTES, markdown, methods
from experiments.suite import ENDLESS
from mallm.io import files
from mallm.study.comparison import Mean
from mallm.study.table import fill
from tests.run_folders import TINY

ROOT = pathlib.Path(__file__).parents[2]


def test_the_stored_table_is_what_its_cells_tell_and_names_every_control_that_is_not_beaten():
    stored = ROOT / 'experiments/results/sokoban_table.json'
    told = stored.with_suffix('.md').read_text()
    assert told == markdown(files.read_json(stored))
    assert 'AT-GRPO, shared policy does not clearly beat `solo`' in told


@pytest.mark.parametrize('stored, heading', [('sokoban_table', '| 6 CPU minutes'), ('paper_table', '| | held-out')])
def test_readme_shows_the_numbers_of_the_stored_tables(stored, heading):
    told = (ROOT / f'experiments/results/{stored}.md').read_text()
    (table,) = [part for part in (ROOT / 'README.md').read_text().split('\n\n') if part.startswith(heading)]
    shown = re.findall(r'\d+\.\d ± \d+\.\d %|\d+ k', table)
    assert len(shown) > 15 and [number for number in shown if number not in told] == []


def test_readme_shows_the_numbers_of_the_main_job():
    ran = [files.read_json(ROOT / f'experiments/results/sokoban_at_grpo-seed{seed}/summary.json') for seed in range(3)]
    (table,) = [part for part in (ROOT / 'README.md').read_text().split('\n\n') if part.startswith('| what (mean')]
    for metric in ('success_before', 'strict_before', 'success_after', 'strict_after'):
        assert f'| {Mean.of([summary[metric] for summary in ran]).percent()} |' in table, metric


def test_every_control_has_the_same_budget_and_only_team_grpo_plays_without_a_tree():
    rows = methods(4.0)
    assert {e.cpu_minutes for e in rows.values()} == {4.0}
    assert {e.steps for name, e in rows.items() if name != 'keep_cloning'} == {ENDLESS}, 'time ends them, not steps'
    assert rows['keep_cloning'].warm_start.cpu_minutes == 4.0 + WARM_START_MINUTES and rows['keep_cloning'].steps == 0
    assert [name for name, e in rows.items() if e.sampling.mode == 'parallel'] == ['team_grpo']
    assert rows['solo'].task.team == ('solo',) and rows['plan_alone'].task.team == ('plan',)
    assert len(set(rows['at_grpo_per_role'].pools.values())) == 2


def test_an_unknown_method_is_refused_before_anything_runs(tmp_path):
    with pytest.raises(ValueError, match=r"methods \['at_grpoo'\]: not in this table"):
        fill(methods(4.0), seeds=(0,), only=('at_grpoo',), runs=str(tmp_path), out=str(tmp_path / 'out'), tell=markdown)
    assert list(tmp_path.iterdir()) == []


PARENT = """
from mallm.study.table import run_apart
from tests.study.table_test import endless
import sys
if __name__ == '__main__':
    run_apart(endless(sys.argv[1]))
"""


def endless(runs: str):
    return dataclasses.replace(
        TINY, runs=runs, steps=10**6, evaluation=dataclasses.replace(TINY.evaluation, every=10**5)
    )


def test_a_cell_that_trains_ends_with_the_process_that_asked_for_it_even_if_that_is_killed(tmp_path):
    (tmp_path / 'parent.py').write_text(PARENT)
    command = [sys.executable, str(tmp_path / 'parent.py'), str(tmp_path / 'runs')]
    with subprocess.Popen(command, env=os.environ | {'PYTHONPATH': str(ROOT)}, stdout=subprocess.DEVNULL) as parent:
        metrics = tmp_path / 'runs' / endless('').folder_name / files.METRICS
        until(lambda: metrics.exists() and '"rollout"' in metrics.read_text(), 240)
        parent.send_signal(signal.SIGKILL)
    size = lambda: metrics.stat().st_size  # noqa: E731
    until(lambda: stands_still(size), 60)


def until(holds, seconds: float) -> None:
    end = time.monotonic() + seconds
    while not holds():
        assert time.monotonic() < end
        time.sleep(0.1)


def stands_still(size) -> bool:
    before = size()
    time.sleep(2)
    return size() == before
