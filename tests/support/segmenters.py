"""Tiny models of SAM 3 with random weights, and a tokenizer of CLIP's kind for them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import torch
from support.detectors import randomize

WORDS = ["a", "black", "cat", "dog", "red", "ball", "visual"]
BACKBONE = {
    "model_type": "sam3_vit_model", "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 3,
    "num_attention_heads": 2, "image_size": 56, "patch_size": 14, "window_size": 2, "global_attn_indexes": [1],
    "pretrain_image_size": 28,
}  # fmt: skip
LAYERS = {"hidden_size": 16, "num_attention_heads": 2, "intermediate_size": 24}
TEXT = {
    "vocab_size": 16, "hidden_size": 24, "intermediate_size": 32, "projection_dim": 8, "num_hidden_layers": 2,
    "num_attention_heads": 2, "max_position_embeddings": 32, "hidden_act": "gelu", "bos_token_id": 0,
    "eos_token_id": 1, "pad_token_id": 1,
}  # fmt: skip


def config(**more: dict[str, Any]) -> Any:
    """transformers' config. more: fields of the parts, such as backbone={...}"""
    import transformers

    vision = {
        "fpn_hidden_size": 16, "backbone_feature_sizes": [[16, 16], [8, 8], [4, 4]], **more.get("vision", {}),
        "backbone_config": {**BACKBONE, **more.get("backbone", {})},
    }  # fmt: skip
    return transformers.Sam3Config(
        vision_config=vision,
        text_config={**TEXT, **more.get("text", {})},
        geometry_encoder_config={**LAYERS, "num_layers": 2, "roi_size": 3, **more.get("geometry", {})},
        detr_encoder_config={**LAYERS, "num_layers": 2, **more.get("encoder", {})},
        detr_decoder_config={**LAYERS, "num_layers": 2, "num_queries": 9, **more.get("decoder", {})},
        mask_decoder_config={"hidden_size": 16, "num_attention_heads": 4, **more.get("masks", {})},
    )


def make_tokenizer(folder: Path, length: int = 32) -> Any:
    """Whole words between <s> and </s>."""
    import transformers
    from tokenizers import Tokenizer, models, pre_tokenizers, processors

    vocabulary = {word: i for i, word in enumerate(["<s>", "</s>", "<unk>", *WORDS])}
    made = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    made.pre_tokenizer = pre_tokenizers.Whitespace()
    made.post_processor = processors.TemplateProcessing(
        single="<s> $A </s>", special_tokens=[("<s>", 0), ("</s>", 1)]
    )
    tokenizer = transformers.PreTrainedTokenizerFast(
        tokenizer_object=made, bos_token="<s>", eos_token="</s>", unk_token="<unk>", pad_token="</s>",
        model_max_length=length,
    )  # fmt: skip
    tokenizer.save_pretrained(folder)
    return tokenizer


