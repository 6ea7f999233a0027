"""A host's engine that is recorded, in its own process: `python host_process.py JSON`, run by its interpreter.

It writes lines of JSON to the original standard output; the host's own output goes to standard error. The first line is
{"host_version", "patched": {op: modules}, "off": {op: reason}}. It then reads one line {"waves", "limits", "folder",
"meta"}, answers each wave with {"wave", "tokens"}, and ends with {"recorded"}. Imports only fastkernels of ours.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

# A script's folder is on sys.path, where its modules would shadow packages of the same names.
sys.path[:] = [p for p in sys.path if os.path.abspath(p) != os.path.dirname(os.path.abspath(__file__))]

Requests = list[dict[str, Any]]
WARM_UP = {"prompt": [5, 6, 7, 8, 9], "max_tokens": 2, "temperature": 0.0, "top_p": 1.0, "seed": 0}


@dataclass
class Engine:
    """generate(requests) -> generated tokens; start(limits) and stop(folder, meta) -> recorded calls."""

    version: str
    generate: Callable[[Requests], int]
    start: Callable[[dict[str, Any]], None]
    stop: Callable[[str, dict[str, Any]], int]
    patched: dict[str, int] = field(default_factory=dict)
    off: dict[str, str] = field(default_factory=dict)


def fastkernels(options: dict[str, Any]) -> Engine:
    import fastkernels
    from fastkernels import LLM, SamplingParams, capture
    from fastkernels.models.common.checkpoints import checkpoint
    from fastkernels.models.common.descriptions import registry
    from fastkernels.models.common.plans import build

    settings = {
        "dtype": options["dtype"], "skip_tokenizer_init": True, "max_model_len": options["max_model_len"],
        "max_num_seqs": options["max_num_seqs"], "enforce_eager": True,
    }  # fmt: skip
    config = build.load_config(checkpoint.resolve(options["model"]))
    if registry.find(config.architectures[0]).arch.runner == "Generate":
        settings["num_blocks"] = options["kv_tokens"] // 16 + 1
    else:  # without generated tokens
        settings["max_model_len"] = min(settings["max_model_len"], config.max_position_embeddings)
    with capture.record_modules() as modules:
        llm = LLM(options["model"], **{**settings, **options["engine_args"]})

    def generate(requests: Requests) -> int:
        if llm.llm_engine.kind == "Encode":
            llm.embed([{"prompt_token_ids": r["prompt"]} for r in requests])
            return sum(len(r["prompt"]) for r in requests)
        params = [SamplingParams(ignore_eos=True, detokenize=False, **_how(r)) for r in requests]
        outputs = llm.generate([{"prompt_token_ids": r["prompt"]} for r in requests], params)
        return sum(len(o.outputs[0].token_ids) for o in outputs)

    def stop(folder: str, meta: dict[str, Any]) -> int:
        recording = capture.stop()
        recording.modules = modules.rows(llm.llm_engine.runner.model)
        recording.save(folder, meta)
        return recording.calls

    return Engine(fastkernels.__version__, generate, lambda limits: _start(capture, limits), stop)


def _start(capture: Any, limits: dict[str, Any]) -> None:
    capture.start(capture.Limits(**limits))


def vllm(options: dict[str, Any]) -> Engine:
    from vllm import LLM, SamplingParams

    settings = {
        "dtype": options["dtype"], "skip_tokenizer_init": True, "max_model_len": options["max_model_len"],
        "max_num_seqs": options["max_num_seqs"], "enforce_eager": True,
    }  # fmt: skip
    if options["gpu"]:
        settings["num_gpu_blocks_override"] = options["kv_tokens"] // 16 + 1
    llm = LLM(model=options["model"], **{**settings, **options["engine_args"]})

    def generate(requests: Requests) -> int:
        params = [SamplingParams(ignore_eos=True, detokenize=False, **_how(r)) for r in requests]
        prompts = [{"prompt_token_ids": r["prompt"]} for r in requests]
        return sum(len(o.outputs[0].token_ids) for o in llm.generate(prompts, params, use_tqdm=False))

    return _patched(llm, "vllm", generate, options)


def sglang(options: dict[str, Any]) -> Engine:
    import sglang

    settings: dict[str, Any] = {
        "dtype": options["dtype"], "skip_tokenizer_init": True, "context_length": options["max_model_len"],
        "max_running_requests": options["max_num_seqs"], "max_total_tokens": options["kv_tokens"],
        "disable_cuda_graph": True,
    }  # fmt: skip
    if not options["gpu"]:
        settings |= {"device": "cpu", "attention_backend": "torch_native", "sampling_backend": "pytorch"}
    engine = sglang.Engine(model_path=options["model"], **{**settings, **options["engine_args"]})

    def generate(requests: Requests) -> int:
        params = [
            {
                **{k: r[k] for k in ("temperature", "top_p")},
                "max_new_tokens": r["max_tokens"],
                "ignore_eos": True,
            }
            for r in requests
        ]
        outputs = engine.generate(input_ids=[r["prompt"] for r in requests], sampling_params=params)
        return sum(o["meta_info"]["completion_tokens"] for o in outputs)

    return _patched(engine, "sglang", generate, options)


def _how(request: dict[str, Any]) -> dict[str, Any]:
    return {k: request[k] for k in ("max_tokens", "temperature", "top_p", "seed")}


def _patched(engine: Any, host: str, generate: Callable[[Requests], int], options: dict[str, Any]) -> Engine:
    """The live engine with our modules in it; calls are recorded in its processes."""
    import fastkernels
    from fastkernels.core import registry
    from fastkernels.patch import PatchError, Request, find_host

    names = options["ops"] or [n for n in registry.op_names() if _is_put_in(registry.get(n), host)]
    report = fastkernels.patch(engine, ops=names)
    integration = find_host(engine)

    def call(action: str, options: dict[str, Any]) -> list[dict[str, Any]]:
        replies = integration.call(engine, Request(action, options=options))
        errors = [f"rank {r['rank']}: {r['error']}" for r in replies if r["error"]]
        if errors:
            raise PatchError(f"{action}: {'; '.join(errors)}")
        return replies

    def start(limits: dict[str, Any]) -> None:
        call("record_start", limits)

    def stop(folder: str, meta: dict[str, Any]) -> int:
        return call("record_stop", {"folder": folder, "meta": meta})[0]["recorded"]

    made = Engine(report.version or "", generate, start, stop)
    for row in report.rows:
        if row.rank == 0 and row.state == "active":
            made.patched[row.op] = made.patched.get(row.op, 0) + row.modules
        elif row.rank == 0 and row.reason:
            made.off.setdefault(row.op, row.reason)
    made.off = {op: reason for op, reason in made.off.items() if op not in made.patched}
    return made


def _is_put_in(spec: Any, host: str) -> bool:
    """Whether a live engine can have the op at the level of single calls; layers would hide their parts' calls."""
    return any(t.seam in ("leaf", "quant_method", "experts", "attention") for t in spec.targets_for(host))


def main() -> None:
    options = json.loads(sys.argv[1])
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # hosts print to standard output
    hosts = {"fastkernels": fastkernels, "vllm": vllm, "sglang": sglang}
    from fk_bench.offline import refusals

    with refusals.answered(answers):
        engine = hosts[options["host"]](options)
    engine.generate([WARM_UP])
    first = {"host_version": engine.version, "patched": engine.patched, "off": engine.off}
    print(json.dumps(first), file=answers, flush=True)
    work = json.loads(sys.stdin.readline())
    engine.start(work["limits"])
    for i, wave in enumerate(work["waves"]):
        print(json.dumps({"wave": i, "tokens": engine.generate(wave)}), file=answers, flush=True)
    print(json.dumps({"recorded": engine.stop(work["folder"], work["meta"])}), file=answers, flush=True)


if __name__ == "__main__":
    main()
