"""The tree sampler of AT-GRPO: branch K ways at every role of every turn, keep the best, go on from there.

Source: arXiv 2510.11062, algorithm 1. `expand` is its central step. `play_parallel` is the plain alternative without a
tree: K independent trajectories of one environment, one answer at each place.
"""

import asyncio
import contextlib
import dataclasses
import random
from collections.abc import Callable, Mapping, Sequence
from typing import Protocol

from mallm import rng
from mallm.envs.base import Bounded, Waits, World
from mallm.errors import EngineError, EpisodeError, WorldError, boundary
from mallm.rollout.chat import Tokenizer, prompt_for
from mallm.rollout.engine import Engine, Gathers, SamplingParams
from mallm.types import Answer, Candidate, Group, GroupKey, Prompt, Reward, Trajectory, Turn

ROUNDING = 1e-9
"""What a sum of a reward's terms may be beyond its bounds."""

Choose = Callable[[Sequence[float], random.Random], int]


def greedy(totals: Sequence[float], draw: random.Random) -> int:
    """The best-scoring candidate; ties are broken by a seeded draw."""
    best = max(totals)
    return draw.choice([i for i, total in enumerate(totals) if total == best])


def sampled(totals: Sequence[float], draw: random.Random) -> int:
    """Any candidate, whatever it scored (ablation)."""
    return draw.randrange(len(totals))


def first(totals: Sequence[float], draw: random.Random) -> int:
    """Always the first candidate (ablation)."""
    return 0


@dataclasses.dataclass(frozen=True)
class Sampler:
    """How episodes are played.

    Attributes:
      k: candidates at each branching point, or trajectories of each environment in parallel mode.
      turns: most turns of an episode.
      alpha: weight of the team reward in a candidate's total (paper: 1).
      choose: which candidate of a group is executed.
      roles: sampling parameters of each role.
      max_prompt: a longer prompt, in tokens, is never cut: it ends its episode as truncated. 0 for no limit.
    """

    k: int
    turns: int
    alpha: float
    choose: Choose
    roles: Mapping[str, SamplingParams]
    max_prompt: int = 0


@dataclasses.dataclass(frozen=True)
class Place:
    """Where in the run an episode is: the address from which all its randomness follows."""

    seed: int
    stream: int
    step: int
    env: int
    sibling: int = 0


class Witness(Protocol):
    """Is told when an episode begins, in the task that plays it, and when it has ended."""

    def began(self) -> None: ...

    def ended(self, trajectory: Trajectory) -> None: ...


class Nobody:
    """The witness that looks away."""

    def began(self) -> None:
        pass

    def ended(self, trajectory: Trajectory) -> None:
        pass


NOBODY = Nobody()


@dataclasses.dataclass(frozen=True)
class Stage:
    """What playing needs beside the world: sampler's settings, an engine, a tokenizer, who plays whom, who watches."""

    sampler: Sampler
    engine: Engine
    tokenizer: Tokenizer
    cast: Mapping[str, str]
    witness: Witness = NOBODY


def expand(world: World, role: str, answers: Sequence[Answer]) -> tuple[list[Candidate], list[World]]:
    """Acts out every answer on the same world. Candidate i leads to world i."""
    branches = [world.act(role, answer.text) for answer in answers]
    return [Candidate(a, reward) for a, (_, reward) in zip(answers, branches, strict=True)], [w for w, _ in branches]


async def expanded(
    world: World, role: str, answers: Sequence[Answer], engine: Engine
) -> tuple[list[Candidate], list[World]]:
    """`expand`; a world that waits for other processes does so in threads, beside all that goes on."""
    if not (isinstance(world, Waits) and world.waits):
        return expand(world, role, answers)
    with engine.held() if isinstance(engine, Gathers) else contextlib.nullcontext():
        parts = await asyncio.gather(*(asyncio.to_thread(expand, world, role, [answer]) for answer in answers))
    return [c for candidates, _ in parts for c in candidates], [w for _, worlds in parts for w in worlds]


def see(world: World, role: str, turns: Sequence[Turn], stage: Stage) -> Prompt | None:
    """What a role is shown after the turns played so far; None when it stays silent."""
    with boundary(WorldError, f'observing as {role!r} in turn {len(turns)}'):
        messages = world.observe(role)
        own = [g.candidates[g.chosen].answer for turn in turns for g in turn.groups if g.key.role == role]
        return prompt_for(role, messages, stage.tokenizer, own) if messages else None


