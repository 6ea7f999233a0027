"""Sparse attention (DSA): the indexer and the layer against the equations of arXiv 2512.02556, in float64."""

from __future__ import annotations

import math
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from support.kernels.op_cases import make_args
from support.tiny import make_tiny

from fastkernels import LLM, SamplingParams
from fastkernels.core import registry
from fastkernels.core.forward_context import AttentionMetadata, forward_context
from fastkernels.engine.execution.attention import make_backend
from fastkernels.engine.execution.attention.mla import MlaBackend
from fastkernels.models.common.descriptions.description import Unsupported
from fastkernels.models.common.plans import build
from fastkernels.models.common.plans.plan import plan
from fastkernels.overrides.latent_attention import mla_sparse, sparse_indexer
from fastkernels.overrides.latent_attention.mla_attention import LatentAttention
from fastkernels.overrides.latent_attention.paged_mqa_logits import paged_mqa_logits
from fastkernels.overrides.latent_attention.sparse_indexer import SparseAttnIndexer

HEADS, NOPE, ROPE, VALUE, RANK, BLOCK = 3, 24, 16, 20, 48, 8
INDEX_HEADS, INDEX, TOPK = 12, 24, 5
SIZES = [HEADS * (NOPE + ROPE), RANK, ROPE, INDEX_HEADS * INDEX, INDEX, INDEX_HEADS]


class Projection:
    def __init__(self, weight: torch.Tensor) -> None:
        self.weight = weight

    def __call__(self, x: torch.Tensor) -> tuple[torch.Tensor]:
        return (F.linear(x, self.weight),)


def made(data: torch.Tensor, weight: torch.Tensor) -> tuple[LatentAttention, SparseAttnIndexer]:
    layer = LatentAttention(
        HEADS,
        (NOPE + ROPE) ** -0.5,
        NOPE,
        ROPE,
        VALUE,
        RANK,
        Projection(weight.to(data.dtype)),
        TOPK,
    )
    indexer = SparseAttnIndexer(INDEX_HEADS, INDEX, TOPK)
    for m in (layer, indexer):
        m.kv_cache = tuple(torch.full(s, math.nan, dtype=data.dtype) for s in m.cache_shapes(12, BLOCK))
    return layer, indexer


