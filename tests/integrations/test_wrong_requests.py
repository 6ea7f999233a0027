"""Objects that no host knows and arguments that patch() cannot use: one exception, with the value and the remedy."""

from __future__ import annotations

from typing import Any

import pytest
from torch import nn

import fastkernels
from fastkernels.core.candidate import CandidateError
from fastkernels.core.registry import UnknownName
from fastkernels.patch import PatchError


@pytest.mark.parametrize(
    ("target", "says"),
    [
        (None, "NoneType"),
        (3, "int"),
        (b"vllm", "bytes"),
        ([nn.Linear(1, 1)], "list"),
        (nn.Linear(1, 1), r"torch\.nn\.modules\.linear\.Linear"),
        (nn.Linear, r"the class torch\.nn\.modules\.linear\.Linear: pass an object of it"),
    ],
)
def test_unknown_target_is_refused_with_the_hosts(target: Any, says: str) -> None:
    for call in (fastkernels.patch, fastkernels.unpatch):
        with pytest.raises(PatchError, match=rf"knows {says}\. Pass a live .* or its name: .*timm.*vllm"):
            call(target)


def test_name_of_a_model_is_no_host() -> None:
    with pytest.raises(UnknownName, match=r"unknown host 'org/model'.*A model is passed as the live object"):
        fastkernels.patch("org/model")


@pytest.mark.parametrize(
    ("arguments", "error", "says"),
    [
        ({"ops": []}, ValueError, r"ops is empty: name ops, such as \['rms_norm'\]"),
        ({"ops": " , "}, ValueError, "ops is empty"),
        ({"ops": [3]}, TypeError, "ops must be names of ops, .* got 3"),
        ({"ops": "llama.mlp"}, UnknownName, "Blocks of a model, MODEL.KIND, exist in our engine"),
        ({"strict": "no"}, TypeError, "strict must be True, False or None, got 'no'"),
        ({"candidates": {"rms_norm": None}}, CandidateError, "expected the path of a file, got None"),
        ({"candidates": {"rms_norm": "no.py"}}, CandidateError, r"there is no file no\.py"),
        ({"candidates": ""}, CandidateError, "there is no folder ''"),
    ],
)
def test_unusable_arguments_are_refused(arguments: Any, error: type[Exception], says: str) -> None:
    with pytest.raises(error, match=says):
        fastkernels.patch("timm", **arguments)
