"""Across the border: what was sampled is trained on, each token once, in few shapes (A03, A05, A08, A12, A14)."""

from collections import Counter

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mallm.learn.pack import Packing, Row, batch_of, constant, demonstration, joined, pack, rows_of, token_count
from mallm.types import Answer, Candidate, Credited, Group, GroupKey, Prompt, Reward


def row(*lengths: int, prompt=(5, 6), advantages=None, first=10) -> Row:
    """Answers of the given lengths, all with different ids, and log-probs -0.01, -0.02, ..."""
    answers = tuple(tuple(range(first + 100 * k, first + 100 * k + n)) for k, n in enumerate(lengths))
    logps = tuple(tuple(-0.01 * (i + 1) for i in range(n)) for n in lengths)
    return Row(tuple(prompt), answers, logps, tuple(advantages or [1.0] * len(lengths)))


def unpacked(steps) -> list[Row]:
    """The rows that batches hold, read back by their lengths and masks."""
    rows = []
    for step in steps:
        for batch in step:
            for g in range(len(batch.prompts_GP)):
                counts = batch.mask_GKS[g].sum(-1).astype(int)
                if not counts.any():
                    continue
                rows.append(
                    Row(
                        tuple(batch.prompts_GP[g, : batch.lengths_G[g]].tolist()),
                        tuple(tuple(a[:n].tolist()) for a, n in zip(batch.answers_GKS[g], counts, strict=True)),
                        tuple(tuple(a[:n].tolist()) for a, n in zip(batch.sampler_logps_GKS[g], counts, strict=True)),
                        tuple(batch.advantages_GK[g].tolist()),
                        tuple(batch.temperatures_GK[g].tolist()),
                    )
                )
    return rows


def in_float32(one: Row) -> Row:
    temperatures = np.broadcast_to(np.float32(one.temperatures), len(one.answers))
    return Row(
        one.prompt, one.answers, tuple(tuple(np.float32(a).tolist()) for a in one.logps),
        tuple(np.float32(one.advantages).tolist()), tuple(temperatures.tolist()),
    )  # fmt: skip


# --- one batch


def test_the_mask_comes_from_lengths_so_that_an_end_token_equal_to_padding_is_trained_on():
    """A14 with padding 0 and end token 0: prompt [5, 0, 6], response [7, 8, 0] padded to 6."""
    one = Row((5, 0, 6), ((7, 8, 0),), ((-0.1, -0.2, -0.3),), (2.0,))
    batch = batch_of([one], (1, 4, 6), 1, 3.0)
    assert batch.answers_GKS[0, 0].tolist() == [7, 8, 0, 0, 0, 0]
    assert batch.mask_GKS[0, 0].tolist() == [1, 1, 1, 0, 0, 0]
    assert (batch.prompts_GP[0].tolist(), batch.lengths_G[0]) == ([5, 0, 6, 0], 3)


def test_a_batch_by_hand():
    rows = [row(1, 2, advantages=(0.5, -0.5)), row(2, 1, prompt=(9,), advantages=(3, 0))]
    batch = batch_of(rows, (2, 3, 2), 3, 6.0)
    assert batch.prompts_GP.tolist() == [[5, 6, 0], [9, 0, 0], [0, 0, 0]]
    assert batch.lengths_G.tolist() == [2, 1, 1]
    assert batch.answers_GKS.tolist() == [[[10, 0], [110, 111]], [[10, 11], [110, 0]], [[0, 0], [0, 0]]]
    assert batch.mask_GKS.tolist() == [[[1, 0], [1, 1]], [[1, 1], [1, 0]], [[0, 0], [0, 0]]]
    np.testing.assert_allclose(batch.sampler_logps_GKS[1], [[-0.01, -0.02], [-0.01, 0]], rtol=1e-6)
    assert batch.advantages_GK.tolist() == [[0.5, -0.5], [3, 0], [0, 0]]
    assert batch.divisor == 6


def test_no_token_of_a_prompt_has_a_weight_in_the_loss():
    """A08: weights exist for answers only, one for each of their tokens."""
    rows = [row(3, 2, prompt=range(5, 5 + n)) for n in (1, 16, 17)]
    ((*micros,),) = pack(rows, Packing(0, 1), 0)
    assert sum(micro.mask_GKS.sum() for micro in micros) == 3 * (3 + 2)
    assert {micro.mask_GKS.shape for micro in micros} == {(1, 2, 8)}


# --- steps and micro-batches


rows_of_any_shape = st.lists(
    st.builds(
        lambda lengths, prompt, first: row(*lengths, prompt=range(2, 2 + prompt), first=first),
        st.sampled_from([(1, 2), (8, 3), (9, 1), (2, 2, 2)]),
        st.integers(1, 20),
        st.integers(10, 60),
    ),
    min_size=1,
    max_size=12,
)


