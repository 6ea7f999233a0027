"""Tests of formats.py: each format's config is one that our engine and the comparison can use."""

from __future__ import annotations

import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar

import pytest
from fk_bench.core.rows import Row
from fk_bench.e2e.loads import Load

sys.path.insert(0, str(Path(__file__).resolve().parents[3] / "bench"))
from experiments.checkpoints import formats

from fastkernels.models.common.plans.plan import plan

SMALL = {
    "hidden_size": 256, "intermediate_size": 512, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 64,
    "vocab_size": 512, "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip
LAYERS = 2
OPS = {
    "fp8": "linear_fp8", "bitnet": "linear_ternary", "mxfp4": "fused_experts_swigluoai", "modelopt-fp8": "linear_fp8",
    "nvfp4": "linear_nvfp4", "modelopt-nvfp4": "linear_nvfp4", "latent-sparse": "mla_sparse", "latent": "mla_decode",
    "gemma-4": "gelu_and_mul",
}  # fmt: skip


@pytest.mark.parametrize("name", formats.FORMATS)
def test_config_has_the_format_and_fewer_layers(tmp_path: Path, name: str) -> None:
    found = plan(str(formats.write_config(name, tmp_path, LAYERS)))
    op = next((op for start, op in OPS.items() if name.startswith(start)), "linear_int4")
    assert op in {item.op for item in found}, [item.op for item in found]
    whole = plan(str(formats.write_config(name, tmp_path, 0)))
    assert found.weight_bytes < whole.weight_bytes
    assert found.kv_bytes_per_token < whole.kv_bytes_per_token / 8


def test_steps_before_timed_runs_hold_all_prompts_that_fit() -> None:
    loads = [Load.parse(text) for text in ("1x512+128", "3x512+128", "64x1024+128", "2x9000+8")]
    found = formats.steps_of(loads)
    assert [(step.requests, step.input_len) for step in found if step.input_len == 512] == [
        (n, 512) for n in (1, 2, 3)
    ]
    assert max(step.requests for step in found if step.input_len == 1024) == 8192 // 1024
    assert all(step.input_len < 9000 and step.output_len == 2 for step in found)


class Engine:
    """Stands for a HostProcess: notes what happens, and answers each run with tokens in steps of a millisecond."""

    events: ClassVar[list[tuple[str, str]]] = []

    def __init__(
        self, name: str, python: str, settings: dict[str, Any], folder: Path, env: dict[str, str], log: str
    ):
        self.name, self.python, self.log, self.work = name, python, log, dict[str, Any]()
        self.started, self.settings = time.monotonic(), settings
        self.events.append((f"start on {env.get('CUDA_VISIBLE_DEVICES')}", log))

    def tell(self, work: dict[str, Any]) -> None:
        self.work = work

    def answer(self, timeout: float) -> dict[str, Any]:
        self.events.append((f"{len(self.work['prompts'])} prompts" if self.work else "ready", self.log))
        times = [1e-3 * (i + 1) for i in range(self.work.get("output_len", 0))]
        return {"arrivals": [times] * len(self.work.get("prompts", ()))}

    def stop(self) -> None:
        self.events.append(("stop", self.log))


def test_engines_of_formats_start_together_each_on_its_gpu(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(formats, "HostProcess", Engine)
    monkeypatch.setattr(Engine, "events", events := [])
    names = "gptq", "awq", "int4"
    for name in names:
        monkeypatch.setitem(
            formats.FORMATS, name, replace(formats.FORMATS[name], fields=SMALL, layers=LAYERS)
        )
    more = ["--together", "2", "--loads", "2x16+8", "--repeats", "1", "--gpus", "5,3"]
    command = ["", "--vllm", sys.executable, "--out", str(tmp_path), "--formats", ",".join(names), *more]
    monkeypatch.setattr(sys, "argv", command)
    with pytest.raises(SystemExit) as ended:
        formats.main()
    assert ended.value.code == 0
    engines = [f"{name}-{host}" for name in names for host in ("vllm", "fastkernels")]
    order = {engine: [what for what, of in events if of == engine] for engine in engines}
    for engine in engines:
        gpu = 5 if engine.endswith("vllm") else 3
        runs = ["1 prompts", "2 prompts", "2 prompts", "2 prompts"]
        assert order[engine] == [f"start on {gpu}", "ready", *runs, "stop"]
    places = {event: i for i, event in reversed(list(enumerate(events)))}
    for engine in engines[:4]:
        assert places["ready", engine] < places["1 prompts", "gptq-vllm"]
        assert places["2 prompts", engine] < places["start on 5", "int4-vllm"]
    rows = [Row.model_validate_json(line) for line in (tmp_path / "rows.jsonl").read_text().splitlines()]
    assert {(row.subject.host, row.case["own_gpu"]) for row in rows} == {("vllm", "5"), ("fastkernels", "3")}
    assert {row.case["run"] for row in rows} == {-1, 0} and len(rows) == 12


@pytest.mark.parametrize("gpus", ["0", "0,1,2"])
def test_gpus_are_two(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], gpus: str
) -> None:
    monkeypatch.setattr(sys, "argv", ["", "--vllm", "none", "--out", str(tmp_path), "--gpus", gpus])
    with pytest.raises(SystemExit):
        formats.main()
    assert f"--gpus {gpus}: name two GPUs" in capsys.readouterr().err


def test_engines_of_formats_share_several_gpus(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[dict[str, Any]] = []

    class Ranks(Engine):
        def __init__(self, name: str, python: str, settings: dict[str, Any], *rest: Any, **more: Any) -> None:
            super().__init__(name, python, settings, *rest, **more)
            made.append(settings)

    monkeypatch.setattr(formats, "HostProcess", Ranks)
    monkeypatch.setattr(Engine, "events", [])
    monkeypatch.setitem(
        formats.FORMATS, "gptq", replace(formats.FORMATS["gptq"], fields=SMALL, layers=LAYERS)
    )
    kv = []
    for ranks in ("1", "2"):
        more = [
            "--loads",
            "2x16+8",
            "--repeats",
            "1",
            "--tensor-parallel",
            ranks,
            "--out",
            str(tmp_path / ranks),
        ]
        monkeypatch.setattr(sys, "argv", ["", "--vllm", sys.executable, "--formats", "gptq", *more])
        with pytest.raises(SystemExit) as ended:
            formats.main()
        assert ended.value.code == 0
        assert [settings["tensor_parallel"] for settings in made] == [int(ranks)] * 2
        kv.append(made[0]["kv_bytes"])
        made.clear()
        rows = [
            Row.model_validate_json(x) for x in (tmp_path / ranks / "rows.jsonl").read_text().splitlines()
        ]
        assert {row.case["tensor_parallel"] for row in rows} == {int(ranks)}
    assert kv[1] < kv[0]  # of each rank


@pytest.mark.parametrize(
    ("more", "said"),
    [
        (["--tensor-parallel", "4"], "--tensor-parallel 4 needs a GPU for each rank, and 2 can be used"),
        (["--tensor-parallel", "2", "--gpus", "0,1"], "leave it out with --tensor-parallel"),
    ],
)
def test_wrong_ranks_of_formats_start_nothing(
    more: list[str],
    said: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    there = formats.machine.machine().model_copy(update={"gpus": 2})
    monkeypatch.setattr(formats.machine, "machine", lambda: there)
    monkeypatch.setattr(sys, "argv", ["", "--vllm", "none", "--out", str(tmp_path / "out"), *more])
    with pytest.raises(SystemExit):
        formats.main()
    assert said in capsys.readouterr().err and not (tmp_path / "out").exists()


@pytest.mark.slow
def test_engine_runs_a_format_with_random_weights(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    small = replace(formats.FORMATS["gptq"], fields=SMALL, layers=LAYERS)
    monkeypatch.setitem(formats.FORMATS, "gptq", small)
    loads = ["--loads", "1x16+8,2x16+8", "--repeats", "1"]
    monkeypatch.setattr(
        sys, "argv", ["", "--vllm", "none", "--out", str(tmp_path), "--formats", "gptq", *loads]
    )
    with pytest.raises(SystemExit) as ended:
        formats.main()
    assert ended.value.code == 0, capsys.readouterr().err
    rows = [Row.model_validate_json(line) for line in (tmp_path / "rows.jsonl").read_text().splitlines()]
    assert [(row.case["run"], row.case["requests"]) for row in rows] == [(-1, 1), (-1, 2), (0, 1), (0, 2)]
    assert all(row.metrics["tpot_ms"] > 0 and row.case["layers"] == LAYERS for row in rows)
    results = formats.summary(rows)
    assert [line["fastkernels_tpot_ms"] for line in results] == [row.metrics["tpot_ms"] for row in rows[2:]]
    assert not any("ratio" in line for line in results)


@pytest.mark.slow
def test_failed_host_is_a_row_and_the_other_is_measured(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    small = replace(formats.FORMATS["int4"], fields=SMALL, layers=LAYERS)
    monkeypatch.setitem(formats.FORMATS, "int4", small)
    broken = tmp_path / "python"
    broken.write_text(
        f'#!/bin/sh\n[ "$1" = -c ] && exec {sys.executable} "$@"\necho no vLLM here >&2; exit 3\n'
    )
    broken.chmod(0o755)
    monkeypatch.setattr(
        sys, "argv",
        ["", "--vllm", str(broken), "--out", str(tmp_path), "--formats", "int4", "--loads", "1x16+8", "--repeats", "1"],
    )  # fmt: skip
    with pytest.raises(SystemExit) as ended:
        formats.main()
    assert ended.value.code == 1
    rows = [Row.model_validate_json(line) for line in (tmp_path / "rows.jsonl").read_text().splitlines()]
    bad, good = ([r for r in rows if (r.status.value == "ok") == which] for which in (False, True))
    assert [row.subject.host for row in bad] == ["vllm"] and "no vLLM here" in bad[0].reason
    assert {row.subject.host for row in good} == {"fastkernels"} and len(good) == 2
