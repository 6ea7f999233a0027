"""The attention seam on the KV layout of SGLang's FlashAttention backend, on a CPU; the backend itself needs a GPU.

The layout: keys and values apart, [slots, Hkv, D], a page being block_size slots.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import replace
from types import ModuleType, SimpleNamespace
from typing import Any, ClassVar

import pytest
import torch
from fk_integrations.core.journal import Journal
from fk_integrations.sglang import attention
from fk_integrations.sglang.scheduler import SglangAdapter
from support import attention_seams
from support.attention_seams import BATCHES, BLOCK, HEADS, KV_HEADS, WINDOWS, Batch, D

from fastkernels.core.dispatch import Provider
from fastkernels.core.reasons import Kind
from fastkernels.core.tuning import Chip
from fastkernels.overrides.attention.attention_decode import attention_decode, reference
from fastkernels.overrides.attention.attention_prefill import attention_prefill
from fastkernels.overrides.cache.store_kvcache import store_kvcache
from fastkernels.verify import measure
from fastkernels.verify.measure import LEAST_CALLS, Point

use = attention_seams.use  # the fixture


class HostBackend:
    """The state of SGLang's FlashAttentionBackend that the seam reads."""

    page_size = BLOCK
    forward_metadata: Any
    token_to_kv_pool: Any
    prepared: ClassVar[list[bool]] = []

    def init_forward_metadata_out_graph(self, forward_batch: object, in_capture: bool = False) -> None:
        self.prepared.append(in_capture)

    def forward_decode(self, *args: object, **kwargs: object) -> str:
        return "the host's decode"

    def forward_extend(self, *args: object, **kwargs: object) -> str:
        return "the host's extend"


class Layer(torch.nn.Module):
    tp_q_head_num, tp_k_head_num, head_dim, layer_id = HEADS, KV_HEADS, D, 0
    scaling, logit_cap, sliding_window_size = D**-0.5, 0.0, -1


def sglang(batch: Batch, by_table: bool = False) -> tuple[Any, Layer, SimpleNamespace]:
    """(backend with our methods, a layer that it serves, the forward batch); the pool holds the context."""
    pool = torch.full((2, batch.blocks * BLOCK, KV_HEADS, D), float("nan"))
    for slots, n, keys, values in zip(batch.slots, batch.context, batch.keys, batch.values, strict=True):
        pool[0, slots[:n]], pool[1, slots[:n]] = keys[:n], values[:n]
    backend: Any = attention._implementation(HostBackend, attention._flash_step, by_table)()
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
        forward_mode=mode, spec_info=None, encoder_lens=None, out_cache_loc=out_cache_loc,
        batch_size=len(batch.queries),
    )  # fmt: skip
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


@BATCHES
def test_sglang_layers_with_sinks_are_ours(queries: list[int]) -> None:
    batch, sinks = Batch(queries), torch.linspace(-1, 3, HEADS).to(torch.bfloat16)
    backend, layer, forward_batch = sglang(batch)
    forward = backend.forward_decode if max(queries) == 1 else backend.forward_extend
    q = batch.query.view(-1, HEADS * D)
    out = forward(q, batch.new(batch.keys), batch.new(batch.values), layer, forward_batch, sinks=sinks)
    torch.testing.assert_close(out.view(-1, HEADS, D), batch.expected(-1, sinks), atol=1e-5, rtol=1e-5)


def kernel(**given: Any) -> torch.Tensor:
    """FlashAttention's entry point with SGLang's names, by the reference."""
    assert given["cu_seqlens_q"].tolist() == list(range(len(given["q"]) + 1)) and given["max_seqlen_q"] == 1
    assert given["causal"] and given["num_splits"] == 0 and given["ver"] == 3
    CALLS.append(given["scheduler_metadata"])
    longest = given["page_table"].shape[1] * given["k_cache"].shape[1]
    return reference(
        given["q"], given["k_cache"], given["v_cache"], given["cache_seqlens"], given["page_table"], longest,
        given["softmax_scale"], given["window_size"][0], given["softcap"],
    )  # fmt: skip


