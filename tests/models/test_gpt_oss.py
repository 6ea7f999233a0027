"""GPT-OSS with experts in MXFP4: the published layout of the checkpoint, served, shared over ranks, refused."""

from __future__ import annotations

import json
import logging
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from support.tiny import make_tiny
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

from fastkernels import LLM, SamplingParams
from fastkernels.core import parallel
from fastkernels.models.common.checkpoints.checkpoint import CheckpointError
from fastkernels.models.common.configs import checks
from fastkernels.models.common.descriptions.description import Unsupported
from fastkernels.models.common.layers import clamped_experts
from fastkernels.models.common.layers.clamped_experts import ClampedExperts
from fastkernels.models.common.plans import build
from fastkernels.models.common.plans.plan import plan

PROMPTS = [[7], list(range(10, 43))]
MXFP4 = {"quant_method": "mxfp4", "modules_to_not_convert": ["model.layers.*.self_attn", "lm_head"]}


def rewrite(folder: Path, change: dict[str, torch.Tensor | None]) -> None:
    """Replace tensors of the checkpoint; None removes one."""
    file = folder / "model.safetensors"
    tensors = {k: v for k, v in {**load_file(file), **change}.items() if v is not None}
    save_file({k: v.contiguous() for k, v in tensors.items()}, file, {"format": "pt"})


def set_config(folder: Path, **fields: Any) -> None:
    file = folder / "config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), **fields}))


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """(a checkpoint in MXFP4, the same in floats by transformers' conversion)."""
    root, generator = tmp_path_factory.mktemp("gpt_oss"), torch.Generator().manual_seed(0)
    floats = make_tiny(root / "floats", "gpt_oss", "float32")
    quantized = shutil.copytree(floats, root / "mxfp4")
    whole: dict[str, Any] = {}
    packed: dict[str, Any] = {}
    for layer in range(2):
        for name, rows in (("gate_up_proj", 128), ("down_proj", 64)):
            key = f"model.layers.{layer}.mlp.experts.{name}"
            blocks = torch.randint(0, 256, (4, rows, 2, 16), dtype=torch.uint8, generator=generator)
            scales = torch.randint(119, 123, (4, rows, 2), dtype=torch.uint8, generator=generator)
            whole[key] = convert_moe_packed_tensors(blocks, scales, dtype=torch.float32)
            packed |= {key: None, f"{key}_blocks": blocks, f"{key}_scales": scales}
    rewrite(floats, whole)
    rewrite(quantized, packed)
    set_config(quantized, quantization_config=MXFP4)
    return quantized, floats


@pytest.mark.parametrize("decoded", [True, False])
def test_mxfp4_tokens_are_those_of_the_floats(
    folders: tuple[Path, Path], decoded: bool, greedy: Any, monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:  # fmt: skip
    """On a CPU it is decoded at load; on a GPU the op reads it."""
    monkeypatch.setattr(clamped_experts, "_announced", False)
    if not decoded:
        monkeypatch.setattr(ClampedExperts, "loaded", lambda *_: None)
    sampling = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)
    with caplog.at_level(logging.WARNING, "fastkernels"):
        llm = LLM(str(folders[0]), device="cpu", max_model_len=128, num_blocks=100)
    found = [out.outputs[0].token_ids for out in llm.generate(PROMPTS, sampling)]
    assert found == [greedy(folders[1], prompt, 8) for prompt in PROMPTS]
    said = [r.message for r in caplog.records if "MXFP4 experts are dequantized" in r.message]
    assert len(said) == decoded


def experts_of(folder: Path, rank: int, ranks: int, groups: int = 1) -> Any:
    config = build.load_config(folder)
    with parallel.build_as(rank, ranks, groups):
        return build.build(folder, config, torch.device("cpu"), torch.float32).model.layers[1].mlp.experts


