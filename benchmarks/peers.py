"""One GRPO step of the same small model on mallm and on TRL, taken in turn on this machine, in one run.

Command:  python -m benchmarks.peers                 (first run: installs TRL into an environment of its own, 1 GB)

Workload T: a randomly initialised Qwen3 (0.66M parameters: width 128, 4 layers, 4 query and 2 key heads of 32, ffn
256, 512 tokens, tied head); each step 64 new prompts of 22 to 32 tokens, K = 8 answers of exactly 8 tokens, float32,
one AdamW step on all parameters, no KL term. TRL runs as it is fastest here: one micro-batch of all 512 samples, no
gradient checkpointing. Three processes wait on stdin and step one after the other, so that what else the
machine does hits all:

  mallm         each prompt is read once for its K answers, by the sampler and by the learner;
  mallm, split  the same code with each answer as a group of one (prompts read K times): what sharing is worth;
  TRL           GRPOTrainer.

Target: a whole step at least 5 times faster than TRL's.
"""

import dataclasses
import json
import os
import pathlib
import subprocess
import sys
import time
from typing import Any

import numpy as np
import tyro

from benchmarks.measure import ROOT, Spread, facts, show, usable_cores, use_cores, write

TRL = ('trl>=1.16,<2', 'torch==2.13.0', 'transformers>=5.24,<6', 'accelerate>=1.15,<2', 'datasets>=5.2,<6')
TARGET = 5.0


def cache_home() -> pathlib.Path:
    return pathlib.Path(os.environ.get('XDG_CACHE_HOME') or pathlib.Path.home() / '.cache')


@dataclasses.dataclass(frozen=True)
class Settings:
    """Settings of the comparison.

    Attributes:
      venv: TRL's environment; made when it is not there.
      steps: measured steps of each.
      warmup: unmeasured steps before them, in which mallm compiles.
      cores: keeps all of them to this many cores (Linux); 0 leaves them all. Use 1 where other work is running.
      micro: groups in mallm's micro-batch.
      seed: of weights, prompts and draws.
    """

    venv: pathlib.Path = cache_home() / 'mallm' / 'trl'
    steps: int = 9
    warmup: int = 2
    cores: int = 0
    micro: int = 32
    seed: int = 0


class Peer:
    """A worker process that takes one step when asked."""

    def __init__(self, name: str, command: list[str]) -> None:
        self.name = name
        self.process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd=ROOT)
        self.about = self.answer()
        self.told: list[dict[str, float]] = []

    def answer(self) -> dict[str, Any]:
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        if not line:
            raise RuntimeError(f'{self.name} ended early, code {self.process.wait()}; its stderr is above')
        return json.loads(line)

    def step(self, prompts: list[list[int]]) -> None:
        assert self.process.stdin is not None
        started = time.perf_counter()
        self.process.stdin.write(json.dumps(prompts) + '\n')
        self.process.stdin.flush()
        self.told.append(self.answer() | {'wall_s': time.perf_counter() - started})

    def end(self) -> None:
        assert self.process.stdin is not None
        self.process.stdin.close()
        self.process.wait(timeout=60)


def trl_python(venv: pathlib.Path) -> str:
    """The Python of TRL's environment, which is made first if it is not there."""
    python = venv / ('Scripts/python.exe' if sys.platform == 'win32' else 'bin/python')
    has_trl = python.exists() and subprocess.run([python, '-c', 'import trl'], capture_output=True).returncode == 0
    if not has_trl:
        print(f'installing {", ".join(TRL)} into {venv}', flush=True)
        subprocess.run([sys.executable, '-m', 'venv', str(venv)], check=True)
        subprocess.run([str(python), '-m', 'pip', 'install', '-q', *TRL], check=True)
    return str(python)


def prompts_of(seed: int, steps: int, groups: int, vocab: int) -> list[list[list[int]]]:
    """Random prompts of 22 to 32 tokens for each step; ids 0 and 1 mean padding and end and are left out."""
    draw = np.random.default_rng(seed)
    return [
        [draw.integers(2, vocab, draw.integers(22, 33)).tolist() for _ in range(groups)] for _ in range(steps)
    ]  # fmt: skip


