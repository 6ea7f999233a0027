"""A baseline: what production runs for an op, called with the op's own arguments.

Each family lists its baselines in `overrides/FAMILY/production.py`: `BASELINES = {op: (Baseline, ...)}`. Only the
benchmark imports those files. `make` imports the library, so it runs in the baseline's own process.
"""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch

from fastkernels.core import registry
from fastkernels.core.dispatch import Provider

Function = Callable[..., Any]
HALF = (torch.float16, torch.bfloat16)


@dataclass(frozen=True)
class Preparation:
    """A value that a host derives from weights when it loads them, such as weights in another layout.

    weights  positions of the arguments whose values it depends on
    make     make(*op_args) -> the value; it may synchronize, and copy from the CPU
    """

    weights: tuple[int, ...]
    make: Function


class Prepared:
    """A baseline's function with what it needs prepared: a call finds the values by the addresses of its weights.

    Values for other addresses are made by the call itself, which must be neither captured nor timed. They keep their
    place in memory, because graphs read it, and the weights, so that no address is used twice.
    """

    def __init__(self, fn: Function, prepares: tuple[Preparation, ...]):
        self._fn, self._prepares = fn, prepares
        self._kept: dict[tuple[Any, ...], tuple[list[Any], Any]] = {}
        self._renewed: set[tuple[Any, ...]] | None = None  # while `renewed` is active

    def __call__(self, *args: Any) -> Any:
        return self._fn(*args, prepared=[self._value(p, args) for p in self._prepares])

    def _value(self, preparation: Preparation, args: tuple[Any, ...]) -> Any:
        weights = [args[i] for i in preparation.weights if i < len(args)]
        key = id(preparation), *(None if w is None else w.data_ptr() for w in weights)
        if key not in self._kept:
            self._kept[key] = weights, preparation.make(*args)
        elif self._renewed is not None and key not in self._renewed:
            made = preparation.make(*args)
            for into, value in zip(_tensors(self._kept[key][1]), _tensors(made), strict=True):
                into.copy_(value)
        if self._renewed is not None:
            self._renewed.add(key)
        return self._kept[key][1]

    @contextmanager
    def renewed(self) -> Iterator[None]:
        """Calls in this context prepare their weights again, each set once: the values may be others."""
        self._renewed = set()
        try:
            yield
        finally:
            self._renewed = None

    def clear(self) -> None:
        """Free all prepared values."""
        self._kept.clear()


def _tensors(value: Any) -> Iterator[torch.Tensor]:
    """All tensors in a prepared value, in order."""
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, (list, tuple)):
        for v in value:
            yield from _tensors(v)
    elif isinstance(value, dict):
        yield from _tensors(list(value.values()))
    elif dataclasses.is_dataclass(value):
        yield from _tensors([getattr(value, f.name) for f in dataclasses.fields(value)])


