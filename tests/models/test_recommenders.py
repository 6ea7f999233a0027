"""DLRMv2 and LightGCN: against their papers' equations in float64, key names, and configs and inputs that are refused.

tests/integrations/recommenders compares them with torchrec and torch_geometric.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import save_file
from support import recommenders
from torch.utils._python_dispatch import TorchDispatchMode

from fastkernels import LLM
from fastkernels.engine.execution.runners.score import ScoreStep
from fastkernels.models.common.checkpoints.checkpoint import CheckpointError
from fastkernels.models.common.plans import build
from fastkernels.models.recsys import lightgcn


def scores(llm: LLM, samples: list[dict[str, Any]]) -> torch.Tensor:
    return torch.tensor([o.outputs.score for o in llm.score(samples, use_tqdm=False)], dtype=torch.float64)


def click(state: dict[str, torch.Tensor], sample: dict[str, Any], mean: bool) -> torch.Tensor:
    """DLRM with a low-rank cross network, as the papers write it, of one sample in float64."""
    p = {key: value.double() for key, value in state.items()}

    def mlp(x: torch.Tensor, prefix: str, layers: int) -> torch.Tensor:
        for i in range(layers):
            x = (p[f"{prefix}.{i}._linear.weight"] @ x + p[f"{prefix}.{i}._linear.bias"]).clamp_min(0)
        return x

    x = [mlp(torch.tensor(sample["dense"], dtype=torch.float64), "dense_arch.model._mlp", 2)]
    for name, table in (("f0", "t0"), ("f3", "t0"), ("f1", "t1"), ("t2", "t2")):
        rows = p[f"sparse_arch.embedding_bag_collection.embedding_bags.{table}.weight"]
        ids = sample["sparse"].get(name, [])
        x.append(rows[ids].sum(0) / (max(len(ids), 1) if mean else 1))
    first = now = torch.cat(x)
    for i in range(2):
        inner = p[f"inter_arch.crossnet.W_kernels.{i}"] @ (p[f"inter_arch.crossnet.V_kernels.{i}"] @ now)
        now = first * (inner + p[f"inter_arch.crossnet.bias.{i}"]) + now
    out = mlp(now, "over_arch.model.0._mlp", 2)
    return (p["over_arch.model.1.weight"] @ out + p["over_arch.model.1.bias"]).sigmoid()[0]


@pytest.mark.parametrize("pooling", ["sum", "mean"])
def test_dlrm_equals_its_equations(tmp_path: Path, pooling: str) -> None:
    """Batches of several sizes, and a checkpoint of torchrec's DLRMTrain, whose keys begin with `model.`"""
    state = recommenders.dlrm(tmp_path, "model.", pooling=pooling)
    samples = recommenders.impressions(13)
    want = torch.stack([click(state, sample, pooling == "mean") for sample in samples])
    for size in (1, 5, 256):
        with LLM(str(tmp_path), device="cpu", max_num_seqs=size) as llm:
            torch.testing.assert_close(scores(llm, samples), want, atol=1e-5, rtol=1e-5)


def test_lightgcn_equals_its_equations(tmp_path: Path) -> None:
    made = recommenders.lightgcn(tmp_path)
    matrix = torch.zeros(52, 52, dtype=torch.float64)
    matrix.index_put_(
        (made["edge_index"][1], made["edge_index"][0]), torch.tensor(1.0).double(), accumulate=True
    )
    degrees = matrix.sum(1)
    factor = torch.where(degrees > 0, degrees.clamp_min(1) ** -0.5, 0)
    matrix = factor[:, None] * matrix * factor
    x = made["embedding.weight"].double()
    total = sum(
        (a * torch.linalg.matrix_power(matrix, i) @ x for i, a in enumerate(made["alpha"].double())), 0 * x
    )
    with LLM(str(tmp_path), device="cpu") as llm:
        for user in range(12):
            want = total[user] @ total[12:].T
            seen = matrix[12:, user] > 0
            left = want.masked_fill(seen, -math.inf).sort(descending=True)
            asked = [{"user": user, "k": 40}, {"user": user, "items": list(range(40))}, {"user": user}]
            best, every, usual = (o.outputs for o in llm.score(asked, use_tqdm=False))
            assert best.item_ids == left.indices[: 40 - int(seen.sum())].tolist()
            assert every.item_ids is None and len(usual.item_ids) == 20
            torch.testing.assert_close(torch.tensor(every.scores).double(), want, atol=1e-5, rtol=1e-5)
            found = torch.tensor(best.scores).double()
            torch.testing.assert_close(found, left.values[: len(found)], atol=1e-5, rtol=1e-5)


