"""Baselines of this family: what the hosts run for each collective, over the judge's own groups."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import torch

from fastkernels.core import parallel
from fastkernels.core.baseline import Baseline, Function, provider
from fastkernels.core.communicator import Communicator
from fastkernels.overrides.kit.libraries import GPU_AND_CPU, T, empty_as, vllm_ops

MOST_SHOT = 8 << 20  # bytes of the buffer that PyTorch's symmetric memory has here


def _group(op: str) -> tuple[Baseline, ...]:
    """NCCL and gloo, as the hosts call them where they have no kernel of their own."""
    return (
        Baseline("nccl", "host", lambda: provider(op, "nccl")),
        Baseline("gloo", "host", lambda: provider(op, "gloo"), devices=("cpu",)),
    )


def _composed(op: str) -> tuple[Baseline, ...]:
    """The parts of a fused op one after the other, as the hosts run them by default."""
    return (Baseline("composed", "host", lambda: provider(op, "composed"), devices=GPU_AND_CPU),)


def _name(comm: Communicator) -> Any:
    return comm.process_group or torch.distributed.group.WORLD


def _symm_mem(two_shot: bool) -> Any:
    """PyTorch's kernels on its symmetric memory, without multicast."""

    def make() -> Function:
        import torch.distributed._symmetric_memory as symm_mem

        ops = torch.ops.symm_mem

        @cache
        def buffer(group: str, dtype: torch.dtype) -> tuple[T, str]:
            comm = parallel.communicator(group)
            name = _name(comm).group_name
            made = symm_mem.empty(MOST_SHOT // dtype.itemsize, dtype=dtype, device=comm.device)
            symm_mem.rendezvous(made, name)
            return made, name

        def all_reduce(x: T, group: str = parallel.TP) -> T:
            whole, name = buffer(group, x.dtype)
            part = whole[: x.numel()]
            if not two_shot:
                return ops.one_shot_all_reduce_copy(part, x.view(-1), "sum", name).view(x.shape)
            part.copy_(x.view(-1))
            ops.two_shot_all_reduce_(part, "sum", name)
            return part.view(x.shape).clone()

        return all_reduce

    return make


def _too_large(x: T, *_: Any) -> str | None:
    if x.nbytes > MOST_SHOT or x.nbytes % 16 or not x.is_contiguous():
        return f"takes contiguous tensors of up to {MOST_SHOT} bytes, a multiple of 16"
    return None


def _pynccl() -> Function:
    """NCCL as vLLM calls it: into a new tensor, without the copy that torch.distributed needs."""
    from vllm.distributed.device_communicators.pynccl import PyNcclCommunicator

    @cache
    def of(group: str) -> Any:
        return PyNcclCommunicator(
            torch.distributed.new_group(backend="gloo"), parallel.communicator(group).device
        )

    return lambda x, group=parallel.TP: of(group).all_reduce(x)


def _then_norm(reduce: Callable[[], Function]) -> Callable[[], Function]:
    """A host's all-reduce, then vLLM's norm with the residual, which is what its compiled graphs run."""

    def make() -> Function:
        all_reduce, ops = reduce(), vllm_ops()

        def all_reduce_rms_norm(
            x: T, weight: T, eps: float, residual: T | None = None, group: str = parallel.TP
        ) -> T:
            summed = all_reduce(x, group)
            if residual is not None:
                ops.fused_add_rms_norm(summed, residual, weight, eps)
                return summed
            out = empty_as(summed)
            ops.rms_norm(out, summed, weight, eps)
            return out

        if (capturing := getattr(all_reduce, "capturing", None)) is not None:
            all_reduce_rms_norm.capturing = capturing  # type: ignore[attr-defined]
        return all_reduce_rms_norm

    return make


def _custom(module: str) -> Any:
    """A host's custom all-reduce, in a group of its own: it exchanges addresses over gloo."""

    def make() -> Function:
        import importlib

        kind = importlib.import_module(module).CustomAllreduce

        @cache
        def of(group: str) -> Any:
            comm = parallel.communicator(group)
            return kind(torch.distributed.new_group(backend="gloo"), comm.device)

        def all_reduce(x: T, group: str = parallel.TP) -> T:
            found = of(group).custom_all_reduce(x)
            if found is None:
                raise RuntimeError(f"{module} refuses {tuple(x.shape)} {x.dtype}")
            return found

        # A host captures in this context, which lets its kernel read the captured tensors in place.
        all_reduce.capturing = lambda group=parallel.TP: of(group).capture()  # type: ignore[attr-defined]
        return all_reduce

    return make


_VLLM = _custom("vllm.distributed.device_communicators.custom_all_reduce")

BASELINES: dict[str, tuple[Baseline, ...]] = {
    "all_gather": _group("all_gather"),
    "all_gather_linear": _composed("all_gather_linear"),
    "all_reduce": (
        *_group("all_reduce"),
        Baseline("vllm", "host", _VLLM, ("vllm",), refuses=_too_large),
        Baseline("pynccl", "host", _pynccl, ("vllm",)),
        Baseline(
            "sglang", "host", _custom("sglang.srt.distributed.device_communicators.custom_all_reduce"), ("sglang",),
            refuses=_too_large,
        ),
        Baseline("symm_mem_one_shot", "library", _symm_mem(False), refuses=_too_large),
        Baseline("symm_mem_two_shot", "library", _symm_mem(True), refuses=_too_large),
    ),
    "all_reduce_rms_norm": (
        *_composed("all_reduce_rms_norm"),
        Baseline("vllm", "host", _then_norm(_VLLM), ("vllm",), refuses=_too_large),
        Baseline("pynccl", "host", _then_norm(_pynccl), ("vllm",)),
    ),
    "all_to_all": _group("all_to_all"),
    "ep_combine": _composed("ep_combine"),
    "ep_combine_batched": _composed("ep_combine_batched"),
    "ep_dispatch": _composed("ep_dispatch"),
    "ep_dispatch_batched": _composed("ep_dispatch_batched"),
    "ep_dispatch_batched_fp8": _composed("ep_dispatch_batched_fp8"),
    "ep_dispatch_fp8": _composed("ep_dispatch_fp8"),
    "linear_all_reduce": _composed("linear_all_reduce"),
    "linear_reduce_scatter": _composed("linear_reduce_scatter"),
    "reduce_scatter": _group("reduce_scatter"),
    "reduce_scatter_rms_norm": _composed("reduce_scatter_rms_norm"),
}  # fmt: skip
