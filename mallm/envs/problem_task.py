"""What tasks made of problems have in common: where the problems of each split come from, and how programs are run."""

import abc
import dataclasses
import functools
import random
from collections.abc import Callable, Sequence
from typing import Any, ClassVar

from mallm.envs import data, sandbox
from mallm.envs.base import FINAL, FINAL_STRICT, HELD_OUT, STRICT, Demonstration, Task, World
from mallm.envs.data import DataError, Manifest, Order, Problem
from mallm.envs.problems import CodeProblem, draw_until, fold
from mallm.envs.sandbox import Limits

SPLITS = (HELD_OUT, STRICT, FINAL, FINAL_STRICT)
FILE_FOLDS = 64
"""The first four of so many parts of a training file are held out, one for each split."""
MADE_STRICT_LEVEL = 2
"""The least level of problems that are made here for a strict split."""


@dataclasses.dataclass(frozen=True)
class ProblemTask(Task, abc.ABC):
    """Problems made here from seeds, or read from files.

    Strict splits hold the problems whose level is above the middle one of their set, see `strict_level`; where all
    have one level, as in AIME, they are no harder than the others, and `about` says so. A set that is named for the
    strict final split is played whole.

    Attributes:
      problems: 'made', or the training set as `mallm.envs.data` names it, e.g. 'polaris:train.jsonl'.
      final: the set of the final split; '' takes problems of `problems` that are kept from training.
      final_strict: the same for the strict final split; '' takes the harder problems of `final`.
      shared_words: a training problem that shares so many words in a row with one that is held out is left out.
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
            keeps = lambda problem: fold(problem.question) >= len(SPLITS)  # noqa: E731
            return self.world(draw_until(self.made(), seed, keeps), training=True)
        pool = self.parts().training
        return self.world(pool[random.Random(seed).randrange(len(pool))], training=True)

    def train_at(self, position: int, *, run: int, seed: int) -> World:
        """Of problems from files, each comes once an epoch, whatever was resumed; made ones come from the seed."""
        if self.problems == 'made':
            return self.train(seed)
        pool = self.parts().training
        return self.world(pool[Order(len(pool), run).at(position)], training=True)

    def instances(self, split: int) -> int | None:
        found = self.read(split)
        return None if found is None else len(found)

    def test(self, split: int, index: int) -> World:
        """Problem `index` of a split; one that was read and is smaller begins again."""
        if found := self.read(split):
            return self.world(found[index % len(found)], training=False)
        part, least = SPLITS.index(split), MADE_STRICT_LEVEL if split in (STRICT, FINAL_STRICT) else 0
        keeps = lambda problem: fold(problem.question) == part and problem.level >= least  # noqa: E731
        return self.world(draw_until(self.made(), split + index, keeps), training=False)

    def read(self, split: int) -> tuple[Problem, ...] | None:
        """The problems of a split that come from files; None where they are made."""
        if name := {FINAL: self.final, FINAL_STRICT: self.final_strict or self.final}.get(split, ''):
            found, _ = data.load(name)
            return harder(found, strict_level(found)) if split == FINAL_STRICT and not self.final_strict else found
        return None if self.problems == 'made' else self.parts().held_out[SPLITS.index(split)]

    @property
    def needs_golden(self) -> bool:
        """Whether problems without a golden program are of no use in training."""
        return False

    def parts(self) -> 'Parts':
        return parts(self.problems, self.final, self.final_strict, self.shared_words, self.needs_golden)

    def about(self) -> tuple[str, ...]:
        """The walls around programs, and every set that was read. Refuses to go on without walls that are required."""
        sandbox.run('', limits=self.limits)
        sets = [
            f'set {m.kind}: {m.kept} of {m.rows} rows of {m.file} ({m.split}, {m.licence}, sha256 {m.sha256[:12]}); '
            f'left out: {dict(m.skipped)}'
            for m in self.manifests()
        ]
        cut = f'strict splits: level {MADE_STRICT_LEVEL} and above' if self.problems == 'made' else str(self.parts())
        return (str(sandbox.shared().walls), *sets, cut)

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


@dataclasses.dataclass(frozen=True)
class Parts:
    """A training file, cut.

    Attributes:
      training: what is trained on.
      held_out: one part for each of SPLITS.
      strict_level: the least level in the strict ones; None where all problems have one.
      left_out: (reason, problems that are in no part).
    """

    training: tuple[Problem, ...]
    held_out: tuple[tuple[Problem, ...], ...]
    strict_level: int | None
    left_out: tuple[tuple[str, int], ...]

    def __str__(self) -> str:
        strict = 'no harder, for all have one level' if self.strict_level is None else f'level {self.strict_level} up'
        return (
            f'parts: {len(self.training)} problems to train on; held out {[len(part) for part in self.held_out]}; '
            f'strict splits: {strict}; left out: {dict(self.left_out)}'
        )


def strict_level(problems: Sequence[Problem]) -> int | None:
    """The first level above the middle one, or that one where it is the highest; None where all have one level."""
    levels = sorted(problem.level for problem in problems)
    if not levels or levels[0] == levels[-1]:
        return None
    middle = levels[len(levels) // 2]
    return next((level for level in levels if level > middle), middle)


def harder(problems: Sequence[Problem], level: int | None) -> tuple[Problem, ...]:
    return tuple(problem for problem in problems if level is None or problem.level >= level)


@functools.lru_cache(maxsize=8)
def parts(name: str, final: str, final_strict: str, words: int, golden: bool) -> Parts:
    """A training file's parts: nothing in them shares `words` words in a row with the final sets, nor what is trained
    on with what is held out; and, if wanted, nothing is without a golden program. Raises DataError where a part that
    is needed is empty."""
    finals = [problem for other in (final, final_strict) if other for problem in data.load(other)[0]]
    read, _ = data.load(name)
    useful = tuple(p for p in read if not (golden and isinstance(p, CodeProblem) and p.golden is None))
    clean = data.decontaminated(useful, finals, words)[0] if finals else useful
    folds = [fold(problem.question, FILE_FOLDS) for problem in clean]
    cut = [tuple(p for p, at in zip(clean, folds, strict=True) if at == part) for part in range(len(SPLITS))]
    own = tuple(p for p, at in zip(clean, folds, strict=True) if at >= len(SPLITS))
    training, _ = data.decontaminated(own, [problem for part in cut for problem in part], words)
    level = strict_level(clean)
    strict = [split in (STRICT, FINAL_STRICT) for split in SPLITS]
    held_out = tuple(harder(part, level) if hard else part for part, hard in zip(cut, strict, strict=True))
    needed = [*held_out[: len(SPLITS) if not final else SPLITS.index(FINAL)], training]
    if not all(needed):
        raise DataError(
            f'set {name!r}: its {len(clean)} problems leave parts of {[len(part) for part in needed]} problems, the '
            'last to train on; it is too small to be held out from'
        )
    left_out = (
        ('no golden program', len(read) - len(useful)),
        ('shared with a final set', len(useful) - len(clean)),
        ('shared with a held-out problem', len(own) - len(training)),
        ('too easy for a strict split', sum(map(len, cut)) - sum(map(len, held_out))),
    )
    return Parts(training, held_out, level, left_out)
