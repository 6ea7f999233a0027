"""Test each feature of vLLM or SGLang with a patch on a GPU (docs/what-works.md), one line a cell.

    works_with.py --host vllm --out rows.jsonl [--features fp8,fp8_kv,sleep,spec] [--jobs 4]

A cell is a process with a time limit; a crash or a hang becomes a row that names the current stage. Some hosts
compile kernels in a cell; `--prebuild` only compiles them. Models are small random checkpoints of realistic shapes;
engines have default settings with compiled code and CUDA graphs. Two ways: `live` measures an engine, patches it,
measures it again and undoes the patch; `start` patches before construction.

A cell compares log-probabilities of fixed texts (teacher-forced), and by how much the engine's own greedy tokens miss
the best ones when given as a prompt, which holds decode steps and drafts to prefills. Both must agree with the
unpatched engine within NOISE (or NOISES), and the report's rows with EXPECTED. With random weights, wrong attention or
a wrong norm differs by 1 and more.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import random
import socket
import subprocess
import sys
import tempfile
import time
import traceback
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # bench/

from experiments.works_with.works_hosts import SGLang, Vllm, adapter, checkpoint, prebuild

from fastkernels.core import multicast

NOISE = 0.15  # nats, mean over all tokens: in bf16
# Noisier features. With FP8 experts and nearly equal random routers, the KL between two roundings of one model is 11
# times as large as in bf16 (0.0197 to 0.0017 nats a token, SmolLM2, H200, docs/what-works.md), and differences of
# log-probabilities grow with its root.
NOISES = {"moe_fp8": 3.3 * NOISE}
OPS = [
    "rms_norm", "gemma_rms_norm", "silu_and_mul", "gelu_and_mul", "rotary_emb", "embedding", "linear", "attention",
    "fused_experts", "fused_experts_fp8",
]  # fmt: skip
LATENT = ["mla_decode", "grouped_topk"]  # more ops of models with latent attention
EXCHANGES = {
    "tp_sums": ["all_reduce"],
    "ep_dispatch": ["ep_dispatch"],
}  # more ops of features with several ranks
UNNAMED = {("tp", "vllm")}  # (feature, host) patched without a list of ops, as most users do; others with OPS
# The ops of a feature, in addition to those of all features
MORE = {
    "moe": ["fused_experts"], "moe_fp8": ["fused_experts_fp8"], "ep": ["fused_experts"],
    "mla": ["fused_experts", *LATENT], **EXCHANGES,
}  # fmt: skip
QUANTIZED = "quant_method is "
LEFT = "left to the host: "

# feature: (checkpoint, options of vLLM, options of SGLang); MODEL and LORA are placeholders, None: the host lacks it.
FEATURES: dict[str, tuple[str, dict[str, Any] | None, dict[str, Any] | None]] = {
    "plain": ("llama", {}, {}),
    "fp8": ("llama", {"quantization": "fp8"}, {"quantization": "fp8"}),
    "gptq": ("gptq", {"dtype": "float16"}, {"dtype": "float16", "quantization": "gptq"}),
    "awq": ("awq", {"dtype": "float16"}, {"dtype": "float16", "quantization": "awq"}),
    "gptq_marlin": ("gptq", None, {"dtype": "float16"}),  # SGLang's default, compiled on demand
    "awq_marlin": ("awq", None, {"dtype": "float16"}),
    "fp8_kv": ("llama", {"kv_cache_dtype": "fp8"}, {"kv_cache_dtype": "fp8_e4m3"}),
    "lora": (
        "llama",
        {"enable_lora": True, "max_lora_rank": 8, "max_loras": 1},
        {"enable_lora": True, "lora_paths": {"a": "LORA"}, "max_lora_rank": 8},
    ),
    "spec": (
        "llama",
        {"speculative_config": {"method": "draft_model", "model": "MODEL", "num_speculative_tokens": 3}},
        {
            "speculative_algorithm": "STANDALONE", "speculative_draft_model_path": "MODEL",
            "speculative_num_steps": 3, "speculative_eagle_topk": 1, "speculative_num_draft_tokens": 4,
        },
    ),
    "ngram": (
        "llama",
        {"speculative_config": {
            "method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_max": 3, "prompt_lookup_min": 1,
        }},
        {"speculative_algorithm": "NGRAM", "speculative_num_draft_tokens": 4},
    ),
    "window": ("mistral", {}, {"disable_hybrid_swa_memory": True}),
    "sinks": ("gpt_oss", {}, {"disable_hybrid_swa_memory": True}),
    "sleep": ("llama", {"enable_sleep_mode": True}, {"enable_memory_saver": True}),
    "moe": ("mixtral", {}, {}),
    "moe_fp8": ("mixtral_fp8", {}, {}),
    "tp": ("llama", {"tensor_parallel_size": 2}, {"tp_size": 2}),
    "tp_norms": (  # with our norms; vLLM's default fuses norms with the all-reduce before them
        "llama",
        {"tensor_parallel_size": 2, "compilation_config": {"pass_config": {"fuse_allreduce_rms": False}}},
        None,
    ),
    "tp_sums": (  # with our sums of all ranks
        "llama",
        {"tensor_parallel_size": 2, "compilation_config": {"pass_config": {"fuse_allreduce_rms": False}}},
        {"tp_size": 2},
    ),
    "ray": ("llama", {"distributed_executor_backend": "ray"}, None),
    "pp": ("llama", {"pipeline_parallel_size": 2}, {"pp_size": 2}),
    "mla": ("deepseek_v3", {}, None),
    "ep": (
        "mixtral",
        {
            "tensor_parallel_size": 2, "enable_expert_parallel": True,
            "compilation_config": {"pass_config": {"fuse_allreduce_rms": False}},
        },
        None,
    ),
    "ep_dispatch": (  # tokens travel between data-parallel ranks; vLLM's ranks are cells of their own
        "mixtral",
        {
            "data_parallel_size": 2, "enable_expert_parallel": True, "all2all_backend": "allgather_reducescatter",
        },
        {"tp_size": 2, "dp_size": 2, "enable_dp_attention": True},
    ),
}  # fmt: skip
TWO = ("tp", "tp_norms", "tp_sums", "pp", "ep", "ep_dispatch")  # features that need two GPUs
# (feature, host): {op: part of its row's reason}; 'live': part of the PatchError of a live patch
EXPECTED: dict[tuple[str, str], dict[str, str]] = {
    **{(f, h): {"linear": QUANTIZED} for f in ("fp8", "gptq", "awq", "moe_fp8") for h in ("vllm", "sglang")},
    **{(f, "sglang"): {"linear": QUANTIZED} for f in ("gptq_marlin", "awq_marlin")},
    ("fp8_kv", "sglang"): {"attention": "a KV cache of "},
    ("spec", "vllm"): {"live": "the compiled code of a draft model"},
    ("spec", "sglang"): {"live": "speculative decoding"},
    ("ngram", "sglang"): {"live": "speculative decoding"},
    **{
        (f, "sglang"): {"embedding": "the host looks its shards up with its own fused kernel"}
        for f in ("tp", "tp_sums")
    },
    ("tp", "vllm"): {  # SHAPES is in no tuned table
        "rms_norm": f"{LEFT}vLLM adds it to the all-reduce before it",
        "linear": LEFT,
        "attention": LEFT,
    },
}
# Time limit of a cell in seconds; longer for (feature, host) that compile host kernels.
CELL_S = 300.0
LONGER = {("tp", "vllm"): 420, ("gptq_marlin", "sglang"): 560, ("awq_marlin", "sglang"): 560}
# Limit compilation in a cell: no sampling kernels, one all-reduce, no DeepGEMM products.
ENVIRONMENT = {
    "VLLM_USE_FLASHINFER_SAMPLER": "0", "VLLM_FLASHINFER_ALLREDUCE_BACKEND": "trtllm", "VLLM_USE_DEEP_GEMM": "0",
    "SGLANG_ENABLE_JIT_DEEPGEMM": "0",
}  # fmt: skip


def named(feature: str, host: str) -> list[str] | None:
    """Return the ops that a patch of this cell requests; None: no list."""
    if (feature, host) in UNNAMED:
        return None
    return OPS + (LATENT if feature == "mla" else []) + EXCHANGES.get(feature, [])


def replicas(feature: str, host: str) -> int:
    """Return the number of processes of a cell: each has an engine, a data-parallel rank of vLLM."""
    return int((FEATURES[feature][1] or {}).get("data_parallel_size", 1)) if host == "vllm" else 1


def made(args: argparse.Namespace, feature: str) -> tuple[Path, str | None]:
    """Return the feature's checkpoint and adapter, made once."""
    kind = FEATURES[feature][0]
    if (kind, args.host) == ("mistral", "sglang"):
        kind = "gemma2"  # SGLang's Mistral has no window
    model = checkpoint(args.work, kind)
    return model, str(adapter(args.work, model)) if feature == "lora" else None


