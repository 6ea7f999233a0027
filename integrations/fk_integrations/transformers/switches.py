"""The switches of an architecture's config: fields whose other values make the code of its file take another path."""

from __future__ import annotations

import ast
import copy
import inspect
import re
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from typing import Any

from fk_integrations.transformers import architectures
from fk_integrations.transformers.matching import Match, match, own_use

# Fields that choose outputs, losses, caches and training, not what a module computes
_OTHER = re.compile(r"output_|return_|use_cache$|tie_|problem_type$|.*loss|gradient_|apply_spec_augment$|_")


@dataclass(frozen=True)
class Switch:
    """A field and its other value; a flag without one is inverted, and a sub-config gets its defaults."""

    name: str
    value: str | tuple[str, ...] | bool | None = None


def switched(model: Any) -> Iterator[tuple[str, str, Match]]:
    """(class, switches as "name=value", match) of each module that the model lacks and a switched config has.

    Each field is switched alone, and those that one class of the file reads also together. A config that does not
    build is left out.
    """
    base = {own_use(module) for module in model.modules()}
    seen: set[Any] = set()
    for group in _groups(model):
        config = copy.deepcopy(model.config)
        try:
            told = ", ".join(f"{switch.name}={set_in(config, switch)!r}" for switch in group)
            variant = architectures.build(type(model), config)
        except Exception:  # a value that the model does not have
            continue
        names = frozenset(switch.name for switch in group)
        for module in variant.modules():
            use = own_use(module)
            mentioned = names & _words(type(module))  # type: ignore[arg-type]
            if (use in base and not mentioned) or (use, mentioned and told) in seen:
                continue
            seen.add((use, mentioned and told))
            yield type(module).__name__, told, match(module)


def _groups(model: Any) -> list[tuple[Switch, ...]]:
    """The switches to try, each alone, then the first of each field that one class of the file reads."""
    found = _switches(model)
    groups: dict[tuple[Switch, ...], None] = dict.fromkeys((switch,) for switch in found)
    first = {switch.name: switch for switch in reversed(found)}
    for cls in vars(sys.modules[type(model).__module__]).values():
        if inspect.isclass(cls) and cls.__module__ == type(model).__module__:
            together = tuple(first[name] for name in sorted(first.keys() & _words(cls)))  # type: ignore[arg-type]
            groups[together] = None
    return [group for group in groups if group]


def _switches(model: Any) -> list[Switch]:
    """The switches that the file of the model reads, in the order of their names."""
    read = _read(type(model).__module__)
    found: list[Switch] = []
    for part in architectures.parts(model.config):
        for name in sorted(read.names):
            value = getattr(part, name, _ABSENT)
            if _OTHER.match(name):
                continue
            if _is_flag(value) or (value is None and hasattr(part.sub_configs.get(name), "to_dict")):
                found.append(Switch(name))
            elif value is None or isinstance(value, str) or _all(value, str):
                members = tuple(sorted(read.members.get(name, ())))
                found += [Switch(name, members)] if members else []
                found += [
                    Switch(name, other) for other in sorted(read.choices.get(name, ())) if other != value
                ]
    own = architectures.parts(model.config)
    absent = {
        name: not value for name, value in read.defaults.items() if not any(hasattr(p, name) for p in own)
    }
    found += [Switch(name, value) for name, value in sorted(absent.items()) if not _OTHER.match(name)]
    return list(dict.fromkeys(found))


def set_in(config: Any, switch: Switch) -> Any:
    """Set a switch in each part of a config that has its field, or in all if none has it; the value that was set."""
    parts = architectures.parts(config)
    told: Any = switch.value
    for part in [part for part in parts if hasattr(part, switch.name)] or parts:
        before: Any = getattr(part, switch.name, None)
        value: Any = switch.value
        if isinstance(before, bool):
            value = not before
        elif _is_flag(before):
            value = [not flag for flag in before]
        elif value is None and before is None:
            value = part.sub_configs[switch.name]()
        elif isinstance(value, tuple):
            value = list(value)
        elif isinstance(before, (list, tuple)):
            value = [value] * len(before)
        setattr(part, switch.name, value)
        told = type(value).__name__ if hasattr(value, "to_dict") else value
    return told


_ABSENT = object()


def _is_flag(value: Any) -> bool:
    return isinstance(value, bool) or _all(value, bool)


def _all(value: Any, kind: type) -> bool:
    return isinstance(value, (list, tuple)) and bool(value) and all(isinstance(item, kind) for item in value)


@cache
def _words(cls: type) -> frozenset[str]:
    """The names in the source of a class and of those that it inherits from in models of transformers."""
    sources = (
        inspect.getsource(base) for base in cls.__mro__ if base.__module__.startswith("transformers.models.")
    )
    return frozenset(word for source in sources for word in re.findall(r"\w+", source))


@dataclass
class _Read:
    """Fields that a file reads of configs, and how it uses them.

    names      fields; defaults: {field: default} of flags that it reads with getattr
    choices    {field: strings that it is compared with}; members: {field: strings that it may contain}
    """

    names: set[str]
    defaults: dict[str, bool]
    choices: dict[str, set[str]]
    members: dict[str, set[str]]


@cache
def _read(module: str) -> _Read:
    read = _Read(set(), {}, {}, {})
    for node in ast.walk(ast.parse(inspect.getsource(sys.modules[module]))):
        match node:
            case ast.Attribute(value=base, attr=name) if _is_config(base):
                read.names.add(name)
            case ast.Call(func=ast.Name(id="getattr"), args=[base, ast.Constant(value=str(name)), *default]):
                if _is_config(base):
                    read.names.add(name)
                    if (
                        default
                        and isinstance(default[0], ast.Constant)
                        and isinstance(default[0].value, bool)
                    ):
                        read.defaults[name] = default[0].value
            case ast.Compare(left=ast.Constant(value=str(one)), ops=[ast.In() | ast.NotIn()],
                             comparators=[ast.Attribute(attr=name)]):  # fmt: skip
                read.members.setdefault(name, set()).add(one)
            case ast.Compare(left=ast.Attribute(attr=name), comparators=[other]):
                strings = [item.value for item in ast.walk(other) if isinstance(item, ast.Constant)]
                read.choices.setdefault(name, set()).update(s for s in strings if isinstance(s, str))
            case _:
                pass
    return read


def _is_config(node: ast.expr) -> bool:
    """Whether an expression is a config by its name: config, self.config, config.text_config."""
    return ast.unparse(node).endswith("config")
