"""Gemma 4's blocks that other decoders lack: experts next to an MLP, and inputs of single layers."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import nn

from fastkernels.core import parallel
from fastkernels.models.common.descriptions.description import LayerInput, Norm, ParallelExperts, Unsupported
from fastkernels.overrides.embedding.vllm import VllmVocabParallelEmbedding
from fastkernels.overrides.linear.vllm import VllmReplicatedLinear
from fastkernels.overrides.moe import sparse_moe
from fastkernels.overrides.moe.fused_experts_gelu import fused_experts_gelu
from fastkernels.overrides.routing.topk_softmax import topk_softmax

MakeNorm = Callable[[Norm, int], nn.Module]


class Router(nn.Module):
    """norm(x) * factor [T, H] to the weights and ids of each token's experts, [T, top_k].

    The norm's weight is the checkpoint's factor of the normalized x.
    """

    def __init__(self, described: ParallelExperts, make_norm: MakeNorm, hidden: int, prefix: str) -> None:
        super().__init__()
        experts = described.experts
        self.top_k, self.factor = experts.top_k, hidden**-0.5
        self.norm = make_norm(described.norm, hidden)
        self.proj = VllmReplicatedLinear(hidden, experts.count, bias=False, prefix=f"{prefix}.proj")
        self.per_expert_scale = nn.Parameter(torch.ones(experts.count), requires_grad=False)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        scores, _ = self.proj(x)
        weights, ids, _ = topk_softmax(scores, self.top_k, True, self.per_expert_scale)
        return weights, ids


class ExpertsBesideMlp(nn.Module):
    """The result of a layer's MLP and the residual stream, both [T, H], to the normalized sum with the experts'."""

    ops = ("topk_softmax", "fused_experts_gelu")

    def __init__(self, described: ParallelExperts, make_norm: MakeNorm, hidden: int, prefix: str) -> None:
        super().__init__()
        experts, norm = described.experts, described.norm
        self.router = Router(described, make_norm, hidden, f"{prefix}.router")
        self.experts = sparse_moe.Experts(
            experts.count, hidden, experts.intermediate, prefix=f"{prefix}.experts"
        )
        if (op := self.experts.quant_method.op) != "fused_experts":
            raise Unsupported(
                f"experts next to an MLP are supported in floats only, not with {op} ({prefix})"
            )
        self.after_mlp, self.before, self.after = (make_norm(norm, hidden) for _ in range(3))

    def forward(self, mlp: torch.Tensor, residual: torch.Tensor) -> torch.Tensor:
        x = self.router.norm(residual) * self.router.factor
        return self.after_mlp(mlp) + self.after(self.compute(x, self.before(residual)))

    def compute(self, routed: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        """The experts' sum for their input x [T, H]. routed: [T, H], the input of the router's projection."""
        weights, ids = self.router(routed)
        e = self.experts

        def own(x: torch.Tensor, weights: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
            return fused_experts_gelu(x, e.w13_weight, e.w2_weight, weights, ids, e.expert_map)

        out = own(x, weights, ids) if e.over_ranks is None else e.over_ranks(own, x, weights, ids)
        return parallel.all_reduce(out)


class LayerInputs(nn.Module):
    """input_ids [T] and embeddings [T, H] to the inputs of all layers, [T, layers, size]."""

    def __init__(self, d: LayerInput, make_norm: MakeNorm, hidden: int, layers: int, prefix: str) -> None:
        super().__init__()
        self.size, self.layers, self.factor = d.size, layers, hidden**-0.5
        self.embed_tokens = VllmVocabParallelEmbedding(
            d.vocab, layers * d.size, prefix=f"{prefix}.embed_tokens"
        )
        self.embed_tokens.__dict__["scale"] = self.size**0.5  # for random weights
        self.projection = VllmReplicatedLinear(
            hidden, layers * d.size, bias=False, prefix=f"{prefix}.projection"
        )
        self.norm = make_norm(d.norm, d.size)

    def forward(self, input_ids: torch.Tensor, hidden: torch.Tensor) -> torch.Tensor:
        by_layer = (self.layers, self.size)
        own = self.embed_tokens(input_ids).unflatten(-1, by_layer)
        own = own * torch.tensor(self.size**0.5, dtype=own.dtype)
        projected, _ = self.projection(hidden)
        return (self.norm((projected * self.factor).unflatten(-1, by_layer)) + own) * 2**-0.5


class LayerInputBlock(nn.Module):
    """The residual stream [T, H] and this layer's input [T, size] to what is added to the stream."""

    def __init__(self, d: LayerInput, make_norm: MakeNorm, hidden: int, prefix: str) -> None:
        super().__init__()
        self.gate = VllmReplicatedLinear(hidden, d.size, bias=False, prefix=f"{prefix}.gate")
        self.projection = VllmReplicatedLinear(d.size, hidden, bias=False, prefix=f"{prefix}.projection")
        self.norm = make_norm(d.norm, hidden)

    def forward(self, x: torch.Tensor, layer_input: torch.Tensor) -> torch.Tensor:
        return self.norm(self.project(x, layer_input))

    def project(self, x: torch.Tensor, layer_input: torch.Tensor) -> torch.Tensor:
        """The same before the norm."""
        gate, _ = self.gate(x)
        projected, _ = self.projection(F.gelu(gate, approximate="tanh") * layer_input)
        return projected
