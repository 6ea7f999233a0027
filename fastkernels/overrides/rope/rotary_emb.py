"""Rotary position embedding, in place on query and key (Su et al., arXiv 2104.09864); Llama-3 frequency scaling."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import triton
import triton.language as tl

from fastkernels.core import assemble
from fastkernels.core.case import Case
from fastkernels.core.declaration import Axis, Call, Scalar, Tensor
from fastkernels.core.dispatch import Provider, define, functional
from fastkernels.core.expressions import Expr
from fastkernels.core.forward_context import once_per_step
from fastkernels.core.shapes import near
from fastkernels.core.spec import OpSpec
from fastkernels.overrides.kit.launch import cdiv, next_power_of_2
from fastkernels.overrides.kit.overlap import follow, launch_kernel
from fastkernels.overrides.rope import cases, rotary_emb_cpp
from fastkernels.overrides.rope.rope_rounding import host_truncates, truncate


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
    cast_cache: round cosines and sines to the query's dtype (as vLLM, and SGLang on the CPU).
    round_products: also round the two products, not only their sum (as SGLang on the CPU).
    truncates: truncate a bfloat16 result instead of rounding it; see host_truncates.
    Returns new (query, key) of the given shapes and dtypes.
    """
    new = [x.clone(memory_format=torch.contiguous_format) for x in (query, key) if x is not None]
    _rotate(positions, new, head_size, cos_sin_cache, is_neox_style, cast_cache, round_products, truncates)
    return new[0], None if key is None else new[1]


def _rotate(
    positions: torch.Tensor, tensors: list[torch.Tensor], head_size: int, cos_sin_cache: torch.Tensor,
    is_neox_style: bool, cast_cache: bool, round_products: bool, truncates: bool,
) -> None:  # fmt: skip
    """Rotate tensors of one dtype in place; see reference."""
    dtype = tensors[0].dtype
    compute = dtype if round_products else torch.promote_types(dtype, torch.float32)
    rows = cos_sin_cache.index_select(0, positions.flatten())
    if cast_cache or round_products:
        rows = rows.to(dtype)
    cos, sin = rows.to(compute).unsqueeze(-2).chunk(2, dim=-1)
    for x in tensors:
        heads = x.view(positions.numel(), -1, head_size)[..., : rows.shape[-1]]
        x1, x2 = _pairs(heads.to(compute), is_neox_style)
        new1, new2 = x1 * cos - x2 * sin, x2 * cos + x1 * sin
        out1, out2 = _pairs(heads, is_neox_style)
        out1.copy_(truncate(new1) if truncates else new1)
        out2.copy_(truncate(new2) if truncates else new2)


def _rotate_at_once(
    positions: torch.Tensor, query: torch.Tensor, key: torch.Tensor, head_size: int, cos_sin_cache: torch.Tensor,
    cast_cache: bool, truncates: bool,
) -> None:  # fmt: skip
    """Do what _rotate does with is_neox_style and without round_products, in fewer steps, for decode steps on a CPU."""
    compute, rotary_dim = torch.promote_types(query.dtype, torch.float32), cos_sin_cache.shape[-1]
    cos, sin = once_per_step(
        _cos_sin, positions, cos_sin_cache, query.dtype if cast_cache else compute, compute
    )
    q, k = (x.view(positions.numel(), -1, head_size)[..., :rotary_dim] for x in (query, key))
    x1, x2 = torch.cat((q, k), dim=1).to(compute).chunk(2, dim=-1)
    new = torch.cat((x1 * cos - x2 * sin, x2 * cos + x1 * sin), dim=-1)
    new_q, new_k = (truncate(new) if truncates else new).split((q.shape[1], k.shape[1]), dim=1)
    q.copy_(new_q)
    k.copy_(new_k)


def _cos_sin(
    positions: torch.Tensor, cos_sin_cache: torch.Tensor, rounded: torch.dtype, compute: torch.dtype
) -> tuple[torch.Tensor, ...]:
    """The cosines and the sines of each token, [T, 1, rotary_dim / 2] in `compute`, rounded to `rounded`."""
    rows = cos_sin_cache.index_select(0, positions.flatten()).to(rounded)
    return rows.to(compute).unsqueeze(-2).chunk(2, dim=-1)


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
    # One program per (token, block of heads): first the blocks of the query's heads, then the key's.
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


def check(positions: torch.Tensor, x: torch.Tensor, head_size: int, cos_sin_cache: torch.Tensor) -> None:
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
    check(positions, query, head_size, cos_sin_cache)
    tokens, half = positions.numel(), cos_sin_cache.shape[-1] // 2
    if (
        out is not None and key is not None and 2 * half < head_size
    ):  # including the channels that do not rotate
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
        num_warps=4, enable_fp_fusion=not round_products,  # a fused bfloat16 multiply-add rounds no product
    )  # fmt: skip


