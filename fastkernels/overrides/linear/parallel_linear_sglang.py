"""SGLang's headers of the parallel linear layers; see parallel_linear.py."""

from __future__ import annotations

from typing import Any

import torch

from fastkernels.overrides.linear.parallel_linear_base import (
    QKV,
    Column,
    MergedColumn,
    Output,
    Replicated,
    Row,
    sglang_partition,
    vllm_partition,
)


class SGLangReplicatedLinear(Replicated):
    """sglang.srt.layers.linear.ReplicatedLinear: x [..., K] to ([..., N], bias or None)."""

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
    """sglang.srt.layers.linear.RowParallelLinear from 0.5.17 to 0.5.22: the output may be the caller's."""

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
    """The result, in the caller's memory if there is any."""
    if output is None:
        return result
    assert isinstance(result, tuple), "SGLang's layers return (out, bias)"
    if output.shape != result[0].shape:
        raise ValueError(f"output_tensor has shape {tuple(output.shape)}, expected {tuple(result[0].shape)}")
    return output.copy_(result[0]), result[1]
