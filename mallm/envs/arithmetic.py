"""Word problems for a team: `tool` writes a calculation, a calculator does it, `plan` answers.

A small language model reads a story and copies a number well, and calculates badly; so the roles have different things
to learn. Text is never evaluated: the calculator is a parser of its own, over exact fractions.

Stories are made from a seed. The held-out split has the training stories' wording with other numbers, the strict split
has wordings that no training story uses.
"""

import dataclasses
import fractions
import random
import re
import zlib
from collections.abc import Callable
from typing import ClassVar

from mallm.envs.base import FINAL, FINAL_STRICT, HELD_OUT, STRICT, Demonstration, Task
from mallm.types import Message, Reward

NAMES = ('Ann', 'Ben', 'Cora', 'Dan', 'Eva', 'Finn', 'Gina', 'Hugo', 'Ida', 'Jon')
THINGS = ('apples', 'books', 'coins', 'eggs', 'pens', 'cards', 'stones', 'cups')

STORIES: tuple[tuple[str, str], ...] = (
    ('{n} has {a} {t} and gets {b} more. How many {t} has {n} now?', '{a} + {b}'),
    ('{n} had {c} {t} and gave {b} away. How many {t} are left?', '{c} - {b}'),
    ('{n} buys {a} boxes with {b} {t} in each. How many {t} are that?', '{a} * {b}'),
    ('{n} has {a} {t} and buys {d} boxes with {b} {t} in each. How many {t} has {n} now?', '{a} + {d} * {b}'),
    ('{n} buys {d} bags with {a} {t} in each and loses {e} {t}. How many {t} are left?', '{d} * {a} - {e}'),
    ('{n} has {a} {t}, finds {b} and loses {e}. How many {t} has {n} now?', '{a} + {b} - {e}'),
    ('On each of {d} days {n} sells {a} {t} in the morning and {b} at night. How many {t} is that?',
     '{d} * ({a} + {b})'),
    ('One of the {t} costs {a} dollars. {n} buys {d} of them and a bag for {b} dollars. What does {n} pay?',
     '{d} * {a} + {b}'),
)  # fmt: skip
"""Wordings with the calculation they ask for."""

STRICT_STORIES: tuple[tuple[str, str], ...] = (
    ('There are {a} red and {b} blue {t} on the table. How many {t} are on the table?', '{a} + {b}'),
    ('Every one of {d} friends brings {a} {t}. {n} eats {e} of the {t}. How many {t} remain?', '{d} * {a} - {e}'),
    ('A shelf holds {a} {t} on top and {b} below. How many {t} do {d} such shelves hold?', '{d} * ({a} + {b})'),
    ('{n} owns {a} {t}. A friend owns {d} times {b} {t}. How many {t} do they own together?', '{a} + {d} * {b}'),
)

LONGEST = 64
"""A calculation of more characters is refused: no model's text may cost time."""

TOKEN = re.compile(r'\s*(?:([0-9]{1,9})|([-+*/()]))')
NUMBER = re.compile(r'-?[0-9][0-9,]*(?:\.[0-9]+)?')
TAIL = 256
"""Characters at the end of an answer that are looked at."""
CUT_NUMBER = re.compile(r'^[0-9.,]+')


def calculate(text: str) -> fractions.Fraction | None:
    """Value of a calculation with + - * / and brackets; None where the text is not one. Never raises.

    `x`, `×`, `÷` are read as `*` and `/`, and one `=` with what follows is ignored, because people write both.
    """
    said = text.partition('=')[0].strip().lower().replace('x', '*').replace('×', '*').replace('÷', '/')
    if not 0 < len(said) <= LONGEST:
        return None
    tokens, at = [], 0
    while at < len(said):
        found = TOKEN.match(said, at)
        if not found:
            return None
        tokens.append(found[1] or found[2])
        at = found.end()
    try:
        value, rest = add(tokens)
    except (IndexError, ValueError, ZeroDivisionError):
        return None
    return None if rest else value


