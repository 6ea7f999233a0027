"""vLLM's logits processor that forces tokens. vLLM imports this file by its name, in the process of the engine."""

from __future__ import annotations

from typing import Any

import torch
from vllm import SamplingParams
from vllm.v1.sample.logits_processor import AdapterLogitsProcessor

from fk_bench.quality.forced import Progress, step


class Forced(AdapterLogitsProcessor):
    """Handles requests whose `extra_args` have a task, all of a step at once."""

    def is_argmax_invariant(self) -> bool:
        return False

    def new_req_logits_processor(self, params: SamplingParams) -> Any:
        task = (params.extra_args or {}).get("task")
        if task is None:
            return None
        progress = Progress(task)

        def forced(output_ids: list[int], logits: torch.Tensor) -> torch.Tensor:
            step(logits[None], [(0, progress)])
            return logits

        forced.progress = progress  # type: ignore[attr-defined]
        return forced

    def apply(self, logits: torch.Tensor) -> torch.Tensor:
        step(logits, [(row, held.func.progress) for row, held in sorted(self.req_info.items())])
        return logits
