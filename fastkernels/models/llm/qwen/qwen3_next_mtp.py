"""The head of Qwen3-Next for multi-token prediction: one layer of gated attention and experts."""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import nn

from fastkernels.models.common.descriptions import description as d
from fastkernels.models.common.descriptions.architecture import Architecture
from fastkernels.models.common.layers.decoder import DecoderLayer, add_and_norm, make_norm
from fastkernels.models.common.layers.mtp import MtpHead
from fastkernels.models.llm.qwen.qwen3_next import describe
from fastkernels.overrides.linear.vllm import VllmReplicatedLinear


class Qwen3NextMtp(MtpHead):
    """See MtpHead. Embedding and head are the target's, and a draft's hidden state is behind the head's norm."""

    def __init__(self, config: Any) -> None:
        super().__init__()
        hidden, norm = config.hidden_size, d.Norm("gemma", config.rms_norm_eps)
        one = copy.copy(config)
        one.num_hidden_layers, one.layer_types = 1, ["full_attention"]
        self.mtp = nn.Module()
        self.mtp.fc = VllmReplicatedLinear(2 * hidden, hidden, bias=False, prefix="mtp.fc")
        self.mtp.pre_fc_norm_embedding = make_norm(norm, hidden)
        self.mtp.pre_fc_norm_hidden = make_norm(norm, hidden)
        self.mtp.layers = nn.ModuleList([DecoderLayer(describe(one).layers[0], hidden, "mtp.layers.0")])
        self.mtp.norm = make_norm(norm, hidden)

    @staticmethod
    def prefix(config: Any) -> str:
        return "mtp."

    def forward(
        self, input_ids: torch.Tensor, positions: torch.Tensor, hidden: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        mtp: Any = self.mtp
        embedded = mtp.pre_fc_norm_embedding(self.target.model.embed_tokens(input_ids))
        x = mtp.fc(torch.cat((embedded, mtp.pre_fc_norm_hidden(hidden)), dim=-1))[0]
        normed = add_and_norm(mtp.norm, *mtp.layers[0](positions, x, None))[0]
        return normed, normed

    def compute_logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """[B, vocab_size]"""
        return self.target.compute_logits(hidden)


ARCH = Architecture(
    names=("Qwen3NextMTP",),
    category="llm",
    model="Qwen3NextMtp",
    runner="Draft",
    model_type="qwen3_next",
    experts="fastkernels.models.common.layers.decoder:expert_mapping",
    unused=("*rotary_emb.inv_freq", "model.*", "lm_head.*"),
    parts={
        "mlp.shared_expert.down_proj": "mlp.shared_experts.down_proj",
        "mlp.shared_expert.gate_proj": "mlp.shared_experts.gate_proj",
        "mlp.shared_expert.up_proj": "mlp.shared_experts.up_proj",
    },
)  # fmt: skip
