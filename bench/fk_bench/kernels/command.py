"""`fk-bench kernels`: judge ops case by case, a candidate (or our own overrides) against production."""

from __future__ import annotations

import dataclasses
import shutil
import sys
import time
from pathlib import Path
from typing import Annotated, Any

import typer

from fastkernels.core import registry
from fastkernels.core.candidate import CandidateError, sources_folder
from fastkernels.core.registry import UnknownName
from fastkernels.models.common.checkpoints.checkpoint import CheckpointError
from fastkernels.models.common.descriptions.description import Unsupported
from fastkernels.models.common.descriptions.registry import models
from fk_bench.capture.captures import CaptureError
from fk_bench.core.machine import torch_device
from fk_bench.core.rows import Row, Status, append
from fk_bench.core.terminal.output import fail, last_line
from fk_bench.core.terminal.text import printable
from fk_bench.evaluate.adapters.sets import LIBRARIES, read_set
from fk_bench.info import model_blocks
from fk_bench.info.stubs import selected_ops
from fk_bench.kernels import task as tasks
from fk_bench.track import store

MOST_NAMES = 100  # of cases, in a message
AGAINST = ("production", "host", "reference")
QUICK: dict[str, Any] = {"most": 4, "rounds": 3, "seconds": 0.3, "hard": 1}  # Options of --quick


