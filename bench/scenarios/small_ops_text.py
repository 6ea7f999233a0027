"""small_ops.py: our kernels with other text, tiles or rows a program, in the place of what an op launches.

A change that pays is made in the op's own file: the text here is its text.
"""

from __future__ import annotations

import inspect
import linecache
from collections.abc import Callable, Mapping
from functools import cache
from typing import Any

import triton

from fastkernels.overrides.activation import relu2, silu_and_mul
from fastkernels.overrides.attention import merge_state
from fastkernels.overrides.kit import elementwise as _elementwise
from fastkernels.overrides.kit import overlap as _overlap
from fastkernels.overrides.kit.launch import cdiv
from fastkernels.overrides.norm import gemma_rms_norm

Way = Callable[..., Any]
Setting = tuple[Any, str, Any]  # module, attribute, value
FIRST = ', eviction_policy="evict_first"'
STREAM = ', cache_modifier=".cs"'


def after(more: str, *texts: str) -> dict[str, str]:
    return {text: text.rstrip("\n") + more + text[len(text.rstrip("\n")) :] for text in texts}


# Of a contiguous tensor, which is one row: no division finds a tile's place.
FLAT = {
    "    row = (pid // n_tiles).to(tl.int64)\n": "",
    "(pid % n_tiles).to(tl.int64) * TILE": "pid.to(tl.int64) * TILE",
    "x_ptr + (row // n_inner) * stride0 + (row % n_inner) * stride1 + cols": "x_ptr + cols",
    "out_ptr + row * D + cols": "out_ptr + cols",
}
RELU2_STREAM = after(STREAM, "(y * y).to(out_ptr.dtype.element_ty), mask=cols < D")
SILU = {
    "reads evict first": after(
        FIRST, "tl.load(x_at, mask=mask, other=0.0", "tl.load(x_at + D, mask=mask, other=0.0"
    ),
    "writes stream": after(STREAM, "(silu * up).to(out_ptr.dtype.element_ty), mask=mask"),
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
    """A kernel of that text, also where kernels are interpreted. Triton reads it as it would out of a file."""
    text = text_of(kernel, changes)
    file, names = f"<{kernel.__name__} {hash(text):x}>", dict(kernel.fn.__globals__)
    linecache.cache[file] = len(text), None, text.splitlines(keepends=True), file
    exec(compile(text, file, "exec"), names)
    return triton.jit(names[kernel.__name__])


def with_text(module: Any, kernel: str, changes: Mapping[str, str], **options: Any) -> Setting:
    """For `launch_kernel` of that module: its kernel with other text, and with other options."""

    @cache
    def made() -> Any:
        return changed(getattr(module, kernel), changes)

    def launch(_: Any, grid: tuple[int, ...], *args: Any, **rest: Any) -> None:
        _overlap.launch_kernel(made(), grid, *args, **{**rest, **options})

    return module, "launch_kernel", launch


def in_tiles(
    module: Any,
    kernel: str,
    tile: int,
    warps: int,
    changes: Mapping[str, str] | None = None,
    where: Any = None,
) -> Setting:
    """For `launch_kernel` of the module `where`: a kernel of rows cut into tiles, with tiles of another size.

    where  the module that launches it, if not its own
    """

    @cache
    def made() -> Any:
        return changed(getattr(module, kernel), changes or {})

    def launch(_: Any, grid: tuple[int, ...], *args: Any, **rest: Any) -> None:
        names = made().arg_names
        size, count = ("TILE", "n_tiles") if "TILE" in names else ("BLOCK", "n_blocks")
        now, at = list(args), names.index(count)
        now[at] = cdiv(args[names.index("D")], tile)
        grid = (grid[0] // args[at] * now[at],)
        _overlap.launch_kernel(made(), grid, *now, **{**rest, size: tile, "num_warps": warps})

    return where or module, "launch_kernel", launch


def relu2s() -> dict[str, Setting]:
    """The op's own has tiles of 1,024 and 4 warps; Inductor's too, or of 512 and 8, and no rows."""
    sets: list[tuple[str, int, int, dict[str, str]]] = [
        ("", 2048, 4, {}), ("", 4096, 4, {}), ("flat ", 1024, 4, FLAT), ("flat ", 2048, 8, FLAT),
        ("flat, writes stream ", 1024, 4, {**FLAT, **RELU2_STREAM}),
    ]  # fmt: skip
    return {
        f"{name}{tile}/{warps}": in_tiles(relu2, "_relu2_kernel", tile, warps, changes, _elementwise)
        for name, tile, warps, changes in sets
    }


def silus() -> dict[str, Setting]:
    """The op's own has tiles of 1,024 and 4 warps."""
    kernel = "_silu_and_mul_kernel"
    sizes = ((512, 2), (512, 8), (1024, 2), (2048, 4), (2048, 8))
    found = {f"{tile}/{warps}": in_tiles(silu_and_mul, kernel, tile, warps) for tile, warps in sizes}
    return {**found, **{name: with_text(silu_and_mul, kernel, changes) for name, changes in SILU.items()}}


def norms(module: Any) -> dict[str, Setting]:
    """Of many long rows: rms_norm or gemma_rms_norm. The ops' own read them twice, with 16 warps for 4,096 channels."""
    kernel = "_gemma_rms_norm_kernel" if module is gemma_rms_norm else "_rms_norm_kernel"
    return {
        f"{'twice' if twice else 'once'}, {warps} warps": with_text(
            module, kernel, {}, num_warps=warps, TWICE=twice
        )
        for twice, warps in ((False, 8), (False, 16), (True, 8))
    }


def merges() -> dict[str, Setting]:
    """Of many pairs of token and head, the heads first. The op's own has 8 rows, a head of 8 tokens, and a warp."""

    def setting(rows: int, warps: int) -> Setting:
        def launch(kernel: Any, grid: tuple[int, ...], *args: Any, **rest: Any) -> None:
            grid = (cdiv(grid[0] * rest["ROWS"], rows),)
            more = {"ROWS": rows, "HEADS": rows // 8, "num_warps": warps}
            _overlap.launch_kernel(kernel, grid, *args, **{**rest, **more})

        return merge_state, "launch_kernel", launch

    return {f"{r} rows, {w} warps": setting(r, w) for r, w in ((8, 2), (16, 2), (16, 4), (32, 4))}
