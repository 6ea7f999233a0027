"""vLLM's classes and functions of linear layers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from fastkernels.core.spec import Target
from fastkernels.overrides.kit.fp8 import FP8
from fastkernels.overrides.kit.fp8_arguments import refuse
from fastkernels.overrides.linear.kernels.linear_fp8_scales import BLOCK, blocks, holder_of
from fastkernels.overrides.linear.linear import UnquantizedLinearMethod, linear
from fastkernels.overrides.linear.linear_fp8 import linear_fp8
from fastkernels.overrides.linear.parallel_linear import (
    QKV,
    Column,
    MergedColumn,
    Output,
    Replicated,
    Row,
    vllm_partition,
)


class VllmUnquantizedLinearMethod_0_26(UnquantizedLinearMethod):
    """vllm.model_executor.layers.linear.UnquantizedLinearMethod of 0.26: weight [N, K], applied by the op `linear`."""

    replaces = "vllm.model_executor.layers.linear.UnquantizedLinearMethod"

    def apply(self, layer: Any, x: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        if layer.weight.dim() != 2:  # packed, on a CPU: only the host's product can read it
            return layer.cpu_linear(x, layer.weight, bias)
        return linear(x, layer.weight, bias)


class VllmUnquantizedLinearMethod(VllmUnquantizedLinearMethod_0_26):
    """vllm.model_executor.layers.linear.UnquantizedLinearMethod from 0.32; see VllmUnquantizedLinearMethod_0_26."""

    def __init__(self) -> None:
        super().__init__()


class VllmReplicatedLinear(Replicated):
    """vllm.model_executor.layers.linear.ReplicatedLinear: x [..., K] to [..., N]."""

    method_class = VllmUnquantizedLinearMethod

    def __init__(
        self,
        input_size: int,
        output_size: int,
        bias: bool = True,
        skip_bias_add: bool = False,
        params_dtype: torch.dtype | None = None,
        quant_config: Any = None,
        prefix: str = "",
        *,
        return_bias: bool = True,
        disable_tp: bool = False,
    ) -> None:
        super().__init__()
        self.return_bias, self.disable_tp = return_bias, disable_tp
        self._build(
            input_size, output_size, [output_size], bias, skip_bias_add, params_dtype, quant_config, prefix,
            vllm_partition(disable_tp),
        )  # fmt: skip

    def forward(self, x: torch.Tensor) -> torch.Tensor | Output:
        return self._forward(x)


class VllmColumnParallelLinear_0_26(Column):
    """vllm.model_executor.layers.linear.ColumnParallelLinear of 0.26: input_ [..., K] to [..., N / tp_size]."""

    method_class = VllmUnquantizedLinearMethod

    def __init__(
        self,
        input_size: int,
        output_size: int,
        bias: bool = True,
        gather_output: bool = False,
        skip_bias_add: bool = False,
        params_dtype: torch.dtype | None = None,
        quant_config: Any = None,
        prefix: str = "",
        *,
        return_bias: bool = True,
        disable_tp: bool = False,
    ) -> None:
        super().__init__()
        self.return_bias, self.disable_tp, self.gather_output = return_bias, disable_tp, gather_output
        self._build_column(
            input_size,
            [output_size],
            vllm_partition(disable_tp),
            bias,
            skip_bias_add,
            params_dtype,
            quant_config,
            prefix,
        )

    def forward(self, input_: torch.Tensor) -> torch.Tensor | Output:
        return self._forward(input_)


class VllmColumnParallelLinear(Column):
    """vllm.model_executor.layers.linear.ColumnParallelLinear: input_ [..., K] to [..., N / tp_size]."""

    method_class = VllmUnquantizedLinearMethod

    def __init__(
        self,
        input_size: int,
        output_size: int,
        bias: bool = True,
        gather_output: bool = False,
        skip_bias_add: bool = False,
        params_dtype: torch.dtype | None = None,
        quant_config: Any = None,
        prefix: str = "",
        *,
        return_bias: bool = True,
        disable_tp: bool = False,
        tp_rank: int | None = None,
        tp_size: int | None = None,
    ) -> None:
        super().__init__()
        self.return_bias, self.disable_tp, self.gather_output = return_bias, disable_tp, gather_output
        self._build_column(
            input_size,
            [output_size],
            vllm_partition(disable_tp, tp_rank, tp_size),
            bias,
            skip_bias_add,
            params_dtype,
            quant_config,
            prefix,
        )

    def forward(self, input_: torch.Tensor) -> torch.Tensor | Output:
        return self._forward(input_)


class VllmMergedColumnParallelLinear(MergedColumn):
    """vllm.model_executor.layers.linear.MergedColumnParallelLinear: concatenates outputs of all sizes."""

    method_class = VllmUnquantizedLinearMethod

    def __init__(
        self,
        input_size: int,
        output_sizes: list[int],
        bias: bool = True,
        gather_output: bool = False,
        skip_bias_add: bool = False,
        params_dtype: torch.dtype | None = None,
        quant_config: Any = None,
        prefix: str = "",
        *,
        return_bias: bool = True,
        disable_tp: bool = False,
    ) -> None:
        super().__init__()
        self.output_sizes = output_sizes
        self.return_bias, self.disable_tp, self.gather_output = return_bias, disable_tp, gather_output
        self._build_column(
            input_size,
            output_sizes,
            vllm_partition(disable_tp),
            bias,
            skip_bias_add,
            params_dtype,
            quant_config,
            prefix,
        )

    def forward(self, input_: torch.Tensor) -> torch.Tensor | Output:
        return self._forward(input_)


class VllmQKVParallelLinear(QKV):
    """vllm.model_executor.layers.linear.QKVParallelLinear: to this rank's q, k and v heads."""

    method_class = VllmUnquantizedLinearMethod

    def __init__(
        self,
        hidden_size: int,
        head_size: int,
        total_num_heads: int,
        total_num_kv_heads: int | None = None,
        bias: bool = True,
        skip_bias_add: bool = False,
        params_dtype: torch.dtype | None = None,
        quant_config: Any = None,
        prefix: str = "",
        *,
        return_bias: bool = True,
        disable_tp: bool = False,
        v_head_size: int | None = None,
    ) -> None:
        super().__init__()
        self.return_bias, self.disable_tp = return_bias, disable_tp
        self._build_qkv(
            hidden_size, head_size, total_num_heads, total_num_kv_heads, v_head_size, bias, skip_bias_add, params_dtype,
            quant_config, prefix, vllm_partition(disable_tp),
        )  # fmt: skip

    def forward(self, input_: torch.Tensor) -> torch.Tensor | Output:
        return self._forward(input_)


