"""Checks of a config before a model is built from it: the message names field, value, and what is supported."""

from __future__ import annotations

import json
import re
import reprlib
from pathlib import Path
from typing import Any

from fastkernels.models.common.checkpoints import quantization
from fastkernels.models.common.checkpoints.checkpoint import CheckpointError
from fastkernels.models.common.descriptions import registry
from fastkernels.models.common.descriptions.architecture import Architecture
from fastkernels.models.common.descriptions.description import (
    Attention,
    Decoder,
    Mlp,
    Recurrent,
    Unsupported,
    check_rope,
)

MOST = 10_000  # building more would take hours
COUNTS = {
    "layers": re.compile(r"(^|[_.])(layers?|blocks|depths?(\.\d+)?)$"),
    "experts": re.compile(r"(^|_)experts$"),
}
REQUIRED = ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads")
POSITIVE = (
    *REQUIRED, "num_key_value_heads", "head_dim", "max_position_embeddings", "moe_intermediate_size", "num_experts",
    "num_local_experts", "num_experts_per_tok", "sliding_window", "kv_lora_rank", "q_lora_rank", "qk_nope_head_dim",
    "qk_rope_head_dim", "v_head_dim", "n_group", "topk_group", "index_topk", "index_n_heads", "index_head_dim",
    "query_pre_attn_scalar", "state_size", "conv_kernel", "n_groups", "num_heads", "time_step_rank", "expand",
    "linear_num_key_heads", "linear_num_value_heads", "linear_key_head_dim", "linear_value_head_dim",
    "linear_conv_kernel_dim", "linear_num_heads", "linear_head_dim", "mamba_d_state", "mamba_d_conv", "mamba_expand",
    "mamba_dt_rank",
)  # fmt: skip
PERIODS = "attn_layer_period", "expert_layer_period"  # transformers divides by them
# Fields of which the first is a multiple of the second
MULTIPLES = (
    ("num_attention_heads", "num_key_value_heads"), ("num_heads", "n_groups"), ("mamba_num_heads", "n_groups"),
    ("mamba_n_heads", "mamba_n_groups"), ("linear_num_value_heads", "linear_num_key_heads"),
)  # fmt: skip
# Two are names of sparse attention, in transformers' releases; linear attention is any recurrent layer. A layer of
# kind mlp mixes no tokens.
LAYER_TYPES = (
    "full_attention", "sliding_attention", "indexed_attention", "deepseek_sparse_attention", "linear_attention",
    "conv", "mlp",
)  # fmt: skip
DTYPES = "float32", "float16", "bfloat16", "float64"
PADDING = 64  # of the vocabulary
MOST_RANKS = 64
UNLIMITED = int(1e30)  # transformers' word for no limit of a length


def check_file(folder: Path) -> None:
    """Raise CheckpointError for a config.json that needs code of its own, contradicts itself or lacks a size.

    Also for one that is no JSON object, and for integers of more than 64 bits. An unreadable file passes: transformers
    describes its problem.
    """
    file = folder / "config.json"
    try:
        raw = json.loads(file.read_text())
    except (OSError, ValueError):
        return
    if not isinstance(raw, dict):
        raise CheckpointError(f"{file} must hold a JSON object, got {reprlib.repr(raw)}")
    quantized = raw.get("quantization_config")
    if not isinstance(quantized, dict | None):
        raise CheckpointError(f"{file}: quantization_config={quantized!r} is not a table of fields")
    names, kind, known = raw.get("architectures") or [], raw.get("model_type"), registry.by_architecture()
    arch = known[names[0]].arch if isinstance(names, list) and names and names[0] in known else None
    if arch is None:
        if raw.get("auto_map"):
            raise CheckpointError(
                f"{file}: architectures={names!r} needs Python code of the checkpoint (auto_map), which FastKernels"
                f" does not run; supported without it: {', '.join(sorted(known))}"
            )
        return
    _check_dtype(file, raw)
    _check_integers(file, raw)
    for name in PERIODS:
        if not (type(raw.get(name, 1)) is int and raw.get(name, 1) > 0):
            raise CheckpointError(f"{file}: {name}={raw[name]!r} is not supported, only integers above 0")
    if names[0] in arch.text_of:
        raw = raw.get(arch.within)
        if not isinstance(raw, dict):
            raise CheckpointError(f"{file} has no {arch.within}, which {names[0]} needs")
        kind = raw.get("model_type")
        _check_dtype(file, raw)
    if kind is not None and kind not in (arch.model_type, *arch.aliases):
        raise CheckpointError(
            f"{file}: model_type={kind!r} contradicts architectures={names!r}, whose model_type is {arch.model_type!r}"
        )
    if arch.inputs == "tokens":
        _check_values(file, raw, arch)
    if arch.inputs != "tokens" or names[0] in arch.text_of or arch.media:
        return  # transformers' defaults are public models: wrong sizes do not fit the weights
    required = [name for size in REQUIRED if (name := arch.sizes.get(size, size))]
    missing = [name for name in required if name not in raw]
    if missing:
        raise CheckpointError(f"{file} has no {', '.join(missing)}")


