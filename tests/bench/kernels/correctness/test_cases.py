"""The cases of an op: extreme values for every dtype, on shapes that no candidate can know."""

from __future__ import annotations

import random

import pytest
import torch
from fk_bench.kernels.judge.correctness import extremes
from fk_bench.kernels.judge.correctness.cases import case_names, trials
from fk_bench.kernels.judge.correctness.errors import compare, expect
from fk_bench.kernels.judge.memory import layout
from fk_bench.kernels.judge.rows.options import Options

from fastkernels.core import registry
from fastkernels.core.spec import Case, OpSpec

OPS = ["rms_norm", "silu_and_mul", "linear", "topk_softmax"]
KINDS = {"large", "tiny", "equal", "zero", "outlier"}


@pytest.mark.parametrize("op", OPS)
def test_extremes_cover_every_dtype_and_kind(op: str) -> None:
    spec = registry.get(op)
    here = [t.case for t in trials(spec, ("random",), "cpu") if t.gpu_only(spec) is None]
    found = [t.case for t in trials(spec, ("extreme",), "cpu")]
    kinds = KINDS | set(spec.extremes)
    declared = {kind.name for kind in extremes.kinds(spec)}
    values = {c.name for c in found if c.name.partition(":")[2] in kinds - declared}
    assert values == {f"{c.dtype}:{kind}" for c in here for kind in kinds - declared}
    assert {c.name.partition(":")[2] for c in found} - kinds <= declared
    assert len(found) == len({c.name for c in found})
    assert all(c.dtype == c.name.partition(":")[0] for c in found)


@pytest.mark.parametrize("op", ["rms_norm", "silu_and_mul", "linear"])
def test_extremes_have_secret_shapes(op: str) -> None:
    """Drawn anew in each run: a kernel that is right for the published shapes only is wrong in some."""
    spec = registry.get(op)
    published = [c.dims for c in spec.cases]
    runs = [[t.case.dims for t in trials(spec, ("extreme",), "cpu")] for _ in range(4)]
    drawn = [dims for run in runs for dims in run]
    new = [dims for dims in drawn if dims not in published]
    assert len(new) > 0.5 * len(drawn)
    assert all(a != b for i, a in enumerate(runs) for b in runs[:i])
    assert len({str(dims) for dims in new}) > len(runs[0])


@pytest.mark.parametrize("op", OPS)
def test_extremes_are_small_checked_and_not_timed(op: str) -> None:
    spec = registry.get(op)
    for trial in trials(spec, ("extreme",), "cpu"):
        assert not trial.timed and trial.gpu_only(spec) is None and trial.source == "extreme"


@pytest.mark.parametrize("op", ["rms_norm", "silu_and_mul"])
def test_edit_makes_the_named_values(op: str) -> None:
    spec = registry.get(op)
    for trial in trials(spec, ("extreme",), "cpu"):
        kind = trial.case.name.partition(":")[2]
        args = trial.make("cpu", torch.Generator().manual_seed(1))
        if trial.edit is None or kind not in KINDS:
            continue
        before = [t.clone() for t in layout.tensors(args)]
        trial.edit(args)
        x = layout.tensors(args[spec.activations[0]])[0]
        assert str(x.dtype).endswith(trial.case.dtype)
        if kind == "zero":
            assert not x.any()
        elif kind == "equal":
            assert (x == 0.75).all()
        elif kind == "outlier":
            assert (x.abs() == 1000).sum() == min(x.shape[-1], extremes.PARTS)
        elif kind in ("large", "tiny"):
            ratio = x.float().abs().mean() / before[spec.activations[0]].float().abs().mean()
            assert ratio == pytest.approx(64 if kind == "large" else 2.0**-12, rel=1e-3)


# Kinds that follow from the declaration

