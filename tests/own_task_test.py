"""The world of README's example: one file of at most 60 lines, which trains like any other."""

import dataclasses
import json
import pathlib

import pytest

from experiments.own_task import CONFIG, Pair, PairTask
from mallm import train
from mallm.cli import smoke
from mallm.experiment import ModelSettings

FILE = pathlib.Path(__file__).parents[1] / 'experiments' / 'own_task.py'


def test_it_is_one_file_of_at_most_sixty_lines():
    assert len(FILE.read_text().splitlines()) <= 60


def test_its_rewards_by_hand():
    world = Pair(total=9, banned='4')
    after, reward = world.act('first', 'I take 2')
    assert (reward.team, reward.local) == (1, -0.1) and after.observe('second')[0].content == '9!4=2'
    assert after.act('second', '7')[1].team == 1 and after.act('second', '7')[0].solved
    assert after.act('second', '6')[1].team == 0 and not after.act('second', '6')[0].solved
    assert world.act('first', '5')[1].team == 0  # 4 would be needed
    for text in ('?', '', '77', '\u0667'):  # no digit alone
        assert world.act('first', text)[1].local == -0.1
    assert world.act('first', '')[0].act('second', '9')[0].solved is False


def test_it_trains_from_the_warm_start_to_the_summary(tmp_path, monkeypatch):
    monkeypatch.setattr(
        train, 'write_report', lambda folder: None
    )  # its pictures cost seconds and are tested elsewhere
    small = smoke(dataclasses.replace(CONFIG, runs=str(tmp_path), wandb='disabled'))
    tiny = ModelSettings(width=16, layers=1, heads=2, kv_heads=1, head_dim=8, ffn=32, remat=False)
    summary = train.train(dataclasses.replace(small, model=tiny, steps=1))
    assert summary == json.loads((tmp_path / 'own_task_smoke-seed0' / 'summary.json').read_text())
    assert summary['faults'] == 0 and set(summary['format_after']) == set(PairTask(('first', 'second')).team)


def test_what_chance_solves_is_what_it_should_be():
    task = CONFIG.task
    worlds = [task.train(seed) for seed in range(400)]
    expected = sum(len(world.right()) for world in worlds) / 400 / 100  # so many of 100 pairs are right
    assert sum(task.floor(w, 1, seed) for seed, w in enumerate(worlds)) / 400 == pytest.approx(expected, abs=0.04)


def test_readme_shows_it_verbatim():
    assert f'```python\n{FILE.read_text()}```' in (FILE.parents[1] / 'README.md').read_text()
