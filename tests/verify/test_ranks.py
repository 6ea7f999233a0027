"""All ranks of a group run the choices that its first rank made."""

from __future__ import annotations

import time
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.multiprocessing as mp
from fk_integrations.verify.ranks import agree


def test_a_process_alone_asks_itself() -> None:
    assert agree(None, lambda: "mine", 1.0) == "mine"


def _rank(rank: int, folder: str) -> None:
    torch.distributed.init_process_group(
        "gloo", f"file://{folder}/store", rank=rank, world_size=2, timeout=timedelta(seconds=30)
    )
    group = torch.distributed.group.WORLD
    found: list[Any] = [
        agree(group, lambda: f"choice of {rank} \u00b5", 20.0),
        agree(group, lambda: "", 20.0),
    ]

    def fail() -> str:
        raise ValueError("no kernel")

    def late() -> str:
        time.sleep(2.0)
        return "late"

    for make, seconds in ((fail, 20.0), (late, 0.3)):
        try:
            found.append(agree(group, make, seconds if rank else 20.0))
        except (RuntimeError, ValueError) as error:
            found.append(f"{type(error).__name__}: {error}")
    Path(folder, f"{rank}.txt").write_text("\n".join(found))
    time.sleep(2.5 if rank else 0)  # the peer's last message arrives


def test_two_ranks_never_disagree(tmp_path: Path) -> None:
    context = mp.get_context("spawn")
    workers = [context.Process(target=_rank, args=(rank, str(tmp_path))) for rank in range(2)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join(60)
    first, second = ((tmp_path / f"{rank}.txt").read_text().split("\n") for rank in range(2))
    assert first[:2] == second[:2] == ["choice of 0 \u00b5", ""]
    assert first[2] == "ValueError: no kernel"
    assert second[2] == "RuntimeError: rank 0, which measures for its group of 2, failed"
    assert second[3].startswith(
        "RuntimeError: rank 0, which measures for its group of 2, sent nothing in 0 s"
    )
