"""One training step, link by link: play, credit, route, pack, update. What is learned from is exactly what was sampled.

`train_step` is then run on the same beginning, and must end in the same bits as the links put together by hand.
"""

import dataclasses
import math
import pathlib
import statistics
from collections import Counter
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from mallm import rng, train
from mallm.envs.sokoban_task import SokobanTask
from mallm.experiment import (
    AlgorithmSettings,
    Experiment,
    LearningSettings,
    ModelSettings,
    SamplingSettings,
    WarmStartSettings,
)
from mallm.learn.pack import pack, rows_of
from mallm.learn.pool import Pool
from mallm.learn.route import dead_shares, route
from mallm.rollout.workers import made
from mallm.run import Run, build
from mallm.train import TooManyFaultsError, knobs, play, refuse_too_many_faults, train_step
from mallm.types import Credited, Trajectory
from mallm.warm import warm_start

EXPERIMENT = Experiment(
    pools={'tool': 'left', 'plan': 'right'},
    task=SokobanTask(),
    model=ModelSettings(width=16, layers=1, heads=2, kv_heads=1, head_dim=8, ffn=32),
    sampling=SamplingSettings(envs=4, k=8, turns=2, temperature=0.8, spread=1.0, max_tokens=5),
    algorithm=AlgorithmSettings(normalise='std', floor=0.1),
    learning=LearningSettings(step_groups=0, micro_groups=4, rate=(1e-2, 1e-2), warmup=0),
    wandb='disabled',
)
ROLES = ('tool', 'plan')


class Recorder:
    """A sink that keeps what it is given."""

    def __init__(self) -> None:
        self.rows: dict[str, dict[str, float]] = {}

    def write(self, axis: str, step: int, metrics: Mapping[str, float]) -> None:
        assert (axis, step) not in {(known, 0) for known in self.rows}
        self.rows[axis] = dict(metrics)


@dataclasses.dataclass(frozen=True)
class Step:
    """A step done link by link, and what `train_step` made of the same beginning."""

    run: Run
    played: list[Trajectory]
    credited: list[Credited]
    routed: dict[str, list[Credited]]
    batches: dict[str, Any]
    born: dict[str, list[np.ndarray]]
    by_hand: dict[str, list[np.ndarray]]
    learned: dict[str, dict[str, float]]
    written: dict[str, dict[str, float]]


def leaves(tree: Any) -> list[np.ndarray]:
    return [np.array(leaf) for leaf in jax.tree.leaves(tree)]


def built(experiment: Experiment, folder: pathlib.Path) -> Run:
    """The parts of a run, with a sink that only remembers."""
    run = build(experiment, folder, None)
    run.sink.close()
    return dataclasses.replace(run, sink=Recorder())


@pytest.fixture(scope='module')
def step(tmp_path_factory) -> Step:
    run = built(EXPERIMENT, tmp_path_factory.mktemp('golden') / 'run')
    born = {name: leaves(pool.state.params) for name, pool in run.pools.items()}
    played = play(run, 0, EXPERIMENT.pools)
    credited = run.algorithm.credit(played)
    routed = route(credited, run.algorithm.schedule(0, ROLES))
    batches, by_hand, learned = {}, {}, {}
    for name, live in routed.items():
        seed = rng.seed_for(EXPERIMENT.seed, rng.SHUFFLE, 0, rng.number_of(name))
        batches[name] = pack(rows_of(live, dict.fromkeys(ROLES, (0.8,))), EXPERIMENT.packing(), seed)
        twin = Pool(name, jax.tree.map(jnp.copy, run.pools[name].state))
        learned[name] = twin.learn(run.updater, batches[name], knobs(EXPERIMENT, 0, 0.0, name))
        by_hand[name] = leaves(twin.state.params)
    train_step(run, 0, 0.0)
    return Step(run, played, credited, routed, batches, born, by_hand, learned, run.sink.rows)


