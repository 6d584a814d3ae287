"""GGUF files: llama.cpp's single-file form of a model, weights, sizes and tokenizer in one.

The values are dequantised by the `gguf` package. Query and key rows of llama-type files are stored with the two halves
of each head interleaved, for another way of rotating; they are put back. Source: the format's description in
llama.cpp, github.com/ggml-org/ggml/blob/master/docs/gguf.md.
"""

import functools
import pathlib
from collections.abc import Mapping
from typing import Any

import gguf
import numpy as np
import tokenizers
import transformers
from tokenizers import decoders, models, normalizers, pre_tokenizers, processors

from mallm.errors import WeightsError
from mallm.io.safetensors import Stored
from mallm.models import hf_map
from mallm.models.config import Architecture
from mallm.models.transformer import frequencies

FIELDS = {
    'hidden_size': 'embedding_length',
    'num_hidden_layers': 'block_count',
    'intermediate_size': 'feed_forward_length',
    'num_attention_heads': 'attention.head_count',
    'num_key_value_heads': 'attention.head_count_kv',
    'head_dim': 'attention.key_length',
    'rms_norm_eps': 'attention.layer_norm_rms_epsilon',
    'rope_theta': 'rope.freq_base',
    'max_position_embeddings': 'context_length',
}
"""config.json's fields and what they are called in the metadata, after the architecture's name."""
STRETCH = 'rope_freqs.weight'
"""Llama 3's rotary scaling, as one divisor a frequency; llama.cpp derives it from this band."""
LLAMA3_BAND = (1.0, 4.0, 8192)

LETTERS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|"
MARKS = r'| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+'
SPLITS: dict[str, tuple[tokenizers.pre_tokenizers.PreTokenizer, ...]] = {
    'smollm': (pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(False, use_regex=True)),
    'gpt-2': (pre_tokenizers.ByteLevel(False, use_regex=True),),
    'qwen2': (
        pre_tokenizers.Split(tokenizers.Regex(LETTERS + r'\p{N}' + MARKS), 'isolated'),
        pre_tokenizers.ByteLevel(False, use_regex=False),
    ),
    'llama-bpe': (
        pre_tokenizers.Split(tokenizers.Regex(LETTERS + r'\p{N}{1,3}' + MARKS), 'isolated'),
        pre_tokenizers.ByteLevel(False, use_regex=False),
    ),
}
"""tokenizer.ggml.pre -> how text is cut before the merges."""


def read(path: pathlib.Path) -> tuple[Architecture, dict[str, Stored]]:
    """The architecture and the tensors of a file, under their Hugging Face names; values are got when asked for.

    Raises:
      WeightsError: the file is cut off, its architecture is not one of ours, or a tensor has no name in ours.
    """
    reader = _reader(path)
    said = _metadata(reader)
    kind = said.get('general.architecture')
    if kind not in hf_map.FAMILIES:
        raise WeightsError(f'{path}: architecture {kind!r} is not one of {sorted(hf_map.FAMILIES)}; use another model')
    tensors = {tensor.name: tensor for tensor in reader.tensors}
    if hf_map.TOP['embedding'].gguf not in tensors:
        raise WeightsError(f'{path} has no {hf_map.TOP["embedding"].gguf}: not a whole model; use another file')
    config: dict[str, Any] = {
        theirs: _plain(said[f'{kind}.{field}']) for theirs, field in FIELDS.items() if f'{kind}.{field}' in said
    }
    stretch = tensors.pop(STRETCH, None)
    config |= {
        'model_type': kind,
        'vocab_size': int(tensors[hf_map.TOP['embedding'].gguf].shape[1]),
        'tie_word_embeddings': hf_map.TOP['head'].gguf not in tensors,
        'rope_scaling': _rope(path, said, kind) if stretch is None else _llama3(stretch.data),
    }
    arch = hf_map.from_json(config)
    if stretch is not None:
        _refuse_other_band(path, arch, stretch.data)
    names = hf_map.gguf_names(arch.layers)
    strange = [name for name in tensors if name not in names]
    if strange:
        raise WeightsError(f'{path} has tensors that a {kind} has not: {strange[:9]}; use another model')
    heads = {hf_map.BLOCK['q'].gguf: arch.heads, hf_map.BLOCK['k'].gguf: arch.kv_heads} if kind == 'llama' else {}
    return arch, {
        names[name]: Stored(
            tuple(int(size) for size in reversed(tensor.shape)),
            functools.partial(_values, tensor, heads.get(name.split('.', 2)[-1])),
        )
        for name, tensor in tensors.items()
    }


