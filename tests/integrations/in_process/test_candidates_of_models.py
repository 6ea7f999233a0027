"""A candidate runs in the model of the patch that installed it, and in no other code of the process."""

from __future__ import annotations

import gc
import itertools
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from fk_integrations.core.journal import Journal
from fk_integrations.patching import apply
from fk_integrations.patching.module_host import ModuleAdapter

import fastkernels
from fastkernels import LLM, SamplingParams
from fastkernels.core import registry
from fastkernels.core.candidate_scopes import AmbiguousCall, Scope
from fastkernels.core.dispatch import Provider
from fastkernels.patch import Report, Request

timm = pytest.importorskip("timm")
NORM = """
def rms_norm(x, weight=None, eps=1e-6, *more):
    return torch.nn.functional.rms_norm(x, x.shape[-1:], weight, eps) * {factor}
"""
ROTATION = """
def rotary_emb(q, k, *more):
    q.zero_()
    k.zero_()
"""
GELU = """
def gelu(x, *more):
    return torch.zeros_like(x) + {factor}
"""
IDS = torch.arange(1, 6)[None]
OP = registry.get("rms_norm").op


def llama() -> Any:
    torch.manual_seed(0)
    sizes: dict[str, Any] = {"hidden_size": 16, "intermediate_size": 24, "vocab_size": 8}
    config = transformers.LlamaConfig(**sizes, num_hidden_layers=1, num_attention_heads=2)
    return transformers.LlamaModel(config).eval()


@pytest.fixture
def norms(tmp_path: Path) -> Callable[[int], str]:
    def write(factor: int) -> str:
        file = tmp_path / f"{factor}.py"
        file.write_text("import torch\n" + NORM.format(factor=factor))
        return str(file)

    return write


def patched(model: Any, file: str | None = None) -> Report:
    return fastkernels.patch(model, "rms_norm", {"rms_norm": file} if file else None)


@torch.no_grad()
def run(model: Any) -> torch.Tensor:
    found: torch.Tensor = model(IDS)[0]
    return found


def near(model: Any, wanted: torch.Tensor) -> bool:
    return torch.allclose(run(model), wanted, rtol=1e-4, atol=1e-5)


@pytest.fixture
def results(norms: Callable[[int], str]) -> dict[int, torch.Tensor]:
    """{factor: the result of a Llama with that candidate}; 1: with its own norms."""
    found = {1: run(llama())}
    for factor in (2, 3):
        model = llama()
        with patched(model, norms(factor)):
            found[factor] = run(model)
    assert not torch.allclose(found[2], found[3], atol=1e-3)
    return found


@pytest.mark.parametrize(
    "order", list(itertools.permutations(range(4))), ids=lambda order: "".join(map(str, order))
)
def test_models_keep_their_own_candidates_in_any_order(
    order: tuple[int, ...], norms: Callable[[int], str], results: dict[int, torch.Tensor]
) -> None:
    """Two models with a candidate each, one without any, and one with the first one's."""
    models, factors = [llama() for _ in range(4)], [2, 3, 1, 2]
    reports = [patched(m, norms(f) if f > 1 else None) for m, f in zip(models, factors, strict=True)]
    for model, report, factor in zip(models, reports, factors, strict=True):
        assert near(model, results[factor])
        (row,) = report.refresh().active
        assert row.candidate == (f"function {norms(factor)}" if factor > 1 else "") and row.calls == 3
    assert OP.candidate is None, "code outside of the models runs a candidate"
    for undone, place in enumerate(order):
        reports[place].undo()
        factors[place] = 1
        assert all(near(m, results[f]) for m, f in zip(models, factors, strict=True)), undone
    assert not OP.installed


def test_calls_cost_no_scope_while_no_model_has_a_candidate(
    norms: Callable[[int], str], monkeypatch: pytest.MonkeyPatch
) -> None:
    entered, enter = list[Scope](), Scope.__enter__
    monkeypatch.setattr(Scope, "__enter__", lambda scope: entered.append(scope) or enter(scope))
    model, other = llama(), llama()
    with patched(model) as report:
        run(model)
        assert not entered and report.refresh().active[0].calls == 3
        with patched(other, norms(2)):
            run(model)
            assert len(entered) == 3, "the model could run the other one's candidate"
        entered.clear()
        run(model)
        assert not entered


def test_candidate_of_a_model_that_is_gone_is_removed(norms: Callable[[int], str]) -> None:
    model = llama()
    patched(model, norms(2))
    assert len(OP.installed) == 1
    del model
    gc.collect()
    assert not OP.installed


