"""Seams: one class for each name that a target uses, found by the file's stem."""

from __future__ import annotations

import ast
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from fk_integrations.core.adapter import Adapter
from fk_integrations.core.journal import Journal
from fk_integrations.live import live_class
from fk_integrations.patching import seam_interface
from fk_integrations.patching.seam_interface import Seam, Swap

from fastkernels.core import registry
from fastkernels.core.spec import SEAMS

LIVE = {
    "attention", "block", "called_function", "communicator", "dispatcher", "experts", "head", "kernel", "leaf",
    "module", "processor", "quant_method", "router", "scheme",
}  # fmt: skip


def test_each_seam_of_a_target_has_exactly_one_class() -> None:
    used = {target.seam for name in registry.op_names() for target in registry.get(name).targets}
    assert used <= set(SEAMS) == set(seam_interface.names())
    classes = [type(seam_interface.find(name)) for name in seam_interface.names()]
    assert len(set(classes)) == len(classes) == 17
    assert {name for name in seam_interface.names() if seam_interface.find(name).live} == LIVE


def test_a_seam_file_defines_one_class_and_no_function() -> None:
    for name in seam_interface.names():
        body = ast.parse((seam_interface.FOLDER / f"{name}.py").read_text()).body
        assert sum(isinstance(node, ast.ClassDef) for node in body) == 1, name
        assert not any(isinstance(node, ast.FunctionDef) for node in body), name


def test_an_unknown_seam_lists_the_known_ones() -> None:
    with pytest.raises(LookupError, match=r"unknown seam 'wall'. Known: attention, block, .*standalone"):
        seam_interface.find("wall")


@pytest.mark.parametrize("count", [0, 2])
def test_a_file_without_exactly_one_seam_is_an_error(
    count: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import fk_integrations.seams

    classes = "".join(f"class Wall{i}(Seam): pass\n" for i in range(count))
    (tmp_path / f"wall{count}.py").write_text(
        f"from fk_integrations.patching.seam_interface import Seam\n{classes}"
    )
    monkeypatch.setattr(seam_interface, "FOLDER", tmp_path)
    monkeypatch.setattr(fk_integrations.seams, "__path__", [str(tmp_path)])
    with pytest.raises(LookupError, match=f"wall{count}.py defines {count} seams, not one"):
        seam_interface.find(f"wall{count}")


@pytest.mark.parametrize("name", sorted(set(SEAMS) - LIVE))
def test_a_seam_that_is_not_live_refuses_a_swap(name: str) -> None:
    place, module = seam_interface.find(name), torch.nn.Linear(2, 2)
    with pytest.raises(NotImplementedError, match="not for live models"):
        place.swap(Swap(Adapter(), module, torch.nn.Linear, torch.nn.Identity, Journal()))


@pytest.mark.parametrize("name", ["leaf", "module"])
def test_a_class_swap_keeps_state_and_is_undone(name: str) -> None:
    class Ours:
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x + 1

    module, journal = torch.nn.Linear(2, 2), Journal()
    module._forward_method = module.forward  # as vLLM's CustomOp caches it
    weight, x = module.weight, torch.randn(3, 2)
    assert seam_interface.find(name).swap(Swap(Adapter(), module, torch.nn.Linear, Ours, journal)) is None
    assert isinstance(module, torch.nn.Linear) and module.weight is weight
    assert torch.equal(module(x), x + 1) and torch.equal(module._forward_method(x), x + 1)
    journal.undo()
    assert type(module) is torch.nn.Linear and torch.equal(module._forward_method(x), module(x))


class Dispatched(torch.nn.Module):
    """As vLLM's CustomOp: forward runs the method that was chosen when the object was made."""

    def __init__(self) -> None:
        super().__init__()
        self._forward_method = self.forward_native

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self._forward_method(x)

    def forward_native(self, x: torch.Tensor) -> torch.Tensor:
        return x


@pytest.mark.parametrize("own", [False, True])
def test_subclass_of_a_dispatching_class_runs(own: bool) -> None:
    def forward_native(self: Any, x: torch.Tensor) -> torch.Tensor:
        return self.more(x)

    body = {"forward_native": forward_native, "more": lambda self, x: x + 1} if own else {}
    cls = type("Theirs", (Dispatched,), {**body, "__module__": "fastkernels_candidate_op_0"})
    module, journal, x = Dispatched(), Journal(), torch.randn(3)
    assert seam_interface.find("leaf").swap(Swap(Adapter(), module, Dispatched, cls, journal)) is None
    assert torch.equal(module(x), x + own)
    journal.undo()
    assert torch.equal(module(x), x)


def test_every_seam_is_a_subclass_of_seam() -> None:
    assert all(isinstance(seam_interface.find(name), Seam) for name in seam_interface.names())


IMPORTING = """
import math


def local(x):
    return x


class Layer(torch.nn.Module):
    def forward(self, x, other=False):
        if other:
            from {other} import scaled
        else:
            from {file} import scaled

        def inner(y):
            return local(y)

        return inner(scaled(x)) + math.floor(0.5)


class Same(Layer):
    def forward(self, x):
        from {file} import scaled

        return scaled(x)
"""


@pytest.fixture
def importing(monkeypatch: pytest.MonkeyPatch) -> Any:
    """A file whose layers import a function when they run, from one of two files by an argument."""

    def loaded(name: str, source: str) -> Any:
        module = ModuleType(name)
        monkeypatch.setitem(sys.modules, name, module)
        exec(source, vars(module))
        return module

    scaled = "def scaled(x):\n    return {} * x\n"
    files = {name: f"fastkernels_tests_{name}" for name in ("file", "other", "layers")}
    loaded(files["other"], scaled.format(3))
    functions = loaded(files["file"], scaled.format(2))
    layers = loaded(files["layers"], "import torch\n" + IMPORTING.format(**files))
    return functions, layers


def test_imports_inside_methods_get_ours(importing: Any) -> None:
    functions, layers = importing
    theirs = functions.scaled
    module, same = layers.Layer(), layers.Same()
    assert live_class.callers(layers.Layer)[theirs] == ("forward",)
    found = live_class.calling_class(layers.Layer, theirs, lambda x: 10 * x)
    journal = Journal()
    journal.set_class(module, found)
    x = torch.ones(1)
    assert (module(x).item(), module(x, other=True).item(), same(x).item()) == (10, 3, 2)
    assert functions.scaled is theirs
    journal.undo()
    assert type(module) is layers.Layer and module(x).item() == 2


def test_relative_import_of_a_file_without_a_package_is_no_call() -> None:
    file: dict[str, Any] = {"__name__": "alone"}
    code = "class Layer:\n    def forward(self, x):\n        from .parts import scaled\n        return scaled(x)\n"
    exec(code, file)
    assert live_class.calls(file["Layer"]) == []


def test_functions_inside_methods_get_ours(importing: Any) -> None:
    _, layers = importing
    found = live_class.calling_class(layers.Layer, layers.local, lambda x: -x)
    both = live_class.calling_class(found, importing[0].scaled, lambda x: 5 * x)
    assert found()(torch.ones(1)).item() == -2 and both()(torch.ones(1)).item() == -5
