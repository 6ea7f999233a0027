"""Our engine with requests of any runner: made before the clock runs, answered, and read as numbers."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from fastkernels.models.common.descriptions import registry
from fk_bench.evaluate.run.hosts.images import Recorded
from fk_bench.evaluate.run.hosts.patched import Patched
from fk_bench.evaluate.run.hosts.sent import SENT, Sent
from fk_bench.evaluate.run.hosts.weights import redraw
from fk_bench.quality.planting import Planting

FIXED = ("Render",)  # runners whose random weights are a scene already


class Requests(Recorded, Patched):
    """A model of our engine whose runner has an entry in SENT, or else is sent `sent`."""

    def __init__(self, options: dict[str, Any], sent: Sent | None = None):
        super().__init__(options)
        from fastkernels import LLM

        self.target = LLM(
            options["model"], dtype=options["dtype"], load_format=options["load_format"],
            max_num_seqs=options["max_num_seqs"], **{"skip_tokenizer_init": True, **options["engine_args"]},
        )  # fmt: skip
        engine = self.target.llm_engine
        self.sent = sent or SENT[engine.kind, engine.inputs]
        if options["load_format"] == "dummy" and engine.kind not in FIXED:
            redraw(engine.runner.model)
        self._renew()
        self._requests: list[list[Any]] = []
        self._planting: Planting | None = None

    def prepare(self, batch: int, seed: int, calls: int) -> None:
        """Make the requests of a round, which depend on the seed alone."""
        draw = np.random.default_rng(seed)
        sizes = self.options["request"]
        self._requests = [
            [self.sent.make(self.target, sizes, draw) for _ in range(batch)] for _ in range(calls)
        ]
        self._outputs = []

    def run(self) -> None:
        self._outputs = [
            torch.from_numpy(np.concatenate([np.ravel(a) for a in self.sent.answer(self.target, requests)]))
            for requests in self._requests
        ]

    def plant(self, fault: str) -> dict[str, Any]:
        """`Planting.answer` of the model; what follows from its weights is computed again."""
        if self._planting is None:
            model = self.target.llm_engine.runner.model
            arch = registry.find(self.target.llm_engine.hf_config.architectures[0]).arch
            parts = {part: getattr(model, part) for part in arch.folders[:1]}  # of a pipeline: the denoiser
            self._planting = Planting(parts or {"model": model})
        found = self._planting.answer(fault)
        self._renew()
        return found

    def _renew(self) -> None:
        runner = self.target.llm_engine.runner
        if callable(getattr(runner.model, "refresh", None)):
            runner.capture()
