"""SGLang's functions for recurrent layers, on its pools of states; slot 0 is a dummy, -1 is for padding.

The states of the delta rules are [S, H, V, K], the transpose of ours. Its kernel objects of linear attention call them.
"""

from __future__ import annotations

from typing import Any

import torch

from fastkernels.core.spec import Target
from fastkernels.overrides.kit.arguments import UnsupportedArgument
from fastkernels.overrides.recurrence.batches import batch_of, by_head, softplus_only, unset
from fastkernels.overrides.recurrence.delta_gates import delta_gates
from fastkernels.overrides.recurrence.gated_delta_rule import gated_delta_rule
from fastkernels.overrides.recurrence.gated_linear_attention import gated_linear_attention
from fastkernels.overrides.recurrence.kda import kda
from fastkernels.overrides.recurrence.pools import (
    conv_decode,
    conv_prefill,
    fill,
    slots_of,
    ssd_decode,
)
from fastkernels.overrides.recurrence.ssd import ssd

T = torch.Tensor

PAD_SLOT_ID = -1  # SGLang's


def sglang_causal_conv1d_fn(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,
    query_start_loc: torch.Tensor | None = None,
    cache_indices: torch.Tensor | None = None,
    has_initial_state: torch.Tensor | None = None,
    conv_states: torch.Tensor | None = None,
    activation: str | None = "silu",
    pad_slot_id: int = PAD_SLOT_ID,
    **kwargs,
) -> torch.Tensor:
    """causal_conv1d_fn: x [C, T] of packed sequences, weight [C, W]; overwrites conv_states [S, C, W - 1].

    query_start_loc [B + 1]; cache_indices, has_initial_state [B]. Returns new memory [C, T]. Raises
    UnsupportedArgument for batches that are not packed, without states, for tables of blocks and for activations other
    than SiLU.
    """
    unset("causal_conv1d_fn", block_table=kwargs.get("block_table"))
    if x.dim() != 2 or query_start_loc is None or conv_states is None:
        raise UnsupportedArgument(
            "causal_conv1d_fn: x is not packed, or has no states; use the host's own function"
        )
    given = (query_start_loc, cache_indices, has_initial_state, activation)
    return conv_prefill(x, weight, bias, conv_states, *given)


def sglang_causal_conv1d_update(
    x: torch.Tensor,
    conv_state: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,
    activation: str | None = None,
    cache_seqlens: torch.Tensor | None = None,
    conv_state_indices: torch.Tensor | None = None,
    pad_slot_id: int = PAD_SLOT_ID,
) -> torch.Tensor:
    """causal_conv1d_update: x [B, C], one token of each sequence; weight [C, W]; overwrites conv_state [S, C, W - 1].

    The slots are conv_state_indices [B]. Returns new memory: x keeps its values. Raises UnsupportedArgument for
    circular states (cache_seqlens), several tokens per sequence and activations other than SiLU.
    """
    unset("causal_conv1d_update", cache_seqlens=cache_seqlens)
    return conv_decode(x, conv_state, weight, bias, activation, conv_state_indices, None)


def sglang_selective_state_update(
    state: torch.Tensor,
    x: torch.Tensor,
    dt: torch.Tensor,
    A: torch.Tensor,
    B: torch.Tensor,
    C: torch.Tensor,
    D: torch.Tensor | None = None,
    z: torch.Tensor | None = None,
    dt_bias: torch.Tensor | None = None,
    dt_softplus: bool = False,
    state_batch_indices: torch.Tensor | None = None,
    pad_slot_id: int = -1,
    out: torch.Tensor | None = None,
    disable_state_update: bool = False,
    intermediate_states_buffer: torch.Tensor | None = None,
    cache_steps: int | None = None,
    retrieve_parent_token: torch.Tensor | None = None,
    intermediate_state_indices: torch.Tensor | None = None,
) -> None:
    """selective_state_update: one token of each sequence; fills `out`, overwrites `state` [S, H, P, N].

    x [B, H, P]; B, C [B, G, N]; dt [B, H, P], A [H, P, N], D and dt_bias [H, P], expanded from heads; the slots
    state_batch_indices [B]. Raises UnsupportedArgument for z, values that are not expanded, steps that verify drafts,
    and without dt_softplus.
    """
    unset(
        "selective_state_update", disable_state_update=disable_state_update,
        intermediate_states_buffer=intermediate_states_buffer, retrieve_parent_token=retrieve_parent_token,
    )  # fmt: skip
    ssd_decode(state, x, dt, A, B, C, D, dt_bias, z, dt_softplus, state_batch_indices, out)


