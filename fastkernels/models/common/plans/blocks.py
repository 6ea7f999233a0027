"""The blocks of a model: attention, MLP, mixture and layer of each kind, and the whole model.

A block is a module of our model, found in the model's structure: nothing is written for a model. block_tasks makes
them tasks for the judge.
"""

from __future__ import annotations

import inspect
import json
import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cached_property, lru_cache
from pathlib import Path
from typing import Any

import torch
from torch import nn

from fastkernels.core.layer_state import StateSpec
from fastkernels.models.common.configs import shrunk
from fastkernels.models.common.descriptions.description import Unsupported
from fastkernels.models.common.descriptions.registry import find
from fastkernels.models.common.interfaces.detector import Detector
from fastkernels.models.common.plans import build
from fastkernels.models.shaped_blocks import outputs, shaped

LEVELS = {
    "attention": 2, "cross_attention": 2, "merger": 2, "recurrence": 2, "mlp": 2, "mixture": 2, "conv_block": 2,
    "cross_net": 2, "pair_update": 2, "pair_block": 3, "encoder_layer": 3, "decoder_layer": 3,
    "diffusion_block": 3, "policy_block": 3, "model": 4,
}  # fmt: skip
# Parameters of `forward` that a step gives: {name: what it is}
INPUTS = {
    "positions": "positions", "hidden_states": "stream", "hidden": "stream", "x": "stream", "residual": "stream",
    "layer_input": "layer_input", "input_ids": "ids", "table": "table",
}  # fmt: skip
TOWERS = {"visual": "vision_", "audio": "audio_"}
DTYPES = {torch.bfloat16, torch.float32, torch.uint8}  # of weights; uint8: MXFP4


@dataclass(frozen=True)
class Made:
    """How a module of the model is built. args, kwargs: of its constructor, without other modules."""

    cls: type
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]

    @cached_property
    def key(self) -> str:
        """The same for modules that differ in nothing but their place."""
        return re.sub(r"\bmodel\.layers\.\d+", "", repr((self.cls, self.args, sorted(self.kwargs.items()))))


@dataclass(frozen=True)
class Structure:
    """A model on device 'meta', and how its blocks are built: {path: Made}."""

    config: Any
    model: nn.Module
    made: Mapping[str, Made]


@dataclass(frozen=True, eq=False)
class Block:
    """Modules of a model that differ in nothing but their place.

    name   MODEL.KIND, with the number of the first such layer where the model has several kinds
    paths  of all these modules; the first one is judged
    count  how often a step runs it
    """

    name: str
    kind: str
    paths: tuple[str, ...]
    full: Structure = field(repr=False)
    small: Structure = field(repr=False)

    @property
    def level(self) -> int:
        return LEVELS[self.kind]

    @property
    def count(self) -> int:
        return len(self.paths)

    @property
    def cls(self) -> type:
        return self.made(False).cls

    def structure(self, small: bool) -> Structure:
        return self.small if small else self.full

    def made(self, small: bool) -> Made:
        return self.structure(small).made[self.paths[0]]

    def module(self, small: bool) -> nn.Module:
        """The module on device 'meta'."""
        return self.structure(small).model.get_submodule(self.paths[0])


@dataclass(frozen=True)
class Blocks:
    """The blocks of a model. declined: {path of a block: why there is no task of it}."""

    model: str
    blocks: tuple[Block, ...]
    declined: Mapping[str, str]

    def __iter__(self) -> Iterator[Block]:
        return iter(self.blocks)


def text_of(name: str, config: Any) -> str:
    """A model as text, from which another process makes the same blocks. name: the first part of their names.

    Raises Unsupported.
    """
    if getattr(config, "preprocessing", None) is not None and not hasattr(config, "scale"):
        raise Unsupported(f"{name} has no block that can be judged: its configuration is one of timm's")
    return json.dumps({"name": name, "config": shrunk.fields(config)}, sort_keys=True, default=str)


