"""One recurrence for the Triton kernels of this family: what the ops on a matrix of state have in common.

S = decay S + (what the rule writes);  o = scale S^T q      S [K, V] of each head, decay a number or diag(K numbers)
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import torch
import triton
import triton.language as tl

from fastkernels.overrides.kit.rows import FLOATS

T = torch.Tensor
WIDEST = 256  # channels of a key
LINEAR, DELTA, PAIR, STEP = 0, 1, 2, 3  # rules
BY_TOKEN, BY_CHANNEL, BY_HEAD = 0, 1, 2  # gates


@dataclass(frozen=True)
class Problem:
    """The arguments of a call.

    q, k       [T, Hk, K]; heads of v share them in groups
    v          [T, H, V]
    g          [T, H], [T, H, K] or [H]: the logarithm of the decay. For STEP the step sizes [T, H] before the softplus
    state      [S, H, K, V], of any strides
    cu_seqlens, fresh  None: one token of each sequence; no sequence begins
    rule       LINEAR writes k v^T; DELTA k (beta (v - S^T k))^T; PAIR k v^T + b (S^T a)^T with S before the decay;
               STEP dt k v^T, with a decay of exp(dt rate), and adds skip * v to the output
    beta       [T, H]
    a, b       [T, H, K]
    rate, bias, skip, low, high   of STEP: [H], and the limits of dt. With `rate`, g and beta of DELTA are the inputs
               of `delta_gates`, as are rate [H], bias [H] or [H, K], logarithm and low
    """

    q: T
    k: T
    v: T
    g: T
    state: T
    cu_seqlens: T | None
    slots: T
    fresh: T | None
    rule: int
    scale: float = 1.0
    normalize: bool = False
    beta: T | None = None
    a: T | None = None
    b: T | None = None
    rate: T | None = None
    bias: T | None = None
    skip: T | None = None
    low: float = 0.0
    high: float = float("inf")
    logarithm: bool = False

    @cached_property
    def sizes(self) -> tuple[int, int, int, int, int]:
        """Sequences, heads, heads that share a key, channels of a key and of a value."""
        _, heads, values = self.v.shape
        return self.slots.shape[0], heads, heads // self.q.shape[1], self.q.shape[2], values

    @property
    def gate(self) -> int:
        return {1: BY_HEAD, 2: BY_TOKEN, 3: BY_CHANNEL}[self.g.dim()]


def strides(x: T | None, count: int) -> tuple[int, ...]:
    """Its first strides; zeros for an absent tensor or dimension."""
    return (0,) * count if x is None else (*x.stride()[:count], *[0] * (count - x.dim()))


def unsupported(*rows: T | None, others: tuple[T | None, ...] = (), keys: int = 0) -> str | None:
    """The reason why the kernels do not take tensors with these rows of channels and others of any strides."""
    for x in (*rows, *others):
        if x is not None and x.dtype not in FLOATS:
            return f"a tensor is {x.dtype}, not float16, bfloat16 or float32"
    for x in rows:
        if x is not None and x.stride(-1) != 1 and x.shape[-1] > 1:
            return f"a tensor has stride {x.stride(-1)} in its last dimension, not 1"
    return f"{keys} channels of a key are over {WIDEST}" if keys > WIDEST else None


@triton.jit
def slot_at(i, slots_ptr, fresh_ptr):
    # The slot of sequence i, and whether it has the sequence's state.
    slot = tl.load(slots_ptr + i).to(tl.int64)
    known = slot > 0
    if fresh_ptr is not None:
        known = known & (tl.load(fresh_ptr + i) == 0)
    return slot, known


@triton.jit
def sequence_at(i, cu_ptr, slots_ptr, fresh_ptr):
    # The first row of sequence i, its number of tokens, and slot_at. Without borders it has one token.
    start = i.to(tl.int64)
    count = 1
    if cu_ptr is not None:
        start = tl.load(cu_ptr + i).to(tl.int64)
        count = (tl.load(cu_ptr + i + 1) - start).to(tl.int32)
    slot, known = slot_at(i, slots_ptr, fresh_ptr)
    return start, count, slot, known


@triton.jit
def softplus(x):
    # log(1 + e) is 0 in float32 for the smallest steps.
    e = tl.exp(-tl.abs(x))
    return tl.maximum(x, 0.0) + tl.where(e < 1e-3, e * (1.0 - 0.5 * e), tl.log(1.0 + e))


@triton.jit
def log_decay(dt, rate, low, LOGARITHM: tl.constexpr, BOUNDED: tl.constexpr):
    # The decay of `delta_gates`, as a logarithm.
    if LOGARITHM:
        rate = -tl.exp(rate)
    if BOUNDED:
        g = low / (1.0 + tl.exp(rate * dt))
    else:
        g = rate * softplus(dt)
    return g
