"""Baselines of this family: PyTorch as vLLM scores late interaction, and libraries of Triton kernels."""

from __future__ import annotations

from typing import Any

import torch

from fastkernels.core.baseline import HALF, Baseline, Function
from fastkernels.overrides.kit.libraries import T, from_torch


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
