"""Configs are trees of frozen dataclasses: override a leaf by dotted name, lay a grid over one, write one as JSON."""

import dataclasses
import difflib
import itertools
from collections.abc import Iterator, Mapping
from typing import Any, TypeVar

Config = TypeVar('Config')


def require(holds: bool, name: str, value: object, rule: str) -> None:
    """Raises ValueError with the value, the rule and so the remedy."""
    if not holds:
        raise ValueError(f'{name}={value!r}: {rule}')


def override(config: Config, changes: Mapping[str, Any]) -> Config:
    """The config with leaves replaced by dotted name, e.g. {'task.reward': 'outcome'}.

    All changes are made together, so that settings which are valid only together can be changed; every level validates
    once.

    Raises:
      ValueError: a name that does not exist; the nearest one is suggested.
    """
    return _replace(config, '', changes)


def _replace(config: Any, prefix: str, changes: Mapping[str, Any]) -> Any:
    if not dataclasses.is_dataclass(config) or isinstance(config, type):
        raise ValueError(f'{prefix}{next(iter(changes))}: {config!r} has no settings of its own; set it as a whole')
    fields = [field.name for field in dataclasses.fields(config)]
    whole: dict[str, Any] = {}
    inner: dict[str, dict[str, Any]] = {}
    for name, value in changes.items():
        first, dot, rest = name.partition('.')
        if first not in fields:
            near = difflib.get_close_matches(first, fields, n=1)
            hint = f'did you mean {near[0]!r}?' if near else f'there are {fields}'
            raise ValueError(f'{prefix}{name}: no setting {first!r} in {type(config).__name__}; {hint}')
        if dot:
            inner.setdefault(first, {})[rest] = value
        else:
            whole[first] = value
    for first, below in inner.items():
        whole[first] = _replace(whole.get(first, vars(config)[first]), f'{prefix}{first}.', below)
    return dataclasses.replace(config, **whole)


def grid(base: Config, **axes: list[Any]) -> Iterator[tuple[str, Config]]:
    """Every combination of `axes` laid over `base`, each with a label that says what changed.

    Axis names use two underscores for a dot: `grid(base, sampling__k=[4, 8], seed=[0, 1, 2])`.
    """
    names = [axis.replace('__', '.') for axis in axes]
    for values in itertools.product(*axes.values()):
        changes = dict(zip(names, values, strict=True))
        yield ','.join(f'{name}={value}' for name, value in changes.items()), override(base, changes)


def describe(config: Any) -> Any:
    """The config as plain JSON values."""
    if dataclasses.is_dataclass(config) and not isinstance(config, type):
        return {field.name: describe(vars(config)[field.name]) for field in dataclasses.fields(config)}
    if isinstance(config, Mapping):
        return {str(key): describe(value) for key, value in config.items()}
    if isinstance(config, list | tuple):
        return [describe(value) for value in config]
    return config
