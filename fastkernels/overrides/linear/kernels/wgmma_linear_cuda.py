"""y = x W^T + b for 1 to 64 tokens with Hopper's wgmma, in CUDA C++: csrc/wgmma_linear.cu, compiled at its first call.

The kernel is for 9 to 64 tokens, where reading x takes time, too: a block reads a large tile of the weight, over all of
K or a part of it, and x once for the whole tile. The tile's size follows from the shape, so that all SMs read the same.
"""

from __future__ import annotations

import ctypes
from functools import lru_cache
from pathlib import Path
from typing import Any, NamedTuple

import torch

from fastkernels.core import cuda_rtc
from fastkernels.overrides.kit.hopper import text
from fastkernels.overrides.kit.launch import multiprocessors, tickets
from fastkernels.overrides.kit.overlap import overlaps
from fastkernels.overrides.linear.kernels.skinny_linear_cuda import refused
from fastkernels.overrides.linear.kernels.skinny_linear_triton import MAX_TOKENS

SOURCE = Path(__file__).parents[1] / "csrc" / "wgmma_linear.cu"
THREADS = 128 + 64
# Bytes of a block's ring, without barriers and up to 1 KiB of alignment
SHARED = 227 * 1024 - 2048
MAX_STAGES = 16
_P, _I, _M = ctypes.c_void_p, ctypes.c_int, cuda_rtc.TensorMap
TYPES = (_M, _M, _P, _P, _P, _P, _I, _I, _I)

# splits   parts of K, each with a block of its own. With more, each block reads less of x and has larger tiles, whose
#          sums go through memory
# stages   the least number of stages; pieces of K (128, 256 or 512 bytes of each row) are as large as that allows
# rows     the most rows of the weight in a tile
# ahead    KiB of the weight that a block prefetches before x; absent: as much as the ring holds
PARAMS: tuple[dict[str, Any], ...] = (
    *(
        {"splits": splits, "stages": stages, "rows": rows}
        for splits, stages, rows in (
            (1, 8, 256), (1, 4, 256), (1, 4, 128), (2, 4, 256), (2, 8, 256), (4, 4, 256), (4, 8, 256), (8, 4, 256),
        )
    ),
    {"splits": 1, "stages": 4, "rows": 128, "ahead": 64},
)  # fmt: skip


class Plan(NamedTuple):
    """How a call is divided.

    rows     of the weight in a tile
    tokens   padded
    block_k  columns of a stage
    items    pairs of a tile and a split
    grid     blocks
    ahead    stages of the weight that are prefetched until the ring is full
    """

    rows: int
    tokens: int
    block_k: int
    stages: int
    splits: int
    items: int
    grid: int
    ahead: int

    @property
    def shared(self) -> int:
        """Bytes of dynamic shared memory: the ring, and 1 KiB to align it."""
        return self.stages * 2 * self.block_k * (self.rows + self.tokens) + 1024

    @property
    def workspace(self) -> tuple[int, ...]:
        """Shape of the float32 sums of all items: four for each thread."""
        return self.items, self.rows // 8, 32 * -(-self.tokens // 16), 4


