"""Sweeps and the paper's table: every cell once, castings from stored cells, files that wandb takes, honest tables."""

import dataclasses
import json
import pathlib

import pytest
import yaml
from wandb.sdk.launch.sweeps.utils import load_sweep_config

from experiments import ablations, paper, paper_table, suite
from experiments import sweep as command
from mallm.config import grid, override
from mallm.experiment import Experiment
from mallm.stored import settings_of
from mallm.study import sweep as sweeps
from mallm.study.comparison import HOW
from mallm.study.sweep import Casting, Sweep, run_all, run_cell, wandb_yaml
from tests.run_folders import TINY, saved

BASES = {task: suite.budgeted(task, 10.0) for task in suite.SUITE}


@dataclasses.dataclass(frozen=True)
class Recorder:
    """Stands for training: notes what it was given and leaves a finished run behind."""

    ran: list[Experiment] = dataclasses.field(default_factory=list)

    def __call__(self, experiment: Experiment) -> None:
        self.ran.append(experiment)
        folder = pathlib.Path(experiment.runs) / experiment.folder_name
        folder.mkdir(parents=True)
        share = 0.1 * len(self.ran)
        shares = {f'{name}_{when}': share for name in ('success', 'strict') for when in ('before', 'after')}
        facts = {'training_cpu_minutes': 2.0, 'training_tokens': 1000, 'random_mover': 0.05}
        (folder / 'summary.json').write_text(json.dumps(shares | facts | {'words': experiment.task.words()}))
        (folder / 'config.json').write_text(json.dumps(settings_of(experiment)))


def test_a_sweep_runs_each_cell_once_seed_by_seed_and_goes_on_where_it_was_cut(tmp_path):
    sweep = Sweep('Which?', dict(grid(TINY, sampling__k=[2, 4])), 'sampling.k=2')
    first, second = Recorder(), Recorder()
    how = {'runs': str(tmp_path / 'runs'), 'out': tmp_path / 'out'}
    run_all(sweep, seeds=(0,), only=('sampling.k=2',), start=first, **how)
    told = run_all(sweep, seeds=(0, 1), only=(), start=second, **how)
    assert [(e.name, e.seed, e.sampling.k) for e in first.ran] == [('sampling.k=2', 0, 2)]
    assert [(e.name, e.seed) for e in second.ran] == [('sampling.k=4', 0), ('sampling.k=2', 1), ('sampling.k=4', 1)]
    assert told.startswith('Which?') and '| sampling.k=4 | 2 | 20.0 ± 10.0 % |' in told
    assert (tmp_path / 'out.md').read_text() == told
    assert set(json.loads((tmp_path / 'out.json').read_text())['sampling.k=2']) == {'0', '1'}
    with pytest.raises(ValueError, match=r"cell 'sampling.k=3': not in this sweep"):
        run_all(sweep, seeds=(0,), only=('sampling.k=3',), start=second, **how)


def test_other_settings_of_the_same_name_are_another_cell(tmp_path):
    runs, recorder = str(tmp_path), Recorder()
    run_cell(Sweep('?', {'a': TINY}, 'a'), 'a', 0, runs=runs, start=recorder)
    other = dataclasses.replace(TINY, steps=7)
    (tmp_path / 'a-seed0').rename(tmp_path / 'a-seed0.2')
    run_cell(Sweep('?', {'a': TINY}, 'a'), 'a', 0, runs=runs, start=recorder)
    assert len(recorder.ran) == 1, 'a numbered folder is found too'
    run_cell(Sweep('?', {'a': other}, 'a'), 'a', 0, runs=runs, start=recorder)
    assert len(recorder.ran) == 2


