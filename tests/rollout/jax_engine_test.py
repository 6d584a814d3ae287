"""The embedded engine: a draw depends on its place and the weights alone, and its log-probs are the learner's."""

import asyncio
import dataclasses
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen as nn
from hypothesis import given, settings
from hypothesis import strategies as st

from mallm.algo import losses
from mallm.errors import EngineError
from mallm.learn.pack import Packing, Row, pack
from mallm.learn.update import token_arrays
from mallm.models import cache
from mallm.models.config import Architecture
from mallm.models.transformer import Transformer
from mallm.rollout import jax_engine
from mallm.rollout.chat import TinyTokenizer
from mallm.rollout.engine import SamplingParams
from mallm.rollout.jax_engine import JaxEngine, batch_rows, draw, generate, keep_mask, place_of
from mallm.types import Answer, Prompt

TOKENIZER = TinyTokenizer()
VOCAB = len(TOKENIZER)
MODULE = Transformer(Architecture(VOCAB, width=16, layers=1, heads=2, kv_heads=1, head_dim=8, ffn=32))
LIMIT, K = 6, 8
PLAIN = SamplingParams(LIMIT)
OPEN = '#. @ $/  #>'

FORWARD = jax.jit(lambda params, rows_BT: MODULE.apply({'params': params}, rows_BT))


class Ending(TinyTokenizer):
    """A tokenizer with another token as its end."""

    def __init__(self, end: int) -> None:
        super().__init__()
        self._end = end

    @property
    def end(self) -> int:
        return self._end


class Endings(Ending):
    """A tokenizer with several ends."""

    def __init__(self, *ends: int) -> None:
        super().__init__(ends[0])
        self._more = ends

    @property
    def ends(self) -> tuple[int, ...]:
        return self._more


def weights(seed: int) -> Any:
    params = nn.unbox(INIT(jax.random.key(seed)))
    return params | {'embedding': params['embedding'] * 2}  # farther from uniform than at birth


INIT = jax.jit(lambda key: MODULE.init(key, jnp.zeros((1, 2), jnp.int32))['params'])


@pytest.fixture(autouse=True)
def small_batches(monkeypatch) -> None:
    monkeypatch.setattr(jax_engine, 'ROWS', (8, 32))


@pytest.fixture(scope='module')
def params() -> Any:
    return weights(0)


def fresh(params: Any, tokenizer: TinyTokenizer = TOKENIZER, version: int = 0) -> JaxEngine:
    engine = JaxEngine(MODULE, tokenizer, jax.random.key(3))
    engine.load('a', params, version)
    return engine


@pytest.fixture(scope='module')
def engine(params) -> JaxEngine:
    return fresh(params)


def prompt(text: str = OPEN) -> Prompt:
    return Prompt('plan', (), TOKENIZER.encode(text))


def ask(engine: JaxEngine, *requests: tuple[Any, ...]) -> list[tuple[Answer, ...]]:
    """Answers to requests (prompt, path, and, if not the usual ones, params and k) that wait at the same time."""

    async def all_of() -> list[tuple[Answer, ...]]:
        asked = [
            engine.sample('a', p, path, (*more, PLAIN, K)[1] if len(more) == 2 else K, more[0] if more else PLAIN)
            for p, path, *more in requests
        ]
        return list(await asyncio.wait_for(asyncio.gather(*asked), timeout=300))

    return asyncio.run(all_of())


def ids(answers: Sequence[Answer]) -> list[tuple[int, ...]]:
    return [answer.ids for answer in answers]


def next_logits(params: Any, prompt: Prompt, answer: Sequence[int]) -> np.ndarray:
    """Logits_SV from which each token of an answer was to be drawn, by the plain forward pass."""
    row = np.zeros((1, 24), np.int32)
    row[0, : len(prompt.ids) + len(answer)] = [*prompt.ids, *answer]
    start = len(prompt.ids) - 1
    return np.asarray(FORWARD(params, row))[0, start : start + len(answer)]


# --- the same place draws the same, in any company


