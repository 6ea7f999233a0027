"""The quantization of a checkpoint by its config: which layers, in which number format, in whose layout.

Neither torch nor an op is imported; quantized.py builds the layers and reads the tensors.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase
from functools import partial
from pathlib import Path
from typing import Any, TypeAlias

from fastkernels.models.common.descriptions import registry
from fastkernels.models.common.descriptions.architecture import Architecture
from fastkernels.models.common.descriptions.description import EXPERT_MAPPINGS, Unsupported

BLOCK = 128  # rows and columns that share a float8 scale
GROUPS = (32, 64, 128, -1)  # columns that share an int4 scale; -1: all
# Routers, gates of shared experts, and the head weights of an indexer: unquantized in a model with experts, listed in
# a config or not
UNQUANTIZED = ("gate", "router", "shared_expert_gate", "weights_proj")
EXPERT_KINDS = ("fp8", "fp8_block", "int4", "nvfp4")  # number formats of a mixture's experts
# Layers whose weight is read by more than their own product: they are dequantized at load.
DENSE = ("kv_b_proj",)


@dataclass(frozen=True)
class Scheme:
    """The number format of linear layers in a checkpoint.

    method       `quant_method` in the config
    kind         'fp8' (a scale per tensor or row), 'fp8_block', 'int4', 'nvfp4', 'ternary', or 'int8'
    layout       names and order of the tensors: 'fp8', 'compressed-tensors', 'int-quantized' (int8 of
                 compressed-tensors, a byte each), 'gptq', 'gptq_v2', 'awq', 'modelopt', 'bitlinear',
                 'autobitlinear' or 'online' (BitNet's weights before quantization)
    static       x has a scale in the checkpoint
    by_row       each row of an fp8 weight has a scale
    group        columns that share a scale of int4 and int8, -1: all
    zeros        they have zero points
    act_order    their columns that share a scale need not be neighbours
    weight_only  x is not quantized, though fp8 weights are
    """

    method: str
    kind: str
    layout: str
    static: bool = False
    by_row: bool = False
    group: int = 0
    zeros: bool = False
    act_order: bool = False
    weight_only: bool = False

    @property
    def dense(self) -> bool:
        """Whether the weights are dequantized at load: no op multiplies them as they are."""
        return self.kind == "int8" or self.weight_only

    def weight_bytes(self, rows: int, columns: int, dtype_bytes: int, of_expert: bool = False) -> int:
        """Bytes of a weight with its scales, as it is kept in memory."""
        if self.dense:
            return rows * columns * dtype_bytes
        scales = rows * (1 if self.group < 0 else -(-columns // (self.group or columns)))
        sizes = {
            "fp8": rows * columns + 4 * rows,
            "fp8_block": rows * columns + 4 * -(-rows // BLOCK) * -(-columns // BLOCK),
            "int4": rows * columns // 2 + (max(dtype_bytes, 2) + self.zeros) * scales,
            "ternary": rows * columns // 4 + 4 * rows,
            "nvfp4": rows * columns * 9 // 16 + 4 * rows,
        }
        return sizes[self.kind] + 4 * (self.static and not of_expert)

    @property
    def op(self) -> str:
        ops = {"int4": "linear_int4", "nvfp4": "linear_nvfp4", "ternary": "linear_ternary"}
        return "linear" if self.dense else ops.get(self.kind, "linear_fp8")

    @property
    def expert_op(self) -> str:
        return {"int4": "fused_experts_int4", "nvfp4": "fused_experts_nvfp4"}.get(
            self.kind, "fused_experts_fp8"
        )


# Patterns of names of layers, () for all, and the format of these layers, None: unquantized
Rule: TypeAlias = tuple[tuple[str, ...], "Scheme | None"]


@dataclass(frozen=True)
class Quantization:
    """The number formats of a checkpoint's linear layers: the first rule counts that names a layer."""

    rules: tuple[Rule, ...]

    def of(self, prefix: str, arch: Architecture) -> Scheme | None:
        """The format of the linear layer, or the experts, with this prefix in our model; None: unquantized.

        Raises Unsupported if matrices that are packed into one weight here differ, and for experts in a format that
        no op has.
        """
        above, _, own = prefix.rpartition(".")
        key = arch.checkpoint_key(prefix)
        if (arch.experts and own in UNQUANTIZED) or "router" in key.split("."):
            return None
        if own == "experts":
            # The first stands for all: a checkpoint that differs lacks scales. Experts in one tensor are no layers.
            if not arch.experts:
                return None
            mapping = arch.experts.rpartition(":")[2]
            parts = next(parts for parts, function in EXPERT_MAPPINGS.items() if function == mapping)
            names, one = [f"{key}.0.{part}" for part in parts], "the experts here have one number format, of"
        else:
            keys = (".".join(filter(None, (above, part))) for part in arch.packed.get(own, (own,)))
            names, one = [arch.checkpoint_key(part) for part in keys], "one weight here has"
        found = {name: self._of_one(name, arch) for name in names}
        scheme = found[names[0]]
        if len(set(found.values())) > 1:
            left = ", ".join(name for name, other in found.items() if other is None)
            others = ", ".join(name for name, other in found.items() if other != scheme)
            what = f"leaves {left} unquantized" if left else f"has another format for {others}"
            raise Unsupported(
                f"config.quantization_config {what}: {one} {', '.join(names)}, which must be quantized alike"
            )
        if own == "experts" and scheme is not None and (scheme.dense or scheme.kind not in EXPERT_KINDS):
            inputs = " with unquantized activations" if scheme.weight_only else ""
            raise Unsupported(
                f"config.quantization_config.quant_method={scheme.method!r} is not supported with experts in"
                f" {scheme.kind}{inputs}, only in {', '.join(EXPERT_KINDS)}"
            )
        return scheme

    def _of_one(self, name: str, arch: Architecture) -> Scheme | None:
        """The format of a layer, which has several names if the checkpoint may be one with images."""
        longer = [
            other + name.removeprefix(own) for other, own in arch.prefixes.items() if name.startswith(own)
        ]
        for patterns, scheme in self.rules:
            if not patterns or any(_matches(n, pattern) for n in (name, *longer) for pattern in patterns):
                return scheme
        return None


def _matches(name: str, pattern: str) -> bool:
    """Whether a pattern of a config names a module: 're:REGEX', a wildcard, or whole parts of the name."""
    if pattern.startswith("re:"):
        try:
            return re.match(pattern.removeprefix("re:"), name) is not None
        except re.error as error:
            raise Unsupported(
                f"config.quantization_config: {pattern!r} is no regular expression: {error}"
            ) from error
    return fnmatchcase(name, pattern) or f".{pattern}." in f".{name}."


def _made(scheme: Scheme, skipped: tuple[str, ...]) -> Quantization:
    """One format for all layers but those that are skipped."""
    return Quantization((*_skip(skipped), ((), scheme)))


def _skip(names: tuple[str, ...]) -> tuple[Rule, ...]:
    return ((names, None),) if names else ()


def read(config: Any) -> Quantization | None:
    """The number formats of a config's `quantization_config`; None without one.

    Raises Unsupported, which names the field, its value and what is supported.
    """
    raw = getattr(config, "quantization_config", None)
    if not raw:
        return None
    raw = raw if isinstance(raw, Mapping) else raw.to_dict()
    method = raw.get("quant_method", "modelopt" if "quantization" in raw else None)
    names = getattr(config, "architectures", None) or [""]
    arch = registry.find(names[0], config).arch
    if method in arch.quantization:
        return None  # in parameters of the model itself
    if arch.quantization:
        raise _unsupported("quant_method", method, *arch.quantization)
    if not isinstance(method, str) or method not in READERS:
        raise _unsupported("quant_method", method, *READERS)
    made = READERS[method](_Fields(raw))
    if arch.runner != "Generate":
        raise Unsupported(
            f"config.quantization_config.quant_method={method!r} is not supported with the runner {arch.runner}, only"
            " with language models"
        )
    return made


def with_own_file(config: Any, folder: Path) -> None:
    """Set the config's quantization_config from its older name, or the file of ModelOpt, AutoGPTQ or AutoAWQ."""
    if getattr(config, "quantization_config", None):
        return
    if isinstance(older := getattr(config, "compression_config", None), Mapping):
        config.quantization_config = older
        return
    files = [folder / name for name in OWN_FILES if (folder / name).is_file()]
    if not files:
        return
    file, method = files[0], OWN_FILES[files[0].name]
    try:
        found = json.loads(file.read_text())
        found = found.get("quantization", found) if method == "modelopt" else found
        if method != "modelopt" or found["quant_algo"]:  # None: of the KV cache alone
            config.quantization_config = {"quant_method": method, **found}
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise Unsupported(f"{file} is not a quantization of {method}: {error!r}") from error


# The quantization_config of checkpoints whose config.json has none, and its quant_method.
OWN_FILES = {"hf_quant_config.json": "modelopt", "quantize_config.json": "gptq", "quant_config.json": "awq"}


def _unsupported(name: str, value: Any, *allowed: Any) -> Unsupported:
    return Unsupported(
        f"config.quantization_config.{name}={value!r} is not supported, only {', '.join(map(repr, allowed))}"
    )


class _Fields:
    """Fields of a quantization_config; `within` is their path in it."""

    def __init__(self, raw: Mapping[str, Any], within: str = "") -> None:
        self.raw, self.within = raw, within

    def one_of(self, name: str, *allowed: Any, default: Any = None) -> Any:
        """The value of a field, which must be one of `allowed`; None or a missing field is the default."""
        value = self.raw.get(name)
        value = default if value is None else value
        if not any(type(value) is type(one) and value == one for one in allowed):  # True is not 1
            raise _unsupported(f"{self.within}{name}", value, *allowed)
        return value

    def absent(self, *names: str) -> None:
        """Raise Unsupported for the first of these fields that has a value."""
        for name in names:
            if self.raw.get(name):
                raise _unsupported(f"{self.within}{name}", self.raw[name], None)

    def names(self, *fields: str) -> tuple[str, ...]:
        """The names of modules that these fields list."""
        found: list[str] = []
        for field in fields:
            listed = self.raw.get(field) or []
            if not isinstance(listed, list) or not all(isinstance(n, str) for n in listed):
                raise Unsupported(
                    f"config.quantization_config.{self.within}{field}={listed!r} is not a list of module names"
                )
            found += listed
        return tuple(found)

    def part(self, name: str) -> _Fields:
        value = self.raw.get(name) or {}
        if not isinstance(value, Mapping):
            raise Unsupported(
                f"config.quantization_config.{self.within}{name}={value!r} is not a table of fields"
            )
        return _Fields(value, f"{self.within}{name}.")


def _fp8(f: _Fields) -> Quantization:
    f.one_of("fmt", "e4m3", default="e4m3")
    f.one_of("is_checkpoint_fp8_serialized", True, default=True)
    f.absent("store_dtype")
    block = f.raw.get("weight_block_size")
    if block is not None and block != [BLOCK, BLOCK]:
        raise _unsupported("weight_block_size", block, None, [BLOCK, BLOCK])
    allowed = ("dynamic",) if block else ("dynamic", "static")
    static = f.one_of("activation_scheme", *allowed, default="dynamic") == "static"
    skipped = f.names("modules_to_not_convert", "ignored_layers")
    return _made(Scheme("fp8", "fp8_block" if block else "fp8", "fp8", static), skipped)


def _fbgemm(f: _Fields) -> Quantization:
    scheme = Scheme("fbgemm_fp8", "fp8", "compressed-tensors", by_row=True)
    return _made(scheme, f.names("modules_to_not_convert"))


def _compressed_tensors(f: _Fields) -> Quantization:
    f.absent("transform_config")
    f.part("sparsity_config").one_of("format", "dense", default="dense")
    groups, rules = f.part("config_groups"), []
    for name in groups.raw:
        group = groups.part(name)
        targets = group.names("targets")
        if targets and all(target.endswith("Attention") for target in targets):
            continue  # of the KV cache alone
        if unknown := [t for t in targets if t.isidentifier() and t[0].isupper() and t != "Linear"]:
            raise _unsupported(f"{group.within}targets", unknown[0], "Linear", "re:PATTERN", "NAME.OF.MODULE")
        rules.append((() if "Linear" in targets else targets, _compressed(f, group)))
    if not rules and not f.raw.get("kv_cache_scheme"):
        raise Unsupported("config.quantization_config.config_groups has no group of linear layers")
    rules.sort(key=lambda rule: not rule[0])  # names before classes
    return Quantization((*_skip(f.names("ignore")), *rules))


def _compressed(f: _Fields, group: _Fields) -> Scheme:
    """The format of one group."""
    group.absent("output_activations")
    weights, inputs = group.part("weights"), group.part("input_activations")
    made = partial(Scheme, "compressed-tensors", layout="compressed-tensors")
    if group.raw.get("format") is not None:  # instead of the one of all groups
        f = group
    integers = weights.one_of("type", "float", "int", default="int") == "int"
    bits, size = weights.one_of("num_bits", 8, 4), weights.raw.get("group_size")
    # As compressed-tensors has it where the strategy is missing
    default = "tensor" if size is None else "channel" if size == -1 else "group"
    if integers:
        forms = ("pack-quantized", "int-quantized") if bits == 8 else ("pack-quantized",)
        if f.one_of("format", *forms, default="pack-quantized") == "int-quantized":
            weights.one_of("symmetric", True, default=True)
            weights.one_of("strategy", "channel", default=default)
            return made("int8", layout="int-quantized", group=-1)
        group.absent("input_activations")
        per_group = weights.one_of("strategy", "group", "channel", default=default) == "group"
        size = weights.one_of("group_size", *GROUPS, default=-1) if per_group else -1
        orders = ("group", "dynamic", True)
        order = weights.one_of("actorder", "weight", "static", *orders, False, default="static")
        zeros = not weights.one_of("symmetric", True, False, default=True)
        return made(f"int{bits}", group=size, zeros=zeros, act_order=order in orders)
    weights.one_of("symmetric", True, default=True)
    if bits == 4:
        f.one_of("format", "nvfp4-pack-quantized")
        weights.one_of("group_size", 16)
        return made("nvfp4")
    f.one_of("format", "float-quantized", "naive-quantized", default="float-quantized")
    strategy = weights.one_of("strategy", "tensor", "channel", "block", default=default)
    kind, by_row = "fp8_block" if strategy == "block" else "fp8", strategy == "channel"
    if kind == "fp8_block":
        block = weights.raw.get("block_structure")
        if block not in ([BLOCK, BLOCK], f"{BLOCK}x{BLOCK}"):
            raise _unsupported(f"{weights.within}block_structure", block, [BLOCK, BLOCK])
    if not inputs.raw:
        return made(kind, by_row=by_row, weight_only=True)
    inputs.one_of("num_bits", 8)
    inputs.one_of("type", "float")
    inputs.one_of("symmetric", True, default=True)
    dynamic = inputs.one_of("dynamic", *((True,) if strategy == "block" else (True, False)), default=False)
    allowed = ("token", "tensor", "group") if strategy == "block" else ("token", "tensor")
    if inputs.one_of("strategy", *(allowed if dynamic else ("tensor",)), default="tensor") == "group":
        inputs.one_of("group_size", BLOCK, default=BLOCK)
    return made(kind, static=not dynamic, by_row=by_row)


def _gptq(f: _Fields) -> Quantization:
    f.one_of("lm_head", False, default=False)
    f.one_of("is_marlin_format", False, default=False)
    inside, skipped = "modules_in_block_to_quantize", f.names("modules_to_not_convert")
    steps = f.raw.get(inside) or []
    if isinstance(steps, list):  # of names, or of lists of names
        steps = [name for step in steps for name in (step if isinstance(step, list) else [step])]
    targets = _Fields({inside: steps}).names(inside)
    whole, dynamic, rules = _gptq_scheme(f, f), f.part("dynamic"), []
    for pattern in dynamic.raw:  # "-:REGEX" is not quantized, "+:REGEX" or "REGEX" differs
        own, name = dynamic.part(pattern), pattern.removeprefix("-:").removeprefix("+:")
        rules.append(((f"re:{name}",), None if pattern.startswith("-:") else _gptq_scheme(f, own)))
    return Quantization((*_skip(skipped), *rules, (targets, whole)))


def _gptq_scheme(f: _Fields, own: _Fields) -> Scheme:
    """The format by fields of `own`, by default those of all layers."""
    f = _Fields({**f.raw, **own.raw}, own.within)
    kind = {4: "int4", 8: "int8"}[f.one_of("bits", 4, 8)]
    size = f.one_of("group_size", *GROUPS, default=128)
    order = f.one_of("desc_act", True, False, default=False)
    layout = f.one_of("checkpoint_format", "gptq", "gptq_v2", default="gptq")
    zeros = not f.one_of("sym", True, False, default=True)
    return Scheme("gptq", kind, layout, group=size, zeros=zeros, act_order=order)


AUTO_ROUND = "auto_round:auto_gptq", "auto_round:auto_awq"
AWQ_NAMES = {"w_bit": "bits", "q_group_size": "group_size"}  # of fields in quant_config.json


def _awq(f: _Fields) -> Quantization:
    f = _Fields({AWQ_NAMES.get(name, name): value for name, value in f.raw.items()}, f.within)
    f.one_of("bits", 4)
    f.one_of("version", "gemm", "GEMM", default="gemm")
    f.one_of("lm_head", False, default=False)
    if f.raw.get("backend") == "llm-awq":
        raise _unsupported("backend", "llm-awq", "autoawq")
    size = f.one_of("group_size", *GROUPS, default=128)
    zeros = f.one_of("zero_point", True, False, default=True)
    skipped = tuple(name.strip(".") for name in f.names("modules_to_not_convert"))
    return _made(Scheme("awq", "int4", "awq", group=size, zeros=zeros), skipped)


def _auto_round(f: _Fields) -> Quantization:
    """AutoRound's fields for weights in the layout of GPTQ or AWQ."""
    f.one_of("data_type", "int", default="int")
    awq = f.one_of("packing_format", *AUTO_ROUND, default=AUTO_ROUND[0]) == AUTO_ROUND[1]

    def scheme(own: _Fields) -> Scheme | None:
        fields = _Fields({**f.raw, **own.raw}, own.within)
        symmetric = fields.one_of("sym", *((True, False) if awq else (True,)), default=True)
        raw = {name: fields.raw.get(name) for name in ("bits", "group_size", "lm_head")}
        raw |= {"sym": symmetric, "zero_point": not symmetric}
        return (_awq if awq else _gptq)(_Fields(raw, own.within)).rules[0][1]

    whole, differs, rules = scheme(f), f.part("extra_config"), []
    for name in differs.raw:
        own = differs.part(name)
        bits = own.raw.get("bits", 16)
        pattern = name if name.replace(".", "").isidentifier() else f"re:.*(?:{name.removeprefix('^')})"
        rules.append(((pattern,), None if type(bits) is int and bits >= 16 else scheme(own)))
    return Quantization((*rules, ((), whole)))


MIXED = "MIXED_PRECISION"  # of ModelOpt: each layer has a `quant_algo`


def _modelopt(f: _Fields) -> Quantization:
    if isinstance(f.raw.get("quantization"), Mapping):
        f = f.part("quantization")
    skipped = f.names("ignore", "exclude_modules")
    if f.raw.get("quant_algo") != MIXED:
        return _made(_modelopt_scheme(f, MIXED), skipped)
    layers, formats = f.part("quantized_layers"), {}  # type: ignore[var-annotated]
    for name in layers.raw:
        if not re.search(r"\.experts\.[1-9]", name):  # the first expert stands for all
            formats.setdefault(_modelopt_scheme(layers.part(name)), []).append(name)
    return Quantization((*_skip(skipped), *((tuple(names), scheme) for scheme, names in formats.items())))


def _modelopt_scheme(f: _Fields, *others: str) -> Scheme:
    algorithm = f.raw.get("quant_algo")
    made = partial(Scheme, "modelopt", layout="modelopt")
    formats = {
        "FP8": made("fp8", static=True),
        "FP8_PER_CHANNEL_PER_TOKEN": made("fp8", by_row=True),
        "FP8_PB_WO": made("fp8_block"),
        "NVFP4": made("nvfp4"),
        "W4A16_NVFP4": made("nvfp4"),
    }
    found = formats.get(algorithm.upper()) if isinstance(algorithm, str) else None
    if found is None:
        raise _unsupported(f"{f.within}quant_algo", algorithm, *formats, *others)
    if found.kind == "nvfp4":
        f.one_of("group_size", 16, default=16)
    return found


def _bitnet(f: _Fields) -> Quantization:
    f.one_of("use_rms_norm", False, default=False)
    layout = f.one_of("linear_class", "bitlinear", "autobitlinear", default="bitlinear")
    online = f.one_of("quantization_mode", "offline", "online", default="offline") == "online"
    if online and layout == "autobitlinear":
        layout = "online"
    return _made(Scheme("bitnet", "ternary", layout), f.names("modules_to_not_convert"))


READERS: Mapping[str, Callable[[_Fields], Quantization]] = {
    "fp8": _fp8,
    "fbgemm_fp8": _fbgemm,
    "compressed-tensors": _compressed_tensors,
    "gptq": _gptq,
    "awq": _awq,
    "auto-round": _auto_round,
    "modelopt": _modelopt,
    "modelopt_fp4": _modelopt,
    "bitnet": _bitnet,
}
