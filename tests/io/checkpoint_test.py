"""Checkpoints: bit-exact, whole or absent, and free of the mesh they were saved on (scenarios A22 to A24, A42)."""

import json
import os
import pathlib
import random
import socket
import subprocess
import sys
import time
import warnings
from typing import Any, NamedTuple

import flax.struct
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from mallm.io.checkpoint import CheckpointError, Checkpoints

ROOT = pathlib.Path(__file__).parents[2]


@flax.struct.dataclass
class State:
    step: Any
    params: Any
    opt: Any


class Pair(NamedTuple):
    first: Any
    second: Any


def placed(tree, *, mesh=None, spec=None):
    """The tree's shapes, on the first device, or over a mesh for every leaf of two dimensions."""
    one = jax.sharding.SingleDeviceSharding(jax.devices()[0])

    def of(leaf):
        sharding = one if mesh is None else NamedSharding(mesh, spec if leaf.ndim == 2 else PartitionSpec())
        return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding)

    return jax.tree.map(of, tree)


def learner(seed: int = 0, width: int = 16) -> State:
    params = {'embed': jax.random.normal(jax.random.key(seed), (width, 8)), 'scale': jnp.ones(8, jnp.bfloat16)}
    return State(step=jnp.int32(3), params=params, opt=optax.adamw(1e-3).init(params))


def as_bytes(tree) -> list[tuple[str, bytes]]:
    leaves = [
        jax.random.key_data(x) if jnp.issubdtype(x.dtype, jax.dtypes.prng_key) else x for x in jax.tree.leaves(tree)
    ]
    return [(str(leaf.dtype), np.asarray(leaf).tobytes()) for leaf in leaves]


def mesh_of(count: int, *shape: int) -> Mesh:
    return Mesh(np.array(jax.devices()[:count]).reshape(shape), ('data', 'fsdp'))


