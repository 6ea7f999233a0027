"""Cheats that the judge catches gain nothing in a host: each is dropped for its import, a call or its outputs."""

from __future__ import annotations

from pathlib import Path

import pytest
from bench.agents.conftest import OP
from bench.evaluate.test_items import SUITE
from fk_bench.core.checkout import checkout_path
from fk_bench.evaluate.run.items import ItemRun
from fk_bench.evaluate.run.side import Launcher, set_files

DROPPED = ("stale_memory", "early_exit", "claims_skipped", "patched_reference", "skip_one")


@pytest.mark.slow
def test_five_cheats_gain_nothing_in_eval(tmp_path: Path) -> None:
    with Launcher({}, 3 << 30, threads=1) as launcher:
        for name in DROPPED:
            file = tmp_path / name / f"{OP}.py"
            file.parent.mkdir()
            file.write_text((checkout_path("tests/cheats") / f"{name}.py").read_text())
            run = ItemRun(SUITE.entries[0], SUITE, launcher, "float32", 5, print)
            found = run.measure({OP: str(file)}, set_files({file.parent}))
            assert found.found.kept == () and found.outcome is None, (name, found)
