"""The frozen base of a run's adapters: saved once, beside the checkpoints, which then hold the adapters alone."""

import contextlib
import pathlib
from typing import Any

from mallm.io.checkpoint import Checkpoints


def save_base(folder: pathlib.Path, base: Any) -> None:
    """Writes `folder/base`; a run does this once, before its first step."""
    with contextlib.closing(Checkpoints(folder / 'base')) as place:
        place.save(0, base, {})


def restore_base(folder: pathlib.Path, like: Any) -> Any:
    """The base of a run, placed as `like` says.

    Raises:
      CheckpointError: it is absent or broken, or of another architecture.
    """
    with contextlib.closing(Checkpoints(folder / 'base')) as place:
        return place.restore(0, like)[0]
