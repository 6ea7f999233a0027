"""Solutions of the FlashInfer-Trace schema: JSON documents with sources and an entry point for a Definition.

Definitions that `fk-bench export` writes have an op's own arguments. Of FlashInfer-Bench's own definitions, those in
UPSTREAM have the mathematics of an op here. Their epsilon is a constant of the definition: the call's is not passed on.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator
from pathlib import Path, PurePosixPath
from typing import Any

import torch

from fastkernels.core import registry
from fk_bench.evaluate.adapters.foreign_files import Adapted, Unadapted
from fk_bench.evaluate.adapters.loading import import_from

LAYOUT = "trace"
# Pattern of a definition's name: the op, and which of its arguments the definition takes, in its order
UPSTREAM = {r"rmsnorm_h\d+": ("rms_norm", ("x", "weight")), r"gemm_n\d+_k\d+": ("linear", ("x", "weight"))}
LANGUAGES = ("python", "triton")


def recognizes(folder: Path) -> bool:
    """Whether the folder holds solutions."""
    return any(_document(file) is not None for file in folder.glob("*.json"))


def adapted(folder: Path) -> Iterator[tuple[Path, Adapted | Unadapted]]:
    """Each solution, with the op that its definition corresponds to, or why there is none."""
    for file in sorted(folder.glob("*.json")):
        document = _document(file)
        if document is not None:
            try:
                yield file, _adapt(file, document)
            except Unadapted as reason:
                yield file, reason
            except (AttributeError, KeyError, TypeError):
                yield (
                    file,
                    Unadapted("spec is no object, or sources is no list of objects with path and content"),
                )


def _document(file: Path) -> dict[str, Any] | None:
    try:
        found = json.loads(file.read_text(encoding="utf-8")) if file.is_file() else None
    except (OSError, ValueError, RecursionError):
        return None
    is_solution = isinstance(found, dict) and {"definition", "sources", "spec"} <= set(found)
    return found if is_solution else None


def _adapt(file: Path, document: dict[str, Any]) -> Adapted:
    spec, name = document["spec"], str(document["definition"])
    language = str(spec.get("language", "")).lower()
    if language not in LANGUAGES:
        raise Unadapted(f"language {language!r}: only {', '.join(LANGUAGES)} are loaded")
    op, arguments = op_of(name)
    entry, _, function = str(spec.get("entry_point", "")).partition("::")
    texts = {str(s["path"]): str(s["content"]) for s in document["sources"]}
    if any(PurePosixPath(p).is_absolute() or ".." in PurePosixPath(p).parts for p in texts):
        raise Unadapted("a source is outside the solution's folder")
    if entry not in texts or not function:
        raise Unadapted(
            f"entry point {spec.get('entry_point')!r} is not FILE::FUNCTION of one of its sources"
        )
    facts = {
        "module": entry.removesuffix(".py").replace("/", "."), "function": function, "arguments": arguments,
        "into": bool(spec.get("destination_passing_style", True)),
    }  # fmt: skip
    return Adapted(op, {file.name: file}, facts, texts)


def op_of(definition: str) -> tuple[str, tuple[str, ...] | None]:
    """(op, arguments that the definition takes; None: its own) by a definition's name. Raises Unadapted."""
    for pattern, found in UPSTREAM.items():
        if re.fullmatch(pattern, definition):
            return found
    names = [n for n in registry.op_modules() if definition == n or definition.startswith(f"{n}_")]
    for name in sorted(names, key=len, reverse=True):  # rms_norm_gated_hidden64 is not rms_norm
        axes = "|".join(map(re.escape, registry.get(name).declaration.axes))
        part = rf"_(no_)?({axes})(-?\d[\dx.]*d?|_[a-z0-9_]+)?|_float\w+"
        if re.fullmatch(f"({part})*", definition[len(name) :]):
            return name, None
    raise Unadapted(f"definition {definition} corresponds to no op")


def bind(
    folder: Path, op: str, module: str, function: str, arguments: tuple[str, ...] | None, into: bool
) -> Callable[..., Any]:
    """The op's function on the solution's entry point. The author's code runs."""
    run = getattr(import_from(folder, module), function)
    spec = registry.get(op)
    names = [a.name for a in spec.arguments]

    def call(*given: Any) -> Any:
        values = dict(zip(names, (*given, *(spec.defaults[n] for n in names[len(given) :])), strict=True))
        if arguments is not None:
            if odd := [n for n, v in values.items() if n not in arguments and isinstance(v, torch.Tensor)]:
                raise NotImplementedError(f"the definition has no {', '.join(odd)}")
            inputs = [values[n] for n in arguments]
        else:
            inputs = [v for v in values.values() if isinstance(v, (torch.Tensor, bool, int, float))]
        changed = [a for a in spec.declaration.tensors.values() if a.mutated and values[a.name] is not None]
        if into:
            results = _outputs(spec, list(values.values()), changed)
            run(*inputs, *results)
        else:
            found = run(*inputs)
            results = list(found.values()) if isinstance(found, dict) else _listed(found)
        own = len(results) - len(changed)
        for argument, result in zip(changed, results[own:], strict=True):
            values[argument.name].copy_(result)
        return None if own == 0 else results[0] if own == 1 else tuple(results[:own])

    return call


def _listed(found: Any) -> list[Any]:
    return list(found) if isinstance(found, (tuple, list)) else [found]


def _outputs(spec: Any, values: list[Any], changed: list[Any]) -> list[torch.Tensor]:
    """Uninitialized outputs, for an entry point that writes into its last arguments."""
    device = next(v.device for v in values if isinstance(v, torch.Tensor))
    case = spec.case_of(values, "call")
    sizes = spec.declaration.sizes(case.dims, case.dtype)
    outputs = [t for t in spec.outputs if t.there(sizes)]
    return [
        torch.empty(t.shape(sizes), dtype=t.torch_dtype(sizes), device=device) for t in (*outputs, *changed)
    ]
