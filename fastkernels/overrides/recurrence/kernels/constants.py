"""Constants of decodes: one token of each sequence, none of which is new. They stay in memory: no call makes them.

Kernels know them by their address, and then read neither borders nor flags.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch

from fastkernels.overrides.kit.launch import next_power_of_2

T = torch.Tensor
LEAST = 1024  # values that are kept

_kept: dict[tuple[torch.device, Callable[..., T]], T] = {}
_all: list[T] = []  # with smaller ones from before, which CUDA graphs may read
_borders = partial(torch.arange, dtype=torch.int32)
_falses = partial(torch.zeros, dtype=torch.bool)


def _first(make: Callable[..., T], like: T, count: int) -> T:
    """The first `count` values of make(size, device=...).

    Traced code makes its own. Memory of a CUDA graph that is being captured is not kept. Kept memory is usable in every
    stream and with autograd.
    """
    if torch.compiler.is_compiling() or type(like) is not T:
        return make(count, device=like.device)
    kept = _kept.get((like.device, make))
    if kept is not None and kept.shape[0] >= count:
        return kept[:count]
    with torch.inference_mode(False), torch.cuda.device_of(like):
        made = make(max(LEAST, next_power_of_2(count)), device=like.device)
        if type(made) is T and not (like.is_cuda and torch.cuda.is_current_stream_capturing()):
            if like.is_cuda:
                torch.cuda.current_stream().synchronize()
            _all.append(made)
            _kept[like.device, make] = made
    return made[:count]


def _is(make: Callable[..., T], x: T) -> bool:
    kept = _kept.get((x.device, make))
    return kept is not None and x.data_ptr() == kept.data_ptr()


def each(x: T) -> T:
    """Borders of sequences with one token each: 0, 1, ... len(x). Read only."""
    return _first(_borders, x, x.shape[0] + 1)


def none(slots: T) -> T:
    """No sequence begins at zero. Read only."""
    return _first(_falses, slots, slots.shape[0])


def is_each(cu_seqlens: T) -> bool:
    """Whether `each` made these borders; False for others with the same values."""
    return _is(_borders, cu_seqlens)


def is_none(fresh: T) -> bool:
    """Whether `none` made these flags; False for others with the same values."""
    return _is(_falses, fresh)
