"""Packed sequences and their slots of state, step by step: what the references of this family share.

Tokens of all sequences are packed: sequence i has the rows cu_seqlens[i] to cu_seqlens[i + 1]. Its state is row
slots[i] of `state`; it begins at zero where fresh[i] is set. Slots 0 and below are for padding: such a sequence begins
at zero and writes no state. Rows past the last sequence have unspecified outputs.

A decode has one token of each sequence: cu_seqlens is None. If no sequence begins, fresh is None.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

T = torch.Tensor


def wide(*tensors: T | None) -> torch.dtype:
    """The dtype that a reference computes in: float32, or float64 if the first tensor has it."""
    return torch.promote_types(tensors[0].dtype, torch.float32) if tensors[0] is not None else torch.float32


def rows_of(cu_seqlens: T | None, slots: T) -> tuple[T, T]:
    """Row of each step and sequence [L, B], and whether the sequence has that step [L, B]."""
    if cu_seqlens is None:
        rows = torch.arange(len(slots), device=slots.device)[None]
        return rows, torch.ones_like(rows, dtype=torch.bool)
    lens = cu_seqlens.diff()
    longest = int(lens.max()) if len(lens) else 0
    step = torch.arange(longest, device=cu_seqlens.device)[:, None]
    real = step < lens
    return torch.where(real, cu_seqlens[:-1] + step, 0).long(), real


def begin(state: T, slots: T, fresh: T | None, dtype: torch.dtype) -> T:
    """The states [B, ...] at which the sequences begin."""
    found = state[slots.clamp(min=0).long()].to(dtype)
    zero = slots <= 0 if fresh is None else fresh | (slots <= 0)
    zero = zero.view(-1, *[1] * (state.dim() - 1))
    return torch.where(zero, torch.zeros_like(found), found)


def written(state: T, slots: T, last: T) -> T:
    """The new value of `state` after its sequences ended with the states `last` [B, ...]."""
    new, kept = state.clone(), slots > 0
    new[slots[kept].long()] = last[kept].to(state.dtype)
    return new


def store(state: T, slots: T, new: T) -> None:
    """Copy the rows of sequences with a slot from `new`, the state after a call: no other row is written."""
    kept = slots[slots > 0].long()
    state.index_copy_(0, kept, new[kept])


def scan(step: Callable[[T, T], tuple[T, T]], state: T, cu_seqlens: T | None, out: T) -> T:
    """Fill `out` and return the last states: step(states, rows) -> (new states, outputs), both [B, ...]."""
    for rows, real in zip(*rows_of(cu_seqlens, state), strict=True):
        new, found = step(state, rows)
        state = torch.where(real.view(-1, *[1] * (state.dim() - 1)), new, state)
        out[rows[real]] = found[real]
    return state


def check_slots(op: str, tokens: T, state: T, cu_seqlens: T | None, slots: T, fresh: T | None) -> None:
    """Raise ValueError if the arguments that every op of the family has contradict each other."""
    batch = slots.shape[0] if slots.dim() == 1 else -1
    if cu_seqlens is None and batch != tokens.shape[0]:
        raise ValueError(
            f"{op}: cu_seqlens=None is one token of each sequence, got {tokens.shape[0]} tokens and slots"
            f" {tuple(slots.shape)}"
        )
    borders = None if cu_seqlens is None else tuple(cu_seqlens.shape)
    flags = None if fresh is None else tuple(fresh.shape)
    if batch < 0 or borders not in (None, (batch + 1,)) or flags not in (None, (batch,)):
        raise ValueError(
            f"{op}: cu_seqlens {borders}, slots {tuple(slots.shape)} and fresh {flags} must be [B + 1], [B] and [B]"
        )
    for name, given, want in (
        ("cu_seqlens", cu_seqlens, torch.int32),
        ("slots", slots, torch.int32),
        ("fresh", fresh, torch.bool),
    ):
        if given is not None and given.dtype != want:
            raise ValueError(f"{op}: {name} is {given.dtype}, must be {want}")


def check_shapes(op: str, **expected: tuple[T | None, tuple[int, ...], str]) -> None:
    """Raise ValueError for a tensor of another shape: name=(tensor, its shape, the shape in words)."""
    for name, (given, shape, words) in expected.items():
        if given is not None and tuple(given.shape) != shape:
            raise ValueError(f"{op}: {name} {tuple(given.shape)} must be {words} = {shape}")
