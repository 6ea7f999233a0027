"""fk-bench routing: statistics of expert loads, timed calls, winners, and the documentation page."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from fk_bench import cli
from fk_bench.capture.captures import CaptureError
from fk_bench.core.rows import Row, Subject, read
from fk_bench.routing import stats, study, tables

ROOT = Path(__file__).parents[3]


def test_known_loads() -> None:
    even = stats.load_stats([5] * 8)
    assert (even["max_over_mean"], even["cv"], even["hit"]) == (1.0, 0.0, 8.0)
    assert even["gini"] == pytest.approx(0.0) and even["entropy"] == pytest.approx(1.0)
    assert even["hot_share"] == pytest.approx(1 / 8)
    one = stats.load_stats([0, 0, 0, 12])
    assert one["max_over_mean"] == 4.0 and one["gini"] == pytest.approx(3 / 4) and one["hit"] == 1.0
    assert one["entropy"] == 0.0 and one["hot_share"] == 1.0 and one["cv"] == pytest.approx(3**0.5)
    # 1, 2, 3, 4: half the mean absolute difference (20 / 16) over the mean (2.5)
    assert stats.gini([3, 1, 4, 2]) == pytest.approx(0.25)
    assert stats.load_stats([1, 2, 3, 4])["entropy"] == pytest.approx(
        -sum(p * np.log(p) for p in (0.1, 0.2, 0.3, 0.4)) / np.log(4)
    )
    with pytest.raises(ValueError, match="no expert has a token"):
        stats.load_stats([0, 0])


def test_uniform_routing_matches_theory() -> None:
    rng = np.random.default_rng(1)
    experts, top_k = 24, 3
    ids = stats.uniform_ids(60_000, experts, top_k, rng)
    # A token's experts are distinct
    assert (np.sort(ids, axis=1)[:, 1:] != np.sort(ids, axis=1)[:, :-1]).all()
    share = stats.counts_of(ids, experts) / len(ids)
    p = top_k / experts
    assert np.abs(share - p).max() < 5 * (p * (1 - p) / len(ids)) ** 0.5
    for batch in (1, 8, 32):
        hits = [len(np.unique(stats.uniform_ids(batch, experts, top_k, rng))) for _ in range(2000)]
        expected = stats.expected_hit(batch, experts, top_k)
        assert abs(np.mean(hits) - expected) <= 5 * np.std(hits) / 2000**0.5 + 1e-12
    assert stats.expected_hit(1, experts, top_k) == pytest.approx(top_k)


def test_agreement_of_hot_experts() -> None:
    assert stats.hottest(np.array([3, 9, 9, 1]), 2) == {1, 2} and stats.hottest(np.array([2, 2, 2]), 1) == {0}
    assert stats.jaccard({1, 2}, {2, 3}) == pytest.approx(1 / 3) and stats.jaccard({1}, {1}) == 1.0
    up, down = np.array([1, 5, 7, 40]), np.array([4, 3, 2, 1])
    assert stats.spearman(up, up**2) == pytest.approx(1.0) and stats.spearman(up, down) == pytest.approx(-1.0)
    # with ties: ranks 1.5 1.5 3 against 1 2 3
    assert stats.spearman(np.array([4, 4, 6]), np.array([1, 2, 3])) == pytest.approx(0.5 * 3**0.5)
    assert stats.spearman(np.ones(4), up) == 0.0


def command(capsys: Any, *args: object) -> tuple[int, str, str]:
    """fk-bench in this process: exit status, standard output and error."""
    with pytest.raises(SystemExit) as ended:
        cli.main(["routing", *map(str, args)])
    out, err = capsys.readouterr()
    return int(ended.value.code or 0), out, err


def test_study_on_the_cpu(tmp_path: Path, capsys: Any) -> None:
    """With the shipped captures by default."""
    status, out, _ = command(capsys, "--device", "cpu", "--out", tmp_path / "run")
    result = json.loads(out.splitlines()[-1])
    assert status == 0 and result["ok"] and result["timed"] == 0
    assert "was not timed" in result["note"] and out.count("was not timed") == 2
    assert result["captures"] == ["small-moe-trained-e128k8", "small-moe-trained-e8k2"]
    rows, warnings = read(tmp_path / "run" / "rows.jsonl")
    assert not warnings and {r.kind for r in rows} == {"load", "batch", "identity"}
    found = {r.name: r for r in study.routings()}
    for row in rows:
        routing = found[row.case["capture"]]
        if row.kind == "load" and row.case["routing"] == "captured":
            counts = stats.counts_of(routing.tokens(row.case["layer"]), routing.experts)
            assert row.metrics == pytest.approx(stats.load_stats(counts))
        if row.kind == "batch" and row.case["routing"] == "uniform":
            assert row.metrics["hit"] == pytest.approx(row.metrics["hit_expected"], rel=0.1)
    status, out, _ = command(capsys, "--rows", result["rows"], "--markdown")
    assert status == 0 and "| layer | routing |" in out
    result.pop("note")
    assert json.loads(out.splitlines()[-1]) == result


def test_page_tables_match_repository_rows(capsys: Any) -> None:
    file = ROOT / "bench/results/2026-11-21-h200-routing.jsonl.xz"
    status, out, _ = command(capsys, "--rows", file, "--markdown")
    page = (ROOT / "docs/reports/2026-11-routing.md").read_text()
    lines = [line for line in out.splitlines() if line.startswith("|")]
    assert status == 0 and len(lines) > 60 and [line for line in lines if line not in page] == []
    result = json.loads(out.splitlines()[-1])
    assert (result["timed"], result["compared"], result["winner_changes"]) == (108, 36, 0)


def test_batches_for_the_clock() -> None:
    (routing,) = study.routings("small-moe-trained-e8k2")
    rng = np.random.default_rng(0)
    for tokens in (1, 100, 5000):
        for turn in range(4):
            for source in ("captured", "uniform", "same"):
                ids, weights = study.batch_of(routing, source, tokens, turn, rng)
                assert ids.shape == weights.shape == (tokens, 2) and ids.dtype == np.int32
                assert (ids[:, 0] != ids[:, 1]).all() and ids.min() >= 0 and ids.max() < 8
                if source == "same":
                    assert len(np.unique(ids)) == 2
    whole = routing.tokens(1)
    ids, _ = study.batch_of(routing, "captured", 3 * len(whole), 1, rng)
    assert np.array_equal(stats.counts_of(ids, 8), 3 * stats.counts_of(whole, 8))


def test_kernel_output_is_checked() -> None:
    from fk_bench.routing.expert_times import _check

    from fastkernels.core.spec import Case
    from fastkernels.overrides.moe.fused_experts import SPEC, fused_experts

    dims = {"tokens": 40, "experts": 6, "topk": 2, "hidden": 64, "intermediate": 48}
    args = SPEC.inputs(Case("c", dims, "float32"), "cpu", torch.Generator().manual_seed(0))[:5]
    assert _check(fused_experts, args) == ""
    assert "relative error" in _check(lambda *a: 1.05 * fused_experts(*a), args)


def test_winner_follows_from_rows() -> None:
    def row(kernel: str, source: str, us: float, spread: float = 0.01) -> Row:
        times = [us * (1 - spread), us, us * (1 + spread)]
        case = {"kind": "time", "capture": "c", "experts": 8, "topk": 2, "tokens": 32, "routing": source}
        case |= {"model": "M", "experts_hit": 5.0, "kernel": "k"}
        subject = Subject(op="fused_experts", provider=kernel)
        return Row(
            run_id="t",
            command="routing",
            subject=subject,
            case=case,
            metrics=tables.percentiles(times),
        )

    made = [
        row("a", "captured", 100),
        row("b", "captured", 120),
        row("a", "uniform", 130),
        row("b", "uniform", 110),
    ]
    (found,) = tables.changes(made)
    assert found["changed"] and found["ratios"] == pytest.approx(
        {"captured": 100 / 120, "uniform": 130 / 110}
    )
    made[2] = row("a", "uniform", 109)  # within the noise of b's 110
    (found,) = tables.changes(made)
    assert not found["changed"] and found["differs"]
    (title, columns, cells) = next(iter(tables.tables(made)))
    assert "M's sizes" in title and columns[3:6] == ["captured", "uniform", "same experts"]
    assert cells[0][3:5] == ["100.0", "109.0"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--capture", "no/such"], "not a folder"),
        (["--tokens", "0"], "at least 1"),
        (["--device", "tpu"], "not auto, cuda or cpu"),
        (["--rows", "no-such-file"], "no such file"),
    ],
)
def test_bad_options(tmp_path: Path, arguments: list[str], message: str, capsys: Any) -> None:
    status, _, error = command(capsys, *arguments, "--out", tmp_path / "run")
    assert status == 2 and message in error and not (tmp_path / "run").exists()


def test_capture_without_routing_is_an_error(tmp_path: Path) -> None:
    data = {"schema": "fastkernels.capture/1", "ops": {}, "modules": []}
    (tmp_path / "capture.json").write_text(json.dumps(data))
    with pytest.raises(CaptureError, match="has no routing"):
        study.routings(str(tmp_path))


def test_model_of_timed_sizes() -> None:
    shape = study.shape_of
    assert shape(8, 2) == {"model": "Mixtral-8x7B", "hidden": 4096, "intermediate": 14336, "known": True}
    assert shape(128, 8) == {"model": "Qwen3-30B-A3B", "hidden": 2048, "intermediate": 768, "known": True}
    assert shape(16, 2)["model"] == "16 experts" and not shape(16, 2)["known"]
