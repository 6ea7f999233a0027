"""The linear layer with 4-bit weights for 1 to 64 tokens, in CUDA C++ for Hopper: csrc/int4_linear.cu."""

from __future__ import annotations

import ctypes
from functools import lru_cache
from pathlib import Path
from typing import Any, NamedTuple

import torch

from fastkernels.core import cuda_rtc
from fastkernels.overrides.kit.hopper import no_hopper, text
from fastkernels.overrides.kit.launch import cdiv, multiprocessors, next_power_of_2, tickets
from fastkernels.overrides.kit.overlap import overlaps

SOURCE = Path(__file__).parents[1] / "csrc" / "int4_linear.cu"
MAX_TOKENS, MAX_OF_TWO = 64, 32  # tokens; with tiles of 32 rows, for which more have too few registers
MAX_OF_STREAM = 32  # tokens; with more, STREAM was slower on an H100
SHARED = 227 * 1024  # bytes of shared memory of a block
# Bytes with which a multiprocessor has one block. While another kernel's block is on one of them, two blocks of a call
# would share another one, and the call take 1.5 times as long (28672 x 4096, 1 token, on an H100).
ALONE = 116 * 1024
STEP = 128  # columns
_P, _I, _L = ctypes.c_void_p, ctypes.c_int, ctypes.c_longlong
TYPES = (*[_P] * 8, _I, _I, _L)

WARPS = 16  # of a block
# Parameter sets for the tuner: `fits` leaves the one that `plan` does not choose itself.
PARAMS: tuple[dict[str, int], ...] = ({"stream": 0}, {"stream": 1})


class Plan(NamedTuple):
    """The constants that a kernel is compiled with, which csrc/int4_linear.cu describes, and its grid."""

    k: int
    group: int
    tiles: int
    tokens: int
    ragged: bool
    zero: bool
    bias: bool
    bf16: bool
    half_scales: bool
    warps: int
    height: int
    ahead: int
    parts: int
    splits: int
    stream: int
    grid: int
    fp4: bool = False

    @property
    def shared(self) -> int:
        """Bytes of shared memory: a split of x, the sums that warps hand over, and the ring of STREAM."""
        rest = (self.tiles, self.warps, self.height)
        used = shared_bytes(self.k, self.tokens, self.splits) + (
            stream_bytes(*rest, self.ahead, self.group, self.zero)
            if self.stream
            else sums_bytes(*rest, self.parts)
        )
        return max(used, ALONE)

    @property
    def options(self) -> tuple[str, ...]:
        """NVRTC's options, without the architecture."""
        return (
            "--std=c++17", f"-DK={self.k}", f"-DGROUP={self.group}", f"-DTILES={self.tiles}", f"-DWARPS={self.warps}",
            f"-DHEIGHT={self.height}", f"-DPARTS={self.parts}", f"-DSPLITS={self.splits}", f"-DAHEAD={self.ahead}",
            f"-DSTREAM={self.stream}", f"-DRAGGED={int(self.ragged)}",
            f"-DHAS_ZERO={int(self.zero)}", f"-DHAS_BIAS={int(self.bias)}", f"-DBF16={int(self.bf16)}",
            f"-DHALF_SCALES={int(self.half_scales)}", f"-DFP4={int(self.fp4)}",
            # 1 to 5% faster at 1 token on an H100; not at 16
            f"-DEVICTED={int(self.tokens == 1)}",
        )  # fmt: skip


