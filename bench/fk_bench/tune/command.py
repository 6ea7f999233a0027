"""`fk-bench tune`: measure every provider of an op at a model's shapes, and write the table that dispatch reads."""

from __future__ import annotations

import atexit
import shlex
import shutil
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from json import dumps, loads
from pathlib import Path
from typing import Annotated, Any

import typer

from fastkernels.core import registry, tuning
from fastkernels.core.registry import UnknownName
from fastkernels.core.tuning import REACH, Entry, Table, TableError
from fastkernels.models.common.descriptions.registry import models
from fastkernels.verify.phases import Seconds, timed
from fk_bench.core import rows, scores
from fk_bench.core.hub import ModelError
from fk_bench.core.machine import torch_device
from fk_bench.core.model_names import is_model
from fk_bench.core.rows import Row, Status, Subject
from fk_bench.core.terminal.needs import NEEDS
from fk_bench.core.terminal.output import fail, last_line, table
from fk_bench.e2e.model_configs import load_config
from fk_bench.kernels import report
from fk_bench.tune import tuner
from fk_bench.tune.choice import Choice, point_of
from fk_bench.tune.compile import Ready
from fk_bench.tune.model_shapes import longest_context, shapes_of_model
from fk_bench.tune.screen import Screen

MODEL_BATCHES, LEAST_CONTEXT = "1,8,32,16,64", 1024  # the most important first
ROUNDS, MODEL_ROUNDS = 20, 8
BATCHES = "1,2,4,8,16,32,64,128,256"
ROUND_S = 0.1  # approximate seconds of the timed batches of a round
TRUTH = {"True": True, "False": False}  # in a shape, as hints print them
CONTEXTS = "512,2048,8192,32768"
QUANTIZED: dict[str, dict[str, Any]] = {
    "fp8": {"quant_method": "fp8", "activation_scheme": "dynamic"},
    "fp8-block": {"quant_method": "fp8", "activation_scheme": "dynamic", "weight_block_size": [128, 128]},
}
# Parameters that do not fit the chip, and times that the judge rejects: not chosen, but no failure either.
NOT_CHOSEN = (Status.COMPILE_ERROR, Status.RUNTIME_ERROR, Status.OOM, Status.INVALID)
FAILED = tuple(s for s in scores.FAILED if s not in NOT_CHOSEN)


