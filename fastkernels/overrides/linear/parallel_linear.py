"""Linear layers whose weight is sharded over tensor-parallel ranks; the product is the op `linear`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from fastkernels.core import assemble
from fastkernels.core.spec import OpSpec, Target
from fastkernels.overrides.linear import linear as gemm
from fastkernels.overrides.linear.parallel_linear_base import (
    QKV,
    Column,
    MergedColumn,
    Output,
    Replicated,
    Row,
    vllm_partition,
)
from fastkernels.overrides.linear.parallel_linear_sglang import (
    SGLangColumnParallelLinear,
    SGLangColumnParallelLinear_0_5_16,
    SGLangMergedColumnParallelLinear,
    SGLangMergedColumnParallelLinear_0_5_16,
    SGLangQKVParallelLinear,
    SGLangQKVParallelLinear_0_5_16,
    SGLangReplicatedLinear,
    SGLangRowParallelLinear,
    SGLangRowParallelLinear_0_5_16,
    SGLangRowParallelLinear_0_5_17,
)

__all__ = [
    "SPEC",
    "SGLangColumnParallelLinear",
    "SGLangColumnParallelLinear_0_5_16",
    "SGLangMergedColumnParallelLinear",
    "SGLangMergedColumnParallelLinear_0_5_16",
    "SGLangQKVParallelLinear",
    "SGLangQKVParallelLinear_0_5_16",
    "SGLangReplicatedLinear",
    "SGLangRowParallelLinear",
    "SGLangRowParallelLinear_0_5_16",
    "SGLangRowParallelLinear_0_5_17",
    "VllmColumnParallelLinear",
    "VllmColumnParallelLinear_0_26",
    "VllmMergedColumnParallelLinear",
    "VllmQKVParallelLinear",
    "VllmReplicatedLinear",
    "VllmRowParallelLinear",
]


class VllmReplicatedLinear(Replicated):
    """vllm.model_executor.layers.linear.ReplicatedLinear: x [..., K] to [..., N]."""

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
    """vllm.model_executor.layers.linear.MergedColumnParallelLinear: outputs of all sizes, side by side."""

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


_NOTE = "live, the host's module stays and its quant_method is replaced: op linear"


def _target(host: str, name: str, versions: str, suffix: str = "") -> Target:
    module, ours = (
        ("vllm.model_executor.layers", "Vllm") if host == "vllm" else ("sglang.srt.layers", "SGLang")
    )
    return Target(
        host, f"{module}.linear:{name}", f"{ours}{name}{suffix}", "standalone", versions, note=_NOTE
    )


def _build(cls: type, args: list[Any]) -> Callable[[], Any]:
    x, weight, bias = assemble.filled(args, 3, None)
    rows, columns = weight.shape
    sizes: tuple[Any, ...] = (columns, rows)
    if assemble.takes(cls, "output_sizes") and not assemble.takes(cls, "output_size"):
        sizes = columns, [rows - rows // 2, rows // 2]
    elif assemble.takes(cls, "total_num_heads"):
        if rows < 3:
            raise ValueError(f"{cls.__name__} has a query, a key and a value head: more than {rows} rows")
        sizes = (columns, rows // 3, 1, 1) if rows % 3 == 0 else (columns, 1, rows - 2, 1)
    module = assemble.make(cls, x, *sizes, bias=bias is not None, params_dtype=weight.dtype, prefix="linear")
    assemble.load(module, {"weight": weight, "bias": bias})
    return lambda: module(x)[0]


SPEC = OpSpec(
    name="parallel_linear",
    level=2,
    reference=gemm.reference,
    cases=gemm.SPEC.cases,
    inputs=gemm.SPEC.inputs,
    dims_of=gemm.SPEC.dims_of,
    vary=gemm.SPEC.vary,
    build=_build,
    bytes_moved=gemm.SPEC.bytes_moved,
    flops=gemm.SPEC.flops,
    tolerance=gemm.SPEC.tolerance,
    calls=("linear",),
    targets=(
        _target("vllm", "ReplicatedLinear", ""),
        _target("vllm", "ColumnParallelLinear", "<0.32", "_0_26"),
        _target("vllm", "ColumnParallelLinear", ">=0.32"),
        _target("vllm", "MergedColumnParallelLinear", ""),
        _target("vllm", "QKVParallelLinear", ""),
        _target("vllm", "RowParallelLinear", ""),
        _target("sglang", "ReplicatedLinear", ""),
        _target("sglang", "ColumnParallelLinear", "<0.5.23", "_0_5_16"),
        _target("sglang", "ColumnParallelLinear", ">=0.5.23"),
        _target("sglang", "MergedColumnParallelLinear", "<0.5.23", "_0_5_16"),
        _target("sglang", "MergedColumnParallelLinear", ">=0.5.23"),
        _target("sglang", "QKVParallelLinear", "<0.5.23", "_0_5_16"),
        _target("sglang", "QKVParallelLinear", ">=0.5.23"),
        _target("sglang", "RowParallelLinear", "<0.5.17", "_0_5_16"),
        _target("sglang", "RowParallelLinear", ">=0.5.17,<0.5.23", "_0_5_17"),
        _target("sglang", "RowParallelLinear", ">=0.5.23"),
    ),
    baseline="cublas",
)
