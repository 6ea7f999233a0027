"""CPU code of ops computes its reference's values: bit for bit in PyTorch, within a rounding in C++."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch

from fastkernels.core import dispatch
from fastkernels.core.dispatch import OPS, direct_calls
from fastkernels.core.forward_context import AttentionMetadata, forward_context
from fastkernels.overrides.activation import silu_and_mul, silu_and_mul_cpp
from fastkernels.overrides.attention import attention_decode
from fastkernels.overrides.cache import store_kvcache, store_kvcache_cpp
from fastkernels.overrides.norm import rms_norm as rms_norm_file
from fastkernels.overrides.norm import rms_norm_cpp
from fastkernels.overrides.rope import rotary_emb, rotary_emb_cpp

DTYPES = (torch.bfloat16, torch.float16, torch.float32)
EPS = {torch.bfloat16: 2**-7, torch.float16: 2**-10, torch.float32: 2**-21}  # two roundings


@pytest.mark.parametrize("code", ["_reference", "_cpp"])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_rms_norm_equals_its_reference(dtype: torch.dtype, code: str) -> None:
    rms_norm, reference = getattr(rms_norm_file, code), rms_norm_file.reference
    limit = 0.0 if code == "_reference" else EPS[dtype]
    torch.manual_seed(0)
    weights = (None, torch.randn(96).to(dtype), torch.randn(96))
    for weight, adds, width, first in itertools.product(weights, (True, False), (None, 64), (True, False)):
        x, residual = torch.randn(5, 3, 96).to(dtype), torch.randn(5, 3, 96).to(dtype) if adds else None
        want, new = reference(x, weight, 1e-6, residual, width, first)
        assert code == "_reference" or rms_norm_cpp.normalize(x, weight, 1e-6, None, width, first) is not None
        found = rms_norm(x, weight, 1e-6, residual, width, first)
        torch.testing.assert_close(found, want, rtol=limit, atol=0.0)
        assert residual is None or torch.equal(residual, new)


def test_rms_norm_of_strided_rows() -> None:
    """Heads inside a packed tensor, rows of four dimensions, a wide row; other layouts run PyTorch's code."""
    torch.manual_seed(0)
    packed = torch.randn(5, 12 * 16)
    heads, wide = packed[:, 16 : 16 * 9].unflatten(-1, (8, 16)), torch.randn(2, 9000)
    four, turned = torch.randn(2, 3, 4, 40)[..., 8:], torch.randn(40, 6).t()
    for x, runs in ((heads, True), (wide, True), (four, True), (turned, False), (packed.double(), False)):
        weight = torch.randn(x.shape[-1])
        residual = torch.randn(x.shape)
        for given in (None, residual.to(x.dtype)):
            want, new = rms_norm_file.reference(x, weight, 1e-5, given)
            ran = rms_norm_cpp.normalize(
                x, weight, 1e-5, None if given is None else given.clone(), None, True
            )
            assert (ran is not None) == runs
            torch.testing.assert_close(rms_norm_file._cpp(x, weight, 1e-5, given), want)
            assert given is None or torch.equal(given, new)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_silu_and_mul_equals_its_reference(dtype: torch.dtype) -> None:
    """Gates of every size, those whose exponential overflows among them."""
    gates = torch.cat(
        (torch.linspace(-100, 100, 4001), torch.tensor([-torch.inf, torch.inf, torch.nan, 0.0, -0.0]))
    )
    x = torch.stack((gates, torch.full_like(gates, 3.0)), dim=-1)[None].to(dtype)
    want = silu_and_mul.reference(x)
    found = silu_and_mul_cpp.activate(x)
    assert found is not None
    torch.testing.assert_close(found, want, rtol=EPS[dtype], atol=1e-35, equal_nan=True)
    rows = torch.randn(7, 3 * 64).to(dtype)[:, 64:]
    found = silu_and_mul_cpp.activate(rows)
    assert found is not None
    torch.testing.assert_close(found, silu_and_mul.reference(rows), rtol=EPS[dtype], atol=0.0)
    assert silu_and_mul_cpp.activate(rows.t()) is None and silu_and_mul_cpp.activate(rows.double()) is None


@pytest.mark.parametrize("slots", [torch.int64, torch.int32], ids=str)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_store_kvcache_equals_its_reference(dtype: torch.dtype, slots: torch.dtype) -> None:
    """Keys and values are slices of one tensor, the caches halves of one; padding is not stored."""
    torch.manual_seed(0)
    _, keys, values = torch.randn(5, 64 * 10).to(dtype).split((64 * 6, 64 * 2, 64 * 2), dim=1)
    key, value, mapping = (
        keys.view(5, 2, 64),
        values.view(5, 2, 64),
        torch.tensor([31, -1, 0, 7, 16]).to(slots),
    )
    for caches in (torch.randn(2, 4, 8, 2, 64), torch.randn(4, 2, 8, 2, 64).transpose(0, 1)):
        key_cache, value_cache = caches.to(dtype)
        want = store_kvcache.reference(key, value, key_cache, value_cache, mapping)
        assert not store_kvcache_cpp.unsupported(key, value, key_cache, value_cache, mapping, 1.0, 1.0)
        store_kvcache.store_kvcache(key, value, key_cache, value_cache, mapping)
        assert torch.equal(key_cache, want[0]) and torch.equal(value_cache, want[1])


