"""Sets of problems from files: the paper's, in the form in which their authors published them.

A set is named `KIND:PLACE`. PLACE is a local .jsonl, .json or .parquet file (parquet needs the extra `data`), a folder
of them, or `hub:NAME/ID`, `hub:NAME/ID/FILE` or `hub:NAME/ID/FOLDER`, which is downloaded once; `KIND` alone stands for
the place in `SETS`.
Loading gives the problems and a manifest: what was read (sha256), under which licence and split, and how many rows
were left out and why. A row that does not fit the form is an error that names file, row and field.

  decontaminated  drops training problems that share a run of words with a test problem
  Order           a seeded order without repeats, epoch after epoch; position i is the same after a resume
"""

import base64
import collections
import contextlib
import dataclasses
import functools
import hashlib
import io
import json
import pathlib
import pickle
import random
import re
import sys
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import huggingface_hub

from mallm.envs.problems import CodeProblem, MathProblem

Problem = MathProblem | CodeProblem
Row = Mapping[str, Any]


class DataError(Exception):
    """A set that cannot be found or read as what it was said to be."""


class SkippedError(Exception):
    """A row that is sound and of no use here; the message is the reason that the manifest counts."""


@dataclasses.dataclass(frozen=True)
class Manifest:
    """What a loaded set is.

    Attributes:
      kind, file, sha256: how it was read, from which files (their names), and the checksum of all of them.
      licence, split: as its authors say.
      rows: in the files.
      kept: problems made of them.
      skipped: (reason, rows left out for it).
    """

    kind: str
    file: str
    sha256: str
    licence: str
    split: str
    rows: int
    kept: int
    skipped: tuple[tuple[str, int], ...] = ()


# Reading.


def json_of(text: str) -> Any:
    """What JSON holds; whole numbers of very many digits, which Python refuses to convert, stay text.

    Raises ValueError for what is no JSON.
    """
    try:
        longest = sys.int_info.str_digits_check_threshold
        return json.loads(text, parse_int=lambda digits: int(digits) if len(digits) <= longest else digits)
    except RecursionError as error:
        raise ValueError('it is nested too deeply') from error


def parquet_rows(path: pathlib.Path) -> Iterator[Any]:
    try:
        import pyarrow.parquet
    except ImportError as missing:
        raise DataError(f"{path.name}: parquet needs pyarrow; pip install -e '.[data]'") from missing
    for batch in pyarrow.parquet.ParquetFile(path).iter_batches(batch_size=64):
        yield from batch.to_pylist()


def json_rows(path: pathlib.Path) -> Iterator[Any]:
    rows = json_of(path.read_text())
    if not isinstance(rows, list):
        raise ValueError('it is no list of rows')
    yield from rows


def jsonl_rows(path: pathlib.Path) -> Iterator[Any]:
    with path.open() as file:
        yield from map(json_of, file)


READERS = {'.parquet': parquet_rows, '.jsonl': jsonl_rows, '.json': json_rows}


def rows_of(path: pathlib.Path) -> Iterator[Row]:
    """The rows of a .jsonl, .json (a list) or .parquet file. Raises DataError with file and row."""
    if path.suffix not in READERS:
        raise DataError(f'{path.name}: unknown kind of file; use .jsonl, .json or .parquet')
    number = 0
    try:
        for row in READERS[path.suffix](path):
            yield typed(row, dict)
            number += 1
    except TypeError as error:
        raise DataError(f'{path.name}, row {number}: a row is an object with fields: {error}') from error
    except ValueError as error:
        raise DataError(f'{path.name}, row {number}: is no {path.suffix[1:]}: {error}') from error


def typed(value: Any, kind: type | tuple[type, ...]) -> Any:
    """The value itself. Raises TypeError where it is of another kind."""
    if not isinstance(value, kind):
        kinds = kind if isinstance(kind, tuple) else (kind,)
        raise TypeError(f'is {type(value).__name__}, not {" or ".join(one.__name__ for one in kinds)}')
    return value


@contextlib.contextmanager
def inside(name: str) -> Iterator[None]:
    """What is wrong with the content of a field is said with its name."""
    try:
        yield
    except (LookupError, TypeError, ValueError, AttributeError) as error:
        raise TypeError(f'field {name!r}: {error}') from error


