"""The paper's ablations and ours, each a grid over one experiment; `python -m experiments.sweep` runs them.

Every cell has the budget of its base, so that what costs more a step takes fewer steps.
"""

import typing
from collections.abc import Callable, Mapping

from experiments import paper
from experiments.suite import PER_ROLE, PLAN_ALONE, SOLO, TRAJECTORY_LEVEL, without_tree
from mallm.config import grid, override
from mallm.envs.crew import CrewTask, crew
from mallm.experiment import Experiment
from mallm.study.sweep import Casting, Sweep

Joint = Mapping[str, Mapping[str, typing.Any]]
"""Settings that change together, by the label they have in a table."""


def reward(task: str, base: Experiment) -> Sweep:
    """Reward terms: shaped by a solver, shaped without one, or nothing but the outcome (the paper's table 6)."""
    hints = typing.get_type_hints(type(base.task))
    if 'reward' not in hints:
        raise ValueError(f'{type(base.task).__name__} has no setting `reward` to choose among')
    kinds = typing.get_args(hints['reward'])
    reported = {'paper, Qwen3-8B': paper.OUTCOME_ONLY.get(task, {})}
    cells = dict(grid(base, task__reward=kinds))
    return Sweep('What must the reward tell beside the outcome?', cells, f'task.reward={kinds[0]}', reported=reported)


def alpha(task: str, base: Experiment) -> Sweep:
    """Weight of the team's reward beside the role's own; the paper has 1 and did not tune it."""
    cells = dict(grid(base, algorithm__alpha=[0.0, 0.5, 1.0, 2.0]))
    return Sweep('How much does the team reward count beside the local one?', cells, 'algorithm.alpha=1.0')


def candidates(task: str, base: Experiment) -> Sweep:
    """K, the candidates of a group."""
    cells = dict(grid(base, sampling__k=[2, 4, 8, 16]))
    return Sweep('How many candidates should a group have?', cells, 'sampling.k=8')


def turns(task: str, base: Experiment) -> Sweep:
    """T, the most turns of an episode, in training and in evaluation."""
    own = base.sampling.turns
    cells = dict(grid(base, sampling__turns=sorted({1, 2, own, 2 * own})))
    return Sweep('How many turns does the team need?', cells, f'sampling.turns={own}')


def agents(task: str, base: Experiment) -> Sweep:
    """Number of agents: one without the tool and one that holds it, a team, and crews of several tools and a plan.

    Each is trained by AT-GRPO and by trajectory-level GRPO. The paper has 3, 5 and 7 agents, for mathematics.
    """
    team: Joint = {
        'one_without_tool': PLAN_ALONE,
        'one_with_tool': SOLO,
        'two': {},
        **{
            name: {'task': CrewTask(crew(size), base.task), 'pools': dict.fromkeys(crew(size), 'shared')}
            for name, size in (('three', 3), ('five', 5))
        },
    }
    method: Joint = {'at_grpo': {}, 'team_grpo': TRAJECTORY_LEVEL}
    return Sweep('Does another agent help?', dict(grid(base, team=team, method=method)), 'two,at_grpo')


def choice(task: str, base: Experiment) -> Sweep:
    """Which candidate of a group is executed."""
    cells = dict(grid(base, sampling__choose=['greedy', 'sampled', 'first']))
    return Sweep('Must the best candidate be the one that is executed?', cells, 'sampling.choose=greedy')


def normaliser(task: str, base: Experiment) -> Sweep:
    """What rewards are divided by inside a group."""
    cells = dict(grid(base, algorithm__normalise=['std', 'mean', 'loo']))
    return Sweep('How should advantages be normalised?', cells, 'algorithm.normalise=std')


def sampler(task: str, base: Experiment) -> Sweep:
    """Tree against parallel sampling, at equal cost; trajectory-level GRPO has rate and entropy of its own."""
    kinds: Joint = {
        'tree': {},
        'parallel_agent_turn': without_tree(base),
        'trajectory_level': TRAJECTORY_LEVEL,
    }
    return Sweep('Does the tree pay, or would parallel trajectories do?', dict(grid(base, sampler=kinds)), 'tree')


def sharing(task: str, base: Experiment) -> Sweep:
    """One policy for all roles, one for each, or one adapter for each over a common base."""
    kinds: Joint = {
        'shared': {},
        'per_role': {'pools': PER_ROLE},
        'adapter_per_role': {'pools': PER_ROLE, 'model.lora.rank': 16},
    }
    return Sweep('Should the roles share their parameters?', dict(grid(base, policies=kinds)), 'shared')


def schedule(task: str, base: Experiment) -> Sweep:
    """All roles learn at every step, or one at a time."""
    cells = dict(grid(override(base, {'pools': PER_ROLE}), algorithm__schedule_period=[0, 1, 10]))
    return Sweep('Should the roles learn at the same time?', cells, 'algorithm.schedule_period=0')


def alone(task: str, base: Experiment) -> Sweep:
    """Trained alone, evaluated together (the paper's table 4), and policies swapped between the roles.

    A role is trained alone beside a partner who stays the cloned beginner; what both have learned then plays together.
    """
    frozen = (0.0, 0.0)
    kinds: Joint = {
        'together': {},
        'tool_alone': {'learning.pool_rates': {'plan': frozen}},
        'plan_alone': {'learning.pool_rates': {'tool': frozen}},
    }
    castings = {
        'alone_then_together': Casting('tool_alone', {'plan': ('plan_alone', 'plan')}),
        'swapped': Casting('together', {'tool': ('together', 'plan'), 'plan': ('together', 'tool')}),
    }
    cells = dict(grid(override(base, {'pools': PER_ROLE}), trained=kinds))
    reported = {'paper, Qwen3-1.7B': paper.TRAINED_ALONE.get(task, {})}
    return Sweep('Do the roles have to learn together?', cells, 'together', castings, reported, paper.ALONE_NOTE)


ABLATIONS: Mapping[str, Callable[[str, Experiment], Sweep]] = {
    'reward': reward,
    'alpha': alpha,
    'k': candidates,
    'turns': turns,
    'agents': agents,
    'choice': choice,
    'normaliser': normaliser,
    'sampler': sampler,
    'sharing': sharing,
    'schedule': schedule,
    'alone': alone,
}
