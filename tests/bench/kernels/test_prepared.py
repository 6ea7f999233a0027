"""Baselines that prepare weights, as a host does at load: neither in a timed call nor in a captured one."""

from __future__ import annotations

import contextlib
import json
import os
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
import torch.nn.functional as F
from fk_bench.kernels.judge.batches import calls
from fk_bench.kernels.judge.correctness.cases import trials
from fk_bench.kernels.judge.correctness.checks import Checks
from fk_bench.kernels.judge.memory.arena import memory_file
from fk_bench.kernels.judge.processes import messages
from fk_bench.kernels.judge.processes.runner import RunnerState
from fk_bench.kernels.judge.rows.case import CaseRun, Plan

from fastkernels.core import registry
from fastkernels.core.baseline import Baseline, Preparation, Prepared
from fastkernels.core.dispatch import OPS
from fastkernels.overrides.linear.linear_int4 import SPEC as INT4
from fastkernels.overrides.linear.linear_int4 import STEP, unpack_int4, untiled


class Reference(RunnerState):
    """A candidate that computes the reference."""

    def _call(self, args: list[Any]) -> Any:
        return lambda: self.spec.reference(*args)

    def _direct(self, call: Any, args: list[Any]) -> Any:
        return call, []


class Side:
    """A side in this process; `log` has its commands, 'packed' for each weight that is prepared, 'run' for calls."""

    trusted, alive, pid, pending = True, True, 0, True

    def __init__(self, state: RunnerState, log: list[str]):
        self.state, self.log = state, log
        assert state.gate is not None
        self.gate = state.gate
        self.todo: list[tuple[int, int]] = []

    def ask(self, do: str, fds: tuple[int, ...] = (), **arguments: Any) -> Any:
        self.begin(do, **arguments)
        return self.end()

    def arrived(self, ticket: int) -> None:
        pass

    def pass_gate(self, ticket: int, nap: float, give: Callable[[], Any] | None = None) -> float:
        if give is not None:
            give()
        self.gate.open(ticket)
        self.log.append("run")
        part, held = [x for x in self.todo if x[1] <= ticket], self.state.held
        self.todo = [x for x in self.todo if x[1] > ticket]
        self.state.do_calls([slot for slot, _ in part], [0, *(at for _, at in part)])
        self.state.held = {**held, **self.state.held}
        self.log.append("end run")
        return 1e-5

    def begin(self, do: str, **arguments: Any) -> None:
        if do == "calls":
            self.todo = list(zip(arguments["slots"], arguments["tickets"][1:], strict=True))
            self.state.held = {}
            return
        self.log.append(do)
        if (fn := self.state.made.get("packed")) is not None:  # the other side has put its own there
            OPS["linear"].set_candidate(fn)
        answer = json.dumps({**getattr(self.state, f"do_{do}")(**arguments), "nonce": ""})
        self.answer = messages.answer(do, "", answer.encode())
        self.log.append(f"end {do}")

    def end(self) -> Any:
        return self.answer

    def stop(self) -> None:
        pass

    resume = stop


@pytest.fixture
def files() -> Iterator[tuple[int, int]]:
    found, grad, threads = (memory_file(), memory_file()), torch.is_grad_enabled(), torch.get_num_threads()
    yield found
    torch.set_grad_enabled(grad)  # which a process of the judge turns off
    torch.set_num_threads(threads)
    for fd in found:
        os.close(fd)
    OPS["linear"].set_candidate(None)


@pytest.mark.parametrize("identity", [False, True])
def test_weights_are_prepared_outside_timed_calls(
    files: tuple[int, int], monkeypatch: pytest.MonkeyPatch, identity: bool
) -> None:
    log, made, rounds = list[str](), list[int](), 3

    def pack(x: torch.Tensor, weight: torch.Tensor, *_: Any) -> dict[str, torch.Tensor]:
        log.append("packed")
        made.append(weight.data_ptr())
        return {"turned": weight.t().contiguous()}

    def linear(x: torch.Tensor, weight: Any, bias: Any = None, *, prepared: list[Any]) -> torch.Tensor:
        return F.linear(x, prepared[0]["turned"].t(), bias)

    packed = Baseline("packed", "host", lambda: linear, devices=("cpu",), prepares=(Preparation((1,), pack),))
    monkeypatch.setattr(registry, "baselines", lambda name: [packed])
    monkeypatch.setattr(calls.priority, "raised", lambda pids: contextlib.nullcontext("on"))
    apart: list[float] = []
    distances = Checks.distances
    monkeypatch.setattr(
        Checks, "distances", staticmethod(lambda *args: (apart.append(float((d := distances(*args)).max())), d)[1])
    )  # fmt: skip
    spec = registry.get("linear")
    trial = next(t for t in trials(spec, ("random",), "cpu", ("odd_63",)) if t.timed)
    kinds = RunnerState if identity else Reference, RunnerState
    states = [
        kind(cast(Any, None), {"arena": fd, "gate": memory_file()})
        for kind, fd in zip(kinds, files, strict=True)
    ]
    for state in states:
        state.do_load("linear", "cpu", {}, None if type(state) is Reference else "production", None, 1)
    sides = Side(states[0], []), Side(states[1], log)
    plan = Plan("cpu", rounds, rounds, 1.0, 1e-4, 4, 1 << 30)
    run = CaseRun(spec, trial, cast(Any, sides), files, "op", plan, lambda case: 0.0, identity)
    seen = run.run(["packed"], compiled=False, timed=True)
    assert seen.timed is not None and not seen.wrong and seen.chosen.name == "packed" and seen.chosen.prepares
    running = False
    for entry in log:
        assert not (running and entry == "packed")
        running = entry == "run" or (running and entry != "end run")
    assert log.count("run") > 4 * rounds and log.count("prepare") >= 3
    slots = plan.max_calls
    last = log.index("prepare", len(log) - log[::-1].index("case"))  # the first of the timed batches
    assert (
        log[last + 1 : log.index("end prepare", last)] == ["packed"] * slots
        and len(set(made[-slots:])) == slots
    )
    assert apart and max(apart) < 0.05  # where outputs are compared, the weights are those of the batch
    assert not states[1].prepared[0]._kept  # freed with the case
    assert identity or (not states[0].prepared and "prepare" not in sides[0].log)


