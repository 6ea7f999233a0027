"""vLLM's functions and layers for recurrences, on its pools of states by slot; slot 0 is for padding.

The states of the delta rules are [S, H, V, K], the transpose of ours.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from fastkernels.core.spec import Target
from fastkernels.overrides.kit.arguments import UnsupportedArgument
from fastkernels.overrides.recurrence.batches import batch_of, by_head, softplus_only, unset
from fastkernels.overrides.recurrence.delta_gates import delta_gates
from fastkernels.overrides.recurrence.gated_delta_rule import gated_delta_rule
from fastkernels.overrides.recurrence.kda import kda
from fastkernels.overrides.recurrence.mamba_scan import mamba_scan
from fastkernels.overrides.recurrence.pools import (
    conv_decode,
    conv_prefill,
    fill,
    one_token,
    slots_of,
    ssd_decode,
)
from fastkernels.overrides.recurrence.ssd import ssd

T = torch.Tensor
NULL_BLOCK_ID, PAD_SLOT_ID = 0, -1  # vLLM's


def vllm_causal_conv1d_fn_0_32(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    conv_states: torch.Tensor,
    query_start_loc: torch.Tensor,
    cache_indices: torch.Tensor | None = None,
    has_initial_state: torch.Tensor | None = None,
    activation: str | None = "silu",
    pad_slot_id: int = PAD_SLOT_ID,
    null_block_id: int = NULL_BLOCK_ID,
    block_idx_first_scheduled_token: torch.Tensor | None = None,
    block_idx_last_scheduled_token: torch.Tensor | None = None,
    initial_state_idx: torch.Tensor | None = None,
    num_computed_tokens: torch.Tensor | None = None,
    block_size_to_align=0,
    metadata=None,
    validate_data=False,
) -> torch.Tensor:
    """causal_conv1d_fn before 0.33; see vllm_causal_conv1d_fn. Raises UnsupportedArgument for tables of blocks."""
    unset("causal_conv1d_fn", block_idx_last_scheduled_token=block_idx_last_scheduled_token)
    return conv_prefill(
        x, weight, bias, conv_states, query_start_loc, cache_indices, has_initial_state, activation
    )


def vllm_causal_conv1d_fn(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    conv_states: torch.Tensor,
    query_start_loc: torch.Tensor,
    cache_indices: torch.Tensor | None = None,
    has_initial_state: torch.Tensor | None = None,
    activation: str | None = "silu",
    pad_slot_id: int = PAD_SLOT_ID,
    null_block_id: int = NULL_BLOCK_ID,
    metadata=None,
    validate_data=False,
) -> torch.Tensor:
    """causal_conv1d_fn: x [C, T] of packed sequences, weight [C, W]; overwrites conv_states [S, C, W - 1].

    query_start_loc [B + 1]; cache_indices, has_initial_state [B]. Returns new memory [C, T]. Raises
    UnsupportedArgument for activations other than SiLU and for the wider states of speculative decoding.
    """
    return conv_prefill(
        x, weight, bias, conv_states, query_start_loc, cache_indices, has_initial_state, activation
    )


def vllm_causal_conv1d_fn_cpu(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    conv_states: torch.Tensor,
    query_start_loc: torch.Tensor,
    cache_indices: torch.Tensor | None = None,
    has_initial_state: torch.Tensor | None = None,
    activation: str | None = "silu",
    pad_slot_id: int = PAD_SLOT_ID,
    **kwargs,
) -> torch.Tensor:
    """causal_conv1d_fn of vLLM's CPU build; see vllm_causal_conv1d_fn."""
    return conv_prefill(
        x, weight, bias, conv_states, query_start_loc, cache_indices, has_initial_state, activation
    )


def vllm_causal_conv1d_update_0_26(
    x: torch.Tensor,
    conv_state: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,
    activation: bool | str | None = None,
    conv_state_indices: torch.Tensor | None = None,
    num_accepted_tokens: torch.Tensor | None = None,
    query_start_loc: torch.Tensor | None = None,
    max_query_len: int = -1,
    null_block_id: int = NULL_BLOCK_ID,
    block_idx_last_scheduled_token: torch.Tensor | None = None,
    initial_state_idx: torch.Tensor | None = None,
    validate_data=False,
) -> torch.Tensor:
    """causal_conv1d_update of 0.26; see vllm_causal_conv1d_update."""
    unset(
        "causal_conv1d_update", num_accepted_tokens=num_accepted_tokens,
        block_idx_last_scheduled_token=block_idx_last_scheduled_token,
    )  # fmt: skip
    return conv_decode(x, conv_state, weight, bias, activation, conv_state_indices, query_start_loc)


