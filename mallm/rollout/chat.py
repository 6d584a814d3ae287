"""From chat messages to token ids and back. Tokens are the truth: what a role saw and wrote is kept as ids.

Every turn's prompt is made anew from what the world shows, and a training row is that prompt's ids and the ids sampled
after it; no text stands between them. Where a world shows a role its own earlier answer, as a message by 'assistant',
the ids it wrote are put there, not those its text would be encoded to.
"""

import re
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Protocol

import jinja2

from mallm.types import Answer, Message, Prompt

if TYPE_CHECKING:
    import transformers


class Tokenizer(Protocol):
    """What the rollouts need of a tokenizer, tiny or real."""

    @property
    def end(self) -> int:
        """Id of the token that a demonstration ends with."""
        ...

    @property
    def ends(self) -> tuple[int, ...]:
        """Ids of all tokens that end an answer, `end` first."""
        ...

    @property
    def thinking(self) -> bool:
        """Whether an answer may begin with a thought, which is not part of its text."""
        ...

    def __len__(self) -> int:
        """Number of token ids the model must know."""
        ...

    def chat(self, messages: Sequence[Message], own: Sequence[Answer] = ()) -> tuple[int, ...]:
        """Ids of a chat up to the point where the answer begins; `own`: what its role wrote before, in order."""
        ...

    def encode(self, text: str) -> tuple[int, ...]:
        """Ids of plain text, nothing added."""
        ...

    def decode(self, ids: Sequence[int]) -> str:
        """Text of ids; the end token, padding and other control tokens become nothing."""
        ...


class TinyTokenizer:
    """One token a character over a small alphabet, so that text -> ids -> text and back are both exact.

    A task may bring more `signs` than ALPHABET has. The chat template is the messages' contents one after the other,
    then `ANSWER`, the mark after which a role writes.
    """

    ANSWER = '>'
    thinking = False
    ALPHABET = '# @$.*+/' + 'UDLR' + '0123456789' + '?!~=:;,' + 'TPSQ' + ANSWER
    PAD, END = 0, 1

    def __init__(self, signs: str = '') -> None:
        self.alphabet = ''.join(dict.fromkeys(self.ALPHABET + signs))
        self._ids = {character: 2 + i for i, character in enumerate(self.alphabet)}
        self._characters = ('', '', *self.alphabet)

    @property
    def end(self) -> int:
        return self.END

    @property
    def ends(self) -> tuple[int, ...]:
        return (self.end,)

    def __len__(self) -> int:
        return len(self._characters)

    def chat(self, messages: Sequence[Message], own: Sequence[Answer] = ()) -> tuple[int, ...]:
        """What was written needs no ids of its own: the same text has the same ids here."""
        return self.encode(''.join(message.content for message in messages) + self.ANSWER)

    def encode(self, text: str) -> tuple[int, ...]:
        unknown = sorted(set(text) - set(self._ids))
        if unknown:
            raise ValueError(
                f'{unknown!r}: not in the tiny alphabet {self.alphabet!r}; add them to the `signs` of the task, or use '
                'another tokenizer'
            )
        return tuple(self._ids[character] for character in text)

    def decode(self, ids: Sequence[int]) -> str:
        return ''.join(self._characters[i] for i in ids)