def add(tokens: list[str]) -> tuple[fractions.Fraction, list[str]]:
    value, tokens = multiply(tokens)
    while tokens and tokens[0] in '+-':
        other, rest = multiply(tokens[1:])
        value, tokens = (value + other if tokens[0] == '+' else value - other), rest
    return value, tokens


def multiply(tokens: list[str]) -> tuple[fractions.Fraction, list[str]]:
    value, tokens = atom(tokens)
    while tokens and tokens[0] in '*/':
        other, rest = atom(tokens[1:])
        value, tokens = (value * other if tokens[0] == '*' else value / other), rest
    return value, tokens


def atom(tokens: list[str]) -> tuple[fractions.Fraction, list[str]]:
    """A number, or a calculation in brackets. At most LONGEST brackets can be open, so the recursion is bounded."""
    if tokens[0] == '(':
        value, rest = add(tokens[1:])
        if rest[0] != ')':
            raise ValueError
        return value, rest[1:]
    return fractions.Fraction(int(tokens[0])), tokens[1:]


def number_in(text: str) -> tuple[fractions.Fraction | None, bool]:
    """The last number that begins in the last TAIL characters of an answer, and whether the answer was it alone."""
    tail = text if len(text) <= TAIL else CUT_NUMBER.sub('', text[-TAIL:])
    found = NUMBER.findall(tail)
    if not found:
        return None, False
    return fractions.Fraction(found[-1].replace(',', '')), text.strip().rstrip('.') == found[-1]


def shown(value: fractions.Fraction | None) -> str:
    if value is None:
        return 'error'
    return str(value) if value.denominator == 1 else f'{float(value):.2f}'


SYSTEM = {
    'tool': 'Write only the calculation, for a calculator.',
    'plan': 'Answer with one number only.',
}
EXAMPLES = (
    ('A farm has 75 hens and buys 68. How many hens has it then?', '75 + 68'),
    ('Sam fills 3 pages with 81 stamps on each and sells 64. How many stamps are left?', '3 * 81 - 64'),
)
"""Stories told before every other, with their calculations: they show a role the form of its answer. No split has
such numbers (at the default `largest`), or such words."""


@dataclasses.dataclass(frozen=True)
class ArithmeticTeam:
    """One story in the hands of a team; see `mallm.envs.base.World`.

    Attributes:
      story: the question.
      calculation: one that answers it; no role sees it.
      order: roles in acting order: ('tool', 'plan'), or ('plan',) without a calculator.
      written: what the tool wrote, or None.
      answered: the number that was answered, or None.
      over: an answer was given.
    """

    story: str
    calculation: str
    order: tuple[str, ...] = ('tool', 'plan')
    written: str | None = None
    answered: fractions.Fraction | None = None
    over: bool = False

    @property
    def target(self) -> fractions.Fraction | None:
        return calculate(self.calculation)

    @property
    def solved(self) -> bool:
        return self.answered is not None and self.answered == self.target

    def observe(self, role: str) -> tuple[Message, ...]:
        told = [Message('system', SYSTEM[role])]
        for story, calculation in EXAMPLES:
            answer = calculation if role == 'tool' else shown(calculate(calculation))
            told += [self._told(role, story, calculation), Message('assistant', answer)]
        return (*told, self._told(role, self.story, self.written))

    def _told(self, role: str, story: str, written: str | None) -> Message:
        """A story and, to `plan` where there is a tool, what the calculator made of what that wrote."""
        if role == 'plan' and 'tool' in self.order and written is not None:
            story += f'\nCalculator: {written[:LONGEST]} = {shown(calculate(written))}'
        return Message('user', story)

    def act(self, role: str, text: str) -> 'tuple[ArithmeticTeam, Reward]':
        """The tool is judged by the value of its calculation, the plan by its answer: 1 where it is right."""
        if role == 'tool':
            value = calculate(text)
            clean = value is not None and '=' not in text
            after = dataclasses.replace(self, written=' '.join(text.split()))
        else:
            value, clean = number_in(text)
            after = dataclasses.replace(self, answered=value, over=True)
        team, local = float(value is not None and value == self.target), -FORMAT * (not clean)
        return after, Reward(team, local, (('solved', team), ('format', local)))

    def render(self) -> str:
        lines = [self.story, f'asked: {self.calculation} = {shown(self.target)}']
        lines += [] if self.written is None else [f'calculator: {self.written} = {shown(calculate(self.written))}']
        return '\n'.join(lines + [f'answered: {shown(self.answered)}'] * self.over)


