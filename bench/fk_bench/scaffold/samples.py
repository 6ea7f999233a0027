"""Descriptions of one architecture under many configs: the given one, and copies in which one field differs."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

from fk_integrations.transformers import tiny_models
from fk_integrations.transformers.decoder_roles import NotObserved, Observed, Unexplained, observe

from fastkernels.models.common.descriptions import description as d

NORMS = ("before_attention", "after_attention", "before_mlp", "after_mlp")
MLP = ("gate_proj", "up_proj", "gate_up_proj", "down_proj")
TOLERANCE = 1e-3  # relative, of numbers that are measured


@dataclass(frozen=True)
class Sample:
    """A config and the description that its model shows. field: the one that differs from the given config."""

    config: Any
    decoder: d.Decoder
    field: str = ""

    @cached_property
    def fields(self) -> dict[str, Any]:
        """The config's fields that describe the model."""
        return tiny_models.fields(self.config)


@dataclass
class Samples:
    """all: every config, the given one first.

    refused  {field: the only value under which the model can be described}
    aliases  {name of a norm in the checkpoints of some configs: its usual name}, where configs differ in it
    """

    base: Observed
    all: list[Sample]
    refused: dict[str, Any]
    aliases: dict[str, str] = field(default_factory=dict)

    @property
    def config(self) -> Any:
        return self.all[0].config

    @property
    def sizes(self) -> set[str]:
        """The fields whose values in the samples are not those of the real model."""
        names = getattr(self.config, "attribute_map", {})
        return {names.get(name, name) for name in (*tiny_models.SIZES, "num_hidden_layers")}

    def drop(self, fields: set[str]) -> bool:
        """Leave out the samples of these fields: the model file then refuses other values of them.

        Returns False where that is not possible: the given config itself, and sizes, cannot be left out.
        """
        free = fields - self.sizes - {""}
        for name in free:
            self.refused[name] = tiny_models.fields(self.config)[name]
        self.all = [s for s in self.all if s.field not in free]
        return bool(free)


def collect(config: Any) -> Samples:
    """Observe a small copy of the model, and one for each field of the config. Raises NoReference, Unexplained."""
    small = tiny_models.shrunk(config)
    small, model = _built(small)
    try:
        base = observe(model, small)
    except Unexplained:
        raise
    except Exception as error:  # sizes that do not fit: this layout may need as many key heads as query heads
        others = [tiny_models.changed(small, **more) for more in tiny_models.with_all_keys(small, {})]
        try:
            if not others:
                raise
            small, model = _built(others[0])
            base = observe(model, small)
        except (Unexplained, tiny_models.NoReference):
            raise
        except Exception:
            why = " ".join(f"{type(error).__name__}: {error}".split())[:200]
            raise NotObserved("", f"a copy with small sizes does not run: {why}") from error
    keys = tiny_models.checkpoint_names(model)
    aliases = _norm_names(base, keys)
    base.names.update(_stored(base.names, keys))
    made = Samples(base, [Sample(small, normal(base.decoder))], {}, aliases)
    tried, seen, unexplained, follows = set[str](), set[str](), set[str](), set[str]()
    for name, changes in tiny_models.perturbations(small):
        for change in changes:
            try:
                other = tiny_models.changed(small, **change)
                model = tiny_models.build(other)
            except Exception:  # the class of the config or of the model does not take this value
                continue
            try:
                found = observe(model, other)
            except Unexplained:
                unexplained.add(name)
                continue
            except Exception:  # the model fails when it runs: sizes that do not fit
                continue
            tried.add(name)
            made.all.append(Sample(other, normal(found.decoder), name))
            fields = made.all[-1].fields.items()
            follows |= {n for n, v in fields if n not in change and v != made.all[0].fields.get(n)}
            base.names.update({role: path for role, path in found.names.items() if role not in base.names})
            if not equal(made.all[-1].decoder, made.all[0].decoder):
                seen.add(name)
                if not isinstance(change[name], list):
                    break
    # A field that the model reads, and that changed nothing at the values tried, may change something at others.
    # A field that the config's class sets itself, when another one changes, is no field to refuse.
    unknown = unexplained | ((tried & tiny_models.fields_read(small)) - follows)
    for name in sorted(unknown - seen - made.sizes):
        made.refused[name] = tiny_models.fields(small)[name]
    made.all = [s for s in made.all if s.field not in made.refused]
    _unify(made)
    names = expert_names(base.names)
    made.all = [replace(s, decoder=_with_expert_names(s.decoder, names)) for s in made.all]
    if any(name.startswith(f"{block(base.names)}.") for role, name in base.names.items() if role in MLP):
        made.all = [replace(s, decoder=_with_block(s.decoder, block(base.names))) for s in made.all]
    return made


