"""Larger teams on any game of a tool and a plan: several tools write one after another before the plan decides.

A later tool sees what the plan would see, which is the program that stands and what it does, behind its own number.
What it writes takes that program's place; writing nothing lets it stand. A team of N agents is N - 1 tools and a plan.
The worlds speak to the tiny policy: a language model would need words that tell a later tool what it is for.
"""

import dataclasses
import random
from typing import Any

from mallm.envs.base import Demonstration, Task, World
from mallm.envs.sokoban_task import SokobanTask
from mallm.types import Message, Reward

NOTHING = Reward(0.0, 0.0)


def crew(agents: int) -> tuple[str, ...]:
    """The roles of so many agents: ('tool', 'plan'), ('tool', 'tool2', 'plan'), …"""
    if agents < 2:
        raise ValueError(f'agents={agents}: a crew is a plan and at least one tool')
    return ('tool', *(f'tool{number}' for number in range(2, agents)), 'plan')


@dataclasses.dataclass(frozen=True)
class CrewWorld:
    """One state of a game in the hands of a crew. Immutable; see `mallm.envs.base.World`.

    Attributes:
      game: the world of ('tool', 'plan') that is played.
      team: all roles, in acting order.
      earned: what the program that stands has earned.
    """

    game: Any
    team: tuple[str, ...]
    earned: Reward = NOTHING

    @property
    def order(self) -> tuple[str, ...]:
        acting = self.game.order
        return tuple(role for role in self.team if ('plan' if role == 'plan' else 'tool') in acting)

    @property
    def solved(self) -> bool:
        return self.game.solved

    @property
    def over(self) -> bool:
        return self.game.over

    def observe(self, role: str) -> tuple[Message, ...]:
        if role in ('tool', 'plan'):
            return self.game.observe(role)
        *before, last = self.game.observe('plan') or self.game.observe('tool')
        return (*before, Message(last.author, role.removeprefix('tool') + last.content))

    def act(self, role: str, text: str) -> 'tuple[CrewWorld, Reward]':
        """Letting a program stand earns what the program earned, so that a good one is not to be written again."""
        if role == 'plan':
            game, reward = self.game.act('plan', text)
            return dataclasses.replace(self, game=game, earned=NOTHING), reward
        if role != 'tool' and not text.strip():
            return self, self.earned
        game, reward = self.game.act('tool', text)
        return dataclasses.replace(self, game=game, earned=reward), reward

    def render(self) -> str:
        return self.game.render()


@dataclasses.dataclass(frozen=True)
class CrewTask(Task):
    """A game with a larger team.

    Attributes:
      team: the roles in acting order: 'tool', 'tool2', 'tool3', …, 'plan'; see `crew`.
      game: what is played, a task of the team ('tool', 'plan').
    """

    team: tuple[str, ...] = ('tool', 'tool2', 'plan')
    game: Task = SokobanTask()

    def __post_init__(self) -> None:
        if len(self.team) < 2 or self.team != crew(len(self.team)):
            raise ValueError(f'team={self.team}: a crew is {crew(3)} or longer, in this order; use crew(agents)')
        if self.game.team != ('tool', 'plan'):
            raise ValueError(f"game.team={self.game.team}: a crew plays a game of ('tool', 'plan')")

    @property
    def signs(self) -> str:
        return self.game.signs

    def words(self) -> dict[str, str]:
        return self.game.words()

    @property
    def rewarded(self) -> str:
        return self.game.rewarded

    def about(self) -> tuple[str, ...]:
        return self.game.about()

    def train(self, seed: int) -> World:
        return CrewWorld(self.game.train(seed), self.team)

    def train_at(self, position: int, *, run: int, seed: int) -> World:
        return CrewWorld(self.game.train_at(position, run=run, seed=seed), self.team)

    def instances(self, split: int) -> int | None:
        return self.game.instances(split)

    def test(self, split: int, index: int) -> World:
        return CrewWorld(self.game.test(split, index), self.team)

    def difficulty(self, world: CrewWorld) -> int:
        return self.game.difficulty(world.game)

    def floor(self, world: CrewWorld, turns: int, seed: int) -> bool:
        return self.game.floor(world.game, turns, seed)

    def demonstrations(self, seed: int) -> list[Demonstration]:
        """Those of the game; a later tool lets the program stand, or writes it again, each half of the time."""
        told = self.game.demonstrations(seed)
        texts = {demonstration.role: demonstration.text for demonstration in told}
        draw, found = random.Random(seed), []
        for demonstration in told:
            if demonstration.role == 'plan' and 'tool' in texts:
                *before, last = demonstration.messages
                for role in self.team[1:-1]:
                    shown = Message(last.author, role.removeprefix('tool') + last.content)
                    found.append(Demonstration(role, (*before, shown), draw.choice(('', texts['tool']))))
            found.append(demonstration)
        return found
