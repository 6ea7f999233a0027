"""Adds the one method that SGLang's attention for CPUs lacks for data-parallel attention, when a process imports it.

SGLang pads the batches of all ranks to one length, and asks the backend for the length of a padding request: 1, as in
its Triton backend.
"""

import importlib.abc
import importlib.machinery
import sys

NAME = "sglang.srt.layers.attention.torch_native_backend"


class Finder(importlib.abc.MetaPathFinder):
    def find_spec(self, fullname, path, target=None):
        if fullname != NAME:
            return None
        spec = importlib.machinery.PathFinder.find_spec(fullname, path)
        run = spec.loader.exec_module

        def exec_module(module):
            run(module)
            module.TorchNativeAttnBackend.get_cuda_graph_seq_len_fill_value = lambda self: 1

        spec.loader.exec_module = exec_module
        return spec


sys.meta_path.insert(0, Finder())