def tune_command(
    ops: Annotated[
        list[str] | None,
        typer.Argument(
            help="a model, for all its shapes; or op names; all: every op that is dispatched by shape"
        ),
    ] = None,
    model: Annotated[
        str,
        typer.Option(help=f"shapes of this model: {', '.join(models())}, or a folder with config.json"),
    ] = "",
    tp: Annotated[str, typer.Option(help="numbers of ranks that share the model")] = "1",
    dtype: Annotated[str, typer.Option(help="of the model")] = "bfloat16",
    shape: Annotated[
        list[str] | None,
        typer.Option(help="a shape as in tables, N=4096,K=4096,dtype=bfloat16; repeatable"),
    ] = None,
    batch: Annotated[
        str,
        typer.Option(
            help=f"tokens, or sequences, of a call; default on a GPU {BATCHES}, of a model {MODEL_BATCHES}"
        ),
    ] = "",
    context: Annotated[
        str,
        typer.Option(
            help=f"context lengths, for ops that depend on them; {CONTEXTS}; of a model its longest, and quarters of it"
        ),
    ] = "",
    provider: Annotated[list[str] | None, typer.Option(help="only these providers (default: all)")] = None,
    against: Annotated[
        str, typer.Option(help="production, or host: the kernels of vLLM or SGLang")
    ] = "production",
    finalists: Annotated[int, typer.Option(help="number of ranked choices that are judged in full")] = 2,
    rounds: Annotated[
        int,
        typer.Option(
            help=f"interleaved rounds of the finalists, at least three (default: {ROUNDS}, of a model {MODEL_ROUNDS})",
            show_default=False,
        ),
    ] = 0,
    timeout: Annotated[float, typer.Option(help="seconds for each step, such as compiling")] = 120.0,
    quantization: Annotated[
        str, typer.Option(help="a model as if its checkpoint were quantized: fp8, or fp8-block")
    ] = "",
    missing: Annotated[
        bool, typer.Option("--missing", help="only entries that the table of --out lacks")
    ] = False,
    seconds: Annotated[
        float, typer.Option(help="start nothing new after this time (0: no limit); continue with --missing")
    ] = 0.0,
    device: Annotated[str, typer.Option(help="cuda or cpu (default: cuda if available)")] = "",
    out: Annotated[
        Path | None, typer.Option(help="the table, new or existing (default: RUN/CHIP.json)")
    ] = None,
    run: Annotated[
        Path | None, typer.Option(help="directory of the run (default: fk-bench-runs/tune-TIME)")
    ] = None,
    json: Annotated[bool, typer.Option("--json", help="only the line of JSON on standard output")] = False,
) -> int:
    """Measure which provider, with which parameters, is fastest at each shape, and write a table for FASTKERNELS_TUNED.
    An entry names one of our providers only if it is correct and measured faster than production.

    fk-bench tune qwen3-8b    # its linear layers, decode attention and experts, in minutes

    The choices for a model are compiled on all cores and timed in one process. Only those that are faster there are
    judged.

    The last line of output is JSON; the exit status is 1 if a kernel was wrong or a process was lost.
    """
    from fk_bench.kernels.judge import Options
    from fk_bench.kernels.judge.processes.sides import Sides
    from fk_bench.kernels.judge.processes.zygote import ZygoteError

    if not ops and not model:
        fail(NEEDS["tune"])
    if ops and "all" in ops:
        if len(ops) > 1:
            fail(f"all and {', '.join(op for op in ops if op != 'all')}: give one or the other")
        ops = None
    start, where = time.perf_counter(), torch_device(device)
    chip = tuning.chip_of(where)
    if against not in ("production", "host"):
        fail(f"--against {against!r} is not production or host")
    if 0 < rounds < 3 or rounds < 0 or finalists < 1 or not timeout > 0:
        fail("--rounds must be at least 3, --finalists at least 1, --timeout above 0 seconds")
    sides, ready = Sides(where, {}, Options.cage, timeout, None), None
    atexit.register(sides.close)
    try:
        if where == "cuda" and _has_model(ops or ()):
            # All that imports for seconds starts before the model's config is read and its points are listed.
            sides.begin()
            ready = Ready(where)
            atexit.register(ready.close)
        names, whole = _split(tuple(ops or ()), model, quantization)
        if whole and where == "cpu" and not device:
            fail(
                "torch sees no GPU here, and a table is for the GPU that serves the model;"
                " --device cpu runs the command on the CPU, as a test"
            )
        batches = _numbers("--batch", batch or _of(where, whole, MODEL_BATCHES, BATCHES))
        contexts = _numbers("--context", context) if context else _contexts(whole)
        asked = _asked(names, whole or model, _numbers("--tp", tp), dtype, shape or [], where, bool(whole))
        several = _choices(asked, where, provider or (), bool(whole))
        folder = _run(run)
        path = _out(out, folder, chip)
        old = tuning.read(path) if path.exists() else Table(chip, {}, ())
        if old.chip != chip:
            raise TableError(f"--out {path} is a table of {old.chip}, but this is {chip}")
    except (UnknownName, ValueError) as error:
        fail(str(error))
    rounds = rounds or (MODEL_ROUNDS if whole else ROUNDS)
    options = Options(
        device=where, against=against, rounds=rounds, seconds=ROUND_S * rounds, timeout=timeout,
        hard=0 if whole else Options.hard,  # those of our own kernels are covered by `fk-bench kernels`
    )  # fmt: skip
    there = {e.point for e in old.entries if not _untimed(e)} if missing else set()
    points = [
        (name, its, at, low)
        for name in several for its in asked[name] for at, low in tuner.grid(tuner.key_of(name)[2], (batches, contexts))
        if Entry(name, its, at, None, "", "").point not in there
    ]  # fmt: skip
    if whole:  # a run that ends early has the most important sizes of all shapes
        points.sort(key=lambda point: batches.index(next(iter(point[2].values()))))
    state = _State(folder / "rows.jsonl", len(points), chip, old, path)
    state.all_there = missing and bool(there) and not points
    screen = Screen(where, state.run, ready=ready) if whole else None
    stopped = ""
    try:
        with tuner.Tuner(
            options, finalists, state.run, state.on_row, screen, state.on_screen, sides
        ) as tuning_run:
            state.seconds = tuning_run.seconds
            if screen is not None and points:
                to_compile = _to_compile(points, several)
                state.seconds["planned"] = time.perf_counter() - start
                with timed(state.seconds, "compiled"), screen.compiling(to_compile):
                    tuning_run.warm(to_compile)
                state.say(f"kernels compiled after {time.perf_counter() - start:.0f} s")
            for name, its, at, low in points:
                if seconds and time.perf_counter() - start > seconds:
                    stopped = f"the limit of {seconds:g} s was reached"
                    break
                state.on_entry(tuning_run.point(name, its, at, low, several[name]))
    except ZygoteError as error:
        fail(" ".join(str(error).split()))
    except OSError as error:
        fail(f"{error}; what was measured until then is in {folder}", 1)
    except KeyboardInterrupt:
        stopped = "interrupted"
    if stopped and state.found:
        words = {
            "--model": model, "--tp": tp if tp != "1" else "", "--quantization": quantization, "--batch": batch,
            "--dtype": dtype if dtype != "bfloat16" else "", "--context": context, "--device": device,
            "--against": against if against != "production" else "",
        }  # fmt: skip
        given = [word for name, value in words.items() if value for word in (name, value)]
        given += [word for text in shape or () for word in ("--shape", text)]
        given += [word for text in provider or () for word in ("--provider", text)]
        again = shlex.join(
            [
                "fk-bench",
                "tune",
                *(ops or ([] if model else ["all"])),
                *given,
                "--missing",
                "--out",
                str(path),
            ]
        )
        state.say(
            f"{stopped}: {len(points) - state.done} of {len(points)} points are left. To continue: {again}"
        )
    if not json:
        state.show(where)
    last_line(state.result(where, start))
    return 0 if state.ok else 1


