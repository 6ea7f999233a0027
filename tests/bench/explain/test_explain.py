"""fk-bench explain: its lines add up, its times come from correct providers only, and missing times are explained."""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from fk_bench.core import rows
from fk_bench.core.rows import Row, Status
from fk_bench.e2e.model_configs import load_config
from fk_bench.explain import provider_times
from fk_bench.explain.command import TimedCall, explain_command, patched, totals
from fk_bench.explain.cost_model import Call, step
from fk_bench.explain.provider_times import Contender, Measured, ProviderTime, choose, time_all
from support.commands import fk_bench, last_json

from fastkernels.core import registry, tuning
from fastkernels.core.spec import Case

ROOT = Path(__file__).parents[3]
from support.tiny import make_tiny  # noqa: E402


@pytest.fixture(autouse=True)
def one_thread() -> Any:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def run(capsys: pytest.CaptureFixture[str], folder: Path, **flags: Any) -> tuple[dict, list[Row], str]:
    """(the line of JSON, the rows, the printed output)."""
    explain_command(out=folder, **flags)
    text = capsys.readouterr().out
    found, warnings = rows.read(folder / "rows.jsonl")
    assert not warnings and {r.command for r in found} == {"explain"}
    return json.loads(text.splitlines()[-1]), found, text


def refused(capsys: pytest.CaptureFixture[str], *words: str, **flags: Any) -> None:
    with pytest.raises(SystemExit) as caught:
        explain_command(**flags)
    said = capsys.readouterr().err
    assert caught.value.code == 2 and all(w in said for w in words), said