@lru_cache(maxsize=4)
def of(text: str) -> Blocks:
    """The blocks of a model; see text_of. Raises Unsupported for a model that has none."""
    given = json.loads(text)
    config = shrunk.config_of(given["config"])
    full = _structure(config)
    reasons = {path: _unsupported(full, path) for path in full.made}
    if all(reasons.values()):
        raise Unsupported(f"{given['name']} has no block that can be judged: {_said(reasons)}")
    small = _structure(shrunk.config_of(shrunk.small(given["config"])))
    short = small
    if reasons[""] is None:
        short = _structure(shrunk.config_of(shrunk.short(given["config"], _needed(full))))
    groups: dict[tuple[str, str], list[str]] = {}
    declined: dict[str, str] = {}
    layers = _layers(full.model)
    for path, made in full.made.items():
        if not path:
            continue
        kind = _kind(full.model, layers, path)
        if path not in small.made:
            declined[path] = "the small model for checks on a CPU has no such module"
        elif (why := reasons[path]) is not None:
            declined[path] = why
        else:
            groups.setdefault((kind, made.key), []).append(path)
    for path in [p for p in declined if p not in small.made and reasons[p] is None]:
        if (of_kind := groups.get((_kind(full.model, layers, path), full.made[path].key))) is not None:
            of_kind.append(path)  # the small model has fewer of them
            del declined[path]
    kinds: dict[tuple[str, str], list[str]] = {}
    for (kind, _), paths in groups.items():
        kinds.setdefault((kind, of_tower(paths[0])), []).append(paths[0])
    name, blocks = given["name"], list[Block]()
    for (kind, _), paths in groups.items():
        firsts = kinds[kind, tower := of_tower(paths[0])]
        numbers = [_number(path) for path in firsts]
        if len({*numbers}) < len(numbers):  # lists of layers, whose numbers begin again
            numbers = list(map(str, range(len(numbers))))
        number = "" if len(firsts) == 1 else f"_{numbers[firsts.index(paths[0])]}"
        own = f"{name}.{tower}{kind}{number}"
        blocks.append(Block(own, kind, tuple(paths), full, small))
    if (why := reasons[""]) is None:
        blocks.append(Block(f"{name}.model", "model", ("",), short, short))
    else:
        declined["model"] = why
    if not blocks:
        raise Unsupported(f"{name} has no block that can be judged: {_said(declined)}")
    return Blocks(name, tuple(blocks), declined)


def _said(reasons: Mapping[str, str | None]) -> str:
    """The reasons of modules by their paths, each reason once: 'why (a, b); why else (the model)'."""
    paths: dict[str, list[str]] = {}
    for path, why in reasons.items():
        paths.setdefault(str(why), []).append(path or "the model")
    return "; ".join(f"{why} ({', '.join(found)})" for why, found in paths.items())


def of_tower(path: str) -> str:
    """The prefix of the names of blocks of a language model's tower; '' for other modules."""
    return TOWERS.get(path.partition(".")[0], "")


def _number(path: str) -> str:
    return next((part for part in path.split(".") if part.isdigit()), "0")


def _structure(config: Any) -> Structure:
    """The model on device 'meta', with the constructor's arguments of every block."""
    model = build.skeleton(Path(), config, torch.bfloat16)
    found = {path: model.get_submodule(path) for path in _paths(model)}
    noted: dict[int, tuple[tuple[Any, ...], dict[str, Any]]] = {}
    with _noting({type(m) for m in found.values()}, noted):
        model = build.skeleton(Path(), config, torch.bfloat16)
    made: dict[str, Made] = {}
    for path in found:
        module = model.get_submodule(path)
        args, kwargs = noted[id(module)]
        plain = tuple(None if isinstance(a, nn.Module) else a for a in args)
        kwargs = {k: None if isinstance(v, nn.Module) else v for k, v in kwargs.items()}
        made[path] = Made(type(module), plain, kwargs)
    return Structure(config, model, made)


@contextmanager
def _noting(classes: set[type], noted: dict[int, tuple[tuple[Any, ...], dict[str, Any]]]) -> Iterator[None]:
    """Note the constructor's arguments of all instances of these classes, by id."""
    before = [(cls, vars(cls).get("__init__")) for cls in classes]

    def wrapped(cls: type) -> Callable[..., None]:
        init: Any = cls.__init__  # type: ignore[misc]

        def __init__(self: Any, *args: Any, **kwargs: Any) -> None:
            if type(self) is cls:
                noted[id(self)] = args, kwargs
            init(self, *args, **kwargs)

        return __init__

    for cls in classes:
        cls.__init__ = wrapped(cls)  # type: ignore[misc]
    try:
        yield
    finally:
        for cls, init in before:
            if init is None:
                del cls.__init__  # type: ignore[misc]
            else:
                cls.__init__ = init  # type: ignore[misc]


def _layers(model: nn.Module) -> dict[str, nn.Module]:
    """{path: layer}: the members of the longest list of modules of one model."""
    lists = {path: m for path, m in model.named_modules() if isinstance(m, nn.ModuleList) and len(m)}
    lists = {path: m for path, m in lists.items() if not of_tower(path) or _parts(m[0])}  # not mergers
    nested = {p for p in lists for q in lists if p != q and p.startswith(f"{q}.")}
    return {f"{path}.{i}": m for path, ms in lists.items() if path not in nested for i, m in enumerate(ms)}


ATTENTION, MLP = ("self_attn", "attention", "attn", "self_attention"), ("mlp", "block_sparse_moe", "moe")


