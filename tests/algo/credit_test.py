"""From rewards to advantages: by hand arithmetic, with the cases that broke other code bases (A01 to A04, A41)."""

import dataclasses
import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mallm.algo import credit
from mallm.learn.pack import rows_of
from mallm.learn.route import dead_shares, route
from mallm.types import Answer, Candidate, Credited, Group, GroupKey, Prompt, Reward, Trajectory, Turn


def group(rewards, *, env=0, sibling=0, turn=0, role='a', policy='shared', ids=(5, 6)) -> Group:
    candidates = tuple(Candidate(Answer((7,), (-1.0,), 'x', 'stop', 0), Reward(float(r), 0.0)) for r in rewards)
    return Group(GroupKey(0, env, sibling, turn, role), policy, Prompt(role, (), ids), candidates, 0)


def episode(*turns, value=0.0, fault=None) -> Trajectory:
    key = turns[0][0].key
    return Trajectory(key.env, key.sibling, tuple(map(Turn, turns)), False, value, (), fault)


def standardised_in_a_loop(rewards: list[float], floor: float) -> list[float]:
    """The definition, in plain Python floats (float64)."""
    mean = math.fsum(rewards) / len(rewards)
    deviation = math.sqrt(math.fsum((r - mean) ** 2 for r in rewards) / (len(rewards) - 1))
    return [(r - mean) / (deviation + floor) for r in rewards]


NORMALISERS = [credit.standardised, credit.centred, credit.leave_one_out]


# --- one group


@pytest.mark.parametrize('normalise', NORMALISERS)
def test_a_group_of_equal_rewards_has_advantages_of_exactly_zero(normalise):
    """A01. 0.1 + 0.2 and 0.3 are one reward too: they differ by rounding only."""
    for rewards in ([1, 1, 1, 1], [0, 0], [0.1 + 0.2, 0.3, 0.3], [-2.5] * 8):
        advantages = credit.compare(rewards, normalise)
        assert advantages.tolist() == [0.0] * len(rewards)


def test_standardised_by_hand():
    # [1, 0, 0, 0]: mean 1/4, sample variance (9/16 + 3/16) / 3 = 1/4, deviation 1/2: (3/4) / (1/2) = 1.5, then -0.5
    assert credit.compare([1, 0, 0, 0], credit.standardised) == pytest.approx([1.5, -0.5, -0.5, -0.5], abs=1e-5)


def test_standardised_with_a_floor_by_hand():
    # deviation 1/2 + floor 1/2 = 1: the centred rewards themselves
    advantages = credit.compare([1, 0, 0, 0], lambda r: credit.standardised(r, floor=0.5))
    assert advantages == pytest.approx([0.75, -0.25, -0.25, -0.25])


def test_centred_and_leave_one_out_by_hand():
    assert credit.compare([1, 0, 0, 0], credit.centred) == pytest.approx([0.75, -0.25, -0.25, -0.25])
    # against the others' mean: 1 - 0 = 1; 0 - (1 + 0 + 0) / 3 = -1/3
    assert credit.compare([1, 0, 0, 0], credit.leave_one_out) == pytest.approx([1, -1 / 3, -1 / 3, -1 / 3])
    assert credit.compare([3, 1], credit.leave_one_out) == pytest.approx([2, -2])


def test_rewards_that_are_close_keep_their_full_size():
    """A02: deviation 0.00002 / sqrt(2) = 1.4142e-5, plus 1e-6; 1e-5 / 1.5142e-5 = 0.660."""
    advantages = credit.compare([0.50000, 0.50002], credit.standardised)
    assert advantages == pytest.approx([-0.660, 0.660], abs=1e-3)
    assert advantages == pytest.approx(standardised_in_a_loop([0.50000, 0.50002], 1e-6), abs=1e-9)


@given(st.lists(st.floats(-100, 100), min_size=2, max_size=16), st.sampled_from([1e-6, 0.1]))
def test_any_group_agrees_with_a_plain_loop_in_float64(rewards, floor):
    """A02."""
    advantages = credit.compare(rewards, lambda r: credit.standardised(r, floor=floor))
    assert np.isfinite(advantages).all()
    if max(rewards) - min(rewards) > credit.SAME:
        assert advantages == pytest.approx(standardised_in_a_loop(rewards, floor), abs=1e-3)
    else:
        assert not advantages.any()


@given(st.lists(st.floats(-100, 100), min_size=2, max_size=16), st.sampled_from(NORMALISERS))
def test_advantages_sum_to_zero_and_keep_the_order_of_the_rewards(rewards, normalise):
    advantages = credit.compare(rewards, normalise)
    assert abs(advantages.sum()) < 1e-6 * max(1.0, np.abs(advantages).max())
    ranked = advantages[np.argsort(rewards)]
    assert (np.diff(ranked) >= -1e-9).all()


def test_a_single_candidate_has_nothing_to_be_compared_with():
    assert credit.compare([3.0], credit.standardised).tolist() == [0.0]


# --- AT-GRPO: one group, one comparison


