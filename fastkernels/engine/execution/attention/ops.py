"""Attention with our ops, in their own provider order or with one provider that the user chose."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from fastkernels.core.dispatch import Op, Provider
from fastkernels.core.forward_context import AttentionMetadata
from fastkernels.engine.execution.attention.base import AttentionBackend, CannotCapture, metadata_of, store
from fastkernels.engine.steps.input_batch import Inputs
from fastkernels.engine.steps.step import StepInput
from fastkernels.overrides.attention.attention_decode import attention_decode
from fastkernels.overrides.attention.attention_prefill import attention_prefill

DECODES_APART = 64  # rows with one query in a mixed batch from which two FA3 calls are faster than one
LONG_DECODE = (
    16384  # keys of such a row, which FA3 does not split next to prompts: one SM reads them for each key head
)


class OpsBackend(AttentionBackend):
    """Uses attention_decode for rows with one query and attention_prefill for the rest.

    provider  'fa3', 'triton' or 'reference'; None: the first available provider of each op that supports the layers
    A candidate of an op takes precedence over both. Raises ValueError for an unsupported provider.

    FA3's varlen kernel computes a mixed batch in one call, which can be captured. A row with one query costs 1.5 times
    as much there as in a separate decode call, so outside graphs, batches with many or long such rows use one. Triton's
    kernel does the same in graphs; outside them, rows with one query always have their own call.

    trees  there are steps with trees of drafts, which are one call of a provider with tree masks
    """

    def __init__(
        self, provider: str | None, layers: Sequence[Any], device: torch.device, dtype: torch.dtype,
        trees: bool = False,
    ):  # fmt: skip
        self._wanted, self._layers, self._device, self._dtype = provider, layers, device, dtype
        self._decode = choose(attention_decode, provider, self._sample(prefill=False), device)
        self._prefill = choose(attention_prefill, provider, self._sample(prefill=True), device)
        self.name = self._prefill.name
        self._tree: Provider | None = None
        if trees:
            samples = self._sample(prefill=True, tree=torch.ones(1, dtype=torch.int64, device=device))
            self._tree = choose(attention_prefill, None if provider == "fa3" else provider, samples, device)
        self._mixed_decode = self._decode  # for rows with one query in a mixed batch
        if self.name == "fa3" and provider is None:
            # Not the tuned table's choice: a kernel first needed here would be compiled during a step.
            self._mixed_decode = choose(attention_decode, "fa3", self._sample(prefill=False), device)

    def plan(self, inputs: Inputs, block_table: torch.Tensor) -> AttentionMetadata:
        padded = inputs.input_ids.shape[0] > int(inputs.host_query_lens.sum())
        return metadata_of(self, inputs, block_table, padded=padded)

    def plan_capture(self, inputs: Inputs, block_table: torch.Tensor) -> AttentionMetadata:
        reason = "reference: its memory grows with the longest possible context"
        used = self._prefill if self._tree is None else self._tree
        if "reference" in (self._decode.name, used.name):
            raise CannotCapture(reason)
        if not inputs.decode_only and not self._captured_in_one():
            raise CannotCapture(
                f"{self.name}: rows with one query run in a separate kernel, and a graph would fix their number"
            )
        return metadata_of(self, inputs, block_table)

    def takes_apart(self, step: StepInput, hides_launches: bool) -> bool:
        decodes = step.num_decodes
        if step.drafts is not None and self._tree is not None:
            return False
        return hides_launches and self._apart(decodes, int(step.seq_lens[:decodes].max()) if decodes else 0)

    def _apart(self, num_decodes: int, longest: int) -> bool:
        """Whether rows with one query, of at most `longest` keys, have a call of their own."""
        many = num_decodes >= DECODES_APART or longest >= LONG_DECODE
        return many and self._captured_in_one()

    def forward(
        self,
        layer: Any,
        q: torch.Tensor,
        k: torch.Tensor | None,
        v: torch.Tensor | None,
        metadata: AttentionMetadata,
    ) -> torch.Tensor:
        store(layer, k, v, metadata)
        m, n = metadata, metadata.num_decodes
        if m.decode_only and m.tree is None:
            return self._run_decode(layer, q, m.seq_lens, m.block_table, m.max_seqlen_k)
        in_one = self._in_one(attention_prefill, self._prefill)
        seen = (
            m.max_decode_seqlen_k
            if layer.window_left < 0
            else min(m.max_decode_seqlen_k, layer.window_left + 1)
        )
        if n == 0 or m.tree is not None or (in_one and not self._apart(n, seen)):
            return self._run_prefill(layer, q, m, 0)
        out = self._run_prefill(layer, q, m, n)
        provider = self._mixed_decode if in_one else None
        rows = m.seq_lens[:n], m.block_table[:n], m.max_decode_seqlen_k
        out[:n] = self._run_decode(layer, q[:n], *rows, provider)
        return out

    def _run_decode(
        self, layer: Any, q: torch.Tensor, seq_lens: torch.Tensor, block_table: torch.Tensor, longest: int,
        wanted: Provider | None = None,
    ) -> torch.Tensor:  # fmt: skip
        return self._call(attention_decode, self._decode, wanted)(
            q, *layer.kv_cache, seq_lens, block_table, longest, layer.scale, layer.window_left, layer.softcap,
            *_rest(layer),
        )  # fmt: skip

    def _run_prefill(self, layer: Any, q: torch.Tensor, m: AttentionMetadata, first: int) -> torch.Tensor:
        """Attention of the rows from `first` on. The output has q's shape; tokens of earlier rows are undefined."""
        run, rest = self._call(attention_prefill, self._prefill), _rest(layer, (m.padded,))
        if m.tree is not None:
            assert self._tree is not None
            attention_prefill.calls += 1
            run, rest = self._tree.fn, (layer.k_scale, layer.v_scale, m.padded, layer.sinks, None, m.tree)
        return run(
            q, *layer.kv_cache, m.cu_seqlens_q[first:], m.seq_lens[first:], m.block_table[first:], m.max_seqlen_q,
            m.max_seqlen_k, layer.scale, layer.window_left, layer.softcap, *rest,
        )  # fmt: skip

    def _call(
        self, op: Op, provider: Provider, wanted: Provider | None = None
    ) -> Callable[..., torch.Tensor]:
        """The function to call: a candidate, else `wanted`, else the user's provider or the op's own choice."""
        if op.candidate is not None or (wanted is None and self._wanted is None):
            return op
        op.calls += 1
        return (wanted or provider).fn

    def _in_one(self, op: Op, provider: Provider) -> bool:
        return provider.name == "fa3" and op.candidate is None

    def _captured_in_one(self) -> bool:
        """Whether a graph of a mixed batch uses the prefill kernel for all rows."""
        if self._tree is not None:
            return True
        triton = self._prefill.name == "triton" and attention_prefill.candidate is None
        return triton or self._in_one(attention_prefill, self._prefill)

    def _sample(self, prefill: bool, tree: torch.Tensor | None = None) -> list[list[Any]]:
        """Arguments of one call for each kind of layer, for the providers' `supports`."""
        made = []
        kinds = {(m.num_heads, m.num_kv_heads, m.head_size, m.sinks is None): m for m in self._layers}
        for layer in kinds.values():
            q = torch.empty(1, layer.num_heads, layer.head_size, dtype=self._dtype, device=self._device)
            one = torch.ones(2, dtype=torch.int32, device=self._device)
            rest = [one[:1], one[:1].view(1, 1)]
            args = [q, *layer.kv_cache, *([one, *rest, 1, 1] if prefill else [*rest, 1])]
            more = _rest(layer, (True,) if prefill else ())
            if tree is not None:
                more = layer.k_scale, layer.v_scale, True, layer.sinks, None, tree
            made.append([*args, layer.scale, layer.window_left, layer.softcap, *more])
        return made


def _rest(layer: Any, padded: tuple[bool, ...] = ()) -> tuple[Any, ...]:
    """The arguments after softcap, without defaults at the end: not every provider and candidate takes all of them.

    padded: (padded,) for attention_prefill
    """
    if layer.sinks is not None:
        return layer.k_scale, layer.v_scale, *padded, layer.sinks
    scaled = (layer.k_scale, layer.v_scale) != (1.0, 1.0)
    return (layer.k_scale, layer.v_scale, *padded) if scaled or padded == (False,) else ()


def choose(op: Op, wanted: str | None, samples: list[list[Any]], device: torch.device) -> Provider:
    """The wanted provider, or the op's first that supports these layers. Raises ValueError."""
    reasons = []
    for provider, absent in op.order(device.type):
        if wanted not in (None, provider.name):
            continue
        reason = absent
        for args in samples:
            reason = reason or (provider.supports(*args) if provider.supports is not None else None)
        if reason is None:
            return provider
        reasons.append(reason)
    why = "; ".join(reasons) or f"{op.name} has no such provider"
    raise ValueError(f"attention_backend {wanted!r} is not supported: {why}; leave it out, or choose another")
