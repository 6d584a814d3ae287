"""A run on a pretrained checkpoint: adapters over its weights, its own tokenizer, its context; then exported again."""

import dataclasses
import json
import pathlib

import jax
import numpy as np
import pytest
import torch
import transformers

from mallm import run as parts
from mallm import train
from mallm.envs.arithmetic import ArithmeticTask, ArithmeticTeam
from mallm.experiment import (
    EvaluationSettings,
    Experiment,
    LearningSettings,
    LoraSettings,
    ModelSettings,
    SamplingSettings,
    WarmStartSettings,
)
from mallm.io import hf
from mallm.io.checkpoint import CheckpointError
from mallm.models.config import Architecture
from mallm.policies import make_policies, within_context
from mallm.stored import read_learned
from mallm.study.table import stored_folder
from tests.rollout.chat_test import pretrained

SIZES = {
    'vocab_size': 320, 'hidden_size': 16, 'num_hidden_layers': 1, 'num_attention_heads': 2, 'num_key_value_heads': 1,
    'intermediate_size': 32, 'max_position_embeddings': 512, 'bos_token_id': 1, 'eos_token_id': [3, 0],
}  # fmt: skip


@pytest.fixture(scope='module')
def source(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A random Llama with a tokenizer and a chat template, as transformers writes them."""
    folder = tmp_path_factory.mktemp('model')
    torch.manual_seed(0)
    transformers.LlamaForCausalLM(transformers.LlamaConfig(**SIZES)).save_pretrained(folder)
    pretrained().save_pretrained(folder)
    return str(folder)


def experiment(source: str, runs: pathlib.Path, **more) -> Experiment:
    settings = Experiment(
        name='word_problems',
        steps=2,
        pools={'tool': 'left', 'plan': 'right'},
        task=ArithmeticTask(),
        model=ModelSettings(source=source, remat=False, lora=LoraSettings(rank=2)),
        sampling=SamplingSettings(envs=2, k=2, turns=1, spread=2.0, max_tokens=8),
        learning=LearningSettings(step_groups=0, micro_groups=2, rate=(1e-2, 1e-2)),
        warm_start=WarmStartSettings(steps=0),
        evaluation=EvaluationSettings(every=1, boards=2, report_boards=2, replays=1),
        save_every=1,
        runs=str(runs),
        wandb='disabled',
    )
    return dataclasses.replace(settings, **more)


def longer_is_better(world: ArithmeticTeam, role: str, text: str, act=ArithmeticTeam.act):
    """A random model never writes a number: without this all its answers would be alike and none learned from."""
    after, reward = act(world, role, text)
    return after, dataclasses.replace(reward, local=reward.local + len(text))


@pytest.fixture(scope='module')
def ran(source: str, tmp_path_factory: pytest.TempPathFactory) -> tuple[Experiment, dict]:
    asked = experiment(source, tmp_path_factory.mktemp('runs'))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(train, 'write_report', lambda folder: None)
        patch.setattr(ArithmeticTeam, 'act', longer_is_better)
        return asked, dict(train.train(asked))


def test_it_runs_to_its_summary_and_no_copy_of_the_base_is_stored(ran):
    asked, summary = ran
    folder = pathlib.Path(asked.runs) / asked.folder_name
    assert json.loads((folder / 'summary.json').read_text()) == summary and summary['faults'] == 0
    assert set(summary['format_after']) == {'tool', 'plan'} and 0 <= summary['success_after'] <= 1
    assert not (folder / 'base').exists()
    assert stored_folder(asked) == folder, 'the limit that the context sets is not taken for another setting'


def test_every_evaluation_says_what_it_has_cost_so_far_and_the_last_agrees_with_the_summary(ran):
    asked, summary = ran
    lines = (pathlib.Path(asked.runs) / asked.folder_name / 'metrics.jsonl').read_text().splitlines()
    rows = [row for row in map(json.loads, lines) if row['axis'] == 'eval']
    steps = [row['step_tokens'] for row in map(json.loads, lines) if row['axis'] == 'rollout']
    assert [row['training_tokens'] for row in rows] == [0, steps[0], sum(steps)]
    assert sum(steps) == summary['training_tokens'] > 0
    minutes = [row['training_cpu_minutes'] for row in rows]
    assert minutes[0] == 0 < minutes[1] < minutes[2] == pytest.approx(summary['training_cpu_minutes'], abs=0.005)
    assert minutes[2] < rows[2]['cpu_minutes'], 'the warm start, reports and evaluations are not counted'


def test_adapters_were_trained_over_the_very_weights_of_the_checkpoint(ran, source):
    asked, _ = ran
    folder = pathlib.Path(asked.runs) / asked.folder_name
    run = parts.build(asked, folder, 2)
    born = {name: jax.device_get(pool.state.params) for name, pool in run.pools.items()}
    parts.restore(run, 2)
    _, weights = hf.load(source)
    assert jax.tree.all(jax.tree.map(np.array_equal, jax.device_get(run.frozen), jax.device_get(weights)))
    moved = [
        name
        for name, pool in run.pools.items()
        if not jax.tree.all(jax.tree.map(np.array_equal, born[name], jax.device_get(pool.state.params)))
    ]
    assert moved == ['left', 'right']
    assert sum(leaf.size for leaf in jax.tree.leaves(born)) < sum(leaf.size for leaf in jax.tree.leaves(weights))


def test_over_a_base_in_bfloat16_adapters_and_their_moments_stay_in_float32(source, tmp_path, monkeypatch):
    """The base, and a policy merged of the two, are in bfloat16; what learns is not."""
    model = ModelSettings(source=source, remat=False, lora=LoraSettings(rank=2), dtype='bfloat16')
    evaluation = EvaluationSettings(every=0, report_boards=2, replays=1)
    asked = experiment(source, tmp_path, model=model, evaluation=evaluation, steps=1)
    monkeypatch.setattr(train, 'write_report', lambda folder: None)
    monkeypatch.setattr(ArithmeticTeam, 'act', longer_is_better)
    assert train.train(asked)['faults'] == 0
    folder = tmp_path / asked.folder_name
    run = parts.build(asked, folder, 1)
    parts.restore(run, 1)
    assert {leaf.dtype for leaf in jax.tree.leaves(run.frozen)} == {np.dtype('bfloat16')}
    for pool in run.pools.values():
        held = jax.tree.leaves((pool.state.params, pool.state.moments))
        assert {leaf.dtype for leaf in held if leaf.ndim} == {np.dtype('float32')}
    merged = read_learned(folder).merged('left')
    assert {leaf.dtype for leaf in jax.tree.leaves(merged)} == {np.dtype('bfloat16')}


def test_a_run_does_not_go_on_over_a_base_that_has_changed(ran):
    asked, _ = ran
    run = parts.build(asked, pathlib.Path(asked.runs) / asked.folder_name, 2)
    other = jax.tree.map(lambda leaf: leaf.at[(0,) * leaf.ndim].add(1e-3), run.frozen)
    run.base.state = dataclasses.replace(run.base.state, params=other)
    with pytest.raises(CheckpointError, match=r'model\.source has changed since'):
        parts.restore(run, 2)


def test_every_end_of_the_generation_config_ends_an_answer(source):
    assert set(make_policies(experiment(source, pathlib.Path('unused'))).tokenizer.ends) == {3, 0}


def test_full_parameters_are_copied_into_every_pool_and_none_is_shared(source):
    full = experiment(source, pathlib.Path('unused'), model=ModelSettings(source=source))
    pools = make_policies(full).pools
    left, right = (pools[name].state.params['embedding'] for name in ('left', 'right'))
    assert np.array_equal(left, right) and left.unsafe_buffer_pointer() != right.unsafe_buffer_pointer()


def test_prompts_are_limited_to_what_the_context_holds_beside_an_answer(source):
    """Context 512 and answers padded to 8: prompts padded to 16 may have 496 tokens."""
    asked, arch = experiment(source, pathlib.Path('unused')), Architecture(320, context=512)
    assert within_context(asked, arch).sampling.max_prompt == 496
    shorter = dataclasses.replace(asked, sampling=dataclasses.replace(asked.sampling, max_prompt=100))
    assert within_context(shorter, arch).sampling.max_prompt == 100
    assert within_context(asked, Architecture(320)) is asked
    with pytest.raises(ValueError, match='leaves no room for a prompt in a context of 16'):
        within_context(asked, Architecture(320, context=16))


def test_a_pool_may_not_be_named_like_the_base(source):
    with pytest.raises(ValueError, match="'base' is what adapters adapt"):
        experiment(source, pathlib.Path('unused'), pools={'tool': 'base', 'plan': 'right'})