class Counted(TorchDispatchMode):
    """Counts the operations that are called."""

    def __init__(self) -> None:
        super().__init__()
        self.calls = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.calls += 1
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("asked", [{"k": 5}, {"k": 5, "exclude_seen": False}, {"items": [3, 0, 39]}])
def test_many_users_take_one_copy_and_the_operations_of_one(tmp_path: Path, asked: dict[str, Any]) -> None:
    recommenders.lightgcn(tmp_path)
    with LLM(str(tmp_path), device="cpu") as llm:
        runner = llm.llm_engine.runner
        copied: list[np.ndarray] = []

        def place(array: np.ndarray) -> torch.Tensor:
            copied.append(array)
            return torch.from_numpy(array)

        def run(users: range) -> tuple[list[Any], int]:
            samples = [runner.model.read({"user": user, **asked}) for user in users]
            with torch.inference_mode(), Counted() as counted:
                found = ScoreStep(runner.model.score(samples, [True] * len(samples), place)).result()
            return found, counted.calls

        one, few = run(range(1))
        many, same = run(range(12))
        assert few == same <= 25, (few, same)
        assert [array.dtype for array in copied] == [np.int32] * 2
        for (scores, ids), (own, own_ids) in zip(many, one, strict=False):
            np.testing.assert_allclose(scores, own, rtol=1e-5)
            assert np.array_equal(ids, own_ids)


