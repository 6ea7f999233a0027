"""HunyuanVideo-1.5 of diffusers: its transformer and its image model, patched, proved and undone."""

from __future__ import annotations

from typing import Any

import diffusers
import pytest
import torch

import fastkernels

OPS = [
    "ada_layer_norm", "attention_dense", "gated_residual", "gelu", "layer_norm", "norm_pad", "qk_norm_rope", "rms_norm",
    "rope_axes", "timestep_embedding",
]  # fmt: skip
SIZES = {
    "in_channels": 9, "out_channels": 4, "num_attention_heads": 2, "attention_head_dim": 16, "num_layers": 2,
    "num_refiner_layers": 1, "mlp_ratio": 2.0, "text_embed_dim": 32, "text_embed_2_dim": 24, "image_embed_dim": 16,
    "rope_axes_dim": (4, 6, 6),
}  # fmt: skip


def spread(model: Any) -> Any:
    """The model with weights that make each part visible."""
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1 and parameter[0].numel() > 1:
                parameter.normal_(0.0, parameter[0].numel() ** -0.5, generator=generator)
    return model.eval()


def velocity(model: Any, image: float = 0.0) -> torch.Tensor:
    """Two videos, whose texts have tokens that only pad; image: a factor of an image's tokens, 0 for none."""
    draw = torch.Generator().manual_seed(1)

    def randn(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=draw)

    text, letters = torch.ones(2, 6), torch.zeros(2, 5)
    text[0, 4:], letters[1, :3] = 0, 1
    with torch.no_grad():
        return model(
            randn(2, 9, 2, 3, 5), torch.tensor([10.0, 700.0]), randn(2, 6, 32), text,
            encoder_hidden_states_2=randn(2, 5, 24), encoder_attention_mask_2=letters,
            image_embeds=image * randn(2, 3, 16), return_dict=False,
        )[0]  # fmt: skip


@pytest.mark.parametrize("image", [0.0, 1.0])
def test_transformer_is_patched_proved_and_undone(image: float) -> None:
    model = spread(diffusers.HunyuanVideo15Transformer3DModel(**SIZES))
    want = velocity(model, image)
    report = fastkernels.patch(model, ops=OPS)
    torch.testing.assert_close(velocity(model, image), want, atol=1e-5, rtol=1e-5)
    calls = {row.host_class: row.calls for row in report.refresh().rows if row.modules}
    for name in ("AttnProcessor2_0", "TransformerBlock", "RotaryPosEmbed"):
        assert calls[f"HunyuanVideo15{name}"] > 0, report
    report.undo()
    assert torch.equal(velocity(model, image), want)
    assert not any(hasattr(type(m), "fastkernels") for m in model.modules())


def test_image_model_is_patched_proved_and_undone() -> None:
    model = diffusers.AutoencoderKLHunyuanVideo15(
        latent_channels=4, block_out_channels=(8, 8, 16, 16, 16), layers_per_block=1
    )
    spread(model)
    latents = torch.randn(1, 4, 2, 2, 3, generator=torch.Generator().manual_seed(2))
    with torch.no_grad():
        want = model.decode(latents).sample
        report = fastkernels.patch(model, ops=OPS)
        torch.testing.assert_close(model.decode(latents).sample, want, atol=1e-5, rtol=1e-5)
        assert model.decode(latents[:0]).sample.shape == (0, *want.shape[1:]), "no video, as of the host"
        (row,) = [row for row in report.refresh().rows if row.host_class == "HunyuanVideo15ResnetBlock"]
        assert row.calls > 0, report
        report.undo()
        assert torch.equal(model.decode(latents).sample, want)


def test_other_backends_and_blocks_stay_with_the_host() -> None:
    model = spread(diffusers.HunyuanVideo15Transformer3DModel(**SIZES))
    model.set_attention_backend("_native_math")
    want = velocity(model)
    report = fastkernels.patch(model, ops=["attention_dense"])
    assert torch.equal(velocity(model), want)
    assert "set_attention_backend('_native_math')" in str(report)
    report.undo()
