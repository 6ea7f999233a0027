"""SGLang's classes and functions of linear layers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from fastkernels.core.spec import Target
from fastkernels.overrides.kit.fp8 import FP8
from fastkernels.overrides.kit.fp8_arguments import refuse
from fastkernels.overrides.linear.kernels.linear_fp8_scales import ROW, column, not_by_row
from fastkernels.overrides.linear.linear import UnquantizedLinearMethod, linear
from fastkernels.overrides.linear.linear_fp8 import linear_fp8
from fastkernels.overrides.linear.parallel_linear import (
    QKV,
    Column,
    MergedColumn,
    Output,
    Replicated,
    Row,
    sglang_partition,
    vllm_partition,
)
from fastkernels.overrides.quant.quantize_fp8 import quantize_fp8

Apply = Callable[..., torch.Tensor]
NOT_FASTER = "no tuned table says that ours is faster for this number of tokens"


class SGLangUnquantizedLinearMethod(UnquantizedLinearMethod):
    """sglang.srt.layers.quantization.unquant.UnquantizedLinearMethod: weight [N, K], applied by the op `linear`."""

    replaces = "sglang.srt.layers.quantization.unquant.UnquantizedLinearMethod"

    def apply(
        self, layer: torch.nn.Module, x: torch.Tensor, bias: torch.Tensor | None = None
    ) -> torch.Tensor:
        # In a fork: packed in place, for the host's product
        if getattr(layer, "use_intel_amx_backend", False):
            return super().apply(layer, x, bias)
        return linear(x, layer.weight, bias)

    @staticmethod
    def by_table(theirs: Apply, ours: Apply) -> Apply:
        """Return apply of a live layer, as SGLangCompressedTensorsW8A8Fp8.by_table does."""

        def apply(self: Any, layer: Any, x: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
            n, k = layer.weight.shape
            if (
                torch.compiler.is_compiling()
                or linear.requested == "named"
                or linear.winner(x.device.type, (n, k, x.dtype), (x.numel() // k,)) is not None
            ):
                return ours(self, layer, x, bias)
            linear.leave(NOT_FASTER)
            return theirs(self, layer, x, bias)

        return apply


class SGLangReplicatedLinear(Replicated):
    """sglang.srt.layers.linear.ReplicatedLinear: x [..., K] to ([..., N], bias or None)."""

    method_class = SGLangUnquantizedLinearMethod

    def __init__(
        self,
        input_size: int,
        output_size: int,
        bias: bool = True,
        skip_bias_add: bool = False,
        params_dtype: torch.dtype | None = None,
        quant_config: Any = None,
        prefix: str = "",
    ) -> None:
        super().__init__()
        self._build(
            input_size,
            output_size,
            [output_size],
            bias,
            skip_bias_add,
            params_dtype,
            quant_config,
            prefix,
            (0, 1),
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor | Output:
        return self._forward(x)


class SGLangColumnParallelLinear_0_5_16(Column):
    """sglang.srt.layers.linear.ColumnParallelLinear before 0.5.23; see VllmColumnParallelLinear."""

    method_class = SGLangUnquantizedLinearMethod

    def __init__(
        self,
        input_size: int,
        output_size: int,
        bias: bool = True,
        gather_output: bool = False,
        skip_bias_add: bool = False,
        params_dtype: torch.dtype | None = None,
        quant_config: Any = None,
        output_sizes: list[int] | None = None,
        prefix: str = "",
        tp_rank: int | None = None,
        tp_size: int | None = None,
        use_presharded_weights: bool = False,
        skip_block_quant_check: bool = False,
    ) -> None:
        super().__init__()
        self.gather_output, self.use_presharded_weights = gather_output, use_presharded_weights
        self._build_column(
            input_size,
            [output_size],
            vllm_partition(False, tp_rank, tp_size),
            bias,
            skip_bias_add,
            params_dtype,
            quant_config,
            prefix,
        )

    def forward(self, input_: torch.Tensor) -> torch.Tensor | Output:
        return self._forward(input_)


class SGLangColumnParallelLinear(Column):
    """sglang.srt.layers.linear.ColumnParallelLinear; see VllmColumnParallelLinear."""

    method_class = SGLangUnquantizedLinearMethod

    def __init__(
        self,
        input_size: int,
        output_size: int,
        bias: bool = True,
        gather_output: bool = False,
        skip_bias_add: bool = False,
        params_dtype: torch.dtype | None = None,
        quant_config: Any = None,
        output_sizes: list[int] | None = None,
        prefix: str = "",
        *,
        use_presharded_weights: bool = False,
        skip_block_quant_check: bool = False,
        parallel_group: Any = None,
    ) -> None:
        super().__init__()
        self.gather_output, self.use_presharded_weights = gather_output, use_presharded_weights
        self._build_column(
            input_size,
            [output_size],
            sglang_partition(parallel_group),
            bias,
            skip_bias_add,
            params_dtype,
            quant_config,
            prefix,
        )

    def forward(self, input_: torch.Tensor) -> torch.Tensor | Output:
        return self._forward(input_)


class SGLangMergedColumnParallelLinear_0_5_16(MergedColumn):
    """sglang.srt.layers.linear.MergedColumnParallelLinear before 0.5.23."""

    method_class = SGLangUnquantizedLinearMethod

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
        tp_rank: int | None = None,
        tp_size: int | None = None,
        use_presharded_weights: bool = False,
    ) -> None:
        super().__init__()
        self.output_sizes = output_sizes
        self.gather_output, self.use_presharded_weights = gather_output, use_presharded_weights
        self._build_column(
            input_size,
            output_sizes,
            vllm_partition(False, tp_rank, tp_size),
            bias,
            skip_bias_add,
            params_dtype,
            quant_config,
            prefix,
        )

    def forward(self, input_: torch.Tensor) -> torch.Tensor | Output:
        return self._forward(input_)


class SGLangMergedColumnParallelLinear(MergedColumn):
    """sglang.srt.layers.linear.MergedColumnParallelLinear."""

    method_class = SGLangUnquantizedLinearMethod

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
        use_presharded_weights: bool = False,
        parallel_group: Any = None,
    ) -> None:
        super().__init__()
        self.output_sizes = output_sizes
        self.gather_output, self.use_presharded_weights = gather_output, use_presharded_weights
        self._build_column(
            input_size,
            output_sizes,
            sglang_partition(parallel_group),
            bias,
            skip_bias_add,
            params_dtype,
            quant_config,
            prefix,
        )

    def forward(self, input_: torch.Tensor) -> torch.Tensor | Output:
        return self._forward(input_)


class SGLangQKVParallelLinear_0_5_16(QKV):
    """sglang.srt.layers.linear.QKVParallelLinear before 0.5.23."""

    method_class = SGLangUnquantizedLinearMethod

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
        tp_rank: int | None = None,
        tp_size: int | None = None,
        load_presharded_attn: bool = False,
        v_head_size: int | None = None,
        skip_block_quant_check: bool = False,
    ) -> None:
        super().__init__()
        self.use_presharded_weights = load_presharded_attn
        self._build_qkv(
            hidden_size, head_size, total_num_heads, total_num_kv_heads, v_head_size, bias, skip_bias_add, params_dtype,
            quant_config, prefix, vllm_partition(False, tp_rank, tp_size),
        )  # fmt: skip

    def forward(self, input_: torch.Tensor) -> torch.Tensor | Output:
        return self._forward(input_)


class SGLangQKVParallelLinear(QKV):
    """sglang.srt.layers.linear.QKVParallelLinear."""

    method_class = SGLangUnquantizedLinearMethod

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
        load_presharded_attn: bool = False,
        v_head_size: int | None = None,
        skip_block_quant_check: bool = False,
        parallel_group: Any = None,
        kv_parallel_group: Any = None,
    ) -> None:
        super().__init__()
        self.use_presharded_weights = load_presharded_attn
        self._build_qkv(
            hidden_size, head_size, total_num_heads, total_num_kv_heads, v_head_size, bias, skip_bias_add, params_dtype,
            quant_config, prefix, sglang_partition(parallel_group),
            None if kv_parallel_group is None else sglang_partition(kv_parallel_group),
        )  # fmt: skip

    def forward(self, input_: torch.Tensor) -> torch.Tensor | Output:
        return self._forward(input_)


class SGLangRowParallelLinear_0_5_16(Row):
    """sglang.srt.layers.linear.RowParallelLinear of 0.5.16."""

    method_class = SGLangUnquantizedLinearMethod

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
        tp_rank: int | None = None,
        tp_size: int | None = None,
        use_presharded_weights: bool = False,
        use_dp_attention_reduce: bool = False,
    ) -> None:
        super().__init__()
        self.input_is_parallel, self.reduce_results = input_is_parallel, reduce_results
        self.use_presharded_weights = use_presharded_weights
        self._build_row(
            input_size,
            output_size,
            vllm_partition(False, tp_rank, tp_size),
            bias,
            skip_bias_add,
            params_dtype,
            quant_config,
            prefix,
        )

    def forward(
        self, input_: torch.Tensor, skip_all_reduce: bool = False, forward_batch: Any = None
    ) -> torch.Tensor | Output:
        return self._forward(input_, skip_all_reduce)


class SGLangRowParallelLinear_0_5_17(SGLangRowParallelLinear_0_5_16):
    """sglang.srt.layers.linear.RowParallelLinear from 0.5.17 to 0.5.22, which can write to output_tensor."""

    def forward(
        self,
        input_: torch.Tensor,
        skip_all_reduce: bool = False,
        forward_batch: Any = None,
        output_tensor: torch.Tensor | None = None,
    ) -> torch.Tensor | Output:
        return _into(output_tensor, self._forward(input_, skip_all_reduce))


class SGLangRowParallelLinear(Row):
    """sglang.srt.layers.linear.RowParallelLinear; see SGLangRowParallelLinear_0_5_17."""

    method_class = SGLangUnquantizedLinearMethod

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
        use_presharded_weights: bool = False,
        use_dp_attention_reduce: bool = False,
        parallel_group: Any = None,
    ) -> None:
        super().__init__()
        self.input_is_parallel, self.reduce_results = input_is_parallel, reduce_results
        self.use_presharded_weights = use_presharded_weights
        self._build_row(
            input_size,
            output_size,
            sglang_partition(parallel_group),
            bias,
            skip_bias_add,
            params_dtype,
            quant_config,
            prefix,
        )

    def forward(
        self,
        input_: torch.Tensor,
        skip_all_reduce: bool = False,
        forward_batch: Any = None,
        output_tensor: torch.Tensor | None = None,
    ) -> torch.Tensor | Output:
        return _into(output_tensor, self._forward(input_, skip_all_reduce))


def _into(output: torch.Tensor | None, result: torch.Tensor | Output) -> torch.Tensor | Output:
    """Return the result, copied to the caller's tensor if there is one."""
    if output is None:
        return result
    assert isinstance(result, tuple), "SGLang's layers return (out, bias)"
    if output.shape != result[0].shape:
        raise ValueError(f"output_tensor has shape {tuple(output.shape)}, expected {tuple(result[0].shape)}")
    return output.copy_(result[0]), result[1]


