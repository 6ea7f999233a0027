"""Read the description of a recurrent mixer off its recorded call.

The mixer's tensors get roles by their shapes, and are loaded into our layer of a possible description. The description
is accepted if this layer writes what was recorded.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, islice, pairwise, permutations, product
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from fastkernels.core.forward_context import AttentionMetadata, forward_context
from fastkernels.models.common.descriptions import description as d
from fastkernels.models.common.layers import state_layers
from fastkernels.models.common.layers.decoder import make_norm
from fk_integrations.transformers import decoder_probes as probe
from fk_integrations.transformers.decoder_probes import same
from fk_integrations.transformers.recording import ModuleCall, Recording
from fk_integrations.transformers.tiny_models import fields

ROLE = "mixer."  # before the name of a module or tensor in our layer
MOST = 64  # assignments of tensors to roles that are tried for one description
MIXER = "a convolution and a recurrence that no description expresses"
PROJECTIONS = {  # {GatedDelta.projections: names in our layer}
    (): ("in_proj_qkvz", "in_proj_ba"),
    (3, 1, 1, 1): ("in_proj_qkv", "in_proj_z", "in_proj_b", "in_proj_a"),
    (1, 1, 1, 1, 1, 1): ("in_proj_q", "in_proj_k", "in_proj_v", "in_proj_z", "in_proj_b", "in_proj_a"),
}


@dataclass(frozen=True)
class Mixer:
    """A recurrent mixer of a layer.

    path   of its module, relative to the layer
    names  {'mixer.' and a name in our layer: name of that module or tensor, relative to the layer}
    reads, writes  [1, T, H]
    """

    described: d.Recurrent
    path: str
    names: dict[str, str]
    reads: torch.Tensor
    writes: torch.Tensor


Shapes = dict[str, tuple[int, ...]]  # of our layer's tensors, before those of one matrix are joined
NormOf = tuple[
    str, int, bool | None
]  # role, channels of a group, whether its gate comes first (None: no gate)
Possible = Iterator[tuple[d.Recurrent, Shapes, tuple[NormOf, ...]]]


def is_mixer(module: nn.Module) -> bool:
    """Whether the module has a depthwise convolution of its own, as recurrent mixers do."""
    return bool(list(module.children())) and bool(_convolutions(module))


def blocks(made: Recording, layer: str) -> list[ModuleCall]:
    """The calls of a layer's own modules with a depthwise convolution."""
    inside = made.inside(layer)
    return [c for c in inside if "." not in c.path[len(layer) + 1 :] and c.inputs and is_mixer(c.module)]


def find(made: Recording, layer: str, config: Any) -> Mixer | None:
    """The recurrent mixer of a layer; None if none of our descriptions gives what its module writes."""
    best: tuple[float, Mixer | None] = (
        float("inf"),
        None,
    )  # of norms without a weight, whose epsilons are near
    for call in blocks(made, layer):
        path, own = call.path[len(layer) + 1 :], dict(call.module.named_parameters())
        possible = list(_possible(call.module, config, call.inputs[0].shape[-1]))
        for described, norms, roles in _tries(possible, own):
            tried = _with_norm(described, call.module, roles, norms)
            if tried is None:
                continue
            tensors = {role: own[name] for role, name in roles.items()}
            written = _written(tried, tensors, call.inputs[0])
            if same(written, call.output):
                names = {ROLE + _module(role): f"{path}.{_module(name)}" for role, name in roles.items()}
                mixer = Mixer(tried, path, names, call.inputs[0], call.output)
                if not (isinstance(tried, d.Mamba) and tried.part_norm and tried.part_norm.kind == "unit"):
                    return mixer
                error = float((written.flatten() - call.output.flatten()).abs().max())
                best = min(best, (error, mixer), key=lambda pair: pair[0])
    return best[1]


