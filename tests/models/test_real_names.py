"""Names and shapes of public checkpoints, as recorded in checkpoints.json.xz, against the plan and the loader.

A recorded key such as `model.layers.{0..31}.mlp.up_proj.weight` stands for one of each number. Each row names its
source. total_size is that of the index.
"""

from __future__ import annotations

import itertools
import json
import lzma
import math
import re
from collections.abc import Mapping, Sequence
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from fastkernels.core import parallel
from fastkernels.models.common.checkpoints import weights
from fastkernels.models.common.checkpoints.weights import CheckpointError
from fastkernels.models.common.descriptions.description import Unsupported
from fastkernels.models.common.descriptions.registry import find, models
from fastkernels.models.common.plans import build
from fastkernels.models.common.plans.plan import plan

FILE = Path(__file__).parent / "checkpoints.json.xz"
RECORDED = {row["id"]: row for row in json.loads(lzma.decompress(FILE.read_bytes()))}
WHERE = Path("model-00001-of-00004.safetensors")
Shapes = Mapping[str, Sequence[int]]
LARGE = (
    "google/gemma-4-E4B",
    "google/gemma-4-12B",
    "google/gemma-4-26B-A4B",
    "Qwen/Qwen3-30B-A3B",
    "facebook/cwm",
    "MiniMaxAI/MiniMax-M2",
    "zai-org/GLM-4.5-Air",
    "zai-org/GLM-4.7-Flash",
    "rednote-hilab/dots.llm1.inst",
    "deepseek-ai/DeepSeek-V3.2",
    "zai-org/GLM-5",
    "Qwen/Qwen3-Next-80B-A3B-Instruct (4 layers)",
    "moonshotai/Kimi-Linear-48B-A3B-Instruct (5 layers)",
    "fla-hub/rwkv7-1.5B-world",
    "ai21labs/Jamba-v0.1",
)  # many keys
every_row = pytest.mark.parametrize(
    "name", [pytest.param(name, marks=pytest.mark.slow if name in LARGE else ()) for name in RECORDED]
)


def expanded(patterns: Shapes) -> dict[str, Sequence[int]]:
    """{key: shape} of all keys that the patterns stand for."""
    found: dict[str, Sequence[int]] = {}
    for pattern, shape in patterns.items():
        text, *rest = re.split(r"\{(\d+)\.\.(\d+)\}", pattern)
        ranges = [range(int(a), int(b) + 1) for a, b in zip(rest[::3], rest[1::3], strict=True)]
        for numbers in itertools.product(*ranges):
            key = text + "".join(f"{n}{t}" for n, t in zip(numbers, rest[2::3], strict=True))
            assert key not in found
            found[key] = shape
    return found


def bytes_of(key: str) -> int:
    """Bytes of an element, as recorded checkpoints have them."""
    return 1 if key.endswith(("_blocks", "_scales")) else 2


def config_of(name: str, folder: Path) -> Any:
    (folder / "config.json").write_text(json.dumps(RECORDED[name]["config"]))
    return build.load_config(folder)


def blank(config: Any, folder: Path) -> nn.Module:
    return build.skeleton(folder, config, torch.bfloat16)


def fill(model: nn.Module, config: Any, folder: Path, shapes: Shapes) -> dict[str, str]:
    """Load tensors of these shapes on the device 'meta'."""
    tensors = (
        (WHERE, key, lambda shape=shape: torch.empty(shape, device="meta")) for key, shape in shapes.items()
    )
    return weights.fill(model, tensors, find(config.architectures[0]).arch, config, folder)


