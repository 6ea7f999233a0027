"""The function that an adapted file calls, in the candidate's process."""

from __future__ import annotations

import functools
import importlib
import importlib.machinery
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType
from typing import Any

import torch

from fastkernels.core.candidate import sources_folder

LAYOUTS = (
    "published", "trace", "kernelbench", "hf_kernels", "liger", "quack", "fla", "flashinfer", "inductor",
)  # fmt: skip


def foreign(file: str, layout: str, op: str, facts: Mapping[str, Any] | None = None) -> Callable[..., Any]:
    """The function of `op`, made from the sources in the folder next to `file`, whose code runs."""
    if layout not in LAYOUTS:
        raise ImportError(f"{file}: layout {layout!r} is none of {', '.join(LAYOUTS)}")
    module = importlib.import_module(f"fk_bench.evaluate.adapters.{layout}")
    try:
        made: Callable[..., Any] = module.bind(sources_folder(Path(file)), op, **(facts or {}))
    except OSError as error:
        if "CUDA_HOME" not in str(error):
            raise
        raise ImportError(
            "the author's file builds a CUDA extension: it needs a GPU, and nvcc in CUDA_HOME"
        ) from error
    import torch

    if not torch.cuda.is_available():
        made = _without_gpu(made)
    made.__name__ = op
    return made


def _without_gpu(made: Callable[..., Any]) -> Callable[..., Any]:
    """The function, whose error names the GPU if a Triton kernel of it finds none."""

    @functools.wraps(made)
    def call(*args: Any, **kwargs: Any) -> Any:
        try:
            return made(*args, **kwargs)
        except RuntimeError as error:
            if "active driver" not in str(error):
                raise
            raise NotImplementedError(f"a Triton kernel of the author needs a GPU: {error}") from error

    return call


def import_from(folder: Path, name: str, parents: tuple[str, ...] = (), **provided: ModuleType) -> ModuleType:
    """Import `name`, such as 'L1.rms_norm', from a folder, as part of a package of its own.

    parents   packages around the folder, so that the author's relative imports mean what they meant
    provided  modules that exist while the import runs, by name ('__' for '.'); a name that begins with '__' is
              relative to the package
    """
    package = f"fk_foreign_{abs(hash(str(folder.resolve()))):x}"
    added = {}
    for depth in range(len(parents) + 1):
        inner = ".".join((package, *parents[:depth]))
        added[inner] = _package(inner, folder if depth == len(parents) else None)
    sys.modules.update(added)
    temporary = {_module_name(k, package): v for k, v in provided.items()}
    with _present(temporary):
        return importlib.import_module(".".join((package, *parents, name)))


def _module_name(key: str, package: str) -> str:
    name = key.replace("__", ".")
    return package + name if name.startswith(".") else name


def _package(name: str, folder: Path | None) -> ModuleType:
    module = ModuleType(name)
    module.__path__ = [str(folder)] if folder is not None else []
    module.__spec__ = importlib.machinery.ModuleSpec(name, None, is_package=True)
    return module


@contextmanager
def _present(modules: Mapping[str, ModuleType]) -> Iterator[None]:
    """Have these in sys.modules; afterwards, what was there before."""
    before = {name: sys.modules.get(name) for name in modules}
    sys.modules.update(modules)
    try:
        yield
    finally:
        for name, module in before.items():
            if module is None:
                sys.modules.pop(name, None)
            else:
                sys.modules[name] = module


def shown(value: Any) -> str:
    """A value in a message: a tensor by its shape."""
    return f"a tensor {list(value.shape)}" if isinstance(value, torch.Tensor) else repr(value)
