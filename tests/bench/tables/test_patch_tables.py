"""Tables of `fk-bench patch-compare`, from made-up rows."""

from __future__ import annotations

from typing import Any

from fk_bench.core.rows import Row, Subject
from fk_bench.offline.host import make_row
from fk_bench.tables import patch, speeds


def measured(
    model: str, patched: float, engine: float, load: str = "8x512+64", host: str = "vllm"
) -> list[Row]:
    """Stock, patched, stock, with two runs each, and our engine next to the stock ones. Milliseconds of a token."""
    made = []
    for block, run in ((b, r) for b in range(3) for r in range(2)):
        states = {"patched": patched} if block == 1 else {"stock": 10.0, "fastkernels": engine}
        for state, tpot in states.items():
            case: dict[str, Any] = {
                "state": state,
                "block": block,
                "run": run,
                "load": load,
                "no_table": True,
            }
            metrics = {"tpot_ms": tpot, "output_tokens_per_s": 8000 / tpot, "first_tokens_s": 1.0}
            made.append(
                make_row(
                    host, case, metrics, command="patch-compare", subject=Subject(model=model, host=host)
                )
            )
    for state, step_ms in (("stock", 9.0), ("patched", 7.5)):
        case = {"state": state, "block": 0, "traced": True, "load": load, "no_table": True}
        metrics = {"gpu_step_ms": step_ms, "allocations": 0}
        made.append(
            make_row(host, case, metrics, command="patch-compare", subject=Subject(model=model, host=host))
        )
    return made


def test_latency_has_models_and_their_geometric_mean() -> None:
    ((title, _, cells),) = patch.models({"a": [*measured("m", 8.0, 5.0), *measured("n", 5.0, 5.0)]})
    assert title.startswith("Time per output token: vLLM, patched live, without a tuned table")
    assert cells[0] == ["m", "8", "512, 64", "10.00", "8.00", "1.250 (1.250 to 1.250)", "90%"]
    assert cells[2][0] == "all models" and cells[2][5] == "1.581, least 1.250 of 2"
    assert cells[3][0] == "GPU busy for 85% or more"


def test_short_outputs_count_for_throughput_only() -> None:
    files = {"a": [*measured("m", 8.0, 5.0), *measured("m", 12.5, 5.0, load="8x512+8")]}
    ((_, _, cells),) = patch.models(files)
    assert {row[2] for row in cells} == {"512, 64"}
    ((_, columns, cells),) = patch.throughput(files)
    assert columns[1:3] == ["8x512+64", "8x512+8"]
    assert cells == [["m", "1.250", "0.800", "1.000 (1.000 to 1.000)", "0.800"]]


def test_engine_is_compared_with_the_stock_host() -> None:
    ((_, columns, cells),) = patch.engines({"a": measured("m", 8.0, 5.0)})
    assert columns[-1] == "fastkernels / stock, tok/s"
    assert cells == [
        ["m", "8", "512, 64", "800", "1000", "1600", "10.00", "8.00", "5.00", "2.000 (2.000 to 2.000)"]
    ]


def test_hosts_have_tables_of_their_own() -> None:
    made = [*measured("m", 8.0, 5.0), *measured("m", 8.0, 5.0, host="sglang")]
    assert [title.split(",")[0] for title, _, _ in patch.models({"a": made})] == [
        "Time per output token: vLLM", "Time per output token: SGLang",
    ]  # fmt: skip


def loaded(load: str, patched: float, **more: float) -> list[Row]:
    """As `measured`, with metrics of prompts; more: other metrics, the same in all states."""
    made = measured("m", patched, 8.0, load)
    for row in made:
        if "tpot_ms" in row.metrics:
            row.metrics |= {
                "input_tokens_per_s": 1e6 / row.metrics["tpot_ms"],
                "ttft_ms": row.metrics["tpot_ms"],
                **more,
            }
    return made


