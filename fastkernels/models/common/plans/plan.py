"""The plan of a model: its modules with op, sizes and checkpoint names, and what a token costs. No tensor is made."""

from __future__ import annotations

import reprlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from fnmatch import fnmatchcase
from math import prod
from pathlib import Path
from typing import Any

from fastkernels.models.common.checkpoints import quantization
from fastkernels.models.common.checkpoints.quantization import Quantization
from fastkernels.models.common.configs import checks
from fastkernels.models.common.descriptions import activations, registry
from fastkernels.models.common.descriptions.architecture import Architecture
from fastkernels.models.common.descriptions.description import (
    NAMES,
    Attention,
    Cross,
    Decoder,
    Experts,
    GatedDelta,
    Indexer,
    InnerMlp,
    KimiDelta,
    LatentAttention,
    Layer,
    LayerInput,
    LinearAttention,
    Mamba,
    Mamba2,
    Mixer,
    Mlp,
    NoMixer,
    Norm,
    ParallelExperts,
    Recurrent,
    Rwkv7,
    ShortConv,
)

SIZES = {"float32": 4, "float16": 2, "bfloat16": 2, "float64": 8}
MXFP4_BITS = 4 + 8 / 32  # a scale for 32 values
NORMS = {
    "rms": "rms_norm",
    "unit": "rms_norm",
    "gemma": "gemma_rms_norm",
    "layer": "layer_norm",
    "layer_1p": "layer_norm",
}


@dataclass(frozen=True)
class Item:
    """One module.

    path       its name in our model; keys: the tensors of a checkpoint that it is made of
    op         the op that runs; arguments: what it is built with
    shapes     {parameter: shape} of the whole model
    layout     how ranks share the parameters: 'columns', 'rows', 'heads', 'vocabulary', 'inner', or '' (each has all)
    read       parameters that one token reads, if not all (experts, embeddings)
    flops      operations for one token, without those that depend on the context
    quantized  bytes of the parameters of a quantized layer
    """

    path: str
    op: str
    arguments: Mapping[str, Any] = field(default_factory=dict)
    shapes: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    layout: str = ""
    keys: tuple[str, ...] = ()
    read: int | None = None
    flops: int = 0
    quantized: int | None = None

    @property
    def parameters(self) -> int:
        return sum(prod(shape) for shape in self.shapes.values())

    def weight_bytes(self, dtype: str) -> int:
        return self.parameters * SIZES[dtype] if self.quantized is None else self.quantized

    def read_bytes(self, dtype: str) -> int:
        """Bytes that one token reads."""
        if self.quantized is not None and self.read is not None:
            return self.quantized * self.read // self.parameters
        return self.weight_bytes(dtype) if self.read is None else self.read * SIZES[dtype]

    def __str__(self) -> str:
        given = ", ".join(f"{k}={v!r}" for k, v in self.arguments.items())
        sizes = " ".join(f"{k}{list(v)}" for k, v in self.shapes.items())
        return "  ".join(part for part in (self.path, f"{self.op}({given})", sizes, self.layout) if part)


@dataclass(frozen=True)
class Plan:
    """All modules of a model in the order in which they run; `str(plan)` has one line for each.

    tied: the head's weight is the embedding's and counts once. mlp_state: numbers that MLPs keep of a sequence.
    """

    architecture: str
    category: str
    dtype: str
    items: tuple[Item, ...]
    attentions: tuple[Mixer, ...]
    tied: bool
    mlp_state: int = 0

    @property
    def parameters(self) -> int:
        return sum(item.parameters for item in self.items)

    @property
    def weight_bytes(self) -> int:
        return sum(item.weight_bytes(self.dtype) for item in self.items)

    @property
    def read_bytes(self) -> int:
        """Bytes of parameters that a step with one token reads."""
        return sum(item.read_bytes(self.dtype) for item in self.items)

    @property
    def kv_bytes_per_token(self) -> int:
        """Bytes of keys and values of one token in all layers, while every window holds it."""
        return sum(a.kv_channels for a in self.attentions) * SIZES[self.dtype]

    @property
    def state_bytes(self) -> int:
        """Bytes of the states of a sequence in all layers: those of recurrences are in float32."""
        own = [a for a in self.attentions if isinstance(a, Recurrent)]
        others = self.mlp_state + sum(a.conv_channels * (a.kernel - 1) for a in own)
        return sum(4 * prod(a.state) for a in own) + SIZES[self.dtype] * others

    def kv_bytes(self, context: int) -> int:
        """Bytes of keys and values that the next token of a sequence reads: windows and sparse attention bound them."""
        return sum(a.kv_read(context) for a in self.attentions) * SIZES[self.dtype]

    def flops(self, tokens: int, context: int) -> int:
        """Operations of `tokens` new tokens of a sequence that ends with `context` tokens."""
        own = tokens * sum(item.flops for item in self.items)
        first = context - tokens
        for a in self.attentions:
            if isinstance(a, Attention) and not a.causal:
                own += tokens * a.flops(context)
            else:
                own += sum(a.flops(first + i + 1) for i in range(tokens))
        return own

    def ops(self) -> list[str]:
        return sorted({item.op for item in self.items})

    def __iter__(self) -> Iterator[Item]:
        return iter(self.items)

    def __str__(self) -> str:
        return "\n".join([f"{self.architecture} ({self.category}), {self.dtype}", *map(str, self.items)])


