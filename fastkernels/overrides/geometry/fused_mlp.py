"""A narrow MLP without biases in one kernel: Mueller et al., arXiv 2106.12372; the networks of instant-ngp."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
import triton
import triton.language as tl

from fastkernels.core.case import Case, Tolerance
from fastkernels.core.declaration import Axis, Call, Scalar, Tensor
from fastkernels.core.dispatch import Provider, define
from fastkernels.core.spec import OpSpec
from fastkernels.overrides.kit.launch import cdiv
from fastkernels.overrides.kit.overlap import follow, launch_kernel

WIDTHS = (16, 32, 64, 128)
MOST_INPUTS = 128


def layers(weights: torch.Tensor, inputs: int, width: int, hidden: int, outputs: int) -> list[torch.Tensor]:
    """The matrices [out, in] of a flat tensor of weights, in order. Raises ValueError."""
    shapes = [(width, inputs), *[(width, width)] * (hidden - 1), (outputs, width)]
    total = sum(a * b for a, b in shapes)
    if min(inputs, width, hidden, outputs) < 1 or weights.shape != (total,):
        raise ValueError(
            f"fused_mlp: weights must be [{total}] for {inputs} inputs, {hidden} hidden layers of {width} and {outputs}"
            f" outputs, got {list(weights.shape)}"
        )
    return [w.view(shape) for w, shape in zip(weights.split([a * b for a, b in shapes]), shapes, strict=True)]


def reference(x: torch.Tensor, weights: torch.Tensor, width: int, hidden: int, outputs: int) -> torch.Tensor:
    """x: [N, I]; weights: [width * I + (hidden - 1) * width ** 2 + outputs * width], matrices [out, in] in order.

    Returns W_n relu(... relu(W_1 x)), [N, outputs] in x's dtype, computed in at least float32. Raises ValueError.
    """
    acc = torch.promote_types(x.dtype, torch.float32)
    *inner, last = layers(weights, _inputs(x), width, hidden, outputs)
    h = x.to(acc)
    for w in inner:
        h = F.linear(h, w.to(acc)).clamp_min(0)
    return F.linear(h, last.to(acc)).to(x.dtype)


def _inputs(x: torch.Tensor) -> int:
    if x.dim() != 2:
        raise ValueError(f"fused_mlp: x must be [N, I], got {list(x.shape)}")
    return x.shape[1]


@triton.jit(do_not_specialize=["N"])
def _mlp_kernel(
    x_ptr, w_ptr, out_ptr, stride_n, stride_i, N, INPUTS: tl.constexpr, W: tl.constexpr, H: tl.constexpr,
    OUTPUTS: tl.constexpr, PRECISION: tl.constexpr, BLOCK: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    # A block of rows stays on the chip through all layers.
    follow(OVERLAP)
    rows = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    here = rows < N
    ins, wide, outs = tl.arange(0, INPUTS), tl.arange(0, W), tl.arange(0, OUTPUTS)
    dtype = w_ptr.dtype.element_ty
    x = tl.load(x_ptr + rows[:, None] * stride_n + ins[None, :] * stride_i, mask=here[:, None], other=0.0)
    w = tl.load(w_ptr + wide[None, :] * INPUTS + ins[:, None])  # [I, W]
    h = tl.maximum(tl.dot(x.to(dtype), w, input_precision=PRECISION), 0.0).to(dtype)
    at = w_ptr + W * INPUTS
    for _ in tl.static_range(H - 1):
        w = tl.load(at + wide[None, :] * W + wide[:, None])
        h = tl.maximum(tl.dot(h, w, input_precision=PRECISION), 0.0).to(dtype)
        at += W * W
    w = tl.load(at + outs[None, :] * W + wide[:, None])  # [W, O]
    y = tl.dot(h, w, input_precision=PRECISION)
    tl.store(
        out_ptr + rows[:, None] * OUTPUTS + outs[None, :], y.to(out_ptr.dtype.element_ty), mask=here[:, None]
    )


def _supports_triton(
    x: torch.Tensor, weights: torch.Tensor, width: int, hidden: int, outputs: int
) -> str | None:
    if x.dtype != weights.dtype or x.dtype not in (torch.float16, torch.bfloat16, torch.float32):
        return f"dtypes {x.dtype} and {weights.dtype} are not both float16, bfloat16 or float32"
    if x.device.type == "cpu" and x.dtype == torch.bfloat16:
        return "Triton's interpreter multiplies bfloat16 matrices as integers"
    if width not in WIDTHS:
        return f"the kernel has widths of {', '.join(map(str, WIDTHS))}, not {width}"
    for name, size in (("inputs", x.shape[-1]), ("outputs", outputs)):
        if size & (size - 1) or not 16 <= size <= MOST_INPUTS:
            return f"the kernel has 16, 32, 64 or 128 {name}, not {size}"
    return None


def _triton(x: torch.Tensor, weights: torch.Tensor, width: int, hidden: int, outputs: int) -> torch.Tensor:
    inputs = _inputs(x)
    layers(weights, inputs, width, hidden, outputs)
    out = torch.empty(len(x), outputs, dtype=x.dtype, device=x.device)
    exact = x.dtype == torch.float32 and torch.get_float32_matmul_precision() == "highest"
    if len(x):
        launch_kernel(
            _mlp_kernel, (cdiv(len(x), 128),), x, weights.contiguous(), out, x.stride(0), x.stride(1), len(x),
            INPUTS=inputs, W=width, H=hidden, OUTPUTS=outputs, PRECISION="tf32x3" if exact else "tf32", BLOCK=128,
            num_warps=4,
        )  # fmt: skip
    return out


def _torch(x: torch.Tensor, weights: torch.Tensor, width: int, hidden: int, outputs: int) -> torch.Tensor:
    *inner, last = layers(weights, _inputs(x), width, hidden, outputs)
    h = x
    for w in inner:
        h = F.linear(h, w).relu_()
    return F.linear(h, last)


fused_mlp = define(
    "fused_mlp(Tensor x, Tensor weights, SymInt width, SymInt hidden, SymInt outputs) -> Tensor",
    fake=lambda x, weights, width, hidden, outputs: x.new_empty((x.shape[0], outputs)),
    providers=(
        Provider("triton", _triton, supports=_supports_triton),
        Provider(
            "torch", _torch, devices=("cuda", "cpu"),
            supports=lambda x, weights, *_: None if x.dtype == weights.dtype else "two dtypes",
        ),
        Provider("reference", reference, devices=("cuda", "cpu")),
    ),
)  # fmt: skip


def _weights(call: Call, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    """He's: outputs have about the size of the inputs."""
    made = []
    for rows, columns in (
        (call["width"], call["inputs"]), *[(call["width"], call["width"])] * (call["hidden"] - 1),
        (call["outputs"], call["width"]),
    ):  # fmt: skip
        made.append(call.randn(rows * columns) * (2 / columns) ** 0.5)
    return torch.cat(made).to(dtype)


