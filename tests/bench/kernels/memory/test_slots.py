"""The judge's inputs: new in every slot, equal by both ways of filling them, and no multiples of known values."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
import torch
from fk_bench.kernels.judge.correctness.cases import trials
from fk_bench.kernels.judge.memory import layout
from fk_bench.kernels.judge.memory.permutations import Permuter
from fk_bench.kernels.judge.memory.slots import Slots, scalable, writable
from support.kernels import warm

from fastkernels.core import registry
from fastkernels.core.spec import Permutable


def make_slots(op: str, case: str, rolls: bool, count: int = 6) -> Slots:
    spec = registry.get(op)
    chosen = next(c for c in spec.cases if c.name == case)
    mode = "module" if spec.op is None else "op"
    slots = Slots(spec, lambda g: spec.inputs(chosen, "cpu", g), "cpu", count, mode, rolls)
    slots.refresh()
    return slots


CASES = [
    ("rms_norm", "odd_63"), ("linear", "odd_63"), ("store_kvcache", "padded"), ("embedding", "shard"),
    ("topk_softmax", "odd_63"), ("grouped_topk", "bias_16"), ("grouped_topk", "strided"), ("moe_align", "absent"),
    ("sampling", "mixed"), ("sparse_moe", "odd_63"), ("topk_softmax", "one"),
    ("sparse_moe", "none"), ("grouped_topk", "no_token"), ("moe_align", "none"),
]  # fmt: skip


@pytest.mark.parametrize("rolls", [False, True])
@pytest.mark.parametrize(("op", "case"), CASES)
def test_slot_holds_expected_values(op: str, case: str, rolls: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    slots = make_slots(op, case, rolls)
    for at_once in (False, True):
        if at_once:
            monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
            for t in layout.tensors([slots.args_of(s) for s in range(slots.count)]):
                t.zero_()
            slots._fill_at_once(slice(0, slots.count))
        for s in range(slots.count):
            for t, want in zip(layout.tensors(slots.args_of(s)), slots.expected(s), strict=True):
                assert torch.equal(t, want)


def test_kernel_fills_as_pytorch_does() -> None:
    """The script runs in its own process because Triton interprets kernels from import on."""
    script = Path(__file__).with_name("filling_cases.py")
    done = warm.run([script], {**os.environ, "TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"})
    assert done.returncode == 0, done.stderr
    found = dict(map(json.loads, done.stdout.splitlines()))
    assert {case: wrong for case, wrong in found.items() if wrong} == {} and len(found) == 18


@pytest.mark.parametrize("op", ["rms_norm", "topk_softmax"])
def test_refresh_of_some_slots_leaves_the_others(op: str) -> None:
    slots = make_slots(op, "odd_63", True)
    before = [[t.clone() for t in layout.tensors(slots.args_of(s))] for s in range(slots.count)]
    slots.refresh(2, 3)
    for s in range(slots.count):
        now = layout.tensors(slots.args_of(s))
        same = all(torch.equal(a, b) for a, b in zip(now, before[s], strict=True))
        assert same == (s not in (2, 3, 4))
        if not same:
            assert all(torch.equal(a, b) for a, b in zip(now, slots.expected(s), strict=True))


def test_slots_of_a_refresh_are_drawn_anew() -> None:
    """Each master serves equally many slots, in a secret order, with secret factors and shifts."""
    slots = make_slots("rms_norm", "odd_63", True, 40)
    drawn = []
    for _ in range(2):
        slots.refresh()
        assert [slots.origin.count(m) for m in range(4)] == [10] * 4
        assert all(0.8 < f <= 1 for f in slots.factors) and all(0 <= s < 1 << 40 for s in slots.shifts)
        assert len(set(slots.shifts)) == 40 and len(set(slots.factors)) > 35
        drawn.append((list(slots.origin), list(slots.factors), list(slots.shifts)))
    assert all(a != b for a, b in zip(*drawn, strict=True))


def test_values_are_rolled_unless_memory_is_shared() -> None:
    slots = make_slots("store_kvcache", "odd_63", True)
    master = layout.tensors(slots.masters[slots.origin[0]])
    key, value, key_cache, _, mapping = (slots.expected(0)[i] for i in range(5))
    # Key and value are views of one tensor
    assert torch.equal(key, slots.scaled(master[0], slots.factors[0]))
    assert torch.equal(value, slots.scaled(master[1], slots.factors[0]))
    assert torch.equal(mapping, master[4])  # integers are positions
    assert not torch.equal(key_cache, slots.scaled(master[2], slots.factors[0]))
    whole = slots.scaled(master[2], slots.factors[0])
    assert torch.equal(key_cache.flatten().sort().values, whole.flatten().sort().values)


def test_slots_are_no_multiples_of_each_other() -> None:
    slots = make_slots("linear", "odd_1128", True)
    rows = torch.stack(
        [layout.tensors(a)[0].flatten().double() for a in map(slots.args_of, range(slots.count))]
    )
    rows = rows / rows.norm(dim=1, keepdim=True)
    assert (rows @ rows.t()).fill_diagonal_(0).abs().max() < 0.2
    plain = make_slots("linear", "odd_1128", False)
    plain.fill([0] * plain.count)
    rows = torch.stack(
        [layout.tensors(a)[0].flatten().double() for a in map(plain.args_of, range(plain.count))]
    )
    rows = rows / rows.norm(dim=1, keepdim=True)
    assert (rows @ rows.t()).min() > 0.999  # the reason for the roll


def test_bound_arguments_keep_memory_and_strides() -> None:
    slots = make_slots("rms_norm", "odd_63", True)
    plan = slots.layout.to_json()
    for s in range(slots.count):
        apart = layout.tensors(layout.bind(plan, slots.private, s, slots.count, apart=True))
        for mine, theirs in zip(layout.tensors(slots.args_of(s)), apart, strict=True):
            assert torch.equal(mine, theirs) and mine.data_ptr() == theirs.data_ptr()
            assert theirs._base is None and mine.stride() == theirs.stride()
        storages = {t.untyped_storage().data_ptr() for t in apart}
        assert len(storages) == len(
            {t["tensor"]["region"] for t in plan["args"] if isinstance(t, dict) and "tensor" in t}
        )
    assert all(scalable(t) for t in layout.tensors(slots.args_of(0)))


def test_tokens_keep_their_experts() -> None:
    """A router that rounds its logits must send the tokens of every slot to the experts of the exact one."""
    spec = registry.get("sparse_moe")
    case = next(c for c in spec.cases if c.name == "rounded")
    slots = Slots(spec, lambda g: spec.inputs(case, "cpu", g), "cpu", 6, "module", True)
    slots.refresh()
    for slot in range(slots.count):
        x, gate = (slots.args_of(slot)[i] for i in range(2))
        exact = (x.double() @ gate.double().t()).topk(2).indices.sort().values
        assert torch.equal((x @ gate.t()).topk(2).indices.sort().values, exact)


def test_modules_keep_their_weights_and_get_new_activations() -> None:
    spec = registry.get("rms_norm")
    case = next(c for c in spec.cases if c.name == "odd_1128")
    slots = Slots(spec, lambda g: spec.inputs(case, "cpu", g), "cpu", 4, "module", True, cls="VllmRMSNorm")
    slots.fill([0] * 4)
    held = [slots.args_of(s)[1].clone() for s in range(4)]
    before = [slots.args_of(s)[0].clone() for s in range(4)]
    slots.refresh()
    slots.renew(1)
    slots.renew(2)
    for s in range(4):
        x, weight, *_ = slots.args_of(s)
        assert torch.equal(weight, held[0]) and not torch.equal(x, before[s])
        for value, want in zip(layout.tensors(slots.args_of(s)), slots.expected(s), strict=True):
            assert torch.equal(value, want)
    slots.edit(lambda args: args[1].zero_())
    assert torch.equal(slots.args_of(0)[1], held[0])


@pytest.mark.parametrize(
    ("op", "case", "cls", "names"),
    [
        ("rms_norm", "odd_1128", "VllmRMSNorm", set()),  # without a residual the host's class writes nothing
        ("rms_norm", "residual", "VllmRMSNorm", {"x", "residual"}),
        ("rms_norm", "residual", "TransformersRMSNorm", {"residual"}),
        ("silu_and_mul", "odd_1128", "VllmSiluAndMul", set()),
        ("rotary_emb", "odd_63", "VllmRotaryEmbedding", {"query", "key"}),
        ("attention", "odd_63", "VllmAttention", {"key_cache", "value_cache"}),
    ],
)
def test_class_may_write_what_its_host_class_writes(op: str, case: str, cls: str, names: set[str]) -> None:
    spec = registry.get(op)
    found = next((c for c in spec.cases if c.name == case), None)
    found = found or next(c for c in spec.cases if c.dims.get("residual") or case != "residual")
    args = spec.inputs(found, "cpu", torch.Generator())
    may = {spec.arguments[i].name for i in writable(spec, cls, args)}
    assert may & {"x", "residual", "query", "key", "value", "key_cache", "value_cache"} == names


MOVED = [
    ("topk_softmax", "decode_32"), ("grouped_topk", "bias"), ("moe_align", "odd_63"), ("sampling", "greedy_63"),
    ("sparse_moe", "odd_63"),
]  # fmt: skip


@pytest.mark.parametrize(("op", "case"), MOVED)
def test_slots_have_different_values(op: str, case: str) -> None:
    """With as many slots as in a GPU's batch, from few masters; arguments that decide choices are not rolled."""
    slots = make_slots(op, case, True, 512)
    assert len(slots.masters) <= 32 and slots.spec.permutable is not None
    for i in slots.spec.permutable(*slots.masters[0]).columns:
        assert not slots._rolled(i)
    seen = {layout.tensors(slots.args_of(s))[0].view(torch.uint8).numpy().tobytes() for s in range(512)}
    assert len(seen) == 512


