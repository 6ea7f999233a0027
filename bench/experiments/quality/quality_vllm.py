"""quality.py: vLLM, with a logits processor that forces tokens and compares logits (quality_record.py)."""

from __future__ import annotations

import os
from typing import Any, ClassVar

# Looking for a GPU must not initialize CUDA here, or the forked engine process could not use it.
os.environ.setdefault("PYTORCH_NVML_BASED_CUDA_CHECK", "1")
os.environ.setdefault("VLLM_WORKER_MULTIPROCESSING_METHOD", "spawn")
import torch

if not torch.cuda.is_available():
    os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
    os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")
os.environ.setdefault("VLLM_USE_FLASHINFER_SAMPLER", "0")

from experiments.quality.quality_record import Progress, force_in, step
from vllm import LLM, SamplingParams
from vllm.v1.sample.logits_processor import AdapterLogitsProcessor


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


class Extension:
    """Additional methods of vLLM's worker."""

    def force_tokens(self) -> bool:
        """Make the sampler of the second model runner force tokens; return False for the first runner."""
        sampler = self.model_runner.sampler  # type: ignore[attr-defined]
        if not type(sampler).__module__.startswith("vllm.v1.worker.gpu.sample"):
            return False
        force_in(sampler)
        return True


PROCESSORS = {"logits_processors": [f"{__name__}:Forced"]}


class Engine:
    """vLLM with its first model runner if the options have logits processors, else on a GPU with the second."""

    eager: ClassVar[dict[str, Any]] = {"enforce_eager": True}
    plain = PROCESSORS  # options that need only vLLM's documented interface

    def __init__(self, model: str, options: dict[str, Any], top: int) -> None:
        cpu: dict[str, Any] = {} if torch.cuda.is_available() else {"enforce_eager": True, **PROCESSORS}
        if cpu and torch.cpu._is_amx_tile_supported():
            torch.cpu._init_amx()  # vLLM's attention never requests AMX, and crashes on a short first prompt
        self.top = top
        self.target = LLM(
            model, dtype="bfloat16", seed=0, max_num_seqs=32, enable_prefix_caching=False,
            worker_extension_cls=f"{__name__}.Extension", **{"gpu_memory_utilization": 0.4, **cpu, **options},
        )  # fmt: skip
        self.runner = 2 if all(self.target.collective_rpc("force_tokens")) else 1

    def version(self) -> str:
        import vllm

        return vllm.__version__

    def _generate(self, prompts: list[list[int]], params: list[SamplingParams]) -> list[Any]:
        return self.target.generate([{"prompt_token_ids": p} for p in prompts], params, use_tqdm=False)

    def decode(self, prompts: list[list[int]], tasks: list[dict[str, Any]]) -> list[list[int]]:
        """Return the generated tokens, which must be each task's own."""
        params = [
            SamplingParams(
                temperature=0, detokenize=False, ignore_eos=True, max_tokens=len(task["tokens"]),
                extra_args={"task": task},
            )
            for task in tasks
        ]  # fmt: skip
        return [list(o.outputs[0].token_ids) for o in self._generate(prompts, params)]

    def prefill(self, texts: list[list[int]]) -> list[list[tuple[float, dict[int, float]]]]:
        """Return, for each token after the first, its log-probability and the most probable tokens with theirs."""
        params = SamplingParams(temperature=0, detokenize=False, max_tokens=1, prompt_logprobs=self.top)
        found = []
        for output, text in zip(self._generate(texts, [params] * len(texts)), texts, strict=True):
            places = zip(output.prompt_logprobs[1:], text[1:], strict=True)
            found.append(
                [
                    (at[t].logprob, {token: e.logprob for token, e in at.items() if e.rank <= self.top})
                    for at, t in places
                ]
            )
        return found

    def close(self) -> None:
        self.target.llm_engine.engine_core.shutdown()
