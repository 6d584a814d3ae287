"""The safetensors format, read and written one tensor at a time, so that no file is ever whole in memory.

Eight bytes with the length of a JSON header, the header (name -> dtype, shape, byte range), then the bytes.
Source: the format's own description, github.com/huggingface/safetensors.
"""

import json
import math
import pathlib
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np

from mallm.errors import WeightsError

DTYPES: Mapping[str, np.dtype] = {
    'F32': np.dtype(np.float32),
    'F16': np.dtype(np.float16),
    'BF16': np.dtype(jnp.bfloat16),
}
ONE, INDEX = 'model.safetensors', 'model.safetensors.index.json'


class Stored(NamedTuple):
    """A tensor on disk: what it is, and how its values are got, when they are wanted."""

    shape: tuple[int, ...]
    read: Callable[[], np.ndarray]


def read_file(path: pathlib.Path) -> dict[str, Stored]:
    """The tensors of one file, in the order of their bytes; only the header is read.

    Raises:
      WeightsError: the file is absent, cut off, or not of this format, or has a dtype that is no plain float.
    """
    if not path.is_file():
        raise WeightsError(f'{path}: there is no such file; give a folder that has it, or download it again')
    size = path.stat().st_size
    with path.open('rb') as file:
        start = 8 + int.from_bytes(file.read(8), 'little')
        raw = file.read(start - 8) if start <= size else b''
    try:
        header = json.loads(raw)
        header.pop('__metadata__', None)
        end = start + max((row['data_offsets'][1] for row in header.values()), default=0)
        rows = sorted(header.items(), key=lambda item: item[1]['data_offsets'][0])
        stored = {name: _stored(path, name, start, row) for name, row in rows}
    except (ValueError, KeyError, TypeError, AttributeError, IndexError) as cause:
        raise WeightsError(
            f'{path} ({size} bytes): its header is cut off or is not safetensors; the file is half-downloaded, or a '
            'placeholder of Git LFS; download it again'
        ) from cause
    if end != size:
        raise WeightsError(f'{path} has {size} bytes, its header says {end}: a half-downloaded file; download it again')
    return stored


def read_folder(folder: pathlib.Path) -> dict[str, Stored]:
    """The tensors of a checkpoint, whole or in shards with an index.

    Raises:
      WeightsError: there is neither; or a shard is absent or cut off, or lacks a tensor that the index puts there.
    """
    if (folder / ONE).is_file():
        return read_file(folder / ONE)
    if not (folder / INDEX).is_file():
        raise WeightsError(
            f'{folder} has neither {ONE} nor {INDEX}; weights in other formats (.bin, .pt) are not read: save them as '
            'safetensors, with save_pretrained'
        )
    try:
        shard_of = json.loads((folder / INDEX).read_text())['weight_map']
        names = sorted(set(shard_of.values()))
    except (ValueError, KeyError, TypeError, AttributeError) as cause:
        raise WeightsError(f'{folder / INDEX}: not the index of a checkpoint ({cause!r}); download it again') from cause
    absent = [name for name in names if not (folder / name).is_file()]
    if absent:
        raise WeightsError(f'{folder / INDEX} names shards that are not there: {absent}; download them')
    found: dict[str, Stored] = {}
    for name in names:
        inside = read_file(folder / name)
        lost = [tensor for tensor, shard in shard_of.items() if shard == name and tensor not in inside]
        if lost or found.keys() & inside.keys():
            raise WeightsError(
                f'{folder / name} and {INDEX} disagree: not in the shard {lost[:9]}, in two shards '
                f'{sorted(found.keys() & inside.keys())[:9]}; download both again'
            )
        found |= inside
    return found


def write_file(path: pathlib.Path, specs: Mapping[str, tuple[tuple[int, ...], np.dtype]], fetch: Callable) -> None:
    """Writes tensors of these shapes and dtypes; `fetch(name)` gives the values of one when its turn has come."""
    names = {dtype: name for name, dtype in DTYPES.items()}
    header: dict[str, Any] = {'__metadata__': {'format': 'pt'}}
    end = 0
    for name, (shape, dtype) in specs.items():
        begin, end = end, end + math.prod(shape) * dtype.itemsize
        header[name] = {'dtype': names[dtype], 'shape': list(shape), 'data_offsets': [begin, end]}
    raw = json.dumps(header).encode()
    raw += b' ' * (-len(raw) % 8)
    with path.open('wb') as file:
        file.write(len(raw).to_bytes(8, 'little') + raw)
        for name in specs:
            file.write(np.ascontiguousarray(fetch(name)).reshape(-1).view(np.uint8).data)


def _stored(path: pathlib.Path, name: str, start: int, row: Mapping[str, Any]) -> Stored:
    shape, (begin, end) = tuple(row['shape']), row['data_offsets']
    dtype = DTYPES.get(row['dtype'])
    if dtype is None:
        raise WeightsError(
            f'{path}: {name} is {row["dtype"]}; only {sorted(DTYPES)} are read, use one that is not quantised'
        )
    if end - begin != math.prod(shape) * dtype.itemsize:
        raise ValueError(name)
    return Stored(shape, lambda: np.memmap(path, dtype, 'r', start + begin, shape))
