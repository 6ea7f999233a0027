"""Reading config.json without transformers gives the same fields, or leaves it to transformers."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from support.kernels import warm
from support.tiny import KINDS, SIZES

from fastkernels.models.common.configs import config
from fastkernels.models.common.descriptions import description
from fastkernels.models.common.plans import build
from fastkernels.models.common.plans.plan import plan
from fastkernels.overrides.block.attention_sizes import head_size, rope_parameters
from fastkernels.overrides.block.self_attention import sliding_window

NEW = {"rope_parameters": {"rope_type": "default", "rope_theta": 20000.0}}
OLD = {
    "torch_dtype": "float16", "rope_theta": 500000.0, "eos_token_id": [7, 8],
    "rope_scaling": {
        "rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
        "original_max_position_embeddings": 256,
    },
}  # fmt: skip
READ = (
    "vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads",
    "num_key_value_heads", "max_position_embeddings", "rms_norm_eps", "hidden_act", "tie_word_embeddings",
    "attention_bias", "mlp_bias", "bias", "qkv_bias", "eos_token_id", "architectures", "sliding_window", "is_causal",
    "num_local_experts", "num_experts_per_tok", "rope_is_neox_style", "dual_chunk_attention_config", "dtype",
)  # fmt: skip


def plain(kind: str, **fields: Any) -> dict[str, Any]:
    """A typical config.json; None removes a field."""
    made = {
        **SIZES, **KINDS[kind][1], "model_type": kind, "architectures": [f"{KINDS[kind][0]}ForCausalLM"],
        "hidden_act": "silu", "rms_norm_eps": 1e-5, **({} if "torch_dtype" in fields else {"dtype": "bfloat16"}),
        **({} if "rope_theta" in fields else NEW), **fields,
    }  # fmt: skip
    if "rope_theta" in fields:
        made.pop("rope_parameters", None)
    return {k: v for k, v in made.items() if v is not None}


def written(folder: Path, fields: dict[str, Any]) -> Path:
    (folder / "config.json").write_text(json.dumps(fields))
    return folder


def seen(found: Any) -> dict[str, Any]:
    """The fields of a config that models and the engine read."""
    layers = [sliding_window(found, f"model.layers.{i}") for i in range(found.num_hidden_layers)]
    rope = {k: v for k, v in rope_parameters(found).items() if v is not None}
    own = {name: getattr(found, name, None) or None for name in READ}
    return {**own, "rope": rope, "head_size": head_size(found), "windows": layers}


@pytest.mark.parametrize("kind", ["llama", "qwen3", "mixtral"])
@pytest.mark.parametrize(
    "fields", [{}, OLD, {"rope_theta": 1e6, "head_dim": 64}, {"tie_word_embeddings": True}]
)
def test_plain_config_equals_transformers(tmp_path: Path, kind: str, fields: dict[str, Any]) -> None:
    from transformers import AutoConfig

    folder = written(tmp_path, plain(kind, **fields))
    found = config.read(folder)
    assert found is not None
    assert seen(found) == seen(AutoConfig.from_pretrained(folder))


def test_config_without_head_dim_or_with_window(tmp_path: Path) -> None:
    from transformers import AutoConfig

    for kind, fields in (("llama", {"head_dim": None}), ("mixtral", {"sliding_window": 16}), ("qwen3", OLD)):
        folder = written(tmp_path, plain(kind, **fields))
        found = config.read(folder)
        assert found is not None
        assert seen(found) == seen(AutoConfig.from_pretrained(folder)), kind


@pytest.mark.parametrize("kind", ["llama", "qwen3", "mixtral"])
def test_fields_with_defaults_may_be_missing(tmp_path: Path, kind: str) -> None:
    """Configs of 2023, such as those of Llama 2's first conversions, have no attention_bias."""
    fields = plain(kind, attention_bias=None, mlp_bias=None)
    assert "attention_bias" not in fields
    assert config.read(written(tmp_path, fields)) is not None
    assert (
        plan(tmp_path).parameters == plan(written(tmp_path, {**fields, "attention_bias": False})).parameters
    )


