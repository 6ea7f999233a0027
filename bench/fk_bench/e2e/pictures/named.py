"""Public image models by name, at their real sizes, with random weights made on the device: no checkpoint is needed.

Pipelines have no text encoders: a call gets random embeddings, and is the denoising and the decoding of an image.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch

Place = AbstractContextManager[None]
Make = Callable[[Place, int], Any]

_VAE = {
    "block_out_channels": [128, 256, 512, 512], "down_block_types": ["DownEncoderBlock2D"] * 4, "layers_per_block": 2,
    "up_block_types": ["UpDecoderBlock2D"] * 4, "sample_size": 1024, "force_upcast": False,
}  # fmt: skip


def _flux(place: Place, image_size: int) -> Any:
    import diffusers

    with place:
        transformer = diffusers.FluxTransformer2DModel(guidance_embeds=True)
        vae = diffusers.AutoencoderKL(
            **_VAE, latent_channels=16, use_quant_conv=False, use_post_quant_conv=False, scaling_factor=0.3611,
            shift_factor=0.1159,
        )  # fmt: skip
    return diffusers.FluxPipeline(
        transformer=transformer, vae=vae,
        scheduler=diffusers.FlowMatchEulerDiscreteScheduler(), text_encoder=None, text_encoder_2=None, tokenizer=None,
        tokenizer_2=None,
    )  # fmt: skip


def _sdxl(place: Place, image_size: int) -> Any:
    import diffusers

    with place:
        unet = diffusers.UNet2DConditionModel(
            sample_size=128, block_out_channels=(320, 640, 1280), transformer_layers_per_block=(1, 2, 10),
            down_block_types=("DownBlock2D", "CrossAttnDownBlock2D", "CrossAttnDownBlock2D"),
            up_block_types=("CrossAttnUpBlock2D", "CrossAttnUpBlock2D", "UpBlock2D"), attention_head_dim=(5, 10, 20),
            cross_attention_dim=2048, use_linear_projection=True, addition_embed_type="text_time",
            addition_time_embed_dim=256, projection_class_embeddings_input_dim=2816,
        )  # fmt: skip
        vae = diffusers.AutoencoderKL(**_VAE, latent_channels=4, scaling_factor=0.13025)
    return diffusers.StableDiffusionXLPipeline(
        unet=unet, vae=vae,
        scheduler=diffusers.EulerDiscreteScheduler(), text_encoder=None, text_encoder_2=None, tokenizer=None,
        tokenizer_2=None, add_watermarker=False,
    )  # fmt: skip


def _timm(name: str, **options: Any) -> Make:
    def build(place: Place, image_size: int) -> Any:
        import timm

        size: dict[str, Any] = {"img_size": image_size} if image_size else {}
        with place:
            return timm.create_model(name, **options, **size)

    return build


def _vjepa2(place: Place, image_size: int) -> Any:
    import transformers

    config = transformers.VJEPA2Config(frames_per_clip=16)
    config.crop_size = image_size or config.crop_size
    with place:
        return transformers.VJEPA2Model(config)


# name: (host, its constructor). Encoders: SigLIP 2 so400m, DINOv3 ViT-L, SwinV2-B, V-JEPA 2 ViT-L on 16 frames.
# With dynamic_img_size, DINOv3 would make its positions on the CPU in each call, which no CUDA graph can capture.
# With its drop_path_rate, which inference ignores, each of SwinV2's 24 blocks would be compiled: not 7 kinds of them.
NAMED: dict[str, tuple[str, Make]] = {
    "flux.1": ("diffusers", _flux),
    "sdxl": ("diffusers", _sdxl),
    "siglip2": ("timm", _timm("vit_so400m_patch16_siglip_256")),
    "dinov3": ("timm", _timm("vit_large_patch16_dinov3", dynamic_img_size=False)),
    "swinv2": ("timm", _timm("swinv2_base_window8_256", drop_path_rate=0.0)),
    "vjepa2": ("transformers", _vjepa2),
}


def build(name: str, dtype: torch.dtype, device: str, image_size: int = 0) -> Any:
    """The model, its weights made on the device: 12 billion random numbers take a CPU minutes. Pipelines in `dtype`.

    image_size  pixels of a side of the images that an encoder takes; 0: its own
    """
    host, make = NAMED[name]
    return make(_place(dtype if host == "diffusers" else torch.float32, device), image_size)


@contextmanager
def _place(dtype: torch.dtype, device: str) -> Iterator[None]:
    """Make new tensors on the device; schedulers compute with NumPy, and stay outside."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        with torch.device(device):
            yield
    finally:
        torch.set_default_dtype(before)
