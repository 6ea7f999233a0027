"""attention_decode in CUDA C++: the emulated kernel against float64, unsupported calls, and its selection."""

from __future__ import annotations

import importlib
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support.attention import emulated_decode
from support.kernels.op_cases import make_args, mismatch, oracle

from fastkernels.core import cuda_rtc, registry
from fastkernels.core import tuning as tuned
from fastkernels.core.spec import Case
from fastkernels.core.tuning import Entry
from fastkernels.overrides.attention import attention_decode_cuda as cuda
from fastkernels.overrides.attention.attention_decode import attention_decode

SPEC = registry.get("attention_decode")
LLAMA: dict[str, Any] = {"heads": 32, "kv_heads": 8, "head_size": 128, "block_size": 16}
EDGES = [0, 1, 15, 16, 17, 31, 32, 33, 63, 64, 65, 100]
needs_gxx = pytest.mark.skipif(shutil.which("g++") is None, reason="g++ is not installed")


def layout(heads: int, kv_heads: int, head_size: int, block_size: int) -> dict[str, Any]:
    return {"heads": heads, "kv_heads": kv_heads, "head_size": head_size, "block_size": block_size}


# -- values


# lengths, layout, dtype, params (warps, keys, stages, per_sm, least, ahead, cluster, whole), processors, stale
FAST = [
    (EDGES, layout(6, 2, 128, 5), "bfloat16", (2, 32, 2, 1, 16, 0), 8, 1),
    ([1500], layout(4, 1, 128, 16), "bfloat16", (4, 16, 3, 1, 16, 2), 40, 2),  # one sequence over all workers
    ([5, 1000, 7], layout(3, 1, 128, 16), "bfloat16", (2, 16, 3, 1, 64, 2), 2, 3),  # reused rings
    (EDGES, layout(8, 1, 64, 16), "bfloat16", (2, 16, 3, 1, 64, 3, 2), 8, 2),  # clusters
    (
        [5, 17, 131, 1],
        layout(3, 1, 64, 16),
        "bfloat16",
        (8, 16, 3, 1, 128, 2, 1, 256),
        132,
        2,
    ),  # none is divided
    ([9, 64, 0, 31], layout(4, 1, 64, 16), "float16", (2, 16, 3, 1, 16, 1, 1, 64), 3, 2),  # more than workers
]
MORE = [
    (EDGES, layout(16, 1, 128, 64), "float16", (2, 16, 4, 1, 32, 2), 4, 1),
    ([9] * 300, layout(2, 2, 64, 16), "bfloat16", (4, 16, 3, 1, 64, 2), 7, 2),  # over 256 sequences
    (EDGES, layout(1, 1, 64, 1), "float16", (2, 16, 2, 1, 16, 1), 5, 2),
    (EDGES, layout(8, 1, 64, 16), "bfloat16", (4, 16, 3, 2, 64, 3), 4, 2),
    ([0] * 40, layout(8, 2, 128, 16), "bfloat16", (4, 16, 3, 1, 64, 2), 3, 0),
    ([i * 37 % 90 for i in range(40)], layout(12, 1, 64, 32), "bfloat16", (4, 32, 2, 1, 64, 2), 6, 2),
    ([5, 1000, 7], layout(4, 1, 128, 1), "float16", (8, 16, 3, 1, 64, 2), 7, 1),
    ([1500, 3, 0, 700], layout(4, 1, 64, 16), "bfloat16", (2, 16, 2, 1, 64, 1, 4), 16, 2),
    ([40] * 7, layout(6, 2, 128, 5), "float16", (2, 16, 2, 2, 16, 1, 2), 8, 0),
    ([300], layout(4, 4, 64, 16), "bfloat16", (4, 16, 3, 1, 64, 2), 1, 2),  # fewer workers than key heads
    ([4, 0, 19], layout(6, 2, 128, 5), "float16", (4, 16, 3, 1, 16, 0, 1, 64), 7, 0),  # as many as workers
    ([5, 17, 65, 0], layout(4, 1, 64, 16), "bfloat16", (4, 16, 3, 1, 16, 3, 1, 64), 6, 2),  # one is longer
    ([64, 0, 33], layout(8, 2, 64, 16), "bfloat16", (2, 16, 3, 1, 16, 1, 2, 64), 17, 2),  # in clusters
    ([0], layout(4, 4, 64, 1), "bfloat16", (2, 16, 2, 1, 16, 2, 1, 64), 5, 3),
]


