"""Metrics against traces computed by hand."""

from __future__ import annotations

import pytest
from fk_bench.serving.load.client import read_event
from fk_bench.serving.load.metrics import Chunk, Trace, parse_slo, summarize


def trace(sent: float, chunks: list[tuple[float, int | None]], n: int | None, prompt: int = 10) -> Trace:
    return Trace(sent, [Chunk(t, k) for t, k in chunks], prompt_tokens=prompt, output_tokens=n)


def test_definitions() -> None:
    t = trace(10.0, [(10.5, 1), (10.6, 1), (10.8, 1)], 3)
    assert t.ttft == pytest.approx(0.5)
    assert t.e2el == pytest.approx(0.8)
    assert t.tpot == pytest.approx(0.15)
    assert t.itl == pytest.approx([0.1, 0.2])


def test_ttft_counts_chunk_with_empty_text() -> None:
    t = Trace(0.0)
    read_event(t, '{"choices": [], "usage": null}', 0.1)
    read_event(t, '{"choices": [{"text": "", "token_ids": [7]}]}', 0.2)
    read_event(t, '{"choices": [{"text": "a", "token_ids": [8, 9], "finish_reason": "length"}]}', 0.5)
    read_event(t, '{"choices": [], "usage": {"prompt_tokens": 4, "completion_tokens": 3}}', 0.6)
    read_event(t, "[DONE]", 0.7)
    assert (t.ttft, t.e2el, t.token_ids, t.text, t.finish_reason) == (0.2, 0.5, [7, 8, 9], "a", "length")
    assert t.tpot == pytest.approx((0.5 - 0.2) / 2)
    assert [c.tokens for c in t.chunks] == [1, 2]
    assert t.ok


def test_no_tpot_below_two_tokens() -> None:
    assert trace(0.0, [(0.1, 1)], 1).tpot is None
    assert "tpot_ms_mean" not in summarize([trace(0.0, [(0.1, 1)], 1)])


def test_token_count_is_from_usage() -> None:
    t = trace(0.0, [(1.0, 4), (2.0, 4)], 8)
    assert t.tpot == pytest.approx(1 / 7)
    assert summarize([t])["tokens_per_chunk_mean"] == 4


def test_closing_chunk_adds_no_gap() -> None:
    t = trace(0.0, [(1.0, 1), (2.0, 1), (2.001, 0)], 2)
    assert t.itl == pytest.approx([1.0])
    unknown = trace(0.0, [(1.0, None), (2.0, None)], 2)
    assert unknown.itl == pytest.approx([1.0])


def test_throughput_spans_first_send_to_last_chunk() -> None:
    traces = [trace(0.0, [(1.0, 1), (2.0, 1)], 2), trace(1.0, [(2.0, 1), (4.0, 1)], 6)]
    m = summarize(traces, gpus=2)
    assert m["duration_s"] == 4.0
    assert m["requests_per_s"] == 0.5
    assert m["output_tokens_per_s"] == 2.0
    assert m["total_tokens_per_s"] == (8 + 20) / 4
    assert m["output_tokens_per_s_per_gpu"] == 1.0
    assert m["tokens_per_s_per_user"] == pytest.approx((1 / 1.0 + 1 / 0.4) / 2)
    assert m["ttft_ms_mean"] == m["ttft_ms_p50"] == 1000.0
    assert m["e2el_ms_p99"] == pytest.approx(2000 + 0.99 * 1000)


def test_failed_requests_count_without_tokens() -> None:
    bad = Trace(0.0, error="HTTP 500")
    m = summarize([bad, trace(0.0, [(1.0, 1), (2.0, 1)], 2)])
    assert (m["requests"], m["requests_failed"], m["output_tokens"]) == (2, 1, 2)
    assert summarize([bad]) == {"requests": 1, "requests_failed": 1}
    no_usage = trace(0.0, [(1.0, 1)], None)
    assert not no_usage.ok


def test_goodput() -> None:
    fast = trace(0.0, [(0.1, 1), (0.2, 1)], 2)
    late = trace(0.0, [(1.0, 1), (2.0, 1)], 2)
    one = trace(0.0, [(0.1, 1)], 1)  # no TPOT: it violates none
    failed = Trace(0.0, error="x")
    m = summarize([fast, late, one, failed], slo_ms=parse_slo("ttft:500,tpot:150"))
    assert m["goodput_requests_per_s"] == pytest.approx(2 / 2.0)


@pytest.mark.parametrize("text", ["ttf:5", "ttft", "ttft:x", "tpot:0", "tpot:-1", "ttft:nan"])
def test_bad_slo(text: str) -> None:
    with pytest.raises(ValueError, match="--slo"):
        parse_slo(text)


@pytest.mark.parametrize(
    ("data", "error"),
    [
        ('{"error": {"message": "too long"}}', "too long"),
        ('{"object": "error", "message": "no"}', "no"),
        ("{not json", "not JSON in the stream"),
    ],
)
def test_errors_in_the_stream(data: str, error: str) -> None:
    t = Trace(0.0)
    read_event(t, data, 0.1)
    assert t.error is not None and error in t.error
    assert not t.ok
