"""The product of gate and up with its activation, as one op: in a host's blocks and in our engine."""

from __future__ import annotations

import copy
import ctypes
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from fk_integrations.core.adapter import Adapter
from fk_integrations.core.gated_products import NAME, Gated, GatedProduct, of_model
from fk_integrations.core.journal import Journal
from fk_integrations.patching import choose, gated_products
from fk_integrations.patching.apply import Patched, apply
from torch import nn

from fastkernels import LLM, SamplingParams
from fastkernels.core import tuning
from fastkernels.core.env import Environment
from fastkernels.core.reasons import Kind
from fastkernels.core.tuning import Chip, Entry, Table
from fastkernels.overrides.linear import linear_silu_and_mul as op_file
from fastkernels.overrides.linear.linear_silu_and_mul import linear_silu_and_mul
from fastkernels.patch import Request
from fastkernels.verify import measure

T = torch.Tensor
K, INNER, MANY = 24, 40, 256


class UnquantizedLinearMethod:
    def apply(self, layer: Any, x: T, bias: T | None = None) -> T:
        return F.linear(x, layer.weight, bias)


class MergedColumnParallelLinear(nn.Module):
    """As vLLM's and SGLang's: its result and the bias that it has not added."""

    skip_bias_add = gather_output = False
    tp_size = 1

    def __init__(self, sizes: tuple[int, ...] = (INNER, INNER), bias: bool = True) -> None:
        super().__init__()
        self.output_sizes, generator = list(sizes), torch.Generator().manual_seed(0)
        made = torch.randn(sum(sizes), K, generator=generator) / K**0.5
        self.weight = nn.Parameter(made, requires_grad=False)
        self.bias = nn.Parameter(torch.randn(sum(sizes), generator=generator), False) if bias else None
        self.quant_method: Any = UnquantizedLinearMethod()

    def forward(self, x: T) -> tuple[T, None]:
        return self.quant_method.apply(self, x, self.bias), None


class SiluAndMul(nn.Module):
    def forward(self, x: T) -> T:
        gate, up = x.chunk(2, dim=-1)
        return F.silu(gate) * up


class LlamaMLP(nn.Module):
    def __init__(self, between: Any = None, **options: Any) -> None:
        super().__init__()
        self.gate_up_proj, self.act_fn = MergedColumnParallelLinear(**options), SiluAndMul()
        self.between = between

    def forward(self, x: T) -> T:
        gate_up, _ = self.gate_up_proj(x)
        if self.between is not None:
            gate_up = self.between(gate_up)
        return self.act_fn(gate_up)  # type: ignore[no-any-return]


class Host(Adapter):
    host, version = "vllm", "0.33.0"

    def targets(self, spec: Any, model: Any) -> list[Any]:
        return []


