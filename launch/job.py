"""Writes the script, or manifest, that runs an experiment on one machine, Slurm, a TPU pod or Kubernetes.

Commands (what stands after -- are the experiment's own settings, whose form is checked before anything is written; of
several learners the mesh must cover all devices):
  python -m launch.job local --gpus 4 --servers 2 -- --model.source Qwen/Qwen3-1.7B --model.lora.rank 16
  python -m launch.job slurm --experiment math_at_grpo --learners 2 --servers 4 --gpus 8 --server-gpus 4 -- \\
      --model.source Qwen/Qwen3-8B --model.mesh 1 16 1 --learning.micro-groups 16
  python -m launch.job tpu --pod POD --zone ZONE -- --runs runs --model.mesh 1 16 1
  python -m launch.job k8s --image IMAGE --learners 2 -- --runs /runs --model.mesh 2 1 1
Each prints to the terminal unless there is --out FILE. Scripts show what they would run with DRY_RUN=1 bash FILE.

Servers are told the model, its dtype, adapters and policies by the experiment. API keys are only ever referred to.
"""

import argparse
import dataclasses
import json
import pathlib
import re
import shlex
import sys
from collections.abc import Sequence
from typing import Any

import jinja2

from launch import config_of
from mallm import cli, servers
from mallm.experiment import Experiment
from mallm.serving import WEIGHTS_FOLDER

TEMPLATES = pathlib.Path(__file__).parent / 'templates'
KINDS = {'local': 'local.sh.j2', 'slurm': 'slurm.sh.j2', 'tpu': 'tpu.sh.j2', 'k8s': 'k8s.yaml.j2'}
ENDPOINTS = 'servers.json'


def require(holds: bool, name: str, value: object, rule: str) -> None:
    if not holds:
        raise ValueError(f'--{name} {value!r}: {rule}')


