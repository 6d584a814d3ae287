"""A run in Hugging Face form: transformers and peft load it, and their logits are the run's own."""

import json
import pathlib

import jax.numpy as jnp
import numpy as np
import peft
import pytest
import torch
import transformers
import tyro

from experiments import export as command
from mallm.envs.arithmetic import ArithmeticTask
from mallm.errors import WeightsError
from mallm.experiment import LoraSettings, ModelSettings
from mallm.models import lora
from mallm.stored import read_learned
from mallm.study.export import export
from tests.io.checkpoints import logits
from tests.pretrained_run_test import SIZES
from tests.rollout.chat_test import pretrained
from tests.run_folders import TINY, saved, with_adapters

IDS = [[5, 9, 2, 13, 7]]


def own_logits(folder: pathlib.Path, role: str) -> np.ndarray:
    """What the run itself computes for IDS as one of its roles."""
    learned = read_learned(folder)
    params = learned.pools[learned.experiment.pools[role]]
    return np.asarray(learned.module.apply(lora.variables(params, learned.base), jnp.int32(IDS)))


def check(folder: pathlib.Path, role: str, loaded) -> None:
    np.testing.assert_allclose(logits(loaded.eval(), IDS), own_logits(folder, role), atol=2e-4, rtol=1e-4)


@pytest.fixture(scope='module')
def whole(tmp_path_factory) -> pathlib.Path:
    return saved(TINY, tmp_path_factory.mktemp('whole'))[0]


@pytest.fixture(scope='module')
def adapted(tmp_path_factory) -> pathlib.Path:
    return saved(with_adapters(TINY), tmp_path_factory.mktemp('adapted'))[0]


@pytest.fixture(scope='module')
def worded(tmp_path_factory) -> pathlib.Path:
    """One adapter for both roles over a pretrained model with a tokenizer."""
    source = tmp_path_factory.mktemp('model')
    torch.manual_seed(0)
    transformers.LlamaForCausalLM(transformers.LlamaConfig(**SIZES)).save_pretrained(source)
    pretrained().save_pretrained(source)
    model = ModelSettings(source=str(source), remat=False, lora=LoraSettings(rank=2, rs=True))
    settings = {'model': model, 'task': ArithmeticTask(), 'pools': {'tool': 'both', 'plan': 'both'}}
    warm = type(TINY.warm_start)(steps=0)
    experiment = type(TINY)(**vars(TINY) | settings | {'warm_start': warm, 'name': 'worded'})
    return saved(experiment, tmp_path_factory.mktemp('worded'))[0]


def test_whole_pools_become_models_with_the_logits_of_their_roles(whole, tmp_path):
    told = export(whole, tmp_path / 'out')
    assert told['roles'] == {'tool': 'left', 'plan': 'right'} and not told['adapters']
    assert json.loads((tmp_path / 'out' / 'roles.json').read_text()) == told
    for role, place in told['roles'].items():
        check(whole, role, transformers.AutoModelForCausalLM.from_pretrained(tmp_path / 'out' / place))
    assert not np.allclose(own_logits(whole, 'tool'), own_logits(whole, 'plan'), atol=0.1)


def test_adapters_go_out_beside_the_base_that_the_run_made_for_them(adapted, tmp_path):
    told = export(adapted, tmp_path / 'out')
    for role, place in told['roles'].items():
        base = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / 'out' / 'base')
        check(adapted, role, peft.PeftModel.from_pretrained(base, tmp_path / 'out' / place))
    check(adapted, 'tool', peft.AutoPeftModelForCausalLM.from_pretrained(tmp_path / 'out' / 'left'))


def test_merged_adapters_are_models_that_need_no_base(adapted, tmp_path):
    told = export(adapted, tmp_path / 'out', merge=True)
    assert sorted(path.name for path in (tmp_path / 'out').iterdir()) == ['left', 'right', 'roles.json']
    for role, place in told['roles'].items():
        check(adapted, role, transformers.AutoModelForCausalLM.from_pretrained(tmp_path / 'out' / place))


def test_an_adapter_over_a_pretrained_model_names_it_and_brings_its_tokenizer(worded, tmp_path):
    told = export(worded, tmp_path / 'out')
    assert told['roles'] == {'tool': '.', 'plan': '.'}
    check(worded, 'plan', peft.AutoPeftModelForCausalLM.from_pretrained(tmp_path / 'out'))
    told_tokens, own_tokens = transformers.AutoTokenizer.from_pretrained(tmp_path / 'out'), pretrained()
    assert told_tokens('One pen').input_ids == own_tokens('One pen').input_ids
    assert told_tokens.chat_template == own_tokens.chat_template
    export(worded, tmp_path / 'merged', merge=True)
    check(worded, 'tool', transformers.AutoModelForCausalLM.from_pretrained(tmp_path / 'merged'))
    assert transformers.AutoTokenizer.from_pretrained(tmp_path / 'merged').chat_template == own_tokens.chat_template


def test_what_cannot_be_exported_is_refused_and_nothing_is_written(whole, tmp_path, capsys):
    with pytest.raises(ValueError, match='apart-seed0 trained whole models, there is no adapter to merge'):
        export(whole, tmp_path / 'out', merge=True)
    (tmp_path / 'full').mkdir()
    (tmp_path / 'full' / 'mine').touch()
    with pytest.raises(WeightsError, match='is there already: an export never mixes with older files'):
        export(whole, tmp_path / 'full')
    (tmp_path / 'empty').mkdir()
    with pytest.raises(SystemExit, match=r'has no config\.json'):
        command.main(str(tmp_path / 'empty'), tmp_path / 'out')
    (tmp_path / 'empty' / 'config.json').write_text((whole / 'config.json').read_text())
    with pytest.raises(SystemExit, match='has no whole checkpoint'):
        command.main(str(tmp_path / 'empty'), tmp_path / 'out')
    with pytest.raises(SystemExit, match="no run 'nowhere'"):
        command.main('nowhere', tmp_path / 'out')
    assert not (tmp_path / 'out').exists()
    tyro.cli(command.main, args=[str(whole), str(tmp_path / 'out'), '--dtype', 'bfloat16'])
    assert json.loads(capsys.readouterr().out.splitlines()[-1])['run'] == 'apart-seed0'
