"""vLLM's classes of rotary embeddings, patched in a model, against the host's own PyTorch code and tables."""

import inspect
from types import SimpleNamespace

import pytest
import torch
from fk_integrations.patching.apply import apply
from fk_integrations.vllm.host import VllmAdapter
from support.hosts.ropes import rope_inputs, rope_options
from vllm.config import VllmConfig, set_current_vllm_config

from fastkernels.core import registry
from fastkernels.core.dispatch import OPS
from fastkernels.patch import Request

PATHS = [t.path for t in registry.get("rotary_emb").targets_for("vllm", VllmAdapter().version)]


@pytest.fixture(autouse=True)
def configured():
    config = VllmConfig()
    config.model_config = SimpleNamespace(max_model_len=64)
    with set_current_vllm_config(config), torch.no_grad():
        yield


def host_class(path):
    module, _, name = path.partition(":")
    return getattr(__import__(module, fromlist=[name]), name)


@pytest.mark.parametrize("neox", [True, False])
@pytest.mark.parametrize("path", PATHS, ids=lambda p: p.partition(":")[2])
def test_patched_module_is_the_hosts(path, neox):
    cls = host_class(path)
    if "LongRoPE" in path and not neox:
        pytest.skip("the host has halves only")
    for dtype in (torch.float32, torch.bfloat16):
        model = torch.nn.ModuleDict({"rope": cls(**rope_options(cls, dtype, is_neox_style=neox))})
        arguments = [rope_inputs(cls, dtype)]
        if "mrope_section" in inspect.signature(cls).parameters:
            arguments.append([torch.randint(64, (3, 7)), *rope_inputs(cls, dtype)[1:]])
        for inputs in arguments:
            expected = getattr(model["rope"], "forward_native", model["rope"].forward)(
                *[t.clone() for t in inputs]
            )
            patched = apply(VllmAdapter(), model, Request("patch", ops=["rotary_emb"]), 0)
            assert [r["modules"] for r in patched.report() if r["host_class"] == cls.__name__] == [1]
            found = model["rope"](*[t.clone() for t in inputs])
            assert OPS["rotary_emb"].calls == 1 and not OPS["rotary_emb"].fallbacks
            tolerance = {"rtol": 0.02, "atol": 0.02} if dtype is torch.bfloat16 else {}
            torch.testing.assert_close(found, expected, **tolerance)
            patched.undo()
            assert type(model["rope"]) is cls


@pytest.mark.parametrize("path", PATHS, ids=lambda p: p.partition(":")[2])
def test_standalone_table_is_the_hosts(path):
    theirs = host_class(path)
    (target,) = [
        t for t in registry.get("rotary_emb").targets_for("vllm", VllmAdapter().version) if t.path == path
    ]
    ours = registry.target_class(target)
    if not hasattr(theirs, "_compute_cos_sin_cache"):
        pytest.skip("it has no table")
    options = rope_options(theirs, torch.float32)
    name = "long_short_cos_sin_cache" if "LongRoPE" in path else "cos_sin_cache"
    found, expected = (getattr(cls(**options), name) for cls in (ours, theirs))
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-6)


def test_hosts_cpu_kernel_misreads_three_dimensional_queries():
    """The reason why docs/what-works.md compares DeepSeek on a CPU with transformers. Fails when vLLM mends it."""
    cls = host_class(PATHS[0])
    rope = cls(32, 32, 64, 10000.0, False, torch.float32)
    positions, query, key = rope_inputs(cls, torch.float32)
    native, _ = rope.forward_native(positions, query.clone(), key.clone())
    flat, _ = rope.forward_cpu(positions, query.flatten(1), key.flatten(1))
    torch.testing.assert_close(flat.view_as(native), native)
    wrong, _ = rope.forward_cpu(positions, query.clone(), key.clone())
    assert (wrong - native).abs().max() > 0.5
