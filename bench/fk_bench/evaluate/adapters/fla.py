"""flash-linear-attention's Triton kernels as candidates: norms and activations of `fla.modules`."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from fk_bench.evaluate.adapters.published import need, refuse

PACKAGE = "fla"


def bind(folder: Path, op: str) -> Callable[..., Any]:
    """The op's function on the library's kernel."""
    return FUNCTIONS[op]()


def _l2_norm() -> Callable[..., Any]:
    from fla.modules.l2norm import l2norm_fwd

    def l2_norm(x, eps=1e-6, output_dtype=None):
        found = l2norm_fwd(x, eps, output_dtype)
        return found[0] if isinstance(found, tuple) else found

    return l2_norm


def _rms_norm() -> Callable[..., Any]:
    from fla.modules.layernorm import rms_norm as theirs

    def rms_norm(x, weight, eps, residual=None, var_hidden_size=None, cast_x_before_out_mul=True):
        refuse(var_hidden_size=var_hidden_size)
        if residual is None:
            return theirs(x, weight, None, eps=eps)
        out, total = theirs(x, weight, None, residual=residual, eps=eps, prenorm=True)
        residual.copy_(total)
        return out

    return rms_norm


def _layer_norm() -> Callable[..., Any]:
    from fla.modules.layernorm import layer_norm as theirs

    return lambda x, weight, bias, eps: theirs(x, weight, bias, eps=eps)


def _rms_norm_gated() -> Callable[..., Any]:
    from fla.modules.fused_norm_gate import rms_norm_gated as theirs

    def rms_norm_gated(
        x, weight, gate, eps, group_size=None, norm_before_gate=True, activation="silu",
        cast_x_before_out_mul=False,
    ):  # fmt: skip
        refuse(group_size=group_size if group_size != x.shape[-1] else None, order=not norm_before_gate)
        need(gate=gate)
        return theirs(
            x, gate, weight, None, activation="swish" if activation == "silu" else activation, eps=eps
        )

    return rms_norm_gated


FUNCTIONS: dict[str, Callable[[], Callable[..., Any]]] = {
    "l2_norm": _l2_norm, "rms_norm": _rms_norm, "layer_norm": _layer_norm, "rms_norm_gated": _rms_norm_gated,
}  # fmt: skip
