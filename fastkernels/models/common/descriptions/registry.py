"""Architectures by name, read from the ARCH that ends each model file. Neither torch nor a model is imported."""

from __future__ import annotations

import ast
import importlib
import importlib.util
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, fields
from functools import lru_cache
from importlib.metadata import entry_points
from pathlib import Path
from typing import Any

from fastkernels.core.registry import DuplicateName, UnknownName
from fastkernels.models.common.descriptions import agreement
from fastkernels.models.common.descriptions.architecture import Architecture
from fastkernels.models.common.descriptions.description import Decoder, Unsupported

MODELS_ROOT = Path(__file__).resolve().parents[2]
MODELS_PACKAGE = "fastkernels.models"
COMMON = "common"  # the one folder that holds no models
DRAFT = "Draft"  # the runner of heads and draft models


class InvalidModelFile(ValueError):
    """A file in a category folder that declares no usable ARCH. The message names the file."""


@dataclass(frozen=True)
class Model:
    """A model file.

    name   the file's stem, e.g. "llama"
    about  the first line of its docstring
    """

    name: str
    file: Path
    module: str
    about: str
    arch: Architecture

    @property
    def path(self) -> str:
        """The model class as "module:Class"."""
        where = self.arch.model
        return where if ":" in where else f"{self.module}:{where}"


def read_models(root: Path = MODELS_ROOT, package: str = MODELS_PACKAGE) -> dict[str, Model]:
    """{name: Model} of the files CATEGORY/NAME.py and CATEGORY/FAMILY/NAME.py under `root`.

    Raises InvalidModelFile for a file without ARCH or with arguments that are not literals, and DuplicateName, with
    both files, where two files have the same name or declare the same architecture.
    """
    found: dict[str, Model] = {}
    claimed: dict[str, Path] = {}
    for file in sorted([*root.glob("*/*.py"), *root.glob("*/*/*.py")]):
        category, *inside = file.relative_to(root).with_suffix("").parts
        if category == COMMON or file.stem == "__init__":
            continue
        model = _read(file, ".".join([package, category, *inside]), category)
        for name in (model.name, *model.arch.names, *model.arch.text_of):
            if (other := claimed.setdefault(name, file)) != file:
                raise DuplicateName(
                    f"two files define the model {name!r}: {other} and {file}. Rename one of them"
                )
        found[model.name] = model
    # The first one of a model_type is the model, not a head that drafts for it.
    return dict(sorted(found.items(), key=lambda item: item[1].arch.runner == DRAFT))


@lru_cache(maxsize=1)
def models() -> dict[str, Model]:
    """The models of this installation by name; see read_models."""
    return read_models()


@contextmanager
def using(file: Path) -> Iterator[Model]:
    """Run a block with a model file that lies outside the package, in place of those with its name or architectures.

    Raises InvalidModelFile.
    """
    model = _read(file, f"fastkernels_model_{file.stem}", file.parent.name)
    before = dict(models())
    taken = set(model.arch.names)
    kept = {k: m for k, m in before.items() if k != model.name and not taken & set(m.arch.names)}
    spec = importlib.util.spec_from_file_location(model.module, file)
    assert spec is not None and spec.loader is not None, file
    code = importlib.util.module_from_spec(spec)
    sys.modules[model.module] = code
    try:
        spec.loader.exec_module(code)
        _replace({**kept, model.name: model})
        yield model
    finally:
        _replace(before)
        sys.modules.pop(model.module, None)


def _replace(known: dict[str, Model]) -> None:
    found = models()
    found.clear()
    found.update(known)


def by_architecture() -> dict[str, Model]:
    """{architecture name in config.json: Model}."""
    return {name: m for m in models().values() for name in (*m.arch.names, *m.arch.text_of)}


def architectures() -> list[str]:
    return sorted(by_architecture())


def find(architecture: str, config: Any = None) -> Model:
    """The model of an architecture.

    Raises UnknownName, which lists the known ones and, with the config, the modules that have no op.
    """
    known = by_architecture()
    if architecture not in known:
        raise UnknownName("architecture", architecture, known, _hint(architecture, config))
    return known[architecture]


