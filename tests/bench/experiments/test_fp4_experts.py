"""Tests of fp4_experts.py: rows of both formats, and wrong kernels, which are not timed."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).parents[3] / "bench"))
from experiments.moe import fp4_experts

SMALL = {"mx": ("mxfp4", 4, 2, 64, 96), "nv": ("nvfp4", 4, 2, 64, 96)}


def run(monkeypatch: pytest.MonkeyPatch, out: Path, *options: str) -> tuple[int, list[dict[str, Any]]]:
    """Return main's status and rows on this CPU."""
    monkeypatch.setattr(fp4_experts, "CASES", SMALL)
    command = ["fp4_experts.py", "--out", str(out), "--device", "cpu", "--quick", *options]
    monkeypatch.setattr(sys, "argv", command)
    status = fp4_experts.main()
    return status, [json.loads(line) for line in out.read_text().splitlines()] if out.exists() else []


def test_each_format_and_number_of_tokens_has_a_time(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    status, rows = run(monkeypatch, tmp_path / "rows.jsonl", "--cases", "mx,nv", "--tokens", "3,1")
    assert status == 0
    found = [(r["subject"]["op"], r["case"]["tokens"], r["status"]) for r in rows]
    ops = "fused_experts_swigluoai", "fused_experts_nvfp4"
    assert found == [(op, tokens, "ok") for op in ops for tokens in (3, 1)]
    assert all(r["metrics"]["us"] > 0 for r in rows)


def test_wrong_kernel_is_reported_and_not_timed(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    right = fp4_experts.fused_experts_nvfp4._torch
    monkeypatch.setattr(fp4_experts.fused_experts_nvfp4, "_torch", lambda *args: right(*args) * 1.1)
    status, rows = run(monkeypatch, tmp_path / "rows.jsonl", "--cases", "nv", "--tokens", "3")
    assert status == 1
    assert [(r["case"]["kind"], r["status"]) for r in rows] == [("check", "wrong")]
    assert "its relative error is 0." in rows[0]["reason"]


def test_unknown_case_is_refused(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        run(monkeypatch, tmp_path / "rows.jsonl", "--cases", "mx,gpt-9")
    assert "--cases: gpt-9 is not one of mx, nv" in capsys.readouterr().err
