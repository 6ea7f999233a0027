"""`fk-bench export OP --host HOST`: print one self-contained file for a fork, and nothing else."""

from __future__ import annotations

import sys
from typing import Annotated

import typer

from fastkernels.core import registry
from fastkernels.export.exporter import ExportError, export
from fk_bench.core.output import fail


def newest(host: str, version: str | None) -> str:
    """The requested version, or the newest recorded one. Raises ExportError, UnknownName."""
    from fk_integrations.core.signature_diff import hosts, versions

    if host not in hosts():
        raise registry.UnknownName("host", host, hosts())
    known = versions(host)
    if version is not None and version not in known:
        raise ExportError(f"unknown {host} version {version!r}. Recorded: {', '.join(known)}.")
    return version or known[-1]


def export_command(
    op: Annotated[str, typer.Argument(help="an op; see `fk-bench list ops`")],
    host: Annotated[str, typer.Option(help="vllm, sglang or transformers")] = "vllm",
    host_version: Annotated[str | None, typer.Option(help="a recorded version (default: the newest)")] = None,
    standalone: Annotated[
        bool, typer.Option("--standalone", help="whole classes with constructors, which need no host")
    ] = False,
) -> None:
    """Print the op's classes under the host's own names, with all they need, as one file for a fork."""
    try:
        text = export(op, host, newest(host, host_version), standalone)
    except (registry.UnknownName, ExportError) as error:
        fail(str(error))
    sys.stdout.write(text)
