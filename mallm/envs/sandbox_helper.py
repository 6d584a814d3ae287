"""One helper process of the sandbox, what a program may use, and what is said of it; see `mallm.envs.sandbox`."""

import contextlib
import dataclasses
import json
import os
import pathlib
import select
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from typing import Literal

Status = Literal['ok', 'error', 'timeout', 'memory', 'output', 'killed']
KINDS = ('network', 'files', 'processes', 'signals', 'disk', 'memory', 'environment')


class SandboxError(Exception):
    """The sandbox could not run a program, or lacks a wall that was asked for; nothing is known about the program."""


class HelperLost(SandboxError):
    """A helper died, or fell silent, while a program ran."""


@dataclasses.dataclass(frozen=True)
class Limits:
    """What one program may use.

    Attributes:
      cpu_s: processor seconds of each of its processes, a whole number.
      wall_s: seconds on the clock, for programs that wait; keep it well above `cpu_s`, or a busy machine fails them.
      memory_mib: address space of each of its processes.
      output_kib: of stdout and of stderr, each; one that writes more is ended.
      disk_mib: of all its files, and of each of them.
      processes: at the same time, threads included.
      files: open at the same time, in each process.
      isolated: refuse to run where a wall of `KINDS` is missing.
    """

    cpu_s: int = 5
    wall_s: float = 15.0
    memory_mib: int = 512
    output_kib: int = 1024
    disk_mib: int = 64
    processes: int = 16
    files: int = 64
    isolated: bool = False

    def __post_init__(self) -> None:
        for name, value in vars(self).items():
            if name != 'isolated' and not value > 0:
                raise ValueError(f'{name}={value}: a program needs some of it; use a positive number')


DEFAULT = Limits()


@dataclasses.dataclass(frozen=True)
class Verdict:
    """What became of a program.

    Attributes:
      status: 'ok' is an exit with 0 within all limits. 'error' another exit; 'timeout' too long; 'memory' an exit for
        want of memory; 'output' too much output; 'killed' a signal, e.g. a stack overflow, or the end of two helpers.
      stdout: what it printed, up to the cap; bytes that are not UTF-8 are shown as `�`.
      stderr: the last 2000 characters.
      cpu_s: processor seconds, those of its reaped children included.
      wall_s: seconds from the request to the end.
    """

    status: Status
    stdout: str
    stderr: str
    cpu_s: float
    wall_s: float

    @property
    def ok(self) -> bool:
        return self.status == 'ok'


@dataclasses.dataclass(frozen=True)
class Walls:
    """What a helper's test program found out.

    Attributes:
      standing: those of KINDS that hold. 'network': no interface but an own loopback that is down; 'files': only
        libraries can be read, only an own folder written; 'processes': their number is bounded, and none outlives or
        sees others; 'signals': no process outside can be signalled; 'disk': the own folder has a quota; 'memory': of
        each process; 'environment': empty.
      reason: why the strong walls could not be put up; empty where they were.
    """

    standing: frozenset[str]
    reason: str = ''

    @property
    def missing(self) -> tuple[str, ...]:
        return tuple(kind for kind in KINDS if kind not in self.standing)

    def __str__(self) -> str:
        stands = ', '.join(kind for kind in KINDS if kind in self.standing) or 'none'
        if not self.missing:
            return f'sandbox walls: {stands}; none is missing'
        return f'sandbox walls: {stands}; missing: {", ".join(self.missing)} ({self.reason or "tried: does not hold"})'


STDERR_TAIL = 2000
GRACE_S = 20.0
"""A helper that has not answered so long after it was told to end a program is given up."""

