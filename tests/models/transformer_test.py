"""The policy network: one forward pass, reached by plain rows, by shared prompts and token by token, says one thing."""

import dataclasses
import functools
import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen as nn

from mallm.models import cache
from mallm.models.config import Architecture
from mallm.models.transformer import Transformer, frequencies, rms_norm, rotate

VOCAB, G, K, P, S = 11, 3, 2, 5, 4
GROUPED = Architecture(VOCAB, width=16, layers=2, heads=4, kv_heads=2, head_dim=8, ffn=24)
VARIANTS = {
    'grouped queries, tied, normalised': GROUPED,
    'untied, biased, not normalised': dataclasses.replace(
        GROUPED, layers=1, kv_heads=4, tied=False, qkv_bias=True, qk_norm=False
    ),
    'one key head, narrow heads': dataclasses.replace(GROUPED, layers=1, kv_heads=1, head_dim=2),
}


class Case(NamedTuple):
    """G prompts of different lengths and their K answers, padded on the right with whatever."""

    prompts_GP: np.ndarray
    lengths_G: np.ndarray
    answers_GKS: np.ndarray

    @property
    def rows_BT(self) -> np.ndarray:
        """The same as plain rows: prompt, answer, and the end filled up."""
        rows = np.zeros((G * K, P + S), np.int32)
        for g, length in enumerate(self.lengths_G):
            for k in range(K):
                rows[g * K + k, : length + S] = [*self.prompts_GP[g, :length], *self.answers_GKS[g, k]]
        return rows

    def answer_part(self, rows_BTV: np.ndarray) -> np.ndarray:
        """Where plain rows say what the answers are scored by: position length - 1 + s predicts answer token s."""
        parts = [
            rows_BTV[g * K + k, length - 1 : length - 1 + S]
            for g, length in enumerate(self.lengths_G)
            for k in range(K)
        ]
        return np.stack(parts).reshape(G, K, S, -1)


def case(seed: int = 0) -> Case:
    draw = np.random.default_rng(seed)
    return Case(
        np.int32(draw.integers(0, VOCAB, (G, P))), np.int32([5, 2, 3]), np.int32(draw.integers(0, VOCAB, (G, K, S)))
    )


class Model(NamedTuple):
    """Parameters and the compiled ways to ask them."""

    params: Any
    rows: Any
    score: Any
    decode: Any


def token_by_token(module: Transformer, params: Any, prompts_GP, lengths_G, answers_GKS):
    """Logits_GKSV as an engine computes them: one encode, then one cached token at a time."""
    variables = {'params': params}
    last_GD, prefix = module.apply(variables, prompts_GP, lengths_G, method=Transformer.encode)
    first = jnp.broadcast_to(last_GD[:, None, None], (G, K, 1, module.arch.width))

    def step(past, s):
        token = jax.lax.dynamic_slice_in_dim(answers_GKS, s, 1, axis=2)
        hidden, past = module.apply(variables, token, prefix, past, s, method=Transformer.extend)
        return past, hidden[:, :, 0]

    empty = cache.empty(module.arch, G, K, S, module.dtype)
    _, later = jax.lax.scan(step, empty, jnp.arange(S - 1))
    hidden = jnp.concatenate([first, later.transpose(1, 2, 0, 3)], axis=2)
    return module.apply(variables, hidden, method=Transformer.logits)


@functools.cache
def model(name: str) -> Model:
    module = Transformer(VARIANTS[name])
    init = jax.jit(lambda key: nn.unbox(module.init(key, jnp.zeros((1, 2), jnp.int32))['params']))
    params = jax.tree.map(
        lambda p: p + 0.1 * jnp.sin(jnp.arange(p.size, dtype=p.dtype)).reshape(p.shape), init(jax.random.key(1))
    )
    return Model(
        params,
        jax.jit(lambda params, rows_BT: module.apply({'params': params}, rows_BT)),
        jax.jit(lambda params, *asked: module.apply({'params': params}, *asked, method=Transformer.score)),
        jax.jit(functools.partial(token_by_token, module)),
    )


every_variant = pytest.mark.parametrize('name', VARIANTS)
BASE = next(iter(VARIANTS))


# --- three ways, one distribution