def plan(model: Any, dtype: str = "") -> Plan:
    """The plan of a model.

    model  a config as transformers has it, or the folder or hub id of a checkpoint
    dtype  of the weights; by default the config's, or bfloat16
    Raises CheckpointError, UnknownName for an architecture that no model file describes, Unsupported, and ValueError
    for another object and for an unknown dtype.
    """
    config = _config(model) if isinstance(model, (str, Path)) else model
    if not hasattr(config, "architectures"):
        raise ValueError(
            f"model must be a config of transformers, a folder or a hub id, got {reprlib.repr(model)}"
        )
    names = getattr(config, "architectures", None) or [""]
    arch = registry.find(names[0], config).arch
    checks.check(config)
    described = registry.describe(config)
    dtype = dtype or str(getattr(config, "dtype", None) or "bfloat16").removeprefix("torch.")
    if dtype not in SIZES:
        raise ValueError(f"dtype {dtype!r} is not one of {', '.join(SIZES)}")
    formats = quantization.read(config)
    items = tuple(_in_format(item, formats, arch, SIZES[dtype]) for item in _items(described, arch))
    if arch.absent:
        patterns = registry.load(arch.absent)(config)
        items = tuple(
            replace(item, keys=tuple(k for k in item.keys if not any(fnmatchcase(k, p) for p in patterns)))
            for item in items
        )
    attentions = tuple(layer.attention for layer in described.layers)
    shifts = sum(isinstance(layer.mlp, Mlp) and layer.mlp.shift for layer in described.layers)
    mlp_state = shifts * described.hidden
    inner = [layer.inner for layer in described.layers if layer.inner is not None]
    if inner:
        # Their weights in 4 bytes, and what entered the first of these layers, with the ids of its tokens
        of_weights = sum(3 * m.intermediate * described.hidden for m in inner)
        mlp_state += (4 * of_weights + 8 * inner[0].chunk) // SIZES[dtype] + inner[0].chunk * described.hidden
    return Plan(names[0], arch.category, dtype, items, attentions, described.tied, mlp_state)


def _in_format(item: Item, formats: Quantization | None, arch: Architecture, dtype_bytes: int) -> Item:
    """The item with the op and the bytes of the checkpoint's number format."""
    ops = "linear", "fused_experts"
    if formats is None or item.op not in ops or item.path.rpartition(".")[2] in quantization.DENSE:
        return item
    scheme = formats.of(item.path, arch)
    if scheme is None:
        return item
    if item.op == "fused_experts":
        parts = [scheme.weight_bytes(n, k, dtype_bytes, True) * e for e, n, k in item.shapes.values()]
        size = sum(parts) + 4 * scheme.static * len(parts)
        arguments = {**item.arguments, "format": scheme.method}
        return replace(item, op=scheme.expert_op, arguments=arguments, quantized=size)
    rows, columns = item.shapes["weight"]
    size = scheme.weight_bytes(rows, columns, dtype_bytes) + dtype_bytes * prod(item.shapes.get("bias", (0,)))
    return replace(item, op=scheme.op, arguments={"format": scheme.method}, quantized=size)


def _config(model: str | Path) -> Any:
    from fastkernels.models.common.checkpoints import checkpoint
    from fastkernels.models.common.plans import build

    return build.load_config(checkpoint.resolve(str(model)))


