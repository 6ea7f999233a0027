"""torchrec's DLRM_DCN and torch_geometric's LightGCN: against our models, patched, and after undo.

Names of tests contain that of the model: dlrm_v2 or lightgcn.
"""

import copy

import pytest
import torch
from fk_bench.info.verified import RECOMMENDATIONS
from support import recommenders
from tensordict import TensorDict
from torch_geometric.nn import LGConv, LightGCN
from torch_geometric.utils import to_torch_coo_tensor, to_torch_csr_tensor
from torchrec import EmbeddingBagCollection, EmbeddingBagConfig, KeyedJaggedTensor, PoolingType
from torchrec.models.dlrm import DLRM_DCN
from torchrec.modules.crossnet import CrossNet, LowRankCrossNet, LowRankMixtureCrossNet, VectorCrossNet

import fastkernels
from fastkernels import LLM
from fastkernels.overrides.recsys.torch_geometric import TorchGeometricLGConv
from fastkernels.overrides.recsys.torchrec import (
    TorchrecCrossNet,
    TorchrecEmbeddingBagCollection,
    TorchrecLowRankCrossNet,
    TorchrecLowRankMixtureCrossNet,
    TorchrecVectorCrossNet,
)
from fastkernels.patch import PatchError

OPS = ["embedding_bag", "cross_low_rank"]


def configs(pooling=PoolingType.SUM):
    return [
        EmbeddingBagConfig(
            name=t["name"], embedding_dim=8, num_embeddings=t["num_embeddings"], pooling=pooling,
            feature_names=t.get("feature_names", []),
        )
        for t in recommenders.DLRM["tables"]
    ]  # fmt: skip


def dlrm(state, pooling="sum"):
    c = recommenders.DLRM
    bags = EmbeddingBagCollection(configs(PoolingType[pooling.upper()]), device=torch.device("cpu"))
    sizes = c["dense_arch_layer_sizes"], c["over_arch_layer_sizes"]
    model = DLRM_DCN(bags, c["dense_in_features"], *sizes, c["dcn_num_layers"], c["dcn_low_rank_dim"])
    model.load_state_dict(state)
    return model.eval()


def inputs(samples, keys=("f0", "f3", "f1", "t2")):
    dense = torch.tensor([s["dense"] for s in samples])
    bags = [s["sparse"].get(key, []) for key in keys for s in samples]
    ids = torch.tensor([i for bag in bags for i in bag])
    return dense, KeyedJaggedTensor.from_lengths_sync(list(keys), ids, torch.tensor([*map(len, bags)]))


@pytest.mark.parametrize("pooling", ["sum", "mean"])
def test_dlrm_v2_equals_torchrec(tmp_path, pooling):
    state = recommenders.dlrm(tmp_path, pooling=pooling)
    samples = recommenders.impressions(17)
    want = dlrm(state, pooling)(*inputs(samples)).sigmoid()[:, 0]
    with LLM(str(tmp_path), device="cpu", max_num_seqs=5) as llm:
        found = torch.tensor([o.outputs.score for o in llm.score(samples, use_tqdm=False)])
    torch.testing.assert_close(found, want, atol=RECOMMENDATIONS, rtol=RECOMMENDATIONS)
    assert len(set(found.tolist())) > 10


def test_dlrm_v2_keys_are_those_of_torchrec(tmp_path):
    found = {key: tuple(t.shape) for key, t in dlrm(recommenders.dlrm(tmp_path)).state_dict().items()}
    assert found == recommenders.dlrm_shapes(recommenders.DLRM)


