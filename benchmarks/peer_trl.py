"""TRL's side of `benchmarks.peers`, run by the Python of TRL's own environment: no import from this project.

It answers over stdin and stdout like `benchmarks.peer_mallm`. TRL's trainer owns its loop, so a callback holds it
between steps; a step is everything from one hold to the next: data, generation, reward, loss, AdamW, bookkeeping.
"""

import importlib.metadata
import json
import os
import resource
import sys
import tempfile
import time
from collections.abc import Callable
from typing import Any, TextIO

import torch
from datasets import Dataset
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedModel,
    PreTrainedTokenizerFast,
    Qwen3Config,
    Qwen3ForCausalLM,
    TrainerCallback,
)
from trl import GRPOConfig, GRPOTrainer

PAD, END = 0, 1


def tokenizer_of(vocab: int) -> PreTrainedTokenizerFast:
    """A word a token: 't7' is id 7."""
    words = {f't{i}': i for i in range(vocab)}
    plain = Tokenizer(models.WordLevel(words, unk_token=f't{PAD}'))
    plain.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(tokenizer_object=plain, pad_token=f't{PAD}', eos_token=f't{END}')


class Clock:
    """Seconds spent inside wrapped functions since the last reset, and the tokens and reward seen."""

    def __init__(self) -> None:
        self.reset()

    def reset(self) -> None:
        self.generate_s = self.prepare_s = 0.0
        self.reward, self.new_tokens = 0.0, 0

    def wrap(self, name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def wrapped(*args: Any, **kwargs: Any) -> Any:
            started = time.perf_counter()
            result = function(*args, **kwargs)
            setattr(self, name, getattr(self, name) + time.perf_counter() - started)
            return result

        return wrapped

    def reward_even(self, completion_ids: list[list[int]], **_: Any) -> list[float]:
        """Share of even ids, as on mallm's side."""
        rewards = [sum(i % 2 == 0 for i in ids) / len(ids) for ids in completion_ids]
        self.reward, self.new_tokens = sum(rewards) / len(rewards), sum(map(len, completion_ids))
        return rewards


class Hold(TrainerCallback):
    """Waits for a line before each step, and answers when the step is over, that is, when the next one would begin."""

    def __init__(self, clock: Clock, answers: TextIO) -> None:
        self.clock, self.answers = clock, answers
        self.started: float | None = None
        self.cpu_started = 0.0

    def on_step_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        if self.started is not None:
            step_s = time.perf_counter() - self.started
            told = {
                'step_s': step_s,
                'cpu_s': time.process_time() - self.cpu_started,
                'generate_s': self.clock.generate_s,
                'update_s': step_s - self.clock.prepare_s,
                'reward': self.clock.reward,
                'new_tokens': self.clock.new_tokens,
                'peak_rss_mib': resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / (1 << 10),
            }
            print(json.dumps(told), file=self.answers, flush=True)
        if not sys.stdin.readline():
            os._exit(0)  # nothing is asked any more; the trainer has no other way out of its loop
        self.clock.reset()
        self.started, self.cpu_started = time.perf_counter(), time.process_time()


def model_of(job: dict[str, Any]) -> PreTrainedModel:
    """The workload's model with random weights."""
    config_type, model_type = (Qwen3Config, Qwen3ForCausalLM) if job['qk_norm'] else (LlamaConfig, LlamaForCausalLM)
    config = config_type(
        vocab_size=job['vocab'], hidden_size=job['width'], intermediate_size=job['ffn'],
        num_hidden_layers=job['layers'], num_attention_heads=job['heads'], num_key_value_heads=job['kv_heads'],
        head_dim=job['head_dim'], tie_word_embeddings=True, max_position_embeddings=256, pad_token_id=PAD,
        eos_token_id=END, bos_token_id=None,
    )  # fmt: skip
    return model_type(config)


def adapters_of(job: dict[str, Any]) -> Any:
    """What TRL hands to PEFT: adapters on all seven projections; None where every parameter is trained."""
    if not job['rank']:
        return None
    from peft import LoraConfig

    names = ['q_proj', 'k_proj', 'v_proj', 'o_proj', 'gate_proj', 'up_proj', 'down_proj']
    return LoraConfig(r=job['rank'], lora_alpha=2 * job['rank'], target_modules=names, task_type='CAUSAL_LM')


def settings_of(job: dict[str, Any], folder: str) -> GRPOConfig:
    micros = job['groups'] * job['k'] // job['peer_samples']
    return GRPOConfig(
        output_dir=folder, use_cpu=True, bf16=False, fp16=False, gradient_checkpointing=False, beta=0.0,
        per_device_train_batch_size=job['peer_samples'], gradient_accumulation_steps=micros,
        num_generations=job['k'], steps_per_generation=micros,
        max_completion_length=job['new'], generation_kwargs={'min_new_tokens': job['new']}, temperature=1.0,
        learning_rate=1e-4, max_steps=len(job['prompts']) // job['groups'], report_to='none', save_strategy='no',
        logging_strategy='no', disable_tqdm=True, seed=job['seed'], shuffle_dataset=False,
    )  # fmt: skip


def main() -> None:
    answers = os.fdopen(os.dup(1), 'w')
    os.dup2(2, 1)  # whatever TRL prints goes to stderr
    job = json.loads(sys.argv[1])
    torch.manual_seed(job['seed'])
    clock = Clock()
    data = Dataset.from_list([{'prompt': ' '.join(f't{i}' for i in ids)} for ids in job['prompts']])
    with tempfile.TemporaryDirectory() as folder:
        trainer = GRPOTrainer(
            model=model_of(job), reward_funcs=clock.reward_even, args=settings_of(job, folder), train_dataset=data,
            processing_class=tokenizer_of(job['vocab']), callbacks=[Hold(clock, answers)], peft_config=adapters_of(job),
        )  # fmt: skip
        model = trainer.model
        model.generate = clock.wrap('generate_s', model.generate)
        trainer._prepare_inputs = clock.wrap('prepare_s', trainer._prepare_inputs)
        names = ('trl', 'torch', 'transformers', 'accelerate', *(('peft',) if job['rank'] else ()))
        about = {
            'parameters': sum(p.numel() for p in model.parameters()),
            'trained': sum(p.numel() for p in model.parameters() if p.requires_grad),
            'versions': {name: importlib.metadata.version(name) for name in names},
            'threads': torch.get_num_threads(),
        }
        print(json.dumps(about), file=answers, flush=True)
        trainer.train()


if __name__ == '__main__':
    main()
