"""Keys are addressed: the same place has the same key in any order, batch or process, and no two places share one."""

import itertools
import os
import pathlib
import random
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np

from mallm import rng

ROOT = pathlib.Path(__file__).parents[1]


def bits(keys: jax.Array) -> list[tuple[int, ...]]:
    return [tuple(row) for row in np.asarray(jax.random.key_data(keys)).reshape(-1, 2).tolist()]


def test_keys_for_gives_row_by_row_what_key_for_gives():
    root = jax.random.key(7)
    paths = np.int32([[0, 0, 0], [0, 0, 1], [3, 1, 2], [1, 2**31 - 1, 5]])
    assert bits(rng.keys_for(root, paths)) == [bits(rng.key_for(root, *path.tolist()))[0] for path in paths]


def test_a_key_depends_on_its_own_place_and_not_on_what_it_is_asked_for_with():
    root = jax.random.key(0)
    paths = np.int32(list(itertools.product(range(3), range(4), range(2))))
    order = random.Random(1).sample(range(len(paths)), len(paths))
    together, shuffled = bits(rng.keys_for(root, paths)), bits(rng.keys_for(root, paths[order]))
    assert shuffled == [together[i] for i in order]
    assert bits(rng.keys_for(root, paths[5:6])) == [together[5]]


def test_order_of_the_parts_and_the_root_both_count():
    root = jax.random.key(0)
    keys = [rng.key_for(root, 1, 2), rng.key_for(root, 2, 1), rng.key_for(jax.random.key(1), 1, 2)]
    assert len({bits(key)[0] for key in keys}) == 3


def test_no_two_candidates_of_a_run_share_a_key():
    """A17. 2 streams x 3 steps x 8 environments x 2 siblings x 3 turns x 2 roles x 8 candidates = 4 608 places."""
    roles = [rng.number_of(role) for role in ('tool', 'plan')]
    streams = (rng.TRAIN, rng.EVALUATE)
    paths = list(itertools.product(streams, range(3), range(8), range(2), range(3), roles, range(8)))
    assert len(paths) == 4608
    assert len(set(bits(rng.keys_for(jax.random.key(0), jnp.int32(paths))))) == 4608


def test_no_two_places_share_a_host_seed_whatever_their_depth():
    paths = [path for depth in range(4) for path in itertools.product(range(5), repeat=depth)]
    seeds = {rng.seed_for(root, *path) for root in range(3) for path in paths}
    # 1 + 5 + 25 + 125 = 156 paths; (1,), (1, 0) and (1, 0, 0) are three places
    assert len(paths) == 156 and len(seeds) == 3 * 156
    assert all(0 <= seed < 2**64 for seed in seeds)


def test_host_seeds_and_numbers_of_names_are_the_same_in_every_process():
    code = (
        "from mallm import rng\nprint(rng.seed_for(3, rng.TRAIN, 14, 15), rng.number_of('tool'), rng.number_of('plan'))"
    )
    told = [
        subprocess.run(
            [sys.executable, '-c', code],
            env=os.environ | {'PYTHONHASHSEED': hash_seed, 'PYTHONPATH': str(ROOT)},
            capture_output=True,
            text=True,
            check=True,
        ).stdout.split()
        for hash_seed in ('1', '2')
    ]
    here = [rng.seed_for(3, rng.TRAIN, 14, 15), rng.number_of('tool'), rng.number_of('plan')]
    assert told == [list(map(str, here))] * 2


def test_a_name_becomes_a_number_that_fits_an_int32():
    names = ['tool', 'plan', 'solo', 'shared', '', 'ä', 'x' * 1000]
    numbers = [rng.number_of(name) for name in names]
    assert len(set(numbers)) == len(names)
    assert all(0 <= number < 2**31 for number in numbers)


def test_the_streams_of_a_run_are_different_places():
    streams = (rng.TRAIN, rng.EVALUATE, rng.WARM_START, rng.INIT, rng.SHUFFLE)
    assert len({rng.seed_for(0, stream, 1, 2) for stream in streams}) == 5
