"""Sets of candidates: which files are found, for which op, and what is declined."""

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


def test_set_of_an_evaluation_may_hold_blocks(tmp_path: Path):
    for name in ("rms_norm", "llama.mlp"):
        (tmp_path / f"{name}.py").write_text("")
    assert set(read_set("mine", tmp_path, blocks=True).files) == {"llama.mlp", "rms_norm"}
    (tmp_path / "lama.mlp.py").write_text("")
    with pytest.raises(SetError, match=r"lama\.mlp\.py is named after a block of 'lama', which is no model"):
        read_set("mine", tmp_path, blocks=True)
