"""One GRPO step of the same model on mallm and on other trainers, taken in turn on this machine, in one run.

Command:  python -m benchmarks.peers                 (workload T; the first run installs TRL into a folder of its own)
          python -m benchmarks.peers --workload S --steps 3 --warmup 1                      (and Tunix into another)

Workload T: a randomly initialised Qwen3 (0.66M parameters: width 128, 4 layers, 4 query and 2 key heads of 32, ffn
256, 512 tokens, tied head); each step 64 new prompts of 22 to 32 tokens, K = 8 answers of exactly 8 tokens, float32,
one AdamW step on all parameters, no KL term. TRL runs as it is fastest here: one micro-batch of all 512 samples, no
gradient checkpointing. All processes wait on stdin and step one after the other, so that what else the machine does
hits all. Target: a whole step at least 5 times faster than TRL's.

Workload S: a model of SmolLM2-135M's shape with random weights, since only speed is compared; each step 8 new prompts
of 64 tokens, K = 8 answers of exactly 16 tokens, float32, one AdamW step on LoRA adapters of rank 16 on all seven
projections. The peers sample all 64 answers at once and learn in micro-batches of 16, without gradient checkpointing;
TRL runs with its malloc tuned (`workloads.KEEP_FREED_MEMORY`). Together they would need over 20 GB, so processes take
turns: each round starts one after the other, lets it warm up, and measures one step. Target: a whole step at least 3
times faster than the better peer's, in less memory than either.

  mallm         each prompt is read once for its K answers, by the sampler and by the learner;
  mallm, split  the same code with each answer as a group of one (prompts read K times): what sharing is worth;
  TRL           GRPOTrainer;
  Tunix         GRPOLearner with its own sampler.
"""

import dataclasses
import json
import os
import pathlib
import subprocess
import sys
import time
from typing import Any, Literal

import numpy as np
import tyro

from benchmarks.measure import ROOT, Spread, facts, matmul_peak, show, usable_cores, use_cores, write
from benchmarks.workloads import WORKLOADS, Workload

PINS = {
    'TRL': ('trl>=1.16,<2', 'torch==2.13.0', 'transformers>=5.24,<6', 'accelerate>=1.15,<2', 'datasets>=5.2,<6',
            'peft>=0.21,<1'),
    'Tunix': ('google-tunix==0.1.7', 'jax==0.10.2', 'flax==0.12.8', 'qwix==0.1.8', 'optax==0.2.8'),
}  # fmt: skip
MODULES = {'TRL': 'trl, peft', 'Tunix': 'tunix, qwix'}
SCRIPTS = {'TRL': 'peer_trl.py', 'Tunix': 'peer_tunix.py'}
VLLM = {'tokens_per_s': 288.0, 'matmul_flops_per_s': 482e9}
"""Workload S's generation alone by vLLM's CPU build (0.32, compiled) on two cores of another machine, and JAX's float32
matmul peak there. The two tell what part of its machine it used; its tokens/s are not comparable with another's."""


def cache_home() -> pathlib.Path:
    return pathlib.Path(os.environ.get('XDG_CACHE_HOME') or pathlib.Path.home() / '.cache')


@dataclasses.dataclass(frozen=True)
class Settings:
    """Settings of the comparison.

    Attributes:
      workload: T (tiny, all parameters) or S (SmolLM2-135M's shape, LoRA).
      venvs: folder of the peers' environments, which are made when they are not there.
      steps: measured steps of each; with workload S also rounds.
      warmup: unmeasured steps before them (S: in each round), in which mallm and Tunix compile.
      cores: keeps all of them to this many cores (Linux); 0 leaves them all. Use 1 where other work is running.
      layers: makes the model that shallow, to try the benchmark; such results are not stored.
      seed: of weights, prompts and draws.
    """

    workload: Literal['T', 'S'] = 'T'
    venvs: pathlib.Path = cache_home() / 'mallm'
    steps: int = 9
    warmup: int = 2
    cores: int = 0
    layers: int = 0
    seed: int = 0


@dataclasses.dataclass(frozen=True)
class Command:
    """How a peer's worker process is started."""

    line: tuple[str, ...]
    environment: tuple[tuple[str, str], ...] = ()


class Peer:
    """A worker process that takes one step when asked."""

    def __init__(self, name: str, command: Command) -> None:
        self.name = name
        self.process = subprocess.Popen(
            command.line, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd=ROOT,
            env=os.environ | dict(command.environment),
        )  # fmt: skip
        self.about = self.answer()

    def answer(self) -> dict[str, Any]:
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        if not line:
            self.close()
            raise RuntimeError(f'{self.name} ended early, code {self.process.returncode}; its stderr is above')
        return json.loads(line)

    def step(self, prompts: list[list[int]]) -> dict[str, float]:
        assert self.process.stdin is not None
        started = time.perf_counter()
        self.process.stdin.write(json.dumps(prompts) + '\n')
        self.process.stdin.flush()
        return self.answer() | {'wall_s': time.perf_counter() - started}

    def close(self) -> None:
        """Asks for nothing more and waits for the worker's end, which it must come to by itself."""
        assert self.process.stdin is not None and self.process.stdout is not None
        self.process.stdin.close()
        self.process.wait(timeout=600)
        self.process.stdout.close()


