"""The tasks that are put to pretrained models, from a checkpoint to a trained adapter: each plays, runs and learns."""

import collections
import dataclasses
import json

import jax
import numpy as np
import pytest
import torch
import transformers

from mallm import run as parts
from mallm import train
from mallm.envs import code, sandbox
from mallm.envs.base import Task
from mallm.envs.code import CodeTask
from mallm.envs.math import MathTask
from mallm.envs.sokoban_task import SokobanTask
from mallm.experiment import (
    EvaluationSettings,
    Experiment,
    LearningSettings,
    LoraSettings,
    ModelSettings,
    SamplingSettings,
    WarmStartSettings,
)
from tests.pretrained_run_test import SIZES
from tests.rollout.chat_test import pretrained

TASKS: dict[str, Task] = {
    'math': MathTask(),
    'code': CodeTask(),
    'sokoban': SokobanTask(style='text'),
}
PROGRAM = 'Look:\n```python\nprint("**Actions List**: []")\n```'
PROGRAMMERS = ('tool', 'coder')


@pytest.fixture(scope='module')
def source(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A random Llama whose context holds the prompts of every task."""
    folder = tmp_path_factory.mktemp('model')
    torch.manual_seed(0)
    sizes = SIZES | {'max_position_embeddings': 4096}
    transformers.LlamaForCausalLM(transformers.LlamaConfig(**sizes)).save_pretrained(folder)
    pretrained().save_pretrained(folder)
    return str(folder)


@pytest.mark.parametrize('name', TASKS)
def test_a_task_in_words_trains_every_role_without_a_fault_and_runs_what_it_writes(
    name, source, tmp_path, monkeypatch, capsys
):
    """A random model writes nothing of use: programmers hand in a real program, and the longer text earns more."""
    task = TASKS[name]
    asked = Experiment(
        name='words',
        steps=1,
        pools={role: role for role in task.team},
        task=task,
        model=ModelSettings(source=source, remat=False, lora=LoraSettings(rank=2)),
        sampling=SamplingSettings(envs=2, k=2, turns=1, spread=2.0, max_tokens=8),
        learning=LearningSettings(step_groups=0, micro_groups=2, rate=(1e-2, 1e-2)),
        warm_start=WarmStartSettings(steps=0),
        evaluation=EvaluationSettings(every=0, report_boards=2, replays=1),
        runs=str(tmp_path),
        wandb='disabled',
    )
    kind = type(task.train(0))
    acted, ran, act, run_program = collections.Counter(), collections.Counter(), kind.act, sandbox.run

    def longer_is_better(world, role, text):
        acted[role] += 1
        after, reward = act(world, role, PROGRAM if role in PROGRAMMERS else text)
        return after, dataclasses.replace(reward, local=min(1.0, len(text) / 100))

    def watched(program, *given, **more):
        verdict = run_program(program, *given, **more)
        ran[program, verdict.status, verdict.stdout] += 1
        return verdict

    monkeypatch.setattr(kind, 'act', longer_is_better)
    monkeypatch.setattr(sandbox, 'run', watched)
    code.ran.cache_clear()
    monkeypatch.setattr(train, 'write_report', lambda folder: None)
    summary = train.train(asked)
    assert summary['faults'] == 0 and summary['success_after'] == 0 and set(acted) == set(task.team)
    folder = tmp_path / asked.folder_name
    rows = [json.loads(line) for line in (folder / 'metrics.jsonl').read_text().splitlines()]
    (rollout,) = [row for row in rows if row['axis'] == 'rollout']
    assert rollout['episodes_truncated'] == 0 and rollout['groups'] == 2 * len(task.team)
    run = parts.build(asked, folder, 1)
    born = {pool: jax.device_get(one.state.params) for pool, one in run.pools.items()}
    parts.restore(run, 1)
    for pool, one in run.pools.items():
        assert not jax.tree.all(jax.tree.map(np.array_equal, born[pool], jax.device_get(one.state.params))), pool
    assert ran['print("**Actions List**: []")', 'ok', '**Actions List**: []\n'] > 0
    told = ''.join(capsys.readouterr()).split()
    assert ' '.join(str(sandbox.shared().walls).split()) in ' '.join(told)
