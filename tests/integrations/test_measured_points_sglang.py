"""SGLang's linear layers and LM heads as a patch finds, measures and replaces them, on a CPU."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from fk_integrations.core.journal import Journal
from fk_integrations.sglang import heads, linear_points
from fk_integrations.sglang.scheduler import SglangAdapter

from fastkernels.core import tuning
from fastkernels.core.reasons import Kind, Reason
from fastkernels.core.tuning import Entry
from fastkernels.overrides.embedding.logits_processor import logits_processor
from fastkernels.overrides.linear.linear import linear
from fastkernels.overrides.linear.sglang import SGLangUnquantizedLinearMethod
from fastkernels.verify.measure import LEAST_CALLS, Point

CPU = torch.device("cpu")
MODULE, NAME = heads.PROCESSOR.split(":")


class UnquantizedEmbeddingMethod:
    """The name of SGLang's, by which its logits processor knows a head without quantization."""


def compute_lm_head(self: Any, hidden_states: Any, lm_head: Any, embedding_bias: Any = None) -> Any:
    self.computed += 1
    return torch.matmul(hidden_states, lm_head.weight.T)


Processor: Any = type(
    NAME, (torch.nn.Module,), {"__module__": MODULE, "_compute_lm_head": compute_lm_head, "computed": 0}
)


def make_model(n: int = 24, k: int = 16) -> Any:
    model, head = torch.nn.Module(), torch.nn.Module()
    head.weight = torch.nn.Parameter(torch.randn(n, k), requires_grad=False)
    head.quant_method = UnquantizedEmbeddingMethod()  # type: ignore[assignment]
    model.lm_head, model.logits_processor = head, Processor()
    return model


def adapter(model: Any) -> SglangAdapter:
    return SglangAdapter(SimpleNamespace(model=model, server_args=SimpleNamespace(pp_size=1)))


@pytest.fixture
def choices(monkeypatch: pytest.MonkeyPatch) -> Any:
    """choices(faster, ...): tokens up to which ours is faster for a weight [24, 16], as a patch has verified it."""

    def put(*faster: int) -> None:
        shape, won = {"N": 24, "K": 16, "dtype": "float32"}, {"speedup": 1.3, "ci95": (1.2, 1.4)}
        entries = [
            Entry("linear", shape, {"M": m}, "reference", "cublas", "r1", **won)  # type: ignore[arg-type]
            for m in faster
        ]
        tuning.set_verified("cpu", entries)
        linear.reset(), logits_processor.reset()

    yield put
    put()


def test_head_is_measured_by_its_weight() -> None:
    model = make_model()
    here = adapter(model).of("linear")
    assert here.heads(model) == [model.lm_head]
    assert here.whole_shape(linear, model.lm_head) == (24, 16, torch.float32)
    assert here.shape(linear, model.logits_processor) == (24, 16, torch.float32)
    assert here.whole_shape(linear, model.logits_processor) is None  # measured once
    model.draft = torch.nn.Module()
    model.draft.lm_head = make_model().lm_head
    assert here.heads(model) == [] and here.shape(linear, model.logits_processor) is None


def swapped(model: Any, monkeypatch: pytest.MonkeyPatch, by_table: bool = True) -> tuple[Any, Reason | None]:
    monkeypatch.setattr(heads.versions, "unknown", lambda *args: None)
    journal = Journal()
    here = adapter(model).of("logits_processor")
    return journal, here.swap(model.logits_processor, object, journal, by_table)


