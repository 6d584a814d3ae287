"""What is asked of an SGLang server for one prompt, and what its reply has to be. Pure functions of plain values.

A reply is believed only after its ids, log-probabilities, length and weight version were checked: a sampler that
answers wrongly would be trained on without a word.
"""

import contextlib
import json
import math
import pathlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from mallm.errors import EngineError
from mallm.rollout.chat import Tokenizer
from mallm.rollout.engine import SamplingParams
from mallm.rollout.stops import cut_at_stop
from mallm.types import Answer, Prompt


class UnreachableError(EngineError):
    """Nobody listens there, or the connection broke in the middle of a reply."""

    kind = 'engine unreachable'


class OverdueError(EngineError):
    """No whole reply came in time."""

    kind = 'engine overdue'


class BusyError(EngineError):
    """The server says that it cannot answer now."""

    kind = 'engine busy'


class MalformedError(EngineError):
    """A reply that cannot be right: no JSON, wrong lengths, impossible log-probabilities or ids."""

    kind = 'engine malformed'


class StaleError(EngineError):
    """A reply sampled with other weights than the ones loaded."""

    kind = 'engine stale'


class RefusedError(EngineError):
    """The server says that what was asked is wrong; asking again would not help."""

    kind = 'engine refused'


class MisfitError(EngineError):
    """The server runs another model or vocabulary than the learner."""

    kind = 'engine misfit'


FAULTS = (UnreachableError, OverdueError, BusyError, MalformedError, StaleError, RefusedError, MisfitError)
PASSING = (UnreachableError, OverdueError, BusyError, MalformedError, StaleError)
"""Faults after which another try, here or at another server, may succeed."""


def request(
    prompt: Prompt, k: int, params: SamplingParams, *, ends: Sequence[int], adapter: str | None, stops: bool
) -> dict[str, Any]:
    """The body of one /generate: all K candidates, so that they share the prompt's place in the server's cache.

    Candidates of one temperature are one prompt with n = K, else a batch of the same ids. Where the server `stops` at
    stop strings it ends early. One without a tokenizer goes on, and so must one whose policy thinks, because a stop
    string in a thought ends nothing; the client cuts.
    """
    temperatures = params.temperatures(k)
    common: dict[str, Any] = {
        'max_new_tokens': params.max_tokens,
        'top_p': params.top_p,
        'top_k': params.top_k or -1,
        'stop_token_ids': list(ends),
        **({'stop': list(params.stop)} if params.stop and stops else {}),
    }
    body: dict[str, Any] = {'return_logprob': True, **({} if adapter is None else {'lora_path': adapter})}
    if len(set(temperatures)) == 1:
        drawn = common | {'temperature': temperatures[0], 'n': k}
        return body | {'input_ids': list(prompt.ids), 'sampling_params': drawn}
    each = [common | {'temperature': temperature} for temperature in temperatures]
    return body | {'input_ids': [list(prompt.ids)] * k, 'sampling_params': each}


def misfits(told: Mapping[str, Any], shape: Mapping[str, Any]) -> dict[str, Any]:
    """What a server says of its model, where that is not as in `shape` (fields of a Hugging Face config.json).

    /model_info tells the type; the rest stands in the model's config.json, where that can be read from here.
    """
    said: dict[str, Any] = {}
    with contextlib.suppress(OSError, ValueError):
        said |= json.loads((pathlib.Path(told['model_path']) / 'config.json').read_text())
    said['model_type'] = told.get('model_type')
    return {name: said[name] for name, value in shape.items() if name in said and said[name] != value}


def names(told: Any) -> list[str]:
    """What a server says that it can be asked for: its model, and the adapters that it has loaded."""
    try:
        return [one['id'] for one in told['data']]
    except (TypeError, KeyError) as cause:
        raise MalformedError(f'no list of models: {str(told)[:200]}') from cause


def answers(
    reply: Any,
    k: int,
    params: SamplingParams,
    tokenizer: Tokenizer,
    vocab: int,
    version_of: Callable[[str], int | None],
) -> tuple[Answer, ...]:
    """The K answers in a reply to `request`.

    Args:
      version_of: the number of a weight version by its name, None where a sampler must not have it.

    Raises:
      MalformedError, StaleError, BusyError (the server aborted an answer).
    """
    rows = reply if isinstance(reply, list) else [reply]
    if len(rows) != k:
        raise MalformedError(f'{k} answers were asked for and {len(rows)} came')
    return tuple(
        answer(row, temperature, params, tokenizer, vocab, version_of)
        for row, temperature in zip(rows, params.temperatures(k), strict=True)
    )