def kernels_command(
    ops: Annotated[list[str] | None, typer.Argument(help="op names (default: all)")] = None,
    level: Annotated[
        list[int] | None,
        typer.Option(help="all ops of this level; with --model also the model's blocks, up to 4"),
    ] = None,
    family: Annotated[
        str, typer.Option(help="all ops of this family, the folder of their files: norm, collective, ...")
    ] = "",
    ranks: Annotated[
        int, typer.Option(help="processes of a collective, from 2 on: one cage each", show_default=False)
    ] = 0,
    model: Annotated[
        str,
        typer.Option(
            help=f"only ops that this model uses, and its blocks: a folder, or {', '.join(models())}"
        ),
    ] = "",
    candidate: Annotated[
        Path | None, typer.Option(help="a file OP.py, or a directory of them (default: our own overrides)")
    ] = None,
    against: Annotated[
        str,
        typer.Option(
            help="production (its fastest kernel), host, reference, or the file of another candidate"
        ),
    ] = "production",
    cases: Annotated[str, typer.Option(help="captured,random,held-out,extreme (default: all)")] = "",
    task: Annotated[
        Path | None, typer.Option(help="a task file of `fk-bench scaffold`: its op on exactly its cases")
    ] = None,
    case: Annotated[list[str] | None, typer.Option(help="only cases with this name")] = None,
    values: Annotated[
        str, typer.Option(help="the values of a wrong case, as its reason has them: check only these")
    ] = "",
    captures: Annotated[
        Path | None, typer.Option(help="folder of captures to replay, instead of the shipped ones")
    ] = None,
    device: Annotated[str, typer.Option(help="cuda or cpu (default: cuda if available)")] = "",
    rounds: Annotated[
        int | None, typer.Option(help="interleaved rounds of each case, at least three (default: 10)")
    ] = None,
    starts: Annotated[
        int,
        typer.Option(help="repeat everything in new processes, and include the difference in the intervals"),
    ] = 1,
    timeout: Annotated[
        float, typer.Option(help="seconds for each step of a candidate, such as compiling")
    ] = 120.0,
    case_budget: Annotated[
        float, typer.Option(help="seconds that a candidate's process may take for one case")
    ] = 300.0,
    op_budget: Annotated[
        float, typer.Option(help="seconds that a candidate's process may take for one op")
    ] = 3600.0,
    quick: Annotated[
        bool,
        typer.Option(
            "--quick",
            help="a first impression: four cases of each source at most, three rounds, one extreme kind",
        ),
    ] = False,
    deployment: Annotated[
        bool,
        typer.Option(
            "--deployment",
            help="also report whether the kernel runs in compiled code, and if new batch sizes compile",
        ),
    ] = False,
    timings: Annotated[
        bool, typer.Option("--timings", help="also print where the time of the judge went, by phase")
    ] = False,
    no_time: Annotated[bool, typer.Option("--no-time", help="check only")] = False,
    no_scan: Annotated[bool, typer.Option("--no-scan", help="skip the static scan")] = False,
    no_cage: Annotated[
        bool, typer.Option("--no-cage", help="run the candidate as this user, without a cage")
    ] = False,
    cheats: Annotated[
        bool, typer.Option("--cheats", help="test the judge with all known cheats and their honest twins")
    ] = False,
    cheat: Annotated[
        list[str] | None, typer.Option(help="with --cheats: only the cheat of this name (of tests/cheats)")
    ] = None,
    identity: Annotated[
        bool,
        typer.Option(
            "--identity", help="the baseline against itself, one case an op: what the judge resolves here"
        ),
    ] = False,
    python: Annotated[
        list[str] | None, typer.Option(help="candidate=PATH or baseline=PATH of an interpreter")
    ] = None,
    track: Annotated[
        bool, typer.Option("--track", help="log the run into MLflow (also with MLFLOW_TRACKING_URI)")
    ] = False,
    out: Annotated[Path | None, typer.Option(help="directory of the run")] = None,
    json: Annotated[bool, typer.Option("--json", help="only the line of JSON on standard output")] = False,
) -> int:
    """Judge kernels: whether they are correct, and how fast compared with production, with 95% intervals.

    The last line of output is JSON; the exit status is 1 if a case failed. Rows and the report are in the run's
    directory.
    """
    from fk_bench.kernels.judge import Options
    from fk_bench.kernels.judge.correctness.again import trial_of
    from fk_bench.kernels.judge.correctness.cases import SOURCES
    from fk_bench.kernels.judge.processes.zygote import ZygoteError

    sources = tuple(s.strip() for s in cases.split(",") if s.strip()) or (
        ("random",) if identity else SOURCES
    )
    if unknown := [s for s in sources if s not in SOURCES]:
        fail(f"--cases: unknown source {', '.join(unknown)} (known: {', '.join(SOURCES)})")
    if against not in AGAINST and not (against.endswith(".py") and Path(against).is_file()):
        fail(f"--against {against!r} is neither one of {', '.join(AGAINST)} nor the file of a candidate")
    rounds = (QUICK["rounds"] if quick else 10) if rounds is None else rounds
    if rounds < 3:
        fail(f"--rounds {rounds}: an interval needs at least three")
    if starts < 1:
        fail(f"--starts {starts}: must be at least 1")
    if not timeout > 0:
        fail(f"--timeout {timeout:g}: must be more than 0 seconds")
    for name, budget in (("--case-budget", case_budget), ("--op-budget", op_budget)):
        if not budget > 0:
            fail(f"{name} {budget:g}: must be more than 0 seconds")
    if cheat and not cheats:
        fail("--cheat names some of the cheats that --cheats runs: add --cheats")
    if task is not None and (ops or level or model or cases or cheats):
        fail("--task states the op and its cases: give no op, --level, --model, --cases or --cheats")
    if values and (not ops or len(ops) != 1 or task is not None or case or cheats or identity):
        fail("--values is of one case: name its op, and give no --task, --case, --cheats or --identity")
    if identity and (
        candidate is not None or task is not None or cheats or against.endswith(".py") or no_time
    ):
        fail("--identity compares the baseline with itself: give no candidate, --task, --cheats or --no-time")
    if family:
        ops = _of_family(family, ops, level, model, task)
    interpreters = _pairs(python or [])
    chosen_device = torch_device(device)
    try:
        stated = tasks.read(task) if task is not None else None
    except (UnknownName, tasks.TaskError) as error:
        fail(str(error))
    if stated is not None:
        ops, sources = [stated.op], ()
    options = Options(
        device=chosen_device, ranks=ranks, against=against, cases=sources, names=tuple(case or ()), rounds=rounds,
        starts=starts, timed=not no_time, timeout=timeout, case_budget=case_budget,
        op_budget=op_budget, scan=not no_scan, cage=not no_cage, python=interpreters,
        captures=captures, task=stated.cases if stated is not None else (),
        values=values, deployment=deployment,
    )  # fmt: skip
    if quick:
        options = dataclasses.replace(options, **{k: v for k, v in QUICK.items() if k != "rounds"})
    try:
        blocks: tuple[str, ...] = ()
        if inferred := model or model_blocks.model_of([*(ops or ()), *_stems(candidate)]):
            text, blocks = model_blocks.register(inferred)
            options = dataclasses.replace(options, model=text)
        candidates = _candidates(candidate, tuple(ops or ()))
        names = _ops(tuple(ops or ()), tuple(level or ()), model, candidates, blocks)
        _check_ranks(names, options)
        damaged = _damaged(names, options)
        _check_case_names(names, options)
        if values:
            trial_of(registry.get(names[0]), values, captures)
    except (UnknownName, CandidateError, CaptureError, CheckpointError, Unsupported, ValueError) as error:
        fail(str(error))
    run = _directory(out)
    try:
        if identity:
            return _identity(names, options, run, json)
        if cheats:
            return _cheats(options, run, json, tuple(cheat or ()))
        whole = model if 4 in (level or ()) and candidates else ""
        status = _judge(names, candidates, options, run, json, damaged, task, timings, whole)
        if store.wanted(track):
            store.track(run)
        return status
    except ZygoteError as error:
        fail(" ".join(str(error).split()))