@every_row
def test_recorded_names_fit_plan_and_loader(name: str, tmp_path: Path) -> None:
    config, row = config_of(name, tmp_path), RECORDED[name]
    made, shapes = plan(config, "bfloat16"), expanded(row["keys"])
    needed = {key: shapes[key] for item in made for key in item.keys}
    if (
        "quantization_config" not in row["config"]
    ):  # a tensor of these does not have one element for each value
        assert made.parameters == sum(map(math.prod, needed.values()))
    assert made.weight_bytes == sum(math.prod(shape) * bytes_of(key) for key, shape in needed.items())
    heads = getattr(config, "num_attention_heads", 2)  # none in a model without attention
    kv_heads = getattr(config, "num_key_value_heads", None) or heads
    for rank, size in ((0, 1), (1, 2)) if kv_heads % 2 == 0 else ((0, 1),):
        with parallel.build_as(rank, size):
            assert fill(blank(config, tmp_path), config, tmp_path, shapes).keys() == needed.keys()
    if "total_size" in row:  # in the index
        assert row["total_size"] == sum(math.prod(shape) * bytes_of(key) for key, shape in shapes.items())
    not_needed = {re.sub(r"\d+", "N", key) for key in shapes.keys() - needed.keys()}
    buffers = {
        f"gpt_neox.layers.N.attention.{name}" for name in ("bias", "masked_bias", "rotary_emb.inv_freq")
    }
    if config.model_type == "gpt_neox":
        allowed = buffers
    elif config.model_type == "qwen2_5_omni_thinker":
        allowed = {"audio_tower.audio_bos_eos_token.weight"}  # which transformers does not read, either
    elif getattr(config, "num_kv_shared_layers", 0):
        allowed = {f"model.layers.N.self_attn.{part}.weight" for part in ("k_proj", "v_proj", "k_norm")}
    else:
        allowed = {"lm_head.weight"} if made.tied else set()
    assert not_needed <= allowed


def named(keys: list[str]) -> str:
    """As a message lists them: the first eight, and the number of the others."""
    return ", ".join(keys[:8]) + (f" and {len(keys) - 8} more" if len(keys) > 8 else "")


@every_row
def test_wrong_names_and_shapes_are_named(name: str, tmp_path: Path) -> None:
    """The first key of each pattern: under another name, and with one row more."""
    config, row = config_of(name, tmp_path), RECORDED[name]
    model, whole = blank(config, tmp_path), expanded(row["keys"])
    needed = {key for item in plan(config) for key in item.keys}
    first = [next(iter(expanded({pattern: shape}))) for pattern, shape in row["keys"].items()]
    some = sorted(needed.intersection(first))
    renamed = {f"{key}_" if key in some else key: shape for key, shape in whole.items()}
    with pytest.raises(CheckpointError) as caught:
        fill(model, config, tmp_path, renamed)
    found = named([f"{key}_ ({WHERE})" for key in some])
    lacks, missing = "", some
    for pattern, what in find(config.architectures[0]).arch.needed.items():
        lacks += f"it lacks {what}: {named([key for key in missing if fnmatchcase(key, pattern)])}; "
        missing = [key for key in missing if not fnmatchcase(key, pattern)]
    assert str(caught.value) == (
        f"{tmp_path} does not fit {type(model).__name__}: {lacks}keys missing from it: {named(missing)};"
        f" keys that the model does not have: {found}"
    )
    for key in some:
        with pytest.raises(CheckpointError, match=re.escape(f"{WHERE}: {key} of shape ")):
            fill(model, config, tmp_path, {key: [whole[key][0] + 1, *whole[key][1:]]})


def test_config_with_unsupported_field_is_refused(tmp_path: Path) -> None:
    config = config_of("microsoft/Phi-4-mini-instruct", tmp_path)
    config.rope_parameters = {**config.rope_parameters, "rope_type": "dynamic"}
    with pytest.raises(
        Unsupported, match=r"config\.rope_parameters: rope_type='dynamic' is not supported, only"
    ):
        plan(config)


@pytest.mark.parametrize(
    ("name", "value", "allowed"),
    [
        ("expert_selection_fn", "tanh", "'softmax' and 'sigmoid'"),
        ("shared_expert_combination_strategy", "average", "'sum'"),
        ("hidden_act", "gelu", "'silu'"),
    ],
)
def test_other_experts_of_cohere_are_refused(name: str, value: str, allowed: str, tmp_path: Path) -> None:
    config = config_of("Cohere 2 MoE", tmp_path)
    setattr(config, name, value)
    with pytest.raises(Unsupported, match=f"config.{name}={value!r} is not supported, only {allowed}"):
        plan(config)


def test_every_language_model_has_recorded_names() -> None:
    recorded = {name for row in RECORDED.values() for name in row["config"]["architectures"]}
    assert recorded == {n for m in models().values() if m.arch.runner == "Generate" for n in m.arch.names}
    assert all(row["source"] for row in RECORDED.values())
