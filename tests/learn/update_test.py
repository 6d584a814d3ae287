"""The update: free of how a step is cut and where it runs, fatal when it is not finite, and it moves what it should.

Most tests use plain gradient descent at rate 1, so that parameters before minus after ARE the gradient.
"""

import dataclasses
import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import linen as nn

from mallm.algo import credit, losses
from mallm.learn.pack import Batch, Packing, Row, constant, finished_answers, pack, rows_of, token_count
from mallm.learn.pool import NonFiniteUpdateError, Pool
from mallm.learn.route import answer_metrics, dead_shares, route
from mallm.learn.state import LearnerState, make_state, optimiser, with_reference
from mallm.learn.update import Accumulated, Knobs, Updater, chunk_of, make_gradients, token_arrays
from mallm.models.config import Architecture
from mallm.models.sharding import make_mesh
from mallm.models.transformer import Transformer
from mallm.types import Answer, Candidate, Credited, Group, GroupKey, Prompt, Reward, Trajectory, Turn

MODULE = Transformer(Architecture(vocab=16, width=16, layers=1, heads=2, kv_heads=2, head_dim=8, ffn=32))
SURROGATE = functools.partial(losses.clipped_surrogate, low=0.2, high=0.28, cap=2.0)
STILL = Knobs(learning_rate=0.0)
SCORED = jax.jit(lambda params, batch: token_arrays(MODULE, params, None, batch))


class Learner(NamedTuple):
    """A state, what it was born with on the host, and its updater."""

    state: LearnerState
    updater: Updater

    def copy(self) -> LearnerState:
        """The state in buffers of its own, because an update takes those of the state it is given."""
        return jax.tree.map(jnp.copy, self.state)


def learner(
    mesh=(1, 1, 1), objective=SURROGATE, transform=None, *, keeps_reference=True, entropy=0.05, **more
) -> Learner:
    transform = transform or optax.identity()
    mesh = make_mesh(*mesh)
    state, shardings = make_state(
        jax.random.key(0), module=MODULE, transform=transform, mesh=mesh, entropy_coefficient=entropy,
        keeps_reference=keeps_reference,
    )  # fmt: skip
    if keeps_reference:  # another policy, so that the KL term has something to do
        state = state.replace(reference=jax.tree.map(lambda p: p * 0.5, state.params))
    updater = Updater(module=MODULE, objective=objective, transform=transform, mesh=mesh, shardings=shardings, **more)
    return Learner(state, updater)


def rows(count: int, seed: int = 0) -> list[Row]:
    """Groups of two answers with 1 to 6 tokens, off-policy log-probs, advantages of both signs."""
    draw = np.random.default_rng(seed)
    made = []
    for _ in range(count):
        lengths = draw.integers(1, 7, 2)
        made.append(
            Row(
                tuple(draw.integers(0, 16, draw.integers(2, 9)).tolist()),
                tuple(tuple(draw.integers(0, 16, n).tolist()) for n in lengths),
                tuple(tuple(draw.uniform(-4, -2, n).tolist()) for n in lengths),
                tuple(draw.normal(size=2).tolist()),
                0.7,
            )
        )
    return made


def one_step(some, size: int, divisor=token_count) -> list[Batch]:
    """All rows as one optimiser step of micro-batches with `size` groups."""
    (micros,) = pack(some, Packing(0, size, divisor=divisor), 0)
    return micros


def on_host(tree) -> list[np.ndarray]:
    """Copies: a view into a buffer would keep it from being donated."""
    return [np.array(leaf) for leaf in jax.tree.leaves(tree)]


def gradient(one: Learner, micros, kl: float = 0.1) -> tuple[list[np.ndarray], dict[str, float]]:
    """The gradient that an update follows, and its metrics."""
    before = on_host(one.state.params)
    after, metrics = one.updater(one.copy(), micros, Knobs(1.0, kl))
    moved = [b - a for b, a in zip(before, on_host(after.params), strict=True)]
    assert max(np.abs(m).max() for m in moved) > 1e-3
    return moved, {name: float(value) for name, value in metrics.items()}


def same(these, those, atol: float = 1e-5) -> None:
    for this, that in zip(these, those, strict=True):
        np.testing.assert_allclose(this, that, atol=atol)


