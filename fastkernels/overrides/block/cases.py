"""The calls of decoder layers, for their SPECs: a step of one layer, its attention over a paged KV cache included."""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

import torch

from fastkernels.core import assemble
from fastkernels.core.case import Case, Tolerance
from fastkernels.core.forward_context import forward_context
from fastkernels.core.shapes import drawn, varied
from fastkernels.overrides.attention import cases as attention_cases
from fastkernels.overrides.attention.attention import PagedAttention
from fastkernels.overrides.attention.attention import reference as attention_reference
from fastkernels.overrides.block import gated_mlp
from fastkernels.overrides.norm.rms_norm import reference as rms_norm
from fastkernels.overrides.rope import rotary_emb
from fastkernels.overrides.rope.rope_tables import cos_sin_table, inverse_frequencies

# Float32 sums of thousands of products, four of them one after the other; bfloat16 is rounded nine times on the way.
TOLERANCE = {"float32": Tolerance(1e-4, 1e-4), "bfloat16": Tolerance(6e-2, 6e-2)}
MAX_POSITIONS, ROPE_THETA = 8192, 500000.0
NAMES = (  # the arguments of all layers; behind them come those of the MLP
    "positions", "hidden_states", "residual", "input_layernorm", "post_attention_layernorm", "qkv_proj", "o_proj",
    "q_norm", "k_norm", "cos_sin_cache", "eps", "key_cache", "value_cache", "slot_mapping", "cu_seqlens_q", "seq_lens",
    "block_table", "max_seqlen_q", "max_seqlen_k",
)  # fmt: skip
MUTATES = (2, 11, 12)  # residual, key_cache, value_cache


def around(
    x: torch.Tensor,
    residual: torch.Tensor | None,
    norms: tuple[torch.Tensor, torch.Tensor],
    attention: Callable[[torch.Tensor], torch.Tensor],
    mlp: Callable[[torch.Tensor], torch.Tensor],
    eps: float,
) -> tuple[torch.Tensor, torch.Tensor]:
    """norm, attention, norm, MLP, of [T, H]. Returns (hidden states, residual); their sum is the residual stream."""
    residual = torch.zeros_like(x) if residual is None else residual
    h, residual = rms_norm(x, norms[0], eps, residual, None, False)
    h, residual = rms_norm(attention(h), norms[1], eps, residual, None, False)
    assert residual is not None
    return mlp(h), residual