def _check_values(file: Path, raw: dict[str, Any], arch: Architecture) -> None:
    """Raise CheckpointError for values on which transformers fails without the field's name."""
    for name in (arch.sizes.get(size, size) for size in REQUIRED):
        if type(raw.get(name)) is int and raw[name] < 1:
            raise CheckpointError(
                f"{file}: config.{name}={raw[name]} is not supported, only integers above 0"
            )
    for field in ("rope_parameters", "rope_scaling"):
        found = raw.get(field)
        if not isinstance(found, dict | None):
            raise CheckpointError(
                f"{file}: config.{field}={reprlib.repr(found)} is not supported, only a table of fields"
            )
        tables = [own for own in (found or {}).values() if isinstance(own, dict)] or [found or {}]
        for table in tables:
            try:
                check_rope(table, field)
            except Unsupported as error:
                raise CheckpointError(f"{file}: {error}") from error


def _check_dtype(file: Path, raw: dict[str, Any]) -> None:
    for name in ("dtype", "torch_dtype"):
        if raw.get(name) not in (None, *DTYPES):
            raise CheckpointError(f"{file}: {name}={raw[name]!r} is not supported, only {', '.join(DTYPES)}")


def _check_integers(file: Path, given: Any, name: str = "") -> None:
    if isinstance(given, (dict, list)):
        for key, value in given.items() if isinstance(given, dict) else enumerate(given):
            _check_integers(file, value, f"{name}.{key}" if name else str(key))
    elif type(given) is int and abs(given) >= 2**63 and given != UNLIMITED:
        raise CheckpointError(f"{file}: {name}={reprlib.repr(given)} is too large, it must fit into 64 bits")
    elif type(given) is int and given > MOST:
        for what, names in COUNTS.items():
            if names.search(name):
                raise CheckpointError(
                    f"{file}: {name}={given} is too large, at most {MOST} {what} are possible"
                )


def check(config: Any) -> None:
    """Raise Unsupported for sizes that are no sizes, or that contradict each other."""
    registry.allow_mixed_sizes(config)
    known = registry.by_architecture().get((getattr(config, "architectures", None) or [""])[0])
    for name in POSITIVE:
        if known is not None and known.arch.sizes.get(name) == "":
            continue  # the model checks what it has instead
        value = getattr(config, name, None)
        if name == "sliding_window" and value == 0 and getattr(config, "use_sliding_window", None) is False:
            continue  # transformers sets an unused window of Qwen2-MoE to 0
        if value is not None and not (type(value) is int and value > 0):
            raise Unsupported(f"config.{name}={value!r} is not supported, only integers above 0")
    for names in MULTIPLES:
        heads, groups = (getattr(config, name, None) for name in names)
        if type(heads) is type(groups) is int and groups > 0 and heads % groups:
            raise Unsupported(f"config.{names[0]}={heads} is not a multiple of {names[1]}={groups}")
    experts = getattr(config, "num_experts", None) or getattr(config, "num_local_experts", None)
    experts = experts or getattr(config, "n_routed_experts", None)
    chosen = getattr(config, "num_experts_per_tok", 0)
    if experts and chosen is None:
        raise Unsupported(f"config.num_experts_per_tok=None is not supported with {experts} experts")
    if type(experts) is type(chosen) is int and chosen > experts > 0:
        raise Unsupported(f"config.num_experts_per_tok={chosen} is more than the {experts} experts")
    quantization.read(config)
    if known is None or known.arch.inputs == "tokens":  # configs of other models use the name for other kinds
        _check_layer_types(config)
    for name in ("vision_config", "audio_config"):
        if getattr(config, name, None) is not None:
            check(getattr(config, name))


