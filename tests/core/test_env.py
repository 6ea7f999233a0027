"""FASTKERNELS_* variables: every value is accepted or an error that says what is."""

from __future__ import annotations

import dataclasses
import errno
import logging
import os
import re
from pathlib import Path

import pytest

from fastkernels.core.dispatch import OPS
from fastkernels.core.env import Environment
from fastkernels.core.registry import op_names

FLAGS = {f.name: f.default for f in dataclasses.fields(Environment) if f.type in ("bool", "bool | None")}
VARIABLES = {"enabled": "FASTKERNELS"} | {
    n: f"FASTKERNELS_{n.upper()}" for n in FLAGS if n not in ("enabled", "interpret")
}


@pytest.mark.parametrize(("field", "variable"), VARIABLES.items())
def test_flags_accept_yes_and_no_alone(field: str, variable: str) -> None:
    for text, value in (
        ("1", True),
        ("TRUE", True),
        (" on ", True),
        ("0", False),
        ("No", False),
        ("off", False),
    ):
        assert getattr(Environment.read({variable: text}), field) is value
    assert getattr(Environment.read({variable: " "}), field) is FLAGS[field]
    for text in ("treu", "yes please", "2", "-1", "1,0"):
        with pytest.raises(
            ValueError, match=rf"^{variable}: expected 1, true, yes, on, or 0, false, no, off, got '{text}'"
        ):
            Environment.read({variable: text})


@pytest.mark.parametrize(
    ("variable", "text"),
    [
        ("FASTKERNELS_OPS", "rms_norm,{}"), ("FASTKERNELS_DISABLE", "{}"), ("FASTKERNELS_PROVIDER", "{}:triton"),
        ("FASTKERNELS_CANDIDATES", "{}=a.py"),
    ],
)  # fmt: skip
def test_unknown_op_is_an_error_that_names_ops(variable: str, text: str) -> None:
    with pytest.raises(
        ValueError, match=rf"{variable}: unknown op 'rms_nrom'\. Did you mean 'rms_norm'\?.*fk-bench list"
    ):
        Environment.read({variable: text.format("rms_nrom")})
    with pytest.raises(
        ValueError, match=rf"{variable}: unknown op 'xyzzy'\. Known: .*rms_norm, .*silu_and_mul"
    ):
        Environment.read({variable: text.format("xyzzy")})
    Environment.read({variable: text.format("silu_and_mul").replace("a.py", __file__)})


def test_provider_named_twice_is_an_error() -> None:
    with pytest.raises(ValueError, match="rms_norm is named twice, with 'triton' and with 'vllm'"):
        Environment.read({"FASTKERNELS_PROVIDER": "rms_norm:triton, rms_norm : vllm"})
    assert Environment.read({"FASTKERNELS_PROVIDER": " rms_norm : triton "}).provider == {
        "rms_norm": "triton"
    }


def test_unknown_variable_is_a_warning_with_the_closest(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, "fastkernels"):
        Environment.read({"FASTKERNELS_STRCIT": "1"})
        Environment.read({"FASTKERNELS_STRCIT": "1"})
        Environment.read({"FASTKERNELS_API_KEY": "x", "FASTKERNELS_CACHE": "made-later"})
    assert [r.getMessage() for r in caplog.records] == [
        "FASTKERNELS_STRCIT is not a variable that FastKernels reads: FASTKERNELS_STRICT is"
    ]


def test_every_functional_op_can_be_named() -> None:
    names = {*op_names(), *OPS}
    assert Environment.read({"FASTKERNELS_DISABLE": ",".join(sorted(names))}).disable == tuple(sorted(names))


FOLDERS = ("FASTKERNELS_REPORT", "FASTKERNELS_CACHE")


@pytest.mark.parametrize("variable", FOLDERS)
def test_folder_variables_refuse_files_and_words_of_flags(variable: str, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    for value in ("file", "file/below/it"):
        path = str(tmp_path / value)
        with pytest.raises(ValueError, match=rf"^{variable}: '{path}' is no folder, .*/file is a file; name"):
            Environment.read({variable: path})
    for word in ("0", "No", "1", "true"):
        with pytest.raises(
            ValueError, match=rf"^{variable}: expected a folder, got '{word}'; unset it .*, or write \./"
        ):
            Environment.read({variable: word})
    with pytest.raises(ValueError, match=rf"^{variable}: .* cannot be used \(File name too long\)"):
        Environment.read({variable: str(tmp_path / ("x" * 999))})
    with pytest.raises(ValueError, match=rf"^{variable}: '~no-such-user' cannot be used \("):
        Environment.read({variable: "~no-such-user"})
    default = Environment.read({})
    assert Environment.read({variable: " "}) == default
    made = Environment.read({variable: f" {tmp_path / 'made' / 'later'} "})
    assert str(tmp_path / "made" / "later") in (made.report, made.cache) and not (tmp_path / "made").exists()


def test_report_folder_must_be_writable(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "access", lambda path, mode: False)  # root may write everywhere
    with pytest.raises(
        ValueError, match=r"^FASTKERNELS_REPORT: .* cannot be written; name a folder that can"
    ):
        Environment.read({"FASTKERNELS_REPORT": str(tmp_path)})
    assert Environment.read({"FASTKERNELS_CACHE": str(tmp_path)}).cache == str(tmp_path)


def test_cache_without_permission_is_left_to_a_temporary_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def stat(path: Path) -> None:
        raise PermissionError(errno.EACCES, "Permission denied")

    monkeypatch.setattr(Path, "stat", stat)
    folder = str(tmp_path / "unseen")
    assert Environment.read({"FASTKERNELS_CACHE": folder}).cache == folder
    with pytest.raises(ValueError, match=r"^FASTKERNELS_REPORT: .* cannot be used \(Permission denied\)"):
        Environment.read({"FASTKERNELS_REPORT": folder})


def test_tables_and_candidates_must_exist(tmp_path: Path) -> None:
    assert Environment.read({"FASTKERNELS_TUNED": "off"}).tuned == "0"
    for value, says in (
        ("1", "expected a tuned table, a folder of them, or 0, got '1'"),
        (str(tmp_path), f"the folder {tmp_path} has no CHIP.json; `fk-bench tune` writes a table"),
        ("x" * 999, f"{'x' * 80!r} cannot be used (File name too long)"),
        (
            f"{tmp_path}/no.json",
            f"there is no file or folder {tmp_path}/no.json; `fk-bench tune` writes a table",
        ),
    ):
        with pytest.raises(ValueError, match=re.escape(f"FASTKERNELS_TUNED: {says}")):
            Environment.read({"FASTKERNELS_TUNED": value})
    for path in ("no.py", "~no-such-user/no.py"):
        says = (
            f"FASTKERNELS_CANDIDATES: candidate for rms_norm: there is no file {path}; expected a folder or"
        )
        with pytest.raises(ValueError, match=re.escape(says)):
            Environment.read({"FASTKERNELS_CANDIDATES": f"rms_norm={path}"})


def test_numbers_have_limits() -> None:
    for text in ("-1", "0", "nan", "inf", "1e9", "a minute"):
        with pytest.raises(
            ValueError, match="FASTKERNELS_TRIAL_S: expected a number of seconds above 0, at most"
        ):
            Environment.read({"FASTKERNELS_TRIAL_S": text})
    for text in ("-1", "1.5", "2k"):
        with pytest.raises(ValueError, match="FASTKERNELS_GRAPH_TOKENS: expected a number of 0 or more, got"):
            Environment.read({"FASTKERNELS_GRAPH_TOKENS": text})
