"""Tables of `fk-bench patch-compare`, from made-up rows."""

from __future__ import annotations

from typing import Any

from fk_bench.core.rows import Row, Subject
from fk_bench.offline.host import make_row
from fk_bench.tables import patch


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
