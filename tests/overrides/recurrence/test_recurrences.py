"""Recurrent ops over packed sequences: splits, slots, padding, dtypes of states, and the kernels that run in chunks."""

from __future__ import annotations

import dataclasses
import json
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support.kernels import warm
from support.kernels.ahead import compile_for, launched, usage
from support.kernels.op_cases import make_args, oracle
from support.kernels.recurrence_runs import BY_CHANNEL, OPS, SEGMENTED, STRENGTHS, named, parts
from torch.utils._python_dispatch import TorchDispatchMode

from fastkernels.core import registry
from fastkernels.core.spec import OpSpec
from fastkernels.overrides.kit.arguments import UnsupportedArgument
from fastkernels.overrides.recurrence import sglang
from fastkernels.overrides.recurrence.kernels import chunks, linear_chunks

INTERPRETED = """
import sys
sys.path.insert(0, sys.argv[1])
from support.kernels.recurrence_runs import main
main(*sys.argv[2:])
"""
PACKED = (*OPS, "causal_conv1d", "mamba_scan")
TAIL = ("state", "cu_seqlens", "slots", "fresh")
FIXED = settings(max_examples=12, deadline=None, derandomize=True, database=None)
lengths = st.lists(st.integers(0, 9), min_size=1, max_size=5)


def made(name: str, lens: list[int], **more: Any) -> tuple[OpSpec, dict[str, Any]]:
    """An op and its arguments by name, in float32, for sequences of these lengths; odd ones begin at zero."""
    spec = registry.get(name)
    case = next(c for c in spec.cases if c.dtype == "float32" and len(c.dims["seq_lens"]) > 1)
    dims = {**case.dims, "seq_lens": tuple(lens), "new": 0, "padding": 0, **more}
    dims.pop("rows", None)
    found = named(spec, make_args(spec, dataclasses.replace(case, dims=dims)))
    found["fresh"] = torch.arange(len(lens)) % 2 == 1
    return spec, found


def per_token(spec: OpSpec) -> set[str]:
    return {
        a.name for a in spec.arguments if "tokens" in str(getattr(a, "axes", "")) and a.name != "cu_seqlens"
    }


def run(spec: OpSpec, args: dict[str, Any]) -> torch.Tensor:
    return spec.op(*args.values())


def rows_at(spec: OpSpec, args: dict[str, Any], rows: torch.Tensor, **tail: Any) -> dict[str, Any]:
    """The same arguments for some of the tokens."""
    tokens = per_token(spec)
    cut = {k: x[rows] if k in tokens and x is not None else x for k, x in args.items()}
    return {**cut, **tail}


@pytest.mark.parametrize("name", PACKED)
@FIXED
@given(lens=lengths, data=st.data())
def test_split_sequences_give_the_same_results(name: str, lens: list[int], data: st.DataObject) -> None:
    spec, args = made(name, lens)
    cuts = torch.tensor([data.draw(st.integers(0, n)) for n in lens])
    starts = args["cu_seqlens"].long()
    whole = {**args, "state": args["state"].clone()}
    out = run(spec, whole)
    found = torch.empty_like(out)
    for part in (0, 1):
        begin, end = ((starts[:-1], starts[:-1] + cuts), (starts[:-1] + cuts, starts[1:]))[part]
        rows = torch.cat([torch.arange(b, e) for b, e in zip(begin, end, strict=True)])
        steps = torch.cat([torch.zeros(1), (end - begin).cumsum(0)]).to(torch.int32)
        fresh = args["fresh"] if part == 0 else torch.zeros_like(args["fresh"])
        found[rows] = run(spec, rows_at(spec, args, rows, cu_seqlens=steps, fresh=fresh))
    torch.testing.assert_close(found, out)
    torch.testing.assert_close(args["state"], whole["state"])


@pytest.mark.parametrize("name", PACKED)
@FIXED
@given(lens=lengths, data=st.data())
def test_order_and_slots_do_not_change_results(name: str, lens: list[int], data: st.DataObject) -> None:
    spec, args = made(name, lens)
    order = torch.tensor(data.draw(st.permutations(range(len(lens)))))
    moved = torch.cat(
        [
            torch.zeros(1, dtype=torch.long),
            1 + torch.tensor(data.draw(st.permutations(range(len(args["state"]) - 1)))),
        ]
    )
    state = torch.empty_like(args["state"])
    state[moved] = args["state"]
    starts = args["cu_seqlens"].long()
    rows = torch.cat([torch.arange(starts[i], starts[i + 1]) for i in order])
    steps = torch.cat([torch.zeros(1), starts.diff()[order].cumsum(0)]).to(torch.int32)
    slots = moved[args["slots"].long()][order].to(torch.int32)
    out = run(
        spec,
        rows_at(spec, args, rows, state=state, cu_seqlens=steps, slots=slots, fresh=args["fresh"][order]),
    )
    torch.testing.assert_close(out, run(spec, args)[rows])
    torch.testing.assert_close(state[moved], args["state"])


