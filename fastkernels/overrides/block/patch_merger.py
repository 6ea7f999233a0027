"""Merger of image patches, y = gelu(norm(x) W1^T + b1) W2^T + b2, on blocks of patches (Qwen2-VL, arXiv 2409.12191)."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from types import SimpleNamespace
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from fastkernels.core import assemble
from fastkernels.core.expressions import Expr
from fastkernels.core.spec import Axis, Case, OpSpec, Scalar, Tensor, fan_in
from fastkernels.overrides.activation.gelu import gelu
from fastkernels.overrides.linear.linear_gelu import linear_gelu
from fastkernels.overrides.linear.modules import autocasts, changed, plain_linear

EPS = 1e-6


def reference(
    x: torch.Tensor, norm_weight: torch.Tensor, fc1: torch.Tensor, fc1_bias: torch.Tensor, fc2: torch.Tensor,
    fc2_bias: torch.Tensor, norm_bias: torch.Tensor | None = None, of_block: bool = False,
) -> torch.Tensor:  # fmt: skip
    """x: [P, H], the patches of a block one after the other; fc1: [D, D]; fc2: [N, D]; D = H times patches of a block.

    norm_weight, norm_bias: [H], or [D] if of_block, a norm of whole blocks. Without a bias, the norm is RMSNorm.
    Returns [P * H / D, N] in x's dtype.
    """
    acc = torch.promote_types(x.dtype, torch.float32)
    wide, size = fc1.shape[1], norm_weight.shape[0]
    rows, weight = x.to(acc).reshape(-1, wide if of_block else size), norm_weight.to(acc)
    if norm_bias is None:
        rows = rows * (rows.square().mean(-1, keepdim=True) + EPS).rsqrt() * weight
    else:
        rows = F.layer_norm(rows, (size,), weight, norm_bias.to(acc), EPS)
    inner = F.gelu(F.linear(rows.view(-1, wide), fc1.to(acc), fc1_bias.to(acc)))
    return F.linear(inner, fc2.to(acc), fc2_bias.to(acc)).to(x.dtype)


Parts = tuple[str, str, str, str]
# The names of a merger's norm, first product, activation and second product
IN_MLP: Parts = ("ln_q", "mlp.0", "mlp.1", "mlp.2")
NAMED: Parts = ("norm", "linear_fc1", "act_fn", "linear_fc2")


class PatchMerger(nn.Module):
    """Base of the hosts' mergers. parts: the names of their modules; hidden_size: channels of a block."""

    parts: Parts
    hidden_size: int


def merge(module: Any, parts: Parts, x: torch.Tensor) -> torch.Tensor:
    """The result of a merger, ours or the host's: norm, blocks of patches side by side, product, GELU, product."""
    norm, first, _, second = map(module.get_submodule, parts)
    of_block = getattr(module, "use_postshuffle_norm", False)
    rows = norm(x.view(-1, module.hidden_size) if of_block else x).view(-1, module.hidden_size)
    return _only(second(_activated(first, rows)))


def unlike(parts: Parts, module: Any) -> str | None:
    """Why the activation of a merger with these parts or its MLP, which ours does not call, has to run, or None."""
    act, mlp = module.get_submodule(parts[2]), parts[2].rpartition(".")[0]
    if type(act).__name__ not in ("GELU", "GELUActivation") or getattr(act, "approximate", "none") != "none":
        return f"{parts[2]} is {type(act).__name__}, not GELU with erf"
    hooked = next((n for n in (parts[2], mlp) if n and changed(module.get_submodule(n))), None)
    return hooked and f"{hooked} has hooks or a replaced forward"


def _only(out: Any) -> torch.Tensor:
    """The result of a layer that may return its bias, too."""
    return out[0] if isinstance(out, tuple) else out


def _is_plain(layer: Any, x: torch.Tensor) -> bool:
    """Whether a layer's own code is a product with its weight and bias: nn.Linear, or a host's unquantized layer."""
    method = getattr(layer, "quant_method", None)
    if method is None:
        return plain_linear(layer, x) and layer.bias is not None
    kind: Any = type(method)  # by name: a file for a fork has no class of ours
    column = type(layer).__name__.removeprefix("Vllm").removeprefix("SGLang") == "ColumnParallelLinear"
    unquantized = kind.__name__.removeprefix("Vllm").removeprefix("SGLang") == "UnquantizedLinearMethod"
    if hasattr(kind, "fastkernels"):  # a patch's: the op `linear` computes the product
        return False
    if getattr(layer, "use_intel_amx_backend", False):  # SGLang's: the weight is packed
        return False
    if not column or not unquantized or layer.gather_output or layer.skip_bias_add or changed(layer):
        return False
    weight, bias = layer.weight, layer.bias
    return bias is not None and weight.dim() == 2 and x.dtype == weight.dtype and not autocasts(x)