@torch.no_grad()
@pytest.mark.parametrize("keys", [("f0", "f3", "f1", "t2"), ("t2", "f1", "f0", "f3")])
def test_dlrm_v2_is_patched_and_undone(tmp_path, keys):
    model = dlrm(recommenders.dlrm(tmp_path))
    given, classes = inputs(recommenders.impressions(9), keys), [type(m) for m in model.modules()]
    want, before = model(*given), copy.deepcopy(model.state_dict())
    report = fastkernels.patch(model, ops=OPS)
    assert report.host.name == "torchrec"
    torch.testing.assert_close(model(*given), want, atol=2e-6, rtol=2e-6)
    rows = {r.op: r for r in report.refresh().rows if r.modules}
    assert {op: (r.modules, r.calls, r.proof, r.fallbacks) for op, r in rows.items()} == {
        "embedding_bag": (1, 4, "calls", {}), "cross_low_rank": (1, 2, "calls", {}),
    }  # fmt: skip
    assert isinstance(model.sparse_arch.embedding_bag_collection, EmbeddingBagCollection)
    report.undo()
    assert [type(m) for m in model.modules()] == classes
    assert torch.equal(model(*given), want)
    assert all(torch.equal(before[k], v) for k, v in model.state_dict().items())


@torch.no_grad()
def test_dlrm_v2_collections_of_all_kinds():
    """Weights per sample, pooling and dimensions that differ, tables in float16, and inputs that stay the host's."""
    made = configs()
    made[1].pooling, made[2].embedding_dim = PoolingType.MEAN, 12
    jagged = inputs(recommenders.impressions(6))[1]
    weights = torch.rand(len(jagged.values()))
    weighted = KeyedJaggedTensor(jagged.keys(), jagged.values(), weights, offsets=jagged.offsets())
    same = configs()
    for tables, given, is_weighted in ((made, jagged, False), (same, weighted, True), (same, jagged, False)):
        theirs = EmbeddingBagCollection(tables=tables, is_weighted=is_weighted)
        want = theirs(given)
        ours = TorchrecEmbeddingBagCollection(tables, is_weighted)
        ours.load_state_dict(theirs.state_dict())
        for found in (ours(given), patched(theirs, "embedding_bag", given)):
            assert found.keys() == want.keys() and found.length_per_key() == want.length_per_key()
            torch.testing.assert_close(found.values(), want.values(), atol=2e-6, rtol=2e-6)
    assert ours.is_weighted() is False and ours.device == theirs.device


def patched(module, op, *given):
    with fastkernels.patch(module, ops=op) as report:
        found = module(*given)
        assert sum(r.calls for r in report.refresh().rows) > 0
    return found


@torch.no_grad()
def test_dlrm_v2_inputs_of_all_kinds():
    """Features with samples of their own, a TensorDict, and a network's input of three dimensions."""
    module = EmbeddingBagCollection(configs())
    spread = KeyedJaggedTensor(
        ["f0", "f3", "f1", "t2"], torch.tensor([1, 2, 3, 4, 5]), lengths=torch.tensor([1, 1, 1, 1, 1]),
        stride_per_key_per_rank=[[1], [2], [1], [1]], inverse_indices=(
            ["f0", "f3", "f1", "t2"], torch.tensor([[0, 0], [0, 1], [0, 0], [0, 0]])),
    )  # fmt: skip
    want = module(spread).values()
    torch.testing.assert_close(patched(module, "embedding_bag", spread).values(), want)
    jagged = inputs(recommenders.impressions(6))[1]
    given = TensorDict(jagged.to_dict())
    torch.testing.assert_close(patched(module, "embedding_bag", given).values(), module(jagged).values())
    net, x = LowRankCrossNet(12, 2, 3), torch.randn(2, 5, 12)
    torch.testing.assert_close(patched(net, "cross_low_rank", x), net(x), atol=2e-6, rtol=2e-6)


@torch.no_grad()
def test_dlrm_v2_ids_beyond_a_table_are_torchs_error():
    module = EmbeddingBagCollection(configs())
    for wrong in (7, -1):
        ids, lengths = torch.tensor([1, wrong, 2]), torch.tensor([1, 0, 1, 1])
        given = KeyedJaggedTensor(["f0", "f3", "f1", "t2"], ids, lengths=lengths)
        with fastkernels.patch(module, ops="embedding_bag") as report:
            with pytest.raises(RuntimeError, match=f"takes value {wrong} which is not in the valid range"):
                module(given)
            row = next(r for r in report.refresh().rows if r.modules)
            assert row.fallbacks == {"an id is beyond its table": 1} and not row.calls