Gates = tuple[T, T, tuple[T, T, bool, float]]


def _gates(a: T, b: T, A_log: T, dt_bias: T, heads: int, low: float | None) -> Gates:
    """The inputs of the decays [T, H] or [T, H, K] and of the step sizes [T, H], and what makes gates of them."""
    bias = dt_bias.view(-1) if dt_bias.numel() == heads else dt_bias.view(heads, -1)
    return a.reshape(-1, *bias.shape), b.reshape(-1, heads), (A_log.reshape(-1), bias, True, low or 0.0)


def _gated(
    A_log: T, a: T, dt_bias: T, softplus_beta: float, q: T, k: T, v: T, b: T, state: T, indices: T,
    scale: float | None, normalize: bool, cu_seqlens: T | None, **refused: Any,
) -> T:  # fmt: skip
    name = "fused_sigmoid_gating_delta_rule_update"
    unset(name, **refused)
    if softplus_beta != 1.0 or cu_seqlens is None or state is None:
        raise UnsupportedArgument(f"{name}: softplus_beta={softplus_beta}, no cu_seqlens or no states")
    slots = slots_of(name, indices, cu_seqlens.shape[0] - 1)
    dt, steps, gates = _gates(a, b, A_log, dt_bias, v.shape[2], None)
    tail = state.transpose(2, 3), cu_seqlens.to(torch.int32), slots, None
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    return gated_delta_rule(q[0], k[0], v[0], dt, steps, *tail, scale, normalize, *gates)[None]


def sglang_fused_sigmoid_gating_delta_rule_update_0_5_16(
    A_log: torch.Tensor,
    a: torch.Tensor,
    dt_bias: torch.Tensor,
    softplus_beta: float,
    softplus_threshold: float,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    b: torch.Tensor,
    initial_state_source: torch.Tensor,
    initial_state_indices: torch.Tensor,
    scale: float | None = None,
    use_qk_l2norm_in_kernel: bool = False,
    cu_seqlens: torch.Tensor | None = None,
    is_kda: bool = False,
    disable_state_update: bool = False,
    intermediate_states_buffer: torch.Tensor | None = None,
    intermediate_state_indices: torch.Tensor | None = None,
    cache_steps: int | None = None,
    retrieve_parent_token: torch.Tensor | None = None,
) -> torch.Tensor:
    """fused_sigmoid_gating_delta_rule_update of 0.5.16; see sglang_fused_sigmoid_gating_delta_rule_update."""
    return _gated(
        A_log, a, dt_bias, softplus_beta, q, k, v, b, initial_state_source, initial_state_indices, scale,
        use_qk_l2norm_in_kernel, cu_seqlens, is_kda=is_kda, disable_state_update=disable_state_update,
        intermediate_states_buffer=intermediate_states_buffer, retrieve_parent_token=retrieve_parent_token,
    )  # fmt: skip


