"""Faults planted in a running model: with weights, and in layers that keep a packed copy and no weight."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from fk_bench.quality import faults, planting
from fk_bench.quality.planting import Planting


class Layer(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.self_attn, self.mlp = torch.nn.Module(), torch.nn.Module()
        self.self_attn.o_proj = torch.nn.Linear(16, 16, bias=False)
        self.mlp.down_proj = torch.nn.Linear(16, 16, bias=False)
        self.norm = torch.nn.RMSNorm(16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.norm(x + self.self_attn.o_proj(x))
        return x + self.mlp.down_proj(x)


class Packed(torch.nn.Module):
    """A linear layer as vLLM has it on a CPU: the weight is empty, and the output a tuple."""

    def __init__(self, linear: torch.nn.Linear) -> None:
        super().__init__()
        self.copy = [linear.weight.detach().clone()]
        self.weight = torch.nn.Parameter(torch.empty(0))

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, None]:
        return torch.nn.functional.linear(x, self.copy[0]), None


class Model(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = torch.nn.ModuleList(Layer() for _ in range(3))
        self.config = SimpleNamespace(to_dict=lambda: {"num_attention_heads": 4, "model_type": "llama"})

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
        return x


def packed(model: Model) -> Model:
    """The same model; each linear layer keeps its weight where no fault finds it."""
    for layer in model.layers:
        for parent, name in ((layer.self_attn, "o_proj"), (layer.mlp, "down_proj")):
            setattr(parent, name, Packed(getattr(parent, name)))
    return model


class Unpacked(Model):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer.norm(x + layer.self_attn.o_proj(x)[0])
            x = x + layer.mlp.down_proj(x)[0]
        return x


@pytest.mark.parametrize("fault", faults.FAULTS)
@torch.inference_mode()
def test_fault_is_the_same_without_weights_and_is_undone(fault: str) -> None:
    x = torch.randn(5, 16, generator=torch.Generator().manual_seed(1))
    found = []
    for model in (Model(), packed(Unpacked())):
        before = model(x)
        planted = Planting({"model": model})
        assert planted.answer(fault) == {"planted": True}
        found.append(model(x))
        assert not torch.allclose(found[-1], before)
        planted.plant("")
        assert torch.equal(model(x), before)
    torch.testing.assert_close(found[0], found[1])


@torch.inference_mode()
def test_request_plants_and_undoes_in_the_same_model() -> None:
    x, model = torch.ones(1, 16), Model()
    before = model(x)
    planting.plant(model, "residual")
    assert not torch.equal(model(x), before)
    planting.plant(model, "")
    assert torch.equal(model(x), before)


def test_model_without_heads_says_so() -> None:
    model = Model()
    model.config.to_dict = lambda: {}
    found = Planting({"model": model}).answer("head")
    assert (found["planted"], found["concerns"]) == (False, False)


@torch.inference_mode()
def test_heads_are_those_of_each_tower() -> None:
    """16 channels are no multiple of the 3 heads of the other tower."""
    model = Model()
    model.layers[0].self_attn.o_proj = torch.nn.Linear(12, 12)
    for layer, heads in zip(model.layers, (3, 2, 8), strict=True):
        layer.self_attn.num_heads = heads
    before = [layer.self_attn.o_proj.weight.clone() for layer in model.layers]
    assert Planting({"model": model}).answer("head") == {"planted": True}
    for layer, old, size in zip(model.layers, before, (4, 8, 2), strict=True):
        first, second, rest = old.tensor_split((size, 2 * size), -1)
        assert torch.equal(layer.self_attn.o_proj.weight, torch.cat((second, first, rest), -1))


def test_reorder_permutes_the_response_norm_of_convnext() -> None:
    """Left in its order, the noise of the item was larger than its bound, and every set was invalid."""
    import timm

    torch.manual_seed(0)
    sizes = {"dims": (8, 16, 24, 32), "depths": (1, 1, 2, 1)}
    model = timm.create_model("convnextv2_base", pretrained=False, num_classes=5, **sizes).eval().double()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(0.0 if parameter.dim() > 1 else 1.0, 0.3)
    images, planting = torch.randn(2, 3, 64, 64, dtype=torch.float64), Planting({"model": model})
    with torch.inference_mode():
        reference = model(images)
        planting.plant("reorder")
        assert any(name.endswith("grn.weight") for name in planting.undo)
        torch.testing.assert_close(model(images), reference, rtol=1e-9, atol=1e-9)
        planting.plant("residual")
        assert not torch.allclose(model(images), reference)
