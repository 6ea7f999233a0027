"""RMS norm over the channels of a video, SiLU, and the padding of a causal 3x3x3 convolution behind them, in one pass.

A causal convolution sees earlier frames only: its padding is two copies of the first frame, and one of each border.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
import triton
import triton.language as tl

from fastkernels.core.dispatch import Provider, define
from fastkernels.core.spec import Axis, Case, OpSpec, Scalar, Tensor
from fastkernels.overrides.kit.launch import cdiv, next_power_of_2
from fastkernels.overrides.kit.overlap import follow, launch_kernel
from fastkernels.overrides.kit.rows import FLOATS, unsupported_vector

PADDING = (1, 1, 1, 1, 2, 0)  # of F.pad
SMALLEST = 1e-12  # the least length of a pixel's vector, as in F.normalize
TILE = 2048  # elements of a program


def reference(x: torch.Tensor, weight: torch.Tensor, silu: bool = True, pad: bool = True) -> torch.Tensor:
    """x: [B, C, F, H, W]; weight: [C]. Returns the same shape, with pad [B, C, F + 2, H + 2, W + 2], in x's dtype.

    Computed in at least float32, rounded once.
    """
    acc = torch.promote_types(x.dtype, torch.float32)
    y = F.normalize(x.to(acc), dim=1, eps=SMALLEST) * x.shape[1] ** 0.5 * weight.to(acc).view(-1, 1, 1, 1)
    y = F.silu(y) if silu else y
    return (F.pad(y, PADDING, mode="replicate") if _pads(x, pad) else y).to(x.dtype)


def _pads(x: torch.Tensor, pad: bool) -> bool:
    """Whether there is padding: no copies of frames without pixels, but of the frames of no video."""
    return pad and 0 not in x.shape[1:]


@triton.jit(do_not_specialize=["pixels", "T", "H", "W"])
def _norm_pad_kernel(
    x_ptr, w_ptr, out_ptr, pixels, T, H, W, C, scale, smallest, x_b, x_c, x_t, x_h, x_w,
    PAD: tl.constexpr, SILU: tl.constexpr, BLOCK_P: tl.constexpr, BLOCK_C: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    # One program per BLOCK_P pixels of the result, whose channels are neighbors. Borders are computed again.
    follow(OVERLAP)
    row = tl.program_id(0).to(tl.int64) * BLOCK_P + tl.arange(0, BLOCK_P)
    column = row % (W + 2 * PAD)
    line = row // (W + 2 * PAD)
    frame = line // (H + 2 * PAD)
    batch = frame // (T + 2 * PAD)
    t = tl.maximum(frame % (T + 2 * PAD) - 2 * PAD, 0)
    h = tl.minimum(tl.maximum(line % (H + 2 * PAD) - PAD, 0), H - 1)
    w = tl.minimum(tl.maximum(column - PAD, 0), W - 1)
    cols = tl.arange(0, BLOCK_C)[None, :]
    inside = (row < pixels)[:, None] & (cols < C)
    at = x_ptr + (batch * x_b + t * x_t + h * x_h + w * x_w)[:, None] + cols * x_c
    x = tl.load(at, mask=inside, other=0.0).to(tl.float32)
    length = tl.maximum(tl.sqrt(tl.sum(x * x, axis=1)), smallest)[:, None]
    y = x / length * scale * tl.load(w_ptr + cols, mask=cols < C, other=0.0).to(tl.float32)
    if SILU:
        y = y / (1.0 + tl.exp(-y))
    tl.store(out_ptr + row[:, None] * C + cols, y.to(out_ptr.dtype.element_ty), mask=inside)


def _check(x: torch.Tensor, weight: torch.Tensor) -> None:
    if x.dim() != 5 or weight.shape != x.shape[1:2]:
        raise ValueError(
            f"norm_pad: x must be [B, C, F, H, W] and weight [C], got {tuple(x.shape)} and {tuple(weight.shape)}"
        )


def _supports_triton(x: torch.Tensor, weight: torch.Tensor, *_: object) -> str | None:
    if x.dtype not in FLOATS:
        return f"x is {x.dtype}"
    if x.shape[1] > 8192:
        return f"{x.shape[1]} channels are over 8192"
    return unsupported_vector(weight, "weight")


def _fake(x: torch.Tensor, weight: torch.Tensor, silu: bool = True, pad: bool = True) -> torch.Tensor:
    batch, channels, *sizes = x.shape
    if _pads(x, pad):
        sizes = [n + 2 for n in sizes]
    return x.new_empty((batch, *sizes, channels)).permute(0, 4, 1, 2, 3)


def _triton(x: torch.Tensor, weight: torch.Tensor, silu: bool = True, pad: bool = True) -> torch.Tensor:
    _check(x, weight)
    out = _fake(x, weight, silu, pad)
    if out.numel() == 0:
        return out
    batch, channels, frames, rows, columns = out.shape
    pixels, block = batch * frames * rows * columns, next_power_of_2(channels)
    at_once = max(TILE // block, 1)
    launch_kernel(
        _norm_pad_kernel, (cdiv(pixels, at_once),), x, weight, out, pixels, *x.shape[2:], channels, channels**0.5,
        SMALLEST, *x.stride(), PAD=int(pad), SILU=silu, BLOCK_P=at_once, BLOCK_C=block, num_warps=4,
    )  # fmt: skip
    return out


def _reference(x: torch.Tensor, weight: torch.Tensor, silu: bool = True, pad: bool = True) -> torch.Tensor:
    _check(x, weight)
    return reference(x, weight, silu, pad).contiguous(memory_format=torch.channels_last_3d)


norm_pad = define(
    "norm_pad(Tensor x, Tensor weight, bool silu=True, bool pad=True) -> Tensor",
    fake=_fake,
    providers=(
        Provider("triton", _triton, supports=_supports_triton),
        Provider("reference", _reference, devices=("cuda", "cpu")),
    ),
)


def _case(name: str, tag: str, channels: int, frames: int, rows: int, columns: int, dtype: str = "bfloat16",
          weight: float = 1, batch: int = 1, **more: bool) -> Case:  # fmt: skip
    sizes = {"batch": batch, "channels": channels, "frames": frames, "rows": rows, "columns": columns}
    return Case(name, {**sizes, **more}, dtype, weight, (tag,))


_INNER = "batch channels frames rows columns"

SPEC = OpSpec(
    name="norm_pad",
    level=2,
    reference=reference,
    op=norm_pad,
    cases=(  # HunyuanVideo-1.5's decoder: a tile of 256 pixels and 25 frames
        _case("hunyuan_1024", "model", 1024, 7, 16, 16, weight=10),
        _case("hunyuan_512", "model", 512, 25, 64, 64, weight=6),
        _case("hunyuan_256", "model", 256, 25, 128, 128, weight=6),
        _case("hunyuan_128", "model", 128, 25, 256, 256, weight=7),
        _case("hunyuan_attention", "model", 1024, 7, 16, 16, silu=False, pad=False),
        _case("one", "odd", 1, 1, 1, 1, "float32"),
        _case("odd_63", "odd", 63, 3, 5, 7, "float32"),
        _case("odd_129", "odd", 129, 1, 3, 9, "float16", batch=2),
        _case("unpadded_17", "odd", 17, 5, 3, 4, "bfloat16", pad=False),
        _case("linear_33", "odd", 33, 2, 7, 1, "float32", silu=False),
        _case("norm_9", "odd", 9, 3, 3, 3, "float16", batch=3, silu=False, pad=False),
        _case("frames_11", "odd", 8, 11, 2, 5),
        _case("wide_1000", "odd", 1000, 1, 2, 3, "float32"),
        _case("none", "odd", 8, 2, 3, 4, "float32", batch=0),
    ),
    arguments=(
        Tensor("x", _INNER, mean=0.3),
        Tensor("weight", "channels", mean=1, std=0.2),
        Scalar("silu", default=True),
        Scalar("pad", default=True),
    ),
    outputs=(Tensor("out", "batch channels out_frames out_rows out_columns"),),
    axes={
        "batch": Axis.per_call(),
        "channels": Axis.width(),
        "frames": Axis.per_call(),
        "rows": Axis.per_call(),
        "columns": Axis.per_call(),
        "out_frames": Axis(lambda s: s["frames"] + 2 * s["pad"], varies=True),
        "out_rows": Axis(lambda s: s["rows"] + 2 * s["pad"], varies=True),
        "out_columns": Axis(lambda s: s["columns"] + 2 * s["pad"], varies=True),
        "silu": Axis.option(True, stated=True),
        "pad": Axis.option(True, stated=True),
    },
    flops="10 * batch * channels * out_frames * out_rows * out_columns",
)
