"""The sink: what a run writes is all there, once, readable by anyone, and nothing it meets can stop the run."""

import inspect
import io
import json
import math
import pathlib
import struct
import sys
from collections.abc import Iterable, Iterator
from typing import Any

import numpy as np
import pytest

from mallm.io import display, files, log
from mallm.io.log import Silent, Sink


def sink(folder: pathlib.Path, **keywords: Any) -> Sink:
    settings = {'name': 'toy_seed0', 'config': {'seed': 0}, 'wandb_mode': 'disabled', 'live': False}
    return Sink(folder, **{**settings, **keywords})


def strict_rows(folder: pathlib.Path) -> list[dict]:
    """metrics.jsonl as a reader sees it that knows no NaN."""

    def refuse(word: str) -> None:
        raise AssertionError(f'{word} is not JSON')

    lines = (folder / 'metrics.jsonl').read_text().splitlines()
    return [json.loads(line, parse_constant=refuse) for line in lines]


def places(folder: pathlib.Path) -> list[tuple[str, int]]:
    return [(row['axis'], row['step']) for row in strict_rows(folder)]


# wandb


def offline_records(folder: pathlib.Path) -> Iterator[Any]:
    """The records of the one offline wandb file: a 7 byte header, then blocks of 32 KiB of LevelDB log chunks."""
    import wandb
    from wandb.proto import wandb_internal_pb2

    wandb.teardown()  # as at the end of the process: wandb's service closes the file and goes
    (path,) = folder.glob('wandb/offline-run-*/run-*.wandb')
    data, at, record = path.read_bytes(), 7, b''
    while at < len(data):
        left = 32768 - at % 32768
        if left < 7:
            at += left
            continue
        _, size, kind = struct.unpack('<IHB', data[at : at + 7])
        record += data[at + 7 : at + 7 + size]
        at += 7 + size
        if kind in (1, 4):  # a whole record, or the last part of one
            yield wandb_internal_pb2.Record.FromString(record)
            record = b''


def logged(records: Iterable[Any]) -> list[dict[str, Any]]:
    history = [record.history for record in records if record.WhichOneof('record_type') == 'history']
    rows = [{item.nested_key[0]: json.loads(item.value_json) for item in row.item} for row in history]
    return [{key: value for key, value in row.items() if not key.startswith('_')} for row in rows]


def test_every_axis_keeps_its_own_steps_in_wandb_and_no_value_is_lost(tmp_path):
    written = [
        ('rollout', 8073, {'reward/planner': 1.5, 'dead_groups/planner': 0.25}),
        ('update/planner', 0, {'loss': 0.5}),
        ('eval', 5, {'success': 0.75, 'success/optimal_2': 1.0}),
        ('update/mover', 31, {'loss': math.nan}),
        ('update/planner', 1, {'loss': 0.4}),
        ('rollout', 8074, {'reward/planner': 1.75}),
        ('eval', 6, {'success': 0.8}),
    ]
    with sink(tmp_path, wandb_mode='offline') as run:
        for axis, step, metrics in written:
            run.write(axis, step, metrics)
    records = list(offline_records(tmp_path))
    expected = [
        {f'{axis}/step': step, **{f'{axis}/{name}': m for name, m in row.items()}} for axis, step, row in written
    ]
    assert logged(records) == [pytest.approx(row, nan_ok=True) for row in expected]
    metrics = [record.metric for record in records if record.WhichOneof('record_type') == 'metric']
    x_axes = {metric.glob_name: metric.step_metric for metric in metrics if metric.glob_name}
    assert x_axes == {f'{axis}/*': f'{axis}/step' for axis in ('rollout', 'update/planner', 'update/mover', 'eval')}


def test_wandb_is_online_only_where_a_login_is_found_and_its_own_variable_is_obeyed(monkeypatch, tmp_path):
    import wandb

    from mallm.io.wandb_run import choose_mode

    monkeypatch.delenv('WANDB_MODE', raising=False)
    monkeypatch.delenv('WANDB_API_KEY', raising=False)
    monkeypatch.setenv('NETRC', str(tmp_path / 'netrc'))
    asked = []
    for found in (False, True):
        monkeypatch.setattr(wandb, 'login', lambda found=found, **how: asked.append(how) or found)
        assert choose_mode('auto') == ('online' if found else 'offline')
    assert asked == [{'prompt': False, 'verify': False}] * 2, 'never waits for a person'
    monkeypatch.setenv('WANDB_MODE', 'disabled')
    assert choose_mode('auto') == 'disabled'
    assert choose_mode('offline') == 'offline', 'what the caller says outright wins'
    with pytest.raises(ValueError, match=r'wandb_mode=.on.: must be auto, offline'):
        choose_mode('on')


