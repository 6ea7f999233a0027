"""Tests of overlapped launches: kernels that start early wait for the previous kernel before they read memory."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest
import torch

import fastkernels.overrides
from fastkernels.overrides.kit.overlap import MOST, overlap, overlaps

FILES = sorted(Path(fastkernels.overrides.__file__).parent.rglob("*.py"))


def kernels(tree: ast.Module) -> dict[str, ast.FunctionDef]:
    """Return {name: function} of the functions with triton.jit."""
    found = [n for n in tree.body if isinstance(n, ast.FunctionDef)]
    return {n.name: n for n in found if any("jit" in ast.unparse(d) for d in n.decorator_list)}


def launched_early(tree: ast.Module) -> set[str]:
    """Return kernels of `launch_kernel(name)`, `name[grid](**overlap(device))` and `elementwise.launch(name)`."""
    names = set()
    for call in (n for n in ast.walk(tree) if isinstance(n, ast.Call)):
        starred = [ast.unparse(k.value) for k in call.keywords if k.arg is None]
        if any(s.startswith("overlap(") for s in starred) and isinstance(call.func, ast.Subscript):
            names.add(ast.unparse(call.func.value))
        if ast.unparse(call.func) in ("_elementwise.launch", "elementwise.launch", "launch_kernel"):
            names.add(ast.unparse(call.args[0]))
    return names - {"kernel"}


def test_every_early_kernel_waits_first() -> None:
    count = 0
    trees = {path: ast.parse(path.read_text()) for path in FILES}
    imported = {name for tree in trees.values() for name in launched_early(tree) - kernels(tree).keys()}
    for path, tree in trees.items():
        found = kernels(tree)
        early = found.keys() & (launched_early(tree) | imported)
        for name in early:
            first = next(
                s for s in found[name].body if not isinstance(s, ast.Expr) or "follow" in ast.unparse(s)
            )
            assert ast.unparse(first) == "follow(OVERLAP)", f"{path.name}: {name}"
            assert "OVERLAP" in [a.arg for a in found[name].args.args], f"{path.name}: {name}"
            count += 1
        waiting = {n for n, f in found.items() if any("follow(OVERLAP)" in ast.unparse(s) for s in f.body)}
        assert waiting == early, path.name
    assert count > 20


def test_overlap_can_be_disabled(monkeypatch: pytest.MonkeyPatch) -> None:
    """Check the rule with a fake device capability."""
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    for value, early in (("0", False), ("1", True), ("", True)):
        monkeypatch.setenv("FASTKERNELS_OVERLAP", value)
        overlaps.cache_clear()
        assert overlaps(torch.device("cuda", 0)) is early
        assert overlap(torch.device("cuda", 0)).get("launch_pdl", False) is early
        assert overlap(torch.device("cuda", 0), (MOST, 2)) == {"OVERLAP": False}
        assert overlap(torch.device("cuda", 0), early=False) == {"OVERLAP": False}
        assert not overlaps(torch.device("cpu"))
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (8, 0))
    overlaps.cache_clear()
    assert overlap(torch.device("cuda", 0)) == {"OVERLAP": False}
    overlaps.cache_clear()


@pytest.mark.gpu
def test_overlapped_chain_equals_sequential_calls() -> None:
    """In a graph, each kernel reads the output of the previous one and never reads too early."""
    from fastkernels.overrides.activation.silu_and_mul import silu_and_mul
    from fastkernels.overrides.norm.rms_norm import rms_norm

    weight = torch.rand(4096, device="cuda", dtype=torch.bfloat16) + 0.5
    x = torch.randn(64, 8192, device="cuda", dtype=torch.bfloat16)

    def chain(x: torch.Tensor, alone: bool) -> torch.Tensor:
        for _ in range(50):
            y = silu_and_mul(x)
            if alone:
                torch.cuda.synchronize()
            y = rms_norm(y, weight, 1e-5)
            if alone:
                torch.cuda.synchronize()
            x = torch.cat([y, y.flip(0)], dim=-1)
        return x

    want = chain(x, True)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        got = chain(x, False)
    for _ in range(20):
        got.fill_(float("nan"))
        graph.replay()
        torch.cuda.synchronize()
        assert torch.equal(got, want)
