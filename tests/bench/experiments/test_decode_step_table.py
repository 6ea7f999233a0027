"""Tests of decode_step.py: the tuned table made of skinny_linear.py's rows, and a tiny step on the CPU."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[3] / "bench"))
from experiments.decode_step.decode_step import table_of
from experiments.linear.linear_kernels import label

from fastkernels.overrides.linear.kernels import wgmma_linear_cuda as wgmma


def test_sets_with_new_parameters_are_found(tmp_path: Path) -> None:
    best = next(p for p in wgmma.PARAMS if len(p) > len(wgmma.PARAMS[0]))
    times = [
        ("cublas", 10.0, ""),
        ("cuda-wgmma", 8.0, label(wgmma.PARAMS[0])),
        ("cuda-wgmma", 5.0, label(best)),
    ]
    case = {"kind": "time", "out": 4096, "in": 4096, "tokens": 8}
    lines = [
        {
            "status": "ok",
            "subject": {"provider": p},
            "case": {**case, "params": params},
            "metrics": {"us": us},
        }
        for p, us, params in times
    ]
    rows = tmp_path / "rows.jsonl"
    rows.write_text("\n".join(map(json.dumps, lines)))
    (entry,) = json.loads(table_of(rows, tmp_path / "table.json", "a chip").read_text())["entries"]
    assert (entry["provider"], entry["params"], entry["speedup"]) == ("cuda-wgmma", best, 2.0)


@pytest.mark.slow
def test_step_runs_with_tables_and_free_ops(tmp_path: Path) -> None:
    """Each variant is timed, and a free op does not count as a wrong result."""
    script = Path(__file__).parents[3] / "bench/experiments/decode_step/decode_step.py"
    out = tmp_path / "rows.jsonl"
    command = [sys.executable, str(script), "--device", "cpu", "--quick", "--batch", "2", "--context", "20", "--out",
               str(out), "--tables", "shipped", "--attention", "table", "--ways", "early"]  # fmt: skip
    env = {**os.environ, "TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"}
    free = ["--free", "rms_norm,silu_and_mul"]
    done = subprocess.run([*command, *free], env=env, capture_output=True, text=True, timeout=400)
    assert done.returncode == 0, done.stdout + done.stderr
    rows = [json.loads(line) for line in out.read_text().splitlines()]
    step, without = "shipped, table, early", "shipped, table, early, without "
    names = ["cublas, table, early", step, *(without + ops for ops in ("rms_norm", "silu_and_mul"))]
    names.append(f"{without}rms_norm and silu_and_mul")
    assert [r["subject"]["provider"] for r in rows if r["case"]["kind"] == "time"] == names
    assert all(
        r["status"] == "ok" and r["metrics"]["speedup"] > 0 for r in rows if r["case"]["kind"] == "time"
    )
    for more, said in (
        (["--free", "linear"], "--free linear: known: rms_norm"),
        (["--ways", "late"], "--ways late: known: in turn, early"),
        (["--tables", "mine"], "--tables mine: expected `shipped` or NAME=FILE"),
        (["--tables", "mine=none.json"], "--tables mine=none.json: expected"),
    ):
        wrong = subprocess.run([*command, *more], env=env, capture_output=True, text=True)
        assert wrong.returncode == 2 and said in wrong.stderr
