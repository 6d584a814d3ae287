"""What our parameters and sizes are called in Hugging Face checkpoints, PEFT adapters and GGUF files.

One table of names; every list of tensors, in either direction, follows from it and from the shapes of a parameter
tree. Our matrices are [in, out] and stacked over layers; stored ones are [out, in], one tensor a layer.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from mallm.errors import WeightsError
from mallm.models.config import Architecture


class Row(NamedTuple):
    """Names of one tensor; `flipped`: the stored matrix is the transpose of ours."""

    hf: str
    gguf: str
    flipped: bool = True


TOP = {
    'embedding': Row('model.embed_tokens.weight', 'token_embd.weight', flipped=False),
    'final_norm': Row('model.norm.weight', 'output_norm.weight'),
    'head': Row('lm_head.weight', 'output.weight'),
}
BLOCK = {
    'attention_norm': Row('input_layernorm.weight', 'attn_norm.weight'),
    'q': Row('self_attn.q_proj.weight', 'attn_q.weight'),
    'k': Row('self_attn.k_proj.weight', 'attn_k.weight'),
    'v': Row('self_attn.v_proj.weight', 'attn_v.weight'),
    'q_bias': Row('self_attn.q_proj.bias', 'attn_q.bias'),
    'k_bias': Row('self_attn.k_proj.bias', 'attn_k.bias'),
    'v_bias': Row('self_attn.v_proj.bias', 'attn_v.bias'),
    'q_norm': Row('self_attn.q_norm.weight', 'attn_q_norm.weight'),
    'k_norm': Row('self_attn.k_norm.weight', 'attn_k_norm.weight'),
    'o': Row('self_attn.o_proj.weight', 'attn_output.weight'),
    'ffn_norm': Row('post_attention_layernorm.weight', 'ffn_norm.weight'),
    'gate': Row('mlp.gate_proj.weight', 'ffn_gate.weight'),
    'up': Row('mlp.up_proj.weight', 'ffn_up.weight'),
    'down': Row('mlp.down_proj.weight', 'ffn_down.weight'),
}


class Place(NamedTuple):
    """Where a stored tensor belongs: path of our leaf, layer in it (None: all of it), and its stored shape."""

    leaf: tuple[str, ...]
    layer: int | None
    flipped: bool
    shape: tuple[int, ...]


def places(shapes: Mapping[str, Any]) -> dict[str, Place]:
    """Hugging Face name -> place of every tensor of a parameter tree, whose leaves need only a shape."""
    found = {
        row.hf: Place((name,), None, row.flipped, stored(shapes[name].shape, row.flipped))
        for name, row in TOP.items()
        if shapes.get(name) is not None
    }
    blocks = shapes['blocks']
    for layer in range(blocks['q'].shape[0]):
        for name, row in BLOCK.items():
            if blocks.get(name) is not None:
                shape = stored(blocks[name].shape[1:], row.flipped)
                found[f'model.layers.{layer}.{row.hf}'] = Place(('blocks', name), layer, row.flipped, shape)
    return found


def adapter_places(shapes: Mapping[str, Any]) -> dict[str, Place]:
    """PEFT name -> place of every tensor of an adapter {'blocks': {target: {'a': [L, in, r], 'b': [L, r, out]}}}."""
    parts = {'a': 'lora_A.weight', 'b': 'lora_B.weight'}
    return {
        f'base_model.model.model.layers.{layer}.{module_of(name)}.{parts[part]}': Place(
            ('blocks', name, part), layer, True, stored(leaf.shape[1:], True)
        )
        for name, pair in shapes['blocks'].items()
        for part, leaf in pair.items()
        for layer in range(leaf.shape[0])
    }


def module_of(name: str) -> str:
    """'q' -> 'self_attn.q_proj', the module of one projection."""
    return BLOCK[name].hf.removesuffix('.weight')


def gguf_names(layers: int) -> dict[str, str]:
    """GGUF name -> Hugging Face name of every tensor there can be."""
    top = {row.gguf: row.hf for row in TOP.values()}
    return top | {
        f'blk.{layer}.{row.gguf}': f'model.layers.{layer}.{row.hf}' for layer in range(layers) for row in BLOCK.values()
    }


def stored(shape: Sequence[int], flipped: bool) -> tuple[int, ...]:
    return tuple(reversed(shape)) if flipped else tuple(shape)


# config.json


class Family(NamedTuple):
    """What a model_type implies beyond its config.json. `windowed`: has a sliding window where the file is silent."""

    model: str
    qk_norm: bool = False
    qkv_bias: bool = False
    windowed: bool = False


FAMILIES = {
    'llama': Family('LlamaForCausalLM'),
    'qwen2': Family('Qwen2ForCausalLM', qkv_bias=True),
    'qwen3': Family('Qwen3ForCausalLM', qk_norm=True),
    'mistral': Family('MistralForCausalLM', windowed=True),
}
"""model_type -> family. The first with the right maths is what an architecture is exported as."""

SIZES = {
    'vocab': 'vocab_size',
    'width': 'hidden_size',
    'layers': 'num_hidden_layers',
    'heads': 'num_attention_heads',
    'ffn': 'intermediate_size',
}
READ = {
    *SIZES.values(), 'model_type', 'num_key_value_heads', 'head_dim', 'rms_norm_eps', 'tie_word_embeddings',
    'rope_theta', 'rope_scaling', 'rope_parameters', 'max_position_embeddings', 'sliding_window', 'use_sliding_window',
}  # fmt: skip
INERT = {
    'architectures', 'attention_dropout', 'bos_token_id', 'chunk_size_feed_forward', 'dtype', 'eos_token_id',
    'hidden_dropout', 'id2label', 'initializer_range', 'is_llama_config', 'label2id', 'max_window_layers',
    'pad_token_id', 'pretraining_tp', 'problem_type', 'torch_dtype', 'transformers.js_config', 'transformers_version',
    'unsloth_fixed', 'unsloth_version', 'use_cache',
}  # fmt: skip
"""Fields that change nothing in the forward pass. A field that is in no list must be absent, null or false."""
MUST_BE: dict[str, tuple[Any, ...]] = {
    'hidden_act': ('silu', 'swish'),
    'partial_rotary_factor': (None, 1.0),
    'output_attentions': (False, True),
    'return_dict': (False, True),
}
ROPES: dict[str, Callable[[Mapping[str, Any]], dict[str, Any]]] = {
    'default': lambda rope: {},
    'linear': lambda rope: {'rope_factor': float(rope['factor'])},
    'llama3': lambda rope: {
        'rope_factor': float(rope['factor']),
        'rope_band': (
            float(rope['low_freq_factor']),
            float(rope['high_freq_factor']),
            int(rope['original_max_position_embeddings']),
        ),
    },
}
"""rope_type -> how its fields become ours."""
ROPE_FIELDS = {
    'rope_type', 'type', 'rope_theta', 'factor', 'low_freq_factor', 'high_freq_factor',
    'original_max_position_embeddings', 'partial_rotary_factor',
}  # fmt: skip


def from_json(said: Mapping[str, Any]) -> Architecture:
    """The architecture that a config.json describes, in the form of transformers 4 or 5.

    Raises:
      WeightsError: the model_type is unknown, or a field asks for maths that is not here.
    """
    family = FAMILIES.get(said.get('model_type', ''))
    if family is None:
        raise WeightsError(
            f'model_type {said.get("model_type")!r}: this forward pass is that of {sorted(FAMILIES)}; use one of those'
        )
    missing = [theirs for theirs in SIZES.values() if said.get(theirs) is None]
    if missing:
        raise WeightsError(f'config.json lacks {missing}: they give the shape of the network; restore the file')
    refuse_strange(said)
    width, heads = said['hidden_size'], said['num_attention_heads']
    try:
        return Architecture(
            **{ours: said[theirs] for ours, theirs in SIZES.items()},
            **rope_from(said),
            kv_heads=said.get('num_key_value_heads') or heads,
            head_dim=said.get('head_dim') or width // heads,
            norm_eps=said.get('rms_norm_eps', 1e-6),
            qk_norm=family.qk_norm,
            qkv_bias=family.qkv_bias,
            tied=bool(said.get('tie_word_embeddings', False)),
            context=context_of(said, family),
        )
    except ValueError as cause:
        raise WeightsError(f'config.json describes no network that can be: {cause}') from cause


def refuse_strange(said: Mapping[str, Any]) -> None:
    """Raises WeightsError naming every field whose effect is not in this forward pass."""
    faults = [
        f'{name}={said[name]!r} (must be one of {allowed})'
        for name, allowed in MUST_BE.items()
        if said.get(name, allowed[0]) not in allowed
    ]
    kinds = set(said.get('layer_types') or ())
    if kinds - {'full_attention', 'sliding_attention'}:
        faults.append(f'layer_types={sorted(kinds)}')
    known = READ | INERT | MUST_BE.keys() | {'layer_types'}
    faults += [
        f'{name}={value!r}'
        for name, value in said.items()
        if name not in known and not name.startswith('_') and value is not None and value is not False
    ]
    if faults:
        raise WeightsError(
            f'config.json asks for what this forward pass does not do: {"; ".join(faults)}. Use another checkpoint, '
            'or take the field out if it changes nothing'
        )


def rope_from(said: Mapping[str, Any]) -> dict[str, Any]:
    rope = said.get('rope_parameters') or said.get('rope_scaling') or {}
    kind = rope.get('rope_type') or rope.get('type') or 'default'
    strange = rope.keys() - ROPE_FIELDS
    if kind not in ROPES or strange or rope.get('partial_rotary_factor', 1.0) != 1.0:
        raise WeightsError(
            f'rope scaling {dict(rope)}: only {sorted(ROPES)} with fields {sorted(ROPE_FIELDS)} are here, over the '
            'whole head; take the scaling out where contexts are short enough for none'
        )
    try:
        scaling = ROPES[kind](rope)
    except (KeyError, TypeError, ValueError) as cause:
        raise WeightsError(
            f'rope scaling {dict(rope)}: {cause!r} is missing or no number; restore config.json'
        ) from cause
    return {'rope_theta': float(rope.get('rope_theta') or said.get('rope_theta') or 10_000.0), **scaling}


def context_of(said: Mapping[str, Any], family: Family) -> int | None:
    """The trained positions, or the sliding window where it is shorter: within it, it is full attention."""
    windowed = said.get('use_sliding_window', family.windowed)
    window = said.get('sliding_window', 4096 if family.windowed else None)
    limits = [said.get('max_position_embeddings'), window if windowed else None]
    return min((limit for limit in limits if limit), default=None)


def to_json(arch: Architecture) -> dict[str, Any]:
    """The config.json of an architecture, in the form that transformers 4 and 5 read; Mistral's is a Llama again.

    Raises:
      WeightsError: no model_type has this architecture's maths.
    """
    kinds = [kind for kind, row in FAMILIES.items() if (row.qk_norm, row.qkv_bias) == (arch.qk_norm, arch.qkv_bias)]
    if not kinds:
        raise WeightsError(
            f'qk_norm={arch.qk_norm}, qkv_bias={arch.qkv_bias}: no Hugging Face model_type of {sorted(FAMILIES)} has '
            'this pair; export needs qk_norm alone (qwen3), qkv_bias alone (qwen2) or neither (llama)'
        )
    said = {
        'architectures': [FAMILIES[kinds[0]].model],
        'model_type': kinds[0],
        **{theirs: vars(arch)[ours] for ours, theirs in SIZES.items()},
        'num_key_value_heads': arch.kv_heads,
        'head_dim': arch.head_dim,
        'hidden_act': 'silu',
        'rms_norm_eps': arch.norm_eps,
        'tie_word_embeddings': arch.tied,
        'rope_theta': arch.rope_theta,
        'rope_scaling': rope_to(arch),
        'use_sliding_window': False,
    }
    return said if arch.context is None else said | {'max_position_embeddings': arch.context}


def rope_to(arch: Architecture) -> dict[str, Any] | None:
    if arch.rope_band is not None:
        low, high, tokens = arch.rope_band
        return {
            'rope_type': 'llama3',
            'factor': arch.rope_factor,
            'low_freq_factor': low,
            'high_freq_factor': high,
            'original_max_position_embeddings': tokens,
        }
    return None if arch.rope_factor == 1.0 else {'rope_type': 'linear', 'factor': arch.rope_factor}
