"""Replay of a trace with arrival times, and the other loads, through whole runs against a stub server."""

from __future__ import annotations

import itertools
import json
from pathlib import Path

import pytest
from fk_bench.serving.config import CompareConfig
from fk_bench.serving.load.datasets import DatasetError, load, load_vocabulary
from fk_bench.serving.load.replay import prompts_of, read_trace
from fk_bench.serving.measure import Loads
from support.serving.attached import attached, stub

# ms, input_length, output_length, hash ids of blocks of 16 tokens
TRACE = ((5000, 40, 3, [1, 2, 3]), (5600, 10, 1, [9]), (5300, 48, 2, [1, 5, 6]), (5150, 40, 2, [1, 2, 4]))


def trace_file(folder: Path, lines: tuple[tuple[int, int, int, list[int]], ...] = TRACE) -> Path:
    keys = ("timestamp", "input_length", "output_length", "hash_ids")
    file = folder / "trace.jsonl"
    file.write_text("".join(json.dumps(dict(zip(keys, line, strict=True))) + "\n" for line in lines))
    return file


def test_trace_replay_keeps_times_and_prefixes(words_model: Path, stub_python: Path, tmp_path: Path) -> None:
    """The server sees the trace's arrival times, lengths and shared blocks, with fresh tokens in each round."""
    file, log = trace_file(tmp_path), tmp_path / "log"
    options = {"trace": str(file), "trace_block_size": 16, "trace_speed": (2.0,), "flush": False}
    with stub(stub_python, STUB_CACHE="16", STUB_LOG=str(log)) as url:
        line, rows = attached(words_model, url, tmp_path / "run", rounds=2, **options)
        before = log.read_text()
        attached(words_model, url, tmp_path / "run")  # resumed: it has nothing left to do
        assert log.read_text() == before
    assert line["at"] == "trace=2" and [r.round for r in rows] == [0, 1]
    for row in rows:
        assert (row.case["load"], row.case["trace"], row.case["num_prompts"]) == ("trace", "trace.jsonl", 4)
        assert row.metrics["prompt_tokens"] == 138 and row.metrics["output_tokens"] == 8
        assert row.metrics["cached_prompt_tokens"] == 48 and "warning" not in row.case
        lines = (tmp_path / f"run/requests/vllm.trace=2.r{row.round}.jsonl").read_text().splitlines()
        requests = [json.loads(x) for x in lines]
        assert [(r["prompt_tokens"], r["output_tokens"], r["cached_tokens"]) for r in requests] == [
            (40, 3, 0), (40, 2, 32), (48, 2, 16), (10, 1, 0)
        ]  # fmt: skip
        assert [r["due_s"] for r in requests] == pytest.approx([0.0, 0.075, 0.15, 0.3], abs=0.05)
    posts = [x for x in map(json.loads, before.splitlines()) if x["path"] == "/v1/completions"]
    measured = posts[4:8]  # after four requests of the warm-up
    assert [p["prompt"] for p in measured] == [40, 40, 48, 10]
    after = [p["time"] - measured[0]["time"] for p in measured]
    # 0, 0.075, 0.15 and 0.3 s, with room for a busy machine
    assert after == sorted(after) and after[2] > 0.08 and 0.2 < after[3] < 1.0


def test_hash_ids_stand_for_equal_tokens(words_model: Path, tmp_path: Path) -> None:
    vocabulary = load_vocabulary(str(words_model))
    found = read_trace(str(trace_file(tmp_path)), 16)
    assert [(r.at, r.input_len) for r in found] == [
        (0.0, 40), (pytest.approx(0.15), 40), (pytest.approx(0.3), 48), (pytest.approx(0.6), 10)
    ]  # fmt: skip
    a, b, c, d = (p.tokens for p in prompts_of(found, vocabulary, "0", 16))
    assert [len(x) for x in (a, b, c, d)] == [40, 40, 48, 10]
    assert a[:32] == b[:32] and a[32:] != b[32:] and a[:16] == c[:16] and a[16:32] != c[16:32]
    assert prompts_of(found, vocabulary, "1", 16)[0].tokens[:16] != a[:16]
    assert len(read_trace(str(tmp_path / "trace.jsonl"), 16, 2)) == 2


def test_rounds_and_speeds_have_fresh_tokens(words_model: Path, tmp_path: Path) -> None:
    options = {"trace": str(trace_file(tmp_path)), "trace_block_size": 16, "trace_requests": 4}
    config = CompareConfig(concurrency=(), trace_speed=(1.0, 2.0), rounds=2, seed=3, **options)
    loads = Loads(config, load("random", str(words_model), 3, 8, 4))
    hands = [loads.prompts(level, r) for level in config.levels for r in (0, 1)]
    assert len({tuple(hand[0].tokens[:16]) for hand in hands}) == 4
    assert loads.prompts(config.levels[0], 0) == hands[0]  # as in another lane
    assert max(tokens for _, tokens, _ in loads.needs()) == 256  # the warm-up: 128 + 32, and room


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "has no request"),
        ('{"timestamp": 1}', r"trace.jsonl:1: expected \{\"timestamp\": MS"),
        ('{"timestamp": 1, "input_length": 0, "output_length": 1}', "input_length must be 1 or more, got 0"),
        (
            '{"timestamp": 1, "input_length": 40, "output_length": 1, "hash_ids": [1]}',
            "1 hash_ids for 40 tokens, but blocks of 16 tokens need 3. Set the size with --trace-block-size",
        ),
    ],
)
def test_bad_trace_names_the_line(tmp_path: Path, text: str, message: str) -> None:
    (tmp_path / "trace.jsonl").write_text(text)
    with pytest.raises(DatasetError, match=message):
        read_trace(str(tmp_path / "trace.jsonl"), 16)


