"""The probes that read a description off recorded values."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from fk_bench.scaffold.samples import equal, normal
from fk_integrations.transformers import decoder_probes as probe
from fk_integrations.transformers import tiny_models
from fk_integrations.transformers.decoder_roles import Unexplained, observe
from fk_integrations.transformers.recording import record
from fk_integrations.transformers.recurrent_roles import find
from support.tiny import KINDS, SIZES
from torch import nn

from fastkernels.models.common.descriptions import registry
from fastkernels.models.common.descriptions.description import Attention, Decoder, Norm, Recurrent, limits
from fastkernels.models.common.layers.decoder import make_norm


def tiny_config(kind: str, **fields: Any) -> Any:
    import transformers

    prefix, differs = KINDS[kind]
    cls = getattr(transformers, f"{prefix}Config")
    given = {**SIZES, **differs, **fields}
    config = cls(**{k: v for k, v in given.items() if not isinstance(getattr(cls, k, None), property)})
    config.architectures = [f"{prefix}ForCausalLM"]
    return config


@pytest.mark.parametrize("kind", ["rms", "gemma", "layer"])
@pytest.mark.parametrize("eps", [1e-5, 1e-6, 1e-12])
def test_norm_is_found(kind: str, eps: float) -> None:
    module = make_norm(Norm(kind, eps, bias=kind == "layer"), 48)
    for p in module.parameters():
        p.data = torch.randn(48)
    found = probe.find_norm(module, 48)
    assert found is not None and (found.kind, found.bias) == (kind, kind == "layer")
    assert found.eps == pytest.approx(eps, rel=2e-3)
    assert probe.find_norm(module, 24) is None


@pytest.mark.parametrize("module", [nn.Linear(8, 8), nn.GroupNorm(2, 8), nn.Softmax(-1), nn.PReLU(8)])
def test_other_modules_are_no_norm(module: nn.Module) -> None:
    assert probe.find_norm(module, 8) is None


def test_linear_is_told_from_its_transpose() -> None:
    x, linear = torch.randn(5, 8), nn.Linear(8, 8)
    assert probe.is_linear(linear, x, linear(x))
    assert not probe.is_linear(linear, x, x @ linear.weight + linear.bias)


def test_scales_and_caps_are_measured() -> None:
    x = torch.randn(7, 9) * 20
    assert probe.ratio(x * 0.3, x) == pytest.approx(0.3)
    assert probe.ratio(x + 1, x) is None
    assert probe.cap(30 * torch.tanh(x / 30), x) == pytest.approx(30, rel=1e-4)
    assert probe.cap(x.clamp(-30, 30), x) is None


def test_rotation_leaves_its_input() -> None:
    x = torch.randn(2, 5, 16)
    before = x.clone()
    half = Attention(2, 2, 16, rope={"rope_theta": 1e4, "partial_rotary_factor": 0.5})
    turned = probe.rotated(half, x)
    assert torch.equal(x, before) and torch.equal(turned[..., 8:], x[..., 8:])
    assert not probe.same(turned, x) and probe.same(turned[:, :1], x[:, :1])


@pytest.mark.parametrize("groups, best", [(1, 1), (2, 1), (3, 2)])
def test_router_with_a_correction_is_found(groups: int, best: int) -> None:
    small = tiny_models.shrunk(tiny_models.read("solar_open"))
    given = {"n_group": groups, "topk_group": best, "routed_scaling_factor": 1.5, "num_hidden_layers": 2}
    config = tiny_models.changed(small, **given, norm_topk_prob=groups == 1)
    found = observe(tiny_models.build(config), config)
    assert found.names["correction"] == "mlp.gate.e_score_correction_bias"
    for layer in found.decoder.layers:
        experts = layer.mlp
        assert (experts.groups, experts.top_groups, experts.top_k) == (groups, best, 2)
        assert experts.scoring == "sigmoid" and experts.correction and experts.normalize is (groups == 1)
        assert experts.scale == pytest.approx(1.5, rel=1e-4)


RECURRENT = {  # kind: (fields that differ from KINDS)
    "mamba": {"use_bias": True, "use_conv_bias": False},
    "mamba2": {"n_groups": 4, "use_bias": True, "time_step_limit": [0.5, 0.9]},
    "jamba": {"num_hidden_layers": 3},
    "qwen3_next": {"mlp_only_layers": [1]},
}


@pytest.mark.parametrize("kind", RECURRENT)
def test_recurrent_layers_are_described(kind: str) -> None:
    """The description read off a model equals that of the model file."""
    config = tiny_config(kind, **RECURRENT[kind])
    found = observe(tiny_models.build(config), config)
    assert equal(_unnamed(normal(found.decoder)), _unnamed(normal(registry.describe(config))))
    recurrent = [layer for layer in found.decoder.layers if isinstance(layer.attention, Recurrent)]
    assert recurrent and found.names["mixer.A"] == f"{recurrent[0].name('self_attn')}.A_log"


def _unnamed(decoder: Decoder) -> Decoder:
    """The description without the name of the MLP, which the scaffold knows of experts only."""
    return replace(decoder, layers=tuple(replace(layer, names={}) for layer in decoder.layers))


def test_tensors_with_other_names_are_found() -> None:
    """Shapes and values tell A, D and the bias of time steps apart."""
    config = tiny_config("mamba2", num_hidden_layers=1)
    model = tiny_models.build(config)
    mixer = model.get_submodule("backbone.layers.0.mixer")
    made = record(model, config.vocab_size)
    other = {"D": "first", "dt_bias": "second", "A_log": "third"}
    own = dict(mixer.named_parameters(recurse=False))
    mixer._parameters.clear()
    mixer._parameters.update({other[name]: p for name, p in own.items()})
    found = find(made, "backbone.layers.0", config)
    assert found is not None
    assert {role: found.names[f"mixer.{role}"] for role in ("A", "D", "dt_bias")} == {
        "A": "mixer.third", "D": "mixer.first", "dt_bias": "mixer.second"
    }  # fmt: skip


def test_other_activation_is_no_description() -> None:
    config = tiny_config("mamba", num_hidden_layers=1, hidden_act="gelu")
    with pytest.raises(Unexplained, match=r"backbone\.layers\.0\.mixer: a convolution and a recurrence"):
        observe(tiny_models.build(config), config)


def test_limits_of_time_steps_are_plain_numbers() -> None:
    assert limits([0, float("inf")]) == (0.0, None) and limits((0.25, 2)) == (0.25, 2.0)
