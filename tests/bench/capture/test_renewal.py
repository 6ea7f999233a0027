"""Renewed captures: no recorded value is left that a table could recognize, and a call costs as much as before."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from fk_bench.capture import replay
from fk_bench.capture.renewal import renewed

from fastkernels.core import registry

# Ops with recorded integers, each with the arguments that say which call it is
RECORDED = {
    "attention_decode": ("block_table",), "attention_prefill": ("block_table",), "embedding": ("input_ids",),
    "fused_experts": ("topk_ids", "topk_weights"), "moe_align": ("topk_ids",), "rotary_emb": ("positions",),
    "sampling": ("seeds", "offsets"), "store_kvcache": ("slot_mapping",), "causal_conv1d": ("slots",),
    "gated_delta_rule": ("slots",), "ssd": ("slots",),
}  # fmt: skip
SIZES = {"seq_lens", "cu_seqlens_q", "cu_seqlens", "fresh"}
SEEDS = 20


def drawn(case: replay.CapturedCase, seed: int) -> dict[str, Any]:
    shapes = {a.name: tuple(a.shape) for a in case.arguments if a.shape is not None}
    return renewed(case.values, shapes, seed)


def test_all_recorded_ops_are_renewed() -> None:
    for op in registry.op_names():
        for case in replay.captured_cases(op):
            sampled = "values" in case.case.tags  # rows of floats, of which new ones are drawn
            named = {
                n for n, v in case.values.items()
                if isinstance(v, torch.Tensor) and not (sampled and v.is_floating_point())
            }  # fmt: skip
            known = set().union(*RECORDED.values(), SIZES, {"temperature", "top_k", "top_p", "min_p"})
            assert named <= known, op


@pytest.mark.parametrize("op", RECORDED)
def test_recorded_values_do_not_come_back(op: str) -> None:
    names = RECORDED[op] if RECORDED[op] == ("slots",) else None  # cu_seqlens and fresh stay
    cases = [
        c for c in replay.captured_cases(op)
        if sum(v.numel() for v in tensors({n: c.values[n] for n in names or c.values})) > 2
    ]  # fmt: skip
    assert cases
    for case in cases:
        for name in RECORDED[op]:
            recorded = case.values[name]
            made = [drawn(case, seed)[name] for seed in range(SEEDS)]
            same = sum(torch.equal(m, recorded) for m in made)
            assert same <= 2, (case.case.name, name)  # small calls have few other values
            assert len({tuple(m.flatten().tolist()) for m in made}) > SEEDS // 3, (case.case.name, name)
            assert all(m.dtype == recorded.dtype and m.shape == recorded.shape for m in made)


def tensors(values: Any) -> list[torch.Tensor]:
    return [v for v in values.values() if isinstance(v, torch.Tensor)]


def test_routing_keeps_its_loads_and_changes_its_experts() -> None:
    for case in replay.captured_cases("fused_experts"):
        ids, experts = case.values["topk_ids"].long(), case.case.dims["experts"]
        loads = torch.bincount(ids.flatten(), minlength=experts).sort().values
        for seed in range(3):
            new = drawn(case, seed)
            other = torch.bincount(new["topk_ids"].long().flatten(), minlength=experts).sort().values
            assert int((other > 0).sum()) == int((loads > 0).sum()), case.case.name
            assert (other - loads).abs().sum() <= 0.25 * ids.numel() + 4
            assert all(len(set(row)) == len(row) for row in new["topk_ids"].tolist())
            sums = case.values["topk_weights"].sum(1).sort().values
            torch.testing.assert_close(new["topk_weights"].sum(1).sort().values, sums, atol=1e-3, rtol=1e-3)


def test_large_routing_shares_no_token_with_the_recorded_one() -> None:
    case = max(replay.captured_cases("fused_experts"), key=lambda c: c.values["topk_ids"].numel())
    recorded, new = (v["topk_ids"].tolist() for v in (case.values, drawn(case, 1)))
    assert len(recorded) > 100
    assert sum(a == b for a, b in zip(recorded, new, strict=True)) < len(recorded) / 4


@pytest.mark.parametrize("op", ["attention_decode", "attention_prefill"])
def test_block_tables_stay_valid(op: str) -> None:
    for case in replay.captured_cases(op):
        shape = next(a.shape for a in case.arguments if a.name == "key_cache")
        blocks, size = shape[0], shape[1]
        before = case.values
        for seed in range(5):
            new = drawn(case, seed)
            lens, table = new["seq_lens"], new["block_table"]
            assert int(lens.max()) <= before["max_seqlen_k"] and table.max() < blocks and table.min() >= 0
            needed = -(-lens // size)
            assert sorted(needed.tolist()) == sorted((-(-before["seq_lens"] // size)).tolist())
            for row, count in zip(table.tolist(), needed.tolist(), strict=True):
                assert len(set(row[:count])) == count
            if "cu_seqlens_q" in new:
                queries = new["cu_seqlens_q"].diff()
                assert (queries <= lens).all() and int(queries.max()) <= before["max_seqlen_q"]
                assert new["cu_seqlens_q"][-1] == before["cu_seqlens_q"][-1]


def test_slots_stay_distinct_and_keep_padding() -> None:
    for case in replay.captured_cases("store_kvcache"):
        blocks, size = next(a.shape for a in case.arguments if a.name == "key_cache")[:2]
        before, new = case.values["slot_mapping"], drawn(case, 3)["slot_mapping"]
        assert (before < 0).sum() == (new < 0).sum() and new.max() < blocks * size
        assert len(set(new[new >= 0].tolist())) == len(set(before[before >= 0].tolist()))


def test_other_ranks_experts_keep_their_numbers_in_range() -> None:
    ids = torch.tensor([[0, 5], [3, -1], [7, 1]], dtype=torch.int32)
    for seed in range(10):
        new = renewed({"topk_ids": ids}, {"w1": (4, 8, 8), "expert_map": (8,)}, seed)["topk_ids"]
        assert new.min() >= -1 and new.max() < 8 and int((new < 0).sum()) == 1


def test_few_blocks_and_empty_calls_are_accepted() -> None:
    values = {"slot_mapping": torch.tensor([0, 3, -1])}
    assert renewed(values, {"key_cache": (1, 4, 1, 2)}, 0)["slot_mapping"].tolist() == [0, 3, -1]
    empty = {"topk_ids": torch.empty(0, 2, dtype=torch.int32)}
    assert renewed(empty, {"w1": (4, 2, 2)}, 0)["topk_ids"].shape == (0, 2)
    nothing = {
        "seq_lens": torch.zeros(2, dtype=torch.int32),
        "block_table": torch.zeros(2, 1, dtype=torch.int32),
    }
    assert renewed(nothing, {"key_cache": (3, 4, 1, 2)}, 0)["seq_lens"].tolist() == [0, 0]