def sglang_fused_sigmoid_gating_delta_rule_update_0_5_17(
    A_log: torch.Tensor,
    a: torch.Tensor,
    dt_bias: torch.Tensor,
    softplus_beta: float,
    softplus_threshold: float,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    b: torch.Tensor,
    initial_state_source: torch.Tensor,
    initial_state_indices: torch.Tensor,
    scale: float | None = None,
    use_qk_l2norm_in_kernel: bool = False,
    cu_seqlens: torch.Tensor | None = None,
    is_kda: bool = False,
    lower_bound: float | None = None,
    disable_state_update: bool = False,
    intermediate_states_buffer: torch.Tensor | None = None,
    intermediate_state_indices: torch.Tensor | None = None,
    cache_steps: int | None = None,
    retrieve_parent_token: torch.Tensor | None = None,
    cache_ring: bool = False,
    replayssm_rawv: torch.Tensor | None = None,
    replayssm_rawk: torch.Tensor | None = None,
    replayssm_g: torch.Tensor | None = None,
    replayssm_beta: torch.Tensor | None = None,
) -> torch.Tensor:
    """fused_sigmoid_gating_delta_rule_update of 0.5.17; see sglang_fused_sigmoid_gating_delta_rule_update."""
    return _gated(
        A_log, a, dt_bias, softplus_beta, q, k, v, b, initial_state_source, initial_state_indices, scale,
        use_qk_l2norm_in_kernel, cu_seqlens, is_kda=is_kda, lower_bound=lower_bound,
        disable_state_update=disable_state_update, intermediate_states_buffer=intermediate_states_buffer,
        retrieve_parent_token=retrieve_parent_token, cache_ring=cache_ring,
    )  # fmt: skip


def sglang_fused_sigmoid_gating_delta_rule_update(
    A_log: torch.Tensor,
    a: torch.Tensor,
    dt_bias: torch.Tensor,
    softplus_beta: float,
    softplus_threshold: float,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    b: torch.Tensor,
    initial_state_source: torch.Tensor,
    initial_state_indices: torch.Tensor,
    scale: float | None = None,
    use_qk_l2norm_in_kernel: bool = False,
    cu_seqlens: torch.Tensor | None = None,
    is_kda: bool = False,
    lower_bound: float | None = None,
    disable_state_update: bool = False,
    intermediate_states_buffer: torch.Tensor | None = None,
    intermediate_state_indices: torch.Tensor | None = None,
    cache_steps: int | None = None,
    retrieve_parent_token: torch.Tensor | None = None,
    cache_ring: bool = False,
    replayssm_rawv: torch.Tensor | None = None,
    replayssm_rawk: torch.Tensor | None = None,
    replayssm_g: torch.Tensor | None = None,
    replayssm_beta: torch.Tensor | None = None,
    match_cutedsl_decode: bool = False,
) -> torch.Tensor:
    """fused_sigmoid_gating_delta_rule_update: q, k [1, T, Hk, K]; v [1, T, H, V]; a, b [T, H].

    A_log, dt_bias [H]. Overwrites initial_state_source [S, H, V, K] in the slots initial_state_indices [B]; cu_seqlens
    [B + 1]. Returns the outputs [1, T, H, V]. Raises UnsupportedArgument for KDA, for steps that verify drafts and for
    other softplus functions.
    """
    return _gated(
        A_log, a, dt_bias, softplus_beta, q, k, v, b, initial_state_source, initial_state_indices, scale,
        use_qk_l2norm_in_kernel, cu_seqlens, is_kda=is_kda, lower_bound=lower_bound,
        disable_state_update=disable_state_update, intermediate_states_buffer=intermediate_states_buffer,
        retrieve_parent_token=retrieve_parent_token, cache_ring=cache_ring,
        match_cutedsl_decode=match_cutedsl_decode,
    )  # fmt: skip


def _by_head(module: Any) -> bool:
    return "KDA" not in type(module).__name__


sglang_fused_sigmoid_gating_delta_rule_update.applies = _by_head  # type: ignore[attr-defined]
sglang_fused_sigmoid_gating_delta_rule_update_0_5_17.applies = _by_head  # type: ignore[attr-defined]
sglang_fused_sigmoid_gating_delta_rule_update_0_5_16.applies = _by_head  # type: ignore[attr-defined]


