"""`fk-bench list ops|hosts|models|workloads`: what exists; with --signatures, how exactly it matches the hosts."""

from __future__ import annotations

import json
import sys
from types import ModuleType
from typing import Annotated, Any

import typer

from fastkernels.core import registry
from fk_bench.core.terminal.output import fail, last_line, table
from fk_bench.info.verified import verified

WHAT = ("ops", "hosts", "models", "workloads")


def signature_rows() -> list[dict[str, Any]]:
    """Rows {op, host, version, class, path, exact, difference, lacks, inherits} for every op, host and version."""
    from fk_integrations.signatures.diff import comparisons

    return [c.to_dict() for c in comparisons()]


def op_rows() -> list[dict[str, Any]]:
    """Rows {op, level, hosts, providers, baseline, cases, calls, about}; those of collectives too."""
    specs = [registry.get(name) for name in registry.op_modules()]
    return [
        {
            "op": s.name,
            "level": s.level,
            "hosts": sorted({t.host for t in s.targets}),
            "providers": [p.name for p in s.op.providers] if s.op is not None else [],
            "baseline": s.baseline,
            "cases": len(s.cases),
            "calls": list(s.calls),
            "about": _about(registry.op_module(s.name)),
        }
        for s in sorted(specs, key=lambda s: (s.level, s.name))
    ]


def host_rows() -> list[dict[str, Any]]:
    """Rows {host, recorded, ops}: the hosts that ops have classes for, and their recorded versions."""
    from fk_integrations.signatures.diff import hosts, versions

    specs = [registry.get(name) for name in registry.op_names()]
    return [
        {"host": h, "recorded": versions(h), "ops": [s.name for s in specs if s.targets_for(h)]}
        for h in hosts()
    ]


def model_rows() -> list[dict[str, Any]]:
    """Rows {id, category, architecture, runner, evaluated, verified, module, about}: what our engine can build.

    evaluated: hosts of the model's items in the suite `full`; verified: {test, tolerance} of the comparison with
    transformers, see verified.Verified.
    """
    from dataclasses import asdict

    from fastkernels.models.common.descriptions.registry import architectures, find
    from fk_bench.evaluate import suites

    hosts: dict[str, dict[str, None]] = {}
    for entry in suites.load("full").entries:
        hosts.setdefault(suites.architecture_of(entry.model), {})[entry.item.host] = None

    return [
        {
            "id": found.name,
            "category": found.arch.category,
            "architecture": name,
            "runner": found.arch.runner,
            "evaluated": list(hosts.get(found.name, ())),
            "verified": asdict(verified(found, name)),
            "module": found.path,
            "about": found.about,
        }
        for name in architectures()
        for found in [find(name)]
    ]


def workload_rows() -> list[dict[str, Any]]:
    """Rows of all items of the shipped suites of `fk-bench eval`."""
    from fk_bench.evaluate import suites

    return [
        {
            "suite": suite.name, "model": e.item.model, "workload": e.item.workload, "host": e.item.host,
            "category": e.item.category, "about": e.workload.about, "minutes": e.minutes, "digest": suite.digest,
        }
        for suite in map(suites.load, suites.names())
        for e in suite.entries
    ]  # fmt: skip


def _about(module: ModuleType) -> str:
    """The first line of a module's docstring."""
    return (module.__doc__ or "").partition("\n")[0]


def _print_signatures(rows: list[dict[str, Any]]) -> None:
    columns = ["op", "host", "version", "class", "exact", "in a fork", "built alone it lacks", "difference"]
    table("Signatures", columns, [[_cell(r, c) for c in columns] for r in rows])
    exact = sum(r["exact"] for r in rows)
    print(f"{exact} of {len(rows)} exact")


def _cell(row: dict[str, Any], column: str) -> Any:
    if column == "in a fork":
        return "the host's class with our methods" if row["inherits"] else ""
    if column == "built alone it lacks":
        return ", ".join(row["lacks"])
    return row[column]


def _print_definition(op: str, json_only: bool) -> None:
    """Print the definition: indented in a terminal, on one line with --json or into a pipe or a file.

    Ends the command for an op without one.
    """
    from fastkernels.core.definition import definition

    try:
        found = definition(registry.get(op))
    except (registry.UnknownName, ValueError) as error:
        fail(str(error))
    one_line = json_only or not sys.stdout.isatty()
    print(json.dumps(found, indent=None if one_line else 2))


def list_command(
    what: Annotated[str, typer.Argument(help="ops, hosts, models or workloads")] = "ops",
    signatures: Annotated[
        bool,
        typer.Option(
            "--signatures", help="matrix of op, host and version: exact, or the difference and its reason"
        ),
    ] = False,
    definition: Annotated[
        str | None,
        typer.Option(metavar="OP", help="print the FlashInfer-Trace definition of this op, as JSON"),
    ] = None,
    json_only: Annotated[bool, typer.Option("--json", help="only the line of JSON")] = False,
) -> None:
    """List the ops, the hosts, the models, or the workloads of `fk-bench eval`."""
    if what not in WHAT:
        fail(str(registry.UnknownName("list", what, WHAT)))
    if definition is not None:
        if what != "ops":
            fail(f"--definition belongs to `list ops`, not to `list {what}`")
        _print_definition(definition, json_only)
        return
    if signatures:
        if what != "ops":
            fail(f"--signatures belongs to `list ops`, not to `list {what}`")
        rows = signature_rows()
        if not json_only:
            _print_signatures(rows)
        last_line({"signatures": rows})
        return
    rows = {"ops": op_rows, "hosts": host_rows, "models": model_rows, "workloads": workload_rows}[what]()
    if not json_only and rows:
        # The table has to fit the screen; the line of JSON has every column.
        columns = [c for c in rows[0] if c not in ("cases", "calls", "verified", "evaluated")]
        table(what.capitalize(), columns, [[r[c] for c in columns] for r in rows])
    last_line({what: rows})