def block(names: Mapping[str, str]) -> str:
    """The name of the block with the router and the experts in a layer; '' if no layer has any."""
    return names.get("experts", "").rpartition(".")[0]


def _with_block(decoder: d.Decoder, name: str) -> d.Decoder:
    """The description in which MLPs have the name of the block with experts, as their modules do."""
    if name == "mlp":
        return decoder
    named = (replace(x, names={**x.names, "mlp": name}) if x.mlp is not None else x for x in decoder.layers)
    return replace(decoder, layers=tuple(named))


def expert_names(names: dict[str, str]) -> tuple[str, str, str]:
    """The names of an expert's gate, up and down projection in checkpoints."""
    gate, up, down = d.Experts.names
    return names.get("expert_gate", gate), names.get("expert_up", up), names.get("expert_down", down)


def _with_expert_names(decoder: d.Decoder, names: tuple[str, str, str]) -> d.Decoder:
    def named(layer: d.Layer) -> d.Layer:
        mlp = layer.mlp
        return replace(layer, mlp=replace(mlp, names=names)) if isinstance(mlp, d.Experts) else layer

    return replace(decoder, layers=tuple(map(named, decoder.layers)))


def _unify(made: Samples) -> None:
    """Give norms that are named differently under some configs their usual names."""
    found: dict[str, set[str]] = {}
    for sample in made.all:
        for layer in sample.decoder.layers:
            for part in NORMS:
                if getattr(layer, part) is not None:
                    found.setdefault(part, set()).add(layer.name(part))
    for part, names in found.items():
        if len(names) < 2:
            continue
        usual = d.NAMES.get(part, part)
        made.aliases |= {name: usual for name in sorted(names) if name != usual}
        made.all = [
            replace(s, decoder=replace(s.decoder, layers=tuple(_unnamed(x, part) for x in s.decoder.layers)))
            for s in made.all
        ]


def _unnamed(layer: d.Layer, part: str) -> d.Layer:
    return replace(layer, names={p: n for p, n in layer.names.items() if p != part})


def _built(small: Any) -> tuple[Any, Any]:
    """(config, model). Raises NoReference."""
    try:
        tiny_models.check_size(small)
        return small, tiny_models.build(small)
    except tiny_models.NoReference:
        raise
    except Exception as error:  # of any class of transformers
        why = " ".join(f"{type(error).__name__}: {error}".split())[:300]
        try:
            full = tiny_models.completed(small)
            tiny_models.check_size(full)
            return full, tiny_models.build(full)
        except Exception:
            raise tiny_models.NoReference(
                f"transformers cannot build the model of this config: {why}"
            ) from error


def _stored(names: dict[str, str], keys: dict[str, str]) -> dict[str, str]:
    """The same roles with the names that checkpoints use."""
    found, stack, count = {}, names["layers"], tiny_models.LAYERS
    for role, name in names.items():
        if role in ("embedding", "positions", "norm", "head"):
            found[role] = keys.get(f"{name}.weight", f"{name}.weight").removesuffix(".weight")
        elif role == "experts":
            found[role] = name
            stacks = ((f"{name}.gate_up_proj", "experts_w13"), (f"{name}.down_proj", "experts_w2"))
            for own, part in stacks:  # one tensor of all experts, where the checkpoint has one
                key = next((k for i in range(count) if (k := keys.get(f"{stack}.{i}.{own}"))), "")
                if key:
                    found[part] = re.sub(r"^.*?\.\d+\.", "", key.removeprefix(stack))
            found |= _each_expert(name, stack, keys)
        elif role != "layers" and (pieces := _in_pieces(f"{name}.weight", stack, keys)):
            above = role.rpartition(".")[0]
            found |= {f"{above}.{piece.rpartition('.')[2]}": piece for piece in pieces}
        elif role != "layers":
            own, at = next(
                (
                    (own, i)
                    for own in (f"{name}.weight", name)  # of a module, or a tensor of the layer's part itself
                    for i in range(count)
                    if f"{stack}.{i}.{own}" in keys
                ),
                (f"{name}.weight", 0),
            )
            key = keys.get(f"{stack}.{at}.{own}", f"{stack}.{at}.{own}")
            found["layers"], _, rest = key.partition(f".{at}.")
            found[role] = rest.removesuffix(".weight")
    return found


