"""`fk-bench patch-compare`: metrics of arrivals, pairs of states, and a real vLLM that is patched and undone."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
from fk_bench.core.rows import Row, Subject, read
from fk_bench.e2e.host import make_row
from fk_bench.e2e.patch_compare import COMMAND, Load, metrics_of, summary
from fk_bench.serving.config import ConfigError
from support.commands import fk_bench, fk_bench_here, last_json

ROOT = Path(__file__).resolve().parents[3]
LOAD = Load(2, 4, 3)


def test_metrics_are_those_of_the_arrivals() -> None:
    metrics, complete = metrics_of([[0.1, 0.2, 0.3], [0.2, 0.3, 0.5]], LOAD)
    assert complete
    assert metrics["ttft_ms"] == pytest.approx(150) and metrics["tpot_ms"] == pytest.approx(125)
    assert metrics["output_tokens_per_s"] == pytest.approx(12)
    assert metrics["step_ms_max"] == pytest.approx(100)  # both requests decode from 0.2 to 0.3


def test_missing_token_is_noticed() -> None:
    assert not metrics_of([[0.1, 0.2, 0.3], [0.2, 0.3]], LOAD)[1]
    assert metrics_of([[0.1], []], LOAD) == ({}, False)


@pytest.mark.parametrize("text", ["8", "0x5+5", "8x512", "8x512+-1", "ax1+1"])
def test_malformed_load_is_refused(text: str) -> None:
    with pytest.raises(ConfigError, match="8x512"):
        Load.parse(text)


def run(block: int, number: int, tpot: float) -> Row:
    case: dict[str, Any] = {"load": str(LOAD), "block": block, "run": number, "state": "?"}
    metrics = {"tpot_ms": tpot, "seconds": tpot}
    return make_row("vllm", case, metrics, command=COMMAND, subject=Subject(model="m"))


def test_patched_runs_are_compared_with_both_neighbours() -> None:
    """A machine that becomes slower by the hour changes no ratio."""
    drift = [1.0, 1.1, 1.2, 1.3, 1.4]
    made = [
        run(block, n, slow * (1.0 if block % 2 else 2.0))
        for block, slow in enumerate(drift)
        for n in (-1, 0, 1)
    ]
    (line,) = summary(made)
    assert line["tpot_ms_ratio"] == pytest.approx(2.0)
    assert line["tpot_ms_ratio_ci95"] == pytest.approx((2.0, 2.0))
    assert line["tpot_ms_noise"] == pytest.approx((2.0 + 2.4) / (2.4 + 2.8))


def test_first_runs_are_not_compared() -> None:
    (line,) = summary([run(b, n, 50.0 if n < 0 else 1.0) for b in range(3) for n in (-1, 0, 1)])
    assert line["tpot_ms_ratio"] == 1.0 and line["patched_first_run_ratio"] == 50.0


def test_unknown_host_and_bad_arguments_are_refused(tmp_path: Path) -> None:
    for args, message in (
        (["--host", "ollama"], "vllm or sglang"),
        (["--loads", "8"], "8x512+128"),
        (["--engine-args", "[1]"], "object"),
    ):
        done = fk_bench_here(COMMAND, "m", *args, "--out", tmp_path / "run")
        assert done.returncode == 2 and message in done.stderr and "Traceback" not in done.stderr


@pytest.mark.slow
@pytest.mark.vllm
@pytest.mark.parametrize("before", [False, True])
def test_real_vllm_is_patched_and_undone_in_turn(tmp_path: Path, before: bool) -> None:
    from support.tiny import make_tiny_llama

    python = ROOT / ".venv-vllm" / "bin" / "python"
    if not python.exists():
        pytest.skip("no .venv-vllm: run `make setup`")
    model, out = make_tiny_llama(tmp_path / "tiny"), tmp_path / "run"
    command = [
        COMMAND, model, "--python", python, "--loads", "1x16+8,3x16+8", "--cycles", "1", "--repeats", "2",
        "--load-format", "auto", "--ops", "rms_norm", *["--before-construction"] * before, "--out", out,
    ]  # fmt: skip
    done = fk_bench(*command, timeout=400)
    assert done.returncode == 0, done.stderr
    rows, _ = read(out / "rows.jsonl")
    assert [r.case["state"] for r in rows] == [*["stock"] * 6, *["patched"] * 6, *["stock"] * 6, "end"]
    assert {(r["load"], r["tpot_ms_ratio"] > 0) for r in last_json(done)["results"]} == {
        ("1x16+8", True), ("3x16+8", True),
    }  # fmt: skip
    again = fk_bench(*command, timeout=60)  # shown from its rows
    assert again.returncode == 0 and len(read(out / "rows.jsonl")[0]) == len(rows)


def test_rows_of_an_interpreter_that_fails_name_the_log(tmp_path: Path) -> None:
    from support.tiny import make_tiny_llama

    model = make_tiny_llama(tmp_path / "tiny")
    done = fk_bench(
        COMMAND, model, "--python", sys.executable, "--load-format", "auto", "--out", tmp_path / "run"
    )
    assert done.returncode == 1 and "vllm.log" in done.stderr
    assert last_json(done)["failed"] == [str(model)]