@dataclasses.dataclass(frozen=True)
class Told:
    """What one worker said of itself, of its first step and of the measured ones."""

    about: dict[str, Any]
    first: dict[str, float]
    steps: tuple[dict[str, float], ...]


def python_of(peer: str, venvs: pathlib.Path) -> str:
    """The Python of a peer's environment, which is made first if it is not there."""
    venv = venvs / peer.lower()
    python = venv / ('Scripts/python.exe' if sys.platform == 'win32' else 'bin/python')
    tried = [python, '-c', f'import {MODULES[peer]}']
    if not (python.exists() and subprocess.run(tried, capture_output=True).returncode == 0):
        print(f'installing {", ".join(PINS[peer])} into {venv}', flush=True)
        subprocess.run([sys.executable, '-m', 'venv', str(venv)], check=True)
        subprocess.run([str(python), '-m', 'pip', 'install', '-q', *PINS[peer]], check=True)
    return str(python)


def prompts_of(seed: int, steps: int, work: Workload) -> list[list[list[int]]]:
    """Random prompts for each step; ids 0 and 1 mean padding and end and are left out."""
    draw, (low, high) = np.random.default_rng(seed), work.prompt
    return [
        [draw.integers(2, work.vocab, draw.integers(low, high + 1)).tolist() for _ in range(work.groups)]
        for _ in range(steps)
    ]


def commands_of(work: Workload, settings: Settings, prompts: list[list[list[int]]]) -> dict[str, Command]:
    """mallm in both variants, then the workload's peers."""
    job = dataclasses.asdict(work) | {'seed': settings.seed}
    ours = (sys.executable, '-m', 'benchmarks.peer_mallm', json.dumps(job))
    flat = [prompt for step in [*prompts, prompts[-1]] for prompt in step]  # TRL prefetches one step
    given = {'TRL': job | {'prompts': flat}, 'Tunix': job}
    theirs = {
        peer: Command(
            (python_of(peer, settings.venvs), str(ROOT / 'benchmarks' / SCRIPTS[peer]), json.dumps(given[peer])),
            work.environment if peer == 'TRL' else (),
        )
        for peer in work.peers
    }
    return {'mallm': Command((*ours, 'shared')), 'mallm, split': Command((*ours, 'split')), **theirs}


def together(commands: dict[str, Command], prompts: list[list[list[int]]], warmup: int) -> dict[str, list[Told]]:
    """All processes live at once and take each step in turn."""
    peers = [Peer(name, command) for name, command in commands.items()]
    told = [[peer.step(batch) for peer in peers] for batch in prompts]
    for peer in peers:
        peer.close()
    steps = zip(peers, zip(*told, strict=True), strict=True)
    return {peer.name: [Told(peer.about, of_peer[0], of_peer[warmup:])] for peer, of_peer in steps}


def one_at_a_time(commands: dict[str, Command], prompts: list[list[list[int]]], rounds: int) -> dict[str, list[Told]]:
    """In each round each process in turn starts, takes all steps, of which the last is measured, and ends."""
    told: dict[str, list[Told]] = {name: [] for name in commands}
    for number in range(rounds):
        for name, command in commands.items():
            peer = Peer(name, command)
            steps = [peer.step(batch) for batch in prompts]
            peer.close()
            told[name].append(Told(peer.about, steps[0], (steps[-1],)))
            measured = ', '.join(f'{part} {value:,.2f}' for part, value in steps[-1].items())
            print(f'round {number + 1} of {rounds}, {name}: {measured}', flush=True)
    return told


def summary(told: list[Told], prompt_tokens: int) -> dict[str, Any]:
    """Medians and ranges of the measured steps; update tokens are prompts (once an answer) and new ones, all real."""
    steps = [step for of_process in told for step in of_process.steps]
    new_tokens = steps[0]['new_tokens']
    return {
        'step_s': Spread.of([t['wall_s'] for t in steps]),
        'cpu_s': Spread.of([t['cpu_s'] for t in steps]),
        'inner_step_s': Spread.of([t['step_s'] for t in steps]),
        'generate_tokens_per_s': Spread.of([t['new_tokens'] / t['generate_s'] for t in steps]),
        'update_tokens_per_s': Spread.of([(prompt_tokens + new_tokens) / t['update_s'] for t in steps]),
        'generate_s': Spread.of([t['generate_s'] for t in steps]),
        'update_s': Spread.of([t['update_s'] for t in steps]),
        'peak_rss_mib': max(t['peak_rss_mib'] for t in steps),
        'reward_first_and_last': [steps[0]['reward'], steps[-1]['reward']],
        'new_tokens_per_step': new_tokens,
        'first_step_s': told[0].first['wall_s'],
        'about': told[0].about,
    }