def field(row: Row, name: str, kind: type | tuple[type, ...]) -> Any:
    """A field of a row. Raises LookupError or TypeError with its name."""
    if name not in row:
        raise LookupError(f'field {name!r} is missing; there are {sorted(row)}')
    with inside(name):
        return typed(row[name], kind)


def texts(value: Any) -> list[str]:
    return [typed(text, str) for text in typed(value, list)]


# One function for each form.


def polaris(row: Row) -> MathProblem:
    """`difficulty` is 'n/8', the share of right answers of another model: the level is how many were wrong."""
    passed, _, of = str(row.get('difficulty', '')).partition('/')
    level = int(of) - int(passed) if passed.isdecimal() and of.isdecimal() else 0
    return MathProblem('', field(row, 'problem', str), field(row, 'answer', str), level)


DAPO_HEAD = re.compile(r'^Solve the following math problem.*?\n\n', re.DOTALL)
DAPO_TAIL = re.compile(r'\n\nRemember to put your answer on its own line.*$', re.DOTALL)


def dapo_math(row: Row) -> MathProblem:
    """The prompt's own words on the form of the answer are taken off: the world has its own."""
    with inside('prompt'):
        content = field(typed(field(row, 'prompt', list)[-1], dict), 'content', str)
    with inside('reward_model'):
        truth = field(field(row, 'reward_model', dict), 'ground_truth', str)
    with inside('extra_info'):
        index = typed(row.get('extra_info') or {}, dict).get('index', '')
    return MathProblem(str(index), DAPO_TAIL.sub('', DAPO_HEAD.sub('', content)).strip(), truth)


def aime_2024(row: Row) -> MathProblem:
    return MathProblem(
        str(field(row, 'ID', (str, int))), field(row, 'Problem', str), str(field(row, 'Answer', (str, int)))
    )


def aime_2025(row: Row) -> MathProblem:
    return MathProblem(
        str(field(row, 'id', (str, int))), field(row, 'problem', str), str(field(row, 'answer', (str, int)))
    )


def olympiad_bench(row: Row) -> MathProblem:
    """Only answers that can be compared exactly: no tolerance (`error`), no several parts."""
    answers = field(row, 'final_answer', list)
    if len(answers) != 1:
        raise SkippedError(f'{len(answers)} answers')
    if row.get('error'):
        raise SkippedError('a tolerance')
    with inside('final_answer'):
        answer = typed(answers[0], str).strip().strip('$')
    return MathProblem(str(field(row, 'id', (str, int))), field(row, 'question', str), answer)


def pairs(inputs: Any, outputs: Any) -> tuple[tuple[str, str], ...]:
    """Tests as pairs of texts; lists of lines are joined."""
    if not isinstance(inputs, list) or not isinstance(outputs, list) or len(inputs) != len(outputs):
        raise TypeError('inputs and outputs of the tests are not two lists of one length')
    text = lambda value: '\n'.join(map(str, value)) if isinstance(value, list) else str(value)  # noqa: E731
    return tuple((text(given), text(wanted)) for given, wanted in zip(inputs, outputs, strict=True))


def apps(row: Row) -> CodeProblem:
    levels = {'introductory': 1, 'interview': 2, 'competition': 3}
    if not field(row, 'input_output', (str, type(None))):
        raise SkippedError('no tests')
    with inside('input_output'):
        tests = typed(json_of(row['input_output']), dict)
        if tests.get('fn_name'):
            raise SkippedError('a function is called')
        found = pairs(tests.get('inputs'), tests.get('outputs'))
    with inside('solutions'):
        solutions = texts(json_of(typed(row['solutions'], str))) if row.get('solutions') else []
    name, level = str(field(row, 'problem_id', (str, int))), levels.get(str(row.get('difficulty')), 0)
    return CodeProblem(name, field(row, 'question', str), found, solutions[0] if solutions else None, (), level)


PYTHON3 = 3


def code_contests(row: Row) -> CodeProblem:
    """All tests: public, private and generated ones. Solutions in Python 3 only."""
    tests: list[tuple[str, str]] = []
    for name in ('public_tests', 'private_tests', 'generated_tests'):
        with inside(name):
            part = field(row, name, (dict, type(None))) or {'input': [], 'output': []}
            tests += pairs(part.get('input'), part.get('output'))
    right, wrong = in_python(row, 'solutions'), in_python(row, 'incorrect_solutions')
    with inside('difficulty'):
        level = int(typed(row.get('difficulty') or 0, (int, float)))
    name, question = field(row, 'name', str), field(row, 'description', str)
    return CodeProblem(name, question, tuple(tests), right[0] if right else None, tuple(wrong[:4]), level)


