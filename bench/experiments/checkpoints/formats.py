"""Time decoding of quantized models in our engine and in vLLM, one number format after the other.

    formats.py --vllm .venv-vllm/bin/python --out FOLDER                   # all formats
    formats.py --vllm .venv-vllm/bin/python --out FOLDER --formats gptq,awq --layers 0
    formats.py --vllm .venv-vllm/bin/python --out FOLDER --models MODEL_FOLDER,MODEL_FOLDER

For each format the two offline engines start side by side, share the GPU, and are measured in turn with the same
prompts, token by token, each while the other is idle. --together 2 starts the engines of two formats at once, measures
them when all are ready, and then starts the next two; they must fit into the GPU's memory together.

With --gpus 0,1 vLLM has the first of these GPUs to itself and our engine the second, so that a model may fill one. The
engines still take turns. A second call with --gpus 1,0 shows whether the GPUs differ.

Before the timed runs each engine runs as many prompts of a load as one of its steps may take, from one prompt to all.
Kernels that vLLM compiles at first use of a number of tokens are then compiled: how many prompts a step has depends on
their arrival.

Models have published shapes and --layers decoder layers (0: all); only their config.json is written, and each engine
fills the weights itself (load format 'dummy'). With --models the weights are those of checkpoints (make_checkpoint.py).
CUDA graphs of vLLM are captured for the measured batch sizes only, which shortens its start.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from fk_bench.core import machine
from fk_bench.core.gpus import check_ranks
from fk_bench.core.model_names import PUBLIC
from fk_bench.core.rows import Row, Status, Subject, append
from fk_bench.core.terminal.flags import ConfigError
from fk_bench.core.terminal.output import last_line, table
from fk_bench.e2e import sharing
from fk_bench.e2e.loads import Load
from fk_bench.e2e.model_configs import load_config
from fk_bench.e2e.runs import metrics_of
from fk_bench.offline.host import HostFailed, HostProcess, make_row, prompts_of, vocab_size

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # bench/
from experiments.checkpoints import make_checkpoint

COMMAND = "formats"
OURS, VLLM = "fastkernels", "vllm"
TRACED, KERNELS = 16, 50  # decode steps of a traced run; kernels of a step that are listed
STEP = 8192  # tokens of vLLM's step
LOADS = "1x512+128,8x512+128,32x512+128"
INT4 = {"num_bits": 4, "type": "int", "strategy": "group", "group_size": 128, "symmetric": True}
# DeepGEMM's warm-up of all row counts takes minutes; the runs before the timed ones compile what they need.
ENV = {"FASTKERNELS": "0", "VLLM_DEEP_GEMM_WARMUP": "skip"}


def compressed(form: str, weights: dict[str, Any], inputs: dict[str, Any] | None) -> dict[str, Any]:
    """Return a quantization_config of compressed-tensors with one group of all linear layers but the head."""
    group = {"targets": ["Linear"], "weights": weights, "input_activations": inputs}
    return {
        "quant_method": "compressed-tensors", "format": form, "quantization_status": "compressed",
        "config_groups": {"group_0": group}, "ignore": ["lm_head"],
    }  # fmt: skip


def float8(strategy: str, inputs: dict[str, Any]) -> dict[str, Any]:
    values = make_checkpoint.FP8_VALUES
    return compressed(
        "float-quantized", {**values, "strategy": strategy, "dynamic": False}, {**values, **inputs}
    )


# vLLM multiplies these weights by unquantized activations on GPUs without FP4 units, as our engine does.
FP4 = {"num_bits": 4, "type": "float", "strategy": "tensor_group", "group_size": 16, "symmetric": True}
NVFP4 = compressed("nvfp4-pack-quantized", FP4, {**FP4, "dynamic": "local"})
TERNARY = {"quant_method": "bitnet", "linear_class": "autobitlinear", "quantization_mode": "offline"}
DENSE_IN_GPT_OSS = ["model.layers.*.self_attn", "model.layers.*.mlp.router", "model.embed_tokens", "lm_head"]
BLOCKS = {
    "quant_method": "fp8",
    "fmt": "e4m3",
    "activation_scheme": "dynamic",
    "weight_block_size": [128, 128],
}


@dataclass(frozen=True)
class Format:
    """A model's shapes and its quantization; None: bf16.

    layers: measured by default; fields: of the config; vllm: more arguments of vLLM's engine
    """

    model: str
    quantization: dict[str, Any] | None
    layers: int
    fields: dict[str, Any] = field(default_factory=dict)
    hosts: tuple[str, ...] = (VLLM, OURS)
    vllm: dict[str, Any] = field(default_factory=dict)


# vLLM 0.26 reads fields of Gemma 4's config that transformers keeps by layer from 5.15 on. Its FlashAttention-4 needs
# CUTLASS's Python package; without it vLLM uses its Triton kernels.
GEMMA4: dict[str, Any] = {
    "hf_overrides": {"allow_global_per_layer_attribute_access": True, "global_head_dim": 512},
    "attention_config": {"backend": "TRITON_ATTN"},
}
GEMMA4_MOE = {**GEMMA4, "hf_overrides": {**GEMMA4["hf_overrides"], "num_global_key_value_heads": 2}}
FORMATS = {
    "fp8-tensor": Format("llama-3.1-8b", float8("tensor", {"strategy": "tensor", "dynamic": False}), 32),
    "fp8-channel": Format("llama-3.1-8b", float8("channel", {"strategy": "token", "dynamic": True}), 32),
    "fp8-block": Format("llama-3.1-8b", BLOCKS, 32),
    "gptq": Format(
        "llama-3.1-8b", {"quant_method": "gptq", "bits": 4, "group_size": 128, "sym": True, "desc_act": False}, 32
    ),
    "awq": Format(
        "llama-3.1-8b",
        {"quant_method": "awq", "bits": 4, "group_size": 128, "zero_point": True, "version": "gemm"}, 32,
    ),
    "int4": Format("llama-3.1-8b", compressed("pack-quantized", INT4, None), 32),
    "mxfp4": Format("gpt-oss-20b", {"quant_method": "mxfp4", "modules_to_not_convert": DENSE_IN_GPT_OSS}, 12),
    "mxfp4-120b": Format("gpt-oss-120b", {"quant_method": "mxfp4", "modules_to_not_convert": DENSE_IN_GPT_OSS}, 8),
    "modelopt-fp8": Format(
        "llama-3.1-8b", {"quant_method": "modelopt", "quant_algo": "FP8", "ignore": ["lm_head"]}, 32
    ),
    "modelopt-nvfp4": Format(
        "llama-3.1-8b",
        {"quant_method": "modelopt", "quant_algo": "NVFP4", "group_size": 16, "ignore": ["lm_head"]}, 32,
    ),
    "nvfp4": Format("llama-3.1-8b", NVFP4, 32),
    "bitnet": Format("bitnet-b1.58-2b-4t", TERNARY, 30, hosts=(OURS,)),  # vLLM has no BitNet model
    "fp8-block-experts": Format("qwen3-30b-a3b", BLOCKS, 24),
    "int4-experts": Format("qwen3-30b-a3b", compressed("pack-quantized", INT4, None), 24),
    "nvfp4-experts": Format("qwen3-30b-a3b", NVFP4, 24),
    "latent-v2-lite": Format("deepseek-v2-lite", None, 27),
    "latent-moonlight": Format("moonlight-16b-a3b", None, 27),
    "latent-fp8-block": Format("deepseek-r1", BLOCKS, 5),
    "latent-sparse": Format("deepseek-v3.2", BLOCKS, 5),
    "latent-sparse-glm": Format("glm-5", BLOCKS, 5),
    "latent-glm": Format("glm-4.7-flash", None, 6),
    "gemma-4-e4b": Format("gemma-4-e4b", None, 42, vllm=GEMMA4),
    "gemma-4-26b-a4b": Format("gemma-4-26b-a4b", None, 12, vllm=GEMMA4_MOE),
}  # fmt: skip


def write_config(name: str, folder: Path, layers: int | None = None) -> Path:
    """Write the config.json of FORMATS[name] into a folder of its own. layers: 0 for the model's own number."""
    chosen = FORMATS[name]
    if chosen.model in PUBLIC:
        fields = load_config(chosen.model)[1].to_dict()
    else:
        fields = dict(make_checkpoint.EXPERTS[chosen.model])
    fields |= chosen.fields
    count = chosen.layers if layers is None else layers
    fields["num_hidden_layers"] = min(count or fields["num_hidden_layers"], fields["num_hidden_layers"])
    for kinds in ("layer_types", "mlp_layer_types", "indexer_types"):
        if fields.get(kinds):
            fields[kinds] = fields[kinds][: fields["num_hidden_layers"]]
    if of_layers := fields.get("per_layer_config"):
        fields["per_layer_config"] = {
            i: v for i, v in of_layers.items() if int(i) < fields["num_hidden_layers"]
        }
    if chosen.quantization is not None:
        fields["quantization_config"] = dict(chosen.quantization)
        if "num_experts" in fields and "ignore" in chosen.quantization:  # routers stay unquantized
            gates = [f"model.layers.{i}.mlp.gate" for i in range(fields["num_hidden_layers"])]
            fields["quantization_config"]["ignore"] = ["lm_head", *gates]
    (made := folder / name).mkdir(parents=True, exist_ok=True)
    (made / "config.json").write_text(json.dumps(fields, indent=1))
    return made