@every_variant
def test_answers_on_a_shared_prompt_are_scored_like_plain_rows(name):
    """A15 for K answers at once; each prompt has another length and padding that must not be seen."""
    made, asked = model(name), case()
    scored = np.asarray(made.score(made.params, *asked))
    rows = asked.answer_part(np.asarray(made.rows(made.params, asked.rows_BT)))
    assert scored.shape == (G, K, S, VOCAB) and scored.dtype == np.float32
    assert np.ptp(scored) > 1
    np.testing.assert_allclose(scored, rows, atol=1e-4)


@every_variant
def test_cached_decoding_gives_the_logits_of_the_whole_answer(name):
    made, asked = model(name), case()
    whole, stepwise = made.score(made.params, *asked), made.decode(made.params, *asked)
    np.testing.assert_allclose(stepwise, whole, atol=1e-4)


def log_probs(logits_V, ids) -> list[float]:
    logp = np.asarray(jax.nn.log_softmax(logits_V))
    return [float(logp[s, token]) for s, token in enumerate(ids)]


@pytest.mark.parametrize('padding', [0, 5])
def test_each_response_token_has_its_own_log_prob_for_any_prompt_padding(padding):
    """A15: prompt of 2 tokens, response of 3 tokens and the end; 4 values, the end's among them, none shifted."""
    made = model(BASE)
    prompt, response = [3, 7], [2, 9, 4, 1]
    row_logits = made.rows(made.params, np.int32([[*prompt, *response]]))[0]
    table = log_probs(row_logits[1:5], response)  # logits at t predict the token at t + 1
    padded = np.int32([[*prompt, *[8] * padding]])
    scored = made.score(made.params, padded, np.int32([2]), np.int32([[response]]))
    assert log_probs(scored[0, 0], response) == pytest.approx(table, abs=1e-4)
    shifted = log_probs(row_logits[0:4], response)
    assert np.abs(np.subtract(shifted, table)).min() > 1e-2


def answer_loss(params, logits_of, asked: Case):
    """A smooth function of the answers' log-probs, with another weight for each token."""
    logp = jax.nn.log_softmax(logits_of(params))
    taken = jnp.take_along_axis(logp, asked.answers_GKS[..., None], axis=-1)[..., 0]
    return (taken * jnp.cos(jnp.arange(G * K * S, dtype=jnp.float32)).reshape(G, K, S)).sum()


def rows_logits(module: Transformer, asked: Case):
    index = np.repeat(asked.lengths_G, K)[:, None] - 1 + np.arange(S)[None]

    def logits_of(params):
        rows = module.apply({'params': params}, asked.rows_BT)
        return jnp.take_along_axis(rows, index[:, :, None], axis=1).reshape(G, K, S, VOCAB)

    return logits_of


def shared_logits(module: Transformer, asked: Case):
    return lambda params: module.apply({'params': params}, *asked, method=Transformer.score)


@pytest.fixture(scope='module')
def shared_gradient():
    module = Transformer(GROUPED)
    return jax.jit(jax.grad(lambda p: answer_loss(p, shared_logits(module, case()), case())))(model(BASE).params)


def assert_same_tree(this, that, atol: float) -> None:
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=atol), this, that)


def test_the_gradient_through_a_shared_prompt_is_the_gradient_through_plain_rows(shared_gradient):
    module = Transformer(GROUPED)
    by_rows = jax.jit(jax.grad(lambda p: answer_loss(p, rows_logits(module, case()), case())))(model(BASE).params)
    assert min(np.abs(leaf).max() for leaf in jax.tree.leaves(by_rows)) > 1e-3
    assert_same_tree(shared_gradient, by_rows, 1e-4)


def test_recomputing_blocks_changes_neither_the_parameters_nor_the_gradient(shared_gradient):
    module = Transformer(dataclasses.replace(GROUPED, remat=True))
    born = jax.eval_shape(module.init, jax.random.key(0), jnp.zeros((1, 2), jnp.int32))['params']
    assert jax.tree.structure(nn.unbox(born)) == jax.tree.structure(model(BASE).params)
    again = jax.jit(jax.grad(lambda p: answer_loss(p, shared_logits(module, case()), case())))(model(BASE).params)
    assert_same_tree(again, shared_gradient, 1e-5)


# --- who sees whom


