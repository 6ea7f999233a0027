"""`fk-bench e2e`: rows of real offline runs, and the cost of a step without a model."""

from __future__ import annotations

import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from fk_bench.core.rows import read
from fk_bench.e2e import startup
from fk_bench.info import stubs
from support.commands import fk_bench, fk_bench_here, last_json


def test_offline_run(tmp_path: Path) -> None:
    from support.tiny import make_tiny_llama

    model = make_tiny_llama(tmp_path / "tiny")
    done = fk_bench(
        "e2e", model, "--requests", "1,3", "--rounds", "2", "--input-len", "9", "--output-len", "5", "--out",
        tmp_path / "run", timeout=200,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    rows, warnings = read(tmp_path / "run" / "rows.jsonl")
    assert not warnings and [(r.case["requests"], r.round) for r in rows] == [(1, 0), (1, 1), (3, 0), (3, 1)]
    for row in rows:
        tokens = row.case["requests"] * 5
        assert row.metrics["output_tokens_per_s"] == pytest.approx(tokens / row.metrics["seconds"])
        assert row.versions["torch"] and row.subject.host == "fastkernels"
    results = last_json(done)["results"]
    assert [(r["host"], r["requests"]) for r in results] == [("fastkernels", 1), ("fastkernels", 3)]


def test_loads_have_prompts_contexts_and_arrivals(tmp_path: Path) -> None:
    from support.tiny import make_tiny_llama

    model = make_tiny_llama(tmp_path / "tiny", max_position_embeddings=400)
    loads = ("2x16+3", "1x320@100+34", "1x8+6/2x9+2")
    done = fk_bench(
        "e2e", model, "--loads", f"{','.join(loads)},prompts", "--rounds", "1", "--out", tmp_path / "run",
        timeout=200,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert done.stderr.count("skipped ") == 3  # prompts of the preset are longer than the context
    rows, _ = read(tmp_path / "run" / "rows.jsonl")
    assert [row.case["load"] for row in rows] == list(loads)
    prompts, context, mixed = (row.metrics for row in rows)
    assert prompts["input_tokens_per_s"] > 0 and "cached_tokens_per_prompt" not in prompts
    assert 300 <= context["cached_tokens_per_prompt"] < 320 and context["tpot_ms"] > 0
    assert mixed["output_tokens_per_s"] == pytest.approx((6 + 2 * 2) / mixed["seconds"])
    done = fk_bench_here("e2e", model, "--loads", "1x400+8", "--out", tmp_path / "run")
    assert (
        done.returncode == 2
        and "has 408 tokens, and the context of" in done.stderr
        and "has 400" in done.stderr
    )


@pytest.mark.slow
def test_host_runs_with_and_without_candidates(tmp_path: Path) -> None:
    from support.tiny import make_tiny_llama

    model, folder = make_tiny_llama(tmp_path / "tiny"), tmp_path / "candidates"
    folder.mkdir()
    for name in ("rms_norm", "silu_and_mul"):
        (folder / f"{name}.py").write_text(stubs.source(name))
    done = fk_bench(
        "e2e", model, "--candidate", folder, "--requests", "2", "--rounds", "2", "--input-len", "9",
        "--output-len", "5", "--out", tmp_path / "run", timeout=200,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    rows, _ = read(tmp_path / "run" / "rows.jsonl")
    assert [(r.round, r.subject.candidate) for r in rows] == [
        (r, c) for r in (0, 1) for c in (None, str(folder))
    ]
    for row in rows:
        assert row.subject.host == "fastkernels" and ("live" in row.case) == bool(row.subject.candidate)
        if row.subject.candidate:  # two layers and a last norm, five steps
            assert row.case["live"] == {"rms_norm": 25, "silu_and_mul": 10} and row.baseline == "fastkernels"
    assert [r["host"] for r in last_json(done)["results"]] == ["fastkernels", "fastkernels+candidates"]


def test_candidates_without_a_place_are_refused_in_one_line(tmp_path: Path) -> None:
    from support.tiny import make_tiny_llama

    (tmp_path / "candidates").mkdir()
    (tmp_path / "candidates" / "group_norm.py").write_text(stubs.source("group_norm"))
    done = fk_bench(
        "e2e",
        make_tiny_llama(tmp_path / "tiny"),
        "--candidate",
        tmp_path / "candidates",
        "--out",
        tmp_path / "run",
    )
    says = last_json(done)["error"]
    assert (
        done.returncode != 0 and "nothing to patch: group_norm (" in says and "Traceback" not in done.stderr
    )
    assert done.stderr.splitlines()[-1] == f"error: {says}"


@pytest.mark.parametrize(
    ("host", "enabled", "provider"),
    [("vllm", "1", "fastkernels"), ("vllm", "0", None), ("fastkernels", "1", None)],
)
def test_startup_row_names_patched_host(
    host: str, enabled: str, provider: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FASTKERNELS", enabled)
    started = SimpleNamespace(name=host, python=sys.executable, started=0.0)
    first = {"kv_tokens": 64, "ends": [("engine", 1.0)]}
    made = startup._row(started, {"model": "m"}, 9, 0, first, (2.0, 3.0), {"output_tokens": 1})  # type: ignore[arg-type]
    assert (made.subject.host, made.subject.provider, made.case["kv_tokens"]) == (host, provider, 64)


@pytest.mark.slow
def test_starts_by_phases(tmp_path: Path) -> None:
    from support.tiny import make_tiny_llama

    model = make_tiny_llama(tmp_path / "tiny")
    done = fk_bench(
        "e2e", model, "--startup", "--rounds", "2", "--input-len", "9", "--load-format", "dummy", "--engine-args",
        'fastkernels={"num_blocks": 64}', "--out", tmp_path / "run", timeout=200,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    rows, warnings = read(tmp_path / "run" / "rows.jsonl")
    assert not warnings and [(r.kind, r.round) for r in rows] == [("startup", 0), ("startup", 1)]
    for row in rows:
        m = row.metrics
        assert row.case["kv_tokens"] == 63 * 16 and row.case["load_format"] == "dummy"
        parts = [
            v for k, v in m.items() if k not in ("first_token_s", "ready_s") and not k.startswith("kernels")
        ]
        assert min(parts) >= 0 and sum(parts) == pytest.approx(m["first_token_s"], abs=1e-6)
        assert (
            m["imports_s"] > 0.1 and {"config_s", "weights_s", "kv_cache_s", "graphs_s", "rest_s"} < m.keys()
        )
        assert m["first_token_s"] - m["ready_s"] == pytest.approx(m["request_s"])
    (result,) = last_json(done)["results"]
    assert result["first_token_s"] == rows[1].metrics["first_token_s"] and result["starts"] == 1
    assert result["cold_first_token_s"] == rows[0].metrics["first_token_s"]
    assert "weights_s" in done.stdout and "start 1" in done.stdout


def test_public_name_gives_config_for_dummy_weights(tmp_path: Path) -> None:
    from fk_bench.core.model_names import PUBLIC
    from fk_bench.e2e.command import sizes_of

    from fastkernels.models.common.configs import config
    from fastkernels.models.common.descriptions.registry import models
    from fastkernels.models.common.plans.build import load_config

    found = load_config(Path(sizes_of("meta-llama/Llama-3.1-8B-Instruct", tmp_path)))
    assert found.architectures == ["LlamaForCausalLM"] and found.num_hidden_layers == 32
    assert (found.hidden_size, found.vocab_size, found.dtype) == (4096, 128256, torch.bfloat16)
    assert sizes_of(str(tmp_path), tmp_path) == str(tmp_path)
    archs = [m.arch for m in models().values()]
    plain = {a.model_type for a in archs if a.config_fields is not None or a.own_config}
    for name, (kind, _) in PUBLIC.items():
        found = config.read(Path(sizes_of(name, tmp_path)))
        assert (found is not None) == (kind in plain)  # then no start pays for transformers


def test_scheduler_only(tmp_path: Path) -> None:
    done = fk_bench("e2e", "--scheduler-only", "--requests", "1,16", "--out", tmp_path / "run", "--json")
    results = last_json(done)["results"]
    assert [(r["requests"], r["context"]) for r in results] == [(1, 128), (1, 2048), (16, 128), (16, 2048)]
    assert all(0 < r["us_per_step"] <= r["us_per_step_p95"] for r in results)


def test_host_that_fails_to_start_reports_why(tmp_path: Path) -> None:
    done = fk_bench("e2e", "--hosts", "sglang", "--out", tmp_path / "run")  # not in this environment
    assert done.returncode == 1 and "ModuleNotFoundError" in done.stderr and "Traceback" in done.stderr
    assert "ended with status 1" in done.stderr
    assert (tmp_path / "run" / "sglang.log").is_file()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--hosts", "tgi"], "unknown host 'tgi'. Known: fastkernels, vllm, sglang; or one of timm,"),
        (["--requests", "0"], "at least 1"),
        (["--python", "vllm"], "HOST=VALUE"),
        (["--candidate", "/no/such"], "there is no folder /no/such"),
        (["--startup", "--scheduler-only"], "--startup excludes --candidate"),
        (["--startup", "--loads", "prompts"], "--loads is for hosts of text"),
        (["--loads", "8x5+"], "'8x5+' is not REQUESTSxINPUT"),
        (["--loads", "8x5"], "8x5 has no output tokens"),
        (["--images", "1x64"], "--task embed, --images and --audio need --loads"),
        (["--loads", "prompts", "--requests", "4"], "leave out --requests, or"),
        (
            ["--output-len", "8", "--input-len", "9", "--loads", "2x16+3"],
            "leave out --input-len and --output-len",
        ),
    ],
)
def test_bad_options(tmp_path: Path, arguments: list[str], message: str) -> None:
    done = fk_bench_here("e2e", *arguments, "--out", tmp_path / "run")
    assert done.returncode == 2 and message in done.stderr and not (tmp_path / "run").exists()
