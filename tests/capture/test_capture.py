"""fastkernels.capture: recorded calls, the choice of what is kept, and no change without a recording."""

from __future__ import annotations

import dataclasses
import threading
from pathlib import Path

import pytest
import torch
from torch import nn

from fastkernels import capture
from fastkernels.capture.keep import Calls, choose
from fastkernels.core import registry
from fastkernels.core.dispatch import Op


def op_of(name: str) -> Op:
    return registry.get(name).op


def norm(tokens: int, hidden: int = 8, residual: bool = False) -> torch.Tensor:
    x = torch.randn(tokens, hidden, generator=torch.Generator().manual_seed(tokens))
    return op_of("rms_norm")(x, torch.ones(hidden), 1e-6, x.clone() if residual else None, None, True)


def look_up(ids: list[int], rows: int = 50) -> torch.Tensor:
    return op_of("embedding")(torch.tensor(ids), torch.arange(rows * 4.0).view(rows, 4), 0, -1, 0, 0, 0)


def test_without_recording_calls_go_straight_to_the_provider() -> None:
    op = op_of("rms_norm")
    norm(3)
    assert op._order["cpu"] == [p for p in op.providers if p.unavailable("cpu") is None]
    with capture.record():
        norm(3)
        assert all(a.fn is not b.fn for a, b in zip(op._order["cpu"], op.providers[1:], strict=True))
    norm(3)
    assert all(any(p is q for q in op.providers) for p in op._order["cpu"])


def test_recording_changes_no_output() -> None:
    op, x = op_of("rms_norm"), torch.randn(5, 8)
    args = [x, torch.rand(8), 1e-6]
    plain, recorded = x.clone(), x.clone()
    out = op(*args, plain, None, True)
    with capture.record() as recording:
        assert torch.equal(op(*args, recorded, None, True), out)
    assert torch.equal(plain, recorded) and not torch.equal(plain, x)
    assert recording.ops == {"rms_norm": 1} and recording.calls == 1


def test_signatures_are_counted_with_all_arguments() -> None:
    with capture.record() as recording:
        for _ in range(3):
            norm(2)
        norm(7)
        norm(2, residual=True)
    data, tensors = recording.to_dict()
    found = data["ops"]["rms_norm"]
    assert (found["count"], found["signatures"], tensors) == (5, 3, {})
    assert [c["count"] for c in found["calls"]] == [3, 1, 1]
    names = ["x", "weight", "eps", "residual", "var_hidden_size", "cast_x_before_out_mul"]
    assert [a["name"] for a in found["calls"][0]["args"]] == names  # torch leaves out the defaults at the end
    assert found["calls"][0]["args"][0] == {
        "name": "x",
        "shape": [2, 8],
        "dtype": "float32",
        "strides": [8, 1],
    }
    assert found["calls"][0]["args"][3] == {"name": "residual", "value": None}


def test_views_of_one_tensor_stay_views() -> None:
    qkv = torch.randn(3, 16)
    with capture.record() as recording:
        op_of("rotary_emb")(
            torch.arange(3), qkv[:, :8], qkv[:, 8:12], 4, torch.randn(9, 4), True, True, False
        )
    (call,) = recording.to_dict()[0]["ops"]["rotary_emb"]["calls"]
    query, key = call["args"][1:3]
    assert (query["strides"], query["storage"]) == ([16, 1], [0, 0])
    assert (key["strides"], key["storage"]) == ([16, 1], [0, 8])


def test_integers_are_kept_as_before_the_call() -> None:
    with capture.record() as recording:
        ids = torch.tensor([4, 7, 4])
        table = torch.arange(200.0).view(50, 4)
        for _ in range(5):
            op_of("embedding")(ids, table, 0, -1, 0, 0, 0)
        ids += 1  # an engine's buffer, which the next step overwrites
        op_of("embedding")(ids, table, 0, -1, 0, 0, 0)
    data, tensors = recording.to_dict()
    (call,) = data["ops"]["embedding"]["calls"]
    assert [s["count"] for s in call["values"]] == [5, 1]
    assert [tensors[s["args"]["input_ids"]].tolist() for s in call["values"]] == [[4, 7, 4], [5, 8, 5]]
    assert len(tensors) == 2


