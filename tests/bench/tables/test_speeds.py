"""Tables of models next to their references, from made-up rows."""

from __future__ import annotations

from typing import Any

import pytest
from fk_bench.core.rows import Machine, Row, Subject
from fk_bench.core.terminal.flags import ConfigError
from fk_bench.offline.host import make_row
from fk_bench.tables import model_plot, speeds

H200 = Machine(gpu="NVIDIA H200", gpus=1, cpu="cpu", cores=2)
H100 = Machine(gpu="NVIDIA H100 80GB HBM3", gpus=1, cpu="cpu", cores=2)
LLAMA = "llama-3.2-3b"


def text(
    patched: float, engine: float, day: int = 1, model: str = LLAMA, machine: Machine = H200, **case: Any
) -> list[Row]:
    """Stock, patched, stock with one run each and our engine, at 1 and 32 requests; stock makes 100 tokens/s."""
    made = []
    for load in ("1x512+128", "32x512+128"):
        for block in range(3):
            states = {"patched": patched} if block == 1 else {"stock": 100.0, "fastkernels": engine}
            for state, rate in states.items():
                where = {"state": state, "block": block, "run": 0, "load": load, "with_engine": True, **case}
                row = make_row(
                    "vllm", where, {"output_tokens_per_s": rate}, command="patch-compare",
                    subject=Subject(model=model, host="vllm"),
                )  # fmt: skip
                made.append(
                    row.model_copy(
                        update={
                            "machine": machine,
                            "time": f"2026-11-0{day}",
                            "run_id": f"{day}{model}{machine.gpu}",
                        }
                    )
                )
    return made


def test_text_model_has_ratios_means_and_the_papers_figure() -> None:
    ((title, columns, (cells,)),) = speeds.text({"a": text(110.0, 120.0)})
    assert title.startswith(
        "Output tokens/s over stock vLLM's, by number of requests; lengths: tokens of a prompt + of its output ("
    )
    assert cells == [
        "Llama-3.2-3B", "H200", "512+128", "1.100", "1.100", "", "1.200", "1.200", "", "1.04", "2026-11-01",
    ]  # fmt: skip
    assert len(columns) == len(cells)


@pytest.mark.parametrize("newer_first", [True, False])
def test_newest_run_of_model_and_chip_counts(newer_first: bool) -> None:
    files = {"old": text(110.0, 120.0), "new": text(130.0, 140.0, 2), "h100": text(90.0, 80.0, machine=H100)}
    ((_, _, cells),) = speeds.text(dict(reversed(files.items())) if newer_first else files)
    assert [(row[1], row[3]) for row in cells] == [
        ("H100", "0.900"),
        ("H200", "1.300"),
    ]


def test_two_runs_in_a_file_are_not_mixed() -> None:
    ((_, _, (cells,)),) = speeds.text({"a": [*text(130.0, 140.0, 2), *text(110.0, 120.0)]})
    assert cells[3] == "1.300"


def test_experts_are_shown_with_uniform_routing_only() -> None:
    assert not list(speeds.text({"a": text(110.0, 120.0, model="gpt-oss-20b")}))
    ((_, _, (cells,)),) = speeds.text({"a": text(110.0, 120.0, model="gpt-oss-20b", routing="uniform")})
    assert cells[0] == "gpt-oss-20b" and cells[9] == "1.02"


def test_decodes_of_other_lengths_fill_the_table() -> None:
    """A newer run of short outputs stands in the same columns, with its lengths; the newest load counts."""
    old, new = text(110.0, 120.0), text(130.0, 140.0, 2)
    for row in new:
        row.case["load"] = {"1x512+128": "1x512+64", "32x512+128": "64x512+64"}[row.case["load"]]
    ((_, columns, (cells,)),) = speeds.text({"old": old, "new": new})
    shown = dict(zip(columns, cells, strict=True))
    assert shown["lengths"] == "512+64, 512+128"
    assert [shown[f"patched, {n}"] for n in (1, 32, 64)] == ["1.300", "1.100", "1.300"]