def _untimed(entry: Entry) -> bool:
    """Whether an entry of an older table was not timed in the longer calls of its point."""
    key = getattr(registry.get(entry.op).op, "key", None)
    if key is None or key.longer is None:
        return False
    point = point_of(entry.op, entry.shape, entry.sizes)
    return tuning.untimed(key, [replace(entry, shipped=True)], point.shape, [point.sizes])


class _State:
    """The state of a run. The table is written after each point, so that an interruption loses at most one."""

    def __init__(self, file: Path, points: int, chip: str, old: Table, path: Path):
        self.file, self.points, self.chip, self.table, self.path = file, points, chip, old, path
        self.run = time.strftime("%Y%m%d-%H%M%S")
        self.judged: list[Row] = []
        self.found: list[Entry] = []
        self.screened: Row | None = None
        self.done = 0
        self.all_there = False  # with --missing: no entry is missing
        self.seconds: Seconds = {}  # planned, compiled, screened, judged

    def say(self, text: str) -> None:
        print(text, file=sys.stderr, flush=True)

    def on_row(self, row: Row) -> None:
        self.judged.append(row)
        rows.append(self.file, [row])
        said = Choice(str(row.subject.provider), row.case["params"])
        head = f"[{self.done + 1}/{self.points}] {row.case['stage']:<7}"
        print(f"{head} {said}: {report.line(row)}", file=sys.stderr, flush=True)

    def on_screen(self, row: Row) -> None:
        self.screened = row
        rows.append(self.file, [row])
        times = sorted((us, name.removeprefix("us ")) for name, us in row.metrics.items())
        said = ", ".join(f"{name} {us:.1f} us" for us, name in times[:3]) or row.reason
        print(f"[{self.done + 1}/{self.points}] in one process: {said}", file=sys.stderr, flush=True)

    def on_entry(self, entry: Entry | None) -> None:
        """Write the table with this entry added."""
        self.done += 1
        if entry is None:
            return
        self.found.append(entry)
        last = self.judged[-1] if self.judged else self.screened
        assert last is not None
        info = {
            "date": time.strftime("%Y-%m-%d"), "commit": last.commit, "versions": last.versions,
            "machine": last.machine.model_dump(),
        }  # fmt: skip
        self.table = self.table.merged(Table(self.chip, {self.run: info}, (entry,)))
        tuner.written(self.path, self.table.to_json())
        rows.append(self.file, [self._row(entry, last)])

    def _row(self, entry: Entry, like: Row) -> Row:
        case = {
            "kind": "entry",
            "shape": dict(entry.shape),
            "sizes": dict(entry.sizes),
            "params": dict(entry.params),
        }
        metrics = {"speedup": entry.speedup} if entry.faster else {}
        return Row(
            run_id=like.run_id, command="tune", commit=like.commit, machine=like.machine, versions=like.versions,
            subject=Subject(op=entry.op, provider=entry.provider), case=case, metrics=metrics, baseline=entry.baseline,
            ci95={"speedup": entry.ci95} if entry.faster else {},
        )  # fmt: skip

    @property
    def failed(self) -> int:
        return sum(r.status in FAILED for r in self.judged)

    @property
    def ok(self) -> bool:
        return not self.failed and (bool(self.found) or self.all_there)

    def _phases(self) -> dict[str, float]:
        return {phase: round(seconds, 1) for phase, seconds in self.seconds.items()}

    def _judging(self) -> dict[str, float]:
        """The seconds of the judge by phase, all rows together, longest first."""
        found = Counter[str]()
        for row in self.judged:
            found.update(row.case.get("seconds", {}))
        return {phase: round(seconds, 1) for phase, seconds in found.most_common() if seconds >= 0.05}

    def show(self, device: str) -> None:
        note = f" ({report.CPU_MARK})" if device == "cpu" else ""
        cells = [
            (
                e.op, *(" ".join(f"{n}={v}" for n, v in d.items()) for d in (e.shape, e.sizes)),
                Choice(e.provider, e.params) if e.provider else "the op's default order", e.baseline,
                report.speedup(e.speedup, e.ci95) if e.faster else "",
            )
            for e in self.found
        ]  # fmt: skip
        columns = ("op", "shape", "up to", "provider", "production", "speedup (95%)")
        table(f"tuned for {self.chip}{note}", columns, cells)
        if self.done:
            each = ", ".join(f"{phase} {seconds:.1f} s" for phase, seconds in self.seconds.items())
            print(f"{self.done} of {self.points} points: {each}")
            if parts := self._judging():
                print(
                    f"of judging: {', '.join(f'{phase} {seconds:.1f} s' for phase, seconds in parts.items())}"
                )
        for row in self.judged:
            if row.status in scores.FAILED:
                which = f"{row.subject.op} {row.subject.provider} {row.case['name']}"
                print(f"{which}: {row.status.value}: {row.reason[:200]}")

    def result(self, device: str, start: float) -> dict[str, Any]:
        found: dict[str, Any] = {
            "command": "tune", "ok": self.ok, "device": device, "chip": self.chip,
            "ops": len({e.op for e in self.found}), "points": len(self.found), "left": self.points - self.done,
            "faster": sum(e.faster for e in self.found), "judged": len(self.judged), "failed": self.failed,
            "seconds": round(time.perf_counter() - start, 1), "phases": self._phases(), "judging": self._judging(),
            "rows": str(self.file),
            "table": str(self.path) if self.found else None,
        }  # fmt: skip
        if not self.found and not self.all_there:
            reasons = dict.fromkeys(r.reason for r in self.judged if r.reason)
            found["error"] = "nothing was judged: " + (
                "; ".join(reasons) or "no time, shape or provider is left"
            )
            print(f"error: {found['error']}", file=sys.stderr)
        return found


