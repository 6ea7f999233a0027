"""All ranks of a group run the choices that its first rank made."""

from __future__ import annotations

import json
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.multiprocessing as mp
from fk_integrations.core import ranks
from fk_integrations.core.adapter import Adapter
from fk_integrations.core.ranks import agree
from fk_integrations.patching import choose

from fastkernels.core import tuning
from fastkernels.core.tuning import Entry
from fastkernels.patch import Request


def test_a_process_alone_asks_itself() -> None:
    assert agree(None, lambda: "mine", 1.0) == "mine"


def _rank(rank: int, folder: str) -> None:
    torch.distributed.init_process_group(
        "gloo", f"file://{folder}/store", rank=rank, world_size=2, timeout=timedelta(seconds=120)
    )
    group = torch.distributed.group.WORLD
    found: list[Any] = [
        agree(group, lambda: f"choice of {rank} \u00b5", 20.0),
        agree(group, lambda: "", 20.0),
    ]

    def fail() -> str:
        raise ValueError("no kernel")

    def slow() -> str:
        time.sleep(0.5)
        return "slow"

    def late() -> str:
        _wait_for_file(folder, 1)
        return "late"

    for make, seconds, margin in ((fail, 20.0, 10.0), (slow, 0.4, 10.0), (late, 2.0, 0.5)):
        ranks.MARGIN = margin
        try:
            found.append(agree(group, make, seconds))
        except (RuntimeError, ValueError) as error:
            found.append(f"{type(error).__name__}: {error}")
    Path(folder, f"{rank}.new").write_text("\n".join(found))
    Path(folder, f"{rank}.new").rename(Path(folder, f"{rank}.txt"))


def _wait_for_file(folder: str, rank: int) -> None:
    """Wait until that rank has written what it found."""
    until = time.monotonic() + 60
    while not Path(folder, f"{rank}.txt").exists() and time.monotonic() < until:
        time.sleep(0.01)


def _patching_rank(rank: int, folder: str) -> None:
    """A rank that would make a choice of its own."""
    torch.distributed.init_process_group("gloo", f"file://{folder}/store", rank=rank, world_size=2)
    shape = {"N": 8, "K": 16, "dtype": "float32"}
    entry = Entry("linear", shape, {"M": 1}, f"of {rank}", "usual", "r1", {}, 1.3, (1.2, 1.4))
    own = {
        "entries": [json.loads(entry.to_json())],
        "lines": {"linear": [f"line {rank}"]},
        "seconds": {"time": rank},
    }

    class Host(Adapter):
        def ranks(self) -> Any:
            return torch.distributed.group.WORLD

    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("FASTKERNELS_VERIFY", "1")
        patch.setattr(choose, "points_of", lambda *args: [])
        patch.setattr(choose, "_choices", lambda *args: json.dumps(own))
        found = choose.verify(Host(), None, Request("patch"), torch.device("cpu"))
    said = [found.measured, found.seconds["time"], tuning.choices()]
    Path(folder, f"{rank}.txt").write_text(json.dumps(said))
    torch.distributed.barrier()


def test_all_ranks_use_the_choices_of_the_first(tmp_path: Path) -> None:
    mp.spawn(_patching_rank, (str(tmp_path),), nprocs=2)
    first, second = ((tmp_path / f"{rank}.txt").read_text() for rank in range(2))
    assert first == second and '{"linear": ["line 0"]}, 0' in first and "of 0" in first


def test_two_ranks_never_disagree(tmp_path: Path) -> None:
    context = mp.get_context("spawn")
    workers = [context.Process(target=_rank, args=(rank, str(tmp_path))) for rank in range(2)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join(120)
    first, second = ((tmp_path / f"{rank}.txt").read_text().split("\n") for rank in range(2))
    assert first[:2] == second[:2] == ["choice of 0 \u00b5", ""]
    assert first[2] == "ValueError: no kernel"
    assert second[2] == "RuntimeError: rank 0, which measures for its group of 2, failed"
    late = "RuntimeError: rank 0, which measures for its group of 2, sent nothing in"
    assert first[3].startswith(f"{late} 0 s: it took") and second[3] == second[2]  # in time for a refusal
    assert first[4].startswith(f"{late} 2 s: it took") and second[4].startswith(f"{late} 2 s: ")  # too late
