"""The sink: where a run writes what it measures (files, wandb) and shows it (a live panel, or a plain line).

Written by process 0 only; other processes use `Silent`. This is the one file of the project that prints: the summary
as one JSON line on stdout, everything for the eye on stderr.
"""

import pathlib
import resource
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Self

from rich.console import Console
from rich.live import Live
from rich.panel import Panel
from rich.text import Text

from mallm.io import display, files

if TYPE_CHECKING:
    from mallm.io.wandb_run import WandbRun

PLAIN_EVERY_S = 10.0
MOMENTS = ('before', 'after')


def stdout_console() -> Console:
    """Where a program that a person watches, not a run, writes."""
    return Console(markup=False, highlight=False, soft_wrap=True)


class Screen:
    """The eye's side of a run, on stderr: notes, and either a live panel or a plain line about every 10 s."""

    def __init__(
        self,
        name: str,
        minutes: Callable[[], tuple[float, float]],
        *,
        live: bool | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._console = Console(stderr=True, markup=False, highlight=False, soft_wrap=True)
        self._name, self._minutes, self._clock = name, minutes, clock
        self._latest: dict[str, tuple[int, dict[str, float]]] = {}
        self._due: float | None = None
        self._stale = False
        self._wants_live = self._console.is_terminal if live is None else live
        self._live: Live | None = None

    def start(self) -> None:
        if self._wants_live:
            self._live = Live(
                console=self._console, get_renderable=self._panel, refresh_per_second=1, redirect_stdout=False
            )
            self._live.start()

    def show(self, axis: str, step: int, metrics: Mapping[str, float]) -> None:
        """Takes in the newest row of an axis; rows of one step add up (greedy and sampled evaluation, say)."""
        before, known = self._latest.get(axis, (step, {}))
        self._latest[axis] = (step, {**known, **metrics} if before == step else dict(metrics))
        self._stale = True
        if self._live is None and (self._due is None or self._clock() >= self._due):
            self._plain()

    def say(self, text: str, style: str = '') -> None:
        self._console.print(Text(display.printable(text), style=style))

    def stop(self) -> None:
        """Leaves the last state on the screen."""
        if self._live is not None:
            self._live.stop()
            self._live = None
        elif self._stale:
            self._plain()
        self._stale = False

    def _plain(self) -> None:
        self._due = self._clock() + PLAIN_EVERY_S
        self._stale = False
        self.say(display.line(self._name, display.fields(self._latest, *self._minutes())))

    def _panel(self) -> Panel:
        return display.panel(self._name, display.fields(dict(self._latest), *self._minutes()))


class Sink:
    """Everything a run writes but its checkpoints. Use it in a `with`, so that the screen is given back on a failure.

    Args:
      folder: the run's own folder, created; a fresh run refuses one that already holds metrics.
      name: shown everywhere; a seed at its end ('sokoban_seed3') groups runs that differ in nothing else.
      config: what the run is, for config.json; secrets in it are blanked.
      wandb_mode: 'auto' is online where a wandb login is found and offline elsewhere; or 'offline', 'online',
        'disabled' (wandb is then not even imported).
      live: a live panel instead of plain lines; None asks whether stderr is a terminal.
      resume_at: None for a fresh run, else the first step that a resumed run will play: rows that the restored
        checkpoint did not have yet are cut off (`mark`), and a step done again replaces what was there. Where `config`
        is another than it was, config.json takes the new one, and its list `earlier` keeps what was until then: the
        step, the config, and the summary if there was one.
    """

    def __init__(
        self,
        folder: pathlib.Path,
        *,
        name: str,
        config: Mapping[str, Any],
        wandb_mode: str = 'auto',
        live: bool | None = None,
        resume_at: int | None = None,
    ) -> None:
        self.folder = pathlib.Path(folder)
        self.folder.mkdir(parents=True, exist_ok=True)
        _refuse_to_mix(self.folder, resume_at)
        self._axes: set[str] = set()
        self._warned: set[str] = set()
        self._recorded: set[str] = set()
        self._screen = Screen(name, self.minutes, live=live)
        clean = files.redact(config)
        self._keep_config(clean, resume_at)
        group = files.without_seed(name)
        label = name if resume_at is None else f'{name} (from step {resume_at})'
        self._wandb = self._start_wandb(wandb_mode, name=label, group=group, config=clean)
        self._rows = files.RowFile(self.folder / files.METRICS, resume_at)
        last = self._rows.kept[-1] if self._rows.kept else {'minutes': 0.0, 'cpu_minutes': 0.0}
        self._minutes_before = (last['minutes'], last['cpu_minutes'])
        self._started = (time.monotonic(), _cpu_seconds())
        self._rollouts = sum(row['axis'] == 'rollout' for row in self._rows.kept)
        self._screen.start()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        self.close(failed=kind is not None)

    def minutes(self) -> tuple[float, float]:
        """(wall minutes, CPU minutes of this process and its ended children) of the run, resumed parts included."""
        wall, cpu = time.monotonic() - self._started[0], _cpu_seconds() - self._started[1]
        return self._minutes_before[0] + wall / 60, self._minutes_before[1] + cpu / 60

    def write(self, axis: str, step: int, metrics: Mapping[str, float]) -> None:
        """One row of numbers. `axis` counts its own steps: 'rollout', 'update/<pool>', 'eval', 'warm_start', …"""
        self._check(axis, metrics)
        numbers = {name: value if isinstance(value, int) else float(value) for name, value in metrics.items()}
        self._append(axis, step, numbers)
        if self._wandb is not None:
            self._wandb.write(axis, step, numbers)
        self._screen.show(axis, step, numbers)
        if axis == 'rollout':
            self._rollouts += 1
            self._warn_early(step, numbers)

    def mark(self, step: int) -> None:
        """Says that all rows so far belong to the checkpoint about to be saved, from which `step` is played next."""
        self._append(files.MARK, step, {})

    def note(self, text: str) -> None:
        """A line for the human."""
        self._screen.say(text)

    def replays(self, when: str, replays: Sequence[Mapping[str, Any]]) -> None:
        """Adds replays to those 'before' or 'after' training; a resumed run starts the list anew."""
        if when not in MOMENTS:
            raise ValueError(f'when={when!r}: replays are kept {" or ".join(MOMENTS)} training')
        stored = files.read_json(self.folder / files.REPLAYS) or {moment: [] for moment in MOMENTS}
        kept = stored[when] if when in self._recorded else []
        self._recorded.add(when)
        files.write_json(self.folder / files.REPLAYS, {**stored, when: [*kept, *replays]})

    def summary(self, values: Mapping[str, Any]) -> None:
        """What came out, in summary.json and as the last line of stdout."""
        clean = files.redact(values)
        files.write_json(self.folder / files.SUMMARY, clean)
        if self._wandb is not None:
            self._wandb.summary(files.flatten(clean))
        self._screen.stop()
        print(files.dumps(clean), flush=True)

    def close(self, *, failed: bool = False) -> None:
        """Ends the display, the files and wandb; a second call does nothing."""
        self._screen.stop()
        self._rows.close()
        if self._wandb is not None:
            self._wandb.close(failed=failed)
            self._wandb = None

    def _append(self, axis: str, step: int, numbers: Mapping[str, float]) -> None:
        minutes, cpu_minutes = self.minutes()
        place = {'axis': axis, 'step': int(step), 'minutes': round(minutes, 4), 'cpu_minutes': round(cpu_minutes, 4)}
        self._rows.append({**place, **numbers})

    def _check(self, axis: str, metrics: Mapping[str, float]) -> None:
        if clash := [name for name in metrics if name in files.ROW_KEYS]:
            raise ValueError(f'metric {clash[0]!r} on {axis!r}: every row has this key already; give it another name')
        if axis in self._axes:
            return
        if axis == files.MARK:
            raise ValueError(f'axis {axis!r} is taken by `mark`; give it another name')
        if inside := [
            other for other in self._axes if f'{axis}/'.startswith(f'{other}/') or other.startswith(f'{axis}/')
        ]:
            raise ValueError(
                f'axis {axis!r} and axis {inside[0]!r} lie in each other: wandb could not tell whose steps count; '
                'write one with an underscore instead of the slash'
            )
        self._axes.add(axis)

    def _warn_early(self, step: int, numbers: Mapping[str, float]) -> None:
        if self._rollouts > display.EARLY_STEPS:
            return
        for subject, text in display.early_warnings(numbers):
            if subject not in self._warned:
                self._warned.add(subject)
                self._screen.say(f'WARNING (step {step}): {text}', style='bold yellow')

    def _keep_config(self, clean: Mapping[str, Any], resume_at: int | None) -> None:
        path = self.folder / files.CONFIG
        stored = files.read_json(path)
        if resume_at is None or stored is None:
            files.write_json(path, clean)
            return
        earlier = stored.pop(files.EARLIER, [])
        old, new = files.flatten(stored), files.flatten(clean)
        changed = [key for key in {**old, **new} if old.get(key) != new.get(key)]
        if changed:
            listed = ', '.join(f'{key} ({old.get(key)} -> {new.get(key)})' for key in changed)
            self.note(f'resumed with another config than {files.CONFIG} says: {listed}')
            summary = self.folder / files.SUMMARY
            until = {'step': resume_at, 'config': stored, 'summary': files.read_json(summary)}
            files.write_json(path, {**clean, files.EARLIER: [*earlier, until]})
            summary.unlink(missing_ok=True)

    def _start_wandb(self, mode: str, *, name: str, group: str, config: Mapping[str, Any]) -> 'WandbRun | None':
        if mode == 'disabled':
            return None
        from mallm.io.wandb_run import start_wandb  # wandb costs a second to import; only runs with it pay

        return start_wandb(self.folder, name=name, group=group, config=config, mode=mode, say=self._screen.say)


class Silent:
    """The same verbs, for the processes of a run that do not write."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def minutes(self) -> tuple[float, float]:
        return 0.0, 0.0

    def write(self, axis: str, step: int, metrics: Mapping[str, float]) -> None:
        pass

    def mark(self, step: int) -> None:
        pass

    def note(self, text: str) -> None:
        pass

    def replays(self, when: str, replays: Sequence[Mapping[str, Any]]) -> None:
        pass

    def summary(self, values: Mapping[str, Any]) -> None:
        pass

    def close(self, *, failed: bool = False) -> None:
        pass


def peak_rss_mib() -> float:
    """Peak resident memory of this process so far, MiB."""
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak / (1 << 20 if sys.platform == 'darwin' else 1 << 10)  # bytes there, KiB elsewhere


def _cpu_seconds() -> float:
    """User and system seconds of this process, all its threads, and the children it has waited for."""
    ended = resource.getrusage(resource.RUSAGE_CHILDREN)
    return time.process_time() + ended.ru_utime + ended.ru_stime


def _refuse_to_mix(path: pathlib.Path, resume_at: int | None) -> None:
    rows = path / files.METRICS
    if resume_at is None and rows.exists() and rows.stat().st_size:
        raise FileExistsError(
            f'{path} already holds the metrics of a run: resume it, choose another name, or remove it'
        )
