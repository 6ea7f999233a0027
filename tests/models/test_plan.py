"""The plan of every language model: its parameters and keys are those of transformers' checkpoints."""

from __future__ import annotations

import math

import pytest
from safetensors import safe_open
from support.tiny import MODELS, make_tiny

from fastkernels.models.common.plans.plan import plan


@pytest.mark.parametrize("name", MODELS)
def test_plan_has_checkpoint_keys_and_sizes(name: str, tmp_path_factory: pytest.TempPathFactory) -> None:
    kind, fields = MODELS[name]
    folder = make_tiny(tmp_path_factory.mktemp("plan") / name, kind, "float32", **fields)
    made = plan(str(folder))
    with safe_open(folder / "model.safetensors", framework="pt") as file:
        sizes = {k: math.prod(file.get_slice(k).get_shape()) for k in file.keys()}  # noqa: SIM118
    keys = [k for k in sizes if not (made.tied and k == "lm_head.weight")]
    assert sorted(k for item in made for k in item.keys) == sorted(keys)
    assert made.weight_bytes == 4 * made.parameters == 4 * sum(sizes[k] for k in keys)


PUBLISHED = {  # thousand million parameters, as their model cards state
    "deepseek-r1": 671.0, "deepseek-v2-lite": 15.7, "moonlight-16b-a3b": 16.0, "dots.llm1": 142.8,
    "gemma-2-9b": 9.24, "glm-4.5-air": 106.9, "granite-3.3-8b": 8.17, "glm-5": 744.0, "llama-3.1-8b": 8.03,
    "llama-3.2-3b": 3.21, "mixtral-8x7b": 46.7, "olmo-2-1124-7b": 7.30, "phi-4": 14.7, "qwen2.5-0.5b": 0.494,
    "mamba2-2.7b": 2.70, "mamba-2.8b": 2.77, "mamba-codestral-7b-v0.1": 7.29, "jamba-v0.1": 51.6,
    "qwen3-next-80b-a3b": 80.0,
    "qwen2.5-7b": 7.62, "qwen2.5-14b": 14.8, "qwen2.5-32b": 32.8, "qwen3-4b": 4.02, "qwen3-14b": 14.8,
}  # fmt: skip


def test_cache_of_latents_has_one_vector_a_token() -> None:
    """70 kB a token in bfloat16, where keys and values of 128 heads would take 5 MB."""
    from fk_bench.e2e.model_configs import load_config

    made = plan(load_config("deepseek-r1")[1])
    assert made.kv_bytes_per_token == 61 * (512 + 64) * 2
    assert made.kv_bytes(1000) == 1000 * made.kv_bytes_per_token
    # 37 thousand million parameters are active, as published; the embedding counts as one row
    assert made.read_bytes / 2e9 == pytest.approx(37, rel=0.02)


def test_states_count_for_each_sequence() -> None:
    """Mamba-2 2.7B: 64 layers with 80 heads of 64 x 128 numbers in float32, and three inputs of 5,376 channels."""
    from fk_bench.e2e.model_configs import load_config

    made = plan(load_config("mamba2-2.7b")[1])
    assert made.state_bytes == 64 * (4 * 80 * 64 * 128 + 2 * 3 * 5376)
    assert made.kv_bytes(1000) == made.kv_bytes_per_token == 0


@pytest.mark.parametrize("name", PUBLISHED)
def test_public_sizes_give_the_published_parameters(name: str) -> None:
    from fk_bench.e2e.model_configs import load_config

    assert plan(load_config(name)[1]).parameters / 1e9 == pytest.approx(PUBLISHED[name], rel=5e-3)


@pytest.mark.parametrize("kind", ["indexed_attention", "deepseek_sparse_attention"])
def test_sparse_layers_have_a_name_of_each_release(kind: str) -> None:
    from fk_bench.e2e.model_configs import load_config

    config = load_config("deepseek-v3.2")[1]
    config.layer_types = [kind] * config.num_hidden_layers
    assert "mla_sparse" in plan(config).ops()


def test_other_objects_and_dtypes_are_refused() -> None:
    from fk_bench.e2e.model_configs import load_config

    for model in (None, 3, ["folder"]):
        with pytest.raises(
            ValueError, match="model must be a config of transformers, a folder or a hub id, got"
        ):
            plan(model)
    with pytest.raises(ValueError, match="dtype 'fp4' is not one of float32, float16, bfloat16, float64"):
        plan(load_config("llama-3.2-1b")[1], "fp4")
