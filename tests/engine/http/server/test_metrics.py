"""Histograms count as prometheus_client's do, and Prometheus can parse the metrics page."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st
from prometheus_client import CollectorRegistry
from prometheus_client import Histogram as Theirs
from prometheus_client.parser import text_string_to_metric_families

from fastkernels.engine.engines.llm_engine import LLMEngine
from fastkernels.engine.http.answers.histogram import Histogram, one_two_five
from fastkernels.engine.http.answers.metrics import Metrics
from fastkernels.engine.options.config import EngineConfig
from fastkernels.engine.sampling.sampling_params import SamplingParams

BUCKETS = (0.5, 1.0, 2.5, 10.0)


@given(
    st.lists(st.lists(st.sampled_from([0.0, 0.5, 0.75, 1.0, 2.0, 10.0, 11.0, 1e9]), max_size=5), max_size=5)
)
def test_histogram_counts_like_prometheus(steps):
    ours = Histogram("name", "text", BUCKETS)
    theirs = Theirs("name", "text", ["label"], buckets=BUCKETS, registry=CollectorRegistry())
    for values in steps:
        ours.observe(values)
        for value in values:
            theirs.labels("x").observe(value)
    theirs.labels("x")
    found = {(s.name, s.labels.get("le")): s.value for s in ours.family({"label": "x"}).samples}
    wanted = {
        (s.name, s.labels.get("le")): s.value
        for s in next(iter(theirs.collect())).samples
        if "created" not in s.name
    }
    assert found == wanted


def test_token_buckets():
    assert one_two_five(100) == [1, 2, 5, 10, 20, 50, 100] and one_two_five(7) == [1, 2, 5]


def test_metrics_page_has_vllm_names_and_counts(tiny):
    engine = LLMEngine(EngineConfig(str(tiny), device="cpu", max_model_len=256, num_blocks=64))
    metrics = Metrics('a "model"', engine)
    engine.add_request("a", list(range(10, 50)), SamplingParams(max_tokens=4, ignore_eos=True, n=2, seed=1))
    while engine.has_unfinished_requests():
        engine.step()
        metrics.observe(engine.take_stats())
    families = {f.name: f for f in text_string_to_metric_families(metrics.text().decode())}
    values = {s.name: s.value for f in families.values() for s in f.samples if "le" not in s.labels}
    assert values["vllm:generation_tokens_total"] == 8 and values["vllm:request_params_n_sum"] == 2
    assert (
        values["vllm:request_generation_tokens_sum"] == 8
        and values["vllm:time_to_first_token_seconds_count"] == 2
    )
    assert values["vllm:inter_token_latency_seconds_count"] == 6 and values["vllm:num_requests_running"] == 0
    assert values["vllm:prefix_cache_queries_total"] >= 80 and values["vllm:kv_cache_usage_perc"] == 0
    ended = {s.labels["finished_reason"]: s.value for s in families["vllm:request_success"].samples}
    assert ended == {"stop": 0, "length": 2, "abort": 0}
    (cache,) = families["vllm:cache_config_info"].samples
    assert (cache.labels["num_gpu_blocks"], cache.labels["block_size"], cache.value) == ("64", "16", 1)
    startup = {s.labels["phase"]: s.value for s in families["fastkernels:startup_seconds"].samples}
    assert startup == engine.phases.seconds and startup["weights"] > 0
    phases = ("queue", "prefill", "decode")
    total = sum(values[f"vllm:request_{p}_time_seconds_sum"] for p in phases)
    assert 0 < total <= values["vllm:e2e_request_latency_seconds_sum"] + 1e-3
    assert families["vllm:request_success"].samples[0].labels["model_name"] == 'a "model"'
