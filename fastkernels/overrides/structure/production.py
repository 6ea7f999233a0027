"""Baselines of this family: OpenFold3's code in PyTorch, the same compiled, and its own Triton kernel of attention."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F

from fastkernels.core.baseline import Baseline, inductor
from fastkernels.overrides.kit.libraries import T, from_torch
from fastkernels.overrides.structure import outer_product_mean as outer
from fastkernels.overrides.structure import swiglu_transition as transition
from fastkernels.overrides.structure import triangle_multiplication as triangle


def _attention(
    q: T, k: T, v: T, bias: T, scale: float, mask: T | None = None, gate: T | None = None
) -> T:  # fmt: skip
    """Scores with all biases added, in memory, as OpenFold3 runs it without a kernel."""
    scores = torch.einsum("biqhd,bikhd->bihqk", q * scale, k) + bias[:, None]
    if mask is not None:
        scores = scores + (mask[:, :, None, None].to(q.dtype) - 1) * min(1e9, torch.finfo(q.dtype).max / 4)
    found = torch.einsum("bihqk,bikhd->biqhd", scores.softmax(-1), v)
    if mask is not None:
        found = found.masked_fill(~mask.any(-1)[:, :, None, None, None], 0.0)
    return found if gate is None else found * gate.sigmoid()


def _evoformer() -> Any:
    """OpenFold3's Triton kernel, which it runs by default for triangle attention; the gate follows."""
    from openfold3.core.kernels.triton.evoformer import TritonEvoformer

    def run(
        q: T, k: T, v: T, bias: T, scale: float, mask: T | None = None, gate: T | None = None
    ) -> T:  # fmt: skip
        batch, rows, keys = q.shape[0], q.shape[1], k.shape[2]
        seen = q.new_zeros(batch, rows, 1, 1, keys)
        if mask is not None:
            seen = (mask.expand(batch, rows, keys).to(q.dtype) - 1)[:, :, None, None] * 1e9
        found = TritonEvoformer(q, k, v, seen, bias[:, None], True)
        return found if gate is None else found * gate.sigmoid()

    return run


def _not_for_evoformer(q: T, k: T, v: T, bias: T, scale: float, *rest: Any) -> str | None:
    if q.shape[2] != k.shape[2] or q.shape[2] <= 16:
        return (
            f"OpenFold3's kernel takes as many keys as queries, above 16, not {k.shape[2]} and {q.shape[2]}"
        )
    if abs(scale - q.shape[-1] ** -0.5) > 1e-6:
        return f"OpenFold3's kernel scales by {q.shape[-1] ** -0.5:.4f}, not {scale:.4f}"
    return None


def _normed(x: T, gate: T, shift: T, y: T | None = None, y_gate: T | None = None, eps: float = 1e-5) -> Any:
    h = x.clone() if y is None or y_gate is None else x + y_gate.sigmoid() * y
    return h, gate.sigmoid() * F.layer_norm(h, h.shape[-1:], None, None, eps) + shift


def _local(
    q: T, k: T, v: T, bias: T, starts: T, mask: T, scale: float, gate: T | None = None
) -> T:  # fmt: skip
    """Keys and values gathered for each block, as OpenFold3 has them."""
    (samples, atoms, heads, dim), (blocks, _, n_q, n_k) = q.shape, bias.shape
    places = starts.long()[:, None] + torch.arange(n_k, device=q.device)
    safe = places.clamp(0, atoms - 1)
    seen = (places >= 0) & (places < atoms) & mask[safe]
    queries = F.pad(q, (0, 0, 0, 0, 0, blocks * n_q - atoms)).view(samples, blocks, n_q, heads, dim)
    scores = torch.einsum("swqhd,swkhd->swhqk", queries * scale, k[:, safe]) + bias
    scores = scores.masked_fill(~seen[:, None, None], torch.finfo(q.dtype).min)
    weights = scores.softmax(-1).masked_fill(~seen.any(-1)[:, None, None, None], 0.0)
    found = torch.einsum("swhqk,swkhd->swqhd", weights, v[:, safe]).flatten(1, 2)[:, :atoms]
    return found if gate is None else found * gate.sigmoid()


BASELINES: dict[str, tuple[Baseline, ...]] = {
    "attention_pair_bias": (
        *from_torch(_attention),
        Baseline(
            "openfold3", "host", _evoformer, modules=("openfold3.core.kernels.triton.evoformer",),
            refuses=_not_for_evoformer,
        ),
        inductor("attention_pair_bias"),
    ),
    "triangle_multiplication": (*from_torch(triangle.by_torch), inductor("triangle_multiplication")),
    "swiglu_transition": (*from_torch(transition.by_torch), inductor("swiglu_transition")),
    "conditioned_layer_norm": (*from_torch(_normed), inductor("conditioned_layer_norm")),
    "atom_attention": (*from_torch(_local), inductor("atom_attention")),
    "outer_product_mean": from_torch(outer.by_gemm),
}  # fmt: skip
