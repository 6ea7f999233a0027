"""Kernels that are launched while the one before still runs (programmatic dependent launch: Hopper and later).

A decode step is hundreds of kernels of a few microseconds, each of which would wait for the one before to end, for its
launch, and for its first instructions. A kernel whose first act is `follow` is on the chip by then, and lets the one
after it come as early. It may follow and precede any other kernel: what that one needs, it waits for.
"""

from __future__ import annotations

import math
from functools import lru_cache
from typing import Any

import torch
import triton
import triton.language as tl
from triton import knobs
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait
from triton.runtime import driver
from triton.runtime.jit import JITFunction

from fastkernels.core.env import Environment

# Programs of a launch that starts early. A larger one is long and has little to gain, and waiting costs each program:
# GELU of 51,200 programs took a quarter longer than in turn.
MOST = 4096

# Versions of Triton whose compiled kernels are launched with the arguments that `launch_kernel` gives them.
KNOWN = (3, 6), (3, 9)
_quick = tuple(int(n) for n in triton.__version__.split(".")[:2]) in KNOWN
_compiled: dict[tuple[Any, ...], tuple[Any, ...]] = {}


@triton.jit
def follow(OVERLAP: tl.constexpr):
    # First of all, in every program: nothing may be read or written, and none may end, before all kernels before this
    # one have ended. A kernel that went ahead of one would let those after it, which wait for this one only, do so too.
    if OVERLAP:
        gdc_launch_dependents()
        gdc_wait()


def overlap(device: torch.device, grid: tuple[int, ...] = (), early: bool = True) -> dict[str, bool]:
    """Launch arguments of a Triton kernel that calls follow(OVERLAP).

    grid   the launch's: large ones start in turn
    early  False: so does this one
    """
    early = early and math.prod(grid) <= MOST and overlaps(device)
    return {"OVERLAP": True, "launch_pdl": True} if early else {"OVERLAP": False}


@lru_cache
def overlaps(device: torch.device) -> bool:
    """Whether kernels start early there: on Hopper and later, unless FASTKERNELS_OVERLAP=0."""
    if device.type != "cuda" or not Environment.read().overlap:
        return False
    return torch.cuda.get_device_capability(device)[0] >= 9


def launch_kernel(kernel: Any, grid: tuple[int, ...], *args: Any, **constants: Any) -> None:
    """kernel[grid](*args, **constants), early where that pays, in less time on the CPU.

    kernel  begins with follow(OVERLAP)
    args    its parameters that are not constants, in order; the first is a tensor
    constants  of its signature, and num_warps and the like

    A prompt is hundreds of launches from Python, during which the chip may wait. Triton's time is mostly for finding
    out which of its compiled kernels this is. That depends on what the key here holds: types, which integers are 1 or
    divisible by 16, which pointers are by 16.

    The first launch of a kernel compiles it, while whoever asked waits. Servers warm up with few numbers of tokens; so
    what counts tokens, rows or pairs is in the kernel's do_not_specialize, and has no kernels of its own.
    """
    early = math.prod(grid) <= MOST and overlaps(args[0].device)
    options = {**constants, "OVERLAP": True, "launch_pdl": True} if early else {**constants, "OVERLAP": False}
    key = _key(kernel, args, options) if _quick and type(kernel) is JITFunction else None
    if key is None:
        kernel[grid](*args, **options)
        return
    found = _compiled.get(key)
    if found is None:
        compiled = kernel[grid](*args, **options)
        if early:  # more programs start in turn: that kernel is compiled now, and not when the first long prompt waits
            kernel.warmup(*args, grid=grid, **constants, OVERLAP=False)
        last = tuple(options[name] for name in kernel.arg_names[len(args) :])
        # The kernel itself is kept so that no other one gets its id.
        _compiled[key] = kernel, compiled.run, compiled.function, compiled.packed_metadata, last
        return
    _, run, function, packed, last = found
    x, y, z = (*grid, 1, 1)[:3]
    stream = driver.active.get_current_stream(key[1])
    run(x, y, z, stream, function, packed, None, None, None, *args, *last)


def _key(kernel: Any, args: tuple[Any, ...], options: dict[str, Any]) -> tuple[Any, ...] | None:
    """Calls with the same key run the same compiled kernel. None: Triton shall find out itself."""
    hook = knobs.runtime.launch_enter_hook
    if hook is not None and getattr(hook, "calls", True):  # a profiler wants to see each launch
        return None
    key: list[Any] = [id(kernel), driver.active.get_current_device(), tuple(options), *options.values()]
    add = key.append
    for a in args:
        kind = type(a)
        if kind is int:
            small = -(1 << 31) <= a < 1 << 31
            add(True if a == 1 else 2 + (a % 16 == 0) if small else a)
        elif isinstance(a, torch.Tensor):
            add(a.dtype)
            add(a.data_ptr() % 16 == 0)
        elif a is None or kind is float or kind is bool:
            add(kind)
        else:
            return None
    return tuple(key)
