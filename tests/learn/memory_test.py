"""The plan of a job's memory: counts that the world knows, sums over real shardings, and what is really allocated."""

import dataclasses
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen as nn

from launch.plan import architecture_of, main
from mallm.algo import losses
from mallm.learn.memory import GIB, Work, abstract_state, activations, logits, plan, remedies
from mallm.learn.pack import Batch
from mallm.learn.state import make_state, optimiser
from mallm.learn.update import Accumulated, Knobs, make_gradients
from mallm.models import cache, sharding
from mallm.models.config import Architecture
from mallm.models.presets import PRESETS
from mallm.models.transformer import Transformer

TINY = Architecture(vocab=64, width=32, layers=2, heads=4, kv_heads=2, head_dim=8, ffn=48, tied=False, remat=True)
KNOWN = {  # as the models' makers count them
    'Qwen/Qwen3-0.6B': 596_049_920,
    'Qwen/Qwen3-1.7B': 1_720_574_976,
    'Qwen/Qwen3-4B': 4_022_468_096,
    'Qwen/Qwen3-8B': 8_190_735_360,
    'Qwen/Qwen3-14B': 14_768_307_200,
    'Qwen/Qwen2.5-0.5B': 494_032_768,
    'Qwen/Qwen2.5-7B': 7_615_616_512,
    'meta-llama/Llama-3.2-1B': 1_235_814_400,
    'meta-llama/Llama-3.1-8B': 8_030_261_248,
    'HuggingFaceTB/SmolLM2-135M': 134_515_008,
}


@pytest.mark.parametrize('name', KNOWN)
def test_a_known_model_has_as_many_parameters_as_its_makers_say(name):
    assert plan(PRESETS[name], (1, 1, 1), Work()).parameters == KNOWN[name]


