"""The attention seams on the KV layouts of the hosts' FlashAttention backends, which need a GPU themselves, on the CPU.

vLLM: [blocks, Hkv, block_size, 2 * D]. SGLang: keys and values apart, [slots, Hkv, D], a page being block_size slots.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from fk_integrations import sglang_attention, vllm_layers
from fk_integrations.apply import Journal

from fastkernels.overrides.l1.attention_decode import attention_decode
from fastkernels.overrides.l1.attention_prefill import attention_prefill

HEADS, KV_HEADS, D, BLOCK = 6, 2, 32, 16
# Drafts: each sequence has three tokens of a draft to check, and its own.
BATCHES = pytest.mark.parametrize(
    "queries", [[1, 1, 1], [63, 1, 7], [5], [4, 4, 4]], ids=["decode", "mixed", "prefill", "drafts"]
)
WINDOWS = pytest.mark.parametrize("window", [-1, 8])


class Batch:
    """Sequences of 33, 0 and 20 tokens and then `queries` more, on shuffled blocks of which 0 is never used."""

    def __init__(self, queries: list[int]) -> None:
        generator = torch.Generator().manual_seed(0)
        self.queries, self.context = queries, [33, 0, 20][: len(queries)]
        self.lengths = [c + n for c, n in zip(self.context, queries, strict=True)]
        blocks = [-(-n // BLOCK) for n in self.lengths]
        self.blocks = sum(blocks) + 1
        self.table = torch.zeros(len(queries), max(blocks), dtype=torch.int32)
        order = torch.randperm(sum(blocks), generator=generator).int() + 1
        for row, ids in zip(self.table, order.split(blocks), strict=True):
            row[: len(ids)] = ids
        self.keys = [torch.randn(n, KV_HEADS, D, generator=generator) for n in self.lengths]
        self.values = [torch.randn(n, KV_HEADS, D, generator=generator) for n in self.lengths]
        self.slots = [
            torch.tensor([int(self.table[i, p // BLOCK]) * BLOCK + p % BLOCK for p in range(n)])
            for i, n in enumerate(self.lengths)
        ]
        self.query = torch.randn(sum(queries), HEADS, D, generator=generator)
        self.starts = torch.tensor([0, *torch.tensor(queries).cumsum(0)], dtype=torch.int32)
        self.seq_lens = torch.tensor(self.lengths, dtype=torch.int32)

    def new(self, rows: list[torch.Tensor]) -> torch.Tensor:
        return torch.cat([r[c:] for r, c in zip(rows, self.context, strict=True)])

    def expected(self, window: int) -> torch.Tensor:
        """[T, HEADS, D], computed in float64. A query sees itself and `window` keys before it, or all (-1)."""
        parts = []
        for q, k, v in zip(self.query.split(self.queries), self.keys, self.values, strict=True):
            mask = torch.ones(len(q), len(k), dtype=torch.bool).tril(len(k) - len(q))
            mask = mask if window < 0 else mask.triu(len(k) - len(q) - window)
            heads = [t.double().transpose(0, 1) for t in (q, k, v)]
            out = torch.nn.functional.scaled_dot_product_attention(*heads, attn_mask=mask, enable_gqa=True)
            parts.append(out.transpose(0, 1).float())
        return torch.cat(parts)


class HostImpl:
    """The state of vLLM's FlashAttentionImpl that the seam reads; its own forward must not be reached."""

    head_size, scale, sliding_window, logits_soft_cap = D, D**-0.5, (-1, -1), 0.0

    def forward(self, *args: object) -> torch.Tensor:
        raise AssertionError("fell back to the host's attention")


