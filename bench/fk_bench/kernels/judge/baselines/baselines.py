"""Who a candidate is compared with: what production runs for an op, under the op's own calling convention.

An adapter calls the library as the hosts do, and nothing more: what a host keeps from call to call (scales on the
device, query starts) is kept here too, what its kernel overwrites is overwritten. Libraries are imported by `make`,
which runs in the baseline's own process; this module itself imports neither them nor what reads results.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import torch

from fastkernels.core import registry
from fastkernels.core.dispatch import Provider

Function = Callable[..., Any]
AGAINST = ("production", "host", "reference")
HALF = (torch.float16, torch.bfloat16)
_ADAPTERS = (
    "production_vllm", "production_moe", "production_sglang", "production_fp8", "production_flashinfer",
    "production_torch",
)  # fmt: skip


@dataclass(frozen=True)
class Baseline:
    """One implementation of an op that is not ours.

    kind        'host': what vLLM or SGLang itself calls; 'library': what they may be told to call; 'compiler':
                the reference through torch.compile; 'reference'
    make        make() -> fn(*op_args), which mutates what the op mutates and returns what it returns. It may import
                and compile. Raises ImportError, AttributeError or RuntimeError where the library is another version's
    modules     importable modules that it needs, all of them; of a tuple among them, any one
    refuses     refuses(*op_args) -> None if it takes the case, else the reason; may synchronize, so not when timed
    overwrites  positions of arguments that it may write over though the op does not (the hosts no longer need them)
    differs     why its right outputs may be others than the oracle's ('' if they may not): other noise, other order
    unchecked   positions of the outputs for which that is so: these are not compared
    graph       whether calls can be captured in a CUDA graph
    """

    name: str
    kind: str
    make: Callable[[], Function]
    modules: tuple[str | tuple[str, ...], ...] = ()
    devices: tuple[str, ...] = ("cuda",)
    refuses: Callable[..., str | None] | None = None
    overwrites: tuple[int, ...] = ()
    differs: str = ""
    unchecked: tuple[int, ...] = ()
    graph: bool = True
    device: str = "cuda"

    @cached_property
    def fn(self) -> Function:
        """What `make` returns, made once."""
        return self.make()

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


def _nothing(*args: Any) -> None:
    return None


def baselines(op: str, against: str, device: str) -> list[Baseline]:
    """Those to compare with, also the ones that are not `available` here; empty for an op without a function.

    against  'production': all that production ships, and the reference, last, for what none of it serves;
             'host': vLLM's or SGLang's own; 'reference': plain PyTorch
    Raises UnknownName for an op and ValueError for anything else that does not exist.
    """
    if against not in AGAINST:
        raise ValueError(f"against {against!r} is not one of {', '.join(AGAINST)}")
    spec = registry.get(op)
    if spec.op is None:
        return []
    reference = Baseline(
        "reference", "reference", lambda: _provider(op, "reference"), devices=("cuda", "cpu")
    )
    found: list[Baseline] = []
    if against != "reference":
        for name in _ADAPTERS:
            adapters: Mapping[str, tuple[Baseline, ...]] = importlib.import_module(
                f"{__package__}.{name}"
            ).ADAPTERS
            found += adapters.get(op, ())
        found = [b for b in found if device in b.devices and (against == "production" or b.kind == "host")]
    found = [replace(b, device=device) for b in found]
    # The reference is the last resort, for cases that nothing else serves.
    if against == "reference" or against == "production":
        found.append(replace(reference, device=device))
    return found


def _provider(op: str, name: str) -> Function:
    """The op's own provider of that name, without torch's dispatcher."""
    return next(p.fn for p in registry.get(op).op.providers if p.name == name)


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
