"""Launch kernels while their predecessor still runs (programmatic dependent launch: Hopper and later).

A decode step is hundreds of kernels of a few microseconds. Without overlap each waits until its predecessor has ended,
then for its own launch and first instructions. A kernel that begins with `follow` is already resident by then, and lets
its successor launch as early. It can follow and precede any other kernel: it waits for the predecessor's results.
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
from fastkernels.core.runtime import ahead

# Largest number of programs in an early launch. A longer kernel gains little, and every program pays for the wait:
# GELU with 51,200 programs took 25% longer than without overlap.
MOST = 4096

# Versions of Triton whose compiled kernels accept the arguments that `launch_kernel` passes.
KNOWN = (3, 6), (3, 9)
_quick = tuple(int(n) for n in triton.__version__.split(".")[:2]) in KNOWN
_compiled: dict[tuple[Any, ...], tuple[Any, ...]] = {}


@triton.jit
def follow(OVERLAP: tl.constexpr):
    # Every program calls this first: none may read, write or end before all preceding kernels have ended. Otherwise the
    # next kernel, which waits only for this one, could overtake an earlier kernel.
    if OVERLAP:
        gdc_launch_dependents()
        gdc_wait()


def overlap(device: torch.device, grid: tuple[int, ...] = (), early: bool = True) -> dict[str, bool]:
    """Launch arguments for a Triton kernel that calls follow(OVERLAP).

    grid   of the launch; large grids do not overlap
    early  False: this launch does not overlap
    """
    early = early and math.prod(grid) <= MOST and overlaps(device)
    return {"OVERLAP": True, "launch_pdl": True} if early else {"OVERLAP": False}


@lru_cache
def overlaps(device: torch.device) -> bool:
    """Whether kernels overlap on this device: on Hopper and later, unless FASTKERNELS_OVERLAP=0."""
    if device.type != "cuda" or not Environment.read().overlap:
        return False
    return torch.cuda.get_device_capability(device)[0] >= 9


def launch_kernel(
    kernel: Any, grid: tuple[int, ...], *args: Any, any_grid: Any = True, **constants: Any
) -> None:
    """Run kernel[grid](*args, **constants) with overlap where that pays, and with less CPU time than Triton's launch.

    kernel     begins with follow(OVERLAP)
    args       its non-constant parameters, in order; the first is a tensor
    constants  its constexpr parameters, and options such as num_warps
    any_grid   whether the same compiled kernel may come with other numbers of programs. Then the first launch compiles
               it with overlap and without; not for kernels whose blocks follow from the shape

    A prefill is hundreds of launches from Python, and the GPU may wait for them. Triton spends most of a launch on
    finding the compiled kernel, which depends on the key here: types, integers equal to 1 or divisible by 16, and
    pointers divisible by 16.

    The first launch of a kernel compiles it, and a request waits meanwhile. Servers warm up with few token counts, so
    kernels list counts of tokens, rows or pairs in do_not_specialize.
    """
    early = math.prod(grid) <= MOST and overlaps(args[0].device)
    options = {**constants, "OVERLAP": True, "launch_pdl": True} if early else {**constants, "OVERLAP": False}
    if ahead.only() and type(kernel) is JITFunction:
        kernel.warmup(*args, grid=grid, **options)
        return
    key = _key(kernel, args, options) if _quick and type(kernel) is JITFunction else None
    if key is None:
        kernel[grid](*args, **options)
        return
    found = _compiled.get(key)
    if found is None:
        compiled = kernel[grid](*args, **options)
        if early and any_grid:
            # Larger grids run without overlap: compile that kernel now, not while the first long prompt waits
            kernel.warmup(*args, grid=grid, **constants, OVERLAP=False)
        last = tuple(options[name] for name in kernel.arg_names[len(args) :])
        # Keep the kernel alive, so that its id is not reused.
        _compiled[key] = kernel, compiled.run, compiled.function, compiled.packed_metadata, last
        return
    _, run, function, packed, last = found
    x, y, z = (*grid, 1, 1)[:3]
    stream = driver.active.get_current_stream(key[1])
    run(x, y, z, stream, function, packed, None, None, None, *args, *last)


def _key(kernel: Any, args: tuple[Any, ...], options: dict[str, Any]) -> tuple[Any, ...] | None:
    """The key of the compiled kernel that this call runs; None: use Triton's own launch."""
    hook = knobs.runtime.launch_enter_hook
    if hook is not None and getattr(hook, "calls", True):  # a profiler hooks launches
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
