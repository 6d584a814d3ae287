r"""Whether a mathematical answer, or the output of a program, is right.

Mathematics. The answer is what the last \boxed{} or \fbox{} after the thoughts holds. Numbers are compared here, as
exact fractions; what is left goes to math-verify, inside the sandbox, under limits of time and memory, and never in
this process. Nothing a model wrote is evaluated as Python. Where graders differ, this one decides:

  rounded values are wrong                  \frac{2}{3} against 0.67; a decimal must equal the fraction
  a per cent sign is a hundredth            25\% equals 0.25 and 1/4; 25 and 0.25 differ; on one side only, and of a
                                            number from 1 on, it may be dropped: 25\% equals 25, never 0.0025
  a unit on one side only is dropped        12 cm against 12; degrees likewise; two different units are wrong
  one letter is a unit                      after a blank or in \text: 3m is 3 times m, against 3 it is wrong
  a comma with a blank after it is a list   5, 125 against 5125 is wrong; 5,125 and 5\,125 are 5125
  a blank between digits counts             1 2 is not 12, 3 1/2 is not 31/2
  inequalities equal their intervals        x<-2 or x>5 against (-\infty,-2)\cup(5,\infty)
  unequal numbers are unequal               however near zero: 2^{-90} against 2^{-91}
  a choice is its letter                    \text{(C)} against C
  hours and minutes are one value           12:00 against 1:00 is wrong
  what cannot be compared in time           is wrong, and counted (`Grade.sure`)

Programs. Output is compared line by line. Blanks at the end of lines and empty lines at the end do not count, blanks at
the beginning do, and between two tokens one counts as many. A token is compared as text; where the expected one has a
decimal point or an exponent, as a number within a tolerance, and where it is a whole number, only a whole number equals
it (3.0000001 is not 3). `tokens=True` forgets lines and indentation. Programs read stdin and print: problems
that call a function are left out by the loaders, and counted.
"""

import dataclasses
import fractions
import functools
import importlib.util
import json
import math
import os
import pathlib
import re

from mallm.envs.python_tool import after_thoughts
from mallm.envs.sandbox import Limits, Sandbox, SandboxError

GRADING = Limits(cpu_s=3, wall_s=30.0, memory_mib=2048)
LONGEST = 2000
"""Characters of an answer; a longer one is wrong."""


@dataclasses.dataclass(frozen=True)
class Grade:
    """Attributes:
    right: the answer equals the gold answer.
    sure: False where the comparison broke off, which counts as wrong.
    """

    right: bool
    sure: bool = True


# Mathematics.


def boxed(text: str) -> str | None:
    r"""Content of the last \boxed{...}, \fbox{...} or `\boxed 7` after the thoughts; None without one.

    Braces are counted, escaped ones are not. A last box that was never closed holds what follows it.
    """
    text = after_thoughts(text)
    starts = list(re.finditer(r'\\f?box(?:ed)?(?![a-zA-Z])\s*', text))
    if not starts:
        return None
    rest = text[starts[-1].end() :]
    if not rest.startswith('{'):
        found = re.match(r'[^\s$\\{}]+', rest)
        return found[0].rstrip('.,;') if found else None
    depth, at = 0, 0
    while at < len(rest):
        if rest[at] == '\\':
            at += 2
            continue
        depth += {'{': 1, '}': -1}.get(rest[at], 0)
        if depth == 0:
            break
        at += 1
    return rest[1:at].strip()