class VllmRowParallelLinear(Row):
    """vllm.model_executor.layers.linear.RowParallelLinear: input_ [..., K / tp_size] to [..., N]."""

    method_class = VllmUnquantizedLinearMethod

    def __init__(
        self,
        input_size: int,
        output_size: int,
        bias: bool = True,
        input_is_parallel: bool = True,
        skip_bias_add: bool = False,
        params_dtype: torch.dtype | None = None,
        reduce_results: bool = True,
        quant_config: Any = None,
        prefix: str = "",
        *,
        return_bias: bool = True,
        disable_tp: bool = False,
    ) -> None:
        super().__init__()
        self.input_is_parallel, self.reduce_results = input_is_parallel, reduce_results
        self.return_bias, self.disable_tp = return_bias, disable_tp
        self._build_row(
            input_size,
            output_size,
            vllm_partition(disable_tp),
            bias,
            skip_bias_add,
            params_dtype,
            quant_config,
            prefix,
        )

    def forward(self, input_: torch.Tensor) -> torch.Tensor | Output:
        return self._forward(input_)


class VllmCutlassFP8ScaledMMLinearKernel:
    """vllm.model_executor.kernels.linear.scaled_mm.cutlass.CutlassFP8ScaledMMLinearKernel: a layer's product.

    c and layer_param_names are the host's. The host's base class still quantizes x.
    """

    live_methods = ("apply_scaled_mm",)

    @staticmethod
    def supports(module: Any) -> str | None:
        """Return why the op does not serve this layer of the host, None if it does."""
        kernel, weight = holder_of(module).fp8_linear, module.weight
        if weight.dtype != FP8:
            return f"weight is {weight.dtype}"
        given = getattr(module, "input_size_per_partition", weight.shape[0]), kernel.logical_output_size
        if tuple(weight.shape) != given:
            return f"the host padded its weight from {given} to {tuple(weight.shape)}"
        return None

    def __init__(self, c: Any, layer_param_names: Sequence[str]) -> None:
        self.config, self.layer_param_names = c, layer_param_names

    def apply_scaled_mm(
        self,
        *,
        A: torch.Tensor,
        B: torch.Tensor,
        out_dtype: torch.dtype,
        As: torch.Tensor,
        Bs: torch.Tensor,
        bias: torch.Tensor | None,
        output_shape: list,
    ) -> torch.Tensor:
        """Multiply A [M, K] by B [K, N] with contiguous columns; scales per tensor, or per row of A and column of B."""
        # Bs is mostly [N, 1] already: then the compiler drops this view.
        return linear_fp8(A, B.t(), As, Bs.reshape(-1, 1), bias, out_dtype).view(*output_shape)


