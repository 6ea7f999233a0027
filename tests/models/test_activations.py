"""Every activation of the one table: the modules of decoders and encoders, and plans, against transformers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from support.modules import randn
from support.tiny import make_tiny

from fastkernels import LLM, SamplingParams
from fastkernels.models.common.descriptions.activations import NAMES, TABLE, op_of
from fastkernels.models.common.descriptions.description import Unsupported
from fastkernels.models.common.layers.activation_modules import make, named
from fastkernels.models.common.plans.plan import plan

GREEDY = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)


@pytest.mark.parametrize("name", NAMES)
def test_modules_equal_transformers(name: str) -> None:
    from transformers.activations import ACT2FN

    x = 3 * randn(7, 2 * 65)
    function = ACT2FN[{"sqrelu": "relu2"}.get(name, name)]  # one is of flash-linear-attention
    expected = function(x)
    torch.testing.assert_close(named(name)(x), expected, atol=1e-5, rtol=1e-5)
    gate, up = x.chunk(2, dim=-1)
    torch.testing.assert_close(make(NAMES[name], gated=True)(x), function(gate) * up, atol=1e-5, rtol=1e-5)


# A model finds its activation by name: each name, and each model with a gate and without.
FAST = {("relu", "llama"), ("quick_gelu", "granite"), ("gelu", "starcoder2"), ("swish", "qwen3")}


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        pytest.param(name, kind, marks=[] if (name, kind) in FAST else pytest.mark.slow)
        for name in ("relu", "quick_gelu", "gelu", "swish")
        for kind in ("llama", "granite", "starcoder2", "qwen3")
    ],
)
def test_model_with_activation_equals_transformers(tmp_path: Path, kind: str, name: str, greedy: Any) -> None:
    folder = make_tiny(tmp_path, kind, "float32", hidden_act=name)
    prompt = list(range(20, 50))
    outputs = LLM(str(folder), device="cpu", max_model_len=64).generate([prompt], GREEDY)
    assert outputs[0].outputs[0].token_ids == greedy(folder, prompt, 8)
    op, arguments = op_of(NAMES[name], gated=kind != "starcoder2")
    found = [item for item in plan(folder) if item.path.endswith("act_fn")]
    assert found and all((item.op, dict(item.arguments)) == (op, arguments) for item in found)


def test_unknown_activation_is_refused_with_the_known_ones() -> None:
    with pytest.raises(Unsupported, match="hidden_act='xielu' is not supported, only silu, swish, gelu"):
        named("xielu")
    assert all(TABLE[ours] for ours in NAMES.values())
