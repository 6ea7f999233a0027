"""Linear layer with 4-bit weights, y = x (s (q - z))^T + b (GPTQ, arXiv 2210.17323; AWQ, 2306.00978).

Weights are packed in units of 32 columns: byte i of a unit has column i in its low half, and column i + 16 in its high
half. Both halves of a byte belong to one group, and a kernel reads x in runs of 16 columns.

Kernels read 16 rows of 128 columns at once. Such tiles are therefore adjacent in memory: the first 64 bytes of rows 0
to 15, then the next 64 bytes of these rows, and so on, then rows 16 to 31. Scales and zero points are in the same
order, one column at a time. Shapes stay [N, K / 2] and [N, G]; the last rows and columns may be fewer.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import torch
import torch.nn.functional as F
import triton
import triton.language as tl

from fastkernels.core.case import Case, Tolerance
from fastkernels.core.declaration import Axis, Call, Tensor
from fastkernels.core.dispatch import Key, Provider, define
from fastkernels.core.spec import OpSpec
from fastkernels.overrides.kit.launch import cdiv, multiprocessors, next_power_of_2, tickets
from fastkernels.overrides.linear.kernels import int4_linear_cuda
from fastkernels.overrides.linear.linear_ternary import output

UNIT = 32  # columns that are packed together
ROWS, STEP = 16, 64  # of a tile: rows, and bytes of each
MIDDLE = 8  # the zero point of a weight without zero points
GROUPS = (32, 64, 128)
MAX_TOKENS = 256  # of the Triton kernel; more are multiplied by dequantized weights


def pack_int4(values: torch.Tensor) -> torch.Tensor:
    """Pack integers 0 to 15, [N, K] uint8, into [N, K / 2]. K is a multiple of 32."""
    low, high = values.unflatten(-1, (-1, 2, UNIT // 2)).unbind(-2)
    return (low | high << 4).flatten(-2)


def unpack_int4(packed: torch.Tensor) -> torch.Tensor:
    """The inverse of pack_int4: [N, K / 2] to [N, K]."""
    units = packed.unflatten(-1, (-1, UNIT // 2))
    return torch.stack((units & 15, units >> 4), -2).flatten(-3)


def tiled(matrix: torch.Tensor, columns: int) -> torch.Tensor:
    """Reorder a matrix [N, C] by tiles of 16 rows and `columns` columns, see above."""
    steps, done = matrix.shape[1] // columns, []
    for part, rows in _parts(matrix):
        tiles = part.unflatten(0, (len(part) // rows, rows))
        whole = tiles[..., : steps * columns].unflatten(2, (steps, columns)).transpose(1, 2)
        flat = torch.cat((whole.flatten(1), tiles[..., steps * columns :].flatten(1)), 1)
        done.append(flat.view(part.shape))
    return torch.cat(done)


def untiled(matrix: torch.Tensor, columns: int) -> torch.Tensor:
    """The inverse of `tiled`."""
    steps, done = matrix.shape[1] // columns, []
    for part, rows in _parts(matrix):
        flat = part.reshape(len(part) // rows, rows * part.shape[1])
        whole = flat[:, : rows * steps * columns].unflatten(1, (steps, rows, columns)).transpose(1, 2)
        rest = flat[:, rows * steps * columns :].unflatten(1, (rows, part.shape[1] - steps * columns))
        done.append(torch.cat((whole.flatten(2), rest), 2).view(part.shape))
    return torch.cat(done)


def _parts(matrix: torch.Tensor) -> list[tuple[torch.Tensor, int]]:
    """(rows of whole tiles, 16) and (the other rows, their number), where there are any."""
    n, whole = len(matrix), len(matrix) // ROWS * ROWS
    parts = [(matrix[:whole], ROWS), (matrix[whole:], n - whole)]
    return [(part, rows) for part, rows in parts if len(part)] or parts[:1]


def tile_int4(
    weight: torch.Tensor, weight_scale: torch.Tensor, weight_zero: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
    """Return a weight of `pack_int4`, its scales and its zero points as the op takes them."""
    zero = None if weight_zero is None else tiled(weight_zero, 1)
    return tiled(weight, STEP), tiled(weight_scale, 1), zero


def untile_int4(
    weight: torch.Tensor, weight_scale: torch.Tensor, weight_zero: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
    """The inverse of tile_int4."""
    zero = None if weight_zero is None else untiled(weight_zero, 1)
    return untiled(weight, STEP), untiled(weight_scale, 1), zero


def dequantize_int4(
    weight: torch.Tensor, weight_scale: torch.Tensor, weight_zero: torch.Tensor | None, dtype: torch.dtype
) -> torch.Tensor:
    """Return a weight that is not in tiles, [N, K], in a dtype."""
    q = unpack_int4(weight).to(dtype).unflatten(-1, (weight_scale.shape[1], -1))
    zero = MIDDLE if weight_zero is None else weight_zero.to(dtype).unsqueeze(-1)
    return ((q - zero) * weight_scale.to(dtype).unsqueeze(-1)).flatten(-2)


def reference(
    x: torch.Tensor,
    weight: torch.Tensor,
    weight_scale: torch.Tensor,
    weight_zero: torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
) -> torch.Tensor:
    """x: [..., K]; weight: uint8 [N, K / 2], see pack_int4, in tiles, see tile_int4. Returns [..., N] in x's dtype.

    weight_scale  [N, G] in tiles, one for K / G columns, which are a multiple of 32
    weight_zero   uint8 [N, G] in tiles, the integer that stands for 0; None: 8 everywhere
    bias          [N]
    Raises ValueError for other shapes.
    """
    check(x, weight, weight_scale, weight_zero, bias)
    acc = torch.promote_types(x.dtype, torch.float32)
    y = x.to(acc) @ dequantize_int4(*untile_int4(weight, weight_scale, weight_zero), acc).t()
    if bias is not None:
        y = y + bias.to(acc)
    return y.to(x.dtype)


def check(
    x: torch.Tensor, weight: torch.Tensor, weight_scale: torch.Tensor, weight_zero: torch.Tensor | None,
    bias: torch.Tensor | None,
) -> int:  # fmt: skip
    """Return the columns that share a scale. Raises ValueError for tensors whose shapes do not match."""
    n, k = weight.shape[0], 2 * weight.shape[-1]
    groups = weight_scale.shape[-1]
    if weight.dtype != torch.uint8 or weight.dim() != 2 or x.dim() == 0 or x.shape[-1] != k or k % UNIT:
        raise ValueError(
            f"linear_int4: x {tuple(x.shape)} must be [..., K] and weight {tuple(weight.shape)} ({weight.dtype}) uint8"
            f" [N, K / 2], with K a multiple of {UNIT}"
        )
    if weight_scale.shape != (n, groups) or (k and (not groups or k % groups or k // groups % UNIT)):
        raise ValueError(
            f"linear_int4: weight_scale {tuple(weight_scale.shape)} must be [{n}, G], one for each group of"
            f" {k} / G columns, a multiple of {UNIT}"
        )
    for name, tensor, shape in (("weight_zero", weight_zero, (n, groups)), ("bias", bias, (n,))):
        if tensor is not None and tensor.shape != shape:
            raise ValueError(f"linear_int4: {name} {tuple(tensor.shape)} must be {list(shape)}")
    return k // groups if groups else UNIT


@triton.jit
def centered(nibble, zero, x_ptr, UPCAST: tl.constexpr):
    """nibble - zero in x's dtype. Integers below 16 are the last bits of 128 (bfloat16) and 1024 (float16)."""
    if UPCAST:
        return nibble.to(tl.float32) - zero.to(tl.float32)
    else:  # without `else` Triton compiles this part too
        dtype: tl.constexpr = x_ptr.dtype.element_ty
        ONE: tl.constexpr = 0x4300 if dtype == tl.bfloat16 else 0x6400
        value = (nibble.to(tl.uint16) | ONE).to(dtype, bitcast=True)
        return value - (zero.to(tl.uint16) | ONE).to(dtype, bitcast=True)