def test_varying_numbers_are_values() -> None:
    args = [
        torch.randn(2, 2, 4),
        *torch.randn(2, 5, 4, 1, 4),
        torch.tensor([3, 6]),
        torch.tensor([[1, 0], [2, 3]]),
    ]
    with capture.record() as recording:
        for longest in (6, 8, 8):
            op_of("attention_decode")(*args, longest, 0.5)
    (call,) = recording.to_dict()[0]["ops"]["attention_decode"]["calls"]
    assert {"name": "max_seqlen_k", "dynamic": True} in call["args"]
    assert [(s["count"], s["args"]["max_seqlen_k"]) for s in call["values"]] == [(1, 6), (2, 8)]


def test_routing_weights_are_kept_and_activations_are_not() -> None:
    weights, ids = torch.rand(3, 2), torch.tensor([[0, 1], [1, 0], [0, 1]], dtype=torch.int32)
    with capture.record() as recording:
        op_of("fused_experts")(torch.randn(3, 8), torch.randn(2, 8, 8), torch.randn(2, 8, 4), weights, ids)
    data, tensors = recording.to_dict()
    (call,) = data["ops"]["fused_experts"]["calls"]
    kept = {name: tensors[ref] for name, ref in call["values"][0]["args"].items()}
    assert kept.keys() == {"topk_weights", "topk_ids"}
    assert torch.equal(kept["topk_weights"], weights) and torch.equal(kept["topk_ids"], ids)


def test_values_are_a_spread_and_dropped_ones_are_counted() -> None:
    with capture.record(values=4) as recording:
        for i in range(50):
            look_up([i, 0])
    data, tensors = recording.to_dict()
    found = data["ops"]["embedding"]
    kept = sorted(int(t[0]) for t in tensors.values())
    assert len(kept) == 4 and kept != [0, 1, 2, 3] and kept[-1] > 12
    assert found["count"] == 50 and found["dropped"] == {"signatures": 0, "calls": 0, "value_sets": 46}


def test_budget_and_tensor_size_limit() -> None:
    with capture.record(budget=64, tensor=48) as recording:
        for n in (1, 2, 3, 20):  # 8, 16, 24 and 160 bytes of ids
            look_up([3] * n)
            look_up([5] * n)
    data, tensors = recording.to_dict()
    assert sum(t.numel() * 8 for t in tensors.values()) <= 64
    by_size = {c["args"][0]["shape"][0]: c for c in data["ops"]["embedding"]["calls"]}
    # One of each, then a second of the first
    assert [len(by_size[n]["values"]) for n in (1, 2, 3)] == [2, 1, 1]
    assert by_size[20] == {**by_size[20], "values": [], "too_large": ["input_ids"]}


def test_unused_share_goes_to_other_ops() -> None:
    with capture.record(budget=1000) as recording:
        look_up([1])
        op_of("rotary_emb")(
            torch.arange(100), torch.randn(100, 4), None, 4, torch.randn(128, 4), True, True, False
        )
    _, tensors = recording.to_dict()
    assert sorted(t.numel() for t in tensors.values()) == [1, 100]


def test_frequent_signatures_stay_and_some_large_ones() -> None:
    def calls(count: int, rows: int) -> Calls:
        return Calls([{"name": "x", "shape": [rows, 4]}], count)

    made = {str(i): calls(10, i + 1) for i in range(20)} | {"often": calls(99, 1), "prompt": calls(2, 5000)}
    kept = choose(made, 8)
    rows = [c.args[0]["shape"][0] for c in kept]
    assert len(kept) == 8 and kept[0] is made["often"] and 5000 in rows
    assert rows[1] == 1 and 10 < rows[5] < 5000  # of equals, some from all over the run
    assert choose({"one": made["often"]}, 8) == [made["often"]]