def tokens_of(
    process: HostProcess, prompts: Sequence[Sequence[int]], load: Load, limit: float
) -> dict[str, float]:
    """Run a load once; its metrics. Raises HostFailed if not all tokens came."""
    process.tell({"prompts": prompts, "output_len": load.output_len, "arrivals": True})
    metrics, problem = metrics_of(process.answer(limit)["arrivals"], load)
    if problem:
        raise HostFailed(f"{process.name}, {load}: {problem}")
    return metrics


def steps_of(loads: Sequence[Load]) -> list[Load]:
    """The prompts that one step may take of a load, from one prompt to all, with two tokens of each."""
    sizes = {
        (n, load.input_len)
        for load in loads
        for n in range(1, min(load.requests, STEP // load.input_len) + 1)
    }
    return [Load(requests, length, 2) for requests, length in sorted(sizes)]


class Engines:
    """The engines of one model, side by side."""

    def __init__(
        self, name: str, path: Path, hosts: Sequence[str], options: argparse.Namespace, load_format: str,
        shapes: str,
    ):  # fmt: skip
        self.name, self.options, self.loads = name, options, options.loads
        longest = max(load.input_len + load.output_len for load in self.loads) + 16
        most = max(load.requests for load in self.loads)
        gpu = machine.machine().gpus > 0
        sizes = [(load.requests, load.input_len + load.output_len) for load in self.loads]
        need = sharing.need(
            name, str(path), "bfloat16", sharing.kv_tokens(sizes, longest), gpu, ranks=options.tensor_parallel
        )
        self.vocab = vocab_size(str(path))
        self.case = {
            "dtype": machine.fast_dtype(), "load_format": load_format, "layers": _layers(path), "shapes": shapes,
            "tensor_parallel": options.tensor_parallel,
        }  # fmt: skip
        self.gpus = dict(zip((VLLM, OURS), options.gpus, strict=False))  # no host: both share one
        settings = {
            "model": str(path), "dtype": machine.fast_dtype(), "load_format": load_format, "max_model_len": longest,
            "max_num_seqs": max(most, 8), "kv_tokens": None, "kv_bytes": need.kv, "gpu": gpu,
            "gpu_share": 0.01 if gpu else 0.3,  # on a GPU only a check: the KV cache has its size
            "shared": True, "tensor_parallel": options.tensor_parallel,
        }  # fmt: skip
        captured = {
            "compilation_config": {"cudagraph_capture_sizes": sorted({load.requests for load in self.loads})}
        }
        more = FORMATS[name].vllm if gpu and name in FORMATS else {}
        of_host = {OURS: {}, VLLM: {"max_num_batched_tokens": STEP, **(captured if gpu else {}), **more}}
        pythons = {OURS: sys.executable, VLLM: options.vllm}
        self.processes = [
            HostProcess(
                host, machine.absolute(pythons[host]), {**settings, "engine_args": of_host[host]}, options.out,
                env=ENV | ({"CUDA_VISIBLE_DEVICES": self.gpus[host]} if self.gpus else {}), log=f"{name}-{host}",
            )
            for host in hosts
        ]  # fmt: skip
        self.left = list(self.processes)
        self.versions = {p.name: machine.interpreter(p.python).versions for p in self.processes}

    def wait(self) -> Iterator[Row]:
        """Wait until the engines have started; one that has not has a row that says why, and is not measured."""
        for process in list(self.processes):
            try:
                process.answer(self.options.timeout)
            except HostFailed as error:
                yield self._failed(process, {}, error)
                continue
            seconds = time.monotonic() - process.started
            print(f"{self.name}: {process.name} ready after {seconds:.0f} s", flush=True)

    def measure(self) -> Iterator[Row]:
        """The rows of all runs; a host that fails has one row that says why."""
        limit = self.options.timeout
        for load in steps_of(self.loads):
            for process in list(self.left):
                try:
                    tokens_of(process, self._prompts("step", load), load, limit)
                except HostFailed as error:
                    yield self._failed(process, {"load": str(load)}, error)
        for run in range(-1, self.options.repeats):  # run -1 may compile or allocate
            for load in self.loads:
                prompts = self._prompts(str(run), load)
                for process in list(self.left):
                    where = {"run": run, "load": str(load), **asdict(load)}
                    try:
                        yield self._row(process, where, tokens_of(process, prompts, load, limit))
                    except HostFailed as error:
                        yield self._failed(process, where, error)

    def stop(self, pool: ThreadPoolExecutor) -> None:
        for process in self.processes:
            pool.submit(process.stop)

    def write_kernels(self, path: Path) -> None:
        """Append lines of `kernels` to a file, up to the first host that fails."""
        try:
            with open(path, "a") as file:
                for line in self.kernels():
                    file.write(json.dumps(line) + "\n")
                    file.flush()
        except HostFailed as error:
            print(f"{self.name}: {error}", file=sys.stderr, flush=True)

    def kernels(self) -> Iterator[dict[str, Any]]:
        """Yield, for each host and load, the kernels of a prompt step and of a decode step: launches and us of each.

        The decode step is the difference of runs of 1 and of 1 + TRACED tokens; negative: kernels of prompts only.
        """
        for process in self.left:
            for load in self.loads:
                found = []
                for run, tokens in enumerate(
                    (1, 1, 1 + TRACED)
                ):  # the profiler's own start is in the first run
                    prompts = self._prompts(str(run), load)
                    process.tell({"prompts": prompts, "output_len": tokens, "arrivals": True, "traced": True})
                    found.append(process.answer(self.options.timeout))
                _, prompt, both = found
                line: dict[str, Any] = {"model": self.name, "host": process.name, "load": str(load)}
                for name, one, other, steps in (("prompt", prompt, {}, 1), ("decode", both, prompt, TRACED)):
                    less = other.get("us", {}), other.get("launches", {})
                    of_kernel = {
                        kernel: [
                            (n - less[1].get(kernel, 0)) / steps, (one["us"][kernel] - less[0].get(kernel, 0.0)) / steps
                        ]
                        for kernel, n in one["launches"].items()
                    }  # fmt: skip
                    slowest = sorted(of_kernel.items(), key=lambda item: -item[1][1])[:KERNELS]
                    line[name] = {
                        "busy_us": (one["busy_us"] - other.get("busy_us", 0.0)) / steps,
                        "kernels": {kernel[:160]: values for kernel, values in slowest},
                    }
                yield line

    def _prompts(self, run: str, load: Load) -> list[list[int]]:
        return prompts_of(f"{self.name} {run} {load}", load.requests, load.input_len, self.vocab)

    def _failed(self, process: HostProcess, where: dict[str, Any], error: HostFailed) -> Row:
        self.left.remove(process)
        return self._row(process, where, {}, str(error))

    def _row(
        self, process: HostProcess, where: dict[str, Any], metrics: dict[str, float], problem: str = ""
    ) -> Row:
        own = {"own_gpu": self.gpus[process.name]} if self.gpus else {}
        return make_row(
            process.name, {"kind": COMMAND, **self.case, **own, **where}, metrics, command=COMMAND,
            subject=Subject(model=self.name, host=process.name), versions=self.versions[process.name],
            status=Status.FAILED if problem else Status.OK, reason=problem,
        )  # fmt: skip


def _layers(path: Path) -> int:
    return int(json.loads((path / "config.json").read_text())["num_hidden_layers"])


def summary(made: Sequence[Row]) -> list[dict[str, Any]]:
    """A line for each format and load: the medians of each host in ms, and vLLM's TPOT as a multiple of ours."""
    lines: dict[tuple[str, str], dict[str, list[Row]]] = {}
    for row in made:
        if row.status is Status.OK and row.case.get("run", -1) >= 0 and "tpot_ms" in row.metrics:
            found = lines.setdefault((row.subject.model or "", row.case["load"]), {})
            found.setdefault(str(row.subject.host), []).append(row)
    results = []
    for (model, load), hosts in lines.items():
        line: dict[str, Any] = {"format": model, "load": load}
        for host, rows in hosts.items():
            for metric in ("tpot_ms", "ttft_ms"):
                line[f"{host}_{metric}"] = statistics.median(row.metrics[metric] for row in rows)
        if len(hosts) == 2:
            line["ratio"] = line[f"{VLLM}_tpot_ms"] / line[f"{OURS}_tpot_ms"]
        results.append(line)
    return results


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--vllm", required=True, help="vLLM's interpreter; none: only our engine")
    parser.add_argument("--out", type=Path, required=True, help="folder of rows.jsonl, configs and logs")
    parser.add_argument("--formats", default=",".join(FORMATS), help="comma-separated (default: all)")
    parser.add_argument("--models", default="", help="folders of checkpoints, instead of --formats")
    parser.add_argument(
        "--layers", type=int, help="0: the model's number (default: a number for each format)"
    )
    parser.add_argument("--loads", default=LOADS, help=f"REQUESTSxINPUT+OUTPUT tokens (default: {LOADS})")
    parser.add_argument(
        "--together", type=int, default=1, help="formats whose engines start at once (default: 1)"
    )
    parser.add_argument(
        "--gpus", default="", help="GPU of vLLM and GPU of ours, as in 0,1 (default: one for both)"
    )
    parser.add_argument(
        "--tensor-parallel", type=int, default=1, help="GPUs of each engine; both use the same (default: 1)"
    )
    parser.add_argument("--repeats", type=int, default=3, help="timed runs of each load, after one more")
    parser.add_argument(
        "--kernels", action="store_true", help="write kernels.jsonl: launches and time of each kernel"
    )
    parser.add_argument("--timeout", type=float, default=300.0, help="seconds for a start or a run")
    options = parser.parse_args()
    names = [name for name in options.formats.split(",") if name]
    if unknown := [name for name in names if name not in FORMATS]:
        parser.error(f"--formats {','.join(unknown)}: the formats are {', '.join(FORMATS)}")
    try:
        options.loads = [Load.parse(part) for part in options.loads.split(",")]
    except ValueError as error:
        parser.error(str(error))
    options.gpus = [one for one in options.gpus.split(",") if one]
    if len(options.gpus) not in (0, 2):
        parser.error(f"--gpus {','.join(options.gpus)}: name two GPUs, as in 0,1")
    if options.gpus and options.tensor_parallel > 1:
        parser.error("--gpus is for engines of one GPU: leave it out with --tensor-parallel")
    try:
        check_ranks("--tensor-parallel", options.tensor_parallel, machine.machine().gpus)
    except ConfigError as error:
        parser.error(str(error))
    options.out.mkdir(parents=True, exist_ok=True)
    folders = [Path(one) for one in options.models.split(",") if one]
    made: list[Row] = []
    todo = [str(folder) for folder in folders] or names
    pairs: list[Engines] = []

    def started(name: str) -> Engines:
        hosts = FORMATS[name].hosts if not folders else (VLLM, OURS)
        path = Path(name) if folders else write_config(name, options.out / "configs", options.layers)
        used = [host for host in hosts if options.vllm != "none" or host == OURS]
        shapes = Path(name).name if folders else FORMATS[name].model
        return Engines(Path(name).name, path, used, options, "auto" if folders else "dummy", shapes)

    def keep(rows: Iterator[Row]) -> None:
        for row in rows:
            made.append(row)
            append(options.out / "rows.jsonl", [row])
            if row.status is not Status.OK:
                print(f"{row.subject.model}: {row.reason}", file=sys.stderr, flush=True)

    with ThreadPoolExecutor() as ended:  # vLLM takes seconds to end
        try:
            for first in range(0, len(todo), options.together):
                pairs = [started(name) for name in todo[first : first + options.together]]
                for pair in pairs:
                    keep(pair.wait())
                while pairs:
                    began, pair = time.monotonic(), pairs[0]
                    keep(pair.measure())
                    if options.kernels:
                        pair.write_kernels(options.out / "kernels.jsonl")
                    pairs.pop(0).stop(ended)
                    print(f"{pair.name}: {time.monotonic() - began:.0f} s", flush=True)
        finally:
            for pair in pairs:
                pair.stop(ended)
    results = summary(made)
    columns = [
        "format",
        "load",
        "vLLM TPOT ms",
        "ours TPOT ms",
        "vLLM / ours",
        "vLLM TTFT ms",
        "ours TTFT ms",
    ]
    keys = f"{VLLM}_tpot_ms", f"{OURS}_tpot_ms", "ratio", f"{VLLM}_ttft_ms", f"{OURS}_ttft_ms"
    cells = [[r["format"], r["load"], *(f"{r[k]:.3f}" if k in r else "-" for k in keys)] for r in results]
    table("", columns, cells)
    failed = sorted({row.subject.model or "" for row in made if row.status is not Status.OK})
    last_line({"command": COMMAND, "ok": not failed, "failed": failed, "results": results})
    raise SystemExit(1 if failed else 0)


if __name__ == "__main__":
    main()
