"""How small kernels are laid over their tensors: what was measured or counted on the chip must not come undone."""

from __future__ import annotations

import ast
from pathlib import Path
from typing import Any

import pytest
import torch

from fastkernels.overrides.activation import gelu_and_mul
from fastkernels.overrides.norm import gemma_rms_norm, l2_norm, layer_norm, rms_norm, t5_layer_norm
from fastkernels.overrides.norm import rms_norm_heads as _rms_norm_heads

NORMS = (rms_norm, gemma_rms_norm, layer_norm, t5_layer_norm)


def line(kernel: ast.FunctionDef, name: str, pick: Any) -> int:
    """The first or last line (pick is min or max) on which the kernel calls tl.<name>, but for what it reads twice."""
    again = [n for n in ast.walk(kernel) if isinstance(n, ast.If) and ast.unparse(n.test) == "TWICE"]
    left_out = {id(inner) for n in again for inner in ast.walk(n)}
    return pick(
        n.lineno
        for n in ast.walk(kernel)
        if isinstance(n, ast.Call) and ast.unparse(n.func) == f"tl.{name}" and id(n) not in left_out
    )


@pytest.mark.parametrize("module", NORMS, ids=lambda m: m.__name__.rpartition(".")[2])
def test_all_of_a_norm_is_on_its_way_before_the_first_wait(module: Any) -> None:
    """No compiler moves the load of a weight over the sum's barriers, and a decode step waits for memory twice."""
    tree = ast.parse(Path(module.__file__).read_text())
    (kernel,) = (n for n in tree.body if isinstance(n, ast.FunctionDef) and n.name.endswith("_kernel"))
    assert line(kernel, "load", max) < line(kernel, "sum", min)


class Launches:
    """Stands for a kernel that no CPU can launch: keeps the grid and the arguments of each launch."""

    def __init__(self) -> None:
        self.seen: list[tuple[tuple[int, ...], tuple[Any, ...], dict[str, Any]]] = []

    def __getitem__(self, grid: tuple[int, ...]) -> Any:
        return lambda *args, **options: self.seen.append((grid, args, options))


def test_rows_of_a_contiguous_tensor_are_one_run(monkeypatch: pytest.MonkeyPatch) -> None:
    """Else every thread divides 64-bit numbers to find its rows."""
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
def test_rows_that_begin_anywhere_have_more_threads(
    hidden: int, warps: int, unit: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Sizes are in units that they are divided by: with 8 of them Triton knows that rows begin at 16 bytes."""
    kernel = Launches()
    monkeypatch.setattr(rms_norm, "_rms_norm_kernel", kernel)
    rms_norm._triton(torch.randn(2, hidden), torch.ones(hidden), 1e-5)
    ((_, args, options),) = kernel.seen
    assert (options["num_warps"], options["UNIT"]) == (warps, unit)
    assert args[4:10] == (hidden // unit, 0, 0, 0, 1, hidden // unit)


@pytest.mark.parametrize(
    ("rows", "d", "at_once", "warps"), [(189, 100, 1, 1), (8192, 100, 4, 1), (45, 65, 1, 1), (189, 96, 8, 4)]
)
def test_heads_that_begin_anywhere_have_a_warp_of_their_own(
    rows: int, d: int, at_once: int, warps: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    kernel = Launches()
    monkeypatch.setattr(l2_norm, "_l2_norm_kernel", kernel)
    l2_norm._triton(torch.empty(rows, d))
    ((grid, _, options),) = kernel.seen
    assert grid == (-(-rows // at_once),) and (options["ROWS"], options["num_warps"]) == (at_once, warps)


@pytest.mark.parametrize(("hidden", "rows"), [(128, 8), (64, 16), (100, 8), (256, 4)])
@pytest.mark.parametrize("tokens", [1, 256])
def test_heads_are_several_a_program_at_any_number_of_tokens(
    tokens: int, hidden: int, rows: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One at a time they were 8192 programs of 32 threads at 256 tokens; another order of sums would be other bits."""
    kernel = Launches()
    monkeypatch.setattr(_rms_norm_heads, "_rms_norm_heads_kernel", kernel)
    rms_norm._triton(torch.randn(tokens, 48, hidden)[:, :32], torch.ones(hidden), 1e-5)
    ((grid, args, options),) = kernel.seen
    assert grid == (tokens * 32 // rows,) and options["ROWS"] == rows
    assert args[4:10] == (48 * hidden, hidden, 0, 0, 32, tokens * 32)


@pytest.mark.parametrize(
    ("tokens", "how", "block"), [(32, "none", 512), (32, "tanh", 1024), (8192, "none", 1024)]
)
def test_few_programs_of_erf_are_smaller(
    tokens: int, how: str, block: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    kernel = Launches()
    monkeypatch.setattr(gelu_and_mul, "_gelu_and_mul_kernel", kernel)
    gelu_and_mul._triton(torch.empty(tokens, 2 * 14336, dtype=torch.bfloat16), how)
    assert kernel.seen[0][2]["BLOCK"] == block
