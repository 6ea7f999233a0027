"""The grouped product with 4-bit weights for several rows per expert, in CUDA C++ for Hopper: csrc/mxfp4_stream.cu."""

from __future__ import annotations

from functools import lru_cache
from pathlib import Path
from typing import Any, NamedTuple

import torch

from fastkernels.core import cuda_rtc
from fastkernels.overrides.kit.hopper import no_hopper, text
from fastkernels.overrides.kit.launch import cdiv, multiprocessors
from fastkernels.overrides.kit.overlap import overlaps
from fastkernels.overrides.moe import mxfp4_gemm as few
from fastkernels.overrides.moe.sorted_pairs import Sorted

SOURCE = Path(__file__).parent / "csrc" / "mxfp4_stream.cu"
FINISHERS = 3  # warps that store results; one more copies weights
MOST_STAGES = 12


class Plan(NamedTuple):
    """The constants that a kernel is compiled with; csrc/mxfp4_stream.cu describes them."""

    k: int
    topk: int
    glu: int
    weighted: bool
    rows: int
    parts: int
    stages: int
    form: int = few.MXFP4
    tokens: int = 16

    @property
    def threads(self) -> int:
        """Threads of a block."""
        return 32 * (self.rows * self.parts + 1 + FINISHERS)

    @property
    def turns(self) -> int:
        """Steps of 128 columns of a warp."""
        return cdiv(cdiv(self.k, 128), self.parts)

    @property
    def stage(self) -> int:
        """Bytes of a tile's weights, scales and more in shared memory."""
        of_row, more = (self.k // 16, 4) if self.form == few.NVFP4 else (self.k // 32, 2)
        return 16 * self.rows * (self.k // 2 + of_row + more)

    @property
    def shared(self) -> int:
        """Bytes of shared memory: the ring, the sums of two tiles, barriers."""
        sums = 2 * self.rows * self.parts * self.tokens // 8 * 512
        return self.stages * (self.stage + 16) + sums + 32

    @property
    def registers(self) -> int:
        """Registers of a lane, about: activations, a tile's weights, sums, and the rest."""
        return 2 * self.turns * self.tokens + 10 * self.turns + self.tokens // 2 + 30

    @property
    def cost(self) -> float:
        """Instructions for 16 rows, about, divided by the share of the time in which so many warps issue one."""
        warps = self.rows * self.parts
        return self.parts * (165 * self.turns + 80) / (1 - 2.4 / max(warps, 3))

    @property
    def options(self) -> tuple[str, ...]:
        """NVRTC's options, without the architecture."""
        return (
            "--std=c++17", "-DBF16=1", f"-DK={self.k}", f"-DTOPK={self.topk}", f"-DGLU={self.glu}",
            f"-DWEIGHTED={int(self.weighted)}", f"-DROWS={self.rows}", f"-DPARTS={self.parts}",
            f"-DSTAGES={self.stages}", f"-DFORM={self.form}", f"-DTOKENS={self.tokens}",
        )  # fmt: skip


@lru_cache(maxsize=1024)
def plan(
    k: int, n: int, topk: int, glu: int, form: int = few.MXFP4, tokens: int = 16, **params: Any
) -> Plan | None:
    """Return the plan of a product with matrices [N, K], None if registers or shared memory suffice for none.

    params  fields from `rows` on: only such plans
    """
    found = []
    for rows in (1, 2, 4, 8):
        for parts in range(1, min(16 // rows, cdiv(k, 128)) + 1):
            p = Plan(k, topk, int(glu), not glu, rows, parts, 0, form, tokens)
            stages = min((few.SHARED - p.shared) // (p.stage + 16), MOST_STAGES)
            p = p._replace(**{"stages": stages, **params})
            registers = min(65536 // p.threads // 8 * 8, 255)
            fits = p.stages >= 3 and p.shared <= few.SHARED and p.registers <= registers + 4
            if fits and n % (16 * rows) == 0 and (p.rows, p.parts) == (rows, parts):
                found.append(p)
    return min(found, key=lambda p: p.cost, default=None)


def plans(
    first: torch.Tensor, second: torch.Tensor, ids: torch.Tensor, experts: int, glu: int, form: int
) -> list[Plan] | None:
    """Return the plans of an MLP's products, with as many tokens as are probable and fit; None: no plans fit.

    first, second  packed matrices [E, N, K / 2]
    """
    products = ((first, ids.shape[1], glu), (second, 1, 0))
    for tokens in (32, 24, 16, 8)[2 if ids.numel() <= 8 * experts else 0 :]:
        found = [plan(2 * w.shape[2], w.shape[1], topk, g, form, tokens) for w, topk, g in products]
        if None not in found:
            return [p for p in found if p is not None]
    return None


def unsuitable(w: torch.Tensor, scales: torch.Tensor, more: torch.Tensor, name: str) -> str | None:
    """Return why copies cannot read such a matrix of experts, its scales and more, None if they can."""
    if 2 * w.shape[2] % 32:
        return f"rows of {name} have {2 * w.shape[2]} weights, not a multiple of 32"
    read = {name: w, f"{name}_scale": scales, f"the bias or factor of {name}": more}
    at = next((of for of, t in read.items() if t.data_ptr() % 16), None)
    return None if at is None else f"{at} must begin at a multiple of 16 bytes"


def unavailable(device: torch.device, plans: list[Plan] | None) -> str | None:
    """Return why a call cannot run on this device, None if it can."""
    if plans is None:
        return "it is for several rows an expert in sorted pairs, whose activations fit registers"
    return no_hopper(few.COMMON, device) or no_hopper(SOURCE, device) or few.not_loaded(device, *plans)


@lru_cache(maxsize=256)
def _kernel(device: torch.device, p: Plan) -> cuda_rtc.Kernel:
    few.loaded.add((device, p))
    return cuda_rtc.Kernel(
        text(few.COMMON, SOURCE), "mxfp4_stream", p.options, device.index, few.TYPES, p.shared
    )


def mxfp4_stream(
    a: torch.Tensor, w: torch.Tensor, scales: torch.Tensor, more: torch.Tensor | None, pairs: Sorted, p: Plan,
    weights: torch.Tensor | None = None, alpha: float = 0.0, limit: float = 0.0,
) -> torch.Tensor:  # fmt: skip
    """Return what mxfp4_gemm does, of the same arguments; pairs are sorted in blocks of the plan's tokens."""
    n = w.shape[1]
    out = torch.empty((pairs.n_pairs, n // 2 if p.glu else n), dtype=a.dtype, device=a.device)
    tensors = (a, w, scales, more, out, weights, pairs.pairs, pairs.experts, pairs.total)
    early = overlaps(a.device) and torch.cuda.is_current_stream_capturing()
    args = (*(None if t is None else t.data_ptr() for t in tensors), *few.arguments(w, pairs, alpha, limit))
    grid = min(pairs.blocks * n // (16 * p.rows), multiprocessors(a.device))
    stream = torch.cuda.current_stream(a.device).cuda_stream
    _kernel(a.device, p).launch(grid, p.threads, stream, args, overlap=early)
    return out