def moved(before, after) -> np.ndarray:
    """True where a distribution changed."""
    return np.abs(np.asarray(before) - np.asarray(after)).max(-1) > 1e-6


@every_variant
def test_a_later_token_never_alters_an_earlier_distribution(name):
    made = model(name)
    rows = case().rows_BT
    before = made.rows(made.params, rows)
    for t in range(P + S):
        other = rows.copy()
        other[:, t] = (other[:, t] + 1) % VOCAB
        seen = moved(before, made.rows(made.params, other))
        assert not seen[:, :t].any() and seen[:, t].all()


@every_variant
def test_an_answer_sees_its_prompt_and_its_own_past_and_nothing_else(name):
    made, asked = model(name), case()
    before = made.score(made.params, *asked)
    answers = asked.answers_GKS.copy()
    answers[1, 0, 2] = (answers[1, 0, 2] + 1) % VOCAB
    seen = moved(before, made.score(made.params, *asked._replace(answers_GKS=answers)))
    # token 2 of that one answer is first seen by the distribution of its token 3
    assert np.argwhere(seen).tolist() == [[1, 0, 3]]
    prompts = asked.prompts_GP.copy()
    prompts[1, 0] = (prompts[1, 0] + 1) % VOCAB
    seen = moved(before, made.score(made.params, *asked._replace(prompts_GP=prompts)))
    assert seen[1].all() and not seen[[0, 2]].any()


def test_what_stands_in_the_padding_of_a_prompt_is_never_seen():
    made, asked = model(BASE), case()
    prompts = asked.prompts_GP.copy()
    for g, length in enumerate(asked.lengths_G):
        prompts[g, length:] = (prompts[g, length:] + 3) % VOCAB
    assert (prompts != asked.prompts_GP).any()
    changed = made.score(made.params, *asked._replace(prompts_GP=prompts))
    assert not moved(made.score(made.params, *asked), changed).any()


def test_order_matters_to_what_is_predicted():
    """Without positions, swapping two earlier tokens could not be noticed by a one-layer network."""
    made = model('one key head, narrow heads')
    rows = np.int32([[3, 7, 5, 5], [7, 3, 5, 5]])
    logits = made.rows(made.params, rows)
    assert moved(logits[0, 3], logits[1, 3])


# --- parts by hand


def test_rms_norm_by_hand():
    # rms of (3, 4) is sqrt(12.5)
    normed = rms_norm(jnp.float32([[3, 4]]), jnp.float32([1, 2]), 0.0)
    assert normed[0] == pytest.approx([3 / math.sqrt(12.5), 8 / math.sqrt(12.5)], rel=1e-6)
    assert rms_norm(jnp.zeros((1, 4)), jnp.ones(4), 1e-6).tolist() == [[0, 0, 0, 0]]


def test_rotation_by_hand():
    # one pair turns by its position in radians; the slower second pair of four by position / sqrt(theta)
    turned = rotate(jnp.float32([[[1, 0]], [[1, 0]]]), jnp.int32([0, 2]), frequencies(1, 10_000.0))
    np.testing.assert_allclose(turned[:, 0], [[1, 0], [math.cos(2), math.sin(2)]], atol=1e-6)
    slow = rotate(jnp.float32([[[0, 1, 0, 0]]]), jnp.int32([3]), frequencies(2, 100.0))
    np.testing.assert_allclose(slow[0, 0], [0, math.cos(0.3), 0, math.sin(0.3)], atol=1e-6)


def test_stretched_frequencies_by_hand():
    # two pairs, base 100: 1 and 0.1 radians a token
    np.testing.assert_allclose(frequencies(2, 100.0, 4.0), [0.25, 0.025], rtol=1e-6)
    # in 50 pi tokens they turn 25 and 2.5 times: above the band's 4, so kept; and half-way from 1 to 4, so half blended
    half_way = frequencies(2, 100.0, 8.0, (1.0, 4.0, 50 * math.pi))
    np.testing.assert_allclose(half_way, [1, (0.1 + 0.1 / 8) / 2], rtol=1e-6)
    # in 2 pi tokens once and a tenth: both at the band's 1 or below, so both stretched
    np.testing.assert_allclose(frequencies(2, 100.0, 8.0, (1.0, 4.0, 2 * math.pi)), [1 / 8, 0.1 / 8], rtol=1e-6)


