"""attention_decode in C++: all cases of the op, splits, threads, numbers at the edges of their formats, no compiler."""

from __future__ import annotations

import os
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from support.kernels import warm

from fastkernels.overrides.attention import attention_decode as op_file
from fastkernels.overrides.attention import attention_decode_cpp
from fastkernels.overrides.attention.attention_decode import SPEC, attention_decode, reference
from fastkernels.overrides.attention.attention_decode_cpp import decode_cpp, supports_cpp
from fastkernels.overrides.kit.cpp import DTYPES

CASES = {c.name: c for c in SPEC.cases if "model" not in c.tags and not c.dims.get("alibi")}


@pytest.mark.parametrize("splits", [None, 2, 5])
@pytest.mark.parametrize("name", CASES)
def test_cases_equal_the_reference(name: str, splits: int | None) -> None:
    args = SPEC.inputs(CASES[name], "cpu", torch.Generator().manual_seed(3))
    if args[1].dtype == torch.float8_e4m3fn:
        assert "float8" in (supports_cpp(*args) or "")
        return
    assert supports_cpp(*args) is None
    limit = SPEC.tolerance_for(CASES[name], args[0].dtype)
    found = partial(decode_cpp, splits=splits)(*args)
    torch.testing.assert_close(found, reference(*args), rtol=limit.rtol, atol=limit.atol)


@pytest.mark.parametrize("scale", [1e-3, 40.0])
def test_float32_is_accurate(scale: float) -> None:
    """Flat and sharp softmax against float64, with scales of the cache and a cap."""
    torch.manual_seed(5)
    q, keys, values = torch.randn(2, 6, 80), torch.randn(40, 16, 2, 80), torch.randn(40, 16, 2, 80)
    lens, table = torch.tensor([300, 33], dtype=torch.int32), torch.randperm(40).int().view(2, 20)
    rest = (lens, table, 300, scale, 200, 30.0, 0.5, 0.75)
    want = reference(q.double(), keys.double(), values.double(), *rest)
    for splits in (1, 4):
        found = decode_cpp(q, keys, values, *rest, splits=splits)
        torch.testing.assert_close(found.double(), want, rtol=1e-4, atol=2e-6)


def test_float16_conversions_are_exact() -> None:
    """One key: the result is its value. Every bit pattern comes back, subnormals and infinities among them."""
    every = torch.arange(1 << 16, dtype=torch.int32).to(torch.int16).view(torch.float16)
    for dtype in (torch.float16, torch.bfloat16):
        values = every.view(torch.int16).view(dtype).view(1, 1, 1024, 64).contiguous()
        q = torch.ones(1, 1024, 64, dtype=dtype)
        lens, table = torch.ones(1, dtype=torch.int32), torch.zeros(1, 1, dtype=torch.int32)
        found = decode_cpp(q, torch.ones_like(values), values, lens, table, 1, 1.0).view_as(values)
        assert torch.equal(found.isnan(), values.isnan())
        assert torch.equal(found.nan_to_num(7.0), values.nan_to_num(7.0))


def test_rounding_is_to_nearest_even() -> None:
    torch.manual_seed(1)
    for dtype in (torch.float16, torch.bfloat16):
        values = (torch.randn(1, 2, 64, 128) * 10.0 ** torch.randint(-9, 5, (1, 2, 64, 128))).to(dtype)
        q, lens = torch.zeros(1, 64, 128, dtype=dtype), torch.full((1,), 2, dtype=torch.int32)
        table = torch.zeros(1, 1, dtype=torch.int32)
        found = decode_cpp(q, torch.zeros_like(values), values, lens, table, 2, 1.0)
        assert torch.equal(found[0], ((values[0, 0].float() + values[0, 1].float()) / 2).to(dtype))


@pytest.mark.parametrize("threads", [1, 2])
def test_threads_do_not_change_a_split(threads: int) -> None:
    torch.manual_seed(2)
    q, keys, values = torch.randn(5, 4, 64), torch.randn(60, 16, 2, 64), torch.randn(60, 16, 2, 64)
    lens, table = torch.tensor([9, 190, 0, 77, 1]).int(), torch.randperm(60).int().view(5, 12)
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        found = decode_cpp(q, keys, values, lens, table, 190, 0.125, splits=2)
    finally:
        torch.set_num_threads(before)
    torch.testing.assert_close(found, reference(q, keys, values, lens, table, 190, 0.125))


def test_wrong_blocks_are_errors() -> None:
    """A block outside the cache, or more keys than the table holds; blocks before a window are not read."""
    q, cache = torch.randn(2, 2, 64), torch.randn(6, 16, 1, 64)
    lens, table = torch.tensor([5, 40]).int(), torch.tensor([[1, 99, 99], [2, 3, 4]]).int()
    args = (q, cache, cache)
    want = reference(*args, lens, table.clamp(max=5), 40, 0.125)
    torch.testing.assert_close(decode_cpp(*args, lens, table, 40, 0.125), want)
    for block in (6, -1, 2**31 - 1):
        table[1, 0] = block
        with pytest.raises(IndexError, match=rf"sequence 1 has 40 keys in blocks \[{block}, 3, 4\].*0 to 5"):
            decode_cpp(*args, lens, table, 40, 0.125)
        decode_cpp(*args, lens, table, 40, 0.125, 20)
    with pytest.raises(IndexError, match=r"sequence 1 has 49 keys .* a table holds 3 blocks of 16 keys"):
        decode_cpp(*args, torch.tensor([5, 49]).int(), table.clamp(0, 5), 49, 0.125)


def test_op_runs_it_on_the_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[int] = []
    kernel = attention_decode_cpp._kernel()

    def counted(call: Any, dtype: int) -> int:
        calls.append(dtype)
        return kernel(call, dtype)

    monkeypatch.setattr(attention_decode_cpp, "_kernel", lambda: counted)
    args: list[Any] = SPEC.inputs(CASES["smollm2"], "cpu", torch.Generator().manual_seed(3))
    found = attention_decode(*args)
    assert calls == [DTYPES[torch.bfloat16]]
    torch.testing.assert_close(found, reference(*args), rtol=1e-2, atol=1e-2)
    assert [p.name for p in op_file.attention_decode.providers][-3:] == ["cpp", "sdpa", "reference"]


NO_COMPILER = """
import logging
logging.basicConfig(level=logging.INFO, format="%(message)s")
import torch
from fastkernels.overrides.attention.attention_decode import SPEC, attention_decode, reference
case = next(c for c in SPEC.cases if c.name == "smollm2")
args = SPEC.inputs(case, "cpu", torch.Generator().manual_seed(3))
for _ in range(2):
    torch.testing.assert_close(attention_decode(*args), reference(*args), rtol=1e-2, atol=1e-2)
assert not attention_decode.fallbacks
print([p.name for p in attention_decode._order["cpu"]])
"""


def test_other_code_runs_without_a_compiler(tmp_path: Path) -> None:
    env = {
        **os.environ,
        "CXX": "no-such-compiler",
        "FASTKERNELS_CACHE": str(tmp_path),
        "FASTKERNELS_STRICT": "1",
    }
    env.pop("TRITON_INTERPRET", None)
    done = warm.run(["-c", NO_COMPILER], env)
    assert done.returncode == 0, done.stderr[-3000:]
    assert done.stdout.strip() == "['sdpa', 'reference']"
    assert done.stderr.count("no C++ compiler was found (no-such-compiler)") == 1, done.stderr
    assert done.stderr.count("CXX names a C++ compiler") == 1
