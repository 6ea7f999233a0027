"""Random weights with which outputs show errors."""

from __future__ import annotations

import re
from typing import Any

import torch

LOGITS = 3.0  # standard deviation, about that of trained models
_EMBEDDING = re.compile(
    r"(^|\.)(embed_tokens|embed_in|embeddings?|word_embeddings|wte|tok_embeddings)\.weight$"
)
_HEAD = re.compile(r"(^|\.)(lm_head|embed_out|output|head)\.weight$")


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

    They have a deviation of 10, next to which a layer adds little. With a head of its own they get that of a norm's
    output; if they are the head, too, logits get LOGITS: with 10 the likeliest token has all of the probability.
    """
    weights = {n: p for n, p in model.named_parameters() if p.dim() == 2 and p.is_floating_point()}
    tied = not any(_HEAD.search(name) for name in weights)
    for name, weight in weights.items():
        if _EMBEDDING.search(name):
            wanted = LOGITS * weight.shape[-1] ** -0.5 if tied else 1.0
            weight.mul_(wanted / weight[:1024].float().std().clamp_min(1e-6))


def rescale_in_runner(runner: Any) -> None:
    """The same for the model of a runner of our engine."""
    rescale(runner.model)
