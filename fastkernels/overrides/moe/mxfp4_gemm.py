"""The grouped product with 4-bit weights for few rows per expert, in CUDA C++ for Hopper: csrc/mxfp4_gemm.cu."""

from __future__ import annotations

import ctypes
import re
from collections.abc import Callable
from functools import lru_cache
from pathlib import Path
from typing import Any, NamedTuple

import torch

from fastkernels.core import cuda_rtc
from fastkernels.overrides.kit.hopper import no_hopper, text
from fastkernels.overrides.kit.launch import cdiv
from fastkernels.overrides.kit.overlap import overlaps
from fastkernels.overrides.moe.grouped_gemm import sum_over_experts
from fastkernels.overrides.routing.sorted_pairs import Sorted, sort_pairs

FOLDER = Path(__file__).parent / "csrc"
COMMON, SOURCE = FOLDER / "mxfp4.cu", FOLDER / "mxfp4_gemm.cu"
TOKENS = 8  # pairs of a block, at most
MOST_ROWS = 8  # average pairs per expert; with more, larger tiles decode less often
SHARED = 227 * 1024  # bytes of shared memory of a block
MXFP4, INT4, NVFP4 = 0, 1, 2  # Plan.form
_P, _I, _F = ctypes.c_void_p, ctypes.c_int, ctypes.c_float
TYPES = (*[_P] * 9, _I, _I, _I, _F, _F)


