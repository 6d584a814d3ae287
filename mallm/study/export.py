"""A finished run in Hugging Face form: full pools as models, LoRA pools as PEFT adapters or merged into models."""

import pathlib
from collections.abc import Mapping
from typing import Any

import jax.numpy as jnp

from mallm.envs.base import Task
from mallm.errors import WeightsError
from mallm.io import files, hf, peft
from mallm.stored import TASKS, Learned, read_learned

ROLES = 'roles.json'


def export(
    folder: pathlib.Path,
    out: pathlib.Path,
    *,
    merge: bool = False,
    dtype: str = 'float32',
    tasks: Mapping[str, type[Task]] = TASKS,
) -> dict[str, Any]:
    """Writes a run's newest checkpoint and returns what went where, which it also writes as `out`/roles.json.

    A run of one policy that is a whole model, or an adapter over a model with an address, becomes `out` itself;
    otherwise each pool gets a folder of its name in it, beside `base` where the adapters' base is the run's own. The
    tokenizer goes along where the model had one.

    Args:
      merge: write whole models in place of adapters.
      dtype: of whole models; adapters are float32.

    Raises:
      FileNotFoundError: there is no such run, or no whole checkpoint in it.
      ValueError: `merge` of a run that has no adapters.
      WeightsError: `out` is there already.
    """
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise WeightsError(f'{out} is there already: an export never mixes with older files; choose another folder')
    learned = read_learned(folder, tasks)
    if merge and learned.base is None:
        raise ValueError(f'--merge: {learned.name} trained whole models, there is no adapter to merge; leave it out')
    source = learned.experiment.model.source
    tokenizer = hf.load_tokenizer(source) if source else None
    write = _Writer(learned, jnp.dtype(dtype), tokenizer)
    adapters = learned.base is not None and not merge
    base = source
    if adapters and (learned.owns_base or hf.find(source).is_file() or source in hf.PACKAGED):
        base = str((out / 'base').resolve())
        write.model(out / 'base', learned.base)
    alone = len(learned.pools) == 1 and base == source
    places = {pool: out if alone else out / pool for pool in learned.pools}
    for pool, place in places.items():
        if adapters:
            write.adapter(place, learned.pools[pool], base)
        else:
            write.model(place, learned.merged(pool))
    roles = {role: str(places[pool].relative_to(out)) for role, pool in learned.experiment.pools.items()}
    told = {'run': learned.name, 'step': learned.step, 'adapters': adapters, 'roles': roles}
    files.write_json(out / ROLES, told)
    return told


class _Writer:
    """Whole models and adapters of one run, each with its tokenizer."""

    def __init__(self, learned: Learned, dtype: Any, tokenizer: Any) -> None:
        self._learned, self._dtype, self._tokenizer = learned, dtype, tokenizer

    def model(self, place: pathlib.Path, params: Any) -> None:
        hf.export(place, self._learned.whole.arch, params, dtype=self._dtype, tokenizer=self._tokenizer)

    def adapter(self, place: pathlib.Path, params: Any, base: str) -> None:
        lora = self._learned.experiment.model.lora
        peft.export_adapter(place, params, alpha=lora.alpha, rs=lora.rs, base=base)
        if self._tokenizer is not None:
            self._tokenizer.save_pretrained(place)
