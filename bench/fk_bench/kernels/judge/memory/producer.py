"""A kernel in front of a queued call that makes a part of its input, as the kernel before it does in a model.

In a batch, a kernel that starts early (programmatic dependent launch) hides its launch behind the call before it. Right
behind a gate it could not, and a call alone would cost more than in a batch for an honest reason. So the call follows
this kernel, which lets it start early, runs for some microseconds, and then changes the signs of some values if the
judge has turned them. A call that does not wait for it computes with wrong values.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import triton
import triton.language as tl

MOST = 1024  # values whose signs change
CYCLES = 8192  # of the GPU's clock: about 5 us, in which a kernel can be launched
FLOATS = torch.float32, torch.float16, torch.bfloat16


@triton.jit
def _clock():
    return tl.inline_asm_elementwise("mov.u64 $0, %clock64;", "=l", [], dtype=tl.int64, is_pure=False, pack=1)


@triton.jit
def _producer_kernel(x_ptr, turned, N, CYCLES: tl.constexpr, EARLY: tl.constexpr, BLOCK: tl.constexpr):
    if EARLY:
        tl.extra.cuda.gdc_launch_dependents()
    start = _clock()
    turn = tl.load(turned.to(tl.pointer_type(tl.int32)), volatile=True)
    now = start
    while now - start < CYCLES:
        now = _clock()
    cols = tl.arange(0, BLOCK)
    x = tl.load(x_ptr + cols, mask=cols < N, other=0.0)
    tl.store(x_ptr + cols, tl.where(turn != 0, -x, x), mask=cols < N)


def region(plan: dict[str, Any], args: list[Any]) -> torch.Tensor | None:
    """Some values of a slot's first contiguous tensor of floats that no other slot has; None if there is none."""
    for planned, arg in zip(plan["args"], args, strict=True):
        if (
            isinstance(arg, torch.Tensor)
            and not plan["regions"][planned["tensor"]["region"]]["shared"]
            and arg.dtype in FLOATS and arg.numel() and arg.is_contiguous()
        ):  # fmt: skip
            return arg.view(-1)[:MOST]
    return None


def launcher(values: torch.Tensor, turned: int) -> Callable[[], None]:
    """Return what launches the kernel. turned: address of the word that says whether the judge has turned the signs.

    The kernel has run once and is loaded, so that a graph can capture it.
    """
    early = torch.cuda.get_device_capability(values.device)[0] >= 9

    def launch() -> None:
        _producer_kernel[(1,)](
            values, turned, values.numel(), CYCLES=CYCLES, EARLY=early, BLOCK=MOST, num_warps=4
        )

    launch()
    return launch
