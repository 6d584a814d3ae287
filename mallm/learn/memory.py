"""How many bytes of each device a training job takes, from shapes alone: nothing is allocated, no device is needed.

Parameters, optimiser state, gradients and the cache are sums over the very shardings that the job uses. Activations are
an estimate of what a gradient keeps and works in: with remat, one residual stream a layer and the insides of one block.
A frozen base is counted in the compute type. The sampler of a run of one process shares the learner's weights; what it
lays out anew on a CPU while it decodes a wide model (`models.decode`) is not counted.
"""

import dataclasses
import math
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
from flax import linen as nn
from jax.sharding import AbstractMesh

from mallm.learn.state import optimiser
from mallm.learn.update import LOGITS_ROOM, chunk_of
from mallm.models import cache, sharding
from mallm.models.config import Architecture
from mallm.models.transformer import Transformer

GIB = 1 << 30
MATRICES = ('q', 'k', 'v', 'o', 'gate', 'up', 'down')
USABLE = 0.92
"""Share of a device's memory that a job gets: the rest goes to the runtime, its collectives and fragmentation."""


@dataclasses.dataclass(frozen=True)
class Work:
    """What one device step is fed with.

    Attributes:
      groups: G, prompts of a micro-batch, and of one batch of the sampler.
      k: answers of each.
      prompt, answer: tokens of each (P and S).
      rank: of LoRA adapters on all seven projections over a frozen base; 0 trains every parameter.
      dtype: what the model computes in; parameters that learn, their gradients and moments are float32.
      samples: whether the embedded engine keeps its cache on the same devices.
      keeps_reference: whether a KL term needs a second copy of what learns.
      room: bytes that logits may take on one device.
    """

    groups: int = 32
    k: int = 8
    prompt: int = 1024
    answer: int = 512
    rank: int = 0
    dtype: Any = jnp.bfloat16
    samples: bool = True
    keeps_reference: bool = False
    room: int = LOGITS_ROOM

    def __post_init__(self) -> None:
        for name in ('groups', 'k', 'prompt', 'answer'):
            if vars(self)[name] < 1:
                raise ValueError(f'{name}={vars(self)[name]}: there is at least one; give a positive number')
        if self.rank < 0:
            raise ValueError(f'rank={self.rank}: 0 trains every parameter, a positive rank trains adapters')


@dataclasses.dataclass(frozen=True)
class Plan:
    """Bytes on each device, and the number of parameters of the whole model."""

    parameters: int
    learning: int
    parts: dict[str, int]

    @property
    def total(self) -> int:
        return sum(self.parts.values())

    def fits(self, device_memory: int) -> bool:
        return self.total <= USABLE * device_memory


def plan(arch: Architecture, shape: tuple[int, int, int], work: Work) -> Plan:
    """The memory of each device of a (data, fsdp, tensor) mesh.

    Raises:
      ValueError: the mesh does not divide the model or the groups.
    """
    mesh = AbstractMesh(shape, sharding.AXES)
    sharding.check_heads(arch.heads, arch.kv_heads, mesh)
    rows = shape[0] * shape[1]
    if work.groups % rows:
        raise ValueError(
            f'groups={work.groups}: data * fsdp = {rows} devices share the groups of a batch, which does not come out '
            'even; choose a multiple'
        )
    boxed, moments = abstract_state(arch)
    shapes, placed = nn.unbox(boxed), sharding.shardings_of(boxed, mesh)
    parameters = sum(leaf.size for leaf in jax.tree.leaves(shapes))
    whole = bytes_of(shapes, placed)
    base, learning, learned = 0, parameters, whole
    optimising = bytes_of(nn.unbox(moments), sharding.shardings_of(moments, mesh))
    if work.rank:
        learning, learned = adapter(arch, work.rank, mesh)
        base, optimising = whole // 4 * jnp.dtype(work.dtype).itemsize, 2 * learned
    parts = {
        'parameters': base + learned,
        'optimiser state': optimising,
        'gradients': 2 * learned,
        'reference': learned * work.keeps_reference,
        'weights gathered for compute': gathered(arch, mesh, work),
        'activations': activations(arch, mesh, work),
        'logits chunk': logits(arch, mesh, work),
        'KV cache of the sampler': kv_cache(arch, mesh, work) * work.samples,
    }
    return Plan(parameters, learning, parts)


def abstract_state(arch: Architecture) -> tuple[Any, Any]:
    """Shapes and logical axis names of every parameter, and of AdamW's moments."""

    def init(key: jax.Array) -> tuple[Any, Any]:
        params = Transformer(arch).init(key, jnp.zeros((1, 2), jnp.int32))['params']
        return params, optimiser(clip=1.0, b1=0.9, b2=0.98, weight_decay=0.0).init(params)

    return jax.eval_shape(init, jax.random.key(0))


def bytes_of(shapes: Any, placed: Any) -> int:
    """Bytes on one device of a tree of shapes under a tree of shardings."""
    sizes = jax.tree.map(lambda leaf, s: math.prod(s.shard_shape(leaf.shape)) * leaf.dtype.itemsize, shapes, placed)
    return sum(jax.tree.leaves(sizes))


def matrices(arch: Architecture) -> Iterator[tuple[str, int, int]]:
    """(name, rows, columns) of the seven projections of one block."""
    queries, keys = arch.heads * arch.head_dim, arch.kv_heads * arch.head_dim
    sides = ((arch.width, queries), (arch.width, keys), (arch.width, keys), (queries, arch.width))
    ffn = ((arch.width, arch.ffn), (arch.width, arch.ffn), (arch.ffn, arch.width))
    return ((name, *side) for name, side in zip(MATRICES, sides + ffn, strict=True))