def vllm_cutlass_scaled_mm(
    a: torch.Tensor, b: torch.Tensor, scale_a: torch.Tensor, scale_b: torch.Tensor, out_dtype: torch.dtype,
    bias: torch.Tensor | None = None,
) -> torch.Tensor:  # fmt: skip
    """vllm._custom_ops.cutlass_scaled_mm: a [..., K] times b [K, N] with contiguous columns, in float8 e4m3.

    scale_b: [1], [N, 1] or [1, N]; per block [K / 128, N / 128].
    """
    of_blocks = tuple(scale_b.shape) == tuple(blocks(n) for n in b.shape)
    scale = scale_b.t() if of_blocks and scale_b.numel() > 1 else scale_b.reshape(-1)
    return linear_fp8(a, b.t(), scale_a, scale, bias, out_dtype)


def vllm_w8a8_triton_block_scaled_mm(
    A: torch.Tensor, B: torch.Tensor, As: torch.Tensor, Bs: torch.Tensor, block_size: list[int],
    output_dtype: torch.dtype = torch.float16,
) -> torch.Tensor:  # fmt: skip
    """vllm...quantization.utils.fp8_utils.w8a8_triton_block_scaled_mm: A [..., K] times B [N, K] transposed.

    Raises ValueError for blocks that are not 128 x 128.
    """
    if tuple(block_size) != (BLOCK, BLOCK):
        refuse("w8a8_triton_block_scaled_mm", block_size=block_size)
    return linear_fp8(A, B, As, Bs, None, output_dtype)


_UNQUANTIZED = "vllm.model_executor.layers.linear:UnquantizedLinearMethod"
_IF_FASTER = (
    "by default only where a tuned table says that ours is faster; elsewhere on CUDA the host calls cuBLAS"
)
_QUANT_METHOD = "live, the host's module stays and its quant_method is replaced: op linear"
_CUTLASS = "only where a tuned table says that ours is faster; elsewhere on CUDA the host calls CUTLASS"
_BOUND = "the host's quantized layers bind their kernel's function when they are constructed: for forks"


def _parallel(name: str, versions: str = "", suffix: str = "") -> Target:
    path, ours = f"vllm.model_executor.layers.linear:{name}", f"Vllm{name}{suffix}"
    return Target("vllm", path, ours, "standalone", versions, note=_QUANT_METHOD)


TARGETS = {
    "linear": (
        Target("vllm", _UNQUANTIZED, "VllmUnquantizedLinearMethod_0_26", "quant_method", "<0.32", False, _IF_FASTER),
        Target("vllm", _UNQUANTIZED, "VllmUnquantizedLinearMethod", "quant_method", ">=0.32", False, _IF_FASTER),
    ),
    "parallel_linear": (
        _parallel("ReplicatedLinear"),
        _parallel("ColumnParallelLinear", "<0.32", "_0_26"),
        _parallel("ColumnParallelLinear", ">=0.32"),
        _parallel("MergedColumnParallelLinear"),
        _parallel("QKVParallelLinear"),
        _parallel("RowParallelLinear"),
    ),
    "linear_fp8": (
        Target(
            "vllm", "vllm.model_executor.kernels.linear.scaled_mm.cutlass:CutlassFP8ScaledMMLinearKernel",
            "VllmCutlassFP8ScaledMMLinearKernel", "kernel", "", False, _CUTLASS,
        ),
        Target("vllm", "vllm._custom_ops:cutlass_scaled_mm", "vllm_cutlass_scaled_mm", "function", note=_BOUND),
        Target(
            "vllm", "vllm.model_executor.layers.quantization.utils.fp8_utils:w8a8_triton_block_scaled_mm",
            "vllm_w8a8_triton_block_scaled_mm", "function", note=_BOUND,
        ),
    ),
}  # fmt: skip
