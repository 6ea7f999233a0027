"""`fk-bench routing`: load skew of captured routing compared with random routing, and its effect on time."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any
from uuid import uuid4

import typer

from fk_bench.capture.captures import CaptureError
from fk_bench.core import machine, rows
from fk_bench.core.rows import Row, Status, Subject
from fk_bench.core.terminal.flags import ConfigError, comma_list
from fk_bench.core.terminal.output import fail, last_line, table
from fk_bench.routing import tables
from fk_bench.routing.study import Routing, routings, study

COMMAND = "routing"
TOKENS = (1, 8, 32, 128, 1024, 4096)


def routing_command(
    capture: Annotated[
        str,
        typer.Option(
            help="names of shipped captures, or folders, comma-separated (default: all with routing)"
        ),
    ] = "",
    device: Annotated[str, typer.Option(help="auto, cuda or cpu; only a GPU is timed")] = "auto",
    tokens: Annotated[str, typer.Option(help="tokens of a timed call, comma-separated")] = ",".join(
        map(str, TOKENS)
    ),
    seconds: Annotated[
        float, typer.Option(help="seconds for the timing of all captures; the rest is skipped")
    ] = 75.0,
    seed: Annotated[int, typer.Option(help="of the random routing and of the choice of tokens")] = 0,
    out: Annotated[
        Path | None, typer.Option(help="folder of the run (default: fk-bench-runs/routing-TIME)")
    ] = None,
    rows_file: Annotated[
        Path | None, typer.Option("--rows", help="only make the tables, from this file")
    ] = None,
    markdown: Annotated[bool, typer.Option("--markdown", help="print the tables as Markdown")] = False,
    json_only: Annotated[
        bool, typer.Option("--json", help="only the line of JSON on standard output")
    ] = False,
) -> None:
    """Load skew and hot experts of captured routing, and the time of fused_experts, compared with uniform random."""
    if rows_file is not None:
        if not rows_file.is_file():
            fail(f"--rows {rows_file}: no such file")
        made, warnings = rows.read(rows_file)
        made = [r for r in made if r.command == COMMAND]
        for warning in warnings:
            print(warning)
        if not made:
            fail(f"--rows {rows_file}: it has no row of fk-bench {COMMAND}")
        _show(made, rows_file, markdown, json_only, "")
        return
    try:
        counts = tuple(comma_list("--tokens", tokens, int))
        if min(counts, default=0) < 1:
            raise ConfigError(f"--tokens {tokens!r}: needs one or more numbers, each at least 1")
        if device not in ("auto", "cuda", "cpu"):
            raise ConfigError(f"--device {device!r} is not auto, cuda or cpu")
        found = routings(capture)
        on_gpu = _gpu(device)
    except (ConfigError, CaptureError) as error:
        fail(str(error))
    folder = out or Path("fk-bench-runs") / time.strftime("routing-%Y%m%d-%H%M%S")
    folder.mkdir(parents=True, exist_ok=True)
    file, made, base = folder / "rows.jsonl", [], _base()
    for row in _measured(found, counts, on_gpu, seconds, seed, base):
        rows.append(file, [row])
        made.append(row)
    _show(made, file, markdown, json_only, "" if on_gpu else "fused_experts was not timed: no GPU was used")


def _gpu(device: str) -> bool:
    """Whether to time. Raises ConfigError if a GPU is requested and missing."""
    import torch

    there = torch.cuda.is_available()
    if device == "cuda" and not there:
        raise ConfigError("--device cuda: torch sees no GPU here; without the flag you get the load only")
    return there and device != "cpu"


def _base() -> dict[str, Any]:
    import torch

    versions = {"torch": torch.__version__}
    return {
        "run_id": uuid4().hex[:12], "commit": machine.commit(), "command": COMMAND, "machine": machine.machine(),
        "versions": versions,
    }  # fmt: skip


def _measured(
    found: list[Routing], counts: tuple[int, ...], on_gpu: bool, seconds: float, seed: int, base: dict[str, Any]
) -> Iterator[Row]:  # fmt: skip
    for routing in found:
        for case, metrics in study(routing, seed):
            yield Row(**base, subject=Subject(op="fused_experts"), case=case, metrics=metrics)
    if not on_gpu:
        return
    from fk_bench.routing.expert_times import measure, why_no_vllm

    reason = why_no_vllm()
    if reason:
        case = {"kind": "time", "kernel": "vllm"}
        subject = Subject(op="fused_experts", provider="vllm")
        yield Row(
            **base,
            status=Status.SKIPPED,
            reason=f"vLLM is not available: {reason}",
            subject=subject,
            case=case,
        )
    began = time.monotonic()
    for number, routing in enumerate(found):  # an equal share of the time for each
        deadline = began + seconds * (number + 1) / len(found)
        for timed in measure(routing, counts, deadline, seed):
            case = {
                "kind": "time", "capture": routing.name, "routing": timed.source, "tokens": timed.tokens,
                "experts": routing.experts, "topk": routing.top_k, **(timed.case or {}),
            }  # fmt: skip
            status = Status.SKIPPED if timed.skipped else Status.WRONG if timed.problem else Status.OK
            yield Row(
                **base, status=status, reason=timed.problem, case=case,
                subject=Subject(op="fused_experts", provider=timed.kernel),
                metrics=tables.percentiles(timed.us) if timed.us else {},
            )  # fmt: skip
        if routing.capture.problems:
            print("; ".join(routing.capture.problems))


def _show(made: list[Row], file: Path, markdown: bool, json_only: bool, note: str) -> None:
    failed = [r for r in made if r.status not in (Status.OK, Status.SKIPPED)]
    skipped = [r for r in made if r.status is Status.SKIPPED]
    changes = tables.changes(made)
    if not json_only:
        for title, columns, cells in tables.tables(made):
            if markdown:
                print(tables.markdown(title, columns, cells))
            else:
                table(title, columns, cells)
        for row in (*failed, *skipped):
            print(
                f"{row.subject.provider} {row.case.get('routing', '')} {row.case.get('tokens', '')}: {row.reason}"
            )
        if note:
            print(note)
        print(f"rows: {file}\n")
    timed = sum(r.kind == "time" and r.status is Status.OK for r in made)
    names = sorted({r.case["capture"] for r in made if "capture" in r.case})
    last_line({
        "command": COMMAND, "ok": not failed, "captures": names, "rows": str(file), "timed": timed,
        "failed": len(failed), "not_run": len(skipped), "compared": len(changes),
        "winner_changes": sum(c["changed"] for c in changes), **({"note": note} if note else {}),
    })  # fmt: skip
    if failed:
        raise SystemExit(1)
