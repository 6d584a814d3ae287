"""What a stranger's machine gets: the stated needs are the imported ones, and CI runs the README's own line."""

import ast
import pathlib
import re
import sys

ROOT = pathlib.Path(__file__).parents[1]
IMPORT_NAME = {'orbax-checkpoint': 'orbax'}


def needs() -> list[str]:
    return (ROOT / 'requirements.txt').read_text().split()


def extras() -> dict[str, list[str]]:
    """The optional needs in setup.py."""
    calls = [node for node in ast.walk(ast.parse((ROOT / 'setup.py').read_text())) if isinstance(node, ast.Call)]
    [table] = [word.value for call in calls for word in call.keywords if word.arg == 'extras_require']
    return ast.literal_eval(table)


def import_names(lines: list[str]) -> set[str]:
    names = [re.split(r'[<>=!~\[; ]', line)[0] for line in lines]
    return {IMPORT_NAME.get(name, name.replace('-', '_')) for name in names}


def imported_by(folder: str) -> set[str]:
    trees = [ast.parse(path.read_text()) for path in (ROOT / folder).rglob('*.py')]
    nodes = [node for tree in trees for node in ast.walk(tree)]
    plain = {alias.name for node in nodes if isinstance(node, ast.Import) for alias in node.names}
    named = {node.module for node in nodes if isinstance(node, ast.ImportFrom) and node.module}
    return {name.split('.')[0] for name in plain | named}


def test_every_import_of_mallm_is_a_stated_need():
    optional = [line for name, lines in extras().items() if name != 'dev' for line in lines]
    known = import_names(needs() + optional) | set(sys.stdlib_module_names) | {'mallm'}
    assert imported_by('mallm') - known == set()


def test_every_stated_need_is_imported_somewhere():
    places = ('mallm', 'experiments', 'benchmarks', 'launch', 'tests')
    assert import_names(needs()) - set.union(*map(imported_by, places)) == set()


def test_every_need_has_a_lower_and_an_upper_bound():
    for line in [*needs(), *(line for lines in extras().values() for line in lines)]:
        assert re.fullmatch(r'[a-z0-9-]+(>=[\d.]+,<[\d.]+|==[\d.]+)', line), line


def test_ci_runs_the_line_that_the_readme_tells():
    told = [line for line in (ROOT / 'README.md').read_text().splitlines() if line.endswith('-m tests')]
    assert told == [(ROOT / '.ci' / 'run').read_text().splitlines()[-1]]
