"""The report and the replays: everything a run folder holds is shown, and hostile text stays text."""

import base64
import hashlib
import html.parser
import json
import math
import pathlib
import re

import numpy as np
import pytest
from rich.console import Console

from experiments import watch as watch_experiment
from mallm.io import curves, files, log, page, report, watch
from mallm.io.log import Sink

HOSTILE = '<script>alert(1)</script></script><img src=x onerror=alert(2)>"\'& \x1b[2J \ud800 [red]up[/red]'
BOARD = '#####\n#@$.#\n#####'
DONE = '#####\n# @*#\n#####'


def replay(env: int, answers: list[str], *, solved: bool) -> dict:
    turns = [
        {
            'groups': [
                {'role': 'planner', 'prompt': f'{BOARD}\nplan', 'answer': text, 'reward': 0.5,
                 'terms': {'format': 0.25}, 'chosen': True},
                {'role': 'mover', 'prompt': text, 'answer': 'R', 'reward': math.nan, 'terms': {}, 'chosen': True},
            ]
        }
        for text in answers
    ]  # fmt: skip
    frames = [BOARD] * len(answers) + [DONE if solved else BOARD]
    words = {'instance': 'puzzle', 'difficulty': 'empty cells'}
    return {'env': env, 'solved': solved, 'difficulty': 1, 'words': words, 'frames': frames, 'turns': turns}


def write_run(folder: pathlib.Path, *, rises: float = 0.1, summary: bool = True) -> pathlib.Path:
    """A whole run of ten steps."""
    config = {'seed': 3, 'world': HOSTILE}
    with Sink(folder, name=folder.name, config=config, wandb_mode='disabled', live=False) as run:
        run.replays('before', [replay(7, [HOSTILE, 'stay'], solved=False), replay(9, ['stay'], solved=False)])
        for step in range(10):
            if step % 3 == 0:
                success = {
                    'success': rises * step,
                    'strict': rises * step / 2,
                    'success_t1': 0.1,
                    'turns_to_solve': 4.0,
                }
                lengths = {'success/optimal_2': rises * step, 'success/optimal_10': 0.0}
                run.write('eval', step, {**success, **lengths})
            roles = {
                'reward/planner': 0.1 * step,
                'reward/mover': math.nan if step == 4 else 0.5,
                'tokens_per_s': 900.0,
            }
            run.write('rollout', step, {**roles, 'dead_groups/planner': 0.99, 'truncated/planner': 0.0})
            run.write('update/shared', step, {'entropy': 1.0, 'loss': 0.1})
        run.replays('after', [replay(7, ['push'], solved=True)])
        if summary:
            run.summary({'success_before': 0.017, 'success_after': 0.912, 'random_mover': 0.043, 'seed': 3,
                         'commit': 'abc123456789def', 'minutes': 11.94, 'cpu_minutes': 21.36, 'strict_after_t1': 0.25,
                         'by_difficulty_before': {'2': 0.0, '10': 0.0}, 'by_difficulty_after': {'2': 0.9, '10': 0.0},
                         'strict_by_difficulty_after': {'2': 0.5},
                         'words': {'instance': 'puzzle', 'difficulty': 'empty cells', 'floor': 'blind guess'}}
                         )  # fmt: skip
    return folder


@pytest.fixture(scope='module')
def run_folder(tmp_path_factory) -> pathlib.Path:
    folder = write_run(tmp_path_factory.mktemp('runs') / 'toy_seed3')
    assert report.write_report(folder) == folder / 'report.html'
    return folder


