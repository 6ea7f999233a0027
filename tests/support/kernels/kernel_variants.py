"""Record the kernels that Triton would compile on an H200 for calls of our ops; nothing is compiled or run."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import torch
from triton.backends.compiler import GPUTarget
from triton.runtime import driver
from triton.runtime.jit import JITFunction

from fastkernels.core import registry
from fastkernels.overrides.embedding.logits_processor import finish_triton
from fastkernels.overrides.kit import overlap
from fastkernels.overrides.recsys.graph_propagate import PART
from fastkernels.overrides.routing.moe_align import padded_size


class FakeDriver:
    """A CUDA driver of an H200 that records launches instead of running them: Triton compiles kernels for it."""

    def __init__(self) -> None:
        self.launched: list[tuple[Any, ...]] = []
        self.utils, self.device = self, 0

    def load_binary(self, name: str, kernel: Any, shared: int, device: int) -> tuple[int, ...]:
        self.loaded = getattr(self, "loaded", 0) + 1
        return 1, self.loaded, 32, 0, 1024  # module, function, registers, spills, threads

    def get_device_properties(self, device: int) -> dict[str, int]:
        return {"max_shared_mem": 232448, "warpSize": 32}

    def launcher_cls(self, src: Any, metadata: Any) -> Any:
        return lambda *args: self.launched.append(args)

    def get_current_device(self) -> int:
        return self.device

    def get_current_stream(self, device: int) -> int:
        return 100 + device

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", 90, 32)


BF16, F32, I64 = torch.bfloat16, torch.float32, torch.int64
Model = dict[str, int]
LLAMA: Model = {"hidden": 4096, "inner": 14336, "heads": 32, "kv_heads": 8, "vocab": 128256}
QWEN: Model = {"hidden": 4096, "inner": 12288, "heads": 32, "kv_heads": 8, "vocab": 151936}
MIXTRAL: Model = {"hidden": 4096, "inner": 14336, "experts": 8, "topk": 2}
HEAD = 128


def nothing(*_: Any) -> None:
    pass


@contextmanager
def compiled() -> Iterator[set[str]]:
    """Collect the kernels that Triton would compile: name, constants and specializations of arguments."""
    found: set[str] = set()

    def note(kernel: Any, key: str, *_: Any) -> Any:
        found.add(f"{kernel.__name__} {key}")
        return SimpleNamespace(run=nothing, function=None, packed_metadata=None, launch_metadata=nothing)

    chip = FakeDriver()
    chip.device = 1000  # a device without compiled kernels
    with (
        patch.object(driver, "_active", chip),
        patch.object(overlap, "_quick", True),
        patch.object(overlap, "_compiled", {}),
        patch.object(overlap, "overlaps", lambda device: True),
        patch.object(JITFunction, "_do_compile", note),
    ):
        yield found


def empty(*shape: int, dtype: torch.dtype = BF16) -> torch.Tensor:
    return torch.empty(shape, dtype=dtype)


def triton(name: str, *args: Any) -> Any:
    """Call the op's Triton provider."""
    return next(p for p in registry.get(name).op.providers if p.name == "triton").fn(*args)


def _heads(m: Model, tokens: int, qkv: torch.Tensor) -> list[torch.Tensor]:
    """Return queries, keys and values [T, heads, D] as views of one tensor, as in the hosts."""
    parts = qkv.split([m["heads"] * HEAD, m["kv_heads"] * HEAD, m["kv_heads"] * HEAD], dim=-1)
    return [part.view(tokens, -1, HEAD) for part in parts]


