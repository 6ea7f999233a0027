"""Deployment and serving: whether a candidate runs in a compiled host, and whether it compiles while serving.

A candidate's class may return to plain PyTorch while it is traced. In a compiled host its kernel then never runs: it is
not deployed, which is no speedup of 1. A kernel that is compiled again for each number of rows stalls a server at each
new batch size.
"""

from __future__ import annotations

import logging
import math
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import wraps
from typing import Any
from unittest import mock

import torch

from fastkernels.core.case import Case
from fastkernels.core.spec import OpSpec
from fk_bench.evaluate.adapters.native import EXTENSIONS

log = logging.getLogger("fastkernels")

# Batch sizes of a warm-up, with all that Triton specializes on: 1, multiples of 16, others
WARM = (1, 2, 8, 16, 17, 32, 48, 100, 256)
NEW = (3, 7, 24, 64, 77, 160, 333)  # batch sizes that the server meets afterwards


@dataclass(frozen=True)
class Deployment:
    """Launches of the candidate's own kernels in one call, eager and under torch.compile."""

    eager: int
    compiled: int

    @property
    def problem(self) -> str:
        """Why a host does not run the candidate's kernel, or ''."""
        if not self.eager:
            return "not deployed: this call runs no kernel of the candidate"
        if not self.compiled:
            return "not deployed: under torch.compile the candidate runs no kernel of its own"
        return ""


@dataclass(frozen=True)
class Serving:
    """Compilations at batch sizes after the warm-up: {size: {compiler: count}}."""

    sizes: tuple[int, ...]
    compiled: Mapping[int, Mapping[str, int]]

    @property
    def problem(self) -> str:
        """Why the candidate stalls a server, or ''."""
        if not self.compiled:
            return ""
        kinds = sorted({kind for found in self.compiled.values() for kind in found})
        return f"compiles while serving: {len(self.compiled)} of {len(self.sizes)} new batch sizes ({', '.join(kinds)})"


def deployment(call: Callable[..., Any], arguments: Callable[[], Sequence[Any]]) -> Deployment:
    """Count the launches of Triton kernels and of extensions in `call`, eager and compiled.

    call       a module or function as the host calls it, whose code a compiler may trace
    arguments  makes new arguments for each call

    The compiled call runs traced code without Inductor, so launches of Triton kernels are seen there, too.
    """
    counts = []
    torch.compiler.reset()
    for function in (call, torch.compile(call, backend="eager")):
        with torch.no_grad():
            function(*arguments())  # builds and warms up
            with launches() as counted:
                function(*arguments())
        counts.append(sum(counted.values()))
    return Deployment(*counts)


def of_class(spec: OpSpec, cls: type, device: str) -> str:
    """Why a candidate's class does not run its kernels in compiled code; '' if it does, or if that cannot be seen."""
    if spec.build is None or not spec.cases:
        return ""
    case = min([c for c in spec.cases if "model" in c.tags] or spec.cases, key=_elements)
    try:
        made = spec.inputs(case, device, torch.Generator(device).manual_seed(0))
        found = deployment(spec.build(cls, made), tuple)
    except Exception as error:  # of the candidate or a compiler: the host's own calls show whether it matters
        log.info("%s: not checked in compiled code: %s: %s", cls.__name__, type(error).__name__, error)
        return ""
    finally:
        torch.compiler.reset()
    return found.problem if found.eager else ""


def _elements(case: Case) -> float:
    return math.prod(
        math.prod(v) if isinstance(v, tuple) else v for v in case.dims.values() if isinstance(v, (int, tuple))
    )


@contextmanager
def launches() -> Iterator[Counter[str]]:
    """Count launches of Triton kernels and calls of extensions that adapted files have built."""
    from triton.runtime.interpreter import GridExecutor
    from triton.runtime.jit import JITFunction

    counted: Counter[str] = Counter()
    before = [(e, e.calls) for e in EXTENSIONS]
    with ExitStack() as stack:
        for owner, name in ((JITFunction, "run"), (GridExecutor, "__call__")):
            original = torch.compiler.disable(getattr(owner, name))
            stack.enter_context(mock.patch.object(owner, name, _counting(original, counted, "triton")))
        yield counted
    counted["extension"] = sum(e.calls for e in EXTENSIONS) - sum(calls for _, calls in before)


