"""The routing of GPT-OSS's experts in vLLM 0.26, with fewer sizes to compile.

triton_kernels 3.5.1 passes the number of tokens, rounded up to 32, to two kernels as a constant: the stride of the bit
matrix of chosen experts. Prompts of each new size then wait while both are compiled. Here the stride is a power of two.
"""

from __future__ import annotations

import inspect
import logging
import sys
from functools import cache
from typing import Any

from fk_integrations.core import versions
from fk_integrations.core.expert_layers import path_of
from fk_integrations.core.journal import Journal
from fk_integrations.vllm import experts

log = logging.getLogger("fastkernels")
MODULE = "vllm.model_executor.layers.fused_moe.experts.gpt_oss_triton_kernels_moe"
EXPERTS = f"{MODULE}:OAITritonMxfp4ExpertsMonolithic"
# Of what is called here or replaced; other sources stay unchanged
SOURCES = {
    (MODULE, "OAITritonMxfp4ExpertsMonolithic"): "cc02f8770c1c1f4a",
    (MODULE, "triton_kernel_moe_forward"): "138e5fbe8a001b8e",
    (MODULE, "triton_kernel_fused_experts"): "d739e3f075e90620",
    ("triton_kernels.routing", "routing"): "1be29858baee3fe3",
    ("triton_kernels.routing", "routing_from_bitmatrix"): "cd29a11346744ccd",
    ("triton_kernels.topk", "topk_forward"): "fca0b8cc6ad6b384",
}


def stride_of(tokens: int) -> int:
    """The stride of the bit matrix: a power of two of at least 32."""
    return max(32, 1 << (tokens - 1).bit_length())


def settle(model: Any, journal: Journal) -> int:
    """Give layers of these experts the routing of this file, noted in the journal; how many were changed."""
    kernels = [experts.experts(m) for m in model.modules() if type(m).__name__ == "RoutedExperts"]
    found = [k.fused_experts for k in kernels if path_of(getattr(k, "fused_experts", None)) == EXPERTS]
    for one in found:
        if not known():
            log.debug("the routing of MXFP4 experts has a source that is not known here, and stays")
            return 0
        host_class: Any = type(one)
        journal.set_class(one, _with_routing(host_class))
    return len(found)


@cache
def known() -> bool:
    """Whether the code that is called and replaced has the source of vLLM 0.26."""
    try:
        sources = {where: inspect.getsource(getattr(sys.modules[where[0]], where[1])) for where in SOURCES}
    except (KeyError, AttributeError, OSError, TypeError):
        return False
    return all(versions.fingerprint(source) == SOURCES[where] for where, source in sources.items())


@cache
def _with_routing(host_class: Any) -> type:
    def apply(self: Any, **call: Any) -> Any:
        if call["expert_map"] is not None or not self.renormalize:
            return host_class.apply(self, **call)
        import torch

        x, product = call["hidden_states"], sys.modules[MODULE].triton_kernel_fused_experts  # type: ignore[attr-defined]
        return product(
            torch.empty_like(x), x, call["w1"], call["w2"], *routing(call["router_logits"], self.topk),
            topk=self.topk, quant_config=self.quant_config, global_num_experts=call["global_num_experts"],
            apply_router_weight_on_input=call["apply_router_weight_on_input"],
        )  # fmt: skip

    body = {"apply": apply, "__module__": host_class.__module__, "__qualname__": host_class.__qualname__}
    return type(host_class.__name__, (host_class,), body)


def routing(logits: Any, k: int) -> tuple[Any, Any, Any]:
    """triton_kernels' routing(logits, k) with the stride of `stride_of`. logits: [T, E]."""
    from triton_kernels.routing import routing_from_bitmatrix
    from triton_kernels.tensor import Bitmatrix, Tensor
    from triton_kernels.topk import topk_forward

    tokens, n_experts = logits.shape
    # The memory is that of `stride_of(tokens)` rows; the kernel reads and writes `tokens`.
    given = Tensor(logits, shape=[tokens, n_experts], shape_max=[stride_of(tokens), n_experts])
    weights, ids, mask = topk_forward(given, k)
    bits = Bitmatrix(
        mask.storage.data[:tokens], shape=[tokens, mask.shape[1]], shape_max=[tokens, None],
        scratchpad=mask.scratchpad,
    )  # fmt: skip
    found: tuple[Any, Any, Any] = routing_from_bitmatrix(bits, weights[:tokens], ids[:tokens], n_experts, k)
    return found
