"""One layer of a Llama model: norm, attention, norm and gated MLP, with a separate residual."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from fastkernels.core.spec import OpSpec, Tensor, fan_in
from fastkernels.overrides.block import cases, gated_mlp
from fastkernels.overrides.block.cases import layer_reference


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
    gate_up_proj: torch.Tensor,
    down_proj: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """gate_up_proj: [2 I, H], gate rows first; down_proj: [H, I]; layer_reference documents the other arguments.

    Returns (hidden states, residual, new key_cache, new value_cache); the first two add up to the residual stream.
    """
    return layer_reference(
        lambda h: gated_mlp.reference(h, gate_up_proj, down_proj), positions, hidden_states, residual, input_layernorm,
        post_attention_layernorm, qkv_proj, o_proj, q_norm, k_norm, cos_sin_cache, eps, key_cache, value_cache,
        slot_mapping, cu_seqlens_q, seq_lens, block_table, max_seqlen_q, max_seqlen_k,
    )  # fmt: skip


def build(cls: type, args: list[Any]) -> Callable[[], Any]:
    """OpSpec.build of layers with a gated MLP."""
    gate_up, down = args[-2:]
    mlp = {"mlp.gate_up_proj.weight": gate_up, "mlp.down_proj.weight": down}
    return cases.build_layer(cls, args, mlp, intermediate_size=down.shape[1])


ARGUMENTS = (
    *cases.ARGUMENTS,
    Tensor("gate_up_proj", "2*intermediate hidden", values=fan_in),
    Tensor("down_proj", "hidden intermediate", values=fan_in),
)
FLOPS = f"{cases.FLOPS} + 6 * attended * hidden * intermediate"

SPEC: OpSpec = OpSpec(
    name="llama_decoder_layer",
    level=3,
    by_default=True,
    reference=reference,
    cases=cases.layer_cases(
        {"hidden": 4096, "heads": 32, "kv_heads": 8, "head_size": 128, "intermediate": 14336},
        {"hidden": 72, "heads": 6, "kv_heads": 2, "head_size": 12, "intermediate": 100},
    ),
    arguments=ARGUMENTS,
    outputs=cases.OUTPUTS,
    axes=cases.AXES,
    values=cases.values,
    flops=FLOPS,
    vary=lambda case, rng: cases.vary_layer(SPEC, case, rng),
    tolerance=cases.TOLERANCE,
    activations=("hidden_states", "residual"),
    build=build,
    calls=("rms_norm",),
    parts=("attention", "gated_mlp", "parallel_linear", "rotary_emb", "rope_store_kvcache"),
)
