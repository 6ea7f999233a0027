"""An unrequested patch lets first calls decide, by time, between the host's code and ours; here on the CPU."""

from __future__ import annotations

import time
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from fk_integrations.core.journal import Journal
from fk_integrations.live import traced, trials
from fk_integrations.live.live_class import live_class
from fk_integrations.live.tally import Tally
from fk_integrations.live.trials import OWN, Trial, sizes_of
from torch import nn

import fastkernels
from fastkernels.core.candidate_scopes import Scope
from fastkernels.overrides.activation.gelu import gelu

timm = pytest.importorskip("timm")
VIT = {"img_size": 32, "embed_dim": 48, "depth": 2, "num_heads": 3, "num_classes": 7}


@pytest.fixture(autouse=True)
def verify(monkeypatch: pytest.MonkeyPatch) -> None:
    """Measure on the CPU, too."""
    monkeypatch.setenv("FASTKERNELS_VERIFY", "1")


class Host(nn.Module):
    """A module of a host, as slow as its name says."""

    def __init__(self, seconds: float):
        super().__init__()
        self.seconds = seconds

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        time.sleep(self.seconds)
        return x * 2


def ours(seconds: float, factor: float = 2, error: bool = False) -> type:
    def forward(self: Any, x: torch.Tensor) -> torch.Tensor:
        time.sleep(seconds)
        if error:
            raise RuntimeError("no kernel")
        return x * factor

    return type("Ours", (nn.Module,), {"forward": forward})


def tried(module: Host, cls: type, compiled: bool = False) -> tuple[Trial, Journal]:
    trial, journal = Trial("gelu", Host), Journal()
    if compiled:
        trial.compiled = traced.Decided(traced.Traced("timm", "0"))
    journal.set_class(module, live_class(Host, cls, trial=trial))
    Tally("gelu", Scope("a model")).add(module, module, journal)
    trial.begin(module, sizes_of(module), lambda: setattr(module, "__class__", Host), journal)
    return trial, journal


@pytest.mark.parametrize(
    ("theirs", "cls", "text"),
    [
        (0.005, ours(0.0), "ours ("),
        (0.0, ours(0.005), "the host's (0."),
        (0.002, ours(0.0, factor=3), "the host's; our result differs by 0.5 of its norm"),
        (0.002, ours(0.0, error=True), "the host's; RuntimeError: no kernel"),
    ],
    ids=["faster", "slower", "wrong", "raises"],
)
def test_first_call_decides(theirs: float, cls: type, text: str) -> None:
    module, x = Host(theirs), torch.randn(3, 5)
    trial, journal = tried(module, cls)
    with torch.no_grad():
        assert torch.equal(module(x), x * 2) and torch.equal(module(x), x * 2)
    (line,) = trial.lines()
    assert line.startswith(f"gelu Host float32 [3, 5]: {text}")
    won = text.startswith("ours")
    assert (type(module) is Host) != won and trial.restored == (not won)
    assert type(module).forward is not Host.forward or not won
    assert won or not [name for name in vars(module) if name.startswith("_fastkernels")]  # pickles as before
    journal.undo()
    assert type(module) is Host and OWN not in vars(module)


