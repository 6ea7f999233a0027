"""GPT-OSS's mixture of experts: a router with a bias, and experts with biases and a clamped SwiGLU."""

from __future__ import annotations

import logging
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import nn

from fastkernels.core import parallel
from fastkernels.models.common.descriptions.description import Experts
from fastkernels.overrides.kit import mxfp4
from fastkernels.overrides.linear.vllm import VllmReplicatedLinear
from fastkernels.overrides.moe.fused_experts_swigluoai import fused_experts_swigluoai
from fastkernels.overrides.moe.sparse_moe import own_experts
from fastkernels.overrides.routing.topk_softmax import topk_softmax

log = logging.getLogger("fastkernels")
_announced = False


class StackedExperts(nn.Module):
    """This rank's experts as the checkpoint has them, with its shard of the intermediate size; see own_experts.

    In floats gate_up_proj [E, 2 I, H] and down_proj [E, H, I], both transposed in the checkpoint. In MXFP4 the same
    names with _blocks ([E, rows, columns / 32, 16] in the checkpoint, without the last axis here) and _scales. Rows of
    gate_up_proj alternate between gate and up. Raises ValueError for sizes that the ranks cannot share.
    """

    expert_map: torch.Tensor | None
    over_ranks: Callable[..., torch.Tensor] | None = None  # see sparse_moe.Experts

    def __init__(self, experts: Experts, hidden: int) -> None:
        super().__init__()
        size, self.num_experts, total = parallel.get_tp_size(), experts.count, experts.intermediate
        self.ranks, self.rank, self.first, n, expert_map = own_experts(self.num_experts, size)
        self.count = n
        self.register_buffer("expert_map", expert_map, persistent=False)
        inner = parallel.divide(total, self.ranks, "intermediate size of an expert")
        if experts.mxfp4:
            parallel.divide(
                total // mxfp4.BLOCK, self.ranks, "blocks of 32 in the intermediate size of an expert"
            )
        shapes = {"gate_up_proj": (n, 2 * inner, hidden), "down_proj": (n, hidden, inner)}
        for axis, (name, shape) in enumerate(shapes.items(), start=1):  # the axis that ranks share
            if experts.mxfp4:
                for part, size in (("blocks", 2), ("scales", mxfp4.BLOCK)):
                    made = torch.empty(*shape[:2], shape[2] // size, dtype=torch.uint8)
                    self._add(f"{name}_{part}", made, axis, packed=part == "blocks")
            else:
                self._add(name, torch.empty(shape), axis, turned=True)
        self._add("gate_up_proj_bias", torch.empty(n, 2 * inner), 1)
        self._add("down_proj_bias", torch.empty(n, hidden), None)

    def _add(
        self, name: str, made: torch.Tensor, axis: int | None, packed: bool = False, turned: bool = False
    ) -> None:
        parameter = nn.Parameter(made, requires_grad=False)
        parameter.weight_loader = partial(self._load, axis=axis, packed=packed, turned=turned)  # type: ignore[attr-defined]
        parameter.turned = turned  # type: ignore[attr-defined]
        self.register_parameter(name, parameter)

    def _load(
        self, param: nn.Parameter, loaded: torch.Tensor, axis: int | None, packed: bool, turned: bool
    ) -> None:
        """Copy this rank's part. axis: the one that ranks share; None: a bias that the first of them adds for all."""
        if packed and loaded.dim() == 4 and loaded.shape[-1] == mxfp4.BLOCK // 2:
            loaded = loaded.flatten(-2)
        elif turned and loaded.dim() == 3 and not (loaded.is_meta and loaded.shape == param.shape):
            loaded = loaded.transpose(1, 2)
        expected = [self.num_experts, *param.shape[1:]]
        if axis is not None:
            expected[axis] *= self.ranks
        if list(loaded.shape) != expected:
            raise ValueError(f"as values of all ranks it must have the shape {tuple(expected)}")
        if param.dtype == torch.uint8 and not packed and not loaded.is_meta and loaded.eq(255).any():
            raise ValueError("it has a scale that is NaN")
        loaded = loaded.narrow(0, self.first, len(param))
        if axis is not None:
            loaded = loaded.narrow(axis, self.rank * param.shape[axis], param.shape[axis])
        param.data.copy_(loaded) if axis is not None or self.rank == 0 else param.data.zero_()

    def dequantize(self, dtype: torch.dtype) -> None:
        """Replace MXFP4 matrices by floats."""
        for name in ("gate_up_proj", "down_proj"):
            packed, scales = (getattr(self, f"{name}_{part}") for part in ("blocks", "scales"))
            made = torch.empty(*packed.shape[:2], 2 * packed.shape[2], dtype=dtype, device=packed.device)
            for into, values, factors in zip(made, packed, scales, strict=True):
                into.copy_(mxfp4.dequantize(values, factors, dtype))
            for part in ("blocks", "scales"):
                delattr(self, f"{name}_{part}")
            self.register_parameter(name, nn.Parameter(made, requires_grad=False))

    def weights(self) -> tuple[Any, Any, Any, Any]:
        """w1, w2, w1_scale and w2_scale of fused_experts_swigluoai."""
        if hasattr(self, "gate_up_proj"):
            return self.gate_up_proj, self.down_proj, None, None
        return (
            self.gate_up_proj_blocks,
            self.down_proj_blocks,
            self.gate_up_proj_scales,
            self.down_proj_scales,
        )


class ClampedExperts(nn.Module):
    """The mixture of experts of a description: x [T, H] to the same."""

    def __init__(self, experts: Experts, hidden: int, prefix: str) -> None:
        super().__init__()
        assert experts.clamped is not None
        self.top_k, self.normalize, (self.alpha, self.limit) = (
            experts.top_k,
            experts.normalize,
            experts.clamped,
        )
        self.router = VllmReplicatedLinear(hidden, experts.count, bias=True, prefix=f"{prefix}.router")
        self.experts = StackedExperts(experts, hidden)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        scores, _ = self.router(x)
        weights, ids, _ = topk_softmax(scores, self.top_k, self.normalize)

        def own(x: torch.Tensor, weights: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
            return fused_experts_swigluoai(*self.arguments(x, weights, ids))

        over = self.experts.over_ranks
        out = own(x, weights, ids) if over is None else over(own, x, weights, ids)
        return parallel.all_reduce(out)

    def arguments(self, x: torch.Tensor, weights: torch.Tensor, ids: torch.Tensor) -> tuple[Any, ...]:
        """Return the arguments of fused_experts_swigluoai."""
        e, (w1, w2, *scales) = self.experts, self.experts.weights()
        biases = e.gate_up_proj_bias, e.down_proj_bias
        return x, w1, w2, *biases, weights, ids, *scales, e.expert_map, self.alpha, self.limit

    def loaded(self, dtype: torch.dtype) -> None:
        """Called once all weights are loaded: a CPU decodes MXFP4 once and not in each step."""
        global _announced
        if "gate_up_proj_blocks" not in self.experts._parameters or self.router.weight.device.type != "cpu":
            return
        if not _announced:
            log.warning(
                "MXFP4 experts are dequantized to %s at load: there is no MXFP4 kernel for a CPU", dtype
            )
            _announced = True
        self.experts.dequantize(dtype)
