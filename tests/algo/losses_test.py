"""Objectives: golden by hand arithmetic, gradient identities, and what stands in masked slots never matters (A09)."""

import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mallm.algo import losses
from mallm.algo.losses import Tokens

LOW, HIGH = 0.2, 0.28
surrogate = functools.partial(losses.clipped_surrogate, low=LOW, high=HIGH, cap=2.0)


def tokens(logp, *, old=None, sampler=None, reference=None, entropy=None, advantage=1.0, mask=1.0) -> Tokens:
    """Tokens from short lists; what is not given is on-policy, unmasked and has advantage 1."""
    logp = jnp.float32(logp)

    def full(values, default):
        return jnp.broadcast_to(jnp.float32(default if values is None else values), logp.shape)

    old = full(old, logp)
    return Tokens(
        logp, old, full(sampler, old), full(reference, logp), full(entropy, 0.0), full(advantage, 1.0), full(mask, 1.0)
    )


def in_logp(loss, like: Tokens):
    """Gradient of a loss in the policy's own log-probabilities."""
    return jax.grad(lambda logp: loss(like._replace(logp=logp)))(like.logp)


# --- the clipped surrogate


# Ratios 1.5, 1.5, 0.5, 0.5. min(ratio A, clip(ratio, 0.8, 1.28) A) is
#   min(3, 2.56) = 2.56    min(-3, -2.56) = -3    min(1, 1.6) = 1    min(-1, -1.6) = -1.6
FOUR = tokens(np.log([1.5, 1.5, 0.5, 0.5]) - 1.0, old=-1.0, advantage=[2, -2, 2, -2])


def test_the_clipped_surrogate_by_hand():
    loss, sums = surrogate(FOUR)
    assert loss == pytest.approx(-(2.56 - 3 + 1 - 1.6), abs=1e-5)
    assert sums['ratio'] == pytest.approx(4.0, abs=1e-5)
    assert sums['clip_share'] == 2  # the first and the last are cut
    assert sums['ppo_kl'] == pytest.approx(-2 * math.log(1.5) - 2 * math.log(0.5), abs=1e-5)


def test_a_clipped_token_has_no_gradient_and_the_others_have_ratio_times_advantage():
    gradient = in_logp(lambda t: surrogate(t)[0], FOUR)
    # d/dlogp of -ratio A is -ratio A: 3 and -1 where the unclipped side is the smaller
    assert gradient == pytest.approx([0, 3, -1, 0], abs=1e-5)


def test_the_clip_is_asymmetric():
    """Up to 1.28 a good answer still gains; down to 0.8 a bad one still loses; beyond, nothing more."""
    for ratio, advantage, moves in [(1.27, 1, True), (1.29, 1, False), (0.81, -1, True), (0.79, -1, False)]:
        one = tokens([math.log(ratio)], old=0.0, advantage=advantage)
        assert bool(in_logp(lambda t: surrogate(t)[0], one)[0] != 0) is moves


def test_at_equal_policies_the_gradient_is_that_of_reinforce():
    """On-policy, ratio 1: both push A grad log pi, through the logits of a real softmax."""
    logits_SV = jax.random.normal(jax.random.key(0), (5, 7))
    ids_S, advantage_S = jnp.arange(5), jnp.float32([1.5, -0.5, 0, 2, -1])

    def gradient(objective):
        def loss(logits):
            logp, entropy = losses.token_statistics(logits, ids_S, jnp.ones(5))
            old = jax.lax.stop_gradient(logp)
            return objective(Tokens(logp, old, old, old, entropy, advantage_S, jnp.ones(5)))[0]

        return jax.grad(loss)(logits_SV)

    assert np.abs(gradient(losses.reinforce)).max() > 0.1
    np.testing.assert_allclose(gradient(surrogate), gradient(losses.reinforce), atol=1e-6)


def test_reinforce_by_hand():
    loss, sums = losses.reinforce(tokens([-1, -2, -3], advantage=[1, -1, 5], mask=[1, 1, 0]))
    assert (loss, sums) == (1 - 2, {})  # -(1 * -1 + -1 * -2)


def test_importance_weights_are_capped_and_carry_no_gradient():
    # pi_old / pi_sampler = 3, capped at 2; = 1/2, kept. Ratio 1, advantage 1: loss -(2 + 0.5)
    two = tokens([-1, -1], old=-1.0, sampler=[-1 - math.log(3), -1 + math.log(2)])
    assert surrogate(two)[0] == pytest.approx(-2.5, abs=1e-5)
    assert in_logp(lambda t: surrogate(t)[0], two) == pytest.approx([-2, -0.5], abs=1e-5)
    in_old = jax.grad(lambda old: surrogate(two._replace(old_logp=old, logp=old))[0])(two.old_logp)
    # along logp = old the ratio stays 1, and the weight must count as a constant
    assert in_old == pytest.approx([0, 0], abs=1e-5)


