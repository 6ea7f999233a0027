"""The length that YaRN allows, and what is logged about LongRoPE."""

from __future__ import annotations

import logging
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from support.tiny import make_tiny

from fastkernels import LLM, SamplingParams
from fastkernels.models.common.configs import length

GREEDY = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)
# As Qwen's model cards extend a model of 32,768 positions to 131,072
RECIPE = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, "original_max_position_embeddings": 32}
LONG = [(i * 37) % 500 for i in range(90)]


@pytest.mark.parametrize("kind", ["qwen3", "qwen2", "llama", "deepseek_v3"])
def test_yarn_recipe_allows_the_extended_length(tmp_path: Path, kind: str, greedy: Any) -> None:
    sizes = {"max_position_embeddings": 40, "rope_parameters": RECIPE}
    folder = make_tiny(tmp_path, kind, "float32", **sizes)
    llm = LLM(str(folder), device="cpu", max_model_len=128, max_num_batched_tokens=32, max_num_seqs=1)
    assert llm.llm_engine.max_model_len == 128
    assert llm.generate([LONG], GREEDY)[0].outputs[0].token_ids == greedy(folder, LONG, 8)
    with pytest.raises(ValueError, match="max_model_len 129 is more than the model's 128"):
        LLM(str(folder), device="cpu", max_model_len=129)


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        (
            {
                "rope_parameters": {
                    "rope_type": "default",
                    "factor": 4.0,
                    "original_max_position_embeddings": 32,
                }
            },
            40,
        ),
        (
            {
                "rope_parameters": {
                    "rope_type": "llama3",
                    "factor": 8.0,
                    "original_max_position_embeddings": 32,
                }
            },
            40,
        ),
        (
            {"rope_parameters": {"rope_type": "yarn", "factor": 1.0, "original_max_position_embeddings": 32}},
            40,
        ),
        (
            {
                "rope_parameters": {
                    "rope_type": "yarn",
                    "factor": None,
                    "original_max_position_embeddings": 32,
                }
            },
            40,
        ),
        ({"rope_parameters": {"full_attention": RECIPE, "sliding_attention": {"rope_type": "default"}}}, 128),
        ({"rope_scaling": {"type": "yarn", "factor": 2.0, "original_max_position_embeddings": 32}}, 64),
        ({}, 40),
    ],
)
def test_only_yarn_extends_the_length(fields: dict[str, Any], expected: int) -> None:
    assert length.longest(SimpleNamespace(max_position_embeddings=40, **fields)) == expected
    assert length.longest(SimpleNamespace(**fields)) is None


@pytest.mark.parametrize("kind", ["gla", "retnet", "rwkv7"])
def test_models_of_states_alone_have_no_limit(tmp_path: Path, kind: str, greedy: Any) -> None:
    folder = make_tiny(tmp_path, kind, "float32", max_position_embeddings=40)
    llm = LLM(str(folder), device="cpu", max_num_batched_tokens=32, max_num_seqs=1)
    assert llm.llm_engine.max_model_len == length.UNLIMITED
    assert llm.generate([LONG], GREEDY)[0].outputs[0].token_ids == greedy(folder, LONG, 8)
    longer = LLM(str(folder), device="cpu", max_num_seqs=1, max_model_len=length.UNLIMITED + 64)
    assert longer.llm_engine.max_model_len == length.UNLIMITED + 64
    if kind == "retnet":
        rope = longer.llm_engine.runner.model.model.layers[0].attn.rotary_emb
        assert len(rope.cos_sin_cache) == length.UNLIMITED + 64


@pytest.mark.parametrize("kind", ["jamba", "kimi_linear", "mamba2"])
def test_limit_without_positions_is_only_a_default(tmp_path: Path, kind: str, greedy: Any) -> None:
    folder = make_tiny(tmp_path, kind, "float32", max_position_embeddings=40)
    sizes: dict[str, Any] = {"device": "cpu", "max_num_seqs": 1, "num_blocks": 40}
    assert LLM(str(folder), **sizes).llm_engine.max_model_len == 40
    llm = LLM(str(folder), max_model_len=128, max_num_batched_tokens=32, **sizes)
    assert llm.generate([LONG], GREEDY)[0].outputs[0].token_ids == greedy(folder, LONG, 8)


@pytest.mark.parametrize("kind", ["cohere2", "mpt", "qwen3_next"])
def test_limit_of_models_with_positions_is_kept(tmp_path: Path, kind: str) -> None:
    folder = make_tiny(tmp_path, kind, "float32", max_position_embeddings=40)
    with pytest.raises(ValueError, match="max_model_len 41 is more than the model's 40"):
        LLM(str(folder), device="cpu", max_model_len=41)


def test_configs_without_a_length_have_the_hosts_default() -> None:
    assert length.default(SimpleNamespace()) == length.UNKNOWN


def test_long_factors_for_all_requests_are_logged_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    rope = {
        "rope_type": "longrope", "rope_theta": 1e4, "partial_rotary_factor": 0.75,
        "short_factor": [1.0] * 12, "long_factor": [2.0] * 12, "original_max_position_embeddings": 48,
    }  # fmt: skip
    sizes = {"max_position_embeddings": 256, "original_max_position_embeddings": 48}
    folder = make_tiny(tmp_path, "phi3", "float32", rope_parameters=rope, **sizes)
    for max_model_len, times in ((None, 1), (49, 1), (48, 0)):
        caplog.clear()
        with caplog.at_level(logging.WARNING, "fastkernels"):
            LLM(str(folder), device="cpu", max_model_len=max_model_len, num_blocks=40)
        lines = [r.message for r in caplog.records if "LongRoPE" in r.message]
        assert len(lines) == times and all("at most 48" in line for line in lines)