class Cell:
    """One feature, one way of patching. `problems` collects the deviations."""

    def __init__(self, args: argparse.Namespace) -> None:
        self.args, self.problems = args, list[str]()
        self.metrics: dict[str, float] = {}
        self.lines: list[str] = []
        self.at("its engine starts")
        self.reference = args.work / f"{args.host}-{args.child}{_of_rank()}.json"
        _, *every = FEATURES[args.child]
        options = dict(every[args.host == "sglang"] or {})
        if replicas(args.child, args.host) > 1:
            options.pop("data_parallel_size")  # vLLM reads VLLM_DP_SIZE
        model, lora = made(args, args.child)
        text = json.dumps(options).replace('"MODEL"', json.dumps(str(model)))
        start = time.monotonic()
        engine = Vllm if args.host == "vllm" else SGLang
        self.host = engine(str(model), lora, json.loads(text.replace('"LORA"', json.dumps(lora))))
        self.metrics["start_s"] = time.monotonic() - start
        self.expected = EXPECTED.get((args.child, args.host), {})
        rng = random.Random(0)
        self.prompts = [[rng.randrange(4, 512) for _ in range(100 + 7 * i)] for i in range(6)]

    def at(self, stage: str) -> None:
        """Print the next stage; if the cell ends there, its row names it."""
        print(f"\nAT {stage}", flush=True)

    def miss(self) -> tuple[float, list[list[int]]]:
        """Return by how many nats the engine's greedy tokens miss the best, and prompts with these tokens."""
        texts = [p + t for p, t in zip(self.prompts, self.host.tokens(self.prompts, 24), strict=True)]
        gaps = [best - own for text in self.host.forced(texts) for own, best in text[-24:]]
        return sum(gaps) / len(gaps), texts

    def same(self, name: str, texts: list[list[int]], wanted: list[float], own: float) -> None:
        """Record and judge the distance from the unpatched engine."""
        found = [value for text in self.host.forced(texts) for value, _ in text]
        far = sum(abs(a - b) for a, b in zip(found, wanted, strict=True)) / len(wanted)
        missed, _ = self.miss()
        self.metrics |= {f"{name}_logprob_mean_abs_diff": far, f"{name}_greedy_miss": missed}
        noise = NOISES.get(self.args.child, NOISE)
        if not far <= noise or not missed <= 2 * own + noise:
            self.problems.append(
                f"{name}: log-probabilities are {far:.3f} apart, greedy tokens miss by {missed:.3f}"
            )

    def rows(self, rows: list[Any]) -> None:
        """Record and judge the report's rows."""
        from fk_integrations.core.collectives import NOT_FASTER

        active = {r.op for r in rows if r.state == "active" and r.calls > 0}
        norm = "gemma_rms_norm" if any("Gemma" in r.host_class and r.modules for r in rows) else "rms_norm"
        attention = () if self.args.child == "mla" else ("attention",)
        for op in (norm, "rotary_emb", "embedding", "linear", *attention, *MORE.get(self.args.child, ())):
            reasons = "; ".join(dict.fromkeys(r.reason for r in rows if r.op == op and r.reason))
            if op in self.expected and self.expected[op] not in reasons:
                self.problems.append(f"{op} expected {self.expected[op]!r}, got {reasons!r}")
            left = op in EXCHANGES.get(self.args.child, ()) and NOT_FASTER in reasons
            if op not in self.expected and op not in active and not left:
                self.problems.append(f"{op} did not run: {reasons}")
        self.lines = [str(r.reason) for r in rows if r.state == "off" and "no such module" not in r.reason]
        self.lines += [f"fell back {n} x: {why}" for r in rows for why, n in r.fallbacks.items()]

    def live(self) -> None:
        import fastkernels
        from fastkernels.patch import PatchError

        self.at("the host runs without a patch")
        own, texts = self.miss()
        wanted = [value for text in self.host.forced(texts) for value, _ in text]
        self.metrics["stock_greedy_miss"] = own
        if self.args.child == "sleep":
            self.at("the host sleeps and wakes without a patch")
            self.slept("stock_awake", texts, wanted, own)
        self.reference.write_text(json.dumps({"texts": texts, "wanted": wanted, "own": own}))
        refusal = self.expected.get("live")
        self.at("the host is patched live")
        try:
            report = fastkernels.patch(self.host.engine, ops=named(self.args.child, self.args.host))
        except PatchError as error:
            self.lines = [f"refused: {error}"]
            if refusal is None or refusal not in str(error):
                self.problems.append(f"refused: {error}")
            self.same("refused", texts, wanted, own)
            return
        if refusal is not None:
            self.problems.append(f"expected a refused live patch: {refusal!r}")
        self.same("patched", texts, wanted, own)
        self.rows(report.refresh().rows)
        print(report, flush=True)
        if self.args.child == "sleep":
            self.at("the patched host sleeps and wakes, with an undo that must be refused")
            self.slept("awake", texts, wanted, own, report)
            self.at("the patched host reloads its weights")
            self.host.reload()
            self.same("reloaded", texts, wanted, own)
        self.at("the patch is undone")
        report.undo()
        self.same("undone", texts, wanted, own)

    def slept(
        self, name: str, texts: list[list[int]], wanted: list[float], own: float, report: Any = None
    ) -> None:
        """Sleep and wake, then judge the engine; with a report, try an undo in between."""
        from fastkernels.patch import PatchError

        self.host.sleep()
        if report is not None:
            try:
                report.undo()
                self.problems.append("an undo while the engine sleeps was not refused")
            except PatchError as error:
                self.lines.append(f"refused: {error}")
        self.host.wake()
        self.same(name, texts, wanted, own)

    def start(self) -> None:
        from fk_integrations.core import reports

        from fastkernels.patch import Row

        self.at("the host runs, patched at its start")
        saved = json.loads(self.reference.read_text())
        known = (saved["texts"], saved["wanted"], saved["own"])
        self.same("patched", *known)
        if self.args.child == "sleep":
            self.at("the host, patched at its start, sleeps and wakes")
            self.slept("awake", *known)
        replies = reports.read(os.environ["FASTKERNELS_REPORT"], self.args.host)
        self.rows([Row(**row) for reply in replies for row in reply["rows"]])