def test_a_request_draws_the_same_whatever_it_is_batched_with(engine, params):
    mine = (prompt(), (0, 7))
    others = [(prompt('T' * n + '>'), (1, n)) for n in range(1, 12)]
    (alone,) = ask(engine, mine)
    companies = {
        'first of two': ask(engine, mine, others[0])[0],
        'last of two': ask(engine, others[0], mine)[-1],
        'in a larger bucket of rows': ask(engine, *others[:9], mine, *others[9:])[9],
        'with other settings beside it': ask(engine, (prompt('T>'), (2, 2), SamplingParams(LIMIT, 0.3)), mine)[1],
        'by another worker': ask(fresh(params), mine)[0],
        'once more': ask(engine, mine)[0],
    }
    for company, answers in companies.items():
        assert ids(answers) == ids(alone), company
        for this, that in zip(answers, alone, strict=True):
            assert this.logps == pytest.approx(that.logps, abs=1e-5)


def test_k_answers_to_an_open_prompt_differ_and_a_second_run_reproduces_them(engine, params):
    """A17: K = 8 at T = 1, two workers."""
    requests = [(prompt(), (0, env)) for env in range(2)]
    told = ask(engine, *requests)
    assert all(len(set(ids(answers))) >= 7 for answers in told)
    again = [ask(fresh(params), request)[0] for request in requests]
    assert [ids(answers) for answers in again] == [ids(answers) for answers in told]


def test_two_places_draw_differently(engine):
    places = [(0, 0), (0, 1), (1, 0), (5, 5)]
    told = ask(engine, *[(prompt(), place) for place in places])
    assert len({tuple(ids(answers)) for answers in told}) == len(places)


def test_an_answer_depends_on_its_own_number_and_not_on_how_many_are_drawn(engine):
    """Candidate j is drawn at place (*path, j), so that the first of one is the first of eight."""
    (eight,) = ask(engine, (prompt(), (0, 7)))
    (one,) = ask(engine, (prompt(), (0, 7), PLAIN, 1))
    assert ids(one) == ids(eight)[:1]


# --- log-probs


def test_at_temperature_zero_each_token_is_the_most_likely_one_and_certain(engine, params):
    (answers,) = ask(engine, (prompt(), (0, 7), SamplingParams(LIMIT, 0.0)))
    assert len(set(ids(answers))) == 1
    wanted = next_logits(params, prompt(), answers[0].ids).argmax(-1)
    assert list(answers[0].ids) == wanted.tolist() and set(answers[0].logps) == {0.0}


def test_the_samplers_log_probs_are_the_learners_at_every_temperature(engine, params):
    """A10 end to end: T = 0.6, 1.0 and 1.3 in one batch, no update in between: every ratio is 1 within 1e-3."""
    settings = [SamplingParams(LIMIT, t) for t in (0.6, 1.0, 1.3)] + [SamplingParams(LIMIT, 0.8, spread=2.5)]
    texts = (OPEN, 'T>', 'P##/@$.=U:~>', OPEN)
    told = ask(engine, *[(prompt(x), (4, i), s) for i, (s, x) in enumerate(zip(settings, texts, strict=True))])
    rows = [
        Row(prompt(x).ids, tuple(ids(answers)), tuple(a.logps for a in answers), (1.0,) * K, s.temperatures(K))
        for x, answers, s in zip(texts, told, settings, strict=True)
    ]
    ((batch,),) = pack(rows, Packing(0, 4), 0)
    tokens = jax.jit(lambda params, batch: token_arrays(MODULE, params, None, batch))(params, batch)
    ratio = np.exp(losses.log_ratio(tokens.logp, tokens.sampler_logp, tokens.mask))[np.asarray(tokens.mask) > 0]
    assert len(ratio) == sum(row.tokens for row in rows)
    np.testing.assert_allclose(ratio, 1, atol=1e-3)
    # and it would be noticed: at the wrong temperature the ratios are off
    wrong = losses.token_statistics(
        jnp.asarray(next_logits(params, prompt(), told[0][0].ids)),
        jnp.int32(told[0][0].ids),
        jnp.ones(len(told[0][0].ids)),
    )[0]
    assert np.abs(np.exp(wrong - jnp.float32(told[0][0].logps)) - 1).max() > 0.1


# --- top-k and top-p


def allowed_by_numpy(logits: np.ndarray, top_p: float, top_k: int) -> np.ndarray:
    """Top-k, renormalised, then the smallest set of likeliest tokens whose probability reaches top_p."""
    order = np.argsort(-logits, kind='stable')
    order = order[: top_k or None]
    probability = np.exp(np.float64(logits[order]) - np.float64(logits.max()))
    probability /= probability.sum()
    kept = order[: int(np.searchsorted(np.cumsum(probability), top_p) + 1)]
    return np.isin(np.arange(len(logits)), kept)


