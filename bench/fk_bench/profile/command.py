"""`fk-bench profile`: the kernels of an op, a step of a model by op, or what the judge measured in a run."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import time
from collections import Counter
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any
from uuid import uuid4

import typer

from fastkernels.core import registry
from fastkernels.core.candidate import CandidateError
from fastkernels.patch import PatchError
from fk_bench.core import machine, rows
from fk_bench.core.hub import ModelError
from fk_bench.core.pages import model_name
from fk_bench.core.rows import Row, Subject
from fk_bench.core.terminal.output import fail, last_line, table
from fk_bench.core.terminal.text import printable
from fk_bench.evaluate.adapters.sets import CandidateSet, read_set
from fk_bench.kernels.judge.clock import roofline
from fk_bench.profile import judged, ncu, nsys, report, torch_tool
from fk_bench.profile.data import Profile, metrics, with_ops
from fk_bench.profile.target import Target, case_of

COMMAND = "profile"
TOOLS = ("auto", "torch", "ncu", "nsys")
FLOORS = "NVIDIA H200"  # of a model's floors on a machine without a known GPU
LARGEST = 8 << 30  # bytes of weights of a model on a CPU
TIMEOUT = 1800


class ProfileError(ValueError):
    """A profile that cannot be made. The message says why and what to do."""


@dataclass(frozen=True)
class Costs:
    """Bytes, operations and floor of one call of an op; the floors of a step by op. `gpu`: whose floors they are."""

    bytes: int = 0
    flops: int = 0
    dtype: str = ""
    floor_us: float | None = None
    by_op: dict[str, float | None] | None = None
    gpu: str | None = None


def profile_command(
    what: Annotated[
        str,
        typer.Argument(help="an op; a model: a folder, a hub id or a public name; or a run with rows.jsonl"),
    ],
    tool: Annotated[
        str,
        typer.Option(help="torch, ncu (ops), nsys (models), or auto: ncu or nsys if installed, else torch"),
    ] = "auto",
    collected: Annotated[
        str, typer.Option("--sections", help=f"sections that ncu collects: {', '.join(ncu.SETS)}")
    ] = "full",
    candidates: Annotated[
        str,
        typer.Option(
            "--set", help="NAME=DIR: a set of candidates, in the model or for the op; runs with your rights"
        ),
    ] = "",
    case: Annotated[str, typer.Option(help="of an op: a case (default: the most frequent of a model)")] = "",
    candidate: Annotated[
        Path | None, typer.Option(help="of an op: a candidate's file, which runs with your rights")
    ] = None,
    phase: Annotated[str, typer.Option(help="of a model: decode or prefill")] = "decode",
    batch: Annotated[int, typer.Option(help="of a model: sequences in a step")] = 1,
    context: Annotated[int, typer.Option(help="of a model: tokens of each sequence before the step")] = 128,
    repeats: Annotated[int, typer.Option(help="calls or steps that are profiled")] = 5,
    device: Annotated[str, typer.Option(help="cuda or cpu (default: cuda if available)")] = "",
    gpu: Annotated[str, typer.Option(help="GPU of the floors (default: this machine's)")] = "",
    out: Annotated[
        Path | None, typer.Option(help="folder of the run (default: fk-bench-runs/profile-TIME)")
    ] = None,
    json_only: Annotated[
        bool, typer.Option("--json", help="only the line of JSON on standard output")
    ] = False,
) -> None:
    """Show what limits a kernel or a step: bandwidth and tensor cores against their peaks, occupancy, stalls, registers
    and spills, kernels by time, gaps and launches; for a model each op's time against its floor."""
    run = Path(what).expanduser()
    if (run / "rows.jsonl").is_file():
        _judged(run, json_only)
        return
    try:
        if candidate and candidates:
            raise ProfileError("--set and --candidate exclude each other")
        own = _read_set(candidates) if candidates else None
        target = _target(what, case, candidate, own, phase, batch, context, repeats, device)
        folder = out or Path("fk-bench-runs") / time.strftime("profile-%Y%m%d-%H%M%S")
        _checked(tool, collected, target)
        costs, target = _costs(target, gpu, folder)
        folder.mkdir(parents=True, exist_ok=True)
        found, remark = _profiled(target, tool, collected, folder)
    except (
        registry.UnknownName, CandidateError, ModelError, PatchError, ProfileError, ValueError, LookupError
    ) as error:  # fmt: skip
        fail(str(error))
    except OSError as error:
        fail(f"{error.filename or out}: {error.strerror}")
    if costs.by_op is not None:
        found = with_ops(found, {o.op: o.calls for o in found.ops}, costs.by_op)
    made = _rows(target, found, costs, remark, own.name if own else "")
    rows.append(folder / "rows.jsonl", made)
    page = report.write(folder, made, found)
    if not json_only:
        for title, columns, cells in report.tables(made):
            table(title, columns, cells)
        print(f"page: {page}\n")
    if remark:
        print(remark, file=sys.stderr)
    last_line({
        "command": COMMAND, "ok": True, "what": what, "tool": found.tool, "device": found.device, "remark": remark,
        **made[0].metrics, "floors_of": costs.gpu,
        "kernels": [{"name": r.case["name"], **r.metrics, **_words(r)} for r in made if r.kind == "kernel"],
        "ops": [{"op": r.subject.op, **r.metrics} for r in made if r.kind == "op"],
        "rows": str(folder / "rows.jsonl"), "report": str(page),
    })  # fmt: skip