def test_with_the_samplers_own_log_probs_as_old_ones_every_weight_is_one():
    assert surrogate(tokens([-9, -1], old=[-9, -1], advantage=[1, 2]))[0] == pytest.approx(-3)


def test_arrays_of_different_shapes_are_refused():
    one = tokens([-1, -2])
    for objective in (surrogate, losses.reinforce):
        with pytest.raises(AssertionError):
            objective(one._replace(advantage=jnp.ones((1,))))


# --- KL


def test_k3_by_hand():
    # reference 1/2, policy 1/4: q = 2, so 2 - 1 - log 2; equal: 0
    two = tokens([math.log(0.25), -3], reference=[math.log(0.5), -3])
    assert losses.kl_k3(two) == pytest.approx(1 - math.log(2), abs=1e-6)
    # d/dlogp (q - 1 - log q) = 1 - q
    assert in_logp(losses.kl_k3, two) == pytest.approx([-1, 0], abs=1e-6)


@settings(deadline=None)
@given(st.lists(st.tuples(st.floats(-15, 0), st.floats(-15, 0)), min_size=3, max_size=3))
def test_k3_is_never_negative_and_pulls_towards_the_reference(pairs):
    logp, reference = zip(*pairs, strict=True)
    three = tokens(logp, reference=reference)
    for i in range(3):
        one = three._replace(mask=jnp.zeros(3).at[i].set(1))
        assert losses.kl_k3(one) >= -1e-6
    gradient = np.asarray(in_logp(losses.kl_k3, three))
    difference = np.float32(logp) - np.float32(reference)
    assert (gradient[np.abs(difference) > 1e-3] * difference[np.abs(difference) > 1e-3] > 0).all()


def test_k3_is_zero_where_there_is_no_reference():
    same = tokens([-1, -2, -30])
    assert losses.kl_k3(same) == 0
    assert not in_logp(lambda t: losses.kl_k3(t._replace(reference_logp=jax.lax.stop_gradient(t.logp))), same).any()


# --- masked slots


FIELDS = ('logp', 'old_logp', 'sampler_logp', 'reference_logp', 'entropy', 'advantage')
POISON = (200.0, -200.0, math.inf, -math.inf, math.nan)


@jax.jit
def everything(t: Tokens):
    """All that an update sums up (loss, KL, entropy, metrics) and the gradient of the whole in every field."""

    def total(t):
        policy, sums = surrogate(t)
        plain, _ = losses.reinforce(t)
        kl, entropy = losses.kl_k3(t), losses.masked(t.entropy, t.mask).sum()
        return policy + plain + 0.1 * kl - 0.05 * entropy, sums | {'kl': kl, 'entropy': entropy}

    return jax.value_and_grad(total, has_aux=True)(t)


@pytest.mark.parametrize('field', FIELDS)
@pytest.mark.parametrize('value', POISON)
def test_whatever_stands_in_a_masked_slot_loss_and_gradient_are_as_if_it_were_zero(field, value):
    """A09: 3 tokens, mask [1, 1, 0]; the third holds a number that exp or a product would turn into inf or NaN."""
    clean = tokens(
        [-1.0, -2.0, 0], old=[-1.1, -1.5, 0], sampler=[-1.2, -1.6, 0], reference=[-0.9, -2.5, 0],
        entropy=[0.5, 0.7, 0], advantage=[1, -2, 0], mask=[1, 1, 0],
    )  # fmt: skip
    poisoned = clean._replace(**{field: getattr(clean, field).at[2].set(value)})
    (loss, sums), gradient = everything(poisoned)
    (wanted_loss, wanted_sums), wanted = everything(clean)
    assert math.isfinite(loss) and loss == wanted_loss and sums == wanted_sums
    for name in FIELDS:
        assert getattr(gradient, name)[:2].tolist() == getattr(wanted, name)[:2].tolist(), name
        assert getattr(gradient, name)[2] == 0, name


def test_a_masked_log_ratio_of_200_leaves_no_trace():
    """A09 in its own numbers: log ratios [0, 0, 200]."""
    three = tokens([-1, -1, 199], old=-1.0, mask=[1, 1, 0])
    loss, sums = surrogate(three)
    assert loss == -2 and sums['ratio'] == 2
    assert in_logp(lambda t: surrogate(t)[0], three).tolist() == [-1, -1, 0]


# --- log-probabilities


def test_a_log_prob_is_taken_at_the_temperature_of_sampling():
    """A10: logits [2, 1, 0], token 0."""
    logits = jnp.float32([[2, 1, 0]] * 2)
    logp, _ = losses.token_statistics(logits, jnp.int32([0, 0]), jnp.float32([1.0, 0.5]))
    # T = 1: 2 - log(e^2 + e + 1); T = 0.5: 4 - log(e^4 + e^2 + 1)
    assert logp == pytest.approx([-0.4076, -0.1429], abs=1e-4)