def test_store_kvcache_names_a_slot_past_the_cache() -> None:
    key, cache = torch.ones(3, 2, 8), torch.zeros(4, 5, 2, 8)
    with pytest.raises(IndexError, match=r"slot_mapping\[1\] is 20, the cache has 4 blocks of 5 tokens"):
        store_kvcache.store_kvcache(key, key, cache, cache.clone(), torch.tensor([0, 20, 3]))
    assert not cache.any()


def test_ops_run_in_cpp() -> None:
    assert attention_decode.attention_decode is OPS["attention_decode"]
    for name in ("rms_norm", "silu_and_mul", "store_kvcache", "rotary_emb", "attention_decode"):
        assert next(p.name for p, reason in OPS[name].order("cpu") if reason is None) == "cpp"


def test_direct_calls_skip_the_dispatcher(monkeypatch: pytest.MonkeyPatch) -> None:
    """In inference mode on a CPU, unless a profiler has to see the ops."""
    op, cpu = OPS["silu_and_mul"], torch.device("cpu")
    monkeypatch.setattr(op, "overload", lambda x: "dispatched")
    x = torch.ones(1, 4)

    def direct() -> bool:
        return isinstance(op(x), torch.Tensor)

    with torch.inference_mode():
        with direct_calls(cpu):
            assert direct()
        with direct_calls(torch.device("cuda")):
            assert not direct()
        with torch.profiler.profile(), direct_calls(cpu):
            assert not direct()
        assert not direct()
    with direct_calls(cpu):
        assert not direct()
    assert not dispatch._direct


@pytest.mark.parametrize("truncates", [False, True])
@pytest.mark.parametrize("rotate", [rotary_emb.rotate_in_place, rotary_emb._rotate_cpp], ids=["torch", "cpp"])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_rotary_emb_equals_its_reference(
    dtype: torch.dtype, rotate: Callable[..., None], truncates: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Query and key are slices of one tensor; some channels do not rotate."""
    torch.manual_seed(0)
    monkeypatch.setattr(rotary_emb, "host_truncates", lambda: truncates)
    for rotary_dim, cast in itertools.product((64, 32), (True, False)):
        positions, table = torch.randint(0, 100, (7,)), torch.randn(100, rotary_dim)
        query, key, _ = torch.randn(7, 64 * 10).to(dtype).split((64 * 6, 64 * 2, 64 * 2), dim=1)
        want = rotary_emb.reference(
            positions, query, key, 64, table, True, cast, truncates=truncates and dtype == torch.bfloat16
        )
        rotate(positions, query, key, 64, table, True, cast)
        assert torch.equal(query, want[0]) and torch.equal(key, want[1])


def test_rotary_emb_runs_in_cpp(monkeypatch: pytest.MonkeyPatch) -> None:
    """The op, where a compiler is found; other styles are PyTorch's."""
    calls: list[int] = []
    kernel = rotary_emb_cpp._kernel()

    def counted(call: Any, dtype: int) -> None:
        calls.append(dtype)
        kernel(call, dtype)

    monkeypatch.setattr(rotary_emb_cpp, "_kernel", lambda: counted)
    table, positions = torch.randn(9, 64), torch.arange(5)
    for neox, count in ((True, 1), (False, 1), (True, 2)):
        query, key = torch.randn(5, 128), torch.randn(5, 64)
        want = rotary_emb.reference(positions, query, key, 64, table, neox)
        rotary_emb.rotary_emb(positions, query, key, 64, table, neox)
        assert torch.equal(query, want[0]) and torch.equal(key, want[1]) and len(calls) == count


def test_rotary_emb_asks_for_the_host_once_a_step(monkeypatch: pytest.MonkeyPatch) -> None:
    """Looking up an op of vLLM, which is not loaded, takes longer than the kernel."""
    asked: list[int] = []
    monkeypatch.setattr(rotary_emb, "host_truncates", lambda: bool(asked.append(1)))
    table, positions, one = torch.randn(9, 64), torch.arange(5), torch.ones(1, dtype=torch.int32)
    with forward_context(AttentionMetadata(one, one, one, one, 1, 1)):
        for _ in range(3):
            query, key = torch.randn(5, 128), torch.randn(5, 64)
            want = rotary_emb.reference(positions, query, key, 64, table, True)
            rotary_emb.rotary_emb(positions, query, key, 64, table, True)
            assert torch.equal(query, want[0]) and torch.equal(key, want[1])
    assert len(asked) == 1
