"""Reasons: decisions follow kinds. Rewording every message changes no decision."""

from __future__ import annotations

import dataclasses
import functools
import json
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from fk_integrations.core.adapter import Adapter
from fk_integrations.core.lookalikes import with_reason
from fk_integrations.patching.apply import apply
from torch import nn

import fastkernels
from fastkernels.core import registry
from fastkernels.core.reasons import Kind, Reason
from fastkernels.core.registry import UnknownName
from fastkernels.patch import PatchError, Report, Request, Row, disagreement, find_host, nothing_patched


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


class Sub(Norm):
    """A subclass of the host's, which may compute something else."""


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
            norm.forward = functools.partial(Norm.forward, norm)  # as other code patches an instance
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


def test_a_method_that_the_host_has_bound_is_patched_as_well() -> None:
    bound = nn.Sequential(Norm())
    # as removed hooks leave it, or a host that chooses one of its methods
    bound[0].forward = bound[0].forward
    (row,) = (row for row in apply(Host(), bound, Request("patch")).rows if row.op == "rms_norm")
    assert (row.state, row.modules) == ("active", 1)
    assert bound[0].forward.__func__ is type(bound[0]).forward is not Norm.forward


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


def test_subclass_stays_with_the_host_and_has_a_row() -> None:
    name = f"{__name__}.Sub, a subclass"
    mixed = apply(Host(), nn.Sequential(Norm(), Sub(), Sub()), Request("patch", NAMED, strict=True))
    (row,) = mixed.rows
    assert (row.state, row.modules, row.reason) == ("active", 1, f"2 unsupported: {name}")
    with pytest.raises(PatchError, match=rf"nothing to patch: rms_norm \(Norm\): 1 unsupported: {name}"):
        apply(Host(), nn.Sequential(Sub()), Request("patch", NAMED))


def test_another_class_of_that_name_has_a_row() -> None:
    namesake = type("Norm", (nn.Module,), {"__module__": "a.model"})
    patched = apply(Host(), nn.Sequential(Norm(), namesake()), Request("patch", NAMED))
    assert patched.rows[0].reason == "1 unsupported: a.model.Norm, another class of that name"
    namesake.__module__ = "transformers.a"
    patched = apply(Host(), nn.Sequential(Norm(), namesake()), Request("patch", NAMED))
    text = f"a class of transformers, which {__name__.partition('.')[0]} runs as it is"
    assert patched.rows[0].reason == f"1 unsupported: transformers.a.Norm, {text}"
    assert with_reason(namesake, "torch", "a subclass") == "transformers.a.Norm, a subclass"


def test_module_without_a_call_does_not_count_as_unverified() -> None:
    patched = apply(Host(), model(), Request("patch", NAMED))
    other = Row(0, "silu_and_mul", "SiluAndMul", 1, "active")
    patched.rows.append(other)
    patched.every_step.add(id(other))

    def report() -> Report:
        reply = {"rank": 0, "pid": 1, "version": "1", "rows": patched.report()}
        return Report(find_host("transformers"), patched.model, [reply])

    assert not report().verified and report().uncalled == []  # no step has run
    patched.model(torch.ones(2, 8))
    assert report().verified and [r.op for r in report().uncalled] == ["silu_and_mul"]
    assert "active (uncalled)" in str(report())
    patched.every_step.clear()  # as of a module that runs in some steps only
    other.proof = ""
    assert not report().verified
    patched.undo()


def test_ops_without_a_place_have_rows() -> None:
    patched = apply(Host(), model(), Request("patch", ("rms_norm", "sampling", "store_kvcache")))
    assert [(row.op, row.state) for row in patched.rows] == [
        ("rms_norm", "active"),
        ("sampling", "off"),
        ("store_kvcache", "off"),
    ]
    assert [row.kinds for row in patched.rows[1:]] == [[Kind.NO_SEAM], [Kind.NO_SEAM]]
    patched.undo()


