"""vLLM: tokens are forced by a logits processor, or by the sampler of its second model runner."""

from __future__ import annotations

import os
from typing import Any

import torch

from fk_bench.quality.forced import force_in

FOLDER = __name__.rpartition(".")[0]
PROCESSORS = {"logits_processors": [f"{FOLDER}.vllm_forced:Forced"]}


class Extension:
    """Additional methods of vLLM's worker."""

    def force_tokens(self) -> bool:
        """Make the sampler of the second model runner force tokens; return False for the first runner."""
        sampler = self.model_runner.sampler  # type: ignore[attr-defined]
        if not type(sampler).__module__.startswith("vllm.v1.worker.gpu.sample"):
            return False
        force_in(sampler)
        return True


class Engine:
    """vLLM with its second model runner where it takes that one; the first gets a logits processor."""

    def __init__(self, model: str, options: dict[str, Any]) -> None:
        # Looking for a GPU must not initialize CUDA here, or the forked engine process could not use it.
        os.environ.setdefault("PYTORCH_NVML_BASED_CUDA_CHECK", "1")
        os.environ.setdefault("VLLM_WORKER_MULTIPROCESSING_METHOD", "spawn")
        os.environ.setdefault("VLLM_USE_FLASHINFER_SAMPLER", "0")
        gpu = torch.cuda.is_available()
        if not gpu:
            os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
            os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")
            if torch.cpu._is_amx_tile_supported():
                torch.cpu._init_amx()  # vLLM's attention never requests AMX, and crashes on a short first prompt
        self.model, self.options = model, options
        self._start({} if gpu else {"enforce_eager": True, **PROCESSORS})
        if not (forced := all(self.target.collective_rpc("force_tokens"))) and gpu:
            self.close()
            self._start(PROCESSORS)
        self.runner = 2 if forced else 1

    def _start(self, more: dict[str, Any]) -> None:
        from vllm import LLM

        self.target = LLM(
            self.model, dtype=self.options["dtype"], seed=0, max_num_seqs=self.options["batch"],
            max_model_len=self.options["longest"],
            max_num_batched_tokens=self.options["tokens"], enable_prefix_caching=False, skip_tokenizer_init=True,
            worker_extension_cls=f"{__name__}.Extension", gpu_memory_utilization=self.options["gpu_share"], **more,
            **self.options["engine_args"],
        )  # fmt: skip

    def decode(self, prompts: list[list[int]], tasks: list[dict[str, Any]]) -> list[list[int]]:
        """Return the generated tokens, which must be each task's own."""
        from vllm import SamplingParams

        params = [
            SamplingParams(
                temperature=0, detokenize=False, ignore_eos=True, max_tokens=len(task["tokens"]),
                extra_args={"task": task},
            )
            for task in tasks
        ]  # fmt: skip
        outputs = self.target.generate([{"prompt_token_ids": p} for p in prompts], params, use_tqdm=False)
        return [list(o.outputs[0].token_ids) for o in outputs]

    def close(self) -> None:
        self.target.llm_engine.engine_core.shutdown()
