"""The Triton kernel of `linear` for few tokens: values, unsupported calls, parameter sets, and tickets."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from fk_bench.core.rows import Status, read
from support.kernels import warm

from fastkernels.core import registry
from fastkernels.overrides.kit.launch import Tickets
from fastkernels.overrides.linear.kernels import skinny_linear_triton as skinny
from fastkernels.overrides.linear.linear import linear

ROOT = Path(__file__).resolve().parents[3]
SCRIPT = Path(__file__).parents[2] / "support" / "kernels" / "skinny_cases.py"


@pytest.fixture(scope="module")
def interpreted() -> dict[str, str | None]:
    """Errors by case. Kernels are created at import, so the interpreter needs its own process."""
    env = {**os.environ, "TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"}
    done = warm.run([SCRIPT], env, timeout=400)
    assert done.returncode == 0, done.stderr
    return {r["case"]: r["problem"] for r in map(json.loads, done.stdout.splitlines())}


def test_interpreted_kernel_matches_float64(interpreted: dict[str, str | None]) -> None:
    assert len(interpreted) > 30
    assert {case: problem for case, problem in interpreted.items() if problem} == {}


def args(m: int = 4, n: int = 48, k: int = 64, dtype: torch.dtype = torch.bfloat16) -> list[torch.Tensor]:
    return [torch.randn(m, k).to(dtype), torch.randn(n, k).to(dtype)]


def test_unsupported_calls_have_a_reason() -> None:
    x, w = args()
    assert skinny.supports_skinny(x, w) is None
    assert skinny.supports_skinny(x.view(2, 2, 64), w, torch.randn(48)) is None
    assert skinny.supports_skinny(*args(m=64)) is None and skinny.supports_skinny(*args(m=0)) is None
    refused = {
        "float32 is not": args(dtype=torch.float32),
        "weight is torch.float16": [x, w.half()],
        "K = 63 is not": args(k=63),
        "more than 64 tokens": args(m=65),
        r"weight has strides \(1, 48\)": [x, w.t().contiguous().t()],
        r"weight has strides \(68, 1\)": [x, torch.randn(48, 68).bfloat16()[:, :64]],
        r"weight has strides \(72, 1\)": [x, torch.randn(48, 72).bfloat16()[:, 4:68]],  # starts at 8 bytes
        r"x has strides \(1, 4\)": [x.t().contiguous().t(), w],
        r"bias has strides \(2,\)": [x, w, torch.randn(96)[::2]],
    }
    for reason, case in refused.items():
        with pytest.raises(RuntimeError, match=reason):
            raise RuntimeError(skinny.supports_skinny(*case))


def test_default_provider_is_cublas(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("FASTKERNELS_PROVIDER", raising=False)
    assert linear.providers[0].name == "cublas" and linear.providers[-1].name == "reference"
    assert registry.get("linear").baseline == "cublas"
    monkeypatch.setenv("FASTKERNELS_PROVIDER", "linear:triton-skinny")
    assert linear.order("cuda")[0][0].name == "triton-skinny"
    assert {p.name: r for p, r in linear.order("cpu")}["triton-skinny"] is not None


@pytest.mark.parametrize("k", [64, 576, 4096, 14336])
@pytest.mark.parametrize("n", [3, 1024, 4096, 6144, 28672, 128256])
def test_default_set_fits_every_shape(n: int, k: int) -> None:
    for m in range(1, skinny.MAX_TOKENS + 1):
        chosen = skinny.choose(m, n, k)
        assert chosen in skinny.PARAMS and skinny.fits(chosen, m, k)
        assert chosen["block_m"] >= m and (chosen["block_m"] < 2 * m or chosen["block_m"] <= 8)


def test_sets_fit_shared_memory() -> None:
    seen = [tuple(p.values()) for p in skinny.PARAMS]
    assert len(set(seen)) == len(seen)
    for p in skinny.PARAMS:
        stage = 2 * p["block_k"] * (p["block_m"] + p["block_n"])
        assert p["num_stages"] * stage <= 227 * 1024, p
        for name in ("block_m", "block_n", "block_k", "num_warps"):
            assert p[name] & (p[name] - 1) == 0, p


def test_streams_and_graphs_get_separate_tickets(monkeypatch: pytest.MonkeyPatch) -> None:
    """Checks only which launch gets which tickets; the memory is on the CPU."""
    tickets, device = Tickets(), torch.device("cuda", 0)
    streams = iter([1, 1, 2])
    capturing = iter([False, False, False, True, True])
    zeros = torch.zeros
    monkeypatch.setattr(torch, "zeros", lambda n, dtype, device: zeros(n, dtype=dtype))
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: next(capturing))
    monkeypatch.setattr(torch.cuda, "current_stream", lambda d: type("S", (), {"cuda_stream": next(streams)}))
    first, again, other = (tickets.get(device, 10) for _ in range(3))
    assert first.data_ptr() == again.data_ptr() != other.data_ptr()
    one, two = tickets.get(device, 10), tickets.get(device, 10)
    assert two.data_ptr() == one.data_ptr() + 4 * one.numel() and one.numel() == two.numel() >= 10
    assert one.data_ptr() % 16 == two.data_ptr() % 16 == 0
    assert not any(t.any() for t in (first, other, one, two))


def test_graphs_do_not_run_out_of_tickets(monkeypatch: pytest.MonkeyPatch) -> None:
    """An uncaptured launch makes more if few are left; given tickets stay allocated and are given once."""
    tickets, device, made = Tickets(), torch.device("cuda", 0), [0]
    tickets.CAPTURED = 256
    zeros, capturing = torch.zeros, [False]

    def counted(n: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        made[0] += capturing[0]
        return zeros(n, dtype=dtype)

    monkeypatch.setattr(torch, "zeros", counted)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: capturing[0])
    monkeypatch.setattr(torch.cuda, "current_stream", lambda d: type("S", (), {"cuda_stream": 1}))
    given = []
    for _ in range(9):  # graphs of four launches, each warmed up first
        capturing[0] = False
        tickets.get(device, 10)
        capturing[0] = True
        given += [tickets.get(device, 10) for _ in range(4)]
    assert made[0] == 0 and len({t.data_ptr() for t in given}) == len(given)
    owned = {t.untyped_storage().data_ptr() for t in (*tickets.kept, *tickets.captured.values())}
    assert {t.untyped_storage().data_ptr() for t in given} <= owned and len(owned) > 2
    tickets.get(device, 300)
    assert made[0] == 1  # more than are left: the graph makes its own


@pytest.mark.slow
def test_experiment_runs_on_the_cpu(tmp_path: Path) -> None:
    """As on a GPU, without compiled kernels and graphs; it writes result rows."""
    out = tmp_path / "rows.jsonl"
    command = [sys.executable, str(ROOT / "bench/experiments/linear/skinny_linear.py"), "--device", "cpu", "--quick",
               "--tokens", "2", "--out", str(out)]  # fmt: skip
    env = {**os.environ, "TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=400)
    assert done.returncode == 0, done.stdout + done.stderr
    rows, warnings = read(out)
    assert not warnings and {r.kind for r in rows} == {"child", "check", "time", "sum", "step"}
    in_cuda = ("cuda-skinny", "cuda-wgmma")
    assert all(r.status is Status.OK for r in rows if r.subject.provider not in in_cuda)
    for name in in_cuda:
        assert [r.status for r in rows if r.subject.provider == name] == [Status.UNSUPPORTED]
    assert all(r.metrics["cases"] >= 1 for r in rows if r.kind == "check" and r.status is Status.OK)
    assert {r.subject.provider for r in rows if r.kind == "time"} >= {"cublas", "triton-skinny"}
    assert all(value > 0 for r in rows if r.kind != "child" for value in r.metrics.values())


@pytest.mark.gpu
@pytest.mark.parametrize("name", ["triton-skinny", "cuda-skinny"])
@pytest.mark.parametrize("m", [1, 3, 8, 16, 17, 64])
def test_gpu_result_matches_reference(name: str, m: int) -> None:
    provider = next(p for p in linear.providers if p.name == name)
    x, weight, bias = (
        torch.randn(*size, device="cuda").bfloat16() for size in ((m, 736), (1000, 736), (1000,))
    )
    assert provider.supports is not None
    if (reason := provider.supports(x, weight, bias)) is not None:
        assert name == "cuda-skinny"
        pytest.skip(reason)
    want = x.double() @ weight.double().t() + bias.double()
    got = provider.fn(x, weight, bias)
    assert torch.equal(got, provider.fn(x, weight, bias))
    torch.testing.assert_close(got.double(), want, rtol=1.6e-2, atol=1.6e-2 * 736**0.5)
