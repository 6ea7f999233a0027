"""The scenario of cases in which production was ahead, interpreted."""

from __future__ import annotations

import ast
import json
import os
import subprocess
import sys
import textwrap
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parents[2] / "bench/scenarios"))

import small_ops
import small_ops_text

from fastkernels import registry
from fastkernels.overrides.l1 import merge_state, rms_norm

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


def test_the_text_that_is_changed_is_the_ops() -> None:
    for kernel, several in (
        (rms_norm._rms_norm_kernel, small_ops_text.NORM), (merge_state._merge_state_kernel, small_ops_text.MERGE),
    ):  # fmt: skip
        texts = {name: small_ops_text.text_of(kernel, changes) for name, changes in several.items()}
        for text in texts.values():
            ast.parse(text)
        assert len({*texts.values(), small_ops_text.text_of(kernel, {})}) == len(several) + 1
    with pytest.raises(ValueError, match="has 'no such text' 0 times"):
        small_ops_text.text_of(rms_norm._rms_norm_kernel, {"no such text": ""})


@pytest.mark.parametrize("rows", [8, 16, 32])
def test_tiles_have_every_token_and_head_once(rows: int) -> None:
    tokens, heads, found = 16, 8, list[tuple[int, int]]()
    for program in range(tokens * heads // rows):
        tl = SimpleNamespace(arange=torch.arange, program_id=lambda _, p=program: p, int64=torch.int64)
        names: dict[str, Any] = {"tl": tl, "Q": heads, "ROWS": rows}
        exec(textwrap.dedent("    " + small_ops_text._TILE), names)
        found += zip(names["token"].tolist(), names["head"].tolist(), strict=True)
    assert sorted(found) == [(t, h) for t in range(tokens) for h in range(heads)]


def test_other_rows_have_a_grid_of_their_own(monkeypatch: pytest.MonkeyPatch) -> None:
    seen = []
    monkeypatch.setattr(
        small_ops_text._overlap, "launch_kernel", lambda *args, **rest: seen.append((args, rest))
    )
    monkeypatch.setattr(small_ops_text, "changed", lambda kernel, changes: kernel)
    for name, rows, warps in (("tiles", 16, 4), ("8 rows, 2 warps", 8, 2), ("32 rows, 4 warps", 32, 4)):
        case = small_ops.of("merge_state", "prefill_4k", tokens=256)
        args = registry.get("merge_state").inputs(case, "cpu", torch.Generator())
        small_ops.put(small_ops_text.merges()[name], merge_state._triton, *args)
        (kernel, grid, *_), options = seen.pop()
        assert kernel is merge_state._merge_state_kernel and grid == (256 * 32 // rows,)
        assert (options["ROWS"], options["num_warps"]) == (rows, warps)


def test_written_arguments_are_compared() -> None:
    spec, case = registry.get("merge_state"), small_ops.of("merge_state", "odd_63")
    args = spec.inputs(case, "cpu", torch.Generator().manual_seed(0))
    reference = next(p.fn for p in spec.op.providers if p.name == "reference")
    assert small_ops.right(spec, case, reference, args) == ""
    assert "an error of" in small_ops.right(spec, case, lambda *_: None, args)


def test_what_is_wrong_is_said() -> None:
    spec = registry.get("l2_norm")
    args = spec.inputs(small_ops.of("l2_norm", "head_65"), "cpu", small_ops.torch.Generator().manual_seed(0))
    case = small_ops.of("l2_norm", "head_65")
    assert small_ops.right(spec, case, spec.op.run, args) == ""
    assert "an error of" in small_ops.right(spec, case, lambda x, *_: x, args)
