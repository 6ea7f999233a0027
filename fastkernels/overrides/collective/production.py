"""Baselines of this family: what the hosts run for each collective, over the judge's own groups."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import torch

from fastkernels.core import parallel
from fastkernels.core.baseline import (
    Baseline,
    Function,
    aligned,
    first,
    half,
    inductor_compiled,
    provider,
    refusing,
    same,
)
from fastkernels.core.communicator import Communicator
from fastkernels.overrides.kit.fp8 import empty_outputs
from fastkernels.overrides.kit.libraries import GPU_AND_CPU, T, empty_as, pynccl_of, vllm_ops

NO_FLASHINFER = "its fused all-reduce sets up multicast over NVLink, which is off here"
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
    of = pynccl_of()
    return lambda x, group=parallel.TP: of(group).all_reduce(x)


def _kernel_norm() -> Function:
    """vLLM's kernel: [T, H] and the residual, which it updates."""
    ops = vllm_ops()

    def norm(summed: T, weight: T, eps: float, residual: T | None) -> T:
        if residual is not None:
            ops.fused_add_rms_norm(summed, residual, weight, eps)
            return summed
        out = empty_as(summed)
        ops.rms_norm(out, summed, weight, eps)
        return out

    return norm


def _compiled_norm() -> Function:
    """The same by Inductor, which hosts run behind their custom all-reduce if they compile the model."""
    from fastkernels.overrides.norm import rms_norm

    def norm(summed: T, weight: T, eps: float, residual: T | None) -> T:
        out, added = rms_norm.reference(summed, weight, eps, residual, None, False)
        if residual is not None and added is not None:
            residual.copy_(added)
        return out

    return inductor_compiled(norm)


def _then_norm(
    reduce: Callable[[], Function], norm_of: Callable[[], Function] = _kernel_norm
) -> Callable[[], Function]:
    """A host's all-reduce, then a norm with the residual."""

    def make() -> Function:
        all_reduce, norm = reduce(), norm_of()

        def all_reduce_rms_norm(
            x: T, weight: T, eps: float, residual: T | None = None, group: str = parallel.TP
        ) -> T:
            return norm(all_reduce(x, group), weight, eps, residual)

        if (capturing := getattr(all_reduce, "capturing", None)) is not None:
            all_reduce_rms_norm.capturing = capturing  # type: ignore[attr-defined]
        return all_reduce_rms_norm

    return make


def _then_quantized(reduce: Callable[[], Function]) -> Callable[[], Function]:
    """A host's all-reduce, then vLLM's kernel: residual, norm and float8 values with their scales."""

    def make() -> Function:
        all_reduce, ops = reduce(), vllm_ops()

        def all_reduce_rms_norm_quant_fp8(
            x: T,
            weight: T,
            eps: float,
            scale: T | None = None,
            residual: T | None = None,
            group: str = parallel.TP,
        ) -> tuple[T, T]:
            summed = all_reduce(x, group)
            q, scales = empty_outputs(x.shape, x.device, scale is not None, -1)
            if scale is None:
                ops.rms_norm_dynamic_per_token_quant(q, summed, weight, scales, eps, None, residual)
                return q, scales
            if residual is None:
                ops.rms_norm_static_fp8_quant(q, summed, weight, scale, eps)
            else:
                ops.fused_add_rms_norm_static_fp8_quant(q, summed, residual, weight, scale, eps)
            return q, scales.copy_(scale)

        if (capturing := getattr(all_reduce, "capturing", None)) is not None:
            all_reduce_rms_norm_quant_fp8.capturing = capturing  # type: ignore[attr-defined]
        return all_reduce_rms_norm_quant_fp8

    return make


def _not_quantized(
    x: T, weight: T, eps: float, scale: T | None = None, residual: T | None = None, *_: Any
) -> str | None:
    return first(_too_large(x), half(x), same(x, weight, residual))


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


def _pipelined(name: str) -> Callable[[], Function]:
    """PyTorch's product and collective in pieces over symmetric memory, as vLLM's sequence parallelism uses them."""

    def make() -> Function:
        import torch.distributed._symmetric_memory as symm_mem

        product = getattr(torch.ops.symm_mem, name)

        @cache
        def of(group: str) -> str:
            found: Any = _name(parallel.communicator(group)).group_name
            symm_mem.enable_symm_mem_for_group(found)
            return found

        def scattered(x: T, weight: T, group: str = parallel.TP) -> T:
            return product(x, weight.t(), "sum", 0, of(group))

        def gathered(x: T, weight: T, group: str = parallel.TP) -> T:
            return product(x, [weight.t()], 0, of(group), return_A=False)[1][0]

        return gathered if name == "fused_all_gather_matmul" else scattered

    return make


def _not_pipelined(x: T, weight: T, group: str = parallel.TP) -> str | None:
    size = parallel.communicator(group).size
    if x.dim() != 2 or not x.is_contiguous() or x.shape[0] % size or not x.shape[0]:
        return f"takes contiguous rows, a multiple of {size}, got {tuple(x.shape)}"
    return aligned(x) or aligned(weight)


_VLLM = _custom("vllm.distributed.device_communicators.custom_all_reduce")
_SGLANG = _custom("sglang.srt.distributed.device_communicators.custom_all_reduce")

BASELINES: dict[str, tuple[Baseline, ...]] = {
    "all_gather": _group("all_gather"),
    "all_gather_linear": (
        *_composed("all_gather_linear"),
        Baseline(
            "symm_mem", "library", _pipelined("fused_all_gather_matmul"), refuses=_not_pipelined
        ),
    ),
    "all_reduce": (
        *_group("all_reduce"),
        Baseline("vllm", "host", _VLLM, ("vllm",), refuses=_too_large),
        Baseline("pynccl", "host", _pynccl, ("vllm",)),
        Baseline("sglang", "host", _SGLANG, ("sglang",), refuses=_too_large),
        Baseline("symm_mem_one_shot", "library", _symm_mem(False), refuses=_too_large),
        Baseline("symm_mem_two_shot", "library", _symm_mem(True), refuses=_too_large),
    ),
    "all_reduce_rms_norm": (
        *_composed("all_reduce_rms_norm"),
        Baseline("vllm", "host", _then_norm(_VLLM), ("vllm",), refuses=_too_large),
        Baseline("pynccl", "host", _then_norm(_pynccl), ("vllm",)),
        Baseline(
            "vllm_then_inductor", "host", _then_norm(_VLLM, _compiled_norm), ("vllm",), refuses=_too_large
        ),
        Baseline(
            "sglang_then_inductor", "host", _then_norm(_SGLANG, _compiled_norm), ("sglang",), refuses=_too_large
        ),
        refusing("flashinfer", NO_FLASHINFER),
    ),
    "all_reduce_rms_norm_quant_fp8": (
        *_composed("all_reduce_rms_norm_quant_fp8"),
        Baseline("vllm", "host", _then_quantized(_VLLM), ("vllm",), refuses=_not_quantized),
        refusing("flashinfer", NO_FLASHINFER),
    ),
    "all_to_all": _group("all_to_all"),
    "linear_all_reduce": _composed("linear_all_reduce"),
    "linear_reduce_scatter": (
        *_composed("linear_reduce_scatter"),
        Baseline(
            "symm_mem", "library", _pipelined("fused_matmul_reduce_scatter"), refuses=_not_pipelined
        ),
    ),
    "reduce_scatter": _group("reduce_scatter"),
    "reduce_scatter_rms_norm": _composed("reduce_scatter_rms_norm"),
}  # fmt: skip