def test_a_casting_trains_the_cells_it_needs_and_judges_their_policies_together(tmp_path):
    def start(experiment: Experiment) -> None:
        folder, _ = saved(experiment, pathlib.Path(experiment.runs))
        (folder / 'summary.json').write_text('{"success_after": 0.0, "training_tokens": 30}')

    still = {'tool_alone': 'right', 'plan_alone': 'left'}
    frozen = {name: override(TINY, {'learning.pool_rates': {pool: (0.0, 0.0)}}) for name, pool in still.items()}
    sweep = Sweep('?', frozen, 'tool_alone', {'joined': Casting('tool_alone', {'plan': ('plan_alone', 'plan')})})
    run_cell(sweep, 'joined', 0, runs=str(tmp_path), start=start)
    assert sorted(path.name for path in tmp_path.iterdir()) == ['joined-seed0', 'plan_alone-seed0', 'tool_alone-seed0']
    told = json.loads((tmp_path / 'joined-seed0' / 'summary.json').read_text())
    assert told['cast'] == {'plan': 'plan_alone-seed0@plan'} and told['boards'] == 6 and 0 <= told['success_after'] <= 1
    assert told['training_tokens'] == 60, 'what its two parts cost'
    run_cell(sweep, 'joined', 0, runs=str(tmp_path), start=lambda experiment: pytest.fail('it is stored'))
    with pytest.raises(ValueError, match=r"\['elsewhere'\]: no such cell"):
        Sweep('?', frozen, 'tool_alone', {'joined': Casting('elsewhere', {})})


@pytest.mark.parametrize('task', suite.SUITE)
@pytest.mark.parametrize('name', ablations.ABLATIONS)
def test_every_ablation_is_a_grid_of_one_budget_in_which_cells_differ_from_the_reference(name, task):
    sweep = ablations.ABLATIONS[name](task, BASES[task])
    assert len(sweep.cells) >= 3 and len({repr(cell) for cell in sweep.cells.values()}) == len(sweep.cells)
    assert {cell.cpu_minutes for cell in sweep.cells.values()} == {10.0}
    assert {cell.steps for cell in sweep.cells.values()} == {suite.ENDLESS}
    assert {label for column in sweep.reported.values() for label in column} <= set(sweep.labels)


def test_the_references_are_the_main_methods_settings():
    for name in ('reward', 'alpha', 'k', 'turns', 'agents', 'choice', 'normaliser', 'sampler', 'sharing'):
        sweep = ablations.ABLATIONS[name]('sokoban', BASES['sokoban'])
        assert sweep.cells[sweep.reference] == BASES['sokoban'], name


def test_a_table_beside_the_papers_says_what_differs_and_how_differences_are_judged():
    """The paper judges a role that was trained alone without a partner: 11.0 % and 14.5 % answer another question."""
    sweep = ablations.ABLATIONS['alone']('plan_path', BASES['plan_path'])
    told = sweeps.markdown(sweep, {})
    assert '| 11 % |' in told and paper.ALONE_NOTE in told and told.index('11 %') < told.index(paper.ALONE_NOTE)
    assert HOW.strip() in told and HOW.strip() in paper_table.markdown({})


def test_trained_alone_means_that_the_partner_is_frozen():
    cells = ablations.ABLATIONS['alone']('sokoban', BASES['sokoban']).cells
    assert cells['tool_alone'].learners == ('tool',) and cells['plan_alone'].learners == ('plan',)
    assert cells['together'].learners == ('tool', 'plan') and len(set(cells['together'].pools.values())) == 2