@WINDOWS
@BATCHES
def test_vllm_reads_and_writes_the_hosts_layout(queries: list[int], window: int) -> None:
    batch = Batch(queries)
    shape = (batch.blocks, BLOCK, KV_HEADS, 2 * D)
    kv_cache = torch.full(shape, float("nan")).transpose(1, 2)  # NHD in memory
    impl = vllm_layers._implementation(HostImpl)()
    impl.sliding_window = (window, 0 if window >= 0 else -1)
    padding = torch.zeros(3, KV_HEADS, D)  # key and value are padded, slot_mapping is not
    impl.do_kv_cache_update(
        None, torch.cat([*batch.keys, padding]), torch.cat([*batch.values, padding]), kv_cache, torch.cat(batch.slots)
    )  # fmt: skip
    metadata = SimpleNamespace(
        num_actual_tokens=sum(queries), max_query_len=max(queries), max_seq_len=max(batch.lengths), causal=True,
        query_start_loc=batch.starts, seq_lens=batch.seq_lens, block_table=batch.table,
    )  # fmt: skip
    output = torch.full((sum(queries) + 3, HEADS, D), 7.0)
    padded = torch.cat([batch.query, torch.zeros(3, HEADS, D)])
    assert impl.forward(None, padded, None, None, kv_cache, metadata, output) is output
    torch.testing.assert_close(output[:-3], batch.expected(window), atol=1e-5, rtol=1e-5)
    assert (output[-3:] == 7.0).all()


def test_vllm_what_it_cannot_do_goes_to_the_host_and_is_counted() -> None:
    attention_prefill.reset()
    impl = vllm_layers._implementation(HostImpl)()
    metadata = SimpleNamespace(causal=False)
    with pytest.raises(AssertionError, match="fell back"):
        impl.forward(None, None, None, None, None, metadata, None)
    assert attention_prefill.fallbacks == {"attention that is not causal": 1}


def test_vllm_says_why_a_layer_is_left_alone() -> None:
    impl: Any = SimpleNamespace(
        attn_type="decoder", kv_cache_dtype="auto", alibi_slopes=None, sinks=None, sliding_window=(7, 0)
    )
    graphs = SimpleNamespace(mixed_mode=lambda: SimpleNamespace(name="PIECEWISE"))
    config: Any = SimpleNamespace(
        compilation_config=SimpleNamespace(cudagraph_mode=graphs),
        parallel_config=SimpleNamespace(decode_context_parallel_size=1),
    )

    def reason(**change: Any) -> str | None:
        return vllm_layers._unsupported(SimpleNamespace(**{**vars(impl), **change}), config)

    assert reason() is None and reason(sliding_window=None) is None
    assert reason(kv_cache_dtype="fp8_e4m3") == "a KV cache of fp8_e4m3 is not supported"
    assert reason(sliding_window=(7, 7)) == "sliding window (7, 7) looks ahead"
    assert reason(sinks=torch.ones(HEADS)) == "ALiBi and attention sinks are not supported"
    config.parallel_config.decode_context_parallel_size = 2
    assert reason() == "decode context parallelism is not supported"


class HostBackend:
    """The state of SGLang's FlashAttentionBackend that the seam reads."""

    page_size = BLOCK
    forward_metadata: Any
    token_to_kv_pool: Any

    def forward_decode(self, *args: object, **kwargs: object) -> str:
        return "the host's decode"

    def forward_extend(self, *args: object, **kwargs: object) -> str:
        return "the host's extend"


class Layer(torch.nn.Module):
    tp_q_head_num, tp_k_head_num, head_dim, layer_id = HEADS, KV_HEADS, D, 0
    scaling, logit_cap, sliding_window_size = D**-0.5, 0.0, -1


def sglang(batch: Batch) -> tuple[Any, Layer, SimpleNamespace]:
    """(backend with our methods, a layer that it serves, the forward batch); the pool holds the context already."""
    pool = torch.full((2, batch.blocks * BLOCK, KV_HEADS, D), float("nan"))
    for slots, n, keys, values in zip(batch.slots, batch.context, batch.keys, batch.values, strict=True):
        pool[0, slots[:n]], pool[1, slots[:n]] = keys[:n], values[:n]
    backend: Any = sglang_attention._implementation(HostBackend, sglang_attention._flash_step)()
    backend.token_to_kv_pool = SimpleNamespace(
        get_kv_buffer=lambda layer_id: tuple(pool), dtype=torch.float32
    )
    backend.forward_metadata = SimpleNamespace(
        page_table=batch.table, cache_seqlens_int32=batch.seq_lens, cu_seqlens_q=batch.starts,
        max_seq_len_q=max(batch.queries), max_seq_len_k=1,
    )  # fmt: skip
    layer = Layer()
    backend.fastkernels_layers.add(layer)
    mode = SimpleNamespace(name="DECODE" if max(batch.queries) == 1 else "EXTEND")
    out_cache_loc = batch.new(batch.slots)
    forward_batch = SimpleNamespace(
        forward_mode=mode, spec_info=None, encoder_lens=None, out_cache_loc=out_cache_loc
    )
    return backend, layer, forward_batch


