"""bench/scenarios/quality_noise.py: one model beside itself where sums are taken in another order."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from fk_bench.rows import read

sys.path.insert(0, str(Path(__file__).parents[2] / "bench" / "scenarios"))
sys.path.insert(0, str(Path(__file__).parents[1] / "support"))

import quality_noise


def command(monkeypatch: pytest.MonkeyPatch, *arguments: object) -> int:
    monkeypatch.setattr(sys, "argv", ["quality_noise.py", *map(str, arguments)])
    with pytest.raises(SystemExit) as ended:
        quality_noise.main()
    return int(ended.value.code or 0)


def test_halves_change_the_last_bits_alone() -> None:
    torch.manual_seed(0)
    x, weight, matrix = torch.randn(64, 576), torch.rand(576), torch.randn(96, 576)
    pairs = {
        "norms": [quality_noise.norm(x, weight, 1e-5, halves) for halves in (False, True)],
        "linears": [quality_noise.linear(x, matrix, halves) for halves in (False, True)],
    }
    wanted = {"norms": F.rms_norm(x, (576,), weight, 1e-5), "linears": F.linear(x.double(), matrix.double())}
    for name, (whole, halves) in pairs.items():
        assert not torch.equal(whole, halves), name
        for found in (whole, halves):
            torch.testing.assert_close(found.double(), wanted[name].double(), rtol=1e-4, atol=1e-4)
    assert quality_noise.linear(x.bfloat16(), matrix.bfloat16(), True).dtype == torch.bfloat16


def test_a_model_is_itself_twice_and_another_one_in_another_order(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from tiny import make_tiny_llama

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


def test_a_model_that_is_not_itself_is_a_fault(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from tiny import make_tiny_llama

    model = make_tiny_llama(tmp_path / "llama", dtype="bfloat16")
    whole = quality_noise.linear

    def noisy(x: torch.Tensor, weight: torch.Tensor, halves: bool) -> torch.Tensor:
        return whole(x, weight, halves) + 0.01 * torch.randn(len(weight), dtype=x.dtype)

    monkeypatch.setattr(quality_noise, "linear", noisy)
    out = tmp_path / "rows.jsonl"
    assert command(monkeypatch, model, "--out", out, "--tokens", 20, "--length", 16) == 1
    (first, *_), _ = read(out)
    assert first.status == "wrong" and first.reason.startswith("KL from itself is")


def test_only_models_whose_sums_are_known_are_taken() -> None:
    with pytest.raises(ValueError, match="has a bias"):
        quality_noise.change(torch.nn.Sequential(torch.nn.Linear(4, 4)), ())
    with pytest.raises(ValueError, match="no RMS norm"):
        quality_noise.change(torch.nn.Sequential(torch.nn.Linear(4, 4, bias=False)), ())