def _packed(
    op: Any, mixed_qkv: T, a: T, b: T, A_log: T, dt_bias: T, scale: float, state: T, out: T, indices: T,
    normalize: bool, low: float | None = None,
) -> tuple[T, T]:  # fmt: skip
    """One token of each sequence: mixed_qkv [B, 2 Hk K + H V]; fills out [B, 1, H, V]."""
    slots = slots_of("packed_decode", indices, mixed_qkv.shape[0])
    _, heads, size, keys = state.shape
    rest = (mixed_qkv.shape[1] - heads * size) // 2
    q, k, v = mixed_qkv.split([rest, rest, heads * size], 1)
    q, k, v = q.unflatten(1, (-1, keys)), k.unflatten(1, (-1, keys)), v.unflatten(1, (heads, size))
    tail = state.transpose(2, 3), None, slots, None
    dt, steps, gates = _gates(a, b, A_log, dt_bias, heads, low)
    fill(out[:, 0], op, q, k, v, dt, steps, *tail, scale, normalize, *gates)
    return out, state


def sglang_fused_recurrent_gated_delta_rule_packed_decode(
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
    """fused_recurrent_gated_delta_rule_packed_decode: mixed_qkv [B, 2 Hk K + H V]; a, b [B, H]; A_log, dt_bias [H].

    Fills out [B, 1, H, V], overwrites initial_state [S, H, V, K] in the slots ssm_state_indices [B]; returns both.
    """
    given = (
        mixed_qkv,
        a,
        b,
        A_log,
        dt_bias,
        scale,
        initial_state,
        out,
        ssm_state_indices,
        use_qk_l2norm_in_kernel,
    )
    return _packed(gated_delta_rule, *given)


def sglang_fused_recurrent_kda_packed_decode_0_5_16(
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
    """fused_recurrent_kda_packed_decode of 0.5.16; see sglang_fused_recurrent_kda_packed_decode."""
    given = (
        mixed_qkv,
        a,
        b,
        A_log,
        dt_bias,
        scale,
        initial_state,
        out,
        ssm_state_indices,
        use_qk_l2norm_in_kernel,
    )
    return _packed(kda, *given)


def sglang_fused_recurrent_kda_packed_decode(
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
    lower_bound: float | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """fused_recurrent_kda_packed_decode: a [B, H K], dt_bias [H K]; else as for the gated delta rule."""
    given = (
        mixed_qkv,
        a,
        b,
        A_log,
        dt_bias,
        scale,
        initial_state,
        out,
        ssm_state_indices,
        use_qk_l2norm_in_kernel,
    )
    return _packed(kda, *given, lower_bound)


def _chunk_kda(
    q: T, k: T, v: T, g: T, beta: T, scale: float | None, state: T | None, indices: T | None, normalize: bool,
    cu_seqlens: T | None, A_log: T | None, dt_bias: T | None, low: float | None, raw: bool = False, **refused: Any,
) -> T:  # fmt: skip
    unset("chunk_kda", **refused)
    if state is None or cu_seqlens is None:
        raise UnsupportedArgument("chunk_kda: no states or no cu_seqlens; use the host's own function")
    slots = slots_of("chunk_kda", indices, cu_seqlens.shape[0] - 1)
    decays, steps = g[0], beta[0]
    if A_log is not None:
        if dt_bias is None:
            raise UnsupportedArgument("chunk_kda: A_log without dt_bias; use the host's own function")
        dt, inputs, gates = _gates(g, beta, A_log, dt_bias, v.shape[2], low)
        decays, found = delta_gates(dt, inputs, *gates)
        steps = found if raw else steps
    elif raw:
        steps = steps.float().sigmoid()
    tail = state.transpose(2, 3), cu_seqlens.to(torch.int32), slots, None
    scale = k.shape[-1] ** -0.5 if scale is None else scale
    return kda(q[0], k[0], v[0], decays, steps, *tail, scale, normalize)[None]


def sglang_chunk_kda_0_5_17(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    g: torch.Tensor,
    beta: torch.Tensor,
    scale: float | None = None,
    initial_state: torch.Tensor | None = None,
    initial_state_indices: torch.Tensor | None = None,
    use_qk_l2norm_in_kernel: bool = False,
    cu_seqlens: torch.LongTensor | None = None,
    A_log: torch.Tensor | None = None,
    dt_bias: torch.Tensor | None = None,
    lower_bound: float | None = None,
    output_intermediate_states: bool = False,
    **kwargs,
) -> torch.Tensor:
    """chunk_kda before 0.5.23; see sglang_chunk_kda."""
    return _chunk_kda(
        q, k, v, g, beta, scale, initial_state, initial_state_indices, use_qk_l2norm_in_kernel, cu_seqlens, A_log,
        dt_bias, lower_bound, output_intermediate_states=output_intermediate_states,
    )  # fmt: skip


def sglang_chunk_kda(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    g: torch.Tensor,
    beta: torch.Tensor,
    scale: float | None = None,
    initial_state: torch.Tensor | None = None,
    initial_state_indices: torch.Tensor | None = None,
    use_qk_l2norm_in_kernel: bool = False,
    cu_seqlens: torch.LongTensor | None = None,
    A_log: torch.Tensor | None = None,
    dt_bias: torch.Tensor | None = None,
    lower_bound: float | None = None,
    output_intermediate_states: bool = False,
    track_state: torch.Tensor | None = None,
    track_chunk_idx: torch.Tensor | None = None,
    beta_is_raw: bool = False,
    chunk_indices: torch.Tensor | None = None,
    chunk_offsets: torch.Tensor | None = None,
    **kwargs,
) -> torch.Tensor:
    """chunk_kda: q, k, g [1, T, H, K]; v [1, T, H, V]; beta [1, T, H]; with A_log, g is the input of the decays.

    Overwrites initial_state [S, H, V, K] in the slots initial_state_indices [B]; cu_seqlens [B + 1]. Raises
    UnsupportedArgument for states inside of sequences.
    """
    return _chunk_kda(
        q, k, v, g, beta, scale, initial_state, initial_state_indices, use_qk_l2norm_in_kernel, cu_seqlens, A_log,
        dt_bias, lower_bound, beta_is_raw, output_intermediate_states=output_intermediate_states,
        track_state=track_state, track_chunk_idx=track_chunk_idx,
    )  # fmt: skip


CHUNK = 64  # tokens of a chunk of SGLang's delta rules


class StatesInside:
    """The states before chunks of a prompt's sequences, [1, chunks, H, V, K], computed when some are read.

    SGLang reads one of a sequence, and only of sequences whose prefix it keeps.
    """

    def __init__(self, rule: Any, tokens: tuple[T, ...], before: T, cu_seqlens: T) -> None:
        self.rule, self.tokens, self.before, self.cu_seqlens = rule, tokens, before, cu_seqlens

    def squeeze(self, dim: int) -> StatesInside:
        assert dim == 0, f"only the first dimension has size 1, got {dim}"
        return self

    def __getitem__(self, chunks: T) -> T:
        """chunks [N]: numbers over all sequences, at most one of each. Returns [N, H, V, K]."""
        starts, lengths = self.cu_seqlens[:-1], self.cu_seqlens.diff()
        counts = (lengths + CHUNK - 1) // CHUNK
        first = counts.cumsum(0) - counts
        sequence = torch.searchsorted(first + counts, chunks, right=True)
        ends = torch.zeros_like(starts)
        ends[sequence] = ((chunks - first[sequence]) * CHUNK).to(ends.dtype)
        # Each sequence in two parts, of which the second has no slot: sizes do not depend on values.
        borders = torch.cat([torch.stack([starts, starts + ends], 1).flatten(), self.cu_seqlens[-1:]])
        count = len(starts)
        slots = torch.arange(1, count + 1, device=starts.device, dtype=torch.int32)
        slots = torch.stack([slots, torch.zeros_like(slots)], 1).flatten()
        pool = torch.cat([self.before[:1], self.before])
        self.rule(*self.tokens, pool.transpose(2, 3), borders.to(torch.int32), slots, None)
        return pool[1:][sequence].to(self.tokens[1].dtype)


def _chunk_rule(
    q: T, k: T, v: T, g: T, beta: T, scale: float | None, state: T | None, indices: T | None, cu_seqlens: T | None,
    normalize: bool, **refused: Any,
) -> tuple[T, None, StatesInside]:  # fmt: skip
    name = "chunk_gated_delta_rule"
    unset(name, **refused)
    if state is None or cu_seqlens is None:
        raise UnsupportedArgument(f"{name}: no states or no cu_seqlens; use the host's own function")
    slots = slots_of(name, indices, cu_seqlens.shape[0] - 1)
    scale = k.shape[-1] ** -0.5 if scale is None else scale
    tokens = q[0], k[0], v[0], g[0].float(), beta[0]

    def rule(*tensors: T | None) -> T:
        return gated_delta_rule(*tensors, scale, normalize)

    inside = StatesInside(rule, tokens, state[slots.clamp_min(0).long()], cu_seqlens)
    out = rule(*tokens, state.transpose(2, 3), cu_seqlens.to(torch.int32), slots, None)
    return out[None], None, inside


def sglang_chunk_gated_delta_rule_0_5_17(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    g: torch.Tensor,
    beta: torch.Tensor,
    scale: float | None = None,
    initial_state: torch.Tensor | None = None,
    initial_state_indices: torch.Tensor | None = None,
    cu_seqlens: torch.LongTensor | None = None,
    head_first: bool = False,
    use_qk_l2norm_in_kernel: bool = False,
) -> tuple[torch.Tensor, None, StatesInside]:
    """chunk_gated_delta_rule before 0.5.23; see sglang_chunk_gated_delta_rule."""
    return _chunk_rule(
        q, k, v, g, beta, scale, initial_state, initial_state_indices, cu_seqlens, use_qk_l2norm_in_kernel,
        head_first=head_first,
    )  # fmt: skip


def sglang_chunk_gated_delta_rule(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    g: torch.Tensor,
    beta: torch.Tensor,
    scale: float | None = None,
    initial_state: torch.Tensor | None = None,
    initial_state_indices: torch.Tensor | None = None,
    cu_seqlens: torch.LongTensor | None = None,
    head_first: bool = False,
    use_qk_l2norm_in_kernel: bool = False,
    inplace_update: bool = True,
) -> tuple[torch.Tensor, None, StatesInside]:
    """chunk_gated_delta_rule: q, k [1, T, H, K]; v [1, T, HV, V]; g, beta [1, T, HV]; cu_seqlens [B + 1].

    Overwrites initial_state [S, HV, V, K] in the slots initial_state_indices [B]. Returns the outputs, None, and the
    states before chunks of 64 tokens, which are computed when they are read. Raises UnsupportedArgument for heads
    first, and for states that must stay.
    """
    return _chunk_rule(
        q, k, v, g, beta, scale, initial_state, initial_state_indices, cu_seqlens, use_qk_l2norm_in_kernel,
        head_first=head_first, states_that_stay=not inplace_update,
    )  # fmt: skip


def _segments(q: T, k: T, v: T, s: T, decay_scales: T, meta: Any, scale: float | None, **refused: Any) -> T:
    name = "seg_la_fwd"
    unset(name, mask=meta.mask, **refused)
    count = meta.batch_size
    slots = slots_of(name, meta.s_offsets[:count], count)
    prompts = len(q) > count  # SGLang's kernel of decodes reads neither borders nor s_scales
    borders = meta.q_offsets[: count + 1].to(torch.int32) if prompts else None
    fresh = meta.s_scales[:count] == 0 if prompts else None
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    return gated_linear_attention(q, k, v, -decay_scales.float().flatten(), s, borders, slots, fresh, scale)


def sglang_seg_la_fwd_0_5_16(
    q, k, v, s, decay_scales, meta, caches=None, cache_indices=None, softmax_scale=None, decouple=False
):
    """seg_la_fwd of 0.5.16; see sglang_seg_la_fwd. decouple: how its kernel divides the work"""
    return _segments(q, k, v, s, decay_scales, meta, softmax_scale, caches=caches)


def sglang_seg_la_fwd_0_5_17(
    q,
    k,
    v,
    s,
    decay_scales,
    meta,
    caches=None,
    cache_indices=None,
    track_lens=None,
    track_state_indices=None,
    softmax_scale=None,
    decouple=False,
):
    """seg_la_fwd of 0.5.17; see sglang_seg_la_fwd. decouple: how its kernel divides the work"""
    return _segments(q, k, v, s, decay_scales, meta, softmax_scale, caches=caches, track_lens=track_lens)


def sglang_seg_la_fwd(
    q,
    k,
    v,
    s,
    decay_scales,
    meta,
    caches=None,
    cache_indices=None,
    track_lens=None,
    track_state_indices=None,
    softmax_scale=None,
):
    """seg_la_fwd (Lightning attention): q, k, v [T, H, D]; overwrites s [S, H, D, D] in the slots meta.s_offsets [B].

    decay_scales [H, ...]: minus the logarithm of each head's decay; meta: a SegLaMeta with borders q_offsets [B + 1]
    and s_scales [B], 0 for sequences that begin. Raises UnsupportedArgument for masks and states of drafts, and for
    states inside of sequences.
    """
    return _segments(q, k, v, s, decay_scales, meta, softmax_scale, caches=caches, track_lens=track_lens)


def _ssd_prefill(
    x: T, dt: T, A: T, B: T, C: T, D: T | None, z: T | None, dt_bias: T | None, initial: T | None,
    cu_seqlens: T | None, softplus: bool, limit: tuple[float, float], out: T | None, dtype: Any, **refused: Any,
) -> T:  # fmt: skip
    """Fill `out` and return the states [N, H, P, N] of packed sequences."""
    name = "mamba_chunk_scan_combined"
    unset(name, z=z, **refused)
    softplus_only(name, "dt_softplus", softplus)
    if cu_seqlens is None or out is None:
        raise UnsupportedArgument(f"{name}: no cu_seqlens or no `out`; use the host's own function")
    sizes = (*x.shape[2:], B.shape[-1])
    batch = batch_of(x, initial, *sizes, dtype=dtype or x.dtype, cu_seqlens=cu_seqlens)
    high = None if limit[1] == float("inf") else limit[1]
    rows = (x[0], dt[0], A, B[0], C[0], by_head(name, "D", D, 1), dt_bias)
    fill(out[0], ssd, *rows, *batch.tail, limit[0], high)
    return batch.state


def sglang_mamba_chunk_scan_combined_0_5_17(
    x,
    dt,
    A,
    B,
    C,
    chunk_size,
    D=None,
    z=None,
    dt_bias=None,
    initial_states=None,
    seq_idx=None,
    chunk_indices=None,
    chunk_offsets=None,
    cu_seqlens=None,
    dt_softplus=False,
    dt_limit=(0.0, float("inf")),
    out=None,
    return_final_states=False,
    return_varlen_states=False,
    return_intermediate_states=False,
    state_dtype=None,
):
    """mamba_chunk_scan_combined before 0.5.23; see sglang_mamba_chunk_scan_combined."""
    state = _ssd_prefill(
        x, dt, A, B, C, D, z, dt_bias, initial_states, cu_seqlens, dt_softplus, dt_limit, out, state_dtype,
        return_final_states=return_final_states, return_intermediate_states=return_intermediate_states,
    )  # fmt: skip
    return state if return_varlen_states else None


def sglang_mamba_chunk_scan_combined(
    x,
    dt,
    A,
    B,
    C,
    chunk_size,
    D=None,
    z=None,
    dt_bias=None,
    initial_states=None,
    seq_idx=None,
    chunk_indices=None,
    chunk_offsets=None,
    cu_seqlens=None,
    dt_softplus=False,
    dt_limit=(0.0, float("inf")),
    out=None,
    return_final_states=False,
    return_varlen_states=False,
    return_intermediate_states=False,
    state_dtype=None,
    return_track_states=False,
    track_seq_idx=None,
    track_end_locs=None,
):
    """mamba_chunk_scan_combined, packed: x [1, T, H, P], dt [1, T, H], A, D and dt_bias [H], B and C [1, T, G, N].

    Fills `out`; with return_varlen_states returns the states [N sequences, H, P, N]. Borders of chunks are ignored.
    Raises UnsupportedArgument for z, for states inside of sequences, and without dt_softplus.
    """
    state = _ssd_prefill(
        x, dt, A, B, C, D, z, dt_bias, initial_states, cu_seqlens, dt_softplus, dt_limit, out, state_dtype,
        return_final_states=return_final_states, return_intermediate_states=return_intermediate_states,
        track_seq_idx=track_seq_idx,
    )  # fmt: skip
    found = state if return_varlen_states else None
    return (None, found, None) if return_track_states else found


_UNMEASURED = "on request: not measured yet against the host's kernels on a GPU"


def _called(path: str, cls: str, versions: str = "") -> Target:
    return Target("sglang", path, cls, "called_function", versions, default=False, note=_UNMEASURED)


_CONV = "sglang.srt.layers.attention.mamba.causal_conv1d:"
_UPDATE = "sglang.kernels.ops.mamba.triton_ops.ssu_dispatch:selective_state_update"

_OPS = "sglang.kernels.ops.attention."
_SCAN = "sglang.kernels.ops.mamba.triton_ops.ssd_combined:mamba_chunk_scan_combined"
_RECURRENT, _GATED = f"{_OPS}fla.fused_recurrent:", "fused_sigmoid_gating_delta_rule_update"
_OLD_GATED = f"{_OPS}fla.fused_sigmoid_gating_recurrent:{_GATED}"
_NEW_GATED = f"{_OPS}linear.fused_sigmoid_gating_recurrent:{_GATED}"


_CHUNKS = f"{_OPS}fla.chunk:chunk_gated_delta_rule"
_SEGMENTS = f"{_OPS}linear.seg_la:seg_la_fwd"


def _gated_targets(function: str) -> tuple[Target, ...]:
    return (
        _called(_OLD_GATED, f"{function}_0_5_16", "<0.5.17"),
        _called(_OLD_GATED, f"{function}_0_5_17", ">=0.5.17,<0.5.23"),
        _called(_NEW_GATED, function, ">=0.5.23"),
    )


TARGETS = {
    "causal_conv1d": (
        _called(f"{_CONV}causal_conv1d_fn", "sglang_causal_conv1d_fn"),
        _called(f"{_CONV}causal_conv1d_update", "sglang_causal_conv1d_update"),
    ),
    "ssd": (
        _called(_UPDATE, "sglang_selective_state_update"),
        _called(_SCAN, "sglang_mamba_chunk_scan_combined_0_5_17", "<0.5.23"),
        _called(_SCAN, "sglang_mamba_chunk_scan_combined", ">=0.5.23"),
    ),
    "gated_delta_rule": (
        _called(
            f"{_RECURRENT}fused_recurrent_gated_delta_rule_packed_decode",
            "sglang_fused_recurrent_gated_delta_rule_packed_decode",
        ),
        *_gated_targets("sglang_fused_sigmoid_gating_delta_rule_update"),
        _called(_CHUNKS, "sglang_chunk_gated_delta_rule_0_5_17", "<0.5.23"),
        _called(_CHUNKS, "sglang_chunk_gated_delta_rule", ">=0.5.23"),
    ),
    "gated_linear_attention": (
        _called(_SEGMENTS, "sglang_seg_la_fwd_0_5_16", "<0.5.17"),
        _called(_SEGMENTS, "sglang_seg_la_fwd_0_5_17", ">=0.5.17,<0.5.23"),
        _called(_SEGMENTS, "sglang_seg_la_fwd", ">=0.5.23"),
    ),
    "kda": (
        _called(f"{_OPS}fla.kda:chunk_kda", "sglang_chunk_kda_0_5_17", "<0.5.23"),
        _called(f"{_OPS}fla.kda:chunk_kda", "sglang_chunk_kda", ">=0.5.23"),
        _called(
            f"{_RECURRENT}fused_recurrent_kda_packed_decode",
            "sglang_fused_recurrent_kda_packed_decode_0_5_16",
            "<0.5.17",
        ),
        _called(
            f"{_RECURRENT}fused_recurrent_kda_packed_decode",
            "sglang_fused_recurrent_kda_packed_decode",
            ">=0.5.17",
        ),
    ),
}
