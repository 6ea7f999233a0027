"""transformers' own module for a block of a model: the judge's baseline of levels 2 and 3.

The module is found at the block's place in transformers' model of the same config, and runs on the block's own weights
and KV cache. It takes all tokens of a step as one row, as transformers' continuous batching does; transformers'
attention functions run for each group of sequences with equally many queries.
"""

from __future__ import annotations

import copy
import inspect
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache, partial
from itertools import groupby, pairwise
from typing import Any

import torch
from torch import nn

from fastkernels.core import registry
from fastkernels.core.baseline import Baseline, inductor_compiled, refusing
from fastkernels.models.common.checkpoints.weights import packed_parts
from fastkernels.models.common.configs import shrunk
from fastkernels.models.common.descriptions.registry import find
from fastkernels.models.common.plans import block_tasks
from fastkernels.models.common.plans.blocks import Block, caches_of, states_of
from fk_integrations.transformers.tiny_models import quiet

HOST = "transformers"
ATTENTION = "fastkernels_step"  # the name of `_attend` among transformers' attention functions
# Inputs of a module that are left out
ABSENT = ("attention_mask", "cache", "past_key_values", "cache_position", "use_cache", "output_attentions")
EXPERTS = {"gate_up_proj": "w13_weight", "down_proj": "w2_weight"}  # stacked, as ours
# Parts of the paths in transformers' classes that its checkpoints, which our names follow, have otherwise
RENAMED = ((".mlp.", ".block_sparse_moe."), (".router.weight.", ".router.layer.weight."))
FEW = 64  # most tokens whose experts' matrices are copied for a batched product


class NoModule(ValueError):
    """transformers has no module that computes a block; the message says why."""


def baselines(name: str) -> tuple[Baseline, ...]:
    """The baselines of a block. `make` of each returns build(args) -> call, as OpSpec.build does.

    If there is no such module, the one baseline refuses every call with the reason.
    """
    block = block_tasks.block(name)
    try:
        found = _checked(block)
    except NoModule as error:
        return (refusing(HOST, str(error)),)
    named, made = f"{HOST} {found.cls.__name__}", []
    for experts in ("grouped_mm", "batched_mm") if found.experts else ("",):
        refuses = partial(_few, block) if experts == "batched_mm" else None
        detail = f", {experts}" if experts else ""
        for kind in ("host", "compiler"):
            name = f"{named}{detail}{', compiled' if kind == 'compiler' else ''}"
            make = partial(_builder, block, experts, kind == "compiler")
            made.append(Baseline(name, kind, make, (HOST,), ("cuda", "cpu"), refuses))
    return tuple(made)


def _few(block: Block, *args: Any) -> str | None:
    tokens = len(args[0])
    return f"it copies the matrices of each token's experts: at most {FEW} tokens" if tokens > FEW else None


# -- the module and its weights


@dataclass(frozen=True)
class HostModule:
    """A module of transformers on device 'meta'.

    names    {its parameter or buffer: (the block's parameter, first row, rows; None: all)}
    rotary   (class, config, arguments after the positions) of the model's rotary embedding, which gives the module
             its position_embeddings
    takes    the parameters of its `forward`; absent: those of them that must be given, and are None
    experts  whether it has stacked experts, which transformers multiplies in several ways
    """

    module: nn.Module
    names: Mapping[str, tuple[str, int, int | None]]
    rotary: tuple[type, Any, tuple[Any, ...]] | None
    takes: tuple[str, ...]
    absent: tuple[str, ...]
    experts: bool

    @property
    def cls(self) -> type:
        return type(self.module)


@lru_cache(maxsize=8)
def _host_module(block: Block, small: bool, experts: str = "") -> HostModule:
    """Raises NoModule."""
    model, config = _model(block, small, experts)
    path, ours = block.paths[0], block.module(small)
    arch = find(config.architectures[0]).arch
    module = _at(model, path, arch.checkpoint_key(path), *_renamed(path, back=True))
    if module is None:
        raise NoModule(f"{type(model).__name__} has no module {path}")
    parameters = inspect.signature(module.forward).parameters.values()
    takes = tuple(p.name for p in parameters if p.kind is not p.VAR_KEYWORD)
    needed = [p.name for p in parameters if p.name in takes[1:] and p.default is p.empty]
    if unknown := set(needed) - {"position_ids", "position_embeddings", *ABSENT}:
        raise NoModule(
            f"{type(module).__name__}.forward takes {', '.join(sorted(unknown))}, which a step does not give"
        )
    rotary = _rotary(model, config, path) if "position_embeddings" in takes else None
    stacked = any(hasattr(m, "gate_up_proj") and hasattr(m, "is_transposed") for m in module.modules())
    absent = tuple(n for n in needed if n in ABSENT)
    return HostModule(module, _names(module, ours, path, arch), rotary, takes, absent, stacked)


