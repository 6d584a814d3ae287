"""The tree sampler on a world that writes down what happens, with an engine whose answers are scripted."""

import asyncio
import contextlib
import dataclasses
import math
import random
import re
import threading
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from typing import ClassVar

import pytest

from mallm import rng
from mallm.envs.base import World
from mallm.errors import EngineError
from mallm.rollout import tree
from mallm.rollout.engine import SamplingParams
from mallm.rollout.tree import Place, Sampler, Stage, expand
from mallm.types import Answer, Message, Prompt, Reward, Trajectory

K = 4
PLACE = Place(seed=3, stream=rng.TRAIN, step=2, env=0)


@dataclasses.dataclass(frozen=True)
class Diary:
    """Every role sees all that was written. Text '3' earns 3; 'win' solves, 'stop' ends, most others are faults."""

    written: tuple[str, ...] = ()
    order: tuple[str, ...] = ('a', 'b')

    @property
    def solved(self) -> bool:
        return any(entry.endswith('win') for entry in self.written)

    @property
    def over(self) -> bool:
        if any(entry.endswith('unsure') for entry in self.written):
            raise RuntimeError('cannot tell')
        return self.solved or any(entry.endswith('stop') for entry in self.written)

    def observe(self, role: str) -> tuple[Message, ...]:
        return (Message('user', ' '.join([*self.written, f'{role}?'])),)

    def act(self, role: str, text: str) -> tuple['Diary', Reward]:
        after = dataclasses.replace(self, written=(*self.written, role + text))
        worth = {'win': 100.0, 'stop': 50.0, 'unsure': 50.0, 'none': None}
        return after, Reward(worth[text] if text in worth else float(text), 0.0)

    def render(self) -> str:
        return ' '.join(self.written)


class Letters:
    """A tokenizer of one token a character."""

    end, ends = 0, (0,)

    def __len__(self) -> int:
        return 1 << 16

    def chat(self, messages: Sequence[Message], own: Sequence[Answer] = ()) -> tuple[int, ...]:
        return self.encode(''.join(message.content for message in messages))

    def encode(self, text: str) -> tuple[int, ...]:
        return tuple(map(ord, text))

    def decode(self, ids: Sequence[int]) -> str:
        return ''.join(map(chr, ids))


Script = Callable[[tuple[int, ...], int], Sequence[str]]


class Scripted:
    """An engine that answers by script, from the path and k, and keeps what it was asked."""

    def __init__(self, script: Script = lambda path, k: [str(j) for j in range(k)]) -> None:
        self.asked: list[tuple[str, Prompt, tuple[int, ...], int, SamplingParams]] = []
        self._script = script

    async def sample(self, policy, prompt, path, k, params) -> tuple[Answer, ...]:
        await asyncio.sleep(0)
        self.asked.append((policy, prompt, path, k, params))
        return tuple(Answer((7,), (-0.5,), text, 'stop', 0) for text in self._script(path, k))

    def load(self, policy, weights, version) -> None:
        raise AssertionError('sampling loads nothing')

    def metrics(self) -> dict[str, float]:
        return {}


def stage(
    engine: Scripted, *, choose=tree.greedy, turns: int = 3, alpha: float = 1.0, k: int = K, max_prompt: int = 0
) -> Stage:
    roles = {'a': SamplingParams(4), 'b': SamplingParams(9)}
    return Stage(Sampler(k, turns, alpha, choose, roles, max_prompt), engine, Letters(), {'a': 'left', 'b': 'right'})


def play(
    engine: Scripted, worlds: Sequence[World] = (Diary(),), mode=tree.play_tree, place=PLACE, **more
) -> list[Trajectory]:
    return asyncio.run(asyncio.wait_for(mode(worlds, place, stage(engine, **more)), timeout=60))


def rewards(group) -> list[float]:
    return [candidate.reward.team for candidate in group.candidates]


def shown(group) -> str:
    return group.prompt.messages[0].content


# --- the tree itself, against what goes wrong in the reference implementation


def test_each_role_and_turn_sees_what_was_chosen_before_it_and_has_rewards_of_its_own():
    """K = 4, 2 roles, 3 turns, reward = candidate index: the reference sampler gives every second role [3, 3, 3, 3] and
    shows a frozen world from the second turn on."""
    (trajectory,) = play(Scripted())
    seen = [(shown(group), rewards(group), group.chosen) for turn in trajectory.turns for group in turn.groups]
    branching = ([0.0, 1.0, 2.0, 3.0], 3)
    assert seen == [
        ('a?', *branching),
        ('a3 b?', *branching),
        ('a3 b3 a?', *branching),
        ('a3 b3 a3 b?', *branching),
        ('a3 b3 a3 b3 a?', *branching),
        ('a3 b3 a3 b3 a3 b?', *branching),
    ]
    assert trajectory.frames == ('', 'a3 b3', 'a3 b3 a3 b3', 'a3 b3 a3 b3 a3 b3')


