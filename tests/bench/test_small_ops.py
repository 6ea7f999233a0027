"""The scenario of cases in which production was ahead, interpreted."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2] / "bench/scenarios"))

import small_ops

from fastkernels import registry

ROOT = Path(__file__).parents[2]


def test_it_checks_and_times_every_setting(tmp_path: Path) -> None:
    env = {
        **os.environ,
        "TRITON_INTERPRET": "1",
        "PYTHONPATH": os.pathsep.join(map(str, (ROOT, ROOT / "bench"))),
    }
    command = [sys.executable, str(ROOT / "bench/scenarios/small_ops.py"), "--device", "cpu", "--quick"]
    out = tmp_path / "rows.jsonl"
    done = subprocess.run([*command, "--out", out], env=env, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stdout + done.stderr
    rows = [json.loads(line) for line in out.read_text().splitlines()]
    assert {r["status"] for r in rows} == {"ok"}
    timed = {(r["subject"]["op"], r["subject"]["provider"]) for r in rows}
    for point in small_ops.tiny():
        assert {(point.op, name) for name in ("ours", *point.settings)} <= timed


def test_a_setting_is_in_place_for_its_call_only() -> None:
    before = small_ops.l2_norm._rows_and_warps
    where = small_ops.rows_and_warps((2, 1))["2 rows, 1 warps"]
    assert small_ops.put(where, lambda: small_ops.l2_norm._rows_and_warps(9, 9, 16)) == (2, 1)
    assert small_ops.l2_norm._rows_and_warps is before


def test_every_case_can_be_made_and_every_provider_is_there() -> None:
    for point in small_ops.points():
        op = registry.get(point.op).op
        assert {name for name, _ in point.providers.values()} <= {p.name for p in op.providers}
        for module, name, _ in point.settings.values():
            assert hasattr(module, name)


def test_what_is_wrong_is_said() -> None:
    spec = registry.get("l2_norm")
    args = spec.inputs(small_ops.of("l2_norm", "head_65"), "cpu", small_ops.torch.Generator().manual_seed(0))
    case = small_ops.of("l2_norm", "head_65")
    assert small_ops.right(spec, case, spec.op.run, args) == ""
    assert "an error of" in small_ops.right(spec, case, lambda x, *_: x, args)
