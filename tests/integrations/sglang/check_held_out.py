"""Held-out architectures in SGLang: each one unpatched, patched and after undo."""

import pytest
from support.hosts.held_out import check_same, make_held_out
from support.hosts.sglang_engine import generate, make_engine, with_stand_ins

import fastkernels
from fastkernels.core import registry

# Engines of other architectures end in kernels that SGLang has for GPUs only.
NAMES = ("cohere", "gemma3", "granite", "llama_linear", "olmo2", "qwen2", "qwen3")


@pytest.mark.parametrize("name", NAMES)
def test_held_out_model_is_patched_and_undone(name, tmp_path, monkeypatch):
    monkeypatch.setenv("TINY_LLAMA", str(make_held_out(tmp_path / name, name, "float32")))
    with with_stand_ins():
        engine = make_engine(context_length=128, max_total_tokens=512)
    try:
        stock = generate(engine)
        report = fastkernels.patch(engine, ops=registry.op_names())
        patched = generate(engine)
        report.refresh()
        print(report)
        check_same(patched, stock)
        assert report.active and not any(row.fallbacks for row in report.rows)
        report.undo()
        assert generate(engine) == stock
    finally:
        engine.shutdown()