def test_rotated_products_depend_on_the_distance_only():
    q, k = jax.random.normal(jax.random.key(0), (2, 1, 1, 8))

    turns = frequencies(4, 100.0)

    def product(at: int, to: int) -> float:
        return float((rotate(q, jnp.int32([at]), turns) * rotate(k, jnp.int32([to]), turns)).sum())

    assert product(3, 1) == pytest.approx(product(9, 7), abs=1e-4)
    assert product(3, 1) != pytest.approx(product(3, 2), abs=1e-2)


# --- bfloat16 (A11)


def test_the_head_of_a_bfloat16_model_multiplies_and_normalises_in_float32():
    """A11: hidden ones(8), first column 20.024 / 8 = 2.503, which bfloat16 would round to 2.5: logit 20 instead."""
    arch = Architecture(8, width=8, layers=1, heads=1, kv_heads=1, head_dim=2, ffn=8, tied=False)
    module = Transformer(arch, jnp.bfloat16)
    params = nn.unbox(jax.jit(module.init)(jax.random.key(0), jnp.zeros((1, 2), jnp.int32))['params'])
    params['head'] = jnp.zeros((8, 8)).at[:, 0].set(2.503)
    logits = module.apply({'params': params}, jnp.ones((1, 8), jnp.bfloat16), method=Transformer.logits)
    assert logits.dtype == jnp.float32 and logits[0] == pytest.approx([20.024] + [0] * 7, abs=2e-3)
    logp = jax.nn.log_softmax(logits)[0]
    assert logp[0] <= 0 and logp[1] == pytest.approx(-20.024, abs=2e-3)


def test_a_bfloat16_model_keeps_float32_parameters_and_agrees_with_its_float32_twin():
    module = Transformer(GROUPED, jnp.bfloat16)
    made, asked = model(BASE), case()
    assert {leaf.dtype for leaf in jax.tree.leaves(made.params)} == {jnp.dtype('float32')}
    logits = jax.jit(shared_logits(module, asked))(made.params)
    logp, wanted = jax.nn.log_softmax(logits), jax.nn.log_softmax(made.score(made.params, *asked))
    assert logits.dtype == jnp.float32 and (logp <= 0).all()
    np.testing.assert_allclose(logp, wanted, atol=0.15)


# --- architectures


@pytest.mark.parametrize(
    'change, reason',
    [
        ({'heads': 3}, 'kv_heads=2: kv_heads must divide heads'),
        ({'head_dim': 7}, 'head_dim=7: rotary embedding needs an even head_dim'),
        ({'layers': 0}, 'layers=0: every size must be at least 1'),
        ({'vocab': 0}, 'vocab=0'),
        ({'rope_factor': 0.0}, 'rope_factor=0.0: both must be positive'),
        ({'rope_band': (4.0, 1.0, 8192)}, 'with 0 < low < high'),
    ],
)
def test_an_impossible_architecture_is_refused_at_birth(change, reason):
    with pytest.raises(ValueError, match=reason):
        dataclasses.replace(GROUPED, **change)


def test_only_the_parameters_that_an_architecture_names_exist():
    def names(arch: Architecture) -> set[str]:
        born = jax.eval_shape(Transformer(arch).init, jax.random.key(0), jnp.zeros((1, 2), jnp.int32))['params']
        return {jax.tree_util.keystr(path[-1:], simple=True) for path, _ in jax.tree.leaves_with_path(nn.unbox(born))}

    biases, norms = {'q_bias', 'k_bias', 'v_bias'}, {'q_norm', 'k_norm'}
    tied, untied = names(GROUPED), names(VARIANTS['untied, biased, not normalised'])
    assert untied - tied == {'head'} | biases and tied - untied == norms


def test_nothing_is_read_beyond_the_context():
    """P + S = 9 tokens are asked for; the last answer token is only predicted, so 8 are read."""
    made, asked = model(BASE), case()

    def read(context: int):
        module = Transformer(dataclasses.replace(GROUPED, context=context))
        return jax.eval_shape(shared_logits(module, asked), made.params)

    assert read(P + S - 1).shape == (G, K, S, VOCAB)
    with pytest.raises(ValueError, match=r'sequences of 8 tokens .* in a context of 7: .* shorten prompts'):
        read(P + S - 2)
