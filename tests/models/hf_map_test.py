"""What a config.json means here, and that nothing in it is passed over."""

import dataclasses

import pytest

from mallm.errors import WeightsError
from mallm.models import hf_map
from mallm.models.config import Architecture

SAID = {
    'model_type': 'llama',
    'vocab_size': 32,
    'hidden_size': 16,
    'num_hidden_layers': 2,
    'num_attention_heads': 4,
    'intermediate_size': 24,
}
PLAIN = Architecture(32, width=16, layers=2, heads=4, kv_heads=4, head_dim=4, ffn=24, qk_norm=False, tied=False)
LLAMA3 = {'factor': 8.0, 'low_freq_factor': 1.0, 'high_freq_factor': 4.0, 'original_max_position_embeddings': 8192}


@pytest.mark.parametrize(
    'said, change',
    [
        ({}, {}),
        (
            {'head_dim': 6, 'num_key_value_heads': 2, 'rms_norm_eps': 1e-5},
            {'head_dim': 6, 'kv_heads': 2, 'norm_eps': 1e-5},
        ),
        ({'model_type': 'qwen3', 'tie_word_embeddings': True}, {'qk_norm': True, 'tied': True}),
        ({'model_type': 'qwen2', 'use_sliding_window': False, 'sliding_window': 4096}, {'qkv_bias': True}),
        ({'model_type': 'qwen2', 'use_sliding_window': True, 'sliding_window': 64}, {'qkv_bias': True, 'context': 64}),
        ({'model_type': 'mistral', 'max_position_embeddings': 32768}, {'context': 4096}),
        ({'model_type': 'mistral', 'sliding_window': None, 'max_position_embeddings': 32768}, {'context': 32768}),
        ({'rope_theta': 5e5, 'rope_scaling': {'type': 'linear', 'factor': 2}}, {'rope_theta': 5e5, 'rope_factor': 2.0}),
        (
            {'rope_parameters': {'rope_type': 'llama3', 'rope_theta': 5e5, **LLAMA3}},
            {'rope_theta': 5e5, 'rope_factor': 8.0, 'rope_band': (1.0, 4.0, 8192)},
        ),
    ],
)
def test_fields_of_either_version_become_ours(said, change):
    assert hf_map.from_json(SAID | said) == dataclasses.replace(PLAIN, **change)


@pytest.mark.parametrize(
    'said, reason',
    [
        ({'model_type': 'gemma3'}, "model_type 'gemma3'"),
        ({'vocab_size': None}, r"lacks \['vocab_size'\]"),
        ({'hidden_act': 'gelu'}, "hidden_act='gelu'"),
        ({'attention_bias': True}, 'attention_bias=True'),
        ({'mlp_bias': True}, 'mlp_bias=True'),
        ({'rope_interleaved': True}, 'rope_interleaved=True'),
        ({'partial_rotary_factor': 0.5}, 'partial_rotary_factor=0.5'),
        ({'quantization_config': {'bits': 4}}, 'quantization_config='),
        ({'layer_types': ['full_attention', 'linear_attention']}, 'layer_types='),
        ({'logit_scale': 0.5, 'residual_scale': 2}, 'logit_scale=0.5; residual_scale=2'),
        ({'rope_scaling': {'rope_type': 'yarn', 'factor': 4.0}}, "'yarn'.*only .'default', 'linear', 'llama3'"),
        ({'rope_scaling': {'rope_type': 'linear'}}, "'factor'.*missing"),
        ({'rope_scaling': {'rope_type': 'linear', 'factor': 2, 'attention_factor': 1.2}}, "'attention_factor'"),
        ({'num_key_value_heads': 3}, 'kv_heads must divide heads'),
    ],
)
def test_a_field_that_asks_for_other_maths_is_refused_by_name(said, reason):
    with pytest.raises(WeightsError, match=reason):
        hf_map.from_json(SAID | said)


@pytest.mark.parametrize(
    'change',
    [{}, {'qk_norm': True, 'context': 99}, {'qkv_bias': True}, {'rope_factor': 2.0, 'rope_theta': 7.0},
     {'rope_factor': 8.0, 'rope_band': (1.0, 4.0, 8192), 'tied': True}],
)  # fmt: skip
def test_an_architecture_comes_back_from_its_own_settings(change):
    arch = dataclasses.replace(PLAIN, **change)
    assert hf_map.from_json(hf_map.to_json(arch)) == arch


def test_an_architecture_that_no_peer_has_is_refused():
    with pytest.raises(WeightsError, match='qk_norm=True, qkv_bias=True: no Hugging Face model_type'):
        hf_map.to_json(dataclasses.replace(PLAIN, qk_norm=True, qkv_bias=True))


def test_names_are_one_to_one():
    for column in ('hf', 'gguf'):
        names = [getattr(row, column) for row in (hf_map.TOP | hf_map.BLOCK).values()]
        assert len(set(names)) == len(names) == 17
