"""Writes a finished run's newest policies in Hugging Face form, for transformers, PEFT, SGLang and vLLM.

    python -m experiments.export RUN OUT [--merge] [--dtype bfloat16]

RUN is a run folder, or a name in runs/. Whole pools become models, LoRA pools PEFT adapters, or models with --merge;
OUT/roles.json says which role is where. Cost: seconds for a tiny model. Expected: that JSON as the last line.
"""

import pathlib
import sys
from typing import Annotated, Literal

import tyro

from mallm.errors import WeightsError
from mallm.io import files, watch
from mallm.study.export import export


def main(
    run: Annotated[str, tyro.conf.Positional, tyro.conf.arg(metavar='RUN')],
    out: Annotated[pathlib.Path, tyro.conf.Positional, tyro.conf.arg(metavar='OUT')],
    merge: bool = False,
    dtype: Literal['float32', 'bfloat16'] = 'float32',
) -> None:
    """Exports a run.

    Args:
      run: run folder, or its name in runs/.
      out: folder to be made.
      merge: merge adapters into their base and write whole models.
      dtype: of whole models.
    """
    try:
        told = export(watch.find_run(run), out, merge=merge, dtype=dtype)
    except (watch.NothingToShow, FileNotFoundError, ValueError, WeightsError) as refusal:
        sys.exit(str(refusal))
    print(files.dumps(told))


if __name__ == '__main__':
    tyro.cli(main, description=__doc__)