def tidy(text: str) -> str:
    """LaTeX without what has no meaning: dollars, spacing, sizes of brackets, `\\text` around, a final full stop."""
    text = text.strip().strip('$').strip()
    text = re.sub(r'\\(?:left|right|displaystyle|bigl?|bigr|Bigl?|Bigr)(?![a-zA-Z])', '', text)
    text = re.sub(r'(?<!\\)\\[,;:! ]|\\q?quad(?![a-zA-Z])|~', ' ', text)
    text = text.replace('\\dfrac', '\\frac').replace('\\tfrac', '\\frac').replace('\\$', '').replace('−', '-')
    text = re.sub(r'\^\s*(?:\{\s*\\circ\s*\}|\\circ)|°', '', text)
    while whole := re.fullmatch(r'\\(?:text|mathrm|textbf|mathbf|operatorname)\{([^{}]*)\}', text.strip()):
        text = whole[1]
    text = re.sub(r'\s+', ' ', text).strip()
    return text[:-1] if text.endswith('.') else text


UNITS = (
    'mm millimeter millimeters millimetre millimetres', 'cm centimeter centimeters centimetre centimetres',
    'm meter meters metre metres', 'km kilometer kilometers kilometre kilometres', 'in inch inches', 'ft foot feet',
    'yd yard yards', 'mi mile miles', 'mg milligram milligrams', 'g gram grams', 'kg kilogram kilograms',
    'lb lbs pound pounds', 'ml milliliter milliliters', 'L liter liters litre litres', 's sec second seconds',
    'min minute minutes', 'h hr hrs hour hours', 'day days', 'week weeks', 'month months', 'year years',
    'degree degrees', 'dollar dollars', 'cent cents', 'unit units', 'N newton newtons', 'J joule joules',
    'W watt watts', 'V volt volts',
)  # fmt: skip
"""Units that are written without \\text; those in one text are the same unit."""
UNIT_OF = {name: names.split()[0] for names in UNITS for name in names.split()}
POWER = r'(?:\s*\^\s*\{?\s*(?P<power>[0-9])\s*\}?)?$'
LONG, SHORT = ('|'.join(name for name in UNIT_OF if (len(name) > 1) is long) for long in (True, False))
MARKED_UNIT = re.compile(r'(?<=[0-9}])\s*\\(?:text|mathrm)\{\s*(?P<name>[^{}0-9]*?)\s*\}' + POWER)
NAMED_UNIT = re.compile(rf'(?<=[0-9}}])\s*(?P<name>(?i:{LONG})|(?<=\s)(?:{SHORT}))' + POWER)


def without_unit(text: str) -> tuple[str, str]:
    """A number and its unit under its first name, which is empty where there is none."""
    found = MARKED_UNIT.search(text) or NAMED_UNIT.search(text)
    if not found or found['name'].split()[:1] in (['or'], ['and']):
        return text, ''
    name, power = ' '.join(found['name'].split()), found['power'] or ''
    for word, exponent in (('square ', '2'), ('sq ', '2'), ('cubic ', '3')):
        if name.startswith(word):
            name, power = name.removeprefix(word), exponent
    return text[: found.start()].strip(), (UNIT_OF.get(name) or UNIT_OF.get(name.casefold(), name.casefold())) + power


def measured(gold: str, answer: str) -> tuple[tuple[str, str], tuple[str, str]]:
    """Both without their units. A letter right after a number is a unit where the other side marks it as one."""
    sides = [without_unit(gold), without_unit(answer)]
    for i, (text, unit) in enumerate(sides):
        other = sides[1 - i][1]
        if not unit and len(other) == 1 and re.search(rf'[0-9]{other}$', text):
            sides[i] = text[:-1], other
    return sides[0], sides[1]


DIGITS = r'[1-9][0-9]{0,2}(?:(?:,|\{,\}| )[0-9]{3})+|[0-9]+'
PLAIN = re.compile(rf'([-+]?)\s*((?:{DIGITS})?(?:\.[0-9]*)?)\s*(\\?%)?')
SCIENCE = re.compile(r'([-+]?[0-9]*\.?[0-9]+)\s*(?:\\times|\\cdot|×|\*)\s*10\s*\^\s*\{?\s*([-+]?[0-9]{1,3})\s*\}?')
EXPONENT = re.compile(r'([-+]?[0-9]*\.?[0-9]+)[eE]([-+]?[0-9]{1,3})')
QUOTIENT = re.compile(
    r'([-+]?)\s*([0-9]*)\s*\\frac\s*(?:\{\s*([-+]?[0-9.]+)\s*\}|([0-9]))\s*(?:\{\s*([0-9.]+)\s*\}|([0-9]))'
)
SLASH = re.compile(r'([-+]?)\s*(?:([0-9]+)\s+)?([0-9.]+)\s*/\s*([0-9.]+)')


