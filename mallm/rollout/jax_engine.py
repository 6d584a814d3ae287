"""The embedded engine: jitted prefill and KV-cached decode, batched over everything that waits.

Requests come from many environments at once. They gather until no coroutine has anything to add, then run as a few
batches of bucketed shape. A prompt is encoded once for its K answers. Row randomness comes from `rng.keys_for`, so a
request draws the same answers whatever it is batched with.
"""

import asyncio
import contextlib
import dataclasses
import functools
import math
import operator
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from mallm import rng
from mallm.errors import EngineError, boundary
from mallm.models import cache, decode, lora
from mallm.models.transformer import Transformer
from mallm.rollout.chat import Tokenizer, require_vocabulary
from mallm.rollout.engine import SamplingParams
from mallm.rollout.stops import cut_at_stop
from mallm.types import Answer, Prompt

ROWS = (32, 128)
"""Sizes of batches, in prompts. Waiting prompts are cut into batches of these sizes, and the last one is padded."""

WIDE_ROWS = (8, 32, 128)
"""The same for wide models, where a padded row costs as much as a real one and a compiled shape little beside it."""

WIDE = 256
"""Models of this width or more are sampled in WIDE_ROWS: there arithmetic and memory traffic decide, in narrower ones
the number of operations."""

HOLD_S = 0.25
"""For so long after the last request worlds that act elsewhere are waited for; a slow one then holds up only itself."""


