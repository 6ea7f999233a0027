"""Blocks whose inputs are not a step of tokens: the shape of each input, from the module's own sizes.

A class that is named in SHAPED is a block wherever a model has it. Inputs are normal random numbers; masks are ones.
Outside of the model files, these tables alone name models.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import torch
from torch import nn

BATCH = "batch"
# Of the parameters of `forward`; NAME.0 and NAME.1 of a pair. A size that grows with the batch is BATCH or "N*batch".
Shapes = Mapping[str, tuple[int | str, ...]]
IMAGE, FRAMES, TEXT, SIDE, HORIZON = (
    4096,
    9600,
    512,
    32,
    16,
)  # tokens of 1024 pixels and of a short video, and so on
SMALL_TOKENS, SMALL_SIDE, SMALL_HORIZON = 24, 8, 8
RESIDUES, SMALL_RESIDUES = 384, 12
MEL_FRAMES, PROMPT, QUERIES = 500, 32, 200  # of 10 s of speech, and of a detector that a text steers


class Shaped(NamedTuple):
    """kind: of the block. inputs: their shapes, of a module and whether it is of the small model for a CPU.

    masks  inputs that are True; ones: those that are 1, of the inputs' dtype
    """

    kind: str
    inputs: Callable[[Any, bool], Shapes]
    masks: tuple[str, ...] = ()
    ones: tuple[str, ...] = ()


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
    weight = next(p for p in module.parameters() if p.dim() == 4)
    channels = weight.shape[0 if weight.shape[1] == 1 else 1]  # those of a depthwise one have a channel each
    return {"x": (BATCH, channels, _side(small), _side(small))}


def _stage(module: Any, small: bool) -> Shapes:
    width = module.blocks[0].layernorm_before.weight.shape[0]
    return {"x": (BATCH, 2 * _side(small), 2 * _side(small), width)}


def _patches(module: Any, small: bool) -> Shapes:
    """Patches of an image, those of a block one after the other."""
    norm = getattr(module, "ln_q", None) or module.norm
    in_block = module.wide // getattr(module, "channels", len(norm.weight))
    blocks = SMALL_TOKENS if small else IMAGE // in_block
    return {"hidden": (f"{blocks * in_block}*{BATCH}", module.wide // in_block)}


def _rows(name: str, *more: str) -> Callable[[Any, bool], Shapes]:
    def shapes(module: Any, small: bool) -> Shapes:
        width = next(p for p in module.parameters() if p.dim() == 2).shape[1]
        return {each: (BATCH, _tokens(small, TEXT), width) for each in (name, *more)}

    return shapes


def _features(module: Any, small: bool) -> Shapes:
    """Samples of a recommender; the factors [N, R] of a cross layer are named before those [R, N]."""
    first = next(p for p in module.parameters() if p.dim() == 2)
    return {"x": (BATCH, first.shape[0 if hasattr(module, "W_kernels") else 1])}


def _points(module: Any, small: bool) -> Shapes:
    width = module.fc1.in_features
    return dict.fromkeys(("x", "residual"), (BATCH, width))


def _flow_attention(module: Any, small: bool) -> Shapes:
    frames, width = _tokens(small, MEL_FRAMES), module.to_q.in_features
    return {"x": (BATCH, frames, width), "table": (frames, module.head_size)}


def _flow(module: Any, small: bool) -> Shapes:
    inner = _flow_attention(module.attn, small)
    return {"x": inner["x"], "time": (BATCH, inner["x"][-1]), "table": inner["table"]}


def _width(module: Any) -> int:
    return int(next(p for p in module.parameters() if p.dim() == 2).shape[1])


def _seen(module: Any, small: bool) -> Shapes:
    """Queries and the cells of an image that they attend to."""
    width, rows, cells = _width(module), _tokens(small, QUERIES), _tokens(small, IMAGE)
    return {
        "x": (BATCH, rows, width), "keys": (BATCH, cells, width), "values": (BATCH, cells, width),
        "residual": (BATCH, rows, width),
    }  # fmt: skip


def _vit_layer(module: Any, small: bool) -> Shapes:
    """Windows, of which an image has some; without windows, an image of 32 x 32 cells."""
    width = module.attention.qkv.weight.shape[1]
    head = width // module.attention.heads
    cells = module.window**2 or _side(small) ** 2
    return {
        "x": (BATCH, 4 * cells if module.window else cells, width), "rotation.0": (cells, head),
        "rotation.1": (cells, head),
    }  # fmt: skip


def _text_layer(module: Any, small: bool) -> Shapes:
    return {"x": (BATCH, PROMPT, _width(module)), "causal": (1, 1, PROMPT, PROMPT)}


def _prompted(module: Any, small: bool) -> Shapes:
    """Cells of an image that attend to each other and to a prompt."""
    width, cells = _width(module), _tokens(small, IMAGE)
    return {
        "x": (BATCH, cells, width), "places": (1, cells, width), "keys": (BATCH, PROMPT, width),
        "values": (BATCH, PROMPT, width), "others": (BATCH, 1, 1, PROMPT),
    }  # fmt: skip


def _queried(module: Any, small: bool) -> Shapes:
    """Queries behind a token of presence, with biases by the rows and columns of a square image."""
    width, rows, side = _width(module), 1 + _tokens(small, QUERIES), _side(small)
    bias = (BATCH, module.vision_cross_attn.heads, rows - 1, side)
    stream, cells = (BATCH, rows, width), (BATCH, side * side, width)
    return {
        "x": stream, "places": stream, "prompt": (BATCH, PROMPT, width), "mask": (BATCH, 1, 1, PROMPT),
        "keys": cells, "cells": cells, "biases.0": bias, "biases.1": bias,
    }  # fmt: skip


def _residues(small: bool) -> int:
    return SMALL_RESIDUES if small else RESIDUES


def _pairs(mask: str, of_pairs: bool) -> Callable[[Any, bool], Shapes]:
    def shapes(module: Any, small: bool) -> Shapes:
        n, norm = _residues(small), getattr(module, "layer_norm_in", None) or module.layer_norm
        return {"z": (BATCH, n, n, len(norm.weight)), mask: (BATCH, n if of_pairs else 1, n)}

    return shapes


def _singles(module: Any, small: bool) -> Shapes:
    n, single, pair = _residues(small), len(module.layer_norm_a.weight), len(module.layer_norm_z.weight)
    return {"s": (BATCH, n, single), "z": (BATCH, n, n, pair), "tokens": (BATCH, 1, n)}


def _transition(module: Any, small: bool) -> Shapes:
    return {"x": (BATCH, _residues(small) ** 2, len(module.layer_norm.weight))}


def _pair_stack(module: Any, small: bool) -> Shapes:
    z, pairs = _pairs("pairs", True)(module.tri_mul_out, small).values()
    return {"z": z, "pairs": pairs, "tokens": (BATCH, 1, _residues(small))}


def _pairformer(module: Any, small: bool) -> Shapes:
    singles, pairs = _singles(module.attn_pair_bias, small), _pair_stack(module.pair_stack, small)
    return {"s": singles["s"], **pairs}


_QWEN = "fastkernels.models.multimodal"
# {class of our models or of diffusers' drop-ins: its block}
SHAPED: dict[str, Shaped] = {
    "DiffusersFluxTransformerBlock": Shaped("diffusion_block", _flux),
    "DiffusersFluxSingleTransformerBlock": Shaped("diffusion_block", _flux),
    "DiffusersHunyuanVideo15TransformerBlock": Shaped("diffusion_block", _hunyuan, masks=("attention_mask",)),
    "fastkernels.models.diffusion.sdxl:Transformer": Shaped("diffusion_block", _cross),
    "fastkernels.models.diffusion.oasis:Mlp": Shaped("mlp", _rows("x")),
    "fastkernels.models.robotics.dp3:ConditionalResidualBlock1D": Shaped("policy_block", _film),
    "fastkernels.models.robotics.pi0:GemmaMLP": Shaped("mlp", _rows("x")),
    "fastkernels.models.geometry.ptv3:MLP": Shaped("mlp", _points),
    f"{_QWEN}.qwen2_vl:Qwen2VisionPatchMerger": Shaped("merger", _patches),
    f"{_QWEN}.qwen2_5_vl:Qwen2_5_VisionPatchMerger": Shaped("merger", _patches),
    f"{_QWEN}.qwen3_vl:Qwen3VisionPatchMerger": Shaped("merger", _patches),
    "fastkernels.models.vision.yolov10:SCDown": Shaped("conv_block", _image),
    "fastkernels.models.vision.yolov10:Bottleneck": Shaped("conv_block", _image),
    "fastkernels.models.vision.yolov10:CompactInvertedBlock": Shaped("conv_block", _image),
    "fastkernels.models.vision.yolov10:SPPF": Shaped("conv_block", _image),
    "fastkernels.models.vision.yolov10:PSA": Shaped("conv_block", _image),
    "fastkernels.models.vision.rtdetrv2:CspRepLayer": Shaped("conv_block", _image),
    "fastkernels.models.vision.rtdetrv2:SelfAttention": Shaped("attention", _rows("x", "places", "residual")),
    "fastkernels.models.vision.rtdetrv2:EncoderLayer": Shaped("encoder_layer", _rows("x", "places")),
    "fastkernels.models.recsys.dlrm_v2:MLP": Shaped("mlp", _features),
    "fastkernels.models.recsys.dlrm_v2:OverArch": Shaped("mlp", _features),
    "fastkernels.models.recsys.dlrm_v2:LowRankCrossNet": Shaped("cross_net", _features),
    "fastkernels.models.vision.swinv2:Swinv2Stage": Shaped("encoder_layer", _stage),
    "fastkernels.models.common.speech.flow:FlowAttention": Shaped("attention", _flow_attention),
    "fastkernels.models.common.speech.flow:FlowBlock": Shaped("diffusion_block", _flow),
    "fastkernels.models.vision.sam3:Mlp": Shaped("mlp", _rows("x", "residual")),
    "fastkernels.models.vision.sam3:SelfAttention": Shaped("attention", _rows("x", "places", "residual")),
    "fastkernels.models.vision.sam3:CrossAttention": Shaped("attention", _seen),
    "fastkernels.models.vision.sam3:ViTLayer": Shaped("encoder_layer", _vit_layer),
    "fastkernels.models.vision.sam3:TextLayer": Shaped("encoder_layer", _text_layer, masks=("causal",)),
    "fastkernels.models.vision.sam3:EncoderLayer": Shaped("encoder_layer", _prompted, masks=("others",)),
    "fastkernels.models.vision.sam3:DecoderLayer": Shaped("decoder_layer", _queried, masks=("mask",)),
    "fastkernels.models.science.openfold3:TriangleMultiplication": Shaped(
        "pair_update", _pairs("mask", True), ones=("mask",)
    ),
    "fastkernels.models.science.openfold3:TriangleAttention": Shaped(
        "attention", _pairs("mask", False), masks=("mask",)
    ),
    "fastkernels.models.science.openfold3:AttentionPairBias": Shaped(
        "attention", _singles, masks=("tokens",)
    ),
    "fastkernels.models.science.openfold3:SwiGLUTransition": Shaped("mlp", _transition),
    "fastkernels.models.science.openfold3:PairBlock": Shaped(
        "pair_block", _pair_stack, masks=("tokens",), ones=("pairs",)
    ),
    "fastkernels.models.science.openfold3:PairFormerBlock": Shaped(
        "encoder_layer", _pairformer, masks=("tokens",), ones=("pairs",)
    ),
}


_SAM3_BACKBONE = {
    "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 8, "num_attention_heads": 2, "image_size": 56,
    "window_size": 2, "global_attn_indexes": [7], "pretrain_image_size": 28,
}  # fmt: skip
_SAM3_PART = {"hidden_size": 64, "num_attention_heads": 4, "intermediate_size": 24}
_SAM3_MARKS = {
    "vision_config": {"fpn_hidden_size": 64, "backbone_config": _SAM3_BACKBONE},
    "prompt_encoder_config": {"hidden_size": 64, "image_size": 56},
    "mask_decoder_config": {
        "hidden_size": 64, "mlp_dim": 32, "num_attention_heads": 4, "iou_head_hidden_dim": 24,
    },
}  # fmt: skip
_ATOMS = {"c_atom": 16, "c_atom_pair": 8, "c_hidden": 4, "no_blocks": 2, "c_s": 24, "c_z": 16}
_PAIRS = {"c_hidden_mul": 10, "c_hidden_pair_att": 4, "no_heads_pair": 2}
_PAIRFORMER = {"c_s": 24, "c_z": 16, "c_hidden_pair_bias": 6, "no_heads_pair_bias": 4, **_PAIRS}
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
    "cosyvoice3": {
        "speech_token_size": 50, "text_vocab_size": 800, "hidden_size": 64, "intermediate_size": 96,
        "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 2048,
        "flow": {
            "vocab": 50, "speaker": 12, "lookahead_width": 32, "width": 64, "depth": 2, "heads": 4, "head_size": 16,
        },
        "vocoder": {"width": 32, "pitch_width": 32},
    },
    "sam3": {
        "vision_config": {
            "fpn_hidden_size": 16,
            "backbone_config": _SAM3_BACKBONE,
        },
        "text_config": {
            "vocab_size": 48, "hidden_size": 24, "intermediate_size": 32, "num_hidden_layers": 2,
            "num_attention_heads": 2,
        },
        "geometry_encoder_config": {"hidden_size": 16, "num_attention_heads": 2, "intermediate_size": 24},
        "detr_encoder_config": {"hidden_size": 16, "num_attention_heads": 2, "intermediate_size": 24},
        "detr_decoder_config": {"hidden_size": 16, "num_attention_heads": 2, "intermediate_size": 24},
        "mask_decoder_config": {"hidden_size": 16, "num_attention_heads": 4},
    },
    "sam3_tracker": _SAM3_MARKS,
    "sam3_video": {
        "low_res_mask_size": 16,
        "detector_config": {
            "vision_config": {"fpn_hidden_size": 64, "backbone_config": _SAM3_BACKBONE},
            "text_config": {
                "vocab_size": 300, "hidden_size": 24, "intermediate_size": 32, "num_hidden_layers": 2,
                "num_attention_heads": 2,
            },
            "geometry_encoder_config": _SAM3_PART, "detr_encoder_config": _SAM3_PART,
            "detr_decoder_config": _SAM3_PART, "mask_decoder_config": {"hidden_size": 64, "num_attention_heads": 4},
        },
        "tracker_config": {
            **_SAM3_MARKS, "memory_attention_num_layers": 2, "memory_attention_feed_forward_hidden_size": 48,
            "memory_fuser_num_layers": 2, "memory_attention_hidden_size": 64, "memory_encoder_hidden_size": 64,
            "memory_encoder_output_channels": 32, "mask_downsampler_embed_dim": 64, "memory_fuser_embed_dim": 64,
            "memory_fuser_intermediate_dim": 48, "num_maskmem": 3, "max_object_pointers_in_encoder": 5,
            "image_size": 56,
        },
    },
    "openfold3": {
        "architecture": {
            "shared": {"c_s_input": 89, "c_s": 24, "c_z": 16},
            "input_embedder": {"atom_attn_enc": {**_ATOMS, "c_token": 24}},
            "template": {
                "c_t": 8, "c_z": 16,
                "template_pair_stack": {"c_hidden_tri_att": 4, "c_hidden_tri_mul": 8, "no_heads": 2},
            },
            "msa": {"msa_module": {"c_m": 12, "c_z": 16, "c_hidden_msa_att": 4, "c_hidden_opm": 5, **_PAIRS}},
            "pairformer": {**_PAIRFORMER, "no_blocks": 2},
            "diffusion_module": {
                "diffusion_module": {"c_token": 32}, "diffusion_conditioning": {"c_fourier_emb": 20},
                "atom_attn_enc": {**_ATOMS, "c_token": 32},
                "diffusion_transformer": {"c_hidden": 8, "no_heads": 4, "no_blocks": 2},
                "atom_attn_dec": {**_ATOMS, "c_token": 32},
            },
            "heads": {"pairformer_embedding": {"pairformer": {**_PAIRFORMER, "no_blocks": 1}}},
        },
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


def per_sample(size: int | str) -> int | None:
    """How much of a size one sample of the batch has; None: the size does not grow with the batch."""
    if isinstance(size, int):
        return None
    count, star, _ = size.partition("*")
    return int(count) if star else 1


def outputs(module: nn.Module, small: bool) -> list[tuple[int | str, ...]]:
    """The shapes of the outputs, by runs of a module on device 'meta' with one sample and with two."""
    entry = shaped(module)
    assert entry is not None
    shapes, made = entry.inputs(module, small), []
    for batch in (1, 2):
        given = {}
        for name, dims in shapes.items():
            sizes = [int(d) if (n := per_sample(d)) is None else n * batch for d in dims]
            dtype = torch.bool if name in entry.masks else torch.bfloat16
            given[name] = torch.empty(sizes, dtype=dtype, device="meta")
        with torch.no_grad():
            found = module(**grouped(given))
        made.append([tuple(t.shape) for t in (found if isinstance(found, tuple) else (found,))])
    one, two = made
    return [tuple(_size_of(a, b) for a, b in zip(*pair, strict=True)) for pair in zip(one, two, strict=True)]


def _size_of(one: int, two: int) -> int | str:
    """A size that is `one` for one sample and `two` for two."""
    if one == two:
        return one
    return BATCH if one == 1 else f"{one}*{BATCH}"


def shaped(module: nn.Module) -> Shaped | None:
    """The entry of a module's class; None for other modules."""
    cls = type(module)
    return SHAPED.get(f"{cls.__module__}:{cls.__name__}") or SHAPED.get(cls.__name__)