def test_patched_hosts_have_a_line_for_each_chip() -> None:
    made = []
    for load, value in (("1x512+64", 0.8), ("8x512+64", 0.5), ("8x2048+8", 1.1), ("4x8192+8", 1.21)):
        for block, name in enumerate(("stock", "patched", "stock")):
            rate = value if name == "patched" else 1.0
            metric = "input_tokens_per_s" if load.endswith("+8") else "tpot_ms"
            row = make_row(
                "sglang", {"state": name, "block": block, "run": 0, "load": load}, {metric: rate},
                command="patch-compare", subject=Subject(model=LLAMA, host="sglang"),
            )  # fmt: skip
            made.append(row.model_copy(update={"machine": H200, "time": "2026-11-02", "run_id": "a"}))
    ((title, columns, (cells,)),) = speeds.patched({"a": made})
    assert "input tokens/s" in title and len(columns) == len(cells)
    assert cells == [
        "Llama-3.2-3B",
        "SGLang",
        "H200",
        "512+64",
        "1.250",
        "2.000",
        "",
        "",
        "1.154",
        "2026-11-02",
    ]
    drawn = model_plot.patched({"a": made})
    assert "Llama-3.2-3B, 8: 2.000" in drawn and "Llama-3.2-3B, prompts: 1.154" in drawn


@pytest.mark.parametrize(("model", "paper"), [("mamba2-2.7b", "0.97"), ("jamba-v0.1", "1.02")])
def test_recurrent_models_have_the_papers_figure(model: str, paper: str) -> None:
    routing = {"routing": "uniform"}
    ((_, _, (cells,)),) = speeds.text({"a": text(96.0, 93.0, model=model, **routing)})
    assert cells[3] == "0.960" and cells[7] == "0.930" and cells[9] == paper


def test_rows_without_our_engine_are_left_out() -> None:
    assert not list(speeds.text({"a": text(110.0, 120.0, with_engine=False)}))


def format_rows(
    name: str, layers: int, times: dict[str, tuple[float, ...]], load: str = "8x512+128"
) -> list[Row]:
    """Runs of a number format, numbered from -1: {engine: ms per token}; 1,000 / ms tokens/s."""
    return [
        make_row(
            host, {"load": load, "run": run, "layers": layers, "shapes": "llama-3.1-8b"},
            {"tpot_ms": ms, "output_tokens_per_s": 1e3 / ms}, command="formats", subject=Subject(model=name, host=host),
        ).model_copy(update={"machine": H100, "time": "2026-11-01", "run_id": f"{name}{layers}"})
        for host, found in times.items() for run, ms in enumerate(found, -1)
    ]  # fmt: skip


def test_formats_have_a_row_for_each_depth() -> None:
    rows = [
        *format_rows("awq", 32, {"vllm": (90.0, 6.0, 8.0, 6.0), "fastkernels": (1.0, 4.0, 4.0, 5.0)}),
        *format_rows("awq", 8, {"vllm": (1.0, 3.0), "fastkernels": (1.0, 2.0)}),
        *format_rows("awq", 8, {"vllm": (1.0, 2.0)}, load="32x512+128"),
        *format_rows("bitnet", 30, {"fastkernels": (1.0, 2.0)}),
    ]
    times, rates, own = speeds.formats({"a": rows})
    assert "(NVIDIA H100" in times[0] and times[1][4:] == [
        "1 x (512, 128)", "8 x (512, 128)", "32 x (512, 128)", "64 x (1024, 128)", "mean", "measured",
    ]  # fmt: skip
    assert [row[:3] for row in times[2]] == [["awq", "llama-3.1-8b", "8"], ["awq", "llama-3.1-8b", "32"]]
    head = ["awq", "llama-3.1-8b", "32", "H100"]
    assert times[2][1] == [*head, "", "1.500", "", "", "1.500", "2026-11-01"]
    assert rates[2][1] == [*head, "", "1.500", "", "", "1.500", ""]
    assert own[2][1] == [*head, "", "4.00", "", ""] and len(own[1]) == 8