def test_every_training_world_has_its_seed_and_a_position_that_counts_on_through_the_run(step, monkeypatch):
    monkeypatch.setattr(train, 'played', lambda sample, worlds, place, stage: worlds)
    worlds = play(step.run, 2, EXPERIMENT.pools)
    assert [world.position for world in worlds] == [8, 9, 10, 11] and {world.run for world in worlds} == {
        EXPERIMENT.seed
    }
    seeds = [rng.seed_for(EXPERIMENT.seed, rng.TRAIN, 2, env) % (1 << 40) for env in range(4)]
    assert [made(world) for world in worlds] == [EXPERIMENT.task.train(seed) for seed in seeds]


def test_every_environment_is_played_by_both_roles_with_k_answers_each(step):
    assert [trajectory.env for trajectory in step.played] == [0, 1, 2, 3]
    assert all(trajectory.fault is None and 1 <= len(trajectory.turns) <= 2 for trajectory in step.played)
    for trajectory in step.played:
        for t, turn in enumerate(trajectory.turns):
            assert [(group.key.role, group.policy, group.key.turn) for group in turn.groups] == [
                ('tool', 'left', t),
                ('plan', 'right', t),
            ]
            assert all(len(group.candidates) == 8 for group in turn.groups)
            tool, plan = turn.groups
            program = tool.candidates[tool.chosen]
            assert program.reward.total(1.0) == max(c.reward.total(1.0) for c in tool.candidates)
            assert '=' in plan.prompt.messages[0].content  # the plan was shown what the tool was chosen to say


def test_advantages_are_those_of_hand_arithmetic_inside_each_group(step):
    assert len(step.credited) == sum(len(turn.groups) for t in step.played for turn in t.turns)
    for item in step.credited:
        rewards = [c.reward.team + c.reward.local for c in item.group.candidates]
        mean, deviation = statistics.fmean(rewards), statistics.stdev(rewards)
        if max(rewards) - min(rewards) < 1e-9:
            assert item.advantages == (0.0,) * 8
        else:
            assert item.advantages == pytest.approx([(r - mean) / (deviation + 0.1) for r in rewards])


def test_the_batches_hold_exactly_what_was_sampled_in_live_groups(step):
    for name, steps in step.batches.items():
        sampled = Counter(
            (
                item.group.prompt.ids,
                candidate.answer.ids,
                tuple(np.float32(candidate.answer.logps)),
                np.float32(advantage),
            )
            for item in step.routed[name]
            for candidate, advantage in zip(item.group.candidates, item.advantages, strict=True)
        )
        packed = Counter()
        for micro in [micro for one in steps for micro in one]:
            for g, k in np.argwhere(micro.mask_GKS.any(-1)):
                n = int(micro.mask_GKS[g, k].sum())
                packed[
                    tuple(micro.prompts_GP[g, : micro.lengths_G[g]].tolist()),
                    tuple(micro.answers_GKS[g, k, :n].tolist()),
                    tuple(micro.sampler_logps_GKS[g, k, :n]),
                    micro.advantages_GK[g, k],
                ] += 1
        assert packed == sampled
        # the constant divisor: groups x K x longest answer
        assert {float(m.divisor) for one in steps for m in one} == {len(step.routed[name]) * 8 * 5.0}


def test_only_pools_with_live_groups_of_their_own_roles_are_moved(step):
    assert step.routed and all({item.group.policy for item in live} == {name} for name, live in step.routed.items())
    for name, born in step.born.items():
        now = leaves(step.run.pools[name].state.params)
        changed = any((before != after).any() for before, after in zip(born, now, strict=True))
        assert changed is (name in step.routed)
        assert int(step.run.pools[name].state.updates) == len(step.batches.get(name, ()))


def test_train_step_is_these_links_and_nothing_else_to_the_last_bit(step):
    for name, wanted in step.by_hand.items():
        now = leaves(step.run.pools[name].state.params)
        assert [leaf.tobytes() for leaf in now] == [leaf.tobytes() for leaf in wanted]


def test_on_policy_every_ratio_is_one_and_nothing_is_clipped(step):
    """A10 through the whole chain, at a sampling temperature of 0.8."""
    for metrics in step.learned.values():
        assert metrics['ratio'] == pytest.approx(1, abs=1e-3)
        assert metrics['clip_share'] == 0 and abs(metrics['ppo_kl']) < 1e-3
        assert metrics['grad_norm'] > 0 and metrics['optimiser_steps'] == 1


