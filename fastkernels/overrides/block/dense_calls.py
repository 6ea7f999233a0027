"""The calls of decoder layers with a gated MLP, for their SPECs; see _layer_calls.py."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import torch

from fastkernels.core.spec import Case
from fastkernels.overrides.block import gated_mlp
from fastkernels.overrides.block.layer_calls import (
    build_layer,
    layer_bytes,
    layer_dims,
    layer_flops,
    layer_inputs,
    layer_reference,
    vary_layer,
)


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
    """gate_up_proj: [2 I, H], the gate's rows first; down_proj: [H, I]; the rest as in layer_reference.

    Returns (hidden states, residual, new key_cache, new value_cache); the first two add up to the residual stream.
    """
    return layer_reference(
        lambda h: gated_mlp.reference(h, gate_up_proj, down_proj), positions, hidden_states, residual, input_layernorm,
        post_attention_layernorm, qkv_proj, o_proj, q_norm, k_norm, cos_sin_cache, eps, key_cache, value_cache,
        slot_mapping, cu_seqlens_q, seq_lens, block_table, max_seqlen_q, max_seqlen_k,
    )  # fmt: skip


def _mlp(case: Case) -> Case:
    """The gated MLP's case."""
    d = case.dims
    dims = {"tokens": sum(d["q_lens"]), "hidden": d["hidden"], "intermediate": d["intermediate"]}
    return Case(case.name, dims, case.dtype)


def inputs(case: Case, device: str, generator: torch.Generator, head_norms: bool = False) -> list:
    common = layer_inputs(case, device, generator, head_norms)
    return [*common, *gated_mlp.SPEC.inputs(_mlp(case), device, generator)[1:]]


def dims_of(*args: Any) -> dict[str, Any]:
    return {**layer_dims(args), "intermediate": args[-1].shape[1]}


def bytes_moved(case: Case) -> int:
    """With the MLP's weights; its input and output need not leave the chip."""
    weights = 3 * case.dims["hidden"] * case.dims["intermediate"] * getattr(torch, case.dtype).itemsize
    return layer_bytes(case) + weights


def flops(case: Case) -> int:
    return layer_flops(case) + gated_mlp.SPEC.flops(_mlp(case))


def vary(case: Case, rng: random.Random) -> Case:
    return vary_layer(case, rng, bytes_moved, flops)


def build(cls: type, args: list[Any]) -> Callable[[], Any]:
    gate_up, down = args[-2:]
    mlp = {"mlp.gate_up_proj.weight": gate_up, "mlp.down_proj.weight": down}
    return build_layer(cls, args, mlp, intermediate_size=down.shape[1])
