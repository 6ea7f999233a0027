"""Random weights with which outputs show errors."""

from __future__ import annotations

import torch


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
