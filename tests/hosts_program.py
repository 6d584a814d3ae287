"""What the processes of `hosts_test` run: `python -m tests.hosts_program FOLDER WHAT PORT COUNT INDEX`."""

import functools
import pathlib
import sys
import time

import jax
import numpy as np
from jax.experimental import multihost_utils

from mallm import hosts
from mallm.algo import losses
from mallm.guard import guarded
from mallm.io.checkpoint import Checkpoints
from mallm.learn.pack import Packing, Row, pack
from mallm.learn.pool import Pool
from mallm.learn.state import make_state, optimiser
from mallm.learn.update import Knobs, Updater
from mallm.models.config import Architecture
from mallm.models.sharding import make_mesh
from mallm.models.transformer import Transformer


def rows() -> list[Row]:
    draw = np.random.default_rng(0)
    ids = lambda n: tuple(draw.integers(0, 16, n).tolist())  # noqa: E731
    return [
        Row(ids(5), (ids(4), ids(3)), ((-2.0,) * 4, (-2.5,) * 3), tuple(draw.normal(size=2).tolist()), (0.7,))
        for _ in range(8)
    ]


def trained(mesh_shape: tuple[int, int, int]) -> dict[str, np.ndarray]:
    """Parameters after three optimiser steps of two micro-batches, rescored, and the last metrics."""
    mesh = make_mesh(*mesh_shape)
    module = Transformer(Architecture(vocab=16, width=16, layers=1, heads=2, kv_heads=2, head_dim=8, ffn=32))
    transform = optimiser(clip=1.0, b1=0.9, b2=0.98, weight_decay=0.01)
    state, shardings = make_state(
        jax.random.key(0), module=module, transform=transform, mesh=mesh, entropy_coefficient=0.05,
        keeps_reference=True,
    )  # fmt: skip
    objective = functools.partial(losses.clipped_surrogate, low=0.2, high=0.28, cap=2.0)
    updater = Updater(module=module, objective=objective, transform=transform, mesh=mesh, shardings=shardings)
    pool = Pool('shared', state)
    for seed in range(3):
        steps = pack(rows(), Packing(0, 4), seed)
        steps = [[updater.rescored(pool.state, batch) for batch in micros] for micros in steps]
        told = pool.learn(updater, steps, Knobs(1e-2, kl=0.1))
    leaves = jax.tree_util.tree_leaves_with_path(hosts.local(pool.state.params))
    learned = {jax.tree_util.keystr(path): np.asarray(leaf) for path, leaf in leaves}
    return learned | {name: np.float32(told[name]) for name in ('loss', 'kl', 'entropy', 'grad_norm', 'tokens')}


def play(folder: pathlib.Path, what: str, limits: hosts.Hosts) -> None:
    """A run without any model: in every step each process has something that all of them need."""
    with guarded(folder, limits) as guard:
        for step in range(1000):
            guard.at(step, 'play')
            if step == 3 and limits.index == 1 and what == 'stall':
                time.sleep(1000)
            if step == 3 and limits.index == 1 and what == 'raise':
                raise ArithmeticError('the reward of env 5 broke')
            if step == 3 and what == 'save alone':
                guard.at(step, 'save')
                if limits.index == 0:
                    Checkpoints(folder).save(step, {'w': np.ones(2)}, {})
                multihost_utils.sync_global_devices('after the save')
            time.sleep(0.05)
            guard.at(step, 'gather')
            assert hosts.gathered([limits.index]) == [0, 1]


def main(folder: str, what: str, port: str, count: str, index: str) -> None:
    limits = hosts.Hosts(f'127.0.0.1:{port}', int(count), int(index), stall_s=15.0, silence_s=10.0)
    hosts.join(limits)
    if what != 'learn':
        play(pathlib.Path(folder), what, limits)
        return
    for shape in ((2, 1, 1), (1, 1, 2)):
        learned = trained(shape)
        if jax.process_index() == 0:
            np.savez(pathlib.Path(folder) / f'{shape}.npz', **learned)


if __name__ == '__main__':
    main(*sys.argv[1:])