def make_sam3(folder: Path, **more: dict[str, Any]) -> Any:
    """transformers' model, saved with its processor."""
    import transformers

    torch.manual_seed(0)
    made = config(**more)
    model = transformers.Sam3Model(made).eval()
    randomize(model.state_dict())
    model.save_pretrained(folder)
    side = made.vision_config.backbone_config.image_size
    size = {"height": side, "width": side}
    images = transformers.Sam3ImageProcessor(
        size=size, mask_size={"height": side // 14 * 4, "width": side // 14 * 4}
    )
    transformers.Sam3Processor(images, make_tokenizer(folder)).save_pretrained(folder)
    return model


def mask_of(rle: dict[str, Any]) -> np.ndarray:
    """The mask [height, width] of COCO's compressed form, by its definition."""
    runs, value, shift = [], 0, 0
    for character in rle["counts"]:
        code = ord(character) - 48
        value |= (code & 31) << shift
        shift += 5
        if code & 32:
            continue
        if code & 16:
            value -= 1 << shift
        runs.append(value + (runs[-2] if len(runs) > 2 else 0))
        value = shift = 0
    height, width = rle["size"]
    inside = [i % 2 == 1 for i, run in enumerate(runs) for _ in range(run)]
    return np.array(inside, bool).reshape(width, height).T


TRACKER = {
    "memory_attention_num_layers": 2, "memory_attention_feed_forward_hidden_size": 48, "memory_fuser_num_layers": 2,
    "memory_attention_hidden_size": 128, "memory_encoder_hidden_size": 128, "memory_encoder_output_channels": 64,
    "mask_downsampler_embed_dim": 128, "memory_fuser_embed_dim": 128, "memory_fuser_intermediate_dim": 48,
    "num_maskmem": 3, "max_object_pointers_in_encoder": 5, "image_size": 56,
}  # fmt: skip
RULES = {"score_threshold_detection": 0.2, "new_det_thresh": 0.3, "fill_hole_area": 0, "det_nms_thresh": 0.0}
WIDE = {"hidden_size": 128, "num_attention_heads": 4, "intermediate_size": 32}


def make_sam3_video(folder: Path, tracker: dict[str, Any] | None = None, **rules: Any) -> Any:
    """transformers' Sam3VideoModel, saved with its processor. tracker, rules: fields of its and the whole config."""
    import transformers

    torch.manual_seed(0)
    detector = config(
        vision={"fpn_hidden_size": 128}, geometry=WIDE, encoder=WIDE, decoder={**WIDE, "num_queries": 6},
        masks={"hidden_size": 128},
    ).to_dict()  # fmt: skip
    own = {
        **TRACKER, "vision_config": detector["vision_config"],
        "prompt_encoder_config": {"hidden_size": 128, "image_size": 56, "patch_size": 14, "mask_input_channels": 8},
        "mask_decoder_config": {
            "hidden_size": 128, "mlp_dim": 32, "num_attention_heads": 4, "iou_head_hidden_dim": 24,
            **(tracker or {}).pop("mask_decoder_config", {}),
        },
        **(tracker or {}),
    }  # fmt: skip
    made = transformers.Sam3VideoConfig(
        detector_config=detector, tracker_config=own, low_res_mask_size=16,
        **{**RULES, **rules},
    )  # fmt: skip
    model = transformers.Sam3VideoModel(made).eval()
    randomize(model.state_dict())
    with torch.no_grad():  # objects stay visible for some frames
        model.tracker_model.mask_decoder.pred_obj_score_head.proj_out.bias.fill_(2.0)
    model.save_pretrained(folder)
    size = {"height": 56, "width": 56}
    images = transformers.Sam3ImageProcessor(size=size, mask_size={"height": 16, "width": 16})
    half = [0.5] * 3  # as of images
    videos = transformers.Sam2VideoVideoProcessor(size=size, image_mean=half, image_std=half)
    transformers.Sam3VideoProcessor(images, videos, make_tokenizer(folder)).save_pretrained(folder)
    return model


def frames_of(count: int, size: tuple[int, int] = (64, 48), seed: int = 0) -> list[Any]:
    """Frames of a clip: spots that move over a slowly changing picture."""
    from PIL import Image

    rng = np.random.default_rng(seed)
    first, last = (rng.integers(0, 256, (3, 4, 3)).astype(np.float32) for _ in range(2))
    made = []
    for i in range(count):
        share = i / max(count - 1, 1)
        base = Image.fromarray(((1 - share) * first + share * last).astype(np.uint8)).resize(size)
        base.paste((255, int(200 * share), 0), (4 + 2 * i, 6 + i, 24 + 2 * i, 24 + i))
        made.append(base)
    return made


def make_sam3_tracker(folder: Path, levels: int = 3, **decoder: Any) -> Any:
    """transformers' Sam3TrackerModel, saved with its processor. levels: of the pyramid; decoder: fields of a config."""
    import transformers

    torch.manual_seed(0)
    vision = config(vision={"fpn_hidden_size": 32}).vision_config.to_dict()
    vision["scale_factors"] = vision["scale_factors"][:levels]
    made = transformers.Sam3TrackerConfig(
        vision_config=vision,
        prompt_encoder_config={"hidden_size": 32, "image_size": 56, "patch_size": 14, "mask_input_channels": 8},
        mask_decoder_config={
            "hidden_size": 32, "mlp_dim": 24, "num_attention_heads": 2, "iou_head_hidden_dim": 24, **decoder,
        },
    )  # fmt: skip
    model = transformers.Sam3TrackerModel(made).eval()
    randomize(model.state_dict())
    model.save_pretrained(folder)
    images = transformers.Sam3ImageProcessor(
        size={"height": 56, "width": 56}, mask_size={"height": 16, "width": 16}
    )
    transformers.Sam3TrackerProcessor(images).save_pretrained(folder)
    return model