@lru_cache(maxsize=4096)
def tile_rows(n: int, splits: int, most: int, sms: int) -> int:
    """Return the rows of a tile, at most `most`, that minimize the work of the busiest block.

    Each tile costs 16 rows extra for reading x and storing sums, so that fewer and larger tiles win. For a number of
    rounds, the smallest tile is best; no more rounds are tried than could be better.
    """
    rounds = -(-(-(-n // most) * splits) // sms)  # with the largest tiles
    found, best = most, float("inf")
    while 16 * rounds + n * splits / sms < best:
        size = -(-n // (8 * (rounds * sms // splits))) * 8
        if (size + 16) * rounds < best:
            found, best = size, (size + 16) * rounds
        rounds += 1
    return found


@lru_cache(maxsize=4096)
def plan(
    m: int, n: int, k: int, splits: int, stages: int, rows: int, ahead: int = 0, sms: int = 132, least: int = 64,
    reserved: int = 0,
) -> Plan:  # fmt: skip
    """Return the plan for x [m, k] and weight [n, k] on a chip with so many SMs. No split is empty.

    least     columns of a stage
    reserved  bytes of shared memory that the ring cannot use
    """
    parts = min(splits, -(-k // least)) if splits > 1 else 1
    size = tile_rows(n, parts, rows, sms)
    tokens = next(t for t in (8, 16, 32, 64) if t >= m)

    def room(block_k: int) -> int:
        return min((SHARED - reserved) // (2 * block_k * (size + tokens)), MAX_STAGES)

    block_k = next((b for b in (256, 128) if room(b) >= stages and -(-k // b) >= parts), least)
    items, ring = -(-n // size) * parts, room(block_k)
    first = min(-(-1024 * ahead // (2 * block_k * size)), ring) if ahead else ring
    return Plan(size, tokens, block_k, ring, parts, items, min(items, sms), first)


def fits(params: dict[str, Any], m: int, k: int) -> bool:
    """Return whether these parameters suit m tokens and K = k: no short splits, and few splits for few tokens."""
    return (
        m <= MAX_TOKENS
        and params["splits"] * 256 <= max(k, 256)
        and params["splits"] <= (4 if m <= 16 else 8)
    )


def cost(p: Plan, k: int) -> float:
    """Return the bytes that bound the busiest SM: the weight's at memory speed, or all bytes at L2 speed.

    The speeds are estimates, 4.4 and 5.9 TB/s for all SMs; adding up splits costs 1.5 us, the time of about 50 KB.
    """
    rounds = -(-p.items // p.grid)
    weight, x = (2 * rounds * size * k / p.splits for size in (p.rows, p.tokens))
    parts = 8 * rounds * p.rows * p.tokens if p.splits > 1 else 0
    return max(weight, 0.75 * (weight + x + parts)) + (50e3 if p.splits > 1 else 0)


@lru_cache(maxsize=4096)
def choose(m: int, n: int, k: int, sms: int = 132) -> dict[str, Any]:
    """Return the default parameters for x [m, k] and weight [n, k]: one split, since more were slower at Llama-8B's.

    Of equal plans, it prefers the one in which x does not wait for the whole ring.
    """
    sets = [p for p in PARAMS if p["splits"] == 1]
    return min(sets, key=lambda p: (cost(plan(m, n, k, **p, sms=sms), k), "ahead" not in p))


def supports_wgmma(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> str | None:
    """Return why the wgmma kernel does not support this call, None if it does."""
    if (reason := refused(SOURCE, x, weight, bias)) is not None:
        return reason
    n, k = weight.shape
    if k < 64:
        return f"K = {k} is under 64, the columns of one copy"
    if n > 1 and weight.stride(0) < k:
        return f"weight has strides {tuple(weight.stride())}: its rows must not overlap"
    return None


def multiply(rows: int, kind: str) -> str:
    """Return CUDA C++ of multiply(): wgmma for a tile of so many rows of 'bf16', 'f16' or 'e4m3'."""
    count, k, layout = rows // 2, 32 if kind == "e4m3" else 16, "" if kind == "e4m3" else ", 0, 0"
    sums = ", ".join(f"%{i}" for i in range(count))
    operands = ", ".join(f'"+f"(c[{i}])' for i in range(count))
    return f"""
__device__ __forceinline__ void multiply(float (&c)[{count}], unsigned long long a, unsigned long long b, int add) {{
    asm volatile(
        "{{ .reg .pred p; setp.ne.b32 p, %{count + 2}, 0;"
        " wgmma.mma_async.sync.aligned.m64n{rows}k{k}.f32.{kind}.{kind}"
        " {{{sums}}}, %{count}, %{count + 1}, p, 1, 1{layout}; }}"
        : {operands} : "l"(a), "l"(b), "r"(add) : "memory");
}}
"""


def source(p: Plan, bf16: bool) -> str:
    """Return the whole text that NVRTC compiles."""
    return multiply(p.rows, "bf16" if bf16 else "f16") + text(SOURCE)


def options(p: Plan, bf16: bool, scales: int = 0) -> tuple[str, ...]:
    """Return NVRTC's options, without the architecture."""
    return (
        "--std=c++17", f"-DROWS={p.rows}", f"-DTOKENS={p.tokens}", f"-DBLOCK_K={p.block_k}", f"-DSTAGES={p.stages}",
        f"-DAHEAD={p.ahead}", f"-DSPLITS={p.splits}", f"-DBF16={int(bf16)}",
        f"-DSCALES={scales}",
    )  # fmt: skip


def kernel_for(device: torch.device, p: Plan, bf16: bool) -> cuda_rtc.Kernel:
    """Return the kernel of this plan, compiled and loaded."""
    return _kernel(device, p._replace(items=0, grid=0), bf16)  # one kernel for any number of items


@lru_cache(maxsize=256)
def _kernel(device: torch.device, p: Plan, bf16: bool) -> cuda_rtc.Kernel:
    told = options(p, bf16)
    return cuda_rtc.Kernel(source(p, bf16), "wgmma_linear", told, device.index, TYPES, p.shared)


def linear_wgmma(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None, **params: Any
) -> torch.Tensor:
    """x: [..., K]; weight: [N, K]; bias: [N] or None. Returns [..., N] in x's dtype.

    params: one of PARAMS; the defaults are those of `choose`. In a CUDA graph this kernel prefetches the weight while
    the previous kernel still runs, which must not write it.
    """
    n, k = weight.shape
    rows = x.reshape(-1, k)
    m = rows.shape[0]
    out = torch.empty((*x.shape[:-1], n), dtype=x.dtype, device=x.device)
    if m == 0 or n == 0:
        return out
    if m > 1 and rows.stride(0) < k:  # expanded from one row
        rows = rows.contiguous()
    sms = multiprocessors(x.device)
    p = plan(m, n, k, **{**choose(m, n, k, sms), **params}, sms=sms)
    kernel = kernel_for(x.device, p, x.dtype == torch.bfloat16)
    x_map = cuda_rtc.tensor_map(rows.data_ptr(), m, k, rows.stride(0) if m > 1 else k, p.tokens)
    w_map = cuda_rtc.tensor_map(weight.data_ptr(), n, k, weight.stride(0) if n > 1 else k, p.rows)
    parts = taken = None
    if p.splits > 1:
        parts = torch.empty(p.workspace, dtype=torch.float32, device=x.device)
        taken = tickets.get(x.device, p.items // p.splits)
    pointers = (None if t is None else t.data_ptr() for t in (bias, out, parts, taken))
    stream = torch.cuda.current_stream(x.device).cuda_stream
    early = overlaps(x.device) and torch.cuda.is_current_stream_capturing()
    kernel.launch(p.grid, THREADS, stream, (x_map, w_map, *pointers, m, n, k), overlap=early)
    return out
