"""small_ops.py: a norm of long rows by as many programs as the chip holds, each of which does several rows in turn."""

from __future__ import annotations

from typing import Any

import triton
import triton.language as tl


@triton.jit
def _loop_kernel(
    x_ptr, res_ptr, w_ptr, out_ptr, n_rows, eps, H: tl.constexpr, PLUS: tl.constexpr, AHEAD: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    # Rows follow each other without a gap; PLUS is added to the weight, which is read once.
    cols = tl.arange(0, BLOCK)
    inside = cols < H
    weight = PLUS + tl.load(w_ptr + cols, mask=inside, other=0.0).to(tl.float32)
    step = tl.num_programs(0)
    first = tl.program_id(0).to(tl.int64) * H + cols
    next_x = tl.load(x_ptr + first, mask=inside, other=0.0)
    next_res = tl.load(res_ptr + first, mask=inside, other=0.0)
    for row in range(tl.program_id(0), n_rows, step):
        at = tl.cast(row, tl.int64) * H + cols
        if AHEAD:  # the next row is on its way while this one is added up
            x, res = next_x, next_res
            then = inside & (row + step < n_rows)
            next_x = tl.load(x_ptr + at + step * H, mask=then, other=0.0)
            next_res = tl.load(res_ptr + at + step * H, mask=then, other=0.0)
        else:
            x = tl.load(x_ptr + at, mask=inside, other=0.0)
            res = tl.load(res_ptr + at, mask=inside, other=0.0)
        h = x.to(tl.float32) + res.to(tl.float32)
        tl.store(res_ptr + at, h.to(res.dtype), mask=inside)
        scale = tl.rsqrt(tl.sum(h * h, axis=0) / H + eps)
        tl.store(out_ptr + at, (h * scale * weight).to(x.dtype), mask=inside)


def in_a_loop(module: Any, programs: int, warps: int, ahead: bool) -> tuple[Any, str, Any]:
    """For `launch_kernel` of rms_norm or gemma_rms_norm, of contiguous x and residual.

    programs  in all: 132 times those of a multiprocessor of an H200
    ahead     each reads its next row before it adds up this one
    """
    plus = 1.0 if module.__name__.endswith("gemma_rms_norm") else 0.0

    def launch(
        _: Any, grid: tuple[int, ...], x: Any, res: Any, w: Any, out: Any, *rest: Any, **how: Any
    ) -> None:
        count, eps, hidden = grid[0], rest[-1], x.shape[-1]
        _loop_kernel[(min(programs, count),)](
            x, res, w, out, count, eps, H=hidden, PLUS=plus, AHEAD=ahead, BLOCK=how["BLOCK"], num_warps=warps
        )

    return module, "launch_kernel", launch
