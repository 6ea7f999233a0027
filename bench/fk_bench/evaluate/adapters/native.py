"""Extensions that an author's file builds from C++ and CUDA sources next to it.

The published benchmark's candidates import `load_op` and `lazy_op` from a module `fastkernels.infra.cuda_ext`. Ours has
these names for the duration of their import, and counts the calls into what they build.
"""

from __future__ import annotations

import hashlib
import os
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType
from typing import Any

# Half-precision operators and conversions that torch's extension builder turns off by default
CUDA_FLAGS = (
    "-O3",
    "-U__CUDA_NO_HALF_OPERATORS__",
    "-U__CUDA_NO_HALF_CONVERSIONS__",
    "-U__CUDA_NO_BFLOAT16_CONVERSIONS__",
    "-U__CUDA_NO_HALF2_OPERATORS__",
    "--expt-extended-lambda",
    "--expt-relaxed-constexpr",
    "-DENABLE_FP8",
)
CPP_FLAGS = ("-O3", "-DENABLE_FP8")


class Extension:
    """A handle to an extension, built at the first use of one of its functions; `calls` counts all uses."""

    def __init__(self, folder: Path, name: str, sources: Sequence[str], options: dict[str, Any]) -> None:
        self._args = folder, name, sources, options
        self._module: Any = None
        self.calls = 0

    def built(self) -> Extension:
        if self._module is None:
            self._module = _build(*self._args)
        return self

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        found = getattr(self.built()._module, name)
        if not callable(found):
            return found

        def call(*args: Any, **kwargs: Any) -> Any:
            self.calls += 1
            return found(*args, **kwargs)

        self.__dict__[name] = call  # the next look-up does not come here
        return call


EXTENSIONS: list[Extension] = []  # of this process


def cuda_ext() -> ModuleType:
    """The module that candidates of the published benchmark import as `fastkernels.infra.cuda_ext`."""
    module = ModuleType("fastkernels.infra.cuda_ext")
    # An extension here is always built for the local GPU alone, which is what `_pin_build_arch` arranges.
    vars(module).update(load_op=_load_op, lazy_op=_lazy_op, _pin_build_arch=lambda: None)
    return module


def _load_op(name: str, sources: str | Sequence[str], **options: Any) -> Extension:
    return _extension(name, sources, options).built()


def _lazy_op(name: str, sources: str | Sequence[str], **options: Any) -> Extension:
    return _extension(name, sources, options)


def _extension(name: str, sources: str | Sequence[str], options: dict[str, Any]) -> Extension:
    folder = Path(sys._getframe(2).f_globals["__file__"]).resolve().parent
    found = Extension(folder, name, [sources] if isinstance(sources, str) else list(sources), options)
    EXTENSIONS.append(found)
    return found


def _build(folder: Path, name: str, sources: Sequence[str], options: dict[str, Any]) -> Any:
    import torch
    from torch.utils import cpp_extension

    if any(s.endswith(".cu") for s in sources):
        if not torch.cuda.is_available():
            raise ImportError(f"{name} is a CUDA extension: it needs a GPU")
        if cpp_extension.CUDA_HOME is None:
            raise ImportError(f"{name} is a CUDA extension: it needs nvcc; set CUDA_HOME")
    if options.pop("need_cutlass", False):
        raise ImportError(f"{name} needs the headers of CUTLASS, which are not among its sources")
    files = [str(folder / s) for s in sources]
    if missing := [s for s, f in zip(sources, files, strict=True) if not Path(f).is_file()]:
        raise ImportError(f"{name}: {', '.join(missing)} is not next to the file that loads it")
    text = b"".join(Path(f).read_bytes() for f in files)
    with _architecture():
        return cpp_extension.load(
            name=f"{name}_{hashlib.sha256(text).hexdigest()[:12]}",  # two authors may use one name
            sources=files,
            extra_include_paths=[str(folder)],
            extra_cflags=list(CPP_FLAGS),
            extra_cuda_cflags=[*CUDA_FLAGS, *(options.get("extra_cuda_cflags") or ())],
            extra_ldflags=list(options.get("extra_ldflags") or _libraries(files)),
        )


def _libraries(files: Sequence[str]) -> tuple[str, ...]:
    return ("-lcublas", "-lcuda") if any(f.endswith(".cu") for f in files) else ()


@contextmanager
def _architecture() -> Iterator[None]:
    """Build for this GPU alone, with its architecture-specific instructions."""
    import torch

    before = os.environ.get("TORCH_CUDA_ARCH_LIST")
    if torch.cuda.is_available():
        major, minor = torch.cuda.get_device_capability()
        os.environ["TORCH_CUDA_ARCH_LIST"] = f"{major}.{minor}{'a' if major >= 9 else ''}"
    try:
        yield
    finally:
        if before is None:
            os.environ.pop("TORCH_CUDA_ARCH_LIST", None)
        else:
            os.environ["TORCH_CUDA_ARCH_LIST"] = before
