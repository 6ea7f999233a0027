"""Sparse mixture of experts (Mixtral, arXiv 2401.04088): a router, and the gated MLPs of each token's top-k experts."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from functools import partial
from types import SimpleNamespace
from typing import Any

import torch
from torch import nn

from fastkernels.core import assemble, parallel
from fastkernels.core.spec import Axis, Call, Case, Expr, OpSpec, Permutable, Scalar, Tensor, fan_in
from fastkernels.overrides.linear.parallel_linear import method_of
from fastkernels.overrides.moe import fused_experts as experts
from fastkernels.overrides.routing import topk_softmax as router

SHARDS = ("w1", "w2", "w3")  # gate, down and up projection in Mixtral's checkpoints and in vLLM


def reference(
    x: torch.Tensor, gate: torch.Tensor, w1: torch.Tensor, w2: torch.Tensor, top_k: int
) -> torch.Tensor:
    """x: [T, H]; gate: [E, H]; w1: [E, 2 I, H]; w2: [E, H, I]. Returns [T, H] in x's dtype."""
    acc = torch.promote_types(x.dtype, torch.float32)
    weights, ids, _ = router.reference(x.to(acc) @ gate.to(acc).t(), top_k, True)
    return experts.reference(x, w1, w2, weights, ids)


def expert_mapping(num_experts: int) -> list[tuple[str, str, int, str]]:
    """Return vLLM's expert_params_mapping for Mixtral's checkpoints: (parameter, key, expert_id, shard_id).

    A checkpoint key that contains `key` belongs to the parameter with `parameter` in its place.
    """
    return [
        ("experts.w2_" if name == "w2" else "experts.w13_", f"experts.{expert}.{name}.", expert, name)
        for expert in range(num_experts)
        for name in SHARDS
    ]


def own_experts(num_experts: int, ranks: int) -> tuple[int, int, int, int, torch.Tensor | None]:
    """Return this rank's part of the experts of `ranks` ranks: (tp_size, tp_rank, first, count, expert_map).

    It has `count` experts from `first` on, and shares their inner size with tp_size - 1 ranks. expert_map
    [num_experts]: index of each expert on this rank or -1; None if it has all, or if it is a data-parallel rank, which
    gets numbers of its own experts. Data-parallel ranks divide the experts of each group of ranks once more. Raises
    ValueError for numbers that cannot be divided.
    """
    data_rank, data_size = parallel.get_data_rank()
    groups = parallel.get_ep_size() if ranks > 1 else 1
    tp_size = parallel.divide(ranks, groups, "tensor-parallel ranks")
    count = parallel.divide(num_experts, groups * data_size, "experts")
    group, tp_rank = divmod(parallel.get_tp_rank() if ranks > 1 else 0, tp_size)
    first = (group * data_size + data_rank) * count
    if groups == 1 or data_size > 1:
        return tp_size, tp_rank, first, count, None
    at = torch.arange(num_experts, dtype=torch.int32) - first
    return tp_size, tp_rank, first, count, torch.where((at >= 0) & (at < count), at, -1)


