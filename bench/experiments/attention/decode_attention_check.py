"""Check our attention_decode kernels with every parameter set. Run by decode_attention.py.

The checks run in child processes, because a faulty kernel can corrupt the CUDA context or hang.
"""

from __future__ import annotations

import json
import subprocess
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from experiments.common.graph_clock import Run, finish, poisoned
from experiments.common.kernel_check import SideBySide, problem

from fastkernels.core import registry
from fastkernels.core.spec import Case
from fastkernels.overrides.attention import attention_decode_cuda as cuda
from fastkernels.overrides.attention import attention_decode_split as split

SPEC = registry.get("attention_decode")
PROVIDERS = {p.name: p for p in SPEC.op.providers}
OURS: dict[str, Callable[..., dict[str, int]]] = {"triton-split": split._set, "cuda-split": cuda._set}
# Without those of wide heads, which no layout has
SETS: dict[str, Sequence[dict[str, int]]] = {
    name: [p for p in PROVIDERS[name].params if p not in split.WIDE] for name in OURS
}
CHECKS, CHECK_S = 4, 120  # processes; time limit of all, in seconds
RMS = 8e-3  # allowed RMS error, relative to the values


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
        """Bytes of one token's keys and values in bfloat16."""
        return 2 * 2 * self.kv_heads * self.head_size


LLAMA = "llama-8b"
# Qwen3-8B and Mixtral have Llama's; Qwen3-30B-A3B; Llama on two GPUs; SmolLM2-135M.
LAYOUTS = {
    LLAMA: Layout(), "qwen3-30b": Layout(32, 4), "llama-tp2": Layout(16, 4), "smollm2": Layout(9, 3, 64),
}  # fmt: skip
EDGES = [0, 1, 15, 16, 17, 63, 64, 65, 700, 1025]


class Batch(NamedTuple):
    """A call: sequence lengths, graph capacity (0: the longest length), and what differs from the timed layout."""

    lens: list[int]
    longest: int = 0
    layout: Layout | None = None  # None: the timed layout
    dtype: str = "bfloat16"
    more: Mapping[str, Any] = {}

    def case(self, layout: Layout) -> Case:
        lengths = {"seq_lens": self.lens, "max_seqlen_k": self.longest or max(self.lens)}
        return Case("check", {**lengths, **(self.layout or layout).dims, **self.more}, self.dtype)


# Lengths around a block and a tile; many sequences; one sequence split over all workers; the timed cases.
USUAL = (
    Batch([0]), Batch([1]), Batch([15]), Batch([16], 4096), Batch([17]), Batch([0], 4096), Batch([1], 4096),
    Batch([5000], 8192), Batch(EDGES, 8192), Batch([700, 0, 3, 1025, 2048]), Batch([129] * 40, 4096),
    Batch([9000, *range(60, 2000, 63)], 16384), Batch([*range(0, 1400, 7)], 4096), Batch([8192]),
    Batch([2048] * 8, 8192), Batch([2048] * 32), Batch([512] * 256),
)  # fmt: skip
# Groups of 1 to 16 heads, head and block sizes; windows, soft caps; float8.
OTHERS = (
    Batch(EDGES, 2048, Layout(6, 6, 64, 1), "float16"), Batch(EDGES, 2048, Layout(9, 3, 64)),
    Batch(EDGES, 2048, Layout(16, 2, 128, 5)), Batch(EDGES, 2048, Layout(16, 1, 128, 64), "float16"),
    Batch(EDGES, 2048, Layout(12, 1, 64, 256)), Batch(EDGES, 2048, Layout(12, 4, 128, 1), "float16"),
    Batch([3] * 700, 16, Layout()), Batch([40000], 0, Layout()), Batch([60000, 5] * 2, 0, Layout(8, 1)),
    Batch([2048] * 3, 0, Layout(5, 1, 128, 32), "float16"), Batch([1] * 257, 8, Layout(2, 2, 64, 1)),
    Batch([300, 7, 0], 0, Layout(6, 2, 96, 5), "float16"), Batch([1000, 3, 90], 0, Layout(8, 8)),
    Batch([1000, 3, 150], 0, Layout(), more={"window_left": 127}),
    Batch([700, 30], 0, Layout(16, 2, 256, 32), "float16", {"softcap": 20.0}),
    Batch([700, 30], 0, Layout(), "float8_e4m3fn", {"scales": (0.5, 0.75), "queries": "bfloat16"}),
)  # fmt: skip
QUICK = (Batch([0, 1, 15, 16, 17, 65], 256, Layout(4, 1, 32), "float16"),)


