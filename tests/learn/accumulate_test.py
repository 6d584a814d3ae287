"""Early backward, late step: rows that come one by one make the optimiser step that all of them make at once."""

import dataclasses
import math

import jax
import numpy as np
import pytest

from mallm.learn.accumulate import Lesson
from mallm.learn.pack import Packing, Row, constant, pack, token_count
from mallm.learn.pool import Pool
from mallm.learn.update import Knobs, importance
from tests.learn.update_test import Learner, learner, on_host, rows

KNOBS = Knobs(1.0, 0.1)


@pytest.fixture(scope='module')
def plain() -> Learner:
    """Gradient descent at rate 1 with every term of the loss on."""
    return learner(entropy_range=(0.04, 0.06), entropy_rate=1.03)


def at_once(one: Learner, some: list[Row], packing: Packing, *, rescores: bool) -> tuple[list[np.ndarray], dict]:
    pool = Pool('shared', one.copy())
    steps = pack(some, packing, 0)
    if rescores:
        steps = [[one.updater.rescored(pool.state, batch) for batch in micros] for micros in steps]
    told = pool.learn(one.updater, steps, KNOBS)
    return on_host(pool.state), told


def one_by_one(one: Learner, some: list[Row], packing: Packing, *, rescores: bool) -> tuple[list[np.ndarray], dict]:
    pool = Pool('shared', one.copy())
    lesson = Lesson(pool, one.updater, packing, KNOBS, rescores=rescores)
    for row in reversed(some):
        lesson.add([row])
    assert 0 < lesson.waiting < len(some)  # some were learned from before the last one came
    told = lesson.finish()
    return on_host(pool.state), told


@pytest.mark.parametrize(
    'divisor, rescores, count, micros',
    [(token_count, False, 7, 4), (token_count, True, 7, 4), (constant(6), False, 7, 4), (token_count, True, 10, 5)],
    ids=['tokens', 'tokens, rescored', 'constant', 'left-overs of both shapes joined'],
)
def test_rows_that_come_one_by_one_move_the_parameters_as_all_at_once(plain, divisor, rescores, count, micros):
    """With KL and entropy terms, two padded shapes, a divisor that is known only at the end, and the controller."""
    packing, some = Packing(0, 2, (4, 8), divisor), rows(count)
    assert len(pack(some, packing, 0)[0]) == micros
    whole, said = at_once(plain, some, packing, rescores=rescores)
    compiled = plain.updater.compiles
    parts, told = one_by_one(plain, some, packing, rescores=rescores)
    for this, that in zip(parts, whole, strict=True):
        np.testing.assert_allclose(this, that, atol=1e-5)
    assert max(np.abs(p - b).max() for p, b in zip(parts, on_host(plain.state), strict=True)) > 1e-3
    for name in told.keys() - {'seconds'}:
        assert told[name] == pytest.approx(said[name], rel=1e-4, abs=1e-6), name
    assert told['kl'] > 0 and told['entropy'] > 0 and told['tokens'] == sum(row.tokens for row in some)
    assert plain.updater.compiles == compiled, 'the same shapes, whoever came first'


def test_nothing_moves_before_the_last_row_is_in(plain):
    pool = Pool('shared', plain.copy())
    lesson = Lesson(pool, plain.updater, Packing(0, 2, (4, 8)), KNOBS)
    lesson.add(rows(5))
    assert all((a == b).all() for a, b in zip(on_host(pool.state), on_host(plain.state), strict=True))
    assert int(pool.state.updates) == 0
    lesson.finish()
    assert int(pool.state.updates) == 1


def test_a_lesson_without_rows_takes_no_step(plain):
    """As when every answer is left out of the loss: an optimiser with moments would move without any gradient."""
    pool = Pool('shared', plain.copy())
    assert Lesson(pool, plain.updater, Packing(0, 2), KNOBS).finish() == {'optimiser_steps': 0.0}
    assert int(pool.state.updates) == 0


def test_a_lesson_of_several_optimiser_steps_is_refused(plain):
    with pytest.raises(ValueError, match='step_groups=4: a lesson is one optimiser step; use 0'):
        Lesson(Pool('shared', plain.state), plain.updater, Packing(4, 2), KNOBS)


def test_importance_weights_are_those_of_hand_arithmetic():
    """Two trained tokens: e^(-1 - -2) = e and e^(-2 - -1) = 1 / e; their mean, and one of two above a cap of 2."""
    ((batch,),) = pack([Row((5,), ((7, 8),), ((-2.0, -1.0),), (1.0,))], Packing(0, 1), 0)
    old = np.where(batch.mask_GKS > 0, -3.0 - batch.sampler_logps_GKS, 99.0)  # what is masked may hold anything
    told = importance([[dataclasses.replace(batch, old_logps_GKS=jax.numpy.asarray(old))]], cap=2.0)
    assert told == pytest.approx({'importance': (math.e + 1 / math.e) / 2, 'importance_cut': 0.5})
    assert importance([], cap=2.0) == {}
