"""Problems of mathematics and of programming, and small sets of them that are made here, from a seed.

The made ones let every path run without a network. Training and held-out seeds never give the same problem: each is
known by its text, whose checksum says on which side it falls.
"""

import dataclasses
import itertools
import math
import random
import zlib
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

FOLDS = 8
"""Into so many parts fall the problems made here, by their text; the first four are held out, one for each split."""


@dataclasses.dataclass(frozen=True)
class MathProblem:
    """A question with one answer, in LaTeX.

    Attributes:
      name: of the problem in its set.
      level: a whole number by which successes are sorted.
    """

    name: str
    question: str
    answer: str
    level: int = 0


@dataclasses.dataclass(frozen=True)
class CodeProblem:
    """A task for a program that reads standard input and prints.

    Attributes:
      name: of the problem in its set.
      tests: (input, expected output) pairs that judge.
      golden: a right program, or None where none is known; who writes tests is judged by it.
      wrong: programs that fail, for judging whether a test finds fault.
      level: a whole number by which successes are sorted.
    """

    name: str
    question: str
    tests: tuple[tuple[str, str], ...]
    golden: str | None = None
    wrong: tuple[str, ...] = ()
    level: int = 0


def fold(text: str, folds: int = FOLDS) -> int:
    return zlib.crc32(text.encode()) % folds


P = TypeVar('P', MathProblem, CodeProblem)


def draw_until(make: Callable[[random.Random], P], seed: int, keeps: Callable[[P], bool]) -> P:
    """The first problem of a seed that is of the wanted kind."""
    draw = random.Random(seed)
    for _ in range(1000):
        problem = make(draw)
        if keeps(problem):
            return problem
    raise ValueError(f'seed {seed}: 1000 problems were made and none is of this split')


# Mathematics.


def shown(numerator: int, denominator: int) -> str:
    """A fraction in lowest terms, in LaTeX."""
    divisor = math.gcd(numerator, denominator)
    numerator, denominator = numerator // divisor, denominator // divisor
    return str(numerator) if denominator == 1 else f'\\frac{{{numerator}}}{{{denominator}}}'


def made_math(draw: random.Random) -> MathProblem:
    """A question of one of a few kinds, with its exact answer."""
    a, b, c = draw.randint(2, 30), draw.randint(2, 30), draw.randint(2, 12)
    n = draw.randint(20, 200)
    makers: Sequence[tuple[str, str, int]] = (
        (f'Solve {a}x + {b} = {c * a + 3} for x.', shown(c * a + 3 - b, a), 1),
        (f'What is the remainder when {a}^{{{n}}} is divided by {b}?', str(pow(a, n, b)), 2),
        (f'What is the sum of all positive whole numbers below {n * 5} that are divisible by {a} or by {b}?',
         str(sum(i for i in range(1, n * 5) if i % a == 0 or i % b == 0)), 2),
        (f'What is the greatest common divisor of {a * c * 6} and {b * c * 4}?',
         str(math.gcd(a * c * 6, b * c * 4)), 1),
        (f'A fair die with {a} sides, numbered from 1, is thrown twice. What is the probability that the sum is '
         f'{min(b, 2 * a)}?',
         shown(sum(1 <= min(b, 2 * a) - i <= a for i in range(1, a + 1)), a * a), 3),
        (f'How many positive divisors has {a * b * c}?',
         str(sum((a * b * c) % i == 0 for i in range(1, a * b * c + 1))), 2),
    )  # fmt: skip
    question, answer, level = draw.choice(makers)
    return MathProblem(f'made-{zlib.crc32(question.encode()):08x}', question, answer, level)


# Programming.


@dataclasses.dataclass(frozen=True)
class Kind:
    """A family of small programming tasks over two numbers, k and m.

    Attributes:
      text: the task; `{k}` and `{m}` are the numbers.
      solve: the expected output for a list of numbers, k and m.
      golden: the body of a right program: `a` is the list, `k` and `m` the numbers.
      wrong: bodies of programs that are wrong for some input.
    """

    text: str
    solve: Callable[[list[int], int, int], Any]
    golden: str
    wrong: tuple[str, ...]
    level: int = 1


