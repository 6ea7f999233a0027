"""Prove a patch of a real host on a GPU: plugin or live, compiled code and CUDA graphs on.

    python bench/scenarios/live_patch.py vllm MODEL --out rows.jsonl            # live patch and undo
    FASTKERNELS=1 python bench/scenarios/live_patch.py vllm MODEL --out rows.jsonl --plugin

Compared are the teacher-forced log-probabilities of fixed random prompts (MODEL needs real or spread weights:
make_checkpoint.py) before the patch, after it, and after the undo; and the names of our kernels in a profiler
trace of replayed steps. The live run leaves its reference in MODEL/reference-HOST.json for the plugin run.
"""

from __future__ import annotations

import argparse
import json
import random
import time
from pathlib import Path
from typing import Any

PROMPTS, LENGTH, OUTPUT = 8, 64, 24


class Vllm:
    def __init__(self, model: str) -> None:
        from vllm import LLM

        self.engine = LLM(model, max_model_len=4096, gpu_memory_utilization=0.5, max_num_seqs=32, seed=0)

    def tokens(self, prompts: list[list[int]]) -> list[list[int]]:
        from vllm import SamplingParams

        params = SamplingParams(temperature=0, max_tokens=OUTPUT, ignore_eos=True, detokenize=False)
        outputs = self.engine.generate([{"prompt_token_ids": p} for p in prompts], params, use_tqdm=False)
        return [list(o.outputs[0].token_ids) for o in outputs]

    def logprobs(self, prompts: list[list[int]]) -> list[float]:
        from vllm import SamplingParams

        params = SamplingParams(temperature=0, max_tokens=1, prompt_logprobs=0, detokenize=False)
        outputs = self.engine.generate([{"prompt_token_ids": p} for p in prompts], params, use_tqdm=False)
        return [
            d[t].logprob
            for o in outputs
            for d, t in zip(o.prompt_logprobs[1:], o.prompt_token_ids[1:], strict=True)
        ]


class SGLang:
    def __init__(self, model: str) -> None:
        import sglang

        self.engine = sglang.Engine(
            model_path=model, mem_fraction_static=0.5, context_length=4096, random_seed=0, log_level="warning"
        )

    def tokens(self, prompts: list[list[int]]) -> list[list[int]]:
        params = {"temperature": 0, "max_new_tokens": OUTPUT, "ignore_eos": True}
        return [o["output_ids"] for o in self.engine.generate(input_ids=prompts, sampling_params=params)]

    def logprobs(self, prompts: list[list[int]]) -> list[float]:
        params = {"temperature": 0, "max_new_tokens": 1, "ignore_eos": True}
        outputs = self.engine.generate(
            input_ids=prompts, sampling_params=params, return_logprob=True, logprob_start_len=0
        )
        return [entry[0] for o in outputs for entry in o["meta_info"]["input_token_logprobs"][1:]]


def difference(a: list[float], b: list[float]) -> dict[str, float]:
    gaps = [abs(x - y) for x, y in zip(a, b, strict=True)]
    return {"logprob_max_abs_diff": max(gaps), "logprob_mean_abs_diff": sum(gaps) / len(gaps)}


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
    parser.add_argument("--ops", help="comma-separated, default: the host's defaults")
    args = parser.parse_args()

    import torch
    from fk_bench import machine as machine_module
    from fk_bench.rows import Row, Status, Subject, append

    import fastkernels
    from fastkernels.patch import Request, find_host

    start = time.monotonic()
    host = {"vllm": Vllm, "sglang": SGLang}[args.host](args.model)
    integration = find_host(args.host)
    rng = random.Random(0)
    prompts = [[rng.randrange(1000, 120000) for _ in range(LENGTH)] for _ in range(PROMPTS)]
    machine, commit = machine_module.machine(), machine_module.commit()
    versions = {args.host: integration.version() or "", "torch": torch.__version__}
    rows: list[Any] = []

    def record(step: str, ok: bool, metrics: dict[str, float], reason: str = "", **case: Any) -> None:
        row = Row(
            run_id=f"live_patch-{args.host}", command="live_patch", machine=machine, versions=versions, commit=commit,
            status=Status.OK if ok else Status.WRONG, reason=reason, subject=Subject(host=args.host),
            case={"kind": step, "seconds": round(time.monotonic() - start, 1), **case}, metrics=metrics,
        )  # fmt: skip
        rows.append(row)
        print(step, "ok" if ok else "WRONG", json.dumps(metrics), reason, json.dumps(case)[:1500], flush=True)

    def kernels() -> list[dict[str, Any]]:
        """Profile a generation, which replays graphs; the replies name our kernels."""
        integration.call(host.engine, Request("trace_start"))
        host.tokens(prompts)
        return integration.call(host.engine, Request("trace_stop"))

    reference_file = Path(args.model) / f"reference-{args.host}.json"
    if args.plugin:
        reference = json.loads(reference_file.read_text())
        replies = integration.call(host.engine, Request("report"))
        trace = kernels()
        found = difference(reference["logprobs"], host.logprobs(reference["forced"]))
        ran = all(w["calls"] > 0 for r in replies for w in r["rows"] if w["state"] == "active")
        ok = ran and found["logprob_max_abs_diff"] < 10 * max(reference["noise"], 0.02)
        record("plugin", ok, found, rows=[w for r in replies for w in r["rows"]], trace=trace)
    else:
        before = host.tokens(prompts)
        again = host.tokens(prompts)
        forced = [p + t for p, t in zip(prompts, before, strict=True)]
        first, second = host.logprobs(forced), host.logprobs(list(reversed(forced)))
        width = LENGTH + OUTPUT - 1
        second = [x for i in reversed(range(PROMPTS)) for x in second[i * width : (i + 1) * width]]
        noise = difference(first, second)
        record(
            "unpatched",
            True,
            {"self_agreement": sum(a == b for a, b in zip(before, again, strict=True)) / PROMPTS, **noise},
        )
        reference = {"forced": forced, "logprobs": first, "noise": noise["logprob_max_abs_diff"]}
        reference_file.write_text(json.dumps(reference))
        ops = args.ops.split(",") if args.ops else None
        at = time.monotonic()
        report = fastkernels.patch(host.engine, ops=ops)
        took = time.monotonic() - at
        print(report, flush=True)
        after = host.tokens(prompts)
        trace = kernels()
        report.refresh()
        found = difference(first, host.logprobs(forced))
        ok = bool(report.active) and found["logprob_max_abs_diff"] < 10 * max(reference["noise"], 0.02)
        agreement = sum(a == b for a, b in zip(before, after, strict=True)) / PROMPTS
        record(
            "patched", ok, {"patch_s": took, "token_agreement": agreement, **found},
            rows=report.to_dict()["rows"], trace=trace,
        )  # fmt: skip
        at = time.monotonic()
        report.undo()
        took = time.monotonic() - at
        restored = host.tokens(prompts) == before
        found = difference(first, host.logprobs(forced))
        record(
            "undone",
            restored and found["logprob_max_abs_diff"] == 0.0,
            {"undo_s": took, **found, "tokens_equal": float(restored)},
        )
    append(args.out, rows)
    if args.host == "sglang":
        host.engine.shutdown()
    raise SystemExit(0 if all(r.status == Status.OK for r in rows) else 1)


if __name__ == "__main__":
    main()
