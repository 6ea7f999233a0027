"""Layer norm conditioned for each token, behind a gated residual: Algorithms 24 to 26 of AlphaFold 3's supplement."""

from __future__ import annotations

import torch
import torch.nn.functional as F
import triton
import triton.language as tl

from fastkernels.core.case import Case
from fastkernels.core.declaration import Axis, Scalar, Tensor
from fastkernels.core.dispatch import Provider, define
from fastkernels.core.spec import OpSpec
from fastkernels.overrides.kit.launch import next_power_of_2
from fastkernels.overrides.kit.overlap import follow, launch_kernel
from fastkernels.overrides.kit.rows import FLOATS

T = torch.Tensor


def reference(
    x: T, gate: T, shift: T, y: T | None = None, y_gate: T | None = None, eps: float = 1e-5
) -> tuple[T, T]:
    """x, y: [S, N, C]; gate, shift, y_gate: [S or 1, N, C], shared by the samples if S is 1 there. y: None, or to add.

    Returns h = x + sigmoid(y_gate) * y, or x without y, and sigmoid(gate) * layer_norm(h) + shift, [S, N, C] in x's
    dtype. The norm has no weights and reads the rounded h. Each is computed in at least float32, and rounded once.
    """
    _check(x, gate, shift, y, y_gate)
    acc = torch.promote_types(x.dtype, torch.float32)
    h = x if y is None or y_gate is None else (x.to(acc) + y_gate.to(acc).sigmoid() * y.to(acc)).to(x.dtype)
    normed = F.layer_norm(h.to(acc), h.shape[-1:], None, None, eps)
    return h.clone(), (gate.to(acc).sigmoid() * normed + shift.to(acc)).to(x.dtype)


def _check(x: T, gate: T, shift: T, y: T | None, y_gate: T | None) -> None:
    if x.dim() != 3 or (y is not None and y.shape != x.shape) or (y is None) != (y_gate is None):
        raise ValueError(
            f"conditioned_layer_norm: x and y must be [S, N, C], and y_gate comes with y, got {tuple(x.shape)},"
            f" {None if y is None else tuple(y.shape)} and {None if y_gate is None else tuple(y_gate.shape)}"
        )
    for name, t in (("gate", gate), ("shift", shift), ("y_gate", y_gate)):
        if t is not None and t.shape not in ((n, *x.shape[1:]) for n in (1, x.shape[0])):
            raise ValueError(
                f"conditioned_layer_norm: {name} {tuple(t.shape)} is not [S or 1, N, C] for x {tuple(x.shape)}"
            )


