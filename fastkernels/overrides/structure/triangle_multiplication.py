"""Triangle multiplication of a pair representation: Algorithms 12 and 13 of AlphaFold 3's supplement."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
import triton
import triton.language as tl

from fastkernels.core.case import Case, Tolerance
from fastkernels.core.declaration import Axis, Scalar, Tensor, fan_in
from fastkernels.core.dispatch import Provider, define
from fastkernels.core.spec import OpSpec
from fastkernels.overrides.kit.launch import cdiv, next_power_of_2
from fastkernels.overrides.kit.overlap import follow, launch_kernel
from fastkernels.overrides.structure.pairs import close

FLOATS = (torch.float16, torch.bfloat16, torch.float32)
T = torch.Tensor


def reference(
    z: T, mask: T | None, norm_weight: T, norm_bias: T, a_weight: T, a_gate: T, b_weight: T, b_gate: T,
    out_norm_weight: T, out_norm_bias: T, out_weight: T, out_gate: T, outgoing: bool = True, eps: float = 1e-5,
) -> T:  # fmt: skip
    """z: [B, N, N, Z]; mask: [B, N, N] or None; a_weight, a_gate, b_weight, b_gate: [C, Z]; out_weight: [Z, C].

    norm_weight, norm_bias: [Z]; out_norm_weight, out_norm_bias: [C]; out_gate: [Z, Z].
    With x = layer_norm(z), a = mask * sigmoid(a_gate x) * (a_weight x), and b likewise, returns
    sigmoid(out_gate x) * out_weight layer_norm(p), [B, N, N, Z] in z's dtype, where p_ij is the sum over k of
    a_ik * b_jk (outgoing), or of a_ki * b_kj. Computed in at least float32.
    """
    _check(z, mask, a_weight, a_gate, b_weight, b_gate, out_weight, out_gate)
    acc = torch.promote_types(z.dtype, torch.float32)

    def to(t: T) -> T:
        return t.to(acc)

    x = F.layer_norm(to(z), z.shape[-1:], to(norm_weight), to(norm_bias), eps)
    a, b = (
        F.linear(x, to(gate)).sigmoid() * F.linear(x, to(weight))
        for weight, gate in ((a_weight, a_gate), (b_weight, b_gate))
    )
    if mask is not None:
        a, b = a * to(mask)[..., None], b * to(mask)[..., None]
    p = torch.einsum("nikc,njkc->nijc" if outgoing else "nkic,nkjc->nijc", a, b)
    p = F.layer_norm(p, p.shape[-1:], to(out_norm_weight), to(out_norm_bias), eps)
    return (F.linear(x, to(out_gate)).sigmoid() * F.linear(p, to(out_weight))).to(z.dtype)


def _check(z: T, mask: T | None, a_w: T, a_g: T, b_w: T, b_g: T, out_w: T, out_g: T) -> None:
    if z.dim() != 4 or z.shape[1] != z.shape[2]:
        raise ValueError(f"triangle_multiplication: z must be [B, N, N, Z], got {tuple(z.shape)}")
    width, hidden = z.shape[3], a_w.shape[0]
    if any(t.shape != (hidden, width) for t in (a_w, a_g, b_w, b_g)):
        shapes = ", ".join(str(tuple(t.shape)) for t in (a_w, a_g, b_w, b_g))
        raise ValueError(f"triangle_multiplication: a's and b's weights must be [C, {width}], got {shapes}")
    if out_w.shape != (width, hidden) or out_g.shape != (width, width):
        raise ValueError(
            f"triangle_multiplication: out_weight must be [{width}, {hidden}] and out_gate [{width}, {width}], got"
            f" {tuple(out_w.shape)} and {tuple(out_g.shape)}"
        )
    if mask is not None and mask.shape != z.shape[:3]:
        raise ValueError(f"triangle_multiplication: mask {tuple(mask.shape)} is not for z {tuple(z.shape)}")


@triton.jit
def _normed(x, w_ptr, b_ptr, cols, inside, C, eps):
    # Rows of x normalized, [rows, C padded]; computed in float32
    x = x.to(tl.float32)
    centered = tl.where(inside[None, :], x - (tl.sum(x, 1) / C)[:, None], 0.0)
    scale = tl.rsqrt(tl.sum(centered * centered, 1) / C + eps)
    w = tl.load(w_ptr + cols, mask=inside, other=0.0).to(tl.float32)
    b = tl.load(b_ptr + cols, mask=inside, other=0.0).to(tl.float32)
    return centered * scale[:, None] * w[None, :] + b[None, :]


@triton.jit(do_not_specialize=["M", "PLANE"])
def _project_kernel(
    z_ptr, mask_ptr, w_ptr, b_ptr, a_weight_ptr, a_gate_ptr, b_weight_ptr, b_gate_ptr, a_ptr, b_out_ptr, M, PLANE,
    Z, C, eps, HAS_MASK: tl.constexpr, PRECISION: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_Z: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    # One program per (block of channels of a or b, block of pairs). Results are [B, C, N * N]: the product over the
    # third token is then a matrix product of each channel.
    follow(OVERLAP)
    blocks = tl.num_programs(0) // 2
    second = tl.program_id(0) >= blocks
    channels = (tl.program_id(0) % blocks) * BLOCK_N + tl.arange(0, BLOCK_N)
    rows = tl.program_id(1).to(tl.int64) * BLOCK_M + tl.arange(0, BLOCK_M)
    cols = tl.arange(0, BLOCK_Z)
    here, inside, known = rows < M, cols < Z, channels < C
    z = tl.load(z_ptr + rows[:, None] * Z + cols[None, :], mask=here[:, None] & inside[None, :], other=0.0)
    x = tl.trans(_normed(z, w_ptr, b_ptr, cols, inside, Z, eps).to(z.dtype))
    weights = channels[:, None] * Z + cols[None, :]
    weight_ptr = b_weight_ptr if second else a_weight_ptr
    gate_ptr = b_gate_ptr if second else a_gate_ptr
    there = known[:, None] & inside[None, :]
    value = tl.dot(tl.load(weight_ptr + weights, mask=there, other=0.0), x, input_precision=PRECISION)
    gate = tl.dot(tl.load(gate_ptr + weights, mask=there, other=0.0), x, input_precision=PRECISION)
    value = value / (1.0 + tl.exp(-gate))
    if HAS_MASK:
        value *= tl.load(mask_ptr + rows, mask=here, other=0.0).to(tl.float32)[None, :]
    batch, place = rows // PLANE, rows % PLANE
    at = (batch[None, :] * C + channels[:, None]) * PLANE + place[None, :]
    out_ptr = b_out_ptr if second else a_ptr
    tl.store(out_ptr + at, value.to(z.dtype), mask=known[:, None] & here[None, :])


@triton.jit(do_not_specialize=["M", "PLANE"])
def _finish_kernel(
    z_ptr, p_ptr, w_ptr, b_ptr, out_w_ptr, out_b_ptr, weight_ptr, gate_ptr, out_ptr, M, PLANE, Z, C, eps,
    PRECISION: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_Z: tl.constexpr,
    BLOCK_C: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    follow(OVERLAP)
    outs = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    rows = tl.program_id(1).to(tl.int64) * BLOCK_M + tl.arange(0, BLOCK_M)
    cols, channels = tl.arange(0, BLOCK_Z), tl.arange(0, BLOCK_C)
    here, inside, known, wanted = rows < M, cols < Z, channels < C, outs < Z
    batch, place = rows // PLANE, rows % PLANE
    at = (batch[None, :] * C + channels[:, None]) * PLANE + place[None, :]
    p = tl.load(p_ptr + at, mask=known[:, None] & here[None, :], other=0.0)
    normed = _normed(tl.trans(p), out_w_ptr, out_b_ptr, channels, known, C, eps).to(p.dtype)
    weight_at = weight_ptr + outs[:, None] * C + channels[None, :]
    weight = tl.load(weight_at, mask=wanted[:, None] & known[None, :], other=0.0)
    value = tl.dot(normed, tl.trans(weight), input_precision=PRECISION)
    z = tl.load(z_ptr + rows[:, None] * Z + cols[None, :], mask=here[:, None] & inside[None, :], other=0.0)
    x = _normed(z, w_ptr, b_ptr, cols, inside, Z, eps).to(z.dtype)
    gate_at = gate_ptr + outs[:, None] * Z + cols[None, :]
    gate = tl.load(gate_at, mask=wanted[:, None] & inside[None, :], other=0.0)
    value = value / (1.0 + tl.exp(-tl.dot(x, tl.trans(gate), input_precision=PRECISION)))
    out_at = out_ptr + rows[:, None] * Z + outs[None, :]
    tl.store(out_at, value.to(z.dtype), mask=here[:, None] & wanted[None, :])


def _supports_triton(z: T, mask: T | None, *rest: Any) -> str | None:
    weights = rest[:10]
    if z.dtype not in FLOATS or any(t.dtype != z.dtype for t in weights):
        return f"z is {z.dtype}, and z and the weights are not all float16, all bfloat16 or all float32"
    if z.device.type == "cpu" and z.dtype == torch.bfloat16:
        return "Triton's interpreter multiplies bfloat16 matrices as integers"
    if z.shape[3] > 256 or weights[2].shape[0] > 256:
        return f"{z.shape[3]} and {weights[2].shape[0]} channels: at most 256 are supported"
    if not z.is_contiguous() or not all(t.is_contiguous() for t in weights):
        return "z or a weight is not contiguous"
    return None


def _triton(
    z: T, mask: T | None, norm_weight: T, norm_bias: T, a_weight: T, a_gate: T, b_weight: T, b_gate: T,
    out_norm_weight: T, out_norm_bias: T, out_weight: T, out_gate: T, outgoing: bool = True, eps: float = 1e-5,
) -> T:  # fmt: skip
    _check(z, mask, a_weight, a_gate, b_weight, b_gate, out_weight, out_gate)
    out = torch.empty_like(z)
    if out.numel() == 0:
        return out
    batch, n, _, width = z.shape
    hidden, rows, single = a_weight.shape[0], batch * n * n, z.dtype == torch.float32
    a, b = z.new_empty(batch * hidden, n, n), z.new_empty(batch * hidden, n, n)
    block_z, block_c = (max(next_power_of_2(size), 16) for size in (width, hidden))
    block_n = min(max(next_power_of_2(hidden), 16), 32 if single else 64)
    block_m = 32 if single or max(block_z, block_c) > 128 else 64
    exact = "ieee" if torch.get_float32_matmul_precision() == "highest" else "tf32"
    precision = exact if single else "tf32"
    launch_kernel(
        _project_kernel, (2 * cdiv(hidden, block_n), cdiv(rows, block_m)),
        z, mask if mask is None else mask.contiguous(), norm_weight, norm_bias, a_weight, a_gate, b_weight, b_gate,
        a, b, rows, n * n, width, hidden, eps, HAS_MASK=mask is not None, PRECISION=precision, BLOCK_M=block_m,
        BLOCK_N=block_n, BLOCK_Z=block_z, num_warps=4, num_stages=1,
    )  # fmt: skip
    p = torch.bmm(a, b.transpose(1, 2)) if outgoing else torch.bmm(a.transpose(1, 2), b)
    block_n = min(max(next_power_of_2(width), 16), 32 if single else 64)
    launch_kernel(
        _finish_kernel, (cdiv(width, block_n), cdiv(rows, block_m)),
        z, p, norm_weight, norm_bias, out_norm_weight, out_norm_bias, out_weight, out_gate, out, rows, n * n, width,
        hidden, eps, PRECISION=precision, BLOCK_M=block_m, BLOCK_N=block_n, BLOCK_Z=block_z, BLOCK_C=block_c,
        num_warps=4, num_stages=1,
    )  # fmt: skip
    return out


def by_torch(
    z: T, mask: T | None, norm_weight: T, norm_bias: T, a_weight: T, a_gate: T, b_weight: T, b_gate: T,
    out_norm_weight: T, out_norm_bias: T, out_weight: T, out_gate: T, outgoing: bool = True, eps: float = 1e-5,
) -> T:  # fmt: skip
    _check(z, mask, a_weight, a_gate, b_weight, b_gate, out_weight, out_gate)
    batch, n, _, width = z.shape
    x = F.layer_norm(z, (width,), norm_weight, norm_bias, eps)
    rows = x.reshape(batch, n * n, width).transpose(1, 2)  # [B, Z, N * N]

    def project(weight: T, gate: T) -> T:
        value = torch.matmul(gate, rows).sigmoid_().mul_(torch.matmul(weight, rows))
        if mask is not None:
            value.mul_(mask.to(z.dtype).reshape(batch, 1, n * n))
        return value.view(batch * len(weight), n, n)

    a, b = project(a_weight, a_gate), project(b_weight, b_gate)
    p = torch.bmm(a, b.transpose(1, 2)) if outgoing else torch.bmm(a.transpose(1, 2), b)
    p = p.view(batch, len(a_weight), n, n).permute(0, 2, 3, 1)
    p = F.layer_norm(p, p.shape[-1:], out_norm_weight, out_norm_bias, eps)
    return F.linear(x, out_gate).sigmoid_().mul_(F.linear(p, out_weight))


triangle_multiplication = define(
    "triangle_multiplication(Tensor z, Tensor? mask, Tensor norm_weight, Tensor norm_bias, Tensor a_weight,"
    " Tensor a_gate, Tensor b_weight, Tensor b_gate, Tensor out_norm_weight, Tensor out_norm_bias, Tensor out_weight,"
    " Tensor out_gate, bool outgoing=True, float eps=1e-5) -> Tensor",
    fake=lambda z, *args, **kwargs: z.new_empty(z.shape),
    providers=(
        Provider("triton", _triton, supports=_supports_triton),
        Provider("torch", by_torch, devices=("cuda", "cpu")),
        Provider("reference", lambda *args: reference(*args).contiguous(), devices=("cuda", "cpu")),
    ),
)


def _case(name: str, tag: str, dtype: str = "bfloat16", weight: float = 1, **dims: int | bool) -> Case:
    return Case(name, {"batch": 1, "masked": True, **dims}, dtype, weight, (tag,))


def _model(n: int, outgoing: bool) -> Case:
    name = f"pairs_{n}{'' if outgoing else '_incoming'}"
    return _case(name, "model", weight=52, tokens=n, width=128, hidden=128, outgoing=outgoing)


SPEC = OpSpec(
    name="triangle_multiplication",
    level=2,
    reference=reference,
    op=triangle_multiplication,
    cases=(  # OpenFold3: 48 blocks of the pairformer, 4 of the MSA module
        *(_model(n, outgoing) for n in (150, 400, 700) for outgoing in (True, False)),
        _case("one", "odd", "float32", tokens=1, width=16, hidden=16),
        _case("odd_9", "odd", "float32", batch=2, tokens=9, width=24, hidden=17),
        _case("incoming_13", "odd", "float32", tokens=13, width=32, hidden=16, outgoing=False),
        _case("half_7", "odd", "float16", tokens=7, width=64, hidden=64, outgoing=False),
        _case("wide_6", "odd", "float32", batch=2, tokens=6, width=48, hidden=130),
        _case("half_11", "odd", "float16", tokens=11, width=16, hidden=40),
        _case("no_mask", "odd", tokens=10, width=64, hidden=32, masked=False),
    ),
    arguments=(
        Tensor("z", "batch tokens tokens width"),
        Tensor(
            "mask", "batch tokens tokens", when="masked",
            values=lambda call, shape, dtype: (call.rand(*shape) < 0.9).to(dtype),
        ),
        Tensor("norm_weight", "width", mean=1, std=0.1),
        Tensor("norm_bias", "width", std=0.1),
        *(Tensor(name, "hidden width", values=fan_in) for name in ("a_weight", "a_gate", "b_weight", "b_gate")),
        Tensor("out_norm_weight", "hidden", mean=1, std=0.1),
        Tensor("out_norm_bias", "hidden", std=0.1),
        Tensor("out_weight", "width hidden", values=fan_in),
        Tensor("out_gate", "width width", values=fan_in),
        Scalar("outgoing", default=True),
        Scalar("eps", default=1e-5),
    ),
    outputs=(Tensor("out", "batch tokens tokens width"),),
    axes={
        "batch": Axis.per_call(draw=None),
        "tokens": Axis.per_call(draw=close),
        "width": Axis.option(128),
        "hidden": Axis.width(),
        "outgoing": Axis.option(True, (True, False)),
    },
    constraints=("width <= 256", "hidden <= 256"),
    flops="2 * batch * tokens * tokens * (5 * hidden * width + width * width + tokens * hidden)",
    tolerance={
        "float32": Tolerance(1e-4, 1e-4), "float16": Tolerance(1e-2, 1e-2), "bfloat16": Tolerance(8e-2, 8e-2),
    },
    baseline="torch",
)  # fmt: skip
