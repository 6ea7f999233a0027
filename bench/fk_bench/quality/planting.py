"""Planted faults in the weights of a running model of images; compiled code and CUDA graphs read them, too."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from fk_bench.quality import faults


class Planting:
    """parts: the modules of a model by name. Copies of the model that share its weights change with it."""

    def __init__(self, parts: Mapping[str, torch.nn.Module]) -> None:
        self.parts = dict(parts)
        self.undo: dict[str, torch.Tensor] = {}

    def weights(self) -> dict[str, torch.Tensor]:
        parts = self.parts.items()
        return {f"{part}.{name}": t for part, module in parts for name, t in module.state_dict().items()}

    def heads(self) -> int:
        """Of the first attention layer; 0: the model has none."""
        for part in self.parts.values():
            for module in part.modules():
                heads = getattr(module, "num_heads", getattr(module, "heads", 0))
                if isinstance(heads, int) and heads > 1:
                    return heads
        return 0

    @torch.inference_mode()
    def plant(self, fault: str) -> None:
        """Change weights in place, or with '' restore them. Raises CannotPlant."""
        weights = self.weights()
        changed = faults.planted(fault, weights, weights.__getitem__, self.heads()) if fault else self.undo
        self.undo = {n: weights[n].clone() for n in changed} if fault else {}
        for name, value in changed.items():
            weights[name].copy_(value)
