"""Encoders of transformers, patched in this process: tiny and random."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch
import transformers

import fastkernels
from fastkernels.patch import PatchError

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
    with fastkernels.patch(model, ops=["rope_nd", "attention_dense"]) as report:
        rows = {row.op: row for row in report.rows}
        assert rows["attention_dense"].modules == layers
        assert re.match(f"{layers} fused: our .*Attention computes it", rows["rope_nd"].reason)


VIT = {**_SMALL, "intermediate_size": 96, "image_size": 32, "patch_size": 8}
STAGES = {"depths": [1, 1, 1, 1], "hidden_sizes": [8, 16, 24, 32]}
HEADS = {"num_attention_heads": [1, 2, 2, 4]}
SWIN = {
    "image_size": 32,
    "patch_size": 2,
    "embed_dim": 16,
    "depths": [1, 2],
    "num_heads": [2, 2],
    "window_size": 2,
}
DENSE = [
    ("SiglipVisionModel", VIT, 3, 0),
    ("Siglip2VisionModel", {**VIT, "num_patches": 16}, 3, 0),
    ("CLIPVisionModel", VIT, 2, 0),
    ("ViTModel", VIT, 2, 0),
    ("Dinov2WithRegistersModel", {**VIT, "num_register_tokens": 3}, 2, 2),
    ("DINOv3ViTModel", DINOV3, 2, 2),
    ("VJEPA2Model", {**VJEPA2, "hidden_size": 66, "num_attention_heads": 3}, 4, 0),
    ("Swinv2Model", {**SWINV2, "window_size": 5, "pretrained_window_sizes": [4, 3]}, 3, 0),
]
# No op was written for these; the number is that of their attention layers that compute the same as a listed one.
HELD_OUT = [
    ("BeitModel", {**VIT, "use_relative_position_bias": True}, 2, 0),
    ("DeiTModel", VIT, 2, 0),
    ("ViTMSNModel", VIT, 2, 0),
    ("Data2VecVisionModel", VIT, 0, 0),
    ("ConvNextV2Model", STAGES, 0, 0),
    ("SwinModel", SWIN, 0, 0),
    ("SegformerModel", {**STAGES, **HEADS}, 0, 0),
    (
        "HieraModel",
        {"embed_dim": 16, "image_size": [32, 32], "depths": [1, 1, 1, 1], "num_heads": [1, 2, 2, 4]},
        0,
        0,
    ),
    ("PvtModel", {**STAGES, **HEADS, "image_size": 32}, 0, 0),
    ("DPTModel", VIT, 2, 0),
    ("Aimv2VisionModel", VIT, 2, 0),
]
ALL = [
    "attention_dense", "window_attention", "gated_residual", "layer_norm", "gelu", "quick_gelu", "patch_embedding",
    "rms_norm", "gated_mlp",
]  # fmt: skip


def build(name: str, config: dict[str, Any], dtype: torch.dtype = torch.float32) -> tuple[Any, Any]:
    """(model, function that runs it); SigLIP 2's images have padding, and windows of SwinV2."""
    torch.manual_seed(0)
    kind = getattr(transformers, name)
    model = kind(kind.config_class(**config)).to(dtype).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(0.5 if parameter.dim() == 1 else 0.0, 0.2)
    given: tuple[Any, ...] = (torch.randn(2, 3, 32, 32).to(dtype),)
    if name.startswith("VJEPA2"):
        given = (torch.randn(VIDEO).to(dtype),)
    if name.startswith("Siglip2"):
        mask = torch.arange(20) < torch.tensor([[12], [20]])
        given = torch.randn(2, 20, 192).to(dtype), mask.long(), torch.tensor([[3, 4], [4, 5]])

    def run(**more: Any) -> list[torch.Tensor]:
        with torch.no_grad():
            out = model(*given, **more)
        predicted = getattr(getattr(out, "predictor_output", None), "last_hidden_state", None)
        found = out.last_hidden_state, getattr(out, "pooler_output", None), predicted
        return [t for t in found if t is not None]

    return model, run


@pytest.mark.parametrize(
    ("name", "config", "attention", "layers"), [*DENSE, *HELD_OUT], ids=[n for n, *_ in DENSE + HELD_OUT]
)
def test_all_ops_give_the_hosts_outputs(
    name: str, config: dict[str, Any], attention: int, layers: int
) -> None:
    model, run = build(name, config)
    before, classes = run(), [type(m) for m in model.modules()]
    report = fastkernels.patch(model, ops=ALL)
    for found, expected in zip(run(), before, strict=True):
        torch.testing.assert_close(found, expected, rtol=0, atol=1e-5 * float(expected.abs().max()))
    rows: dict[str, int] = {}
    for row in report.refresh().active:
        assert row.calls and not row.fallbacks, row
        rows[row.op] = rows.get(row.op, 0) + row.modules
    attended = rows.get("attention_dense", 0) + rows.get("window_attention", 0)
    assert (attended, rows.get("gated_residual", 0)) == (attention, layers)
    report.undo()
    assert [type(m) for m in model.modules()] == classes and all(map(torch.equal, run(), before))


