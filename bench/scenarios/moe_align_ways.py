"""For moe_tiles.py: moe_align in one launch and in two, each started early in two ways and in turn, beside vLLM's."""

from __future__ import annotations

import contextlib
import importlib.util
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from types import ModuleType
from typing import Any

import torch
import triton
import triton.language as tl
from graph_clock import Compiles, Run, measure
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from fastkernels.overrides.moe import moe_align
from fastkernels.overrides.moe import moe_align_triton as kernels

CALLS = 20  # of a graph, each with ids of its own
# pairs, experts, block size
SIZES = ((256, 128, 16), (1024, 128, 16), (2048, 128, 16), (32768, 128, 64), (1408, 8, 128), (8192, 8, 128))
EARLY, IN_TURN = {"OVERLAP": True, "launch_pdl": True}, {"OVERLAP": False}


@triton.jit
def wait_first(OVERLAP: tl.constexpr):
    # `follow` the other way round: the next kernel may come when this one runs, not when it only waits.
    if OVERLAP:
        gdc_wait()
        gdc_launch_dependents()


def waiting_first() -> ModuleType:
    """The kernels' module once more, with `wait_first` for `follow`."""
    spec = importlib.util.spec_from_file_location("moe_align_wait_first", kernels.__file__)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    module.follow = wait_first  # type: ignore[attr-defined]
    return module


@dataclass(frozen=True)
class Way:
    module: Any
    name: str
    start: str
    options: dict[str, bool]

    def __call__(self, ids: torch.Tensor, experts: int, block: int) -> moe_align.Aligned:
        outs = moe_align._empty(ids, block, moe_align.padded_size(ids.numel(), block, experts))
        before, options = self.module.launch_kernel, self.options if ids.is_cuda else IN_TURN
        self.module.launch_kernel = lambda kernel, grid, *args, **rest: kernel[grid](*args, **rest, **options)
        try:
            getattr(self.module, self.name)(ids, None, outs, experts, block, False)
        finally:
            self.module.launch_kernel = before
        return outs


OTHER = waiting_first()
WAYS = {
    f"{name} {start}": Way(module, name, start, options)
    for name in ("by_experts", "by_chunks")
    for module, start, options in (
        (kernels, "early", EARLY), (OTHER, "early, waits first", EARLY), (kernels, "in turn", IN_TURN),
    )
}  # fmt: skip


def compile_share(part: int, parts: int) -> None:
    for module in (kernels, OTHER):
        for name in ("_expert_kernel", "_count_kernel", "_place_kernel"):
            setattr(module, name, Compiles(getattr(module, name)))
    jobs = [(size, way) for size in SIZES for way in WAYS.values()]
    for (pairs, experts, block), way in jobs[part::parts]:
        with contextlib.suppress(Exception):  # said where it is run
            way(torch.zeros(pairs, 1, dtype=torch.int32, device="cuda"), experts, block)


def theirs() -> Callable[..., Any] | None:
    """vLLM's function; None, with the reason on the screen, where it is not there."""
    try:
        from vllm.model_executor.layers.fused_moe.moe_align_block_size import moe_align_block_size
    except Exception as error:
        print(f"vLLM's function is not there: {type(error).__name__}: {error}", flush=True)
        return None
    return moe_align_block_size


def time_all(run: Run, vllm: Callable[..., Any] | None) -> None:
    run.op = "moe_align"
    for pairs, experts, block in ((40, 5, 4),) if run.quick else SIZES:
        about = {"pairs": pairs, "experts": experts, "block": block}
        sets = [
            torch.randint(experts, (pairs, 1), generator=run.generator, device=run.device).int()
            for _ in range(CALLS)
        ]
        want = moe_align.reference(sets[0], block, experts, moe_align.padded_size(pairs, block, experts))
        todo: dict[str, list[Callable[[], Any]]] = {}
        for which, way in WAYS.items():
            try:
                right = all(map(torch.equal, way(sets[0], experts, block), want))
                reason = "" if right else "not what the reference gives"
            except Exception as error:
                reason = f"{type(error).__name__}: {str(error)[:200]}"
            if reason:
                run.row("check", "triton", {**about, "which": which}, reason)
            else:
                todo[which] = [partial(way, ids, experts, block) for ids in sets[: 2 if run.quick else None]]
        if vllm:
            todo["vllm"] = [partial(vllm, ids, block, experts) for ids in sets]
        times = {which: us / len(todo[which]) for which, us in measure(run, todo).items()}
        for which, us in times.items():
            run.row(
                "time", "vllm" if which == "vllm" else "triton", {**about, "which": which}, us=us, quiet=True
            )
        now = "by_chunks" if kernels.in_chunks(pairs, experts) else "by_experts"
        said = "  ".join(f"{which} {us:.2f}" for which, us in times.items())
        run.summary.append(f"moe_align {pairs} pairs, {experts} experts (now {now}): {said}")
        print(run.summary[-1], flush=True)
