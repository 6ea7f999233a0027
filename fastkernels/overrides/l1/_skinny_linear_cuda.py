"""y = x W^T + b for 1 to 16 tokens in CUDA C++ for Hopper: csrc/skinny_linear.cu, compiled when it is first called."""

from __future__ import annotations

import ctypes
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch

from fastkernels import cuda_rtc
from fastkernels.overrides.l1._skinny_linear_triton import supports_skinny, tickets

SOURCE = Path(__file__).parent / "csrc" / "skinny_linear.cu"
MAX_TOKENS, WARPS = 16, 4
_P, _I, _L = ctypes.c_void_p, ctypes.c_int, ctypes.c_longlong
TYPES = (_P, _P, _P, _P, _P, _P, _I, _I, _I, _L, _L, _I)


def _set(row_tiles: int, block_k: int, stages: int, blocks: int) -> dict[str, Any]:
    return {
        "row_tiles": row_tiles,
        "block_k": block_k,
        "stages": stages,
        "blocks": blocks,
        "whole": 1,
        "pdl": 0,
    }


# row_tiles  a tile is so many times 16 rows of the weight
# block_k    of K that a warp reads at once
# stages     of each warp's ring: WARPS * stages * 16 * row_tiles * (2 * block_k + 64) bytes of shared memory a block
# blocks     for each SM
# whole      1: no tile is shared by two blocks; 0: all blocks read equally much, to one unit
# pdl        1: the ring is filled while the kernel before still runs; it must not write the weight
PARAMS: tuple[dict[str, Any], ...] = (
    *(_set(*sizes) for sizes in ((2, 256, 3, 1), (1, 256, 6, 1), (3, 128, 3, 1), (4, 128, 2, 1))),
    *(_set(*sizes) for sizes in ((1, 256, 3, 2), (2, 128, 2, 2), (2, 256, 2, 1))),
    *({**_set(*sizes), "whole": 0} for sizes in ((2, 256, 3, 1), (4, 128, 2, 1), (1, 256, 3, 2))),
)


def shared_bytes(p: dict[str, Any]) -> int:
    """Of the rings: the dynamic shared memory of a block."""
    return WARPS * p["stages"] * 16 * p["row_tiles"] * (2 * p["block_k"] + 64)


def fits(params: dict[str, Any], m: int, k: int) -> bool:
    """Whether these sizes are meant for m tokens and K = k: all are, up to 16 tokens."""
    return m <= MAX_TOKENS and k % 32 == 0


@lru_cache(maxsize=1024)
def choose(n: int, sms: int = 132) -> dict[str, Any]:
    """The default sizes for weight [n, K]: whole tiles where those keep nine of ten SMs busy, else equal parts."""

    def busy(p: dict[str, Any]) -> float:
        tiles, blocks = -(-n // (16 * p["row_tiles"])), sms * p["blocks"]
        return tiles / (blocks * -(-tiles // blocks))

    whole = [p for p in PARAMS if p["whole"]]
    return next((p for p in whole if busy(p) >= 0.9), next(p for p in PARAMS if not p["whole"]))


def parts(n: int, k: int, p: dict[str, Any], sms: int) -> tuple[int, int, int]:
    """(blocks, tiles, units that are dealt together): see first_unit in the source. No block is without a unit."""
    tiles, per_tile = -(-n // (16 * p["row_tiles"])), -(-k // p["block_k"])
    granule = per_tile if p["whole"] else 1
    return min(sms * p["blocks"], tiles * per_tile // granule), tiles, granule


def supports_cuda(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> str | None:
    """None if the CUDA C++ kernel for few tokens takes this call, else the reason why not."""
    if (reason := _missing() or cuda_rtc.unavailable() or supports_skinny(x, weight, bias)) is not None:
        return reason
    k = weight.shape[1]
    if k % 32:
        return f"K = {k} is not a multiple of 32"
    if (m := x.numel() // k) > MAX_TOKENS:
        return f"{m} tokens are over {MAX_TOKENS}"
    if x.data_ptr() % 16 or any(s % 8 for s, n in zip(x.stride()[:-1], x.shape[:-1], strict=True) if n > 1):
        return f"x has strides {tuple(x.stride())}: its rows must start at 16 bytes"
    if bias is not None and bias.dtype != x.dtype:
        return f"bias is {bias.dtype}, x is {x.dtype}"
    major, minor = _capability(x.device)
    if major != 9:
        return f"it is made for Hopper (compute capability 9.0), this GPU has {major}.{minor}"
    return None


@lru_cache
def _missing() -> str | None:
    return None if SOURCE.is_file() else f"its source is not there: {SOURCE}"


@lru_cache
def _capability(device: torch.device) -> tuple[int, int]:
    return torch.cuda.get_device_capability(device) if device.type == "cuda" else (0, 0)


@lru_cache
def _sms(device: torch.device) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count


def options(
    row_tiles: int, token_tiles: int, block_k: int, stages: int, bf16: bool, bias: bool
) -> tuple[str, ...]:
    """What NVRTC is told, beside the architecture."""
    return (
        "--std=c++17", f"-DROW_TILES={row_tiles}", f"-DTOKEN_TILES={token_tiles}", f"-DKW={block_k}",
        f"-DSTAGES={stages}", f"-DBF16={int(bf16)}", f"-DHAS_BIAS={int(bias)}",
    )  # fmt: skip


@lru_cache(maxsize=256)
def _kernel(
    device: torch.device, row_tiles: int, token_tiles: int, block_k: int, stages: int, bf16: bool, bias: bool
) -> cuda_rtc.Kernel:  # fmt: skip
    shared = shared_bytes({"row_tiles": row_tiles, "block_k": block_k, "stages": stages})
    told = options(row_tiles, token_tiles, block_k, stages, bf16, bias)
    return cuda_rtc.Kernel(SOURCE.read_text(), "skinny_linear", told, device.index, TYPES, shared)


def linear_cuda(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None, **params: Any
) -> torch.Tensor:
    """x: [..., K]; weight: [N, K]; bias: [N] or None. Returns [..., N] in x's dtype.

    params: one of PARAMS, or some of its keys; the others are as `choose` says.
    """
    n, k = weight.shape
    rows = x.reshape(-1, k)
    m = rows.shape[0]
    out = torch.empty((*x.shape[:-1], n), dtype=x.dtype, device=x.device)
    if m == 0 or n == 0:
        return out
    sms = _sms(x.device)
    p = {**choose(n, sms), **params}
    token_tiles, bf16 = 1 if m <= 8 else 2, x.dtype == torch.bfloat16
    kernel = _kernel(x.device, p["row_tiles"], token_tiles, p["block_k"], p["stages"], bf16, bias is not None)
    blocks, tiles, granule = parts(n, k, p, sms)
    partial = taken = None
    if not p["whole"]:
        size = 2 * blocks * 16 * p["row_tiles"] * 8 * token_tiles
        partial = torch.empty(size, dtype=torch.float32, device=x.device)
        taken = tickets.get(x.device, tiles)
    tensors = (rows, weight, bias, out, partial, taken)
    args = [None if t is None else t.data_ptr() for t in tensors]
    stream = torch.cuda.current_stream(x.device).cuda_stream
    sizes = (m, n, k, rows.stride(0), weight.stride(0), granule)
    kernel.launch(blocks, 32 * WARPS, stream, (*args, *sizes), overlap=bool(p["pdl"]))
    return out