def test_a_name_alone_is_a_list_of_one() -> None:
    host = find_host("transformers")
    asked: list[Request] = []

    def call(target: Any, request: Request) -> list[dict[str, Any]]:
        asked.append(request)
        row = Row(0, "rms_norm", "Norm", 1, "active")
        return [{"rank": 0, "pid": 1, "version": "1", "rows": [dataclasses.asdict(row)]}]

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(type(host), "call", lambda self, *args: call(*args))
        fastkernels.patch("transformers", ops="rms_norm")
        fastkernels.patch("transformers", ops="rms_norm, silu_and_mul")
    assert [request.ops for request in asked] == [("rms_norm",), ("rms_norm", "silu_and_mul")]
    with pytest.raises(UnknownName, match=r"unknown op 'rms_nrom'\. Did you mean 'rms_norm'"):
        fastkernels.patch("transformers", ops="rms_nrom")


def test_failed_undo_does_not_hide_the_error_of_the_block(caplog: pytest.LogCaptureFixture) -> None:
    class Dead:
        name = "vllm"

        def call(self, target: Any, request: Request) -> list[dict[str, Any]]:
            raise PatchError("the engine has ended")

    row = dataclasses.asdict(Row(0, "rms_norm", "Norm", 1, "active"))
    report = Report(Dead(), None, [{"rank": 0, "pid": 1, "version": "1", "rows": [row]}])  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="a kernel's error"), report:
        raise ValueError("a kernel's error")
    assert "the patch was not undone: the engine has ended" in caplog.text
    with pytest.raises(PatchError, match="the engine has ended"), report:
        pass


def test_op_shows_the_classes_that_the_model_has() -> None:
    class Two(Host):
        def targets(self, spec: Any, model: Any) -> list[Any]:
            paths = (f"{__name__}:{name}" for name in ("Other", "Norm", "Sub"))
            return [dataclasses.replace(t, path=path) for t in super().targets(spec, model) for path in paths]

    patched = apply(Two(), model(), Request("patch", NAMED))
    assert [(row.host_class, row.modules) for row in patched.rows] == [("Norm", 2)]
    patched.undo()
    with pytest.raises(
        PatchError, match=r"^nothing to patch: rms_norm \(Other\): the model has no such module$"
    ):
        apply(Two(), nn.Sequential(nn.Linear(2, 2)), Request("patch", NAMED))
    with pytest.raises(PatchError, match=r"^nothing to patch: .*no such module$"):  # whatever the source
        apply(Two(unknown=True), nn.Sequential(nn.Linear(2, 2)), Request("patch", NAMED))


def test_vllm_names_modules_that_are_transformers() -> None:
    """vLLM builds models that it has no file for, such as GLM, from transformers' modules."""
    from fk_integrations.vllm.host import VllmAdapter
    from transformers import GlmConfig, GlmModel
    from transformers.activations import GELUActivation

    model = GlmModel(
        GlmConfig(hidden_size=32, intermediate_size=32, num_hidden_layers=1, vocab_size=8, pad_token_id=0)
    )
    found = VllmAdapter().unrecognized("rotary_emb", model)
    (reason,) = found
    assert reason.kind is Kind.OTHER_CLASS and "GlmRotaryEmbedding" in reason.text and found[reason] == 1
    (reason,) = VllmAdapter().unrecognized("silu_and_mul", model)
    assert "SiLUActivation" in reason.text
    (reason,) = VllmAdapter().unrecognized("gelu", GELUActivation())  # of GPT-NeoX
    assert "GELUActivation" in reason.text
    assert not VllmAdapter().unrecognized("rms_norm", model)


@pytest.mark.parametrize("ops", [5, ["rms_norm", 5]])
def test_ops_of_another_type_are_refused_in_words(ops: Any) -> None:
    with pytest.raises(TypeError, match=r"ops must be names of ops, such as \['rms_norm'\], got 5"):
        fastkernels.patch("transformers", ops=ops)