def _judged(run: Path, quiet: bool) -> None:
    found = judged.profile(rows.read(run / "rows.jsonl")[0])
    if not found:
        fail(f"{run}: no case of this run was timed")
    if not quiet:
        columns = list(dict.fromkeys(k for case in found for k in case if k not in ("alone", "seconds")))
        table(f"Measured by the judge, {run}", columns, [[_cell(c.get(k)) for k in columns] for c in found])
    last_line({"command": COMMAND, "ok": True, "what": str(run), "tool": "judge", "cases": found})


def _cell(value: Any) -> str:
    return f"{value:.4g}" if isinstance(value, float) else "" if value is None else printable(str(value))


def _words(row: Row) -> dict[str, str]:
    return {k: row.case[k] for k in ("limit", "stalls") if row.case.get(k)}


# What is profiled


def _read_set(text: str) -> CandidateSet:
    """A set of NAME=DIR. Raises ProfileError and SetError."""
    name, equals, folder = text.partition("=")
    if not (name and equals and folder):
        raise ProfileError(f"--set {text!r}: give NAME=DIR, a folder of candidates OP.py")
    return read_set(name, Path(folder).expanduser().resolve(), blocks=True)


def _target(
    what: str,
    case: str,
    candidate: Path | None,
    own: CandidateSet | None,
    phase: str,
    batch: int,
    context: int,
    repeats: int,
    device: str,
) -> Target:
    import torch

    device = device or ("cuda" if torch.cuda.is_available() else "cpu")
    if device not in ("cuda", "cpu"):
        raise ProfileError(f"--device {device!r} is not cuda or cpu")
    if device == "cuda" and not torch.cuda.is_available():
        raise ProfileError("--device cuda: torch sees no GPU here")
    for flag, value in (("--batch", batch), ("--context", context), ("--repeats", repeats)):
        if value < 1:
            raise ProfileError(f"{flag} {value}: needs at least 1")
    if what in registry.op_modules():
        if registry.get(what).op is None:
            raise ProfileError(f"{what} has no functional op: profile a model that contains it")
        case_name = case_of(registry.get(what), case).name
        if own is not None:
            if what not in own.files:
                raise ProfileError(
                    f"the set {own.name} has no {what}.py, only {', '.join(own.files) or 'nothing'}"
                )
            candidate = Path(own.files[what])
        return Target(what, case_name, str(candidate or ""), repeats=repeats, device=device)
    if case or candidate:
        raise ProfileError(f"--case and --candidate are for an op, and {what!r} is none")
    files = own.files if own is not None else {}
    if own is not None and not files:
        raise ProfileError(f"the set {own.name} has no candidate for an op of ours")
    return Target(
        model=what,
        candidates=files,
        phase=phase,
        batch=batch,
        context=context,
        repeats=repeats,
        device=device,
    )


