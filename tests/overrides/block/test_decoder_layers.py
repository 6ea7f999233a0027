"""Tests of decoder layers against transformers in float32, and of the residual."""

from __future__ import annotations

import importlib
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from support.modules import CONFIG, bind_cache, close, fill, metadata, randn
from torch import nn

from fastkernels.core import registry
from fastkernels.core.dispatch import OPS
from fastkernels.core.forward_context import forward_context
from fastkernels.overrides.block import decoder_layer, sglang, vllm
from fastkernels.overrides.norm.sglang import TARGETS as SGLANG_NORMS
from fastkernels.overrides.norm.vllm import TARGETS as VLLM_NORMS

pytestmark = pytest.mark.timeout(120)


def hf_layer(kind: str = "Llama") -> tuple[nn.Module, nn.Module, Any]:
    config_class = getattr(importlib.import_module("transformers"), f"{kind}Config")
    hf = importlib.import_module(f"transformers.models.{kind.lower()}.modeling_{kind.lower()}")
    keys = (
        "hidden_size", "intermediate_size", "num_attention_heads", "num_key_value_heads", "head_dim", "vocab_size",
        "rms_norm_eps", "max_position_embeddings",
    )  # fmt: skip
    config = config_class(num_hidden_layers=1, **{k: getattr(CONFIG, k) for k in keys})
    config._attn_implementation = "sdpa"
    layer = getattr(hf, f"{kind}DecoderLayer")(config, 0)
    fill(layer)
    return layer, getattr(hf, f"{kind}RotaryEmbedding")(config), config


def load_layer(ours: nn.Module, state: dict[str, torch.Tensor]) -> None:
    """Load the weights of a transformers layer through the loaders of our parameters."""
    params = dict(ours.named_parameters())
    for name, value in state.items():
        for part, packed, shard in (
            ("q_proj", "qkv_proj", "q"), ("k_proj", "qkv_proj", "k"), ("v_proj", "qkv_proj", "v"),
            ("gate_proj", "gate_up_proj", 0), ("up_proj", "gate_up_proj", 1),
        ):  # fmt: skip
            if f".{part}." in name:
                param = params[name.replace(part, packed)]
                param.weight_loader(param, value, shard)
                break
        else:
            param = params[name]
            getattr(param, "weight_loader", lambda p, w: p.data.copy_(w))(param, value)


LAYERS = [
    (spec, t)
    for spec in map(registry.get, ("llama_decoder_layer", "qwen3_decoder_layer"))
    for t in spec.targets
]


@pytest.mark.parametrize(("spec", "target"), LAYERS, ids=[t.cls for _, t in LAYERS])
@torch.inference_mode()
def test_decoder_layer_equals_transformers(spec: Any, target: Any) -> None:
    llama = spec.name == "llama_decoder_layer"
    reference, rotary, config = hf_layer("Llama" if llama else "Qwen3")
    kind = registry.target_class(target)
    ours = kind(None, "model.layers.0", config) if llama and target.host == "vllm" else kind(config)
    load_layer(ours, reference.state_dict())
    assert kind.supports(ours) is None
    x, positions = randn(11, config.hidden_size, seed=3), torch.arange(11)
    cos_sin = rotary(x[None], positions[None])
    expected = reference(x[None], position_embeddings=cos_sin, attention_mask=None)
    expected = (expected[0] if isinstance(expected, tuple) else expected).view(11, -1)
    bind_cache(ours, 8, 4)
    before = OPS["rms_norm"].calls
    batch = [] if target.host == "vllm" else [None]
    stream = target.host == "sglang" and "0_5_16" not in target.cls
    with forward_context(metadata([11], [11], 4)):
        out = ours(positions, x.clone(), *batch, *([] if stream else [None]))
    assert OPS["rms_norm"].calls == before + (2 if llama else 4)
    close(out if stream else out[0] + out[1], expected, 1e-4)


def test_qwen3_layer_adds_to_residual_and_rejects_others() -> None:
    old = sglang.SGLangQwen3DecoderLayer_0_5_16(CONFIG)
    new = sglang.SGLangQwen3DecoderLayer(CONFIG)
    new.load_state_dict(fill(old))
    bind_cache(old, 8, 4)
    bind_cache(new, 8, 4)
    x, residual, more = (randn(5, 72, seed=i) for i in range(3))
    with torch.inference_mode(), forward_context(metadata([5], [5], 4)):
        h, r = old(torch.arange(5), x.clone(), None, residual.clone(), more)
        stream = new(torch.arange(5), x + residual, None, more)
        with pytest.raises(ValueError, match="capture_output"):
            new(torch.arange(5), x, None, capture_output=object())
    close(h + r, stream, 1e-4)
    for field in ("dual_chunk_attention_config", "is_causal"):
        config = SimpleNamespace(**{**vars(CONFIG), field: field != "is_causal"})
        with pytest.raises(ValueError, match=field):
            vllm.VllmQwen3DecoderLayer(config)
    windowed = vllm.VllmQwen3DecoderLayer(CONFIG, per_layer_sliding_window=4)
    assert windowed.self_attn.attn.window_left == 3


@torch.inference_mode()
def test_llama_layer_with_residual_equals_sum() -> None:
    reference, _, config = hf_layer()
    ours = vllm.VllmLlamaDecoderLayer(None, "model.layers.0", config)
    load_layer(ours, reference.state_dict())
    bind_cache(ours, 8, 4)
    x, residual = randn(7, config.hidden_size, seed=1), randn(7, config.hidden_size, seed=2)
    whole, split = metadata([7], [7], 4), []
    with forward_context(whole):
        h, r = ours(torch.arange(7), x.clone(), residual.clone())
        split = ours(torch.arange(7), x + residual, None)
    close(h, split[0], 1e-4)
    close(r, split[1], 1e-4)


def test_norms_are_recognized_by_class_and_not_by_name() -> None:
    layer = vllm.VllmQwen3DecoderLayer(CONFIG)
    namesake: Any = type("RMSNorm", (type(layer.input_layernorm),), {"__module__": "elsewhere"})
    layer.input_layernorm.__class__ = namesake
    assert "a norm is elsewhere:RMSNorm" in str(type(layer).supports(layer))
    for target in (*VLLM_NORMS["rms_norm"], *SGLANG_NORMS["rms_norm"]):
        ours = f"fastkernels.overrides.norm.{target.host}:{target.cls}"
        assert (target.path in decoder_layer.NORMS) == (ours in decoder_layer.NORMS)