def _in_pieces(name: str, stack: str, keys: dict[str, str]) -> list[str]:
    """The names of the modules of a layer that a checkpoint has for one, relative to the layer."""
    for i in range(tiny_models.LAYERS):
        pieces = [key for j in range(3) if (key := keys.get(f"{stack}.{i}.{name}.{j}"))]
        if pieces:
            return [key.partition(f".{i}.")[2].removesuffix(".weight") for key in pieces]
    return []


def _norm_names(base: Observed, keys: dict[str, str]) -> dict[str, str]:
    """{name in the checkpoint: name of the module} of the layers' norms whose names differ."""
    found: dict[str, str] = {}
    for i, layer in enumerate(base.decoder.layers):
        for part in NORMS:
            module = f"{base.names['layers']}.{i}.{layer.name(part)}.weight"
            key = keys.get(module, module).partition(f".{i}.")[2].removesuffix(".weight")
            if getattr(layer, part) is not None and key != layer.name(part):
                found[key] = layer.name(part)
    return found


def _each_expert(name: str, stack: str, keys: dict[str, str]) -> dict[str, str]:
    """Names of the list of experts, and of an expert's projections, in checkpoints with matrices for each expert."""
    found: dict[str, str] = {}
    parts = (
        ("gate_up_proj.0.gate", "expert_gate"),
        ("gate_up_proj.0.up", "expert_up"),
        ("down_proj.0", "expert_down"),
    )
    for own, role in parts:
        of_layers = (keys.get(f"{stack}.{i}.{name}.{own}") for i in range(tiny_models.LAYERS))
        match = re.search(r"\.\d+\.(.+)\.0\.(\w+)\.weight$", next(filter(None, of_layers), ""))
        if match:
            found |= {"experts_list": match[1], role: match[2]}
    return found


def normal(decoder: d.Decoder) -> d.Decoder:
    """The description without choices that change nothing: the default scale as a number, no style without rope."""
    layers = []
    for layer in decoder.layers:
        a = layer.attention
        if isinstance(a, d.Attention):
            scale = a.head_size**-0.5 if a.scale is None else a.scale
            interleaved, by_head = a.interleaved and a.rope is not None, a.by_head and a.kv_heads > 1
            a = replace(a, scale=scale, interleaved=interleaved, by_head=by_head)
        names = {part: name for part, name in layer.names.items() if getattr(layer, part, True) is not None}
        layers.append(replace(layer, attention=a, names=names))
    return replace(decoder, layers=tuple(layers), tied=bool(decoder.tied))


def equal(a: Any, b: Any) -> bool:
    """Whether two values of a description are equal, numbers within TOLERANCE."""
    if isinstance(a, bool) or isinstance(b, bool):
        return bool(a) == bool(b) if a is not None and b is not None else a is b
    if isinstance(a, (int, float)) and isinstance(b, (int, float)):
        return abs(a - b) <= TOLERANCE * max(abs(a), abs(b))
    if isinstance(a, (tuple, list)) and isinstance(b, (tuple, list)):
        return len(a) == len(b) and all(map(equal, a, b))
    if hasattr(a, "__dataclass_fields__"):
        return type(a) is type(b) and all(equal(getattr(a, n), getattr(b, n)) for n in a.__dataclass_fields__)
    return bool(a == b)
