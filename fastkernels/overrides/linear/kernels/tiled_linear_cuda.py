"""y = f(x W^T + b) for many tokens with Hopper's wgmma, in CUDA C++: csrc/tiled_linear.cu, compiled at its first call.

f is the identity, GELU, residual + scale * (...), of two weights SiLU(gate) * up or GELU(gate) * up, or the rotation of
queries and keys; cuBLASLt has GELU with tanh only.
"""

from __future__ import annotations

import ctypes
import math
from collections.abc import Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any, NamedTuple

import torch

from fastkernels.core import cuda_rtc
from fastkernels.overrides.kit.hopper import no_hopper, text
from fastkernels.overrides.kit.launch import current_stream, multiprocessors
from fastkernels.overrides.kit.overlap import overlaps
from fastkernels.overrides.linear.kernels.linear_fp8_scales import BLOCK, check, granularity, strides
from fastkernels.overrides.linear.kernels.linear_fp8_triton import unsupported
from fastkernels.overrides.linear.kernels.skinny_linear_cuda import refused
from fastkernels.overrides.linear.kernels.skinny_linear_triton import MAX_TOKENS, unaligned
from fastkernels.overrides.linear.kernels.wgmma_linear_cuda import multiply
from fastkernels.overrides.routing.sorted_pairs import Sorted

SOURCE = Path(__file__).parents[1] / "csrc" / "tiled_linear.cu"
THREADS = 384
SHARED = 226 * 1024  # bytes of a ring
MAX_STAGES = 12
GROUP = 8
LEAST = 128  # tokens for which it was faster than a product and a pass
# Without an epilogue it took 0.76 to 0.98 of cuBLAS's time in 21 sizes of encoders up to this K, but 1.05 and 1.07
# for 1,024 and 1,029 tokens (H100, 2026-11-27).
LONGEST, SLOWER = 1536, range(900, 1300)
_P, _I, _M = ctypes.c_void_p, ctypes.c_int, cuda_rtc.TensorMap
# f: its number in the source
NONE, GELU, GELU_TANH, RESIDUAL, SWIGLU, ROTATED_HALVES, ROTATED_NEIGHBORS, GEGLU, SWIGLU_FP8 = range(9)
GATED = (SWIGLU, GEGLU, SWIGLU_FP8)
HEAD = 64  # channels of a head that is rotated
EPILOGUE = (0.484, 0.11, 0.11, 0.205, 0.171, 0.171, 0.171, 0.171)  # cycles of each f for a column of a row

OUT = 5  # the result's place among the kernel's parameters
# Launches whose parameters are in memory: without them a call takes three times as long on the host. A model has a few
# for each layer; addresses of activations repeat.
MOST_PREPARED = 4096
_prepared: dict[tuple[Any, ...], cuda_rtc.Prepared] = {}

# rows, columns  of a tile
# cooperate      both warpgroups multiply a tile, instead of taking tiles in turn
# shares         what blocks of a cluster share: W ('w': tiles with the same columns), x ('x': with the same rows), or
#                both ('wx': half of them W, two x)
# cluster        blocks of a cluster
PARAMS: tuple[dict[str, Any], ...] = tuple(
    {"rows": rows, "columns": columns, "cooperate": cooperate, "shares": shares, "cluster": cluster}
    for rows, columns, cooperate in (
        (128, 192, False), (128, 160, False), (128, 128, False), (128, 96, False), (192, 128, False), (192, 96, False),
        (64, 256, False), (64, 192, False), (64, 160, False), (64, 128, False), (64, 96, False),
        (256, 192, True), (256, 160, True), (256, 128, True), (256, 96, True), (128, 256, True), (128, 192, True),
        (128, 128, True), (128, 96, True), (128, 64, True),
    )
    for shares, cluster in (("w", 1), ("w", 2), ("x", 2))
    if shares == "x" or columns // cluster % 32 == 0
)  # fmt: skip
# Of float8 tiles: us of 128 columns of K, and of the rest of a tile, from 18 to 38 sizes on an H100, 2026-11-28. The
# choice takes 2% longer than the fastest of these in the mean. Clusters of whole tiles and four splits were not faster.
FP8_COST = {
    (256, 128, 1): (0.80, 3.5), (128, 256, 1): (0.78, 3.4), (128, 128, 1): (0.46, 1.0), (128, 64, 1): (0.35, 0.5),
    (128, 128, 2): (0.46, 3.5), (128, 64, 2): (0.35, 3.0),
}  # fmt: skip
FP8_READS = 2.45e6  # bytes of the weight in a us
FP8_PARAMS = tuple(
    {"rows": rows, "columns": columns, "cooperate": True, "splits": splits}
    for rows, columns, splits in FP8_COST
)