def _costs(target: Target, gpu: str, folder: Path) -> tuple[Costs, Target]:
    """The floors; a model without a folder gets one with its config, for random weights."""
    peaks = roofline.peaks(gpu or machine.machine().gpu)
    if gpu and peaks is None:
        raise ProfileError(f"--gpu {gpu!r}: unknown peaks; known GPUs: {', '.join(roofline.known())}")
    if target.op:
        spec = registry.get(target.op)
        case = case_of(spec, target.case)
        size, work = spec.bytes_moved(case), spec.flops(case)
        floor = roofline.floor_us(size, work, case.dtype, peaks)
        return Costs(size, work, case.dtype, floor, gpu=peaks.name if peaks else None), target
    return _model_costs(target, peaks or roofline.peaks(FLOORS), folder)


def _model_costs(target: Target, peaks: roofline.Peaks | None, folder: Path) -> tuple[Costs, Target]:
    import torch

    from fastkernels.engine.execution.forward.runner import pick_dtype
    from fk_bench.e2e.model_configs import load_config
    from fk_bench.explain.cost_model import step

    name, config = load_config(target.model)
    dtype = pick_dtype("auto", config, torch.device(target.device))
    found = step(name, config, target.phase, target.batch, target.context, 1, dtype)
    by_op: dict[str, float | None] = {}
    for call in found.calls:
        floor = call.floor_us(peaks)
        by_op[call.op] = None if floor is None else (by_op.get(call.op) or 0.0) + call.count * floor
    if target.device == "cpu" and found.weights > LARGEST:
        raise ProfileError(
            f"{target.model} has {found.weights / 2**30:.1f} GiB of weights: on a CPU give a folder with a small model"
        )
    if not Path(target.model).is_dir():
        place = folder / "model"
        place.mkdir(parents=True, exist_ok=True)
        fields = config.to_dict() if hasattr(config, "to_dict") else dict(vars(config))
        (place / "config.json").write_text(json.dumps(fields, default=str))
        target = replace(target, model=str(place))
    return Costs(dtype=found.dtype, by_op=by_op, gpu=peaks.name if peaks else None), target


# The tools


def _checked(tool: str, collected: str, target: Target) -> None:
    for flag, value, known in (("--tool", tool, TOOLS), ("--sections", collected, ncu.SETS)):
        if value not in known:
            raise ProfileError(f"{flag} {value!r} is not one of {', '.join(known)}")
    if tool == "ncu" and not target.op:
        raise ProfileError(
            "--tool ncu is for an op: its counters slow a step down by orders of magnitude; use nsys"
        )


def _profiled(target: Target, tool: str, collected: str, folder: Path) -> tuple[Profile, str]:
    """The profile, and in one line why torch's profiler stands for another tool."""
    wanted = ("ncu" if target.op else "nsys") if tool == "auto" else tool
    if wanted == "torch":
        return torch_tool.run(target), ""
    found = shutil.which(wanted)
    if target.device == "cpu":
        why = f"{wanted} needs a GPU"
    elif found is None:
        why = f"{wanted} is not installed"
    else:
        program = [sys.executable, "-m", "fk_bench.profile.target", target.to_json()]
        try:
            return _counted(wanted, found, program, target, collected, folder), ""
        except ProfileError as error:
            why = str(error)
    return torch_tool.run(target), f"{why}: torch's profiler is used instead, which has no hardware counters"