@dataclass(frozen=True)
class Baseline:
    """One implementation of an op that is not ours.

    kind        'host': what vLLM or SGLang itself calls; 'library': what they may be told to call; 'compiler':
                the reference through torch.compile; 'reference'
    make        make() -> fn(*op_args), which mutates what the op mutates and returns what it returns; for a block of a
                model make() -> build(args) -> call, as OpSpec.build does. It may import and compile.
                Raises ImportError, AttributeError or RuntimeError where the library is another version's
    modules     importable modules that it needs, all of them; of a tuple among them, any one
    refuses     refuses(*op_args) -> None if it takes the case, else the reason; may synchronize, so not when timed
    faults      faults(*op_args) -> None if it takes these values, else why it reads beyond its arguments, which ends a
                process that uses a GPU; may synchronize. Hosts never call it with such values
    overwrites  positions of arguments that it may write over though the op does not (the hosts no longer need them)
    differs     why its right outputs may be others than the oracle's ('' if they may not): other noise, other order
    unchecked   positions of the outputs for which that is so: these are not compared
    graph       whether calls can be captured in a CUDA graph
    prepares    what a host makes at load: make()'s function gets the values, in this order, as `prepared`
    """

    name: str
    kind: str
    make: Callable[[], Function]
    modules: tuple[str | tuple[str, ...], ...] = ()
    devices: tuple[str, ...] = ("cuda",)
    refuses: Callable[..., str | None] | None = None
    faults: Callable[..., str | None] | None = None
    overwrites: tuple[int, ...] = ()
    differs: str = ""
    unchecked: tuple[int, ...] = ()
    graph: bool = True
    device: str = "cuda"
    prepares: tuple[Preparation, ...] = ()

    def ready(self) -> Function:
        """Return `make()`'s result as a function of the op's arguments: a Prepared if it needs anything prepared."""
        return Prepared(self.make(), self.prepares) if self.prepares else self.make()

    @cached_property
    def fn(self) -> Function:
        """The result of `ready`, made once."""
        return self.ready()

    def available(self) -> str | None:
        """Why it cannot run here; None if its modules are there, which are not imported to find out."""
        for module in self.modules or (None,):
            reason = Provider(self.name, _nothing, self.devices, module).unavailable(self.device)
            if reason is not None:
                return reason
        return None

    def supports(self, *args: Any) -> str | None:
        """Why it does not take these arguments of the op; None if it does."""
        return None if self.refuses is None else self.refuses(*args)

    def fails(self, *args: Any) -> str | None:
        """Why it cannot be called with the values of these arguments; None if it can."""
        return None if self.faults is None else self.faults(*args)


def _nothing(*args: Any) -> None:
    return None


def refusing(name: str, why: str) -> Baseline:
    """A baseline of a host that takes no call, with the reason."""
    return Baseline(name, "host", lambda: _nothing, devices=("cuda", "cpu"), refuses=lambda *args: why)


def first(*refusals: str | None) -> str | None:
    """The first reason, None if there is none."""
    return next((r for r in refusals if r), None)


def half(*tensors: torch.Tensor | None) -> str | None:
    wrong = [t.dtype for t in tensors if t is not None and t.dtype not in HALF]
    return f"needs float16 or bfloat16, got {wrong[0]}" if wrong else None


def same(*tensors: torch.Tensor | None) -> str | None:
    """All of one dtype."""
    found = {t.dtype for t in tensors if t is not None}
    return f"needs one dtype, got {', '.join(sorted(map(str, found)))}" if len(found) > 1 else None


def dense(*tensors: torch.Tensor | None) -> str | None:
    wrong = [tuple(t.stride()) for t in tensors if t is not None and not t.is_contiguous()]
    return f"needs contiguous tensors, got strides {wrong[0]}" if wrong else None


def filled(*tensors: torch.Tensor) -> str | None:
    return "an empty tensor" if any(t.numel() == 0 for t in tensors) else None


def aligned(t: torch.Tensor, size: int = 16) -> str | None:
    row = t.shape[-1] * t.element_size()
    return f"needs rows of a multiple of {size} bytes, got {row}" if row % size else None


def provider(op: str, name: str) -> Function:
    """The op's own provider of that name, without torch's dispatcher."""
    return next(p.fn for p in registry.get(op).op.providers if p.name == name)


def inductor(op: str) -> Baseline:
    """The op's reference compiled by Inductor, one graph a shape.

    A host runs this where torch.compile sees an op that has no kernel of its own; vLLM compiles `forward_native` so.
    """

    return Baseline("inductor", "compiler", lambda: inductor_compiled(provider(op, "reference")))


def inductor_compiled(function: Function) -> Function:
    """The function compiled by Inductor as one graph, anew for each shape."""
    os.environ.setdefault("TORCHINDUCTOR_COMPILE_THREADS", "1")  # no pool of worker processes
    import torch._dynamo.config as dynamo

    for name in ("recompile_limit", "accumulated_recompile_limit"):
        if hasattr(dynamo, name):
            setattr(dynamo, name, 1024)  # above the limit Dynamo runs the function eagerly, without a warning
    compiled: Function = torch.compile(function, dynamic=False, fullgraph=True)
    return compiled
