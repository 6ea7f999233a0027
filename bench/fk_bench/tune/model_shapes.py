"""The shapes of tunable ops in a model, on each rank: by its plan, and by the modules of one layer."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch

from fastkernels.core import parallel, registry
from fastkernels.core.shapes import dtype_name
from fastkernels.core.tuning import Key
from fastkernels.models.common.checkpoints.quantization import BLOCK, Scheme, read
from fastkernels.models.common.descriptions.description import Attention
from fastkernels.models.common.descriptions.registry import find
from fastkernels.models.common.plans.plan import Item, Plan

TENSOR, ROW, FOUND = 0, 1, 2  # granularity of scales, as in the keys of FP8 ops


def shapes_of_model(name: str, key: Key, model: str, dtype: torch.dtype, tp: int = 1) -> list[dict[str, Any]]:
    """The shapes of the op in a model on each of `tp` ranks; [] if it does not run there.

    model: a short name ('llama': its default sizes), or a folder with config.json. Raises UnknownName, CheckpointError,
    Unsupported, and ValueError for a model that `tp` ranks cannot share.
    """
    plan, scheme_of = _plan_of(model, dtype_name(dtype))
    if plan is None:
        return _built(name, key, model, dtype, tp)
    if name == "attention_decode":
        several = (a for a in plan.attentions if isinstance(a, Attention))
        return distinct(_attention(a, dtype, tp) for a in several)
    of_op = [item for item in plan.items if item.op == name]
    if name in ("linear", "linear_fp8"):
        return distinct(_linear(item, plan, scheme_of(item.path), dtype, tp) for item in of_op)
    if name in ("fused_experts", "fused_experts_fp8"):
        return distinct(_experts(item, scheme_of(item.path), dtype, tp) for item in of_op)
    return []


def _built(name: str, key: Key, model: str, dtype: torch.dtype, tp: int) -> list[dict[str, Any]]:
    """The shapes of the modules of a model with a short name."""
    from fastkernels.models.common.plans.ops import one_layer

    if key.module is None:
        return []
    with parallel.build_as(0, tp):
        modules = list(one_layer(model, dtype).modules())
    where = registry.op_modules()[name]
    shapes = [
        key.module(m) for m in modules
        if any(base.__module__ == where for p in (m, getattr(m, "quant_method", None)) for base in type(p).__mro__)
    ]  # fmt: skip
    return distinct(named(key, shape) for shape in shapes if shape is not None)


def longest_context(model: str) -> int:
    """The tokens of the longest sequence that a folder's model can have; 0: unknown."""
    found, _ = _plan_of(model)
    lengths = [a.max_positions for a in found.attentions] if found is not None else []
    return max(lengths, default=0)


def named(key: Key, shape: Sequence[Any]) -> dict[str, Any]:
    """As in a table, with dtypes by name."""
    values = [dtype_name(v) if isinstance(v, torch.dtype) else v for v in shape]
    return dict(zip(key.shape, values, strict=True))


def distinct(shapes: Iterable[dict[str, Any]]) -> list[dict[str, Any]]:
    return list({tuple(s.items()): s for s in shapes}.values())


def _plan_of(model: str, dtype: str = "") -> tuple[Plan | None, Callable[[str], Scheme | None]]:
    """The plan of a folder's model, None for a short name, which has no config; and the number format by path."""
    file = Path(model) / "config.json"
    return _planned(model, dtype, file.stat().st_mtime_ns) if file.is_file() else (None, lambda path: None)


@lru_cache(maxsize=8)  # several ops have shapes of the same model
def _planned(model: str, dtype: str, changed: int) -> tuple[Plan, Callable[[str], Scheme | None]]:
    import fastkernels
    from fastkernels.models.common.plans import build

    config = build.load_config(Path(model))
    formats, arch = read(config), find(config.architectures[0], config).arch
    return fastkernels.plan(config, dtype), lambda path: None if formats is None else formats.of(path, arch)


def _attention(a: Attention, dtype: torch.dtype, tp: int) -> dict[str, Any]:
    """Decode attention with the first of the hosts' block sizes."""
    block = registry.get("attention_decode").op.key.usual["block_size"][0]
    heads = _share(a.heads, tp, "attention heads")
    return {
        "heads": heads, "kv_heads": _kv_heads(a, tp), "head_size": a.head_size, "block_size": block,
        "window": a.window or 0, "dtype": dtype_name(dtype),
    }  # fmt: skip


def _linear(item: Item, plan: Plan, scheme: Scheme | None, dtype: torch.dtype, tp: int) -> dict[str, Any]:
    n, k = item.shapes["weight"]
    if item.layout == "rows":
        k = _share(k, tp, f"columns of {item.path}")
    elif item.layout == "heads" and isinstance(a := _attention_of(item, plan), Attention):
        own = (n // a.head_size - a.heads) // a.kv_heads  # 2: keys and values
        n = (_share(a.heads, tp, "attention heads") + own * _kv_heads(a, tp)) * a.head_size
    elif item.layout:
        n = _share(n, tp, f"rows of {item.path}")
    if item.op == "linear":
        return {"N": n, "K": k, "dtype": dtype_name(dtype)}
    assert scheme is not None
    return {"N": n, "K": k, "block": _granularity(scheme), "out_dtype": dtype_name(dtype)}


def _attention_of(item: Item, plan: Plan) -> Any:
    """The attention of the layer that a module is in."""
    return plan.attentions[next(int(part) for part in item.path.split(".") if part.isdigit())]


def _experts(item: Item, scheme: Scheme | None, dtype: torch.dtype, tp: int) -> dict[str, Any]:
    experts, hidden, intermediate = item.shapes["w2_weight"]
    shape = {
        "experts": experts, "here": experts, "topk": item.arguments["top_k"], "hidden": hidden,
        "intermediate": _share(intermediate, tp, "channels of an expert"),
    }  # fmt: skip
    if item.op == "fused_experts_fp8":
        assert scheme is not None
        block = _granularity(scheme)
        by_tensor = scheme.layout == "fp8"  # hosts then quantize activations with one scale for all tokens
        act = TENSOR if scheme.static else block if block == BLOCK else FOUND if by_tensor else ROW
        shape |= {"block": TENSOR if by_tensor and block != BLOCK else block, "act": act}
    return {**shape, "dtype": dtype_name(dtype)}


def _granularity(scheme: Scheme) -> int:
    """Of the scales with which hosts run a layer: activations without a scale of their own get one per token."""
    return BLOCK if scheme.kind == "fp8_block" else TENSOR if scheme.static else ROW


def _kv_heads(a: Attention, tp: int) -> int:
    """Of a rank: several ranks have the same where there are fewer than ranks."""
    if a.kv_heads % tp and tp % a.kv_heads:
        raise ValueError(f"--tp {tp}: {a.kv_heads} key heads cannot be shared by {tp} ranks")
    return max(a.kv_heads // tp, 1)


def _share(size: int, tp: int, what: str) -> int:
    if size % tp:
        raise ValueError(f"--tp {tp}: {size} {what} cannot be shared by {tp} ranks")
    return size // tp
