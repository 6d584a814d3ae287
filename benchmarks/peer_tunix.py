"""Tunix's side of `benchmarks.peers`, run by the Python of Tunix's own environment: no import from this project.

It answers over stdin and stdout like `benchmarks.peer_mallm`. Tunix's learner owns its loop and pulls batches from an
iterator, which holds it between steps; a step is everything from one pull to the next. All answers of a step are
sampled in one batch by Tunix's own (vanilla) sampler, and its micro-batches are those of the workload.
"""

import importlib.metadata
import json
import os
import resource
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import numpy as np
import optax
import qwix
from flax import nnx
from tunix.models.llama3 import model as llama3
from tunix.rl import rl_cluster as clusters
from tunix.rl.grpo.grpo_learner import GRPOConfig, GRPOLearner
from tunix.rl.rollout.base_rollout import RolloutConfig

PAD, END = 0, 1
PROJECTIONS = '.*(q_proj|k_proj|v_proj|o_proj|gate_proj|up_proj|down_proj)'


class Numbers:
    """Token ids are their own text. There is no token at the start of a prompt, as on the other sides."""

    def encode(self, text: str, **_: Any) -> list[int]:
        return list(map(int, text.split()))

    def decode(self, ids: Sequence[int], **_: Any) -> str:
        return ' '.join(map(str, ids))

    def bos_id(self) -> None:
        return None

    def eos_id(self) -> int:
        return END

    def pad_id(self) -> int:
        return PAD


class Clock:
    """Seconds spent inside wrapped functions since the last reset, and the tokens and reward seen."""

    def __init__(self) -> None:
        self.reset()

    def reset(self) -> None:
        self.generate_s, self.update_from = 0.0, 0.0
        self.reward, self.new_tokens = 0.0, 0

    def generates(self, function: Callable[..., Any]) -> Callable[..., Any]:
        def wrapped(*args: Any, **kwargs: Any) -> Any:
            started = time.perf_counter()
            result = function(*args, **kwargs)
            self.generate_s += time.perf_counter() - started
            return result

        return wrapped

    def updates(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """Notes when the first micro-batch of a step is learned from; learning goes on until the step is over."""

        def wrapped(*args: Any, **kwargs: Any) -> Any:
            self.update_from = self.update_from or time.perf_counter()
            return function(*args, **kwargs)

        return wrapped

    def reward_even(self, prompts: Sequence[str], completions: Sequence[str], **_: Any) -> list[float]:
        """Share of even ids, as on mallm's side."""
        answers = [list(map(int, text.split())) for text in completions]
        rewards = [sum(i % 2 == 0 for i in ids) / max(1, len(ids)) for ids in answers]
        self.reward, self.new_tokens = sum(rewards) / len(rewards), sum(map(len, answers))
        return rewards


def batches(actor: nnx.Module, clock: Clock, answers: Any) -> Iterator[dict[str, list[str]]]:
    """A batch for each line on stdin, answered when the next one is asked for, that is, when its step is over."""
    for line in sys.stdin:
        clock.reset()
        started, cpu_started = time.perf_counter(), time.process_time()
        yield {'prompts': [' '.join(map(str, ids)) for ids in json.loads(line)]}
        jax.block_until_ready(jax.tree.leaves(nnx.state(actor, nnx.LoRAParam)))
        ended = time.perf_counter()
        told = {
            'step_s': ended - started,
            'cpu_s': time.process_time() - cpu_started,
            'generate_s': clock.generate_s,
            'update_s': ended - clock.update_from,
            'reward': clock.reward,
            'new_tokens': clock.new_tokens,
            'peak_rss_mib': resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / (1 << 10),
        }
        print(json.dumps(told), file=answers, flush=True)


def adapted(job: dict[str, Any]) -> nnx.Module:
    """The workload's model with random weights, and an adapter on each projection."""
    config = llama3.ModelConfig(
        num_layers=job['layers'], vocab_size=job['vocab'], embed_dim=job['width'], hidden_dim=job['ffn'],
        num_heads=job['heads'], head_dim=job['head_dim'], num_kv_heads=job['kv_heads'], rope_theta=100_000,
        norm_eps=1e-5, weight_tying=True,
    )  # fmt: skip
    model = llama3.Llama3(config, rngs=nnx.Rngs(job['seed']))
    provider = qwix.LoraProvider(module_path=PROJECTIONS, rank=job['rank'], alpha=2.0 * job['rank'])
    return qwix.apply_lora_to_model(model, provider, rngs=nnx.Rngs(job['seed'] + 1), **model.get_model_input())


def learner(model: nnx.Module, job: dict[str, Any], clock: Clock) -> GRPOLearner:
    mesh = jax.sharding.Mesh(np.asarray(jax.devices()[:1]).reshape(1, 1), ('fsdp', 'tp'))
    longest = job['prompt'][1]
    training = clusters.RLTrainingConfig(
        actor_optimizer=optax.adamw(1e-4, weight_decay=0.0), eval_every_n_steps=1 << 20, max_steps=1 << 20,
        mini_batch_size=job['groups'], train_micro_batch_size=job['peer_samples'] // job['k'],
        rollout_micro_batch_size=job['groups'], compute_logps_micro_batch_size=job['groups'],
    )  # fmt: skip
    rollout = RolloutConfig(
        max_tokens_to_generate=job['new'], max_prompt_length=longest, kv_cache_size=longest + job['new'] + 1,
        temperature=1.0, top_p=1.0, top_k=None, eos_tokens=[-1],
    )  # fmt: skip
    roles = (clusters.Role.ACTOR, clusters.Role.REFERENCE, clusters.Role.ROLLOUT)
    cluster = clusters.RLCluster(
        actor=model, tokenizer=Numbers(),
        cluster_config=clusters.ClusterConfig(
            role_to_mesh=dict.fromkeys(roles, mesh), rollout_engine='vanilla', training_config=training,
            rollout_config=rollout,
        ),
    )  # fmt: skip
    cluster.generate = clock.generates(cluster.generate)
    cluster.update_actor = clock.updates(cluster.update_actor)
    config = GRPOConfig(num_generations=job['k'], num_iterations=1, beta=0.0, epsilon=0.2)
    return GRPOLearner(rl_cluster=cluster, algo_config=config, reward_fns=clock.reward_even)


def main() -> None:
    answers = os.fdopen(os.dup(1), 'w')
    os.dup2(2, 1)  # whatever Tunix prints goes to stderr
    job, clock = json.loads(sys.argv[1]), Clock()
    model = adapted(job)
    learning = learner(model, job, clock)
    trained = sum(leaf.size for leaf in jax.tree.leaves(nnx.state(model, nnx.LoRAParam)))
    whole = sum(leaf.size for leaf in jax.tree.leaves(nnx.state(model, nnx.Param)))
    names = ('google-tunix', 'jax', 'flax', 'qwix', 'optax')
    about = {
        'parameters': whole, 'trained': trained, 'versions': {name: importlib.metadata.version(name) for name in names}
    }  # fmt: skip
    print(json.dumps(about), file=answers, flush=True)
    learning.train(batches(model, clock, answers))
    os._exit(0)  # its worker threads would keep the process


if __name__ == '__main__':
    main()
