"""The text model of a checkpoint that also has vision weights."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from support.tiny import KINDS, SIZES, byte_tokenizer

from fastkernels import LLM, SamplingParams
from fastkernels.models.common.checkpoints.weights import CheckpointError
from fastkernels.models.common.plans import build
from fastkernels.models.common.plans.plan import plan

TOWER = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1, "num_attention_heads": 2}
TOWERS: dict[str, dict[str, Any]] = {
    "gemma3": {"image_size": 28, "patch_size": 14},
    "gemma4": {"num_key_value_heads": 2, "head_dim": 16},
    "gemma4_unified": {},
}
PROMPTS = [list(range(10, 40)), [300, 4, 90]]


@pytest.fixture(scope="module", params=TOWERS)
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("text") / request.param
    prefix, differs = KINDS[f"{request.param}_text"]
    cls = getattr(transformers, f"{prefix}ForConditionalGeneration")
    fields = {"text_config": {**SIZES, **differs}, "vision_config": {**TOWER, **TOWERS[request.param]}}
    model = cls(cls.config_class(**fields))
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.normal_(float("norm" in name), 0.1, generator=generator)
    model.save_pretrained(folder)
    byte_tokenizer().save_pretrained(folder)
    return folder


def test_text_model_equals_transformers(folder: Path) -> None:
    reference = transformers.AutoModelForImageTextToText.from_pretrained(folder, dtype=torch.float32)
    sampling = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)
    llm = LLM(str(folder), device="cpu", max_model_len=64, num_blocks=100)
    got = [o.outputs[0].token_ids for o in llm.generate(PROMPTS, sampling)]
    for prompt, found in zip(PROMPTS, got, strict=True):
        ids = torch.tensor([prompt])
        with torch.inference_mode():
            for token in found:
                assert int(reference(ids).logits[0, -1].argmax()) == token
                ids = torch.cat([ids, torch.tensor([[token]])], dim=1)


def test_plan_has_the_text_model_only(folder: Path) -> None:
    made = plan(folder)
    assert made.architecture.endswith("ForCausalLM") and not any("vision" in item.path for item in made)


def test_config_without_text_model_is_refused(folder: Path, tmp_path: Path) -> None:
    raw = json.loads((folder / "config.json").read_text())
    name = raw["architectures"][0]
    del raw["text_config"]
    (tmp_path / "config.json").write_text(json.dumps(raw))
    with pytest.raises(CheckpointError, match=f"has no text_config, which {name} needs"):
        build.load_config(tmp_path)
