"""fastkernels.patch("vllm"): the next engine of this process, or of its children, is built patched."""

import dataclasses
import gc
import os

import psutil
import pytest
from fk_integrations.vllm import host
from support.hosts.vllm_engine import generate, make_llm

import fastkernels
from fastkernels.core import registry
from fastkernels.patch import PatchError


def test_patch_by_name(monkeypatch):
    from vllm.config import VllmConfig

    stock = VllmConfig.compute_hash
    asleep = VllmConfig().compute_hash()
    report = fastkernels.patch("vllm", ops=["rms_norm"])
    assert {(r.op, r.state) for r in report.rows} == {("rms_norm", "planned")} and not report.verified
    assert os.environ["FASTKERNELS"] == "1" and os.environ["FASTKERNELS_OPS"] == "rms_norm"
    with pytest.raises(PatchError, match="set already"):
        fastkernels.patch("vllm")
    llm = make_llm(os.environ["TINY_LLAMA"])
    assert VllmConfig().compute_hash() != asleep
    generate(llm)
    assert report.refresh().verified and report.patched_modules == 5
    with pytest.raises(PatchError, match="patched already"):
        fastkernels.patch(llm, ops=["silu_and_mul"])
    report.undo()
    assert "FASTKERNELS" not in os.environ and "FASTKERNELS_REPORT" not in os.environ
    assert VllmConfig().compute_hash() != asleep  # the engine stays patched, and its key with it
    del llm
    gc.collect()
    assert VllmConfig.compute_hash is stock and VllmConfig().compute_hash() == asleep


def test_measuring_leaves_the_memory_to_the_kv_cache(monkeypatch, tmp_path):
    """vLLM's cache gets what the process has left of its share: within 0.5% of 8 GiB of blocks."""
    memory = []

    def patch_model(*args, **kwargs):
        memory.append(psutil.Process().memory_info().rss)
        stock(*args, **kwargs)
        memory.append(psutil.Process().memory_info().rss)

    stock, linear = host._patch, registry.get("linear").op
    monkeypatch.setattr(host, "_patch", patch_model)
    monkeypatch.setattr(
        linear, "key", dataclasses.replace(linear.key, propose=lambda *args: [("reference", {})])
    )
    monkeypatch.setenv("FASTKERNELS_VERIFY", "1")
    monkeypatch.setenv("FASTKERNELS_CACHE", str(tmp_path))
    report = fastkernels.patch("vllm")
    llm = make_llm(os.environ["TINY_LLAMA"], dtype="float32")  # vLLM packs no weights of float32
    lines = [line for row in report.refresh().rows for line in row.measured]
    # four shapes in decodes of seven sizes; prompts, of up to 1,024 tokens, run three of them
    assert sum("(reference: " in line for line in lines) == 4 * 7 + 3
    assert report.seconds["time proposals"] > 0 and "capture graphs" not in report.seconds
    before, after = memory
    assert after - before < 0.005 * (8 << 30)
    report.undo()
    del llm
    gc.collect()


def test_filter_without_our_plugin_is_refused(monkeypatch):
    monkeypatch.setenv("VLLM_PLUGINS", "other")
    with pytest.raises(PatchError, match="VLLM_PLUGINS='other'"):
        fastkernels.patch("vllm")
