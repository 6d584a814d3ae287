"""The folder of a run: a new one, an old one to go on in, and the commit that it is made with."""

import contextlib
import pathlib
import subprocess
from collections.abc import Iterator

import jax

from mallm import hosts
from mallm.experiment import Experiment
from mallm.io import files
from mallm.io.checkpoint import Checkpoints


@contextlib.contextmanager
def folder_and_step(experiment: Experiment, resume: str | None) -> Iterator[tuple[pathlib.Path, int | None]]:
    """Where a run writes and, if it goes on from a checkpoint, from which; the same on every process.

    A new folder in which nothing was written is removed at the end.

    Raises:
      FileNotFoundError: there is nothing to resume.
      ValueError: the run was begun with another seed.
    """
    if resume:
        folder = pathlib.Path(experiment.runs) / resume
        at = newest(folder)
        refuse_other_seed(folder, experiment)
        yield folder, at
        return
    writes = jax.process_index() == 0
    folder = hosts.agreed(new_folder(experiment) if writes else pathlib.Path())
    try:
        yield folder, None
    finally:
        if writes:
            with contextlib.suppress(OSError):
                folder.rmdir()


def new_folder(experiment: Experiment) -> pathlib.Path:
    """Makes a run folder: the name and seed, numbered when they were used before. Two runs never get the same."""
    base = pathlib.Path(experiment.runs) / experiment.folder_name
    base.parent.mkdir(parents=True, exist_ok=True)
    for path in (base, *(base.with_name(f'{base.name}.{i}') for i in range(2, 10_000))):
        with contextlib.suppress(FileExistsError):
            path.mkdir()
            return path
    raise FileExistsError(f'{base} and 9998 numbered ones are there: choose another name, or remove some')


def refuse_other_seed(folder: pathlib.Path, experiment: Experiment) -> None:
    """Boards and draws of all steps come from the seed: with another one a run would be neither of the two."""
    begun = (files.read_json(folder / files.CONFIG) or {}).get('seed', experiment.seed)
    if begun != experiment.seed:
        raise ValueError(
            f'seed={experiment.seed}: {folder.name} was begun with seed {begun}; resume it with --seed {begun}'
        )


def newest(folder: pathlib.Path) -> int:
    """The newest sound checkpoint of a run."""
    if not folder.is_dir():
        known = sorted(path.name for path in folder.parent.glob('*')) if folder.parent.is_dir() else []
        raise FileNotFoundError(f'no run {folder}; there are {known}')
    at = Checkpoints(folder).latest()
    if at is None:
        raise FileNotFoundError(f'{folder} has no whole checkpoint to resume from; start it again without --resume')
    return at


def commit(*, whole: bool = False) -> str:
    """The commit this code is at, with '+' when it was changed since; 'unknown' outside a repository.

    Results that experiments store in the repository are no change of the code. The name is short, or `whole`.
    """
    name = git('rev-parse', *(() if whole else ('--short',)), 'HEAD')
    changed = git('status', '--porcelain', '--untracked-files=no', '--', ':/*.py')
    return f'{name}+' if name and changed else name or 'unknown'


def git(*arguments: str) -> str:
    here = pathlib.Path(__file__).parent
    return subprocess.run(['git', *arguments], cwd=here, capture_output=True, text=True, check=False).stdout.strip()
