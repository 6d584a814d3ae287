"""Supervised training on a user's own transcripts: the pools of their roles learn them, nothing else moves."""

import dataclasses
import json
import pathlib

import jax
import numpy as np
import pytest

from mallm import run as parts
from mallm import train
from mallm.config import override
from mallm.envs.base import Demonstration
from mallm.envs.data import DataError
from mallm.experiment import Experiment, LearningSettings
from mallm.stored import read_learned
from mallm.types import Message
from mallm.warm import clone, row_of, settle, warm_start
from tests.run_folders import TINY, with_adapters

SHOWN = (Message('user', '12?'),)
TELLING = [Demonstration('tool', SHOWN, 'LR'), Demonstration('tool', (Message('user', '21?'),), 'RL')]
PLAIN = dataclasses.replace(TINY, learning=LearningSettings(step_groups=0, micro_groups=2))
KINDS = {'whole parameters': PLAIN, 'adapters': with_adapters(PLAIN)}


def line(transcript: Demonstration) -> str:
    messages = [{'author': message.author, 'content': message.content} for message in transcript.messages]
    return json.dumps({'role': transcript.role, 'messages': messages, 'text': transcript.text}) + '\n'


def file_of(folder: pathlib.Path, *transcripts: Demonstration) -> str:
    (folder / 'mine.jsonl').write_text(''.join(map(line, transcripts)))
    return str(folder / 'mine.jsonl')


def held(run: parts.Run, name: str) -> list[bytes]:
    tree = run.frozen if name == 'base' else run.pools[name].state.params
    return [np.asarray(leaf).tobytes() for leaf in jax.tree.leaves(tree)]


def built(experiment: Experiment, folder: pathlib.Path) -> parts.Run:
    run = parts.build(experiment, folder / 'run', None)
    run.sink.close()
    return run


@pytest.mark.parametrize('kind', KINDS)
def test_cloning_lowers_the_loss_of_the_pool_it_trains_and_moves_nothing_else(kind, tmp_path):
    """The first loss is that of 2 + 1 tokens, each about one of len(tokenizer) alike."""
    experiment = override(KINDS[kind], {'algorithm.divisor': 'tokens', 'algorithm.kl': 0.1})
    run = built(experiment, tmp_path)
    before = {name: held(run, name) for name in ('left', 'right', 'base')}
    rows = [row_of(run, transcript) for transcript in TELLING]
    losses = [clone(run, 'left', rows, 3e-2, seed=step)['loss'] for step in range(30)]
    assert losses[0] == pytest.approx(np.log(len(run.tokenizer)), rel=0.2) and losses[-1] < losses[0] / 4
    assert held(run, 'left') != before['left']
    assert held(run, 'right') == before['right'] and held(run, 'base') == before['base']
    settle(run)
    state = run.pools['left'].state
    assert int(state.updates) == 0 and not any(np.any(leaf) for leaf in jax.tree.leaves(state.moments))
    jax.tree.map(np.testing.assert_array_equal, state.reference, state.params)


@pytest.mark.parametrize('kind', KINDS)
def test_a_run_learns_from_a_file_and_reads_its_checkpoint_back(kind, tmp_path, monkeypatch):
    """With adapters over a base that nothing trains: it is the one that was made, not stored, and known again."""
    monkeypatch.setattr(train, 'write_report', lambda folder: None)
    file = file_of(tmp_path, *TELLING)
    changes = {'warm_start.transcripts': file, 'warm_start.steps': 12, 'warm_start.rate': 3e-2, 'warm_start.rows': 3}
    experiment = override(KINDS[kind], changes | {'steps': 0, 'runs': str(tmp_path)})
    born = {name: held(built(experiment, tmp_path), name) for name in ('left', 'right', 'base')}
    train.train(experiment)
    folder = tmp_path / experiment.folder_name
    rows = [json.loads(text) for text in (folder / 'metrics.jsonl').read_text().splitlines()]
    told = [row for row in rows if row['axis'] == 'warm_start']
    assert len(told) == 12 and told[-1]['loss/left'] < told[0]['loss/left'] / 2 and 'loss/right' not in told[0]
    assert not (folder / 'base').exists()
    (tmp_path / 'mine.jsonl').unlink()  # what was learned needs it no more
    learned = read_learned(folder)
    found = {'base': learned.base} | learned.pools
    found = {name: [np.asarray(leaf).tobytes() for leaf in jax.tree.leaves(tree)] for name, tree in found.items()}
    assert found['left'] != born['left'] and found['right'] == born['right'] and found['base'] == born['base']
    assert train.train(experiment, experiment.folder_name)['run'] == experiment.folder_name


@pytest.mark.parametrize(
    'transcript, said',
    [
        (Demonstration('tool', SHOWN, 'LRLR'), "5 tokens with its end, more than sampling.max_tokens=4 of 'tool'"),
        (Demonstration('tool', SHOWN, 'é'), 'not in the tiny alphabet'),
        (Demonstration('tool', (Message('user', '1' * 64),), 'L'), 'are a longer prompt than sampling.max_prompt'),
        (Demonstration('critic', SHOWN, 'L'), "role='critic': is not of the team"),
    ],
)
def test_a_transcript_that_the_run_could_not_have_is_refused_by_its_line(transcript, said, tmp_path):
    file = file_of(tmp_path, TELLING[0], transcript)
    changes = {'warm_start.transcripts': file, 'sampling.max_prompt': 32}
    run = built(override(PLAIN, changes), tmp_path)
    with pytest.raises(DataError, match=f'mine.jsonl, line 2: .*{said}'):
        warm_start(run)
    with pytest.raises(ValueError, match=said):
        row_of(run, transcript)


def test_a_pool_that_is_not_there_and_a_base_that_is_frozen_are_not_trained(tmp_path):
    run = built(override(KINDS['adapters'], {'warm_start.steps': 0}), tmp_path)
    for name in ('middle', 'base'):
        with pytest.raises(ValueError, match=rf"pool='{name}': this run trains \['left', 'right'\]"):
            clone(run, name, [row_of(run, TELLING[0])], 1e-3, seed=0)


def test_a_file_that_no_step_would_read_is_refused():
    with pytest.raises(ValueError, match=r"transcripts='mine\.jsonl': needs warm_start\.steps"):
        override(PLAIN, {'warm_start.steps': 0, 'warm_start.transcripts': 'mine.jsonl'})
