"""What starts things: servers, jobs on clusters, and the plan whether a model fits."""

import importlib
import pathlib

from mallm.experiment import Experiment


def config_of(name: str) -> Experiment:
    """The experiment in a module of experiments/.

    Raises:
      ValueError: there is no such module, or it is no experiment; with those that are.
    """
    files = (pathlib.Path(__file__).parents[1] / 'experiments').glob('*.py')
    known = sorted(file.stem for file in files if '\nCONFIG = ' in file.read_text())
    if name not in known:
        raise ValueError(f'experiment={name!r}: must be a module in experiments/ with a CONFIG, one of {known}')
    return importlib.import_module(f'experiments.{name}').CONFIG
