"""Attention without a cache, of all queries to all keys, as in encoders and diffusion models (arXiv 2307.08691)."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
import torch.nn.functional as F
import triton
import triton.language as tl
from torch.nn.attention import SDPBackend, sdpa_kernel

from fastkernels.core.case import Case
from fastkernels.core.declaration import Axis, Call, Scalar, Tensor
from fastkernels.core.dispatch import Provider, define
from fastkernels.core.expressions import Expr
from fastkernels.core.spec import OpSpec
from fastkernels.overrides.attention import cases, fa3
from fastkernels.overrides.dense_attention import attention_dense_cuda, wide_heads
from fastkernels.overrides.kit.launch import cdiv, next_power_of_2
from fastkernels.overrides.kit.overlap import follow, launch_kernel
from fastkernels.overrides.kit.softmax import weights_of

Spans = Iterator[tuple[slice, slice, slice]]


def reference(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    scale: float,
    attn_mask: torch.Tensor | None = None,
    cu_seqlens_q: torch.Tensor | None = None,
    cu_seqlens_k: torch.Tensor | None = None,
    max_seqlen_q: int = 0,
    max_seqlen_k: int = 0,
) -> torch.Tensor:
    """q: [B, Sq, Hq, D]; k, v: [B, Sk, Hkv, D], Hq a multiple of Hkv. Returns [B, Sq, Hq, D] in q's dtype.

    attn_mask: [B or 1, Hq or 1, Sq or 1, Sk], added to the scaled products, or of bool: False hides a key. A query
    that sees no key gives zeros. With cu_seqlens_q and cu_seqlens_k ([sequences + 1] int32) B is 1 and sequences are
    concatenated: queries of one see only its keys, at most max_seqlen_q queries and max_seqlen_k keys each; there is
    no attn_mask then.
    """
    _check(q, k, v, attn_mask, cu_seqlens_q, cu_seqlens_k)
    acc = torch.promote_types(q.dtype, torch.float32)
    out = torch.zeros(q.shape, dtype=q.dtype, device=q.device)
    group = q.shape[2] // k.shape[2]
    for batch, queries, keys in _spans(q, k, cu_seqlens_q, cu_seqlens_k):
        at_q, at_k = (batch, queries), (batch, keys)
        wide_k, wide_v = (t[at_k].to(acc).repeat_interleave(group, dim=2) for t in (k, v))
        scores = torch.einsum("bqhd,bkhd->bhqk", q[at_q].to(acc), wide_k) * scale
        if attn_mask is not None and attn_mask.dtype == torch.bool:
            scores = scores.masked_fill(~attn_mask, float("-inf"))
        elif attn_mask is not None:
            scores = scores + attn_mask.to(acc)
        weights = weights_of(scores)
        out[at_q] = torch.einsum("bhqk,bkhd->bqhd", weights, wide_v).to(q.dtype)
    return out


def _spans(q: torch.Tensor, k: torch.Tensor, cu_q: torch.Tensor | None, cu_k: torch.Tensor | None) -> Spans:
    """Yield the slices of batch, queries and keys that attend to each other."""
    if cu_q is None or cu_k is None:
        if q.numel() and k.shape[1]:
            yield slice(None), slice(None), slice(None)
        return
    starts, key_starts = cu_q.tolist(), cu_k.tolist()
    for i in range(len(starts) - 1):
        queries, keys = slice(starts[i], starts[i + 1]), slice(key_starts[i], key_starts[i + 1])
        if queries.start < queries.stop and keys.start < keys.stop:
            yield slice(None), queries, keys


def _check(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, attn_mask: torch.Tensor | None,
    cu_seqlens_q: torch.Tensor | None, cu_seqlens_k: torch.Tensor | None,
) -> None:  # fmt: skip
    shapes = f"q {tuple(q.shape)}, k {tuple(k.shape)}, v {tuple(v.shape)}"
    if q.dim() != 4 or k.dim() != 4 or k.shape != v.shape or q.shape[0] != k.shape[0]:
        raise ValueError(f"attention_dense: q must be [B, Sq, Hq, D], k and v [B, Sk, Hkv, D], got {shapes}")
    if q.shape[3] != k.shape[3] or q.shape[2] % k.shape[2]:
        raise ValueError(
            f"attention_dense: query heads must be a multiple of key heads, of one size, got {shapes}"
        )
    if (cu_seqlens_q is None) != (cu_seqlens_k is None):
        raise ValueError("attention_dense: give cu_seqlens_q and cu_seqlens_k, or neither")
    if cu_seqlens_q is not None and (attn_mask is not None or q.shape[0] != 1):
        raise ValueError(f"attention_dense: concatenated sequences have B = 1 and no attn_mask, got {shapes}")
    if attn_mask is not None:
        most = (q.shape[0], q.shape[2], q.shape[1], k.shape[1])
        if attn_mask.dim() != 4 or any(n not in (1, m) for n, m in zip(attn_mask.shape, most, strict=True)):
            raise ValueError(
                f"attention_dense: attn_mask must be [B or 1, Hq or 1, Sq or 1, Sk] with {most}, got"
                f" {tuple(attn_mask.shape)}"
            )


@triton.jit(do_not_specialize=["n_q", "n_k"])
def _attention_dense_kernel(
    q_ptr, k_ptr, v_ptr, out_ptr, mask_ptr, cu_q_ptr, cu_k_ptr, n_q, n_k, q_stride_b, q_stride_t, q_stride_h,
    k_stride_b, k_stride_t, k_stride_h, v_stride_b, v_stride_t, v_stride_h, out_stride_b, out_stride_t, out_stride_h,
    mask_stride_b, mask_stride_h, mask_stride_q, mask_stride_k, group, D, scale,
    PACKED: tl.constexpr, MASK: tl.constexpr, PRECISION: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    # One program per (block of queries, query head, batch element or sequence). Scores are in units of log2(e), so that
    # the softmax needs exp2 alone.
    follow(OVERLAP)
    LOG2E: tl.constexpr = 1.4426950408889634
    head, batch = tl.program_id(1), tl.program_id(2).to(tl.int64)
    kv_head = (head // group).to(tl.int64)
    q_at = q_ptr + head.to(tl.int64) * q_stride_h
    out_at = out_ptr + head.to(tl.int64) * out_stride_h
    k_at, v_at = k_ptr + kv_head * k_stride_h, v_ptr + kv_head * v_stride_h
    if PACKED:
        start, key_start = tl.load(cu_q_ptr + batch).to(tl.int64), tl.load(cu_k_ptr + batch).to(tl.int64)
        n_q = (tl.load(cu_q_ptr + batch + 1) - start).to(tl.int32)
        n_k = (tl.load(cu_k_ptr + batch + 1) - key_start).to(tl.int32)
        q_at += start * q_stride_t
        out_at += start * out_stride_t
        k_at += key_start * k_stride_t
        v_at += key_start * v_stride_t
    else:
        q_at += batch * q_stride_b
        out_at += batch * out_stride_b
        k_at += batch * k_stride_b
        v_at += batch * v_stride_b
    first = tl.program_id(0) * BLOCK_M
    if first < n_q:
        rows = first + tl.arange(0, BLOCK_M)
        dims = tl.arange(0, BLOCK_D)
        q_mask = (rows < n_q)[:, None] & (dims < D)[None, :]
        tokens = rows.to(tl.int64)[:, None]
        q = tl.load(q_at + tokens * q_stride_t + dims[None, :], mask=q_mask, other=0.0)
        top = tl.full([BLOCK_M], float("-inf"), tl.float32)
        total = tl.zeros([BLOCK_M], tl.float32)
        acc = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
        for begin in range(0, n_k, BLOCK_N):
            cols = begin + tl.arange(0, BLOCK_N)
            inside = cols < n_k
            kv_mask = inside[:, None] & (dims < D)[None, :]
            keys = cols.to(tl.int64)[:, None]
            k = tl.load(k_at + keys * k_stride_t + dims[None, :], mask=kv_mask, other=0.0)
            scores = tl.dot(q, tl.trans(k), input_precision=PRECISION) * (scale * LOG2E)
            seen = inside[None, :] & (rows < n_q)[:, None]
            if MASK:
                mask_at = mask_ptr + batch * mask_stride_b + head.to(tl.int64) * mask_stride_h
                mask_at += tokens * mask_stride_q + cols.to(tl.int64)[None, :] * mask_stride_k
                if MASK == 1:
                    seen = seen & (tl.load(mask_at, mask=seen, other=0) != 0)
                else:
                    scores += tl.load(mask_at, mask=seen, other=0.0).to(tl.float32) * LOG2E
            scores = tl.where(seen, scores, float("-inf"))
            new_top = tl.maximum(top, tl.max(scores, 1))
            # Before the first key that is seen, -inf - -inf would be NaN
            base = tl.where(new_top == float("-inf"), 0.0, new_top)
            p = tl.exp2(scores - base[:, None])
            decay = tl.exp2(top - base)
            v = tl.load(v_at + keys * v_stride_t + dims[None, :], mask=kv_mask, other=0.0)
            total = total * decay + tl.sum(p, 1)
            acc = acc * decay[:, None] + tl.dot(p.to(v.dtype), v, input_precision=PRECISION)
            top = new_top
        acc = acc / tl.where(total == 0.0, 1.0, total)[:, None]
        tl.store(
            out_at + tokens * out_stride_t + dims[None, :], acc.to(out_ptr.dtype.element_ty), mask=q_mask
        )


MOST_PROGRAMS = 65535  # along the second and third axis of a CUDA grid


def _supports_triton(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float, attn_mask: torch.Tensor | None = None,
    cu_seqlens_q: torch.Tensor | None = None, *_: Any,
) -> str | None:  # fmt: skip
    if (
        q.dtype not in (torch.float16, torch.bfloat16, torch.float32)
        or k.dtype != q.dtype
        or v.dtype != q.dtype
    ):
        return f"dtypes {q.dtype}, {k.dtype}, {v.dtype} are not all float16, all bfloat16 or all float32"
    if q.device.type == "cpu" and q.dtype == torch.bfloat16:
        return "Triton's interpreter multiplies bfloat16 matrices as integers"
    if q.shape[3] > 256:
        return f"head size {q.shape[3]} is over 256"
    batch = q.shape[0] if cu_seqlens_q is None else len(cu_seqlens_q) - 1
    if max(q.shape[2], batch) > MOST_PROGRAMS:
        return f"{q.shape[2]} heads or {batch} sequences are over {MOST_PROGRAMS}"
    for name, t in (("q", q), ("k", k), ("v", v)):
        if t.stride(-1) != 1:
            return f"{name} has strides {tuple(t.stride())}: the last dimension must be contiguous"
    return None


def _triton(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float, attn_mask: torch.Tensor | None = None,
    cu_seqlens_q: torch.Tensor | None = None, cu_seqlens_k: torch.Tensor | None = None, max_seqlen_q: int = 0,
    max_seqlen_k: int = 0,
) -> torch.Tensor:  # fmt: skip
    _check(q, k, v, attn_mask, cu_seqlens_q, cu_seqlens_k)
    out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    packed = cu_seqlens_q is not None
    batch, longest = (len(cu_seqlens_q) - 1, max_seqlen_q) if cu_seqlens_q is not None else q.shape[:2]
    if out.numel() == 0 or batch == 0 or longest == 0:
        return out
    single, block_d = q.dtype == torch.float32, max(next_power_of_2(q.shape[3]), 16)
    block_m = 16 if longest <= 16 else 64 if block_d >= 256 or single else 128
    block_n = 32 if block_d >= 256 or single else 64
    kind, strides = 0, (0, 0, 0, 0)
    if attn_mask is not None:
        wide = attn_mask.expand(q.shape[0], q.shape[2], q.shape[1], k.shape[1])
        kind, strides = (1 if attn_mask.dtype == torch.bool else 2), wide.stride()  # type: ignore[assignment]
    exact = "ieee" if torch.get_float32_matmul_precision() == "highest" else "tf32"
    launch_kernel(
        _attention_dense_kernel, (cdiv(longest, block_m), q.shape[2], batch),
        q, k, v, out, attn_mask, cu_seqlens_q, cu_seqlens_k, q.shape[1], k.shape[1], *q.stride()[:3],
        *k.stride()[:3], *v.stride()[:3], *out.stride()[:3], *strides, q.shape[2] // k.shape[2], q.shape[3], scale,
        PACKED=packed, MASK=kind, PRECISION=exact if single else "tf32", BLOCK_M=block_m, BLOCK_N=block_n,
        BLOCK_D=block_d, num_warps=8 if block_m == 128 else 4, num_stages=2,
    )  # fmt: skip
    return out


def _supports_sdpa(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float, attn_mask: torch.Tensor | None = None,
    cu_seqlens_q: torch.Tensor | None = None, *_: Any,
) -> str | None:  # fmt: skip
    if cu_seqlens_q is not None and q.is_cuda:  # on a CPU one call for each costs no launch
        return "scaled_dot_product_attention takes no concatenated sequences"
    return misaligned(q, k, v) if q.is_cuda else None


def misaligned(*tensors: torch.Tensor) -> str | None:
    """Return why cuDNN, which PyTorch may choose, gives wrong results for these tensors, None if it does not.

    It reads 16 bytes at a time and does not check where a tensor begins (torch 2.11, H200: all values wrong).
    """
    if any(t.element_size() == 2 and t.data_ptr() % 16 for t in tensors):
        return "q, k or v does not begin at a multiple of 16 bytes"
    return None


def _sdpa(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float, attn_mask: torch.Tensor | None = None,
    cu_seqlens_q: torch.Tensor | None = None, cu_seqlens_k: torch.Tensor | None = None, *_: Any,
) -> torch.Tensor:  # fmt: skip
    _check(q, k, v, attn_mask, cu_seqlens_q, cu_seqlens_k)
    if cu_seqlens_q is None:
        return _scaled_dot_product(q, k, v, scale, attn_mask)
    out = torch.zeros(q.shape, dtype=q.dtype, device=q.device)
    for batch, queries, keys in _spans(q, k, cu_seqlens_q, cu_seqlens_k):
        out[batch, queries] = _scaled_dot_product(
            q[batch, queries], k[batch, keys], v[batch, keys], scale, None
        )
    return out


def _scaled_dot_product(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float, attn_mask: torch.Tensor | None
) -> torch.Tensor:
    if attn_mask is not None and attn_mask.dtype != torch.bool:
        attn_mask = attn_mask.to(q.dtype)
    found = F.scaled_dot_product_attention(
        q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2), attn_mask, scale=scale,
        enable_gqa=q.shape[2] != k.shape[2],
    )  # fmt: skip
    return found.transpose(1, 2).contiguous()


def _supports_cudnn(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *rest: Any) -> str | None:
    if q.dtype not in (torch.float16, torch.bfloat16):
        return f"cuDNN's attention takes float16 and bfloat16, not {q.dtype}"
    if q.shape[3] > 128 or q.shape[3] % 8:
        return f"cuDNN's attention takes head sizes that are multiples of 8 up to 128, not {q.shape[3]}"
    return _supports_sdpa(q, k, v, *rest)


def _gemm(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float, *_: Any) -> torch.Tensor:
    _check(q, k, v, None, None, None)
    return wide_heads.attend(q, k, v, scale)


def _cuda(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float, *_: Any) -> torch.Tensor:
    _check(q, k, v, None, None, None)
    return attention_dense_cuda.attend(q, k, v, scale)


def _cudnn(*args: Any) -> torch.Tensor:
    with sdpa_kernel(SDPBackend.CUDNN_ATTENTION):
        return _sdpa(*args)


attention_dense = define(
    "attention_dense(Tensor q, Tensor k, Tensor v, float scale, Tensor? attn_mask=None, Tensor? cu_seqlens_q=None,"
    " Tensor? cu_seqlens_k=None, SymInt max_seqlen_q=0, SymInt max_seqlen_k=0) -> Tensor",
    fake=lambda q, *args, **kwargs: torch.empty(q.shape, dtype=q.dtype, device=q.device),
    providers=(  # then what hosts run
        Provider("gemm", _gemm, supports=wide_heads.supports),
        Provider("cuda", _cuda, supports=attention_dense_cuda.supports),
        Provider("sdpa", _sdpa, devices=("cuda", "cpu"), supports=_supports_sdpa),
        Provider("triton", _triton, supports=_supports_triton),
        Provider("fa3", fa3.attend_dense, module=fa3.MODULES, supports=fa3.supports_dense),
        Provider("cudnn", _cudnn, supports=_supports_cudnn),
        Provider("reference", reference, devices=("cuda", "cpu")),
    ),
)


def attend(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float, attn_mask: torch.Tensor | None = None,
    dropout: float = 0.0, is_causal: bool = False,
) -> torch.Tensor:  # fmt: skip
    """Run attention_dense with the options of F.scaled_dot_product_attention: q [B, Sq, H, D]; k, v [B, Sk, H, D].

    attn_mask broadcasts to [B, H, Sq, Sk]. dropout > 0, in training, runs PyTorch's own. Returns [B, Sq, H * D].
    """
    if dropout > 0.0:
        attention_dense.leave("dropout")
        found = F.scaled_dot_product_attention(
            q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2), attn_mask, dropout, is_causal, scale=scale,
            enable_gqa=q.shape[2] != k.shape[2],
        )  # fmt: skip
        return found.transpose(1, 2).flatten(2)
    if is_causal:
        attn_mask = torch.ones(q.shape[1], k.shape[1], dtype=torch.bool, device=q.device).tril()
    if attn_mask is not None:
        attn_mask = attn_mask[(None,) * (4 - attn_mask.dim())].expand(-1, -1, -1, k.shape[1])
    return attention_dense(q, k, v, scale, attn_mask).flatten(2)


def _mask(call: Call, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    """Return a mask that hides a fifth of the keys, all of them from the first query if each query has its own."""
    hidden = call.rand(*shape) < 0.2
    if shape[2] > 1:
        hidden[:, :, 0] = True
    if dtype == torch.bool:
        return ~hidden
    return call.randn(*shape).masked_fill(hidden, float("-inf")).to(dtype)


def _starts(call: Call) -> dict[str, torch.Tensor]:
    if not call["packed"]:
        return {}
    lengths = (("cu_seqlens_q", call["q_lens"]), ("cu_seqlens_k", call["k_lens"]))
    return {
        name: torch.tensor([0, *lens], device=call.device).cumsum(0).to(torch.int32) for name, lens in lengths
    }


def _case(name: str, tag: str, weight: float = 1, dtype: str = "bfloat16", **dims: Any) -> Case:
    dims.setdefault("kv_heads", dims["heads"])
    return Case(name, dims, dtype, weight, (tag,))


def _packed(name: str, tag: str, q_lens: list[int], k_lens: list[int], dtype: str, **dims: Any) -> Case:
    return _case(name, tag, dtype=dtype, q_lens=q_lens, k_lens=k_lens, packed=True, **dims)


_SMALL: dict[str, Any] = {"heads": 3, "head_size": 16}


def _lens(name: str) -> Any:
    """Make the axis of the sequences' lengths in the tensor of that name."""

    def read(a: Any) -> list[int] | None:
        starts = getattr(a, name)
        return None if starts is None else starts.diff().tolist()

    return Axis.per_call(None, read=read)


