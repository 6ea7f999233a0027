"""A pass of vLLM's compiler. Imports vLLM; fusions.py adds it."""

from __future__ import annotations

import inspect
from typing import Any

import torch
from vllm.compilation.passes.inductor_pass import InductorPass, get_pass_context

from fastkernels.core import dispatch
from fk_integrations.vllm import fx_fusions, plain_forms

dispatch.only_overload = True  # which vLLM's compiler can compile


class RewriteOps(InductorPass):
    """Fuses our norms and activations with our quantization, and replaces our ops in compile ranges of long batches.

    quantization  whether it fuses
    most          the largest number of tokens in which the ops of `plain` stay ours; None: all
    """

    def __init__(self, quantization: bool):
        self.quantization = quantization
        self.most: int | None = None
        self.plain: tuple[str, ...] = ()

    def __call__(self, graph: torch.fx.Graph) -> None:
        if self.quantization:
            fx_fusions.fuse_quantization(graph)
        if self.most is not None and get_pass_context().compile_range.start > self.most:
            plain_forms.use_plain_forms(graph, self.plain)

    def uuid(self) -> str:
        return InductorPass.hash_dict({
            "source": InductorPass.hash_source(inspect.getsource(fx_fusions), inspect.getsource(plain_forms)),
            "quantization": self.quantization, "most": self.most, "plain": list(self.plain),
        })  # fmt: skip

    def __deepcopy__(self, memo: dict[int, Any]) -> RewriteOps:
        return self  # vLLM copies its settings with the model's class; `most` is known only after the weights
