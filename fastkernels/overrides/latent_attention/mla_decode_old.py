"""mla_decode in CUDA C++ for Hopper: csrc/mla_decode.cu, compiled at its first call.

One launch fills the chip, and its blocks divide the keys of the batch among themselves, on the device. A second launch
adds up the results of sequences that were divided.
"""

from __future__ import annotations

import ctypes
from functools import lru_cache
from pathlib import Path
from typing import Any, NamedTuple

import torch

from fastkernels.core import cuda_rtc
from fastkernels.overrides.kit.hopper import no_hopper, text
from fastkernels.overrides.kit.launch import cdiv, multiprocessors
from fastkernels.overrides.kit.overlap import overlaps
from fastkernels.overrides.latent_attention import mla_cases
from fastkernels.overrides.linear.wgmma_linear_cuda import multiply

SOURCE = Path(__file__).parent / "csrc" / "mla_decode_old.cu"
RANK, SIZE = 512, 576  # channels of a latent, and with the rotary key
HEADS = 64  # of a block
THREADS, COMBINE_THREADS = 384, 64
MAX_WORKERS = 160
TRACE, last = 0, [None]
LOG2E = 1.4426950408889634
_P, _I, _F, _M = ctypes.c_void_p, ctypes.c_int, ctypes.c_float, cuda_rtc.TensorMap
TYPES = (_M, _M, *[_P] * 6, *[_I] * 7, _F, _F)
COMBINE_TYPES = (*[_P] * 4, _I, _I)


class Plan(NamedTuple):
    """The constants that a kernel is compiled with; csrc/mla_decode.cu describes them."""

    box: int
    bf16: bool
    keys: int = 64
    least: int = 1
    extra: int = 4
    turns: int = 0
    seesaw: int = 0
    cluster: int = 1

    @property
    def stages(self) -> int:
        return 128 // self.keys

    @property
    def shared(self) -> int:
        """Bytes of dynamic shared memory: queries, the ring of keys, barriers, and 1 KiB to align them."""
        return 2 * SIZE * (HEADS + self.stages * self.keys) + 8 * 6 * self.stages + 32 + 1552 + 1024

    @property
    def options(self) -> tuple[str, ...]:
        """NVRTC's options, without the architecture."""
        clustered = f"__cluster_dims__({self.cluster},1,1)" if self.cluster > 1 else ""
        return (
            "--std=c++17", f"-DKEYS={self.keys}", f"-DSTAGES={self.stages}", f"-DBOX={self.box}",
            f"-DLEAST={self.least}", f"-DEXTRA={self.extra}", f"-DTURNS={self.turns}", f"-DSEESAW={self.seesaw}",
            f"-DCLUSTER={self.cluster}", f"-DCLUSTERED={clustered}",
            f"-DBF16={int(self.bf16)}",
        )  # fmt: skip


def weigh(bf16: bool) -> str:
    """Return CUDA C++ of weigh(): wgmma for 256 channels, with weights from registers and keys in rows."""
    kind = "bf16" if bf16 else "f16"
    sums = ", ".join(f"%{i}" for i in range(128))
    operands = ", ".join(f'"+f"(c[{i}])' for i in range(128))
    return f"""
__device__ __forceinline__ void weigh(float (&c)[128], const unsigned (&a)[4], unsigned long long b) {{
    asm volatile(
        "wgmma.mma_async.sync.aligned.m64n256k16.f32.{kind}.{kind}"
        " {{{sums}}}, {{%128, %129, %130, %131}}, %132, 1, 1, 1, 1;"
        : {operands} : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b) : "memory");
}}
"""


def weigh_shared(bf16: bool) -> str:
    """Return CUDA C++ of weigh() with weights from shared memory."""
    kind = "bf16" if bf16 else "f16"
    sums = ", ".join(f"%{i}" for i in range(128))
    operands = ", ".join(f'"+f"(c[{i}])' for i in range(128))
    return f"""
__device__ __forceinline__ void weigh(float (&c)[128], unsigned long long a, unsigned long long b) {{
    asm volatile("wgmma.mma_async.sync.aligned.m64n256k16.f32.{kind}.{kind} {{{sums}}}, %128, %129, 1, 1, 1, 0, 1;"
        : {operands} : "l"(a), "l"(b) : "memory");
}}
"""


def source(p: Plan) -> str:
    """Return the whole text that NVRTC compiles."""
    return multiply(p.keys, "bf16" if p.bf16 else "f16") + weigh(p.bf16) + weigh_shared(p.bf16) + text(SOURCE)


