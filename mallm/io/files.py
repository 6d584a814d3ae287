"""The files of a run folder: how they are written, cut back on a resume, and read again.

Every file is strict JSON (a number that is not finite becomes null), and whole files are replaced in one rename, so a
reader never meets half a file. No secret gets this far: `redact` is applied to whatever describes a run.
"""

import dataclasses
import enum
import functools
import json
import math
import os
import pathlib
import re
import types
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

CONFIG, METRICS, REPLAYS, SUMMARY = 'config.json', 'metrics.jsonl', 'replays.json', 'summary.json'
CURVES, REPORT = 'curves.png', 'report.html'
EARLIER = 'earlier'
"""What config.json says of the steps before a resume with other settings; see `Sink`."""
ROW_KEYS = ('axis', 'step', 'minutes', 'cpu_minutes')
"""What every row of metrics.jsonl begins with; no metric may be called so."""
COSTS = ('training_cpu_minutes', 'training_tokens')
"""What evaluation rows and summaries say that learning cost."""
MARK = 'checkpoint'
"""The axis of the rows that say: everything above is in the checkpoint of this step."""

_SECRET_KEY = re.compile(
    r'(^|[_-])(api_?key|passw(or)?d|secret|credentials?|bearer|(access|auth|api|hf|wandb|session)_?token)s?$',
    re.IGNORECASE,
)
_SECRET_VARIABLE = re.compile(r'(KEY|TOKEN|SECRET|PASSWORD)$')
_URL_USER = re.compile(r'(\w+://)[^/@\s]+@')
_SEED = re.compile(r'[-_.]?(seed|s)[-_=]?\d+(\.\d+)?$')
HIDDEN = '***'


def strict(value: Any) -> Any:
    """`value` as plain JSON: tuples become lists, dataclasses dicts, functions their names, NaN and inf None."""
    if value is None or isinstance(value, (bool, str)):
        return value
    if isinstance(value, enum.Enum):
        return strict(value.value)
    if isinstance(value, int):
        return int(value)
    if isinstance(value, float):
        return float(value) if math.isfinite(value) else None
    if isinstance(value, (np.generic, np.ndarray)):
        return strict(value.tolist())
    if isinstance(value, Mapping):
        return {str(key): strict(item) for key, item in value.items()}
    if isinstance(value, (Sequence, set, frozenset)) and not isinstance(value, (bytes, bytearray)):
        return [strict(item) for item in (sorted(value) if isinstance(value, (set, frozenset)) else value)]
    if isinstance(value, os.PathLike):
        return os.fspath(value)
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return strict(dataclasses.asdict(value))
    if isinstance(value, functools.partial):
        return {'function': strict(value.func), 'args': strict(value.args), 'keywords': strict(value.keywords)}
    if isinstance(value, (type, types.FunctionType, types.BuiltinFunctionType, types.MethodType)):
        return f'{value.__module__}.{value.__qualname__}'
    raise TypeError(f'{type(value).__name__} value {value!r} has no JSON form: give numbers, text, lists or mappings')


def dumps(value: Any, indent: int | None = None) -> str:
    """Strict JSON in plain ASCII: safe for any reader, whatever a model wrote (lone surrogates too)."""
    return json.dumps(strict(value), indent=indent, allow_nan=False)


def write_json(path: pathlib.Path, value: Any) -> None:
    """Replaces the file in one rename."""
    _replace(path, dumps(value, indent=1) + '\n')


def read_json(path: pathlib.Path) -> Any | None:
    """What the file holds, or None when there is no such file."""
    if not path.exists():
        return None
    return json.loads(path.read_text(encoding='utf-8'))


