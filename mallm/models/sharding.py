"""One mesh, one table of rules; every sharding of parameters and optimiser moments is derived from the module."""

import contextvars
from collections.abc import Callable
from typing import Any

import jax
import numpy as np
from flax import linen as nn
from jax.sharding import AbstractMesh, Mesh, NamedSharding, PartitionSpec

AXES = ('data', 'fsdp', 'tensor')

RULES = (
    ('groups', ('data', 'fsdp')),
    ('vocab', 'tensor'),
    ('embed', 'fsdp'),
    ('heads', 'tensor'),
    ('kv_heads', 'tensor'),
    ('ffn', 'tensor'),
)
"""Logical axis -> mesh axes. A parameter axis that is not named here is kept whole on every device."""


KEPT = ('vocab', 'heads', 'kv_heads', 'ffn')
"""Logical axes along which a weight stays split while it is used."""

_TRACED_OVER: contextvars.ContextVar[Mesh | None] = contextvars.ContextVar('mesh', default=None)


def make_mesh(data: int = 1, fsdp: int = 1, tensor: int = 1) -> Mesh:
    """A (data, fsdp, tensor) mesh over the first data * fsdp * tensor devices."""
    wanted, found = data * fsdp * tensor, len(jax.devices())
    if min(data, fsdp, tensor) < 1 or wanted > found:
        raise ValueError(
            f'mesh ({data}, {fsdp}, {tensor}) needs {wanted} devices and there are {found}; every axis must be at '
            'least 1 and their product at most the number of devices'
        )
    if wanted < found and jax.process_count() > 1:
        raise ValueError(
            f'mesh ({data}, {fsdp}, {tensor}) leaves {found - wanted} devices of {jax.process_count()} processes '
            'idle; a run of several processes uses all devices, so that each takes part in every collective'
        )
    return Mesh(np.asarray(jax.devices()[:wanted]).reshape(data, fsdp, tensor), AXES)


def group_sharding(mesh: Mesh) -> NamedSharding:
    """Batch arrays are split over their first axis, the groups."""
    return NamedSharding(mesh, PartitionSpec(('data', 'fsdp')))


def cache_sharding(mesh: Mesh) -> NamedSharding:
    """Caches [L, G, kv_heads, ...] are split over their groups, and over their heads as the projections are."""
    return NamedSharding(mesh, PartitionSpec(None, ('data', 'fsdp'), 'tensor'))


def replicated(mesh: Mesh) -> NamedSharding:
    return NamedSharding(mesh, PartitionSpec())


def shardings_of(abstract: Any, mesh: Mesh | AbstractMesh) -> Any:
    """NamedShardings of a tree whose leaves carry logical axis names, as `jax.eval_shape` of an init returns it.

    Raises:
      ValueError: a mesh axis does not divide the parameter axis it would split.
    """
    shardings = nn.logical_to_mesh_sharding(nn.get_partition_spec(abstract), mesh, RULES)
    jax.tree.map(check_divides, nn.unbox(abstract), shardings)
    return shardings


def over(mesh: Mesh, function: Callable[..., Any]) -> Callable[..., Any]:
    """The function, to be traced with `gathered` and `by_groups` in force; on one device it is left as it is."""
    if mesh.size == 1:
        return function

    def placed(*args: Any) -> Any:
        before = _TRACED_OVER.set(mesh)
        try:
            return function(*args)
        finally:
            _TRACED_OVER.reset(before)

    return placed


def gathered(matrix: jax.Array, axes: tuple[str | None, ...]) -> jax.Array:
    """A weight made whole along fsdp where it is used. Without this, XLA may gather the activations instead."""
    return constrained(matrix, tuple(axis if axis in KEPT else None for axis in axes))


def by_groups(x: jax.Array) -> jax.Array:
    """Activations [G, ...] split by their groups and whole otherwise."""
    return constrained(x, ('groups', *(None,) * (x.ndim - 1)))


def constrained(x: jax.Array, axes: tuple[str | None, ...]) -> jax.Array:
    mesh = _TRACED_OVER.get()
    return x if mesh is None else nn.with_logical_constraint(x, axes, rules=RULES, mesh=mesh)


def check_heads(heads: int, kv_heads: int, mesh: Mesh | AbstractMesh) -> None:
    """Refuses a mesh that would cut through an attention head."""
    tensor = mesh.shape['tensor']
    if heads % tensor or kv_heads % tensor:
        raise ValueError(
            f'mesh axis tensor={tensor}: {heads} query heads and {kv_heads} key heads are to be split over it, which '
            'does not come out even; choose a tensor axis that divides both, and spread over fsdp instead'
        )


def check_divides(leaf: jax.ShapeDtypeStruct, sharding: NamedSharding) -> None:
    for size, axes in zip(leaf.shape, sharding.spec, strict=False):
        names = (axes,) if isinstance(axes, str) else tuple(axes or ())
        parts = int(np.prod([sharding.mesh.shape[name] for name in names]))
        if size % parts:
            raise ValueError(
                f'mesh axes {names} split a parameter axis of size {size} into {parts} parts, which does not come out '
                'even; choose a mesh whose axes divide heads * head_dim, ffn, width and vocabulary'
            )
