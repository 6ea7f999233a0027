"""Run the Triton kernels of vLLM and SGLang in Triton's interpreter, which their CPU builds do not expect.

Call `prepare` before the host is imported, and `adapt` after its kernels are. Needs TRITON_INTERPRET=1.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import torch

FUNCTIONS = "exp", "exp2", "log", "log2"


class Driver:
    """Of a CPU backend: without one, vLLM's CPU build replaces Triton by an empty module."""

    @staticmethod
    def is_active() -> bool:
        return True

    def get_current_target(self) -> Any:
        return SimpleNamespace(backend="cpu", arch=0, warp_size=32)

    def get_active_torch_device(self) -> torch.device:
        return torch.device("cpu")


def prepare() -> None:
    """One configuration of each kernel, since a choice needs a GPU, and numbers in place of NumPy's arrays of one."""
    from triton.backends import backends
    from triton.runtime import interpreter
    from triton.runtime.autotuner import Autotuner

    backends["cpu"] = SimpleNamespace(compiler=None, driver=Driver)  # type: ignore[assignment]
    torch.cpu.device = lambda index: contextlib.nullcontext()  # type: ignore[attr-defined]
    stock, stock_patch = Autotuner.__init__, interpreter._patch_lang_tensor

    def with_one(self: Any, *args: Any, **kwargs: Any) -> None:
        stock(self, *args, **kwargs)
        self.configs = self.configs[:1]

    def with_index(tensor: Any, scope: Any) -> None:
        stock_patch(tensor, scope)
        scope.set_attr(tensor, "__index__", lambda self: int(self.handle.data.reshape(-1)[0]))

    Autotuner.__init__ = with_one  # type: ignore[method-assign]
    interpreter._patch_lang_tensor = with_index


def adapt(host: str) -> None:
    """Of the host's modules: the interpreter replaces tl.exp alone, not what a module imported under another name."""
    from triton import language as tl

    def by_name(name: str) -> Callable[[Any], Any]:
        return lambda x: getattr(tl, name)(x)

    def numbers(count: Any) -> Iterator[Any]:
        """As in a compiled loop, whose numbers are tensors."""
        return (tl.full([], i, tl.int32) for i in range(count))

    for module in [m for name, m in sys.modules.items() if name.startswith(f"{host}.")]:
        for name in FUNCTIONS:
            if getattr(module, name, None) is getattr(tl, name):
                setattr(module, name, by_name(name))
        if module.__name__.endswith("flash_linear_attention.ops.chunk_delta_h"):
            module.range = numbers  # type: ignore[attr-defined]
