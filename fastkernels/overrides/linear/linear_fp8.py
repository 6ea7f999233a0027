"""Linear layer of float8 e4m3 numbers, y = (x s_x) (W s_W)^T + b: scales of tensors, of tokens and rows, of blocks."""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Sequence
from functools import partial
from types import SimpleNamespace
from typing import Any

import torch
from torch import nn

from fastkernels.core.dispatch import Key, Provider, define
from fastkernels.core.shapes import drawn, dtype_name, optional, varied
from fastkernels.core.spec import Case, OpSpec, Target, Tolerance
from fastkernels.overrides.kit.fp8 import FP8, FP8_MAX, empty_outputs, refuse
from fastkernels.overrides.linear import linear_fp8_calls as production
from fastkernels.overrides.linear import wgmma_linear_fp8_cuda as _wgmma_linear_fp8_cuda
from fastkernels.overrides.linear.linear_fp8_flashinfer import linear_fp8_flashinfer, supports_flashinfer
from fastkernels.overrides.linear.linear_fp8_scales import (
    BLOCK,
    ROW,
    TENSOR,
    blocks,
    check,
    column,
    expanded,
    granularity,
    holder_of,
)
from fastkernels.overrides.linear.linear_fp8_sglang import Apply, SGLangScheme, by_table, sglang_shape
from fastkernels.overrides.linear.linear_fp8_triton import linear_fp8_triton, supports_triton
from fastkernels.overrides.linear.wgmma_linear_fp8_cuda import linear_fp8_wgmma, supports_wgmma_fp8
from fastkernels.overrides.quant.quantize_fp8 import quantize_fp8


def reference(
    x: torch.Tensor,
    weight: torch.Tensor,
    x_scale: torch.Tensor,
    weight_scale: torch.Tensor,
    bias: torch.Tensor | None = None,
    out_dtype: torch.dtype | None = None,
) -> torch.Tensor:
    """x: [..., K] and weight: [N, K] in float8 e4m3. Returns [..., N] in out_dtype, bfloat16 if that is None.

    x_scale, weight_scale  float32: one value each; one a token [..., 1] and/or one a row of the weight [N] or [N, 1];
                           or of blocks: [..., K / 128] and [N / 128, K / 128], rounded up
    bias                   [N]
    x in float32 or float64: computed in that, and not rounded. Raises ValueError for scales that are none of these.
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


def _fits(
    params: dict[str, Any], x: torch.Tensor, weight: torch.Tensor, *rest: torch.Tensor | torch.dtype | None
) -> bool:
    k = weight.shape[1]
    return _wgmma_linear_fp8_cuda.fits(params, x.numel() // k if k else 0, k)


def _supports_ours(*call: Any) -> str | None:
    return supports_wgmma_fp8(*call) or production.left_to_deepgemm(*call)


def _shape_of(module: nn.Module) -> tuple[int, int, int, torch.dtype] | None:
    """Of a host's layer whose kernel is CUTLASS's, or that has SGLang's scheme: its weight is [K, N]."""
    holder = holder_of(module)
    weight, scale = getattr(module, "weight", None), getattr(module, "weight_scale", None)
    if weight is None or scale is None or weight.dim() != 2:
        return None
    if holder is None:
        return sglang_shape(module)
    config = holder.fp8_linear.config
    per_tensor = scale.numel() == 1 and config.activation_quant_key.scale.group_shape.is_per_tensor()
    return weight.shape[1], weight.shape[0], TENSOR if per_tensor else ROW, config.out_dtype or torch.bfloat16