def run_python(code: str, *argv: str, devices: int) -> subprocess.Popen:
    head = f'import jax; jax.config.update("jax_num_cpu_devices", {devices})\n'
    environment = os.environ | {'JAX_PLATFORMS': 'cpu', 'PYTHONPATH': str(ROOT)}
    return subprocess.Popen(
        [sys.executable, '-W', 'ignore', '-c', head + code, *argv],
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(('127.0.0.1', 0))
        return probe.getsockname()[1]


def finished(process: subprocess.Popen) -> str:
    output, _ = process.communicate(timeout=120)
    assert process.returncode == 0, output
    return output


@pytest.fixture
def saved(tmp_path):
    checkpoints = Checkpoints(tmp_path)
    yield checkpoints
    checkpoints.close()


def test_every_bit_comes_back_whatever_the_dtype(saved):
    odd = np.array([0x7FC00001, 0xFFC12345, 0x80000000, 1, 0x7F800000], np.uint32).view(np.float32)
    arrays = {
        'odd': jnp.asarray(odd),  # two NaNs with a payload, -0, the smallest subnormal, infinity
        'negative_zero': jnp.full((2, 3), -0.0, jnp.bfloat16),
        'bf16': jax.random.normal(jax.random.key(0), (5, 7), jnp.bfloat16),
        'int': jnp.array([-(2**31), 2**31 - 1], jnp.int32),
        'raw_key': jax.random.PRNGKey(7),
        'typed_key': jax.random.key(7),
        'mask': jnp.array([True, False]),
        'host': np.arange(4, dtype=np.uint32),
    }
    saved.save(1, arrays, {})
    restored, _ = saved.restore(1, placed({**arrays, 'host': jnp.asarray(arrays['host'])}))
    assert as_bytes(restored) == as_bytes(arrays)


def test_state_and_optimizer_come_back_as_their_own_types_with_the_progress(saved):
    arrays = {'shared': learner(), 'pair': Pair(jnp.ones(2), [jnp.zeros(1, jnp.int32)])}
    progress = {'step': 3, 'root': [0, 7], 'data': {'epoch': 1, 'position': 12}, 'best': 0.1 + 0.2, 'name': 'ü'}
    saved.save(3, arrays, progress)
    restored, facts = saved.restore(3, placed(arrays))
    assert jax.tree.structure(restored) == jax.tree.structure(arrays)
    assert as_bytes(restored) == as_bytes(arrays) and facts == progress


def test_a_key_that_went_through_a_checkpoint_draws_what_it_would_have_drawn(saved):
    root = jax.random.key(11)
    saved.save(0, {'root': root}, {})
    restored, _ = saved.restore(0, placed({'root': root}))
    np.testing.assert_array_equal(jax.random.normal(restored['root'], (4,)), jax.random.normal(root, (4,)))


def test_the_name_is_the_number_of_updates_done(saved):
    tx = optax.adamw(optax.linear_schedule(1e-3, 0.0, 10))
    params = {'w': jnp.ones(3)}
    opt = tx.init(params)
    for step in range(1, 4):
        with jax.numpy_dtype_promotion('standard'):  # optax raises floats to integer powers
            updates, opt = tx.update({'w': jnp.ones(3)}, opt, params)
        params = optax.apply_updates(params, updates)
        saved.save(step, {'params': params, 'opt': opt}, {'step': step})
    restored, progress = saved.restore(saved.latest(), placed({'params': params, 'opt': opt}))
    assert saved.latest() == 3 == progress['step'] == int(restored['opt'][0].count)


def test_a_progress_that_tells_another_step_is_refused(saved):
    with pytest.raises(CheckpointError, match='progress has step 2, saved as 3'):
        saved.save(3, {'w': jnp.ones(2)}, {'step': 2})
    assert saved.latest() is None


@pytest.mark.parametrize('progress', [{'t': (1, 2)}, {'d': {1: 2}}, {'x': float('nan')}, {'a': np.int32(1)}])
def test_a_progress_that_would_come_back_changed_is_refused(saved, progress):
    with pytest.raises(CheckpointError, match='progress'):
        saved.save(3, {'w': jnp.ones(2)}, progress)


def test_without_a_checkpoint_there_is_no_latest_and_nothing_is_written(saved, tmp_path):
    assert saved.latest() is None and list(tmp_path.iterdir()) == []
    with pytest.raises(CheckpointError, match='there is no such step'):
        saved.restore(4, placed({'w': jnp.ones(2)}))


@pytest.mark.parametrize('count, shape', [(1, (1, 1)), (4, (2, 2)), (4, (1, 4)), (8, (4, 2)), (8, (1, 8))])
def test_the_new_mesh_decides_the_shardings(tmp_path, count, shape):
    old = mesh_of(8, 2, 4)
    state = jax.tree.map(
        lambda x: jax.device_put(x, NamedSharding(old, PartitionSpec('fsdp') if x.ndim else PartitionSpec())), learner()
    )
    Checkpoints(tmp_path).save(5, state, {})
    like = placed(state, mesh=mesh_of(count, *shape), spec=PartitionSpec('fsdp', 'data'))
    restored, _ = Checkpoints(tmp_path).restore(5, like)
    assert as_bytes(restored) == as_bytes(state)
    assert all(jax.tree.leaves(jax.tree.map(lambda got, want: got.sharding == want.sharding, restored, like)))


@pytest.mark.parametrize('devices', [1, 3])
def test_a_process_with_fewer_devices_restores_what_eight_saved(tmp_path, devices):
    over = NamedSharding(mesh_of(8, 8, 1), PartitionSpec('data'))
    Checkpoints(tmp_path).save(5, {'w': jax.device_put(jnp.arange(24.0), over), 'opt': jnp.ones(8)}, {})
    code = """
import sys, pathlib, numpy as np
from jax.sharding import *
from mallm.io.checkpoint import Checkpoints
over = NamedSharding(Mesh(np.array(jax.devices()), 'x'), PartitionSpec('x'))
saved = Checkpoints(pathlib.Path(sys.argv[1]))
part, _ = saved.restore_part(saved.latest(), {'w': jax.ShapeDtypeStruct((24,), np.float32, sharding=over)})
assert np.array_equal(part['w'], np.arange(24)) and part['w'].sharding == over
print('devices', jax.device_count())
"""
    assert finished(run_python(code, str(tmp_path), devices=devices)) == f'devices {devices}\n'


def test_two_processes_save_one_step_and_one_process_restores_it(tmp_path):
    code = """
import sys, pathlib, numpy as np
jax.config.update('jax_cpu_collectives_implementation', 'gloo')
jax.distributed.initialize(sys.argv[2], num_processes=2, process_id=int(sys.argv[3]))
from jax.sharding import *
from mallm.io.checkpoint import Checkpoints
over = NamedSharding(Mesh(np.array(jax.devices()), 'x'), PartitionSpec('x'))
w = jax.make_array_from_callback((8,), over, lambda index: np.arange(8, dtype=np.float32)[index])
saved = Checkpoints(pathlib.Path(sys.argv[1]))
for step in (1, 2):
    saved.save(step, {'w': w}, {'step': step})
back, _ = saved.restore(saved.latest(), {'w': w})
assert saved.latest() == 2 and back['w'].sharding == over
assert all(np.array_equal(shard.data, np.arange(8)[shard.index]) for shard in back['w'].addressable_shards)
"""
    address = f'127.0.0.1:{free_port()}'
    for process in [run_python(code, str(tmp_path), address, str(i), devices=2) for i in range(2)]:
        finished(process)
    saved = Checkpoints(tmp_path)
    restored, progress = saved.restore(2, placed({'w': jnp.arange(8.0)}))
    np.testing.assert_array_equal(restored['w'], np.arange(8))
    assert progress == {'step': 2}


def test_parameters_alone_are_restored_by_name_without_the_optimizer(saved):
    state = learner()
    saved.save(5, {'mover': state, 'planner': learner(1)}, {})
    part, _ = saved.restore_part(5, placed({'mover': {'params': state.params}}))
    assert as_bytes(part) == as_bytes(state.params)


def test_a_tree_that_differs_is_refused_with_every_difference_named(saved):
    saved.save(2, {'a': jnp.ones(2), 'b': jnp.ones(3), 'c': jnp.ones(4), 'same': jnp.ones(1)}, {})
    like = {'b': jnp.ones(5), 'c': jnp.ones(4, jnp.bfloat16), 'd': jnp.ones(1), 'same': jnp.ones(1)}
    with pytest.raises(CheckpointError) as caught:
        saved.restore(2, like)
    for line in [
        'missing in the file: d float32[1]',
        'not asked for: a float32[2]',
        'b is float32[3] in the file, asked for as float32[5]',
        'c is float32[4] in the file, asked for as bfloat16[4]',
        'restore_part',
    ]:
        assert line in str(caught.value)
    with pytest.raises(CheckpointError, match='missing in the file: d'):
        saved.restore_part(2, {'d': jnp.ones(1)})


def test_a_shape_without_a_sharding_is_refused(saved):
    saved.save(2, {'w': jnp.ones(2)}, {})
    with pytest.raises(CheckpointError, match='w: no sharding to restore to'):
        saved.restore(2, jax.eval_shape(lambda: {'w': jnp.ones(2)}))


def test_a_leaf_that_is_no_array_is_refused(saved):
    with pytest.raises(CheckpointError, match='pool/count is a int: only arrays'):
        saved.save(2, {'pool': {'count': 3}}, {})


def test_two_leaves_of_one_name_are_refused(saved):
    with pytest.raises(CheckpointError, match="'a/b' is empty or taken"):
        saved.save(2, {'a/b': jnp.ones(1), 'a': {'b': jnp.ones(1)}}, {})


def test_the_saved_values_outlive_the_donation_of_their_buffers(saved):
    donate = jax.jit(lambda x: x + 1, donate_argnums=0)
    w = jnp.arange(8.0)
    saved.save(1, {'w': w}, {})
    w = donate(w)
    restored, _ = saved.restore(1, placed({'w': w}))
    again = donate(restored['w'])
    np.testing.assert_array_equal(w, np.arange(8) + 1)
    np.testing.assert_array_equal(again, np.arange(8) + 1)
    with pytest.raises(CheckpointError, match='w was donated'):
        saved.save(2, {'w': restored['w']}, {})


def test_the_newest_steps_stay_and_older_ones_go(tmp_path):
    saved = Checkpoints(tmp_path, keep=2)
    for step in (1, 5, 10, 200):
        saved.save(step, {'w': jnp.full((2,), step, jnp.float32)}, {})
    assert sorted(place.name for place in (tmp_path / 'checkpoints').iterdir()) == ['00000010', '00000200']
    restored, _ = saved.restore(10, placed({'w': jnp.ones(2)}))
    assert saved.latest() == 200 and float(restored['w'][0]) == 10


def test_a_run_only_goes_forward(saved):
    saved.save(4, {'w': jnp.ones(2)}, {})
    for step in (3, 4):
        with pytest.raises(CheckpointError, match='never rewrites a sound step'):
            saved.save(step, {'w': jnp.zeros(2)}, {})
    restored, _ = saved.restore(4, placed({'w': jnp.ones(2)}))
    assert float(restored['w'][0]) == 1


def spoil(place: pathlib.Path, how: str) -> None:
    """Breaks a step in one of the ways in which disks and people do."""
    biggest = max((place / 'arrays').rglob('d/*'), key=lambda path: path.stat().st_size)
    raw = biggest.read_bytes()
    match how:
        case 'truncated':
            biggest.write_bytes(raw[: len(raw) // 2])
        case 'flipped':
            middle = len(raw) // 2
            biggest.write_bytes(raw[:middle] + bytes([raw[middle] ^ 1]) + raw[middle + 1 :])
        case 'lost':
            biggest.unlink()
        case 'unsealed':
            (place / 'seal.json').unlink()
        case 'half a seal':
            (place / 'seal.json').write_text((place / 'seal.json').read_text()[:-20])
        case 'edited seal':
            seal = json.loads((place / 'seal.json').read_text())
            (place / 'seal.json').write_text(json.dumps(seal | {'progress': {'step': 9}}))


@pytest.mark.parametrize('how', ['truncated', 'flipped', 'lost', 'unsealed', 'half a seal', 'edited seal'])
def test_a_broken_step_is_skipped_by_name_and_replaced_when_the_run_comes_by_again(tmp_path, how):
    arrays = {'w': jax.random.normal(jax.random.key(0), (64, 64))}
    before = Checkpoints(tmp_path)
    for step in (1, 2):
        before.save(step, arrays, {'step': step})
    spoil(tmp_path / 'checkpoints' / '00000002', how)

    resumed = Checkpoints(tmp_path)
    with pytest.warns(RuntimeWarning, match='skipping checkpoint .*00000002: '):
        assert resumed.latest() == 1
    with pytest.raises(CheckpointError, match='00000002: '):
        resumed.restore(2, placed(arrays))
    resumed.save(2, arrays, {'step': 2})
    with warnings.catch_warnings():
        warnings.simplefilter('error')
        assert Checkpoints(tmp_path).latest() == 2


SAVE_FOR_EVER = """
import sys, pathlib, itertools, jax.numpy as jnp
from mallm.io.checkpoint import Checkpoints
saved = Checkpoints(pathlib.Path(sys.argv[1]), keep=2)
for step in itertools.count((saved.latest() or 0) + 1):
    arrays = {'w': jnp.full((256, 64), step, jnp.float32), 'b': jnp.full((8,), step, jnp.int32)}
    saved.save(step, arrays, {'step': step})
    print(step, flush=True)
"""


@pytest.mark.filterwarnings('ignore:skipping checkpoint')
def test_a_kill_at_any_moment_leaves_a_step_that_restores(tmp_path):
    like = placed({'w': jnp.zeros((256, 64)), 'b': jnp.zeros(8, jnp.int32)})
    moments = random.Random(0)
    newest = 0
    for _ in range(5):
        child = run_python(SAVE_FOR_EVER, str(tmp_path), devices=8)
        printed = newest
        for _ in range(moments.randint(1, 4)):
            printed = int(child.stdout.readline())
        time.sleep(moments.uniform(0.0, 0.08))
        child.kill()
        printed = max([printed, *map(int, child.communicate()[0].split())])

        saved = Checkpoints(tmp_path)
        step = saved.latest()
        assert step is not None and printed <= step <= printed + 1  # a step that was reported saved is never lost
        restored, progress = saved.restore(step, like)
        assert progress == {'step': step}
        assert np.all(restored['w'] == step) and np.all(restored['b'] == step)
        saved.close()
        newest = step


def test_saving_says_nothing_on_the_console(tmp_path, capfd):
    saved = Checkpoints(tmp_path)
    saved.save(1, learner(), {})
    saved.restore(1, placed(learner()))
    saved.close()
    assert capfd.readouterr() == ('', '')


def test_a_process_that_comes_late_to_a_restore_is_waited_for(tmp_path):
    """A38: process 0 comes 20 s late."""
    code = """
import sys, time, pathlib, numpy as np
jax.config.update('jax_cpu_collectives_implementation', 'gloo')
jax.distributed.initialize(sys.argv[2], num_processes=2, process_id=int(sys.argv[3]))
from jax.sharding import *
from mallm.io.checkpoint import Checkpoints
over = NamedSharding(Mesh(np.array(jax.devices()), 'x'), PartitionSpec('x'))
w = jax.make_array_from_callback((8,), over, lambda index: np.arange(8, dtype=np.float32)[index])
saved = Checkpoints(pathlib.Path(sys.argv[1]))
saved.save(1, {'w': w}, {})
if jax.process_index() == 0:
    time.sleep(20)
back, _ = saved.restore(1, {'w': w})
assert all(np.array_equal(shard.data, np.arange(8)[shard.index]) for shard in back['w'].addressable_shards)
"""
    address = f'127.0.0.1:{free_port()}'
    for process in [run_python(code, str(tmp_path), address, str(i), devices=2) for i in range(2)]:
        finished(process)
