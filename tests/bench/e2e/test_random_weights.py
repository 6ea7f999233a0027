"""Random weights of one kind in all hosts: what is drawn in place, and what keeps its values."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from fk_bench.offline.random_weights import FLOATS, draw
from torch import nn


class VocabParallelEmbedding(nn.Embedding):
    """As the hosts' class is named."""


def of_triton(shape: tuple[int, ...]) -> SimpleNamespace:
    """As vLLM holds MXFP4 weights for Triton's kernels: in a wrapper, transposed."""
    data = torch.zeros(shape, dtype=torch.uint8).transpose(-2, -1)
    return SimpleNamespace(storage=SimpleNamespace(data=data))


class Model(nn.Module):
    """A tied head, a router with a bias and a correction, weights of several quantizations, and an empty weight."""

    def __init__(self) -> None:
        super().__init__()
        self.embed_tokens = VocabParallelEmbedding(100, 64)
        self.norm = nn.LayerNorm(64)
        self.router, self.other = nn.Linear(64, 32), nn.Linear(64, 32, dtype=torch.bfloat16)
        self.router.register_buffer("e_score_correction_bias", torch.rand(32))
        self.packed = nn.Linear(0, 4)
        self.quantized = nn.Module()
        self.quantized.weight = nn.Parameter(torch.ones(8, 8).to(torch.float8_e4m3fn), requires_grad=False)
        self.quantized.weight_scale = nn.Parameter(torch.full((8, 1), 0.25))
        self.int4 = nn.Module()
        self.int4.qweight = nn.Parameter(torch.zeros(64, 8, dtype=torch.int32), requires_grad=False)
        self.int4.g_idx = nn.Parameter(torch.arange(64, dtype=torch.int32), requires_grad=False)
        self.int4.qzeros = nn.Parameter(torch.full((4, 8), 7, dtype=torch.int32), requires_grad=False)
        self.experts = nn.Module()
        self.experts.w13_weight, self.experts.w2_weight = of_triton((4, 8, 64)), of_triton((4, 64, 8))
        self.experts.quant_method = SimpleNamespace(
            w13_precision_config=SimpleNamespace(weight_scale=of_triton((4, 8, 2))),
            w2_precision_config=SimpleNamespace(weight_scale=of_triton((4, 2, 8))),
        )
        self.lm_head = nn.Linear(64, 100, bias=False)
        self.lm_head.weight = self.embed_tokens.weight


@pytest.fixture
def model() -> Model:
    made = Model()
    with torch.no_grad():
        for parameter in made.parameters():
            if parameter.dtype in FLOATS and parameter is not made.quantized.weight_scale:
                parameter.uniform_(-1e-3, 1e-3)
    return made


def test_weights_are_drawn_in_place(model: Model) -> None:
    addresses = {name: p.data_ptr() for name, p in model.named_parameters()}
    draw(model)
    assert {name: p.data_ptr() for name, p in model.named_parameters()} == addresses
    assert model.norm.weight.eq(1).all() and not model.norm.bias.any()
    assert not model.router.bias.any() and not model.router.e_score_correction_bias.any()
    assert 0.018 < model.router.weight.std() < 0.022 and 0.018 < model.other.weight.float().std() < 0.022
    assert 9 < model.lm_head.weight.std() < 11  # tied: as the embedding
    assert not torch.equal(model.router.weight, model.other.weight.float())


def test_quantized_weights_get_random_bits_and_keep_scales(model: Model) -> None:
    draw(model)
    assert 0.7 < model.quantized.weight.float().std() < 1.3 and model.quantized.weight_scale.eq(0.25).all()
    halves = model.int4.qweight.view(torch.int16)
    assert len(halves.unique()) > 0.9 * halves.numel()
    assert model.int4.g_idx.equal(torch.arange(64, dtype=torch.int32)) and model.int4.qzeros.eq(7).all()


@pytest.mark.parametrize("times", [1.0, 2.0**119])
def test_factors_of_nvfp4_experts_are_equal_and_finite(times: float) -> None:
    experts = nn.Module()
    experts.w13_weight_scale_2 = nn.Parameter(times / torch.linspace(-1e-3, 1e-3, 128))
    experts.w2_input_global_scale = nn.Parameter(torch.full((128,), 0.25))
    assert bool(torch.isinf(experts.w13_weight_scale_2).any()) == (times > 1)
    draw(experts)
    assert experts.w13_weight_scale_2.eq(0.01 * times).all() and experts.w2_input_global_scale.eq(0.25).all()


def test_weights_for_kernels_of_triton_are_drawn(model: Model) -> None:
    experts = model.experts
    addresses = [w.storage.data.data_ptr() for w in (experts.w13_weight, experts.w2_weight)]
    draw(model)
    for weight, address in zip((experts.w13_weight, experts.w2_weight), addresses, strict=True):
        assert weight.storage.data.data_ptr() == address and len(weight.storage.data.unique()) > 200
    method = experts.quant_method
    for config in (method.w13_precision_config, method.w2_precision_config):
        assert config.weight_scale.storage.data.eq(120).all()


def test_weights_depend_on_seed_and_name(model: Model) -> None:
    other = Model()
    draw(model, 1)
    draw(other, 1)
    assert torch.equal(model.router.weight, other.router.weight)
    draw(other, 2)
    assert not torch.equal(model.router.weight, other.router.weight)
