"""SPEC.build of the normalizations: a host's module around the arguments of the op."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch

from fastkernels.core import assemble


def _with_residual(module: Any, x: torch.Tensor, residual: torch.Tensor | None) -> Callable[[], Any]:
    if residual is None:
        return lambda: (module(x), None)
    return lambda: module(x, residual)


def build_rms_norm(cls: type, args: list[Any]) -> Callable[[], Any]:
    x, weight, eps, residual, var_hidden, cast_first = assemble.filled(args, 6, None, None, True)
    more: dict[str, Any] = {}
    if assemble.takes(cls, "cast_x_before_out_mul"):
        more["cast_x_before_out_mul"] = cast_first
    # Other classes round as their host does. It is one function, and its answer in float64 the same: the tolerance has
    # room for one rounding more.
    if assemble.takes(cls, "has_weight"):
        more |= {"has_weight": weight is not None, "var_hidden_size": var_hidden}
    else:
        assemble.refuse(
            cls, residual=residual, weight="None" if weight is None else None, var_hidden_size=var_hidden
        )
    module = assemble.make(cls, x, x.shape[-1], eps=eps, **more)
    assemble.load(module, {} if weight is None else {"weight": weight})
    return _with_residual(module, x, residual)


def build_gemma_rms_norm(cls: type, args: list[Any]) -> Callable[[], Any]:
    x, weight, eps, residual = assemble.filled(args, 4, None)
    if not assemble.takes(cls.forward, "residual"):  # type: ignore[attr-defined]
        assemble.refuse(cls, residual=residual)
    module = assemble.load(assemble.make(cls, x, x.shape[-1], eps=eps), {"weight": weight})
    return _with_residual(module, x, residual)


def build_layer_norm(cls: type, args: list[Any]) -> Callable[[], Any]:
    x, weight, bias, eps = args
    given = {name: t for name, t in (("weight", weight), ("bias", bias)) if t is not None}
    if not assemble.takes(cls, "elementwise_affine"):
        for name in ("weight", "bias"):
            assemble.refuse(cls, **{name: None if name in given else "None"})
        return partial(assemble.load(assemble.make(cls, x, x.shape[-1], eps), given), x)
    dtype = next((t.dtype for t in given.values()), torch.float32)
    affine = {"elementwise_affine": weight is not None, "bias": bias is not None}
    module = assemble.make(cls, x, x.shape[-1], eps, dtype=dtype, **affine)
    # SGLang's has both parameters, used or not.
    unused = {n: p.data for n, p in module.named_parameters() if n not in given}
    return partial(assemble.load(module, {**unused, **given}), x)


def cancel(args: list[Any]) -> None:
    """x + residual is zero everywhere."""
    if len(args) > 3 and args[3] is not None:
        args[3].copy_(-args[0])
