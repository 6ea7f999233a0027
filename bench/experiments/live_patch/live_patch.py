"""Prove a patch of a real host on a GPU, live or by plugin, with compiled code and CUDA graphs.

    live_patch.py vllm MODEL --out rows.jsonl                                # live patch and undo
    live_patch.py vllm MODEL --out rows.jsonl --eager                        # the host's own noise
    FASTKERNELS=1 live_patch.py vllm MODEL --out rows.jsonl --plugin         # patch at start, and its undo
    live_patch.py sglang MODEL --out rows.jsonl --ops attention --attention-backend fa3

Compares the teacher-forced log-probabilities of fixed random prompts before the patch, after it, and after undo, and
looks for our kernels in a profiler trace of replayed steps. MODEL needs real or spread weights (make_checkpoint.py).
Prompts run one at a time without caching, so that the host is deterministic. `kv_tokens` is the size of the KV cache at
a share of --memory of the GPU. --eager compares the host with and without compiled code and graphs: the noise of bf16.
The live run writes its reference to MODEL/reference-HOST.json for the other two.
"""

from __future__ import annotations

import argparse
import json
import random
import time
from pathlib import Path
from typing import Any

import torch
from fk_bench.core import machine as machine_module
from fk_bench.core.rows import Row, Status, Subject, append

import fastkernels
from fastkernels.patch import Request, find_host

PROMPTS, LENGTH, OUTPUT = 8, 64, 24
PRODUCTION = ("linear",)  # runs on cuBLAS: counted, but without a kernel of ours in the trace
OURS = (
    "rms_norm", "silu_and_mul", "rotary_emb", "embedding", "attention", "linear", "kvcache", "grouped_gemm",
)  # fmt: skip


class Vllm:
    def __init__(self, model: str, eager: bool, memory: float, attention_backend: str | None = None) -> None:
        from vllm import LLM

        self.engine = LLM(
            model, max_model_len=4096, gpu_memory_utilization=memory, max_num_seqs=32, seed=0,
            enable_prefix_caching=False, enforce_eager=eager,
            **({"attention_backend": attention_backend} if attention_backend else {}),
        )  # fmt: skip
        cache = self.engine.llm_engine.vllm_config.cache_config
        self.kv_tokens = cache.num_gpu_blocks * cache.block_size

    def _generate(self, prompts: list[list[int]], **params: Any) -> list[Any]:
        from vllm import SamplingParams

        chosen = SamplingParams(temperature=0, detokenize=False, ignore_eos=True, **params)
        return [self.engine.generate({"prompt_token_ids": p}, chosen, use_tqdm=False)[0] for p in prompts]

    def tokens(self, prompts: list[list[int]]) -> list[list[int]]:
        return [list(o.outputs[0].token_ids) for o in self._generate(prompts, max_tokens=OUTPUT)]

    def logprobs(self, prompts: list[list[int]]) -> list[float]:
        found = []
        for output in self._generate(prompts, max_tokens=1, prompt_logprobs=0):
            pairs = zip(output.prompt_logprobs[1:], output.prompt_token_ids[1:], strict=True)
            found += [logprobs[token].logprob for logprobs, token in pairs]
        return found

    def decoded(self, prompts: list[list[int]]) -> list[tuple[list[int], list[float]]]:
        from vllm import SamplingParams

        params = SamplingParams(
            temperature=0, detokenize=False, ignore_eos=True, max_tokens=OUTPUT, logprobs=0
        )
        inputs = [{"prompt_token_ids": p} for p in prompts]
        chosen = [o.outputs[0] for o in self.engine.generate(inputs, params, use_tqdm=False)]
        return [
            (list(c.token_ids), [step[t].logprob for t, step in zip(c.token_ids, c.logprobs, strict=True)])
            for c in chosen
        ]

    def close(self) -> None:
        self.engine.llm_engine.engine_core.shutdown()


