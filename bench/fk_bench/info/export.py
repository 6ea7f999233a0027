"""`fk-bench export OP --host HOST`: print one self-contained file for a fork, or put it into the fork."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer

from fastkernels.core import registry
from fk_bench.core.terminal.output import fail

# Those with recorded signatures; a test compares them. Reading the records would slow every command down.
_HOSTS = (
    "vllm", "sglang", "transformers", "diffusers", "timm", "ultralytics", "fla", "gsplat", "torchrec",
    "torch_geometric", "openfold3", "diffusion_policy_3d",
)  # fmt: skip


def newest(host: str, version: str | None) -> str:
    """The requested version, or the newest recorded one. Raises ValueError, UnknownName."""
    from fk_integrations.signatures.diff import hosts, versions

    if host == "torch":
        raise ValueError(
            f"classes of torch.nn have no fork to be put into: export for one of {', '.join(_HOSTS)}, or replace them"
            " in a live model with fastkernels.patch(model, ops=[...])"
        )
    if host not in hosts():
        raise registry.UnknownName("host", host, hosts())
    known = versions(host)
    if version is not None and version not in known:
        raise ValueError(f"unknown {host} version {version!r}. Recorded: {', '.join(known)}.")
    return version or known[-1]


def export_command(
    op: Annotated[str, typer.Argument(help="an op; see `fk-bench list ops`")],
    host: Annotated[str, typer.Option(help=", ".join(_HOSTS[:-1]) + f" or {_HOSTS[-1]}")] = "vllm",
    host_version: Annotated[str | None, typer.Option(help="a recorded version (default: the newest)")] = None,
    standalone: Annotated[
        bool, typer.Option("--standalone", help="whole classes with constructors, which need no host")
    ] = False,
    module: Annotated[
        str, typer.Option(help="the host's module whose classes to print (default: the first that has some)")
    ] = "",
    into: Annotated[
        Path | None,
        typer.Option(
            help="a folder with the host's package: save the file next to each module that it replaces parts of"
        ),
    ] = None,
) -> None:
    """Print the op's classes under the host's own names, with all they need, as one file for a fork."""
    if into is not None and standalone:
        fail("--into puts methods into the host's own classes: use it without --standalone")
    try:
        version = newest(host, host_version)
        from fastkernels.export import exporter, fork  # after what can be refused without torch

        if into is not None:
            for file in fork.put(op, host, version, into):
                print(file)
            return
        text = exporter.export(op, host, version, standalone, module)
    except (registry.UnknownName, ValueError) as error:
        fail(str(error))
    sys.stdout.write(text)
