"""Biases of attention from the places of cells relative to boxes (Lin et al., arXiv 2308.01904), as SAM 3 has them.

The bias of a cell is the sum of one for its column and one for its row: this op computes those of one axis.
"""

from __future__ import annotations

import math

import torch
import triton
import triton.language as tl

from fastkernels.core.dispatch import Provider, define
from fastkernels.core.spec import Axis, Call, Case, OpSpec, Scalar, Tensor, fan_in
from fastkernels.overrides.kit.launch import cdiv, next_power_of_2
from fastkernels.overrides.kit.overlap import follow, launch_kernel
from fastkernels.overrides.kit.rows import FLOATS

ROWS, HIDDEN = 64, 32  # places of a program, and hidden channels that it computes at once
MOST_HEADS = 64
T = torch.Tensor


def reference(boxes: T, weight: T, bias: T, out_weight: T, out_bias: T, size: int, vertical: bool) -> T:
    """boxes: [B, Q, 4], center and size in parts of the image. Returns [B, heads, Q, size] in weight's dtype.

    weight: [hidden, 2]; bias: [hidden]; out_weight: [heads, hidden]; out_bias: [heads]. An MLP with ReLU maps the
    distances of place i / size from the two sides of the box along one axis, x or y if vertical. A distance d is
    encoded as sign(d) log(8 |d| + 1) / log(8). Computed in at least float32.
    """
    _check(boxes, weight, bias, out_weight, out_bias, size)
    acc = torch.promote_types(torch.promote_types(boxes.dtype, weight.dtype), torch.float32)
    center, half = boxes[..., int(vertical)].to(acc), boxes[..., 2 + int(vertical)].to(acc) / 2
    places = torch.arange(size, dtype=acc, device=boxes.device) / size
    distance = places[:, None] - torch.stack((center - half, center + half), -1)[:, :, None]
    encoded = distance.sign() * torch.log1p(8 * distance.abs()) / math.log(8)  # [B, Q, size, 2]
    hidden = torch.relu(encoded @ weight.to(acc).T + bias.to(acc))
    return (hidden @ out_weight.to(acc).T + out_bias.to(acc)).permute(0, 3, 1, 2).to(weight.dtype)


def _check(boxes: T, weight: T, bias: T, out_weight: T, out_bias: T, size: int) -> None:
    shapes = [tuple(t.shape) for t in (boxes, weight, bias, out_weight, out_bias)]
    hidden, heads = weight.shape[0], out_weight.shape[0]
    if boxes.dim() != 3 or shapes != [
        (*boxes.shape[:2], 4),
        (hidden, 2),
        (hidden,),
        (heads, hidden),
        (heads,),
    ]:
        raise ValueError(
            "box_position_bias: boxes must be [B, Q, 4], weight [hidden, 2], bias [hidden], out_weight [heads, hidden]"
            f" and out_bias [heads], got {', '.join(map(str, shapes))}"
        )
    if size < 1:
        raise ValueError(f"box_position_bias: size must be at least 1, got {size}")


@triton.jit
def _encoded(distance):
    found = tl.log(8.0 * tl.abs(distance) + 1.0) * 0.48089834696298783  # 1 / log(8)
    return tl.where(distance < 0.0, -found, found)


@triton.jit(do_not_specialize=["count", "queries", "size"])
def _box_position_bias_kernel(
    boxes_ptr, w_ptr, b_ptr, out_w_ptr, out_b_ptr, out_ptr, count, queries, size, hidden, heads,
    VERTICAL: tl.constexpr, PRECISION: tl.constexpr, ROWS: tl.constexpr, BLOCK_H: tl.constexpr, BLOCK_N: tl.constexpr,
    OVERLAP: tl.constexpr,
):  # fmt: skip
    # A row is a place of one query. The hidden channels stay in registers.
    follow(OVERLAP)
    rows = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    known = rows < count
    query, place = rows // size, (rows % size).to(tl.float32) / size
    box_at = boxes_ptr + query * 4 + VERTICAL
    center = tl.load(box_at, mask=known, other=0.0).to(tl.float32)
    half = 0.5 * tl.load(box_at + 2, mask=known, other=0.0).to(tl.float32)
    near, far = _encoded(place - (center - half)), _encoded(place - (center + half))
    head = tl.arange(0, BLOCK_N)
    acc = tl.zeros([ROWS, BLOCK_N], tl.float32)
    for start in range(0, hidden, BLOCK_H):
        at = start + tl.arange(0, BLOCK_H)
        inside = at < hidden
        first = tl.load(w_ptr + at * 2, mask=inside, other=0.0).to(tl.float32)
        second = tl.load(w_ptr + at * 2 + 1, mask=inside, other=0.0).to(tl.float32)
        shift = tl.load(b_ptr + at, mask=inside, other=0.0).to(tl.float32)
        h = near[:, None] * first[None, :] + far[:, None] * second[None, :] + shift[None, :]
        h = tl.where(h < 0.0, 0.0, h)  # NaN propagates
        out_w = tl.load(
            out_w_ptr + head[None, :] * hidden + at[:, None], mask=(head < heads)[None, :] & inside[:, None], other=0.0
        ).to(tl.float32)  # fmt: skip
        acc = tl.dot(h, out_w, acc, input_precision=PRECISION)
    acc += tl.load(out_b_ptr + head, mask=head < heads, other=0.0).to(tl.float32)[None, :]
    image, own = query // queries, query % queries
    out_at = ((image[:, None] * heads + head[None, :]) * queries + own[:, None]) * size + (rows % size)[
        :, None
    ]
    tl.store(
        out_ptr + out_at, acc.to(out_ptr.dtype.element_ty), mask=known[:, None] & (head < heads)[None, :]
    )


