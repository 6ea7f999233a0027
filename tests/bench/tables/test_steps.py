"""Tests of measured savings: which measurement stands for a call, and what a step gains by them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from fk_bench.core.rows import Machine, Row
from fk_bench.tables import measurements, savings, steps
from support.table_rows import judged, row, served, timed

from fastkernels.core import tuning as tuned


def norm(tokens: int, ours: float, theirs: float, **dims: Any) -> Row:
    return judged(
        "rms_norm",
        f"norm_{tokens}",
        ours,
        theirs,
        {"tokens": tokens, "hidden": 4096, "residual": True, **dims},
    )


def line(known: list[Row], batch: int) -> savings.Line:
    """Return the norms with a residual of a step of Llama."""
    found = savings.lines("llama-3.1-8b", batch, 512, measurements.points({"rows": known}))
    return next(x for x in found if x.call.op == "rms_norm" and x.call.count == 64)


def test_call_takes_nearest_case_of_its_kind() -> None:
    known = [
        norm(1, 2.0, 3.0),
        norm(32, 2.0, 4.0),
        norm(8, 2.0, 9.0, residual=False),
        norm(8, 2.0, 9.0, hidden=576),
    ]
    found = {batch: line(known, batch).point for batch in (1, 8, 32, 256)}
    assert {b: p.case if p else None for b, p in found.items()} == {
        1: "norm_1",
        8: "norm_32",
        32: "norm_32",
        256: None,
    }
    assert line(known, 8).production_ms == pytest.approx(64 * 4e-3)
    assert line(known, 8).saved_ms == pytest.approx(64 * 2e-3)
    later = norm(32, 2.0, 5.0)
    later.case["source"] = "captured"
    again = line([*known, later], 32).point
    assert again is not None and again.speedup == pytest.approx(2.5)


def test_reference_baseline_is_no_measurement() -> None:
    slow = norm(1, 2.0, 30.0)
    slow.baseline = "reference"
    assert line([slow], 1).point is None


def test_speedup_is_weighted_by_production_time() -> None:
    known = [norm(1, 2.0, 4.0), judged("silu_and_mul", "act", 5.0, 5.0, {"tokens": 1, "d": 14336})]
    found = savings.lines("llama-3.1-8b", 1, 512, measurements.points({"rows": known}))
    assert savings.speedup(found) == pytest.approx(2 ** (64 * 4 / (64 * 4 + 32 * 5)))
    assert savings.speedup([x for x in found if x.point is None]) is None


def test_our_time_is_of_the_shipped_tables_provider(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    chip, shape = "Chip of test_tables", {"N": 6144, "K": 4096, "dtype": "bfloat16"}
    fast = tuned.Entry(
        "linear", shape, {"M": 8}, "cuda-wgmma", "cublas", "r", {"splits": 1, "stages": 8}, 1.2, (1.1, 1.3)
    )
    slow = tuned.Entry("linear", shape, {"M": 32}, "cublas", "cublas", "r")
    (tmp_path / f"{tuned.slug(chip)}.json").write_text(tuned.Table(chip, {"r": {}}, (fast, slow)).to_json())
    monkeypatch.setattr(tuned, "SHIPPED", tmp_path)
    times = [("cublas", 10.0, ""), ("cuda-wgmma", 8.0, "1/8/256"), ("cuda-wgmma", 6.0, "2/8/256")]
    found = [timed(p, tokens, 6144, us, params) for tokens in (8, 32, 128) for p, us, params in times]
    for each in found:
        each.machine = Machine(gpu=chip, gpus=1)
    made = {p.case: p.ours_us for p in measurements.points({"rows": found})}
    assert made == {"layer, 8": 8.0, "layer, 32": 10.0, "layer, 128": 10.0}
    exact = [timed(p, 8, 6144, us, params) for p, us, params in (*times, ("cuda-wgmma", 9.0, "1/8"))]
    for each in exact:
        each.machine = Machine(gpu=chip, gpus=1)
    # an exact set of parameters comes before sets with more of them
    assert [p.ours_us for p in measurements.points({"rows": exact})] == [9.0]
    known = measurements.points({"rows": found})
    near = {
        b: next(x for x in savings.lines("llama-3.1-8b", b, 512, known) if x.call.label == "qkv_proj")
        for b in (8, 16)
    }
    # another number of tokens may run another kernel
    assert near[8].point is not None and near[16].point is None


def test_explained_call_counts_with_its_own_batch() -> None:
    case = {
        "timer": "cuda-graph", "label": "attn", "dtype": "bfloat16", "batch": 200, "context": 512,
        "dims": {**measurements.HEADS, "seq_lens": str([512] * 200)[:200]},
        "us": {"vllm": 9.0, "ours/fa3": 8.0, "ours/tuned": 7.0, "ours/triton-split": 6.0},
    }  # fmt: skip
    made = row("explain", "call", {"op": "attention_decode"}, {"ours_us": 7.0}, case=case)
    made.machine = Machine(gpu="A chip without a table", gpus=1)
    (point,) = measurements.points({"rows": [made]})
    assert (point.production, point.production_us, point.ours_us) == ("fa3", 8.0, 7.0)
    assert point.shape.load == {"sequences": 200.0, "context": 512.0}


def test_explained_call_with_outdated_kernel_is_ignored(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    chip = "Chip of test_tables, explained"
    shape = {**measurements.HEADS, "window": 0, "dtype": "bfloat16"}
    entry = tuned.Entry(
        "attention_decode", shape, {"batch": 8, "context": 2048}, "cuda-split", "fa3", "r", {"warps": 8}, 1.2,
        (1.1, 1.3),
    )  # fmt: skip
    (tmp_path / f"{tuned.slug(chip)}.json").write_text(tuned.Table(chip, {"r": {}}, (entry,)).to_json())
    monkeypatch.setattr(tuned, "SHIPPED", tmp_path)

    def explained(*ours: str) -> list[measurements.Point]:
        case = {
            "timer": "cuda-graph", "label": "attn", "dtype": "bfloat16", "batch": 8, "context": 1024,
            "dims": {**measurements.HEADS, "seq_lens": str([1024] * 8)},
            "us": {"ours/fa3": 8.0, **{f"ours/{name}": 6.0 for name in ours}},
        }  # fmt: skip
        made = row("explain", "call", {"op": "attention_decode"}, {"ours_us": 6.0}, case=case)
        made.machine = Machine(gpu=chip, gpus=1)
        return measurements.points({"rows": [made]})

    assert explained("triton-split") == []
    assert [p.ours_us for p in explained("triton-split", "cuda-split")] == [6.0]


def test_realized_compares_saving_with_prediction() -> None:
    found = {"rows": [norm(1, 2.0, 4.0), *served("vllm", [4.0, 4.2]), *served("vllm+fk", [3.9, 4.1])]}
    ((_, _, cells),) = steps.realized(found)
    # 64 norms save 2 us each; the first layer's norm has no residual, and attention's parts have no row
    assert cells[0][:7] == ["vllm", "1", "4.10", "4.00", "0.128", "0.100", "0.78"]
    assert cells[0][7] == "rms_norm, store_kvcache, attention_decode"
    assert cells[1][4:7] == ["0.128", "0.100", "0.78"]


def test_realized_ignores_loads_of_other_lengths() -> None:
    others = [r for lane in ("vllm", "vllm+fk") for r in served(lane, [9.0, 9.5], other=(2048, 8))]
    own = [*served("vllm", [4.0, 4.2]), *served("vllm+fk", [3.9, 4.1])]
    (pair,) = steps.served({"rows": [*others, *own]})
    assert (pair.requests, pair.context, round(pair.stock_ms, 3)) == (1, 576, 4.1)
    assert steps.served({"rows": others}) == []


def test_steps_has_a_line_for_each_model_and_batch() -> None:
    ((title, columns, cells),) = steps.steps({"rows": [norm(1, 2.0, 4.0)]})
    assert [c[:2] for c in cells[:4]] == [["llama-3.1-8b", b] for b in ("1", "8", "32", "256")]
    assert columns[-2:] == ["saved ms", "speedup"] and cells[0][-3:] == ["0.256", "0.128", "2.000"]
    assert cells[3][-1] == "" and "over all steps unknown" in title  # too little of the floor is measured
