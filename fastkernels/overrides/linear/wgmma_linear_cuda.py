"""y = x W^T + b for 1 to 64 tokens by Hopper's warpgroups, in CUDA C++: csrc/wgmma_linear.cu, compiled when called.

Made for 9 to 64 tokens, where reading x takes time, too: a block reads a large tile of the weight, of all or a part of
K, and x once for all of it. How large follows from the shape, so that all SMs have the same to read.
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
from fastkernels.overrides.linear.skinny_linear_cuda import refused
from fastkernels.overrides.linear.skinny_linear_triton import MAX_TOKENS

SOURCE = Path(__file__).parent / "csrc" / "wgmma_linear.cu"
THREADS = 128 + 64
# Bytes of a block's ring: barriers, and up to 1 KiB until its first multiple of 1 KiB
SHARED = 227 * 1024 - 2048
MAX_STAGES = 16
_P, _I, _M = ctypes.c_void_p, ctypes.c_int, cuda_rtc.TensorMap
TYPES = (_M, _M, _P, _P, _P, _P, _I, _I, _I)

# splits   parts of K, each with a block of its own. More of them: less of x for each block to read, and larger tiles,
#          whose sums go through memory
# stages   as much of K is read at once as leaves room for so many stages: pieces of 128, 256 or 512 bytes of each row
# rows     the most that a tile has of the weight
# ahead    KiB of the weight that are on their way to a block before x is; not there: the ring. x comes behind
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
    """How a call is cut up. rows: of the weight in a tile; tokens: padded; block_k: of K in a stage; grid: blocks.

    ahead: stages of the weight on their way until the ring is full.
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
        """Bytes of dynamic shared memory: the ring, and 1 KiB to begin it at a multiple of that."""
        return self.stages * 2 * self.block_k * (self.rows + self.tokens) + 1024

    @property
    def workspace(self) -> tuple[int, ...]:
        """Float32 sums of all items, as threads have them: four each."""
        return self.items, self.rows // 8, 32 * -(-self.tokens // 16), 4


def tile_rows(n: int, splits: int, most: int, sms: int) -> int:
    """Rows of a tile, up to `most`, such that the block with the most work has as little as can be.

    A tile counts as 16 rows more: it has x to read, and sums to store, so fewer and larger ones are better.
    """

    def work(size: int) -> int:
        return (size + 16) * -(-(-(-n // size) * splits) // sms)

    return min(range(most, 0, -8), key=work)


@lru_cache(maxsize=4096)
def plan(
    m: int, n: int, k: int, splits: int, stages: int, rows: int, ahead: int = 0, sms: int = 132, least: int = 64,
    beside: int = 0,
) -> Plan:  # fmt: skip
    """x [m, k], weight [n, k] on a chip with so many SMs. No split is empty, whatever K is.

    least   of K in a stage
    beside  bytes of shared memory that are not the ring's
    """
    splits = min(splits, -(-k // least))
    rows = tile_rows(n, splits, rows, sms)
    tokens = next(t for t in (8, 16, 32, 64) if t >= m)

    def room(block_k: int) -> int:
        return min((SHARED - beside) // (2 * block_k * (rows + tokens)), MAX_STAGES)

    block_k = next((b for b in (256, 128) if room(b) >= stages and -(-k // b) >= splits), least)
    items, stages = -(-n // rows) * splits, room(block_k)
    first = min(-(-1024 * ahead // (2 * block_k * rows)), stages) if ahead else stages
    return Plan(rows, tokens, block_k, stages, splits, items, min(items, sms), first)


def fits(params: dict[str, Any], m: int, k: int) -> bool:
    """Whether these sizes are meant for m tokens and K = k: parts of K of some length, fewer of them for few tokens."""
    return (
        m <= MAX_TOKENS
        and params["splits"] * 256 <= max(k, 256)
        and params["splits"] <= (4 if m <= 16 else 8)
    )


def cost(p: Plan, k: int) -> float:
    """Bytes that the busiest SM waits for: of the weight at the memory's pace, or all from L2 at a faster one.

    The paces are guesses, 4.4 and 5.9 TB/s of all SMs; adding up parts costs 1.5 us, the time of about 50 KB.
    """
    rounds = -(-p.items // p.grid)
    weight, x = (2 * rounds * size * k / p.splits for size in (p.rows, p.tokens))
    parts = 8 * rounds * p.rows * p.tokens if p.splits > 1 else 0
    return max(weight, 0.75 * (weight + x + parts)) + (50e3 if p.splits > 1 else 0)


@lru_cache(maxsize=4096)
def choose(m: int, n: int, k: int, sms: int = 132) -> dict[str, Any]:
    """The default sizes for x [m, k] and weight [n, k]. One split: at Llama-8B's shapes more were slower everywhere.

    Of equal plans the one that does not let x wait for the whole ring.
    """
    sets = [p for p in PARAMS if p["splits"] == 1]
    return min(sets, key=lambda p: (cost(plan(m, n, k, **p, sms=sms), k), "ahead" not in p))


def supports_wgmma(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> str | None:
    """None if the CUDA C++ kernel for warpgroups takes this call, else the reason why not."""
    if (reason := refused(SOURCE, x, weight, bias)) is not None:
        return reason
    n, k = weight.shape
    if k < 64:
        return f"K = {k} is under 64, the columns that are read at once"
    if n > 1 and weight.stride(0) < k:
        return f"weight has strides {tuple(weight.stride())}: its rows must not overlap"
    return None


def multiply(rows: int, kind: str) -> str:
    """What stands in front of the source: wgmma for a tile of so many rows of 'bf16', 'f16' or 'e4m3'."""
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
    """All of the text that is compiled."""
    return multiply(p.rows, "bf16" if bf16 else "f16") + text(SOURCE)


def options(p: Plan, bf16: bool, scales: int = 0) -> tuple[str, ...]:
    """What NVRTC is told, beside the architecture."""
    return (
        "--std=c++17", f"-DROWS={p.rows}", f"-DTOKENS={p.tokens}", f"-DBLOCK_K={p.block_k}", f"-DSTAGES={p.stages}",
        f"-DAHEAD={p.ahead}", f"-DSPLITS={p.splits}", f"-DBF16={int(bf16)}",
        f"-DSCALES={scales}",
    )  # fmt: skip


def kernel_for(device: torch.device, p: Plan, bf16: bool) -> cuda_rtc.Kernel:
    """The kernel of this plan, compiled and loaded."""
    return _kernel(device, p._replace(items=0, grid=0), bf16)  # for any number of them


@lru_cache(maxsize=256)
def _kernel(device: torch.device, p: Plan, bf16: bool) -> cuda_rtc.Kernel:
    told = options(p, bf16)
    return cuda_rtc.Kernel(source(p, bf16), "wgmma_linear", told, device.index, TYPES, p.shared)


def linear_wgmma(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None, **params: Any
) -> torch.Tensor:
    """x: [..., K]; weight: [N, K]; bias: [N] or None. Returns [..., N] in x's dtype.

    params: one of PARAMS; without any, as `choose` says. In a CUDA graph the weight is read while the kernel before
    still runs: that one must not write it.
    """
    n, k = weight.shape
    rows = x.reshape(-1, k)
    m = rows.shape[0]
    out = torch.empty((*x.shape[:-1], n), dtype=x.dtype, device=x.device)
    if m == 0 or n == 0:
        return out
    if m > 1 and rows.stride(0) < k:  # one row for all
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
