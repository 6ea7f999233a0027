"""fastkernels.patch("vllm"): the next engine of this process, or of its children, is built patched."""

import gc
import os

import pytest
from support.hosts.vllm_engine import generate, make_llm

import fastkernels
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


def test_filter_without_our_plugin_is_refused(monkeypatch):
    monkeypatch.setenv("VLLM_PLUGINS", "other")
    with pytest.raises(PatchError, match="VLLM_PLUGINS='other'"):
        fastkernels.patch("vllm")