def tokenizer(path: pathlib.Path) -> transformers.PreTrainedTokenizerFast:
    """The file's byte-level BPE tokenizer with its chat template.

    Raises:
      WeightsError: the file's tokenizer is of another kind.
    """
    said = _metadata(_reader(path))
    ggml = {key.removeprefix('tokenizer.ggml.'): value for key, value in said.items() if 'tokenizer.ggml.' in key}
    if ggml.get('model') != 'gpt2' or ggml.get('pre') not in SPLITS:
        raise WeightsError(
            f'{path}: tokenizer {ggml.get("model")!r} cut by {ggml.get("pre")!r} is not read, only byte-level BPE cut '
            f'by {sorted(SPLITS)}; load the tokenizer from the original folder'
        )
    pieces = ggml['tokens']
    merges = [tuple(merge.split(' ')) for merge in ggml['merges']]
    vocabulary = {piece: at for at, piece in enumerate(pieces)}
    inner = tokenizers.Tokenizer(models.BPE(vocabulary, merges, ignore_merges=ggml['pre'] == 'llama-bpe'))
    inner.normalizer = normalizers.NFC() if ggml['pre'] == 'qwen2' else None
    inner.pre_tokenizer = pre_tokenizers.Sequence(list(SPLITS[ggml['pre']]))
    inner.decoder = decoders.ByteLevel()
    control, written = gguf.TokenType.CONTROL, gguf.TokenType.USER_DEFINED
    inner.add_tokens([piece for piece, kind in zip(pieces, ggml['token_type'], strict=True) if kind == written])
    inner.add_special_tokens([piece for piece, kind in zip(pieces, ggml['token_type'], strict=True) if kind == control])
    special = {
        f'{name}_token': pieces[ggml[f'{theirs}_token_id']]
        for name, theirs in {'bos': 'bos', 'eos': 'eos', 'unk': 'unknown', 'pad': 'padding'}.items()
        if f'{theirs}_token_id' in ggml
    }
    if ggml.get('add_bos_token') and 'bos_token' in special:
        bos = special['bos_token']
        inner.post_processor = processors.TemplateProcessing(
            single=f'{bos} $A', pair=f'{bos} $A {bos} $B', special_tokens=[(bos, vocabulary[bos])]
        )
    made = transformers.PreTrainedTokenizerFast(tokenizer_object=inner, **special)
    made.chat_template = said.get('tokenizer.chat_template')
    return made


def _reader(path: pathlib.Path) -> Any:
    try:
        return gguf.GGUFReader(path)
    except (ValueError, IndexError, KeyError, OSError) as cause:
        raise WeightsError(f'{path} is no GGUF file, or a half-downloaded one ({cause}); download it again') from cause


def _metadata(reader: Any) -> dict[str, Any]:
    return {name: field.contents() for name, field in reader.fields.items()}


def _plain(number: int | float) -> int | float:
    """A float32 as the decimal it was written as: 1e-6, and not 9.99999997e-7."""
    return float(str(np.float32(number))) if isinstance(number, float) else number


def _values(tensor: Any, heads: int | None) -> np.ndarray:
    """Float32 values [out, in]; rows of rotated projections have the halves of each head side by side again."""
    values = gguf.dequantize(tensor.data, tensor.tensor_type)
    values = np.asarray(values, np.float32).reshape(tuple(int(size) for size in reversed(tensor.shape)))
    if heads is None:
        return values
    return values.reshape(heads, values.shape[0] // heads // 2, 2, -1).swapaxes(1, 2).reshape(values.shape)


def _rope(path: pathlib.Path, said: Mapping[str, Any], kind: str) -> dict[str, Any] | None:
    scaling = {key.rpartition('.')[2]: value for key, value in said.items() if key.startswith(f'{kind}.rope.scaling.')}
    if scaling.get('type', 'none') == 'none':
        return None
    return {'rope_type': scaling['type'], 'factor': scaling.get('factor')}


def _llama3(divisors: np.ndarray) -> dict[str, Any]:
    low, high, tokens = LLAMA3_BAND
    return {
        'rope_type': 'llama3',
        'factor': float(divisors.max()),
        'low_freq_factor': low,
        'high_freq_factor': high,
        'original_max_position_embeddings': tokens,
    }


def _refuse_other_band(path: pathlib.Path, arch: Architecture, divisors: np.ndarray) -> None:
    """The file has only the divisors: raises WeightsError where they are not what Llama 3's band gives."""
    half = arch.head_dim // 2
    ours = frequencies(half, arch.rope_theta) / frequencies(half, arch.rope_theta, arch.rope_factor, arch.rope_band)
    if divisors.shape != ours.shape or not np.allclose(divisors, ours, rtol=1e-3):
        raise WeightsError(
            f'{path}: {STRETCH} is not the scaling of Llama 3 ({LLAMA3_BAND}, factor {arch.rope_factor}); load the '
            'original folder, whose config.json says what it is'
        )
