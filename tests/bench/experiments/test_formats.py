"""Tests of formats.py: each format's config is one that our engine and the comparison can use."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path

import pytest
from fk_bench.core.rows import Row

sys.path.insert(0, str(Path(__file__).resolve().parents[3] / "bench"))
from experiments.checkpoints import formats

from fastkernels.models.common.plan import plan

SMALL = {
    "hidden_size": 256, "intermediate_size": 512, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 64,
    "vocab_size": 512, "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip
LAYERS = 2
OPS = {
    "fp8": "linear_fp8", "bitnet": "linear_ternary", "mxfp4": "fused_experts_swigluoai", "modelopt-fp8": "linear_fp8",
    "nvfp4": "linear_nvfp4", "modelopt-nvfp4": "linear_nvfp4", "latent-sparse": "mla_sparse", "latent": "mla_decode",
    "gemma-4": "gelu_and_mul",
}  # fmt: skip


@pytest.mark.parametrize("name", formats.FORMATS)
def test_config_has_the_format_and_fewer_layers(tmp_path: Path, name: str) -> None:
    found = plan(str(formats.write_config(name, tmp_path, LAYERS)))
    op = next((op for start, op in OPS.items() if name.startswith(start)), "linear_int4")
    assert op in {item.op for item in found}, [item.op for item in found]
    whole = plan(str(formats.write_config(name, tmp_path, 0)))
    assert found.weight_bytes < whole.weight_bytes
    assert found.kv_bytes_per_token < whole.kv_bytes_per_token / 8


@pytest.mark.slow
def test_engine_runs_a_format_with_random_weights(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    small = replace(formats.FORMATS["gptq"], fields=SMALL, layers=LAYERS)
    monkeypatch.setitem(formats.FORMATS, "gptq", small)
    loads = ["--loads", "1x16+8,2x16+8", "--repeats", "1"]
    monkeypatch.setattr(
        sys, "argv", ["", "--vllm", "none", "--out", str(tmp_path), "--formats", "gptq", *loads]
    )
    with pytest.raises(SystemExit) as ended:
        formats.main()
    assert ended.value.code == 0, capsys.readouterr().err
    rows = [Row.model_validate_json(line) for line in (tmp_path / "rows.jsonl").read_text().splitlines()]
    assert [(row.case["run"], row.case["requests"]) for row in rows] == [(-1, 1), (-1, 2), (0, 1), (0, 2)]
    assert all(row.metrics["tpot_ms"] > 0 and row.case["layers"] == LAYERS for row in rows)
    results = formats.summary(rows)
    assert [line["fastkernels_tpot_ms"] for line in results] == [row.metrics["tpot_ms"] for row in rows[2:]]
    assert not any("ratio" in line for line in results)


@pytest.mark.slow
def test_failed_host_is_a_row_and_the_other_is_measured(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    small = replace(formats.FORMATS["int4"], fields=SMALL, layers=LAYERS)
    monkeypatch.setitem(formats.FORMATS, "int4", small)
    broken = tmp_path / "python"
    broken.write_text(
        f'#!/bin/sh\n[ "$1" = -c ] && exec {sys.executable} "$@"\necho no vLLM here >&2; exit 3\n'
    )
    broken.chmod(0o755)
    monkeypatch.setattr(
        sys, "argv",
        ["", "--vllm", str(broken), "--out", str(tmp_path), "--formats", "int4", "--loads", "1x16+8", "--repeats", "1"],
    )  # fmt: skip
    with pytest.raises(SystemExit) as ended:
        formats.main()
    assert ended.value.code == 1
    rows = [Row.model_validate_json(line) for line in (tmp_path / "rows.jsonl").read_text().splitlines()]
    bad, good = ([r for r in rows if (r.status.value == "ok") == which] for which in (False, True))
    assert [row.subject.host for row in bad] == ["vllm"] and "no vLLM here" in bad[0].reason
    assert {row.subject.host for row in good} == {"fastkernels"} and len(good) == 2