def test_what_is_shown_next_is_the_chosen_answer_whichever_it_was():
    best = {0: 1, 1: 3, 2: 0}  # turn -> index of the best answer

    def script(path, k):
        return ['9' if j == best[path[4]] else str(j) for j in range(k)]

    (trajectory,) = play(Scripted(script))
    assert [group.chosen for turn in trajectory.turns for group in turn.groups] == [1, 1, 3, 3, 0, 0]
    (first,) = play(Scripted(script), choose=tree.first)
    assert first.frames[-1] == 'a0 b0 a0 b0 a9 b9'


def test_a_group_is_k_answers_to_one_prompt_asked_for_once():
    engine = Scripted()
    (trajectory,) = play(engine)
    groups = [group for turn in trajectory.turns for group in turn.groups]
    assert [(group.policy, group.prompt) for group in groups] == [
        (policy, prompt) for policy, prompt, *_ in engine.asked
    ]
    assert all(len(group.candidates) == K for group in groups) and {k for *_, k, _ in engine.asked} == {K}
    assert all(group.prompt.ids == Letters().encode(shown(group)) for group in groups)
    assert {
        (group.key.role, group.policy, asked[-1].max_tokens) for group, asked in zip(groups, engine.asked, strict=True)
    } == {
        ('a', 'left', 4),
        ('b', 'right', 9),
    }


def test_every_group_of_a_step_has_a_key_of_its_own():
    """A04: keys (step, env, sibling, turn, role)."""
    for mode, count in ((tree.play_tree, 2 * 3 * 2), (tree.play_parallel, 2 * K * 3 * 2)):
        played = play(Scripted(), [Diary(), Diary()], mode)
        keys = [group.key for trajectory in played for turn in trajectory.turns for group in turn.groups]
        assert len(set(keys)) == len(keys) == count


def test_expanding_leaves_the_root_alone_and_gives_each_answer_its_own_world():
    root = Diary(('a1',))
    answers = [Answer((7,), (-0.5,), text, 'stop', 0) for text in ('0', '5', '5')]
    candidates, worlds = expand(root, 'b', answers)
    assert root == Diary(('a1',)) and hash(root) == hash(Diary(('a1',)))
    assert [world.written for world in worlds] == [('a1', 'b0'), ('a1', 'b5'), ('a1', 'b5')]
    assert [candidate.answer for candidate in candidates] == answers
    assert [candidate.reward.team for candidate in candidates] == [0, 5, 5]


def test_the_randomness_of_every_request_is_addressed_by_its_place():
    engine = Scripted()
    play(engine, [Diary(), Diary()], place=dataclasses.replace(PLACE, env=40), turns=2)
    a, b = rng.number_of('a'), rng.number_of('b')
    wanted = [(rng.TRAIN, 2, env, 0, turn, role) for env in (40, 41) for turn in range(2) for role in (a, b)]
    assert sorted(path for _, _, path, _, _ in engine.asked) == sorted(wanted)


def test_a_role_that_is_silent_is_not_asked():
    engine = Scripted()
    (trajectory,) = play(engine, [Diary(order=('b',))])
    assert [[group.key.role for group in turn.groups] for turn in trajectory.turns] == [['b']] * 3


@dataclasses.dataclass(frozen=True)
class Waiting(Diary):
    """Role b has nothing to say until role a has written 3 twice; it is then asked in the same turn."""

    nothing: tuple | None = ()

    def observe(self, role: str) -> tuple[Message, ...] | None:
        return self.nothing if role == 'b' and self.written.count('a3') < 2 else super().observe(role)


@pytest.mark.parametrize('nothing', [(), None])
@pytest.mark.parametrize(
    'mode, k, text', [(tree.play_tree, K, '3'), (tree.play_parallel, 1, '3'), (tree.play_single, 1, '3')]
)
def test_a_role_that_is_shown_nothing_stays_silent_this_turn_in_every_mode(mode, k, text, nothing):
    engine = Scripted(lambda path, asked: [text] * asked)
    played = play(engine, [Waiting(nothing=nothing)], mode)
    for trajectory in played:
        assert [[group.key.role for group in turn.groups] for turn in trajectory.turns] == [['a'], *[['a', 'b']] * 2]
        assert trajectory.frames == ('', 'a3', 'a3 a3 b3', 'a3 a3 b3 a3 b3') and trajectory.fault is None
        # a silent role adds nothing to the value: the last answer of each turn does, 3 + 3 + 3
        assert trajectory.value == 9 and {len(g.candidates) for turn in trajectory.turns for g in turn.groups} == {k}
    assert len(engine.asked) == 5 * len(played)


