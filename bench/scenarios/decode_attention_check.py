"""Whether attention_decode's kernel in one launch is right on this GPU, with every set. decode_attention.py runs it."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import torch
from graph_clock import Run, poisoned

from fastkernels import registry
from fastkernels.overrides.l1 import _attention_decode_split as split
from fastkernels.spec import Case

SPEC = registry.get("attention_decode")
PROVIDERS = {p.name: p for p in SPEC.op.providers}


class Layout(NamedTuple):
    """heads, key heads, head size, block size."""

    heads: int = 32
    kv_heads: int = 8
    head_size: int = 128
    block_size: int = 16

    @property
    def dims(self) -> dict[str, int]:
        return dict(zip(("heads", "kv_heads", "head_size", "block_size"), self, strict=True))

    @property
    def token_bytes(self) -> int:
        """Of a token's keys and values in bfloat16."""
        return 2 * 2 * self.kv_heads * self.head_size


LLAMA = "llama-8b"
# Qwen3-8B and Mixtral have Llama's; Qwen3-30B-A3B; Llama on two GPUs; SmolLM2-135M.
LAYOUTS = {
    LLAMA: Layout(), "qwen3-30b": Layout(32, 4), "llama-tp2": Layout(16, 4), "smollm2": Layout(9, 3, 64),
}  # fmt: skip
ODD: tuple[tuple[list[int], int], ...] = (
    ([0], 0), ([1], 0), ([15], 0), ([16], 4096), ([17], 0), ([0, 1, 15, 16, 17, 63, 64, 65], 8192),
    ([700, 0, 3, 1025, 2048], 0), ([5000], 8192), ([129] * 40, 4096), ([9000, *range(60, 2000, 63)], 16384),
    ([*range(0, 1400, 7)], 4096),
)  # fmt: skip
KINDS: tuple[tuple[str, dict[str, Any]], ...] = (
    ("float16", {"seq_lens": [300, 7, 0], **Layout(6, 2, 96, 5).dims}),
    ("bfloat16", {"seq_lens": [1000, 3], **Layout(9, 3, 64).dims}),
    ("bfloat16", {"seq_lens": [1000, 3, 90], **Layout(8, 8, 128).dims}),
    ("bfloat16", {"seq_lens": [1000, 3, 150], "window_left": 127, **Layout().dims}),
    ("float16", {"seq_lens": [700, 30], "softcap": 20.0, **Layout(16, 2, 256, 32).dims}),
    ("float8_e4m3fn", {"seq_lens": [700, 30], "scales": (0.5, 0.75), "queries": "bfloat16", **Layout().dims}),
)  # fmt: skip


def label(params: dict[str, int]) -> str:
    return "/".join(map(str, params.values()))


def sets_of(run: Run, layout: Layout | None = None, size: int = 2) -> list[dict[str, int]]:
    """The sets that have room and are not known to be wrong."""
    head_size = (layout or Layout()).head_size
    sets = [ways()[0], ways()[-1]] if run.quick else split.PARAMS
    return [
        p for p in sets if split.has_room(p, head_size, size) and ("triton-split", label(p)) not in run.bad
    ]


def ways() -> list[dict[str, int]]:
    """A set of each way to share keys out, and the first two."""
    found = {p["even"]: p for p in reversed(split.PARAMS)}
    return [*split.PARAMS[:2], *(p for even, p in sorted(found.items()) if p not in split.PARAMS[:2])]


def problem(call: Callable[[], torch.Tensor], want: torch.Tensor) -> str:
    """'' if the call gives `want` (float64) as closely as its dtype allows, twice the same bits; else what is wrong."""
    try:
        first, second = call(), call()
        if not torch.equal(first, second):
            return "two equal calls have other bits"
        error = first.double() - want
        if not bool(error.isfinite().all()):
            return f"{int((~error.isfinite()).sum())} values are not finite"
        rms, limit = want.square().mean().sqrt().item(), 1.6e-2 if first.dtype == torch.bfloat16 else 2e-3
        if (
            not bool((error.abs() <= limit + limit * want.abs()).all())
            or error.square().mean().sqrt() > 8e-3 * rms
        ):
            return f"largest error {error.abs().max().item():.3g}, where values are {rms:.3g}"
    except Exception as error:
        return f"{type(error).__name__}: {str(error)[:200]}"
    return ""