def test_large_requests_are_not_joined(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    recommenders.lightgcn(tmp_path)
    asked = [
        {"user": [1, 2], "items": [[3, 0, 39], [5, 6]]},
        {"user": 4, "k": 7},
        {"user": [3], "items": [[8]]},
    ]
    with LLM(str(tmp_path), device="cpu") as llm:
        want = [llm.score([one], use_tqdm=False)[0].outputs for one in asked]
        monkeypatch.setattr(lightgcn, "LARGE", 1)
        for one, before in zip(asked, want, strict=True):
            (found,) = llm.score([one], use_tqdm=False)
            assert (found.outputs.scores, found.outputs.item_ids) == (before.scores, before.item_ids)


def test_products_of_short_floats_are_summed_in_float32(tmp_path: Path) -> None:
    recommenders.lightgcn(tmp_path)
    with LLM(str(tmp_path), device="cpu", dtype="bfloat16") as llm:
        final = llm.llm_engine.runner.model.final.float()
        for counts in ([20, 20], [1, 39]):  # as one array, and not
            users, every = [1] * counts[0] + [2] * counts[1], list(range(40))
            items = [every[: counts[0]], every[counts[0] :]]
            (found,) = llm.score([{"user": [1, 2], "items": items}], use_tqdm=False)
            want = (final[users] * final[12:]).sum(-1)
            assert found.outputs.scores == pytest.approx(want.tolist(), abs=1e-5)


@pytest.mark.parametrize("made", [list, np.array, torch.tensor])
def test_many_rows_of_one_request_equal_many_requests(tmp_path: Path, made: Callable[[Any], Any]) -> None:
    """Lists, arrays and tensors; next to requests of one row, in a step and alone."""
    recommenders.dlrm(tmp_path / "dlrm")
    each = recommenders.impressions(6)
    for sample in each:  # bags of one size fit into an array
        sample["sparse"] = {"f0": [sample["dense"][0] > 0, 3], "t2": [7, 299]}
        sample["sparse"] = {name: [int(i) for i in ids] for name, ids in sample["sparse"].items()}
    rows = {
        "dense": made([s["dense"] for s in each]),
        "sparse": {name: made([s["sparse"][name] for s in each]) for name in ("f0", "t2")},
    }
    with LLM(str(tmp_path / "dlrm"), device="cpu") as llm:
        want = [o.outputs.score for o in llm.score(each, use_tqdm=False)]
        for asked in ([rows], [each[1], rows, each[5]]):
            found = llm.score(asked, use_tqdm=False)[len(asked) // 2].outputs.scores
            assert found == pytest.approx(want, abs=1e-6)
    recommenders.lightgcn(tmp_path / "gcn")
    users, items = [3, 11, 0], [[1, 2], [39, 0], [5, 5]]
    with LLM(str(tmp_path / "gcn"), device="cpu") as llm:
        apart = [{"user": u, "items": i} for u, i in zip(users, items, strict=True)]
        want = [s for o in llm.score(apart, use_tqdm=False) for s in o.outputs.scores]
        together = {"user": made(users), "items": made(items)}
        mixed = [{"user": 1, "k": 2}, together, {"user": 2, "items": [1, 2, 3]}]
        for asked in ([together], mixed):
            found = llm.score(asked, use_tqdm=False)
            assert found[len(asked) // 2].outputs.scores == pytest.approx(want, abs=1e-6)
        assert len(found[0].outputs.item_ids) == 2 and len(found[2].outputs.scores) == 3


def test_ids_may_be_tensors_of_one_number(tmp_path: Path) -> None:
    recommenders.lightgcn(tmp_path)
    with LLM(str(tmp_path), device="cpu") as llm:
        plain, given = (
            llm.score([{"user": made([1, 2]), "items": [made(3), made(4)]}], use_tqdm=False)[0].outputs.scores
            for made in (lambda x: x, torch.tensor)
        )
    assert given == plain


def test_rows_of_a_request_may_have_any_number_of_ids(tmp_path: Path) -> None:
    recommenders.dlrm(tmp_path)
    each = recommenders.impressions(7)
    names = ("f0", "f3", "f1", "t2")
    rows = {
        "dense": [s["dense"] for s in each],
        "sparse": {name: [s["sparse"].get(name, []) for s in each] for name in names},
    }
    with LLM(str(tmp_path), device="cpu") as llm:
        want = [o.outputs.score for o in llm.score(each, use_tqdm=False)]
        (found,) = llm.score(rows, use_tqdm=False)
    assert found.outputs.scores == pytest.approx(want, abs=1e-6)


def test_inputs_of_graphs_have_few_sizes(tmp_path: Path) -> None:
    """Rows and ids are padded to powers of two, which changes no score."""
    recommenders.dlrm(tmp_path)
    each = recommenders.impressions(5)
    seen = []

    def graphs(key: str, function: Any, inputs: Any) -> torch.Tensor:
        seen.append([len(t) for t in inputs])
        return function(*inputs)

    with LLM(str(tmp_path), device="cpu") as llm:
        want = [o.outputs.score for o in llm.score(each, use_tqdm=False)]
        llm.llm_engine.runner.model.graphs = graphs
        found = [o.outputs.score for o in llm.score(each, use_tqdm=False)]
    assert found == pytest.approx(want, abs=1e-6)
    ((rows, ids, ends),) = seen
    assert rows == 8 and ends == 8 * 4 + 1 and ids.bit_count() == 1


class Shared:
    """Runs functions as ForwardGraphs does: outputs of all keys share memory, and the next call overwrites them."""

    def __init__(self) -> None:
        self.seen: list[Any] = []
        self._outputs: list[torch.Tensor] = []

    def __call__(self, key: Any, function: Any, inputs: Any) -> Any:
        self.seen.append((key, [len(t) for t in inputs]))
        for output in self._outputs:
            output.fill_(7)
        made = function(*inputs)
        self._outputs = [made] if isinstance(made, torch.Tensor) else list(made)
        return made


NODES: dict[str, list[dict[str, Any]]] = {
    "items": [{"user": 1, "items": [3, 0, 39, 4, 4]}],
    "users": [
        {"user": [1, 2, 5], "items": [[3, 0, 39], [5, 6, 7], [1, 1, 2]]},
        {"user": 4, "items": [8, 9, 1]},
    ],
    "ragged": [{"user": 1, "items": [3, 0]}, {"user": 2, "items": [8]}],
    "best": [{"user": 1, "k": 7}, {"user": 2, "k": 40}, {"user": 3, "exclude_seen": False}],
    "all": [{"user": 3, "k": 4, "exclude_seen": False}],
    "both": [{"user": 3, "items": [1, 2, 3]}, {"user": 3, "k": 4}, {"user": 1, "items": [9, 8, 7]}],
}


@pytest.mark.parametrize("name", NODES)
def test_lightgcn_scores_alike_in_graphs(tmp_path: Path, name: str) -> None:
    recommenders.lightgcn(tmp_path)
    with LLM(str(tmp_path), device="cpu") as llm:
        want = [o.outputs for o in llm.score(NODES[name], use_tqdm=False)]
        graphs = llm.llm_engine.runner.model.graphs = Shared()
        found = [o.outputs for o in llm.score(NODES[name], use_tqdm=False)]
    for one, other in zip(found, want, strict=True):
        assert one.item_ids == other.item_ids
        assert one.scores == pytest.approx(other.scores, abs=1e-6)
    assert len(graphs.seen) == {"ragged": 0, "both": 2}.get(name, 1)


def test_requests_of_lightgcn_need_few_graphs(tmp_path: Path) -> None:
    """A graph serves many numbers of items, and of items that a user has seen. New weights need others."""
    recommenders.lightgcn(tmp_path)
    with LLM(str(tmp_path), device="cpu") as llm:
        model = llm.llm_engine.runner.model
        graphs = model.graphs = Shared()
        for n in (17, 20, 32):
            llm.score([{"user": 1, "items": list(range(n))}], use_tqdm=False)
        assert len({str(one) for one in graphs.seen}) == 1
        for user in range(12):
            llm.score([{"user": user, "k": 3}], use_tqdm=False)
        assert len({str(one) for one in graphs.seen}) == 2
        kept = model.final
        model.refresh()
        llm.score([{"user": 1, "k": 3}], use_tqdm=False)
        assert len({str(one) for one in graphs.seen}) == 3
        for n in (3, 4):
            llm.score([{"user": [1, 2], "items": [[*range(n)]] * 2}], use_tqdm=False)
        assert len({str(key) for key, _ in graphs.seen}) == 5
        assert torch.equal(model.final, kept)


@pytest.mark.gpu
@pytest.mark.parametrize("name", NODES)
def test_graphs_of_lightgcn_leave_scores(tmp_path: Path, name: str) -> None:
    recommenders.lightgcn(tmp_path)
    with LLM(str(tmp_path), device="cpu") as llm:
        want = [o.outputs for o in llm.score(NODES[name], use_tqdm=False)]
    with LLM(str(tmp_path), device="cuda") as llm:
        for _ in range(4):
            found = [o.outputs for o in llm.score(NODES[name], use_tqdm=False)]
            for one, other in zip(found, want, strict=True):
                assert one.item_ids == other.item_ids
                assert one.scores == pytest.approx(other.scores, abs=1e-4)
        replays = llm.llm_engine.runner.model.graphs.replays
        assert replays == 3 * {"ragged": 0, "both": 2}.get(name, 1)


@pytest.mark.gpu
def test_graphs_of_recommenders_leave_scores(tmp_path: Path) -> None:
    """The first call of a size is eager, the second captures, and the third replays."""
    recommenders.dlrm(tmp_path)
    each = recommenders.impressions(5)
    with LLM(str(tmp_path), device="cpu") as llm:
        want = [o.outputs.score for o in llm.score(each, use_tqdm=False)]
    with LLM(str(tmp_path), device="cuda") as llm:
        for _ in range(4):
            found = [o.outputs.score for o in llm.score(each, use_tqdm=False)]
            assert found == pytest.approx(want, abs=1e-4)
        assert llm.llm_engine.runner.model.graphs.replays == 3


@pytest.mark.parametrize("name", ["dlrm", "lightgcn"])
def test_random_weights_need_no_checkpoint(tmp_path: Path, name: str) -> None:
    """Nor a graph. The same seed gives the same scores."""
    config = {"dlrm": recommenders.DLRM, "lightgcn": recommenders.LIGHTGCN}[name]
    (tmp_path / "config.json").write_text(json.dumps(config))
    asked = recommenders.impressions(3) if name == "dlrm" else [{"user": 1, "items": [2, 3]}]
    found = []
    for _ in range(2):
        with LLM(str(tmp_path), device="cpu", load_format="dummy") as llm:
            found.append([o.outputs.scores for o in llm.score(asked, use_tqdm=False)])
    assert found[0] == found[1] and all(math.isfinite(x) for row in found[0] for x in row)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"dense_in_features": 0}, "config.dense_in_features=0 is not supported"),
        ({"dcn_low_rank_dim": None}, "config.dcn_low_rank_dim=None is not supported"),
        ({"pooling": "max"}, "config.pooling='max' is not one of sum, mean"),
        ({"tables": []}, r"config.tables=\[\] is not a list of tables"),
        ({"tables": [{"name": "t0"}]}, "is not a table with `name`, `num_embeddings` above 0"),
        ({"tables": [{"name": "a.b", "num_embeddings": 3}]}, "is not a table with `name`"),
        ({"tables": [{"name": "t", "num_embeddings": 3}] * 2}, "has the table 't' twice"),
        (
            {"tables": [{"name": n, "num_embeddings": 3, "feature_names": ["f"]} for n in "ab"]},
            "has the feature 'f' twice",
        ),
        ({"dense_arch_layer_sizes": [16, 9]}, r"\[16, 9\] must end with embedding_dim 8"),
        ({"over_arch_layer_sizes": [4, 2]}, r"\[4, 2\] must end with 1"),
        ({"over_arch_layer_sizes": "1"}, "config.over_arch_layer_sizes='1' is not supported"),
    ],
)
def test_wrong_dlrm_config_is_refused(tmp_path: Path, changes: dict[str, Any], message: str) -> None:
    (tmp_path / "config.json").write_text(json.dumps({**recommenders.DLRM, **changes}))
    with pytest.raises(CheckpointError, match=rf"config.json cannot be used: .*{message}"):
        build.load_config(tmp_path)


