"""The ops of the family `collective` over real processes: providers, shapes, bits, compiled code, kernels, a soak."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import os
import random
import re
import signal
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from support import ranks
from support.kernels import ahead
from support.kernels.declarations import contradictions
from support.kernels.op_cases import mismatch

from fastkernels.core import dispatch, parallel, registry
from fastkernels.core.communicator import CollectiveError, NotInAllRanks, Symmetric
from fastkernels.core.spec import Case, OpSpec
from fastkernels.overrides.expert_parallel import measure

NAMES = registry.collective_names()
SCRIPTS = Path(__file__).parents[2] / "support" / "kernels"
EXACT = ("all_gather", "all_to_all", "ep_dispatch")
SMALL = 1 << 18  # bytes of a case


def arguments(spec: OpSpec, case: Case, size: int, seed: int = 0) -> list[list[Any]]:
    """The arguments of each rank; replicated ones are equal."""
    case = dataclasses.replace(case, dims={**case.dims, spec.ranks: size})
    every = [
        spec.inputs(case, "cpu", torch.Generator().manual_seed(100 * seed + rank)) for rank in range(size)
    ]
    for name in spec.replicated:
        i = spec.position(name)
        for args in every[1:]:
            args[i] = every[0][i] if every[0][i] is None else every[0][i].clone()
    return every


def wanted(spec: OpSpec, every: list[list[Any]], rank: int) -> list[torch.Tensor]:
    """The reference's results for a rank in float64: outputs, then written arguments."""
    lists = [
        [t.to(torch.float64, copy=True) for t in values] if isinstance(values[0], torch.Tensor) else values[0]
        for values in zip(*every, strict=True)
    ]
    found = spec.reference(*lists)[rank]
    return [t for t in (found if isinstance(found, tuple) else (found,)) if t is not None]


def written(spec: OpSpec, out: Any, args: list[Any]) -> list[torch.Tensor]:
    """The results of a call: outputs, then written arguments."""
    outs = out if isinstance(out, (tuple, list)) else (out,)
    return [*outs, *(args[i] for i in spec.declaration.mutated if args[i] is not None)]


def small(spec: OpSpec, size: int = 2) -> list[Case]:
    """The cases that a CPU computes quickly and that so many ranks can have."""

    def fits(case: Case) -> bool:
        sizes = spec.declaration.sizes({**case.dims, spec.ranks: size}, case.dtype)
        return all(rule(sizes) for rule in spec.declaration.rules)

    return [c for c in spec.cases if spec.bytes_moved(c) <= SMALL and fits(c)]


def _values(rank: int, size: int) -> int:
    """All providers that run here, and the op itself, against the reference. Returns the number of calls."""
    count = 0
    for name in NAMES:
        spec = registry.get(name)
        for case in small(spec, size):
            every = arguments(spec, case, size)
            want = wanted(spec, every, rank)
            here = [p for p in spec.op.providers if p.name != "triton" and p.unavailable("cpu") is None]
            fns = [p.fn for p in here if p.supports is None or p.supports(*every[rank]) is None]
            for fn in (spec.op, *fns):
                args = [a.clone() if isinstance(a, torch.Tensor) else a for a in every[rank]]
                got = written(spec, fn(*args), args)
                assert (problem := mismatch(spec, case, got, want)) is None, (name, case.name, fn, problem)
                count += 1
            if case.name == "odd_1128":
                args = [strided(a) if isinstance(a, torch.Tensor) else a for a in every[rank]]
                got = written(spec, spec.op(*args), args)
                assert (problem := mismatch(spec, case, got, want)) is None, (name, "strided", problem)
    return count


def strided(t: torch.Tensor) -> torch.Tensor:
    """Its values with a gap behind each."""
    return torch.stack([t, t], -1)[..., 0]


@pytest.mark.parametrize("size", [2, *(pytest.param(n, marks=pytest.mark.slow) for n in (3, 5))])
def test_values_over_ranks(size: int) -> None:
    counts = ranks.run(size, _values, size)
    assert len(set(counts)) == 1 and counts[0] > (15 if size < 5 else 8) * len(NAMES)


