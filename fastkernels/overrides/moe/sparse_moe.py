"""Sparse mixture of experts (Mixtral, arXiv 2401.04088): a router, and the gated MLPs of each token's top-k experts."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import nn

from fastkernels.core import assemble, parallel
from fastkernels.core.spec import Case, OpSpec, Permutable, Target
from fastkernels.overrides.linear.parallel_linear import SGLangReplicatedLinear, VllmReplicatedLinear
from fastkernels.overrides.moe import fused_experts as experts
from fastkernels.overrides.moe.topk_softmax import reference as topk_softmax_reference
from fastkernels.overrides.moe.topk_softmax import topk_softmax

SHARDS = ("w1", "w2", "w3")  # gate, down and up projection, as Mixtral's checkpoints and vLLM call them


def reference(
    x: torch.Tensor, gate: torch.Tensor, w1: torch.Tensor, w2: torch.Tensor, top_k: int
) -> torch.Tensor:
    """x: [T, H]; gate: [E, H]; w1: [E, 2 I, H]; w2: [E, H, I]. Returns [T, H] in x's dtype."""
    acc = torch.promote_types(x.dtype, torch.float32)
    weights, ids, _ = topk_softmax_reference(x.to(acc) @ gate.to(acc).t(), top_k, True)
    return experts.reference(x, w1, w2, weights, ids)


def expert_mapping(num_experts: int) -> list[tuple[str, str, int, str]]:
    """vLLM's expert_params_mapping for checkpoints of Mixtral's kind: (parameter, key, expert_id, shard_id), where
    a key that has the second part belongs into the parameter that has the first in its place.
    """
    return [
        ("experts.w2_" if name == "w2" else "experts.w13_", f"experts.{expert}.{name}.", expert, name)
        for expert in range(num_experts)
        for name in SHARDS
    ]


class Experts(nn.Module):
    """The stacked weights of all experts: this rank's part of the intermediate size.

    w13_weight [E, 2 I / tp_size, H], the gates' rows first; w2_weight [E, H, I / tp_size]. Raises ValueError for
    quantized weights and sizes that cannot be divided.
    """

    def __init__(
        self,
        num_experts: int,
        hidden_size: int,
        intermediate_size: int,
        params_dtype: torch.dtype | None = None,
        quant_config: Any = None,
        tp_size: int | None = None,
        prefix: str = "",
    ) -> None:
        super().__init__()
        if quant_config is not None:
            raise ValueError(f"{prefix or 'Experts'}: quantized weights ({quant_config!r}) are not supported")
        size = parallel.get_tp_size() if tp_size is None else tp_size
        if size not in (1, parallel.get_tp_size()):
            raise ValueError(
                f"{prefix or 'Experts'}: tp_size {size} is neither 1 nor the group's {parallel.get_tp_size()}"
            )
        self.tp_size, self.tp_rank, self.prefix = size, parallel.get_tp_rank() if size > 1 else 0, prefix
        inner = parallel.divide(intermediate_size, size, "intermediate size")
        dtype = params_dtype or torch.get_default_dtype()
        self.w13_weight = nn.Parameter(
            torch.empty(num_experts, 2 * inner, hidden_size, dtype=dtype), requires_grad=False
        )
        self.w2_weight = nn.Parameter(
            torch.empty(num_experts, hidden_size, inner, dtype=dtype), requires_grad=False
        )
        for parameter in (self.w13_weight, self.w2_weight):
            parameter.weight_loader = self.weight_loader  # type: ignore[attr-defined]

    def weight_loader(
        self,
        param: nn.Parameter,
        loaded_weight: torch.Tensor,
        weight_name: str = "",
        shard_id: str | None = None,
        expert_id: int | None = None,
        return_success: bool = False,
    ) -> bool | None:
        """Copy this rank's part of one expert's 'w1', 'w2' or 'w3'; without ids, of the whole stacked parameter.

        loaded_weight: [I, H] for w1 and w3, [H, I] for w2; or [E, 2 I, H], [E, H, I]. Raises ValueError for another
        id or shape.
        """
        if shard_id is None:
            parts = loaded_weight.chunk(2, dim=1) if param is self.w13_weight else (loaded_weight,)
            into = param.data.chunk(2, dim=1) if param is self.w13_weight else (param.data,)
            for mine, whole in zip(into, parts, strict=True):
                self._copy(mine, whole, 1 if param is self.w13_weight else 2)
        else:
            if shard_id not in SHARDS or (shard_id == "w2") != (param is self.w2_weight):
                raise ValueError(f"{self.prefix}: shard id {shard_id!r} is not of this parameter")
            if expert_id is None or not 0 <= expert_id < param.shape[0]:
                raise ValueError(f"{self.prefix}: expert {expert_id} is not in 0 .. {param.shape[0] - 1}")
            mine = param.data[expert_id]
            if shard_id != "w2":
                mine = mine.chunk(2, dim=0)[shard_id == "w3"]
            self._copy(mine, loaded_weight, 1 if shard_id == "w2" else 0)
        return True if return_success else None

    def _copy(self, into: torch.Tensor, loaded: torch.Tensor, dim: int) -> None:
        """Copy the rank's part of `loaded` along `dim`."""
        expected = list(into.shape)
        expected[dim] *= self.tp_size
        if list(loaded.shape) != expected:
            raise ValueError(
                f"{self.prefix or 'Experts'}: weight of shape {tuple(loaded.shape)} does not fit, expected"
                f" {tuple(expected)} ({into.shape[dim]} of dimension {dim} on each of {self.tp_size} ranks)"
            )
        into.copy_(loaded.narrow(dim, self.tp_rank * into.shape[dim], into.shape[dim]))

    def forward(
        self, hidden_states: torch.Tensor, topk_weights: torch.Tensor, topk_ids: torch.Tensor
    ) -> torch.Tensor:
        out = experts.fused_experts(
            hidden_states, self.w13_weight, self.w2_weight, topk_weights, topk_ids, None, False
        )
        return parallel.all_reduce(out) if self.tp_size > 1 else out


