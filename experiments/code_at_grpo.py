"""A coder and a unit tester, Qwen3-1.7B with an adapter for each, learn to program by AT-GRPO.

`coder` writes a program that reads stdin, `tester` writes tests that are put to it; golden tests judge, in a sandbox.

Command:  pip install -e '.[data]' && python -m experiments.code_at_grpo
          --task.problems apps --task.final live_code_bench --task.final-strict apps_test  trains and tests on the
          paper's sets from the hub (code_contests: the paper's for 8B); apps:FILE.jsonl reads a local file. Without
          these, tasks are made here. task=CodeTask(team=('coder',)) trains one agent.
          --task.require-isolation refuses to run programs where the kernel allows no namespaces.
          A quick check on a CPU: --smoke --model.source smollm2 --sampling.max-tokens 48
Cost:     not measured; the paper used 8 H100.
Result:   none stored yet.
"""

from mallm.cli import main
from mallm.envs.code import CodeTask
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
    name='code_at_grpo',
    steps=200,
    pools={'coder': 'coder', 'tester': 'tester'},
    task=CodeTask(),
    model=ModelSettings(source='Qwen/Qwen3-1.7B', lora=LoraSettings(rank=16, alpha=32.0), dtype='bfloat16'),
    sampling=SamplingSettings(envs=32, k=4, turns=4, spread=1.0, max_tokens=2048, max_prompt=4096),
    algorithm=AlgorithmSettings(clip_high=0.2, entropy=0.0, entropy_target=(-1.0, -1.0), divisor='tokens'),
    learning=LearningSettings(rate=(5e-6, 1.5e-6), warmup=10, step_groups=64, micro_groups=1, b2=0.999),
    warm_start=WarmStartSettings(steps=0),
    evaluation=EvaluationSettings(every=10, boards=64, report_boards=175, replays=4),
    save_every=20,
)

if __name__ == '__main__':
    main(CONFIG, __doc__)
