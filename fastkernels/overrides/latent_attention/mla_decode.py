"""Multi-head latent attention of one query per sequence over a paged cache of latents (DeepSeek-V2, arXiv 2405.04434).

The absorbed form: query heads are already multiplied with the up-projection of the keys, and the up-projection of the
values follows. All heads share one key per token, [latent; rotary], whose latent part is also the value.
"""

from __future__ import annotations

from typing import Any

import torch

from fastkernels.core.case import Case
from fastkernels.core.declaration import Scalar, Tensor
from fastkernels.core.dispatch import Provider, define
from fastkernels.core.spec import OpSpec
from fastkernels.overrides.attention import cases, fa3
from fastkernels.overrides.attention.paged_cache import take_blocks
from fastkernels.overrides.kit.softmax import weights_of
from fastkernels.overrides.latent_attention import mla_cases, mla_decode_cuda, mla_fa3, mla_triton
from fastkernels.overrides.latent_attention.mla_cpu import attend_rows


def reference(
    q: torch.Tensor,
    kv_cache: torch.Tensor,
    seq_lens: torch.Tensor,
    block_table: torch.Tensor,
    max_seqlen_k: int,
    scale: float,
    head_size_v: int,
    k_scale: float = 1.0,
) -> torch.Tensor:
    """q: [B, H, R + P], the last token of each sequence; kv_cache: [blocks, block_size, R + P]; seq_lens: [B] int32.

    head_size_v: R, the channels of the latent; the other P are the rotary part. block_table: [B, max_blocks]; entries
    past seq_len are not read. max_seqlen_k: at least the largest seq_len. With a cache of float8_e4m3fn, keys and
    values are the stored ones times k_scale. Returns [B, H, R] in q's dtype; zeros where seq_len is 0.
    """
    mla_cases.check("mla_decode", q, kv_cache, head_size_v)
    acc = torch.promote_types(q.dtype, torch.float32)
    batch, size = q.shape[0], kv_cache.shape[1]
    n_blocks = min(-(-max_seqlen_k // size), block_table.shape[1])
    seen = torch.arange(n_blocks * size, device=q.device) < seq_lens[:, None]  # [B, K]
    blocks = torch.where(seen[:, ::size], block_table[:, :n_blocks], 0).long()
    keys = take_blocks(kv_cache, blocks).view(batch, n_blocks * size, kv_cache.shape[2]).to(acc)
    keys = (
        keys.masked_fill(~seen[:, :, None], 0) * k_scale
    )  # past the end of a sequence the cache may hold NaN
    scores = torch.einsum("bhd,bkd->bhk", q.to(acc), keys) * scale
    weights = weights_of(scores.masked_fill(~seen[:, None], float("-inf")))
    return torch.einsum("bhk,bkr->bhr", weights, keys[..., :head_size_v]).to(q.dtype)


def _triton(
    q: torch.Tensor, kv_cache: torch.Tensor, seq_lens: torch.Tensor, block_table: torch.Tensor, max_seqlen_k: int,
    scale: float, head_size_v: int, k_scale: float = 1.0, splits: int | None = None, out: torch.Tensor | None = None,
) -> torch.Tensor:  # fmt: skip
    mla_cases.check("mla_decode", q, kv_cache, head_size_v)
    out = mla_cases.memory("mla_decode", q, head_size_v, out)
    return mla_triton.attend(
        q, kv_cache, None, seq_lens, block_table, 1, max_seqlen_k, scale, out, k_scale, splits
    )


def _torch(
    q: torch.Tensor, kv_cache: torch.Tensor, seq_lens: torch.Tensor, block_table: torch.Tensor, max_seqlen_k: int,
    scale: float, head_size_v: int, k_scale: float = 1.0,
) -> torch.Tensor:  # fmt: skip
    mla_cases.check("mla_decode", q, kv_cache, head_size_v)
    starts = list(range(len(q) + 1))
    return attend_rows(q, kv_cache, starts, seq_lens.tolist(), block_table, scale, head_size_v, k_scale)


mla_decode = define(
    "mla_decode(Tensor q, Tensor kv_cache, Tensor seq_lens, Tensor block_table, SymInt max_seqlen_k, float scale,"
    " int head_size_v, float k_scale=1.0) -> Tensor",
    fake=lambda q, kv_cache, seq_lens, table, longest, scale, head_size_v, *_: q.new_empty(
        *q.shape[:2], head_size_v
    ),
    providers=(
        Provider("cuda", mla_decode_cuda.decode, supports=mla_decode_cuda.supports, out=True),
        Provider("fa3", mla_fa3.decode, module=fa3.MODULES, supports=mla_fa3.supports, out=True),
        Provider("triton", _triton, supports=mla_triton.supports, out=True),
        Provider("torch", _torch, devices=("cpu",)),
        Provider("reference", reference, devices=("cuda", "cpu")),
    ),
)


def _case(
    name: str, seq_lens: list[int], tag: str, dtype: str = "bfloat16", weight: float = 1, **dims: Any
) -> Case:
    return Case(name, {"seq_lens": seq_lens, **mla_cases.DEEPSEEK, **dims}, dtype, weight, tags=(tag,))


SPEC = OpSpec(
    name="mla_decode",
    level=1,
    reference=reference,
    op=mla_decode,
    cases=(
        _case("decode_1", [4096], "model", weight=61),
        _case("decode_32", [1024] * 32, "model", weight=61),
        _case("tp_8", [4096] * 32, "model", heads=16),
        _case("one", [1], "odd", "float32", heads=1, latent=1, rope=1, block_size=1),
        _case("odd", [5, 17, 131, 1], "odd", **mla_cases.SMALL),
        _case("half", [40, 7], "odd", "float16", heads=5, latent=40, rope=6, block_size=5),
        _case("empty_sequence", [4, 0, 19], "odd", **mla_cases.SMALL),
        _case("two_splits", [600, 63], "odd", "float32", **mla_cases.SMALL),
        _case("graph", [600, 63, 1], "odd", "float32", max_seqlen_k=4096, **mla_cases.SMALL),
        _case("fp8", [5, 17, 600], "odd", "float8_e4m3fn", k_scale=0.5, **mla_cases.SMALL),
    ),
    arguments=(
        Tensor("q", "sequences heads latent+rope", "queries"),
        mla_cases.CACHE,
        cases.SEQ_LENS,
        cases.BLOCK_TABLE,
        Scalar("max_seqlen_k"),
        *mla_cases.SCALARS,
    ),
    outputs=(Tensor("out", "sequences heads latent", "queries"),),
    axes=mla_cases.AXES,
    constraints=("max_seqlen_k >= max(seq_lens)",),
    values=cases.values,
    flops=mla_cases.FLOPS,
    contained="q",
    extremes={**mla_cases.EXTREMES, "one_key": lambda args: args[2].fill_(1)},
    tolerance=cases.TOLERANCE,
    baseline="fa3",
)
