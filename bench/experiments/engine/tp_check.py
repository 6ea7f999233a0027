"""Check tensor parallelism of our engine: same model as on one GPU, throughput, and recovery from a killed worker.

    tp_check.py --out rows.jsonl [--size 2] [--experts 2] [--model FOLDER] [--requests 1,64,256] [--no-kill]

Dummy weights in Llama-3.1-8B's shapes, or those of --model's config.json. Runs one engine after the other with CUDA
graphs: on one GPU, then on `size`. Tokens of a random model diverge by rounding alone, so the log-probabilities of the
same text are compared; more than three times the mean difference of one GPU against itself, with other chunk sizes, is
wrong. At last a worker is killed during a generation: the engine must end within 10 s and leave no process, and a new
engine must start in the same process. Rows: kind 'agreement', 'throughput', 'kill', 'restart'.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import random
import signal
import statistics
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # bench/

import psutil
import torch
from experiments.checkpoints.make_checkpoint import CONFIG
from fk_bench.core import machine as machine_module
from fk_bench.core.rows import Row, Status, Subject, append

from fastkernels import LLM, SamplingParams, __version__
from fastkernels.engine.execution.executor import WorkerDied

FACTOR, DEADLINE = 3.0, 10.0


class Results:
    """Writes rows as they are made; `wrong` counts those that are not OK."""

    def __init__(self, out: Path, model: str):
        self.out, self.model, self.wrong = out, model, 0

    def add(
        self,
        kind: str,
        metrics: dict[str, float],
        status: Status = Status.OK,
        reason: str = "",
        **case: Any,
    ) -> None:
        self.wrong += status is not Status.OK
        row = Row(
            run_id="tp_check", command="tp_check", machine=machine_module.machine(), commit=machine_module.commit(),
            versions={"fastkernels": __version__, "torch": torch.__version__}, status=status, reason=reason,
            subject=Subject(model=self.model, host="fastkernels"), case={"kind": kind, **case}, metrics=metrics,
        )  # fmt: skip
        append(self.out, [row])
        print(status.value, row.case, {k: round(v, 5) for k, v in metrics.items()}, reason, flush=True)


def close(llm: LLM) -> None:
    llm.llm_engine.shutdown()
    del llm.llm_engine  # its graphs, cache and weights
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


def throughput(llm: LLM, args: argparse.Namespace, results: Results, size: int) -> list[list[int]]:
    """Measure throughput; return the prompts and greedy tokens of the batch of 8."""
    rng, sequences = random.Random(0), []
    vocabulary = llm.llm_engine.hf_config.vocab_size
    params = SamplingParams(temperature=0, max_tokens=args.output, ignore_eos=True)
    for n in (8, *args.requests):
        prompts = [[rng.randrange(10, vocabulary) for _ in range(args.input)] for _ in range(n)]
        llm.generate(prompts, params)  # fills the prefix cache, so that only decoding is timed
        start = time.perf_counter()
        outputs = llm.generate(prompts, params)
        seconds = time.perf_counter() - start
        metrics = {"output_tokens_per_s": n * args.output / seconds, "tpot_ms": 1000 * seconds / args.output}
        results.add(
            "throughput", metrics, requests=n, input_len=args.input, output_len=args.output, size=size
        )
        if n == 8:
            sequences = [p + list(o.outputs[0].token_ids) for p, o in zip(prompts, outputs, strict=True)]
    return sequences


def logprobs(llm: LLM, sequences: list[list[int]]) -> list[float]:
    """Return the log-probability of every token of these texts but the first."""
    params = SamplingParams(temperature=0, max_tokens=1, prompt_logprobs=0)
    found = []
    for output in llm.generate(sequences, params):
        assert output.prompt_logprobs is not None
        for token, given in zip(output.prompt_token_ids[1:], output.prompt_logprobs[1:], strict=True):
            assert given is not None
            found.append(given[token].logprob)
    return found


def distance(a: list[float], b: list[float]) -> dict[str, float]:
    gaps = [abs(x - y) for x, y in zip(a, b, strict=True)]
    return {"gap_mean": statistics.fmean(gaps), "gap_max": max(gaps)}


def prefix(a: list[list[int]], b: list[list[int]], start: int) -> float:
    """Return the mean share of generated tokens before the first difference."""
    shares = []
    for x, y in zip(a, b, strict=True):
        same = next((i for i in range(start, len(x)) if x[i] != y[i]), len(x))
        shares.append((same - start) / (len(x) - start))
    return statistics.fmean(shares)


def kill(llm: LLM, args: argparse.Namespace, results: Results) -> None:
    """Kill a worker one second into a generation, which then waits in a collective."""
    worker = llm.llm_engine.executor._ranks.workers[-1].process  # type: ignore[attr-defined]
    killed: list[float] = []

    def end() -> None:
        killed.append(time.monotonic())
        os.kill(worker.pid, signal.SIGKILL)

    timer = threading.Timer(1.0, end)
    timer.start()
    params = SamplingParams(temperature=0, max_tokens=100_000, ignore_eos=True)
    status, reason = Status.FAILED, "the generation ended normally"
    try:
        llm.generate([[i + 10] * args.input for i in range(64)], params)
    except WorkerDied as error:
        reason = str(error).splitlines()[0]
        status = Status.OK if "SIGKILL" in reason else Status.FAILED
    timer.cancel()
    seconds = time.monotonic() - killed[0] if killed else 0.0
    left = sum("engine.worker" in " ".join(c.cmdline()) for c in psutil.Process().children(recursive=True))
    if seconds > DEADLINE or left:
        status = Status.FAILED
    results.add("kill", {"seconds": seconds, "processes_left": left}, status, reason, size=args.size)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--model", type=Path, help="folder with a config.json; weights are not read")
    parser.add_argument("--size", type=int, default=2)
    parser.add_argument("--experts", type=int, default=1, help="expert_parallel_size of those ranks")
    parser.add_argument(
        "--requests", type=lambda text: [int(n) for n in text.split(",")], default=[1, 64, 256]
    )
    parser.add_argument("--input", type=int, default=128)
    parser.add_argument("--output", type=int, default=128)
    parser.add_argument("--max-model-len", type=int, default=4096)
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--memory", type=float, default=0.8, help="gpu_memory_utilization")
    parser.add_argument("--cache", type=float, help="GiB of the KV cache on each GPU, instead of --memory")
    parser.add_argument("--no-kill", action="store_true")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        folder = args.model
        if folder is None:
            folder = Path(scratch)
            (folder / "config.json").write_text(json.dumps(CONFIG))
        results = Results(args.out, str(args.model or "Llama-3.1-8B shapes"))
        run(args, folder, results)
    raise SystemExit(1 if results.wrong else 0)


def run(args: argparse.Namespace, folder: Path, results: Results) -> None:
    def make(size: int, **settings: Any) -> LLM:
        start = time.perf_counter()
        llm = LLM(
            str(folder), device=args.device, load_format="dummy", skip_tokenizer_init=True, tensor_parallel_size=size,
            max_model_len=args.max_model_len, gpu_memory_utilization=args.memory,
            expert_parallel_size=args.experts if size > 1 else 1,
            kv_cache_memory=None if args.cache is None else int(args.cache * 2**30), **settings,
        )  # fmt: skip
        print(f"size {size}: {time.perf_counter() - start:.1f} s to start", flush=True)
        return llm

    one = make(1)
    sequences = throughput(one, args, results, 1)
    expected = logprobs(one, sequences)
    close(one)
    chunked = make(1, max_num_seqs=64, max_num_batched_tokens=100, enforce_eager=True)
    noise = distance(expected, logprobs(chunked, sequences))
    close(chunked)
    results.add("agreement", noise, size=1, against="one GPU, other chunks")
    many = make(args.size)
    generated = throughput(many, args, results, args.size)
    found = distance(expected, logprobs(many, sequences))
    right = found["gap_mean"] <= FACTOR * noise["gap_mean"] + 1e-6
    metrics = {**found, "common_prefix": prefix(sequences, generated, args.input)}
    results.add("agreement", metrics, Status.OK if right else Status.WRONG, size=args.size, against="one GPU")
    if args.no_kill:
        close(many)
        return
    kill(many, args, results)
    close(many)
    again = make(args.size)
    params = SamplingParams(temperature=0, max_tokens=args.output, ignore_eos=True)
    outputs = again.generate([s[: args.input] for s in sequences], params)
    same = [p[: args.input] + list(o.outputs[0].token_ids) for p, o in zip(sequences, outputs, strict=True)]
    results.add("restart", {"common_prefix": prefix(generated, same, args.input)}, size=args.size)
    close(again)


if __name__ == "__main__":
    main()