class _MixtralMoE(nn.Module):
    """MixtralMoE of vLLM and SGLang: hidden_states [..., hidden_size] to the same shape, summed over the ranks."""

    hidden_size: int
    top_k: int
    gate: nn.Module
    experts: Experts

    def _forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        x = hidden_states.view(-1, self.hidden_size)
        router_logits, _ = self.gate(x)
        weights, ids, _ = topk_softmax(router_logits, self.top_k, True)
        return self.experts(x, weights, ids).view(hidden_states.shape)


class VllmMixtralMoE(_MixtralMoE):
    """vllm.model_executor.models.mixtral.MixtralMoE; see _MixtralMoE.

    Raises ValueError for dp_size over 1 and enable_eplb, which need vLLM's own expert parallelism.
    """

    def __init__(
        self,
        num_experts: int,
        top_k: int,
        hidden_size: int,
        intermediate_size: int,
        params_dtype: torch.dtype | None = None,
        quant_config: Any = None,
        tp_size: int | None = None,
        dp_size: int | None = None,
        prefix: str = "",
        enable_eplb: bool = False,
    ) -> None:
        super().__init__()
        if dp_size not in (None, 1) or enable_eplb:
            raise ValueError(f"{prefix}: dp_size={dp_size} and enable_eplb={enable_eplb} are not supported")
        self.hidden_size, self.top_k = hidden_size, top_k
        self.gate = VllmReplicatedLinear(
            hidden_size, num_experts, bias=False, params_dtype=params_dtype, prefix=f"{prefix}.gate"
        )
        self.experts = Experts(
            num_experts, hidden_size, intermediate_size, params_dtype, quant_config, tp_size, f"{prefix}.experts"
        )  # fmt: skip

    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        return self._forward(hidden_states)


class SGLangMixtralMoE_0_5_17(_MixtralMoE):
    """sglang.srt.models.mixtral.MixtralMoE before 0.5.23; see _MixtralMoE. As in the host, tp_size is not read."""

    def __init__(
        self,
        num_experts: int,
        top_k: int,
        hidden_size: int,
        intermediate_size: int,
        layer_id: int,
        params_dtype: torch.dtype | None = None,
        quant_config: Any = None,
        tp_size: int | None = None,
        prefix: str = "",
    ) -> None:
        super().__init__()
        self.hidden_size, self.top_k = hidden_size, top_k
        self.gate = SGLangReplicatedLinear(
            hidden_size, num_experts, bias=False, params_dtype=params_dtype, prefix=f"{prefix}.gate"
        )
        self.experts = Experts(
            num_experts, hidden_size, intermediate_size, params_dtype, quant_config, None, f"{prefix}.experts"
        )  # fmt: skip

    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        return self._forward(hidden_states)


class SGLangMixtralMoE(SGLangMixtralMoE_0_5_17):
    """sglang.srt.models.mixtral.MixtralMoE from 0.5.23 on; see _MixtralMoE."""

    def __init__(
        self,
        num_experts: int,
        top_k: int,
        hidden_size: int,
        intermediate_size: int,
        layer_id: int,
        params_dtype: torch.dtype | None = None,
        quant_config: Any = None,
        prefix: str = "",
    ) -> None:
        super().__init__(
            num_experts, top_k, hidden_size, intermediate_size, layer_id, params_dtype, quant_config, None, prefix
        )  # fmt: skip