def test_wrong_keys_and_shapes_are_named(tmp_path: Path) -> None:
    state = recommenders.dlrm(tmp_path)
    bags = "sparse_arch.embedding_bag_collection.embedding_bags"
    moved = {**state, f"{bags}.t9.weight": state.pop(f"{bags}.t1.weight")}
    del moved[f"{bags}.t1.weight"]
    save_file(moved, tmp_path / "model.safetensors")
    with pytest.raises(CheckpointError, match=rf"missing from it: {bags}\.t1\.weight; .* {bags}\.t9\.weight"):
        LLM(str(tmp_path), device="cpu")
    recommenders.dlrm(tmp_path)
    config = {**recommenders.DLRM, "dcn_low_rank_dim": 3}
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(CheckpointError, match=r"V_kernels\.0 of shape \(4, 40\) does not fit"):
        LLM(str(tmp_path), device="cpu")


@pytest.mark.parametrize(
    ("graph", "message"),
    [
        (None, "has no graph.safetensors: LightGCN needs `edge_index`"),
        ({"edges": torch.zeros(2, 3)}, "edge_index must be .* of int64, got no tensor"),
        ({"edge_index": torch.zeros(2, 3)}, r"got \[2, 3\] of torch.float32"),
        ({"edge_index": torch.tensor([[0, 52], [52, 0]])}, "has the node 52, and the model has 52: 0 to 51"),
        ({"edge_index": torch.tensor([[0, -3], [1, 0]])}, "has the node -3"),
        (
            {"edge_index": torch.tensor([[0], [1]]), "edge_weight": torch.ones(2)},
            r"edge_weight must be \[1\] of numbers, got \[2\]",
        ),
        (
            {"edge_index": torch.tensor([[0, 1], [13, 14]]), "edge_weight": torch.tensor([1, float("nan")])},
            "is damaged: NaN or infinity in edge_weight",
        ),
    ],
)
def test_wrong_graphs_are_refused(tmp_path: Path, graph: Any, message: str) -> None:
    recommenders.lightgcn(tmp_path)
    (tmp_path / "graph.safetensors").unlink()
    if graph is not None:
        save_file(graph, tmp_path / "graph.safetensors")
    with pytest.raises(CheckpointError, match=message):
        LLM(str(tmp_path), device="cpu")