@torch.no_grad()
def test_dlrm_v2_one_vector_and_missing_features():
    net, x = LowRankCrossNet(12, 2, 3), torch.randn(12)
    torch.testing.assert_close(patched(net, "cross_low_rank", x), net(x), atol=2e-6, rtol=2e-6)
    module = EmbeddingBagCollection(configs())
    part = KeyedJaggedTensor(["f0", "f1"], torch.tensor([1, 2]), lengths=torch.tensor([1, 1]))
    with pytest.raises(KeyError, match="f3"):
        module(part)
    with fastkernels.patch(module, ops="embedding_bag"), pytest.raises(KeyError, match="f3"):
        module(part)


@torch.no_grad()
def test_dlrm_v2_training_runs_torchrec():
    """Training runs torchrec's code."""
    net = LowRankCrossNet(12, 2, 3).train()
    with fastkernels.patch(net, ops="cross_low_rank") as report, torch.enable_grad():
        net(torch.randn(4, 12)).sum().backward()
        row = next(r for r in report.refresh().rows if r.modules)
        assert "needs gradients" in next(iter(row.fallbacks)) and not row.calls
    assert net.bias[0].grad.abs().sum() > 0


@torch.no_grad()
@pytest.mark.parametrize(
    ("theirs", "ours", "sizes"),
    [
        (LowRankCrossNet, TorchrecLowRankCrossNet, (24, 3, 5)),
        (CrossNet, TorchrecCrossNet, (24, 3)),
        (VectorCrossNet, TorchrecVectorCrossNet, (24, 3)),
        (LowRankMixtureCrossNet, TorchrecLowRankMixtureCrossNet, (24, 3)),
        (LowRankMixtureCrossNet, TorchrecLowRankMixtureCrossNet, (24, 3, 4, 5)),
        (LowRankMixtureCrossNet, TorchrecLowRankMixtureCrossNet, (24, 2, 2, 3, torch.nn.Tanh())),
    ],
)
def test_dlrm_v2_cross_networks_of_all_kinds(theirs, ours, sizes):
    """Built anew and patched, with biases; no samples, NaN and half precision as the host's."""
    theirs, x = theirs(*sizes), torch.randn(7, 24)
    for bias in theirs.bias:
        bias.normal_()
    ours, want = ours(*sizes), theirs(x)
    ours.load_state_dict(theirs.state_dict())
    op = "cross_low_rank" if isinstance(theirs, LowRankCrossNet) else "cross_layer"
    for found in (ours(x), patched(theirs, op, x)):
        torch.testing.assert_close(found, want, atol=1e-5, rtol=1e-5)
    assert patched(theirs, op, x[:0]).shape == (0, 24)
    x[2, 5] = float("nan")
    torch.testing.assert_close(patched(theirs, op, x), theirs(x), atol=1e-5, rtol=1e-5, equal_nan=True)
    theirs.bfloat16()
    x = torch.randn(7, 24).bfloat16()
    exact = copy.deepcopy(theirs).float()(x.float())
    found, host = ((y.float() - exact).abs().max() for y in (patched(theirs, op, x), theirs(x)))
    assert found <= host + 2**-7 * exact.abs().max()  # the largest errors, in sums of large products


@torch.no_grad()
def test_dlrm_v2_cross_networks_with_other_inputs_run_torchrec():
    for net in (CrossNet(12, 2), VectorCrossNet(12, 2), LowRankMixtureCrossNet(12, 2, 2, 3)):
        for x, words in (
            (torch.randn(12), "1 dimensions, not 2"),
            (torch.randn(3, 12, 2), "3 dimensions, not 2"),
        ):
            want = outcome(net, x)
            with fastkernels.patch(net, ops="cross_layer") as report:
                found = outcome(net, x)
                row = next(r for r in report.refresh().rows if r.modules)
                assert words in next(iter(row.fallbacks)) and not row.calls
            assert torch.equal(found, want) if isinstance(want, torch.Tensor) else found == want
        assert outcome(net, torch.randn(3, 13))[0] is RuntimeError
        with (
            fastkernels.patch(net, ops="cross_layer"),
            pytest.raises((RuntimeError, ValueError), match=r"1[23]"),
        ):
            net(torch.randn(3, 13))


