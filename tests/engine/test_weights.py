"""Checkpoints that cannot be loaded: the error says which file and which keys."""

from __future__ import annotations

import json
import shutil

import pytest
from safetensors.torch import load_file, save_file

from fastkernels import LLM
from fastkernels.models.registry import model_class
from fastkernels.models.weights import CheckpointError, resolve
from fastkernels.registry import UnknownName


@pytest.fixture()
def copy(tiny, tmp_path):
    return shutil.copytree(tiny, tmp_path / "copy")


def fails(folder, *parts):
    with pytest.raises(CheckpointError) as caught:
        LLM(str(folder), device="cpu")
    for part in parts:
        assert part in str(caught.value)


def edit(folder, change):
    file = folder / "model.safetensors"
    tensors = load_file(file)
    change(tensors)
    save_file(tensors, file, metadata={"format": "pt"})


def test_missing_keys(copy):
    edit(copy, lambda t: [t.pop(f"model.layers.1.self_attn.{n}_proj.weight") for n in "kv"])
    fails(copy, str(copy), "missing", "model.layers.1.self_attn.k_proj.weight", "self_attn.v_proj.weight")


def test_leftover_keys(copy):
    edit(copy, lambda t: t.update({"model.layers.7.mlp.extra.weight": t["model.norm.weight"].clone()}))
    fails(copy, "does not have", "model.layers.7.mlp.extra.weight (model.safetensors)")


def test_wrong_shape(copy):
    edit(copy, lambda t: t.update({"model.norm.weight": t["model.norm.weight"][:100].clone()}))
    fails(copy, "model.norm.weight", "(100,)", "model.safetensors")


def test_truncated_file(copy):
    file = copy / "model.safetensors"
    file.write_bytes(file.read_bytes()[:100_000])
    fails(copy, "model.safetensors", "truncated")


def test_shards_load_and_a_missing_shard_is_named(copy, greedy):
    file = copy / "model.safetensors"
    tensors = load_file(file)
    file.unlink()
    keys = sorted(tensors)
    shards = {"a.safetensors": keys[::2], "b.safetensors": keys[1::2]}
    for name, part in shards.items():
        save_file({k: tensors[k] for k in part}, copy / name, metadata={"format": "pt"})
    index = {"metadata": {}, "weight_map": {k: name for name, part in shards.items() for k in part}}
    (copy / "model.safetensors.index.json").write_text(json.dumps(index))
    out = LLM(str(copy), device="cpu").generate([[5, 6, 7]])[0].outputs[0]
    assert len(out.token_ids) == 16 or out.finish_reason == "stop"
    (copy / "b.safetensors").unlink()
    fails(copy, "b.safetensors")


def test_no_weights_and_no_config(copy, tmp_path):
    (copy / "model.safetensors").unlink()
    fails(copy, "model.safetensors", str(copy))
    (tmp_path / "empty").mkdir()
    fails(tmp_path / "empty", "config.json")
    fails(tmp_path / "nowhere", "neither a folder nor a hub id")


def test_config_that_is_no_json(copy):
    (copy / "config.json").write_text('{"architectures": [')
    fails(copy, "config.json")


def test_unknown_architecture(copy):
    config = json.loads((copy / "config.json").read_text())
    (copy / "config.json").write_text(json.dumps({**config, "architectures": ["LlamaForCausalML"]}))
    with pytest.raises(UnknownName, match=r"LlamaForCausalML.*LlamaForCausalLM"):
        LLM(str(copy), device="cpu")
    with pytest.raises(UnknownName):
        model_class("GPT5")


def test_resolve_keeps_a_folder(tiny):
    assert resolve(str(tiny)) == tiny


def test_cache_too_small_for_the_length_says_so(tiny):
    with pytest.raises(ValueError, match="max_model_len 512 does not fit"):
        LLM(str(tiny), device="cpu", max_model_len=512, num_blocks=9)
    with pytest.raises(ValueError, match="more than the model's 2048"):
        LLM(str(tiny), device="cpu", max_model_len=4096)
