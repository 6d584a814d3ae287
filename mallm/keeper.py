"""A small process that keeps an SGLang server: it starts it, cleans its log of the API key, and ends all of it.

    python -I -S keeper.py keep LOG TETHERED python arguments...     what runs beside a run or after `launch.sglang`
    python -I keeper.py serve arguments...                           what that starts: the server, key in hand

A server is a group of processes. A tethered one ends when the keeper's standard input does, and so with the process
that asked for it however that ends; any ends when the keeper is told to (SIGTERM, SIGINT). The key comes in the
environment and stays out of command lines and of the log. Imports nothing heavy.
"""

import contextlib
import os
import runpy
import signal
import subprocess
import sys
import threading
from collections.abc import Callable
from typing import IO

KEY = 'MALLM_SGLANG_KEY'
GRACE_S = 5.0


def keep(log: str, tethered: bool, command: list[str]) -> int:
    """Runs a server to its end, or to ours, and returns its exit status."""
    server = subprocess.Popen(
        command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, start_new_session=True
    )

    def stop(*_: object) -> None:
        threading.Thread(target=end, args=(server,), daemon=True).start()

    signal.signal(signal.SIGTERM, stop)
    signal.signal(signal.SIGINT, stop)
    if tethered:
        threading.Thread(target=until_untied, args=(stop,), daemon=True).start()
    copier = threading.Thread(target=copy, args=(server.stdout, log), daemon=True)
    copier.start()
    status = server.wait()
    end(server)
    copier.join(GRACE_S)
    return status


def until_untied(stop: Callable[[], None]) -> None:
    """Calls `stop` when whoever asked for the server has closed its end, or is no more."""
    sys.stdin.read()
    stop()


def copy(lines: IO[bytes], log: str) -> None:
    """Everything the server says, without the key."""
    key = os.environ.get(KEY, '').encode()
    with open(log, 'ab', buffering=0) as file:
        for line in lines:
            with contextlib.suppress(OSError):  # on a full disk the line is lost; unread, it would block the server
                file.write(line.replace(key, b'***') if key else line)


def end(server: subprocess.Popen) -> None:
    """Asks the whole group to end, and after a while sees to it."""
    for kind, seconds in ((signal.SIGTERM, GRACE_S), (signal.SIGKILL, GRACE_S)):
        try:
            os.killpg(server.pid, kind)
        except ProcessLookupError:
            return
        try:
            server.wait(seconds)
        except subprocess.TimeoutExpired:
            continue


def serve(arguments: list[str]) -> None:
    """SGLang's own entry, with the key in its arguments but in no command line."""
    key = os.environ.pop(KEY, '')
    sys.argv = ['sglang', *arguments, *(['--api-key', key] if key else [])]
    runpy.run_module('sglang.launch_server', run_name='__main__')


if __name__ == '__main__':
    if sys.argv[1] == 'keep':
        sys.exit(keep(sys.argv[2], sys.argv[3] == 'yes', sys.argv[4:]))
    serve(sys.argv[2:])
