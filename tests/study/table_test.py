"""The table of controls: every method beside its floors, mean and standard error over seeds, whoever wins."""

import dataclasses
import os
import pathlib
import signal
import subprocess
import sys
import time

import pytest

from experiments.sokoban_table import WARM_START_MINUTES, methods
from mallm.io import files
from mallm.study.table import fill, markdown
from tests.run_folders import TINY

ROOT = pathlib.Path(__file__).parents[2]


def summary(before: float, after: float, **more: float) -> dict[str, float]:
    shares = {f'{name}_{when}{suffix}': value for name in ('success', 'strict') for suffix in ('', '_t1')
              for when, value in (('before', before), ('after', after))}  # fmt: skip
    return {'random_mover': 0.125, 'training_cpu_minutes': 4.0, **shares, **more}


def test_a_row_is_the_mean_and_standard_error_over_seeds_and_the_floors_stand_above():
    """Shares 0.5 and 0.7: mean 0.6, deviation 0.1414, standard error 0.1414 / sqrt(2) = 0.1."""
    lines = markdown({'at_grpo': {'0': summary(0.25, 0.5), '1': summary(0.25, 0.7)}}).splitlines()
    assert lines[2].startswith('| random mover | - | 12.5 % |')
    assert lines[3].startswith('| warm start alone (team, shared) | 2 | 25.0 ± 0.0 % |')
    assert lines[4] == '| at_grpo | 2 | ' + ' | '.join(['60.0 ± 10.0 %'] * 4) + ' | 4.0 |'


def test_a_seed_counts_once_in_a_row_of_warm_starts_and_each_kind_of_start_has_its_own():
    """0.2 and 0.4 shared, 0.1 and 0.1 per role: four runs, but two rows of two seeds."""
    cells = {'0': summary(0.2, 0.5), '1': summary(0.4, 0.5)}
    lines = markdown({'at_grpo': cells, 'at_grpo_per_role': {seed: summary(0.1, 0.5) for seed in cells}}).splitlines()
    assert lines[3].startswith('| warm start alone (team, shared) | 2 | 30.0 ± 10.0 % |')
    assert lines[4].startswith('| warm start alone (team, per role) | 2 | 10.0 ± 0.0 % |')


def test_swapped_roles_have_a_row_of_their_own_and_one_seed_has_no_error():
    lines = markdown({'at_grpo_per_role': {'0': summary(0.2, 0.9, swapped_after=0.05)}}).splitlines()
    assert lines[-1].startswith('| at_grpo_per_role, roles swapped | 1 | 5.0 % |')


def test_every_control_has_the_same_budget_and_only_team_grpo_plays_without_a_tree():
    rows = methods(4.0)
    assert {e.cpu_minutes for e in rows.values()} == {4.0}
    assert rows['keep_cloning'].warm_start.cpu_minutes == 4.0 + WARM_START_MINUTES and rows['keep_cloning'].steps == 0
    assert [name for name, e in rows.items() if e.sampling.mode == 'parallel'] == ['team_grpo']
    assert rows['solo'].task.team == ('solo',) and rows['plan_alone'].task.team == ('plan',)
    assert len(set(rows['at_grpo_per_role'].pools.values())) == 2


def test_an_unknown_method_is_refused_before_anything_runs(tmp_path):
    with pytest.raises(ValueError, match=r"methods \['at_grpoo'\]: not in this table"):
        fill(methods(4.0), seeds=(0,), only=('at_grpoo',), runs=str(tmp_path), out=str(tmp_path / 'out'))
    assert list(tmp_path.iterdir()) == []


ENDLESS = """
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
    (tmp_path / 'parent.py').write_text(ENDLESS)
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
