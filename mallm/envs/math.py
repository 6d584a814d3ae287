r"""Mathematics for a team: `tool` writes Python that is run, `reason` sees the result and answers in a box.

Roles that exist:
  tool    writes a program; the last line that it prints is its answer.
  reason  sees this turn's program and output, and what both said in earlier turns; answers with \boxed{}.
  solo    one agent that holds the tool: writes a program whose output is the answer.
A team is ('tool', 'reason'), ('reason',) or ('solo',).

Rewards follow the paper: team 1 for a right answer; `reason` 0.2 for a box and 0.8 for a right answer; `tool` 0.1 for a
program that is Python, 0.1 for one that ends well and prints, 0.8 for a right answer. A role's candidate is judged by
the answer that it puts forward itself.

An episode is over when the roles agree, or one agent says the same twice: that needs no gold answer, so evaluation ends
by the same rule. Agreement is not success: solved means that the last answer of `reason` (or `solo`) is right.
"""

import dataclasses
import random
from collections.abc import Callable
from typing import ClassVar

from mallm.envs.grading import Grade, boxed, grade_math, verify
from mallm.envs.problem_task import ProblemTask
from mallm.envs.problems import MathProblem, made_math
from mallm.envs.python_tool import ToolRun, cut, is_python, run_python_tool
from mallm.envs.sandbox import Limits
from mallm.types import Message, Reward

TEAMS = (('tool', 'reason'), ('reason',), ('solo',))
PROGRAM = (
    'You solve mathematical problems by programming. Write one Python program in a ```python block. It is run, and the '
    'last line it prints has to be the answer and nothing else, exact and not rounded. Only the standard library is '
    'there, and nothing can be read in.'
)
REASON = (
    'You solve mathematical problems. Think step by step, and put your final answer, exact and not rounded, into '
    '\\boxed{}. You may be shown the output of a program that a colleague wrote for the problem: check it, it can be '
    'wrong.'
)
SYSTEM = {'tool': PROGRAM, 'solo': PROGRAM, 'reason': REASON}
LONGEST_CODE, LONGEST_TEXT, LONGEST_ANSWER = 2000, 1000, 200


@dataclasses.dataclass(frozen=True)
class Round:
    """What was said in one turn; texts are cut, None where a role has not spoken or gave no answer."""

    code: str | None = None
    report: str | None = None
    computed: str | None = None
    reasoning: str | None = None
    answer: str | None = None


@dataclasses.dataclass(frozen=True)
class MathTeam:
    """One problem in the hands of a team; see `mallm.envs.base.World`.

    Attributes:
      problem: with its answer, which no role sees.
      order: the roles of the team, in acting order.
      limits: of one program.
      rounds: earlier turns.
      now: this turn so far.
      solved: the last answer was right.
      over: the roles agreed, or one agent repeated its answer.
    """

    waits: ClassVar[bool] = True
    earns: ClassVar[tuple[float, float]] = (0.0, 1.0)
    problem: MathProblem
    order: tuple[str, ...] = ('tool', 'reason')
    limits: Limits = Limits()
    rounds: tuple[Round, ...] = ()
    now: Round = Round()
    solved: bool = False
    over: bool = False

    def observe(self, role: str) -> tuple[Message, ...]:
        told = [self.problem.question]
        for number, past in enumerate(self.rounds, start=1):
            told.append(f'--- Turn {number} ---\n{said(past)}')
        if role == 'reason' and self.now.report is not None:
            told.append(f'--- Now ---\n{said(self.now)}')
        if self.rounds:
            told.append('Check what was said, keep what is right, and answer again.')
        return (Message('system', SYSTEM[role]), Message('user', '\n\n'.join(told)))

    def act(self, role: str, text: str) -> 'tuple[MathTeam, Reward]':
        return act_reason(self, text) if role == 'reason' else act_program(self, role, text)

    def render(self) -> str:
        lines = [self.problem.question, f'right answer: {self.problem.answer}']
        for past in (*self.rounds, self.now):
            lines += [f'computed: {past.computed}'] * (past.report is not None)
            lines += [f'answered: {past.answer}'] * (past.reasoning is not None)
        return '\n'.join(lines)


