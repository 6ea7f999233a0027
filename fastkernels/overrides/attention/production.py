"""Baselines of attention: the kernels that production runs, called with the ops' arguments."""

from __future__ import annotations

import importlib
from functools import cache
from typing import Any

import torch

from fastkernels.core.baseline import Baseline, Function, aligned, dense, filled, first, inductor, same
from fastkernels.overrides.attention import attention_decode, attention_prefill, fa3, flashinfer
from fastkernels.overrides.attention.paged_cache import dtype_of, no_alibi, no_sinks
from fastkernels.overrides.kit.libraries import (
    T,
    from_flashinfer,
    from_sgl_kernel,
    from_vllm,
    vllm_ops,
)


def _vllm_merge_state() -> Function:
    c = vllm_ops()

    def merge_state(
        prefix: T, prefix_lse: T, suffix: T, suffix_lse: T, output: T, output_lse: T | None = None,
        tokens_with_context: int | None = None, output_scale: T | None = None,
    ) -> None:  # fmt: skip
        lse = None if output_lse is None else output_lse.t()  # vLLM's are [heads, tokens]
        c.merge_attn_states(
            output, lse, prefix, prefix_lse.t(), suffix, suffix_lse.t(), tokens_with_context, output_scale
        )

    return merge_state


def _vllm_no_merge(
    prefix: T, prefix_lse: T, suffix: T, suffix_lse: T, output: T, output_lse: T | None = None,
    tokens_with_context: int | None = None, output_scale: T | None = None,
) -> str | None:  # fmt: skip
    turned = [t.t() for t in (prefix_lse, suffix_lse, output_lse) if t is not None]
    kept = same(prefix, suffix, None if output_scale is not None else output)
    return first(kept, dense(prefix, suffix, output, *turned), filled(prefix), aligned(prefix))


@cache
def decode_starts(batch: int, device: torch.device) -> T:
    """Return the query starts of a decode, which vLLM makes once per step for all layers."""
    return torch.arange(batch + 1, dtype=torch.int32, device=device)


def _fa3_decode() -> Function:
    prefill = _fa3_prefill()

    def attention_decode(
        q: T, key_cache: T, value_cache: T, seq_lens: T, block_table: T, longest: int, *rest: Any
    ) -> T:
        starts = decode_starts(q.shape[0], q.device)
        return prefill(q, key_cache, value_cache, starts, seq_lens, block_table, 1, longest, *rest)

    return attention_decode


def _fa3_prefill() -> Function:
    from vllm.vllm_flash_attn import flash_attn_varlen_func

    def attention_prefill(
        q: T, key_cache: T, value_cache: T, cu_seqlens_q: T, seq_lens: T, block_table: T, max_seqlen_q: int,
        max_seqlen_k: int, scale: float, window_left: int = -1, softcap: float = 0.0, *rest: Any,
    ) -> T:  # fmt: skip
        sinks = next((t for t in rest if isinstance(t, T)), None)
        return flash_attn_varlen_func(
            q, key_cache, value_cache, max_seqlen_q, cu_seqlens_q, max_seqlen_k, seqused_k=seq_lens,
            softmax_scale=scale, causal=True, window_size=[window_left, 0 if window_left >= 0 else -1],
            softcap=softcap, block_table=block_table, out=torch.empty(q.shape, dtype=dtype_of(q), device=q.device),
            fa_version=3, **({} if sinks is None else {"s_aux": sinks}),
        )  # fmt: skip

    return attention_prefill


def _no_fa3_decode(
    q: T, key_cache: T, value_cache: T, seq_lens: T, table: T, longest: int, *rest: Any
) -> str | None:
    if any(scale != 1.0 for scale in rest[3:5]):
        return f"FlashAttention-3 is used without scales of the cache, got {rest[3:5]}"
    if isinstance(rest[-1], T):  # sinks: `supports` would load the library without vLLM, and `make` once more
        importlib.import_module(_FA3[0])
    return fa3.supports(q, key_cache, value_cache, *rest) or filled(q)


def _no_fa3_prefill(
    q: T, key_cache: T, value_cache: T, cu_seqlens_q: T, seq_lens: T, table: T, max_q: int, *rest: Any
) -> str | None:
    if q.shape[0] != int(cu_seqlens_q[-1]):
        return "FlashAttention-3 does not write padding rows"
    return _no_fa3_decode(q, key_cache, value_cache, seq_lens, table, *rest)


_FA3 = ("vllm.vllm_flash_attn",)