def in_python(row: Row, name: str) -> list[str]:
    """The programs in Python 3 of a field of code_contests, which may be missing."""
    with inside(name):
        part = typed(row.get(name) or {}, dict)
        programs, languages = texts(part.get('solution') or []), typed(part.get('language') or [], list)
        return [text for text, language in zip(programs, languages, strict=True) if language == PYTHON3]


class TextOnly(pickle.Unpickler):
    """Unpickles plain text and containers; a pickle that names anything to call is refused."""

    def find_class(self, module: str, name: str) -> Any:
        raise pickle.UnpicklingError(f'it would call {module}.{name}')


def live_code_bench(row: Row) -> CodeProblem:
    """All tests. The private ones are JSON, or base64 of zlib of a pickle of JSON, which is read as text only."""
    with inside('public_test_cases'):
        tests = typed(json_of(field(row, 'public_test_cases', str)), list)
    with inside('private_test_cases'):
        tests += typed(private_tests(field(row, 'private_test_cases', str)), list)
    with inside('public_test_cases or private_test_cases'):
        if any(field(test, 'testtype', str) != 'stdin' for test in tests):
            raise SkippedError('a function is called')
        found = tuple((field(test, 'input', str), field(test, 'output', str)) for test in tests)
    level = {'easy': 1, 'medium': 2, 'hard': 3}.get(str(row.get('difficulty')), 0)
    return CodeProblem(field(row, 'question_id', str), field(row, 'question_content', str), found, None, (), level)


def private_tests(text: str) -> Any:
    """What the text holds, packed or not. Raises TypeError."""
    try:
        return json_of(text)
    except ValueError:
        pass
    try:
        return json_of(TextOnly(io.BytesIO(zlib.decompress(base64.b64decode(text, validate=True)))).load())
    except (ValueError, LookupError, AttributeError, TypeError, EOFError, zlib.error, pickle.UnpicklingError) as error:
        raise TypeError(f'cannot be unpacked: {error}') from error


@dataclasses.dataclass(frozen=True)
class Form:
    """How one of the paper's sets is read, and where it is."""

    read: Callable[[Row], Problem]
    place: str
    licence: str
    split: str


SETS: Mapping[str, Form] = {
    'polaris': Form(polaris, 'hub:POLARIS-Project/Polaris-Dataset-53K', 'apache-2.0', 'train'),
    'dapo_math': Form(dapo_math, 'hub:BytedTsinghua-SIA/DAPO-Math-17k', 'apache-2.0', 'train'),
    'aime_2024': Form(aime_2024, 'hub:Maxwell-Jia/AIME_2024', 'mit', 'test'),
    'aime_2025': Form(aime_2025, 'hub:yentinglin/aime_2025', 'see its card', 'test'),
    'olympiad_bench': Form(olympiad_bench, 'hub:Hothan/OlympiadBench/OE_TO_maths_en_COMP', 'apache-2.0', 'test'),
    'apps': Form(apps, 'hub:codeparrot/apps/train.jsonl', 'mit', 'train'),
    'apps_test': Form(apps, 'hub:codeparrot/apps/test.jsonl', 'mit', 'test'),
    'code_contests': Form(code_contests, 'hub:deepmind/code_contests', 'cc-by-4.0', 'train'),
    'live_code_bench': Form(
        live_code_bench, 'hub:livecodebench/code_generation_lite/test6.jsonl', 'cc, see its card', 'test'
    ),
}
"""The paper's sets; the licences are those on their cards when this was written."""


# Loading.


SUFFIXES = ('.parquet', '.jsonl', '.json')


