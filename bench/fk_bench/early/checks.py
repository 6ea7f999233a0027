"""Check the names in a command line before the command's module, and with it torch, is imported."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import takewhile
from pathlib import Path

from fk_bench.core.terminal.needs import NEEDS
from fk_bench.early import values as given
from fk_bench.early.values import values

# what the words in front of the first option are
OPS = ("kernels", "export")
MODELS = ("explain", "describe", "patch-compare")
CHECKPOINTS = ("serve", "capture", "e2e")
LANGUAGE_HOSTS = {"fastkernels", "vllm", "sglang", "transformers"}
# options whose value is one op, or several with commas
OP_OPTIONS = {
    "stubs": ("--op",), "list": ("--definition",), "patch-compare": ("--ops",), "capture": ("--ops",),
    "e2e": ("--ops",), "quality": ("--ops",), "agent-loop": ("--ops",), "mcp": ("--ops",),
    "trace": ("--ops",),
}  # fmt: skip
# options whose value is an architecture of `list models`, or a folder
ARCHITECTURE_OPTIONS = {
    "stubs": ("--model",), "kernels": ("--model",), "tune": ("--model",), "agent-loop": ("--model",),
    "mcp": ("--model",),
}  # fmt: skip


def problem(command: str, words: Sequence[str]) -> str | None:
    """The message for a name that does not exist or is missing; None if all that can be checked cheaply is right."""
    from fastkernels.core.env import Environment
    from fastkernels.core.registry import UnknownName
    from fk_bench.core.hub import ModelError
    from fk_bench.core.terminal.flags import ConfigError

    if "--help" in words:
        return None
    if command not in ("doctor", "stubs"):  # which shows it among others; which writes candidates
        try:
            Environment.read()
        except ValueError as error:
            return str(error)
    if command in NEEDS and not set(words) - {"--json"}:
        return NEEDS[command]
    try:
        _check(command, words)
        given.check(command, words)
    except (UnknownName, ModelError, ConfigError) as error:
        return str(error)
    return None


def _check(command: str, words: Sequence[str]) -> None:
    from fastkernels.core.registry import UnknownName, check_names, op_modules

    first = list(takewhile(lambda word: not word.startswith("-"), words))
    named = [
        part for flag in OP_OPTIONS.get(command, ()) for v in values(words, flag) for part in v.split(",")
    ]
    ops = [*(first if command in OPS else ()), *filter(None, map(str.strip, named))]
    check_names([op for op in ops if not _is_block(op)])
    if command in ARCHITECTURE_OPTIONS:
        from fastkernels.models.common.descriptions.registry import by_architecture, models
        from fk_bench.core.model_names import public_name

        for flag in ARCHITECTURE_OPTIONS[command]:
            for model in values(words, flag):
                known = model in models() or model in by_architecture() or public_name(model)
                if model and not known and not Path(model).expanduser().exists():
                    raise UnknownName("model", model, models())
    if command == "tune":
        from fk_bench.core import model_names

        for word in first:
            if word in op_modules() or word == "all":
                continue
            if not model_names.is_model(word):
                raise UnknownName("op", word, op_modules())
            model_names.check_name(word)
    elif command == "profile":
        for word in first:
            if word not in op_modules():
                _check_op_or_model(word)
    elif command == "quality":
        _check_quality(first, words)
    elif command in MODELS:
        from fk_bench.core import model_names

        for word in first:
            if (command, word) != ("patch-compare", "all"):
                model_names.check_name(word)
    elif command in CHECKPOINTS or command == "serve-compare":
        hosts = {host for v in values(words, "--hosts") for host in v.split(",")}
        attached = any(word.partition("=")[0] == "--attach" for word in words)
        random = command == "e2e" and "dummy" in values(words, "--load-format")
        if hosts <= LANGUAGE_HOSTS and not attached:
            for model in [*first, *values(words, "--model")]:
                if not (random and _is_public(model)):
                    _check_checkpoint(model)


def _check_op_or_model(word: str) -> None:
    """Raise ModelError for what is no model, or UnknownName with the closest name of ops and models."""
    from fastkernels.core.registry import UnknownName, op_modules
    from fk_bench.core import model_names

    if (Path(word).expanduser() / "rows.jsonl").is_file():  # a run of the judge
        return
    if not model_names.is_model(word):
        raise UnknownName("op or model", word, [*op_modules(), *model_names.PUBLIC])
    model_names.check_name(word)


def _check_quality(first: Sequence[str], words: Sequence[str]) -> None:
    """Raise ModelError for a model of language hosts that is neither a folder, nor public, nor of the hub."""
    from fk_bench.evaluate import suites

    hosts = {host for v in values(words, "--hosts") for host in v.split(",")}
    if hosts <= LANGUAGE_HOSTS:
        for model in filter(None, first):
            in_suite = model.partition("/")[0] in suites.names()  # SUITE/MODEL of `list workloads`
            if not in_suite and not _is_public(model):
                _check_checkpoint(model)


def _is_public(model: str) -> bool:
    """Whether random weights of this name can be made. Raises ModelError for its layers."""
    from fk_bench.core.model_names import first_layers, public_name

    return public_name(first_layers(model)[0]) is not None


def _is_block(name: str) -> bool:
    """Whether a name can be that of a block of a model, MODEL.KIND."""
    from fastkernels.models.common.descriptions.registry import models

    model, dot, _ = name.partition(".")
    return bool(dot) and model in models()


def _check_checkpoint(model: str) -> None:
    """Raise ModelError for what is neither a folder nor a model of the hub that can be had."""
    from fk_bench.core import hub

    if Path(model).expanduser().exists():
        return
    if not hub.is_id(model):
        raise hub.ModelError(
            f"model {model!r} is neither a folder nor a hub id (OWNER/NAME or OWNER/NAME@REVISION)"
        )
    hub.check(model)