def test_floors_of_a_named_chip_without_a_gpu(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    answer, found, text = run(
        capsys, tmp_path, model="llama-3.1-8b", batch="1,32", gpu="NVIDIA H200", no_time=True
    )
    assert answer["ok"] and (answer["gpu"], answer["timer"], answer["batch"]) == ("H200", "floor", 1)
    assert "times were not measured" in text
    for absent in ("step_ms", "measured_ms", "predicted_gain_ms", "best_ms"):
        assert answer[absent] is None
    assert not any(name.startswith(("host", "ours", "best", "gain")) for r in found for name in r.metrics)
    steps = [r for r in found if r.kind == "step"]
    assert [s["floor_ms"] for s in answer["steps"]] == [
        pytest.approx(s.metrics["floor_ms"], abs=1e-6) for s in steps
    ]
    for each in steps:
        calls = [r for r in found if r.kind == "call" and r.case["batch"] == each.case["batch"]]
        total = sum(r.case["count"] * r.metrics["floor_us"] for r in calls) / 1e3
        assert each.metrics["floor_ms"] == pytest.approx(total)
        by_group = [
            v for k, v in each.metrics.items() if re.fullmatch(r"floor_(linears|attention|rest)_ms", k)
        ]
        assert sum(by_group) == pytest.approx(total) and len(by_group) == 3
        assert each.metrics["floor_tokens_per_s"] == pytest.approx(1e3 * each.case["batch"] / total)
    # 15.01 GB at 4.8 TB/s, and almost nothing else.
    assert 15.01 / 4.8 < steps[0].metrics["floor_ms"] < 1.02 * 15.01 / 4.8


def test_command_ends_with_json(tmp_path: Path) -> None:
    result = fk_bench(
        "explain", "qwen3-0.6b", "--gpu", "H100", "--phase", "prefill", "--json", "--out", tmp_path
    )
    assert result.returncode == 0, result.stderr
    assert len(result.stdout.splitlines()) == 1
    answer = last_json(result)
    assert (answer["command"], answer["gpu"], answer["phase"]) == ("explain", "H100 SXM", "prefill")
    assert [s["batch"] for s in answer["steps"]] == [1, 8]


@pytest.mark.parametrize("kind", ["llama", "mixtral"])
def test_times_are_measured_on_cpu(kind: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = make_tiny(tmp_path / kind, kind, num_hidden_layers=1)
    answer, found, text = run(
        capsys, tmp_path / "run", model=str(folder), batch="3", context="20", device="cpu"
    )
    assert answer["timer"] == "cpu" and "not a speed claim" in text and answer["floor_ms"] is None
    calls = [r for r in found if r.kind == "call"]
    assert all(r.status is Status.OK for r in found)
    timed = [r for r in calls if "best_us" in r.metrics]
    assert {"linear", "rms_norm", "silu_and_mul" if kind == "llama" else "fused_experts"} <= {
        r.subject.op for r in timed
    }
    for r in timed:
        assert r.metrics["best_us"] == min(r.case["us"].values()) > 0
        assert r.case["us"][r.case["best"]] == r.metrics["best_us"]
    linears = [r for r in timed if r.subject.op == "linear"]
    assert all(r.case["host"] == "onednn" == r.baseline and not r.case["patched"] for r in linears)
    # vLLM is not in this environment: its norm has no time, and no other provider replaces it.
    norms = [r for r in calls if r.subject.op == "rms_norm"]
    assert all("host_us" not in r.metrics and "gain_us" not in r.metrics and r.case["patched"] for r in norms)
    assert all("vllm" in r.reason for r in norms) and "rms_norm: host: vllm" in text
    assert answer["step_ms"] is None and "rms_norm of norm" in answer["not_measured"]
    known = sum(r.case["count"] * r.metrics["host_us"] for r in calls if "host_us" in r.metrics) / 1e3
    assert answer["measured_ms"] == pytest.approx(known, abs=1e-5)


def test_gpu_case_is_not_timed_on_cpu() -> None:
    case = Case("big", {"tokens": (1,), "in": 4096, "out": 4096})
    found = provider_times.measure("linear", case, "cpu", "vllm")
    assert found.best is None and "GPU only" in found.reasons["host"] == found.reasons["ours"]


def test_ours_follows_the_chips_table(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    linear, shape = registry.get("linear").op, {"N": 33, "K": 64, "dtype": "float32"}
    won: dict[str, Any] = {"speedup": 1.2, "ci95": (1.1, 1.3)}
    entry = tuning.Entry("linear", shape, {"M": 8}, "reference", "onednn", "r1", **won)
    path = tmp_path / "cpu.json"
    path.write_text(tuning.Table("cpu", {"r1": {}}, (entry,)).to_json())
    for put in (path, None):
        monkeypatch.setenv("FASTKERNELS_TUNED", str(put)) if put else monkeypatch.delenv("FASTKERNELS_TUNED")
        tuning._by_op.cache_clear()
        linear.reset()
        found = provider_times.measure(
            "linear", Case("c", {"tokens": (5,), "in": 64, "out": 33}), "cpu", "vllm"
        )
        assert found.ours is not None and (found.ours.name == "ours/tuned") is (put is not None), found


def contender(name: str, fn: Callable[..., Any], kind: str = "library", **more: Any) -> Contender:
    return Contender(name, kind, lambda: fn, **more)


def test_only_right_providers_are_timed() -> None:
    spec = registry.get("linear")
    case = Case("c", {"tokens": (5,), "in": 64, "out": 33}, "float32")

    def right(x: torch.Tensor, weight: torch.Tensor, bias: Any = None) -> torch.Tensor:
        return torch.nn.functional.linear(x, weight, bias)

    def raises(*_: Any) -> torch.Tensor:
        raise RuntimeError("no such kernel")

    found = [
        contender("right", right), contender("wrong", lambda *args: right(*args) + 0.5),
        contender("raises", raises), contender("none", lambda *_: None),
        contender("refuses", right, refuses=lambda *_: "not this one"),
        contender("absent", right, absent="not installed"),
    ]  # fmt: skip
    timed, unchecked = time_all(spec, case, "cpu", found)
    result = {t.name: t for t in timed}
    assert unchecked == "" and result["right"].us is not None and not result["right"].problem
    problems = {t.name: t.problem for t in timed if t.us is None}
    assert problems["wrong"].startswith("wrong: output 0") and "no such kernel" in problems["raises"]
    assert problems["none"] == "0 outputs instead of 1"
    assert (problems["refuses"], problems["absent"]) == ("not this one", "not installed")


def test_written_arguments_are_checked() -> None:
    spec = registry.get("store_kvcache")
    case = Case("c", {"tokens": 3, "kv_heads": 2, "head_size": 8, "block_size": 4}, "float32")
    nothing = contender("nothing", lambda *_: None)
    timed, _ = time_all(spec, case, "cpu", [nothing, *provider_times.contenders("store_kvcache", "cpu")])
    assert timed[0].us is None and "a written argument" in timed[0].problem
    assert any(t.us is not None for t in timed if t.kind == "ours")


def test_provider_of_the_host() -> None:
    timed = [
        ProviderTime("vllm", "host", 3.0), ProviderTime("sgl_kernel", "host", 2.0),
        ProviderTime("flashinfer", "library", 1.0),
        ProviderTime("ours/triton", "ours", 1.5), ProviderTime("ours/reference", "ours", 9.0),
    ]  # fmt: skip

    def names(found: Measured) -> list[str | None]:
        return [None if t is None else t.name for t in (found.host, found.ours, found.best)]

    assert names(choose("rms_norm", "vllm", timed)) == ["vllm", "ours/triton", "flashinfer"]
    assert names(choose("rms_norm", "sglang", timed)) == ["sgl_kernel", "ours/triton", "flashinfer"]
    # The library's kernel is the same under our op; another host's is not the host's.
    fa3 = [ProviderTime("fa3", "host", None, "vllm is not installed"), ProviderTime("ours/fa3", "ours", 4.0)]
    assert names(choose("attention_decode", "sglang", fa3)) == ["ours/fa3"] * 3
    nothing = choose(
        "fused_experts",
        "sglang",
        [ProviderTime("vllm", "host", 3.0), ProviderTime("ours/triton", "ours", None, "no")],
    )
    assert names(nothing) == [None, None, "vllm"]
    assert nothing.reasons == {
        "host": "no known provider of sglang for fused_experts", "ours": "ours/triton: no",
    }  # fmt: skip


def test_ops_patched_by_default() -> None:
    assert all(
        patched(op, host) for op in ("rms_norm", "silu_and_mul", "rotary_emb") for host in ("vllm", "sglang")
    )
    assert not any(
        patched(op, "vllm") for op in ("linear", "logits_processor", "store_kvcache", "attention_decode")
    )


def line(
    op: str, count: int, floor: float, replaced: bool, host: float | None, ours: float | None
) -> TimedCall:
    def timed(name: str, us: float | None) -> ProviderTime | None:
        return None if us is None else ProviderTime(name, "host", us)

    known = [t for t in (timed("vllm", host), timed("ours/triton", ours)) if t is not None]
    best = min(known, key=lambda t: t.us or 0.0, default=None)
    measured = Measured(tuple(known), timed("vllm", host), timed("ours/triton", ours), best)
    return TimedCall(Call(op, op, "bfloat16", 8, 0, count=count), floor, replaced, measured)


def test_gain_counts_replaced_calls_only() -> None:
    found = step(*load_config("llama-3.1-8b"), batch=4)
    lines = [line("rms_norm", 10, 1.0, True, 5.0, 3.0), line("linear", 2, 7.0, False, 20.0, 8.0)]
    sums = totals(found, lines)
    assert sums["step_ms"] == sums["measured_ms"] == pytest.approx(0.090)
    # A faster linear that is not patched in saves nothing
    assert sums["predicted_gain_ms"] == pytest.approx(0.020)
    assert (sums["best_ms"], sums["floor_ms"]) == (pytest.approx(0.046), pytest.approx(0.024))
    assert sums["step_tokens_per_s"] == pytest.approx(4 / 90e-6)
    worse = totals(found, [line("rms_norm", 10, 1.0, True, 5.0, 6.0)])
    assert worse["predicted_gain_ms"] == pytest.approx(-0.010)
    part = totals(found, [*lines, line("sampling", 1, 1.0, False, None, 2.0)])
    assert "step_ms" not in part and "step_rest_ms" not in part
    assert part["measured_ms"] == pytest.approx(0.090) and part["step_linears_ms"] == pytest.approx(0.040)


def test_bad_input_says_what_to_do(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    refused(capsys, "unknown model 'lama-3.1-8b'", "Did you mean 'llama-3.1-8b'", model="lama-3.1-8b")
    (tmp_path / "config.json").write_text('{"model_type": "gpt2", "architectures": ["GPT2LMHeadModel"]}')
    refused(capsys, "GPT2LMHeadModel", "not supported", "LlamaForCausalLM", model=str(tmp_path))
    refused(capsys, "--batch", "'0'", batch="0")
    refused(capsys, "--batch", "'many' is not a whole number", batch="1,many")
    refused(capsys, "--context", "'-3'", context="-3")
    refused(capsys, "200000", "131072 positions", context="200000")
    refused(capsys, "--host 'tgi'", "vllm, sglang", host="tgi")
    refused(capsys, "--phase 'train'", "decode, prefill", phase="train")
    refused(capsys, "--dtype 'int4'", dtype="int4")
    refused(capsys, "--gpu 'Voodoo 2'", "H200", gpu="Voodoo 2")
    refused(capsys, "3 ranks", tensor_parallel=3)
    (tmp_path / "file").write_text("")
    refused(capsys, "--out", out=tmp_path / "file")
    if not torch.cuda.is_available():
        refused(capsys, "torch sees no GPU", device="cuda")


def documented() -> list[tuple[str, str]]:
    """(command, the Markdown tables that follow it) of docs/explain.md."""
    text = (ROOT / "docs" / "explain.md").read_text()
    parts = re.split(r"^(fk-bench explain .*--markdown.*)$", text, flags=re.MULTILINE)[1:]
    return [
        (command, "\n".join(x for x in rest.split("\n#")[0].splitlines() if x.startswith("|")))
        for command, rest in zip(parts[::2], parts[1::2], strict=True)
    ]


def test_page_tables_match_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert len(documented()) >= 3
    for i, (command, tables) in enumerate(documented()):
        _, _, name, *words = shlex.split(command)
        assert words[-4:] == ["--gpu", "H200", "--no-time", "--markdown"], command
        flags = {w.lstrip("-").replace("-", "_"): v for w, v in zip(words[:-2:2], words[1:-2:2], strict=True)}
        if "tensor_parallel" in flags:
            flags["tensor_parallel"] = int(flags["tensor_parallel"])  # type: ignore[assignment]
        _, _, text = run(capsys, tmp_path / str(i), model=name, no_time=True, markdown=True, **flags)
        printed = "\n".join(x for x in text.splitlines() if x.startswith("|"))
        assert tables and tables in printed, command
