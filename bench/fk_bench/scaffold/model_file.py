"""The text of a model file: a description over the config's fields, and how checkpoints name the weights."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import replace
from operator import attrgetter
from typing import Any

from fk_integrations.transformers.recurrent_roles import PROJECTIONS, ROLE
from fk_integrations.transformers.tiny_models import declared

from fastkernels.models.common.configs.checks import REQUIRED
from fastkernels.models.common.descriptions import description as d
from fastkernels.models.common.descriptions.architecture import PACKED
from fastkernels.models.common.layers.decoder import EXPERTS
from fk_bench.info.stub_source import WIDTH, fold
from fk_bench.scaffold.expressions import NoExpression, Search, literal
from fk_bench.scaffold.samples import MLP, NORMS, Samples, block, equal, expert_names, normal

SIZES = {  # formulas that are tried first
    "heads": ("config.num_attention_heads",),
    "kv_heads": ("config.num_attention_heads",),
    "head_size": ("config.hidden_size // config.num_attention_heads",),
}
ROUTING = {"scoring": "softmax", "correction": False, "groups": 1, "top_groups": 1, "scale": 1.0}
RECURRENT = {  # {class: its sizes, its other fields}; the tokens of the convolution are the first argument
    d.Mamba: (("inner", "size", "rank"), ("conv_bias", "bias")),
    d.Mamba2: (("heads", "head_size", "groups", "size"), ("conv_bias", "bias", "dt_limits")),
    d.GatedDelta: (("key_heads", "value_heads", "key_size", "value_size"), ("projections", "rate_scale")),
    d.ShortConv: (("channels",), ("bias",)),
}
MLP_SIZES = ("config.intermediate_size", "d.gated_size(config)")
CONVOLUTIONS = ("q_conv1d", "k_conv1d", "v_conv1d")  # of checkpoints with one each


def text(samples: Samples, about: str, category: str = "llm") -> str:
    """The whole file. Raises NoExpression; fields that have no formula are refused by the file instead."""
    while True:
        try:
            body = _Describe(samples).text()
            break
        except NoExpression as error:
            if not samples.drop(error.fields):
                raise
    return "\n".join([
        f'"""{about}"""', "", "from __future__ import annotations", "", "from typing import Any", "",
        "from fastkernels.models.common.descriptions import description as d",
        "from fastkernels.models.common.descriptions.architecture import Architecture", "", "", body, "", "",
        _architecture(samples, category, body), "",
    ])  # fmt: skip


class _Describe:
    """The function `describe(config)` under construction."""

    def __init__(self, samples: Samples):
        self.samples, self.search = samples, Search(samples)
        self.attending = Search(samples, d.Attention)
        self.mixers = {type(x.attention) for s in samples.all for x in s.decoder.layers}
        kinds = self.mixers - {d.Attention, d.NoMixer}
        if len(kinds) > 1:
            raise NoExpression("the kind of a layer's recurrence", set())
        self.recurrence = next(iter(kinds), None)
        self.norm = self._norm("the final norm", [s.decoder.norm for s in samples.all])
        ropes = [layer.attention.rope for s in samples.all for layer in s.decoder.layers]
        partial = any((rope or {}).get("partial_rotary_factor", 1.0) != 1.0 for rope in ropes)
        self.partial = ["partial=True"] if partial else []
        self.rope = ", ".join(["d.rope(config", *self.partial]) + ")"
        self.attention = ", ".join(["d.attention(config, window", *self.partial]) + ")"

    def text(self) -> str:
        refused = [f"{name}={literal(value)}" for name, value in self.samples.refused.items()]
        lines = [_fold("d.refuse(", ["config", *refused], ")", 1)] if refused else []
        lines = ["def describe(config: Any) -> d.Decoder:", *lines]
        differs = self._attention() if d.Attention in self.mixers else []
        own = [a.replace("=norm", f"={self.norm}") for a in differs]
        for arguments in self._of_llama():
            if self._is(f"d.llama({', '.join([*arguments, *own])})"):
                return "\n".join([*lines, _fold("return d.llama(", [*arguments, *own], ")", 1)])
        return "\n".join([*lines, *self._layers(differs), self._decoder()])

    def _of_llama(self) -> Iterator[list[str]]:
        """First arguments of d.llama."""
        for windows in ([], ["d.windows(config)"], ["d.one_window(config)"]):
            for bias in ([], ["mlp_bias=config.mlp_bias"]):
                yield ["config", *windows, *bias]

    def _is(self, expression: str) -> bool:
        """Whether an expression over config and d gives the whole description of each sample."""
        for s in self.samples.all:
            try:
                made = eval(expression, {"config": s.config, "d": d})
            except (
                NameError,
                AttributeError,
                TypeError,
                ValueError,
            ):  # it names a layer's i, or a field that is not there
                return False
            if not equal(normal(made), s.decoder):
                return False
        return True

    def _norm(self, what: str, norms: list[d.Norm | None]) -> str:
        """The expression of norms, one of each sample (None: not there)."""
        there = [(s, n) for s, n in zip(self.samples.all, norms, strict=True) if n is not None]
        kinds = {n.kind for _, n in there}
        if len(kinds) != 1 or len({n.bias for _, n in there}) != 1:
            changes = {s.field for s, n in there if (n.kind, n.bias) != (there[0][1].kind, there[0][1].bias)}
            raise NoExpression(what, changes)
        norm = there[0][1]
        of = {id(s): n for s, n in there}
        some = Samples(self.samples.base, [s for s, _ in there], {})
        marked = [replace(s, decoder=replace(s.decoder, norm=of[id(s)])) for s in some.all]
        eps = Search(Samples(some.base, marked, {})).of_model(f"{what}'s epsilon", lambda m: m.norm.eps)
        bias = ["bias=True"] if norm.bias else []
        kind = [f'"{norm.kind}"', eps] if norm.kind != "rms" else [f"eps={eps}"]
        return f"d.Norm({', '.join([*kind, *bias])})"

    def _optional_norm(self, what: str, get: Any, search: Search) -> str:
        """The expression of a layer's norm; '' if it is never there."""
        if search.always(lambda layer: get(layer) is None, True):
            return ""
        of_layers = {
            id(s): [get(x) for x in s.decoder.layers if isinstance(x.attention, search.kind)]
            for s in self.samples.all
        }
        for s in self.samples.all:
            there = [n for n in of_layers[id(s)] if n is not None]
            if any(not equal(n, there[0]) for n in there):
                raise NoExpression(what, {s.field} - {""})
        norms = [next((n for n in of_layers[id(s)] if n is not None), None) for s in self.samples.all]
        if all(n is None or equal(n, s.decoder.norm) for n, s in zip(norms, self.samples.all, strict=True)):
            made = "norm"
        else:
            made = self._norm(what, norms)
            made = "norm" if made == self.norm else made
        when = search.condition(f"whether there is {what}", lambda layer: get(layer) is not None)
        return _if(made, when)

    def _attention(self) -> list[str]:
        """Keyword arguments of d.attention that are not its defaults."""
        search, found = self.attending, list(self.partial)
        given = "heads", "kv_heads", "head_size", "bias", "out_bias", "scale", "softcap", "by_head", "gated"
        for name in given:
            what, get = f"attention.{name}", attrgetter(f"attention.{name}")
            if name == "scale" and search.always(_relative_scale, 1.0):
                continue
            if name != "scale" and search.fits(f"{self.attention}.{name}", get):
                continue
            if name == "scale" and (field := self._given_scale()):
                value = field
            elif name in SIZES:
                value = search.size_of_layers(what, get, SIZES[name])
            elif name == "by_head":  # of one key head, both orders are the same
                value = search.of_layers(what, get, only=_has_groups)
            else:
                value = search.of_layers(what, get)
            found.append(f"{name}={value}")
        for name in ("head_norm", "wide_norm"):
            if made := self._optional_norm(
                f"attention.{name}", lambda layer, n=name: getattr(layer.attention, n), search
            ):
                found.append(f"{name}={made}")
        if not search.always(lambda layer: layer.attention.interleaved, False):
            style = search.condition(
                "attention.interleaved",
                lambda layer: layer.attention.interleaved or layer.attention.rope is None,
            )
            found.append(f"interleaved={style}")
        if not search.fits(self.rope, lambda layer: layer.attention.rope):
            found.append(f"rope={self._rope()}")
        return found

    def _given_scale(self) -> str:
        """The field that is the scale of the scores, where None stands for the default; '' if there is none."""
        default = f"{self.attention}.head_size ** -0.5"
        for field in self.search.attribute.values():
            if self.attending.fits(
                f"{default} if {field} is None else {field}", attrgetter("attention.scale")
            ):
                return field
        return ""

    def _rope(self) -> str:
        def get(layer: d.Layer) -> Any:
            return layer.attention.rope

        usual = ["None", self.rope.replace("config", "config, config.layer_types[i]", 1)]
        when = self.attending.condition("whether a layer has positions", lambda layer: get(layer) is not None)
        usual += [_if(self.rope, when), _if(usual[1], when)]
        return self.attending.of_layers("attention.rope", get, usual)

    def _recurrent(self, kind: type) -> str:
        """The assignment of the recurrent mixer."""
        search, made = Search(self.samples, kind), []
        sizes, others = RECURRENT[kind]
        for name in ("kernel", *sizes):
            value = search.size_of_layers(f"{kind.__name__}.{name}", attrgetter(f"attention.{name}"))
            made.append(value if name == "kernel" else f"{name}={value}")
        for name in others:
            get = attrgetter(f"attention.{name}")
            if not search.always(get, getattr(kind, name)):
                made.append(f"{name}={search.of_layers(f'{kind.__name__}.{name}', get)}")
        norm = "part_norm" if kind is d.Mamba else "norm"
        if hasattr(kind, norm) and (
            found := self._optional_norm(f"{kind.__name__}.{norm}", attrgetter(f"attention.{norm}"), search)
        ):
            made.append(f"{norm}={found}")
        return _fold(f"recurrent = d.{kind.__name__}(", made, ")", 1)

    def _names(self, recurrent: str) -> tuple[list[str], str]:
        """(lines before the layers, the argument of a layer's names). recurrent: when a layer has a recurrence."""
        every = [x for s in self.samples.all for x in s.decoder.layers]
        common = {p: n for x in every for p, n in x.names.items() if p != "self_attn"}
        mixers = {n for x in every if (n := x.names.get("self_attn", ""))}
        if len(mixers) > 1 or any(x.names.get(p, n) != n for x in every for p, n in common.items()):
            raise NoExpression("the names of a layer's modules", set())
        own = dict.fromkeys(("self_attn",), *mixers) if mixers else {}
        if recurrent == "True" or not own:
            return [], f"names={_dict({**common, **own})}" if common or own else ""
        if not common:
            return [], _folded_if(_dict(own), recurrent, "{}", "names=")
        before = [_fold("names = {", _pairs(common), "}", 1)]
        return before, _folded_if(f"{{{', '.join(_pairs(own))}, **names}}", recurrent, "names", "names=")

    def _mlp(self) -> tuple[list[str], str]:
        """(lines before the layers, expression) of the MLP, the experts, or whichever a layer has."""
        there = self.search.condition("whether a layer has an MLP", lambda layer: layer.mlp is not None)
        if there == "False":
            return [], "None"
        if there != "True":
            if not self.search.always(_is_sparse, False):
                raise NoExpression("whether a layer has an MLP or experts", set())
            return [f"    mlp = {self._dense(_is_dense)}"], f"mlp if {there} else None"
        sparse = self.search.condition("whether a layer has experts", _is_sparse)
        if sparse == "False":
            return [], self._dense(_is_dense)
        experts = self._experts()
        if sparse == "True":
            inner = experts.removeprefix("d.Experts(").removesuffix(")")
            return [], fold("d.Experts(", inner.split(", "), ")")
        lines = [f"    dense = {self._dense(_is_dense)}", _assigned("experts = ", experts)]
        return lines, _folded_if("experts", sparse, "dense")

    def _dense(self, only: Any) -> str:
        search = self.search
        inner = search.size_of_layers("mlp.intermediate", attrgetter("mlp.intermediate"), MLP_SIZES, only)
        act = search.of_layers(
            "mlp.activation", attrgetter("mlp.activation"), ("d.activation(config)",), only
        )
        made = [inner, act]
        for name, usual in (("gated", True), ("bias", False)):
            get = attrgetter(f"mlp.{name}")
            if not search.always(get, usual, only):
                made.append(f"{name}={search.of_layers(f'mlp.{name}', get, (), only)}")
        return f"d.Mlp({', '.join(made)})"

    def _experts(self) -> str:
        search, made = self.search, []
        for name in ("count", "top_k", "intermediate"):
            usual = ("config.moe_intermediate_size",) if name == "intermediate" else ()
            made.append(
                search.size_of_layers(f"experts.{name}", attrgetter(f"mlp.{name}"), usual, _is_sparse)
            )
        normalize = search.of_layers("experts.normalize", attrgetter("mlp.normalize"), (), _is_sparse)
        made += [normalize] if normalize != "True" else []
        if (names := expert_names(self.samples.base.names)) != d.Experts.names:
            made.append("names=({})".format(", ".join(map(literal, names))))
        for name, default in ROUTING.items():
            get = attrgetter(f"mlp.{name}")
            if not search.always(get, default, _is_sparse):
                made.append(f"{name}={search.of_layers(f'experts.{name}', get, (), _is_sparse)}")
        shared = attrgetter("mlp.shared")
        if not search.always(shared, 0, _is_sparse):
            several = [f"{made[2]} * {at}" for name, at in search.attribute.items() if "shared" in name]
            made.append(f"shared={search.size_of_layers('experts.shared', shared, several, _is_sparse)}")
            gate = search.of_layers("experts.shared_gate", attrgetter("mlp.shared_gate"), (), _is_sparse)
            made += [f"shared_gate={gate}"] if gate != "False" else []
        return f"d.Experts({', '.join(made)})"

    def _layers(self, differs: list[str]) -> list[str]:
        search = self.search
        norms = [
            f"{part}={made}"
            for part in NORMS
            if (made := self._optional_norm(part, lambda layer, p=part: getattr(layer, p), search))
        ]
        more = []
        if not search.always(lambda layer: layer.parallel, False):
            more.append(f"parallel={search.condition('layer.parallel', lambda layer: layer.parallel)}")
        if not search.always(lambda layer: layer.multiplier, 1.0):
            more.append(f"multiplier={search.of_layers('layer.multiplier', lambda layer: layer.multiplier)}")
        recurs = (
            "False"
            if self.recurrence is None
            else search.condition("whether a layer is recurrent", _is_recurrent)
        )
        before_names, names = self._names(recurs)
        more += [names] if names else []
        windowed = not search.always(lambda layer: layer.attention.window, None)
        attention = fold("d.attention(", ["config", *(["window"] if windowed else []), *differs], ")")
        before, mlp = self._mlp()
        before += [
            *before_names,
            *([self._recurrent(self.recurrence)] if self.recurrence is not None else []),
        ]
        mixer = attention if recurs == "False" else "recurrent"
        if recurs not in ("True", "False"):
            given = windowed or re.search(r"\b(i|window)\b", attention)
            if not given:
                before.append(_fold("attention = d.attention(", ["config", *differs], ")", 1))
            mixer = _folded_if("recurrent", recurs, attention if given else "attention")
        alone = search.condition("whether a layer has no mixer", lambda x: isinstance(x.attention, d.NoMixer))
        if alone != "False":
            mixer = _folded_if("d.NoMixer()", alone, mixer)
        arguments = [mixer, mlp, *norms, *more]
        indexed = any(re.search(r"\bi\b", a) for a in arguments)
        lines = [f"    norm = {self.norm}", *before]
        if not windowed and not indexed and not any("window" in a for a in arguments):
            lines.append(_fold("layer = d.Layer(", arguments, ")", 1))
            return [*lines, "    layers = (layer,) * config.num_hidden_layers"]
        if windowed:
            size = self._window()
            each = f"for i, window in enumerate({size})" if indexed else f"for window in {size}"
        else:
            each = "for i in range(config.num_hidden_layers)"
        layer = _fold("d.Layer(", arguments, ")", 2)
        return [*lines, "    layers = tuple(", layer, f"        {each}", "    )"]

    def _window(self) -> str:
        def get(layer: d.Layer) -> Any:
            return layer.attention.window

        for windows in ("d.windows(config)", "d.one_window(config)"):
            if self.search.fits(f"{windows}[i]", get):
                return windows
        when = self.search.condition("whether a layer has a window", lambda layer: get(layer) is not None)
        one = self.search.of_layers("attention.window", get, (_if("config.sliding_window", when),))
        return f"[{one} for i in range(config.num_hidden_layers)]"

    def _decoder(self) -> str:
        search = self.search
        made = [
            search.of_model("vocab", attrgetter("vocab"), ("config.vocab_size",)),
            search.of_model("hidden", attrgetter("hidden"), ("config.hidden_size",)),
            "layers",
            "norm",
            search.of_model("tied", attrgetter("tied"), ("config.tie_word_embeddings",)),
        ]
        for name, usual in (
            ("head_bias", False), ("embedding_scale", 1.0), ("logits_scale", 1.0), ("logits_softcap", 0.0),
        ):  # fmt: skip
            text = search.of_model(name, attrgetter(name))
            if text != literal(usual):
                made.append(f"{name}={text}")
        if any(s.decoder.positions is not None for s in self.samples.all):
            made.append(f"positions={self._positions()}")
        return _fold("return d.Decoder(", made, ")", 1)

    def _positions(self) -> str:
        """The expression of the learned positions. Raises NoExpression."""
        every = self.samples.all
        without = {s.field for s in every if s.decoder.positions is None}
        if without:
            raise NoExpression("whether positions are learned", without)
        count = self.search.of_model(
            "the number of positions", attrgetter("positions.count"), ("config.max_position_embeddings",)
        )
        offset = self.search.of_model("the first row of positions", attrgetter("positions.offset"))
        return f"d.Positions({count}{f', {offset}' if offset != '0' else ''})"


