"""Random keys are addressed, never carried: the same place in the run has the same key, whatever the order or host."""

import functools
import zlib

import jax
import numpy as np

TRAIN, EVALUATE, WARM_START, INIT, SHUFFLE = range(5)
"""First part of every path: which stream of the run a key belongs to."""


def key_for(root: jax.Array, *path: int) -> jax.Array:
    """The key owned by one place in the run, e.g. `key_for(root, TRAIN, step, env, turn, role, k)`."""
    return functools.reduce(jax.random.fold_in, path, root)


def keys_for(root: jax.Array, paths_NI: jax.Array) -> jax.Array:
    """`key_for` for N places at once; row i of the result equals `key_for(root, *paths_NI[i])`."""
    fold = lambda key, part: (jax.random.fold_in(key, part), None)  # noqa: E731
    return jax.vmap(lambda path_I: jax.lax.scan(fold, root, path_I)[0])(paths_NI)


def seed_for(root: int, *path: int) -> int:
    """A 64-bit host seed owned by one place in the run, for worlds and shuffles that use numpy."""
    return int(np.random.SeedSequence(root, spawn_key=path).generate_state(1, np.uint64)[0])


def number_of(name: str) -> int:
    """A stable 31-bit number for a name, so that roles and pools can stand in a path."""
    return zlib.crc32(name.encode()) & 0x7FFFFFFF