@pytest.fixture(scope='module')
def plain() -> Learner:
    """Gradient descent with every term of the loss on."""
    return learner(entropy_range=(0.04, 0.06), entropy_rate=1.03)


@pytest.fixture(scope='module')
def adam() -> Learner:
    transform = optimiser(clip=1.0, b1=0.9, b2=0.98, weight_decay=0.0)
    return learner(objective=losses.reinforce, transform=transform, entropy=0.0)


# --- independent of the cut (A05)


def test_the_gradient_is_the_same_for_one_two_and_four_micro_batches(plain):
    """4 and then 5 groups, so that one cut has a padding group, with KL and entropy terms on."""
    for count in (4, 5):
        cuts = [gradient(plain, one_step(rows(count), size)) for size in (4, 2, 1)]
        for moved, metrics in cuts[1:]:
            same(moved, cuts[0][0])
            assert metrics == pytest.approx(cuts[0][1], rel=1e-4)
        assert cuts[0][1]['kl'] > 0 and cuts[0][1]['entropy'] > 0


def test_the_loss_of_two_unequal_micro_batches_is_the_token_mean():
    """A05: 2 tokens of loss 1.0 and 6 tokens of loss 0.0 are 2 / 8 = 0.25, not the mean 0.5 of both means."""
    one = learner(objective=lambda t: ((t.advantage * t.mask).sum(), {}), keeps_reference=False, entropy=0.0)
    two, six = [Row((5, 6), ((7,) * n, (8,) * n), ((-1.0,) * n,) * 2, (a, a)) for n, a in [(1, 1.0), (3, 0.0)]]
    (micros,) = pack([two, six], Packing(0, 1), 0)
    assert sorted(float(micro.mask_GKS.sum()) for micro in micros) == [2, 6]
    _, metrics = one.updater(one.state, micros, STILL)
    assert metrics['loss'] == pytest.approx(0.25) and metrics['tokens'] == 8


def test_a_constant_divisor_only_scales_the_gradient(plain):
    some = rows(4)
    tokens = sum(row.tokens for row in some)
    by_tokens, _ = gradient(plain, one_step(some, 4))
    by_constant, _ = gradient(plain, one_step(some, 4, constant(6)))
    # 4 rows x 2 answers x 6 = 48 instead of the tokens there are
    same([m * tokens / 48 for m in by_tokens], by_constant)


# --- independent of the devices (A05)


@pytest.mark.parametrize('shape', [(2, 1, 1), (1, 2, 2), (2, 2, 2)])
def test_loss_and_gradient_are_the_same_on_a_mesh_of(shape, plain):
    spread = learner(shape)
    same(on_host(spread.state.params), on_host(plain.state.params), 1e-6)
    leaf = spread.state.params['embedding']
    assert len(leaf.sharding.device_set) == np.prod(shape)
    assert leaf.addressable_shards[0].data.size * shape[1] * shape[2] == leaf.size
    wanted, wanted_metrics = gradient(plain, one_step(rows(4), 4))
    moved, metrics = gradient(spread, one_step(rows(4), 4))
    same(moved, wanted)
    assert metrics == pytest.approx(wanted_metrics, rel=1e-4)


# --- logits in chunks


def wide_case(room: int, vocab: int = 49_152):
    """The gradient of one micro-batch under a vocabulary like a real model's, compiled, and what to call it with."""
    module = Transformer(Architecture(vocab, width=8, layers=1, heads=2, kv_heads=1, head_dim=4, ffn=8))
    params = nn.unbox(jax.jit(module.init)(jax.random.key(0), jnp.zeros((1, 2), jnp.int32))['params'])
    state = LearnerState(jnp.int32(0), params, None, jnp.float32(0.05), None)
    names = ('ratio', 'clip_share', 'ppo_kl', 'entropy', 'kl', 'tokens', 'loss')
    zeros = Accumulated(jax.tree.map(jnp.zeros_like, params), dict.fromkeys(names, jnp.float32(0)))
    given = (zeros, state, one_step(rows(8), 8)[0], Knobs(*map(jnp.float32, Knobs(1.0))), None)
    return jax.jit(make_gradients(module, SURROGATE, room)).lower(*given).compile(), given


