"""A step of SGD on weights in slots, W[target] = W[source] - rate * g: the second half of TTT-E2E's inner step.

Steps are small: bfloat16 has 8 bits of mantissa, and most steps would change nothing. So a weight in bfloat16 has a
`rest` in bfloat16. Their sum has 16 bits or more, and products read the weight alone, which is the sum rounded.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl

from fastkernels.core.dispatch import Provider, define
from fastkernels.core.spec import Axis, Call, Case, OpSpec, Tensor, uniform
from fastkernels.overrides.kit.launch import cdiv
from fastkernels.overrides.kit.overlap import follow, launch_kernel
from fastkernels.overrides.kit.rows import FLOATS

T = torch.Tensor
BLOCK = 2048


def check(weight: T, rest: T | None, grad: T, rate: T, source: T, target: T) -> None:
    """Raise ValueError for arguments that contradict each other."""
    batch = (grad.shape[0],) if grad.dim() else ()
    if weight.dim() != 3 or grad.dim() != 3 or grad.shape[1:] != weight.shape[1:]:
        raise ValueError(
            f"ttt_sgd: weight {tuple(weight.shape)} must be [S, N, K] and grad {tuple(grad.shape)} [B, N, K]"
        )
    if rest is not None and rest.shape != weight.shape:
        raise ValueError(
            f"ttt_sgd: rest {tuple(rest.shape)} must have the shape {tuple(weight.shape)} of weight"
        )
    for name, given, dtype in (
        ("rate", rate, torch.promote_types(grad.dtype, torch.float32)), ("source", source, torch.int32),
        ("target", target, torch.int32),
    ):  # fmt: skip
        if tuple(given.shape) != batch or given.dtype not in (dtype, torch.promote_types(dtype, torch.int32)):
            raise ValueError(
                f"ttt_sgd: {name} {tuple(given.shape)} in {given.dtype} must be [B] = {batch} in {dtype}"
            )


def reference(weight: T, rest: T | None, grad: T, rate: T, source: T, target: T) -> tuple[T, T | None]:
    """weight, rest: [S, N, K]; grad: [B, N, K]; rate: [B]; source, target: [B] int32, all targets different.

    Computed in at least float32. Returns the new values of weight and rest.
    """
    acc = torch.promote_types(weight.dtype, torch.float32)
    old = weight[source.long()].to(acc)
    if rest is not None:
        old = old + rest[source.long()].to(acc)
    exact = old - rate.to(acc)[:, None, None] * grad.to(acc)
    new = weight.index_copy(0, target.long(), exact.to(weight.dtype))
    if rest is None:
        return new, None
    left = (exact - exact.to(weight.dtype).to(acc)).to(rest.dtype)
    return new, rest.index_copy(0, target.long(), left)


@triton.jit
def _ttt_sgd_kernel(
    weight_ptr, rest_ptr, grad_ptr, rate_ptr, source_ptr, target_ptr, size, slot_stride, grad_stride,
    HAS_REST: tl.constexpr, BLOCK: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    follow(OVERLAP)
    row = tl.program_id(1)
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    mask = at < size
    source = tl.load(source_ptr + row).to(tl.int64) * slot_stride + at
    target = tl.load(target_ptr + row).to(tl.int64) * slot_stride + at
    rate = tl.load(rate_ptr + row)
    grad = tl.load(grad_ptr + row.to(tl.int64) * grad_stride + at, mask=mask, other=0.0).to(tl.float32)
    old = tl.load(weight_ptr + source, mask=mask, other=0.0).to(tl.float32)
    if HAS_REST:
        old += tl.load(rest_ptr + source, mask=mask, other=0.0).to(tl.float32)
    exact = old - rate * grad
    new = exact.to(weight_ptr.dtype.element_ty)
    tl.store(weight_ptr + target, new, mask=mask)
    if HAS_REST:
        tl.store(rest_ptr + target, (exact - new.to(tl.float32)).to(rest_ptr.dtype.element_ty), mask=mask)


def _supports_triton(weight: T, rest: T | None, grad: T, rate: T, source: T, target: T) -> str | None:
    for name, t in (("weight", weight), ("rest", rest), ("grad", grad)):
        if t is not None and t.dtype not in FLOATS:
            return f"{name} is {t.dtype}, not float16, bfloat16 or float32"
        if t is not None and len(t) and not t[0].is_contiguous():
            return f"{name} has strides {tuple(t.stride())}: each slot must be contiguous"
    if rest is not None and rest.stride() != weight.stride():
        return f"rest has strides {tuple(rest.stride())}, weight {tuple(weight.stride())}"
    return None


def _triton(weight: T, rest: T | None, grad: T, rate: T, source: T, target: T) -> None:
    check(weight, rest, grad, rate, source, target)
    size = weight[0].numel() if len(weight) else 0
    if grad.numel():
        launch_kernel(
            _ttt_sgd_kernel, (cdiv(size, BLOCK), len(grad)), weight, rest, grad, rate, source, target, size,
            weight.stride(0), grad.stride(0), HAS_REST=rest is not None, BLOCK=BLOCK, num_warps=8,
        )  # fmt: skip


def _reference(weight: T, rest: T | None, grad: T, rate: T, source: T, target: T) -> None:
    check(weight, rest, grad, rate, source, target)
    acc = torch.promote_types(weight.dtype, torch.float32)
    for i, (old_slot, slot) in enumerate(zip(source.tolist(), target.tolist(), strict=True)):
        exact = weight[old_slot].to(acc)
        if rest is not None:
            exact = exact + rest[old_slot].to(acc)
        exact = exact - rate[i] * grad[i].to(acc)
        weight[slot].copy_(exact)
        if rest is not None:
            rest[slot].copy_(exact - weight[slot].to(acc))


ttt_sgd = define(
    "ttt_sgd(Tensor(a!) weight, Tensor(b!)? rest, Tensor grad, Tensor rate, Tensor source, Tensor target) -> ()",
    fake=lambda *args: None,
    providers=(
        Provider("triton", _triton, devices=("cuda",), supports=_supports_triton),
        Provider("reference", _reference, devices=("cuda", "cpu")),
    ),
)


def _values(call: Call) -> dict[str, Any]:
    """Targets from slot 1 on; every second sequence takes its first step, from slot 0."""
    slots, batch = call.sizes["rows"], call.sizes["batch"]
    order = 1 + torch.randperm(slots - 1, generator=call.generator, device=call.device)[:batch]
    first = torch.arange(batch, device=call.device) % 2 == 0
    return {"target": order.to(torch.int32), "source": torch.where(first, 0, order).to(torch.int32)}


def _small(call: Call, shape: tuple[int, ...], dtype: torch.dtype) -> T:
    return call.normal(shape, dtype, 0.0, 2.0**-9)


def _case(
    name: str, batch: int, rows: int, columns: int, width: int, tag: str = "odd", dtype: str = "float32",
    rest: bool = False,
) -> Case:  # fmt: skip
    dims = {"batch": batch, "rows": rows, "columns": columns, "width": width, "rest": rest}
    return Case(name, dims, dtype, tags=(tag,))


SPEC = OpSpec(
    name="ttt_sgd",
    level=1,
    reference=reference,
    op=ttt_sgd,
    arguments=(
        Tensor("weight", "rows columns width", mutated=True, bytes="2 * batch * columns * width * itemsize(dtype)"),
        Tensor(
            "rest", "rows columns width", when="rest", mutated=True, values=_small,
            bytes="2 * batch * columns * width * itemsize(dtype) if rest else 0",
        ),
        Tensor("grad", "batch columns width"),
        Tensor("rate", "batch", "float32", values=uniform(0.1, 1.0)),
        Tensor("source", "batch", "int32"),
        Tensor("target", "batch", "int32"),
    ),
    outputs=(),
    axes={
        "batch": Axis.per_call(), "rows": Axis.per_call(), "columns": Axis.width(), "width": Axis.width(),
    },
    constraints=("rows > batch",),
    values=_values,
    flops="2 * batch * columns * width",
    cases=(
        _case("gate_up_3b", 1, 4, 11264, 2560, "model", "bfloat16", True),
        _case("down_3b", 1, 4, 2560, 5632, "model", "bfloat16", True),
        _case("one", 1, 2, 1, 1),
        _case("odd_63", 2, 4, 63, 10),
        _case("half", 2, 3, 40, 33, dtype="bfloat16", rest=True),
        _case("half_alone", 1, 3, 20, 7, dtype="bfloat16"),
        _case("float16", 3, 5, 12, 70, dtype="float16"),
        _case("rest", 1, 4, 17, 64, rest=True),
        _case("blocks", 1, 2, 100, 41, dtype="bfloat16", rest=True),
    ),
    activations=("weight", "grad"),
    batch_invariant=True,  # elementwise
)  # fmt: skip
