"""Tests of quality_noise.py: a model compared with itself with sums in another order."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from fk_bench.core.rows import read

sys.path.insert(0, str(Path(__file__).parents[3] / "bench"))

from experiments.quality import quality_noise


def command(monkeypatch: pytest.MonkeyPatch, *arguments: object) -> int:
    monkeypatch.setattr(sys, "argv", ["quality_noise.py", *map(str, arguments)])
    with pytest.raises(SystemExit) as ended:
        quality_noise.main()
    return int(ended.value.code or 0)


def test_halved_sums_change_only_last_bits() -> None:
    torch.manual_seed(0)
    # With fewer channels than 2,000, some CPUs add up the halves of a product in any case.
    x, weight, matrix = torch.randn(64, 2000), torch.rand(2000), torch.randn(96, 2000)
    pairs = {
        "norms": [quality_noise.norm(x, weight, 1e-5, halves) for halves in (False, True)],
        "linears": [quality_noise.linear(x, matrix, halves) for halves in (False, True)],
    }
    wanted = {"norms": F.rms_norm(x, (2000,), weight, 1e-5), "linears": F.linear(x.double(), matrix.double())}
    for name, (whole, halves) in pairs.items():
        assert not torch.equal(whole, halves), name
        for found in (whole, halves):
            torch.testing.assert_close(found.double(), wanted[name].double(), rtol=1e-4, atol=1e-4)
    assert quality_noise.linear(x.bfloat16(), matrix.bfloat16(), True).dtype == torch.bfloat16


def test_same_order_is_equal_and_other_order_differs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from support.tiny import make_tiny_llama

    model = make_tiny_llama(tmp_path / "llama", dtype="bfloat16")
    out = tmp_path / "rows.jsonl"
    assert command(monkeypatch, model, "--out", out, "--tokens", 200, "--length", 64) == 0
    rows, _ = read(out)
    assert [row.case["halves"] for row in rows] == ["nothing", "norms", "linears", "both"]
    assert {row.metrics["tokens"] for row in rows} == {4 * 63}
    assert rows[0].metrics["kl"] == 0.0
    for row in rows[1:]:
        assert 0 < row.metrics["kl"] < 0.01
    for row in rows:  # bfloat16 is not float32, and nothing is far from it
        assert 0 < row.metrics["kl_exact"] < 0.01


def test_float8_differs_more_and_scales_tokens(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from support.tiny import make_tiny_llama

    model = make_tiny_llama(tmp_path / "llama", dtype="bfloat16")
    found = {}
    for name, more in (("bf16", ()), ("fp8", ("--fp8",))):
        out = tmp_path / f"{name}.jsonl"
        assert command(monkeypatch, model, "--out", out, "--tokens", 200, "--length", 64, *more) == 0
        found[name], _ = read(out)
    assert all(row.case.get("weights") == "fp8" for row in found["fp8"])
    unchanged = found["fp8"][0].metrics
    assert unchanged["kl"] == unchanged["perplexity_rel"] == unchanged["perplexity_rel_se"] == 0
    assert unchanged["kl_exact"] > 3 * found["bf16"][0].metrics["kl_exact"]
    away = [abs(row.metrics["perplexity_rel"]) for row in found["fp8"][1:]]
    assert max(away) > 0  # of a small model no float8 number need change
    assert all(
        far <= 8 * row.metrics["perplexity_rel_se"] for far, row in zip(away, found["fp8"][1:], strict=True)
    )
    x, matrix = (
        torch.randn(3, 64) * torch.tensor([[1e-3], [1.0], [1e3]]),
        torch.randn(8, 64).to(quality_noise.FP8),
    )
    got = quality_noise.linear(x, matrix.float(), False, torch.full((8, 1), 0.5))
    wanted = 0.5 * x @ matrix.float().t()
    assert ((got - wanted).norm(dim=1) < 0.05 * wanted.norm(dim=1)).all()


def test_nondeterministic_model_fails(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from support.tiny import make_tiny_llama

    model = make_tiny_llama(tmp_path / "llama", dtype="bfloat16")
    whole = quality_noise.linear

    def noisy(x: torch.Tensor, weight: torch.Tensor, *how: object) -> torch.Tensor:
        return whole(x, weight, *how) + 0.01 * torch.randn(len(weight), dtype=x.dtype)

    monkeypatch.setattr(quality_noise, "linear", noisy)
    out = tmp_path / "rows.jsonl"
    assert command(monkeypatch, model, "--out", out, "--tokens", 20, "--length", 16) == 1
    (first, *_), _ = read(out)
    assert first.status == "wrong" and first.reason.startswith("KL from itself is")


def test_models_with_unknown_sums_are_refused() -> None:
    with pytest.raises(ValueError, match="has a bias"):
        quality_noise.change(torch.nn.Sequential(torch.nn.Linear(4, 4)), ())
    with pytest.raises(ValueError, match="no RMS norm"):
        quality_noise.change(torch.nn.Sequential(torch.nn.Linear(4, 4, bias=False)), ())
