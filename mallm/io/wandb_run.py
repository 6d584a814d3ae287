"""The wandb side of a run. A run outlives wandb: whatever wandb cannot do is said once, and the files still have it.

Every axis ('rollout', 'update/<pool>', 'eval', …) counts its own steps. wandb's one global step would drop whatever
lies behind it, so it is never given; each axis declares an x-axis of its own.
"""

import functools
import os
import pathlib
from collections.abc import Callable, Mapping
from typing import Any, Literal

import wandb

PROJECT = 'mallm'
Mode = Literal['offline', 'online', 'disabled']
MODES: tuple[Mode, ...] = ('offline', 'online', 'disabled')
START_S, FINISH_S = 30, 120
"""Longest wait in seconds for wandb's server when a run starts and when it ends."""


def choose_mode(mode: str) -> Mode:
    """'auto' becomes what WANDB_MODE says, else 'online' where a wandb login is found and 'offline' elsewhere."""
    wanted = os.environ.get('WANDB_MODE', '') if mode == 'auto' else mode
    for known in MODES:
        if wanted == known:
            return known
    if mode != 'auto':
        raise ValueError(f'wandb_mode={mode!r}: must be auto, {" or ".join(MODES)}')
    wandb.setup(settings=wandb.Settings(silent=True))
    return 'online' if wandb.login(prompt=False, verify=False) else 'offline'


def start_wandb(
    folder: pathlib.Path,
    *,
    name: str,
    group: str,
    config: Mapping[str, Any],
    mode: str,
    say: Callable[[str], None],
) -> 'WandbRun | None':
    """One wandb run in `folder`/wandb, None where wandb is disabled. Says where it is to be found.

    Raises:
      ValueError: unknown mode.
      wandb.Error, OSError: it cannot even record offline.
    """
    init = functools.partial(_init, folder, name=name, group=group, config=config)
    try:
        chosen = choose_mode(mode)
        run = None if chosen == 'disabled' else init(mode=chosen)
    except (wandb.Error, OSError) as cause:
        say(f'wandb cannot go online ({type(cause).__name__}: {cause}); it records offline instead')
        run = init(mode='offline')
    if run is None:
        return None
    attempt = folder / 'wandb' / pathlib.Path(run.dir).parent.name
    say(f'wandb: offline; to upload it: wandb sync {attempt}' if run.offline else f'wandb: {run.url}')
    return WandbRun(run, say)


class WandbRun:
    """A started wandb run that may die without taking the run along."""

    def __init__(self, run: wandb.Run, say: Callable[[str], None]) -> None:
        self._run, self._say = run, say
        self._axes: set[str] = set()
        self._alive = True

    def write(self, axis: str, step: int, metrics: Mapping[str, float]) -> None:
        values = {f'{axis}/step': step, **{f'{axis}/{name}': value for name, value in metrics.items()}}
        self._try(lambda: self._write(axis, values))

    def summary(self, values: Mapping[str, Any]) -> None:
        self._try(lambda: self._run.summary.update(dict(values)))

    def close(self, *, failed: bool) -> None:
        self._try(lambda: self._run.finish(exit_code=int(failed)))
        self._alive = False

    def _write(self, axis: str, values: dict[str, float]) -> None:
        if axis not in self._axes:
            self._axes.add(axis)
            self._run.define_metric(f'{axis}/step')
            self._run.define_metric(f'{axis}/*', step_metric=f'{axis}/step')
        self._run.log(values)

    def _try(self, action: Callable[[], None]) -> None:
        if not self._alive:
            return
        try:
            action()
        except (wandb.Error, OSError) as cause:
            self._alive = False
            self._say(f'wandb stopped ({type(cause).__name__}: {cause}); metrics.jsonl goes on without it')


def _init(folder: pathlib.Path, *, name: str, group: str, config: Mapping[str, Any], mode: Mode) -> wandb.Run:
    settings = wandb.Settings(
        silent=True,  # the display is ours
        console='off',  # wandb must not wrap stdout: the summary line is machine-read
        save_code=False,
        disable_git=True,
        init_timeout=START_S,
        finish_timeout=FINISH_S,
    )
    return wandb.init(
        project=os.environ.get('WANDB_PROJECT', PROJECT),
        dir=str(folder),
        name=name,
        group=group,
        config=dict(config),
        mode=mode,
        reinit='create_new',
        settings=settings,
    )
