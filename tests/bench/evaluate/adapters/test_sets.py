"""Sets of candidates: which files are found, for which op, and what is declined."""

import json
import os
from pathlib import Path

import pytest
from fk_bench.evaluate.adapters.sets import PLAIN, SetError, read_set

from fastkernels.core import registry


def test_plain_set_names_each_file_after_its_op(tmp_path: Path):
    for op in ("silu_and_mul", "rms_norm"):
        (tmp_path / f"{op}.py").write_text("raise RuntimeError('a set is read, not imported')\n")
    (tmp_path / "_helper.py").write_text("")
    found = read_set("mine", tmp_path)
    assert [(c.op, c.layout, c.path == c.source) for c in found.candidates] == [
        ("rms_norm", PLAIN, True), ("silu_and_mul", PLAIN, True),
    ]  # fmt: skip
    assert found.declined == () and set(found.files) == {"rms_norm", "silu_and_mul"}


@pytest.mark.parametrize(
    ("files", "message"),
    [
        (None, "there is no folder"),
        ([], "has no file OP.py"),
        (["rms_norm.py", "mixtral.decoder_layer.py"], "fk-bench kernels --model mixtral --candidate"),
        (["rms_nrom.py"], r"rms_nrom.py \(did you mean rms_norm.py\?\)"),
    ],
)
def test_folder_that_is_no_set_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, files, message):
    monkeypatch.setattr(registry, "_added", {})  # other tests register the blocks of models
    folder = tmp_path / "set"
    if files is not None:
        folder.mkdir()
    for file in files or ():
        (folder / file).write_text("")
    with pytest.raises(SetError, match=message):
        read_set("mine", folder)


@pytest.mark.parametrize("kind", ["folder", "broken link", "pipe"])
def test_candidate_that_is_no_file_is_an_error(tmp_path: Path, kind: str):
    """Reading a pipe never ends."""
    path = tmp_path / "rms_norm.py"
    if kind == "folder":
        path.mkdir()
    elif kind == "pipe":
        os.mkfifo(path)
    else:
        path.symlink_to(tmp_path / "nothing")
    with pytest.raises(SetError, match=r"rms_norm\.py is not a file"):
        read_set("mine", tmp_path)


@pytest.mark.parametrize("name", ["1_Mine.py", "L1/gelu.py", "solution.json"])
def test_pipe_in_a_foreign_layout_is_no_candidate(tmp_path: Path, name: str):
    (tmp_path / name).parent.mkdir(exist_ok=True)
    os.mkfifo(tmp_path / name)
    with pytest.raises(SetError):
        read_set("mine", tmp_path)


SOLUTION = {"definition": "rmsnorm_h4096", "spec": {"language": "python", "entry_point": "main.py::run"}}


@pytest.mark.parametrize(
    ("document", "message"),
    [
        ({**SOLUTION, "spec": "python", "sources": []}, "spec is no object"),
        ({**SOLUTION, "sources": [1]}, "sources is no list of objects"),
        ({**SOLUTION, "sources": [{"path": "main.py"}]}, "sources is no list of objects"),
        ({**SOLUTION, "sources": {"main.py": "x"}}, "sources is no list of objects"),
    ],
)
def test_solution_of_another_form_is_declined(tmp_path: Path, document, message):
    (tmp_path / "a.json").write_text(json.dumps(document))
    with pytest.raises(SetError, match=message):
        read_set("mine", tmp_path)


@pytest.mark.parametrize("path", ["a\x00b.py", "a" * 300 + ".py", "main.py/other.py"])
def test_source_that_cannot_be_written_is_an_error(tmp_path: Path, path: str):
    sources = [{"path": p, "content": "def run(): ..."} for p in ("main.py", path)]
    (tmp_path / "a.json").write_text(json.dumps({**SOLUTION, "sources": sources}))
    with pytest.raises(SetError, match=r"the sources of .*a\.json cannot be written"):
        read_set("mine", tmp_path, out=tmp_path / "out")


@pytest.mark.parametrize("name", ["1_Mine.py", "L1/rms_norm.py"])
def test_source_that_is_nested_too_deeply_is_declined(tmp_path: Path, name: str):
    (tmp_path / name).parent.mkdir(exist_ok=True)
    (tmp_path / name).write_text("x = " + "-" * 200_000 + "1")
    with pytest.raises(SetError):
        read_set("mine", tmp_path)


def test_file_for_the_same_op_in_a_folder_below_is_an_error(tmp_path: Path):
    for folder in (tmp_path, tmp_path / "level1", tmp_path / "_helpers"):
        folder.mkdir(exist_ok=True)
        (folder / "rms_norm.py").write_text("")
    with pytest.raises(SetError, match=r"level1/rms_norm\.py are both for rms_norm; remove one"):
        read_set("mine", tmp_path)
    (tmp_path / "level1" / "rms_norm.py").unlink()
    assert set(read_set("mine", tmp_path).files) == {"rms_norm"}


def test_data_set_of_flashinfer_trace_names_the_import(tmp_path: Path):
    for kind in ("definitions", "solutions", "workloads"):
        (tmp_path / kind / "gemm").mkdir(parents=True)
    for given in (tmp_path, tmp_path / "solutions"):
        with pytest.raises(SetError, match=f"fk-bench trace import {tmp_path} --out imported"):
            read_set("mine", given)


def test_set_of_an_evaluation_may_hold_blocks(tmp_path: Path):
    for name in ("rms_norm", "llama.mlp"):
        (tmp_path / f"{name}.py").write_text("")
    assert set(read_set("mine", tmp_path, blocks=True).files) == {"llama.mlp", "rms_norm"}
    (tmp_path / "lama.mlp.py").write_text("")
    with pytest.raises(SetError, match=r"lama\.mlp\.py is named after a block of 'lama', which is no model"):
        read_set("mine", tmp_path, blocks=True)
