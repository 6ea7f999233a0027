"""Helpers for mixture-of-experts layers of any host: their method object and the weights that it reads."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from fastkernels.core import registry
from fastkernels.core.dispatch import Provider
from fastkernels.overrides.moe.cases import router_choice
from fastkernels.verify.measure import Live, Point, case_of, leave_room, several


def method_of(module: Any) -> Any:
    """The layer's own method object (maybe a module), or None for a LoRA wrapper, which shows its base layer's."""
    return vars(module).get("quant_method") or vars(module).get("_modules", {}).get("quant_method")


def device_of(module: Any) -> torch.device:
    """The device of a layer's weights."""
    weight = getattr(module, "w13_weight", None)
    found: torch.device = (next(module.parameters()) if weight is None else weight).device
    return found


def path_of(thing: Any) -> str:
    """module:Name of an object's class, or of a function."""
    kind = thing if hasattr(thing, "__qualname__") else type(thing)
    return f"{kind.__module__}:{kind.__qualname__}"


def in_float8(module: Any) -> bool:
    """Whether a layer of experts has its weights in float8 e4m3."""
    return getattr(getattr(module, "w13_weight", None), "dtype", None) == torch.float8_e4m3fn


def unusual(module: Any, dtype: torch.dtype, fp8: bool) -> str | None:
    """Why our kernels cannot read a layer's weights in place; None: they can. fp8: whether it is quantized to FP8."""
    w1, w2 = module.w13_weight, module.w2_weight
    if w1.dim() != 3 or w2.dim() != 3 or w1.shape != (w2.shape[0], 2 * w2.shape[2], w2.shape[1]):
        return f"weights are {tuple(w1.shape)} and {tuple(w2.shape)}, not [E, 2 I, H] and [E, H, I]"
    if in_float8(module) != fp8 or w2.dtype != w1.dtype or (not fp8 and w1.dtype != dtype):
        return f"weights are {w1.dtype} for {dtype} and {'float8' if fp8 else 'no'} quantization"
    if w1.stride(-1) != 1 or w2.stride(-1) != 1:
        return f"weights have strides {w1.stride()} and {w2.stride()}"
    return None


def shape_of(
    op: Any, module: Any, arguments: Callable[..., Sequence[Any]], topk: int, dtype: torch.dtype
) -> tuple[Any, ...]:
    """Values of op.key.shape for a layer's calls; arguments: see live_calls."""
    w = module.w2_weight
    x = torch.empty(1, w.shape[1], dtype=dtype, device=w.device)
    choice = torch.ones(1, topk, device=w.device), torch.zeros(1, topk, dtype=torch.int32, device=w.device)
    shape: tuple[Any, ...] = op.key.of(*arguments(module, x, *choice))[0]
    return shape


def live_calls(
    shape: tuple[Any, ...], modules: Sequence[Any], arguments: Callable[..., Sequence[Any]], name: str = "",
    host: Callable[..., Any] | None = None,
) -> Live:  # fmt: skip
    """Calls on the layers' own weights, by turns with routing that is uniform and that is skewed.

    shape      values of the op's key
    arguments  arguments(module, x, topk_weights, topk_ids) -> those of the op
    name, host  the code that the host's layer runs for such arguments; None: the op's production kernel
    """
    experts, _, topk, hidden, width, *_, dtype = shape

    def calls(
        point: Point, device: torch.device, generator: torch.Generator, cold_bytes: int
    ) -> tuple[list[Any], list[list[Any]]]:
        tokens, made = point.sizes[0], []
        count = several(cold_bytes, registry.get(point.op).bytes_moved(case_of(point)))
        leave_room(device, activation_bytes(tokens, experts, topk, hidden, width, count))
        for i in range(count):
            module = modules[i % len(modules)]
            where = device_of(module)
            x = torch.randn(tokens, hidden, generator=generator, device=where).to(dtype)
            choice = router_choice(tokens, experts, topk, bool(i % 2), generator, where)
            made.append(list(arguments(module, x, *choice)))
        return made[0], made

    kind = device_of(modules[0]).type
    return Live(calls, None if host is None else Provider(name, host, devices=(kind,)))


def activation_bytes(tokens: int, experts: int, topk: int, hidden: int, width: int, calls: int) -> int:
    """Memory that calls take next to the layers' own weights, at most: each number as float32.

    Every call keeps its tokens and its routing; the results and the steps between the products are of two calls.
    """
    kept = tokens * (hidden + experts + 2 * topk)
    passing = tokens * (hidden + topk * (3 * width + hidden))
    return 4 * (calls * kept + 2 * passing)


def by_weights(modules: Sequence[Any]) -> Callable[[torch.Tensor], Any]:
    """A function that finds the layer with these w13_weight."""
    found = {m.w13_weight.data_ptr(): m for m in modules}
    return lambda weight: found[weight.data_ptr()]