def test_candidates_of_two_hosts_stay_apart(tmp_path: Path) -> None:
    sizes: dict[str, Any] = {"hidden_size": 64, "num_hidden_layers": 1, "num_attention_heads": 2}
    config = transformers.SiglipVisionConfig(**sizes, intermediate_size=96, image_size=32, patch_size=8)
    shape: dict[str, Any] = {"img_size": 32, "patch_size": 8, "embed_dim": 64, "depth": 1, "num_heads": 2}
    models = [
        transformers.SiglipVisionModel(config).eval(),
        timm.create_model("vit_base_patch16_224", **shape, num_classes=7).eval(),
    ]
    x = torch.randn(1, 3, 32, 32)

    @torch.no_grad()
    def outputs() -> list[torch.Tensor]:
        first, second = models[0](x)[0], models[1](x)
        return [first, second]

    stock, alone, reports = outputs(), [], []
    for i, model in enumerate(models):
        (tmp_path / f"{i}.py").write_text("import torch\n" + GELU.format(factor=i))
        with fastkernels.patch(model, "gelu", {"gelu": str(tmp_path / f"{i}.py")}):
            alone.append(outputs()[i])
    for i, model in enumerate(models):
        reports.append(fastkernels.patch(model, "gelu", {"gelu": str(tmp_path / f"{i}.py")}))
    for found, own, host in zip(outputs(), alone, stock, strict=True):
        torch.testing.assert_close(found, own)
        assert not torch.allclose(own, host, atol=1e-4)
    for report in reports:
        report.undo()
    for found, host in zip(outputs(), stock, strict=True):
        torch.testing.assert_close(found, host, rtol=0, atol=0)


def test_candidate_of_a_called_function_stays_in_its_model(tmp_path: Path) -> None:
    file = tmp_path / "rotary_emb.py"
    file.write_text(ROTATION)
    one, other = llama(), llama()
    before = run(other)
    with (
        fastkernels.patch(one, "rotary_emb", {"rotary_emb": str(file)}),
        fastkernels.patch(other, "rotary_emb"),
    ):
        assert near(other, before) and not near(one, before)


def test_threads_run_the_candidates_of_their_models(
    norms: Callable[[int], str], results: dict[int, torch.Tensor]
) -> None:
    models, wrong = {f: llama() for f in (1, 2, 3)}, []
    reports = [patched(model, norms(f) if f > 1 else None) for f, model in models.items()]
    start = threading.Barrier(3)

    def work(factor: int) -> None:
        start.wait()
        wrong.extend(factor for _ in range(30) if not near(models[factor], results[factor]))

    threads = [threading.Thread(target=work, args=(factor,)) for factor in models]
    [thread.start() for thread in threads]
    [thread.join() for thread in threads]
    assert not wrong
    for report in reports:
        report.undo()


def test_our_engine_next_to_a_model_keeps_its_own(
    tiny: Path, norms: Callable[[int], str], results: dict[int, torch.Tensor]
) -> None:
    model, greedy = llama(), SamplingParams(temperature=0, max_tokens=4, ignore_eos=True)

    def tokens(llm: LLM) -> Any:
        return llm.generate([[5, 6, 7]], greedy)[0].outputs[0].token_ids

    def built() -> LLM:
        return LLM(str(tiny), device="cpu", max_model_len=64, num_blocks=32)

    before = built()
    stock = tokens(before)
    report = patched(model, norms(2))
    after = built()
    assert tokens(before) == stock == tokens(after)
    own = fastkernels.patch(after, candidates={"rms_norm": norms(3)})
    changed = tokens(after)
    assert changed != stock and tokens(before) == stock and near(model, results[2])
    report.undo()
    assert tokens(after) == changed and near(model, results[1])
    own.undo()
    assert tokens(after) == stock and not OP.installed


def test_compiled_models_run_their_own_candidate_or_say_so(
    norms: Callable[[int], str], results: dict[int, torch.Tensor]
) -> None:
    one, other = llama(), llama()
    with patched(one, norms(2)), patched(other, norms(3)) as second:
        compiled = torch.compile(one, backend="eager")
        assert near(compiled, results[2]) and near(other, results[3])
        again = torch.compile(other, backend="eager")
        with pytest.raises(AmbiguousCall, match=r"rms_norm: .*3\.py, and that of .*2\.py: .*Undo one"):
            run(again)
        second.undo()
        assert near(torch.compile(one, backend="eager"), results[2])
        with patched(other, norms(2)):
            assert near(torch.compile(other, backend="eager"), results[2])


@pytest.mark.parametrize("first", [0, 1])
def test_providers_of_two_patches_are_undone_in_any_order(
    first: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FASTKERNELS_PROVIDER", "rms_norm:host")
    own = Provider("host", lambda *args: args[0], ("cpu",))

    class Adapter(ModuleAdapter):
        def providers(self) -> dict[str, Provider]:
            return {"rms_norm": own}

    before, made = OP.providers, []
    for model in (llama(), llama()):
        made.append(apply.Patched(Adapter("transformers"), model, Request("patch"), 0, Journal()))
        apply._add_providers(made[-1])
    made[first].undo()
    assert [p.name for p in OP.order("cpu")[0][:1]] == ["host"]
    made[1 - first].undo()
    assert OP.providers == before