class WritesOf(TorchDispatchMode):
    """Records the ops that write all rows of a tensor."""

    def __init__(self, state: torch.Tensor) -> None:
        super().__init__()
        self.state, self.found = state, list[str]()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        written = [
            args[i]
            for i, a in enumerate(func._schema.arguments[: len(args)])
            if a.alias_info is not None and a.alias_info.is_write
        ]
        whole = self.state.data_ptr(), self.state.numel()
        if any((t.data_ptr(), t.numel()) == whole for t in written) and "index" not in str(func):
            self.found.append(str(func))
        return func(*args, **(kwargs or {}))


def bits(t: torch.Tensor) -> torch.Tensor:
    return t.view(torch.int32)


@pytest.mark.parametrize("name", PACKED)
@FIXED
@given(lens=lengths, data=st.data())
def test_only_named_slots_are_written(name: str, lens: list[int], data: st.DataObject) -> None:
    """Unused slots, and that of padding, may hold any bits: these stay, and reach no other sequence."""
    spec, args = made(name, lens, slots=len(lens) + 4)
    state, count = args["state"], len(lens) + 4
    state = torch.randn(count, *state.shape[1:]) if len(state) != count else state.clone()
    chosen = data.draw(st.permutations(range(1, count)))[: len(lens)]
    padded = torch.tensor(data.draw(st.lists(st.booleans(), min_size=len(lens), max_size=len(lens))))
    slots = torch.where(padded, 0, torch.tensor(chosen)).to(torch.int32)
    used = sorted({int(slot) for slot in slots if slot > 0})
    others = [i for i in range(count) if i not in used]
    clean = {**args, "slots": slots, "state": state.clone()}
    expected = run(spec, clean)
    state[others] = float("nan")
    bits(state)[others] += torch.arange(len(others), dtype=torch.int32).view(-1, *[1] * (state.dim() - 1))
    given_args = {**args, "slots": slots, "state": state.clone()}
    with WritesOf(given_args["state"]) as writes:
        provider = next(p for p in spec.op.providers if p.name == "reference")
        out = provider.fn(*given_args.values())
    assert torch.equal(out, expected) and out.isfinite().all()
    assert torch.equal(given_args["state"][used], clean["state"][used])
    assert torch.equal(bits(given_args["state"])[others], bits(state)[others])
    assert not writes.found
    _, new = spec.reference(**{**args, "slots": slots, "state": state})
    assert torch.equal(bits(new)[others], bits(state)[others])
    assert torch.equal(new[used], clean["state"][used])


@pytest.mark.parametrize("slot", [0, -1])
@pytest.mark.parametrize("name", PACKED)
def test_padding_writes_no_state(name: str, slot: int) -> None:
    spec, args = made(name, [3, 1, 2], padding=2)
    args["slots"][args["slots"] == 0] = slot
    args["state"][[0, -1]] = float("nan")
    before = args["state"].clone()
    out = run(spec, args)
    used = int(args["slots"][0])
    assert out.isfinite().all() and not torch.equal(args["state"][used], before[used])
    others = [i for i in range(len(before)) if i != used]
    torch.testing.assert_close(args["state"][others], before[others], atol=0, rtol=0, equal_nan=True)


@pytest.mark.parametrize("name", PACKED)
def test_fresh_sequences_ignore_their_slot(name: str) -> None:
    spec, args = made(name, [4, 5])
    args["fresh"] = torch.ones(2, dtype=torch.bool)
    args["state"].fill_(float("nan"))
    zeros = {**args, "state": torch.zeros_like(args["state"])}
    assert torch.equal(run(spec, args), run(spec, zeros))
    assert torch.equal(args["state"][args["slots"].long()], zeros["state"][args["slots"].long()])


@pytest.mark.parametrize("name", PACKED)
def test_narrow_state_is_rounded_once(name: str) -> None:
    spec, args = made(name, [6, 3])
    narrow = {**args, "state": args["state"].bfloat16()}
    wide = {**args, "state": narrow["state"].float()}
    assert torch.equal(run(spec, narrow), run(spec, wide))
    assert torch.equal(narrow["state"], wide["state"].bfloat16())


@pytest.mark.parametrize("name", [name for name in PACKED if name != "causal_conv1d"])
@pytest.mark.parametrize("decode", [True, False])
def test_cases_have_states_of_three_dtypes(name: str, decode: bool) -> None:
    """At least one prompt of each; decodes in what engines serve."""
    cases = [c for c in registry.get(name).cases if c.dims.get("decode", False) == decode and "odd" in c.tags]
    kept = {c.dims.get("state_dtype", "float32") for c in cases}
    assert kept == {"float32", "bfloat16"} | (set() if decode else {"float16"})


