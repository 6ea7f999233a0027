"""The time of one call by kind of kernel, from PyTorch's profiler: the device's kernels, or a CPU's operators."""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Any

import torch
from torch.autograd import DeviceType
from torch.profiler import ProfilerActivity, profile

from fk_bench.e2e.pictures.subjects import Subject

# The first kind whose pattern a name contains. Convolutions and attention also have "gemm" or "cutlass" in their names.
KINDS = {
    "attention": r"attention|flash|fmha|sdpa|_attn",
    "conv": r"conv|fprop|winograd|nhwctonchw|nchwtonhwc|im2col",
    "gemm": r"gemm|nvjet|cublas|cutlass|matmul|addmm|aten::mm|aten::bmm|splitk|triton_tem",
    "norm": r"norm|gated_residual|moments|welford|triton_red|triton_per",
}
REST, GAPS = "elementwise and other", "gaps"


def kind_of(name: str) -> str:
    """The kind of a kernel or operator."""
    return next((kind for kind, words in KINDS.items() if re.search(words, name.lower())), REST)


def gaps(spans: Iterable[tuple[float, float]]) -> float:
    """The time between the first start and the last end in which none of the spans runs."""
    idle, end = 0.0, None
    for start, stop in sorted(spans):
        idle += max(0.0, start - end) if end is not None else 0.0
        end = stop if end is None else max(end, stop)
    return idle


@torch.inference_mode()
def costs(subject: Subject, batch: int, seed: int) -> dict[str, float]:
    """{kind: milliseconds} of one call, which has to have run before. On a GPU also the gaps between kernels."""
    inputs = subject.inputs(batch, seed)
    cuda = torch.cuda.is_available()
    with profile(activities=[ProfilerActivity.CUDA if cuda else ProfilerActivity.CPU]) as found:
        subject.run(inputs)
        if cuda:
            torch.cuda.synchronize()
    totals = dict.fromkeys((*KINDS, REST), 0.0)
    if not cuda:
        for entry in found.key_averages():
            totals[kind_of(entry.key)] += entry.self_cpu_time_total / 1000
        return totals
    kernels: list[Any] = [
        e for e in found.events() or ()
        if e.device_type == DeviceType.CUDA and not getattr(e, "is_user_annotation", False)
    ]  # fmt: skip
    for kernel in kernels:
        totals[kind_of(kernel.name)] += kernel.time_range.elapsed_us() / 1000
    return totals | {GAPS: gaps((k.time_range.start, k.time_range.end) for k in kernels) / 1000}
