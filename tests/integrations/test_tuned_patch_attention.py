"""Attention in a patched model: attention_decode's tuned table decides layer by layer."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from fk_integrations.core.adapter import Adapter
from fk_integrations.core.host_op import HostOp
from fk_integrations.patching.apply import Patched, apply, plan
from torch import nn

from fastkernels.core import tuning
from fastkernels.core.reasons import Kind, Reason
from fastkernels.core.tuning import Entry, Table
from fastkernels.patch import Request


class Attention(nn.Module):
    """The parts of an attention layer that `apply` reads."""

    def __init__(self, heads: int, window: int = 0, refuses: str = "") -> None:
        super().__init__()
        self.heads, self.window, self.refuses = heads, window, refuses


class AttentionHost(Adapter):
    """An adapter for attention alone; its seam only records the swap."""

    host, version = "vllm", "0.33.0"

    def targets(self, spec: Any, model: Any) -> list[Any]:
        path = f"{__name__}:Attention"
        found = [t for t in Adapter.targets(self, spec, model) if spec.name == "attention"]
        return [dataclasses.replace(t, path=path) for t in found]

    def unknown(self, target: Any, host_class: Any) -> str | None:
        return None

    def of(self, op: str) -> HostOp:
        return Decode()


class Decode(HostOp):
    def shape(self, op: Any, module: Any) -> tuple[Any, ...]:
        assert op.name == "attention_decode"
        # The block size is unknown before the cache exists
        return (module.heads, 2, 64, None, module.window, torch.bfloat16)

    def swap(self, module: Any, ours: type, journal: Any, by_table: bool) -> Reason | None:
        module.by_table = by_table
        journal.add(lambda: delattr(module, "by_table"))
        return Reason(Kind.UNSUPPORTED, module.refuses) if module.refuses else None


@pytest.fixture
def attention(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[nn.Module]:
    """Two layers where ours is faster, at one of two block sizes, one where it is not, one that is not tuned, and one
    that has the wrong backend.
    """
    shape = {"heads": 8, "kv_heads": 2, "head_size": 64, "window": 0, "dtype": "bfloat16"}

    def at(block_size: int, provider: str, **more: Any) -> Entry:
        where = {**shape, "block_size": block_size, **more}
        won = {"speedup": 1.3, "ci95": (1.2, 1.4)} if provider != "fa3" else {}
        return Entry("attention_decode", where, {"batch": 8, "context": 2048}, provider, "fa3", "r1", **won)

    entries = (at(16, "triton-split"), at(32, "fa3"), at(16, "fa3", window=128))
    path = tmp_path / "own.json"
    path.write_text(Table("cpu", {"r1": {}}, entries).to_json())
    monkeypatch.setenv("FASTKERNELS_TUNED", str(path))
    tuning._by_op.cache_clear()
    model = nn.ModuleList(
        [Attention(8), Attention(8), Attention(8, 128), Attention(4), Attention(8, refuses="x; y")]
    )
    model.register_parameter("weight", nn.Parameter(torch.zeros(1)))
    yield model
    monkeypatch.undo()
    tuning._by_op.cache_clear()


def attend(model: nn.Module, **request: Any) -> Patched:
    return apply(AttentionHost(), model, Request("patch", **request))


def test_attention_where_decodes_are_faster(attention: Any) -> None:
    found = attend(attention, strict=True)
    (row,) = found.rows
    assert (row.op, row.state, row.modules) == ("attention", "active", 2)
    assert row.reason == (
        "1 left to the host: no kernel of ours is faster at heads=8 kv_heads=2 head_size=64 block_size=? window=128 "
        "dtype=bfloat16 on cpu; 1 left to the host: heads=4 kv_heads=2 head_size=64 block_size=? window=0 "
        "dtype=bfloat16 is not tuned on cpu: `fk-bench tune attention_decode --shape "
        "heads=4,kv_heads=2,head_size=64,block_size=16,window=0,dtype=bfloat16 --shape "
        "heads=4,kv_heads=2,head_size=64,block_size=1,window=0,dtype=bfloat16` would measure it; "
        "1 left to the host: x; y"
    )
    assert [getattr(m, "by_table", None) for m in attention] == [True, True, None, None, True]
    found.undo()
    assert not any(hasattr(m, "by_table") for m in attention)


def test_requested_attention_goes_in_whole(attention: Any) -> None:
    (row,) = attend(attention, ops=("attention",)).rows
    assert (row.modules, row.reason) == (4, "1 unsupported: x; y")
    assert not any(m.by_table for m in attention)


@pytest.mark.parametrize("name", ["attention", "attention_decode"])
def test_attention_is_switched_off_by_either_name(attention: Any, name: str) -> None:
    adapter, request = AttentionHost(), Request("patch", disable=(name,))
    adapter.whole = False  # a stage of a pipeline may have nothing to patch
    (row,) = apply(adapter, attention, request).rows
    assert (row.state, row.reason) == ("off", "FASTKERNELS_DISABLE")


def test_cpu_without_a_table_keeps_its_attention(attention: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("FASTKERNELS_TUNED")
    assert list(plan(AttentionHost(), Request("patch"), attention)) == []


def test_a_batch_invariant_host_keeps_its_attention(attention: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    adapter = AttentionHost()
    adapter.whole = False
    monkeypatch.setattr(adapter, "batch_invariant", lambda: "A SWITCH")
    (row,) = apply(adapter, attention, Request("patch", strict=True)).rows
    assert row.reason == "left to the host: A SWITCH is on, and this op's results may depend on the batch"
