"""Where a step of a real host goes, kernel by kernel: stock, and patched by the plugin. By hand, on a GPU.

    python bench/scenarios/host_step.py vllm MODEL --out rows.jsonl
    FASTKERNELS=1 python bench/scenarios/host_step.py vllm MODEL --out rows.jsonl

A prompt's step is a generation of one token; a decode's is what --steps more tokens take, over --steps. The wall clock
is the median of generations without a profiler, kernels are from one with it, in the host's own processes: launches and
us a step. Kernels that start early overlap, so their sum may be more than the step. `--show rows.jsonl` prints what is
in a file, the longest kernels first. Both lanes may start at once where they name the same --lock file.
"""

from __future__ import annotations

import argparse
import fcntl
import json
import random
import re
import statistics
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from common import Results

from fastkernels.patch import Request, find_host

ROUNDS = 5
CPU_SIDE = re.compile(r"cu(da)?[A-Z]|Activity ")  # calls of CUDA, and the profiler's own


class Vllm:
    def __init__(self, options: argparse.Namespace) -> None:
        from vllm import LLM

        self.engine = LLM(
            options.model, gpu_memory_utilization=options.memory, enable_prefix_caching=True, seed=0,
            kv_cache_memory_bytes=int(options.kv_gib * 2**30),
            **({"max_model_len": options.model_len} if options.model_len else {}),
        )  # fmt: skip

    def generate(self, prompts: list[list[int]], tokens: int) -> None:
        from vllm import SamplingParams

        params = SamplingParams(temperature=0, detokenize=False, ignore_eos=True, max_tokens=tokens)
        self.engine.generate([{"prompt_token_ids": p} for p in prompts], params, use_tqdm=False)

    def close(self) -> None:
        self.engine.llm_engine.engine_core.shutdown()


class SGLang:
    def __init__(self, options: argparse.Namespace) -> None:
        import sglang

        self.engine = sglang.Engine(
            model_path=options.model, mem_fraction_static=options.memory, random_seed=0, log_level="warning",
            **({"context_length": options.model_len} if options.model_len else {}),
        )  # fmt: skip

    def generate(self, prompts: list[list[int]], tokens: int) -> None:
        params = {"temperature": 0, "max_new_tokens": tokens, "ignore_eos": True}
        self.engine.generate(input_ids=prompts, sampling_params=params)

    def close(self) -> None:
        self.engine.shutdown()


HOSTS = {"vllm": Vllm, "sglang": SGLang}
Totals = dict[str, tuple[float, float]]  # {kernel: (launches, us)}


def minus(a: Totals, b: Totals, steps: int) -> Totals:
    """What is in `a` and not in `b`, a step."""
    zero = (0.0, 0.0)
    pairs = {k: zip(a.get(k, zero), b.get(k, zero), strict=True) for k in {**a, **b}}
    found = {k: tuple((x - y) / steps for x, y in pair) for k, pair in pairs.items()}
    return {k: (n, us) for k, (n, us) in found.items() if n or us}


