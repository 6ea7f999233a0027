"""Planted faults change what they name, a reordered model stays the same, and what cannot be planted is refused."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from fk_bench.quality import faults
from fk_bench.quality.faults import CannotPlant, NoHeads
from safetensors.torch import load_file, save_file
from support.llada import Llada, make_tiny_llada
from support.tiny import make_tiny


def tiny_bert(folder: Path) -> Path:
    from transformers import BertConfig, BertModel

    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
    BertModel(BertConfig(vocab_size=64, **sizes)).save_pretrained(folder)
    return folder


@pytest.mark.parametrize("kind", ["llama", "bert", "gemma2", "olmo2"])
def test_reordered_model_is_the_same_and_faults_differ(kind: str, tmp_path: Path) -> None:
    from transformers import AutoModel

    model = tiny_bert(tmp_path / kind) if kind == "bert" else make_tiny(tmp_path / kind, kind, "float32")
    tokens = torch.arange(5, 37)[None]

    def hidden(folder: Path) -> torch.Tensor:
        loaded = AutoModel.from_pretrained(folder, dtype=torch.float64).eval()
        with torch.inference_mode():
            return loaded(input_ids=tokens).last_hidden_state

    (model / "1_Pooling").mkdir()
    (model / "1_Pooling/config.json").write_text("{}")
    reference = hidden(model)
    for name in (faults.REORDER, *faults.FAULTS):
        gap = (
            (hidden(faults.faulty_checkpoint(model, name, tmp_path / f"{kind}-{name}")) - reference)
            .abs()
            .max()
        )
        assert gap < 1e-6 if name == faults.REORDER else gap > 1e-3, name
    assert (tmp_path / f"{kind}-{faults.REORDER}/1_Pooling/config.json").is_file()
    (changed,) = (tmp_path / f"{kind}-{faults.REORDER}").glob("*.safetensors")
    (before,) = model.glob("*.safetensors")
    differ = [n for n, t in load_file(before).items() if not torch.equal(t, load_file(changed)[n])]
    assert differ and all(("proj" in n or "dense" in n or "experts" in n) for n in differ)


def weights() -> dict[str, torch.Tensor]:
    return {
        f"model.layers.{i}.{n}.weight": torch.randn(*shape)
        for i in range(3)
        for n, shape in (("self_attn.o_proj", (8, 12)), ("mlp.down_proj", (8, 16)), ("input_layernorm", (8,)))
    }


def test_faults_change_exactly_their_weights() -> None:
    given = weights()
    found = {f: faults.planted(f, given, given.__getitem__, 3) for f in faults.FAULTS}
    assert [*found["residual"]] == ["model.layers.1.mlp.down_proj.weight"]
    assert not found["residual"]["model.layers.1.mlp.down_proj.weight"].any()
    assert len(found["head"]) == 3 and len(found["scale"]) == 3
    name = "model.layers.0.self_attn.o_proj.weight"
    old, new = given[name], found["head"][name]
    assert torch.equal(new[:, :4], old[:, 4:8]) and torch.equal(new[:, 4:8], old[:, :4])
    assert torch.equal(new[:, 8:], old[:, 8:])
    name = "model.layers.0.input_layernorm.weight"
    torch.testing.assert_close(found["scale"][name], given[name] * 1.01)
    shifted = faults.planted("scale", given, given.__getitem__, 3, plus_one=True)[name]
    torch.testing.assert_close(1 + shifted, (1 + given[name]) * 1.01)


def test_what_cannot_be_planted_is_refused(tmp_path: Path) -> None:
    given = weights()
    with pytest.raises(NoHeads, match="has 1 attention heads"):
        faults.planted("head", given, given.__getitem__, 1)
    with pytest.raises(CannotPlant, match="no multiple of 5 heads"):
        faults.planted("head", given, given.__getitem__, 5)
    with pytest.raises(CannotPlant, match="no weights of the kind"):
        faults.planted("residual", ["a.weight"], lambda name: torch.ones(3), 4)
    packed = {n: t.to(torch.int8) for n, t in given.items()}
    save_file(packed, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text(json.dumps({"num_attention_heads": 3}))
    with pytest.raises(CannotPlant, match="unquantized"):
        faults.faulty_checkpoint(tmp_path, "head", tmp_path / "faulty")


def test_model_without_mlps_loses_its_middle_mixer() -> None:
    names = [f"backbone.layers.{i}.mixer.{n}.weight" for i in range(3) for n in ("in_proj", "out_proj")]
    changed = faults.planted("residual", names, lambda name: torch.ones(4, 4), 0)
    assert list(changed) == ["backbone.layers.1.mixer.out_proj.weight"]
    assert not changed["backbone.layers.1.mixer.out_proj.weight"].any()


def test_model_without_layers_gets_faults_of_its_matrices() -> None:
    given = {f"arch.{i}.linear.weight": torch.full((2, 3), float(i)) for i in range(12)}
    given["arch.0.linear.bias"] = torch.ones(2)
    changed = faults.planted("residual", given, given.__getitem__, 0)
    assert {n: bool(t.any()) for n, t in changed.items()} == {"arch.6.linear.weight": False}
    scaled = faults.planted("scale", given, given.__getitem__, 0)
    assert len(scaled) == 12 and torch.allclose(scaled["arch.7.linear.weight"], torch.tensor(7.07))


def test_heads_of_a_convolution_are_its_input_channels() -> None:
    weight = torch.arange(8.0).view(2, 4, 1, 1)
    changed = faults.planted("head", ["a.attn.proj.conv.weight"], lambda name: weight, 2)
    assert changed["a.attn.proj.conv.weight"].flatten().tolist() == [2, 3, 0, 1, 6, 7, 4, 5]


def test_faults_of_diffusion_models_are_planted(tmp_path: Path) -> None:
    model, ids = make_tiny_llada(tmp_path / "llada"), list(range(5, 37))
    reference = Llada(model).logits(ids)
    for name in (faults.REORDER, *faults.FAULTS):
        found = Llada(faults.faulty_checkpoint(model, name, tmp_path / name)).logits(ids)
        gap = (found - reference).abs().max()
        assert gap < 1e-6 if name == faults.REORDER else gap > 1e-3, name


def test_norm_without_weights_is_scaled_by_its_modulation() -> None:
    name = "flow.blocks.0.attn_norm.linear.bias"
    given = {"llm.norm.weight": torch.ones(2), name: torch.arange(12.0)}
    found = faults.planted("scale", given, given.__getitem__, 0)
    assert set(found) == set(given)
    assert found[name].sub(given[name]).view(6, 2)[[1, 4]].sub(0.01).abs().max() < 1e-6
    assert torch.equal(found[name].view(6, 2)[[0, 2, 3, 5]], given[name].view(6, 2)[[0, 2, 3, 5]])
