"""SGLang's functions for the layers of Mamba 2, on its pools of states; slot 0 is a dummy, -1 is for padding."""

from __future__ import annotations

import torch

from fastkernels.core.spec import Target
from fastkernels.overrides.kit.arguments import UnsupportedArgument
from fastkernels.overrides.recurrence.batches import unset
from fastkernels.overrides.recurrence.pools import conv_decode, conv_prefill, ssd_decode

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


_UNMEASURED = "on request: not measured yet against the host's kernels on a GPU"


def _called(path: str, cls: str) -> Target:
    return Target("sglang", path, cls, "called_function", default=False, note=_UNMEASURED)


_CONV = "sglang.srt.layers.attention.mamba.causal_conv1d:"
_UPDATE = "sglang.kernels.ops.mamba.triton_ops.ssu_dispatch:selective_state_update"

TARGETS = {
    "causal_conv1d": (
        _called(f"{_CONV}causal_conv1d_fn", "sglang_causal_conv1d_fn"),
        _called(f"{_CONV}causal_conv1d_update", "sglang_causal_conv1d_update"),
    ),
    "ssd": (_called(_UPDATE, "sglang_selective_state_update"),),
}
