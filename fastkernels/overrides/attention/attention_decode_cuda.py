"""attention_decode in CUDA C++ for Hopper: csrc/attention_decode.cu, compiled at its first call.

One launch fills the chip once. Its blocks divide all keys of the batch evenly among themselves, on the device: the host
plans nothing, and one CUDA graph serves all lengths.
"""

from __future__ import annotations

import ctypes
from collections.abc import Mapping
from functools import lru_cache
from pathlib import Path
from typing import Any, NamedTuple

import torch

from fastkernels.core import cuda_rtc
from fastkernels.core.dispatch import ForOthers
from fastkernels.overrides.attention.paged_cache import check, dtype_of, memory
from fastkernels.overrides.kit.hopper import no_hopper, text
from fastkernels.overrides.kit.launch import multiprocessors, next_power_of_2, tickets
from fastkernels.overrides.kit.overlap import overlaps

SOURCE = Path(__file__).parent / "csrc" / "attention_decode.cu"
LANES = SOURCE.with_name("attention_decode_lanes.cu")
MAX_HEADS, MAX_BATCH = 16, 4096  # query heads per key head; sequences, whose lengths are in shared memory
WIDTHS = (64, 128, 256)  # channels of a row in shared memory; a smaller head is padded there
SHARED, SHARED_OF_ALL = 227 * 1024, 228 * 1024  # bytes of shared memory of a block, and of an SM
LOG2E = 1.4426950408889634
FP8 = torch.float8_e4m3fn
# Keys: a longer context is mostly the limit of a CUDA graph, not the length of its sequences
TYPICAL = 4096
_P, _I, _F = ctypes.c_void_p, ctypes.c_int, ctypes.c_float
TYPES = (*[_P] * 8, *[_I] * 14, _F, _F, _I, _I, _F, _P)


def _set(
    warps: int, keys: int, stages: int, per_sm: int, least: int, ahead: int, cluster: int = 1, whole: int = 0
) -> dict[str, int]:
    return {
        "warps": warps, "keys": keys, "stages": stages, "per_sm": per_sm, "least": least, "ahead": ahead,
        "cluster": cluster, **({"whole": whole} if whole else {}),
    }  # fmt: skip


# Parameter sets; any set is correct for any shape that fits shared memory.
#   warps    of a block
#   keys     that a warp reads at once, 16 or 32
#   stages   of a warp's ring, each with so many keys and their values
#   per_sm   blocks per SM
#   least    keys of the smallest share: dividing further costs more than it saves
#   ahead    reads of each warp that are prefetched while the previous kernel still runs, 0 to stages
#   cluster  blocks of a worker, 1 to 8: a worker processes one share, and adds it up in shared memory
#   whole    if no sequence has more keys than this, and each has a worker, none is divided. Absent: any may be
PARAMS: tuple[dict[str, int], ...] = (
    _set(8, 16, 3, 1, 128, 2), _set(4, 16, 3, 2, 64, 2), _set(4, 16, 3, 1, 512, 2, 8), _set(4, 16, 3, 1, 512, 2, 2),
    _set(8, 16, 3, 1, 128, 2, whole=256), _set(4, 16, 3, 1, 128, 2),  # the last one for heads over 128
    # Few key heads: half as many parts of a sequence for the last worker to add, by two blocks
    _set(8, 16, 3, 1, 256, 2, 2),
    # Caches in FP8: units of as many bytes as 16 keys have in 16 bits
    _set(8, 32, 3, 1, 256, 2), _set(8, 32, 3, 1, 512, 2, 2), _set(4, 32, 3, 2, 128, 2), _set(4, 32, 3, 1, 256, 2),
    _set(8, 32, 5, 1, 256, 2),  # for heads of 64, whose keys have few bytes
)  # fmt: skip
# Defaults without a tuned table: {most keys of a sequence: set}. A call gets the smallest entry that is not below its
# longest sequence if each of its sequences gets a worker; other calls get the first of ORDERS that fits.
FEW: dict[int, dict[str, int]] = {256: PARAMS[4]}
FEW_KEYS = 16  # of a unit in sets of FEW
ORDERS = {
    False: PARAMS,
    True: (PARAMS[11], *PARAMS[7:11], PARAMS[0], PARAMS[5], PARAMS[1], PARAMS[3]),
}  # by whether caches are in FP8
PAIRED = PARAMS[6], PARAMS[8]
# Bytes of a sequence's parts. More are added faster in halves: one block took 33 us for 132 parts of 16 heads and 128
# channels, 1 MiB (H200, 2026-11-29).
MOST_PARTS = 512 << 10
LONG = 16384  # keys: a graph for more has to suit long contexts as well as short ones
# Bytes of reads in flight on an SM. With half of them, contexts of 64K keys took 10% longer (H200, 2026-11-29).
IN_FLIGHT = 96 << 10