class SGLangCompressedTensorsW8A8Fp8:
    """sglang...compressed_tensors_w8a8_fp8.CompressedTensorsW8A8Fp8 for weights with one scale per row.

    Raises ValueError for weights with one scale or with block scales, and for static scales of x.
    """

    live_methods = ("apply_weights",)

    @staticmethod
    def supports(module: Any) -> str | None:
        """Return why the op does not serve this layer of the host, None if it does."""
        scheme, weight, scale = module.scheme, module.weight, module.weight_scale
        if (reason := not_by_row(scheme)) is not None:
            return reason
        if weight.dtype != FP8 or scale.dtype != torch.float32:
            return f"weight is {weight.dtype}, its scales are {scale.dtype}"
        if not weight.t().is_contiguous() or scale.numel() != weight.shape[1]:
            return f"weight {tuple(weight.shape)} has strides {weight.stride()} and {scale.numel()} scales"
        return None

    @staticmethod
    def by_table(theirs: Apply, ours: Apply) -> Apply:
        """Return apply_weights of a live layer: `ours` where a tuned table says that it is faster, else `theirs`.

        A call of `theirs` runs no op of ours, since in eager mode the launches would cost more than the table's gain;
        the op counts it as left to the host. Explicitly requested ops always run ours, and so does code that
        torch.compile traces, where calls cannot be counted.
        """

        def apply_weights(self: Any, layer: Any, x: Any, bias: torch.Tensor | None = None) -> torch.Tensor:
            if (
                torch.compiler.is_compiling()
                or "named" in (linear_fp8.requested, quantize_fp8.requested)
                or linear_fp8.winner(*_key_of(layer.weight, x)) is not None
            ):
                return ours(self, layer, x, bias)
            linear_fp8.leave(NOT_FASTER)
            return theirs(self, layer, x, bias)

        return apply_weights

    def __init__(self, weight_quant: Any, is_static_input_scheme: bool):
        self.weight_quant = weight_quant
        self.strategy = weight_quant.strategy
        self.is_static_input_scheme = is_static_input_scheme
        self.weight_block_size = weight_quant.block_structure
        if (reason := not_by_row(self)) is not None:
            refuse("CompressedTensorsW8A8Fp8", weight_quant=reason)

    def apply_weights(self, layer: Any, x: Any, bias: torch.Tensor | None = None) -> torch.Tensor:
        """Apply the layer to x [..., K], or to a tuple of float8 values, scales and perhaps a dtype. Returns [..., N].

        layer.weight: [K, N] with contiguous columns; layer.weight_scale: [N, 1].
        """
        if isinstance(x, tuple):
            q, scale, out_dtype = x[0], x[1], x[2] if len(x) > 2 else None
        else:  # a token of zeros has scale 0, as in the host
            (q, scale), out_dtype = quantize_fp8(x, None, -1, None, 0.0), x.dtype
        return linear_fp8(q, layer.weight.t(), scale, column(layer.weight_scale), bias, out_dtype)


