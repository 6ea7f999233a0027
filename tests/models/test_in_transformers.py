"""Every language model of ours in transformers: each module is patched, or the report says why not."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import transformers
from support.hosts.leaves import state, unexplained
from support.media_oracle import MediaOracle, clip, tone
from support.tiny import (
    FLA,
    IMAGE,
    KINDS,
    MODELS,
    OMNI,
    SIZES,
    VLMS,
    make_tiny_omni,
    make_tiny_vlm,
    small_videos,
)
from support.vlm_oracle import VlmOracle, image

import fastkernels
from fastkernels.core import registry
from fastkernels.models.common.descriptions.registry import models

NORMS = {"rms_norm", "gemma_rms_norm", "layer_norm"}


@pytest.mark.parametrize("kind", sorted({kind for kind, _ in MODELS.values()} - {*FLA, "ttt_e2e"}))
def test_every_module_is_patched_or_has_a_reason(kind: str) -> None:
    prefix, differs = KINDS[kind]
    cls = getattr(transformers, f"{prefix}ForCausalLM")
    model = cls(cls.config_class(**{**SIZES, **differs})).eval()
    before, ids = state(model), torch.arange(5, 45).view(2, 20)
    with torch.inference_mode():
        stock = model(ids).logits
    with fastkernels.patch(model, ops=registry.op_names()) as report:
        assert unexplained(model, before, report.rows) == []
        active = {row.op for row in report.active}
        with torch.inference_mode():
            torch.testing.assert_close(model(ids).logits, stock, atol=1e-4, rtol=1e-4)
        changed = {name for name, now in state(model).items() if now != before[name]}
    norms = {name for name in before if "norm" in name.rpartition(".")[2]}
    assert norms and norms <= changed and active & NORMS
    # DeepSeek-V2 rotates complex numbers there; GPT-OSS has half of the cosines; Gemma 4 rotates one tensor a call;
    # indexers have heads behind tokens; MPT has ALiBi; Mamba, Jamba and Kimi Linear have no positions
    other = {
        "mpt", "deepseek_v2", "gpt_oss", "gemma4_text", "gemma4_unified_text", "deepseek_v32", "glm_moe_dsa", "mamba",
        "mamba2", "jamba", "kimi_linear",
    }  # fmt: skip
    assert ("rotary_emb" in active) is (kind not in other)
    assert state(model).keys() == before.keys() and all(
        state(model)[name][0] is before[name][0] for name in norms
    )


@pytest.mark.parametrize("kind", VLMS)
def test_vlm_with_patched_modules_equals_stock(kind: str, tmp_path: Path) -> None:
    """Patch embedding, norms, MLPs and mergers of the tower run ours; its attention stays the host's, with a reason."""
    oracle = VlmOracle(make_tiny_vlm(tmp_path / kind, kind))
    model, inputs = oracle.model, oracle.inputs(f"a {IMAGE} b {IMAGE}", [image(0, 40, 24), image(1, 24, 56)])
    before = state(model)
    with torch.inference_mode():
        stock = model(**inputs).logits
        with fastkernels.patch(model, ops=registry.op_names()) as report:
            torch.testing.assert_close(model(**inputs).logits, stock, atol=1e-4, rtol=1e-4)
            changed = {name for name, now in state(model).items() if now != before[name]}
            assert unexplained(model, before, report.rows) == []
    visual = {name.partition("visual.")[2] for name in changed if "visual." in name}
    assert "patch_embed.proj" in visual and {"blocks.0.norm1", "blocks.1.norm2"} <= visual
    assert {"gelu", "patch_embedding", "rms_norm"} <= {row.op for row in report.active}
    assert state(model).keys() == before.keys()


def test_omni_with_patched_modules_equals_stock(tmp_path: Path) -> None:
    """The same, with an audio tower."""
    with small_videos():
        oracle = MediaOracle(make_tiny_omni(tmp_path / "omni"))
        media = {"audio": [tone(1, 0.53)], "video": [clip(2, 4, 32, 24)], "image": [image(0, 40, 24)]}
        inputs = oracle.inputs({"prompt": "".join(OMNI[kind] for kind in media), "multi_modal_data": media})
    model = oracle.model
    before = state(model)
    with torch.inference_mode():
        stock = model(**inputs).logits
        with fastkernels.patch(model, ops=registry.op_names()) as report:
            torch.testing.assert_close(model(**inputs).logits, stock, atol=1e-4, rtol=1e-4)
            changed = {name for name, now in state(model).items() if now != before[name]}
            # A pool that transformers' forward does not call
            assert unexplained(model, before, report.rows) == ["AvgPool1d (model.audio_tower.avg_pooler)"]
    assert {"model.visual.patch_embed.proj", "model.visual.blocks.0.norm1"} <= changed
    assert {"model.audio_tower.layers.0.final_layer_norm", "model.audio_tower.ln_post"} <= changed
    assert state(model).keys() == before.keys()


def test_model_classes_are_those_of_the_models() -> None:
    names = {f"{KINDS[kind][0]}ForCausalLM" for kind, _ in MODELS.values()}
    texts = [m.arch for m in models().values() if m.arch.runner == "Generate" and not m.arch.media]
    assert names == {name for arch in texts for name in arch.names}
