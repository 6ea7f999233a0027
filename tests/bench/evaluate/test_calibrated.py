"""Items of the suite `full`: each has a metric that sees planted faults, or is listed as never calibrated."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from fk_bench.evaluate import suites
from fk_bench.evaluate.run.fidelity import BOUNDS
from fk_bench.evaluate.run.hosts import open_host
from fk_bench.evaluate.run.items import Work, calibrated, options_of
from support.tiny import KINDS, make_tiny
from support.tiny_pipelines import make_tiny_flux, make_tiny_sdxl

FULL = suites.load("full")
ENTRIES = {e.name: e for e in FULL.entries}
SMALL = {e.name for e in suites.load("small").entries}  # test_requests.py calibrates all of them
LIBRARIES = {
    e.name for e in FULL.entries if e.item.host in ("torchrec", "torch_geometric", "ultralytics", "openfold3")
}
FLA = {"gla/chat/fla", "retnet/chat/fla"}
# Sizes of images with which items of timm, transformers and diffusers run on two cores.
IMAGES = {
    e.name: e for e in FULL.entries if e.item.host in ("timm", "transformers", "diffusers") and e.model.probe
} | {
    e.name: replace(e, model=replace(e.model, image_size=64))
    for e in FULL.entries
    if e.item.host in ("timm", "transformers", "diffusers") and not e.model.probe
}
TINY_PIPELINES = {"sdxl": make_tiny_sdxl, "flux.1": make_tiny_flux}  # theirs have 10 and 48 GB of weights
NAMES = {
    "gemma1": "gemma",
    "gemma3": "gemma3_text",
    "gemma4": "gemma4_text",
    "gemma4_unified": "gemma4_unified_text",
}
TEXTS = {
    e.name: NAMES.get(e.item.model, e.item.model)
    for e in FULL.entries
    if e.item.host == "fastkernels"
    and e.item.workload == "chat"
    and NAMES.get(e.item.model, e.item.model) in KINDS
}
# Never calibrated: an evaluation of them says itself whether the item is sensitive. Remove a line with its calibration.
NEVER = {
    "gaussians-gsplat/views/gsplat": "the library's kernels need a GPU",
    "rwkv7/chat/fla": "Triton's interpreter takes minutes",
    **{
        f"{model}/chat/fastkernels": "no tiny checkpoint with vision weights"
        for model in ("qwen2_5_omni", "qwen2_5_vl", "qwen2_vl", "qwen3_vl", "qwen3_vl_moe")
    },
    # Recorded on a GPU: llama-3_1-8b of the suite default in vLLM. Others need a start of the server each.
    **{e.name: "a server's start each" for e in FULL.entries if e.item.host in ("vllm", "sglang")},
}


def test_never_calibrated_items_are_listed() -> None:
    covered = SMALL | LIBRARIES | FLA | IMAGES.keys() | TEXTS.keys()
    assert not covered & NEVER.keys(), f"calibrated, and listed: {sorted(covered & NEVER.keys())}"
    left = ENTRIES.keys() - covered
    assert left == NEVER.keys(), f"add to NEVER with a reason, or calibrate: {sorted(left ^ NEVER.keys())}"


@pytest.mark.parametrize("host", sorted({e.item.host for e in FULL.entries}))
def test_items_have_a_metric_with_a_bound(host: str) -> None:
    kinds = {Work(e, 0, 0).kind for e in FULL.entries if e.item.host == host}
    assert kinds and all(0 < BOUNDS[kind] <= 1 for kind in kinds)


class Here:
    """A host of this process in the place of a `Side`."""

    def __init__(self, entry: suites.Entry, **more: Any):
        options = options_of(entry, entry.model, FULL, "float32", False, 2)
        self.host = open_host({**options, "compiled": False, **more})

    def call(self, do: str, **given: Any) -> dict[str, Any]:
        return getattr(self.host, do)(**given) or {}


def sees_faults(entry: suites.Entry, side: Any, vocab: int = 0) -> None:
    scale = calibrated(Work(entry, 7, vocab), side)
    assert scale.sensitive, scale
    assert {"residual", "scale"} <= set(scale.faults) and scale.noise < 1e-3, scale


@pytest.mark.slow
@pytest.mark.parametrize("name", sorted(IMAGES))
def test_images_of_libraries_see_planted_faults(name: str, tmp_path: Path) -> None:
    entry, more = IMAGES[name], {}
    entry = replace(entry, model=entry.model.small, workload=replace(entry.workload, throughput=2, calls=1))
    if make := TINY_PIPELINES.get(entry.model.named):
        entry = replace(entry, model=replace(entry.model, image_size=64))
        more = {"model": str(make(tmp_path / "model")), "load_format": "auto"}
    sees_faults(entry, Here(entry, **more))


@pytest.mark.slow
@pytest.mark.parametrize("name", sorted(TEXTS))
def test_text_of_our_engine_sees_planted_faults(name: str, tmp_path: Path) -> None:
    """Tiny checkpoints: the architecture and its faults, not its sizes."""
    entry = ENTRIES[name]
    work = replace(entry.workload, throughput=4, lengths=((9, 6), (5, 8), (17, 4)))
    tiny = replace(entry.model, public="", config={"model_type": "llama"})
    entry = replace(entry, model=tiny, workload=work)
    folder = str(make_tiny(tmp_path / "model", TEXTS[name], "float32"))
    sees_faults(entry, Here(entry, model=folder, load_format="auto"), 512)