@pytest.mark.parametrize("case", ["bias", "bias_16", "soft_bias", "one_group"])
def test_permuted_router_makes_same_choices(case: str) -> None:
    """Groups stay together: each row has its master's weights, with ids in another order."""
    slots = make_slots("grouped_topk", case, True, 40)
    assert slots._permuter is not None
    orders = set()
    for s in range(slots.count):
        weights, ids = slots.spec.reference(*slots.args_of(s))
        before, _ = slots.spec.reference(*slots.masters[slots.origin[s]])
        torch.testing.assert_close(weights, before.roll(-(slots.codes[s] % len(before)), 0))
        orders.add(tuple(ids[0].tolist()))
    assert len(orders) > 20


def test_misfits_are_reported() -> None:
    args = [torch.zeros(3, 8), torch.zeros(6)]
    for permutable in (
        Permutable(rows=(0, 1)),
        Permutable(columns=(0, 1)),
        Permutable(columns=(0,), group=3),
    ):
        with pytest.raises(ValueError, match="does not fit"):
            Permuter(args, permutable, [True, True])
    # Shared memory stays in place, and so does all that belongs to it
    held = Permuter(args, Permutable(rows=(0,), columns=(0, 1)), [True, False])
    assert torch.equal(held.apply(1, args[1], [1])[0], args[1]) and not held.permutes(1)


