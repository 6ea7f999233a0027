"""Candidates that change settings of torch for all code of the process."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from fastkernels.core import candidate, settings
from fastkernels.overrides.activation.silu_and_mul import silu_and_mul

CHANGES = {
    "torch.set_default_dtype(torch.float64)": "get_default_dtype() from torch.float32 to torch.float64",
    "torch.set_grad_enabled(False)": "is_grad_enabled() from True to False",
    "torch.set_float32_matmul_precision('high')": "get_float32_matmul_precision() from highest to high",
    "torch.backends.cuda.matmul.allow_tf32 = True": "cuda.matmul.fp32_precision",
    "torch.backends.cuda.matmul.fp32_precision = 'tf32'": "cuda.matmul.fp32_precision from none to tf32",
    "torch.backends.fp32_precision = 'tf32'": "torch.backends.fp32_precision from none to tf32",
    "torch.backends.cudnn.fp32_precision = 'ieee'": "cudnn.fp32_precision from none to ieee",
    "torch.backends.cudnn.benchmark = True": "cudnn.benchmark from False to True",
    "torch.set_flush_denormal(True)": "set_flush_denormal",
    "torch.use_deterministic_algorithms(True)": "get_deterministic_debug_mode() from 0 to 2",
    "torch.set_default_device('meta')": "get_default_device() from cpu to meta",
    "torch.manual_seed(7)": "initial_seed()",
    "torch.set_num_threads(torch.get_num_threads() + 1)": "get_num_threads()",
    "torch.set_autocast_enabled('cpu', True)": "is_autocast_enabled('cpu') from False to True",
}
CANDIDATE = """
import torch
{at_import}

def silu_and_mul(x):
    {in_call}
    d = x.shape[-1] // 2
    return torch.nn.functional.silu(x[..., :d]) * x[..., d:]
"""


@pytest.mark.parametrize("change", CHANGES)
def test_setting_that_an_import_changes_is_restored(
    change: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    before, file = settings.now(), tmp_path / "silu_and_mul.py"
    file.write_text(CANDIDATE.format(at_import=change, in_call="pass"))
    assert candidate.load("silu_and_mul", str(file)).function is not None
    assert CHANGES[change] in caplog.text and "restored" in caplog.text and not settings.changed(before)


def test_import_that_fails_leaves_no_setting_changed(tmp_path: Path) -> None:
    before, file = settings.now(), tmp_path / "silu_and_mul.py"
    file.write_text(
        CANDIDATE.format(at_import="torch.set_grad_enabled(False); import nowhere", in_call="pass")
    )
    with pytest.raises(candidate.CandidateError, match="does not import"):
        candidate.load("silu_and_mul", str(file))
    assert not settings.changed(before)


@pytest.mark.parametrize(
    "change", ["torch.backends.fp32_precision = 'tf32'", "torch.set_grad_enabled(False)"]
)
@pytest.mark.parametrize("own", ["cuda.matmul.fp32_precision = 'tf32'", "fp32_precision = 'tf32'"])
def test_process_with_precisions_of_backends_is_left_so(own: str, change: str, tmp_path: Path) -> None:
    """torch then raises for the older name of the precision."""
    outer, file = settings.now(), tmp_path / "silu_and_mul.py"
    change += "; torch.set_float32_matmul_precision('medium')"
    file.write_text(CANDIDATE.format(at_import=change, in_call="pass"))
    try:
        exec(f"torch.backends.{own}")
        before = settings.now()
        assert candidate.load("silu_and_mul", str(file)).function is not None and not settings.changed(before)
    finally:
        settings.restore(outer)
    assert not settings.changed(outer)


def test_seed_is_restored_with_the_numbers_behind_it(tmp_path: Path) -> None:
    file = tmp_path / "silu_and_mul.py"
    file.write_text(CANDIDATE.format(at_import="torch.manual_seed(5)", in_call="pass"))
    with torch.random.fork_rng([]):
        torch.manual_seed(3)
        wanted = torch.rand(2, 4)
        torch.manual_seed(3)
        first = torch.rand(4)
        candidate.load("silu_and_mul", str(file))
        assert torch.equal(torch.stack([first, torch.rand(4)]), wanted)


def test_call_that_fails_leaves_no_setting_changed(tmp_path: Path) -> None:
    before, file = settings.now(), tmp_path / "silu_and_mul.py"
    file.write_text(CANDIDATE.format(at_import="", in_call="torch.set_grad_enabled(False); x.nothing"))
    found = candidate.load("silu_and_mul", str(file))
    with pytest.raises(AttributeError, match="nothing"):
        candidate.checked(found.function, silu_and_mul, "mine.py")(torch.randn(2, 8))
    assert not settings.changed(before)


def test_call_that_changes_a_setting_is_refused_and_undone(tmp_path: Path) -> None:
    before, file = settings.now(), tmp_path / "silu_and_mul.py"
    file.write_text(CANDIDATE.format(at_import="", in_call="torch.set_default_dtype(torch.float64)"))
    found = candidate.load("silu_and_mul", str(file))
    run = candidate.checked(found.function, silu_and_mul, "mine.py")
    with pytest.raises(candidate.WrongOutput, match=r"candidate mine\.py: a call of silu_and_mul changes"):
        run(torch.randn(2, 8))
    assert not settings.changed(before)


def test_setting_that_a_call_restores_is_accepted(tmp_path: Path) -> None:
    file = tmp_path / "silu_and_mul.py"
    lines = "with torch.autocast('cpu', enabled=True), torch.no_grad(): torch.ones(1)"
    file.write_text(CANDIDATE.format(at_import="", in_call=lines))
    found = candidate.load("silu_and_mul", str(file))
    x = torch.randn(2, 8)
    run = candidate.checked(found.function, silu_and_mul, "mine.py")
    assert torch.allclose(run(x), silu_and_mul(x))