def test_graph_without_edges_scores_by_own_embeddings(tmp_path: Path) -> None:
    made = recommenders.lightgcn(tmp_path)
    save_file({"edge_index": torch.zeros(2, 0, dtype=torch.int64)}, tmp_path / "graph.safetensors")
    own = made["alpha"][0] * made["embedding.weight"]
    with LLM(str(tmp_path), device="cpu") as llm:
        (found,) = llm.score({"user": 4, "items": [0, 39]}, use_tqdm=False)
    torch.testing.assert_close(
        torch.tensor(found.outputs.scores), own[12:][[0, 39]] @ own[4], atol=1e-5, rtol=1e-5
    )


DENSE = [0.0] * 5
BAD = {
    "dlrm": [
        ("text", "must be an object with dense, sparse"),
        ({"dense": DENSE, "ids": []}, "unknown field 'ids'; known: dense, sparse"),
        ({"dense": [1.0]}, "needs `dense`, a list of 5 numbers"),
        ({"dense": [*DENSE[1:], math.nan]}, "has nan in `dense`, which is no finite number"),
        ({"dense": [*DENSE[1:], True]}, "has True in `dense`"),
        ({"dense": DENSE, "sparse": [1]}, r"needs `sparse`, ids by feature, got \[1\]"),
        ({"dense": DENSE, "sparse": {"f9": 1}}, "unknown feature 'f9'; known: f0, f3, f1, t2"),
        (
            {"dense": DENSE, "sparse": {"f1": 7}},
            "the id 7 of feature 'f1', and table 't1' has 7 rows: 0 to 6",
        ),
        ({"dense": DENSE, "sparse": {"f1": [0, -1]}}, "the id -1 of feature 'f1'"),
        ({"dense": DENSE, "sparse": {"f1": [1.5]}}, "has 1.5 as an id of feature 'f1', which is no integer"),
        ({"dense": DENSE, "sparse": {"t2": [1] * 301}}, "has 301 ids, and a request may have 300"),
        ({"dense": DENSE, "sparse": {"t2": [True]}}, "has True as an id of feature 't2'"),
        ({"dense": DENSE, "sparse": {"t2": 1 << 70}}, "the id 1180591620717411303424 of feature 't2'"),
        ({"dense": [1 << 2000, *DENSE[1:]]}, "which is no finite number in float32"),
        ({"dense": [DENSE] * 301}, "has 301 ids, and a request may have 300"),
        ({"dense": [DENSE, DENSE[1:]]}, "needs `dense`, a list of 5 numbers"),
        (
            {"dense": [DENSE], "sparse": {"f1": [1, 2]}},
            "has 1 rows and needs as many entries in feature 'f1', got 2",
        ),
        ({"dense": [DENSE, DENSE], "sparse": {"f1": [1, [7]]}}, "the id 7 of feature 'f1'"),
        (
            {"dense": [DENSE], "sparse": {"f1": np.zeros((1, 1, 1), int)}},
            "an array of 3 dimensions in feature 'f1'",
        ),
        ({"dense": [DENSE], "sparse": {"f1": np.zeros((1, 1))}}, "has 0.0 as an id of feature 'f1'"),
        ({"dense": np.zeros((2, 5, 3))}, "needs `dense`, a list of 5 numbers"),
        ({"dense": np.array(1.0)}, "needs `dense`, a list of 5 numbers"),
        ({"dense": np.array([DENSE, [1]], object)}, "needs `dense`, a list of 5 numbers"),
        ({"dense": [DENSE], "sparse": {"f1": np.array(1)}}, "needs as many entries in feature 'f1', got 1"),
    ],
    "lightgcn": [
        ({}, "has None as an id of `user`"),
        ({"user": 12}, "the id 12 of `user`, and the table of users has 12 rows: 0 to 11"),
        ({"user": [1, 2]}, "needs one `user`, got 2"),
        ({"user": 0, "items": []}, "has no ids in `items`"),
        ({"user": [1, 2], "items": [3]}, "has 2 rows and needs as many entries in `items`, got 1"),
        ({"user": [1, 2], "items": [[3], []]}, "has no ids in `items`"),
        ({"user": [], "items": []}, "has no ids in `items`"),
        ({"user": 0, "items": [40]}, "the id 40 of `items`, and the table of items has 40 rows"),
        ({"user": 0, "items": [1], "k": 3}, "has `items`, which are scored as they are, and 'k'"),
        ({"user": 0, "k": 41}, "has k 41: it must be an integer from 1 to 40"),
        ({"user": 0, "k": 0}, "has k 0"),
        ({"user": 0, "exclude_seen": 1}, "has exclude_seen 1: it must be true or false"),
    ],
}


