"""The CPU time of an op's call, against that of the plain PyTorch code that it replaces.

In a CUDA graph a call takes no CPU time. Compiled code without graphs launches each kernel from the CPU, and where this
takes longer than the kernels, a call that takes more of it loses what its kernel gains.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from functools import cache
from typing import Any

import torch

from fastkernels.core import registry

PLAIN = "torch"  # the provider that is what PyTorch runs
ROUNDS, CALLS = 5, 20


LONG = 5e-3  # seconds of a call that the CPU does not delay


@cache
def slower_to_call(name: str, device: torch.device) -> str | None:
    """Return why calls of an op cost more CPU time than PyTorch's own ops on this machine; None if they do not.

    For an op that only calls others, these count. The first of their model cases that loses decides. On a CPU, and for
    ops without a plain form, nothing is measured.
    """
    spec = registry.get(name)
    for op in [name] if spec.op is not None else spec.calls:
        try:
            for case, ours, plain in _calls(op, device) if device.type == "cuda" else ():
                taken, usual = least(ours), least(plain)
                if taken > usual:
                    return (
                        f"a call takes {1e6 * taken:.0f} us of the CPU, PyTorch's own ops {1e6 * usual:.0f} us"
                        f" ({op}, case {case})"
                    )
        except Exception as error:  # of a kernel, a compiler or the allocator
            text = next(iter(str(error).splitlines()), "")
            return f"the CPU time of {op} could not be measured: {type(error).__name__}: {text}"
    return None


def least(call: Callable[[], Any]) -> float:
    """The shortest mean time in seconds in which calls return, while the GPU works behind them."""
    found = float("inf")
    for _ in range(ROUNDS):
        began = time.perf_counter()
        for _ in range(CALLS):
            call()
        found = min(found, (time.perf_counter() - began) / CALLS)
        if torch.cuda.is_available():
            torch.cuda.synchronize()
    return found


def _calls(op: str, device: torch.device) -> Iterator[tuple[str, Callable[[], Any], Callable[[], Any]]]:
    """(case, a call of the op, the same in plain PyTorch) of the op's short model cases; both have run."""
    spec = registry.get(op)
    plain = next((p for p in spec.op.providers if p.name == PLAIN), None) if spec.op is not None else None
    if plain is None:
        return
    generator = torch.Generator(device).manual_seed(0)
    where = device.type if device.index is None else str(device)
    for case in spec.cases:
        if "model" not in case.tags:
            continue
        args = spec.inputs(case, where, generator)

        def ours(args: Any = args) -> Any:
            return spec.op(*args)

        def usual(args: Any = args) -> Any:
            return plain.fn(*args)

        with torch.inference_mode():
            ours(), usual()
            torch.cuda.synchronize(device)
            began = time.perf_counter()
            usual()
            torch.cuda.synchronize(device)
            if time.perf_counter() - began < LONG:
                yield case.name, ours, usual
