"""The floors and the nevers of the design, held by reading the source.

A rule takes the root of a source tree and lists its faults as 'file:line what'. Each has, in BROKEN, a tree that it
must find fault with, so that a rule which has stopped biting is noticed.
"""

import ast
import functools
import pathlib
import re
import subprocess
from collections.abc import Callable, Iterator

import pytest

ROOT = pathlib.Path(__file__).parents[1]

FLOOR_0 = {'types', 'errors', 'rng', 'config', 'hosts', 'guard', 'epitaph', 'keeper'}
BELOW = {'envs', 'models', 'algo', 'rollout', 'learn', 'io'}
MEETING_PLACE = {
    'experiment', 'folder', 'policies', 'servers', 'serving', 'run', 'warm', 'train', 'evaluate', 'overlap', 'pipeline',
    'stored',
}  # fmt: skip
MAY_IMPORT = {
    '__init__': set(),
    **{name: set() for name in FLOOR_0},
    'guard': {'epitaph', 'hosts'},
    'envs': {*FLOOR_0, 'envs'},
    'models': {*FLOOR_0, 'models'},
    'algo': {*FLOOR_0, 'algo'},
    'rollout': {*FLOOR_0, 'rollout', 'envs', 'models'},
    'learn': {*FLOOR_0, 'learn', 'models', 'algo'},
    'io': {*FLOOR_0, 'io', 'models'},
    **dict.fromkeys(MEETING_PLACE, FLOOR_0 | BELOW | MEETING_PLACE),
    'cli': FLOOR_0 | BELOW | MEETING_PLACE,
    'study': FLOOR_0 | BELOW | MEETING_PLACE | {'cli', 'study'},
}
"""What each part of mallm may import from mallm. A part that is not listed has no floor."""

HOME_OF = {
    'wandb': 'mallm/io/',
    'orbax': 'mallm/io/',
    'safetensors': 'mallm/io/',
    'ray': 'mallm/rollout/workers.py',
    **dict.fromkeys(['aiohttp', 'httpx', 'requests', 'urllib.request', 'http.client'], 'mallm/rollout/sglang.py'),
}
"""The one place that may know each of these."""

RUNS_TEXT = 'mallm/envs/sandbox_child.py'
"""The one file that may run text: a program of its own, in a process of its own, which no other file may import."""

LONGEST_FUNCTION = 70
LONGEST_FILE = 420


@functools.cache
def parsed(path: pathlib.Path) -> ast.Module:
    return ast.parse(path.read_text())


def sources(root: pathlib.Path, *parts: str) -> Iterator[tuple[str, ast.Module]]:
    """(path below the root, syntax tree) of every Python file below some of its folders, or of a file."""
    for part in parts:
        place = root / part
        for path in sorted(place.rglob('*.py')) if place.is_dir() else [place] * place.is_file():
            yield path.relative_to(root).as_posix(), parsed(path)


def imported(tree: ast.Module) -> Iterator[tuple[int, str]]:
    """(line, dotted name) of every import, wherever it stands; `from a import b` is 'a.b', a relative one '.a.b'."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name) for alias in node.names)
        if isinstance(node, ast.ImportFrom):
            yield from ((node.lineno, f'{"." * node.level}{node.module or ""}.{alias.name}') for alias in node.names)


def is_of(name: str, package: str) -> bool:
    return name == package or name.startswith(f'{package}.')


def calls(tree: ast.AST) -> Iterator[tuple[int, str, ast.Call]]:
    """(line, dotted name of what is called, call)."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Call):
            yield node.lineno, ast.unparse(node.func), node


def last(dotted: str) -> str:
    return dotted.rpartition('.')[2]


def functions(tree: ast.Module) -> Iterator[ast.FunctionDef | ast.AsyncFunctionDef]:
    return (node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef))


# The rules.


