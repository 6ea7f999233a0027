"""Our CPU code on CPUs with fewer instructions than this one: C++ kernels, packed weights, an engine in bfloat16."""

from __future__ import annotations

import json
import logging
import os
import platform
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from fk_bench.core import machine

from fastkernels.core import compile_cache
from fastkernels.engine.execution.forward import packed_weights
from fastkernels.engine.execution.forward.runner import pick_dtype
from fastkernels.overrides.kit import cpp, cpu

TESTS = Path(__file__).parents[1]
ENGINE = """
import json, logging, sys
from fastkernels import LLM, SamplingParams
from fastkernels.core import registry
from support.kernels.op_cases import call, make_args, mismatch, odd_cases, oracle

logging.basicConfig(level=logging.INFO, stream=sys.stderr, format="%(message)s")
NAMES = ("rms_norm", "silu_and_mul", "store_kvcache", "rotary_emb", "attention_decode")
wrong = []
for name, case in odd_cases():
    spec = registry.get(name)
    if name in NAMES:
        assert next(p.name for p, reason in spec.op.order("cpu") if reason is None) == "cpp"
        args = make_args(spec, case)
        want = oracle(spec, args)
        found = mismatch(spec, case, call(spec.op, spec.op, args), want)
        wrong += [f"{name} {case.name}: {found}"] if found else []
with LLM(sys.argv[1], dtype="bfloat16", device="cpu", num_blocks=16, max_model_len=64) as llm:
    result = llm.generate([[5, 6, 7, 8]], SamplingParams(max_tokens=4, temperature=0, logprobs=0, ignore_eos=True))
    output = result[0].outputs[0]
    steps = zip(output.token_ids, output.logprobs)
    print(json.dumps({"wrong": wrong, "logprobs": [[t, step[t].logprob] for t, step in steps]}))
"""
# Without each feature: oneDNN's bfloat16, PyTorch's vector instructions, those of the C++ kernels
WITHOUT = {
    "onednn": {"ONEDNN_MAX_CPU_ISA": "SSE41"},
    "aten": {"ATEN_CPU_CAPABILITY": "default"},
    "cpp": {"CXX": "x86-64"},
}
EACH = [pytest.param(env, id=name, marks=pytest.mark.slow) for name, env in WITHOUT.items()]
ALL = {key: value for env in WITHOUT.values() for key, value in env.items()}
BY_NAME = pytest.mark.skipif(platform.machine() != "x86_64", reason="takes x86 instructions away")


def compiler(folder: Path, target: str, rejected: str = "") -> str:
    """A C++ compiler that makes code for `target`, and rejects an option."""
    path = folder / "cxx"
    reject = (
        f'case " $* " in *" {rejected} "*) echo "unknown option" >&2; exit 1;; esac\n' if rejected else ""
    )
    path.write_text(f'#!/bin/bash\n{reject}exec {cpp.compiler()} "${{@/-march=native/{target}}}"\n')
    path.chmod(0o755)
    return str(path)


def run(checkpoint: Path, folder: Path, without: dict[str, str]) -> tuple[dict, str]:
    env = {**os.environ, **without, "FASTKERNELS_CACHE": str(folder), "PYTHONPATH": str(TESTS)}
    if "CXX" in without:
        env["CXX"] = compiler(folder, f"-march={without['CXX']}")
    command = [sys.executable, "-c", ENGINE, str(checkpoint)]
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout.splitlines()[-1]), done.stderr


@BY_NAME
@pytest.mark.parametrize("without", [pytest.param(ALL, id="all"), *EACH])
def test_bfloat16_engine_runs_without(without: dict[str, str], tiny: Path, tmp_path: Path) -> None:
    from fastkernels import LLM, SamplingParams

    found, log = run(tiny, tmp_path, without)
    assert found["wrong"] == []
    said = [line for line in log.splitlines() if "weights in bfloat16 are not packed for decoding" in line]
    assert len(said) == ("ONEDNN_MAX_CPU_ISA" in without), log
    with LLM(str(tiny), dtype="float32", device="cpu", num_blocks=16, max_model_len=64) as llm:
        tokens = [token for token, _ in found["logprobs"]]
        sampling = SamplingParams(max_tokens=1, temperature=0, prompt_logprobs=0)
        prompt = llm.generate([[5, 6, 7, 8, *tokens]], sampling)[0].prompt_logprobs
    for position, (token, logprob) in enumerate(found["logprobs"], start=4):
        assert abs(prompt[position][token].logprob - logprob) < 0.05


