"""The attention seams on the KV layouts of the hosts' FlashAttention backends, which need a GPU themselves, on the CPU.

vLLM: [blocks, Hkv, block_size, 2 * D]. SGLang: keys and values apart, [slots, Hkv, D], a page being block_size slots.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from fk_integrations import sglang_attention, vllm_layers
from fk_integrations.apply import Journal

from fastkernels import tuned
from fastkernels.overrides.l1.attention_decode import attention_decode
from fastkernels.overrides.l1.attention_prefill import attention_prefill
from fastkernels.overrides.l1.store_kvcache import store_kvcache
from fastkernels.tuned import Entry, Table

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


@pytest.fixture
def use(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., None]]:
    """use(context, provider='reference'): a CPU's table for decodes of four sequences at most, of that context."""
    ops = (attention_decode, attention_prefill, store_kvcache)

    def put(context: int, provider: str = "reference") -> None:
        shape = {
            "heads": HEADS, "kv_heads": KV_HEADS, "head_size": D, "block_size": BLOCK, "window": 0, "dtype": "float32",
        }  # fmt: skip
        sizes, won = {"batch": 4, "context": context}, {"speedup": 1.3, "ci95": (1.2, 1.4)}
        entry = Entry("attention_decode", shape, sizes, provider, "native", "r1", **won)  # type: ignore[arg-type]
        (tmp_path / "cpu.json").write_text(Table("cpu", {"r1": {}}, (entry,)).to_json())
        monkeypatch.setenv("FASTKERNELS_TUNED", str(tmp_path))
        tuned._by_op.cache_clear()
        for op in ops:
            op.reset()

    yield put
    monkeypatch.undo()
    tuned._by_op.cache_clear()
    for op in ops:
        op.reset()


class HostImpl:
    """The state of vLLM's FlashAttentionImpl that the seam reads; its own forward must not be reached."""

    head_size, scale, sliding_window, logits_soft_cap = D, D**-0.5, (-1, -1), 0.0

    def forward(self, *args: object) -> torch.Tensor:
        raise AssertionError("fell back to the host's attention")


def vllm(impl: Any, batch: Batch) -> tuple[torch.Tensor, SimpleNamespace, torch.Tensor]:
    """(KV cache with all keys and values stored by `impl`, metadata, output with three rows of padding)."""
    shape = (batch.blocks, BLOCK, KV_HEADS, 2 * D)
    kv_cache = torch.full(shape, float("nan")).transpose(1, 2)  # NHD in memory
    padding = torch.zeros(3, KV_HEADS, D)  # key and value are padded, slot_mapping is not
    impl.do_kv_cache_update(
        None, torch.cat([*batch.keys, padding]), torch.cat([*batch.values, padding]), kv_cache, torch.cat(batch.slots)
    )  # fmt: skip
    metadata = SimpleNamespace(
        num_actual_tokens=sum(batch.queries), max_query_len=max(batch.queries), max_seq_len=max(batch.lengths),
        causal=True, query_start_loc=batch.starts, seq_lens=batch.seq_lens, block_table=batch.table,
    )  # fmt: skip
    return kv_cache, metadata, torch.full((sum(batch.queries) + 3, HEADS, D), 7.0)


@WINDOWS
@BATCHES
def test_vllm_reads_and_writes_the_hosts_layout(queries: list[int], window: int) -> None:
    batch = Batch(queries)
    impl = vllm_layers._implementation(HostImpl)()
    impl.sliding_window = (window, 0 if window >= 0 else -1)
    kv_cache, metadata, output = vllm(impl, batch)
    padded = torch.cat([batch.query, torch.zeros(3, HEADS, D)])
    assert impl.forward(None, padded, None, None, kv_cache, metadata, output) is output
    torch.testing.assert_close(output[:-3], batch.expected(window), atol=1e-5, rtol=1e-5)
    assert (output[-3:] == 7.0).all()


class Stock(HostImpl):
    """Its own forward, which says that it ran."""

    stored = 0

    def forward(self, *args: Any) -> Any:
        args[6].fill_(-1)
        return args[6]

    def do_kv_cache_update(self, *args: Any) -> None:
        self.stored += 1


