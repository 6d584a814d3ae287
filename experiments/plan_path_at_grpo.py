"""A team of two language-model agents begins to find its way on 10x10 maps it has never seen, with AT-GRPO.

Command:  python -m experiments.plan_path_at_grpo            (--help shows every setting, --smoke is quick)
Cost:     47 minutes on a core of an AMD EPYC (AVX2) with other work beside it; 37 CPU minutes, 21 of them training
Result:   seed 0, 1024 held-out maps, greedy, at 0cdef7d: 7.8 -> 23.5 %, strict 0.1 -> 2.4 %; as many random moves as a
          team may make reach the goal on 16.0 %. Weak. The reward asks a solver for distances. Stored in
          experiments/results/plan_path_at_grpo-seed0/, from 100 steps of cloning routes that were blind to the goal.
"""

from mallm.cli import main
from mallm.envs.plan_path_task import PlanPathTask
from mallm.experiment import Experiment, SamplingSettings, WarmStartSettings

CONFIG = Experiment(
    name='plan_path_at_grpo',
    steps=150,
    task=PlanPathTask(),
    sampling=SamplingSettings(envs=32),
    warm_start=WarmStartSettings(steps=120),
)

if __name__ == '__main__':
    main(CONFIG, __doc__)