def _items(d: Decoder, arch: Architecture) -> Iterator[Item]:
    table: dict[str, tuple[int, ...]] = {"weight": (d.vocab + d.more_ids, d.hidden)}
    embed, head = "model.embed_tokens", "lm_head"
    yield Item(embed, "embedding", {}, table, "vocabulary", _keys(f"{embed}.weight", arch), d.hidden)
    if d.embedding_norm is not None:
        yield _norm(d.embedding_norm, "model.embed_norm", d.hidden, arch)
    if d.positions is not None:
        path, rows = "model.embed_positions", d.positions.count + d.positions.offset
        own: dict[str, tuple[int, ...]] = {"weight": (rows, d.hidden)}
        yield Item(path, "embedding", {}, own, "vocabulary", _keys(f"{path}.weight", arch), d.hidden)
    if d.layer_input is not None:
        yield from _layer_inputs(d.layer_input, d.hidden, len(d.layers), "model.layer_inputs", arch)
    for i, layer in enumerate(d.layers):
        path = f"model.layers.{i}"
        items = [*_layer(layer, d.hidden, path, arch)]
        if d.layer_input is not None:
            items += _layer_input(d.layer_input, d.hidden, f"{path}.layer_input", arch)
        if layer.scaled:  # a parameter of the layer itself
            last, keys = items[-1], _keys(f"{path}.layer_scalar", arch)
            items[-1] = replace(last, shapes={**last.shapes, "layer_scalar": (1,)}, keys=(*last.keys, *keys))
        yield from items
    yield _norm(d.norm, "model.norm", d.hidden, arch)
    shapes: dict[str, tuple[int, ...]] = {} if d.tied else {"weight": (d.vocab, d.hidden)}
    if d.head_bias:
        shapes["bias"] = (d.vocab,)
    arguments = {"scale": d.logits_scale, "soft_cap": d.logits_softcap}
    yield Item(
        head, "logits_processor", {k: v for k, v in arguments.items() if v not in (0.0, 1.0)}, shapes, "vocabulary",
        tuple(k for name in shapes for k in _keys(f"{head}.{name}", arch)), d.vocab * d.hidden,
        2 * d.vocab * d.hidden,
    )  # fmt: skip
    for part in d.tower:
        keys = tuple(k for name in part.shapes for k in _keys(f"{part.path}.{name}", arch))
        yield Item(part.path, part.op, part.arguments, part.shapes, part.layout, keys, read=0)


def _layer(layer: Layer, hidden: int, path: str, arch: Architecture) -> Iterator[Item]:
    def norm(part: str) -> Iterator[Item]:
        if getattr(layer, part) is not None:
            yield _norm(getattr(layer, part), f"{path}.{layer.name(part)}", hidden, arch)

    yield from norm("before_attention")
    attention, name = layer.attention, f"{path}.{layer.name('self_attn')}"
    if isinstance(attention, Recurrent):
        yield from _recurrent(attention, hidden, name, arch)
    elif isinstance(attention, LatentAttention):
        yield from _latent_attention(attention, hidden, name, arch)
    else:
        yield from _attention(attention, hidden, name, arch)
    yield from norm("after_attention")
    if layer.cross is not None:
        yield from _cross(layer.cross, hidden, path, layer, arch)
    if layer.inner is not None:
        yield from _inner(layer.inner, hidden, path, layer, arch)
    yield from norm("before_mlp")
    mlp, name = layer.mlp, f"{path}.{layer.name('mlp')}"
    if mlp is None:
        return
    if isinstance(mlp, Experts):
        yield from _experts(mlp, hidden, name, arch)
    else:
        yield from _mlp(mlp, hidden, name, arch)
    if layer.experts is not None:
        yield from _parallel_experts(layer.experts, hidden, f"{path}.moe", arch)
    yield from norm("after_mlp")


def _cross(c: Cross, hidden: int, path: str, layer: Layer, arch: Architecture) -> Iterator[Item]:
    size, at = c.heads * c.head_size, f"{path}.{layer.name('cross')}"
    yield _norm(c.norm, f"{path}.{layer.name('before_cross')}", hidden, arch)
    yield _linear(f"{at}.q_proj", size, hidden, True, "columns", arch)
    for name, bias in (("k_proj", False), ("v_proj", True)):  # of states, once
        made = _linear(f"{at}.{name}", size, hidden, bias, "columns", arch)
        yield replace(made, read=0, flops=0)
    yield Item(at, "attention_decode", {"num_heads": c.heads, "head_size": c.head_size}, layout="heads")
    yield _linear(f"{at}.o_proj", hidden, size, True, "rows", arch)


