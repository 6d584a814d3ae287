"""A40: the quick start with a model that never stops. It is said early and plainly, and nothing is learned from it."""

import contextlib
import dataclasses
import json

from experiments.sokoban_at_grpo import CONFIG
from mallm import train
from mallm.cli import smoke
from mallm.experiment import ModelSettings
from mallm.types import Answer


class NeverStops:
    """Says one id until it is cut."""

    def __init__(self, tokenizer):
        self.tokenizer, self.version, self.said = tokenizer, 0, tokenizer.encode('.')[:1]

    async def sample(self, policy, prompt, path, k, params):
        ids = tuple(self.said) * params.max_tokens
        cut = Answer(ids, (-0.5,) * len(ids), self.tokenizer.decode(ids), 'length', self.version)
        return (cut,) * k

    def load_base(self, base):
        pass

    def load(self, policy, weights, version):
        self.version = version

    def metrics(self):
        return {'tokens_sampled': 1.0, 'seconds/sample': 1.0, 'compiles/sample': 0.0}


def test_a_model_that_never_stops_is_reported_and_teaches_nothing(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(train, 'write_report', lambda folder: None)
    make_engine = lambda experiment, policies, folder: NeverStops(policies.tokenizer)  # noqa: E731
    monkeypatch.setattr(train, 'engines', lambda experiment: contextlib.nullcontext(make_engine))
    experiment = smoke(dataclasses.replace(CONFIG, runs=str(tmp_path), wandb='disabled'))
    tiny = ModelSettings(width=16, layers=1, heads=2, kv_heads=1, head_dim=8, ffn=32, remat=False)
    warm = dataclasses.replace(experiment.warm_start, steps=0)
    summary = train.train(dataclasses.replace(experiment, model=tiny, warm_start=warm))
    folder = tmp_path / 'sokoban_at_grpo_smoke-seed0'
    rows = [json.loads(line) for line in (folder / 'metrics.jsonl').read_text().splitlines()]
    played = [row for row in rows if row['axis'] == 'rollout']
    assert len(played) == experiment.steps == 2
    for row in played:
        shares = {name: value for name, value in row.items() if name.startswith(('truncated/', 'dead_groups/'))}
        assert len(shares) == 4 and set(shares.values()) == {1.0} and row['faults'] == 0
    assert not [row for row in rows if row['axis'].startswith('update/')], 'equal answers make no update'
    said = capsys.readouterr().err
    for role in experiment.task.team:
        assert f"WARNING (step 0): 100% of {role}'s answers are cut off at max_tokens" in said
        assert f"100% of {role}'s groups are dead" in said
    assert summary['success_after'] == summary['strict_after'] == 0