class DyingRun:
    """A wandb run whose service is gone."""

    offline, url = True, None

    def __init__(self, dir: str) -> None:
        self.dir = f'{dir}/wandb/offline-run-1/files'

    def define_metric(self, *names: str, **how: str) -> None:
        pass

    def log(self, values: dict) -> None:
        raise ConnectionResetError('Connection lost')

    def finish(self, exit_code: int) -> None:
        raise AssertionError('asked again after it died')


def test_a_run_outlives_wandb_and_says_so_once(monkeypatch, tmp_path, capsys):
    import wandb

    def init(*, mode: str, dir: str, **_: Any) -> DyingRun:
        if mode == 'online':
            raise wandb.errors.CommError('no route to host')
        return DyingRun(dir)

    monkeypatch.setattr(wandb, 'init', init)
    with sink(tmp_path, wandb_mode='online') as run:
        for step in range(3):
            run.write('rollout', step, {'solved': 0.5})
    said = capsys.readouterr().err
    assert 'cannot go online (CommError: no route to host); it records offline' in said
    assert said.count('wandb stopped (ConnectionResetError: Connection lost)') == 1
    assert places(tmp_path) == [('rollout', 0), ('rollout', 1), ('rollout', 2)]


def test_wandb_is_not_even_imported_when_it_is_disabled(monkeypatch, tmp_path):
    monkeypatch.setitem(sys.modules, 'wandb', None)  # importing it would raise
    monkeypatch.delitem(sys.modules, 'mallm.io.wandb_run', raising=False)
    sink(tmp_path / 'without').close()
    with pytest.raises(ImportError):
        sink(tmp_path / 'with', wandb_mode='offline')


# metrics.jsonl


def test_a_row_is_on_disk_as_soon_as_it_is_written_and_strict_json_whatever_the_number(tmp_path):
    run = sink(tmp_path)
    run.write('eval', np.int64(3), {'a': math.nan, 'b': -math.inf, 'c': np.float32(0.5), 'faults': 2})
    (row,) = strict_rows(tmp_path)
    assert list(row)[:4] == ['axis', 'step', 'minutes', 'cpu_minutes']
    assert {key: row[key] for key in ('axis', 'step', 'a', 'b', 'c', 'faults')} == {
        'axis': 'eval', 'step': 3, 'a': None, 'b': None, 'c': 0.5, 'faults': 2,
    }  # fmt: skip
    run.close()


def test_names_that_every_row_has_and_axes_inside_each_other_are_refused(tmp_path):
    with sink(tmp_path) as run:
        with pytest.raises(ValueError, match="metric 'step' on 'eval': every row has this key already"):
            run.write('eval', 0, {'step': 1.0})
        run.write('eval', 0, {'success': 1.0})
        with pytest.raises(ValueError, match='lie in each other'):
            run.write('eval/hard', 0, {'success': 1.0})
        run.write('evaluation', 0, {'success': 1.0})
        with pytest.raises(ValueError, match="axis 'checkpoint' is taken"):
            run.write('checkpoint', 0, {})


def test_a_fresh_run_refuses_a_folder_with_the_metrics_of_another(tmp_path):
    sink(tmp_path).close()
    with sink(tmp_path) as run:  # nothing was measured yet, so nothing can be mixed
        run.write('rollout', 0, {})
    with pytest.raises(FileExistsError, match='already holds the metrics of a run: resume it, choose another name'):
        sink(tmp_path)


def killed_run(folder: pathlib.Path, *, mark: bool) -> None:
    """Two updates a step on one pool; evaluation and checkpoint after two steps; killed in the middle of a line."""
    run = sink(folder)
    run.write('warm_start', 0, {'loss/planner': 1.0})
    run.write('eval', 0, {'success': 0.0})
    for step in range(4):
        run.write('rollout', step, {'solved': step / 10})
        for update in (2 * step, 2 * step + 1):
            run.write('update/shared', update, {'loss': 1.0})
        if step == 1:
            run.write('eval', 2, {'success': 0.5})
            if mark:
                run.mark(2)
    run.close()
    with (folder / 'metrics.jsonl').open('a') as torn:
        torn.write('{"axis": "rollout", "st')