def _of(device: str, whole: str, model: str, ops: str) -> str:
    """The default sizes: of a model, of ops on a GPU, and on a CPU as a test."""
    return model if whole else ops if device == "cuda" else "1,4"


def _contexts(model: str) -> tuple[int, ...]:
    """The default context lengths; of a model its longest, for which CUDA graphs are captured, and quarters of it."""
    longest = longest_context(model) if model else 0
    if not longest:
        return _numbers("--context", CONTEXTS)
    found = [longest]
    while found[-1] // REACH >= LEAST_CONTEXT:
        found.append(found[-1] // REACH)
    return tuple(found)


def _choices(
    asked: Mapping[str, Any], device: str, only: Sequence[str], of_model: bool
) -> dict[str, list[Choice]]:
    """{op: choices}; of a model only the ops that have one of the providers. Raises UnknownName."""
    known = {name: [p.name for p in registry.get(name).op.providers] for name in asked}
    names = sorted({provider for several in known.values() for provider in several})
    if of_model and (wrong := [name for name in only if name not in names]):
        raise UnknownName("provider", wrong[0], names)
    found = {}
    for name in asked:
        here = [p for p in only if p in known[name]] if of_model else only
        if here or not only:
            found[name] = tuner.choices(tuner.key_of(name)[1], device, here)
    return found


def _to_compile(points: Sequence[Any], several: Mapping[str, list[Choice]]) -> list[Any]:
    """The points with the choices that fit them; last the smallest sizes of their entries."""
    sizes = [(name, its, at) for name, its, at, _ in points]
    sizes += [(name, its, low) for name, its, _, low in points if low is not None]
    found = []
    for name, its, at in sizes:
        spec, _, key = tuner.key_of(name)
        case = tuner.trial_of(spec, key, its, at, "tune").case
        found.append((name, its, at, tuner.fitting(several[name], spec, case)))
    return found


def _has_model(words: Sequence[str]) -> bool:
    names = registry.op_names()
    return any(word not in names and is_model(word) for word in words)


def _split(given: tuple[str, ...], model: str, quantization: str) -> tuple[tuple[str, ...], str]:
    """The ops among the words, and the model: a folder, or a name, which then is a folder with its config.

    Raises UnknownName for an unknown op, ValueError for an unknown model and for two models.
    """
    if quantization and quantization not in QUANTIZED:
        raise ValueError(f"--quantization {quantization!r} is not {' or '.join(QUANTIZED)}")
    others = [name for name in given if name not in registry.op_names() and is_model(name)]
    if not others:
        if quantization:
            raise ValueError("--quantization is for a model: fk-bench tune MODEL")
        return given, ""
    if len(others) > 1 or model:
        raise ValueError(f"one model at a time, got {', '.join([*others, *[model] * bool(model)])}")
    folder = Path(tempfile.mkdtemp(prefix="fk-bench-tune-"))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    return tuple(name for name in given if name not in others), _folder(others[0], folder, quantization)


def _folder(model: str, folder: Path, quantization: str) -> str:
    """A folder with the model's config.json, with this quantization in it. Raises ModelError."""
    if (own := Path(model).expanduser() / "config.json").is_file() and not quantization:
        return str(own.parent)
    if own.is_file():
        raw = loads(own.read_text())
    else:
        _, config = load_config(model)
        raw = config.to_dict()
    if quantization and raw.get("quantization_config"):
        raise ModelError(f"{model} is quantized already; leave out --quantization {quantization}")
    if quantization:
        raw["quantization_config"] = QUANTIZED[quantization]
    (folder / "config.json").write_text(dumps(raw))
    return str(folder)


def _asked(
    ops: tuple[str, ...], model: str, tp: tuple[int, ...], dtype: str, given: list[str], device: str,
    of_model: bool = False,
) -> dict[str, list[dict[str, Any]]]:  # fmt: skip
    """{op: shapes}; with `of_model` only ops that the model has. Raises UnknownName, ValueError."""
    import torch

    if not tuner.is_dtype(dtype):
        raise ValueError(f"--dtype {dtype!r} is not a torch dtype")
    found: dict[str, list[dict[str, Any]]] = {}
    for name in dict.fromkeys(ops or tuner.tunable()):
        spec, _, key = tuner.key_of(name)
        shapes = [_shape(text, name, key) for text in given]
        for size in tp if model else ():
            its = shapes_of_model(name, key, model, getattr(torch, dtype), size)
            shapes += [s for s in its if s not in shapes]
        if shapes or not of_model:
            found[name] = shapes or tuner.shapes_of_cases(spec, key, device)
    if not found:
        known = ", ".join(ops or tuner.tunable())
        raise ValueError(f"nothing to tune: the model calls none of {known} in a form that is known here")
    return found


def _shape(text: str, name: str, key: tuning.Key) -> dict[str, Any]:
    parts = dict(part.partition("=")[::2] for part in text.split(","))
    if set(parts) != set(key.shape):
        raise ValueError(f"--shape {text!r}: the shape of {name} is {', '.join(f'{n}=' for n in key.shape)}")
    found: dict[str, Any] = {}
    for n in key.shape:
        if parts[n] in TRUTH:
            found[n] = TRUTH[parts[n]]
            continue
        is_dtype = n.endswith("dtype")
        if not (tuner.is_dtype(parts[n]) if is_dtype else parts[n].isdigit()):
            raise ValueError(
                f"--shape {text!r}: {n} is {parts[n]!r}, not a {'torch dtype' if is_dtype else 'number'}"
            )
        found[n] = parts[n] if is_dtype else int(parts[n])
    return found


def _numbers(option: str, text: str) -> tuple[int, ...]:
    parts = [p.strip() for p in text.split(",") if p.strip()]
    if not parts or not all(p.isdigit() and int(p) > 0 for p in parts):
        raise ValueError(f"{option} {text!r}: expected numbers from 1, separated by commas")
    return tuple(map(int, parts))


def _run(asked: Path | None) -> Path:
    folder = asked or Path("fk-bench-runs") / time.strftime("tune-%Y%m%d-%H%M%S")
    if (folder / "rows.jsonl").exists():
        raise ValueError(f"--run {folder}: it already holds a run")
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ValueError(f"--run {folder}: {error.strerror}") from None
    return folder


def _out(asked: Path | None, folder: Path, chip: str) -> Path:
    """The file of the table. Raises ValueError for one that must not be shipped."""
    path = asked or folder / f"{tuning.slug(chip)}.json"
    shipped = path.resolve().is_relative_to(tuning.SHIPPED.resolve())
    if shipped and chip == "cpu":
        raise ValueError(
            f"--out {path}: a CPU's times are no claim about speed, so its tables are not shipped"
        )
    if shipped and path.name != f"{tuning.slug(chip)}.json":
        raise ValueError(f"--out {path}: the shipped table of {chip} is {tuning.slug(chip)}.json")
    if path.is_dir():
        raise ValueError(f"--out {path} is a folder, not a file")
    try:  # before hours of measuring
        path.parent.mkdir(parents=True, exist_ok=True)
        tempfile.TemporaryFile(dir=path.parent).close()
    except OSError as error:
        raise ValueError(f"--out {path} cannot be written: {error.strerror}") from error
    return path
