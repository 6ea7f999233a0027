"""Bans tokens in a step's logits by bit masks that the host fills."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import torch
import triton
import triton.language as tl

from fastkernels.engine.sampling.rows import TokenMasks

BLOCK = 4096  # tokens of one program


class DeviceMasks(NamedTuple):
    """TokenMasks on the device: rows [M] int64, words [M, W] int32."""

    rows: torch.Tensor
    words: torch.Tensor


def to_device(masks: TokenMasks, device: torch.device) -> DeviceMasks:
    """Copy masks through pinned memory, without waiting."""
    tensors = (torch.from_numpy(np.ascontiguousarray(a)) for a in (masks.rows, masks.words))
    if device.type == "cpu":
        return DeviceMasks(*tensors)
    return DeviceMasks(*(t.pin_memory().to(device, non_blocking=True) for t in tensors))


def apply_masks(logits: torch.Tensor, masks: DeviceMasks) -> None:
    """Set logits [B, V] of tokens whose bit is 0 to -inf in the masks' rows, in place."""
    if not len(masks.rows):
        return
    if logits.is_cuda:
        _apply_triton(logits, masks)
        return
    vocab_size = logits.shape[1]
    bits = np.unpackbits(masks.words.numpy().view(np.uint8), axis=1, count=vocab_size, bitorder="little")
    banned = torch.from_numpy(bits == 0)
    for row, ban in zip(masks.rows.tolist(), banned, strict=True):
        logits[row].masked_fill_(ban, -torch.inf)


def _apply_triton(logits: torch.Tensor, masks: DeviceMasks) -> None:
    vocab_size = logits.shape[1]
    grid = (len(masks.rows), triton.cdiv(vocab_size, BLOCK))
    _mask_kernel[grid](
        logits, masks.rows, masks.words, vocab_size, logits.stride(0), masks.words.stride(0), BLOCK=BLOCK
    )


@triton.jit
def _mask_kernel(logits_ptr, rows_ptr, words_ptr, vocab_size, row_stride, word_stride, BLOCK: tl.constexpr):
    i = tl.program_id(0).to(tl.int64)
    token = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    valid = token < vocab_size
    word = tl.load(words_ptr + i * word_stride + token // 32, mask=valid, other=-1)
    banned = ((word >> (token % 32)) & 1) == 0
    row = tl.load(rows_ptr + i)
    tl.store(logits_ptr + row * row_stride + token, -float("inf"), mask=valid & banned)
