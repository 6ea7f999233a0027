"""Gains of a patch, from rows of patch-compare: the newest run counts, and the nearest models come first."""

from __future__ import annotations

import json

import pytest
from fk_bench import cli
from fk_bench.core.rows import Machine, Row, Subject
from fk_bench.e2e import gains
from fk_bench.tables import gains as tables


def compared(
    model: str, load: str, stock: float, patched: float, run: str = "a", host: str = "vllm", day: int = 1
) -> list[Row]:
    """Rows of one run: three states of two runs each. stock, patched: ms per token, or input tokens/s of prompts."""
    decoding = load.endswith("128")
    made = []
    for block, value in enumerate((stock, patched, stock)):
        metrics = {"tpot_ms": value} if decoding else {"input_tokens_per_s": value}
        made += [
            Row(
                run_id=run, time=f"2026-11-{day:02}T00:00:00Z", command="patch-compare", metrics=metrics,
                machine=Machine(gpu="NVIDIA H100 80GB HBM3", gpus=1, cpu="c", cores=1),
                subject=Subject(model=model, host=host),
                case={"load": load, "block": block, "run": n, "state": ("stock", "patched")[block % 2]},
            )
            for n in range(2)
        ]  # fmt: skip
    return made


FOUND = [
    *compared("qwen3-4b", "1x512+128", 3.0, 2.0, "old", day=1), *compared("qwen3-4b", "1x512+128", 3.0, 2.5, day=2),
    *compared("qwen3-4b", "8x512+8", 100.0, 98.0), *compared("llama-3.2-1b", "1x512+128", 2.6, 2.0),
    *compared("llama-3.1-8b", "1x512+128", 4.4, 4.0, host="sglang"),
]  # fmt: skip


def test_newest_run_counts() -> None:
    found = {(g.model, g.load): g for g in gains.gains(FOUND)}
    assert found["qwen3-4b", "1x512+128"].ratio == pytest.approx(1.2)
    assert found["qwen3-4b", "8x512+8"].ratio == pytest.approx(0.98)
    assert found["qwen3-4b", "1x512+128"].decoding and not found["qwen3-4b", "8x512+8"].decoding
    assert found["qwen3-4b", "1x512+128"].date == "2026-11-02"


def test_gain_of_prompts_is_of_input_tokens() -> None:
    """Decoding after the prompts is faster here and must not count; TTFT and output tokens/s alone are no gain."""
    slower = compared("qwen3-4b", "8x2048+8", 100.0, 95.0)
    for row in slower:
        faster = row.case["state"] == "patched"
        row.metrics.update(output_tokens_per_s=130.0 if faster else 100.0, ttft_ms=8.0 if faster else 10.0)
    assert [gain.ratio for gain in gains.gains(slower)] == [pytest.approx(0.95)]
    for row in slower:
        del row.metrics["input_tokens_per_s"]
    assert not gains.gains(slower)


def test_figure_has_one_dot_for_each_model_and_chip() -> None:
    made = [row for load in ("8x2048+8", "1x32768+8") for row in compared("qwen3-4b", load, 100.0, 110.0)]
    made += compared("qwen3-4b", "4x8192+8", 100.0, 121.0)
    ((_, _, (cells,)),) = tables.table({"file": made})
    assert cells[1:] == ["prompts", "1", "1.14 (Qwen3-4B)", "**1.14**", "1.14 (Qwen3-4B)"]
    drawn = tables.figure({"file": made})
    assert drawn.count("<circle") == 1 and "1x32768+8, 4x8192+8, 8x2048+8: 1.136x" in drawn


def test_run_that_was_only_traced_replaces_no_times() -> None:
    traced = compared("qwen3-4b", "1x512+128", 9.0, 9.0, "later", day=9)
    for row in traced:
        row.case["traced"], row.metrics = True, {"gpu_step_ms": 1.0, "allocations": 0}
    found = gains.gains([*compared("qwen3-4b", "1x512+128", 3.0, 2.5), *traced])
    assert [(gain.ratio, gain.date) for gain in found] == [(pytest.approx(1.2), "2026-11-01")]


@pytest.mark.parametrize(
    ("model", "kind", "host", "first"),
    [
        ("another", "llama", "vllm", "llama-3.2-1b"),
        ("another", "qwen3", "vllm", "qwen3-4b"),
        ("another", "phi3", "vllm", "qwen3-4b"),
        ("another", "qwen3", "sglang", "llama-3.1-8b"),
        ("llama-3.2-1b", "qwen3", "vllm", "llama-3.2-1b"),
    ],
)
def test_nearest_models_by_host_architecture_and_size(model: str, kind: str, host: str, first: str) -> None:
    size = gains.size({"hidden_size": 2560, "num_hidden_layers": 36})
    near = gains.nearest(gains.gains(FOUND), model, kind, size, host)
    assert near[0][0].model == first and len(near) == 3


def test_table_and_figure_show_the_range() -> None:
    (title, columns, cells), *_ = tables.table({"file": FOUND})
    assert "NVIDIA H100" in title and len(columns) == 6
    assert cells[0] == ["vLLM", "1 request", "2", "1.20 (Qwen3-4B)", "**1.25**", "1.30 (Llama-3.2-1B)"]
    assert [row[:2] for row in cells[1:]] == [["vLLM", "prompts"], ["SGLang", "1 request"]]
    drawn = tables.figure({"file": FOUND})
    assert "Qwen3-4B, H100, vLLM, 1x512+128: 1.200x" in drawn and drawn.count("<circle") == 4


def test_explain_prints_the_nearest_measured_models(
    capsys: pytest.CaptureFixture[str], tmp_path: object
) -> None:
    with pytest.raises(SystemExit) as end:
        cli.main(["explain", "qwen3-0.6b", "--no-time", "--batch", "1", "--out", str(tmp_path)])
    text = capsys.readouterr().out
    line = json.loads(text.splitlines()[-1])
    assert not end.value.code and "Measured gains of the nearest models" in text
    assert line["measured"][0]["host"] == "vllm" and line["measured"][0]["model"].startswith("qwen3-")


def test_groups_are_by_kind_of_load() -> None:
    made = [
        row
        for load in ("1x512+128", "8x2048+8", "1x65536@100+128", "32x512+128/8x2048+128", "8x16384@90+8")
        for row in compared("qwen3-4b", load, 100.0, 125.0)
    ]
    (_, _, cells), *_ = tables.table({"file": made})
    assert [row[1] for row in cells] == ["1 request", "prompts", "long context", "prefix hits", "mixed"]
