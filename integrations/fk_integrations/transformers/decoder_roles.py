"""Read the description of a decoder-only language model off one recorded forward pass of a small copy.

Nothing is concluded from a class's name: a module has a role if its output has the values that the role's formula
gives, and the layer's residual stream must add up.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from itertools import permutations
from typing import Any

import torch
from torch import nn

from fastkernels.models.common.descriptions import description as d
from fastkernels.overrides.routing import grouped_topk
from fk_integrations.transformers import decoder_probes as probe
from fk_integrations.transformers import recurrent_roles
from fk_integrations.transformers.decoder_probes import same
from fk_integrations.transformers.recording import AttentionCall, ModuleCall, Recording, record

CORRECTIONS = ("correction_bias", "expert_bias")  # names of what the ranks of experts are corrected by
TRANSPOSED = "its weight is [in, out], the transpose of a linear layer's, which no weight map turns"


class Unexplained(ValueError):
    """A module computes what no description expresses. path: its name, '' for the model; also: further ones."""

    def __init__(self, path: str, reason: str, also: tuple[Unexplained, ...] = ()):
        super().__init__(f"{path or 'the model'}: {reason}")
        self.path, self.reason, self.also = path, reason, also

    @property
    def all(self) -> tuple[Unexplained, ...]:
        return (self, *self.also)


class NotObserved(Unexplained):
    """The model does not run at small sizes, or its attention is not seen: the reason is a symptom."""


@dataclass
class Observed:
    """The result of one observed forward pass.

    names  {role: name of the module in transformers}: embedding, layers, norm, head, and of a layer, relative to it:
           q_proj, k_proj, v_proj or qkv_proj, o_proj, q_norm, k_norm, gate_proj, up_proj or gate_up_proj, down_proj;
           of a recurrent mixer 'mixer.' and a name in our layer, such as mixer.in_proj
    """

    decoder: d.Decoder
    names: dict[str, str] = field(default_factory=dict)


def observe(model: Any, config: Any) -> Observed:
    """The description of a small random model. Raises Unexplained."""
    made = record(model, config.vocab_size)
    stack = _stack(model, made, config.num_hidden_layers)
    names = {"layers": stack}
    first = made.of(model.get_submodule(f"{stack}.0"))
    last = made.of(model.get_submodule(f"{stack}.{config.num_hidden_layers - 1}"))
    assert first is not None and last is not None
    embedding, scale, positions = _embedding(made, first, f"{stack}.0", names)
    table: Any = embedding.module.weight
    layers: list[d.Layer] = []
    seen: dict[str, str] = {}
    problems: dict[tuple[str, str], Unexplained] = {}  # one of each kind of layer
    for i in range(config.num_hidden_layers):
        try:
            layer, own = _layer(made, f"{stack}.{i}", config)
        except Unexplained as error:
            for each in error.all:
                key = each.path.removeprefix(f"{stack}.{i}"), each.reason.replace(f"{stack}.{i}.", "")
                problems.setdefault(key, each)
            continue
        if any(seen.get(role, name) != name for role, name in own.items()):
            raise Unexplained(
                f"{stack}.{i}", "its modules have other names than those of the layers before it"
            )
        layers.append(layer)
        seen |= own
    if problems:
        first_problem, *others = problems.values()
        raise Unexplained(first_problem.path, first_problem.reason, tuple(others))
    norm, head = _after(made, last)
    names["norm"], names["head"] = norm.path, head.path
    final = probe.find_norm(norm.module, norm.output.shape[-1])
    if final is None:
        raise Unexplained(norm.path, "it computes no norm that an op computes")
    logits_scale, softcap = _logits(made, head)
    weight: Any = head.module.weight
    decoder = d.Decoder(
        table.shape[0], table.shape[1], tuple(layers), final, tied=weight is table,
        head_bias=_has_bias(head), embedding_scale=scale, logits_scale=logits_scale,
        logits_softcap=softcap, positions=positions,
    )  # fmt: skip
    return Observed(decoder, {**names, **seen})


def _embedding(
    made: Recording, first: ModuleCall, path: str, names: dict[str, str]
) -> tuple[ModuleCall, float, d.Positions | None]:
    """(call of the tokens' embedding, its scale, learned positions); adds their names. Raises Unexplained."""
    calls = [c for c in made.calls if isinstance(c.module, nn.Embedding)]
    x = first.inputs[0].reshape(len(made.ids), -1)
    for call in calls:
        table: Any = call.module.weight
        if int(made.ids.max()) >= len(table):
            continue
        scale = probe.ratio(x, table[made.ids])
        if scale is not None:
            names["embedding"] = call.path
            return call, scale, None
        for other in calls:
            rows: Any = other.module.weight
            if other is call or rows.shape[1:] != table.shape[1:]:
                continue
            for offset in range(min(4, len(rows) - len(made.ids))):
                added = rows[offset : offset + len(made.ids)]
                scale = probe.ratio(x - added, table[made.ids])
                if scale is not None:
                    names |= {"embedding": call.path, "positions": other.path}
                    return call, scale, d.Positions(len(rows) - offset, offset)
    if not calls:
        raise Unexplained("", "no embedding of the tokens was called")
    for c in made.calls:
        if same(c.output, x) and probe.find_norm(c.module, x.shape[-1]) is not None:
            raise Unexplained(c.path, "it is a norm of the embedding, before the first layer")
    raise Unexplained(
        path,
        "the first layer reads something else than the scaled embedding of the tokens, and learned positions",
    )


def _stack(model: nn.Module, made: Recording, count: int) -> str:
    """The name of the list of layers: above every call of attention, or with a recurrent mixer in each layer."""
    lists = [name for name, m in model.named_modules() if isinstance(m, nn.ModuleList)]
    if not made.attention:
        lists = [
            name
            for name in lists
            if len(model.get_submodule(name)) == count  # type: ignore[arg-type]
            and all(recurrent_roles.blocks(made, f"{name}.{i}") for i in range(count))
        ]
        if not lists:
            raise NotObserved(
                "",
                "no softmax attention over all tokens was seen: neither a call of transformers' attention "
                "functions, nor a softmax of queries times keys",
            )
    fits = [n for n in lists if all(a.path.startswith(f"{n}.") for a in made.attention)]
    if not fits:
        raise Unexplained("", "the layers are not in one list")
    return fits[-1]


def _after(made: Recording, last: ModuleCall) -> tuple[ModuleCall, ModuleCall]:
    """The calls of the final norm and of the head."""
    later = [c for c in made.calls[made.calls.index(last) + 1 :] if not list(c.module.children())]
    norm = next((c for c in later if c.inputs and same(c.inputs[0], last.output)), None)
    if norm is None:
        raise Unexplained(last.path, "no norm reads the last layer's output")
    for c in later:
        if c.inputs and same(c.inputs[0], norm.output) and probe.is_linear(c.module, c.inputs[0], c.output):
            return norm, c
    raise Unexplained(norm.path, "no linear layer reads the final norm's output")


def _logits(made: Recording, head: ModuleCall) -> tuple[float, float]:
    """(scale, soft cap) of the logits."""
    assert made.logits is not None
    scale = probe.ratio(made.logits, head.output)
    if scale is not None:
        return scale, 0.0
    cap = probe.cap(made.logits, head.output)
    if cap is None:
        raise Unexplained(head.path, "the logits are neither its scaled nor its soft-capped output")
    return 1.0, cap


def _layer(made: Recording, path: str, config: Any) -> tuple[d.Layer, dict[str, str]]:
    own = next(c for c in made.calls if c.path == path)
    inside = made.inside(path)
    if (alone := _mlp_alone(made, own, path, config)) is not None:
        return alone
    mixer_path = _mixer_path(made, path)
    try:
        attention, names, reads, writes = _mixer(made, mixer_path, path, config)
    except Unexplained as error:
        try:
            _mlp(inside, mixer_path, path, config)
        except Unexplained as other:
            raise Unexplained(error.path, error.reason, (other,)) from None
        raise
    found = _mlp(inside, mixer_path, path, config)
    mlp, mlp_names = (None, {}) if found is None else found[:2]
    names |= mlp_names
    own_parts = [c for c in inside if "." not in c.path[len(path) + 1 :]]
    weighted = [c for c in own_parts if list(c.module.parameters(recurse=False))]
    plain = [c for c in own_parts if not list(c.module.parameters())]
    norms = _Norms([c for c in weighted if c.path[len(path) + 1 :] not in names.values()], path, plain)
    x, y = own.inputs[0], own.output
    before_attention, after_attention = norms.between(x, reads), norms.reading(writes)
    a = writes if after_attention is None else after_attention.output
    before_mlp = after_mlp = None
    at_once = False
    if found is None:
        multiplier = probe.ratio(y - x, a.reshape(x.shape))
    else:
        mlp_reads, mlp_writes = found[2:]
        after_mlp = norms.reading(mlp_writes)
        m = mlp_writes if after_mlp is None else after_mlp.output
        at_once = norms.find(x, mlp_reads) is not None or same(mlp_reads, reads)
        if at_once:
            before_mlp = None if same(mlp_reads, reads) else norms.between(x, mlp_reads)
            # GPT-NeoX has two norms of one input, whose outputs differ unless their weights are equal
            multiplier = probe.ratio(y - x, (a + m).reshape(x.shape))
        else:
            middle = norms.source(mlp_reads).reshape(x.shape)
            multiplier = probe.ratio(middle - x, a.reshape(x.shape))
            before_mlp = norms.find(middle, mlp_reads)
            if multiplier is not None and not same(y, middle + multiplier * m.reshape(x.shape)):
                multiplier = None
    if multiplier is None:
        what = "attention" if mlp is None else "(attention + MLP)"
        raise Unexplained(path, f"its output is not x + multiplier * {what}")
    parts = {
        "before_attention": before_attention, "after_attention": after_attention, "before_mlp": before_mlp,
        "after_mlp": after_mlp,
    }  # fmt: skip
    kinds: dict[str, Any] = {part: None if call is None else norms.kind(call) for part, call in parts.items()}
    own_names = {
        part: call.path[len(path) + 1 :]
        for part, call in parts.items()
        if call is not None and call.path[len(path) + 1 :] != d.NAMES.get(part, part)
    }
    if isinstance(mlp, d.Experts) and (block := names["experts"].rpartition(".")[0]) != "mlp":
        own_names["mlp"] = block
    if isinstance(attention, d.Recurrent) and mixer_path[len(path) + 1 :] != "self_attn":
        own_names["self_attn"] = mixer_path[len(path) + 1 :]
    norms.check_all_used([c for c in parts.values() if c is not None])
    layer = d.Layer(attention, mlp, parallel=at_once, multiplier=multiplier, names=own_names, **kinds)
    return layer, names


def _mlp_alone(
    made: Recording, own: ModuleCall, path: str, config: Any
) -> tuple[d.Layer, dict[str, str]] | None:
    """The layer that is an MLP behind a norm; None for any other."""
    inside = made.inside(path)
    if (
        sum(any(True for _ in m.parameters()) for m in own.module.children()) > 2
        or any(a.path.startswith(f"{path}.") for a in made.attention)
        or recurrent_roles.blocks(made, path)
    ):
        return None
    try:
        found = _mlp(inside, "", path, config)
    except Unexplained:
        if any(sum(p.dim() == 3 for p in c.module.parameters(recurse=False)) == 2 for c in inside):  # experts
            raise
        return None
    if found is None:
        return None
    mlp, names, reads, writes = found
    x, y = own.inputs[0], own.output
    norms = _Norms([c for c in inside if "." not in c.path[len(path) + 1 :]], path, [])
    before, multiplier = norms.find(x, reads), probe.ratio(y - x, writes.reshape(x.shape))
    if before is None or multiplier is None:
        return None
    named = {"before_mlp": before.path[len(path) + 1 :]}
    named = {part: name for part, name in named.items() if name != d.NAMES[part]}
    layer = d.Layer(d.NoMixer(), mlp, before_mlp=norms.kind(before), multiplier=multiplier, names=named)
    return layer, names


def _mixer_path(made: Recording, layer: str) -> str:
    """The name of the module that mixes a layer's tokens. Raises Unexplained."""
    paths = [a.path for a in made.attention if a.path.startswith(f"{layer}.")]
    blocks = [c.path for c in recurrent_roles.blocks(made, layer)]
    if paths and any(not any(f"{path}.".startswith(f"{block}.") for path in paths) for block in blocks):
        what = "attention and a recurrence side by side in one layer, where descriptions have one of them"
        raise Unexplained(layer, what)
    paths = paths or blocks
    if not paths:
        raise Unexplained(
            layer, "neither attention nor a recurrence with a convolution was seen in this layer"
        )
    if len(paths) != 1:
        raise Unexplained(layer, f"{len(paths)} calls of attention or a recurrence in one layer")
    return paths[0]


def _mixer(
    made: Recording, path: str, layer: str, config: Any
) -> tuple[d.Attention | d.Recurrent, dict[str, str], torch.Tensor, torch.Tensor]:
    """(attention or recurrence, names, what it reads, what it writes). Raises Unexplained."""
    seen = next((a for a in made.attention if a.path == path), None)
    if seen is not None:
        return _attention(made, seen, layer, config)
    found = recurrent_roles.find(made, layer, config)
    if found is None:
        raise Unexplained(path, recurrent_roles.MIXER)
    return found.described, dict(found.names), found.reads, found.writes


class _Norms:
    """The calls of a layer's own modules that are norms, by what they read and write."""

    def __init__(self, calls: list[ModuleCall], path: str, plain: list[ModuleCall]) -> None:
        self.path, self.plain = path, plain  # plain: calls of modules without parameters
        neutral = (nn.Dropout, nn.Identity)
        self.calls = [
            c
            for c in calls
            if c.inputs and not list(c.module.children()) and not isinstance(c.module, neutral)
        ]

    def find(self, x: torch.Tensor, y: torch.Tensor) -> ModuleCall | None:
        return next((c for c in self.calls if same(c.inputs[0], x) and same(c.output, y)), None)

    def reading(self, x: torch.Tensor) -> ModuleCall | None:
        return next((c for c in self.calls if same(c.inputs[0], x)), None)

    def between(self, x: torch.Tensor, y: torch.Tensor) -> ModuleCall | None:
        """The norm from x to y; None if they are equal. Raises Unexplained."""
        found = self.find(x, y)
        if found is None and not same(x, y):
            for call in self.plain:
                if call.inputs and same(call.inputs[0], x) and same(call.output, y):
                    raise Unexplained(call.path, "it has no weight, where descriptions have norms with one")
            raise Unexplained(self.path, "no single norm lies between the residual stream and what reads it")
        return found

    def source(self, y: torch.Tensor) -> torch.Tensor:
        """The input of the norm that writes y; y itself if none does."""
        return next((c.inputs[0] for c in self.calls if same(c.output, y)), y)

    def kind(self, call: ModuleCall) -> d.Norm:
        found = probe.find_norm(call.module, call.output.shape[-1])
        if found is None:
            raise Unexplained(call.path, "it computes no norm that an op computes")
        return found

    def check_all_used(self, used: list[ModuleCall]) -> None:
        for call in self.calls:
            if not any(call is u for u in used):
                raise Unexplained(call.path, "its place in the layer is not known")


def _attention(
    made: Recording, seen: AttentionCall, layer: str, config: Any
) -> tuple[d.Attention, dict[str, str], torch.Tensor, torch.Tensor]:
    """(attention, names, what its projections read, what it writes)."""
    inside = made.inside(seen.path)
    if seen.unknown:
        raise Unexplained(seen.path, f"attention has {', '.join(seen.unknown)}")
    heads, _, size = seen.q.shape
    if seen.k.shape[2] != size or seen.v.shape[2] != size:
        raise Unexplained(
            seen.path, f"queries have {size}, keys {seen.k.shape[2]} and values {seen.v.shape[2]} channels"
        )
    kv_heads = seen.k.shape[0]
    linears = [c for c in inside if c.inputs and probe.is_linear(c.module, c.inputs[0], c.output)]
    out, gated = next((c for c in linears if same(c.inputs[0], seen.output)), None), None
    if out is None:
        out, gated = _gated(linears, seen)
    if out is None:
        raise _not_projected(inside, linears, seen)
    names = {"o_proj": out.path[len(layer) + 1 :]}
    plain = d.Attention(
        heads,
        kv_heads,
        size,
        out_bias=_has_bias(out),
        scale=size**-0.5 if seen.scale is None else seen.scale,
        window=_window(seen),
        softcap=seen.softcap,
        max_positions=getattr(config, "max_position_embeddings", None) or d.Attention.max_positions,
        gated=gated is not None,
    )
    projections = [c for c in linears if c is not out]
    if any(not same(c.inputs[0], projections[0].inputs[0]) for c in projections):
        raise Unexplained(seen.path, "its projections read different tensors")
    leaves = [c for c in inside if not list(c.module.children()) and not isinstance(c.module, nn.Dropout)]
    rest = [c for c in leaves if all(c is not linear for linear in linears)]
    known = False
    for q, k, v, by_head, roles in _projected(projections, seen, layer, gated):
        normed = _head_norms(rest, q, k, heads, kv_heads, size, layer)
        if normed is None or not same(v, seen.v.transpose(0, 1)):
            continue
        known = True
        q, k, norms, norm_names = normed
        turned = _rope(replace(plain, by_head=by_head, **norms), q, k, seen, config)
        if turned is None:
            continue
        has = {_has_bias(c) for c in projections}
        if len(has) > 1:
            raise Unexplained(seen.path, "some of its projections have a bias, others have none")
        names |= {**roles, **norm_names}
        return replace(turned, bias=has.pop()), names, projections[0].inputs[0], out.output
    for call in rest:
        wrote = call.output.reshape(-1, *call.output.shape[-2:])
        last = any(same(wrote, x) or same(wrote.transpose(0, 1), x) for x in (seen.q, seen.k))
        if last and probe.find_norm(call.module, size) is not None:
            what = "it is a norm of heads after the rotary embedding, where descriptions have it before"
            raise Unexplained(call.path, what)
    what = "its queries, keys and values are not projections and norms that a description expresses"
    if known:
        given = getattr(config, "rope_parameters", None)
        what = f"its queries and keys are rotated in another way than by config.rope_parameters={given!r}"
    raise Unexplained(seen.path, what)


def _halves(call: ModuleCall, seen: AttentionCall) -> tuple[torch.Tensor, torch.Tensor]:
    """Each head's query and gate [T, heads, size] in a projection that has both."""
    heads, tokens, _ = seen.q.shape
    query, gate = call.output.reshape(tokens, heads, -1).chunk(2, -1)
    return query, gate


def _gated(linears: list[ModuleCall], seen: AttentionCall) -> tuple[ModuleCall | None, ModuleCall | None]:
    """(output projection, projection of queries and gates) of attention whose output the gates' sigmoid multiplies."""
    for call in linears:
        if call.output.numel() == 2 * seen.q.numel():
            written = seen.output * _halves(call, seen)[1].flatten(1).sigmoid()
            for out in linears:
                if same(out.inputs[0], written):
                    return out, call
    return None, None


def _not_projected(inside: list[ModuleCall], linears: list[ModuleCall], seen: AttentionCall) -> Unexplained:
    """Why no linear layer reads what attention writes."""
    if (call := next((c for c in inside if probe.is_transposed(c)), None)) is not None:
        return Unexplained(call.path, TRANSPOSED)
    width = seen.output.shape[-1]
    for call in inside:
        if (
            call.inputs
            and same(call.inputs[0], seen.output)
            and probe.find_norm(call.module, width) is not None
        ):
            return Unexplained(call.path, "it is a norm between attention and its output projection")
    for call in linears:
        x = call.inputs[0].reshape(-1, call.inputs[0].shape[-1])
        if x.shape != seen.output.shape:
            continue
        factor = x / seen.output
        for gate in linears:
            halves = gate.output.reshape(len(x), seen.q.shape[0], -1).chunk(
                2, -1
            )  # each head's query and gate
            for part, which in ((gate.output, ""), *((half, "half of ") for half in halves)):
                for name, of in probe.GATES.items():
                    made = of(part.reshape(len(x), -1))
                    made = made.repeat_interleave(max(1, factor.shape[1] // made.shape[1]), 1)  # of each head
                    if same(made, factor, 1e-3):
                        what = f"attention's output is multiplied by the {name} of {which}this module's output before"
                        return Unexplained(
                            gate.path, f"{what} {call.path}, a gate that no description expresses"
                        )
    return Unexplained(seen.path, "no linear layer reads the output of attention alone")


def _has_bias(call: ModuleCall) -> bool:
    return getattr(call.module, "bias", None) is not None


def _window(seen: AttentionCall) -> int | None:
    """The window that the mask shows. Raises Unexplained for a mask that is not causal with a window."""
    if seen.visible is None:
        raise Unexplained(seen.path, "attention without a causal mask")
    tokens = seen.visible.shape[0]
    most = int(seen.visible.sum(1).max())
    at = torch.arange(tokens)
    apart = at[:, None] - at[None]
    if not bool((seen.visible == ((apart >= 0) & (apart < most))).all()):
        raise Unexplained(seen.path, "a mask that is not causal with a window")
    return None if most == tokens else most


def _projected(
    projections: list[ModuleCall], seen: AttentionCall, layer: str, gated: ModuleCall | None
) -> Any:
    """(q, k, v [T, heads, size], by_head, {role: name}) of each way to read the projections.

    gated: the projection of the queries that has each head's gate after its query
    """
    heads, tokens, size = seen.q.shape
    kv = seen.k.shape[0]

    def name(call: ModuleCall) -> str:
        return call.path[len(layer) + 1 :]

    flat = [
        c.output.reshape(tokens, -1) if c is not gated else _halves(c, seen)[0].flatten(1)
        for c in projections
    ]
    if len(projections) == 1 and flat[0].shape[1] == (heads + 2 * kv) * size:
        q, k, v = flat[0].split([heads * size, kv * size, kv * size], 1)
        roles = {"qkv_proj": name(projections[0])}
        yield *(t.reshape(tokens, -1, size) for t in (q, k, v)), False, roles
        groups = flat[0].view(tokens, kv, heads // kv + 2, size)
        if kv > 1:
            yield groups[:, :, :-2].flatten(1, 2), groups[:, :, -2], groups[:, :, -1], True, roles
    if len(projections) == 3:
        for order in permutations(range(3)):
            widths = [flat[i].shape[1] for i in order]
            if widths == [heads * size, kv * size, kv * size]:
                roles = {f"{r}_proj": name(projections[i]) for r, i in zip("qkv", order, strict=True)}
                yield *(flat[i].view(tokens, -1, size) for i in order), False, roles


def _head_norms(
    rest: list[ModuleCall], q: torch.Tensor, k: torch.Tensor, heads: int, kv_heads: int, size: int, layer: str
) -> tuple[torch.Tensor, torch.Tensor, dict[str, Any], dict[str, str]] | None:
    """(q, k, fields of Attention, names) after the norms among `rest`; None if one of these is not explained."""
    used: list[ModuleCall] = []
    names: dict[str, str] = {}
    found: list[torch.Tensor] = []
    kinds: set[tuple[str, d.Norm]] = set()
    for role, x, count in (("q_norm", q, heads), ("k_norm", k, kv_heads)):
        call = next(
            (c for c in rest if c.inputs and any(same(c.inputs[0], t) for t in (x, x.transpose(0, 1)))), None
        )
        if call is None:
            found.append(x)
            continue
        turned = not same(call.inputs[0], x)
        for kind, width in (("head_norm", size), ("wide_norm", count * size)):
            norm = probe.find_norm(call.module, width)
            if norm is not None and call.inputs[0].shape[-1] == width:
                kinds.add((kind, norm))
                break
        else:
            return None
        out = call.output.reshape(count, -1, size).transpose(0, 1) if turned else call.output.reshape(x.shape)
        found.append(out)
        used.append(call)
        names[role] = call.path[len(layer) + 1 :]
    if len(used) not in (0, 2) or len(used) != len(rest):
        return None
    if len({kind for kind, _ in kinds}) > 1:
        return None
    if len(kinds) == 2 and not all(close(a, b) for (_, a), (_, b) in [tuple(kinds)]):
        return None
    return found[0], found[1], dict([next(iter(kinds))]) if kinds else {}, names


def close(a: Any, b: Any, rtol: float = 1e-3) -> bool:
    """Whether two descriptions are equal, with numbers that were measured within rtol."""
    if isinstance(a, bool) or isinstance(b, bool) or not isinstance(a, (int, float)):
        if isinstance(a, (tuple, list)) and isinstance(b, (tuple, list)):
            return len(a) == len(b) and all(close(x, y, rtol) for x, y in zip(a, b, strict=True))
        if hasattr(a, "__dataclass_fields__"):
            return type(a) is type(b) and all(
                close(getattr(a, n), getattr(b, n), rtol) for n in a.__dataclass_fields__
            )
        return a == b
    return isinstance(b, (int, float)) and abs(a - b) <= rtol * max(abs(a), abs(b))


def _rope(
    a: d.Attention, q: torch.Tensor, k: torch.Tensor, seen: AttentionCall, config: Any
) -> d.Attention | None:
    """The attention with the rotary embedding that leads from q and k to what attention reads; None if none does."""
    assert a.scale is not None
    before = q.transpose(0, 1), k.transpose(0, 1)
    if (factor := _factor(seen, *before)) is not None:
        return replace(a, rope=None, scale=a.scale * factor)
    given = getattr(config, "rope_parameters", None) or {}
    of_types = [kind for kind, own in given.items() if isinstance(own, dict)]  # of layers
    for kind in of_types or [""]:
        try:
            rope = d.rope(config, kind, partial=True)
        except d.Unsupported as error:
            raise Unexplained(seen.path, str(error)) from error
        whole = {
            name: value for name, value in rope.items() if name != "partial_rotary_factor"
        }  # if it is ignored
        for tried in (
            replace(a, rope=p, interleaved=interleaved)
            for p in (rope, whole)
            for interleaved in (False, True)
        ):
            try:
                turned = [probe.rotated(tried, x) for x in before]
            except (ValueError, RuntimeError):  # sizes that no module of ours has
                continue
            if (factor := _factor(seen, *turned)) is not None:
                return replace(tried, scale=a.scale * factor)
    return None


def _factor(seen: AttentionCall, q: torch.Tensor, k: torch.Tensor) -> float | None:
    """The number by which a module multiplies its queries before attention; None if other values are read."""
    factor = probe.ratio(seen.q, q) if same(seen.k, k) else None
    return 1.0 if factor is not None and abs(factor - 1.0) < 1e-5 else factor


def _mlp(
    inside: list[ModuleCall], mixer: str, layer: str, config: Any
) -> tuple[d.Mlp | d.Experts, dict[str, str], torch.Tensor, torch.Tensor] | None:
    """(MLP, names, what it reads, what it writes); None if a layer has nothing but norms outside its mixer."""
    outside = [c for c in inside if not f"{c.path}.".startswith(f"{mixer}.")]
    linears = [c for c in outside if c.inputs and probe.is_linear(c.module, c.inputs[0], c.output)]
    weighted = [
        c for c in outside if "." in c.path[len(layer) + 1 :] and list(c.module.parameters(recurse=False))
    ]
    strange = [c for c in weighted if c not in linears]
    experts = next((c for c in strange if sum(p.dim() == 3 for p in c.module.parameters()) == 2), None)
    if experts is not None:
        return _experts(outside, linears, experts, layer, config)
    if not linears and not strange:
        return None
    if strange or not 2 <= len(linears) <= 3:
        culprit = strange[0] if strange else None
        path = culprit.path if culprit else layer
        what = f"{len(linears)} linear layers outside attention, where an MLP has 2 or 3"
        if culprit is not None:
            part = "it is part of an MLP that no description expresses"
            what = TRANSPOSED if probe.is_transposed(culprit) else part
        raise Unexplained(path, what)
    return _dense(linears, layer)


def _dense(linears: list[ModuleCall], layer: str) -> tuple[d.Mlp, dict[str, str], torch.Tensor, torch.Tensor]:
    """The same of an MLP of two or three linear layers."""
    *ups, down = linears
    inner = down.inputs[0].reshape(down.inputs[0].shape[-2:])
    has = {_has_bias(c) for c in linears}
    if len(has) > 1:
        raise Unexplained(down.path, "some linear layers of the MLP have a bias, others have none")
    if len(ups) == 2 and not same(ups[0].inputs[0], ups[1].inputs[0]):
        raise Unexplained(ups[1].path, "it reads something else than the MLP's first linear layer")
    flat = [c.output.reshape(inner.shape[0], -1) for c in ups]
    width = inner.shape[1]

    def name(call: ModuleCall) -> str:
        return call.path[len(layer) + 1 :]

    names = {"down_proj": name(down)}
    ways: list[tuple[Any, Any, dict[str, str]]] = []
    if len(ups) == 2 and all(f.shape[1] == width for f in flat):
        for g, u in ((0, 1), (1, 0)):
            ways.append((flat[g], flat[u], {"gate_proj": name(ups[g]), "up_proj": name(ups[u])}))
    elif len(ups) == 1 and flat[0].shape[1] == 2 * width:
        ways.append((*flat[0].split(width, 1), {"gate_up_proj": name(ups[0])}))
    elif len(ups) == 1 and flat[0].shape[1] == width:
        ways.append((flat[0], None, {"up_proj": name(ups[0])}))
    for act, function in probe.ACTIVATIONS.items():
        for gate, up, roles in ways:
            if same(function(gate) * (1.0 if up is None else up), inner, 2e-5):
                mlp = d.Mlp(width, act, gated=up is not None, bias=has.pop())
                return mlp, {**names, **roles}, ups[0].inputs[0], down.output
    raise Unexplained(down.path, "what it reads is not act(gate) * up or act(up) with an activation of ours")


def _experts(
    outside: list[ModuleCall], linears: list[ModuleCall], experts: ModuleCall, layer: str, config: Any
) -> tuple[d.Experts, dict[str, str], torch.Tensor, torch.Tensor]:
    """(experts, names, what they read, what they write), with the MLP of all tokens next to the router, or to both."""
    path = experts.path.rpartition(".")[0]
    block = next((c for c in outside if c.path == path), None)
    if block is None:
        raise Unexplained(experts.path, "experts that are no part of a block with a router")
    own: dict[str, Any] = dict(experts.module.named_parameters())
    x = block.inputs[0].reshape(-1, block.inputs[0].shape[-1])
    if set(own) != {"gate_up_proj", "down_proj"}:
        raise Unexplained(path, f"experts with {', '.join(own)}, where two stacks are known")
    both, down = own["gate_up_proj"], own["down_proj"]
    count, inner = down.shape[0], down.shape[2]
    router = next((c for c in linears if c.path.startswith(f"{path}.") and c.output.shape[-1] == count), None)
    rest = [c for c in linears if c is not router]
    shared, shared_names, added = _shared_expert(rest, x, layer)
    known = {c.path for c in rest} | {experts.path}
    own_tensors = (*block.module.named_parameters(), *block.module.named_buffers())
    inside = {n: p for n, p in own_tensors if not any(f"{path}.{n}".startswith(f"{k}.") for k in known)}
    routers = [(n, p) for n, p in inside.items() if p.dim() == 2 and p.shape != (1, count)]
    biases = [(n, p) for n, p in inside.items() if n.endswith(CORRECTIONS) and p.numel() == count]
    if len(routers) != 1 or len(inside) != 1 + len(biases) or len(biases) > 1:
        raise Unexplained(path, f"a router with {', '.join(inside)}; a matrix and a correction are known")
    if both.shape != (count, 2 * inner, x.shape[1]) or routers[0][1].shape != (count, x.shape[1]):
        raise Unexplained(path, f"experts of shapes {list(both.shape)} and {list(down.shape)}")
    gate, up = torch.einsum("th,enh->ten", x, both).chunk(2, -1)
    each = torch.einsum("ten,ehn->teh", probe.ACTIVATIONS["silu"](gate) * up, down)
    within = bool(rest) and all(c.path.startswith(f"{path}.") for c in rest)
    written = block.output.reshape(x.shape)
    routed = written - added if within else written
    router_path = f"{path}.{routers[0][0]}"[len(layer) + 1 :].removesuffix(".weight")
    names = {"experts": experts.path[len(layer) + 1 :], "router": router_path}
    if biases:
        names["correction"] = f"{path}.{biases[0][0]}"[len(layer) + 1 :]
    for choice in _routings(count, biases[0][1].reshape(-1) if biases else None, config):
        weights, ids = grouped_topk.reference(x @ routers[0][1].T, *choice)
        chosen = each.gather(1, ids.long()[..., None].expand(-1, -1, each.shape[2]))
        made = (chosen * weights[..., None]).sum(1)
        scale = 1.0 if same(made, routed) else probe.ratio(routed, made)
        if scale is not None:
            top_k, normalize, groups, top_groups, scoring, correction = choice
            found = d.Experts(
                count, top_k, inner, normalize, scoring=scoring, correction=correction is not None, groups=groups,
                top_groups=top_groups, scale=scale, **shared,
            )  # fmt: skip
            return found, names | shared_names, x, written if within else written + added
    raise Unexplained(path, "its output is no sum of gated MLPs (SiLU), weighted by softmax or sigmoid")


def _routings(count: int, correction: torch.Tensor | None, config: Any) -> Iterator[tuple[Any, ...]]:
    """Arguments of grouped_topk behind the logits. Groups of the config come first: few tokens may not tell others."""
    groupings = [(n, top) for n in range(1, count // 2 + 1) if count % n == 0 for top in range(1, n + 1)]
    given = (getattr(config, "n_group", 1), getattr(config, "topk_group", 1))
    for groups, top_groups in sorted(groupings, key=lambda g: g != given):
        for top_k in range(1, top_groups * count // groups + 1):
            for scoring in ("softmax", "sigmoid"):
                for normalize in (True, False):
                    yield top_k, normalize, groups, top_groups, scoring, correction


def _shared_expert(
    linears: list[ModuleCall], x: torch.Tensor, layer: str
) -> tuple[dict[str, Any], dict[str, str], torch.Tensor]:
    """(fields of Experts, names, what it adds) of the MLP that all tokens pass, and of the gate that weights it."""
    if not linears:
        return {}, {}, torch.zeros(())
    gate = next((c for c in linears if c.output.shape[-1] == 1), None)
    mlp, names, reads, writes = _dense([c for c in linears if c is not gate], layer)
    if not same(reads, x) or (mlp.activation, mlp.gated, mlp.bias) != ("silu", True, False):
        raise Unexplained(linears[0].path, "an MLP next to experts that is not gated by SiLU, or has a bias")
    made = {f"shared_{role}": name for role, name in names.items()}
    added = writes.reshape(x.shape)
    if gate is not None:
        if _has_bias(gate) or not same(gate.inputs[0], x):
            raise Unexplained(gate.path, "a gate of the shared expert with a bias, or of another input")
        made["shared_expert_gate"] = gate.path[len(layer) + 1 :]
        added = added * gate.output.reshape(-1, 1).sigmoid()
    return {"shared": mlp.intermediate, "shared_gate": gate is not None}, made, added