def step(m: Model, tokens: int, fp8: bool, norms: bool = False) -> None:
    """Call the ops of one layer of a dense model for a prompt of this many tokens."""
    h, i = m["hidden"], m["inner"]
    x, residual, weight = empty(tokens, h), empty(tokens, h), empty(h)
    triton("embedding", empty(tokens, dtype=torch.int64), empty(m["vocab"], h))
    triton("rms_norm", x, weight, 1e-5)
    for cast in (False, True):
        triton("rms_norm", x, weight, 1e-5, residual, None, cast)
    triton("gemma_rms_norm", x, weight, 1e-6, residual)
    both = empty(tokens, 2 * i)
    triton("silu_and_mul", both)
    triton("gelu_and_mul", both, "tanh")
    triton("gelu_and_mul", both, "none")
    q, k, v = _heads(m, tokens, empty(tokens, (m["heads"] + 2 * m["kv_heads"]) * HEAD))
    positions, slots = empty(tokens, dtype=torch.int64), empty(tokens, dtype=torch.int64)
    table, caches = empty(1024, HEAD), [empty(64, 16, m["kv_heads"], HEAD) for _ in range(2)]
    triton("rotary_emb", positions, q.flatten(1), k.flatten(1), HEAD, table, True)
    triton("store_kvcache", k, v, *caches, slots)
    triton("rope_store_kvcache", positions, q, k, v, *caches, slots, table, True)
    if norms:
        head = empty(HEAD)
        for part in (q, k):
            triton("rms_norm", part, head, 1e-6)
        triton("rope_store_kvcache", positions, q, k, v, *caches, slots, table, True, head, head)
    if fp8:
        _quantizing(x, residual, weight, both)


def _quantizing(x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, both: torch.Tensor) -> None:
    one = empty(1, dtype=F32)
    for scale, group, columns in ((None, -1, False), (None, 128, False), (None, 128, True), (one, -1, False)):
        triton("quantize_fp8", x, scale, group, None, 1e-10, columns, columns)
        triton("quantize_fp8", both, scale, group, None, 1e-10, columns)
        triton("rms_norm_quant_fp8", x, weight, 1e-5, scale, group, residual, None, 1e-10, columns)
        triton("silu_mul_quant_fp8", both, scale, group, None, 1e-10, columns)
    triton("quantize_fp8", x)