def _judge(
    names: list[str],
    candidates: dict[str, Path],
    options: Any,
    run: Path,
    quiet: bool,
    damaged: list[str],
    task: Path | None = None,
    timings: bool = False,
    whole: str = "",
) -> int:
    """whole: the model whose logits and speed in our engine are also measured with the candidates."""
    from fk_bench.kernels import report
    from fk_bench.kernels.judge import judge_ops

    start = time.perf_counter()
    path = run / "rows.jsonl"
    _keep(candidates, run)

    def on_row(row: Row) -> None:
        append(path, [row])
        if row.kind == "case":
            print(report.line(row), file=sys.stderr, flush=True)

    for problem in damaged:
        print(f"warning: {printable(problem)}", file=sys.stderr, flush=True)
    found = judge_ops(names, candidates, options, on_row)
    page = report.write(run, found, damaged)
    if not quiet:
        report.show(found)
    if timings and not quiet:
        report.show_phases(found)
    total = found[-1]
    ran = [r for r in found if r.kind == "case" and r.status is not Status.SKIPPED]
    failed = int(total.metrics["failed"])
    result: dict[str, Any] = {
        "command": "kernels", "ok": bool(ran) and not failed, "device": options.device,
        "ops": len({r.subject.op for r in ran}), "cases": len(ran), "failed": failed,
        "not_run": int(total.metrics["not_run"]), "seconds": round(time.perf_counter() - start, 1),
        "rows": str(path), "report": str(page) if page else None,
    }  # fmt: skip
    if total.provisional:
        result["provisional"] = total.provisional
    elif options.device == "cuda" and "speedup_geomean" in total.metrics:
        result["speedup"] = round(total.metrics["speedup_geomean"], 4)
    if candidates:
        result["candidates"] = report.live(found, candidates)
    if whole:
        level4 = _whole_model(whole, candidates, options, path, quiet)
        result["level4"], result["ok"] = level4, bool(level4["ok"] and result["ok"])
    if task is not None:
        result["task"] = str(task)
    if damaged:
        result["warnings"] = damaged
    if not ran:
        what = (
            f"no case is named {', '.join(options.names)}" if options.names else "these ops have no such case"
        )
        result["error"] = "no case was run: all of them need a GPU" if result["not_run"] else what
        print(f"error: {printable(result['error'])}", file=sys.stderr)
    last_line(result)
    return 0 if result["ok"] else 1