class Plan(NamedTuple):
    """The constants that a kernel is compiled with; csrc/mxfp4_gemm.cu describes them."""

    k: int
    topk: int
    glu: int
    weighted: bool
    sorted: bool
    rows: int
    parts: int
    ahead: int = 3
    resident: int = 2
    form: int = MXFP4
    group: int = 128
    zero: bool = False
    half_scales: bool = False
    tokens: int = 8
    ring: bool = False
    phases: int = 1

    @property
    def threads(self) -> int:
        """Threads of a block."""
        return 32 * self.rows * self.parts

    @property
    def shared(self) -> int:
        """Bytes of shared memory: activations, scales and weights, later the sums of parts."""
        steps, slots = cdiv(self.k, 128), self.ahead + 1
        if self.phases > 1:  # whole rounds of the ring
            steps = min(steps, cdiv(cdiv(steps, self.parts), self.phases * slots) * slots * self.parts)
        activations = self.tokens * (256 * steps + 64)
        of_row = (self.k // 32, 2 * self.k // self.group, self.k // 16)[self.form]
        halves = self.glu == 2
        regions = (2 if halves else 1) * (2 if self.form == INT4 and self.zero else 1)
        scales = regions * 16 * cdiv((8 if halves else 16) * self.rows * of_row + 30, 16)
        ring = 1024 * slots * self.rows * self.parts * self.ring
        sums = 512 * cdiv(self.tokens, 8) * self.rows * (self.parts - 1)
        return max(activations + scales + ring, sums)

    @property
    def options(self) -> tuple[str, ...]:
        """NVRTC's options, without the architecture."""
        return (
            "--std=c++17", "-DBF16=1", f"-DK={self.k}", f"-DTOPK={self.topk}", f"-DGLU={self.glu}",
            f"-DWEIGHTED={int(self.weighted)}", f"-DSORTED={int(self.sorted)}", f"-DROWS={self.rows}",
            f"-DPARTS={self.parts}", f"-DAHEAD={self.ahead}", f"-DRESIDENT={self.resident}",
            f"-DFORM={self.form}", f"-DGROUP={self.group}", f"-DHAS_ZERO={int(self.zero)}",
            f"-DHALF_SCALES={int(self.half_scales)}", f"-DTOKENS={self.tokens}",
            f"-DRING={int(self.ring)}", f"-DPHASES={self.phases}",
        )  # fmt: skip


def plan(k: int, topk: int, is_sorted: bool, glu: int, **params: Any) -> Plan:
    """Return the plan of a product, with SwiGLU (glu: its kind) or weighted by the pairs.

    params  fields from `rows` on
    """
    if params.get("form", MXFP4) == MXFP4:
        # For GPT-OSS-20B's matrices on an H100, 2026-11-27: the fastest of 16 sets at one token and of 20 at 32.
        own = {"rows": 5, "parts": 2} if is_sorted else {"rows": 3, "parts": 3}
    elif is_sorted:
        # For Qwen3-30B's matrices in int4 on an H100, 2026-11-28: of 18 sets at 32 tokens, and the next ones.
        own = {"rows": 6, "parts": 1 if k < 8192 else 2, "ahead": 4}
    else:
        own = (
            {"rows": 2, "parts": 4, "ahead": 2} if cdiv(k, 128) >= 12 else {"rows": 4, "parts": 2, "ahead": 4}
        )
    tokens = params.pop("tokens", TOKENS)
    own["tokens"] = tokens if is_sorted else 1
    return Plan(k, topk, int(glu), not glu, is_sorted, **{**own, **params})


class Block(NamedTuple):
    """The fields rows, parts, ahead and phases of a `Plan`: the work of a block of one product."""

    rows: int
    parts: int
    ahead: int
    phases: int

    def __str__(self) -> str:
        return f"{self.rows}x{self.parts}/{self.ahead}/{self.phases}"


class Blocks(NamedTuple):
    """Blocks of the two products of an MLP, which have the same pairs of an expert. Its text: `16 10x1/3/2 8x1/3/1`."""

    tokens: int
    first: Block
    second: Block

    def __str__(self) -> str:
        return " ".join(map(str, self))

    @classmethod
    def parsed(cls, text: str) -> Blocks:
        """Return the blocks of a text. Raises ValueError for another one."""
        found = re.fullmatch(r"(\d+)" + 2 * r" (\d+)x(\d+)/(\d+)/(\d+)", text)
        if found is None:
            raise ValueError(f"blocks {text!r} must be as in '16 10x1/3/2 8x1/3/1'")
        tokens, *numbers = map(int, found.groups())
        return cls(tokens, Block(*numbers[:4]), Block(*numbers[4:]))

    def plans(self, k: int, topk: int, inner: int, glu: int, form: int) -> list[Plan]:
        """Return the plans of products with K and `inner` columns."""
        products = ((k, topk, glu, self.first), (inner, 1, 0, self.second))
        return [
            plan(columns, each, True, kind, form=form, tokens=self.tokens, ring=True, **block._asdict())
            for columns, each, kind, block in products
        ]


def fitting(make: Callable[[int], list[Plan]]) -> list[Plan]:
    """Return make(tokens of a block) with the most tokens for which the plans fit shared memory, if any does."""
    for tokens in (TOKENS, 4, 2):
        if too_large(*(plans := make(tokens))) is None:
            return plans
    return plans


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
    return wrong_matrix(w, name)


def wrong_matrix(w: torch.Tensor, name: str, **scales: torch.Tensor | None) -> str | None:
    """Return why this kernel does not support a matrix of experts and its scales, None if it may."""
    for of, t in {name: w, **{f"{name}_{of}": t for of, t in scales.items()}}.items():
        if t is not None and not t.is_contiguous():
            return f"{of} has strides {tuple(t.stride())}: it must be contiguous"
    if w.data_ptr() % 16:
        return f"{name} must begin at a multiple of 16 bytes"
    if scales and (w.shape[1] < 16 or w.shape[1] % 2):
        return f"{name} has {w.shape[1]} rows: fewer than a tile's 16, or an odd number"
    return None


def too_large(*plans: Plan) -> str | None:
    """Return why a plan does not fit shared memory, None if all do."""
    wrong = [p.k for p in plans if p.shared > SHARED]
    return f"rows of {wrong[0]} weights do not fit shared memory" if wrong else None


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


Matrix = tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]  # weights, scales and more of experts
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
    a: torch.Tensor, w: torch.Tensor, scales: torch.Tensor, more: torch.Tensor | None, pairs: Sorted, p: Plan,
    weights: torch.Tensor | None = None, alpha: float = 0.0, limit: float = 0.0,
) -> torch.Tensor:  # fmt: skip
    """a: [pairs / topk, K]; w: uint8 [E, N, K / 2]; weights: float32, of pairs; p: `plan`'s result.

    scales, more  of the plan's form, see csrc/mxfp4_gemm.cu; of MXFP4, more is the bias [E, N]

    Returns the rows of pairs as biased_gemm does, [pairs, N], or [pairs, N / 2] behind swigluoai_and_mul.
    """
    n = w.shape[1]
    out = torch.empty((pairs.n_pairs, n // 2 if p.glu else n), dtype=a.dtype, device=a.device)
    tensors = (a, w, scales, more, out, weights, pairs.pairs, pairs.experts, pairs.total)
    early = overlaps(a.device) and torch.cuda.is_current_stream_capturing()
    args = (*(None if t is None else t.data_ptr() for t in tensors), *arguments(w, pairs, alpha, limit))
    stream = torch.cuda.current_stream(a.device).cuda_stream
    _kernel(a.device, p).launch(pairs.blocks * cdiv(n, 16 * p.rows), p.threads, stream, args, overlap=early)
    return out


def mlp(
    x: torch.Tensor, first: Matrix, second: Matrix, weights: torch.Tensor, ids: torch.Tensor,
    expert_map: torch.Tensor | None, plans: list[Plan],
) -> torch.Tensor:  # fmt: skip
    """Return the sums over experts of an MLP with SiLU. first, second: w, scales and more of `mxfp4_gemm`."""
    ids, weights, x = ids.to(torch.int32).contiguous(), weights.contiguous(), x.contiguous()
    if ids.numel() == 0 or first[0].numel() == 0:
        return torch.zeros(x.shape, dtype=x.dtype, device=x.device)
    experts = first[0].shape[0] if expert_map is None else expert_map.numel()
    pairs = sort_pairs(ids, experts, expert_map, plans[0].tokens)
    inner = mxfp4_gemm(x.clone() if x.data_ptr() % 16 else x, *first, pairs, plans[0])
    return sum_over_experts(mxfp4_gemm(inner, *second, pairs, plans[1], weights), ids, experts, expert_map)
