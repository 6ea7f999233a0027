"""Multi-scale deformable attention: weighted values at a few places of feature maps (Zhu et al., arXiv 2010.04159).

The places are those of RT-DETRv2 (arXiv 2407.17140): offsets from a box's center, in parts of its size.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
import triton
import triton.language as tl

from fastkernels.core.dispatch import Provider, define
from fastkernels.core.spec import Axis, Call, Case, OpSpec, Scalar, Tensor
from fastkernels.overrides.detection.levels import MOST_LEVELS, cells, padded, pairs, size_of
from fastkernels.overrides.kit.launch import next_power_of_2
from fastkernels.overrides.kit.overlap import follow, launch_kernel
from fastkernels.overrides.kit.rows import FLOATS

MOST_POINTS, MOST_CHANNELS = 64, 128  # of a head, that the kernel takes
T = torch.Tensor
Ints = Sequence[int]


def reference(
    value: T,
    offsets: T,
    weights: T,
    boxes: T,
    shapes: Ints,
    scale: float = 0.5,
    softmax: bool = True,
    discrete: bool = False,
) -> T:
    """value: [B, S, heads, D] of S cells; offsets: [B, Q, heads, P, 2], (x, y); weights: [B, Q, heads, P].

    boxes [B, Q, 4]: center, width and height in parts of the image. shapes: rows and columns of each level; the levels
    share the P points of a head equally, in order. Point i of a level is at center + offset * size * scale / n, where n
    is the number of points of a level. Values are interpolated linearly, with zeros outside; discrete: the
    nearest cell's, and the outer cells' outside. softmax: weights are logits. Returns [B, Q, heads * D] in value's
    dtype, computed in at least float32.
    """
    levels = _check(value, offsets, weights, boxes, shapes)
    acc = torch.promote_types(value.dtype, torch.float32)
    batch, _, heads, channels = value.shape
    queries, points = offsets.shape[1], offsets.shape[3] // len(levels)
    share = weights.to(acc).softmax(-1) if softmax else weights.to(acc)
    center, size = (part[:, :, None, None] for part in boxes.to(acc).split(2, -1))
    places = (
        (center + offsets.to(acc) * size * (scale / points)).transpose(1, 2).flatten(0, 1)
    )  # [B * heads, Q, P, 2]
    planes = value.to(acc).permute(0, 2, 3, 1).flatten(0, 1)  # [B * heads, D, S]
    found = []
    for i, (plane, (rows, columns)) in enumerate(
        zip(planes.split([r * c for r, c in levels], -1), levels, strict=True)
    ):
        at = places[:, :, i * points : (i + 1) * points]
        if discrete:
            size_of_level = torch.tensor([columns, rows], dtype=acc, device=value.device)
            x, y = (at * size_of_level + 0.5).long().unbind(-1)
            cell = y.clamp(0, rows - 1) * columns + x.clamp(0, columns - 1)
            found.append(
                plane.gather(2, cell.flatten(1)[:, None].expand(-1, channels, -1)).unflatten(
                    2, cell.shape[1:]
                )
            )
        else:
            image = plane.unflatten(2, (rows, columns))
            found.append(F.grid_sample(image, 2 * at - 1, "bilinear", "zeros", False))
    flat = share.transpose(1, 2).reshape(batch * heads, 1, queries, -1)
    out = (torch.cat(found, -1) * flat).sum(-1)  # [B * heads, D, Q]
    return out.view(batch, heads * channels, queries).transpose(1, 2).to(value.dtype)


def _check(value: T, offsets: T, weights: T, boxes: T, shapes: Ints) -> list[tuple[int, int]]:
    """(rows, columns) of each level. Raises ValueError."""
    levels = pairs("deformable_attention", shapes)
    if value.dim() != 4 or offsets.dim() != 5 or offsets.shape[4] != 2 or weights.shape != offsets.shape[:4]:
        raise ValueError(
            "deformable_attention: value must be [B, S, heads, D], offsets [B, Q, heads, P, 2] and weights"
            f" [B, Q, heads, P], got {tuple(value.shape)}, {tuple(offsets.shape)}, {tuple(weights.shape)}"
        )
    if boxes.shape != (*offsets.shape[:2], 4) or (offsets.shape[0], offsets.shape[2]) != value.shape[::2]:
        raise ValueError(
            f"deformable_attention: boxes must be [B, Q, 4], and B and heads those of value {tuple(value.shape)}, got"
            f" {tuple(boxes.shape)} and offsets {tuple(offsets.shape)}"
        )
    if value.shape[1] != cells(shapes):
        raise ValueError(
            f"deformable_attention: value has {value.shape[1]} cells, and the levels {levels} have {cells(shapes)}"
        )
    if offsets.shape[3] % len(levels):
        raise ValueError(
            f"deformable_attention: {offsets.shape[3]} points of a head cannot be shared by {len(levels)} levels"
        )
    return levels


@triton.jit(do_not_specialize=["H0", "W0", "H1", "W1", "H2", "W2", "H3", "W3"])
def _deformable_attention_kernel(
    value_ptr, offsets_ptr, weights_ptr, boxes_ptr, out_ptr, heads, D, queries, factor, v_stride_b, v_stride_s,
    v_stride_h, o_stride_b, o_stride_q, w_stride_b, w_stride_q, H0, W0, H1, W1, H2, W2, H3, W3,
    COUNT: tl.constexpr, POINTS: tl.constexpr, SOFTMAX: tl.constexpr, DISCRETE: tl.constexpr, BLOCK_P: tl.constexpr,
    BLOCK_D: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    # A program computes one head of one query. The loads of all its points are independent of each other.
    follow(OVERLAP)
    query, head, image = tl.program_id(0) // heads, tl.program_id(0) % heads, tl.program_id(1).to(tl.int64)
    points, dims = tl.arange(0, BLOCK_P), tl.arange(0, BLOCK_D)
    known = points < COUNT
    w_at = weights_ptr + image * w_stride_b + query * w_stride_q + head * COUNT + points
    if SOFTMAX:
        w = tl.load(w_at, mask=known, other=float("-inf")).to(tl.float32)
        w = tl.exp(w - tl.max(w, 0))
        w = w / tl.sum(w, 0)
    else:
        w = tl.load(w_at, mask=known, other=0.0).to(tl.float32)
    o_at = offsets_ptr + image * o_stride_b + query * o_stride_q + (head * COUNT + points) * 2
    offset_x = tl.load(o_at, mask=known, other=0.0).to(tl.float32)
    offset_y = tl.load(o_at + 1, mask=known, other=0.0).to(tl.float32)
    box = boxes_ptr + (image * queries + query) * 4
    center_x, center_y = tl.load(box).to(tl.float32), tl.load(box + 1).to(tl.float32)
    width, height = tl.load(box + 2).to(tl.float32), tl.load(box + 3).to(tl.float32)
    h, w_level, start = size_of(points // POINTS, H0, W0, H1, W1, H2, W2, H3, W3)
    x = (center_x + offset_x * width * factor) * w_level
    y = (center_y + offset_y * height * factor) * h
    value_at = value_ptr + image * v_stride_b + head * v_stride_h + dims[None, :]
    inside_d = (dims < D)[None, :]
    out = tl.zeros([BLOCK_D], tl.float32)
    if DISCRETE:
        column = tl.minimum(tl.maximum(x + 0.5, 0.0), w_level - 1.0).to(tl.int32)
        row = tl.minimum(tl.maximum(y + 0.5, 0.0), h - 1.0).to(tl.int32)
        cell = (start + row * w_level + column).to(tl.int64)
        v = tl.load(value_at + cell[:, None] * v_stride_s, mask=known[:, None] & inside_d, other=0.0)
        out = tl.sum(v.to(tl.float32) * w[:, None], 0)
    else:
        x, y = x - 0.5, y - 0.5
        for i in tl.static_range(2):
            for j in tl.static_range(2):
                row, column = tl.floor(y) + i, tl.floor(x) + j
                inside = known & (row >= 0) & (column >= 0) & (row < h) & (column < w_level)
                share = w * (1.0 - tl.abs(y - row)) * (1.0 - tl.abs(x - column))
                share = tl.where(inside, share, 0.0)  # infinite places are outside, too
                cell = tl.where(inside, start + row.to(tl.int32) * w_level + column.to(tl.int32), 0).to(
                    tl.int64
                )
                at = value_at + cell[:, None] * v_stride_s
                v = tl.load(at, mask=inside[:, None] & inside_d, other=0.0)
                out += tl.sum(v.to(tl.float32) * share[:, None], 0)
    out_at = out_ptr + ((image * queries + query) * heads + head) * D + dims
    tl.store(out_at, out.to(out_ptr.dtype.element_ty), mask=dims < D)


def _supports_triton(value: T, offsets: T, weights: T, boxes: T, shapes: Ints, *_: object) -> str | None:
    for name, t in (("value", value), ("offsets", offsets), ("weights", weights), ("boxes", boxes)):
        if t.dtype not in FLOATS:
            return f"{name} has dtype {t.dtype}, not float16, bfloat16 or float32"
    if len(shapes) > 2 * MOST_LEVELS:
        return f"{len(shapes) // 2} levels are more than {MOST_LEVELS}"
    if weights.shape[3] > MOST_POINTS or value.shape[3] > MOST_CHANNELS:
        found = f"{weights.shape[3]} points and {value.shape[3]} channels"
        return f"a head has {found}, over {MOST_POINTS} or {MOST_CHANNELS}"
    for name, t in (("offsets", offsets[0, 0]), ("weights", weights[0, 0])):
        if not t.is_contiguous():
            return f"{name} of a query have strides {tuple(t.stride())}: they must be contiguous"
    return None if value.stride(3) == 1 else f"value has strides {tuple(value.stride())}: the last must be 1"


def _triton(
    value: T, offsets: T, weights: T, boxes: T, shapes: Ints, scale: float = 0.5, softmax: bool = True,
    discrete: bool = False,
) -> T:  # fmt: skip
    levels = _check(value, offsets, weights, boxes, shapes)
    out = _fake(value, offsets)
    if out.numel() == 0:
        return out
    (batch, _, heads, channels), (queries, count) = value.shape, (offsets.shape[1], offsets.shape[3])
    points = count // len(levels)
    launch_kernel(
        _deformable_attention_kernel, (queries * heads, batch), value, offsets, weights, boxes.contiguous(), out, heads,
        channels, queries, scale / points, *value.stride()[:3], *offsets.stride()[:2], *weights.stride()[:2],
        *padded(shapes), COUNT=count, POINTS=points, SOFTMAX=softmax, DISCRETE=discrete,
        BLOCK_P=max(next_power_of_2(count), 2), BLOCK_D=max(next_power_of_2(channels), 2), num_warps=1,
    )  # fmt: skip
    return out


def _fake(value: T, offsets: T, *_: object, **__: object) -> T:
    return value.new_empty(offsets.shape[0], offsets.shape[1], value.shape[2] * value.shape[3])


deformable_attention = define(
    "deformable_attention(Tensor value, Tensor offsets, Tensor weights, Tensor boxes, int[] shapes, float scale=0.5,"
    " bool softmax=True, bool discrete=False) -> Tensor",
    fake=_fake,
    providers=(
        Provider("triton", _triton, supports=_supports_triton),
        Provider("reference", lambda *args: reference(*args).contiguous(), devices=("cuda", "cpu")),
    ),
)


def _boxes(call: Call, shape: tuple[int, ...], dtype: torch.dtype) -> T:
    """Centers anywhere in the image, and sizes up to half of it."""
    return (call.rand(*shape) * torch.tensor([1.0, 1.0, 0.5, 0.5], device=call.device)).to(dtype)


_RT_DETR = (80, 80, 40, 40, 20, 20)


def _case(name: str, tag: str, dtype: str = "bfloat16", weight: float = 1, **dims: object) -> Case:
    return Case(name, dims, dtype, weight, (tag,))


SPEC = OpSpec(
    name="deformable_attention",
    level=2,
    reference=reference,
    op=deformable_attention,
    cases=(  # RT-DETRv2 at 640 px: six decoder layers with 300 queries
        _case("rt_detr_32", "model", weight=6, batch=32, queries=300, heads=8, points=4, channels=32, shapes=_RT_DETR),
        _case("rt_detr_4", "model", weight=6, batch=4, queries=300, heads=8, points=4, channels=32, shapes=_RT_DETR),
        _case("rt_detr_1", "model", weight=6, batch=1, queries=300, heads=8, points=4, channels=32, shapes=_RT_DETR),
        _case("rt_detr_fp16", "model", "float16", weight=6, batch=1, queries=300, heads=8, points=4, channels=32,
              shapes=_RT_DETR),
        _case("one", "odd", "float32", batch=1, queries=1, heads=1, points=1, channels=1, shapes=(1, 1)),
        _case("odd_7", "odd", "float32", batch=2, queries=7, heads=3, points=3, channels=5, shapes=(7, 5, 3, 2)),
        _case("half", "odd", "float16", batch=1, queries=9, heads=2, points=4, channels=8,
              shapes=(9, 6, 5, 3, 2, 2)),
        _case("weights", "odd", "float32", batch=2, queries=5, heads=2, points=2, channels=12, shapes=(6, 4, 3, 2),
              softmax=False),
        _case("discrete", "odd", "float32", batch=1, queries=11, heads=2, points=3, channels=4,
              shapes=(5, 7, 4, 3), discrete=True),
        _case("four_levels", "odd", batch=2, queries=13, heads=4, points=2, channels=16,
              shapes=(8, 8, 4, 4, 2, 2, 1, 1), scale=1.0),
        _case("wide", "odd", "float32", batch=1, queries=3, heads=1, points=5, channels=65, shapes=(4, 4)),
    ),
    arguments=(
        Tensor("value", "batch tokens heads channels", bytes="0"),  # points may share cells
        Tensor("offsets", "batch queries heads len(shapes)//2*points 2", std=3),
        Tensor("weights", "batch queries heads len(shapes)//2*points"),
        Tensor("boxes", "batch queries 4", "float32", values=_boxes),
        Scalar("shapes"),
        Scalar("scale", default=0.5),
        Scalar("softmax", default=True),
        Scalar("discrete", default=False),
    ),
    outputs=(Tensor("out", "batch queries heads*channels"),),
    axes={
        "batch": Axis.per_call(),
        "tokens": Axis(lambda sizes: cells(sizes["shapes"]), varies=True),
        "queries": Axis.count(),
        "heads": Axis.count(),
        "points": Axis(),
        "channels": Axis.width(),
        "shapes": Axis(),
    },
    flops="10 * batch * queries * heads * (len(shapes) // 2 * points) * channels",
)  # fmt: skip
