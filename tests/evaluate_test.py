"""Evaluation: one path of one answer a board, success means solved, and no two evaluations share their randomness."""

import math

import pytest

from mallm.config import override
from mallm.envs.shaping import OUTCOME
from mallm.envs.sokoban import load_levels
from mallm.envs.sokoban_task import SokobanTask
from mallm.envs.sokoban_team import Rules, SokobanTeam
from mallm.errors import EngineError
from mallm.evaluate import Evaluation, evaluate, replay_of, summarise
from mallm.experiment import Experiment
from mallm.rollout import tree
from mallm.rollout.chat import TinyTokenizer
from mallm.rollout.engine import SamplingParams
from mallm.types import Answer

NEAR, FAR = '######\n#@ $.#\n######', '#########\n#@ $   .#\n#########'
"""Solved by RR and by RRRRR."""


class Pusher:
    """An engine that writes RR, and fails in the environments it is told to."""

    def __init__(self, fails: tuple[int, ...] = ()) -> None:
        self.paths: list[tuple[int, ...]] = []
        self._fails = fails

    async def sample(self, policy, prompt, path, k, params) -> tuple[Answer, ...]:
        self.paths.append(path)
        if path[2] % (1 << 20) in self._fails:
            raise EngineError('gone')
        return (Answer((2, 2), (0.0, 0.0), 'RR', 'stop', 0),) * k

    def load(self, policy, weights, version) -> None:
        raise AssertionError('evaluation loads nothing')

    def metrics(self) -> dict[str, float]:
        return {}


def world(text: str) -> SokobanTeam:
    (board,) = load_levels(text, 'case')
    return SokobanTeam(board, Rules(shaping=OUTCOME), ('plan',))


def evaluated(
    engine: Pusher, texts: list[str], *, turns: int = 2, step: int = 0, split: int = 1, max_prompt: int = 0
) -> Evaluation:
    sampler = tree.Sampler(8, turns, 1.0, tree.greedy, {'plan': SamplingParams(4, 0.0)}, max_prompt)
    stage = tree.Stage(sampler, engine, TinyTokenizer(), {'plan': 'shared'})
    difficulty = [{NEAR: 2, FAR: 5}[text] for text in texts]
    return evaluate([world(text) for text in texts], difficulty, stage, seed=0, step=step, split=split)


def test_success_is_the_share_of_boards_that_were_solved_and_not_merely_ended():
    # two turns of RR: NEAR is solved in its first, FAR is one move short
    outcome = evaluated(Pusher(), [NEAR, FAR, NEAR, FAR])
    assert (outcome.success, outcome.faults, outcome.turns_to_solve) == (0.5, 0, 1)
    assert outcome.by_difficulty() == {2: 1.0, 5: 0.0}
    longer = evaluated(Pusher(), [NEAR, FAR], turns=3)
    assert (longer.success, longer.turns_to_solve) == (1, 2)  # 1 and 3 turns


def test_where_nothing_is_solved_there_is_no_number_of_turns():
    outcome = evaluated(Pusher(), [FAR])
    assert outcome.success == 0 and math.isnan(outcome.turns_to_solve)


def test_an_episode_that_failed_is_counted_as_a_fault_and_not_as_solved():
    outcome = evaluated(Pusher(fails=(1,)), [NEAR, NEAR])
    assert (outcome.success, outcome.faults) == (0.5, 0.5)


def test_an_episode_that_a_long_prompt_ended_is_counted_and_is_neither_solved_nor_a_fault():
    """The far board's prompt is the longer one: three rows of three cells more."""
    assert evaluated(Pusher(), [NEAR, FAR], turns=3).truncated == 0
    outcome = evaluated(Pusher(), [NEAR, FAR], turns=3, max_prompt=len(world(NEAR).observe('plan')[0].content) + 1)
    assert (outcome.success, outcome.faults, outcome.truncated) == (0.5, 0, 0.5)


def test_no_two_boards_splits_or_steps_are_played_with_the_same_randomness():
    engine = Pusher()
    for step in range(2):
        for split in range(1, 5):
            evaluated(engine, [NEAR] * 8, step=step, split=split)
    assert len(engine.paths) == len(set(engine.paths)) == 2 * 4 * 8


def test_a_replay_says_what_each_role_was_shown_and_wrote_and_shows_every_board():
    outcome = evaluated(Pusher(), [FAR], turns=3)
    replay = replay_of(outcome.trajectories[0], 5, SokobanTask().words())
    assert (replay['solved'], replay['difficulty'], len(replay['frames']), len(replay['turns'])) == (True, 5, 4, 3)
    assert replay['words'] == {'instance': 'board', 'difficulty': 'shortest solution', 'floor': 'random mover'}
    (group,) = replay['turns'][2]['groups']
    assert (group['role'], group['answer'], group['reward']) == ('plan', 'RR', 1.0)
    assert group['prompt'].startswith('P') and group['terms']['solved'] == 1


def test_a_run_that_goes_on_from_an_older_checkpoint_has_a_summary_that_invents_no_token_count():
    experiment = override(Experiment(), {'evaluation.report_boards': 2, 'sampling.turns': 1})
    shares = {f'{kind}{suffix}': 0.5 for kind in ('success', 'strict') for suffix in ('', '_t1')}
    before = shares | {'success_by_optimal': {'3': 0.5}}
    after = shares | {'faults': 0.0, 'format': {}, 'success_by_difficulty': {'3': 0.75}, 'strict_by_difficulty': {}}
    old = {'commit': 'abc', 'training_cpu_minutes': 1.0, 'before': before}
    told = summarise(experiment, old, after, name='old', minutes=(1.0, 2.0))
    assert 'training_tokens' not in told and told['by_difficulty_before'] == {'3': 0.5}
    assert told['words']['floor'] == 'random mover' and told['peak_rss_mib'] > 10
    new = old | {'training_tokens': 7, 'before': shares | {'success_by_difficulty': {}}}
    assert summarise(experiment, new, after, name='new', minutes=(1.0, 2.0))['training_tokens'] == 7


@pytest.mark.parametrize(
    'text',
    ['push up', 'Up', ' u ', 'UP, LEFT', '["R", 3]', '[]', '', 'U' * 10_000, 'U\uff0cL', '\U0001f600'],
    ids=range(10),
)
def test_an_answer_that_is_no_legal_move_takes_its_turn_and_the_episode_runs_to_its_cap(text):
    """A29: whatever was written, the turn is counted, nothing raises, and nothing is solved."""

    class Writer(Pusher):
        async def sample(self, policy, prompt, path, k, params) -> tuple[Answer, ...]:
            return (Answer((2,), (0.0,), text, 'stop', 0),) * k

    (episode,) = evaluated(Writer(), [FAR], turns=3).trajectories
    assert (len(episode.turns), len(episode.frames), episode.fault, episode.solved) == (3, 4, None, False)