def _bits(rank: int) -> None:
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        for n in (1, 63, 4096):
            x = torch.randn(n, generator=torch.Generator().manual_seed(rank)).to(dtype)
            gloo = x.clone()
            dist.all_reduce(gloo)
            assert torch.equal(parallel.all_reduce(x.clone()), gloo), (dtype, n)


def _strided_and_large(rank: int) -> dict[str, int]:
    reduce = registry.get("all_reduce").op
    x = torch.arange(12.0).view(3, 4).t() * (rank + 1)
    assert torch.equal(reduce(x), torch.arange(12.0).view(3, 4).t() * 3)
    room = parallel.communicator().room
    assert torch.equal(reduce(torch.ones(room // 4 + 1)), torch.full((room // 4 + 1,), 2.0))  # gloo's
    assert reduce(torch.ones(0, 5)).shape == (0, 5)
    with pytest.raises(ValueError, match="rows 3 cannot be divided over 2 ranks"):
        registry.get("reduce_scatter").op(torch.ones(3, 2))
    return dict(reduce.fallbacks)


def _compiled(rank: int) -> None:
    for name in (
        "all_reduce", "all_reduce_rms_norm", "all_reduce_rms_norm_quant_fp8", "ep_dispatch", "ep_dispatch_fp8",
        "linear_all_reduce",
    ):  # fmt: skip
        spec = registry.get(name)
        case = next(c for c in spec.cases if c.name == "odd_257")
        (args, want) = arguments(spec, case, 2)[rank], wanted(spec, arguments(spec, case, 2), rank)
        fn = torch.compile(lambda *a: spec.op(*a), fullgraph=True, backend="aot_eager")  # noqa: B023
        got = written(spec, fn(*args), args)
        assert mismatch(spec, case, got, want) is None, name


def _all(rank: int) -> dict[str, int]:
    _bits(rank)
    _compiled(rank)
    return _strided_and_large(rank)


def test_bits_of_gloo_strides_sizes_and_compiled_code() -> None:
    for fallbacks in ranks.run(2, _all):
        assert len(fallbacks) == 1 and "more than the" in next(iter(fallbacks))


@pytest.mark.parametrize("name", NAMES)
def test_declaration_and_single_rank(name: str) -> None:
    spec = registry.get(name)
    case = small(spec)[-1]
    (args,) = arguments(spec, case, 1)
    want = wanted(spec, [args], 0)
    got = written(spec, spec.op(*args), args)
    assert mismatch(spec, case, got, want) is None
    taken = {a.data_ptr() for a in args if isinstance(a, torch.Tensor)}
    assert not taken & {t.data_ptr() for t in got[: len(spec.outputs)]}
    assert spec.ranks in spec.axes and spec.traffic(spec.cases[0]) > 0
    assert len(small(spec)) >= 5 and len({c.name for c in spec.cases}) == len(spec.cases)
    assert set(spec.replicated) <= {a.name for a in spec.arguments}
    torch.library.opcheck(spec.op.overload, tuple(arguments(spec, case, 1)[0]))


def test_kernels_without_peer_access_say_so(monkeypatch: pytest.MonkeyPatch) -> None:
    """The reason is found once, and the next provider runs."""
    asked = []

    def refuse(*_: Any) -> None:
        asked.append(1)
        raise NotInAllRanks("GPU 0 has no peer access to GPU 1")

    comm = parallel.join("apart", 0, 1)
    comm.size, comm.device = 2, torch.device("cuda")
    monkeypatch.setattr(Symmetric, "rendezvous", refuse)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    x, ids = torch.ones(2, 8), torch.zeros(2, 1, dtype=torch.int32)
    for name, args in (
        ("all_reduce", (x,)), ("all_gather", (x,)), ("ep_dispatch", (x, ids, x[:, :1], 4)),
        ("ep_combine", (x, ids[:, 0])),
    ):  # fmt: skip
        providers = registry.get(name).op.providers
        (kernel,) = (p for p in providers if p.name == "triton")
        assert kernel.supports(*args, "apart") == "no symmetric memory: GPU 0 has no peer access to GPU 1"
        assert any(p.supports is None or p.supports(*args, "apart") is None for p in providers)
    assert asked == [1]


def _bad_experts(rank: int) -> list[str]:
    """Errors of calls that do not fit together; the group can be used afterwards, also for no tokens."""
    dispatch, quantized = (registry.get(n).op for n in ("ep_dispatch", "ep_dispatch_fp8"))
    x, ids, weights = torch.ones(2, 8), torch.zeros(2, 1, dtype=torch.int32), torch.ones(2, 1)
    said = []
    for call in (
        lambda: dispatch(x[rank:], ids[rank:], weights[rank:], 4),
        lambda: dispatch(x, ids, weights, 5),
        lambda: quantized(x, ids, weights, 4, 3),
        lambda: registry.get("linear_all_reduce").op(x[: 1 + rank], x),
        lambda: dispatch(x.to((torch.float16, torch.bfloat16)[rank]), ids, weights, 4),
        lambda: dispatch(x, ids, weights, 4 + 4 * rank),
        lambda: dispatch(x, ids[:1], weights, 4),
        lambda: dispatch(x, weights, weights, 4),
        lambda: registry.get("ep_combine").op(x, ids[:1, 0]),
        lambda: registry.get("ep_combine_batched").op(x[None], x, ids),
    ):
        with pytest.raises((CollectiveError, ValueError)) as error:
            call()
        said.append(str(error.value))
    for name, more in (("", ()), ("_fp8", (4,)), ("_batched", ()), ("_batched_fp8", (4,))):
        op = registry.get(f"ep_dispatch{name}").op
        assert all(t.numel() <= 2 for t in op(x[:0], ids[:0], weights[:0], 4, *more))
    rows, _, _, source = dispatch(x, ids, weights, 4)
    assert source.tolist() == ([0, 1, 2, 3] if rank == 0 else [-1] * 4) and rows.sum() == 32 * (1 - rank)
    return said


def test_calls_of_experts_that_differ_fail_in_all_ranks() -> None:
    mine, theirs = ranks.run(2, _bad_experts)
    assert mine == theirs and "rank 0: ep_dispatch" in mine[0] and "rank 1: ep_dispatch" in mine[0]
    assert "experts 5 cannot be divided over 2 ranks" in mine[1] and "multiple of group_size 3" in mine[2]
    assert "float32 [1, 2]" in mine[3] and "float32 [2, 2]" in mine[3]
    assert "rank 0: ep_dispatch to 4 experts(float16 [2, 8]" in mine[4] and "bfloat16" in mine[4]
    assert "ep_dispatch to 4 experts" in mine[5] and "ep_dispatch to 8 experts" in mine[5]
    assert "topk_weights [T, K], got (2, 8), (1, 1), (2, 1)" in mine[6] and "integer topk_ids" in mine[7]
    assert "sources [ranks * T] in int32, got (2, 8) and (1,)" in mine[8] and "(1, 2, 8), (2, 8)" in mine[9]


def _struck(rank: int, name: str) -> str:
    """The error of a rank while rank 1 is killed inside a call: the others have seen that it came."""
    spec, comm = registry.get(name), parallel.communicator()
    args = arguments(spec, small(spec, 3)[0], 3)[rank]
    if rank == 1:
        arrive = comm.arrive

        def strike(*given: Any) -> None:
            arrive(*given)
            os.kill(os.getpid(), signal.SIGKILL)

        comm.arrive = strike  # type: ignore[method-assign]
    with pytest.raises(CollectiveError) as error:
        for _ in range(3):  # in shared memory it has already passed its part of the first one
            spec.op(*(a.clone() if isinstance(a, torch.Tensor) else a for a in args))
    assert error.value.fatal and comm.meeting is not None
    until = time.monotonic() + 10  # its connections break a little before its process has ended
    while comm.meeting.alive(1) and time.monotonic() < until:
        time.sleep(0.01)
    assert not comm.meeting.alive(1)  # another rank may have raised, too, and ended
    return str(error.value)


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
def test_rank_that_is_killed_inside_a_call_is_named(name: str) -> None:
    first, killed, last = ranks.run(3, _struck, name)
    assert killed is None
    for said in (first, last):
        assert "the process of rank 1 has ended" in said or "has left the group" in said
    assert "the process of rank 1 has ended" in first + last


def test_kernels_of_experts_refuse_with_a_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    from fastkernels.overrides.expert_parallel import ep_combine, ep_dispatch, ep_dispatch_fp8

    comm = parallel.join("refusing", 0, 1)
    comm.size = 2
    comm.symmetric = Symmetric([0, 0], 0, Symmetric.UNIT, torch.device("cpu"), 60.0)

    def said(tokens: int, hidden: int, k: int = 8, ids: Any = torch.int32, x: Any = torch.bfloat16) -> str:
        rows, given = torch.empty(tokens, hidden, dtype=x), torch.empty(tokens, k, dtype=ids)
        return str(ep_dispatch.not_launched(rows, given, torch.empty(tokens, k), "refusing"))

    assert said(128, 2048) == said(0, 2048) == said(64, 7168) == "None"
    assert "more than a small message" in said(1024, 2048) and "more than 8192 ids" in said(2048, 8)
    assert "33 experts of a token: at most 32" in said(2, 8, 33)
    assert "multiple of 4" in said(1, 3) and "at most 16384" in said(1, 16384)
    assert "int32" in said(1, 8, ids=torch.int64) and "not in torch.int8" in said(1, 8, x=torch.int8)
    (measured,) = (p for p in ep_dispatch.ep_dispatch.providers if p.name == "measured")
    call = torch.empty(2, 8), torch.zeros(2, 8, dtype=torch.int32), torch.empty(2, 8), 8, "refusing"
    assert "not measured to be faster" in measured.supports(*call)
    comm.faster["ep_dispatch"] = 64
    assert measured.supports(*call) is None
    comm.faster["ep_dispatch"] = 63
    assert "not measured to be faster" in measured.supports(*call)
    of_each = {"ep_dispatch_fp8": 2 * 128, "ep_combine": 2 * 2 * 128}  # bytes of two tokens, as they are sent
    x, sent = torch.empty(2, 128, dtype=torch.bfloat16), torch.empty(4, 128, dtype=torch.bfloat16)
    arguments = {
        "ep_dispatch_fp8": (x, *call[1:4], 128, "refusing"),
        "ep_combine": (sent, torch.arange(4, dtype=torch.int32), "refusing"),
    }
    monkeypatch.setattr(ep_dispatch_fp8, "fp8_refusal", lambda device: None)
    for op, nbytes in of_each.items():
        (measured,) = (p for p in registry.get(op).op.providers if p.name == "measured")
        for limit in (nbytes - 1, nbytes):
            comm.faster |= {"ep_dispatch": 1 << 20, op: limit}  # which is that of another payload
            assert (measured.supports(*arguments[op]) is None) is (limit == nbytes)
    sources = torch.zeros(8192, dtype=torch.int32)
    for rows, width, what in (
        (8192, 8, "at most 4096"),
        (2048, 2048, "small message"),
        (2, 9000, "at most 8192"),
    ):
        x = torch.empty(rows, width, dtype=torch.bfloat16)
        assert what in str(ep_combine._unsupported(x, sources[:rows], "refusing")), (rows, width)
    assert (
        ep_combine._unsupported(x[:, :64], sources[:2].long(), "refusing")
        == "sources are int32, not torch.int64"
    )


def interpreted(size: int, turns: int) -> None:
    """Its ranks wait for each other without an end: all are killed with the script."""
    env = {**os.environ, "TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"}
    command = [sys.executable, str(SCRIPTS / "interpreted_ranks.py"), str(size), str(turns)]
    process = subprocess.Popen(
        command, env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, start_new_session=True
    )
    try:
        output, _ = process.communicate(timeout=400)
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
    assert process.returncode == 0, output


def test_interpreted_kernels_over_two_ranks() -> None:
    interpreted(2, 1)


@pytest.mark.slow
@pytest.mark.parametrize("size", [2, 3])
def test_interpreted_kernels_over_ranks(size: int) -> None:
    interpreted(size, 2)


@pytest.mark.slow
@pytest.mark.parametrize(
    "name", [n for n in NAMES if any(p.name == "triton" for p in registry.get(n).op.providers)]
)
def test_kernels_compile_for_hopper(name: str) -> None:
    spec = registry.get(name)
    (triton,) = [p for p in spec.op.providers if p.name == "triton"]
    comm = parallel.join("ahead", 0, 1)
    comm.size = 2
    comm.symmetric = Symmetric([0, 0], 0, Symmetric.UNIT * 256, torch.device("cpu"), 600.0)
    case = next(c for c in spec.cases if "model" in c.tags)  # whose rows are a multiple of 16 bytes
    args = arguments(spec, case, 2)[0]
    args[spec.position("group")] = "ahead"
    assert triton.supports is not None and triton.supports(*args) is None
    for params in triton.params or ({},):
        with dispatch.only("triton"):  # also the exchange of a batched layout
            found = ahead.launched(lambda: triton.fn(*args, **params))  # noqa: B023
        assert found
        for launch in found:
            ptx = ahead.compile_for(launch, 90).asm["ptx"]
            assert re.search(r"ld\.(volatile\.)?global\.v[24]", ptx) and re.search(
                r"st\.global\.(wt\.)?v[24]", ptx
            )
            assert not re.search(r"(ld|st)\.(volatile\.)?global\.b16", ptx), "an access of one number"


def test_rows_in_float8_read_no_register_without_a_value() -> None:
    """With such registers, ptxas took bytes of wide rows from elsewhere. Each is in the code once."""
    spec = registry.get("ep_dispatch_fp8")
    (triton,) = [p for p in spec.op.providers if p.name == "triton"]
    comm = parallel.join("wide", 0, 1)
    comm.size = 2
    comm.symmetric = Symmetric([0, 0], 0, Symmetric.UNIT * 256, torch.device("cpu"), 600.0)
    case = next(c for c in spec.cases if c.name == "deepseek_decode")
    args = arguments(spec, case, 2)[0]
    args[spec.position("group")] = "wide"
    (launch,) = ahead.launched(lambda: triton.fn(*args))
    ptx = ahead.compile_for(launch, 90).asm["ptx"]
    halves = Counter(re.findall(r"%rs\d+", ptx))
    assert "cvt.rn.satfinite.e4m3x2" in ptx and [name for name, n in halves.items() if n == 1] == []


def test_wrong_values_are_placed_for_any_rank_of_tensor() -> None:
    from support.kernels import gpu_ranks

    limit = SimpleNamespace(atol=0.1, rtol=0.0)
    for shape, at, text in (
        ((5,), (3,), "rows [3]"),
        ((2, 3, 8), (1, 2, 5), "rows [1]; 1 columns from 21 to 21"),
    ):
        want = torch.zeros(shape)
        got = want.clone()
        got[at] = 1.0
        assert text in gpu_ranks.places(got, want, limit)
    assert gpu_ranks.places(torch.zeros(2), torch.zeros(3), limit) == "[2] for [3]"


@pytest.mark.gpu
def test_kernels_over_streams_of_one_gpu() -> None:
    from support.kernels import gpu_ranks

    assert gpu_ranks.eager(2) > 60 and gpu_ranks.graphs(2) > 20


def _over_gpus(rank: int, size: int) -> int:
    """The providers of GPUs against the reference, eager and in a graph. Returns the number of calls."""
    count = 0
    for name in NAMES:
        spec = registry.get(name)
        for case in [c for c in small(spec, size) if c.name != "one"]:
            every = arguments(spec, case, size)
            want = wanted(spec, every, rank)
            args = [a.cuda() if isinstance(a, torch.Tensor) else a for a in every[rank]]
            for provider in spec.op.providers:
                if provider.unavailable("cuda") or (provider.supports and provider.supports(*args)):
                    continue
                mine = [a.clone() if isinstance(a, torch.Tensor) else a for a in args]
                got = [t.cpu() for t in written(spec, provider.fn(*mine), mine)]
                assert (problem := mismatch(spec, case, got, want)) is None, (
                    name,
                    case.name,
                    provider,
                    problem,
                )
                count += 1
                if spec.declaration.mutated or provider.name != "triton":
                    continue
                graph = torch.cuda.CUDAGraph()
                with torch.cuda.graph(graph):
                    outs = [provider.fn(*args) for _ in range(3)][-1]
                for _ in range(3):
                    graph.replay()
                got = [t.cpu() for t in written(spec, outs, args)]
                assert (problem := mismatch(spec, case, got, want)) is None, (
                    name,
                    case.name,
                    "graph",
                    problem,
                )
    comm = parallel.communicator()
    assert comm.symmetric is not None, comm.without
    comm.symmetric.check()
    return count


@pytest.mark.gpu
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_values_over_two_gpus() -> None:
    counts = ranks.run(2, _over_gpus, 2, device="cuda", timeout=300)
    assert len(set(counts)) == 1 and counts[0] > 10 * len(NAMES)


def _soak(rank: int, size: int, calls: int, seed: int) -> int:
    """Random ops of random sizes, with each rank late by chance; all ranks draw the same calls."""
    common, own = random.Random(seed), random.Random(seed + 1 + rank)
    for call in range(calls):
        spec = registry.get(common.choice(NAMES))
        case = common.choice(small(spec, size))
        # Parts, or sums of two, that are rounded to 16 bits before the last addition can exceed its tolerance.
        if spec.name.startswith("linear_") or (size > 2 and "reduce" in spec.name):
            case = dataclasses.replace(case, dtype="float32")
        sizes = spec.declaration.sizes({**case.dims, spec.ranks: size}, case.dtype)
        block = sizes.get("block", 1)  # which divides hidden
        hidden = block * max(1, common.randint(1, 700) // block)
        drawn = {"tokens": common.randint(1, 9), "hidden": hidden, "n": common.randint(1, 99)}
        dims = {**case.dims, **{k: v for k, v in drawn.items() if k in case.dims}}
        every = arguments(spec, dataclasses.replace(case, dims=dims), size, call)
        if own.random() < 0.02:
            time.sleep(own.random() * 0.02)
        args = [a.clone() if isinstance(a, torch.Tensor) else a for a in every[rank]]
        got = written(spec, spec.op(*args), args)
        lists = [
            [t.clone() for t in values] if isinstance(values[0], torch.Tensor) else values[0]
            for values in zip(*every, strict=True)
        ]
        found = spec.reference(*lists)[rank]
        want = [t for t in (found if isinstance(found, tuple) else (found,)) if t is not None]
        exact = spec.name in EXACT or (spec.level == 1 and size == 2)
        for a, b in zip(got, want, strict=True):
            if exact:
                assert torch.equal(a, b), (call, spec.name, dims)
        problem = mismatch(spec, case, got, wanted(spec, every, rank))
        assert problem is None, (call, spec.name, dims, problem)
    return calls


@pytest.mark.timeout(900)
@pytest.mark.parametrize(
    ("size", "calls"),
    [(2, 60), *(pytest.param(*each, marks=pytest.mark.slow) for each in ((2, 10_000), (3, 2_000)))],
)
def test_soak(size: int, calls: int) -> None:
    """No hang and no wrong bit. A sum of two ranks has one order; of three, gloo's tolerance."""
    seed = random.SystemRandom().randrange(1 << 30)
    assert ranks.run(size, _soak, size, calls, seed, timeout=850) == [calls] * size, seed


@pytest.mark.parametrize("op", measure.EXPERT_OPS)
def test_measured_sizes_are_those_of_the_payload(op: str) -> None:
    comm = parallel.join("sizes", 0, 1)
    comm.size = 2
    for size in measure.EXPERT_SIZES:
        first = measure.expert_arguments(op, size, comm)[0]
        ranks_of = comm.size if op == "ep_combine" else 1  # it gets the rows of all
        assert size * ranks_of == first.numel() * (1 if op == "ep_dispatch_fp8" else first.element_size())


def test_declarations_have_the_axes_of_their_references() -> None:
    """Of one rank: `contradictions` compares shapes and dtypes, and knows no lists of ranks."""
    for name in NAMES:
        spec = registry.get(name)

        @functools.wraps(spec.reference)
        def alone(*args: Any) -> Any:
            return spec.reference(*[[a] if isinstance(a, torch.Tensor) else a for a in args])[0]  # noqa: B023

        cases = tuple(dataclasses.replace(c, dims={**c.dims, spec.ranks: 1}) for c in small(spec))
        one = dataclasses.replace(spec, reference=alone, cases=cases)
        assert contradictions(one) == []
