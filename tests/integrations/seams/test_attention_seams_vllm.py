"""The attention seam on the KV layout of vLLM's FlashAttention backend, on a CPU; the backend itself needs a GPU.

The layout: [blocks, Hkv, block_size, 2 * D].
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from fk_integrations.core import versions
from fk_integrations.patching import choose
from fk_integrations.patching.apply import apply
from fk_integrations.vllm import attention, mla
from fk_integrations.vllm.host import VllmAdapter
from support import attention_seams
from support.attention_seams import BATCHES, BLOCK, HEADS, KV_HEADS, WINDOWS, Batch, D
from torch import nn

from fastkernels.core import registry
from fastkernels.overrides.attention.attention_decode import attention_decode
from fastkernels.overrides.attention.attention_prefill import attention_prefill
from fastkernels.overrides.cache.store_kvcache import store_kvcache
from fastkernels.overrides.latent_attention import mla_decode
from fastkernels.patch import Request
from fastkernels.verify.measure import Point, arguments

use = attention_seams.use  # the fixture


class HostImpl:
    """The state of vLLM's FlashAttentionImpl that the seam reads; its own forward must not run."""

    head_size, scale, sliding_window, logits_soft_cap = D, D**-0.5, (-1, -1), 0.0
    sinks: Any = None
    kv_cache_dtype = "auto"

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


@BATCHES
def test_vllm_layers_with_sinks_are_ours(queries: list[int]) -> None:
    batch, impl = Batch(queries), attention._implementation(HostImpl)()
    impl.sinks = torch.linspace(-1, 3, HEADS).to(torch.bfloat16)
    kv_cache, metadata, output = vllm(impl, batch)
    impl.forward(None, batch.query, None, None, kv_cache, metadata, output)
    torch.testing.assert_close(output[:-3], batch.expected(-1, impl.sinks), atol=1e-5, rtol=1e-5)


def test_vllm_decode_with_sinks_is_not_by_table(use: Callable[..., None]) -> None:
    """The table's kernel has none: the step stays the host's."""
    use(64, "sdpa")
    batch, impl = Batch([1, 1, 1]), attention._implementation(Stock, True)()
    impl.sinks = torch.ones(HEADS)
    kv_cache, metadata, output = vllm(impl, batch)
    impl.forward(None, batch.query, None, None, kv_cache, metadata, output)
    assert (output == -1).all() and attention_decode.left == {attention.NOT_FASTER: 1}


@WINDOWS
@BATCHES
def test_vllm_reads_and_writes_the_hosts_layout(queries: list[int], window: int) -> None:
    batch = Batch(queries)
    impl = attention._implementation(HostImpl)()
    impl.sliding_window = (window, 0 if window >= 0 else -1)
    kv_cache, metadata, output = vllm(impl, batch)
    padded = torch.cat([batch.query, torch.zeros(3, HEADS, D)])
    assert impl.forward(None, padded, None, None, kv_cache, metadata, output) is output
    torch.testing.assert_close(output[:-3], batch.expected(window), atol=1e-5, rtol=1e-5)
    assert (output[-3:] == 7.0).all()


