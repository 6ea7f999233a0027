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
