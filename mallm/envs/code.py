"""Programming for a team: `coder` writes a program, `tester` writes tests for it.

Roles that exist:
  coder   reads the task and the tests that its last program failed; writes a program that reads stdin and prints.
  tester  reads the task and what came of its last tests; writes pairs of input and output.
A team is ('coder', 'tester'), or ('coder',) alone, who is shown no test.

Rewards follow the paper. Team: the share of the golden tests that the program passes. `coder`: 0.1 for a program that
is Python, 0.1 for one that ends well on the first three golden tests, 0.8 times the share that passes. `tester`: 0.2
for tests that can be read, 0.8 times the share of good ones. A good test is one that the golden program passes and,
where wrong programs are known, one of them fails: a false test never counts, and one that says nothing counts only in
sets without wrong programs (those made here and code_contests have them, apps has none).

An episode is over when the program passes all of the tester's tests: that needs no golden test, so evaluation ends by
the same rule. Agreement is not success: solved means that all golden tests pass.
"""

import dataclasses
import functools
import random
import re
from collections.abc import Callable
from typing import ClassVar

from mallm.envs import sandbox
from mallm.envs.grading import same_output
from mallm.envs.problem_task import ProblemTask
from mallm.envs.problems import CodeProblem, made_code
from mallm.envs.python_tool import after_thoughts, cut, extract_code, is_python
from mallm.envs.sandbox import Limits, Status
from mallm.types import Message, Reward

TEAMS = (('coder', 'tester'), ('coder',))
MOST_TESTS = 4
SMOKE = 3
SHOWN = 300
LONGEST_TEST = 2000

SYSTEM = {
    'coder': (
        'You solve programming tasks in Python 3. The program reads standard input, prints to standard output, and '
        'prints nothing that is not asked for. Write the whole program in one ```python block.'
    ),
    'tester': (
        'You test programs. For the task you are given, write up to four small tests that a wrong program is likely to '
        'fail, and work out the right output of each with care. Write every test exactly so:\n'
        '**Test Input:**\n```\nthe input\n```\n**Test Output:**\n```\nthe right output\n```'
    ),
}


@dataclasses.dataclass(frozen=True)
class Mismatch:
    """A test that the program did not pass."""

    stdin: str
    expected: str
    got: str


@dataclasses.dataclass(frozen=True)
class CodeTeam:
    """One task in the hands of a team; see `mallm.envs.base.World`.

    Attributes:
      problem: with the golden tests, which no role sees.
      order: the roles of the team, in acting order.
      limits: of one run of a program.
      tolerance, tokens: how outputs are compared, see `mallm.envs.grading.same_output`.
      program: the coder's last one, or None.
      passed: share of the golden tests that it passes.
      mismatches: the tester's last tests that it failed.
      tested: how many tests it was put to.
      over: it passed all of them; or a coder alone wrote the same program again.
    """

    waits: ClassVar[bool] = True
    earns: ClassVar[tuple[float, float]] = (0.0, 1.0)
    problem: CodeProblem
    order: tuple[str, ...] = ('coder', 'tester')
    limits: Limits = Limits()
    tolerance: float = 1e-6
    tokens: bool = False
    program: str | None = None
    passed: float = 0.0
    mismatches: tuple[Mismatch, ...] = ()
    tested: int = 0
    over: bool = False

    @property
    def solved(self) -> bool:
        return self.passed == 1.0

    def observe(self, role: str) -> tuple[Message, ...]:
        told = [self.problem.question]
        if role == 'coder' and self.program is not None:
            told.append(f'Your last program:\n```python\n{cut(self.program, 4 * SHOWN)}\n```')
        if self.mismatches:
            told.append(
                'It failed these tests, which can be wrong themselves:'
                if role == 'coder'
                else 'A program failed these tests of yours. Either may be wrong: check them, and write better ones.'
            )
            told += [
                f'Input:\n```\n{cut(m.stdin, SHOWN)}\n```\nExpected:\n```\n{cut(m.expected, SHOWN)}\n```\n'
                f'Printed:\n```\n{cut(m.got, SHOWN)}\n```'
                for m in self.mismatches
            ]
        return (Message('system', SYSTEM[role]), Message('user', '\n\n'.join(told)))

    def act(self, role: str, text: str) -> 'tuple[CodeTeam, Reward]':
        return act_coder(self, text) if role == 'coder' else act_tester(self, text)

    def render(self) -> str:
        lines = [cut(self.problem.question, 3 * SHOWN), f'golden tests passed: {self.passed:.0%}']
        return '\n'.join([*lines, f'tests of the tester: {self.tested}, failed: {len(self.mismatches)}'])


@dataclasses.dataclass(frozen=True)
class Run:
    """One run of a program: how it ended, what it printed, whether it was Python at all."""

    status: Status
    stdout: str
    python: bool


@functools.lru_cache(maxsize=512)
def ran(program: str, stdin: str, limits: Limits) -> Run:
    verdict = sandbox.run(program, stdin, limits)
    return Run(verdict.status, verdict.stdout, is_python(verdict))


def passes(world: CodeTeam, program: str, test: tuple[str, str], limits: Limits) -> tuple[bool, Run]:
    """Whether a program ends well on the input and prints the output, and its run."""
    run = ran(program, test[0], limits)
    right = run.status == 'ok' and same_output(test[1], run.stdout, tolerance=world.tolerance, tokens=world.tokens)
    return right, run


