"""The parts works-... of `make bench-h200` ask for every feature that a host has, once, and end in their time."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[3]
sys.path[:0] = [str(ROOT / "bench"), str(ROOT / "bench/scenarios")]
import h200  # noqa: E402
import works_with  # noqa: E402
from fk_bench.batch.queue import Command, Part  # noqa: E402


def works(quick: bool) -> dict[str, Part]:
    hosts = {"vllm": "v/python", "sglang": "g/python"}
    found = h200.parts(h200.Asked(Path("out"), "model", "fp8", hosts, quick=quick))
    return {p.name: p for p in found if p.name.startswith("works-")}


def value(command: Command, option: str) -> str:
    return command[command.index(option) + 1]


def features(part: Part) -> list[str]:
    return value(part.commands[-1], "--features").split(",")


@pytest.mark.parametrize("host", ["vllm", "sglang"])
def test_every_feature_that_a_host_has_is_asked_of_it_once_where_it_has_its_gpus(host: str) -> None:
    options = {f: row[1 + (host == "sglang")] for f, row in works_with.FEATURES.items()}
    has = {f: found for f, found in options.items() if found is not None}
    parts = [p for p in works(False).values() if value(p.commands[-1], "--host") == host]
    assert sorted(f for p in parts for f in features(p)) == sorted(has)
    ranks = {"tensor_parallel_size", "pipeline_parallel_size", "tp_size", "pp_size"}
    for part in parts:
        assert {2 if ranks & has[f].keys() else 1 for f in features(part)} == {part.gpus}
        assert value(part.commands[-1], "--jobs") == str(len(features(part))) and part.last
        assert len(features(part)) <= 6  # at once, as was tried


@pytest.mark.parametrize("quick", [False, True])
def test_all_cells_of_a_part_end_in_its_time_and_what_a_host_compiles_is_there_before(quick: bool) -> None:
    longer, seconds = set(works_with.LONGER), {}
    for name, part in works(quick).items():
        *before, cells = part.commands
        host, ways = value(cells, "--host"), value(cells, "--ways").split(",")
        assert ways == (["live"] if quick else ["live", "start"])
        prebuilt = bool(longer & {(f, host) for f in features(part)})
        assert before == ([(cells[0], cells[1], "--host", host, "--prebuild")] if prebuilt else [])
        assert len(ways) * float(value(cells, "--timeout")) + 130 * prebuilt <= part.limit - 30
        seconds[name] = part.seconds
    both, one = seconds["works-vllm-two"], seconds["works-vllm-a"]
    assert (both, one) == ((260, 130) if quick else (330, 200))