@pytest.mark.parametrize("name", BAD)
def test_wrong_inputs_are_refused(tmp_path: Path, name: str) -> None:
    getattr(recommenders, name)(tmp_path)
    with LLM(str(tmp_path), device="cpu", max_model_len=300) as llm:
        for given, message in BAD[name]:
            with pytest.raises(ValueError, match=message):
                llm.score([given], use_tqdm=False)
        with pytest.raises(ValueError, match="scores samples: it takes no documents"):
            llm.score([{}], ["a"])
        with pytest.raises(ValueError, match="samples must be a dict or a list of dicts, got 'a'"):
            llm.score("a")
        with pytest.raises(ValueError, match=re.escape("is for LLM.score and /v1/scores")):
            llm.embed("a")


@pytest.mark.parametrize(
    ("option", "message"),
    [
        ({"tensor_parallel_size": 2}, "tensor_parallel_size 2 is not supported for recommenders, only 1"),
        ({"num_blocks": 5}, "num_blocks applies to models that generate"),
        (
            {"max_model_len": 600_000},
            "max_num_batched_tokens 8192 allows 524288 ids, less than max_model_len 600000",
        ),
    ],
)
def test_options_of_other_models_are_refused(tmp_path: Path, option: dict[str, Any], message: str) -> None:
    recommenders.dlrm(tmp_path)
    with pytest.raises(ValueError, match=message):
        LLM(str(tmp_path), device="cpu", **option)