def child(args: argparse.Namespace) -> None:
    """Run one cell; its last line of standard output is JSON."""
    cell = None
    try:
        cell = Cell(args)
        getattr(cell, args.way)()
        result = {"problems": cell.problems, "metrics": cell.metrics, "lines": cell.lines}
    except Exception as error:
        traceback.print_exc()
        last = str(error).strip().splitlines() or [""]
        result = {
            "problems": [f"{type(error).__name__}: {last[-1]}"],
            "metrics": {} if cell is None else cell.metrics,
            "lines": [],
            "crash": True,
        }
    print("\nCELL " + json.dumps(result), flush=True)
    if cell is not None:
        cell.host.close()


def run(args: argparse.Namespace, feature: str, way: str) -> tuple[str, dict[str, Any]]:
    """Return (status, result) of one cell in its own session; its output goes to logs next to the checkpoints."""
    environment = {**ENVIRONMENT, **os.environ, **multicast.variables()}
    for name in [n for n in environment if n.startswith("FASTKERNELS") and n != "FASTKERNELS_CACHE"]:
        del environment[name]
    if way == "start":
        reports = args.work / f"{args.host}-{feature}-reports"
        environment |= {"FASTKERNELS": "1", "FASTKERNELS_REPORT": str(reports)}
        if (ops := named(feature, args.host)) is not None:
            environment["FASTKERNELS_OPS"] = ",".join(ops)
    command = [
        sys.executable, __file__, "--host", args.host, "--out", str(args.out), "--work", str(args.work), "--child",
        feature, "--way", way,
    ]  # fmt: skip
    until = time.monotonic() + (args.timeout or LONGER.get((feature, args.host), CELL_S))
    count = replicas(feature, args.host)
    ranks = _data_parallel(count) if count > 1 else [{}]
    logs = [
        args.work / f"{args.host}-{feature}-{way}{'-rank' + str(r) if r else ''}.log" for r in range(count)
    ]
    processes: list[subprocess.Popen[bytes]] = []
    try:
        for log, own in zip(logs, ranks, strict=True):
            with open(log, "w") as file:
                process = subprocess.Popen(
                    command, env={**environment, **own}, stdout=file, stderr=subprocess.STDOUT,
                    start_new_session=True,
                )  # fmt: skip
            processes.append(process)
        for process in processes:
            process.wait(timeout=max(0.0, until - time.monotonic()))
        status = "crash"
    except subprocess.TimeoutExpired:
        status = "timeout"
    finally:
        for process in processes:
            _end(process)
    return together([outcome(status, log) for log in logs])