@dataclasses.dataclass(frozen=True)
class Job:
    """What the templates are filled with.

    Attributes:
      words: the experiment's own settings, as on a command line; `experiment` is what they make of it.
      learners: nodes, hosts or pods that learn.
      servers: SGLang servers in all: on `local` of `server_gpus` GPUs each, else one on a node of its own.
      gpus: of each node or pod, or of the machine; 0 computes on processors.
      players: nodes of a Ray cluster on which rollout workers play.
      model: what servers load.
    """

    kind: str
    name: str
    module: str
    words: tuple[str, ...]
    experiment: Experiment
    learners: int
    servers: int
    gpus: int
    server_gpus: int
    model: str
    port: int
    key_file: str = ''
    time: str = ''
    partition: str = ''
    players: int = 0
    pod: str = ''
    zone: str = ''
    home: str = ''
    image: str = ''
    claim: str = ''
    secret: str = ''

    def __post_init__(self) -> None:
        require(
            bool(re.fullmatch('[a-z0-9]([-a-z0-9]{0,50}[a-z0-9])?', self.name)), 'name', self.name,
            'takes a-z, 0-9 and - between them, as Kubernetes wants it',
        )  # fmt: skip
        for name in ('learners', 'server_gpus', 'port'):
            require(vars(self)[name] >= 1, name.replace('_', '-'), vars(self)[name], 'must be positive')
        for name in ('servers', 'gpus', 'players'):
            require(vars(self)[name] >= 0, name, vars(self)[name], 'must be 0 or positive')
        require(
            not self.servers or bool(self.model), 'model', self.model, 'servers need one to load: a folder or hub id'
        )
        require(
            self.servers == 0 or self.adapts or self.servers >= len(self.pools), 'servers', self.servers,
            f'full weights need a server for each of the pools {self.pools}; or use --model.lora.rank',
        )  # fmt: skip
        require(
            self.kind != 'k8s' or not self.servers or self.adapts or len(self.pools) == 1, 'servers', self.servers,
            f'server pods are all alike here, and cannot each hold one of {self.pools}; use --model.lora.rank',
        )  # fmt: skip
        workers = self.experiment.rollout_workers
        require(
            not self.players or workers > 0, 'players', self.players, 'are for the experiment with --rollout-workers'
        )
        require(
            not (self.servers and workers), 'servers', self.servers, 'rollout workers sample by themselves: 0 servers'
        )
        policies = 1 if self.adapts else len(self.pools)
        require(
            not self.servers or self.servers >= self.learners * policies, 'servers', self.servers,
            f'each of {self.learners} learners needs {policies} of its own',
        )  # fmt: skip
        require(
            not (self.servers and self.adapts) or self.copies == 1, 'server-gpus', self.server_gpus,
            f'a server with adapters is one copy: spread it over all {self.gpus} GPUs of its node',
        )  # fmt: skip
        require(
            self.kind != 'k8s' or pathlib.Path('/runs') in (runs := pathlib.Path(self.experiment.runs), *runs.parents),
            'runs', self.experiment.runs, 'lies in the container, and is lost with it; give --runs /runs after --',
        )  # fmt: skip
        for name, value in (('time', self.time), ('partition', self.partition)):
            require(bool(re.fullmatch('[-:.,\\w]*', value)), name, value, 'is one word')
        if self.kind == 'local' and self.gpus:
            require(self.learner_gpus >= 1, 'gpus', self.gpus, f'{self.servers} servers leave none for the learner')
        elif self.gpus and self.servers:
            require(self.gpus % self.server_gpus == 0, 'server-gpus', self.server_gpus, 'must divide --gpus')

    @property
    def pools(self) -> list[str]:
        return sorted(set(self.experiment.pools.values()))

    @property
    def adapts(self) -> bool:
        return self.experiment.model.lora.rank > 0

    @property
    def device(self) -> str:
        return 'cuda' if self.gpus else 'cpu'

    @property
    def copies(self) -> int:
        """Of the model in a server: as many as its node has room for."""
        return 1 if self.kind == 'local' or not self.gpus else self.gpus // self.server_gpus

    @property
    def learner_gpus(self) -> int:
        return self.gpus - self.servers * self.server_gpus

    @property
    def learning_devices(self) -> str:
        return ','.join(map(str, range(self.learner_gpus)))

    def devices_of(self, server: int) -> str:
        """GPUs of a server of `local`, after those of the learner."""
        first = self.learner_gpus + server * self.server_gpus
        return ','.join(map(str, range(first, first + self.server_gpus)))

    def experiment_words(self) -> str:
        return shlex.join(self.words)

    def serving(self, server: int) -> list[str]:
        """What `launch.sglang start` is told of a server, but for where it listens and is noted down."""
        model = self.experiment.model
        words = ['--model', self.model, '--device', self.device, '--dtype', model.dtype]
        if self.adapts:
            return [*words, '--adapters', str(2 * len(self.pools)), '--rank', str(model.lora.rank)]
        return [*words, '--policies', self.pools[server % len(self.pools)]]

    def serving_words(self, server: int) -> str:
        return shlex.join(self.serving(server))

    def extra(self) -> list[str]:
        """SGLang's own arguments: over how many GPUs a copy is spread, and how many copies there are."""
        if not self.gpus:
            return []
        return ['--extra', '--tp-size', str(self.server_gpus), '--dp-size', str(self.copies)]

    def extra_words(self) -> str:
        return ''.join(f' {word}' for word in self.extra())

    def learner_command(self) -> list[str]:
        """Of a Kubernetes pod; the kubelet puts the index in place of $(JOB_COMPLETION_INDEX)."""
        engine = ['--engine', 'sglang', '--endpoints', f'/endpoints/{ENDPOINTS}'] if self.servers else []
        hosts = ['--hosts.coordinator', f'{self.name}-0.{self.name}:{self.port}', '--hosts.count', str(self.learners),
                 '--hosts.index', '$(JOB_COMPLETION_INDEX)']  # fmt: skip
        plain = [word.replace('$(', '$$(') for word in self.words]
        return ['python', '-m', self.module, *plain, *engine, *(hosts if self.learners > 1 else [])]

    def server_command(self) -> list[str]:
        """Of a Kubernetes pod, which lives as long as its server is wanted."""
        start = ['python', '-m', 'launch.sglang', 'start', *self.serving(0), '--host', '0.0.0.0', '--port',
                 str(self.port), '--out', ENDPOINTS, *self.extra()]  # fmt: skip
        return ['bash', '-c', '"$@" && exec sleep infinity', 'server', *start]

    def environment(self) -> list[dict[str, Any]]:
        """Environment of a Kubernetes container: where weights pass, and the API key by reference."""
        key = {'name': 'MALLM_SGLANG_KEY', 'valueFrom': {'secretKeyRef': {'name': self.secret, 'key': 'key'}}}
        folder = {'name': WEIGHTS_FOLDER, 'value': '/runs'}
        return [folder, *([key] if self.secret else [])] if self.servers else []

    def endpoints_text(self) -> str:
        urls = [f'http://{self.name}-servers-{i}.{self.name}-servers:{self.port}' for i in range(self.servers)]
        return json.dumps({'*': urls})