@pytest.mark.parametrize("name", PACKED)
@pytest.mark.parametrize(
    ("argument", "change", "says"),
    [
        ("cu_seqlens", lambda t: t[:-1], r"cu_seqlens \(2,\), slots \(2,\) and fresh \(2,\) must be \[B \+ 1\]"),
        ("slots", lambda t: t.long(), r"slots is torch.int64, must be torch.int32"),
        ("fresh", lambda t: t.int(), r"fresh is torch.int32, must be torch.bool"),
        ("state", lambda t: t[:, :1], r"state \(.*\) must be \[S, .*\] = "),
    ],
)  # fmt: skip
def test_contradicting_arguments_are_named(name: str, argument: str, change: Any, says: str) -> None:
    spec, args = made(name, [2, 2])
    with pytest.raises(ValueError, match=f"{name}: {says}"):
        run(spec, {**args, argument: change(args[argument])})


@pytest.mark.parametrize("name", PACKED)
def test_a_decode_needs_neither_borders_nor_flags(name: str) -> None:
    spec, args = made(name, [1, 1, 1], padding=1)
    args["fresh"] = torch.zeros(3, dtype=torch.bool)
    short = {**args, "cu_seqlens": None, "fresh": None, "state": args["state"].clone()}
    assert torch.equal(run(spec, args), run(spec, short))
    assert torch.equal(args["state"], short["state"])
    with pytest.raises(
        ValueError, match=rf"{name}: cu_seqlens=None is one token of each sequence, got 3 tokens"
    ):
        run(spec, {**short, "slots": short["slots"][:2]})


@pytest.mark.parametrize("name", ["gated_delta_rule", "kda"])
def test_inputs_of_gates_come_together(name: str) -> None:
    spec, args = made(name, [2])
    heads, keys = args["v"].shape[1], args["k"].shape[2]
    rate, bias = torch.ones(heads), torch.ones(heads, keys) if name == "kda" else torch.ones(heads)
    with pytest.raises(ValueError, match=f"{name}: rate and bias must be given together, got rate alone"):
        run(spec, {**args, "rate": rate, "bias": None})
    with pytest.raises(ValueError, match=rf"{name}: bias \(.*\) must be \[Hv\], or \[Hv, K\]"):
        run(spec, {**args, "rate": rate, "bias": bias[:1, ...][:, None]})
    g, beta = registry.get("delta_gates").reference(args["g"], args["beta"], rate, bias, True)
    made_before = {**args, "g": g, "beta": beta, "state": args["state"].clone()}
    found = run(spec, {**args, "rate": rate, "bias": bias, "logarithm": True})
    torch.testing.assert_close(found, run(spec, made_before))
    torch.testing.assert_close(args["state"], made_before["state"])


@pytest.fixture(scope="module")
def in_chunks() -> dict[str, str | None]:
    env = {**os.environ, "TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"}
    done = warm.run(["-c", INTERPRETED, Path(__file__).parents[2], *OPS], env, timeout=400)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


@pytest.mark.parametrize("name", OPS)
def test_chunks_agree_at_extreme_decays(name: str, in_chunks: dict[str, str | None]) -> None:
    kinds = registry.get(name).extremes
    assert kinds and all(in_chunks[f"{name}-{kind}"] is None for kind in kinds), in_chunks


@pytest.mark.parametrize("name", OPS)
def test_chunks_continue_token_by_token(name: str, in_chunks: dict[str, str | None]) -> None:
    assert in_chunks[f"{name}-split"] is None


@pytest.mark.parametrize("name", SEGMENTED)
def test_segments_agree_with_the_reference(name: str, in_chunks: dict[str, str | None]) -> None:
    found = {kind: problem for kind, problem in in_chunks.items() if kind.startswith(f"{name}-segments")}
    assert found == dict.fromkeys(found) and len(found) >= 3


def test_products_above_the_range_of_float16_count(in_chunks: dict[str, str | None]) -> None:
    """Products of queries and keys, which decays and steps of time make small."""
    assert in_chunks["ssd-overflow"] is None


@pytest.mark.parametrize("name", BY_CHANNEL)
def test_only_strong_decays_are_halved(name: str, in_chunks: dict[str, str | None]) -> None:
    assert in_chunks[f"{name}-mixed"] is None


