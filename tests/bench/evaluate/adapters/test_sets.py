"""Sets of candidates: which files are found, for which op, and what is declined."""

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
