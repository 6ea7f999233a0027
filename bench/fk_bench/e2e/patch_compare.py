"""`fk-bench patch-compare`: a host against itself, stock and patched in turn, for many models.

The states alternate: stock, patched, stock, patched, stock. Live, that is one engine, patched and undone; before
construction, a process a state. A run of a patched state is compared with the mean of the same run in the two stock
states around it; neighbouring stock states compared with each other show the noise. Engines of several models can share
a GPU: they start together, then they are measured in turn, while the others are idle, which is faster and less exact.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import reduce
from operator import add
from pathlib import Path
from typing import Annotated, Any

import typer

from fastkernels.core.registry import UnknownName, check_names
from fastkernels.core.tuning import NO_TABLE
from fk_bench.core import machine, rows
from fk_bench.core.flags import ConfigError, comma_list, json_object
from fk_bench.core.hub import ModelError
from fk_bench.core.needs import NEEDS
from fk_bench.core.output import fail, last_line
from fk_bench.core.rows import Row
from fk_bench.core.runs import missing
from fk_bench.e2e import sharing
from fk_bench.e2e.comparison import Comparison, Extent, Load
from fk_bench.e2e.ratios import COMMAND, over_loads, show, summary
from fk_bench.offline.host import HostFailed, vocab_size

DENSE = (
    "qwen2.5-7b", "llama-3.2-3b", "phi-4", "olmo-2-1124-7b", "granite-3.3-8b", "gemma-2-9b", "qwen3-4b", "qwen2.5-0.5b",
    "llama-3.2-1b", "qwen2.5-14b", "qwen3-14b", "gemma-3-12b", "mistral-small-24b-2501", "qwen2.5-32b",
)  # fmt: skip
WITH_ENGINE = "qwen2.5-7b", "phi-4", "olmo-2-1124-7b", "granite-3.3-8b", "gemma-2-9b", "qwen3-8b"
DEFAULT_LOADS = "1x512+128,8x512+128,32x512+128"
ENGINE_LOADS = "1x512+128,32x512+128,64x1024+128"
# Decoding at several sizes of a batch, then prompts with few outputs: a patch must slow down neither.
ALL_LOADS = "1x512+64,8x512+64,32x512+64,64x512+64,1x600+8,8x512+8,4x1920+8"


def patch_compare_command(
    models: Annotated[
        list[str] | None,
        typer.Argument(
            help="folders, or with random weights names such as llama-3.2-3b; all: "
            f"{len(DENSE)} dense models, with --with-engine {len(WITH_ENGINE)}"
        ),
    ] = None,
    host: Annotated[str, typer.Option(help="vllm or sglang")] = "vllm",
    python: Annotated[str, typer.Option(help="the host's interpreter (default: this one)")] = "",
    loads: Annotated[
        str,
        typer.Option(
            help="REQUESTSxINPUT+OUTPUT tokens, comma-separated; all requests start together "
            f"(default: {DEFAULT_LOADS}, with --with-engine {ENGINE_LOADS}); all: {ALL_LOADS}",
            show_default=False,
        ),
    ] = "",
    cycles: Annotated[int, typer.Option(help="times that the host is patched and undone")] = 2,
    repeats: Annotated[int, typer.Option(help="runs of each load in each state, after one more")] = 3,
    model_seconds: Annotated[
        float, typer.Option(help="limit of a model's runs, about: fewer repeats, at least two (0: no limit)")
    ] = 0.0,
    load_seconds: Annotated[
        float, typer.Option(help="repeat a short load until its runs take so long, at most 20 times")
    ] = 1.0,
    again: Annotated[
        float,
        typer.Option(help="measure loads once more whose output throughput is under this multiple (0: none)"),
    ] = 0.0,
    side_by_side: Annotated[
        int,
        typer.Option(
            help="models whose engines may share the GPU, where their memory fits: faster, but less exact"
        ),
    ] = 1,
    with_engine: Annotated[
        bool, typer.Option("--with-engine", help="also our engine, next to the host, with the same prompts")
    ] = False,
    no_table: Annotated[
        bool,
        typer.Option(
            "--no-table", help="without the tuned tables that ship: as for a model that was never tuned"
        ),
    ] = False,
    before_construction: Annotated[
        bool, typer.Option("--before-construction", help="FASTKERNELS=1 in a process of its own, not live")
    ] = False,
    ops: Annotated[str, typer.Option(help="comma-separated (default: what patch() chooses)")] = "",
    trace: Annotated[bool, typer.Option(help="profiled runs: the GPU's time in a step of decoding")] = True,
    load_format: Annotated[str, typer.Option(help="dummy: random weights; auto: the checkpoint's")] = "dummy",
    dtype: Annotated[str, typer.Option(help="auto: bfloat16, or float32 on a CPU that emulates it")] = "auto",
    tensor_parallel: Annotated[int, typer.Option(help="GPUs")] = 1,
    gpu_share: Annotated[
        float, typer.Option(help="share of the memory (default: 0.9, on a CPU 0.3)", show_default=False)
    ] = 0.0,
    engine_args: Annotated[str, typer.Option(help="JSON of more arguments of the host's engine")] = "{}",
    timeout: Annotated[float, typer.Option(help="seconds for a start, a patch or a run")] = 600.0,
    seconds: Annotated[
        float, typer.Option(help="begin no model after this time (0: no limit); continue with the same --out")
    ] = 0.0,
    seed: Annotated[int, typer.Option(help="of the prompts, which are new for every run")] = 0,
    out: Annotated[
        Path | None,
        typer.Option(
            help="folder of the rows; models that it has already are only shown (default: a new one)"
        ),
    ] = None,
    json_only: Annotated[
        bool, typer.Option("--json", help="only the line of JSON on standard output")
    ] = False,
) -> None:
    """A host against itself, stock and patched in turn: latency a token, throughput and steps, for each model.

    fk-bench patch-compare qwen2.5-7b llama-3.2-3b --python .venv-vllm/bin/python --out run

    fk-bench patch-compare all --no-table --loads all --cycles 1 --again 0.98 --model-seconds 45

    A ratio above 1 means that the patched host is better, with a 95% interval; 'noise' is the same for stock against
    stock. Measured by an offline engine, token by token, without a server.
    Without a model, the rows of --out are shown.
    """
    start = time.monotonic()
    if not models and out is None:
        fail(NEEDS["patch-compare"])
    try:
        loads = loads or (ENGINE_LOADS if with_engine else DEFAULT_LOADS)
        plan = [
            Load.parse(part) for part in comma_list("--loads", ALL_LOADS if loads == "all" else loads, str)
        ]
        if not plan:
            raise ConfigError(f"--loads {loads!r} has no load: give one as in 8x512+128")
        for name, given, allowed in (
            ("host", host, ("vllm", "sglang")),
            ("load-format", load_format, ("dummy", "auto")),
            ("dtype", dtype, ("auto", "bfloat16", "float16", "float32")),
        ):
            if given not in allowed:
                raise ConfigError(f"--{name} {given!r}: give {', '.join(allowed[:-1])} or {allowed[-1]}")
        if min(cycles, repeats, side_by_side, tensor_parallel) < 1:
            raise ConfigError("--cycles, --repeats, --side-by-side and --tensor-parallel must be at least 1")
        if min(model_seconds, load_seconds, again, seconds, gpu_share) < 0 or timeout <= 0 or gpu_share > 1:
            raise ConfigError(
                "--model-seconds, --load-seconds, --again and --seconds must not be negative, --timeout must be above"
                " 0, and --gpu-share must be from 0 to 1"
            )
        chosen = check_names(comma_list("--ops", ops, str)) if ops else None
        if before_construction and (side_by_side > 1 or with_engine):
            raise ConfigError(
                "--before-construction starts a process for each state: it excludes --side-by-side and --with-engine"
            )
        if tensor_parallel > 1 and (side_by_side > 1 or with_engine):
            raise ConfigError(
                "--tensor-parallel excludes --side-by-side and --with-engine: they share one GPU"
            )
        extra = json_object("--engine-args", engine_args)
        interpreter = machine.absolute(python or sys.executable)
        if models:
            _check_installed(host, interpreter)
        elif out is not None and not (out / "rows.jsonl").is_file():
            raise ConfigError(missing(out))
        folder = out or Path("fk-bench-runs") / time.strftime(f"{COMMAND}-%Y%m%d-%H%M%S")
        folder.mkdir(parents=True, exist_ok=True)
    except (ConfigError, UnknownName) as error:
        fail(str(error))
    except OSError as error:
        fail(f"--out {out}: {error.strerror}")
    file = folder / "rows.jsonl"
    extent = Extent(
        plan, cycles, repeats, model_seconds, load_seconds, again, trace and machine.machine().gpus > 0
    )
    asked = _Asked(
        host, interpreter, folder, timeout, before_construction,
        chosen, {"FASTKERNELS_TUNED": NO_TABLE} if no_table else {},
        machine.fast_dtype() if dtype == "auto" else dtype, load_format, tensor_parallel, gpu_share, extra,
        with_engine, extent, seed,
    )  # fmt: skip
    every = _read(file)
    case = asked.case() if models or not every else every[-1].case  # without a model, those of the last run
    host = host if models or not every else str(every[-1].subject.host)
    made = [
        row
        for row in every
        if all(row.case.get(k, False) == case.get(k, False) for k in CHOSEN) and row.subject.host == host
    ]
    done = {row.subject.model for row in made if row.case["state"] == "end"}
    names = [
        name
        for given in models or ()
        for name in ((WITH_ENGINE if with_engine else DENSE) if given == "all" else (given,))
    ]
    wanted = [name for name in dict.fromkeys(names) if name not in done]
    if unfinished := [row for row in made if row.subject.model in wanted]:
        rows.replace(file, [row for row in every if row not in unfinished])
        made = [row for row in made if row not in unfinished]
    failed: dict[str, str] = {}
    late = start + seconds if seconds else float("inf")
    for row in asked.measure(wanted, side_by_side, late, failed):
        made.append(row)
        rows.append(file, [row])
    ended = {row.subject.model for row in made if row.case["state"] == "end"}
    left = [name for name in wanted if name not in ended and name not in failed]
    results = summary(made)
    if not json_only:
        show(results)
        if not asked.gpu:
            print("on a CPU the ratios say nothing about a GPU")
        if left:
            print(
                f"not measured within {seconds:g} s: {', '.join(left)}; run the command again with --out {folder}"
            )
        print(f"rows: {file}\n")
    last_line({
        "command": COMMAND, "ok": not failed, "rows": str(file), "failed": list(failed), "left": left,
        "results": results, "over_loads": over_loads(results),
    })  # fmt: skip
    if failed:
        raise SystemExit(1)


CHOSEN = "before_construction", "no_table", "with_engine"  # rows that differ in these are another comparison


@dataclass
class _Asked:
    """The measurements that were requested, for any model."""

    host: str
    python: str
    folder: Path
    timeout: float
    before_construction: bool
    ops: Sequence[str] | None
    env: dict[str, str]
    dtype: str
    load_format: str
    tensor_parallel: int
    gpu_share: float
    engine_args: dict[str, Any]
    with_engine: bool
    extent: Extent
    seed: int

    @property
    def gpu(self) -> bool:
        return machine.machine().gpus > 0

    def case(self) -> dict[str, Any]:
        return {
            "before_construction": self.before_construction, "no_table": bool(self.env),
            "with_engine": self.with_engine, "dtype": self.dtype, "load_format": self.load_format,
            "tensor_parallel": self.tensor_parallel,
            "routing": "uniform" if self.load_format == "dummy" else "trained",  # see random_weights
        }  # fmt: skip

    def measure(
        self, models: Sequence[str], at_once: int, late: float, failed: dict[str, str]
    ) -> Iterable[Row]:
        """The rows of the models, in groups that share the GPU. `failed` gets the models that could not be measured.

        A model that fails next to others is tried again alone.
        """
        groups = self._groups(models, at_once, failed)
        while groups:
            if time.monotonic() > late:
                return
            group = groups.pop(0)
            errors: dict[str, str] = {}
            yield from self._measure_group(group, late, errors)
            for model, error in errors.items():
                if len(group) > 1:
                    print(f"{model}: {error}\n{model} is tried again alone", file=sys.stderr)
                    groups.append({model: group[model]})
                else:
                    failed[model] = error
                    print(f"{model}: {error}", file=sys.stderr)

    def _groups(
        self, models: Sequence[str], at_once: int, failed: dict[str, str]
    ) -> list[dict[str, tuple[str, sharing.Need | None]]]:
        """[{model: (its folder, its memory if engines share the GPU)}]."""
        paths, needs = {}, []
        for model in models:
            try:
                path = _prepared(model, self.load_format, self.folder)
                vocab_size(path)  # of a config that can be read
                paths[model] = path
                if at_once > 1 or self.with_engine:
                    needs.append(sharing.need(model, paths[model], self.dtype, self._kv_tokens(), self.gpu))
            except (ModelError, ValueError) as error:
                failed[model] = str(error)
                print(f"{model}: {error}", file=sys.stderr)
        if at_once == 1 and not self.with_engine:
            return [{model: (path, None)} for model, path in paths.items()]
        copies = 1 + self.with_engine
        room = sharing.room(needs, copies, self.gpu)
        for one in [n for n in needs if copies * (n.weights + n.kv) > room]:
            failed[one.model] = sharing.too_large(one, room, copies)
            print(f"{one.model}: {failed[one.model]}", file=sys.stderr)
            needs.remove(one)
        found = sharing.waves(needs, room, at_once, copies)
        for group in found:
            each = "; ".join(f"{one.model} {one}" for one in group)
            print(f"together, {copies} x: {each}; {room / sharing.GIB:.1f} GiB are free", file=sys.stderr)
        return [{one.model: (paths[one.model], one) for one in group} for group in found]

    def _kv_tokens(self) -> int:
        sizes = ((load.requests, load.input_len + load.output_len) for load in self.extent.loads)
        return sharing.kv_tokens(sizes, self._longest(), 16 if self.gpu else 128)  # the hosts' blocks

    def _longest(self) -> int:
        return max((load.input_len + load.output_len for load in self.extent.loads), default=0) + 16

    def _measure_group(
        self, group: dict[str, tuple[str, sharing.Need | None]], late: float, errors: dict[str, str]
    ) -> Iterable[Row]:
        started: list[Comparison] = []
        ready: list[Comparison] = []
        try:
            if needs := [need for _, need in group.values() if need is not None]:
                sharing.room([reduce(add, needs)], 1 + self.with_engine, self.gpu)
            began = time.monotonic()
            for model, (path, need) in group.items():
                started.append(self._comparison(model, path, need))
                started[-1].start()
            for one in started:
                try:
                    one.wait()
                    ready.append(one)
                except HostFailed as error:
                    errors[one.model] = str(error)
                    one.stop()
            print(
                f"{', '.join(one.model for one in ready)}: started in {time.monotonic() - began:.0f} s",
                file=sys.stderr,
            )
            for one in ready:
                if time.monotonic() > late:
                    return
                case = {**self.case(), "resident": [other.model for other in ready if other is not one]}
                began = time.monotonic()
                try:
                    yield from one.measure(self.extent, self.seed, case)
                    print(f"{one.model}: measured in {time.monotonic() - began:.0f} s", file=sys.stderr)
                except HostFailed as error:
                    errors[one.model] = str(error)
                    one.stop()
        finally:  # an engine that is measured stays, since its end would disturb the next one
            with ThreadPoolExecutor(max(1, len(started))) as pool:
                list(pool.map(Comparison.stop, started))

    def _comparison(self, model: str, path: str, need: sharing.Need | None) -> Comparison:
        most = max((load.requests for load in self.extent.loads), default=1)
        settings: dict[str, Any] = {
            "model": path, "dtype": self.dtype, "load_format": self.load_format, "max_model_len": self._longest(),
            "max_num_seqs": max(most, 256 if self.gpu else 8), "kv_tokens": None, "gpu": self.gpu,
            "gpu_share": self.gpu_share or (0.9 if self.gpu else 0.3), "tensor_parallel": self.tensor_parallel,
            "engine_args": self.engine_args,
        }  # fmt: skip
        engine = None
        if need is not None:
            settings |= {"shared": True, "gpu_share": 0.01}  # only a check: the KV cache has its size
            settings |= {"kv_tokens": need.tokens} if self.host == "sglang" else {"kv_bytes": need.kv}
        if need is not None and self.with_engine:
            engine = {**settings, "kv_tokens": None, "kv_bytes": need.kv, "engine_args": {}}
        return Comparison(
            model, self.host, self.python, settings, self.folder, self.timeout, self.before_construction, self.ops,
            self.env, engine,
        )  # fmt: skip


def _read(file: Path) -> list[Row]:
    made, warnings = rows.read(file) if file.exists() else ([], [])
    for warning in warnings:
        print(warning, file=sys.stderr)
    return made


def _check_installed(host: str, python: str) -> None:
    """Raise ConfigError for an interpreter that does not run or that lacks the host."""
    try:
        found = machine.interpreter(python)
    except ValueError as error:
        raise ConfigError(f"{error}: give another one with --python") from error
    if host not in found.modules:
        raise ConfigError(
            f"{host} is not installed in {python}: give {host}'s own interpreter with --python PATH"
        )


def _prepared(model: str, load_format: str, folder: Path) -> str:
    from fk_bench.e2e.command import sizes_of

    return sizes_of(model, folder) if load_format == "dummy" else model
