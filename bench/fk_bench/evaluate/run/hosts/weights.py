"""Random weights with which outputs show errors."""

from __future__ import annotations

import re
from typing import Any

import torch

from fastkernels.models.common.checkpoints.weights import EMBEDDING_STD

LOGITS = 3.0  # standard deviation, about that of trained models
STREAM = {False: 1.0, True: 0.05}  # of the first layer's input, by whether the embeddings are the head, too
_EMBEDDING = re.compile(
    r"(^|\.)(embed_tokens|embed_in|embeddings?|word_embeddings|wte|tok_embeddings)\.weight$"
)
_HEAD = re.compile(r"(^|\.)(lm_head|embed_out|output|head)\.weight$")
_LAST_NORM = re.compile(r"^\D*\b(norm|ln_f|final_layernorm|final_layer_norm|norm_f)\.weight$")


@torch.no_grad()
def redraw(model: torch.nn.Module, seed: int = 0) -> None:
    """Weights with which each layer counts in the outputs: those of `load_format="dummy"` are small or constant."""
    generators: dict[torch.device, torch.Generator] = {}
    for name, parameter in model.named_parameters():
        if not parameter.is_floating_point():
            continue
        draw = generators.setdefault(parameter.device, torch.Generator(parameter.device).manual_seed(seed))
        mean, std = 1.0, 0.1
        if parameter.dim() > 1:
            gain = 2.0 if parameter.dim() > 3 else 1.0  # convolutions, which ReLU or SiLU follows
            mean, std = 0.0, (gain * len(parameter) / parameter.numel()) ** 0.5
        elif name.endswith(("bias", "mean", "offset")):
            mean, std = 0.0, 0.02
        parameter.normal_(mean, std, generator=draw)  # in place: packed copies follow its version


@torch.inference_mode()
def rescale(model: torch.nn.Module) -> None:
    """Scale the embeddings of `load_format="dummy"`, so that each layer counts in the logits of a language model.

    They enter the first layer with a deviation of EMBEDDING_STD, next to which a layer adds little. If they are the
    head, too, each token is then its own likeliest successor, with all of the probability: they become small, and the
    last norm's weight larger, so that logits have a deviation of LOGITS. A mixture with a head of its own keeps its
    embeddings: with smaller ones, the tokens of a prompt go to the same experts.
    """
    weights = {n: p for n, p in model.named_parameters() if p.is_floating_point()}
    tied = not any(_HEAD.search(name) for name in weights)
    if not tied and any("experts" in name for name in weights):
        return
    last = next((p for n, p in weights.items() if _LAST_NORM.search(n) and p.dim() == 1), None)
    for name, weight in weights.items():
        if not _EMBEDDING.search(name) or weight.dim() != 2:
            continue
        weight.mul_(STREAM[tied and last is not None] / EMBEDDING_STD)
        if tied and last is not None:
            last.mul_(LOGITS * weight.shape[-1] ** -0.5 / weight[:1024].float().std().clamp_min(1e-6))


def rescale_in_runner(runner: Any) -> None:
    """The same for the model of a runner of our engine."""
    rescale(runner.model)