@pytest.mark.parametrize(
    ("graph", "eager", "issued", "won"),
    [
        ((100, 10), (140, 110), (90, 80), (True, True)),
        (
            (100, 10),
            (110, 140),
            (90, 130),
            (True, False),
        ),  # its Python takes the time of calls one after the other
        ((100, 10), (140, 110), (40, 80), (True, False)),  # a model of such calls waits for the CPU
        ((100, 10), (140, 110), (40, 55), (True, True)),  # and for the GPU here
        ((100, 99), (100, 99), (90, 80), (True, False)),
        ((10, 11), (110, 90), (90, 80), (False, False)),
    ],
)
def test_each_mode_is_decided_by_its_own_time(
    graph: tuple[int, int],
    eager: tuple[int, int],
    issued: tuple[int, int],
    won: tuple[bool, bool],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Times of the host's and of ours. issued: those of the CPU in eager calls."""
    monkeypatch.setattr(trials, "interleaved", lambda *_: [[float(t)] * 21 for t in graph])
    monkeypatch.setattr(
        trials, "one_by_one", lambda *_: tuple([[float(t)] * 21 for t in of] for of in (eager, issued))
    )
    found = trials._measured(lambda: 1, lambda: 1, torch.device("cpu"))
    assert (found.captured, found.eager) == won


def test_module_that_wins_in_graphs_runs_there_only(monkeypatch: pytest.MonkeyPatch) -> None:
    module, x = Host(0.0), torch.randn(3)
    trial, _ = tried(module, ours(0.0, factor=3))
    monkeypatch.setattr(trials, "_measured", lambda *_: trials.Choice(True, False, "ours in CUDA graphs"))
    with torch.no_grad():
        assert torch.equal(module(x), x * 2) and trial.restored == 0
        monkeypatch.setattr(trials, "capturing", lambda x: True)
        assert torch.equal(module(x), x * 3)


@pytest.mark.parametrize("compiled", [False, True])
def test_decided_call_runs_the_hosts_at_once(compiled: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """compiled: ours has lost, but compiled code keeps it; else it runs in graphs only."""
    module, x = Host(0.0), torch.randn(3)
    tried(module, ours(0.0, factor=3), compiled)
    monkeypatch.setattr(trials, "_measured", lambda *_: trials.Choice(not compiled, False, "decided"))
    with torch.no_grad():
        assert torch.equal(module(x), x * 2) and type(module) is not Host
        monkeypatch.setattr(trials, "_signature", None)  # what the choice costs in each other call
        for given in ((x,), {"x": x}) if compiled else ((x,),):
            out = module(**given) if isinstance(given, dict) else module(*given)
            assert torch.equal(out, x * 2)


def test_tensor_given_by_name_is_decided_once(monkeypatch: pytest.MonkeyPatch) -> None:
    module, x = Host(0.0), torch.randn(3)
    tried(module, ours(0.0, factor=3))
    monkeypatch.setattr(trials, "_measured", lambda *_: trials.Choice(True, False, "decided"))
    with torch.no_grad():
        assert torch.equal(module(x=x), x * 2)
        monkeypatch.setattr(trials, "_signature", None)
        assert torch.equal(module(x=x), x * 2)


def test_python_around_our_method_counts() -> None:
    """The class wins by its kernel, and loses by what each of its calls asks before."""
    module, x = Host(0.002), torch.randn(3)
    cls = ours(0.0)
    cls.needs_host = staticmethod(lambda module: time.sleep(0.005))  # type: ignore[attr-defined]
    trial, _ = tried(module, cls)
    with torch.no_grad():
        module(x)
    assert [(c.captured, c.eager) for c in trial.choices.values()] == [(False, False)]


def test_other_shapes_are_decided_anew() -> None:
    module = Host(0.0)
    trial, _ = tried(module, type("Ours", (nn.Module,), {"forward": lambda self, x: _slow_if_long(x)}))
    module.seconds = 0.005
    with torch.no_grad():
        module(torch.randn(3))
        module(torch.randn(64))
        module(torch.randn(64))
    assert [choice.captured for choice in trial.choices.values()] == [True, False] and type(
        module
    ) is not Host


def test_autocast_is_decided_anew() -> None:
    def forward(self: Any, x: torch.Tensor) -> torch.Tensor:
        return x * 3 if torch.is_autocast_enabled("cpu") else x * 2  # an op that does not know of it

    module = Host(0.005)
    trial, _ = tried(module, type("Ours", (nn.Module,), {"forward": forward}))
    x = torch.randn(3)
    with torch.no_grad():
        module(x)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            torch.testing.assert_close(module(x), 2 * x)
            torch.testing.assert_close(module(x), 2 * x)
        module(x)
    assert [choice.eager for choice in trial.choices.values()] == [True, False]
    assert "our result differs" in trial.lines()[1]


def _slow_if_long(x: torch.Tensor) -> torch.Tensor:
    time.sleep(0.015 if len(x) > 10 else 0.0)
    return x * 2


def test_gradients_stay_with_the_host() -> None:
    module, x = Host(0.002), torch.randn(3, requires_grad=True)
    trial, _ = tried(module, ours(0.0))
    module(x).sum().backward()
    assert torch.equal(x.grad, torch.full((3,), 2.0)) and not trial.choices  # type: ignore[arg-type]


@pytest.mark.parametrize("eager_first", [False, True])
@pytest.mark.parametrize("compiled", [False, True])
def test_compiled_code_keeps_ours_where_measured(
    compiled: bool, eager_first: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """eager_first: calls before the compilation, in which ours has lost."""
    monkeypatch.setattr(trials, "_measured", lambda *_: trials.Choice(False, False, "the host's"))
    monkeypatch.setattr(traced, "decide", lambda *_: (True, ""))
    module, x = Host(0.0), torch.randn(3)
    tried(module, ours(0.0, factor=3), compiled)
    with torch.no_grad():
        assert not eager_first or torch.equal(module(x), x * 2)
        module.compile(backend="eager")
        assert torch.equal(module(x), x * (3 if compiled else 2))
    torch.compiler.reset()


GRAPHS = [
    ({"backend": "inductor"}, "", False),
    ({"mode": "reduce-overhead"}, "", True),
    ({"mode": "max-autotune"}, "", True),
    ({"mode": "max-autotune-no-cudagraphs"}, "", False),
    ({"options": {"triton.cudagraphs": True}}, "", True),
    ({"backend": "eager"}, "", False),
    ({"backend": "eager"}, "1", True),
]


@pytest.mark.parametrize(("how", "variable", "graphs"), GRAPHS)
def test_each_compiled_mode_is_decided(
    how: dict[str, Any], variable: str, graphs: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    from torch._inductor import compile_fx

    monkeypatch.setattr(compile_fx, "compile_fx", lambda graph, *_, **__: graph.forward)
    monkeypatch.setattr(traced, "decide", lambda decided, call, *_: (call.graphs, ""))
    monkeypatch.setenv("FASTKERNELS_GRAPHS", variable)
    module, x = Host(0.0), torch.randn(3)
    tried(module, ours(0.0, factor=3), compiled=True)
    module.compile(**how)
    with torch.no_grad():
        assert torch.equal(module(x), x * (3 if graphs else 2))
    torch.compiler.reset()


def vit() -> tuple[nn.Module, Callable[[], torch.Tensor]]:
    torch.manual_seed(0)
    model = timm.create_model("vit_small_patch16_dinov3", **VIT).eval()
    images = torch.randn(2, 3, 32, 32)

    def run() -> torch.Tensor:
        with torch.no_grad():
            return model(images)

    return model, run


def test_default_patch_keeps_what_wins_and_undoes() -> None:
    model, run = vit()
    before, classes = run(), [type(m) for m in model.modules()]
    report = fastkernels.patch(model)
    planned = {r.op: r.modules for r in report.active}
    assert planned == {
        "layer_norm": 5, "gelu": 2, "attention_dense": 2, "patch_embedding": 1, "gated_residual": 2,
    }  # fmt: skip
    torch.testing.assert_close(run(), before, atol=1e-4, rtol=1e-4)
    report.refresh()
    for row in report.rows:
        if row.op not in planned:
            continue
        lost = [r["modules"] for r in row.reasons if r["kind"] == "left_to_host"]
        assert row.modules + sum(lost) == planned[row.op] and row.measured
        assert all(" the host's (" in line or " ours (" in line for line in row.measured)
        assert row.calls <= row.modules  # a measurement is no call
    ran = run()
    assert torch.equal(run(), ran)  # decided once
    kept = sum(hasattr(type(m), "fastkernels") for m in model.modules())
    assert kept == sum(r.modules for r in report.active)
    report.undo()
    assert [type(m) for m in model.modules()] == classes and torch.equal(run(), before)
    assert not any(OWN in vars(m) for m in model.modules())


def test_measurements_are_no_calls(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of modules inside of others, too, which the measurements of these call."""

    def measured(theirs: Callable[[], Any], ours: Callable[[], Any], *_: Any) -> trials.Choice:
        for _ in range(3):
            theirs(), ours()
        return trials.Choice(True, True, "ours")

    monkeypatch.setattr(trials, "_measured", measured)
    model, run = vit()
    with fastkernels.patch(model) as report:
        run()
        first = {(row.op, row.host_class): row.calls for row in report.refresh().active}
        run()
        both = {(row.op, row.host_class): row.calls for row in report.refresh().active}
    assert sum(first.values()) and both == {key: 2 * calls for key, calls in first.items()}


def test_flux_decides_about_processors_and_norms() -> None:
    diffusers = pytest.importorskip("diffusers")
    torch.manual_seed(0)
    model = diffusers.FluxTransformer2DModel(
        in_channels=16, num_layers=1, num_single_layers=1, attention_head_dim=16, num_attention_heads=2,
        joint_attention_dim=32, pooled_projection_dim=32, axes_dims_rope=(4, 4, 8), guidance_embeds=True,
    ).eval()  # fmt: skip
    processors = list(model.attn_processors.values())
    given = [torch.randn(1, *n) for n in ((16, 16), (8, 32), (32,))]
    at = {"img_ids": torch.arange(48.0).view(16, 3), "txt_ids": torch.zeros(8, 3), "guidance": torch.ones(1)}

    def run() -> torch.Tensor:
        with torch.no_grad():
            return model(*given, torch.tensor([0.5]), **at).sample

    before = run()
    with fastkernels.patch(model) as report:
        torch.testing.assert_close(run(), before, atol=1e-4, rtol=1e-4)
        decided = {(r.op, r.host_class) for r in report.refresh().rows if r.measured}
        assert {
            ("attention_dense", "FluxAttnProcessor"), ("ada_layer_norm", "AdaLayerNormZero"),
            ("timestep_embedding", "Timesteps"),
        } <= decided  # fmt: skip
        assert not any("our result" in line or "Error" in line for r in report.rows for line in r.measured)
    assert all(a is b for a, b in zip(model.attn_processors.values(), processors, strict=True))
    assert torch.equal(run(), before)


def test_slow_kernel_loses_everywhere() -> None:
    model, run = vit()
    before = run()
    usual = gelu.providers[-1].fn

    def slow(*args: Any) -> torch.Tensor:
        time.sleep(0.005)
        return usual(*args)

    gelu.set_candidate(slow)
    try:
        with fastkernels.patch(model) as report:
            run()
            (row,) = [r for r in report.refresh().rows if r.op == "gelu"]
            assert row.state == "off" and "2 left to the host: not faster than the host's" in row.reason
            assert row.modules == 0 and row.calls == 0
            torch.testing.assert_close(run(), before, atol=1e-4, rtol=1e-4)
    finally:
        gelu.set_candidate(None)


@pytest.mark.parametrize("patched_first", [True, False])
def test_compiled_code_stays_the_hosts(patched_first: bool) -> None:
    model, run = vit()
    before, seen = run(), []

    def backend(graph: Any, inputs: Any) -> Any:
        seen.extend(str(node.target) for node in graph.graph.nodes)
        return graph

    for block in () if patched_first else model.blocks:  # type: ignore[union-attr]
        block.compile(backend=backend, fullgraph=True)
    with fastkernels.patch(model) as report:
        for block in model.blocks if patched_first else ():  # type: ignore[union-attr]
            block.compile(backend=backend, fullgraph=True)
        torch.testing.assert_close(run(), before, atol=1e-5, rtol=1e-5)
        assert seen and not any("fastkernels" in name for name in seen)
        left = {r.op: r.left for r in report.refresh().rows if r.left}
        assert left["gelu"] == {"torch.compile fuses the host's code": 1}  # two blocks share the code
    torch.compiler.reset()


@pytest.mark.parametrize("ours", [True, False])
def test_compiled_mlp_with_tanh_is_ours_if_it_wins(ours: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(traced, "why_not", lambda device: None)
    monkeypatch.setattr(traced, "_how", lambda: ({}, "eager"))
    monkeypatch.setattr(traced, "decide", lambda *_: (ours, "slower"))
    sizes = {"img_size": 32, "embed_dim": 64, "depth": 1, "num_heads": 2, "num_classes": 0}
    model, seen = timm.create_model("vit_tiny_patch16_224", act_layer="gelu_tanh", **sizes).eval(), []

    def backend(graph: Any, inputs: Any) -> Any:
        seen.extend(str(node.target) for node in graph.graph.nodes)
        return graph

    with fastkernels.patch(model):
        model.blocks[0].compile(backend=backend, fullgraph=True)
        with torch.no_grad():
            model(torch.randn(1, 3, 32, 32))
    found = {n.split(".")[1] for n in seen if "fastkernels" in n}
    assert found == ({"attention_dense", "layer_norm", "linear_gelu", "linear_products"} if ours else set())
    torch.compiler.reset()


def test_requested_ops_run_unmeasured() -> None:
    model, run = vit()
    with fastkernels.patch(model, ops=["gelu"]) as report:
        run()
        (row,) = report.refresh().active
        assert (row.modules, row.calls, row.measured) == (2, 2, [])


def test_without_verify_defaults_are_as_on_a_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FASTKERNELS_VERIFY", "0")
    model, _ = vit()
    with fastkernels.patch(model) as report:
        assert {r.op for r in report.active} == {"layer_norm", "gelu"}
        assert not any(r.measured for r in report.rows)


def test_replaced_processor_is_not_put_back() -> None:
    from fk_integrations.live.live_class import replace_attribute

    class Processor:
        def __call__(self, attn: Any, x: torch.Tensor) -> torch.Tensor:
            return x * 2

    class Slow:
        live_methods = ("__call__",)

        def __call__(self, attn: Any, x: torch.Tensor) -> torch.Tensor:
            time.sleep(0.005)
            return x * 2

    holder: Any = nn.Linear(2, 2)
    holder.processor = Processor()
    trial = Trial("attention_dense", Processor)
    assert replace_attribute(holder, "processor", Slow, ("__call__",), Journal(), trial=trial) is None
    held, holder.processor = holder.processor, SimpleNamespace()
    with torch.no_grad():
        held(holder, torch.randn(3))
    assert isinstance(holder.processor, SimpleNamespace) and trial.restored == 1