def equations(data: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """Equations 1 and 2: index scores, the topk keys of each query, and attention to their expanded keys."""
    q, latents, rope, index_q, index_k, weights = data.double().split(SIZES, dim=1)
    n = len(data)
    unseen = torch.arange(n) > torch.arange(n)[:, None]
    products = torch.einsum("thd,sd->ths", index_q.view(n, INDEX_HEADS, INDEX), index_k).clamp_min(0)
    scores = torch.einsum("th,ths->ts", weights, products).masked_fill(unseen, -math.inf)
    kept = torch.zeros(n, n, dtype=torch.bool).scatter_(1, scores.topk(min(TOPK, n), dim=1).indices, True)
    up = torch.einsum("hdr,kr->khd", weight.view(HEADS, NOPE + VALUE, RANK), latents)
    keys = torch.cat((up[..., :NOPE], rope[:, None].expand(-1, HEADS, -1)), dim=-1)
    logits = torch.einsum("nhd,khd->hnk", q.view(n, HEADS, -1), keys) / math.sqrt(NOPE + ROPE)
    logits = logits.masked_fill(unseen | ~kept, -math.inf)
    return torch.einsum("hnk,khd->nhd", logits.softmax(-1), up[..., NOPE:]).flatten(1)


@pytest.mark.parametrize("most", [1, 40, sparse_indexer.MOST_LOGITS])
@pytest.mark.parametrize("backend", [None, "latents", "expanded"])
@torch.inference_mode()
def test_layers_equal_equations(backend: str | None, most: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two prompts, mixed batches, then decodes, with all logits of a step at once and with few at a time.

    expanded: the first TOPK queries of a prompt attend to expanded keys, and the indexer has no row for them.
    """
    monkeypatch.setattr(sparse_indexer, "MOST_LOGITS", most)
    monkeypatch.setattr(MlaBackend, "_is_worth", lambda *_: backend == "expanded")
    generator = torch.Generator().manual_seed(0)
    weight = torch.randn(HEADS * (NOPE + VALUE), RANK, generator=generator, dtype=torch.float64) * RANK**-0.5
    data = [torch.randn(24, sum(SIZES), generator=generator) for _ in range(2)]
    expected = [equations(d, weight) for d in data]
    layer, indexer = made(data[0], weight)
    own: Any = make_backend(None, [indexer, layer], torch.device("cpu"), torch.float32) if backend else None
    table = torch.tensor([[7, 1, 4], [2, 9, 5]], dtype=torch.int32)
    for step, rest in (
        ([(4, 4), (2, 2)], None), ([(3, 7), (2, 4)], 2), ([(1, 8), (5, 9)], 5), ([(3, 11), (6, 15)], None),
        ([(1, 12), (1, 16)], None),
    ):  # fmt: skip
        at = [(i, p) for i, (n, k) in enumerate(step) for p in range(k - n, k)]
        slots = torch.tensor([int(table[i, p // BLOCK]) * BLOCK + p % BLOCK for i, p in at])
        starts = torch.tensor([0, *(n for n, _ in step)]).cumsum(0).to(torch.int32)
        lens = torch.tensor([k for _, k in step], dtype=torch.int32)
        decoded = [k for n, k in step if n == 1]
        counts = len(decoded), max(decoded, default=0)
        most = max(n for n, _ in step), max(k for _, k in step)
        metadata = AttentionMetadata(slots, starts, lens, table, *most, *counts)
        if backend:
            inputs: Any = SimpleNamespace(
                input_ids=slots, slot_mapping=slots, cu_seqlens_q=starts, seq_lens=lens, max_seqlen_q=most[0],
                max_seqlen_k=most[1], num_decodes=counts[0], max_decode_seqlen_k=counts[1],
                host_query_lens=starts.diff().numpy(), host_seq_lens=lens.numpy(),
            )  # fmt: skip
            metadata = own.plan(inputs, table)
        found = metadata.plan and metadata.plan.rest and len(metadata.plan.rest.rows)
        assert found == (rest if backend == "expanded" else None)
        tokens = torch.stack([data[i][p] for i, p in at])
        q, latents, rope, index_q, index_k, weights = tokens.split(SIZES, dim=1)
        with forward_context(metadata):
            indices = indexer(index_q.unflatten(1, (INDEX_HEADS, INDEX)), index_k, weights)
            assert (indices is None) is (metadata.max_seqlen_k <= TOPK)
            out = layer(q.unflatten(1, (HEADS, -1)), latents, rope, indices)
        want = torch.stack([expected[i][p] for i, p in at])
        torch.testing.assert_close(out.double(), want, atol=2e-5, rtol=2e-5)


def test_expanded_keys_keep_tokens(tmp_path: Path) -> None:
    """The first index_topk queries of a prompt attend to expanded keys, unless a backend is named."""
    folder = make_tiny(tmp_path, "deepseek_v32", "float32", index_topk=120)
    prompts = [[(i * 37 + n) % 500 for i in range(n)] for n in (100, 130)]
    greedy = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True)
    found: list[Any] = []
    for name in (None, "reference"):
        llm = LLM(str(folder), device="cpu", max_model_len=256, num_blocks=100, attention_backend=name)
        backend = llm.llm_engine.executor.runner.backend
        plans: list[Any] = []
        backend.plan = lambda *a, plan=backend.plan, plans=plans: plans.append(plan(*a)) or plans[-1]
        found.append([llm.generate([p], greedy)[0].outputs[0].token_ids for p in prompts])
        expansions = [m.plan for m in plans if m.plan is not None]
        assert [e.rest and len(e.rest.rows) for e in expansions] == ([] if name else [None, 10])
    assert found[0] == found[1]


@torch.inference_mode()
def test_fp8_index_scores_are_within_rounding(monkeypatch: pytest.MonkeyPatch) -> None:
    """Keys of magnitudes from 1e-3 to 1e6: the error of a score is at most that of e4m3 with a key's own scale."""
    found: list[torch.Tensor] = []

    def recorded(*args: Any) -> torch.Tensor:
        found.append(paged_mqa_logits(*args))
        return found[-1]

    monkeypatch.setattr(sparse_indexer, "paged_mqa_logits", recorded)
    generator = torch.Generator().manual_seed(0)
    n, split = 24, 20
    q = torch.randn(n, INDEX_HEADS, INDEX, generator=generator)
    k = torch.randn(n, INDEX, generator=generator) * torch.logspace(-3, 6, n)[:, None]
    weights = torch.randn(n, INDEX_HEADS, generator=generator)
    indexer = SparseAttnIndexer(INDEX_HEADS, INDEX, TOPK)
    indexer.kv_cache = indexer.new_cache(12, BLOCK, torch.float8_e4m3fn, "cpu")
    assert [t.dtype for t in indexer.kv_cache] == [torch.float8_e4m3fn, torch.float32]
    table = torch.tensor([7, 1, 4], dtype=torch.int32)
    for first, end in ((0, split), *((i, i + 1) for i in range(split, n))):
        at = torch.arange(first, end)
        starts, lens = (torch.tensor(x, dtype=torch.int32) for x in ([0, end - first], [end]))
        slots = table[at // BLOCK].long() * BLOCK + at % BLOCK
        metadata = AttentionMetadata(
            slots, starts, lens, table[None], end - first, end, num_decodes=end - first == 1
        )
        with forward_context(metadata):
            indexer(q[first:end], k[first:end], weights[first:end])
    q, k, weights = q.double(), k.double(), weights.double()
    scores = torch.einsum("th,ths->ts", weights, torch.einsum("thd,sd->ths", q, k).clamp_min(0))
    # e4m3 rounds by 2^-4 of a value, and by 2^-10 of the scale near zero; a scale is less than 2 * absmax / 448.
    rounding = k.abs() / 2**4 + k.abs().amax(1, keepdim=True) / 224 / 2**10
    bound = torch.einsum("th,ths->ts", weights.abs(), torch.einsum("thd,sd->ths", q.abs(), rounding))
    start = 0
    for logits in found:
        end = start + len(logits)
        seen = torch.arange(logits.shape[1]) <= torch.arange(start, end)[:, None]
        error = (logits.double() - scores[start:end, : logits.shape[1]]).abs()
        assert (error <= 1.01 * bound[start:end, : logits.shape[1]])[seen].all()
        assert logits[~seen].eq(-math.inf).all()
        start = end
    assert start == n


def test_fp8_index_keys_survive_small_steps(tmp_path: Path) -> None:
    """Prompts in chunks, prefix hits and preemption keep the tokens of whole prompts: a key's scale is its own."""
    folder = make_tiny(tmp_path, "deepseek_v32", "float32")
    greedy = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
    prompts = [[*range(10, 34), i] for i in range(4)]
    whole = LLM(str(folder), device="cpu", max_model_len=64, kv_cache_dtype="fp8")
    layers = [m for m in whole.llm_engine.executor.runner.layers if isinstance(m, SparseAttnIndexer)]
    assert [[t.dtype for t in m.kv_cache] for m in layers] == [[torch.float8_e4m3fn, torch.float32]] * 2
    expected = [o.outputs[0].token_ids for o in whole.generate(prompts, greedy)]
    assert all(m.kv_cache[1].count_nonzero() > 0 for m in layers)
    small = LLM(
        str(folder), device="cpu", num_blocks=10, block_size=8, max_num_seqs=4, max_num_batched_tokens=16,
        max_model_len=64, kv_cache_dtype="fp8",
    )  # fmt: skip
    for _ in range(2):
        assert [o.outputs[0].token_ids for o in small.generate(prompts, greedy)] == expected
    scheduler = small.llm_engine.scheduler
    assert scheduler.prefix_hits > 0 and scheduler.num_preemptions > 0


WRONG: list[tuple[str, dict[str, Any], str]] = [
    ("deepseek_v32", {"index_topk": 0}, "config.index_topk=0 is not supported, only integers above 0"),
    ("deepseek_v32", {"index_head_dim": 8}, "config.index_head_dim=8 is not supported, only sizes from qk_rope"),
    ("deepseek_v32", {"indexer_rope_interleave": True}, "config.indexer_rope_interleave=True is not supported"),
    ("glm_moe_dsa", {"indexer_types": ["shared", "full", "full"]}, "only 'full' or 'shared' for each of 3 layers"),
    ("glm_moe_dsa", {"mlp_layer_types": ["sparse", "dense"]}, "only 'dense' or 'sparse' for each of 3 layers"),
]  # fmt: skip


@pytest.mark.parametrize(("kind", "fields", "message"), WRONG, ids=[next(iter(f)) for _, f, _ in WRONG])
def test_unsupported_fields_are_named(
    kind: str, fields: dict[str, Any], message: str, tmp_path: Path
) -> None:
    config = build.load_config(make_tiny(tmp_path, kind, "float32"))
    for name, value in fields.items():
        setattr(config, name, value)
    with pytest.raises(Unsupported, match=message):
        plan(config)


def test_selection_bounds_the_cost_of_a_token() -> None:
    """A token reads 2,048 latents and the index keys of all tokens; a layer with a shared indexer has no keys."""
    from fk_bench.e2e.model_configs import load_config

    config = load_config("deepseek-v3.2")[1]
    made = plan(config)
    assert made.kv_bytes_per_token == 61 * (512 + 64 + 128) * 2
    assert made.kv_bytes(1000) == 1000 * made.kv_bytes_per_token
    assert made.kv_bytes(100_000) == 61 * 2 * (2048 * (512 + 64) + 100_000 * 128)
    assert made.flops(1, 100_000) - made.flops(1, 50_000) == 61 * 50_000 * 2 * 64 * 128
    config = load_config("glm-5")[1]
    before = plan(config)
    config.indexer_types = ["full", "shared", "shared"] * 26
    shared = plan(config)
    assert before.kv_bytes_per_token - shared.kv_bytes_per_token == 52 * 128 * 2
    assert before.parameters - shared.parameters == 52 * (4096 * 2048 + 128 * 6144 + 2 * 128 + 32 * 6144)


def test_prompts_are_decodes_of_their_queries(monkeypatch: pytest.MonkeyPatch) -> None:
    """The kernel for decodes gets queries in parts, each with its own length and block table."""
    calls: list[int] = []

    def decode(
        q: Any, cache: Any, indices: Any, starts: Any, lens: Any, table: Any, *rest: Any, out: Any
    ) -> Any:
        assert len(q) == len(indices) == len(lens) == len(table) and lens.dtype == torch.int32
        calls.append(len(q))
        starts = torch.arange(len(q) + 1, dtype=torch.int32)
        return out.copy_(mla_sparse.reference(q, cache, indices, starts, lens, table, *rest))

    monkeypatch.setattr(mla_sparse.mla_decode_cuda, "decode_sparse", decode)
    monkeypatch.setattr(mla_sparse, "QUERIES", 4)
    spec = registry.get("mla_sparse")
    for name, parts in (("odd", 4), ("padding", 3), ("empty_sequence", 2)):
        args = make_args(spec, next(c for c in spec.cases if c.name == name), "cpu")
        torch.testing.assert_close(mla_sparse._cuda(*args), mla_sparse.reference(*args))
        assert len(calls) == parts
        calls.clear()
