"""Configs are trees of frozen dataclasses: override a leaf by dotted name, lay a grid over one, to JSON and back."""

import dataclasses
import difflib
import itertools
import math
import typing
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, TypeVar

Config = TypeVar('Config')


def require(holds: bool, name: str, value: object, rule: str) -> None:
    """Raises ValueError with the value, the rule and so the remedy."""
    if not holds:
        raise ValueError(f'{name}={value!r}: {rule}')


def infinite(config: Any, prefix: str = '') -> list[str]:
    """Dotted names of the numbers in a config that are not finite, which no JSON could hold."""
    if dataclasses.is_dataclass(config) and not isinstance(config, type):
        config = {field.name: vars(config)[field.name] for field in dataclasses.fields(config)}
    if isinstance(config, list | tuple):
        config = dict(enumerate(config))
    if isinstance(config, Mapping):
        return [name for key, value in config.items() for name in infinite(value, f'{prefix}.{key}')]
    return [prefix.lstrip('.')] if isinstance(config, float) and not math.isfinite(config) else []


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


def grid(base: Config, **axes: Sequence[Any] | Mapping[str, Mapping[str, Any]]) -> Iterator[tuple[str, Config]]:
    """Every combination of `axes` laid over `base`, each with a label that says what changed.

    Axis names use two underscores for a dot: `grid(base, sampling__k=[4, 8], seed=[0, 1, 2])`. An axis given as a
    mapping changes several settings together, and its labels are the mapping's: `grid(base, sampler={'tree': {...}})`.
    """
    points = [
        [(label, dict(changes)) for label, changes in values.items()]
        if isinstance(values, Mapping)
        else [(f'{name}={value}', {name: value}) for value in values]
        for name, values in ((axis.replace('__', '.'), values) for axis, values in axes.items())
    ]
    for combination in itertools.product(*points):
        changes = {name: value for _, some in combination for name, value in some.items()}
        yield ','.join(label for label, _ in combination), override(base, changes)


def describe(config: Any) -> Any:
    """The config as plain JSON values."""
    if dataclasses.is_dataclass(config) and not isinstance(config, type):
        return {field.name: describe(vars(config)[field.name]) for field in dataclasses.fields(config)}
    if isinstance(config, Mapping):
        return {str(key): describe(value) for key, value in config.items()}
    if isinstance(config, list | tuple):
        return [describe(value) for value in config]
    return config


def same(stored: Any, config: Any) -> bool:
    """Whether what `describe` once made says these very settings.

    A setting that is younger than what was stored counts there as its default: with that, everything is as it was.
    """
    if not dataclasses.is_dataclass(config) or isinstance(config, type):
        return stored == describe(config)
    if not isinstance(stored, Mapping) or stored.keys() - vars(config).keys():
        return False
    return all(
        same(stored[field.name], vars(config)[field.name])
        if field.name in stored
        else vars(config)[field.name] == default_of(field)
        for field in dataclasses.fields(config)
    )


def default_of(field: dataclasses.Field) -> Any:
    """`dataclasses.MISSING` where there is none."""
    made = field.default_factory
    return field.default if made is dataclasses.MISSING else made()


def rebuilt(kind: Any, stored: Any) -> Any:
    """The value of a type, from what `describe` made of it.

    Raises:
      ValueError: a setting that the type does not have, or a value that it refuses.
    """
    inside = typing.get_args(kind)
    if dataclasses.is_dataclass(kind) and isinstance(kind, type) and isinstance(stored, Mapping):
        hints = typing.get_type_hints(kind)
        if strange := sorted(stored.keys() - {field.name for field in dataclasses.fields(kind)}):
            raise ValueError(
                f'{kind.__name__} has no setting {strange}: it was written by another version; use that one'
            )
        return kind(**{name: rebuilt(hints[name], value) for name, value in stored.items()})
    if isinstance(stored, Mapping):
        return {key: rebuilt(inside[-1] if inside else Any, value) for key, value in stored.items()}
    if isinstance(stored, list):
        return tuple(rebuilt(inside[0] if inside else Any, value) for value in stored)
    return stored
