"""The batches in which ours runs in a compiled vLLM: up to the largest that a kernel of ours wins."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from fk_integrations.core.journal import Journal
from fk_integrations.vllm import fusions, prompt_sizes, ranges
from fk_integrations.vllm.passes.fx_gated_products import Prompts
from fk_integrations.vllm.passes.plain_forms import PLAIN
from fk_integrations.vllm.passes.unchanged import Counts, Unchanged
from fk_integrations.vllm.prompt_sizes import MOST, of, sizes
from torch import nn

from fastkernels.core import tuning
from fastkernels.core.reasons import Kind
from fastkernels.core.tuning import Entry
from fastkernels.patch import Report, Request, Row

LAYERS = {"qkv": (96, 64), "down": (64, 128)}  # name: (N, K)


def entry(layer: str, tokens: int, faster: bool = True, op: str = "linear") -> Entry:
    n, k = LAYERS[layer]
    shape = {"N": n, "K": k, "dtype": "float32"}
    return Entry(op, shape, {"M": tokens}, "reference" if faster else "onednn", "onednn", "r")


@pytest.fixture
def most(monkeypatch: pytest.MonkeyPatch) -> Any:
    """most_tokens of a model with these layers and a chip with these entries."""

    def found(layers: list[str], entries: list[Entry], **request: Any) -> int:
        import torch

        shapes = [(None, (*LAYERS[name], torch.float32)) for name in layers]
        monkeypatch.setattr(ranges, "modules_of", lambda adapter, model, spec: shapes)
        monkeypatch.setattr(tuning, "entries", lambda op, chip: [e for e in entries if e.op == op])
        adapter: Any = None
        return ranges.most_tokens(adapter, None, Request("patch", **request), "cpu")

    return found


def test_most_tokens_is_the_largest_batch_that_ours_wins(most: Any) -> None:
    entries = [entry("qkv", 8), entry("qkv", 64, faster=False), entry("down", 32), entry("down", 1)]
    assert most(["qkv", "down"], entries) == 32
    assert most(["qkv"], entries) == 8
    assert most(["qkv"], [entry("qkv", 64, faster=False)]) == most(["down"], []) == 0
    assert most(["qkv", "down"], entries, disable=["linear"]) == 0
    assert most(["qkv"], [entry("qkv", 8), entry("qkv", 2048)]) == 8  # prompts have a range of their own


@pytest.mark.parametrize(("disable", "found"), [((), ["qkv"]), (("linear",), [])])
def test_layers_of_prompts_are_those_that_win_there(
    monkeypatch: pytest.MonkeyPatch, disable: tuple[str, ...], found: list[str]
) -> None:
    import torch

    of_model = [(name, (*LAYERS[name], torch.float32)) for name in LAYERS]
    monkeypatch.setattr(ranges, "modules_of", lambda adapter, model, spec: of_model)
    listed = [entry("qkv", 2048), entry("down", 8), entry("down", 2048, faster=False)]
    monkeypatch.setattr(tuning, "entries", lambda op, chip: listed)
    adapter: Any = SimpleNamespace(batch_invariant=lambda: None)
    request = Request("patch", disable=disable)
    assert ranges.layers_of_prompts(adapter, None, request, "cpu") == found
    named = Request("patch", ops=("linear",), disable=disable)
    assert ranges.layers_of_prompts(adapter, None, named, "cpu") == []
    adapter.batch_invariant = lambda: "a switch"
    assert ranges.layers_of_prompts(adapter, None, request, "cpu") == []


def test_ranges_of_products_alone() -> None:
    import torch

    layer = SimpleNamespace(weight=torch.zeros(LAYERS["down"]))
    found = ranges.prompts([], [layer, layer], 0)
    assert found == Prompts(tuning.DECODES, frozenset(), frozenset({(*LAYERS["down"], torch.float32)}))
    assert ranges.prompts([], [], 8) is None
    assert ranges.stays("silu_and_mul", 0, found) is not None  # its product stays apart


def test_ops_with_a_plain_form_stay_where_nothing_wins() -> None:
    reason = ranges.stays("rms_norm", 0)
    assert reason is not None and reason.kind is Kind.LEFT_TO_HOST
    assert ranges.stays("rms_norm", 8) is None and ranges.stays("fused_experts", 0) is None


class Pass:
    quantization, most, plain, prompts = True, None, (), None

    def __init__(self) -> None:
        self.unchanged = Counts()


def config(
    ends: Any = (512, 2048), mode: str = "VLLM_COMPILE", backend: str = "inductor", of: Any = None
) -> Any:
    compilation = SimpleNamespace(
        mode=SimpleNamespace(name=mode), backend=backend, compile_ranges_endpoints=ends and list(ends),
        inductor_compile_config={},
    )  # fmt: skip
    found = SimpleNamespace(compilation_config=compilation)
    if of is not None:
        compilation.inductor_compile_config["post_grad_custom_post_pass"] = of
    return found


def model_of_two_norms(compiled: bool = True) -> Any:
    """A model that vLLM compiles but for its last norm, or not at all."""
    made: Any = nn.Module()
    made.layers, made.final = nn.Sequential(nn.LayerNorm(4)), nn.LayerNorm(4)
    if compiled:
        made.layers.do_not_compile = False
    return made


def test_only_code_compiled_by_inductor_in_ranges_is_limited() -> None:
    assert ranges.limited(config(), model_of_two_norms())
    assert not ranges.limited(config(mode="DYNAMO_TRACE_ONCE"), model_of_two_norms())
    assert not ranges.limited(config(backend="eager"), model_of_two_norms())
    assert not ranges.limited(config(ends=None), model_of_two_norms())


def test_a_model_without_compiled_code_is_not_limited() -> None:
    """vLLM 0.26 compiles no module of StableLM, whatever its configuration says."""
    assert not ranges.limited(config(), model_of_two_norms(compiled=False))


def test_modules_outside_of_compiled_code_are_counted() -> None:
    found = model_of_two_norms()
    for norm in (found.layers[0], found.final):
        norm.__class__ = type("LayerNorm", (nn.LayerNorm,), {"fastkernels": object})
    assert ranges.outside(config(), found, "LayerNorm") == 1
    assert ranges.outside(config(), found, "RMSNorm") == 0
    row = Row(0, "layer_norm", "LayerNorm", 2, "active", most_tokens=64, unlimited=1)
    reply = {"rank": 0, "pid": 1, "version": "0.33.0", "rows": [vars(row)]}
    host: Any = SimpleNamespace(name="vllm")
    text = str(Report(host, None, [reply]))
    assert "in batches of up to 64 tokens, except in 1 modules outside of compiled code" in text


@pytest.fixture(autouse=True)
def pass_of_the_config(monkeypatch: pytest.MonkeyPatch) -> None:
    """vLLM, which names the key, is not installed here."""

    def found(config: Any, journal: Journal | None = None) -> Any:
        value = config.compilation_config.inductor_compile_config["post_grad_custom_post_pass"]
        return value if hasattr(value, "quantization") else None

    monkeypatch.setattr(fusions, "rewriting", found)


def test_limit_adds_an_endpoint_and_undo_removes_it() -> None:
    ours, journal = Pass(), Journal()
    found = config(of=ours)
    assert ranges.limit(found, 64, {"rms_norm", "linear"}, journal)
    assert found.compilation_config.compile_ranges_endpoints == [64, 512, 2048]
    assert (ours.most, ours.plain) == (64, ("linear", "rms_norm"))
    journal.undo()
    assert found.compilation_config.compile_ranges_endpoints == [512, 2048]
    assert (ours.most, ours.plain) == (None, ())


SHAPES = frozenset({(192, 64, "bfloat16")})


def test_prompts_share_the_range_above_decodes() -> None:
    ours, journal = Pass(), Journal()
    found = config(of=ours)
    assert ranges.limit(found, 64, {"linear"}, journal, Prompts(64, SHAPES))
    assert found.compilation_config.compile_ranges_endpoints == [64, 512, 2048]
    assert (ours.most, ours.plain, ours.prompts) == (64, ("linear",), Prompts(64, SHAPES))
    journal.undo()
    assert found.compilation_config.compile_ranges_endpoints == [512, 2048]
    assert (ours.most, ours.plain, ours.prompts) == (None, (), None)


def test_reasons_are_of_the_patch_that_compiles() -> None:
    ours, journal = Pass(), Journal()
    found = config(of=ours)
    assert ranges.unchanged(found) == {}
    ours.unchanged[Unchanged("linear", "products stay", "left from before")] = 3
    ranges.limit(found, 64, {"linear"}, journal, Prompts(64, SHAPES))
    assert ranges.unchanged(found) == {}
    what = "sums of compiled graphs stay apart"
    ours.unchanged[Unchanged("all_reduce", what, "the sum has another user")] = 2
    ours.unchanged[
        Unchanged("linear", "products of compiled graphs stay the host's", "an addmm with scales")
    ] = 1
    reasons = ranges.unchanged(found)
    assert {op: [reason.text for reason in of] for op, of in reasons.items()} == {
        "all_reduce": ["2 sums of compiled graphs stay apart: the sum has another user"],
        "linear": ["1 products of compiled graphs stay the host's: an addmm with scales"],
    }
    journal.undo()
    assert ranges.unchanged(found) == {}


def test_prompts_alone_add_a_range_and_nothing_else_stays_ours() -> None:
    ours, journal = Pass(), Journal()
    found = config(of=ours)
    assert ranges.limit(found, 0, {"silu_and_mul"}, journal, Prompts(64, SHAPES))
    assert found.compilation_config.compile_ranges_endpoints == [64, 512, 2048]
    assert (ours.most, ours.plain, ours.prompts) == (0, ("silu_and_mul",), Prompts(64, SHAPES))
    journal.undo()
    assert (ours.most, ours.plain, ours.prompts) == (None, (), None)


def test_short_batches_have_no_range_for_prompts() -> None:
    ours = Pass()
    found = config(ends=(32,), of=ours)
    assert not ranges.limit(found, 0, {"silu_and_mul"}, Journal(), Prompts(64, SHAPES))
    assert found.compilation_config.compile_ranges_endpoints == [32] and ours.prompts is None


def test_only_the_activation_becomes_ours_for_prompts_alone() -> None:
    for_prompts = Prompts(64, SHAPES)
    assert ranges.stays("silu_and_mul", 0, for_prompts) is None
    assert (
        ranges.stays("rms_norm", 0, for_prompts) is not None and ranges.stays("silu_and_mul", 0) is not None
    )


@pytest.mark.parametrize(
    ("most", "plain", "of"),
    [(0, PLAIN, Pass()), (2048, PLAIN, Pass()), (8, (), Pass()), (8, PLAIN, object())],
)
def test_limit_leaves_the_ranges_otherwise(most: int, plain: Any, of: Any) -> None:
    found = config(of=of)
    assert not ranges.limit(found, most, plain, Journal())
    assert found.compilation_config.compile_ranges_endpoints == [512, 2048]


def _tile(tokens: int) -> tuple[int, bool]:
    """The power of two below a number of tokens, and whether it is over 3/2 of it, where fused_moe's tiles change."""
    power = max(n for n in (1 << i for i in range(15)) if n < tokens)
    return power, tokens > 1.5 * power


