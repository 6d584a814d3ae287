"""mallm's side of `benchmarks.peers`: takes one GRPO step for each line on stdin, answers each with a JSON line."""

import asyncio
import dataclasses
import functools
import json
import sys
import time
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import linen as nn

from benchmarks.workloads import Workload
from mallm import cli
from mallm.algo import credit, losses
from mallm.io.log import peak_rss_mib
from mallm.learn.pack import Packing, Row, pack
from mallm.learn.pool import Pool
from mallm.learn.state import make_state, optimiser
from mallm.learn.update import Knobs, Updater
from mallm.models.config import Architecture
from mallm.models.lora import Lora
from mallm.models.sharding import make_mesh
from mallm.models.transformer import Transformer
from mallm.rollout.engine import SamplingParams
from mallm.rollout.jax_engine import JaxEngine
from mallm.types import Prompt


@dataclasses.dataclass(frozen=True)
class Numbers:
    """Token ids are their own text; no end token can be drawn."""

    vocab: int
    end: int = -1
    thinking: bool = False

    @property
    def ends(self) -> tuple[int, ...]:
        return (self.end,)

    def __len__(self) -> int:
        return self.vocab

    def chat(self, messages: Sequence[object], own: Sequence[object] = ()) -> tuple[int, ...]:
        raise NotImplementedError('prompts are given as ids')

    def encode(self, text: str) -> tuple[int, ...]:
        return tuple(map(int, text.split()))

    def decode(self, ids: Sequence[int]) -> str:
        return ' '.join(map(str, ids))


def architecture(work: Workload) -> Architecture:
    return Architecture(
        work.vocab, work.width, work.layers, work.heads, work.kv_heads, work.head_dim, work.ffn, rope_theta=1e6,
        qk_norm=work.qk_norm, remat=work.remat,
    )  # fmt: skip


class Worker:
    """Engine and pool of a workload. `split` asks for each answer with a prompt of its own, as a group of one."""

    def __init__(self, work: Workload, seed: int, split: bool) -> None:
        self.work, self.split, self.steps = work, split, 0
        adapter = Lora(work.rank, 2.0 * work.rank) if work.rank else None
        self.module = Transformer(architecture(work), lora=adapter)
        root, mesh = jax.random.key(seed), make_mesh()
        transform = optimiser(clip=1.0, b1=0.9, b2=0.999, weight_decay=0.0)
        state, shardings = make_state(
            root, module=self.module, transform=transform, mesh=mesh, entropy_coefficient=0.0, keeps_reference=False
        )
        self.pool = Pool('peer', state)
        objective = functools.partial(losses.clipped_surrogate, low=0.2, high=0.2, cap=2.0)
        self.updater = Updater(
            module=self.module, objective=objective, transform=transform, mesh=mesh, shardings=shardings,
            logits_room=work.logits_mib << 20,
        )  # fmt: skip
        self.engine = JaxEngine(self.module, Numbers(work.vocab), root)
        self.base = None if adapter is None else self.frozen(root)
        if self.base is not None:
            self.engine.load_base(self.base)

    def frozen(self, key: jax.Array) -> Any:
        init = jax.jit(lambda key: nn.unbox(self.module.init(key, jnp.zeros((1, 2), jnp.int32))['params']))
        return init(key)

    @property
    def parameters(self) -> dict[str, int]:
        """How many there are, adapters included, and how many of them are trained."""
        trained, frozen = (
            sum(leaf.size for leaf in jax.tree.leaves(nn.unbox(tree))) for tree in (self.pool.state.params, self.base)
        )
        return {'parameters': trained + frozen, 'trained': trained}

    def step(self, prompts: Sequence[Sequence[int]]) -> dict[str, float]:
        """Samples, rewards, credits and learns, and says how long sampling and learning took (seconds)."""
        k, new, started = self.work.k, self.work.new, time.perf_counter()
        cpu_started = time.process_time()
        parts = k if self.split else 1
        self.engine.load('peer', self.pool.state.params, self.steps)
        asked = [(Prompt('one', (), tuple(prompt)), part) for prompt in prompts for part in range(parts)]

        async def ask() -> list:
            params = SamplingParams(new)
            return await asyncio.gather(
                *[self.engine.sample('peer', p, (self.steps, i), k // parts, params) for i, (p, _) in enumerate(asked)]
            )

        answers = [answer for group in asyncio.run(ask()) for answer in group]
        sampled_at = time.perf_counter()
        rewards = [sum(i % 2 == 0 for i in answer.ids) / new for answer in answers]
        normalise = functools.partial(credit.standardised, floor=1e-4)
        advantages = [a for g in range(0, len(rewards), k) for a in credit.compare(rewards[g : g + k], normalise)]
        size = k // parts
        rows = [
            Row(
                prompt.ids, tuple(a.ids for a in answers[n * size : (n + 1) * size]),
                tuple(a.logps for a in answers[n * size : (n + 1) * size]),
                tuple(advantages[n * size : (n + 1) * size]),
            )
            for n, (prompt, _) in enumerate(asked)
        ]  # fmt: skip
        packed_from = time.perf_counter()
        steps = pack(rows, Packing(0, self.work.micro_split if self.split else self.work.micro), self.steps)
        self.pool.learn(self.updater, steps, Knobs(1e-4), self.base)
        jax.block_until_ready(self.pool.state)
        ended = time.perf_counter()
        self.steps += 1
        return {
            'step_s': ended - started,
            'cpu_s': time.process_time() - cpu_started,
            'generate_s': sampled_at - started,
            'update_s': ended - packed_from,
            'reward': float(np.mean(rewards)),
            'new_tokens': sum(len(answer.ids) for answer in answers),
            'peak_rss_mib': peak_rss_mib(),
        }


def main() -> None:
    cli.keep_memory()
    job = json.loads(sys.argv[1])
    work = Workload(**{field.name: job[field.name] for field in dataclasses.fields(Workload)})
    worker = Worker(work, job['seed'], split=sys.argv[2] == 'split')
    print(json.dumps(worker.parameters | {'versions': {'jax': jax.__version__}}), flush=True)
    for line in sys.stdin:
        print(json.dumps(worker.step(json.loads(line))), flush=True)


if __name__ == '__main__':
    main()
