"""SGLang servers for tests (CPU, see launch/cpu), and what the learner says of the same tokens."""

import asyncio
import contextlib
import dataclasses
import pathlib
import time
from collections.abc import Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import linen as nn

from mallm import servers
from mallm.models.config import Architecture
from mallm.models.lora import Lora
from mallm.models.transformer import Transformer
from mallm.rollout.chat import TinyTokenizer
from mallm.rollout.engine import SamplingParams
from mallm.rollout.fleet import Limits
from mallm.rollout.sglang import SGLangEngine
from mallm.serving import Publisher, shape_of
from mallm.types import Answer, Prompt

TOKENIZER = TinyTokenizer()
ARCH = Architecture(len(TOKENIZER), width=32, layers=2, heads=2, kv_heads=1, head_dim=16, ffn=64)
WHOLE = Transformer(ARCH)
KIND = Lora(4, 8.0, rs=True)
MODULE = WHOLE.clone(lora=KIND)
QUICK = Limits(request_s=60.0, connect_s=30.0, tries=4, backoff_s=0.05, patience_s=2.0)
PROMPT = Prompt('plan', (), TOKENIZER.encode('#. @ $/  #>'))
GREEDY = SamplingParams(8, 0.0)
START_S = 600.0


@jax.jit
def born(key: jax.Array) -> Any:
    return nn.unbox(MODULE.init(key, jnp.zeros((1, 2), jnp.int32)))


def weights(seed: int) -> Any:
    params = born(jax.random.key(seed))['params']
    return params | {'embedding': params['embedding'] * 3}  # farther from uniform than at birth


def adapter(seed: int) -> Any:
    draw = np.random.default_rng(seed)
    return jax.tree.map(lambda leaf: np.float32(draw.normal(size=leaf.shape) * 0.3), born(jax.random.key(0))['lora'])


@jax.jit
def forward(variables: Any, row_1T: jax.Array) -> jax.Array:
    module = MODULE if 'lora' in variables else WHOLE
    return module.apply(variables, row_1T)[0]


def logps(variables: Any, prompt: Prompt, ids: Sequence[int], temperature: float = 1.0) -> np.ndarray:
    """The learner's own log-probability of each id of an answer, [S]."""
    row = np.zeros((1, 48), np.int32)
    row[0, : len(prompt.ids) + len(ids)] = [*prompt.ids, *ids]
    start = len(prompt.ids) - 1
    logits_SV = np.asarray(forward(variables, row))[start : start + len(ids)].astype(np.float64) / temperature
    logits_SV -= logits_SV.max(-1, keepdims=True)
    logp_SV = logits_SV - np.log(np.exp(logits_SV).sum(-1, keepdims=True))
    return logp_SV[np.arange(len(ids)), list(ids)]


def greedy(variables: Any, prompt: Prompt, limit: int = GREEDY.max_tokens) -> tuple[int, ...]:
    """The learner's own most likely answer."""
    ids: list[int] = []
    row = np.zeros((1, 48), np.int32)
    while len(ids) < limit and TOKENIZER.end not in ids:
        row[0, : len(prompt.ids) + len(ids)] = [*prompt.ids, *ids]
        ids.append(int(np.asarray(forward(variables, row))[len(prompt.ids) + len(ids) - 1].argmax()))
    return tuple(ids)


@dataclasses.dataclass(frozen=True)
class Bench:
    """The model that servers are started with, and where they write what they say."""

    model: str
    logs: pathlib.Path

    def start(self, name: str, port: int = 0) -> servers.Started:
        spec = servers.Spec(self.model, adapters=4, rank=KIND.rank, port=port, tokens=16384)
        one, process = servers.start(spec, self.logs / f'{name}.log', tethered=True)
        self.kept.append((one, process))
        return one

    kept: list = dataclasses.field(default_factory=list)


@contextlib.contextmanager
def client(
    bench: Bench, *urls: str, policies: Sequence[str] = (), limits: Limits = QUICK, key: str = ''
) -> Iterator[SGLangEngine]:
    """A client of one policy 'shared' with full weights, or of adapters over a base by the names given."""
    root = pathlib.Path(bench.model).parents[1]
    publish = Publisher(root / f'{time.monotonic_ns():x}', MODULE if policies else WHOLE)
    endpoints = {policy: list(urls) for policy in policies or ('shared',)}
    engine = SGLangEngine(
        TOKENIZER, ARCH.vocab, endpoints, publish, adapters=bool(policies), shape=shape_of(ARCH), limits=limits,
        key=key or servers.api_key(),
    )  # fmt: skip
    with contextlib.closing(engine):
        yield engine


def ask(engine: SGLangEngine, policy: str, *prompts: Prompt, k: int = 1, params: SamplingParams = GREEDY) -> list[Any]:
    """For each of the prompts, all asked at once, its answers, or the error that came in their place."""

    async def every() -> list[Any]:
        asked = [engine.sample(policy, prompt, (0, i), k, params) for i, prompt in enumerate(prompts)]
        return list(await asyncio.gather(*asked, return_exceptions=True))

    return asyncio.run(every())


def one(engine: SGLangEngine, policy: str = 'shared', prompt: Prompt = PROMPT, **how: Any) -> tuple[Answer, ...]:
    (answers,) = ask(engine, policy, prompt, **how)
    if isinstance(answers, BaseException):
        raise answers
    return answers


def boards(count: int) -> list[Prompt]:
    draw = np.random.default_rng(5)
    return [Prompt('plan', (), tuple(int(i) for i in draw.integers(2, ARCH.vocab, 12))) for _ in range(count)]