def layer_reference(
    mlp: Callable[[torch.Tensor], torch.Tensor],
    positions: torch.Tensor,
    hidden_states: torch.Tensor,
    residual: torch.Tensor | None,
    input_layernorm: torch.Tensor,
    post_attention_layernorm: torch.Tensor,
    qkv_proj: torch.Tensor,
    o_proj: torch.Tensor,
    q_norm: torch.Tensor | None,
    k_norm: torch.Tensor | None,
    cos_sin_cache: torch.Tensor,
    eps: float,
    *step: Any,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """step: key_cache, value_cache, slot_mapping, cu_seqlens_q, seq_lens, block_table, max_seqlen_q, max_seqlen_k.

    positions: [T]; hidden_states, residual: [T, H]; qkv_proj: [(Hq + 2 Hkv) D, H]; o_proj: [H, Hq D]; q_norm, k_norm:
    [D] or None; cos_sin_cache: [max_positions, D]. Returns (hidden states, residual, new key_cache, new value_cache).
    """
    kv_heads, size = step[0].shape[2:]
    caches: list[torch.Tensor] = []

    def attention(h: torch.Tensor) -> torch.Tensor:
        acc = torch.promote_types(h.dtype, torch.float32)
        qkv = (h.to(acc) @ qkv_proj.to(acc).t()).to(h.dtype)
        q, k, v = qkv.unflatten(-1, (-1, size)).split([o_proj.shape[1] // size, kv_heads, kv_heads], dim=1)
        if q_norm is not None and k_norm is not None:
            q, k = (rms_norm(t, w, eps, None, None, False)[0] for t, w in ((q, q_norm), (k, k_norm)))
        q, k = (
            rotary_emb.reference(positions, t.contiguous(), None, size, cos_sin_cache, True)[0]
            for t in (q, k)
        )
        arguments: tuple[Any, ...] = (q, k, v, *step, size**-0.5)
        out, *new = attention_reference(*arguments)
        caches.extend(new)
        return (out.flatten(1).to(acc) @ o_proj.to(acc).t()).to(h.dtype)

    norms = input_layernorm, post_attention_layernorm
    hidden, stream = around(hidden_states, residual, norms, attention, mlp, eps)
    return hidden, stream, caches[0], caches[1]


def layer_inputs(case: Case, device: str, generator: torch.Generator, head_norms: bool = False) -> list:
    """The arguments NAMES, of a layer in the middle of a model."""
    d, dtype = case.dims, getattr(torch, case.dtype)
    query, positions, step = attention_cases.make_step(case, device, generator)
    tokens, heads, size = query.shape
    hidden = d["hidden"]

    def randn(*shape: int, scale: float = 1.0, mean: float = 0.0) -> torch.Tensor:
        return (mean + scale * torch.randn(shape, generator=generator, device=device)).to(dtype)

    norms = [randn(n, scale=0.1, mean=1.0) if n else None for n in (hidden, hidden, *[size * head_norms] * 2)]
    qkv = randn((heads + 2 * d["kv_heads"]) * size, hidden, scale=1 / math.sqrt(hidden))
    o_proj = randn(hidden, heads * size, scale=1 / math.sqrt(heads * size))
    table = cos_sin_table(inverse_frequencies(ROPE_THETA, size), d.get("max_positions", MAX_POSITIONS))
    table = table.to(device, dtype)
    stream = [randn(tokens, hidden) for _ in range(2)]
    return [positions, *stream, *norms[:2], qkv, o_proj, *norms[2:], table, 1e-5, *step]


def layer_dims(args: Sequence[Any]) -> dict[str, Any]:
    """What layer_inputs reads."""
    given = dict(zip(NAMES, args, strict=False))
    hidden, table = given["hidden_states"], given["cos_sin_cache"]
    heads = given["o_proj"].shape[1] // given["key_cache"].shape[3]
    step = attention_cases.step_dims(heads, hidden.dtype, args[11:19], hidden.shape[0])
    return {"hidden": hidden.shape[1], "max_positions": table.shape[0], **step}


def layer_bytes(case: Case) -> int:
    """Of all but the MLP: weights, stream and residual in and out, cached keys and values."""
    d, size = case.dims, getattr(torch, case.dtype).itemsize
    attention = 2 * (d["heads"] + d["kv_heads"]) * d["head_size"] * d["hidden"]
    tokens, stored = sum(d["q_lens"]), 2 * sum(d["q_lens"]) * d["kv_heads"] * d["head_size"]
    # Queries, keys and values of the step need not leave the chip: keys and values that were cached before are read.
    queries = 4 * size * tokens * d["heads"] * d["head_size"] // 2
    read = attention_cases.bytes_moved(case) - queries - size * stored
    return size * (attention + 2 * d["hidden"] + 4 * tokens * d["hidden"] + stored) + max(read, 0)


def layer_flops(case: Case) -> int:
    """Of all but the MLP."""
    d = case.dims
    projections = 4 * sum(d["q_lens"]) * d["hidden"] * (d["heads"] + d["kv_heads"]) * d["head_size"]
    return projections + attention_cases.flops(case)


def vary_layer(
    case: Case, rng: random.Random, bytes_moved: Any, flops: Any, counts: Sequence[str] = ()
) -> Case:
    """Another step of a layer of other sizes; counts: dims of the MLP beside its width."""

    def draw() -> dict[str, Any]:
        new = drawn(case, rng, counts, ("hidden", "intermediate"))
        if "topk" in new:
            new["topk"] = min(new["topk"], new["experts"])
        step = {**attention_cases.draw_batch(case, rng), "experts_hit": None, "pairs": None}
        size = max(step["head_size"] // 2 * 2, 2)  # the rotary embedding's halves
        return {**new, **step, "head_size": size, "max_positions": max(MAX_POSITIONS, *step["seq_lens"])}

    return varied(case, draw, bytes_moved, flops)


def build_layer(
    cls: type, args: Sequence[Any], mlp: dict[str, torch.Tensor], **config: Any
) -> Callable[[], Any]:
    """SPEC.build for layers whose MLP has these parameters, and whose config has this beside the common parts."""
    given: dict[str, Any] = dict(zip(NAMES, args, strict=False))
    step, hidden, table = args[11:19], given["hidden_states"], given["cos_sin_cache"]
    if not assemble.takes(cls.forward, "residual"):  # type: ignore[attr-defined]
        raise ValueError(
            f"{cls.__name__} carries hidden states and residual as one sum: it cannot return both"
        )
    size, kv_heads = step[0].shape[3], step[0].shape[2]
    settings = SimpleNamespace(
        hidden_size=hidden.shape[1], num_attention_heads=given["o_proj"].shape[1] // size, num_key_value_heads=kv_heads,
        head_dim=size, max_position_embeddings=table.shape[0], rms_norm_eps=given["eps"], hidden_act="silu",
        rope_parameters={"rope_type": "default", "rope_theta": ROPE_THETA}, attention_bias=False, mlp_bias=False,
        sliding_window=None, **config,
    )  # fmt: skip
    common: dict[str, Any] = {"prefix": "model.layers.0"}
    if assemble.takes(cls, "vllm_config"):
        whole = SimpleNamespace(
            model_config=SimpleNamespace(hf_config=settings), cache_config=None, quant_config=None
        )
        layer = assemble.make(cls, hidden, whole, config=settings, **common)
    else:
        layer = assemble.make(cls, hidden, settings, **common)
    attention = [m for m in layer.modules() if isinstance(m, PagedAttention)]
    if not attention:
        raise ValueError(f"{cls.__name__} has no attention layer (PagedAttention) to give a KV cache")
    for module in attention:
        module.kv_cache = step[0], step[1]
    names = ("qkv_proj", "o_proj", "q_norm", "k_norm")
    weights = {f"self_attn.{name}.weight": given[name] for name in names if given[name] is not None}
    norms = {f"{name}.weight": given[name] for name in ("input_layernorm", "post_attention_layernorm")}
    assemble.load(layer, {**weights, **norms, "self_attn.rotary_emb.cos_sin_cache": table, **mlp})
    context = attention_cases.metadata(step)
    batch = {"forward_batch": None} if assemble.takes(cls.forward, "forward_batch") else {}  # type: ignore[attr-defined]

    def call() -> tuple[torch.Tensor, ...]:
        with forward_context(context):
            out = layer(given["positions"], hidden, residual=given["residual"], **batch)
        return (*out, step[0], step[1])

    return call


def step_case(
    name: str, q_lens: list[int], seq_lens: list[int], tag: str, weight: float = 1, **sizes: int
) -> Case:
    """A model's in bfloat16, an odd one in float32."""
    dtype = "bfloat16" if tag == "model" else "float32"
    return Case(
        name, {"q_lens": q_lens, "seq_lens": seq_lens, "block_size": 16, **sizes}, dtype, weight, (tag,)
    )


def layer_cases(model: dict[str, int], small: dict[str, int]) -> tuple[Case, ...]:
    """Steps of a model's layer, and odd ones of a small layer; sizes: hidden, heads, kv_heads, head_size, the MLP's."""
    return (
        step_case("decode_1", [1], [1024], "model", 32, **model),
        step_case("decode_32", [1] * 32, [1024] * 32, "model", 32, **model),
        step_case("prefill_2k", [2048], [2048], "model", **model),
        step_case("one", [1], [1], "odd", **small),
        step_case("prefill_odd", [9, 1, 5], [9, 1, 5], "odd", **small),
        step_case("chunked_odd", [3, 7], [40, 7], "odd", **{**small, "block_size": 5}),
        step_case("decode_odd", [1] * 3, [70, 3, 19], "odd", **small),
        step_case("whole_blocks", [16, 32], [32, 32], "odd", **small),
        step_case("mixed_odd", [1, 1, 13], [65, 2, 13], "odd", **{**small, "kv_heads": small["heads"]}),
        step_case("long_odd", [1, 17], [130, 33], "odd", **small),
    )


def dense_reference(
    positions: torch.Tensor,
    hidden_states: torch.Tensor,
    residual: torch.Tensor | None,
    input_layernorm: torch.Tensor,
    post_attention_layernorm: torch.Tensor,
    qkv_proj: torch.Tensor,
    o_proj: torch.Tensor,
    q_norm: torch.Tensor | None,
    k_norm: torch.Tensor | None,
    cos_sin_cache: torch.Tensor,
    eps: float,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    slot_mapping: torch.Tensor,
    cu_seqlens_q: torch.Tensor,
    seq_lens: torch.Tensor,
    block_table: torch.Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    gate_up_proj: torch.Tensor,
    down_proj: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """gate_up_proj: [2 I, H], the gate's rows first; down_proj: [H, I]; the rest as in layer_reference.

    Returns (hidden states, residual, new key_cache, new value_cache); the first two add up to the residual stream.
    """
    return layer_reference(
        lambda h: gated_mlp.reference(h, gate_up_proj, down_proj), positions, hidden_states, residual, input_layernorm,
        post_attention_layernorm, qkv_proj, o_proj, q_norm, k_norm, cos_sin_cache, eps, key_cache, value_cache,
        slot_mapping, cu_seqlens_q, seq_lens, block_table, max_seqlen_q, max_seqlen_k,
    )  # fmt: skip


def _mlp(case: Case) -> Case:
    """The gated MLP's case."""
    d = case.dims
    dims = {"tokens": sum(d["q_lens"]), "hidden": d["hidden"], "intermediate": d["intermediate"]}
    return Case(case.name, dims, case.dtype)


def dense_inputs(case: Case, device: str, generator: torch.Generator, head_norms: bool = False) -> list:
    common = layer_inputs(case, device, generator, head_norms)
    return [*common, *gated_mlp.SPEC.inputs(_mlp(case), device, generator)[1:]]


def dense_dims(*args: Any) -> dict[str, Any]:
    return {**layer_dims(args), "intermediate": args[-1].shape[1]}


def dense_bytes(case: Case) -> int:
    """With the MLP's weights; its input and output need not leave the chip."""
    weights = 3 * case.dims["hidden"] * case.dims["intermediate"] * getattr(torch, case.dtype).itemsize
    return layer_bytes(case) + weights


def dense_flops(case: Case) -> int:
    return layer_flops(case) + gated_mlp.SPEC.flops(_mlp(case))


def vary_dense(case: Case, rng: random.Random) -> Case:
    return vary_layer(case, rng, dense_bytes, dense_flops)


def build_dense(cls: type, args: list[Any]) -> Callable[[], Any]:
    gate_up, down = args[-2:]
    mlp = {"mlp.gate_up_proj.weight": gate_up, "mlp.down_proj.weight": down}
    return build_layer(cls, args, mlp, intermediate_size=down.shape[1])
