"""A coder and a unit tester, Qwen3-1.7B with an adapter for each, are to learn to program by AT-GRPO.

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

from experiments.math_at_grpo import CONFIG as MATH
from mallm.cli import main
from mallm.config import override
from mallm.envs.code import CodeTask

CONFIG = override(
    MATH,  # whose model and settings are the same
    {
        'name': 'code_at_grpo',
        'pools': {'coder': 'coder', 'tester': 'tester'},
        'task': CodeTask(),
        'evaluation.boards': 64,
        'evaluation.report_boards': 175,
    },
)

if __name__ == '__main__':
    main(CONFIG, __doc__)
