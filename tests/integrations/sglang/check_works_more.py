"""Features that need an engine of their own: an fp8 KV cache, sliding windows, a quantized model."""

import json
import os
from pathlib import Path

import pytest
from support.hosts.sglang_engine import generate, ids, make_engine, with_stand_ins
from support.tiny import make_tiny
from support.variants import make_quantized

import fastkernels

BASE = Path(os.environ["TINY_LLAMA"])


@pytest.fixture
def build(monkeypatch):
    """build(model, **options) -> an engine, shut down with the test."""
    built = []

    def one(model=BASE, **options):
        monkeypatch.setenv("TINY_LLAMA", str(model))
        with with_stand_ins():
            built.append(make_engine(**options))
        return built[-1]

    yield one
    for engine in built:
        engine.shutdown()


def rows_of_patch(engine, ops):
    """{op: row} of a live patch; the engine's outputs are the same before, with it and after."""
    stock = generate(engine)
    with fastkernels.patch(engine, ops=ops) as report:
        assert ids(generate(engine)) == ids(stock)
        rows = {r.op: r for r in sorted(report.refresh().rows, key=lambda r: r.modules)}
        assert report.verified and not any(r.fallbacks for r in report.rows)
    assert generate(engine) == stock
    return rows


def test_attention_on_an_fp8_kv_cache_is_left_with_the_reason(build):
    rows = rows_of_patch(build(kv_cache_dtype="fp8_e5m2"), ["rms_norm", "attention", "linear"])
    assert rows["rms_norm"].modules == 5 and rows["linear"].modules == 8
    reason = "2 unsupported: a KV cache of torch.float8_e5m2 is not supported"
    assert (rows["attention"].state, rows["attention"].reason) == ("off", reason)


def test_experts_of_the_cpu_are_left_with_the_reason(build, tmp_path):
    model = make_tiny(tmp_path / "mixtral", "mixtral", "float32")
    rows = rows_of_patch(build(model), ["rms_norm", "attention", "linear", "fused_experts"])
    assert rows["rms_norm"].modules == 5 and rows["attention"].calls > 0
    reason = "2 unsupported: its method runs forward_cpu, which calls no runner"
    assert (rows["fused_experts"].state, rows["fused_experts"].reason) == ("off", reason)


def test_sliding_window(build, tmp_path):
    """Gemma 2's every other layer has a window; without capping, which SGLang does in Triton."""
    plain = {"final_logit_softcapping": None, "attn_logit_softcapping": None}
    model = make_tiny(tmp_path / "gemma2", "gemma2", "float32", sliding_window=8, **plain)
    engine = build(model, disable_hybrid_swa_memory=True)
    stock = generate(engine)
    rows = rows_of_patch(engine, ["gemma_rms_norm", "gelu_and_mul", "attention"])
    assert (rows["gemma_rms_norm"].modules, rows["attention"].modules) == (9, 2)
    assert rows["attention"].calls > 0
    engine.shutdown()
    config = json.loads((model / "config.json").read_text())
    (model / "config.json").write_text(json.dumps({**config, "sliding_window": 512}))
    assert generate(build(model, disable_hybrid_swa_memory=True)) != stock  # the window matters


def test_quantized_linear_layers_are_left_with_the_reason(build, tmp_path):
    rows = rows_of_patch(
        build(make_quantized(tmp_path / "awq", BASE, "awq"), dtype="float16"),
        ["rms_norm", "linear", "gated_mlp"],
    )
    assert rows["rms_norm"].modules == 5 and rows["linear"].state == rows["gated_mlp"].state == "off"
    assert rows["linear"].reason.startswith(
        "8 unsupported: quant_method is sglang.srt.layers.quantization.awq"
    )
    assert "is quantized by AWQ" in rows["gated_mlp"].reason
