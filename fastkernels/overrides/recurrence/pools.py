"""Pools of states by slot, as vLLM and SGLang have them: packed prompts, and one token of each sequence."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from fastkernels.overrides.kit.arguments import UnsupportedArgument
from fastkernels.overrides.recurrence.batches import by_head, silu_or_none, softplus_only, unset
from fastkernels.overrides.recurrence.causal_conv1d import causal_conv1d
from fastkernels.overrides.recurrence.kernels.results import results_in
from fastkernels.overrides.recurrence.ssd import ssd

T = torch.Tensor


def slots_of(function: str, indices: T | None, count: int) -> T:
    """The slot of each of `count` sequences. Raises UnsupportedArgument for a table of several per sequence."""
    if indices is not None and indices.dim() == 2 and indices.shape[1] == 1:
        indices = indices[:, 0]
    if indices is None or indices.dim() != 1 or indices.shape[0] != count:
        shape = None if indices is None else tuple(indices.shape)
        raise UnsupportedArgument(
            f"{function}: slots {shape} for {count} sequences; use the host's own function"
        )
    return indices.to(torch.int32)


def check_width(function: str, states: T, weight: T) -> None:
    """Raise UnsupportedArgument for states of another length than W - 1."""
    if states.shape[-1] != weight.shape[1] - 1:
        raise UnsupportedArgument(
            f"{function}: states of {states.shape[-1]} inputs for a kernel of {weight.shape[1]}, as with speculative"
            " decoding, are not supported; use the host's own function"
        )


def _memory(x: T) -> int:
    return x.untyped_storage().data_ptr()


def fill(out: T, op: Callable[..., T], *args: Any) -> None:
    """Store the result of op(*args) in `out`: in place if our kernel runs, else by a copy."""
    given = [x for x in args if isinstance(x, T)]
    traced = torch.compiler.is_compiling() or type(out) is not T
    if traced or any(_memory(x) == _memory(out) for x in given):
        out.copy_(op(*args))
        return
    with results_in(out):
        result = op(*args)
    if result.data_ptr() != out.data_ptr():
        out.copy_(result)


def conv_prefill(
    x: T, weight: T, bias: T | None, conv_states: T, query_start_loc: T, cache_indices: T | None,
    has_initial_state: T | None, activation: Any,
) -> T:  # fmt: skip
    """causal_conv1d_fn of packed sequences: x and the result [C, T]; overwrites conv_states [S, C, W - 1]."""
    name = "causal_conv1d_fn"
    act = silu_or_none(name, activation)
    check_width(name, conv_states, weight)
    slots = slots_of(name, cache_indices, query_start_loc.shape[0] - 1)
    fresh = torch.ones_like(slots, dtype=torch.bool) if has_initial_state is None else ~has_initial_state
    rows = x.t().to(conv_states.dtype)
    out = causal_conv1d(rows, weight, bias, conv_states, query_start_loc.to(torch.int32), slots, fresh, act)
    return out.t().to(x.dtype)


def conv_decode(
    x: T,
    conv_state: T,
    weight: T,
    bias: T | None,
    activation: Any,
    indices: T | None,
    query_start_loc: T | None,
    out: T | None = None,
) -> T:
    """causal_conv1d_update of one token of each sequence, or of packed ones: x and the result [T, C], `out` if any."""
    name = "causal_conv1d_update"
    act = silu_or_none(name, activation)
    check_width(name, conv_state, weight)
    if x.dim() != 2:
        raise UnsupportedArgument(f"{name}: x {tuple(x.shape)} is not [T, C]; use the host's own function")
    borders = None if query_start_loc is None else query_start_loc.to(torch.int32)
    slots = slots_of(name, indices, len(x) if borders is None else len(borders) - 1)
    given = x.to(conv_state.dtype), weight, bias, conv_state, borders, slots, None, act
    if out is None:
        return causal_conv1d(*given).to(x.dtype)
    fill(out, causal_conv1d, *given)
    return out


def one_token(
    state: T, out: T | None, slots: T | None, x: T, softplus: bool
) -> tuple[tuple[T, None, T, None], T]:
    """The last tensors of an op for one token of each sequence, and `out`."""
    name = "selective_state_update"
    softplus_only(name, "dt_softplus", softplus)
    if out is None:
        raise UnsupportedArgument(f"{name}: no `out` for these slots; use the host's own function")
    return (state, None, slots_of(name, slots, x.shape[0]), None), out


def ssd_decode(
    state: T, x: T, dt: T, a: T, b: T, c: T, d: T | None, dt_bias: T | None, z: T | None, softplus: bool,
    slots: T | None, out: T | None,
) -> None:  # fmt: skip
    """Fill `out` [B, H, P] and the states [S, H, P, N]; dt, a, d and dt_bias are expanded from heads."""
    name = "selective_state_update"
    if x.dim() != 3:
        raise UnsupportedArgument(f"{name}: x {tuple(x.shape)} is not [B, H, P]; use the host's own function")
    unset(name, z=z)
    step, rate = by_head(name, "dt", dt, 2), by_head(name, "A", a, 1)
    skip, bias = by_head(name, "D", d, 1), by_head(name, "dt_bias", dt_bias, 1)
    tail, out = one_token(state, out, slots, x, softplus)
    fill(out, ssd, x, step, rate, b, c, skip, bias, *tail)