FIRST_HALF = [
    ('warm_start', 0), ('eval', 0),
    ('rollout', 0), ('update/shared', 0), ('update/shared', 1),
    ('rollout', 1), ('update/shared', 2), ('update/shared', 3), ('eval', 2),
]  # fmt: skip


@pytest.mark.parametrize('mark', [True, False])
def test_a_resumed_run_keeps_what_the_checkpoint_had_on_every_axis_and_nothing_more(tmp_path, mark):
    killed_run(tmp_path, mark=mark)
    marked = [('checkpoint', 2)] * mark
    with sink(tmp_path, resume_at=2) as run:
        assert places(tmp_path) == FIRST_HALF + marked
        run.write('rollout', 2, {'solved': 0.2})
        run.write('update/shared', 4, {'loss': 1.0})
    assert places(tmp_path) == [*FIRST_HALF, *marked, ('rollout', 2), ('update/shared', 4)]


def test_wandb_hears_of_a_resumed_run_the_steps_that_follow_its_checkpoint(tmp_path):
    """A23."""
    killed_run(tmp_path, mark=True)
    with sink(tmp_path, resume_at=2, wandb_mode='offline') as run:
        run.write('rollout', 2, {'solved': 0.2})
        run.write('update/shared', 4, {'learning_rate': 0.5})
    assert logged(offline_records(tmp_path)) == [
        {'rollout/step': 2, 'rollout/solved': 0.2}, {'update/shared/step': 4, 'update/shared/learning_rate': 0.5},
    ]  # fmt: skip


def test_a_step_that_a_resumed_run_does_again_replaces_what_was_kept_of_it(tmp_path):
    killed_run(tmp_path, mark=True)
    with sink(tmp_path, resume_at=2) as run:
        run.write('rollout', 2, {'solved': 0.2})
        run.write('eval', 2, {'success': 0.6})  # measured again before playing on
        run.write('eval', 2, {'success_t1': 0.4})  # a second row of the same step in the same run is no repetition
    rows = [row for row in strict_rows(tmp_path) if (row['axis'], row['step']) == ('eval', 2)]
    assert [row.get('success') for row in rows] == [0.6, None]
    assert places(tmp_path).count(('rollout', 2)) == 1


def test_the_minutes_of_a_resumed_run_go_on_from_its_checkpoint(tmp_path):
    (tmp_path / 'metrics.jsonl').write_text('{"axis": "rollout", "step": 0, "minutes": 5.0, "cpu_minutes": 9.0}\n')
    with sink(tmp_path, resume_at=1) as run:
        run.write('rollout', 1, {})
    old, new = strict_rows(tmp_path)
    assert (old['minutes'], old['cpu_minutes']) == (5, 9)
    assert 5 <= new['minutes'] < 6 and 9 <= new['cpu_minutes'] < 10


def test_a_broken_line_that_is_not_the_last_is_named(tmp_path):
    (tmp_path / 'metrics.jsonl').write_text('{"axis": "rollout", "step": 0}\n{"ax\n{}\n')
    with pytest.raises(ValueError, match=r'metrics.jsonl line 2 is not JSON.*remove that line'):
        files.read_rows(tmp_path / 'metrics.jsonl')


# config.json, replays.json, summary.json


