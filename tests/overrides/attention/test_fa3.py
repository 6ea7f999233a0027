"""Loading FlashAttention-3 from vLLM's wheel without importing vLLM, and its attention sinks, with a fake package."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch

from fastkernels.core import registry
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


@pytest.mark.parametrize("op", ["attention_prefill", "attention_decode"])
def test_sinks_reach_flash_attention(op: str, monkeypatch: pytest.MonkeyPatch) -> None:
    given: dict[str, object] = {}

    def entry(*args: object, s_aux: object = None, **kwargs: object) -> None:
        given.update(kwargs, s_aux=s_aux)

    monkeypatch.setattr(fa3, "_has_sinks", fa3._has_sinks.__wrapped__)  # not cached
    monkeypatch.setattr(fa3, "supports_triton", lambda *_: None)  # which refuses bfloat16 on a CPU
    monkeypatch.setattr(fa3, "entry_point", lambda: (entry, True))
    monkeypatch.setattr(fa3, "_capability", lambda index: (9, 0))
    (provider,) = (p for p in registry.get(op).op.providers if p.name == "fa3")
    q, cache = torch.zeros(3, 8, 64).bfloat16(), torch.zeros(2, 16, 2, 64).bfloat16()
    numbers, sinks = torch.ones(4, dtype=torch.int32), torch.zeros(8).bfloat16()
    prefill = op == "attention_prefill"
    rest = [
        *([numbers] if prefill else []),
        numbers[:3],
        numbers[:3, None],
        *([3] if prefill else []),
        9,
        0.125,
        127,
    ]
    more = [0.0, 1.0, 1.0, *([True] if prefill else [])]
    args = [q, cache, cache, *rest, *more]
    assert provider.supports is not None and provider.supports(*args, sinks) is None
    for refused in (sinks.float(), sinks[:4], torch.zeros(16).bfloat16()[::2]):
        assert "needs contiguous bfloat16 sinks of 8 heads" in str(provider.supports(*args, sinks=refused))
    many = (torch.zeros(1, 79, 64).bfloat16(), *args[1:])
    assert "up to 64 heads, got 79" in str(provider.supports(*many, torch.zeros(79).bfloat16()))
    provider.fn(*args, sinks)
    assert given["s_aux"] is sinks and given["window_size"] == [127, 0]
    provider.fn(*args)
    assert given["s_aux"] is None
    library = SimpleNamespace(flash_attn_varlen_func=entry)
    for name, module in (("vllm", SimpleNamespace()), (MODULE, library)):
        monkeypatch.setitem(sys.modules, name, cast(Any, module))
    (baseline,) = (b for b in registry.baselines(op) if b.name == "fa3")  # the judge's, with the cases' sinks
    spec = registry.get(op)
    small = next(c for c in spec.cases if c.name == "sinks")
    bfloat16 = spec.inputs(replace(small, dtype="bfloat16"), "cpu", torch.Generator().manual_seed(0))
    at = [argument.name for argument in spec.arguments].index("sinks")
    wrong = [*bfloat16[:at], sinks.float(), *bfloat16[at + 1 :]]
    assert baseline.supports(*bfloat16) is None and "float32" in str(baseline.supports(*wrong))
    fn = baseline.make()
    fn(*bfloat16)
    assert given["s_aux"] is bfloat16[at] and bfloat16[at].dtype is torch.bfloat16
    fn(*args)
    assert given["s_aux"] is None
    monkeypatch.setattr(fa3, "entry_point", lambda: (lambda q, k, v: None, True))
    assert provider.supports(*args, None) is None
    assert provider.supports(*args, sinks) == "it has no attention sinks"
