"""What tasks made of problems have in common: where the problems of each split come from, and how programs are run."""

import abc
import dataclasses
import functools
import random
from collections.abc import Callable
from typing import Any, ClassVar

from mallm.envs import data, sandbox
from mallm.envs.base import FINAL, FINAL_STRICT, HELD_OUT, STRICT, Demonstration, Task, World
from mallm.envs.data import DataError, Manifest, Order, Problem
from mallm.envs.problems import CodeProblem, draw_until, fold
from mallm.envs.sandbox import Limits

SPLITS = (HELD_OUT, STRICT, FINAL, FINAL_STRICT)
FILE_FOLDS = 64
"""The first four of so many parts of a training file are held out, one for each split."""


@dataclasses.dataclass(frozen=True)
class ProblemTask(Task, abc.ABC):
    """Problems made here from seeds, or read from files.

    Attributes:
      problems: 'made', or the training set as `mallm.envs.data` names it, e.g. 'polaris:train.jsonl'.
      final: the set of the final split; '' takes problems of `problems` that are kept from training.
      final_strict: the same for the strict final split; '' takes `final`.
      shared_words: a training problem that shares so many words in a row with one of these two sets is left out.
      cpu_s, memory_mib: of one program.
      require_isolation: refuse to run programs where a wall of the sandbox is missing.
    """

    instance_name: ClassVar[str] = 'problem'
    difficulty_name: ClassVar[str] = 'level'
    floor_name: ClassVar[str] = 'chance'

    problems: str = 'made'
    final: str = ''
    final_strict: str = ''
    shared_words: int = 13
    cpu_s: int = 5
    memory_mib: int = 512
    require_isolation: bool = False

    @abc.abstractmethod
    def made(self) -> Callable[[random.Random], Any]:
        """Makes a problem from a draw."""

    @abc.abstractmethod
    def world(self, problem: Any, training: bool) -> World:
        """The team's world of a problem."""

    @property
    def limits(self) -> Limits:
        return Limits(self.cpu_s, 3.0 * self.cpu_s, self.memory_mib, isolated=self.require_isolation)

    def train(self, seed: int) -> World:
        """A problem of no held-out split: the same for the same seed, so that a resumed run sees what it would have."""
        if self.problems == 'made':
            return self.world(draw_until(self.made(), seed, lambda part: part >= len(SPLITS)), training=True)
        pool = self.parts()[-1]
        return self.world(pool[Order(len(pool), 0).at(seed)], training=True)

    def test(self, split: int, index: int) -> World:
        """Problem `index` of a split; a smaller set begins again."""
        part = SPLITS.index(split)
        name = {FINAL: self.final, FINAL_STRICT: self.final_strict or self.final}.get(split, '')
        if name:
            found, _ = data.load(name)
        elif self.problems == 'made':
            return self.world(draw_until(self.made(), split + index, lambda fold: fold == part), training=False)
        else:
            found = self.parts()[part]
        return self.world(found[index % len(found)], training=False)

    @property
    def needs_golden(self) -> bool:
        """Whether problems without a golden program are of no use in training."""
        return False

    def parts(self) -> tuple[tuple[Problem, ...], ...]:
        return parts(self.problems, self.final, self.final_strict, self.shared_words, self.needs_golden)

    def about(self) -> tuple[str, ...]:
        """The walls around programs, and every set that was read. Refuses to go on without walls that are required."""
        sandbox.run('', limits=self.limits)
        sets = [
            f'set {m.kind}: {m.kept} of {m.rows} rows of {m.file} ({m.split}, {m.licence}, sha256 {m.sha256[:12]}); '
            f'left out: {dict(m.skipped)}'
            for m in self.manifests()
        ]
        return (str(sandbox.shared().walls), *sets)

    def manifests(self) -> tuple[Manifest, ...]:
        """What was read for this task; empty where everything is made."""
        names = [name for name in (self.problems, self.final, self.final_strict) if name not in ('', 'made')]
        return tuple(data.load(name)[1] for name in dict.fromkeys(names))

    def difficulty(self, world: Any) -> int:
        return int(world.problem.level)

    def floor(self, world: Any, turns: int, seed: int) -> bool:
        """Chance answers nothing here."""
        return False

    def demonstrations(self, seed: int) -> list[Demonstration]:
        """None: these tasks are for models that can write already."""
        return []


@functools.lru_cache(maxsize=8)
def parts(name: str, final: str, final_strict: str, words: int, golden: bool) -> tuple[tuple[Problem, ...], ...]:
    """A training file's held-out parts, one for each split, and last what is trained on: nothing that is in the final
    sets and, if wanted, nothing without a golden program. Raises DataError where one of them is empty."""
    tests = [problem for other in (final, final_strict) if other for problem in data.load(other)[0]]
    problems, _ = data.load(name)
    if tests:
        problems, _ = data.decontaminated(problems, tests, words)
    problems = tuple(p for p in problems if not (golden and isinstance(p, CodeProblem) and p.golden is None))
    folds = {problem: fold(problem.question, FILE_FOLDS) for problem in problems}
    cut = [tuple(problem for problem in problems if folds[problem] == part) for part in range(len(SPLITS))]
    cut.append(tuple(problem for problem in problems if folds[problem] >= len(SPLITS)))
    empty = [i for i, part in enumerate(cut) if not part and (i in (0, 1, len(SPLITS)) or not final)]
    if empty:
        raise DataError(
            f'set {name!r}: its {len(problems)} problems leave part {empty} of {FILE_FOLDS} empty; it is too small to '
            'be held out from'
        )
    return tuple(cut)
