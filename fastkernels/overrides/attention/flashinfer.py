"""FlashInfer (0.6) as a provider of attention_decode and attention_prefill.

Decode runs XQA, which needs no plan from the host and can be captured. Prefill runs the paged wrapper, which plans on
the host (one synchronization); the plan is reused while the same tensors come again, layer by layer. FlashInfer
compiles its kernels with nvcc at their first call, so every shape needs a call before a CUDA graph is captured.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import torch

_SEMAPHORES = 8 << 20  # bytes; XQA needs zeros at its first call and leaves zeros
_SCRATCH = 128 << 20
_seen: set[tuple[Any, ...]] = set()  # shapes that decode has compiled


@cache
def workspace(device: torch.device, user: str) -> torch.Tensor:
    """Return the scratch memory of 'decode' or 'prefill', which calls on one stream can share."""
    return torch.zeros(_SEMAPHORES + _SCRATCH, dtype=torch.uint8, device=device)


@cache
def _capability(device: torch.device) -> tuple[int, int]:
    return torch.cuda.get_device_capability(device)


def _supports(q: torch.Tensor, key_cache: torch.Tensor, value_cache: torch.Tensor) -> str | None:
    if _capability(q.device)[0] != 9:
        return "FlashInfer is used on Hopper GPUs (compute capability 9.x) only"
    if q.dtype not in (torch.float16, torch.bfloat16) or not q.dtype == key_cache.dtype == value_cache.dtype:
        return f"FlashInfer is used with float16 or bfloat16, got q {q.dtype} and cache {key_cache.dtype}"
    if key_cache.stride() != value_cache.stride() or key_cache.stride(-1) != 1:
        return f"the caches have strides {tuple(key_cache.stride())} and {tuple(value_cache.stride())}"
    return None


def _shape(q: torch.Tensor, key_cache: torch.Tensor, window_left: int) -> tuple[Any, ...]:
    _, block_size, kv_heads, head_size = key_cache.shape
    return q.device, q.dtype, block_size, head_size, q.shape[1] // kv_heads, window_left >= 0


def supports_decode(
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
) -> str | None:
    block_size, kv_heads, head_size = key_cache.shape[1:]
    if softcap > 0:
        return "XQA has no soft cap"
    if (k_scale, v_scale) != (1.0, 1.0):
        return f"FlashInfer is used without scales of the cache, got {k_scale} and {v_scale}"
    if block_size not in (16, 32, 64, 128):
        return f"XQA needs a block size of 16, 32, 64 or 128, got {block_size}"
    if head_size % 16 or head_size > 256 or q.shape[1] // kv_heads > 32:
        return f"XQA has no kernel for {q.shape[1]} heads of {head_size} on {kv_heads}"
    if any(stride % head_size for stride in key_cache.stride()[:3]):
        return f"XQA needs strides that are multiples of the head size, got {tuple(key_cache.stride())}"
    if seq_lens.dtype != torch.int32 or block_table.dtype != torch.int32:
        return f"seq_lens and block_table must be int32, got {seq_lens.dtype} and {block_table.dtype}"
    reason = _supports(q, key_cache, value_cache)
    if reason is not None or not torch.cuda.is_current_stream_capturing():
        return reason
    if _shape(q, key_cache, window_left) not in _seen:
        return "FlashInfer's kernel for this shape was not compiled before a CUDA graph was captured"
    return None


def decode(
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
    sinks: None = None,
    alibi_slopes: None = None,
) -> torch.Tensor:
    """Run XQA with arguments of attention_decode.reference that `supports_decode` accepts."""
    out = torch.zeros(q.shape, dtype=q.dtype, device=q.device)  # XQA does not write rows without keys
    if q.shape[0] > 0:
        xqa(out, q, key_cache, value_cache, seq_lens, block_table, max_seqlen_k, scale, window_left)
    return out


def xqa(
    out: torch.Tensor,
    q: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    seq_lens: torch.Tensor,
    block_table: torch.Tensor,
    max_seqlen_k: int,
    scale: float,
    window_left: int = -1,
) -> None:
    """Run XQA into `out`. It writes only the rows of sequences that have keys."""
    from flashinfer.decode import xqa_batch_decode_with_kv_cache

    # XQA reads q, table and lengths through bare pointers, as contiguous rows.
    xqa_batch_decode_with_kv_cache(
        q.contiguous(), (key_cache, value_cache), workspace(q.device, "decode"), block_table.contiguous(),
        seq_lens.contiguous(), max_seqlen_k, bmm1_scale=scale, bmm2_scale=1.0, window_left=window_left, out=out,
        kv_layout="NHD",
    )  # fmt: skip
    _seen.add(_shape(q, key_cache, window_left))


def supports_prefill(
    q: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    cu_seqlens_q: torch.Tensor,
    seq_lens: torch.Tensor,
    block_table: torch.Tensor,
    *rest: Any,
) -> str | None:
    if any(scale != 1.0 for scale in rest[5:7]):
        return f"FlashInfer is used without scales of the cache, got {rest[5:7]}"
    if q.shape[-1] not in (64, 128, 256):
        return f"FlashInfer's prefill is used with head sizes 64, 128 and 256, got {q.shape[-1]}"
    reason = _supports(q, key_cache, value_cache)
    if reason is None and torch.cuda.is_current_stream_capturing():
        return "FlashInfer's prefill plans on the host, which a CUDA graph cannot capture"
    return reason


class Plans:
    """A FlashInfer wrapper for one kind of layer, planned for the last batch."""

    def __init__(self, wrapper: Any, layer: dict[str, Any]):
        self.wrapper, self.layer, self.rows = wrapper, layer, 0
        self.batch: tuple[torch.Tensor, ...] = ()
        self.versions: tuple[int, ...] | None = None

    def planned(self, *batch: torch.Tensor) -> tuple[Any, int]:
        """Return the wrapper, and the rows of q without padding, for cu_seqlens_q, seq_lens, block_table.

        A plan is reused for the same tensor objects if they have not been written since. This object keeps references
        to them, so that their ids stay unique. Tensors made in inference mode do not count writes: each call plans.
        """
        versions = None if any(t.is_inference() for t in batch) else tuple(t._version for t in batch)
        same = len(self.batch) == len(batch) and all(a is b for a, b in zip(self.batch, batch, strict=True))
        if versions is None or versions != self.versions or not same:
            self.batch, self.versions = (), None
            self._plan(*batch)
            self.batch, self.versions = batch, versions
        return self.wrapper, self.rows

    def _plan(self, cu_seqlens_q: torch.Tensor, seq_lens: torch.Tensor, block_table: torch.Tensor) -> None:
        size = self.layer["page_size"]
        starts, lengths = torch.stack([cu_seqlens_q[1:], seq_lens]).int().cpu()
        pages = (lengths + size - 1) // size
        used = torch.arange(block_table.shape[1], device=seq_lens.device) < pages.to(seq_lens.device)[:, None]
        pad = torch.nn.functional.pad
        self.wrapper.plan(
            pad(starts, (1, 0)), pad(pages.cumsum(0, dtype=torch.int32), (1, 0)), block_table[used].int(),
            torch.where(lengths > 0, (lengths - 1) % size + 1, 0).int(), causal=True, seq_lens=lengths, **self.layer,
        )  # fmt: skip
        self.rows = int(starts[-1])


class LatentPlans(Plans):
    """The same for latents, where every row of q counts."""

    def _plan(self, cu_seqlens_q: torch.Tensor, seq_lens: torch.Tensor, block_table: torch.Tensor) -> None:
        size = self.layer["page_size"]
        lengths = seq_lens.int().cpu()
        pages = (lengths + size - 1) // size
        used = torch.arange(block_table.shape[1], device=seq_lens.device) < pages.to(seq_lens.device)[:, None]
        indptr = torch.nn.functional.pad(pages.cumsum(0, dtype=torch.int32), (1, 0))
        device = seq_lens.device
        self.wrapper.plan(
            cu_seqlens_q.int(), indptr.to(device), block_table[used].int(), seq_lens.int(), **self.layer
        )
        self.rows = int(cu_seqlens_q[-1])


@cache
def _latent_plans(device: torch.device, **layer: Any) -> LatentPlans:
    from flashinfer.mla import BatchMLAPagedAttentionWrapper

    return LatentPlans(BatchMLAPagedAttentionWrapper(workspace(device, "prefill"), backend="auto"), layer)


def latent_prefill(
    q: torch.Tensor,
    kv_cache: torch.Tensor,
    cu_seqlens_q: torch.Tensor,
    seq_lens: torch.Tensor,
    block_table: torch.Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    scale: float,
    head_size_v: int,
    k_scale: float = 1.0,
) -> torch.Tensor:
    """Run FlashInfer's kernel of latent attention with arguments of mla_prefill.reference."""
    out = torch.zeros(*q.shape[:2], head_size_v, dtype=q.dtype, device=q.device)
    plans = _latent_plans(
        q.device, num_heads=q.shape[1], head_dim_ckv=head_size_v, head_dim_kpe=q.shape[2] - head_size_v,
        page_size=kv_cache.shape[1], causal=True, sm_scale=scale, q_data_type=q.dtype, kv_data_type=kv_cache.dtype,
    )  # fmt: skip
    wrapper, rows = plans.planned(cu_seqlens_q, seq_lens, block_table)
    parts = [
        t[..., start:stop]
        for t in (q[:rows], kv_cache)
        for start, stop in ((0, head_size_v), (head_size_v, None))
    ]
    wrapper.run(*parts, out=out[:rows])
    return out