def oracle(args: list[Any]) -> torch.Tensor:
    return SPEC.reference(
        *[a.double() if isinstance(a, torch.Tensor) and a.is_floating_point() else a for a in args]
    )


def check(run: Run, sets: list[dict[str, int]], dims: dict[str, Any], dtype: str = "bfloat16") -> None:
    """The sets on one batch. Blocks that are no sequence's are full of NaN."""
    args = SPEC.inputs(Case("check", dims, dtype), run.device, run.generator)
    if dtype != "float8_e4m3fn":
        unused = torch.ones(args[1].shape[0], dtype=torch.bool, device=run.device)
        unused[args[4].flatten().long()] = False
        for cache in args[1:3]:
            cache[unused] = float("nan")
    want, about = (
        oracle(args),
        {"lengths": str(dims["seq_lens"])[:40], "heads": dims["heads"], "dtype": dtype},
    )
    for p in sets:
        with poisoned():
            wrong = problem(partial(split.decode_split, *args, **p), want)
        if wrong:
            run.bad.add(("triton-split", label(p)))
            run.row("check", "triton-split", {**about, "params": label(p)}, wrong)
        if "CUDA error" in wrong:
            raise SystemExit("the GPU's context is lost: nothing more can be measured")
    run.row("check", "triton-split", about, cases=len(sets))


def check_all(run: Run, layout: Layout) -> None:
    if run.quick:
        dims = {"seq_lens": [0, 1, 15, 16, 17, 65], "max_seqlen_k": 256, **Layout(4, 1, 32).dims}
        return check(run, sets_of(run), dims, "float16")
    for lens, longest in ODD:
        check(run, sets_of(run), {"seq_lens": lens, "max_seqlen_k": longest or max(lens), **layout.dims})
    for kind, dims in KINDS:
        size = 1 if kind == "float8_e4m3fn" else 2
        sets = sets_of(run, Layout(head_size=dims["head_size"]), size)
        check(run, [p for p in sets if p in ways()], dims, kind)
    for batch, length in ((1, 8192), (8, 2048), (32, 2048), (256, 512)):
        check(run, sets_of(run), {"seq_lens": [length] * batch, **layout.dims})
    for p in sets_of(run):
        graphs(run, p, layout)
    zeros(run, layout)


def graphs(run: Run, p: dict[str, int], layout: Layout) -> None:
    """Two graphs with the same kernel at once, whose lengths change between replays."""
    batches = [[900, 17, 4000], [1, 0, 65]]
    case = Case("graph", {"seq_lens": [4096] * 3, **layout.dims})
    made = [SPEC.inputs(case, run.device, run.generator) for _ in "ab"]
    wrong = ""
    try:
        captured, outs, streams = [], [], [torch.cuda.Stream() for _ in made]
        for args in made:
            split.decode_split(*args, **p)
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                outs.append(split.decode_split(*args, **p))
            captured.append(graph)
        for lens in (*batches, batches[0]):
            for args, out in zip(made, outs, strict=True):
                args[3].copy_(torch.tensor(lens))
                out.fill_(float("nan"))
            torch.cuda.synchronize()
            for graph, stream in zip(captured, streams, strict=True):
                with torch.cuda.stream(stream):
                    for _ in range(20):
                        graph.replay()
            torch.cuda.synchronize()
            for args, out in zip(made, outs, strict=True):
                if not torch.equal(out, split.decode_split(*args, **p)):
                    wrong = (
                        f"graphs replayed side by side have other bits than eager calls, for lengths {lens}"
                    )
    except Exception as error:
        wrong = f"{type(error).__name__}: {str(error)[:200]}"
    if wrong:
        run.bad.add(("triton-split", label(p)))
    run.row("graphs", "triton-split", {"params": label(p)}, wrong, quiet=True)


def zeros(run: Run, layout: Layout) -> None:
    """Zeros where a sequence has no keys, which FA3 writes itself: it gets memory that was not zeroed."""
    for name in ("fa3", "flashinfer"):
        provider = PROVIDERS[name]
        for lens in ([0], [0, 8000], [0, 5, 0, 700] * 8, [0] * 200):
            args = SPEC.inputs(Case("zeros", {"seq_lens": lens, **layout.dims}), run.device, run.generator)
            if provider.unavailable("cuda") is None and provider.supports(*args) is None:
                with poisoned():
                    wrong = problem(partial(provider.fn, *args), oracle(args))
                run.row("zeros", name, {"lengths": str(lens)[:40]}, wrong)
