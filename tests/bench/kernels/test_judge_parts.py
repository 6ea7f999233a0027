"""Parts of the judge: channel, arguments as plain data, errors of outputs, times."""

from __future__ import annotations

import socket
import struct
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from fk_bench.core.rows import Status
from fk_bench.kernels.judge.clock import timing
from fk_bench.kernels.judge.clock.timing import Samples
from fk_bench.kernels.judge.correctness.errors import compare, expect
from fk_bench.kernels.judge.memory import layout
from fk_bench.kernels.judge.processes import runner
from fk_bench.kernels.judge.processes.protocol import (
    MAX_MESSAGE,
    Channel,
    ChannelClosed,
    ChannelGarbage,
    ChannelTimeout,
)
from fk_bench.kernels.judge.processes.runner_process import RunnerError, RunnerProcess
from hypothesis import given
from hypothesis import strategies as st

from fastkernels.core import registry

# The channel


@pytest.fixture
def ends() -> Iterator[tuple[Channel, socket.socket]]:
    ours, theirs = socket.socketpair()
    with ours, theirs:
        yield Channel(ours), theirs


def framed(body: bytes, size: int | None = None) -> bytes:
    return struct.pack("!I", len(body) if size is None else size) + body


@pytest.mark.parametrize(
    "raw", [framed(b"\xff\x00 no json"), framed(b"[1, 2]"), framed(b"", MAX_MESSAGE + 1)]
)
def test_garbage_is_not_a_message(ends: Any, raw: bytes) -> None:
    ends[1].sendall(raw)
    with pytest.raises(ChannelGarbage):
        ends[0].receive(1.0)


def test_answer_needs_nonce_of_its_command(ends: Any) -> None:
    channel, other = ends
    nonce = channel.command("run", 1.0, start=3)
    command = Channel(other).receive(1.0)
    assert command == {"do": "run", "nonce": nonce, "start": 3}
    Channel(other).send({"nonce": "0" * 16, "seconds": 1e-9})
    with pytest.raises(ChannelGarbage):
        channel.answer(nonce, 1.0)


def test_half_a_message_times_out_then_closes(ends: Any) -> None:
    channel, other = ends
    other.sendall(framed(b'{"a"', 100))
    with pytest.raises(ChannelTimeout):
        channel.receive(0.05)
    other.close()
    with pytest.raises(ChannelClosed):
        channel.receive(1.0)


def test_reader_that_stalls_is_a_timeout(ends: Any) -> None:
    with pytest.raises(ChannelTimeout):
        ends[0].send({"text": "x" * (8 << 20)}, 0.05)


# Arguments

scalars = st.one_of(
    st.none(), st.booleans(), st.integers(-(2**60), 2**60), st.text(), st.floats(allow_nan=False),
    st.sampled_from([torch.bfloat16, torch.int32, torch.float8_e4m3fn]),
)  # fmt: skip
nested = st.recursive(
    scalars,
    lambda inner: st.one_of(st.lists(inner), st.tuples(inner, inner), st.dictionaries(st.text(), inner)),
    max_leaves=8,
)


@given(st.lists(nested))
def test_values_other_than_tensors_round_trip(args: list[Any]) -> None:
    plan = layout.describe(args, 1 << 62).to_json()
    assert layout.bind(plan, torch.zeros(0, dtype=torch.uint8), 0, 1) == args


@given(st.integers(1, 5), st.integers(1, 7), st.integers(1, 9), st.integers(0, 2))
def test_views_keep_their_storage(a: int, b: int, c: int, slot: int) -> None:
    whole = torch.arange(2 * a * b * c, dtype=torch.float32)
    args = [whole[: a * b * c].view(a, b, c).transpose(0, 2), {"rest": whole[a * b * c :]}, torch.ones(3)]
    made = layout.describe(args, 1 << 62)
    arena = torch.zeros(made.arena_bytes(3), dtype=torch.uint8)
    view, rest, apart = layout.tensors(layout.bind(made.to_json(), arena, slot, 3))
    assert view.shape == args[0].shape and view.stride() == args[0].stride()
    assert rest.data_ptr() - view.data_ptr() == 4 * a * b * c
    before = apart.clone()
    view.copy_(args[0]), rest.copy_(args[1]["rest"])
    assert torch.equal(view, args[0]) and torch.equal(rest, args[1]["rest"]) and torch.equal(apart, before)


# Correct and wrong outputs


def judged(change: Any, op: str = "silu_and_mul", dtype: torch.dtype = torch.float32, **more: Any) -> str:
    """The problem that `compare` reports for the correct output after `change`."""
    spec = registry.get(op)
    x = torch.randn(33, 2 * 65, generator=torch.Generator().manual_seed(3)).to(dtype)
    want = expect(spec, spec.cases[0], [x], "op")
    got = want.native[0].clone()
    return compare(spec, spec.cases[0], [change(got)], want, **more).problem


def test_correct_output_passes() -> None:
    assert judged(lambda y: y) == "" and judged(lambda y: y, dtype=torch.bfloat16) == ""


def put(value: float) -> Any:
    def change(y: torch.Tensor) -> torch.Tensor:
        y[4, 5] = value
        return y

    return change


