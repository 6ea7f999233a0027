"""Tests of launch parameters of small kernels that were tuned on a GPU."""

from __future__ import annotations

import ast
from pathlib import Path
from typing import Any

import pytest
import torch

from fastkernels.overrides.activation import gelu_and_mul
from fastkernels.overrides.norm import (
    gemma_rms_norm,
    l2_norm,
    layer_norm,
    rms_norm,
    rms_norm_heads,
    t5_layer_norm,
)

NORMS = (rms_norm, gemma_rms_norm, layer_norm, t5_layer_norm)


def line(kernel: ast.FunctionDef, name: str, pick: Any) -> int:
    """Return the first or last line (pick is min or max) of the first pass on which the kernel calls tl.<name>."""
    again = [n for n in ast.walk(kernel) if isinstance(n, ast.If) and ast.unparse(n.test) == "TWICE"]
    left_out = {id(inner) for n in again for inner in ast.walk(n)}
    return pick(
        n.lineno
        for n in ast.walk(kernel)
        if isinstance(n, ast.Call) and ast.unparse(n.func) == f"tl.{name}" and id(n) not in left_out
    )


@pytest.mark.parametrize("module", NORMS, ids=lambda m: m.__name__.rpartition(".")[2])
def test_norms_issue_all_loads_before_the_sum(module: Any) -> None:
    """A compiler does not move a load across the barriers of a sum; a late load makes a decode step wait twice."""
    tree = ast.parse(Path(module.__file__).read_text())
    (kernel,) = (n for n in tree.body if isinstance(n, ast.FunctionDef) and n.name.endswith("_kernel"))
    assert line(kernel, "load", max) < line(kernel, "sum", min)


class Launches:
    """Replace a kernel that a CPU cannot launch, and record the grid and arguments of each launch."""

    def __init__(self) -> None:
        self.seen: list[tuple[tuple[int, ...], tuple[Any, ...], dict[str, Any]]] = []

    def __getitem__(self, grid: tuple[int, ...]) -> Any:
        return lambda *args, **options: self.seen.append((grid, args, options))


def test_l2_norm_merges_contiguous_dimensions(monkeypatch: pytest.MonkeyPatch) -> None:
    """Otherwise every thread divides 64-bit integers to find its rows."""
    kernel = Launches()
    monkeypatch.setattr(l2_norm, "_l2_norm_kernel", kernel)
    l2_norm._triton(torch.randn(63, 3, 100))
    l2_norm._triton(torch.randn(63, 6, 100)[:, ::2])
    l2_norm._triton(torch.empty(1, 2048, 16, 128, dtype=torch.bfloat16))
    ((_, args, _), (_, strided, _), (grid, _, options)) = kernel.seen
    assert args[2:5] == (1, 100, 0) and strided[2:5] == (3, 600, 200)
    assert options["ROWS"] == 16 and grid == (2048,)


@pytest.mark.parametrize(
    ("hidden", "warps", "unit"), [(1024, 2, 8), (1000, 2, 8), (1001, 8, 1), (4096, 8, 8), (300, 4, 4)]
)
def test_rms_norm_warps_depend_on_alignment(
    hidden: int, warps: int, unit: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Sizes are passed in units: with a unit of 8, Triton knows that rows are aligned to 16 bytes."""
    kernel = Launches()
    monkeypatch.setattr(rms_norm, "_rms_norm_kernel", kernel)
    rms_norm._triton(torch.randn(2, hidden), torch.ones(hidden), 1e-5)
    ((_, args, options),) = kernel.seen
    assert (options["num_warps"], options["UNIT"]) == (warps, unit)
    assert args[4:10] == (hidden // unit, 0, 0, 0, 1, hidden // unit)


@pytest.mark.parametrize(
    ("rows", "d", "at_once", "warps"), [(189, 100, 1, 1), (8192, 100, 4, 1), (45, 65, 1, 1), (189, 96, 8, 4)]
)
def test_l2_norm_gives_unaligned_heads_one_warp_each(
    rows: int, d: int, at_once: int, warps: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    kernel = Launches()
    monkeypatch.setattr(l2_norm, "_l2_norm_kernel", kernel)
    l2_norm._triton(torch.empty(rows, d))
    ((grid, _, options),) = kernel.seen
    assert grid == (-(-rows // at_once),) and (options["ROWS"], options["num_warps"]) == (at_once, warps)


@pytest.mark.parametrize(("hidden", "rows"), [(128, 8), (64, 16), (100, 8), (256, 4)])
@pytest.mark.parametrize("tokens", [1, 256])
def test_rms_norm_rows_per_program_are_independent_of_tokens(
    tokens: int, hidden: int, rows: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One head per program gives 8192 programs of 32 threads at 256 tokens. The order of sums must not change."""
    kernel = Launches()
    monkeypatch.setattr(rms_norm_heads, "_rms_norm_heads_kernel", kernel)
    rms_norm._triton(torch.randn(tokens, 48, hidden)[:, :32], torch.ones(hidden), 1e-5)
    ((grid, args, options),) = kernel.seen
    assert grid == (tokens * 32 // rows,) and options["ROWS"] == rows
    assert args[4:10] == (48 * hidden, hidden, 0, 0, 32, tokens * 32)


@pytest.mark.parametrize(
    ("tokens", "how", "block"), [(32, "none", 512), (32, "tanh", 1024), (8192, "none", 1024)]
)
def test_gelu_and_mul_uses_small_blocks_for_few_tokens(
    tokens: int, how: str, block: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    kernel = Launches()
    monkeypatch.setattr(gelu_and_mul, "_gelu_and_mul_kernel", kernel)
    gelu_and_mul._triton(torch.empty(tokens, 2 * 14336, dtype=torch.bfloat16), how)
    assert kernel.seen[0][2]["BLOCK"] == block


def test_layer_norm_copies_channels_that_are_not_adjacent(monkeypatch: pytest.MonkeyPatch) -> None:
    kernel, x = Launches(), torch.randn(2, 24, 4, 5).permute(0, 2, 3, 1)  # an image as a convolution gives it
    monkeypatch.setattr(layer_norm, "_layer_norm_kernel", kernel)
    assert layer_norm._supports_triton(x, None, None, 1e-5) is None
    layer_norm._triton(x, None, None, 1e-5)
    ((grid, args, _),) = kernel.seen
    assert grid == (40,) and torch.equal(args[0], x) and args[0].is_contiguous() and args[4:7] == (1, 24, 0)