def adapter(arch: Architecture, rank: int, mesh: AbstractMesh) -> tuple[int, int]:
    """(numbers, bytes on one device) of rank-r factors [rows, r] and [r, columns] of every projection, in float32.

    A factor is split as its matrix is, over fsdp on the side of the residual stream and over tensor on the other.
    """
    fsdp, tensor = mesh.shape['fsdp'], mesh.shape['tensor']
    count = held = 0
    for name, rows, columns in matrices(arch):
        inward = name not in {'o', 'down'}
        split_rows, split_columns = (fsdp, tensor) if inward else (tensor, fsdp)
        count += arch.layers * rank * (rows + columns)
        held += 4 * arch.layers * rank * (rows // split_rows + columns // split_columns)
    return count, held


def gathered(arch: Architecture, mesh: AbstractMesh, work: Work) -> int:
    """Weights as they are used, whole over fsdp: one block's (two where the next is fetched meanwhile) and the
    embedding in the compute type, and the head, which multiplies in float32."""
    tensor, split = mesh.shape['tensor'], mesh.shape['fsdp'] > 1
    block = sum(rows * columns for _, rows, columns in matrices(arch)) // tensor
    table, size = arch.vocab * arch.width // tensor, jnp.dtype(work.dtype).itemsize
    return (2 if split else 1) * block * size + table * (size + 4 * split)


def activations(arch: Architecture, mesh: AbstractMesh, work: Work) -> int:
    """What a gradient keeps from forward to backward, and the widest place of one block (an estimate).

    The answers' residual streams, the prompts' as well, and the prompts' keys and values, which later blocks of the
    answers read, are kept for each layer. Inside a block (twice, as its backward pass has it with its gradient):
    normed input, queries, keys, values, attention scores and weights in float32, and the feed-forward layer.
    """
    tensor, rows = mesh.shape['tensor'], mesh.shape['data'] * mesh.shape['fsdp']
    G, size = work.groups // rows, jnp.dtype(work.dtype).itemsize
    prompts, answers = G * work.prompt, G * work.k * work.answer
    D, inner, keys, F = (arch.width, arch.heads * arch.head_dim // tensor, arch.kv_heads * arch.head_dim // tensor,
                         arch.ffn // tensor)  # fmt: skip
    heads = arch.heads // tensor
    scores = 4 * max(prompts * heads * work.prompt, answers * heads * (work.prompt + work.answer))
    tokens = max(prompts, answers)
    inside = 2 * scores + 2 * size * tokens * (2 * D + 2 * inner + 2 * keys + 3 * F)
    stream = size * (prompts + answers) * D
    cached = 2 * size * prompts * keys
    if arch.remat:
        return arch.layers * (stream + cached) + inside
    return arch.layers * (stream + cached + inside // 2) + inside // 2


def logits(arch: Architecture, mesh: AbstractMesh, work: Work) -> int:
    """Logits, their exponentials and their gradient for as many tokens as the loss holds at once, and the head's own
    gradient, which a chunk adds to."""
    parts = math.prod(mesh.shape.values())
    shape = (work.groups, work.k, work.answer)
    chunk = chunk_of(shape, arch.vocab, work.room * parts) or work.k * work.answer
    head = 0 if work.rank else 4 * arch.vocab * arch.width // mesh.shape['tensor']
    return 3 * 4 * work.groups * chunk * arch.vocab // parts + head


def kv_cache(arch: Architecture, mesh: AbstractMesh, work: Work) -> int:
    """Keys and values of prompts and answers while a batch of `groups` prompts is sampled."""
    parts = math.prod(mesh.shape.values())
    answers = jax.eval_shape(lambda: cache.empty(arch, work.groups, work.k, work.answer, work.dtype))
    prompts = jax.eval_shape(lambda: cache.empty(arch, work.groups, 1, work.prompt, work.dtype))
    return sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves((answers, prompts))) // parts


def remedies(arch: Architecture, shape: tuple[int, int, int], work: Work, device_memory: int) -> list[str]:
    """What would make a job fit, each checked by planning it; empty when nothing here does."""
    data, fsdp, tensor = shape
    rows = data * fsdp
    fewer, adapters = dataclasses.replace(work, groups=rows), dataclasses.replace(work, rank=work.rank or 16)
    tried: list[tuple[str, Architecture, tuple[int, int, int], Work]] = [
        ('recompute activations (remat)', dataclasses.replace(arch, remat=True), shape, work),
        (f'micro-batches of {rows} groups', arch, shape, fewer),
        (f'mesh 1,{rows},{tensor}: split over fsdp what data copies', arch, (1, rows, tensor), work),
        (f'LoRA of rank {adapters.rank}', arch, shape, adapters),
        (f'LoRA of rank {adapters.rank} and {rows} groups', arch, shape, dataclasses.replace(adapters, groups=rows)),
    ]
    for more in (2, 4, 8, 16):
        grown = dataclasses.replace(work, groups=-(-work.groups // (rows * more)) * rows * more)
        place = (data, fsdp * more, tensor)
        tried.append((f'mesh {data},{fsdp * more},{tensor}: {more} times the devices', arch, place, grown))
    return [
        said
        for said, model, place, job in tried
        if (model, place, job) != (arch, shape, work) and fits_somehow(model, place, job, device_memory)
    ][:4]


def fits_somehow(arch: Architecture, shape: tuple[int, int, int], work: Work, device_memory: int) -> bool:
    """Whether a job can be planned at all and fits."""
    try:
        return plan(arch, shape, work).fits(device_memory)
    except ValueError:
        return False