def test_vllm_by_table_only_what_is_faster_is_ours(
    use: Callable[..., None], monkeypatch: pytest.MonkeyPatch
) -> None:
    use(64)
    monkeypatch.setenv("FASTKERNELS_STRICT", "1")  # what stays the host's is no fall-back
    impl = vllm_layers._implementation(Stock, True)()
    kinds = {"decode": [1, 1, 1], "mixed": [63, 1, 7], "prefill": [5], "drafts": [4, 4, 4]}
    for name, queries in kinds.items():
        batch = Batch(queries)
        kv_cache, metadata, output = vllm(impl, batch)
        impl.forward(None, batch.query, None, None, kv_cache, metadata, output)
        ours = batch.expected(-1) if name == "decode" else torch.full_like(batch.query, -1.0)
        torch.testing.assert_close(output[: sum(queries)], ours, atol=1e-5, rtol=1e-5)
    metadata.use_cascade = True
    impl.forward(None, batch.query, None, None, kv_cache, metadata, output)
    assert attention_decode.calls == 1 and attention_prefill.calls == 0 and store_kvcache.calls == len(kinds)
    assert attention_decode.left == {vllm_layers.NO_DECODE: 4}
    assert not attention_decode.fallbacks and not attention_prefill.fallbacks


def test_vllm_a_decode_that_it_cannot_do_is_the_hosts(use: Callable[..., None]) -> None:
    use(64)
    batch, impl = Batch([1, 1, 1]), vllm_layers._implementation(Stock, True)()
    kv_cache, metadata, output = vllm(impl, batch)
    metadata.use_cascade = True
    impl.forward(None, batch.query, None, None, kv_cache, metadata, output)
    assert (output == -1).all() and attention_decode.left == {"cascade attention": 1}