def _whole_model(
    model: str, candidates: dict[str, Path], options: Any, path: Path, quiet: bool
) -> dict[str, Any]:
    """Compare the model's logits in our engine, and its speed, with and without the candidates."""
    from fk_bench.kernels import whole_model

    def on_row(row: Row) -> None:
        append(path, [row])
        print(printable(whole_model.shown([row])[0]), file=sys.stderr, flush=True)

    made = whole_model.judge(
        options.model, model, candidates, options.device, options.rounds, options.timed, options.timeout, on_row
    )  # fmt: skip
    if not quiet:
        print(f"\nlevel 4, {model} in our engine with {', '.join(candidates)}")
        print(*map(printable, whole_model.shown(made)), sep="\n", end="\n\n")
    wrong = [r for r in made if r.status not in (Status.OK, Status.SKIPPED)]
    return {"ok": not wrong, "rows": [_short(row) for row in made]}


def _short(row: Row) -> dict[str, Any]:
    """A row of level 4 for the line of JSON."""
    case: dict[str, Any] = {k: row.case[k] for k in ("kind", "phase", "requests") if k in row.case}
    said = {k: v for k, v in (("reason", row.reason), ("provisional", row.provisional)) if v}
    return {**case, "status": row.status.value, **said, **row.metrics}


def _of_family(
    family: str, ops: list[str] | None, level: list[int] | None, model: str, task: Path | None
) -> list[str]:
    """The ops of a family. Exits where it is unknown, or other ops are named too."""
    if ops or level or model or task is not None:
        fail("--family names the ops: give no op, --level, --model or --task")
    by_family: dict[str, list[str]] = {}
    for name in registry.op_modules():
        by_family.setdefault(registry.family(name), []).append(name)
    if family not in by_family:
        fail(str(UnknownName("family", family, by_family)))
    return by_family[family]


def _check_ranks(names: list[str], options: Any) -> None:
    """Raise ValueError if --ranks is missing for a collective, or given for another op."""
    collectives = [n for n in names if registry.get(n).ranks]
    if not collectives:
        if options.ranks:
            raise ValueError(f"--ranks is for collectives: {', '.join(registry.collective_names())}")
        return
    what = collectives[0] if len(names) == 1 else f"--family {registry.family(collectives[0])}"
    if options.ranks < 2:
        raise ValueError(
            f"{collectives[0]} needs several ranks: fk-bench kernels {what} --ranks 2 --device {options.device}"
        )
    if len(collectives) < len(names):
        other = next(n for n in names if n not in collectives)
        raise ValueError(f"--ranks is for collectives, but {other} is none: judge it in a run of its own")
    if options.device == "cuda":
        import torch

        if (gpus := torch.cuda.device_count()) < options.ranks:
            instead = f"--ranks {gpus} or --device cpu" if gpus > 1 else "--device cpu"
            raise ValueError(
                f"--ranks {options.ranks} needs a GPU for each rank, and {gpus} can be used: give {instead}"
            )
    if options.values or options.starts > 1 or options.deployment:
        raise ValueError("--ranks: --values, --starts and --deployment are for ops of one process")


def _check_case_names(ops: list[str], options: Any) -> None:
    """Raise ValueError for a name of --case that no case of these ops has, with the names that there are."""
    from fk_bench.kernels.judge.correctness.cases import case_names

    if not options.names:
        return
    known = case_names([registry.get(op) for op in ops], options)
    if unknown := [n for n in options.names if n not in known]:
        of = ops[0] if len(ops) == 1 else f"these {len(ops)} ops"
        shown = ", ".join(list(known)[:MOST_NAMES]) + (", ..." if len(known) > MOST_NAMES else "")
        raise ValueError(f"--case: no case of {of} is named {', '.join(unknown)}: {shown or 'there is none'}")


def _damaged(names: list[str], options: Any) -> list[str]:
    """Parts of the captures that are left out, by file. Raises CaptureError if none can be read."""
    from fk_bench.capture.replay import problems

    if "captured" not in options.cases:
        return []
    return list(dict.fromkeys(p for name in names for p in problems(name, options.captures)))


def _cheats(options: Any, run: Path, quiet: bool, names: tuple[str, ...]) -> int:
    from fk_bench.kernels.cheats import run_cheats

    try:
        result = run_cheats(options, run / "rows.jsonl", quiet, names=names)
    except (FileNotFoundError, UnknownName) as error:
        fail(str(error))
    last_line({"command": "kernels", "device": options.device, **result, "rows": str(run / "rows.jsonl")})
    return 0 if result["ok"] else 1


