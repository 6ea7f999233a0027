"""mla_decode and decodes of mla_sparse in CUDA C++ for Hopper: csrc/mla_decode.cu, compiled at its first call.

One launch fills the chip. Its blocks divide the keys of the batch among themselves, on the device, and add up the
results of sequences that were divided.
"""

from __future__ import annotations

import ctypes
from functools import lru_cache
from pathlib import Path
from typing import Any, NamedTuple

import torch

from fastkernels.core import cuda_rtc
from fastkernels.core.dispatch import ForOthers
from fastkernels.overrides.kit.hopper import no_hopper, text
from fastkernels.overrides.kit.launch import cdiv, multiprocessors, tickets
from fastkernels.overrides.kit.overlap import overlaps
from fastkernels.overrides.latent_attention import mla_cases
from fastkernels.overrides.linear.kernels.wgmma_linear_cuda import multiply

SOURCE = Path(__file__).parent / "csrc" / "mla_decode.cu"
RANK, SIZE = 512, 576  # channels of a latent, and with the rotary key
HEADS, KEYS = 64, 64  # of a block; of a tile
THREADS = 512
MAX_WORKERS = 160
SHARED = (
    3 * 2 * SIZE * KEYS + 112 + 1632 + 2048 + 1024
)  # bytes: queries and two tiles, barriers, notes; 1 KiB to align them
LOG2E = 1.4426950408889634
_P, _I, _F, _M = ctypes.c_void_p, ctypes.c_int, ctypes.c_float, cuda_rtc.TensorMap
TYPES = (_M, _M, *[_P] * 8, ctypes.c_longlong, *[_I] * 8, _F, _F)


class Plan(NamedTuple):
    """The constants that a kernel is compiled with; csrc/mla_decode.cu describes them."""

    box: int
    bf16: bool
    sparse: bool = False
    least: int = 2
    extra: int = 4
    slack: int = 4
    pairs: int = 0

    @property
    def options(self) -> tuple[str, ...]:
        """NVRTC's options, without the architecture."""
        return (
            "--std=c++17", f"-DBOX={self.box}", f"-DLEAST={self.least}", f"-DEXTRA={self.extra}",
            f"-DSLACK={self.slack}", f"-DPAIRS={self.pairs}", f"-DSPARSE={int(self.sparse)}",
            f"-DBF16={int(self.bf16)}",
        )  # fmt: skip


def weigh(bf16: bool) -> str:
    """Return CUDA C++ of weigh(): wgmma for 128 of 256 channels and keys in rows, both operands in shared memory."""
    kind = "bf16.bf16" if bf16 else "f16.f16"
    sums = ", ".join(f"%{i}" for i in range(64))
    operands = ", ".join(f'"+f"(c[FIRST + {i}])' for i in range(64))
    return f"""
template <int FIRST>
__device__ __forceinline__ void weigh(float (&c)[128], unsigned long long a, unsigned long long b) {{
    asm volatile(
        "wgmma.mma_async.sync.aligned.m64n128k16.f32.{kind} {{{sums}}}, %64, %65, 1, 1, 1, 0, 1;"
        : {operands} : "l"(a), "l"(b) : "memory");
}}
"""


def source(p: Plan) -> str:
    """Return the whole text that NVRTC compiles."""
    return multiply(KEYS, "bf16" if p.bf16 else "f16") + weigh(p.bf16) + text(SOURCE)


@lru_cache(maxsize=64)
def _kernel(device: torch.device, p: Plan) -> cuda_rtc.Kernel:
    _loaded.add((device, p))
    return cuda_rtc.Kernel(source(p), "mla_decode", p.options, device.index, TYPES, SHARED)


_loaded: set[tuple[torch.device, Plan]] = set()


def plan(q: torch.Tensor, kv_cache: torch.Tensor, sparse: bool = False, **params: int) -> Plan:
    """Return the constants for a call."""
    box = KEYS if sparse else next(n for n in (64, 32, 16) if kv_cache.shape[1] % n == 0)
    pairs = int(cdiv(q.shape[1], HEADS) == 2 and params.get("pairs", 1))
    return Plan(box, q.dtype == torch.bfloat16, sparse, **{**params, "pairs": pairs})


def supports(q: torch.Tensor, kv_cache: torch.Tensor, *rest: Any) -> str | None:
    """Return why the kernel does not support this call of mla_decode, None if it does."""
    return no_hopper(SOURCE, q.device) or refused(q, kv_cache, *rest) or _not_loaded(q, kv_cache, False)


def _not_loaded(q: torch.Tensor, kv_cache: torch.Tensor, sparse: bool) -> str | None:
    if torch.cuda.is_current_stream_capturing() and (q.device, plan(q, kv_cache, sparse)) not in _loaded:
        return "its kernel was not loaded by a call before a CUDA graph was captured"
    return None


def supports_sparse(
    q: torch.Tensor, kv_cache: torch.Tensor, indices: torch.Tensor, cu_seqlens_q: torch.Tensor, seq_lens: torch.Tensor,
    block_table: torch.Tensor, max_seqlen_q: int, scale: float, head_size_v: int, k_scale: float = 1.0,
) -> str | None:  # fmt: skip
    """Return why the kernel does not support this call of mla_sparse, None if it does."""
    if max_seqlen_q != 1 or len(q) != len(block_table):
        return ForOthers("it is for decodes: one query per sequence, without padding")
    if indices.dtype != torch.int32 or not indices.is_contiguous():
        return f"indices are {indices.dtype} with strides {tuple(indices.stride())}, not contiguous int32"
    rest = (seq_lens, block_table, 0, scale, head_size_v, k_scale)
    return no_hopper(SOURCE, q.device) or refused(q, kv_cache, *rest) or _not_loaded(q, kv_cache, True)