def test_the_config_is_written_without_secrets_and_a_changed_one_is_said_and_kept(monkeypatch, tmp_path, capsys):
    monkeypatch.setenv('SOME_API_KEY', 'k-0123456789abcdef')
    config = {
        'lr': 0.1, 'max_tokens': 12, 'pools': ('a', 'b'), 'wandb': {'api_key': 'x', 'hf_token': 'y', 'password': ''},
        'server': 'http://me:pass@host:1/v1', 'header': 'Bearer k-0123456789abcdef', 'credit': math.hypot,
    }  # fmt: skip
    with sink(tmp_path, config=config) as run:
        run.write('rollout', 0, {})
    text = (tmp_path / 'config.json').read_text()
    assert json.loads(text) == {
        'lr': 0.1, 'max_tokens': 12, 'pools': ['a', 'b'],
        'wandb': {'api_key': '***', 'hf_token': '***', 'password': ''},
        'server': 'http://***@host:1/v1', 'header': 'Bearer ***', 'credit': 'math.hypot',
    }  # fmt: skip
    sink(tmp_path, config=config, resume_at=1).close()
    assert 'another config' not in capsys.readouterr().err
    assert (tmp_path / 'config.json').read_text() == text
    (tmp_path / 'summary.json').write_text('{"success_after": 0.5}')
    sink(tmp_path, config={**config, 'lr': 0.2}, resume_at=1).close()
    assert 'resumed with another config than config.json says: lr (0.1 -> 0.2)' in capsys.readouterr().err
    old = {'step': 1, 'config': json.loads(text), 'summary': {'success_after': 0.5}}
    assert json.loads((tmp_path / 'config.json').read_text()) == {**json.loads(text), 'lr': 0.2, 'earlier': [old]}
    assert not (tmp_path / 'summary.json').exists()
    sink(tmp_path, config={**config, 'lr': 0.3}, resume_at=2).close()
    kept = json.loads((tmp_path / 'config.json').read_text())
    assert (kept['lr'], [until['config']['lr'] for until in kept['earlier']]) == (0.3, [0.1, 0.2])


def test_a_config_value_without_a_json_form_is_refused(tmp_path):
    with pytest.raises(TypeError, match=r'object value .* has no JSON form'):
        sink(tmp_path, config={'a': object()})


def test_replays_are_added_to_their_moment_and_a_resumed_run_starts_its_list_anew(tmp_path):
    def stored() -> dict[str, list[int]]:
        kept = json.loads((tmp_path / 'replays.json').read_text())
        return {when: [replay['env'] for replay in replays] for when, replays in kept.items()}

    with sink(tmp_path) as run:
        run.replays('before', [{'env': 1, 'answer': '\ud800</script>'}])
        run.replays('before', [{'env': 2}])
        run.replays('after', [{'env': 1}])
        with pytest.raises(ValueError, match="when='later': replays are kept before or after"):
            run.replays('later', [])
    assert stored() == {'before': [1, 2], 'after': [1]}
    with sink(tmp_path, resume_at=3) as run:
        run.replays('after', [{'env': 7}])
    assert stored() == {'before': [1, 2], 'after': [7]}


@pytest.mark.parametrize('live', [True, False])
def test_stdout_holds_the_summary_as_one_json_line_and_nothing_else(tmp_path, capsys, live):
    with sink(tmp_path, live=live) as run:
        run.note('warm start: 150 steps')
        run.write('rollout', 0, {'reward/planner': 0.5})
        run.summary({'success_after': np.float64(0.5), 'random_mover': math.nan, 'note': 'two\nlines'})
    out, err = capsys.readouterr()
    assert out.count('\n') == 1
    assert json.loads(out) == {'success_after': 0.5, 'random_mover': None, 'note': 'two\nlines'}
    assert json.loads((tmp_path / 'summary.json').read_text()) == json.loads(out)
    assert 'warm start: 150 steps' in err and '+0.50' in err


# what one sees


def rollout(**changes: float) -> dict[str, float]:
    return {
        'reward/planner': 0.25, 'reward/mover': -0.5, 'dead_groups/planner': 0.3, 'truncated/mover': 0.02, 'faults': 1,
        'tokens_per_s': 812.4, 'compiles': 3, 'seconds/play': 2.04, 'seconds/learn': 1.0, 'unheard_of': 7.0, **changes,
    }  # fmt: skip


def test_the_plain_line_comes_at_once_then_about_every_ten_seconds_and_the_last_state_at_the_end(capsys):
    now = [100.0]
    screen = log.Screen('toy', lambda: (1.0, 2.0), live=False, clock=lambda: now[0])
    screen.start()
    for step, at in enumerate([100.0, 101.0, 109.9, 110.0, 112.0]):
        now[0] = at
        screen.show('rollout', step, rollout())
    screen.stop()
    screen.stop()
    lines = capsys.readouterr().err.splitlines()
    assert [line.split(' | ')[1] for line in lines] == ['step 0', 'step 3', 'step 4']


