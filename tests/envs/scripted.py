"""Plays whole trees with answers that a function gives, for the worlds whose roles write prose and programs."""

import asyncio
import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

from mallm import rng
from mallm.rollout import tree
from mallm.rollout.engine import SamplingParams
from mallm.rollout.tree import Place, Sampler, Stage
from mallm.types import Answer, Message, Prompt, Trajectory

Write = Callable[[str, str, int], str]


class Bytes:
    """A tokenizer of one token a character."""

    end, ends = 0, (0,)

    def __len__(self) -> int:
        return 0x110000

    def chat(self, messages: Sequence[Message], own: Sequence[Answer] = ()) -> tuple[int, ...]:
        return tuple(map(ord, '\n'.join(message.content for message in messages)))

    def encode(self, text: str) -> tuple[int, ...]:
        return tuple(map(ord, text))

    def decode(self, ids: Sequence[int]) -> str:
        return ''.join(map(chr, ids))


class Scripted:
    """Answers candidate i of a role to what it is shown with `write(role, shown, i)`."""

    def __init__(self, write: Write) -> None:
        self._write = write

    async def sample(
        self, policy: str, prompt: Prompt, path: Sequence[int], k: int, params: SamplingParams
    ) -> list[Answer]:
        shown = '\n'.join(message.content for message in prompt.messages)
        texts = [self._write(prompt.role, shown, i) for i in range(k)]
        return [Answer((1,), (-0.5,), text, 'stop', 0) for text in texts]


def play(world: Any, write: Write, *, k: int = 2, turns: int = 4) -> Trajectory:
    """One tree, played to its end."""
    roles = {role: SamplingParams(64) for role in world.order}
    sampler = Sampler(k, turns, 1.0, tree.greedy, roles)
    stage = Stage(sampler, Scripted(write), Bytes(), {role: role for role in world.order})
    (trajectory,) = asyncio.run(tree.play_tree([world], Place(0, rng.TRAIN, 0, 0), stage))
    return trajectory


HOSTILE = (
    '', ' ', '\x00', '\ud800', '```python', '```python\n```', '```python\nwhile True: pass\n```',
    '```python\nimport os\nos._exit(0)\n```', '```python\nprint("\\\\boxed{" * 9999)\n```', '\\boxed{', '\\boxed{}',
    '\\boxed{\x00}', '\\boxed{' + '9' * 5000 + '}', '\\boxed{1e999999999}', '\\boxed{\\frac{1}{0}}', '</think>' * 99,
    '<think>', '**Test Input:**\n```\n\x00\n```\n**Test Output:**\n```\n\ud800\n```', '**Test Input:** ' * 5000,
    '**Test Input:**\n```\n1\n```\n' * 500, '```python\nprint(1)\n```' * 50, '你好 🎉',
    "\\boxed{__import__('os').system('true')}", '```python\nraise SystemExit("x")\n```', '`' * 10000, '{' * 10000,
)  # fmt: skip
"""Text that a world has to bear."""


@dataclasses.dataclass(frozen=True)
class Printed:
    """What became of a program that was never run: it printed `stdout`."""

    stdout: str
    ok: bool = True

    def shown(self, longest: int = 1000) -> str:
        return self.stdout[:longest]