def test_vllm_keys_are_stored_by_ours_where_a_graph_replays_it(
    use: Callable[..., None], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Launched from Python, the host's call takes less; but what will be captured is compiled before."""
    use(64)
    impl: Any = vllm_layers._implementation(Stock, True, 71)()  # a class that no other test has
    said = []
    for batch, from_python in (([5], True), ([5], True), ([5], True), ([5], False), ([6], True)):
        monkeypatch.setattr(vllm_layers, "_from_python", lambda tensor, now=from_python: now)
        vllm(impl, Batch(batch))
        said.append((store_kvcache.calls, impl.stored))
    assert said == [(1, 0), (1, 1), (1, 2), (2, 2), (3, 2)]
    store_kvcache.set_candidate(lambda *args: None)
    try:
        monkeypatch.setattr(vllm_layers, "_from_python", lambda tensor: True)
        vllm(impl, Batch([5]))
        assert impl.stored == 2
    finally:
        store_kvcache.set_candidate(None)


@pytest.mark.parametrize(
    ("context", "provider", "window"),
    [(512, "reference", -1), (16, "reference", -1), (64, "fa3", -1), (64, "reference", 4)],
)
def test_vllm_a_decode_that_no_table_has_is_the_hosts(
    use: Callable[..., None], context: int, provider: str, window: int
) -> None:
    batch, impl = Batch([1, 1, 1]), vllm_layers._implementation(Stock, True)()
    kv_cache, metadata, output = vllm(impl, batch)
    use(context, provider)
    impl.sliding_window = (window, 0)
    impl.forward(None, batch.query, None, None, kv_cache, metadata, output)
    assert (output == -1).all() and attention_decode.left == {vllm_layers.NOT_FASTER: 1}


def test_vllm_what_a_graph_is_captured_for_runs_once_before(use: Callable[..., None]) -> None:
    """0.26 warms up with sequences of one token, and captures for max_model_len."""
    use(4096)
    batch = Batch([1, 1, 1])
    impl: Any = vllm_layers._implementation(Stock, True, 4000)()
    kv_cache, metadata, output = vllm(impl, batch)
    forward = (None, batch.query, None, None, kv_cache, metadata, output)
    for expected in (batch.expected(-1), torch.full_like(batch.query, -1.0)):
        impl.forward(*forward)
        torch.testing.assert_close(output[:3], expected, atol=1e-5, rtol=1e-5)
    metadata.max_seq_len = 4000
    impl.forward(*forward)
    torch.testing.assert_close(output[:3], batch.expected(-1), atol=1e-5, rtol=1e-5)
    assert attention_decode.calls == 2 and attention_decode.left == {vllm_layers.NOT_FASTER: 1}


def test_vllm_by_table_what_was_asked_for_runs_everywhere(
    use: Callable[..., None], monkeypatch: pytest.MonkeyPatch
) -> None:
    use(512)
    batch, impl = Batch([63, 1, 7]), vllm_layers._implementation(Stock, True)()
    kv_cache, metadata, output = vllm(impl, batch)
    attention_decode.set_candidate(lambda *args: args[0])
    try:
        impl.forward(None, batch.query, None, None, kv_cache, metadata, output)
        torch.testing.assert_close(output[:-3], batch.expected(-1), atol=1e-5, rtol=1e-5)
        assert attention_prefill.calls == 1 and not attention_decode.left
    finally:
        attention_decode.set_candidate(None)
    monkeypatch.setenv("FASTKERNELS_DISABLE", "store_kvcache")
    store_kvcache.reset()
    vllm(impl, batch)
    assert impl.stored == 1 and store_kvcache.calls == 0


def test_vllm_what_a_layer_says_of_its_shape() -> None:
    heads = {"num_heads": HEADS, "num_kv_heads": KV_HEADS, "head_size": D}
    layer = SimpleNamespace(**heads, sliding_window=9, kv_cache_torch_dtype=torch.float32)
    shape = (HEADS, KV_HEADS, D, None, 9, torch.float32)  # 9 keys, as of window_left 8
    assert vllm_layers.attention_shape(layer) == shape and attention_decode.key
    assert attention_decode.key.shape == ("heads", "kv_heads", "head_size", "block_size", "window", "dtype")


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


def sglang(batch: Batch, by_table: bool = False) -> tuple[Any, Layer, SimpleNamespace]:
    """(backend with our methods, a layer that it serves, the forward batch); the pool holds the context already."""
    pool = torch.full((2, batch.blocks * BLOCK, KV_HEADS, D), float("nan"))
    for slots, n, keys, values in zip(batch.slots, batch.context, batch.keys, batch.values, strict=True):
        pool[0, slots[:n]], pool[1, slots[:n]] = keys[:n], values[:n]
    backend: Any = sglang_attention._implementation(HostBackend, sglang_attention._flash_step, by_table)()
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


def test_sglang_by_table_only_what_is_faster_is_ours(
    use: Callable[..., None], monkeypatch: pytest.MonkeyPatch
) -> None:
    use(64)
    monkeypatch.setenv("FASTKERNELS_STRICT", "1")

    def step(queries: list[int], **mode: str) -> Any:
        batch = Batch(queries)
        backend, layer, forward_batch = sglang(batch, by_table=True)
        vars(forward_batch.forward_mode).update(mode)
        forward = backend.forward_decode if max(queries) == 1 else backend.forward_extend
        out = forward(batch.query, batch.new(batch.keys), batch.new(batch.values), layer, forward_batch)
        if not isinstance(out, str):
            torch.testing.assert_close(out.view(-1, HEADS, D), batch.expected(-1), atol=1e-5, rtol=1e-5)
        return out

    assert not isinstance(step([1, 1, 1]), str)
    assert step([63, 1, 7]) == step([4, 4, 4], name="TARGET_VERIFY") == "the host's extend"
    use(512)
    assert step([1, 1, 1]) == "the host's decode"
    assert store_kvcache.calls == 0  # the host stores them
    use(64)
    step([1, 1, 1]), step([5]), step([4, 4, 4], name="TARGET_VERIFY")
    assert attention_decode.left == {sglang_attention.NO_DECODE: 1, "forward mode TARGET_VERIFY": 1}
    assert attention_decode.calls == 1 and attention_prefill.calls == 0 and not attention_prefill.fallbacks


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