def _data_parallel(count: int) -> list[dict[str, str]]:
    """Return the environment of each data-parallel rank of vLLM on this machine."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    shared = {"VLLM_DP_SIZE": str(count), "VLLM_DP_MASTER_IP": "127.0.0.1", "VLLM_DP_MASTER_PORT": str(port)}
    return [{**shared, "VLLM_DP_RANK": str(rank)} for rank in range(count)]


def _of_rank() -> str:
    """Return what the files of a data-parallel rank above 0 have in their names."""
    rank = os.environ.get("VLLM_DP_RANK", "0")
    return "" if rank == "0" else f"-rank{rank}"


def together(found: list[tuple[str, dict[str, Any]]]) -> tuple[str, dict[str, Any]]:
    """Return one (status, result) of a cell's processes: the metrics of the first, the problems of all."""
    (status, result), *others = found
    for rank, (theirs, more) in enumerate(others, 1):
        result["problems"] += [f"rank {rank}: {problem}" for problem in more["problems"]]
        status = theirs if status == "ok" else status
    return status, result


def outcome(status: str, log: Path) -> tuple[str, dict[str, Any]]:
    """Return (status, result) of a finished cell from its output. `status`: used if it printed no result."""
    text = log.read_text(errors="replace").splitlines()
    stage = next((f" while {line[3:]}" for line in reversed(text) if line.startswith("AT ")), "")
    found = [line for line in text if line.startswith("CELL ")]
    if not found:
        tail = [line for line in text if "Error" in line][-1:] or text[-1:]
        problem = f"{status}{stage}: {' '.join(tail)[:400]} ({log})"
        return status, {"problems": [problem], "metrics": {}, "lines": []}
    result = json.loads(found[-1][5:])
    if result.pop("crash", False):
        result["problems"] = [f"{problem}{stage}" for problem in result["problems"]]
        return "crash", result
    return "wrong" if result["problems"] else "ok", result