@dataclass
class Packed:
    """A library's own type, as of Triton's kernels for experts."""

    inner: list[torch.Tensor]


def test_prepared_values_keep_their_place() -> None:
    calls = list[float]()

    def make(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> Packed:
        calls.append(float(weight[0]))
        return Packed([2 * weight])

    def fn(x: torch.Tensor, *_: Any, prepared: list[Any]) -> torch.Tensor:
        (packed, nothing) = prepared
        assert nothing is None
        places.append(packed.inner[0].data_ptr())
        return x * packed.inner[0]

    places = list[int]()
    prepared = Prepared(fn, (Preparation((1,), make), Preparation((2,), lambda *args: None)))
    xs, weight = [torch.ones(1), torch.full((1,), 3.0)], torch.ones(1)
    assert [float(prepared(x, weight)) for x in xs] == [2, 6] and calls == [1]
    weight.fill_(5)
    assert float(prepared(xs[0], weight)) == 2  # until they are prepared again
    with prepared.renewed():  # once, though two calls share the weight
        assert [float(prepared(x, weight)) for x in xs] == [10, 30] and calls == [1, 5]
    assert float(prepared(xs[0], weight)) == 10 and len(set(places)) == 1
    assert float(prepared(xs[0], torch.ones(1))) == 2  # other weights
    prepared.clear()
    weight.fill_(4)
    assert float(prepared(xs[1], weight)) == 24


def test_marlin_call_only_multiplies(monkeypatch: pytest.MonkeyPatch) -> None:
    """With stand-ins for vLLM's functions: all that copies from the CPU or repacks runs in the preparation."""
    log = list[str]()

    def apply(
        input,
        weight,
        weight_scale,
        weight_zp,
        g_idx,
        g_idx_sort_indices,
        workspace,
        wtype,
        bias=None,
        **sizes,
    ):  # type: ignore[no-untyped-def]
        log.append("apply")
        return input, weight, weight_scale, bias

    def step(name: str) -> Any:
        return lambda t, *_, **__: (
            log.append(name),
            torch.as_tensor(t if name != "workspace" else 0).clone(),
        )[1]

    utils = "vllm.model_executor.layers.quantization.utils"
    marlin = SimpleNamespace(
        apply_gptq_marlin_linear=apply, marlin_permute_bias=step("bias"), marlin_permute_scales=step("scales"),
        marlin_zero_points=step("zeros"), marlin_make_workspace_new=step("workspace"),
    )  # fmt: skip
    types = SimpleNamespace(scalar_types=SimpleNamespace(uint4=4, uint4b8=8))
    ops = SimpleNamespace(gptq_marlin_repack=step("repack"))
    for name, module in (
        ("vllm", SimpleNamespace(_custom_ops=ops)), (utils, SimpleNamespace(marlin_utils=marlin)),
        ("vllm.scalar_type", types),
    ):  # fmt: skip
        monkeypatch.setitem(sys.modules, name, cast(Any, module))
    (baseline,) = (b for b in registry.baselines("linear_int4") if b.name == "marlin")
    fn = baseline.ready()
    assert isinstance(fn, Prepared)
    case = next(c for c in INT4.cases if c.name == "tokens_63")
    x, *rest = INT4.inputs(case, "cpu", torch.Generator().manual_seed(0))
    with fn.renewed():
        fn(x, *rest)
    assert set(log) == {"repack", "scales", "workspace", "bias", "apply"} and log[-1] == "apply"
    log.clear()
    given, words, _, bias = fn(x, *rest)
    assert log == ["apply"] and given is x and torch.equal(bias, rest[-1]) and bias is not rest[-1]
    rows = words.view(-1, 1, words.shape[1]) >> 4 * torch.arange(8)[:, None] & 15
    assert torch.equal(
        rows.flatten(0, 1).t(), unpack_int4(untiled(rest[0], STEP)).int()
    )  # GPTQ's order: eight rows of K a word
