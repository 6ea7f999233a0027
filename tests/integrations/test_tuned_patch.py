"""Ops that go into a host by default only where a tuned table lists ours as faster."""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from fk_integrations.core.adapter import Adapter
from fk_integrations.patching import apply as apply_module
from fk_integrations.patching import choose
from fk_integrations.patching.apply import Patched, apply, plan
from torch import nn

from fastkernels.core import registry, tuning
from fastkernels.core.reasons import Kind
from fastkernels.core.tuning import Entry, Table
from fastkernels.overrides.linear.vllm import VllmUnquantizedLinearMethod
from fastkernels.overrides.quant.quantize_fp8 import quantize_fp8
from fastkernels.patch import PatchError, Request

PATH = "fastkernels.overrides.linear.vllm:VllmUnquantizedLinearMethod"
WEIGHTS = {"fast": (8, 16), "slow": (24, 16), "new": (8, 8)}  # name: (N, K)


class Host(Adapter):
    """A host whose linear layers are those of the model in this file."""

    host, version = "vllm", "0.33.0"

    def targets(self, spec: Any, model: Any) -> list[Any]:
        return [
            dataclasses.replace(t, path=PATH) for t in super().targets(spec, model) if spec.name == "linear"
        ]

    def unknown(self, target: Any, host_class: Any) -> str | None:
        return None


def entry(name: str, provider: str | None, **more: Any) -> Entry:
    n, k = WEIGHTS[name]
    shape = {"N": n, "K": k, "dtype": "float32"}
    return Entry("linear", shape, {"M": 4}, provider, baseline="onednn", run="r1", **more)


FASTER = entry("fast", "reference", speedup=1.3, ci95=(1.2, 1.4))


@pytest.fixture
def model() -> nn.Module:
    found = nn.Module()
    for name, (n, k) in WEIGHTS.items():
        layer: Any = nn.Module()
        layer.weight = nn.Parameter(torch.randn(n, k), requires_grad=False)
        layer.quant_method = VllmUnquantizedLinearMethod()
        found.add_module(name, layer)
    return found


