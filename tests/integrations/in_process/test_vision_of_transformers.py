"""Encoders of transformers, patched in this process: tiny and random. Their attention stays with the host."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import transformers

import fastkernels

_SMALL = {"hidden_size": 48, "num_attention_heads": 2, "num_hidden_layers": 2}
VJEPA2 = {
    **_SMALL, "patch_size": 16, "crop_size": 32, "frames_per_clip": 4, "pred_hidden_size": 48,
    "pred_num_attention_heads": 2, "pred_num_hidden_layers": 2, "pred_num_mask_tokens": 2,
}  # fmt: skip
SWINV2 = {
    "image_size": 32, "patch_size": 2, "embed_dim": 16, "depths": [1, 2], "num_heads": [2, 2], "window_size": 2
}  # fmt: skip
WHISPER = {
    "vocab_size": 200, "num_mel_bins": 16, "d_model": 32, "encoder_layers": 2, "decoder_layers": 1, "pad_token_id": 0,
    "encoder_attention_heads": 2, "decoder_attention_heads": 2, "encoder_ffn_dim": 64, "decoder_ffn_dim": 64,
    "max_source_positions": 50, "max_target_positions": 32, "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip
VIDEO, IMAGE, SOUND = (1, 4, 3, 32, 32), (1, 3, 32, 32), (1, 16, 100)


@pytest.mark.parametrize(
    ("name", "config", "shape", "patches"),
    [
        ("VJEPA2Model", VJEPA2, VIDEO, 1),
        ("Swinv2Model", SWINV2, IMAGE, 1),
        ("WhisperModel", WHISPER, SOUND, 0),
    ],
    ids=["vjepa2", "swinv2", "whisper-encoder"],
)
def test_encoders_are_patched_and_undone(
    name: str, config: dict[str, Any], shape: tuple[int, ...], patches: int
) -> None:
    torch.manual_seed(0)
    kind = getattr(transformers, name)
    model = kind(kind.config_class(**config)).eval()
    model = model.encoder if name == "WhisperModel" else model
    x = torch.randn(shape)

    def run() -> torch.Tensor:
        with torch.no_grad():
            return model(x)[0]

    before, classes = run(), [type(m) for m in model.modules()]
    plain = fastkernels.patch(model)
    assert {r.op for r in plain.active} == {"layer_norm", "gelu"}
    plain.undo()
    report = fastkernels.patch(model, ops=["layer_norm", "gelu", *(["patch_embedding"] if patches else [])])
    torch.testing.assert_close(run(), before, atol=1e-4, rtol=1e-4)
    rows = {r.op: r.modules for r in report.refresh().active}
    norms = sum(type(m).__name__ == "LayerNorm" for m in model.modules())
    assert report.host.name == "transformers" and report.verified
    assert rows["layer_norm"] == norms > 0 and rows["gelu"] > 0 and rows.get("patch_embedding", 0) == patches
    report.undo()
    assert [type(m) for m in model.modules()] == classes and torch.equal(run(), before)


DINOV3 = {**_SMALL, "intermediate_size": 96, "image_size": 32, "patch_size": 8, "num_register_tokens": 3}


@pytest.mark.parametrize(
    ("name", "config", "shape", "layers", "calls"),
    [("DINOv3ViTModel", DINOV3, IMAGE, 2, 4), ("VJEPA2Model", VJEPA2, VIDEO, 4, 24)],
    ids=["dinov3", "vjepa2"],
)
@pytest.mark.parametrize(("dtype", "atol"), [(torch.float32, 1e-5), (torch.bfloat16, 0.05)])
def test_rotations_of_several_dimensions_are_replaced(
    name: str, config: dict[str, Any], shape: tuple[int, ...], layers: int, calls: int, dtype: torch.dtype, atol: float
) -> None:  # fmt: skip
    """DINOv3 has prefix tokens; V-JEPA 2 three axes, and masked positions in its predictor."""
    torch.manual_seed(0)
    kind = getattr(transformers, name)
    model = kind(kind.config_class(**config)).to(dtype).eval()
    x = torch.randn(shape).to(dtype)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(float(parameter.dim() == 1), 0.2)

    def run() -> list[torch.Tensor]:
        with torch.no_grad():
            out = model(x)
        predicted = getattr(out, "predictor_output", None)
        return [out[0], *([predicted.last_hidden_state] if predicted is not None else [])]

    before, classes = run(), [type(m) for m in model.modules()]
    plain = fastkernels.patch(model)
    assert "rope_nd" not in {r.op for r in plain.active}
    plain.undo()
    report = fastkernels.patch(model, ops="rope_nd")
    for found, expected in zip(run(), before, strict=True):
        torch.testing.assert_close(found, expected, atol=atol * float(expected.abs().max()), rtol=0)
    (row,) = report.refresh().active
    assert (row.op, row.modules, row.calls) == ("rope_nd", layers, calls) and not row.fallbacks
    report.undo()
    assert [type(m) for m in model.modules()] == classes
    assert all(map(torch.equal, run(), before))