def test_entropy_by_hand():
    # uniform over 4: log 4; logits [log 3, 0]: 3/4 and 1/4; at T = 1/2 they are 9/10 and 1/10
    uniform = losses.token_statistics(jnp.zeros((1, 4)), jnp.int32([2]), jnp.ones(1))
    assert uniform[1] == pytest.approx([math.log(4)], abs=1e-6)
    logits = jnp.float32([[math.log(3), 0]] * 2)
    _, entropy = losses.token_statistics(logits, jnp.int32([0, 1]), jnp.float32([1.0, 0.5]))
    by_hand = [-sum(p * math.log(p) for p in pair) for pair in [(0.75, 0.25), (0.9, 0.1)]]
    assert entropy == pytest.approx(by_hand, abs=1e-6)


def test_bfloat16_logits_are_normalised_in_float32_and_never_give_a_positive_log_prob():
    """A11: one logit 20 and seven 0; log p = -log(1 + 7 e^-20)."""
    logits = jnp.zeros((1, 8), jnp.bfloat16).at[0, 3].set(20)
    logp, entropy = losses.token_statistics(logits, jnp.int32([3]), jnp.ones(1))
    assert logp.dtype == entropy.dtype == jnp.float32
    assert logp[0] <= 0 and logp[0] == pytest.approx(-math.log1p(7 * math.exp(-20)), abs=1e-6)
    other, _ = losses.token_statistics(logits, jnp.int32([0]), jnp.ones(1))
    assert other[0] == pytest.approx(-20, abs=2e-3)


@settings(deadline=None)
@given(st.lists(st.floats(-80, 80), min_size=4, max_size=4), st.sampled_from([0.3, 1.0, 2.0]))
def test_log_probs_are_never_positive_and_sum_to_one(logits, temperature):
    rows = jnp.broadcast_to(jnp.float32(logits)[None], (4, 4))
    logp, entropy = losses.token_statistics(rows, jnp.arange(4), jnp.full(4, temperature))
    assert (logp <= 0).all() and jnp.exp(logp).sum() == pytest.approx(1, abs=1e-5)
    assert (entropy >= -1e-6).all() and (entropy <= math.log(4) + 1e-5).all()


# --- the head in chunks

GROUPS, PLACES, WIDTH, WORDS = 3, 7, 4, 11
TRAINED_GN = np.array([[1, 1, 0, 0, 0, 0, 0], [0, 1, 0, 1, 1, 0, 1], [0] * 7], np.float32)


def head_case():
    draw = np.random.default_rng(5)
    hidden = jnp.float32(draw.normal(size=(GROUPS, PLACES, WIDTH)))
    matrix = jnp.float32(3 * draw.normal(size=(WIDTH, WORDS)))
    ids = jnp.int32(draw.integers(0, WORDS, (GROUPS, PLACES)))
    return hidden, matrix, ids, jnp.float32(draw.uniform(0.5, 2, (GROUPS, PLACES)))


@pytest.mark.parametrize('chunk', [1, 3, 7])
def test_scoring_in_chunks_gives_the_statistics_of_trained_tokens_and_their_gradient(chunk):
    """Chunks of 3 neither divide the 7 places nor hold all trained ones; the last group has none."""
    hidden, matrix, ids, temperature = head_case()

    def total(statistics):
        def weighed(hidden, matrix):
            logp, entropy = statistics(hidden, matrix)
            return (losses.masked(logp + 0.3 * entropy * logp, TRAINED_GN)).sum(), (logp, entropy)

        return jax.jit(jax.value_and_grad(weighed, argnums=(0, 1), has_aux=True))(hidden, matrix)

    (_, wanted), wanted_grads = total(lambda h, m: losses.token_statistics(h @ m, ids, temperature))
    (_, found), grads = total(
        lambda h, m: losses.chunked_token_statistics(
            lambda part: part @ m, h, ids, temperature, TRAINED_GN, chunk=chunk
        )
    )
    for one, other in zip(found, wanted, strict=True):
        np.testing.assert_allclose(one, np.where(TRAINED_GN, other, 0), atol=1e-5)
    for one, other in zip(grads, wanted_grads, strict=True):
        np.testing.assert_allclose(one, other, atol=1e-5)


def test_the_head_is_run_on_no_more_chunks_than_the_trained_tokens_of_a_group_fill():
    """At most 4 of 7 places of a group are trained: 2 chunks of 2 are scored, the other 2 are left out."""
    hidden, matrix, ids, temperature = head_case()
    ran = []

    def head(part):
        jax.debug.callback(lambda: ran.append(1))
        return part @ matrix

    scored = losses.chunked_token_statistics(head, hidden, ids, temperature, jnp.asarray(TRAINED_GN), chunk=2)
    jax.block_until_ready(scored)
    jax.effects_barrier()
    assert len(ran) == 2