def test_product_of_the_head_is_ours_where_it_is_faster(
    choices: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = make_model()
    processor, head = model.logits_processor, model.lm_head
    journal, reason = swapped(model, monkeypatch)
    assert reason is None and isinstance(processor, Processor)
    choices(4)
    x = torch.randn(9, 16)
    for n, theirs in ((1, 0), (4, 0), (9, 1)):
        torch.testing.assert_close(processor._compute_lm_head(x[:n], head, None), x[:n] @ head.weight.T)
        assert processor.computed == theirs
    assert logits_processor.calls == 2 and logits_processor.left == {heads.NOT_FASTER: 1}
    other = make_model().lm_head  # a shared target's, for example
    processor._compute_lm_head(x[:1], other)
    processor._compute_lm_head(x[:1].double(), SimpleNamespace(weight=head.weight.double()))
    assert processor.computed == 3 and logits_processor.calls == 2
    journal.undo()
    assert type(processor) is Processor


def test_requested_product_of_the_head_is_ours(choices: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    model = make_model()
    _, reason = swapped(model, monkeypatch, by_table=False)
    choices()
    model.logits_processor._compute_lm_head(torch.randn(3, 16), model.lm_head)
    assert reason is None and model.logits_processor.computed == 0 and logits_processor.calls == 1


@pytest.mark.parametrize(
    ("change", "text"),
    [
        (lambda m: setattr(m.logits_processor, "use_fp32_lm_head", True), "use_fp32_lm_head is on"),
        (lambda m: setattr(m.logits_processor, "rl_on_policy_target", "fsdp"), "rl_on_policy_target is on"),
        (lambda m: setattr(m.lm_head, "quant_method", object()), "the LM head's quant_method is object"),
        (lambda m: setattr(m.lm_head, "set_lora", True), "an LM head with LoRA"),
        (lambda m: setattr(m.lm_head, "use_intel_amx_backend", True), "the host packed its weight"),
        (lambda m: delattr(m, "lm_head"), "the model has no LM head"),
    ],
)
def test_other_heads_stay_the_hosts(change: Any, text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model = make_model()
    change(model)
    _, reason = swapped(model, monkeypatch)
    assert reason is not None and reason.kind is Kind.UNSUPPORTED and reason.text.startswith(text)
    assert type(model.logits_processor) is Processor


def test_replaced_product_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    model = make_model()
    model.logits_processor._compute_lm_head = lambda *args: None
    _, reason = swapped(model, monkeypatch)
    assert reason is not None and reason.kind is Kind.REPLACED


def test_linear_layers_are_timed_on_their_own_weights() -> None:
    layers = [torch.nn.Linear(16, 24) for _ in range(3)]
    shape = 24, 16, torch.float32
    generator = torch.Generator().manual_seed(0)
    found = linear_points.calls(Point("linear", shape, (4,), tuple(layers)), CPU, generator, 4000)
    assert found is not None
    check, calls = found
    assert check is calls[0] and check[0].shape == (4, 16) and len(calls) == LEAST_CALLS
    weights = [layer.weight for layer in layers]
    assert all(c[1] is weights[i % 3] and c[2] is layers[i % 3].bias for i, c in enumerate(calls))
    assert linear_points.calls(Point("linear", shape, (4,), (layers[0],)), CPU, generator, 4000) is None
    tied = layers[0], SimpleNamespace(weight=layers[0].weight, bias=None)
    assert linear_points.calls(Point("linear", shape, (4,), tied), CPU, generator, 3000) is None


def test_products_that_no_table_lists_call_the_hosts_method(choices: Any) -> None:
    """A prompt outside of graphs would pay for each call of an op."""
    theirs: list[int] = []

    def host(self: Any, layer: Any, x: Any, bias: Any = None) -> Any:
        theirs.append(len(x))
        return torch.nn.functional.linear(x, layer.weight, bias)

    apply = SGLangUnquantizedLinearMethod.by_table(host, SGLangUnquantizedLinearMethod.apply)
    layer, x = torch.nn.Linear(16, 24), torch.randn(40, 16)
    choices(1, 8)
    for n in (1, 8, 40):
        torch.testing.assert_close(
            apply(SGLangUnquantizedLinearMethod(), layer, x[:n], layer.bias), layer(x[:n])
        )
    assert theirs == [40] and linear.calls == 2
    linear.set_candidate(lambda *args: torch.zeros(()))
    try:
        assert apply(SGLangUnquantizedLinearMethod(), layer, x).shape == ()
    finally:
        linear.set_candidate(None)