def said(past: Round) -> str:
    """A turn as the roles are shown it."""
    parts = []
    if past.report is not None:
        parts.append(f'Program:\n```python\n{past.code or "# none"}\n```\nOutput:\n```\n{past.report}\n```')
    if past.reasoning is not None:
        parts.append(f'Reasoning:\n{past.reasoning}\nAnswer: {past.answer or "none"}')
    return '\n'.join(parts)


def computed(ran: ToolRun) -> str | None:
    """The last line that a program printed, out of its box; None where it failed or printed nothing."""
    lines = [line.strip() for line in ran.stdout.split('\n') if line.strip()]
    if not ran.ok or not lines:
        return None
    found = boxed(lines[-1])
    return lines[-1] if found is None else found


def compared(world: MathTeam, answer: str | None) -> Grade:
    return grade_math(world.problem.answer, answer, isolated=world.limits.isolated)


def agree(world: MathTeam, one: str | None, other: str | None) -> bool:
    if one is None or other is None:
        return False
    return grade_math(one, other, isolated=world.limits.isolated).right


def act_program(world: MathTeam, role: str, text: str) -> tuple[MathTeam, Reward]:
    """The program is run. What `tool` computes is shown to `reason`; what `solo` computes is the answer."""
    ran = run_python_tool(text, limits=world.limits)
    answer = computed(ran)
    grade = compared(world, answer)
    builds = ran.verdict is not None and is_python(ran.verdict)
    local = (('build', 0.1), ('format', -0.1 * (not builds)), ('run', 0.1 * (answer is not None)))
    kept = None if answer is None else answer[:LONGEST_ANSWER]
    code = None if ran.code is None else cut(ran.code, LONGEST_CODE)
    now = Round(code, cut(ran.shown(), LONGEST_TEXT), kept)
    if role == 'tool':
        after = dataclasses.replace(world, now=now)
    else:
        repeats = bool(world.rounds) and agree(world, world.rounds[-1].answer, kept)
        now = dataclasses.replace(now, answer=kept)
        after = dataclasses.replace(
            world, rounds=(*world.rounds, now), now=Round(), solved=grade.right, over=repeats
        )  # fmt: skip
    return after, earned(grade, local)


def act_reason(world: MathTeam, text: str) -> tuple[MathTeam, Reward]:
    """The answer in the box ends the turn."""
    answer = boxed(text)
    grade = compared(world, answer)
    kept = None if answer is None else answer[:LONGEST_ANSWER]
    other = world.now.computed if 'tool' in world.order else (world.rounds[-1].answer if world.rounds else None)
    now = dataclasses.replace(world.now, reasoning=cut(text, LONGEST_TEXT), answer=kept)
    after = dataclasses.replace(
        world, rounds=(*world.rounds, now), now=Round(), solved=grade.right, over=agree(world, other, kept)
    )  # fmt: skip
    return after, earned(grade, (('box', 0.2), ('format', -0.2 * (answer is None))))


def earned(grade: Grade, form: tuple[tuple[str, float], ...]) -> Reward:
    """The team earns a right answer, the role that and its form. `ungraded` counts comparisons that broke off."""
    local = (*form, ('match', 0.8 * grade.right))
    logged = (('solved', float(grade.right)), *local, ('ungraded', float(not grade.sure)))
    return Reward(float(grade.right), sum(value for _, value in local), logged)


@dataclasses.dataclass(frozen=True)
class MathTask(ProblemTask):
    """Which problems of mathematics are put to which team; see `ProblemTask`.

    Attributes:
      team: ('tool', 'reason'), ('reason',) without a tool, or ('solo',), one agent that programs.
    """

    team: tuple[str, ...] = ('tool', 'reason')

    def __post_init__(self) -> None:
        if self.team not in TEAMS:
            raise ValueError(f'team={self.team}: has to be one of {TEAMS}')

    def about(self) -> tuple[str, ...]:
        """See `ProblemTask`; the grader's own sandbox needs its walls as well where they are required."""
        told = super().about()
        if self.require_isolation:
            verify('1', '1', isolated=True)
        return told

    def made(self) -> Callable[[random.Random], MathProblem]:
        return made_math

    def world(self, problem: MathProblem, training: bool) -> MathTeam:
        return MathTeam(problem, self.team, self.limits)