def _counted(
    tool: str, binary: str, program: list[str], target: Target, collected: str, folder: Path
) -> Profile:
    """Run ncu or nsys. Raises ProfileError."""
    place = folder.resolve() / "nsys"
    command = (
        ncu.command(binary, collected, program) if tool == "ncu" else nsys.command(binary, place, program)
    )
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=TIMEOUT, errors="replace")
    except subprocess.TimeoutExpired:
        raise ProfileError(f"{tool} did not end within {TIMEOUT} s") from None
    said = done.stdout + done.stderr
    (folder / f"{tool}.log").write_text(said, encoding="utf-8")
    if ncu.NO_PERMISSION in said:
        raise ProfileError(f"{tool} has no permission for the GPU's counters ({ncu.NO_PERMISSION})")
    try:
        made = (
            ncu.parse(done.stdout, target.repeats)
            if tool == "ncu"
            else nsys.read(place.with_suffix(".sqlite"), target.repeats)
        )
    except ValueError as error:
        raise ProfileError(f"{error}; see {folder / f'{tool}.log'}") from None
    return with_ops(made, _calls(done.stdout), {}) if tool == "nsys" else made


def _calls(text: str) -> Counter[str]:
    """The ops that the program counted: the line of JSON in its output."""
    for line in text.splitlines():
        if line.startswith('{"calls"'):
            return Counter(json.loads(line)["calls"])
    return Counter()


# Rows


def _rows(target: Target, found: Profile, costs: Costs, remark: str, own: str = "") -> list[Row]:
    """own: the name of the set of candidates."""
    base: dict[str, Any] = {
        "run_id": uuid4().hex[:12], "commit": machine.commit(), "command": COMMAND, "machine": machine.machine(),
        "versions": machine.interpreter(sys.executable).versions,
    }  # fmt: skip
    about: dict[str, Any] = {
        "tool": found.tool,
        "device": found.device,
        "floors_of": costs.gpu,
        "repeats": target.repeats,
    }
    if target.op:
        about |= {"case": target.case}
        subject = Subject(op=target.op, candidate=target.candidate or None)
    else:
        about |= {"phase": target.phase, "batch": target.batch, "context": target.context}
        about |= {"candidates": sorted(target.candidates)} if target.candidates else {}
        subject = Subject(model=model_name(target.model), host="fastkernels", candidate=own or None)
    numbers: dict[str, float | None] = {
        "wall_us": found.wall_us, "busy_us": found.busy_us, "gaps": found.gaps, "gaps_us": found.gaps_us,
        "largest_gap_us": found.largest_gap_us, "launches": found.launches, "floor_us": costs.floor_us,
    }  # fmt: skip
    if target.op and found.busy_us:
        numbers |= {
            "gb_per_s": costs.bytes / found.busy_us / 1e3,
            "tflops": costs.flops / found.busy_us / 1e6,
        }
        peaks = roofline.peaks(costs.gpu) if found.device == "cuda" else None
        if peaks is not None:
            numbers["memory_pct"] = 100 * costs.bytes / found.busy_us / 1e3 / peaks.gb_per_s
            rate = peaks.flops_per_s(costs.dtype)
            numbers["flops_pct"] = 100e6 * costs.flops / found.busy_us / rate if rate else None
    elif costs.by_op:
        numbers["floor_us"] = sum(v for v in costs.by_op.values() if v is not None)
    made = [Row(
        **base, subject=subject, reason=remark, case={"kind": "profile", **about},
        metrics={k: v for k, v in numbers.items() if v is not None},
    )]  # fmt: skip
    for kernel in found.kernels:
        case = {
            "kind": "kernel",
            **about,
            "name": kernel.name,
            "limit": kernel.limit,
            "stalls": kernel.stalls,
        }
        made.append(Row(**base, subject=subject, case=case, metrics=metrics(kernel)))
    for op in found.ops:
        file = subject.candidate if target.op else target.candidates.get(op.op)
        mine = subject.model_copy(update={"op": op.op, "candidate": file})
        made.append(Row(**base, subject=mine, case={"kind": "op", **about}, metrics=metrics(op)))
    return made
