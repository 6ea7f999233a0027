"""One layer of a Mixtral model: norm, attention, norm and sparse experts, with a separate residual."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch

from fastkernels.core.spec import Axis, Call, OpSpec, Scalar, Tensor, fan_in
from fastkernels.overrides.block import cases
from fastkernels.overrides.block.cases import layer_reference
from fastkernels.overrides.moe import sparse_moe


def reference(
    positions: torch.Tensor,
    hidden_states: torch.Tensor,
    residual: torch.Tensor | None,
    input_layernorm: torch.Tensor,
    post_attention_layernorm: torch.Tensor,
    qkv_proj: torch.Tensor,
    o_proj: torch.Tensor,
    q_norm: torch.Tensor | None,
    k_norm: torch.Tensor | None,
    cos_sin_cache: torch.Tensor,
    eps: float,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    slot_mapping: torch.Tensor,
    cu_seqlens_q: torch.Tensor,
    seq_lens: torch.Tensor,
    block_table: torch.Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    gate: torch.Tensor,
    w1: torch.Tensor,
    w2: torch.Tensor,
    top_k: int,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """sparse_moe documents gate, w1, w2 and top_k, layer_reference the other arguments; q_norm and k_norm are None.

    Returns (hidden states, residual, new key_cache, new value_cache); the first two add up to the residual stream.
    """
    return layer_reference(
        lambda h: sparse_moe.reference(h, gate, w1, w2, top_k), positions, hidden_states, residual, input_layernorm,
        post_attention_layernorm, qkv_proj, o_proj, q_norm, k_norm, cos_sin_cache, eps, key_cache, value_cache,
        slot_mapping, cu_seqlens_q, seq_lens, block_table, max_seqlen_q, max_seqlen_k,
    )  # fmt: skip


def _values(call: Call) -> Mapping[str, torch.Tensor]:
    """Make each token's choice of experts so clear that no rounding on the way decides it.

    As many channels as there are experts have values 8 apart, in an order drawn for each token. The gate reads these
    channels, and the others with a twentieth of the usual weight. Attention adds about 1 to each channel.
    """
    found = {
        name: call.tensor(name) for name in ("hidden_states", "residual", "post_attention_layernorm", "gate")
    }
    gate, experts = found["gate"], call["experts"]
    if experts <= call["hidden"]:
        order = call.rand(call["tokens"], experts).argsort(dim=1)
        found["hidden_states"][:, :experts] = 8.0 * order - 4.0 * (experts - 1)
        found["residual"][:, :experts] = 0
        found["post_attention_layernorm"][:experts] = 1
        gate *= 0.05
        gate[:, :experts] += 0.15 * torch.eye(experts, device=gate.device, dtype=gate.dtype)
    return {**cases.values(call), **found}


def _build(cls: type, args: list[Any]) -> Callable[[], Any]:
    gate, w1, w2, top_k = args[-4:]
    moe = {"gate": gate, "experts.w13": w1, "experts.w2": w2}
    mlp = {f"block_sparse_moe.{n}{'_' if '.' in n else '.'}weight": t for n, t in moe.items()}
    return cases.build_layer(
        cls,
        args,
        mlp,
        intermediate_size=w2.shape[2],
        num_local_experts=gate.shape[0],
        num_experts_per_tok=top_k,
    )


# Weights of experts that are read: few tokens do not reach all experts.
_EXPERTS_READ = "itemsize(dtype) * min(experts, attended * topk) * hidden * intermediate"

SPEC: OpSpec = OpSpec(
    name="mixtral_decoder_layer",
    level=3,
    by_default=True,
    reference=reference,
    cases=cases.layer_cases(
        {
            "hidden": 4096, "heads": 32, "kv_heads": 8, "head_size": 128, "experts": 8, "topk": 2,
            "intermediate": 14336,
        },
        {"hidden": 72, "heads": 6, "kv_heads": 2, "head_size": 12, "experts": 5, "topk": 2, "intermediate": 50},
    ),
    arguments=(
        *cases.ARGUMENTS,
        # Counted like fused_experts: the routing instead of the gate.
        Tensor("gate", "experts hidden", values=fan_in, bytes="8 * attended * topk"),
        Tensor("w1", "experts 2*intermediate hidden", values=fan_in, bytes=f"2 * {_EXPERTS_READ}"),
        Tensor("w2", "experts hidden intermediate", values=fan_in, bytes=_EXPERTS_READ),
        Scalar("top_k", "topk"),
    ),
    outputs=cases.OUTPUTS,
    axes={**cases.AXES, "experts": Axis.count(), "topk": Axis.count()},
    values=_values,
    flops=f"{cases.FLOPS} + 6 * attended * topk * hidden * intermediate",
    vary=lambda case, rng: cases.vary_layer(SPEC, case, rng, ("experts", "topk")),
    tolerance=cases.TOLERANCE,
    activations=("hidden_states", "residual"),
    tie_sensitive=True,
    build=_build,
    calls=("rms_norm", "linear", "topk_softmax", "fused_experts"),
    parts=("attention", "parallel_linear", "rotary_emb", "sparse_moe", "rope_store_kvcache"),
)  # fmt: skip
