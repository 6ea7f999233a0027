"""Attention of atoms to the atoms near them in the sequence: Algorithm 7 of AlphaFold 3's supplement.

Each block of 32 queries attends to 128 consecutive keys. Keys and values are read where they are, and not gathered.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from fastkernels.core.case import Case
from fastkernels.core.declaration import Axis, Call, Scalar, Tensor
from fastkernels.core.dispatch import Provider, define
from fastkernels.core.expressions import Expr
from fastkernels.core.spec import OpSpec
from fastkernels.overrides.kit.launch import next_power_of_2
from fastkernels.overrides.kit.overlap import follow, launch_kernel
from fastkernels.overrides.kit.softmax import weights_of

FLOATS = (torch.float16, torch.bfloat16, torch.float32)
T = torch.Tensor


def reference(q: T, k: T, v: T, bias: T, starts: T, mask: T, scale: float, gate: T | None = None) -> T:
    """q, k, v: [S, A, H, D] of S samples; bias: [W, H, Q, K], of all; starts: [W] int32; mask: [A] bool.

    gate: [S, A, H, D] or None. The queries of block w are atoms w * Q to w * Q + Q - 1, W = ceil(A / Q). Its keys are
    the K atoms from starts[w] on: a key outside of the atoms, or that the mask hides, is not seen, and a query that
    sees none gives zeros. Returns sigmoid(gate) * softmax(scale * q k + bias) v, [S, A, H, D] in q's dtype, computed
    in at least float32.
    """
    _check(q, k, v, bias, starts, mask, gate)
    acc = torch.promote_types(q.dtype, torch.float32)
    (samples, atoms, heads, dim), (blocks, _, n_q, n_k) = q.shape, bias.shape
    places = starts.long()[:, None] + torch.arange(n_k, device=q.device)  # [W, K]
    safe = places.clamp(0, max(atoms - 1, 0))
    seen = (places >= 0) & (places < atoms) & mask[safe]
    queries = q.new_zeros(samples, blocks * n_q, heads, dim)
    queries[:, :atoms] = q
    queries = queries.view(samples, blocks, n_q, heads, dim).to(acc)
    scores = torch.einsum("swqhd,swkhd->swhqk", queries, k[:, safe].to(acc)) * scale + bias.to(acc)
    weights = weights_of(scores.masked_fill(~seen[:, None, None], float("-inf")))
    values = v[:, safe].to(acc).masked_fill(~seen[..., None, None], 0.0)
    found = torch.einsum("swhqk,swkhd->swqhd", weights, values).flatten(1, 2)[:, :atoms]
    return (found if gate is None else found * gate.to(acc).sigmoid()).to(q.dtype)


def _check(q: T, k: T, v: T, bias: T, starts: T, mask: T, gate: T | None) -> None:
    if (
        q.dim() != 4
        or k.shape != q.shape
        or v.shape != q.shape
        or (gate is not None and gate.shape != q.shape)
    ):
        shapes = ", ".join(str(tuple(t.shape)) for t in (q, k, v, gate) if t is not None)
        raise ValueError(f"atom_attention: q, k, v and gate must be [S, A, H, D], got {shapes}")
    if bias.dim() != 4 or bias.shape[:2] != (-(-q.shape[1] // bias.shape[2]), q.shape[2]):
        raise ValueError(
            f"atom_attention: for q {tuple(q.shape)}, bias must be [W, H, Q, K] with W = ceil(A / Q), got"
            f" {tuple(bias.shape)}"
        )
    if starts.shape != bias.shape[:1] or mask.shape != q.shape[1:2] or mask.dtype != torch.bool:
        raise ValueError(
            f"atom_attention: starts must be [W] and mask bool [A], got {tuple(starts.shape)} and {mask.dtype}"
            f" {tuple(mask.shape)}"
        )


@triton.jit(do_not_specialize=["A"])
def _atom_attention_kernel(
    q_ptr, k_ptr, v_ptr, bias_ptr, starts_ptr, mask_ptr, gate_ptr, out_ptr, A, q_stride_s, q_stride_a, q_stride_h,
    k_stride_s, k_stride_a, k_stride_h, v_stride_s, v_stride_a, v_stride_h, gate_stride_s, gate_stride_a,
    gate_stride_h, bias_stride_w, bias_stride_h, bias_stride_q, bias_stride_k, H, D, Q, K, scale,
    HAS_GATE: tl.constexpr, PRECISION: tl.constexpr, BLOCK_Q: tl.constexpr, BLOCK_K: tl.constexpr,
    BLOCK_D: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    # One program per (sample, head, block of queries), with all keys of the block at once.
    follow(OVERLAP)
    LOG2E: tl.constexpr = 1.4426950408889634
    sample, head, window = (
        tl.program_id(0).to(tl.int64),
        tl.program_id(1).to(tl.int64),
        tl.program_id(2).to(tl.int64),
    )
    rows, columns, dims = tl.arange(0, BLOCK_Q), tl.arange(0, BLOCK_K), tl.arange(0, BLOCK_D)
    queries, keys = window * Q + rows, tl.load(starts_ptr + window).to(tl.int64) + columns
    known = (dims < D)[None, :]
    inside = ((rows < Q) & (queries < A))[:, None]
    here = (columns < K) & (keys >= 0) & (keys < A)
    q_at = q_ptr + sample * q_stride_s + head * q_stride_h + queries[:, None] * q_stride_a + dims[None, :]
    q = tl.load(q_at, mask=inside & known, other=0.0)
    k_at = k_ptr + sample * k_stride_s + head * k_stride_h + keys[:, None] * k_stride_a + dims[None, :]
    k = tl.load(k_at, mask=here[:, None] & known, other=0.0)
    bias_at = bias_ptr + window * bias_stride_w + head * bias_stride_h
    bias_at += rows[:, None] * bias_stride_q + columns[None, :] * bias_stride_k
    bias = tl.load(bias_at, mask=inside & here[None, :], other=0.0)
    seen = here & (tl.load(mask_ptr + keys, mask=here, other=0) != 0)
    scores = tl.dot(q, tl.trans(k), input_precision=PRECISION) * (scale * LOG2E) + bias.to(tl.float32) * LOG2E
    scores = tl.where(seen[None, :], scores, float("-inf"))
    top = tl.max(scores, 1)
    p = tl.exp2(scores - tl.where(top == float("-inf"), 0.0, top)[:, None])
    total = tl.sum(p, 1)
    v_at = v_ptr + sample * v_stride_s + head * v_stride_h + keys[:, None] * v_stride_a + dims[None, :]
    v = tl.load(v_at, mask=seen[:, None] & known, other=0.0)
    acc = tl.dot(p.to(v.dtype), v, input_precision=PRECISION) / tl.where(total == 0.0, 1.0, total)[:, None]
    if HAS_GATE:
        gate_at = gate_ptr + sample * gate_stride_s + head * gate_stride_h + queries[:, None] * gate_stride_a
        gate = tl.load(gate_at + dims[None, :], mask=inside & known, other=0.0)
        acc = acc / (1.0 + tl.exp(-gate.to(tl.float32)))
    out_at = out_ptr + ((sample * A + queries[:, None]) * H + head) * D + dims[None, :]
    tl.store(out_at, acc.to(out_ptr.dtype.element_ty), mask=inside & known)


def _supports_triton(
    q: T, k: T, v: T, bias: T, starts: T, mask: T, scale: float, gate: T | None = None
) -> str | None:
    if q.dtype not in FLOATS or {k.dtype, v.dtype, *([] if gate is None else [gate.dtype])} != {q.dtype}:
        return f"dtypes {q.dtype}, {k.dtype}, {v.dtype} are not all float16, all bfloat16 or all float32"
    if q.device.type == "cpu" and q.dtype == torch.bfloat16:
        return "Triton's interpreter multiplies bfloat16 matrices as integers"
    if q.shape[3] > 128 or bias.shape[2] > 64 or bias.shape[3] > 256:
        return (
            f"head size {q.shape[3]}, {bias.shape[2]} queries or {bias.shape[3]} keys are over 128, 64 or 256"
        )
    if max(q.shape[2], bias.shape[0]) > 65535:
        return f"{q.shape[2]} heads or {bias.shape[0]} blocks are too many for a grid"
    for name, t in (("q", q), ("k", k), ("v", v), ("gate", gate)):
        if t is not None and t.stride(-1) != 1:
            return f"{name} has strides {tuple(t.stride())}: the last dimension must be contiguous"
    return None


def _triton(q: T, k: T, v: T, bias: T, starts: T, mask: T, scale: float, gate: T | None = None) -> T:
    _check(q, k, v, bias, starts, mask, gate)
    out = q.new_empty(q.shape)
    if out.numel() == 0:
        return out
    (samples, atoms, heads, dim), (blocks, _, n_q, n_k) = q.shape, bias.shape
    exact = "ieee" if torch.get_float32_matmul_precision() == "highest" else "tf32"
    launch_kernel(
        _atom_attention_kernel, (samples, heads, blocks),
        q, k, v, bias, starts.contiguous(), mask.contiguous(), gate, out, atoms, *q.stride()[:3], *k.stride()[:3],
        *v.stride()[:3], *((0, 0, 0) if gate is None else gate.stride()[:3]), *bias.stride(), heads, dim, n_q, n_k,
        scale, HAS_GATE=gate is not None, PRECISION=exact if q.dtype == torch.float32 else "tf32",
        BLOCK_Q=max(next_power_of_2(n_q), 16), BLOCK_K=max(next_power_of_2(n_k), 16),
        BLOCK_D=max(next_power_of_2(dim), 16), num_warps=4, num_stages=1,
    )  # fmt: skip
    return out


atom_attention = define(
    "atom_attention(Tensor q, Tensor k, Tensor v, Tensor bias, Tensor starts, Tensor mask, float scale,"
    " Tensor? gate=None) -> Tensor",
    fake=lambda q, *args, **kwargs: q.new_empty(q.shape),
    providers=(
        Provider("triton", _triton, supports=_supports_triton),
        Provider("reference", lambda *args: reference(*args).contiguous(), devices=("cuda", "cpu")),
    ),
)


def window_starts(atoms: torch.Tensor, blocks: int, queries: int = 32, keys: int = 128) -> torch.Tensor:
    """[W] int32: the first key of each block for `atoms`, a number in a tensor: around its queries, and never beyond.

    A block at either end has its keys moved inside. With fewer atoms than keys, some places are outside of the atoms.
    """
    first = queries // 2 - keys // 2 + queries * torch.arange(blocks, device=atoms.device)
    return torch.where(first < 0, 0, torch.minimum(first, atoms - keys)).to(torch.int32)


def _starts(call: Call, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    atoms = torch.tensor(call["atoms"], device=call.device)
    return window_starts(atoms, shape[0], call["n_q"], call["n_k"])


def _case(name: str, tag: str, dtype: str = "bfloat16", weight: float = 1, **dims: int | bool) -> Case:
    dims = {"n_q": 32, "n_k": 128, "gated": True, **dims}
    return Case(name, dims, dtype, weight, (tag,))


_OUT = "samples atoms heads head_size"

SPEC = OpSpec(
    name="atom_attention",
    level=2,
    reference=reference,
    op=atom_attention,
    cases=(  # OpenFold3: 5 samples of proteins of 150, 400 and 700 residues with 8 atoms each
        *(
            _case(f"residues_{n}", "model", weight=6, samples=5, atoms=8 * n, heads=4, head_size=32)
            for n in (150, 400, 700)
        ),
        _case("one", "odd", "float32", samples=1, atoms=1, heads=1, head_size=8),
        _case("odd_40", "odd", "float32", samples=2, atoms=40, heads=2, head_size=16, n_q=8, n_k=24),
        _case("few", "odd", "float32", samples=1, atoms=21, heads=2, head_size=12, n_q=8, n_k=32, gated=False),
        _case("odd_33", "odd", "float32", samples=1, atoms=33, heads=1, head_size=20, n_q=16, n_k=40),
        _case("two", "odd", "float16", samples=2, atoms=19, heads=3, head_size=16, n_q=8, n_k=16),
        _case("half", "odd", "float16", samples=3, atoms=70, heads=2, head_size=32),
        _case("odd_bf16", "odd", samples=2, atoms=161, heads=4, head_size=32),
    ),
    arguments=(
        Tensor("q", _OUT),
        Tensor("k", _OUT),
        Tensor("v", _OUT),
        Tensor("bias", "blocks heads n_q n_k"),
        Tensor("starts", "blocks", "int32", values=_starts),
        Tensor("mask", "atoms", "bool", values=lambda call, shape, dtype: call.rand(*shape) < 0.9),
        Scalar("scale"),
        Tensor("gate", _OUT, when="gated"),
    ),
    outputs=(Tensor("out", _OUT),),
    axes={
        "samples": Axis.per_call(),
        "atoms": Axis.per_call(),
        "blocks": Axis(lambda s: -(-s["atoms"] // s["n_q"]), varies=True),
        "heads": Axis.count(),
        "head_size": Axis.width(),
        "n_q": Axis.option(32),
        "n_k": Axis.option(128),
        "scale": Axis(Expr("head_size ** -0.5")),
    },
    constraints=("head_size <= 128",),
    flops="4 * samples * blocks * n_q * n_k * heads * head_size",
    activations=("v",),
)  # fmt: skip
