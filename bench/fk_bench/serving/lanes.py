"""Lanes: the server that each name stands for, with its interpreter, command and environment."""

from __future__ import annotations

import json
import os
import shlex
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from fastkernels.core import multicast
from fk_bench.core import machine

HOSTS = ("vllm", "sglang", "fastkernels")
LANES = ("vllm", "vllm+fk", "sglang", "sglang+fk", "fastkernels")
_PLUGIN_GROUP = {"vllm": "vllm.general_plugins", "sglang": "sglang.srt.plugins"}
_CHOICES = ("FASTKERNELS_OPS", "FASTKERNELS_PROVIDER", "FASTKERNELS_CANDIDATES")
_OWN_KERNELS = ("rms_norm", "silu_and_mul")  # ops for which vLLM's and SGLang's own CPU code is a provider
# Measured with SmolLM2-135M on 2 cores, 2026-11-21; for the estimate
START_S = {"vllm": 20, "sglang": 17, "fastkernels": 12}


class LaneError(ValueError):
    """A lane that cannot be started with these options; the message is one line."""


@dataclass(frozen=True)
class Lane:
    """One server configuration. `url` is set for a server that is already running (--attach)."""

    name: str
    host: str
    patched: bool
    python: str = ""
    env: Mapping[str, str] = field(default_factory=dict)
    args: tuple[str, ...] = ()
    url: str | None = None

    @property
    def own_kernels(self) -> bool:
        """Whether our ops run the host's own kernels: by default on a CPU, to prove the swap without a speed claim."""
        chosen = any(name in self.env for name in _CHOICES)
        return self.patched and self.url is None and not chosen and not machine.machine().gpus

    @property
    def synthetic_acceptance(self) -> str:
        """How its server accepts drafts by force, whatever the model samples; '' if it does not."""
        if "SGLANG_SIMULATE_ACC_LEN" in self.env:
            return f"length {self.env['SGLANG_SIMULATE_ACC_LEN']}"
        found = ""
        for word, value in zip(self.args, [*self.args, ""][1:], strict=True):
            name, equals, own = word.partition("=")
            if name in ("--speculative-config", "-sc"):
                found = _synthetic(own if equals else value)
        return found

    @property
    def provider(self) -> str | None:
        """Subject.provider of the lane's rows; None without a patch."""
        return (self.host if self.own_kernels else "fastkernels") if self.patched else None


def _synthetic(text: str) -> str:
    """The synthetic acceptance in a speculative_config of vLLM or of ours; a text that is none has none."""
    try:
        given = json.loads(text)
    except ValueError:
        return ""
    if not isinstance(given, dict) or given.get("rejection_sample_method") != "synthetic":
        return ""
    length, rates = (given.get(f"synthetic_acceptance_{name}") for name in ("length", "rates"))
    return f"length {length}" if length is not None else f"rates {rates}"


@dataclass(frozen=True)
class Sizing:
    """The capacity of each server: the same number of KV-cache tokens in every lane, and a share of a GPU.

    together  servers start at once: none may count memory that is free only for the moment as its own
    kv_bytes  of one token's keys and values, on all GPUs; None: unknown
    """

    max_model_len: int
    max_num_seqs: int
    kv_tokens: int
    residents: int
    tensor_parallel: int = 1
    dtype: str = "bfloat16"
    together: bool = False
    kv_bytes: int | None = None


def parse_lanes(
    names: Sequence[str],
    python: Mapping[str, str] | None = None,
    env: Mapping[str, Mapping[str, str]] | None = None,
    args: Mapping[str, Sequence[str]] | None = None,
    attach: Mapping[str, str] | None = None,
) -> list[Lane]:
    """Lanes by name, validated. A '+fk' lane inherits its host's interpreter, environment and arguments.

    Raises LaneError for an unknown lane, an interpreter that does not run, or a host that is not installed there.
    """
    python, env, args, attach = python or {}, env or {}, args or {}, attach or {}
    if not names:
        raise LaneError(f"--lanes: no lane given. Known: {', '.join(LANES)}.")
    known = {*names, *(n.partition("+")[0] for n in names)}
    for flag, given in (("--python", python), ("--env", env), ("--server-args", args), ("--attach", attach)):
        for name in given:
            if name not in LANES:
                raise LaneError(f"{flag}: unknown lane {name!r}. Known: {', '.join(LANES)}.")
            if name not in known and flag == "--attach":
                raise LaneError(f"{flag}: lane {name!r} is not one of --lanes {','.join(names)}")
    lanes = []
    for name in names:
        if name not in LANES:
            raise LaneError(f"--lanes: unknown lane {name!r}. Known: {', '.join(LANES)}.")
        if names.count(name) > 1:
            raise LaneError(f"--lanes: lane {name!r} is given twice")
        host, _, suffix = name.partition("+")
        if name in attach:
            lanes.append(Lane(name, host, bool(suffix), url=attach[name].rstrip("/")))
            continue
        path = python.get(name) or python.get(host) or sys.executable
        path = machine.absolute(path)
        merged_env = {**env.get(host, {}), **env.get(name, {})}
        merged_args = [*args.get(host, ())] + ([*args.get(name, ())] if suffix else [])
        lane = Lane(name, host, bool(suffix), path, merged_env, tuple(merged_args))
        if problem := not_installed(lane, f"--python {lane.host}=PATH"):
            raise LaneError(f"lane {lane.name}: {problem}")
        lanes.append(lane)
    return lanes