def test_metrics_are_finite_and_say_what_happened(step):
    """A40 and A41: cut answers and dead groups are told from the first step on."""
    assert set(step.written) == {'rollout'} | {f'update/{name}' for name in step.routed}
    assert all(math.isfinite(value) for row in step.written.values() for value in row.values())
    rollout = step.written['rollout']
    for role in ROLES:
        answers = [c.answer for i in step.credited if i.group.key.role == role for c in i.group.candidates]
        assert rollout[f'truncated/{role}'] == pytest.approx(np.mean([a.finish == 'length' for a in answers]))
        assert rollout[f'tokens/{role}'] == pytest.approx(np.mean([len(a.ids) for a in answers]))
        assert rollout[f'dead_groups/{role}'] == pytest.approx(dead_shares(step.credited)[role])
    for name, live in step.routed.items():
        told = step.written[f'update/{name}']
        assert told['tokens'] == sum(len(c.answer.ids) for item in live for c in item.group.candidates)
        assert told['loss'] == pytest.approx(step.learned[name]['loss'])
    assert (rollout['faults'], rollout['groups']) == (0, len(step.credited))


def test_the_next_step_is_sampled_from_what_was_learned(step):
    """A18: version 1, and the learner's log-probs after the update are the sampler's."""
    played = play(step.run, 1, EXPERIMENT.pools)
    assert {c.answer.version for t in played for turn in t.turns for g in turn.groups for c in g.candidates} == {1}
    live = route(step.run.algorithm.credit(played), ROLES)
    for name, items in live.items():
        twin = Pool(name, jax.tree.map(jnp.copy, step.run.pools[name].state))
        batches = pack(rows_of(items, dict.fromkeys(ROLES, (0.8,))), EXPERIMENT.packing(), 0)
        told = twin.learn(step.run.updater, batches, knobs(EXPERIMENT, 1, 0.0, name))
        assert told['ratio'] == pytest.approx(1, abs=1e-3)


def test_roles_that_name_one_pool_share_one_set_of_parameters(tmp_path):
    shared = dataclasses.replace(EXPERIMENT, pools={'tool': 'shared', 'plan': 'shared'})
    assert list(built(shared, tmp_path / 'run').pools) == ['shared']


def test_pools_are_born_different(step):
    assert sorted(step.born) == ['left', 'right']
    assert any((a != b).any() for a, b in zip(step.born['left'], step.born['right'], strict=True))


def test_a_step_in_which_too_many_episodes_fail_is_refused_with_the_first_fault(step):
    faulty = [dataclasses.replace(t, fault=f'engine: {t.env} gone') for t in step.played]
    half = [*faulty[:2], *step.played[2:]]
    refuse_too_many_faults(EXPERIMENT, half, half[2:])  # two of four, as many as are allowed
    with pytest.raises(TooManyFaultsError, match=r'3 of 4 episodes failed .limit 50%.; the first: engine: 0 gone'):
        refuse_too_many_faults(EXPERIMENT, [*faulty[:3], step.played[3]], step.played[3:])
    with pytest.raises(TooManyFaultsError, match='4 of 4'):
        refuse_too_many_faults(EXPERIMENT, faulty, [])


def test_two_roles_that_share_a_policy_learn_twice_and_its_reference_stays_what_it_was(tmp_path):
    """A42: reference = policy at step 0; its buffers must outlive those that two updates donate."""
    experiment = dataclasses.replace(
        EXPERIMENT,
        pools={'tool': 'shared', 'plan': 'shared'},
        algorithm=dataclasses.replace(EXPERIMENT.algorithm, kl=0.1),
        warm_start=WarmStartSettings(steps=0),
    )
    run = built(experiment, tmp_path / 'run')
    warm_start(run)
    pool = run.pools['shared']
    born = leaves(pool.state.params)
    for step in range(2):
        train_step(run, step, step / 2)
    assert int(pool.state.updates) == 2 and run.sink.rows['update/shared']['kl'] > 0
    assert [leaf.tobytes() for leaf in leaves(pool.state.reference)] == [leaf.tobytes() for leaf in born]
    assert all((before != after).any() for before, after in zip(born, leaves(pool.state.params), strict=True))
