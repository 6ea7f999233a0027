"""Kernels that a process launched, from torch's profiler: the proof that ours run in replayed CUDA graphs."""

from __future__ import annotations

from typing import Any

from fastkernels.core import registry
from fastkernels.patch import PatchError
from fk_integrations.patching.apply import Patched

_profiler: list[Any] = []


def start(device: Any) -> None:
    """Begin to record kernels. Raises PatchError if a recording is under way."""
    import torch

    if _profiler:
        raise PatchError("a trace is under way in this process: stop it first")
    activity = torch.profiler.ProfilerActivity
    kind = activity.CPU if torch.device(device).type == "cpu" else activity.CUDA
    profiler = torch.profiler.profile(activities=[kind])
    profiler.start()
    _profiler.append(profiler)


def stop() -> dict[str, Any]:
    """Return the kernels that ran since `start`; on a CPU, the operators.

    kernels  {kernel name: launches}; CUDA runtime calls of the host are included under their names
    us       {kernel name: total us}; a kernel that starts early also counts while it waits for the one before it
    busy_us  in which at least one kernel or copy was on the GPU
    """
    import torch

    if not _profiler:
        raise PatchError("no trace is under way in this process: start one first")
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    profiler = _profiler.pop()
    profiler.stop()
    counts: dict[str, int] = {}
    us: dict[str, float] = {}
    on_gpu = []
    for event in profiler.events():
        counts[event.name] = counts.get(event.name, 0) + 1
        us[event.name] = us.get(event.name, 0.0) + event.time_range.elapsed_us()
        if event.device_type == torch.autograd.DeviceType.CUDA:  # events of C++ have objects of their own
            on_gpu.append((event.time_range.start, event.time_range.end))
    return {"kernels": counts, "us": us, "busy_us": covered(on_gpu)}


def covered(spans: list[tuple[float, float]]) -> float:
    """Return the length of the union of (start, end) spans."""
    total, until = 0.0, float("-inf")
    for start, end in sorted(spans):
        total += max(end - max(start, until), 0.0)
        until = max(until, end)
    return total


def kernel_names(op: str) -> list[str]:
    """The names of an op in a trace: its Triton kernels, and torch's name for it on a CPU.

    A module without an op of its own is found by the ops that it calls.
    """
    from triton.runtime.jit import KernelInterface

    names = []
    for name in (op, *registry.get(op).calls):
        found = [v for v in vars(registry.op_module(name)).values() if isinstance(v, KernelInterface)]
        names += [k.__name__ for k in found if hasattr(k, "__name__")] + [f"fastkernels::{name}"]
    return names


def prove(patched: Patched, kernels: dict[str, int]) -> None:
    """Mark the active ops with a kernel in the trace."""
    for row in patched.rows:
        # By prefix: vLLM's fused_add_rms_norm_kernel contains our _rms_norm_kernel.
        names = tuple(kernel_names(row.op))
        if row.state == "active" and any(kernel.startswith(names) for kernel in kernels):
            patched.traced.add(row.op)
