"""Collectives judged over several processes: rows, bus bandwidth, and ranks that hang or die."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from fk_bench.cli import app
from fk_bench.core.rows import Row, Status, read
from fk_bench.kernels.judge import Judge, Options
from fk_bench.kernels.judge.processes.sides import Sides
from fk_bench.kernels.judge.rows import judging, rank_pair
from fk_bench.kernels.judge.rows.judging import sides_of
from support import ranks
from typer.testing import CliRunner

from fastkernels import capture as recording
from fastkernels.core import registry
from fastkernels.core.spec import Case
from fastkernels.overrides.collective.all_reduce import all_reduce
from fastkernels.overrides.expert_parallel.ep_dispatch import ep_dispatch

OPTIONS = Options(device="cpu", ranks=2, most=1, cases=("random",), rounds=3, timeout=60)
HEAD = """
import os, time
import torch.distributed as dist
from fastkernels.core import parallel


def all_reduce(x, group="tp"):
    comm = parallel.communicator(group)
"""
TAIL = """
    out = x.clone()
    dist.all_reduce(out, group=comm.process_group)
    return out
"""


@pytest.fixture(scope="module")
def sides() -> Iterator[Sides]:
    """The processes of all tests: a fork server imports for seconds."""
    with sides_of(OPTIONS) as found:
        yield found


@pytest.fixture(scope="module")
def judge(sides: Sides) -> Iterator[Judge]:
    with Judge({}, OPTIONS, sides=sides) as found:
        yield found


def rows(judge: Judge, op: str, options: Options, candidate: Path | None = None) -> list[Row]:
    judge.options, judge.candidates = options, {op: candidate} if candidate else {}
    before = len(judge.rows)
    judge.op(op)
    return [r for r in judge.rows[before:] if r.kind == "case"]


def verdict(judge: Judge, folder: Path, body: str, timeout: float = 60.0) -> Row:
    file = folder / "all_reduce.py"
    file.write_text(f"{HEAD}{body}{TAIL}")
    options = dataclasses.replace(OPTIONS, names=("one",), most=0, timeout=timeout, scan=False)
    (row,) = rows(judge, "all_reduce", options, file)
    return row


def test_dead_rank_is_named(judge: Judge, tmp_path: Path) -> None:
    row = verdict(judge, tmp_path, "    if comm.rank == 1:\n        os._exit(7)\n")
    assert row.status is Status.CRASH and "rank 1: its process ended: exit status 7" in row.reason


def test_error_of_a_rank_is_not_blamed_on_the_others(judge: Judge, tmp_path: Path) -> None:
    row = verdict(judge, tmp_path, "    if comm.rank == 1:\n        raise IndexError('out of range')\n")
    assert row.status is Status.RUNTIME_ERROR and row.reason.startswith("rank 1: IndexError: out of range")


def test_hanging_rank_is_named(judge: Judge, tmp_path: Path) -> None:
    row = verdict(judge, tmp_path, "    if comm.rank == 1:\n        time.sleep(1e4)\n", timeout=8)
    assert row.status is Status.TIMEOUT and "rank 1 gave no answer" in row.reason, row.reason


PEERS = """
    pid = torch.tensor([os.getpid()])
    open(f"/tmp/here-{os.getpid()}", "w").close()
    pids = torch.zeros(comm.size, dtype=pid.dtype)
    dist.all_gather_into_tensor(pids, pid, group=comm.process_group)
    assert len(set(pids.tolist())) == comm.size, pids
    for other in pids.tolist():
        assert os.path.exists(f"/tmp/here-{other}") and os.path.exists(f"/proc/{other}/stat"), other
        with open(f"/tmp/here-{other}", "a") as file:
            file.write("x")
