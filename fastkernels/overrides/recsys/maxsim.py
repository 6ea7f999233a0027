"""MaxSim of ColBERT (Khattab and Zaharia, arXiv 2004.12832): s = sum over query tokens of max over document tokens."""

from __future__ import annotations

import random
from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import torch
import triton
import triton.language as tl

from fastkernels.core.case import Case
from fastkernels.core.declaration import Axis, Call, Scalar, Tensor
from fastkernels.core.dispatch import Provider, define
from fastkernels.core.expressions import Expr
from fastkernels.core.shapes import near
from fastkernels.core.spec import OpSpec
from fastkernels.overrides.kit.launch import next_power_of_2
from fastkernels.overrides.kit.overlap import follow, launch_kernel

AT_ONCE = 1 << 24  # products that PyTorch's provider has in memory
MOST_QUERIES = 65535  # along the second axis of a CUDA grid
MOST_DIM = 1024


def reference(
    query: torch.Tensor,
    document: torch.Tensor,
    cu_seqlens_q: torch.Tensor,
    cu_seqlens_d: torch.Tensor,
    max_seqlen_q: int,
    max_seqlen_d: int,
    mask: torch.Tensor | None = None,
) -> torch.Tensor:
    """query: [Tq, D]; document: [Td, D]. Returns the score of each query and document, [queries, documents] float32.

    Queries are concatenated, and so are documents: cu_seqlens_q [queries + 1] and cu_seqlens_d [documents + 1] int32,
    at most max_seqlen_q and max_seqlen_d tokens each. mask: [Td] bool; False hides a document's token. A document
    without a token that is seen has -inf, a query without tokens 0. float64 inputs give float64.
    """
    _check(query, document, cu_seqlens_q, cu_seqlens_d, mask)
    acc = torch.promote_types(query.dtype, torch.float32)
    products = query.to(acc) @ document.to(acc).t()
    if mask is not None:
        products = products.masked_fill(~mask, float("-inf"))
    starts, queries = cu_seqlens_d.tolist(), cu_seqlens_q.tolist()
    lowest = products.new_full((len(query), 1), float("-inf"))
    best = [torch.cat([products[:, a:b], lowest], 1).amax(1) for a, b in pairwise(starts)]
    each = torch.stack(best, 1) if best else products.new_zeros(len(query), 0)
    rows = [each[a:b].sum(0) for a, b in pairwise(queries)]
    return torch.stack(rows) if rows else each.new_zeros(0, len(starts) - 1)


def _check(
    query: torch.Tensor, document: torch.Tensor, cu_seqlens_q: torch.Tensor, cu_seqlens_d: torch.Tensor,
    mask: torch.Tensor | None,
) -> None:  # fmt: skip
    shapes = f"query {tuple(query.shape)}, document {tuple(document.shape)}"
    if query.dim() != 2 or document.dim() != 2 or query.shape[1] != document.shape[1]:
        raise ValueError(f"maxsim: query must be [Tq, D] and document [Td, D], got {shapes}")
    for name, starts in (("cu_seqlens_q", cu_seqlens_q), ("cu_seqlens_d", cu_seqlens_d)):
        if starts.dim() != 1 or not len(starts):
            raise ValueError(f"maxsim: {name} must be [sequences + 1], got {tuple(starts.shape)}")
    if mask is not None and (mask.shape != document.shape[:1] or mask.dtype != torch.bool):
        raise ValueError(
            f"maxsim: mask must be [{len(document)}] of bool, got {tuple(mask.shape)} of {mask.dtype}"
        )


