"""More ranks than GPUs are refused before anything starts, with both numbers."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch
from fk_bench.cli import app
from fk_bench.core import machine
from fk_bench.core.gpus import check_ranks
from fk_bench.core.rows import Machine
from fk_bench.core.terminal.flags import ConfigError
from typer.testing import CliRunner

sys.path.insert(0, str(Path(__file__).parents[3] / "bench"))
from experiments.collective import collectives, experts, judged

WHY = "4 needs a GPU for each rank, and 2 can be used: give"


@pytest.mark.parametrize(
    "command",
    [
        ["patch-compare", "llama-3.1-8b"],
        ["e2e", "llama-3.1-8b"],
        ["serve-compare", "--model", "llama-3.1-8b", "--lanes", "fastkernels"],
    ],
)
def test_more_ranks_than_gpus_are_refused(
    command: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(machine, "machine", lambda: Machine(gpu="H200", gpus=2))
    out = tmp_path / "run"
    result = CliRunner().invoke(app, [*command, "--tensor-parallel", "4", "--out", str(out)])
    assert result.exit_code == 2 and not out.exists()
    assert f"--tensor-parallel {WHY} --tensor-parallel 2" in " ".join(result.output.split())


@pytest.mark.parametrize("script", [collectives, experts, judged])
def test_scripts_of_collectives_refuse_more_ranks_than_gpus(
    script: object, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(sys, "argv", ["script", "--out", str(tmp_path / "run"), "--ranks", "4"])
    with pytest.raises(SystemExit) as ended:
        script.main()  # type: ignore[attr-defined]
    assert ended.value.code == 2 and f"--ranks {WHY} --ranks 2" in capsys.readouterr().err
    assert not (tmp_path / "run").exists()


def test_ranks_on_a_machine_without_gpus() -> None:
    check_ranks("--tensor-parallel", 4, 0)  # on the CPU
    check_ranks("--tensor-parallel", 4, 4)
    with pytest.raises(ConfigError, match="--ranks 2 needs a GPU for each rank, and 0 can be used"):
        check_ranks("--ranks", 2, 0, on_gpus=True)
    with pytest.raises(ConfigError, match="1 can be used: leave --tensor-parallel out"):
        check_ranks("--tensor-parallel", 2, 1)


def test_messages_of_the_script_reach_512_mib() -> None:
    spec = collectives.registry.get("all_reduce")
    sizes = [c.dims["tokens"] * c.dims["hidden"] * 2 for c in collectives.cases(spec, 2, 512 << 20)]
    assert sizes[0] == 4 << 10 and sizes[-1] == 512 << 20
    assert (
        max(c.dims["tokens"] * c.dims["hidden"] * 2 for c in collectives.cases(spec, 2, 32 << 20)) == 32 << 20
    )
