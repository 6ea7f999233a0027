"""Patched models of transformers, timm and diffusers in training: gradients are those of the host's code."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import transformers

import fastkernels

diffusers = pytest.importorskip("diffusers")
timm = pytest.importorskip("timm")
OPS = [
    "attention_dense", "window_attention", "gated_residual", "ada_layer_norm", "geglu", "group_norm",
    "timestep_embedding", "layer_norm",
    "gelu", "linear_gelu", "gated_mlp", "rms_norm", "patch_embedding",
]  # fmt: skip
SMALL = {"hidden_size": 24, "num_attention_heads": 2, "num_hidden_layers": 1, "patch_size": 8}
VIT = {**SMALL, "intermediate_size": 32, "image_size": 16}
TINY = {"img_size": 32, "patch_size": 16, "embed_dim": 24, "depth": 1, "num_heads": 2, "num_classes": 3}
OF_TRANSFORMERS: dict[str, dict[str, Any]] = {
    "SiglipVisionModel": VIT,
    "Dinov2Model": VIT,
    "DINOv3ViTModel": VIT,
    "Swinv2Model": {
        "image_size": 16, "patch_size": 2, "embed_dim": 8, "depths": [2], "num_heads": [2], "window_size": 3
    },
    "VJEPA2Model": {
        **SMALL, "crop_size": 16, "frames_per_clip": 2, "pred_hidden_size": 24, "pred_num_attention_heads": 2,
        "pred_num_hidden_layers": 1, "pred_num_mask_tokens": 1,
    },
}  # fmt: skip
OF_TIMM: dict[str, dict[str, Any]] = {
    "vit_base_patch16_siglip_224": {**TINY, "class_token": False, "global_pool": "map", "act_layer": "gelu_tanh"},
    "eva02_tiny_patch14_224": TINY,
    "vit_7b_patch16_dinov3": TINY,
    "swinv2_tiny_window8_256": {
        "img_size": 32, "embed_dim": 8, "depths": (2,), "num_heads": (2,), "window_size": 4
    },
}  # fmt: skip
FLUX = {
    "patch_size": 1, "in_channels": 8, "num_layers": 1, "num_single_layers": 1, "attention_head_dim": 16,
    "num_attention_heads": 2, "joint_attention_dim": 16, "pooled_projection_dim": 8, "axes_dims_rope": (4, 4, 8),
}  # fmt: skip
UNET = {
    "sample_size": 8, "block_out_channels": (8, 16), "layers_per_block": 1, "norm_num_groups": 4,
    "down_block_types": ("DownBlock2D", "CrossAttnDownBlock2D"), "cross_attention_dim": 16,
    "up_block_types": ("CrossAttnUpBlock2D", "UpBlock2D"), "attention_head_dim": 2,
}  # fmt: skip


def models() -> Iterator[tuple[str, Any, Callable[[Any], Any]]]:
    """(name, model, function that runs it)."""
    image, draw = torch.randn(2, 3, 32, 32), torch.randn
    for name, config in OF_TRANSFORMERS.items():
        kind = getattr(transformers, name)
        size = config.get("image_size", 16)
        x = draw(1, 2, 3, 16, 16) if "VJEPA" in name else image[:, :, :size, :size]
        yield name, kind(kind.config_class(**config)), lambda model, x=x: model(x).last_hidden_state
    for name, sizes in OF_TIMM.items():
        yield name, timm.create_model(name, **sizes), lambda model: model(image)
    at = {"img_ids": torch.arange(12.0).view(4, 3), "txt_ids": torch.zeros(3, 3)}
    parts = draw(1, 4, 8), draw(1, 3, 16), draw(1, 8), torch.tensor([0.5])
    yield "FLUX", diffusers.FluxTransformer2DModel(**FLUX), lambda model: model(*parts, **at).sample
    given = draw(1, 4, 8, 8), torch.tensor([3]), draw(1, 5, 16)
    yield "UNet", diffusers.UNet2DConditionModel(**UNET), lambda model: model(*given).sample


def gradients(model: Any, run: Callable[[Any], torch.Tensor]) -> dict[str, torch.Tensor | None]:
    model.zero_grad()
    torch.manual_seed(1)  # DINOv3 draws scales of its positions
    out = run(model)
    (out * torch.linspace(-1, 1, out.numel()).view(out.shape)).sum().backward()
    return {name: p.grad for name, p in model.named_parameters()}


def test_training_runs_the_hosts_code() -> None:
    torch.manual_seed(0)
    seen = set()
    for name, model, run in models():
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.normal_(0.5 if parameter.dim() == 1 else 0.0, 0.2)
        want = gradients(model, run)
        assert sum(g is not None and bool(g.any()) for g in want.values()) > len(want) / 3, name
        for ops in (OPS, ["rope_nd"]) if name in ("DINOv3ViTModel", "VJEPA2Model") else (OPS,):
            with fastkernels.patch(model, ops=ops) as report:
                with torch.no_grad():
                    run(model)
                rows = {(row.op, row.host_class): row.calls for row in report.refresh().active}
                found = gradients(model, run)
                for parameter, grad in want.items():
                    same = found[parameter] is grad if grad is None else torch.equal(found[parameter], grad)
                    assert same, f"{name}: {parameter}"
                for row in report.refresh().active:
                    if row.op != "timestep_embedding":  # of numbers that have no gradient
                        assert row.calls == rows[row.op, row.host_class] and row.fallbacks, f"{name}: {row}"
                seen |= {op for op, _ in rows}
    assert seen == {*OPS, "rope_nd"}


def test_layers_before_trained_ones_stay_ours() -> None:
    """Of a model whose last layer alone is trained; with a trained input, all layers are the host's."""
    model = timm.create_model("vit_small_patch16_dinov3", **{**TINY, "depth": 2}).requires_grad_(False)
    model.blocks[1].requires_grad_(True)
    image = torch.randn(2, 3, 32, 32)
    want = gradients(model, lambda model: model(image))
    with fastkernels.patch(model, ops="attention_dense") as report:
        for name, grad in gradients(model, lambda model: model(image)).items():
            torch.testing.assert_close(grad, want[name], msg=name)
        (row,) = report.refresh().active
        assert row.calls == sum(row.fallbacks.values()) == 1
        compiled = torch.compile(model, backend="eager", fullgraph=True)
        for name, grad in gradients(model, lambda _: compiled(image)).items():
            torch.testing.assert_close(grad, want[name], msg=name)
        (row,) = report.refresh().active
        assert row.calls == sum(row.fallbacks.values()) == 2  # counted while it is traced
        x = image.clone().requires_grad_()
        gradients(model, lambda model: model(x))
        (row,) = report.refresh().active
        assert row.calls == 2 and sum(row.fallbacks.values()) == 4 and x.grad is not None
    torch.compiler.reset()
