"""The hosts and checkpoints of works_with.py: small random models of a GPU's shapes, and what is asked of an engine."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
SHAPES = {
    "hidden_size": 1024, "intermediate_size": 2816, "num_hidden_layers": 4, "num_attention_heads": 8,
    "num_key_value_heads": 2, "head_dim": 128,
}  # fmt: skip


def checkpoint(folder: Path, kind: str) -> Path:
    """A random model of SHAPES, made once; 'gptq' and 'awq' are the Llama in four bits."""
    sys.path.insert(0, str(ROOT / "tests"))  # the tests' checkpoints
    from safetensors.torch import load_file, save_file
    from support.tiny import make_tiny
    from support.variants import make_quantized

    path = folder / kind
    if path.exists():
        return path
    if kind in ("gptq", "awq"):
        return make_quantized(path, checkpoint(folder, "llama"), kind)
    window = {"sliding_window": 64} if kind in ("mistral", "gemma2") else {}
    make_tiny(path, kind, **SHAPES, **window)
    tensors = load_file(path / "model.safetensors")
    # The std of what is made up is for rows of 128
    scaled = {name: t * 0.35 if t.dim() > 1 else t for name, t in tensors.items()}
    save_file(scaled, path / "model.safetensors", metadata={"format": "pt"})
    return path


def adapter(folder: Path, model: Path) -> Path:
    from support.variants import make_lora

    return folder / "lora" if (folder / "lora").exists() else make_lora(folder / "lora", model)


# Small, so that several engines have room on one GPU.
KV_BYTES, KV_TOKENS = 1 << 30, 16384


class Vllm:
    def __init__(self, model: str, lora: str | None, options: dict[str, Any]) -> None:
        from vllm import LLM

        self.model, self.lora = model, None
        if lora is not None:
            from vllm.lora.request import LoRARequest

            self.lora = LoRARequest("a", 1, lora)
        self.engine = LLM(
            model, max_model_len=512, max_num_seqs=8, gpu_memory_utilization=0.1, kv_cache_memory_bytes=KV_BYTES,
            seed=0, enable_prefix_caching=False, **options,
        )  # fmt: skip

    def _generate(self, prompts: list[list[int]], **params: Any) -> list[Any]:
        from vllm import SamplingParams

        chosen = SamplingParams(temperature=0, detokenize=False, ignore_eos=True, **params)
        inputs: Any = [{"prompt_token_ids": p} for p in prompts]
        return self.engine.generate(inputs, chosen, use_tqdm=False, lora_request=self.lora)

    def tokens(self, prompts: list[list[int]], n: int) -> list[list[int]]:
        return [list(o.outputs[0].token_ids) for o in self._generate(prompts, max_tokens=n)]

    def forced(self, texts: list[list[int]]) -> list[list[tuple[float, float]]]:
        """Of each token after the first: its log-probability, and that of the best one there."""
        found = []
        for output, text in zip(self._generate(texts, max_tokens=1, prompt_logprobs=1), texts, strict=True):
            pairs = zip(output.prompt_logprobs[1:], text[1:], strict=True)
            found.append([(at[t].logprob, max(e.logprob for e in at.values())) for at, t in pairs])
        return found

    def sleep(self) -> None:
        self.engine.sleep(level=1)

    def wake(self) -> None:
        self.engine.wake_up()

    def reload(self) -> None:
        self.engine.collective_rpc("reload_weights")

    def close(self) -> None:
        self.engine.llm_engine.engine_core.shutdown()


class SGLang:
    def __init__(self, model: str, lora: str | None, options: dict[str, Any]) -> None:
        import sglang

        self.model, self.lora = model, {} if lora is None else {"lora_path": "a"}
        graphs = {"cuda_graph_max_bs_decode": 8, "cuda_graph_max_bs_prefill": 512}
        self.engine = sglang.Engine(
            model_path=model, mem_fraction_static=0.4, max_total_tokens=KV_TOKENS, context_length=512, random_seed=0,
            log_level="warning", disable_radix_cache=True, max_running_requests=8, **graphs, **options,
        )  # fmt: skip

    def _generate(self, prompts: list[list[int]], n: int, **options: Any) -> list[Any]:
        params = {"temperature": 0, "max_new_tokens": n, "ignore_eos": True}
        lora = {name: [value] * len(prompts) for name, value in self.lora.items()}
        return self.engine.generate(input_ids=prompts, sampling_params=params, **lora, **options)

    def tokens(self, prompts: list[list[int]], n: int) -> list[list[int]]:
        return [o["output_ids"] for o in self._generate(prompts, n)]

    def forced(self, texts: list[list[int]]) -> list[list[tuple[float, float]]]:
        wanted = {"return_logprob": True, "logprob_start_len": 0, "top_logprobs_num": 1}
        found = []
        for output in self._generate(texts, 1, **wanted):
            info = output["meta_info"]
            pairs = zip(info["input_token_logprobs"][1:], info["input_top_logprobs"][1:], strict=True)
            found.append([(entry[0], top[0][0]) for entry, top in pairs])
        return found

    def sleep(self) -> None:
        self.engine.release_memory_occupation()

    def wake(self) -> None:
        self.engine.resume_memory_occupation()
        self.reload()  # SGLang keeps no copy of the weights, unless it is told to

    def reload(self) -> None:
        self.engine.update_weights_from_disk(self.model)

    def close(self) -> None:
        self.engine.shutdown()