def _inner(m: InnerMlp, hidden: int, path: str, layer: Layer, arch: Architecture) -> Iterator[Item]:
    at, n = f"{path}.{layer.name('inner')}", m.intermediate
    if m.before is not None:
        yield _norm(m.before, f"{path}.{layer.name('before_inner')}", hidden, arch)
    shapes: dict[str, tuple[int, ...]] = {"gate_up": (2 * n, hidden), "down": (hidden, n)}
    keys = tuple(k for name in ("gate_up_proj", "down_proj") for k in _keys(f"{at}.{name}.weight", arch))
    yield Item(
        at, "ttt_mlp", {"hidden": hidden, "intermediate": n}, shapes, "inner", keys, flops=6 * n * hidden
    )
    if m.after is not None:
        yield _norm(m.after, f"{path}.{layer.name('after_inner')}", hidden, arch)


def _parallel_experts(p: ParallelExperts, hidden: int, path: str, arch: Architecture) -> Iterator[Item]:
    own, router = p.experts, f"{path}.router"
    yield _norm(p.norm, f"{path}.after_mlp", hidden, arch)
    yield _norm(p.norm, f"{router}.norm", hidden, arch)
    yield _linear(f"{router}.proj", own.count, hidden, False, "", arch)
    scale = {"per_expert_scale": (own.count,)}
    arguments = {"top_k": own.top_k, "renormalize": True}
    yield Item(router, "topk_softmax", arguments, scale, keys=_keys(f"{router}.per_expert_scale", arch))
    yield _norm(p.norm, f"{path}.before", hidden, arch)
    keys = tuple(k for name in ("w13_weight", "w2_weight") for k in _keys(f"{path}.experts.{name}", arch))
    yield _stacked(own, "fused_experts_gelu", hidden, f"{path}.experts", keys)
    yield _norm(p.norm, f"{path}.after", hidden, arch)


def _layer_inputs(p: LayerInput, hidden: int, layers: int, path: str, arch: Architecture) -> Iterator[Item]:
    wide, embed = layers * p.size, f"{path}.embed_tokens"
    table = {"weight": (p.vocab, wide)}
    yield Item(embed, "embedding", {}, table, "vocabulary", _keys(f"{embed}.weight", arch), wide)
    yield _linear(f"{path}.projection", wide, hidden, False, "", arch)
    yield _norm(p.norm, f"{path}.norm", p.size, arch)


def _layer_input(p: LayerInput, hidden: int, path: str, arch: Architecture) -> Iterator[Item]:
    yield _linear(f"{path}.gate", p.size, hidden, False, "", arch)
    yield _linear(f"{path}.projection", hidden, p.size, False, "", arch)
    yield _norm(p.norm, f"{path}.norm", hidden, arch)


def _attention(a: Attention, hidden: int, path: str, arch: Architecture) -> Iterator[Item]:
    own = 0 if a.shared is not None else 1 if a.keys_as_values else 2
    rows = ((2 if a.gated else 1) * a.heads + own * a.kv_heads) * a.head_size
    projection = _linear(f"{path}.{'qkv_proj' if own else 'q_proj'}", rows, hidden, a.bias, "heads", arch)
    if a.bias and not a.key_bias:
        shapes = {**projection.shapes, "bias": (rows - a.kv_heads * a.head_size,)}
        projection = replace(projection, shapes=shapes)
    yield replace(projection, keys=tuple(k for k in projection.keys if own != 1 or ".v_proj." not in k))
    for name, heads in (("q_norm", a.heads), ("k_norm", a.kv_heads))[: 1 if a.shared is not None else 2]:
        if a.head_norm is not None:
            yield _norm(a.head_norm, f"{path}.{name}", a.head_size, arch)
        elif a.wide_norm is not None:
            yield _norm(a.wide_norm, f"{path}.{name}", heads * a.head_size, arch, "heads")
    if a.value_norm is not None and a.shared is None:
        yield _norm(a.value_norm, f"{path}.v_norm", a.head_size, arch)
    if a.rope is not None:
        arguments = {
            "head_size": a.head_size,
            "is_neox_style": not a.interleaved,
            **{k: v for k, v in a.rope.items() if v is not None},
        }
        yield Item(f"{path}.rotary_emb", "rotary_emb", arguments)
    arguments = {"num_heads": a.heads, "num_kv_heads": a.kv_heads, "head_size": a.head_size}
    optional = {
        "scale": a.scale,
        "per_layer_sliding_window": a.window,
        "logits_soft_cap": a.softcap or None,
        "alibi": a.alibi,
        "gated": a.gated or None,
    }
    arguments |= {k: v for k, v in optional.items() if v is not None}
    if a.shared is not None:
        arguments["kv_of_layer"] = a.shared
    if a.sinks:  # a parameter of the block around it
        shapes, keys = {"sinks": (a.heads,)}, _keys(f"{path}.sinks", arch)
    else:
        shapes, keys = {}, ()
    op = "attention" if a.causal else "attention_dense"
    yield Item(f"{path}.attn", op, arguments, shapes, "heads", keys)
    if a.out_norm is not None:
        yield _norm(a.out_norm, f"{path}.{NAMES['out_norm']}", a.heads * a.head_size, arch, "heads")
    yield _linear(f"{path}.o_proj", hidden, a.heads * a.head_size, a.out_bias, "rows", arch)