def lightgcn(made):
    model = LightGCN(52, 16, 3, alpha=made["alpha"])
    model.load_state_dict({k: made[k] for k in ("alpha", "embedding.weight")})
    return model.eval()


@torch.no_grad()
@pytest.mark.parametrize("weighted", [False, True])
def test_lightgcn_equals_torch_geometric(tmp_path, weighted):
    made = recommenders.lightgcn(tmp_path, weighted)
    model, edges, weight = lightgcn(made), made["edge_index"], made.get("edge_weight")
    users, items = torch.arange(12), torch.arange(12, 52)
    best = model.recommend(edges, weight, users, items, k=6)
    embedding = model.get_embedding(edges, weight)
    with LLM(str(tmp_path), device="cpu") as llm:
        asked = [{"user": u, "k": 6, "exclude_seen": False} for u in range(12)]
        found = [o.outputs for o in llm.score(asked, use_tqdm=False)]
        assert [o.item_ids for o in found] == (best - 12).tolist()
        want = torch.stack([embedding[u] @ embedding[best[u]].T for u in range(12)])
        torch.testing.assert_close(
            torch.tensor([o.scores for o in found]), want, atol=RECOMMENDATIONS, rtol=RECOMMENDATIONS
        )
        pairs = [{"user": u, "items": [3, 39, 3]} for u in range(12)]
        found = torch.tensor([o.outputs.scores for o in llm.score(pairs, use_tqdm=False)])
        label = torch.stack((users.repeat_interleave(3), torch.tensor([15, 51, 15] * 12)))
        torch.testing.assert_close(
            found.flatten(), model(edges, label, weight), atol=RECOMMENDATIONS, rtol=RECOMMENDATIONS
        )


@torch.no_grad()
def test_lightgcn_is_patched_and_undone(tmp_path):
    made = recommenders.lightgcn(tmp_path)
    model, edges = lightgcn(made), made["edge_index"].clone()
    weight = torch.rand(edges.shape[1])
    given = [
        (edges,),
        (edges, weight),
        (to_torch_csr_tensor(edges, size=52),),
        (to_torch_coo_tensor(edges, size=52),),
    ]
    want = [model.get_embedding(*g) for g in given]
    report = fastkernels.patch(model, ops="graph_propagate")
    assert report.host.name == "torch_geometric"
    for one, theirs in zip(given, want, strict=True):
        torch.testing.assert_close(model.get_embedding(*one), theirs, atol=2e-6, rtol=2e-6)
    (row,) = [r for r in report.refresh().rows if r.modules]
    assert (row.modules, row.calls, row.proof, row.fallbacks) == (3, 12, "calls", {})
    edges[:, :20] = edges[:, 20:40]  # the graph is made again
    changed = model.get_embedding(edges)
    weight.mul_(2)
    reweighted = model.get_embedding(edges, weight)
    report.undo()
    assert all(type(conv) is LGConv for conv in model.convs)
    torch.testing.assert_close(changed, model.get_embedding(edges), atol=2e-6, rtol=2e-6)
    torch.testing.assert_close(reweighted, model.get_embedding(edges, weight), atol=2e-6, rtol=2e-6)
    assert not torch.allclose(changed, want[0])


@torch.no_grad()
def test_lightgcn_layers_that_stay_the_hosts(tmp_path):
    edges = recommenders.lightgcn(tmp_path)["edge_index"]
    for options, words in (
        ({"aggr": "max"}, "aggregates by 'max'"), ({"flow": "target_to_source"}, "its flow is"),
        ({"node_dim": 0}, "its node_dim is 0"), ({"decomposed_layers": 2}, "splits the features"),
    ):  # fmt: skip
        with pytest.raises(PatchError, match=words):
            fastkernels.patch(LightGCN(52, 16, 1, **options), ops="graph_propagate")
    layer, seen = LGConv(), []
    layer.register_message_forward_hook(lambda module, inputs, output: seen.append(len(output)))
    x = torch.randn(52, 8)
    with fastkernels.patch(layer, ops="graph_propagate") as report:
        layer(x, edges)
        assert seen == [edges.shape[1]]
        (row,) = [r for r in report.refresh().rows if r.modules]
        assert "hooks of its parts" in next(iter(row.fallbacks))
    wide = torch.randn(3, 52, 8)
    with fastkernels.patch(layer := LGConv(), ops="graph_propagate"):
        found = layer(wide, edges)
    torch.testing.assert_close(found, LGConv()(wide, edges), atol=2e-6, rtol=2e-6)


