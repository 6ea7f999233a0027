"""attention_dense in CUDA C++ for Hopper: csrc/attention_dense.cu, compiled at its first call."""

from __future__ import annotations

import ctypes
from functools import lru_cache
from pathlib import Path
from typing import Any, NamedTuple

import torch

from fastkernels.core import cuda_rtc
from fastkernels.core.dispatch import ForOthers
from fastkernels.overrides.kit.hopper import no_hopper, text
from fastkernels.overrides.kit.launch import cdiv, multiprocessors
from fastkernels.overrides.kit.overlap import overlaps
from fastkernels.overrides.linear.kernels.wgmma_linear_cuda import multiply

SOURCE = Path(__file__).parent / "csrc" / "attention_dense.cu"
MOST = 128  # channels of a head
LEAST = 192  # keys; fewer are not measured
LOG2E = 1.4426950408889634
_P, _I, _F, _M = ctypes.c_void_p, ctypes.c_int, ctypes.c_float, cuda_rtc.TensorMap
TYPES = (_M, _M, _M, _P, *[_I] * 6, _F)
RAGGED_TYPES = (*TYPES, _M, _P, _P, _P, _I)


class Plan(NamedTuple):
    """The constants that a kernel is compiled with; csrc/attention_dense.cu describes them."""

    groups: int
    keys: int
    stages: int
    bf16: bool
    channels: int
    rope: int = 0
    of_value: int = (
        0  # channels of a value where sequences are concatenated; 0: one length, and those of a key
    )

    @property
    def value(self) -> int:
        return self.of_value or self.channels

    @property
    def ragged(self) -> bool:
        return self.of_value > 0

    @property
    def threads(self) -> int:
        return 128 * (self.groups + (self.groups > 1))

    @property
    def shared(self) -> int:
        """Bytes: queries, tiles of keys and values, barriers; 1 KiB to align them."""
        of_key, of_value = cdiv(self.channels + self.rope, 64), cdiv(self.value, 64)
        rows = of_key * 64 * self.groups + self.stages * self.keys * (of_key + of_value)
        return 128 * rows + 8 + 32 * self.stages + 1024

    @property
    def options(self) -> tuple[str, ...]:
        """NVRTC's options, without the architecture."""
        return (
            "--std=c++17", f"-DGROUPS={self.groups}", f"-DKEYS={self.keys}", f"-DSTAGES={self.stages}",
            f"-DBF16={int(self.bf16)}", f"-DCHANNELS={self.channels}", f"-DROPE={self.rope}", f"-DVALUE={self.value}",
            f"-DRAGGED={int(self.ragged)}",
        )  # fmt: skip


def weigh(p: Plan) -> str:
    """Return CUDA C++ of weigh(): wgmma for all channels of keys in rows, with weights from registers."""
    count, kind = p.value // 2, "bf16.bf16" if p.bf16 else "f16.f16"
    sums = ", ".join(f"%{i}" for i in range(count))
    operands = ", ".join(f'"+f"(c[{i}])' for i in range(count))
    weights = ", ".join(f"%{count + i}" for i in range(4))
    given = ", ".join(f'"r"(a[{i}])' for i in range(4))
    return f"""
__device__ __forceinline__ void weigh(float (&c)[{count}], const unsigned (&a)[4], unsigned long long b) {{
    asm volatile(
        "wgmma.mma_async.sync.aligned.m64n{p.value}k16.f32.{kind}"
        " {{{sums}}}, {{{weights}}}, %{count + 4}, 1, 1, 1, 1;"
        : {operands} : {given}, "l"(b) : "memory");
}}
"""


def source(p: Plan) -> str:
    """Return the whole text that NVRTC compiles."""
    return multiply(p.keys, "bf16" if p.bf16 else "f16") + weigh(p) + text(SOURCE)


@lru_cache(maxsize=64)
def kernel_for(device: torch.device, p: Plan) -> cuda_rtc.Kernel:
    """Return the kernel of this plan, compiled and loaded."""
    types = RAGGED_TYPES if p.ragged else TYPES
    return cuda_rtc.Kernel(source(p), "attention_dense", p.options, device.index, types, p.shared)


def supports(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float, attn_mask: torch.Tensor | None = None,
    cu_seqlens_q: torch.Tensor | None = None, *_: Any,
) -> str | None:  # fmt: skip
    """Return why the kernel does not support this call of attention_dense, None if it does."""
    reason = no_hopper(SOURCE, q.device) or refused(q, k, v, scale, attn_mask, cu_seqlens_q)
    if reason is None and not is_faster(q, k):
        reason = "cuDNN's attention is as fast"
    return None if reason is None else ForOthers(reason)