def _latent_attention(a: LatentAttention, hidden: int, path: str, arch: Architecture) -> Iterator[Item]:
    rows, size = a.rank + a.rope_size, a.nope_size + a.rope_size
    if a.query_rank is None:
        yield _linear(f"{path}.q_proj", a.heads * size, hidden, False, "heads", arch)
        yield _linear(f"{path}.kv_a_proj_with_mqa", rows, hidden, a.bias, "", arch)
    else:
        yield _linear(f"{path}.fused_qkv_a_proj", a.query_rank + rows, hidden, a.bias, "", arch)
        yield _norm(a.norm, f"{path}.q_a_layernorm", a.query_rank, arch)
        yield _linear(f"{path}.q_b_proj", a.heads * size, a.query_rank, False, "heads", arch)
    yield _norm(a.norm, f"{path}.kv_a_layernorm", a.rank, arch)
    if a.rope is not None:
        arguments = {"head_size": a.rope_size, "is_neox_style": not a.interleaved, **a.rope}
        yield Item(f"{path}.rotary_emb", "rotary_emb", {k: v for k, v in arguments.items() if v is not None})
    if a.indexer is not None and not a.indexer.shared:
        yield from _indexer(a, a.indexer, hidden, f"{path}.indexer", arch)
    yield _linear(f"{path}.kv_b_proj", a.heads * (a.nope_size + a.value_size), a.rank, False, "heads", arch)
    arguments = {
        "num_heads": a.heads,
        "kv_lora_rank": a.rank,
        "qk_rope_head_dim": a.rope_size,
        "scale": a.scale,
        "topk": None if a.indexer is None else a.indexer.topk,
    }
    op = "mla_decode" if a.indexer is None else "mla_sparse"
    yield Item(f"{path}.attn", op, {k: v for k, v in arguments.items() if v is not None}, layout="heads")
    yield _linear(f"{path}.o_proj", hidden, a.heads * a.value_size, a.bias, "rows", arch)


def _recurrent(a: Recurrent, hidden: int, path: str, arch: Architecture) -> Iterator[Item]:
    if isinstance(a, Mamba):
        yield from _mamba(a, hidden, path, arch)
    elif isinstance(a, Mamba2):
        yield from _mamba2(a, hidden, path, arch)
    elif isinstance(a, GatedDelta):
        yield from _gated_delta(a, hidden, path, arch)
    elif isinstance(a, LinearAttention):
        yield from _linear_attention(a, hidden, path, arch)
    elif isinstance(a, Rwkv7):
        yield from _rwkv7(a, hidden, path, arch)
    elif isinstance(a, ShortConv):
        yield _linear(f"{path}.in_proj", 3 * a.channels, hidden, a.bias, "columns", arch)
        yield _conv(a, a.bias, path, arch)
        yield _linear(f"{path}.out_proj", hidden, a.channels, a.bias, "rows", arch)
    elif not isinstance(a, NoMixer):
        assert isinstance(a, KimiDelta)
        yield from _kimi_delta(a, hidden, path, arch)


def _mamba(a: Mamba, hidden: int, path: str, arch: Architecture) -> Iterator[Item]:
    yield _linear(f"{path}.in_proj", 2 * a.inner, hidden, a.bias, "columns", arch)
    yield _conv(a, a.conv_bias, path, arch)
    yield _linear(f"{path}.x_proj", a.rank + 2 * a.size, a.inner, False, "rows", arch)
    sizes = {"dt_layernorm": a.rank, "b_layernorm": a.size, "c_layernorm": a.size}
    for name, size in sizes.items() if a.part_norm is not None else ():
        assert a.part_norm is not None
        yield _norm(a.part_norm, f"{path}.{name}", size, arch)
    yield _linear(f"{path}.dt_proj", a.inner, a.rank, True, "columns", arch)
    shapes: dict[str, tuple[int, ...]] = {"A": (a.inner, a.size), "D": (a.inner,)}
    yield _of_layer("mamba_scan", {"channels": a.inner, "size": a.size}, shapes, path, "columns", arch)
    yield _linear(f"{path}.out_proj", hidden, a.inner, a.bias, "rows", arch)