class CrossImpl(HostImpl):
    """Stores keys and values of an encoder's states, as vLLM's CrossAttentionImpl does in its forward."""

    def do_kv_cache_update(
        self, layer: Any, key: Any, value: Any, kv_cache: torch.Tensor, slot_mapping: torch.Tensor
    ) -> None:
        rows = kv_cache.transpose(1, 2)[slot_mapping // BLOCK, slot_mapping % BLOCK]
        rows = torch.cat((key[: len(rows)], value[: len(rows)]), -1)
        kv_cache.transpose(1, 2)[slot_mapping // BLOCK, slot_mapping % BLOCK] = rows


@BATCHES
def test_vllm_cross_attention_sees_all_states(queries: list[int]) -> None:
    batch, impl = Batch(queries), attention._cross(CrossImpl)()
    kv_cache, metadata, output = vllm(CrossImpl(), batch)
    layer = SimpleNamespace(kv_sharing_target_layer_name=None)
    parts = zip(batch.query.split(queries), batch.keys, batch.values, strict=True)
    expected = torch.cat([
        torch.nn.functional.scaled_dot_product_attention(
            *(t.double().transpose(0, 1) for t in part), enable_gqa=True
        ).transpose(0, 1).float()
        for part in parts
    ])  # fmt: skip
    padded = torch.cat([batch.query, torch.zeros(3, HEADS, D)])
    for key, value in ((None, None), (torch.cat(batch.keys), torch.cat(batch.values))):
        metadata.slot_mapping = torch.cat(batch.slots)
        if key is not None:
            kv_cache.fill_(float("nan"))
        assert impl.forward(layer, padded, key, value, kv_cache, metadata, output) is output
        torch.testing.assert_close(output[:-3], expected, atol=1e-5, rtol=1e-5)
        assert (output[-3:] == 7.0).all()


def test_vllm_cross_attention_on_an_fp8_cache_falls_back() -> None:
    host = type("Marked", (Stock,), {"kv_cache_dtype": "fp8"})
    batch, impl = Batch([1, 1, 1]), attention._cross(host)()
    kv_cache, metadata, output = vllm(CrossImpl(), batch)
    attention_decode.reset()
    layer = SimpleNamespace(kv_sharing_target_layer_name=None)
    impl.forward(layer, batch.query, None, None, kv_cache, metadata, output)
    assert (output == -1).all() and attention_decode.fallbacks == {"a KV cache in FP8": 1}
    attention_decode.reset()


class Stock(HostImpl):
    """A host class whose own forward leaves a mark."""

    stored = 0

    def forward(self, *args: Any) -> Any:
        args[6].fill_(-1)
        return args[6]

    def do_kv_cache_update(self, *args: Any) -> None:
        self.stored += 1


def test_vllm_by_table_only_faster_decodes_are_ours(
    use: Callable[..., None], monkeypatch: pytest.MonkeyPatch
) -> None:
    use(64)
    monkeypatch.setenv("FASTKERNELS_STRICT", "1")  # a call left to the host is not a fallback
    impl = attention._implementation(Stock, True)()
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
    assert attention_decode.left == {attention.NO_DECODE: 4}
    assert not attention_decode.fallbacks and not attention_prefill.fallbacks


def test_vllm_unsupported_decode_stays_the_hosts(use: Callable[..., None]) -> None:
    use(64)
    batch, impl = Batch([1, 1, 1]), attention._implementation(Stock, True)()
    kv_cache, metadata, output = vllm(impl, batch)
    metadata.use_cascade = True
    impl.forward(None, batch.query, None, None, kv_cache, metadata, output)
    assert (output == -1).all() and attention_decode.left == {"cascade attention": 1}


def test_vllm_our_kernel_stores_keys_in_graphs(
    use: Callable[..., None], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Outside of graphs the host stores them, in one C++ call; before a capture our kernel runs once to be compiled."""
    use(64)
    impl: Any = attention._implementation(
        Stock, True, 71
    )()  # a class of its own, with a set of sizes of its own
    counts = []
    for batch, from_python in (([5], True), ([5], True), ([5], True), ([5], False), ([6], True)):
        monkeypatch.setattr(attention, "_from_python", lambda tensor, now=from_python: now)
        vllm(impl, Batch(batch))
        counts.append((store_kvcache.calls, impl.stored))
    assert counts == [(1, 0), (1, 1), (1, 2), (2, 2), (3, 2)]
    store_kvcache.set_candidate(lambda *args: None)
    try:
        monkeypatch.setattr(attention, "_from_python", lambda tensor: True)
        vllm(impl, Batch([5]))
        assert impl.stored == 2
    finally:
        store_kvcache.set_candidate(None)


@pytest.mark.parametrize(
    ("context", "provider", "window"),
    [(512, "reference", -1), (16, "reference", -1), (64, "fa3", -1), (64, "reference", 4)],
)
def test_vllm_untuned_decode_stays_the_hosts(
    use: Callable[..., None], context: int, provider: str, window: int
) -> None:
    batch, impl = Batch([1, 1, 1]), attention._implementation(Stock, True)()
    kv_cache, metadata, output = vllm(impl, batch)
    use(context, provider)
    impl.sliding_window = (window, 0)
    impl.forward(None, batch.query, None, None, kv_cache, metadata, output)
    assert (output == -1).all() and attention_decode.left == {attention.NOT_FASTER: 1}


def test_vllm_kernel_runs_once_before_its_capture(use: Callable[..., None]) -> None:
    """0.26 warms up with sequences of one token, and captures for max_model_len."""
    use(4096)
    batch = Batch([1, 1, 1])
    impl: Any = attention._implementation(Stock, True, 4000)()
    kv_cache, metadata, output = vllm(impl, batch)
    forward = (None, batch.query, None, None, kv_cache, metadata, output)
    for expected in (batch.expected(-1), torch.full_like(batch.query, -1.0)):
        impl.forward(*forward)
        torch.testing.assert_close(output[:3], expected, atol=1e-5, rtol=1e-5)
    metadata.max_seq_len = 4000
    impl.forward(*forward)
    torch.testing.assert_close(output[:3], batch.expected(-1), atol=1e-5, rtol=1e-5)
    assert attention_decode.calls == 2 and attention_decode.left == {attention.NOT_FASTER: 1}


def test_vllm_requested_provider_runs_every_step(
    use: Callable[..., None], monkeypatch: pytest.MonkeyPatch
) -> None:
    use(512)
    batch, impl = Batch([63, 1, 7]), attention._implementation(Stock, True)()
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


def test_vllm_shape_of_an_attention_layer() -> None:
    heads = {"num_heads": HEADS, "num_kv_heads": KV_HEADS, "head_size": D}
    layer = SimpleNamespace(
        **heads, sliding_window=9, kv_cache_dtype="auto", kv_cache_torch_dtype=torch.float32
    )
    shape = (HEADS, KV_HEADS, D, None, 9, torch.float32)  # 9 keys, as of window_left 8
    assert attention.attention_shape(layer) == shape and attention_decode.key
    layer.kv_cache_dtype, layer.kv_cache_torch_dtype = "fp8", torch.uint8
    assert attention.attention_shape(layer)[-1] == torch.float8_e4m3fn
    assert attention_decode.key.shape == ("heads", "kv_heads", "head_size", "block_size", "window", "dtype")


FLASH_ATTENTION = type(
    "FlashAttentionImpl", (HostImpl,),
    {
        "__module__": attention.FLASH_ATTN.partition(":")[0], "attn_type": "decoder", "kv_cache_dtype": "auto",
        "alibi_slopes": None,
    },
)  # fmt: skip
CONFIG = SimpleNamespace(
    cache_config=SimpleNamespace(block_size=BLOCK), model_config=SimpleNamespace(max_model_len=40),
    scheduler_config=SimpleNamespace(max_num_seqs=8), compilation_config=SimpleNamespace(cudagraph_mode=None, mode=0),
    parallel_config=SimpleNamespace(decode_context_parallel_size=1, pipeline_parallel_size=1),
)  # fmt: skip


class Layer(nn.Module):
    """The parts of vLLM's Attention layer that a patch reads."""

    num_heads, num_kv_heads, head_size = HEADS, KV_HEADS, D
    sliding_window, kv_cache_dtype, kv_cache_torch_dtype = None, "auto", torch.float32

    def __init__(self) -> None:
        super().__init__()
        self.impl = FLASH_ATTENTION()


class Backend(VllmAdapter):
    """vLLM with the class above in place of its Attention layer."""

    def targets(self, spec: Any, model: Any) -> list[Any]:
        found = [t for t in super().targets(spec, model) if t.path.endswith(":Attention")]
        return [replace(t, path=f"{__name__}:Layer") for t in found]

    def batch_invariant(self) -> None:
        """Unlike vLLM's, without an import of vLLM."""


@pytest.mark.parametrize("version", ["0.26.0", "0.32.0"])
def test_layers_of_the_transformers_backend_are_ours(version: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """0.26 keeps them in a dict outside of the module tree, 0.32 in the tree."""
    monkeypatch.setattr(versions, "unknown", lambda *_: None)
    model, layers = nn.ModuleDict({"mlp": nn.Linear(2, 2)}), [Layer(), Layer()]
    if version == "0.26.0":
        vars(model)["attention_instances"] = dict(enumerate(layers))
    else:
        model["attn"] = nn.ModuleList(layers)
    adapter = Backend(SimpleNamespace(vllm_config=CONFIG))
    adapter.version = version
    names = [name for name, _ in attention.named_modules(model)]
    assert len(names) == len(set(names)) == len([*model.modules()]) + 2 * (version == "0.26.0")
    patched = apply(adapter, model, Request("patch", ops=("attention",), strict=True))
    (row,) = patched.report()
    assert (row["state"], row["modules"]) == ("active", 2)
    batch = Batch([1, 1, 1])
    for layer in layers:
        kv_cache, metadata, output = vllm(layer.impl, batch)
        layer.impl.forward(None, batch.query, None, None, kv_cache, metadata, output)
        torch.testing.assert_close(output[:3], batch.expected(-1), atol=1e-5, rtol=1e-5)
    (row,) = patched.report()
    assert (row["calls"], row["proof"]) == (4, "calls")
    patched.undo()
    assert {type(layer.impl) for layer in layers} == {FLASH_ATTENTION}
    measured = choose.modules_of(adapter, model, registry.get("attention"))
    assert measured == [(layer, (HEADS, KV_HEADS, D, BLOCK, 0, torch.float32)) for layer in layers]


@pytest.mark.parametrize("quantized", [True, False], ids=["fp8-queries", "queries"])
def test_vllm_decodes_of_an_fp8_cache_are_ours(quantized: bool) -> None:
    """vLLM stores the cache as bytes, and most of its layers quantize their queries. Prompts stay the host's."""
    batch, impl = Batch([1, 1, 1]), attention._implementation(Stock)()
    impl.kv_cache_dtype = "fp8"
    scales = {"_q_scale_float": 0.5, "_k_scale_float": 0.25, "_v_scale_float": 2.0}
    layer = SimpleNamespace(**scales)
    _, metadata, output = vllm(impl, batch)
    assert impl.stored == 1  # the host's kernel quantizes
    FP8 = torch.float8_e4m3fn
    stored = torch.zeros(batch.blocks * BLOCK, KV_HEADS, 2 * D)
    for i, (slots, keys, values) in enumerate(zip(batch.slots, batch.keys, batch.values, strict=True)):
        batch.keys[i], batch.values[i] = (
            (t / s).to(FP8).float() * s for t, s in ((keys, 0.25), (values, 2.0))
        )
        stored[slots] = torch.cat([batch.keys[i] / 0.25, batch.values[i] / 2.0], dim=-1)
    pages = stored.to(FP8).view(torch.uint8).view(batch.blocks, BLOCK, KV_HEADS, 2 * D).transpose(1, 2)
    query = batch.query.bfloat16()
    if quantized:
        query = (batch.query / 0.5).to(FP8)
    batch.query = query.float() * (0.5 if quantized else 1.0)
    out = output.bfloat16()
    impl.forward(layer, query, None, None, pages, metadata, out)
    torch.testing.assert_close(out[:-3].float(), batch.expected(-1), atol=1.6e-2, rtol=1.6e-2)
    prompt = SimpleNamespace(**{**vars(metadata), "max_query_len": 5})
    attention_prefill.reset()
    impl.forward(layer, query, None, None, pages, prompt, out)
    assert (out == -1).all() and attention_prefill.fallbacks == {attention.FP8_PROMPT: 1}


def test_vllm_unsupported_step_is_counted_as_fallback() -> None:
    attention_prefill.reset()
    impl = attention._implementation(HostImpl)()
    metadata = SimpleNamespace(causal=False)
    with pytest.raises(AssertionError, match="fell back"):
        impl.forward(None, None, None, None, None, metadata, None)
    assert attention_prefill.fallbacks == {"attention that is not causal": 1}


def test_vllm_unsupported_layer_has_a_reason() -> None:
    impl: Any = SimpleNamespace(
        attn_type="decoder", kv_cache_dtype="auto", alibi_slopes=None, sinks=None, sliding_window=(7, 0)
    )
    graphs = SimpleNamespace(mixed_mode=lambda: SimpleNamespace(name="PIECEWISE"))
    config: Any = SimpleNamespace(
        compilation_config=SimpleNamespace(cudagraph_mode=graphs), cache_config=SimpleNamespace(),
        parallel_config=SimpleNamespace(decode_context_parallel_size=1),
    )  # fmt: skip
    names = ("_q_scale", "_k_scale", "_v_scale")
    layer = SimpleNamespace(**dict.fromkeys(names, torch.ones(1)), **{f"{name}_float": 1.0 for name in names})

    def reason(**change: Any) -> str | None:
        return attention._unsupported(layer, SimpleNamespace(**{**vars(impl), **change}), config)

    assert reason() is None and reason(sliding_window=None) is None
    assert reason(kv_cache_dtype="fp8_e5m2") == "a KV cache of fp8_e5m2 is not supported"
    assert reason(kv_cache_dtype="fp8_e4m3") is None
    layer._k_scale = torch.ones(KV_HEADS)
    assert reason(kv_cache_dtype="fp8") == "_k_scale of a KV cache in FP8 is not one number"
    config.cache_config.calculate_kv_scales = True
    assert "calculate_kv_scales" in str(reason(kv_cache_dtype="fp8"))
    assert reason(sliding_window=(7, 7)) == "sliding window (7, 7) looks ahead"
    assert reason(sinks=torch.ones(HEADS)) is None
    assert reason(alibi_slopes=torch.ones(HEADS)) == "ALiBi is not supported"
    config.parallel_config.decode_context_parallel_size = 2
    assert reason() == "decode context parallelism is not supported"


def test_decode_attention_is_measured_with_the_layers_soft_cap() -> None:
    """Sizes are those of the engine, the block size is the cache's."""
    impl: Any = FLASH_ATTENTION()
    impl.sliding_window, impl.logits_soft_cap = (7, 0), 30.0
    layer = SimpleNamespace(
        impl=impl, num_heads=HEADS, num_kv_heads=KV_HEADS, head_size=D, sliding_window=8, kv_cache_dtype="auto",
        kv_cache_torch_dtype=torch.float32,
    )  # fmt: skip
    here = VllmAdapter(SimpleNamespace(vllm_config=CONFIG)).of("attention_decode")
    assert here.points(attention_decode) == [(1, 40), (8, 40), (4, 40)]
    shape = here.whole_shape(attention_decode, layer)
    assert shape == (HEADS, KV_HEADS, D, BLOCK, 8, torch.float32)
    impl.sinks = torch.ones(HEADS)
    assert here.whole_shape(attention_decode, layer) is None
    impl.sinks = None
    point = Point("attention_decode", shape, (4, 40), (layer, layer))
    calls = arguments(point, torch.device("cpu"), torch.Generator().manual_seed(0), 1 << 18)
    assert {(call[7], call[8]) for call in calls} == {(7, 30.0)}
    assert len({call[1].data_ptr() for call in calls}) == len(calls) > 2
    assert attention_decode.key is not None and attention_decode.key.of(*calls[0]) == (shape, (4, 40))
    impl.kv_cache_dtype = "fp8_e5m2"
    assert here.whole_shape(attention_decode, layer) is None


class LatentImpl:
    """The state of vLLM's implementations of latent attention that the seam reads."""

    num_heads, kv_lora_rank, scale = 2, 8, 0.3

    def forward_mqa(self, q: Any, cache: torch.Tensor, metadata: Any, layer: Any) -> Any:
        return "the host's"


def test_vllm_decodes_of_latent_attention_are_ours() -> None:
    impl: Any = mla._implementation(LatentImpl)()
    lengths, table = (
        torch.tensor([1, 9], dtype=torch.int32),
        torch.tensor([[2, 0], [3, 1]], dtype=torch.int32),
    )
    decode = SimpleNamespace(seq_lens=lengths, block_table=table)
    metadata = SimpleNamespace(decode=decode, max_seq_len=9)
    cache, query = torch.randn(4, 8, 12), (torch.randn(2, 2, 8), torch.randn(2, 2, 4))
    whole = torch.cat(query, -1)
    expected = mla_decode.reference(whole, cache, lengths, table, 9, 0.3, 8)
    for q in (query, whole):
        found, lse = impl.forward_mqa(q, cache, metadata, None)
        assert lse is None
        torch.testing.assert_close(found, expected, atol=1e-5, rtol=1e-5)
    # Several tokens of a sequence, as in speculative decoding, and heads that a backend pads.
    assert impl.forward_mqa(whole.repeat(2, 1, 1), cache, metadata, None) == "the host's"
    assert impl.forward_mqa(whole.repeat(1, 2, 1), cache, metadata, None) == "the host's"
