"""Calls that launch Triton kernels which no small case of an op's provider launches, on tensors of the CPU.

They are for `ahead.launched`, which notes launches and runs none: kernels for several ranks, of the engine's steps, and
of the parts that an op chooses by size or GPU.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any
from unittest import mock

import numpy as np
import torch
from support.kernels import step_kernel_cases

from fastkernels.core import registry
from fastkernels.core.communicator import Symmetric
from fastkernels.engine.execution.drafts import draft_kernels, tree_kernels
from fastkernels.engine.sampling import token_masks
from fastkernels.engine.steps.input_batch import InputBatch
from fastkernels.engine.steps.step import StepInput
from fastkernels.overrides.attention import attention_decode_split
from fastkernels.overrides.collective import exchange, words
from fastkernels.overrides.dense_attention import wide_heads
from fastkernels.overrides.expert_parallel import ep_combine_batched, ep_dispatch_batched
from fastkernels.overrides.latent_attention import mla_triton
from fastkernels.overrides.linear import linear_int4
from fastkernels.overrides.moe import expert_libraries, mxfp4_prompt
from fastkernels.overrides.recurrence.kernels import linear_chunks
from fastkernels.overrides.rope import qk_norm_rope_pair
from fastkernels.overrides.routing import sorted_pairs

BF16, F32, I32, I64 = torch.bfloat16, torch.float32, torch.int32, torch.int64
HIDDEN, TOKENS = 256, 5


def _peers() -> Symmetric:
    """The memory of two ranks, which no kernel here reads."""
    return Symmetric([0, 0], 0, Symmetric.UNIT, torch.device("cpu"), 1.0)


def _of_ranks(op: str, *args: Any) -> None:
    """A provider of a collective in a group of two."""
    fn = next(p.fn for p in registry.get(op).op.providers if p.name == "triton")  # type: ignore[union-attr]
    with mock.patch.object(exchange, "symmetric_of", lambda *_: _peers()):
        fn(*args)


def _normed(count: int) -> None:
    x, weight = torch.zeros(TOKENS, HIDDEN, dtype=BF16), torch.zeros(HIDDEN, dtype=BF16)
    _of_ranks("all_reduce_rms_norm", x, weight, 1e-5, torch.zeros_like(x), "tp", count)


def _combined() -> None:
    source = torch.zeros(2 * TOKENS, dtype=I32)
    with mock.patch("fastkernels.overrides.expert_parallel.ep_combine.rows", lambda *_: TOKENS):
        _of_ranks("ep_combine", torch.zeros(2 * TOKENS, HIDDEN, dtype=BF16), source, "tp")


def _decode_even() -> None:
    cache = torch.zeros(4, 16, 2, 64, dtype=BF16)
    attention_decode_split.decode_split(
        torch.zeros(TOKENS, 8, 64, dtype=BF16), cache, cache, torch.ones(TOKENS, dtype=I32),
        torch.zeros(TOKENS, 4, dtype=I32), 64, 0.125, even=attention_decode_split.EVEN,
    )  # fmt: skip


def _pair() -> None:
    x, weight, angles = torch.zeros(1, TOKENS, 4, 64), torch.zeros(64), torch.zeros(TOKENS, 64)
    call: Any = (x, weight, angles, angles, 1e-6, None, None)
    qk_norm_rope_pair._launched(call, call)


def _gathered() -> None:
    pairs = sorted_pairs.Sorted(
        torch.zeros(16, dtype=I32), torch.zeros(1, dtype=I32), torch.zeros(1, dtype=I32), 8, 2, 1
    )
    values = torch.zeros(TOKENS, HIDDEN, dtype=torch.float8_e4m3fn)
    sorted_pairs.gather(values, torch.zeros(TOKENS, HIDDEN // 128), pairs)


def _advanced() -> None:
    rows = draft_kernels.Rows(*torch.zeros(6, TOKENS, dtype=I64).unbind())
    draft_kernels.advance_triton(rows, 1, 30, InputBatch(torch.device("cpu"), TOKENS, 40, 4))


def _accepted() -> None:
    rows = draft_kernels.Rows(*torch.zeros(6, TOKENS, dtype=I64).unbind())
    packed = torch.zeros(len(draft_kernels.COLUMNS), TOKENS, dtype=I64)
    held = draft_kernels.Held.zeros(TOKENS, 3, torch.device("cpu"))
    ids, sampled, last = torch.zeros(3, 9, dtype=I64)
    draft_kernels.accept_triton(packed, ids, sampled, rows, 3, True, held, last)


def _settled() -> None:
    one, batch = np.ones(1, np.int64), InputBatch(torch.device("cpu"), TOKENS, 40, 4)
    step = StepInput(one, one.astype(np.int32), one.astype(np.int32), one, one, 0, np.ones((0, 3), np.int64))
    held = draft_kernels.Held.zeros(TOKENS + 1, 3, torch.device("cpu"))
    draft_kernels.settle_triton(batch.load(step, TOKENS, 1), batch, held, None)


def _masked() -> None:
    masks = token_masks.DeviceMasks(torch.zeros(2, dtype=I64), torch.zeros(2, 32, dtype=I32))
    token_masks._apply_triton(torch.zeros(4, 1000), masks)


def _exchanged() -> None:
    exchange.launch(torch.zeros(4096, dtype=BF16), _peers(), 1, True)


def _message(
    pass_on: Callable[[Any, Symmetric], Any], of: Callable[[torch.Tensor], Any] = lambda x: x
) -> None:
    """A small message, as words."""
    pass_on(of(torch.zeros(8, 64, dtype=BF16)), _peers())


def _splits_of_mla() -> None:
    mla_triton.combine(torch.zeros(3, 4, 2, 64), torch.zeros(3, 4, 2), torch.zeros(3, 4, 64, dtype=BF16))


def _softmax() -> None:
    wide_heads.softmax(torch.zeros(2, 3, 100), torch.zeros(2, 3, 100, dtype=BF16), 0.1)


def _in_order() -> None:
    mxfp4_prompt.in_order(torch.zeros(TOKENS, HIDDEN, dtype=BF16))


def _known() -> None:
    expert_libraries.known(torch.zeros(TOKENS, 2), torch.zeros(TOKENS, 2, dtype=I32), 8)


def _dispatched() -> None:
    ids = torch.zeros(TOKENS, 2, dtype=I32)
    _of_ranks("ep_dispatch", torch.zeros(TOKENS, HIDDEN, dtype=BF16), ids, torch.zeros(TOKENS, 2), 8, "tp")


def _packed() -> None:
    rows, ids = torch.zeros(TOKENS, HIDDEN, dtype=BF16), torch.zeros(TOKENS, 2, dtype=I32)
    scales = torch.zeros(TOKENS, 2)
    ep_dispatch_batched.pack((rows, ids, torch.zeros(TOKENS, 2), ids[:, 0]), 4, scales)


def _summed() -> None:
    source = torch.zeros(4, TOKENS, dtype=I32)
    ep_combine_batched.summed(torch.zeros(4, TOKENS, HIDDEN, dtype=BF16), torch.zeros(4, TOKENS), source)


def _with_case(op: str, call: Callable[..., Any], case: str = "") -> None:
    """A call with the arguments of a case of the op, or of its first odd one."""
    spec = registry.get(op)
    chosen = next(c for c in spec.cases if c.name == case or (not case and "odd" in c.tags))
    call(*spec.inputs(chosen, "cpu", torch.Generator().manual_seed(0)))


def _joined(*args: Any) -> None:
    provider = next(p for p in registry.get("gated_linear_attention").op.providers if p.name == "triton")  # type: ignore[union-attr]
    with mock.patch.object(linear_chunks, "segment_of", lambda p: 64):
        provider.fn(*args)


def _tree() -> None:
    rows = draft_kernels.Rows(*torch.zeros(6, TOKENS, dtype=I64).unbind())
    packed, ids = torch.zeros(len(draft_kernels.COLUMNS), TOKENS, dtype=I64), torch.zeros(9, dtype=I64)
    path, children = torch.zeros(TOKENS, 3, dtype=I64), torch.zeros(4, 2, dtype=I64)
    tree_kernels.accept_tree_triton(packed, ids, ids, rows, path, ids.clone(), children)


def _kept_of_tree() -> None:
    caches = tree_kernels.Caches([torch.zeros(4, 16, 2, 64, dtype=BF16)])
    caches.keep_triton(torch.zeros(9, dtype=I64), torch.zeros(2, dtype=I64), torch.zeros(2, 3, dtype=I64))


# {module in the package:kernel: a call that launches it}
CALLS: dict[str, Callable[[], Any]] = {
    "overrides.collective.all_reduce_rms_norm:_all_reduce_rms_norm_kernel": lambda: _normed(0),
    "overrides.collective.all_reduce_rms_norm:_words_rms_norm_kernel": lambda: _normed(1),
    "overrides.expert_parallel.ep_combine:_combine_kernel": _combined,
    "overrides.expert_parallel.ep_combine_batched:_sum_kernel": _summed,
    "overrides.expert_parallel.ep_dispatch:_dispatch_kernel": _dispatched,
    "overrides.expert_parallel.ep_dispatch_batched:_pack_kernel": _packed,
    "overrides.collective.exchange:_exchange_kernel": _exchanged,
    "overrides.collective.words:_words_kernel": lambda: _message(words.sum_words),
    "overrides.collective.words:_scatter_kernel": lambda: _message(words.scatter_words),
    "overrides.collective.words:_gather_kernel": lambda: _message(words.gather_words, lambda x: [x]),
    "overrides.attention.attention_decode_split:_decode_even_kernel": _decode_even,
    "overrides.latent_attention.mla_triton:_combine_kernel": _splits_of_mla,
    "overrides.dense_attention.wide_heads:_attention_softmax_kernel": _softmax,
    "overrides.rope.qk_norm_rope_pair:_pair_kernel": _pair,
    "overrides.linear.linear_int4:_dequantize_kernel": lambda: _with_case(
        "linear_int4", linear_int4.linear_int4_cublas
    ),
    "overrides.recurrence.kernels.linear_chunks:_join_kernel": lambda: _with_case(
        "gated_linear_attention", _joined, "chunks_of_heads"
    ),
    "overrides.moe.mxfp4_prompt:_in_order_kernel": _in_order,
    "overrides.moe.expert_libraries:_known_kernel": _known,
    "overrides.routing.sorted_pairs:_gather_kernel": _gathered,
    "engine.sampling.token_masks:_mask_kernel": _masked,
    "engine.steps.step_kernels:_begin_kernel": step_kernel_cases.problems,
    "engine.steps.step_kernels:_finish_kernel": step_kernel_cases.problems,
    "engine.execution.drafts.draft_kernels:_accept_kernel": _accepted,
    "engine.execution.drafts.draft_kernels:_advance_kernel": _advanced,
    "engine.execution.drafts.draft_kernels:_settle_kernel": _settled,
    "engine.execution.drafts.tree_kernels:_accept_tree_kernel": _tree,
    "engine.execution.drafts.tree_kernels:_keep_kernel": _kept_of_tree,
}