def vllm_causal_conv1d_update_0_32(
    x: torch.Tensor,
    conv_state: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,
    activation: bool | str | None = None,
    conv_state_indices: torch.Tensor | None = None,
    num_accepted_tokens: torch.Tensor | None = None,
    query_start_loc: torch.Tensor | None = None,
    max_query_len: int = -1,
    null_block_id: int = NULL_BLOCK_ID,
    block_idx_last_scheduled_token: torch.Tensor | None = None,
    initial_state_idx: torch.Tensor | None = None,
    validate_data=False,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """causal_conv1d_update of 0.32; see vllm_causal_conv1d_update."""
    unset(
        "causal_conv1d_update", num_accepted_tokens=num_accepted_tokens,
        block_idx_last_scheduled_token=block_idx_last_scheduled_token,
    )  # fmt: skip
    return conv_decode(x, conv_state, weight, bias, activation, conv_state_indices, query_start_loc, out)


def vllm_causal_conv1d_update(
    x: torch.Tensor,
    conv_state: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,
    activation: bool | str | None = None,
    conv_state_indices: torch.Tensor | None = None,
    num_accepted_tokens: torch.Tensor | None = None,
    query_start_loc: torch.Tensor | None = None,
    max_query_len: int = -1,
    null_block_id: int = NULL_BLOCK_ID,
    validate_data=False,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """causal_conv1d_update: x [T, C], one token of each sequence or those of query_start_loc [B + 1].

    weight [C, W]; overwrites conv_state [S, C, W - 1] in the slots conv_state_indices [B]. Returns `out`, or new
    memory: x keeps its values. Raises UnsupportedArgument for activations other than SiLU and speculative decoding.
    """
    unset("causal_conv1d_update", num_accepted_tokens=num_accepted_tokens)
    return conv_decode(x, conv_state, weight, bias, activation, conv_state_indices, query_start_loc, out)


def vllm_causal_conv1d_update_cpu(
    x: torch.Tensor,
    conv_state: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,
    activation: bool | str | None = None,
    conv_state_indices: torch.Tensor | None = None,
    query_start_loc: torch.Tensor | None = None,
    pad_slot_id: int | None = None,
    **kwargs,
) -> torch.Tensor:
    """causal_conv1d_update of vLLM's CPU build; see vllm_causal_conv1d_update."""
    unset("causal_conv1d_update", num_accepted_tokens=kwargs.get("num_accepted_tokens"))
    return conv_decode(x, conv_state, weight, bias, activation, conv_state_indices, query_start_loc)


def _ssd_varlen(
    x: T, dt: T, a: T, b: T, c: T, cu_seqlens: T, out: T, skip: T | None, z: T | None, dt_bias: T | None,
    initial: T | None, softplus: bool, limit: tuple[float, float], intermediate: bool, state_dtype: Any,
) -> T:  # fmt: skip
    name = "mamba_chunk_scan_combined_varlen"
    unset(name, z=z, return_intermediate_states=intermediate)
    softplus_only(name, "dt_softplus", softplus)
    dtype = state_dtype or x.dtype
    batch = batch_of(x[None], initial, *x.shape[1:], b.shape[-1], dtype=dtype, cu_seqlens=cu_seqlens)
    high = None if limit[1] == float("inf") else limit[1]
    fill(out, ssd, x, dt, a, b, c, by_head(name, "D", skip, 1), dt_bias, *batch.tail, limit[0], high)
    return batch.state


def vllm_mamba_chunk_scan_combined_varlen_0_32(
    x,
    dt,
    A,
    B,
    C,
    chunk_size,
    cu_seqlens,
    cu_chunk_seqlens,
    last_chunk_indices,
    seq_idx,
    out,
    D=None,
    z=None,
    dt_bias=None,
    initial_states=None,
    dt_softplus=False,
    dt_limit=(0.0, float("inf")),
    return_intermediate_states=False,
    state_dtype=None,
):
    """mamba_chunk_scan_combined_varlen before 0.33; see vllm_mamba_chunk_scan_combined_varlen."""
    return _ssd_varlen(
        x, dt, A, B, C, cu_seqlens, out, D, z, dt_bias, initial_states, dt_softplus, dt_limit,
        return_intermediate_states, state_dtype,
    )  # fmt: skip


def vllm_mamba_chunk_scan_combined_varlen(
    x,
    dt,
    A,
    B,
    C,
    chunk_size,
    cu_seqlens,
    cu_chunk_seqlens,
    last_chunk_indices,
    seq_idx,
    out,
    D=None,
    z=None,
    dt_bias=None,
    initial_states=None,
    dt_softplus=False,
    dt_limit=(0.0, float("inf")),
    return_intermediate_states=False,
    state_dtype=None,
    final_states_out=None,
    final_state_indices=None,
):
    """mamba_chunk_scan_combined_varlen: x [T, H, P], dt [T, H], A, D and dt_bias [H], B and C [T, G, N].

    Fills out [T, H, P] and returns the states [N sequences, H, P, N]; with final_states_out, writes them to its slots
    final_state_indices. The borders of chunks are ignored. Raises UnsupportedArgument for z, for states inside of
    sequences, and without dt_softplus.
    """
    states = _ssd_varlen(
        x, dt, A, B, C, cu_seqlens, out, D, z, dt_bias, initial_states, dt_softplus, dt_limit,
        return_intermediate_states, state_dtype,
    )  # fmt: skip
    if final_states_out is not None:
        final_states_out.index_copy_(0, final_state_indices.long(), states.to(final_states_out.dtype))
    return states


def vllm_mamba_selective_state_update(
    state: torch.Tensor,
    x: torch.Tensor,
    dt: torch.Tensor,
    A: torch.Tensor,
    B: torch.Tensor,
    C: torch.Tensor,
    D: torch.Tensor,
    dt_bias: torch.Tensor,
    z: torch.Tensor | None = None,
    dt_softplus: bool = False,
    state_batch_indices: torch.Tensor | None = None,
    dst_state_batch_indices: torch.Tensor | None = None,
    null_block_id: int = NULL_BLOCK_ID,
    out: torch.Tensor | None = None,
    num_accepted_tokens: torch.Tensor | None = None,
    cu_seqlens: torch.Tensor | None = None,
    is_blackwell: bool = False,
) -> None:
    """selective_state_update of Mamba: one token of each sequence; fills `out`, overwrites `state` [S, D, N].

    x, dt, z [B, D]; A [D, N]; B, C [B, N]; D, dt_bias [D]; the slots state_batch_indices [B]. Raises
    UnsupportedArgument for other slots for the results, several tokens per sequence, and without dt_softplus.
    """
    unset("selective_state_update", num_accepted_tokens=num_accepted_tokens)
    same = dst_state_batch_indices is None or dst_state_batch_indices is state_batch_indices
    tail, out = one_token(state, out if same else None, state_batch_indices, x, dt_softplus)
    x = x if x.stride(-1) == 1 else x.contiguous()
    step, keys, queries, gate = (
        t if t is None or t.stride(-1) == 1 else t.contiguous() for t in (dt, B, C, z)
    )
    fill(out, mamba_scan, x, step, A, keys, queries, D, gate, dt_bias, *tail)


def vllm_selective_state_update(
    state: torch.Tensor,
    x: torch.Tensor,
    dt: torch.Tensor,
    A: torch.Tensor,
    B: torch.Tensor,
    C: torch.Tensor,
    D: torch.Tensor,
    dt_bias: torch.Tensor,
    z: torch.Tensor | None = None,
    dt_softplus: bool = False,
    state_batch_indices: torch.Tensor | None = None,
    dst_state_batch_indices: torch.Tensor | None = None,
    null_block_id: int = NULL_BLOCK_ID,
    out: torch.Tensor | None = None,
    num_accepted_tokens: torch.Tensor | None = None,
    cu_seqlens: torch.Tensor | None = None,
    is_blackwell: bool = False,
) -> None:
    """selective_state_update of Mamba 2: one token of each sequence; fills `out`, overwrites `state` [S, H, P, N].

    x [B, H, P]; B, C [B, G, N]; dt [B, H, P], A [H, P, N], D and dt_bias [H, P], expanded from heads; the slots
    state_batch_indices [B]. Raises UnsupportedArgument for z, values that are not expanded, other slots for the
    results, several tokens per sequence, and without dt_softplus.
    """
    unset("selective_state_update", num_accepted_tokens=num_accepted_tokens)
    same = dst_state_batch_indices is None or dst_state_batch_indices is state_batch_indices
    ssd_decode(state, x, dt, A, B, C, D, dt_bias, z, dt_softplus, state_batch_indices, out if same else None)


def _heads(module: Any) -> bool:
    return hasattr(module, "num_heads")


# Both mixers call one function; only that of Mamba 2 has heads.
vllm_selective_state_update.applies = _heads  # type: ignore[attr-defined]
vllm_mamba_selective_state_update.applies = lambda module: not _heads(module)  # type: ignore[attr-defined]


def vllm_selective_scan_fn(
    u,
    ssm_states,
    delta,
    A,
    B,
    C,
    D=None,
    z=None,
    delta_bias=None,
    delta_softplus=False,
    query_start_loc=None,
    cache_indices=None,
    has_initial_state=None,
    null_block_id=NULL_BLOCK_ID,
    block_size=1024,
    block_idx_first_scheduled_token=None,
    block_idx_last_scheduled_token=None,
    initial_state_idx=None,
    cu_chunk_seqlen=None,
    last_chunk_indices=None,
) -> torch.Tensor:
    """selective_scan_fn, packed: u, delta, z [D, T]; A [D, N]; B, C [N, T]; ssm_states [S, D, N] is overwritten.

    query_start_loc [B + 1]; cache_indices, has_initial_state [B]. Returns new memory [D, T]. Raises
    UnsupportedArgument for batches that are not packed, groups, tables of blocks, and without delta_softplus.
    """
    name = "selective_scan_fn"
    unset(name, block_idx_last_scheduled_token=block_idx_last_scheduled_token)
    softplus_only(name, "delta_softplus", delta_softplus)
    if query_start_loc is None or B.dim() != 2:
        raise UnsupportedArgument(f"{name}: B {tuple(B.shape)} is not [N, T] of packed sequences")
    slots = slots_of(name, cache_indices, query_start_loc.shape[0] - 1)
    fresh = torch.ones_like(slots, dtype=torch.bool) if has_initial_state is None else ~has_initial_state
    x, step, keys, queries, gate = (t if t is None else t.t().contiguous() for t in (u, delta, B, C, z))
    borders = query_start_loc.to(torch.int32)
    return mamba_scan(x, step, A, keys, queries, D, gate, delta_bias, ssm_states, borders, slots, fresh).t()


def vllm_fused_recurrent_gated_delta_rule_packed_decode(
    mixed_qkv: torch.Tensor,
    a: torch.Tensor,
    b: torch.Tensor,
    A_log: torch.Tensor,
    dt_bias: torch.Tensor,
    scale: float,
    initial_state: torch.Tensor,
    out: torch.Tensor,
    ssm_state_indices: torch.Tensor,
    use_qk_l2norm_in_kernel: bool = False,
) -> tuple[torch.Tensor, torch.Tensor]:
    """fused_recurrent_gated_delta_rule_packed_decode: one token of each sequence.

    mixed_qkv [B, 2 Hk K + H V]; a, b [B, H]; A_log, dt_bias [H]. Fills out [B, 1, H, V], overwrites initial_state
    [S, H, V, K] in the slots ssm_state_indices [B]; returns both.
    """
    slots = slots_of("packed_decode", ssm_state_indices, mixed_qkv.shape[0])
    _, heads, size, keys = initial_state.shape
    rest = (mixed_qkv.shape[1] - heads * size) // 2
    q, k, v = mixed_qkv.split([rest, rest, heads * size], 1)
    q, k, v = q.unflatten(1, (-1, keys)), k.unflatten(1, (-1, keys)), v.unflatten(1, (heads, size))
    state = initial_state.transpose(2, 3)
    tail = state, None, slots, None
    gates = A_log, dt_bias, True
    fill(out[:, 0], gated_delta_rule, q, k, v, a, b, *tail, scale, use_qk_l2norm_in_kernel, *gates)
    return out, initial_state


def vllm_fused_sigmoid_gating_delta_rule_update(
    A_log: torch.Tensor,
    a: torch.Tensor,
    b: torch.Tensor,
    dt_bias: torch.Tensor,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    beta: float = 1.0,
    threshold: float = 20.0,
    scale: float | None = None,
    initial_state: torch.Tensor | None = None,
    inplace_final_state: bool = True,
    cu_seqlens: torch.Tensor | None = None,
    ssm_state_indices: torch.Tensor | None = None,
    num_accepted_tokens: torch.Tensor | None = None,
    use_qk_l2norm_in_kernel: bool = False,
    is_kda: bool = False,
) -> tuple[torch.Tensor, torch.Tensor]:
    """fused_sigmoid_gating_delta_rule_update: q, k [1, T, Hk, K]; v [1, T, H, V]; a, b [T, H]; A_log, dt_bias [H].

    Overwrites initial_state [S, H, V, K] in the slots ssm_state_indices [B]; cu_seqlens [B + 1]. Returns the outputs
    [1, T, H, V] and initial_state. Raises UnsupportedArgument for other softplus functions than beta=1, states that
    are not in place, speculative decoding and KDA.
    """
    name = "fused_sigmoid_gating_delta_rule_update"
    unset(name, num_accepted_tokens=num_accepted_tokens, is_kda=is_kda)
    if beta != 1.0 or not inplace_final_state or cu_seqlens is None or initial_state is None:
        raise UnsupportedArgument(
            f"{name}: beta={beta}, inplace_final_state={inplace_final_state} or no cu_seqlens"
        )
    slots = slots_of(name, ssm_state_indices, cu_seqlens.shape[0] - 1)
    given = scale, initial_state, cu_seqlens, slots, use_qk_l2norm_in_kernel
    return _delta(q, k, v, a, b, *given, A_log, dt_bias, True), initial_state


def vllm_fused_recurrent_gated_delta_rule(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    g: torch.Tensor,
    beta: torch.Tensor | None = None,
    scale: float | None = None,
    initial_state: torch.Tensor | None = None,
    inplace_final_state: bool = True,
    cu_seqlens: torch.Tensor | None = None,
    ssm_state_indices: torch.Tensor | None = None,
    num_accepted_tokens: torch.Tensor | None = None,
    use_qk_l2norm_in_kernel: bool = False,
) -> tuple[torch.Tensor, torch.Tensor]:
    """fused_recurrent_gated_delta_rule: g, beta [1, T, H]; else as vllm_fused_sigmoid_gating_delta_rule_update."""
    name = "fused_recurrent_gated_delta_rule"
    unset(name, num_accepted_tokens=num_accepted_tokens)
    if beta is None or not inplace_final_state or cu_seqlens is None or initial_state is None:
        raise UnsupportedArgument(
            f"{name}: no beta, no cu_seqlens or inplace_final_state={inplace_final_state}"
        )
    slots = slots_of(name, ssm_state_indices, cu_seqlens.shape[0] - 1)
    out = _delta(q, k, v, g[0], beta[0], scale, initial_state, cu_seqlens, slots, use_qk_l2norm_in_kernel)
    return out, initial_state


def _delta(
    q: T,
    k: T,
    v: T,
    g: T,
    beta: T,
    scale: float | None,
    state: T,
    cu_seqlens: T,
    slots: T,
    normalize: bool,
    *gates: Any,
) -> T:
    tail = state.transpose(2, 3), cu_seqlens.to(torch.int32), slots, None
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    return gated_delta_rule(q[0], k[0], v[0], g, beta, *tail, scale, normalize, *gates)[None]


def vllm_chunk_gated_delta_rule(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    g: torch.Tensor,
    beta: torch.Tensor,
    scale: float | None = None,
    initial_state: torch.Tensor | None = None,
    output_final_state: bool = False,
    cu_seqlens: torch.Tensor | None = None,
    chunk_indices: torch.Tensor | None = None,
    chunk_offsets: torch.Tensor | None = None,
    use_qk_l2norm_in_kernel: bool = False,
    core_attn_out: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """chunk_gated_delta_rule: q, k [B, T, Hk, K]; v [B, T, H, V]; g, beta [B, T, H]; initial_state [N, H, V, K].

    With cu_seqlens [N + 1], B is 1 and sequences are packed. Returns the outputs, also copied to core_attn_out, and
    with output_final_state the states [N, H, V, K] in float32. Borders of chunks are ignored.
    """
    given = (q, k, v, g, beta, scale, initial_state, output_final_state, cu_seqlens, use_qk_l2norm_in_kernel)
    out, last = _chunks(gated_delta_rule, *given)
    if core_attn_out is not None:
        core_attn_out.reshape(-1)[: out.numel()].copy_(out.reshape(-1))
    return out, last


def _chunks(
    op: Any, q: T, k: T, v: T, g: T, beta: T, scale: float | None, initial: T | None, final: bool,
    cu_seqlens: T | None, normalize: bool,
) -> tuple[T, T | None]:  # fmt: skip
    """A delta rule of a batch or of packed sequences; states [N, H, V, K]."""
    heads, size = v.shape[-2:]
    first = None if initial is None else initial.transpose(2, 3)
    batch = batch_of(v, first, heads, k.shape[-1], size, cu_seqlens=cu_seqlens)
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    out = batch.unpacked(op(*batch.rows(q, k, v, g, beta), *batch.tail, scale, normalize))
    return out, batch.state.transpose(2, 3).contiguous() if final else None


def _kda_gates(g: T, beta: T, A_log: T, bias: T | None, low: float | None) -> tuple[T, T]:
    """The logarithm of the decays [B, T, H, K], and the step sizes [B, T, H], of Kimi's layers."""
    if bias is None:
        raise UnsupportedArgument("kda: g_bias=None is not supported; use the host's own function")
    dt, shape = g.flatten(0, 1), g.shape
    found, steps = delta_gates(
        dt, beta.flatten(0, 1), A_log.reshape(-1), bias.view(shape[2:]), True, low or 0.0
    )
    return found.view(shape), steps.view(shape[:3])


def vllm_chunk_kda_with_fused_gate_0_26(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    raw_g: torch.Tensor,
    beta: torch.Tensor,
    A_log: torch.Tensor,
    g_bias: torch.Tensor | None,
    scale: float | None = None,
    initial_state: torch.Tensor | None = None,
    output_final_state: bool = False,
    use_qk_l2norm_in_kernel: bool = False,
    cu_seqlens: torch.Tensor | None = None,
    **kwargs,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """chunk_kda_with_fused_gate before 0.32, whose beta has the step sizes; see vllm_chunk_kda_with_fused_gate."""
    g, _ = _kda_gates(raw_g, beta, A_log, g_bias, None)
    return _chunks(kda, q, k, v, g, beta, scale, initial_state, output_final_state, cu_seqlens,
                   use_qk_l2norm_in_kernel)  # fmt: skip


def vllm_chunk_kda_with_fused_gate(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    raw_g: torch.Tensor,
    raw_beta: torch.Tensor,
    A_log: torch.Tensor,
    g_bias: torch.Tensor | None,
    scale: float | None = None,
    initial_state: torch.Tensor | None = None,
    output_final_state: bool = False,
    lower_bound: float | None = None,
    use_qk_l2norm_in_kernel: bool = False,
    cu_seqlens: torch.Tensor | None = None,
    out: torch.Tensor | None = None,
    **kwargs,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """chunk_kda_with_fused_gate: q, k, v [1, T, H, K]; raw_g [1, T, H, K], raw_beta [1, T, H], of the projections.

    A_log [H]; g_bias [H K]; initial_state [N, H, K, K] in the order of values and keys; cu_seqlens [N + 1]. With
    lower_bound, decays are at least exp(lower_bound). Returns the outputs, also copied to `out`, and with
    output_final_state the states. Raises UnsupportedArgument without g_bias.
    """
    g, beta = _kda_gates(raw_g, raw_beta, A_log, g_bias, lower_bound)
    found, last = _chunks(kda, q, k, v, g, beta, scale, initial_state, output_final_state, cu_seqlens,
                          use_qk_l2norm_in_kernel)  # fmt: skip
    return found if out is None else out.copy_(found), last


def vllm_fused_recurrent_kda_0_26(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    g: torch.Tensor,
    beta: torch.Tensor | None = None,
    scale: float | None = None,
    initial_state: torch.Tensor | None = None,
    inplace_final_state: bool = True,
    use_qk_l2norm_in_kernel: bool = True,
    cu_seqlens: torch.Tensor | None = None,
    ssm_state_indices: torch.LongTensor | None = None,
    **kwargs,
) -> tuple[torch.Tensor, torch.Tensor]:
    """fused_recurrent_kda before 0.32: q, k, v, g [1, T, H, K], g the logarithm of the decay; beta [1, T, H].

    Overwrites initial_state [S, H, K, K] in the slots ssm_state_indices [B]; cu_seqlens [B + 1]. Returns the outputs
    and initial_state. Raises UnsupportedArgument without beta or slots, and for states that are not in place.
    """
    name = "fused_recurrent_kda"
    if beta is None or not inplace_final_state or cu_seqlens is None or initial_state is None:
        raise UnsupportedArgument(
            f"{name}: no beta, no cu_seqlens or inplace_final_state={inplace_final_state}"
        )
    slots = slots_of(name, ssm_state_indices, cu_seqlens.shape[0] - 1)
    tail = initial_state.transpose(2, 3), cu_seqlens.to(torch.int32), slots, None
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    return kda(q[0], k[0], v[0], g[0], beta[0], *tail, scale, use_qk_l2norm_in_kernel)[None], initial_state


def vllm_fused_recurrent_kda_packed_decode(
    mixed_qkv: torch.Tensor,
    raw_g: torch.Tensor,
    raw_beta: torch.Tensor,
    A_log: torch.Tensor,
    dt_bias: torch.Tensor,
    lower_bound: float | None,
    initial_state: torch.Tensor,
    state_indices: torch.Tensor,
    scale: float | None = None,
    out: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """fused_recurrent_kda_packed_decode: one token of each sequence, mixed_qkv [B, 2 H K + H V].

    raw_g [1, B, H, K], raw_beta [1, B, H]; A_log [H]; dt_bias [H K]. Overwrites initial_state [S, H, V, K] in the slots
    state_indices [B]. Returns the outputs [1, B, H, V], in `out` if given, and initial_state.
    """
    slots = slots_of("fused_recurrent_kda_packed_decode", state_indices, mixed_qkv.shape[0])
    _, heads, size, keys = initial_state.shape
    q, k, v = mixed_qkv.split([heads * keys, heads * keys, heads * size], 1)
    q, k, v = q.unflatten(1, (heads, keys)), k.unflatten(1, (heads, keys)), v.unflatten(1, (heads, size))
    tail = initial_state.transpose(2, 3), None, slots, None
    gates = A_log.reshape(-1), dt_bias.view(heads, keys), True, lower_bound or 0.0
    given = (q, k, v, raw_g[0], raw_beta[0], *tail, keys**-0.5 if scale is None else scale, True, *gates)
    if out is None:
        return kda(*given)[None], initial_state
    fill(out[0], kda, *given)
    return out, initial_state


class VllmChunkGatedDeltaRule_0_26(nn.Module):
    """ChunkGatedDeltaRule before 0.32; see vllm_chunk_gated_delta_rule."""

    def __init__(self) -> None:
        super().__init__()

    def forward(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        g: torch.Tensor,
        beta: torch.Tensor,
        initial_state: torch.Tensor,
        output_final_state: bool,
        cu_seqlens: torch.Tensor | None = None,
        chunk_indices: torch.Tensor | None = None,
        chunk_offsets: torch.Tensor | None = None,
        use_qk_l2norm_in_kernel: bool = True,
        core_attn_out: torch.Tensor | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        return vllm_chunk_gated_delta_rule(
            q, k, v, g, beta, None, initial_state, output_final_state, cu_seqlens, None, None,  # type: ignore[arg-type]
            use_qk_l2norm_in_kernel, core_attn_out,
        )  # fmt: skip


class VllmChunkGatedDeltaRule(nn.Module):
    """ChunkGatedDeltaRule from 0.32 on; see vllm_chunk_gated_delta_rule."""

    def __init__(self) -> None:
        super().__init__()

    def forward(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        g: torch.Tensor,
        beta: torch.Tensor,
        initial_state: torch.Tensor,
        output_final_state: bool,
        cu_seqlens: torch.Tensor | None = None,
        chunk_indices: torch.Tensor | None = None,
        chunk_offsets: torch.Tensor | None = None,
        use_qk_l2norm_in_kernel: bool = True,
        core_attn_out: torch.Tensor | None = None,
        aiter_prefill_metadata: object | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        return vllm_chunk_gated_delta_rule(
            q, k, v, g, beta, None, initial_state, output_final_state, cu_seqlens, None, None,  # type: ignore[arg-type]
            use_qk_l2norm_in_kernel, core_attn_out,
        )  # fmt: skip


_MAMBA = "vllm.model_executor.layers.mamba."
_FLA = "vllm.third_party.flash_linear_attention.ops."
_UNMEASURED = "on request: not measured yet against the host's kernels on a GPU"


def _called(path: str, cls: str, versions: str = "") -> Target:
    return Target("vllm", path, cls, "called_function", versions, default=False, note=_UNMEASURED)


_CONV, _CPU = f"{_MAMBA}ops.causal_conv1d:", f"{_MAMBA}ops.cpu.causal_conv1d:"
_SSD = f"{_MAMBA}ops.ssd_combined:mamba_chunk_scan_combined_varlen"
_UPDATE = f"{_MAMBA}ops.ssu_dispatch:selective_state_update"
_CHUNKS = f"{_MAMBA}gdn.qwen_gdn_linear_attn:ChunkGatedDeltaRule"
_KDA, _KDA_0_26 = "vllm.models.kimi_k3.nvidia.ops.third_party.kda.", f"{_FLA}kda:"
_PACKED = "fused_recurrent_gated_delta_rule_packed_decode"

TARGETS = {
    "causal_conv1d": (
        _called(f"{_CONV}causal_conv1d_fn", "vllm_causal_conv1d_fn_0_32", "<0.33"),
        _called(f"{_CONV}causal_conv1d_fn", "vllm_causal_conv1d_fn", ">=0.33"),
        _called(f"{_CONV}causal_conv1d_update", "vllm_causal_conv1d_update_0_26", "<0.32"),
        _called(f"{_CONV}causal_conv1d_update", "vllm_causal_conv1d_update_0_32", ">=0.32,<0.33"),
        _called(f"{_CONV}causal_conv1d_update", "vllm_causal_conv1d_update", ">=0.33"),
        _called(f"{_CPU}causal_conv1d_fn_cpu", "vllm_causal_conv1d_fn_cpu", ">=0.32"),
        _called(f"{_CPU}causal_conv1d_update_cpu", "vllm_causal_conv1d_update_cpu", ">=0.32"),
    ),
    "ssd": (
        _called(_SSD, "vllm_mamba_chunk_scan_combined_varlen_0_32", "<0.33"),
        _called(_SSD, "vllm_mamba_chunk_scan_combined_varlen", ">=0.33"),
        _called(_UPDATE, "vllm_selective_state_update"),
    ),
    "mamba_scan": (
        _called(f"{_MAMBA}ops.mamba_ssm:selective_scan_fn", "vllm_selective_scan_fn"),
        _called(_UPDATE, "vllm_mamba_selective_state_update"),
    ),
    "gated_delta_rule": (
        Target("vllm", _CHUNKS, "VllmChunkGatedDeltaRule_0_26", "leaf", "<0.32", False, _UNMEASURED),
        Target("vllm", _CHUNKS, "VllmChunkGatedDeltaRule", "leaf", ">=0.32", False, _UNMEASURED),
        _called(f"{_FLA}chunk:chunk_gated_delta_rule", "vllm_chunk_gated_delta_rule"),
        _called(f"{_FLA}fused_recurrent:{_PACKED}", f"vllm_{_PACKED}"),
        _called(
            f"{_FLA}fused_recurrent:fused_recurrent_gated_delta_rule", "vllm_fused_recurrent_gated_delta_rule"
        ),
        _called(
            f"{_FLA}fused_sigmoid_gating:fused_sigmoid_gating_delta_rule_update",
            "vllm_fused_sigmoid_gating_delta_rule_update",
        ),
    ),
    "kda": (
        _called(f"{_KDA_0_26}chunk_kda_with_fused_gate", "vllm_chunk_kda_with_fused_gate_0_26", "<0.32"),
        _called(f"{_KDA_0_26}fused_recurrent_kda", "vllm_fused_recurrent_kda_0_26", "<0.32"),
        _called(f"{_KDA}chunk:chunk_kda_with_fused_gate", "vllm_chunk_kda_with_fused_gate", ">=0.32"),
        _called(
            f"{_KDA}fused_recurrent:fused_recurrent_kda_packed_decode",
            "vllm_fused_recurrent_kda_packed_decode",
            ">=0.32",
        ),
    ),
}
