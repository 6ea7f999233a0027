"""`fk-bench stubs`: write a working candidate file for each op, with exact names and signatures, to start from."""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import typer

from fastkernels.core import registry
from fastkernels.models.common.checkpoints.checkpoint import CheckpointError
from fastkernels.models.common.descriptions.description import Unsupported
from fastkernels.models.common.descriptions.registry import models
from fk_bench.core.terminal.output import fail, last_line, table
from fk_bench.info import model_blocks

COMMAND = "stubs"


def host_classes(name: str, host: str | None = None) -> tuple[str, list[type]]:
    """(host, our classes for it): of `host`, else of vLLM, else of the op's first target; of its newest version.

    Runners of experts are left out: they are built from the host's own parts and only forward the call to the op.
    Raises UnknownName for a host without recorded signatures. Returns ('', []) for an op without classes there.
    """
    from fk_integrations.signatures import diff as signature_diff

    spec = registry.get(name)
    if "." in name:  # a block of a model: the class that our engine builds it with
        return spec.targets[0].host, [registry.target_class(spec.targets[0])]
    if host is not None and host not in signature_diff.hosts():
        raise registry.UnknownName("host", host, signature_diff.hosts())
    offered = dict.fromkeys(t.host for t in spec.targets)
    host = host or ("vllm" if "vllm" in offered else next(iter(offered), ""))
    if host not in offered:
        return "", []
    targets = spec.targets_for(host, signature_diff.versions(host)[-1])
    found = dict.fromkeys(registry.target_class(t) for t in targets if t.seam != "experts")
    return host, [c for c in found if isinstance(c, type)]


def source(name: str, host: str | None = None, folder: str = "candidates/") -> str:
    """The text of the op's candidate file, which will lie in `folder`. Raises UnknownName for the op or host."""
    from fk_bench.info.stub_source import Stub

    _, classes = host_classes(name, host)
    spec = registry.get(name)
    where = importlib.import_module(spec.targets[0].module) if "." in name else registry.op_module(name)
    return Stub(spec, where).text(classes, folder)


def selected_ops(ops: Sequence[str], level: int | None, model: str | None) -> list[str]:
    """The named ops (all without names) of that level and on that model's path. Raises UnknownName."""
    names = list(dict.fromkeys(registry.check_names(ops))) if ops else registry.op_names()
    if model is not None:
        from fastkernels.models.common.plans.ops import ops_of_model

        path = ops_of_model(model)
        names = [n for n in names if n in path or "." in n]
    if level is not None:
        levels = sorted({registry.get(n).level for n in registry.op_names()})
        if level not in levels:
            raise registry.UnknownName("level", str(level), map(str, levels))
        names = [n for n in names if registry.get(n).level == level]
    return names


def stubs_command(
    level: Annotated[
        int | None,
        typer.Option(help="only ops of this level: 1, 2 or 3; with --model also its blocks, up to 4"),
    ] = None,
    op: Annotated[list[str] | None, typer.Option(help="only this op; repeatable")] = None,
    model: Annotated[
        str | None, typer.Option(help=f"only ops that this model uses: {', '.join(models())}")
    ] = None,
    host: Annotated[
        str | None,
        typer.Option(help="host of the classes (default: vLLM where it has any)", show_default=False),
    ] = None,
    out: Annotated[Path, typer.Option(help="folder of the files, created if missing")] = Path("candidates"),
    force: Annotated[bool, typer.Option("--force", help="overwrite existing files")] = False,
    json_only: Annotated[bool, typer.Option("--json", help="only the line of JSON")] = False,
) -> None:
    """Write a candidate file for each op: correct as it is (it calls the reference), for you to make fast."""
    try:
        named = list(op or ())
        inferred = model or model_blocks.model_of(named)
        blocks = model_blocks.register(inferred)[1] if inferred and (level or named) else ()
        names = [] if level == 4 and blocks else selected_ops(named, level, model)
        if not named and level:
            names += model_blocks.of_level(blocks, [level])
        if host is not None:
            names = [n for n in names if registry.get(n).op is not None or host_classes(n, host)[1]]
        if not names:
            fail("no op matches --op, --level, --model and --host together")
        texts = {name: source(name, host, f"{out}/") for name in names}
    except (registry.UnknownName, CheckpointError, Unsupported) as error:
        fail(str(error))
    try:
        out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        fail(f"--out {out}: {error.strerror}")
    kept = 0
    rows = []
    for name, text in texts.items():
        file = out / f"{name}.py"
        keep = file.exists() and not force
        if not keep:
            file.write_text(text, encoding="utf-8")
        kept += keep
        spec, (from_host, classes) = registry.get(name), host_classes(name, host)
        function = f"{name}()" if spec.op is not None else ""
        offered = [c.__name__ for c in classes]
        rows.append([name, spec.level, function, from_host, offered, "kept" if keep else "written"])
    if not json_only:
        table(f"Candidates in {out}", ["op", "level", "function", "host", "classes", "file"], rows)
        if kept:
            files = "1 existing file was" if kept == 1 else f"{kept} existing files were"
            print(f"{files} kept; --force overwrites\n")
    last_line({"command": COMMAND, "ok": True, "files": len(rows) - kept, "kept": kept, "out": str(out)})
