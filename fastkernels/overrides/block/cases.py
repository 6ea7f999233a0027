"""Arguments, axes, values and cases that decoder layers share: one step of a layer over a paged KV cache."""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import torch

from fastkernels.core import assemble
from fastkernels.core.forward_context import forward_context
from fastkernels.core.shapes import drawn, varied
from fastkernels.core.spec import Axis, Call, Case, OpSpec, Scalar, Tensor, Tolerance, fan_in
from fastkernels.overrides.attention import attention
from fastkernels.overrides.attention import cases as attention_cases
from fastkernels.overrides.norm import rms_norm
from fastkernels.overrides.rope import rotary_emb
from fastkernels.overrides.rope.rope_tables import cos_sin_table, inverse_frequencies

# Four sums of thousands of products follow each other in float32; bfloat16 is rounded nine times.
TOLERANCE = {"float32": Tolerance(1e-4, 1e-4), "bfloat16": Tolerance(6e-2, 6e-2)}
MAX_POSITIONS, ROPE_THETA = 8192, 500000.0


def _rope_table(call: Call, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    return cos_sin_table(inverse_frequencies(ROPE_THETA, shape[1]), shape[0]).to(call.device, dtype)


_STREAM = "itemsize(dtype) * attended * hidden"
# New keys and values are written, older ones read. Those of the step need not leave the chip before attention.
_CACHED = "itemsize(dtype) * kv_heads * head_size * max(keys_read, attended)"
# The arguments of all layers; the arguments of their MLP follow.
ARGUMENTS: tuple[Tensor | Scalar, ...] = (
    Tensor("positions", "tokens", "int64", bytes="0"),
    Tensor("hidden_states", "tokens hidden", bytes=_STREAM),
    Tensor("residual", "tokens hidden", mutated=True, bytes=f"2 * {_STREAM}"),
    Tensor("input_layernorm", "hidden", mean=1.0, std=0.1),
    Tensor("post_attention_layernorm", "hidden", mean=1.0, std=0.1),
    Tensor("qkv_proj", "(heads+2*kv_heads)*head_size hidden", values=fan_in),
    Tensor("o_proj", "hidden heads*head_size", values=fan_in),
    Tensor("q_norm", "head_size", when="head_norms", mean=1.0, std=0.1, bytes="0"),
    Tensor("k_norm", "head_size", when="head_norms", mean=1.0, std=0.1, bytes="0"),
    Tensor("cos_sin_cache", "max_positions head_size", values=_rope_table, bytes="0"),
    Scalar("eps", default=1e-5),
    *(replace(cache, mutated=True, bytes=_CACHED) for cache in attention_cases.CACHE),
    *attention_cases.STEP,
)
OUTPUTS = (Tensor("out", "tokens hidden", bytes=_STREAM),)
_NAMES = tuple(argument.name for argument in ARGUMENTS)
_STEP = slice(_NAMES.index("key_cache"), len(_NAMES))


def _padding(args: SimpleNamespace) -> int:
    return len(args.hidden_states) - int(args.cu_seqlens_q[-1])


AXES = {
    **attention_cases.AXES,
    **attention_cases.RAGGED,
    "padding": Axis.option(0, read=_padding),
    "hidden": Axis.width(),
    "intermediate": Axis.width(),
    "max_positions": Axis(MAX_POSITIONS, stated=True),
    "head_norms": Axis(False),
}
FLOPS = f"4 * attended * hidden * (heads + kv_heads) * head_size + {attention_cases.FLOPS}"


def values(call: Call) -> Mapping[str, torch.Tensor]:
    """OpSpec.values: the integers of a step."""
    seq_lens, table = attention_cases.block_tables(call.sizes, call.device, call.generator)
    positions, slots, starts = attention_cases.ragged(call.sizes, table)
    return {
        "positions": positions,
        "slot_mapping": slots,
        "cu_seqlens_q": starts,
        "seq_lens": seq_lens,
        "block_table": table,
    }


def around(
    x: torch.Tensor,
    residual: torch.Tensor | None,
    norms: tuple[torch.Tensor, torch.Tensor],
    attention: Callable[[torch.Tensor], torch.Tensor],
    mlp: Callable[[torch.Tensor], torch.Tensor],
    eps: float,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Apply norm, attention, norm and MLP to x [T, H]. Returns (hidden states, residual), which add up to the residual
    stream."""
    residual = torch.zeros_like(x) if residual is None else residual
    h, residual = rms_norm.reference(x, norms[0], eps, residual, None, False)
    h, residual = rms_norm.reference(attention(h), norms[1], eps, residual, None, False)
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
    """Run a layer with this MLP. step: key_cache, value_cache, slot_mapping, cu_seqlens_q, seq_lens, block_table,
    max_seqlen_q, max_seqlen_k.

    positions: [T]; hidden_states, residual: [T, H]; qkv_proj: [(Hq + 2 Hkv) D, H]; o_proj: [H, Hq D]; q_norm, k_norm:
    [D] or None; cos_sin_cache: [max_positions, D]. Returns (hidden states, residual, new key_cache, new value_cache).
    """
    kv_heads, size = step[0].shape[2:]
    caches: list[torch.Tensor] = []

    def attend(h: torch.Tensor) -> torch.Tensor:
        acc = torch.promote_types(h.dtype, torch.float32)
        qkv = (h.to(acc) @ qkv_proj.to(acc).t()).to(h.dtype)
        q, k, v = qkv.unflatten(-1, (-1, size)).split([o_proj.shape[1] // size, kv_heads, kv_heads], dim=1)
        if q_norm is not None and k_norm is not None:
            q, k = (
                rms_norm.reference(t, w, eps, None, None, False)[0] for t, w in ((q, q_norm), (k, k_norm))
            )
        q, k = (
            rotary_emb.reference(positions, t.contiguous(), None, size, cos_sin_cache, True)[0]
            for t in (q, k)
        )
        arguments: tuple[Any, ...] = (q, k, v, *step, size**-0.5)
        out, *new = attention.reference(*arguments)
        caches.extend(new)
        return (out.flatten(1).to(acc) @ o_proj.to(acc).t()).to(h.dtype)

    norms = input_layernorm, post_attention_layernorm
    hidden, stream = around(hidden_states, residual, norms, attend, mlp, eps)
    return hidden, stream, caches[0], caches[1]


def vary_layer(spec: OpSpec, case: Case, rng: random.Random, counts: Sequence[str] = ()) -> Case:
    """OpSpec.vary: another step of a layer of other sizes. counts: axes of the MLP, without its width."""

    def draw() -> dict[str, Any]:
        new = drawn(case, rng, counts, ("hidden", "intermediate"))
        if "topk" in new:
            new["topk"] = min(new["topk"], new["experts"])
        step = attention_cases.draw_batch(case, rng)
        size = max(step["head_size"] // 2 * 2, 2)  # the rotary embedding halves it
        return {**new, **step, "head_size": size, "max_positions": max(MAX_POSITIONS, *step["seq_lens"])}

    return varied(case, draw, spec.bytes_moved, spec.flops)


def build_layer(
    cls: type, args: Sequence[Any], mlp: dict[str, torch.Tensor], **config: Any
) -> Callable[[], Any]:
    """OpSpec.build of a layer. mlp: parameters of its MLP; config: further fields of its config."""
    given: dict[str, Any] = dict(zip(_NAMES, args, strict=False))
    step, hidden, table = args[_STEP], given["hidden_states"], given["cos_sin_cache"]
    if not assemble.takes(cls.forward, "residual"):  # type: ignore[attr-defined]
        raise ValueError(
            f"{cls.__name__} carries hidden states and residual as one sum and cannot return both"
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
    paged = [m for m in layer.modules() if isinstance(m, attention.PagedAttention)]
    if not paged:
        raise ValueError(f"{cls.__name__} has no attention layer (PagedAttention) to give a KV cache")
    for module in paged:
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
    """Return a case in bfloat16 for a model, in float32 for odd sizes."""
    dtype = "bfloat16" if tag == "model" else "float32"
    return Case(
        name, {"q_lens": q_lens, "seq_lens": seq_lens, "block_size": 16, **sizes}, dtype, weight, (tag,)
    )


def layer_cases(model: dict[str, int], small: dict[str, int]) -> tuple[Case, ...]:
    """Return steps of a model's layer and odd steps of a small one; both name the axes of the layer and its MLP."""
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
