"""One table of rules: what is split where, optimiser moments like their parameters, and meshes that cannot be."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen as nn
from jax.sharding import PartitionSpec

from mallm.learn.state import optimiser
from mallm.models import sharding
from mallm.models.config import Architecture
from mallm.models.transformer import Transformer

ARCH = {'vocab': 16, 'width': 8, 'layers': 1, 'heads': 2, 'kv_heads': 2, 'head_dim': 4, 'ffn': 12}


def shardings(mesh, **change):
    """Shardings of parameters and of Adam's moments; nothing is computed."""

    def init(key):
        params = Transformer(Architecture(**ARCH | change)).init(key, jnp.zeros((1, 2), jnp.int32))['params']
        return params, optimiser(clip=1.0, b1=0.9, b2=0.98, weight_decay=0.0).init(params)

    return sharding.shardings_of(jax.eval_shape(init, jax.random.key(0)), mesh)


def by_name(tree) -> dict[str, PartitionSpec]:
    leaves = jax.tree.leaves_with_path(tree)
    return {jax.tree_util.keystr(path[-1:], simple=True): leaf.spec for path, leaf in leaves}


def last_two(spec: PartitionSpec) -> tuple:
    """The mesh axes of a matrix, without the layers it may be stacked over."""
    return tuple(spec)[-2:]


def test_each_kind_of_matrix_is_split_along_the_axes_of_the_table():
    params, _ = shardings(sharding.make_mesh(2, 2, 2), tied=False)
    specs = by_name(params)
    for name in ('q', 'k', 'v', 'gate', 'up'):
        assert last_two(specs[name]) == ('fsdp', 'tensor'), name
    for name in ('o', 'down'):
        assert last_two(specs[name]) == ('tensor', 'fsdp'), name
    assert last_two(specs['embedding']) == ('tensor', 'fsdp') and last_two(specs['head']) == ('fsdp', 'tensor')
    assert not any(axis for name in ('final_norm', 'attention_norm', 'q_norm') for axis in tuple(specs[name]))


def test_the_moments_of_an_optimiser_are_split_like_the_parameters():
    params, moments = shardings(sharding.make_mesh(1, 2, 2))
    shapes = [jax.tree.structure(params), jax.tree.leaves(params)]
    for twin in (moments[1].mu, moments[1].nu):
        assert [jax.tree.structure(twin), jax.tree.leaves(twin)] == shapes


def test_batches_are_split_over_data_and_fsdp_by_their_groups():
    mesh = sharding.make_mesh(2, 2, 2)
    batch = jax.device_put(np.arange(8).reshape(4, 2), sharding.group_sharding(mesh))
    assert {shard.data.shape for shard in batch.addressable_shards} == {(1, 2)}
    whole = jax.device_put(np.arange(8), sharding.replicated(mesh))
    assert {shard.data.shape for shard in whole.addressable_shards} == {(8,)}


@pytest.mark.parametrize(
    'mesh, change, size, parts',
    [
        ((1, 1, 2), {'vocab': 15}, 15, 2),
        ((1, 1, 4), {'ffn': 14}, 14, 4),
        ((1, 2, 1), {'width': 9}, 9, 2),
        ((1, 1, 8), {'kv_heads': 1, 'ffn': 16}, 4, 8),
    ],
)
def test_a_mesh_that_does_not_come_out_even_is_refused_with_value_rule_and_remedy(mesh, change, size, parts):
    with pytest.raises(ValueError) as caught:
        shardings(sharding.make_mesh(*mesh), **change)
    said = str(caught.value)
    assert f'size {size} into {parts} parts' in said and 'choose a mesh whose axes divide' in said


@pytest.mark.parametrize('shape', [(3, 3, 1), (0, 1, 1), (1, -1, 1), (16, 1, 1)])
def test_a_mesh_of_devices_that_are_not_there_is_refused(shape):
    data, fsdp, tensor = shape
    with pytest.raises(ValueError, match=rf'mesh \({data}, {fsdp}, {tensor}\) needs .* devices and there are 8'):
        sharding.make_mesh(*shape)


def test_a_mesh_takes_the_first_devices_in_order():
    mesh = sharding.make_mesh(2, 1, 2)
    assert mesh.axis_names == ('data', 'fsdp', 'tensor')
    assert mesh.devices.ravel().tolist() == jax.devices()[:4]
    assert nn.logical_to_mesh_axes(('groups',), sharding.RULES) == PartitionSpec(('data', 'fsdp'))