@triton.jit(do_not_specialize=["out_stride"])
def _maxsim_kernel(
    q_ptr, d_ptr, cu_q_ptr, cu_d_ptr, mask_ptr, out_ptr, q_stride, d_stride, D, out_stride,
    MASKED: tl.constexpr, PRECISION: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    # One program per (document, query). A query of BLOCK_M tokens or fewer is read once, a longer one for each block.
    follow(OVERLAP)
    document, query = tl.program_id(0).to(tl.int64), tl.program_id(1).to(tl.int64)
    q_start, d_start = tl.load(cu_q_ptr + query).to(tl.int64), tl.load(cu_d_ptr + document).to(tl.int64)
    n_q = (tl.load(cu_q_ptr + query + 1) - q_start).to(tl.int32)
    n_d = (tl.load(cu_d_ptr + document + 1) - d_start).to(tl.int32)
    dims = tl.arange(0, BLOCK_D)
    total = tl.zeros([BLOCK_M], tl.float32)
    for first in range(0, n_q, BLOCK_M):
        rows = first + tl.arange(0, BLOCK_M)
        q_at = q_ptr + (q_start + rows)[:, None] * q_stride + dims[None, :]
        q = tl.load(q_at, mask=(rows < n_q)[:, None] & (dims < D)[None, :], other=0.0)
        best = tl.full([BLOCK_M], float("-inf"), tl.float32)
        for begin in range(0, n_d, BLOCK_N):
            cols = begin + tl.arange(0, BLOCK_N)
            seen = cols < n_d
            if MASKED:
                seen = seen & (tl.load(mask_ptr + d_start + cols, mask=seen, other=0) != 0)
            d_at = d_ptr + (d_start + cols)[:, None] * d_stride + dims[None, :]
            d = tl.load(d_at, mask=(cols < n_d)[:, None] & (dims < D)[None, :], other=0.0)
            products = tl.dot(q, tl.trans(d), input_precision=PRECISION)
            products = tl.where(seen[None, :], products, float("-inf"))
            # The maximum drops NaN
            broken = tl.max((products != products).to(tl.int32), 1) > 0
            best = tl.where(broken | (best != best), float("nan"), tl.maximum(best, tl.max(products, 1)))
        total += tl.where(rows < n_q, best, 0.0)
    tl.store(out_ptr + query * out_stride + document, tl.sum(total, 0))


def _fake(
    query: torch.Tensor, document: torch.Tensor, cu_seqlens_q: torch.Tensor, cu_seqlens_d: torch.Tensor, *_: Any,
    **__: Any,
) -> torch.Tensor:  # fmt: skip
    shape = cu_seqlens_q.shape[0] - 1, cu_seqlens_d.shape[0] - 1
    dtype = torch.promote_types(query.dtype, torch.float32)
    return torch.empty(shape, dtype=dtype, device=query.device)


def _supports_triton(
    query: torch.Tensor, document: torch.Tensor, cu_seqlens_q: torch.Tensor, *_: Any
) -> str | None:
    floats = (torch.float16, torch.bfloat16, torch.float32)
    if query.dtype not in floats or document.dtype != query.dtype:
        return f"dtypes {query.dtype}, {document.dtype} are not both float16, bfloat16 or float32"
    if query.device.type == "cpu" and query.dtype == torch.bfloat16:
        return "Triton's interpreter multiplies bfloat16 matrices as integers"
    if query.shape[1] > MOST_DIM:
        return f"vectors of {query.shape[1]} are over {MOST_DIM}"
    if len(cu_seqlens_q) - 1 > MOST_QUERIES:
        return f"{len(cu_seqlens_q) - 1} queries are over {MOST_QUERIES}"
    for name, t in (("query", query), ("document", document)):
        if t.stride(-1) != 1:
            return f"{name} has strides {tuple(t.stride())}: the last dimension must be contiguous"
    return None


def _triton(
    query: torch.Tensor, document: torch.Tensor, cu_seqlens_q: torch.Tensor, cu_seqlens_d: torch.Tensor,
    max_seqlen_q: int, max_seqlen_d: int, mask: torch.Tensor | None = None,
) -> torch.Tensor:  # fmt: skip
    _check(query, document, cu_seqlens_q, cu_seqlens_d, mask)
    out = _fake(query, document, cu_seqlens_q, cu_seqlens_d)
    if out.numel() == 0:
        return out
    block_d = max(next_power_of_2(query.shape[1]), 16)
    wide = block_d * query.element_size() > 512
    exact = "ieee" if torch.get_float32_matmul_precision() == "highest" else "tf32"
    launch_kernel(
        _maxsim_kernel, (out.shape[1], out.shape[0]), query, document, cu_seqlens_q, cu_seqlens_d,
        None if mask is None else mask.contiguous().view(torch.uint8), out, query.stride(0), document.stride(0),
        query.shape[1], out.stride(0), MASKED=mask is not None,
        PRECISION=exact if query.dtype == torch.float32 else "tf32",
        BLOCK_M=16 if wide or max_seqlen_q <= 16 else 32 if max_seqlen_q <= 32 else 64, BLOCK_N=16 if wide else 64,
        BLOCK_D=block_d, num_warps=4, num_stages=2,
    )  # fmt: skip
    return out


def _torch(
    query: torch.Tensor, document: torch.Tensor, cu_seqlens_q: torch.Tensor, cu_seqlens_d: torch.Tensor,
    max_seqlen_q: int, max_seqlen_d: int, mask: torch.Tensor | None = None,
) -> torch.Tensor:  # fmt: skip
    """All products of some query tokens at a time. No synchronization: tokens find their sequence on the device."""
    _check(query, document, cu_seqlens_q, cu_seqlens_d, mask)
    out = _fake(query, document, cu_seqlens_q, cu_seqlens_d)
    queries, documents = out.shape
    place = torch.arange(max(len(query), len(document)), device=query.device)
    # Tokens behind the last sequence belong to one more, which is left out.
    of_query = torch.searchsorted(cu_seqlens_q[1:].to(place.dtype), place[: len(query)], right=True)
    of_document = torch.searchsorted(cu_seqlens_d[1:].to(place.dtype), place[: len(document)], right=True)
    turned, total = document.to(out.dtype).t(), out.new_zeros(queries + 1, documents)
    step = max(AT_ONCE // max(len(document), 1), 1)
    for first in range(0, len(query), step):
        part = query[first : first + step].to(out.dtype)
        products = part @ turned
        if mask is not None:
            products = products.masked_fill(~mask, float("-inf"))
        best = products.new_full((len(part), documents + 1), float("-inf"))
        best.scatter_reduce_(1, of_document.expand(len(part), -1), products, "amax")
        total.index_add_(0, of_query[first : first + step], best[:, :documents])
    return total[:queries]


maxsim = define(
    "maxsim(Tensor query, Tensor document, Tensor cu_seqlens_q, Tensor cu_seqlens_d, SymInt max_seqlen_q,"
    " SymInt max_seqlen_d, Tensor? mask=None) -> Tensor",
    fake=_fake,
    providers=(
        Provider("triton", _triton, supports=_supports_triton),
        Provider("torch", _torch, devices=("cuda", "cpu")),
        Provider("reference", reference, devices=("cuda", "cpu")),
    ),
)


def _drawn_lengths(lens: Sequence[int], rng: random.Random) -> tuple[int, ...]:
    """As many sequences, nearly, with about as many tokens in all."""
    count = near(len(lens), rng)
    total, parts = near(sum(lens), rng), [rng.uniform(0.5, 1.0) for _ in range(count)]
    return tuple(max(int(total * part / sum(parts)), 1) for part in parts)


def _lens(name: str) -> Axis:
    """The axis of the sequences' lengths in the tensor of that name."""
    return Axis.per_call(draw=_drawn_lengths, read=lambda a: tuple(getattr(a, name).diff().tolist()))


def _starts(call: Call) -> dict[str, torch.Tensor]:
    """The starts of the sequences, and a mask that hides a tenth of the documents' tokens, but no first one."""
    made: dict[str, torch.Tensor] = {}
    for name, lens in (("cu_seqlens_q", call["q_lens"]), ("cu_seqlens_d", call["d_lens"])):
        made[name] = torch.tensor([0, *lens], device=call.device).cumsum(0).to(torch.int32)
    if call["masked"]:
        seen = call.rand(call["document_tokens"]) >= 0.1
        firsts = made["cu_seqlens_d"][:-1].long()
        seen[firsts[firsts < len(seen)]] = True
        made["mask"] = seen
    return made


def _case(
    name: str, tag: str, q_lens: Sequence[int], d_lens: Sequence[int], dim: int, dtype: str, weight: float = 1,
    **more: Any,
) -> Case:  # fmt: skip
    dims = {"q_lens": tuple(q_lens), "d_lens": tuple(d_lens), "dim": dim, **more}
    return Case(name, dims, dtype, weight, (tag,))


SPEC = OpSpec(
    name="maxsim",
    level=1,
    reference=reference,
    op=maxsim,
    arguments=(
        Tensor("query", "query_tokens dim"),
        Tensor("document", "document_tokens dim"),
        Tensor("cu_seqlens_q", "queries+1", "int32", bytes="0"),
        Tensor("cu_seqlens_d", "documents+1", "int32", bytes="0"),
        Scalar("max_seqlen_q", value="max(q_lens)"),
        Scalar("max_seqlen_d", value="max(d_lens)"),
        Tensor("mask", "document_tokens", "bool", when="masked"),
    ),
    outputs=(Tensor("scores", "queries documents", "float32"),),
    axes={
        "q_lens": _lens("cu_seqlens_q"),
        "d_lens": _lens("cu_seqlens_d"),
        "query_tokens": Axis(Expr("sum(q_lens)"), varies=True),
        "document_tokens": Axis(Expr("sum(d_lens)"), varies=True),
        "queries": Axis(Expr("len(q_lens)"), varies=True),
        "documents": Axis(Expr("len(d_lens)"), varies=True),
        "dim": Axis.width(),
    },
    values=_starts,
    flops="2 * query_tokens * document_tokens * dim",
    cases=(  # ColBERTv2: queries of 32 tokens, documents of at most 180; BGE-M3: vectors of 1,024
        _case("colbert_1000", "model", [32], [180] * 1000, 128, "float16", 16),
        _case("colbert_masked", "model", [32], [180] * 1000, 128, "float16", 4, masked=True),
        _case("colbert_100", "model", [32], [180] * 100, 128, "float16", 4),
        _case("colbert_bf16", "model", [32], [180] * 1000, 128, "bfloat16"),
        _case("bge_m3_100", "model", [24], [512] * 100, 1024, "float16"),
        _case("one", "odd", [1], [1], 1, "float32"),
        _case("odd_63", "odd", [5, 33], [63, 1, 40], 63, "float32"),
        _case("masked", "odd", [32], [17, 9, 70], 128, "float16", masked=True),
        _case("masked_single", "odd", [7], [19, 2], 24, "float32", masked=True),
        _case("long_query", "odd", [70, 3], [20, 5], 16, "float16"),
        _case("wide", "odd", [3], [5, 20], 300, "float32"),
        _case("odd_bf16", "odd", [9, 4], [30, 31], 48, "bfloat16", masked=True),
        _case("many", "odd", [4], [3, 8, 2, 5, 1, 9, 4, 7, 6], 32, "float16"),
    ),
    activations=("query", "document"),
    baseline="torch",
)  # fmt: skip
