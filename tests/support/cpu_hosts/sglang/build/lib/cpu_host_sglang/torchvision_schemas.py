"""The torchvision wheel is a CUDA build: beside a CPU torch its operators do not load and its import fails.

The two schemas that the import looks for are defined just before torchvision is imported; nothing calls them.
Imported from a .pth file at the start of every Python: it must import nothing heavy.
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
