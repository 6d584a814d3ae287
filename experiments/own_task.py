"""A world of one's own: two roles write a digit each, which must make a sum. Run: python -m experiments.own_task"""

import dataclasses
import random
import re

from mallm.cli import main
from mallm.envs.base import FINAL_STRICT, STRICT, Demonstration, Task, pool
from mallm.experiment import Experiment
from mallm.types import Message, Reward


@dataclasses.dataclass(frozen=True)
class Pair:
    total: int
    banned: str  # a digit that must not be used
    digits: str = ''  # written so far, `?` for a text without one
    order: tuple[str, ...] = ('first', 'second')
    solved = property(lambda self: self.digits in self.right())
    over = property(lambda self: len(self.digits) == 2)

    def right(self) -> list[str]:
        pairs = [f'{a}{self.total - a}' for a in range(10) if 0 <= self.total - a <= 9]
        return [pair for pair in pairs if self.banned not in pair]

    def observe(self, role: str) -> tuple[Message, ...]:
        return (Message('user', f'{self.total}!{self.banned}={self.digits}'),)

    def act(self, role: str, text: str) -> 'tuple[Pair, Reward]':
        digit = (re.findall('[0-9]', text) or ['?'])[-1]
        after = dataclasses.replace(self, digits=(self.digits + digit)[:2])
        good = float(not self.over and any(pair.startswith(after.digits) for pair in self.right()))
        return after, Reward(good, form := -0.1 * (not re.fullmatch('[0-9]', text)), (('good', good), ('format', form)))

    def render(self) -> str:
        return f'{self.total} without {self.banned}: {self.digits}'


class PairTask(Task):
    def train(self, seed: int, folds: tuple[int, ...] = (2, 3, 4), most: int = 10) -> Pair:
        every = [Pair(total, banned) for total in range(19) for banned in '0123456789']
        mine = [p for p in every if (p.total + int(p.banned)) % 5 in folds and 0 < len(p.right()) <= most]
        return random.Random(seed).choice(mine)

    def test(self, split: int, index: int) -> Pair:
        return self.train(split + index, (int(pool(split) == 'final'),), 4 if split in (STRICT, FINAL_STRICT) else 10)

    def difficulty(self, world: Pair) -> int:
        return 10 - len(world.right())

    def floor(self, world: Pair, turns: int, seed: int) -> bool:
        return f'{random.Random(seed).randint(0, 99):02}' in world.right()

    def demonstrations(self, seed: int) -> list[Demonstration]:
        return [Demonstration('first', self.train(seed).observe('first'), str(seed % 10))]  # any digit


CONFIG = Experiment(name='own_task', pools={'first': 'shared', 'second': 'shared'}, task=PairTask(('first', 'second')))
if __name__ == '__main__':
    main(CONFIG, __doc__)
