"""Multicast over NVLink is off in all processes with ranks, unless the user's environment turns it on."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from fk_bench.cli import app
from fk_bench.kernels.judge.processes.zygote import Zygote
from fk_bench.serving import lanes
from support import ranks
from typer.testing import CliRunner

from fastkernels.core import multicast

OFF = {
    "TORCH_SYMM_MEM_DISABLE_MULTICAST": "1",
    "NCCL_NVLS_ENABLE": "0",
    "NVSHMEM_DISABLE_NVLS": "1",
}


@pytest.fixture(params=[None, "1"])
def chosen(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> dict[str, str]:
    """The values that processes must have: with an empty environment, or with NCCL's as the user has set it."""
    for name in OFF:
        monkeypatch.setenv(name, "")  # so that it is restored, also if the test sets it
        monkeypatch.delenv(name)
    if request.param is None:
        return OFF
    monkeypatch.setenv("NCCL_NVLS_ENABLE", request.param)
    return {**OFF, "NCCL_NVLS_ENABLE": request.param}


def found(environment: dict[str, str]) -> dict[str, str]:
    return {name: value for name, value in environment.items() if name in OFF}


def _environment(rank: int) -> dict[str, str]:
    return found(dict(os.environ))


def test_ranks_of_a_group_turn_multicast_off() -> None:
    assert ranks.run(2, _environment) == [OFF, OFF]


def test_commands_turn_multicast_off_in_what_they_start(chosen: dict[str, str]) -> None:
    assert CliRunner().invoke(app, ["list", "hosts"]).exit_code == 0
    assert found(dict(os.environ)) == chosen


def test_judged_processes_have_multicast_off(chosen: dict[str, str]) -> None:
    assert found(Zygote()._environment()) == chosen
    assert found(Zygote(env={"NCCL_NVLS_ENABLE": "2"})._environment())["NCCL_NVLS_ENABLE"] == "2"


@pytest.mark.parametrize("host", ["vllm", "sglang", "fastkernels"])
def test_servers_of_lanes_have_multicast_off(host: str, chosen: dict[str, str], tmp_path: Path) -> None:
    lane = lanes.Lane(host, host, False, "python")
    assert found(lanes.environment(lane, "model", tmp_path)) == chosen
    with_own = lanes.Lane(host, host, False, "python", env={"NCCL_NVLS_ENABLE": "2"})
    assert lanes.environment(with_own, "model", tmp_path)["NCCL_NVLS_ENABLE"] == "2"


def test_multicast_of_the_user_is_kept(chosen: dict[str, str]) -> None:
    multicast.turn_off()
    assert found(dict(os.environ)) == chosen
