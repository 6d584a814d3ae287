"""GGUF files written by the format's own package, from the weights of a checkpoint that transformers wrote."""

import pathlib
from typing import Any

import gguf
import jax
import numpy as np
import pytest

from mallm.errors import WeightsError
from mallm.io import gguf as ours
from mallm.io import hf
from mallm.models import hf_map
from tests.io import checkpoints

PIECES = [*(chr(33 + i) for i in range(94)), 'Ġ', 'he', 'll', 'hell', 'hello', '<|end|>']
MERGES = ['h e', 'l l', 'he ll', 'hell o']
PLAIN, STRETCHED = 'smollm2: three heads on one, tied', 'llama: llama3 scaling, wide heads'


def interleaved(rows: np.ndarray, heads: int) -> np.ndarray:
    """As llama.cpp keeps the rows of q and k: in each head 0, half, 1, half + 1, ..."""
    size = len(rows) // heads
    order = [h * size + i + side * size // 2 for h in range(heads) for i in range(size // 2) for side in (0, 1)]
    return rows[order]


def write(path: pathlib.Path, made: Any, kind: str = 'llama', quantised: bool = False, **metadata: Any) -> pathlib.Path:
    """A GGUF file with the weights of a transformers model."""
    said, file = made.config, gguf.GGUFWriter(path, kind)
    file.add_context_length(128)
    file.add_embedding_length(said.hidden_size)
    file.add_block_count(said.num_hidden_layers)
    file.add_feed_forward_length(said.intermediate_size)
    file.add_head_count(said.num_attention_heads)
    file.add_head_count_kv(said.num_key_value_heads)
    file.add_key_length(getattr(said, 'head_dim', None) or said.hidden_size // said.num_attention_heads)
    file.add_layer_norm_rms_eps(said.rms_norm_eps)
    file.add_rope_freq_base(said.rope_parameters['rope_theta'])
    file.add_tokenizer_model('gpt2')
    file.add_tokenizer_pre(metadata.pop('pre', 'smollm'))
    file.add_token_list(PIECES)
    file.add_token_types([gguf.TokenType.NORMAL] * (len(PIECES) - 1) + [gguf.TokenType.CONTROL])
    file.add_token_merges(MERGES)
    file.add_eos_token_id(len(PIECES) - 1)
    file.add_chat_template('{% for m in messages %}{{ m.content }}<|end|>{% endfor %}')
    heads = {'attn_q': said.num_attention_heads, 'attn_k': said.num_key_value_heads}
    theirs = {hf_name: name for name, hf_name in hf_map.gguf_names(said.num_hidden_layers).items()}
    for name, tensor in {**made.state_dict(), **metadata.pop('more', {})}.items():
        if name == 'lm_head.weight' and said.tie_word_embeddings:
            continue
        values, title = np.asarray(tensor), theirs.get(name, name)
        if kind == 'llama' and (count := heads.get(title.split('.')[-2])):
            values = interleaved(values, count)
        if quantised and values.ndim == 2 and values.shape[1] % 32 == 0:
            packed = gguf.quantize(values, gguf.GGMLQuantizationType.Q8_0)
            file.add_tensor(title, packed, raw_dtype=gguf.GGMLQuantizationType.Q8_0)
        else:
            file.add_tensor(title, values)
    file.write_header_to_file()
    file.write_kv_data_to_file()
    file.write_tensors_to_file()
    file.close()
    return path


def divisors(made: Any) -> np.ndarray:
    """What llama.cpp stores of Llama 3's scaling: the plain frequencies over transformers' scaled ones."""
    scaled = made.model.rotary_emb.inv_freq.numpy()
    return (10_000.0 ** (-np.arange(len(scaled)) / len(scaled)) / scaled).astype(np.float32)


@pytest.mark.parametrize(
    'family, kind', [(PLAIN, 'llama'), ('qwen2: biases, untied', 'qwen2'), ('qwen3: wide heads, tied', 'qwen3')]
)
def test_a_file_has_the_parameters_of_the_checkpoint_whatever_order_its_kind_keeps_rotated_rows_in(
    family, kind, tmp_path
):
    """Of a llama the rows of q and k are put back where transformers has them; of others they were never moved."""
    made = checkpoints.model(family)
    arch, params = hf.load(checkpoints.save(made, tmp_path / 'm'))
    same, back = hf.load(write(tmp_path / 'm.gguf', made, kind))
    assert same == arch
    for (path, leaf), other in zip(jax.tree.leaves_with_path(back), jax.tree.leaves(params), strict=True):
        np.testing.assert_array_equal(leaf, other, err_msg=jax.tree_util.keystr(path))


def test_quantised_blocks_are_read_through_the_formats_own_package(tmp_path):
    made = checkpoints.model(STRETCHED)
    arch, params = hf.load(checkpoints.save(made, tmp_path / 'm'))
    more = {'rope_freqs.weight': divisors(made)}
    path = write(tmp_path / 'm.gguf', made, quantised=True, more=more)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ours, 'LLAMA3_BAND', (1.0, 4.0, 64))
        same, back = hf.load(path)
    assert same.rope_band == arch.rope_band and same.rope_factor == pytest.approx(8.0, rel=1e-5)
    near = np.abs(np.asarray(back['blocks']['q']) - np.asarray(params['blocks']['q'])).max()
    assert 0 < near < 0.01
    with pytest.raises(WeightsError, match=r'rope_freqs.weight is not the scaling of Llama 3'):
        hf.load(path)  # 8192 tokens is the band of the real ones


def test_the_tokenizer_is_built_from_the_file(tmp_path):
    path = write(tmp_path / 'm.gguf', checkpoints.model(PLAIN))
    made = hf.load_tokenizer(path)
    hello, space, end = PIECES.index('hello'), PIECES.index('Ġ'), PIECES.index('<|end|>')
    assert made.encode('hello hell<|end|>') == [hello, space, PIECES.index('hell'), end]
    assert made.decode([hello, space, hello]) == 'hello hello' and made.eos_token_id == end
    assert made.encode('12') == [PIECES.index('1'), PIECES.index('2')]
    chat = made.apply_chat_template([{'role': 'user', 'content': 'hello'}], return_dict=False)
    assert chat == [hello, end]
    with pytest.raises(WeightsError, match='has 100 ids, the model 64: every id needs a row'):
        hf.load_tokenizer(path, hf.load(path)[0])


@pytest.mark.parametrize(
    'how, reason',
    [
        ({'kind': 'gemma'}, "architecture 'gemma' is not one of"),
        ({'more': {'blk.0.ffn_gate_exps.weight': np.zeros((2, 2), np.float32)}}, 'tensors that a llama has not'),
        (
            {'more': {'blk.1.attn_q.bias': np.zeros(48, np.float32)}},
            r'surplus model.*.q_proj.bias \[48\]',
        ),
    ],
)
def test_a_file_that_is_not_one_of_ours_is_refused(how, reason, tmp_path):
    with pytest.raises(WeightsError, match=reason):
        hf.load(write(tmp_path / 'm.gguf', checkpoints.model(PLAIN), **how))


def test_a_half_downloaded_file_and_an_unknown_tokenizer_are_refused(tmp_path):
    path = write(tmp_path / 'm.gguf', checkpoints.model(PLAIN), pre='deepseek')
    with pytest.raises(WeightsError, match="'gpt2' cut by 'deepseek' is not read"):
        hf.load_tokenizer(path)
    path.write_bytes(path.read_bytes()[:-5000])
    with pytest.raises(WeightsError, match='half-downloaded'):
        hf.load(path)
