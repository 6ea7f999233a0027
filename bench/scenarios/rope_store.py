"""rope_store_kvcache beside the launches that it stands for: the same bits, then timed. decode_attention.py runs it."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from graph_clock import Run, measure

from fastkernels.core import registry
from fastkernels.core.spec import Case
from fastkernels.overrides.cache import store_kvcache
from fastkernels.overrides.norm import rms_norm
from fastkernels.overrides.rope import rope_store_kvcache, rotary_emb

SPEC = registry.get("rope_store_kvcache")
LLAMA = {"heads": 32, "kv_heads": 8, "head_size": 128, "block_size": 16}
TOKENS = (1, 8, 32, 64, 256)
LAYERS = 32


def separate(
    positions: torch.Tensor, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, key_cache: torch.Tensor,
    value_cache: torch.Tensor, slots: torch.Tensor, table: torch.Tensor, neox: bool, q_weight: torch.Tensor | None,
    k_weight: torch.Tensor | None, eps: float, *scales: float,
) -> torch.Tensor:  # fmt: skip
    """What a layer launches without it; the queries are returned, as the norms make new ones."""
    if q_weight is not None:
        query = rms_norm._triton(query, q_weight, eps, None, None, False)
        key = rms_norm._triton(key, k_weight, eps, None, None, False)
    rotary_emb._triton(positions, query, key, query.shape[-1], table, neox)
    store_kvcache._triton(key, value, key_cache, value_cache, slots, *scales)
    return query


def check(run: Run, case: Case) -> None:
    """Without norms the same bits as the launches apart; with norms as close to the reference as those."""
    args = SPEC.inputs(case, run.device, run.generator)
    mine = [a.clone() if isinstance(a, torch.Tensor) else a for a in args]
    wrong, differing = "", 0
    try:
        apart = separate(*args)
        rope_store_kvcache._triton(*mine)
        pairs = list(zip((apart, *args[4:6]), (mine[1], *mine[4:6]), strict=True))
        differing = sum(int((a.float() != b.float()).sum()) for a, b in pairs)
        values = sum(a.numel() for a, _ in pairs)
        far = max((a.float() - b.float()).abs().max().item() for a, b in pairs)
        if not torch.equal(args[3], mine[3]) or (differing and not case.dims.get("norms")):
            wrong = f"{differing} of {values} values differ, by {far:.3g} at most"
        elif (
            differing > values // 1000 or far > 0.07
        ):  # sums of squares in another order: a last bit here and there
            wrong = f"{differing} of {values} values differ, by {far:.3g} at most, where only last bits may"
    except Exception as error:
        wrong = f"{type(error).__name__}: {str(error)[:200]}"
    if "CUDA error" in wrong:
        raise SystemExit("the GPU's context is lost: nothing more can be measured")
    run.row("check", "triton", {"case": case.name, "dtype": case.dtype}, wrong, differing=differing)


def time_tokens(run: Run, tokens: int, norms: bool) -> None:
    layers = 2 if run.quick else LAYERS
    dims = {"tokens": tokens, "norms": norms, "blocks": max(4 * tokens, 64), **LLAMA}
    calls = [
        SPEC.inputs(Case("time", dims, "float32" if run.quick else "bfloat16"), run.device, run.generator)
    ]
    calls += [[a.clone() if isinstance(a, torch.Tensor) else a for a in calls[0]] for _ in range(layers - 1)]
    found: dict[str, Callable[..., Any]] = {"apart": separate, "fused": rope_store_kvcache._triton}
    passes = measure(run, {name: [partial(fn, *args) for args in calls] for name, fn in found.items()})
    for name, us in passes.items():
        case = {"how": name, "tokens": tokens, "norms": norms}
        run.row("time", "triton", case, us=us / layers, quiet=True)
    if len(passes) == 2:
        gain = passes["apart"] - passes["fused"]
        line = f"rope_store_kvcache {tokens:>3} tokens{' with norms' if norms else '':<11}"
        each = "  ".join(f"{name} {us / layers:6.2f} us" for name, us in passes.items())
        run.summary.append(f"{line} {each}  saves {gain:6.1f} us in {layers} layers")
        print(run.summary[-1], flush=True)


def run_all(run: Run) -> None:
    run.op = "rope_store_kvcache"
    for case in SPEC.cases:
        if not run.quick or case.name in ("one", "interleaved_partial"):
            check(run, case)
    for norms in (False, True):
        for tokens in (2,) if run.quick else TOKENS:
            time_tokens(run, tokens, norms)