def render(job: Job) -> str:
    """The script or manifest. Everything that a user wrote passes through a quoting filter."""
    place = jinja2.Environment(
        loader=jinja2.FileSystemLoader(TEMPLATES),
        undefined=jinja2.StrictUndefined,
        keep_trailing_newline=True,
        autoescape=False,
    )
    place.filters |= {'sh': shlex.quote, 'yaml': json.dumps}
    return place.get_template(KINDS[job.kind]).render(job=job)


def join(files: Sequence[str], out: str) -> None:
    """One endpoints file of several."""
    joined: dict[str, list[Any]] = {}
    for file in files:
        for policy, found in servers.read_endpoints(file).items():
            joined.setdefault(policy, []).extend(found)
    pathlib.Path(out).write_text(json.dumps(joined, indent=1) + '\n')


def arguments(words: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    kinds = parser.add_subparsers(dest='kind', required=True)
    for kind in KINDS:
        add = kinds.add_parser(kind)
        add.add_argument('--experiment', default='sokoban_at_grpo', help='module in experiments/')
        add.add_argument('--name', default='', help="of the job; the experiment's otherwise")
        add.add_argument('--out', default='', help='file to write; the terminal otherwise')
        add.set_defaults(learners=1, servers=0, gpus=0, server_gpus=1, model='', port=29400)
        if kind == 'tpu':
            add.add_argument('--pod', required=True, help='name of the TPU pod')
            add.add_argument('--zone', required=True)
            add.add_argument('--home', default='mallm', help='the checkout on each host, seen from the home folder')
            continue
        if kind != 'local':
            add.add_argument('--learners', type=int, default=1, help='nodes or pods that learn')
            add.add_argument('--port', type=int, default=29400, help='of the coordinator')
        add.add_argument('--servers', type=int, default=0, help='SGLang servers; 0 samples inside the learners')
        add.add_argument('--gpus', type=int, default=0, help='of the machine, or of each node or pod; 0: processors')
        add.add_argument('--server-gpus', type=int, default=1, help='GPUs over which one server is spread')
        add.add_argument('--model', default='', help="what servers load; the experiment's model.source otherwise")
        if kind == 'slurm':
            add.add_argument('--time', default='24:00:00')
            add.add_argument('--partition', default='')
            add.add_argument('--players', type=int, default=0, help='more nodes, on which --rollout-workers play')
        if kind == 'k8s':
            add.add_argument('--image', required=True, help='has mallm, and SGLang where there are servers')
            add.add_argument('--claim', default='runs', help='persistent volume claim, mounted at /runs')
            add.add_argument('--secret', default='', help="secret whose `key` is the servers' API key")
        else:
            add.add_argument('--key-file', default='', help="file with the servers' API key")
    add = kinds.add_parser('join', help='one endpoints file of several')
    add.add_argument('files', nargs='+')
    add.add_argument('--out', required=True)
    return parser.parse_args(words)


def job_of(given: argparse.Namespace, words: Sequence[str]) -> Job:
    """Checks the experiment's settings as the experiment itself will."""
    experiment = cli.arguments(config_of(given.experiment), None, words).experiment
    own = {name: value for name, value in vars(given).items() if name not in {'experiment', 'out'}}
    own |= {'name': given.name or given.experiment.replace('_', '-'), 'model': given.model or experiment.model.source}
    return Job(module=f'experiments.{given.experiment}', words=tuple(words), experiment=experiment, **own)


def main(words: Sequence[str]) -> int:
    """Returns 0, or 2 if what is asked for makes no sense."""
    cut = list(words).index('--') if '--' in words else len(words)
    given, of_experiment = arguments(words[:cut]), words[cut + 1 :]
    try:
        if given.kind == 'join':
            join(given.files, given.out)
            return 0
        text = render(job_of(given, of_experiment))
    except (ValueError, servers.ServerError) as refused:
        print(refused, file=sys.stderr)
        return 2
    if given.out:
        pathlib.Path(given.out).write_text(text)
    else:
        print(text, end='')
    return 0


if __name__ == '__main__':
    sys.exit(main(sys.argv[1:]))
