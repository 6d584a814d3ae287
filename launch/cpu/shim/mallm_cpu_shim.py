"""Loaded at the start of every Python of the server's environment, through mallm_cpu_shim.pth; see ../README.md.

Torchvision's compiled half cannot be loaded beside a CPU torch, yet its Python half attaches meta kernels to two of the
operators declared there. They are declared here instead, at the moment torchvision is looked for. (A torch that was
built for CUDA loads that half on a CPU as well, and declares them itself.)
"""

import importlib.abc
import sys


class DeclareFirst(importlib.abc.MetaPathFinder):
    """Finds nothing; declares the operators once when torchvision is first imported."""

    def find_spec(self, name, path, target=None):
        if name == 'torchvision':
            sys.meta_path.remove(self)
            import torch

            if torch.version.cuda is None:
                operators = torch.library.Library('torchvision', 'DEF')
                for operator in ('nms', 'qnms'):
                    operators.define(f'{operator}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor')
                DeclareFirst.kept = operators  # it takes its declarations along when it is collected


sys.meta_path.insert(0, DeclareFirst())