class Meter:
    def __init__(self, options: argparse.Namespace) -> None:
        self.options, self.host = options, HOSTS[options.host](options)
        self.integration = find_host(options.host)
        self.rng = random.Random(0)

    def prompts(self, count: int, length: int) -> list[list[int]]:
        return [[self.rng.randrange(10, 250) for _ in range(length)] for _ in range(count)]

    def seconds(self, prompts: list[list[int]], tokens: int) -> float:
        start = time.perf_counter()
        self.host.generate(prompts, tokens)
        return time.perf_counter() - start

    def kernels(self, prompts: list[list[int]], tokens: int) -> Totals:
        """Of all processes; the CPU's calls of CUDA are left out."""
        self.integration.call(self.host.engine, Request("trace_start"))
        self.host.generate(prompts, tokens)
        found: dict[str, tuple[float, float]] = {}
        for reply in self.integration.call(self.host.engine, Request("trace_stop")):
            for name, launches in reply["kernels"].items():
                if not CPU_SIDE.match(name):
                    n, us = found.get(name, (0.0, 0.0))
                    found[name] = (n + launches, us + reply["us"][name])
        return found

    def measure(self) -> Iterator[tuple[dict[str, Any], float, Totals]]:
        """(case, ms of a step by the wall clock, kernels a step)."""
        o = self.options
        for count, length in o.prefill:
            self.seconds(self.prompts(count, length), 1)
            wall = statistics.median(self.seconds(self.prompts(count, length), 1) for _ in range(ROUNDS))
            case = {"phase": "prefill", "batch": count, "context": length}
            yield case, 1e3 * wall, self.kernels(self.prompts(count, length), 1)
        for count in o.batch:
            prompts = self.prompts(count, o.input_len)
            self.seconds(prompts, o.steps)  # from here on they are cached: little but decodes is left
            walls = []
            for _ in range(ROUNDS):
                first = self.seconds(prompts, 1)
                walls.append((self.seconds(prompts, 1 + o.steps) - first) / o.steps)
            more = self.kernels(prompts, 1 + o.steps)
            kernels = minus(more, self.kernels(prompts, 1), o.steps)
            case = {"phase": "decode", "batch": count, "context": o.input_len + o.steps // 2}
            yield case, 1e3 * statistics.median(walls), kernels


def show(path: Path) -> None:
    """Each case's lanes beside one another, the longest kernels first."""
    cases: dict[str, dict[str, dict[str, Any]]] = {}
    for line in path.read_text().splitlines():
        row = json.loads(line)
        case = row["case"]
        at = f"{case['phase']} {case['batch']} x {case['context']}"
        cases.setdefault(at, {})[row["subject"]["provider"]] = {"metrics": row["metrics"], **case}
    for at, lanes in cases.items():
        print(f"\n{at}")
        for lane, found in lanes.items():
            m = found["metrics"]
            print(
                f"  {lane}: wall {m['wall_ms']:.3f} ms, kernels {m['kernels_ms']:.3f}, {m['launches']:.0f} launches"
            )
            for name, (n, us) in sorted(found["kernels"].items(), key=lambda k: -k[1][1])[:30]:
                print(f"    {us / 1e3:8.3f} ms {n:7.1f} launches  {name[:110]}")


def sizes(text: str) -> list[tuple[int, int]]:
    return [(int(a), int(b)) for a, b in (pair.split("x") for pair in text.split(",") if pair)]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("host", nargs="?", choices=sorted(HOSTS))
    parser.add_argument("model", nargs="?", help="a folder; random weights will do")
    parser.add_argument("--out", type=Path)
    parser.add_argument("--show", type=Path, help="print such a file, and measure nothing")
    parser.add_argument(
        "--prefill", type=sizes, default="1x500,1x512,1x600,8x512,32x512", help="prompts x tokens"
    )
    parser.add_argument(
        "--batch", type=lambda t: [int(b) for b in t.split(",") if b], default="1,8,32,64", help="of decodes"
    )
    parser.add_argument("--input-len", type=int, default=512)
    parser.add_argument("--steps", type=int, default=32)
    parser.add_argument("--memory", type=float, default=0.4, help="share of the GPU's")
    parser.add_argument("--kv-gib", type=float, default=16.0, help="of keys and values, in vLLM")
    parser.add_argument("--lock", type=Path, help="a file that one of several holds while it measures")
    parser.add_argument("--model-len", type=int)
    options = parser.parse_args()
    if options.show is not None:
        show(options.show)
        return
    if options.host is None or options.model is None or options.out is None:
        parser.error("HOST, MODEL and --out say what to measure; --show FILE prints what was")
    results = Results("host_step", options.out)
    meter = Meter(options)
    report = meter.integration.call(meter.host.engine, Request("report"))
    patched = any(row["state"] == "active" for reply in report for row in reply["rows"])
    lane = options.host + ("+fk" if patched else "")
    results.versions |= {options.host: meter.integration.version() or ""}
    lock = None
    if options.lock is not None:
        lock = options.lock.open("w")
        fcntl.flock(lock, fcntl.LOCK_EX)
    for case, wall, kernels in meter.measure():
        total = sum(us for _, us in kernels.values()) / 1e3
        launches = sum(n for n, _ in kernels.values())
        kept = {k: [round(n, 3), round(us, 3)] for k, (n, us) in kernels.items()}
        results.add(
            "step", lane, {**case, "kernels": kept}, wall_ms=wall, kernels_ms=total, launches=launches
        )  # fmt: skip
        print(lane, case, f"wall {wall:.3f} ms, kernels {total:.3f} ms, {launches:.0f} launches", flush=True)
    meter.host.close()
    if lock is not None:
        lock.close()


if __name__ == "__main__":
    main()
