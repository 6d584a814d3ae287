"""The living parts of a run: how they are made, how the engine gets new weights, what a checkpoint holds."""

import contextlib
import dataclasses
import pathlib
from collections.abc import Mapping
from typing import Any

import jax

from mallm import hosts
from mallm.algo import Algorithm, losses
from mallm.experiment import Experiment
from mallm.guard import NO_GUARD, Guard, NoGuard
from mallm.io.base import require_same_base, restore_base
from mallm.io.checkpoint import Checkpoints
from mallm.io.log import Silent, Sink
from mallm.learn.pool import Pool
from mallm.learn.state import LearnerState
from mallm.learn.update import Updater
from mallm.policies import make_policies, within_context
from mallm.rollout import tree
from mallm.rollout.chat import Tokenizer
from mallm.rollout.jax_engine import JaxEngine
from mallm.rollout.sglang import SGLangEngine
from mallm.rollout.workers import Workers
from mallm.serving import MakeEngine, embedded
from mallm.stored import settings_of


@dataclasses.dataclass(frozen=True)
class Run:
    """The living parts of an experiment. Pools, engine, sink and checkpoints are the only stateful objects."""

    experiment: Experiment
    algorithm: Algorithm
    tokenizer: Tokenizer
    engine: JaxEngine | SGLangEngine | Workers
    pools: Mapping[str, Pool]
    base: Pool | None
    updater: Updater
    cloner: Updater
    base_cloner: Updater | None
    sink: Sink | Silent
    guard: Guard | NoGuard
    checkpoints: Checkpoints
    folder: pathlib.Path

    @property
    def frozen(self) -> Any:
        """The parameters that every pool adapts, or None where each pool has all its own."""
        return self.base.state.params if self.base else None

    def stage(self, cast: Mapping[str, str], temperature: float | None = None) -> tree.Stage:
        return tree.Stage(self.experiment.sampler(temperature), self.engine, self.tokenizer, cast)

    def close(self) -> None:
        self.checkpoints.close()
        if isinstance(self.engine, Workers):
            self.engine.close()


def build(
    experiment: Experiment,
    folder: pathlib.Path,
    resume_at: int | None,
    guard: Guard | NoGuard = NO_GUARD,
    make_engine: MakeEngine = embedded,
) -> Run:
    """Makes every part."""
    algorithm, p, asked = experiment.algorithm.build(), make_policies(experiment), experiment
    experiment = within_context(asked, p.module.arch)
    make_updater = lambda module, shardings, objective: Updater(  # noqa: E731
        module=module, objective=objective, transform=p.transform, mesh=p.mesh, shardings=shardings,
        entropy_range=experiment.algorithm.entropy_range, logits_room=experiment.learning.logits_mib << 20,
    )  # fmt: skip
    with contextlib.ExitStack() as where_it_fails:
        engine = make_engine(experiment, p, folder)
        if isinstance(engine, Workers):
            where_it_fails.callback(engine.close)
        checkpoints = Checkpoints(folder)
        where_it_fails.callback(checkpoints.close)
        sink = sink_of(asked, folder, resume_at)
        where_it_fails.callback(sink.close, failed=True)
        run = Run(
            experiment,
            algorithm,
            p.tokenizer,
            engine,
            p.pools,
            p.base,
            make_updater(p.module, p.shardings, algorithm.objective),
            make_updater(p.module, p.shardings, losses.reinforce),
            make_updater(p.whole, p.whole_shardings, losses.reinforce) if experiment.clones_base else None,
            sink,
            guard,
            checkpoints,
            folder,
        )
        load(run, 0, base=True)
        where_it_fails.pop_all()
    return run


def sink_of(experiment: Experiment, folder: pathlib.Path, resume_at: int | None) -> Sink | Silent:
    """Process 0 writes."""
    if jax.process_index():
        return Silent()
    settings = settings_of(experiment)
    return Sink(folder, name=folder.name, config=settings, wandb_mode=experiment.wandb, resume_at=resume_at)


def load(run: Run, version: int, *, base: bool = False) -> None:
    """The engine samples from what the learner holds now; from another `base` too, where that has changed."""
    if base:
        run.engine.load_base(hosts.local(run.frozen))
    for name, pool in run.pools.items():
        run.engine.load(name, hosts.local(pool.state.params), version)


def save(run: Run, step: int, progress: Mapping[str, Any]) -> None:
    """Everything a resumed run needs, in one atomic step. All randomness follows from (seed, step)."""
    run.guard.at(step, 'save')
    run.sink.mark(step)
    run.checkpoints.save(step, {name: savable(pool.state) for name, pool in run.pools.items()}, dict(progress))


def savable(state: LearnerState) -> dict[str, Any]:
    parts = {name: vars(state)[name] for name in ('updates', 'params', 'moments', 'entropy_coefficient', 'reference')}
    return {name: part for name, part in parts.items() if part is not None}


def restore(run: Run, step: int) -> tuple[int, dict[str, Any]]:
    """Puts a checkpoint into the pools, on whatever mesh this run has."""
    like = {name: savable(pool.state) for name, pool in run.pools.items()}
    arrays, progress = run.checkpoints.restore(step, like)
    for name, pool in run.pools.items():
        pool.state = dataclasses.replace(pool.state, **arrays[name])
    if run.base and run.experiment.clones_base:
        base = restore_base(run.folder, run.frozen)
        run.base.state = dataclasses.replace(run.base.state, params=base, moments=None)
    elif run.base:  # it is what it was made, or read, as
        require_same_base(run.frozen, progress['base'])
    load(run, step, base=True)
    return step, progress
