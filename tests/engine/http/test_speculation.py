"""A server with prompt lookup: streams of several tokens an event, usage, and the counters of drafts."""

from __future__ import annotations

import openai
import pytest
from fk_bench.serving.serve import EngineOptions, engine_fields
from support.eagle import make_scripted_eagle3
from support.live import live_server, metric
from support.tiny import make_scripted

from fastkernels.engine.http.requests.config import ServerConfig

SPECULATION = (
    '{"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_min": 1, "disable_by_batch_size": null}'
)


def test_stream_has_all_tokens_and_counters_count_them(tmp_path):
    folder = make_scripted(tmp_path, "abcdefghijklm")
    options = EngineOptions(speculative_config=SPECULATION)
    settings = {"speculative_config": engine_fields("m", options)["speculative_config"]}
    with (
        live_server(folder, ServerConfig("tiny"), **settings) as (url, _),
        openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0) as client,
    ):
        given = {
            "model": "tiny",
            "prompt": "abcdefghijklm a",
            "max_tokens": 30,
            "temperature": 0,
            "logprobs": 1,
        }
        whole = client.completions.create(**given)
        assert (whole.choices[0].text, whole.usage.completion_tokens) == ("bcdefghijklm", 13)
        events = list(client.completions.create(**given, stream=True, stream_options={"include_usage": True}))
        texts = [event.choices[0].text for event in events if event.choices]
        assert "".join(texts) == whole.choices[0].text and max(map(len, texts)) == 4
        tokens = [t for event in events if event.choices for t in event.choices[0].logprobs.tokens]
        assert tokens == whole.choices[0].logprobs.tokens and len(tokens) == 13
        assert events[-1].usage.completion_tokens == 13
        assert metric(url, "vllm:generation_tokens_total") == 26
        assert metric(url, "vllm:spec_decode_num_drafts_total") == 6
        for name in ("draft_tokens", "accepted_tokens"):
            assert metric(url, f"vllm:spec_decode_num_{name}_total") == 18
        assert metric(url, "vllm:spec_decode_num_accepted_tokens_per_pos_total", position="2") == 6


def test_measured_costs_of_drafts_are_metrics(tmp_path):
    folder = make_scripted(tmp_path, "abcdefghijklm")
    settings = {"method": "ngram", "num_speculative_tokens": 3}
    with live_server(folder, ServerConfig("tiny"), speculative_config=settings) as (url, server):
        ratios = server.llm.engine.scheduler.payoff.ratios
        for size, ratio in ratios.items():
            got = metric(url, "fastkernels:spec_decode_step_ratio", sequences=str(size))
            assert got == pytest.approx(ratio)
        assert metric(url, "fastkernels:spec_decode_largest_batch") in (0, *ratios)
        assert metric(url, "fastkernels:spec_decode_steps_off_total") == 0


def test_served_eagle_counts_forced_drafts_by_position(tmp_path):
    """Two of three drafts are accepted by force in each step but the last."""
    folder = make_scripted(tmp_path / "target", "abcdefghijklm")
    source = make_scripted_eagle3(tmp_path / "eagle", folder)
    settings = {
        "method": "eagle3", "model": str(source), "num_speculative_tokens": 3,
        "rejection_sample_method": "synthetic", "synthetic_acceptance_length": 3.0,
    }  # fmt: skip
    with (
        live_server(folder, ServerConfig("tiny"), speculative_config=settings) as (url, _),
        openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0) as client,
    ):
        given = {"model": "tiny", "prompt": "b a", "max_tokens": 13, "temperature": 0}
        whole = client.completions.create(**given)
        assert whole.choices[0].text == "bcdefghijklm" and whole.usage.completion_tokens == 13
        assert metric(url, "fastkernels:spec_decode_synthetic") == 1
        for position, count in (("0", 4), ("1", 4)):
            name = "vllm:spec_decode_num_accepted_tokens_per_pos_total"
            assert metric(url, name, position=position) == count
        with pytest.raises(openai.BadRequestError, match="logprobs are not possible with synthetic"):
            client.completions.create(**given, logprobs=1)
