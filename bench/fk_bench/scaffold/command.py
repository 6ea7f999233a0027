"""`fk-bench scaffold CONFIG`: from a config of transformers to a model file of our ops, what is missing, and tasks."""

from __future__ import annotations

import json
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from fk_integrations.transformers import module_walk, tiny_models
from fk_integrations.transformers.decoder_roles import NotObserved, Unexplained

from fastkernels.models.common.checkpoints.checkpoint import CheckpointError
from fastkernels.models.common.configs import checks
from fastkernels.models.common.descriptions import registry
from fastkernels.models.common.descriptions.description import Unsupported
from fk_bench.core.terminal.output import fail, last_line, table
from fk_bench.scaffold import matched_parts, model_file, samples, tasks, verification
from fk_bench.scaffold.expressions import NoExpression

COMMAND = "scaffold"
CATEGORY = "llm"


@dataclass(frozen=True)
class _Options:
    """no_tasks, force and quiet as given; start: when the command began."""

    no_tasks: bool
    force: bool
    quiet: bool
    start: float


def scaffold_command(
    config: Annotated[
        str,
        typer.Argument(
            help="folder with config.json, such a file, hub id, or model type of transformers (qwen2)"
        ),
    ],
    out: Annotated[
        Path | None, typer.Option(help="folder of the files (default: scaffold/NAME)", show_default=False)
    ] = None,
    no_tasks: Annotated[bool, typer.Option("--no-tasks", help="write no task files")] = False,
    force: Annotated[bool, typer.Option("--force", help="overwrite existing files")] = False,
    json_only: Annotated[
        bool, typer.Option("--json", help="only the line of JSON on standard output")
    ] = False,
) -> int:
    """Write the model file of an architecture, a list of the modules that no op computes, and a task file per kernel.

    The model file is inferred from small copies of transformers' model and compared with it. The last line of output
    is JSON; the exit status is 1 if a module is not explained or the comparison fails.
    """
    # Small matrices gain nothing from threads, which wait for each other on a busy machine.
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        return _scaffold(config, out, no_tasks, force, json_only)
    finally:
        torch.set_num_threads(threads)


