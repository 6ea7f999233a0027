"""quality.py: SGLang, with a logit processor that forces tokens and compares logits (quality_record.py)."""

from __future__ import annotations

import json
from typing import Any, ClassVar

import torch
from experiments.quality.quality_record import Progress, step

_requests: dict[tuple[str, int], Progress] = {}


class Forced:
    """Called once a step with all requests that name it; their `custom_params` have a task."""

    def __call__(self, logits: torch.Tensor, custom_param_list: list[dict[str, Any]]) -> torch.Tensor:
        requests = []
        for row, params in enumerate(custom_param_list):
            task = params["task"]
            key = (task["run"], task["sequence"])
            requests.append((row, _requests.setdefault(key, Progress(task))))
        step(logits, requests)
        return logits


def named() -> str:
    """Return `Forced` in SGLang's format: pickled by reference, so that the scheduler imports this file."""
    import dill
    from experiments.quality import quality_sglang

    return json.dumps({"callable": dill.dumps(quality_sglang.Forced).hex()})


class Engine:
    eager: ClassVar[dict[str, Any]] = {"disable_cuda_graph": True}

    def __init__(self, model: str, options: dict[str, Any], top: int) -> None:
        import sglang

        cpu: dict[str, Any] = {
            "device": "cpu", "attention_backend": "torch_native", "sampling_backend": "pytorch",
            "disable_cuda_graph": True, "max_total_tokens": 32768,
        }  # fmt: skip
        self.top = top
        defaults = {} if torch.cuda.is_available() else cpu
        context = options.pop("max_model_len")
        budget = options.pop("max_num_batched_tokens")
        self.target = sglang.Engine(
            model_path=model, dtype="bfloat16", random_seed=0, log_level="warning", disable_radix_cache=True,
            context_length=context, chunked_prefill_size=budget, max_running_requests=32,
            enable_custom_logit_processor=True, **{"mem_fraction_static": 0.4, **defaults, **options},
        )  # fmt: skip

    def version(self) -> str:
        import sglang

        return sglang.__version__

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

    def prefill(self, texts: list[list[int]]) -> list[list[tuple[float, dict[int, float]]]]:
        """Return, for each token after the first, its log-probability and the most probable tokens with theirs."""
        params = {"temperature": 0, "max_new_tokens": 1}
        outputs = self.target.generate(
            input_ids=texts, sampling_params=params, return_logprob=True, logprob_start_len=0,
            top_logprobs_num=self.top,
        )  # fmt: skip
        found = []
        for output in outputs:
            info = output["meta_info"]
            places = zip(info["input_token_logprobs"][1:], info["input_top_logprobs"][1:], strict=True)
            found.append([(own[0], {entry[1]: entry[0] for entry in top}) for own, top in places])
        return found

    def close(self) -> None:
        self.target.shutdown()