def test_conversations_and_shared_prefixes_hit(words_model: Path, stub_python: Path, tmp_path: Path) -> None:
    loads = ("c=2,turns=3,prompts=2", "c=1,prefix=32,groups=2,prompts=4", "c=1,prompts=2")
    ramp = {"ramp_up_strategy": "linear", "ramp_up_start_rps": 50.0, "ramp_up_end_rps": 200.0}
    with stub(stub_python, STUB_CACHE="16", STUB_LOG=str(tmp_path / "log"), STUB_PROFILER="1") as url:
        line, rows = attached(
            words_model, url, tmp_path / "run", loads=loads, input_len=16, output_len=4, profile=True, burstiness=2.0,
            num_prompts=(3,), **ramp,
        )  # fmt: skip
    assert line["warnings"] == []
    by = {(r.kind, r.case["load"], r.case.get("turns", 1), r.case.get("prefix_len", 0)): r for r in rows}
    talk = by["round", "concurrency", 3, 0]
    # Turns of 16, 36 and 56 prompt tokens: 16 and 32 of them are in whole blocks of the turn before.
    assert talk.metrics["requests"] == 6 and talk.metrics["prompt_tokens"] == 2 * (16 + 36 + 56)
    assert talk.metrics["cached_prompt_tokens"] == 2 * (16 + 32)
    assert talk.metrics["ttft_later_turns_ms_p50"] > 0 and talk.metrics["ttft_first_turn_ms_p50"] > 0
    assert by["round", "concurrency", 1, 32].metrics["cached_prompt_tokens"] == 2 * 32
    assert by["round", "concurrency", 1, 0].metrics["cached_prompt_tokens"] == 0
    climb = by["round", "ramp", 1, 0]
    assert (climb.case["ramp_up_strategy"], climb.case["burstiness"]) == ("linear", 2.0)
    assert climb.case["own"] == {"start": 50.0} and climb.metrics["lag_ms_mean"] >= 0
    assert sum(kind == "profile" for kind, *_ in by) == 4
    assert all(r.status == "ok" for r in rows)
    paths = [json.loads(x)["path"] for x in (tmp_path / "log").read_text().splitlines()]
    inside = [len(list(g)) for k, g in itertools.groupby(_between(paths)) if k]
    assert inside == [2 * 3, 1, 1, 4]  # the warm-up's number of requests


def _between(paths: list[str]) -> list[int]:
    """Of every completion: which profile it is in, from 1; 0: none. A profile is between a start and a stop."""
    found, number, on = [], 0, False
    for path in paths:
        if path in ("/start_profile", "/stop_profile"):
            on = path == "/start_profile"
            number += on
        elif path == "/v1/completions":
            found.append(number if on else 0)
    return found


def test_server_without_profiler_is_unsupported(words_model: Path, stub_python: Path, tmp_path: Path) -> None:
    with stub(stub_python) as url:
        _, rows = attached(
            words_model, url, tmp_path / "run", concurrency=(1,), num_prompts=(1,), profile=True
        )
    (row,) = [r for r in rows if r.kind == "profile"]
    assert (row.status, row.reason) == ("unsupported", "POST /start_profile: HTTP 404")


@pytest.mark.slow
def test_search_finds_the_stubs_slots(words_model: Path, stub_python: Path, tmp_path: Path) -> None:
    """With 3 slots of 0.3 s, a fourth request at once waits 0.1 s for a slot, and 0.03 s for its first token."""
    with stub(stub_python, STUB_SLOTS="3", STUB_DELAY="0.03") as url:
        line, rows = attached(
            words_model, url, tmp_path / "run", search=("concurrency=1-8",), slo={"ttft": 90.0}, output_len=10,
            num_prompts=(8,), slo_attainment=0.8,
        )  # fmt: skip
    (row,) = [r for r in rows if r.kind == "round"]
    assert row.metrics["max_concurrency_within_slo"] == 3.0
    assert row.case["probes"] == {"1": True, "2": True, "4": False, "3": True}
    assert (line["at"], line["lanes"][0]["status"]) == ("max-c=1-8", "ok")
    probes = {r.case["value"]: r.metrics for r in rows if r.kind == "probe"}
    assert list(probes) == [1.0, 2.0, 4.0, 3.0]
    assert probes[4.0]["slo_attainment"] < 0.8 <= probes[3.0]["slo_attainment"]
    assert row.metrics["slo_attainment"] == probes[3.0]["slo_attainment"]
