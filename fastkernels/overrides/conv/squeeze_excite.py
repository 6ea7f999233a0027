"""Squeeze and excitation: an image's channels times gates that an MLP makes of their means (arXiv 1709.01507)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
import triton
import triton.language as tl

from fastkernels.core.assemble import filled, load, make, takes
from fastkernels.core.dispatch import Provider, define
from fastkernels.core.spec import Axis, Case, OpSpec, Scalar, Tensor, fan_in
from fastkernels.overrides.conv.channel_sums import BLOCK_T, block_of, channel_sums
from fastkernels.overrides.conv.epilogue import CODES, activate, activated, check_activation, dense
from fastkernels.overrides.conv.spatial import unsupported
from fastkernels.overrides.kit.launch import cdiv, next_power_of_2
from fastkernels.overrides.kit.overlap import follow, launch_kernel
from fastkernels.overrides.kit.rows import unsupported_vector

T = torch.Tensor


def reference(
    x: T,
    reduce_weight: T,
    expand_weight: T,
    reduce_bias: T | None = None,
    expand_bias: T | None = None,
    activation: str = "relu",
    gate: str = "sigmoid",
) -> T:
    """x: [B, C, H, W]; reduce_weight: [R, C]; expand_weight: [C, R]; reduce_bias: [R]; expand_bias: [C].

    y = x * gate(expand(activation(reduce(mean of x over H and W)))); activation, gate: see conv/epilogue.py. Returns
    [B, C, H, W] in x's dtype, computed in at least float32, rounded once.
    """
    _check(x, reduce_weight, expand_weight, reduce_bias, expand_bias, activation, gate)
    acc = torch.promote_types(x.dtype, torch.float32)
    h = x.to(acc)
    biases = [None if b is None else b.to(acc) for b in (reduce_bias, expand_bias)]
    squeezed = activated(F.linear(h.mean((2, 3)), reduce_weight.to(acc), biases[0]), activation)
    gates = activated(F.linear(squeezed, expand_weight.to(acc), biases[1]), gate)
    return (h * gates[:, :, None, None]).to(x.dtype)


def _check(
    x: T, reduce_weight: T, expand_weight: T, reduce_bias: T | None, expand_bias: T | None, activation: str,
    gate: str,
) -> None:  # fmt: skip
    for function in (activation, gate):
        check_activation("squeeze_excite", function)
    if x.dim() != 4 or reduce_weight.dim() != 2 or reduce_weight.shape[1] != x.shape[1]:
        raise ValueError(
            f"squeeze_excite: x {tuple(x.shape)} must be [B, C, H, W], reduce_weight {tuple(reduce_weight.shape)}"
            " [R, C]"
        )
    narrow, channels = reduce_weight.shape
    if expand_weight.shape != (channels, narrow):
        raise ValueError(
            f"squeeze_excite: expand_weight must be {(channels, narrow)}, got {tuple(expand_weight.shape)}"
        )
    for name, bias, size in (("reduce_bias", reduce_bias, narrow), ("expand_bias", expand_bias, channels)):
        if bias is not None and bias.shape != (size,):
            raise ValueError(f"squeeze_excite: {name} must be [{size}], got {tuple(bias.shape)}")


@triton.jit
def _squeeze_kernel(
    sums_ptr, w_ptr, b_ptr, out_ptr, parts, C, R, T,
    HAS_B: tl.constexpr, CODE: tl.constexpr, BLOCK_R: tl.constexpr, BLOCK_C: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    follow(OVERLAP)
    image = tl.program_id(0).to(tl.int64)
    rows = tl.program_id(1) * BLOCK_R + tl.arange(0, BLOCK_R)
    acc = tl.zeros((BLOCK_R, BLOCK_C), dtype=tl.float32)
    for begin in range(0, C, BLOCK_C):
        cols = begin + tl.arange(0, BLOCK_C)
        total = tl.zeros((BLOCK_C,), dtype=tl.float32)
        for part in range(parts):
            total += tl.load(sums_ptr + (image * parts + part) * C + cols, mask=cols < C, other=0.0)
        known = (rows < R)[:, None] & (cols < C)[None, :]
        w = tl.load(w_ptr + rows[:, None] * C + cols[None, :], mask=known, other=0.0)
        acc += w.to(tl.float32) * (total / T)[None, :]
    y = tl.sum(acc, axis=1)
    if HAS_B:
        y += tl.load(b_ptr + rows, mask=rows < R, other=0.0).to(tl.float32)
    tl.store(out_ptr + image * R + rows, activate(y, CODE), mask=rows < R)


@triton.jit
def _excite_kernel(
    x_ptr, hidden_ptr, w_ptr, b_ptr, out_ptr, C, R, T, n_tiles, stride_b, stride_t, stride_c,
    HAS_B: tl.constexpr, CODE: tl.constexpr, BLOCK_R: tl.constexpr, BLOCK_T: tl.constexpr, BLOCK_C: tl.constexpr,
    OVERLAP: tl.constexpr,
):  # fmt: skip
    follow(OVERLAP)
    image = (tl.program_id(0) // n_tiles).to(tl.int64)
    t = (tl.program_id(0) % n_tiles).to(tl.int64) * BLOCK_T + tl.arange(0, BLOCK_T)
    cols = tl.program_id(1) * BLOCK_C + tl.arange(0, BLOCK_C)
    acc = tl.zeros((BLOCK_C, BLOCK_R), dtype=tl.float32)
    for begin in range(0, R, BLOCK_R):
        rows = begin + tl.arange(0, BLOCK_R)
        known = (cols < C)[:, None] & (rows < R)[None, :]
        w = tl.load(w_ptr + cols[:, None] * R + rows[None, :], mask=known, other=0.0)
        h = tl.load(hidden_ptr + image * R + rows, mask=rows < R, other=0.0)
        acc += w.to(tl.float32) * h[None, :]
    gate = tl.sum(acc, axis=1)
    if HAS_B:
        gate += tl.load(b_ptr + cols, mask=cols < C, other=0.0).to(tl.float32)
    gate = activate(gate, CODE)
    known = (t < T)[:, None] & (cols < C)[None, :]
    at = image * stride_b + t[:, None] * stride_t + cols.to(tl.int64)[None, :] * stride_c
    x = tl.load(x_ptr + at, mask=known, other=0.0).to(tl.float32)
    tl.store(out_ptr + at, (x * gate[None, :]).to(out_ptr.dtype.element_ty), mask=known)


def _supports_triton(
    x: T,
    reduce_weight: T,
    expand_weight: T,
    reduce_bias: T | None = None,
    expand_bias: T | None = None,
    *_: object,
) -> str | None:
    named = {"reduce_weight": reduce_weight, "expand_weight": expand_weight, "reduce_bias": reduce_bias,
             "expand_bias": expand_bias}  # fmt: skip
    return unsupported(x) or next((why for n, t in named.items() if (why := unsupported_vector(t, n))), None)


def _triton(
    x: T, reduce_weight: T, expand_weight: T, reduce_bias: T | None = None, expand_bias: T | None = None,
    activation: str = "relu", gate: str = "sigmoid",
) -> T:  # fmt: skip
    _check(x, reduce_weight, expand_weight, reduce_bias, expand_bias, activation, gate)
    given = dense(x)
    out = torch.empty_like(given)
    if out.numel() == 0:
        return out
    batch, channels, places = *x.shape[:2], x.shape[2] * x.shape[3]
    narrow = reduce_weight.shape[0]
    tokens = given.flatten(2).transpose(1, 2)  # [B, T, C], a view
    sums = channel_sums(tokens)
    hidden = torch.empty(batch, narrow, dtype=torch.float32, device=x.device)
    launch_kernel(
        _squeeze_kernel, (batch, cdiv(narrow, 8)),
        sums, reduce_weight, reduce_bias, hidden, sums.shape[1], channels, narrow, places,
        HAS_B=reduce_bias is not None, CODE=CODES[activation], BLOCK_R=8, BLOCK_C=min(256, next_power_of_2(channels)),
        num_warps=4, any_grid=False,
    )  # fmt: skip
    tiles, block = cdiv(places, BLOCK_T), block_of(channels)
    launch_kernel(
        _excite_kernel, (batch * tiles, cdiv(channels, block)),
        given, hidden, expand_weight, expand_bias, out, channels, narrow, places, tiles, *tokens.stride(),
        HAS_B=expand_bias is not None, CODE=CODES[gate], BLOCK_R=min(32, next_power_of_2(narrow)), BLOCK_T=BLOCK_T,
        BLOCK_C=block, num_warps=4, any_grid=False,
    )  # fmt: skip
    return out


def _torch(
    x: T, reduce_weight: T, expand_weight: T, reduce_bias: T | None = None, expand_bias: T | None = None,
    activation: str = "relu", gate: str = "sigmoid",
) -> T:  # fmt: skip
    _check(x, reduce_weight, expand_weight, reduce_bias, expand_bias, activation, gate)
    squeezed = activated(F.linear(x.mean((2, 3)), reduce_weight, reduce_bias), activation)
    gates = activated(F.linear(squeezed, expand_weight, expand_bias), gate)
    return dense(x) * gates[:, :, None, None]


squeeze_excite = define(
    "squeeze_excite(Tensor x, Tensor reduce_weight, Tensor expand_weight, Tensor? reduce_bias=None, Tensor?"
    ' expand_bias=None, str activation="relu", str gate="sigmoid") -> Tensor',
    fake=lambda x, *args, **kwargs: torch.empty_like(dense(x)),
    providers=(
        Provider("triton", _triton, supports=_supports_triton),
        Provider("torch", _torch, devices=("cpu",)),
        Provider("reference", lambda *args: dense(reference(*args)), devices=("cuda", "cpu")),
    ),
)


def _build(cls: type, args: list[Any]) -> Callable[[], Any]:
    x, reduce, expand, reduce_bias, expand_bias, activation, gate = filled(
        args, 7, None, None, "relu", "sigmoid"
    )
    first, second = ("fc1", "fc2") if takes(cls, "rd_divisor") else ("conv_reduce", "conv_expand")
    options: dict[str, Any] = {} if reduce_bias is not None or first != "fc1" else {"bias": False}
    module = make(
        cls, x, x.shape[1], rd_channels=len(reduce), act_layer=activation, gate_layer=gate, **options
    )
    load(module, {
        f"{first}.weight": reduce[:, :, None, None], f"{first}.bias": reduce_bias,
        f"{second}.weight": expand[:, :, None, None], f"{second}.bias": expand_bias,
    })  # fmt: skip
    return lambda: module(x)


def _case(name: str, tag: str, sizes: tuple[int, ...], dtype: str = "bfloat16", weight: float = 1,
          **dims: object) -> Case:  # fmt: skip
    names = ("batch", "channels", "rows", "columns", "narrow")
    return Case(name, dict(zip(names, sizes, strict=True)) | dims, dtype, weight, (tag,))


SPEC = OpSpec(
    name="squeeze_excite",
    level=2,
    reference=reference,
    op=squeeze_excite,
    cases=(  # EfficientNetV2 rw_m at 320 px
        _case("efficient_20", "model", (8, 1152, 20, 20, 48), weight=18, activation="silu"),
        _case("efficient_10", "model", (8, 1968, 10, 10, 82), weight=24, activation="silu"),
        _case("efficient_10_1", "model", (1, 1968, 10, 10, 82), weight=24, activation="silu"),
        _case("one", "odd", (1, 1, 1, 1, 1), "float32"),
        _case("odd_63", "odd", (2, 17, 9, 7, 5), "float32", activation="silu"),
        _case("odd_33", "odd", (1, 65, 3, 11, 33), activation="silu"),
        _case("hard", "odd", (2, 24, 5, 5, 8), "float16", gate="hard_sigmoid"),
        _case("plain", "odd", (1, 30, 4, 2, 9), "float32", affine=False),
        _case("parts", "odd", (1, 5, 20, 17, 3), "float16"),
        _case("row", "odd", (3, 40, 1, 13, 7)),
    ),
    arguments=(
        Tensor("x", "batch channels rows columns"),
        Tensor("reduce_weight", "narrow channels", values=fan_in),
        Tensor("expand_weight", "channels narrow", values=fan_in),
        Tensor("reduce_bias", "narrow", when="affine", std=0.5),
        Tensor("expand_bias", "channels", when="affine", std=0.5),
        Scalar("activation"),
        Scalar("gate"),
    ),
    outputs=(Tensor("out", "batch channels rows columns"),),
    axes={
        "batch": Axis.per_call(),
        "channels": Axis.width(),
        "rows": Axis.per_call(),
        "columns": Axis.per_call(),
        "narrow": Axis.width(),
        "affine": Axis.option(True, stated=True),
        "activation": Axis.option("relu"),
        "gate": Axis.option("sigmoid"),
    },
    build=_build,
    flops="2 * batch * channels * rows * columns + 4 * batch * channels * narrow",
    activations=("x",),
)  # fmt: skip
