"""What a run samples with: the embedded engine, or SGLang servers, given or started here for as long as it runs.

Where rollout workers play, each has an engine of its own, which follows the one that is made here.
"""

import contextlib
import dataclasses
import functools
import glob
import math
import os
import pathlib
import re
import secrets
import shutil
import socket
import subprocess
import tempfile
import time
import urllib.parse
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from mallm import hosts, servers
from mallm.experiment import Experiment
from mallm.io import hf, peft
from mallm.models import hf_map
from mallm.models.config import Architecture
from mallm.models.lora import variables
from mallm.models.transformer import Transformer
from mallm.policies import Policies
from mallm.rollout import workers
from mallm.rollout.chat import Tokenizer
from mallm.rollout.engine import Follows, Leads
from mallm.rollout.fleet import Limits
from mallm.rollout.follower import Follower, nothing
from mallm.rollout.jax_engine import JaxEngine
from mallm.rollout.sglang import BASE, Published, SGLangEngine
from mallm.rollout.workers import Crew, Lender, Workers

MakeEngine = Callable[[Experiment, Policies, pathlib.Path], JaxEngine | SGLangEngine | Workers]
"""(experiment, policies, run folder) -> engine."""
START_S = 900.0
"""Seconds in which a server that was started here must be healthy."""
MEMORY = pathlib.Path('/dev/shm')
WEIGHTS_FOLDER = 'MALLM_WEIGHTS_FOLDER'
"""Environment variable that names a folder for weights which servers on other machines see as well."""
TOKEN = secrets.token_hex(4)
"""Tells this process from an earlier one of the same number: in containers that is always 1."""
PROOF = 16
"""Ids of the sequence by which a server shows that it computes what the learner does."""


def embedded(experiment: Experiment, policies: Policies, folder: pathlib.Path) -> JaxEngine | Workers:
    parts = policies.module, policies.tokenizer
    if not experiment.rollout_workers:
        return JaxEngine(*parts, jax.random.key(experiment.seed))
    make_follower = functools.partial(workers.embedded, *parts, experiment.seed)
    return with_workers(experiment, policies, Lender(*parts, jax.random.key(experiment.seed)), make_follower)


def with_workers(
    experiment: Experiment, policies: Policies, engine: Leads, make_follower: Callable[[], Follows]
) -> Workers:
    """The engine, and Ray actors that play beside it."""
    return Workers(engine, experiment.rollout_workers, Crew(policies.tokenizer, make_follower), experiment.worker)


@contextlib.contextmanager
def engines(experiment: Experiment) -> Iterator[MakeEngine]:
    """How a run makes its engine. What is made has ended when this ends, however that comes about."""
    if experiment.engine == 'jax':
        yield embedded
        return
    with contextlib.ExitStack() as stack:
        yield lambda experiment, policies, folder: served(experiment, policies, folder, stack)


def served(
    experiment: Experiment, policies: Policies, folder: pathlib.Path, stack: contextlib.ExitStack
) -> SGLangEngine | Workers:
    """A client of the given endpoints, or of one server for the base of all adapters, or one for each pool."""
    arch, lora = policies.module.arch, policies.module.lora
    given = share(servers.urls(experiment.endpoints, sorted(policies.pools))) if experiment.endpoints else {}
    within = seen_by([url for urls in given.values() for url in urls], folder)
    publish = Publisher(stack.enter_context(weights_folder(within)), policies.module)
    endpoints = given or started(experiment, policies, folder, publish, stack)
    limits, count = experiment.serving, experiment.rollout_workers
    parts = policies.tokenizer, arch.vocab, endpoints
    of_model: dict[str, Any] = {'adapters': lora is not None, 'shape': shape_of(arch)}
    engine = SGLangEngine(*parts, publish, **of_model, limits=limits, key=servers.api_key())
    stack.callback(engine.close)
    if not count:
        return engine
    each = dataclasses.replace(limits, in_flight=math.ceil(limits.in_flight / count))
    return with_workers(experiment, policies, engine, functools.partial(follower, *parts, **of_model, limits=each))


def follower(
    tokenizer: Tokenizer,
    vocab: int,
    endpoints: Mapping[str, Sequence[str]],
    *,
    adapters: bool,
    shape: Mapping[str, Any],
    limits: Limits,
) -> Follower:
    """The client inside a worker. The API key does not travel: it is read where the worker runs."""
    jax.config.update('jax_platforms', 'cpu')
    return Follower(
        tokenizer, vocab, endpoints, nothing, adapters=adapters, shape=shape, limits=limits, key=servers.api_key()
    )


def share(endpoints: Mapping[str, Sequence[str]]) -> dict[str, list[str]]:
    """This process's servers: each has its own, so that nobody else renews their weights.

    Raises:
      ServerError: there are fewer than processes.
    """
    mine = {policy: list(urls[jax.process_index() :: jax.process_count()]) for policy, urls in endpoints.items()}
    if lacking := sorted(policy for policy, urls in mine.items() if not urls):
        raise servers.ServerError(
            f'{jax.process_count()} processes, and fewer servers of policies {lacking}: each process needs its own'
        )
    return mine


def is_here(url: str) -> bool:
    """Whether a server sees this machine's memory-backed folders; others read weights from the run folder."""
    return urllib.parse.urlsplit(url).hostname in ('127.0.0.1', 'localhost', '::1')


