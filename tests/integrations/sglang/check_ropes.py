"""SGLang's classes of rotary embeddings, patched in a model, against the host's own PyTorch code and tables."""

import inspect
from types import SimpleNamespace

import pytest
import torch
from fk_integrations.patching.apply import apply
from fk_integrations.sglang.scheduler import SglangAdapter
from support.hosts.ropes import rope_inputs, rope_options

from fastkernels.core import registry
from fastkernels.core.dispatch import OPS
from fastkernels.patch import Request

VERSION = SglangAdapter().version
SERVER = SimpleNamespace(server_args=SimpleNamespace(pp_size=1))
TARGETS = registry.get("rotary_emb").targets_for("sglang", VERSION)


@pytest.fixture(autouse=True)
def server_args():
    from sglang.srt.server_args import ServerArgs, set_global_server_args_for_scheduler

    set_global_server_args_for_scheduler(ServerArgs(model_path="none", device="cpu"))


def host_class(path):
    module, _, name = path.partition(":")
    return getattr(__import__(module, fromlist=[name]), name)


@pytest.mark.parametrize("neox", [True, False])
@pytest.mark.parametrize("target", TARGETS, ids=lambda t: t.cls)
def test_patched_module_is_the_hosts(target, neox):
    cls = host_class(target.path)
    if neox and "Deepseek" in target.cls:
        pytest.skip("the host's code gives an axis too many: its models are interleaved")
    if not neox and "LongRoPE" in target.cls:
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
            patched = apply(SglangAdapter(SERVER), model, Request("patch", ops=["rotary_emb"]), 0)
            assert [r["modules"] for r in patched.report() if r["host_class"] == cls.__name__] == [1]
            found = model["rope"](*[t.clone() for t in inputs])
            assert OPS["rotary_emb"].calls == 1 and not OPS["rotary_emb"].fallbacks
            torch.testing.assert_close(found, expected)
            patched.undo()
            assert type(model["rope"]) is cls


@pytest.mark.parametrize("target", TARGETS, ids=lambda t: t.cls)
def test_standalone_table_is_the_hosts(target):
    theirs = host_class(target.path)
    options = rope_options(theirs, torch.float32)
    name = "long_short_cos_sin_cache" if "LongRoPE" in target.cls else "cos_sin_cache"
    found, expected = (getattr(cls(**options), name) for cls in (registry.target_class(target), theirs))
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-6)
