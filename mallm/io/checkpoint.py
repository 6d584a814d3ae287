"""Checkpoints: the arrays of every pool and the host's progress, saved as one step or not at all (orbax).

A step is a folder named by the number of updates done. `seal.json` is written last, in one atomic replace; it holds the
progress and lists every array (shape, dtype) and every file (bytes, CRC-32). So a folder without a seal was never
saved, and one that disagrees with its seal is corrupt. Shardings are not read from the file: the new mesh decides.

The folder must be on a file system that all JAX processes see.
"""

import contextlib
import dataclasses
import json
import logging
import os
import pathlib
import shutil
import warnings
import zlib
from collections.abc import Iterator, Mapping
from concurrent import futures
from typing import Any

import jax
import numpy as np
import orbax.checkpoint as ocp
from jax.experimental import multihost_utils

FORMAT = 1
SEAL = 'seal.json'
ARRAYS = 'arrays'


class CheckpointError(Exception):
    """A step that cannot be saved or restored as asked. The message has the place, the rule and the remedy."""


@dataclasses.dataclass(frozen=True)
class _Seal:
    """What a whole step consists of. `arrays`: name → 'dtype[shape]'; `files`: path → (bytes, CRC-32)."""

    format: int
    step: int
    progress: dict[str, Any]
    arrays: dict[str, str]
    files: dict[str, tuple[int, int]]


