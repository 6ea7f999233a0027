"""For moe_tiles.py: moe_align in one launch and in two, each started early and in turn, beside vLLM's."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from graph_clock import Compiles, Run, measure

from fastkernels.overrides.l1 import _moe_align_triton as kernels
from fastkernels.overrides.l1 import moe_align

CALLS = 20  # of a graph, each with ids of its own
# pairs, experts, block size
SIZES = ((256, 128, 16), (1024, 128, 16), (2048, 128, 16), (32768, 128, 64), (1408, 8, 128), (8192, 8, 128))
STARTS: dict[str, dict[str, bool]] = {
    "early": {"OVERLAP": True, "launch_pdl": True},
    "in turn": {"OVERLAP": False},
}
Ways = tuple[tuple[str, Callable[..., None], str], ...]
WAYS: Ways = tuple(
    (f"{way.__name__} {start}", way, start)
    for way in (kernels.by_experts, kernels.by_chunks)
    for start in STARTS
)


@contextlib.contextmanager
def started(how: str) -> Iterator[None]:
    before = kernels.overlap
    kernels.overlap = lambda *_: STARTS[how]  # type: ignore[assignment]
    try:
        yield
    finally:
        kernels.overlap = before


def aligned(
    way: Callable[..., None], start: str, ids: torch.Tensor, experts: int, block: int
) -> moe_align.Aligned:
    outs = moe_align._empty(ids, block, moe_align.padded_size(ids.numel(), block, experts))
    with started(start if ids.is_cuda else "in turn"):
        way(ids, None, outs, experts, block, False)
    return outs


def compile_share(part: int, parts: int) -> None:
    for name in ("_expert_kernel", "_count_kernel", "_place_kernel"):
        setattr(kernels, name, Compiles(getattr(kernels, name)))
    jobs = [(size, way, start) for size in SIZES for _, way, start in WAYS]
    for (pairs, experts, block), way, start in jobs[part::parts]:
        with contextlib.suppress(Exception):  # said where it is run
            aligned(way, start, torch.zeros(pairs, 1, dtype=torch.int32, device="cuda"), experts, block)


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
        for which, way, start in WAYS:
            try:
                right = all(map(torch.equal, aligned(way, start, sets[0], experts, block), want))
                reason = "" if right else "not what the reference gives"
            except Exception as error:
                reason = f"{type(error).__name__}: {str(error)[:200]}"
            if reason:
                run.row("check", "triton", {**about, "which": which}, reason)
            else:
                todo[which] = [
                    partial(aligned, way, start, ids, experts, block)
                    for ids in sets[: 2 if run.quick else None]
                ]
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