@torch.no_grad()
@pytest.mark.parametrize("normalize", [True, False])
def test_lightgcn_results_have_the_hosts_dtype(tmp_path, normalize):
    """Messages of float16 with weights of float32 are float32."""
    edges, layer = recommenders.lightgcn(tmp_path)["edge_index"], LGConv(normalize)
    weight = torch.rand(edges.shape[1])
    for kind, other in ((torch.float16, torch.float32), (torch.float32, torch.float64)):
        x = torch.randn(52, 8).to(kind)
        want = layer(x, edges, weight.to(other))
        found = patched(layer, "graph_propagate", x, edges, weight.to(other))
        assert found.dtype == want.dtype == other
        torch.testing.assert_close(found, want, atol=2e-3, rtol=2e-3)


@torch.no_grad()
def test_lightgcn_edges_with_other_data_or_of_no_node(tmp_path):
    edges, layer, x = recommenders.lightgcn(tmp_path)["edge_index"].clone(), LGConv(False), torch.randn(52, 8)
    with fastkernels.patch(layer, ops="graph_propagate"):
        layer(x, edges)
        edges.data = edges.flip(0)
        found = layer(x, edges)
        for wrong in (52, -1):
            edges[0, 5] = wrong
            with pytest.raises(IndexError, match=f"edge_index has the node {wrong}, and there are 52"):
                layer(x, edges)
        edges[0, 5] = 0
    edges.copy_(recommenders.lightgcn(tmp_path)["edge_index"].flip(0))
    torch.testing.assert_close(found, layer(x, edges), atol=2e-6, rtol=2e-6)


@torch.no_grad()
def test_lightgcn_inputs_that_are_no_graph_run_the_host(tmp_path):
    edges, layer, x = recommenders.lightgcn(tmp_path)["edge_index"], LGConv(False), torch.randn(52, 8)
    wide = to_torch_csr_tensor(edges, size=(60, 52))
    for given, words in (
        ((x, wide), "a matrix [60, 52] for 52 nodes"), (((x, x), edges), "x is not a tensor"),
        ((x, to_torch_csr_tensor(edges, size=60)), "a matrix [60, 60] for 52 nodes"),
        ((x, edges.T), "edge_index is torch.int64 [180, 2]"), ((x, edges.float()), "torch.float32 [2, 180]"),
        ((x, edges, torch.ones(3)), "3 weights for 180 edges"), ((x[:, 0], edges), "x is not a tensor"),
    ):  # fmt: skip
        want, found = outcome(layer, *given), None
        with fastkernels.patch(layer, ops="graph_propagate") as report:
            found = outcome(layer, *given)
            (row,) = [r for r in report.refresh().rows if r.modules]
            assert words in next(iter(row.fallbacks)) and not row.calls
        assert torch.equal(found, want) if isinstance(want, torch.Tensor) else found == want
    assert layer(x, wide).shape == (60, 8)


def outcome(layer, *given):
    try:
        return layer(*given)
    except (AssertionError, IndexError, RuntimeError, ValueError) as error:
        return type(error), str(error)


@torch.no_grad()
def test_lightgcn_layer_built_anew(tmp_path):
    edges, x = recommenders.lightgcn(tmp_path)["edge_index"], torch.randn(52, 8)
    for normalize in (True, False):
        want = LGConv(normalize)(x, edges)
        torch.testing.assert_close(TorchGeometricLGConv(normalize)(x, edges), want, atol=2e-6, rtol=2e-6)
        with torch.inference_mode():  # tensors without versions
            found = TorchGeometricLGConv(normalize)(x.clone(), edges.clone())
            torch.testing.assert_close(found, want, atol=2e-6, rtol=2e-6)