@pytest.mark.parametrize("shape", [(5, 7), (5, 3, 7), (5, 2, 3, 7)])
def test_axes_between_rows_and_columns_stay(shape: tuple[int, ...]) -> None:
    value, codes = torch.randn(shape), [0, 1, 5, 34]
    moved = Permuter([value], Permutable(rows=(0,), columns=(0,)), [True]).apply(0, value, codes)
    for code, found in zip(codes, moved, strict=True):
        assert torch.equal(found, value.roll((-(code % 5), -(code // 5)), (0, -1)))


def test_captured_values_are_rolled_too() -> None:
    """Captured integers are positions and stay; the floats are new, and are rolled."""
    spec = registry.get("linear")
    trial = next(t for t in trials(spec, ("captured",), "cpu") if t.timed and t.gpu_only(spec) is None)
    slots = Slots(spec, lambda g: trial.make("cpu", g), "cpu", 6, "op", trial.timed)
    slots.fill([0] * slots.count)
    x = torch.stack([layout.tensors(slots.args_of(s))[0].flatten().double() for s in range(6)])
    x = x / x.norm(dim=1, keepdim=True)
    alike = ((x @ x.t()).abs() >= 0.2).triu(1).sum()  # of 15 pairs; one may have the same shift by chance
    assert alike <= 1


@pytest.mark.parametrize(("op", "case"), [("silu_and_mul", "batched"), ("topk_softmax", "odd_63")])
def test_renewed_slot_is_new_and_the_others_stay(op: str, case: str) -> None:
    slots = make_slots(op, case, True)
    before = [layout.tensors(slots.args_of(s))[0].clone() for s in range(slots.count)]
    slots.renew(3)
    for s, old in enumerate(before):
        (now, *_), (expected, *_) = layout.tensors(slots.args_of(s)), slots.expected(s)
        assert torch.equal(now, expected) and (s == 3 or torch.equal(now, old))
    assert (layout.tensors(slots.args_of(3))[0] != before[3]).float().mean() > 0.5


def test_edited_values_stay_where_they_are() -> None:
    slots = make_slots("silu_and_mul", "batched", True)
    slots.edit(lambda args: args[0].view(-1)[5:6].fill_(1e6))
    for s in range(slots.count):
        (x,) = layout.tensors(slots.args_of(s))
        assert int(x.flatten().argmax()) == 5 and torch.equal(x, slots.expected(s)[0])