STRUCTURE = {"rows_apart", "turned", "offset_2_bytes", "offset_4_bytes", "one_dimension", "four_dimensions"}
NONFINITE = {"nan", "inf", "minus_inf"}
DECLARED = {
    "silu_and_mul": {*STRUCTURE, *NONFINITE, "outlier_x", "huge_x", "heavy_tails", "no_tokens"},
    "rms_norm": {
        *STRUCTURE, *NONFINITE, *(f"{n}_residual" for n in NONFINITE), "outlier_x", "outlier_residual",
        "outlier_weight", "huge_x", "huge_residual", "heavy_tails", "other_eps", "no_tokens",
    },
    "linear": {*STRUCTURE, *NONFINITE, "outlier_x", "outlier_weight", "outlier_bias", "heavy_tails", "no_tokens"},
    "topk_softmax": {"outlier_gating_output", "rows_apart", "no_tokens"},  # a NaN decides between experts
    "quantize_fp8": {"outlier_x", "rows_apart", "no_tokens"},  # 8-bit floats hold no infinity
    "attention_decode": {
        "outlier_key_cache", "outlier_q", "other_scale", "offset_4_bytes", "rows_apart_integers", "offset_integers",
        "heavy_tails", "nan",
    },
    "fused_experts": {"rows_apart_integers", "offset_integers"},
    "store_kvcache": {"offset_integers", *NONFINITE},
}  # fmt: skip


@pytest.mark.parametrize("op", DECLARED)
def test_declaration_gives_structure_and_values(op: str) -> None:
    """The kinds that apply to at least one of the op's small cases."""
    spec, rng = registry.get(op), random.Random(1)
    small = [c for c in spec.cases if 64 < spec.bytes_moved(c) < 1 << 18]
    applied = {
        kind.name for kind in extremes.kinds(spec)
        if any(extremes.apply(kind, spec, c, rng) is not None for c in small)
    }  # fmt: skip
    assert applied >= DECLARED[op], DECLARED[op] - applied
    assert op not in ("topk_softmax", "quantize_fp8") or not NONFINITE & applied
    assert op != "attention_decode" or not any(n.startswith(("nan_", "inf", "minus_inf")) for n in applied)


WITH_OP = [n for n in registry.op_names() if registry.get(n).op is not None]


@pytest.mark.parametrize("op", WITH_OP)
def test_our_ops_pass_their_declared_extremes(op: str) -> None:
    """On one small case for each kind: structure, outliers, NaN and infinity, as the judge makes them."""
    spec, rng = registry.get(op), random.Random(5)
    small = sorted((c for c in spec.cases if 64 < spec.bytes_moved(c) < 1 << 18), key=spec.bytes_moved)
    assert small
    for kind in extremes.kinds(spec):
        for base in rng.sample(small[:12], min(3, len(small))):
            case = extremes.apply(kind, spec, base, rng)
            if case is None:
                continue
            args = spec.inputs(case, "cpu", torch.Generator().manual_seed(7))
            if kind.edit is not None:
                kind.edit(args)
            want = expect(spec, case, args, "op")
            result = spec.op(*args)
            got = [v for v in (result if isinstance(result, (tuple, list)) else (result,)) if v is not None]
            got += [args[i] for i in want.written]
            found = compare(spec, case, got, want, nonfinite=kind.nonfinite)
            assert not found.problem, (kind.name, base.name, found.problem)
            break


FEW = {"rms_norm", "grouped_topk"}


@pytest.mark.parametrize(
    "op", [pytest.param(op, marks=() if op in FEW else pytest.mark.slow) for op in WITH_OP]
)
def test_ignored_number_gives_wrong_results(op: str) -> None:
    """A candidate with the usual epsilon or scale built in is wrong for another one, at least in one small case."""
    spec, rng = registry.get(op), random.Random(5)
    small = sorted((c for c in spec.cases if 64 < spec.bytes_moved(c) < 1 << 18), key=spec.bytes_moved)[:12]
    for kind in extremes.kinds(spec):
        made = [(c, extremes.apply(kind, spec, c, rng)) for c in small if kind.name.startswith("other_")]
        found = [(base, case) for base, case in made if case is not None]
        assert not found or any(_is_wrong(spec, kind.name.removeprefix("other_"), *pair) for pair in found)


def _is_wrong(spec: OpSpec, number: str, base: Case, case: Case) -> bool:
    """Whether results with the number of `base` are wrong for `case`, or the call with it is invalid."""
    args, usual = (spec.inputs(c, "cpu", torch.Generator().manual_seed(7)) for c in (case, base))
    want = expect(spec, case, args, "op")
    given = layout.mapped(args, torch.clone)  # an op may write into them, and `want` reads them later
    given[spec.position(number)] = usual[spec.position(number)]
    try:
        result = spec.op(*given)
    except ValueError:  # it decides about sizes
        return True
    got = [v for v in (result if isinstance(result, (tuple, list)) else (result,)) if v is not None]
    return bool(compare(spec, case, got + [given[i] for i in want.written], want, 0.0).problem)


