"""Linear layer with weights -1, 0 and 1 and 8-bit activations (BitNet b1.58, arXiv 2402.17764; W2A8).

y = (q W^T) s_x s_W + b with q = round(x / s_x) and s_x = max |x| / 127 of each token. Weights are packed in units of 64
columns: byte i of a unit has columns i, i + 16, i + 32 and i + 48 from the lowest bits, each plus 1.
"""

from __future__ import annotations

import ctypes
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
import triton
import triton.language as tl

from fastkernels.core import cuda_rtc
from fastkernels.core.case import Case, Tolerance
from fastkernels.core.declaration import Axis, Call, Tensor
from fastkernels.core.dispatch import Key, Provider, define
from fastkernels.core.spec import OpSpec
from fastkernels.overrides.kit.hopper import no_hopper, text
from fastkernels.overrides.kit.launch import cdiv, multiprocessors, next_power_of_2, tickets
from fastkernels.overrides.kit.overlap import overlaps

UNIT = 64  # columns that are packed together
STEP = 128  # columns that the kernel reads at a time
LEAST = 1e-5  # lower bound of a token's largest value
SOURCE = Path(__file__).parent / "csrc" / "ternary_linear.cu"
MAX_TOKENS, MOST_WARPS = 8, 16  # of the CUDA C++ kernel
SHARED = 227 * 1024  # bytes of shared memory of a block
_P, _I, _L = ctypes.c_void_p, ctypes.c_int, ctypes.c_longlong
TYPES = (*[_P] * 5, _I, _I, _L)


