"""Items in real libraries on the CPU, each in a process of its own: check_libraries.py."""

from __future__ import annotations

import importlib
import os
import subprocess
import sys
from pathlib import Path

import pytest
from fk_bench.evaluate.reasons import Reason
from fk_bench.evaluate.run.hosts.libraries import MODELS
from fk_bench.evaluate.run.side import Launcher, SideFailed
from fk_bench.evaluate.suites import HOSTS, LIBRARIES

ROOT = Path(__file__).resolve().parents[3]
CHECK = Path(__file__).parent / "check_libraries.py"


def test_libraries_of_suites_are_those_that_open() -> None:
    assert {name: host for name, (host, _) in MODELS.items()} == LIBRARIES
    assert all(HOSTS[host] == ("requests",) for host in LIBRARIES.values())


def test_host_that_is_not_installed_is_named() -> None:
    if importlib.util.find_spec("torchrec") is not None:
        pytest.skip("torchrec is installed")
    with (
        Launcher({}, 1 << 30) as launcher,
        pytest.raises(SideFailed, match="give --python torchrec=PATH") as error,
    ):
        launcher.spawn("torchrec", (), 10.0)
    assert error.value.reason is Reason.IMPORT


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("library", ["recommender", "ultralytics", "openfold3", "fla"])
def test_items_in_libraries(library: str) -> None:
    packages = importlib.import_module(f"support.{library}_library").library_path()
    kept = {k: v for k, v in os.environ.items() if not k.startswith(("FASTKERNELS", "PYTEST"))}
    path = [str(ROOT / "tests"), str(CHECK.parent), str(packages), kept.get("PYTHONPATH")]
    kept |= {"PYTHONPATH": os.pathsep.join(filter(None, path)), "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    options = ["-k", "fla" if library == "fla" else "library"]
    if library == "fla":
        kept["TRITON_INTERPRET"] = "1"
        options += ["-p", "integrations.fla.conftest"]
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", *options, str(CHECK)]
    done = subprocess.run(command, cwd=ROOT, env=kept, capture_output=True, text=True, timeout=800)
    assert done.returncode == 0, done.stdout[-8000:] + done.stderr[-2000:]
    assert " passed" in done.stdout, done.stdout
