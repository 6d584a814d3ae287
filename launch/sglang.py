"""SGLang servers from the command line.

  python -m launch.sglang install [--device cuda]                make SGLang's own environment (once)
  python -m launch.sglang start --model FOLDER --out servers.json          one server for every policy: LoRA roles
  python -m launch.sglang start --model FOLDER --policies plan tool        one server for each policy: full weights
  python -m launch.sglang list | health | stop [--out servers.json]
  python -m experiments.NAME --engine sglang --endpoints servers.json

Servers listen on loopback unless --host says otherwise. An API key comes from $MALLM_SGLANG_KEY, or from the file that
$MALLM_SGLANG_KEY_FILE names, for servers and experiments alike; it is in no command line, log or endpoints file.
SGLang lives in an environment of its own ($MALLM_SGLANG_VENV, or a cache folder): it pins another torch than ours.
"""

import argparse
import pathlib
import shutil
import subprocess
import sys
import tempfile
import venv
from collections.abc import Sequence

import jax
import jax.numpy as jnp
from flax import linen as nn

from launch import config_of
from mallm import servers
from mallm.io import hf
from mallm.models.transformer import Transformer
from mallm.rollout.chat import TinyTokenizer
from mallm.servers import ServerError, Spec, Started
from mallm.serving import Publisher

CPU = pathlib.Path(__file__).parent / 'cpu'


def install(device: str) -> pathlib.Path:
    """Makes the environment that servers run in, unless it is there; half of one, of an installation that was killed,
    goes first."""
    home = servers.home(device)
    if home.exists() and not servers.is_half(home):
        return home
    shutil.rmtree(home, ignore_errors=True)
    home.mkdir(parents=True)
    (home / servers.HALF).touch()
    venv.create(home, with_pip=True)
    pip = [str(home / 'bin' / 'python'), '-m', 'pip', 'install', '--quiet', '--disable-pip-version-check']
    wanted = ['--no-deps', '--no-compile', '-r', str(CPU / 'requirements.txt')]
    done = subprocess.run([*pip, *(wanted if device == 'cpu' else [f'sglang=={servers.VERSION}'])], check=False)
    if done.returncode:
        shutil.rmtree(home)
        raise ServerError(
            f'pip could not install SGLang {servers.VERSION} for {device}; what it said stands above; mend that, and '
            f'run python -m launch.sglang install --device {device}'
        )
    if device == 'cpu':
        complete_torch(home, pip)
        [packages] = home.glob('lib/python*/site-packages')
        shutil.copytree(CPU / 'shim', packages, dirs_exist_ok=True, ignore=shutil.ignore_patterns('__pycache__'))
    (home / servers.HALF).unlink()
    return home


def complete_torch(home: pathlib.Path, pip: Sequence[str]) -> None:
    """Where the registry's torch is a CUDA build, it loads on a CPU too, but not without its libraries: adds them.

    Raises:
      ServerError: it does not load with them either; the environment is removed.
    """
    loads = [str(home / 'bin' / 'python'), '-c', 'import torch']
    if subprocess.run(loads, check=False, capture_output=True).returncode == 0:
        return
    print('torch is a build for CUDA here; adding the libraries that it loads (3 GB)', flush=True)
    [torch] = [line for line in (CPU / 'requirements.txt').read_text().split() if line.startswith('torch==')]
    subprocess.run([*pip, '--no-compile', torch], check=False)
    done = subprocess.run(loads, check=False, capture_output=True, text=True)
    if done.returncode:
        shutil.rmtree(home)
        raise ServerError(f'{torch} does not load in {home}: {done.stderr.strip()[-500:]}')


def start(given: argparse.Namespace) -> int:
    """Starts servers, waits until all are healthy, and writes the endpoints file; none is left where one fails."""
    out = pathlib.Path(given.out)
    if out.exists() and any(servers.alive(one.pid) for one in known(out)):
        raise ServerError(f'{out} names servers that run; stop them first, or choose another --out')
    path = pathlib.Path(given.model).expanduser()
    is_id = hf.HUB_ID.fullmatch(given.model) and not path.parent.is_dir()
    if given.model != 'tiny' and not path.exists() and not is_id:
        raise ServerError(f"model {given.model!r}: no such folder, and no hub id (owner/name); or use 'tiny'")
    logs = pathlib.Path(given.logs or tempfile.mkdtemp(prefix='mallm-servers-'))
    model = tiny(logs, given.experiment) if given.model == 'tiny' else given.model
    begun: dict[str, list[tuple[Started, subprocess.Popen]]] = {}
    try:
        for policy in given.policies:
            for i in range(given.count):
                spec = Spec(
                    model, given.device, given.dtype, given.adapters, given.rank, given.host,
                    given.port and given.port + sum(map(len, begun.values())), given.tokens, given.reads_text,
                    tuple(given.extra),
                )  # fmt: skip
                log = logs / f'{"all" if policy == "*" else policy}-{i}.log'
                begun.setdefault(policy, []).append(servers.start(spec, log, tethered=False))
        for one, process in [pair for pairs in begun.values() for pair in pairs]:
            servers.wait(one, process, given.seconds)
            print(f'{one.url} is healthy (process {one.pid}, log {one.log})')
    except BaseException:
        for one, _ in [pair for pairs in begun.values() for pair in pairs]:
            servers.stop(one.pid)
        raise
    servers.write_endpoints(out, {policy: [one for one, _ in pairs] for policy, pairs in begun.items()})
    print(f'wrote {out}')
    return 0