def test_parameter_bytes_are_the_sum_over_sharded_arrays_and_follow_the_mesh():
    """Qwen3-8B in float32 on 2 x 4 x 1: 4 bytes of a quarter of every matrix, and every norm whole."""
    arch = PRESETS['Qwen/Qwen3-8B']
    boxed, _ = abstract_state(arch)
    mesh = sharding.make_mesh(2, 4, 1)
    leaves = zip(jax.tree.leaves(nn.unbox(boxed)), jax.tree.leaves(sharding.shardings_of(boxed, mesh)), strict=True)
    summed = sum(4 * int(np.prod(placed.shard_shape(leaf.shape))) for leaf, placed in leaves)
    norms = 36 * (2 * 4096 + 2 * 128) + 4096
    told = plan(arch, (2, 4, 1), Work())
    assert told.parts['parameters'] == summed == 4 * ((KNOWN['Qwen/Qwen3-8B'] - norms) // 4 + norms)
    assert told.parts['optimiser state'] == 2 * summed + 4
    halved = plan(arch, (1, 4, 2), Work())
    assert halved.parts['KV cache of the sampler'] == told.parts['KV cache of the sampler']
    assert halved.parts['parameters'] < 0.51 * told.parts['parameters']


@pytest.mark.parametrize('shape', [(2, 2, 2), (1, 4, 1)])
def test_what_is_planned_for_a_device_is_what_lies_on_it(shape):
    mesh = sharding.make_mesh(*shape)
    state, _ = make_state(
        jax.random.key(0), module=Transformer(TINY),
        transform=optimiser(clip=1.0, b1=0.9, b2=0.98, weight_decay=0.0), mesh=mesh, entropy_coefficient=0.0,
        keeps_reference=False,
    )  # fmt: skip
    told = plan(TINY, shape, Work(groups=8, k=2, prompt=16, answer=8, dtype=jnp.float32))
    first = mesh.devices.ravel()[0]

    def held(tree) -> int:
        return sum(s.data.nbytes for x in jax.tree.leaves(tree) for s in x.addressable_shards if s.device == first)

    assert held(state.params) == told.parts['parameters'] and held(state.moments) == told.parts['optimiser state']
    caches = [cache.empty(TINY, 8, 2, 8, jnp.float32), cache.empty(TINY, 8, 1, 16, jnp.float32)]
    assert held(jax.device_put(caches, sharding.cache_sharding(mesh))) == told.parts['KV cache of the sampler']


def test_activations_are_estimated_within_a_factor_of_two_of_what_the_compiler_needs():
    arch = dataclasses.replace(TINY, width=64, layers=4, vocab=512)
    work = Work(groups=4, k=4, prompt=128, answer=64, dtype=jnp.float32)
    G, K, P, S = work.groups, work.k, work.prompt, work.answer
    like = lambda kind, *shape: jax.ShapeDtypeStruct(shape, kind)  # noqa: E731
    whole, number = like(jnp.float32, G, K, S), like(jnp.float32)
    batch = Batch(like(jnp.int32, G, P), like(jnp.int32, G), like(jnp.int32, G, K, S), whole, whole, whole,
                  like(jnp.float32, G, K), like(jnp.float32, G, K), number)  # fmt: skip
    params = nn.unbox(abstract_state(arch)[0])
    state = jax.eval_shape(lambda p: make_like(p), params)
    sums = Accumulated(params, dict.fromkeys(('entropy', 'kl', 'tokens', 'loss'), number))
    made = jax.jit(make_gradients(Transformer(arch), losses.reinforce), donate_argnums=0)
    needed = made.lower(sums, state, batch, Knobs(*(number,) * 4), None).compile().memory_analysis().temp_size_in_bytes
    mesh = jax.sharding.AbstractMesh((1, 1, 1), sharding.AXES)
    told = activations(arch, mesh, work) + logits(arch, mesh, work)
    assert 0.5 * needed < told < 2 * needed


def make_like(params):
    from mallm.learn.state import LearnerState

    return LearnerState(jnp.int32(0), params, None, jnp.float32(0), None)


def test_what_does_not_fit_comes_with_remedies_that_do():
    arch = dataclasses.replace(PRESETS['Qwen/Qwen3-8B'], remat=True)
    work = Work(groups=8)
    assert not plan(arch, (8, 1, 1), work).fits(80 * GIB)
    told = remedies(arch, (8, 1, 1), work, 80 * GIB)
    assert 'LoRA of rank 16' in told and any(one.startswith('mesh 1,8,1') for one in told)
    assert plan(arch, (1, 8, 1), work).fits(80 * GIB)
    assert plan(arch, (8, 1, 1), dataclasses.replace(work, rank=16)).fits(80 * GIB)


@pytest.mark.parametrize(
    'mesh, change, said',
    [
        ((1, 1, 16), {}, 'tensor=16: 32 query heads and 8 key heads'),
        ((3, 1, 1), {}, 'groups=8: data . fsdp = 3 devices'),
        ((1, 3, 1), {'groups': 3}, 'size 4096 into 3 parts'),
    ],
)
def test_a_mesh_that_does_not_come_out_even_is_refused(mesh, change, said):
    with pytest.raises(ValueError, match=said):
        plan(PRESETS['Qwen/Qwen3-8B'], mesh, dataclasses.replace(Work(groups=8), **change))


def test_the_command_says_what_fits_and_what_does_not(capsys, tmp_path):
    asked = ['--model', 'Qwen/Qwen3-8B', '--mesh']
    assert main([*asked, '2,4,1']) == 0
    told = capsys.readouterr().out
    assert '8,190,735,360 parameters' in told and 'It fits' in told and '8,191,660,032' in told
    assert main([*asked, '8,1,1', '--device-memory', '40GiB']) == 1
    assert 'does NOT fit' in (told := capsys.readouterr().out) and 'LoRA of rank 16' in told
    assert main([*asked, '1,1,16']) == 2 and 'divides both' in capsys.readouterr().err
    assert main(['--model', str(tmp_path)]) == 2 and 'neither a known model' in capsys.readouterr().err
    told = {'model_type': 'qwen3', 'vocab_size': 64, 'hidden_size': 32, 'num_hidden_layers': 2, 'head_dim': 8,
            'num_attention_heads': 4, 'num_key_value_heads': 2, 'intermediate_size': 48}  # fmt: skip
    (tmp_path / 'config.json').write_text(json.dumps(told))
    assert dataclasses.replace(architecture_of(str(tmp_path)), remat=True) == TINY