def judged(world: CodeTeam, program: str) -> list[tuple[bool, Run]]:
    """How a program fares on the golden tests, in order; after two that took too long the rest are failed unseen."""
    tests = world.problem.tests
    longest = max((len(output) for _, output in tests), default=0)
    limits = dataclasses.replace(world.limits, output_kib=max(64, 2 * longest >> 10))
    found: list[tuple[bool, Run]] = []
    for test in tests:
        if sum(run.status == 'timeout' for _, run in found) >= 2:
            found.append((False, Run('timeout', '', True)))
        else:
            found.append(passes(world, program, test, limits))
    return found


def act_coder(world: CodeTeam, text: str) -> tuple[CodeTeam, Reward]:
    """The program is judged by the golden tests. The tester's old tests are of no use to it any more.

    An answer without a program earns nothing and changes nothing.
    """
    program = extract_code(text)
    results = [] if program is None else judged(world, program)
    share = sum(right for right, _ in results) / len(world.problem.tests)
    builds = bool(results) and results[0][1].python
    runs = builds and all(run.status == 'ok' for _, run in results[:SMOKE])
    local = (('build', 0.1), ('format', -0.1 * (not builds)), ('run', 0.1 * runs), ('tests', 0.8 * share))
    after = world
    if program is not None:
        over = 'tester' not in world.order and program == world.program
        after = dataclasses.replace(world, program=program, passed=share, mismatches=(), tested=0, over=over)
    return after, earned(share, local)


def earned(share: float, local: tuple[tuple[str, float], ...]) -> Reward:
    """The team earns the share of golden tests that are passed."""
    logged = (('solved', float(share == 1.0)), ('passed', share), *local)
    return Reward(share, sum(value for _, value in local), logged)


TEST = re.compile(
    r'\*\*Test Input:?\*\*:?[ \t]*\n+[ \t]*```[^\n]*\n(.*?)```[ \t]*\n+'
    r'\s*\*\*Test Output:?\*\*:?[ \t]*\n+[ \t]*```[^\n]*\n(.*?)```',
    re.DOTALL,
)


def read_tests(text: str) -> tuple[tuple[str, str], ...]:
    """The first different tests of an answer, at most MOST_TESTS, each of bearable length."""
    found = dict.fromkeys((test[1], test[2]) for test in TEST.finditer(after_thoughts(text)))
    return tuple(test for test in found if max(map(len, test)) <= LONGEST_TEST)[:MOST_TESTS]


def act_tester(world: CodeTeam, text: str) -> tuple[CodeTeam, Reward]:
    """The tests are judged by the golden program and the wrong ones, and put to the coder's program."""
    tests = read_tests(text)
    good = [is_good(world, test) for test in tests]
    share = sum(good) / len(good) if good else 0.0
    local = (('valid', 0.2), ('format', -0.2 * (not tests)), ('good', 0.8 * share))
    mismatches = []
    for test in tests:
        if world.program is None:
            mismatches.append(Mismatch(*test, '(there is no program)'))
            continue
        right, run = passes(world, world.program, test, world.limits)
        if not right:
            mismatches.append(Mismatch(*test, run.stdout if run.status == 'ok' else f'{run.stdout}\n({run.status})'))
    after = dataclasses.replace(
        world, mismatches=tuple(mismatches), tested=len(tests), over=bool(tests) and not mismatches
    )  # fmt: skip
    return after, earned(world.passed, local)


def is_good(world: CodeTeam, test: tuple[str, str]) -> bool:
    """The golden program passes the test, and a wrong one, if any is known, fails it."""
    problem = world.problem
    if problem.golden is None or not passes(world, problem.golden, test, world.limits)[0]:
        return False
    return not problem.wrong or any(not passes(world, wrong, test, world.limits)[0] for wrong in problem.wrong)


@dataclasses.dataclass(frozen=True)
class CodeTask(ProblemTask):
    """Which programming tasks are put to which team; see `ProblemTask`.

    Attributes:
      team: ('coder', 'tester'), or ('coder',) alone.
      train_tests: golden tests of a training problem that are run, the first ones; all of them in evaluation.
      tolerance: of decimal numbers in outputs.
      tokens: compare outputs word by word, without lines and indentation.
    """

    team: tuple[str, ...] = ('coder', 'tester')
    train_tests: int = 8
    tolerance: float = 1e-6
    tokens: bool = False

    def __post_init__(self) -> None:
        if self.team not in TEAMS:
            raise ValueError(f'team={self.team}: has to be one of {TEAMS}')
        if self.train_tests < 1:
            raise ValueError(f'train_tests={self.train_tests}: a program is judged by at least one test')

    @property
    def needs_golden(self) -> bool:
        """A tester learns from a golden program only."""
        return 'tester' in self.team

    def made(self) -> Callable[[random.Random], CodeProblem]:
        return made_code

    def world(self, problem: CodeProblem, training: bool) -> CodeTeam:
        tests = problem.tests[: self.train_tests] if training else problem.tests
        kept = dataclasses.replace(problem, tests=tests)
        return CodeTeam(kept, self.team, self.limits, self.tolerance, self.tokens)
