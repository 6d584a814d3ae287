"""Small random checkpoints, written by transformers itself, one for each family that is read."""

import pathlib
from typing import Any

import torch
import transformers

torch.set_num_threads(1)  # more only wait for each other on models this small
VOCAB = 64
SIZES: dict[str, Any] = {
    'vocab_size': VOCAB, 'hidden_size': 32, 'num_hidden_layers': 2, 'num_attention_heads': 4, 'num_key_value_heads': 2,
    'intermediate_size': 40, 'max_position_embeddings': 128, 'bos_token_id': None, 'eos_token_id': None,
    'pad_token_id': 0,
}  # fmt: skip
LLAMA3 = {
    'rope_type': 'llama3', 'factor': 8.0, 'low_freq_factor': 1.0, 'high_freq_factor': 4.0, 'rope_theta': 10_000.0,
    'original_max_position_embeddings': 64,
}  # fmt: skip
FAMILIES: dict[str, Any] = {
    'qwen3: wide heads, tied': lambda: transformers.Qwen3Config(**SIZES, head_dim=24, tie_word_embeddings=True),
    'qwen2: biases, untied': lambda: transformers.Qwen2Config(**SIZES, rope_parameters=rope(1e6)),
    'llama: llama3 scaling, wide heads': lambda: transformers.LlamaConfig(**SIZES, head_dim=24, rope_parameters=LLAMA3),
    'llama: linear scaling': lambda: transformers.LlamaConfig(
        **SIZES, rope_parameters={'rope_type': 'linear', 'factor': 4.0, 'rope_theta': 10_000.0}
    ),
    'smollm2: three heads on one, tied': lambda: transformers.LlamaConfig(
        **SIZES | {'hidden_size': 48, 'num_attention_heads': 3, 'num_key_value_heads': 1},
        tie_word_embeddings=True,
        rope_parameters=rope(1e5),
    ),
    'mistral: a window': lambda: transformers.MistralConfig(**SIZES, sliding_window=100),
}


def rope(theta: float) -> dict[str, Any]:
    return {'rope_type': 'default', 'rope_theta': theta}


def model(family: str) -> Any:
    """A model whose every weight, bias and norm is random and matters."""
    torch.manual_seed(len(family))
    made = transformers.AutoModelForCausalLM.from_config(FAMILIES[family](), dtype=torch.float32).eval()
    with torch.no_grad():
        for parameter in made.parameters():
            parameter += torch.randn_like(parameter) * (0.2 if parameter.ndim == 1 else 0.15)
    return made


def save(made: Any, folder: pathlib.Path, **how: Any) -> pathlib.Path:
    made.save_pretrained(folder, **how)
    return folder


def logits(made: Any, ids: Any, mask: Any = None) -> Any:
    with torch.no_grad():
        asked = {} if mask is None else {'attention_mask': torch.tensor(mask, dtype=torch.int64)}
        return made(torch.tensor(ids, dtype=torch.int64), **asked).logits.float().numpy()