@WINDOWS
@BATCHES
def test_sglang_reads_and_writes_the_hosts_layout(queries: list[int], window: int) -> None:
    batch = Batch(queries)
    backend, layer, forward_batch = sglang(batch)
    layer.sliding_window_size = window
    calls = attention_decode.calls
    forward = backend.forward_decode if max(queries) == 1 else backend.forward_extend
    q = batch.query.view(-1, HEADS * D)
    out = forward(q, batch.new(batch.keys), batch.new(batch.values), layer, forward_batch, sinks=None)
    torch.testing.assert_close(out.view(-1, HEADS, D), batch.expected(window), atol=1e-5, rtol=1e-5)
    assert (attention_decode.calls > calls) == (max(queries) == 1)
    again = forward(q, None, None, layer, forward_batch)  # a layer that shares the keys of another
    assert torch.equal(again, out)


def test_sglang_what_it_cannot_do_goes_to_the_host_and_is_counted() -> None:
    batch = Batch([1, 1, 1])
    backend, layer, forward_batch = sglang(batch)
    attention_prefill.reset()
    args = (batch.query, batch.new(batch.keys), batch.new(batch.values), layer, forward_batch)
    assert backend.forward_decode(*args, sinks=torch.ones(HEADS)) == "the host's decode"
    forward_batch.forward_mode.name = "TARGET_VERIFY"
    assert backend.forward_extend(*args) == "the host's extend"
    forward_batch.forward_mode.name, forward_batch.spec_info = "DECODE", object()
    assert backend.forward_decode(*args) == "the host's decode"
    forward_batch.spec_info = None
    backend.forward_metadata.cache_seqlens_int32 = batch.seq_lens[:1]
    assert backend.forward_decode(*args) == "the host's decode"
    counted = dict(attention_prefill.fallbacks)
    assert list(counted) == [
        "sinks is set", "forward mode TARGET_VERIFY", "speculative decoding", "a decode of several queries a sequence",
    ]  # fmt: skip
    assert set(counted.values()) == {1}
    assert backend.forward_decode(*args[:3], Layer(), forward_batch) == "the host's decode"  # not one of ours
    assert attention_prefill.fallbacks == counted


class Backend:
    """An attention backend of SGLang that we do not know; with parts, a wrapper such as the hybrid one."""

    def __init__(self, **parts: Any) -> None:
        vars(self).update(parts)

    def init_cuda_graph_state(self) -> None: ...


def test_sglang_backends_inside_wrappers_are_found_once() -> None:
    prefill, decode = Backend(), Backend()
    wrapper = Backend(prefill_backend=prefill, children=[decode, prefill])
    runner = SimpleNamespace(
        attn_backend=wrapper, decode_attn_backend=decode, decode_attn_backend_group=[decode]
    )
    assert sglang_attention.backends(runner) == [wrapper, decode, prefill]


def test_sglang_says_why_a_layer_or_a_backend_is_left_alone() -> None:
    runner, journal, layer = SimpleNamespace(attn_backend=Backend()), Journal(), Layer()
    layer.__dict__ |= {
        "attn_type": SimpleNamespace(value="decoder"), "is_cross_attention": False, "qk_head_dim": D, "v_head_dim": D,
        "tp_v_head_num": KV_HEADS, "pos_encoding_mode": "NONE", "logit_capping_method": "tanh",
        "xai_temperature_len": -1, "k_scale": None, "v_scale": None,
    }  # fmt: skip

    def reason(**change: Any) -> str:
        layer.__dict__ |= change
        return str(sglang_attention.swap_attention(runner, layer, "0.5.23", journal))

    assert "Backend; known: sglang.srt" in reason()
    assert "keys of 32 with values of 16" in reason(v_head_dim=16)
    layer.v_head_dim = D
    ones, runner.server_args = torch.ones(()), SimpleNamespace(kv_cache_dtype="auto")
    assert "Backend; known: sglang.srt" in reason(k_scale=ones, v_scale=ones)  # as in an FP8 model
    runner.server_args.kv_cache_dtype = "bfloat16"
    assert reason() == "scaled keys and values are not supported"
    assert "encoder_only" in reason(attn_type=SimpleNamespace(value="encoder_only"))
    assert type(runner.attn_backend) is Backend and not journal.steps
