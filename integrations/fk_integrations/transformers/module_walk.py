"""The modules of a language model of transformers at its real sizes, without memory: class, source and shapes."""

from __future__ import annotations

import copy
import inspect
import re
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fk_integrations.transformers import architectures
from fk_integrations.transformers.matching import match
from fk_integrations.transformers.tiny_models import reference_class


@dataclass(frozen=True)
class Walked:
    """Modules of one class with the same shapes.

    path    name of the first; in the list of layers its number stands for all
    source  file:line of the class
    shapes  {parameter: shape}, of the module and what is below it
    """

    path: str
    cls: str
    source: str
    shapes: dict[str, tuple[int, ...]]
    count: int = 1

    def to_dict(self) -> dict[str, Any]:
        return {
            "path": self.path, "class": self.cls, "source": self.source, "count": self.count,
            "shapes": {name: list(shape) for name, shape in self.shapes.items()},
        }  # fmt: skip


def real(config: Any) -> tuple[Any, Any]:
    """(model on the device 'meta', config). Fields that a default config leaves open are filled in, in a copy."""
    made = copy.deepcopy(config)
    return architectures.build(reference_class(made), made), made


def missing_of(config: Any) -> list[tuple[str, str]]:
    """`missing` of a config's model; nothing if transformers cannot build it."""
    try:
        return missing(real(config)[0])
    except Exception:  # of any class of transformers
        return []


def missing(model: Any) -> list[tuple[str, str]]:
    """(name of the first module, what no op computes) of each class of module in a model that no op computes."""
    found: dict[Any, tuple[str, str]] = {}
    for path, module in model.named_modules():
        needs = match(module).needs
        if needs:
            found.setdefault((type(module), needs), (path, needs))
    return list(found.values())


def obstacles(model: Any, config: Any) -> list[tuple[str, str]]:
    """(name of the first module of a class, why it is not described), for models that failed as a whole."""
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    if getattr(config, "is_encoder_decoder", False):
        return [
            ("", "its decoder attends to an encoder, and the scaffold writes decoder-only language models")
        ]
    found: dict[Any, tuple[str, str]] = {}
    for path, module in model.named_modules():
        cls = type(module)
        own = getattr(sys.modules[cls.__module__], "ALL_ATTENTION_FUNCTIONS", ALL_ATTENTION_FUNCTIONS)
        if "alibi" in inspect.signature(cls.forward).parameters and hasattr(module, "num_heads"):
            found.setdefault(cls, (path, "attention with a bias by the distance of query and key (ALiBi)"))
        elif own is not ALL_ATTENTION_FUNCTIONS and hasattr(module, "num_key_value_groups"):
            reason = "attention by functions of the model's own, whose mask depends on the values"
            found.setdefault(cls, (path, reason))
    within = {path.rpartition(".")[0] for path, _ in found.values()}
    return [*((path, why) for path, why in found.values() if path not in within), *missing(model)]


def find(model: Any, path: str) -> Walked:
    """The module at a path of the small copy, in the model at its real sizes."""
    module = model.get_submodule(path)
    cls = type(module)
    shapes = {name: tuple(p.shape) for name, p in module.named_parameters()}
    pattern = re.compile(re.sub(r"\\\.\d+(?=\\\.|$)", r"\\.\\d+", re.escape(path)) + "$")
    count = sum(bool(pattern.match(name)) for name, m in model.named_modules() if type(m) is cls)
    return Walked(path, f"{cls.__module__}.{cls.__qualname__}", _source(cls), shapes, count)


def _source(cls: type) -> str:
    try:
        file, line = inspect.getsourcefile(cls), inspect.getsourcelines(cls)[1]
    except (OSError, TypeError):
        return ""
    parts = Path(file or "").parts
    where = parts[parts.index("site-packages") + 1 :] if "site-packages" in parts else parts[-1:]
    return f"{'/'.join(where)}:{line}"