@lru_cache(maxsize=2)
def _model(block: Block, small: bool, experts: str) -> tuple[nn.Module, Any]:
    """transformers' model of a block's model on device 'meta', and its config."""
    import transformers
    from transformers import AttentionInterface, AutoConfig

    quiet()
    AttentionInterface.register(ATTENTION, _attend)
    given = shrunk.fields(block.structure(small).config)
    rest = {k: v for k, v in given.items() if k not in ("model_type", "architectures", "dtype")}
    try:
        config = AutoConfig.for_model(given["model_type"], **rest)
        cls = getattr(transformers, given["architectures"][0])
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise NoModule(f"transformers has no {given['architectures'][0]}: {error}") from error
    config.architectures = given["architectures"]
    config._attn_implementation = ATTENTION
    if experts:
        config._experts_implementation = experts
    dtype = torch.float32 if small else torch.bfloat16
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        with torch.device("meta"):
            return cls(config).eval().requires_grad_(False), config
    except (AttributeError, ImportError, NotImplementedError, TypeError, ValueError) as error:
        raise NoModule(f"{cls.__name__} cannot be built: {' '.join(str(error).split())[:160]}") from error
    finally:
        torch.set_default_dtype(before)


def _renamed(path: str, back: bool = False) -> list[str]:
    """The path with transformers' names of parts replaced by those of its checkpoints, or back."""
    pairs = [pair[::-1] for pair in RENAMED] if back else RENAMED
    return [f".{path}.".replace(a, b)[1:-1] for a, b in pairs if a in f".{path}."]


def _at(model: nn.Module, *paths: str) -> nn.Module | None:
    """The module at the first of these paths that exists, also with or without a 'model.' before it."""
    for path in (*paths, *(p.removeprefix("model.") for p in paths), *(f"model.{p}" for p in paths)):
        try:
            return model.get_submodule(path)
        except AttributeError:
            continue
    return None


def _rotary(model: nn.Module, config: Any, path: str) -> tuple[type, Any, tuple[Any, ...]]:
    found = next((m for name, m in model.named_modules() if name.rpartition(".")[2] == "rotary_emb"), None)
    if found is None:
        raise NoModule(f"{type(model).__name__} has no rotary_emb to make position_embeddings")
    more: tuple[Any, ...] = ()
    if "layer_type" in inspect.signature(found.forward).parameters:
        number = next(int(part) for part in path.split(".") if part.isdigit())
        more = (config.layer_types[number],)
    return type(found), getattr(found, "config", config), more


def _names(
    module: nn.Module, ours: nn.Module, path: str, arch: Any
) -> dict[str, tuple[str, int, int | None]]:
    """Where the values of the module's parameters are in the block's. Raises NoModule."""
    own, packed = {n: tuple(p.shape) for n, p in ours.named_parameters()}, packed_parts(arch.packed)
    order = {theirs: i for parts in arch.packed.values() for i, theirs in enumerate(parts)}
    shapes = {n: tuple(t.shape) for n, t in module.state_dict().items()}
    found: dict[str, tuple[str, int, int | None]] = {}
    parts: dict[str, list[tuple[int, str]]] = {}
    for name in shapes:
        whole = f"{path}.{name}"
        for key in (arch.own_key(k).removeprefix(f"{path}.") for k in (whole, *_renamed(whole))):
            head, _, last = key.rpartition(".")
            above, _, part = head.rpartition(".")
            stacked = f"{head}.{EXPERTS.get(last, last)}"
            into = f"{above}.{packed[part][0]}.{last}".removeprefix(".") if part in packed else ""
            if key in own or stacked in own:
                found[name] = (key if key in own else stacked), 0, None
                break
            if into in own:
                parts.setdefault(into, []).append((order[part], name))
                break
        else:
            raise NoModule(f"{type(module).__name__}.{name} has no counterpart among the block's weights")
    for into, names in parts.items():
        row = 0
        for _, name in sorted(names):
            found[name] = into, row, shapes[name][0]
            row += shapes[name][0]
        if row != own[into][0]:
            raise NoModule(f"{into} has {own[into][0]} rows, and transformers' parts of it {row}")
    for name, (into, _, rows) in found.items():
        shape = own[into] if rows is None else (rows, *own[into][1:])
        if shape != shapes[name]:
            raise NoModule(f"{name} is {shapes[name]} in transformers, and {shape} in the block")
    if unused := sorted(set(own) - {into for into, _, _ in found.values()}):
        raise NoModule(f"{type(module).__name__} does not have the block's {', '.join(unused[:3])}")
    return found