def _tries(
    possible: list[tuple[d.Recurrent, Shapes, tuple[NormOf, ...]]], own: Mapping[str, Any]
) -> Iterator[tuple[d.Recurrent, tuple[NormOf, ...], dict[str, str]]]:
    """(description, its norms, {role: name}), all descriptions with the names most like ours first."""
    for start, end in ((0, 1), (1, MOST)):
        for described, shapes, norms in possible:
            for roles in islice(_assigned(shapes, own), start, end):
                yield described, norms, roles


def _module(tensor: str) -> str:
    """The name of the module with this weight or bias; other tensors keep their names."""
    return tensor.removesuffix(".weight").removesuffix(".bias")


def _convolutions(module: nn.Module) -> list[torch.Tensor]:
    return [p for p in module.parameters() if p.dim() == 3 and p.shape[1] == 1]


def _assigned(shapes: Mapping[str, tuple[int, ...]], own: Mapping[str, Any]) -> Iterator[dict[str, str]]:
    """{role: name} of all tensors by their shapes: by equal names if all have them, else those with the most first."""
    of_shape: dict[tuple[int, ...], tuple[list[str], list[str]]] = {}
    for role, shape in shapes.items():
        of_shape.setdefault(shape, ([], []))[0].append(role)
    for name, tensor in own.items():
        of_shape.setdefault(tuple(tensor.shape), ([], []))[1].append(name)
    if any(len(roles) != len(names) for roles, names in of_shape.values()):
        return
    ways = []
    for roles, names in of_shape.values():
        orders = [tuple(zip(roles, order, strict=True)) for order in islice(permutations(names), 5040)]
        best = sorted(orders, key=lambda pairs: -sum(_like(role, name) for role, name in pairs))
        ways.append(best[:1] if all(_like(role, name) for role, name in best[0]) else best)
    for chosen in product(*ways):
        yield {role: name for pairs in chosen for role, name in pairs}


def _like(role: str, name: str) -> bool:
    return role in (name, name.removesuffix("_log"))


# -- possible descriptions


def _possible(module: nn.Module, config: Any, hidden: int) -> Possible:
    """(description but for its norms, shapes of its tensors, its norms) of what the tensors' sizes allow."""
    convolutions = _convolutions(module)
    if len(convolutions) != 1:
        return
    channels, kernel = convolutions[0].shape[0], convolutions[0].shape[2]
    shapes = Counter(tuple(p.shape) for p in module.parameters())
    for possible in (_mamba, _mamba2, _gated_delta, _short_conv):
        for described, own, norms in possible(channels, kernel, hidden, list(shapes), config):
            if Counter(own.values()) == shapes:
                yield described, own, norms


def _mamba(channels: int, kernel: int, hidden: int, shapes: Sequence[Any], config: Any) -> Possible:
    columns = sorted({s[1] for s in shapes if len(s) == 2 and s[0] == channels})
    for size, rank in product(columns, repeat=2):
        for bias, conv_bias, normed in product(
            (False, True), (True, False), (False, True, *_epsilons(config))
        ):
            own = {
                "in_proj.weight": (2 * channels, hidden), "conv1d.weight": (channels, 1, kernel),
                "x_proj.weight": (rank + 2 * size, channels), "dt_proj.weight": (channels, rank),
                "dt_proj.bias": (channels,), "A": (channels, size), "D": (channels,),
                "out_proj.weight": (hidden, channels),
            }  # fmt: skip
            own |= {"in_proj.bias": (2 * channels,), "out_proj.bias": (hidden,)} if bias else {}
            own |= {"conv1d.bias": (channels,)} if conv_bias else {}
            parts = {"dt_layernorm.weight": rank, "b_layernorm.weight": size, "c_layernorm.weight": size}
            unit = None if isinstance(normed, bool) else d.Norm("unit", normed)
            described = d.Mamba(kernel, channels, size, rank, conv_bias, bias, unit)
            if normed is not True:
                yield described, own, ()
                continue
            own |= {role: (n,) for role, n in parts.items()}
            yield described, own, tuple((role, n, None) for role, n in parts.items())


