"""Models of images in transformers, patched in this process: mergers, and rotations with three axes; float32."""

from __future__ import annotations

import pytest
import torch

import fastkernels
from fastkernels.patch import PatchError

transformers = pytest.importorskip("transformers")

IMAGE = 120
SECTIONS = {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [2, 3, 3]}
TEXT = {
    "vocab_size": 128, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "rope_parameters": SECTIONS, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip
INTERLEAVED = {"head_dim": 16, "rope_parameters": {**SECTIONS, "mrope_interleaved": True}}
TOWER = {
    "depth": 2, "hidden_size": 32, "num_heads": 2, "patch_size": 4, "out_hidden_size": 64, "intermediate_size": 48,
}  # fmt: skip
DEEP = {**TOWER, "num_position_embeddings": 16, "deepstack_visual_indexes": [0, 1]}
# {class: (fields of the text model, of the tower, mergers)}
MODELS = {
    "Qwen2VL": ({}, {"depth": 2, "embed_dim": 32, "hidden_size": 64, "num_heads": 2, "patch_size": 4}, 1),
    "Qwen2_5_VL": ({}, {**TOWER, "window_size": 16, "fullatt_block_indexes": [1]}, 1),
    "Qwen3VL": (INTERLEAVED, DEEP, 3),
    "Qwen3VLMoe": (
        {**INTERLEAVED, "moe_intermediate_size": 32, "num_experts": 4, "num_experts_per_tok": 2}, DEEP, 3,
    ),
}  # fmt: skip


def built(name: str) -> torch.nn.Module:
    text, tower, _ = MODELS[name]
    cls = getattr(transformers, f"{name}ForConditionalGeneration")
    config = cls.config_class(
        text_config={**TEXT, **text}, vision_config=tower, image_token_id=IMAGE, video_token_id=121,
        vision_start_token_id=122, vision_end_token_id=123,
    )  # fmt: skip
    model, generator = cls(config).eval(), torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(float(parameter.dim() == 1), 0.15, generator=generator)
    return model


@torch.no_grad()
def logits(model: torch.nn.Module) -> torch.Tensor:
    """Of two prompts with images of different shapes."""
    generator = torch.Generator().manual_seed(1)
    ids = torch.tensor([[1, 122, *[IMAGE] * 8, 123, 5, 7], [1, 122, *[IMAGE] * 8, 123, 6, 9]])
    return model(
        input_ids=ids, pixel_values=torch.randn(64, 96, generator=generator),
        image_grid_thw=torch.tensor([[1, 4, 8], [1, 8, 4]]), mm_token_type_ids=(ids == IMAGE).int(),
    ).logits  # fmt: skip


@pytest.mark.parametrize("name", MODELS)
def test_mergers_and_rotations_are_patched_and_undone(name: str) -> None:
    model = built(name)
    before, classes = logits(model), [type(m) for m in model.modules()]
    report = fastkernels.patch(model, ops=["patch_merger", "rotary_emb"])
    torch.testing.assert_close(logits(model), before, atol=2e-5, rtol=0)
    rows = {row.op: row for row in report.refresh().active}
    assert rows["patch_merger"].modules == rows["patch_merger"].calls == MODELS[name][2]
    assert rows["rotary_emb"].modules == rows["rotary_emb"].calls == 2 and report.verified
    report.undo()
    assert torch.equal(logits(model), before) and [type(m) for m in model.modules()] == classes


def test_merger_with_hooks_or_other_activation_stays() -> None:
    model = built("Qwen2VL")
    merger = next(m for m in model.modules() if type(m).__name__ == "PatchMerger")
    merger.mlp[1] = torch.nn.GELU("tanh")
    with pytest.raises(PatchError, match=r"mlp\.1 is GELU, not GELU with erf"):
        fastkernels.patch(model, ops=["patch_merger"])
    merger.mlp[1] = torch.nn.GELU()
    before, seen = logits(model), []
    with fastkernels.patch(model, ops=["patch_merger"]):
        for part in (merger.mlp[1], merger.mlp):
            handle = part.register_forward_hook(lambda *_: seen.append(1))
            torch.testing.assert_close(logits(model), before, atol=2e-5, rtol=0)
            handle.remove()
    assert seen == [1, 1]