def _mask_axes(at: int, size: str, name: str, flag: str) -> dict[str, Axis]:
    """Make the flag of a mask that differs along its dimension `at`, and that dimension, which is `size` or 1."""
    read = Axis(False, read=lambda a: None if a.attn_mask is None else a.attn_mask.shape[at] > 1)
    return {flag: read, name: Axis(lambda s: s[size] if s[flag] else 1)}


_OUT = "batch queries heads head_size"

SPEC = OpSpec(
    name="attention_dense",
    level=1,
    reference=reference,
    op=attention_dense,
    cases=(  # SigLIP-2 so400m on 16 images; DINOv3 ViT-7B; FLUX.1 and SDXL at 1024 px; V-JEPA 2 ViT-L, 64 frames;
        # shifted windows of SwinV2-T on 8 images of 256 px; the decoder of the VAE of FLUX.1 and SDXL
        _case("siglip_16", "model", 27, batch=16, queries=256, keys=256, heads=16, head_size=72),
        _case("dinov3_8", "model", 40, batch=8, queries=261, keys=261, heads=32, head_size=128),
        _case("flux", "model", 57, batch=1, queries=4608, keys=4608, heads=24, head_size=128),
        _case("sdxl_self", "model", 60, batch=2, queries=1024, keys=1024, heads=20, head_size=64),
        _case("sdxl_cross", "model", 60, batch=2, queries=1024, keys=77, heads=20, head_size=64),
        _case("vjepa", "model", 24, batch=1, queries=8192, keys=8192, heads=16, head_size=64),
        _case(
            "swinv2", "model", batch=512, queries=64, keys=64, heads=3, head_size=32, masked=True, mask_batched=True,
            mask_headed=True, mask_queried=True,
        ),
        _case("vae", "model", batch=1, queries=16384, keys=16384, heads=1, head_size=512),
        _case("pool", "odd", dtype="float32", batch=3, queries=1, keys=37, heads=2, head_size=33),
        _case("self_63", "odd", batch=2, queries=63, keys=63, **_SMALL),
        _case("head_72", "odd", dtype="float16", batch=1, queries=19, keys=19, heads=2, head_size=72),
        _case("head_256", "odd", dtype="float32", batch=1, queries=5, keys=70, heads=1, head_size=256),
        _case("cross", "odd", dtype="float16", batch=2, queries=20, keys=77, heads=4, head_size=40, kv_heads=2),
        _case(
            "bias", "odd", dtype="float32", batch=2, queries=49, keys=49, masked=True, mask_headed=True,
            mask_queried=True, **_SMALL,
        ),
        _case("key_mask", "odd", batch=3, queries=9, keys=41, masked=True, mask_batched=True,
              mask_is_bool=True, **_SMALL),
        _case("mask", "odd", dtype="float32", batch=1, queries=17, keys=33, masked=True, mask_queried=True,
              mask_is_bool=True, **_SMALL),
        _packed("packed", "odd", [5, 1, 40], [5, 9, 40], "float32", **_SMALL),
        _packed("packed_empty", "odd", [4, 0, 3], [4, 6, 17], "float16", **_SMALL),
    ),
    arguments=(
        Tensor("q", _OUT),
        Tensor("k", "batch keys kv_heads head_size"),
        Tensor("v", "batch keys kv_heads head_size"),
        Scalar("scale"),
        Tensor(
            "attn_mask", "mask_batch mask_heads mask_queries keys", "mask_dtype",
            when="masked", values=_mask,
        ),
        Tensor("cu_seqlens_q", "sequences+1", "int32", when="packed", bytes="0"),
        Tensor("cu_seqlens_k", "sequences+1", "int32", when="packed", bytes="0"),
        Scalar("max_seqlen_q", value="max(q_lens) if packed else 0"),
        Scalar("max_seqlen_k", value="max(k_lens) if packed else 0"),
    ),
    outputs=(Tensor("out", _OUT),),
    axes={
        "batch": Axis.per_call(lambda s: 1),  # a number would be drawn for concatenated sequences, too
        "queries": Axis.per_call(lambda s: sum(s["q_lens"] or ())),
        "keys": Axis.per_call(lambda s: sum(s["k_lens"] or ())),
        "heads": Axis.count(),
        "kv_heads": Axis.count(),
        "head_size": Axis.width(),
        "scale": Axis(Expr("head_size ** -0.5")),
        "mask_dtype": Axis.dtype(lambda s: "bool" if s["mask_is_bool"] else s["dtype"]),
        "mask_is_bool": Axis(
            False, read=lambda a: None if a.attn_mask is None else a.attn_mask.dtype == torch.bool
        ),
        **_mask_axes(0, "batch", "mask_batch", "mask_batched"),
        **_mask_axes(1, "heads", "mask_heads", "mask_headed"),
        **_mask_axes(2, "queries", "mask_queries", "mask_queried"),
        "q_lens": _lens("cu_seqlens_q"),
        "k_lens": _lens("cu_seqlens_k"),
        "sequences": Axis(lambda s: len(s["q_lens"] or ()), varies=True),
        "pairs": Axis(
            lambda s: sum(a * b for a, b in zip(s["q_lens"], s["k_lens"], strict=True))
            if s["packed"]
            else s["batch"] * s["queries"] * s["keys"],
            varies=True,
        ),
    },
    constraints=("heads % kv_heads == 0", "head_size <= 512"),
    values=_starts,
    flops="4 * pairs * heads * head_size",
    extremes=cases.EXTREMES,
    activations=("v",),  # the result is linear in the values
    contained="q",
    calls=("qk_norm_rope", "rope_nd"),  # FLUX's processor, and layers of timm
    baseline="sdpa",
)  # fmt: skip
