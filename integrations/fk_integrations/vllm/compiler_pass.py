"""A pass of vLLM's compiler. Imports vLLM."""

from __future__ import annotations

import torch
from vllm.compilation.passes.inductor_pass import InductorPass

from fk_integrations.vllm.fx_fusions import fuse_quantization


class FuseQuantization(InductorPass):
    """Fuses our norms and activations with our quantization of their results."""

    def __call__(self, graph: torch.fx.Graph) -> None:
        fuse_quantization(graph)

    def uuid(self) -> str:
        return InductorPass.hash_source(self, fuse_quantization)