# -- calls


@dataclass(frozen=True)
class Places:
    """The tensors of a layer that are what the block returns, by transformers' name of the layer's part.

    out       the parts whose results add up to the block's first output; none: the layer's own result
    residual  the part whose input is the second output; '': the layer's input; None: there is no second output
    """

    out: tuple[str, ...] = ()
    residual: str | None = None


class Call:
    """A module of transformers around the arguments of a block. Called, it returns what the block's reference does."""

    def __init__(self, block: Block, host: HostModule, args: Sequence[Any], places: Places) -> None:
        arguments = registry.get(block.name).arguments
        given = dict(zip((a.name for a in arguments), args, strict=True))
        self.inputs = [
            given[n] for n in block_tasks.inputs_of(block) if n in ("hidden", "hidden_states", "x")
        ]
        self.residual = given.get("residual")
        self.places, self.seen = places, dict[str, tuple[torch.Tensor, torch.Tensor]]()
        self.caches = [given[n] for n in given if n.startswith("cache_")]
        self.module = copy.deepcopy(host.module)
        for name, (into, row, rows) in host.names.items():
            _put(self.module, name, given[into] if rows is None else given[into][row : row + rows])
        if missing := [n for n, b in self.module.named_buffers() if b.is_meta]:
            raise NoModule(f"{host.cls.__name__} keeps {missing[0]}, which is no weight")
        self.kwargs: dict[str, Any] = dict.fromkeys(host.absent)
        positions = given.get("positions")
        if positions is not None:
            positions = positions[None]
            self.kwargs |= {"position_ids": positions} if "position_ids" in host.takes else {}
        if host.rotary is not None:
            cls, config, more = host.rotary
            if positions is None:
                raise NoModule(f"{host.cls.__name__} needs positions, which the block does not take")
            # A model makes this table once a step for all of its layers, so it is not in a layer's time.
            with torch.device(self.inputs[0].device):
                made = cls(config=config)
            self.kwargs["position_embeddings"] = made(self.inputs[0][None], positions, *more)
        for part in (*places.out, *([places.residual] if places.residual else [])):
            self.module.get_submodule(part).register_forward_hook(partial(self._note, part), with_kwargs=True)
        self.step = Step(block, given, self.caches) if "slot_mapping" in given else None
        for m in self.module.modules():
            m.__dict__["fastkernels_step"] = self.step

    def _note(self, part: str, module: Any, args: Any, kwargs: Any, result: Any) -> None:
        self.seen[part] = _first((*args, *kwargs.values())), _first(result)

    def stream(self) -> torch.Tensor:
        """[T, H]: what enters a layer of transformers."""
        return self.inputs[0] if self.residual is None else self.inputs[0] + self.residual

    def __call__(self) -> tuple[torch.Tensor, ...]:
        x = self.stream()
        done = _first(self.module(x[None], **self.kwargs))
        seen = dict(self.seen)
        self.seen.clear()  # what a compiler sees of it at the start of a call must not change
        if self.places.out:
            done = seen[self.places.out[0]][1]
            for part in self.places.out[1:]:
                done = done + seen[part][1]
        outputs = [done.reshape(x.shape[0], -1)]
        if self.places.residual is not None:
            stream = seen[self.places.residual][0] if self.places.residual else x
            outputs.append(stream.reshape(x.shape))
        return (*outputs, *self.caches)


def _put(module: nn.Module, name: str, tensor: torch.Tensor) -> None:
    owner, _, last = name.rpartition(".")
    holder = module.get_submodule(owner)
    if last in holder._parameters:
        holder._parameters[last] = nn.Parameter(tensor, False)
    else:
        holder._buffers[last] = tensor


def _first(result: Any) -> torch.Tensor:
    found = result[0] if isinstance(result, (tuple, list)) else result
    assert isinstance(found, torch.Tensor), type(found)
    return found


def _builder(block: Block, experts: str, compiled: bool) -> Callable[[Sequence[Any]], Callable[[], Any]]:
    """A baseline's `make`."""
    places = _places(block)

    def build(args: Sequence[Any]) -> Callable[[], Any]:
        given = dict(zip((a.name for a in registry.get(block.name).arguments), args, strict=True))
        host = _host_module(block, block_tasks.is_small(block, given), experts)
        call = Call(block, host, args, places)
        return inductor_compiled(call.__call__) if compiled else call

    return build