def _has_groups(layer: d.Layer) -> bool:
    """Whether the order of a packed projection's rows depends on `by_head`."""
    return isinstance(layer.attention, d.Attention) and layer.attention.kv_heads > 1


def _assigned(name: str, call: str) -> str:
    """An assignment of a call with plain arguments, in describe."""
    head, _, rest = call.partition("(")
    return _fold(f"{name}{head}(", rest.removesuffix(")").split(", "), ")", 1)


def _is_recurrent(layer: d.Layer) -> bool:
    return isinstance(layer.attention, d.Recurrent) and not isinstance(layer.attention, d.NoMixer)


def _pairs(names: Mapping[str, str]) -> list[str]:
    return [f'"{part}": "{name}"' for part, name in sorted(names.items())]


def _dict(names: Mapping[str, str]) -> str:
    return fold("{", _pairs(names), "}")


def _folded_if(value: str, condition: str, other: str, name: str = "") -> str:
    """An argument of a layer with one of two values, in parentheses if it does not fit on a line. name: its 'NAME='"""
    one = f"{name}{value} if {condition} else {other}"
    if len(one) + 13 <= WIDTH and "\n" not in one:
        return one
    chained = re.fullmatch(r"(\w+) if (.+) else (\w+)", other)  # another choice: its lines follow
    rest = "\n    ".join((chained[1], f"if {chained[2]}", f"else {chained[3]}")) if chained else other
    if other.startswith("(\n"):
        rest = other.removeprefix("(\n    ").removesuffix("\n)")
    return f"{name}(\n    {value}\n    if {condition}\n    else {rest}\n)"