def _sglang_merge_state() -> Function:
    from sgl_kernel import merge_state_v2

    def merge_state(
        prefix: T, prefix_lse: T, suffix: T, suffix_lse: T, output: T, lse: T | None = None, *_: Any
    ) -> None:
        merge_state_v2(prefix, prefix_lse, suffix, suffix_lse, output, lse)

    return merge_state


def _sglang_no_merge(
    prefix: T, prefix_lse: T, suffix: T, suffix_lse: T, output: T, lse: T | None = None, context: int | None = None,
    output_scale: T | None = None,
) -> str | None:  # fmt: skip
    if context is not None or output_scale is not None:
        return "SGLang's kernel merges all tokens and has no scale"
    sums = [t for t in (prefix_lse, suffix_lse, lse) if t is not None]
    return first(
        same(prefix, suffix, output), dense(prefix, suffix, output, *sums), filled(prefix), aligned(prefix)
    )


def _decode() -> Function:
    from flashinfer.decode import xqa_batch_decode_with_kv_cache as xqa

    def attention_decode(
        q: T, key_cache: T, value_cache: T, seq_lens: T, block_table: T, longest: int, scale: float,
        window_left: int = -1, *_: Any,
    ) -> T:  # fmt: skip
        return xqa(
            q, (key_cache, value_cache), flashinfer.workspace(q.device, "decode"), block_table, seq_lens, longest,
            bmm1_scale=scale, bmm2_scale=1.0, window_left=window_left,
            out=torch.empty(q.shape, dtype=q.dtype, device=q.device), kv_layout="NHD",
        )  # fmt: skip

    return attention_decode


def _no_decode(q: T, key_cache: T, value_cache: T, seq_lens: T, block_table: T, *rest: Any) -> str | None:
    empty = "does not write rows without keys" if bool((seq_lens == 0).any()) else None
    refused = flashinfer.supports_decode(q, key_cache, value_cache, seq_lens, block_table, *rest)
    return first(refused, dense(q, seq_lens, block_table), filled(q), empty)


def _flash_grad() -> Function:
    """FlashAttention-2's backward pass as PyTorch has it, behind the forward pass that it needs."""
    forward = torch.ops.aten._flash_attention_forward.default
    backward = torch.ops.aten._flash_attention_backward.default

    def grad(q: T, k: T, v: T, dout: T, scale: float, window_left: int = -1) -> tuple[T, T, T]:
        batch = [t.unsqueeze(0) for t in (q, k, v)]
        sizes, chunk = (None, None, len(q), len(k), 0.0, True), len(q)
        more = {"scale": scale, "window_size_left": window_left, "window_size_right": 0}
        out, lse, seed, unused, _ = forward(*batch, *sizes, False, **more)
        dq, dk, dv = backward(dout.unsqueeze(0), *batch, out, lse, *sizes, seed, unused, **more)
        return dq[0], dk[0, -chunk:], dv[0, -chunk:]

    return grad


def _no_flash_grad(q: T, k: T, v: T, dout: T, *_: Any) -> str | None:
    if q.dtype not in (torch.float16, torch.bfloat16) or not q.is_cuda:
        return f"q is {q.dtype} on {q.device.type}, not float16 or bfloat16 on a GPU"
    return f"{q.shape[-1]} channels are no multiple of 8" if q.shape[-1] % 8 else dense(q, k, v, dout)


BASELINES: dict[str, tuple[Baseline, ...]] = {
    "attention_grad": (Baseline("torch-flash", "library", _flash_grad, refuses=_no_flash_grad, graph=False),),
    "attention_decode": (
        Baseline("fa3", "host", _fa3_decode, _FA3, refuses=no_alibi(_no_fa3_decode, attention_decode.ALIBI)),
        from_flashinfer(_decode, no_alibi(no_sinks(_no_decode), attention_decode.ALIBI)),
    ),
    "attention_prefill": (
        Baseline(
            "fa3", "host", _fa3_prefill, _FA3, refuses=no_alibi(_no_fa3_prefill, attention_prefill.ALIBI)
        ),
        from_flashinfer(
            lambda: flashinfer.prefill,
            no_alibi(no_sinks(flashinfer.supports_prefill), attention_prefill.ALIBI),
            graph=False,
        ),
    ),
    "merge_state": (
        from_vllm(_vllm_merge_state, _vllm_no_merge),
        from_sgl_kernel(_sglang_merge_state, _sglang_no_merge),
        inductor("merge_state"),
    ),
}