@lru_cache(maxsize=32)
def _checked(block: Block) -> HostModule:
    """transformers' module of the full size, if that of the small model computes the block. Raises NoModule."""
    _places(block)
    return _host_module(block, False)


@lru_cache(maxsize=32)
def _places(block: Block) -> Places:
    """Where the block's outputs are in transformers' layer, found by values in a small call. Raises NoModule."""
    spec = registry.get(block.name)
    if block.kind == "model":
        raise NoModule("a whole model is measured in an engine")
    if states_of(block.module(False)):
        raise NoModule("transformers keeps the states of recurrent layers in a cache of its own")
    case = [c for c in spec.cases if "odd" in c.tags][-1]
    args = spec.inputs(case, "cpu", torch.Generator().manual_seed(0))
    wide = [
        a.double() if isinstance(a, torch.Tensor) and a.is_floating_point() else copy.copy(a) for a in args
    ]
    want = spec.reference(*wide)
    wanted = list(want[: len(want) - sum(a.name.startswith("cache_") for a in spec.arguments)])
    host = _host_module(block, True)
    call = Call(block, host, [a.clone() if isinstance(a, torch.Tensor) else a for a in args], Places())
    seen: list[tuple[str, torch.Tensor, torch.Tensor]] = []

    def note(part: str, module: Any, given: Any, kwargs: Any, result: Any) -> None:
        seen.append((part, _first((*given, *kwargs.values())).clone(), _first(result).clone()))

    for part, child in call.module.named_children():
        child.register_forward_hook(partial(note, part), with_kwargs=True)
    name = host.cls.__name__
    try:
        with torch.no_grad():
            got = call()
    except (AttributeError, IndexError, KeyError, RuntimeError, TypeError, ValueError) as error:
        raise NoModule(f"{name} does not run on a step: {' '.join(str(error).split())[:160]}") from error
    if call.step is not None and not call.step.used:
        raise NoModule(f"the attention of {name} calls none of transformers' attention functions")
    for i, (a, b) in enumerate(zip(got[1:], want[len(wanted) :], strict=True)):
        if not _equal(a, b):
            raise NoModule(f"{name} stores {'keys' if i == 0 else 'values'} that differ from the block's")
    if len(wanted) == 1:
        if not _equal(got[0], wanted[0]):
            raise NoModule(f"{name} computes other values than the block: {_distance(got[0], wanted[0])}")
        return Places()
    singles = [(part,) for part, _, _ in seen]
    pairs = [(a[0], b[0]) for i, a in enumerate(seen) for b in seen[i + 1 :]]
    results = {part: result for part, _, result in seen}
    for parts in (*reversed(singles), *reversed(pairs)):
        if _equal(sum(results[part] for part in parts), wanted[0]):
            break
    else:
        raise NoModule(f"no part of {name} has the block's result")
    inputs = {"": call.stream(), **{part: given for part, given, _ in seen}}
    residual = next((part for part, given in inputs.items() if _equal(given, wanted[1])), None)
    if residual is None:
        raise NoModule(f"no part of {name} reads the block's residual stream")
    return Places(parts, residual)


def _equal(a: Any, b: torch.Tensor) -> bool:
    return bool(
        a.numel() == b.numel() and torch.allclose(a.reshape(b.shape).double(), b, rtol=1e-3, atol=1e-4)
    )


def _distance(a: torch.Tensor, b: torch.Tensor) -> str:
    if a.numel() != b.numel():
        return f"shape {tuple(a.shape)} instead of {tuple(b.shape)}"
    return f"they differ by up to {float((a.reshape(b.shape) - b).abs().max()):.2g}"


# -- attention


@dataclass(frozen=True)
class Group:
    """Sequences with equally many queries.

    rows   of the step's tokens
    keys   the most keys of a sequence; new: all keys are those of this step
    mask   [sequences, 1, queries, keys], True where a query sees a key; None: causal, or all keys
    """

    rows: slice
    sequences: slice
    count: int
    queries: int
    keys: int
    new: bool
    mask: torch.Tensor | None
    causal: bool