def _key_of(weight: torch.Tensor, x: Any) -> tuple[str, tuple[Any, ...], tuple[int]]:
    """Return device and key of linear_fp8's call for a weight [K, N], from sizes and dtypes; x as in apply_weights."""
    (k, n), values = weight.shape, x
    if isinstance(x, tuple):
        values, dtype = x[0], (x[2] if len(x) > 2 else None) or torch.bfloat16
    else:
        dtype = x.dtype
    return values.device.type, (n, k, ROW, dtype), (values.numel() // k,)


def sglang_fp8_scaled_mm(
    mat_a: torch.Tensor, mat_b: torch.Tensor, scales_a: torch.Tensor, scales_b: torch.Tensor, out_dtype: torch.dtype,
    bias: torch.Tensor | None = None,
) -> torch.Tensor:  # fmt: skip
    """sglang.kernels.ops.gemm.fp8_scaled_mm: mat_a [M, K] times mat_b [K, N]; scales per row and per column."""
    return linear_fp8(mat_a, mat_b.t(), scales_a, scales_b.reshape(-1), bias, out_dtype)


_IF_FASTER = (
    "by default only where a tuned table says that ours is faster; elsewhere on CUDA the host calls cuBLAS"
)
_QUANT_METHOD = "live, the host's module stays and its quant_method is replaced: op linear"
_SCHEME = (
    "only where a tuned table says that ours is faster; elsewhere on CUDA SGLang calls its own kernel. Layers with one"
    " scale per tensor, with block scales or with a static scale of x are left to the host"
)
_BOUND = "the host's quantized layers bind their kernel's function when they are constructed: for forks"


def _parallel(name: str, versions: str = "", suffix: str = "") -> Target:
    path, ours = f"sglang.srt.layers.linear:{name}", f"SGLang{name}{suffix}"
    return Target("sglang", path, ours, "standalone", versions, note=_QUANT_METHOD)


TARGETS = {
    "linear": (
        Target(
            "sglang", "sglang.srt.layers.quantization.unquant:UnquantizedLinearMethod",
            "SGLangUnquantizedLinearMethod", "quant_method", "", False, _IF_FASTER,
        ),
    ),
    "parallel_linear": (
        _parallel("ReplicatedLinear"),
        _parallel("ColumnParallelLinear", "<0.5.23", "_0_5_16"),
        _parallel("ColumnParallelLinear", ">=0.5.23"),
        _parallel("MergedColumnParallelLinear", "<0.5.23", "_0_5_16"),
        _parallel("MergedColumnParallelLinear", ">=0.5.23"),
        _parallel("QKVParallelLinear", "<0.5.23", "_0_5_16"),
        _parallel("QKVParallelLinear", ">=0.5.23"),
        _parallel("RowParallelLinear", "<0.5.17", "_0_5_16"),
        _parallel("RowParallelLinear", ">=0.5.17,<0.5.23", "_0_5_17"),
        _parallel("RowParallelLinear", ">=0.5.23"),
    ),
    "linear_fp8": (
        Target(
            "sglang",
            "sglang.srt.layers.quantization.compressed_tensors.schemes.compressed_tensors_w8a8_fp8"
            ":CompressedTensorsW8A8Fp8",
            "SGLangCompressedTensorsW8A8Fp8", "scheme", "", False, _SCHEME,
        ),
        Target("sglang", "sglang.kernels.ops.gemm:fp8_scaled_mm", "sglang_fp8_scaled_mm", "function", note=_BOUND),
    ),
}  # fmt: skip
