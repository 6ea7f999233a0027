"""Prefix caches of attached servers: fresh prompts for each run, emptied caches, warnings about cached prompts."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from fk_bench.core.rows import Status
from fk_bench.serving.config import CompareConfig
from fk_bench.serving.lanes import Lane
from fk_bench.serving.load import counters
from fk_bench.serving.load.datasets import load
from fk_bench.serving.load.metrics import Chunk, Trace
from fk_bench.serving.measure import PROFILE, WARM_UP, Loads, cached_warning
from fk_bench.serving.run_record import Record
from fk_bench.serving.summary import synthetic_warnings
from support.serving.attached import attached, stub

FORCED = (
    '{"method": "eagle3", "rejection_sample_method": "synthetic", "synthetic_acceptance_length": 2.0,'
    ' "num_speculative_tokens": 2}'
)
SIZE = {"concurrency": (2,), "num_prompts": (4,), "input_len": 64, "output_len": 2}


def test_second_attached_run_finds_no_prompt_cached(
    words_model: Path, stub_python: Path, tmp_path: Path
) -> None:
    with stub(stub_python, STUB_CACHE="16", STUB_NO_FLUSH="1") as url:
        runs = [attached(words_model, url, tmp_path / name, **SIZE) for name in ("a", "b")]
        (_, (first,)), (line, (second,)) = runs
        assert first.metrics["cached_prompt_tokens"] == second.metrics["cached_prompt_tokens"] == 0
        assert first.case["seed"] != second.case["seed"] and line["warnings"] == []
        # The recorded seed repeats a run: its prompts are the same, and the server has them.
        line, (again,) = attached(words_model, url, tmp_path / "c", seed=second.case["seed"], **SIZE)
    assert again.metrics["cached_prompt_tokens"] == 4 * 64 and again.metrics["prefix_cache_hit_rate"] == 1.0
    (warning,) = line["warnings"]
    assert "256 of 256 prompt tokens were in the server's prefix cache" in warning
    assert again.case["warning"] in warning and "flushed_by" not in again.case


def test_attached_server_of_another_model_is_a_warning(
    words_model: Path, stub_python: Path, tmp_path: Path
) -> None:
    with stub(stub_python, STUB_ROOT="org/other-7B") as url:
        line, _ = attached(words_model, url, tmp_path / "run", **SIZE)
    (warning,) = line["warnings"]
    assert warning.startswith(
        "vllm: the attached server has the model 'stub' (org/other-7B), the run is of 'words'"
    )
    assert "has the model &#39;stub&#39;" in (tmp_path / "run/report.html").read_text()


def test_cache_is_emptied_before_a_round(words_model: Path, stub_python: Path, tmp_path: Path) -> None:
    with stub(stub_python, STUB_CACHE="16", STUB_METRICS="1") as url:
        runs = [attached(words_model, url, tmp_path / name, seed=5, **SIZE) for name in ("a", "b")]
        _, (warm,) = attached(words_model, url, tmp_path / "c", seed=5, flush=False, **SIZE)
    for _, (row,) in runs:
        assert (row.case["flushed_by"], row.case["cached_tokens_from"]) == ("/flush_cache", "/metrics")
        assert row.metrics["cached_prompt_tokens"] == 0
        assert row.metrics["spec_acceptance_rate"] == 0.75 and row.metrics["spec_acceptance_length"] == 4.0
    assert warm.metrics["cached_prompt_tokens"] == 256


@pytest.mark.parametrize("file", ["", "one\ntwo\n"])
def test_warm_up_prompts_are_never_measured(words_model: Path, tmp_path: Path, file: str) -> None:
    (tmp_path / "p.txt").write_text(file)
    kind = ("prompts", str(tmp_path / "p.txt")) if file else ("random", None)
    data = load(kind[0], str(words_model), 0, 8, 4, kind[1])
    config = CompareConfig(concurrency=(4,), rate=(2.0,), input_len=8, dataset=kind[0], profile=True)
    samples = Loads(config, data).samples
    before = {
        tuple(p.tokens) for (_, r), sample in samples.items() if r in (WARM_UP, PROFILE) for p in sample
    }
    measured = {tuple(p.tokens) for (_, r), sample in samples.items() if r >= 0 for p in sample}
    assert len(before) == 2 * (4 + 4) and not before & measured


def test_seed_is_drawn_once_for_a_run(words_model: Path, tmp_path: Path) -> None:
    from fk_bench.serving.compare.serve_compare import prepare

    made = [prepare(CompareConfig(model=str(words_model)), tmp_path / name, False) for name in "ab"]
    assert made[0].seed is not None and made[0].seed != made[1].seed
    assert prepare(CompareConfig.load(tmp_path / "a/run.json"), tmp_path / "a", True).seed == made[0].seed
    assert prepare(CompareConfig(model=str(words_model), seed=0), tmp_path / "c", False).seed == 0


METRICS = """\
# TYPE vllm:prefix_cache_hits counter
vllm:prefix_cache_hits_total{engine="0"} 32.0
vllm:prefix_cache_hits_total{engine="1"} 16.0
# TYPE sglang:spec_accept_length gauge
sglang:spec_accept_length{tp_rank="0"} 2.5
"""
DRAFTS = """\
# TYPE vllm:spec_decode_num_drafts counter
vllm:spec_decode_num_drafts_total 40.0
# TYPE vllm:spec_decode_num_accepted_tokens counter
vllm:spec_decode_num_accepted_tokens_total 50.0
# TYPE vllm:spec_decode_num_accepted_tokens_per_pos counter
vllm:spec_decode_num_accepted_tokens_per_pos_total{position="0"} 30.0
vllm:spec_decode_num_accepted_tokens_per_pos_total{position="1"} 20.0
# TYPE fastkernels:spec_decode_synthetic gauge
fastkernels:spec_decode_synthetic 1.0
"""


def test_counters_of_hosts() -> None:
    assert counters.parse(METRICS) == {"cached": 48.0, "accept_length": 2.5}
    assert counters.parse('{"data": []}') == counters.parse("") == counters.parse("<html>\n{") == {}


def test_drafts_are_counted_by_place() -> None:
    after = counters.parse(DRAFTS)
    assert after["synthetic"] == 1.0
    metrics, _ = counters.metrics_of([], {"drafts": 20.0, "accepted": 20.0, "accepted_0": 20.0}, after)
    assert metrics == {
        "spec_acceptance_length": 2.5, "spec_acceptance_rate_0": 0.5, "spec_acceptance_rate_1": 1.0,
    }  # fmt: skip


@pytest.mark.parametrize(
    ("args", "env", "said"),
    [
        (["--speculative-config", FORCED], {}, "length 2.0"),
        (["--dtype", "auto", f"--speculative-config={FORCED}"], {}, "length 2.0"),
        (
            ["--speculative-config", FORCED.replace("length", "rates").replace("2.0", "[1, 0.5]")],
            {},
            "rates [1, 0.5]",
        ),
        ([], {"SGLANG_SIMULATE_ACC_LEN": "3"}, "length 3"),
        (["--speculative-config", '{"method": "ngram", "num_speculative_tokens": 2}'], {}, ""),
        (["--speculative-config", "{"], {}, ""),
        (["--speculative-config"], {}, ""),
    ],
)
def test_lanes_with_forced_drafts_are_labelled(
    args: list[str], env: dict[str, str], said: str, tmp_path: Path
) -> None:
    """In each of their rows, and once as a warning."""
    lane = Lane("fastkernels", "fastkernels", False, sys.executable, env, tuple(args), "http://localhost")
    assert lane.synthetic_acceptance == said
    record = Record(tmp_path, "serve-compare", "m")
    found = [record.row(lane, Status.OK, "", {"kind": kind}) for kind in ("lane", "round")]
    assert [row.case.get("synthetic_acceptance", "") for row in found] == [said] * 2
    warnings = synthetic_warnings(found)
    assert len(warnings) == bool(said) and all(
        f"synthetic acceptance of drafts, {said}" in w for w in warnings
    )


def done(prompt: int, cached: int | None) -> Trace:
    return Trace(0.0, [Chunk(0.1)], prompt_tokens=prompt, output_tokens=1, cached_tokens=cached)


def test_usage_takes_precedence_over_counters() -> None:
    before, after = {"cached": 10.0}, {"cached": 90.0}
    assert counters.metrics_of([done(100, 40), done(100, 0)], before, after) == (
        {"cached_prompt_tokens": 40.0, "prefix_cache_hit_rate": 0.2}, "usage"
    )  # fmt: skip
    assert counters.metrics_of([done(100, None)], before, after)[0]["cached_prompt_tokens"] == 80.0
    assert counters.metrics_of([done(100, None)], {}, {}) == ({}, None)


def test_warning_allows_a_common_first_token() -> None:
    found = {"requests": 4.0, "prompt_tokens": 512.0}
    assert cached_warning(found) == cached_warning({**found, "cached_prompt_tokens": 4.0}) == ""
    assert "64 of 512 prompt tokens" in cached_warning({**found, "cached_prompt_tokens": 64.0})
