"""Run folders for tests that read them: a checkpoint of random parameters, as if a run had just saved it."""

import dataclasses
import json
import pathlib
import re
from typing import Any

import jax
import numpy as np

from mallm import run as parts
from mallm.experiment import (
    EvaluationSettings,
    Experiment,
    LoraSettings,
    ModelSettings,
    SamplingSettings,
    WarmStartSettings,
)
from mallm.io.base import save_base

TINY = Experiment(
    name='apart',
    pools={'tool': 'left', 'plan': 'right'},
    model=ModelSettings(width=16, layers=1, heads=2, kv_heads=1, head_dim=8, ffn=32, remat=False),
    sampling=SamplingSettings(envs=2, k=2, turns=1, max_tokens=4),
    warm_start=WarmStartSettings(steps=1),
    evaluation=EvaluationSettings(every=0, report_boards=6, replays=1),
    wandb='disabled',
)


def with_adapters(experiment: Experiment) -> Experiment:
    lora = LoraSettings(rank=2, alpha=3.0)
    return dataclasses.replace(experiment, model=dataclasses.replace(experiment.model, lora=lora))


def measured(folder: pathlib.Path, *also: str) -> list[dict[str, Any]]:
    """The rows of metrics.jsonl, without what depends on a machine's speed, on what it compiled before, and `also`."""
    of_a_machine = re.compile('|'.join(('minutes', 'seconds', 'per_s', 'compiles', 'rss', *also)))
    rows = [json.loads(line) for line in (folder / 'metrics.jsonl').read_text().splitlines()]
    return [{name: value for name, value in row.items() if not of_a_machine.search(name)} for row in rows]


def moved(tree: Any, seed: int) -> Any:
    """The same tree with random numbers, placed as it was."""
    draw = np.random.default_rng(seed)
    return jax.tree.map(
        lambda leaf: jax.device_put(np.float32(leaf + draw.normal(size=leaf.shape) * 0.4), leaf.sharding), tree
    )


def saved(experiment: Experiment, runs: pathlib.Path) -> tuple[pathlib.Path, parts.Run]:
    """A run folder, and the run that has just saved its first step there."""
    experiment = dataclasses.replace(experiment, runs=str(runs))
    folder = runs / experiment.folder_name
    run = parts.build(experiment, folder, None)
    if run.base and experiment.warm_start.steps:
        run.base.state = dataclasses.replace(run.base.state, params=moved(run.base.state.params, experiment.seed))
        save_base(folder, run.frozen)
    for number, pool in enumerate(run.pools.values()):
        pool.state = dataclasses.replace(pool.state, params=moved(pool.state.params, 10 * experiment.seed + number))
    parts.load(run, 1, base=True)
    parts.save(run, 1, {'training_cpu_minutes': 0.0})
    run.sink.close()
    return folder, run