@contextmanager
def compilations() -> Iterator[Counter[str]]:
    """Count compilations by Triton, NVRTC, torch's extension builder (nvcc) and torch.compile.

    A kernel that Triton finds in its cache on disk counts: the cache's state is no property of the candidate.
    """
    from torch._dynamo.callback import callback_handler
    from torch.cuda import _utils
    from torch.utils import cpp_extension
    from triton import knobs

    counted: Counter[str] = Counter()

    def started(*_: Any) -> None:
        counted["torch.compile"] += 1

    previous = knobs.compilation.listener

    def compiled(**event: Any) -> None:
        counted["triton"] += 1
        if previous is not None:
            previous(**event)

    with ExitStack() as stack:
        for owner, name, kind in (
            (cpp_extension, "_jit_compile", "nvcc"), (_utils, "_nvrtc_compile", "nvrtc"),
        ):  # fmt: skip
            stack.enter_context(
                mock.patch.object(owner, name, _counting(getattr(owner, name), counted, kind))
            )
        stack.enter_context(mock.patch.object(knobs.compilation, "listener", compiled))
        callback_handler.register_start_callback(started)
        try:
            yield counted
        finally:
            callback_handler.remove_start_callback(started)


def compiles_while_serving(
    call: Callable[[int], Any], warm: Sequence[int] = WARM, new: Sequence[int] = NEW
) -> Serving:
    """Call with the batch sizes of a warm-up, then count the compilations at new ones."""
    for size in warm:
        call(size)
    found: dict[int, Mapping[str, int]] = {}
    for size in new:
        with compilations() as counted:
            call(size)
        if any(counted.values()):
            found[size] = dict(counted)
    return Serving(tuple(new), found)


def problems(spec: OpSpec, function: Callable[..., Any], device: str) -> dict[str, str]:
    """Reasons that keep an op's function from running in a compiled host ('deployed') and stalls a server ('serving').

    '' means no problem; 'unknown: ' comes before the reason for which it cannot be tested.
    """
    case = min((c for c in spec.cases if "model" in c.tags), key=spec.bytes_moved, default=None)
    call = call_of(spec, function, device)

    def deployed() -> str:
        if case is None:
            return "unknown: the op has no case of a model"
        return deployment(
            function, lambda: spec.inputs(case, device, torch.Generator(device).manual_seed(0))
        ).problem

    def serving() -> str:
        return (
            "unknown: the op has no axis of tokens" if call is None else compiles_while_serving(call).problem
        )

    found = {}
    for name, measure in (("deployed", deployed), ("serving", serving)):
        try:
            found[name] = measure()
        except Exception as error:
            found[name] = f"unknown: {type(error).__name__}: {error}"[:200]
    return found


def call_of(spec: OpSpec, function: Callable[..., Any], device: str) -> Callable[[int], Any] | None:
    """A call of the op with a number of tokens, on the case of production whose tokens are smallest; None for an op
    without tokens.
    """
    if not spec.arguments or "tokens" not in spec.declaration.axes or not spec.cases:
        return None
    of_models = [c for c in spec.cases if "model" in c.tags] or list(spec.cases)
    usual: Case = min(of_models, key=lambda c: spec.bytes_moved(c) / _count(c.dims.get("tokens")))

    def call(tokens: int) -> Any:
        size = tokens if not isinstance(usual.dims.get("tokens"), tuple) else (tokens,)
        case = Case("serving", {**usual.dims, "tokens": size}, usual.dtype, 1.0, ())
        generator = torch.Generator(device).manual_seed(tokens)
        return function(*spec.inputs(case, device, generator))

    return call


def _count(tokens: Any) -> int:
    """Tokens of a case; their axis may have several dimensions."""
    sizes = tokens if isinstance(tokens, (tuple, list)) else (tokens or 1,)
    return max(math.prod(map(int, sizes)), 1)


def _counting(original: Callable[..., Any], counted: Counter[str], kind: str) -> Callable[..., Any]:
    @wraps(original)
    def run(*args: Any, **kwargs: Any) -> Any:
        counted[kind] += 1
        return original(*args, **kwargs)

    return run