CALLS: list[Any] = []
PAGES = 40  # of the pool


@pytest.fixture
def running(monkeypatch: pytest.MonkeyPatch) -> tuple[Any, list[Any]]:
    """(a model runner with FlashAttention on a pool of PAGES, its two layers)."""
    module: Any = ModuleType(attention.FLASH.partition(":")[0])
    module.flash_attn_with_kvcache = kernel
    monkeypatch.setitem(sys.modules, module.__name__, module)
    CALLS.clear()
    backend: Any = type("FlashAttentionBackend", (), {"__module__": module.__name__, "page_size": BLOCK})()
    vars(backend).update(
        init_cuda_graph_state=None, num_attention_heads=HEADS, num_kv_heads=KV_HEADS, head_dim=D, num_splits=0,
        fa_impl_ver=3, _compute_scheduler_metadata=lambda *args: ("the plan", *args[:2]),
    )  # fmt: skip
    pool = type("MHATokenToKVPool", (), {})()
    pool.dtype = pool.store_dtype = torch.float32
    pool.k_buffer = [torch.randn(PAGES * BLOCK, KV_HEADS, D) for _ in range(2)]
    pool.v_buffer = [torch.randn(PAGES * BLOCK, KV_HEADS, D) for _ in range(2)]
    pool.size, pool.page_size = (PAGES - 1) * BLOCK, BLOCK
    pool.get_kv_buffer = lambda i: (pool.k_buffer[i], pool.v_buffer[i])
    backend.token_to_kv_pool = pool
    runner: Any = SimpleNamespace(
        attn_backend=backend, max_running_requests=8, model_config=SimpleNamespace(context_len=2 * BLOCK + 1),
        server_args=SimpleNamespace(kv_cache_dtype="auto", pp_size=1),
    )  # fmt: skip
    layers = []
    for i in range(2):
        layer: Any = Layer()
        layer.layer_id, layer.is_cross_attention, layer.v_head_dim, layer.qk_head_dim = i, False, D, D
        layer.attn_type, layer.xai_temperature_len = SimpleNamespace(value="decoder"), -1
        layer.tp_v_head_num, layer.k_scale, layer.v_scale = KV_HEADS, None, None
        layer.pos_encoding_mode, layer.logit_capping_method, layer.logit_cap = "NONE", "tanh", 30.0
        layers.append(layer)
    return runner, layers


SHAPE, CONTEXT = (HEADS, KV_HEADS, D, BLOCK, 0, torch.float32), 3 * BLOCK


def test_sglang_decode_attention_is_measured_for_its_graphs(running: Any) -> None:
    """A graph's page table covers the longest context in whole pages."""
    runner, (layer, _) = running
    here = SglangAdapter(runner).of("attention_decode")
    assert here.points(attention_decode) == [(1, CONTEXT), (8, CONTEXT), (4, CONTEXT)]
    assert here.whole_shape(attention_decode, layer) == SHAPE
    layer.is_cross_attention = True
    assert here.whole_shape(attention_decode, layer) is None
    runner.attn_backend.page_size = 1
    assert here.points(attention_decode)[0] == (1, 2 * BLOCK + 1)


