"""Who learns when, and who plays whom."""

import pytest

from mallm.algo import schedule


def test_every_role_learns_at_every_step():
    assert [schedule.every_role(step, ('a', 'b')) for step in (0, 1, 99)] == [('a', 'b')] * 3


def test_rotation_gives_each_role_its_period_in_turn():
    rotate = schedule.rotate(2)
    learning = [rotate(step, ('a', 'b', 'c')) for step in range(8)]
    assert learning == [('a',), ('a',), ('b',), ('b',), ('c',), ('c',), ('a',), ('a',)]


def test_a_rotation_without_a_period_is_refused():
    with pytest.raises(ValueError, match='period=0: a role must learn for at least one step'):
        schedule.rotate(0)


def test_each_role_is_played_by_the_pool_that_trains_it():
    pools = {'tool': 'left', 'plan': 'right'}
    assert schedule.current(7, pools) == pools