def started(
    experiment: Experiment,
    policies: Policies,
    folder: pathlib.Path,
    publish: 'Publisher',
    stack: contextlib.ExitStack,
) -> dict[str, list[str]]:
    """Servers of our own, on the weights there are now; they end with this process."""
    lora = policies.module.lora
    device = 'cuda' if jax.default_backend() == 'gpu' else 'cpu'
    models = {BASE: policies.base.state.params} if policies.base else {}
    models = models or {name: pool.state.params for name, pool in policies.pools.items()}
    running = {}
    for name, params in models.items():
        spec = servers.Spec(
            publish(name, hosts.local(params), 0).folder,
            device,
            jnp.dtype(policies.module.dtype).name,
            adapters=2 * len(policies.pools) if lora else 0,
            rank=lora.rank if lora else 0,
            tokens=servers.Spec.tokens if device == 'cpu' else 0,
        )
        log = folder / 'servers' / f'{name or "base"}-{jax.process_index()}.log'
        one, process = servers.start(spec, log, tethered=True)
        stack.callback(ended, one, process)
        running[name] = one, process
    for one, process in running.values():
        servers.wait(one, process, START_S)
    return {name: [running.get(name, running.get(BASE))[0].url] for name in policies.pools}  # type: ignore[index]


def ended(one: servers.Started, process: subprocess.Popen) -> None:
    """Stops a server. Until it is called, its place on the stack keeps `process` alive, whose stdin is the tether."""
    servers.stop(one.pid)
    if process.stdin:
        process.stdin.close()
    with contextlib.suppress(subprocess.TimeoutExpired):
        process.wait(5.0)


def shape_of(arch: Architecture) -> dict[str, Any]:
    """What a server's config.json must say, or weights of ours would end it."""
    sizes = ('vocab_size', 'hidden_size', 'intermediate_size', 'num_hidden_layers', 'num_attention_heads',
             'num_key_value_heads')  # fmt: skip
    said = hf_map.to_json(arch)
    return {name: said[name] for name in ('model_type', *sizes)}


def seen_by(urls: Iterable[str], folder: pathlib.Path) -> pathlib.Path:
    """Where weights are put: into memory; where a server is on another machine, into $MALLM_WEIGHTS_FOLDER or else the
    run's folder, which it must see too."""
    if not all(map(is_here, urls)):
        return pathlib.Path(os.environ.get(WEIGHTS_FOLDER) or folder).resolve()
    return MEMORY if MEMORY.is_dir() and os.access(MEMORY, os.W_OK) else pathlib.Path(tempfile.gettempdir())


@contextlib.contextmanager
def weights_folder(within: pathlib.Path) -> Iterator[pathlib.Path]:
    """A folder of this process, gone at the end. Those of processes that were killed here, and so could not, go now."""
    own = f'mallm-{socket.gethostname()}-'
    within.mkdir(parents=True, exist_ok=True)
    for left in within.glob(f'{glob.escape(own)}*'):
        named = re.fullmatch(r'(\d+)-([^-]+)', left.name.removeprefix(own))  # more parts are those of another host
        if named and not lives(int(named[1]), named[2]):
            shutil.rmtree(left, ignore_errors=True)
    prefix = f'{own}{os.getpid()}-{TOKEN}_'
    with tempfile.TemporaryDirectory(prefix=prefix, dir=within, ignore_cleanup_errors=True) as name:
        yield pathlib.Path(name)


def lives(pid: int, rest: str) -> bool:
    """Whether the process that made a folder of weights, of which this is the name's end, still runs here."""
    if pid == os.getpid():
        return rest.startswith(TOKEN)
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:  # somebody else's
        pass
    return True


class Publisher:
    """Writes weights where servers read them. Of each policy the newest version is kept."""

    def __init__(self, root: pathlib.Path, module: Transformer) -> None:
        self._root, self._module, self._lora = root, module, module.lora
        self._newest: dict[str, pathlib.Path] = {}
        self._base: Any = None
        self._forward = {adapts: jax.jit(module.clone(lora=self._lora if adapts else None).apply)
                         for adapts in (False, True)}  # fmt: skip

    def __call__(self, policy: str, weights: Any, version: int) -> Published:
        folder = self._root / f'{policy or "base"}-{version}-{time.monotonic_ns():x}'
        adapts = self._lora is not None and policy != BASE
        if self._lora is None or policy == BASE:
            hf.export(folder, self._module.arch, weights, dtype=self._module.dtype, everywhere=True)
            self._base = weights if self._lora else None
        else:  # SGLang scales by alpha / rank whatever use_rslora says, so alpha is what comes out as our scale
            alpha = self._lora.scale * self._lora.rank
            peft.export_adapter(folder, weights, alpha=alpha, rs=False, base='base', everywhere=True)
        if old := self._newest.get(policy):
            shutil.rmtree(old, ignore_errors=True)
        self._newest[policy] = folder
        size = sum(file.stat().st_size for file in folder.iterdir())
        proof = np.arange(1, PROOF + 1) * 7919 % min(self._module.arch.vocab, 1000)
        logits_TV = self._forward[adapts](variables(weights, self._base if adapts else None), proof[None])[0]
        logp_TV = np.asarray(jax.nn.log_softmax(logits_TV.astype(jnp.float32)))
        logps = tuple(logp_TV[np.arange(PROOF - 1), proof[1:]].tolist())
        tolerance = 0.05 if jnp.dtype(self._module.dtype) == jnp.float32 else 0.5
        return Published(str(folder), size, tuple(proof.tolist()), logps, tolerance)
