"""The one-launch Triton kernel of attention_decode: values in the interpreter, parameter sets, tuned tables."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from fk_bench.core.rows import Status, read
from support.kernels import ahead, warm
from support.kernels.kernel_variants import FakeDriver
from support.kernels.op_cases import make_args, mismatch, oracle
from triton.runtime import driver
from triton.runtime.jit import JITFunction

from fastkernels.core import registry
from fastkernels.core import tuning as tuned
from fastkernels.core.spec import Case
from fastkernels.core.tuning import Entry, Table
from fastkernels.overrides.attention import attention_decode_split as split
from fastkernels.overrides.attention.attention_decode import attention_decode
from fastkernels.overrides.kit.overlap import follow

ROOT = Path(__file__).resolve().parents[3]
SPEC = registry.get("attention_decode")
SCRIPT = Path(__file__).parents[2] / "support" / "kernels" / "decode_split_cases.py"
LLAMA: dict[str, Any] = {"heads": 32, "kv_heads": 8, "head_size": 128, "block_size": 16}
ENV = {**os.environ, "TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"}


@pytest.mark.parametrize(
    ("arguments", "least"),
    [([], 14), pytest.param(["all"], 41, marks=pytest.mark.slow)],
    ids=["one_set", "all_sets"],
)
def test_interpreted_kernel_matches_float64(arguments: list[str], least: int) -> None:
    """Kernels are created at import, so the interpreter needs its own process."""
    done = warm.run([SCRIPT, *arguments], ENV, timeout=400)
    assert done.returncode == 0, done.stderr
    found = {r["case"]: r["problem"] for r in map(json.loads, done.stdout.splitlines())}
    assert len(found) >= least
    assert {case: problem for case, problem in found.items() if problem} == {}


def test_empty_batch_gives_empty_output() -> None:
    args = make_args(SPEC, Case("none", {"seq_lens": [], **LLAMA}))
    assert split.decode_split(*args).shape == (0, 32, 128)


def test_splits_fill_the_device() -> None:
    assert split.splits_of(8, 8192, 2, 64, 132) == 33
    assert split.splits_of(8, 512, 2, 64, 132) == 8 and split.splits_of(8, 1, 2, 64, 132) == 1
    assert split.splits_of(256, 8192, 2, 64, 132) == 1 and split.splits_of(256, 8192, 4, 64, 132) == 2
    assert split.splits_of(1, 1 << 20, 8, 64, 132) == split.MAX_SPLITS
    assert split.splits_of(2048, 8192, 8, 64, 132) == 1 and split.splits_of(8, 0, 2, 64, 132) == 1


class Launches:
    """Replaces a kernel, which a CPU cannot launch: records the grid and the options of each launch."""

    def __init__(self) -> None:
        self.seen: list[tuple[tuple[int, ...], dict[str, Any]]] = []

    def __getitem__(self, grid: tuple[int, ...]) -> Any:
        return lambda *args, **options: self.seen.append((grid, options))


def test_even_workers_fill_the_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """The grid does not depend on the batch: the device decides how many workers have work."""
    even, alone = Launches(), Launches()
    monkeypatch.setattr(split, "_decode_even_kernel", even)
    monkeypatch.setattr(split, "_decode_split_kernel", alone)
    for batch, longest in ((32, 2048), (1, 131072), (2, 300), (257, 4096)):
        case = Case("even", {"seq_lens": [1] * batch, "max_seqlen_k": longest, "max_blocks": 1, **LLAMA})
        split.decode_split(*make_args(SPEC, case), **split._set(2, 64, 4, 4, 128, split.EVEN))
    assert [grid for grid, _ in even.seen] == [(8, 33)] * 4
    assert [options["BLOCK_B"] for _, options in even.seen] == [32, 32, 32, 512]
    assert not alone.seen


def test_same_flag_follows_the_strides(monkeypatch: pytest.MonkeyPatch) -> None:
    kernel = Launches()
    monkeypatch.setattr(split, "_decode_split_kernel", kernel)
    args = make_args(SPEC, Case("same", {"seq_lens": [3], **LLAMA}))
    split.decode_split(*args)
    wide = torch.empty(*args[2].shape[:2], 9, 128, dtype=args[2].dtype)[:, :, :8]
    split.decode_split(*args[:2], wide, *args[3:])
    assert [options["SAME"] for _, options in kernel.seen] == [True, False]


@pytest.mark.parametrize("head_size", [1, 40, 64, 96, 128, 192, 256, 320, 512])
@pytest.mark.parametrize("itemsize", [1, 2])
def test_default_set_fits_shared_memory(head_size: int, itemsize: int) -> None:
    chosen = split.choose(head_size, itemsize)
    assert chosen in split.PARAMS and split.has_room(chosen, head_size, itemsize)


def test_sets_fit_shared_memory() -> None:
    assert len({tuple(p.values()) for p in split.PARAMS}) == len(split.PARAMS)
    for p in split.PARAMS:
        assert split.has_room(p, 512 if p in split.WIDE else 128, 2), p
        assert p["block_n"] >= 16 and all(p[n] & (p[n] - 1) == 0 for n in ("block_n", "num_warps")), p
        assert p["per_sm"] >= 1 and p["num_stages"] >= 2 and p["min_split"] >= p["block_n"] // 2, p


def test_unsupported_calls_have_a_reason() -> None:
    def refusal(dtype: str = "bfloat16", **dims: Any) -> str | None:
        return split.supports_split(
            *make_args(SPEC, Case("refused", {"seq_lens": [3], **LLAMA, **dims}, dtype))
        )

    assert refusal() is None and refusal("float16", head_size=96, block_size=5) is None
    assert "float32" in str(refusal("float32"))
    assert refusal(head_size=320) is None and "over 512" in str(refusal(head_size=520))
    assert "over 64" in str(refusal(heads=65, kv_heads=1))
    args = make_args(SPEC, Case("strided", {"seq_lens": [3], **LLAMA}))
    args[1] = args[1].transpose(2, 3).contiguous().transpose(2, 3)
    assert "key_cache has strides" in str(split.supports_split(*args))
    args[2] = args[2].half()
    assert "the caches are" in str(split.supports_split(*args))


@pytest.mark.slow
@pytest.mark.skipif(not isinstance(follow, JITFunction), reason="TRITON_INTERPRET=1 compiles nothing")
@pytest.mark.parametrize("batch", [32, 256])
@pytest.mark.parametrize("params", split.PARAMS, ids=lambda p: "/".join(map(str, p.values())))
def test_per_sm_programs_fit_an_sm(
    params: dict[str, int], batch: int, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Compiled for an H200: shared memory and registers suffice, with hardly any spills."""
    monkeypatch.setattr(driver, "_active", FakeDriver())
    compiled: list[Any] = []
    for name in ("_decode_split_kernel", "_decode_even_kernel"):
        kernel = getattr(split, name)
        kernel.device_caches.clear()
        monkeypatch.setattr(split, name, Compiled(kernel, compiled))
    dims = {"seq_lens": [1] * batch, "max_seqlen_k": 2048, "max_blocks": 1, **LLAMA}
    split.decode_split(*make_args(SPEC, Case("compiled", dims)), **params)
    (found,) = compiled
    usage = ahead.usage(found, tmp_path)
    threads = 32 * params["num_warps"] * params["per_sm"]
    assert usage["REG"] * threads <= split.REGISTERS and usage["STACK"] <= 64
    assert (found.metadata.shared + 1024) * params["per_sm"] <= 228 * 1024


