"""Candidates of other benchmarks and libraries: each layout on an example, against the op's reference."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
import torch
from fk_bench.evaluate.adapters import hf_kernels, loading
from fk_bench.evaluate.adapters.sets import SetError, layout_of, read_set

from fastkernels.core import candidate, registry
from fastkernels.core.definition import definition

TRACE_OWN = """
import torch

def run(x, weight, eps, residual, cast_x_before_out_mul, out, new_residual):
    new_residual.copy_(x + residual)
    h = new_residual.float()
    out.copy_((h * torch.rsqrt(h.pow(2).mean(-1, keepdim=True) + eps)).to(x.dtype) * weight)
"""
TRACE_NORM = """
from torch.nn.functional import rms_norm

def run(hidden_states, weight):
    return rms_norm(hidden_states, weight.shape, weight, 1e-6)
"""
KERNELBENCH = """
import torch
import torch.nn as nn

class ModelNew(nn.Module):
    def __init__(self, normalized_shape):
        super().__init__()
        self.ln = nn.LayerNorm(normalized_shape=normalized_shape)

    def forward(self, x):
        return self.ln(x)
"""
LAYERS = """
import torch
import torch.nn as nn
from ._ops import normalized

class RMSNorm(nn.Module):
    weight: torch.Tensor
    variance_epsilon: float

    def forward(self, hidden_states):
        return normalized(hidden_states, self.weight, self.variance_epsilon)

class Unknown(nn.Module):
    def forward(self, x):
        return x
"""
OPS = """
def normalized(x, weight, eps):
    h = x.float()
    return (h * (h.pow(2).mean(-1, keepdim=True) + eps).rsqrt()).to(x.dtype) * weight
"""
FLASHINFER = """
import torch

def rmsnorm(x, weight, eps):
    return torch.nn.functional.rms_norm(x, weight.shape, weight, eps)

def fused_add_rmsnorm(x, residual, weight, eps):
    residual.add_(x)
    x.copy_(rmsnorm(residual, weight, eps))

gemma_rmsnorm, gemma_fused_add_rmsnorm = rmsnorm, fused_add_rmsnorm
"""
LIGER = """
from torch.nn.functional import layer_norm

def layer_norm_forward(X, W, B, eps):
    return layer_norm(X, X.shape[-1:], W, B, eps), X, None, None, 0, 0
