"""One layer of a Mixtral model: norm, attention, norm and sparse experts, with a separate residual."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from fastkernels.core.spec import Case, OpSpec
from fastkernels.overrides.block.cases import (
    MUTATES,
    TOLERANCE,
    build_layer,
    layer_bytes,
    layer_cases,
    layer_dims,
    layer_flops,
    layer_inputs,
    layer_reference,
    vary_layer,
)
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
    """gate, w1, w2, top_k as in sparse_moe; the rest as in layer_reference, q_norm and k_norm None.

    Returns (hidden states, residual, new key_cache, new value_cache); the first two add up to the residual stream.
    """
    return layer_reference(
        lambda h: sparse_moe.reference(h, gate, w1, w2, top_k), positions, hidden_states, residual, input_layernorm,
        post_attention_layernorm, qkv_proj, o_proj, q_norm, k_norm, cos_sin_cache, eps, key_cache, value_cache,
        slot_mapping, cu_seqlens_q, seq_lens, block_table, max_seqlen_q, max_seqlen_k,
    )  # fmt: skip


_MLP = ("experts", "topk", "hidden", "intermediate", "experts_hit", "pairs")


def _mlp(case: Case) -> Case:
    """The sparse block's case."""
    dims = {"tokens": sum(case.dims["q_lens"]), **{n: case.dims[n] for n in _MLP if n in case.dims}}
    return Case(case.name, dims, case.dtype)


def _inputs(case: Case, device: str, generator: torch.Generator) -> list:
    common = layer_inputs(case, device, generator)
    gate, *rest = sparse_moe.SPEC.inputs(_mlp(case), device, generator)[1:]
    _decide(common, gate, generator)
    return [*common, gate, *rest]


def _decide(common: list[Any], gate: torch.Tensor, generator: torch.Generator) -> None:
    """Give each token channels that say which experts it wants, so clearly that no rounding on the way decides.

    As many channels as there are experts, of sizes 8 apart in an order drawn for each token; the gate reads these, and
    a twentieth of what it did before. Attention adds about 1 to each.
    """
    hidden_states, residual, norm = common[1], common[2], common[4]
    experts = gate.shape[0]
    if experts > gate.shape[1]:
        return
    drawn = torch.rand(hidden_states.shape[0], experts, generator=generator, device=gate.device)
    hidden_states[:, :experts] = 8.0 * drawn.argsort(dim=1) - 4.0 * (experts - 1)
    residual[:, :experts] = 0
    norm[:experts] = 1
    gate *= 0.05
    gate[:, :experts] += 0.15 * torch.eye(experts, device=gate.device, dtype=gate.dtype)


def _dims(*args: Any) -> dict[str, Any]:
    gate, _, w2, top_k = args[-4:]
    return {**layer_dims(args), "experts": gate.shape[0], "topk": top_k, "intermediate": w2.shape[2]}


def _bytes(case: Case) -> int:
    """With what the block moves but its input and output, which need not leave the chip."""
    d, size = case.dims, getattr(torch, case.dtype).itemsize
    inside = 2 * size * sum(d["q_lens"]) * d["hidden"]
    return layer_bytes(case) + sparse_moe.SPEC.bytes_moved(_mlp(case)) - inside


def _flops(case: Case) -> int:
    return layer_flops(case) + sparse_moe.SPEC.flops(_mlp(case))


def _build(cls: type, args: list[Any]) -> Callable[[], Any]:
    gate, w1, w2, top_k = args[-4:]
    moe = {"gate": gate, "experts.w13": w1, "experts.w2": w2}
    mlp = {f"block_sparse_moe.{n}{'_' if '.' in n else '.'}weight": t for n, t in moe.items()}
    return build_layer(
        cls,
        args,
        mlp,
        intermediate_size=w2.shape[2],
        num_local_experts=gate.shape[0],
        num_experts_per_tok=top_k,
    )


SPEC = OpSpec(
    name="mixtral_decoder_layer",
    level=3,
    reference=reference,
    cases=layer_cases(
        {
            "hidden": 4096,
            "heads": 32,
            "kv_heads": 8,
            "head_size": 128,
            "experts": 8,
            "topk": 2,
            "intermediate": 14336,
        },
        {
            "hidden": 72,
            "heads": 6,
            "kv_heads": 2,
            "head_size": 12,
            "experts": 5,
            "topk": 2,
            "intermediate": 50,
        },
    ),
    inputs=_inputs,
    bytes_moved=_bytes,
    flops=_flops,
    tolerance=TOLERANCE,
    dims_of=_dims,
    vary=lambda case, rng: vary_layer(case, rng, _bytes, _flops, ("experts", "topk")),
    activations=(1, 2),
    tie_sensitive=True,
    build=_build,
    mutates=MUTATES,
    calls=("rms_norm", "linear", "topk_softmax", "fused_experts"),
    parts=("attention", "parallel_linear", "rotary_emb", "sparse_moe", "rope_store_kvcache"),
)
