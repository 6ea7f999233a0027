"""Rotary position embedding, in place on query and key (Su et al., arXiv 2104.09864); Llama-3 frequency scaling."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
import triton
import triton.language as tl
from torch import nn

from fastkernels.core.dispatch import Provider, define, functional
from fastkernels.core.spec import Case, OpSpec, Target
from fastkernels.overrides.kit.launch import cdiv, next_power_of_2
from fastkernels.overrides.kit.overlap import follow, launch_kernel
from fastkernels.overrides.rope import rotary_calls as _rotary_calls
from fastkernels.overrides.rope.rope_rounding import host_truncates, truncate
from fastkernels.overrides.rope.rope_tables import Llama3, RopeModule, rotate


def reference(
    positions: torch.Tensor,
    query: torch.Tensor,
    key: torch.Tensor | None,
    head_size: int,
    cos_sin_cache: torch.Tensor,
    is_neox_style: bool,
    cast_cache: bool = True,
    round_products: bool = False,
    truncates: bool = False,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """positions: [T] int64; query, key: [T, heads * head_size] or [T, heads, head_size], key may be None.

    cos_sin_cache: [max_positions, rotary_dim], cosines then sines; channels from rotary_dim on stay as they are.
    is_neox_style: channel j pairs with j + rotary_dim / 2, otherwise 2j with 2j + 1.
    cast_cache: round cosines and sines to the query's dtype (vLLM; SGLang on the CPU).
    round_products: round the two products to it too, not only their sum (SGLang on the CPU).
    truncates: drop a bfloat16 result's low bits instead of rounding it; see host_truncates.
    Returns new (query, key) of the given shapes and dtypes.
    """
    rotary_dim = cos_sin_cache.shape[-1]
    rows = cos_sin_cache.index_select(0, positions.flatten())
    acc = torch.promote_types(query.dtype, torch.float32)
    compute = query.dtype if round_products else acc
    if cast_cache or round_products:
        rows = rows.to(query.dtype)
    cos, sin = rows.to(compute).unsqueeze(-2).chunk(2, dim=-1)

    def rotate(x: torch.Tensor) -> torch.Tensor:
        heads = x.view(positions.numel(), -1, head_size)
        x1, x2 = (t.to(compute) for t in _pairs(heads[..., :rotary_dim], is_neox_style))
        out = torch.empty_like(heads, memory_format=torch.contiguous_format)
        out1, out2 = _pairs(out[..., :rotary_dim], is_neox_style)
        new1, new2 = x1 * cos - x2 * sin, x2 * cos + x1 * sin
        out1.copy_(truncate(new1) if truncates else new1)
        out2.copy_(truncate(new2) if truncates else new2)
        out[..., rotary_dim:] = heads[..., rotary_dim:]
        return out.view(x.shape)

    return rotate(query), None if key is None else rotate(key)


def _pairs(x: torch.Tensor, is_neox_style: bool) -> tuple[torch.Tensor, torch.Tensor]:
    if is_neox_style:
        half = x.shape[-1] // 2
        return x[..., :half], x[..., half:]
    return x[..., ::2], x[..., 1::2]


@triton.jit
def _rotate_heads(
    x_ptr, x_stride_t, x_stride_h, y_ptr, y_stride_t, y_stride_h, token, first_head, n_heads, cos, sin, pair, HALF,
    NEOX: tl.constexpr, ROUND: tl.constexpr, BLOCK_H: tl.constexpr,
):  # fmt: skip
    heads = (first_head + tl.arange(0, BLOCK_H)).to(tl.int64)[:, None]
    mask = (heads < n_heads) & (pair < HALF)[None, :]
    first = pair[None, :] if NEOX else 2 * pair[None, :]
    second = first + HALF if NEOX else first + 1
    row = x_ptr + token * x_stride_t + heads * x_stride_h
    x1 = tl.load(row + first, mask=mask, other=0.0).to(tl.float32)
    x2 = tl.load(row + second, mask=mask, other=0.0).to(tl.float32)
    a, b, c, d = x1 * cos[None, :], x2 * sin[None, :], x2 * cos[None, :], x1 * sin[None, :]
    dtype = x_ptr.dtype.element_ty
    if ROUND:
        a, b = a.to(dtype).to(tl.float32), b.to(dtype).to(tl.float32)
        c, d = c.to(dtype).to(tl.float32), d.to(dtype).to(tl.float32)
    row = y_ptr + token * y_stride_t + heads * y_stride_h
    tl.store(row + first, (a - b).to(dtype), mask=mask)
    tl.store(row + second, (c + d).to(dtype), mask=mask)


@triton.jit
def _rotary_emb_kernel(
    pos_ptr, q_ptr, k_ptr, new_q_ptr, new_k_ptr, cache_ptr, q_stride_t, q_stride_h, k_stride_t, k_stride_h,
    new_q_stride_t, new_q_stride_h, new_k_stride_t, new_k_stride_h, cache_stride, n_q, n_k, q_blocks, HALF,
    NEOX: tl.constexpr, CAST: tl.constexpr, ROUND: tl.constexpr, HAS_KEY: tl.constexpr,
    BLOCK_H: tl.constexpr, BLOCK: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    follow(OVERLAP)
    # One program a (token, block of heads); the blocks of the query's heads come before those of the key's.
    token = tl.program_id(0).to(tl.int64)
    block = tl.program_id(1)
    pair = tl.arange(0, BLOCK)
    row = cache_ptr + tl.load(pos_ptr + token).to(tl.int64) * cache_stride
    cos = tl.load(row + pair, mask=pair < HALF, other=0.0).to(tl.float32)
    sin = tl.load(row + HALF + pair, mask=pair < HALF, other=0.0).to(tl.float32)
    if CAST:
        cos = cos.to(q_ptr.dtype.element_ty).to(tl.float32)
        sin = sin.to(q_ptr.dtype.element_ty).to(tl.float32)
    if block < q_blocks:
        _rotate_heads(
            q_ptr, q_stride_t, q_stride_h, new_q_ptr, new_q_stride_t, new_q_stride_h, token, block * BLOCK_H, n_q,
            cos, sin, pair, HALF, NEOX, ROUND, BLOCK_H,
        )  # fmt: skip
    elif HAS_KEY:
        _rotate_heads(
            k_ptr, k_stride_t, k_stride_h, new_k_ptr, new_k_stride_t, new_k_stride_h, token,
            (block - q_blocks) * BLOCK_H, n_k, cos, sin, pair, HALF, NEOX, ROUND, BLOCK_H,
        )  # fmt: skip


def _supports_triton(
    positions: torch.Tensor, query: torch.Tensor, key: torch.Tensor | None, head_size: int,
    cos_sin_cache: torch.Tensor, *_: bool,
) -> str | None:  # fmt: skip
    if query.dtype not in (torch.float16, torch.bfloat16, torch.float32):
        return f"dtype {query.dtype} is not float16, bfloat16 or float32"
    if not positions.is_contiguous():
        return f"positions has strides {tuple(positions.stride())}, not contiguous"
    if cos_sin_cache.stride(-1) != 1:
        return f"cos_sin_cache has strides {tuple(cos_sin_cache.stride())}: a row must be contiguous"
    for name, t in (("query", query), ("key", key)):
        if t is not None and t.stride(-1) != 1:
            return f"{name} has strides {tuple(t.stride())}: the last dimension must be contiguous"
        if t is not None and t.dtype != query.dtype:
            return f"{name} is {t.dtype}, the query {query.dtype}"
    return None


def _check(positions: torch.Tensor, x: torch.Tensor, head_size: int, cos_sin_cache: torch.Tensor) -> None:
    rotary_dim = cos_sin_cache.shape[-1]
    if rotary_dim > head_size or rotary_dim % 2:
        raise ValueError(
            f"rotary_emb: rotary_dim {rotary_dim} must be even and at most head_size {head_size}"
        )
    if x.numel() != 0 and x.numel() % (positions.numel() * head_size):
        raise ValueError(
            f"rotary_emb: shape {tuple(x.shape)} is not {positions.numel()} tokens (positions) of heads of {head_size}"
        )


def _triton(
    positions: torch.Tensor,
    query: torch.Tensor,
    key: torch.Tensor | None,
    head_size: int,
    cos_sin_cache: torch.Tensor,
    is_neox_style: bool,
    cast_cache: bool = True,
    round_products: bool = False,
    out: tuple[torch.Tensor, torch.Tensor] | None = None,
) -> None:
    _check(positions, query, head_size, cos_sin_cache)
    tokens, half = positions.numel(), cos_sin_cache.shape[-1] // 2
    if out is not None and key is not None and 2 * half < head_size:  # the other channels, too
        query, key = (new.copy_(x) for new, x in zip(out, (query, key), strict=True))
    if tokens == 0 or half == 0:
        return
    q = query.view(tokens, -1, head_size)
    k = q if key is None else key.view(tokens, -1, head_size)
    new_q, new_k = (q, k) if out is None else (new.view(tokens, -1, head_size) for new in out)
    n_q, n_k = q.shape[1], 0 if key is None else k.shape[1]
    block_h = min(next_power_of_2(n_q), 8)
    q_blocks = cdiv(n_q, block_h)
    grid = (tokens, q_blocks + cdiv(n_k, block_h))
    launch_kernel(
        _rotary_emb_kernel, grid,
        positions, q, k, new_q, new_k, cos_sin_cache, *q.stride()[:2], *k.stride()[:2], *new_q.stride()[:2],
        *new_k.stride()[:2], cos_sin_cache.stride(0), n_q, n_k, q_blocks, half, NEOX=is_neox_style, CAST=cast_cache,
        ROUND=round_products, HAS_KEY=key is not None, BLOCK_H=block_h, BLOCK=next_power_of_2(half),
        num_warps=4,
    )  # fmt: skip


def _reference(
    positions: torch.Tensor,
    query: torch.Tensor,
    key: torch.Tensor | None,
    head_size: int,
    cos_sin_cache: torch.Tensor,
    is_neox_style: bool,
    cast_cache: bool = True,
    round_products: bool = False,
) -> None:
    _check(positions, query, head_size, cos_sin_cache)
    truncates = query.dtype == torch.bfloat16 and is_neox_style and not round_products and not query.is_cuda
    flags = (is_neox_style, cast_cache, round_products, truncates and host_truncates())
    new_query, new_key = reference(positions, query, key, head_size, cos_sin_cache, *flags)
    query.copy_(new_query)
    if key is not None and new_key is not None:
        key.copy_(new_key)


rotary_emb = define(
    "rotary_emb(Tensor positions, Tensor(a!) query, Tensor(b!)? key, int head_size, Tensor cos_sin_cache,"
    " bool is_neox_style, bool cast_cache=True, bool round_products=False) -> ()",
    fake=lambda *args, **kwargs: None,
    providers=(
        Provider("triton", _triton, devices=("cuda",), supports=_supports_triton, out=True),
        Provider("reference", _reference, devices=("cuda", "cpu")),
    ),
)


def _new(
    positions: torch.Tensor, query: torch.Tensor, key: torch.Tensor, *_: Any
) -> tuple[torch.Tensor, torch.Tensor]:
    return query.new_empty(query.shape), key.new_empty(key.shape)


def _functional(*args: Any) -> tuple[torch.Tensor, torch.Tensor]:
    new = _new(*args)
    rotary_emb.onto(new, (1, 2), *args)
    return new


# For compiled graphs, where query and key are parts of one tensor: vLLM's setting of inductor would copy such parts
# before an op that changes them, and all of the tensor behind it, two more kernels a layer.
rotary_emb.functional = functional(
    "rotary_emb_functional(Tensor positions, Tensor query, Tensor key, int head_size, Tensor cos_sin_cache,"
    " bool is_neox_style, bool cast_cache=True, bool round_products=False) -> (Tensor, Tensor)",
    _functional,
    fake=_new,
)


class VllmRotaryEmbedding(RopeModule):
    """vllm.model_executor.layers.rotary_embedding.base.RotaryEmbedding: the cache is kept in `dtype`.

    forward: positions [T]; query, key as in `reference`, key may be None. Returns (query, key), changed in place, or
    under torch.compile new ones.
    """

    def __init__(
        self, head_size: int, rotary_dim: int, max_position_embeddings: int, base: float, is_neox_style: bool,
        dtype: torch.dtype, init_cache: bool = True,
    ) -> None:  # fmt: skip
        super().__init__()
        self._setup(head_size, rotary_dim, max_position_embeddings, base, is_neox_style, dtype)
        if init_cache:
            self._make_cache(dtype)

    def forward(
        self, positions: torch.Tensor, query: torch.Tensor, key: torch.Tensor | None = None
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        how = (self.head_size, self.cos_sin_cache, self.is_neox_style, True, False)
        return rotate(rotary_emb, positions, query, key, *how)


class VllmLlama3RotaryEmbedding(Llama3, VllmRotaryEmbedding):
    """vllm.model_executor.layers.rotary_embedding.llama3_rope.Llama3RotaryEmbedding; see VllmRotaryEmbedding."""


class SGLangRotaryEmbedding_0_5_16(RopeModule):
    """sglang.srt.layers.rotary_embedding.base.RotaryEmbedding before 0.5.21: float32 cache on CUDA, else in `dtype`.

    forward: positions [T]; query, key as in `reference`. Returns (query, key), changed in place. With
    fused_set_kv_buffer_arg a live module uses the host's own kernel; standalone that is a ValueError.
    """

    def __init__(
        self, head_size: int, rotary_dim: int, max_position_embeddings: int, base: int, is_neox_style: bool,
        dtype: torch.dtype,
    ) -> None:  # fmt: skip
        super().__init__()
        self._setup(head_size, rotary_dim, max_position_embeddings, base, is_neox_style, dtype)
        self._make_cache(torch.float32 if torch.cuda.is_available() else dtype)

    @staticmethod
    def supports(module: nn.Module) -> str | None:
        """None if our forward serves this module (ours or the host's), else the reason."""
        if getattr(module, "_force_native", False):
            return "rl_on_policy_target asks for the host's own native kernel"
        return None

    def forward(
        self,
        positions: torch.Tensor,
        query: torch.Tensor,
        key: torch.Tensor,
        offsets: torch.Tensor | None = None,
        fused_set_kv_buffer_arg: Any = None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        if fused_set_kv_buffer_arg is not None:
            host = getattr(self, f"forward_{query.device.type}", None)
            if host is None:
                raise ValueError(
                    "fused_set_kv_buffer_arg is not supported: store key and value with store_kvcache"
                )
            rotary_emb.note("fused_set_kv_buffer_arg: the host's own kernel stores key and value too")
            return host(positions, query, key, offsets, fused_set_kv_buffer_arg)
        if offsets is not None:
            positions = positions + offsets
        native = query.device.type == "cpu"  # the host rounds there after every operation
        rotary_emb(
            positions, query, key, self.head_size, self.cos_sin_cache, self.is_neox_style, native, native
        )
        return query, key


class SGLangRotaryEmbedding(SGLangRotaryEmbedding_0_5_16):
    """sglang.srt.layers.rotary_embedding.base.RotaryEmbedding, with the first cached position; see its base."""

    def __init__(
        self, head_size: int, rotary_dim: int, max_position_embeddings: int, base: int, is_neox_style: bool,
        dtype: torch.dtype, position_start: int = 0,
    ) -> None:  # fmt: skip
        nn.Module.__init__(self)
        self._setup(head_size, rotary_dim, max_position_embeddings, base, is_neox_style, dtype)
        self.position_start = position_start
        self._make_cache(torch.float32 if torch.cuda.is_available() else dtype, position_start)


class SGLangLlama3RotaryEmbedding(Llama3, SGLangRotaryEmbedding_0_5_16):
    """sglang.srt.layers.rotary_embedding.rope_variant.Llama3RotaryEmbedding; see SGLangRotaryEmbedding_0_5_16."""


def get_rope(
    head_size: int,
    max_position: int,
    is_neox_style: bool = True,
    rope_parameters: Mapping[str, Any] | None = None,
    dtype: torch.dtype | None = None,
) -> VllmRotaryEmbedding:
    """The module for a Hugging Face config's rope_parameters (rope_theta, rope_type, partial_rotary_factor, ...).

    Raises ValueError for a rope_type other than 'default' and 'llama3', or a parameter that is missing.
    """
    p = dict(rope_parameters or {})
    kind = p.get("rope_type", p.get("type", "default"))
    rotary_dim = int(head_size * p.get("partial_rotary_factor", 1.0))
    args = (head_size, rotary_dim, max_position, float(p.get("rope_theta", 10000.0)), is_neox_style)
    dtype = dtype or torch.get_default_dtype()
    if kind == "default":
        return VllmRotaryEmbedding(*args, dtype)
    if kind != "llama3":
        raise ValueError(f"rope_type {kind!r} is not supported; known: default, llama3")
    names = ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings")
    missing = [n for n in names if n not in p]
    if missing:
        raise ValueError(f"rope_type 'llama3' needs {', '.join(missing)} in rope_parameters")
    return VllmLlama3RotaryEmbedding(*args, dtype, *(p[n] for n in names))


def _odd(name: str, dtype: str = "bfloat16", **dims: Any) -> Case:
    return Case(name, {"heads": 4, "kv_heads": 2, "head_size": 64, **dims}, dtype, tags=("odd",))


_LLAMA = {"heads": 32, "kv_heads": 8, "head_size": 128}
_SGLANG_BASE = "sglang.srt.layers.rotary_embedding.base:RotaryEmbedding"
_SGLANG_LLAMA3 = "sglang.srt.layers.rotary_embedding.rope_variant:Llama3RotaryEmbedding"
_VLLM_ROPE = "vllm.model_executor.layers.rotary_embedding."
SPEC = OpSpec(
    name="rotary_emb",
    level=1,
    reference=reference,
    op=rotary_emb,
    cases=(
        Case("decode_1", {"tokens": 1, **_LLAMA}, weight=32, tags=("model",)),
        Case("decode_32", {"tokens": 32, **_LLAMA}, weight=32, tags=("model",)),
        Case("prefill_8k", {"tokens": 8192, **_LLAMA}, weight=1, tags=("model",)),
        _odd("one", tokens=1, heads=1, kv_heads=1, head_size=2, dtype="float32"),
        _odd("smollm2", tokens=63, heads=9, kv_heads=3),
        _odd(
            "interleaved_partial", tokens=5, heads=3, head_size=80, rotary_dim=34, neox=False, dtype="float32"
        ),
        _odd("neox_partial", tokens=7, heads=5, kv_heads=5, head_size=96, rotary_dim=24),
        _odd("no_key", tokens=3, kv_heads=0, dtype="float16"),
        _odd("float32_cache", tokens=9, cache="float32", cast_cache=False),
        _odd("round_products", tokens=9, round_products=True, packed=False),
    ),
    inputs=_rotary_calls.inputs,
    bytes_moved=_rotary_calls.bytes_moved,
    flops=_rotary_calls.flops,
    dims_of=_rotary_calls.dims_of,
    vary=_rotary_calls.vary,
    extremes=_rotary_calls.EXTREMES,
    activations=(1, 2),
    build=_rotary_calls.build,
    targets=(
        Target("vllm", _VLLM_ROPE + "base:RotaryEmbedding", "VllmRotaryEmbedding", "leaf"),
        Target("vllm", _VLLM_ROPE + "llama3_rope:Llama3RotaryEmbedding", "VllmLlama3RotaryEmbedding", "leaf"),
        Target("sglang", _SGLANG_BASE, "SGLangRotaryEmbedding_0_5_16", "leaf", "<0.5.21"),
        Target("sglang", _SGLANG_BASE, "SGLangRotaryEmbedding", "leaf", ">=0.5.21"),
        Target("sglang", _SGLANG_LLAMA3, "SGLangLlama3RotaryEmbedding", "leaf"),
    ),
    batch_invariant=True,  # elementwise
)