class Step:
    """The sequences of a step in a block's attention layer. Their lengths are those of the call that is built."""

    def __init__(self, block: Block, given: Mapping[str, Any], caches: Sequence[torch.Tensor]) -> None:
        self.slots, self.table, self.caches = given["slot_mapping"], given["block_table"], caches
        starts, lens = given["cu_seqlens_q"].tolist(), given["seq_lens"].tolist()
        if starts[-1] != len(self.slots):
            raise NoModule("the step is padded")
        if caches and (len(caches) != 2 or caches[0].dim() != 4):
            raise NoModule("transformers keeps keys and values, and the block's cache has another form")
        small = block_tasks.is_small(block, given)
        layer = next(iter(caches_of(block.module(small)).values()), None)
        self.window = getattr(layer, "window_left", -1)
        self.used = False
        queries = [b - a for a, b in pairwise(starts)]
        self.groups, first = [], 0
        for n, found in groupby(queries):
            last = first + len(list(found))
            if n:
                self.groups.append(self._group(n, slice(first, last), starts, lens[first:last]))
            first = last

    def _group(self, n: int, sequences: slice, starts: Sequence[int], lens: list[int]) -> Group:
        rows, most, device = (
            slice(starts[sequences.start], starts[sequences.stop]),
            max(lens),
            self.slots.device,
        )
        new, causal = all(k == n for k in lens), bool(self.caches)
        seen = self.window < 0 or most <= self.window + 1
        if not causal or (seen and (new or (n == 1 and min(lens) == most))):
            return Group(rows, sequences, len(lens), n, most, new, None, causal and n > 1)
        ends = torch.tensor(lens, device=device)[:, None, None]
        query = ends - n + torch.arange(n, device=device)[:, None]  # its position
        key = torch.arange(most, device=device)
        mask = (key <= query) & ((key >= query - self.window) if self.window >= 0 else True)
        return Group(rows, sequences, len(lens), n, most, new, mask[:, None], False)

    def attend(
        self, module: Any, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, **more: Any
    ) -> torch.Tensor:
        """q: [1, Hq, T, D]; k, v: [1, Hkv, T, D]. Returns [1, T, Hq, D] and stores the keys and values."""
        self.used = True
        for cache, fresh in zip(self.caches, (k, v), strict=False):
            cache.flatten(0, 1).index_copy_(0, self.slots, fresh[0].transpose(0, 1).to(cache.dtype))
        return torch.cat([self._of(g, module, q, k, v, more) for g in self.groups], dim=1)

    def _of(self, g: Group, module: Any, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, more: Any) -> Any:
        queries = self._split(g, q)
        if g.new:
            keys, values = self._split(g, k), self._split(g, v)
        else:
            keys, values = (self._cached(g, cache) for cache in self.caches)
        function, mask, causal = _function(module, more), g.mask, g.causal
        if function is not _sdpa():  # it takes sums, not booleans
            if mask is None and causal:
                mask = torch.ones(g.queries, g.keys, dtype=torch.bool, device=q.device).tril()[None, None]
            if mask is not None:
                least = torch.finfo(q.dtype).min
                mask = torch.zeros(mask.shape, dtype=q.dtype, device=q.device).masked_fill(~mask, least)
        else:
            more = {**more, "is_causal": causal}
        out, _ = function(module, queries, keys, values, mask, **more)
        return out.reshape(1, g.count * g.queries, *out.shape[2:])

    def _split(self, g: Group, x: torch.Tensor) -> torch.Tensor:
        """[1, H, T, D] to the group's [sequences, H, queries, D]."""
        return x[0, :, g.rows].unflatten(1, (g.count, g.queries)).transpose(0, 1)

    def _cached(self, g: Group, cache: torch.Tensor) -> torch.Tensor:
        blocks = self.table[g.sequences, : -(-g.keys // cache.shape[1])].long()
        return cache[blocks].flatten(1, 2)[:, : g.keys].transpose(1, 2)


def _sdpa() -> Any:
    from transformers.integrations.sdpa_attention import sdpa_attention_forward

    return sdpa_attention_forward


def _function(module: Any, more: Mapping[str, Any]) -> Any:
    """transformers' attention function: SDPA, or for caps and sinks the eager one of the model's file."""
    if more.get("softcap") is None and more.get("s_aux") is None:
        return _sdpa()
    return sys.modules[type(module).__module__].eager_attention_forward


def _attend(
    module: Any, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, attention_mask: Any = None, **more: Any
) -> tuple[torch.Tensor, None]:
    """An attention function of transformers, on a step's paged cache. The window is the block's."""
    more.pop("sliding_window", None)
    more.pop("position_ids", None)
    return module.fastkernels_step.attend(module, q, k, v, **more), None