def _activated(layer: Any, x: torch.Tensor) -> torch.Tensor:
    """gelu(layer(x)), as one op of a plain layer."""
    if _is_plain(layer, x):
        return linear_gelu(x, layer.weight, layer.bias, "none")
    return gelu(_only(layer(x)), "none")


def _build(cls: Any, args: list[Any]) -> Callable[[], Any]:
    from fastkernels.overrides.norm.vllm import VllmRMSNorm

    x, weight, fc1, fc1_bias, fc2, fc2_bias, bias, of_block = assemble.filled(args, 8, None, False)
    size = x.shape[1]
    merge = round((len(fc1) / size) ** 0.5)
    if assemble.takes(cls, "config"):
        config = SimpleNamespace(hidden_size=size, spatial_merge_size=merge, out_hidden_size=len(fc2))
        module = assemble.make(cls, x, config, of_block)
    else:
        if of_block and not assemble.takes(cls, "use_postshuffle_norm"):
            raise ValueError(f"{cls.__name__} normalizes patches, not whole blocks")
        more: dict[str, Any] = {"use_postshuffle_norm": True} if of_block else {}
        if assemble.takes(cls, "padded_context_dim"):
            more["padded_context_dim"] = size
        if bias is None and assemble.takes(cls, "norm_layer"):
            more["norm_layer"] = partial(VllmRMSNorm if issubclass(cls, PatchMerger) else nn.RMSNorm, eps=EPS)
        module = assemble.make(cls, x, len(fc2), size, spatial_merge_size=merge, **more)
    norm, first, _, second = cls.parts
    tensors = {f"{norm}.weight": weight, f"{first}.weight": fc1, f"{first}.bias": fc1_bias}
    tensors |= {f"{second}.weight": fc2, f"{second}.bias": fc2_bias}
    if bias is not None:
        tensors[f"{norm}.bias"] = bias
    return partial(assemble.load(module, tensors), x)


def _case(
    name: str, blocks: int, hidden: int, out: int, tag: str = "odd", dtype: str = "bfloat16", merge: int = 2,
    bias: bool = True, of_block: bool = False,
) -> Case:  # fmt: skip
    dims: dict[str, Any] = {"blocks": blocks, "hidden": hidden, "out": out}
    other = {"patches": (merge**2, 4), "norm_bias": (bias, True), "of_block": (of_block, False)}
    return Case(name, dims | {k: v for k, (v, usual) in other.items() if v != usual}, dtype, 1, (tag,))


SPEC = OpSpec(
    name="patch_merger",
    level=2,
    reference=reference,
    cases=(
        _case("qwen2_vl_1024px", 1369, 1280, 3584, "model"),
        _case("qwen2_5_vl_1024px", 1369, 1280, 3584, "model", bias=False),
        _case("qwen3_vl_1024px", 1024, 1152, 4096, "model"),
        _case("qwen3_vl_deepstack", 1024, 1152, 4096, "model", of_block=True),
        _case("one", 1, 1, 1, dtype="float32"),
        _case("odd_63", 63, 20, 33),
        _case("odd_5", 5, 24, 63, dtype="float32", bias=False),
        _case("odd_block", 9, 12, 65, dtype="float32", of_block=True),
        _case("three", 7, 10, 31, dtype="float32", merge=3),
        _case("unmerged", 11, 72, 40, dtype="float32", merge=1),
        _case("half", 17, 16, 48, dtype="float16"),
        _case("half_rms", 6, 40, 24, dtype="float16", bias=False),
    ),
    arguments=(
        Tensor("x", "blocks*patches hidden"),
        Tensor("norm_weight", "normed", mean=1.0, std=0.1, doc="hidden, or hidden*patches if of_block"),
        Tensor("fc1", "hidden*patches hidden*patches", values=fan_in),
        Tensor("fc1_bias", "hidden*patches", std=0.1),
        Tensor("fc2", "out hidden*patches", values=fan_in),
        Tensor("fc2_bias", "out", std=0.1),
        Tensor("norm_bias", "normed", when="norm_bias", std=0.1),
        Scalar("of_block", default=False),
    ),
    outputs=(Tensor("out", "blocks out"),),
    axes={
        "blocks": Axis.per_call(), "hidden": Axis.width(), "out": Axis.width(),
        "patches": Axis.option(4, choices=(1, 4, 9)), "norm_bias": Axis.option(True), "of_block": Axis.option(False),
        "normed": Axis(Expr("hidden * (patches if of_block else 1)")),
    },
    flops="2 * blocks * hidden * patches * (hidden * patches + out)",
    build=_build,
    calls=("layer_norm", "rms_norm", "linear_gelu", "gelu", "linear"),
)  # fmt: skip
