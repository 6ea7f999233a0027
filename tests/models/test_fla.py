"""flash-linear-attention's configs: read without it and without transformers, or refused by name and value."""

from __future__ import annotations

import json
import shutil
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from support.tiny import FLA, make_tiny

from fastkernels.engine.cache.state_cache import state_bytes, state_layers
from fastkernels.models.common.checkpoints.checkpoint import CheckpointError
from fastkernels.models.common.configs import checks
from fastkernels.models.common.configs import config as config_file
from fastkernels.models.common.descriptions import registry
from fastkernels.models.common.descriptions.description import Attention, Unsupported
from fastkernels.models.common.plans import build
from fastkernels.models.common.plans.plan import plan

SPEC = {"layers": [1], "num_heads": 4}


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("fla")
    for kind in FLA:
        make_tiny(root / kind, kind, "float32")
    return root


def edited(folder: Path, target: Path, **fields: Any) -> Path:
    shutil.copytree(folder, target)
    raw = json.loads((folder / "config.json").read_text())
    (target / "config.json").write_text(json.dumps({**raw, **fields}))
    return target


@pytest.mark.parametrize("kind", FLA)
def test_config_is_read_without_transformers(
    folders: Path, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("transformers", "fla"):
        monkeypatch.setitem(sys.modules, name, None)  # an import raises ImportError
    config = build.load_config(folders / kind)
    assert (config.model_type, config.dtype, config.hidden_size) == (kind, torch.float32, 128)
    assert config == config_file.plain(json.loads(json.dumps(config.to_dict())))


@pytest.mark.parametrize("kind", FLA)
def test_missing_fields_have_the_defaults_of_the_library(folders: Path, tmp_path: Path, kind: str) -> None:
    from support import fla_models

    name = f"{FLA[kind][0]}Config"
    theirs = getattr(fla_models, name)()
    raw = {"model_type": kind, "architectures": [f"{FLA[kind][0]}ForCausalLM"]}
    sizes = {n: getattr(theirs, n) for n in ("vocab_size", "hidden_size", "num_hidden_layers")}
    (tmp_path / "config.json").write_text(json.dumps({**raw, **sizes}))
    ours = build.load_config(tmp_path)
    own = {*type(theirs).__annotations__, "hidden_ratio", "eos_token_id", "fuse_norm", "tie_word_embeddings"}
    assert {n: getattr(ours, n, None) for n in own} == {n: getattr(theirs, n) for n in own}
    assert registry.describe(ours).layers


@pytest.mark.parametrize(
    ("kind", "fields", "said"),
    [
        ("gla", {"feature_map": "elu"}, "config.feature_map='elu' is not supported, only None"),
        ("gla", {"hidden_act": "powlu"}, "config.hidden_act='powlu' is not supported, only 'swish'"),
        ("gla", {"use_gv": True}, "config.use_gv=True is not supported, only False"),
        ("gla", {"gate_low_rank_dim": 32}, "config.gate_low_rank_dim=32 is not supported, only 16"),
        ("gla", {"attnres_block_size": 4}, "config.attnres_block_size=4 is not supported, only None"),
        ("gla", {"num_heads": 0}, "config.num_heads=0 is not supported, only integers above 0"),
        ("gla", {"num_kv_heads": 3}, "config.num_kv_heads=3 is not supported, only divisors of num_heads=4"),
        ("gla", {"expand_k": 0.3}, "config.expand_k=0.3 is not supported, only factors of hidden_size=128"),
        ("gla", {"intermediate_size": -1}, "config.intermediate_size=-1 is not supported, only integers above 0"),
        ("gla", {"attn": {**SPEC, "layers": [2]}}, "is not supported, only tables with `layers`, numbers below 2"),
        ("gla", {"attn": [SPEC, SPEC]}, "of which each occurs once"),
        ("gla", {"attn": {**SPEC, "num_heads": 3}}, "num_heads must divide hidden_size=128"),
        (
            "gla",
            {"attn": [{**SPEC, "window_size": 8}, {**SPEC, "layers": [0], "window_size": 4}]},
            "windows of several sizes are not supported",
        ),
        ("retnet", {"use_short_conv": True}, "config.use_short_conv=True is not supported, only False"),
        ("retnet", {"elementwise_affine": False}, "config.elementwise_affine=False is not supported, only True"),
        ("retnet", {"num_heads": 128}, "config.expand_k=1.0 is not supported"),
        ("rwkv7", {"hidden_act": "relu"}, "config.hidden_act='relu' is not supported, only 'sqrelu'"),
        ("rwkv7", {"head_dim": 48}, "config.head_dim=48 is not supported, only divisors of hidden_size=128"),
        ("rwkv7", {"head_dim": None}, "config.head_dim=None is not supported, only integers above 0"),
        ("rwkv7", {"value_dim": [128, 256]}, "config.value_dim=[128, 256] is not supported, only hidden_size=128"),
        ("rwkv7", {"a_low_rank_dim": None}, "config.a_low_rank_dim=None is not supported, only integers above 0"),
        ("rwkv7", {"attn": SPEC}, "is not supported, only None"),
    ],
)  # fmt: skip
def test_unsupported_field_is_refused_by_name_and_value(
    folders: Path, tmp_path: Path, kind: str, fields: dict[str, Any], said: str
) -> None:
    folder = edited(folders / kind, tmp_path / "copy", **fields)
    with pytest.raises((Unsupported, CheckpointError)) as caught:
        plan(folder)
    assert said in str(caught.value)


@pytest.mark.parametrize(
    ("kind", "fields", "ranks", "said"),
    [
        ("gla", {"num_kv_heads": 1}, 2, "1 key heads of linear attention cannot be shared by 2 ranks; supported: 1"),
        ("retnet", {}, 8, "4 heads of linear attention, 4 key heads of linear attention cannot be shared by 8 ranks"),
        ("rwkv7", {}, 8, "4 heads of RWKV-7 cannot be shared by 8 ranks; supported: 1, 2, 4"),
    ],
)  # fmt: skip
def test_heads_that_ranks_cannot_share_are_refused(
    folders: Path, tmp_path: Path, kind: str, fields: dict[str, Any], ranks: int, said: str
) -> None:
    config = build.load_config(edited(folders / kind, tmp_path / "copy", **fields))
    with pytest.raises(Unsupported) as caught:
        checks.check_ranks(config, ranks)
    assert str(caught.value).startswith(said)


def test_layers_of_attention_limit_the_length(folders: Path, tmp_path: Path) -> None:
    assert build.load_config(folders / "gla").max_position_embeddings is None
    config = build.load_config(edited(folders / "gla", tmp_path / "copy", attn={**SPEC, "window_size": 7}))
    assert config.max_position_embeddings == 2048
    assert config.layer_types == ["linear_attention", "sliding_attention"]
    attention = registry.describe(config).layers[1].attention
    assert isinstance(attention, Attention) and (attention.window, attention.head_size) == (7, 32)


def test_head_size_of_rwkv7_may_be_the_number_of_heads(folders: Path, tmp_path: Path) -> None:
    """With both, the number of heads is ignored, as in the library."""
    for name, fields in {"one": {"head_dim": None, "num_heads": 4}, "both": {"num_heads": 8}}.items():
        config = build.load_config(edited(folders / "rwkv7", tmp_path / name, **fields))
        assert registry.describe(config) == registry.describe(build.load_config(folders / "rwkv7"))


@pytest.mark.parametrize("kind", FLA)
def test_plan_has_the_bytes_of_all_states(folders: Path, tmp_path: Path, kind: str) -> None:
    """In RWKV-7, MLPs have one, too; in GLA, a short convolution."""
    folder = edited(folders / kind, tmp_path / "copy", **({"use_short_conv": True} if kind == "gla" else {}))
    config = build.load_config(folder)
    layers = state_layers([*build.skeleton(folder, config, torch.bfloat16).modules()])
    assert plan(config, "bfloat16").state_bytes == state_bytes(layers, torch.bfloat16) > 0


@torch.inference_mode()
def test_first_version_of_rwkv7s_checkpoints_is_loaded(folders: Path, tmp_path: Path) -> None:
    """The six mixes of a layer are one tensor, and the first layer has a v_lora that is not used."""
    folder = edited(folders / "rwkv7", tmp_path / "copy")
    tensors = load_file(folder / "model.safetensors")
    for i in range(2):
        own = [tensors.pop(f"model.layers.{i}.attn.x_{x}") for x in "rwkvag"]
        tensors[f"model.layers.{i}.attn.x_x"] = torch.cat([t.view(1, -1) for t in own])
    for part in ("lora.0.weight", "lora.2.weight", "lora.2.bias"):
        tensors[f"model.layers.0.attn.v_lora.{part}"] = tensors[f"model.layers.1.attn.v_lora.{part}"].clone()
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    config, cpu = build.load_config(folder), torch.device("cpu")
    new, old = (build.build(f, config, cpu, torch.float32) for f in (folders / "rwkv7", folder))
    for (name, a), b in zip(new.named_parameters(), old.parameters(), strict=True):
        assert torch.equal(a, b), name