class Checkpoints:
    """The saved steps of one run, in `folder/checkpoints`; the newest `keep` of them stay.

    Every JAX process makes the same calls, with its own view of the same global arrays. Saving blocks until the step
    is sealed, so donating the arrays afterwards is safe, and so is a kill at any moment.
    """

    def __init__(self, folder: pathlib.Path, *, keep: int = 3) -> None:
        if keep < 1:
            raise ValueError(f'keep={keep}: the newest step must stay; use 1 or more')
        self._folder = folder.absolute() / 'checkpoints'
        self._keep = keep
        self._orbax = ocp.Checkpointer(ocp.PyTreeCheckpointHandler())
        self._sound: set[int] = set()

    def save(self, step: int, arrays: Any, progress: Mapping[str, Any]) -> None:
        """Saves one step.

        Args:
          step: number of updates that `arrays` has seen.
          arrays: pytree of jax or numpy arrays; no part of it may be empty.
          progress: the host's facts, as strict JSON (string keys, lists, finite numbers).

        Raises:
          CheckpointError: the tree or the progress would not come back as it is, or this step or a later one stands.
        """
        if step < 0:
            raise ValueError(f'step={step}: a step is the number of updates done, so 0 or more')
        named = _named(arrays)
        _refuse_unsavable(named)
        facts = _Seal(FORMAT, step, _strict_json(step, progress), {k: _kind(v) for k, v in named.items()}, {})
        self._clear_from(step)
        with _quiet():
            self._orbax.save(self._place(step) / ARRAYS, args=ocp.args.PyTreeSave(named))
        if jax.process_index() == 0:
            _write_seal(self._place(step), dataclasses.replace(facts, files=_sums(self._place(step) / ARRAYS)))
            self._sound.add(step)
            self._prune()
        multihost_utils.sync_global_devices(f'saved {step}')

    def latest(self) -> int | None:
        """The newest sound step, or None. Broken ones are skipped, each with a warning that names it."""
        found = -1
        if jax.process_index() == 0:
            for step in reversed(self._steps()):
                fault = self._fault(step)
                if fault is None:
                    found = step
                    break
                warnings.warn(f'skipping checkpoint {self._place(step)}: {fault}', RuntimeWarning, stacklevel=2)
        agreed = int(multihost_utils.broadcast_one_to_all(np.int32(found)))
        return None if agreed < 0 else agreed

    def restore(self, step: int, like: Any) -> tuple[Any, dict[str, Any]]:
        """The arrays of a step, placed as `like` says, and its progress.

        Args:
          step: which step.
          like: pytree of `jax.ShapeDtypeStruct`s with shardings, or of arrays; names the same leaves as were saved.

        Raises:
          CheckpointError: the step is absent or broken, or a leaf is missing, surplus, or of another shape or dtype.
        """
        return self._restore(step, like, whole=True)

    def restore_part(self, step: int, like: Any) -> tuple[Any, dict[str, Any]]:
        """`restore` of some leaves only, e.g. parameters without the optimizer; the rest is not read.

        Leaves are matched by name, so `{'pool': {'params': …}}` finds the field `params` of a dataclass.
        """
        return self._restore(step, like, whole=False)

    def close(self) -> None:
        """Releases orbax's threads."""
        self._orbax.close()

    def _restore(self, step: int, like: Any, *, whole: bool) -> tuple[Any, dict[str, Any]]:
        seal = self._trusted_seal(step)
        named = _named(like)
        _refuse_mismatch(self._place(step), seal.arrays, named, whole=whole)
        asked = {k: jax.ShapeDtypeStruct(v.shape, v.dtype, sharding=v.sharding) for k, v in named.items()}
        how = {
            k: ocp.ArrayRestoreArgs(sharding=v.sharding, global_shape=v.shape, dtype=v.dtype) for k, v in asked.items()
        }
        with _quiet():
            found = self._orbax.restore(
                self._place(step) / ARRAYS,
                args=ocp.args.PyTreeRestore(asked, restore_args=how, partial_restore=not whole),
            )
        return jax.tree.unflatten(jax.tree.structure(like), [found[name] for name in named]), seal.progress

    def _trusted_seal(self, step: int) -> _Seal:
        fault = self._fault(step) if jax.process_index() == 0 else None
        if not bool(multihost_utils.broadcast_one_to_all(np.bool_(fault is None))):
            raise CheckpointError(
                f'checkpoint {self._place(step)}: {fault or "process 0 found it broken"}; '
                f'the steps here are {self._steps()}; latest() gives the newest sound one'
            )
        return _read_seal(self._place(step))

    def _place(self, step: int) -> pathlib.Path:
        return self._folder / f'{step:08d}'

    def _steps(self) -> list[int]:
        """Every step that was begun, in order, sealed or not."""
        if not self._folder.is_dir():
            return []
        return sorted(int(place.name) for place in self._folder.iterdir() if place.is_dir() and place.name.isdecimal())

    def _fault(self, step: int) -> str | None:
        """Why a step cannot be trusted, or None. Reads every byte of it, once for each `Checkpoints`."""
        if step in self._sound:
            return None
        place = self._place(step)
        if not place.is_dir():
            return 'there is no such step'
        if not (place / SEAL).is_file():
            return f'half-written, there is no {SEAL}'
        try:
            seal = _read_seal(place)
        except (ValueError, KeyError, TypeError) as cause:
            return f'{SEAL} is corrupt ({cause})'
        if seal.format != FORMAT or seal.step != step:
            return f'{SEAL} is of format {seal.format}, step {seal.step}; expected format {FORMAT}, step {step}'
        found = _sums(place / ARRAYS)
        for name, expected in seal.files.items():
            if found.get(name) != expected:
                return f'{ARRAYS}/{name} has (bytes, CRC-32) {found.get(name)}, sealed as {expected}'
        self._sound.add(step)
        return None

    def _clear_from(self, step: int) -> None:
        """Removes broken leftovers at `step` and beyond. A sound one there is refused: a run only goes forward."""
        standing = [later for later in self._steps() if later >= step]
        for later in standing:
            if self._fault(later) is None:
                raise CheckpointError(
                    f'saving step {step}, but {self._place(later)} stands: a run goes forward and never rewrites a '
                    'sound step; resume from latest(), use another folder, or delete that one'
                )
        multihost_utils.sync_global_devices(f'judged {step}')
        if jax.process_index() == 0:
            for later in standing:
                self._remove(later)
        multihost_utils.sync_global_devices(f'cleared {step}')

    def _prune(self) -> None:
        sealed = [step for step in self._steps() if (self._place(step) / SEAL).is_file()]
        for step in set(self._steps()) - set(sealed[-self._keep :]):
            self._remove(step)

    def _remove(self, step: int) -> None:
        self._sound.discard(step)
        (self._place(step) / SEAL).unlink(missing_ok=True)  # first, so that a kill leaves no half-step with a seal
        shutil.rmtree(self._place(step))


def _named(tree: Any) -> dict[str, Any]:
    """The leaves of a pytree by path, e.g. 'pool/params/embed'. Dict keys, fields and indices are written alike."""
    named: dict[str, Any] = {}
    for path, leaf in jax.tree_util.tree_flatten_with_path(tree)[0]:
        name = jax.tree_util.keystr(path, simple=True, separator='/')
        if not name or name in named:
            raise CheckpointError(
                f'leaf name {name!r} is empty or taken: every leaf needs a path of its own; rename it'
            )
        named[name] = leaf
    return named


