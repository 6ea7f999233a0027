"""Cases in which production was ahead, with other settings of our kernels beside it: which one should be the default.

    python bench/scenarios/small_ops.py --out rows.jsonl --seconds 240 [--only l2_norm,attention_decode] [--ours]

Every setting is checked before anything is timed: an output that is not right has a row and no time. Times are us a
call in a CUDA graph of calls with arguments of their own, in interleaved rounds of all settings and baselines. `ours`
is what the op does by itself on this machine, with its tuned table; baselines are the judge's, with a + before their
names. A case that must move 16 MB and more has copies of as many bytes beside it: PyTorch's `copy`, and its kernel that
negates (`negate`). --device cpu --quick, under TRITON_INTERPRET=1, goes through small shapes with whatever runs there.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import small_ops_text
import torch
from fk_bench.kernels.judge.baselines import baselines
from fk_bench.kernels.judge.memory.slots import written_arguments
from graph_clock import Run, measure

from fastkernels.core import registry
from fastkernels.core.spec import Case, OpSpec
from fastkernels.overrides.activation import gelu_and_mul
from fastkernels.overrides.attention import attention_decode
from fastkernels.overrides.attention import attention_decode_cuda as _attention_decode_cuda
from fastkernels.overrides.kit import elementwise as _elementwise
from fastkernels.overrides.kit import overlap as _overlap
from fastkernels.overrides.moe import moe_align_triton as _moe_align_triton
from fastkernels.overrides.norm import gemma_rms_norm, l2_norm, rms_norm

MOST_BYTES = 4 << 30  # of all arguments of a case
COPIED = 16 << 20  # bytes from which on a case has a copy beside it
Way = Callable[..., Any]


@dataclass(frozen=True)
class Point:
    """A case and the settings that it is timed with: {name: (module, attribute, value) put in place for the call}.

    providers  {name: (provider, parameters)} that are run in place of the op's choice
    """

    op: str
    case: Case
    settings: Mapping[str, tuple[Any, str, Any]] = field(default_factory=dict)
    providers: Mapping[str, tuple[str, Mapping[str, Any]]] = field(default_factory=dict)


def forced(**options: Any) -> Way:
    """For `launch_kernel`: the same launch with other options."""
    return lambda kernel, grid, *args, **rest: _overlap.launch_kernel(
        kernel, grid, *args, **{**rest, **options}
    )


def in_turn(kernel: Any, grid: tuple[int, ...], *args: Any, **rest: Any) -> None:
    """For `launch_kernel`: not early."""
    kernel[grid](*args, **rest, OVERLAP=False)


def of(op: str, name: str, dtype: str | None = None, **dims: Any) -> Case:
    """The case of that name of an op's SPEC, or one like it."""
    found = next(c for c in registry.get(op).cases if c.name == name)
    if not dims and dtype is None:
        return found
    return Case(" ".join([name, *map(str, dims.values())])[:60], {**found.dims, **dims}, dtype or found.dtype)


def rows_and_warps(*sets: tuple[int, int]) -> dict[str, tuple[Any, str, Any]]:
    return {f"{r} rows, {w} warps": (l2_norm, "_rows_and_warps", lambda *_, s=(r, w): s) for r, w in sets}


def warps(*counts: int) -> dict[str, tuple[Any, str, Any]]:
    return {f"{n} warps": (rms_norm, "launch_kernel", forced(num_warps=n)) for n in counts}


ALIGN = {
    "one launch": (_moe_align_triton, "in_chunks", lambda *_: False),
    "two launches": (_moe_align_triton, "in_chunks", lambda *_: True),
    "in turn": (_moe_align_triton, "launch_kernel", in_turn),
}
DECODE = {
    "fa3": ("fa3", {}), "triton-split": ("triton-split", {}), "xqa, its zeros": ("flashinfer", {}),
    **{"cuda " + "/".join(map(str, p.values())): ("cuda-split", p) for p in _attention_decode_cuda.PARAMS},
}  # fmt: skip
SMALL_HEADS = {"heads": 9, "kv_heads": 3, "head_size": 64}