def batches(run: Run, layouts: list[Layout]) -> list[Case]:
    """Return the checked cases: USUAL in the first timed layout, the other layouts with one batch each."""
    if run.quick:
        return [batch.case(layouts[0]) for batch in QUICK]
    more = [Batch(EDGES, 8192, layout) for layout in layouts[1:]]
    return [batch.case(layouts[0]) for batch in (*USUAL, *more, *OTHERS)]


def label(params: dict[str, int]) -> str:
    return "/".join(map(str, params.values()))


def parsed_sets(text: str) -> dict[str, list[dict[str, int]]]:
    """Parse 'triton-split:2/64/4/4/128/0,cuda-split:..' to {kernel: sets}. Raises ValueError."""
    found: dict[str, list[dict[str, int]]] = {name: [] for name in OURS}
    for part in text.split(","):
        name, _, values = part.partition(":")
        if name not in OURS:
            raise ValueError(f"{part!r}: a set begins with {' or '.join(f'{n}:' for n in OURS)}")
        try:
            found[name].append(OURS[name](*map(int, values.split("/"))))
        except (TypeError, ValueError):
            names = "/".join(PROVIDERS[name].params[0])
            raise ValueError(f"{part!r}: a set of {name} is {names}, whole numbers") from None
    return found


def sets_of(run: Run, args: list[Any], few: bool = False) -> Iterator[tuple[str, dict[str, int]]]:
    """Yield our (kernel, set) that support a call and passed so far. few: of triton-split, one set of each mode."""
    for name, sets in SETS.items():
        provider = PROVIDERS[name]
        if not sets or provider.supports(*args) is not None:
            continue
        if name == "triton-split" and (few or run.quick):
            sets = ways(sets)
        yield from ((name, p) for p in sets if provider.fits(p, *args) and (name, label(p)) not in run.bad)


def ways(sets: Sequence[dict[str, int]]) -> list[dict[str, int]]:
    """The first set of each mode of sharing keys, and the second of all sets."""
    firsts = {p["even"]: p for p in reversed(sets)}
    return [p for i, p in enumerate(sets) if i == 1 or p is firsts[p["even"]]]


def few_of(case: Case, layouts: list[Layout]) -> bool:
    """Whether one set of each mode suffices: cases that are not timed, to save compile time."""
    usual = case.dtype == "bfloat16" and not {"window_left", "softcap"} & set(case.dims)
    return not usual or Layout(*(case.dims[n] for n in Layout._fields)) not in layouts


# -- correctness


def oracle(args: list[Any]) -> torch.Tensor:
    wide = (a.double() if isinstance(a, torch.Tensor) and a.is_floating_point() else a for a in args)
    return SPEC.reference(*wide)


def verdict(run: Run, kind: str, name: str, case: dict[str, Any], wrong: str) -> None:
    """Write a set's row. Raises SystemExit if the CUDA context is lost, which ends all further checks."""
    if wrong:
        run.bad.add((name, case["params"]))
    run.row(kind, name, case, wrong, quiet=True)
    if "CUDA error" in wrong or "CUDA_ERROR" in wrong:
        raise SystemExit(f"{name} {case['params']}: the GPU's context is lost")


def check(run: Run, args: list[Any], about: dict[str, Any], few: bool) -> None:
    """Compare all sets that support a call with float64."""
    want, done = oracle(args), dict.fromkeys(OURS, 0)
    for name, p in sets_of(run, args, few):
        with poisoned():
            wrong = problem(partial(PROVIDERS[name].fn, *args, **p), want, rms=RMS)
        done[name] += 1
        if wrong:
            verdict(run, "check", name, {**about, "params": label(p)}, wrong)
    for name, count in done.items():
        if count:
            run.row("check", name, about, cases=count)


def check_batch(run: Run, case: Case, few: bool) -> None:
    """Check one case; blocks that no sequence owns hold NaN."""
    args = SPEC.inputs(case, run.device, run.generator)
    if case.dtype != "float8_e4m3fn":
        unused = torch.ones(args[1].shape[0], dtype=torch.bool, device=run.device)
        unused[args[4].flatten().long()] = False
        for cache in args[1:3]:
            cache[unused] = float("nan")
    about = {"lengths": str(case.dims["seq_lens"])[:40], "heads": case.dims["heads"], "dtype": case.dtype}
    check(run, args, about, few)


