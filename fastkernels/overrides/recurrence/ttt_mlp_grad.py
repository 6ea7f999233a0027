"""Gradients of a SwiGLU MLP with weights of each sequence, over one chunk: the first half of TTT-E2E's inner step.

With z = x G^T, a = silu(z_gate) * z_up and y = a D^T:  dD = dy^T a, dz from dy D, dG = dz^T x, dx = dz G.
"""

from __future__ import annotations

from typing import Any

import torch

from fastkernels.core.dispatch import Provider, define
from fastkernels.core.spec import TOLERANCE, Axis, Call, Case, OpSpec, Tensor, Tolerance, fan_in
from fastkernels.overrides.activation.silu_and_mul_grad import silu_and_mul_grad

T = torch.Tensor


def check(x: T, grad: T, gate_up: T, down: T, slots: T) -> None:
    """Raise ValueError for arguments that contradict each other."""
    if x.dim() != 3 or grad.shape != x.shape or gate_up.dim() != 3 or gate_up.shape[2] != x.shape[2]:
        raise ValueError(
            f"ttt_mlp_grad: x {tuple(x.shape)} and grad {tuple(grad.shape)} must be [B, C, H], and gate_up"
            f" {tuple(gate_up.shape)} [S, 2 I, H]"
        )
    want = (gate_up.shape[0], x.shape[2], gate_up.shape[1] // 2)
    if tuple(down.shape) != want or gate_up.shape[1] % 2:
        raise ValueError(f"ttt_mlp_grad: down {tuple(down.shape)} must be [S, H, I] = {want}")
    if slots.shape != x.shape[:1] or slots.dtype != torch.int32:
        raise ValueError(
            f"ttt_mlp_grad: slots {tuple(slots.shape)} in {slots.dtype} must be [B] in torch.int32"
        )


def _both(x: T, grad: T, weights: tuple[T, T], activate: Any) -> tuple[T, T, T]:
    """The gradients for one sequence: x, grad [C, H]."""
    gate_up, down = weights
    dz, inner = activate(x @ gate_up.t(), grad @ down)
    return dz @ gate_up, dz.t() @ x, grad.t() @ inner


def _activation_grad(z: T, grad: T) -> tuple[T, T]:
    """The gradient of silu(gate) * up with respect to z = (gate, up), and the activation itself."""
    gate, up = z.chunk(2, dim=-1)
    share = gate.sigmoid()
    silu = gate * share
    return torch.cat((grad * up * (share + silu * (1 - share)), grad * silu), -1), silu * up


def reference(x: T, grad: T, gate_up: T, down: T, slots: T) -> tuple[T, T, T]:
    """x: [B, C, H], what the MLP of each sequence read; grad: [B, C, H], of its output; gate_up: [S, 2 I, H]; down:
    [S, H, I]; slots: [B] int32.

    Computed in at least float32. Returns the gradients of x, and of the sequences' gate_up [B, 2 I, H] and down
    [B, H, I].
    """
    check(x, grad, gate_up, down, slots)
    acc = torch.promote_types(x.dtype, torch.float32)
    made = _fake(x.to(acc), grad, gate_up, down, slots)
    for i, slot in enumerate(slots.tolist()):
        own = gate_up[slot].to(acc), down[slot].to(acc)
        parts = _both(x[i].to(acc), grad[i].to(acc), own, _activation_grad)
        for to, part in zip(made, parts, strict=True):
            to[i] = part
    return tuple(t.to(x.dtype) for t in made)  # type: ignore[return-value]


def products(x: T, grad: T, gate_up: T, down: T) -> T:
    """The gradient of x alone, for an MLP whose weights do not change. x, grad: [C, H]."""
    dz, _ = silu_and_mul_grad(x @ gate_up.t(), grad @ down)
    return dz @ gate_up


def _products(x: T, grad: T, gate_up: T, down: T, slots: T) -> tuple[T, T, T]:
    """Products of a chunk are large enough for the BLAS library, and the activation's gradient is a kernel.

    A copy of the weights avoids waiting for `slots`.
    """
    check(x, grad, gate_up, down, slots)
    made = _fake(x, grad, gate_up, down, slots)
    for i in range(len(x)):
        at = slots[i : i + 1]
        own = gate_up.index_select(0, at)[0], down.index_select(0, at)[0]
        for to, part in zip(made, _both(x[i], grad[i], own, silu_and_mul_grad), strict=True):
            to[i].copy_(part)
    return made


def _fake(x: T, grad: T, gate_up: T, down: T, slots: T) -> tuple[T, T, T]:
    shapes = x.shape, (len(x), *gate_up.shape[1:]), (len(x), *down.shape[1:])
    dx, dgate_up, ddown = (torch.empty(shape, dtype=x.dtype, device=x.device) for shape in shapes)
    return dx, dgate_up, ddown


ttt_mlp_grad = define(
    "ttt_mlp_grad(Tensor x, Tensor grad, Tensor gate_up, Tensor down, Tensor slots) -> (Tensor, Tensor, Tensor)",
    fake=_fake,
    providers=(
        Provider("triton", _products, devices=("cuda",)),
        Provider("torch", _products, devices=("cpu",)),
        Provider("reference", reference, devices=("cuda", "cpu")),
    ),
)


def _values(call: Call) -> dict[str, Any]:
    order = torch.randperm(call.sizes["rows"], generator=call.generator, device=call.device)
    return {"slots": order[: call.sizes["batch"]].to(torch.int32)}


def _case(
    name: str, batch: int, chunk: int, hidden: int, inner: int, tag: str = "odd", dtype: str = "float32",
    more: int = 0,
) -> Case:  # fmt: skip
    dims = {"batch": batch, "rows": batch + more, "chunk": chunk, "hidden": hidden, "inner": inner}
    return Case(name, dims, dtype, tags=(tag,))


SPEC = OpSpec(
    name="ttt_mlp_grad",
    level=2,
    reference=reference,
    op=ttt_mlp_grad,
    arguments=(
        Tensor("x", "batch chunk hidden"),
        Tensor("grad", "batch chunk hidden", std=2**-5),
        Tensor(
            "gate_up", "rows 2*inner hidden", values=fan_in, bytes="batch * 2 * inner * hidden * itemsize(dtype)"
        ),
        Tensor("down", "rows hidden inner", values=fan_in, bytes="batch * inner * hidden * itemsize(dtype)"),
        Tensor("slots", "batch", "int32"),
    ),
    outputs=(
        Tensor("dx", "batch chunk hidden"),
        Tensor("dgate_up", "batch 2*inner hidden"),
        Tensor("ddown", "batch hidden inner"),
    ),
    axes={
        "batch": Axis.per_call(), "rows": Axis.per_call(), "chunk": Axis.per_call(), "hidden": Axis.width(),
        "inner": Axis.width(),
    },
    constraints=("rows >= batch",),
    values=_values,
    flops="16 * batch * chunk * hidden * inner",
    cases=(
        _case("ttt_3b", 1, 1024, 2560, 5632, "model", "bfloat16"),
        _case("ttt_125m", 1, 1024, 768, 1664, "model", "bfloat16"),
        _case("one", 1, 1, 1, 1),
        _case("odd_5", 2, 5, 20, 33),
        _case("slots", 2, 7, 16, 24, more=2),
        _case("half", 1, 16, 64, 48, dtype="bfloat16", more=1),
        _case("odd_63", 1, 63, 33, 20),
        _case("float16", 1, 9, 16, 70, dtype="float16"),
        _case("wide", 3, 4, 48, 32, more=1),
    ),
    tolerance={**TOLERANCE, "float16": Tolerance(4e-3, 4e-3), "bfloat16": Tolerance(3e-2, 3e-2)},
    activations=("x", "grad"),
    calls=("silu_and_mul_grad",),
)  # fmt: skip
