"""Several adapters in the embedded engine: one batch, one compiled step, and each policy's answers as if alone."""

import asyncio
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen as nn

from mallm.models import lora
from mallm.models.config import Architecture
from mallm.models.lora import Lora
from mallm.models.transformer import Transformer
from mallm.rollout import jax_engine
from mallm.rollout.chat import TinyTokenizer
from mallm.rollout.engine import SamplingParams
from mallm.rollout.jax_engine import JaxEngine, generate
from mallm.types import Answer, Prompt

TOKENIZER = TinyTokenizer()
KIND = Lora(3, 6.0)
WHOLE = Transformer(Architecture(len(TOKENIZER), width=16, layers=2, heads=2, kv_heads=1, head_dim=8, ffn=32))
MODULE = WHOLE.clone(lora=KIND)
PARAMS = SamplingParams(5)


@functools.cache
def born() -> Any:
    return nn.unbox(jax.jit(MODULE.init)(jax.random.key(0), jnp.zeros((1, 2), jnp.int32)))


def adapter(seed: int) -> Any:
    draw = np.random.default_rng(seed)
    return jax.tree.map(lambda leaf: np.float32(draw.normal(size=leaf.shape) * 0.4), born()['lora'])


@pytest.fixture(autouse=True)
def small_batches(monkeypatch) -> None:
    monkeypatch.setattr(jax_engine, 'ROWS', (8,))


def engine(*policies: str) -> JaxEngine:
    """An engine with the adapter `adapter(i)`, version i, of the i-th policy."""
    made = JaxEngine(MODULE, TOKENIZER, jax.random.key(3))
    made.load_base(born()['params'])
    for i, policy in enumerate(policies):
        made.load(policy, adapter(i), i)
    return made


def ask(engine: JaxEngine, *requests: tuple[str, tuple[int, ...]]) -> list[tuple[Answer, ...]]:
    """Answers to requests (policy, path) for one prompt that wait at the same time."""
    prompt = Prompt('plan', (), TOKENIZER.encode('#. @ $/  #>'))

    async def all_of() -> list[tuple[Answer, ...]]:
        asked = [engine.sample(policy, prompt, path, 2, PARAMS) for policy, path in requests]
        return list(await asyncio.wait_for(asyncio.gather(*asked), timeout=300))

    return asyncio.run(all_of())


def ids(answers: tuple[Answer, ...]) -> list[tuple[int, ...]]:
    return [answer.ids for answer in answers]


def test_batches_and_compiles_do_not_grow_with_the_number_of_adapters_in_use():
    three = engine('a', 'b', 'c')
    known = generate._cache_size()
    for policies in (['a'] * 6, ['a', 'b'] * 3, ['a', 'b', 'c', 'c', 'b', 'a'], ['c']):
        ask(three, *[(policy, (0, i)) for i, policy in enumerate(policies)])
        counted = three.metrics()
        assert (counted['batches'], counted['prompts'], counted['compiles/sample']) == (1, len(policies), 1)
    assert generate._cache_size() - known == 1


def test_a_policy_answers_in_company_what_it_answers_alone_and_what_its_merged_weights_answer():
    both = engine('a', 'b')
    requests = [('a', (0, 7)), ('b', (0, 7)), ('b', (0, 8)), ('a', (0, 8))]
    together = ask(both, *requests)
    for (policy, path), answers in zip(requests, together, strict=True):
        assert ask(both, (policy, path)) == [answers], 'alone in its batch: the same to the last bit'
    for i, policy in enumerate('ab'):
        merged = JaxEngine(WHOLE, TOKENIZER, jax.random.key(3))
        merged.load(policy, lora.merge(born()['params'], adapter(i), KIND), i)
        mine = [(answers, path) for (owner, path), answers in zip(requests, together, strict=True) if owner == policy]
        for answers, path in mine:
            (wanted,) = ask(merged, (policy, path))
            assert ids(answers) == ids(wanted)
            for this, that in zip(answers, wanted, strict=True):
                assert this.logps == pytest.approx(that.logps, abs=1e-4)
    assert ids(together[0]) != ids(together[1]), 'one place, two policies'


def test_a_load_replaces_one_adapter_and_stacks_once_for_all_batches_until_the_next(monkeypatch):
    stacks = []
    stack = lora.stack
    monkeypatch.setattr(lora, 'stack', lambda adapters: stacks.append(len(adapters)) or stack(adapters))
    both = engine('a', 'b')
    before = ask(both, ('a', (0, 1)), ('b', (0, 1)))
    ask(both, ('b', (0, 2)))
    assert stacks == [2]
    both.load('a', adapter(9), 9)
    after = ask(both, ('a', (0, 1)), ('b', (0, 1)))
    assert stacks == [2, 2]
    assert ids(after[0]) != ids(before[0]) and after[1] == before[1]
    assert [answers[0].version for answers in (*before, *after)] == [0, 1, 9, 1]


def test_one_policy_needs_no_stack_and_answers_as_its_merged_weights_do():
    alone, merged = engine('a'), JaxEngine(WHOLE, TOKENIZER, jax.random.key(3))
    merged.load('a', lora.merge(born()['params'], adapter(0), KIND), 0)
    assert ids(ask(alone, ('a', (0, 7)))[0]) == ids(ask(merged, ('a', (0, 7)))[0])


def test_an_adapter_without_a_base_or_of_another_one_is_refused_when_it_is_loaded():
    with pytest.raises(ValueError, match="policy 'a': there is no base under it yet; call load_base first"):
        JaxEngine(MODULE, TOKENIZER, jax.random.key(3)).load('a', adapter(0), 0)
    rank_1 = jax.tree.map(lambda leaf: leaf[:, :1, :1], adapter(0))
    with pytest.raises(ValueError, match=r'does not fit its base.*o/a is .*rank and targets'):
        engine('a').load('b', rank_1, 0)
