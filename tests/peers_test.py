"""The comparison with other trainers asks all of them for the same step, and compares with the best one."""

import sys

import numpy as np
import pytest

from benchmarks.measure import Spread
from benchmarks.peer_mallm import architecture
from benchmarks.peers import Command, beside_vllm, compare, one_at_a_time, prompts_of, summary, together
from benchmarks.workloads import SMALL, SMOLLM2, WORKLOADS
from mallm.models.presets import PRESETS

ECHO = """
import json, sys
print(json.dumps({'who': sys.argv[1]}), flush=True)
for count, line in enumerate(sys.stdin, 1):
    told = {'step_s': 1.0, 'cpu_s': 2.0, 'generate_s': 0.5, 'update_s': 0.25, 'reward': 0.5, 'new_tokens': 8}
    print(json.dumps(told | {'peak_rss_mib': 10.0 * count, 'read': len(json.loads(line))}), flush=True)
"""


def worker(name: str) -> Command:
    return Command((sys.executable, '-c', ECHO, name))


def test_workload_s_has_the_shape_of_smollm2_and_workload_t_that_of_every_stored_result():
    sizes = ('vocab', 'width', 'layers', 'heads', 'kv_heads', 'head_dim', 'ffn', 'qk_norm', 'tied')
    ours, real = architecture(SMOLLM2), PRESETS['HuggingFaceTB/SmolLM2-135M']
    assert [vars(ours)[name] for name in sizes] == [vars(real)[name] for name in sizes]
    told = [vars(architecture(SMALL))[name] for name in sizes]
    assert told == [512, 128, 4, 4, 2, 32, 256, True, True]
    assert (SMALL.remat, SMALL.logits_mib, SMALL.micro, SMALL.micro_split, SMALL.rank) == (True, 64, 32, 256, 0)


@pytest.mark.parametrize('work', WORKLOADS.values(), ids=list(WORKLOADS))
def test_every_step_has_its_own_prompts_within_the_lengths_that_are_told(work):
    steps = prompts_of(0, 3, work)
    assert [len(step) for step in steps] == [work.groups] * 3 and steps[0] != steps[1]
    lengths = np.array([len(prompt) for step in steps for prompt in step])
    assert (lengths.min(), lengths.max()) == work.prompt
    assert all(2 <= i < work.vocab for step in steps for prompt in step for i in prompt)
    assert work.groups * work.k % work.peer_samples == 0, 'a step is a whole number of micro-batches'


def test_workers_step_in_turn_or_one_process_at_a_time_and_only_the_measured_steps_count():
    commands = {'a': worker('a'), 'b': worker('b')}
    prompts = prompts_of(0, 3, SMALL)
    told = together(commands, prompts, warmup=1)
    assert {name: [len(t.steps) for t in of_peer] for name, of_peer in told.items()} == {'a': [2], 'b': [2]}
    alone = one_at_a_time(commands, prompts[:2], rounds=3)
    for name, of_peer in alone.items():
        assert [t.about for t in of_peer] == [{'who': name}] * 3
        assert [t.steps[0]['peak_rss_mib'] for t in of_peer] == [20.0] * 3, 'the second step of a fresh process'
    made = summary(alone['a'], prompt_tokens=92)
    assert (made['generate_tokens_per_s'].median, made['update_tokens_per_s'].median) == (16.0, 400.0)
    with pytest.raises(RuntimeError, match='b ended early, code 3'):
        one_at_a_time({'b': Command((sys.executable, '-c', 'raise SystemExit(3)'))}, prompts, rounds=1)


def test_the_target_is_held_against_the_better_peer_and_memory_against_the_smaller(capsys):
    def result(step_s: float, cpu_s: float, mib: float) -> dict:
        return {
            'step_s': Spread(step_s, step_s, step_s, 1),
            'cpu_s': Spread(cpu_s, cpu_s, cpu_s, 1),
            'peak_rss_mib': mib,
        }

    results = {
        'mallm': result(2, 2, 100),
        'mallm, split': result(4, 4, 200),
        'TRL': result(9, 20, 150),
        'Tunix': result(8, 10, 400),
    }
    made = compare(results, target=5.0)
    assert (made['best_peer'], made['faster_than_best_peer'], made['from_sharing']) == ('Tunix', 4.0, 2.0)
    assert made['smallest_peer_memory_over_mallm'] == 1.5
    assert 'the target of 5x is NOT reached' in capsys.readouterr().out


def test_generation_is_set_beside_vllm_by_what_each_machine_could_compute():
    """288 tokens/s at 482 GFLOP/s are 0.5975 tokens a GFLOP; 100 at 100 are 1."""
    assert beside_vllm(100.0, 100e9)['ratio'] == pytest.approx(482 / 288)