def _tell(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


def _scaffold(config: str, out: Path | None, no_tasks: bool, force: bool, quiet: bool) -> int:
    start = time.perf_counter()
    tiny_models.quiet()
    given, options = None, _Options(no_tasks, force, quiet, start)
    try:
        given = tiny_models.read(config)
        name = given.model_type.replace("-", "_").replace(".", "_")
        folder = out or Path("scaffold") / name
        file = folder / CATEGORY / f"{name}.py"
        existing = [f for f in (file, folder / "unmatched.json") if f.exists()]
        if existing and not force:
            fail(f"{existing[0]} exists; --force overwrites it")
        _tell(f"{name}: small random copies run, and each field of the config is changed in turn")
        found = samples.collect(given)
    except tiny_models.NoReference as error:
        if given is None or not module_walk.missing_of(given):
            fail(str(error))
        return _unmatched(given, folder, [("", str(error))], options, symptom=True)
    except Unexplained as error:
        problems = [(e.path, e.reason) for e in error.all]
        return _unmatched(given, folder, problems, options, symptom=isinstance(error, NotObserved))
    try:
        _tell("the model file is written and compared with transformers")
        written, verified = write(file, found)
        with registry.using(file):
            registry.describe(given)
            checks.check(given)
        ours, theirs, differ = verification.parameters(file, given)
    except NoExpression as error:
        return _unmatched(given, folder, [("", str(error))], options)
    except CheckpointError as error:  # its weights are stored in a way that no weight map expresses
        file.unlink()
        return _unmatched(given, folder, [("", str(error))], options)
    except Unsupported as error:
        fail(f"{config}: {error}")
    if not verified.ok or ours != theirs:
        file.unlink()
        wrong = list(differ.items()) or [("", _disagreement(verified, ours - theirs))]
        return _unmatched(given, folder, wrong, options)
    _list(folder, [])
    made, kept = ([], []) if no_tasks else _tasks(file, given, folder, force)
    lines = len(written.splitlines())
    rows = [
        ("model file", f"{file}, {lines} lines"),
        (
            "logits",
            f"differ from transformers' by {verified.error:.1e} of the largest (float32, random weights)",
        ),
        ("configs", f"{verified.configs} with an equal description"),
        ("parameters", f"{ours} at the config's sizes, {theirs} of transformers"),
        ("refused", ", ".join(f"{k} other than {v!r}" for k, v in found.refused.items()) or "nothing"),
        ("tasks", f"{len(made)} files in {folder / 'tasks'}{f', {len(kept)} kept' if kept else ''}"),
    ]
    if not quiet:
        table(f"{given.architectures[0]}: all modules are matched", ("part", "result"), rows)
    last_line({
        "command": COMMAND, "ok": True, "architecture": given.architectures[0], "model_file": str(file),
        "lines": lines, "error": verified.error, "parameters": ours, "configs": verified.configs,
        "refused": found.refused, "unmatched": [], "tasks": made, "kept": kept,
        "seconds": round(time.perf_counter() - start, 1),
    })  # fmt: skip
    return 0


def write(file: Path, found: samples.Samples) -> tuple[str, verification.Verified]:
    """Write the model file and compare it; fields whose effect it does not express are refused by it.

    Raises NoExpression.
    """
    import transformers

    arch = found.config.architectures[0]
    about = f"{arch.removesuffix('ForCausalLM')}, as transformers {transformers.__version__} computes {arch}."
    file.parent.mkdir(parents=True, exist_ok=True)
    while True:
        text = model_file.text(found, about, CATEGORY)
        file.write_text(text, encoding="utf-8")
        verified = verification.verify(file, found)
        if not verified.wrong or not found.drop(set(verified.wrong)):
            return text, verified


def _disagreement(verified: verification.Verified, more: int) -> str:
    if not verified.wrong and verified.error <= verification.TOLERANCE:
        return f"a description has {abs(more):,} parameters {'more' if more > 0 else 'less'} at the config's sizes"
    if not verified.wrong:
        return f"logits of a description differ by {verified.error:.1e} of the largest"
    fields = ", ".join(sorted(f or "the config itself" for f in verified.wrong))
    return f"no description expresses the effect of {fields}"


def _tasks(file: Path, config: Any, folder: Path, force: bool) -> tuple[list[str], list[str]]:
    """(ops with a task file, files that were there and stay) of a model with a model file."""
    name, dtype = _name(config), _dtype(config)
    with registry.using(file):
        calls = tasks.of_model(name, config, dtype)
        made, kept, without = tasks.write(name, config, calls, folder / "tasks", force)
    for op, why in without.items():
        _tell(f"no task file for {op}: {why}")
    return made, kept


def _tasks_of_parts(
    model: Any, config: Any, folder: Path, force: bool
) -> tuple[list[str], list[str], dict[str, str]]:
    """(ops with a task file, files that stay, {op: why it has none}) of a model without a model file."""
    dtype = _dtype(config)
    parts = matched_parts.MatchedParts(model, config, dtype)
    made, kept, without = tasks.write(
        _name(config), config, tasks.of_parts(parts, dtype), folder / "tasks", force
    )
    written = {*made, *kept}
    return made, kept, without | {op: why for op, why in parts.without.items() if op not in written}


def _name(config: Any) -> str:
    return Path(getattr(config, "_name_or_path", "") or config.architectures[0]).name


def _dtype(config: Any) -> torch.dtype:
    return config.dtype if isinstance(config.dtype, torch.dtype) else torch.bfloat16


def _list(folder: Path, found: list[dict[str, Any]]) -> Path:
    """Write the list of what is not matched; it is empty for a model that is."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / "unmatched.json"
    path.write_text(json.dumps(found, indent=2) + "\n", encoding="utf-8")
    return path


def _unmatched(
    config: Any, folder: Path, problems: list[tuple[str, str]], options: _Options, symptom: bool = False
) -> int:
    """Write and show what no op or description computes, and write the task files of what ops compute.

    symptom: the problems say how the model failed; causes in its modules are shown instead, if there are any
    """
    arch = config.architectures[0]
    model, used = module_walk.real(config)
    problems = (module_walk.obstacles(model, config) if symptom else []) or problems
    known = {path for path, _ in problems}
    problems = [*problems, *(m for m in module_walk.missing(model) if m[0] not in known)]
    found = [module_walk.find(model, path).to_dict() | {"reason": reason} for path, reason in problems]
    path = _list(folder, found)
    rows = [(f["path"] or "(the model)", f["class"], f["source"], f["count"], f["reason"]) for f in found]
    if not options.quiet:
        table(f"{arch}: not matched, so no model file", ("module", "class", "source", "count", "why"), rows)
    made: list[str] = []
    kept: list[str] = []
    without: dict[str, str] = {}
    if not options.no_tasks:
        made, kept, without = _tasks_of_parts(model, used, folder, options.force)
        if not options.quiet:
            files = [*((op, f"{op}.py") for op in made), *((op, f"{op}.py, kept") for op in kept)]
            none = ((op, f"none: {why}") for op, why in without.items())
            table(f"{arch}: tasks in {folder / 'tasks'}", ("op", "task file"), [*files, *none])
    if not options.quiet:
        print(
            f"No model file: {len(found)} kinds of modules are not matched, see {path}. The model needs a class of its"
            " own for them, or a part of the description: docs/add-a-model.md\n"
        )
    last_line({
        "command": COMMAND, "ok": False, "architecture": arch, "model_file": None, "unmatched": found,
        "list": str(path), "tasks": made, "kept": kept, "without_task": without,
        "seconds": round(time.perf_counter() - options.start, 1),
    })  # fmt: skip
    return 1