READ = 'n = int(input())\na = list(map(int, input().split()))\nk, m = {k}, {m}\n'
KINDS: tuple[Kind, ...] = (
    Kind('Print the sum of those numbers that are divisible by {k}, plus {m}.',
         lambda a, k, m: sum(x for x in a if x % k == 0) + m,
         'print(sum(x for x in a if x % k == 0) + m)',
         ('print(sum(a) + m)', 'print(sum(x for x in a if x % k == 0 and x > 0) + m)')),
    Kind('Print the largest difference of two of the numbers, times {k}, plus {m}.',
         lambda a, k, m: (max(a) - min(a)) * k + m,
         'print((max(a) - min(a)) * k + m)',
         ('print((a[-1] - a[0]) * k + m)', 'print(max(a) - min(a) + m)')),
    Kind('Print the numbers in order from small to large, each times {m} and then increased by {k}, with one space '
         'between them.',
         lambda a, k, m: ' '.join(str(x * m + k) for x in sorted(a)),
         'print(*[x * m + k for x in sorted(a)])',
         ('print(*[x * m + k for x in a])', 'print(*[x * m + k for x in sorted(set(a))])')),
    Kind('Print how many of the numbers are larger than {k}, times {m}.',
         lambda a, k, m: sum(x > k for x in a) * m,
         'print(sum(x > k for x in a) * m)',
         ('print(sum(x >= k for x in a) * m)', 'print(len(a) * m)')),
    Kind('Print the largest sum of numbers that stand next to each other (at least one), times {m}, plus {k}.',
         lambda a, k, m: max(sum(a[i:j]) for i in range(len(a)) for j in range(i + 1, len(a) + 1)) * m + k,
         'best = now = a[0]\nfor x in a[1:]:\n    now = max(x, now + x)\n    best = max(best, now)\n'
         'print(best * m + k)',
         ('print(sum(x for x in a if x > 0) * m + k)', 'print(max(a) * m + k)'), 2),
    Kind('Print the length of the longest run of neighbours in which each number is larger than the one before it, '
         'times {m}, plus {k}.',
         lambda a, k, m: max(n for i in range(len(a)) for n in range(1, len(a) - i + 1)
                             if all(x < y for x, y in itertools.pairwise(a[i : i + n]))) * m + k,
         'best = now = 1\nfor x, y in zip(a, a[1:]):\n    now = now + 1 if x < y else 1\n    best = max(best, now)\n'
         'print(best * m + k)',
         ('print(len(a) * m + k)', 'print(sum(x < y for x, y in zip(a, a[1:])) * m + k)'), 2),
    Kind('Print the numbers in reverse order, each times {m} and on a line of its own, without those equal to {k}.',
         lambda a, k, m: '\n'.join(str(x * m) for x in reversed(a) if x != k),
         'for x in reversed(a):\n    if x != k:\n        print(x * m)',
         ('for x in reversed(a):\n    print(x * m)', 'for x in a:\n    if x != k:\n        print(x * m)')),
)  # fmt: skip
FORM = 'The first line has a number n (1 to 20), the second n whole numbers between -20 and 20. '


def made_code(draw: random.Random) -> CodeProblem:
    """A task of one of the kinds, with tests that its wrong programs fail."""
    kind, k, m = draw.choice(KINDS), draw.randint(2, 19), draw.randint(2, 60)
    lists = [[k, -k, k + 1, k], [draw.randint(-20, 20)]]
    lists += [[draw.randint(-20, 20) for _ in range(draw.randint(2, 20))] for _ in range(6)]
    tests = tuple((f'{len(a)}\n{" ".join(map(str, a))}\n', f'{kind.solve(a, k, m)}\n') for a in lists)
    head = READ.format(k=k, m=m)
    return CodeProblem(
        f'made-{KINDS.index(kind)}-{k}-{m}',
        FORM + kind.text.format(k=k, m=m),
        tests,
        head + kind.golden,
        tuple(head + body for body in kind.wrong),
        kind.level,
    )
