"""Qwen3-VL-MoE (arXiv 2511.21631): Qwen3-VL with experts."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import nn

from fastkernels.models.common.descriptions import description as d
from fastkernels.models.common.descriptions.architecture import Architecture
from fastkernels.models.llm.qwen import qwen3_moe
from fastkernels.models.multimodal.qwen3_vl import Qwen3VLForConditionalGeneration, tower
from fastkernels.overrides.moe.sparse_moe import Experts


def describe(config: Any) -> d.Decoder:
    config.norm_topk_prob = True
    config.sliding_window = None  # whatever the file has, as in transformers' class of this config
    return replace(qwen3_moe.describe(config), tower=tuple(tower(config.vision_config)))


class Qwen3VLMoeForConditionalGeneration(Qwen3VLForConditionalGeneration):
    """The experts' matrices are transposed in published checkpoints: [E, H, 2 I] and [E, I, H].

    Those that transformers saves are not, so that the shape decides, as in transformers.
    """

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        n, inner, hidden = config.num_experts, config.moe_intermediate_size, config.hidden_size
        shapes = {"w13_weight": (n, 2 * inner, hidden), "w2_weight": (n, hidden, inner)}
        for module in self.modules():
            if isinstance(module, Experts):
                for name, shape in shapes.items():
                    parameter: Any = getattr(module, name)
                    parameter.weight_loader = partial(_load, parameter.weight_loader, shape)


def _load(
    load: Callable[..., Any],
    shape: tuple[int, ...],
    parameter: nn.Parameter,
    loaded: torch.Tensor,
    *where: Any,
) -> None:
    load(parameter, loaded if loaded.shape == shape else loaded.transpose(1, 2), *where)


ARCH = Architecture(
    names=("Qwen3VLMoeForConditionalGeneration",),
    category="multimodal",
    model="Qwen3VLMoeForConditionalGeneration",
    runner="Generate",
    model_type="qwen3_vl_moe",
    media=("image", "video"),
    renamed={"model.language_model.": "model.", "model.visual.": "visual."},
    parts={"experts.gate_up_proj": "experts.w13_weight", "experts.down_proj": "experts.w2_weight"},
    tied={"lm_head.weight": "model.embed_tokens.weight"},
    public={
        "Qwen/Qwen3-VL-30B-A3B-Instruct": {
            "text_config": {
                "hidden_size": 2048, "intermediate_size": 6144, "num_hidden_layers": 48, "num_attention_heads": 32,
                "num_key_value_heads": 4, "head_dim": 128, "vocab_size": 151936, "max_position_embeddings": 262144,
                "num_experts": 128, "num_experts_per_tok": 8, "moe_intermediate_size": 768,
                "rope_parameters": {
                    "rope_type": "default", "rope_theta": 5e6, "mrope_section": [24, 20, 20], "mrope_interleaved": True,
                },
            },
            "vision_config": {"depth": 27, "out_hidden_size": 2048, "deepstack_visual_indexes": [8, 16, 24]},
        },
    },
)  # fmt: skip
