"""Cosines and sines of rotary positions along several axes, as FLUX takes them (arXiv 2104.09864)."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
import triton.language as tl

from fastkernels.core.declaration import Call
from fastkernels.core.dispatch import Provider, define
from fastkernels.core.spec import Axis, Case, OpSpec, Scalar, Tensor, Tolerance
from fastkernels.overrides.kit.launch import next_power_of_2
from fastkernels.overrides.kit.overlap import follow, launch_kernel

MOST_AXES = 4
CosSin = tuple[torch.Tensor, torch.Tensor]


def reference(ids: torch.Tensor, dims: Sequence[int], theta: int) -> CosSin:
    """ids: [S, A], of any dtype; dims: channels of each of the A axes, even. Returns cosines and sines [S, sum(dims)].

    Channels 2j and 2j + 1 of an axis have the angle id * theta^(-2j / dim). Computed in float64, rounded to float32
    (of ids in float64, not rounded).
    """
    angles = []
    for axis, dim in enumerate(dims):
        steps = torch.arange(0, dim, 2, dtype=torch.float64, device=ids.device)
        angles.append(ids[:, axis].double()[:, None] * theta ** (-steps / dim))
    both = torch.cat(angles, dim=1).repeat_interleave(2, dim=1)
    wide = torch.float64 if ids.dtype == torch.float64 else torch.float32
    return both.cos().to(wide), both.sin().to(wide)


@triton.jit(do_not_specialize=["theta"])
def _rope_axes_kernel(
    ids_ptr, cos_ptr, sin_ptr, id_stride, axis_stride, theta,
    D0: tl.constexpr, D1: tl.constexpr, D2: tl.constexpr, D3: tl.constexpr, BLOCK: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    follow(OVERLAP)
    row = tl.program_id(0).to(tl.int64)
    cols = tl.arange(0, BLOCK)
    second, third, fourth = cols >= D0, cols >= D0 + D1, cols >= D0 + D1 + D2
    axis = second.to(tl.int32) + third.to(tl.int32) + fourth.to(tl.int32)
    start = tl.where(fourth, D0 + D1 + D2, tl.where(third, D0 + D1, tl.where(second, D0, 0)))
    dim = tl.where(fourth, D3, tl.where(third, D2, tl.where(second, D1, D0)))
    inside = cols < D0 + D1 + D2 + D3
    at = tl.load(ids_ptr + row * id_stride + axis * axis_stride, mask=inside, other=0.0).to(tl.float64)
    # In float64, as the host's: an angle of 4,096 has an error of 2e-4 in float32.
    exponent = ((cols - start) // 2 * 2).to(tl.float64) / tl.maximum(dim, 1).to(tl.float64)
    angle = at * tl.exp(-exponent * tl.log((theta + tl.zeros([BLOCK], tl.int32)).to(tl.float64)))
    out = row * (D0 + D1 + D2 + D3) + cols
    tl.store(cos_ptr + out, tl.cos(angle).to(tl.float32), mask=inside)
    tl.store(sin_ptr + out, tl.sin(angle).to(tl.float32), mask=inside)


def _check(ids: torch.Tensor, dims: Sequence[int]) -> None:
    if ids.dim() != 2 or ids.shape[1] != len(dims) or any(dim % 2 or dim < 2 for dim in dims):
        raise ValueError(
            f"rope_axes: ids {tuple(ids.shape)} must be [S, A] with an even size for each axis, got {dims}"
        )


def _supports_triton(ids: torch.Tensor, dims: Sequence[int], theta: int) -> str | None:
    if ids.dtype == torch.float64:
        return "ids are float64, computed as such"
    return f"{len(dims)} axes are over {MOST_AXES}" if len(dims) > MOST_AXES else None


def _fake(ids: torch.Tensor, dims: Sequence[int], theta: int) -> CosSin:
    wide = torch.float64 if ids.dtype == torch.float64 else torch.float32
    cos, sin = (torch.empty(len(ids), sum(dims), dtype=wide, device=ids.device) for _ in range(2))
    return cos, sin


def _triton(ids: torch.Tensor, dims: Sequence[int], theta: int) -> CosSin:
    _check(ids, dims)
    cos, sin = _fake(ids, dims, theta)
    if cos.numel() == 0:
        return cos, sin
    d0, d1, d2, d3 = (*dims, *[0] * (MOST_AXES - len(dims)))
    launch_kernel(
        _rope_axes_kernel, (len(ids),), ids, cos, sin, *ids.stride(), theta, D0=d0, D1=d1, D2=d2, D3=d3,
        BLOCK=next_power_of_2(sum(dims)), num_warps=4,
    )  # fmt: skip
    return cos, sin


def _reference(ids: torch.Tensor, dims: Sequence[int], theta: int) -> CosSin:
    _check(ids, dims)
    return reference(ids, dims, theta)


rope_axes = define(
    "rope_axes(Tensor ids, int[] dims, int theta) -> (Tensor, Tensor)",
    fake=_fake,
    providers=(
        Provider("triton", _triton, supports=_supports_triton),
        Provider("reference", _reference, devices=("cuda", "cpu")),
    ),
)


def _ids(call: Call, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    return (call.rand(*shape) * 64).floor().to(dtype)


def _case(
    name: str, tag: str, tokens: int, dims: tuple[int, ...], dtype: str = "bfloat16", theta: int = 10000
) -> Case:
    return Case(name, {"tokens": tokens, "dims": dims, "theta": theta}, dtype, tags=(tag,))


SPEC = OpSpec(
    name="rope_axes",
    level=1,
    reference=reference,
    op=rope_axes,
    cases=(  # FLUX.1 at 1024 px: 512 tokens of text, 4,096 of the image
        _case("flux", "model", 4608, (16, 56, 56)),
        _case("one", "odd", 1, (2,), "float32"),
        _case("odd_63", "odd", 63, (10, 4, 22), "float32", 500),
        _case("two", "odd", 7, (64, 66), "float16"),
        _case("four", "odd", 1000, (16, 2, 40, 6)),
        _case("two_17", "odd", 17, (2, 6), "float32"),
        _case("odd_129", "odd", 129, (8, 12, 12), theta=7),
        _case("few", "odd", 3, (4, 4, 8), "float16"),
    ),
    arguments=(Tensor("ids", "tokens axes", values=_ids), Scalar("dims"), Scalar("theta", default=10000)),
    outputs=(Tensor("cos", "tokens channels", "float32"), Tensor("sin", "tokens channels", "float32")),
    axes={
        "tokens": Axis.per_call(),
        "dims": Axis.option((16, 56, 56), stated=True),
        "axes": Axis(lambda s: len(s["dims"])),
        "channels": Axis(lambda s: sum(s["dims"])),
    },
    flops="40 * tokens * channels",
    tolerance={d: Tolerance(1e-6, 1e-6) for d in ("float32", "float16", "bfloat16")},
    constructor={"axes_dim": "dims"},
    activations=(),
)  # fmt: skip
