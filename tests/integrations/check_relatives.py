"""Every layer class of a host that looks like one of ours has a row. No engine runs."""

import importlib
import inspect
import os
import pkgutil
import re

import pytest
from fk_integrations.core.adapter import class_path
from fk_integrations.patching.apply import absent_rows
from torch import nn

from fastkernels.core import registry
from fastkernels.core.reasons import Kind
from fastkernels.patch import Request

HOST = os.environ["CHECKED_HOST"]
LAYERS = {"vllm": "vllm.model_executor.layers", "sglang": "sglang.srt.layers"}[HOST]
FILES = {
    "vllm": ("activation", "layernorm", "rotary_embedding", "attention"),
    "sglang": ("activation", "layernorm", "rotary_embedding", "radix_attention"),
}[HOST]
# Classes of no op's family. The last one quantizes for an fp8 KV cache, and no live op replaces its base.
OTHERS = ("XIELU", "ScaledActivation", "_DecodeConcatQuantFP8")


def adapter():
    if HOST == "vllm":
        from fk_integrations.vllm.host import VllmAdapter

        return VllmAdapter()
    from fk_integrations.sglang.scheduler import SglangAdapter

    return SglangAdapter()


def made(cls):
    """A module of the class that has run no constructor of the host."""
    module = cls.__new__(cls)
    nn.Module.__init__(module)
    return module


def layer_classes():
    found = set()
    for name in FILES:
        package = importlib.import_module(f"{LAYERS}.{name}")
        files = [package]
        for info in pkgutil.iter_modules(getattr(package, "__path__", ())):
            try:
                files.append(importlib.import_module(f"{package.__name__}.{info.name}"))
            except ImportError:
                continue  # another platform's
        for file in files:
            for cls in vars(file).values():
                if isinstance(cls, type) and issubclass(cls, nn.Module) and cls.__module__ == file.__name__:
                    found.add(cls)
    return sorted(found, key=class_path)


def rows(model, ops=None):
    return absent_rows(adapter(), Request("patch", ops=ops), model, [])


def test_every_layer_that_looks_like_ours_has_a_row():
    classes = layer_classes()
    listed = {t.path for op in registry.op_names() for t in registry.get(op).targets_for(HOST)}
    listed |= {
        class_path(c) for c in classes if any(adapter().of(op).serves(made(c)) for op in registry.op_names())
    }
    expected = [c for c in classes if class_path(c) not in listed and c.__name__ not in OTHERS]
    assert len(expected) > 3
    text = "\n".join(row.reason for row in rows(nn.ModuleList(made(c) for c in classes)))
    assert [c.__name__ for c in expected if f"{c.__module__}.{c.__qualname__}," not in text] == []
    assert [p for p in listed if f"{p.replace(':', '.')}," in text] == []


@pytest.mark.skipif(HOST != "vllm", reason="vLLM's classes")
def test_subclasses_of_attention_and_sparse_gelu_have_reasons():
    from vllm.model_executor.layers.activation import GeluAndMulSparse
    from vllm.model_executor.layers.attention.chunked_local_attention import ChunkedLocalAttention
    from vllm.model_executor.layers.attention.encoder_only_attention import EncoderOnlyAttention

    chunked, encoder = made(ChunkedLocalAttention), made(EncoderOnlyAttention)
    model = nn.ModuleList([chunked, encoder, made(EncoderOnlyAttention), made(GeluAndMulSparse)])
    found = {row.op: row for row in rows(model)}
    assert set(found) == {"attention", "gelu_and_mul"}
    assert found["attention"].host_class == "Attention" and found["attention"].kinds == [Kind.OTHER_CLASS] * 2
    path = "vllm.model_executor.layers."
    assert f"2 unsupported: {path}attention.encoder_only_attention.EncoderOnlyAttention, a subclass" in (
        found["attention"].reason
    )
    sparse = f"1 unsupported: {path}activation.GeluAndMulSparse, which is not one that gelu_and_mul replaces"
    assert found["gelu_and_mul"].reason == sparse
    (row,) = rows(model, ("gelu_and_mul",))
    assert row.reason == sparse


@pytest.mark.skipif(HOST != "vllm", reason="vLLM's flat models")
def test_a_flat_model_names_functions_that_a_patch_misses():
    from vllm.models.deepseek_v32.nvidia import model as flat

    own = [c for c in vars(flat).values() if isinstance(c, type) and c.__module__ == flat.__name__]
    layer = next(c for c in own if issubclass(c, nn.Module))
    found = {row.op: row for row in rows(nn.ModuleList([made(layer)]))}
    assert found["rms_norm"].kinds == [Kind.NO_OP]
    start = "left to the host: a patch replaces modules, and the files of vllm.models.deepseek_v32 also call "
    assert found["rms_norm"].reason.startswith(start) and "rms_norm()" in found["rms_norm"].reason


@pytest.mark.skipif(HOST != "sglang", reason="SGLang's switch")
def test_a_forced_backend_leaves_leaves_to_sglang(monkeypatch):
    from sglang.srt.layers.layernorm import RMSNorm

    norm = RMSNorm(64)
    assert adapter().fused(norm, "rms_norm", norm) is None
    monkeypatch.setenv("SGLANG_FORCE_FUSED_OP_BACKEND", "torch")
    assert adapter().fused(norm, "rms_norm", norm).kind is Kind.LEFT_TO_HOST
    assert adapter().fused(norm, "linear", nn.Linear(2, 2)) is None


@pytest.mark.skipif(HOST != "vllm", reason="vLLM lists its variables")
def test_variables_that_a_benchmark_sets_exist():
    """vLLM ignores an unknown variable: a misspelled start method forked a process that had used CUDA."""
    from fk_bench.offline import vllm_process
    from vllm import envs

    ours = set(re.findall(r"\bVLLM_[A-Z0-9_]+", inspect.getsource(vllm_process)))
    assert len(ours) > 3 and ours <= {*envs.environment_variables}