class SGLang:
    def __init__(self, model: str, eager: bool, memory: float, attention_backend: str | None = None) -> None:
        import sglang

        self.engine = sglang.Engine(
            model_path=model, mem_fraction_static=memory, context_length=4096, random_seed=0, log_level="warning",
            disable_radix_cache=True, disable_cuda_graph=eager, attention_backend=attention_backend,
        )  # fmt: skip
        self.kv_tokens = self.engine.get_server_info()["max_total_num_tokens"]

    def _generate(self, prompts: list[list[int]], tokens: int, **options: Any) -> list[Any]:
        params = {"temperature": 0, "max_new_tokens": tokens, "ignore_eos": True}
        return [self.engine.generate(input_ids=p, sampling_params=params, **options) for p in prompts]

    def tokens(self, prompts: list[list[int]]) -> list[list[int]]:
        return [o["output_ids"] for o in self._generate(prompts, OUTPUT)]

    def logprobs(self, prompts: list[list[int]]) -> list[float]:
        outputs = self._generate(prompts, 1, return_logprob=True, logprob_start_len=0)
        return [entry[0] for o in outputs for entry in o["meta_info"]["input_token_logprobs"][1:]]

    def decoded(self, prompts: list[list[int]]) -> list[tuple[list[int], list[float]]]:
        params = {"temperature": 0, "max_new_tokens": OUTPUT, "ignore_eos": True}
        outputs = self.engine.generate(input_ids=prompts, sampling_params=params, return_logprob=True)
        return [(o["output_ids"], [e[0] for e in o["meta_info"]["output_token_logprobs"]]) for o in outputs]

    def close(self) -> None:
        self.engine.shutdown()


def difference(a: list[float], b: list[float]) -> dict[str, float]:
    gaps = [abs(x - y) for x, y in zip(a, b, strict=True)]
    return {"logprob_max_abs_diff": max(gaps), "logprob_mean_abs_diff": sum(gaps) / len(gaps)}


def ours(replies: list[dict[str, Any]]) -> dict[str, int]:
    """Return launches of our kernels, by name, in the processes' traces."""
    launches = [item for r in replies for item in r["kernels"].items()]
    return {name: n for name, n in launches if name.startswith("_") and any(o in name for o in OURS)}


def proved(row: dict[str, Any]) -> bool:
    return row["calls"] > 0 and (row["proof"] == "trace" or row["op"] in PRODUCTION)


