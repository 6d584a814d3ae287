"""Low-rank adapters (LoRA): a second, small pytree over a frozen base. Everything here is a function of pytrees.

An adapter is the Flax collection 'lora' of a Transformer, {'blocks': {target: {'a': [L, in, r], 'b': [L, r, out]}}}; a
projection with weights W [in, out] then computes x W + scale (x a) b. Adapters side by side on the rank axis are again
an adapter, of rank A r; a row uses one of them by masking the others' part of x a. So a batch in which every row has
its own adapter reads each adapter once, and never a copy for each row: the right trade for a team's few roles (its cost
grows with A r, that of gathering grows with the rows).

Source: Hu et al. 2021, arXiv:2106.09685; the scale of rsLoRA: Kalajdzievski 2023, arXiv:2312.03732.
"""

import dataclasses
import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

TARGETS = ('q', 'k', 'v', 'o', 'gate', 'up', 'down')
"""Every projection that can be adapted, by its name in a block's parameters."""


@dataclasses.dataclass(frozen=True)
class Lora:
    """What an adapter looks like.

    Attributes:
      rank: inner size r of the low-rank product.
      alpha: the product is scaled by alpha / r.
      rs: scale by alpha / sqrt(r) instead (rsLoRA), so that larger ranks do not learn more slowly.
      targets: which projections are adapted.
    """

    rank: int
    alpha: float
    rs: bool = False
    targets: tuple[str, ...] = TARGETS

    def __post_init__(self) -> None:
        if self.rank < 1:
            raise ValueError(f'rank={self.rank}: an adapter has rank 1 or more; train full parameters without a Lora')
        if not 0 < self.alpha < math.inf:
            raise ValueError(f'alpha={self.alpha}: must be positive, e.g. twice the rank; at 0 nothing is learned')
        unknown = [name for name in self.targets if name not in TARGETS]
        if unknown or not self.targets or len(set(self.targets)) < len(self.targets):
            raise ValueError(f'targets={self.targets}: name one or more of {TARGETS}, each once; unknown: {unknown}')

    @property
    def scale(self) -> float:
        return self.alpha / (math.sqrt(self.rank) if self.rs else self.rank)


def variables(params: Any, base: Any) -> dict[str, Any]:
    """What `module.apply` takes: `params` alone, or where there is a base, `params` as the adapter over it."""
    return {'params': params} if base is None else {'params': base, 'lora': params}


def merge(base: Any, adapter: Any, lora: Lora) -> Any:
    """Plain parameters that compute what the base and its adapter compute together. The base is left as it is.

    They have the base's type: in bfloat16 what is less than a weight's last bit is lost.

    Raises:
      ValueError: the adapter was made for another base or with other settings.
    """
    refuse_misfit(adapter, base, lora)
    merged = {
        name: (base['blocks'][name].astype(jnp.float32) + lora.scale * (pair['a'] @ pair['b'])).astype(
            base['blocks'][name].dtype
        )
        for name, pair in adapter['blocks'].items()
    }
    return base | {'blocks': base['blocks'] | merged}


def stack(adapters: Sequence[Any]) -> Any:
    """Adapters of one kind side by side, as one of rank A r: a [L, in, A r], b [L, A r, out]. Rows pick by `picks`."""

    def join(name: str, part: str, axis: int) -> jax.Array:
        return jnp.concatenate([adapter['blocks'][name][part] for adapter in adapters], axis)

    names = adapters[0]['blocks']
    return {'blocks': {name: {'a': join(name, 'a', 2), 'b': join(name, 'b', 1)} for name in names}}


def picks(which_G: np.ndarray, count: int, lora: Lora) -> np.ndarray:
    """picked_GR with R = count * r: 1 on the ranks of each row's own adapter in a stack of `count`, 0 elsewhere."""
    return np.repeat(np.eye(count, dtype=np.float32)[which_G], lora.rank, axis=1)


def shapes(base: Any, lora: Lora) -> dict[str, tuple[int, ...]]:
    """Shape of every leaf that an adapter of this base has, e.g. {'q/a': (L, in, r), 'q/b': (L, r, out)}."""
    wanted: dict[str, tuple[int, ...]] = {}
    for name in lora.targets:
        layers, inner, outer = base['blocks'][name].shape
        wanted |= {f'{name}/a': (layers, inner, lora.rank), f'{name}/b': (layers, lora.rank, outer)}
    return wanted


def refuse_misfit(adapter: Any, base: Any, lora: Lora) -> None:
    """Raises ValueError, naming every leaf, where an adapter is not one of this base and kind."""
    found = {
        jax.tree_util.keystr(path, simple=True, separator='/').removeprefix('blocks/'): leaf.shape
        for path, leaf in jax.tree_util.tree_leaves_with_path(adapter)
    }
    wanted = shapes(base, lora)
    faults = [f'{name} is missing' for name in wanted.keys() - found.keys()]
    faults += [f'{name} is surplus' for name in found.keys() - wanted.keys()]
    faults += [
        f'{name} is {found[name]}, the base needs {wanted[name]}'
        for name in wanted.keys() & found.keys()
        if found[name] != wanted[name]
    ]
    if faults:
        raise ValueError(
            f'an adapter that does not fit its base: {"; ".join(sorted(faults))}. Use the base, rank and targets that '
            f'it was trained with (here {lora})'
        )
