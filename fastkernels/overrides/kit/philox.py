"""Counter-based random numbers: Philox 4x32-10 (Salmon et al., SC 2011), the same bits on every device.

Token t of a row takes word t % 4 of the block with key = seed and counter = (t // 4, 0, offset, offset >> 32), so that
its noise is a function of (seed, offset, t) alone.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

_MASK = 0xFFFFFFFF


def philox(c: list[torch.Tensor], k0: torch.Tensor, k1: torch.Tensor) -> None:
    """Philox 4x32-10 in place. c: four int64 counter words of one shape, in [0, 2^32); they become the random words.

    k0, k1: the key's words, broadcastable to that shape. An int64 product that overflows keeps its low 64 bits.
    """
    c0, c1, c2, c3 = c
    a, b = torch.empty_like(c0), torch.empty_like(c0)
    for i in range(10):
        torch.mul(c0, 0xD2511F53, out=a)
        torch.mul(c2, 0xCD9E8D57, out=b)
        torch.bitwise_right_shift(b, 32, out=c0)
        c0.bitwise_xor_(c1).bitwise_xor_(k0 + i * 0x9E3779B9).bitwise_and_(_MASK)
        torch.bitwise_right_shift(a, 32, out=c2)
        c2.bitwise_xor_(c3).bitwise_xor_(k1 + i * 0xBB67AE85).bitwise_and_(_MASK)
        a, b, c1, c3 = c3, c1, b, a  # high words are masked after the next xor
    c[:] = [c0, c1.bitwise_and_(_MASK), c2, c3.bitwise_and_(_MASK)]


def exponential(seeds: torch.Tensor, offsets: torch.Tensor, vocab: int) -> torch.Tensor:
    """Exp(1) draws [B, vocab] in float32, each in [2^-33, 17], for the rows' seeds and offsets [B] int64.

    Uses -log(1 - u) rather than -log(u): the smallest draw wins a race, and u is most precise near 0.
    """
    blocks = -(-vocab // 4)
    k0, k1, low, high = (t[:, None] & _MASK for t in (seeds, seeds >> 32, offsets, offsets >> 32))
    index = torch.arange(blocks, device=seeds.device)
    words = [t.expand(len(seeds), blocks).clone() for t in (index, torch.zeros_like(low), low, high)]
    philox(words, k0, k1)
    draws = torch.empty(len(seeds), blocks, 4, dtype=torch.float32, device=seeds.device)
    for lane, word in enumerate(words):
        draws[..., lane] = word
    draws.add_(0.5).mul_(2.0**-32).clamp_(max=1 - 2.0**-24).neg_().log1p_().neg_()
    return draws.view(len(seeds), blocks * 4)[:, :vocab]


@triton.jit
def _exponential(word):
    """The draw of a 32-bit word; see exponential. Triton has no log1p; near 0 a series is as exact."""
    u = tl.minimum((word.to(tl.float32) + 0.5) * 2.3283064365386963e-10, 0.9999999403953552)
    near = u * (1.0 + u * (0.5 + u * (0.3333333333 + u * 0.25)))
    return tl.where(u < 0.015625, near, -tl.log(1.0 - u))


@triton.jit
def exponential_block(seed, offset, first, QUADS: tl.constexpr):
    """Exp(1) draws [4 * QUADS] for the tokens first, first + 1, ... of one row; `first` is a multiple of 4."""
    c0 = (first // 4 + tl.arange(0, QUADS)).to(tl.uint32)
    zero = c0 * 0
    low = zero + (offset & 0xFFFFFFFF).to(tl.uint32)
    high = zero + ((offset >> 32) & 0xFFFFFFFF).to(tl.uint32)
    w0, w1, w2, w3 = tl.philox(seed, c0, zero, low, high)
    return _exponential(tl.interleave(tl.interleave(w0, w2), tl.interleave(w1, w3)))
