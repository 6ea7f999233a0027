"""Our engine on a GPU against transformers: with and without CUDA graphs, are its greedy tokens the model's choice?

    python bench/scenarios/engine_check.py MODEL --out rows.jsonl

transformers reads each generated sequence at once; the gap of a token is (largest logit - the token's logit). Rounding
turns near-ties, so gaps of a few hundredths are bf16 noise; a wrong kernel or graph gives gaps of whole logits.
"""

from __future__ import annotations

import argparse
import gc
import random
import time
from pathlib import Path

import torch
from fk_bench import machine as machine_module
from fk_bench.rows import Row, Status, Subject, append

from fastkernels import LLM, SamplingParams, __version__

BATCHES, INPUT, OUTPUT, LIMIT = (1, 3, 8, 32), 100, 64, 0.5


def gaps(model: str, sequences: list[list[int]]) -> list[float]:
    from transformers import AutoModelForCausalLM

    reference = AutoModelForCausalLM.from_pretrained(model, dtype=torch.bfloat16).cuda().eval()
    found: list[float] = []
    with torch.inference_mode():
        for sequence in sequences:
            ids = torch.tensor([sequence], device="cuda")
            logits = reference(ids).logits[0, INPUT - 1 : -1].float()
            chosen = logits.gather(1, ids[0, INPUT:, None])[:, 0]
            found += (logits.max(dim=1).values - chosen).tolist()
    return found


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("model")
    parser.add_argument("--out", type=Path, required=True)
    args = parser.parse_args()
    rng = random.Random(0)
    prompts = {n: [[rng.randrange(1000, 49000) for _ in range(INPUT)] for _ in range(n)] for n in BATCHES}
    params = SamplingParams(temperature=0, max_tokens=OUTPUT, ignore_eos=True)
    generated, speed = {}, {}
    for eager in (True, False):
        llm = LLM(args.model, enforce_eager=eager, max_model_len=4096, gpu_memory_utilization=0.5)
        for n in BATCHES:
            llm.generate(prompts[n], params)
            start = time.perf_counter()
            outputs = llm.generate(prompts[n], params)
            speed[eager, n] = n * OUTPUT / (time.perf_counter() - start)
            tokens = [list(o.outputs[0].token_ids) for o in outputs]
            generated[eager, n] = [p + t for p, t in zip(prompts[n], tokens, strict=True)]
        del llm
        gc.collect()
        torch.cuda.empty_cache()
    wrong = 0
    for (eager, n), sequences in generated.items():
        found = gaps(args.model, sequences[:8])
        agree = sum(a == b for a, b in zip(sequences, generated[True, n], strict=True)) / n
        metrics = {
            "gap_max": max(found), "gap_mean": sum(found) / len(found), "equal_to_eager": agree,
            "output_tokens_per_s": speed[eager, n],
        }  # fmt: skip
        wrong += metrics["gap_max"] > LIMIT
        row = Row(
            run_id="engine_check", command="engine_check", machine=machine_module.machine(),
            commit=machine_module.commit(), versions={"fastkernels": __version__, "torch": torch.__version__},
            status=Status.WRONG if metrics["gap_max"] > LIMIT else Status.OK, subject=Subject(host="fastkernels"),
            case={"kind": "eager" if eager else "graphs", "requests": n, "input_len": INPUT, "output_len": OUTPUT},
            metrics=metrics,
        )  # fmt: skip
        append(args.out, [row])
        print(row.case, {k: round(v, 4) for k, v in metrics.items()}, flush=True)
    raise SystemExit(1 if wrong else 0)


if __name__ == "__main__":
    main()