def _mamba2(channels: int, kernel: int, hidden: int, shapes: Sequence[Any], config: Any) -> Possible:
    inners = sorted({s[1] for s in shapes if len(s) == 2 and s[0] == hidden and s[1] < channels})
    rows = sorted({s[0] for s in shapes if len(s) == 2 and s[1] == hidden})
    for inner, row in product(inners, rows):
        states, heads = (channels - inner) // 2, row - inner - channels
        if heads < 1 or inner % heads or (channels - inner) % 2:
            continue
        divisors = [n for n in range(1, heads + 1) if heads % n == 0 and states % n == 0]
        for bias, conv_bias, groups, limits in product(
            (False, True), (True, False), divisors, _limits(config)
        ):
            own = {
                "in_proj.weight": (row, hidden), "conv1d.weight": (channels, 1, kernel), "A": (heads,),
                "D": (heads,), "dt_bias": (heads,), "norm.weight": (inner,), "out_proj.weight": (hidden, inner),
            }  # fmt: skip
            own |= {"in_proj.bias": (row,), "out_proj.bias": (hidden,)} if bias else {}
            own |= {"conv1d.bias": (channels,)} if conv_bias else {}
            size, shape = states // groups, inner // heads
            described = d.Mamba2(
                kernel, heads, shape, groups, size, conv_bias=conv_bias, bias=bias, dt_limits=limits
            )
            yield described, own, (("norm.weight", inner // groups, True),)


def _limits(config: Any) -> list[tuple[float, float | None]]:
    """The limits of time steps that a config may mean: none, and each of its pairs of numbers."""
    found: list[tuple[float, float | None]] = [(0.0, None)]
    for value in fields(config).values():
        pair = isinstance(value, (list, tuple)) and len(value) == 2
        if pair and all(isinstance(v, float) for v in value):
            found.append(d.limits(value))
    return list(dict.fromkeys(found))


def _epsilons(config: Any) -> list[float]:
    """The numbers of a config that may be added in a norm without a weight, which shows none."""
    found = (v for v in fields(config).values() if isinstance(v, float) and 0.0 < v < 1e-2)
    return list(dict.fromkeys(found))


def _gated_delta(channels: int, kernel: int, hidden: int, shapes: Sequence[Any], config: Any) -> Possible:
    values = sorted({s[1] for s in shapes if len(s) == 2 and s[0] == hidden and s[1] < channels})
    rows = sorted({s[0] for s in shapes if len(s) == 2 and s[1] == hidden})
    for value, row, (counts, names) in product(values, rows, PROJECTIONS.items()):
        heads, keys = row if counts else row // 2, (channels - value) // 2
        if not heads or value % heads or (channels - value) % 2 or (row % 2 and not counts):
            continue
        sizes = keys, keys, value, value, heads, heads
        starts = list(accumulate(counts or (4, 2), initial=0))
        own: Shapes = {
            f"{name}.weight": (sum(sizes[start:end]), hidden)
            for name, (start, end) in zip(names, pairwise(starts), strict=True)
        }
        own |= {
            "conv1d.weight": (channels, 1, kernel), "A": (heads,), "dt_bias": (heads,),
            "norm.weight": (value // heads,), "out_proj.weight": (hidden, value),
        }  # fmt: skip
        for key_heads in (n for n in range(1, heads + 1) if heads % n == 0 and keys % n == 0):
            for scale in (1.0, 2.0):
                described = d.GatedDelta(
                    kernel,
                    key_heads,
                    heads,
                    keys // key_heads,
                    value // heads,
                    projections=counts,
                    rate_scale=scale,
                )
                yield described, own, (("norm.weight", value // heads, False),)


def _short_conv(channels: int, kernel: int, hidden: int, shapes: Sequence[Any], config: Any) -> Possible:
    own: Shapes = {
        "in_proj.weight": (3 * channels, hidden), "conv1d.weight": (channels, 1, kernel),
        "out_proj.weight": (hidden, channels),
    }  # fmt: skip
    yield d.ShortConv(kernel, channels), own, ()
    biases = {"in_proj.bias": (3 * channels,), "conv1d.bias": (channels,), "out_proj.bias": (hidden,)}
    yield d.ShortConv(kernel, channels, bias=True), own | biases, ()


def _with_norm(
    described: d.Recurrent, module: nn.Module, roles: Mapping[str, str], norms: Sequence[NormOf]
) -> d.Recurrent | None:
    """The description with the norm that all of these modules compute; None if they compute no such norm."""
    found: list[d.Norm] = []
    for role, size, gate_first in norms:
        own = module.get_submodule(_module(roles[role]))
        one = probe.find_norm(own, size) if gate_first is None else _gated(own, size, gate_first)
        if one is None or (found and not _close(one, found[0])):
            return None
        found.append(one)
    made: Any = {"part_norm" if isinstance(described, d.Mamba) else "norm": found[0]} if found else {}
    return replace(described, **made)


def _close(a: d.Norm, b: d.Norm) -> bool:
    """Whether two norms are equal, with epsilons that were measured."""
    return (a.kind, a.bias) == (b.kind, b.bias) and abs(a.eps - b.eps) <= 1e-3 * max(a.eps, b.eps)


def _gated(module: nn.Module, size: int, gate_first: bool) -> d.Norm | None:
    """The RMS norm of groups of `size` channels that a module computes before or after SiLU of its gate."""
    weight: Any = dict(module.named_parameters())["weight"]
    generator = torch.Generator().manual_seed(0)
    x, gate = (torch.randn(8, len(weight), generator=generator) for _ in range(2))
    gate = gate.abs() + 0.5  # a gate near 0 would leave no digits
    small, factor = x * 1e-4, F.silu(gate)
    try:
        y = module(small, gate)
    except (TypeError, RuntimeError, ValueError):  # it takes other arguments
        return None
    if not isinstance(y, torch.Tensor) or y.shape != x.shape:
        return None
    inner, written = (small * factor, y / weight) if gate_first else (small, y / weight / factor)
    eps = probe.epsilon(written.unflatten(-1, (-1, size)), inner.unflatten(-1, (-1, size)))
    return d.Norm(eps=eps) if eps >= 0 else None


# -- our layer


def _written(a: d.Recurrent, tensors: Mapping[str, torch.Tensor], x: torch.Tensor) -> torch.Tensor:
    """The output [T, H] of our layer with these tensors, one sequence from an empty state."""
    hidden, tokens = x.shape[-1], x.shape[-2]
    made: Any = state_layers.make(a, make_norm, hidden, "mixer")
    own = dict(made.named_parameters())
    counts = a.projections if isinstance(a, d.GatedDelta) else ()
    shards = {f"{name}.weight": i for i, name in enumerate(PROJECTIONS[counts])}
    for role, tensor in tensors.items():
        parameter = own["in_proj.weight" if role in shards else role]
        if role in shards:
            parameter.weight_loader(parameter, tensor, shards[role])
        elif hasattr(parameter, "weight_loader"):
            parameter.weight_loader(parameter, tensor)
        else:
            parameter.data.copy_(tensor)
    made.states = made.keeps.new(2, torch.float32, "cpu")
    at = torch.arange(tokens)
    starts, lengths = (torch.tensor(n, dtype=torch.int32) for n in ([0, tokens], [tokens]))
    slots, fresh = torch.tensor([1], dtype=torch.int32), torch.tensor([True])
    table = torch.zeros(1, 1, dtype=torch.int32)
    step = AttentionMetadata(at, starts, lengths, table, tokens, tokens, state_slots=slots, fresh=fresh)
    with forward_context(step), torch.no_grad():
        return made(at, x.reshape(tokens, hidden).float())
