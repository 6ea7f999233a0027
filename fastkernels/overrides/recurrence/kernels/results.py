"""Memory for the result of a kernel: new, or that of a host that wants it filled."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

import torch

T = torch.Tensor

_destination: ContextVar[T | None] = ContextVar("destination", default=None)


@contextmanager
def results_in(out: T) -> Iterator[None]:
    """Give the next result of a kernel of this family the memory of `out`, if that has its shape and dtype."""
    token = _destination.set(out)
    try:
        yield
    finally:
        _destination.reset(token)


def result_like(x: T) -> T:
    """Memory for a result of x's shape, dtype and device, contiguous: that of results_in, or new."""
    out = _destination.get()
    if (
        out is not None
        and (out.shape, out.dtype, out.device) == (x.shape, x.dtype, x.device)
        and out.is_contiguous()
    ):
        _destination.set(None)  # a second result gets memory of its own
        return out
    return torch.empty(x.shape, dtype=x.dtype, device=x.device)