@pytest.mark.parametrize(("name", "config", "attention", "layers"), DENSE, ids=[n for n, *_ in DENSE])
def test_bfloat16_is_as_near_float32_as_the_host(
    name: str, config: dict[str, Any], attention: int, layers: int
) -> None:
    exact = build(name, config)[1]()
    model, run = build(name, config, torch.bfloat16)
    host = run()
    with fastkernels.patch(model, ops=ALL):
        ours = run()
    for want, theirs, found in zip(exact, host, ours, strict=True):
        assert (found - want).norm() < 1.5 * (theirs - want).norm()


def test_other_attention_function_runs_the_hosts_code() -> None:
    model, _ = build("ViTModel", VIT)
    with fastkernels.patch(model, ops="attention_dense") as report:
        model.set_attn_implementation("eager")
        with torch.no_grad():
            out = model(torch.randn(1, 3, 32, 32), output_attentions=True)
        assert [tuple(a.shape) for a in out.attentions] == [(1, 2, 17, 17)] * 2
        (row,) = report.refresh().active
        assert row.fallbacks == {"its attention function is 'eager', not 'sdpa'": 2} and not row.calls
    with pytest.raises(PatchError, match="2 unsupported: its attention function is 'eager', not 'sdpa'"):
        fastkernels.patch(model, ops="attention_dense")
    model, run = build("Swinv2Model", SWINV2)
    before = run()
    with fastkernels.patch(model, ops="window_attention") as report:
        out = model(torch.randn(1, 3, 32, 32), output_attentions=True)
        assert [len(a) for a in out.attentions] == [64, 16] and not report.refresh().active[0].calls
        for module in model.modules():
            module.register_forward_hook(lambda module, given, out: None)  # some may record the weights
        assert all(map(torch.equal, run(), before)) and not report.refresh().active[0].calls
    assert all(map(torch.equal, run(), before))


def test_hooks_inside_replaced_modules_run() -> None:
    """Of the pooling head's attention, and of a LayerScale, which ours would not call."""
    seen: list[str] = []
    model, run = build("SiglipVisionModel", VIT)
    report = fastkernels.patch(model, ops="attention_dense")
    handle = model.head.attention.register_forward_hook(lambda *_: seen.append("attention"))
    after = run()
    (fallback,) = {why for row in report.refresh().active for why in row.fallbacks}
    assert seen == ["attention"] and "has a hook" in fallback
    report.undo()
    handle.remove()
    torch.testing.assert_close(after, run(), rtol=0, atol=1e-4)
    model, run = build("Dinov2Model", VIT)
    before = run()
    with fastkernels.patch(model, ops="gated_residual"):
        model.encoder.layer[0].layer_scale1.register_forward_hook(lambda *_: seen.append("scale"))
        torch.testing.assert_close(run(), before, rtol=0, atol=1e-4)
    assert seen[1:] == ["scale"]
    with fastkernels.patch(model, ops="gated_residual") as report:
        (row,) = report.active
        assert (
            row.modules == 1 and row.reason == "1 unsupported: its scale is Dinov2LayerScale, or has a hook"
        )


def test_report_lists_modules_without_an_op() -> None:
    model, _ = build("SwinModel", SWIN)
    report = fastkernels.patch(model)
    reasons = {row.op: row.reason for row in report.rows if row.state == "off"}
    kind = "transformers.models.swin.modeling_swin.SwinAttention"
    assert f"3 unsupported: {kind}" in reasons["attention_dense"]
    assert "no op replaces them (Linear 19, SwinRelativePositionBias 3, AdaptiveAvgPool1d 1)" in reasons["-"]
    report.undo()
    model, _ = build("Dinov2Model", VIT)
    with fastkernels.patch(model) as report:
        reasons = {row.op: row.reason for row in report.rows if row.state == "off"}
        for op, name in (("attention_dense", "Dinov2Attention"), ("gated_residual", "Dinov2Layer")):
            assert reasons[op].startswith(f"2 left to the host: {name}, decided at first calls on a GPU")
    text = transformers.CLIPTextModel(
        transformers.CLIPTextConfig(**_SMALL, intermediate_size=64, vocab_size=99)
    )
    with fastkernels.patch(text) as report:
        assert "-" not in {row.op for row in report.rows}  # only models of images and videos are listed whole