class Plan(NamedTuple):
    """The constants that a kernel is compiled with."""

    heads: int  # query heads per key head
    head_size: int
    page: int
    warps: int
    keys: int
    stages: int
    ahead: int
    cluster: int
    whole: int
    seqs: int
    bf16: bool
    window: bool = False
    softcap: bool = False
    sinks: int = 0
    fp8: bool = False
    query8: bool = False
    per_sm: int = 1

    @property
    def width(self) -> int:
        """Channels of a row in shared memory."""
        return next(width for width in WIDTHS if width >= self.head_size)

    @property
    def slots(self) -> int:
        """Warps whose sums are in shared memory at once: all, or a half, a quarter, .., if more blocks fit then."""
        found = self.warps
        for room in (SHARED, SHARED_OF_ALL // self.per_sm - 1024):
            slots = self.warps
            while slots > 1 and slots % 2 == 0 and self._shared(slots) > room:
                slots //= 2
            if self._shared(slots) <= room:
                found = slots
        return found

    @property
    def shared(self) -> int:
        """Bytes of shared memory: the warps' rings and sums, the cluster's sums, lengths and bookkeeping."""
        return self._shared(self.slots)

    def _shared(self, slots: int) -> int:
        ring = self.warps * self.stages * 2 * self.keys * (1 if self.fp8 else 2) * self.width
        gathered = self.heads * (4 * self.width + 8 * self.cluster) if self.cluster > 1 else 0
        notes = 4 * (2 * self.seqs + self.warps + 3 + 2 * slots * self.heads)
        return ring + slots * 4 * self.heads * (self.width + 4) + 2 * gathered + notes

    @property
    def resident(self) -> int:
        """Blocks that fit on an SM with 168 registers per thread (128 would spill), 255 for 256 channels."""
        room, threads = SHARED_OF_ALL // (self.shared + 1024), 256 if self.width > 128 else 384
        return max(min(room, threads // (32 * self.warps)), 1)

    @property
    def options(self) -> tuple[str, ...]:
        """NVRTC's options, without the architecture."""
        return (
            "--std=c++17", f"-DHEADS={self.heads}", f"-DHEAD_SIZE={self.head_size}", f"-DD={self.width}",
            f"-DPAGE={self.page}", f"-DWARPS={self.warps}", f"-DKEYS={self.keys}", f"-DSTAGES={self.stages}",
            f"-DRESIDENT={self.resident}", f"-DAHEAD={self.ahead}", f"-DCLUSTER={self.cluster}",
            f"-DWHOLE={self.whole}", f"-DSEQS={self.seqs}", f"-DBF16={int(self.bf16)}",
            f"-DWINDOW={int(self.window)}", f"-DSOFTCAP={int(self.softcap)}",
            f"-DSINKS={self.sinks}", f"-DSLOTS={self.slots}", f"-DFP8={int(self.fp8)}",
            f"-DQUERY8={int(self.query8)}",
        )  # fmt: skip


def plan(
    p: Mapping[str, int],
    q: torch.Tensor,
    key_cache: torch.Tensor,
    window: bool = False,
    softcap: bool = False,
    sinks: torch.Tensor | None = None,
    out: torch.dtype | None = None,
) -> Plan:
    """Return the plan of these parameters for a call. out: the result's dtype, as in `dtype_of` by default."""
    batch, heads, head_size = q.shape
    group, page = heads // key_cache.shape[2], key_cache.shape[1]
    bf16, fp8 = (out or dtype_of(q)) == torch.bfloat16, key_cache.dtype == FP8
    planned = plan_of(p, group, head_size, page, batch, bf16, window, softcap, fp8)
    return planned._replace(sinks=_kind_of_sinks(sinks), query8=q.dtype == FP8)


def plan_of(
    p: Mapping[str, int], group: int, head_size: int, page: int, batch: int, bf16: bool = True,
    window: bool = False, softcap: bool = False, fp8: bool = False,
) -> Plan:  # fmt: skip
    """Return the plan of these parameters for so many sequences; group: query heads per key head."""
    return Plan(
        group, head_size, page, p["warps"], p["keys"], p["stages"], p["ahead"], p["cluster"], p.get("whole", 0),
        _room(batch), bf16, window, softcap, fp8=fp8, per_sm=p["per_sm"],
    )  # fmt: skip


def _kind_of_sinks(sinks: torch.Tensor | None) -> int:
    return 0 if sinks is None else 1 if sinks.dtype == torch.float32 else 2


def has_room(p: Plan) -> bool:
    """Return whether the rings fit a block's shared memory."""
    return p.shared <= SHARED


def fits(params: Mapping[str, int], q: torch.Tensor, key_cache: torch.Tensor, *_: Any) -> bool:
    """Return whether this set suits a call: its rings fit."""
    return has_room(plan(params, q, key_cache))


def most_workers(kv_heads: int, p: Mapping[str, int], sms: int) -> int:
    """Return the number of workers of each key head."""
    return max(p["per_sm"] * sms // (kv_heads * p["cluster"]), 1)


def supports_cuda(
    q: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    seq_lens: torch.Tensor,
    block_table: torch.Tensor,
    max_seqlen_k: int,
    scale: float,
    window_left: int = -1,
    softcap: float = 0.0,
    k_scale: float = 1.0,
    v_scale: float = 1.0,
    sinks: Any = None,
) -> str | None:
    """Return why the kernel does not support this call, None if it does."""
    return (
        no_hopper(SOURCE, q.device)
        or no_hopper(LANES, q.device)
        or refused(q, key_cache, value_cache, seq_lens, block_table, sinks)
        or no_room(q, key_cache)
        or not_loaded(q, key_cache, read(max_seqlen_k, window_left), window_left >= 0, softcap > 0, sinks)
    )


def read(most: int, window_left: int) -> int:
    """Return a bound on the keys of a sequence that are read: its first unit may begin before the window."""
    return most if window_left < 0 else min(most, window_left + FEW_KEYS)


_loaded: set[tuple[Any, ...]] = set()


def _kind(
    q: torch.Tensor, key_cache: torch.Tensor, most: int, window: bool = False, softcap: bool = False,
    sinks: torch.Tensor | None = None,
) -> tuple[Any, ...]:  # fmt: skip
    """Return the properties of a call that decide which kernel it runs with default parameters."""
    group, few_keys = q.shape[1] // key_cache.shape[2], few(q, key_cache, most)
    kind = q.device, q.dtype, key_cache.dtype, group, *key_cache.shape[1::2], _room(q.shape[0]), few_keys
    return *kind, window, softcap, _kind_of_sinks(sinks)


def not_loaded(
    q: torch.Tensor, key_cache: torch.Tensor, most: int, window: bool = False, softcap: bool = False,
    sinks: torch.Tensor | None = None,
) -> str | None:  # fmt: skip
    """Return why a call cannot be captured (no code is loaded during a capture), None if it can or none is active."""
    if (
        not torch.cuda.is_current_stream_capturing()
        or _kind(q, key_cache, most, window, softcap, sinks) in _loaded
    ):
        return None
    return "its kernel for this shape was not loaded by a call before a CUDA graph was captured"


def _room(batch: int) -> int:
    """Return the number of sequences that a kernel for this batch can hold."""
    return max(next_power_of_2(max(batch, 1)), 256)


def refused(
    q: torch.Tensor, key_cache: torch.Tensor, value_cache: torch.Tensor, seq_lens: torch.Tensor,
    block_table: torch.Tensor, sinks: torch.Tensor | None = None,
) -> str | None:  # fmt: skip
    """Return why the kernel does not support such a call on any GPU, None if it does."""
    if q.dtype not in (torch.bfloat16, torch.float16) and (q.dtype, key_cache.dtype) != (FP8, FP8):
        return f"dtype {q.dtype} is not bfloat16 or float16"
    if key_cache.dtype != value_cache.dtype or key_cache.dtype not in (q.dtype, FP8):
        return f"the caches are {key_cache.dtype} and {value_cache.dtype}, q is {q.dtype}"
    if sinks is not None and (sinks.dtype not in (torch.float32, dtype_of(q)) or not sinks.is_contiguous()):
        return (
            f"sinks are {sinks.dtype} with strides {sinks.stride()}, not contiguous float32 or {dtype_of(q)}"
        )
    if q.shape[2] > WIDTHS[-1]:
        return ForOthers(f"head size {q.shape[2]} is over {WIDTHS[-1]}")
    if q.shape[2] % (16 // key_cache.element_size()):
        return f"head size {q.shape[2]} is not a multiple of {16 // key_cache.element_size()}"
    if (group := q.shape[1] // key_cache.shape[2]) > MAX_HEADS:
        return f"{group} query heads on one key head are over {MAX_HEADS}"
    if q.shape[0] > MAX_BATCH:
        return f"{q.shape[0]} sequences are over {MAX_BATCH}"
    if seq_lens.dtype != torch.int32 or block_table.dtype != torch.int32:
        return f"seq_lens are {seq_lens.dtype} and the block table is {block_table.dtype}, not int32"
    if seq_lens.stride(-1) != 1 or block_table.stride(-1) != 1:
        return "seq_lens and the rows of the block table must be contiguous"
    for name, t in (("q", q), ("key_cache", key_cache), ("value_cache", value_cache)):
        if (
            t.data_ptr() % 16
            or t.stride(-1) != 1
            or any(
                stride * t.element_size() % 16
                for stride, n in zip(t.stride()[:-1], t.shape[:-1], strict=True)
                if n > 1
            )
        ):
            return (
                f"{name} has strides {tuple(t.stride())}: its rows must be contiguous and start at 16 bytes"
            )
        if t.dim() == 4 and t.shape[0] * t.stride(0) * t.element_size() >= 1 << 36:
            return f"{name} has strides {tuple(t.stride())}: 64 GiB or more"
    keys = q.shape[0] * max(block_table.shape[1] * key_cache.shape[1], 16)
    if keys // 16 * 1024 >= 1 << 32:  # shares are computed with 32 bits
        return f"a block table of {tuple(block_table.shape)} for blocks of {key_cache.shape[1]} is too large"
    return None


def source() -> str:
    """Return the whole text that NVRTC compiles."""
    return text(LANES, SOURCE)


@lru_cache(maxsize=256)
def _kernel(device: torch.device, p: Plan) -> cuda_rtc.Kernel:
    return cuda_rtc.Kernel(source(), "attention_decode", p.options, device.index, TYPES, p.shared)


def few(q: torch.Tensor, key_cache: torch.Tensor, most: int) -> int:
    """Return the key of FEW that applies to a call, 0 if none. most: the host's bound on the keys of a sequence."""
    of_most = min((keys for keys in FEW if keys >= most), default=0)
    if not of_most:
        return 0
    workers = most_workers(key_cache.shape[2], FEW[of_most], multiprocessors(q.device))
    return of_most if q.shape[0] <= workers and fits(FEW[of_most], q, key_cache) else 0


def choose(q: torch.Tensor, key_cache: torch.Tensor, most: int) -> dict[str, int]:
    """Return the default parameters: those for few keys, or the first set that fits. most: as for `few`."""
    if kind := few(q, key_cache, most):
        return FEW[kind]
    kv_heads, sms = key_cache.shape[2], multiprocessors(q.device)
    return _first(plan(PARAMS[0], q, key_cache), kv_heads, q.shape[0], sms)


@lru_cache(maxsize=1024)
def _first(like: Plan, kv_heads: int, batch: int, sms: int) -> dict[str, int]:
    return ranked(like, kv_heads, batch, sms)[0]


def no_room(q: torch.Tensor, key_cache: torch.Tensor) -> str | None:
    """Return why no set fits, None if one does: wide heads and lengths of many sequences can be too much together."""
    batch, _, head_size = q.shape
    if batch <= 256 or head_size <= 128 or any(fits(p, q, key_cache) for p in PARAMS):
        return None
    return f"the lengths of {batch} sequences and sums of head size {head_size} do not fit shared memory"


def ranked(like: Plan, kv_heads: int, batch: int, sms: int) -> list[dict[str, int]]:
    """Return the sets that fit, the one that is expected to be the fastest first. like: any plan for such a call.

    It prefers sets whose blocks are all on the chip at once. Clusters of two blocks are for calls with so few key heads
    that the parts of a sequence are many, and for those that no other set suits.
    """

    def planned(p: Mapping[str, int]) -> Plan:
        found = plan_of(p, like.heads, like.head_size, like.page, batch, fp8=like.fp8)
        return found._replace(query8=like.query8)

    paired = many_parts(like.heads, kv_heads, like.head_size, batch, sms)

    def rank(p: dict[str, int]) -> tuple[bool, bool]:
        crowded = p["per_sm"] > planned(p).resident
        return crowded, not any(p is each for each in PAIRED) if paired else p["cluster"] > 1

    return sorted((p for p in ORDERS[like.fp8] if has_room(planned(p))), key=rank)


def many_parts(group: int, kv_heads: int, head_size: int, batch: int, sms: int) -> bool:
    """Return whether one worker may have to add so many parts of a sequence that half as many are faster."""
    return sms // kv_heads // max(batch, 1) * group * head_size * 4 > MOST_PARTS


def suits_long(p: Mapping[str, int], planned: Plan) -> bool:
    """Return whether a set reads long contexts at the memory's speed: enough reads in flight, and no large cluster."""
    unit = 2 * planned.keys * (1 if planned.fp8 else 2) * planned.width
    blocks = min(p["per_sm"], planned.resident)
    return p["cluster"] <= 2 and blocks * planned.warps * (planned.stages - 1) * unit >= IN_FLIGHT


def sizes(
    p: Mapping[str, int], q: torch.Tensor, key_cache: torch.Tensor, value_cache: torch.Tensor, block_table: torch.Tensor
) -> tuple[int, ...]:  # fmt: skip
    """Return the kernel's integers, `batch` to `table_stride`."""
    strides = [
        stride * t.element_size() // 16
        for t, n in ((q, 2), (key_cache, 3), (value_cache, 3))
        for stride in t.stride()[:n]
    ]
    return (
        q.shape[0], key_cache.shape[2], key_cache.shape[0], block_table.shape[1], max(p["least"] // p["keys"], 1),
        *strides, block_table.stride(0),
    )  # fmt: skip


def decode_cuda(
    q: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    seq_lens: torch.Tensor,
    block_table: torch.Tensor,
    max_seqlen_k: int,
    scale: float,
    window_left: int = -1,
    softcap: float = 0.0,
    k_scale: float = 1.0,
    v_scale: float = 1.0,
    sinks: torch.Tensor | None = None,
    alibi_slopes: None = None,
    out: torch.Tensor | None = None,
    **params: int,
) -> torch.Tensor:
    """Run the kernel with the arguments of attention_decode.reference.

    params  one of PARAMS, or some of its keys
    out     contiguous memory for the result, other than q's
    """
    check("attention_decode", q, key_cache, value_cache)
    out = memory("attention_decode", q, out)
    if out.numel() == 0:
        return out
    most = read(max_seqlen_k, window_left)
    p = params if params.keys() >= PARAMS[0].keys() else {**choose(q, key_cache, most), **params}
    kv_heads = key_cache.shape[2]
    workers = most_workers(kv_heads, p, multiprocessors(q.device))
    # Of each part: sums, the maximum, and the sum of weights
    rows = 2 * kv_heads * workers * (q.shape[1] // kv_heads)
    taken = tickets.get(q.device, kv_heads * workers * p["cluster"])
    with_window, with_cap = window_left >= 0, softcap > 0
    planned = plan(p, q, key_cache, with_window, with_cap, sinks, out.dtype)
    parts = torch.empty(rows * (planned.width + 2), dtype=torch.float32, device=q.device)
    kernel = _kernel(q.device, planned)
    _loaded.add(_kind(q, key_cache, most, with_window, with_cap, sinks))
    tensors = (q, key_cache, value_cache, out, parts, taken, seq_lens, block_table)
    early = overlaps(q.device) and torch.cuda.is_current_stream_capturing()
    args = (
        *(t.data_ptr() for t in tensors), *sizes(p, q, key_cache, value_cache, block_table), scale * k_scale * LOG2E,
        v_scale, int(early), window_left, softcap * LOG2E, None if sinks is None else sinks.data_ptr(),
    )  # fmt: skip
    stream = torch.cuda.current_stream(q.device).cuda_stream
    kernel.launch(kv_heads * workers * p["cluster"], 32 * p["warps"], stream, args, overlap=early)
    return out