def not_installed(lane: Lane, option: str) -> str | None:
    """A requirement that its interpreter lacks, with a remedy, or None; `option` is the flag for another one."""
    try:
        found = machine.interpreter(lane.python)
    except ValueError as error:
        return f"{error}. Set one with {option}."
    needed = "fk_bench" if lane.host == "fastkernels" else lane.host
    if needed not in found.modules:
        package = "fastkernels[bench]" if lane.host == "fastkernels" else lane.host
        return (
            f"{needed} is not installed in {lane.python}. "
            f"Install {package} there, or set another interpreter with {option}."
        )
    if lane.patched and _PLUGIN_GROUP[lane.host] not in found.plugins:
        return (
            f"fastkernels is not installed in {lane.python}, so {lane.host} cannot load it. "
            f"Install it there: {lane.python} -m pip install fastkernels"
        )
    return None


def base_of(lane: str, lanes: Sequence[str], base: str | None = None) -> str:
    """The lane that `lane` is compared with: its host if that runs too, else `base` or the first lane."""
    host, _, suffix = lane.partition("+")
    if suffix and host in lanes:
        return host
    return base or lanes[0]


def groups(lanes: Sequence[Lane], resident: int) -> list[list[Lane]]:
    """Lanes that run at the same time, at most `resident`; a host and its '+fk' stay together where possible."""
    families: dict[str, list[Lane]] = {}
    for lane in lanes:
        families.setdefault(lane.host, []).append(lane)
    made: list[list[Lane]] = []
    for family in families.values():
        parts = [family[i : i + resident] for i in range(0, len(family), resident)]
        for part in parts:
            if made and len(made[-1]) + len(part) <= resident:
                made[-1].extend(part)
            else:
                made.append(list(part))
    return made


