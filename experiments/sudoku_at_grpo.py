"""A team of two language-model agents is to learn to solve 4x4 Sudokus it has never seen, with AT-GRPO.

Command:  python -m experiments.sudoku_at_grpo            (--help shows every setting, --smoke is quick)
Cost:     not measured yet.
Result:   none stored yet.
"""

from mallm.cli import main
from mallm.envs.sudoku_task import SudokuTask
from mallm.experiment import Experiment, SamplingSettings, WarmStartSettings

CONFIG = Experiment(
    name='sudoku_at_grpo',
    steps=150,
    task=SudokuTask(fills=3),
    sampling=SamplingSettings(envs=32, turns=5, max_tokens=7),
    warm_start=WarmStartSettings(steps=400),
)

if __name__ == '__main__':
    main(CONFIG, __doc__)
