"""SGLang servers as processes: where SGLang is installed, how one is started, waited for, written down and stopped.

SGLang has an environment of its own, because it pins another torch (and CUDA) than anything here needs; what is shared
with it is HTTP and a folder of weights. `python -m launch.sglang install` makes that environment.
"""

import contextlib
import dataclasses
import json
import os
import pathlib
import secrets
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from typing import Any

from mallm import keeper
from mallm.rollout.sglang import ask

VERSION = '0.5.23'
"""The SGLang that all of this is made for and tested with."""
HOME = 'MALLM_SGLANG_VENV'
"""Environment variable: another place for SGLang's own virtual environment."""
KEY_FILE = 'MALLM_SGLANG_KEY_FILE'
LOOPBACK = '127.0.0.1'
HALF = 'mallm-is-installing'
"""A file in an environment that is not whole yet."""


class ServerError(RuntimeError):
    """A server that is not installed, does not start, or does not become healthy."""


@dataclasses.dataclass(frozen=True)
class Spec:
    """How a server is started.

    Attributes:
      model: folder or hub id of what it serves.
      device: 'cpu' or 'cuda'.
      dtype: what it computes in.
      adapters: adapters in one batch; 0 for a server without LoRA.
      rank: largest rank of an adapter.
      host: where it listens; more than this machine hears what is not loopback.
      port: 0 takes a free one.
      tokens: of its cache; 0 leaves that to SGLang, which asks the device.
      reads_text: whether it loads the model's tokenizer, which it needs for stop strings only.
      extra: further arguments of SGLang's.
    """

    model: str
    device: str = 'cpu'
    dtype: str = 'float32'
    adapters: int = 0
    rank: int = 16
    host: str = LOOPBACK
    port: int = 0
    tokens: int = 65536
    reads_text: bool = False
    extra: tuple[str, ...] = ()

    def arguments(self) -> list[str]:
        """SGLang's own command line."""
        words = ['--model-path', self.model, '--device', self.device, '--dtype', self.dtype]
        words += ['--host', self.host, '--port', str(self.port)]
        if self.device == 'cpu':
            words += ['--attention-backend', 'torch_native', '--sampling-backend', 'pytorch']
            words += ['--mem-fraction-static', '0.1', '--sleep-on-idle']  # else it polls on the core that learns
        if self.tokens:
            words += ['--max-total-tokens', str(self.tokens)]
        if not self.reads_text:
            words += ['--skip-tokenizer-init']
        if self.adapters:
            words += ['--enable-lora', '--max-lora-rank', str(self.rank), '--lora-target-modules', 'all']
            words += ['--max-loras-per-batch', str(self.adapters)]
            words += ['--lora-backend', 'torch_native'] if self.device == 'cpu' else []
        return [*words, *self.extra]


@dataclasses.dataclass(frozen=True)
class Started:
    """A server that was started here: its address, the process that keeps it, and what it says."""

    url: str
    pid: int
    log: str


def home(device: str) -> pathlib.Path:
    """The virtual environment that SGLang is installed in."""
    caches = pathlib.Path(os.environ.get('XDG_CACHE_HOME', '~/.cache')).expanduser()
    return pathlib.Path(os.environ.get(HOME) or caches / 'mallm' / f'sglang-{VERSION}-{device}')


def is_half(home: pathlib.Path) -> bool:
    """Whether an installation into it goes on, or was cut off."""
    return (home / HALF).exists()


def interpreter(device: str) -> str:
    """That environment's Python.

    Raises:
      ServerError: there is none.
    """
    python = home(device) / 'bin' / 'python'
    if not python.exists() or is_half(home(device)):
        raise ServerError(
            f'{python} is not there, or not whole: SGLang has an environment of its own; run `python -m launch.sglang '
            f'install --device {device}`, or set {HOME} to one that has sglang {VERSION}'
        )
    return str(python)


def api_key() -> str:
    """The servers' key, from the environment or from the file named there; empty for none."""
    file = os.environ.get(KEY_FILE)
    return pathlib.Path(file).read_text().strip() if file else os.environ.get(keeper.KEY, '')


def free_port(host: str) -> int:
    with socket.socket() as listener:
        listener.bind((host, 0))
        return listener.getsockname()[1]


def start(spec: Spec, log: pathlib.Path, *, tethered: bool) -> tuple[Started, subprocess.Popen]:
    """Starts a server and returns at once. A `tethered` one ends with this process, however that ends."""
    spec = dataclasses.replace(spec, port=spec.port or free_port(spec.host))
    python = interpreter(spec.device)
    log.parent.mkdir(parents=True, exist_ok=True)
    served = [python, '-I', '-u', keeper.__file__, 'serve', *spec.arguments()]
    command = [sys.executable, '-I', '-S', keeper.__file__, 'keep', str(log), 'yes' if tethered else 'no', *served]
    kept = subprocess.Popen(
        command,
        stdin=subprocess.PIPE if tethered else subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
        env=environment(spec),
    )
    return Started(f'http://{spec.host}:{spec.port}', kept.pid, str(log)), kept