def test_agent_turn_compares_inside_each_group_only():
    """A03: rewards [1, 0, 0, 0] of one prompt and [0, 0, 0, 1] of another, whatever order they come in."""
    a, b = group([1, 0, 0, 0], env=0), group([0, 0, 0, 1], env=1, ids=(8,))
    rule = credit.agent_turn(credit.centred, alpha=1.0)
    for episodes in ([episode([a]), episode([b])], [episode([b]), episode([a])]):
        by_env = {item.group.key.env: item.advantages for item in rule(episodes)}
        assert by_env[0] == pytest.approx((0.75, -0.25, -0.25, -0.25))
        assert by_env[1] == pytest.approx((-0.25, -0.25, -0.25, 0.75))


def test_agent_turn_never_compares_turns_roles_or_environments():
    """A04: every reward of a group is equal and every group differs from every other, so no advantage may arise."""
    turns = [[group([4 * t + r] * 3, turn=t, role=role) for r, role in enumerate('ab')] for t in range(2)]
    other = episode([group([9, 9, 9], env=1)])
    credited = credit.agent_turn(credit.standardised, alpha=1.0)([episode(*turns), other])
    keys = [(item.group.key.env, item.group.key.turn, item.group.key.role) for item in credited]
    assert keys == [(0, 0, 'a'), (0, 0, 'b'), (0, 1, 'a'), (0, 1, 'b'), (1, 0, 'a')]
    assert all(item.advantages == (0.0, 0.0, 0.0) for item in credited)


def test_alpha_weighs_the_team_part_and_leaves_the_local_part():
    one = group([0, 0])
    rewards = (Reward(team=1.0, local=0.0), Reward(team=0.0, local=1.0))
    candidates = tuple(dataclasses.replace(c, reward=r) for c, r in zip(one.candidates, rewards, strict=True))
    mixed = episode([dataclasses.replace(one, candidates=candidates)])
    # totals at alpha 3: 3 * 1 + 0 = 3 and 3 * 0 + 1 = 1; centred: +1 and -1
    assert credit.agent_turn(credit.centred, alpha=3.0)([mixed])[0].advantages == (1.0, -1.0)
    assert credit.agent_turn(credit.centred, alpha=1.0)([mixed])[0].advantages == (0.0, 0.0)
    assert credit.agent_turn(credit.centred, alpha=0.0)([mixed])[0].advantages == (-0.5, 0.5)


# --- its siblings


def test_a_reward_after_the_worlds_text_reaches_the_tokens_before_it_undiscounted():
    """A07: rewards [0, 2] with the world's text between both answers, against a sibling that earned nothing: returns 2
    and 2 at all trained tokens (gamma is 1), centred on their mean 1; never [0, 2]."""
    paid = episode([group([0], turn=0)], [group([2], turn=1)], value=2.0)
    unpaid = episode([group([0], turn=0, sibling=1)], [group([0], turn=1, sibling=1)], value=0.0)
    credited = credit.team(credit.centred)([paid, unpaid])
    assert {(i.group.key.sibling, i.group.key.turn): i.advantages for i in credited} == {
        (0, 0): (1.0,), (0, 1): (1.0,), (1, 0): (-1.0,), (1, 1): (-1.0,)
    }  # fmt: skip
    temperatures = {'a': (1.0,)}
    assert [row.advantages for row in rows_of(credited, temperatures)] == [(1.0,), (1.0,), (-1.0,), (-1.0,)]


def siblings(values, *, env=0, rewards=None) -> list[Trajectory]:
    """One parallel trajectory for each value: two turns of roles a and b, one answer at each place."""
    rewards = rewards or [0.0] * len(values)
    return [
        episode(*[[group([r], env=env, sibling=j, turn=t, role=role) for role in 'ab'] for t in range(2)], value=value)
        for j, (value, r) in enumerate(zip(values, rewards, strict=True))
    ]


def test_team_can_compare_outcomes_alone_whatever_penalties_the_returns_hold():
    """Returns -0.2 and 0.9 of a solved pair, 0 and -0.3 of an unsolved one: outcomes 1, 0 and 0, 0."""
    one, other = siblings([-0.2, 0.9]), siblings([0.0, -0.3], env=1)
    solved = dataclasses.replace(one[0], solved=True)
    credited = credit.team(credit.centred, credit.outcome)([solved, one[1], *other])
    assert {(i.group.key.env, i.group.key.sibling): i.advantages for i in credited} == {
        (0, 0): (0.5,), (0, 1): (-0.5,), (1, 0): (0.0,), (1, 1): (0.0,)
    }  # fmt: skip


def test_team_gives_every_answer_of_a_trajectory_the_trajectorys_advantage():
    credited = credit.team(credit.centred)([*siblings([3, 1]), *siblings([5, 5], env=1)])
    told = {(i.group.key.env, i.group.key.sibling, i.group.key.turn, i.group.key.role): i.advantages for i in credited}
    # env 0: mean 2, so +1 and -1 for each of the 2 turns x 2 roles; env 1: equal returns, nothing to learn
    wanted = {0: {0: (1.0,), 1: (-1.0,)}, 1: {0: (0.0,), 1: (0.0,)}}
    assert len(told) == 2 * 2 * 2 * 2
    assert all(value == wanted[env][sibling] for (env, sibling, _, _), value in told.items())