def test_chunks_bound_the_memory_of_the_loss_and_change_nothing_else():
    """8 groups x 2 answers x 8 tokens x 49152 ids are 25 MB of float32 logits, of which the backward pass keeps some
    three at once; a room of 2 MiB leaves the gradients of the head."""
    (whole, given), (cut, _) = wide_case(1 << 30), wide_case(2 << 20)
    logits = 8 * 2 * 8 * 49_152 * 4
    assert whole.memory_analysis().temp_size_in_bytes > 2 * logits
    assert cut.memory_analysis().temp_size_in_bytes < 0.5 * logits
    wanted, found = whole(*given), cut(*given)
    same(on_host(found.gradients), on_host(wanted.gradients))
    assert {k: float(v) for k, v in found.sums.items()} == pytest.approx(
        {k: float(v) for k, v in wanted.sums.items()}, rel=1e-4
    )


def test_logits_that_fit_are_computed_at_once_and_others_in_even_chunks():
    """G = 2, V = 100: a position of both groups takes 800 bytes. K * S = 12: 12 fit in 9600 bytes; 5 make 3 of 4."""
    assert chunk_of((2, 3, 4), 100, 9600) is None
    assert chunk_of((2, 3, 4), 100, 9599) == 6
    assert chunk_of((2, 3, 4), 100, 4000) == 4
    assert chunk_of((2, 3, 4), 100, 10) == 1