def test_prompts_contexts_and_mixed_loads_have_their_tables() -> None:
    made = [*loaded("8x2048+8", 8.0), *loaded("1x65536@100+64", 5.0), *loaded("32x512+256/8x2048+8", 4.0)]
    files = {"a": [*made, *measured("m", 8.0, 5.0)]}
    (title, columns, cells), (ttft, _, waits) = patch.prompts(files)
    assert title.startswith("Prompts, input tok/s: vLLM, patched live") and ttft.startswith(
        "Prompts, TTFT, ms: "
    )
    assert columns == [
        "Model", "Load", "stock", "patched", "our engine", "patched, times better", "patched, 95%",
        "our engine, times better", "our engine, 95%",
    ]  # fmt: skip
    ratios = ["1.250", "1.250 to 1.250", "1.250", "1.250 to 1.250"]
    assert cells == [["m", "8x2048+8", "100,000", "125,000", "125,000", *ratios]]
    assert waits == [["m", "8x2048+8", "10", "8", "8", *ratios]]
    (title, _, cells), _ = patch.contexts(files)
    assert ", TPOT, ms: " in title
    assert [row[1:6] for row in cells] == [["1x65536@100+64", "10", "5", "8", "2.000"]]
    found = [*patch.mixed(files)]
    assert [title.split(", ", 1)[1].split(":")[0] for title, _, _ in found] == [
        "TPOT, ms",
        "TTFT, ms",
        "output tok/s",
    ]
    assert found[0][2][0][:6] == ["m", "32x512+256/8x2048+8", "10", "4", "8", "2.500"]
    assert not list(patch.prompts({"a": measured("m", 8.0, 5.0)}))


def test_text_models_have_prompts_as_columns() -> None:
    """Loads of two runs are joined; without prompts the columns are the old ones."""
    decode, prompts = measured("m", 8.0, 5.0, "1x512+128"), loaded("8x2048+8", 5.0)
    for run, rows in (("a", decode), ("b", prompts)):
        for row in rows:
            row.run_id, row.case["with_engine"] = run, True
    ((title, columns, cells),) = speeds.text({"a": [*decode, *prompts]})
    assert columns[5:7] == ["patched, 64", "patched, prompts"] and columns[10] == "our engine, prompts"
    assert cells[0][3:11] == ["1.250", "", "", "2.000", "2.000", "", "", "1.250"]
    assert "prompts: geometric mean of input tokens/s" in title
    ((title, columns, _),) = speeds.text({"a": decode})
    assert columns[5:7] == ["patched, 64", "our engine, 1"] and "prompts" not in title


def test_newest_run_of_a_load_counts() -> None:
    old, new = loaded("8x2048+8", 8.0), loaded("8x2048+8", 5.0)
    for run, rows in (("a", old), ("b", new)):
        for row in rows:
            row.run_id, row.time = run, f"2026-11-0{'ab'.index(run) + 1}"
    for files in ({"a": old, "b": new}, {"b": new, "a": old}):
        (_, _, cells), _ = patch.prompts(files)
        assert [row[5] for row in cells] == ["2.000"]


def test_fp8_cache_is_a_model_of_its_own() -> None:
    half = loaded("8x2048+8", 5.0)
    for row in half:
        row.case["kv_cache_dtype"] = "fp8"
    (_, _, cells), _ = patch.prompts({"a": [*loaded("8x2048+8", 8.0), *half]})
    assert [row[0] for row in cells] == ["m", "m, KV cache fp8"]


def test_undo_has_a_table() -> None:
    name = "output_tokens_per_s_undo_ratio"
    case = {"state": "undo", "loads": ["1x8+8", "8x8+8"], "alternations": 5}
    subject = Subject(model="m", host="vllm")
    row = make_row(
        "vllm", case, {name: 1.001}, command="patch-compare", subject=subject, ci95={name: (0.99, 1.01)}
    )
    ((_, _, cells),) = patch.undone({"a": [row]})
    assert cells == [["m", "5", "2", "1.001 (0.990 to 1.010)"]]