def pack_ternary(values: torch.Tensor) -> torch.Tensor:
    """Pack [N, K] of 0, 1 and 2 (weights plus 1, uint8) into [N, K / 4]. K is a multiple of 64."""
    a, b, c, d = values.unflatten(-1, (-1, 4, UNIT // 4)).unbind(-2)
    return (a | b << 2 | c << 4 | d << 6).flatten(-2)


def unpack_ternary(packed: torch.Tensor) -> torch.Tensor:
    """The inverse of pack_ternary: [N, K / 4] to [N, K]."""
    units = packed.unflatten(-1, (-1, UNIT // 4))
    return torch.stack([units >> shift & 3 for shift in (0, 2, 4, 6)], -2).flatten(-3)


def quantize_int8(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return round(x / scale) in x's dtype, and the scale of each token [..., 1]."""
    absmax = x.abs().amax(-1, keepdim=True).clamp(min=LEAST) if x.shape[-1] else x.new_ones(*x.shape[:-1], 1)
    return (x * (127 / absmax)).round().clamp(-128, 127), absmax / 127


def reference(
    x: torch.Tensor, weight: torch.Tensor, weight_scale: torch.Tensor, bias: torch.Tensor | None = None
) -> torch.Tensor:
    """x: [..., K]; weight: uint8 [N, K / 4], see pack_ternary; weight_scale: [N]; bias: [N]. Returns [..., N].

    Raises ValueError for other shapes.
    """
    check(x, weight, weight_scale, bias)
    acc = torch.promote_types(x.dtype, torch.float32)
    q, scale = quantize_int8(x.to(acc))
    y = (q @ (unpack_ternary(weight).to(acc) - 1).t()) * scale * weight_scale.to(acc)
    if bias is not None:
        y = y + bias.to(acc)
    return y.to(x.dtype)


def check(
    x: torch.Tensor, weight: torch.Tensor, weight_scale: torch.Tensor, bias: torch.Tensor | None
) -> None:
    """Raise ValueError for tensors whose shapes do not match."""
    k = 4 * weight.shape[-1]
    if weight.dtype != torch.uint8 or weight.dim() != 2 or x.dim() == 0 or x.shape[-1] != k or k % UNIT:
        raise ValueError(
            f"linear_ternary: x {tuple(x.shape)} must be [..., K] and weight {tuple(weight.shape)} ({weight.dtype})"
            f" uint8 [N, K / 4], with K a multiple of {UNIT}"
        )
    for name, tensor in (("weight_scale", weight_scale), ("bias", bias)):
        if tensor is not None and tensor.shape != weight.shape[:1]:
            raise ValueError(f"linear_ternary: {name} {tuple(tensor.shape)} must be [{weight.shape[0]}]")


@triton.jit
def _quantize_kernel(x_ptr, q_ptr, s_ptr, x_stride, K: tl.constexpr, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    cols = tl.arange(0, BLOCK)
    x = tl.load(x_ptr + row * x_stride + cols, mask=cols < K, other=0.0).to(tl.float32)
    absmax = tl.maximum(tl.max(tl.abs(x), axis=0), 1e-5)
    y = x * tl.div_rn(127.0, absmax)
    q = (y + 12582912.0) - 12582912.0  # 1.5 * 2^23: rounds to the nearest integer, halves to even
    tl.store(q_ptr + row * K + cols, q.to(tl.int8), mask=cols < K)
    tl.store(s_ptr + row, tl.div_rn(absmax, 127.0))


@triton.jit(do_not_specialize=["M"])
def _ternary_kernel(
    q_ptr, w_ptr, xs_ptr, ws_ptr, b_ptr, out_ptr, partial_ptr, ticket_ptr, M, N,
    K: tl.constexpr, HAS_BIAS: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, STEP: tl.constexpr,
    SPLIT_K: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    # As in linear_int4: the weight is the left matrix, and the last program of a tile to arrive adds the splits.
    tile, split = tl.program_id(0), tl.program_id(1)
    rows = tl.program_id(2) * BLOCK_M + tl.arange(0, BLOCK_M)
    cols = tile * BLOCK_N + tl.arange(0, BLOCK_N)
    packed = tl.arange(0, STEP // 4)
    w_at = w_ptr + tl.minimum(cols, N - 1).to(tl.int64)[:, None] * (K // 4) + packed[None, :]
    column = (packed // 16 * 64 + packed % 16)[:, None]
    q_at = q_ptr + rows[None, :].to(tl.int64) * K + column
    there = rows[None, :] < M
    steps: tl.constexpr = (K + STEP - 1) // STEP
    first, last = split * steps // SPLIT_K * STEP, (split + 1) * steps // SPLIT_K * STEP
    acc = tl.zeros((BLOCK_N, BLOCK_M), dtype=tl.int32)
    for k in tl.range(first, last, STEP, num_stages=STAGES):
        if K % STEP == 0:
            w = tl.load(w_at + k // 4, eviction_policy="evict_first")
            mask = there
        else:  # zeros of x past the last column
            w = tl.load(w_at + k // 4, mask=packed[None, :] < K // 4 - k // 4, other=0)
            mask = there & (column < K - k)
        for part in tl.static_range(4):
            q = tl.load(q_at + k + 16 * part, mask=mask, other=0, eviction_policy="evict_last")
            acc = tl.dot((w >> (2 * part) & 3).to(tl.int8) - 1, q, acc, out_dtype=tl.int32)
    row, col = rows[None, :], cols[:, None]
    mask = there & (col < N)
    to = row.to(tl.int64) * N + col
    mine = True
    if SPLIT_K > 1:
        tl.store(partial_ptr + split.to(tl.int64) * M * N + to, acc, mask=mask)
        tl.debug_barrier()  # one thread takes the ticket, after all threads have stored
        ticket = ticket_ptr + tl.program_id(2) * tl.num_programs(0) + tile
        mine = tl.atomic_add(ticket, 1, sem="acq_rel", scope="gpu") == SPLIT_K - 1
        if mine:
            acc = tl.zeros_like(acc)
            for i in tl.static_range(SPLIT_K):
                part = partial_ptr + tl.cast(i, tl.int64) * M * N + to
                acc += tl.load(part, mask=mask, other=0, cache_modifier=".cg")
            tl.store(ticket, 0)  # for the next launch
    if mine:
        xs = tl.load(xs_ptr + row, mask=row < M, other=0.0)
        ws = tl.load(ws_ptr + col, mask=col < N, other=0.0).to(tl.float32)
        y = acc.to(tl.float32) * xs * ws
        if HAS_BIAS:
            y += tl.load(b_ptr + col, mask=col < N, other=0.0).to(tl.float32)
        tl.store(out_ptr + to, y.to(out_ptr.dtype.element_ty), mask=mask)


def supports_triton(
    x: torch.Tensor, weight: torch.Tensor, weight_scale: torch.Tensor, bias: torch.Tensor | None = None
) -> str | None:
    """Return why the Triton kernel does not support this call, None if it does."""
    if x.dtype not in (torch.bfloat16, torch.float16, torch.float32):
        return f"dtype {x.dtype} is not bfloat16, float16 or float32"
    if x.shape[-1] > 65536:
        return f"K = {x.shape[-1]} is over 65536"
    wrong = [
        tuple(t.stride()) for t in (weight, weight_scale, bias) if t is not None and not t.is_contiguous()
    ]
    return f"weight, scales and bias must be contiguous, got strides {wrong[0]}" if wrong else None


def linear_ternary_triton(
    x: torch.Tensor, weight: torch.Tensor, weight_scale: torch.Tensor, bias: torch.Tensor | None = None,
    split_k: int = 0,
) -> torch.Tensor:  # fmt: skip
    """split_k: parts of K that programs share; 0: enough to give each multiprocessor two programs."""
    check(x, weight, weight_scale, bias)
    n, k = weight.shape[0], x.shape[-1]
    out = torch.empty((*x.shape[:-1], n), dtype=x.dtype, device=x.device)
    if out.numel() == 0:
        return out
    if k == 0:
        return out.zero_() if bias is None else out.copy_(bias)
    rows = x.reshape(-1, k)
    if rows.stride(1) != 1:
        rows = rows.contiguous()
    m = rows.shape[0]
    q = torch.empty((m, k), dtype=torch.int8, device=x.device)
    scale = torch.empty(m, dtype=torch.float32, device=x.device)
    _quantize_kernel[m,](rows, q, scale, rows.stride(0), K=k, BLOCK=next_power_of_2(k), num_warps=8)
    block_m, block_n = max(16, min(next_power_of_2(m), 128)), 64 if m <= 64 else 128
    tiles, tokens = cdiv(n, block_n), cdiv(m, block_m)
    if not split_k:
        wanted = max(1, 2 * multiprocessors(x.device) // (tiles * tokens))
        split_k = max(s for s in (1, 2, 4, 8) if s <= wanted and s * 4 * STEP <= max(k, 4 * STEP))
    partial = taken = None
    if split_k > 1:
        partial = torch.empty((split_k, m, n), dtype=torch.int32, device=x.device)
        taken = tickets.get(x.device, tiles * tokens)
    _ternary_kernel[tiles, split_k, tokens](
        q, weight, scale, weight_scale, bias, out, partial, taken, m, n, K=k, HAS_BIAS=bias is not None,
        BLOCK_M=block_m, BLOCK_N=block_n, STEP=STEP, SPLIT_K=split_k, STAGES=3,
        num_warps=8 if block_n == 128 else 4, num_stages=3,
    )  # fmt: skip
    return out


def plan(m: int, k: int, bf16: bool, bias: bool, wide: bool) -> tuple[int, int, tuple[str, ...]]:
    """Return the warps of a block, the bytes of its shared memory, and NVRTC's options without the architecture."""
    steps, units, tokens = cdiv(k, 256), k // UNIT, next_power_of_2(m)
    warps = cdiv(steps, cdiv(steps, MOST_WARPS))
    shared = tokens * (k + (0 if units % 2 else 64)) + 512 * warps + 4 * tokens * warps
    return warps, shared, (
        "--std=c++17", f"-DK={k}", f"-DTOKENS={tokens}", f"-DWARPS={warps}", f"-DBF16={int(bf16)}",
        f"-DHAS_BIAS={int(bias)}", f"-DWIDE={int(wide)}",
    )  # fmt: skip


def supports_cuda(
    x: torch.Tensor, weight: torch.Tensor, weight_scale: torch.Tensor, bias: torch.Tensor | None = None
) -> str | None:
    """Return why the CUDA C++ kernel does not support this call, None if it does."""
    if (reason := no_hopper(SOURCE, x.device) or supports_triton(x, weight, weight_scale, bias)) is not None:
        return reason
    k = x.shape[-1]
    if x.dtype == torch.float32 or (bias is not None and bias.dtype != x.dtype):
        return (
            f"x is {x.dtype}{'' if bias is None else f' and bias {bias.dtype}'}, not of one type of 16 bits"
        )
    if weight_scale.dtype not in (x.dtype, torch.float32):
        return f"weight_scale is {weight_scale.dtype}, x is {x.dtype}"
    if not k or x.numel() > MAX_TOKENS * k:
        return f"more than {MAX_TOKENS} tokens, or no columns"
    if plan(MAX_TOKENS, k, True, False, True)[1] > SHARED:
        return f"K = {k} does not fit shared memory"
    if x.data_ptr() % 16 or weight.data_ptr() % 16:
        return "x and weight must begin at a multiple of 16 bytes"
    return None


@lru_cache(maxsize=64)
def _kernel(device: torch.device, shared: int, options: tuple[str, ...]) -> cuda_rtc.Kernel:
    return cuda_rtc.Kernel(text(SOURCE), "ternary_linear", options, device.index, TYPES, shared)


def linear_ternary_cuda(
    x: torch.Tensor, weight: torch.Tensor, weight_scale: torch.Tensor, bias: torch.Tensor | None = None
) -> torch.Tensor:
    """In a CUDA graph this kernel reads the weight while the previous kernel still runs, which must not write it."""
    check(x, weight, weight_scale, bias)
    n, k = weight.shape[0], x.shape[-1]
    out = torch.empty((*x.shape[:-1], n), dtype=x.dtype, device=x.device)
    if out.numel() == 0:
        return out
    rows = x.reshape(-1, k)
    if rows.stride(1) != 1 or rows.stride(0) % 8:
        rows = rows.contiguous()
    m, wide = rows.shape[0], weight_scale.dtype == torch.float32
    warps, shared, options = plan(m, k, x.dtype == torch.bfloat16, bias is not None, wide)
    tensors = (rows, weight, weight_scale, bias, out)
    args = (*(None if t is None else t.data_ptr() for t in tensors), m, n, rows.stride(0))
    early = overlaps(x.device) and torch.cuda.is_current_stream_capturing()
    stream = torch.cuda.current_stream(x.device).cuda_stream
    _kernel(x.device, shared, options).launch(cdiv(n, 16), 32 * warps, stream, args, overlap=early)
    return out


def _torch(
    x: torch.Tensor, weight: torch.Tensor, weight_scale: torch.Tensor, bias: torch.Tensor | None = None
) -> torch.Tensor:
    """The product in float32, which adds up integers exactly below 2^24."""
    check(x, weight, weight_scale, bias)
    q, scale = quantize_int8(x.float())
    y = F.linear(q, unpack_ternary(weight).float() - 1) * scale * weight_scale
    return (y if bias is None else y + bias).to(x.dtype)


def output(x: torch.Tensor, weight: torch.Tensor, *rest: torch.Tensor | None) -> torch.Tensor:
    """The memory of a linear layer's output [..., N]."""
    return torch.empty((*x.shape[:-1], weight.shape[0]), dtype=x.dtype, device=x.device)


def units_key(unit: int) -> Key:
    """The key of linear layers whose K is a multiple of `unit`."""

    def of(x: torch.Tensor, weight: torch.Tensor, *rest: torch.Tensor | None) -> tuple[Any, tuple[int]]:
        k = x.shape[-1]
        return (weight.shape[0], k // unit, x.dtype), (x.numel() // k if k else 0,)

    return Key(
        shape=("N", "units", "dtype"),
        sizes=("M",),
        of=of,
        dims=lambda N, units, dtype, M: {"tokens": (M,), "units": units, "out": N},
        points=((1,), (8,), (32,), (16,), (64,), (4,), (2,)),
    )


linear_ternary = define(
    "linear_ternary(Tensor x, Tensor weight, Tensor weight_scale, Tensor? bias=None) -> Tensor",
    fake=output,
    providers=(
        Provider("cuda", linear_ternary_cuda, devices=("cuda",), supports=supports_cuda),
        Provider("triton", linear_ternary_triton, devices=("cuda",), supports=supports_triton),
        Provider("torch", _torch, devices=("cuda", "cpu")),
        Provider("reference", reference, devices=("cuda", "cpu")),
    ),
    key=units_key(UNIT),
)


def _weights(call: Call, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    sizes = (shape[0], 4 * shape[1])
    return pack_ternary(torch.randint(0, 3, sizes, dtype=dtype, generator=call.generator, device=call.device))


def _scale(call: Call, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    """Scales that give outputs of about 1, as in a model."""
    return ((call.rand(*shape) + 0.5) * max(UNIT * call["units"], 1) ** -0.5).to(dtype)


def _case(
    name: str, m: int, k: int, n: int, dtype: str = "bfloat16", weight: float = 1.0, tag: str = "odd", **more: Any
) -> Case:  # fmt: skip
    return Case(name, {"tokens": (m,), "units": k // UNIT, "out": n, **more}, dtype, weight, (tag,))


SPEC = OpSpec(
    name="linear_ternary",
    level=1,
    reference=reference,
    op=linear_ternary,
    cases=(  # BitNet b1.58 2B4T
        _case("qkv_1", 1, 2560, 3840, weight=30, tag="model"),
        _case("o_1", 1, 2560, 2560, weight=30, tag="model"),
        _case("gate_up_1", 1, 2560, 13824, weight=30, tag="model"),
        _case("down_1", 1, 6912, 2560, weight=30, tag="model"),
        _case("gate_up_32", 32, 2560, 13824, weight=30, tag="model"),
        _case("gate_up_2k", 2048, 2560, 13824, tag="model"),
        _case("tokens_63", 63, 192, 130, bias=True),
        _case("half_5", 5, 320, 33, "float16"),
        _case("float32", 7, 256, 17, "float32", bias=True),
        _case("one", 1, 64, 1),
        _case("partial_step", 3, 2112, 48, bias=True),
        Case("batched", {"tokens": (3, 5), "units": 2, "out": 40}, "float16", tags=("odd",)),
        _case("empty", 0, 128, 33),
    ),
    arguments=(
        Tensor("x", "*tokens 64*units"),
        Tensor("weight", "out 16*units", "uint8", values=_weights),
        Tensor("weight_scale", "out", "float32", values=_scale),
        Tensor("bias", "out", when="bias"),
    ),
    outputs=(Tensor("out", "*tokens out"),),
    axes={"tokens": Axis.per_call(), "units": Axis.count(), "out": Axis.width()},
    flops="2 * prod(tokens) * 64 * units * out",
    tolerance={  # a value of x halfway between two integers may be rounded to the other one
        "float32": Tolerance(2e-2, 1e-2),
        "float16": Tolerance(2e-2, 1e-2),
        "bfloat16": Tolerance(2.5e-2, 1.6e-2),
    },
    baseline="unpacked",
)  # fmt: skip
