"""Importing an old path fails with a message that names the new place."""

from __future__ import annotations

import importlib
import importlib.util
import subprocess
import sys

import pytest

from fastkernels.core import registry
from fastkernels.core.moved import MOVED, Moved, install


@pytest.mark.parametrize("old", sorted(MOVED))
def test_old_path_names_a_place_that_exists(old: str) -> None:
    assert importlib.util.find_spec(MOVED[old]) is not None, MOVED[old]
    with pytest.raises(ModuleNotFoundError) as caught:
        importlib.import_module(old)
    assert str(caught.value) == f"{old} moved to {MOVED[old]}"


@pytest.mark.parametrize(
    ("level", "op"),
    [("l1", "rms_norm"), ("l1", "linear"), ("l2", "gated_mlp"), ("l3", "llama_decoder_layer")],
)
def test_op_of_a_level_names_its_family(level: str, op: str) -> None:
    old, new = f"fastkernels.overrides.{level}.{op}", registry.op_modules()[op]
    with pytest.raises(ModuleNotFoundError, match=f"^{old} moved to {new}$"):
        importlib.import_module(old)


@pytest.mark.parametrize(
    ("statement", "message"),
    [
        ("import fastkernels.dispatch", "fastkernels.dispatch moved to fastkernels.core.dispatch"),
        ("from fastkernels import dispatch", "fastkernels.dispatch moved to fastkernels.core.dispatch"),
        ("from fastkernels.spec import OpSpec", "fastkernels.spec moved to fastkernels.core.spec"),
        ("from fastkernels.overrides.l1 import rms_norm", "moved to its family's folder"),
        ("import fastkernels.overrides.l2._moe_tiles", "moved to its family's folder"),
        ("from fastkernels.tuned import lookup", "fastkernels.tuned.lookup moved to fastkernels.core.tuning"),
        ("import fastkernels.nothing", "No module named 'fastkernels.nothing'"),
        ("import fastkernels.overrides.norm.nothing", "No module named 'fastkernels.overrides.norm.nothing'"),
    ],
)
def test_import_statement_fails_with_the_new_place(statement: str, message: str) -> None:
    with pytest.raises(ImportError) as caught:
        exec(statement)
    assert message in str(caught.value)


def test_finder_is_last_and_installed_once() -> None:
    code = "import sys; before = len(sys.meta_path); import fastkernels; print(len(sys.meta_path) - before)\n"
    code += "from fastkernels.core.moved import install; install(); print(type(sys.meta_path[-1]).__name__)"
    shown = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert shown.split() == ["1", "Moved"]
    before = list(sys.meta_path)
    install()
    assert sys.meta_path == before


def test_finder_ignores_other_packages() -> None:
    assert Moved().find_spec("other.dispatch") is None
    assert importlib.util.find_spec("fastkernels.nothing") is None