def imports_point_down(root: pathlib.Path) -> list[str]:
    """Imports point down the floors; siblings do not know each other; nothing below knows the experiments."""
    faults = []
    for file, tree in sources(root, 'mallm'):
        part = file.split('/')[1].removesuffix('.py')
        if part not in MAY_IMPORT:
            faults.append(f'{file}:1 mallm.{part} has no floor')
            continue
        for line, name in imported(tree):
            names = name.split('.')
            outside = names[0] in {'', 'experiments', 'launch', 'benchmarks', 'tests'}
            if outside or (names[0] == 'mallm' and names[1] not in MAY_IMPORT[part]):
                faults.append(f'{file}:{line} imports {name}')
    return faults


def worlds_and_credit_know_no_jax(root: pathlib.Path) -> list[str]:
    """Worlds and advantages are host values: no jax, nor anything built on it."""
    return [
        f'{file}:{line} imports {name}'
        for file, tree in sources(root, 'mallm/envs', 'mallm/algo/credit.py')
        for line, name in imported(tree)
        if name.split('.')[0] in {'jax', 'jaxlib', 'flax', 'optax', 'orbax', 'chex'}
    ]


def outside_services_have_one_home(root: pathlib.Path) -> list[str]:
    """wandb, orbax and safetensors in io only; HTTP in the SGLang client only; Ray in the rollout workers only."""
    return [
        f'{file}:{line} imports {name}, whose home is {home}'
        for file, tree in sources(root, 'mallm', 'experiments')
        for line, name in imported(tree)
        for package, home in HOME_OF.items()
        if is_of(name, package) and not file.startswith(home)
    ]


def dataclasses_are_frozen(root: pathlib.Path) -> list[str]:
    """Every dataclass is frozen, and `object.__setattr__` is for `__post_init__` only."""
    faults = []
    for file, tree in sources(root, 'mallm'):
        for node in ast.walk(tree):
            for decorator in node.decorator_list if isinstance(node, ast.ClassDef) else []:
                name = ast.unparse(decorator.func if isinstance(decorator, ast.Call) else decorator)
                words = decorator.keywords if isinstance(decorator, ast.Call) else []
                said = [ast.unparse(word.value) for word in words if word.arg == 'frozen']
                default = ['True'] if 'struct' in name.split('.') else []
                if last(name) == 'dataclass' and (said or default) != ['True']:
                    faults.append(f'{file}:{node.lineno} {node.name} is a dataclass that is not frozen')
        births = [node for node in functions(tree) if node.name == '__post_init__']
        allowed = {line for birth in births for line, _, _ in calls(birth)}
        faults += [
            f'{file}:{line} {name}'
            for line, name, _ in calls(tree)
            if name == 'object.__setattr__' and line not in allowed
        ]
    return faults


def nothing_is_deep_copied(root: pathlib.Path) -> list[str]:
    """Worlds are values; who needs deepcopy has a mutable one."""
    faults = []
    for file, tree in sources(root, 'mallm'):
        for node in ast.walk(tree):
            name = {ast.Name: 'id', ast.Attribute: 'attr', ast.alias: 'name'}.get(type(node))
            if name and getattr(node, name) == 'deepcopy':
                faults.append(f'{file}:{node.lineno} deepcopy')
    return faults


def only_the_boundary_catches_broadly(root: pathlib.Path) -> list[str]:
    """No bare handler, none for Exception or BaseException, and no suppress() of them, but in errors.boundary."""
    faults = []
    for file, tree in sources(root, 'mallm'):
        spared = {
            handler
            for function in functions(tree)
            if (file, function.name) == ('mallm/errors.py', 'boundary')
            for handler in ast.walk(function)
        }
        for node in set(ast.walk(tree)) - spared:
            if isinstance(node, ast.ExceptHandler):
                caught = [node.type] if node.type else []
            elif isinstance(node, ast.Call) and last(ast.unparse(node.func)) == 'suppress':
                caught = node.args
            else:
                continue
            names = {
                last(ast.unparse(name))
                for kind in caught
                for name in (kind.elts if isinstance(kind, ast.Tuple) else [kind])
            }
            if not caught or names & {'Exception', 'BaseException'}:
                faults.append(f'{file}:{node.lineno} catches {", ".join(names) or "everything"}')
    return faults


