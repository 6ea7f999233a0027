"""Candidate files: functions, classes, folders, and errors for unusable files."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from fastkernels.core import candidate, registry
from fastkernels.core.candidate import CandidateError
from fastkernels.core.env import Environment
from fastkernels.core.registry import UnknownName

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
def test_file_offers_function_class_or_both(write: Callable[[str], str], text: str, kind: str) -> None:
    found = candidate.load("silu_and_mul", write(text))
    assert found.kind == kind and found.op == "silu_and_mul"
    assert set(found.classes) == ({"VllmSiluAndMul"} if "class" in kind else set())


def test_function_runs_in_the_op_and_in_modules(write: Callable[[str], str]) -> None:
    op, cls = registry.get("silu_and_mul").op, registry.op_class("silu_and_mul", "SGLangSiluAndMul")
    x = torch.randn(3, 8)
    before = op(x)
    found = candidate.load("silu_and_mul", write(FUNCTION))
    op.set_candidate(found.function)
    try:
        assert torch.equal(op(x), x[:, :4] + x[:, 4:])
        assert torch.equal(cls()(x), x[:, :4] + x[:, 4:])
    finally:
        op.set_candidate(None)
    assert torch.equal(op(x), before)


def test_file_is_loaded_again_only_when_changed(write: Callable[[str], str]) -> None:
    first = candidate.load("silu_and_mul", write(FUNCTION))
    assert candidate.load("silu_and_mul", write(FUNCTION)).function is first.function
    changed = candidate.load("silu_and_mul", write(FUNCTION.replace("+ x", "- x")))
    assert changed.function is not first.function


def test_unusable_file_error_gives_the_cause(write: Callable[[str], str]) -> None:
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
    with pytest.raises(CandidateError, match="host's SiluAndMul, name it SGLangSiluAndMul or VllmS"):
        candidate.load("silu_and_mul", write("class SiluAndMul:\n    pass\n"))
    with pytest.raises(CandidateError, match="silu_and_mul is int, not a function"):
        candidate.load("silu_and_mul", write("silu_and_mul = 1\n"))


@pytest.mark.parametrize(
    ("body", "says"),
    [
        ("pass", r"has no method forward\(self, x"),
        ("forward = 3", r"has no method forward\(self, x"),
        ("def forward(self): return 1", r"cannot be called as forward\(self, x"),
        ("def forward(self, x, y): return x", r"cannot be called as forward\(self, x.*: .*y"),
    ],
)
def test_class_without_a_usable_forward_is_refused(write: Callable[[str], str], body: str, says: str) -> None:
    text = "from torch import nn\n\nclass VllmSiluAndMul(nn.Module):\n    "
    with pytest.raises(candidate.NothingOffered, match=f"VllmSiluAndMul {says}"):
        candidate.load("silu_and_mul", write(text + body))
    for usable in (
        "def forward(self, *args, **kwargs): return args[0]",
        "@staticmethod\n    def forward(x): return x",
        "from functools import partialmethod\n    forward = partialmethod(lambda self, scale, x: x, 2)",
    ):
        candidate.load("silu_and_mul", write(text + usable))


@pytest.mark.parametrize(
    "body",
    [
        "@staticmethod\n    def forward(x): return x",
        "@classmethod\n    def forward(cls, x): return x",
        "forward = functools.partial(nn.functional.silu)",
        "forward = nn.SiLU()",
    ],
)
def test_forward_without_self_is_accepted(write: Callable[[str], str], body: str) -> None:
    text = f"import functools\nfrom torch import nn\n\nclass VllmSiluAndMul(nn.Module):\n    {body}"
    assert candidate.load("silu_and_mul", write(text)).kind == "class"


def test_folder_is_a_set_of_candidates(tmp_path: Path) -> None:
    for name in ("silu_and_mul", "rms_norm"):
        (tmp_path / f"{name}.py").write_text("1 / 0\n")  # nothing is imported
    (tmp_path / "_shared.py").write_text("")
    (tmp_path / "notes.txt").write_text("")
    found = candidate.from_directory(tmp_path)
    assert found == {n: str(tmp_path / f"{n}.py") for n in ("rms_norm", "silu_and_mul")}
    assert candidate.resolve(str(tmp_path)) == candidate.resolve(tmp_path) == found
    file = tmp_path / "rms_norm.py"
    assert candidate.resolve({"rms_norm": file}) == {"rms_norm": str(file)}
    for path, says in (
        (tmp_path / "any.py", "there is no file"),
        (tmp_path, "there is no file"),
        ("~no-such-user/any.py", "there is no file"),
        ("def rms_norm(x):\n" * 99, "there is no file def rms_norm"),
        (None, "expected the path"),
    ):
        with pytest.raises(CandidateError, match=f"candidate for rms_norm: .*{says}"):
            candidate.resolve({"rms_norm": path})
    assert candidate.resolve(None) == {}
    with pytest.raises(UnknownName, match="unknown op 'rmsnorm'"):
        candidate.resolve({"rmsnorm": "any.py"})


def test_invalid_folder_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(CandidateError, match=r"there is no folder .*nowhere"):
        candidate.from_directory(tmp_path / "nowhere")
    with pytest.raises(CandidateError, match="there is no folder ''"):
        candidate.from_directory("")  # which would be the current one
    for text in ("~no-such-user", "def rms_norm(x):\n" * 99):
        assert candidate.named_in(text) == []
        with pytest.raises(CandidateError, match=f"there is no folder {re.escape(text[:16])}"):
            candidate.from_directory(text)
    with pytest.raises(CandidateError, match=r"is a file; give a folder of files OP\.py, or \{op: file\}"):
        candidate.from_directory(__file__)
    with pytest.raises(CandidateError, match=r"has no file OP\.py"):
        candidate.from_directory(tmp_path)
    (tmp_path / "silu_and_mul.py").write_text(FUNCTION)
    (tmp_path / "rmsnorm.py").write_text("")
    (tmp_path / "zzz.py").write_text("")
    with pytest.raises(
        CandidateError, match=r"rmsnorm\.py \(did you mean rms_norm\.py\?\), zzz\.py\. Rename"
    ):
        candidate.from_directory(tmp_path)


def test_environment_names_a_folder(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"FASTKERNELS_CANDIDATES: .*no file OP\.py.*or OP=FILE"):
        Environment.read({"FASTKERNELS_CANDIDATES": str(tmp_path)})
    (tmp_path / "silu_and_mul.py").write_text(FUNCTION)
    folder = Environment.read({"FASTKERNELS_CANDIDATES": f" {tmp_path} "}).candidates
    pairs = Environment.read(
        {"FASTKERNELS_CANDIDATES": f"silu_and_mul={tmp_path / 'silu_and_mul.py'}"}
    ).candidates
    assert folder == pairs == {"silu_and_mul": str(tmp_path / "silu_and_mul.py")}


def test_class_of_a_candidate_calls_its_function_through_the_op(write: Callable[[str], str]) -> None:
    op, x = registry.get("silu_and_mul").op, torch.randn(3, 8)
    before = op(x)
    text = FUNCTION + CLASS.replace("return x\n", "return silu_and_mul(x=x)\n")
    found = candidate.load("silu_and_mul", write(text))
    made = found.classes["VllmSiluAndMul"]()
    undo: list[Callable[[], None]] = []
    assert candidate.install(found, undo.append)
    again = candidate.load("silu_and_mul", found.path)
    assert candidate.install(again, undo.append)  # of another engine, say
    assert again.function is found.function
    try:
        calls = op.calls
        assert torch.equal(made(x), x[:, :4] + x[:, 4:]) and op.calls == calls + 1
        undo.pop()()
        assert torch.equal(op(x), x[:, :4] + x[:, 4:]) and torch.equal(made(x), op(x))
    finally:
        undo.pop()()
    calls = op.calls
    assert torch.equal(op(x), before) and torch.equal(made(x), x[:, :4] + x[:, 4:]) and op.calls == calls + 1
    assert not candidate.install(candidate.load("silu_and_mul", write(CLASS)), undo.append) and undo == []


ROUTING = "import torch\n\n\ndef topk_softmax(gating_output, topk, renormalize=False):\n"
ROUTING += "    weights, ids = gating_output.softmax(-1).topk(topk)\n"
ROUTING += "    return 3 * weights, ids.int(), ids.int()\n"


def test_older_function_runs_without_a_new_argument(write: Callable[[str], str]) -> None:
    op, logits, scales = registry.get("topk_softmax").op, torch.randn(5, 8), torch.rand(8)
    ours, scaled, kept = op(logits, 2)[0], op(logits, 2, True, scales)[0], dict(op.fallbacks)
    undo: list[Callable[[], None]] = []
    assert candidate.install(candidate.load("topk_softmax", write(ROUTING)), undo.append)
    try:
        for found in (op(logits, 2), op(logits, 2, False, None), op.run(logits, 2, False, None)):
            torch.testing.assert_close(found[0], 3 * ours)
        torch.testing.assert_close(op(logits, 2, True, scales)[0], scaled)
        (reason,) = set(op.fallbacks) - set(kept)
        assert "this call of topk_softmax needs the argument scales" in reason
        assert reason.endswith("add scales=None after renormalize")
    finally:
        undo.pop()()
        op.reset()
    with pytest.raises(
        CandidateError, match=r"topk_softmax\(...\) does not take the op's arguments \(gating_output"
    ):
        candidate.install(
            candidate.load("topk_softmax", write("def topk_softmax(gating_output): ...\n")), undo.append
        )
    with pytest.raises(CandidateError, match="'renormalize'"):
        candidate.install(
            candidate.load("topk_softmax", write(ROUTING.replace("=False", ", scales"))), undo.append
        )
    assert op.candidate is None and undo == []


def test_missing_arguments_are_named_up_to_the_needed_one(write: Callable[[str], str]) -> None:
    op = registry.get("rms_norm").op
    found = candidate.load("rms_norm", write("def rms_norm(x, weight, eps):\n    return x\n"))
    assert found.function is not None
    _, supports = candidate.fit(found.function, op)
    assert supports is not None and supports(torch.ones(1, 2), None, 1e-6) is None
    reason = supports(torch.ones(1, 2), None, 1e-6, None, 1)
    assert str(reason).endswith("add residual=None, var_hidden_size=None after eps")


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ("x, eps, weight", "argument 2 is weight, and the candidate's function has eps there"),
        ("x, weight, residual, eps", "argument 3 is eps, and the candidate's function has residual there"),
        ("x, epsilon, weight", "argument 2 is weight, and the candidate's function has eps there"),
    ],
)
def test_argument_at_another_place_is_refused(write: Callable[[str], str], arguments: str, said: str) -> None:
    found = candidate.load("rms_norm", write(f"def rms_norm({arguments}):\n    return x\n"))
    assert found.function is not None
    with pytest.raises(CandidateError, match=said) as error:
        candidate.fit(found.function, registry.get("rms_norm").op)
    assert "rms_norm(x, weight, eps, residual=None" in str(error.value)


def test_other_names_of_arguments_are_accepted(write: Callable[[str], str]) -> None:
    found = candidate.load("rms_norm", write("def rms_norm(hidden, w, epsilon):\n    return hidden\n"))
    assert found.function is not None
    function, _ = candidate.fit(found.function, registry.get("rms_norm").op)
    assert torch.equal(function(torch.ones(2), None, 1e-6), torch.ones(2))


@pytest.mark.parametrize(
    ("returned", "told"),
    [
        ("x[..., 1:] * 2", "[3, 7] float32 on cpu, not [3, 4] float32 on cpu"),
        ("(x[..., :4] * 2).double()", "[3, 4] float64 on cpu, not [3, 4] float32 on cpu"),
        ("(x[..., :4] * 2, x)", "([3, 4] float32 on cpu, [3, 8] float32 on cpu), not [3, 4] float32 on cpu"),
        ("None", "None, not [3, 4] float32 on cpu"),
    ],
)
def test_output_unlike_the_op_is_refused(write: Callable[[str], str], returned: str, told: str) -> None:
    path = write(f"def silu_and_mul(x):\n    return {returned}\n")
    op, undo = registry.get("silu_and_mul").op, []
    candidate.install(candidate.load("silu_and_mul", path), undo.append)
    try:
        with pytest.raises(candidate.WrongOutput) as error:
            op(torch.randn(3, 8))
    finally:
        undo[0]()
    assert str(error.value) == f"candidate {path}: silu_and_mul returns {told}"
    assert op(torch.randn(3, 8)).shape == (3, 4)


def test_each_new_shape_of_outputs_is_checked(write: Callable[[str], str]) -> None:
    text = "def silu_and_mul(x):\n    d = x.shape[-1] // 2\n    return x[:2, :d] + x[:2, d:]\n"
    op, undo = registry.get("silu_and_mul").op, []
    candidate.install(candidate.load("silu_and_mul", write(text)), undo.append)
    try:
        assert op(torch.randn(2, 8)).shape == (2, 4)
        with pytest.raises(candidate.WrongOutput, match=r"\[2, 4\] float32 on cpu, not \[3, 4\]"):
            op(torch.randn(3, 8))
    finally:
        undo[0]()


@pytest.mark.parametrize(
    ("returned", "dtype", "residual", "told"),
    [
        ("x.float()", torch.bfloat16, False, r"\[2, 8\] float32 on cpu, not \[2, 8\] bfloat16"),
        ("x if residual is None else (x, residual)", torch.float32, True, r"\(.*\), not \[2, 8\]"),
    ],
)
def test_each_new_kind_of_call_is_checked(
    write: Callable[[str], str], returned: str, dtype: torch.dtype, residual: bool, told: str
) -> None:
    """After a right call of the same shape, without a residual and in float32."""
    text = f"def rms_norm(x, weight, eps, residual=None):\n    return {returned}\n"
    op, undo, weight = registry.get("rms_norm").op, [], torch.ones(8)
    candidate.install(candidate.load("rms_norm", write(text)), undo.append)
    x = torch.randn(2, 8)
    try:
        op(x, weight, 1e-6)
        with pytest.raises(candidate.WrongOutput, match=told):
            op(x.to(dtype), weight.to(dtype), 1e-6, x.clone() if residual else None)
    finally:
        undo[0]()


@pytest.mark.parametrize("wrong", [5, ["rms_norm.py"], {5: "rms_norm.py"}])
def test_other_objects_are_no_candidates(wrong: Any) -> None:
    for read in (candidate.resolve, candidate.named_in):
        with pytest.raises(CandidateError, match=r"must be a folder of files OP\.py, or \{op: file\}, got "):
            read(wrong)