@lru_cache(maxsize=64)
def _kernels(device: torch.device, p: Plan) -> tuple[cuda_rtc.Kernel, cuda_rtc.Kernel]:
    _loaded.add((device, p))
    made = source(p)
    return (
        cuda_rtc.Kernel(made, "mla_decode", p.options, device.index, TYPES, p.shared),
        cuda_rtc.Kernel(made, "mla_combine", p.options, device.index, COMBINE_TYPES, 0),
    )


_loaded: set[tuple[torch.device, Plan]] = set()


def plan(q: torch.Tensor, kv_cache: torch.Tensor, **params: int) -> Plan:
    """Return the constants for a call."""
    pairs = params.get("seesaw", 0) and -(-q.shape[1] // HEADS) % 2 == 0
    params = {"cluster": 2 if pairs else 1, **params}
    most = params.get("keys", 64) // params["cluster"]
    box = next(n for n in (64, 32, 16) if kv_cache.shape[1] % n == 0 and n <= most)
    return Plan(box, q.dtype == torch.bfloat16, **params)


def supports(q: torch.Tensor, kv_cache: torch.Tensor, *rest: Any) -> str | None:
    """Return why the kernel does not support this call, None if it does."""
    if (reason := no_hopper(SOURCE, q.device) or refused(q, kv_cache, *rest)) is not None:
        return reason
    if torch.cuda.is_current_stream_capturing() and (q.device, plan(q, kv_cache)) not in _loaded:
        return "its kernel was not loaded by a call before a CUDA graph was captured"
    return None


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
        if t.data_ptr() % 16 or t.stride(2) != 1 or any(s % 8 or not 0 < s < 1 << 38 for s in t.stride()[:2]):
            return (
                f"{name} has strides {tuple(t.stride())}: its rows must be contiguous and start at 16 bytes"
            )
    return None


def decode(
    q: torch.Tensor, kv_cache: torch.Tensor, seq_lens: torch.Tensor, block_table: torch.Tensor, max_seqlen_k: int,
    scale: float, head_size_v: int, k_scale: float = 1.0, out: torch.Tensor | None = None, ahead: int = 0, **params: int,
) -> torch.Tensor:  # fmt: skip
    """Run the kernel with the arguments of mla_decode.reference; params: fields of Plan."""
    mla_cases.check("mla_decode", q, kv_cache, head_size_v)
    out = mla_cases.memory("mla_decode", q, head_size_v, out)
    batch, heads = q.shape[:2]
    if out.numel() == 0:
        return out
    device = q.device
    kernel, combine = _kernels(device, p := plan(q, kv_cache, **params))
    rows = cdiv(heads, HEADS)
    workers = max(min(multiprocessors(device) // rows, MAX_WORKERS), 1)
    parts = torch.empty(2 * workers * heads * (RANK + 1), dtype=torch.float32, device=device)
    counts = torch.empty(2 * batch + TRACE, dtype=torch.int32, device=device)
    last[0] = counts
    sums = parts[2 * workers * heads * RANK :]
    q_map = cuda_rtc.tensor_map_of(q.data_ptr(), (SIZE, heads, batch), q.stride()[1::-1], (64, HEADS, 1))
    sizes = (SIZE, kv_cache.shape[1], kv_cache.shape[0])
    kv_map = cuda_rtc.tensor_map_of(kv_cache.data_ptr(), sizes, kv_cache.stride()[1::-1], (64, p.box, 1))
    pointers = [t.data_ptr() for t in (seq_lens, block_table, out, parts, sums, counts)]
    early = overlaps(device) and torch.cuda.is_current_stream_capturing()
    numbers = (
        batch,
        heads,
        rows,
        kv_cache.shape[1],
        *block_table.shape[1:],
        block_table.stride(0),
        ahead if early else 0,
    )
    scales = scale * k_scale * LOG2E, k_scale
    stream = torch.cuda.current_stream(device).cuda_stream
    kernel.launch(
        workers * rows, THREADS, stream, (q_map, kv_map, *pointers, *numbers, *scales), overlap=early
    )
    per_block = 1
    while batch * cdiv(heads, per_block) > 1024 and per_block < 16:
        per_block *= 2
    grid = batch * cdiv(heads, per_block)
    combine.launch(grid, COMBINE_THREADS, stream, (*pointers[2:], heads, per_block), overlap=overlaps(device))
    return out
