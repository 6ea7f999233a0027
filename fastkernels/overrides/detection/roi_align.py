"""Features inside boxes, pooled to a grid of bins (He et al., arXiv 1703.06870), as torchvision's roi_align does."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from fastkernels.core.dispatch import Provider, define
from fastkernels.core.spec import Axis, Call, Case, OpSpec, Scalar, Tensor
from fastkernels.overrides.kit.launch import cdiv, next_power_of_2
from fastkernels.overrides.kit.overlap import follow, launch_kernel
from fastkernels.overrides.kit.rows import FLOATS

BLOCK = 256  # channels of a program, at most
T = torch.Tensor


def reference(features: T, boxes: T, size: int) -> T:
    """features: [B, H, W, C]; boxes: [B, N, 4] in cells: left, top, right, bottom. Returns [B, N, size, size, C].

    A box is at least one cell wide and high. A bin is the mean of ceil(side / size) samples along each axis, which are
    interpolated linearly between the cells' centers at whole numbers; a sample more than one cell outside is 0. That is
    torchvision with sampling_ratio=-1 and aligned=False. Computed in at least float32.
    """
    _check(features, boxes, size)
    acc = torch.promote_types(torch.promote_types(features.dtype, boxes.dtype), torch.float32)
    left, top, right, bottom = boxes.to(acc).unbind(-1)
    rows, columns = features.shape[1:3]
    across, down = _shares(left, right, size, columns), _shares(top, bottom, size, rows)
    half = torch.einsum("bnsy,byxc->bnsxc", down, features.to(acc))
    return torch.einsum("bntx,bnsxc->bnstc", across, half).to(features.dtype)


def _shares(start: T, end: T, size: int, cells: int) -> T:
    """The share of each cell in each bin along one axis [B, N, size, cells]."""
    side = (end - start).clamp(min=1)
    samples = torch.ceil(side / size)
    most = int(samples.max()) if samples.numel() else 1
    each = torch.arange(most, dtype=start.dtype, device=start.device)
    bins = torch.arange(size, dtype=start.dtype, device=start.device)
    inside = (bins[:, None] + (each + 0.5) / samples[..., None, None]) * (side / size)[..., None, None]
    at = start[..., None, None] + inside  # [B, N, size, most]
    known = (each < samples[..., None, None]) & (at >= -1) & (at <= cells)
    cell = torch.arange(cells, dtype=start.dtype, device=start.device)
    tents = (1 - (at.clamp(0, cells - 1)[..., None] - cell).abs()).clamp(min=0)
    return (tents * known[..., None]).sum(-2) / samples[..., None, None]


def _check(features: T, boxes: T, size: int) -> None:
    if features.dim() != 4 or boxes.dim() != 3 or boxes.shape[::2] != (len(features), 4) or size < 1:
        raise ValueError(
            "roi_align: features must be [B, H, W, C] and boxes [B, N, 4], with a size of at least 1, got"
            f" {tuple(features.shape)}, {tuple(boxes.shape)} and {size}"
        )
    if not features.shape[1] * features.shape[2]:
        raise ValueError(f"roi_align: features must have cells, got {tuple(features.shape)}")


@triton.jit(do_not_specialize=["H", "W"])
def _roi_align_kernel(
    x_ptr, boxes_ptr, out_ptr, H, W, C, N, x_stride_b, x_stride_h, x_stride_w,
    SIZE: tl.constexpr, BLOCK_C: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    # A program computes a bin of one box: the number of its samples depends on the box.
    follow(OVERLAP)
    place, box, image = tl.program_id(0), tl.program_id(1) % N, (tl.program_id(1) // N).to(tl.int64)
    channels = tl.program_id(2) * BLOCK_C + tl.arange(0, BLOCK_C)
    known = channels < C
    box_at = boxes_ptr + (image * N + box) * 4
    left, top = tl.load(box_at).to(tl.float32), tl.load(box_at + 1).to(tl.float32)
    width = tl.maximum(tl.load(box_at + 2).to(tl.float32) - left, 1.0)
    height = tl.maximum(tl.load(box_at + 3).to(tl.float32) - top, 1.0)
    across, down = tl.ceil(width / SIZE).to(tl.int32), tl.ceil(height / SIZE).to(tl.int32)
    x_start = left + (place % SIZE) * (width / SIZE)
    y_start = top + (place // SIZE) * (height / SIZE)
    x_step, y_step = width / SIZE / across, height / SIZE / down
    x_at = x_ptr + image * x_stride_b + channels
    total = tl.zeros([BLOCK_C], tl.float32)
    for i in range(0, down):
        y = y_start + (i + 0.5) * y_step
        in_rows = tl.where(y < -1.0, 0, tl.where(y > H, 0, C))  # as many channels count
        y = tl.minimum(tl.maximum(y, 0.0), H - 1.0)
        row = tl.floor(y)
        y_share = y - row
        row = row.to(tl.int32)
        next_row = tl.minimum(row + 1, H - 1)
        for j in range(0, across):
            x = x_start + (j + 0.5) * x_step
            inside = channels < tl.where(x < -1.0, 0, tl.where(x > W, 0, in_rows))
            x = tl.minimum(tl.maximum(x, 0.0), W - 1.0)
            column = tl.floor(x)
            x_share = x - column
            column = column.to(tl.int32)
            next_column = tl.minimum(column + 1, W - 1)
            upper, lower = x_at + row.to(tl.int64) * x_stride_h, x_at + next_row.to(tl.int64) * x_stride_h
            a = tl.load(upper + column * x_stride_w, mask=inside, other=0.0).to(tl.float32)
            b = tl.load(upper + next_column * x_stride_w, mask=inside, other=0.0).to(tl.float32)
            c = tl.load(lower + column * x_stride_w, mask=inside, other=0.0).to(tl.float32)
            d = tl.load(lower + next_column * x_stride_w, mask=inside, other=0.0).to(tl.float32)
            above = a * (1.0 - x_share) + b * x_share
            below = c * (1.0 - x_share) + d * x_share
            total += above * (1.0 - y_share) + below * y_share
    out_at = out_ptr + ((image * N + box) * SIZE * SIZE + place) * C + channels
    tl.store(out_at, (total / (across * down)).to(out_ptr.dtype.element_ty), mask=known)


def _supports_triton(features: T, boxes: T, size: int) -> str | None:
    wrong = [t.dtype for t in (features, boxes) if t.dtype not in FLOATS]
    if wrong:
        return f"features or boxes have dtype {wrong[0]}, not float16, bfloat16 or float32"
    if boxes.shape[0] * boxes.shape[1] > 65535:
        return f"{boxes.shape[0] * boxes.shape[1]} boxes are over 65535"
    return (
        None
        if features.stride(3) == 1
        else f"features have strides {tuple(features.stride())}: the last must be 1"
    )


def _fake(features: T, boxes: T, size: int) -> T:
    return features.new_empty(*boxes.shape[:2], size, size, features.shape[3])


def _triton(features: T, boxes: T, size: int) -> T:
    _check(features, boxes, size)
    out = _fake(features, boxes, size)
    if out.numel() == 0:
        return out
    (batch, height, width, channels), count = features.shape, boxes.shape[1]
    block = min(BLOCK, max(next_power_of_2(channels), 2))
    launch_kernel(
        _roi_align_kernel, (size * size, batch * count, cdiv(channels, block)), features, boxes.contiguous(), out,
        height, width, channels, count, *features.stride()[:3], SIZE=size, BLOCK_C=block, num_warps=2,
    )  # fmt: skip
    return out


roi_align = define(
    "roi_align(Tensor features, Tensor boxes, int size) -> Tensor",
    fake=_fake,
    providers=(
        Provider("triton", _triton, supports=_supports_triton),
        Provider("reference", lambda *args: reference(*args).contiguous(), devices=("cuda", "cpu")),
    ),
)


def _boxes(call: Call, shape: tuple[int, ...], dtype: torch.dtype) -> T:
    """Corners in the image and a little outside of it, some boxes of less than one cell."""
    cells = torch.tensor([call["columns"], call["rows"]] * 2, dtype=torch.float32, device=call.device)
    ends = call.rand(*shape[:2], 2, 2).sort(2).values.flatten(2)
    return ((ends * 1.2 - 0.1) * cells).to(dtype)


def _case(name: str, tag: str, dtype: str = "bfloat16", weight: float = 1, **dims: object) -> Case:
    return Case(name, dims, dtype, weight, (tag,))


SPEC = OpSpec(
    name="roi_align",
    level=1,
    reference=reference,
    op=roi_align,
    cases=(  # SAM 3 at 1008 px: the boxes of a prompt
        _case("sam3_1", "model", batch=1, rows=72, columns=72, channels=256, boxes=1, size=7),
        _case("sam3_4", "model", batch=4, rows=72, columns=72, channels=256, boxes=8, size=7),
        _case("one", "odd", "float32", batch=1, rows=1, columns=1, channels=1, boxes=1, size=1),
        _case("odd_63", "odd", "float32", batch=2, rows=9, columns=7, channels=63, boxes=3, size=3),
        _case("half", "odd", "float16", batch=1, rows=6, columns=11, channels=8, boxes=5, size=2),
        _case("many", "odd", "float32", batch=3, rows=5, columns=5, channels=5, boxes=17, size=4),
        _case("large", "odd", "float32", batch=1, rows=31, columns=29, channels=3, boxes=2, size=2),
        _case("wide", "odd", batch=1, rows=4, columns=3, channels=300, boxes=2, size=7),
        _case("line", "odd", "float16", batch=2, rows=1, columns=40, channels=9, boxes=4, size=5),
    ),
    arguments=(
        Tensor("features", "batch rows columns channels"),
        Tensor("boxes", "batch boxes 4", "float32", values=_boxes),
        Scalar("size"),
    ),
    outputs=(Tensor("out", "batch boxes size size channels"),),
    axes={
        "batch": Axis.per_call(),
        "rows": Axis(),
        "columns": Axis(),
        "channels": Axis.width(),
        "boxes": Axis.per_call(),
        "size": Axis(),
    },
    flops="8 * batch * boxes * size * size * channels",
)
