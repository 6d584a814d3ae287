"""Figures read stored runs only: grouped over seeds, mean ± error by hand, n said, older runs still of use."""

import json
import pathlib

import numpy as np
import pytest

from experiments.figures import ablation_bars, learning_curves, reward_by_role, scaling_agents, turns_to_solve
from experiments.figures.__main__ import FIGURES, main
from mallm.io import gallery, page

RESULTS = pathlib.Path(__file__).parents[2] / 'experiments' / 'results'


def store(
    folder: pathlib.Path, successes: list[float], *, tokens: bool = True, k: int = 8, team=('tool', 'plan')
) -> None:
    """A run of 20 steps, evaluated every 10."""
    folder.mkdir(parents=True)
    rows = []
    for number, share in enumerate(successes):
        cost = {'training_cpu_minutes': 2.0 * number, 'training_tokens': 1000 * number} if tokens else {}
        place = {'step': 10 * number, 'minutes': 0.0, 'cpu_minutes': 1.0 + number}
        rows.append({'axis': 'eval', **place, 'success': share, 'strict': share / 2, 'turns_to_solve': 2.0, **cost})
        for step in range(10 * number, 10 * number + 10) if number < len(successes) - 1 else ():
            reward = {'reward/tool': share, 'reward/plan': -share}
            rows.append({'axis': 'rollout', 'step': step, 'minutes': 0.0, 'cpu_minutes': 1.0 + step, **reward})
    (folder / 'metrics.jsonl').write_text(''.join(json.dumps(row) + '\n' for row in rows))
    seed = int(folder.name[-1])
    (folder / 'summary.json').write_text(
        json.dumps({'seed': seed, 'success_after': successes[-1], 'random_mover': 0.1})
    )
    algorithm = {'credit': 'agent_turn'}
    config = {'seed': seed, 'sampling': {'k': k}, 'task': {'team': team}, 'algorithm': algorithm, 'runs': str(folder)}
    (folder / 'config.json').write_text(json.dumps(config))


@pytest.fixture(scope='module')
def runs(tmp_path_factory) -> pathlib.Path:
    root = tmp_path_factory.mktemp('stored') / 'runs'
    store(root / 'game' / 'team-seed0', [0.0, 0.4, 0.8])
    store(root / 'game' / 'team-seed1', [0.2, 0.4, 1.0])
    store(root / 'game' / 'alone-seed0', [0.1, 0.2], tokens=False, team=('solo',))
    return root


def test_runs_are_grouped_over_seeds_and_by_the_folder_they_lie_in(runs):
    found = gallery.find_runs([runs])
    assert {name: {group: len(of) for group, of in groups.items()} for name, groups in found.items()} == {
        'runs/game': {'alone': 1, 'team': 2}
    }


def test_a_run_of_the_same_name_and_other_settings_is_no_seed_of_it(tmp_path):
    store(tmp_path / 'a-seed0', [0.0])
    store(tmp_path / 'a-seed1', [0.0], k=4)
    store(tmp_path / 'b' / 'a-seed0', [0.0])
    store(tmp_path / 'b' / 'a-seed2', [0.0])
    found = gallery.find_runs([tmp_path])
    assert {group: len(of) for group, of in found[tmp_path.name].items()} == {'a': 1, 'a (2)': 1}
    assert len(found[f'{tmp_path.name}/b']['a']) == 2


def test_a_curve_is_the_mean_over_seeds_with_its_standard_error_and_says_n(runs):
    """0.0 and 0.2: mean 0.1, error 0.1; 0.8 and 1.0: mean 0.9."""
    family = gallery.find_runs([runs])['runs/game']
    alone, team = gallery.curve(family, 'success', x='step', title='', y_label='').lines
    assert (team.label, alone.label) == ('team (n = 2)', 'alone (n = 1)')
    assert team.xs == (0, 10, 20) and team.ys == pytest.approx((0.1, 0.4, 0.9))
    assert team.spread == pytest.approx((0.1, 0.0, 0.1)) and alone.spread == ()


@pytest.mark.parametrize(
    'x, end', [('step', 20), ('cpu_minutes', 3), ('training_cpu_minutes', 4), ('training_tokens', 2000)]
)
def test_curves_are_over_steps_minutes_or_tokens_and_a_run_that_did_not_record_them_is_left_out(x, end, runs):
    family = gallery.find_runs([runs])['runs/game']
    lines = gallery.curve(family, 'success', x=x, title='', y_label='').lines
    assert lines[-1].xs[-1] == end
    assert len(lines) == (1 if x.startswith('training') else 2)


def test_a_step_between_two_evaluations_cost_what_lies_between_them(runs):
    """10 steps cost 1000 tokens: after the first step 100."""
    run = gallery.read_run(runs / 'game' / 'team-seed0')
    told = [row['training_tokens'] for row in run.rows if row['axis'] == 'rollout']
    np.testing.assert_allclose(told, 100.0 * np.arange(1, 21))


def test_the_figures_of_the_paper_have_the_lines_that_the_runs_have_data_for(runs):
    families = gallery.find_runs([runs])
    counts = {name: len(FIGURES[name](families, 'step').plots) for name in FIGURES}
    assert counts == {
        learning_curves.NAME: 2, reward_by_role.NAME: 2, turns_to_solve.NAME: 1, ablation_bars.NAME: 1,
        scaling_agents.NAME: 1,
    }  # fmt: skip
    bars = gallery.bars(families['runs/game'], 'success_after', title='', x_label='')
    assert bars.bars[1] == ('team (n = 2)', pytest.approx(0.9), pytest.approx(0.1))
    assert bars.level == ('chance', pytest.approx(0.1))


