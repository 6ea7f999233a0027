"""SGLang: tokens are forced by a custom logit processor."""

from __future__ import annotations

import json
from typing import Any

import torch

from fk_bench.quality.forced import Progress, step

_requests: dict[tuple[str, int], Progress] = {}


class Forced:
    """Called once a step with all requests that name it; their `custom_params` have a task."""

    def __call__(self, logits: torch.Tensor, custom_param_list: list[dict[str, Any]]) -> torch.Tensor:
        tasks = [params["task"] for params in custom_param_list]
        found = [_requests.setdefault((task["file"], task["at"]), Progress(task)) for task in tasks]
        step(logits, [*enumerate(found)])
        return logits


def named() -> str:
    """Return `Forced` in SGLang's format: pickled by reference, so that the scheduler imports this file."""
    import dill

    return json.dumps({"callable": dill.dumps(Forced).hex()})


class Engine:
    def __init__(self, model: str, options: dict[str, Any]) -> None:
        import sglang

        cpu: dict[str, Any] = {
            "device": "cpu", "attention_backend": "torch_native", "sampling_backend": "pytorch",
            "disable_cuda_graph": True, "max_total_tokens": 32768,
        }  # fmt: skip
        more = {} if torch.cuda.is_available() else cpu
        self.target = sglang.Engine(
            model_path=model, dtype=options["dtype"], random_seed=0, log_level="warning", disable_radix_cache=True,
            context_length=options["longest"], chunked_prefill_size=options["tokens"],
            max_running_requests=options["batch"], enable_custom_logit_processor=True, skip_tokenizer_init=True,
            mem_fraction_static=options["gpu_share"], **more, **options["engine_args"],
        )  # fmt: skip

    def decode(self, prompts: list[list[int]], tasks: list[dict[str, Any]]) -> list[list[int]]:
        """Return the generated tokens, which must be each task's own."""
        params = [
            {
                "temperature": 0, "ignore_eos": True, "max_new_tokens": len(task["tokens"]),
                "custom_params": {"task": task},
            }
            for task in tasks
        ]  # fmt: skip
        outputs = self.target.generate(
            input_ids=prompts, sampling_params=params, custom_logit_processor=[named()] * len(prompts)
        )
        return [o["output_ids"] for o in outputs]

    def close(self) -> None:
        self.target.shutdown()
