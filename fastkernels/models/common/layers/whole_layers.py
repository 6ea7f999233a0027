"""Decoder layers that are one op each: those of Llama, Qwen3 and Mixtral, built from a description."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from types import SimpleNamespace

from torch import nn

from fastkernels.models.common.descriptions.architecture import Architecture
from fastkernels.models.common.descriptions.description import (
    NUMBERED,
    Attention,
    Decoder,
    Experts,
    Layer,
    Mlp,
    Norm,
)
from fastkernels.overrides.block.gated_mlp import PackedMLP
from fastkernels.overrides.block.vllm import (
    VllmLlamaDecoderLayer,
    VllmMixtralDecoderLayer,
    VllmQwen3DecoderLayer,
)
from fastkernels.overrides.linear.linear_silu_and_mul import activated

Build = Callable[[int, str], nn.Module]  # a layer's number and its name


def builder(arch: Architecture, d: Decoder) -> Build | None:
    """The builder of the layers, if arch names an op for whole layers that computes all layers of this description."""
    for op in arch.layers:
        same, make = LAYERS[op]
        if all(same(layer) == layer for layer in d.layers):
            return lambda i, prefix: _with_activated(make(_config(d, d.layers[i]), prefix))
    return None


def _with_activated(layer: nn.Module) -> nn.Module:
    """A layer whose MLP may compute the product of gate and up, and its activation, at once."""
    if isinstance(mlp := getattr(layer, "mlp", None), PackedMLP):
        mlp.activated = activated  # type: ignore[assignment]
    return layer


def _llama(layer: Layer) -> Layer | None:
    """Llama's layer with the sizes of this one; None if it has parts of another kind."""
    mlp, norm = layer.mlp, layer.before_attention
    if not isinstance(mlp, Mlp) or norm is None or norm.kind != "rms":
        return None
    attention = _attention(layer)
    return (
        None
        if attention is None
        else Layer(attention, Mlp(mlp.intermediate, bias=mlp.bias), norm, before_mlp=norm)
    )


def _qwen3(layer: Layer) -> Layer | None:
    """The same for Qwen3: one norm for the layer and its heads, and biases of all or none of attention's parts."""
    same = _llama(layer)
    if same is None or not isinstance(same.attention, Attention):
        return None
    a = same.attention
    return replace(same, attention=replace(a, out_bias=a.bias, head_norm=layer.before_attention))


def _mixtral(layer: Layer) -> Layer | None:
    """The same for Mixtral: no biases, and experts."""
    experts, norm = layer.mlp, layer.before_attention
    if not isinstance(experts, Experts) or norm is None or norm.kind != "rms":
        return None
    own = Experts(experts.count, experts.top_k, experts.intermediate, names=NUMBERED)
    attention = _attention(layer, biases=False)
    return (
        None
        if attention is None
        else Layer(attention, own, norm, before_mlp=norm, names={"mlp": "block_sparse_moe"})
    )


def _attention(layer: Layer, biases: bool = True) -> Attention | None:
    """vLLM's LlamaAttention with the sizes of this layer's."""
    a = layer.attention
    if not isinstance(a, Attention) or a.rope is None:
        return None
    return Attention(
        a.heads, a.kv_heads, a.head_size, a.bias and biases, a.out_bias and biases, window=a.window, rope=a.rope,
        max_positions=a.max_positions,
    )  # fmt: skip


def _config(d: Decoder, layer: Layer) -> SimpleNamespace:
    """The fields that classes of whole layers read of a config, from the description of one layer."""
    a, mlp, norm = layer.attention, layer.mlp, layer.before_attention
    assert isinstance(a, Attention) and isinstance(norm, Norm) and mlp is not None
    made = SimpleNamespace(
        hidden_size=d.hidden, num_attention_heads=a.heads, num_key_value_heads=a.kv_heads, head_dim=a.head_size,
        intermediate_size=mlp.intermediate, max_position_embeddings=a.max_positions, rope_parameters=a.rope,
        rms_norm_eps=norm.eps, hidden_act="silu", qkv_bias=a.bias, attention_bias=a.out_bias, sliding_window=a.window,
    )  # fmt: skip
    if isinstance(mlp, Experts):
        made.num_local_experts, made.num_experts_per_tok = mlp.count, mlp.top_k
    else:
        made.mlp_bias = mlp.bias
        kind = "sliding_attention" if a.window else "full_attention"
        made.layer_types = [kind] * len(d.layers)
    return made


# {op: (the layer of its class with the sizes of another layer, what builds it)}
LAYERS = {
    "llama_decoder_layer": (
        _llama,
        lambda config, prefix: VllmLlamaDecoderLayer(None, prefix, config=config),
    ),
    "qwen3_decoder_layer": (_qwen3, lambda config, prefix: VllmQwen3DecoderLayer(config, prefix=prefix)),
    "mixtral_decoder_layer": (
        _mixtral,
        lambda config, prefix: VllmMixtralDecoderLayer(config, prefix=prefix),
    ),
}