def _check_layer_types(config: Any) -> None:
    types = getattr(config, "layer_types", None)
    if types is None:
        return
    unknown = sorted(set(map(str, types)) - set(LAYER_TYPES))
    if unknown:
        raise Unsupported(f"config.layer_types has {', '.join(unknown)}; supported: {', '.join(LAYER_TYPES)}")
    if len(types) != config.num_hidden_layers:
        raise Unsupported(
            f"config.layer_types has {len(types)} entries for num_hidden_layers={config.num_hidden_layers}"
        )
    if "sliding_attention" in types and not getattr(config, "sliding_window", None):
        raise Unsupported("config.layer_types has sliding_attention, and config.sliding_window is missing")


def check_ranks(config: Any, size: int, experts: int = 1) -> None:
    """Raise Unsupported for sizes that `size` ranks cannot share; the message lists the numbers that can.

    experts: groups of ranks with different experts
    """
    runner = registry.find(config.architectures[0]).arch.runner
    if runner not in ("Generate", "Unmask"):
        if runner in ("Denoise", "DenoiseVideo"):
            made = "images" if runner == "Denoise" else "videos"
            raise Unsupported(f"{config.architectures[0]} makes {made}, on one rank only")
        if experts > 1:
            raise Unsupported(f"{config.architectures[0]} has no experts")
        return  # has no description; its modules check themselves
    described = registry.describe(config)
    if experts > 1:
        found = [layer.all_experts for layer in described.layers]
        counts = {own.count for own in found if own is not None}
        if not counts:
            raise Unsupported(f"{config.architectures[0]} has no experts")
        if uneven := sorted(n for n in counts if n % experts):
            whole = [str(n) for n in range(1, size + 1) if size % n == 0 and not any(c % n for c in counts)]
            raise Unsupported(
                f"{uneven[0]} experts cannot be divided by {experts}; supported: {', '.join(whole)}"
            )
    problems = _unshared(described, size, experts)
    if problems:
        numbers = range(experts, MOST_RANKS + 1, experts)
        possible = ", ".join(str(n) for n in numbers if not _unshared(described, n, experts)) or "none"
        raise Unsupported(f"{', '.join(problems)} cannot be shared by {size} ranks; supported: {possible}")


def _unshared(d: Decoder, size: int, experts: int) -> list[str]:
    """The sizes that this number of ranks cannot share. More ranks than KV heads have copies of them.

    An expert is shared by the ranks of its group.
    """
    padded = -(-d.vocab // PADDING) * PADDING
    sizes = {f"vocab_size={d.vocab}" + (f" (padded to {padded})" if padded != d.vocab else ""): padded}
    copied = set()
    for layer in d.layers:
        if isinstance(layer.attention, Recurrent):
            sizes |= layer.attention.shared
        else:
            heads = layer.attention.heads
            sizes[f"num_attention_heads={heads}"] = heads
        if (own := layer.all_experts) is not None:
            inner, shared = own.intermediate, own.shared
            sizes |= {f"an expert's intermediate size of {inner}": inner * experts}
            if own.mxfp4:
                sizes[f"an expert's blocks of 32, {inner // 32}"] = inner // 32 * experts
            sizes |= {f"the shared experts' intermediate size of {shared}": shared} if shared else {}
        if isinstance(layer.mlp, Mlp):
            sizes[f"intermediate_size={layer.mlp.intermediate}"] = layer.mlp.intermediate
        if not isinstance(layer.attention, Attention):
            continue  # all ranks have the same latents
        kv_heads = layer.attention.kv_heads
        sizes[f"num_key_value_heads={kv_heads}"] = kv_heads
        if size % kv_heads == 0 and not layer.attention.wide_norm:
            copied.add(f"num_key_value_heads={kv_heads}")
    return sorted(name for name, total in sizes.items() if total % size and name not in copied)