CANARY = """
import json, os, resource, signal, socket
def holds(act):
    try:
        return bool(act())
    except OSError:
        return False
def writes(path):
    try:
        open(path, 'w').close()
        return True
    except OSError:
        return False
def processes_are_bounded():
    children = []
    try:
        for _ in range(24):
            children.append(os.fork())
            if not children[-1]:
                signal.pause()
    except OSError:
        return True
    finally:
        for child in children:
            os.kill(child, signal.SIGKILL)
    return False
marker = input()
print(json.dumps({
    'network': [name for _, name in socket.if_nameindex()] == ['lo'] and not holds(lambda: socket.create_connection(
        ('127.0.0.1', int(input())), 1)),
    'files': not os.path.exists(marker) and not os.path.exists('/proc') and not os.path.exists('/etc/passwd')
        and not writes('/x') and not writes('/usr/lib/x'),
    'processes': os.getppid() == 1 and processes_are_bounded(),
    'signals': os.getppid() == 1 or not holds(lambda: os.kill(os.getppid(), 0) is None),
    'disk': os.statvfs('.').f_blocks * os.statvfs('.').f_frsize <= 1 << 26,
    'memory': resource.getrlimit(resource.RLIMIT_AS)[0] > 0,
    'environment': not os.environ,
    'sum': sum(range(10)),
}))
"""


