"""Tests of mxfp4_experts.py: plans reach both products, and wrong kernels are reported instead of timed."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parents[3] / "bench"))
from experiments.moe import mxfp4_experts

from fastkernels.overrides.moe import fused_experts_swigluoai as op


def run(monkeypatch: pytest.MonkeyPatch, out: Path, *options: str) -> tuple[int, list[dict[str, Any]]]:
    """Return main's status and rows on this CPU."""
    monkeypatch.setattr(
        sys, "argv", ["mxfp4_experts.py", "--out", str(out), "--device", "cpu", "--quick", *options]
    )
    status = mxfp4_experts.main()
    return status, [json.loads(line) for line in out.read_text().splitlines()] if out.exists() else []


@pytest.mark.parametrize(
    ("tokens", "params"), [(64, {"rows": 3, "ahead": 1}), (65, {"stages": 3, "skew": 0})]
)
def test_planned_call_changes_both_plans_and_restores(
    monkeypatch: pytest.MonkeyPatch, tokens: int, params: dict[str, int]
) -> None:
    found = []

    def call(*args: Any) -> torch.Tensor:
        ids = torch.zeros(tokens, 4, dtype=torch.int32)
        found.extend(op._plans(ids, *[torch.empty(32, 64, 32)] * 2, None))
        if args:
            raise RuntimeError("not captured")
        return torch.empty(0)

    monkeypatch.setattr(op, "_cuda", call)
    mxfp4_experts.planned(params)
    assert [{**p._asdict(), **params} == p._asdict() for p in found] == [True, True]
    assert [p.glu for p in found] == [True, False]
    with pytest.raises(RuntimeError, match="not captured"):
        mxfp4_experts.planned(params, 0)
    assert op._plans is mxfp4_experts.DEFAULT


def test_each_number_of_tokens_has_a_time_row(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    status, rows = run(monkeypatch, tmp_path / "rows.jsonl", "--tokens", "3,1")
    assert status == 0
    assert [(r["subject"]["provider"], r["case"]["tokens"], r["status"]) for r in rows] == [
        ("torch", 3, "ok"), ("torch", 1, "ok"),
    ]  # fmt: skip
    assert all(r["metrics"]["us"] > 0 for r in rows)


def test_wrong_kernel_is_reported_and_not_timed(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    right = op._torch
    monkeypatch.setattr(op, "_torch", lambda *args: right(*args) * 1.1)
    status, rows = run(monkeypatch, tmp_path / "rows.jsonl", "--tokens", "3")
    assert status == 1
    assert [(r["case"]["kind"], r["status"]) for r in rows] == [("check", "wrong")]
    assert "relative error is 0.1" in rows[0]["reason"]


def test_time_limit_ends_the_run_before_the_next_size(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    assert run(monkeypatch, tmp_path / "rows.jsonl", "--seconds", "-1") == (1, [])


def test_malformed_tiles_are_refused(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        run(monkeypatch, tmp_path / "rows.jsonl", "--tiles", "64/128/128/8/4/3;64/128")
    assert "tiles '64/128': want block_m/block_n" in capsys.readouterr().err
