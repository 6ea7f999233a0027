"""Ops of recommenders beyond their cases: PyTorch's results, ids out of range, NaN, isolated nodes, wrong shapes."""

from __future__ import annotations

import math
import os
import sys
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from support.kernels import ahead, warm

from fastkernels.core import registry
from fastkernels.core.dispatch import Op
from fastkernels.overrides.kit import overlap
from fastkernels.overrides.recsys.cases import bipartite, zipf
from fastkernels.overrides.recsys.cross_low_rank import cross_low_rank
from fastkernels.overrides.recsys.embedding_bag import _triton, embedding_bag, launch
from fastkernels.overrides.recsys.graph_propagate import graph_of, graph_propagate
from fastkernels.overrides.recsys.jagged import pooled_at_once
from fastkernels.overrides.recsys.top_k_scores import top_k_scores

PROVIDERS = ("torch", "reference")


def generator(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def results(op: Op, *args: Any) -> dict[str, Any]:
    """The results of the providers that run on a CPU, by name."""
    supporting = (p for p in op.providers if p.supports is None or not p.supports(*args))
    found = {p.name: p.fn(*args) for p in supporting if p.name in PROVIDERS}
    assert len(found) == 2
    return found


def every(op: Op, *args: Any) -> list[Any]:
    """The results of all providers that run on a CPU, once they are compared with each other."""
    found = list(results(op, *args).values())
    torch.testing.assert_close(found[0], found[1], atol=1e-5, rtol=1e-5, equal_nan=True)
    return found


bags = st.lists(st.lists(st.integers(-2, 9), max_size=6), min_size=1, max_size=4)


@given(st.lists(bags, min_size=1, max_size=3), st.booleans(), st.booleans(), st.integers(0, 99))
@settings(max_examples=40)
def test_bags_of_any_ids_equal_their_sums(features: Any, mean: bool, weighted: bool, seed: int) -> None:
    """Tables of 3, 1 and 7 rows: an id beyond its table adds 0, and counts in a mean."""
    batch, sizes = min(map(len, features)), (3, 1, 7)[: len(features)]
    features = [bags[:batch] for bags in features]
    weight = torch.randn(11, 5, generator=generator(seed))
    flat = [i for bags in features for bag in bags for i in bag]
    ids = torch.tensor(flat, dtype=torch.int64)
    ends = torch.tensor([0, *(len(bag) for bags in features for bag in bags)]).cumsum(0)
    rows = torch.tensor(sizes)
    starts = rows.cumsum(0) - rows
    weighted = weighted and not mean
    factors = torch.rand(len(flat), generator=generator(seed)) if weighted else None
    found = every(embedding_bag, ids, ends, weight, starts, rows, factors, mean)[0]
    at = 0
    for f, bags in enumerate(features):
        for b, bag in enumerate(bags):
            want = torch.zeros(5)
            for i in bag:
                if 0 <= i < sizes[f]:
                    want += weight[starts[f] + i] * (1 if factors is None else factors[at])
                at += 1
            want = want / max(len(bag), 1) if mean else want
            torch.testing.assert_close(found[b, 5 * f : 5 * f + 5], want, atol=1e-5, rtol=1e-5)


def test_nan_of_a_row_stays_in_its_bags() -> None:
    """Also the first row, which stands in for ids beyond the table."""
    weight = torch.ones(4, 3)
    weight[0] = math.nan
    ids, ends, zero = torch.tensor([1, 9, 0, 2]), torch.tensor([0, 2, 3, 4]), torch.tensor([0])
    for found in every(embedding_bag, ids, ends, weight, zero, torch.tensor([4])):
        assert found.isnan().any(1).tolist() == [False, True, False]


INTERPRETED = """
import torch
from fastkernels.overrides.recsys.embedding_bag import launch, reference
tables = [torch.randn(n, 24) for n in (5, 9, 2)]
ids, ends = torch.tensor([4, 0, 8, 8, 1, 5]), torch.tensor([0, 1, 2, 2, 5, 6, 6])
distances = torch.tensor([(t.data_ptr() - tables[0].data_ptr()) // 4 for t in tables])
rows = torch.tensor([len(t) for t in tables])
for factors, mean in ((None, False), (None, True), (torch.rand(6), False)):
    found = launch(ids, ends, tables[0], distances, rows, factors, mean, addresses=True)
    want = reference(ids, ends, torch.cat(tables), rows.cumsum(0) - rows, rows, factors, mean)
    torch.testing.assert_close(found, want)
from fastkernels.core import registry
from fastkernels.overrides.recsys import embedding_bag
embedding_bag.MANY = 1  # a warp for each bag
spec = registry.get("embedding_bag")
for case in (c for c in spec.cases if "odd" in c.tags):
    args = spec.inputs(case, "cpu", torch.Generator().manual_seed(1))
    want, close = reference(*args), spec.tolerance[case.dtype]
    torch.testing.assert_close(embedding_bag._triton(*args), want, atol=close.atol, rtol=close.rtol)
"""


def test_kernel_of_separate_tables_and_of_many_bags() -> None:
    env = {**os.environ, "TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"}
    done = warm.run(["-c", INTERPRETED], env, timeout=200)
    assert done.returncode == 0, done.stderr[-3000:]


def test_kernel_of_many_half_bags_has_wide_accesses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(overlap, "_quick", False)  # each launch is Triton's own
    monkeypatch.setattr(sys.modules[launch.__module__], "MANY", 1)
    ids, zero = torch.arange(40), torch.zeros(1, dtype=torch.int64)
    weight = torch.empty(40, 128, dtype=torch.float16)
    (kernel,) = ahead.launched(lambda: _triton(ids, torch.arange(0, 41, 8), weight, zero, zero + 40))
    ptx = ahead.compile_for(kernel, 90).asm["ptx"]
    assert "ld.global.v4.b32" in ptx and "st.global.v2.b32" in ptx and ".global.b16" not in ptx
    assert "bar.sync" not in ptx  # a bag is the work of one warp


def collection(device: str, mode: str = "sum", weighted: bool = False) -> Any:
    """As much of torchrec's collection and input as pooled_at_once reads."""
    made = [torch.nn.EmbeddingBag(n, 24, mode=mode, device=device) for n in (5, 9)]
    ids, ends = torch.tensor([4, 0, 8, 8], device=device), torch.tensor([0, 1, 1, 3, 4], device=device)
    whole = SimpleNamespace(values=lambda: ids, offsets=lambda: ends, weights=lambda: ids / 8)
    module = torch.nn.Module()
    module._is_weighted = weighted  # type: ignore[assignment]
    return SimpleNamespace(module=module, tables=made, whole=whole)


def test_one_kernel_is_for_a_gpu() -> None:
    assert pooled_at_once(embedding_bag, collection("cpu")) is None


@pytest.mark.gpu
@pytest.mark.parametrize(("mode", "weighted"), [("sum", False), ("mean", False), ("sum", True)])
def test_one_kernel_equals_a_kernel_for_each_table(mode: str, weighted: bool) -> None:
    made = collection("cuda", mode, weighted)
    ids, ends = made.whole.values(), made.whole.offsets()
    weights = made.whole.weights() if weighted else None
    before = embedding_bag.calls
    with torch.inference_mode():
        found = pooled_at_once(embedding_bag, made)
        assert found is not None and embedding_bag.calls == before + 1
        for f, table in enumerate(made.tables):
            rows = torch.tensor([len(table.weight)], device="cuda")
            given = ids, ends[2 * f : 2 * f + 3], table.weight, rows * 0, rows, weights, mode == "mean"
            torch.testing.assert_close(found[:, 24 * f : 24 * f + 24], embedding_bag(*given))
        made.tables[1].weight = torch.nn.Parameter(torch.zeros_like(made.tables[1].weight))  # another address
        assert not pooled_at_once(embedding_bag, made)[:, 24:].any()


def test_layers_in_a_row_equal_a_cross_network() -> None:
    x0 = torch.randn(6, 10, generator=generator())
    x = x0
    for i in range(3):
        v, w, b = (torch.randn(s, generator=generator(i)) for s in ((4, 10), (10, 4), (10,)))
        want = x0 * (x @ v.T @ w.T + b) + x
        torch.testing.assert_close(every(cross_low_rank, x0, x, v, w, b)[0], want, atol=1e-4, rtol=1e-4)
        x = want


@given(st.integers(1, 12), st.integers(0, 40), st.integers(0, 3), st.integers(0, 99))
@settings(max_examples=30)
def test_propagation_equals_dense_products(nodes: int, edges: int, layers: int, seed: int) -> None:
    """Isolated nodes have 0; parallel edges add up."""
    made = generator(seed)
    edge_index = torch.randint(nodes, (2, edges), generator=made)
    x, alpha = torch.randn(nodes, 3, generator=made), torch.rand(layers + 1, generator=made)
    graph = graph_of(edge_index, nodes)
    dense = torch.zeros(nodes, nodes).index_put_(
        (edge_index[1], edge_index[0]), torch.ones(edges), accumulate=True
    )
    factor = torch.where(dense.sum(1) > 0, dense.sum(1) ** -0.5, 0)  # of an isolated source, too
    dense = factor[:, None] * dense * factor
    torch.testing.assert_close(every(graph_propagate, x, *graph)[0], dense @ x, atol=1e-5, rtol=1e-5)
    want = sum((a * torch.linalg.matrix_power(dense, i) @ x for i, a in enumerate(alpha)), torch.zeros(1))
    torch.testing.assert_close(every(graph_propagate, x, *graph, alpha)[0], want, atol=1e-5, rtol=1e-5)


def test_degrees_are_sums_of_weights() -> None:
    """As torch_geometric's gcn_norm; a node whose weights are 0 has the factor 0."""
    edges, weight = torch.tensor([[0, 1, 2, 0], [1, 0, 0, 2]]), torch.tensor([2.0, 0.5, 1.5, 0.0])
    graph = graph_of(edges, 4, weight)
    assert graph.crow_indices.tolist() == [0, 2, 3, 4, 4] and graph.col_indices.tolist() == [1, 2, 0, 0]
    torch.testing.assert_close(graph.values, torch.tensor([0.5 / 2, 0.0, 2.0 / 2, 0.0]))
    assert graph_of(edges, 4, weight, normalize=False).values.tolist() == [0.5, 1.5, 2.0, 0.0]


@given(st.integers(1, 5), st.integers(1, 70), st.integers(0, 30), st.integers(0, 99))
@settings(max_examples=40)
def test_best_items_are_sorted_without_seen_ones(users: int, items: int, seen: int, seed: int) -> None:
    """Scores of few values, many of them equal. Some seen ids are beyond the items."""
    made = generator(seed)
    u = torch.randint(-2, 3, (users, 2), generator=made).float()
    v = torch.randint(-2, 3, (items, 2), generator=made).float()
    k = int(torch.randint(1, items + 1, (1,), generator=made))
    ids = torch.randint(-1, items + 2, (seen,), generator=made)
    owner = torch.randint(users, (seen,), generator=made).sort().values
    ends = torch.cat((torch.zeros(1, dtype=torch.int64), torch.bincount(owner, minlength=users).cumsum(0)))
    found = results(top_k_scores, u, v, k, ends, ids)
    for user in range(users):
        hidden = set(ids[owner == user].tolist())
        left = sorted(
            (i for i in range(items) if i not in hidden), key=lambda i: (-float(u[user] @ v[i]), i)
        )[:k]
        want = [float(u[user] @ v[i]) for i in left] + [-math.inf] * (k - len(left))
        for name, (scores, best) in found.items():
            assert scores[user].tolist() == want
            chosen = best[user].tolist()
            assert [float(u[user] @ v[i]) if i >= 0 else -math.inf for i in chosen] == want
            assert not {*chosen[: len(left)]} & hidden and len({*chosen[: len(left)]}) == len(left)
            assert name == "torch" or chosen == left + [-1] * (k - len(left))


def test_nan_is_best_and_seen_or_infinitely_bad_left_out() -> None:
    items = torch.tensor([[1.0], [math.nan], [math.inf], [-math.inf], [math.nan]])
    ends, seen = torch.tensor([0, 1]), torch.tensor([1])
    scores, best = every(top_k_scores, torch.ones(1, 1), items, 5, ends, seen)[0]
    assert best.tolist() == [[4, 2, 0, -1, -1]] and scores[0, 0].isnan()


ROWS = torch.tensor([4])
WRONG = [
    (embedding_bag, (torch.zeros(2), torch.zeros(2), torch.zeros(4), ROWS, ROWS), r"weight must be \[rows, D\]"),
    (
        embedding_bag,
        (torch.zeros(2, dtype=torch.int64), torch.zeros(4), torch.zeros(8, 2), ROWS.repeat(2), ROWS.repeat(2)),
        r"offsets \[2 \* B \+ 1\], got \(2,\) and \(4,\)",
    ),
    (
        embedding_bag,
        (torch.zeros(2), torch.zeros(2), torch.zeros(4, 2), ROWS, ROWS, torch.zeros(2), True),
        "per_sample_weights are for sums: use mean=False",
    ),
    (
        embedding_bag,
        (torch.zeros(2, dtype=torch.int64), torch.tensor([0, 3]), torch.zeros(4, 2), ROWS * 0, ROWS),
        "offsets must grow from 0 to at most 2, the number of ids",
    ),
    (
        cross_low_rank,
        (torch.zeros(2, 3), torch.zeros(2, 3), torch.zeros(1, 4), torch.zeros(4, 1), torch.zeros(3)),
        r"v must be \[R, 3\], w \[3, R\] and bias \[3\], got \(1, 4\)",
    ),
    (
        graph_propagate,
        (torch.zeros(3, 2), torch.zeros(3), torch.zeros(0), torch.zeros(0)),
        r"crow_indices \[nodes \+ 1\], got \(3, 2\) and \(3,\)",
    ),
    (top_k_scores, (torch.zeros(1, 2), torch.zeros(3, 2), 4), "k must be from 1 to the number of items, 3, got 4"),
    (top_k_scores, (torch.zeros(1, 2), torch.zeros(3, 2), 1, ROWS), "seen and seen_starts belong together"),
]  # fmt: skip


@pytest.mark.parametrize(
    ("op", "args", "message"), WRONG, ids=[f"{w[0].name}-{i}" for i, w in enumerate(WRONG)]
)
def test_wrong_arguments_are_named(op: Op, args: Any, message: str) -> None:
    with pytest.raises(ValueError, match=f"{op.name}: .*{message}"):
        op(*args)


def test_synthetic_ids_have_the_skew_of_zipf() -> None:
    ids = zipf(200_000, 1000, generator(), skew=1.2)
    counts = torch.bincount(ids, minlength=1000).sort(descending=True).values.double()
    assert len(counts) == 1000 and int(counts.sum()) == 200_000
    slope = math.log(float(counts[100:120].mean() / counts[10:12].mean())) / math.log(109.5 / 10.5)
    assert slope == pytest.approx(-1.2, abs=0.1)
    assert torch.equal(ids, zipf(200_000, 1000, generator(), skew=1.2))
    with pytest.raises(ValueError, match=r"at least one row and a skew over 1, got 0 rows and skew 1\.05"):
        zipf(3, 0, generator())


def test_synthetic_graphs_join_users_and_items() -> None:
    edges = bipartite(30, 50, 200, generator())
    assert edges.shape == (2, 400) and torch.equal(edges[:, :200], edges[:, 200:].flip(0))
    assert int(edges[0, :200].max()) < 30 <= int(edges[1, :200].min()) and int(edges.max()) < 80


@pytest.mark.parametrize(("name", "case"), [("embedding_bag", "odd_63"), ("graph_propagate", "isolated")])
def test_cases_have_empty_bags_and_isolated_nodes(name: str, case: str) -> None:
    spec = registry.get(name)
    args = spec.inputs(next(c for c in spec.cases if c.name == case), "cpu", generator())
    lengths = args[1].diff()
    assert int(lengths.min()) == 0 and int(lengths.max()) > 1


def test_bags_equal_torchs_own() -> None:
    weight = torch.randn(9, 4, generator=generator())
    ids, ends = torch.tensor([1, 5, 5, 8]), torch.tensor([0, 3, 3, 4])
    zero = torch.tensor([0])
    for mode in ("sum", "mean"):
        found = embedding_bag(ids, ends, weight, zero, zero + 9, None, mode == "mean")
        torch.testing.assert_close(
            found, F.embedding_bag(ids, weight, ends, mode=mode, include_last_offset=True)
        )
