"""timm and diffusers: images in, classes out, or noise in, images out; the models of `fk-bench e2e` for images.

On a GPU models are compiled, which is their production mode. A patch is put into a copy, which is compiled afterwards.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch

from fk_bench.e2e.pictures.subjects import Pipeline, Subject, open_subject
from fk_bench.quality.planting import Planting
from fk_bench.quality.structured import LOGITS


class Engine:
    def __init__(self, model: str, options: dict[str, Any]) -> None:
        self.device = "cuda" if torch.cuda.is_available() else "cpu"
        dtype, args = getattr(torch, options["dtype"]), options["engine_args"]
        opened = open_subject(
            options["host"], model, dtype, self.device, options["load_format"], options["image_size"],
            options["steps"], args,
        )  # fmt: skip
        self.stock: Subject = opened
        if options["load_format"] == "dummy":
            self.sharpen()
        self.planting = Planting(self.stock.parts())
        self.subject = opened.copy()
        self.ready()

    @torch.inference_mode()
    def sharpen(self) -> None:
        """Multiply a random model's last layer: scores and predicted noise get the deviation of trained models'."""
        target = self.stock.target
        if isinstance(self.stock, Pipeline):
            denoiser = getattr(target, "transformer", None) or getattr(target, "unet", None)
            last, wanted = getattr(denoiser, "conv_out", getattr(denoiser, "proj_out", None)), 1.0
        else:
            last, wanted = getattr(target, "get_classifier", lambda: None)(), LOGITS
        if not isinstance(last, (torch.nn.Linear, torch.nn.Conv2d)):
            return
        found: list[float] = []
        hook = last.register_forward_hook(lambda module, given, made: found.append(float(made.float().std())))
        self.stock.result(4, 0)
        hook.remove()
        for weight in last.parameters():
            weight.mul_(wanted / found[0])

    @property
    def target(self) -> Any:
        """A copy without compiled code, which is used from now on."""
        self.subject = self.stock.copy()
        return self.subject.target

    def ready(self) -> None:
        """Compile what a patch may have changed."""
        if self.device == "cuda":
            self.subject.compile(None)

    def plant(self, fault: str) -> None:
        """Change weights in place, or with '' restore them; copies share them. Raises CannotPlant."""
        self.planting.plant(fault)

    @torch.inference_mode()
    def encode(self, seeds: list[int]) -> torch.Tensor:
        """[n, values]: the classes of images that are drawn from seeds; images behind their latents."""
        drawn = [self.subject.inputs(1, seed) for seed in seeds]
        merged = {name: _joined([d[name] for d in drawn]) for name in drawn[0]}
        if not isinstance(self.subject, Pipeline):
            return self.subject.run(merged).float().flatten(1).cpu()
        made, latents = self.subject.with_latents(merged)
        self.shapes = [list(latents.shape[1:]), list(made.shape[1:])]
        return torch.cat((latents.float().flatten(1), made.float().flatten(1)), 1).cpu()

    def note(self, file: Path) -> None:
        """Write the shapes of one row's latents and pixels."""
        file.write_text(json.dumps(getattr(self, "shapes", [])))

    def close(self) -> None:
        pass


def _joined(values: list[Any]) -> Any:
    if isinstance(values[0], torch.Tensor):
        return torch.cat(values)
    return [v for value in values for v in (value if isinstance(value, list) else [value])]
