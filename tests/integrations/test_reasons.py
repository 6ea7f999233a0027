"""Reasons: decisions follow kinds. Rewording every message changes no decision."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from fk_integrations.core.adapter import Adapter
from fk_integrations.core.apply import apply
from torch import nn

from fastkernels.core import registry
from fastkernels.core.reasons import Kind, Reason
from fastkernels.patch import PatchError, Request, Row, disagreement, nothing_patched


class Norm(nn.Module):
    """A host's RMSNorm."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(8))
        self.variance_epsilon, self.has_weight, self.variance_size_override = 1e-5, True, None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x


class Other(Norm):
    """A class of the host that the model does not have."""


class Host(Adapter):
    """A host of this file's classes; each option makes one decision."""

    host, version = "vllm", "0.33.0"

    def __init__(self, **options: Any) -> None:
        self.options = options
        self.whole = options.get("whole", True)
        self.faster_on_cpu = options.get("cpu", False)

    def targets(self, spec: Any, model: Any) -> list[Any]:
        if spec.name != "rms_norm":
            return []
        (target,) = (t for t in super().targets(spec, model) if t.seam == "leaf")
        path = self.options.get("path", f"{__name__}:Norm")
        return [dataclasses.replace(target, path=path, default=self.options.get("default", True))]

    def unknown(self, target: Any, host_class: Any) -> Reason | None:
        return Reason(Kind.UNKNOWN_VERSION, "a source") if self.options.get("unknown") else None

    def batch_invariant(self) -> str | None:
        return self.options.get("switch")

    def fused(self, model: Any, op: str, module: Any) -> Reason | None:
        return Reason(Kind.LEFT_TO_HOST, "the compiler fuses it") if self.options.get("fused") else None


def model(foreign: bool = False) -> nn.Module:
    found = nn.Sequential(Norm(), Norm())
    if foreign:
        for norm in found:
            norm.forward = norm.forward  # as other code patches an instance
    return found


NAMED = ("rms_norm",)
# (adapter's options, request, whether instances are patched by other code) -> (outcome, kinds)
CASES: list[tuple[dict[str, Any], dict[str, Any], bool, str, list[Kind]]] = [
    ({}, {}, False, "active", []),
    ({}, {"strict": True}, False, "active", []),
    ({"cpu": True}, {}, False, "left", [Kind.LEFT_TO_HOST]),
    ({"cpu": True}, {"strict": True}, False, "left", [Kind.LEFT_TO_HOST]),
    ({"cpu": True}, {"ops": NAMED}, False, "active", []),
    ({"fused": True}, {}, False, "left", [Kind.LEFT_TO_HOST]),
    ({"fused": True}, {"ops": NAMED}, False, "active", []),
    ({"unknown": True}, {}, False, "error", [Kind.UNKNOWN_VERSION]),
    ({"path": f"{__name__}:Absent"}, {}, False, "error", [Kind.NOT_IN_HOST]),
    ({"path": f"{__name__}:Other"}, {}, False, "error", [Kind.NO_SUCH_MODULE]),
    ({}, {"disable": NAMED}, False, "error", [Kind.DISABLED]),
    ({}, {"disable": NAMED, "ops": NAMED}, False, "error", [Kind.DISABLED]),
    ({"whole": False}, {"disable": NAMED}, False, "off", [Kind.DISABLED]),
    ({"whole": False}, {"disable": NAMED, "strict": True}, False, "off", [Kind.DISABLED]),
    ({"whole": False, "path": f"{__name__}:Other"}, {"strict": True}, False, "off", [Kind.NO_SUCH_MODULE]),
    ({"whole": False, "unknown": True}, {}, False, "off", [Kind.UNKNOWN_VERSION]),
    ({"whole": False, "unknown": True}, {"strict": True}, False, "error", [Kind.UNKNOWN_VERSION]),
    ({"whole": False}, {}, True, "off", [Kind.REPLACED]),
    ({}, {}, True, "error", [Kind.REPLACED]),
]