def find(place: str, split: str) -> tuple[pathlib.Path, ...]:
    """The local files of a place. Of a hub id or a folder in it, those with the split in their names, if any have."""
    if not place.startswith('hub:'):
        path = pathlib.Path(place).expanduser()
        paths = [path] if path.is_file() else sorted(p for p in path.glob('*') if p.suffix in SUFFIXES)
        if not paths:
            raise DataError(f'{place}: there is no such file; give a .jsonl, .json or .parquet file, or hub:NAME/ID')
        return tuple(paths)
    owner, name, *parts = place.removeprefix('hub:').split('/')
    repository, inside = f'{owner}/{name}', '/'.join(parts)
    try:
        listed = sorted(huggingface_hub.list_repo_files(repository, repo_type='dataset'))
        data = [file for file in listed if file.endswith(SUFFIXES[:2]) and file.startswith(inside)]
        chosen = [inside] if inside in listed else [file for file in data if split in file] or data
        if not chosen:
            raise DataError(f'{place}: holds no .parquet or .jsonl file; name one of {listed[:20]}')
        return tuple(
            pathlib.Path(huggingface_hub.hf_hub_download(repository, file, repo_type='dataset')) for file in chosen
        )
    except (OSError, ValueError) as error:
        raise DataError(f'{place}: cannot be had from the hub ({error}); download it and give the file') from error


@functools.lru_cache(maxsize=16)
def load(name: str) -> tuple[tuple[Problem, ...], Manifest]:
    """The problems of a set, in the file's order, and its manifest.

    Raises:
      DataError: unknown set, no such file, or a row that does not fit, with file, row and field.
    """
    kind, _, place = name.partition(':')
    if kind not in SETS:
        raise DataError(f'set {name!r}: unknown kind {kind!r}; use {sorted(SETS)}, or KIND:FILE')
    form = SETS[kind]
    paths = find(place or form.place, form.split)
    problems: dict[str, Problem] = {}
    skipped: collections.Counter[str] = collections.Counter()
    rows, digest = 0, hashlib.sha256()
    for path in paths:
        for number, row in enumerate(rows_of(path)):
            rows += 1
            try:
                problem = form.read(row)
                if isinstance(problem, CodeProblem) and not problem.tests:
                    raise SkippedError('no tests')
                if problem.question in problems:
                    raise SkippedError('repeated')
            except SkippedError as reason:
                skipped[str(reason)] += 1
            except (LookupError, TypeError, ValueError) as error:
                raise DataError(f'{path.name}, row {number}, as {kind!r}: {error}') from error
            else:
                named = problem if problem.name else dataclasses.replace(problem, name=f'{kind}-{rows - 1}')
                problems[problem.question] = named
        with path.open('rb') as file:
            while piece := file.read(1 << 20):
                digest.update(piece)
    if not problems:
        raise DataError(f'{paths[0].name}: no row of {rows} is a problem; skipped: {dict(skipped)}')
    names, left_out = ', '.join(path.name for path in paths), tuple(sorted(skipped.items()))
    return tuple(problems.values()), Manifest(
        kind, names, digest.hexdigest(), form.licence, form.split, rows, len(problems), left_out
    )


# What stands in both training and test.


def grams(text: str, words: int) -> set[tuple[str, ...]]:
    """Runs of so many words, in small letters and without punctuation; a shorter text is one run."""
    found = re.findall(r'[a-z0-9]+', text.lower())
    return {tuple(found[i : i + words]) for i in range(max(1, len(found) - words + 1))}


def decontaminated(
    train: Sequence[Problem], test: Sequence[Problem], words: int = 13
) -> tuple[tuple[Problem, ...], tuple[str, ...]]:
    """Training problems that share no run of `words` words with a test problem, and the names of those that do."""
    seen: set[tuple[str, ...]] = set().union(*(grams(problem.question, words) for problem in test))
    shares = [bool(grams(problem.question, words) & seen) for problem in train]
    kept = tuple(problem for problem, shared in zip(train, shares, strict=True) if not shared)
    return kept, tuple(problem.name for problem, shared in zip(train, shares, strict=True) if shared)


@dataclasses.dataclass(frozen=True)
class Order:
    """A seeded order over `size` things: each once an epoch, in another order each epoch."""

    size: int
    seed: int

    def at(self, position: int) -> int:
        """The thing at a position, counted from the start of the run: nothing has to be kept to resume."""
        epoch, place = divmod(position, self.size)
        return shuffled(self.size, self.seed, epoch)[place]


@functools.lru_cache(maxsize=4)
def shuffled(size: int, seed: int, epoch: int) -> tuple[int, ...]:
    things = list(range(size))
    random.Random(f'{seed} {epoch}').shuffle(things)
    return tuple(things)