def _is_sparse(layer: d.Layer) -> bool:
    return isinstance(layer.mlp, d.Experts)


def _is_dense(layer: d.Layer) -> bool:
    return isinstance(layer.mlp, d.Mlp)


def _if(value: str, condition: str) -> str:
    if condition in ("True", "False"):
        return value if condition == "True" else "None"
    if condition.startswith("not "):
        return f"None if {condition[4:]} else {value}"
    return f"{value} if {condition} else None"


def _fold(head: str, items: list[str], tail: str, depth: int) -> str:
    """The call with each argument that does not fit on the line on lines of its own, as ruff formats it."""
    indent = "    " * depth
    one = f"{indent}{head}{', '.join(items)}{tail}"
    if len(one) <= WIDTH and "\n" not in one:
        return one
    inner = f"{indent}    "
    together = inner + ", ".join(items)
    if len(together) <= WIDTH and "\n" not in together:
        return f"{indent}{head}\n{together}\n{indent}{tail}"
    lines = []
    for item in items:
        flat = " ".join(item.split()).replace("( ", "(").replace(", )", ")").replace(" )", ")")
        flat = flat.replace("{ ", "{").replace(", }", "}").replace(" }", "}")
        if len(inner) + len(flat) + 1 <= WIDTH:
            lines.append(f"{inner}{flat},")
        else:
            lines.append("\n".join(f"{inner}{line}" for line in item.splitlines()) + ",")
    return "\n".join([f"{indent}{head}", *lines, f"{indent}{tail}"])


