"""A user's kernel: what a candidate file may offer, and what is said about one that cannot be used."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from fastkernels import candidate, registry
from fastkernels.candidate import CandidateError
from fastkernels.registry import UnknownName

FUNCTION = "def silu_and_mul(x):\n    d = x.shape[-1] // 2\n    return x[..., :d] + x[..., d:]\n"
CLASS = "from torch import nn\n\n\nclass VllmSiluAndMul(nn.Module):\n    def forward(self, x):\n        return x\n"


@pytest.fixture
def write(tmp_path: Path) -> Callable[[str], str]:
    def _write(text: str) -> str:
        path = tmp_path / "mine.py"
        path.write_text(text)
        return str(path)

    return _write


@pytest.mark.parametrize(
    ("text", "kind"), [(FUNCTION, "function"), (CLASS, "class"), (FUNCTION + CLASS, "function+class")]
)
def test_what_a_file_offers(write: Callable[[str], str], text: str, kind: str) -> None:
    found = candidate.load("silu_and_mul", write(text))
    assert found.kind == kind and found.op == "silu_and_mul"
    assert set(found.classes) == ({"VllmSiluAndMul"} if "class" in kind else set())


def test_a_function_runs_in_the_op_and_in_every_module(write: Callable[[str], str]) -> None:
    op, module = registry.get("silu_and_mul").op, registry.op_module("silu_and_mul")
    x = torch.randn(3, 8)
    before = op(x)
    found = candidate.load("silu_and_mul", write(FUNCTION))
    op.set_candidate(found.function)
    try:
        assert torch.equal(op(x), x[:, :4] + x[:, 4:])
        assert torch.equal(module.SGLangSiluAndMul()(x), x[:, :4] + x[:, 4:])
    finally:
        op.set_candidate(None)
    assert torch.equal(op(x), before)


def test_the_same_file_is_loaded_once_and_a_changed_one_again(write: Callable[[str], str]) -> None:
    first = candidate.load("silu_and_mul", write(FUNCTION))
    assert candidate.load("silu_and_mul", write(FUNCTION)).function is first.function
    changed = candidate.load("silu_and_mul", write(FUNCTION.replace("+ x", "- x")))
    assert changed.function is not first.function


def test_errors_say_what_is_wrong(write: Callable[[str], str]) -> None:
    with pytest.raises(UnknownName, match="unknown op 'silu'"):
        candidate.load("silu", write(FUNCTION))
    with pytest.raises(CandidateError, match=r"there is no file /no/such\.py"):
        candidate.load("silu_and_mul", "/no/such.py")
    with pytest.raises(CandidateError, match="does not import: ZeroDivisionError"):
        candidate.load("silu_and_mul", write("1 / 0\n"))
    with pytest.raises(CandidateError, match="does not import: SyntaxError"):
        candidate.load("silu_and_mul", write("def f(:\n"))
    with pytest.raises(
        CandidateError, match=r"neither a function silu_and_mul\(...\) nor a class .*VllmSiluAndMul"
    ):
        candidate.load("silu_and_mul", write("silu = 1\n"))
    with pytest.raises(CandidateError, match="silu_and_mul is int, not a function"):
        candidate.load("silu_and_mul", write("silu_and_mul = 1\n"))