def test_whole_model_on_two_gpus_has_the_paper_figure() -> None:
    rows = [
        row.model_copy(
            update={
                "machine": H100.model_copy(update={"gpus": 2}),
                "case": {**row.case, "shapes": "gemma-4-26b-a4b", "own_gpu": "1"},
            }
        )
        for layers in (30, 12)
        for row in format_rows("gemma-4-26b-a4b", layers, {"vllm": (1.0, 6.0), "fastkernels": (1.0, 4.0)})
    ]
    _, columns, cells = [*speeds.formats({"a": rows})][1]
    assert [(row[2], row[3], row[columns.index("paper")]) for row in cells] == [
        ("12", "H100 each", ""),
        ("30", "H100 each", "1.00"),
    ]


def images(lane: str, ms: float, batch: int = 8, image_size: int = 256) -> Row:
    case = {"kind": "pictures", "result": "features", "batch": batch, "image_size": image_size}
    subject = Subject(model="siglip2", lane=lane, host="timm")
    return make_row("timm", case, {"latency_ms": ms}, subject=subject).model_copy(
        update={"machine": H100, "time": "2026-11-03"}
    )


def test_image_model_is_compared_with_the_fastest_host_lane() -> None:
    lanes = {
        "stock": (40.0, 40.0),
        "compiled": (20.0, 22.0),
        "patched": (30.0, 30.0),
        "patched-compiled": (14.0, 14.0),
    }
    rows = [images(lane, ms) for lane, rounds in lanes.items() for ms in rounds]
    ((_, columns, (cells,)),) = speeds.images({"a": rows})
    assert cells == [
        "siglip2", "timm", "256", "H100", "", "1.497", "", "0.93", "2026-11-03",
    ]  # fmt: skip
    assert len(columns) == len(cells)


def test_encoders_have_a_row_for_each_size_of_images() -> None:
    files = {
        str(size): [
            images("compiled", ms, image_size=size),
            images("patched-compiled", 10.0, image_size=size),
        ]
        for size, ms in ((256, 11.0), (512, 13.0))
    }
    ((_, columns, cells),) = speeds.images(files)
    assert [(c[columns.index("pixels")], c[columns.index("batch 8")]) for c in cells] == [
        ("256", "1.100"), ("512", "1.300"),
    ]  # fmt: skip


def test_pipelines_have_a_row_for_each_batch_and_number_of_steps() -> None:
    rows = []
    for (batch, steps), ratio in {(1, 28): 1.1, (4, 4): 1.25, (1, 4): 1.5}.items():
        for lane, ms in (("compiled", 600.0 * batch), ("patched-compiled", 600.0 * batch / ratio)):
            row = images(lane, ms, batch)
            case = {**row.case, "result": "images", "steps": steps}
            rows.append(row.model_copy(update={"case": case, "run_id": f"{batch} {steps}"}))
    ((_, columns, cells),) = speeds.images({"a": rows})
    shown = [cell[columns.index("batch") : columns.index("paper")] for cell in cells]
    assert shown == [
        ["1", "4", "0.6", "0.4", "1.500"], ["1", "28", "0.6", "0.545", "1.100"], ["4", "4", "2.4", "1.92", "1.250"],
    ]  # fmt: skip


def test_plot_has_a_dot_for_each_ratio_and_the_paper() -> None:
    drawn = model_plot.text({"a": text(110.0, 120.0)})
    assert drawn.count("<title>Llama-3.2-3B, patched,") == 2
    assert "Llama-3.2-3B, our engine, 32: 1.200" in drawn and "Llama-3.2-3B, paper: 1.04" in drawn
    with pytest.raises(ConfigError, match="no rows for the plot"):
        model_plot.images({"a": []})