@pytest.fixture(autouse=True)
def table(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A CPU's table with one shape where ours is faster and one where it is not."""
    path = tmp_path / "own.json"
    path.write_text(Table("cpu", {"r1": {}}, (FASTER, entry("slow", None))).to_json())
    monkeypatch.setenv("FASTKERNELS_TUNED", str(path))
    tuning._by_op.cache_clear()
    registry.get("linear").op.reset()
    yield path
    tuning._by_op.cache_clear()
    monkeypatch.undo()
    registry.get("linear").op.reset()


def patched(model: nn.Module, **request: Any) -> Patched:
    return apply(Host(), model, Request("patch", **request))


@pytest.mark.parametrize("strict", [False, True])
def test_only_modules_where_ours_is_faster(model: Any, strict: bool) -> None:
    before = model.fast.quant_method
    found = patched(model, strict=strict)
    (row,) = found.rows
    assert (row.state, row.modules) == ("active", 1)
    assert row.reason == (
        "1 left to the host: no kernel of ours is faster at N=24 K=16 dtype=float32 on cpu; "
        "1 left to the host: N=8 K=8 dtype=float32 is not tuned on cpu: "
        "`fk-bench tune linear --shape N=8,K=8,dtype=float32` would measure it"
    )
    assert model.fast.quant_method is not before
    x = torch.randn(3, 16)
    expected = (x.double() @ model.fast.weight.double().T).float()
    torch.testing.assert_close(model.fast.quant_method.apply(model.fast, x), expected)
    assert found.report()[0]["calls"] == 1
    found.undo()
    assert model.fast.quant_method is before


def test_requested_op_goes_in_whatever_the_table_lists(model: Any) -> None:
    (row,) = patched(model, ops=("linear",)).rows
    assert (row.modules, row.reason) == (3, "")


def test_reason_of_a_freed_weight_comes_before_its_shape(model: Any) -> None:
    """vLLM packs the weights of linear layers on a CPU."""
    model.new.weight.data = torch.empty(0)
    (row,) = patched(model).rows
    assert row.modules == 1 and "shape of its calls" not in row.reason
    assert (
        "1 left to the host: weight has shape (0,): the host packed or freed it after loading" in row.reason
    )


def test_cpu_without_a_table_leaves_all_to_the_host(model: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """The reason that the op does not serve a module comes before the missing table."""
    monkeypatch.delenv("FASTKERNELS_TUNED")
    model.new.weight.data = torch.empty(0)
    before = [m.quant_method for m in model.children()]
    assert list(plan(Host(), Request("patch"), model)) == []
    (row,) = patched(model, strict=True).rows
    assert (row.op, row.state, row.modules) == ("linear", "off", 0)
    assert row.reason == (
        "2 left to the host: no tuned table of this device (cpu) lists a kernel of ours; "
        "1 left to the host: weight has shape (0,): the host packed or freed it after loading"
    )
    with pytest.raises(PatchError, match=r"nothing to patch: linear .*: FASTKERNELS_DISABLE"):
        patched(model, disable=("linear",))
    assert [m.quant_method for m in model.children()] == before


def test_untuned_chip_gets_one_warning(
    model: Any, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(apply_module, "_device", lambda model: "cuda")
    monkeypatch.setattr(
        tuning, "torch", SimpleNamespace(cuda=SimpleNamespace(get_device_name=lambda: "NVIDIA X"))
    )
    before = [m.quant_method for m in model.children()]
    with caplog.at_level(logging.WARNING, "fastkernels"):
        (row,) = patched(model, strict=True).rows
    assert row.kinds == [Kind.UNTUNED]
    assert row.reason.startswith("left to the host: not tuned on NVIDIA X: `fk-bench tune linear` would")
    lines = [r.getMessage() for r in caplog.records if "not tuned" in r.getMessage()]
    assert lines == ["linear: not tuned on NVIDIA X: `fk-bench tune linear` would measure it"]
    assert [m.quant_method for m in model.children()] == before


def test_a_damaged_table_fails_the_patch_and_changes_nothing(model: Any, table: Path) -> None:
    table.write_text(table.read_text().replace('"cpu"', "3"))
    before = [m.quant_method for m in model.children()]
    with pytest.raises(PatchError, match=f"TableError: tuned table {table}: it needs `chip`"):
        patched(model)
    assert [m.quant_method for m in model.children()] == before


# -- a quantized layer's kernel object


class Fp8Host(Adapter):
    """A host whose layers hold a kernel object in their method, like vLLM's with CUTLASS."""

    host, version = "vllm", "0.33.0"

    def targets(self, spec: Any, model: Any) -> list[Any]:
        path = f"{__name__}:HostKernel"
        found = [t for t in super().targets(spec, model) if t.seam == "kernel"]
        return [dataclasses.replace(t, path=path) for t in found]

    def unknown(self, target: Any, host_class: Any) -> str | None:
        return None


class HostKernel:
    """Like CutlassFP8ScaledMMLinearKernel: quantizes x, then calls apply_scaled_mm, which is missing here."""

    def __init__(self, outputs: int, per_tensor: bool) -> None:
        group = SimpleNamespace(is_per_tensor=lambda: per_tensor)
        key = SimpleNamespace(scale=SimpleNamespace(group_shape=group))
        self.config = SimpleNamespace(activation_quant_key=key, out_dtype=torch.float16)
        self.logical_output_size = outputs

    def apply_weights(self, layer: Any, x: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        q, scale = quantize_fp8(x, None, -1)
        tensors = {"A": q, "B": layer.weight, "As": scale, "Bs": layer.weight_scale, "bias": bias}
        shape = [*x.shape[:-1], layer.weight.shape[1]]
        return self.apply_scaled_mm(**tensors, out_dtype=torch.float16, output_shape=shape)  # type: ignore[attr-defined]


def fp8_layer(n: int, k: int, holder: str = "quant_method", padded: int = 0, per_tensor: bool = False) -> Any:
    layer: Any = nn.Module()
    weight, scale = quantize_fp8(torch.randn(n + padded, k), None, -1)
    layer.weight = nn.Parameter(weight.t(), requires_grad=False)
    layer.weight_scale = nn.Parameter(scale[:1, 0] if per_tensor else scale, requires_grad=False)
    setattr(layer, holder, SimpleNamespace(fp8_linear=HostKernel(n, per_tensor)))
    return layer


def test_fp8_layers_that_no_table_lists_are_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("FASTKERNELS_VERIFY", raising=False)
    model: Any = nn.Module()
    model.first, model.second, model.wide = (fp8_layer(n, 64) for n in (48, 48, 80))
    found = choose.points_of(Fp8Host(), model, Request("patch"), "cpu")
    assert {(point.op, point.shape[0], len(point.modules)) for point in found} == {
        ("linear_fp8", 48, 2), ("linear_fp8", 80, 1),
    }  # fmt: skip
    assert {point.sizes[0] for point in found} >= {1, 8, 32, 64}


def test_a_kernel_object_is_replaced_where_the_table_says_so(table: Path) -> None:
    shape = {"N": 48, "K": 64, "block": 1, "out_dtype": "float16"}
    faster = {"speedup": 1.3, "ci95": (1.2, 1.4), "baseline": "cutlass", "run": "r1"}
    table.write_text(
        Table("cpu", {"r1": {}}, (Entry("linear_fp8", shape, {"M": 4}, "reference", **faster),)).to_json()
    )
    tuning._by_op.cache_clear()
    model: Any = nn.Module()
    model.method, model.scheme = fp8_layer(48, 64), fp8_layer(48, 64, "scheme")
    model.padded, model.new = fp8_layer(40, 64, padded=8), fp8_layer(48, 80)
    model.static, model.other = fp8_layer(48, 64, per_tensor=True), nn.Linear(64, 48)
    before = {name: (m.quant_method if name != "scheme" else m.scheme).fp8_linear for name, m in model.named_children()
              if name != "other"}  # fmt: skip
    found = apply(Fp8Host(), model, Request("patch"))
    (row,) = found.rows
    assert (row.op, row.state, row.modules) == ("linear_fp8", "active", 2)
    assert "1 unsupported: the host padded its weight from (64, 40) to (64, 48)" in row.reason
    for text in (
        "N=48 K=80 block=1 out_dtype=float16 is not tuned on cpu",
        "N=48 K=64 block=0 out_dtype=float16",
    ):
        assert f"1 left to the host: {text}" in row.reason
    x = torch.randn(3, 64)
    for layer, holder in ((model.method, model.method.quant_method), (model.scheme, model.scheme.scheme)):
        kernel, weight = holder.fp8_linear, layer.weight.float() * layer.weight_scale.t()
        assert isinstance(kernel, HostKernel) and kernel.logical_output_size == 48
        got = kernel.apply_weights(layer, x)
        assert got.dtype == torch.float16 and got.shape == (3, 48)
        error = (got.float() - x @ weight).pow(2).mean().sqrt() / (x @ weight).pow(2).mean().sqrt()
        assert error < 0.05
    assert found.report()[0]["calls"] == 2
    found.undo()
    for name, kernel in before.items():
        holder = getattr(model, name)
        assert (holder.quant_method if name != "scheme" else holder.scheme).fp8_linear is kernel


# -- a quantized layer's scheme


class SchemeHost(Fp8Host):
    """A host whose layers hold a scheme, like SGLang's with compressed-tensors."""

    host, version = "sglang", "0.5.23"

    def targets(self, spec: Any, model: Any) -> list[Any]:
        path = f"{__name__}:HostScheme"
        found = [t for t in Adapter.targets(self, spec, model) if t.seam == "scheme"]
        return [dataclasses.replace(t, path=path) for t in found]


class HostScheme:
    """Like CompressedTensorsW8A8Fp8, whose products need CUDA."""

    def __init__(self, strategy: str = "channel", static: bool = False) -> None:
        self.strategy, self.is_static_input_scheme = strategy, static
        self.weight_block_size = [128, 128] if strategy == "block" else None

    def apply_weights(self, layer: Any, x: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        HOST_CALLS.append((self, layer, x, bias))
        return torch.zeros(())


HOST_CALLS: list[Any] = []
SCHEME_ENTRIES = tuple(
    Entry("linear_fp8", {"N": 48, "K": 64, "block": 1, "out_dtype": "bfloat16"}, {"M": m}, provider,
          baseline="sgl_kernel", run="r1", **more)
    for m, provider, more in (
        (8, "reference", {"speedup": 1.3, "ci95": (1.2, 1.4)}), (32, "sgl_kernel", {}), (64, None, {}),
    )
)  # fmt: skip


@pytest.fixture
def scheme_table(table: Path) -> Iterator[None]:
    """Ours is faster up to 8 tokens; the host is faster up to 32 and 64; larger sizes are not listed."""
    table.write_text(Table("cpu", {"r1": {}}, SCHEME_ENTRIES).to_json())
    tuning._by_op.cache_clear()
    HOST_CALLS.clear()
    ops = [registry.get(name).op for name in ("linear_fp8", "quantize_fp8")]
    yield
    for op in ops:
        op.set_candidate(None)
        op.reset()


def scheme_layer(n: int, k: int, *scheme: Any, rows: bool = False) -> Any:
    layer = fp8_layer(n, k)
    del layer.quant_method
    layer.scheme, layer.orig_dtype = HostScheme(*scheme), torch.bfloat16
    if rows:  # like the host's shuffled weights for another device
        layer.weight = nn.Parameter(layer.weight.contiguous(), requires_grad=False)
    return layer


@pytest.mark.usefixtures("scheme_table")
def test_a_scheme_is_replaced_where_the_table_says_so() -> None:
    model: Any = nn.Module()
    model.ours, model.new = scheme_layer(48, 64), scheme_layer(48, 80)
    model.rows = scheme_layer(48, 64, rows=True)
    model.tensor, model.static = scheme_layer(48, 64, "tensor"), scheme_layer(48, 64, "channel", True)
    model.block, model.taken = scheme_layer(48, 64, "block"), scheme_layer(48, 64)
    model.taken.scheme.apply_weights = lambda *args: None
    model.other = nn.Linear(64, 48)
    before = {name: m.scheme for name, m in model.named_children() if name != "other"}
    found = apply(SchemeHost(), model, Request("patch"))
    (row,) = found.rows
    assert (row.op, row.state, row.modules) == ("linear_fp8", "active", 1)
    for text in (
        "1 unsupported: weight (64, 48) has strides (48, 1) and 48 scales",
        "1 unsupported: its scheme.apply_weights was replaced by other code",
        "1 left to the host: N=48 K=80 block=1 out_dtype=bfloat16 is not tuned on cpu",
        "1 left to the host: the scale of x is given",
        "1 left to the host: its weight has scales by block, not by channel",
    ):
        assert text in row.reason
    changed = [name for name, scheme in before.items() if getattr(model, name).scheme is not scheme]
    assert changed == ["ours"]
    layer = model.ours
    assert isinstance(layer.scheme, HostScheme) and vars(layer.scheme) == vars(before["ours"])
    x, bias = torch.randn(2, 3, 64).bfloat16(), torch.randn(48).bfloat16()
    x[0, 0] = 0
    expected = x.float() @ (layer.weight.float() * layer.weight_scale.t()) + bias.float()
    got = layer.scheme.apply_weights(layer, x, bias)
    assert got.dtype == torch.bfloat16 and got.shape == (2, 3, 48)
    assert (got.float() - expected).pow(2).mean().sqrt() < 0.05 * expected.pow(2).mean().sqrt()
    assert torch.equal(got[0, 0], bias)
    q = quantize_fp8(x, None, -1, None, 0.0)
    assert torch.equal(layer.scheme.apply_weights(layer, (*q, torch.bfloat16), bias), got)
    assert torch.equal(layer.scheme.apply_weights(layer, q, bias), got)
    assert found.report()[0]["calls"] == 3
    found.undo()
    assert all(getattr(model, name).scheme is scheme for name, scheme in before.items())


@pytest.mark.usefixtures("scheme_table")
def test_other_calls_of_a_scheme_stay_the_hosts(monkeypatch: pytest.MonkeyPatch) -> None:
    """By table, only calls listed as faster run our ops; the report counts the others."""
    model: Any = nn.Module()
    model.ours = layer = scheme_layer(48, 64)
    found = apply(SchemeHost(), model, Request("patch"))
    linear, quantize = (registry.get(name).op for name in ("linear_fp8", "quantize_fp8"))
    bias = torch.randn(48).bfloat16()

    def runs(tokens: int, dtype: torch.dtype = torch.bfloat16, given: bool = False) -> str:
        """The side that ran the call; the host gets unchanged arguments."""
        HOST_CALLS.clear()
        calls = linear.calls, quantize.calls
        x: Any = torch.randn(tokens, 64).to(dtype)
        x = (x.to(torch.float8_e4m3fn), torch.ones(tokens, 1), dtype) if given else x
        layer.scheme.apply_weights(layer, x, bias=bias)
        more = linear.calls - calls[0], quantize.calls - calls[1]
        if not HOST_CALLS:
            assert more == (1, int(not given))
            return "ours"
        assert more == (0, 0) and HOST_CALLS[0][0] is layer.scheme
        assert all(a is b for a, b in zip(HOST_CALLS[0][1:], (layer, x, bias), strict=True))
        return "host"

    assert [runs(m) for m in (1, 2, 8, 9, 32, 64, 65, 0)] == ["host", *["ours"] * 2, *["host"] * 5]
    assert [runs(m, given=True) for m in (8, 9)] == ["ours", "host"]
    assert runs(8, torch.float16) == "host"  # a dtype that the table does not list
    (row,) = found.report()
    assert (row["calls"], row["fallbacks"]) == (3, {})
    assert row["left"] == {"no tuned table says that ours is faster for this number of tokens": 8}
    for op, name in ((linear, "reference"), (quantize, "reference")):  # a requested provider runs at any size
        monkeypatch.setenv("FASTKERNELS_PROVIDER", f"{op.name}:{name}")
        op.reset()
        assert runs(9) == "ours"
        monkeypatch.delenv("FASTKERNELS_PROVIDER")
        op.reset()
        assert runs(9) == "host"
    linear.set_candidate(lambda *args: torch.zeros(9, 48))
    assert runs(9) == "ours"
    linear.set_candidate(None)
    assert runs(9) == "host"


@pytest.mark.usefixtures("scheme_table")
def test_requested_scheme_is_ours_at_every_size() -> None:
    model: Any = nn.Module()
    model.ours = layer = scheme_layer(48, 64)
    before = layer.scheme
    found = apply(SchemeHost(), model, Request("patch", ops=("linear_fp8",)))
    for tokens in (8, 9, 64):
        layer.scheme.apply_weights(layer, torch.randn(tokens, 64).bfloat16())
    (row,) = found.report()
    assert not HOST_CALLS and (row["calls"], row["left"]) == (3, {})
    found.undo()
    assert layer.scheme is before


@pytest.mark.usefixtures("scheme_table")
def test_a_scheme_that_torch_compile_traces_is_one_graph() -> None:
    """The op looks into the table at each run; the graph has no guard on counters."""
    model: Any = nn.Module()
    model.ours = layer = scheme_layer(48, 64)
    apply(SchemeHost(), model, Request("patch"))
    compiled = torch.compile(
        lambda x: layer.scheme.apply_weights(layer, x), backend="aot_eager", fullgraph=True, dynamic=True
    )
    for tokens in (8, 9, 64):
        assert compiled(torch.randn(tokens, 64).bfloat16()).shape == (tokens, 48)
    assert not HOST_CALLS and registry.get("linear_fp8").op.calls == 3


def test_requested_scheme_lists_unsupported_layers() -> None:
    model: Any = nn.Module()
    model.ours, model.tensor = scheme_layer(48, 80), scheme_layer(48, 64, "tensor")
    model.block, model.static = scheme_layer(48, 64, "block"), scheme_layer(48, 64, "channel", True)
    (row,) = apply(SchemeHost(), model, Request("patch", ops=("linear_fp8",))).rows
    assert row.modules == 1
    for text in (
        "its weight has scales by tensor, not by channel",
        "its weight has scales by block, not by channel",
        "the scale of x is given",
    ):
        assert f"1 unsupported: {text}" in row.reason
