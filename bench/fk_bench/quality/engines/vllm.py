"""vLLM: tokens are forced by a logits processor, or by the sampler of its second model runner."""

from __future__ import annotations

from typing import Any

from fk_bench.offline import vllm_process
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
        gpu = vllm_process.prepare()
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
