"""QuACK's CuTe-DSL kernels as candidates. They run on Hopper and Blackwell."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from fk_bench.evaluate.adapters.published import refuse

PACKAGE = "quack"


def bind(folder: Path, op: str) -> Callable[..., Any]:
    """The op's function on the library's kernel."""
    return FUNCTIONS[op]()


def _rms_norm() -> Callable[..., Any]:
    from quack.rmsnorm import rmsnorm_fwd

    def rms_norm(x, weight, eps, residual=None, var_hidden_size=None, cast_x_before_out_mul=True):
        refuse(var_hidden_size=var_hidden_size)
        flat = x.reshape(-1, x.shape[-1])
        added = None if residual is None else residual.reshape(flat.shape)
        out, total, _ = rmsnorm_fwd(flat, weight, residual=added, eps=eps)
        if residual is not None:
            residual.copy_(total.view(residual.shape))
        return out.view(x.shape)

    return rms_norm


def _gemma_rms_norm() -> Callable[..., Any]:
    from quack.rmsnorm import rmsnorm_fwd

    def gemma_rms_norm(x, weight, eps, residual=None):
        flat = x.reshape(-1, x.shape[-1])
        added = None if residual is None else residual.reshape(flat.shape)
        out, total, _ = rmsnorm_fwd(flat, weight, residual=added, eps=eps, weight_offset=1.0)
        if residual is not None:
            residual.copy_(total.view(residual.shape))
        return out.view(x.shape)

    return gemma_rms_norm


FUNCTIONS: dict[str, Callable[[], Callable[..., Any]]] = {
    "rms_norm": _rms_norm, "gemma_rms_norm": _gemma_rms_norm,
}  # fmt: skip
