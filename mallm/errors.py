"""Errors that are data (a failed episode) and the one place that may catch broadly.

`boundary` is used where foreign things are called during an episode: a world or an engine. Whatever breaks there is
attributed once, to the episode, with its cause; it never becomes an empty answer or a zero reward.
"""

import contextlib
from collections.abc import Iterator


class EpisodeError(Exception):
    """An episode that cannot be trained on. `kind` is a short label that is counted in the metrics."""

    kind = 'episode'


class EngineError(EpisodeError):
    """The sampler failed: no answer, a wrong answer, or one whose log-probs cannot be right."""

    kind = 'engine'


class WorldError(EpisodeError):
    """The world failed while it was observed or acted on, or returned a reward that is not a finite number."""

    kind = 'world'


@contextlib.contextmanager
def boundary(kind: type[EpisodeError], doing: str) -> Iterator[None]:
    """Turns any exception raised inside into `kind`, keeping the cause. EpisodeErrors pass through unchanged."""
    try:
        yield
    except EpisodeError:
        raise
    except Exception as cause:  # the one broad handler of the project
        raise kind(f'{doing}: {type(cause).__name__}: {cause}') from cause


class WeightsError(Exception):
    """A model that cannot be found, read or written as asked. The message has the value, the rule and the remedy."""
