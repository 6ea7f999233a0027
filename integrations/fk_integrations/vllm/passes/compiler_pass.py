"""A pass of vLLM's compiler. Imports vLLM; fusions.py adds it."""

from __future__ import annotations

import inspect
from typing import Any

import torch
from vllm.compilation.passes.inductor_pass import InductorPass, get_pass_context

from fastkernels.core import dispatch
from fk_integrations.vllm.passes import fx_fusions, fx_gated_products, fx_products, fx_sums, plain_forms
from fk_integrations.vllm.passes.fx_gated_products import Prompts
from fk_integrations.vllm.passes.fx_sums import Sums
from fk_integrations.vllm.passes.unchanged import Counts

dispatch.only_overload = True  # which vLLM's compiler can compile


def _least_tokens() -> int:
    """Tokens of the smallest batch of the graph that is compiled; 1 if vLLM compiles one graph for all."""
    try:
        return int(get_pass_context().compile_range.start)
    except AssertionError:  # CompilationMode.DYNAMO_TRACE_ONCE has no ranges
        return 1


class RewriteOps(InductorPass):
    """Fuses our norms and activations with our quantization, and changes our ops in compile ranges of long batches.

    quantization  whether it fuses
    most          the largest number of tokens in which the ops of `plain` stay ours; None: all
    prompts       in which ranges ops of ours compute products of prompts; None: in none
    sums          {vLLM's name of a group of ranks: the messages whose sum is ours}: a norm behind one is fused with it
    summed        fusions of a sum and a norm so far
    unchanged     {what the pass found and left, and why: how often}, in all graphs so far
    """

    def __init__(self, quantization: bool):
        self.quantization = quantization
        self.most: int | None = None
        self.plain: tuple[str, ...] = ()
        self.prompts: Prompts | None = None
        self.sums: dict[str, Sums] = {}
        self.summed = 0
        self.unchanged = Counts()

    def __call__(self, graph: torch.fx.Graph) -> None:
        if self.quantization:
            fx_fusions.fuse_quantization(graph, self.unchanged)
        start = _least_tokens()
        self.summed += fx_sums.fuse(graph, self.sums, start, self.unchanged)
        prompts = self.prompts if self.prompts is not None and start > self.prompts.more_than else None
        if prompts is not None and prompts.shapes:
            fx_gated_products.fuse(graph, prompts.shapes, self.unchanged)
        if self.most is not None and start > self.most:
            plain_forms.use_plain_forms(graph, self.plain, self.unchanged)
        if prompts is not None:
            fx_products.use_ours(graph, prompts.products, self.unchanged)

    def uuid(self) -> str:
        files = map(inspect.getsource, (fx_fusions, fx_gated_products, fx_products, fx_sums, plain_forms))
        of, prompts = self.prompts, None
        if of is not None:
            prompts = [of.more_than, *(sorted(map(str, shapes)) for shapes in (of.shapes, of.products))]
        return InductorPass.hash_dict({
            "source": InductorPass.hash_source(*files), "quantization": self.quantization, "most": self.most,
            "plain": list(self.plain), "prompts": prompts, "sums": sorted(map(str, self.sums.items())),
        })  # fmt: skip

    def __deepcopy__(self, memo: dict[int, Any]) -> RewriteOps:
        return self  # vLLM copies its settings with the model's class; `most` is known only after the weights
