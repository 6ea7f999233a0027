"""The table of architectures: which rows are compared."""

from __future__ import annotations

from fk_bench.core.machine import machine
from fk_bench.core.rows import Row, Status, Subject
from fk_bench.tables import architectures


def row(
    model: str, lane: str, ms: float, batch: int = 1, status: Status = Status.OK, time: str = "2026-11-30"
) -> Row:
    return Row(
        run_id="r", command="architectures.py", machine=machine(), versions={"torch": "2.11.0"}, status=status,
        subject=Subject(model=model, provider=lane), case={"kind": "call", "batch": batch}, time=time,
        metrics={"call_ms_p50": ms},
    )  # fmt: skip


def test_the_newest_rows_meet_the_fastest_reference() -> None:
    rows = [
        row("gla", "fastkernels", 3.0, time="2026-11-29"), row("gla", "fastkernels", 2.0), row("gla", "fla", 5.0),
        row("gla", "fla, graph", 4.0), row("gla", "fla, graph, patched", 3.2),
        row("gla", "engine with PyTorch's ops", 1.0),
        row("pi0", "fastkernels", 9.0), row("pi0", "fastkernels, prepared", 1.0), row("pi0", "eager", 1.5),
        row("ptv3", "fastkernels", 0.5), row("ptv3", "fastkernels, prepared", 0.1),
        row("ptv3", "engine with PyTorch's ops", 150.0),
        row("oasis", "fastkernels", 1.0), row("oasis", "library", 0.0, status=Status.FAILED),
        row("gla", "fastkernels", 7.0, 2),
    ]  # fmt: skip
    ((title, head, lines),) = architectures.table({"file": rows})
    assert title.startswith("Milliseconds of a call (") and "`file`" in title
    assert [line[: len(head) - 1] for line in lines] == [
        ["gla", "batch 1", "2", "fla, graph", "4", "2.00", "1.25", "1.85"],
        ["pi0", "batch 1", "1", "eager", "1.5", "1.50", "", "3.48"],
        ["ptv3", "batch 1", "0.5", "engine with PyTorch's ops", "150", "300.00", "", "1.00"],
    ]
    assert not list(architectures.table({"file": rows[:1]}))


def test_patched_references_meet_their_own_stock() -> None:
    rows = [
        row("lightgcn", "fastkernels", 1.0), row("lightgcn", "library, embeddings kept", 0.5),
        row("lightgcn", "library", 6.0), row("lightgcn", "library, patched", 5.0),
        row("lightgcn", "library, compiled", 4.0), row("lightgcn", "library, compiled, patched", 2.5),
    ]  # fmt: skip
    lines, used = architectures.lines_of(rows)
    assert [line[3:7] for line in lines] == [["library, embeddings kept", "0.5", "0.50", "1.60"]]
    assert rows[-1] in used and rows[-2] in used