# The set for GEGLU of so many tokens. SDXL's 2,048 and 8,192 on an H100 at its limit of power, 2026-11-28: 85.2 and
# 93.8 us, the set with the fewest `cycles` 90.5 and 95.4, cuBLAS and a pass 108.8 and 135.2.
MANY, WIDE = 1024, {"rows": 128, "columns": 256, "cooperate": True, "shares": "w", "cluster": 2}
# The set for SWIGLU from so many tokens and columns of x on. Of nine sets it was the fastest in 23 of 25 shapes of five
# models from Llama-3.2-3B to Qwen2.5-14B with 512 to 16,384 tokens, and 0.98 of the fastest in the others (H200,
# 2026-11-29). Its speed over that of cuBLAS and a pass was 0.96 to 1.15 at 512 tokens, 0.99 to 1.19 above.
MANY_GATED, LONG_GATED = 512, 3072
TALL = {"rows": 128, "columns": 192, "cooperate": False, "shares": "w", "cluster": 2}


class Turns(ctypes.Structure):
    """Cosines and sines, each with a row of HEAD numbers for a token, and the columns that are rotated.

    row     numbers from one token's to the next token's
    tokens  of an image, of which the first `prefix` have no row
    turned  columns of the results that are rotated, the first ones
    """

    _fields_ = (
        ("cosines", _P), ("sines", _P), ("row", _I), ("tokens", _I), ("prefix", _I), ("turned", _I),
    )  # fmt: skip


class Scales(ctypes.Structure):
    """Scales of float8 x and W, and their strides: by token or 128 rows, and by 128 columns."""

    _fields_ = (
        ("x", _P), ("w", _P), ("x_token", _I), ("x_block", _I), ("w_row", _I), ("w_block", _I),
    )  # fmt: skip


class Groups(ctypes.Structure):
    """Rows of experts: the expert of each tile's rows, rows in use, and where results go, times which weights.

    scales, column, powers_of_2  of float8 results: memory, numbers from 128 columns' to the next ones', rounded up
    """

    _fields_ = (
        ("experts", _P), ("total", _P), ("pairs", _P), ("weights", _P), ("scales", _P), ("E", _I), ("n_pairs", _I),
        ("column", _I), ("powers_of_2", _I),
    )  # fmt: skip