def nothing_is_asked_for_with_a_default(root: pathlib.Path) -> list[str]:
    """No hasattr, no getattr with a default: a type says what it has."""
    return [
        f'{file}:{line} {ast.unparse(call)}'
        for file, tree in sources(root, 'mallm')
        for line, name, call in calls(tree)
        if name == 'hasattr' or (name == 'getattr' and len(call.args) + len(call.keywords) == 3)
    ]


def text_is_never_run(root: pathlib.Path) -> list[str]:
    """No eval, exec, compile, sympy parsing or import by name: models write text that would reach them. One program of
    its own may, which nothing imports."""
    runs = {'eval', 'exec', 'compile', '__import__'}
    home = RUNS_TEXT.removesuffix('.py').replace('/', '.')
    return [
        f'{file}:{line} imports {name}'
        for file, tree in sources(root, 'mallm', 'experiments')
        for line, name in imported(tree)
        if is_of(name, home)
    ] + [
        f'{file}:{line} {name}'
        for file, tree in sources(root, 'mallm', 'experiments')
        for line, name, _ in calls(tree)
        if file != RUNS_TEXT and (name in runs or last(name) in {'parse_expr', 'sympify', 'import_module'})
    ]


def only_the_log_prints(root: pathlib.Path) -> list[str]:
    """No print outside io/log.py."""
    return [
        f'{file}:{line} print'
        for file, tree in sources(root, 'mallm')
        for line, name, _ in calls(tree)
        if name == 'print' and file != 'mallm/io/log.py'
    ]


def nothing_is_forked_by_suffix(root: pathlib.Path) -> list[str]:
    """A variant is a row or a replace, never a file named after its brother."""
    suffix = re.compile(r'([_ -](v?\d+|new|old|copy|final|tmp|bak|backup)|\(\d+\))$')
    return [
        f'{path.relative_to(root).as_posix()}:1 is named like a fork'
        for part in ('mallm', 'experiments', 'launch', 'benchmarks', 'tests')
        for path in sorted((root / part).rglob('*'))
        if '__pycache__' not in path.parts and suffix.search(path.name.split('.')[0])
    ]


def one_can_read_it_on_a_screen(root: pathlib.Path) -> list[str]:
    """Functions and files have a longest length."""
    faults = []
    for file, tree in sources(root, 'mallm'):
        if (count := len((root / file).read_text().splitlines())) > LONGEST_FILE:
            faults.append(f'{file}:1 has {count} lines, more than {LONGEST_FILE}')
        for node in functions(tree):
            if (count := node.end_lineno - node.lineno + 1) > LONGEST_FUNCTION:
                faults.append(f'{file}:{node.lineno} {node.name} has {count} lines, more than {LONGEST_FUNCTION}')
    return faults


def nothing_runs_at_import(root: pathlib.Path) -> list[str]:
    """A module defines and names; it does not act, touch a device or open a file when it is imported."""
    acts = re.compile(
        r'^(open|print|jnp\..*|jax\.(numpy|random|device|local_device|config|distributed).*|.*\.(read|read_text|read_bytes))$'
    )
    defines = ast.Import | ast.ImportFrom | ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef
    faults = []
    for file, tree in sources(root, 'mallm', 'experiments'):
        for node in tree.body:
            if isinstance(node, ast.Assign | ast.AnnAssign):
                targets = node.targets if isinstance(node, ast.Assign) else [node.target]
                fine = all(isinstance(target, ast.Name | ast.Tuple) for target in targets)
                fine = fine and not any(acts.match(name) for _, name, _ in calls(node))
            elif isinstance(node, ast.If):
                fine = ast.unparse(node.test) in {"__name__ == '__main__'", 'TYPE_CHECKING', 'typing.TYPE_CHECKING'}
            else:
                fine = isinstance(node, defines) or (
                    isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)
                )
            if not fine:
                faults.append(f'{file}:{node.lineno} runs at import')
    return faults