def number(text: str) -> fractions.Fraction | None:
    """The exact value of a whole number, decimal, fraction, mixed number, per cent or power of ten; else None."""
    try:
        if found := PLAIN.fullmatch(text):
            digits = re.sub(r'[^0-9.]', '', found[2])
            value = fractions.Fraction(digits if digits.strip('.') else 'none')
            return (-value if found[1] == '-' else value) / (100 if found[3] else 1)
        if found := SCIENCE.fullmatch(text) or EXPONENT.fullmatch(text):
            return fractions.Fraction(found[1]) * fractions.Fraction(10) ** int(found[2])
        if found := QUOTIENT.fullmatch(text):
            value = fractions.Fraction(found[3] or found[4]) / fractions.Fraction(found[5] or found[6])
            value += int(found[2] or 0)
            return -value if found[1] == '-' else value
        if found := SLASH.fullmatch(text):
            value = int(found[2] or 0) + fractions.Fraction(found[3]) / fractions.Fraction(found[4])
            return -value if found[1] == '-' else value
    except (ValueError, ZeroDivisionError):
        return None
    return None


CLOCK = re.compile(r'([0-9]{1,2}):([0-9]{2})')
CHOICE = re.compile(r'\\?\(?\s*(?:\\text(?:bf)?\{\s*)?\(?\s*([A-J])\s*\)?\s*\}?\s*\\?\)?')
BOUND = r'([^<>=\\]+?|-?\\frac\{[^{}]*\}\{[^{}]*\}|-?\\sqrt\{[^{}]*\})'
LESS = r'\s*(<=?|\\leq?(?![a-z])|\\lt(?![a-z])|≤)\s*'
MORE = r'\s*(>=?|\\geq?(?![a-z])|\\gt(?![a-z])|≥)\s*'


def interval(text: str) -> str | None:
    """An inequality of one variable as an interval, or None: `x<-2` becomes `(-\\infty,-2)`."""
    closed = lambda sign: sign not in ('<', '>', '\\lt', '\\gt')  # noqa: E731
    if found := re.fullmatch(BOUND + LESS + r'[a-z]' + LESS + BOUND, text):
        return f'{"[" if closed(found[2]) else "("}{found[1]},{found[4]}{"]" if closed(found[3]) else ")"}'
    if found := re.fullmatch(r'[a-z]' + LESS + BOUND, text) or re.fullmatch(BOUND + MORE + r'[a-z]', text):
        sign, bound = (found[1], found[2]) if re.match(r'[a-z]\s*[<\\≤]', text) else (found[2], found[1])
        return f'(-\\infty,{bound}{"]" if closed(sign) else ")"}'
    if found := re.fullmatch(r'[a-z]' + MORE + BOUND, text) or re.fullmatch(BOUND + LESS + r'[a-z]', text):
        sign, bound = (found[1], found[2]) if re.match(r'[a-z]\s*[>\\≥]', text) else (found[2], found[1])
        return f'{"[" if closed(sign) else "("}{bound},\\infty)'
    return None


def as_intervals(text: str) -> str:
    """Inequalities joined by `or` as a union of intervals; other text as it is."""
    pieces = re.split(r'\s*(?:\\text\{\s*or\s*\}|\bor\b|\\cup|\\lor|\\vee)\s*', text)
    found = [interval(piece.strip()) for piece in pieces]
    return '\\cup'.join(piece for piece in found if piece) if all(found) else text


