"""Several runs of the judge on the same processes, as an evaluation of sets makes them; few cases; the probe."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from fk_bench.core.rows import Status
from fk_bench.kernels import report
from fk_bench.kernels.judge import Options, judge_ops
from fk_bench.kernels.judge.correctness.cases import SOURCES, trials
from fk_bench.kernels.judge.processes.sides import Sides
from fk_bench.kernels.judge.rows.judging import sides_of

from fastkernels.core import registry

RIGHT = "import torch\ndef relu2(x):\n    return torch.relu(x).square()\n"
WRONG = "import torch\ndef relu2(x):\n    return torch.relu(x)\n"


def test_runs_share_our_processes_but_no_candidate(tmp_path: Path, monkeypatch: Any, capsys: Any) -> None:
    started: list[str] = []
    spawn = Sides.spawn
    monkeypatch.setattr(
        Sides, "spawn", lambda self, who, files=(): started.append(who) or spawn(self, who, files)
    )
    options = Options(cases=("random",), names=("odd_63",), timed=False, hard=0, deployment=True)
    found = []
    with sides_of(options) as sides:
        for number, text in enumerate((WRONG, RIGHT)):
            file = tmp_path / str(number) / "relu2.py"
            file.parent.mkdir()
            file.write_text(text)
            found.append(judge_ops(["relu2"], {"relu2": file}, options, sides=sides))
    assert Counter(started) == {"candidate": 2, "baseline": 1}
    wrong, right = ({r.kind: r for r in rows} for rows in found)
    assert wrong["case"].status is Status.WRONG and right["case"].status is Status.OK
    said = right["op"].case["deployment"]
    assert "no kernel of the candidate" in said["deployed"] and said["serving"] == ""
    assert "start" not in wrong["op"].case["seconds"] and right["op"].case["seconds"]["wait: deployment"] > 0
    report.show_phases(found[1])
    assert "wait: deployment" in capsys.readouterr().out


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_most_limits_each_source_models_first(device: str) -> None:
    spec = registry.get("rms_norm")
    every, few = (trials(spec, SOURCES, device, most=most) for most in (0, 3))
    counts, all_counts = (Counter(t.source for t in found) for found in (few, every))
    assert counts == {source: min(n, 3) for source, n in all_counts.items()} and len(counts) == len(SOURCES)
    own = [t for t in few if t.source == "random"]
    here = [t for t in every if device == "cuda" or not (t.large or t.gpu_only(spec))]
    models = [t.case.name for t in here if t.source == "random" and "model" in t.case.tags]
    assert [t.case.name for t in own][: len(models)] == models[:3]