def shared_bytes(k: int, tokens: int, splits: int) -> int:
    """Return the bytes of a split of x in shared memory."""
    return tokens * (2 * STEP * cdiv(k // STEP, splits) + 64)


def sums_bytes(tiles: int, warps: int, height: int, parts: int) -> int:
    """Return the bytes of the sums that warps with parts of a tile hand over, and of their barriers."""
    return 0 if parts == 1 else 512 + 2 * 512 * tiles * height * (warps // parts) * (parts - 1)


def stream_bytes(tiles: int, warps: int, height: int, ahead: int, group: int, zero: bool) -> int:
    """Return the bytes of barriers, sums and ring with STREAM."""
    stage = 1024 + max(STEP // group, 1) * (48 if zero else 32)
    return 512 + warps * height * (512 * tiles + ahead * stage)


def streams(m: int, n: int, k: int, sms: int = 132, warps: int = WARPS) -> bool:
    """Return whether `plan` chooses stream=1.

    A measured rule, of 10 layers with groups of 128 and no zero points on an H100: with more than 10 steps for each
    warp stream=1 is 0.99 to 1.17 times as fast as stream=0 at 1 to 16 tokens, with fewer 0.8 to 1.0 times.
    """
    return m <= MAX_OF_STREAM and cdiv(n, 16) * (k // STEP) > 10 * sms * warps


@lru_cache(maxsize=1024)
def plan(
    m: int, n: int, k: int, group: int, zero: bool = False, bias: bool = False, bf16: bool = True,
    half_scales: bool = False, sms: int = 132, height: int = 0, ahead: int = 0, warps: int = WARPS, parts: int = 0,
    splits: int = 0, stream: int | None = None, fp4: bool = False,
) -> Plan:  # fmt: skip
    """Return the plan of a product of m tokens with a weight [n, k]; fp4: as linear_nvfp4 has it, with groups of 32.

    stream  0: warps have parts of a tile, 1: each warp has as many steps of its block's tiles as the others. None:
            what `streams` says, 0 if height, ahead, parts or splits are given

    Parameters that are 0 are chosen so that the busiest warp has the least work. Each block reads its split of x from
    L2, all of them together often more bytes than the weight has. More splits read less, but add more sums. Measured on
    an H100:

    - if K > N, up to sqrt(3.6 K / N) splits pay, of no less than 64 KiB of x; else those with which x fits
    - few tokens need at least four parts
    - fewer steps ahead pay with many tokens, and in tiles of few steps
    """
    if stream is None:
        stream = int(not (height or ahead or parts or splits) and streams(m, n, k, sms, warps))
    tiles = cdiv(next_power_of_2(max(m, 8)), 8)
    tokens = next_power_of_2(max(m, 1)) if tiles == 1 else 8 * tiles  # in shared memory
    wanted = min(2 * m * k >> 16, int((3.6 * k / max(n, 1)) ** 0.5), sms)
    steps = k // STEP

    def blocks_of(h: int, s: int) -> int:
        return min(max(sms // s, 1), cdiv(n, 16 * h))

    def finished(h: int, ahead: int, p: int, s: int) -> Plan:
        flags = (n % (16 * h) != 0, zero, bias, bf16, half_scales)
        grid = s * blocks_of(h, s)
        return Plan(k, group, tiles, tokens, *flags, warps, h, ahead, p, s, stream, grid, fp4)

    if stream:
        h, most_ahead = height or 1, ahead or (4 if m <= 4 else 3 if m <= 16 else 2)

        def enough(s: int, a: int) -> bool:
            used = shared_bytes(k, tokens, s) + stream_bytes(tiles, warps, h, a, group, zero)
            return used <= SHARED

        fewest = next(s for s in range(1, steps + 1) if enough(s, min(most_ahead, 2)))
        least = splits or max(fewest, wanted)
        most = least if splits or k <= n else min(least + least // 2 + 1, steps)

        def busiest(s: int) -> tuple[int, int]:
            return cdiv(cdiv(n, 16 * h), blocks_of(h, s)) * cdiv(steps, s), s

        s = min(range(least, most + 1), key=busiest)
        return finished(h, next(a for a in range(most_ahead, 0, -1) if enough(s, a)), 1, s)
    choices = [
        (h, p, s)
        for h in ([height] if height else [1, 2] if m <= MAX_OF_TWO else [1])
        for s in ([splits] if splits else range(1, steps + 1))
        for p in ([parts] if parts else [2**i for i in range(0 if m > 16 else 2, warps.bit_length())])
        if shared_bytes(k, tokens, s) + sums_bytes(tiles, warps, h, p) <= SHARED
    ]

    def work(choice: tuple[int, int, int]) -> float:
        """Return the steps of 16 rows of the busiest warp; to add parts, or splits, costs about as much as one."""
        h, p, s = choice
        mine = cdiv(cdiv(n, 16 * h), max(sms // s, 1))
        turns = cdiv(cdiv(steps, s), p) + (p > 1) + (s > 1)
        return cdiv(mine, warps // p) * turns * (1 if h == 1 else 1.85)

    fewest = min(s for _, _, s in choices)
    least = fewest if splits else max(fewest, wanted)
    suited = (c for c in choices if least <= c[2] <= max(2 * fewest, least))
    h, p, s = min(suited, key=lambda c: (work(c), c[2], c[1]))
    if not ahead:
        ahead = 1 if h == 2 else 2 if 4 < m <= 16 and cdiv(cdiv(steps, s), p) <= 4 else 4
    return finished(h, ahead, p, s)


def fits(params: dict[str, int], m: int, n: int, k: int, sms: int = 132) -> bool:
    """Return whether these parameters suit m tokens and a weight [n, k] and are not what `plan` chooses."""
    stream = params["stream"]
    suited = m <= (MAX_OF_STREAM if stream else MAX_TOKENS) and k % STEP == 0
    return suited and bool(stream) != streams(m, n, k, sms)


def supports_cuda(
    x: torch.Tensor, weight: torch.Tensor, weight_scale: torch.Tensor, weight_zero: torch.Tensor | None = None,
    bias: torch.Tensor | None = None, most: int = MAX_TOKENS,
) -> str | None:  # fmt: skip
    """Return why the CUDA C++ kernel does not support this call of at most `most` tokens, None if it does."""
    if (reason := no_hopper(SOURCE, x.device)) is not None:
        return reason
    if x.dtype not in (torch.bfloat16, torch.float16):
        return f"dtype {x.dtype} is not bfloat16 or float16"
    k = 2 * weight.shape[1]
    if not k or k % STEP:
        return f"K = {k} is not a multiple of {STEP}"
    if x.numel() // k > most:
        return f"more than {most} tokens"  # without the number: each reason is reported once
    if weight.shape[0] % 16:
        return f"N = {weight.shape[0]} is not a multiple of 16"
    if STEP % (group := k // weight_scale.shape[1]) and group % STEP:
        return f"groups of {group} columns neither divide {STEP} nor are a multiple of it"
    if weight_scale.dtype not in (x.dtype, torch.float16):
        return f"weight_scale is {weight_scale.dtype}, x is {x.dtype}"
    if bias is not None and bias.dtype != x.dtype:
        return f"bias is {bias.dtype}, x is {x.dtype}"
    for name, t in (
        ("weight", weight), ("weight_scale", weight_scale), ("weight_zero", weight_zero), ("bias", bias)
    ):  # fmt: skip
        if t is not None and not t.is_contiguous():
            return f"{name} has strides {tuple(t.stride())}: it must be contiguous"
    if any(t is not None and t.data_ptr() % 16 for t in (x, weight, weight_scale, weight_zero)):
        return "x, weight, weight_scale and weight_zero must begin at a multiple of 16 bytes"
    return None


@lru_cache(maxsize=512)
def _kernel(device: torch.device, options: tuple[str, ...], shared: int) -> cuda_rtc.Kernel:
    return cuda_rtc.Kernel(text(SOURCE), "int4_linear", options, device.index, TYPES, shared)


def linear_int4_cuda(
    x: torch.Tensor, weight: torch.Tensor, weight_scale: torch.Tensor, weight_zero: torch.Tensor | None = None,
    bias: torch.Tensor | None = None, **params: Any,
) -> torch.Tensor:  # fmt: skip
    """Arguments and result are those of linear_int4's reference; params: `plan`'s last ones.

    In a CUDA graph this kernel prefetches the weight while the previous kernel still runs, which must not write it.
    """
    k = 2 * weight.shape[1]
    how = (k // weight_scale.shape[1], weight_zero is not None, bias is not None, x.dtype == torch.bfloat16)
    return run(x, weight, weight_scale, weight_zero, bias, *how, weight_scale.dtype != x.dtype, **params)


def run(
    x: torch.Tensor, weight: torch.Tensor, scale: torch.Tensor, zero: torch.Tensor | None, bias: torch.Tensor | None,
    *how: Any, **params: Any,
) -> torch.Tensor:  # fmt: skip
    """Launch the kernel, for each 64 tokens. how, params: of `plan`, from `group` on; zero: with fp4, rows' factors."""
    n, k = weight.shape[0], 2 * weight.shape[1]
    rows = x.reshape(-1, k)
    if rows.stride(1) != 1 or rows.stride(0) % 8:
        rows = rows.contiguous()
    out = torch.empty((*x.shape[:-1], n), dtype=x.dtype, device=x.device)
    if not out.numel():
        return out
    early = overlaps(x.device) and torch.cuda.is_current_stream_capturing()
    stream = torch.cuda.current_stream(x.device).cuda_stream
    for part, to in zip(rows.split(MAX_TOKENS), out.view(-1, n).split(MAX_TOKENS), strict=True):
        p = plan(len(part), n, k, *how, multiprocessors(x.device), **params)
        partial = taken = None
        if p.splits > 1:
            tiles = cdiv(n, 16 * p.height)
            partial = torch.empty(
                p.splits * tiles * p.height * p.tiles * 128, dtype=torch.float32, device=x.device
            )
            taken = tickets.get(x.device, tiles)
        tensors = (part, weight, scale, zero, bias, to, partial, taken)
        args = (*(None if t is None else t.data_ptr() for t in tensors), len(part), n, rows.stride(0))
        _kernel(x.device, p.options, p.shared).launch(p.grid, 32 * p.warps, stream, args, overlap=early)
    return out