@pytest.fixture
def table(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Ours is faster at MANY tokens for these shapes (N, K), not at 128."""

    def use(shapes: set[tuple[int, int]]) -> None:
        entries = tuple(
            Entry(
                NAME, {"N": n, "K": k, "dtype": "float32"}, {"M": m}, "reference" if m == MANY else "onednn",
                "onednn", "r", speedup=1.5 if m == MANY else 1.0, ci95=(1.5, 1.5) if m == MANY else (1.0, 1.0),
            )
            for n, k in shapes for m in (128, MANY)
        )  # fmt: skip
        path = tmp_path / "own.json"
        path.write_text(Table("cpu", {"r": {}}, entries).to_json())
        monkeypatch.setenv("FASTKERNELS_TUNED", str(path))
        monkeypatch.setattr(gated_products, "unproved", lambda request: False)
        tuning._by_op.cache_clear()
        linear_silu_and_mul.reset()

    yield use
    monkeypatch.undo()
    tuning._by_op.cache_clear()
    linear_silu_and_mul.reset()


def patched(model: nn.Module, **request: Any) -> Patched:
    return apply(Host(), model, Request("patch", **request))


def applied(model: nn.Module, **request: Any) -> gated_products.Rows:
    """Of the op alone: a patch in which nothing is active is an error."""
    return gated_products.apply(Host(), Request("patch", **request), model, "cpu", Journal())


def only_reason(rows: gated_products.Rows) -> Any:
    ((reason, _),) = rows.reasons["LlamaMLP"].items()
    return reason


def run(model: nn.Module, tokens: int) -> tuple[T, int]:
    """The result and the calls of the op."""
    x = torch.randn(tokens, K, generator=torch.Generator().manual_seed(tokens))
    before = linear_silu_and_mul.calls
    with torch.inference_mode():
        found = model(x)
    return found, linear_silu_and_mul.calls - before


@pytest.mark.parametrize("bias", [True, False])
def test_blocks_run_the_op_where_it_won(bias: bool, table: Any) -> None:
    table({(2 * INNER, K)})
    model = nn.Sequential(LlamaMLP(bias=bias), nn.LayerNorm(INNER))
    want = {tokens: run(model, tokens)[0] for tokens in (64, 128, 129, 200, MANY, MANY + 1)}
    found = patched(model)
    (row,) = [row for row in found.rows if row.op == NAME]
    assert (row.state, row.host_class, row.modules) == ("active", "LlamaMLP", 1)
    for tokens, expected in want.items():
        got, calls = run(model, tokens)
        assert calls == (128 < tokens <= MANY), tokens
        torch.testing.assert_close(got, expected, atol=1e-5, rtol=1e-5)
    found.undo()
    assert run(model, MANY)[1] == 0 and "apply" not in vars(model[0].gate_up_proj.quant_method)
    assert "forward" not in vars(model[0].act_fn)


def test_between_modules_the_op_waits_for_a_request(table: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    unproved = gated_products.unproved
    table({(2 * INNER, K)})
    monkeypatch.setattr(gated_products, "unproved", unproved)
    rows = applied(model := LlamaMLP())
    assert only_reason(rows).text == gated_products.UNPROVED and not rows.modules
    monkeypatch.setenv("FASTKERNELS_VERIFY", "1")
    assert applied(model).modules["LlamaMLP"] == 1


def _in_place(x: T) -> T:
    x[:, :INNER] *= 0.5
    return x


BETWEEN = {
    "a new tensor": lambda x: x * 0.5 + 1,
    "a change in place": _in_place,
    "a view": lambda x: x.view(-1, 2, INNER).flatten(1),
    "the tensor itself": lambda x: x,
}


@pytest.mark.parametrize("name", BETWEEN)
def test_code_between_product_and_activation_sees_the_product(name: str, table: Any) -> None:
    table({(2 * INNER, K)})
    model = nn.Sequential(LlamaMLP(BETWEEN[name]))
    want, _ = run(model, MANY)
    found = patched(model)
    got, calls = run(model, MANY)
    assert calls == (name == "the tensor itself")
    torch.testing.assert_close(got, want, atol=1e-5, rtol=1e-5)
    found.undo()


RAW = {  # what code that launches kernels itself, or copies a result, does with it
    "data_ptr": lambda x: ctypes.string_at(x.data_ptr(), 4 * x.numel()),
    "storage": lambda x: bytes(x.untyped_storage()),
    "numpy": lambda x: x.numpy().tobytes(),
    "dlpack": lambda x: torch.utils.dlpack.from_dlpack(x.__dlpack__()).numpy().tobytes(),
    "deepcopy": lambda x: copy.deepcopy(x).numpy().tobytes(),
    "pickle": lambda x: pickle.loads(pickle.dumps(x)).numpy().tobytes(),
}


@pytest.mark.parametrize("how", RAW)
def test_memory_of_the_product_is_its_own(how: str, table: Any) -> None:
    table({(2 * INNER, K)})
    found: list[bytes] = []

    def between(x: T) -> T:
        found.append(RAW[how](x))
        return x

    model = nn.Sequential(LlamaMLP(between))
    want, _ = run(model, MANY)
    undo = patched(model).undo
    got, calls = run(model, MANY)
    undo()
    assert found[1] == found[0] and calls == 0
    torch.testing.assert_close(got, want)


def test_a_product_without_memory_has_no_null_pointer(table: Any) -> None:
    table({(2 * INNER, K)})
    undo = patched(nn.Sequential(model := LlamaMLP())).undo
    with torch.inference_mode():
        product, _ = model.gate_up_proj(torch.zeros(MANY, K))
        assert isinstance(product, gated_products.Product)
        with pytest.raises(RuntimeError, match="data pointer"):  # as C++ reads it
            torch.utils.dlpack.to_dlpack(product)
    undo()


@pytest.mark.parametrize("name", ["swiglu_limit", "limit"])
def test_blocks_that_clamp_are_left(name: str, table: Any) -> None:
    table({(2 * INNER, K)})
    model = nn.Sequential(LlamaMLP())
    setattr(model[0], name, None)
    assert applied(model).modules == {"LlamaMLP": 1}
    model = nn.Sequential(LlamaMLP())
    setattr(model[0], name, 7.0)
    rows = applied(model)
    assert not rows.modules and "clamps gate and up" in only_reason(rows).text
    assert not GatedProduct().layers(linear_silu_and_mul, model)


READ = {
    "copy.deepcopy": copy.deepcopy,
    "pickle": lambda x: pickle.loads(pickle.dumps(x)),
    "numpy": lambda x: torch.from_numpy(x.numpy()),
    "tolist": lambda x: torch.tensor(x.tolist()),
    "data_ptr": lambda x: torch.tensor(x.data_ptr() != 0),
    "repr": lambda x: torch.tensor(list(repr(x).encode())),
}


@pytest.mark.parametrize("name", READ)
def test_memory_of_the_product_can_be_read(name: str, table: Any) -> None:
    table({(2 * INNER, K)})
    found: list[T] = []

    def keep(x: T) -> T:
        found.append(READ[name](x))
        return x

    model = nn.Sequential(LlamaMLP(keep))
    run(model, MANY)
    report = patched(model)
    run(model, MANY)
    report.undo()
    assert [type(t) for t in found] == [T, T]
    torch.testing.assert_close(*found)


@pytest.mark.parametrize("where", ["layer", "activation", "before the activation", "all modules"])
def test_hooks_get_products_that_do_not_change_later(where: str, table: Any) -> None:
    table({(2 * INNER, K)})
    model, kept = nn.Sequential(LlamaMLP()), list[T]()
    mlp = model[0]
    adds = {
        "layer": lambda: mlp.gate_up_proj.register_forward_hook(lambda m, a, out: kept.append(out[0])),
        "activation": lambda: mlp.act_fn.register_forward_hook(lambda m, a, out: kept.append(a[0])),
        "before the activation": lambda: mlp.act_fn.register_forward_pre_hook(lambda m, a: kept.append(a[0])),
        "all modules": lambda: nn.modules.module.register_module_forward_pre_hook(
            lambda m, a: kept.append(a[0]) if m is mlp.act_fn else None
        ),
    }
    report, handle = patched(model), adds[where]()
    x = torch.randn(MANY, K, generator=torch.Generator().manual_seed(1))
    with torch.inference_mode():
        want, _ = mlp.gate_up_proj(x.clone())
        want = want + 0
        del kept[:]
        model(x)
        x.zero_()
        torch.testing.assert_close(kept[0] + 0, want)
    handle.remove()
    report.undo()


def test_calls_that_need_gradients_are_the_hosts(table: Any) -> None:
    table({(2 * INNER, K)})
    model = nn.Sequential(LlamaMLP())
    found = patched(model)
    x = torch.randn(MANY, K, requires_grad=True)
    before = linear_silu_and_mul.calls
    model(x).sum().backward()
    assert x.grad is not None and linear_silu_and_mul.calls == before
    found.undo()


def test_requested_op_runs_in_all_prompts() -> None:
    model = nn.Sequential(LlamaMLP())
    want = run(model, 65)[0]
    found = patched(model, ops=(NAME,))
    assert run(model, 64)[1] == 0
    got, calls = run(model, 65)
    torch.testing.assert_close(got, want, atol=1e-5, rtol=1e-5)
    assert calls == 1 and [row.state for row in found.rows] == ["active"]
    found.undo()


def layer(**changes: Any) -> MergedColumnParallelLinear:
    made = MergedColumnParallelLinear(**{k: v for k, v in changes.items() if k == "sizes"})
    for name, value in changes.items():
        if name != "sizes":
            setattr(made, name, value)
    return made


class Fp8LinearMethod:
    pass


UNSUPPORTED = {
    "quantized by Fp8LinearMethod": {"quant_method": Fp8LinearMethod()},
    "LoRA": {"base_layer": nn.Identity()},
    "its packed parts have [40, 24] rows": {"sizes": (40, 24)},
    "packed or freed its weight": {"weight": nn.Parameter(torch.empty(0), False)},
    "for AMX": {"use_intel_amx_backend": True},
    "skip_bias_add": {"skip_bias_add": True},
    "the ranks gather the product": {"gather_output": True, "tp_size": 2},
}


@pytest.mark.parametrize("reason", UNSUPPORTED)
def test_other_layers_are_left_by_name(reason: str, table: Any) -> None:
    table({(2 * INNER, K)})
    model = nn.Sequential(LlamaMLP())
    model[0].gate_up_proj = layer(**UNSUPPORTED[reason])
    found = patched(model)
    (row,) = [row for row in found.rows if row.op == NAME]
    assert row.state == "off" and row.kinds == [Kind.LEFT_TO_HOST] and reason in row.reason
    found.undo()


def test_blocks_of_other_shapes_and_kinds_are_left(table: Any) -> None:
    table({(2 * INNER, 7)})
    model = nn.Sequential(LlamaMLP(), nn.Linear(3, 4))
    rows = applied(model)
    assert not rows.modules and "N=80 K=24 dtype=float32 is not tuned on cpu" in only_reason(rows).text
    model[0].act_fn = nn.SiLU()
    assert not list(of_model(model)) and not applied(model).reasons


@pytest.mark.parametrize(
    ("request_", "variable", "text"),
    [
        ({"disable": ("linear",)}, "", "FASTKERNELS_DISABLE=linear"),
        ({}, "linear:reference", "linear was requested by name"),
    ],
)
def test_choices_of_the_user_come_first(
    request_: Any, variable: str, text: str, table: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    table({(2 * INNER, K)})
    if variable:
        monkeypatch.setenv("FASTKERNELS_PROVIDER", variable)
    model = nn.Sequential(LlamaMLP())
    rows = applied(model, **request_)
    assert not rows.modules and text in only_reason(rows).text and run(model, MANY)[1] == 0


def test_a_changed_method_is_left(table: Any) -> None:
    table({(2 * INNER, K)})
    model = nn.Sequential(LlamaMLP())
    theirs = model[0].gate_up_proj.quant_method.apply
    model[0].gate_up_proj.quant_method.apply = lambda *args: theirs(*args) * 2
    rows = applied(model)
    assert not rows.modules and only_reason(rows).kind is Kind.REPLACED


def test_a_failed_patch_leaves_no_change(table: Any) -> None:
    table({(2 * INNER, K)})
    (gated,) = of_model(nn.Sequential(LlamaMLP()))
    assert isinstance(gated, Gated)
    journal = Journal()
    assert gated_products.between(gated, False, journal) is None
    assert gated_products.between(gated, False, Journal()) is not None  # not twice
    journal.undo()
    assert not {"apply", "forward"} & {*vars(gated.layer.quant_method), *vars(gated.activation)}


# Measured at patch time


HOPPER = Chip("NVIDIA H200", 132, 4.9e12, 50 << 20, (9, 0))


def test_points_are_those_of_the_models_products(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FASTKERNELS_VERIFY", "1")
    model = nn.Sequential(LlamaMLP(), LlamaMLP())
    points = choose.points_of(Host(), model, Request("patch"), "cpu")
    assert [(p.op, p.shape, p.sizes) for p in points] == [
        (NAME, (2 * INNER, K, torch.float32), (m,)) for m in (2048, 8192, 1024, 512, 256, 128, 192)
    ]
    assert points[0].modules == tuple(block.gate_up_proj for block in model)
    assert not choose.points_of(Host(), model, Request("patch", disable=("silu_and_mul",)), "cpu")


def test_proposals_are_for_hopper_and_sizes_of_tiles() -> None:
    def proposed(n: int, k: int, m: int, chip: Chip = HOPPER, dtype: torch.dtype = torch.bfloat16) -> Any:
        return [params for _, params in op_file._propose((n, k, dtype), (m,), chip)]

    first = {"rows": 128, "columns": 192, "cooperate": False, "shares": "w", "cluster": 2}
    for m in (512, 1024, 2048, 8192):
        assert proposed(28672, 4096, m)[0] == first
    assert len(proposed(28672, 4096, 2048)) == 2 and all(
        p in op_file.SETS for p in proposed(28672, 4096, 2048)
    )
    assert (
        not proposed(28672, 4096, 64) and not proposed(28664, 4096, 2048) and not proposed(28672, 4100, 2048)
    )
    assert not proposed(28672, 4096, 2048, dtype=torch.float32)
    assert not proposed(28672, 4096, 2048, chip=Chip("NVIDIA A100", 108, 2e12, 40 << 20, (8, 0)))


def test_a_measurement_needs_room_for_gate_and_up(monkeypatch: pytest.MonkeyPatch) -> None:
    wanted: list[int] = []
    monkeypatch.setattr(measure, "leave_room", lambda device, needed: wanted.append(needed))
    point = measure.Point(NAME, (2 * INNER, K, torch.float32), (64,))
    measure.arguments(point, torch.device("cpu"), torch.Generator(), 0)
    moved = 4 * (64 * K + 2 * INNER * K + 64 * INNER)
    assert wanted == [moved + 2 * 4 * 64 * 2 * INNER]


# Our engine


def test_our_engine_runs_the_op_in_prompts(tiny: Path, table: Any) -> None:
    def answer() -> tuple[list[float], int]:
        with LLM(str(tiny), device="cpu", dtype="float32", num_blocks=64, skip_tokenizer_init=True) as llm:
            shapes = {tuple(g.layer.weight.shape) for g in of_model(llm.llm_engine.executor.runner.model)}
            table.shapes = shapes
            before = linear_silu_and_mul.calls
            params = SamplingParams(temperature=0, max_tokens=2, logprobs=1, ignore_eos=True)
            prompts = [{"prompt_token_ids": [1 + i % 90 for i in range(n)]} for n in (200, 20)]
            outputs = llm.generate(prompts, params)
            steps = [step for o in outputs for step in o.outputs[0].logprobs]
            found = [next(iter(step.values())).logprob for step in steps]
            return found, linear_silu_and_mul.calls - before

    want, calls = answer()
    assert calls == 0
    table(table.shapes)
    got, calls = answer()
    assert calls > 0 and got == pytest.approx(want, abs=1e-4)
    assert Environment.read().tuned is not None
