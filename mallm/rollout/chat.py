"""From chat messages to token ids and back."""

from collections.abc import Sequence
from typing import Protocol

from mallm.types import Message, Prompt


class Tokenizer(Protocol):
    """What the rollouts need of a tokenizer, tiny or real."""

    @property
    def end(self) -> int:
        """Id of the token that ends an answer."""
        ...

    def __len__(self) -> int:
        """Number of token ids the model must know."""
        ...

    def chat(self, messages: Sequence[Message]) -> tuple[int, ...]:
        """Ids of a chat up to the point where the answer begins."""
        ...

    def encode(self, text: str) -> tuple[int, ...]:
        """Ids of plain text, nothing added."""
        ...

    def decode(self, ids: Sequence[int]) -> str:
        """Text of ids; the end token and padding become nothing."""
        ...


class TinyTokenizer:
    """One token a character over a small fixed alphabet, so that text -> ids -> text and back are both exact.

    The chat template is the messages' contents one after the other, then `ANSWER`, the mark after which a role writes.
    """

    ANSWER = '>'
    ALPHABET = '# @$.*+/' + 'UDLR' + '0123456789' + '?!~=:;,' + 'TPSQ' + ANSWER
    PAD, END = 0, 1

    def __init__(self) -> None:
        self._ids = {character: 2 + i for i, character in enumerate(self.ALPHABET)}
        self._characters = ('', '', *self.ALPHABET)

    @property
    def end(self) -> int:
        return self.END

    def __len__(self) -> int:
        return len(self._characters)

    def chat(self, messages: Sequence[Message]) -> tuple[int, ...]:
        return self.encode(''.join(message.content for message in messages) + self.ANSWER)

    def encode(self, text: str) -> tuple[int, ...]:
        unknown = sorted(set(text) - set(self._ids))
        if unknown:
            raise ValueError(
                f'{unknown!r}: not in the tiny alphabet {self.ALPHABET!r}; use a world that speaks it, or another '
                'tokenizer'
            )
        return tuple(self._ids[character] for character in text)

    def decode(self, ids: Sequence[int]) -> str:
        return ''.join(self._characters[i] for i in ids)


def prompt_for(role: str, messages: tuple[Message, ...], tokenizer: Tokenizer) -> Prompt:
    """The prompt a role sees: its messages and the ids they become."""
    return Prompt(role, messages, tokenizer.chat(messages))