def the_maths_takes_no_config(root: pathlib.Path) -> list[str]:
    """Functions of algo and models take arrays and numbers, never a bag of settings."""
    bags = {'config', 'cfg', 'conf', 'exp', 'experiment', 'args', 'hparams', 'settings'}
    faults = []
    for file, tree in sources(root, 'mallm/algo', 'mallm/models'):
        for node in functions(tree):
            given = [*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs]
            taken = {arg.arg for arg in given} & bags
            if taken and file != 'mallm/models/config.py':
                faults.append(f'{file}:{node.lineno} {node.name} takes {", ".join(taken)}')
    return faults


def the_maths_decides_by_no_string(root: pathlib.Path) -> list[str]:
    """No comparison with a string, and no match on one, in algo and models."""
    faults = []
    for file, tree in sources(root, 'mallm/algo', 'mallm/models'):
        for node in ast.walk(tree):
            if isinstance(node, ast.Compare):
                sides = [node.left, *node.comparators]
            else:
                sides = [node.value] if isinstance(node, ast.MatchValue) else []
            if any(map(is_text, sides)) and file != 'mallm/models/config.py':
                faults.append(f'{file}:{sides[0].lineno} decides by {ast.unparse(node)}')
    return faults


def is_text(node: ast.expr) -> bool:
    """Whether an expression is a string, or a literal collection with one in it."""
    if isinstance(node, ast.Tuple | ast.List | ast.Set):
        return any(map(is_text, node.elts))
    return isinstance(node, ast.Constant) and isinstance(node.value, str)


def no_path_or_host_of_one_machine(root: pathlib.Path) -> list[str]:
    """No absolute path into somebody's machine and no registry's host in any file that git would take."""
    place = re.compile(
        r'(?<![\w.:/}~$*-])/(home|Users|root|work|workspace|tmp|mnt|scratch|opt)/\w|[A-Z]:\\\\?Users'
        r'|pypi\.org|pythonhosted\.org|npmjs\.org|deb\.debian\.org'
    )
    listed = subprocess.run(
        ['git', 'ls-files', '-z', '--cached', '--others', '--exclude-standard'],
        cwd=root,
        capture_output=True,
        check=True,
    )
    faults = []
    for file in sorted(filter(None, listed.stdout.decode().split('\0'))):
        raw = (root / file).read_bytes() if (root / file).is_file() else b''
        if b'\0' in raw:
            continue
        for line, text in enumerate(raw.decode(errors='replace').splitlines(), start=1):
            if found := place.search(text):
                faults.append(f'{file}:{line} names {found.group().strip()}')
    return faults


RULES: list[Callable[[pathlib.Path], list[str]]] = [
    imports_point_down,
    worlds_and_credit_know_no_jax,
    outside_services_have_one_home,
    dataclasses_are_frozen,
    nothing_is_deep_copied,
    only_the_boundary_catches_broadly,
    nothing_is_asked_for_with_a_default,
    text_is_never_run,
    only_the_log_prints,
    nothing_is_forked_by_suffix,
    one_can_read_it_on_a_screen,
    nothing_runs_at_import,
    the_maths_takes_no_config,
    the_maths_decides_by_no_string,
    no_path_or_host_of_one_machine,
]