@settings(deadline=None)
@given(rows_of_any_shape, st.sampled_from([(0, 1), (0, 4), (4, 2), (6, 3), (2, 2)]), st.integers(0, 3))
def test_every_row_is_packed_exactly_once_whatever_the_cut(rows, cut, seed):
    """A03, A12: whole groups, exactly the ids, log-probs and advantages that went in."""
    steps = pack(rows, Packing(*cut), seed)
    assert Counter(unpacked(steps)) == Counter(map(in_float32, rows))
    assert all(len(step) <= cut[0] // cut[1] for step in steps) if cut[0] else len(steps) == 1
    for step in steps:
        groups = [micro.mask_GKS.any((1, 2)).sum() for micro in step]
        assert all(micro.prompts_GP.shape[0] == cut[1] for micro in step) and min(groups) >= 1


@settings(deadline=None)
@given(rows_of_any_shape, st.sampled_from([(0, 1), (0, 4), (4, 2), (2, 2)]))
def test_all_micro_batches_of_a_step_share_one_divisor_the_steps_own_tokens(rows, cut):
    """A05: token mean over the whole optimiser step, not over each micro-batch."""
    for step in pack(rows, Packing(*cut, divisor=token_count), 0):
        assert {float(micro.divisor) for micro in step} == {float(sum(micro.mask_GKS.sum() for micro in step))}


def test_the_constant_divisor_counts_answers_and_not_their_lengths():
    # 3 rows of 2 answers, at most 12 tokens each: 72, whatever was sampled
    for lengths in [(1, 1), (8, 2)]:
        ((*micros,),) = pack([row(*lengths)] * 3, Packing(0, 2, divisor=constant(12)), 0)
        assert {float(micro.divisor) for micro in micros} == {72.0}


def test_a_step_takes_the_groups_that_were_asked_for():
    rows = [row(2, 2, first=first) for first in range(10, 20)]
    # 10 groups, 2 in a micro-batch, 4 in a step: 2 + 2 + 1 micro-batches
    assert [len(step) for step in pack(rows, Packing(4, 2), 0)] == [2, 2, 1]
    assert [len(step) for step in pack(rows, Packing(0, 2), 0)] == [5]
    assert pack([], Packing(4, 2), 0) == []


def test_few_shapes_serve_many_lengths():
    rows = [row(answer, 1, prompt=range(2, 2 + prompt)) for answer in range(1, 17) for prompt in range(1, 33)]
    shapes = {
        micro.answers_GKS.shape + micro.prompts_GP.shape for step in pack(rows, Packing(0, 4), 0) for micro in step
    }
    assert shapes == {(4, 2, s, 4, p) for s in (8, 16) for p in (16, 32)}


def test_what_is_left_over_of_two_shapes_shares_a_micro_batch_if_it_fits_into_one():
    one = row(2, 2)
    left = lambda **groups: {SHAPES[name]: [one] * count for name, count in groups.items()}  # noqa: E731
    counts = lambda kept: {name: len(kept[shape]) for name, shape in SHAPES.items() if shape in kept}  # noqa: E731
    assert counts(joined(left(small=2, large=2), 4)) == {'large': 4}
    assert counts(joined(left(small=2, large=3), 4)) == {'small': 2, 'large': 3}  # 5 groups are two micro-batches
    assert counts(joined(left(small=1, wide=1, large=1), 4)) == {'large': 3}
    assert counts(joined(left(long=1, wide=1), 4)) == {'long': 1, 'wide': 1}  # neither holds the other
    assert counts(joined(left(small=1, eight=1), 4)) == {'small': 1, 'eight': 1}  # other K
    assert joined({}, 4) == {}


SHAPES = {'small': (2, 16, 8), 'wide': (2, 32, 8), 'long': (2, 16, 16), 'large': (2, 32, 16), 'eight': (8, 32, 16)}


def test_the_order_is_drawn_from_the_seed_and_nothing_else():
    rows = [row(2, 2, first=first) for first in range(10, 40)]
    orders = [[r.answers[0][0] for r in unpacked(pack(rows, Packing(4, 2), seed))] for seed in (1, 1, 2)]
    assert orders[0] == orders[1] != orders[2]
    assert orders[0] != sorted(orders[0])


@pytest.mark.parametrize(
    'cut, reason', [((4, 0), 'at least one group'), ((5, 2), 'make step_groups a multiple'), ((1, 2), 'multiple')]
)
def test_a_cut_that_does_not_come_out_even_is_refused(cut, reason):
    with pytest.raises(ValueError, match=reason):
        Packing(*cut)


# --- rows


def test_a_row_holds_exactly_the_ids_that_were_sampled():
    """A12: pieces he = 3, llo = 4, hello = 5. The sampler wrote [he, llo]; encoding its text would give [hello]."""
    candidates = (
        Candidate(Answer((3, 4, 1), (-0.1, -0.2, -0.3), 'hello', 'stop', 0), Reward(1, 0)),
        Candidate(Answer((5,), (-0.4,), 'hello', 'length', 0), Reward(0, 0)),
    )
    group = Group(GroupKey(0, 0, 0, 0, 'plan'), 'shared', Prompt('plan', (), (9, 9)), candidates, 0)
    (one,) = rows_of([Credited(group, (1.0, -1.0))], {'plan': (0.6,), 'tool': (1.0,)})
    wanted = Row((9, 9), ((3, 4, 1), (5,)), ((-0.1, -0.2, -0.3), (-0.4,)), (1.0, -1.0), (0.6,))
    assert one == wanted and one.tokens == 4
    ((batch,),) = pack([one], Packing(0, 1), 0)
    assert batch.answers_GKS[0, :, :3].tolist() == [[3, 4, 1], [5, 0, 0]]
    assert batch.temperatures_GK.tolist() == [[np.float32(0.6)] * 2]


def test_an_answer_without_a_log_prob_for_each_token_cannot_be_made():
    with pytest.raises(ValueError, match='3 ids but 2 log-probs'):
        Answer((1, 2, 3), (-0.1, -0.2), 'x', 'stop', 0)


def test_a_demonstration_is_a_group_of_one_with_advantage_one():
    one = demonstration(Prompt('plan', (), (4, 5)), (7, 1))
    assert (one.prompt, one.answers, one.advantages, one.tokens) == ((4, 5), ((7, 1),), (1.0,), 2)
