"""Light graph convolution (LightGCN, arXiv 2002.02126): y_i = sum over neighbors j of w_ij x_j, and mixes of layers."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from types import SimpleNamespace
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
import triton
import triton.language as tl

from fastkernels.core import assemble
from fastkernels.core.case import Case
from fastkernels.core.declaration import Axis, Call, Tensor
from fastkernels.core.dispatch import Provider, define
from fastkernels.core.expressions import Expr
from fastkernels.core.spec import OpSpec
from fastkernels.overrides.kit.launch import cdiv, next_power_of_2
from fastkernels.overrides.kit.overlap import follow, launch_kernel
from fastkernels.overrides.recsys.cases import bipartite

FLOATS = (torch.float16, torch.bfloat16, torch.float32)
INTEGERS = (torch.int32, torch.int64)


class Graph(NamedTuple):
    """Edges by target, in CSR: those of node i are crow_indices[i] to crow_indices[i + 1] of the other two."""

    crow_indices: torch.Tensor  # [nodes + 1] int64
    col_indices: torch.Tensor  # [edges] int64: their sources
    values: torch.Tensor  # [edges]


def graph_of(
    edge_index: torch.Tensor,
    nodes: int,
    edge_weight: torch.Tensor | None = None,
    normalize: bool = True,
    dtype: torch.dtype = torch.float32,
) -> Graph:
    """The graph of edges [2, E], sources and targets, with weights [E] or 1.

    normalize: divide each weight by the square roots of both nodes' degrees, w_ij / sqrt(d_i d_j). The degree is the
    sum of the weights of the edges to a node; a node without edges has the factor 0.
    """
    source, target = edge_index
    weight = torch.ones_like(target, dtype=dtype) if edge_weight is None else edge_weight.view(-1)
    if normalize:
        degree = weight.new_zeros(nodes).index_add_(0, target, weight)
        factor = degree.pow(-0.5)
        factor = factor.masked_fill(factor == float("inf"), 0)
        weight = factor[source] * weight * factor[target]
    order = torch.argsort(target, stable=True)
    ends = torch.bincount(target, minlength=nodes).cumsum(0)
    return Graph(torch.cat((ends.new_zeros(1), ends)), source[order].contiguous(), weight[order].contiguous())


def reference(
    x: torch.Tensor,
    crow_indices: torch.Tensor,
    col_indices: torch.Tensor,
    values: torch.Tensor,
    alpha: torch.Tensor | None = None,
) -> torch.Tensor:
    """x: [nodes, D]; the rest is a Graph of these nodes, A: crow_indices [nodes + 1], col_indices and values [E].

    Returns A x, [nodes, D] in x's dtype. With alpha [layers + 1] float32, returns the sum of alpha[l] A^l x over
    l = 0 .. layers: LightGCN's embeddings. An edge from a node that does not exist adds 0. Computed in float32 or
    float64. Raises ValueError for shapes that do not fit.
    """
    _check(x, crow_indices, col_indices, values, alpha)
    acc = torch.promote_types(x.dtype, torch.float32)
    there = (col_indices >= 0) & (col_indices < len(x))
    source = torch.where(there, col_indices, 0).long()
    place = torch.arange(len(col_indices), device=x.device)
    # Not of crow_indices[1:]: Inductor 2.11 searches views from their storage's first value on.
    target = torch.searchsorted(crow_indices.long(), place, right=True) - 1
    weight = values.to(acc)[:, None]

    def step(now: torch.Tensor) -> torch.Tensor:
        if not len(source):
            return torch.zeros_like(now)
        messages = (now[source] * weight).masked_fill(~there[:, None], 0)
        return torch.zeros_like(now).index_add_(0, target, messages)

    now = x.to(acc)
    if alpha is None:
        return step(now).to(x.dtype)
    mix = alpha.to(acc)
    total = mix[0] * now
    for factor in mix[1:]:
        now = step(now)
        total = total + factor * now
    return total.to(x.dtype)


def _check(
    x: torch.Tensor, crow_indices: torch.Tensor, col_indices: torch.Tensor, values: torch.Tensor,
    alpha: torch.Tensor | None,
) -> None:  # fmt: skip
    if x.dim() != 2 or crow_indices.shape != (len(x) + 1,):
        raise ValueError(
            f"graph_propagate: x must be [nodes, D] and crow_indices [nodes + 1], got {tuple(x.shape)} and"
            f" {tuple(crow_indices.shape)}"
        )
    if col_indices.dim() != 1 or values.shape != col_indices.shape:
        shapes = f"{tuple(col_indices.shape)} and {tuple(values.shape)}"
        raise ValueError(f"graph_propagate: col_indices and values must be [edges], got {shapes}")
    if alpha is not None and (alpha.dim() != 1 or not len(alpha)):
        raise ValueError(f"graph_propagate: alpha must be [layers + 1], got {tuple(alpha.shape)}")


PART = 256  # edges
WAYS = 32  # of a search: few loads wait for each other


@triton.jit
def _sum_of(
    x_ptr, col_ptr, value_ptr, begin, end, cols, x_stride, N, D, BLOCK_E: tl.constexpr, BLOCK_D: tl.constexpr
):  # fmt: skip
    # The weighted sum of the edges from `begin` to `end`. The next sources arrive while the rows of these do.
    acc = tl.zeros([BLOCK_D], tl.float32)
    edges = begin + tl.arange(0, BLOCK_E)
    source = tl.load(col_ptr + edges, mask=edges < end, other=-1).to(tl.int64)
    weight = tl.load(value_ptr + edges, mask=edges < end, other=0.0).to(tl.float32)
    for _ in range(begin, end, BLOCK_E):
        mask = ((source >= 0) & (source < N))[:, None] & (cols < D)[None, :]
        row = tl.load(x_ptr + source[:, None] * x_stride + cols[None, :], mask=mask, other=0.0)
        edges += BLOCK_E
        source = tl.load(col_ptr + edges, mask=edges < end, other=-1).to(tl.int64)
        following = tl.load(value_ptr + edges, mask=edges < end, other=0.0).to(tl.float32)
        acc += tl.sum(tl.where(mask, row.to(tl.float32) * weight[:, None], 0.0), 0)
        weight = following
    return acc


@triton.jit(do_not_specialize=["WIDTH"])
def _inner_kernel(
    x_ptr, crow_ptr, col_ptr, value_ptr, part_ptr, x_stride, N, D, WIDTH,
    PART: tl.constexpr, WAYS: tl.constexpr, BLOCK_E: tl.constexpr, BLOCK_D: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    # Edges t PART to (t + 1) PART, if they are all of one node: a node of a million edges is not one program's work.
    follow(OVERLAP)
    t = tl.program_id(0).to(tl.int64)
    cols = tl.program_id(1) * BLOCK_D + tl.arange(0, BLOCK_D)
    node = t * 0  # the last one that begins at t PART or before; it is less than WIDTH away
    width = node + WIDTH
    while width > 1:
        width = width // WAYS
        nodes = node + (tl.arange(0, WAYS) + 1) * width
        starts = tl.load(crow_ptr + nodes, mask=nodes < N, other=0).to(tl.int64)
        node += tl.sum(((nodes < N) & (starts <= t * PART)).to(tl.int64), 0) * width
    if tl.load(crow_ptr + node + 1).to(tl.int64) >= (t + 1) * PART:
        acc = _sum_of(
            x_ptr, col_ptr, value_ptr, t * PART, (t + 1) * PART, cols, x_stride, N, D, BLOCK_E, BLOCK_D
        )  # fmt: skip
        tl.store(part_ptr + t * D + cols, acc, mask=cols < D)


@triton.jit(do_not_specialize=["layer"])
def _propagate_kernel(
    x_ptr, crow_ptr, col_ptr, value_ptr, part_ptr, alpha_ptr, out_ptr, total_ptr, x_stride, N, D, layer,
    PART: tl.constexpr, KEEP: tl.constexpr, MIX: tl.constexpr, FIRST: tl.constexpr, BLOCK_E: tl.constexpr,
    BLOCK_D: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    # One program per node and part of the columns. KEEP: write this layer's result. MIX: add its part to the total,
    # of the FIRST layer also x's own.
    follow(OVERLAP)
    node = tl.program_id(0).to(tl.int64)
    cols = tl.program_id(1) * BLOCK_D + tl.arange(0, BLOCK_D)
    begin = tl.load(crow_ptr + node).to(tl.int64)
    end = tl.load(crow_ptr + node + 1).to(tl.int64)
    first = tl.minimum((begin + PART - 1) // PART * PART, end)  # the edges between are in whole parts
    last = tl.maximum(end // PART * PART, first)
    acc = _sum_of(x_ptr, col_ptr, value_ptr, begin, first, cols, x_stride, N, D, BLOCK_E, BLOCK_D)
    for t in range(
        first // PART, last // PART, BLOCK_E
    ):  # one by one, the parts of a hub would take the longest
        parts = t + tl.arange(0, BLOCK_E)
        mask = (parts < last // PART)[:, None] & (cols < D)[None, :]
        acc += tl.sum(tl.load(part_ptr + parts[:, None] * D + cols[None, :], mask=mask, other=0.0), 0)
    acc += _sum_of(x_ptr, col_ptr, value_ptr, last, end, cols, x_stride, N, D, BLOCK_E, BLOCK_D)
    if KEEP:
        tl.store(out_ptr + node * D + cols, acc.to(out_ptr.dtype.element_ty), mask=cols < D)
    if MIX:
        mixed = tl.load(alpha_ptr + layer) * acc
        if FIRST:
            own = tl.load(x_ptr + node * x_stride + cols, mask=cols < D, other=0.0).to(tl.float32)
            mixed += tl.load(alpha_ptr) * own
        else:
            mixed += tl.load(total_ptr + node * D + cols, mask=cols < D, other=0.0)
        tl.store(total_ptr + node * D + cols, mixed, mask=cols < D)


def _fake(x: torch.Tensor, *_: Any, **__: Any) -> torch.Tensor:
    return torch.empty(x.shape, dtype=x.dtype, device=x.device)


def _supports_triton(
    x: torch.Tensor, crow_indices: torch.Tensor, col_indices: torch.Tensor, values: torch.Tensor,
    alpha: torch.Tensor | None = None,
) -> str | None:  # fmt: skip
    if x.dtype not in FLOATS or values.dtype not in FLOATS:
        return f"x and values are {x.dtype} and {values.dtype}, not float16, bfloat16 or float32"
    if crow_indices.dtype not in INTEGERS or col_indices.dtype not in INTEGERS:
        return f"crow_indices and col_indices are {crow_indices.dtype} and {col_indices.dtype}"
    if x.stride(-1) != 1:
        return f"x has strides {tuple(x.stride())}: the last dimension must be contiguous"
    if alpha is not None and alpha.dtype != torch.float32:
        return f"alpha is {alpha.dtype}, not float32"
    return None


def _triton(
    x: torch.Tensor, crow_indices: torch.Tensor, col_indices: torch.Tensor, values: torch.Tensor,
    alpha: torch.Tensor | None = None,
) -> torch.Tensor:  # fmt: skip
    _check(x, crow_indices, col_indices, values, alpha)
    (nodes, dim), layers = x.shape, 1 if alpha is None else len(alpha) - 1
    if x.numel() == 0:
        return _fake(x)
    if alpha is not None and not layers:
        return (x.float() * alpha[0]).to(x.dtype)
    total = None if alpha is None else torch.empty(x.shape, dtype=torch.float32, device=x.device)
    block = min(next_power_of_2(dim), 256)
    at_once = max(1024 // block, 4)
    width = WAYS
    while width < nodes:
        width *= WAYS
    graph = crow_indices.contiguous(), col_indices.contiguous(), values.contiguous()
    parts, columns = len(col_indices) // PART, cdiv(dim, block)
    inner = torch.empty((parts, dim), dtype=torch.float32, device=x.device)
    sizes = {"BLOCK_E": min(at_once, 64), "BLOCK_D": block, "num_warps": 1}
    now, spare = x, [_fake(x) for _ in range(min(layers if alpha is None else layers - 1, 2))]
    for layer in range(1, layers + 1):
        keep = alpha is None or layer < layers
        out = spare[layer % len(spare)] if keep else x
        if parts:
            launch_kernel(
                _inner_kernel, (parts, columns), now, *graph, inner, now.stride(0), nodes, dim, width,
                PART=PART, WAYS=WAYS, **sizes,
            )  # fmt: skip
        launch_kernel(
            _propagate_kernel, (nodes, columns), now, *graph, inner, alpha, out, total, now.stride(0), nodes, dim,
            layer, PART=PART, KEEP=keep, MIX=alpha is not None, FIRST=layer == 1, **sizes,
        )  # fmt: skip
        now = out
    return now if total is None else total.to(x.dtype)


def _torch(
    x: torch.Tensor, crow_indices: torch.Tensor, col_indices: torch.Tensor, values: torch.Tensor,
    alpha: torch.Tensor | None = None,
) -> torch.Tensor:  # fmt: skip
    """F.embedding_bag of the neighbors, on a CPU; the reference if an edge is from a node that does not exist."""
    given = x, crow_indices, col_indices, values, alpha
    _check(*given)
    if not x.numel() or not len(values) or int(col_indices.min()) < 0 or int(col_indices.max()) >= len(x):
        return reference(*given)
    ids, starts, weights = col_indices.long(), crow_indices.long(), values.to(x.dtype)

    def step(now: torch.Tensor) -> torch.Tensor:
        return F.embedding_bag(
            ids, now, starts, mode="sum", per_sample_weights=weights, include_last_offset=True
        )

    return step(x) if alpha is None else mixed(step, x, alpha)


def mixed(step: Callable[[torch.Tensor], torch.Tensor], x: torch.Tensor, alpha: torch.Tensor) -> torch.Tensor:
    """The sum of alpha[l] step^l(x)."""
    total = alpha[0].to(x.dtype) * x
    for factor in alpha[1:]:
        x = step(x)
        total = total + factor.to(x.dtype) * x
    return total


def _runs_torch(x: torch.Tensor, *_: Any, **__: Any) -> str | None:
    return None if x.dtype in (torch.float32, torch.float64) else f"PyTorch's CPU kernel adds in {x.dtype}"


graph_propagate = define(
    "graph_propagate(Tensor x, Tensor crow_indices, Tensor col_indices, Tensor values, Tensor? alpha=None) -> Tensor",
    fake=_fake,
    providers=(
        Provider("triton", _triton, supports=_supports_triton),
        Provider("torch", _torch, devices=("cpu",), supports=_runs_torch),
        Provider("reference", reference, devices=("cuda", "cpu")),
    ),
)


def _values(call: Call) -> dict[str, torch.Tensor]:
    """A normalized graph of users and items, whose items follow Zipf's law; some nodes have no edges."""
    nodes, edges = call["nodes"], call["edges"]
    users = max(call["users"] or nodes * 3 // 5, 1)
    found = bipartite(users, max(nodes - users, 1), edges // 2, call.generator)
    if edges % 2:
        found = torch.cat((found, found.new_zeros(2, 1)), 1)
    found = found.clamp_max(max(nodes - 1, 0))
    crow, col, values = graph_of(found, nodes)
    kind = getattr(torch, call["id_dtype"])
    made = {"crow_indices": crow.to(kind), "col_indices": col.to(kind), "values": values}
    if call["mixed"]:
        made["alpha"] = torch.rand(call["layers"] + 1, generator=call.generator, device=call.device)
    return made


def _case(
    name: str,
    tag: str,
    nodes: int,
    edges: int,
    dim: int,
    dtype: str = "float32",
    weight: float = 1,
    **more: Any,
) -> Case:
    return Case(name, {"nodes": nodes, "edges": edges, "dim": dim, **more}, dtype, weight, (tag,))


def _build(cls: type, args: list[Any]) -> Callable[[], Any]:
    x, crow_indices, col_indices, values, alpha = assemble.filled(args, 5, None)
    if alpha is not None:
        raise ValueError(f"{cls.__name__} is one layer and cannot be called with alpha")
    nodes = torch.arange(len(x), device=x.device)
    target = nodes.repeat_interleave(crow_indices.diff(), output_size=len(col_indices))
    edges = torch.stack((col_indices.long(), target))
    return partial(cls(normalize=False), x, edges, values)


def _sources(args: SimpleNamespace) -> int:
    """Count the nodes that have an edge to another: only these are read in a layer."""
    return int(torch.bincount(args.col_indices.clamp(0, max(len(args.x) - 1, 0))).count_nonzero())


def _isolated(args: list[Any]) -> None:
    """All edges lead to the last node; no other node has one."""
    args[1].zero_()
    args[1][-1] = len(args[2])


def _beyond(args: list[Any]) -> None:
    args[2][::3] = len(args[0])
    args[2][1::6] = -1


_THREE: dict[str, Any] = {"mixed": True, "layers": 3}

SPEC = OpSpec(
    name="graph_propagate",
    level=1,
    reference=reference,
    op=graph_propagate,
    arguments=(
        Tensor("x", "nodes dim", bytes="itemsize(dtype) * dim * ((nodes)if(mixed)else(sources))"),
        Tensor("crow_indices", "nodes+1", "id_dtype"),
        Tensor("col_indices", "edges", "id_dtype"),
        Tensor("values", "edges", "float32"),
        Tensor("alpha", "layers+1", "float32", when="mixed"),
    ),
    outputs=(Tensor("out", "nodes dim"),),
    axes={
        "nodes": Axis.per_call(),
        "edges": Axis.per_call(),
        "dim": Axis.width(),
        "layers": Axis.count(1),
        "mixed": Axis.option(False),
        "users": Axis(0),
        "id_dtype": Axis.dtype("int64"),
        "sources": Axis.counted(_sources, Expr("min(nodes, edges)")),
    },
    constraints=("nodes > 0 or edges == 0",),
    values=_values,
    flops="2 * layers * edges * dim",
    cases=(  # LightGCN's data sets: Gowalla, Yelp2018, Amazon-Book; 3 layers of 64
        _case("gowalla_layer", "model", 70_839, 1_620_256, 64, weight=4, users=29_858),
        _case("gowalla", "model", 70_839, 1_620_256, 64, weight=4, users=29_858, **_THREE),
        _case("yelp2018", "model", 69_716, 2_475_122, 64, users=31_668, **_THREE),
        _case("amazon_book", "model", 144_242, 4_761_460, 64, users=52_643, **_THREE),
        _case("one", "odd", 1, 1, 1),
        _case("odd_63", "odd", 63, 301, 24),
        _case("three_layers", "odd", 40, 210, 16, **_THREE),
        _case("hubs", "odd", 7, 2001, 5),  # whole parts of a node
        _case("isolated", "odd", 90, 30, 64),
        _case("dense", "odd", 7, 400, 33, mixed=True, layers=2),
        _case("half", "odd", 31, 120, 64, "float16", **_THREE),
        _case("odd_bf16", "odd", 20, 77, 40, "bfloat16"),
        _case("wide", "odd", 9, 40, 300, id_dtype="int32"),
        _case("no_layers", "odd", 12, 20, 8, mixed=True, layers=0),
        _case("no_edges", "odd", 5, 0, 8),
    ),
    build=_build,
    activations=("x",),
    extremes={"isolated": _isolated, "beyond": _beyond},
    baseline="torch",
)  # fmt: skip
