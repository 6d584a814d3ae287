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
    task=SudokuTask(),
    sampling=SamplingSettings(envs=64, max_tokens=9),
    warm_start=WarmStartSettings(steps=200),
)

if __name__ == '__main__':
    main(CONFIG, __doc__)