def _case(
    name: str,
    tag: str,
    points: int,
    inputs: int,
    hidden: int,
    outputs: int = 16,
    dtype: str = "float16",
    **more: Any,
) -> Case:
    weight = more.pop("weight", 1)
    dims = {"points": points, "inputs": inputs, "hidden": hidden, "outputs": outputs, **more}
    return Case(name, dims, dtype, weight, (tag,))


SPEC = OpSpec(
    name="fused_mlp",
    level=2,
    reference=reference,
    op=fused_mlp,
    arguments=(
        Tensor("x", "points inputs"),
        Tensor("weights", "width*inputs+(hidden-1)*width*width+outputs*width", values=_weights),
        Scalar("width", default=64),
        Scalar("hidden"),
        Scalar("outputs"),
    ),
    outputs=(Tensor("out", "points outputs"),),
    axes={
        "points": Axis.per_call(), "inputs": Axis.option(), "width": Axis.option(64), "hidden": Axis.option(),
        "outputs": Axis.option(),
    },
    flops="2 * points * (width * inputs + (hidden - 1) * width * width + outputs * width)",
    cases=(
        _case("density_2m", "model", 1 << 21, 32, 1, weight=8),
        _case("color_2m", "model", 1 << 21, 32, 2, weight=8),
        _case("color_256k", "model", 1 << 18, 32, 2, weight=4),
        _case("one", "odd", 1, 16, 1, dtype="float32"),
        _case("odd_63", "odd", 63, 32, 2),
        _case("odd_1000", "odd", 1000, 32, 1, dtype="float32"),
        _case("odd_1128", "odd", 1128, 16, 2, width=16),
        _case("deep", "odd", 129, 32, 4, 32),
        _case("wide", "odd", 65, 64, 2, 32, "float32", width=128),
        _case("odd_bf16", "odd", 77, 32, 2, dtype="bfloat16"),
        _case("none", "odd", 0, 32, 1),
    ),
    tolerance={"float32": Tolerance(1e-4, 1e-4), "float16": Tolerance(1e-2, 1e-2), "bfloat16": Tolerance(8e-2, 8e-2)},
    activations=("x",),
    baseline="torch",
)  # fmt: skip
