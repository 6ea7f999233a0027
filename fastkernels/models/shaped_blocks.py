"""Blocks whose inputs are not a step of tokens: the shape of each input, from the module's own sizes.

A class that is named in SHAPED is a block wherever a model has it. Inputs are normal random numbers; those in MASKS are
ones. Outside of the model files, these tables alone name models.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import torch
from torch import nn

BATCH = "batch"
MASKS = ("attention_mask",)  # bool
Shapes = Mapping[str, tuple[int | str, ...]]  # of the parameters of `forward`; NAME.0 and NAME.1 of a pair
IMAGE, FRAMES, TEXT, SIDE, HORIZON = (
    4096,
    9600,
    512,
    32,
    16,
)  # tokens of 1024 pixels and of a short video, and so on
SMALL_TOKENS, SMALL_SIDE, SMALL_HORIZON = 24, 8, 8


class Shaped(NamedTuple):
    """kind: of the block. inputs: their shapes, of a module and whether it is of the small model for a CPU."""

    kind: str
    inputs: Callable[[Any, bool], Shapes]


def _tokens(small: bool, full: int) -> int:
    return SMALL_TOKENS if small else full


def _flux(module: Any, small: bool) -> Shapes:
    width, head = module.attn.to_q.in_features, module.attn.norm_q.weight.shape[0]
    image, text = _tokens(small, IMAGE), _tokens(small, TEXT) // 2
    return {
        "hidden_states": (BATCH, image, width), "encoder_hidden_states": (BATCH, text, width), "temb": (BATCH, width),
        "image_rotary_emb.0": (image + text, head), "image_rotary_emb.1": (image + text, head),
    }  # fmt: skip


def _hunyuan(module: Any, small: bool) -> Shapes:
    width, head = module.attn.to_q.in_features, module.attn.norm_q.weight.shape[0]
    video, text = _tokens(small, FRAMES), _tokens(small, TEXT)
    return {
        "hidden_states": (BATCH, video, width), "encoder_hidden_states": (BATCH, text, width), "temb": (BATCH, width),
        "attention_mask": (BATCH, text), "freqs_cis.0": (video, head), "freqs_cis.1": (video, head),
    }  # fmt: skip


def _side(small: bool) -> int:
    return SMALL_SIDE if small else SIDE


def _cross(module: Any, small: bool) -> Shapes:
    side, width = _side(small), module.proj_in.in_features
    text = module.transformer_blocks[0].attn2.to_k.in_features
    return {"x": (BATCH, width, side, side), "text": (BATCH, 77, text)}


def _film(module: Any, small: bool) -> Shapes:
    conv, out = module.blocks[0].block[0], module.cond_encoder[1].out_features
    return {"x": (BATCH, conv.in_channels, SMALL_HORIZON if small else HORIZON), "film": (BATCH, out)}


def _image(module: Any, small: bool) -> Shapes:
    channels = next(p for p in module.parameters() if p.dim() == 4).shape[1]
    return {"x": (BATCH, channels, _side(small), _side(small))}


def _stage(module: Any, small: bool) -> Shapes:
    width = module.blocks[0].layernorm_before.weight.shape[0]
    return {"x": (BATCH, 2 * _side(small), 2 * _side(small), width)}


def _rows(name: str, *more: str) -> Callable[[Any, bool], Shapes]:
    def shapes(module: Any, small: bool) -> Shapes:
        width = next(p for p in module.parameters() if p.dim() == 2).shape[1]
        return {each: (BATCH, _tokens(small, TEXT), width) for each in (name, *more)}

    return shapes


def _points(module: Any, small: bool) -> Shapes:
    width = module.fc1.in_features
    return dict.fromkeys(("x", "residual"), (BATCH, width))


# {class of our models or of diffusers' drop-ins: its block}
SHAPED: dict[str, Shaped] = {
    "DiffusersFluxTransformerBlock": Shaped("diffusion_block", _flux),
    "DiffusersFluxSingleTransformerBlock": Shaped("diffusion_block", _flux),
    "DiffusersHunyuanVideo15TransformerBlock": Shaped("diffusion_block", _hunyuan),
    "fastkernels.models.diffusion.sdxl:Transformer": Shaped("diffusion_block", _cross),
    "fastkernels.models.diffusion.oasis:Mlp": Shaped("mlp", _rows("x")),
    "fastkernels.models.robotics.dp3:ConditionalResidualBlock1D": Shaped("policy_block", _film),
    "fastkernels.models.robotics.pi0:GemmaMLP": Shaped("mlp", _rows("x")),
    "fastkernels.models.geometry.ptv3:MLP": Shaped("mlp", _points),
    "fastkernels.models.vision.yolov10:SCDown": Shaped("conv_block", _image),
    "fastkernels.models.vision.yolov10:SPPF": Shaped("conv_block", _image),
    "fastkernels.models.vision.yolov10:PSA": Shaped("conv_block", _image),
    "fastkernels.models.vision.rtdetrv2:CspRepLayer": Shaped("conv_block", _image),
    "fastkernels.models.vision.swinv2:Swinv2Stage": Shaped("encoder_layer", _stage),
}


# {model type: fields of a small model whose sizes have other names}; of a pipeline by part
SMALL: dict[str, dict[str, Any]] = {
    "simple_dp3": {
        "horizon": 8, "n_action_steps": 4, "num_inference_steps": 4, "diffusion_step_embed_dim": 16,
        "down_dims": [16, 24, 32], "kernel_size": 3, "encoder_output_dim": 12,
    },
    "oasis": {
        "input_h": 8, "input_w": 6, "in_channels": 4, "hidden_size": 64, "depth": 2, "num_heads": 4, "max_frames": 5,
        "vae": {
            "input_height": 32, "input_width": 24, "patch_size": 4, "latent_dim": 4, "enc_dim": 32, "enc_depth": 1,
            "enc_heads": 2, "dec_dim": 48, "dec_depth": 2, "dec_heads": 2,
        },
    },
    "ptv3": {
        "enc_channels": [16, 16, 24, 24, 32], "enc_num_head": [2, 2, 3, 3, 2], "enc_patch_size": [16] * 5,
        "dec_channels": [16, 24, 24, 24], "dec_num_head": [2, 2, 3, 3], "dec_patch_size": [16] * 4,
    },
    "pi0": {
        "vlm_config": {
            "text_config": {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 3},
            "vision_config": {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2},
            "projection_dim": 64,
        },
        "dit_config": {"hidden_size": 32, "intermediate_size": 72, "num_hidden_layers": 3},
    },
    "rt_detr_v2": {
        "encoder_hidden_dim": 32, "d_model": 32, "decoder_in_channels": [32, 32, 32],
    },
    "swinv2": {"embed_dim": 16, "num_heads": [2, 4, 4, 4], "window_size": 4, "image_size": 128},
    "yolov10": {"scale": "n"},
    "flux": {
        "transformer": {
            "in_channels": 16, "num_layers": 2, "num_single_layers": 2, "attention_head_dim": 16,
            "num_attention_heads": 3, "joint_attention_dim": 32, "pooled_projection_dim": 32,
            "axes_dims_rope": [4, 4, 8],
        },
        "vae": {
            "block_out_channels": [16, 32], "norm_num_groups": 8, "latent_channels": 4,
            "down_block_types": ["DownEncoderBlock2D"] * 2, "up_block_types": ["UpDecoderBlock2D"] * 2,
        },
    },
    "sdxl": {
        "unet": {
            "block_out_channels": [32, 64, 64], "attention_head_dim": [2, 4, 4], "cross_attention_dim": 64,
            "norm_num_groups": 8, "addition_time_embed_dim": 8, "projection_class_embeddings_input_dim": 80,
        },
    },
    "hunyuan_video": {
        "transformer": {
            "in_channels": 9, "out_channels": 4, "num_attention_heads": 2, "attention_head_dim": 16, "num_layers": 2,
            "mlp_ratio": 2.0,
            "text_embed_dim": 32, "text_embed_2_dim": 24, "image_embed_dim": 16, "rope_axes_dim": [4, 6, 6],
        },
        "vae": {"latent_channels": 4, "block_out_channels": [8, 8, 16, 16, 16], "layers_per_block": 1},
    },
}  # fmt: skip


def grouped(values: Mapping[str, Any]) -> dict[str, Any]:
    """The parameters of `forward`: NAME.0 and NAME.1 together are NAME."""
    found: dict[str, Any] = {}
    for name, value in values.items():
        base, dot, _ = name.partition(".")
        found[base] = (*found.get(base, ()), value) if dot else value
    return found


def outputs(module: nn.Module, small: bool) -> list[tuple[int | str, ...]]:
    """The shapes of the outputs, by runs of a module on device 'meta' with one sample and with two."""
    entry = shaped(module)
    assert entry is not None
    shapes, made = entry.inputs(module, small), []
    for batch in (1, 2):
        given = {}
        for name, dims in shapes.items():
            sizes = [batch if d == BATCH else int(d) for d in dims]
            dtype = torch.bool if name in MASKS else torch.bfloat16
            given[name] = torch.empty(sizes, dtype=dtype, device="meta")
        with torch.no_grad():
            found = module(**grouped(given))
        made.append([tuple(t.shape) for t in (found if isinstance(found, tuple) else (found,))])
    one, two = made
    return [
        tuple(BATCH if b == 2 * a == 2 else a for a, b in zip(*pair, strict=True))
        for pair in zip(one, two, strict=True)
    ]


def shaped(module: nn.Module) -> Shaped | None:
    """The entry of a module's class; None for other modules."""
    cls = type(module)
    return SHAPED.get(f"{cls.__module__}:{cls.__name__}") or SHAPED.get(cls.__name__)