def latex(text: str) -> str:
    """What math-verify is given: functions with a backslash, no decimal that is a whole number."""
    text = re.sub(r'(?<![\\a-zA-Z])(exp|sin|cos|tan|ln|log)(?=\s*[({])', r'\\\1', text)
    text = re.sub(r'\\?exp\s*\(([^()]*)\)', r'e^{\1}', text)
    text = re.sub(r'(?<![\\a-zA-Z])sqrt\s*\(([^()]*)\)', r'\\sqrt{\1}', text)
    text = re.sub(r'(?<![0-9.])([0-9]+)\.0+(?![0-9])', r'\1', text)
    return re.sub(r'(?<![0-9])1i(?![a-zA-Z])', 'i', text)


def same_text(one: str, other: str, *, words: bool) -> bool:
    """Whether two texts are equal but for blanks that are not between digits, and a leading plus.

    Size does not count in words: in three letters or more, and in two where `words` says that they are no formula. In
    formulas it does: A is not a.
    """
    one, other = (re.sub(r'(?<![0-9.]) | (?![0-9.])', '', text).removeprefix('+') for text in (one, other))
    if one == other:
        return True
    return one.casefold() == other.casefold() and one.isalpha() and len(one) > (1 if words else 2)


def variables(text: str) -> set[str]:
    r"""Letters that stand for something: outside of commands, of \text and of words of three letters or more."""
    bare = re.sub(r'\\(?:text|mathrm|textbf|mathbf|operatorname)\{[^{}]*\}|\\[a-zA-Z]+', ' ', text)
    return {letter for run in re.findall('[a-zA-Z]+', bare) if len(run) < 3 for letter in run}


def other_variables(wanted: str, said: str) -> bool:
    """Whether two formulas differ in what math-verify overlooks: 3m or `3 or 4` against 3, A against a."""
    mine, theirs = variables(wanted), variables(said)
    if (number(wanted) is not None or number(said) is not None) and '=' not in wanted + said:
        return bool((mine | theirs) - {'e', 'i'}) or bool(re.search(r'\b(?:or|and)\b', f'{wanted} {said}'))
    return mine != theirs and {name.casefold() for name in mine} == {name.casefold() for name in theirs}


def same_number(value: fractions.Fraction, other: fractions.Fraction, *, signs: tuple[bool, bool]) -> bool:
    """Whether two numbers are equal; `signs` tells which were written with a per cent sign."""
    if value == other or signs[0] == signs[1]:
        return value == other
    marked, plain = (value, other) if signs[0] else (other, value)
    return abs(marked) >= fractions.Fraction(1, 100) and plain == 100 * marked


@functools.lru_cache(maxsize=1 << 14)
def grade_math(gold: str, answer: str | None, *, isolated: bool = False) -> Grade:
    """Whether an answer, taken out of its box, equals the gold answer; see the head of this file for the policy.

    Raises SandboxError where the sandbox is broken, or lacks a wall and `isolated` demands it.
    """
    if answer is None or len(answer) > LONGEST or not answer.strip():
        return Grade(False)
    (wanted, unit), (said, said_unit) = measured(tidy(gold), tidy(answer))
    if unit and said_unit and unit != said_unit:
        return Grade(False)
    assigned = re.fullmatch(r'[a-zA-Z]\s*=\s*([^=]*)', said)
    bare = assigned[1] if assigned and '=' not in wanted else said
    value, other = number(wanted), number(bare)
    if value is not None and other is not None:
        return Grade(same_number(value, other, signs=('%' in wanted, '%' in said)))
    if same_text(wanted, said, words='no' in (wanted.casefold(), said.casefold()) or r'\text' in gold + answer):
        return Grade(True)
    clocks = CLOCK.fullmatch(wanted), CLOCK.fullmatch(said)
    if any(clocks):
        return Grade(all(clocks) and [*map(int, clocks[0].groups())] == [*map(int, clocks[1].groups())])  # type: ignore[union-attr]
    letters = CHOICE.fullmatch(wanted), CHOICE.fullmatch(said)
    if letters[0] and letters[1]:
        return Grade(letters[0][1] == letters[1][1])
    if other_variables(wanted, bare):
        return Grade(False)
    return verify(latex(as_intervals(wanted)), latex(as_intervals(said)), isolated=isolated)