def compare(results: dict[str, dict[str, Any]], target: float) -> dict[str, Any]:
    """Ratios of mallm to the best of its peers, printed as they are returned."""
    step = {name: r['step_s'].median for name, r in results.items()}
    theirs = {name: seconds for name, seconds in step.items() if not name.startswith('mallm')}
    best = min(theirs, key=lambda name: theirs[name])
    faster, sharing = theirs[best] / step['mallm'], step['mallm, split'] / step['mallm']
    print(
        f'mallm steps {faster:.2f}x as fast as {best}, of which {sharing:.2f}x comes from sharing prompts and '
        f'{faster / sharing:.2f}x from the rest; the target of {target:.0f}x is '
        f'{"reached" if faster >= target else "NOT reached"}'
    )
    spent = {name: r['cpu_s'].median for name, r in results.items()}
    cpu = {name: spent[name] / spent['mallm'] for name in results}
    print('in processor time: ' + ', '.join(f'{name} {ratio:.2f}x' for name, ratio in cpu.items() if name in theirs))
    smaller = min(results[name]['peak_rss_mib'] for name in theirs) / results['mallm']['peak_rss_mib']
    print(f'peak memory: the smallest peer takes {smaller:.2f}x as much as mallm')
    return {
        'best_peer': best, 'faster_than_best_peer': faster, 'from_sharing': sharing, 'from_the_rest': faster / sharing,
        'target': target, 'processor_time_over_mallm': cpu, 'smallest_peer_memory_over_mallm': smaller,
    }  # fmt: skip


def beside_vllm(tokens_per_s: float, peak: float) -> dict[str, float]:
    """Generated tokens for each 1e9 floating-point operations that the machine could have made, here and there."""
    ours, vllm = tokens_per_s / peak * 1e9, VLLM['tokens_per_s'] / VLLM['matmul_flops_per_s'] * 1e9
    print(
        f'matmul peak {peak / 1e9:.0f} GFLOP/s; for each GFLOP of it mallm generates {ours:.2f} tokens, and '
        f"vLLM's CPU build on another machine {vllm:.2f} ({ours / vllm:.2f}x)"
    )
    return {'tokens_per_gflop_of_peak': ours, 'vllm_elsewhere_tokens_per_gflop_of_peak': vllm, 'ratio': ours / vllm}


def main(settings: Settings) -> None:
    work = WORKLOADS[settings.workload]
    work = dataclasses.replace(work, layers=settings.layers or work.layers)
    prompts = prompts_of(settings.seed, settings.warmup + (1 if work.apart else settings.steps), work)
    use_cores(settings.cores)
    about = facts(settings.seed, ('jax', 'jaxlib', 'flax', 'optax', 'numpy'))
    commands = commands_of(work, settings, prompts)
    peaks = matmul_peak(5)
    if work.apart:
        told = one_at_a_time(commands, prompts, settings.steps)
    else:
        told = together(commands, prompts, settings.warmup)
    peaks_after, load_after = matmul_peak(5), os.getloadavg()
    peak = max(rate.median for rate in (*peaks.values(), *peaks_after.values()))
    prompt_tokens = work.k * round(np.mean([sum(map(len, step)) for step in prompts[settings.warmup :]]))
    results = {name: summary(of_peer, prompt_tokens) for name, of_peer in told.items()}
    columns = ['', 'step s', 'CPU s', 'generate tokens/s', 'update tokens/s', 'peak RSS MiB']
    rows = [
        [
            name, r['step_s'].show(3), r['cpu_s'].show(3), r['generate_tokens_per_s'].show(),
            r['update_tokens_per_s'].show(), f'{r["peak_rss_mib"]:,.0f}',
        ]
        for name, r in results.items()
    ]  # fmt: skip
    show(f'{work.title}; median (range) of {settings.steps} steps, {usable_cores()} cores', columns, rows)
    compared = compare(results, work.target)
    if settings.workload == 'S':
        compared['vllm'] = beside_vllm(results['mallm']['generate_tokens_per_s'].median, peak)
    if settings.layers:
        return
    chosen = dataclasses.asdict(settings) | {'venvs': 'environments of their own'}
    machine = {'load_average_at_end': load_after, 'matmul_flops_per_s': {'before': peaks, 'after': peaks_after}}
    said = about | machine | {'settings': chosen, 'workload': dataclasses.asdict(work)} | compared | results
    write('peers' if settings.workload == 'T' else 'peers_s', said)


if __name__ == '__main__':
    main(tyro.cli(Settings, description=__doc__))
