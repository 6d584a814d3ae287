"""Tables that compare: means and errors by hand, costs, the paper's column, a plain word where nothing is beaten."""

import math

import pytest

from mallm.study.comparison import Mean, Row, counted, difference, remarks, table

OURS = Row('ours', 'ours', paper='ours', control=False)
WEAK, STRONG, BEFORE = Row('weak', 'weak'), Row('strong', 'strong'), Row('untrained', 'ours', 'success_before')
ABSENT = Row('prompted', 'nobody', paper='prompted')


def seeds(*shares: float, **more: float) -> dict[str, dict[str, float]]:
    return {
        str(seed): {'success_after': share, 'strict_after': share / 2, 'success_before': 0.1, 'strict_before': 0.0,
                    'training_cpu_minutes': 10.0, 'training_tokens': 2_500_000, **more}
        for seed, share in enumerate(shares)
    }  # fmt: skip


CELLS = {'ours': seeds(0.7, 0.9), 'weak': seeds(0.2, 0.4), 'strong': seeds(0.7, 0.8)}


def test_mean_and_error_are_over_seeds_and_one_seed_has_no_error():
    """0.7 and 0.9: deviation 0.1414, error 0.1. As independent samples, 0.2 and 0.4 are 0.5 ± sqrt(0.1² + 0.1²) = 0.141
    below: 3.5 errors, and one degree of freedom needs 12.7."""
    ours, weak, one = Mean.of([0.7, 0.9]), Mean.of([0.2, 0.4]), Mean.of([0.7])
    assert (ours.mean, ours.error, ours.n) == (pytest.approx(0.8), pytest.approx(0.1), 2)
    assert ours.minus(weak).percent('+') == '+50.0 ± 14.1 %' and not ours.minus(weak).is_clear
    assert Mean(0.44, 0.1, 3).is_clear and not Mean(0.42, 0.1, 3).is_clear, 'two degrees of freedom need 4.303'
    assert Mean(0.23, 0.1, 99).is_clear and not Mean(0.22, 0.1, 99).is_clear
    assert math.isnan(one.error) and one.percent() == '70.0 %' and not one.minus(weak).is_clear


def test_a_difference_is_taken_seed_by_seed_where_both_have_the_seeds():
    """0.7 - 0.2 and 0.9 - 0.4 are both 0.5: the seeds explain all spread. Seed 2, which one lacks, is left out."""
    more = {'ours': seeds(0.7, 0.9, 0.1), 'weak': seeds(0.2, 0.4)}
    paired = difference(more, OURS, WEAK)
    assert (paired.mean, paired.error, paired.n) == (pytest.approx(0.5), pytest.approx(0.0), 2) and paired.is_clear
    others = {'ours': seeds(0.7, 0.9), 'weak': {'7': {'success_after': 0.2}, '8': {'success_after': 0.4}}}
    assert difference(others, OURS, WEAK).percent('+') == '+50.0 ± 14.1 %'
    assert difference({'ours': seeds(0.7)}, OURS, WEAK) is None


def test_a_row_has_its_seeds_shares_cost_and_difference_and_what_the_paper_reports():
    told = table(
        [WEAK, STRONG, BEFORE, OURS, ABSENT], CELLS, reference=OURS,
        paper={'paper': {'ours': 96.5, 'prompted': 5.0, 'weak': None}},
    ).splitlines()  # fmt: skip
    assert told[0] == '| method | n | held-out | strict | RL CPU min | RL tokens | ours minus this | paper |'
    assert told[2] == '| weak | 2 | 30.0 ± 10.0 % | 15.0 ± 5.0 % | 10.0 | 2.5 M | +50.0 ± 0.0 % |  |'
    assert told[3] == '| strong | 2 | 75.0 ± 5.0 % | 37.5 ± 2.5 % | 10.0 | 2.5 M | +5.0 ± 5.0 % **not beaten** |  |'
    assert told[4] == '| untrained | 2 | 10.0 ± 0.0 % | 0.0 ± 0.0 % | 0 | 0 | +70.0 ± 10.0 % **not beaten** |  |'
    assert told[5] == '| ours | 2 | 80.0 ± 10.0 % | 40.0 ± 5.0 % | 10.0 | 2.5 M | reference | 96.5 % |'
    assert told[6] == '| prompted | 0 |  |  |  |  |  | 5 % |'


def test_shares_at_temperature_1_stand_beside_the_greedy_ones_and_a_floor_costs_nothing():
    cells = {'ours': seeds(0.7, 0.9, success_after_t1=0.6, strict_after_t1=0.25, random_mover=0.125)}
    told = table([Row('floor', 'ours', 'random_mover'), OURS], cells, reference=OURS, sampled=True).splitlines()
    assert told[0].startswith('| method | n | held-out | held-out, T=1 | strict | strict, T=1 | RL CPU min |')
    assert told[2] == '| floor | 2 | 12.5 ± 0.0 % |  |  |  | 0 | 0 | +67.5 ± 10.0 % **not beaten** |'
    assert told[3].startswith('| ours | 2 | 80.0 ± 10.0 % | 60.0 ± 0.0 % | 40.0 ± 5.0 % | 25.0 ± 0.0 % | 10.0 |')


def test_every_control_that_is_not_clearly_beaten_is_named_under_the_table():
    assert remarks([WEAK, STRONG, BEFORE, OURS], CELLS, reference=OURS) == [
        'ours does not clearly beat strong (+5.0 ± 5.0 % difference).',
        'ours does not clearly beat untrained (+70.0 ± 10.0 % difference).',
    ], 'two seeds need 12.7 standard errors'
    worse = {**CELLS, 'strong': seeds(0.99, 0.99), 'ours': seeds(0.5, 0.5)}
    assert remarks([STRONG], worse, reference=OURS) == ['ours is worse than strong (-49.0 ± 0.0 % difference).']
    single = {'ours': seeds(0.9), 'weak': seeds(0.1)}
    assert remarks([WEAK], single, reference=OURS) == ['ours does not clearly beat weak (one seed says nothing).']


def test_a_summary_from_before_tokens_were_counted_leaves_a_question_mark():
    old = {'ours': {'0': {'success_after': 0.5, 'training_cpu_minutes': 3.0}}}
    (row,) = table([OURS], old, reference=OURS, paper={}).splitlines()[2:]
    assert row == '| ours | 1 | 50.0 % |  | 3.0 | ? | reference |'


@pytest.mark.parametrize(
    'tokens, shown', [(0, '0'), (999, '999'), (1500, '1.5 k'), (2.5e6, '2.5 M'), (3.21e9, '3.21 G')]
)
def test_tokens_are_written_short(tokens, shown):
    assert counted(tokens) == shown
