"""SAM 3 of transformers, patched in this process: random weights, float32."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from support.segmenters import make_sam3

import fastkernels
from fastkernels.patch import PatchError

OPS = ["attention_dense", "layer_norm", "gelu", "group_norm", "patch_embedding"]


def test_patch_keeps_the_masks_and_is_undone(tmp_path: Path) -> None:
    model = make_sam3(tmp_path)
    images = torch.randn(2, 3, 56, 56, generator=torch.Generator().manual_seed(1))
    ids = torch.tensor([[0, 3, 4, 1, 1], [0, 5, 6, 7, 1]])
    given = {
        "pixel_values": images, "input_ids": ids, "attention_mask": torch.tensor([[1, 1, 1, 1, 0], [1] * 5]),
        "input_boxes": torch.tensor([[[0.5, 0.5, 0.4, 0.3]], [[0.2, 0.3, 0.2, 0.2]]]),
        "input_boxes_labels": torch.tensor([[1], [0]]),
    }  # fmt: skip

    def run() -> list[torch.Tensor]:
        with torch.no_grad(), torch.compiler.set_stance("force_eager"):  # torchvision compiles its roi_align
            out = model(**given)
        return [out.pred_logits, out.pred_boxes, out.pred_masks, out.semantic_seg, out.presence_logits]

    before, classes = run(), [type(m) for m in model.modules()]
    state = {key: tensor.clone() for key, tensor in model.state_dict().items()}
    report = fastkernels.patch(model, ops=OPS)
    after, found = run(), dict.fromkeys(OPS, 0)
    for row in report.refresh().active:
        found[row.op] += row.modules
        assert row.calls, row.op
    names = [cls.__name__ for cls in classes]
    assert report.verified and all(found.values())
    attention = ("Sam3Attention", "Sam3ViTRoPEAttention", "CLIPAttention")
    assert found["attention_dense"] == sum(map(names.count, attention))
    assert found["layer_norm"] == names.count("LayerNorm") and found["group_norm"] == 3
    for mine, theirs in zip(after, before, strict=True):
        torch.testing.assert_close(mine, theirs, atol=1e-4, rtol=0)
    report.undo()
    assert [type(m) for m in model.modules()] == classes
    assert all(torch.equal(mine, theirs) for mine, theirs in zip(run(), before, strict=True))
    assert all(torch.equal(tensor, state[key]) for key, tensor in model.state_dict().items())


def test_other_attention_functions_stay_the_hosts(tmp_path: Path) -> None:
    model = make_sam3(tmp_path)
    model.set_attn_implementation("eager")
    with pytest.raises(
        PatchError, match=r"Sam3Attention\): \d+ unsupported: its attention function is 'eager'"
    ):
        fastkernels.patch(model, ops=["attention_dense"])