BROKEN: list[tuple[Callable[[pathlib.Path], list[str]], str, str, int]] = [
    (imports_point_down, 'mallm/envs/x.py', 'from mallm.learn import pool', 1),
    (imports_point_down, 'mallm/rollout/x.py', 'def f():\n    import mallm.learn.pack', 1),
    (imports_point_down, 'mallm/learn/x.py', 'from mallm.rollout.tree import play', 1),
    (imports_point_down, 'mallm/algo/x.py', 'from mallm import models', 1),
    (imports_point_down, 'mallm/io/x.py', 'import experiments.sokoban', 1),
    (imports_point_down, 'mallm/types.py', 'from mallm import rng', 1),
    (imports_point_down, 'mallm/learn/x.py', 'from ..rollout import tree', 1),
    (imports_point_down, 'mallm/train.py', 'from mallm import cli', 1),
    (imports_point_down, 'mallm/attic.py', '', 1),
    (worlds_and_credit_know_no_jax, 'mallm/envs/x.py', 'import jax.numpy as jnp\nfrom flax import linen', 2),
    (worlds_and_credit_know_no_jax, 'mallm/algo/credit.py', 'from jax import numpy', 1),
    (outside_services_have_one_home, 'mallm/learn/x.py', 'import wandb\nimport orbax.checkpoint as ocp', 2),
    (outside_services_have_one_home, 'mallm/envs/x.py', 'from urllib import request\nimport httpx', 2),
    (outside_services_have_one_home, 'experiments/x.py', 'import wandb', 1),
    (
        dataclasses_are_frozen,
        'mallm/x.py',
        '@dataclasses.dataclass\nclass A: ...\n@dataclass(slots=True)\nclass B: ...',
        2,
    ),
    (
        dataclasses_are_frozen,
        'mallm/x.py',
        '@dataclass(frozen=False)\nclass A: ...\n@struct.dataclass(frozen=False)\nclass B: ...',
        2,
    ),
    (dataclasses_are_frozen, 'mallm/x.py', 'def thaw(x):\n    object.__setattr__(x, "a", 1)', 1),
    (nothing_is_deep_copied, 'mallm/x.py', 'from copy import deepcopy', 1),
    (nothing_is_deep_copied, 'mallm/x.py', 'import copy\ny = copy.deepcopy(x)', 1),
    (only_the_boundary_catches_broadly, 'mallm/x.py', 'try: f()\nexcept: pass', 1),
    (only_the_boundary_catches_broadly, 'mallm/x.py', 'try: f()\nexcept Exception as e: raise', 1),
    (only_the_boundary_catches_broadly, 'mallm/x.py', 'try: f()\nexcept (ValueError, builtins.BaseException): pass', 1),
    (only_the_boundary_catches_broadly, 'mallm/x.py', 'with contextlib.suppress(Exception): f()', 1),
    (only_the_boundary_catches_broadly, 'mallm/errors.py', 'def other():\n    try: f()\n    except Exception: pass', 1),
    (nothing_is_asked_for_with_a_default, 'mallm/x.py', 'getattr(a, "b", None)\nhasattr(a, "b")', 2),
    (text_is_never_run, 'mallm/envs/x.py', 'from mallm.envs import sandbox_child', 1),
    (text_is_never_run, 'mallm/envs/x.py', 'eval(t)\nexec(t)\nsympy.parse_expr(t)\nimportlib.import_module(t)', 4),
    (only_the_log_prints, 'mallm/learn/x.py', 'def f():\n    print(1)', 1),
    (nothing_is_forked_by_suffix, 'mallm/learn/update_v2.py', '', 1),
    (nothing_is_forked_by_suffix, 'experiments/sokoban_1.py', '', 1),
    (nothing_is_forked_by_suffix, 'launch/slurm copy.sh', '', 1),
    (one_can_read_it_on_a_screen, 'mallm/x.py', 'def f():\n' + '    a = 1\n' * LONGEST_FUNCTION, 1),
    (one_can_read_it_on_a_screen, 'mallm/x.py', 'a = 1\n' * (LONGEST_FILE + 1), 1),
    (nothing_runs_at_import, 'mallm/x.py', 'register(f)', 1),
    (
        nothing_runs_at_import,
        'mallm/x.py',
        'for a in b: pass\nif FLAG: c = 1\ntry: import d\nexcept ImportError: d = 0',
        3,
    ),
    (nothing_runs_at_import, 'mallm/x.py', 'ZERO = jnp.zeros(3)\nTEXT = pathlib.Path("a").read_text()', 2),
    (nothing_runs_at_import, 'experiments/x.py', 'os.environ["A"] = "b"', 1),
    (the_maths_takes_no_config, 'mallm/algo/x.py', 'def loss(logp, config): ...\ndef other(*, exp): ...', 2),
    (the_maths_decides_by_no_string, 'mallm/algo/x.py', 'def f(kind):\n    return 1 if kind == "ppo" else 2', 1),
    (
        the_maths_decides_by_no_string,
        'mallm/models/x.py',
        'if kind in ("a", "b"): f()\nmatch kind:\n    case "a": f()',
        2,
    ),
    (no_path_or_host_of_one_machine, 'launch/x.sh', 'MODEL=' + '/' + 'home/me/model', 1),
    (no_path_or_host_of_one_machine, 'README.md', 'pip install -i https://pypi' + '.org/simple', 1),
]


