"""The plan of every language model: its parameters and keys are those of transformers' checkpoints."""

from __future__ import annotations

import math

import pytest
from safetensors import safe_open
from support.tiny import MODELS, make_tiny

from fastkernels.models.common.plan import plan


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
