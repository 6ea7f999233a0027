"""`fk-bench list ops|hosts|models`: what there is, and with --signatures how exactly it matches the hosts."""

from __future__ import annotations

from types import ModuleType
from typing import Annotated, Any

import typer

from fastkernels.core import registry
from fk_bench.core.output import fail, last_line, table

WHAT = ("ops", "hosts", "models")


def signature_rows() -> list[dict[str, Any]]:
    """[{op, host, version, class, path, exact, difference}] for every op, host and recorded version."""
    from fk_integrations.core.signature_diff import comparisons

    return [c.to_dict() for c in comparisons()]


def op_rows() -> list[dict[str, Any]]:
    """[{op, level, hosts, providers, baseline, cases, calls, about}]."""
    specs = [registry.get(name) for name in registry.op_names()]
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
    """[{host, recorded, ops}]: the hosts that ops have classes for, and the versions recorded."""
    from fk_integrations.core.signature_diff import hosts, versions

    specs = [registry.get(name) for name in registry.op_names()]
    return [
        {"host": h, "recorded": versions(h), "ops": [s.name for s in specs if s.targets_for(h)]}
        for h in hosts()
    ]


def model_rows() -> list[dict[str, Any]]:
    """[{architecture, category, runner, module, about}]: the architectures that our engine builds."""
    from fastkernels.models.common.registry import architectures, find

    return [
        {
            "architecture": name,
            "category": found.arch.category,
            "runner": found.arch.runner,
            "module": found.path,
            "about": found.about,
        }
        for name in architectures()
        for found in [find(name)]
    ]


def _about(module: ModuleType) -> str:
    """The first line of a module's docstring."""
    return (module.__doc__ or "").partition("\n")[0]


def _print_signatures(rows: list[dict[str, Any]]) -> None:
    columns = ["op", "host", "version", "class", "exact", "difference"]
    table("Signatures", columns, [[r[c] for c in columns] for r in rows])
    exact = sum(r["exact"] for r in rows)
    print(f"{exact} of {len(rows)} exact")


def list_command(
    what: Annotated[str, typer.Argument(help="ops, hosts or models")] = "ops",
    signatures: Annotated[
        bool,
        typer.Option("--signatures", help="the matrix op x host x version: exact, or what differs and why"),
    ] = False,
    json_only: Annotated[bool, typer.Option("--json", help="only the line of JSON")] = False,
) -> None:
    """List the ops, the hosts or the models; ends with one line of JSON."""
    if what not in WHAT:
        fail(str(registry.UnknownName("list", what, WHAT)))
    if signatures:
        if what != "ops":
            fail(f"--signatures belongs to `list ops`, not to `list {what}`")
        rows = signature_rows()
        if not json_only:
            _print_signatures(rows)
        last_line({"signatures": rows})
        return
    rows = {"ops": op_rows, "hosts": host_rows, "models": model_rows}[what]()
    if not json_only and rows:
        # What else is known of an op is in the line of JSON: the table has to fit.
        columns = [c for c in rows[0] if c not in ("cases", "calls")]
        table(what.capitalize(), columns, [[r[c] for c in columns] for r in rows])
    last_line({what: rows})