linear_fp8 = define(
    "linear_fp8(Tensor x, Tensor weight, Tensor x_scale, Tensor weight_scale, Tensor? bias=None,"
    " ScalarType? out_dtype=None) -> Tensor",
    fake=_fake,
    providers=(
        Provider(  # to 64 tokens; with scales of blocks to 32 where DeepGEMM is
            "cuda-wgmma-fp8", linear_fp8_wgmma, supports=_supports_ours,
            params=_wgmma_linear_fp8_cuda.PARAMS, fits=_fits,
        ),
        Provider(  # scales of blocks
            "deepgemm", production.linear_fp8_deepgemm, module=production.DEEP_GEMM,
            supports=production.supports_deepgemm,
        ),
        Provider("flashinfer", linear_fp8_flashinfer, module="flashinfer", supports=supports_flashinfer),
        # CUTLASS of whichever host is there: a table made where the other one was means this one.
        Provider(
            "cutlass", production.linear_fp8_cutlass, module="vllm", supports=production.supports_cutlass,
            twin="sgl_kernel",
        ),
        Provider(
            "sgl_kernel", production.linear_fp8_sgl, module="sgl_kernel", supports=production.supports_sgl,
            twin="cutlass",
        ),
        Provider("triton", linear_fp8_triton, supports=supports_triton),
        Provider("cublas", production.linear_fp8_cublas, supports=production.supports_cublas),
        Provider("reference", reference, devices=("cuda", "cpu")),
    ),
    key=Key(
        # block: 0 for one scale a tensor, 1 for tokens or rows, 128 for blocks
        shape=("N", "K", "block", "out_dtype"),
        sizes=("M",),
        of=_key,
        dims=lambda N, K, block, out_dtype, M: _sizes((M,), K, N, block, out_dtype),
        module=_shape_of,
    ),
)  # fmt: skip


class VllmCutlassFP8ScaledMMLinearKernel:
    """vllm.model_executor.kernels.linear.scaled_mm.cutlass.CutlassFP8ScaledMMLinearKernel: the product of a layer.

    c and layer_param_names are the host's; quantizing x is its base class's, and stays so.
    """

    live_methods = ("apply_scaled_mm",)

    @staticmethod
    def supports(module: Any) -> str | None:
        """None if our product serves this layer of the host, else the reason."""
        kernel, weight = holder_of(module).fp8_linear, module.weight
        if weight.dtype != FP8:
            return f"weight is {weight.dtype}"
        given = getattr(module, "input_size_per_partition", weight.shape[0]), kernel.logical_output_size
        if tuple(weight.shape) != given:
            return f"the host padded its weight from {given} to {tuple(weight.shape)}"
        return None

    def __init__(self, c: Any, layer_param_names: Sequence[str]) -> None:
        self.config, self.layer_param_names = c, layer_param_names

    def apply_scaled_mm(
        self,
        *,
        A: torch.Tensor,
        B: torch.Tensor,
        out_dtype: torch.dtype,
        As: torch.Tensor,
        Bs: torch.Tensor,
        bias: torch.Tensor | None,
        output_shape: list,
    ) -> torch.Tensor:
        """A [M, K] times B [K, N], whose columns are contiguous; scales of tensors, or of A's rows and B's columns."""
        # Bs [N, 1], as it mostly is: the compiler drops this view, and the kernel's call needs none.
        return linear_fp8(A, B.t(), As, Bs.reshape(-1, 1), bias, out_dtype).view(*output_shape)


def vllm_cutlass_scaled_mm(
    a: torch.Tensor, b: torch.Tensor, scale_a: torch.Tensor, scale_b: torch.Tensor, out_dtype: torch.dtype,
    bias: torch.Tensor | None = None,
) -> torch.Tensor:  # fmt: skip
    """vllm._custom_ops.cutlass_scaled_mm: a [..., K] times b [K, N], whose columns are contiguous, in float8 e4m3.

    scale_b: [1], [N, 1] or [1, N], or of blocks, [K / 128, N / 128].
    """
    of_blocks = tuple(scale_b.shape) == (blocks(b.shape[0]), blocks(b.shape[1]))
    scale = scale_b.t() if of_blocks and scale_b.numel() > 1 else scale_b.reshape(-1)
    return linear_fp8(a, b.t(), scale_a, scale, bias, out_dtype)


class SGLangCompressedTensorsW8A8Fp8(SGLangScheme):
    """sglang...compressed_tensors_w8a8_fp8.CompressedTensorsW8A8Fp8: a linear layer with a scale a row of its weight.

    Raises ValueError for weights with one scale, or scales of blocks, and for scales of x that are given.
    """

    @staticmethod
    def by_table(theirs: Apply, ours: Apply) -> Apply:
        """What a layer that a tuned table has put in runs."""
        return by_table(linear_fp8, quantize_fp8, theirs, ours)

    def apply_weights(self, layer: Any, x: Any, bias: torch.Tensor | None = None) -> torch.Tensor:
        """x: [..., K], or a tuple of values, scales and perhaps a dtype if it is float8 already. Returns [..., N].

        layer.weight: [K, N], whose columns are contiguous; layer.weight_scale: [N, 1].
        """
        if isinstance(x, tuple):
            q, scale, out_dtype = x[0], x[1], x[2] if len(x) > 2 else None
        else:  # a token of zeros has scale 0, as the host's
            (q, scale), out_dtype = quantize_fp8(x, None, -1, None, 0.0), x.dtype
        return linear_fp8(q, layer.weight.t(), scale, column(layer.weight_scale), bias, out_dtype)