def rotate_in_place(
    positions: torch.Tensor,
    query: torch.Tensor,
    key: torch.Tensor | None,
    head_size: int,
    cos_sin_cache: torch.Tensor,
    is_neox_style: bool,
    cast_cache: bool = True,
    round_products: bool = False,
) -> None:
    check(positions, query, head_size, cos_sin_cache)
    truncates = query.dtype == torch.bfloat16 and is_neox_style and not round_products and not query.is_cuda
    truncates = truncates and host_truncates()
    if is_neox_style and not round_products and key is not None and key.dtype == query.dtype:
        _rotate_at_once(positions, query, key, head_size, cos_sin_cache, cast_cache, truncates)
        return
    flags = (is_neox_style, cast_cache, round_products, truncates)
    _rotate(positions, [query] if key is None else [query, key], head_size, cos_sin_cache, *flags)


def _rotate_cpp(
    positions: torch.Tensor,
    query: torch.Tensor,
    key: torch.Tensor | None,
    head_size: int,
    cos_sin_cache: torch.Tensor,
    is_neox_style: bool,
    cast_cache: bool = True,
    round_products: bool = False,
) -> None:
    if key is None or rotary_emb_cpp.unsupported(query, key, is_neox_style, round_products):
        args = (positions, query, key, head_size, cos_sin_cache, is_neox_style, cast_cache, round_products)
        rotate_in_place(*args)
        return
    check(positions, query, head_size, cos_sin_cache)
    rounded = query.dtype if cast_cache else torch.float32
    cosines, sines, truncates = once_per_step(_step_tables, positions, cos_sin_cache, rounded)
    tokens = positions.numel()
    q, k = query.view(tokens, -1, head_size), key.view(tokens, -1, head_size)
    rotary_emb_cpp.rotate(q, k, cosines, sines, query.dtype == torch.bfloat16 and truncates)


def _step_tables(
    positions: torch.Tensor, cos_sin_cache: torch.Tensor, rounded: torch.dtype
) -> tuple[torch.Tensor, torch.Tensor, bool]:
    """The cosines, the sines and host_truncates(), which takes 20 us where vLLM is not loaded."""
    cosines, sines = _cos_sin(positions, cos_sin_cache, rounded, torch.float32)
    return cosines, sines, host_truncates()


def _same_tokens(
    positions: torch.Tensor, query: torch.Tensor, key: torch.Tensor | None, *_: Any, **__: Any
) -> None:
    """Tell torch.compile that all have the same number of tokens, which it takes from the arithmetic of a host.

    Otherwise a graph has a symbolic size for each until Inductor finds them equal. vLLM then loads the graph from its
    cache with fewer inputs than the code takes that it compiled before.
    """
    for x in (query, key):
        if positions.dim() != 1 or x is None or not isinstance(x.shape[0], torch.SymInt):
            continue
        if not any(isinstance(size, torch.SymInt) for size in x.shape[1:]):
            torch._check(positions.shape[0] == x.shape[0])


rotary_emb = define(
    "rotary_emb(Tensor positions, Tensor(a!) query, Tensor(b!)? key, int head_size, Tensor cos_sin_cache,"
    " bool is_neox_style, bool cast_cache=True, bool round_products=False) -> ()",
    fake=_same_tokens,
    providers=(
        Provider("triton", _triton, devices=("cuda",), supports=_supports_triton, out=True),
        Provider("cpp", _rotate_cpp, devices=("cpu",), missing=rotary_emb_cpp.missing),
        Provider("reference", rotate_in_place, devices=("cuda", "cpu")),
    ),
)


def _new(
    positions: torch.Tensor, query: torch.Tensor, key: torch.Tensor, *_: Any
) -> tuple[torch.Tensor, torch.Tensor]:
    return query.new_empty(query.shape), key.new_empty(key.shape)


def _fake(
    positions: torch.Tensor, query: torch.Tensor, key: torch.Tensor, *_: Any
) -> tuple[torch.Tensor, torch.Tensor]:
    _same_tokens(positions, query, key)
    return _new(positions, query, key)


def _functional(*args: Any) -> tuple[torch.Tensor, torch.Tensor]:
    new = _new(*args)
    rotary_emb.onto(new, (1, 2), *args)
    return new


# For compiled graphs, in which query and key are slices of one tensor. With vLLM's settings Inductor would copy them
# before an op that mutates them, and the whole tensor after it: two more kernels in each layer.
rotary_emb.functional = functional(
    "rotary_emb_functional(Tensor positions, Tensor query, Tensor key, int head_size, Tensor cos_sin_cache,"
    " bool is_neox_style, bool cast_cache=True, bool round_products=False) -> (Tensor, Tensor)",
    _functional,
    fake=_fake,
)


def _values(call: Call) -> dict[str, torch.Tensor]:
    """Slice query and key from one packed tensor, as models do, unless the case is not packed."""
    heads, kv_heads, size = call["heads"], call["kv_heads"], call["head_size"]
    qkv = call.normal((call["tokens"], (heads + 2 * kv_heads) * size), getattr(torch, call["dtype"]))
    found = {"query": qkv[:, : heads * size]}
    if kv_heads:
        found["key"] = qkv[:, heads * size : -kv_heads * size]
    if not call["packed"]:
        found = {name: t.clone() for name, t in found.items()}
    return {name: t.unflatten(-1, (-1, size)) for name, t in found.items()} if call["by_head"] else found


