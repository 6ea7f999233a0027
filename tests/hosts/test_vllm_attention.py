"""The attention seam on the KV layout of vLLM's FlashAttention, [blocks, Hkv, block_size, 2 * D], on the CPU."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from fk_integrations.vllm_layers import _implementation

HEADS, KV_HEADS, D, BLOCK = 6, 2, 32, 16


class HostImpl:
    """The state of FlashAttentionImpl that the seam reads; its own forward must not be reached."""

    head_size, scale, sliding_window, logits_soft_cap = D, D**-0.5, (-1, -1), 0.0

    def forward(self, *args: object) -> torch.Tensor:
        raise AssertionError("fell back to the host's attention")


def expected(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    n, total = q.shape[0], k.shape[0]
    mask = torch.ones(n, total, dtype=torch.bool).tril(total - n)
    heads = [t.double().transpose(0, 1) for t in (q, k, v)]
    out = torch.nn.functional.scaled_dot_product_attention(*heads, attn_mask=mask, enable_gqa=True)
    return out.transpose(0, 1).float()


@pytest.mark.parametrize("queries", [[1, 1, 1], [63, 1, 7], [5]], ids=["decode", "mixed", "prefill"])
def test_reads_and_writes_the_hosts_layout(queries: list[int]) -> None:
    generator = torch.Generator().manual_seed(0)
    context = [33, 0, 20][: len(queries)]
    lengths = [c + n for c, n in zip(context, queries, strict=True)]
    blocks = [-(-n // BLOCK) for n in lengths]
    table = torch.zeros(len(queries), max(blocks), dtype=torch.int32)
    order = torch.randperm(sum(blocks), generator=generator).int() + 1
    for row, ids in zip(table, order.split(blocks), strict=True):
        row[: len(ids)] = ids
    kv_cache = torch.full((sum(blocks) + 1, BLOCK, KV_HEADS, 2 * D), float("nan")).transpose(
        1, 2
    )  # NHD in memory
    keys = [torch.randn(n, KV_HEADS, D, generator=generator) for n in lengths]
    values = [torch.randn(n, KV_HEADS, D, generator=generator) for n in lengths]
    slots = [[int(table[i, p // BLOCK]) * BLOCK + p % BLOCK for p in range(n)] for i, n in enumerate(lengths)]
    impl = _implementation(HostImpl)()
    padding = torch.zeros(3, KV_HEADS, D)  # key and value are padded, slot_mapping is not
    impl.do_kv_cache_update(
        None, torch.cat([*keys, padding]), torch.cat([*values, padding]), kv_cache,
        torch.tensor([s for row in slots for s in row]),
    )  # fmt: skip
    query = torch.randn(sum(queries), HEADS, D, generator=generator)
    metadata = SimpleNamespace(
        num_actual_tokens=sum(queries),
        max_query_len=max(queries),
        max_seq_len=max(lengths),
        query_start_loc=torch.tensor([0, *torch.tensor(queries).cumsum(0)], dtype=torch.int32),
        seq_lens=torch.tensor(lengths, dtype=torch.int32),
        block_table=table,
        causal=True,
    )
    output = torch.full((sum(queries) + 3, HEADS, D), 7.0)
    padded = torch.cat([query, torch.zeros(3, HEADS, D)])
    assert impl.forward(None, padded, None, None, kv_cache, metadata, output) is output
    want = torch.cat([expected(*t) for t in zip(query.split(queries), keys, values, strict=True)])
    torch.testing.assert_close(output[:-3], want, atol=1e-5, rtol=1e-5)
    assert (output[-3:] == 7.0).all()


def test_what_it_cannot_do_goes_to_the_host_and_is_counted() -> None:
    from fastkernels.overrides.l1.attention_prefill import attention_prefill

    attention_prefill.reset()
    impl = _implementation(HostImpl)()
    metadata = SimpleNamespace(causal=False)
    with pytest.raises(AssertionError, match="fell back"):
        impl.forward(None, None, None, None, None, metadata, None)
    assert attention_prefill.fallbacks == {"attention that is not causal": 1}