def _end(process: subprocess.Popen[bytes]) -> None:
    """End the cell's whole session: engine cores, workers and schedulers too."""
    import signal

    try:
        os.killpg(process.pid, signal.SIGKILL)
    except ProcessLookupError:
        return
    process.wait()


def cells(args: argparse.Namespace, feature: str) -> int:
    """Write a row for each way of a feature; return the number of wrong ones."""
    import torch
    from fk_bench.core import machine
    from fk_bench.core.rows import Row, Status, Subject, append

    wrong, skip = 0, None
    if FEATURES[feature][1 + (args.host == "sglang")] is None:
        skip = f"no feature of {args.host}"
    elif feature in TWO and torch.cuda.device_count() < 2:
        skip = "it needs two GPUs"
    elif feature == "ray" and importlib.util.find_spec("ray") is None:
        skip = "it needs the package ray"
    for way in args.ways.split(","):
        begun = time.monotonic()
        if skip:
            status, result = "skipped", {"problems": [skip], "metrics": {}, "lines": []}
        else:
            status, result = run(args, feature, way)
        wrong += status not in ("ok", "skipped")
        took = time.monotonic() - begun
        row = Row(
            run_id=f"works_with-{args.host}", command="works_with", machine=machine.machine(),
            commit=machine.commit(), versions={"torch": str(torch.__version__)}, status=Status(status),
            reason="; ".join(result["problems"]), subject=Subject(host=args.host, model=FEATURES[feature][0]),
            case={"kind": feature, "way": way, "lines": result["lines"]},
            metrics={**result["metrics"], "cell_s": took},
        )  # fmt: skip
        append(args.out, [row])
        said = "; ".join([*result["problems"], *result["lines"]])
        print(f"{args.host} {feature} {way}: {status}, {took:.0f} s. {said}", flush=True)
    return wrong


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--host", choices=("vllm", "sglang"), required=True)
    parser.add_argument("--out", type=Path, default=Path("works-with.jsonl"))
    parser.add_argument(
        "--features", default=",".join(FEATURES), help=f"of {', '.join(FEATURES)}; default: all"
    )
    parser.add_argument("--ways", default="live,start")
    parser.add_argument("--jobs", type=int, default=1, help="concurrent features on the same GPUs")
    parser.add_argument("--timeout", type=float, help=f"seconds a cell (default: {CELL_S:.0f}, or LONGER's)")
    parser.add_argument("--prebuild", action="store_true", help="only compile the host's kernels")
    parser.add_argument("--work", type=Path, default=Path(tempfile.gettempdir()) / "fastkernels-works-with")
    parser.add_argument("--child", help=argparse.SUPPRESS)
    parser.add_argument("--way", help=argparse.SUPPRESS)
    args = parser.parse_args()
    args.work.mkdir(parents=True, exist_ok=True)
    if args.prebuild:
        raise SystemExit(prebuild(args.host))
    if args.child:
        child(args)
        return
    features = args.features.split(",")
    missing = [feature for feature in features if not (args.work / f"{args.host}-{feature}.json").exists()]
    if "live" not in args.ways.split(",") and missing:
        parser.error(f"{args.ways} needs the reference of live, and --work lacks {missing}: add live")
    for feature in features:
        made(args, feature)  # one cell at a time
    with ThreadPoolExecutor(args.jobs) as pool:
        wrong = sum(pool.map(lambda feature: cells(args, feature), features))
    raise SystemExit(1 if wrong else 0)


if __name__ == "__main__":
    main()