@pytest.mark.parametrize('rule', RULES, ids=lambda rule: rule.__name__)
def test_the_project_keeps_the_rule_that(rule):
    faults = rule(ROOT)
    assert not faults, f'{rule.__doc__}\n' + '\n'.join(faults)


@pytest.mark.parametrize('rule, file, text, count', BROKEN, ids=lambda x: x.__name__ if callable(x) else '')
def test_a_tree_that_breaks_it_is_found_by_the_rule_that(rule, file, text, count, tmp_path):
    subprocess.run(['git', 'init', '-q'], cwd=tmp_path, check=True)
    (tmp_path / file).parent.mkdir(parents=True, exist_ok=True)
    (tmp_path / file).write_text(text)
    faults = rule(tmp_path)
    assert len(faults) == count, faults
    assert all(fault.startswith(f'{file}:') for fault in faults)


def test_every_rule_has_a_tree_that_breaks_it():
    assert {rule for rule, *_ in BROKEN} == set(RULES)


SOUND = {
    'mallm/errors.py': 'def boundary():\n    try: f()\n    except Exception as cause: raise Kind() from cause',
    'mallm/types.py': '@dataclass(frozen=True)\nclass A:\n  def __post_init__(self): object.__setattr__(self, "a", 1)',
    'mallm/learn/state.py': 'import optax\nfrom mallm.algo import losses\n@flax.struct.dataclass\nclass S: ...',
    'mallm/rollout/sglang.py': 'import httpx\nfrom mallm import envs',
    'mallm/io/log.py': 'import wandb\ndef say(x): print(getattr(x, "name"))',
    'mallm/algo/losses.py': '"""Text."""\nimport jax\nRUN = jax.jit(f)\nSAME = a["w"] == 0',
    'mallm/models/config.py': 'def read(config): return config["type"] == "qwen2"',
    'mallm/train.py': 'from mallm import experiment, learn\nNAMES: tuple[str, ...] = ("a",)',
    'experiments/sokoban.py': 'CONFIG = Experiment()\nif __name__ == "__main__": run(CONFIG)',
    'launch/slurm.sh': 'cd "$HOME/work/run" && curl http://127.0.0.1:30000/home/page',
}


@pytest.mark.parametrize('rule', RULES, ids=lambda rule: rule.__name__)
def test_a_sound_tree_is_left_in_peace_by_the_rule_that(rule, tmp_path):
    subprocess.run(['git', 'init', '-q'], cwd=tmp_path, check=True)
    for file, text in SOUND.items():
        (tmp_path / file).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / file).write_text(text)
    assert rule(tmp_path) == []