def test_sglang_decode_attention_is_timed_on_its_pool(running: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    runner, layers = running
    here = SglangAdapter(runner).of("attention_decode").live(attention_decode, SHAPE, layers)
    assert here is not None and here.calls is not None and attention_decode.key is not None
    point = Point("attention_decode", SHAPE, (4, CONTEXT), tuple(layers))
    pool, random = runner.attn_backend.token_to_kv_pool, torch.Generator().manual_seed(0)
    before = [t.clone() for t in (*pool.k_buffer, *pool.v_buffer)]
    found = here.calls(point, torch.device("cpu"), random, 1 << 10)
    assert found is not None
    check, calls = found
    assert len(calls) == LEAST_CALLS and check[8] == 30.0
    for given in (check, *calls):
        assert attention_decode.key.of(*given) == (SHAPE, (4, CONTEXT))
        assert given[4].shape == (4, 3)  # as a graph's: FlashAttention's plan depends on it
    assert [c[1].data_ptr() for c in calls[:2]] == [t.data_ptr() for t in pool.k_buffer]
    for call in calls:
        assert call[3].tolist() == [CONTEXT] * 4 and len(set(call[4].flatten().tolist())) == 12
        assert reference(*call).isfinite().all()
    assert all(torch.equal(a, b) for a, b in zip(before, (*pool.k_buffer, *pool.v_buffer), strict=True))
    # Only a part has memory yet, whose data would stay in L2
    pool.post_capture_active, pool.post_capture_backed_bytes = True, sum(t.nbytes for t in before) // PAGES
    assert here.calls(point, torch.device("cpu"), random, 1 << 16) is None


def test_sglang_proposals_are_compared_with_its_own_kernel(
    running: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    runner, layers = running
    here = SglangAdapter(runner).of("attention_decode").live(attention_decode, SHAPE, layers)
    assert here is not None
    kernel, key = here.host, attention_decode.key
    assert kernel is not None and kernel.name == "fa3" and key is not None
    monkeypatch.setattr(
        attention_decode, "key", replace(key, propose=lambda *args: [("cpp", {}), ("reference", {})])
    )
    monkeypatch.setattr(measure, "CPU_ROUNDS", 5)
    monkeypatch.setattr(Provider, "unavailable", lambda self, device: None)
    point = Point("attention_decode", SHAPE, (4, CONTEXT), tuple(layers), here)
    chip = Chip("cpu", 2, 0.0, 1 << 10, (0, 0))
    found = measure.measure([point], "r1", torch.device("cpu"), chip, 60.0)
    (entry,), (said,) = found.entries, found.said.values()
    assert entry.baseline == "fa3" and entry.provider in (None, "cpp", "reference")
    assert "differs" not in str(said) and ("the plan", 4, CONTEXT) in CALLS
    args = here.calls(point, torch.device("cpu"), torch.Generator(), 0)  # type: ignore[misc]
    assert args is not None
    CALLS.clear()
    windowed = [*args[0][:7], 3, 0.0, *args[0][9:]]
    torch.testing.assert_close(kernel.fn(*windowed), reference(*windowed))
    assert CALLS == [None]  # SGLang has no plan for layers with a window


def test_sglang_graph_of_our_kernels_alone_needs_no_plan(
    use: Callable[..., None], monkeypatch: pytest.MonkeyPatch
) -> None:
    use(64)
    capturing = [False]
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: capturing[0])
    batch = Batch([1, 1, 1])
    backend, layer, forward_batch = sglang(batch, by_table=True)
    HostBackend.prepared.clear()
    backend.decode_cuda_graph_metadata = {3: SimpleNamespace(scheduler_metadata="a plan")}
    args = (batch.query, batch.new(batch.keys), batch.new(batch.values))

    def step(*layers: Any, eager: tuple[Any, ...] = ()) -> Any:
        backend.decode_cuda_graph_metadata[3].scheduler_metadata = "a plan"
        backend.init_forward_metadata_out_graph(forward_batch, in_capture=True)
        for capturing[0], each in [(True, layer) for layer in layers] + [(False, layer) for layer in eager]:
            backend.forward_decode(*args, each, forward_batch)
        capturing[0] = False
        backend.init_forward_metadata_out_graph(forward_batch)
        return backend.decode_cuda_graph_metadata[3].scheduler_metadata

    other = Layer()  # one that stays the host's
    assert step(layer) is None and step(layer, other) == "a plan" and step(layer) is None
    assert step(layer, eager=(other,)) is None  # a step without a graph leaves the captured graph as it is
    use(512)
    assert step(layer) == "a plan"  # no entry
    assert HostBackend.prepared == [True, False] * 5


def test_sglang_unsupported_step_is_counted_as_fallback() -> None:
    batch = Batch([1, 1, 1])
    backend, layer, forward_batch = sglang(batch)
    attention_prefill.reset()
    args = (batch.query, batch.new(batch.keys), batch.new(batch.values), layer, forward_batch)
    assert backend.forward_decode(*args, rope=torch.ones(HEADS)) == "the host's decode"
    forward_batch.forward_mode.name = "TARGET_VERIFY"
    assert backend.forward_extend(*args) == "the host's extend"
    forward_batch.forward_mode.name, forward_batch.spec_info = "DECODE", object()
    assert backend.forward_decode(*args) == "the host's decode"
    forward_batch.spec_info = None
    backend.forward_metadata.cache_seqlens_int32 = batch.seq_lens[:1]
    assert backend.forward_decode(*args) == "the host's decode"
    counted = dict(attention_prefill.fallbacks)
    assert list(counted) == [
        "rope is set", "forward mode TARGET_VERIFY", "speculative decoding", "a decode of several queries a sequence",
    ]  # fmt: skip
    assert set(counted.values()) == {1}
    assert (
        backend.forward_decode(*args[:3], Layer(), forward_batch) == "the host's decode"
    )  # a layer without a patch
    assert attention_prefill.fallbacks == counted


def test_sglang_by_table_only_faster_decodes_are_ours(
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
    assert attention_decode.left == {attention.NO_DECODE: 1, "forward mode TARGET_VERIFY": 1}
    assert attention_decode.calls == 1 and attention_prefill.calls == 0 and not attention_prefill.fallbacks


class Backend:
    """An unknown attention backend of SGLang; with parts, a wrapper such as the hybrid one."""

    def __init__(self, **parts: Any) -> None:
        vars(self).update(parts)

    def init_cuda_graph_state(self) -> None: ...


def test_sglang_backends_inside_wrappers_are_found_once() -> None:
    prefill, decode = Backend(), Backend()
    wrapper = Backend(prefill_backend=prefill, children=[decode, prefill])
    runner = SimpleNamespace(
        attn_backend=wrapper, decode_attn_backend=decode, decode_attn_backend_group=[decode]
    )
    assert attention.backends(runner) == [wrapper, decode, prefill]


def test_sglang_unsupported_layer_or_backend_has_a_reason() -> None:
    runner, journal, layer = SimpleNamespace(attn_backend=Backend()), Journal(), Layer()
    layer.__dict__ |= {
        "attn_type": SimpleNamespace(value="decoder"), "is_cross_attention": False, "qk_head_dim": D, "v_head_dim": D,
        "tp_v_head_num": KV_HEADS, "pos_encoding_mode": "NONE", "logit_capping_method": "tanh",
        "xai_temperature_len": -1, "k_scale": None, "v_scale": None,
    }  # fmt: skip

    def reason(**change: Any) -> str:
        layer.__dict__ |= change
        found = attention.swap_attention(runner, layer, "0.5.23", journal)
        assert found is not None and found.kind is Kind.UNSUPPORTED
        return found.text

    assert "Backend; known: sglang.srt" in reason()
    assert "keys of 32 with values of 16" in reason(v_head_dim=16)
    layer.v_head_dim = D
    ones, runner.server_args = torch.ones(()), SimpleNamespace(kv_cache_dtype="auto")
    assert "Backend; known: sglang.srt" in reason(k_scale=ones, v_scale=ones)  # as in an FP8 model
    runner.server_args.kv_cache_dtype = "bfloat16"
    assert reason() == "scaled keys and values are not supported"
    assert "encoder_only" in reason(attn_type=SimpleNamespace(value="encoder_only"))
    assert type(runner.attn_backend) is Backend and not journal.steps