def answer(
    row: Any,
    temperature: float,
    params: SamplingParams,
    tokenizer: Tokenizer,
    vocab: int,
    version_of: Callable[[str], int | None],
) -> Answer:
    """One checked answer. At temperature 0 a draw is certain, so its log-probability is 0, as everywhere in mallm."""
    try:
        ids, meta = row['output_ids'], row['meta_info']
        pairs, finish = meta['output_token_logprobs'], meta['finish_reason']['type']
        count = meta['completion_tokens']
    except (TypeError, KeyError) as cause:
        raise MalformedError(f'a reply without {cause}: SGLang 0.5.23 writes it; is that what answers?') from cause
    if finish == 'abort':
        raise BusyError(f'the server aborted an answer: {meta["finish_reason"].get("message")}')
    logps = checked(ids, pairs, count, params.max_tokens, vocab)
    version, spans = versions(meta, len(ids), version_of)
    kept, text, stopped = cut_at_stop(ids, params.stop, tokenizer)
    ended = stopped or finish == 'stop' or kept[-1] in tokenizer.ends
    drawn = tuple(logps[: len(kept)]) if temperature > 0 else (0.0,) * len(kept)
    return Answer(tuple(kept), drawn, text, 'stop' if ended else 'length', version, shortened(spans, len(kept)))


def distance(reply: Any, logps: Sequence[float]) -> float:
    """Mean absolute difference (nats) between a prompt's log-probs in a reply and the learner's; its first has none."""
    try:
        said = [pair[0] for pair in reply['meta_info']['input_token_logprobs']][1:]
        return sum(abs(a - b) for a, b in zip(said, logps, strict=True)) / max(1, len(logps))
    except (TypeError, KeyError, IndexError, ValueError) as cause:
        raise MalformedError(
            f'no log-prob for each of {len(logps) + 1} prompt ids ({cause}): {str(reply)[:200]}'
        ) from cause


def checked(ids: Any, pairs: Any, count: Any, most: int, vocab: int) -> list[float]:
    """The log-probabilities (nats) of sampled ids, one each, none above 0. `pairs` are [log-prob, id, text]."""
    if not isinstance(ids, list) or not all(isinstance(i, int) for i in ids) or not isinstance(pairs, list):
        raise MalformedError(f'output_ids must be a list of ids beside a list of log-probs, not {str(ids)[:80]}')
    if not 0 < len(ids) <= most or len(ids) != count:
        raise MalformedError(f'{len(ids)} ids, said to be {count}: must be the same, and from 1 to {most}')
    if strange := [i for i in ids if not 0 <= i < vocab]:
        raise MalformedError(f'id {strange[0]} is none of the {vocab} that this policy has')
    try:
        logps, named = [float(pair[0]) for pair in pairs], [pair[1] for pair in pairs]
    except (TypeError, ValueError, IndexError, KeyError) as cause:
        raise MalformedError(f'log-probs must be [number, id, text] each, not {str(pairs)[:80]}') from cause
    if named != ids:
        raise MalformedError(f'{len(ids)} ids and {len(pairs)} log-probs, of other tokens: one is owed for each id')
    if wrong := [logp for logp in logps if not (math.isfinite(logp) and logp <= 1e-4)]:
        raise MalformedError(f'log-prob {wrong[0]}: must be finite and not above 0')
    return [min(logp, 0.0) for logp in logps]


def versions(
    meta: Mapping[str, Any], count: int, version_of: Callable[[str], int | None]
) -> tuple[int, tuple[tuple[int, int], ...]]:
    """The oldest version that drew an answer, and where there were several, (version, ids) of each in order."""
    runs = [(span['version'], span['end'] - span['start']) for span in meta.get('weight_versions') or ()]
    runs = [run for run in runs if run[1]] or [(meta.get('weight_version'), count)]
    numbers = [version_of(str(name)) for name, _ in runs]
    spans: list[tuple[int, int]] = []
    for (name, length), number in zip(runs, numbers, strict=True):
        if number is None:
            raise StaleError(f'sampled with weights {name!r}, which are not the ones loaded')
        spans.append((number, length))
    if sum(length for _, length in spans) != count:
        raise MalformedError(f'weight versions {spans} cover another number of ids than the {count} that came')
    return spans[0][0], tuple(spans) if len(spans) > 1 else ()


def shortened(spans: Sequence[tuple[int, int]], count: int) -> tuple[tuple[int, int], ...]:
    """The spans of the first `count` ids; none where one version drew them all."""
    kept: list[tuple[int, int]] = []
    for version, length in spans:
        if count > 0:
            kept.append((version, min(length, count)))
        count -= length
    return tuple(kept) if len(kept) > 1 else ()
