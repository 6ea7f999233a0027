"""transformers' functions for recurrent layers: each model file has its own, most with the same code."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from fastkernels.core.spec import Target
from fastkernels.overrides.recurrence.batches import batch_of, by_head, silu_or_none, softplus_only, unset
from fastkernels.overrides.recurrence.causal_conv1d import causal_conv1d
from fastkernels.overrides.recurrence.gated_delta_rule import gated_delta_rule
from fastkernels.overrides.recurrence.kda import kda
from fastkernels.overrides.recurrence.mamba_scan import mamba_scan
from fastkernels.overrides.recurrence.ssd import ssd


def transformers_causal_conv1d_fn(
    hidden_states: torch.Tensor,
    weight: nn.Parameter,
    bias: nn.Parameter | None = None,
    activation: str | None = None,
    **kwargs,
) -> torch.Tensor:
    """causal_conv1d_fn: hidden_states [B, C, T], weight [C, W], bias [C]; from zeros, to the same shape.

    Raises UnsupportedArgument for packed sequences and activations other than SiLU.
    """
    unset("causal_conv1d_fn", seq_idx=kwargs.get("seq_idx"), cu_seqlens=kwargs.get("cu_seqlens"))
    act = silu_or_none("causal_conv1d_fn", activation)
    x = hidden_states.transpose(1, 2)
    batch = batch_of(x, None, *weight.shape[:1], weight.shape[1] - 1, dtype=x.dtype)
    out = causal_conv1d(*batch.rows(x), weight, bias, *batch.tail, act)
    return batch.unpacked(out).transpose(1, 2)


def transformers_causal_conv1d_update(
    hidden_states: torch.Tensor,
    conv_state: torch.Tensor,
    weight: nn.Parameter,
    bias: nn.Parameter | None = None,
    activation: str | None = None,
) -> torch.Tensor:
    """causal_conv1d_update: hidden_states [B, C, T], after the inputs conv_state [B, C, L], which it overwrites.

    Raises UnsupportedArgument for activations other than SiLU.
    """
    act = silu_or_none("causal_conv1d_update", activation)
    x, width = hidden_states.transpose(1, 2), weight.shape[1]
    kept = conv_state.shape[-1]
    batch = batch_of(
        x, conv_state[..., kept - width + 1 :], weight.shape[0], width - 1, dtype=conv_state.dtype
    )
    out = causal_conv1d(*batch.rows(x), weight, bias, *batch.tail, act)
    if kept == width - 1:
        conv_state.copy_(batch.state)
    else:
        conv_state.copy_(torch.cat([conv_state, hidden_states.to(conv_state.dtype)], -1)[..., -kept:])
    return batch.unpacked(out).transpose(1, 2)


def transformers_mamba2_chunk_scan(
    hidden_states: torch.Tensor,
    dt: torch.Tensor,
    A: torch.Tensor,
    B: torch.Tensor,
    C: torch.Tensor,
    chunk_size: int,
    D: torch.Tensor | None = None,
    dt_bias: torch.Tensor | None = None,
    initial_states: torch.Tensor | None = None,
    dt_softplus: bool = False,
    dt_limit: tuple[float, float] = (0.0, float("inf")),
    return_final_states: bool = False,
    **kwargs,
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """mamba2_chunk_scan: hidden_states [B, T, H, P]; dt [B, T, H]; A, D, dt_bias [H]; B, C [B, T, G, N].

    Returns float32 outputs of the shape of hidden_states, with return_final_states also the states [B, H, P, N].
    chunk_size is ignored. Raises UnsupportedArgument for packed sequences, and without dt_softplus.
    """
    unset("mamba2_chunk_scan", seq_idx=kwargs.get("seq_idx"), cu_seqlens=kwargs.get("cu_seqlens"))
    softplus_only("mamba2_chunk_scan", "dt_softplus", dt_softplus)
    _, _, heads, size = hidden_states.shape
    batch = batch_of(hidden_states, initial_states, heads, size, B.shape[-1])
    x, dt, b, c = batch.rows(hidden_states.float(), dt, B, C)
    low, high = dt_limit
    out = ssd(x, dt, A, b, c, D, dt_bias, *batch.tail, low, None if high == float("inf") else high)
    out = batch.unpacked(out)
    return (out, batch.state) if return_final_states else out


def transformers_mamba2_selective_state_update(
    state: torch.Tensor,
    hidden_states: torch.Tensor,
    dt: torch.Tensor,
    A: torch.Tensor,
    B: torch.Tensor,
    C: torch.Tensor,
    D: torch.Tensor | None = None,
    dt_bias: torch.Tensor | None = None,
    dt_softplus: bool = False,
    z: torch.Tensor | None = None,
    **kwargs,
) -> torch.Tensor:
    """mamba2_selective_state_update: one token of each sequence; overwrites state [B, H, P, N].

    hidden_states [B, H, P]; dt [B, H, P], A [H, P, N], D and dt_bias [H, P], expanded from heads; B, C [B, G, N].
    Raises UnsupportedArgument for z, values that are not expanded, and without dt_softplus.
    """
    name = "mamba2_selective_state_update"
    unset(name, z=z)
    softplus_only(name, "dt_softplus", dt_softplus)
    step, rate = by_head(name, "dt", dt, 2), by_head(name, "A", A, 1)
    skip, bias = by_head(name, "D", D, 1), by_head(name, "dt_bias", dt_bias, 1)
    batch = batch_of(hidden_states[:, None], state, *state.shape[1:], dtype=state.dtype)
    out = ssd(hidden_states, step, rate, B, C, skip, bias, *batch.tail)
    state.copy_(batch.state)
    return out


def transformers_mamba_selective_scan(
    hidden_states: torch.Tensor,
    dt: torch.Tensor,
    A: torch.Tensor,
    B: torch.Tensor,
    C: torch.Tensor,
    D: torch.Tensor | None = None,
    z: torch.Tensor | None = None,
    delta_bias: torch.Tensor | None = None,
    delta_softplus: bool = False,
    return_last_state: bool = False,
    use_mambapy: bool = False,
    use_associative_scan: bool = False,
    **kwargs,
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """mamba_selective_scan, from zeros: hidden_states, dt, z [B, D, T]; A [D, N]; B, C [B, N, T]; D, delta_bias [D].

    Returns the outputs [B, D, T], with return_last_state also the states [B, D, N] in float32. The switches for
    other algorithms are ignored. Raises UnsupportedArgument for packed sequences, and without delta_softplus.
    """
    unset("mamba_selective_scan", seq_idx=kwargs.get("seq_idx"), cu_seqlens=kwargs.get("cu_seqlens"))
    softplus_only("mamba_selective_scan", "delta_softplus", delta_softplus)
    x, step, b, c = (t.transpose(1, 2) for t in (hidden_states, dt, B, C))
    batch = batch_of(x, None, *A.shape)
    x, step, b, c = batch.rows(x, step, b, c)
    gate = None if z is None else batch.rows(z.transpose(1, 2))[0]
    out = batch.unpacked(mamba_scan(x, step, A, b, c, D, gate, delta_bias, *batch.tail)).transpose(1, 2)
    return (out, batch.state) if return_last_state else out


def transformers_mamba_selective_state_update(
    state: torch.Tensor,
    hidden_states: torch.Tensor,
    dt: torch.Tensor,
    A: torch.Tensor,
    B: torch.Tensor,
    C: torch.Tensor,
    D: torch.Tensor | None = None,
    dt_bias: torch.Tensor | None = None,
    dt_softplus: bool = False,
    z: torch.Tensor | None = None,
    **kwargs,
) -> torch.Tensor:
    """mamba_selective_state_update: one token of each sequence; overwrites state [B, D, N].

    hidden_states, dt, z [B, D]; A [D, N]; B, C [B, N]; D, dt_bias [D]. Raises UnsupportedArgument without dt_softplus.
    """
    softplus_only("mamba_selective_state_update", "dt_softplus", dt_softplus)
    batch = batch_of(hidden_states[:, None], state, *state.shape[1:], dtype=state.dtype)
    x, step, b, c = (t.contiguous() for t in (hidden_states, dt, B, C))
    out = mamba_scan(x, step, A, b, c, D, None if z is None else z.contiguous(), dt_bias, *batch.tail)
    state.copy_(batch.state)
    return out


def transformers_chunk_gated_delta_rule(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    g: torch.Tensor,
    beta: torch.Tensor,
    chunk_size: int = 64,
    initial_state: torch.Tensor | None = None,
    output_final_state: bool = False,
    use_qk_l2norm_in_kernel: bool = False,
    **kwargs,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """torch_chunk_gated_delta_rule: query, key [B, T, Hk, K]; value [B, T, H, V]; g, beta [B, T, H].

    Returns the outputs [B, T, H, V] and, with output_final_state, the states [B, H, K, V] in float32. chunk_size is
    ignored. Raises UnsupportedArgument for packed sequences.
    """
    return _delta("chunk_gated_delta_rule", gated_delta_rule, query, key, value, g, beta, initial_state,
                  output_final_state, use_qk_l2norm_in_kernel, kwargs)  # fmt: skip


def transformers_recurrent_gated_delta_rule(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    g: torch.Tensor,
    beta: torch.Tensor,
    initial_state: torch.Tensor | None = None,
    output_final_state: bool = False,
    use_qk_l2norm_in_kernel: bool = False,
    **kwargs,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """torch_recurrent_gated_delta_rule; see transformers_chunk_gated_delta_rule. The states are float32."""
    return _delta("recurrent_gated_delta_rule", gated_delta_rule, query, key, value, g, beta, initial_state,
                  output_final_state, use_qk_l2norm_in_kernel, kwargs)  # fmt: skip


def transformers_chunk_kimi_delta_attention(
    query,
    key,
    value,
    g,
    beta,
    chunk_size=64,
    initial_state=None,
    output_final_state=False,
    use_qk_l2norm_in_kernel=False,
    **kwargs,
):
    """chunk_kimi_delta_attention: g [B, T, H, K]; else as transformers_chunk_gated_delta_rule."""
    return _delta("chunk_kimi_delta_attention", kda, query, key, value, g, beta, initial_state, output_final_state,
                  use_qk_l2norm_in_kernel, kwargs)  # fmt: skip


def transformers_recurrent_kimi_delta_attention(
    query,
    key,
    value,
    g,
    beta,
    initial_state,
    output_final_state,
    use_qk_l2norm_in_kernel=False,
    **kwargs,
):
    """recurrent_kimi_delta_attention: g [B, T, H, K]; else as transformers_recurrent_gated_delta_rule."""
    return _delta("recurrent_kimi_delta_attention", kda, query, key, value, g, beta, initial_state, output_final_state,
                  use_qk_l2norm_in_kernel, kwargs)  # fmt: skip


def _delta(
    name: str, op: Any, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, g: torch.Tensor,
    beta: torch.Tensor, initial_state: torch.Tensor | None, output_final_state: bool, normalize: bool,
    others: dict[str, Any],
) -> tuple[torch.Tensor, torch.Tensor | None]:  # fmt: skip
    unset(name, cu_seqlens=others.get("cu_seqlens"), seq_idx=others.get("seq_idx"))
    heads, size = value.shape[-2:]
    batch = batch_of(value, initial_state, heads, key.shape[-1], size)
    scale = query.shape[-1] ** -0.5
    out = op(*batch.rows(query, key, value, g, beta), *batch.tail, scale, normalize)
    return batch.unpacked(out).to(query.dtype), batch.state if output_final_state else None


_UNMEASURED = "on request: not measured yet against the packages that transformers runs on a GPU"


def _target(model: str, function: str, cls: str = "") -> Target:
    path = f"transformers.models.{model}.modeling_{model}:{function}"
    cls = cls or f"transformers_{function.removeprefix('torch_')}"
    return Target("transformers", path, cls, "called_function", default=False, note=_UNMEASURED)


TARGETS = {
    "causal_conv1d": (
        _target("mamba2", "causal_conv1d_fn"),
        _target("mamba2", "causal_conv1d_update"),
    ),
    "ssd": (
        _target("mamba2", "mamba2_chunk_scan"),
        _target("mamba2", "mamba2_selective_state_update"),
    ),
    "mamba_scan": (
        _target("mamba", "mamba_selective_scan"),
        _target("mamba", "mamba_selective_state_update"),
    ),
    "gated_delta_rule": (
        _target("qwen3_next", "torch_chunk_gated_delta_rule"),
        _target("qwen3_next", "torch_recurrent_gated_delta_rule"),
    ),
    "kda": (
        _target("kimi_linear", "chunk_kimi_delta_attention"),
        _target("kimi_linear", "recurrent_kimi_delta_attention"),
    ),
}