FORMAT = 0.2
"""Penalty for an answer that is not a calculation, or not a number, alone."""


@dataclasses.dataclass(frozen=True)
class ArithmeticTask(Task):
    """Which stories are told, to which team.

    Attributes:
      team: ('tool', 'plan'), or ('plan',) without a calculator.
      largest: largest number in a story.
    """

    instance_name: ClassVar[str] = 'story'
    difficulty_name: ClassVar[str] = 'operations of the calculation'
    floor_name: ClassVar[str] = 'a number of the story'

    team: tuple[str, ...] = ('tool', 'plan')
    largest: int = 60

    def __post_init__(self) -> None:
        if self.team not in (('tool', 'plan'), ('plan',)):
            raise ValueError(f"team={self.team}: roles are 'tool' and 'plan'; use ('tool', 'plan') or ('plan',)")
        if self.largest < 20:
            raise ValueError(f'largest={self.largest}: too few stories to keep some apart; use 20 or more')

    def train(self, seed: int) -> ArithmeticTeam:
        """A story whose wording and numbers are in no held-out split."""
        return self._story(seed, STORIES, lambda fold: fold > 1)

    def test(self, split: int, index: int) -> ArithmeticTeam:
        stories = STRICT_STORIES if split in (STRICT, FINAL_STRICT) else STORIES
        keep = {HELD_OUT: (0,), FINAL: (1,), STRICT: range(0, FOLDS, 2), FINAL_STRICT: range(1, FOLDS, 2)}[split]
        return self._story(split + index, stories, lambda fold: fold in keep)

    def difficulty(self, world: ArithmeticTeam) -> int:
        """Operations of the calculation."""
        return sum(world.calculation.count(sign) for sign in '+-*/')

    def floor(self, world: ArithmeticTeam, turns: int, seed: int) -> bool:
        """Whether a guess at a number of the story answers it: the floor under every result."""
        return random.Random(seed).choice(NUMBER.findall(world.story)) == shown(world.target)

    def demonstrations(self, seed: int) -> list[Demonstration]:
        """The true calculation and answer: an expert's, for cloning as a control. Reinforcement needs none."""
        world = self.train(seed)
        shown_by = {'tool': world.calculation, 'plan': shown(world.target)}
        found = []
        for role in self.team:
            found.append(Demonstration(role, world.observe(role), shown_by[role]))
            world, _ = world.act(role, shown_by[role])
        return found

    def _story(self, seed: int, stories: tuple[tuple[str, str], ...], keeps: Callable[[int], bool]) -> ArithmeticTeam:
        draw = random.Random(seed)
        for _ in range(1000):
            words, calculation = draw.choice(stories)
            small, large = draw.sample(range(2, self.largest // 2), 2), draw.randint(self.largest // 2, self.largest)
            numbers = {
                'a': small[0],
                'b': small[1],
                'c': large,
                'd': draw.randint(2, 9),
                'e': draw.randint(2, small[0]),
            }
            written = calculation.format(**numbers)
            if keeps(zlib.crc32(f'{words}{written}'.encode()) % FOLDS):
                return ArithmeticTeam(
                    words.format(n=draw.choice(NAMES), t=draw.choice(THINGS), **numbers), written, self.team
                )
        raise ValueError(f'seed {seed}: no story of this split in 1000 draws; enlarge `largest`')


FOLDS = 8
"""Into so many parts fall the pairs of wording and numbers; two are held out."""