def _decide(x: torch.Tensor, gate: torch.Tensor, top_k: int, generator: torch.Generator) -> None:
    """Draw tokens anew whose last expert and the first one left out are so close that rounding decides between them.

    Whichever such a token goes to, it is right, and its output is another one. Logits of 16 bits are off by up to
    1 / 256 of themselves, and those of tokens and gates that the judge scaled and rounded anew by more: each of their
    products by so much of itself, however little is left of the sum.
    """
    if top_k >= gate.shape[0]:
        return
    wide = gate.float().norm(dim=1).max() / math.sqrt(x.shape[1])
    for _ in range(100):
        best = (x.float() @ gate.float().t()).topk(top_k + 1).values
        size = best.abs().amax(dim=-1) + wide * x.float().norm(dim=1)
        close = best[:, -2] - best[:, -1] < size / 64
        if not (found := int(close.sum())):
            return
        x[close] = torch.randn(found, x.shape[1], generator=generator, device=x.device).to(x.dtype)


def _inputs(case: Case, device: str, generator: torch.Generator) -> list:
    x, w1, w2 = experts.SPEC.inputs(case, device, generator)[:3]
    gate = torch.randn(w1.shape[0], x.shape[1], generator=generator, device=device) / math.sqrt(x.shape[1])
    gate = gate.to(x.dtype)
    _decide(x, gate, case.dims["topk"], generator)
    return [x, gate, w1, w2, case.dims["topk"]]


def _dims(
    x: torch.Tensor, gate: torch.Tensor, w1: torch.Tensor, w2: torch.Tensor, top_k: int
) -> dict[str, Any]:
    sizes = {"tokens": x.shape[0], "experts": gate.shape[0], "topk": top_k}
    sizes |= {"hidden": w2.shape[1], "intermediate": w2.shape[2]}
    if x.is_meta:
        return sizes
    ids = topk_softmax_reference(x.float() @ gate.float().t(), top_k, True)[1]
    return {**sizes, "experts_hit": ids.unique().numel()}


def _build(cls: type, args: list[Any]) -> Callable[[], Any]:
    x, gate, w1, w2, top_k = args
    layer = {"layer_id": 0} if assemble.takes(cls, "layer_id") else {}
    sizes = gate.shape[0], top_k, w2.shape[1], w2.shape[2]
    module = assemble.make(cls, x, *sizes, params_dtype=w1.dtype, prefix="moe", **layer)
    named = {"gate.weight": gate, "experts.w13_weight": w1, "experts.w2_weight": w2}
    return partial(assemble.load(module, named), x)


def _case(
    name: str,
    tokens: int,
    experts: int,
    topk: int,
    hidden: int,
    intermediate: int,
    tag: str,
    dtype: str = "float32",
) -> Case:
    dims = {
        "tokens": tokens,
        "experts": experts,
        "topk": topk,
        "hidden": hidden,
        "intermediate": intermediate,
    }
    return Case(name, dims, dtype, tags=(tag,))


_VLLM, _SGLANG = "vllm.model_executor.models.mixtral:MixtralMoE", "sglang.srt.models.mixtral:MixtralMoE"
_NOTE = "in a live host the experts are the host's own layer, which keeps its weights in its kernel's layout"

SPEC = OpSpec(
    name="sparse_moe",
    level=2,
    reference=reference,
    cases=(
        *(case for case in experts.SPEC.cases if "model" in case.tags),
        _case("odd_63", 63, 5, 2, 72, 130, "odd"),
        _case("one", 1, 1, 1, 1, 1, "odd"),
        _case("odd_5", 5, 12, 3, 100, 63, "odd"),
        _case("all", 70, 2, 2, 65, 33, "odd"),
        _case("many", 9, 60, 8, 40, 24, "odd"),
        _case("wide", 3, 6, 1, 257, 40, "odd"),
        _case("none", 0, 4, 2, 64, 48, "odd"),
        _case("rounded", 200, 8, 2, 256, 64, "odd", "bfloat16"),
    ),
    inputs=_inputs,
    dims_of=_dims,
    vary=experts.vary,
    tie_sensitive=True,
    permutable=lambda *args: Permutable(rows=(0,), columns=(0, 1)),
    build=_build,
    bytes_moved=experts.SPEC.bytes_moved,
    flops=experts.SPEC.flops,
    calls=("linear", "topk_softmax", "fused_experts"),
    targets=(
        Target("vllm", _VLLM, "VllmMixtralMoE", "standalone", note=_NOTE),
        Target("sglang", _SGLANG, "SGLangMixtralMoE_0_5_17", "standalone", "<0.5.23", note=_NOTE),
        Target("sglang", _SGLANG, "SGLangMixtralMoE", "standalone", ">=0.5.23", note=_NOTE),
    ),
)