@pytest.fixture
def fresh() -> Iterator[None]:
    """Nothing is remembered of the CPU, before or after."""
    remembered = (cpu._fields, cpu.packing_unsupported, packed_weights._packable)
    for function in remembered:
        function.cache_clear()
    yield
    for function in remembered:
        function.cache_clear()


def refuse(*args: object) -> None:
    raise RuntimeError("needs instructions that this CPU lacks\nand more lines")


@pytest.mark.parametrize("missing", ["oneDNN", "_reorder_linear_weight", "_linear_pointwise"])
def test_weights_stay_plain_without(
    missing: str, fresh: None, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    if missing == "oneDNN":
        monkeypatch.setattr(torch.backends.mkldnn, "is_available", lambda: False)
    else:
        monkeypatch.setattr(torch.ops.mkldnn, missing, refuse)
    model = torch.nn.Module()
    model.lm_head = torch.nn.Linear(16, 8, bias=False).requires_grad_(False)
    with caplog.at_level(logging.INFO, "fastkernels"):
        for _ in range(2):
            packed_weights.pack_weights(model)
    reason = "this PyTorch has no oneDNN" if missing == "oneDNN" else "needs instructions that this CPU lacks"
    assert not hasattr(model.lm_head.weight, "onednn_packed")
    assert [r.message for r in caplog.records] == [
        f"weights in float32 are not packed for decoding: {reason}"
    ]


@pytest.mark.parametrize(
    ("fields", "dtype"),
    [
        ({"flags": "fpu avx2 fma"}, "float32"),
        ({"flags": "fpu avx512f avx512bw avx512vl"}, "float32"),
        ({"flags": "fpu avx512_bf16"}, "bfloat16"),
        ({"Features": "fp asimd bf16"}, "bfloat16"),
        ({}, "bfloat16"),
    ],
)
def test_benchmark_dtype_follows_the_instructions(
    fields: dict[str, str], dtype: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cpu, "_fields", lambda: fields)
    monkeypatch.setattr(machine, "gpu_names", lambda: ())
    assert machine.fast_dtype.__wrapped__() == dtype


@pytest.mark.parametrize("there", [True, False, None])
def test_auto_dtype_follows_onednn(there: bool | None, monkeypatch: pytest.MonkeyPatch) -> None:
    """None: a build without oneDNN, which has no such function."""
    namespace = type("mkldnn", (), {} if there is None else {"_is_mkldnn_bf16_supported": lambda: there})
    monkeypatch.setattr(torch.ops, "mkldnn", namespace)
    config = type("Config", (), {"dtype": torch.bfloat16})
    assert pick_dtype("auto", config, torch.device("cpu")) == (torch.bfloat16 if there else torch.float32)
    assert pick_dtype("bfloat16", config, torch.device("cpu")) == torch.bfloat16


@BY_NAME
def test_compiler_without_native_target_is_used(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("FASTKERNELS_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("CXX", compiler(tmp_path, "-march=native", rejected="-march=native"))
    source = tmp_path / "answer.cpp"
    source.write_text('extern "C" int answer() { return 42; }')
    compile_cache.folder.cache_clear()
    try:
        with caplog.at_level(logging.INFO, "fastkernels"):
            found = cpp.library.__wrapped__(source)
    finally:
        compile_cache.folder.cache_clear()
    assert not isinstance(found, str) and found.answer() == 42
    assert (
        sum("rejects -march=native and compiles with -mcpu=native" in r.message for r in caplog.records) == 1
    )
