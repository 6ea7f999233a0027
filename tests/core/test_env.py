"""FASTKERNELS_* variables: every value is accepted or an error that says what is."""

from __future__ import annotations

import dataclasses
import logging

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
    Environment.read({variable: text.format("silu_and_mul")})


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
        Environment.read({"FASTKERNELS_API_KEY": "x", "FASTKERNELS_CACHE": "y"})
    assert [r.getMessage() for r in caplog.records] == [
        "FASTKERNELS_STRCIT is not a variable that FastKernels reads: FASTKERNELS_STRICT is"
    ]


def test_every_functional_op_can_be_named() -> None:
    names = {*op_names(), *OPS}
    assert Environment.read({"FASTKERNELS_DISABLE": ",".join(sorted(names))}).disable == tuple(sorted(names))