def read_rows(path: pathlib.Path) -> list[dict[str, Any]]:
    """The rows of metrics.jsonl, [] without the file. A torn last line (a killed run) is left out.

    Raises:
      ValueError: another line is not JSON.
    """
    if not path.exists():
        return []
    lines = path.read_text(encoding='utf-8').split('\n')
    rows = []
    for number, line in enumerate(lines[:-1]):  # a whole line ends with '\n', so what follows the last one is torn
        try:
            rows.append(json.loads(line))
        except json.JSONDecodeError as cause:
            raise ValueError(f'{path.name} line {number + 1} is not JSON: {cause}; remove that line') from cause
    return rows


def redact(value: Any) -> Any:
    """`value` without secrets: entries named like one, text holding a secret environment variable, users in URLs."""
    secrets = [text for name, text in os.environ.items() if _SECRET_VARIABLE.search(name) and len(text) >= 12]
    return _redact(strict(value), secrets)


def kept_by_checkpoint(rows: Sequence[Mapping[str, Any]], resume_at: int) -> list[Mapping[str, Any]]:
    """The rows that the checkpoint of step `resume_at` already had when it was saved.

    Exact where the run marked its checkpoints: whatever stands above the mark, on every axis, whatever it counts. Else
    the rows above the first rollout of a step that will be played again.
    """
    marks = [at for at, row in enumerate(rows) if row['axis'] == MARK and row['step'] == resume_at]
    if marks:
        return list(rows[: marks[-1] + 1])
    again = [at for at, row in enumerate(rows) if row['axis'] == 'rollout' and row['step'] >= resume_at]
    return list(rows[: again[0]]) if again else list(rows)


class RowFile:
    """metrics.jsonl: one line a row, flushed line by line. Resumed, no (axis, step) of the old rows is kept twice."""

    def __init__(self, path: pathlib.Path, resume_at: int | None) -> None:
        self._path = path
        self.kept = [] if resume_at is None else kept_by_checkpoint(read_rows(path), resume_at)
        self._places = {(row['axis'], row['step']) for row in self.kept}
        _replace(path, ''.join(dumps(row) + '\n' for row in self.kept))
        self._file = path.open('a', encoding='utf-8')

    def append(self, row: Mapping[str, Any]) -> None:
        if (row['axis'], row['step']) in self._places:
            self._forget((row['axis'], row['step']))
        self._file.write(dumps(row) + '\n')
        self._file.flush()

    def close(self) -> None:
        self._file.close()

    def _forget(self, place: tuple[str, int]) -> None:
        """A step that the resumed run does again replaces what was kept of it."""
        self._file.close()
        new = self._path.read_text(encoding='utf-8').splitlines(keepends=True)[len(self.kept) :]
        self._places.remove(place)
        self.kept = [row for row in self.kept if (row['axis'], row['step']) != place]
        _replace(self._path, ''.join([*(dumps(row) + '\n' for row in self.kept), *new]))
        self._file = self._path.open('a', encoding='utf-8')


def without_seed(name: str) -> str:
    """The name of a run without its seed: 'sokoban_seed3', 'sokoban-s3' and 'sokoban_seed=3.2' are all 'sokoban'."""
    return _SEED.sub('', name) or name


def flatten(tree: Mapping[str, Any], prefix: str = '') -> dict[str, Any]:
    """Nested mappings as one, keys joined by '/'."""
    flat: dict[str, Any] = {}
    for key, value in tree.items():
        flat.update(flatten(value, f'{prefix}{key}/') if isinstance(value, Mapping) else {f'{prefix}{key}': value})
    return flat


def _redact(value: Any, secrets: Sequence[str]) -> Any:
    if isinstance(value, dict):
        return {
            key: HIDDEN if _SECRET_KEY.search(key) and value[key] else _redact(value[key], secrets) for key in value
        }
    if isinstance(value, list):
        return [_redact(item, secrets) for item in value]
    if isinstance(value, str):
        for secret in secrets:
            value = value.replace(secret, HIDDEN)
        return _URL_USER.sub(rf'\1{HIDDEN}@', value)
    return value


def _replace(path: pathlib.Path, text: str) -> None:
    part = path.with_name(f'.{path.name}.part')
    part.write_text(text, encoding='utf-8')
    os.replace(part, path)