@settings(deadline=None, max_examples=200)
@given(
    st.lists(st.integers(-40, 40), min_size=6, max_size=6),
    st.sampled_from([0.05, 0.33, 0.61, 0.92, 1.0]),
    st.integers(0, 7),
)
def test_filters_keep_what_numpy_keeps(tenths, top_p, top_k):
    logits = np.float32(tenths) / 10
    kept = np.asarray(KEEP(logits, np.float32(top_p), np.float32(top_k)))
    assert kept[logits.argmax()]
    wanted = allowed_by_numpy(logits, top_p, top_k)
    probability = np.exp(logits) * wanted
    edge = np.abs(np.cumsum(np.sort(probability / probability.sum())[::-1]) - top_p).min()
    assert kept.tolist() == wanted.tolist() or edge < 1e-5 or top_p == 1.0


@pytest.mark.parametrize('places', [1, 5, 40, 700])
def test_a_mass_is_found_where_running_sums_in_float64_say(places):
    """Half of the places weigh nothing. Masses are the middles of the others' own shares, and both ends of all."""
    weights = np.random.default_rng(places).exponential(size=places).astype(np.float32)
    weights[1::2] = 0
    some = np.flatnonzero(weights)
    before = np.concatenate([[0], np.cumsum(weights, dtype=np.float64)])[some]
    masses = np.float32([*(before + weights[some] / 2), 0, weights.sum(), 2 * weights.sum()])
    rows = np.broadcast_to(weights, (len(masses), places))
    found, left = jax.jit(place_of)(rows, masses)
    assert found.tolist() == [*some, 0, some[-1], some[-1]]
    assert left[: len(some)] == pytest.approx(weights[some] / 2, abs=1e-4)


KEEP = jax.jit(keep_mask)


@pytest.mark.parametrize('top_p, top_k', [(1.0, 3), (0.8, 0), (0.7, 4), (1e-6, 0), (1.0, 1)])
def test_only_allowed_tokens_are_drawn_and_their_probabilities_sum_to_one(top_p, top_k):
    logits = np.float32([1.5, 0.2, -3, 1.1, 0.9, -1, 0.4, -0.2])
    rows = 2000
    token, logp = DRAW(
        np.tile(logits, (rows, 1)), jax.random.split(jax.random.key(0), rows), np.full(rows, 0.9, np.float32),
        (np.full(rows, top_p, np.float32), np.full(rows, top_k, np.float32)),
    )  # fmt: skip
    allowed = allowed_by_numpy(logits / np.float32(0.9), top_p, top_k)
    drawn = dict(zip(token.tolist(), logp.tolist(), strict=True))
    assert sorted(drawn) == np.flatnonzero(allowed).tolist()
    weights = np.exp(logits / 0.9) * allowed
    for one, told in drawn.items():
        assert told == pytest.approx(np.log(weights[one] / weights.sum()), abs=1e-5)
    assert sum(np.exp(list(drawn.values()))) == pytest.approx(1, abs=1e-5)


DRAW = jax.jit(draw)


def test_a_filtered_request_keeps_to_its_tokens_and_leaves_its_neighbour_alone(engine, params):
    filtered = (prompt(), (9, 9), SamplingParams(LIMIT, 0.8, top_p=0.9, top_k=3))
    (alone,) = ask(engine, (prompt(), (0, 7)))
    answers, beside = ask(engine, filtered, (prompt(), (0, 7)))
    assert ids(beside) == ids(alone)
    for answer in answers:
        for token, told, logits in zip(
            answer.ids, answer.logps, next_logits(params, prompt(), answer.ids), strict=True
        ):
            kept = np.exp(logits / 0.8) * allowed_by_numpy(logits / np.float32(0.8), 0.9, 3)
            assert told == pytest.approx(np.log(kept[token] / kept.sum()), abs=1e-3)
    assert len(set(ids(answers))) > 1


# --- where answers end


def test_an_answer_ends_with_its_end_token_which_is_kept_and_counted_and_decoding_stops_there(params, monkeypatch):
    (greedy,) = ask(fresh(params), (prompt(), (0, 7), SamplingParams(LIMIT, 0.0)))
    path = greedy[0].ids
    assert len(path) == LIMIT and greedy[0].finish == 'length'
    end = next(token for token in reversed(path[:4]) if path.index(token) > 0)
    ends_at = path.index(end)
    steps = set()
    write = cache.write

    def noted(past, new, at):
        jax.debug.callback(lambda at: steps.add(int(at)), at)
        return write(past, new, at)

    monkeypatch.setattr(cache, 'write', noted)
    (answers,) = ask(fresh(params, Ending(end)), (prompt(), (0, 7), SamplingParams(LIMIT, 0.0)))
    jax.effects_barrier()
    assert {answer.ids for answer in answers} == {path[: ends_at + 1]}
    assert all(answer.finish == 'stop' and len(answer.logps) == ends_at + 1 for answer in answers)
    assert steps == set(range(ends_at)) and ends_at < LIMIT - 1  # the first token comes from the prompt alone


