"""Packed gate and up projections with SwiGLU, y = silu(x Wg^T + bg) * (x Wu^T + bu) (Shazeer, arXiv 2002.05202)."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F

from fastkernels.core.case import Case, Tolerance
from fastkernels.core.declaration import Axis, Tensor
from fastkernels.core.dispatch import ForOthers, Key, Provider, define
from fastkernels.core.spec import OpSpec, fan_in
from fastkernels.core.tuning import Chip
from fastkernels.overrides.activation.silu_and_mul import silu_and_mul
from fastkernels.overrides.kit.selection import HOPPER
from fastkernels.overrides.linear.kernels.tiled_linear_cuda import (
    LEAST,
    PARAMS,
    SWIGLU,
    choose,
    fits,
    linears_tiled,
    supports_tiled,
)
from fastkernels.overrides.linear.linear import linear

FEW = 64  # tokens of decodes, in which `linear` and `silu_and_mul` have kernels of their own
MANY = 8192  # tokens; more are multiplied in the same tiles, only more of them
SETS = tuple(params for params in PARAMS if fits(params, SWIGLU))


def reference(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    """x: [..., K]; weight: [2 I, K], the gate's rows first; bias: [2 I] or None.

    Returns [..., I] in x's dtype, computed in at least float32 and rounded once.
    """
    acc = torch.promote_types(x.dtype, torch.float32)
    y = x.to(acc) @ weight.to(acc).t()
    if bias is not None:
        y = y + bias.to(acc)
    gate, up = y.chunk(2, dim=-1)
    return (F.silu(gate) * up).to(x.dtype)


def _check(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> None:
    if weight.dim() != 2 or weight.shape[0] % 2 or x.shape[-1] != weight.shape[1]:
        raise ValueError(
            f"linear_silu_and_mul: weight {tuple(weight.shape)} is not [2 I, {x.shape[-1]}] of x {tuple(x.shape)}"
        )
    if bias is not None and bias.shape != weight.shape[:1]:
        raise ValueError(
            f"linear_silu_and_mul: bias {tuple(bias.shape)} is not [2 I] of the weight {tuple(weight.shape)}"
        )


def _halves(
    weight: torch.Tensor, bias: torch.Tensor | None
) -> tuple[tuple[torch.Tensor, ...], tuple[torch.Tensor | None, ...]]:
    return weight.chunk(2), (None, None) if bias is None else bias.chunk(2)


def _supports_tiled(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> str | None:
    if x.numel() < LEAST * x.shape[-1]:
        return ForOthers(f"fewer than {LEAST} tokens")
    if weight.dim() != 2 or weight.shape[0] % 2:
        return f"weight {tuple(weight.shape)} has no halves"
    for half, added in zip(*_halves(weight, bias), strict=True):
        if (reason := supports_tiled(x, half, added)) is not None:
            return reason
    return None


def _tiled(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None, **params: Any
) -> torch.Tensor:
    """One kernel, whose tiles have columns of gate and up: neither is written to memory."""
    _check(x, weight, bias)
    return linears_tiled(x, *_halves(weight, bias), SWIGLU, **params)


def _apart(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    """cuBLAS, on a CPU oneDNN; then the activation of both halves."""
    _check(x, weight, bias)
    return silu_and_mul(F.linear(x, weight, bias))


def _reference(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    _check(x, weight, bias)
    return reference(x, weight, bias).contiguous()


def _fake(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    return x.new_empty((*x.shape[:-1], weight.shape[0] // 2))


def _key(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None
) -> tuple[tuple[int, int, torch.dtype], tuple[int]]:
    n, k = weight.shape
    return (n, k, x.dtype), (min(x.numel() // k if k else 0, MANY),)


def _shape_of(layer: Any) -> tuple[int, int, torch.dtype] | None:
    weight = getattr(layer, "weight", None)
    if not isinstance(weight, torch.Tensor) or weight.dim() != 2:
        return None
    return weight.shape[0], weight.shape[1], weight.dtype


def _own(layer: Any, args: list[Any]) -> list[Any]:
    return [args[0], layer.weight, getattr(layer, "bias", None)]


# The second fastest set in most shapes that tiled_linear_cuda.TALL was measured in
SECOND = {"rows": 256, "columns": 192, "cooperate": True, "shares": "x", "cluster": 2}


def _propose(
    shape: tuple[Any, ...], sizes: tuple[int, ...], chip: Chip
) -> tuple[tuple[str, dict[str, Any]], ...]:
    """Propose the set of `choose` and the next one."""
    (n, k, dtype), (m,) = shape, sizes
    if (
        chip.capability[0] != HOPPER
        or dtype not in (torch.float16, torch.bfloat16)
        or m < LEAST
        or n % 64
        or k % 8
        or k < 64
    ):
        return ()
    first = choose(m, n // 2, k, SWIGLU, chip.sms, 2)
    sets = [first] if first == SECOND else [first, SECOND]
    return tuple(("cuda-tiled", dict(params)) for params in sets)


linear_silu_and_mul = define(
    "linear_silu_and_mul(Tensor x, Tensor weight, Tensor? bias=None) -> Tensor",
    fake=_fake,
    providers=(
        Provider("cublas", _apart),
        Provider(
            "cuda-tiled", _tiled, supports=_supports_tiled, params=SETS,
            fits=lambda params, x, *_: x.numel() >= LEAST * x.shape[-1],
        ),
        Provider("onednn", _apart, devices=("cpu",)),
        Provider("reference", _reference, devices=("cuda", "cpu")),
    ),
    key=Key(
        shape=("N", "K", "dtype"),
        sizes=("M",),
        of=_key,
        dims=lambda N, K, dtype, M: {"tokens": M, "hidden": K, "intermediate": N // 2},
        module=_shape_of,
        propose=_propose,
        points=((2048,), (MANY,), (1024,), (512,), (256,), (LEAST,), (192,)),
        own=_own,
        scratch=lambda N, K, dtype, M: 2 * M * N * dtype.itemsize,
    ),
)  # fmt: skip


def fuses(layer: Any, x: torch.Tensor) -> bool:
    """Whether the op runs in place of a layer and silu_and_mul: many tokens, and ours was measured as faster.

    layer: unquantized, with packed gate and up. Not in code that torch.compile traces, which has no number of tokens,
    and not where linear or silu_and_mul is requested by name.
    """
    if torch.compiler.is_compiling() or x.numel() <= FEW * x.shape[-1]:
        return False
    op = linear_silu_and_mul
    if op.requested == "off" or linear.requested or silu_and_mul.requested:
        return False
    return op.requested == "named" or op.faster(x, layer.weight, layer.bias)


def activated(layer: Any, x: torch.Tensor) -> torch.Tensor:
    """Return silu_and_mul(layer(x)): one op of an unquantized layer where `fuses` says so.

    layer: with packed gate and up, a host's or ours, which returns the product and a bias that it has not added
    """
    method = type(getattr(layer, "quant_method", None)).__name__
    plain = "UnquantizedLinearMethod" in method and not hasattr(layer, "base_layer")  # as a LoRA wrapper has
    if plain and fuses(layer, x):
        return linear_silu_and_mul(x, layer.weight, layer.bias)  # type: ignore[no-any-return]
    gate_up, _ = layer(x)
    return silu_and_mul(gate_up)  # type: ignore[no-any-return]


def _case(
    name: str, tokens: int, hidden: int, intermediate: int, tag: str = "odd", dtype: str = "bfloat16",
    bias: bool = False,
) -> Case:  # fmt: skip
    dims = {"tokens": tokens, "hidden": hidden, "intermediate": intermediate, "bias": bias}
    return Case(name, dims, dtype, 1, (tag,))


SPEC = OpSpec(
    name="linear_silu_and_mul",
    level=2,
    reference=reference,
    op=linear_silu_and_mul,
    cases=(  # Llama-3.1-8B, Qwen2.5-7B
        _case("prefill_2k", 2048, 4096, 14336, "model"),
        _case("prefill_8k", 8192, 4096, 14336, "model"),
        _case("qwen_2k", 2048, 3584, 18944, "model"),
        _case("one", 1, 1, 1, dtype="float32"),
        _case("odd_63", 63, 72, 130),
        _case("odd_65", 65, 100, 63, dtype="float16", bias=True),
        _case("odd_9", 9, 33, 257, dtype="float32"),
        _case("odd_150", 150, 128, 96, bias=True),
        _case("narrow", 70, 8, 3, dtype="float32", bias=True),
        _case("smollm2", 1, 192, 512, dtype="float32"),
        _case("half", 7, 64, 48, dtype="float16"),
    ),
    arguments=(
        Tensor("x", "tokens hidden"),
        Tensor("weight", "2*intermediate hidden", values=fan_in),
        Tensor("bias", "2*intermediate", when="bias", std=0.1),
    ),
    outputs=(Tensor("out", "tokens intermediate"),),
    axes={
        "tokens": Axis.per_call(),
        "hidden": Axis.width(),
        "intermediate": Axis.width(),
        "bias": Axis.option(False, stated=True),
    },
    flops="4 * tokens * hidden * intermediate + 5 * tokens * intermediate",
    activations=("x",),
    tolerance={
        "float32": Tolerance(2e-5, 2e-5),
        "float16": Tolerance(4e-3, 4e-3),
        "bfloat16": Tolerance(3e-2, 3e-2),
    },
    stands_for=("linear", "silu_and_mul"),
    baseline="cublas",
)  # fmt: skip