@triton.jit(do_not_specialize=["N"])
def _conditioned_layer_norm_kernel(
    x_ptr, gate_ptr, shift_ptr, y_ptr, y_gate_ptr, h_ptr, out_ptr, N, x_stride_s, x_stride_n, gate_stride_s,
    gate_stride_n, shift_stride_s, shift_stride_n, y_stride_s, y_stride_n, y_gate_stride_s, y_gate_stride_n, C, eps,
    HAS_Y: tl.constexpr, BLOCK: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    follow(OVERLAP)
    row = tl.program_id(0).to(tl.int64)
    sample, token = row // N, row % N
    cols = tl.arange(0, BLOCK)
    inside = cols < C
    x = tl.load(x_ptr + sample * x_stride_s + token * x_stride_n + cols, mask=inside, other=0.0)
    if HAS_Y:
        y = tl.load(y_ptr + sample * y_stride_s + token * y_stride_n + cols, mask=inside, other=0.0).to(
            tl.float32
        )
        y_gate_at = y_gate_ptr + sample * y_gate_stride_s + token * y_gate_stride_n + cols
        y_gate = tl.load(y_gate_at, mask=inside, other=0.0).to(tl.float32)
        x = (x.to(tl.float32) + y / (1.0 + tl.exp(-y_gate))).to(x.dtype)
    tl.store(h_ptr + row * C + cols, x, mask=inside)
    h = x.to(tl.float32)
    centered = tl.where(inside, h - tl.sum(h, axis=0) / C, 0.0)
    if x.dtype == tl.float32:  # as in layer_norm
        centered = tl.where(inside, centered - tl.sum(centered, axis=0) / C, 0.0)
    normed = centered * tl.rsqrt(tl.sum(centered * centered, axis=0) / C + eps)
    gate_at = gate_ptr + sample * gate_stride_s + token * gate_stride_n + cols
    shift_at = shift_ptr + sample * shift_stride_s + token * shift_stride_n + cols
    gate = tl.load(gate_at, mask=inside, other=0.0).to(tl.float32)
    shift = tl.load(shift_at, mask=inside, other=0.0).to(tl.float32)
    out = normed / (1.0 + tl.exp(-gate)) + shift
    tl.store(out_ptr + row * C + cols, out.to(x.dtype), mask=inside)


def _supports_triton(
    x: T, gate: T, shift: T, y: T | None = None, y_gate: T | None = None, eps: float = 1e-5
) -> str | None:
    if x.shape[-1] > 65536:
        return f"{x.shape[-1]} channels are over 65536"
    for name, t in (("x", x), ("gate", gate), ("shift", shift), ("y", y), ("y_gate", y_gate)):
        if t is not None and (t.dtype not in FLOATS or t.stride(-1) != 1):
            return f"{name} is {t.dtype} with strides {t.stride()}"
    return None


def _triton(
    x: T, gate: T, shift: T, y: T | None = None, y_gate: T | None = None, eps: float = 1e-5
) -> tuple[T, T]:
    _check(x, gate, shift, y, y_gate)
    h, out = x.new_empty(x.shape), x.new_empty(x.shape)
    if out.numel() == 0:
        return h, out
    samples, tokens, width = x.shape

    def strides(t: T | None) -> tuple[int, ...]:
        return (0, 0) if t is None else t.expand(samples, -1, -1).stride()[:2]

    block = next_power_of_2(width)
    launch_kernel(
        _conditioned_layer_norm_kernel, (samples * tokens,),
        x, gate, shift, y, y_gate, h, out, tokens, *strides(x), *strides(gate), *strides(shift), *strides(y),
        *strides(y_gate), width, eps, HAS_Y=y is not None, BLOCK=block, num_warps=min(max(block // 512, 1), 16),
    )  # fmt: skip
    return h, out


def _fake(x: T, *args: object, **kwargs: object) -> tuple[T, T]:
    return x.new_empty(x.shape), x.new_empty(x.shape)


def _reference(
    x: T, gate: T, shift: T, y: T | None = None, y_gate: T | None = None, eps: float = 1e-5
) -> tuple[T, T]:
    h, out = reference(x, gate, shift, y, y_gate, eps)
    return h.contiguous(), out.contiguous()


conditioned_layer_norm = define(
    "conditioned_layer_norm(Tensor x, Tensor gate, Tensor shift, Tensor? y=None, Tensor? y_gate=None, float eps=1e-5)"
    " -> (Tensor, Tensor)",
    fake=_fake,
    providers=(
        Provider("triton", _triton, supports=_supports_triton),
        Provider("reference", _reference, devices=("cuda", "cpu")),
    ),
)


def _case(name: str, tag: str, dtype: str = "bfloat16", weight: float = 1, **dims: int | bool) -> Case:
    return Case(name, {"shared": True, "added": True, **dims}, dtype, weight, (tag,))


_OWN = "samples tokens width"
_GIVEN = "given tokens width"

SPEC = OpSpec(
    name="conditioned_layer_norm",
    level=2,
    reference=reference,
    op=conditioned_layer_norm,
    cases=(  # OpenFold3's diffusion transformer of 24 blocks, and atoms, with 5 samples
        *(_case(f"tokens_{n}", "model", weight=48, samples=5, tokens=n, width=768) for n in (150, 400, 700)),
        _case("atoms", "model", weight=18, samples=5, tokens=3200, width=128),
        _case("one", "odd", "float32", samples=1, tokens=1, width=1),
        _case("odd_63", "odd", "float32", samples=2, tokens=9, width=63),
        _case("own", "odd", "float16", samples=3, tokens=5, width=130, shared=False),
        _case("odd_1000", "odd", samples=1, tokens=3, width=1000),
        _case("half_first", "odd", "float16", samples=2, tokens=1, width=72, added=False),
        _case("first", "odd", samples=2, tokens=7, width=48, added=False),
        _case("own_first", "odd", "float32", samples=2, tokens=3, width=33, shared=False, added=False),
    ),
    arguments=(
        Tensor("x", _OWN, mean=0.5),
        Tensor("gate", _GIVEN),
        Tensor("shift", _GIVEN, std=0.3),
        Tensor("y", _OWN, when="added"),
        Tensor("y_gate", _GIVEN, when="added"),
        Scalar("eps", default=1e-5),
    ),
    outputs=(Tensor("h", _OWN), Tensor("out", _OWN)),
    axes={
        "samples": Axis.per_call(),
        "tokens": Axis.per_call(),
        "width": Axis.width(),
        "shared": Axis(True, read=lambda a: a.gate.shape[0] == 1),
        "given": Axis(lambda s: 1 if s["shared"] else s["samples"]),
    },
    flops="14 * samples * tokens * width",
)  # fmt: skip
