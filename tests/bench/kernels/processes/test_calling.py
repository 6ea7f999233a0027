"""How an op is called with a candidate: decided from its source, which is parsed and never run."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch
from fk_bench.kernels.judge.processes.answers import Failure
from fk_bench.kernels.judge.processes.calling import Calling, calling, offered
from fk_bench.kernels.judge.processes.implementation import Implementation

from fastkernels.core import registry
from fastkernels.core.baseline import Baseline
from fastkernels.core.dispatch import OPS
from fastkernels.core.spec import OpSpec


@pytest.fixture
def spec() -> OpSpec:
    return registry.get("silu_and_mul")


def file(folder: Path, source: str | bytes) -> Path:
    path = folder / "silu_and_mul.py"
    path.write_bytes(source.encode() if isinstance(source, str) else source)
    return path


FUNCTION, CLASS = "def silu_and_mul(x):\n    return x\n", "class VllmSiluAndMul:\n    pass\n"


@pytest.mark.parametrize("source", [FUNCTION, FUNCTION + CLASS, CLASS + FUNCTION])
def test_function_is_called_even_beside_a_class(spec: OpSpec, tmp_path: Path, source: str) -> None:
    found = calling(spec, file(tmp_path, source))
    assert found == Calling() and found.mode == "op"


def test_class_alone_is_called_as_module(spec: OpSpec, tmp_path: Path) -> None:
    found = calling(spec, file(tmp_path, CLASS))
    assert (found.cls, found.mode, found.problem) == ("VllmSiluAndMul", "module", "")


@pytest.mark.parametrize(
    "source",
    [
        "",
        "def other(x):\n    return x\n",
        "class Other:\n    def silu_and_mul(self, x):\n        return x\n",
        "def make():\n    def silu_and_mul(x):\n        return x\n",
        "globals()['silu_and_mul'] = print\n",
        "x.silu_and_mul = print\nsilu_and_mul\n",
    ],
)
def test_source_with_neither_is_a_problem(spec: OpSpec, tmp_path: Path, source: str) -> None:
    found = calling(spec, file(tmp_path, source))
    assert "silu_and_mul.py defines neither a function silu_and_mul(...)" in found.problem
    assert "VllmSiluAndMul" in found.problem and not found.unsupported


def test_problem_names_a_few_classes_once(tmp_path: Path) -> None:
    found = calling(registry.get("rms_norm"), file(tmp_path, ""))
    assert found.problem.count("VllmRMSNorm,") == 1 and re.search(r" and \d+ more\) at its", found.problem)


CONDITIONAL = (
    "import torch\nif torch.cuda.is_available():\n    {0}\nelse:\n    pass\n",
    "if 0:\n    pass\nelif 1:\n    pass\nelse:\n    {0}\n",
    "try:\n    {0}\nexcept ImportError:\n    pass\n",
    "try:\n    pass\nexcept ImportError:\n    {0}\n",
    "try:\n    pass\nfinally:\n    {0}\n",
    "with open('x'):\n    {0}\n",
    "for i in range(3):\n    {0}\n",
)
BINDS = (
    "def silu_and_mul(x): return x",
    "from other import silu_and_mul",
    "from other import thing as silu_and_mul",
    "import silu_and_mul.inner",
    "silu_and_mul = print",
    "a, (silu_and_mul, b) = 1, (2, 3)",
    "silu_and_mul: object = print",
)


@pytest.mark.parametrize("around", ["{0}\n", *CONDITIONAL])
@pytest.mark.parametrize("bind", BINDS)
def test_conditional_definitions_count(tmp_path: Path, around: str, bind: str) -> None:
    assert "silu_and_mul" in (offered(file(tmp_path, around.format(bind))) or ())


@pytest.mark.parametrize(
    "source", ["def silu_and_mul(x:\n", b"\xff\xfe\x00", b"x = '\x00'", "(" * 100_000, "-" * 100_000 + "1"]
)
def test_unparsable_source_fails_at_its_import(spec: OpSpec, tmp_path: Path, source: str | bytes) -> None:
    """The process reports the error; the judge neither raises nor guesses."""
    path = file(tmp_path, source)
    assert offered(path) is None and calling(spec, path) == Calling()


def test_missing_file_offers_nothing(tmp_path: Path) -> None:
    assert offered(tmp_path / "none.py") is None


def test_source_is_never_run(spec: OpSpec, tmp_path: Path) -> None:
    path = file(tmp_path, f"open({str(tmp_path / 'ran')!r}, 'w')\n{FUNCTION}")
    assert calling(spec, path) == Calling() and not (tmp_path / "ran").exists()


def test_without_candidate_our_own_is_called(spec: OpSpec) -> None:
    assert calling(spec, None) == Calling()
    layers = [s for n in registry.op_names() if (s := registry.get(n)).op is None]
    assert layers and all(calling(s, None).mode == "module" for s in layers)


def test_replaced_op_is_not_called(tmp_path: Path) -> None:
    """A candidate that puts itself in the place of the registered op gains nothing: the op was looked up before."""
    op = registry.get("silu_and_mul").op
    assert op is not None
    real = op.overload
    source = FUNCTION + (
        "from fastkernels.core.dispatch import OPS\n"
        "silu_and_mul._schema = OPS['silu_and_mul'].overload._schema\n"
        "OPS['silu_and_mul'].overload = silu_and_mul\n"
    )
    runner = Implementation()
    try:
        path = str(file(tmp_path, source))
        runner.load_implementation("silu_and_mul", "cpu", {"silu_and_mul": path}, None, None, None)
        assert runner.overload is real and op.overload is not real
    finally:
        op.overload = real
        op.set_candidate(None)


def test_older_function_fails_where_a_call_needs_an_argument(tmp_path: Path) -> None:
    path, op, runner = tmp_path / "topk_softmax.py", OPS["topk_softmax"], Implementation()
    path.write_text(
        "def topk_softmax(gating_output, topk, renormalize=False):\n    return (gating_output.neg(),) * 3\n"
    )
    try:
        runner.load_implementation("topk_softmax", "cpu", {"topk_softmax": str(path)}, None, None, None)
        logits = torch.randn(3, 8)
        assert torch.equal(op(logits, 2, False, None)[0], -logits)
        with pytest.raises(Failure, match="needs the argument scales") as caught:
            op(logits, 2, False, torch.ones(8))
        assert caught.value.status == "signature_mismatch"
    finally:
        op.set_candidate(None)


def test_baselines_of_the_last_ops_are_made_once(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[str] = []

    def baseline(op: str) -> Baseline:
        return Baseline(f"of {op}", "host", lambda: made.append(op) or len, devices=("cpu",))

    monkeypatch.setattr(registry, "baselines", lambda op: [baseline(op)])
    runner = Implementation()
    try:
        for op in ("silu_and_mul", "rms_norm", "silu_and_mul", "gelu", "linear", "rotary_emb", "rms_norm"):
            runner.load_implementation(op, "cpu", {}, "host", None, None)
            runner.use(f"of {op}", None)
            runner.use(f"of {op}", None)
    finally:
        for op in runner.changed:
            OPS[op].set_candidate(None)
    assert made == ["silu_and_mul", "rms_norm", "gelu", "linear", "rotary_emb", "rms_norm"]
