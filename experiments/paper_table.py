"""The paper's main table with the tiny policy: single agent, team, and each trained, on every game, at equal cost.

Command:  python -m experiments.paper_table                (cells that are done are not run again)
          python -m experiments.paper_table --cpu-minutes 10 --tasks sokoban --only at_grpo solo
          python -m experiments.paper_table --smoke        (one seed of everything, tiny)
Cost:     tasks * seeds * 5 methods * (CPU minutes + warm start and reports, an estimated 3).
Writes experiments/results/paper_table.json and .md: per game ours, mean ± standard error over seeds, with CPU minutes
and tokens, and beside it what the paper reports for Qwen3. `not beaten` marks a control that AT-GRPO does not clearly
beat.
"""

import pathlib
from collections.abc import Mapping

import tyro

from experiments import paper
from experiments.suite import PER_ROLE, PLAN_ALONE, SOLO, SUITE, TRAJECTORY_LEVEL, budgeted, tiny
from mallm.config import override
from mallm.experiment import Experiment
from mallm.io import files
from mallm.study.comparison import HOW, Cells, Row, remarks, table
from mallm.study.table import gather, run_apart, run_missing, store
from mallm.train import train

REFERENCE = Row('AT-GRPO, shared', 'at_grpo', paper='MAS + AT-GRPO, shared', control=False)
ROWS = (
    Row('single agent with the tool, cloned', 'solo', 'success_before', 'single agent'),
    Row('single agent with the tool + GRPO (a group each turn)', 'solo', paper='single agent + GRPO'),
    Row('single agent without the tool + GRPO', 'plan_alone'),
    Row('MAS, cloned', 'at_grpo', 'success_before', 'MAS'),
    Row('MAS + GRPO (whole trajectories)', 'team_grpo', paper='MAS + GRPO'),
    REFERENCE,
    Row('AT-GRPO, per role', 'at_grpo_per_role', paper='MAS + AT-GRPO, per role', control=False),
    Row('AT-GRPO, per role, policies swapped', 'at_grpo_per_role', 'swapped_after', control=False),
)
WHAT = """Share of held-out instances solved, greedy, one path. Ours: a 0.6M-parameter policy made from scratch,
cloned from a beginner who knows the rules, then trained for equal CPU minutes of reinforcement. The paper's columns:
Qwen3 prompted and trained by its authors (arXiv 2510.11062), one run each; other instances, other prompts, thousands
of times the size. Compare the order of the rows, not the numbers. All rows have the settings of AT-GRPO but MAS +
GRPO, which has its own, tuned on Sokoban: 16 instances, whose K trajectories are all played to their end. `n` is the
number of seeds, ± the standard error over them; a row is `not beaten` unless the reference is clearly better.
"""


def methods(task: str, cpu_minutes: float) -> dict[str, Experiment]:
    """One experiment for each trained method, each with the same processor time after its warm start."""
    base = budgeted(task, cpu_minutes)
    return {
        'solo': override(base, SOLO),
        'plan_alone': override(base, PLAN_ALONE),
        'team_grpo': override(base, TRAJECTORY_LEVEL),
        'at_grpo': base,
        'at_grpo_per_role': override(base, {'pools': PER_ROLE}),
    }


def main(
    cpu_minutes: float = 10.0,
    seeds: tuple[int, ...] = (0, 1, 2),
    tasks: tuple[str, ...] = tuple(SUITE),
    only: tuple[str, ...] = (),
    runs: str = 'runs/paper',
    out: pathlib.Path = pathlib.Path('experiments/results/paper_table'),
    smoke: bool = False,
) -> None:
    """Fills the table.

    Args:
      cpu_minutes: of reinforcement for each cell.
      seeds: the same for all methods.
      tasks: which games; of the others, what is written stays.
      only: which methods.
      runs: where run folders are kept, in a folder for each game.
      out: what is written, without its ending.
      smoke: everything once, tiny, beside the real runs and not in the results.
    """
    wanted = {task: methods(task, cpu_minutes) for task in tasks}
    if unknown := set(only) - set(next(iter(wanted.values()), {})):
        raise SystemExit(f'--only {sorted(unknown)}: there are {sorted(next(iter(wanted.values())))}')
    if smoke:
        wanted = {task: {name: tiny(e) for name, e in cells.items()} for task, cells in wanted.items()}
        seeds, runs, out = seeds[:1], 'runs/paper_smoke', pathlib.Path('runs/paper_smoke/paper_table')

    told = files.read_json(out.with_suffix('.json')) or {}

    def cell(task: str, name: str, seed: int) -> Experiment:
        return override(wanted[task][name], {'name': name, 'seed': seed, 'runs': f'{runs}/{task}'})

    def between() -> None:
        ours = {task: gather(wanted[task], seeds, lambda *at, task=task: cell(task, *at)) for task in wanted}
        cells = told | {task: found for task, found in ours.items() if found}
        store(cells, markdown({task: cells[task] for task in SUITE if task in cells}), out)

    every = (cell(task, name, seed) for seed in seeds for task in wanted for name in only or wanted[task])
    run_missing(every, start=train if smoke else run_apart, between=between)
    print(out.with_suffix('.md').read_text())


def markdown(tables: Mapping[str, Cells]) -> str:
    """All games, the paper's rows beside ours."""
    return '\n'.join([WHAT + HOW, *(section(task, cells) for task, cells in tables.items())])


def section(task: str, cells: Cells) -> str:
    reported = {'paper, Qwen3-1.7B': paper.SMALL.get(task, {}), 'paper, Qwen3-8B': paper.LARGE.get(task, {})}
    floors = {s['words']['floor']: s['random_mover'] for seeds in cells.values() for s in seeds.values()}
    floor = ''.join(f'\nBy chance ({name}): {100 * share:.1f} %.\n' for name, share in floors.items())
    said = ''.join(f'- {remark}\n' for remark in remarks(ROWS, cells, reference=REFERENCE))
    return f'## {task}\n\n{table(ROWS, cells, reference=REFERENCE, paper=reported)}\n{floor}\n{said}'


if __name__ == '__main__':
    tyro.cli(main, description=__doc__)
