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
    "torch.backends.cuda.matmul.fp32_precision = 'tf32'": "matmul_precision() from highest to unreadable",
    "torch.backends.cudnn.allow_tf32 = False": "cudnn.rnn.fp32_precision from tf32 to none",
    "torch.backends.fp32_precision = 'ieee'": "backends.fp32_precision from none to ieee",
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


def test_setting_that_a_failed_import_changes_is_restored(tmp_path: Path) -> None:
    before, file = settings.now(), tmp_path / "silu_and_mul.py"
    file.write_text("import torch\ntorch.set_default_dtype(torch.float64)\nraise OSError('no file')\n")
    with pytest.raises(candidate.CandidateError, match="does not import"):
        candidate.load("silu_and_mul", str(file))
    assert not settings.changed(before)


def test_random_numbers_go_on_after_an_import_with_a_seed(tmp_path: Path) -> None:
    (tmp_path / "silu_and_mul.py").write_text(
        CANDIDATE.format(at_import="torch.manual_seed(7)", in_call="pass")
    )
    torch.manual_seed(3)
    first, second = torch.rand(4), torch.rand(4)
    torch.manual_seed(3)
    assert torch.equal(torch.rand(4), first)
    candidate.load("silu_and_mul", str(tmp_path / "silu_and_mul.py"))
    assert torch.equal(torch.rand(4), second)


def test_precisions_of_older_functions_stay_readable() -> None:
    before = settings.now()
    torch.backends.cudnn.allow_tf32 = not before["torch.backends.cudnn.allow_tf32"]
    settings.restore(before)
    assert torch.backends.cudnn.allow_tf32 == before["torch.backends.cudnn.allow_tf32"]


def test_candidate_loads_while_a_setting_is_unreadable(tmp_path: Path) -> None:
    """A host that sets precisions with the newer functions of torch, as torch recommends."""
    before = settings.now()
    (tmp_path / "silu_and_mul.py").write_text(CANDIDATE.format(at_import="", in_call="pass"))
    try:
        torch.backends.cuda.matmul.fp32_precision = "tf32"
        found = candidate.load("silu_and_mul", str(tmp_path / "silu_and_mul.py"))
        run = candidate.checked(found.function, silu_and_mul, "mine.py")
        assert run(torch.randn(2, 8)).shape == (2, 4)
        assert torch.backends.cuda.matmul.fp32_precision == "tf32"
    finally:
        settings.restore(before)


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