def test_every_group_of_a_scaling_study_is_a_point_and_other_games_and_budgets_are_other_panels(tmp_path):
    """Two teams of two, 0.9 ± 0.1 and 0.3: both are shown, not the better one alone."""
    store(tmp_path / 'team-seed0', [0.8])
    store(tmp_path / 'team-seed1', [1.0])
    store(tmp_path / 'worse-seed0', [0.3])
    store(tmp_path / 'alone-seed0', [0.2], team=('solo',))
    for name, change in (('other', {'cpu_minutes': 5.0}), ('size', {'task': {'team': ['solo'], 'size': 8}})):
        store(tmp_path / f'{name}-seed0', [0.99])
        path = tmp_path / f'{name}-seed0' / 'config.json'
        path.write_text(json.dumps(json.loads(path.read_text()) | change))
    (panel,) = scaling_agents.panels('game', gallery.find_runs([tmp_path])[tmp_path.name])
    assert [(line.label, line.xs) for line in panel.lines] == [
        ('alone (n = 1)', (1,)), ('team (n = 2)', (2,)), ('worse (n = 1)', (2,)),
    ]  # fmt: skip
    assert [line.ys[0] for line in panel.lines] == pytest.approx([0.2, 0.9, 0.3])
    assert [line.spread for line in panel.lines] == [(), pytest.approx((0.1,)), ()]


def test_the_command_writes_png_and_pdf_and_a_page_that_asks_for_nothing(runs, tmp_path, capsys):
    main((runs,), x='training_tokens', only=('learning_curves', 'scaling_agents'), out=tmp_path / 'out')
    names = sorted(path.name for path in (tmp_path / 'out').iterdir())
    assert names == ['index.html', *(f'{n}.{e}' for n in ('learning_curves', 'scaling_agents') for e in ('pdf', 'png'))]
    assert (tmp_path / 'out' / 'learning_curves.png').read_bytes().startswith(b'\x89PNG')
    assert (tmp_path / 'out' / 'scaling_agents.pdf').read_bytes().startswith(b'%PDF')
    shown = (tmp_path / 'out' / 'index.html').read_text()
    assert 'href="learning_curves.pdf"' in shown and page.text('all are shown and none is chosen') in shown
    assert 'http' not in shown.replace('http-equiv', '')
    assert 'index.html' in capsys.readouterr().out


def test_a_figure_without_data_is_named_on_the_page_and_nothing_else_is_wrong(tmp_path):
    store(tmp_path / 'runs' / 'a-seed0', [0.5])
    families = gallery.find_runs([tmp_path / 'runs'])
    gallery.write([scaling_agents.figure(families, 'step')], tmp_path / 'out')
    assert [path.name for path in (tmp_path / 'out').iterdir()] == ['index.html']
    assert 'No stored run has the data of: scaling_agents.' in (tmp_path / 'out' / 'index.html').read_text()


def test_the_stored_results_of_the_main_job_make_a_curve_over_three_seeds():
    family = gallery.find_runs([RESULTS])['results']
    lines = {line.label: line for line in gallery.curve(family, 'success', x='step', title='', y_label='').lines}
    assert lines['sokoban_at_grpo (n = 3)'].xs[-1] == 400
    tokens = gallery.curve(family, 'success', x='training_tokens', title='', y_label='').lines
    (of_tokens,) = [line.label for line in tokens if line.label.startswith('sokoban_at_grpo')]
    assert of_tokens == 'sokoban_at_grpo (n = 1)', 'seeds 1 and 2 are older and did not count them'


def test_stored_tables_of_summaries_are_bars_as_well(tmp_path):
    cells = {'a': {'0': {'success_after': 0.2}, '1': {'success_after': 0.4}}}
    (tmp_path / 'flat.json').write_text(json.dumps(cells))
    (tmp_path / 'deep.json').write_text(json.dumps({'sokoban': cells, 'sudoku': cells}))
    (tmp_path / 'else.json').write_text('[1]')
    (tmp_path / 'none.json').write_text('{"a": {"b": 1}}')
    found = gallery.find_tables([tmp_path])
    assert set(found) == {'flat', 'deep/sokoban', 'deep/sudoku'} and len(found['flat']['a']) == 2
    assert len(ablation_bars.figure(found, 'step').plots) == 3 and not learning_curves.figure(found, 'step').plots
    assert 'sokoban_table' in gallery.find_tables([RESULTS])


def test_what_is_not_there_is_refused(tmp_path):
    with pytest.raises(SystemExit, match='no run folder in'):
        main((tmp_path,), out=tmp_path / 'out')
    with pytest.raises(SystemExit, match='nowhere: no such folder'):
        main((tmp_path / 'nowhere',))
    with pytest.raises(SystemExit, match=r"--only \['pie'\]: there are"):
        main((tmp_path,), only=('pie',))


def test_the_seeds_beside_a_run_are_those_of_its_name_and_settings(runs, tmp_path):
    assert len(gallery.beside(runs / 'game' / 'team-seed0')) == 2
    store(tmp_path / 'a-seed0', [0.5])
    store(tmp_path / 'a-seed1', [0.5], k=4)
    store(tmp_path / 'ab-seed2', [0.5])
    assert [run.seed for run in gallery.beside(tmp_path / 'a-seed0')] == ['0']
