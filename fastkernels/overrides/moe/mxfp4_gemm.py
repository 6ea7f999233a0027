"""The grouped product with MXFP4 weights for few rows per expert, in CUDA C++ for Hopper: csrc/mxfp4_gemm.cu."""

from __future__ import annotations

import ctypes
from functools import lru_cache
from pathlib import Path
from typing import Any, NamedTuple

import torch

from fastkernels.core import cuda_rtc
from fastkernels.overrides.kit.hopper import no_hopper, text
from fastkernels.overrides.kit.launch import cdiv
from fastkernels.overrides.kit.overlap import overlaps
from fastkernels.overrides.moe.sorted_pairs import Sorted

FOLDER = Path(__file__).parent / "csrc"
COMMON, SOURCE = FOLDER / "mxfp4.cu", FOLDER / "mxfp4_gemm.cu"
TOKENS = 8  # pairs of a block
MOST_ROWS = 8  # average pairs per expert; with more, larger tiles decode less often
SHARED = 227 * 1024  # bytes of shared memory of a block
_P, _I, _F = ctypes.c_void_p, ctypes.c_int, ctypes.c_float
TYPES = (*[_P] * 9, _I, _I, _I, _F, _F)


class Plan(NamedTuple):
    """The constants that a kernel is compiled with; csrc/mxfp4_gemm.cu describes them."""

    k: int
    topk: int
    glu: bool
    weighted: bool
    sorted: bool
    rows: int
    parts: int
    ahead: int = 3
    resident: int = 2

    @property
    def threads(self) -> int:
        """Threads of a block."""
        return 32 * self.rows * self.parts

    @property
    def shared(self) -> int:
        """Bytes of shared memory: activations, later the sums of parts."""
        activations = 8 * (256 * cdiv(self.k, 128) + 64)
        scales = 16 * cdiv(self.rows * self.k // 2 + 30, 16)
        return max(activations + scales, 512 * self.rows * (self.parts - 1))

    @property
    def options(self) -> tuple[str, ...]:
        """NVRTC's options, without the architecture."""
        return (
            "--std=c++17", "-DBF16=1", f"-DK={self.k}", f"-DTOPK={self.topk}", f"-DGLU={int(self.glu)}",
            f"-DWEIGHTED={int(self.weighted)}", f"-DSORTED={int(self.sorted)}", f"-DROWS={self.rows}",
            f"-DPARTS={self.parts}", f"-DAHEAD={self.ahead}", f"-DRESIDENT={self.resident}",
        )  # fmt: skip


def plan(k: int, topk: int, is_sorted: bool, glu: bool, **params: int) -> Plan:
    """Return the plan of a product, with SwiGLU (glu) or weighted by the pairs; params: fields from rows on."""
    # For GPT-OSS-20B's matrices on an H100, 2026-11-27: the fastest of 16 sets at one token and of 20 at 32.
    own = {"rows": 5, "parts": 2} if is_sorted else {"rows": 3, "parts": 3}
    return Plan(k, topk, glu, not glu, is_sorted, **{**own, **params})


def unsuitable(
    x: torch.Tensor, w: torch.Tensor, scales: torch.Tensor | None, bias: torch.Tensor, name: str
) -> str | None:
    """Return why no CUDA C++ kernel supports such a matrix on any GPU, None if one may."""
    if scales is None:
        return f"{name} is not MXFP4"
    if x.dtype != torch.bfloat16 or bias.dtype != torch.bfloat16:
        return f"hidden_states is {x.dtype} and the bias of {name} {bias.dtype}, not bfloat16"
    for of, t in ((name, w), (f"the scales of {name}", scales), (f"the bias of {name}", bias)):
        if not t.is_contiguous():
            return f"{of} has strides {tuple(t.stride())}: it must be contiguous"
    if w.data_ptr() % 16:
        return f"{name} must begin at a multiple of 16 bytes"
    return None


def refused(
    x: torch.Tensor, w: torch.Tensor, scales: torch.Tensor | None, bias: torch.Tensor, name: str
) -> str | None:
    """Return why this kernel does not support such a matrix on any GPU, None if it does."""
    if (reason := unsuitable(x, w, scales, bias, name)) is not None:
        return reason
    if w.shape[1] < 16:
        return f"{name} has {w.shape[1]} rows, fewer than a tile's 16"
    if plan(2 * w.shape[2], 1, True, True).shared > SHARED:
        return f"rows of {name} with {2 * w.shape[2]} weights do not fit shared memory"
    return None


def unavailable(device: torch.device) -> str | None:
    """Return why the kernel cannot run on this device, None if it can."""
    return no_hopper(COMMON, device) or no_hopper(SOURCE, device)


loaded: set[tuple[torch.device, tuple[Any, ...]]] = set()  # plans of both CUDA C++ kernels


def not_loaded(device: torch.device, *plans: tuple[Any, ...]) -> str | None:
    """Return why a call cannot be captured (no code is loaded during a capture), None if it can or none is active."""
    if not torch.cuda.is_current_stream_capturing() or all((device, p) in loaded for p in plans):
        return None
    return "its kernel for this shape was not loaded by a call before a CUDA graph was captured"


@lru_cache(maxsize=256)
def _kernel(device: torch.device, p: Plan) -> cuda_rtc.Kernel:
    loaded.add((device, p))
    return cuda_rtc.Kernel(text(COMMON, SOURCE), "mxfp4_gemm", p.options, device.index, TYPES, p.shared)


def arguments(w: torch.Tensor, pairs: Sorted, alpha: float, limit: float) -> tuple[Any, ...]:
    """Return the kernel's numbers, behind its pointers."""
    return w.shape[1], w.shape[0], pairs.n_pairs, alpha, limit


def mxfp4_gemm(
    a: torch.Tensor, w: torch.Tensor, scales: torch.Tensor, bias: torch.Tensor, pairs: Sorted, p: Plan,
    weights: torch.Tensor | None = None, alpha: float = 0.0, limit: float = 0.0,
) -> torch.Tensor:  # fmt: skip
    """a: [pairs / topk, K]; w: MXFP4 [E, N, K / 2]; bias: [E, N]; weights: float32, of pairs; p: `plan`'s result.

    Returns the rows of pairs as biased_gemm does, [pairs, N], or [pairs, N / 2] behind swigluoai_and_mul.
    """
    n = w.shape[1]
    out = torch.empty((pairs.n_pairs, n // 2 if p.glu else n), dtype=a.dtype, device=a.device)
    tensors = (a, w, scales, bias, out, weights, pairs.pairs, pairs.experts, pairs.total)
    early = overlaps(a.device) and torch.cuda.is_current_stream_capturing()
    args = (*(None if t is None else t.data_ptr() for t in tensors), *arguments(w, pairs, alpha, limit))
    stream = torch.cuda.current_stream(a.device).cuda_stream
    _kernel(a.device, p).launch(pairs.blocks * cdiv(n, 16 * p.rows), p.threads, stream, args, overlap=early)
    return out
