"""Random weights of one kind in all hosts: what is drawn in place, and what keeps its values."""

from __future__ import annotations

import pytest
import torch
from fk_bench.e2e.random_weights import draw
from torch import nn


class VocabParallelEmbedding(nn.Embedding):
    """As the hosts' class is named."""


class Model(nn.Module):
    """A tied head, a router with a bias and a correction, quantized weights with a scale, and a packed weight."""

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
        self.lm_head = nn.Linear(64, 100, bias=False)
        self.lm_head.weight = self.embed_tokens.weight


@pytest.fixture
def model() -> Model:
    made = Model()
    with torch.no_grad():
        for parameter in made.parameters():
            if parameter.dtype != torch.float8_e4m3fn and parameter is not made.quantized.weight_scale:
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


def test_quantized_weights_and_scales_keep_their_values(model: Model) -> None:
    draw(model)
    assert model.quantized.weight.float().eq(1).all() and model.quantized.weight_scale.eq(0.25).all()


def test_weights_depend_on_seed_and_name(model: Model) -> None:
    other = Model()
    draw(model, 1)
    draw(other, 1)
    assert torch.equal(model.router.weight, other.router.weight)
    draw(other, 2)
    assert not torch.equal(model.router.weight, other.router.weight)