def marked(fast: list[Any], more: list[Any]) -> list[Any]:
    return [*fast, *(pytest.param(*each, marks=pytest.mark.slow) for each in more)]


@needs_gxx
@pytest.mark.parametrize(("lens", "dims", "dtype", "params", "sms", "stale"), marked(FAST, MORE))
def test_emulated_kernel_matches_float64(
    lens: list[int], dims: dict[str, Any], dtype: str, params: tuple[int, ...], sms: int, stale: int, tmp_path: Path
) -> None:  # fmt: skip
    """Runs the CUDA text with CPU lanes and emulated PTX: indices, rings, barriers, shares, parts, tickets.

    With stale 2 or 3, memory holds nonsense before griddepcontrol.wait. Unused blocks hold NaN.
    """
    case = Case("lanes", {"seq_lens": lens, **dims}, dtype)
    args = make_args(SPEC, case)
    unused = torch.ones(args[1].shape[0], dtype=torch.bool)
    for row, n in zip(args[4], lens, strict=True):
        unused[row[: -(-n // dims["block_size"])].long()] = False
    for cache in args[1:3]:
        cache[unused] = float("nan")
    forwards, backwards = emulated_decode.decode(args, cuda._set(*params), sms, stale, tmp_path)
    assert torch.equal(forwards, backwards), "the order of arrival changes the bits"
    assert mismatch(SPEC, case, [forwards], [oracle(SPEC, args)[0]]) is None


W20, W33, W40, W90, CAP = ({name: value} for name, value in (
    ("window_left", 20), ("window_left", 33), ("window_left", 40), ("window_left", 90), ("softcap", 1.5),
))  # fmt: skip
FAST_WINDOWS = [
    (EDGES, {**layout(4, 2, 256, 16), **CAP, **W33}, "bfloat16", (4, 16, 3, 1, 16, 2), 7, 2),
]
MORE_WINDOWS = [
    ([70, 3, 0, 200], layout(10, 2, 80, 16), "float16", (2, 16, 3, 1, 16, 3, 2), 9, 2),
    ([700, 3, 0, 65], {**layout(2, 1, 64, 1), **W90}, "float16", (2, 16, 3, 1, 16, 1, 2), 9, 2),
    (EDGES, {**layout(4, 1, 64, 16), **W20}, "bfloat16", (2, 16, 3, 1, 16, 2), 5, 2),
    (EDGES, {**layout(6, 2, 128, 5), "window_left": 0}, "float16", (2, 32, 2, 1, 16, 1), 8, 3),
    ([9, 400, 0], {**layout(4, 1, 64, 16), **W40}, "float16", (2, 16, 3, 1, 16, 1, 1, 64), 6, 2),
    (EDGES, {**layout(8, 2, 64, 16), **CAP}, "bfloat16", (2, 16, 3, 1, 16, 2), 5, 2),
    (EDGES, layout(3, 1, 256, 5), "float16", (2, 16, 2, 1, 16, 1), 6, 2),
    (EDGES, layout(6, 2, 96, 16), "bfloat16", (2, 16, 3, 1, 16, 2), 6, 2),
    ([70, 3, 0, 200], {**layout(2, 1, 40, 1), **W40}, "float16", (2, 16, 2, 1, 16, 1), 4, 2),
]


@needs_gxx
@pytest.mark.parametrize(
    ("lens", "dims", "dtype", "params", "sms", "stale"), marked(FAST_WINDOWS, MORE_WINDOWS)
)
def test_windows_caps_and_head_sizes_match_float64(
    lens: list[int], dims: dict[str, Any], dtype: str, params: tuple[int, ...], sms: int, stale: int, tmp_path: Path
) -> None:  # fmt: skip
    """Keys that no sequence sees hold NaN."""
    case = Case("lanes", {"seq_lens": lens, **dims}, dtype)
    args = make_args(SPEC, case)
    want = oracle(SPEC, args)[0]
    window = dims.get("window_left", -1)
    unused = torch.ones(args[1].shape[:2], dtype=torch.bool)
    for row, n in zip(args[4], lens, strict=True):
        for at in range(max(n - 1 - window, 0) if window >= 0 else 0, n):
            unused[row[at // dims["block_size"]].long(), at % dims["block_size"]] = False
    for cache in args[1:3]:
        cache[unused] = float("nan")
    assert cuda.refused(*args[:5]) is None
    forwards, backwards = emulated_decode.decode(args, cuda._set(*params), sms, stale, tmp_path)
    assert torch.equal(forwards, backwards), "the order of arrival changes the bits"
    assert mismatch(SPEC, case, [forwards], [want]) is None


def fp8(queries: str = "bfloat16", **dims: Any) -> dict[str, Any]:
    return {"queries": queries, "scales": (0.5, 0.75), **dims}


# lengths, dims, params, processors, warps whose sums are in memory at once
FAST_FP8 = [
    (EDGES, {**fp8(), **layout(6, 2, 128, 5)}, (4, 32, 2, 1, 32, 2), 8, 2),
    (EDGES, {**fp8("float8_e4m3fn"), **layout(12, 1, 64, 16), **W33}, (4, 16, 3, 1, 32, 2, 2), 8, 1),
]
MORE_FP8 = [
    (EDGES, {**fp8("float16"), **layout(16, 1, 128, 16)}, (4, 16, 3, 1, 32, 2), 6, 1),
    (EDGES, {**fp8("float8_e4m3fn"), **layout(4, 2, 256, 16), **CAP}, (4, 16, 2, 1, 16, 1), 7, 4),
    ([700, 3, 0, 65], {**fp8(), **layout(10, 2, 80, 1), **W90}, (2, 32, 3, 1, 32, 3), 9, 2),
    ([300, 5], {**fp8(), **layout(8, 1, 96, 16)}, (8, 16, 3, 1, 64, 2, 2), 8, 2),
    ([9, 64, 0, 31], {**fp8(), **layout(1, 1, 128, 64)}, (2, 32, 3, 1, 32, 1, 1, 64), 9, 1),
]


@needs_gxx
@pytest.mark.parametrize(("lens", "dims", "params", "sms", "slots"), marked(FAST_FP8, MORE_FP8))
def test_fp8_caches_match_float64(
    lens: list[int], dims: dict[str, Any], params: tuple[int, ...], sms: int, slots: int, tmp_path: Path
) -> None:
    """Queries in 16 bits and in FP8; unused keys hold NaN."""
    case = Case("fp8", {"seq_lens": lens, **dims}, "float8_e4m3fn")
    args = make_args(SPEC, case)
    want = oracle(SPEC, args)[0]
    window = dims.get("window_left", -1)
    unused = torch.ones(args[1].shape[:2], dtype=torch.bool)
    for row, n in zip(args[4], lens, strict=True):
        for at in range(max(n - 1 - window, 0) if window >= 0 else 0, n):
            unused[row[at // dims["block_size"]].long(), at % dims["block_size"]] = False
    for cache in args[1:3]:
        cache.view(torch.uint8)[unused] = 0x7F
    assert cuda.refused(*args[:5]) is None
    found = emulated_decode.decode(args, cuda._set(*params), sms, 2, tmp_path, slots=slots)
    assert torch.equal(*found), "the order of arrival changes the bits"
    rounding = 2e-3 if dims["queries"] == "float16" else 1.6e-2  # of the result
    torch.testing.assert_close(found[0].double(), want.double(), atol=rounding / 2, rtol=rounding / 2)


@needs_gxx
def test_large_queries_are_clamped_for_fp8_caches(tmp_path: Path) -> None:
    """Products are in float16: a query over its range has the largest value there, and NaN stays NaN."""
    case = Case("large", {"seq_lens": [3, 3], **fp8(), **layout(2, 1, 64, 16)}, "float8_e4m3fn")
    args = make_args(SPEC, case)
    args[0][0, 0], args[0][1, 1, 5] = 1e6, float("nan")
    got = emulated_decode.decode(args, cuda._set(2, 16, 2, 1, 16, 0), 2, 0, tmp_path)[0]
    assert got[0].isfinite().all() and got[1, 0].isfinite().all() and got[1, 1].isnan().any()


@needs_gxx
@pytest.mark.parametrize("slots", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_sums_of_warps_are_added_in_turn(slots: int, tmp_path: Path) -> None:
    case = Case("slots", {"seq_lens": EDGES, **layout(10, 2, 128, 16)}, "bfloat16")
    args = make_args(SPEC, case)
    want = oracle(SPEC, args)[0]
    for got in emulated_decode.decode(args, cuda._set(4, 16, 2, 1, 16, 1), 6, 2, tmp_path, slots=slots):
        assert mismatch(SPEC, case, [got], [want]) is None


@needs_gxx
@pytest.mark.parametrize("dtype", [pytest.param(torch.float32, marks=pytest.mark.slow), torch.bfloat16])
def test_attention_sinks_match_float64(dtype: torch.dtype, tmp_path: Path) -> None:
    """Divided and whole sequences, with a window; one has no keys, and some sinks outweigh all keys."""
    dims = {**layout(6, 2, 64, 16), "window_left": 300, "sinks": True}
    case = Case("sinks", {"seq_lens": [70, 3, 0, 400], **dims}, "bfloat16")
    args = make_args(SPEC, case)
    args[11] = torch.tensor([-3.0, 9.0, 0.5, 2.0, -90.0, 90.0]).to(dtype)
    assert cuda.refused(*args[:5], args[11]) is None
    for got in emulated_decode.decode(args, cuda._set(2, 16, 3, 1, 16, 1), 9, 2, tmp_path):
        assert mismatch(SPEC, case, [got], [oracle(SPEC, args)[0]]) is None
    assert "float16" in str(cuda.refused(*args[:5], args[11].half()))


@needs_gxx
def test_strided_inputs_match_float64(tmp_path: Path) -> None:
    """q in a packed qkv, keys and values of a block adjacent in memory, as in a host."""
    case = Case("strided", {"seq_lens": [70, 3, 0, 200], **layout(8, 2, 128, 16)}, "bfloat16")
    args = make_args(SPEC, case)
    want = oracle(SPEC, args)[0]
    packed = torch.cat([args[0], torch.full_like(args[0], float("nan"))], dim=1)
    both = torch.stack(args[1:3], dim=1)
    call = [packed[:, :8], both[:, 0], both[:, 1], *args[3:]]
    assert cuda.refused(*call[:5]) is None and call[0].stride(0) == 2 * 8 * 128
    for got in emulated_decode.decode(call, cuda.PARAMS[0], 2, 2, tmp_path):
        assert mismatch(SPEC, case, [got], [want]) is None


@needs_gxx
def test_whole_sequences_take_no_tickets(tmp_path: Path) -> None:
    """None is divided if each has a worker and at most `whole` keys; a longer one divides all."""
    for lens, cut in (([5, 64, 0, 31], False), ([5, 65, 0, 31], True)):
        case = Case("whole", {"seq_lens": lens, **layout(4, 1, 64, 16)}, "bfloat16")
        args, params = make_args(SPEC, case), cuda._set(2, 16, 3, 1, 16, 1, whole=64)
        if cut:
            with pytest.raises(RuntimeError, match="a ticket was taken"):
                emulated_decode.decode(args, params, 6, 2, tmp_path, tickets=False)
        else:
            got = emulated_decode.decode(args, params, 6, 2, tmp_path, tickets=False)[0]
            assert mismatch(SPEC, case, [got], [oracle(SPEC, args)[0]]) is None


def test_empty_batch_gives_empty_output() -> None:
    args = make_args(SPEC, Case("none", {"seq_lens": [], **LLAMA}))
    assert cuda.decode_cuda(*args).shape == (0, 32, 128)


# -- sizes


@settings(max_examples=200, deadline=None)
@given(
    group=st.integers(1, cuda.MAX_HEADS), head_size=st.sampled_from([64, 80, 128]),
    batch=st.integers(1, cuda.MAX_BATCH), params=st.sampled_from(cuda.PARAMS),
)  # fmt: skip
def test_plan_fits_shared_memory(group: int, head_size: int, batch: int, params: dict[str, int]) -> None:
    q = torch.empty(batch, group, head_size, dtype=torch.bfloat16, device="meta")
    cache = torch.empty(1, 16, 1, head_size, dtype=torch.bfloat16, device="meta")
    for most in (1, 256, 257, 8192):
        for kv in (cache, cache.to(torch.float8_e4m3fn)):
            chosen = cuda.choose(q, kv, most)
            assert chosen in cuda.PARAMS and cuda.fits(chosen, q, kv)
    p = cuda.plan(params, q, cache)
    if not cuda.has_room(p):
        return
    assert p.shared <= cuda.SHARED and p.seqs >= batch
    assert p.resident >= 1 and p.resident * p.warps * 32 * 168 <= 1 << 16
    if p.resident > 1:
        assert p.resident * (p.shared + 1024) <= cuda.SHARED_OF_ALL
    assert p.warps % p.slots == 0
    if p.slots < p.warps:  # all of them would not fit, or fewer blocks would
        assert p._shared(p.warps) > min(cuda.SHARED, cuda.SHARED_OF_ALL // p.per_sm - 1024)


def test_eight_warps_read_for_every_group() -> None:
    """Sums of 8 and 16 query heads take turns in shared memory, where the rings of 8 warps leave no room for all."""
    for group in (1, 4, 5, 7, 8, 16):
        for kv in (torch.bfloat16, torch.float8_e4m3fn):
            q = torch.empty(8, 8 * group, 128, dtype=torch.bfloat16, device="meta")
            chosen = cuda.choose(q, torch.empty(1, 16, 8, 128, dtype=kv, device="meta"), 131072)
            assert (chosen["warps"], chosen["cluster"]) == (8, 1)
            assert chosen["keys"] == (16 if kv == torch.bfloat16 else 32)


def test_few_key_heads_get_pairs_of_blocks() -> None:
    """One key head: the last worker would add 132 parts of a sequence."""
    like = cuda.plan_of(cuda.PARAMS[0], 16, 128, 16, 1)
    assert cuda.ranked(like, 1, 1, 132)[0] is cuda.PAIRED[0]
    assert cuda.ranked(like._replace(fp8=True), 1, 1, 132)[0] is cuda.PAIRED[1]
    assert cuda.ranked(like, 1, 8, 132)[0] is cuda.ranked(like, 8, 1, 132)[0] is cuda.PARAMS[0]


def test_many_sequences_of_wide_heads_have_a_reason() -> None:
    q = torch.empty(4096, 16, 256, dtype=torch.bfloat16, device="meta")
    cache = torch.empty(1, 16, 1, 256, dtype=torch.bfloat16, device="meta")
    assert "4096 sequences" in str(cuda.no_room(q, cache)) and cuda.no_room(q[:512], cache) is None


def test_sets_are_distinct_and_fit_llama() -> None:
    assert len({tuple(p.values()) for p in cuda.PARAMS}) == len(cuda.PARAMS)
    q, cache = make_args(SPEC, Case("room", {"seq_lens": [1], **LLAMA}))[:2]
    in_fp8 = cache.to(torch.float8_e4m3fn)
    for p in cuda.PARAMS:
        narrow = q[..., :64], in_fp8[..., :64]
        assert any(cuda.fits(p, *each) for each in ((q, cache), (q, in_fp8), narrow)), p
        assert p["keys"] in (16, 32) and p["stages"] >= 2 and 0 <= p["ahead"] <= p["stages"], p
        assert (
            p["warps"] <= 8
            and p["cluster"] in (1, 2, 4, 8)
            and p["per_sm"] >= 1
            and p["least"] % p["keys"] == 0
        ), p


def test_exported_launch_passes_the_kernels_arguments(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        cuda_rtc, "nvrtc", None, raising=False
    )  # as in the module that replaces it in an export
    fork_decode = importlib.import_module("fastkernels.export.plain.fork_decode")
    q, cache = make_args(SPEC, Case("room", {"seq_lens": [1], **LLAMA}))[:2]
    options = dict(option[2:].split("=") for option in cuda.plan(cuda.PARAMS[0], q, cache).options[1:])
    told, shared = fork_decode.constants(q, cache, False, False)
    assert fork_decode.TYPES == cuda.TYPES and told.keys() == options.keys()
    assert shared == cuda.plan(cuda.PARAMS[0], q, cache).shared


def test_workers_fill_the_chip() -> None:
    def most(kv_heads: int, per_sm: int, cluster: int = 1) -> int:
        return cuda.most_workers(kv_heads, {"per_sm": per_sm, "cluster": cluster}, 132)

    assert most(8, 1) == 16 and most(8, 2) == 33 and most(8, 1, 8) == 2 and most(8, 1, 2) == 8
    assert most(3, 1) == 44 and most(300, 1) == 1 and most(4, 2, 8) == 8


def test_calls_with_few_keys_use_the_whole_set() -> None:
    def chosen(most: int, batch: int = 4, **dims: int) -> dict[str, int]:
        q, cache = make_args(SPEC, Case("few", {"seq_lens": [1] * batch, **LLAMA, **dims}))[:2]
        return cuda.choose(q, cache, most)

    whole = cuda.FEW[256]
    assert whole["whole"] == 256 and whole in cuda.PARAMS and "whole" not in cuda.PARAMS[0]
    small = {"heads": 3, "kv_heads": 1, "head_size": 64}
    assert chosen(131, **small) == chosen(256, 132, **small) == chosen(1, 16) == whole
    assert chosen(257, **small) == chosen(256, 133, **small) == chosen(1, 17) == cuda.PARAMS[0]
    # A window of 128 keys in a long context begins within a unit
    assert cuda.read(131072, 127) == 143 and cuda.read(100, 127) == 100 and cuda.read(131072, -1) == 131072
    assert all(params["keys"] == cuda.FEW_KEYS for params in cuda.FEW.values())


@pytest.mark.slow
@pytest.mark.usefixtures("nvrtc")
@pytest.mark.parametrize("params", cuda.PARAMS, ids=str)
def test_every_set_compiles(params: dict[str, int]) -> None:
    others = {**layout(8, 4, 256, 16), "window_left": 99, "softcap": 50.0}
    in_fp8 = {**fp8("float8_e4m3fn"), **layout(16, 1, 128, 16), "window_left": 99}
    for dims, dtype in (
        (LLAMA, "bfloat16"), (layout(9, 3, 64, 1), "float16"), (others, "bfloat16"),
        ({**fp8(), **LLAMA}, "float8_e4m3fn"), (in_fp8, "float8_e4m3fn"),
    ):  # fmt: skip
        args = make_args(SPEC, Case("compile", {"seq_lens": [1], **dims}, dtype))
        if not cuda.fits(params, *args[:2]):
            continue
        plan = cuda.plan(params, *args[:2], "window_left" in dims, "softcap" in dims)
        told = ("--gpu-architecture=sm_90a", *plan.options)
        assert cuda_rtc.cubin(cuda.source(), told)[:4] == b"\x7fELF"


# -- selection


def refusal(dtype: str = "bfloat16", lens: tuple[int, ...] = (3,), **dims: Any) -> str | None:
    args = make_args(SPEC, Case("refused", {"seq_lens": list(lens), **LLAMA, **dims}, dtype))
    return cuda.refused(*args[:5])


def test_unsupported_calls_have_a_reason() -> None:
    assert refusal() is None and refusal("float16", head_size=64, block_size=5) is None
    assert "float32" in str(refusal("float32"))
    assert refusal("float8_e4m3fn", queries="bfloat16") is refusal("float8_e4m3fn") is None
    assert refusal("float8_e4m3fn", queries="float8_e4m3fn") is None
    assert "head size 40 is not a multiple of 16" in str(refusal("float8_e4m3fn", head_size=40))
    mixed = make_args(SPEC, Case("mixed", {"seq_lens": [3], **LLAMA}))
    assert "the caches are torch.bfloat16 and torch.float8" in str(
        cuda.refused(*mixed[:2], mixed[2].to(torch.float8_e4m3fn), *mixed[3:5])
    )
    assert "the caches are torch.bfloat16" in str(cuda.refused(mixed[0].half(), *mixed[1:5]))
    assert "float8_e4m3fn is not bfloat16" in str(cuda.refused(mixed[0].to(torch.float8_e4m3fn), *mixed[1:5]))
    assert refusal(window_left=5) is None and refusal(softcap=2.0) is None
    assert all(refusal(head_size=size) is None for size in (8, 40, 80, 96, 256))
    assert "head size 100 is not a multiple of 8" in str(refusal(head_size=100))
    assert "head size 264" in str(refusal(head_size=264))
    assert "17 query heads on one key head are over 16" in str(refusal(heads=17, kv_heads=1))
    assert "over 4096" in str(refusal(lens=(1,) * 4097, head_size=64, kv_heads=1, heads=1))
    args = make_args(SPEC, Case("refused", {"seq_lens": [3], **LLAMA}))
    for at, name in ((0, "q"), (1, "key_cache"), (2, "value_cache")):
        wrong = list(args)
        wrong[at] = torch.cat([args[at], args[at]], dim=-1)[..., 4:132]  # starts at 8 bytes
        assert f"{name} has strides" in str(cuda.refused(*wrong[:5]))
    assert "int32" in str(cuda.refused(*args[:3], args[3].long(), args[4]))
    assert "rows of the block table" in str(
        cuda.refused(*args[:4], args[4].t().contiguous().t().expand(4, -1).t())
    )
    wide = torch.empty(4096, 1 << 20, dtype=torch.int32, device="meta")
    assert "too large" in str(cuda.refused(args[0].expand(4096, -1, -1), *args[1:4], wide))


def test_provider_is_unavailable_without_hopper() -> None:
    args = make_args(SPEC, Case("cpu", {"seq_lens": [3], **LLAMA}))
    provider = next(p for p in attention_decode.providers if p.name == "cuda-split")
    assert provider.supports is not None and provider.supports(*args) is not None
    assert "not on cpu" in str(provider.unavailable("cpu"))


def test_capture_needs_a_loaded_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    args = make_args(SPEC, Case("captured", {"seq_lens": [3], **LLAMA}))
    monkeypatch.setattr(cuda, "_loaded", set())
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    assert cuda.not_loaded(*args[:2], 3) is None
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    assert "not loaded" in str(cuda.not_loaded(*args[:2], 3))
    cuda._loaded.add(cuda._kind(*args[:2], 3))
    assert cuda.not_loaded(args[0].repeat(16, 1, 1), args[1], 256) is None
    assert "not loaded" in str(cuda.not_loaded(*args[:2], 257))  # of the other set
    cuda._loaded.add(cuda._kind(*args[:2], 4096))
    assert cuda.not_loaded(args[0].repeat(256, 1, 1), args[1], 3) is None
    assert "not loaded" in str(cuda.not_loaded(args[0].repeat(257, 1, 1), args[1], 3))


def test_kernel_is_first_and_takes_tuned_parameters() -> None:
    names = [p.name for p in attention_decode.providers]
    assert names[:4] == ["cuda-split", "fa3", "triton", "triton-split"]
    entry = Entry(
        "attention_decode", {**LLAMA, "window": 0, "dtype": "bfloat16"}, {"batch": 8, "context": 4096}, "cuda-split",
        params=cuda.PARAMS[1], speedup=1.2, ci95=(1.1, 1.3), baseline="fa3", run="r",
    )  # fmt: skip
    key = attention_decode.key
    assert key is not None
    args = make_args(SPEC, Case("key", {"seq_lens": [1] * 5, "max_seqlen_k": 3000, **LLAMA}))
    found = tuned.lookup(key, [entry]).find(*key.of(*args))
    assert found is entry
    provider = next(p for p in attention_decode.providers if p.name == found.provider).bound(found.params)
    assert provider.fn.keywords == cuda.PARAMS[1] and provider.out


# -- on a GPU


def compared(dims: dict[str, Any], lens: list[int], **params: int) -> None:
    """Compare a call on the GPU with float64, and its bits with those of a second one."""
    case = Case("gpu", {"seq_lens": lens, **dims}, "float8_e4m3fn" if "queries" in dims else "bfloat16")
    args = make_args(SPEC, case, "cuda")
    if (reason := cuda.supports_cuda(*args[:-1])) is not None:  # without the slopes of ALiBi
        pytest.skip(reason)
    if params and not cuda.fits(params, *args):
        return
    got = cuda.decode_cuda(*args[:-1], **params)
    assert torch.equal(got, cuda.decode_cuda(*args[:-1], **params))
    want = oracle(SPEC, args)[0]
    if "queries" in dims:
        torch.testing.assert_close(got.double(), want.double(), atol=8e-3, rtol=8e-3)
    else:
        assert mismatch(SPEC, case, [got], [want]) is None


GPU_WINDOW, GPU_CAP = {"window_left": 300}, {"softcap": 2.0}


@pytest.mark.gpu
@pytest.mark.parametrize("params", cuda.PARAMS, ids=lambda p: "/".join(map(str, p.values())))
def test_gpu_result_matches_reference(params: dict[str, int]) -> None:
    for dims in (
        LLAMA,
        layout(9, 3, 64, 1),
        layout(16, 1, 128, 5),
        layout(10, 2, 80, 16),
        {**layout(16, 8, 256, 16), **GPU_WINDOW, **GPU_CAP},
        {**fp8(), **LLAMA},
        {**fp8("float8_e4m3fn"), **layout(16, 1, 128, 16), **GPU_WINDOW},
    ):
        compared(dims, [*EDGES, 700, 3000], **params)


@pytest.mark.gpu
@pytest.mark.parametrize(
    "dims",
    [
        LLAMA, layout(64, 8, 128, 16), layout(8, 1, 128, 16), layout(16, 1, 128, 16), layout(12, 4, 256, 16),
        layout(16, 1, 256, 16), layout(6, 2, 96, 16), {**LLAMA, **GPU_WINDOW}, {**LLAMA, **GPU_CAP},
        {**LLAMA, "window_left": 127}, *({**fp8(q), **LLAMA} for q in ("bfloat16", "float16", "float8_e4m3fn")),
        {**fp8(), **layout(16, 1, 128, 16)}, {**fp8("float8_e4m3fn"), **layout(8, 1, 64, 16), **GPU_WINDOW, **GPU_CAP},
        {**fp8(), **layout(14, 2, 256, 16)},
    ],
    ids=lambda dims: "-".join(map(str, dims.values())),
)  # fmt: skip
def test_gpu_choices_match_reference(dims: dict[str, Any]) -> None:
    """The default set of each layout, with short sequences and a long one."""
    compared({**dims, "max_seqlen_k": 131072}, [*EDGES, 700])
    compared(dims, [70000, 5])