@pytest.mark.parametrize("kind", ["llama", "qwen3", "mixtral"])
@pytest.mark.parametrize("name", ["eos_token_id", "hidden_act", "rms_norm_eps", "rope_parameters"])
def test_missing_field_has_transformers_default(tmp_path: Path, kind: str, name: str) -> None:
    from transformers import AutoConfig

    folder = written(tmp_path, plain(kind, **{name: None}))
    found = config.read(folder)
    assert found is not None
    assert seen(found) == seen(AutoConfig.from_pretrained(folder))
    folder = written(tmp_path, found.to_dict())
    assert seen(found) == seen(AutoConfig.from_pretrained(folder)) == seen(config.read(folder))


@pytest.mark.parametrize("kind", ["llama", "qwen3", "mixtral"])
def test_config_without_end_token(tmp_path: Path, kind: str) -> None:
    from transformers import AutoConfig

    folder = written(tmp_path, {**plain(kind), "eos_token_id": None})
    found = config.read(folder)
    assert found is not None and found.eos_token_id is None
    assert seen(found) == seen(AutoConfig.from_pretrained(folder))


def test_config_saved_by_transformers_is_plain(tiny: Path) -> None:
    from transformers import AutoConfig

    found = config.read(tiny)
    assert found is not None and seen(found) == seen(AutoConfig.from_pretrained(tiny))


@pytest.mark.parametrize(
    "fields",
    [
        {"model_type": "gemma2"}, {"vocab_size": None}, {"vocab_size": "512"}, {"num_hidden_layers": True},
        {"hidden_size": 0}, {"num_attention_heads": 6}, {"rms_norm_eps": 1}, {"architectures": None},
        {"dtype": "int8"}, {"quantization_config": {}}, {"use_sliding_window": True}, {"rope_theta": "many"},
        {"rope_parameters": {"rope_type": "yarn", "rope_theta": 1e4}}, {"partial_rotary_factor": 0.5},
        {"tie_word_embeddings": None}, {"layer_types": ["sliding_attention"] * 2},
    ],
)  # fmt: skip
def test_other_configs_are_left_to_transformers(tmp_path: Path, fields: dict[str, Any]) -> None:
    assert config.read(written(tmp_path, plain("llama", **fields))) is None


def test_qwen3_without_head_dim_is_not_plain(tmp_path: Path) -> None:
    assert config.read(written(tmp_path, plain("qwen3", head_dim=None))) is None
    assert build.load_config(tmp_path).head_dim == 128  # transformers' default


def test_missing_and_invalid_files_are_not_plain(tmp_path: Path) -> None:
    assert config.read(tmp_path) is None
    for text in ("{", "[1]", '"llama"'):
        (tmp_path / "config.json").write_text(text)
        assert config.read(tmp_path) is None


def test_engine_without_tokenizer_skips_slow_imports(tiny: Path) -> None:
    code = (
        "import sys; from fastkernels import LLM, SamplingParams;"
        f"llm = LLM({str(tiny)!r}, device='cpu', skip_tokenizer_init=True, num_blocks=9, max_model_len=64);"
        "llm.generate([[5, 6]], SamplingParams(max_tokens=2));"
        "print([m for m in ('transformers', 'torch._dynamo', 'torch._inductor', 'sympy') if m in sys.modules])"
    )
    done = warm.run(["-c", code])
    assert done.returncode == 0, done.stderr
    assert done.stdout.split("\n")[-2] == "[]"


def test_older_config_keeps_its_rope_scaling() -> None:
    """As transformers 4 has it: theta, scaling and partial factor are fields of their own."""
    older = SimpleNamespace(
        hidden_size=64, num_attention_heads=2, head_dim=None, rope_theta=None, partial_rotary_factor=0.5,
        rope_scaling={"rope_type": "linear", "factor": 8.0},
    )  # fmt: skip
    expected = {"rope_type": "linear", "factor": 8.0, "rope_theta": 10000.0, "partial_rotary_factor": 0.5}
    assert rope_parameters(older) == description.rope(older, partial=True) == expected
    assert head_size(older) == description.head_size(older) == 32
    by_type = SimpleNamespace(rope_parameters={"full": {"rope_theta": 1e6}, "sliding": {"rope_theta": 1e4}})
    assert rope_parameters(by_type, "full") == {"rope_theta": 1e6}
    older.num_attention_heads = 3
    for function, error in ((head_size, ValueError), (description.head_size, description.Unsupported)):
        with pytest.raises(error, match=r"config\.hidden_size=64 is not a multiple of num_attention_heads=3"):
            function(older)
