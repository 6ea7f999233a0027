"""Tiny random diffusion transformers of diffusers that no op was written for: patched, compared, restored."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import fastkernels
from fastkernels.core.dispatch import OPS as ALL

diffusers = pytest.importorskip("diffusers")
OPS = (
    "attention_dense",
    "ada_layer_norm",
    "geglu",
    "group_norm",
    "timestep_embedding",
    "layer_norm",
    "gelu",
    "rms_norm",
)


def draw(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(1))


IMAGE = {"hidden_states": draw(2, 4, 8, 8), "timestep": torch.tensor([3.0, 5.0])}
HEADS = {
    "attention_head_dim": 8,
    "num_attention_heads": 4,
    "in_channels": 4,
    "out_channels": 4,
    "patch_size": 2,
}
TEXTS = {"encoder_hidden_states": draw(2, 7, 32)}

# name: (class, configuration, arguments of a call, ops that have to run)
MODELS: dict[str, tuple[str, dict[str, Any], dict[str, Any], set[str]]] = {
    "sd3.5": (
        "SD3Transformer2DModel",
        {**HEADS, "sample_size": 8, "num_layers": 3, "caption_projection_dim": 32, "joint_attention_dim": 32,
         "pooled_projection_dim": 64, "qk_norm": "rms_norm", "dual_attention_layers": (0,)},
        {**IMAGE, **TEXTS, "pooled_projections": draw(2, 64)},
        {"attention_dense", "ada_layer_norm", "timestep_embedding", "layer_norm", "gelu", "rms_norm"},
    ),
    "hunyuan-dit": (
        "HunyuanDiT2DModel",
        {"attention_head_dim": 8, "num_attention_heads": 4, "in_channels": 4, "patch_size": 2, "num_layers": 4,
         "sample_size": 8, "hidden_size": 32, "mlp_ratio": 2.0,
         "cross_attention_dim": 32, "cross_attention_dim_t5": 24, "pooled_projection_dim": 16, "text_len": 7,
         "text_len_t5": 5,
         "activation_fn": "gelu-approximate"},
        {"hidden_states": draw(2, 4, 8, 8), "timestep": torch.tensor([3.0, 5.0]), **TEXTS,
         "text_embedding_mask": torch.ones(2, 7).tril(4), "encoder_hidden_states_t5": draw(2, 5, 24),
         "text_embedding_mask_t5": torch.ones(2, 5), "image_meta_size": torch.tensor([[8, 8, 8, 8, 0, 0]] * 2),
         "style": torch.tensor([0, 0]), "image_rotary_emb": (draw(16, 8).cos(), draw(16, 8).sin())},
        {"attention_dense", "ada_layer_norm", "timestep_embedding", "layer_norm", "gelu"},
    ),
    "pixart": (
        "PixArtTransformer2DModel",
        {**HEADS, "sample_size": 8, "num_layers": 2, "out_channels": 8, "caption_channels": 32,
         "cross_attention_dim": 32},
        {**IMAGE, **TEXTS, "added_cond_kwargs": {"resolution": None, "aspect_ratio": None}},
        {"attention_dense", "timestep_embedding", "layer_norm", "gelu"},
    ),
    "sana": (
        "SanaTransformer2DModel",
        {**HEADS, "patch_size": 1, "num_layers": 2, "cross_attention_head_dim": 8, "num_cross_attention_heads": 4,
         "cross_attention_dim": 32, "caption_channels": 32, "sample_size": 32},
        {**IMAGE, **TEXTS, "encoder_attention_mask": torch.ones(2, 7).tril(4)},
        {"attention_dense", "timestep_embedding", "layer_norm", "gelu", "rms_norm"},
    ),
    "hunyuan-video": (
        "HunyuanVideoTransformer3DModel",
        {**HEADS, "num_attention_heads": 2, "attention_head_dim": 10, "num_layers": 1, "num_single_layers": 1,
         "num_refiner_layers": 1, "patch_size": 1, "patch_size_t": 1, "text_embed_dim": 32, "pooled_projection_dim": 8,
         "rope_axes_dim": (2, 4, 4)},
        {"hidden_states": draw(2, 4, 1, 8, 8), "timestep": torch.tensor([3, 5]), **TEXTS,
         "encoder_attention_mask": torch.ones(2, 7), "pooled_projections": draw(2, 8), "guidance": torch.ones(2)},
        {"attention_dense", "ada_layer_norm", "timestep_embedding", "layer_norm", "gelu", "rms_norm"},
    ),
    "cogvideox": (
        "CogVideoXTransformer3DModel",
        {**HEADS, "time_embed_dim": 2, "text_embed_dim": 32, "num_layers": 2, "sample_width": 8, "sample_height": 8,
         "sample_frames": 8, "max_text_seq_length": 7},
        {"hidden_states": draw(2, 2, 4, 8, 8), "timestep": torch.tensor([3, 5]), **TEXTS},
        {"timestep_embedding", "layer_norm", "gelu"},
    ),
    "auraflow": (
        "AuraFlowTransformer2DModel",
        {**HEADS, "sample_size": 8, "num_mmdit_layers": 1, "num_single_dit_layers": 1, "caption_projection_dim": 32,
         "joint_attention_dim": 32, "pos_embed_max_size": 256},
        {**IMAGE, **TEXTS},
        {"ada_layer_norm", "timestep_embedding", "layer_norm"},
    ),
}  # fmt: skip
WITH_TANH = {
    "sd3.5",
    "hunyuan-dit",
    "pixart",
    "hunyuan-video",
    "cogvideox",
}  # GELUs with tanh behind a linear layer


@pytest.mark.parametrize("name", MODELS)
def test_held_out_transformer_gives_the_hosts_output(name: str) -> None:
    cls, config, inputs, expected = MODELS[name]
    torch.manual_seed(0)
    model = getattr(diffusers, cls)(**config).eval()
    with torch.no_grad():
        for parameter in model.parameters():  # layers that start from zero would hide others
            parameter.normal_(*((1.0, 0.1) if parameter.dim() == 1 else (0.0, 0.2)))
        before = model(**inputs, return_dict=False)[0]
        classes = [type(m) for m in model.modules()]
        with fastkernels.patch(model, ops=OPS) as report:
            ALL["linear_gelu"].reset()
            found = model(**inputs, return_dict=False)[0]
            assert bool(ALL["linear_gelu"].calls) == (name in WITH_TANH)
            torch.testing.assert_close(found, before, rtol=1e-4, atol=1e-5 * float(before.abs().max()))
            active = report.refresh().active
            assert {row.op for row in active if row.calls} == expected
            assert not any(row.fallbacks for row in active)
            others = [row for row in report.rows if "unsupported: the processor" in row.reason]
            known = ("sd3.5", "hunyuan-dit", "pixart")
            assert bool(others) == (name not in known)  # processors without a target are listed
        assert torch.equal(model(**inputs, return_dict=False)[0], before)
    assert [type(m) for m in model.modules()] == classes