class HuggingFaceTokenizer:
    """A `transformers` tokenizer and its own chat template.

    - The template alone writes the control tokens (so one BOS, whatever the tokenizer would add), the same way on every
      path: play, demonstrations, evaluation.
    - Text inside a message is data: the name of a control token in it (`<|im_end|>`) gets a space after its first
      character, so that no role can forge the end of a message or another's turn.
    - A template without a system message gets the system text at the start of the first user message.
    - An answer ends with any of: the template's end of turn, the tokenizer's EOS, the `ends` given.
    - Thinking is off unless `thinking` is set; the template hears of it as `enable_thinking`, and what it writes for
      that is part of the prompt's ids. When on, the thought is sampled and trained on like the rest of an answer, but
      its text goes no further: worlds, stop strings and replays get what stands after `</think>`, and nothing when an
      answer was cut before it.
    """

    DATE = '26 Jul 2024'
    """What templates that write today's date are told, so that a prompt does not depend on the day."""
    THOUGHT = ('<think>', '</think>')

    def __init__(
        self, tokenizer: 'transformers.PreTrainedTokenizerBase', *, ends: Sequence[int] = (), thinking: bool = False
    ) -> None:
        if not tokenizer.chat_template:
            raise ValueError(
                f'{tokenizer.name_or_path!r} has no chat template: use an instruct model, or set `chat_template`'
            )
        self._tokenizer: Any = tokenizer
        self.thinking = thinking
        self._size = max(tokenizer.get_vocab().values()) + 1
        control = {token.content: i for i, token in tokenizer.added_tokens_decoder.items() if token.special}
        longest_first = sorted(control, key=len, reverse=True)
        self._control = re.compile('|'.join(map(re.escape, longest_first)) or r'(?!)')
        self._folds_system = False
        self._folds_system = not self._shows_system()
        eos = [] if tokenizer.eos_token_id is None else [tokenizer.eos_token_id]
        self._ends: tuple[int, ...] = ()
        self._ends = tuple(dict.fromkeys([*self._end_of_turn(set(control.values())), *eos, *ends]))
        self._opens_thought = self._render([Message('user', 'a')]).rstrip().endswith(self.THOUGHT[0])
        self._refuse_what_cannot_work()

    @classmethod
    def open(cls, source: str, *, thinking: bool = False, **options: str) -> 'HuggingFaceTokenizer':
        """The tokenizer of a model folder or hub id, and the end tokens its generation_config.json adds.

        `options` go to `AutoTokenizer.from_pretrained`, e.g. `gguf_file`.
        """
        import transformers

        try:
            tokenizer = transformers.AutoTokenizer.from_pretrained(source, **options)
        except (OSError, ValueError) as cause:
            raise ValueError(
                f'{source!r}: no tokenizer could be read there; give a folder with tokenizer.json and '
                f'tokenizer_config.json, or a hub id that can be reached from here ({cause})'
            ) from cause
        try:
            eos = transformers.GenerationConfig.from_pretrained(source).eos_token_id
        except OSError:  # there is none; the tokenizer's own EOS stands
            eos = None
        ends = [eos] if isinstance(eos, int) else eos or []
        return cls(tokenizer, ends=ends, thinking=thinking)

    @property
    def end(self) -> int:
        return self._ends[0]

    @property
    def ends(self) -> tuple[int, ...]:
        return self._ends

    def __len__(self) -> int:
        return self._size

    def chat(self, messages: Sequence[Message], own: Sequence[Answer] = ()) -> tuple[int, ...]:
        """A message that is one of the `own` answers is put in by its ids; the template writes what is around it."""
        written = written_ids(messages, own)
        mark = '\ue000'
        while any(mark in message.content for message in messages):
            mark += '\ue000'
        marked = [
            Message(m.author, f'{mark}{i}{mark}' if i in written else self._plain(m.content))
            for i, m in enumerate(messages)
        ]
        pieces = re.split(f'{mark}(\\d+){mark}', self._render(marked))
        ids: list[int] = []
        for place, piece in enumerate(pieces):
            ids += written[int(piece)] if place % 2 else self.encode(piece)
            if place % 2 and ids[-1] in self._ends:
                ids.pop()  # the template ends every message itself
        return tuple(ids)

    def encode(self, text: str) -> tuple[int, ...]:
        return tuple(self._tokenizer.encode(text, add_special_tokens=False))

    def decode(self, ids: Sequence[int]) -> str:
        text = self._tokenizer.decode(
            [i for i in ids if i not in self._ends], skip_special_tokens=True, clean_up_tokenization_spaces=False
        )
        return self._after_thought(text) if self.thinking else text

    def _render(self, messages: Sequence[Message], answers: bool = True) -> str:
        """The template's text, up to where an answer begins if one is awaited."""
        if self._folds_system and messages[0].author == 'system' and len(messages) > 1:
            both = Message(messages[1].author, f'{messages[0].content}\n\n{messages[1].content}')
            messages = [both, *messages[2:]]
        return self._tokenizer.apply_chat_template(
            [{'role': message.author, 'content': message.content} for message in messages],
            tokenize=False,
            add_generation_prompt=answers,
            enable_thinking=self.thinking,
            date_string=self.DATE,
        )

    def _plain(self, content: str) -> str:
        """The content with the names of control tokens broken up."""
        return self._control.sub(lambda found: f'{found[0][:1]} {found[0][1:]}', content)

    def _after_thought(self, text: str) -> str:
        _, closed, said = text.rpartition(self.THOUGHT[1])
        if closed:
            return said.lstrip('\n')
        return '' if self._opens_thought or self.THOUGHT[0] in text else text

    def _shows_system(self) -> bool:
        """Whether the template writes a system message at all; some refuse it, some leave it out."""
        try:
            return 'ZEBRA' in self._render([Message('system', 'ZEBRA'), Message('user', 'a')])
        except jinja2.TemplateError:
            return False

    def _end_of_turn(self, control: set[int]) -> list[int]:
        """The control token that the template writes after what an assistant said, if it is one."""
        said = self._render([Message('user', 'a'), Message('assistant', 'ZEBRA')], answers=False)
        return [i for i in self.encode(said.partition('ZEBRA')[2].lstrip())[:1] if i in control]

    def _refuse_what_cannot_work(self) -> None:
        name, ids = self._tokenizer.name_or_path, self.chat([Message('user', 'a')])
        if not self._ends:
            raise ValueError(f'{name!r} has no end-of-turn or EOS token: answers could only be cut; set `eos_token`')
        bos = self._tokenizer.bos_token_id
        if ids[:2] == (bos, bos):
            raise ValueError(f'{name!r}: its chat template writes BOS (id {bos}) twice at the start; mend it to one')
        if self._opens_thought and not self.thinking:
            raise ValueError(f'{name!r}: its chat template always opens a thought; set thinking=True')
        if self.thinking and not self._opens_thought and not self._knows_thinking():
            raise ValueError(f'{name!r}: its chat template knows no `enable_thinking`; leave thinking=False')

    def _knows_thinking(self) -> bool:
        return 'enable_thinking' in str(self._tokenizer.chat_template)


def written_ids(messages: Sequence[Message], own: Sequence[Answer]) -> dict[int, tuple[int, ...]]:
    """{place of a message: ids it was written in} for the messages that are a role's own answers, matched in order."""
    left, found = list(own), {}
    for place, message in enumerate(messages):
        match = next((answer for answer in left if answer.text == message.content), None)
        if message.author == 'assistant' and match is not None:
            left.remove(match)
            found[place] = match.ids
    return found


def require_vocabulary(tokenizer: Tokenizer, vocab: int) -> None:
    """A model may have more rows than its tokenizer has ids (padding that nothing decodes to), never fewer.

    Raises:
      ValueError: the tokenizer can write ids that the model has no row for.
    """
    if len(tokenizer) > vocab:
        raise ValueError(
            f'the tokenizer has {len(tokenizer)} ids and the model {vocab} rows: every id needs a row; use the '
            'tokenizer that belongs to the model, or enlarge its embedding'
        )


def prompt_for(role: str, messages: tuple[Message, ...], tokenizer: Tokenizer, own: Sequence[Answer] = ()) -> Prompt:
    """The prompt a role sees: its messages and the ids they become. `own`: what it wrote earlier in the episode."""
    return Prompt(role, messages, tokenizer.chat(messages, own))
