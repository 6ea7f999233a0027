"""The grouped product with MXFP4 weights for many rows per expert, in CUDA C++ for Hopper: csrc/mxfp4_prompt.cu."""

from __future__ import annotations

from functools import lru_cache
from pathlib import Path
from typing import NamedTuple

import torch
import triton
import triton.language as tl

from fastkernels.core import cuda_rtc
from fastkernels.overrides.kit.hopper import no_hopper, text
from fastkernels.overrides.kit.launch import cdiv, multiprocessors
from fastkernels.overrides.kit.overlap import follow, launch_kernel
from fastkernels.overrides.moe.mxfp4_gemm import COMMON, TYPES, arguments, loaded, unsuitable
from fastkernels.overrides.routing.sorted_pairs import Sorted

SOURCE = Path(__file__).parent / "csrc" / "mxfp4_prompt.cu"
TOKENS, ROWS = 128, 256  # of a tile
THREADS = 384
SIZES = 16, 32, 64, 96, 128  # tokens of a multiplication


class Plan(NamedTuple):
    """The constants that a kernel is compiled with; csrc/mxfp4_prompt.cu describes them."""

    k: int
    topk: int
    glu: bool
    stages: int = 8
    skew: int = 6
    group: int = 2

    @property
    def shared(self) -> int:
        """Bytes of shared memory: the ring with two barriers a stage, and 1 KiB to align it."""
        return self.stages * (128 * TOKENS + 32 * ROWS + 16) + 1024

    @property
    def options(self) -> tuple[str, ...]:
        """NVRTC's options, without the architecture."""
        return (
            "--std=c++17", "-DBF16=1", f"-DK={self.k}", f"-DTOPK={self.topk}", f"-DGLU={int(self.glu)}",
            f"-DSTAGES={self.stages}", f"-DSKEW={self.skew}", f"-DGROUP={self.group}",
        )  # fmt: skip


def multiply(tokens: int) -> str:
    """Return CUDA C++ of multiply(): wgmma for so many tokens, with weights from registers."""
    count = tokens // 2
    sums = ", ".join(f"%{i}" for i in range(count))
    operands = ", ".join(f'"+f"(c[{i}])' for i in range(count))
    return f"""
__device__ __forceinline__ void multiply(float (&c)[{count}], const unsigned (&a)[4], unsigned long long b) {{
    asm volatile(
        "wgmma.mma_async.sync.aligned.m64n{tokens}k16.f32.bf16.bf16"
        " {{{sums}}}, {{%{count}, %{count + 1}, %{count + 2}, %{count + 3}}}, %{count + 4}, 1, 1, 1, 0;"
        : {operands} : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b) : "memory");
}}
"""


def source() -> str:
    """Return the whole text that NVRTC compiles."""
    return "".join(map(multiply, SIZES)) + text(COMMON, SOURCE)


@triton.jit(do_not_specialize=["n"])
def _in_order_kernel(x_ptr, out_ptr, n, ROWS: tl.constexpr, OVERLAP: tl.constexpr):
    follow(OVERLAP)
    at = (tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS))[:, None] * 64 + tl.arange(0, 64)[None, :]
    x = tl.load(x_ptr + at, mask=at < n, other=0.0)
    x = tl.permute(tl.reshape(x, (ROWS, 4, 2, 2, 4)), (0, 2, 4, 1, 3))  # lane, word, half, pair
    tl.store(out_ptr + at, tl.reshape(x, (ROWS, 64)), mask=at < n)


def in_order(x: torch.Tensor) -> torch.Tensor:
    """x [R, K] with each 64 columns in the order in which four lanes hold weights."""
    out, rows = torch.empty_like(x), 64
    launch_kernel(_in_order_kernel, (cdiv(x.numel(), 64 * rows),), x, out, x.numel(), ROWS=rows, num_warps=4)
    return out


def refused(
    x: torch.Tensor, w: torch.Tensor, scales: torch.Tensor | None, bias: torch.Tensor, name: str
) -> str | None:
    """Return why the kernel does not support such a matrix of an MLP on any GPU, None if it does."""
    if (reason := unsuitable(x, w, scales, bias, name)) is None and w.shape[2] % 32:
        reason = f"rows of {name} have {2 * w.shape[2]} weights, not a multiple of 64"
    return reason


def unavailable(device: torch.device) -> str | None:
    """Return why the kernel cannot run on this device, None if it can."""
    return no_hopper(COMMON, device) or no_hopper(SOURCE, device)


@lru_cache(maxsize=256)
def _kernel(device: torch.device, p: Plan) -> cuda_rtc.Kernel:
    loaded.add((device, p))
    return cuda_rtc.Kernel(source(), "mxfp4_prompt", p.options, device.index, TYPES, p.shared)


def mxfp4_prompt(
    a: torch.Tensor, w: torch.Tensor, scales: torch.Tensor, bias: torch.Tensor, pairs: Sorted, p: Plan,
    weights: torch.Tensor | None = None, alpha: float = 0.0, limit: float = 0.0,
) -> torch.Tensor:  # fmt: skip
    """a: [pairs / topk, K], `in_order`; w: MXFP4 [E, N, K / 2]; bias: [E, N]; weights: float32, of pairs.

    pairs are sorted, in blocks of TOKENS. Returns the rows of pairs as biased_gemm does, [pairs, N], or, behind
    swigluoai_and_mul, [pairs, N / 2] `in_order`.
    """
    n = w.shape[1]
    out = torch.empty((pairs.n_pairs, n // 2 if p.glu else n), dtype=a.dtype, device=a.device)
    tensors = (a, w, scales, bias, out, weights, pairs.pairs, pairs.experts, pairs.total)
    args = (*(None if t is None else t.data_ptr() for t in tensors), *arguments(w, pairs, alpha, limit))
    grid = min(pairs.blocks * cdiv(n, ROWS), multiprocessors(a.device))
    _kernel(a.device, p).launch(grid, THREADS, torch.cuda.current_stream(a.device).cuda_stream, args)
    return out
