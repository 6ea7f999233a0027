"""FP8 linear layer, y = (x s_x) (W s_W)^T + b: float8 e4m3 with scales per tensor, token and row, or block."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from types import SimpleNamespace
from typing import Any

import torch

from fastkernels.core.case import Case, Tolerance
from fastkernels.core.declaration import Axis, Call, Scalar, Tensor
from fastkernels.core.dispatch import Key, Provider, define
from fastkernels.core.expressions import Expr
from fastkernels.core.shapes import dtype_name
from fastkernels.core.spec import OpSpec
from fastkernels.overrides.kit.fp8 import FP8, empty_outputs
from fastkernels.overrides.linear import linear_fp8_libraries as libraries
from fastkernels.overrides.linear.kernels import tiled_linear_cuda, wgmma_linear_fp8_cuda
from fastkernels.overrides.linear.kernels.linear_fp8_scales import (
    BLOCK,
    ROW,
    check,
    expanded,
    granularity,
    shape_of,
)
from fastkernels.overrides.linear.kernels.linear_fp8_triton import linear_fp8_triton, supports_triton
from fastkernels.overrides.linear.kernels.wgmma_linear_fp8_cuda import linear_fp8_wgmma, supports_wgmma_fp8
from fastkernels.overrides.linear.selection import propose_linear_fp8


def reference(
    x: torch.Tensor,
    weight: torch.Tensor,
    x_scale: torch.Tensor,
    weight_scale: torch.Tensor,
    bias: torch.Tensor | None = None,
    out_dtype: torch.dtype | None = None,
) -> torch.Tensor:
    """x: [..., K] and weight: [N, K] in float8 e4m3. Returns [..., N] in out_dtype, bfloat16 if that is None.

    x_scale, weight_scale  float32: per tensor (one value each), per token [..., 1] and/or per row of the weight
                           ([N] or [N, 1]), or per block: [..., K / 128] and [N / 128, K / 128], rounded up
    bias                   [N]
    With x in float32 or float64 the result keeps that dtype, unrounded. Raises ValueError for other scales.
    """
    kind = check(x, weight, x_scale, weight_scale, bias)
    n, k = weight.shape
    acc = torch.float64 if x.dtype == torch.float64 else torch.float32
    rows = x.reshape(-1, k).to(acc)
    y = rows * expanded(x_scale.to(acc), rows.shape[0], k, kind, 1)
    y = y @ (weight.to(acc) * expanded(weight_scale.to(acc), n, k, kind, BLOCK)).t()
    if bias is not None:
        y = y + bias.to(acc)
    y = y.reshape(*x.shape[:-1], n)
    return y.to(out_dtype or torch.bfloat16) if x.dtype == FP8 else y


def _fake(
    x: torch.Tensor, weight: torch.Tensor, x_scale: torch.Tensor, weight_scale: torch.Tensor,
    bias: torch.Tensor | None = None, out_dtype: torch.dtype | None = None,
) -> torch.Tensor:  # fmt: skip
    return torch.empty((*x.shape[:-1], weight.shape[0]), dtype=out_dtype or torch.bfloat16, device=x.device)


def _key(
    x: torch.Tensor, weight: torch.Tensor, x_scale: torch.Tensor, weight_scale: torch.Tensor,
    bias: torch.Tensor | None = None, out_dtype: torch.dtype | None = None,
) -> tuple[tuple[int, int, int, torch.dtype], tuple[int]]:  # fmt: skip
    n, k = weight.shape
    kind = granularity(x, weight, x_scale, weight_scale)
    return (n, k, kind, out_dtype or torch.bfloat16), (x.numel() // k if k else 0,)


def _key_dims(N: int, K: int, block: int, out_dtype: Any, M: int) -> dict[str, Any]:
    name = out_dtype if isinstance(out_dtype, str) else dtype_name(out_dtype)
    dims = {"tokens": (M,), "in": K, "out": N, "block": block}
    return dims if name == "bfloat16" else {**dims, "out_dtype": name}


def _fits(
    params: dict[str, Any], x: torch.Tensor, weight: torch.Tensor, *rest: torch.Tensor | torch.dtype | None
) -> bool:
    k = weight.shape[1]
    return wgmma_linear_fp8_cuda.fits(params, x.numel() // k if k else 0, k)


def _supports_ours(*call: Any) -> str | None:
    return supports_wgmma_fp8(*call) or libraries.left_to_deepgemm(*call)


linear_fp8 = define(
    "linear_fp8(Tensor x, Tensor weight, Tensor x_scale, Tensor weight_scale, Tensor? bias=None,"
    " ScalarType? out_dtype=None) -> Tensor",
    fake=_fake,
    providers=(
        Provider(  # up to 64 tokens; up to 32 with block scales where DeepGEMM is installed
            "cuda-wgmma-fp8", linear_fp8_wgmma, supports=_supports_ours,
            params=wgmma_linear_fp8_cuda.PARAMS, fits=_fits,
        ),
        Provider(  # block scales
            "deepgemm", libraries.linear_fp8_deepgemm, module=libraries.DEEP_GEMM,
            supports=libraries.supports_deepgemm,
        ),
        Provider(
            "flashinfer", libraries.linear_fp8_flashinfer, module="flashinfer", supports=libraries.supports_flashinfer
        ),
        # The CUTLASS kernel of the installed host. Either stands for the other in a tuned table.
        Provider(
            "cutlass", libraries.linear_fp8_cutlass, module="vllm", supports=libraries.supports_cutlass,
            twin="sgl_kernel",
        ),
        Provider(
            "sgl_kernel", libraries.linear_fp8_sgl, module="sgl_kernel", supports=libraries.supports_sgl,
            twin="cutlass",
        ),
        Provider(  # more tokens, block scales
            "cuda-tiled-fp8", tiled_linear_cuda.linear_fp8_tiled, supports=tiled_linear_cuda.supports_tiled_fp8
        ),
        Provider("triton", linear_fp8_triton, supports=supports_triton),
        Provider("cublas", libraries.linear_fp8_cublas, supports=libraries.supports_cublas),
        Provider("reference", reference, devices=("cuda", "cpu")),
    ),
    key=Key(
        # block: the granularity of the scales: 0 per tensor, 1 per token or row, 128 per block
        shape=("N", "K", "block", "out_dtype"),
        sizes=("M",),
        of=_key,
        dims=_key_dims,
        module=shape_of,
        propose=propose_linear_fp8,
        # Nothing is proposed for more than 64 tokens: there the host's kernel runs, whatever the order above.
        points=((1,), (8,), (32,), (16,), (64,), (4,), (2,), (256,), (1024,), (4096,), (16384,)),
    ),
)  # fmt: skip


def _x_scale(call: Call, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    """Scales for which tokens of x have variance 1; block scales in quantize_fp8's layout for the hosts' kernels."""
    scale = (call.rand(*shape) + 0.5) * 0.01
    return (
        empty_outputs(shape, scale.device, False, 1, True, True)[1].copy_(scale)
        if call["block"] == BLOCK
        else scale
    )


def _weight_scale(call: Call, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    """Scales for which weights have variance 1 / K: outputs of about 1, as in a model."""
    return (call.rand(*shape) + 0.5) * (0.01 / math.sqrt(max(call["in"], 1)))


def _build(cls: type, args: list[Any]) -> Callable[[], Any]:
    x, weight, x_scale, weight_scale, bias, out_dtype = args
    kind = granularity(x, weight, x_scale, weight_scale)
    if kind == BLOCK:
        raise ValueError(f"{cls.__name__} has no block scales")
    if hasattr(cls, "apply_weights"):
        if kind != ROW:
            raise ValueError(f"{cls.__name__} needs one scale per row of the weight")
        scheme = cls(SimpleNamespace(strategy="channel", block_structure=None), False)
        layer = SimpleNamespace(weight=weight.t(), weight_scale=weight_scale.reshape(-1, 1))
        return partial(scheme.apply_weights, layer, (x, x_scale, out_dtype), bias)
    kernel = cls(None, ("weight", "weight_scale", "input_scale", "input_scale_ub"))
    scales = {"As": x_scale.reshape(-1, 1) if x_scale.numel() > 1 else x_scale, "Bs": weight_scale}
    shape = [*x.shape[:-1], weight.shape[0]]
    return partial(
        kernel.apply_scaled_mm, A=x.view(-1, x.shape[-1]), B=weight.t(), out_dtype=out_dtype or torch.bfloat16,
        bias=bias, output_shape=shape, **scales,
    )  # fmt: skip


def _case(
    name: str, m: int, k: int, n: int, block: int, weight: float = 1.0, tag: str = "model", **more: Any
) -> Case:
    dims = {"tokens": (m,), "in": k, "out": n, "block": block, **more}
    return Case(name, dims, "float8_e4m3fn", weight, (tag,))


_odd: Callable[..., Case] = partial(_case, tag="odd")

SPEC = OpSpec(
    name="linear_fp8",
    level=1,
    by_default=True,
    reference=reference,
    op=linear_fp8,
    cases=(
        # Llama-3.1-8B with scales per token and row, as in compressed-tensors and SGLang
        _case("qkv_32", 32, 4096, 6144, 1, 32),
        _case("o_32", 32, 4096, 4096, 1, 32),
        _case("gate_up_32", 32, 4096, 28672, 1, 32),
        _case("down_32", 32, 14336, 4096, 1, 32),
        _case("gate_up_1", 1, 4096, 28672, 1, 32),
        _case("gate_up_8k", 8192, 4096, 28672, 1, 1),
        # One tensor-parallel half of it (TP = 2), with static scales per tensor
        _case("qkv_tp2_8", 8, 4096, 3072, 0, 32),
        _case("down_tp2_8", 8, 7168, 4096, 0, 32),
        # Qwen3-8B-FP8, with block scales
        _case("qwen_qkv_1", 1, 4096, 6144, 128, 36),
        _case("qwen_gate_up_32", 32, 4096, 24576, 128, 36),
        _case("qwen_down_32", 32, 12288, 4096, 128, 36),
        _case("qwen_down_tp2_8", 8, 6144, 4096, 128, 36),
        _case("qwen_gate_up_4k", 4096, 4096, 24576, 128, 1),
        _odd("tokens_63", 63, 272, 130, 1, bias=True),
        _odd("tensor_7", 7, 144, 48, 0, out_dtype="float16", bias=True),
        _odd("blocks_33", 33, 384, 272, 128),
        _odd("blocks_cut", 5, 576, 200, 128, out_dtype="float16"),
        _odd("blocks_bias", 70, 256, 136, 128, bias=True),
        _odd("one", 1, 1, 1, 0),
        _odd("narrow", 3, 1000, 5, 1),
        Case(
            "batched", {"tokens": (3, 5), "in": 130, "out": 17, "block": 1}, "float8_e4m3fn", tags=("odd",)
        ),
        _odd("empty", 0, 128, 33, 1),
    ),
    arguments=(
        Tensor("x", "*tokens in_", std=100),
        Tensor("weight", "out in_", std=100),
        Tensor("x_scale", {"block == 128": "*tokens cdiv(in_,128)", "block == 1": "*tokens 1", "": "1"}, "float32",
               values=_x_scale),
        Tensor("weight_scale", {"block == 128": "cdiv(out,128) cdiv(in_,128)", "block == 1": "out", "": "1"}, "float32",
               values=_weight_scale),
        Tensor("bias", "out", "result", when="bias"),
        Scalar("out_dtype", default=None, dtype=True),
    ),
    outputs=(Tensor("out", "*tokens out", "result"),),
    axes={
        "tokens": Axis.per_call(), "in": Axis.width(), "out": Axis.width(),
        "block": Axis.option(read=lambda a: granularity(a.x, a.weight, a.x_scale, a.weight_scale)),
        "result": Axis.dtype(Expr("out_dtype or 'bfloat16'")),
    },
    flops="2 * prod(tokens) * in_ * out",
    build=_build,
    activations=("x_scale",),  # x and weight are quantized: only scales may have any magnitude
    # Hopper's tensor cores accumulate float8 products with 14 bits, and CUTLASS sums all of K there.
    tolerance={"float8_e4m3fn": Tolerance(4e-2, 4e-2)},
    calls=("quantize_fp8",),
    baseline="cutlass",
)  # fmt: skip