def points() -> list[Point]:
    """The ones that a default hangs on first."""
    erf = {"blocks of 1024": (gelu_and_mul, "SMALL", 0)}
    audio = {"tiles of 1024": (_elementwise, "LARGE", 1 << 62)}
    always = {"early": (attention_decode, "overlap", lambda device, **_: _overlap.overlap(device))}
    odd = {"seq_lens": [70, 3, 19], "heads": 6, "kv_heads": 2, "head_size": 40, "block_size": 5}
    found = [
        Point("attention_decode", of("attention_decode", "smollm2", seq_lens=[58], **SMALL_HEADS), providers=DECODE),
        Point(
            "attention_decode",
            of("attention_decode", "smollm2", seq_lens=[115, 83, 86, 116, 81, 89], **SMALL_HEADS),
            providers=DECODE,
        ),
        Point("attention_decode", of("attention_decode", "smollm2"), providers=DECODE),
        Point("attention_decode", of("attention_decode", "decode_1"), providers=DECODE),
        Point("attention_decode", of("attention_decode", "decode_32"), providers=DECODE),
        Point("attention_decode", of("attention_decode", "smollm2", "float32", **odd), always),
        Point("attention_prefill", of("attention_prefill", "smollm2")),
        Point("attention_prefill", of("attention_prefill", "prefill_32x256")),
        Point("gelu_and_mul", of("gelu_and_mul", "erf_32"), erf),
        Point("gelu", of("gelu", "audio_8"), audio),
        Point("gelu", of("gelu", "prefill_8k")),
        Point("l2_norm", of("l2_norm", "prefill_2k"), rows_and_warps((8, 4), (16, 8), (32, 8))),
        Point("l2_norm", of("l2_norm", "prefill_8k"), rows_and_warps((8, 4), (16, 8), (32, 8))),
        *(Point("l2_norm", of("l2_norm", n), rows_and_warps((8, 4))) for n in ("odd_63", "head_65", "from_float32")),
        Point("rms_norm", of("rms_norm", "odd_63"), warps(4, 8)),
        Point("rms_norm", of("rms_norm", "prefill_8k"), small_ops_text.norms(rms_norm)),
        Point("gemma_rms_norm", of("gemma_rms_norm", "prefill_8k"), small_ops_text.norms(gemma_rms_norm)),
        Point("relu2", of("relu2", "prefill_8k"), small_ops_text.relu2s()),
        Point("silu_and_mul", of("silu_and_mul", "prefill_8k"), small_ops_text.silus()),
        *(Point("moe_align", of("moe_align", "qwen3_32", tokens=n, block=16), ALIGN) for n in (128, 256)),
        *(
            Point("linear_fp8", of("linear_fp8", f"qwen_{n}"))
            for n in ("qkv_1", "gate_up_32", "down_32", "down_tp2_8", "gate_up_4k")
        ),
        Point("merge_state", of("merge_state", "deepseek_4k"), small_ops_text.merges()),
        Point("merge_state", of("merge_state", "prefill_4k"), small_ops_text.merges()),
        Point("logits_processor", of("logits_processor", "scaled")),
    ]  # fmt: skip
    return found


def tiny() -> list[Point]:
    """What the interpreter gets through on a CPU."""
    heads = {"tokens": 3, "heads": 2, "head_dim": 33}
    odd = {"seq_lens": [7, 3], "heads": 2, "kv_heads": 1, "head_size": 8, "block_size": 5}
    always = {"early": (attention_decode, "overlap", lambda device, **_: _overlap.overlap(device))}

    return [
        Point("gelu_and_mul", of("gelu_and_mul", "erf_1128"), {"blocks of 1024": (gelu_and_mul, "SMALL", 0)}),
        Point("l2_norm", of("l2_norm", "from_float32", **heads), rows_and_warps((8, 4))),
        Point("rms_norm", of("rms_norm", "odd_63", "float16", tokens=3), warps(4, 8)),
        Point(
            "rms_norm", of("rms_norm", "prefill_8k", tokens=5, hidden=1000), small_ops_text.norms(rms_norm)
        ),
        Point(
            "gemma_rms_norm",
            of("gemma_rms_norm", "prefill_8k", tokens=5, hidden=72),
            small_ops_text.norms(gemma_rms_norm),
        ),
        Point("relu2", of("relu2", "prefill_8k", tokens=3, d=3000), small_ops_text.relu2s()),
        Point("silu_and_mul", of("silu_and_mul", "prefill_8k", tokens=2, d=3000), small_ops_text.silus()),
        Point(
            "merge_state",
            of("merge_state", "deepseek_4k", tokens=16, heads=4, context=5),
            small_ops_text.merges(),
        ),
        Point("attention_decode", of("attention_decode", "smollm2", "float32", **odd), always, DECODE),
        Point("moe_align", of("moe_align", "qwen3_32", tokens=9, experts=5, block=4), ALIGN),
    ]


def put(where: tuple[Any, str, Any], run_op: Way, *args: Any) -> Any:
    with mock.patch.object(*where):
        return run_op(*args)


def ways(run: Run, point: Point, args: list[Any]) -> dict[str, Way]:
    """What takes this case here: ours, our settings, and baselines of the judge, `+` before their names."""
    op = registry.get(point.op).op
    found: dict[str, Way] = {"ours": op.run}
    found |= {name: partial(put, where, op.run) for name, where in point.settings.items()}
    for name, (wanted, params) in point.providers.items():
        provider = next(p for p in op.providers if p.name == wanted)
        if provider.unavailable(run.device) is None and (
            provider.supports is None or provider.supports(*args) is None
        ):
            found[name] = provider.bound(params).fn
    for baseline in baselines.baselines(point.op, "production", run.device):
        wanted = baseline.graph and baseline.name != "reference" and baseline.available() is None
        if wanted and baseline.supports(*args) is None and not (run.quick and baseline.kind == "compiler"):
            try:
                found["+" + baseline.name] = baseline.make()
            except Exception as error:  # another version of the library
                run.row(
                    "check", "+" + baseline.name, {}, f"{type(error).__name__}: {error}"[:200], "unsupported"
                )
    return found