def test_answers_that_are_cut_say_so_and_text_has_no_end_token(engine):
    """A40: of many answers some are cut at the limit and some end by themselves; both are told."""
    told = [answer for answers in ask(engine, *[(prompt(), (6, i)) for i in range(8)]) for answer in answers]
    assert {answer.finish for answer in told} == {'stop', 'length'}
    for answer in told:
        ended = answer.ids[-1] == TOKENIZER.end
        assert answer.finish == ('stop' if ended else 'length')
        assert ended or len(answer.ids) == LIMIT
        assert TOKENIZER.end not in answer.ids[:-1]
        assert answer.text == TOKENIZER.decode([i for i in answer.ids if i not in (TOKENIZER.PAD, TOKENIZER.END)])


def test_an_answer_ends_with_whichever_of_several_end_tokens_comes_first(params):
    """The draws are those of an engine that knows no end; only where they stop is another."""
    request = (prompt(), (0, 7))
    (endless,) = ask(fresh(params, Ending(-1)), request)
    (one, other) = endless[0].ids[2], next(i for i in endless[1].ids if i != endless[0].ids[2])
    (answers,) = ask(fresh(params, Endings(one, other)), request)
    for answer, whole in zip(answers, endless, strict=True):
        places = [place for place, i in enumerate(whole.ids) if i in (one, other)]
        assert answer.ids == (whole.ids[: places[0] + 1] if places else whole.ids)
        assert answer.finish == ('stop' if places else 'length')
    assert {answer.ids[-1] for answer in answers if answer.finish == 'stop'} == {one, other}


def test_a_stop_string_ends_an_answer_and_its_token_is_trained_on_with_the_log_prob_it_was_drawn_with(params):
    """The same draws, cut: ids up to the token that completes the string, text up to the string (A16)."""
    plain = [(prompt(), (0, n)) for n in range(4)]
    whole = [answer for answers in ask(fresh(params, Ending(-1)), *plain) for answer in answers]
    texts = [answer.text for answer in whole]
    stop = (texts[0][2], texts[1][1:3])  # of one token, and of two
    cutting = [(prompt(), (0, n), SamplingParams(LIMIT, stop=stop)) for n in range(4)]
    cut = [answer for answers in ask(fresh(params, Ending(-1)), *cutting) for answer in answers]
    for answer, all_of in zip(cut, whole, strict=True):
        ends = [all_of.text.find(one) + len(one) for one in stop if one in all_of.text]
        kept = min(ends, default=LIMIT)
        assert (answer.ids, answer.logps) == (all_of.ids[:kept], all_of.logps[:kept])
        assert answer.finish == ('stop' if ends else 'length')
        assert not any(one in answer.text for one in stop) and all_of.text.startswith(answer.text)
    assert {answer.finish for answer in cut} == {'stop', 'length'}


# --- weights


def test_after_a_load_the_answers_are_those_of_a_fresh_engine_with_the_new_weights(params):
    """A18: the same prompt before and after; nothing of the old policy may be left."""
    new = weights(1)
    engine = fresh(params)
    greedy = SamplingParams(LIMIT, 0.0)
    before = ask(engine, (prompt(), (0, 7)), (prompt(), (0, 7), greedy))
    engine.load('a', new, 5)
    after = ask(engine, (prompt(), (0, 7)), (prompt(), (0, 7), greedy))
    wanted = ask(fresh(new), (prompt(), (0, 7)), (prompt(), (0, 7), greedy))
    assert [ids(answers) for answers in after] == [ids(answers) for answers in wanted] != [ids(a) for a in before]
    for this, that in zip(after[0], wanted[0], strict=True):
        assert this.logps == pytest.approx(that.logps, abs=1e-6)
    assert {a.version for answers in before for a in answers} == {0}
    assert {a.version for answers in after for a in answers} == {5}


