"""Tests of decode_table.py: the timed cases of decode attention, and the entries made of their rows."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from fk_bench.core.rows import Machine, Row, Subject, append

from fastkernels.core import tuning as tuned
from fastkernels.overrides.attention import attention_decode_cuda as cuda
from fastkernels.overrides.attention import attention_decode_split as split
from fastkernels.overrides.attention.attention_decode import attention_decode

sys.path.insert(0, str(Path(__file__).parents[3] / "bench"))
from experiments.attention import decode_attention, decode_table

# name: (provider, parameters)
SETS = {
    "each": ("triton-split", "2/64/4/4/128/0"), "even": ("triton-split", "4/32/2/4/64/1"),
    "dealt": ("triton-split", "2/64/4/4/128/2"), "cuda": ("cuda-split", "8/16/3/1/128/2/1"),
}  # fmt: skip
SHAPE = {"heads": 32, "kv_heads": 8, "head_size": 128, "block_size": 16}


def rows(
    model: str, batch: int, context: int, capacity: int, run: str = "a", sd: float = 0.01, **us: float
) -> list[Row]:
    """Made-up times of FA3 and of our sets, in microseconds."""
    found = []
    where = {
        "kind": "time",
        "model": model,
        "batch": batch,
        "context": context,
        "capacity": capacity,
        **SHAPE,
    }
    for name, value in us.items():
        provider, params = SETS.get(name, (name, ""))
        found.append(
            Row(
                run_id=run, command="decode_attention", commit="0123456", case={**where, "params": params},
                subject=Subject(op="attention_decode", provider=provider),
                metrics={"us": value, "us_sd": sd * value}, versions={"torch": "2.11.0"},
                machine=Machine(gpu="NVIDIA H200", gpus=1),
            )
        )  # fmt: skip
    return found


def made(found: list[Row]) -> dict[tuple[int, int], Any]:
    table, _ = decode_table.table(found, "r")
    return {(e.sizes["batch"], e.sizes["context"]): e for e in table.entries}


def test_set_with_best_worst_case_is_chosen() -> None:
    found = rows("llama-8b", 32, 2048, 2048, fa3=71, each=67, even=68)
    found += rows("ragged", 32, 1024, 2048, fa3=45, each=52, even=44)
    found += rows("llama-8b", 32, 4096, 2048, fa3=1, each=9, even=9)  # not what a graph for 2048 meets
    (entry,) = made(found).values()
    assert entry.faster and entry.params["even"] == 1 and entry.params["per_sm"] == 4
    assert entry.speedup == pytest.approx((71 / 68 * 45 / 44) ** 0.5, abs=1e-3)
    assert 1 < entry.ci95[0] < entry.speedup < entry.ci95[1]


@pytest.mark.parametrize(
    ("ragged", "sd", "faster"),
    [(45.0, 0.001, True), (46.3, 0.001, True), (46.5, 0.001, False), (45.0, 0.2, False)],
)
def test_entry_is_null_for_bad_worst_case_or_noise(ragged: float, sd: float, faster: bool) -> None:
    found = rows("llama-8b", 32, 2048, 2048, sd=sd, fa3=71, even=66)
    found += rows("ragged", 32, 1024, 2048, sd=sd, fa3=45, even=ragged)
    (entry,) = made(found).values()
    assert entry.faster is faster and (entry.provider is None) is not faster


def test_better_kernel_is_chosen_or_null() -> None:
    found = rows("llama-8b", 8, 2048, 2048, fa3=25.5, each=23.8, cuda=20.3)
    found += rows("llama-8b", 32, 2048, 2048, fa3=71, each=66, cuda=68)
    found += rows("llama-8b", 64, 2048, 2048, fa3=120, each=125, cuda=126)
    best = made(found)
    assert best[8, 2048].provider == "cuda-split" and best[8, 2048].params == cuda.PARAMS[0]
    assert best[8, 2048].speedup == pytest.approx(25.5 / 20.3, abs=1e-3)
    assert best[32, 2048].provider == "triton-split" and best[32, 2048].params == split.PARAMS[0]
    assert best[64, 2048].provider is None


def test_kernels_are_compared_by_worst_case() -> None:
    """The kernel with the better mean and the worse worst case loses."""
    found = rows("llama-8b", 8, 2048, 2048, fa3=25, each=24, cuda=15)
    found += rows("ragged", 8, 1024, 2048, fa3=18, each=17, cuda=18.5)
    assert made(found)[8, 2048].provider == "triton-split"


def test_removed_parameter_sets_are_ignored() -> None:
    found = rows("llama-8b", 8, 2048, 2048, fa3=25, each=24, dealt=10)
    assert made(found)[8, 2048].params == split.PARAMS[0]


def test_batch_is_ours_for_short_and_null_for_long_contexts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Looked up as dispatch does it."""
    found = []
    for capacity in (2048, 131072):
        found += rows("llama-8b", 1, 512, capacity, fa3=10.5, each=8.3)
        found += rows("llama-8b", 1, 2048, capacity, fa3=12.3, each=9.9)
        found += rows("llama-8b", 256, 2048, capacity, fa3=500, each=450)
    found += rows("llama-8b", 1, 8192, 131072, fa3=17.8, each=20.4)
    found += rows("llama-8b", 1, 32768, 131072, fa3=41.6, each=45.4)
    found += rows("llama-8b", 256, 32768, 131072, fa3=8000, each=7800)
    path, out = tmp_path / "rows.jsonl", tmp_path / "table.json"
    append(path, found)
    monkeypatch.setattr(sys, "argv", ["decode_table.py", str(path), "--out", str(out)])
    assert decode_table.main() == 0
    key = attention_decode.key
    assert key is not None
    lookup = tuned.lookup(key, tuned.read(out).entries)
    shape = (32, 8, 128, 16, 0, torch.bfloat16)
    ours = ((1, 512), (1, 2048), (200, 3000), (256, 9000), (200, 131072))
    hosts = ((1, 2049), (1, 131072))
    for sizes in (*ours, *hosts):
        entry = lookup.find(shape, sizes)
        assert entry is not None and entry.faster is (sizes in ours), sizes
        assert (entry.provider is None) is (sizes in hosts), sizes
    assert lookup.find(shape, (1, 511)) is None, "2048 speaks down to a quarter"


