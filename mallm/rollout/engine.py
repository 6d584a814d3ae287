"""What every sampler offers: draw K answers to a prompt, and take new weights."""

import dataclasses
from collections.abc import Iterable, Mapping
from contextlib import AbstractContextManager
from typing import Any, Protocol, runtime_checkable

from mallm.types import Answer, Prompt


@dataclasses.dataclass(frozen=True)
class SamplingParams:
    """How one role's answers are drawn.

    Attributes:
      max_tokens: longest answer in tokens, the end token included.
      temperature: divides the logits; 0 takes the most likely token.
      spread: the last of K candidates is drawn this many times as hot as the first, those between in equal ratios, so
        that a group tries something else even where the policy is sure of itself.
      top_p: keep the smallest set of tokens whose probability reaches this.
      top_k: keep this many of the most likely tokens; 0 keeps all.
      stop: an answer ends with the token that completes one of these strings. That token and those before it are what
        was sampled and is trained on; the string itself and what follows it are not part of the answer's text.
    """

    max_tokens: int = 12
    temperature: float = 1.0
    spread: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    stop: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if self.max_tokens < 1:
            raise ValueError(f'max_tokens={self.max_tokens}: an answer needs at least one token; use 1 or more')
        if self.temperature < 0:
            raise ValueError(f'temperature={self.temperature}: must be 0 (greedy) or positive')
        if self.spread < 1:
            raise ValueError(f'spread={self.spread}: must be 1 (all candidates alike) or more')
        if not 0 < self.top_p <= 1:
            raise ValueError(f'top_p={self.top_p}: must be in (0, 1]; 1 keeps every token')
        if self.top_k < 0:
            raise ValueError(f'top_k={self.top_k}: must be 0 (keep all) or a positive count')
        if not all(self.stop):
            raise ValueError(f'stop={self.stop}: an empty stop string would end every answer at once; leave it out')

    def temperatures(self, k: int) -> tuple[float, ...]:
        """The temperature of each of K candidates."""
        return tuple(self.temperature * self.spread ** (j / max(1, k - 1)) for j in range(k))

    @property
    def truncates(self) -> bool:
        """Whether some tokens cannot be drawn at all."""
        return self.top_p < 1 or self.top_k > 0


@dataclasses.dataclass(frozen=True)
class RoleSampling:
    """What holds for one role only, see `SamplingParams`; None leaves a setting as it is for every role."""

    max_tokens: int | None = None
    temperature: float | None = None
    spread: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    stop: tuple[str, ...] | None = None

    def __post_init__(self) -> None:
        if self.stop is not None:
            object.__setattr__(self, 'stop', stop_strings(self.stop))
        self.over(SamplingParams())

    def over(self, params: SamplingParams) -> SamplingParams:
        """The parameters with this role's own in their place."""
        return dataclasses.replace(params, **{name: own for name, own in vars(self).items() if own is not None})


def stop_strings(given: str | Iterable[str]) -> tuple[str, ...]:
    """Stop strings as people write them in a file or on a command line: 'a, b' and ('a', 'b') are the same two.

    A comma always separates, and spaces around it say nothing; a newline is kept, it may be a stop string.
    """
    listed = [given] if isinstance(given, str) else given
    return tuple(part.strip(' \t') for text in listed for part in text.split(','))


class Engine(Protocol):
    """A sampler of one or more policies. Implementations share no base class."""

    async def sample(
        self, policy: str, prompt: Prompt, path: tuple[int, ...], k: int, params: SamplingParams
    ) -> tuple[Answer, ...]:
        """K answers to one prompt. Answer j is drawn with the key of place `(*path, j)`."""
        ...

    def load(self, policy: str, weights: Any, version: int) -> None:
        """Replaces one policy's weights; every later answer carries `version`."""
        ...

    def metrics(self) -> Mapping[str, float]:
        """Counters since the last call, e.g. tokens, seconds, compiles."""
        ...


class Leads(Engine, Protocol):
    """An engine that engines of other processes can follow."""

    def load_base(self, base: Any) -> None:
        """The frozen parameters under every adapter, or None."""
        ...

    def told(self) -> Any:
        """What they have to know of its weights; without the arrays, for it travels often."""
        ...


class Follows(Engine, Protocol):
    """An engine that samples with the weights of one in another process."""

    async def follow(self, told: Any) -> None:
        """Takes what the other has `told`."""
        ...


@runtime_checkable
class Gathers(Protocol):
    """An engine that answers all waiting prompts together once none are to come."""

    def held(self) -> AbstractContextManager[None]:
        """While any of these is open, more prompts are to come, though the event loop is quiet."""
        ...