def refused(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float, attn_mask: torch.Tensor | None = None,
    cu_seqlens_q: torch.Tensor | None = None,
) -> str | None:  # fmt: skip
    """Return why the kernel does not support such a call on any GPU, None if it does."""
    if attn_mask is not None or cu_seqlens_q is not None:
        return "it takes no mask and no concatenated sequences"
    if q.dtype not in (torch.float16, torch.bfloat16) or k.dtype != q.dtype or v.dtype != q.dtype:
        return f"dtypes {q.dtype}, {k.dtype}, {v.dtype} are not all float16 or all bfloat16"
    if q.shape[3] % 8 or q.shape[3] > MOST or not scale > 0:
        return f"head size {q.shape[3]} is not a multiple of 8 up to {MOST}, or scale {scale} is not positive"
    if not k.shape[1]:
        return "there are no keys"
    for name, t in (("q", q), ("k", k), ("v", v)):
        steps = [s for s, n in zip(t.stride(), t.shape[:3], strict=False) if n > 1]
        if t.data_ptr() % 16 or t.stride(3) != 1 or any(s % 8 or not s for s in steps):
            return (
                f"{name} has strides {tuple(t.stride())}: its rows must be contiguous and start at 16 bytes"
            )
    return None


def is_faster(q: torch.Tensor, k: torch.Tensor) -> bool:
    """Whether the kernel takes less time than cuDNN's, which PyTorch runs. 36 shapes on an H100, 2026-11-28.

    64 channels: 1.06 to 2.1 times as fast for 197 to 1,029 keys, 1.15 for 1,374 in one wave, 0.92 to 0.98 for more.
    Where many blocks follow each other, the last block of a head counts: cuDNN's has 128 queries, of which this
    kernel computes 64. 72 channels: 1.42 times in one wave.
    """
    (batch, n_q, heads, channels), n_k = q.shape, k.shape[1]
    sms, tiles = multiprocessors(q.device), cdiv(n_q, 64)
    units = batch * heads * tiles
    if n_k < LEAST:
        return False
    if channels != 64:
        return 64 < channels <= 80 and units <= sms and n_k <= 512
    if n_k > 1152:
        return n_k <= 1536 and batch * heads * cdiv(n_q, 128) <= sms
    return units <= 6 * sms or tiles % 2 == 1


@lru_cache(maxsize=4096)
def choose(batch: int, heads: int, n_q: int, n_k: int, channels: int, sms: int = 132) -> dict[str, int]:
    """Return the default parameters: more than one warpgroup where keys are many and blocks are one wave, or very many.

    With 64 or 80 keys a multiprocessor has four blocks of one warpgroup, otherwise three.
    """
    units = batch * heads * cdiv(n_q, 64)
    if channels > 64:
        return (
            {"groups": 1, "keys": 64, "stages": 2} if units <= sms else {"groups": 2, "keys": 80, "stages": 2}
        )
    if units > sms and n_k > 512:
        if batch * heads * cdiv(n_q, 128) <= sms:
            return {"groups": 2, "keys": 128, "stages": 2}
        if batch * heads * cdiv(n_q, 192) <= sms or units > 12 * sms:
            return {"groups": 3, "keys": 80, "stages": 2}
    if 3 * sms < units <= 4 * sms:
        return {"groups": 1, "keys": 80, "stages": 2}
    keys = min((128, 112, 96, 80, 64), key=lambda n: (cdiv(n_k, n) * (n + 16), -n))
    return {"groups": 1, "keys": keys, "stages": 2}


def tensor_map(t: torch.Tensor, rows: int) -> cuda_rtc.TensorMap:
    """Describe q, k or v [B, S, H, D]: boxes of 64 channels and so many tokens of a head."""
    order = (1, 2, 0)  # tokens, heads, batch
    strides = tuple(t.stride(i) if t.shape[i] > 1 else 8 for i in order)
    sizes = (t.shape[3], *(t.shape[i] for i in order))
    return cuda_rtc.tensor_map_of(t.data_ptr(), sizes, strides, (64, rows, 1, 1))


def attend(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float, *_: Any, **params: int
) -> torch.Tensor:
    """Run the kernel with the arguments of attention_dense.reference. params: fields of Plan."""
    out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    if out.numel() == 0:
        return out
    (batch, n_q, heads, size), n_k = q.shape, k.shape[1]
    sms = multiprocessors(q.device)
    chosen = params or choose(batch, heads, n_q, n_k, size, sms)
    p = Plan(**chosen, bf16=q.dtype == torch.bfloat16, channels=size)
    tiles = cdiv(n_q, 64 * p.groups)
    grid = tiles * batch * heads
    maps = tensor_map(q, 64 * p.groups), tensor_map(k, p.keys), tensor_map(v, p.keys)
    early = overlaps(q.device) and torch.cuda.is_current_stream_capturing()
    given = (
        *maps,
        out.data_ptr(),
        n_q,
        n_k,
        heads,
        heads // k.shape[2],
        tiles,
        int(grid <= 3 * sms),
        scale * LOG2E,
    )
    stream = torch.cuda.current_stream(q.device).cuda_stream
    kernel_for(q.device, p).launch(grid, p.threads, stream, given, overlap=early)
    return out