VERIFIER = r"""
import json, logging, sys
logging.disable(logging.CRITICAL)
import sympy
from math_verify import LatexExtractionConfig, parse, verify
wanted, said = json.load(sys.stdin)
read = lambda text: parse('$' + text + '$', [LatexExtractionConfig()], parsing_timeout=None)
a, b = read(wanted), read(said)
right = bool(a and b) and verify(a, b, timeout_seconds=None)
if right and isinstance(a[0], sympy.Expr) and isinstance(b[0], sympy.Expr) and a[0].is_number and b[0].is_number:
    x, y = sympy.N(a[0], 30), sympy.N(b[0], 30)
    right = x == y or bool(abs(x - y) <= 1e-12 * max(abs(x), abs(y)))
print(json.dumps([bool(a), bool(right)]))
"""


def verify(wanted: str, said: str, *, isolated: bool = False) -> Grade:
    """What math-verify says, in the sandbox; raises as `grade_math` does."""
    limits = dataclasses.replace(GRADING, isolated=isolated)
    verdict = verifiers(os.getpid()).run(VERIFIER, json.dumps([wanted, said]), limits)
    if not verdict.ok:
        return Grade(False, sure=False)
    _, right = json.loads(verdict.stdout.splitlines()[-1])
    return Grade(right)


@functools.cache
def verifiers(pid: int) -> Sandbox:
    """The sandbox whose helpers have math-verify loaded; one for each process, as `sandbox.shared`."""
    found = importlib.util.find_spec('math_verify')
    if found is None or found.origin is None:
        raise SandboxError("math-verify: is not installed, and grades mathematics; pip install -e '.[math]'")
    folder = pathlib.Path(found.origin).resolve().parents[1]
    return Sandbox(packages=[str(folder)], modules=['math_verify', 'sympy'])


# Programs.

REAL = re.compile(r'[-+]?(?:[0-9]+\.[0-9]*|\.[0-9]+|[0-9]+(?=[eE]))(?:[eE][-+]?[0-9]{1,4})?')
ANY_NUMBER = re.compile(r'[-+]?(?:[0-9]+\.?[0-9]*|\.[0-9]+)(?:[eE][-+]?[0-9]{1,4})?')


def same_token(expected: str, got: str, tolerance: float) -> bool:
    if expected == got:
        return True
    if not (REAL.fullmatch(expected) and ANY_NUMBER.fullmatch(got)):
        return False
    return near(float(expected), float(got), tolerance)


def near(expected: float, got: float, tolerance: float) -> bool:
    """Within the tolerance, absolute or relative to what was expected; no infinity is near another number."""
    if not (math.isfinite(expected) and math.isfinite(got)):
        return expected == got
    return abs(expected - got) <= tolerance * max(1.0, abs(expected))


def same_output(expected: str, got: str, *, tolerance: float = 1e-6, tokens: bool = False) -> bool:
    """Whether a program printed what was expected; see the head of this file. 0 as tolerance compares text only."""
    if tokens:
        pairs = [(expected.split(), got.split())]
    else:
        lines = [[line.rstrip() for line in text.rstrip().split('\n')] for text in (expected, got)]
        if len(lines[0]) != len(lines[1]):
            return False
        if any(indent(a) != indent(b) for a, b in zip(*lines, strict=True)):
            return False
        pairs = [(a.split(), b.split()) for a, b in zip(*lines, strict=True)]
    return all(
        len(a) == len(b) and all(same_token(x, y, tolerance) for x, y in zip(a, b, strict=True)) for a, b in pairs
    )


def indent(line: str) -> str:
    return line[: len(line) - len(line.lstrip())]
