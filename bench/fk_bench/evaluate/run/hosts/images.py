"""Models that are called with images: inputs are made before the clock runs, and any output of a round can be read."""

from __future__ import annotations

from base64 import b64encode
from typing import Any

import torch

from fk_bench.e2e.pictures import subjects
from fk_bench.e2e.pictures.named import NAMED
from fk_bench.evaluate.run.hosts.patched import Patched
from fk_bench.evaluate.run.hosts.weights import redraw
from fk_bench.quality.planting import Planting


class Recorded:
    """Outputs of the calls of a round, any of which can be read afterwards."""

    _outputs: list[torch.Tensor]

    def output(self, call: int) -> dict[str, Any]:
        """The result of one call of the last round: float32 as base64."""
        values = self._outputs[call].float().cpu().contiguous()
        return {"output": b64encode(values.numpy().tobytes()).decode()}


class Images(Recorded, Patched):
    """A model of timm, one of transformers whose main input are images, or a pipeline of diffusers."""

    def __init__(self, options: dict[str, Any]):
        super().__init__(options)
        device = "cuda" if options["gpu"] else "cpu"
        self.subject = subjects.open_subject(
            options["host"], options["model"], getattr(torch, options["dtype"]), device, options["load_format"],
            options["image_size"], options["steps"], options["arguments"],
        )  # fmt: skip
        self.target = self.subject.target
        if isinstance(self.subject, subjects.Pipeline):
            self.subject.frames = int(options["request"].get("frames", 0))
            vae: Any = getattr(self.target, "vae", None)
            if self.subject.frames and hasattr(vae, "enable_slicing"):
                vae.enable_slicing()  # diffusers 0.42.1 decodes several videos of HunyuanVideo 1.5 in no other way
            for part in self.subject.parts().values() if options["model"] not in NAMED else ():
                redraw(part)
        self._inputs: list[dict[str, Any]] = []
        self._outputs = []
        self._planting: Planting | None = None

    def patch(self, files: dict[str, str]) -> dict[str, Any]:
        """As in any host, and then compile what the host runs compiled."""
        found = super().patch(files) if files else {"failed": {}}
        if self.options["compiled"] and not found["failed"]:
            self.subject.compile(None, blocks=True)
            if self.options["gpu"]:
                self.subject.capture()
        return found

    def prepare(self, batch: int, seed: int, calls: int) -> None:
        """Make the inputs of a round, which depend on the seed alone. No two calls have the same: each is rolled on."""
        first = self.subject.inputs(batch, seed)
        self._inputs = [{k: _rolled(value, i) for k, value in first.items()} for i in range(calls)]
        self._outputs = []
        if self.options["gpu"]:
            torch.cuda.synchronize()

    @torch.inference_mode()
    def run(self) -> None:
        self._outputs = [self.subject.run(inputs).clone() for inputs in self._inputs]
        if self.options["gpu"]:
            torch.cuda.synchronize()

    def plant(self, fault: str) -> dict[str, Any]:
        """`Planting.answer` of the model's parts."""
        self._planting = self._planting or Planting(self.subject.parts())
        return self._planting.answer(fault)


def _rolled(value: Any, places: int) -> Any:
    return value.roll(places, -1) if isinstance(value, torch.Tensor) and value.is_floating_point() else value
