"""A team of two language-model agents learns to solve Sokoban boards it has never seen, with AT-GRPO.

Command:  python -m experiments.sokoban_at_grpo            (--help shows every setting, --smoke takes under a minute)
"""

from mallm.cli import main
from mallm.experiment import Experiment

CONFIG = Experiment(name='sokoban_at_grpo')

if __name__ == '__main__':
    main(CONFIG, __doc__)