class Reader(html.parser.HTMLParser):
    """What a browser makes of the page: every element, all visible text, and the text of its scripts."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.elements: list[tuple[str, dict[str, str | None]]] = []
        self.text, self.scripts = '', []
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, dict(attrs)))

    def handle_data(self, data: str) -> None:
        if self.elements and self.lasttag == 'script' and self.cdata_elem == 'script':
            self.scripts.append(data)
        elif self.cdata_elem is None:
            self.text += data


@pytest.fixture(scope='module')
def seen(run_folder) -> Reader:
    return Reader((run_folder / 'report.html').read_text())


# the page


def test_the_page_is_one_file_that_asks_for_nothing(run_folder, seen):
    links = [value for _, attrs in seen.elements for name, value in attrs.items() if name in ('src', 'href', 'srcset')]
    assert len(links) == 14, 'six curves and the gallery, light and dark'
    assert all(link.startswith('data:image/png;base64,') for link in links)
    assert not re.search(r'https?://|@import|url\(', (run_folder / 'report.html').read_text())


def test_what_a_model_wrote_stays_text_in_the_page(seen):
    tags = [tag for tag, _ in seen.elements]
    assert tags.count('script') == 2 and len(seen.scripts) == 2, 'the stored games and the player, nothing else'
    assert not [name for _, attrs in seen.elements for name in attrs if name.startswith('on')]
    assert tags.count('img') == 7
    assert 'alert(1)' in seen.text, 'the hostile config is shown'
    assert 'alert' not in seen.scripts[1]


def test_the_stored_games_reach_the_player_unchanged(run_folder, seen):
    assert json.loads(seen.scripts[0]) == json.loads((run_folder / 'replays.json').read_text())
    assert seen.scripts[0].isascii() and not set('<>&') & set(seen.scripts[0])
    assert 'innerHTML' not in page.SCRIPT and 'outerHTML' not in page.SCRIPT and 'insertAdjacent' not in page.SCRIPT


def test_the_page_lets_no_script_run_but_its_own(seen):
    (policy,) = [attrs['content'] for tag, attrs in seen.elements if tag == 'meta' and 'http-equiv' in attrs]
    digest = base64.b64encode(hashlib.sha256(seen.scripts[1].encode()).digest()).decode()
    assert policy.startswith("default-src 'none'") and policy.endswith(f"script-src 'sha256-{digest}'")


def test_the_headline_is_the_summary_with_what_chance_reaches_beside_it_in_the_words_of_the_task(seen):
    for part in ('Solves 91% of the held-out instances after training, 2% before', '1.7% \u2192 91.2%', '4.3%',
                 'Blind guess', 'seed 3', 'commit abc123456789 ', 'minutes 11.9', 'CPU minutes 21.4'):  # fmt: skip
        assert part in seen.text, part
    assert '? \u2192 25.0%' in seen.text
    assert '0.0% \u2192 45.0%' in seen.text, 'strict success is not in the summary: first and last measurement'


def test_success_is_listed_by_difficulty_easiest_first_in_the_words_of_the_task(seen):
    assert 'Success by empty cells' in seen.text and 'shortest solution' not in seen.text
    assert 'empty cellssuccess beforeafterstrict beforeafter20%90%\u201350%100%0%\u2013\u2013\nReplays' in seen.text


def test_a_summary_from_before_tasks_had_words_is_still_listed(tmp_path):
    folder = write_run(tmp_path / 'old', summary=False)
    (folder / 'summary.json').write_text('{"by_optimal_before": {"3": 0.5}, "by_optimal_after": {"3": 0.75}}')
    assert report.by_length(report.load(folder)) == {'success': {'3': (0.5, 0.75)}}
    assert 'Success by difficulty' in report.write_report(folder).read_text()


def test_success_by_length_comes_from_evaluations_where_the_summary_has_none(tmp_path):
    run = report.load(write_run(tmp_path / 'killed', summary=False))
    assert report.by_length(run) == {'success': {'2': (0.0, pytest.approx(0.9)), '10': (0.0, 0.0)}}


def test_the_report_repeats_the_early_warnings_and_the_config(seen):
    assert "In the first rollouts: 99% of planner's groups are dead" in seen.text
    assert seen.text.count('groups are dead') == 1
    assert '"seed": 3' in seen.text


def test_a_run_without_a_summary_reports_its_first_and_last_measurement(tmp_path):
    folder = write_run(tmp_path / 'killed', summary=False)
    with (folder / 'metrics.jsonl').open('a') as torn:
        torn.write('{"axis": "ev')
    run = report.load(folder)
    assert report.before_and_after(run, 'success') == (0.0, pytest.approx(0.9))
    assert run.missing == ('summary.json',)
    assert 'Solves <b>90%</b> of the held-out instances so far, 0% at first' in report.write_report(folder).read_text()


def test_an_empty_folder_gives_a_report_that_says_what_is_missing(tmp_path):
    text = Reader(report.write_report(tmp_path).read_text()).text
    for name in ('summary.json', 'metrics.jsonl', 'replays.json', 'config.json'):
        assert f'{name} is missing: ' in text
    assert 'No held-out success was measured.' in text and 'No curve was recorded.' in text
    with pytest.raises(FileNotFoundError, match='is not a run folder'):
        report.write_report(tmp_path / 'nowhere')


# the curves


def test_the_curves_are_a_picture_of_six_named_panels(run_folder):
    assert (run_folder / 'curves.png').read_bytes().startswith(b'\x89PNG')
    panels = curves.panels(files.read_rows(run_folder / 'metrics.jsonl'), x='step', level=('blind guess', 0.043))
    labels = {panel.title: [line.label for line in panel.lines] for panel in panels}
    assert labels == {
        'Held-out success': ['greedy', 'greedy, strict', 'T = 1'],
        'Reward while training, by role': ['planner', 'mover'],
        'Entropy': ['shared'],
        'Dead groups': ['planner'],
        'Turns to solve, held out': ['greedy'],
        'Sampling speed': ['all'],
    }
    assert panels[0].level == ('blind guess', 0.043)
    assert panels[0].lines[0].xs == (0, 3, 6, 9)
    assert panels[0].lines[0].ys == pytest.approx((0, 0.3, 0.6, 0.9))
    mover = panels[1].lines[1].ys
    assert math.isnan(mover[4]) and mover[3] == mover[5] == 0.5, 'a number that is not finite is a gap'


def test_the_moving_mean_leaves_gaps_out():
    smooth = curves._moving_mean(np.array([math.nan, 1.0, 3.0, math.nan, 5.0]), 2)
    np.testing.assert_allclose(smooth, [math.nan, 1, 2, 3, 5])


def test_seeds_are_compared_by_their_mean_and_its_standard_error(tmp_path):
    mean, error = curves.mean_and_error(np.array([[0.0, 0.2], [1.0, 0.2], [2.0, 0.2]]))
    np.testing.assert_allclose(mean, [1.0, 0.2])
    np.testing.assert_allclose(error, [1 / math.sqrt(3), 0], atol=1e-12)
    np.testing.assert_allclose(curves.mean_and_error(np.array([[0.5, 0.6]]))[1], 0)
    tables = [[{'axis': 'eval', 'step': step, 'success': value} for step, value in run]
              for run in ([(0, 0.0), (3, 0.5), (6, 0.9)], [(0, 0.2), (3, 0.7)])]  # fmt: skip
    *singles, line = curves.group('a', tables, 'success', 'step', 0)
    assert (line.xs, line.label) == ((0, 3), 'a (mean ± s.e. of 2 seeds)'), 'only where both were measured'
    assert line.ys == pytest.approx((0.1, 0.6)) and line.spread == pytest.approx((0.1, 0.1))
    assert [single.xs for single in singles] == [(0, 3, 6), (0, 3)]


# the terminal


def test_a_stored_game_is_played_from_the_first_board_to_the_last(run_folder, capsys, monkeypatch):
    monkeypatch.setattr('time.sleep', lambda seconds: pytest.fail('waited although nobody looks on'))
    watch.play(str(run_folder))
    shown = capsys.readouterr().out
    parts = ('toy_seed3: puzzle 7 after training, empty cells 1', BOARD, 'turn 1 of 1',
             'planner (reward +0.50, format +0.25):\n  push', 'mover (reward none):\n  R', DONE,
             'solved after 1 turn')  # fmt: skip
    places = [shown.index(part) for part in parts]
    assert places == sorted(places)


def test_hostile_answers_are_played_as_visible_text(run_folder, capsys):
    watch.play(str(run_folder), board=7, when='before')
    shown = capsys.readouterr().out
    assert '\x1b' not in shown
    assert (
        '  <script>alert(1)</script></script><img src=x onerror=alert(2)>"\'& \\x1b[2J \\ud800 [red]up[/red]' in shown
    )
    assert 'not solved after 2 turns' in shown


def test_on_a_terminal_every_turn_is_waited_for(run_folder, monkeypatch):
    waits = []
    monkeypatch.setattr('time.sleep', waits.append)
    monkeypatch.setattr(log, 'stdout_console', lambda: Console(force_terminal=True, quiet=True))
    watch.play(str(run_folder), board=7, when='before', speed=4)
    assert waits == [0.25] * 3
    with pytest.raises(ValueError, match='speed=0: turns a second must be positive'):
        watch.play(str(run_folder), speed=0)


def test_what_is_not_there_is_answered_by_what_is(run_folder, tmp_path, monkeypatch):
    monkeypatch.setattr(watch, 'RUNS', run_folder.parent)
    with pytest.raises(watch.NothingToShow, match=r"no run 'toy'; .*holds toy_seed3"):
        watch.play('toy')
    with pytest.raises(watch.NothingToShow, match="no board 9 'after'; it holds before: boards 7, 9; after: boards 7"):
        watch.play('toy_seed3', board=9)
    with pytest.raises(watch.NothingToShow, match="no replay 'after'; it holds no replays at all"):
        watch.play(str(tmp_path))


def test_the_command_ends_with_the_plain_message(run_folder, capsys):
    watch_experiment.main(str(run_folder), when='before')
    assert 'puzzle 7 before training' in capsys.readouterr().out
    with pytest.raises(SystemExit, match=r"^no run 'nowhere'; "):
        watch_experiment.main('nowhere')
