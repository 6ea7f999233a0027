"""A candidate whose kernel never runs in a compiled host, and one that compiles at each new batch size."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from fk_bench.evaluate.adapters.native import EXTENSIONS, Extension
from fk_bench.kernels.judge.processes import deployment
from torch import nn

from fastkernels.core import registry


@pytest.fixture
def extension(tmp_path: Path) -> Iterator[Extension]:
    """An extension that is already built; its function is a C++ function of torch."""
    made = Extension(tmp_path, "act", ["act.cpp"], {})
    made._module = SimpleNamespace(silu=torch._C._nn.silu)
    EXTENSIONS.append(made)
    yield made
    EXTENSIONS.remove(made)


class Act(nn.Module):
    def __init__(self, extension: Extension, leaves: bool) -> None:
        super().__init__()
        self.run, self.leaves = extension, leaves

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.leaves and torch.compiler.is_compiling():
            return F.silu(x)
        return self.run.silu(x)


@pytest.mark.parametrize(("leaves", "problem"), [(True, "under torch.compile"), (False, "")])
def test_class_that_leaves_while_traced_is_not_deployed(extension, leaves, problem):
    found = deployment.deployment(Act(extension, leaves), lambda: [torch.randn(63)])
    assert found.eager == 1
    assert problem in found.problem and bool(found.problem) == bool(problem)


@pytest.mark.parametrize("leaves", [True, False])
def test_class_of_a_candidate_is_built_and_traced(extension, leaves):
    class Theirs(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            d = x.shape[-1] // 2
            if leaves and torch.compiler.is_compiling():
                return F.silu(x[..., :d]) * x[..., d:]
            return extension.silu(x[..., :d]) * x[..., d:]

    found = deployment.of_class(registry.get("silu_and_mul"), Theirs, "cpu")
    assert ("under torch.compile" in found) is leaves and bool(found) is leaves


def test_class_without_a_kernel_to_count_passes():
    class Plain(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            d = x.shape[-1] // 2
            return F.silu(x[..., :d]) * x[..., d:]

    assert deployment.of_class(registry.get("silu_and_mul"), Plain, "cpu") == ""


def test_call_without_a_kernel_of_its_own_is_not_deployed():
    found = deployment.deployment(lambda x: F.silu(x), lambda: [torch.randn(63)])
    assert found == deployment.Deployment(0, 0) and "no kernel of the candidate" in found.problem


@pytest.mark.parametrize("dynamic", [False, True])
def test_static_sizes_compile_while_serving(dynamic):
    torch.compiler.reset()
    silu = torch.compile(lambda x: F.silu(x), backend="eager", dynamic=dynamic)
    found = deployment.compiles_while_serving(lambda n: silu(torch.randn(n, 8)), warm=(1, 2, 17), new=(3, 64))
    if dynamic:
        assert found.problem == "" and not found.compiled
    else:
        assert found.problem == "compiles while serving: 2 of 2 new batch sizes (torch.compile)"


def test_triton_and_extension_builds_are_counted(tmp_path, monkeypatch):
    import triton
    import triton.language as tl
    from torch.utils import cpp_extension
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource
    from triton.runtime.jit import JITFunction

    def copy(x, n: tl.constexpr):
        tl.store(x + tl.arange(0, n), tl.arange(0, n))

    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    source = ASTSource(JITFunction(copy), {"x": "*i32", "n": "constexpr"}, {(1,): 16})
    with deployment.compilations() as counted:
        try:
            triton.compile(source, target=GPUTarget("cuda", 90, 32))
        except RuntimeError as error:  # no ptxas here
            pytest.skip(str(error)[:100])
        with pytest.raises(Exception, match="nothing"):
            cpp_extension.load("nothing", [str(tmp_path / "nothing.cpp")], build_directory=str(tmp_path))
    assert counted == Counter({"triton": 1, "nvcc": 1})


def test_op_is_called_with_any_number_of_tokens():
    rows = []
    call = deployment.call_of(registry.get("silu_and_mul"), lambda x: rows.append(x.shape[0]), "cpu")
    for tokens in (1, 3, 77):
        call(tokens)
    assert rows == [1, 3, 77]
    assert deployment.call_of(registry.get("pool"), print, "cpu") is None
