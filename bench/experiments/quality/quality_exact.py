"""quality.py: the model in float32 by transformers, the reference of all runs."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from experiments.quality.quality_plan import Plan
from experiments.quality.quality_record import EXACT, EXACT_LOGITS, kept, write
from safetensors.torch import load_file


def weights(folder: Path) -> dict[str, torch.Tensor]:
    """Return a checkpoint's weights in float32; quantized weights are multiplied by their scales."""
    found = {n: t for file in sorted(folder.glob("*.safetensors")) for n, t in load_file(file).items()}
    scales = {n: found.pop(n).float() for n in list(found) if n.endswith(".weight_scale")}
    return {n: t.float() * scales.get(f"{n}_scale", 1.0) for n, t in found.items()}


def model_of(folder: Path, device: str) -> Any:
    from transformers import AutoConfig, AutoModelForCausalLM

    config = AutoConfig.from_pretrained(folder)
    if hasattr(config, "quantization_config"):
        del config.quantization_config
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    missing, unknown = model.load_state_dict(weights(folder), strict=False)
    if unknown or not set(missing) <= {"lm_head.weight"}:
        raise ValueError(f"{folder}: the model has no {unknown or 'weights for'} {missing}")
    model.tie_weights()
    return model.to(device).eval()


@torch.inference_mode()
def run(folder: Path, model: Path, plan: Plan, top: int) -> None:
    """Store the logits of all forced tokens, and write the log-probabilities of the prefills."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    exact = model_of(model, device)
    vocabulary = json.loads((model / "config.json").read_text())["vocab_size"]

    def logits(tokens: list[int]) -> torch.Tensor:
        return exact(torch.tensor([tokens], device=device)).logits[0].float()

    for s in plan.decode:
        found = logits([*s.prompt, *s.tokens[:-1]])[len(s.prompt) - 1 :]
        kept(str(folder), plan.total, vocabulary, EXACT_LOGITS)[s.at : s.at + len(s.tokens)] = found.cpu()
    for i, s in enumerate(plan.prefill):
        logprobs = logits(s.tokens[:-1]).double().log_softmax(-1)
        own = logprobs.gather(-1, torch.tensor(s.tokens[1:], device=device)[:, None])[:, 0]
        best = logprobs.topk(min(top, vocabulary))
        pairs = zip(best.indices.tolist(), best.values.tolist(), strict=True)
        tops = [list(zip(tokens, values, strict=True)) for tokens, values in pairs]
        write(folder, f"{EXACT}-prefill", i, {"logprob": own.tolist(), "top": tops})