def environment(spec: Spec) -> dict[str, str]:
    """What a server inherits: nothing of ours that would reach into its own Python or listen for us."""
    ours = ('PYTHON', 'XLA_', 'JAX_', 'MALLM_')
    kept = {name: value for name, value in os.environ.items() if not name.startswith(ours)}
    key = api_key()
    mine = {keeper.KEY: key} if key else {}
    if pathlib.Path(spec.model).exists():
        mine['HF_HUB_OFFLINE'] = '1'
    if spec.device == 'cpu':
        mine |= {'SGLANG_USE_CPU_ENGINE': '1', 'OMP_NUM_THREADS': os.environ.get('OMP_NUM_THREADS', '1')}
    if spec.host == LOOPBACK:
        mine['GLOO_SOCKET_IFNAME'] = os.environ.get('GLOO_SOCKET_IFNAME', 'lo' if sys.platform == 'linux' else 'lo0')
    return kept | mine


def healthy(url: str) -> bool:
    """Whether a server answers a request for one token now."""
    return ask(url, '/health', key=api_key(), seconds=20.0) is not None


def wait(started: Started, kept: subprocess.Popen | None, seconds: float) -> None:
    """Returns when a server is healthy.

    Raises:
      ServerError: it ended, or was not healthy in time; with the end of what it said.
    """
    until = time.monotonic() + seconds
    while not healthy(started.url):
        ended = kept is not None and kept.poll() is not None
        if ended or time.monotonic() > until:
            what = f'ended with status {kept.poll()}' if ended and kept else f'is not healthy after {seconds:g} s'
            raise ServerError(
                f'the server at {started.url} {what}; the end of {started.log}:\n{last_words(started.log)}'
            )
        time.sleep(0.25)


def last_words(log: str, count: int = 15) -> str:
    path = pathlib.Path(log)
    return '\n'.join(path.read_text(errors='replace').splitlines()[-count:]) if path.exists() else '(it said nothing)'


def stop(pid: int, seconds: float = 20.0) -> bool:
    """Ends the keeper of a server, and so the server; False where it was gone before."""
    if not alive(pid):
        return False
    with contextlib.suppress(ProcessLookupError):  # it has just ended
        os.kill(pid, signal.SIGTERM)
    until = time.monotonic() + seconds
    while alive(pid) and time.monotonic() < until:
        time.sleep(0.1)
    return True


def alive(pid: int) -> bool:
    """Whether a process is one of our keepers and runs."""
    try:
        command = pathlib.Path(f'/proc/{pid}/cmdline').read_bytes()
        return b'keeper.py\0keep\0' in command and b') Z ' not in pathlib.Path(f'/proc/{pid}/stat').read_bytes()
    except (FileNotFoundError, ProcessLookupError):
        return False


def write_endpoints(file: pathlib.Path, servers: Mapping[str, Sequence[Started]]) -> None:
    """{policy: its servers}, as `--endpoints` takes it; readable by its owner only, and never with a key in it."""
    said = {policy: [dataclasses.asdict(started) for started in started_for] for policy, started_for in servers.items()}
    file.parent.mkdir(parents=True, exist_ok=True)
    draft = file.with_name(f'.{file.name}.{secrets.token_hex(4)}')
    draft.touch(mode=0o600)
    draft.write_text(json.dumps(said, indent=1) + '\n')
    draft.replace(file)


def read_endpoints(file: str | os.PathLike) -> dict[str, list[Any]]:
    """What `write_endpoints` wrote; by hand, a URL may stand in place of a server.

    Raises:
      ServerError: it is no such file.
    """
    try:
        said = json.loads(pathlib.Path(file).read_text())
    except (OSError, ValueError) as cause:
        raise ServerError(
            f'{file} is no endpoints file ({cause}); `python -m launch.sglang start` writes one'
        ) from cause
    if not isinstance(said, dict) or not all(isinstance(servers, list) and servers for servers in said.values()):
        raise ServerError(
            f'{file} must be {{"policy": ["http://127.0.0.1:30000", ...], ...}}; "*" stands for any policy'
        )
    return said


def urls(file: str | os.PathLike, policies: Sequence[str]) -> dict[str, list[str]]:
    """The servers of each policy; under '*' stand those of policies that are not named.

    Raises:
      ServerError: a policy has none.
    """
    said = read_endpoints(file)
    if lacking := [policy for policy in policies if policy not in said and '*' not in said]:
        raise ServerError(f'{file} names no server for {lacking}; it has {sorted(said)}')
    found = {policy: said.get(policy, said.get('*', [])) for policy in policies}
    return {p: [one if isinstance(one, str) else one['url'] for one in servers] for p, servers in found.items()}
