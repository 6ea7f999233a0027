"""Causal multi-head latent attention of several queries per sequence over a paged cache of latents; see mla_decode."""

from __future__ import annotations

import random
from typing import Any

import torch

from fastkernels.core.case import Case
from fastkernels.core.declaration import Scalar, Tensor
from fastkernels.core.dispatch import Provider, define
from fastkernels.core.shapes import varied
from fastkernels.core.spec import OpSpec
from fastkernels.overrides.attention import cases
from fastkernels.overrides.attention.paged_cache import take_blocks
from fastkernels.overrides.kit.softmax import weights_of
from fastkernels.overrides.latent_attention import mla_cases, mla_triton
from fastkernels.overrides.latent_attention.mla_cpu import attend_rows


def reference(
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
    """q: [T, H, R + P]; kv_cache: [blocks, block_size, R + P]; cu_seqlens_q: [B + 1] and seq_lens: [B] int32.

    A sequence's queries are its last tokens: query i of n sees keys 0 .. seq_len - n + i. The rest as in mla_decode.
    Returns [T, H, R] in q's dtype; a query without keys, or past cu_seqlens_q[B] (padding), gives zeros.
    """
    mla_cases.check("mla_prefill", q, kv_cache, head_size_v)
    acc = torch.promote_types(q.dtype, torch.float32)
    out = torch.zeros(*q.shape[:2], head_size_v, dtype=q.dtype, device=q.device)
    starts = cu_seqlens_q.tolist()
    for i, n_keys in enumerate(seq_lens.tolist()):
        n = starts[i + 1] - starts[i]
        if n == 0 or n_keys == 0:
            continue
        rows, blocks = (
            slice(starts[i], starts[i + 1]),
            block_table[i, : -(-n_keys // kv_cache.shape[1])].long(),
        )
        keys = take_blocks(kv_cache, blocks).flatten(0, 1)[:n_keys].to(acc) * k_scale
        scores = torch.einsum("nhd,kd->hnk", q[rows].to(acc), keys) * scale
        last = torch.arange(n_keys - n, n_keys, device=q.device)[:, None]
        seen = torch.arange(n_keys, device=q.device)[None, :] <= last
        weights = weights_of(scores.masked_fill(~seen, float("-inf")))
        out[rows] = torch.einsum("hnk,kr->nhr", weights, keys[:, :head_size_v]).to(q.dtype)
    return out


def _triton(
    q: torch.Tensor, kv_cache: torch.Tensor, cu_seqlens_q: torch.Tensor, seq_lens: torch.Tensor,
    block_table: torch.Tensor, max_seqlen_q: int, max_seqlen_k: int, scale: float, head_size_v: int,
    k_scale: float = 1.0, out: torch.Tensor | None = None,
) -> torch.Tensor:  # fmt: skip
    mla_cases.check("mla_prefill", q, kv_cache, head_size_v)
    out = mla_cases.memory("mla_prefill", q, head_size_v, out).zero_()  # for padding
    return mla_triton.attend(
        q, kv_cache, cu_seqlens_q, seq_lens, block_table, max_seqlen_q, max_seqlen_k, scale, out, k_scale
    )


def _torch(
    q: torch.Tensor, kv_cache: torch.Tensor, cu_seqlens_q: torch.Tensor, seq_lens: torch.Tensor,
    block_table: torch.Tensor, max_seqlen_q: int, max_seqlen_k: int, scale: float, head_size_v: int,
    k_scale: float = 1.0,
) -> torch.Tensor:  # fmt: skip
    mla_cases.check("mla_prefill", q, kv_cache, head_size_v)
    starts, lens = cu_seqlens_q.tolist(), seq_lens.tolist()
    return attend_rows(q, kv_cache, starts, lens, block_table, scale, head_size_v, k_scale)


mla_prefill = define(
    "mla_prefill(Tensor q, Tensor kv_cache, Tensor cu_seqlens_q, Tensor seq_lens, Tensor block_table,"
    " SymInt max_seqlen_q, SymInt max_seqlen_k, float scale, int head_size_v, float k_scale=1.0) -> Tensor",
    fake=lambda q, kv_cache, cu, seq_lens, table, n, k, scale, head_size_v, *_: q.new_empty(
        *q.shape[:2], head_size_v
    ),
    providers=(
        Provider("triton", _triton, supports=mla_triton.supports, out=True),
        Provider("torch", _torch, devices=("cpu",)),
        Provider("reference", reference, devices=("cuda", "cpu")),
    ),
)


def _case(
    name: str, q_lens: list[int], seq_lens: list[int], tag: str, dtype: str = "bfloat16", **dims: Any
) -> Case:
    given = {"q_lens": q_lens, "seq_lens": seq_lens, **mla_cases.DEEPSEEK, **dims}
    return Case(name, given, dtype, tags=(tag,))


def _vary(case: Case, rng: random.Random) -> Case:
    return varied(case, lambda: mla_cases.draw_batch(case, rng), SPEC.bytes_moved, SPEC.flops)


_ATTENDED = "attended * heads * ({}) * itemsize(queries)"
SPEC = OpSpec(
    name="mla_prefill",
    level=1,
    reference=reference,
    op=mla_prefill,
    cases=(
        _case("prefill_2k", [2048], [2048], "model", heads=16),
        _case("chunked", [512, 256], [4096, 1024], "model", heads=16),
        _case("one", [1], [1], "odd", "float32", heads=1, latent=1, rope=1, block_size=1),
        _case("odd", [5, 1, 9], [5, 17, 31], "odd", **mla_cases.SMALL),
        _case("half", [3, 7], [40, 7], "odd", "float16", heads=5, latent=40, rope=6, block_size=5),
        _case("padding", [5, 1], [5, 17], "odd", "float32", padding=3, **mla_cases.SMALL),
        _case("empty_sequence", [4, 0, 2], [4, 0, 19], "odd", "float32", **mla_cases.SMALL),
        _case("long", [2, 70], [130, 70], "odd", "float32", **mla_cases.SMALL),
        _case("fp8", [5, 1, 9], [5, 17, 70], "odd", "float8_e4m3fn", k_scale=0.5, **mla_cases.SMALL),
    ),
    arguments=(
        Tensor("q", "tokens heads latent+rope", "queries", bytes=_ATTENDED.format("latent + rope")),
        mla_cases.CACHE,
        Tensor("cu_seqlens_q", "sequences+1", "int32", bytes="0"),
        cases.SEQ_LENS,
        cases.BLOCK_TABLE,
        Scalar("max_seqlen_q"),
        Scalar("max_seqlen_k"),
        *mla_cases.SCALARS,
    ),
    outputs=(Tensor("out", "tokens heads latent", "queries", bytes=_ATTENDED.format("latent")),),
    axes={**mla_cases.AXES, **cases.RAGGED},
    values=cases.values,
    flops=mla_cases.FLOPS,
    vary=_vary,
    contained="q",
    extremes={**mla_cases.EXTREMES, "nothing_cached": lambda args: args[3].copy_(args[2].diff())},
    tolerance=cases.TOLERANCE,
)
