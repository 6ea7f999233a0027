"""A candidate's class that derives values from its weights is right in a live model, and undo leaves none of them."""

from __future__ import annotations

import copy
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

import fastkernels
from fastkernels.patch import PatchError

CLASS = """
import torch
from torch import nn

class TransformersLlamaRMSNorm(nn.Module):
    def prepare(self):
        {prepare}

    def forward(self, hidden_states):
        x = hidden_states.float()
        x = x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.variance_epsilon)
        return (x * self.doubled).to(hidden_states.dtype)
"""
KINDS = {
    "attribute": "self.doubled = self.weight.float() * 2",
    "buffer": "self.register_buffer('doubled', self.weight.float() * 2, persistent=False)",
    "parameter": "self.doubled = nn.Parameter(self.weight * 2)",
    "replaced": "self.doubled = self.weight * 2; self.training = None; self.weight = nn.Parameter(self.weight * 3)",
}


def llama() -> Any:
    torch.manual_seed(0)
    sizes: dict[str, Any] = {"hidden_size": 16, "intermediate_size": 24, "vocab_size": 8}
    config = transformers.LlamaConfig(**sizes, num_hidden_layers=1, num_attention_heads=2)
    model = transformers.LlamaModel(config).eval()
    with torch.no_grad():
        for name, p in model.named_parameters():
            if "norm" in name:
                p.uniform_(0.5, 1.5)
    return model


def doubled(model: Any) -> Any:
    """A copy whose norms have twice the weight: what the candidates compute."""
    made = copy.deepcopy(model)
    with torch.no_grad():
        for name, p in made.named_parameters():
            if "norm" in name:
                p.mul_(2)
    return made


def run(model: Any) -> torch.Tensor:
    with torch.no_grad():
        result: torch.Tensor = model(torch.arange(6)[None]).last_hidden_state
    return result


def attributes(model: Any) -> list[dict[str, Any]]:
    """All that modules hold, their tables of parameters, buffers and parts included."""
    return [
        {
            k: dict(v) if isinstance(v, dict) else set(v) if isinstance(v, set) else v
            for k, v in vars(m).items()
        }
        for m in model.modules()
    ]


def same(a: list[dict[str, Any]], b: list[dict[str, Any]]) -> bool:
    def equal(x: Any, y: Any) -> bool:
        if isinstance(x, dict):
            return x.keys() == y.keys() and all(x[k] is y[k] for k in x)
        return x == y if isinstance(x, set) else x is y

    return all(x.keys() == y.keys() and all(equal(x[k], y[k]) for k in x) for x, y in zip(a, b, strict=True))


def candidate(folder: Path, prepare: str) -> dict[str, str]:
    path = folder / "candidate.py"
    path.write_text(CLASS.replace("{prepare}", prepare))
    return {"rms_norm": str(path)}


@pytest.mark.parametrize("kind", KINDS)
def test_prepared_values_are_used_and_undone(kind: str, tmp_path: Path) -> None:
    model = llama()
    before, state, expected = run(model), attributes(model), run(doubled(model))
    with fastkernels.patch(model, ops=["rms_norm"], candidates=candidate(tmp_path, KINDS[kind])) as report:
        assert [row.modules for row in report.active] == [3]
        torch.testing.assert_close(run(model), expected)
    assert same(attributes(model), state)
    assert torch.equal(run(model), before)


@pytest.mark.parametrize("kind", ["attribute", "buffer", "parameter"])
def test_copies_have_no_prepared_values(kind: str, tmp_path: Path) -> None:
    model = llama()
    before, names = run(model), [set(vars(m)) for m in model.layers.modules()]
    with fastkernels.patch(model, ops=["rms_norm"], candidates=candidate(tmp_path, KINDS[kind])):
        copies = [copy.deepcopy(model), pickle.loads(pickle.dumps(model)), copy.copy(model.norm)]
    for made in copies[:2]:
        assert [set(vars(m)) for m in made.layers.modules()] == names
        assert not any("doubled" in name for name, _ in [*made.named_buffers(), *made.named_parameters()])
        assert torch.equal(run(made), before)
    assert not hasattr(copies[2], "doubled") and not hasattr(model.norm, "doubled")


def test_a_failing_prepare_changes_nothing(tmp_path: Path) -> None:
    model = llama()
    before, state = run(model), attributes(model)
    fails = "self.doubled = self.weight * 2; self.weights"
    with pytest.raises(
        PatchError, match=r"TransformersLlamaRMSNorm.prepare\(\) failed: AttributeError.*weights"
    ):
        fastkernels.patch(model, ops=["rms_norm"], candidates=candidate(tmp_path, fails))
    assert same(attributes(model), state)
    assert torch.equal(run(model), before)