@pytest.mark.filterwarnings('ignore::pytest.PytestUnraisableExceptionWarning')  # wandb leaves the file open
def test_wandb_reads_the_sweep_file_and_its_agents_run_one_cell_each(tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    command.main('k', seeds=(0, 1), cpu_minutes=2.5)
    path = tmp_path / 'runs/ablations/sokoban/k/sweep.yaml'
    config = load_sweep_config(str(path))
    assert config == yaml.safe_load(path.read_text())
    assert config['method'] == 'grid' and config['metric'] == {'name': 'success_after', 'goal': 'maximize'}
    assert config['parameters']['seed'] == {'values': [0, 1]}
    ran = []
    monkeypatch.setattr(
        command, 'run_cell', lambda sweep, cell, seed, **how: ran.append((sweep.cells[cell], seed, how))
    )
    for cell in config['parameters']['cell']['values']:
        words = [word for word in config['command'] if word not in ('${env}', 'python', '-m', 'experiments.sweep')]
        given = [f'--cell={cell}', '--seed=1'] if words.pop() == '${args}' else []
        command.tyro.cli(command.main, args=[*words, *given])
    assert [(e.sampling.k, e.cpu_minutes, e.wandb, seed) for e, seed, _ in ran] == [
        (k, 2.5, 'auto', 1) for k in (2, 4, 8, 16)
    ]
    assert {how['runs'] for *_, how in ran} == {'runs/ablations/sokoban/k'}


def test_the_catalogue_names_every_ablation_with_its_cells_and_cost(capsys):
    command.main(list=True)
    shown = capsys.readouterr().out
    assert all(f'\n{name}: ' in f'\n{shown}' for name in ablations.ABLATIONS)
    assert 'sampling.k=2, sampling.k=4, sampling.k=8, sampling.k=16' in shown
    assert '4 cells * 3 seeds * 10 CPU minutes: about 2.6 CPU hours' in shown
    with pytest.raises(SystemExit, match="'kk' is no ablation; there are reward, alpha"):
        command.main('kk')
    with pytest.raises(SystemExit, match="task='chess': must be one of"):
        command.main('k', task='chess')


@pytest.mark.parametrize('task', suite.SUITE)
def test_every_method_of_the_main_table_has_the_same_budget_and_the_paper_has_its_row(task):
    cells = paper_table.methods(task, 4.0)
    assert {e.cpu_minutes for e in cells.values()} == {4.0} and {e.seed for e in cells.values()} == {0}
    assert {row.method for row in paper_table.ROWS} == set(cells)
    assert [name for name, e in cells.items() if e.sampling.mode == 'parallel'] == ['team_grpo']
    told = [row.paper for row in paper_table.ROWS if row.paper]
    for reported in (paper.SMALL, paper.LARGE):
        assert list(reported[task]) == told


def test_the_main_table_shows_the_papers_rows_beside_ours_labelled_and_resumes(tmp_path, capsys, monkeypatch):
    recorder = Recorder()
    monkeypatch.setattr(paper_table, 'run_apart', recorder)
    how = {'tasks': ('sokoban',), 'runs': str(tmp_path / 'runs'), 'out': tmp_path / 'out'}
    paper_table.main(seeds=(0,), only=('at_grpo',), **how)
    assert [e.name for e in recorder.ran] == ['at_grpo']
    paper_table.main(seeds=(0, 1), **how)
    assert len(recorder.ran) == 2 * len(paper_table.methods('sokoban', 1.0)), 'and none twice'
    shown = capsys.readouterr().out
    assert 'Ours: a 0.6M-parameter policy made from scratch' in shown and 'paper, Qwen3-8B' in shown
    (row,) = [line for line in shown.splitlines() if line.startswith('| AT-GRPO, shared | 2 |')]
    assert row.endswith('| reference | 10 % | 96 % |') and '| 1 k |' in row
    assert 'By chance (random mover): 5.0 %.' in shown
    assert '- AT-GRPO, shared ' in shown, 'controls that are not beaten are named'
    paper_table.main(seeds=(0,), only=('solo',), **how | {'tasks': ('sudoku',)})
    assert {task: list(cells) for task, cells in json.loads((tmp_path / 'out.json').read_text()).items()} == {
        'sokoban': list(paper_table.methods('sokoban', 1.0)),
        'sudoku': ['solo'],
    }, 'what was written of another game stays'
    with pytest.raises(SystemExit, match=r"--only \['sole'\]"):
        paper_table.main(only=('sole',), **how)


def test_a_cell_whose_process_dies_ends_the_table_with_its_name(tmp_path):
    broken = dataclasses.replace(TINY, name='broken', runs=str(tmp_path / 'file'), steps=1)
    (tmp_path / 'file').touch()
    with pytest.raises(RuntimeError, match='broken-seed0 ended with exit code 1'):
        sweeps.run_apart(broken)


def test_the_sweep_file_is_plain_yaml_whatever_the_question_says():
    sweep = Sweep('Why: "this" # not that?', {'a': TINY}, 'a')
    config = yaml.safe_load(wandb_yaml(sweep, name='x', command=['python'], seeds=(0,)))
    assert config['description'] == 'Why: "this" # not that?' and config['command'] == ['python', '${args}']
