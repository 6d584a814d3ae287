"""Says whether a model fits on a mesh, before anything is downloaded or allocated.

Command:  python -m launch.plan --model Qwen/Qwen3-8B --mesh 2,4,1 --lora-rank 16 --device-memory 80GiB

The model is one of the known names (--model list shows them) or a local folder or file with a config.json.
Parameters, optimiser state and gradients are exact; activations are an estimate. The cache is that of `--groups`
prompts, split over all devices; the embedded engine fills its batches up to 32 or 128 prompts: ask with those.
"""

import argparse
import json
import pathlib
import re
import sys
from collections.abc import Sequence

import jax.numpy as jnp

from mallm.errors import WeightsError
from mallm.learn.memory import GIB, USABLE, Plan, Work, plan, remedies
from mallm.models import hf_map
from mallm.models.config import Architecture
from mallm.models.presets import PRESETS

UNITS = {'': 1, 'B': 1, 'KIB': 1 << 10, 'MIB': 1 << 20, 'GIB': 1 << 30, 'TIB': 1 << 40,
         'KB': 10**3, 'MB': 10**6, 'GB': 10**9, 'TB': 10**12}  # fmt: skip


def mesh_of(text: str) -> tuple[int, int, int]:
    parts = re.split('[,x]', text)
    sizes = [int(part) for part in parts if re.fullmatch('[0-9]{1,9}', part)]
    if len(parts) != 3 or len(sizes) != 3 or min(sizes) < 1:
        raise argparse.ArgumentTypeError(f'{text!r}: a mesh is three sizes, data,fsdp,tensor, e.g. 2,4,1')
    return sizes[0], sizes[1], sizes[2]


def size_of(text: str) -> int:
    found = re.fullmatch(r'([\d.]+)\s*([a-zA-Z]*)', text)
    if not found or found[2].upper() not in UNITS:
        raise argparse.ArgumentTypeError(f'{text!r}: write a size like 80GiB or 24GB')
    return int(float(found[1]) * UNITS[found[2].upper()])


def architecture_of(model: str) -> Architecture:
    """A known model, or the shape that a local config.json tells."""
    if model in PRESETS:
        return PRESETS[model]
    path = pathlib.Path(model)
    path = path / 'config.json' if path.is_dir() else path
    if path.suffix != '.json' or not path.is_file():
        raise ValueError(f'{model!r}: neither a known model nor a config.json or its folder; known: {sorted(PRESETS)}')
    return hf_map.from_json(json.loads(path.read_text()))


def arguments(words: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument('--model', required=True, help='known name, local folder, or config.json')
    parser.add_argument('--mesh', type=mesh_of, default=(1, 1, 1), help='data,fsdp,tensor')
    parser.add_argument('--lora-rank', type=int, default=0, help='0 trains every parameter')
    parser.add_argument('--groups', type=int, default=8, help='prompts of a micro-batch, over the whole mesh')
    parser.add_argument('--k', type=int, default=8, help='answers of each prompt')
    parser.add_argument('--prompt', type=int, default=1024, help='tokens of a prompt')
    parser.add_argument('--answer', type=int, default=512, help='tokens of an answer')
    parser.add_argument('--sequence', type=int, default=0, help='tokens of both: two thirds prompt, one third answer')
    parser.add_argument('--float32', action='store_true', help='compute in float32 instead of bfloat16')
    parser.add_argument('--no-remat', action='store_true', help='keep activations instead of recomputing them')
    parser.add_argument('--no-sampler', action='store_true', help='the answers are sampled elsewhere')
    parser.add_argument('--kl', action='store_true', help='keep a reference policy')
    parser.add_argument('--device-memory', type=size_of, default=80 * GIB, help='e.g. 80GiB')
    return parser.parse_args(words)


def table(told: Plan, device_memory: int) -> str:
    rows = [f'{name:<32}{size / GIB:>9.2f} GiB {size:>18,}' for name, size in told.parts.items()]
    share = told.total / device_memory
    rows.append(f'{"total of each device":<32}{told.total / GIB:>9.2f} GiB {told.total:>18,}   {share:.0%} of it')
    return '\n'.join(rows)


def main(words: Sequence[str] | None = None) -> int:
    """Prints the plan; returns 0 if it fits, 1 if not, 2 if the question makes no sense."""
    given = arguments(words)
    if given.model == 'list':
        print('\n'.join(PRESETS))
        return 0
    prompt, answer = given.prompt, given.answer
    if given.sequence:
        prompt, answer = given.sequence - given.sequence // 3, given.sequence // 3
    try:
        arch = architecture_of(given.model)
        arch = type(arch)(**{**vars(arch), 'remat': not given.no_remat})
        work = Work(
            groups=given.groups, k=given.k, prompt=prompt, answer=answer, rank=given.lora_rank,
            dtype=jnp.float32 if given.float32 else jnp.bfloat16, samples=not given.no_sampler,
            keeps_reference=given.kl,
        )  # fmt: skip
        told = plan(arch, given.mesh, work)
    except (ValueError, WeightsError) as refused:
        print(refused, file=sys.stderr)
        return 2
    data, fsdp, tensor = given.mesh
    print(f'{given.model}: {told.parameters:,} parameters, {told.learning:,} of them learn')
    print(f'mesh data={data}, fsdp={fsdp}, tensor={tensor}: {data * fsdp * tensor} devices of '
          f'{given.device_memory / GIB:.1f} GiB; {work.groups} groups x {work.k} answers, {prompt} + {answer} tokens, '
          f'{jnp.dtype(work.dtype).name}, remat {"on" if arch.remat else "off"}\n')  # fmt: skip
    print(table(told, given.device_memory))
    if told.fits(given.device_memory):
        print(f'\nIt fits ({USABLE:.0%} of a device is counted as usable).')
        return 0
    print(f'\nIt does NOT fit ({USABLE:.0%} of a device is counted as usable). What would:')
    found = remedies(arch, given.mesh, work, given.device_memory)
    print('\n'.join(f'  - {remedy}' for remedy in found) or '  nothing that is tried here: take larger devices')
    return 1


if __name__ == '__main__':
    sys.exit(main())