async def play_role(world: World, prompt: Prompt, turn: int, place: Place, stage: Stage, k: int) -> tuple[Group, World]:
    """One branching point: draw K answers to one prompt, score them all, execute one."""
    role, sampler = prompt.role, stage.sampler
    policy = stage.cast[role]
    path = (place.stream, place.step, place.env, place.sibling, turn, rng.number_of(role))
    with boundary(EngineError, f'sampling as {role!r} in turn {turn}'):
        answers = await stage.engine.sample(policy, prompt, path, k, sampler.roles[role])
        if len(answers) != k:
            raise EngineError(f'{role!r} in turn {turn}: {k} answers were asked for and {len(answers)} came')
    with boundary(WorldError, f'acting as {role!r} in turn {turn}'):
        candidates, worlds = await expanded(world, role, answers, stage.engine)
        for candidate in candidates:
            check(world, candidate.reward, f'{role!r} in turn {turn}')
    totals = [candidate.reward.total(sampler.alpha) for candidate in candidates]
    chosen = sampler.choose(totals, random.Random(rng.seed_for(place.seed, *path)))
    key = GroupKey(place.step, place.env, place.sibling, turn, role)
    return Group(key, policy, prompt, tuple(candidates), chosen), worlds[chosen]


def check(world: World, reward: Reward, who: str) -> None:
    """Raises WorldError for a reward that is no finite number, or beyond what the world says can be earned."""
    if not reward.is_finite():
        raise WorldError(f'{who} earned {reward}: rewards must be finite numbers')
    if isinstance(world, Bounded):
        least, most = world.earns
        if not all(least - ROUNDING <= part <= most + ROUNDING for part in (reward.team, reward.local)):
            raise WorldError(f'{who} earned {reward}: the world says that each part lies in [{least}, {most}]')


async def play_turn(
    world: World, turns: Sequence[Turn], place: Place, stage: Stage, k: int
) -> tuple[Turn, World, bool]:
    """Every role acts once, in order; each sees what the earlier ones of this turn were chosen to write.

    True is returned last when a prompt was too long, which ends the turn before that role.
    """
    groups: list[Group] = []
    for role in world.order:
        prompt = see(world, role, turns, stage)
        if prompt is None:
            continue
        if 0 < stage.sampler.max_prompt < len(prompt.ids):
            return Turn(tuple(groups)), world, True
        group, world = await play_role(world, prompt, len(turns), place, stage, k)
        groups.append(group)
    return Turn(tuple(groups)), world, False


async def play(world: World, place: Place, stage: Stage, k: int) -> Trajectory:
    """One episode. A failure ends it with `fault` set; what was played so far is kept for inspection only.

    A prompt that grew too long ends it with `truncated` set: no failure, not solved, and what was played is trained on.
    """
    stage.witness.began()
    turns: list[Turn] = []
    frames: list[str] = []
    fault, solved, truncated, value = None, False, False, 0.0
    try:
        with boundary(WorldError, f'playing env {place.env}'):
            frames.append(world.render())
            while len(turns) < stage.sampler.turns and not truncated and not world.over:
                turn, world, truncated = await play_turn(world, turns, place, stage, k)
                if truncated and not turn.groups:
                    break
                turns.append(turn)
                frames.append(world.render())
                if not truncated:
                    value += sum(executed_total(group, stage.sampler.alpha) for group in turn.groups[-1:])
            solved = world.solved and not truncated
    except EpisodeError as error:
        fault = f'{error.kind}: {error}'
    trajectory = Trajectory(place.env, place.sibling, tuple(turns), solved, value, tuple(frames), fault, truncated)
    stage.witness.ended(trajectory)
    return trajectory


def executed_total(group: Group, alpha: float) -> float:
    """What the executed candidate of a group earned."""
    return group.candidates[group.chosen].reward.total(alpha)


async def play_tree(worlds: Sequence[World], place: Place, stage: Stage) -> list[Trajectory]:
    """All environments at once, K candidates at each branching point (AT-GRPO)."""
    places = [dataclasses.replace(place, env=place.env + i) for i in range(len(worlds))]
    return list(
        await asyncio.gather(*(play(w, p, stage, stage.sampler.k) for w, p in zip(worlds, places, strict=True)))
    )


async def play_parallel(worlds: Sequence[World], place: Place, stage: Stage) -> list[Trajectory]:
    """All environments at once, K independent trajectories of each and no branching."""
    episodes = [
        play(world, dataclasses.replace(place, env=place.env + i, sibling=j), stage, 1)
        for i, world in enumerate(worlds)
        for j in range(stage.sampler.k)
    ]
    return list(await asyncio.gather(*episodes))


async def play_single(worlds: Sequence[World], place: Place, stage: Stage) -> list[Trajectory]:
    """All environments at once, one path of one answer each: evaluation."""
    places = [dataclasses.replace(place, env=place.env + i) for i in range(len(worlds))]
    return list(await asyncio.gather(*(play(w, p, stage, 1) for w, p in zip(worlds, places, strict=True))))
