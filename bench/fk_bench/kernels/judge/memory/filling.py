"""GPU: one kernel writes the values of many slots, each rolled and multiplied, in one pass over their memory."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
import triton.language as tl

BLOCK = 4096
SCALED = torch.float16, torch.bfloat16, torch.float32
_RAW = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


@triton.jit(do_not_specialize=["numel"])
def _fill_kernel(out_ptr, sources, shifts, factors, numel, step, SCALES: tl.constexpr, BLOCK: tl.constexpr):
    slot = tl.program_id(1)
    source = tl.load(sources + slot).to(tl.pointer_type(out_ptr.dtype.element_ty))
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    there = at < numel
    turned = at + tl.load(shifts + slot)
    turned = tl.where(turned >= numel, turned - numel, turned)
    x = tl.load(source + turned, mask=there)
    if SCALES:  # rounded once, as PyTorch multiplies
        x = (x.to(tl.float32) * tl.load(factors + slot)).to(x.dtype)
    tl.store(out_ptr + slot.to(tl.int64) * step + at, x, mask=there)


def fits(t: torch.Tensor, scales: bool) -> bool:
    """Whether `fill` can write this tensor of a slot; scales: its values are multiplied."""
    return t.is_contiguous() and t.element_size() in _RAW and (not scales or t.dtype in SCALED)


def fill(
    first: torch.Tensor, step: int, sources: Sequence[torch.Tensor], shifts: Sequence[int],
    factors: Sequence[float] | None,
) -> None:  # fmt: skip
    """Write sources[s], rolled to the left by shifts[s] and multiplied by factors[s], to each slot s.

    first    the tensor in the first slot; that of slot s lies `step` elements times s behind it
    shifts   from 0 to below the number of its elements
    factors  None: values are only moved, whatever their dtype is
    """
    if not first.numel():
        return
    scales, dtype = factors is not None, first.dtype if factors is not None else _RAW[first.element_size()]
    dense = {id(t): t.contiguous() for t in sources}
    addresses = torch.tensor([dense[id(t)].data_ptr() for t in sources], device=first.device)
    turns = torch.tensor(shifts, dtype=torch.int64, device=first.device)
    # Factors are numbers of the tensor's dtype.
    by = torch.tensor(factors or [1.0]).to(dtype).float().to(first.device)
    grid = triton.cdiv(first.numel(), BLOCK), len(sources)
    _fill_kernel[grid](
        first.view(dtype), addresses, turns, by, first.numel(), step, SCALES=scales, BLOCK=BLOCK, num_warps=8
    )
