"""Code that torch.compile traces is the faster side's, by times of both compiled; measured here on the CPU."""

from __future__ import annotations

import json
import weakref
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from fk_integrations.core.journal import Journal
from fk_integrations.live import traced, versus
from fk_integrations.live.live_class import live_class
from fk_integrations.live.trials import Trial, sizes_of
from torch import nn

from fastkernels.overrides.activation.gelu import gelu
from fastkernels.verify.measure import Ratio


@pytest.fixture(autouse=True)
def on_this_cpu(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[None]:
    """Measure on the CPU, and keep choices in a folder of the test."""
    monkeypatch.setattr(traced, "why_not", lambda device: None)
    monkeypatch.setattr(traced, "CPU_ROUNDS", 21)  # the interval leaves out four of each end
    monkeypatch.setenv("FASTKERNELS_CACHE", str(tmp_path))
    traced.cache.compile_cache.folder.cache_clear()
    yield
    monkeypatch.undo()
    torch.compiler.reset()
    traced.cache.compile_cache.folder.cache_clear()


class Host(nn.Module):
    """Computes gelu(3 x W), in more or fewer of the host's products."""

    def __init__(self, products: int = 1):
        super().__init__()
        self.register_buffer("weight", torch.randn(256, 256, generator=torch.Generator().manual_seed(0)) / 16)
        self.products = products
        self.eval()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.gelu(many(x, self.weight, self.products))


def many(x: torch.Tensor, weight: torch.Tensor, products: int) -> torch.Tensor:
    """3 x W, from `products` more products of zeros."""
    out = 3 * (x @ weight)
    for i in range(products):
        out = out + (x * 0 * i) @ weight
    return out


def ours(products: int, factor: float = 1.0) -> type:
    def forward(self: Any, x: torch.Tensor) -> torch.Tensor:
        return gelu(factor * many(x, self.weight, products), "none")

    return type("Ours", (nn.Module,), {"forward": forward})


def tried(module: nn.Module, cls: type, session: traced.Traced | None = None) -> tuple[Trial, Journal]:
    trial, journal = Trial("gelu", Host), Journal()
    trial.compiled = traced.Decided(session or traced.Traced("timm", "0"))
    journal.set_class(module, live_class(Host, cls, trial=trial))
    trial.begin(module, sizes_of(module), lambda: setattr(module, "__class__", Host), journal)
    return trial, journal


def run(module: nn.Module, rows: int = 96, backend: Any = "aot_eager", **how: Any) -> torch.Tensor:
    module.compile(backend=backend, fullgraph=True, **how)
    with torch.no_grad():
        return module(torch.ones(rows, 256))


@pytest.mark.parametrize(
    ("host", "cls", "won", "text"),
    [
        (12, ours(0), True, "ours ("),
        (0, ours(12), False, "the host's ("),
        (12, ours(0, factor=2.0), False, "the host's; our result differs by"),
    ],
    ids=["faster", "slower", "wrong"],
)
def test_faster_side_is_compiled(host: int, cls: type, won: bool, text: str) -> None:
    module = Host(host)
    expected, calls = module(torch.ones(96, 256)), gelu.calls
    trial, journal = tried(module, cls)
    out = run(module)
    torch.testing.assert_close(out, expected)
    (line,) = trial.lines()
    assert line.startswith(f"gelu Host float32 [96, 256], compiled without CUDA graphs: {text}")
    assert gelu.calls == calls + won  # a measurement is no call
    journal.undo()
    assert type(module) is Host


def test_choice_is_kept_for_the_next_process(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    times = lambda lanes, calls, device, rounds: [[2.0] * rounds, [1.0] * rounds]  # noqa: E731
    monkeypatch.setattr(traced, "interleaved", times)
    first, second = (traced.Traced("timm", "0") for _ in range(2))
    module = Host(12)
    tried(module, ours(0), first)
    run(module)
    torch.compiler.reset()
    (file,) = (tmp_path / traced.cache.SIDES).glob("*.json")
    (side,) = json.loads(file.read_text())["entries"].values()
    assert side["ours"] and first.seconds > 0
    other = Host(12)
    trial, _ = tried(other, ours(0), second)
    run(other)
    assert second.seconds == 0 and trial.compiled.ours and side["text"] in trial.lines()[0]  # type: ignore[union-attr]


def test_damaged_file_is_measured_again(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    session = traced.Traced("timm", "0")
    session.kept(torch.device("cpu"))
    session.keep("a call", {"ours": True, "text": "ours"})
    (file,) = (tmp_path / traced.cache.SIDES).glob("*.json")
    assert traced.Traced("timm", "0").kept(torch.device("cpu")) == {"a call": {"ours": True, "text": "ours"}}
    for damaged in ("{", "[]", '{"facts": {}, "entries": {}}', file.read_text().replace("true", '"yes"')):
        caplog.clear()
        file.write_text(damaged)
        assert traced.Traced("timm", "0").kept(torch.device("cpu")) == {}
        assert "measured again" in caplog.text or damaged == "[]"


def test_choices_add_up_in_the_folder_that_can_be_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is another one than the folder that is read where that cannot be written."""
    monkeypatch.setattr(traced.cache.compile_cache, "folder", lambda name: tmp_path)
    of = {"chip": "cpu", "host": "timm", "host_version": "0"}
    for name in ("one", "two"):
        traced.cache.keep_side(name, {"ours": True, "text": name}, of)
    (file,) = tmp_path.glob("*.json")
    assert set(json.loads(file.read_text())["entries"]) == {"one", "two"}


def test_shapes_and_sizes_are_told_apart() -> None:
    module = Host(12)
    trial, _ = tried(module, ours(0))
    run(module, 96)
    run(module, 8)
    run(module, 96)
    assert len(trial.lines()) == 2  # [96, 256] and [8, 256]


def test_autocast_is_told_apart() -> None:
    """An op of ours may not know of it: its result then has another dtype than the host's."""

    def forward(self: Any, x: torch.Tensor) -> torch.Tensor:
        with torch.autocast("cpu", enabled=False):
            return gelu(3 * (x @ self.weight), "none")

    module = Host(12)
    trial, _ = tried(module, type("Ours", (nn.Module,), {"forward": forward}))
    assert run(module).dtype == torch.float32
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert run(module).dtype == torch.bfloat16
    plain, cast = trial.lines()
    assert ": ours (" in plain and "autocast to bfloat16" in cast and "the host's; our result" in cast


def test_nested_modules_decide_first() -> None:
    class Outer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = Host(12)
            self.eval()

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.inner(x) + 1

    def forward(self: Any, x: torch.Tensor) -> torch.Tensor:
        return self.inner(x) + many(x, self.inner.weight, 16) * 0 + 1

    module, session = Outer(), traced.Traced("timm", "0")
    inner, _ = tried(module.inner, ours(0), session)
    outer = Trial("gelu", Outer, traced.Decided(session))
    journal = Journal()
    slow = type("Ours", (nn.Module,), {"forward": forward})
    journal.set_class(module, live_class(Outer, slow, trial=outer))
    outer.begin(module, sizes_of(module), lambda: None, journal)
    before = gelu.calls
    out = run(module)
    torch.testing.assert_close(
        out, torch.nn.functional.gelu(many(torch.ones(96, 256), module.inner.weight, 0)) + 1
    )
    assert inner.compiled.ours and not outer.compiled.ours  # type: ignore[union-attr]
    assert gelu.calls == before + 1


@pytest.mark.parametrize("case", ["backend", "training", "memory", "limit", "error", "offloaded"])
def test_unmeasured_code_is_the_hosts_with_a_reason(case: str, monkeypatch: pytest.MonkeyPatch) -> None:
    module, backend = Host(12), "aot_eager"
    trial, _ = tried(module, ours(0))
    session = trial.compiled.session  # type: ignore[union-attr]
    expected = {
        "backend": "backend mine: measured are inductor, aot_eager, eager and cudagraphs",
        "training": "the module is in training mode",
        "memory": "too little free memory",
        "limit": "the limit of 85 s was reached; the next start measures the rest",
        "error": "RuntimeError: no kernel",
        "offloaded": "weights are on",
    }[case]

    def mine(graph: Any, inputs: Any) -> Any:
        return graph

    def fails(*_: Any, **__: Any) -> Any:
        raise (torch.OutOfMemoryError("no memory") if case == "memory" else RuntimeError("no kernel"))

    module.train(case == "training")
    session.seconds = 86.0 if case == "limit" else 0.0
    if case in ("memory", "error"):
        monkeypatch.setattr(traced, "interleaved", fails)
    if case == "offloaded":
        module.other = nn.Linear(2, 2, device="meta")
    before = gelu.calls
    out = run(module, backend=mine if case == "backend" else backend)
    torch.testing.assert_close(out, torch.nn.functional.gelu(many(torch.ones(96, 256), module.weight, 0)))
    (line,) = trial.lines()
    assert expected in line and "the host's; not measured" in line and gelu.calls == before
    assert not versus.MEASURING


def test_measurement_that_fails_is_not_repeated(monkeypatch: pytest.MonkeyPatch) -> None:
    tries: list[int] = []

    def fails(*_: Any) -> Any:
        tries.append(1)
        raise RuntimeError("no kernel")

    monkeypatch.setattr(traced, "interleaved", fails)
    blocks = nn.Sequential(Host(12), Host(12)).eval()
    trial = Trial("gelu", Host, traced.Decided(traced.Traced("timm", "0")))
    for block in blocks:
        block.__class__ = live_class(Host, ours(0), trial=trial)
        trial.begin(block, sizes_of(block), lambda: None, Journal())
    run(blocks)
    assert len(tries) == 1


def test_failed_measurement_leaves_no_tensor(monkeypatch: pytest.MonkeyPatch) -> None:
    left: list[weakref.ref[torch.Tensor]] = []

    def fails(lanes: Any, *_: Any) -> Any:
        left.extend(weakref.ref(lane.args[1]) for lane in lanes)
        raise RuntimeError("no kernel")

    monkeypatch.setattr(traced, "interleaved", fails)
    module = Host(12)
    trial, _ = tried(module, ours(0))
    run(module)
    assert "no kernel" in trial.lines()[0]
    assert len(left) == 2 and all(found() is None for found in left)


def test_without_a_gpu_the_reason_says_what_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()
    reason = traced.why_not(torch.device("cpu"))
    assert reason is not None and "CUDA GPU" in reason and "requested by name" in reason
    assert traced.why_not(torch.device("cuda")) is None


@pytest.mark.parametrize(
    ("gpu", "cpu", "waits", "won"),
    [
        ((1.2, 1.1), (0.5, 0.4), False, True),  # the CPU is far ahead of the GPU
        ((1.2, 1.1), (0.5, 0.4), True, False),
        ((1.2, 1.1), (1.0, 0.9), True, True),
        ((1.0, 0.9), (1.2, 1.1), True, True),
        ((0.98, 0.9), (1.2, 1.1), True, False),
        ((1.05, 0.99), (1.05, 0.99), True, False),  # a tie stays the host's
    ],
)
def test_without_graphs_neither_time_may_be_longer(
    gpu: tuple[float, float], cpu: tuple[float, float], waits: bool, won: bool
) -> None:
    ratios = (Ratio(value, low, 2 * value - low) for value, low in (gpu, cpu))
    assert traced.wins_without_graphs(*ratios, waits) == won


def test_arguments_are_rebuilt_with_their_strides_and_aliases() -> None:
    device = torch.device("cpu")
    leaf = traced.Leaf(0, (2, 3, 4), (1, 8, 2), torch.float32, device)
    flags = traced.Leaf(1, (3, 5), (0, 1), torch.bool, device)
    made = traced._made(((leaf, leaf), {"mask": flags, "n": 3}), {}, torch.Generator())
    (a, b), more = made
    assert a is b and a.stride() == (1, 8, 2) and a.std() > 0
    assert more["mask"].all() and more["mask"].stride() == (0, 1) and more["n"] == 3


@pytest.mark.parametrize(
    "dtype",
    [
        torch.complex64, torch.complex128, torch.bfloat16, torch.float8_e4m3fn, torch.float8_e5m2,
        torch.float8_e4m3fnuz, torch.float8_e8m0fnu,
    ],
    ids=str,
)  # fmt: skip
def test_arguments_of_any_float_are_random(dtype: torch.dtype) -> None:
    leaf = traced.Leaf(0, (7, 9), (9, 1), dtype, torch.device("cpu"))
    made = traced._made(leaf, {}, torch.Generator().manual_seed(0))
    parts = (made.real, made.imag) if dtype.is_complex else (made,)
    for values in (part.double() for part in parts):
        assert len(values.unique()) > 5 and values.isfinite().all() and values.abs().max() <= 16


def test_bytes_of_two_small_floats_are_random() -> None:
    leaf = traced.Leaf(0, (7, 9), (9, 1), torch.float4_e2m1fn_x2, torch.device("cpu"))
    made = traced._made(leaf, {}, torch.Generator().manual_seed(0))
    assert len(made.view(torch.uint8).unique()) > 20


def test_layers_of_one_kind_share_a_choice() -> None:
    first, second = Host(1), Host(1)
    first.layer_idx, second.layer_idx = 0, 1
    assert traced._identity(first) == traced._identity(second) != traced._identity(Host(2))


@pytest.mark.gpu
@pytest.mark.parametrize("mode", ["default", "reduce-overhead"])
def test_timm_encoder_is_measured_on_the_gpu(mode: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A whole patch: each compiled class of a ViT has a decision with times, within the limit, and undo is exact."""
    import fastkernels

    timm = pytest.importorskip("timm")
    monkeypatch.undo()
    model = timm.create_model("vit_base_patch16_224").cuda().bfloat16().eval()
    images = torch.randn(8, 3, 224, 224, device="cuda", dtype=torch.bfloat16)
    with torch.inference_mode():
        before = model(images)
        report = fastkernels.patch(model)
        out = torch.compile(model, mode=mode, fullgraph=True)(images).clone()
        lines = [line for row in report.refresh().rows for line in row.measured if "compiled" in line]
        assert any("Block" in line and "MiB more" in line for line in lines)
        assert not any("not measured" in line for line in lines), lines
        assert (
            torch.nn.functional.cosine_similarity(out.float().flatten(), before.float().flatten(), dim=0)
            > 0.999
        )
        report.undo()
        torch.compiler.reset()
        torch.testing.assert_close(model(images), before)
