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
from typing import Any

from fastkernels.models.common import registry
from fastkernels.models.common.architecture import Architecture
from fastkernels.models.common.description import EXPERT_MAPPINGS, Unsupported

BLOCK = 128  # rows and columns that share a float8 scale
GROUPS = (32, 64, 128, -1)  # columns that share an int4 scale; -1: all
# Routers, gates of shared experts, and the head weights of an indexer: unquantized in a model with experts, listed in
# a config or not
UNQUANTIZED = ("gate", "router", "shared_expert_gate", "weights_proj")
EXPERT_KINDS = ("fp8", "fp8_block", "int4", "nvfp4")  # number formats of a mixture's experts
AS_DENSE = ("int8",)  # number formats that are dequantized at load
# Layers whose weight is read by more than their own product: they are dequantized at load.
DENSE = ("kv_b_proj",)


@dataclass(frozen=True)
class Scheme:
    """The number format of a checkpoint's linear layers.

    method    `quant_method` in the config
    kind      'fp8' (a scale per tensor or row), 'fp8_block', 'int4', 'nvfp4', 'ternary', or 'int8', which is
              dequantized at load
    layout    names and order of the tensors: 'fp8', 'compressed-tensors', 'gptq', 'gptq_v2', 'awq', 'modelopt',
              'bitlinear', 'autobitlinear' or 'online' (BitNet's weights before quantization)
    static    x has a scale in the checkpoint
    by_row    each row of an fp8 weight has a scale
    group     columns that share a scale of int4 and int8, -1: all
    zeros     they have zero points
    act_order their columns that share a scale need not be neighbours
    skipped   patterns of modules that are not quantized; targets: of those that are, () for all
    """

    method: str
    kind: str
    layout: str
    static: bool = False
    by_row: bool = False
    group: int = 0
    zeros: bool = False
    act_order: bool = False
    skipped: tuple[str, ...] = ()
    targets: tuple[str, ...] = ()

    def quantizes(self, prefix: str, arch: Architecture) -> bool:
        """Whether the linear layer with this prefix in our model is quantized.

        Raises Unsupported if only some of the matrices are that are packed into one weight here.
        """
        above, _, own = prefix.rpartition(".")
        key = arch.checkpoint_key(prefix)
        if (arch.experts and own in UNQUANTIZED) or "router" in key.split("."):
            return False
        if own == "experts":
            # The first stands for all: a checkpoint that differs lacks scales. Experts in one tensor are no layers.
            if not arch.experts:
                return False
            mapping = arch.experts.rpartition(":")[2]
            parts = next(parts for parts, function in EXPERT_MAPPINGS.items() if function == mapping)
            names, one = [f"{key}.0.{part}" for part in parts], "the experts here have one number format, of"
        else:
            keys = (".".join(filter(None, (above, part))) for part in arch.packed.get(own, (own,)))
            names, one = [arch.checkpoint_key(part) for part in keys], "one weight here has"
        found = {name: self._quantizes_one(name, arch) for name in names}
        if len(set(found.values())) > 1:
            left = ", ".join(name for name, quantized in found.items() if not quantized)
            raise Unsupported(
                f"config.quantization_config leaves {left} unquantized: {one} {', '.join(names)}, which must"
                " be quantized together"
            )
        return all(found.values())

    def _quantizes_one(self, name: str, arch: Architecture) -> bool:
        """Whether a layer is, which has several names if the checkpoint may be one with images."""
        longer = [
            other + name.removeprefix(own) for other, own in arch.prefixes.items() if name.startswith(own)
        ]

        def listed(patterns: tuple[str, ...]) -> bool:
            return any(_matches(one, pattern) for one in (name, *longer) for pattern in patterns)

        return (not self.targets or listed(self.targets)) and not listed(self.skipped)

    def weight_bytes(self, rows: int, columns: int, dtype_bytes: int, of_expert: bool = False) -> int:
        """Bytes of a weight with its scales, as it is kept in memory."""
        scales = rows * (1 if self.group < 0 else -(-columns // (self.group or columns)))
        sizes = {
            "fp8": rows * columns + 4 * rows,
            "fp8_block": rows * columns + 4 * -(-rows // BLOCK) * -(-columns // BLOCK),
            "int4": rows * columns // 2 + (max(dtype_bytes, 2) + self.zeros) * scales,
            "ternary": rows * columns // 4 + 4 * rows,
            "nvfp4": rows * columns * 9 // 16 + 4 * rows,
            **dict.fromkeys(AS_DENSE, rows * columns * dtype_bytes),
        }
        return sizes[self.kind] + 4 * (self.static and not of_expert)

    @property
    def op(self) -> str:
        ops = {"int4": "linear_int4", "nvfp4": "linear_nvfp4", "ternary": "linear_ternary", "int8": "linear"}
        return ops.get(self.kind, "linear_fp8")

    @property
    def expert_op(self) -> str:
        return {"int4": "fused_experts_int4", "nvfp4": "fused_experts_nvfp4"}.get(
            self.kind, "fused_experts_fp8"
        )


def _matches(name: str, pattern: str) -> bool:
    """Whether a pattern of a config names a module: 're:REGEX', a wildcard, or whole parts of the name."""
    if pattern.startswith("re:"):
        return re.match(pattern.removeprefix("re:"), name) is not None
    return fnmatchcase(name, pattern) or f".{pattern}." in f".{name}."


def read(config: Any) -> Scheme | None:
    """The scheme of a config's `quantization_config`; None without one.

    Raises Unsupported, which names the field, its value and what is supported.
    """
    raw = getattr(config, "quantization_config", None)
    if not raw:
        return None
    raw = raw if isinstance(raw, Mapping) else raw.to_dict()
    method = raw.get("quant_method")
    names = getattr(config, "architectures", None) or [""]
    arch = registry.find(names[0], config).arch
    if method in arch.quantization:
        return None  # in parameters of the model itself
    if arch.quantization:
        raise _unsupported("quant_method", method, *arch.quantization)
    if not isinstance(method, str) or method not in READERS:
        raise _unsupported("quant_method", method, *READERS)
    scheme = READERS[method](_Fields(raw))
    if arch.runner != "Generate":
        raise Unsupported(
            f"config.quantization_config.quant_method={method!r} is not supported with the runner {arch.runner}, only"
            " with language models"
        )
    if arch.experts and scheme.kind not in EXPERT_KINDS:
        raise Unsupported(
            f"config.quantization_config.quant_method={method!r} is not supported with experts in {scheme.kind}, only"
            f" in {', '.join(EXPERT_KINDS)}"
        )
    return scheme


def with_own_file(config: Any, folder: Path) -> None:
    """Set the config's quantization_config from the file of ModelOpt, AutoGPTQ or AutoAWQ, if only that has it."""
    files = [folder / name for name in OWN_FILES if (folder / name).is_file()]
    if getattr(config, "quantization_config", None) or not files:
        return
    file, method = files[0], OWN_FILES[files[0].name]
    try:
        found = json.loads(file.read_text())
        found = found["quantization"] if method == "modelopt" else found
        if method != "modelopt" or found["quant_algo"]:  # None: of the KV cache alone
            config.quantization_config = {"quant_method": method, **found}
    except (OSError, ValueError, KeyError, TypeError) as error:
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


def _fp8(f: _Fields) -> Scheme:
    f.one_of("fmt", "e4m3", default="e4m3")
    f.one_of("is_checkpoint_fp8_serialized", True, default=True)
    block = f.raw.get("weight_block_size")
    if block is not None and block != [BLOCK, BLOCK]:
        raise _unsupported("weight_block_size", block, None, [BLOCK, BLOCK])
    allowed = ("dynamic",) if block else ("dynamic", "static")
    static = f.one_of("activation_scheme", *allowed, default="dynamic") == "static"
    skipped = f.names("modules_to_not_convert", "ignored_layers")
    return Scheme("fp8", "fp8_block" if block else "fp8", "fp8", static, skipped=skipped)


def _compressed_tensors(f: _Fields) -> Scheme:
    f.absent("transform_config")
    f.part("sparsity_config").one_of("format", "dense", default="dense")
    groups = f.part("config_groups")
    if len(groups.raw) != 1:
        raise Unsupported(
            f"config.quantization_config.config_groups has {len(groups.raw)} groups ({', '.join(groups.raw)}), only one"
            " is supported"
        )
    group = groups.part(next(iter(groups.raw)))
    group.absent("output_activations")
    weights, inputs = group.part("weights"), group.part("input_activations")
    kind = weights.one_of("type", "float", "int", default="int")
    bits = weights.one_of("num_bits", *((8, 4) if kind == "float" else (4,)))
    targets = group.names("targets")
    if unknown := [t for t in targets if t.isidentifier() and t[0].isupper() and t != "Linear"]:
        raise _unsupported(f"{group.within}targets", unknown[0], "Linear", "re:PATTERN", "NAME.OF.MODULE")
    targets = () if "Linear" in targets else targets
    name = "compressed-tensors"
    made = partial(Scheme, name, layout=name, skipped=f.names("ignore"), targets=targets)
    if group.raw.get("format") is not None:  # instead of the one of all groups
        f = group
    if kind == "int":
        group.absent("input_activations")
        f.one_of("format", "pack-quantized", default="pack-quantized")
        per_group = weights.one_of("strategy", "group", "channel") == "group"
        size = weights.one_of("group_size", *GROUPS, default=-1) if per_group else -1
        order = weights.one_of("actorder", "weight", "static", "group", "dynamic", default="static")
        zeros = not weights.one_of("symmetric", True, False, default=True)
        return made("int4", group=size, zeros=zeros, act_order=order in ("group", "dynamic"))
    weights.one_of("symmetric", True, default=True)
    if bits == 4:
        f.one_of("format", "nvfp4-pack-quantized")
        weights.one_of("group_size", 16)
        return made("nvfp4")
    strategy = weights.one_of("strategy", "tensor", "channel", "block")
    if strategy == "block":
        block = weights.raw.get("block_structure")
        if list(block or ()) != [BLOCK, BLOCK]:
            raise _unsupported(f"{weights.within}block_structure", block, [BLOCK, BLOCK])
    inputs.one_of("num_bits", 8)
    inputs.one_of("type", "float")
    dynamic = inputs.one_of("dynamic", *((True,) if strategy == "block" else (True, False)), default=False)
    inputs.one_of("strategy", *(("token", "tensor", "group") if dynamic else ("tensor",)))
    kind, by_row = "fp8_block" if strategy == "block" else "fp8", strategy == "channel"
    return made(kind, static=not dynamic, by_row=by_row)


def _gptq(f: _Fields) -> Scheme:
    kind = {4: "int4", 8: "int8"}[f.one_of("bits", 4, 8)]
    size = f.one_of("group_size", *GROUPS, default=128)
    order = f.one_of("desc_act", True, False, default=False)
    f.one_of("lm_head", False, default=False)
    f.absent("dynamic")
    layout = f.one_of("checkpoint_format", "gptq", "gptq_v2", default="gptq")
    zeros = not f.one_of("sym", True, False, default=True)
    inside, skipped = "modules_in_block_to_quantize", f.names("modules_to_not_convert")
    steps = f.raw.get(inside) or []
    if isinstance(steps, list):  # of names, or of lists of names
        steps = [name for step in steps for name in (step if isinstance(step, list) else [step])]
    targets = _Fields({inside: steps}).names(inside)
    return Scheme(
        "gptq", kind, layout, group=size, zeros=zeros, act_order=order, skipped=skipped, targets=targets
    )


AWQ_NAMES = {"w_bit": "bits", "q_group_size": "group_size"}  # of fields in quant_config.json


def _awq(f: _Fields) -> Scheme:
    f = _Fields({AWQ_NAMES.get(name, name): value for name, value in f.raw.items()})
    f.one_of("bits", 4)
    f.one_of("version", "gemm", "GEMM", default="gemm")
    size = f.one_of("group_size", *GROUPS, default=128)
    zeros = f.one_of("zero_point", True, False, default=True)
    return Scheme("awq", "int4", "awq", group=size, zeros=zeros, skipped=f.names("modules_to_not_convert"))


def _modelopt(f: _Fields) -> Scheme:
    algorithm = f.one_of("quant_algo", "FP8", "NVFP4")
    skipped = f.names("ignore", "exclude_modules")
    if algorithm == "FP8":
        return Scheme("modelopt", "fp8", "modelopt", True, skipped=skipped)
    f.one_of("group_size", 16, default=16)
    return Scheme("modelopt", "nvfp4", "modelopt", skipped=skipped)


def _bitnet(f: _Fields) -> Scheme:
    f.one_of("use_rms_norm", False, default=False)
    layout = f.one_of("linear_class", "bitlinear", "autobitlinear", default="bitlinear")
    online = f.one_of("quantization_mode", "offline", "online", default="offline") == "online"
    if online and layout == "autobitlinear":
        layout = "online"
    return Scheme("bitnet", "ternary", layout, skipped=f.names("modules_to_not_convert"))


READERS: Mapping[str, Callable[[_Fields], Scheme]] = {
    "fp8": _fp8,
    "compressed-tensors": _compressed_tensors,
    "gptq": _gptq,
    "awq": _awq,
    "modelopt": _modelopt,
    "bitnet": _bitnet,
}