class Helper:
    """One helper process and the socket to it. Used by one thread at a time.

    Attributes:
      walls: what its test program found.
      apart: programs run in namespaces or as a user of their own, not as what the helper is.
    """

    def __init__(self, strong: bool, packages: Sequence[str], modules: Sequence[str]) -> None:
        self._folder = tempfile.TemporaryDirectory(prefix='mallm-sandbox-')
        self._control, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._number = 0
        script = pathlib.Path(__file__).with_name('sandbox_child.py')
        python = os.path.realpath(sys.executable)
        with theirs:
            options = ['-S', '-s', '-P', '-B', '-X', 'utf8', '-X', 'int_max_str_digits=0']
            mode = 'strong' if strong else 'weak'
            self._process = subprocess.Popen(
                [
                    python,
                    *options,
                    str(script),
                    str(theirs.fileno()),
                    mode,
                    self._folder.name,
                    *packages,
                    '--',
                    *modules,
                ],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.PIPE,
                cwd='/',
                pass_fds=[theirs.fileno()],
                env={'PYTHONHASHSEED': '0'},
                start_new_session=True,
            )
        try:
            told = self._answer(60.0)
            if not told:
                raise SandboxError('helper: said nothing in a minute')
            self.apart = told['apart']
            self.walls = self._probe()
        except SandboxError:
            self.close()
            raise

    def run(self, program: str, stdin: str, limits: Limits) -> Verdict:
        """Runs one program. Raises SandboxError where the helper failed; it is of no use then."""
        started = time.monotonic()
        reads = []
        with contextlib.ExitStack() as given:
            mine = []
            for text in (program, stdin):
                fd = os.memfd_create('mallm')
                mine.append(fd)
                given.callback(os.close, fd)
                with open(fd, 'wb', closefd=False) as file:
                    file.write(text.encode(errors='replace'))
            for _ in range(2):
                read, write = os.pipe()
                reads.append(read)
                mine.append(write)
                given.callback(os.close, write)
            self._number += 1
            request = json.dumps(numbers(limits) | {'number': self._number})
            try:
                socket.send_fds(self._control, [request.encode()], mine)
            except OSError as error:
                for read in reads:
                    os.close(read)
                raise SandboxError(f'helper: is gone ({error}): {self._last_words()}') from error
        try:
            answer, streams, cut = self._collect(reads, started + limits.wall_s, limits.output_kib << 10)
        finally:
            for read in reads:
                os.close(read)
        stdout, stderr = (bytes(stream).decode(errors='replace') for stream in streams)
        if not answer['ready'] and not cut:
            raise SandboxError(f'helper: could not wall a program in: {stderr[-STDERR_TAIL:]}')
        status = cut or named(answer['status'], answer['cpu_s'], stderr, limits)
        return Verdict(status, stdout, stderr[-STDERR_TAIL:], answer['cpu_s'], time.monotonic() - started)

    def _collect(
        self, reads: list[int], deadline: float, cap: int
    ) -> tuple[dict, tuple[bytearray, bytearray], Status | None]:
        """The helper's answer, what came through the pipes up to the cap, and why the program was ended, if it was."""
        streams = {read: bytearray() for read in reads}
        cut: Status | None = None
        poll = select.poll()
        for fd in (*reads, self._control.fileno()):
            poll.register(fd, select.POLLIN)
        for read in reads:
            os.set_blocking(read, False)
        answer = None
        while answer is None:
            left = deadline - time.monotonic()
            if left < 0 and cut is None:
                cut, deadline = 'timeout', time.monotonic() + GRACE_S
                self._kill()
                continue
            if left < 0:
                raise HelperLost(f'helper: did not end a program in {GRACE_S:.0f} s')
            for fd, _ in poll.poll(left * 1000):
                if fd == self._control.fileno():
                    answer = self._answer(0)
                elif drained(fd, streams[fd], cap):
                    poll.unregister(fd)
                if cut is None and max(map(len, streams.values())) > cap:
                    cut, deadline = 'output', time.monotonic() + GRACE_S
                    self._kill()
        for read in reads:
            drained(read, streams[read], cap)
        if max(map(len, streams.values())) > cap:
            cut = cut or 'output'
        for stream in streams.values():
            del stream[cap:]
        return answer, (streams[reads[0]], streams[reads[1]]), cut

    def _kill(self) -> None:
        with contextlib.suppress(OSError):  # gone: the poll finds out
            self._control.send(b'kill')

    def _answer(self, wait_s: float) -> dict:
        """The next message; empty when none came in time. Raises HelperLost when the helper is gone."""
        poll = select.poll()
        poll.register(self._control, select.POLLIN)
        if not poll.poll(wait_s * 1000):
            return {}
        try:
            message = self._control.recv(4096)
        except OSError:
            message = b''
        if not message:
            raise HelperLost(f'helper: ended: {self._last_words()}')
        return json.loads(message)

    def _last_words(self) -> str:
        self._process.kill()
        _, said = self._process.communicate()
        return said.decode(errors='replace').strip().splitlines()[-1:][0] if said.strip() else 'it said nothing'

    def _probe(self) -> Walls:
        """Runs the canary, which tries the walls from inside."""
        with socket.create_server(('127.0.0.1', 0)) as server:
            port = server.getsockname()[1]
            verdict = self.run(CANARY, f'{self._folder.name}\n{port}\n', Limits(wall_s=60.0))
        found = json.loads(verdict.stdout) if verdict.ok else {}
        if found.get('sum') != 45:
            raise SandboxError(f'helper: a test program that adds numbers ended with {verdict}')
        return Walls(frozenset(kind for kind in KINDS if found[kind]))

    def close(self) -> None:
        """Ends the helper and all it started."""
        self._control.close()
        try:
            self._process.wait(10)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        if self._process.stderr:
            self._process.stderr.close()
        self._folder.cleanup()


def numbers(limits: Limits) -> dict[str, int]:
    """The limits as the helper takes them, in seconds and bytes. Its own two processes are counted with a program's."""
    return {
        'cpu': limits.cpu_s,
        'memory': limits.memory_mib << 20,
        'disk': limits.disk_mib << 20,
        'processes': limits.processes + 2,
        'files': limits.files,
        'stack': min(64, limits.memory_mib // 4) << 20,
    }


def drained(fd: int, stream: bytearray, cap: int) -> bool:
    """Adds what a pipe holds, and nothing once the cap is passed; whether its other end is closed."""
    while True:
        try:
            piece = os.read(fd, 1 << 16)
        except BlockingIOError:
            return False
        if not piece:
            return True
        if len(stream) > cap:
            return False
        stream += piece


def named(status: int, cpu_s: float, stderr: str, limits: Limits) -> Status:
    """What a raw wait status means."""
    if os.WIFEXITED(status):
        if os.WEXITSTATUS(status) == 0:
            return 'ok'
        return 'memory' if stderr.rstrip().rpartition('\n')[2].startswith('MemoryError') else 'error'
    if os.WTERMSIG(status) == signal.SIGXCPU or cpu_s >= limits.cpu_s:
        return 'timeout'
    return 'killed'
