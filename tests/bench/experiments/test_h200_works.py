"""Tests of the parts works-... of `make bench-h200`: each feature of a host once, within the part's time limit."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[3] / "bench"))
from experiments import h200
from experiments.works_with import works_with
from fk_bench.batch.queue import Part
from fk_bench.core.gpus import Command


def works(quick: bool) -> dict[str, Part]:
    hosts = {"vllm": "v/python", "sglang": "g/python"}
    found = h200.parts(h200.Settings(Path("out"), "model", "fp8", hosts, quick=quick))
    return {p.name: p for p in found if p.name.startswith("works-")}


def value(command: Command, option: str) -> str:
    return command[command.index(option) + 1]


def features(part: Part) -> list[str]:
    return value(part.commands[-1], "--features").split(",")


@pytest.mark.parametrize("host", ["vllm", "sglang"])
def test_every_host_feature_has_one_part_with_its_gpus(host: str) -> None:
    options = {f: row[1 + (host == "sglang")] for f, row in works_with.FEATURES.items()}
    has = {f: found for f, found in options.items() if found is not None}
    parts = [p for p in works(False).values() if value(p.commands[-1], "--host") == host]
    assert sorted(f for p in parts for f in features(p)) == sorted(has)
    ranks = {"tensor_parallel_size", "pipeline_parallel_size", "tp_size", "pp_size", "data_parallel_size"}
    for part in parts:
        assert {2 if ranks & has[f].keys() else 1 for f in features(part)} == {part.gpus}
        assert value(part.commands[-1], "--jobs") == str(len(features(part))) and part.last
        assert len(features(part)) <= 6  # concurrent cells that fit


@pytest.mark.parametrize("quick", [False, True])
def test_cells_end_in_time_and_host_kernels_are_prebuilt(quick: bool) -> None:
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