def _mamba2(a: Mamba2, hidden: int, path: str, arch: Architecture) -> Iterator[Item]:
    yield _linear(f"{path}.in_proj", a.inner + a.conv_channels + a.heads, hidden, a.bias, "heads", arch)
    yield _conv(a, a.conv_bias, path, arch)
    sizes = {"num_heads": a.heads, "head_size": a.head_size, "groups": a.groups, "size": a.size}
    shapes: dict[str, tuple[int, ...]] = dict.fromkeys(("A", "D", "dt_bias"), (a.heads,))
    yield _of_layer("ssd", sizes, shapes, path, "heads", arch)
    yield _gated_norm(a.norm, f"{path}.norm", a.inner, "heads", arch)
    yield _linear(f"{path}.out_proj", hidden, a.inner, a.bias, "rows", arch)


def _gated_delta(a: GatedDelta, hidden: int, path: str, arch: Architecture) -> Iterator[Item]:
    value = a.value_heads * a.value_size
    rows = a.conv_channels + value + 2 * a.value_heads
    yield _linear(f"{path}.in_proj", rows, hidden, False, "heads", arch)
    yield _conv(a, False, path, arch)
    sizes = {"key_heads": a.key_heads, "value_heads": a.value_heads, "sizes": (a.key_size, a.value_size)}
    shapes: dict[str, tuple[int, ...]] = dict.fromkeys(("A", "dt_bias"), (a.value_heads,))
    yield _of_layer("gated_delta_rule", sizes, shapes, path, "heads", arch)
    yield _gated_norm(a.norm, f"{path}.norm", a.value_size, "", arch)
    yield _linear(f"{path}.out_proj", hidden, value, False, "rows", arch)


def _kimi_delta(a: KimiDelta, hidden: int, path: str, arch: Architecture) -> Iterator[Item]:
    wide = a.heads * a.head_size
    yield _linear(f"{path}.qkv_proj", 3 * wide, hidden, False, "heads", arch)
    yield _conv(a, False, path, arch)
    yield _linear(f"{path}.fg_a_proj", 2 * a.head_size, hidden, False, "", arch)
    for name in ("f_b_proj", "g_b_proj"):
        yield _linear(f"{path}.{name}", wide, a.head_size, False, "heads", arch)
    yield _linear(f"{path}.b_proj", a.heads, hidden, False, "heads", arch)
    sizes = {"num_heads": a.heads, "head_size": a.head_size}
    yield _of_layer("kda", sizes, {"A": (a.heads,), "dt_bias": (wide,)}, path, "heads", arch)
    yield _gated_norm(a.norm, f"{path}.o_norm", a.head_size, "", arch)
    yield _linear(f"{path}.o_proj", hidden, wide, False, "rows", arch)


def _linear_attention(a: LinearAttention, hidden: int, path: str, arch: Architecture) -> Iterator[Item]:
    rows = a.heads * a.key_size + a.kv_heads * (a.key_size + a.value_size)
    yield _linear(f"{path}.qkv_proj", rows, hidden, False, "heads", arch)
    if a.kernel > 1:
        yield _conv(a, False, path, arch)
    if a.rank is not None:
        yield _linear(f"{path}.gk_proj.0", a.rank, hidden, False, "", arch)
        yield _linear(f"{path}.gk_proj.1", a.kv_heads * a.key_size, a.rank, True, "heads", arch)
    if a.rope is not None:
        arguments = {"head_size": a.key_size, "is_neox_style": True, **a.rope}
        yield Item(f"{path}.rotary_emb", "rotary_emb", arguments)
    sizes = {"num_heads": a.heads, "num_kv_heads": a.kv_heads, "sizes": (a.key_size, a.value_size)}
    yield Item(path, "gated_linear_attention", sizes, layout="heads")
    if a.gated:
        yield _linear(f"{path}.g_proj", a.heads * a.value_size, hidden, False, "heads", arch)
    yield _gated_norm(a.norm, f"{path}.{a.norm_name}", a.value_size, "", arch)
    yield _linear(f"{path}.o_proj", hidden, a.heads * a.value_size, False, "rows", arch)