def test_sizes_hold_one_of_each_kind() -> None:
    for experts in (False, True):
        found = sizes(512, 16384, experts)
        for other in range(513, MOST + 1):
            alike = [
                t for t in found if _tile(t)[0] == _tile(other)[0] and (t % 16 == 0) == (other % 16 == 0)
            ]
            assert alike, other
            assert not experts or any(_tile(t) == _tile(other) for t in found), other
        assert len(found) < 20 and sum(found) < 4 * MOST and found == sizes(512, MOST, experts)


def test_dense_models_run_two_sizes_of_each_power_of_two() -> None:
    assert sizes(512, 2048) == [513, 528, 1025, 1040]
    assert sizes(512, 512) == sizes(512, 100) == []


@pytest.mark.parametrize(("mode", "last"), [("PIECEWISE", 512), (None, 0)])
def test_sizes_follow_the_configuration(mode: str | None, last: int) -> None:
    config = SimpleNamespace(
        scheduler_config=SimpleNamespace(max_num_batched_tokens=2048),
        compilation_config=SimpleNamespace(cudagraph_mode=mode, max_cudagraph_capture_size=512),
        model_config=SimpleNamespace(get_num_experts=lambda: 32),
    )
    assert of(config) == sizes(last, 2048, True) != sizes(last, 2048)


def test_engine_built_patched_runs_prompts_before_its_warm_up(monkeypatch: pytest.MonkeyPatch) -> None:
    """vLLM's JIT monitor is active from the end of the warm-up on."""
    order: list[Any] = []
    monkeypatch.setattr(prompt_sizes, "of", lambda config: [1, 513])

    class Worker:
        vllm_config, device = None, "cuda:0"
        model_runner = SimpleNamespace(_dummy_run=lambda tokens, **_: order.append(tokens))

        def compile_or_warm_up_model(self) -> str:
            order.append("warm-up")
            return "seconds"

    worker = Worker()
    prompt_sizes.before_warm_up(worker)
    assert worker.compile_or_warm_up_model() == "seconds" and order == [1, 513, "warm-up"]
    worker.compile_or_warm_up_model()
    assert order == [1, 513, "warm-up", "warm-up"]
    on_cpu = Worker()
    on_cpu.device = "cpu"
    prompt_sizes.before_warm_up(on_cpu)
    on_cpu.compile_or_warm_up_model()
    assert order[4:] == ["warm-up"]