def sglang_fp8_scaled_mm(
    mat_a: torch.Tensor, mat_b: torch.Tensor, scales_a: torch.Tensor, scales_b: torch.Tensor, out_dtype: torch.dtype,
    bias: torch.Tensor | None = None,
) -> torch.Tensor:  # fmt: skip
    """sglang.kernels.ops.gemm.fp8_scaled_mm: mat_a [M, K] times mat_b [K, N], scales of each row and each column."""
    return linear_fp8(mat_a, mat_b.t(), scales_a, scales_b.reshape(-1), bias, out_dtype)


def vllm_w8a8_triton_block_scaled_mm(
    A: torch.Tensor, B: torch.Tensor, As: torch.Tensor, Bs: torch.Tensor, block_size: list[int],
    output_dtype: torch.dtype = torch.float16,
) -> torch.Tensor:  # fmt: skip
    """vllm...quantization.utils.fp8_utils.w8a8_triton_block_scaled_mm: A [..., K] times B [N, K] transposed.

    Raises ValueError for blocks that are not 128 x 128.
    """
    if tuple(block_size) != (BLOCK, BLOCK):
        refuse("w8a8_triton_block_scaled_mm", block_size=block_size)
    return linear_fp8(A, B, As, Bs, None, output_dtype)


def _sizes(tokens: tuple[int, ...], k: int, n: int, block: int, out_dtype: Any) -> dict[str, Any]:
    name = out_dtype if isinstance(out_dtype, str) else dtype_name(out_dtype)
    return {
        "tokens": tokens, "in": k, "out": n, "block": block,
        **optional(out_dtype=None if name == "bfloat16" else name),
    }  # fmt: skip


def _inputs(case: Case, device: str, generator: torch.Generator) -> list:
    d = case.dims
    tokens, k, n, kind = d["tokens"], d["in"], d["out"], d["block"]
    out_dtype = getattr(torch, d["out_dtype"]) if "out_dtype" in d else None

    def scales(*size: int) -> torch.Tensor:  # such that neither infinity nor nothing comes of a product
        return torch.rand(*size, generator=generator, device=device) + 0.5

    def values(*size: int) -> torch.Tensor:
        found = torch.randn(*size, generator=generator, device=device) * 100
        return found.clamp_(-FP8_MAX, FP8_MAX).to(FP8)

    x, weight = values(*tokens, k), values(n, k)
    if kind == BLOCK:  # as quantize_fp8 lays them out for the hosts' kernels
        x_scale = empty_outputs((*tokens, blocks(k)), x.device, False, 1, True, True)[1]
        x_scale = x_scale.copy_(scales(*tokens, blocks(k)))
        weight_scale = scales(blocks(n), blocks(k))
    elif kind == ROW:
        x_scale, weight_scale = scales(*tokens, 1), scales(n)
    else:
        x_scale, weight_scale = scales(1), scales(1)
    # Weights of variance 1 / K, tokens of variance 1: outputs of about 1, as in a model.
    x_scale.mul_(0.01)
    weight_scale.mul_(0.01 / math.sqrt(max(k, 1)))
    bias = torch.randn(n, generator=generator, device=device) if d.get("bias") else None
    return [
        x, weight, x_scale, weight_scale, None if bias is None else bias.to(out_dtype or torch.bfloat16), out_dtype,
    ]  # fmt: skip


def _dims(
    x: torch.Tensor,
    weight: torch.Tensor,
    x_scale: torch.Tensor,
    weight_scale: torch.Tensor,
    bias: torch.Tensor | None = None,
    out_dtype: torch.dtype | None = None,
) -> dict[str, Any]:
    (n, k, kind, dtype), _ = _key(x, weight, x_scale, weight_scale, bias, out_dtype)
    return {**_sizes(tuple(x.shape[:-1]), k, n, kind, dtype), **optional(bias=bias is not None)}


