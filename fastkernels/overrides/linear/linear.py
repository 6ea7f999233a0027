"""Unquantized linear layer, y = x W^T + b."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache, partial
from typing import Any

import torch
import torch.nn.functional as F
import triton
import triton.language as tl
from torch import nn

from fastkernels.core.case import Case, Tolerance
from fastkernels.core.declaration import Axis, Tensor
from fastkernels.core.dispatch import ForOthers, Key, Provider, define
from fastkernels.core.spec import OpSpec
from fastkernels.overrides.kit import cpu
from fastkernels.overrides.kit.launch import cdiv
from fastkernels.overrides.linear.kernels import skinny_linear_cuda, skinny_linear_triton, wgmma_linear_cuda
from fastkernels.overrides.linear.kernels.skinny_linear_cuda import linear_cuda, supports_cuda
from fastkernels.overrides.linear.kernels.skinny_linear_triton import linear_skinny, supports_skinny
from fastkernels.overrides.linear.kernels.tiled_linear_cuda import LEAST, linear_tiled, supports_tiled
from fastkernels.overrides.linear.kernels.wgmma_linear_cuda import linear_wgmma, supports_wgmma
from fastkernels.overrides.linear.selection import PROMPTS, propose_linear

MOST = 8192  # tokens; more are multiplied in the same tiles, only more of them


def reference(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    """x: [..., K]; weight: [N, K]; bias: [N] or None. Returns [..., N] in x's dtype."""
    acc = torch.promote_types(x.dtype, torch.float32)
    y = x.to(acc) @ weight.to(acc).t()
    if bias is not None:
        y = y + bias.to(acc)
    return y.to(x.dtype)


