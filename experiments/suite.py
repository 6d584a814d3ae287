"""The games that the tiny policy learns, by name; and what every comparison on them has in common."""

from collections.abc import Mapping
from typing import Any

from experiments import plan_path_at_grpo, sokoban_at_grpo, sudoku_at_grpo
from mallm.cli import smoke
from mallm.config import override
from mallm.experiment import Experiment

SUITE: Mapping[str, Experiment] = {
    'sokoban': sokoban_at_grpo.CONFIG,
    'plan_path': plan_path_at_grpo.CONFIG,
    'sudoku': sudoku_at_grpo.CONFIG,
}
ENDLESS = 1_000_000
"""Steps of a run that its processor time ends."""
OVERHEAD_MINUTES = 3.0
"""Processor time of a warm start and of the reports, beside the budget of a cell: an estimate, to say costs with."""
PER_ROLE = {'tool': 'tool', 'plan': 'plan'}
"""Pools: one policy for each role."""
PLAN_ALONE: Mapping[str, Any] = {'task.team': ('plan',), 'pools': {'plan': 'shared'}}
"""Changes: one agent without the tool."""
SOLO: Mapping[str, Any] = {'task.team': ('solo',), 'pools': {'solo': 'shared'}}
"""Changes: one agent that holds the tool."""

TRAJECTORY_LEVEL: Mapping[str, Any] = {
    'sampling.mode': 'parallel', 'sampling.envs': 16, 'algorithm.credit': 'team_outcome', 'algorithm.entropy': 0.003,
    'algorithm.entropy_target': (-1.0, -1.0), 'learning.rate': (6e-4, 1e-4), 'learning.step_groups': 256,
    'learning.micro_groups': 64,
}  # fmt: skip
"""Changes: trajectory-level GRPO, tuned on Sokoban. It compares who solved the board: comparing whole returns, which
hold penalties, or with AT-GRPO's entropy bonus, every short run fell below its warm start."""


def budgeted(task: str, cpu_minutes: float) -> Experiment:
    """The task's experiment with so many CPU minutes of reinforcement, its curve recorded on the way.

    Evaluations, the warm start and the reports do not count: they cost every method about the same.

    Raises:
      ValueError: there is no such task.
    """
    if task not in SUITE:
        raise ValueError(f'task={task!r}: must be one of {list(SUITE)}')
    if cpu_minutes <= 0:
        raise ValueError(f'cpu_minutes={cpu_minutes}: equal budgets must be positive, e.g. 10')
    return override(
        SUITE[task],
        {
            'cpu_minutes': cpu_minutes,
            'steps': ENDLESS,
            'evaluation.every': 25,
            'evaluation.boards': 128,
            'evaluation.report_boards': 512,
            'wandb': 'disabled',
        },
    )


def without_tree(base: Experiment) -> dict[str, Any]:
    """Changes: agent and turn are compared across K whole trajectories, of a quarter of the instances."""
    envs = max(1, base.sampling.envs // 4)
    return {'sampling.mode': 'parallel', 'sampling.envs': envs, 'algorithm.credit': 'parallel_agent_turn'}


def tiny(experiment: Experiment) -> Experiment:
    """The same, to see that it works here: two steps of almost nothing, with the tree that a sweep may vary."""
    tree = {'sampling.k': experiment.sampling.k, 'sampling.turns': experiment.sampling.turns}
    few = {'evaluation.report_boards': 8, 'evaluation.boards': 4, 'evaluation.replays': 1}
    return override(smoke(experiment), tree | few)
