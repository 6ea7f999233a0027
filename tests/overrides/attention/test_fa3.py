"""Loading FlashAttention-3 from vLLM's wheel without importing vLLM, with a package of the same layout."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from fastkernels.overrides.attention import fa3

MODULE = "vllm.vllm_flash_attn"
ENTRIES = """
try:
    from . import _vllm_fa3_C
    FA3_UNAVAILABLE_REASON, FA3_AVAILABLE = None, True
except ImportError as error:
    FA3_UNAVAILABLE_REASON, FA3_AVAILABLE = str(error), False

def flash_attn_varlen_func():
    return _vllm_fa3_C.KERNEL
"""


@pytest.fixture()
def wheel(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The folder of vllm_flash_attn."""
    before = set(sys.modules)
    if "vllm" in before:
        pytest.skip("vLLM is imported here")
    folder = tmp_path / "vllm" / "vllm_flash_attn"
    folder.mkdir(parents=True)
    (tmp_path / "vllm" / "__init__.py").write_text("SLOW = True\n")
    (folder / "__init__.py").write_text("from vllm.vllm_flash_attn.flash_attn_interface import *\n")
    (folder / "flash_attn_interface.py").write_text(ENTRIES)
    (folder / "_vllm_fa3_C.py").write_text("KERNEL = 'fa3'\n")
    monkeypatch.syspath_prepend(tmp_path)
    yield folder
    for name in set(sys.modules) - before:
        if name.partition(".")[0] in ("vllm", fa3.PACKAGE):
            del sys.modules[name]


def test_load_does_not_import_vllm(wheel: Path) -> None:
    assert fa3.load(MODULE).flash_attn_varlen_func() == "fa3"
    assert "vllm" not in sys.modules
    import vllm.vllm_flash_attn as host  # as a later host does

    assert host.flash_attn_varlen_func() == "fa3" and sys.modules["vllm"].SLOW


def test_load_uses_an_imported_vllm(wheel: Path) -> None:
    import vllm.vllm_flash_attn as host

    assert fa3.load(MODULE) is host and fa3.PACKAGE not in sys.modules


def test_load_imports_vllm_if_the_entries_need_it(wheel: Path) -> None:
    (wheel / "flash_attn_interface.py").write_text(
        f"from vllm import SLOW\nassert not __name__.startswith('_fast')\n{ENTRIES}"
    )
    assert fa3.load(MODULE).__name__ == MODULE and "vllm" in sys.modules


def test_missing_kernels_raise_import_error(wheel: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (wheel / "_vllm_fa3_C.py").unlink()
    (wheel / "__init__.py").write_text("raise ImportError('needs the CUDA extensions')\n")
    with pytest.raises(ImportError, match="CUDA extensions"):
        fa3.load(MODULE)
    with pytest.raises(ImportError):
        fa3.load("no_such_vllm.vllm_flash_attn")
