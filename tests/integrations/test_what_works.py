"""docs/what-works.md is complete and quotes real messages; the behaviour behind its table, without a host."""

from __future__ import annotations

import re
import sys
from dataclasses import asdict
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from fk_integrations.core.adapter import Adapter
from fk_integrations.patching.apply import apply

from fastkernels.core.reasons import Kind, Reason
from fastkernels.patch import PatchError, Request, Row, disagreement

ROOT = Path(__file__).resolve().parents[2]
PAGE = ROOT / "docs" / "what-works.md"
FEATURES = [
    "LoRA", "FP8 weights", "AWQ / GPTQ", "speculative decoding", "fp8 KV cache",
    "sliding window", "attention sinks (GPT-OSS)", "latent attention (DeepSeek)", "expert parallelism", "TP", "PP",
    "several machines (`--nnodes`)", "Ray", "prefix cache", "sleep / reload", "mixtures of experts",
]  # fmt: skip
# The parts of a quoted line that are an example's values; all other text must be in the sources.
FILLED_IN = re.compile(
    r"\.\.\.|; |rank 1 \(pid 71 on HOST, Ray node 5f0c\): |"
    r"torch\.\w+|fp8 is|SWAKVPool|MLATokenToKVPool|\(7, 7\)|\w*Method|gate_up_proj|TARGET_VERIFY"
)


def tables() -> list[list[list[str]]]:
    """The page's tables, as rows of cells, without the headings."""
    found = re.findall(r"(?:^\|.*\|\n)+", PAGE.read_text(), re.MULTILINE)
    return [[line.strip("|").split(" | ") for line in table.splitlines()[2:]] for table in found]


def test_every_feature_has_a_cell_and_a_source_for_both_hosts() -> None:
    features, shown, *_ = tables()
    assert [row[0].strip() for row in features] == FEATURES
    numbers = {row[0].strip(): row[1:] for row in shown}
    for row in features:
        assert len(row) == 3
        for host, cell in enumerate(row[1:]):
            assert re.search(r"\*\*(works?|falls? back|refuses)\*\*", cell), cell
            (number,) = re.findall(r"\[(\d+)\]", cell)
            assert re.search(r"`tests/integrations/\w+|by reading", numbers[number][host]), numbers[number][
                host
            ]


def test_quoted_lines_are_in_the_sources() -> None:
    folders = (ROOT / "integrations" / "fk_integrations", ROOT / "fastkernels" / "overrides")
    sources = "".join(p.read_text() for folder in folders for p in sorted(folder.rglob("*.py")))
    sources += (ROOT / "fastkernels" / "core" / "tuning.py").read_text()
    written = re.sub(r"\{[^{}]*\}", "...", re.sub(r'"\s*\n\s*f?"', "", sources))
    quoted = [q for row in tables()[0] for cell in row[1:] for q in re.findall(r"`([^`]*)`", cell)]
    lines = [q for q in quoted if " " in q and not q.startswith("--")]
    assert len(lines) >= 12
    for line in lines:
        for part in FILLED_IN.split(line):
            assert part.strip(" ,") in written, (line, part)


class LinearMethodBase:
    """The family of a host's linear layers' methods."""


class Unquantized(LinearMethodBase):
    def apply(self, layer: Any, x: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        return torch.nn.functional.linear(x, layer.weight, bias)


class FourBits(LinearMethodBase):
    pass


class Wrapper(torch.nn.Module):
    """Like a LoRA wrapper: attributes that it lacks come from its base layer."""

    def __init__(self, base_layer: torch.nn.Module) -> None:
        super().__init__()
        self.base_layer = base_layer

    def __getattr__(self, name: str) -> Any:
        modules = self.__dict__["_modules"]
        return modules[name] if name in modules else getattr(modules["base_layer"], name)


class Host(Adapter):
    """A host with the linear layers of this file instead of vLLM's."""

    host, version = "vllm", "0.32.0"

    def unknown(self, target: Any, host_class: Any) -> str | None:
        return None


@pytest.fixture
def model(monkeypatch: pytest.MonkeyPatch) -> torch.nn.Sequential:
    """A plain layer, one in a wrapper and one in four bits."""
    stand_in: Any = ModuleType("vllm.model_executor.layers.linear")
    stand_in.UnquantizedLinearMethod = Unquantized
    Unquantized.__module__, Unquantized.__qualname__ = stand_in.__name__, "UnquantizedLinearMethod"
    for name in ("vllm", "vllm.model_executor", "vllm.model_executor.layers"):
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
    monkeypatch.setitem(sys.modules, stand_in.__name__, stand_in)
    layers: list[Any] = [torch.nn.Linear(4, 4) for _ in range(3)]
    for layer, method in zip(layers, (Unquantized, Unquantized, FourBits), strict=True):
        layer.quant_method = method()
    return torch.nn.Sequential(layers[0], Wrapper(layers[1]), layers[2])


def test_wrapped_layer_counts_once_quantized_layer_is_listed(model: torch.nn.Sequential) -> None:
    wrapper: Any = model[1]
    before = [vars(m).get("quant_method") for m in model.modules()]
    patched = apply(Host(), model, Request("patch", ("linear",)))
    (row,) = patched.rows
    assert (row.state, row.modules) == ("active", 2)
    assert row.reason == f"1 unsupported: quant_method is {__name__}.FourBits, not UnquantizedLinearMethod"
    assert hasattr(type(wrapper.quant_method), "fastkernels") and "quant_method" not in vars(wrapper)
    patched.undo()
    assert [vars(m).get("quant_method") for m in model.modules()] == before
    with pytest.raises(PatchError, match=r"strict: .*FourBits"):
        apply(Host(), model, Request("patch", ("linear",), strict=True))


def test_a_stage_of_a_pipeline_may_have_nothing_to_patch(model: torch.nn.Sequential) -> None:
    stage = Host()
    stage.whole = False
    (row,) = apply(stage, model[2], Request("patch", ("linear",))).rows
    assert row.state == "off"
    with pytest.raises(PatchError, match="nothing to patch"):
        apply(Host(), model[2], Request("patch", ("linear",)))


def reply(rank: int, modules: int, **stage: int) -> dict[str, Any]:
    row = Row(rank, "rms_norm", "RMSNorm", modules, "active" if modules else "off")
    if not modules:
        row.explain({Reason(Kind.NO_SUCH_MODULE, "none there"): 0})
    return {"rank": rank, "rows": [asdict(row)], **stage}


def test_ranks_of_a_stage_agree_and_stages_may_differ() -> None:
    def check(replies: list[dict[str, Any]]) -> str | None:
        return disagreement(replies, Request("patch"))

    assert check([reply(0, 2), reply(1, 2)]) is None
    assert check([reply(0, 2), reply(1, 3)]) == "ranks [1] patched something else than rank 0"
    assert check([reply(0, 2, stage=0), reply(1, 3, stage=1)]) is None
    assert check([reply(0, 2, stage=0), reply(1, 0, stage=1)]) is None
    four = [reply(rank, modules, stage=rank // 2) for rank, modules in enumerate((2, 2, 3, 4))]
    assert check(four) == "ranks [3] patched something else than rank 2"
    assert check([reply(0, 0, stage=0), reply(1, 0, stage=1)]) == (
        "nothing to patch: rms_norm (RMSNorm): none there"
    )