"""


def reference(op: str):
    registry.get(op)
    return sys.modules[registry.op_modules()[op]].reference


def functions(folder: Path, out: Path, layout: str):
    """The functions of a set, by op, and why its other files are declined."""
    assert layout_of(folder) == layout
    found = read_set("theirs", folder, out)
    assert {c.layout for c in found.candidates} == {layout}
    loaded = {c.op: candidate.load(c.op, str(c.path)).function for c in found.candidates}
    for op, function in loaded.items():
        candidate.fit(function, registry.get(op).op)
    return loaded, {d.reason for d in found.declined}


def solution(definition: str, text: str, into: bool, **spec: str) -> str:
    sources = [{"path": "kernel.py", "content": text}]
    stated = {"language": "python", "entry_point": "kernel.py::run", "destination_passing_style": into} | spec
    return json.dumps({"name": "mine", "definition": definition, "spec": stated, "sources": sources})


def test_solution_for_our_own_definition_becomes_the_op(tmp_path):
    spec = registry.get("rms_norm")
    name = definition(spec)["name"]
    (tmp_path / "set").mkdir()
    (tmp_path / "set" / "mine.json").write_text(solution(name, TRACE_OWN, into=True))
    (tmp_path / "set" / "other.json").write_text(solution("gqa_paged_decode_h32", TRACE_OWN, into=True))
    (tmp_path / "set" / "cuda.json").write_text(solution(name, "", into=True, language="cuda"))
    made, declined = functions(tmp_path / "set", tmp_path / "out", "trace")
    x, residual, weight = torch.randn(5, 63), torch.randn(5, 63), torch.randn(63)
    want, total = reference("rms_norm")(x, weight, 1e-5, residual)
    torch.testing.assert_close(made["rms_norm"](x, weight, 1e-5, residual, None, True), want)
    torch.testing.assert_close(residual, total)
    assert any("gqa_paged_decode_h32 corresponds to no op" in d for d in declined)
    assert any("language 'cuda'" in d for d in declined)


def test_solution_for_an_upstream_definition_becomes_the_op(tmp_path):
    (tmp_path / "set").mkdir()
    text = "def run(A, B):\n    return {'C': A @ B.T}\n"
    (tmp_path / "set" / "gemm.json").write_text(solution("gemm_n63_k128", text, into=False))
    made, _ = functions(tmp_path / "set", tmp_path / "out", "trace")
    x, weight = torch.randn(7, 128), torch.randn(63, 128)
    torch.testing.assert_close(made["linear"](x, weight), x @ weight.T)
    with pytest.raises(NotImplementedError, match="bias"):
        made["linear"](x, weight, torch.randn(63))


def test_solution_of_the_library_s_own_model_becomes_the_op(tmp_path):
    data = pytest.importorskip("flashinfer_bench.data")
    stated = {"language": "triton", "target_hardware": ["cuda"], "entry_point": "pkg/main.py::run"}
    spec = data.BuildSpec(**stated, dependencies=["triton"], destination_passing_style=False)
    sources = [
        data.SourceFile(path=f"pkg/{name}.py", content=text)
        for name, text in {"main": "from .parts import run\n", "parts": TRACE_NORM, "__init__": "#\n"}.items()
    ]
    made = data.Solution(name="mine", definition="rmsnorm_h63", author="me", spec=spec, sources=sources)
    (tmp_path / "set").mkdir()
    (tmp_path / "set" / "mine.json").write_text(made.model_dump_json())
    found, _ = functions(tmp_path / "set", tmp_path / "out", "trace")
    x, weight = torch.randn(5, 63), torch.randn(63)
    torch.testing.assert_close(found["rms_norm"](x, weight, 1e-6), reference("rms_norm")(x, weight, 1e-6)[0])


@pytest.mark.skipif(torch.cuda.is_available(), reason="a GPU is here")
@pytest.mark.parametrize(
    ("text", "reason"),
    [
        (
            "def run(A, B):\n    raise RuntimeError('0 active drivers ([]).')\n",
            "a Triton kernel of the author needs a GPU",
        ),
        (
            "raise OSError('CUDA_HOME environment variable is not set.')\n",
            "builds a CUDA extension: it needs a GPU",
        ),
    ],
)
def test_kernel_that_needs_a_gpu_says_so(text, reason, tmp_path):
    (tmp_path / "set").mkdir()
    (tmp_path / "set" / "gemm.json").write_text(solution("gemm_n63_k128", text, into=False))
    with pytest.raises((NotImplementedError, candidate.CandidateError), match=reason):
        functions(tmp_path / "set", tmp_path / "out", "trace")[0]["linear"](
            torch.randn(7, 128), torch.randn(63, 128)
        )


def test_source_outside_of_a_solution_is_declined(tmp_path):
    document = json.loads(solution("gemm_n63_k128", "", into=False))
    document["sources"][0]["path"] = "../kernel.py"
    (tmp_path / "gemm.json").write_text(json.dumps(document))
    with pytest.raises(SetError, match="outside the solution's folder"):
        read_set("theirs", tmp_path, tmp_path / "out")


def test_model_new_becomes_the_op_of_its_problem(tmp_path):
    (tmp_path / "set").mkdir()
    (tmp_path / "set" / "40_LayerNorm.py").write_text(KERNELBENCH)
    (tmp_path / "set" / "23_Softmax.py").write_text(KERNELBENCH)
    made, declined = functions(tmp_path / "set", tmp_path / "out", "kernelbench")
    x, weight, bias = torch.randn(5, 63), torch.randn(63), torch.randn(63)
    want = reference("layer_norm")(x, weight, bias, 1e-5)
    torch.testing.assert_close(made["layer_norm"](x, weight, bias, 1e-5), want)
    with pytest.raises(NotImplementedError, match=r"an epsilon of 1e-5 \(here eps 1e-06\)"):
        made["layer_norm"](x, weight, bias, 1e-6)
    assert declined == {"problem Softmax has the mathematics of no op"}


def test_layer_of_a_hub_package_becomes_the_op(tmp_path):
    package = tmp_path / "set" / "norms" / "build" / "torch-universal" / "norms"
    package.mkdir(parents=True)
    for name, text in {"__init__": "from . import layers\n", "layers": LAYERS, "_ops": OPS}.items():
        (package / f"{name}.py").write_text(text)
    made, declined = functions(tmp_path / "set", tmp_path / "out", "hf_kernels")
    x, weight = torch.randn(5, 63), torch.randn(63)
    want, _ = reference("rms_norm")(x, weight, 1e-5)
    torch.testing.assert_close(made["rms_norm"](x, weight, 1e-5), want)
    with pytest.raises(NotImplementedError, match=r"no residual \(here a tensor \[5, 63\]\)"):
        made["rms_norm"](x, weight, 1e-5, x.clone())
    assert declined == {"layer Unknown corresponds to no op"}


VARIANT = {  # as kernel-builder writes it: the variant is the package, and a folder of its name imports it
    "__init__.py": "import torch\nfrom ._ops import ops\nfrom . import layers\n__all__ = ['layers']\n",
    "_ops.py": OPS + "\nops = None\n",
    "layers.py": LAYERS,
    "norms/__init__.py": "import ctypes\nimport sys\n",
    "metadata.json": "{}",
}


def hub_package(folder: Path, *variants: str) -> Path:
    for variant in variants:
        for name, text in VARIANT.items():
            file = folder / "norms" / "build" / variant / name
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_text(text)
    return folder


@pytest.mark.parametrize("variant", ["torch-universal", "torch-cuda", hf_kernels._here()])
def test_variant_of_a_hub_package_fits_the_machine(variant, tmp_path):
    folder = hub_package(tmp_path / "set", "torch210-metal-aarch64-darwin", variant)
    made, _ = functions(folder, tmp_path / "out", "hf_kernels")
    x, weight = torch.randn(5, 63), torch.randn(63)
    torch.testing.assert_close(made["rms_norm"](x, weight, 1e-5), reference("rms_norm")(x, weight, 1e-5)[0])
    names = {f.name for f in (tmp_path / "out").rglob("*") if f.is_file() and f.suffix != ".pyc"}
    assert names == {"rms_norm.py", "__init__.py", "_ops.py", "layers.py", "metadata.json"}


@pytest.mark.parametrize(("version", "first"), [("13.0", "torch-cuda"), (None, "torch-cpu")])
def test_variant_of_the_own_backend_comes_first(version, first, monkeypatch):
    monkeypatch.setattr(hf_kernels.torch.version, "cuda", version)
    assert min(("torch-cpu", "torch-cuda"), key=hf_kernels._rank) == first


def test_adapted_function_takes_named_arguments_without_a_gpu():
    assert loading._without_gpu(lambda x, eps: x + eps)(1, eps=2) == 3


def test_hub_package_without_a_fitting_build_is_declined(tmp_path):
    folder = hub_package(tmp_path, "torch210-metal-aarch64-darwin")
    with pytest.raises(SetError, match=f"no build for {hf_kernels._here()}; it has torch210-metal"):
        read_set("theirs", folder, tmp_path / "out")


def test_files_of_two_layouts_are_an_error(tmp_path):
    (hub_package(tmp_path, "torch-universal") / "rms_norm.py").write_text("")
    with pytest.raises(SetError, match=r"rms_norm\.py is a candidate for rms_norm, and the other files"):
        read_set("theirs", tmp_path, tmp_path / "out")


def test_library_is_a_set_by_its_name(tmp_path, monkeypatch):
    with pytest.raises(SetError, match="quack is not installed here"):
        read_set("quack", Path("quack"), tmp_path / "out")
    package = tmp_path / "site" / "liger_kernel" / "ops"
    package.mkdir(parents=True)
    for folder in (package, package.parent):
        (folder / "__init__.py").write_text("")
    (package / "layer_norm.py").write_text(LIGER)
    monkeypatch.syspath_prepend(str(package.parent.parent))
    found = read_set("liger", Path("liger"), tmp_path / "out")
    assert {"layer_norm", "rms_norm", "silu_and_mul"} <= set(found.files)
    made = candidate.load("layer_norm", found.files["layer_norm"]).function
    x, weight, bias = torch.randn(5, 63), torch.randn(63), torch.randn(63)
    want = reference("layer_norm")(x, weight, bias, 1e-5)
    torch.testing.assert_close(made(x, weight, bias, 1e-5), want)


def test_inductor_compiles_the_reference_of_each_op(tmp_path):
    found = read_set("inductor", Path("inductor"), tmp_path)
    assert set(found.files) == set(registry.op_names())
    made = candidate.load("rms_norm", found.files["rms_norm"]).function
    x, residual, weight = torch.randn(4, 64), torch.randn(4, 64), torch.randn(64)
    want, total = reference("rms_norm")(x, weight, 1e-5, residual.clone())
    torch.testing.assert_close(made(x, weight, 1e-5, residual), want)
    torch.testing.assert_close(residual, total)


def test_flashinfer_is_a_set_of_the_judge_s_own_calls(tmp_path, monkeypatch):
    """A package that stands for FlashInfer: its fused norm writes both arguments, the op's only the residual."""
    package = tmp_path / "site" / "flashinfer"
    package.mkdir(parents=True)
    (package / "__init__.py").write_text("")
    (package / "norm.py").write_text(FLASHINFER)
    monkeypatch.syspath_prepend(str(package.parent))
    found = read_set("flashinfer", Path("flashinfer"), tmp_path / "out")
    assert {"rms_norm", "silu_and_mul", "attention_decode"} <= set(found.files)
    made = candidate.load("rms_norm", found.files["rms_norm"]).function
    x, residual, weight = (torch.randn(*s, dtype=torch.bfloat16) for s in ((4, 64), (4, 64), (64,)))
    before = x.clone()
    want, total = reference("rms_norm")(x, weight, 1e-5, residual.clone())
    torch.testing.assert_close(made(x, weight, 1e-5, residual), want, rtol=0.02, atol=0.02)
    torch.testing.assert_close(residual, total)
    assert torch.equal(x, before)
    with pytest.raises(NotImplementedError, match="FlashInfer does not take this case"):
        made(x.float(), weight, 1e-5)


def test_library_functions_take_the_arguments_of_their_ops():
    from fk_bench.evaluate.adapters import fla, hf_kernels, kernelbench, liger, quack, trace

    named = [*fla.FUNCTIONS, *liger.FUNCTIONS, *quack.FUNCTIONS, *kernelbench.FUNCTIONS]
    named += [op for op, _ in (*hf_kernels.LAYERS.values(), *trace.UPSTREAM.values())]
    registry.check_names(named)


def test_folder_with_two_files_for_one_op_is_an_error(tmp_path):
    for file in ("26_GELU_.py", "88_MinGPTNewGelu.py"):
        (tmp_path / file).write_text(KERNELBENCH)
    with pytest.raises(SetError, match="are both for gelu; remove one"):
        read_set("theirs", tmp_path, tmp_path / "out")