# -- the declaration


def _architecture(samples: Samples, category: str, body: str) -> str:
    names, config = samples.base.names, samples.config
    lines = [
        "ARCH = Architecture(",
        f'    names=("{config.architectures[0]}",),',
        f'    category="{category}",',
        '    runner="Generate",',
        f'    model_type="{config.model_type}",',
    ]
    packed = {
        ours: parts
        for ours, parts in (
            *PACKED.items(),
            ("conv1d", CONVOLUTIONS),
            *(("in_proj", p) for p in PROJECTIONS.values()),
        )
        if any(f"{of}{parts[0]}" in names for of in ("", "shared_", ROLE))
    }
    if packed != PACKED:
        inside = [f'"{k}": ({", ".join(map(literal, v))})' for k, v in packed.items()]
        lines.append(_fold("packed={", inside, "},", 1))
    lines.append('    tied={"lm_head.weight": "model.embed_tokens.weight"},')
    prefixes = {
        "embedding": "model.embed_tokens", "positions": "model.embed_positions", "layers": "model.layers",
        "norm": "model.norm", "head": "lm_head",
    }  # fmt: skip
    renamed = {f"{names[k]}.": f"{ours}." for k, ours in prefixes.items() if names.get(k, ours) != ours}
    layers = [x for s in samples.all for x in s.decoder.layers]
    mixer = next((n for x in layers if (n := x.names.get("self_attn", ""))), "self_attn")
    parts = {
        theirs: ours
        for role, theirs in names.items()
        if role not in (*prefixes, "experts", "expert_gate", "expert_up", "expert_down")
        for ours in [_own_name(role, names, mixer)]
        if theirs != ours
    }
    given = declared(config)
    inner = re.search(r"d\.Mlp\(\s*config\.(\w+)", body)
    other = {"intermediate_size": inner[1] if inner else ""} | getattr(config, "attribute_map", {})
    sizes = {name: other.get(name, "") for name in REQUIRED if name not in given}
    if sizes:
        entries = ", ".join(f'"{name}": "{own}"' for name, own in sizes.items())
        lines.append(f"    sizes={{{entries}}},")
    each = "experts" in names and "experts_w13" not in names  # a matrix for each expert in the checkpoint
    if each and not any(hasattr(config, name) for name in EXPERTS):
        raise NoExpression("the number of experts, which names their weights in checkpoints,", set())
    if each:
        function = d.EXPERT_MAPPINGS.get(expert_names(names))
        if function is None:
            raise NoExpression(
                f"the names {', '.join(expert_names(names))} of an expert's projections", set()
            )
        lines.append(f'    experts="fastkernels.models.common.layers.decoder:{function}",')
    parts |= samples.aliases
    for name, mapping in (("renamed", renamed), ("parts", parts)):
        if mapping:
            lines += [f"    {name}={{", *(f'        "{k}": "{v}",' for k, v in mapping.items()), "    },"]
    return "\n".join([*lines, ")"])


def _own_name(role: str, names: Mapping[str, str], mixer: str) -> str:
    """The name in our layer of a module with this role. mixer: of a recurrent mixer"""
    own = block(names)
    if role.startswith(ROLE):
        return f"{mixer}.{role.removeprefix(ROLE)}"
    if role in MLP and own and names[role].startswith(f"{own}."):
        return f"{own}.{role}"
    if role == "experts_list":
        return names["experts"]
    if role == "router":
        return f"{own}.gate"
    if role == "correction":
        return f"{own}.gate.e_score_correction_bias"
    if role.startswith("experts_"):
        return f"{own}.{role.replace('_', '.')}_weight"
    if role == "shared_expert_gate":
        return f"{own}.{role}"
    if role.startswith("shared_"):
        return f"{own}.shared_experts.{role.removeprefix('shared_')}"
    return f"{'mlp' if role in MLP else 'self_attn'}.{role}"


def _relative_scale(layer: d.Layer) -> float:
    """The scale of the scores over the default."""
    assert isinstance(layer.attention, d.Attention) and layer.attention.scale is not None
    return layer.attention.scale * layer.attention.head_size**0.5