def refused(
    q: torch.Tensor, kv_cache: torch.Tensor, seq_lens: torch.Tensor, block_table: torch.Tensor, max_seqlen_k: int,
    scale: float, head_size_v: int, k_scale: float = 1.0,
) -> str | None:  # fmt: skip
    """Return why the kernel does not support such a call on any GPU, None if it does."""
    if q.dtype not in (torch.bfloat16, torch.float16) or kv_cache.dtype != q.dtype:
        return f"q is {q.dtype} and the cache is {kv_cache.dtype}, not both bfloat16 or float16"
    if (q.shape[-1], head_size_v) != (SIZE, RANK):
        return f"{head_size_v} + {q.shape[-1] - head_size_v} channels are not 512 + 64"
    if kv_cache.shape[1] % 16:
        return f"blocks of {kv_cache.shape[1]} tokens are not a multiple of 16"
    if scale * k_scale <= 0:
        return f"scale {scale} times k_scale {k_scale} is not positive"
    if seq_lens.dtype != torch.int32 or block_table.dtype != torch.int32:
        return f"seq_lens are {seq_lens.dtype} and the block table is {block_table.dtype}, not int32"
    if seq_lens.stride(-1) != 1 or block_table.stride(-1) != 1:
        return "seq_lens and the rows of the block table must be contiguous"
    for name, t in (("q", q), ("kv_cache", kv_cache)):
        if t.data_ptr() % 16 or t.stride(2) != 1 or any(s % 8 or not 0 < s < 1 << 31 for s in t.stride()[:2]):
            return (
                f"{name} has strides {tuple(t.stride())}: its rows must be contiguous and start at 16 bytes"
            )
    return None


def decode(
    q: torch.Tensor, kv_cache: torch.Tensor, seq_lens: torch.Tensor, block_table: torch.Tensor, max_seqlen_k: int,
    scale: float, head_size_v: int, k_scale: float = 1.0, out: torch.Tensor | None = None, **params: int,
) -> torch.Tensor:  # fmt: skip
    """Run the kernel with the arguments of mla_decode.reference. params: fields of Plan."""
    mla_cases.check("mla_decode", q, kv_cache, head_size_v)
    out = mla_cases.memory("mla_decode", q, head_size_v, out)
    return _run(q, kv_cache, None, seq_lens, block_table, scale, k_scale, out, **params)


def decode_sparse(
    q: torch.Tensor, kv_cache: torch.Tensor, indices: torch.Tensor, cu_seqlens_q: torch.Tensor, seq_lens: torch.Tensor,
    block_table: torch.Tensor, max_seqlen_q: int, scale: float, head_size_v: int, k_scale: float = 1.0,
    out: torch.Tensor | None = None, **params: int,
) -> torch.Tensor:  # fmt: skip
    """Run the kernel with the arguments of mla_sparse.reference, one query per sequence."""
    mla_cases.check("mla_sparse", q, kv_cache, head_size_v)
    out = mla_cases.memory("mla_sparse", q, head_size_v, out)
    return _run(q, kv_cache, indices, seq_lens, block_table, scale, k_scale, out, **params)


def _run(
    q: torch.Tensor, kv_cache: torch.Tensor, indices: torch.Tensor | None, seq_lens: torch.Tensor,
    block_table: torch.Tensor, scale: float, k_scale: float, out: torch.Tensor, **params: int,
) -> torch.Tensor:  # fmt: skip
    batch, heads = q.shape[:2]
    if out.numel() == 0:
        return out
    if out.data_ptr() % 16:  # rows are written in 16 bytes
        made = torch.empty_like(out)
        return out.copy_(_run(q, kv_cache, indices, seq_lens, block_table, scale, k_scale, made, **params))
    device, sparse, (blocks, block_size, _) = q.device, indices is not None, kv_cache.shape
    kernel = _kernel(device, p := plan(q, kv_cache, sparse, **params))
    rows = cdiv(heads, HEADS)
    workers = max(min(multiprocessors(device) // rows, MAX_WORKERS), 1)
    # Of a part of a head: 512 channels in float16; the logarithm of its sum, and the scales of two halves
    parts = torch.empty(2 * workers * heads * (RANK // 2 + 4), dtype=torch.float32, device=device)
    sums = parts[workers * heads * RANK :]
    q_map = cuda_rtc.tensor_map_of(q.data_ptr(), (SIZE, heads, batch), q.stride()[1::-1], (64, HEADS, 1))
    boxes = (SIZE, block_size, blocks), kv_cache.stride()[1::-1], (64, min(p.box, block_size), 1)
    kv_map = cuda_rtc.tensor_map_of(kv_cache.data_ptr(), *boxes)
    taken = tickets.get(device, batch * rows)
    pointers = [t.data_ptr() for t in (seq_lens, block_table, out, parts, sums)]
    chosen = (None, None) if indices is None else (indices.data_ptr(), kv_cache.data_ptr())
    most = (1 << 31) - 1 if indices is None else indices.shape[1]
    early = overlaps(device) and torch.cuda.is_current_stream_capturing()
    numbers = (
        *kv_cache.stride()[:2], most, batch, heads, rows, block_size, block_table.shape[1], block_table.stride(0),
        scale * k_scale * LOG2E, k_scale,
    )  # fmt: skip
    stream = torch.cuda.current_stream(device).cuda_stream
    kernel.launch(
        workers * rows,
        THREADS,
        stream,
        (q_map, kv_map, *pointers, taken.data_ptr(), *chosen, *numbers),
        overlap=early,
    )
    return out