def decide(options: dict[str, Any], request: dict[str, Any], foreign: bool) -> tuple[str, list[Kind]]:
    """The outcome of `apply` and the kinds of its rows, which come from a lenient patch where it raises."""
    wanted = Request("patch", **request)
    try:
        rows = apply(Host(**options), model(foreign), wanted).rows
    except PatchError:
        lenient = dataclasses.replace(wanted, strict=False)
        rows = apply(Host(**{**options, "whole": False}), model(foreign), lenient).rows
        return "error", [kind for row in rows for kind in row.kinds]
    kinds = [kind for row in rows for kind in row.kinds]
    if any(row.state == "active" for row in rows):
        return "active", kinds
    return ("off" if options.get("whole") is False else "left"), kinds


@pytest.fixture
def reworded(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Every reason has another text, with the words that the old code looked for."""
    texts = iter(f"left to the host: {i}; the model has no such module" for i in range(10**6))
    plain = Reason.__init__

    def init(self: Reason, kind: Kind, text: str) -> None:
        plain(self, kind, next(texts))

    monkeypatch.setattr(Reason, "__init__", init)
    yield


@pytest.mark.parametrize(("options", "request_", "foreign", "outcome", "kinds"), CASES)
def test_the_kind_decides(
    options: dict[str, Any], request_: dict[str, Any], foreign: bool, outcome: str, kinds: list[Kind]
) -> None:
    found, found_kinds = decide(options, request_, foreign)
    assert (found, list(dict.fromkeys(found_kinds))) == (outcome, kinds)


@pytest.mark.parametrize(("options", "request_", "foreign", "outcome", "kinds"), CASES)
@pytest.mark.usefixtures("reworded")
def test_rewording_changes_no_decision(
    options: dict[str, Any], request_: dict[str, Any], foreign: bool, outcome: str, kinds: list[Kind]
) -> None:
    found, found_kinds = decide(options, request_, foreign)
    assert (found, list(dict.fromkeys(found_kinds))) == (outcome, kinds)


def test_a_batch_invariant_host_keeps_an_op_that_is_not() -> None:
    spec = registry.get("linear")
    assert not spec.batch_invariant
    row = Row(0, "linear", "Linear", 0, "off")
    row.explain({Reason(Kind.BATCH_INVARIANT, "a switch is on"): 0})
    assert nothing_patched([row], Request("patch")) and not Kind.BATCH_INVARIANT.harmless


def test_ranks_agree_by_kind_after_a_trip_through_json() -> None:
    def reply(rank: int, kind: Kind) -> dict[str, Any]:
        row = Row(rank, "rms_norm", "Norm", 0, "off")
        row.explain({Reason(kind, "a text"): 2})
        return json.loads(json.dumps({"rank": rank, "rows": [dataclasses.asdict(row)]}))

    left = [reply(rank, Kind.LEFT_TO_HOST) for rank in range(2)]
    assert disagreement(left, Request("patch")) is None
    assert disagreement(left, Request("patch", ("rms_norm",))) == (
        "nothing to patch: rms_norm (Norm): 2 left to the host: a text"
    )
    mixed = [left[0], reply(1, Kind.UNSUPPORTED)]
    assert "2 unsupported: a text" in (disagreement(mixed, Request("patch")) or "")


def test_a_row_lists_reasons_that_left_it_to_the_host_last() -> None:
    row = Row(0, "rms_norm", "Norm", 1, "active")
    row.explain({Reason(Kind.LEFT_TO_HOST, "a; b"): 3, Reason(Kind.UNSUPPORTED, "c"): 1})
    assert row.reason == "1 unsupported: c; 3 left to the host: a; b"
    assert row.reasons == [
        {"kind": "unsupported", "text": "c", "modules": 1},
        {"kind": "left_to_host", "text": "a; b", "modules": 3},
    ]
