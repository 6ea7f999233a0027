"""Which weight a step reads after which, so that a kernel that ends can have the next one's first bytes put into L2.

Between two large linear layers of a decode step run small kernels that leave the memory idle: norm, rotary embedding,
attention of few tokens, activation. A kernel that takes part calls `after(weight)` when it is launched. The order is
learned: each call with another weight follows the call before it, and the first pass is forgotten as the next one
repeats it. In a captured graph the order is that of the passes before, which every engine makes to warm up.
Off until `enable` is called: a kernel that is timed or judged alone is alone.
"""

from __future__ import annotations

import weakref

import torch

BYTES = 16 << 20  # at most so much of the next weight: a third of an H200's L2
_limit = 0
_last: dict[torch.device, weakref.ref[torch.Tensor]] = {}
_next: dict[tuple[torch.device, int], weakref.ref[torch.Tensor]] = {}


def enable(limit: int = BYTES) -> None:
    """From here on, kernels that can have up to `limit` bytes of the next weight read ahead; 0: none."""
    global _limit
    _limit = limit
    _last.clear()
    _next.clear()


def after(weight: torch.Tensor) -> tuple[torch.Tensor | None, int]:
    """(the weight that was read after this one the last time, how many of its bytes to read ahead), or (None, 0).

    weight: of a call that is being made; dense, kept by its owner as long as its calls are made.
    """
    if not _limit:
        return None, 0
    device = weight.device
    last = _last.get(device)
    before = last() if last is not None else None
    if before is not None and before is not weight:
        _next[device, before.data_ptr()] = weakref.ref(weight)
    _last[device] = weakref.ref(weight)
    link = _next.get((device, weight.data_ptr()))
    following = link() if link is not None else None
    if following is None or following.data_ptr() % 16:
        return None, 0
    return following, min(_limit, following.numel() * following.element_size()) // 16 * 16