class Run:
    def __init__(self, args: argparse.Namespace) -> None:
        self.args, self.start, self.rows = args, time.monotonic(), []
        self.host = {"vllm": Vllm, "sglang": SGLang}[args.host](
            args.model, args.eager, args.memory, args.attention_backend
        )
        self.integration = find_host(args.host)
        rng = random.Random(0)
        self.prompts = [[rng.randrange(1000, 120000) for _ in range(LENGTH)] for _ in range(PROMPTS)]
        self.reference = Path(args.model) / f"reference-{args.host}.json"
        self.versions = {args.host: self.integration.version() or "", "torch": torch.__version__}

    def record(self, step: str, ok: bool, metrics: dict[str, float], **case: Any) -> None:
        row = Row(
            run_id=f"live_patch-{self.args.host}", command="live_patch", machine=machine_module.machine(),
            versions=self.versions, commit=machine_module.commit(), status=Status.OK if ok else Status.WRONG,
            subject=Subject(host=self.args.host, model="Llama-3.1-8B shapes, random weights"), metrics=metrics,
            case={"kind": step, "seconds": round(time.monotonic() - self.start, 1), **case},
        )  # fmt: skip
        self.rows.append(row)
        print(step, "ok" if ok else "WRONG", json.dumps(metrics), json.dumps(case)[:2000], flush=True)

    def trace(self) -> list[dict[str, Any]]:
        """Profile a generation whose decode steps replay graphs; return the names of our kernels."""
        self.integration.call(self.host.engine, Request("trace_start"))
        self.host.tokens(self.prompts)
        return self.integration.call(self.host.engine, Request("trace_stop"))

    def against_reference(self) -> dict[str, float]:
        saved = json.loads(self.reference.read_text())
        return difference(saved["logprobs"], self.host.logprobs(saved["forced"]))

    def decode_against_prefill(self) -> dict[str, float]:
        """Compare log-probabilities of a batch's decode steps with those of the same tokens in a prefill.

        Decode steps replay graphs for sequences of different lengths; the teacher-forced prompts do not.
        """
        prompts = [p[: LENGTH - 5 * i] for i, p in enumerate(self.prompts)]
        gaps = []
        for prompt, (tokens, found) in zip(prompts, self.host.decoded(prompts), strict=True):
            forced = self.host.logprobs([prompt + tokens])[-OUTPUT:]
            gaps += [abs(a - b) for a, b in zip(found, forced, strict=True)]
        return {
            "decode_prefill_max_abs_diff": max(gaps),
            "decode_prefill_mean_abs_diff": sum(gaps) / len(gaps),
        }

    def plugin(self) -> None:
        trace = self.trace()
        active = [w for r in trace for w in r["rows"] if w["state"] == "active"]
        ok = bool(active) and all(map(proved, active))
        metrics = {"kv_tokens": self.host.kv_tokens, **self.against_reference()}
        self.record("plugin", ok, metrics, rows=active, kernels=ours(trace))
        at = time.monotonic()
        self.integration.call(self.host.engine, Request("undo"))
        self.undone(time.monotonic() - at)

    def live(self) -> None:
        host, prompts = self.host, self.prompts
        before = host.tokens(prompts)
        forced = [p + t for p, t in zip(prompts, before, strict=True)]
        host.logprobs(forced)  # the first run compiles kernels for these shapes
        first = host.logprobs(forced)
        noise = difference(first, host.logprobs(forced))
        equal = sum(a == b for a, b in zip(before, host.tokens(prompts), strict=True)) / PROMPTS
        own = self.decode_against_prefill()
        self.record("unpatched", True, {"kv_tokens": host.kv_tokens, "self_agreement": equal, **noise, **own})
        saved = {"forced": forced, "logprobs": first, "tokens": before, "noise": noise}
        self.reference.write_text(json.dumps(saved))
        at = time.monotonic()
        report = fastkernels.patch(host.engine, ops=self.args.ops.split(",") if self.args.ops else None)
        took = time.monotonic() - at
        after, trace = host.tokens(prompts), self.trace()
        print(report.refresh(), flush=True)
        agreement = sum(a == b for a, b in zip(before, after, strict=True)) / PROMPTS
        ok = bool(report.active) and all(proved(vars(r)) for r in report.active)
        metrics = {"patch_s": took, "token_agreement": agreement, **self.against_reference()}
        metrics |= (found := self.decode_against_prefill())
        ok &= found["decode_prefill_mean_abs_diff"] <= 2 * own["decode_prefill_mean_abs_diff"]
        self.record("patched", ok, metrics, rows=report.to_dict()["rows"], kernels=ours(trace))
        at = time.monotonic()
        report.undo()
        self.undone(time.monotonic() - at)

    def undone(self, took: float) -> None:
        """Check that the host gives its unpatched answers after an undo, as exactly as it repeats itself."""
        saved = json.loads(self.reference.read_text())
        found, same = self.against_reference(), self.host.tokens(self.prompts) == saved["tokens"]
        exact = same and found["logprob_max_abs_diff"] <= saved["noise"]["logprob_max_abs_diff"]
        self.record("undone", exact, {"undo_s": took, "tokens_equal": float(same), **found})


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("host", choices=("vllm", "sglang"))
    parser.add_argument("model")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument(
        "--plugin", action="store_true", help="the engine was patched at start (FASTKERNELS=1)"
    )
    parser.add_argument("--eager", action="store_true", help="measure the host's noise; no patch")
    parser.add_argument(
        "--attention-backend", help="the host's own name, e.g. fa3 for SGLang; default: the host's"
    )
    parser.add_argument("--memory", type=float, default=0.5, help="share of the GPU's")
    parser.add_argument("--ops", help="comma-separated, default: the host's defaults")
    args = parser.parse_args()
    run = Run(args)
    if args.eager:
        run.record("eager", True, run.against_reference())
    elif args.plugin:
        run.plugin()
    else:
        run.live()
    append(args.out, run.rows)
    run.host.close()
    raise SystemExit(0 if all(r.status == Status.OK for r in run.rows) else 1)


if __name__ == "__main__":
    main()
