"""The table of controls: every method beside its floors, mean and standard error over seeds, whoever wins."""

import pytest

from experiments.sokoban_table import WARM_START_MINUTES, methods
from mallm.study.table import fill, markdown


def summary(before: float, after: float, **more: float) -> dict[str, float]:
    shares = {f'{name}_{when}{suffix}': value for name in ('success', 'strict') for suffix in ('', '_t1')
              for when, value in (('before', before), ('after', after))}  # fmt: skip
    return {'random_mover': 0.125, 'training_cpu_minutes': 4.0, **shares, **more}


def test_a_row_is_the_mean_and_standard_error_over_seeds_and_the_floors_stand_above():
    """Shares 0.5 and 0.7: mean 0.6, deviation 0.1414, standard error 0.1414 / sqrt(2) = 0.1."""
    lines = markdown({'at_grpo': {'0': summary(0.25, 0.5), '1': summary(0.25, 0.7)}}).splitlines()
    assert lines[2].startswith('| random mover | - | 12.5 ± 0.0 % |')
    assert lines[3].startswith('| warm start alone (team) | 2 | 25.0 ± 0.0 % |')
    assert lines[4] == '| at_grpo | 2 | ' + ' | '.join(['60.0 ± 10.0 %'] * 4) + ' | 4.0 |'


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