"""


def test_ranks_of_a_side_share_processes_and_files(judge: Judge, tmp_path: Path) -> None:
    """Libraries pass each other GPU memory over sockets in /tmp that are named after processes."""
    row = verdict(judge, tmp_path, f"    import torch\n{PEERS}")
    assert row.status is Status.OK, row.reason


def test_first_rank_that_dies_is_named(judge: Judge, tmp_path: Path) -> None:
    row = verdict(judge, tmp_path, "    if comm.rank == 0:\n        os._exit(7)\n")
    assert row.status is Status.CRASH and "rank 0: its process ended: exit status 7" in row.reason


@pytest.mark.slow
@pytest.mark.parametrize("name", registry.collective_names())
def test_family_over_ranks(judge: Judge, name: str) -> None:
    for size, most in ((2, 1), (3, 4)):  # more cases where nothing divides evenly
        found = rows(judge, name, dataclasses.replace(OPTIONS, ranks=size, most=most, timeout=240))
        assert {r.status for r in found} <= {Status.OK, Status.SKIPPED}, [r.reason for r in found]


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["all_reduce", "--device", "cpu"], "fk-bench kernels all_reduce --ranks 2 --device cpu"),
        (["--family", "collective"], "fk-bench kernels --family collective --ranks 2 --device cpu"),
        (["--family", "colective"], "Did you mean 'collective'?"),
        (["rms_norm", "--ranks", "2"], "--ranks is for collectives: all_gather, all_gather_linear"),
        (["rms_norm", "all_reduce", "--ranks", "2", "--device", "cpu"], "rms_norm is none"),
        (["all_reduce", "--ranks", "1"], "--ranks 2"),
        (
            ["all_reduce", "--ranks", "3", "--device", "cuda"],
            "--ranks 3 needs a GPU for each rank, and 2 can be used",
        ),
    ],
)
def test_command_says_what_to_type(
    arguments: list[str], says: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: "cuda" in arguments)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    result = CliRunner().invoke(app, ["kernels", *arguments, "--out", str(tmp_path / "run")])
    assert result.exit_code != 0 and says in result.output, result.output


def command(folder: Path, *arguments: str) -> dict[str, Row]:
    """{op: the row of its case} of a run, which must be right."""
    words = ["kernels", "--ranks", "2", "--device", "cpu", "--case", "one", "--json", *arguments]
    result = CliRunner().invoke(app, [*words, "--out", str(folder / "run")])
    line = json.loads(result.output.strip().splitlines()[-1])
    assert result.exit_code == 0 and line["ok"], result.output
    return {str(r.subject.op): r for r in read(folder / "run" / "rows.jsonl")[0] if r.kind == "case"}


@pytest.fixture
def shared(sides: Sides, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(judging, "Judge", lambda *given: Judge(*given[:4], sides=sides))


@pytest.mark.usefixtures("shared")
def test_family_command_over_two_ranks(tmp_path: Path) -> None:
    found = command(tmp_path, "--family", "collective", "--no-time")
    assert sorted(found) == [n for n in registry.collective_names() if registry.family(n) == "collective"]
    assert all(r.case["dims"]["ranks"] == 2 and r.baseline for r in found.values())


@pytest.mark.usefixtures("shared")
def test_times_over_two_ranks(tmp_path: Path) -> None:
    row = command(tmp_path, "all_gather", "--rounds", "3")["all_gather"]
    assert row.baseline == "gloo"
    if "speedup" in row.metrics:  # the machine was quiet enough
        sent = registry.get("all_gather").traffic(Case("", row.case["dims"], row.case["dtype"]))
        assert row.metrics["bus_gb_per_s"] == pytest.approx(sent / row.metrics["time_us_p50"] / 1e3)
    else:
        assert row.case["untimed"], row.reason


def recorded(rank: int, folder: str) -> None:
    recording.start(recording.Limits())
    for tokens, times in ((1, 5), (7, 2)):
        for _ in range(times):
            all_reduce(torch.ones(tokens, 576), "tp")
    made = recording.stop()
    if rank == 0:
        made.save(f"{folder}/tiny", {"host": "fastkernels", "model": "tiny"})


def test_messages_of_a_run_become_captured_cases(judge: Judge, tmp_path: Path) -> None:
    ranks.run(2, recorded, str(tmp_path))
    spec = registry.get("all_reduce")
    options = dataclasses.replace(OPTIONS, cases=("captured",), captures=tmp_path, most=0, ranks=3)
    found = rank_pair.trials(spec, options)
    sizes = [
        (t.case.dims["tokens"], t.case.dims["hidden"], t.case.dims["ranks"], t.case.weight) for t in found
    ]
    assert sizes == [(1, 576, 3, 5), (7, 576, 3, 2)] and {t.source for t in found} == {"captured"}
    (row, _) = rows(judge, "all_reduce", dataclasses.replace(options, ranks=2, timed=False))
    assert row.status is Status.OK and row.case["source"] == "captured" and row.case["weight"] == 5


ROUTED = [[0, 3], [3, 0], [1, 0], [-1, -1], [2, 3]]


def dispatched(rank: int, folder: str) -> None:
    recording.start(recording.Limits())
    ids = torch.tensor(ROUTED, dtype=torch.int32)
    for times in range(3):
        ep_dispatch(torch.ones(5, 8), ids.roll(times, 0), torch.ones(5, 2), 4, "tp")
    made = recording.stop()
    if rank == 0:
        made.save(f"{folder}/tiny", {"host": "fastkernels", "model": "tiny"})


def test_routing_of_a_run_becomes_a_captured_case(tmp_path: Path) -> None:
    ranks.run(2, dispatched, str(tmp_path))
    spec = registry.get("ep_dispatch")
    options = dataclasses.replace(OPTIONS, cases=("captured",), captures=tmp_path, most=0)
    (trial,) = rank_pair.trials(spec, options)
    assert trial.case.weight == 3 and trial.case.dims == {
        "ranks": 2, "tokens": 5, "hidden": 8, "topk": 2, "experts": 4,
    }  # fmt: skip
    drawn = [trial.make("cpu", torch.Generator().manual_seed(seed)) for seed in (1, 2)]
    for x, ids, weights, *_ in drawn:
        assert sorted(ids.tolist()) == sorted(ROUTED) and ids.dtype == torch.int32
        assert x.std() > 0.1 and weights.std() > 0.1
    assert not torch.equal(drawn[0][1], drawn[1][1])
    assert rank_pair.trials(spec, dataclasses.replace(options, ranks=3)) == []  # 4 experts
