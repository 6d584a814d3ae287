"""The commit that results are stored with says whether any code was changed since; no two runs share a folder."""

import concurrent.futures
import contextlib
import subprocess

from benchmarks import measure
from mallm import folder
from mallm.experiment import Experiment


def test_changed_code_anywhere_marks_the_commit_and_stored_results_do_not(tmp_path, monkeypatch):
    def git(*arguments: str) -> str:
        named = ['-c', 'user.name=a', '-c', 'user.email=a@example.invalid']
        done = subprocess.run(['git', *named, *arguments], cwd=tmp_path, capture_output=True, text=True, check=True)
        return done.stdout.strip()

    for name in ('mallm/folder.py', 'benchmarks/speed.py', 'benchmarks/results/speed.json'):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text('1')
    monkeypatch.setattr(folder, '__file__', str(tmp_path / 'mallm' / 'folder.py'))
    assert folder.commit() == folder.commit(whole=True) == 'unknown', 'outside a repository'
    git('init')
    git('add', '.')
    git('commit', '-m', 'first')
    (tmp_path / 'benchmarks/results/speed.json').write_text('2')
    whole = git('rev-parse', 'HEAD')
    assert folder.commit(whole=True) == whole and whole.startswith(folder.commit())
    (tmp_path / 'benchmarks/speed.py').write_text('2')
    assert folder.commit(whole=True) == measure.facts(0, ())['commit'] == f'{whole}+'


def test_runs_of_one_name_that_start_at_once_get_a_folder_each(tmp_path):
    experiment = Experiment(name='twice', runs=str(tmp_path / 'runs'))
    with concurrent.futures.ThreadPoolExecutor(16) as pool:
        made = list(pool.map(folder.new_folder, [experiment] * 16))
    assert sorted(path.name for path in made) == sorted(['twice-seed0', *(f'twice-seed0.{i}' for i in range(2, 17))])


def test_a_run_that_wrote_nothing_leaves_no_folder_and_one_that_did_leaves_it(tmp_path):
    experiment = Experiment(name='short', runs=str(tmp_path))
    with contextlib.suppress(KeyError), folder.folder_and_step(experiment, None) as (first, at):
        assert first.is_dir() and at is None
        raise KeyError
    assert not list(tmp_path.iterdir())
    with folder.folder_and_step(experiment, None) as (again, _):
        (again / 'metrics.jsonl').touch()
    assert again == first and first.is_dir()