def _rwkv7(a: Rwkv7, hidden: int, path: str, arch: Architecture) -> Iterator[Item]:
    yield _shift(f"{path}.shifts", 6, hidden, arch)
    for name in ("r_proj", "k_proj", "v_proj"):
        yield _linear(f"{path}.{name}", hidden, hidden, False, "heads", arch)
    for name, rank in {"w": a.decay_rank, "v": a.value_rank, "a": a.rate_rank, "g": a.gate_rank}.items():
        if rank is not None:
            yield _linear(f"{path}.{name}_lora.lora.0", rank, hidden, False, "", arch)
            yield _linear(f"{path}.{name}_lora.lora.2", hidden, rank, name != "g", "heads", arch)
    yield Item(f"{path}.kappa", "l2_norm", {"eps": a.key_eps})
    sizes = {"num_heads": a.heads, "head_size": a.head_size}
    shapes: dict[str, tuple[int, ...]] = {"k_k": (hidden,), "k_a": (hidden,), "r_k": (a.heads, a.head_size)}
    yield _of_layer("rwkv7", sizes, shapes, path, "heads", arch)
    yield _norm(a.norm, f"{path}.g_norm", hidden, arch, "heads")
    yield _linear(f"{path}.o_proj", hidden, hidden, False, "rows", arch)


def _shift(path: str, count: int, hidden: int, arch: Architecture) -> Item:
    return Item(
        path, "causal_conv1d", {"channels": hidden, "width": 2}, {"weight": (count, hidden)},
        keys=_keys(f"{path}.weight", arch),
    )  # fmt: skip


def _conv(a: Recurrent, bias: bool, path: str, arch: Architecture) -> Item:
    shapes: dict[str, tuple[int, ...]] = {"weight": (a.conv_channels, a.kernel)}
    if bias:
        shapes["bias"] = (a.conv_channels,)
    keys = tuple(key for name in shapes for key in _keys(f"{path}.conv1d.{name}", arch))
    sizes = {"channels": a.conv_channels, "width": a.kernel}
    return Item(f"{path}.conv1d", "causal_conv1d", sizes, shapes, "heads", keys)


def _of_layer(
    op: str, arguments: Mapping[str, Any], shapes: Mapping[str, tuple[int, ...]], path: str, layout: str,
    arch: Architecture,
) -> Item:  # fmt: skip
    """An op with parameters of the layer itself."""
    keys = tuple(key for name in shapes for key in _keys(f"{path}.{name}", arch))
    return Item(path, op, arguments, shapes, layout, keys)


def _gated_norm(norm: Norm, path: str, size: int, layout: str, arch: Architecture) -> Item:
    return replace(_norm(norm, path, size, arch, layout), op="rms_norm_gated")


def _indexer(a: LatentAttention, x: Indexer, hidden: int, path: str, arch: Architecture) -> Iterator[Item]:
    assert a.query_rank is not None
    yield _linear(f"{path}.wq_b", x.heads * x.head_size, a.query_rank, False, "", arch)
    yield _linear(f"{path}.wk", x.head_size, hidden, False, "", arch)
    yield _norm(x.norm, f"{path}.k_norm", x.head_size, arch)
    arguments = {"head_size": a.rope_size, "is_neox_style": not x.interleaved, **(a.rope or {})}
    yield Item(f"{path}.rotary_emb", "rotary_emb", {k: v for k, v in arguments.items() if v is not None})
    yield _linear(f"{path}.weights_proj", x.heads, hidden, False, "", arch)
    sizes = {"num_heads": x.heads, "head_size": x.head_size}
    yield Item(f"{path}.indexer_op", "paged_mqa_logits", sizes)
    yield Item(f"{path}.indexer_op", "top_k_per_row", {"topk": x.topk})


def _mlp(mlp: Mlp, hidden: int, path: str, arch: Architecture) -> Iterator[Item]:
    n, name = (2, "gate_up_proj") if mlp.gated else (1, "up_proj")
    if mlp.shift:
        yield _shift(f"{path}.shift", 1, hidden, arch)
    yield _linear(f"{path}.{name}", n * mlp.intermediate, hidden, mlp.bias, "columns", arch)
    yield Item(f"{path}.act_fn", *activations.op_of(mlp.activation, mlp.gated))
    if mlp.inner_norm is not None:
        yield _norm(mlp.inner_norm, f"{path}.{NAMES['inner_norm']}", mlp.intermediate, arch, "columns")
    yield _linear(f"{path}.down_proj", hidden, mlp.intermediate, mlp.bias, "rows", arch)