def test_policies_are_kept_apart_in_one_engine(params):
    engine = fresh(params)
    engine.load('b', weights(1), 9)

    async def both():
        return await asyncio.gather(
            engine.sample('a', prompt(), (0, 7), K, PLAIN), engine.sample('b', prompt(), (0, 7), K, PLAIN)
        )

    a, b = asyncio.run(both())
    assert ids(a) == ids(ask(fresh(params), (prompt(), (0, 7)))[0]) != ids(b)
    assert ids(b) == ids(ask(fresh(weights(1)), (prompt(), (0, 7)))[0])
    assert (a[0].version, b[0].version) == (0, 9)


# --- compiles and counters


def test_any_number_of_requests_is_served_by_as_many_compiled_sizes_as_there_are_buckets(params, monkeypatch):
    """With buckets of 2 and 4 prompts: 5 requests run as 4 and 1, 13 as 4, 4, 4 and 1."""
    monkeypatch.setattr(jax_engine, 'ROWS', (2, 4))
    engine = fresh(params)
    short = SamplingParams(2)
    before = generate._cache_size()
    alone = [ids(ask(engine, (prompt('T>'), (8, i), short, 2))[0]) for i in range(13)]
    for count in (1, 2, 3, 4, 5, 13):
        told = ask(engine, *[(prompt('T>'), (8, i), short, 2) for i in range(count)])
        assert [ids(answers) for answers in told] == alone[:count]
    assert generate._cache_size() - before <= 2
    counted = engine.metrics()
    assert (counted['compiles/sample'], counted['batches']) == (2, 13 + 1 + 1 + 1 + 1 + 2 + 4)


def test_waiting_prompts_are_cut_into_the_least_padding_and_then_the_fewest_batches(monkeypatch):
    monkeypatch.setattr(jax_engine, 'ROWS', (32, 128))
    told = {waiting: batch_rows(waiting, jax_engine.ROWS) for waiting in (0, 32, 33, 64, 97, 128, 129, 300)}
    large, small = 128, 32
    assert told == {
        0: [], 32: [small], 33: [small, small], 64: [small, small], 97: [large], 128: [large], 129: [large, small],
        300: [large, large, small, small],
    }  # fmt: skip


def test_counters_count_what_was_returned_and_start_again(engine):
    engine.metrics()
    told = ask(engine, (prompt(), (0, 1)), (prompt('T>'), (0, 2)))
    counted = engine.metrics()
    assert counted['tokens_sampled'] == sum(len(answer.ids) for answers in told for answer in answers)
    assert (counted['prompts'], counted['batches']) == (2, 1)
    assert engine.metrics()['tokens_sampled'] == 0


# --- failures are typed and nobody waits for ever


def test_an_unknown_policy_and_an_empty_prompt_are_engine_errors_that_say_what_is_there(engine):
    with pytest.raises(EngineError, match=r"policy 'zz' has no weights here; loaded: \['a'\]"):
        asyncio.run(engine.sample('zz', prompt(), (0, 1), K, PLAIN))
    with pytest.raises(EngineError, match="prompt of role 'plan' is empty"):
        asyncio.run(engine.sample('a', Prompt('plan', (), ()), (0, 1), K, PLAIN))


def test_weights_that_do_not_fit_fail_every_waiting_request_and_the_engine_lives_on(params):
    engine = fresh({'embedding': params['embedding']})

    async def all_of():
        asked = [engine.sample('a', prompt(), (0, i), K, PLAIN) for i in range(3)]
        return await asyncio.wait_for(asyncio.gather(*asked, return_exceptions=True), timeout=300)

    assert [type(result) for result in asyncio.run(all_of())] == [EngineError] * 3
    engine.load('a', params, 1)
    assert ids(ask(engine, (prompt(), (0, 7)))[0]) == ids(ask(fresh(params), (prompt(), (0, 7)))[0])


def test_an_id_that_the_tokenizer_does_not_know_is_an_engine_error(params):
    class Small(TinyTokenizer):
        def decode(self, ids: Sequence[int]) -> str:
            return ''.join(('a', 'b')[i] for i in ids)

    with pytest.raises(EngineError, match='sampling: IndexError'):
        ask(fresh(params, Small()), (prompt(), (0, 7)))


def test_a_spread_heats_the_candidates_of_a_group_in_equal_ratios_and_leaves_a_single_one_alone():
    """Four candidates from 0.5 to 4 times that: 0.5, 1, 2 and 4 in steps of the cube root of 8."""
    assert SamplingParams(temperature=0.5, spread=8).temperatures(4) == pytest.approx((0.5, 1.0, 2.0, 4.0))
    assert SamplingParams(temperature=0.5, spread=8).temperatures(1) == (0.5,)


