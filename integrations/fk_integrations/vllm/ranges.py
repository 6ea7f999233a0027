"""Compile ranges: in a compiled model ours runs only in batches of the sizes at which it was measured to win.

vLLM compiles a model once for each range of tokens. Above the largest batch that a kernel of ours wins, our pass puts
plain PyTorch in place of our ops, and Inductor fuses it as in a model that was never patched. For prompts the pass puts
ops of ours in where they were measured to win: products, and that of gate and up with its activation.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable
from typing import Any

from fastkernels.core import registry, tuning
from fastkernels.core.env import Environment
from fastkernels.core.reasons import Kind, Reason
from fastkernels.patch import Request
from fastkernels.verify.measure import named_shape
from fk_integrations.core.adapter import Adapter
from fk_integrations.core.gated_products import NAME as GATED
from fk_integrations.core.gated_products import Gated
from fk_integrations.core.journal import Journal
from fk_integrations.patching import choose
from fk_integrations.patching.choose import modules_of
from fk_integrations.vllm import fusions
from fk_integrations.vllm.passes.fx_gated_products import Prompts
from fk_integrations.vllm.passes.plain_forms import PLAIN

log = logging.getLogger("fastkernels")
LINEAR = "linear"
TOKENS = ("M",)  # Key.sizes of ops whose size is the number of tokens
FUSED = (
    "vLLM's compiler fuses it with its neighbours, and next to it no kernel of ours was measured as faster"
)


def limited(config: Any, model: Any) -> bool:
    """Whether our ops can be kept to some compile ranges of this model and configuration, a VllmConfig."""
    compilation = config.compilation_config
    return (
        getattr(compilation.mode, "name", None) == "VLLM_COMPILE"
        and compilation.backend == "inductor"
        and bool(compilation.compile_ranges_endpoints)
        and bool(fusions.compiled_parts(config, model))
    )


def named(request: Request) -> set[str]:
    """The ops that the user requested: they run at all sizes."""
    return {*(request.ops or ()), *request.candidates, *Environment.read().provider}


def most_tokens(adapter: Adapter, model: Any, request: Request, device: str) -> int:
    """The largest number of tokens at which a table or a measurement lists ours as faster for a layer; 0: none."""
    chip, found = tuning.chip_of(device), [0]
    for name in registry.op_names():
        spec = registry.get(name)
        op = spec.tuned_by
        if (
            op is None
            or op.key is None
            or op.key.sizes != TOKENS
            or name == GATED
            or {name, op.name} & {*request.disable}
        ):
            continue
        if not (listed := tuning.entries(op.name, chip)):
            continue
        shapes = [named_shape(op.name, shape) for _, shape in modules_of(adapter, model, spec)]
        found += [e.sizes["M"] for e in listed if e.faster and not e.of_prompts and dict(e.shape) in shapes]
    return max(found)


def layers_of_prompts(adapter: Adapter, model: Any, request: Request, device: str) -> list[Any]:
    """The linear layers for whose products a table or a measurement lists ours as faster in prompts."""
    if LINEAR in named(request) or choose.settled(adapter, request, registry.get(LINEAR)):
        return []  # it runs in batches of every size, or in none
    listed = tuning.entries(LINEAR, tuning.chip_of(device))
    faster = [dict(e.shape) for e in listed if e.faster and e.of_prompts]
    if not faster:
        return []
    of_model = modules_of(adapter, model, registry.get(LINEAR))
    return [layer for layer, shape in of_model if named_shape(LINEAR, shape) in faster]


def prompts(found: Iterable[Gated], layers: Iterable[Any], most: int) -> Prompts | None:
    """The ranges for these blocks and layers: all above those in which our layers win, so that none is added."""
    of_gated, of_linear = registry.get(GATED).op.key, registry.get(LINEAR).op.key
    shapes = frozenset(of_gated.module(gated.layer) for gated in found)
    products = frozenset(of_linear.module(layer) for layer in layers)
    return Prompts(most or tuning.DECODES, shapes, products) if shapes or products else None


def unchanged(config: Any) -> dict[str, dict[Reason, int]]:
    """{op: why the pass left calls in compiled graphs as they were}; the numbers are in the reasons."""
    found = fusions.rewriting(config)
    reasons: dict[str, dict[Reason, int]] = {}
    for (op, what, why), n in found.unchanged.items() if found is not None else ():
        reasons.setdefault(op, {})[Reason(Kind.LEFT_TO_HOST, f"{n} {what}: {why}")] = 0
    return reasons


def stays(op: str, most: int, of_prompts: Prompts | None = None) -> Reason | None:
    """Why an op that was not requested stays with a compiled host: nothing of ours wins in this model."""
    if op == "silu_and_mul" and of_prompts is not None and of_prompts.shapes:
        return None  # the pass finds the activation after a product by our op
    return Reason(Kind.LEFT_TO_HOST, FUSED) if op in PLAIN and not most else None


def outside(config: Any, model: Any, host_class: str) -> int:
    """The modules of ours, shown as `host_class`, that compiled code does not contain: ranges do not limit them."""
    inside = {id(m) for part in fusions.compiled_parts(config, model) for m in part.modules()}
    found = 0
    for module in model.modules():
        kinds = {type(module), type(vars(module).get("quant_method"))}
        ours = any(hasattr(kind, "fastkernels") and kind.__name__ == host_class for kind in kinds)
        found += ours and id(module) not in inside
    return found


def limit(
    config: Any, most: int, plain: Iterable[str], journal: Journal, of_prompts: Prompts | None = None
) -> bool:  # fmt: skip
    """Keep the ops of `plain` to batches of at most `most` tokens, and have prompts run what `of_prompts` says.

    Returns whether this changes anything. For code that is compiled from now on. The journal restores the ranges.
    """
    compilation = config.compilation_config
    ends = compilation.compile_ranges_endpoints
    plain = tuple(sorted(plain))
    if of_prompts is not None and of_prompts.more_than >= max(ends):
        of_prompts = None
    limits = bool(plain) and most < max(ends) and (bool(most) or of_prompts is not None)
    if not limits and of_prompts is None:
        return False
    found = fusions.rewriting(config, journal)
    if found is None:
        log.warning("vLLM's compiler runs a pass of yours, so ours runs in batches of every size")
        return False

    def back() -> None:
        compilation.compile_ranges_endpoints, found.most, found.plain, found.prompts = ends, None, (), None
        found.unchanged.clear()

    journal.add(back)
    found.unchanged.clear()
    new = {*ends, *([most] if limits and most else ()), *([of_prompts.more_than] if of_prompts else ())}
    compilation.compile_ranges_endpoints = sorted(new)
    found.prompts = of_prompts
    if limits:
        found.most, found.plain = most, plain
        log.debug(
            "up to %d tokens a batch runs %s of ours, above vLLM's compiled code", most, ", ".join(plain)
        )
    return True
