"""Tests of long_contexts.py: cases that fit memory, sets, and a quick run on a CPU."""

from __future__ import annotations

import argparse
import json
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parents[3] / "bench"))
from experiments.attention import long_contexts
from experiments.attention.long_contexts import LAYOUTS, USUAL, Timed, cases
from experiments.common.graph_clock import Run

from fastkernels.overrides.attention import attention_decode_cuda as cuda


def test_cases_fit_the_pool() -> None:
    every = cases(list(LAYOUTS), ["bfloat16", "float8_e4m3fn"], [1, 8, 32], [1024, 16384, 131072])
    assert {at.model for at in every} == set(LAYOUTS) >= set(USUAL)
    assert Timed("mha", "bfloat16", 32, 131072) not in every  # 64 GiB
    assert Timed("llama-8b", "bfloat16", 32, 131072) in every
    for at in every:
        assert at.calls * at.blocks * long_contexts.BLOCK * at.token_bytes <= long_contexts.POOL
    assert Timed("window-128", "bfloat16", 1, 131072).bytes == 128 * 2 * 2 * 8 * 64


def test_every_layout_has_sets(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """On a Hopper GPU: the default and others, all of which fit; queries in FP8 have the default alone."""

    def supports(*args: Any) -> str | None:
        return cuda.refused(*args[:5])

    hopper = replace(long_contexts.PROVIDERS["cuda-split"], supports=supports)
    monkeypatch.setitem(long_contexts.PROVIDERS, "cuda-split", hopper)
    options = argparse.Namespace(device="cpu", quick=True, out=tmp_path / "rows.jsonl", seconds=60.0)
    run = Run("long_contexts", "attention_decode", options)
    for model in LAYOUTS:
        for dtype, query in (("bfloat16", ""), ("float8_e4m3fn", ""), ("float8_e4m3fn", "float8_e4m3fn")):
            args = long_contexts.arguments(run, model, dtype, [1], query)
            sets, (default,) = long_contexts.sets_of(args), long_contexts.default_of(args)
            assert len(sets) >= 2 and all(cuda.fits(p, *args[:2]) for p in (*sets, default))
            assert args[0].dtype == (torch.float8_e4m3fn if query else torch.bfloat16)
        todo = [Timed(model, "float8_e4m3fn", 1, 1024)]
        found = [plan for _, plan in long_contexts.plans(run, todo)]
        assert {plan.query8 for plan in found} == {False, True} and all(plan.fp8 for plan in found)


def test_quick_run_writes_rows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    out = tmp_path / "rows.jsonl"
    monkeypatch.setattr(sys, "argv", ["long", "--device", "cpu", "--quick", "--out", str(out)])
    with pytest.raises(SystemExit) as end:
        long_contexts.main()
    assert end.value.code == 0
    rows = [json.loads(line) for line in out.read_text().splitlines()]
    assert {(row["case"]["dtype"], row["case"]["variant"]) for row in rows} == {
        ("bfloat16", "op"), ("float8_e4m3fn", "op"), ("float8_e4m3fn", "op q8"),
    }  # fmt: skip
    assert all(row["metrics"]["us"] > 0 for row in rows)


def test_unknown_layout_is_named(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    for wrong in (["--layout", "llama-9b"], ["--dtype", "int8"], ["--context", "262144"]):
        monkeypatch.setattr(sys, "argv", ["long", "--out", "rows.jsonl", *wrong])
        with pytest.raises(SystemExit):
            long_contexts.main()
        assert wrong[1] in capsys.readouterr().err
