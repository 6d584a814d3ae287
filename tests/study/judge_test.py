"""Stored runs judged again: as training judged them, and with roles that other runs' policies play."""

import dataclasses
import json

import pytest
import tyro

from experiments import evaluate as command
from mallm import train
from mallm.envs.base import FINAL
from mallm.evaluate import examined
from mallm.rollout import tree
from mallm.stored import read_learned
from mallm.study.judge import Part, company, judge
from tests.run_folders import TINY, saved, with_adapters


@pytest.fixture(scope='module')
def runs(tmp_path_factory):
    """Folders and runs: two of whole pools that differ by seed, and one of adapters."""
    root = tmp_path_factory.mktemp('runs')
    other = dataclasses.replace(TINY, name='other', seed=3)
    wider = dataclasses.replace(TINY, name='wider', model=dataclasses.replace(TINY.model, width=32))
    kinds = {'host': TINY, 'other': other, 'adapters': with_adapters(dataclasses.replace(TINY, name='low'))}
    return {name: saved(experiment, root) for name, experiment in (kinds | {'wider': wider}).items()}


def said(trajectories) -> list[list[tuple[str, str]]]:
    """Who wrote what in each episode."""
    return [
        [(group.key.role, group.candidates[group.chosen].answer.text) for turn in t.turns for group in turn.groups]
        for t in trajectories
    ]


def played(folder, guests=()):
    """What is said on the first boards of a split when a stored team plays them, greedily."""
    host = read_learned(folder)
    engine, cast = company(host, {role: (read_learned(path), plays) for role, path, plays in guests})
    stage = tree.Stage(host.experiment.sampler(0.0), engine, host.tokenizer, cast)
    return said(examined(host.experiment, stage, split=FINAL, step=1, boards=6).trajectories)


@pytest.mark.parametrize('kind', ['host', 'adapters'])
def test_a_stored_team_plays_as_it_did_while_it_was_trained(kind, runs):
    folder, run = runs[kind]
    assert played(folder) == said(train.examine(run, FINAL, 1, 6, 0.0).trajectories)


@pytest.mark.parametrize('kind', ['host', 'adapters'])
def test_roles_swapped_by_a_cast_play_as_training_plays_them_swapped(kind, runs):
    folder, run = runs[kind]
    swapped = played(folder, [('tool', folder, 'plan'), ('plan', folder, 'tool')])
    assert swapped == said(train.examine(run, FINAL, 1, 6, 0.0, {'tool': 'right', 'plan': 'left'}).trajectories)
    assert swapped != played(folder)


def test_a_guest_plays_its_role_and_the_host_all_others(runs):
    (host, _), (other, _) = runs['host'], runs['other']
    alone, mixed = played(host), played(host, [('plan', other, 'plan')])
    assert [episode[0] for episode in mixed] == [episode[0] for episode in alone], 'the tool is the same'
    assert mixed != alone
    back = played(host, [('plan', other, 'plan'), ('tool', other, 'tool')])
    assert back == played(other, [('tool', other, 'tool')]), 'one task, both roles are guests'


def test_what_is_told_has_the_shares_and_who_played(runs):
    (host, run), (other, _) = runs['host'], runs['other']
    told = judge(host, {'plan': Part(other, 'tool')}, boards=5)
    assert told['cast'] == {'plan': 'other-seed3@tool'} and (told['run'], told['step']) == ('apart-seed0', 1)
    assert told['boards'] == 5 and told['split'] == 'final' and 0 <= told['success'] <= 1
    assert told['words']['difficulty'] == 'shortest solution'
    whole = judge(host, {})
    assert whole['boards'] == 6
    assert whole['success'] == round(train.examine(run, FINAL, 1, 6, 0.0).success, 4)


def test_the_command_takes_casts_as_pairs_and_prints_one_line_of_json(runs, capsys):
    host, other = str(runs['host'][0]), str(runs['other'][0])
    tyro.cli(command.main, args=[host, '--cast', 'plan', f'{other}@tool', 'tool', other, '--boards', '3'])
    told = json.loads(capsys.readouterr().out)
    assert told['cast'] == {'plan': 'other-seed3@tool', 'tool': 'other-seed3@tool'} and told['boards'] == 3
    with pytest.raises(SystemExit, match="no run 'nowhere'"):
        tyro.cli(command.main, args=[host, '--cast', 'plan', 'nowhere'])


def test_a_cast_that_cannot_be_is_refused(runs):
    host, other, wider = (runs[name][0] for name in ('host', 'other', 'wider'))
    with pytest.raises(ValueError, match=r"cast coach: the team of apart-seed0 is \('tool', 'plan'\)"):
        judge(host, {'coach': Part(other, 'tool')})
    with pytest.raises(ValueError, match=r"has no role 'solo', it has \['plan', 'tool'\]"):
        judge(host, {'tool': Part(other, 'solo')})
    with pytest.raises(ValueError, match='cast tool: wider-seed0 is another model'):
        judge(host, {'tool': Part(wider, 'tool')})
    with pytest.raises(ValueError, match=r"split='train': must be one of \['final', 'held_out'\]"):
        judge(host, {}, split='train')
