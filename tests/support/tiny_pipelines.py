"""Tiny random pipelines of diffusers with tokenizers: `python tests/support/tiny_pipelines.py FOLDER [KIND]`."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

TEXT = 20  # tokens of the CLIP encoders


def _tokenizer(length: int) -> Any:
    from support.tiny import byte_tokenizer

    made = byte_tokenizer()
    made.model_max_length = length
    return made


def _clip(cls: Any, **fields: Any) -> Any:
    import transformers

    # The pooled token is the first that pads.
    config = transformers.CLIPTextConfig(
        hidden_size=32, intermediate_size=37, num_attention_heads=4, num_hidden_layers=3, vocab_size=512,
        projection_dim=32, bos_token_id=0, eos_token_id=3, pad_token_id=3, max_position_embeddings=TEXT, **fields,
    )  # fmt: skip
    return cls(config)


def _vae(channels: int, **fields: Any) -> Any:
    import diffusers

    return diffusers.AutoencoderKL(
        block_out_channels=[16, 32], down_block_types=["DownEncoderBlock2D"] * 2, norm_num_groups=8,
        up_block_types=["UpDecoderBlock2D"] * 2, latent_channels=channels, **fields,
    )  # fmt: skip


def _spread(module: Any, std: float, seed: int) -> None:
    """Weights that make each part visible: as they begin, attention and text hardly change the output."""
    import torch

    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in module.parameters():
            if parameter.dim() > 1:
                parameter.normal_(0.0, std / parameter[0].numel() ** 0.5, generator=generator)


def make_tiny_flux(folder: str | Path, seed: int = 0, **transformer: Any) -> Path:
    """A random float32 FLUX.1 pipeline with two levels of the VAE: images of multiples of 4 pixels."""
    import diffusers
    import torch
    import transformers

    torch.manual_seed(seed)
    text = transformers.T5Config(
        vocab_size=512, d_model=32, d_kv=8, d_ff=48, num_layers=2, num_heads=4, pad_token_id=3, eos_token_id=1
    )
    sizes = {
        "in_channels": 16, "num_layers": 2, "num_single_layers": 2, "attention_head_dim": 16, "num_attention_heads": 3,
        "joint_attention_dim": 32, "pooled_projection_dim": 32, "axes_dims_rope": (4, 4, 8), "guidance_embeds": True,
    }  # fmt: skip
    pipe = diffusers.FluxPipeline(
        scheduler=diffusers.FlowMatchEulerDiscreteScheduler(use_dynamic_shifting=True, shift=3.0),
        vae=_vae(4, use_quant_conv=False, use_post_quant_conv=False, scaling_factor=0.36, shift_factor=0.12),
        text_encoder=_clip(transformers.CLIPTextModel), tokenizer=_tokenizer(TEXT),
        text_encoder_2=transformers.T5EncoderModel(text), tokenizer_2=_tokenizer(512),
        transformer=diffusers.FluxTransformer2DModel(**{**sizes, **transformer}),
    )  # fmt: skip
    _spread(pipe.transformer, 1.0, seed)
    pipe.save_pretrained(folder)
    return Path(folder)


def make_tiny_sdxl(folder: str | Path, seed: int = 0, **index: Any) -> Path:
    """A random float32 SDXL pipeline with two levels of the UNet and the VAE: images of multiples of 4 pixels."""
    import diffusers
    import torch
    import transformers

    torch.manual_seed(seed)
    unet = diffusers.UNet2DConditionModel(
        sample_size=16, block_out_channels=(32, 64), layers_per_block=2, norm_num_groups=8, cross_attention_dim=64,
        down_block_types=("DownBlock2D", "CrossAttnDownBlock2D"), attention_head_dim=(2, 4),
        up_block_types=("CrossAttnUpBlock2D", "UpBlock2D"), use_linear_projection=True,
        addition_embed_type="text_time", addition_time_embed_dim=8, transformer_layers_per_block=(1, 2),
        projection_class_embeddings_input_dim=80,
    )  # fmt: skip
    pipe = diffusers.StableDiffusionXLPipeline(
        vae=_vae(4, scaling_factor=0.13), unet=unet,
        text_encoder=_clip(transformers.CLIPTextModel), tokenizer=_tokenizer(TEXT),
        text_encoder_2=_clip(transformers.CLIPTextModelWithProjection), tokenizer_2=_tokenizer(TEXT),
        scheduler=diffusers.EulerDiscreteScheduler(
            beta_schedule="scaled_linear", beta_start=0.00085, beta_end=0.012, timestep_spacing="leading",
            steps_offset=1,
        ),
        **index,
    )  # fmt: skip
    _spread(pipe.unet, 1.0, seed)
    pipe.save_pretrained(folder)
    return Path(folder)


CHAT = "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}{% if add_generation_prompt %}<bot>{% endif %}"


def make_tiny_hunyuan(folder: str | Path, seed: int = 0, **transformer: Any) -> Path:
    """A random float32 HunyuanVideo-1.5 pipeline: videos of multiples of 16 pixels, and of 4 frames and one."""
    import diffusers
    import torch
    import transformers
    from diffusers.guiders import ClassifierFreeGuidance

    torch.manual_seed(seed)
    reader = _tokenizer(4096)
    reader.chat_template = CHAT
    text = transformers.Qwen2_5_VLTextConfig(
        vocab_size=512, hidden_size=32, intermediate_size=48, num_hidden_layers=4, num_attention_heads=4,
        num_key_value_heads=2, pad_token_id=3, bos_token_id=0, eos_token_id=1,
        rope_parameters={"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [1, 1, 2]},
    )  # fmt: skip
    letters = transformers.T5Config(
        vocab_size=384, d_model=24, d_kv=8, d_ff=48, num_layers=2, num_heads=3, pad_token_id=0, eos_token_id=1
    )
    sizes = {
        "in_channels": 9, "out_channels": 4, "num_attention_heads": 2, "attention_head_dim": 16, "num_layers": 2,
        "num_refiner_layers": 2, "mlp_ratio": 2.0, "text_embed_dim": 32, "text_embed_2_dim": 24, "image_embed_dim": 16,
        "rope_axes_dim": (4, 6, 6), "target_size": 64,
    }  # fmt: skip
    pipe = diffusers.HunyuanVideo15Pipeline(
        scheduler=diffusers.FlowMatchEulerDiscreteScheduler(shift=5.0),
        vae=diffusers.AutoencoderKLHunyuanVideo15(
            latent_channels=4, block_out_channels=(8, 8, 16, 16, 16), layers_per_block=1
        ),
        text_encoder=transformers.Qwen2_5_VLTextModel(text), tokenizer=reader,
        text_encoder_2=transformers.T5EncoderModel(letters), tokenizer_2=transformers.ByT5Tokenizer(),
        transformer=diffusers.HunyuanVideo15Transformer3DModel(**{**sizes, **transformer}),
        guider=ClassifierFreeGuidance(guidance_scale=3.0),
    )  # fmt: skip
    for part in (pipe.transformer, pipe.vae):
        _spread(part, 1.0, seed)
    with torch.no_grad():
        for name, parameter in pipe.vae.named_parameters():
            if name.endswith("gamma"):
                parameter.fill_(1.0)
    pipe.save_pretrained(folder)
    return Path(folder)


if __name__ == "__main__":
    MAKERS = {"flux": make_tiny_flux, "sdxl": make_tiny_sdxl, "hunyuan_video": make_tiny_hunyuan}
    if len(sys.argv) not in (2, 3):
        sys.exit(f"usage: python tests/support/tiny_pipelines.py FOLDER [{'|'.join(MAKERS)}]")
    sys.path.insert(0, str(Path(__file__).parents[1]))
    print(MAKERS[(sys.argv[2:] or ["flux"])[0]](sys.argv[1]))
