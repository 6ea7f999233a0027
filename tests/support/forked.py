"""Greedy tokens and their log probabilities in a host: python forked.py HOST OUT.json FOLDER...

Runs in the host's environment, without this package. Of a model that does not start, the reason is saved.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

PROMPTS = ["The quick brown fox jumps", "a", "0123456789 " * 3]
TOKENS = 6
Outputs = list[tuple[list[int], list[float]]]  # of each prompt: tokens, and the log probability of each


def vllm(folder: str) -> Outputs:
    from vllm import LLM, SamplingParams
    from vllm.distributed.parallel_state import cleanup_dist_env_and_memory

    llm = LLM(
        folder,
        dtype="float32",
        max_model_len=128,
        max_num_seqs=4,
        enforce_eager=True,
        seed=0,
        kv_cache_memory_bytes=1 << 26,
    )
    params = SamplingParams(temperature=0, max_tokens=TOKENS, ignore_eos=True, logprobs=1)
    found = [llm.generate([p], params, use_tqdm=False)[0].outputs[0] for p in PROMPTS]
    llm.llm_engine.engine_core.shutdown()
    del llm
    cleanup_dist_env_and_memory()
    steps = [zip(o.token_ids, o.logprobs or [], strict=True) for o in found]
    return [(list(o.token_ids), [of[t].logprob for t, of in s]) for o, s in zip(found, steps, strict=True)]


def sglang(folder: str) -> Outputs:
    import sglang as host

    engine = host.Engine(
        model_path=folder, dtype="float32", device="cpu", attention_backend="torch_native", sampling_backend="pytorch",
        disable_cuda_graph=True, max_total_tokens=2048, random_seed=0, log_level="warning",
    )  # fmt: skip
    sampling = {"temperature": 0, "max_new_tokens": TOKENS, "ignore_eos": True}
    found = [engine.generate(p, sampling, return_logprob=True) for p in PROMPTS]
    engine.shutdown()
    return [(o["output_ids"], [s[0] for s in o["meta_info"]["output_token_logprobs"]]) for o in found]


def transformers(folder: str) -> Outputs:
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    model, tokenizer = AutoModelForCausalLM.from_pretrained(folder), AutoTokenizer.from_pretrained(folder)
    found: Outputs = []
    for prompt in PROMPTS:
        ids = tokenizer(prompt, return_tensors="pt").input_ids
        out = model.generate(
            ids, max_new_tokens=TOKENS, min_new_tokens=TOKENS, do_sample=False, output_logits=True,
            return_dict_in_generate=True,
        )  # fmt: skip
        tokens = out.sequences[0, ids.shape[1] :].tolist()
        logprobs = [torch.log_softmax(step[0].float(), -1) for step in out.logits]
        found.append((tokens, [float(p[t]) for p, t in zip(logprobs, tokens, strict=True)]))
    return found


HOSTS: dict[str, Callable[[str], Outputs]] = {f.__name__: f for f in (vllm, sglang, transformers)}


def main(host: str, out: str, folders: list[str]) -> None:
    results: dict[str, Any] = {}
    for folder in folders:
        try:
            results[Path(folder).name] = HOSTS[host](folder)
        except Exception as error:
            results[Path(folder).name] = f"{type(error).__name__}: {error}"
    Path(out).write_text(json.dumps(results))


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], sys.argv[3:])