@pytest.mark.parametrize(
    'settings, reason',
    [
        ({'max_tokens': 0}, 'at least one token'),
        ({'temperature': -0.1}, '0 .greedy. or positive'),
        ({'spread': 0.5}, '1 .all candidates alike. or more'),
        ({'top_p': 0.0}, r'in \(0, 1\]'),
        ({'top_p': 1.1}, r'in \(0, 1\]'),
        ({'top_k': -1}, '0 .keep all. or a positive'),
        ({'stop': ('a', '')}, 'an empty stop string would end every answer'),
    ],
)
def test_impossible_sampling_parameters_are_refused_at_birth(settings, reason):
    with pytest.raises(ValueError, match=reason):
        SamplingParams(**settings)


def test_a_request_that_waits_during_a_load_is_answered_by_the_new_weights_alone(params):
    """A18 with a request in flight, behind a prefix of 200 tokens that the old policy has read before."""
    new, shared = weights(1), prompt((OPEN * 20)[:200])
    engine = fresh(params)
    (before,) = ask(engine, (shared, (0, 7)))

    async def loaded_meanwhile() -> tuple[Answer, ...]:
        waiting = asyncio.create_task(engine.sample('a', shared, (0, 7), K, PLAIN))
        await asyncio.sleep(0)
        engine.load('a', new, 5)
        return await asyncio.wait_for(waiting, timeout=300)

    answers, (wanted,) = asyncio.run(loaded_meanwhile()), ask(fresh(new), (shared, (0, 7)))
    assert ids(answers) == ids(wanted) != ids(before)
    for this, that in zip(answers, wanted, strict=True):
        assert this.logps == pytest.approx(that.logps, abs=1e-6)
    assert {answer.version for answer in answers} == {5}


def test_while_it_is_held_an_engine_gathers_and_then_answers_all_in_one_batch(params):
    async def ask_late(engine: JaxEngine) -> None:
        first = asyncio.create_task(engine.sample('a', prompt(), (0,), K, PLAIN))
        with engine.held():
            await asyncio.sleep(0.05)
            assert not first.done()
            second = asyncio.create_task(engine.sample('a', prompt(), (1,), K, PLAIN))
            await asyncio.sleep(0)
        await asyncio.gather(first, second)

    engine = fresh(params)
    asyncio.run(ask_late(engine))
    assert engine.metrics()['batches'] == 1


def test_a_hold_that_goes_on_does_not_keep_others_from_their_answers(params):
    """A world that waits long holds up only itself."""

    async def ask(engine: JaxEngine) -> None:
        with engine.held():
            await asyncio.wait_for(engine.sample('a', prompt(), (0,), K, PLAIN), timeout=120)

    asyncio.run(ask(fresh(params)))


# --- wide models


def test_a_wide_model_is_sampled_in_small_batches_and_answers_as_it_would_without_unrolling(monkeypatch):
    """Width 256 is decoded by unrolled blocks; with that switched off the ids are the same, log-probs to rounding."""
    arch = Architecture(len(TOKENIZER), width=256, layers=2, heads=2, kv_heads=1, head_dim=8, ffn=16)
    module = Transformer(arch)
    assert jax_engine.rows_of(module) == (8, 32, 128) and jax_engine.unrolls(module)
    narrower = Transformer(dataclasses.replace(arch, width=248))
    assert jax_engine.rows_of(narrower) == jax_engine.ROWS and not jax_engine.unrolls(narrower)
    assert [batch_rows(n, jax_engine.WIDE_ROWS) for n in (1, 8, 25, 33)] == [[8], [8], [32], [32, 8]]
    params = nn.unbox(module.init(jax.random.key(4), jnp.zeros((1, 2), jnp.int32))['params'])
    requests = [(prompt('T>'), (0, i), SamplingParams(6), 3) for i in range(3)]

    def told() -> list[tuple[Answer, ...]]:
        engine = JaxEngine(module, TOKENIZER, jax.random.key(3))
        engine.load('a', params, 0)
        return ask(engine, *requests)

    wide = told()
    monkeypatch.setattr(jax_engine, 'unrolls', lambda module: False)
    narrow = told()
    assert [ids(answers) for answers in wide] == [ids(answers) for answers in narrow]
    for this, that in zip(wide, narrow, strict=True):
        for one, other in zip(this, that, strict=True):
            assert one.logps == pytest.approx(other.logps, abs=1e-4)