def test_parallel_agent_turn_compares_siblings_at_the_same_turn_and_role():
    episodes = siblings([0, 0, 0, 0], rewards=[1, 0, 0, 0]) + siblings([0, 0], env=1, rewards=[7, 7])
    credited = credit.parallel_agent_turn(credit.centred, alpha=1.0)(episodes)
    wanted = {0: [0.75, -0.25, -0.25, -0.25], 1: [0.0, 0.0]}
    for item in credited:
        assert item.advantages == pytest.approx([wanted[item.group.key.env][item.group.key.sibling]])
    assert len(credited) == (4 + 2) * 4


def test_parallel_agent_turn_lets_a_longer_trajectory_stand_alone_where_no_sibling_came():
    long, short = siblings([0, 0], rewards=[1, 0])
    credited = credit.parallel_agent_turn(credit.standardised, alpha=1.0)([long, episode(short.turns[0].groups)])
    assert {i.advantages for i in credited if i.group.key.turn == 1} == {(0.0,)}


RULES = [
    credit.agent_turn(credit.centred, alpha=1.0),
    credit.team(credit.centred),
    credit.team(credit.centred, credit.outcome),
    credit.parallel_agent_turn(credit.centred, alpha=1.0),
]
NAMES = ['agent_turn', 'team', 'team_outcome', 'parallel_agent_turn']


@pytest.mark.parametrize('rule', RULES, ids=NAMES)
def test_a_trajectory_with_a_fault_is_refused_by_every_rule(rule):
    faulty = episode([group([1, 0], env=6)], fault='engine: server gone')
    with pytest.raises(ValueError, match=r'env 6 failed \(engine: server gone\): leave faulty'):
        rule([episode([group([1, 0])]), faulty])


@pytest.mark.parametrize('rule', RULES, ids=NAMES)
def test_no_trajectories_give_no_credit(rule):
    assert rule([]) == []


def test_credit_owes_every_candidate_an_advantage():
    with pytest.raises(ValueError, match='1 advantages for 2 candidates'):
        Credited(group([1, 0]), (1.0,))
    with pytest.raises(ValueError, match='1 advantages for 4 candidates'):
        credit.parallel_agent_turn(credit.centred, alpha=1.0)([episode([group([1, 0, 0, 0])])])


# --- dead groups: dropped and counted


def test_dead_groups_are_dropped_and_counted():
    """A01, A41: of two groups of 4, one is dead; and two of two. Nothing has to be switched on for it."""
    rule = credit.agent_turn(credit.standardised, alpha=1.0)
    credited = rule([episode([group([1, 1, 1, 1])]), episode([group([1, 0, 0, 0], env=1)])])
    assert [credit.is_dead(item) for item in credited] == [True, False]
    assert [item.group.key.env for item in route(credited, ['a'])['shared']] == [1]
    assert dead_shares(credited) == {'a': 0.5}
    both = rule([episode([group([1] * 4)]), episode([group([0] * 4, env=1)])])
    assert route(both, ['a']) == {} and dead_shares(both) == {'a': 1.0}


def test_groups_go_to_the_policy_that_played_them_if_their_role_learns():
    a, b = (Credited(group([1, 0], role=r, policy=p), (1.0, -1.0)) for r, p in [('a', 'left'), ('b', 'right')])
    assert route([a, b], ['a', 'b']) == {'left': [a], 'right': [b]}
    assert route([a, b], ['b']) == {'right': [b]}
    assert route([a, b], []) == {}
    shared = [dataclasses.replace(i, group=dataclasses.replace(i.group, policy='shared')) for i in (a, b)]
    assert route(shared, ['a', 'b']) == {'shared': shared}


def test_the_share_of_dead_groups_is_told_role_by_role():
    live, dead = (1.0, -1.0), (0.0, 0.0)
    told = [('a', live), ('a', dead), ('a', dead), ('b', live)]
    credited = [Credited(group([0, 0], role=role), advantages) for role, advantages in told]
    assert dead_shares(credited) == {'a': pytest.approx(2 / 3), 'b': 0.0}


def test_two_dead_groups_of_four_are_dropped_and_counted_with_nothing_switched_on():
    """A41: rewards all 1, mixed, all 0, mixed."""
    rewards = ([1, 1, 1, 1], [1, 0, 0, 0], [0, 0, 0, 0], [0, 0, 0, 1])
    rule = credit.agent_turn(credit.standardised, alpha=1.0)
    credited = rule([episode([group(some, env=env)]) for env, some in enumerate(rewards)])
    assert [item.group.key.env for item in route(credited, ['a'])['shared']] == [1, 3]
    assert dead_shares(credited) == {'a': 0.5}