def bucket_tokens(length: int) -> int:
    """Padded prompt length: a multiple of 16, so that a few shapes serve every prompt."""
    return -(-length // 16) * 16


def rows_of(module: Transformer) -> Sequence[int]:
    """Sizes of this model's batches."""
    return WIDE_ROWS if module.arch.width >= WIDE else ROWS


def unrolls(module: Transformer) -> bool:
    """Whether decoding is worth a second copy of the weights and a longer compilation (see `models.decode`).

    That was measured on CPUs alone, so it is done on them alone.
    """
    return module.arch.width >= WIDE and jax.default_backend() == 'cpu'


def batch_rows(waiting: int, rows: Sequence[int]) -> list[int]:
    """Sizes of the batches that take `waiting` prompts: least padding first, then fewest batches; 64 are two of 32."""
    sizes = []
    for size in reversed(rows):
        while waiting > size - rows[0]:
            sizes.append(size)
            waiting -= size
    return sizes


def keep_mask(logits_V: jax.Array, top_p: jax.Array, top_k: jax.Array) -> jax.Array:
    """True for tokens that top-k and then nucleus (top-p) filtering leave; at least the most likely one."""
    order = jnp.argsort(-logits_V)
    probs = jax.nn.softmax(logits_V[order])
    rank = jnp.arange(logits_V.shape[-1], dtype=top_k.dtype)
    within_k = (top_k <= 0) | (rank < top_k)
    probs = jnp.where(within_k, probs, 0.0)
    probs = probs / probs.sum()
    kept = within_k & ((jnp.cumsum(probs) - probs) < top_p)
    return jnp.zeros_like(kept).at[order].set(kept)


def most_likely(scores_NV: jax.Array) -> jax.Array:
    """`scores_NV.argmax(-1)` as two plain reductions: XLA turns those, but not its argmax, into CPU vector code."""
    V = scores_NV.shape[-1]
    is_peak = scores_NV == scores_NV.max(-1, keepdims=True)
    return jnp.where(is_peak, jnp.arange(V, dtype=jnp.int32)[None], V - 1).min(-1)


def draw(
    logits_NV: jax.Array, keys_N: jax.Array, temperature_N: jax.Array, filters: tuple[jax.Array, jax.Array] | None
) -> tuple[jax.Array, jax.Array]:
    """One token a row and its log-probability (nats) under the distribution it is drawn from.

    At temperature 0 that distribution is a point mass on the most likely token, so the log-probability is 0.
    `filters` holds top_p and top_k of each row, or is None when no row uses them. A row takes one random number, and
    looks for it among running sums of its probabilities: first those of blocks of tokens, then those inside a block.
    """
    greedy_N = temperature_N == 0
    tempered = logits_NV / jnp.where(greedy_N, 1.0, temperature_N)[:, None]
    if filters is not None:
        tempered = jnp.where(jax.vmap(keep_mask)(tempered, *filters), tempered, -jnp.inf)
    N, V = tempered.shape
    size = 1 << math.ceil(math.log2(V) / 2)
    peak_N = tempered.max(-1)
    weight_NV = jnp.exp(tempered - peak_N[:, None])
    weight_NBb = jnp.pad(weight_NV, ((0, 0), (0, -V % size))).reshape(N, -1, size)
    weight_NB = weight_NBb.sum(-1)
    total_N = weight_NB.sum(-1)
    block_N, rest_N = place_of(weight_NB, jax.vmap(jax.random.uniform)(keys_N) * total_N)
    inside_N, _ = place_of(jnp.take_along_axis(weight_NBb, block_N[:, None, None], axis=1)[:, 0], rest_N)
    drawn_N = jnp.minimum(block_N * size + inside_N, V - 1)
    token_N = jnp.where(greedy_N, most_likely(logits_NV), drawn_N)
    logp_N = jnp.take_along_axis(tempered, token_N[:, None], axis=1)[:, 0] - peak_N - jnp.log(total_N)
    return token_N, jnp.where(greedy_N, 0.0, logp_N)


def place_of(weight_NB: jax.Array, mass_N: jax.Array) -> tuple[jax.Array, jax.Array]:
    """The first place up to which weights sum to more than a mass, and how much of the mass is left there.

    A place of weight 0 is never taken, and a mass that rounding made too large takes the last one that has some.
    """
    B = weight_NB.shape[1]
    upto_NB, is_some = jnp.cumsum(weight_NB, axis=-1), weight_NB > 0
    most_N = jnp.where(is_some, upto_NB, 0.0).max(-1)
    mass_N = jnp.minimum(mass_N, most_N * (1 - 2**-22))
    is_past = (upto_NB > mass_N[:, None]) & is_some
    place_N = jnp.where(is_past, jnp.arange(B, dtype=jnp.int32)[None], B - 1).min(-1)
    before_N = jnp.take_along_axis(upto_NB - weight_NB, place_N[:, None], axis=1)[:, 0]
    return place_N, mass_N - before_N


def is_any(ids_N: jax.Array, ends: tuple[int, ...]) -> jax.Array:
    """Which ids end an answer."""
    return functools.reduce(operator.or_, [ids_N == end for end in ends])


def continuing(
    module: Transformer, variables: Any, prefix: cache.Prefix, empty: cache.KeyValues, unrolled: bool
) -> tuple[Any, Callable[[jax.Array, Any, jax.Array], tuple[jax.Array, Any]]]:
    """The answers' empty cache, and extend(tokens_GK, cache, at) -> (hidden_GKSD, cache)."""
    if not unrolled:
        return empty, lambda tokens_GK, past, at: module.apply(
            variables, tokens_GK[:, :, None], prefix, past, at, method=Transformer.extend
        )
    blocks = decode.unroll(module, variables, prefix)
    return decode.apart(module, empty), lambda tokens_GK, past, at: decode.extend(
        module, variables, blocks, tokens_GK, prefix, past, at
    )


@functools.partial(jax.jit, static_argnames=('module', 'k', 'limit', 'ends', 'filtered', 'unrolled'))
def generate(
    variables: Any,
    prompts_GP: jax.Array,
    lengths_G: jax.Array,
    paths_GI: jax.Array,
    root: jax.Array,
    temperatures_GK: jax.Array,
    filters_G2: jax.Array,
    picked_GR: jax.Array | None,
    *,
    module: Transformer,
    k: int,
    limit: int,
    ends: tuple[int, ...],
    filtered: bool,
    unrolled: bool = False,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """K answers to each prompt: ids_GKS, log-probs_GKS (nats) and lengths_GK, the end token counted.

    `filters_G2` holds top_p and top_k of each prompt, `picked_GR` its adapter's ranks where several are stacked. Token
    t of answer j of the prompt at path p is drawn with `key_for(root, *p, j, t)`. Decoding stops as soon as every row
    has ended. Rows of length 0 are padding. `unrolled` decodes by `models.decode`.
    """
    G = prompts_GP.shape[0]
    keys_N = jax.vmap(lambda key: jax.vmap(lambda j: jax.random.fold_in(key, j))(jnp.arange(k)))(
        rng.keys_for(root, paths_GI)
    ).reshape(G * k)
    temperature_N = temperatures_GK.reshape(G * k)
    top_p_N, top_k_N = (jnp.repeat(filter_G, k) for filter_G in filters_G2.T)
    filters = (top_p_N, top_k_N) if filtered else None
    padding_N = jnp.repeat(lengths_G == 0, k)

    def step(hidden: jax.Array, t: jax.Array) -> tuple[jax.Array, jax.Array]:
        logits_NV = module.apply(variables, hidden, method=Transformer.logits)
        return draw(logits_NV, jax.vmap(lambda key: jax.random.fold_in(key, t))(keys_N), temperature_N, filters)

    true_G = jnp.maximum(lengths_G, 1)
    last_GD, prefix = module.apply(variables, prompts_GP, true_G, picked_GR, method=Transformer.encode)
    token_N, logp_N = step(jnp.repeat(last_GD, k, axis=0), jnp.int32(0))
    ids_NS = jnp.zeros((G * k, limit), jnp.int32).at[:, 0].set(token_N)
    logps_NS = jnp.zeros((G * k, limit), jnp.float32).at[:, 0].set(logp_N)
    empty = cache.empty(module.arch, G, k, limit, module.dtype)
    past, extend = continuing(module, variables, prefix, empty, unrolled)

    def unfinished(state: tuple) -> jax.Array:
        t, *_, done_N, _ = state
        return (t < limit) & ~done_N.all()

    def next_token(state: tuple) -> tuple:
        t, ids_NS, logps_NS, lengths_N, done_N, past = state
        token_N = jax.lax.dynamic_index_in_dim(ids_NS, t - 1, axis=1, keepdims=False)
        hidden, past = extend(token_N.reshape(G, k), past, t - 1)
        new_N, logp_N = step(hidden.reshape(G * k, -1), t)
        new_N, logp_N = jnp.where(done_N, 0, new_N), jnp.where(done_N, 0.0, logp_N)
        ids_NS = jax.lax.dynamic_update_slice(ids_NS, new_N[:, None], (0, t))
        logps_NS = jax.lax.dynamic_update_slice(logps_NS, logp_N[:, None], (0, t))
        grown_N = lengths_N + (~done_N).astype(jnp.int32)
        return t + 1, ids_NS, logps_NS, grown_N, done_N | is_any(new_N, ends), past

    start = (jnp.int32(1), ids_NS, logps_NS, jnp.ones(G * k, jnp.int32), is_any(token_N, ends) | padding_N, past)
    _, ids_NS, logps_NS, lengths_N, _, _ = jax.lax.while_loop(unfinished, next_token, start)
    return ids_NS.reshape(G, k, limit), logps_NS.reshape(G, k, limit), lengths_N.reshape(G, k)


@dataclasses.dataclass(frozen=True)
class Request:
    """One waiting prompt."""

    policy: str
    prompt: Prompt
    path: tuple[int, ...]
    k: int
    params: SamplingParams
    reply: 'asyncio.Future[tuple[Answer, ...]]'

    @property
    def shape(self) -> tuple:
        """Requests of equal shape may share a batch, if one tree of weights serves them."""
        return (bucket_tokens(len(self.prompt.ids)), self.k, self.params.max_tokens, len(self.path),
                self.params.truncates)  # fmt: skip


class JaxEngine:
    """Samples any number of policies of one architecture inside this process.

    Where the module has LoRA, a policy's weights are its adapter, the base comes from `load_base`, and the requests of
    all policies share batches and compiled shapes.
    """

    def __init__(self, module: Transformer, tokenizer: Tokenizer, root: jax.Array) -> None:
        require_vocabulary(tokenizer, module.arch.vocab)
        self._module = module
        self._tokenizer = tokenizer
        self._root = root
        self._weights: dict[str, tuple[Any, int]] = {}
        self._base: Any = None
        self._stacked: Any = None
        self._waiting: list[Request] = []
        self._drain: asyncio.Task[None] | None = None
        self._holds = 0
        self._counts: Counter[str] = Counter()
        self._shapes: set[tuple] = set()

    def load_base(self, base: Any) -> None:
        """The frozen parameters under every adapter; kept as they are, without a copy."""
        self._base = base

    def load(self, policy: str, weights: Any, version: int) -> None:
        """Replaces one policy's weights, or its adapter.

        Raises:
          ValueError: an adapter comes before its base, or is one of another base or kind.
        """
        if self._module.lora is not None:
            if self._base is None:
                raise ValueError(f'adapter of policy {policy!r}: there is no base under it yet; call load_base first')
            lora.refuse_misfit(weights, self._base, self._module.lora)
        self._weights[policy], self._stacked = (weights, version), None

    def _variables(self, requests: Sequence[Request], rows: int) -> tuple[Any, np.ndarray | None]:
        """What the module is applied to, and for each row the ranks of its adapter where several are stacked."""
        adapter = self._module.lora
        if adapter is None or len(self._weights) == 1:
            return lora.variables(self._weights[requests[0].policy][0], self._base), None
        if self._stacked is None:
            self._stacked = lora.stack([weights for weights, _ in self._weights.values()])
        number = {policy: i for i, policy in enumerate(self._weights)}
        which = np.zeros(rows, np.int32)
        which[: len(requests)] = [number[request.policy] for request in requests]
        return lora.variables(self._stacked, self._base), lora.picks(which, len(number), adapter)

    def metrics(self) -> Mapping[str, float]:
        counts, self._counts = self._counts, Counter()
        return {
            'tokens_sampled': counts['tokens'],
            'prompts': counts['prompts'],
            'batches': counts['batches'],
            'seconds/sample': counts['nanoseconds'] / 1e9,
            'compiles/sample': len(self._shapes),
        }

    async def sample(
        self, policy: str, prompt: Prompt, path: tuple[int, ...], k: int, params: SamplingParams
    ) -> tuple[Answer, ...]:
        if policy not in self._weights:
            raise EngineError(f'policy {policy!r} has no weights here; loaded: {sorted(self._weights)}')
        if not prompt.ids:
            raise EngineError(f'the prompt of role {prompt.role!r} is empty: it needs at least one token')
        reply = asyncio.get_running_loop().create_future()
        self._waiting.append(Request(policy, prompt, path, k, params, reply))
        if self._drain is None or self._drain.done():
            self._drain = asyncio.create_task(self._run_when_quiet())
        return await reply

    @contextlib.contextmanager
    def held(self) -> Iterator[None]:
        """Gathers meanwhile: worlds act elsewhere, and their next prompts belong into the same batches. See HOLD_S."""
        self._holds += 1
        try:
            yield
        finally:
            self._holds -= 1

    async def _run_when_quiet(self) -> None:
        """Waits until a turn of the event loop adds no request, then answers all that wait."""
        seen, since = -1, time.monotonic()
        while seen != len(self._waiting) or (self._holds and time.monotonic() - since < HOLD_S):
            if seen != len(self._waiting):
                seen, since = len(self._waiting), time.monotonic()
            await asyncio.sleep(0.001 if self._holds else 0)
        waiting, self._waiting = self._waiting, []
        by_shape: dict[tuple, list[Request]] = {}
        for request in waiting:
            served_by = request.policy if self._module.lora is None else None
            by_shape.setdefault((served_by, *request.shape), []).append(request)
        for requests in by_shape.values():
            for rows in batch_rows(len(requests), rows_of(self._module)):
                self._answer(requests[:rows])
                requests = requests[rows:]

    def _answer(self, requests: Sequence[Request]) -> None:
        try:
            with boundary(EngineError, 'sampling'):
                answers = self._generate(requests)
        except EngineError as error:
            for request in requests:
                if not request.reply.done():
                    request.reply.set_exception(error)
            return
        for request, answer in zip(requests, answers, strict=True):
            if not request.reply.done():
                request.reply.set_result(answer)

    def _generate(self, requests: Sequence[Request]) -> list[tuple[Answer, ...]]:
        started = time.perf_counter_ns()
        first = requests[0]
        rows = next(size for size in rows_of(self._module) if size >= len(requests))
        prompts = np.zeros((rows, bucket_tokens(len(first.prompt.ids))), np.int32)
        lengths, paths = np.zeros(rows, np.int32), np.zeros((rows, len(first.path)), np.int32)
        temperatures = np.ones((rows, first.k), np.float32)
        filters = np.tile(np.array([1, 0], np.float32), (rows, 1))
        for i, request in enumerate(requests):
            ids, p = request.prompt.ids, request.params
            prompts[i, : len(ids)], lengths[i], paths[i] = ids, len(ids), request.path
            temperatures[i], filters[i] = p.temperatures(first.k), (p.top_p, p.top_k)
        versions = [self._weights[request.policy][1] for request in requests]
        variables, picked = self._variables(requests, rows)
        self._shapes.add((rows, 0 if picked is None else picked.shape[1], *first.shape))
        ids, logps, ends = jax.device_get(
            generate(
                variables,
                prompts,
                lengths,
                paths,
                self._root,
                temperatures,
                filters,
                picked,
                module=self._module,
                k=first.k,
                limit=first.params.max_tokens,
                ends=self._tokenizer.ends,
                filtered=first.params.truncates,
                unrolled=unrolls(self._module),
            )
        )
        answers = [
            tuple(
                self._answer_of(ids[i, j, : ends[i, j]], logps[i, j], versions[i], request.params)
                for j in range(first.k)
            )
            for i, request in enumerate(requests)
        ]
        self._counts['tokens'] += int(ends[: len(requests)].sum())
        self._counts['prompts'] += len(requests)
        self._counts['batches'] += 1
        self._counts['nanoseconds'] += time.perf_counter_ns() - started
        return answers

    def _answer_of(self, ids: np.ndarray, logps: np.ndarray, version: int, params: SamplingParams) -> Answer:
        kept, text, stopped = cut_at_stop(ids.tolist(), params.stop, self._tokenizer)
        finish = 'stop' if stopped or kept[-1] in self._tokenizer.ends else 'length'
        return Answer(tuple(kept), tuple(logps[: len(kept)].tolist()), text, finish, version)