def test_candidates_and_threads_are_recorded() -> None:
    op = op_of("rms_norm")
    op.set_candidate(lambda x, *rest: x * 2)
    try:
        with capture.record() as recording:
            threads = [threading.Thread(target=norm, args=(3,)) for _ in range(8)]
            for t in threads:
                t.start()
            for t in threads:
                t.join()
            assert torch.equal(norm(3), 2 * torch.randn(3, 8, generator=torch.Generator().manual_seed(3)))
    finally:
        op.set_candidate(None)
    assert recording.ops == {"rms_norm": 9}


def test_counter_reset_loses_no_recorded_call() -> None:
    op = op_of("rms_norm")
    with capture.record() as recording:
        norm(3)
        op.reset()  # a patch does this
        norm(3)
    assert recording.calls == 2


def test_second_recording_is_an_error() -> None:
    with capture.record(), pytest.raises(RuntimeError, match="already"):
        capture.start()
    with pytest.raises(ZeroDivisionError), capture.record():
        raise ZeroDivisionError
    with pytest.raises(RuntimeError, match="no recording"):
        capture.stop()


def test_save_writes_capture_and_values(tmp_path: Path) -> None:
    import json

    from safetensors.torch import load_file

    with capture.record() as recording:
        look_up([4, 2])
        norm(2)
    recording.modules = [{"cls": "a:B", "args": {}, "count": 2}]
    data = recording.save(tmp_path / "made" / "here", {"model": "m", "scenario": "s"})
    assert json.loads((tmp_path / "made" / "here" / "capture.json").read_text()) == data
    assert data["model"] == "m" and data["modules"] == recording.modules
    (tensor,) = load_file(tmp_path / "made" / "here" / "values.safetensors").values()
    assert tensor.tolist() == [4, 2]


# Constructors


class Inner(nn.Module):
    def __init__(self, size: int, kind: torch.dtype = torch.float32, *, prefix: str = "") -> None:
        super().__init__()
        self.linear = nn.Linear(size, size)


class Outer(Inner):
    def __init__(self, config: object, layers: int, size: int = 4) -> None:
        super().__init__(size, prefix="outer")
        self.layers = nn.ModuleList(Inner(size, prefix=f"model.layers.{i}.mlp") for i in range(layers))


class Wrapped(nn.Module):
    def __init__(self, size: int, layer_id: int) -> None:
        super().__init__()


def _wrapper(self: nn.Module, *args: object, **kwargs: object) -> None:
    Wrapped.stock(self, *args, **kwargs)  # type: ignore[attr-defined]


def test_constructors_are_recorded_with_counts() -> None:
    stock = nn.Module.__init__
    with capture.record_modules() as modules:
        model = Outer(config=object(), layers=3)
        Inner(9)  # gone at once
    assert nn.Module.__init__ is stock
    here = __name__
    assert modules.rows() == [
        {
            "cls": f"{here}:Outer",
            "args": {"config": {"object": "builtins:object"}, "layers": 3, "size": 4},
            "count": 1,
        },
        {
            "cls": f"{here}:Inner",
            "args": {"size": 4, "kind": "float32", "prefix": "model.layers.*.mlp"},
            "count": 3,
        },
    ]
    assert modules.rows(model.layers) == modules.rows()[1:]


def test_wrapped_constructors_are_recorded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Wrapped, "stock", Wrapped.__init__, raising=False)
    monkeypatch.setattr(Wrapped, "__init__", _wrapper)
    with capture.record_modules() as modules:
        made = [Wrapped(3, layer_id=i) for i in range(2)]
    assert modules.rows() == [
        {"cls": f"{__name__}:Wrapped", "args": {"size": 3, "layer_id": "*"}, "count": len(made)}
    ]


def test_limits_match_record_arguments() -> None:
    with capture.record() as recording:
        pass
    assert recording.limits == capture.Limits() and dataclasses.asdict(recording.limits)["budget"] == 1 << 20
