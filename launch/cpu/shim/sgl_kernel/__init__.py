"""In place of SGLang's compiled kernels, on a CPU whose layers take SGLang's plain torch paths; see ../../README.md."""

import functools

import torch


def assign_req_to_token_pool_cpu(rows, table, starts, ends, places, width):
    """table[row, start:end] = the next (end - start) of `places`, for each request in turn. `width` is the table's."""
    taken = 0
    for row, start, end in zip(rows.tolist(), starts.tolist(), ends.tolist(), strict=True):
        table[row, start:end] = places[taken : taken + end - start].to(table.dtype)
        taken += end - start


def without_pinning(make):
    """A tensor maker that takes `pin_memory` and ignores it."""

    @functools.wraps(make)
    def made(*given, pin_memory=False, **named):
        return make(*given, **named)

    return made


if not torch.cuda.is_available():
    for maker in ('tensor', 'empty', 'zeros', 'ones', 'arange', 'full'):
        setattr(torch, maker, without_pinning(getattr(torch, maker)))
    torch.Tensor.pin_memory = lambda self, device=None: self


def __getattr__(name):
    if name.startswith('__'):
        raise AttributeError(name)

    def missing(*given, **named):
        raise NotImplementedError(f'sgl_kernel.{name} has no stand-in: the CPU test bench does not reach so far')

    return missing