# Integers that the sizes of a case state: lengths of sequences, and numbers of points and tables
STATED = {
    "cu_seqlens", "cu_seqlens_q", "cu_seqlens_k", "cu_seqlens_d", "seq_lens", "starts", "fresh", "table_starts",
    "table_rows", "batch", "top_k", "offsets", "positions",
}  # fmt: skip


@pytest.mark.parametrize(
    "op",
    [pytest.param(op, marks=() if op in ("sampling", "moe_align") else pytest.mark.slow) for op in WITH_OP],
)
def test_integer_arguments_do_not_follow_from_sizes(op: str) -> None:
    """A kernel that knows its integers may ignore them, or keep what it computed from them."""
    spec, rng, drawn = registry.get(op), random.Random(3), dict[str, set[bool]]()
    cases = sorted((c for c in spec.cases if spec.bytes_moved(c) < 1 << 18), key=spec.bytes_moved)[:8]
    for case in [*cases, *(spec.vary(c, rng) for c in cases[:4] if spec.vary is not None)]:
        made = [spec.inputs(case, "cpu", torch.Generator().manual_seed(s)) for s in (1, 2)]
        for argument, a, b in zip(spec.arguments, *made, strict=False):
            if isinstance(a, torch.Tensor) and not a.is_floating_point() and a.numel() > 4:
                drawn.setdefault(argument.name, set()).add(a.shape != b.shape or not torch.equal(a, b))
    assert {name for name, found in drawn.items() if found == {False}} <= STATED


def test_structure_is_what_its_name_says() -> None:
    spec = registry.get("silu_and_mul")
    case = next(c for c in spec.cases if c.name == "odd_1128")
    made = {}
    for kind in extremes.kinds(spec):
        args = spec.inputs(case, "cpu", torch.Generator().manual_seed(1))
        before = args[0].clone()
        if kind.edit is not None:
            kind.edit(args)
        made[kind.name] = args[0]
        if not kind.values and not kind.reshapes:
            assert torch.equal(args[0], before)
    assert made["rows_apart"].stride(0) == made["rows_apart"].shape[1] + extremes.PAD
    assert made["turned"].stride(-1) != 1
    assert made["nan"].isnan().sum() == extremes.PARTS
    assert (made["inf"] == torch.inf).sum() == (made["minus_inf"] == -torch.inf).sum() == extremes.PARTS
    size = made["offset_4_bytes"].element_size()
    assert made["offset_4_bytes"].storage_offset() * size == 4
    assert made["four_dimensions"].dim() >= 4 or made["four_dimensions"].shape == before.shape


def test_names_of_cases_are_known_without_a_run() -> None:
    names = case_names([registry.get("silu_and_mul")], Options())
    assert {"odd_1128", "bfloat16:rows_apart", "float32:zero", "float16:nan"} <= set(names)
    chosen = trials(registry.get("silu_and_mul"), ("extreme",), "cpu", ("bfloat16:rows_apart",))
    assert [t.case.name for t in chosen] == ["bfloat16:rows_apart"]


@pytest.mark.parametrize("op", ["relu2"])
def test_secret_large_case_is_checked_untimed_on_cpu(op: str) -> None:
    spec, picked = registry.get(op), set()
    for _ in range(20):
        (large,) = [t for t in trials(spec, ("random",), "cpu") if t.large]
        assert not large.timed and large.gpu_only(spec) is None and spec.bytes_moved(large.case) > 1 << 20
        picked.add(large.case.name)
    assert len(picked) > 1
    assert not any(t.large for t in trials(spec, ("random",), "cuda"))


def test_other_draws_of_an_extreme_case_fit_the_dtype() -> None:
    """A gradient of 60,000 in float16 was 67,000 with the judge's values, and inf - inf in a right kernel."""
    for value, fits in ((30_000.0, True), (60_000.0, False), (float("inf"), False)):
        assert extremes.fits(torch.tensor([1.0, -value], dtype=torch.float16)) is fits
    assert extremes.fits(torch.tensor([1e30], dtype=torch.bfloat16)) and extremes.fits(torch.empty(0))
