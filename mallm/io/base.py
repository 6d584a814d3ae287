"""The frozen base of a run's adapters: saved once, beside the checkpoints, which then hold the adapters alone."""

import contextlib
import hashlib
import pathlib
from typing import Any

import jax
import jax.numpy as jnp

from mallm.io.checkpoint import CheckpointError, Checkpoints


def save_base(folder: pathlib.Path, base: Any) -> None:
    """Writes `folder/base`; a run does this once, before its first step."""
    with contextlib.closing(Checkpoints(folder / 'base')) as place:
        place.save(0, base, {})


def restore_base(folder: pathlib.Path, like: Any) -> Any:
    """The base of a run, placed as `like` says.

    Raises:
      CheckpointError: it is absent or broken, or of another architecture.
    """
    with contextlib.closing(Checkpoints(folder / 'base')) as place:
        return place.restore(0, like)[0]


def fingerprint(base: Any) -> str:
    """A short name of these very bits, the same on every mesh; for a base that is read anew and not stored."""
    sums = jax.device_get(bit_sums(base))
    said = [f'{jax.tree_util.keystr(path)} {total}' for path, total in jax.tree_util.tree_leaves_with_path(sums)]
    return hashlib.sha256('\n'.join(said).encode()).hexdigest()[:16]


@jax.jit
def bit_sums(tree: Any) -> Any:
    """Each array's bit patterns as whole numbers, summed modulo 2**32: an order that a mesh chooses changes nothing."""

    def total(x: jax.Array) -> jax.Array:
        whole = {2: jnp.uint16, 4: jnp.uint32}[x.dtype.itemsize]
        return jax.lax.bitcast_convert_type(x, whole).astype(jnp.uint32).sum(dtype=jnp.uint32)

    return jax.tree.map(total, tree)


def require_same_base(base: Any, recorded: str) -> None:
    """Raises:
    CheckpointError: `base` is not the one whose fingerprint was recorded when the run began.
    """
    found = fingerprint(base)
    if found != recorded:
        raise CheckpointError(
            f'the base under the adapters has fingerprint {found}, but this run began on {recorded}: model.source has '
            'changed since; give the weights that the run began with, or start a new run'
        )
