"""Baselines of this family: PyTorch as vLLM scores late interaction, and libraries of Triton kernels."""

from __future__ import annotations

import warnings
from typing import Any

import torch
import torch.nn.functional as F

from fastkernels.core.baseline import HALF, Baseline, Function, inductor
from fastkernels.overrides.kit.libraries import T, from_torch
from fastkernels.overrides.recsys.graph_propagate import mixed


def _padded(
    query: T, document: T, cu_seqlens_q: T, cu_seqlens_d: T, max_seqlen_q: int, max_seqlen_d: int,
    mask: T | None = None,
) -> T:  # fmt: skip
    """Products of padded batches, as vLLM's scores of pairs and ColBERT's own code compute them."""
    rows, lens = torch.arange(max_seqlen_d, device=document.device), cu_seqlens_d.diff()
    at = (cu_seqlens_d[:-1, None] + rows).clamp_max(len(document) - 1)
    seen = rows < lens[:, None] if mask is None else (rows < lens[:, None]) & mask[at]
    products = torch.einsum("qd,btd->qbt", query.float(), document[at].float())
    best = products.masked_fill(~seen, float("-inf")).amax(-1)  # [Tq, documents]
    places = torch.arange(len(query), device=query.device)
    of = torch.searchsorted(cu_seqlens_q[1:].long(), places, right=True)
    return best.new_zeros(len(cu_seqlens_q) - 1, len(lens)).index_add_(0, of, best)


def _no_mask(*args: Any) -> str | None:
    return "the library takes no mask of packed documents" if len(args) > 6 and args[6] is not None else None


def _late_interaction() -> Function:
    from late_interaction_kernels import maxsim_varlen

    return lambda query, document, cu_q, cu_d, most_q, most_d, mask=None: maxsim_varlen(
        query, document, cu_q, cu_d, most_q, most_d
    )


def _flash() -> Function:
    from flash_maxsim import flash_maxsim_packed

    def score(query: T, document: T, cu_q: T, cu_d: T, most_q: int, most_d: int, mask: T | None = None) -> T:
        return flash_maxsim_packed(query, document, cu_d, most_d)[None]

    return score


def _no_flash(*args: Any) -> str | None:
    if len(args[2]) != 2:
        return f"flash-maxsim takes one query, not {len(args[2]) - 1}"
    if args[0].dtype not in HALF:
        return f"flash-maxsim computes in float16, not {args[0].dtype}"
    return _no_mask(*args)


BASELINES: dict[str, tuple[Baseline, ...]] = {
    "maxsim": (
        *from_torch(_padded),
        Baseline(
            "late_interaction_kernels", "library", _late_interaction, modules=("late_interaction_kernels",),
            refuses=_no_mask,
        ),
        Baseline("flash_maxsim", "library", _flash, modules=("flash_maxsim",), refuses=_no_flash),
    ),
}  # fmt: skip


def _bags(
    indices: T, offsets: T, weight: T, table_starts: T, table_rows: T, per_sample_weights: T | None = None,
    mean: bool = False,
) -> T:  # fmt: skip
    """One F.embedding_bag over the tables behind each other: ids are made rows first, which must be in their tables."""
    features = len(table_starts)
    batch = (len(offsets) - 1) // features
    counts = offsets[::batch].diff() if batch else offsets[:1]
    of = table_starts.repeat_interleave(counts, output_size=len(indices)) if batch else indices
    made = F.embedding_bag(
        indices + of, weight, offsets, mode="mean" if mean else "sum", include_last_offset=True,
        per_sample_weights=None if per_sample_weights is None else per_sample_weights.to(weight.dtype),
    )  # fmt: skip
    return made.view(features, batch, -1).transpose(0, 1).flatten(1)


def _beyond_tables(indices: T, offsets: T, weight: T, table_starts: T, table_rows: T, *_: Any) -> str | None:
    features = len(table_starts)
    batch = (len(offsets) - 1) // features
    if not batch or not len(indices):
        return None
    rows = table_rows.repeat_interleave(offsets[::batch].diff(), output_size=len(indices))
    return "an id is beyond its table" if bool(((indices < 0) | (indices >= rows)).any()) else None


def _cross(x0: T, x: T, v: T, w: T, bias: T) -> T:
    """torchrec's own code of a layer."""
    return x0 * (F.linear(F.linear(x, v), w) + bias) + x


def _cross_experts(x0: T, x: T, h: T, w: T, bias: T) -> T:
    """A full-rank layer as torchrec's; the experts of a mixture in one product, where torchrec's has one for each."""
    inner = F.linear(h[:, 0], w[0]) if len(w) == 1 else torch.einsum("bkr,knr->bn", h, w)
    return x0 * (inner + bias) + x


def _sparse(x: T, crow_indices: T, col_indices: T, values: T, alpha: T | None = None) -> T:
    """Products with a sparse matrix in CSR: cuSPARSE on a GPU, as torch_geometric's spmm has it."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # CSR is in beta state
        graph = torch.sparse_csr_tensor(crow_indices, col_indices, values.to(x.dtype), (len(x), len(x)))
    return graph @ x if alpha is None else mixed(lambda now: graph @ now, x, alpha)


def _beyond_nodes(x: T, crow_indices: T, col_indices: T, *_: Any) -> str | None:
    there = (col_indices >= 0) & (col_indices < len(x))
    return None if bool(there.all()) else "an edge is from a node that does not exist"


def _scattered(x: T, crow_indices: T, col_indices: T, values: T, alpha: T | None = None) -> T:
    """Gather, multiply, scatter: LGConv's code on a list of edges, in float32: layers in half precision lose digits."""
    nodes, acc = torch.arange(len(x), device=x.device), torch.promote_types(x.dtype, torch.float32)
    target = nodes.repeat_interleave(crow_indices.diff(), output_size=len(col_indices))
    x, weight, dtype = x.to(acc), values[:, None].to(acc), x.dtype

    def step(now: T) -> T:
        return torch.zeros_like(now).index_add_(0, target, now[col_indices] * weight)

    return (step(x) if alpha is None else mixed(step, x, alpha)).to(dtype)


def _best(users: T, items: T, k: int, seen_starts: T | None = None, seen: T | None = None) -> tuple[T, T]:
    """All scores, those of seen items overwritten by -inf, and torch.topk."""
    if users.dtype == torch.float32:
        scores = users @ items.t()
    elif users.is_cuda:
        scores = torch.mm(users, items.t(), out_dtype=torch.float32)
    else:
        scores = users.float() @ items.float().t()
    if seen is not None and seen_starts is not None:
        of = torch.arange(len(users), device=users.device)
        of = of.repeat_interleave(seen_starts.diff(), output_size=len(seen))
        scores[of, seen] = scores.new_full((), float("-inf"))  # a Python number cannot be captured in a graph
    best, ids = scores.topk(k, 1)
    return best, ids.masked_fill(best == float("-inf"), -1)


BASELINES |= {
    "embedding_bag": from_torch(_bags, faults=_beyond_tables),
    "cross_low_rank": (*from_torch(_cross), inductor("cross_low_rank")),
    "cross_layer": (*from_torch(_cross_experts), inductor("cross_layer")),
    "graph_propagate": (
        *from_torch(_scattered, faults=_beyond_nodes),
        Baseline("cusparse", "library", lambda: _sparse, faults=_beyond_nodes),
    ),
    "top_k_scores": from_torch(_best),
}
