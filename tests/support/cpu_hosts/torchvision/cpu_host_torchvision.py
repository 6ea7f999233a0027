"""Make torchvision's CUDA wheel importable with a CPU torch, where its operators do not load.

The import needs two schemas, which are defined just before; nothing calls them. A .pth file imports this module at the
start of every Python process, so it imports nothing heavy.
"""

import importlib.abc
import sys

SCHEMA = "(Tensor dets, Tensor scores, float iou_threshold) -> Tensor"


class _DefineSchemas(importlib.abc.MetaPathFinder):
    def find_spec(self, fullname, path=None, target=None):
        if fullname == "torchvision":
            sys.meta_path.remove(self)
            import torch

            if torch.version.cuda is None:
                for op in ("nms", "qnms"):
                    torch.library.define(f"torchvision::{op}", SCHEMA)
        return None


if not any(type(finder).__name__ == "_DefineSchemas" for finder in sys.meta_path):
    sys.meta_path.insert(0, _DefineSchemas())
