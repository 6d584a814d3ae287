"""A team of two language-model agents is to learn to find its way on 10x10 maps it has never seen, with AT-GRPO.

Command:  python -m experiments.plan_path_at_grpo            (--help shows every setting, --smoke is quick)
Cost:     not measured yet.
Result:   none stored yet.
"""

from mallm.cli import main
from mallm.envs.plan_path_task import PlanPathTask
from mallm.experiment import Experiment, SamplingSettings, WarmStartSettings

CONFIG = Experiment(
    name='plan_path_at_grpo',
    steps=150,
    task=PlanPathTask(),
    sampling=SamplingSettings(envs=32),
    warm_start=WarmStartSettings(steps=100),
)

if __name__ == '__main__':
    main(CONFIG, __doc__)
