"""Drop and retry on probes that follow a rule, without processes."""

from __future__ import annotations

from pathlib import Path

import pytest
from fk_bench.evaluate.reasons import Reason, described, reason_of
from fk_bench.evaluate.run.search import Probe, search

from fastkernels.core.candidate import CandidateError

FILES = {op: f"/set/{op}.py" for op in ("gelu", "linear", "rms_norm", "rotary_emb", "silu_and_mul")}
BOOM = "RuntimeError: boom"


def test_traceback_names_the_culprit_in_two_probes():
    def probe(ops):
        if "linear" in ops:
            return Probe(
                reason=Reason.RUN_TIME, text=BOOM, files=("/torch/nn.py", "/set/linear.py", "/set/gelu.py")
            )
        return Probe()

    found = search(FILES, probe)
    assert found.kept == ("gelu", "rms_norm", "rotary_emb", "silu_and_mul")
    assert [(d.op, d.reason, d.text) for d in found.dropped] == [("linear", Reason.RUN_TIME, BOOM)]
    assert found.probes == 2


@pytest.mark.parametrize("wrong", sorted(FILES))
def test_wrong_outputs_are_bisected(wrong):
    probes = []

    def probe(ops):
        probes.append(ops)
        return Probe(reason=Reason.INCORRECT, text="correctness 0") if wrong in ops else Probe()

    found = search(FILES, probe)
    assert [d.op for d in found.dropped] == [wrong]
    assert found.dropped[0].reason is Reason.INCORRECT
    assert len(found.kept) == 4
    assert len(probes) <= 5  # all, log2(5) rounded up, and the rest
    assert len(set(probes)) == len(probes)  # no probe runs twice


def test_two_files_that_fail_only_together_lose_one():
    def probe(ops):
        return Probe(reason=Reason.TIME_LIMIT) if {"gelu", "silu_and_mul"} <= {*ops} else Probe()

    found = search(FILES, probe)
    assert len(found.kept) == 4
    assert found.dropped[0].op in ("gelu", "silu_and_mul")


def test_named_failures_are_dropped_at_once():
    def probe(ops):
        bad = {op: (Reason.IMPORT, "SyntaxError") for op in ops if op in ("gelu", "linear")}
        return Probe(bad)

    found = search(FILES, probe)
    assert {d.op for d in found.dropped} == {"gelu", "linear"}
    assert found.probes == 2


def test_unused_ops_are_neither_kept_nor_dropped():
    found = search(FILES, lambda ops: Probe(unused=frozenset({"gelu"} & {*ops})))
    assert (found.unused, found.dropped, found.probes) == (("gelu",), (), 1)
    assert "gelu" not in found.kept


def test_probe_that_always_fails_ends_with_nothing():
    found = search(FILES, lambda ops: Probe(reason=Reason.RUN_TIME, text="exit status 1"))
    assert found.kept == ()
    assert len(found.dropped) == 5


def test_blame_outside_the_set_ends_the_search():
    found = search(FILES, lambda ops: Probe({"attention": (Reason.RUN_TIME, "")}))
    assert found.kept == tuple(sorted(FILES))


def raised(error: BaseException) -> BaseException:
    try:
        raise error
    except BaseException as caught:
        return caught


def test_reasons_follow_from_types():
    import subprocess

    import torch

    assert reason_of(CandidateError("no import")) is Reason.IMPORT
    assert reason_of(torch.OutOfMemoryError("no memory")) is Reason.MEMORY_LIMIT
    assert reason_of(NotImplementedError()) is Reason.UNSUPPORTED
    assert reason_of(torch._dynamo.exc.Unsupported("graph break")) is Reason.GRAPHS
    assert reason_of(ValueError("memory")) is Reason.RUN_TIME
    chained = RuntimeError("building failed")
    chained.__cause__ = subprocess.CalledProcessError(1, "nvcc")
    assert reason_of(chained) is Reason.COMPILE


def test_described_error_has_its_innermost_file_first(tmp_path: Path):
    file = tmp_path / "kernel.py"
    file.write_text("def run():\n    raise ValueError('odd\\nsize')\n")
    names: dict = {}
    exec(compile(file.read_text(), str(file), "exec"), names)
    try:
        names["run"]()
    except ValueError as error:
        found = described(error)
    assert found["files"] == [str(file), __file__]
    assert (found["reason"], found["text"]) == ("run time", "ValueError: odd size")
