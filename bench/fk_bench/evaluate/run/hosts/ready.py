"""Imports that the hosts' processes need on a CPU, made once before they are forked: ops, engine and patcher.

Not on a GPU, where an import that opens the device would be an error.
"""

import contextlib
import importlib

from fastkernels.core import registry
from fastkernels.patch import hosts

MODULES = (
    "torch._dynamo", "torch._functorch.aot_autograd", "fk_bench.offline.offline", "fastkernels.engine.llm",
    "fastkernels.engine.engines.llm_engine", "fastkernels.engine.execution.executor",
    "fastkernels.engine.execution.runners.generate",
    "fastkernels.engine.structured.grammars", "fk_bench.evaluate.run.hosts.text", "fk_bench.evaluate.run.hosts.images",
    "fk_integrations.patching.apply", "fk_integrations.patching.choose", "transformers.models.llama.modeling_llama",
    "transformers.generation.utils", "transformers.models.dinov2.modeling_dinov2",
)  # fmt: skip

for _name in MODULES:
    with contextlib.suppress(ImportError):
        importlib.import_module(_name)
hosts()
for _name in registry.op_names():
    for _target in registry.get(_name).targets:
        with contextlib.suppress(ImportError, AttributeError):
            registry.target_class(_target)