def _experts(experts: Experts, hidden: int, path: str, arch: Architecture) -> Iterator[Item]:
    router = "gate" if experts.clamped is None else "router"
    yield _linear(f"{path}.{router}", experts.count, hidden, experts.clamped is not None, "", arch)
    arguments: dict[str, Any] = {"top_k": experts.top_k, "renormalize": experts.normalize}
    if experts.clamped is not None:
        yield Item(f"{path}.topk", "topk_softmax", arguments)
        yield _clamped(experts, hidden, f"{path}.experts", arch)
        return
    if experts.plain:
        yield Item(f"{path}.router", "topk_softmax", arguments)
    else:
        arguments |= {"num_expert_group": experts.groups, "topk_group": experts.top_groups}
        arguments |= {"scoring_func": experts.scoring, "routed_scaling_factor": experts.scale}
        bias, name = {"e_score_correction_bias": (experts.count,)}, f"{path}.gate.e_score_correction_bias"
        keys = _keys(name, arch) if experts.correction else ()
        yield Item(f"{path}.router", "grouped_topk", arguments, bias if experts.correction else {}, keys=keys)
    names = [f"{e}.{part}.weight" for e in range(experts.count) for part in experts.names]
    if not arch.experts:  # the checkpoint has them as one tensor
        names = ["w13_weight", "w2_weight"]
    keys = tuple(key for name in names for key in _keys(f"{path}.experts.{name}", arch))
    yield _stacked(experts, "fused_experts", hidden, f"{path}.experts", keys)
    if experts.shared:
        yield from _mlp(Mlp(experts.shared), hidden, f"{path}.shared_experts", arch)
    if experts.shared_gate:
        yield _linear(f"{path}.shared_expert_gate", 1, hidden, False, "", arch)


def _stacked(experts: Experts, op: str, hidden: int, path: str, keys: tuple[str, ...]) -> Item:
    """The matrices of all experts."""
    n, inner, each = experts.count, experts.intermediate, 3 * experts.intermediate * hidden
    shapes = {"w13_weight": (n, 2 * inner, hidden), "w2_weight": (n, hidden, inner)}
    return Item(
        path,
        op,
        {"top_k": experts.top_k},
        shapes,
        "inner",
        keys,
        experts.top_k * each,
        2 * experts.top_k * each,
    )


def _clamped(experts: Experts, hidden: int, path: str, arch: Architecture) -> Item:
    n, inner = experts.count, experts.intermediate
    matrices = {"gate_up_proj": (n, 2 * inner, hidden), "down_proj": (n, hidden, inner)}
    biases = {"gate_up_proj_bias": (n, 2 * inner), "down_proj_bias": (n, hidden)}
    values, added = (sum(map(prod, shapes.values())) for shapes in (matrices, biases))
    parts = ("_blocks", "_scales") if experts.mxfp4 else ("",)
    stored = [*(f"{name}{part}" for name in matrices for part in parts), *biases]
    return Item(
        path, "fused_experts_swigluoai", {"top_k": experts.top_k}, {**matrices, **biases}, "inner",
        tuple(key for name in stored for key in _keys(f"{path}.{name}", arch)),
        experts.top_k * (values + added) // n, 2 * experts.top_k * values // n,
        round(values * MXFP4_BITS / 8) + 2 * added if experts.mxfp4 else None,
    )  # fmt: skip


def _linear(path: str, rows: int, columns: int, bias: bool, layout: str, arch: Architecture) -> Item:
    shapes: dict[str, tuple[int, ...]] = {"weight": (rows, columns)}
    if bias:
        shapes["bias"] = (rows,)
    keys = tuple(key for name in shapes for key in _keys(f"{path}.{name}", arch))
    return Item(path, "linear", {}, shapes, layout, keys, flops=2 * rows * columns)


def _norm(norm: Norm, path: str, size: int, arch: Architecture, layout: str = "") -> Item:
    shapes = {"weight": (size,), **({"bias": (size,)} if norm.bias else {})}
    if norm.kind == "unit":
        return Item(path, NORMS[norm.kind], {"eps": norm.eps, "has_weight": False})
    keys = tuple(key for name in shapes for key in _keys(f"{path}.{name}", arch))
    return Item(path, NORMS[norm.kind], {"eps": norm.eps}, shapes, layout, keys)


def _keys(parameter: str, arch: Architecture) -> tuple[str, ...]:
    """The names of a parameter in a checkpoint: several for one that is packed here."""
    module, _, name = parameter.rpartition(".")
    above, _, own = module.rpartition(".")
    parts = arch.packed.get(own, (own,))
    return tuple(arch.checkpoint_key(".".join(filter(None, (above, part, name)))) for part in parts)
