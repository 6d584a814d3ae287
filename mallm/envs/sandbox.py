"""Runs programs that a model wrote, each in an interpreter of its own, and says what became of them as a value.

`run(program, stdin, limits)` hands the text to one of a few helper processes (`sandbox_child.py`), each of which was
started by exec, so that nothing of this process, which may hold a GPU and 40 GB of address space, is ever forked. The
helper forks a warm interpreter for each program. Streams come back through pipes that are read here, up to a cap; the
verdict is made here, from the wait status that the kernel told the helper. Whatever a program prints, writes or
patches is its own output and nothing else.

Which walls stand is found out by a program that tries them when a helper starts; see `Walls`. A failure of the sandbox
itself is a `SandboxError`, never a verdict: no answer may earn nothing because a machine was broken. But a program that
two helpers did not survive, where a third one starts and runs its test program, has been killed.
"""

import atexit
import collections
import concurrent.futures
import dataclasses
import functools
import os
import platform
import sys
import threading
import time
from collections.abc import Sequence

from mallm.envs.sandbox_helper import (
    DEFAULT,
    KINDS,
    Helper,
    HelperLost,
    Limits,
    SandboxError,
    Status,
    Verdict,
    Walls,
)

__all__ = ['DEFAULT', 'KINDS', 'Limits', 'Sandbox', 'SandboxError', 'Status', 'Verdict', 'Walls', 'run', 'shared']


class Sandbox:
    """A few helpers, started as they are needed, for any number of threads.

    Attributes:
      workers: most helpers, and so most programs at the same time.
      packages: folders whose packages programs may import; they are shown read-only.
      modules: what each helper imports once, so that its programs need not.
      strong: False puts up the weak walls even where the kernel would allow more, for tests.
    """

    def __init__(
        self,
        workers: int | None = None,
        packages: Sequence[str] = (),
        modules: Sequence[str] = (),
        *,
        strong: bool = True,
    ) -> None:
        if not sys.platform.startswith('linux'):
            raise SandboxError(f'platform {platform.system()!r}: model-written programs run on Linux only; use a VM')
        self.workers = workers or len(os.sched_getaffinity(0))
        self._shown = tuple(packages), tuple(modules)
        self._strong, self._reason = strong, '' if strong else 'not wanted'
        self._idle: collections.deque[Helper] = collections.deque()
        self._places = threading.Semaphore(self.workers)
        self._walls: Walls | None = None
        self._threads = concurrent.futures.ThreadPoolExecutor(self.workers, 'mallm-sandbox')

    def run(self, program: str, stdin: str = '', limits: Limits = DEFAULT) -> Verdict:
        """What becomes of a program. Blocks; call it from as many threads as there are workers.

        Raises:
          SandboxError: a wall that `limits.isolated` demands is missing, or the sandbox itself failed twice.
        """
        if limits.isolated and self.walls.missing:
            raise SandboxError(
                f'{self.walls}: isolation was asked for; allow user namespaces (sysctl user.max_user_namespaces, '
                'AppArmor, seccomp of the container), or run without --task.require-isolation'
            )
        started = time.monotonic()
        lost = False
        try:
            return self._attempt(program, stdin, limits)
        except SandboxError as error:
            lost = isinstance(error, HelperLost)
        try:
            return self._attempt(program, stdin, limits)  # with another helper
        except HelperLost:
            if not lost:
                raise
        with self._places:
            self._idle.append(self._new())
        return Verdict('killed', '', '', 0.0, time.monotonic() - started)

    def run_all(self, jobs: Sequence[tuple[str, str]], limits: Limits = DEFAULT) -> list[Verdict]:
        """Verdicts on (program, stdin) pairs, as many at a time as there are workers."""
        return list(self._threads.map(lambda job: self.run(job[0], job[1], limits), jobs))

    @property
    def walls(self) -> Walls:
        """Which walls stand; starts a helper if none has been yet."""
        if self._walls is None:
            with self._places:
                self._idle.append(self._new())
        assert self._walls is not None
        return self._walls

    def _attempt(self, program: str, stdin: str, limits: Limits) -> Verdict:
        with self._places:
            try:
                helper = self._idle.pop()
            except IndexError:
                helper = self._new()
            verdict = None
            try:
                verdict = helper.run(program, stdin, limits)
                return verdict
            finally:
                if verdict is None:
                    helper.close()
                else:
                    self._idle.append(helper)

    def _new(self) -> Helper:
        """A helper with the strong walls, or with the weak ones where those cannot be."""
        if self._strong:
            try:
                helper = Helper(True, *self._shown)
                self._walls = helper.walls
                return helper
            except SandboxError as error:
                if self._walls is not None:
                    raise
                self._strong, self._reason = False, str(error)
        helper = Helper(False, *self._shown)
        self._walls = dataclasses.replace(helper.walls, reason=self._reason + ('' if helper.apart else same_user()))
        return helper

    def close(self) -> None:
        """Ends all idle helpers."""
        self._threads.shutdown()
        while self._idle:
            self._idle.pop().close()


def same_user() -> str:
    """That programs have the rights of this process, and under root why."""
    said = f'; programs run as user {os.geteuid()}, as this process does'
    if os.geteuid():
        return said
    return f'{said}: it lacks capabilities to change user, or other users cannot read {sys.base_prefix}'


@functools.cache
def of_process(pid: int) -> Sandbox:
    """The sandbox that everything in one process shares; a forked process gets its own."""
    sandbox = Sandbox()
    atexit.register(sandbox.close)
    return sandbox


def shared() -> Sandbox:
    return of_process(os.getpid())


def run(program: str, stdin: str = '', limits: Limits = DEFAULT) -> Verdict:
    """`Sandbox.run` of the shared sandbox."""
    return shared().run(program, stdin, limits)
