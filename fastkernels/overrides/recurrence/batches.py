"""Batches [B, T, ...] as packed sequences, for hosts that give the state of each sequence and get a new one."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from fastkernels.overrides.kit.arguments import UnsupportedArgument

T = torch.Tensor


@dataclass(frozen=True)
class Batch:
    """B sequences of T tokens, packed, with a state each in the rows 1 to B of `state`.

    tail  state, cu_seqlens, slots, fresh: the last tensors of the ops of this family
    """

    size: int
    tokens: int
    tail: tuple[T, T | None, T, T | None]

    def rows(self, *tensors: T) -> tuple[T, ...]:
        """[B, T, ...] as [B T, ...]."""
        return tuple(t.reshape(self.size * self.tokens, *t.shape[2:]) for t in tensors)

    def unpacked(self, out: T) -> T:
        return out.view(self.size, self.tokens, *out.shape[1:])

    @property
    def state(self) -> T:
        """The states [B, ...] after the call."""
        return self.tail[0][1:]


def batch_of(
    x: T,
    initial: T | None,
    *shape: int,
    dtype: torch.dtype = torch.float32,
    cu_seqlens: T | None = None,
) -> Batch:
    """The batch of x [B, T, ...], whose sequences begin at the states `initial` [B, *shape], or at zero.

    With cu_seqlens [N + 1], x [1, T, ...] has N sequences. `initial` keeps its values.
    """
    size, tokens = x.shape[:2]
    count = size if cu_seqlens is None else len(cu_seqlens) - 1
    state = torch.empty(count + 1, *shape, dtype=dtype, device=x.device)
    if initial is not None:
        state[1:].copy_(initial)
    borders = None if cu_seqlens is None else cu_seqlens.to(torch.int32)
    if borders is None and tokens != 1:
        borders = torch.arange(size + 1, dtype=torch.int32, device=x.device) * tokens
    slots = torch.arange(1, count + 1, dtype=torch.int32, device=x.device)
    fresh = torch.ones(count, dtype=torch.bool, device=x.device) if initial is None else None
    return Batch(size, tokens, (state, borders, slots, fresh))


def silu_or_none(function: str, activation: Any) -> str:
    """The op's name of a host's activation. Raises UnsupportedArgument for others than SiLU and None."""
    if activation in (None, False):
        return "none"
    if activation in ("silu", "swish", True):
        return "silu"
    raise UnsupportedArgument(
        f"{function}: activation={activation!r} is not silu; use the host's own function"
    )


def unset(function: str, **arguments: Any) -> None:
    """Raise UnsupportedArgument for the first argument that is set: our kernels have none of them."""
    for name, value in arguments.items():
        if value is not None and value is not False:
            given = name if isinstance(value, torch.Tensor) else f"{name}={value!r}"
            raise UnsupportedArgument(f"{function}: {given} is not supported; use the host's own function")


def softplus_only(function: str, name: str, given: bool) -> None:
    """Raise UnsupportedArgument unless step sizes pass through a softplus."""
    if not given:
        raise UnsupportedArgument(f"{function}: {name}={given} is not supported; use the host's own function")


def by_head(function: str, name: str, x: T | None, keep: int) -> T | None:
    """The first `keep` dimensions of a tensor that repeats its values in all others (expanded, with stride 0)."""
    if x is None:
        return None
    if any(s for n, s in zip(x.shape[keep:], x.stride()[keep:], strict=True) if n > 1):
        shape = tuple(x.shape)
        raise UnsupportedArgument(
            f"{function}: {name} {shape} has values of its own in each channel of a head"
        )
    index: Any = (..., *[0] * (x.dim() - keep))
    return x[index]
