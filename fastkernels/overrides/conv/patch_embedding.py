"""Patch embedding of vision transformers, a convolution without overlap, as one matrix product (arXiv 2010.11929)."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
import triton
import triton.language as tl

from fastkernels.core import assemble
from fastkernels.core.dispatch import Provider, define
from fastkernels.core.spec import Axis, Case, OpSpec, Tensor, fan_in
from fastkernels.overrides.conv.spatial import unsupported
from fastkernels.overrides.kit.launch import cdiv
from fastkernels.overrides.kit.overlap import follow, launch_kernel
from fastkernels.overrides.linear.modules import autocasts


def reference(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    """x: [B, C, T, H, W]; weight: [N, C, t, h, w], the size of a patch; bias: [N] or None.

    Returns [B, T // t, H // h, W // w, N] in x's dtype, computed in at least float32 and rounded once. A rest
    at the end of a dimension is ignored, as by a convolution.
    """
    acc = torch.promote_types(x.dtype, torch.float32)
    b = None if bias is None else bias.to(acc)
    y = F.conv3d(x.to(acc), weight.to(acc), b, stride=weight.shape[2:])
    return y.permute(0, 2, 3, 4, 1).to(x.dtype)


def _check(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> None:
    shapes = f"x {tuple(x.shape)}, weight {tuple(weight.shape)}"
    if x.dim() != 5 or weight.dim() != 5 or x.shape[1] != weight.shape[1]:
        raise ValueError(f"patch_embedding: x must be [B, C, T, H, W], weight [N, C, t, h, w], got {shapes}")
    if any(size < patch for size, patch in zip(x.shape[2:], weight.shape[2:], strict=True)):
        raise ValueError(f"patch_embedding: the input is smaller than a patch: {shapes}")
    if weight.dtype != x.dtype or (bias is not None and bias.dtype != x.dtype):
        raise ValueError(f"patch_embedding: x is {x.dtype}, weight {weight.dtype}: cast one of them")
    if bias is not None and bias.shape != weight.shape[:1]:
        raise ValueError(f"patch_embedding: bias {tuple(bias.shape)} is not [N] of {shapes}")


def _grid(x: torch.Tensor, weight: torch.Tensor) -> list[int]:
    """Patches along each dimension."""
    return [size // patch for size, patch in zip(x.shape[2:], weight.shape[2:], strict=True)]


@triton.jit(do_not_specialize=["M"])
def _patch_embedding_kernel(
    x_ptr, w_ptr, b_ptr, out_ptr, M, GT, GH, GW, N, x_stride_b, x_stride_c, x_stride_t, x_stride_h, x_stride_w,
    K: tl.constexpr, PT: tl.constexpr, PH: tl.constexpr, PW: tl.constexpr, HAS_BIAS: tl.constexpr,
    PRECISION: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
    OVERLAP: tl.constexpr,
):  # fmt: skip
    # A product of matrices that reads the rows of its left one, the patches, from where they lie in the images.
    follow(OVERLAP)
    rows = tl.program_id(0).to(tl.int64) * BLOCK_M + tl.arange(0, BLOCK_M)
    cols = tl.program_id(1).to(tl.int64) * BLOCK_N + tl.arange(0, BLOCK_N)
    w, h = rows % GW, (rows // GW) % GH
    t, image = (rows // (GW * GH)) % GT, rows // (GW * GH * GT)
    begin = image * x_stride_b + t * PT * x_stride_t + h * PH * x_stride_h + w * PW * x_stride_w
    acc = tl.zeros((BLOCK_M, BLOCK_N), dtype=tl.float32)
    for k in range(0, K, BLOCK_K):
        ks = k + tl.arange(0, BLOCK_K)
        channel, at = ks // (PT * PH * PW), ks % (PT * PH * PW)
        inside = channel * x_stride_c + (at // (PH * PW)) * x_stride_t
        inside += ((at // PW) % PH) * x_stride_h + (at % PW) * x_stride_w
        x = tl.load(
            x_ptr + begin[:, None] + inside[None, :], mask=(rows < M)[:, None] & (ks < K)[None, :], other=0.0
        )
        weights = tl.load(
            w_ptr + cols[None, :] * K + ks[:, None], mask=(cols < N)[None, :] & (ks < K)[:, None], other=0.0
        )
        acc = tl.dot(x, weights, acc, input_precision=PRECISION)
    if HAS_BIAS:
        acc += tl.load(b_ptr + cols, mask=cols < N, other=0.0).to(tl.float32)[None, :]
    mask = (rows < M)[:, None] & (cols < N)[None, :]
    tl.store(out_ptr + rows[:, None] * N + cols[None, :], acc.to(out_ptr.dtype.element_ty), mask=mask)


def _supports_triton(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None
) -> str | None:  # fmt: skip
    if x.dtype == torch.bfloat16 and x.device.type == "cpu":
        return "Triton's interpreter multiplies bfloat16 matrices as integers"
    return unsupported(x)


def _triton(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    _check(x, weight, bias)
    out = _empty(x, weight)
    if out.numel() == 0:
        return out
    grid, patch, n = _grid(x, weight), weight.shape[2:], weight.shape[0]
    m, k = out.numel() // n, weight[0].numel()
    wide = x.dtype == torch.float32
    block_m = 64 if wide or m <= 4096 else 128
    launch_kernel(
        _patch_embedding_kernel, (cdiv(m, block_m), cdiv(n, 64)),
        x, weight.contiguous(), None if bias is None else bias.contiguous(), out, m, *grid, n, *x.stride(),
        K=k, PT=patch[0], PH=patch[1], PW=patch[2], HAS_BIAS=bias is not None,
        PRECISION="ieee" if wide else "tf32", BLOCK_M=block_m, BLOCK_N=64, BLOCK_K=32 if wide else 64, num_warps=4,
    )  # fmt: skip
    return out


def _torch(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    """Copy the patches into the rows of a matrix, in the order in which the weight lies in memory."""
    _check(x, weight, bias)
    grid, patch = _grid(x, weight), weight.shape[2:]
    batch, channels, *steps = x.stride()
    between = [step * size for step, size in zip(steps, patch, strict=True)]
    last = weight.permute(0, 2, 3, 4, 1)
    if last.is_contiguous():  # channels last
        inner, strides, weight = (*patch, x.shape[1]), (*steps, channels), last
    else:
        inner, strides = (x.shape[1], *patch), (channels, *steps)
    # One view, whose operators would otherwise take longer than the product
    patches = x.as_strided((x.shape[0], *grid, *inner), (batch, *between, *strides), x.storage_offset())
    return F.linear(patches.flatten(4), weight.flatten(1), bias)


def _empty(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    return x.new_empty((x.shape[0], *_grid(x, weight), weight.shape[0]))


def _reference(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    _check(x, weight, bias)
    return reference(x, weight, bias).contiguous()


patch_embedding = define(
    "patch_embedding(Tensor x, Tensor weight, Tensor? bias=None) -> Tensor",
    fake=lambda x, weight, bias=None: _empty(x, weight),
    providers=(  # cuBLAS first: the kernel is not measured against it yet
        Provider("torch", _torch, devices=("cuda", "cpu")),
        Provider("triton", _triton, supports=_supports_triton),
        Provider("reference", _reference, devices=("cuda", "cpu")),
    ),
)


def without_overlap(module: Any) -> bool:
    """Whether each number of the input is in at most one window, and windows have more than one place."""
    n = len(module.kernel_size)
    return (
        module.stride == module.kernel_size
        and math.prod(module.kernel_size) > 1
        and module.padding in ((0,) * n, "valid")
        and module.dilation == (1,) * n
        and module.groups == 1
    )


def embedded(module: Any, x: torch.Tensor) -> torch.Tensor:
    """The convolution of x [B, C, ...] or [C, ...]: [B, N, ...], with channels last in memory."""
    weight, bias, dims = module.weight, module.bias, module.weight.dim()
    if x.dim() == dims - 1:
        return embedded(module, x[None])[0]
    if x.dim() != dims:
        raise ValueError(f"expected an input of {dims - 1} or {dims} dimensions, got {tuple(x.shape)}")
    if autocasts(x):
        dtype = torch.get_autocast_dtype(x.device.type)
        x, weight, bias = x.to(dtype), weight.to(dtype), None if bias is None else bias.to(dtype)
    if dims == 4:
        return patch_embedding(x[:, :, None], weight[:, :, None], bias)[:, 0].permute(0, 3, 1, 2)
    return patch_embedding(x, weight, bias).permute(0, 4, 1, 2, 3)


def _build(cls: type, args: list[Any]) -> Callable[[], torch.Tensor]:
    """torch.nn.Conv2d or Conv3d, or vLLM's; the results in the op's layout."""
    x, weight, bias = assemble.filled(args, 3, None)
    images = issubclass(cls, torch.nn.Conv2d) or getattr(cls, "num_dim", 0) == 2
    if images and (x.shape[2], weight.shape[2]) != (1, 1):
        raise ValueError(f"{cls.__name__} takes images: one frame, not {x.shape[2]}")
    if images:
        x, weight = x[:, :, 0], weight[:, :, 0]
    patch = tuple(weight.shape[2:])
    module = assemble.make(cls, x, x.shape[1], weight.shape[0], patch, patch, bias=bias is not None)
    assemble.load(module, {"weight": weight, "bias": bias})

    def run() -> torch.Tensor:
        y = module(x).movedim(1, -1)
        return (y[:, None] if images else y).contiguous()

    return run


def _case(
    name: str, batch: int, image: tuple[int, ...], outer: int, patch: tuple[int, ...], tag: str = "odd",
    dtype: str = "bfloat16", bias: bool = True,
) -> Case:  # fmt: skip
    channels, frames, rows, columns = image
    dims = {
        "batch": batch, "channels": channels, "frames": frames, "rows": rows, "columns": columns, "outer": outer,
        "patch_frames": patch[0], "patch_rows": patch[1], "patch_columns": patch[2],
    }  # fmt: skip
    return Case(name, dims if bias else {**dims, "bias": False}, dtype, 1, (tag,))


SPEC = OpSpec(
    name="patch_embedding",
    level=1,
    reference=reference,
    op=patch_embedding,
    cases=(  # SigLIP 2 so400m and DINOv3 ViT-L at 256 px; V-JEPA 2 ViT-L, 16 frames
        _case("siglip_1", 1, (3, 1, 256, 256), 1152, (1, 16, 16), "model"),
        _case("siglip_32", 32, (3, 1, 256, 256), 1152, (1, 16, 16), "model"),
        _case("dinov3_8", 8, (3, 1, 256, 256), 1024, (1, 16, 16), "model"),
        _case("vjepa_1", 1, (3, 16, 256, 256), 1024, (2, 16, 16), "model"),
        _case("vjepa_8", 8, (3, 16, 256, 256), 1024, (2, 16, 16), "model"),
        _case("one", 1, (1, 1, 1, 1), 1, (1, 1, 1), dtype="float32"),
        _case("left_over", 2, (3, 5, 19, 11), 7, (2, 4, 3), dtype="float32"),
        _case("without_bias", 3, (4, 1, 14, 28), 63, (1, 7, 7), bias=False),
        _case("odd_65", 2, (3, 1, 24, 32), 65, (1, 8, 8), dtype="float16"),
        _case("frames", 1, (2, 6, 9, 6), 129, (3, 3, 2), dtype="float32"),
        _case("half_patch", 1, (3, 1, 7, 8), 16, (1, 7, 1), dtype="float16", bias=False),
        _case("wide", 1, (17, 1, 10, 12), 33, (1, 5, 3)),
    ),
    arguments=(
        Tensor("x", "batch channels frames rows columns"),
        Tensor("weight", "outer channels patch_frames patch_rows patch_columns", values=fan_in),
        Tensor("bias", "outer", when="bias", std=0.1),
    ),
    outputs=(
        Tensor("out", "batch frames//patch_frames rows//patch_rows columns//patch_columns outer"),
    ),
    axes={
        "batch": Axis.per_call(),
        "frames": Axis(varies=True),
        "rows": Axis.per_call(),
        "columns": Axis.per_call(),
        "channels": Axis(),
        "outer": Axis(),
        "patch_frames": Axis(),
        "patch_rows": Axis(),
        "patch_columns": Axis(),
        "bias": Axis.option(True, stated=True),
    },
    constraints=("frames >= patch_frames", "rows >= patch_rows", "columns >= patch_columns"),
    build=_build,
    flops="2 * batch * outer * channels * patch_frames * patch_rows * patch_columns * (frames // patch_frames)"
    " * (rows // patch_rows) * (columns // patch_columns)",
)  # fmt: skip