def others(m: Model, tokens: int) -> None:
    """Call the ops that only some models or serving modes use."""
    heads, x = m["heads"], empty(tokens, m["hidden"])
    parts = [empty(tokens, heads, HEAD) for _ in range(3)]
    for lse in (lambda: empty(tokens, heads, dtype=F32), lambda: empty(heads, tokens, dtype=F32).t()):
        triton("merge_state", parts[0], lse(), parts[1], lse(), parts[2], lse())
        triton("merge_state", parts[0], lse(), parts[1], lse(), parts[2], lse(), max(tokens - 3, 0))
    wide = empty(tokens, m["inner"])
    for name in ("gelu", "quick_gelu", "relu2"):
        triton(name, wide)
    triton("layer_norm", x, empty(m["hidden"]), empty(m["hidden"]), 1e-5)
    triton("t5_layer_norm", x, empty(m["hidden"]), 1e-6)
    triton("sandwich_norm", x, empty(tokens, m["hidden"]), empty(m["hidden"]), 1e-6, 1.0, empty(m["hidden"]))
    triton("l2_norm", parts[0])
    triton("rms_norm_gated", x, empty(m["hidden"]), empty(tokens, m["hidden"]), 1e-5, None, False)
    triton("rms_norm_gated", x, empty(m["hidden"]), empty(tokens, m["hidden"]), 1e-5, 1024, False)
    triton("rms_norm_gated", parts[0], empty(HEAD), parts[1], 1e-6)
    for batch in (tokens, 1):  # decode and a prompt
        _recurrences(tokens, batch)
    h, c = (empty(tokens, 640, dtype=F32) for _ in range(2))
    triton("lstm", empty(tokens, 1, 2560), empty(2560, 640), h, c)
    triton("softplus", x)
    starts, vectors = empty(tokens + 1, dtype=torch.int32), empty(tokens, HEAD)
    triton("maxsim", empty(32, HEAD), vectors, empty(2, dtype=torch.int32), starts, 32, 180)
    ids, ends, tables = empty(tokens, dtype=I64), empty(2 * tokens + 1, dtype=I64), empty(2, dtype=I64)
    triton("embedding_bag", ids, ends, empty(640, HEAD), tables, tables, None, False)
    window, cache = empty(32, 64, dtype=F32), empty(2, 32, 9, 4, 64)
    place = empty(1, dtype=I64)
    triton("frame_attention", empty(1, 1, 9, 3, 4, 64), window, window, cache, cache, place, place, 0.125)
    triton("norm_pad", empty(1, 128, 3, tokens, 5), empty(128), True, True)
    edges = tokens + PART  # a graph has hubs
    graph = empty(tokens + 1, dtype=I64), empty(edges, dtype=I64), empty(edges, dtype=F32)
    triton("graph_propagate", empty(tokens, 64, dtype=F32), *graph, empty(4, dtype=F32))
    scores, cells = empty(2, 21 * tokens, 80), (4 * tokens, 4, 2 * tokens, 2, tokens, 1)
    triton("top_k_queries", scores, tokens)
    triton("dfl_boxes", empty(2, 21 * tokens, 64), cells, (8, 16, 32), empty(2, tokens, dtype=I64))
    boxes, points = empty(2, 300, 4, dtype=F32), empty(2, 300, 8, 36)
    places = points[..., :24].unflatten(-1, (12, 2)), points[..., 24:]
    triton(
        "deformable_attention", empty(2, 21 * tokens, 8, 32), *(t.contiguous() for t in places), boxes, cells
    )
    triton("refine_boxes", boxes, empty(2, 300, 4))
    triton("roi_align", empty(2, tokens, 4, 256), boxes, 7)
    mlp = empty(256, 2), empty(256), empty(8, 256), empty(8)
    rows, columns = (triton("box_position_bias", boxes, *mlp, size, True) for size in (tokens, 4))
    queries, cells_of = empty(2, 301, 8, 32), (empty(2, 4 * tokens, 8, 32) for _ in range(2))
    triton("grid_bias_attention", queries, *cells_of, rows, columns, 0.125)
    few = min(tokens, 16)  # this provider ends in attention, which runs
    table, memory = empty(4 * few, 32, dtype=F32), empty(2, 8 * few + 4, 8, 32)
    triton("memory_attention", empty(2, 4 * few, 8, 32), memory, memory, table, table, 4, 0.125)
    triton("top_k_scores", empty(tokens, 64), empty(4000, 64), 20, empty(tokens + 1, dtype=I64), ids)
    cells, order = empty(1000, 3, dtype=torch.int32), empty(1000, dtype=I64)  # of a cloud, not of a prompt
    triton("serialize_points", cells, order, empty(8, dtype=I64))
    near = triton("voxel_neighbors", cells, order, 3)
    triton("subm_conv3d", empty(1000, 64), empty(64, 3, 3, 3, 64), near, empty(64))
    triton("segment_reduce", empty(1000, 64), empty(201, dtype=I64), order)
    _learning(tokens)
    _scenes(tokens)
    _structures(-(-tokens // 16) * 16)  # the engine pads to multiples of 16


def _structures(n: int) -> None:
    """Call the ops of structure prediction for this many tokens, or atoms."""
    mask, side = empty(1, 1, n, dtype=torch.bool), min(n, 200)
    q, bias, own = empty(1, 2, n, 4, 32), empty(1, 4, n, n), empty(128)
    triton("attention_pair_bias", q, q, q, bias, 0.2, mask, q)
    weight = empty(128, 128)
    pairs = empty(1, side, side, 128), empty(1, side, side)  # PyTorch computes their product: side ** 3
    triton("triangle_multiplication", *pairs, own, own, *[weight] * 4, own, own, weight, weight)
    triton("swiglu_transition", empty(n, 128), own, own, *[empty(512, 128)] * 2, empty(128, 512))
    x = empty(2, n, 128)
    triton("conditioned_layer_norm", x, x[:1], x[:1], x, x[:1])
    blocks = -(-n // 32)
    atoms, starts = empty(2, n, 4, 32), empty(blocks, dtype=torch.int32)
    triton(
        "atom_attention",
        atoms,
        atoms,
        atoms,
        empty(blocks, 4, 32, 128),
        starts,
        empty(n, dtype=torch.bool),
        0.2,
        atoms,
    )


def _learning(tokens: int) -> None:
    """The inner step of TTT-E2E, whose chunks have one size."""
    chunk, slots = 1024, empty(1, dtype=torch.int32)
    x, weights = empty(chunk, 640), (empty(4, 2 * 320, 640), empty(4, 640, 320))
    triton("silu_and_mul_grad", empty(chunk, 640), empty(chunk, 320))
    triton("rms_norm_grad", x, x, empty(640))
    triton("rms_norm_grad", empty(chunk, 8, 80), empty(chunk, 8, 80), empty(80))
    q, keys = empty(chunk, 8, 80), empty(chunk + min(tokens, 8191), 8, 80)
    triton("attention_grad", q, keys, keys, q, 0.1, 8191)
    triton("ttt_sgd", weights[0], weights[0], empty(1, 640, 640), empty(1, dtype=F32), slots, slots)


def _scenes(count: int) -> None:
    """Call the ops of scenes for this many Gaussians, or rays."""
    points, pairs = empty(count, 3, dtype=F32), empty(1, count, 2, dtype=F32)
    views, ks = empty(1, 4, 4, dtype=F32), empty(1, 3, 3, dtype=F32)
    each = empty(count, dtype=F32)
    triton("project_gaussians", points, empty(count, 4, dtype=F32), points, each, views, ks, 64, 48)
    triton("spherical_harmonics", points, empty(count, 16, 3, dtype=F32), 3, empty(count, dtype=torch.bool))
    sizes, offsets = empty(1, count, 2, dtype=torch.int32), empty(13, dtype=torch.int32)
    triton("intersect_tiles", pairs, sizes, each[None], 16, 4, 3, 64)
    triton(
        "rasterize_gaussians",
        pairs,
        points[None],
        points[None],
        each[None],
        64,
        48,
        16,
        offsets,
        sizes[0, :, 0],
        ks[0, :1],
    )
    triton("hash_encoding", points, empty(792, 2, dtype=torch.float16), 4, 4, 1.5, 8)
    triton("fused_mlp", empty(count, 32), empty(3072), 64, 1, 16)
    triton("march_rays", points, points, each, each, empty(64, dtype=torch.uint8), 4, 8, 1, 0.0)
    triton("composite_rays", empty(count, 4, 3, dtype=F32), *[empty(count, 4, dtype=F32)] * 2, each)


def _recurrences(tokens: int, batch: int) -> None:
    """Call the ops of recurrent models for this many sequences."""
    starts, slots = empty(batch + 1, dtype=torch.int32), empty(batch, dtype=torch.int32)
    tail = starts, slots, empty(batch, dtype=torch.bool)
    q, k, v = (empty(tokens, 32, HEAD) for _ in range(3))
    token, channel = empty(tokens, 32, dtype=F32), empty(tokens, 32, HEAD, dtype=F32)
    state, head = empty(batch + 1, 32, HEAD, HEAD, dtype=F32), empty(32, dtype=F32)
    triton("gated_delta_rule", q[:, :16], k[:, :16], v, token, token, state, *tail, 0.1, True)
    triton("kda", q, k, v, channel, token, state, *tail, 0.1, True)
    for g in (channel, head):
        triton("gated_linear_attention", q, k, v, g, state, *tail, 0.1)
    triton("rwkv7", q, channel, k, v, q, k, state, *tail)
    triton("ssd", v, token, head, q[:, :1], k[:, :1], head, head, state, *tail)
    x, b, channels = empty(tokens, 5120), empty(tokens, 16), empty(5120, dtype=F32)
    scan = x, x, empty(5120, 16, dtype=F32), b, b, channels, x, channels
    triton("mamba_scan", *scan, empty(batch + 1, 5120, 16, dtype=F32), *tail)
    triton("causal_conv1d", x, empty(5120, 4), None, empty(batch + 1, 5120, 3), *tail)


def experts(m: Model, tokens: int) -> None:
    """Call the routers, the sort and the sum of a mixture of experts."""
    e, topk = m["experts"], m["topk"]
    logits = empty(tokens, e)
    _, ids, _ = triton("topk_softmax", logits, topk, True)
    if e % 8 == 0 and e > 8:
        triton("grouped_topk", logits, topk, True, 8, 4, "sigmoid", empty(e, dtype=F32))
    for block in (16, 64, 128):
        triton("moe_align", ids, block, e, padded_size(ids.numel(), block, e))
    triton("moe_sum", empty(tokens, topk, m["hidden"]), empty(tokens, m["hidden"]))


def batch(m: Model, rows: int) -> None:
    """Call the ops behind the layers, for this many sequences."""
    logits = empty(rows, m["vocab"])
    finish_triton(logits, 1.0, 30.0, False, False)
    temperature, top_p, min_p = (empty(rows, dtype=F32) for _ in range(3))
    seeds, offsets = (empty(rows, dtype=torch.int64) for _ in range(2))
    triton("sampling", logits, temperature, empty(rows, dtype=torch.int32), top_p, min_p, seeds, offsets)


def of(calls: Callable[[int], None], sizes: Iterable[int]) -> set[str]:
    """Return the kernels that calls(size) needs for any of the sizes."""
    with compiled() as found:
        for size in sizes:
            calls(size)
    return found