def right(spec: OpSpec, case: Case, way: Way, args: list[Any]) -> str:
    """'' if the way gives what the reference does, else what is wrong."""

    def copied() -> list[Any]:
        return [a.clone() if isinstance(a, torch.Tensor) else a for a in args]

    want, used = spec.reference(*copied()), copied()
    got = way(*used)
    wanted = [t for t in (want if isinstance(want, tuple) else (want,)) if t is not None]
    given = list(got if isinstance(got, tuple) else (got,) if got is not None else ())
    given += [used[i] for i in written_arguments(spec) if used[i] is not None]  # behind the outputs
    if len(given) != len(wanted):
        return f"{len(given)} outputs, not {len(wanted)}"
    for g, w in zip(given, wanted, strict=True):
        if g.shape != w.shape:
            return f"{tuple(g.shape)}, not {tuple(w.shape)}"
        if not g.is_floating_point():
            if not torch.equal(g, w.to(g.dtype)):
                return "integers differ"
            continue
        limit = spec.tolerance_for(case, g.dtype)
        gap = (g.double() - w.double()).abs() - 2 * limit.rtol * w.double().abs()
        if not bool((gap <= 2 * limit.atol).all()):
            return f"an error of {(g.double() - w.double()).abs().max().item():.3g}"
    return ""


def copies(run: Run, moved: int) -> dict[str, Way]:
    """What reads half as many bytes and writes the other half, of memory of its own."""
    source = torch.zeros(moved // 8, dtype=torch.int32, device=run.device)
    target = torch.empty_like(source)
    return {"copy": partial(target.copy_, source), "negate": partial(torch.neg, source, out=target)}


def time_point(run: Run, point: Point) -> None:
    spec, run.op = registry.get(point.op), point.op
    dtype = "float32" if point.case.dtype == "bfloat16" and not run.cuda else point.case.dtype
    case = Case(point.case.name, point.case.dims, dtype)
    first = spec.inputs(case, run.device, run.generator)
    size = sum(a.nbytes for a in first if isinstance(a, torch.Tensor))
    count = 2 if run.quick else min(max(MOST_BYTES // max(size, 1), 2), 20)
    sets = [first, *(spec.inputs(case, run.device, run.generator) for _ in range(count - 1))]
    todo: dict[str, list[Way]] = {}
    for name, way in ways(run, point, first).items():
        try:
            reason = right(spec, case, way, first)
        except Exception as error:
            reason = f"{type(error).__name__}: {str(error)[:200]}"
        if reason:
            run.row("check", name, {"case": case.name}, reason, "" if name[0] != "+" else "unsupported")
        else:
            todo[name] = [partial(way, *args) for args in sets]
    moved = spec.bytes_moved(case)
    if moved >= COPIED or run.quick:
        for _ in sets:
            for name, way in copies(run, moved).items():
                todo.setdefault(name, []).append(way)
    times = {name: us / count for name, us in measure(run, todo).items()}
    for name, us in times.items():
        run.row("time", name, {"case": case.name}, us=us, tb_per_s=1e-6 * moved / us, quiet=True)
    theirs = min((us for name, us in times.items() if name[0] == "+"), default=None)
    ratio = f" {theirs / times['ours']:.3f} of the best baseline" if theirs and "ours" in times else ""
    said = "  ".join(f"{name} {us:.2f}" for name, us in times.items())
    run.summary.append(f"{point.op} {case.name}:{ratio}  {said}")
    print(run.summary[-1], flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--seconds", type=float, default=240.0, help="no case begins later")
    parser.add_argument("--only", help="ops, by commas")
    parser.add_argument("--ours", action="store_true", help="no other settings")
    parser.add_argument("--device", default="cuda", choices=("cuda", "cpu"))
    parser.add_argument("--quick", action="store_true", help="tiny shapes")
    options = parser.parse_args()
    run, begin = Run("small_ops", "", options), time.monotonic()
    run.common["baseline"] = "production"
    asked = options.only.split(",") if options.only else None
    with torch.inference_mode():
        for point in tiny() if options.quick else points():
            if asked is not None and point.op not in asked:
                continue
            if options.ours:
                point = Point(point.op, point.case)
            if run.left() <= 0:
                run.summary.append(f"{point.op} {point.case.name}: no time was left")
                continue
            try:
                time_point(run, point)
            except Exception as error:
                run.row(
                    "time",
                    "ours",
                    {"case": point.case.name},
                    f"{type(error).__name__}: {error}"[:300],
                    "failed",
                )
            if run.cuda:
                torch.cuda.empty_cache()
    print("\n".join(["", *run.summary, f"{run.wrong} wrong, {time.monotonic() - begin:.0f} s"]), flush=True)
    raise SystemExit(1 if run.wrong else 0)


if __name__ == "__main__":
    main()