@pytest.mark.parametrize('shape', [(4, 1, 1), (1, 2, 2)])
def test_the_loss_in_chunks_is_the_same_on_a_mesh_of(shape, plain):
    wanted, wanted_metrics = gradient(plain, one_step(rows(4), 4))
    parts = int(np.prod(shape))
    chunked = learner(shape, logits_room=4 * 4 * 16 * 3 // parts)
    moved, metrics = gradient(chunked, one_step(rows(4), 4))
    same(moved, wanted)
    assert metrics == pytest.approx(wanted_metrics, rel=1e-4)


# --- compiled once for each shape


def test_nothing_is_compiled_again_for_a_shape_that_was_seen(plain):
    state = plain.copy()
    for size in (4, 2, 1):
        state, _ = plain.updater(state, one_step(rows(4), size), STILL)
    known = plain.updater.compiles
    for seed in range(1, 4):
        for size in (4, 2, 1):
            knobs = Knobs(1e-3 * seed, kl=0.2 * seed, entropy_target=0.1 * seed)
            state, _ = plain.updater(state, one_step(rows(3, seed), size), knobs)
    assert plain.updater.compiles == known <= 3


# --- the entropy controller


@pytest.mark.parametrize(
    'coefficient, target, wanted',
    [
        (0.05, 99.0, 0.05 * 1.03),  # entropy is below any such target: a larger bonus
        (0.05, 0.0, 0.05 / 1.03),  # above: a smaller one
        (0.05, -1.0, 0.05),  # no target
        (0.06, 99.0, 0.06),  # at the upper bound
        (0.04, 0.0, 0.04),  # at the lower bound
        (0.09, -1.0, 0.09),  # no target, no bounds
    ],
)
def test_the_entropy_bonus_is_steered_towards_its_target(plain, coefficient, target, wanted):
    state = plain.copy().replace(entropy_coefficient=jnp.float32(coefficient))
    after, metrics = plain.updater(state, one_step(rows(4), 4), Knobs(0.0, entropy_target=target))
    assert after.entropy_coefficient == pytest.approx(wanted, rel=1e-5)
    assert metrics['entropy_coefficient'] == pytest.approx(wanted, rel=1e-5)


def test_without_exploration_the_entropy_bonus_is_as_if_its_weight_were_zero(plain):
    some = one_step(rows(4), 4)
    bare = plain.copy().replace(entropy_coefficient=jnp.float32(0.0))
    cloned, _ = plain.updater(plain.copy(), some, Knobs(1.0, exploration=0.0))
    without, _ = plain.updater(bare, some, Knobs(1.0))
    bonus, _ = plain.updater(plain.copy(), some, Knobs(1.0))
    same(on_host(cloned.params), on_host(without.params), 1e-6)
    assert max(np.abs(a - b).max() for a, b in zip(on_host(bonus.params), on_host(without.params), strict=True)) > 1e-3


def test_an_entropy_bonus_raises_the_entropy(plain):
    some = [Row(row.prompt, row.answers, row.logps, (0.0, 0.0)) for row in rows(4)]
    state = plain.copy().replace(entropy_coefficient=jnp.float32(1.0))
    told = []
    for _ in range(3):
        state, metrics = plain.updater(state, one_step(some, 4), Knobs(0.5))
        told.append(float(metrics['entropy']))
    assert told[0] < told[1] < told[2]


def test_a_rescored_batch_takes_its_ratios_against_the_learner_and_keeps_what_the_sampler_said(plain):
    """The rows' log-probs are invented, so ratios against them are not 1; against the learner's own they are."""
    state = plain.copy()
    (batch,) = one_step(rows(4), 4)
    again = plain.updater.rescored(state, batch)
    np.testing.assert_array_equal(again.sampler_logps_GKS, batch.sampler_logps_GKS)
    _, invented = plain.updater(plain.copy(), [batch], Knobs(0.0))
    _, own = plain.updater(plain.copy(), [again], Knobs(0.0))
    assert own['ratio'] == pytest.approx(1, abs=1e-5)
    assert abs(invented['ratio'] - 1) > 1e-2


# --- what moves and what does not (A42)


def test_the_reference_is_neither_moved_nor_shared_with_what_is_donated(adam):
    """A42: reference = policy at step 0, then two updates; the old buffers are gone, the reference's are not."""
    state = with_reference(adam.copy())
    born = on_host(state.params)
    pointers = [
        {leaf.unsafe_buffer_pointer() for leaf in jax.tree.leaves(tree)} for tree in (state.params, state.reference)
    ]
    assert len(pointers[0]) == len(born) and not pointers[0] & pointers[1]
    old = state
    for _ in range(2):
        state, metrics = adam.updater(state, one_step(rows(4), 4), Knobs(1e-2, kl=0.1))
    assert all(leaf.is_deleted() for leaf in jax.tree.leaves(old.params))
    assert [leaf.tobytes() for leaf in on_host(state.reference)] == [leaf.tobytes() for leaf in born]
    assert all((before != after).any() for before, after in zip(born, on_host(state.params), strict=True))
    assert metrics['kl'] > 0 and state.updates == 2


def test_a_reference_is_born_as_a_copy_of_the_policy_in_buffers_of_its_own():
    mesh = make_mesh(1, 1, 1)
    state, _ = make_state(
        jax.random.key(0), module=MODULE, transform=optax.identity(), mesh=mesh, entropy_coefficient=0.0,
        keeps_reference=True,
    )  # fmt: skip
    pairs = list(zip(jax.tree.leaves(state.params), jax.tree.leaves(state.reference), strict=True))
    assert all(p.unsafe_buffer_pointer() != r.unsafe_buffer_pointer() and (p == r).all() for p, r in pairs)


def test_the_kl_term_alone_pulls_the_policy_to_the_reference(plain):
    some = [Row(row.prompt, row.answers, row.logps, (0.0, 0.0)) for row in rows(4)]
    state = plain.copy().replace(entropy_coefficient=jnp.float32(0.0))
    told = []
    for _ in range(3):
        state, metrics = plain.updater(state, one_step(some, 4), Knobs(0.2, kl=1.0))
        told.append(float(metrics['kl']))
    assert told[0] > told[1] > told[2] > 0


def test_supervised_steps_lower_the_loss_of_what_they_are_shown(adam):
    shown = [Row(row.prompt, row.answers, row.logps, (1.0, 1.0)) for row in rows(4)]
    pool = Pool('a', adam.copy())
    losses_seen = [pool.learn(adam.updater, [one_step(shown, 4)], Knobs(1e-2))['loss'] for _ in range(5)]
    assert losses_seen == sorted(losses_seen, reverse=True) and losses_seen[-1] < 0.9 * losses_seen[0]


def test_a_good_answer_becomes_more_likely_and_a_bad_one_less(adam):
    some = [Row((5, 6), ((7, 8), (9, 10)), ((-1.0, -1.0),) * 2, (1.0, -1.0))]
    micros = one_step(some, 4)
    state = adam.copy()
    before = SCORED(state.params, micros[0]).logp[0].sum(-1)
    state, _ = adam.updater(state, micros, Knobs(1e-2))
    after = SCORED(state.params, micros[0]).logp[0].sum(-1)
    assert after[0] > before[0] and after[1] < before[1]


def test_an_end_token_that_looks_like_padding_is_learned(adam):
    """A14: token 0 ends the answer and pads the batch; only its place tells them apart."""
    micros = one_step([Row((5, 0, 6), ((7, 8, 0), (9,)), ((-1.0,) * 3, (-1.0,)), (1.0, 0.0))], 4)
    state = adam.copy()
    before = SCORED(state.params, micros[0])
    assert before.mask.sum((0, 2)).tolist() == [3, 1]
    for _ in range(3):
        state, metrics = adam.updater(state, micros, Knobs(1e-2))
    after = SCORED(state.params, micros[0])
    assert after.logp[0, 0, 2] > before.logp[0, 0, 2] + 0.05 and metrics['tokens'] == 4


# --- answers cut by the length limit (A06)


def cut_group() -> list[Credited]:
    """4 answers of length 8, the last two cut at the limit, with advantages of both signs."""
    draw = np.random.default_rng(4)
    candidates = [
        Candidate(
            Answer(tuple(draw.integers(0, 16, 8).tolist()), tuple(draw.uniform(-4, -2, 8).tolist()), '', finish, 0),
            Reward(1.0, 0.0),
        )
        for finish in ('stop', 'stop', 'length', 'length')
    ]
    group = Group(GroupKey(0, 0, 0, 0, 'a'), 'shared', Prompt('a', (), (5, 6)), tuple(candidates), 0)
    return [Credited(group, (1.5, -0.5, 2.0, -3.0))]


@pytest.mark.parametrize('divisor', [token_count, constant(8)])
def test_answers_that_were_cut_are_left_out_of_the_loss_and_of_its_divisor(plain, divisor):
    """A06: loss, gradient, KL and entropy are those of the two finished answers alone, with the advantages they have
    in the whole group."""
    masked = rows_of(cut_group(), {'a': (0.7,)}, finished_answers)
    (item,) = cut_group()
    two = dataclasses.replace(item.group, candidates=item.group.candidates[:2])
    alone = rows_of([Credited(two, item.advantages[:2])], {'a': (0.7,)})
    whole = rows_of(cut_group(), {'a': (0.7,)})
    moved, told = gradient(plain, one_step(masked, 4, divisor))
    wanted, wanted_told = gradient(plain, one_step(alone, 4, divisor))
    same(moved, wanted)
    assert told == pytest.approx(wanted_told, rel=1e-4) and told['tokens'] == 16
    _, all_told = gradient(plain, one_step(whole, 4, divisor))
    assert all_told['tokens'] == 32 and abs(all_told['loss'] - told['loss']) > 1e-3


def test_a_group_of_which_every_answer_was_cut_is_not_trained_on():
    (item,) = cut_group()
    cut = dataclasses.replace(item.group, candidates=item.group.candidates[2:])
    assert rows_of([Credited(cut, (1.0, -1.0))], {'a': (0.7,)}, finished_answers) == []


def test_what_is_logged_of_rewards_and_lengths_counts_the_answers_that_were_cut_too():
    """A06: lengths 8, 8, 8 and 8 in tokens, tokens_min and tokens_max; a reward mean over all four."""
    told = answer_metrics(cut_group(), alpha=1.0)
    assert (told['tokens/a'], told['tokens_min/a'], told['tokens_max/a']) == (8, 8, 8)
    assert (told['reward/a'], told['truncated/a']) == (1, 0.5)


# --- pools


def test_learning_in_one_pool_leaves_the_other_bit_for_bit(adam):
    pools = {name: Pool(name, adam.copy()) for name in ('tool', 'plan')}
    born = on_host(pools['plan'].state)
    told = pools['tool'].learn(adam.updater, [one_step(rows(4), 4)] * 2, Knobs(1e-2))
    assert [leaf.tobytes() for leaf in on_host(pools['plan'].state)] == [leaf.tobytes() for leaf in born]
    assert any(
        (a != b).any()
        for a, b in zip(on_host(pools['tool'].state.params), on_host(pools['plan'].state.params), strict=True)
    )
    assert told['optimiser_steps'] == 2 and told['tokens'] == 2 * sum(row.tokens for row in rows(4))
    assert (pools['tool'].state.updates, pools['plan'].state.updates) == (2, 0)


def test_a_pool_with_nothing_to_learn_from_stays_as_it_is(adam):
    pool = Pool('plan', adam.copy())
    born = on_host(pool.state)
    assert pool.learn(adam.updater, [], Knobs(1e-2)) == {'optimiser_steps': 0.0}
    assert [leaf.tobytes() for leaf in on_host(pool.state)] == [leaf.tobytes() for leaf in born]


@pytest.mark.parametrize('value', [float('nan'), float('inf')])
def test_an_update_that_is_not_finite_stops_the_run_and_says_where(adam, value):
    bad = rows(4)
    bad[2] = Row(bad[2].prompt, bad[2].answers, bad[2].logps, (value, 0.0))
    pool = Pool('plan', adam.copy())
    pool.learn(adam.updater, [one_step(rows(4), 4)], Knobs(1e-2))
    with pytest.raises(NonFiniteUpdateError, match=r"pool 'plan', after 2 updates: \['loss', 'grad_norm'\] not finite"):
        pool.learn(adam.updater, [one_step(bad, 4)], Knobs(1e-2))


def test_a_sampler_log_prob_that_is_not_a_number_is_fatal_too(plain):
    bad = rows(4)
    bad[0] = Row(bad[0].prompt, bad[0].answers, tuple((float('nan'),) * len(a) for a in bad[0].answers), (1.0, -1.0))
    with pytest.raises(NonFiniteUpdateError, match="pool 'tool'"):
        Pool('tool', plain.copy()).learn(plain.updater, [one_step(bad, 4)], Knobs(1e-2))


# --- groups whose rewards are all equal (A01)


def episode_of(env: int, rewards: list[float]) -> Trajectory:
    """One group of answers with two tokens each."""
    draw = np.random.default_rng(env)
    candidates = tuple(
        Candidate(
            Answer(tuple(draw.integers(0, 16, 2).tolist()), tuple(draw.uniform(-4, -2, 2).tolist()), '', 'stop', 0),
            Reward(float(reward), 0.0),
        )
        for reward in rewards
    )
    group = Group(GroupKey(0, env, 0, 0, 'a'), 'shared', Prompt('a', (), (5, 6)), candidates, 0)
    return Trajectory(env, 0, (Turn((group,)),), False, 0.0, ())


@pytest.mark.parametrize('kl', [0.0, 0.1])
def test_a_dead_group_moves_nothing_with_and_without_a_kl_term(plain, kl):
    """A01: rewards [1, 1, 1, 1] and [1, 0, 0, 0]. The first is left out, KL and divisor too: the step is the second's
    alone, and would be another one with the first in it."""
    episodes = [episode_of(0, [1, 1, 1, 1]), episode_of(1, [1, 0, 0, 0])]
    credited = credit.agent_turn(credit.standardised, alpha=1.0)(episodes)
    assert credited[0].advantages == (0.0,) * 4 and dead_shares(credited) == {'a': 0.5}
    live = rows_of(route(credited, ['a'])['shared'], {'a': (0.7,)})
    alone, both = rows_of(credited[1:], {'a': (0.7,)}), rows_of(credited, {'a': (0.7,)})
    moved, told = gradient(plain, one_step(live, 4), kl)
    wanted, wanted_told = gradient(plain, one_step(alone, 4), kl)
    same(moved, wanted)
    assert told == pytest.approx(wanted_told) and told['tokens'] == 8 and np.isfinite([*told.values()]).all()
    other, _ = gradient(plain, one_step(both, 4), kl)
    assert max(np.abs(a - b).max() for a, b in zip(moved, other, strict=True)) > 1e-3