def _supports_triton(boxes: T, weight: T, bias: T, out_weight: T, out_bias: T, *_: object) -> str | None:
    wrong = [t.dtype for t in (boxes, weight, bias, out_weight, out_bias) if t.dtype not in FLOATS]
    if wrong:
        return f"boxes or weights have dtype {wrong[0]}, not float16, bfloat16 or float32"
    heads = out_weight.shape[0]
    return f"{heads} heads are over {MOST_HEADS}" if heads > MOST_HEADS else None


def _fake(boxes: T, weight: T, bias: T, out_weight: T, out_bias: T, size: int, vertical: bool) -> T:
    return weight.new_empty(boxes.shape[0], out_weight.shape[0], boxes.shape[1], size)


def _triton(boxes: T, weight: T, bias: T, out_weight: T, out_bias: T, size: int, vertical: bool) -> T:
    _check(boxes, weight, bias, out_weight, out_bias, size)
    out = _fake(boxes, weight, bias, out_weight, out_bias, size, vertical)
    if out.numel() == 0:
        return out
    count, (heads, hidden) = boxes.shape[0] * boxes.shape[1] * size, out_weight.shape
    exact = weight.dtype == torch.float32 and torch.get_float32_matmul_precision() == "highest"
    launch_kernel(
        _box_position_bias_kernel, (cdiv(count, ROWS),), boxes.contiguous(), weight.contiguous(), bias.contiguous(),
        out_weight.contiguous(), out_bias.contiguous(), out, count, boxes.shape[1], size, hidden, heads,
        VERTICAL=int(vertical), PRECISION="ieee" if exact else "tf32", ROWS=ROWS, BLOCK_H=HIDDEN,
        BLOCK_N=max(next_power_of_2(heads), 16), num_warps=4,
    )  # fmt: skip
    return out


box_position_bias = define(
    "box_position_bias(Tensor boxes, Tensor weight, Tensor bias, Tensor out_weight, Tensor out_bias, int size,"
    " bool vertical) -> Tensor",
    fake=_fake,
    providers=(
        Provider("triton", _triton, supports=_supports_triton),
        Provider("reference", lambda *args: reference(*args).contiguous(), devices=("cuda", "cpu")),
    ),
)


def _boxes(call: Call, shape: tuple[int, ...], dtype: torch.dtype) -> T:
    """Centers anywhere in the image, and sizes up to half of it."""
    return (call.rand(*shape) * torch.tensor([1.0, 1.0, 0.5, 0.5], device=call.device)).to(dtype)


def _case(name: str, tag: str, dtype: str = "bfloat16", weight: float = 1, **dims: object) -> Case:
    return Case(name, dims, dtype, weight, (tag,))


SPEC = OpSpec(
    name="box_position_bias",
    level=2,
    reference=reference,
    op=box_position_bias,
    cases=(  # SAM 3 at 1008 px: two axes of six decoder layers
        _case(
            "sam3_4", "model", weight=12, batch=4, queries=200, hidden=256, heads=8, size=72, vertical=False
        ),
        _case(
            "sam3_1", "model", weight=12, batch=1, queries=200, hidden=256, heads=8, size=72, vertical=True
        ),
        _case("one", "odd", "float32", batch=1, queries=1, hidden=1, heads=1, size=1, vertical=False),
        _case("odd_63", "odd", "float32", batch=2, queries=7, hidden=63, heads=3, size=9, vertical=True),
        _case("half", "odd", "float16", batch=1, queries=5, hidden=20, heads=4, size=11, vertical=False),
        _case("rough", "odd", batch=3, queries=3, hidden=33, heads=2, size=5, vertical=True),
        _case(
            "many_heads", "odd", "float32", batch=1, queries=2, hidden=16, heads=17, size=3, vertical=False
        ),
        _case("long", "odd", "float32", batch=1, queries=1, hidden=8, heads=2, size=129, vertical=True),
        _case("many", "odd", "float16", batch=2, queries=65, hidden=12, heads=1, size=4, vertical=False),
    ),
    arguments=(
        Tensor("boxes", "batch queries 4", "float32", values=_boxes),
        Tensor("weight", "hidden 2", values=fan_in),
        Tensor("bias", "hidden", std=0.5),
        Tensor("out_weight", "heads hidden", values=fan_in),
        Tensor("out_bias", "heads"),
        Scalar("size"),
        Scalar("vertical"),
    ),
    outputs=(Tensor("out", "batch heads queries size"),),
    axes={
        "batch": Axis.per_call(),
        "queries": Axis.count(),
        "hidden": Axis.width(),
        "heads": Axis.count(),
        "size": Axis(),
        "vertical": Axis(),
    },
    flops="2 * batch * queries * size * hidden * (2 + heads)",
)