class Plan(NamedTuple):
    """How a call is divided: tiles of rows x columns, clusters of blocks that share W or x, and blocks in all."""

    f: int
    parts: int  # weights
    rows: int
    columns: int  # of a weight; of two if GATED
    cooperate: bool
    shares: str
    cluster: int
    tiles: int  # of a cluster, in all
    grid: int
    fp8: bool = False
    grouped: bool = False
    splits: int = 1  # blocks that have a part of K each; they are a cluster

    @property
    def stages(self) -> int:
        return min(MAX_STAGES, (SHARED - self.sent) // (128 * (self.rows + self.columns)))

    @property
    def sent(self) -> int:
        """Bytes of sums that a block of a split tile gets from the others."""
        return 4 * self.rows * self.columns // self.splits * (self.splits - 1)

    @property
    def shared(self) -> int:
        """Bytes of dynamic shared memory: the ring, sums, the barriers and those of turns, and 1 KiB to align it."""
        return self.stages * (128 * (self.rows + self.columns) + 16) + self.sent + 16 + 1024

    @property
    def sharing(self) -> tuple[int, int]:
        """Blocks of a cluster that share W, and x."""
        return sharing(self.shares, self.cluster)

    @property
    def boxes(self) -> tuple[int, int]:
        """Rows of a copy of x and W; a cluster's other blocks read the rest of what it shares."""
        w, x = self.sharing
        return self.rows // x, self.columns // (2 if self.f in GATED else w)

    def options(self, bf16: bool) -> tuple[str, ...]:
        """Return NVRTC's options, without the architecture."""
        together = self.cluster * self.splits
        clustered = f"__cluster_dims__({together},1,1)" if together > 1 else ""
        return (
            "--std=c++17", f"-DBM={self.rows}", f"-DBN={self.columns}", f"-DSTAGES={self.stages}",
            f"-DCOOPERATE={int(self.cooperate)}", f"-DCLUSTER={self.cluster}", f"-DSHARING_W={self.sharing[0]}",
            f"-DGROUP={GROUP}", f"-DPARTS={self.parts}", f"-DBEHIND={self.f}", f"-DBF16={int(bf16)}",
            f"-DFP8={int(self.fp8)}", f"-DGROUPED={int(self.grouped)}", f"-DSPLITS={self.splits}",
            f"-DCLUSTERED={clustered}",
        )  # fmt: skip


def sharing(shares: str, cluster: int) -> tuple[int, int]:
    """Return the blocks of a cluster that share W, and those that share x."""
    return {"w": (cluster, 1), "x": (1, cluster), "wx": (cluster // 2, 2)}[shares]


@lru_cache(maxsize=4096)
def plan(
    m: int, n: int, rows: int, columns: int, cooperate: bool = False, shares: str = "w", cluster: int = 1,
    sms: int = 132, f: int = NONE, parts: int = 1, fp8: bool = False, splits: int = 1,
) -> Plan:  # fmt: skip
    """Return the plan for results [m, n] of so many weights, or of two if GATED, on a chip with so many SMs."""
    down = -(-m // rows)
    right = -(-2 * n // columns) if f in GATED else parts * -(-n // columns)
    with_w, with_x = sharing(shares, cluster)
    tiles = -(-down // with_w) * -(-right // with_x)
    grid = cluster * min(tiles, sms // cluster)
    if splits > 1:
        grid = splits * tiles  # a block has one tile
    return Plan(f, parts, rows, columns, cooperate, shares, cluster, tiles, grid, fp8, False, splits)


def fits(params: dict[str, Any], f: int) -> bool:
    """Return whether a thread's sums and the residuals that it reads ahead fit in registers, and tiles have halves."""
    if f >= SWIGLU and params["columns"] % 64:
        return False
    return f != RESIDUAL or params["rows"] * params["columns"] < 128 * 192 * (1 + params["cooperate"])


def cycles(p: Plan, k: int, sms: int = 132) -> float:
    """Return about how many cycles the busiest block takes, to compare plans.

    A fit to 85 shapes of vision transformers on an H100, 2026-11-28: its choice takes 0.7% longer than the fastest set
    in the mean, at most 11%. A piece of 64 columns takes 2 cycles for each column of 64 rows, or its bytes at 66 a
    cycle and SM. Clusters wait for each other at each tile. The epilogue counts where no other tile is multiplied
    meanwhile.
    """
    pieces, rounds = -(-k // 64), -(-p.tiles // (p.grid // p.cluster))
    x_rows, w_rows = p.boxes
    if p.f in GATED and p.sharing[0] != 2:
        w_rows *= 2
    reading = 128 * (x_rows + w_rows) * p.grid / sms / 66.4
    piece = max(p.rows * p.columns / 32, reading) + (293 if p.cooperate else 283)
    behind = EPILOGUE[p.f] * p.rows * p.columns
    once = 2735 + 0.835 * rounds * behind if p.cooperate else 2286 + behind
    return rounds * (pieces * piece + (1374 if p.cluster > 1 else 0)) + once


@lru_cache(maxsize=4096)
def choose(m: int, n: int, k: int, f: int = NONE, sms: int = 132, parts: int = 1) -> dict[str, Any]:
    """Return the default parameters for x [m, k] and so many weights [n, k]."""
    if f == GEGLU and m >= MANY:
        return WIDE
    if f == SWIGLU and m >= MANY_GATED and k >= LONG_GATED:
        return TALL
    sets = (p for p in PARAMS if fits(p, f))
    return min(sets, key=lambda p: (cycles(plan(m, n, **p, sms=sms, f=f, parts=parts), k, sms), p["cluster"]))


@lru_cache(maxsize=4096)
def choose_fp8(m: int, n: int, k: int, sms: int = 132) -> dict[str, Any]:
    """Return the default parameters for float8 x [m, k] and a weight [n, k]."""

    def us(p: dict[str, Any]) -> float:
        piece, rest = FP8_COST[p["rows"], p["columns"], p["splits"]]
        blocks = plan(m, n, **p, sms=sms).tiles * p["splits"]
        if p["splits"] > 1 and blocks > sms:
            return math.inf
        own = -(-blocks // sms) * (-(-k // (BLOCK * p["splits"])) * piece + rest)
        return max(own, n * k / FP8_READS) + own / 10

    return min(FP8_PARAMS, key=us)


def supports_tiled_fp8(
    x: torch.Tensor, weight: torch.Tensor, x_scale: torch.Tensor, weight_scale: torch.Tensor,
    bias: torch.Tensor | None = None, out_dtype: torch.dtype | None = None,
) -> str | None:  # fmt: skip
    """Return why the tiled kernel does not support this call of linear_fp8, None if it does."""
    reason = no_hopper(SOURCE, x.device) or unsupported(x, weight, x_scale, weight_scale, bias, out_dtype)
    if reason is not None:
        return reason
    n, k = weight.shape
    if granularity(x, weight, x_scale, weight_scale) != BLOCK:
        return "needs block scales"
    if n % 32 or k % 16 or k < BLOCK:
        return f"N = {n} is not a multiple of 32, or K = {k} no multiple of 16 or under {BLOCK}"
    if not MAX_TOKENS < x.numel() // k < (1 << 32) / n:
        return f"{x.numel() // k} tokens are up to {MAX_TOKENS}, or 2^32 results"
    if bias is not None and bias.dtype != (out_dtype or torch.bfloat16):
        return f"bias is {bias.dtype}, the result {out_dtype or torch.bfloat16}"
    if not x.is_contiguous() or x.data_ptr() % 16:
        return f"x has strides {tuple(x.stride())}: it must be contiguous and start at 16 bytes"
    if weight.stride(0) % 16 or weight.stride(0) < k or weight.data_ptr() % 16:
        return f"weight has strides {tuple(weight.stride())}: its rows must start at 16 bytes and not overlap"
    return None


def supports_tiled(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> str | None:
    """Return why the tiled kernel does not support this call, None if it does."""
    if (reason := refused(SOURCE, x, weight, bias, unaligned)) is not None:
        return reason
    n, k = weight.shape
    if n % 32 or k < 64:
        return f"N = {n} is not a multiple of 32, or K = {k} under 64, the columns of one copy"
    if x.numel() // k * 3 * n >= 1 << 32:  # of up to three weights
        return "2^32 results or more"
    if weight.stride(0) < k:
        return f"weight has strides {tuple(weight.stride())}: its rows must not overlap"
    return None


def for_tiles(linear: Any, x: torch.Tensor, halves: bool = False) -> bool:
    """Whether a layer's sizes, or those of its halves, suit the kernel: many tokens of 16-bit numbers."""
    sizes = linear.in_features % 8 == 0 and linear.out_features % (64 if halves else 32) == 0
    many = x.dtype in (torch.float16, torch.bfloat16) and x.numel() >= LEAST * x.shape[-1]
    return sizes and linear.in_features >= 64 and many


def runs_tiled(linear: Any, x: torch.Tensor, halves: bool = False) -> bool:
    """Whether to multiply with this kernel: in code that torch.compile traces, blocks are ours on Hopper only."""
    fits = for_tiles(linear, x, halves)
    return fits and (torch.compiler.is_compiling() or supports_tiled(x, linear.weight, linear.bias) is None)


def is_faster(
    x: torch.Tensor, weights: Sequence[torch.Tensor], biases: Sequence[torch.Tensor | None]
) -> bool:  # fmt: skip
    """Whether this kernel multiplies x and weights of one shape faster than cuBLAS, without an epilogue."""
    k = x.shape[-1]
    if not x.is_cuda or not LEAST * k <= x.numel() or k > LONGEST or x.numel() // k in SLOWER:
        return False
    return all(supports_tiled(x, *each) is None for each in zip(weights, biases, strict=True))


def _multiply(p: Plan, bf16: bool) -> str:
    kind = "e4m3" if p.fp8 else "bf16" if bf16 else "f16"
    return multiply(min(p.columns, BLOCK) if p.fp8 else p.columns, kind)


def source(p: Plan, bf16: bool) -> str:
    """Return the whole text that NVRTC compiles."""
    return _multiply(p, bf16) + text(SOURCE)


@lru_cache(maxsize=256)
def _kernel(device: torch.device, p: Plan, bf16: bool) -> cuda_rtc.Kernel:
    more = *([Scales] if p.fp8 else []), *([Groups] if p.grouped else [])
    types = (_M, _M * p.parts, _P * p.parts, _P, _P, _P, _I, _I, _I, Turns, *more)
    return cuda_rtc.Kernel(source(p, bf16), "tiled_linear", p.options(bf16), device.index, types, p.shared)


def linear_tiled(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None, f: int = NONE,
    scale: torch.Tensor | None = None, residual: torch.Tensor | None = None, **params: Any,
) -> torch.Tensor:  # fmt: skip
    """x: [..., K]; weight: [N, K]; bias, scale: [N] or None; residual: [..., N], with f = RESIDUAL. Returns [..., N].

    params: one of PARAMS; the defaults are those of `choose`. In a CUDA graph this kernel prefetches the weight while
    the previous kernel still runs, which must not write it.
    """
    out = torch.empty((*x.shape[:-1], weight.shape[0]), dtype=x.dtype, device=x.device)
    _launch(x, (weight,), (bias,), f, out, scale, residual, **params)
    return out


def linears_tiled(
    x: torch.Tensor, weights: Sequence[torch.Tensor], biases: Sequence[torch.Tensor | None], f: int = NONE,
    cos: torch.Tensor | None = None, sin: torch.Tensor | None = None, **params: Any,
) -> torch.Tensor:  # fmt: skip
    """weights: of one shape [N, K], each with a bias [N] or None. Returns their products with x, [weights, ..., N].

    With SWIGLU or GEGLU they are gate and up, and the result is SiLU or GELU(gate) * up, [..., N]. With ROTATED_.. x
    is [B, S, K], and the first two thirds of all columns are heads of HEAD channels, rotated in the last tokens of S by
    cos and sin [P, HEAD] as in rope_nd.
    """
    n = weights[0].shape[0]
    shape, turns = (*x.shape[:-1], n), None
    out = x.new_empty(shape if f in GATED else (len(weights), *shape))
    if cos is not None and sin is not None:
        tokens, turned = x.shape[1], 2 * len(weights) * n // 3
        turns = Turns(cos.data_ptr(), sin.data_ptr(), cos.stride(0), tokens, tokens - len(cos), turned)
    _launch(x, weights, biases, f, out, turns=turns, **params)
    return out


def linear_fp8_tiled(
    x: torch.Tensor, weight: torch.Tensor, x_scale: torch.Tensor, weight_scale: torch.Tensor,
    bias: torch.Tensor | None = None, out_dtype: torch.dtype | None = None, **params: Any,
) -> torch.Tensor:  # fmt: skip
    """Run linear_fp8 with block scales, with one of FP8_PARAMS; the defaults are those of `choose_fp8`."""
    check(x, weight, x_scale, weight_scale, bias)
    out = torch.empty((*x.shape[:-1], weight.shape[0]), dtype=out_dtype or torch.bfloat16, device=x.device)
    x_scale, at = strides(BLOCK, x_scale, weight_scale)
    scales = Scales(x_scale.data_ptr(), weight_scale.data_ptr(), *at)
    _launch(x.view(torch.int16), (weight.view(torch.int16),), (bias,), NONE, out, scales=scales, **params)
    return out


def grouped_fp8_tiled(
    x: torch.Tensor, weight: torch.Tensor, x_scale: torch.Tensor, weight_scale: torch.Tensor, pairs: Sorted,
    weights: torch.Tensor, dtype: torch.dtype, **params: Any,
) -> torch.Tensor:  # fmt: skip
    """Multiply rows of x [R, K], sorted by expert, with their expert's matrix of weight [E, N, K], with block scales.

    pairs are in blocks of as many rows as a tile has. Row i of the products becomes row pairs[i] of the result, times
    weights[pairs[i]].
    """
    out = torch.empty((pairs.n_pairs, weight.shape[1]), dtype=dtype, device=x.device)
    to = {"pairs": _pointer(pairs.pairs), "weights": _pointer(weights), "n_pairs": pairs.n_pairs}
    _launch_grouped(x, weight, x_scale, weight_scale, pairs, NONE, dtype, out, to, params)
    return out


def grouped_swiglu_fp8_tiled(
    x: torch.Tensor, weight: torch.Tensor, x_scale: torch.Tensor, weight_scale: torch.Tensor, pairs: Sorted,
    dtype: torch.dtype, powers_of_2: bool, **params: Any,
) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
    """Multiply rows of x [R, K] with gate and up of weight [E, 2 I, K]: float8 SiLU(gate) * up [R, I], and scales.

    Gate, up and their product are rounded to `dtype`. Scales are by column, for 128 columns each.
    """
    rows, n = x.shape[0], weight.shape[1] // 2
    out = torch.empty((rows, n), dtype=x.dtype, device=x.device)
    scales = torch.empty((n // BLOCK, rows), dtype=torch.float32, device=x.device)
    to = {"scales": scales.data_ptr(), "column": rows, "powers_of_2": int(powers_of_2)}
    _launch_grouped(x, weight, x_scale, weight_scale, pairs, SWIGLU_FP8, dtype, out, to, params)
    return out, scales.t()


def _pointer(of: torch.Tensor | None) -> int | None:
    return None if of is None else of.data_ptr()


def _launch_grouped(
    x: torch.Tensor, weight: torch.Tensor, x_scale: torch.Tensor, weight_scale: torch.Tensor, pairs: Sorted, f: int,
    dtype: torch.dtype, out: torch.Tensor, to: dict[str, Any], params: dict[str, Any],
) -> None:  # fmt: skip
    (e, n, k), m, parts = weight.shape, x.shape[0], 2 if f == SWIGLU_FP8 else 1
    n //= parts
    p = plan(m, n, **params, sms=multiprocessors(x.device), f=f, parts=parts, fp8=True)
    p = p._replace(grouped=True)
    x_scale, at = strides(BLOCK, x_scale, weight_scale[0])
    scales = Scales(x_scale.data_ptr(), weight_scale.data_ptr(), *at)
    x_rows, w_rows = p.boxes
    w_maps = (
        _weight_map(weight.data_ptr() + i * n * k, (e * parts - i) * n, k // 2, k // 2, w_rows)
        for i in range(parts)
    )
    maps = cuda_rtc.tensor_map(x.data_ptr(), m, k // 2, k // 2, x_rows), (_M * parts)(*w_maps)
    groups = Groups(experts=pairs.experts.data_ptr(), total=_pointer(pairs.total), E=e, **to)
    kernel = _kernel(x.device, p._replace(tiles=0, grid=0), dtype == torch.bfloat16)
    stream = torch.cuda.current_stream(x.device).cuda_stream
    given = (*maps, (_P * parts)(), None, None, out.data_ptr(), m, n, k // 2, Turns(), scales, groups)
    early = overlaps(x.device) and torch.cuda.is_current_stream_capturing()
    kernel.launch(p.grid, THREADS, stream, given, overlap=early)


def _launch(
    x: torch.Tensor, weights: Sequence[torch.Tensor], biases: Sequence[torch.Tensor | None], f: int, out: torch.Tensor,
    scale: torch.Tensor | None = None, residual: torch.Tensor | None = None, turns: Turns | None = None,
    scales: Scales | None = None, **params: Any,
) -> None:  # fmt: skip
    scale, residual = (None if t is None else t.contiguous() for t in (scale, residual))
    stream = current_stream(x.device)
    early = overlaps(x.device) and torch.cuda.is_current_stream_capturing()
    key = None
    if turns is None and scales is None and x.is_contiguous():  # an x with other strides may be copied
        key = (
            x.data_ptr(), x.shape, out.shape, out.dtype, x.device, f, *params.values(),
            *[(w.data_ptr(), w.stride(0)) for w in weights], *[t if t is None else t.data_ptr() for t in biases],
            scale if scale is None else scale.data_ptr(), residual if residual is None else residual.data_ptr(),
        )  # fmt: skip
    launch = _prepared.get(key) if key is not None else None
    if launch is None:
        launch = _prepare(x, weights, biases, f, out, scale, residual, turns, scales, params)
        if launch is None:
            return
        if key is not None:
            if len(_prepared) >= MOST_PREPARED:
                _prepared.clear()
            _prepared[key] = launch
    launch.launch(stream, early, OUT, out.data_ptr())


def _prepare(
    x: torch.Tensor, weights: Sequence[torch.Tensor], biases: Sequence[torch.Tensor | None], f: int, out: torch.Tensor,
    scale: torch.Tensor | None, residual: torch.Tensor | None, turns: Turns | None, scales: Scales | None,
    params: dict[str, Any],
) -> cuda_rtc.Prepared | None:  # fmt: skip
    """Describe a launch; None without results."""
    (n, k), parts = weights[0].shape, len(weights)
    rows = x.reshape(-1, k)
    m = rows.shape[0]
    if m == 0 or n == 0:
        return None
    if m > 1 and rows.stride(0) < k:  # expanded from one row
        rows = rows.contiguous()
    sms, fp8 = multiprocessors(x.device), scales is not None
    params = params or (choose_fp8(m, n, 2 * k, sms) if fp8 else choose(m, n, k, f, sms, parts))
    p = plan(m, n, **params, sms=sms, f=f, parts=parts, fp8=fp8)
    kernel = _kernel(x.device, p._replace(tiles=0, grid=0), out.dtype == torch.bfloat16)
    if (
        p.cluster > 2
    ):  # not all SMs may be in such a cluster, and blocks that start later would take their tiles late
        p = p._replace(grid=min(p.grid, p.cluster * kernel.clusters(p.cluster, THREADS)))
    x_rows, w_rows = p.boxes
    x_map = cuda_rtc.tensor_map(rows.data_ptr(), m, k, rows.stride(0) if m > 1 else k, x_rows)
    w_maps = (_weight_map(weight.data_ptr(), n, k, weight.stride(0), w_rows) for weight in weights)
    added, pointers = (
        [None if t is None else t.data_ptr() for t in some] for some in (biases, (scale, residual, out))
    )
    more = turns or Turns(), *([] if scales is None else [scales])
    given = (x_map, (_M * parts)(*w_maps), (_P * parts)(*added), *pointers, m, n, k, *more)
    return cuda_rtc.Prepared(kernel, p.grid, THREADS, given)


def _weight_map(address: int, n: int, k: int, row: int, box: int) -> cuda_rtc.TensorMap:
    """Describe a weight: 32 rows are 4 x 4 pairs, which the box transposes."""
    sizes, strides = (k, 2, 4, 4, n // 32), (row, 8 * row, 2 * row, 32 * row)
    return cuda_rtc.tensor_map_of(address, sizes, strides, (64, 2, 4, 4, box // 32))
