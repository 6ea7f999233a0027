"""small_ops.py: our kernels with other text, or other rows a program, in the place of what an op launches.

A change that pays is made in the op's own file: the text here is its text.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from functools import cache
from typing import Any

import triton

from fastkernels.overrides.l1 import _overlap, merge_state, rms_norm
from fastkernels.overrides.l1._launch import cdiv

Way = Callable[..., Any]
Setting = tuple[Any, str, Any]  # module, attribute, value
FIRST, STREAM = ', eviction_policy="evict_first"', ', cache_modifier=".cs"'

_X, _RESIDUAL = "cols, mask=mask, other=0.0\n", "tl.load(res_at, mask=mask, other=0.0"
_NORM_OUT, _NEW_RESIDUAL = (
    "y.to(out_ptr.dtype.element_ty), mask=mask",
    "h.to(res_ptr.dtype.element_ty), mask=mask",
)
_WEIGHT = "tl.load(w_ptr + cols, mask=mask, other=0.0"
_PREFIX, _SUFFIX = (f"mask=mask & ({side}_weight != 0.0)[:, None], other=0.0" for side in "ps")
_MERGED = "out.to(out_ptr.dtype.element_ty), mask=mask"
_PLACE = "token, head = (row // Q).to(tl.int64), (row % Q).to(tl.int64)"
# 8 tokens of ROWS // 8 heads, whose lse are neighbours where heads come first: whole sectors of 32 bytes. It is right
# where 8 divides the tokens and ROWS // 8 the heads.
_TILE = """heads_of = Q // (ROWS // 8)
    within = tl.arange(0, ROWS)
    token = (tl.program_id(0) // heads_of * 8 + within // (ROWS // 8)).to(tl.int64)
    head = (tl.program_id(0) % heads_of * (ROWS // 8) + within % (ROWS // 8)).to(tl.int64)"""

# Both sides are asked for together with their lse, and not behind them: also one that turns out not to count.
_WEIGHTS = '    minus_inf = float("-inf")\n'
_READ = """    every = tl.arange(0, BLOCK)
    inside = there[:, None] & (every < D)[None, :]
    from_p = p_ptr + (token * p_stride0 + head * p_stride1)[:, None] + every[None, :]
    from_s = s_ptr + (token * s_stride0 + head * s_stride1)[:, None] + every[None, :]
    p_read = tl.load(from_p, mask=inside & (token < with_context)[:, None], other=0.0{0})
    s_read = tl.load(from_s, mask=inside, other=0.0{0})
"""
_GIVEN = {
    f"{side} = tl.load({side}_at, mask=mask & ({side}_weight != 0.0)[:, None], other=0.0).to(tl.float32)":
    f"{side} = tl.where(({side}_weight != 0.0)[:, None], {side}_read.to(tl.float32), 0.0)"
    for side in "ps"
}  # fmt: skip


def after(more: str, *texts: str) -> dict[str, str]:
    return {text: text.rstrip("\n") + more + text[len(text.rstrip("\n")) :] for text in texts}


NORM = {
    "reads evict first": after(FIRST, _X, _RESIDUAL),
    "writes stream": after(STREAM, _NORM_OUT),
    "both": {**after(FIRST, _X, _RESIDUAL), **after(STREAM, _NORM_OUT, _NEW_RESIDUAL)},
    "both, the weight stays": {
        **after(FIRST, _X, _RESIDUAL), **after(STREAM, _NORM_OUT), **after(', eviction_policy="evict_last"', _WEIGHT),
    },
}  # fmt: skip
MERGE = {
    "reads evict first": after(FIRST, _PREFIX, _SUFFIX),
    "writes stream": after(STREAM, _MERGED),
    "both": {**after(FIRST, _PREFIX, _SUFFIX), **after(STREAM, _MERGED)},
    "at once": {_WEIGHTS: _READ.format("") + _WEIGHTS, **_GIVEN},
    "at once, both": {_WEIGHTS: _READ.format(FIRST) + _WEIGHTS, **_GIVEN, **after(STREAM, _MERGED)},
    "at once, tiles": {_PLACE: _TILE, _WEIGHTS: _READ.format("") + _WEIGHTS, **_GIVEN},
    "tiles": {_PLACE: _TILE},
    "tiles, both": {_PLACE: _TILE, **after(FIRST, _PREFIX, _SUFFIX), **after(STREAM, _MERGED)},
}


def text_of(kernel: Any, changes: Mapping[str, str]) -> str:
    """The kernel's text with changes. Raises ValueError for one that is not there once."""
    text = inspect.getsource(kernel.fn)
    text = text[text.index("def ") :]
    for old, new in changes.items():
        if text.count(old) != 1:
            raise ValueError(
                f"{kernel.__name__} has {old!r} {text.count(old)} times, not once: see small_ops_text.py"
            )
        text = text.replace(old, new)
    return text


def changed(kernel: Any, changes: Mapping[str, str]) -> Any:
    """A kernel of that text."""
    made = triton.jit(kernel.fn)
    made._unsafe_update_src(text_of(kernel, changes))
    return made


def with_text(module: Any, kernel: str, changes: Mapping[str, str], rows: int = 0, **options: Any) -> Setting:
    """For `launch_kernel` of that module: its kernel with other text, and with other options.

    rows  rows of a program, if not the op's: the grid has as many programs fewer or more
    """

    @cache
    def made() -> Any:
        return changed(getattr(module, kernel), changes)

    def launch(_: Any, grid: tuple[int, ...], *args: Any, **rest: Any) -> None:
        if rows:
            grid, rest = (cdiv(grid[0] * rest["ROWS"], rows),), {**rest, "ROWS": rows}
        _overlap.launch_kernel(made(), grid, *args, **{**rest, **options})

    return module, "launch_kernel", launch


def norms() -> dict[str, Setting]:
    """Of a norm of long rows. The op's own has 8 warps for 4,096 channels."""
    kernel = "_rms_norm_kernel"
    found = {
        f"{name}, {warps} warps": with_text(rms_norm, kernel, changes, num_warps=warps)
        for name, changes in NORM.items()
        for warps in (4, 8)
    }
    for name in ("", "both"):  # all warps of a multiprocessor are at work
        found[f"{name} 8 warps of 32 registers"] = with_text(
            rms_norm, kernel, NORM.get(name, {}), num_warps=8, maxnreg=32
        )
    return found


def merges() -> dict[str, Setting]:
    """Of many pairs of token and head. The op's own has 16 rows of 128 and 4 warps."""
    kernel = "_merge_state_kernel"
    found = {name: with_text(merge_state, kernel, changes) for name, changes in MERGE.items()}
    for rows, warps in ((8, 1), (8, 2), (8, 4), (16, 8), (32, 4), (32, 8)):
        found[f"{rows} rows, {warps} warps"] = with_text(merge_state, kernel, {}, rows, num_warps=warps)
    for rows, warps in ((8, 2), (16, 8), (32, 4)):
        for name in ("at once", "at once, tiles"):
            found[f"{rows} rows, {warps} warps, {name}"] = with_text(
                merge_state, kernel, MERGE[name], rows, num_warps=warps
            )
    return found
