"""The runner's replies about what it ran: failures with their statuses, properties of functions and tensors."""

from __future__ import annotations

import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from fk_bench.core.terminal.text import printable
from fk_bench.kernels.judge.memory import layout


class Failure(Exception):
    """A failure in this process. `status` is a value of rows.Status."""

    def __init__(self, status: str, reason: str):
        super().__init__(reason)
        self.status = status


def describe_error(error: BaseException) -> str:
    """An error in one line: its type, its text, and the candidate's line that raised it."""
    frames = [f for f in traceback.extract_tb(error.__traceback__) if "fk_bench" not in f.filename]
    where = f" (line {frames[-1].lineno} of {Path(frames[-1].filename).name})" if frames else ""
    text = " ".join(printable(str(error), 4000).split())  # JSON cannot hold a lone surrogate
    return f"{type(error).__name__}: {text[:600]}{where}"


# PyTorch raises plain RuntimeErrors in these cases; only their texts tell them apart. Outputs that are not tensors:
_OTHER_OUTPUTS = ("PythonKernelHolder", "Unable to cast Python", "is not an instance of 'sequence'")


# Triton's errors and NVRTC's, by name: neither is imported for a candidate that does not use it
_COMPILERS = frozenset(("SyntaxError", "CompilationError", "PTXASError", "OutOfResources", "KernelError"))
_COMPILER_MODULES = ("triton.compiler.", "torch._dynamo.", "torch._inductor.")
_COMPILER_TEXTS = ("Error building extension", "Error compiling", "Ninja is required")


def _no_memory(text: str) -> bool:
    return "not enough memory" in text or "can't allocate memory" in text


def status_of(error: BaseException) -> str:
    text = str(error)
    if isinstance(error, (MemoryError, torch.cuda.OutOfMemoryError)) or _no_memory(text):
        return "oom"
    if isinstance(error, TypeError) and "argument" in text:
        return "signature_mismatch"
    if any(words in text for words in _OTHER_OUTPUTS):
        return "signature_mismatch"
    return "compile_error" if _of_a_compiler(error) else "runtime_error"


def _of_a_compiler(error: BaseException | None) -> bool:
    """Whether a compiler raised this error or its cause. Kernels are compiled in the first call."""
    while error is not None:
        for kind in type(error).__mro__:
            if kind.__name__ in _COMPILERS or f"{kind.__module__}.".startswith(_COMPILER_MODULES):
                return True
        if str(error).startswith(_COMPILER_TEXTS):
            return True
        error = error.__cause__
    return False


def remembered(supports: Callable[..., str | None]) -> Callable[..., str | None]:
    """`supports`, cached by the shapes of its arguments: it may synchronize, which a capture must not."""
    known: dict[str, str | None] = {}

    def asked(*args: Any) -> str | None:
        shapes = [[(t.shape, t.stride(), t.dtype) for t in layout.tensors(a)] or a for a in args]
        key = str(shapes)
        if key not in known:
            known[key] = supports(*args)
        return known[key]

    return asked


def name_of(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def overlap(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Whether two tensors overlap in memory (views of one arena are compared by address)."""

    a0, b0 = a.data_ptr(), b.data_ptr()
    return a.numel() > 0 and b.numel() > 0 and a0 < b0 + span(b) and b0 < a0 + span(a)


def span(t: torch.Tensor) -> int:
    """Bytes from a tensor's first element to the end of its last."""
    return (sum((n - 1) * s for n, s in zip(t.shape, t.stride(), strict=True)) + 1) * t.element_size()