def test_overflow_follows_the_reference() -> None:
    """float16: an activation beyond its range is infinite, so is its scale, and their quotient is NaN."""
    spec = registry.get("silu_mul_quant_fp8")
    case = next(c for c in spec.cases if c.name == "group_48")
    args = spec.inputs(case, "cpu", torch.Generator().manual_seed(2996))
    args[0].mul_(64)
    want = expect(spec, case, args, "op")
    got = [t.clone() for t in want.native]
    lost = got[0].float().isnan()
    assert lost.any() and compare(spec, case, got, want).problem == ""
    got[0][tuple((~lost).nonzero()[0].tolist())] = float("nan")
    assert "1 of 1200 values wrong" in compare(spec, case, got, want).problem


@pytest.mark.parametrize("value", [float("nan"), float("inf"), 1000.0])
def test_one_wrong_value_is_wrong(value: float) -> None:
    assert "1 of 2145 values wrong" in judged(put(value))
    assert judged(put(value), unchecked=(0,)) == ""


def test_shapes_and_dtypes_are_compared() -> None:
    assert "shape" in judged(lambda y: y[1:])
    assert "float64" in judged(lambda y: y.double())


def test_lower_precision_shows_in_rms_error() -> None:
    said = judged(lambda y: y * (1 + 3e-6 * torch.randn_like(y).sign()))
    assert "relative rms error" in said
    assert judged(lambda y: y * (1 + 3e-6 * torch.randn_like(y).sign()), allowed=3e-6) == ""


# Times


def samples(
    call_s: float, spread: float, seed: int, start_s: float = 1e-4, n: int = 50, rounds: int = 15
) -> Samples:
    made, rng = Samples(n), np.random.default_rng(seed)
    for _ in range(rounds):
        for double in (False, True):
            count = n * (1 + double)
            made.add(double, start_s + count * call_s * (1 + spread * rng.standard_normal()), None)
    return made


def test_slope_excludes_start_of_batch() -> None:
    for start in (0.0, 1e-4, 1.0):
        assert samples(2e-6, 0.0, 0, start).time == pytest.approx(2e-6, rel=1e-6)
        assert samples(2e-6, 0.0, 0, start).intercept == pytest.approx(start, abs=1e-12)


def test_interval_covers_the_truth() -> None:
    held = 0
    for seed in range(60):
        value, (low, high) = timing.speedup(samples(1e-5, 0.01, seed), samples(2e-5, 0.01, 1000 + seed))
        assert low <= value <= high
        held += low <= 2.0 <= high
    assert held >= 50


def test_impossible_times_are_invalid() -> None:
    good = samples(1e-5, 0.001, 1)
    assert timing.invalid(good, samples(2e-5, 0.001, 2), 0.0) == ""
    assert "none of the work" in timing.invalid(samples(-1e-7, 0.0, 3), good, 0.0)
    assert timing.invalid(good, good, 1e-3) != ""
    apart = samples(1e-5, 0.001, 5)
    apart.events_single = [2 * s for s in apart.single]
    apart.events_double = [2 * s for s in apart.double]
    assert "events" in timing.invalid(apart, good, 0.0)


def test_overhead_of_batches_is_charged() -> None:
    base = samples(1e-5, 0.001, 2, start_s=3e-4)
    assert timing.charge(samples(1e-5, 0.001, 1, start_s=3e-4), base) == 0
    for slower_half, faster_whole in ((2e-4, 0.0), (0.0, 2e-4)):
        cheat = samples(1e-5, 0.001, 3, start_s=3e-4)
        cheat.single = [s + slower_half for s in cheat.single]
        cheat.double = [s - faster_whole for s in cheat.double]
        assert cheat.time < 0.7e-5
        charged = timing.charge(cheat, base)
        assert cheat.time + charged > 0.99e-5
        assert timing.speedup(cheat, base, charged)[1][0] < 1.01 < timing.speedup(cheat, base)[1][0]
    late = samples(1e-5, 0.001, 4, start_s=2e-3)  # an honest candidate is charged no more than its overhead
    assert late.time + timing.charge(late, base) == pytest.approx((1e-5 * 50 + 1.7e-3) / 50, rel=0.01)


def test_scattered_times_are_unsteady() -> None:
    good = samples(1e-5, 0.001, 1)
    assert timing.unsteady(good, good, good) == ""
    wild = Samples(50, [1e-3, 1e-3, 1e-3, 1e-3], [1.1e-3, 5e-3, 0.2e-3, 9e-3])
    assert "the candidate's" in timing.unsteady(wild, good, good)
    assert "the baseline's" in timing.unsteady(good, wild, good)


class Answering:
    """A child whose channel gives one answer to every command."""

    def __init__(self, answer: dict[str, Any]):
        self.channel, self.answer = socket.socketpair()[0], answer


@pytest.mark.parametrize("lost", [True, False])
def test_lost_cuda_context_is_fatal(lost: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """The runner reports by a flag whether its context survived; the text of its error does not matter."""

    def synchronize() -> None:
        if lost:
            raise RuntimeError("reworded")

    monkeypatch.setattr(runner, "_synchronize", synchronize)
    side = object.__new__(runner.RunnerState)
    side.device = "cuda"
    answer = {
        "error": "crash",
        "reason": "CUDA error: misaligned address",
        "context_lost": side.context_lost(),
    }
    process = RunnerProcess(Answering(answer), "candidate", 1.0, False)
    monkeypatch.setattr(process.channel, "command", lambda *args, **more: "nonce")
    monkeypatch.setattr(process.channel, "answer", lambda nonce, timeout: answer)
    with pytest.raises(RunnerError) as error:
        process.ask("call")
    assert error.value.fatal is lost and error.value.status is Status.CRASH
    side.device = "cpu"
    assert not side.context_lost()