def _kind(leaf: Any) -> str:
    return f'{leaf.dtype}{list(leaf.shape)}'


def _refuse_unsavable(named: Mapping[str, Any]) -> None:
    for name, leaf in named.items():
        if not isinstance(leaf, jax.Array | np.ndarray):
            raise CheckpointError(f'{name} is a {type(leaf).__name__}: only arrays here; host values go into progress')
        if isinstance(leaf, jax.Array) and leaf.is_deleted():
            raise CheckpointError(
                f'{name} was donated to a computation and is gone; save what that computation returned'
            )


def _refuse_mismatch(place: pathlib.Path, saved: Mapping[str, str], named: Mapping[str, Any], *, whole: bool) -> None:
    asked: dict[str, str] = {}
    for name, leaf in named.items():
        if not isinstance(leaf, jax.ShapeDtypeStruct | jax.Array) or leaf.sharding is None:
            raise CheckpointError(f'{name}: no sharding to restore to; give a ShapeDtypeStruct with one, or an array')
        asked[name] = _kind(leaf)
    faults = [f'missing in the file: {name} {asked[name]}' for name in sorted(asked.keys() - saved.keys())]
    if whole:
        faults += [f'not asked for: {name} {saved[name]}' for name in sorted(saved.keys() - asked.keys())]
    faults += [
        f'{name} is {saved[name]} in the file, asked for as {asked[name]}'
        for name in sorted(asked.keys() & saved.keys())
        if asked[name] != saved[name]
    ]
    if faults:
        shown = '\n  '.join(faults[:20] + ([f'and {len(faults) - 20} more'] if len(faults) > 20 else []))
        raise CheckpointError(
            f'checkpoint {place} holds another tree:\n  {shown}\n'
            'restore with the experiment that saved it, or use restore_part for some of its leaves'
        )


def _strict_json(step: int, progress: Mapping[str, Any]) -> dict[str, Any]:
    """A copy of `progress` that went through JSON and is unchanged by it."""
    try:
        copy = json.loads(json.dumps(dict(progress), allow_nan=False))
    except (TypeError, ValueError) as cause:
        raise CheckpointError(
            f'progress is not strict JSON ({cause}): use strings, lists and finite numbers'
        ) from cause
    if copy != dict(progress):
        raise CheckpointError(f'progress would come back as {copy}: use string keys, and lists in place of tuples')
    if copy.get('step', step) != step:
        raise CheckpointError(f'progress has step {copy["step"]}, saved as {step}: both are the number of updates done')
    return copy


def _sums(folder: pathlib.Path) -> dict[str, tuple[int, int]]:
    """Bytes and CRC-32 of every file below a folder."""
    files = sorted(path for path in folder.rglob('*') if path.is_file())
    with futures.ThreadPoolExecutor() as pool:
        return dict(zip((str(path.relative_to(folder)) for path in files), pool.map(_sum, files), strict=True))


def _sum(path: pathlib.Path) -> tuple[int, int]:
    size = crc = 0
    with path.open('rb') as file:
        while block := file.read(1 << 22):
            size += len(block)
            crc = zlib.crc32(block, crc)
    return size, crc


def _write_seal(place: pathlib.Path, seal: _Seal) -> None:
    facts = dataclasses.asdict(seal)
    draft = place / f'{SEAL}.draft'
    with draft.open('w') as file:
        json.dump(facts | {'crc32': _json_sum(facts)}, file, indent=1)
        file.flush()
        os.fsync(file.fileno())
    draft.replace(place / SEAL)
    for folder in (place, place.parent):
        handle = os.open(folder, os.O_RDONLY)
        os.fsync(handle)
        os.close(handle)


def _read_seal(place: pathlib.Path) -> _Seal:
    """The seal of a step. Raises ValueError, KeyError or TypeError on anything but a whole one."""
    facts = json.loads((place / SEAL).read_text())
    if facts.pop('crc32') != _json_sum(facts):
        raise ValueError('its own CRC-32 is wrong')
    return _Seal(**facts | {'files': {name: tuple(sums) for name, sums in facts['files'].items()}})


def _json_sum(facts: dict[str, Any]) -> int:
    return zlib.crc32(json.dumps(facts).encode())


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Keeps orbax's reports of its own progress off the console; its errors are raised."""
    logger = logging.getLogger('absl')
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        yield
    finally:
        logger.setLevel(level)
