"""A reasoner and a tool user, Qwen3-1.7B with an adapter for each, are to learn mathematics by AT-GRPO.

`tool` writes Python that is run in a sandbox, `reason` reads the output and answers in a box; math-verify grades.

Command:  pip install -e '.[math,data]' && python -m experiments.math_at_grpo
          --task.problems polaris --task.final aime_2024 --task.final-strict aime_2025  trains and tests as the paper
          does, with the sets from the hub; polaris:FILE.jsonl reads a local file. Without, problems are made here.
          --model.source takes any other instruct model; task=MathTask(team=('reason',)) trains one agent.
          --task.require-isolation refuses to run programs where the kernel allows no namespaces.
          A quick check on a CPU: --smoke --model.source smollm2 --sampling.max-tokens 48
Cost:     not measured; the paper used 8 H100.
Result:   none stored yet.
"""

from mallm.cli import main
from mallm.envs.math import MathTask
from mallm.experiment import (
    AlgorithmSettings,
    EvaluationSettings,
    Experiment,
    LearningSettings,
    LoraSettings,
    ModelSettings,
    SamplingSettings,
    WarmStartSettings,
)

CONFIG = Experiment(
    name='math_at_grpo',
    steps=200,
    pools={'tool': 'tool', 'reason': 'reason'},
    task=MathTask(),
    model=ModelSettings(source='Qwen/Qwen3-1.7B', lora=LoraSettings(rank=16, alpha=32.0), dtype='bfloat16'),
    sampling=SamplingSettings(envs=32, k=4, turns=4, spread=1.0, max_tokens=2048, max_prompt=4096),
    algorithm=AlgorithmSettings(clip_high=0.2, entropy=0.0, entropy_target=(-1.0, -1.0), divisor='tokens'),
    learning=LearningSettings(rate=(5e-6, 1.5e-6), warmup=10, step_groups=64, micro_groups=1, b2=0.999),
    warm_start=WarmStartSettings(steps=0),
    evaluation=EvaluationSettings(every=10, boards=60, report_boards=120, replays=4),
    save_every=20,
)

if __name__ == '__main__':
    main(CONFIG, __doc__)
