"""The commit that results are stored with says whether any code was changed since, benchmarks included."""

import subprocess

from benchmarks import measure
from mallm import folder


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