def of_a_prompt(name: str) -> list[Any]:
    """The arguments of a served model's prompt of 8,192 tokens, without values."""
    spec = registry.get(name)
    case = next(c for c in spec.cases if c.name.endswith("_8k"))
    small = dataclasses.replace(case, dims={**case.dims, "seq_lens": (1,)})
    args = spec.inputs(small, "cpu", torch.Generator())
    tokens = {a.name for a in spec.arguments if "tokens" in str(getattr(a, "axes", ""))}
    made = {k: x.to("meta") if isinstance(x, torch.Tensor) else x for k, x in named(spec, args).items()}
    return [x.expand(8192, *x.shape[1:]).contiguous() if k in tokens else x for k, x in made.items()]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "kernel"), [("kda", "products"), ("gated_delta_rule", "products"), ("ssd", "linear")]
)
def test_kernels_of_prompts_fit_into_registers(
    name: str, kernel: str, tmp_path: Path, monkeypatch: Any
) -> None:
    for module in (chunks, linear_chunks):
        monkeypatch.setattr(module, "multiprocessors", lambda device: 132)
    provider = next(p for p in registry.get(name).op.providers if p.name == "triton")
    found = {each[0].fn.__name__: each for each in launched(lambda: provider.fn(*of_a_prompt(name)))}
    compiled = compile_for(found[f"{kernel}_kernel"], 90)
    assert usage(compiled, tmp_path)["STACK"] <= 128
    assert 2 * compiled.metadata.shared <= 227 << 10  # two programs of an SM


LONG = (512,) * 15 + (448,) + (1,) * 64  # tokens of each call: prompts, then decodes


@pytest.mark.parametrize(
    "device", [pytest.param("cpu", marks=pytest.mark.slow), pytest.param("cuda", marks=pytest.mark.gpu)]
)
@pytest.mark.parametrize("kept", ["float32", "bfloat16"])
@pytest.mark.parametrize("name", OPS)
def test_8k_steps_stay_near_float64(name: str, kept: str, device: str) -> None:
    """The last outputs and the state after these calls are within bfloat16's bound.

    A narrow state is rounded after each call, in the reference as well: its roundings alone are beyond the bound.
    """
    spec = registry.get(name)
    case = next(c for c in spec.cases if c.name == "packed")
    dtype = "bfloat16" if device == "cuda" else "float32"
    dims = {**case.dims, "seq_lens": (sum(LONG),), "new": 1, "padding": 0, "state_dtype": kept}
    args = make_args(spec, dataclasses.replace(case, dims=dims, dtype=dtype))

    def run(fn: Any, args: list[Any]) -> tuple[torch.Tensor, torch.Tensor]:
        state = named(spec, args)["state"].zero_()  # later calls continue from it
        named(spec, args)["fresh"].zero_()
        return parts(spec, fn, args, LONG)[0], state

    def in_float64(*args: Any) -> torch.Tensor:
        out, state = oracle(spec, list(args))[:2]
        named(spec, args)["state"].copy_(state)
        return out

    moved = [x.to(device, copy=True) if isinstance(x, torch.Tensor) else x for x in args]
    want = oracle(spec, args) if kept == "float32" else run(in_float64, args)
    out, state = run(spec.op, moved)
    limit = spec.tolerance["bfloat16"]
    bound = {"atol": limit.atol, "rtol": limit.rtol}
    torch.testing.assert_close(out[-64:].cpu().double(), want[0][-64:].double(), **bound)
    slot = int(named(spec, args)["slots"][0])
    torch.testing.assert_close(state[slot].cpu().double(), want[1][slot].double(), **bound)


@pytest.mark.parametrize("strength", STRENGTHS)
@pytest.mark.parametrize("name", OPS)
def test_chunks_agree_at_strengths_of_decay(
    name: str, strength: float, in_chunks: dict[str, str | None]
) -> None:
    assert in_chunks[f"{name}-decays x {strength}"] is None


def test_sglang_call_that_stores_inner_states_is_refused():
    buffer = torch.ones(1, 1, 2, 4, 4)
    with pytest.raises(UnsupportedArgument, match="intermediate_states_buffer is not supported"):
        sglang.sglang_fused_sigmoid_gating_delta_rule_update(*[None] * 11, intermediate_states_buffer=buffer)


def test_a_decode_of_a_host_launches_its_kernels_alone() -> None:
    """No kernel for constants, none that copies the result."""
    env = {**os.environ, "TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"}
    code = INTERPRETED.replace("recurrence_runs", "decode_launches")
    done = warm.run(["-c", code, Path(__file__).parents[2]], env, timeout=200)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert {name: ran for name, (ran, _) in found.items()} == {
        "mamba2": ["fastkernels::ssd"], "mamba": ["fastkernels::mamba_scan"],
        "convolution": ["fastkernels::causal_conv1d", "aten::copy_"],  # the copy is the test's
        "convolution with a result": ["fastkernels::causal_conv1d"],
        "gated delta": ["fastkernels::gated_delta_rule"], "kimi delta": ["fastkernels::kda"],
    }  # fmt: skip
    assert max(error for _, error in found.values()) < 1e-5