def tiny(folder: pathlib.Path, name: str) -> str:
    """A folder with a new model of an experiment's shape; the run that uses the server brings its own weights."""
    experiment = config_of(name)
    module = Transformer(experiment.model.architecture(len(TinyTokenizer(experiment.task.signs))))
    params = nn.unbox(module.init(jax.random.key(0), jnp.zeros((1, 2), jnp.int32)))['params']
    return Publisher(folder / 'tiny', module)('shared', params, 0).folder


def known(out: pathlib.Path) -> list[Started]:
    """The servers in an endpoints file, each once; those given by URL alone have no process here."""
    said = [one for listed in servers.read_endpoints(out).values() for one in listed]
    return list(dict.fromkeys(Started(one, 0, '') if isinstance(one, str) else Started(**one) for one in said))


def listed(given: argparse.Namespace) -> int:
    """Prints each server with the policies it is named for."""
    for policy, found in servers.read_endpoints(given.out).items():
        for one in (Started(s, 0, '') if isinstance(s, str) else Started(**s) for s in found):
            runs = 'elsewhere' if not one.pid else 'runs' if servers.alive(one.pid) else 'ended'
            print(f'{policy}\t{one.url}\tprocess {one.pid}\t{runs}\t{one.log}')
    return 0


def health(given: argparse.Namespace) -> int:
    """Asks each server for one token; 1 if any does not answer."""
    answers = {one.url: servers.healthy(one.url) for one in known(pathlib.Path(given.out))}
    for url, well in answers.items():
        print(f'{url}\t{"healthy" if well else "no answer"}')
    return 0 if all(answers.values()) else 1


def stop(given: argparse.Namespace) -> int:
    """Ends the servers that were started here, and removes the file."""
    for one in known(pathlib.Path(given.out)):
        print(f'{one.url}\t{"stopped" if servers.stop(one.pid) else "was not running here"}')
    pathlib.Path(given.out).unlink()
    return 0


def installed(given: argparse.Namespace) -> int:
    print(f'SGLang {servers.VERSION} is in {install(given.device)}')
    return 0


def arguments(words: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    verbs = parser.add_subparsers(dest='verb', required=True)
    add = verbs.add_parser('install', help='make the environment that servers run in')
    add.set_defaults(does=installed)
    add.add_argument('--device', choices=['cpu', 'cuda'], default='cpu')
    add = verbs.add_parser('start', help='start servers and write the endpoints file')
    add.set_defaults(does=start)
    add.add_argument('--model', required=True, help="folder, hub id, or 'tiny': a new one as in --experiment")
    add.add_argument('--experiment', default='sokoban_at_grpo', help="whose model 'tiny' is")
    add.add_argument('--device', choices=['cpu', 'cuda'], default='cpu')
    add.add_argument('--policies', nargs='+', default=['*'], help='each gets servers of its own; "*" is all of them')
    add.add_argument('--count', type=int, default=1, help='servers for each policy')
    add.add_argument('--dtype', default='float32', help='float32 or bfloat16, as model.dtype of the experiment')
    add.add_argument('--adapters', type=int, default=0, help='LoRA adapters at once: twice the pools; 0 for none')
    add.add_argument('--rank', type=int, default=16, help='of the largest adapter')
    add.add_argument('--host', default=servers.LOOPBACK, help='0.0.0.0 listens to other machines: then set a key')
    add.add_argument('--port', type=int, default=0, help='of the first server; 0 takes free ones')
    add.add_argument('--tokens', type=int, default=0, help='that the cache holds; 0 leaves it to SGLang')
    add.add_argument('--reads-text', action='store_true', help='load the tokenizer: servers end at stop strings')
    add.add_argument('--logs', default='', help='folder of the logs; a new temporary one otherwise')
    add.add_argument('--seconds', type=float, default=900.0, help='in which a server must be healthy')
    add.add_argument('--extra', nargs=argparse.REMAINDER, default=[], help="the rest are SGLang's own arguments")
    for does in (listed, health, stop):
        verb = 'list' if does is listed else does.__name__
        verbs.add_parser(verb, help=(does.__doc__ or '').split('\n')[0]).set_defaults(does=does)
    for verb in ('start', 'list', 'health', 'stop'):
        verbs.choices[verb].add_argument('--out', default='servers.json', help='the endpoints file')
    return parser.parse_args(words)


def main(words: Sequence[str] | None = None) -> int:
    """Returns 0, or 1 if servers do not do what is asked of them."""
    given = arguments(words)
    try:
        return given.does(given)
    except (ValueError, ServerError) as refused:
        print(refused, file=sys.stderr)
        return 1


if __name__ == '__main__':
    sys.exit(main())