def summary(peer: Peer, measured: int, prompt_tokens: int) -> dict[str, Any]:
    """Medians and ranges of the measured steps; update tokens are prompts (once an answer) and new ones, all real."""
    told = peer.told[-measured:]
    new_tokens = told[0]['new_tokens']
    return {
        'step_s': Spread.of([t['wall_s'] for t in told]),
        'cpu_s': Spread.of([t['cpu_s'] for t in told]),
        'inner_step_s': Spread.of([t['step_s'] for t in told]),
        'generate_tokens_per_s': Spread.of([t['new_tokens'] / t['generate_s'] for t in told]),
        'update_tokens_per_s': Spread.of([(prompt_tokens + new_tokens) / t['update_s'] for t in told]),
        'generate_s': Spread.of([t['generate_s'] for t in told]),
        'update_s': Spread.of([t['update_s'] for t in told]),
        'peak_rss_mib': told[-1]['peak_rss_mib'],
        'reward_first_and_last': [told[0]['reward'], told[-1]['reward']],
        'new_tokens_per_step': new_tokens,
        'first_step_s': peer.told[0]['wall_s'],
        'about': peer.about,
    }


def main(settings: Settings) -> None:
    job: dict[str, Any] = {'vocab': 512, 'groups': 64, 'k': 8, 'new': 8, 'seed': settings.seed, 'micro': settings.micro}
    total = settings.warmup + settings.steps
    prompts = prompts_of(settings.seed, total, job['groups'], job['vocab'])
    flat = [prompt for step in [*prompts, prompts[-1]] for prompt in step]  # TRL prefetches one step
    use_cores(settings.cores)
    about = facts(settings.seed, ('jax', 'jaxlib', 'flax', 'optax', 'numpy'))
    python = trl_python(settings.venv)
    ours = [sys.executable, '-m', 'benchmarks.peer_mallm', json.dumps(job)]
    theirs = [python, str(ROOT / 'benchmarks' / 'peer_trl.py'), json.dumps(job | {'prompts': flat})]
    peers = [Peer('mallm', [*ours, 'shared']), Peer('mallm, split', [*ours, 'split']), Peer('TRL', theirs)]
    for batch in prompts:
        for peer in peers:
            peer.step(batch)
    for peer in peers:
        peer.end()
    prompt_tokens = job['k'] * round(np.mean([sum(map(len, step)) for step in prompts[settings.warmup :]]))
    results = {peer.name: summary(peer, settings.steps, prompt_tokens) for peer in peers}
    columns = ['', 'step s', 'CPU s', 'generate tokens/s', 'update tokens/s', 'peak RSS MiB']
    rows = [
        [
            name,
            r['step_s'].show(3),
            r['cpu_s'].show(3),
            r['generate_tokens_per_s'].show(),
            r['update_tokens_per_s'].show(),
            f'{r["peak_rss_mib"]:,.0f}',
        ]
        for name, r in results.items()
    ]
    show(f'Workload T, median (range) of {settings.steps} alternating steps, {usable_cores()} cores', columns, rows)
    step = {name: r['step_s'].median for name, r in results.items()}
    faster, sharing = step['TRL'] / step['mallm'], step['mallm, split'] / step['mallm']
    verdict = 'reached' if faster >= TARGET else 'NOT reached'
    print(
        f'mallm steps {faster:.2f}x as fast as TRL, of which {sharing:.2f}x comes from sharing prompts and '
        f'{faster / sharing:.2f}x from the rest; the target of {TARGET:.0f}x is {verdict}'
    )
    cpu = results['TRL']['cpu_s'].median / results['mallm']['cpu_s'].median
    print(f'in processor time: {cpu:.2f}x')
    compared = {'faster_than_trl': faster, 'from_sharing': sharing, 'from_the_rest': faster / sharing, 'target': TARGET}
    compared['processor_time_ratio'] = cpu
    chosen = dataclasses.asdict(settings) | {'venv': 'an environment of its own'}
    write('peers', about | {'settings': chosen} | compared | results)


if __name__ == '__main__':
    main(tyro.cli(Settings, description=__doc__))