def _identity(names: list[str], options: Any, run: Path, quiet: bool) -> int:
    from fk_bench.kernels.identity import run_identity

    result = run_identity(names, options, run / "rows.jsonl", quiet)
    if not quiet:
        print(
            f"{result['inside']} of {result['timed']} intervals include 1, mean {result['mean']}; "
            f"{result['unsteady']} of {result['cases']} cases unsteady, {result['left_out']} left out"
        )
    last_line(
        {"command": "kernels", "identity": True, "device": options.device, "against": options.against, **result,
         "rows": str(run / "rows.jsonl")}
    )  # fmt: skip
    return 0 if result["ok"] else 1


def _directory(out: Path | None) -> Path:
    run = out or Path("fk-bench-runs") / time.strftime("kernels-%Y%m%d-%H%M%S")
    try:
        run.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        fail(f"--out {run}: {error.strerror}")
    if (run / "rows.jsonl").exists():
        fail(f"--out {run}: it already holds a run; choose another directory")
    return run


def _pairs(values: list[str]) -> dict[str, str]:
    found = dict(v.partition("=")[::2] for v in values)
    for who, path in found.items():
        if who not in ("candidate", "baseline") or not path:
            fail(f"--python {who}={path}: expected candidate=PATH or baseline=PATH")
    return found


def _keep(candidates: dict[str, Path], run: Path) -> None:
    """Copy the candidates into the run's directory, so that its report shows what was judged."""
    if candidates:
        (run / "candidates").mkdir(exist_ok=True)
    for path in candidates.values():
        shutil.copy(path, run / "candidates" / path.name)
        if (own := sources_folder(path)).is_dir():
            shutil.copytree(own, run / "candidates" / own.name, dirs_exist_ok=True)


def _candidates(path: Path | None, ops: tuple[str, ...]) -> dict[str, Path]:
    if path is None:
        return {}
    if not path.exists() and str(path) not in LIBRARIES:
        raise ValueError(f"--candidate {path}: no such file or folder; `fk-bench stubs` makes some")
    if not path.is_file():
        found = read_set(path.name, path)
        for file in found.declined:
            print(f"not judged: {printable(f'{file.path}: {file.reason}')}", file=sys.stderr)
        return {c.op: c.path for c in found.candidates}
    op = path.stem if registry.known(path.stem) else ops[0] if len(ops) == 1 else None
    if op is None:
        raise ValueError(f"--candidate {path}: name the file after its op, or name one op in the command")
    return {op: path}


def _stems(candidate: Path | None) -> list[str]:
    """The names of a candidate's file, or of those of a folder."""
    if candidate is None:
        return []
    return [p.stem for p in (sorted(candidate.glob("*.py")) if candidate.is_dir() else [candidate])]


def _ops(
    ops: tuple[str, ...], levels: tuple[int, ...], model: str, candidates: dict[str, Path],
    blocks: tuple[str, ...] = (),
) -> list[str]:  # fmt: skip
    """The requested ops and blocks; by default all, or with candidates theirs and all ops that call one of them."""
    if 4 in levels and not model:
        raise ValueError("--level 4 is a whole model: name it with --model")
    if unknown := [n for n in levels if n not in (1, 2, 3, 4)]:
        raise ValueError(f"--level {unknown[0]}: the levels are 1, 2, 3 and 4")
    names = selected_ops((), None, model) if model else registry.op_names()
    if ops and ops != ("all",):
        names = list(registry.check_names(ops))
    elif levels:
        names = [n for n in names if registry.get(n).level in levels] + model_blocks.of_level(blocks, levels)
    elif candidates:
        names = [*names, *blocks]
    with_one = [n for n in names if n in candidates or registry.reached(n, parts=True) & set(candidates)]
    if candidates and not with_one:
        raise ValueError(
            f"the candidates ({', '.join(candidates)}) are not used by the requested ops ({', '.join(names)})"
        )
    return with_one if candidates and not (ops or levels or model) else names
