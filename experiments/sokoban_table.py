"""Every control of the Sokoban job: same code, same boards, same processor time for reinforcement, several seeds.

Command:  python -m experiments.sokoban_table                 (cells that are done are not run again)
          python -m experiments.sokoban_table --cpu-minutes 25 --seeds 0 1 2 --only at_grpo solo
Writes experiments/results/sokoban_table.json and .md, the table that README shows.
"""

import tyro

from experiments.sokoban_at_grpo import CONFIG
from experiments.suite import ENDLESS, PER_ROLE, PLAN_ALONE, SOLO, TRAJECTORY_LEVEL
from mallm.config import override
from mallm.experiment import Experiment
from mallm.study.comparison import HOW, Cells, Row, remarks, table
from mallm.study.table import fill

REFERENCE = Row('AT-GRPO, shared policy', 'at_grpo', control=False)
ROWS = (
    Row('random mover', 'at_grpo', 'random_mover'),
    Row('team, warm start alone, shared policy', 'at_grpo', 'success_before'),
    Row('team, warm start alone, a policy for each role', 'at_grpo_per_role', 'success_before'),
    Row('team, cloning for the same time instead', 'keep_cloning'),
    Row('`plan` alone without the tool, a group each turn', 'plan_alone'),
    Row('`solo`: one agent that holds the tool, a group each turn', 'solo'),
    Row('team, trajectory-level GRPO (settings of its own)', 'team_grpo'),
    REFERENCE,
    Row('AT-GRPO, a policy for each role', 'at_grpo_per_role', control=False),
    Row('the same, roles swapped', 'at_grpo_per_role', 'swapped_after', control=False),
)
WHAT = """Share of boards solved, one path, no tree; greedy, and at temperature 1. n: seeds. Every method has the same
processor time after its warm start, which one row spends on cloning; what a role learned acts in the other where roles
are swapped.
"""
WARM_START_MINUTES = 1.0
"""Processor time that a warm start takes; cloning goes on for the budget of the others on top of it."""


def methods(cpu_minutes: float) -> dict[str, Experiment]:
    """One experiment a row, each with the same processor time for what it does after the warm start."""
    base = override(
        CONFIG,
        {
            'cpu_minutes': cpu_minutes,
            'steps': ENDLESS,
            'evaluation.every': 0,
            'evaluation.report_boards': 256,
            'wandb': 'disabled',
        },
    )
    return {
        'keep_cloning': override(base, {'steps': 0, 'warm_start.cpu_minutes': WARM_START_MINUTES + cpu_minutes}),
        'plan_alone': override(base, PLAN_ALONE),
        'solo': override(base, SOLO),
        'team_grpo': override(base, TRAJECTORY_LEVEL),
        'at_grpo': base,
        'at_grpo_per_role': override(base, {'pools': PER_ROLE}),
    }


def main(
    cpu_minutes: float = 6.0,
    seeds: tuple[int, ...] = (0, 1, 2),
    only: tuple[str, ...] = (),
    runs: str = 'runs/table',
) -> None:
    out = 'experiments/results/sokoban_table'
    fill(methods(cpu_minutes), seeds=seeds, only=only, runs=runs, out=out, tell=markdown)


def markdown(cells: Cells) -> str:
    shown = table(ROWS, cells, reference=REFERENCE, sampled=True)
    said = ''.join(f'- {remark}\n' for remark in remarks(ROWS, cells, reference=REFERENCE))
    return f'{WHAT}\n{shown}\n\n{HOW}\n{said}'


if __name__ == '__main__':
    tyro.cli(main, description=__doc__)