@triton.jit
def _linear_kernel(
    x_ptr, w_ptr, b_ptr, out_ptr, M, N, x_stride, w_stride,
    K: tl.constexpr, HAS_BIAS: tl.constexpr, PRECISION: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    # K is a constexpr: a model has only a few values of K, and where BLOCK_K divides K the last block needs no mask.
    # Programs that share a column of weight blocks are neighbours: one reads the weight from memory, the rest from L2.
    rows = tl.program_id(0).to(tl.int64) * BLOCK_M + tl.arange(0, BLOCK_M)
    cols = tl.program_id(1).to(tl.int64) * BLOCK_N + tl.arange(0, BLOCK_N)
    acc = tl.zeros((BLOCK_M, BLOCK_N), dtype=tl.float32)
    for k in range(0, K, BLOCK_K):
        ks = k + tl.arange(0, BLOCK_K)
        x = tl.load(
            x_ptr + rows[:, None] * x_stride + ks[None, :],
            mask=(rows[:, None] < M) & (ks[None, :] < K),
            other=0.0,
        )
        w = tl.load(
            w_ptr + cols[None, :] * w_stride + ks[:, None],
            mask=(cols[None, :] < N) & (ks[:, None] < K),
            other=0.0,
        )
        acc = tl.dot(x, w, acc, input_precision=PRECISION)
    if HAS_BIAS:
        acc += tl.load(b_ptr + cols, mask=cols < N, other=0.0).to(tl.float32)[None, :]
    mask = (rows[:, None] < M) & (cols[None, :] < N)
    tl.store(out_ptr + rows[:, None] * N + cols[None, :], acc.to(out_ptr.dtype.element_ty), mask=mask)


def supports_triton(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> str | None:
    if x.dtype not in (torch.float32, torch.float16, torch.bfloat16):
        return f"dtype {x.dtype} is not float32, float16 or bfloat16"
    if x.dtype == torch.bfloat16 and x.device.type == "cpu":
        return "Triton's interpreter multiplies bfloat16 matrices as integers"
    if weight.dtype != x.dtype:
        return f"weight is {weight.dtype}, x is {x.dtype}"
    if weight.stride(-1) != 1:
        return f"weight has strides {tuple(weight.stride())}: the last dimension must be contiguous"
    if bias is not None and not bias.is_contiguous():
        return f"bias has strides {tuple(bias.stride())}, not contiguous"
    return None


def linear_triton(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    n, k = weight.shape
    rows = x.reshape(-1, k)
    if rows.stride(-1) != 1:
        rows = rows.contiguous()
    m = rows.shape[0]
    out = torch.empty((*x.shape[:-1], n), dtype=x.dtype, device=x.device)
    if m == 0:
        return out
    # float32 blocks take twice the shared memory: 64 x 64 x 32 x 2 x 4 B x 3 stages fits every GPU from sm_80 on.
    block_m = 16 if m <= 16 else 64 if m <= 64 or x.dtype == torch.float32 else 128
    block_n = 64 if m <= 64 or x.dtype == torch.float32 else 128
    block_k = 32 if x.dtype == torch.float32 else 64
    grid = (cdiv(m, block_m), cdiv(n, block_n))
    _linear_kernel[grid](
        rows, weight, bias, out, m, n, rows.stride(0), weight.stride(0), K=k, HAS_BIAS=bias is not None,
        PRECISION="ieee", BLOCK_M=block_m, BLOCK_N=block_n, BLOCK_K=block_k,
        num_warps=8 if block_m == 128 else 4, num_stages=3,
    )  # fmt: skip
    return out


def _torch(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    # cuBLAS on CUDA, oneDNN on the CPU: both accumulate bf16 products in float32 and round once.
    return F.linear(x, weight, bias)


PACKED_ROWS = 32  # more rows read a packed weight no faster
PACKED_FOR = 8  # rows that oneDNN packs a weight for
PACKED_TYPES = (torch.float32, torch.bfloat16)


def pack_weight(weight: torch.Tensor) -> None:
    """Give a weight on the CPU a copy in oneDNN's layout, which linear_onednn then uses for few rows.

    It halves the time of a decode step: 19 instead of 37 ms for all layers of SmolLM2-135M in bfloat16, and takes as
    much memory as the weight again. A change of the weight in place makes the copy unused. Weights of other types, and
    of types that this CPU cannot pack (cpu.packing_unsupported), stay as they are.
    """
    packable = weight.dtype in PACKED_TYPES and not weight.is_inference()
    if packable and cpu.packing_unsupported(weight.dtype) is None:
        packed = torch.ops.mkldnn._reorder_linear_weight(weight.detach(), PACKED_FOR)
        weight.onednn_packed = packed, weight._version  # type: ignore[attr-defined]


@cache
def _product() -> Callable[..., torch.Tensor]:
    return torch.ops.mkldnn._linear_pointwise.default


def linear_onednn(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    packed, version = getattr(weight, "onednn_packed", (None, -1))
    if packed is None or version != weight._version or x.dtype != weight.dtype or torch.is_grad_enabled():
        return F.linear(x, weight, bias)
    rows = x.numel() // weight.shape[1]
    if not 0 < rows <= PACKED_ROWS:
        return F.linear(x, weight, bias)
    # oneDNN compiles and keeps a kernel for each number of rows, so there are only powers of two.
    flat, padding = x if x.dim() == 2 else x.reshape(rows, -1), (1 << (rows - 1).bit_length()) - rows
    if padding:
        flat = F.pad(flat, (0, 0, 0, padding))
    out = _product()(flat.contiguous(), packed, bias, "none", [], "")
    out = out[:rows] if padding else out
    return out if x.dim() == 2 else out.view(*x.shape[:-1], out.shape[-1])


def _fake(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    return torch.empty((*x.shape[:-1], weight.shape[0]), dtype=x.dtype, device=x.device)


def _key(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None
) -> tuple[tuple[int, int, torch.dtype], tuple[int]]:
    n, k = weight.shape
    return (n, k, x.dtype), (min(x.numel() // k if k else 0, MOST),)


def _supports_tiled(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> str | None:
    if x.numel() < LEAST * x.shape[-1]:
        return ForOthers(f"fewer than {LEAST} tokens")
    return supports_tiled(x, weight, bias)


def _fits(fits: Callable[[dict[str, Any], int, int], bool]) -> Callable[..., bool]:
    def of_call(
        params: dict[str, Any], x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None
    ) -> bool:
        (_, k, _), (m,) = _key(x, weight)
        return fits(params, m, k)

    return of_call


def _shape_of(module: nn.Module) -> tuple[int, int, torch.dtype] | None:
    weight = getattr(module, "weight", None)
    if not isinstance(weight, torch.Tensor) or weight.dim() != 2:
        return None
    return weight.shape[0], weight.shape[1], weight.dtype


def _own(module: nn.Module, args: list[Any]) -> list[Any]:
    bias = None if getattr(module, "skip_bias_add", False) else getattr(module, "bias", None)
    return [args[0], module.weight, bias if isinstance(bias, torch.Tensor) else None]


linear = define(
    "linear(Tensor x, Tensor weight, Tensor? bias=None) -> Tensor",
    fake=_fake,
    providers=(
        Provider("cublas", _torch, devices=("cuda",)),
        Provider("onednn", linear_onednn, devices=("cpu",)),
        Provider("triton", linear_triton, devices=("cuda",), supports=supports_triton),
        Provider(
            "triton-skinny", linear_skinny, devices=("cuda",), supports=supports_skinny,
            params=skinny_linear_triton.PARAMS, fits=_fits(skinny_linear_triton.fits),
        ),
        Provider(
            "cuda-skinny", linear_cuda, devices=("cuda",), supports=supports_cuda,
            params=skinny_linear_cuda.PARAMS, fits=_fits(skinny_linear_cuda.fits),
        ),
        Provider(
            "cuda-wgmma", linear_wgmma, devices=("cuda",), supports=supports_wgmma,
            params=wgmma_linear_cuda.PARAMS, fits=_fits(wgmma_linear_cuda.fits),
        ),
        Provider(
            "cuda-tiled", linear_tiled, devices=("cuda",), supports=_supports_tiled, params=PROMPTS,
            fits=lambda params, x, *_: x.numel() >= LEAST * x.shape[-1],
        ),
        Provider("reference", reference, devices=("cuda", "cpu")),
    ),
    key=Key(
        shape=("N", "K", "dtype"),
        sizes=("M",),
        of=_key,
        dims=lambda N, K, dtype, M: {"tokens": (M,), "in": K, "out": N},
        module=_shape_of,
        propose=propose_linear,
        points=((1,), (8,), (32,), (16,), (64,), (4,), (2,), (2048,), (MOST,), (4096,), (1024,)),
        own=_own,
        scratch=lambda N, K, dtype, M: M * N * dtype.itemsize,
    ),
)  # fmt: skip


def unsupported_weight(module: nn.Module, method: str) -> str | None:
    """Return why the op cannot read the module's weight, None if it can.

    method  path of the host's class that the module's method object must be an instance of (not of a subclass)
    """
    found = type(getattr(module, "quant_method", None))
    name = f"{found.__module__}.{found.__qualname__}"
    if name != method and not found.__module__.startswith("fastkernels."):
        return f"quant_method is {name}, not {method}"
    weight = getattr(module, "weight", None)
    if not isinstance(weight, torch.Tensor):
        return "the module has no weight tensor"
    if weight.dim() != 2 or weight.numel() == 0:
        return f"weight has shape {tuple(weight.shape)}: the host packed or freed it after loading"
    if weight.dtype not in (torch.float32, torch.float16, torch.bfloat16, torch.float64):
        return f"weight is {weight.dtype}"
    return None


def register_weight(
    layer: nn.Module, rows: int, columns: int, dtype: torch.dtype, attrs: dict[str, Any]
) -> None:
    """Register layer.weight [rows, columns], uninitialized, with the attributes that weight loaders read."""
    weight = nn.Parameter(torch.empty(rows, columns, dtype=dtype), requires_grad=False)
    for name, value in {"input_dim": 1, "output_dim": 0, **attrs}.items():
        setattr(weight, name, value)
    layer.register_parameter("weight", weight)


class UnquantizedLinearMethod:
    """Base of the hosts' method objects for unquantized layers: weight [N, K], applied by the op `linear`."""

    live_methods = ("apply",)
    replaces = ""  # path of the host's class

    @classmethod
    def supports(cls, module: nn.Module) -> str | None:
        """Return why our apply does not serve this module (ours or the host's), None if it does."""
        return unsupported_weight(module, cls.replaces) or _packed(module)

    def create_weights(
        self,
        layer: torch.nn.Module,
        input_size_per_partition: int,
        output_partition_sizes: list[int],
        input_size: int,
        output_size: int,
        params_dtype: torch.dtype,
        **extra_weight_attrs: Any,
    ) -> None:
        register_weight(
            layer, sum(output_partition_sizes), input_size_per_partition, params_dtype, extra_weight_attrs
        )

    def process_weights_after_loading(self, layer: torch.nn.Module) -> None:
        """Do nothing: the op uses the weight as it was loaded."""

    def apply(
        self, layer: torch.nn.Module, x: torch.Tensor, bias: torch.Tensor | None = None
    ) -> torch.Tensor:
        return linear(x, layer.weight, bias)


def _packed(module: nn.Module) -> str | None:
    # On a CPU with AMX, SGLang reorders the weight in place and keeps its shape.
    if getattr(module, "use_intel_amx_backend", False):
        return "the host packed its weight for AMX"
    return None


def _build(cls: type, args: list[Any]) -> Callable[[], Any]:
    x, weight, *bias = args
    layer = nn.Module()
    layer.weight = nn.Parameter(weight, requires_grad=False)
    return partial(cls().apply, layer, x, *bias)


def _model(name: str, m: int, k: int, n: int, weight: float) -> Case:
    return Case(name, {"tokens": (m,), "in": k, "out": n}, weight=weight, tags=("model",))


SPEC = OpSpec(
    name="linear",
    level=1,
    reference=reference,
    op=linear,
    cases=(
        _model("qkv_32", 32, 4096, 6144, 32),
        _model("o_32", 32, 4096, 4096, 32),
        _model("gate_up_32", 32, 4096, 28672, 32),
        _model("down_32", 32, 14336, 4096, 32),
        _model("gate_up_8k", 8192, 4096, 28672, 1),
        _model("gate_up_1", 1, 4096, 28672, 32),
        Case("one", {"tokens": (1,), "in": 1, "out": 1, "bias": True}, dtype="float32", tags=("odd",)),
        Case("odd_63", {"tokens": (63,), "in": 100, "out": 130, "bias": True}, tags=("odd",)),
        Case("odd_3d", {"tokens": (3, 5), "in": 63, "out": 17}, dtype="float16", tags=("odd",)),
        Case("odd_1128", {"tokens": (70,), "in": 72, "out": 1128 // 8}, dtype="float32", tags=("odd",)),
        Case("narrow", {"tokens": (1,), "in": 1000, "out": 3, "bias": True}, dtype="float16", tags=("odd",)),
        Case("smollm2", {"tokens": (7,), "in": 576, "out": 192}, tags=("odd",)),
        Case("empty", {"tokens": (0,), "in": 64, "out": 33}, tags=("odd",)),
    ),
    arguments=(
        Tensor("x", "*tokens in_"),
        # Weights of variance 1 / K give outputs of about 1, as in a model.
        Tensor("weight", "out in_", values=lambda call, shape, dtype: call.normal(shape, dtype, std=shape[1] ** -0.5)),
        Tensor("bias", "out", when="bias"),
    ),
    outputs=(Tensor("out", "*tokens out"),),
    axes={"tokens": Axis.per_call(), "in": Axis.width(), "out": Axis.width()},
    flops="2 * prod(tokens) * in_ * out",
    build=_build,
    tolerance={
        # float32 sums of up to 14336 products, in another order
        "float32": Tolerance(2e-5, 2e-5),
        "float16": Tolerance(2e-3, 2e-3),
        "bfloat16": Tolerance(1.6e-2, 1.6e-2),
    },
    baseline="cublas",
)  # fmt: skip
