"""Where an answer ends when strings, not tokens, end it."""

import bisect
from collections.abc import Sequence

from mallm.rollout.chat import Tokenizer


def cut_at_stop(ids: list[int], stop: Sequence[str], tokenizer: Tokenizer) -> tuple[list[int], str, bool]:
    """The ids up to the token that completes a stop string, their text before that string, and whether there was one.

    Dropping what follows leaves the kept tokens' log-probabilities right, since none depends on a later token. Cost:
    an answer is decoded once, and log2 of its length times more where it holds a stop string; a sampler that does not
    look for the string itself goes on until the end token, so there it saves training, not sampling.
    """
    text = tokenizer.decode(ids)
    if not any(string in text for string in stop):
        return ids, text, False

    def holds_stop(count: int) -> bool:
        return any(string in tokenizer.decode(ids[:count]) for string in stop)

    kept = ids[: bisect.bisect_left(range(len(ids)), True, key=holds_stop)]
    text = tokenizer.decode(kept)
    return kept, text[: min(text.index(string) for string in stop if string in text)], True
