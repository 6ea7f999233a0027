"""Files that are found by a path relative to the code: a moved file must not turn into an empty result."""

from __future__ import annotations

from pathlib import Path

import pytest
from fk_bench.capture import captures, command
from fk_bench.core.checkout import REPO_ROOT, checkout_path
from fk_bench.kernels.cheats import CHEATS, catalogue
from fk_bench.offline.host import OFFLINE
from jinja2 import PackageLoader

from fastkernels.core import registry, tuning


def test_checkout_root_is_the_repository() -> None:
    assert (REPO_ROOT / "pyproject.toml").is_file() and (REPO_ROOT / "bench" / "fk_bench").is_dir()


def test_missing_checkout_path_is_named() -> None:
    with pytest.raises(FileNotFoundError, match=r"tests/nothing is in a checkout of FastKernels"):
        checkout_path("tests/nothing")


def test_cheats_are_found() -> None:
    assert len(catalogue()) >= 30 and list(checkout_path(CHEATS).glob("honest/*.py"))


def test_shipped_captures_are_found() -> None:
    assert {p.name for p in captures.folders()} >= {"smollm2-135m-chat", "small-moe-trained-e8k2"}


def test_templates_are_found() -> None:
    assert {"base.html", "kernels.html", "report.html"} <= set(
        PackageLoader("fk_bench.core").list_templates()
    )


@pytest.mark.parametrize("script", [OFFLINE, command.HOST_PROCESS], ids=lambda p: p.name)
def test_scripts_of_host_processes_are_found(script: Path) -> None:
    assert "def main" in script.read_text()


def test_tuned_tables_are_found() -> None:
    entries = [e for p in tuning.SHIPPED.glob("*.json") for e in tuning.read(p).entries]
    assert len(entries) > 50


def test_ops_are_found() -> None:
    assert len(registry.op_modules()) >= 37 and (registry.OPS_ROOT / "norm" / "rms_norm.py").is_file()


@pytest.mark.parametrize("host", ["vllm", "sglang", "transformers", "diffusers", "timm"])
def test_signatures_are_found(host: str) -> None:
    assert list(checkout_path(f"integrations/fk_integrations/{host}/signatures").glob("*.json"))