@triton.jit(do_not_specialize=["M"])
def _int4_kernel(
    x_ptr, w_ptr, s_ptr, z_ptr, b_ptr, out_ptr, partial_ptr, ticket_ptr, M, N, x_stride,
    K: tl.constexpr, GROUP: tl.constexpr, HAS_ZERO: tl.constexpr, HAS_BIAS: tl.constexpr, UPCAST: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, SPLIT_K: tl.constexpr,
    STAGES: tl.constexpr,
):  # fmt: skip
    # The weight is the left matrix of each product, so that few tokens need little padding. BLOCK_K divides GROUP: the
    # integers of a step are multiplied exactly, and their sum has one scale for each row.
    tile, split = tl.program_id(0), tl.program_id(1)
    rows = tl.program_id(2) * BLOCK_M + tl.arange(0, BLOCK_M)
    cols = tile * BLOCK_N + tl.arange(0, BLOCK_N)
    at = tl.minimum(cols, N - 1).to(tl.int64)  # a row past the end is the last row again
    pairs = tl.arange(0, BLOCK_K // 2)
    scales: tl.constexpr = K // GROUP
    first_row = at // 16 * 16
    row, height = at - first_row, tl.minimum(N - first_row, 16)  # in a tile, of a tile
    w_tile, s_at = w_ptr + (first_row * (K // 2))[:, None] + pairs[None, :], first_row * scales + row
    x_at = x_ptr + rows[None, :].to(tl.int64) * x_stride + (pairs // 16 * 32 + pairs % 16)[:, None]
    there = rows[None, :] < M
    steps: tl.constexpr = K // BLOCK_K
    first, last = split * steps // SPLIT_K * BLOCK_K, (split + 1) * steps // SPLIT_K * BLOCK_K
    acc = tl.zeros((BLOCK_N, BLOCK_M), dtype=tl.float32)
    for k in tl.range(first, last, BLOCK_K, num_stages=STAGES):
        step = k // 128
        width = 64 if K % 128 == 0 else tl.minimum(K // 2 - 64 * step, 64)  # bytes of a row in this step
        w_at = w_tile + (64 * step * height + row * width)[:, None]
        w = tl.load(w_at if BLOCK_K == 128 else w_at + k % 128 // 2, eviction_policy="evict_first")
        low = tl.load(x_at + k, mask=there, other=0.0, eviction_policy="evict_last")
        high = tl.load(x_at + k + 16, mask=there, other=0.0, eviction_policy="evict_last")
        group = k // GROUP
        scale = tl.load(s_ptr + s_at + group * height).to(tl.float32)
        if HAS_ZERO:
            zero = tl.load(z_ptr + s_at + group * height)[:, None]
        else:
            zero = tl.full((BLOCK_N, 1), 8, dtype=tl.uint8)
        if UPCAST:
            low, high = low.to(tl.float32), high.to(tl.float32)
        part = tl.dot(centered(w & 15, zero, x_ptr, UPCAST), low, input_precision="ieee")
        part = tl.dot(centered(w >> 4, zero, x_ptr, UPCAST), high, part, input_precision="ieee")
        acc += part * scale[:, None]
    col = cols[:, None]
    mask = there & (col < N)
    to = rows[None, :].to(tl.int64) * N + col
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
                acc += tl.load(part, mask=mask, other=0.0, cache_modifier=".cg")
            tl.store(ticket, 0)  # for the next launch
    if mine:
        if HAS_BIAS:
            acc += tl.load(b_ptr + col, mask=col < N, other=0.0).to(tl.float32)
        tl.store(out_ptr + to, acc.to(out_ptr.dtype.element_ty), mask=mask)


@triton.jit
def _dequantize_kernel(
    w_ptr, s_ptr, z_ptr, out_ptr, N, K: tl.constexpr, GROUP: tl.constexpr, HAS_ZERO: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    pairs = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask, column = pairs < K // 2, pairs // 16 * 32 + pairs % 16
    first_row, step = row // 16 * 16, pairs // 64
    height = tl.minimum(N - first_row, 16)
    width = 64 if K % 128 == 0 else tl.minimum(K // 2 - 64 * step, 64)
    in_tile = 64 * step * height + (row - first_row) * width + pairs % 64
    w = tl.load(w_ptr + first_row * (K // 2) + in_tile, mask=mask, other=0)
    at = first_row * (K // GROUP) + column // GROUP * height + row - first_row
    scale = tl.load(s_ptr + at, mask=mask, other=0.0).to(tl.float32)
    zero = tl.load(z_ptr + at, mask=mask, other=0).to(tl.float32) if HAS_ZERO else 8.0
    to = out_ptr + row * K + column
    tl.store(to, (((w & 15).to(tl.float32) - zero) * scale).to(out_ptr.dtype.element_ty), mask=mask)
    tl.store(to + 16, (((w >> 4).to(tl.float32) - zero) * scale).to(out_ptr.dtype.element_ty), mask=mask)


# Parameter sets, the preferred ones first. Any set is correct for any shape.
PARAMS: tuple[dict[str, Any], ...] = tuple(
    {"block_n": block_n, "split_k": split_k, "num_warps": warps, "num_stages": stages}
    for block_n, warps, stages in ((64, 4, 4), (32, 4, 5), (128, 4, 3), (128, 8, 3))
    for split_k in (1, 2, 4, 8)
)


def fits(params: dict[str, Any], k: int) -> bool:
    """Return whether each split of K has at least four steps, or K is not split."""
    return params["split_k"] == 1 or k >= 4 * 128 * params["split_k"]


@lru_cache(maxsize=1024)
def choose(m: int, n: int, k: int, sms: int = 132) -> dict[str, Any]:
    """Return the default parameters: the fewest splits that give each multiprocessor two programs, if K allows."""
    sets = [p for p in PARAMS if p["block_n"] == 64 and fits(p, k)]
    columns = cdiv(n, 64) * cdiv(m, 64)
    return next((p for p in sets if columns * p["split_k"] >= 2 * sms), sets[-1])


def supports_triton(
    x: torch.Tensor, weight: torch.Tensor, weight_scale: torch.Tensor, weight_zero: torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
) -> str | None:  # fmt: skip
    """Return why the Triton kernel does not support this call, None if it does."""
    if x.dtype not in (torch.bfloat16, torch.float16, torch.float32):
        return f"dtype {x.dtype} is not bfloat16, float16 or float32"
    if weight.shape[1] and x.numel() // (2 * weight.shape[1]) > MAX_TOKENS:
        return f"more than {MAX_TOKENS} tokens"  # without the number: each reason is reported once
    return _not_dense(weight, weight_scale, weight_zero, bias)


def _not_dense(*tensors: torch.Tensor | None) -> str | None:
    wrong = [tuple(t.stride()) for t in tensors if t is not None and not t.is_contiguous()]
    return (
        f"weight, scales, zero points and bias must be contiguous, got strides {wrong[0]}" if wrong else None
    )


def linear_int4_triton(
    x: torch.Tensor, weight: torch.Tensor, weight_scale: torch.Tensor, weight_zero: torch.Tensor | None = None,
    bias: torch.Tensor | None = None, **params: Any,
) -> torch.Tensor:  # fmt: skip
    """params: one of PARAMS, or some of its keys; `choose` gives the others."""
    group = check(x, weight, weight_scale, weight_zero, bias)
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
    p = {**choose(m, n, k, multiprocessors(x.device)), **params}
    block_m = max(8, min(next_power_of_2(m), 64))
    grid = (cdiv(n, p["block_n"]), p["split_k"], cdiv(m, block_m))
    partial = taken = None
    if p["split_k"] > 1:
        partial = torch.empty((p["split_k"], m, n), dtype=torch.float32, device=x.device)
        taken = tickets.get(x.device, grid[0] * grid[2])
    _int4_kernel[grid](
        rows, weight, weight_scale, weight_zero, bias, out, partial, taken, m, n, rows.stride(0), K=k, GROUP=group,
        HAS_ZERO=weight_zero is not None, HAS_BIAS=bias is not None,
        UPCAST=x.device.type == "cpu" or x.dtype == torch.float32,
        BLOCK_M=block_m, BLOCK_N=p["block_n"], BLOCK_K=next(b for b in (128, 64, 32) if group % b == 0),
        SPLIT_K=p["split_k"], STAGES=p["num_stages"], num_warps=p["num_warps"], num_stages=p["num_stages"],
    )  # fmt: skip
    return out


def supports_cublas(
    x: torch.Tensor, weight: torch.Tensor, weight_scale: torch.Tensor, weight_zero: torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
) -> str | None:  # fmt: skip
    """Return why cuBLAS with dequantized weights does not support this call, None if it does."""
    if x.dtype not in (torch.bfloat16, torch.float16, torch.float32):
        return f"dtype {x.dtype} is not bfloat16, float16 or float32"
    return _not_dense(weight, weight_scale, weight_zero)


def linear_int4_cublas(
    x: torch.Tensor, weight: torch.Tensor, weight_scale: torch.Tensor, weight_zero: torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
) -> torch.Tensor:  # fmt: skip
    """Dequantize the weight for this call, which many tokens repay."""
    group = check(x, weight, weight_scale, weight_zero, bias)
    n, k = weight.shape[0], x.shape[-1]
    wide = torch.empty((n, k), dtype=x.dtype, device=x.device)
    if wide.numel():
        block = min(next_power_of_2(k // 2), 2048)
        _dequantize_kernel[n, cdiv(k // 2, block)](
            weight, weight_scale, weight_zero, wide, n, K=k, GROUP=group, HAS_ZERO=weight_zero is not None,
            BLOCK=block,
        )  # fmt: skip
    return F.linear(x, wide, bias)


def _torch(
    x: torch.Tensor, weight: torch.Tensor, weight_scale: torch.Tensor, weight_zero: torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
) -> torch.Tensor:  # fmt: skip
    check(x, weight, weight_scale, weight_zero, bias)
    rows = untile_int4(weight, weight_scale, weight_zero)
    wide = dequantize_int4(*rows, torch.promote_types(x.dtype, torch.float32))
    # In float32: the error of rounded weights is as large as a small result.
    return F.linear(x.to(wide.dtype), wide, None if bias is None else bias.to(wide.dtype)).to(x.dtype)


def _key(
    x: torch.Tensor, weight: torch.Tensor, weight_scale: torch.Tensor, weight_zero: torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
) -> tuple[tuple[int, int, int, bool, torch.dtype], tuple[int]]:  # fmt: skip
    k, groups = x.shape[-1], weight_scale.shape[1]
    shape = weight.shape[0], groups, k // groups if groups else UNIT, weight_zero is not None, x.dtype
    return shape, (x.numel() // k if k else 0,)


def _fits(params: dict[str, Any], x: torch.Tensor, *rest: torch.Tensor | None) -> bool:
    return fits(params, x.shape[-1])


def _fits_cuda(
    params: dict[str, Any], x: torch.Tensor, weight: torch.Tensor, *rest: torch.Tensor | None
) -> bool:
    k = x.shape[-1]
    return int4_linear_cuda.fits(
        params, x.numel() // max(k, 1), weight.shape[0], k, multiprocessors(x.device)
    )


linear_int4 = define(
    "linear_int4(Tensor x, Tensor weight, Tensor weight_scale, Tensor? weight_zero=None, Tensor? bias=None) -> Tensor",
    fake=output,
    providers=(
        Provider(
            "cuda", int4_linear_cuda.linear_int4_cuda, devices=("cuda",), supports=int4_linear_cuda.supports_cuda,
            params=int4_linear_cuda.PARAMS, fits=_fits_cuda,
        ),
        Provider(
            "triton", linear_int4_triton, devices=("cuda",), supports=supports_triton, params=PARAMS, fits=_fits
        ),
        Provider("cublas", linear_int4_cublas, devices=("cuda",), supports=supports_cublas),
        Provider("torch", _torch, devices=("cpu",)),
        Provider("reference", reference, devices=("cuda", "cpu")),
    ),
    key=Key(
        shape=("N", "groups", "group", "zeros", "dtype"),
        sizes=("M",),
        of=_key,
        dims=lambda N, groups, group, zeros, dtype, M: {
            "tokens": (M,), "groups": groups, "group": group, "out": N, **({"zeros": True} if zeros else {}),
        },
        points=((1,), (8,), (32,), (16,), (64,), (4,), (2,), (256,)),
    ),
)  # fmt: skip


def packed_values(call: Call, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    """Random bytes."""
    return torch.randint(0, 256, shape, dtype=dtype, generator=call.generator, device=call.device)


def _scale(call: Call, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    """Scales for which weights have a variance of about 1 / K: outputs of about 1, as in a model."""
    columns = max(call["groups"] * call["group"], 1)
    return ((call.rand(*shape) + 0.5) * 0.2 * columns**-0.5).to(dtype)


def zero_points(call: Call, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    """Random zero points near the middle."""
    return torch.randint(4, 12, shape, dtype=dtype, generator=call.generator, device=call.device)


def _case(
    name: str, m: int, k: int, n: int, group: int = 128, dtype: str = "bfloat16", weight: float = 1.0,
    tag: str = "odd", **more: Any,
) -> Case:  # fmt: skip
    dims = {"tokens": (m,), "groups": k // group, "group": group, "out": n, **more}
    return Case(name, dims, dtype, weight, (tag,))


SPEC = OpSpec(
    name="linear_int4",
    level=1,
    reference=reference,
    op=linear_int4,
    cases=(
        # Llama-3.1-8B in groups of 128: GPTQ without zero points, and AWQ with them
        _case("qkv_1", 1, 4096, 6144, weight=32, tag="model"),
        _case("gate_up_1", 1, 4096, 28672, weight=32, tag="model"),
        _case("down_8", 8, 14336, 4096, weight=32, tag="model"),
        _case("gate_up_16", 16, 4096, 28672, weight=32, tag="model"),
        _case("gate_up_32", 32, 4096, 28672, weight=32, tag="model"),
        _case("awq_qkv_1", 1, 4096, 6144, weight=32, tag="model", zeros=True),
        _case("awq_down_16", 16, 14336, 4096, weight=32, tag="model", zeros=True),
        _case("gate_up_4k", 4096, 4096, 28672, weight=1, tag="model"),
        _case("tokens_63", 63, 256, 130, 64, bias=True),
        _case("group_32", 5, 288, 48, 32, "float16", zeros=True),
        _case("channel", 3, 1120, 33, 1120, zeros=True, bias=True),
        _case("float32", 7, 192, 17, 64, "float32"),
        _case("one", 1, 32, 1, 32),
        Case("batched", {"tokens": (3, 5), "groups": 2, "group": 128, "out": 40}, "float16", tags=("odd",)),
        _case("empty", 0, 128, 33),
    ),
    arguments=(
        Tensor("x", "*tokens groups*group"),
        Tensor("weight", "out groups*group//2", "uint8", values=packed_values),
        Tensor("weight_scale", "out groups", values=_scale),
        Tensor("weight_zero", "out groups", "uint8", when="zeros", values=zero_points),
        Tensor("bias", "out", when="bias"),
    ),
    outputs=(Tensor("out", "*tokens out"),),
    axes={
        "tokens": Axis.per_call(),
        "groups": Axis.count(),
        "group": Axis.option(read=lambda a: a.x.shape[-1] // max(a.weight_scale.shape[-1], 1)),
        "out": Axis.width(),
    },
    flops="2 * prod(tokens) * groups * group * out",
    tolerance={
        "float32": Tolerance(2e-5, 2e-5),
        "float16": Tolerance(2e-3, 2e-3),
        "bfloat16": Tolerance(1.6e-2, 1.6e-2),
    },
    baseline="marlin",
)  # fmt: skip