def test_a_turn_in_which_nobody_speaks_is_a_turn_without_groups():
    engine = Scripted()
    (trajectory,) = play(engine, [Waiting(order=('b',))])
    assert [turn.groups for turn in trajectory.turns] == [()] * 3 and engine.asked == []
    assert (trajectory.value, trajectory.solved, trajectory.fault) == (0, False, None)


# --- prompts that grow too long

GROWN = [2, 5, 8, 11, 14, 17]
"""Tokens of the prompts of a Diary: 'a?', 'a3 b?', 'a3 b3 a?', ..."""


@pytest.mark.parametrize('max_prompt, played', [(0, 6), (17, 6), (16, 5), (10, 3), (8, 3), (7, 2), (4, 1), (1, 0)])
def test_a_prompt_that_is_too_long_is_never_cut_and_ends_its_episode_as_truncated(max_prompt, played):
    """Not a fault and not a zero reward: what was played before it is as it would have been, and stays."""
    whole, (cut,) = play(Scripted())[0], play(engine := Scripted(), max_prompt=max_prompt)
    assert [len(asked[1].ids) for asked in engine.asked] == GROWN[:played]
    groups = [group for turn in cut.turns for group in turn.groups]
    assert groups == [group for turn in whole.turns for group in turn.groups][:played]
    assert cut.truncated == (played < 6) and cut.fault is None and not cut.solved
    # an unfinished turn is there with the groups that were played, and counts for nothing in the value
    assert len(cut.turns) == -(-played // 2) and len(cut.frames) == 1 + len(cut.turns)
    assert cut.value == 3 * (played // 2)


def test_an_episode_that_was_cut_is_not_solved_and_cuts_no_other():
    """Environment 1 says what solves it and then would have had to show role b too much."""

    def script(path, k):
        return ['win' if path[2] == 1 else '0'] * k

    played = play(Scripted(script), [Diary()] * 2, turns=1, max_prompt=5)
    assert [(t.truncated, t.solved, t.fault, len(t.turns[0].groups)) for t in played] == [
        (False, False, None, 2),
        (True, False, None, 1),
    ]


# --- which one is executed


def test_greedy_takes_the_best_and_breaks_ties_evenly_by_the_seed():
    assert all(tree.greedy([0, 2, 1], random.Random(seed)) == 1 for seed in range(20))
    drawn = Counter(tree.greedy([1, 0, 1, 1], random.Random(seed)) for seed in range(3000))
    assert set(drawn) == {0, 2, 3}
    # 1000 expected each, standard deviation sqrt(3000 * 1/3 * 2/3) = 26; five of them
    assert all(abs(count - 1000) < 130 for count in drawn.values())


def test_sampled_takes_any_and_first_the_first():
    drawn = Counter(tree.sampled([9, 0, 0], random.Random(seed)) for seed in range(3000))
    assert set(drawn) == {0, 1, 2} and all(abs(count - 1000) < 130 for count in drawn.values())
    assert {tree.first([0, 9, 9], random.Random(seed)) for seed in range(20)} == {0}


def chosen(played: Sequence[Trajectory]) -> list[int]:
    return [group.chosen for trajectory in played for turn in trajectory.turns for group in turn.groups]


def test_a_tie_is_broken_in_the_same_way_at_the_same_place_only():
    def equal(path, k):
        return ['1'] * k

    worlds = [Diary()] * 8
    played = chosen(play(Scripted(equal), worlds))
    assert chosen(play(Scripted(equal), worlds)) == played
    assert set(played) == set(range(K))
    assert len({tuple(played[i : i + 6]) for i in range(0, 48, 6)}) == 8
    for place in (dataclasses.replace(PLACE, seed=4), dataclasses.replace(PLACE, step=3)):
        assert chosen(play(Scripted(equal), worlds, place=place)) != played
    # environment 5 alone chooses what it chose in company
    alone = chosen(play(Scripted(equal), [Diary()], place=dataclasses.replace(PLACE, env=5)))
    assert alone == played[30:36]


@dataclasses.dataclass(frozen=True)
class Mixed(Diary):
    """Text '7:1' earns 7 for the team and 1 for the role."""

    def act(self, role: str, text: str) -> tuple['Mixed', Reward]:
        team, local = map(float, text.split(':'))
        return dataclasses.replace(self, written=(*self.written, role + text)), Reward(team, local)


def test_alpha_weighs_team_against_local_in_what_is_chosen_and_in_the_value():
    def script(path, k):
        return ['1:0', '0:2', '0:0', '0:1']

    for alpha, index, total in [(1.0, 1, 2.0), (3.0, 0, 3.0)]:
        (trajectory,) = play(Scripted(script), [Mixed()], alpha=alpha)
        assert chosen([trajectory]) == [index] * 6
        # the value is what the executed answers of the last role of each turn earned: 3 turns
        assert trajectory.value == pytest.approx(3 * total)


# --- ends


def test_an_episode_stops_when_solved_when_over_and_when_out_of_turns():
    def at_turn(turn, text):
        return lambda path, k: [text if path[4] == turn else '0'] * k

    won, stopped, late = (
        play(Scripted(script))[0] for script in (at_turn(1, 'win'), at_turn(0, 'stop'), at_turn(9, 'win'))
    )
    assert [(len(t.turns), t.solved, t.fault) for t in (won, stopped, late)] == [
        (2, True, None),
        (1, False, None),
        (3, False, None),
    ]
    assert len(won.frames) == 3


def test_a_world_that_is_over_from_the_start_is_not_played():
    engine = Scripted()
    (trajectory,) = play(engine, [Diary(('awin',))])
    assert (trajectory.turns, trajectory.solved, trajectory.value, engine.asked) == ((), True, 0, [])


# --- faults


@pytest.mark.parametrize('text', ['nan', 'inf', '-inf', 'none', 'gibberish'])
def test_a_reward_that_is_no_finite_number_is_a_fault_of_its_episode_and_never_chosen(text):
    """In environment 1, turn 1, one of four answers earns NaN, inf or nothing, or makes the world raise."""

    def script(path, k):
        return [text if j == 2 and path[2] == 1 and path[4] == 1 else str(j) for j in range(k)]

    sound, faulty, other = play(Scripted(script), [Diary()] * 3)
    assert faulty.fault.startswith('world: ') and "'a' in turn 1" in faulty.fault and not faulty.solved
    assert len(faulty.turns) == 1 and all(math.isfinite(r) for g in faulty.turns[0].groups for r in rewards(g))
    assert sound.fault is other.fault is None and len(sound.turns) == len(other.turns) == 3


@dataclasses.dataclass(frozen=True)
class Graded(Diary):
    earns: ClassVar[tuple[float, float]] = (0.0, 3.0)


@pytest.mark.parametrize(
    'text, fault', [('3.5', r"'a' in turn 1 earned .*in \[0.0, 3.0\]"), ('-0.5', 'earned'), ('2', '')]
)
def test_a36_a_reward_beyond_what_the_world_says_can_be_earned_is_a_fault(text, fault):
    (played,) = play(Scripted(lambda path, k: [text if path[4] == 1 else '1'] * k), [Graded()])
    assert re.search(fault, played.fault) if fault else played.fault is None


def fails_in(env: int, error: Exception) -> Script:
    def script(path, k):
        if path[2] == env and path[4] == 1:
            raise error
        return [str(j) for j in range(k)]

    return script


@pytest.mark.parametrize('error', [EngineError('server gone'), ConnectionError('refused'), TimeoutError()])
def test_an_engine_failure_in_one_episode_is_a_fault_of_that_episode_only(error):
    played = play(Scripted(fails_in(1, error)), [Diary()] * 3)
    assert [trajectory.fault is None for trajectory in played] == [True, False, True]
    assert played[1].fault.startswith('engine: ') and str(error) in played[1].fault
    assert [len(trajectory.turns) for trajectory in played] == [3, 1, 3]
    assert [trajectory.env for trajectory in played] == [0, 1, 2]


@pytest.mark.parametrize('count', [0, 3, 5])
def test_an_engine_that_returns_another_number_of_answers_is_a_fault(count):
    (trajectory,) = play(Scripted(lambda path, k: ['1'] * count))
    assert trajectory.fault.startswith('engine: ') and f'4 answers were asked for and {count} came' in trajectory.fault


def test_a_world_that_cannot_say_whether_it_is_over_is_a_fault_of_its_episode_only():
    def script(path, k):
        return ['unsure' if path[2] == 0 and path[4] == 1 else '1'] * k

    faulty, sound = play(Scripted(script), [Diary()] * 2)
    assert faulty.fault == 'world: playing env 0: RuntimeError: cannot tell' and len(faulty.turns) == 2
    assert sound.fault is None


# --- the siblings of the tree


def by_path(path, k):
    """Other answers at every place, the same at the same place."""
    draw = random.Random(str(path))
    return [str(draw.randint(0, 10**6)) for _ in range(k)]


def test_parallel_play_has_k_independent_trajectories_and_no_branching():
    played = play(Scripted(by_path), [Diary()] * 2, tree.play_parallel)
    assert [(t.env, t.sibling) for t in played] == [(env, j) for env in range(2) for j in range(K)]
    groups = [group for trajectory in played for turn in trajectory.turns for group in turn.groups]
    assert all(len(group.candidates) == 1 and group.chosen == 0 for group in groups)
    assert all(
        (g.key.env, g.key.sibling) == (t.env, t.sibling) for t in played for turn in t.turns for g in turn.groups
    )
    assert len({trajectory.frames[-1] for trajectory in played}) == 2 * K
    # what sibling 2 writes does not depend on who else is playing
    alone = asyncio.run(tree.play(Diary(), dataclasses.replace(PLACE, sibling=2), stage(Scripted(by_path)), 1))
    assert alone == played[2]


def test_tree_and_parallel_play_draw_as_many_answers_from_the_policy():
    """Matched budgets: environments x turns x roles x K."""
    budgets = []
    for mode in (tree.play_tree, tree.play_parallel):
        engine = Scripted()
        play(engine, [Diary()] * 2, mode)
        budgets.append(sum(k for *_, k, _ in engine.asked))
    assert budgets == [2 * 3 * 2 * K] * 2


def test_evaluation_plays_one_path_of_one_answer():
    engine = Scripted(by_path)
    played = play(engine, [Diary()] * 3, tree.play_single)
    assert [(t.env, t.sibling, len(t.turns)) for t in played] == [(env, 0, 3) for env in range(3)]
    assert {k for *_, k, _ in engine.asked} == {1} and len(engine.asked) == 3 * 3 * 2


# --- concurrency


def test_a_slow_episode_holds_up_only_itself():
    """Environment 0 waits, in its first turn, until all other environments have asked for their last answers."""

    class Slow(Scripted):
        async def sample(self, policy, prompt, path, k, params):
            if path[2] == 0 and path[4] == 0:
                await others_done.wait()
            answers = await super().sample(policy, prompt, path, k, params)
            last = [p for _, _, p, _, _ in self.asked if p[2] > 0 and p[4] == 2 and p[5] == rng.number_of('b')]
            if len(last) == 3:
                others_done.set()
            return answers

    others_done = asyncio.Event()
    engine = Slow()
    played = play(engine, [Diary()] * 4)
    envs = [path[2] for _, _, path, _, _ in engine.asked]
    assert envs[-6:] == [0] * 6 and 0 not in envs[:-6]
    assert [t.frames[-1] for t in played] == [t.frames[-1] for t in play(Scripted(), [Diary()] * 4)]


def test_episodes_come_back_in_the_order_of_their_worlds_whenever_they_end():
    def script(path, k):
        return ['stop' if path[4] == 2 - path[2] else '1'] * k

    played = play(Scripted(script), [Diary()] * 3)
    assert [(trajectory.env, len(trajectory.turns)) for trajectory in played] == [(0, 3), (1, 2), (2, 1)]


def test_the_worlds_of_the_tests_are_worlds():
    assert isinstance(Diary(), World) and isinstance(Mixed(), World)


@dataclasses.dataclass(frozen=True)
class Outside(Diary):
    """Acts only when all candidates of a group act at the same time, as programs in other processes do."""

    waits: ClassVar[bool] = True
    meet: ClassVar[threading.Barrier] = threading.Barrier(K)

    def act(self, role: str, text: str) -> tuple['Outside', Reward]:
        self.meet.wait(timeout=60)
        return super().act(role, text)


class Holding(Scripted):
    """An engine that counts for how many acting groups it is held."""

    holds, most = 0, 0

    @contextlib.contextmanager
    def held(self) -> Iterator[None]:
        self.holds += 1
        self.most = max(self.most, self.holds)
        yield
        self.holds -= 1


def test_an_engine_that_gathers_is_held_while_worlds_wait_and_not_for_others():
    engine, other = Holding(), Holding()
    play(engine, [Outside()])
    play(other, [Diary()])
    assert (engine.holds, engine.most, other.most) == (0, 1, 0)


def test_candidates_of_a_world_that_waits_are_acted_out_at_the_same_time_with_the_same_outcome():
    ((trajectory,), (plain,)) = play(Scripted(), [Outside()]), play(Scripted(), [Diary()])
    assert trajectory == plain and len(trajectory.turns) == 3
