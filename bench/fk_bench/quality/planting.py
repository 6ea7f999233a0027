"""Planted faults in the weights of a running model; compiled code and CUDA graphs read them, too."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch

from fk_bench.quality import faults


class Planting:
    """parts: the modules of a model by name. Copies of the model that share its weights change with it."""

    def __init__(self, parts: Mapping[str, torch.nn.Module]) -> None:
        self.parts = dict(parts)
        self.undo: dict[str, torch.Tensor] = {}
        self.hooks: list[Any] = []

    def weights(self) -> dict[str, torch.Tensor]:
        parts = self.parts.items()
        return {f"{part}.{name}": t for part, module in parts for name, t in module.state_dict().items()}

    def heads(self) -> int:
        """Of the first attention layer, else of the configuration; 0: the model has none."""
        for part in self.parts.values():
            for module in part.modules():
                if (heads := _heads(module)) > 1:
                    return heads
        return faults.heads_of(self.config())

    def own_heads(self) -> dict[str, int]:
        """{weight: heads of the module around it}, of attention layers that know theirs: towers have other ones."""
        found: dict[str, int] = {}
        for part, module in self.parts.items():
            for path, inner in module.named_modules():
                if (heads := _heads(inner)) > 1:  # modules inside of this one come later
                    names = (f"{path}.{name}".removeprefix(".") for name in inner.state_dict())
                    found |= {f"{part}.{name}": heads for name in names}
        return found

    def config(self) -> dict[str, Any]:
        """The configuration of transformers that a part keeps, if one does."""
        found = (getattr(part, "config", None) for part in self.parts.values())
        return next((c.to_dict() for c in found if c is not None and hasattr(c, "to_dict")), {})

    @torch.inference_mode()
    def plant(self, fault: str) -> None:
        """Change weights in place, or with '' restore them. Raises CannotPlant.

        vLLM's layers on a CPU keep a packed copy and no weight; their inputs or outputs are changed instead, which only
        uncompiled code sees.
        """
        weights = self.weights()
        while self.hooks:
            self.hooks.pop().remove()
        changed = self.undo
        if fault:
            plus_one = faults.one_plus(self.config())
            changed = faults.planted(
                fault, weights, weights.__getitem__, self.heads(), plus_one, self.own_heads()
            )
        self.undo = {n: weights[n].clone() for n in changed} if fault else {}
        for name, value in changed.items():
            if value.numel() or not fault:
                weights[name].copy_(value)
            else:
                self.hooks.append(self._without_weight(name, fault))

    def _without_weight(self, name: str, fault: str) -> Any:
        """Make a fault around a layer: of the MLP's output, or of the two first heads that the layer reads."""
        part, _, path = name.removesuffix(".weight").partition(".")
        layer = self.parts[part].get_submodule(path)
        if fault == "residual":
            return layer.register_forward_hook(_silent)
        return layer.register_forward_pre_hook(_swapping(self.heads()))

    def answer(self, fault: str) -> dict[str, Any]:
        """Plant a fault, or with '' undo it. Returns {"planted": bool, "reason": why not, "concerns": bool}."""
        try:
            self.plant(fault)
        except faults.CannotPlant as error:
            return {
                "planted": False, "concerns": not isinstance(error, faults.NoHeads), "reason": str(error)[:300],
            }  # fmt: skip
        return {"planted": True}


def _heads(module: torch.nn.Module) -> int:
    """Attention heads of a module; 0 if it has none."""
    found = (getattr(module, name, None) for name in ("num_heads", "heads", "no_heads"))
    return next((n for n in found if isinstance(n, int)), 0)


def _silent(layer: torch.nn.Module, args: Any, output: Any) -> None:
    (output[0] if isinstance(output, tuple) else output).zero_()


def _swapping(heads: int) -> Callable[[torch.nn.Module, Any], Any]:
    def swap(layer: torch.nn.Module, args: Any) -> Any:
        size = args[0].shape[-1] // heads
        first, second, rest = args[0].tensor_split((size, 2 * size), -1)
        return (torch.cat((second, first, rest), -1), *args[1:])

    return swap


_kept: dict[int, Planting] = {}


def plant(model: torch.nn.Module, fault: str) -> dict[str, Any]:
    """`Planting.answer` for a model of this process, whose weights are restored by the next call with ''."""
    return _kept.setdefault(id(model), Planting({"model": model})).answer(fault)


def plant_in_runner(runner: Any, fault: str) -> dict[str, Any]:
    """The same for the model of a runner of our engine."""
    return plant(runner.model, fault)
