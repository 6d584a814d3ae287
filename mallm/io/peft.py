"""LoRA adapters out and in, as the `peft` library writes and reads them; that library is not needed for it."""

import os
import pathlib
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from mallm.errors import WeightsError
from mallm.io import files, hf, safetensors
from mallm.models import hf_map

CONFIG, WEIGHTS = 'adapter_config.json', 'adapter_model.safetensors'
MUST_BE: dict[str, Any] = {'peft_type': 'LORA', 'bias': 'none'}
PLAIN_STARTS = (None, True, False, 'gaussian', 'orthogonal', 'eva')
"""Ways to start an adapter that leave its base as it is; others (PiSSA, OLoRA) subtract from it first."""
INERT = {
    'auto_mapping', 'arrow_config', 'base_model_name_or_path', 'corda_config', 'eva_config', 'inference_mode',
    'init_lora_weights', 'loftq_config', 'lora_alpha', 'lora_dropout', 'lora_ga_config', 'megatron_core',
    'peft_version', 'qalora_group_size', 'r', 'revision', 'runtime_config', 'target_modules', 'task_type',
    'use_rslora', 'ensure_weight_tying', *MUST_BE,
}  # fmt: skip
"""Fields of adapter_config.json that are read or change no result. Any other must be absent, null, false or empty."""


class AdapterFacts(NamedTuple):
    """What adapter_config.json says: the product is scaled by alpha / rank, or alpha / sqrt(rank) with `rs`."""

    rank: int
    alpha: float
    rs: bool
    targets: tuple[str, ...]


def export_adapter(
    folder: str | os.PathLike, adapter: Any, *, alpha: float, rs: bool, base: str, everywhere: bool = False
) -> None:
    """Writes an adapter {'blocks': {target: {'a': [L, in, r], 'b': [L, r, out]}}} as PEFT does, in float32.

    `base` is what PEFT will look up as the base model: a hub id or a folder. The rest is as in `hf.export`.
    """
    targets = sorted(adapter['blocks'])
    said = {
        'peft_type': 'LORA',
        'task_type': 'CAUSAL_LM',
        'base_model_name_or_path': base,
        'r': adapter['blocks'][targets[0]]['a'].shape[2],
        'lora_alpha': int(alpha) if float(alpha).is_integer() else alpha,
        'lora_dropout': 0.0,
        'use_rslora': rs,
        'bias': 'none',
        'target_modules': [hf_map.module_of(name).rpartition('.')[2] for name in targets],
        'inference_mode': True,
    }

    def write(part: pathlib.Path) -> None:
        hf.write_tensors(part / WEIGHTS, hf_map.adapter_places(adapter), adapter, jnp.float32)
        files.write_json(part / CONFIG, said)

    hf.whole_folder(pathlib.Path(folder), write, everywhere=everywhere)


def load_adapter(source: str | os.PathLike, base: Any) -> tuple[AdapterFacts, Any]:
    """A PEFT LoRA adapter for these base parameters, as float32 numpy arrays in the shape `export_adapter` takes.

    Raises:
      WeightsError: there is none, it does more than plain LoRA, or it was made for another base.
    """
    folder = hf.find(source)
    said = hf.read_settings(folder, CONFIG)
    faults = [f'{name}={said.get(name)!r}' for name, only in MUST_BE.items() if said.get(name) != only]
    faults += [f'{name}={value!r}' for name, value in said.items() if name not in INERT and value]
    if said.get('init_lora_weights') not in PLAIN_STARTS:
        faults.append(f'init_lora_weights={said["init_lora_weights"]!r}')
    if faults or not isinstance(said.get('r'), int):
        raise WeightsError(
            f'{folder / CONFIG} asks for more than plain LoRA of one rank: {"; ".join(faults)}, '
            f'r={said.get("r")}; merge that adapter into its base with peft, and load the result'
        )
    stored = safetensors.read_file(folder / WEIGHTS)
    blocks, rank = base['blocks'], said['r']
    targets = tuple(name for name in blocks if any(f'.{hf_map.module_of(name)}.lora_' in tensor for tensor in stored))
    shapes = {
        name: {
            'a': jax.ShapeDtypeStruct((layers, inner, rank), jnp.float32),
            'b': jax.ShapeDtypeStruct((layers, rank, outer), jnp.float32),
        }
        for name in targets
        for layers, inner, outer in [blocks[name].shape]
    }
    places = hf_map.adapter_places({'blocks': shapes})
    hf.refuse_mismatch(f'the adapter {folder} (is it for another base?)', places, stored)
    adapter = {'blocks': jax.tree.map(lambda leaf: np.zeros(leaf.shape, leaf.dtype), shapes)}
    for name, where in places.items():
        _, target, part = where.leaf
        adapter['blocks'][target][part][where.layer] = stored[name].read().T
    return AdapterFacts(rank, float(said['lora_alpha']), bool(said.get('use_rslora', False)), targets), adapter
