"""The hosts and checkpoints of works_with.py: small random models of realistic shapes, and the engines' interface."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from experiments.checkpoints.make_checkpoint import quantize_model

ROOT = Path(__file__).resolve().parents[3]
SHAPES = {
    "hidden_size": 1024, "intermediate_size": 2816, "num_hidden_layers": 4, "num_attention_heads": 8,
    "num_key_value_heads": 2, "head_dim": 128,
}  # fmt: skip
# Hosts' kernels have these sizes of heads only.
LATENT = {
    "kv_lora_rank": 512, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128, "q_lora_rank": 384,
    "head_dim": 64, "num_key_value_heads": 8, "moe_intermediate_size": 512, "topk_method": "noaux_tc",
    "scoring_func": "sigmoid",
}  # fmt: skip


def checkpoint(folder: Path, kind: str) -> Path:
    """Make a random model of SHAPES once; 'gptq' and 'awq' are the Llama in four bits, 'mixtral_fp8' is the Mixtral in
    FP8 with block scales.
    """
    sys.path.insert(0, str(ROOT / "tests"))  # the tests' checkpoints
    from safetensors.torch import load_file, save_file
    from support.tiny import make_tiny
    from support.variants import make_quantized

    path = folder / kind
    if path.exists():
        return path
    if kind in ("gptq", "awq"):
        return make_quantized(path, checkpoint(folder, "llama"), kind)
    if kind == "mixtral_fp8":
        quantize_model(checkpoint(folder, "mixtral"), path, "fp8-block")
        return path
    more = {
        "mistral": {"sliding_window": 64},
        "gemma2": {"sliding_window": 64},
        "mixtral": {"num_local_experts": 8},
        "deepseek_v3": LATENT,
        "gpt_oss": {"sliding_window": 64, "num_local_experts": 8, "head_dim": 64, "num_attention_heads": 16},
    }
    make_tiny(path, kind, **{**SHAPES, **more.get(kind, {})})
    tensors = load_file(path / "model.safetensors")
    # the tests' standard deviations are for rows of 128
    scaled = {name: t * 0.35 if t.dim() > 1 else t for name, t in tensors.items()}
    # sinks as large as the largest scores: attention without them would differ
    scaled |= {name: t + 4 for name, t in tensors.items() if name.endswith("sinks")}
    save_file(scaled, path / "model.safetensors", metadata={"format": "pt"})
    return path


def adapter(folder: Path, model: Path) -> Path:
    from support.variants import make_lora

    return folder / "lora" if (folder / "lora").exists() else make_lora(folder / "lora", model)


# Calls that make a host compile its kernels ahead of time, if no cache has them.
KERNELS = {
    "vllm": {
        "flashinfer.jit.comm": "gen_trtllm_comm_module().build(verbose=False)",  # all-reduce with norms
    },
    "sglang": {
        "sglang.jit_kernel.awq_dequantize": "_jit_awq_dequantize_module(torch.float16)",
        "sglang.jit_kernel.awq_marlin_repack": "_jit_awq_marlin_repack_module()",
        "sglang.jit_kernel.gptq_marlin_repack": "_jit_gptq_marlin_repack_module()",
        "sglang.jit_kernel.gptq_marlin": "_jit_gptq_marlin_module(torch.float16)",
    },
}


def prebuild(host: str) -> int:
    """Compile KERNELS of a host, each in its own process, on all cores; return the number of failures."""
    begun, running, failed = time.monotonic(), {}, 0
    environment = {"NVCC_APPEND_FLAGS": "--split-compile=0", **os.environ}
    for module, call in KERNELS[host].items():
        code = f"import torch, {module} as module; module.{call}"
        running[module] = subprocess.Popen([sys.executable, "-c", code], env=environment)
    while running:
        time.sleep(0.2)
        for module in [m for m, process in running.items() if process.poll() is not None]:
            status = running.pop(module).returncode
            failed += status != 0
            said = f"not compiled, exit status {status}" if status else "compiled"
            print(f"{module}: {said}, {time.monotonic() - begun:.0f} s", flush=True)
    return failed


# Small, so that several engines fit on one GPU.
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
        """Return, for each token after the first, its log-probability and that of the most probable token."""
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
        time.sleep(
            5
        )  # the scheduler becomes idle some steps after its answer, and crashes if put to sleep before
        self.engine.release_memory_occupation()

    def wake(self) -> None:
        self.engine.resume_memory_occupation()
        self.reload()  # by default SGLang keeps no copy of the weights

    def reload(self) -> None:
        done, message, *_ = self.engine.update_weights_from_disk(self.model)
        if not done:
            raise RuntimeError(f"SGLang could not load its weights again: {message}")

    def close(self) -> None:
        self.engine.shutdown()