class Compiled:
    """Replaces a kernel: compiles it as a GPU launch would."""

    def __init__(self, kernel: Any, found: list[Any]) -> None:
        self.kernel, self.found = kernel, found

    def __getitem__(self, grid: tuple[int, ...]) -> Any:
        def warmup(*args: Any, **options: Any) -> None:
            on_a_gpu = {**options, "UPCAST": False, "OVERLAP": True, "launch_pdl": True}
            self.found.append(self.kernel.warmup(*args, grid=grid, **on_a_gpu))

        return warmup


# -- selection


@pytest.fixture
def table(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A table for the H200 with two batches for Llama's shape."""
    shape = {**LLAMA, "window": 0, "dtype": "bfloat16"}
    won: dict[str, Any] = {"speedup": 1.2, "ci95": (1.1, 1.3), "baseline": "fa3", "run": "r1"}
    entries = (
        Entry(
            "attention_decode",
            shape,
            {"batch": 8, "context": 4096},
            "triton-split",
            params={"block_n": 32},
            **won,
        ),
        Entry("attention_decode", shape, {"batch": 64, "context": 4096}, "flashinfer", **won),
        Entry("attention_decode", shape, {"batch": 64, "context": 8192}, "fa3", "fa3", "r1"),
    )
    path = tmp_path / "nvidia-h200.json"
    runs = {"r1": {"date": "2026-11-21", "commit": "0123456789ab", "versions": {"torch": "2.11.0"}}}
    path.write_text(Table("NVIDIA H200", runs, entries).to_json())
    monkeypatch.setenv("FASTKERNELS_TUNED", str(path))
    tuned._by_op.cache_clear()
    yield
    tuned._by_op.cache_clear()


def key_of(batch: int, context: int, **dims: Any) -> tuple[Any, Any]:
    case = Case("key", {"seq_lens": [1] * batch, "max_seqlen_k": context, **LLAMA, **dims})
    assert attention_decode.key is not None
    return attention_decode.key.of(*make_args(SPEC, case))


def test_table_selects_by_batch_and_context(table: None) -> None:
    assert attention_decode.key is not None
    found = tuned.lookup(attention_decode.key, tuned.entries("attention_decode", "NVIDIA H200"))

    def provider(*sizes: int, **dims: Any) -> str | None:
        entry = found.find(*key_of(*sizes, **dims))
        return None if entry is None else entry.provider

    assert provider(8, 4096) == provider(2, 1024) == provider(5, 3000) == "triton-split"
    assert provider(9, 4096) is None, "the entry for 64 applies down to 16"
    assert provider(16, 2048) == "flashinfer" and provider(33, 4097) == "fa3"
    assert provider(8, 8192) is None and provider(8, 512) is None
    assert provider(8, 4096, window_left=127) is None and provider(8, 4096, kv_heads=4) is None


def test_default_order_prefers_unparametrized_kernels() -> None:
    names = [p.name for p in attention_decode.providers]
    assert (
        names.index("triton-split") > names.index("triton") > names.index("fa3") and names[-1] == "reference"
    )


def test_long_context_is_tuned_with_shorter_sequences() -> None:
    assert attention_decode.key is not None
    shape = {**LLAMA, "window": 128, "dtype": torch.bfloat16}
    dims = attention_decode.key.dims(**shape, batch=2, context=131072)
    assert dims["seq_lens"] == [4096, 4096] and dims["max_seqlen_k"] == 131072 and dims["window_left"] == 127


@pytest.mark.slow
def test_experiment_runs_on_the_cpu(tmp_path: Path) -> None:
    """As on a GPU, without compiled kernels and graphs; it writes result rows."""
    out = tmp_path / "rows.jsonl"
    script = ROOT / "bench/experiments/attention/decode_attention.py"
    done = warm.run([script, "--device", "cpu", "--quick", "--out", out], ENV, timeout=400)
    assert done.returncode == 0, done.stdout + done.stderr
    rows, warnings = read(out)
    assert not warnings and {r.kind for r in rows} == {"check", "time"}
    assert {r.subject.op for r in rows} == {"attention_decode"}
    assert all(r.status is Status.OK for r in rows)
    assert all(value > 0 for r in rows if r.kind == "time" for value in r.metrics.values())


# -- on a GPU


@pytest.mark.gpu
@pytest.mark.parametrize("params", split.PARAMS, ids=lambda p: "/".join(map(str, p.values())))
def test_gpu_result_matches_reference(params: dict[str, int]) -> None:
    case = Case("gpu", {"seq_lens": [0, 1, 15, 16, 17, 700, 3000], **LLAMA})
    args = make_args(SPEC, case, "cuda")
    got = split.decode_split(*args, **params)
    assert torch.equal(got, split.decode_split(*args, **params))
    assert mismatch(SPEC, case, [got], [oracle(SPEC, args)[0]]) is None


@pytest.mark.gpu
@pytest.mark.parametrize("name", ["fa3", "triton", "triton-split"])
def test_result_is_written_to_out(name: str) -> None:
    provider = next(p for p in attention_decode.providers if p.name == name)
    if (reason := provider.unavailable("cuda")) is not None:
        pytest.skip(reason)
    args = make_args(SPEC, Case("out", {"seq_lens": [1, 700, 3000], **LLAMA}), "cuda")
    out = torch.full(args[0].shape, float("nan"), dtype=args[0].dtype, device="cuda")
    assert provider.out and provider.fn(*args, out=out) is out
    torch.testing.assert_close(out, provider.fn(*args))


@pytest.mark.gpu
@pytest.mark.parametrize("lens", [[0], [0, 8000], [0, 5, 0, 700] * 8, [0] * 200])
def test_fa3_writes_zeros_for_sequences_without_keys(lens: list[int]) -> None:
    """So its output needs no initialization."""
    fa3 = next(p for p in attention_decode.providers if p.name == "fa3")
    if (reason := fa3.unavailable("cuda")) is not None:
        pytest.skip(reason)
    args = make_args(SPEC, Case("zeros", {"seq_lens": lens, **LLAMA}), "cuda")
    assert fa3.supports is not None and fa3.supports(*args) is None
    torch.use_deterministic_algorithms(True, warn_only=True)  # torch.empty gives NaN
    try:
        out = fa3.fn(*args)
    finally:
        torch.use_deterministic_algorithms(False)
    assert not out[args[3] == 0].any() and bool(out.isfinite().all())