def strided(run: Run, layout: Layout) -> None:
    """Check strided inputs as hosts have them: q in a packed qkv, keys and values of a block interleaved."""
    args = SPEC.inputs(Case("strided", {"seq_lens": EDGES, **layout.dims}), run.device, run.generator)
    packed = torch.cat([args[0], torch.full_like(args[0], float("nan"))], dim=1)
    both = torch.stack(args[1:3], dim=1)
    call = [packed[:, : layout.heads], both[:, 0], both[:, 1], *args[3:]]
    check(run, call, {"lengths": "strided", "heads": layout.heads, "dtype": "bfloat16"}, few=False)


def graphs(run: Run, name: str, p: dict[str, int], layout: Layout) -> None:
    """Check graphs of four calls on two concurrent streams, with lengths and tables changed between replays."""
    case, call = Case("graph", {"seq_lens": [4096] * 3, **layout.dims}), PROVIDERS[name].fn
    made = [SPEC.inputs(case, run.device, run.generator) for _ in "ab"]
    if (name, p) not in list(sets_of(run, made[0])):
        return
    wrong = ""
    try:
        for args in made:  # compile before the capture
            call(*args, **p)
        both = SideBySide([lambda args=args: [call(*args, **p) for _ in range(4)] for args in made])
        for lens in ([900, 17, 4000], [1, 0, 65], [4096, 4096, 1], [900, 17, 4000]):
            for args, several in zip(made, both.outs, strict=True):
                args[3].copy_(torch.tensor(lens))
                args[4].copy_(args[4].flip(0))
                for out in several:
                    out.fill_(float("nan"))
            both.replay(20)
            for args, several in zip(made, both.outs, strict=True):
                want = call(*args, **p)
                if not all(torch.equal(out, want) for out in several):
                    wrong = f"graphs side by side have other bits than eager calls, for lengths {lens}"
    except Exception as error:
        wrong = f"{type(error).__name__}: {str(error)[:200]}"
    verdict(run, "graphs", name, {"params": label(p)}, wrong)


def zeros(run: Run, layout: Layout) -> None:
    """Check that the output is zero for sequences without keys, in memory that was not zeroed."""
    for name in ("fa3", "flashinfer"):
        provider = PROVIDERS[name]
        for lens in ([0], [0, 8000], [0, 5, 0, 700] * 8, [0] * 200):
            args = SPEC.inputs(Case("zeros", {"seq_lens": lens, **layout.dims}), run.device, run.generator)
            if provider.unavailable("cuda") is None and provider.supports(*args) is None:
                with poisoned():
                    wrong = problem(partial(provider.fn, *args), oracle(args), rms=RMS)
                run.row("zeros", name, {"lengths": str(lens)[:40]}, wrong)


# -- child processes


def check_share(run: Run, layouts: list[Layout], part: int, parts: int) -> None:
    """Run every parts-th check."""
    todo = [partial(check_batch, run, case, few_of(case, layouts)) for case in batches(run, layouts)]
    if run.cuda:
        todo += [partial(strided, run, layouts[0]), partial(zeros, run, layouts[0])]
        todo += [partial(graphs, run, name, p, layouts[0]) for name, sets in SETS.items() for p in sets]
    for one in todo[part::parts]:
        one()


def check_all(run: Run, command: list[str]) -> None:
    """Run `command --check i/n` in parallel; failed sets go to run.bad. Raises SystemExit if a process was lost."""
    begun = len(run.out.read_text().splitlines()) if run.out.exists() else 0
    parts = 1 if run.quick else CHECKS
    shares = [f"{i}/{parts}" for i in range(parts)]
    lost = finish([subprocess.Popen([*command, "--check", share]) for share in shares], CHECK_S)
    for row in map(json.loads, run.out.read_text().splitlines()[begun:] if run.out.exists() else ()):
        if row["status"] == "wrong":
            run.wrong += 1
            run.bad.add((row["subject"]["provider"], row["case"].get("params", "")))
    if lost:
        raise SystemExit(f"nothing was timed, because a check process was lost: {'; '.join(lost)}")
