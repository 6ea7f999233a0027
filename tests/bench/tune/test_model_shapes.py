"""Shapes of a model's ops on each rank, for `fk-bench tune MODEL`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from fk_bench.tune import command, tuner
from fk_bench.tune.model_shapes import _built, longest_context, shapes_of_model

DENSE = {
    "architectures": ["Qwen2ForCausalLM"], "model_type": "qwen2", "hidden_size": 512, "intermediate_size": 1024,
    "num_hidden_layers": 3, "num_attention_heads": 8, "num_key_value_heads": 2, "vocab_size": 1000,
    "max_position_embeddings": 32768,
}  # fmt: skip
EXPERTS = {
    **DENSE, "architectures": ["MixtralForCausalLM"], "model_type": "mixtral", "num_local_experts": 8,
    "num_experts_per_tok": 2, "sliding_window": None,
}  # fmt: skip


def folder(path: Path, config: dict[str, Any], quantization: str = "") -> str:
    if quantization:
        config = {**config, "quantization_config": command.QUANTIZED[quantization]}
    (path / "config.json").write_text(json.dumps(config))
    return str(path)


def shapes(op: str, model: str, tp: int = 1) -> list[tuple[Any, ...]]:
    found = shapes_of_model(op, tuner.key_of(op)[2], model, torch.bfloat16, tp)
    return [tuple(shape.values()) for shape in found]


@pytest.mark.parametrize("tp", [1, 2, 4])
def test_plan_has_the_linear_shapes_of_built_modules(tp: int, tmp_path: Path) -> None:
    model = folder(tmp_path, DENSE)
    built = _built("linear", tuner.key_of("linear")[2], model, torch.bfloat16, tp)
    found = shapes("linear", model, tp)
    assert sorted(found) == sorted(tuple(shape.values()) for shape in built)
    heads, own = 8 // tp, max(2 // tp, 1)
    assert found[0] == ((heads + 2 * own) * 64, 512, "bfloat16")
    assert found[1] == (512, heads * 64, "bfloat16")


def test_attention_has_the_heads_of_a_rank(tmp_path: Path) -> None:
    model = folder(tmp_path, DENSE)
    assert shapes("attention_decode", model) == [(8, 2, 64, 16, 0, "bfloat16")]
    assert shapes("attention_decode", model, 4) == [(2, 1, 64, 16, 0, "bfloat16")]


def test_fp8_layers_replace_unquantized_ones(tmp_path: Path) -> None:
    model = folder(tmp_path, DENSE, "fp8")
    assert shapes("linear", model) == []
    found = shapes("linear_fp8", model)
    assert found[0] == (768, 512, 1, "bfloat16") and found[2] == (2048, 512, 1, "bfloat16")
    model = folder(tmp_path, {**DENSE, "hidden_size": 1024}, "fp8-block")
    assert {shape[2] for shape in shapes("linear_fp8", model, 2)} == {128}


def test_experts_follow_the_plan(tmp_path: Path) -> None:
    model = folder(tmp_path, EXPERTS)
    assert shapes("fused_experts", model) == [(8, 8, 2, 512, 1024, "bfloat16")]
    assert shapes("fused_experts", model, 4) == [(8, 8, 2, 512, 256, "bfloat16")]
    assert (8, 512, "bfloat16") in shapes("linear", model)  # the router
    (tmp_path / "fp8").mkdir()
    quantized = folder(tmp_path / "fp8", EXPERTS, "fp8")
    assert shapes("fused_experts_fp8", quantized) == [(8, 8, 2, 512, 1024, 0, 2, "bfloat16")]
    (tmp_path / "block").mkdir()
    blocks = folder(tmp_path / "block", EXPERTS, "fp8-block")
    assert shapes("fused_experts_fp8", blocks) == [(8, 8, 2, 512, 1024, 128, 128, "bfloat16")]


def test_model_that_ranks_cannot_share_is_refused(tmp_path: Path) -> None:
    model = folder(tmp_path, {**DENSE, "num_key_value_heads": 4, "num_attention_heads": 8})
    with pytest.raises(ValueError, match="--tp 16: 8 attention heads cannot be shared by 16 ranks"):
        shapes("attention_decode", model, 16)
    model = folder(tmp_path, {**DENSE, "num_attention_heads": 12, "num_key_value_heads": 3, "head_dim": 64})
    assert shapes("attention_decode", model, 3) == [(4, 1, 64, 16, 0, "bfloat16")]


def test_contexts_reach_from_the_longest_down(tmp_path: Path) -> None:
    model = folder(tmp_path, DENSE)
    assert longest_context(model) == 32768
    assert command._contexts(model) == (32768, 8192, 2048)
    assert command._contexts("") == (512, 2048, 8192, 32768)