def _parts(layer: nn.Module) -> dict[str, str]:
    """{name of a module of the layer: kind}."""
    own = getattr(layer, "parts", None)  # a description may rename them
    cross = getattr(layer, "cross", None)
    attention, mlp = own if isinstance(own, tuple) else (None, None)
    found: dict[str, str] = {}
    for name, module in layer.named_children():
        if name == attention or (own is None and name in ATTENTION):
            found[name] = (
                "recurrence" if isinstance(getattr(module, "keeps", None), StateSpec) else "attention"
            )
        elif isinstance(cross, tuple) and name == cross[0]:
            found[name] = "cross_attention"
        elif name == mlp or (own is None and name in MLP):
            found[name] = "mixture" if _is_mixture(module) else "mlp"
    return found


def _is_mixture(module: nn.Module) -> bool:
    return any(name.rpartition(".")[2] == "experts" for name, _ in module.named_modules())


def _paths(model: nn.Module) -> list[str]:
    """The paths of all blocks, parts before the layer that has them, and last the model, ''."""
    found: list[str] = []
    for path, layer in _layers(model).items():
        found += [*(f"{path}.{name}" for name in _parts(layer)), path]
    found += [path for path, module in model.named_modules() if shaped(module)]
    return [*dict.fromkeys(found), ""]


def _kind(model: nn.Module, layers: dict[str, nn.Module], path: str) -> str:
    if (own := shaped(model.get_submodule(path))) is not None:
        return own.kind
    if path in layers:
        keeps = any(hasattr(m, "keeps") for m in layers[path].modules())
        return "decoder_layer" if keeps else "encoder_layer"
    layer, _, name = path.rpartition(".")
    return _parts(layers[layer])[name]


def _needed(full: Structure) -> int:
    """The number of first layers that have every kind of block."""
    keys: dict[tuple[str, str], int] = {}
    layers = _layers(full.model)
    for path, made in full.made.items():
        if path:
            keys.setdefault((_kind(full.model, layers, path), made.key), int(_number(path)))
    return max(keys.values(), default=0) + 1


def _unsupported(structure: Structure, path: str) -> str | None:
    """Why a module is no task, or None."""
    module, cls = structure.model.get_submodule(path), structure.made[path].cls
    if shaped(module) is not None:
        made = structure.made[path]
        given = [*made.args, *made.kwargs.values()]
        if any(a is None or (isinstance(a, list) and a and isinstance(a[0], nn.Module)) for a in given):
            return "its constructor takes other modules"
        try:
            outputs(module, False)
        except Exception as error:  # of code that reads values
            return f"the shapes of its outputs cannot be computed without values: {type(error).__name__}: {error}"
        return None
    if isinstance(structure.model, Detector):
        return "it reads images of several sizes, and no step of tokens"
    runner = find(structure.config.architectures[0]).arch.runner
    written = runner == "Speak" and path.startswith(
        "model."
    )  # by the language model, behind which others make sound
    if not written and runner not in ("Generate", "Encode", "Unmask"):
        return "its runner gives it other inputs than a step of tokens"
    if not path and find(structure.config.architectures[0]).arch.media:
        return "it reads images or audio, which no step of tokens gives"
    takes = [p for p in inspect.signature(cls.forward).parameters.values() if p.name != "self"]  # type: ignore[attr-defined]
    config = getattr(structure.config, "vision_config", structure.config)
    if not isinstance(getattr(config, "num_attention_heads", None), int) and not states_of(structure.model):
        return "its stages differ in width and read images, not tokens"
    tensors = ("torch.Tensor", "torch.Tensor | None")
    if unknown := [
        p.name
        for p in takes
        if p.default is p.empty and (p.name not in INPUTS or p.annotation not in tensors)
    ]:
        return f"{cls.__name__}.forward takes {', '.join(unknown)}, which no step of tokens gives"
    if any(type(m).__name__ == "SharedAttention" for m in module.modules()) and path:
        return "it reads the KV cache of another layer"
    if path and any(getattr(m, "v_lora", None) is not None for m in module.modules()):
        return "it reads the values of the first layer"
    indexers: list[Any] = [m for m in module.modules() if hasattr(m, "selection")]
    if path and any(m.described.indexer is not None and m.described.indexer.shared for m in indexers):
        return "it attends to the keys that another layer chose"
    if others := {p.dtype for p in module.parameters()} - DTYPES:
        return f"its weights are quantized: {', '.join(sorted(map(str, others)))}"
    return None


def caches_of(module: nn.Module) -> dict[str, Any]:
    """{path: attention layer with a KV cache}."""
    return {path: m for path, m in module.named_modules() if hasattr(m, "new_cache")}


def states_of(module: nn.Module) -> dict[str, Any]:
    """{path: layer that keeps a recurrent state}."""
    return {path: m for path, m in module.named_modules() if isinstance(getattr(m, "keeps", None), StateSpec)}