def _hint(architecture: str, config: Any) -> str:
    """Advice about an architecture without a model file, for the end of an error."""
    hint = "`fk-bench list models` describes them; `fk-bench scaffold FOLDER` writes a model file for another one."
    hosts = entry_points(group="fastkernels.hosts", name="transformers")
    needs = None
    if config is not None and hosts:
        needs = next(iter(hosts)).load().needs(config, architecture)
    if needs is None:
        return hint
    if not needs:
        return f"{hint} Every module of {architecture} has an op."
    named = "; ".join(f"{what}: {', '.join(classes)}" for what, classes in needs.items())
    return f"{hint} Modules of {architecture} for which no op is known to compute the same: {named}."


def model_class(architecture: str) -> Any:
    """The model class of an architecture. Raises UnknownName."""
    return load(find(architecture).path)


def describe(config: Any) -> Decoder:
    """The description that the model file of this config returns. Raises UnknownName and Unsupported."""
    allow_mixed_sizes(config)
    names = getattr(config, "architectures", None) or [""]
    found = find(names[0], config)
    make = load(f"{found.module}:describe")
    try:
        made: Decoder = make(config)
        agreement.check(config, made)
        if "image" in found.arch.media:
            agreement.check_axes(made)
    except (TypeError, ArithmeticError) as error:
        raise Unsupported(_unusable(make, config, error)) from error
    return made


class _Reads:
    """A config that remembers the fields that are read."""

    def __init__(self, config: Any) -> None:
        self.__dict__.update(config=config, read={})

    def __getattr__(self, name: str) -> Any:
        self.read[name] = value = getattr(self.config, name)
        return value


def _unusable(make: Any, config: Any, error: Exception) -> str:
    """The message about a config whose description raises this error, with the fields that are null or 0.

    Without such fields, the last one that was read.
    """
    reads = _Reads(config)
    with suppress(Exception):
        make(reads)
    bad = 0 if isinstance(error, ArithmeticError) else None
    found = [name for name, value in reads.read.items() if value == bad and type(value) is not bool]
    found = found or list(reads.read)[-1:]
    given = ", ".join(f"config.{name}={reads.read[name]!r}" for name in found)
    return f"{given}: not supported by {config.architectures[0]} ({error})"


def allow_mixed_sizes(config: Any) -> None:
    """Let a size that differs between layers be read from the config itself, where transformers raises by default."""
    if hasattr(config, "allow_global_per_layer_attribute_access"):
        config.allow_global_per_layer_attribute_access = True


def load(path: str) -> Any:
    """The object named "module:attribute"."""
    module, _, name = path.partition(":")
    return getattr(importlib.import_module(module), name)


def _read(file: Path, module: str, category: str) -> Model:
    tree = ast.parse(file.read_text(encoding="utf-8"), str(file))
    calls = [
        node.value for node in tree.body
        if isinstance(node, ast.Assign) and [getattr(t, "id", "") for t in node.targets] == ["ARCH"]
    ]  # fmt: skip
    if len(calls) != 1 or not isinstance(calls[0], ast.Call):
        raise InvalidModelFile(
            f"{file} declares no model: a file in a category folder ends with ARCH = Architecture(...);"
            f" shared code belongs in the folder {COMMON!r}"
        )
    arch = _architecture(file, calls[0])
    if arch.category != category:
        raise InvalidModelFile(f"{file}: category {arch.category!r} is not its folder {category!r}")
    about = (ast.get_docstring(tree) or "").partition("\n")[0]
    return Model(file.stem, file, module, about, arch)


def _architecture(file: Path, call: ast.Call) -> Architecture:
    known = {f.name for f in fields(Architecture)}
    given: dict[str, Any] = {}
    for keyword in call.keywords:
        if keyword.arg not in known:
            raise InvalidModelFile(f"{file}: ARCH has an unknown argument {keyword.arg!r}")
        try:
            given[keyword.arg] = ast.literal_eval(keyword.value)
        except ValueError as error:
            raise InvalidModelFile(f"{file}: {keyword.arg} of ARCH is not a literal") from error
    if call.args:
        raise InvalidModelFile(f"{file}: ARCH takes keyword arguments only")
    try:
        return Architecture(**given)
    except TypeError as error:
        raise InvalidModelFile(f"{file}: ARCH: {error}") from error
