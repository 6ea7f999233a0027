"""The scenario of cases in which production was ahead, interpreted."""

from __future__ import annotations

import argparse
import inspect
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parents[3] / "bench/scenarios"))

import small_ops
import small_ops_text

from fastkernels.core import registry
from fastkernels.overrides.activation import relu2, silu_and_mul
from fastkernels.overrides.attention import merge_state
from fastkernels.overrides.kit import overlap as _overlap
from fastkernels.overrides.norm import rms_norm

ROOT = Path(__file__).parents[3]


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
        assert {(point.op, name) for name in ("ours", "copy", "negate", *point.settings)} <= timed
    assert all(r["metrics"]["tb_per_s"] > 0 for r in rows if r["case"]["kind"] == "time")


def test_copies_move_as_many_bytes() -> None:
    made = {name: way() for name, way in small_ops.copies(argparse.Namespace(device="cpu"), 4096).items()}
    assert set(made) == {"copy", "negate"}
    assert all(t.nbytes == 2048 and not t.any() for t in made.values())


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
    text = small_ops_text
    for kernel, several in (
        (relu2._relu2_kernel, (text.FLAT, text.RELU2_STREAM, {**text.FLAT, **text.RELU2_STREAM})),
        (silu_and_mul._silu_and_mul_kernel, tuple(text.SILU.values())),
    ):
        assert len({text.text_of(kernel, changes) for changes in ({}, *several)}) == len(several) + 1
    with pytest.raises(ValueError, match="has 'no such text' 0 times"):
        text.text_of(rms_norm._rms_norm_kernel, {"no such text": ""})


def test_a_changed_kernel_is_read_by_triton_and_the_op_keeps_its_own() -> None:
    own = relu2._relu2_kernel
    made = small_ops_text.changed(own, small_ops_text.RELU2_STREAM)
    assert made is not own and made.arg_names == own.arg_names and relu2._relu2_kernel is own
    assert inspect.getsource(made.fn) == small_ops_text.text_of(own, small_ops_text.RELU2_STREAM)


def launched(monkeypatch: pytest.MonkeyPatch, setting: Any, run_op: Any, *args: Any) -> Any:
    """Kernel, grid, arguments and options of the launch that the op makes with that setting."""
    seen: list[Any] = []
    with monkeypatch.context() as patch:
        patch.setattr(
            _overlap, "launch_kernel", lambda *args, **rest: seen.append((*args[:2], args[2:], rest))
        )
        small_ops.put(setting, run_op, *args)
    return seen.pop()


def test_other_rows_have_a_grid_of_their_own(monkeypatch: pytest.MonkeyPatch) -> None:
    case = small_ops.of("merge_state", "prefill_4k", tokens=256)
    args = registry.get("merge_state").inputs(case, "cpu", torch.Generator())
    for name, rows, warps in (("8 rows, 2 warps", 8, 2), ("32 rows, 4 warps", 32, 4)):
        setting = small_ops_text.merges()[name]
        kernel, grid, _, options = launched(monkeypatch, setting, merge_state._triton, *args)
        assert kernel is merge_state._merge_state_kernel and grid == (256 * 32 // rows,)
        assert (options["ROWS"], options["HEADS"], options["num_warps"]) == (rows, rows // 8, warps)


def test_other_tiles_have_a_grid_and_a_count_of_their_own(monkeypatch: pytest.MonkeyPatch) -> None:
    x = torch.zeros(3, 10000)
    setting = small_ops_text.relu2s()["flat 2048/8"]
    kernel, grid, args, options = launched(monkeypatch, setting, relu2._triton, x)
    assert (grid, args[kernel.arg_names.index("n_tiles")]) == ((15,), 15)
    assert (options["TILE"], options["num_warps"]) == (2048, 8)
    setting = small_ops_text.silus()["512/8"]
    kernel, grid, args, options = launched(monkeypatch, setting, silu_and_mul._triton, x)
    assert (grid, args[kernel.arg_names.index("n_blocks")]) == ((30,), 10)
    assert (options["BLOCK"], options["num_warps"]) == (512, 8)


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