def _bytes(case: Case) -> int:
    d = case.dims
    m, k, n, kind = math.prod(d["tokens"]), d["in"], d["out"], d["block"]
    scales = {BLOCK: m * blocks(k) + blocks(n) * blocks(k), ROW: m + n}.get(kind, 2)
    return m * k + n * k + 4 * scales + 2 * (m * n + (n if d.get("bias") else 0))


def _vary(case: Case, rng: random.Random) -> Case:
    return varied(case, lambda: drawn(case, rng, ("tokens",), ("in", "out")), SPEC.bytes_moved, SPEC.flops)


def _build(cls: type, args: list[Any]) -> Callable[[], Any]:
    x, weight, x_scale, weight_scale, bias, out_dtype = args
    kind = granularity(x, weight, x_scale, weight_scale)
    if kind == BLOCK:
        raise ValueError(f"{cls.__name__} has no scales of blocks")
    if hasattr(cls, "apply_weights"):
        if kind != ROW:
            raise ValueError(f"{cls.__name__} has a scale for each row of the weight")
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

_LIVE_SGLANG = (
    "only where a tuned table says that it is faster; elsewhere on CUDA it is SGLang's own kernel. Layers with one"
    " scale for a tensor, with scales of blocks or with a given scale of x are left to the host"
)
_LIVE = "only where a tuned table says that it is faster; elsewhere on CUDA it is the host's own CUTLASS call"
_NOTE = "the hosts' quantized layers choose a kernel when they are made and bind its function: for forks"

SPEC = OpSpec(
    name="linear_fp8",
    level=1,
    reference=reference,
    op=linear_fp8,
    cases=(
        # Llama-3.1-8B: a scale a token and row, as compressed-tensors and SGLang have them.
        _case("qkv_32", 32, 4096, 6144, 1, 32),
        _case("o_32", 32, 4096, 4096, 1, 32),
        _case("gate_up_32", 32, 4096, 28672, 1, 32),
        _case("down_32", 32, 14336, 4096, 1, 32),
        _case("gate_up_1", 1, 4096, 28672, 1, 32),
        _case("gate_up_8k", 8192, 4096, 28672, 1, 1),
        # Given scales, one a tensor, of half of it (TP=2).
        _case("qkv_tp2_8", 8, 4096, 3072, 0, 32),
        _case("down_tp2_8", 8, 7168, 4096, 0, 32),
        # Qwen3-8B in blocks, as Qwen3-8B-FP8 has them.
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
    inputs=_inputs,
    dims_of=_dims,
    vary=_vary,
    build=_build,
    activations=(2,),  # the values are what is quantized: only their scales may be of any size
    bytes_moved=_bytes,
    flops=lambda case: 2 * math.prod(case.dims["tokens"]) * case.dims["in"] * case.dims["out"],
    # Hopper's tensor cores add up float8 with 14 bits, and CUTLASS leaves all of K to them.
    tolerance={"float8_e4m3fn": Tolerance(4e-2, 4e-2)},
    targets=(
        Target(
            "vllm", "vllm.model_executor.kernels.linear.scaled_mm.cutlass:CutlassFP8ScaledMMLinearKernel",
            "VllmCutlassFP8ScaledMMLinearKernel", "kernel", "", False, _LIVE,
        ),
        Target("vllm", "vllm._custom_ops:cutlass_scaled_mm", "vllm_cutlass_scaled_mm", "function", note=_NOTE),
        Target(
            "vllm", "vllm.model_executor.layers.quantization.utils.fp8_utils:w8a8_triton_block_scaled_mm",
            "vllm_w8a8_triton_block_scaled_mm", "function", note=_NOTE,
        ),
        Target(
            "sglang",
            "sglang.srt.layers.quantization.compressed_tensors.schemes.compressed_tensors_w8a8_fp8"
            ":CompressedTensorsW8A8Fp8",
            "SGLangCompressedTensorsW8A8Fp8", "scheme", "", False, _LIVE_SGLANG,
        ),
        Target("sglang", "sglang.kernels.ops.gemm:fp8_scaled_mm", "sglang_fp8_scaled_mm", "function", note=_NOTE),
    ),
    calls=("quantize_fp8",),
    baseline="cutlass",
)  # fmt: skip