@pytest.mark.parametrize('live', [True, False])
def test_the_display_shows_where_the_run_stands(capsys, live):
    screen = log.Screen('toy', lambda: (1.04, 2.0), live=live)
    screen.start()
    screen.show('eval', 4, {'success': 0.5, 'strict': 0.4})
    screen.show('eval', 4, {'success_t1': 0.3})
    screen.show('update/shared', 9, {'entropy': 1.25, 'loss': 0.125})
    screen.show('rollout', 5, rollout())
    screen._due = 0.0
    screen.show('rollout', 5, {})
    screen.stop()
    shown = capsys.readouterr().err
    for part in (
        '50% (strict 40%) at step 4', 'planner +0.25  mover -0.50', 'shared 1.25', 'planner 30%', 'mover 2%', '812',
        'play 2.0  learn 1.0', 'minutes', '1.0', 'CPU minutes', '2.0', 'compiles',
    ):  # fmt: skip
        assert part in shown, part
    assert 'unheard_of' not in shown


def test_before_the_first_rollout_the_warm_start_is_shown():
    shown = dict(display.fields({'warm_start': (40, {'loss/planner': 0.5})}, 0.0, 0.0))
    assert shown['step'] == 'warm_start 40' and shown['warm start'] == 'planner 0.5'


def test_a_run_whose_answers_are_all_cut_or_whose_groups_are_all_dead_is_warned_early_and_once(tmp_path, capsys):
    dull = rollout(**{'truncated/mover': 1.0, 'dead_groups/planner': 0.96})
    with sink(tmp_path) as run:
        for step in range(4):
            run.write('rollout', step, rollout() if step == 0 else dull)
    warnings = [line for line in capsys.readouterr().err.splitlines() if line.startswith('WARNING')]
    assert len(warnings) == 2
    assert "WARNING (step 1): 100% of mover's answers are cut off at max_tokens" in warnings[0]
    assert 'Raise max_tokens' in warnings[0]
    assert "96% of planner's groups are dead" in warnings[1] and 'exploration' in warnings[1]


def test_a_run_that_has_learned_is_not_warned_of_dead_groups(tmp_path, capsys):
    with sink(tmp_path) as run:
        for step in range(12):
            run.write('rollout', step, rollout(**{'dead_groups/planner': 1.0 if step >= 5 else 0.95}))
    with sink(tmp_path, resume_at=12) as run:
        run.write('rollout', 12, rollout(**{'dead_groups/planner': 1.0}))
    assert 'WARNING' not in capsys.readouterr().err


def test_what_a_model_wrote_can_neither_steer_nor_style_the_terminal(tmp_path, capsys):
    with sink(tmp_path) as run:
        run.note('[red]a[/red] \x1b[2J\x9b1m\r\u202e \ud800 \u00e4\u4e16')
    assert '[red]a[/red] \\x1b[2J\\x9b1m\\r\\u202e \\ud800 \u00e4\u4e16' in capsys.readouterr().err


def test_a_failure_inside_the_with_gives_the_screen_back_and_closes_the_files(tmp_path, monkeypatch):
    class Terminal(io.StringIO):
        def isatty(self) -> bool:
            return True

    monkeypatch.setattr(sys, 'stderr', Terminal())
    monkeypatch.setenv('TERM', 'xterm')
    run = sink(tmp_path, live=None)
    with pytest.raises(TypeError), run:
        run.write('rollout', 0, {'solved': None})
    shown = sys.stderr.getvalue()
    assert shown.rindex('\x1b[?25h') > shown.rindex('\x1b[?25l'), 'the cursor is back'
    with pytest.raises(ValueError, match='closed file'):
        run.write('rollout', 1, {})


def test_the_silent_sink_has_every_verb_of_the_sink():
    def verbs(kind: type) -> dict[str, inspect.Signature]:
        return {name: inspect.signature(verb) for name, verb in inspect.getmembers(kind, inspect.isfunction)
                if not name.startswith('_') or name == '__enter__'}  # fmt: skip

    assert verbs(Silent) == verbs(Sink)


@pytest.mark.parametrize(
    'name, group',
    [
        ('sokoban_seed3', 'sokoban'),
        ('sokoban-s12', 'sokoban'),
        ('a_seed=1', 'a'),
        ('a-seed0.2', 'a'),
        ('plans', 'plans'),
        ('seed7', 'seed7'),
    ],
)
def test_runs_are_grouped_by_their_name_without_the_seed(name, group):
    assert files.without_seed(name) == group
