"""BitNet checkpoints in each layout against transformers' own linear layers, in float32."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from support.tiny import make_tiny

from fastkernels import LLM, SamplingParams
from fastkernels.models.common.checkpoints.checkpoint import CheckpointError
from fastkernels.models.common.plans import build
from fastkernels.models.common.plans.plan import plan

LAYOUTS = ("online", "autobitlinear", "bitlinear")
KEY = "model.layers.1.mlp.up_proj.weight"


def quantized(folder: Path, layout: str, base: Path) -> Path:
    """A copy of the checkpoint, with its weights as they are, or two bits each and a scale."""
    from transformers.integrations.bitnet import pack_weights

    tensors = load_file(shutil.copytree(base, folder) / "model.safetensors")
    if layout != "online":
        for key in [k for k in tensors if k.endswith("_proj.weight")]:
            mean = tensors[key].abs().mean()
            tensors[key] = pack_weights((tensors[key] / mean).round().clamp(-1, 1))
            scale = mean if layout == "autobitlinear" else 1 / mean
            tensors[key.removesuffix("weight") + "weight_scale"] = scale.reshape(1)
        save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    config = json.loads((folder / "config.json").read_text())
    config["quantization_config"] = {
        "quant_method": "bitnet", "modules_to_not_convert": ["lm_head"],
        "linear_class": "bitlinear" if layout == "bitlinear" else "autobitlinear",
        "quantization_mode": "online" if layout == "online" else "offline",
    }  # fmt: skip
    (folder / "config.json").write_text(json.dumps(config))
    return folder


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny(tmp_path_factory.mktemp("bitnet") / "base", "bitnet", "float32")


@pytest.mark.parametrize("layout", LAYOUTS)
@torch.compiler.set_stance("force_eager")  # transformers' layers compile their helpers
def test_tokens_equal_transformers(layout: str, base: Path, tmp_path: Path) -> None:
    """Prompts in chunks, and the engine's cache; logits of transformers' best token must lead by a margin."""
    from transformers import AutoModelForCausalLM

    folder = quantized(tmp_path / layout, layout, base)
    llm = LLM(
        str(folder), device="cpu", dtype="float32", max_model_len=64, max_num_batched_tokens=16, max_num_seqs=4,
        block_size=8, num_blocks=40,
    )  # fmt: skip
    reference: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    assert "BitLinear" in type(reference.model.layers[0].mlp.up_proj).__name__
    prompts = [[7], list(range(10, 40)), [300, 4, 4, 4, 90]]
    sampling = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)
    for prompt, output in zip(prompts, llm.generate(prompts, sampling), strict=True):
        tokens = output.outputs[0].token_ids
        with torch.inference_mode():
            logits = reference(torch.tensor([[*prompt, *tokens]])).logits[0, len(prompt) - 1 : -1]
        chosen = logits[torch.arange(len(tokens)), torch.tensor(tokens)]
        assert (logits.amax(-1) - chosen < 0.01 * logits.std()).all()


def test_plan_counts_two_bits(base: Path, tmp_path: Path) -> None:
    folder = quantized(tmp_path / "packed", "autobitlinear", base)
    model = build.skeleton(folder, build.load_config(folder), torch.float32)
    made = plan(str(folder))
    assert made.weight_bytes == sum(p.numel() * p.element_size() for p in model.parameters())
    assert "linear_ternary" in made.ops()


def test_damaged_weights_are_named(base: Path, tmp_path: Path) -> None:
    folder = quantized(tmp_path / "online", "online", base)
    tensors = load_file(folder / "model.safetensors")
    save_file({**tensors, KEY: tensors[KEY].char()}, folder / "model.safetensors", {"format": "pt"})
    with pytest.raises(CheckpointError, match=f"{KEY} .* its dtype is torch.int8, not a float"):
        build.build(folder, build.load_config(folder), torch.device("cpu"), torch.float32)
    folder = quantized(tmp_path / "packed", "autobitlinear", base)
    tensors = load_file(folder / "model.safetensors")
    tensors[KEY][3, 3] = 0b11
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    with pytest.raises(CheckpointError, match=f"{KEY} .* it has a weight other than -1, 0 and 1"):
        build.build(folder, build.load_config(folder), torch.device("cpu"), torch.float32)
    save_file({**tensors, KEY: tensors[KEY].flatten()}, folder / "model.safetensors", {"format": "pt"})
    with pytest.raises(CheckpointError, match=f"{KEY} of shape .* expected two dimensions"):
        build.build(folder, build.load_config(folder), torch.device("cpu"), torch.float32)
    tensors.pop(KEY + "_scale")
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    with pytest.raises(CheckpointError, match=f"keys missing from it: {KEY}_scale"):
        build.build(folder, build.load_config(folder), torch.device("cpu"), torch.float32)