@cache
def _plans(device: torch.device, **layer: Any) -> Plans:
    from flashinfer.prefill import BatchPrefillWithPagedKVCacheWrapper

    return Plans(BatchPrefillWithPagedKVCacheWrapper(workspace(device, "prefill"), "NHD"), layer)


def prefill(
    q: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    cu_seqlens_q: torch.Tensor,
    seq_lens: torch.Tensor,
    block_table: torch.Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    scale: float,
    window_left: int = -1,
    softcap: float = 0.0,
    k_scale: float = 1.0,
    v_scale: float = 1.0,
    padded: bool = True,
    sinks: None = None,
    alibi_slopes: None = None,
    tree: None = None,
) -> torch.Tensor:
    """Run FlashInfer with arguments of attention_prefill.reference that `supports_prefill` accepts.

    Padding rows are always zeros.
    """
    out = torch.zeros(q.shape, dtype=q.dtype, device=q.device)
    if seq_lens.shape[0] == 0 or q.shape[0] == 0:
        return out
    _, block_size, kv_heads, head_size = key_cache.shape
    plans = _plans(
        q.device, num_qo_heads=q.shape[1], num_kv_heads=kv_heads, head_dim_qk=head_size, page_size=block_size,
        sm_scale=scale, window_left=window_left, logits_soft_cap=softcap, q_data_type=q.dtype,
    )  # fmt: skip
    wrapper, rows = plans.planned(cu_seqlens_q, seq_lens, block_table)
    wrapper.run(q[:rows], (key_cache, value_cache), out=out[:rows])
    return out
