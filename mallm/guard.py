"""Ends every process of a run, with a message that names step and host, when one of them can't go on."""

import contextlib
import dataclasses
import json
import logging
import os
import pathlib
import socket
import subprocess
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from typing import Any

import jax

from mallm import epitaph
from mallm.hosts import Hosts, agreed

GIVEN_UP = 75
"""Exit status of a process that ended because the run cannot go on (EX_TEMPFAIL: start it again with --resume)."""
FOLDER = 'hosts'


@dataclasses.dataclass(frozen=True)
class Sign:
    """A sign of life, as a process leaves it in the run folder.

    Attributes:
      attempt: which start of the run it belongs to.
      host: index of the process, and `name` of its machine.
      beat: grows with every sign.
      step, stage: where it is; `place` grows when that changes.
      fault: why it gives up, or empty.
    """

    attempt: int
    host: int
    name: str
    beat: int = 0
    place: int = 0
    step: int = 0
    stage: str = 'start'
    fault: str = ''

    def __str__(self) -> str:
        return f'host {self.host} ({self.name}), step {self.step}, stage {self.stage!r}'


class Guard:
    """Ends this process, with a message that names step and host, when any process of the run can't go on.

    Each process writes a sign of life about once a second and reads those of the others. The run ends when one of
    them is silent, or stays too long at one stage, or has failed. Because no process waits for another in here, all
    of them end, each within the limit and some seconds. (A process that was stopped ends when it is continued.)

    A process that is killed can't speak; `epitaph`, its child, does it in its place.

    The signs are files in `folder`, which all processes must see, as they must see the checkpoints.
    """

    def __init__(
        self,
        folder: pathlib.Path,
        attempt: int,
        *,
        host: int,
        count: int,
        stall_s: float,
        silence_s: float,
        end: Callable[[int], Any] = os._exit,
    ) -> None:
        self._folder, self._count, self._stall_s, self._silence_s, self._end = folder, count, stall_s, silence_s, end
        self._period = min(1.0, silence_s / 5)
        self._folder.mkdir(parents=True, exist_ok=True)
        self._mine = Sign(attempt, host, socket.gethostname())
        self._heard = {i: Sign(attempt, i, 'not heard of yet') for i in range(count)}
        self._beat_at = dict.fromkeys(range(count), time.monotonic())
        self._place_at = dict(self._beat_at)
        self._done = threading.Event()
        self._lock = threading.Lock()
        self._thread = threading.Thread(target=self._run, name='guard', daemon=True)

    def at(self, step: int, stage: str) -> None:
        """Says that this process now begins a stage of a step."""
        with self._lock:
            self._mine = dataclasses.replace(self._mine, step=step, stage=stage, place=self._mine.place + 1)
        self._leave(str(self._mine))

    def __enter__(self) -> 'Guard':
        command = [sys.executable, '-I', '-S', epitaph.__file__, str(self._folder), str(self._mine.host)]
        self._epitaph = subprocess.Popen(command, stdin=subprocess.PIPE, text=True)
        self._leave(str(self._mine))
        self._thread.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, *_: object) -> None:
        self._done.set()
        self._thread.join()
        if error is not None:  # the others wait for this process, and its own exit would wait for them
            own = f'{self._mine}: {kind.__name__ if kind else ""}: {error}'
            self._write(own)
            logging.getLogger(__name__).critical('%s', ''.join(traceback.format_exception(error)))
            self._give_up(self._cause() or own)
        else:
            self._write(epitaph.FINISHED)
            self._leave(epitaph.FINISHED)
            self._epitaph.communicate()

    def _leave(self, word: str) -> None:
        """Tells the child what to say in case of death."""
        with contextlib.suppress(BrokenPipeError):  # it was killed; this process goes on without it
            pipe = self._epitaph.stdin
            assert pipe is not None
            pipe.write(word + '\n')
            pipe.flush()

    def _run(self) -> None:
        while not self._done.wait(self._period):
            with contextlib.suppress(OSError):  # one beat is missed; a file system that is gone ends in silence
                self._write('')
            self._read()
            fault = self._fault()
            if fault and not self._done.is_set():
                self._give_up(fault)

    def _write(self, fault: str) -> None:
        with self._lock:
            self._mine = dataclasses.replace(self._mine, beat=self._mine.beat + 1, fault=fault)
            sign = self._mine
        path = self._folder / f'{sign.host}.json'
        draft = path.with_suffix('.draft')
        draft.write_text(json.dumps(dataclasses.asdict(sign)))
        draft.replace(path)

    def _read(self) -> None:
        for host in range(self._count):
            with contextlib.suppress(OSError, ValueError):  # not there yet, or replaced while it was read
                sign = Sign(**json.loads((self._folder / f'{host}.json').read_text()))
                before = self._heard[host]
                if sign.attempt != before.attempt or sign.beat == before.beat:
                    continue
                self._heard[host], self._beat_at[host] = sign, time.monotonic()
                if sign.place != before.place or before.beat == 0:
                    self._place_at[host] = time.monotonic()

    def _cause(self) -> str:
        """Which other process's end may have broken this one's collective: it has failed, or gives no more signs."""
        self._read()
        if failed := self._failed():
            return failed
        asked = time.monotonic()
        time.sleep(2.5 * self._period)
        self._read()
        silent = [
            sign for i, sign in self._heard.items() if self._beat_at[i] < asked and sign.fault != epitaph.FINISHED
        ]
        return '; '.join(f'{sign}: no sign of life since then' for sign in silent if sign.host != self._mine.host)

    def _failed(self) -> str:
        others = [sign for sign in self._heard.values() if sign.host != self._mine.host]
        return next((f'{s} gave up: {s.fault}' for s in others if s.fault and s.fault != epitaph.FINISHED), '')

    def _fault(self) -> str:
        """Why the run can't go on, or nothing."""
        if failed := self._failed():
            return failed
        now = time.monotonic()
        for host, sign in self._heard.items():
            if sign.fault == epitaph.FINISHED:
                continue
            if (silent := now - self._beat_at[host]) > self._silence_s:
                return f'{sign}: no sign of life for {silent:.0f} s (limit {self._silence_s:g} s)'
        at_work = [host for host, sign in self._heard.items() if sign.fault != epitaph.FINISHED]
        slowest = min(at_work, key=lambda host: (self._heard[host].place, host), default=self._mine.host)
        stalled = now - self._place_at[slowest]
        if at_work and stalled > self._stall_s:
            return f'{self._heard[slowest]}: still there after {stalled:.0f} s (limit {self._stall_s:g} s)'
        return ''

    def _give_up(self, fault: str) -> None:
        self._write(fault)
        others = '; '.join(
            f'{sign}, heard {time.monotonic() - self._beat_at[host]:.0f} s ago'
            for host, sign in self._heard.items()
            if host != self._mine.host
        )
        logging.getLogger(__name__).critical(
            'The run ends: %s\nThis is %s. Others: %s. Start all of them again with --resume.',
            fault,
            self._mine,
            others,
        )
        logging.shutdown()
        self._leave(epitaph.FINISHED)
        if self._mine.host == 0:  # it serves the coordinator, without which JAX would abort the others unheard
            time.sleep(5 * self._period)
        self._end(GIVEN_UP)


class NoGuard:
    """The same verbs, for a run of one process."""

    def at(self, step: int, stage: str) -> None:
        pass


NO_GUARD = NoGuard()


@contextlib.contextmanager
def guarded(folder: pathlib.Path, hosts: Hosts) -> Iterator[Guard | NoGuard]:
    """Watches over the processes of a run while it goes on."""
    if jax.process_count() == 1:
        yield NoGuard()
        return
    attempt = agreed(time.time_ns())
    with Guard(
        folder / FOLDER,
        attempt,
        host=jax.process_index(),
        count=jax.process_count(),
        stall_s=hosts.stall_s,
        silence_s=hosts.silence_s,
    ) as guarding:
        yield guarding