def _rounding(name: str, device: str) -> tuple[bool, bool]:
    """(cast_cache, round_products) of a class: on the CPU, PyTorch code of the hosts rounds after every operation."""
    cpu = device == "cpu"
    if "DeepseekScaling" in name:
        return cpu and name.startswith("SGLang"), cpu
    if "LongRoPE" in name:
        return True, True
    if "MRotary" in name or "ApplyRotary" in name:
        return True, cpu
    return (cpu, cpu) if name.startswith("SGLang") else (True, False)


def _build(cls: type, args: list[Any]) -> Callable[[], Any]:
    if assemble.takes(cls.forward, "cos"):  # type: ignore[attr-defined]
        raise ValueError(f"{cls.__name__} takes the cosines and sines of tokens, not a table")
    positions, query, key, head_size, table, neox, cast_cache, round_products = assemble.filled(
        args, 8, True, False
    )
    casts, rounds = _rounding(cls.__name__, query.device.type)
    exact = query.dtype == torch.float32  # rounding products changes nothing
    if (casts != cast_cache and table.dtype != query.dtype) or (rounds != round_products and not exact):
        raise ValueError(
            f"{cls.__name__} has cast_cache={casts}, round_products={rounds} on {query.device.type}, not"
            f" {cast_cache}, {round_products}"
        )
    if "DynamicNTK" in cls.__name__ and table.shape[1] == 2:
        raise ValueError(f"{cls.__name__} needs a rotary_dim above 2")
    given = {
        "head_size": head_size, "rotary_dim": table.shape[1], "max_position_embeddings": table.shape[0],
        "base": 10000, "is_neox_style": neox, "dtype": query.dtype,
        # unused, since the table is given
        "scaling_factor": 2.0, "scaling_factors": 2.0, "scaling_alpha": 2.0, "max_trained_positions": table.shape[0],
        "low_freq_factor": 1.0, "high_freq_factor": 4.0, "orig_max_position": 64,
        "original_max_position_embeddings": table.shape[0], "short_factor": [1.0] * (table.shape[1] // 2),
        "long_factor": [1.0] * (table.shape[1] // 2),
    }  # fmt: skip
    module = assemble.make(cls, table, **{name: given[name] for name in given if assemble.takes(cls, name)})
    names = [name for name in ("cos_sin_cache", "long_short_cos_sin_cache") if hasattr(module, name)]
    if not names:
        raise ValueError(f"{cls.__name__} has no cos_sin_cache")
    setattr(module, names[0], table)
    return partial(module, positions, query, key)


def _first(args: list[Any]) -> None:
    args[0].zero_()


def _last(args: list[Any]) -> None:
    args[0].fill_(args[4].shape[0] - 1)


def _odd(name: str, dtype: str = "bfloat16", **dims: Any) -> Case:
    return Case(name, {"heads": 4, "kv_heads": 2, "head_size": 64, **dims}, dtype, tags=("odd",))


_LLAMA = {"heads": 32, "kv_heads": 8, "head_size": 128}
SPEC = OpSpec(
    name="rotary_emb",
    level=1,
    by_default=True,
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
    arguments=(
        Tensor("positions", "tokens", "positions", values=cases.random_positions),
        Tensor(
            "query",
            {"by_head": "tokens heads head_size", "": "tokens heads*head_size"},
            mutated=True,
            bytes="2 * tokens * heads * rotary_dim * itemsize(dtype)",
        ),
        Tensor(
            "key",
            {"by_head": "tokens kv_heads head_size", "": "tokens kv_heads*head_size"},
            when="kv_heads > 0",
            mutated=True,
            bytes="2 * tokens * kv_heads * rotary_dim * itemsize(dtype)",
        ),
        Scalar("head_size"),
        Tensor(
            "cos_sin_cache", "max_positions rotary_dim", "cache", values=cases.table, bytes=cases.TABLE_BYTES
        ),
        Scalar("is_neox_style", "neox"),
        Scalar("cast_cache", default=True, stated=True),
        Scalar("round_products", default=False),
    ),
    axes={
        **cases.AXES,
        "kv_heads": Axis.count(
            read=lambda a: 0 if a.key is None else None, draw=lambda n, rng: near(n, rng) if n else 0
        ),
        "cache": Axis.dtype(Expr("dtype")),
        "by_head": Axis.option(False),
        # query and key are slices of one packed tensor
        "packed": Axis.option(
            True, stated=True, read=lambda a: a.query.stride(0) != a.query.shape[1:].numel()
        ),
    },
    constraints=cases.CONSTRAINTS,
    values=_values,
    flops="3 * tokens * (heads + kv_heads) * rotary_dim",
    extremes={"first_position": _first, "last_position": _last},
    activations=("query", "key"),
    build=_build,
    batch_invariant=True,  # elementwise
)
