"""Batch-invariant ops give a token the same result, bit for bit, in any batch."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
import torch

from fastkernels.core import registry
from fastkernels.overrides.activation.gelu import gelu
from fastkernels.overrides.activation.gelu_and_mul import gelu_and_mul
from fastkernels.overrides.activation.quick_gelu import quick_gelu
from fastkernels.overrides.activation.relu2 import relu2
from fastkernels.overrides.activation.silu_and_mul import silu_and_mul
from fastkernels.overrides.activation.silu_and_mul_grad import silu_and_mul_grad
from fastkernels.overrides.latent_attention.top_k_per_row import top_k_per_row
from fastkernels.overrides.norm.gemma_rms_norm import gemma_rms_norm
from fastkernels.overrides.norm.l2_norm import l2_norm
from fastkernels.overrides.norm.layer_norm import layer_norm
from fastkernels.overrides.norm.rms_norm import rms_norm
from fastkernels.overrides.norm.rms_norm_grad import rms_norm_grad
from fastkernels.overrides.norm.sandwich_norm import sandwich_norm
from fastkernels.overrides.norm.t5_layer_norm import t5_layer_norm
from fastkernels.overrides.recurrence.causal_conv1d import causal_conv1d
from fastkernels.overrides.recurrence.mamba_scan import mamba_scan
from fastkernels.overrides.rope.rope_nd import rope_nd
from fastkernels.overrides.rope.rope_store_kvcache import rope_store_kvcache
from fastkernels.overrides.rope.rotary_emb import rotary_emb

HIDDEN, HEAD = 1128, 64


def _rotated(x: torch.Tensor) -> torch.Tensor:
    """Rotate queries; positions are a function of the token, not of its place in the batch."""
    q = x[:, : 2 * HEAD].clone()
    table = torch.linspace(-1, 1, 100 * HEAD, device=x.device).view(100, HEAD)
    rotary_emb((x[:, 0].abs() * 20).long().clamp(max=99), q, None, HEAD, table.to(x.dtype), True)
    return q


def _rotated_patches(x: torch.Tensor) -> torch.Tensor:
    """Rows are images of eight patches behind a prefix token, with two heads."""
    table = torch.linspace(-1, 1, 8 * 62, device=x.device).view(8, 62).to(x.dtype)
    return rope_nd(x[:, : 9 * 2 * 62].reshape(len(x), 9, 2, 62), table, table.flip(0), True).flatten(1)


def _stored(x: torch.Tensor) -> torch.Tensor:
    """Return rotated queries and stored keys and values; each token has a block of its own."""
    q, k, v = (x[:, i * 2 * HEAD : (i + 1) * 2 * HEAD].reshape(-1, 2, HEAD).clone() for i in range(3))
    table = torch.linspace(-1, 1, 100 * HEAD, device=x.device).view(100, HEAD).to(x.dtype)
    caches = [torch.zeros(len(x), 1, 2, HEAD, dtype=x.dtype, device=x.device) for _ in range(2)]
    positions, weight = (x[:, 0].abs() * 20).long().clamp(max=99), _weight(x)[:HEAD]
    rope_store_kvcache(
        positions, q, k, v, *caches, torch.arange(len(x), device=x.device), table, True, weight, weight
    )
    return torch.cat([q, *(cache[:, 0] for cache in caches)], dim=1)


def _tail(x: torch.Tensor, tokens: int) -> tuple[torch.Tensor, ...]:
    """Starts, slots and freshness of sequences, a row each, of this many tokens."""
    starts = torch.arange(len(x) + 1, dtype=torch.int32, device=x.device)
    return starts * tokens, starts[1:], torch.ones(len(x), dtype=torch.bool, device=x.device)


def _convolved(x: torch.Tensor) -> torch.Tensor:
    """Rows are sequences of four tokens with 80 channels."""
    state, weight = x.new_zeros(len(x) + 1, 80, 3), _weight(x)[:320].view(80, 4)
    return causal_conv1d(x[:, :320].reshape(-1, 80), weight, None, state, *_tail(x, 4)).view(len(x), -1)


def _scanned(x: torch.Tensor) -> torch.Tensor:
    """Rows are sequences of four tokens with 40 channels, each with a state of 16 numbers."""
    u, delta = (x[:, i : i + 160].reshape(-1, 40) for i in (0, 160))
    keys, queries = (x[:, i : i + 64].reshape(-1, 16) for i in (320, 384))
    decay = -torch.linspace(0.1, 2, 640, device=x.device).view(40, 16)
    state = torch.zeros(len(x) + 1, 40, 16, device=x.device)
    return mamba_scan(u, delta, decay, keys, queries, None, None, None, state, *_tail(x, 4)).view(len(x), -1)


def _weight(x: torch.Tensor) -> torch.Tensor:
    return torch.linspace(0.5, 2, HIDDEN, device=x.device).to(x.dtype)


RUNS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "rms_norm": lambda x: rms_norm(x, _weight(x), 1e-6),
    "gemma_rms_norm": lambda x: gemma_rms_norm(x, _weight(x), 1e-6),
    "sandwich_norm": lambda x: sandwich_norm(x, x.clone(), _weight(x), 1e-6, 0.0, _weight(x))[0],
    "layer_norm": lambda x: layer_norm(x, _weight(x), _weight(x), 1e-6),
    "gelu_and_mul": lambda x: gelu_and_mul(x, "tanh"),
    "gelu": lambda x: gelu(x, "tanh"),
    "quick_gelu": quick_gelu,
    "relu2": relu2,
    "l2_norm": l2_norm,
    "t5_layer_norm": lambda x: t5_layer_norm(x, _weight(x), 1e-6),
    "silu_and_mul": silu_and_mul,
    "silu_and_mul_grad": lambda x: torch.cat(silu_and_mul_grad(x, x[:, : HIDDEN // 2].contiguous()), 1),
    "rms_norm_grad": lambda x: rms_norm_grad(x, x.flip(1), _weight(x), 1e-6),
    "rotary_emb": _rotated,
    "rope_nd": _rotated_patches,
    "rope_store_kvcache": _stored,
    "causal_conv1d": _convolved,
    "mamba_scan": _scanned,
    "top_k_per_row": lambda x: top_k_per_row(x, 100),
}  # fmt: skip


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """On a CPU, threads split rows, and PyTorch computes exp with other code at the split."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def test_all_batch_invariant_ops_are_tested() -> None:
    claimed = {name for name in registry.op_names() if registry.get(name).batch_invariant}
    copies = {
        "embedding",
        "store_kvcache",
        "concat_and_cache_mla",
        "indexer_k_quant_and_cache",
        "ttt_sgd",
    }  # row by row
    assert claimed - copies == set(RUNS)
    assert not claimed & {"linear", "attention", "attention_decode", "attention_prefill", "logits_processor"}


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", RUNS)
def test_token_result_is_independent_of_batch(name: str, dtype: torch.dtype, device: str) -> None:
    x = torch.randn(131, HIDDEN, generator=torch.Generator().manual_seed(0)).to(device, dtype)
    together = RUNS[name](x)
    for rows in (slice(0, 1), slice(77, 78), slice(5, 68)):
        assert torch.equal(RUNS[name](x[rows]), together[rows])