@pytest.mark.parametrize("kind", [0, 1], ids=["mxfp4", "floats"])
def test_ranks_have_their_part_of_each_expert(folders: tuple[Path, Path], kind: int) -> None:
    whole, parts = (
        experts_of(folders[kind], 0, 1),
        [experts_of(folders[kind], rank, 2) for rank in (0, 1)],
    )
    for name, dim in (("gate_up_proj", 1), ("gate_up_proj_bias", 1), ("down_proj", 2)):
        assert torch.equal(torch.cat([getattr(p, name) for p in parts], dim), getattr(whole, name))
    assert torch.equal(parts[0].down_proj_bias, whole.down_proj_bias) and whole.down_proj_bias.any()
    assert not parts[1].down_proj_bias.any()


@pytest.mark.parametrize("kind", [0, 1], ids=["mxfp4", "floats"])
def test_groups_of_ranks_have_their_own_experts(folders: tuple[Path, Path], kind: int) -> None:
    """Two groups of two ranks: the first rank of each has the down projection's bias of its two experts."""
    whole, parts = experts_of(folders[kind], 0, 1), [experts_of(folders[kind], i, 4, 2) for i in range(4)]
    for name, dim in (("gate_up_proj", 1), ("gate_up_proj_bias", 1), ("down_proj", 2)):
        groups = [torch.cat([getattr(p, name) for p in parts[i : i + 2]], dim) for i in (0, 2)]
        assert torch.equal(torch.cat(groups), getattr(whole, name))
    assert torch.equal(torch.cat([p.down_proj_bias for p in parts[::2]]), whole.down_proj_bias)
    assert not any(p.down_proj_bias.any() for p in parts[1::2])
    assert [p.expert_map.tolist() for p in parts] == [[0, 1, -1, -1]] * 2 + [[-1, -1, 0, 1]] * 2


def test_damaged_mxfp4_scales_are_named(folders: tuple[Path, Path], tmp_path: Path) -> None:
    folder, key = (
        shutil.copytree(folders[0], tmp_path / "wrong"),
        "model.layers.0.mlp.experts.down_proj_scales",
    )
    config = build.load_config(folder)
    wrong = torch.full((4, 64, 2), 255, dtype=torch.uint8)
    for tensor, said in ((wrong, "is NaN"), (wrong[..., :1], "shape"), (None, "keys missing from it")):
        rewrite(folder, {key: tensor})
        with pytest.raises(CheckpointError, match=said) as caught:
            build.build(folder, config, torch.device("cpu"), torch.float32)
        assert key in str(caught.value)


def test_other_quantization_of_gpt_oss_is_refused(folders: tuple[Path, Path], tmp_path: Path) -> None:
    folder = shutil.copytree(folders[0], tmp_path / "other")
    set_config(folder, quantization_config={"quant_method": "quark"})
    with pytest.raises(Unsupported, match=r"quantization_config.*quark"):
        build.load_config(folder)


def test_ranks_that_cut_a_block_are_refused(folders: tuple[Path, Path]) -> None:
    config = build.load_config(folders[0])
    checks.check_ranks(config, 2)
    with pytest.raises(Unsupported, match="blocks of 32"):
        checks.check_ranks(config, 4)


def test_plan_counts_the_bytes_of_mxfp4(folders: tuple[Path, Path]) -> None:
    made, floats = (plan(str(folder), "float32") for folder in folders)
    assert made.parameters == floats.parameters
    values = 2 * 4 * 3 * 64 * 64
    biases = 2 * 4 * 3 * 64
    assert floats.weight_bytes - made.weight_bytes == values * 4 - values * 17 // 32 + 2 * biases
    (item,) = (i for i in made if i.path == "model.layers.0.mlp.experts")
    assert item.read_bytes("float32") * 2 == item.weight_bytes("float32")  # two of four experts


@pytest.mark.parametrize("mxfp4", [True, False])
def test_random_weights_are_served(folders: tuple[Path, Path], mxfp4: bool) -> None:
    llm = LLM(str(folders[not mxfp4]), device="cpu", max_model_len=64, load_format="dummy")
    out = llm.generate([[5, 6, 7]], SamplingParams(temperature=0, max_tokens=4, ignore_eos=True))
    assert len(out[0].outputs[0].token_ids) == 4