def command(
    lane: Lane, model: str, served_name: str, port: int, sizing: Sizing, profiles: Path | None = None
) -> list[str]:
    """The server's command line. The user's own arguments come last and take precedence.

    profiles  folder for traces of the server's profiler; None: no profiler
    """
    gpu = machine.machine().gpus > 0
    where = ["--host", "127.0.0.1", "--port", str(port)]
    if lane.host == "vllm":
        made = [lane.python, "-m", "vllm.entrypoints.cli.main", "serve", model, *where]
        made += [
            "--served-model-name",
            served_name,
            "--dtype",
            sizing.dtype,
            "--max-model-len",
            str(sizing.max_model_len),
            "--enable-prompt-tokens-details",
        ]
        if profiles is not None:
            made += [
                "--profiler-config",
                json.dumps({"profiler": "torch", "torch_profiler_dir": str(profiles)}),
            ]
        made += (
            _vllm_on_gpu(sizing) if gpu else ["--max-num-seqs", str(sizing.max_num_seqs), "--enforce-eager"]
        )
    elif lane.host == "sglang":
        made = [lane.python, "-m", "sglang.launch_server", "--model-path", model, *where]
        made += [
            "--served-model-name",
            served_name,
            "--dtype",
            sizing.dtype,
            "--context-length",
            str(sizing.max_model_len),
        ]
        made += ["--max-total-tokens", str(sizing.kv_tokens), "--enable-cache-report"]
        made += (
            _sglang_on_gpu(sizing)
            if gpu
            else [*_SGLANG_CPU, "--max-running-requests", str(sizing.max_num_seqs)]
        )
    else:
        made = [lane.python, "-m", "fk_bench.cli", "serve", model, *where, "--served-model-name", served_name]
        made += ["--max-model-len", str(sizing.max_model_len), "--dtype", sizing.dtype]
        # Blocks of 16 tokens, our default; one block is reserved for padding
        made += ["--num-blocks", str(sizing.kv_tokens // 16 + 1), "--max-num-seqs", str(sizing.max_num_seqs)]
        made += ["--tensor-parallel-size", str(sizing.tensor_parallel)] if sizing.tensor_parallel > 1 else []
    return [*made, *lane.args]


_SGLANG_CPU = (
    "--device", "cpu", "--attention-backend", "torch_native", "--sampling-backend", "pytorch", "--disable-cuda-graph",
    "--sleep-on-idle",
)  # fmt: skip


def _share(sizing: Sizing) -> str:
    return f"{0.88 / sizing.residents:.2f}"


def _vllm_on_gpu(sizing: Sizing) -> list[str]:
    blocks = max(1, sizing.kv_tokens // 16)  # blocks of 16 tokens, vLLM's default
    made = ["--gpu-memory-utilization", _share(sizing), "--num-gpu-blocks-override", str(blocks)]
    # Otherwise vLLM counts memory that others allocate meanwhile as its own activations
    if sizing.together and sizing.kv_bytes:
        made += ["--kv-cache-memory-bytes", str(blocks * 16 * sizing.kv_bytes // sizing.tensor_parallel)]
    return made + (
        ["--tensor-parallel-size", str(sizing.tensor_parallel)] if sizing.tensor_parallel > 1 else []
    )


def _sglang_on_gpu(sizing: Sizing) -> list[str]:
    # --max-total-tokens sets the size; the share is of the memory that was free at the start, with other servers' in it
    made = ["--mem-fraction-static", "0.85" if sizing.together else _share(sizing)]
    return made + (["--tp-size", str(sizing.tensor_parallel)] if sizing.tensor_parallel > 1 else [])


def kv_bytes(config: Mapping[str, Any]) -> int | None:
    """Bytes of one token's keys and values in 16 bits, from a Hugging Face config.json; None if it does not say."""
    try:
        heads = config.get("num_key_value_heads") or config["num_attention_heads"]
        size = config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"]
        return 2 * 2 * int(config["num_hidden_layers"]) * int(heads) * int(size)
    except (KeyError, TypeError, ZeroDivisionError):
        return None


def environment(
    lane: Lane, model: str, report: Path, together: bool = False, profiles: Path | None = None
) -> dict[str, str]:
    """Variables to add to (or, if '', remove from) this process's environment for the lane's server."""
    made = {name: "" for name in os.environ if name.startswith("FASTKERNELS") and name != "FASTKERNELS_CACHE"}
    made.update({"PYTHONUNBUFFERED": "1", "TOKENIZERS_PARALLELISM": "false", **multicast.variables()})
    if Path(model).is_dir():
        made.update({"HF_HUB_OFFLINE": "1", "TRANSFORMERS_OFFLINE": "1"})
    if not machine.machine().gpus and lane.host != "vllm":
        # vLLM reserves one core for its front end. With a compute thread on every core, front end, client and compute
        # threads wait for each other: SGLang took 610 ms a token on 2 busy cores, 2026-11-21.
        made["OMP_NUM_THREADS"] = str(max(1, machine.machine().cores - 1))
    if lane.host == "sglang" and together:  # other servers allocate meanwhile, unevenly
        made["SGLANG_ENABLE_TP_MEMORY_INBALANCE_CHECK"] = "0"
    if lane.host == "sglang" and profiles is not None:
        made["SGLANG_TORCH_PROFILER_DIR"] = str(profiles)
    if lane.host == "vllm":
        made.update({"VLLM_NO_USAGE_STATS": "1", "DO_NOT_TRACK": "1", "VLLM_SERVER_DEV_MODE": "1"})
        if not machine.machine().gpus:
            made["VLLM_CPU_KVCACHE_SPACE"] = "1"  # GiB; two such lanes fit on a small machine
    if lane.patched:
        made["FASTKERNELS"] = "1"
    if lane.own_kernels:
        made["FASTKERNELS_PROVIDER"] = ",".join(f"{op}:{lane.host}" for op in _OWN_KERNELS)
    made["FASTKERNELS_REPORT"] = str(report)
    return {**made, **lane.env}


def shell_line(env: Mapping[str, str], argv: Sequence[str]) -> str:
    """The command line for a shell."""
    unset = "".join(f"-u {k} " for k, v in env.items() if v == "")
    pairs = " ".join(f"{k}={shlex.quote(v)}" for k, v in env.items() if v != "")
    return f"env {unset}{pairs} {shlex.join(argv)}"


def read_reports(folder: Path) -> dict[str, Any]:
    """The reports of patched processes: {'patched_modules', 'patched_calls', 'processes', 'ops', 'providers', 'notes'}.

    A counter belongs to an op, not to a host class, so each op counts once per process; ranks are added up.
    """
    modules = calls = processes = 0
    ops: dict[str, int] = {}
    providers: dict[str, str] = {}
    notes: list[str] = []
    for file in sorted(folder.glob("*.json")) if folder.is_dir() else ():
        try:
            report = json.loads(file.read_text())
        except (json.JSONDecodeError, OSError):
            continue
        processes += 1
        if report.get("error"):
            notes.append(str(report["error"]))
        here: dict[str, int] = {}
        for row in report.get("rows") or ():
            if row.get("state") == "active":
                modules += int(row.get("modules", 0))
                if row.get("provider"):
                    providers[row["op"]] = row["provider"]
                here[row["op"]] = max(here.get(row["op"], 0), int(row.get("calls", 0)))
            notes += [f"{row['op']} fell back {n}x: {why}" for why, n in (row.get("fallbacks") or {}).items()]
        for op, n in here.items():
            ops[op] = ops.get(op, 0) + n
        calls += sum(here.values())
    return {
        "patched_modules": modules,
        "patched_calls": calls,
        "processes": processes,
        "ops": ops,
        "providers": providers,
        "notes": notes,
    }