def test_later_run_of_a_case_replaces_earlier_one() -> None:
    found = rows("llama-8b", 8, 2048, 2048, fa3=25, each=20)
    assert made(found)[8, 2048].faster
    assert not made(found + rows("llama-8b", 8, 2048, 2048, run="b", fa3=25, each=26))[8, 2048].faster


def test_rows_without_fa3_are_an_error() -> None:
    with pytest.raises(ValueError, match="nothing to compare"):
        made(rows("llama-8b", 8, 2048, 2048, each=20))
    with pytest.raises(ValueError, match="--capacity"):
        made([])


def test_small_blocks_are_compared_with_fa3_at_16() -> None:
    ones = [
        row.model_copy(update={"case": {**row.case, "block_size": 1}})
        for row in rows("llama-8b", 8, 2048, 2048, each=20)
    ]
    with pytest.raises(ValueError, match="nothing to compare"):
        decode_table.table(ones, "r")
    for us, faster in ((25, True), (19, False)):
        table, _ = decode_table.table([*ones, *rows("llama-8b", 8, 2048, 2048, fa3=us, each=10)], "r")
        entries = {e.shape["block_size"]: e for e in table.entries}
        assert entries[16].faster and bool(entries[1].faster) is faster
        assert entries[1].baseline == "fa3"


def test_parts_cover_every_case_once_within_memory() -> None:
    every = decode_attention.cases(
        ["llama-8b"], 16, [1, 8, 32, 64, 128, 256], [512, 1024, 2048, 8192, 32768], [2048, 131072]
    )
    assert len(set(every)) == len(every)
    assert {(c.batch, c.context) for c in every if c.capacity == 2048 and c.model == "llama-8b"} == {
        (b, c) for b in (1, 8, 32, 64, 128, 256) for c in (512, 1024, 2048)
    }
    assert (256, 32768) in {(c.batch, c.context) for c in every}
    assert sorted(c for i in range(4) for c in every[i::4]) == sorted(every)
    for case in every:
        assert max(case.lens) <= case.most and len(case.lens) == case.batch and min(case.lens) >= 1
        used = case.calls * case.blocks * 16 * case.layout.token_bytes
        assert case.calls >= 1 and used <= decode_attention.POOL
        assert case.calls * case.bytes >= decode_attention.COLD, "what a pass reads does not stay in L2"
    mixed = [c for c in every if c.model in decode_attention.MIXED]
    assert all(0.8 < sum(c.lens) / c.batch / c.context < 1.1 for c in mixed if c.capacity == 131072)
    assert max(mixed[-1].lens) > 4 * mixed[-1].context
