"""Attention sinks: the ops and the layer against transformers' GPT-OSS."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from fastkernels.core.forward_context import AttentionMetadata, forward_context
from fastkernels.engine.execution.attention import CannotCapture, make_backend
from fastkernels.overrides.attention.attention_decode import attention_decode
from fastkernels.overrides.attention.attention_prefill import attention_prefill
from fastkernels.overrides.attention.vllm import VllmAttention

HEADS, KV_HEADS, SIZE, BLOCK, KEYS = 4, 2, 16, 8, 21
WITH_SINKS = {"cuda-split", "triton", "cpp", "reference"}


@pytest.fixture(scope="module")
def sample() -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)

    def randn(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator)

    return {
        "q": randn(KEYS, HEADS, SIZE), "k": randn(KEYS, KV_HEADS, SIZE), "v": randn(KEYS, KV_HEADS, SIZE),
        "sinks": 2 * randn(HEADS),
    }  # fmt: skip


def expected(sample: dict[str, torch.Tensor], window: int | None) -> torch.Tensor:
    """[T, heads, size] of the whole sequence, by transformers."""
    from transformers.models.gpt_oss.modeling_gpt_oss import eager_attention_forward

    module: Any = SimpleNamespace(
        sinks=sample["sinks"], num_key_value_groups=HEADS // KV_HEADS, training=False
    )
    at = torch.arange(KEYS)
    seen = at[None, :] <= at[:, None]
    if window is not None:
        seen &= at[None, :] > at[:, None] - window
    mask = torch.zeros(KEYS, KEYS).masked_fill(~seen, float("-inf"))[None, None]
    parts = (sample[name].transpose(0, 1)[None] for name in ("q", "k", "v"))
    return eager_attention_forward(module, *parts, mask, scaling=SIZE**-0.5)[0][0]


def metadata(start: int, end: int) -> AttentionMetadata:
    """The step of tokens start .. end - 1 of a sequence in blocks 3, 1, 2."""
    table, at = torch.tensor([[3, 1, 2]], dtype=torch.int32), torch.arange(start, end)
    starts, lengths = (torch.tensor(n, dtype=torch.int32) for n in ([0, end - start], [end]))
    slots = table[0, at // BLOCK].long() * BLOCK + at % BLOCK
    decodes = int(end - start == 1)
    return AttentionMetadata(slots, starts, lengths, table, end - start, end, decodes, end * decodes)


@pytest.mark.parametrize("backend", [False, True])
@pytest.mark.parametrize("window", [None, 6])
def test_layer_with_sinks_is_transformers(
    sample: dict[str, torch.Tensor], window: int | None, backend: bool
) -> None:
    """A prefill of 17 tokens, then four decodes, with the ops and with the engine's backend."""
    layer = VllmAttention(
        HEADS, SIZE, SIZE**-0.5, KV_HEADS, per_layer_sliding_window=window, sinks=sample["sinks"]
    )
    layer.kv_cache = tuple(torch.zeros(2, 4, BLOCK, KV_HEADS, SIZE))
    found = []
    for start, end in ((0, 17), *((i, i + 1) for i in range(17, KEYS))):
        step = metadata(start, end)
        if backend:
            made = make_backend(None, [layer], torch.device("cpu"), torch.float32)
            step = AttentionMetadata(**{**vars(step), "backend": made})
        with forward_context(step):
            found.append(layer(*(sample[name][start:end] for name in ("q", "k", "v"))))
    out = torch.cat(found).view(KEYS, HEADS, SIZE)
    torch.testing.assert_close(out, expected(sample, window), atol=1e-5, rtol=1e-5)
    layer.sinks = None
    with forward_context(metadata(KEYS - 1, KEYS)):
        without = layer(*(sample[name][-1:] for name in ("q", "k", "v")))
    assert (without.view(HEADS, SIZE) - out[-1]).abs().max() > 0.01


def test_other_kernels_refuse_sinks(sample: dict[str, torch.Tensor]) -> None:
    cache, step = torch.zeros(4, BLOCK, KV_HEADS, SIZE), metadata(0, 2)
    rest = [step.seq_lens, step.block_table]
    decode = [sample["q"][:1], cache, cache, *rest, KEYS, 0.25]
    prefill = [sample["q"][:2], cache, cache, step.cu_seqlens_q, *rest, 2, KEYS, 0.25]
    for op, args in ((attention_decode, decode), (attention_prefill, prefill)):
        scalars = [-1, 0.0, 1.0, 1.0, *([True] if op is attention_prefill else [])]
        for provider in op.providers:
            if provider.name in WITH_SINKS or provider.supports is None:
                continue
            reason = "it has no attention sinks"
            assert provider.supports(*args, *scalars, sample["sinks"]) == reason
            assert provider.supports(*args, sinks=sample["sinks"]) == reason
    assert {p.name for p in attention_decode.providers} > WITH_SINKS


def test_named_backend_without_sinks_is_refused(sample: dict[str, torch.Tensor]) -> None:
    layer = VllmAttention(HEADS, SIZE, SIZE**-0.5, KV_HEADS, sinks=sample["sinks"])
    layer.kv_cache = tuple(torch.zeros(2, 4, BLOCK, KV_HEADS, SIZE))
    with pytest.raises(ValueError, match="'fa3' is not supported"):
        make_backend("fa3", [layer], torch.device("cpu"), torch.float32)


@pytest.mark.parametrize(("name", "is_captured"), [("fa3", True), ("triton", True), ("flashinfer", False)])
def test_mixed_batches_with_sinks_are_captured(
    sample: dict[str, torch.Tensor], name: str, is_captured: bool, request: pytest.FixtureRequest
) -> None:
    """By kernels that read all lengths on the device and need no separate call for decodes."""
    layer = VllmAttention(HEADS, SIZE, SIZE**-0.5, KV_HEADS, sinks=sample["sinks"])
    layer.kv_cache = tuple(torch.zeros(2, 4, BLOCK, KV_HEADS, SIZE))
    backend: Any = make_backend(None, [layer], torch.device("cpu"), torch.float32)
    (backend._prefill,) = (p for p in attention_prefill.providers if p.name == name)
    (backend._decode,) = (p for p in attention_decode.providers if p.name == "triton")
    request.addfinalizer(lambda: attention_prefill.set_candidate(None))
    m = metadata(0, 3)
    inputs: Any = SimpleNamespace(
        decode_only=False, slot_mapping=m.slot_mapping, cu_seqlens_q=m.cu_seqlens_q, seq_lens=m.seq_lens,
        max_seqlen_q=3, max_seqlen_k=KEYS, num_decodes=0, max_decode_seqlen_k=KEYS,
    )  # fmt: skip
    for candidate in (None, backend._prefill.fn):
        attention_prefill.set_candidate(candidate)
        if is_captured and candidate is None:
            assert backend.plan_capture(inputs, m.block_table).num_decodes == 0
        else:
            with pytest.raises(CannotCapture, match="separate kernel"):
                backend.plan_capture(inputs, m.block_table)