class UnquantizedExpertsMethod:
    """Weights in floats; moe/quantized.py has the others."""

    op = "fused_experts"

    def create_weights(self, layer: Any, n: int, hidden: int, inner: int, dtype: torch.dtype) -> None:
        layer.add("w13_weight", (n, 2 * inner, hidden), dtype, 0)
        layer.add("w2_weight", (n, hidden, inner), dtype, 1)

    def process_weights_after_loading(self, layer: Any) -> None:
        """Do nothing: the op uses the tensors as they were loaded."""

    def arguments(
        self, layer: Any, x: torch.Tensor, weights: torch.Tensor, ids: torch.Tensor
    ) -> tuple[Any, ...]:
        """Return the op's arguments."""
        return x, layer.w13_weight, layer.w2_weight, weights, ids, layer.expert_map, False

    def apply(self, layer: Any, x: torch.Tensor, weights: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
        return experts.fused_experts(*self.arguments(layer, x, weights, ids))


class Experts(nn.Module):
    """The stacked weights of this rank's experts, with its shard of the intermediate size.

    Of `ranks` ranks, ep_size groups of tp_size ranks have an equal part of the experts each, by default all experts
    (parallel.get_ep_size() is 1), see own_experts. w13_weight: [E / ep_size, 2 I / tp_size, H], gate rows first;
    w2_weight: [E / ep_size, H, I / tp_size]. Quantized weights are those of weights_as, see moe/quantized.py. Raises
    ValueError for a host's quant_config and for sizes that cannot be divided.
    """

    expert_map: torch.Tensor | None
    quant_method: Any
    # Of data-parallel ranks: the sum of their experts by (own experts' function, x, weights, ids)
    over_ranks: Callable[..., torch.Tensor] | None = None

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
        self.ranks, self.prefix, self.num_experts = size, prefix, num_experts
        self.tp_size, self.tp_rank, self.first, self.count, expert_map = own_experts(num_experts, size)
        inner = parallel.divide(intermediate_size, self.tp_size, "intermediate size")
        self.register_buffer("expert_map", expert_map, persistent=False)
        self.quant_method = method_of(prefix) or UnquantizedExpertsMethod()
        dtype = params_dtype or torch.get_default_dtype()
        self.quant_method.create_weights(self, self.count, hidden_size, inner, dtype)

    def add(self, name: str, shape: tuple[int, ...], dtype: torch.dtype, shared: int | None) -> None:
        """Register an uninitialized parameter of all experts, or of shape [1] a value that is their largest.

        shared: the dimension of an expert's part that ranks share, None if each has all. Names begin with w13 or w2.
        """
        parameter = nn.Parameter(torch.empty(shape, dtype=dtype), requires_grad=False)
        parameter.weight_loader, parameter.shared = self.weight_loader, shared  # type: ignore[attr-defined]
        parameter.of_down = name.startswith("w2")  # type: ignore[attr-defined]
        self.register_parameter(name, parameter)

    def weight_loader(
        self,
        param: nn.Parameter,
        loaded_weight: torch.Tensor,
        weight_name: str = "",
        shard_id: str | None = None,
        expert_id: int | None = None,
        return_success: bool = False,
    ) -> bool | None:
        """Copy this rank's shard of one expert's 'w1', 'w2' or 'w3', or without ids of the whole stacked parameter.

        Experts of other ranks are checked and not copied.

        loaded_weight: [I, H] for w1 and w3, [H, I] for w2; without ids [E, 2 I, H] or [E, H, I]. Those of quantized
        weights are as the parameter, in which a scale of one value is repeated. Raises ValueError for unknown ids and
        other shapes.
        """
        of_down, shared = param.of_down, param.shared  # type: ignore[attr-defined]
        if shard_id is None:
            if param.dim() == 1:
                self._copy_largest(param, loaded_weight)
                return True if return_success else None
            if len(loaded_weight) != self.num_experts:
                raise ValueError(f"{self.prefix}: {len(loaded_weight)} experts, expected {self.num_experts}")
            loaded_weight = loaded_weight.narrow(0, self.first, len(param))
            parts = (loaded_weight,) if of_down else loaded_weight.chunk(2, dim=1)
            into = (param.data,) if of_down else param.data.chunk(2, dim=1)
            for mine, whole in zip(into, parts, strict=True):
                self._copy(mine, whole, None if shared is None else shared + 1)
        else:
            if shard_id not in SHARDS or (shard_id == "w2") != of_down:
                raise ValueError(f"{self.prefix}: shard id {shard_id!r} does not belong to this parameter")
            if expert_id is None or not 0 <= expert_id < self.num_experts:
                raise ValueError(f"{self.prefix}: expert {expert_id} is not in 0 .. {self.num_experts - 1}")
            if param.dim() == 1:
                self._copy_largest(param, loaded_weight)
                return True if return_success else None
            here = self.first <= expert_id < self.first + len(param)
            mine = param.data[expert_id - self.first] if here else torch.empty_like(param[0], device="meta")
            if shard_id != "w2":
                mine = mine.chunk(2, dim=0)[shard_id == "w3"]
            if mine.dim() == 1 and loaded_weight.numel() == 1:  # the scale of a whole matrix
                mine.copy_(loaded_weight.reshape(1).expand(mine.shape))
            else:
                self._copy(mine, loaded_weight, shared)
        return True if return_success else None

    def _copy(self, into: torch.Tensor, loaded: torch.Tensor, dim: int | None) -> None:
        """Copy this rank's shard of `loaded` along `dim`, all of it without one."""
        expected = list(into.shape)
        if dim is not None:
            expected[dim] *= self.tp_size
        if list(loaded.shape) != expected:
            where = (
                ""
                if dim is None
                else f" ({into.shape[dim]} of dimension {dim} on each of {self.tp_size} ranks)"
            )
            raise ValueError(
                f"{self.prefix or 'Experts'}: weight of shape {tuple(loaded.shape)} does not fit, expected"
                f" {tuple(expected)}{where}"
            )
        into.copy_(
            loaded if dim is None else loaded.narrow(dim, self.tp_rank * into.shape[dim], into.shape[dim])
        )

    def _copy_largest(self, param: nn.Parameter, loaded: torch.Tensor) -> None:
        if loaded.numel() != 1:
            raise ValueError(f"{self.prefix or 'Experts'}: expected one value")
        if not loaded.is_meta:
            param.data.copy_(torch.maximum(param.data, loaded.to(param).reshape(1)))

    def compute(
        self, hidden_states: torch.Tensor, topk_weights: torch.Tensor, topk_ids: torch.Tensor
    ) -> torch.Tensor:
        """Return the weighted sum of this rank's experts, not yet summed over the ranks that share the layer.

        Of data-parallel ranks it is the sum over these.
        """
        if self.over_ranks is None:
            return self.quant_method.apply(self, hidden_states, topk_weights, topk_ids)
        own = partial(self.quant_method.apply, self)
        return self.over_ranks(own, hidden_states, topk_weights, topk_ids)

    def forward(
        self, hidden_states: torch.Tensor, topk_weights: torch.Tensor, topk_ids: torch.Tensor
    ) -> torch.Tensor:
        out = self.compute(hidden_states, topk_weights, topk_ids)
        return parallel.all_reduce(out) if self.ranks > 1 else out


class SparseMoE(nn.Module):
    """Router and experts: maps hidden_states [..., hidden_size] to the same shape, summed over the ranks."""

    hidden_size: int
    top_k: int
    gate: nn.Module
    experts: Experts

    def _forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        x = hidden_states.view(-1, self.hidden_size)
        router_logits, _ = self.gate(x)
        weights, ids, _ = router.topk_softmax(router_logits, self.top_k, True)
        return self.experts(x, weights, ids).view(hidden_states.shape)


def _decide(x: torch.Tensor, gate: torch.Tensor, top_k: int, generator: torch.Generator) -> None:
    """Redraw tokens whose last chosen and first unchosen expert are so close that rounding decides between them.

    Either choice is correct, but the outputs differ. Logits in 16 bits are off by up to 1 / 256 of their size. Tokens
    and gates that the judge scales and rounds again are off by more: the error is relative to each product, not to
    their sum.
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


def _values(call: Call) -> Mapping[str, torch.Tensor]:
    x, gate = call.tensor("x"), call.tensor("gate")
    _decide(x, gate, call["topk"], call.generator)
    return {"x": x, "gate": gate}


def _large(args: list[Any]) -> None:
    """Large values that leave the gate's logits: rounding these to bfloat16 would decide the weights of large ones."""
    args[0].mul_(64)
    args[1].mul_(1 / 64)


def _experts_hit(args: SimpleNamespace) -> int | None:
    if args.x.is_meta:
        return None
    ids = router.reference(args.x.float() @ args.gate.float().t(), args.top_k, True)[1]
    return ids.unique().numel()


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


SPEC = OpSpec(
    name="sparse_moe",
    level=2,
    by_default=True,
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
    arguments=(
        Tensor("x", "tokens hidden"),
        # Counted like fused_experts: the routing instead of the gate.
        Tensor("gate", "experts hidden", values=fan_in, bytes="8 * tokens * topk"),
        Tensor(
            "w1",
            "experts 2*intermediate hidden",
            values=fan_in,
            bytes="itemsize(dtype) * experts_hit * 2 * intermediate * hidden",
        ),
        Tensor(
            "w2",
            "experts hidden intermediate",
            values=fan_in,
            bytes="itemsize(dtype) * experts_hit * hidden * intermediate",
        ),
        Scalar("top_k", "topk"),
    ),
    outputs=(Tensor("out", "tokens hidden"),),
    axes={
        "tokens": Axis.per_call(),
        "experts": Axis.count(),
        "topk": Axis.count(),
        "hidden": Axis.width(),
        "intermediate": Axis.width(),
        "experts_hit": Axis.counted(_experts_hit, Expr("min(experts, tokens * topk)")),
    },
    constraints=("topk <= experts",),
    values=_values,
    flops="6 * tokens * topk * hidden * intermediate",
    tie_sensitive=True,
    extremes={"large": _large},
    permutable=lambda *args: Permutable(rows=(0,), columns=(0, 1)),
    build=_build,
    calls=("linear", "topk_softmax", "fused_experts"),
)
